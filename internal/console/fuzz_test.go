package console

import (
	"net/url"
	"strings"
	"testing"
)

// FuzzLocalPath checks that whatever a sign-in link says, a browser that
// follows the answer stays on the console's pages.
func FuzzLocalPath(f *testing.F) {
	for _, s := range []string{
		"", "/console/", "/console/audit?verb=a%20b", "//evil.example/console/", "/\\evil.example", "https://evil.example/console/", "/console/../x",
		"/console/%2e%2e/x", "/console/..%2fx", "/console//x", "/console/\t/x", "/console/x#y", "console/", "/console/%00", "/console/?\r\nx", "/console/%zz", "/console/;/..", "\u2028/console/",
		"/console/" + strings.Repeat("\xbb", 1500),
	} {
		f.Add(s)
	}
	base, err := url.Parse("http://127.0.0.1:3000/console/signin")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, next string) {
		got := localPath(next)
		u, err := base.Parse(got)
		if err != nil {
			t.Fatalf("localPath(%q) = %q: %v", next, got, err)
		}
		if u.Host != base.Host || u.Scheme != "http" || !strings.HasPrefix(u.Path, "/console/") || !strings.HasPrefix(got, "/console/") || strings.ContainsAny(got, "\r\n\t\\\x00") {
			t.Errorf("localPath(%q) = %q, which leads to %s", next, got, u)
		}
		if again := localPath(got); again != got {
			t.Errorf("localPath(%q) = %q, and of that %q", next, got, again)
		}
	})
}
