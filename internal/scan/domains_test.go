package scan

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/idna"
)

func TestLookalikeDomainsAreFound(t *testing.T) {
	puny := func(s string) string {
		a, err := idna.ToASCII(s)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	for _, tt := range []struct {
		name, domain, known string
		want                bool
	}{
		{"itself", "globex.example", "globex.example", false},
		{"a host of it", "mail.globex.example", "globex.example", false},
		{"it is a host", "globex.example", "mail.globex.example", false},
		{"a digit for a letter", "g1obex.example", "globex.example", true},
		{"a Cyrillic letter", puny("glоbex.example"), "globex.example", true},
		{"all Cyrillic", puny("раура.com"), "paypa.com", true},
		{"an accent", puny("glöbex.example"), "globex.example", true},
		{"rn for m", "acrne.com", "acme.com", true},
		{"another ending", "globex.co", "globex.com", true},
		{"another ending of two parts", "globex.co.uk", "globex.com", true},
		{"a letter more", "globbex.com", "globex.com", true},
		{"a letter less", "gobex.com", "globex.com", true},
		{"swapped letters", "globxe.com", "globex.com", true},
		{"a hyphen", "glo-bex.com", "globex.com", true},
		{"as a host of somebody else's", "globex.com.evil.net", "globex.com", true},
		{"with a hyphen for the dot", "globex-com.evil.net", "globex.com", true},
		{"under a public suffix of others", "globex.github.io", "globex.com", true},
		{"two edits", "glabbex.com", "globex.com", false},
		{"short names", "ibn.com", "ibm.com", false},
		{"short names under other endings", "abc.org", "abc.com", false},
		{"others", "initech.com", "globex.com", false},
	} {
		got := Alike(tt.domain, tt.known)
		if (got != "") != tt.want {
			t.Errorf("%s: Alike(%q, %q) = %q, want found %v", tt.name, tt.domain, tt.known, got, tt.want)
		}
		if got != "" && !sharesLook(tt.domain, tt.known) {
			t.Errorf("%s: %q and %q look alike, but share no key: %q, %q", tt.name, tt.domain, tt.known, Looks(tt.domain), Looks(tt.known))
		}
	}
	if s := Foreign(puny("glоbex.example")); s != "glоbex.example" {
		t.Errorf("got %q, want it as programs show it", s)
	}
	if s := Foreign("globex.example"); s != "" {
		t.Errorf("got %q for a name in ASCII", s)
	}
}

func sharesLook(a, b string) bool {
	return slices.ContainsFunc(Looks(a), func(k string) bool { return slices.Contains(Looks(b), k) })
}

// FuzzAlike: what looks alike is found by its keys, both ways, and nothing looks like
// itself.
func FuzzAlike(f *testing.F) {
	for _, s := range [][2]string{{"globex.com", "globex.co"}, {"xn--glbex-1ye.example", "globex.example"}, {"a.b.c-d.com", "c.d"}, {"", "."}, {"..com", "com"}, {"xn--", "xn--a"}} {
		f.Add(s[0], s[1])
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		a, b = strings.ToLower(a), strings.ToLower(b)
		if !plainDomain(a) || !plainDomain(b) {
			return
		}
		if s := Alike(a, a); s != "" {
			t.Fatalf("%q looks like itself: %s", a, s)
		}
		if s := Alike(a, b); s != "" && !sharesLook(a, b) && len(Looks(a)) < 100 {
			t.Fatalf("%q is like %q (%s), but they share no key", a, b, s)
		}
		Foreign(a)
	})
}

// plainDomain reports whether s is what [golang.org/x/net/idna] returns for a name: the
// callers convert names first.
func plainDomain(s string) bool {
	if s == "" || len(s) > 100 || strings.HasPrefix(s, ".") || strings.HasSuffix(s, ".") || strings.Contains(s, "..") || strings.Count(s, ".")+strings.Count(s, "-") > 5 {
		return false
	}
	return !strings.ContainsFunc(s, func(r rune) bool {
		return r != '.' && r != '-' && (r < 'a' || r > 'z') && (r < '0' || r > '9')
	})
}
