package inspect

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"postern/internal/inject"
)

func TestAuthoritiesOfRequests(t *testing.T) {
	for in, want := range map[string]string{
		"Example.COM.": "example.com  true", "example.com:443": "example.com 443 true", "example.com:0443": "  false", "example.com:": "  false",
		"": "  false", "a@b": "  false", "[::1]": "  false", "127.0.0.1": "  false", "example.com:99999": "  false", "a b": "  false", "exa\tmple.com": "  false", "example.com:443:443": "  false",
	} {
		host, port, ok := authority(in)
		if !ok {
			host, port = "", ""
		}
		if got := fmt.Sprintf("%s %s %v", host, port, ok); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

func TestPathsThatServersReadDifferently(t *testing.T) {
	for p, refused := range map[string]bool{
		"/": false, "/a/b.c": false, "/..a": false, "/a..": false, "/@scope%2fname": false, "/a//b": false, "/...": false, "/%41": false, "/a;v=1/b": false,
		"/.": true, "/a/..": true, "/a/%2e%2e/b": true, "/a/.%2E": true, "/a%2f..%2fb": true, `/a\..\b`: true, "/a/%5c..%5cb": true, "/%252e%252e/": true, "/..;/x": true, "/a%0ab": true, "/a%00": true, "/a%7f": true,
	} {
		u, err := url.ParseRequestURI(p)
		if err != nil {
			t.Fatal(err)
		}
		if got := ambiguousPath(u.EscapedPath(), u.Path); (got != "") != refused {
			t.Errorf("%s: got %q, want refused: %v", p, got, refused)
		}
	}
}

// FuzzPath: a path that is not refused means the same to a server that cleans it.
func FuzzPath(f *testing.F) {
	for _, s := range []string{"/", "/a/b", "/a/../b", "/a/%2e%2e/b", "/%2f..", "/..;x/", `/a\..\b`, "/%252e"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		u, err := url.ParseRequestURI(s)
		if err != nil || u.Host != "" || u.Opaque != "" || !strings.HasPrefix(s, "/") || ambiguousPath(u.EscapedPath(), u.Path) != "" {
			return
		}
		slashes := func(p string) string {
			for strings.Contains(p, "//") {
				p = strings.ReplaceAll(p, "//", "/")
			}
			return strings.TrimSuffix(p, "/")
		}
		if p := slashes(u.Path); p != "" && path.Clean(p) != p {
			t.Errorf("%q passes, and a server cleans it to %q", s, path.Clean(p))
		}
	})
}

// FuzzAuthority: what passes is a host name in its normal form.
func FuzzAuthority(f *testing.F) {
	for _, s := range []string{"example.com", "example.com:443", "EXAMPLE.com.", "a@b", "[::1]:443", ":", "a:b:c"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		host, port, ok := authority(s)
		if !ok {
			return
		}
		again, _, ok := authority(host)
		if again != host || !ok || strings.ContainsAny(host, "@/\\?# :") || strings.Trim(port, "0123456789") != "" {
			t.Errorf("%q: got %q %q", s, host, port)
		}
	})
}

func TestFieldsOfTheConnectionAreRemoved(t *testing.T) {
	h := http.Header{"Connection": {"close, x-a", "X-B"}, "X-A": {"1"}, "X-B": {"1"}, "X-C": {"1"}, "Te": {"trailers, deflate"}, "Keep-Alive": {"1"}, "Upgrade": {"h2c"}, "Proxy-Connection": {"x"}, "Trailer": {"X"}}
	stripHopByHop(h)
	if got := fmt.Sprint(h); got != "map[Te:[trailers] X-C:[1]]" {
		t.Errorf("got %s", got)
	}
	set(h, "x-c", "2")
	h["X_C"] = []string{"3"}
	set(h, "X-C", "4")
	if got := fmt.Sprint(h); got != "map[Te:[trailers] X-C:[4]]" {
		t.Errorf("got %s", got)
	}
}

func TestASentinelInAStreamIsNoticedHoweverItIsCut(t *testing.T) {
	sentinel := "pst_" + strings.Repeat("a", 40)
	secrets := []inject.Secret{{Name: "a", Sentinel: sentinel}, {Name: "none"}}
	for _, before := range []int{0, 1, 63, 64, 65, 5000} {
		text := strings.Repeat("x", before) + sentinel + strings.Repeat("y", 100)
		for name, r := range map[string]io.Reader{
			"whole": strings.NewReader(text), "by byte": iotest.OneByteReader(strings.NewReader(text)), "by half": iotest.HalfReader(strings.NewReader(text)), "in pieces": &pieces{[]byte(text), 37},
		} {
			var found []string
			got, err := io.ReadAll(&sentinelScan{r: r, secrets: secrets, found: func(s *inject.Secret) { found = append(found, s.Name) }})
			if err != nil || string(got) != text || !slices.Equal(found, []string{"a"}) {
				t.Errorf("%s after %d: got %d bytes, %v, found %q", name, before, len(got), err, found)
			}
		}
	}
	text := strings.Repeat("pst_x", 1000)
	if got, err := io.ReadAll(&sentinelScan{r: iotest.HalfReader(strings.NewReader(text)), secrets: secrets, found: func(*inject.Secret) { t.Error("found one in a text without") }}); err != nil || string(got) != text {
		t.Errorf("got %d bytes, %v of a text without a sentinel", len(got), err)
	}
}

// pieces reads n bytes at a time.
type pieces struct {
	b []byte
	n int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.b) == 0 {
		return 0, io.EOF
	}
	n := copy(b[:min(len(b), p.n)], p.b)
	p.b = p.b[n:]
	return n, nil
}
