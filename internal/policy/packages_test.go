package policy

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
)

func TestPackagesOpenTheirRegistriesAlone(t *testing.T) {
	const site, private = "93.184.216.34", "10.1.2.3"
	npm := Egress{Packages: []string{"npm"}}
	mirror := Ceiling{Mirrors: []Mirror{{"npm", "http://mirror.corp.example:8081/npm"}}}
	for _, tt := range []struct {
		name    string
		c       Ceiling
		e       Egress
		addr    string
		host    string
		own     bool
		allowed bool
	}{
		{"within the ceiling", Ceiling{Internet: true}, npm, site + ":443", "registry.npmjs.org", false, true},
		{"the ceiling by name", Ceiling{Allow: []string{"registry.npmjs.org"}}, npm, site + ":443", "Registry.npmjs.org.", false, true},
		{"beyond the ceiling", Ceiling{}, npm, site + ":443", "registry.npmjs.org", false, false},
		{"beyond the ceiling, by the operator", Ceiling{Packages: []string{"npm"}}, npm, site + ":443", "registry.npmjs.org", false, true},
		{"by the operator, who was not asked", Ceiling{Packages: []string{"npm"}}, Egress{}, site + ":443", "registry.npmjs.org", false, false},
		{"another registry", Ceiling{Packages: []string{"npm"}}, npm, site + ":443", "pypi.org", false, false},
		{"another port", Ceiling{Packages: []string{"npm"}}, npm, site + ":22", "registry.npmjs.org", false, false},
		{"a private address", Ceiling{Packages: []string{"npm"}}, npm, private + ":443", "registry.npmjs.org", false, false},
		{"our own address", Ceiling{Packages: []string{"npm"}}, npm, site + ":443", "registry.npmjs.org", true, false},
		{"its mirror", mirror, npm, private + ":8081", "mirror.corp.example", false, true},
		{"its mirror on this machine", mirror, npm, private + ":8081", "mirror.corp.example", true, true},
		{"another port of the mirror", mirror, npm, private + ":22", "mirror.corp.example", false, false},
		{"another name of the mirror's network", mirror, npm, private + ":8081", "db.corp.example", false, false},
		{"the address of the mirror", mirror, npm, private + ":8081", "", false, false},
		{"a mirror replaces its registry", Ceiling{Internet: true, Mirrors: mirror.Mirrors}, npm, site + ":443", "registry.npmjs.org", false, false},
		{"the mirror of another registry", mirror, Egress{Packages: []string{"pypi"}}, private + ":8081", "mirror.corp.example", false, false},
		{"a wide denyOut", Ceiling{Packages: []string{"npm"}}, Egress{Packages: []string{"npm"}, DenyOut: []string{"0.0.0.0/0"}}, site + ":443", "registry.npmjs.org", false, true},
	} {
		o, err := NewOutbound(tt.e, tt.c)
		if err != nil {
			t.Fatal(err)
		}
		c := Connection{Addr: netip.MustParseAddrPort(tt.addr), Own: tt.own}
		if tt.host != "" {
			c.Names = []string{tt.host}
		}
		if v := o.Connect(c); (v.Effect == Allow) != tt.allowed {
			t.Errorf("%s: got %+v, want %v", tt.name, v, tt.allowed)
		}
		if tt.allowed {
			if v := o.Resolve(tt.host); v.Effect != Allow {
				t.Errorf("%s: the name is not resolved: %+v", tt.name, v)
			}
			if bare := (Connection{Addr: c.Addr, Own: c.Own}); !o.MayByName(bare) {
				t.Errorf("%s: no name is looked for", tt.name)
			}
		}
	}
}

func TestPackagesAreOnlyRead(t *testing.T) {
	o, err := NewOutbound(Egress{Packages: []string{"go", "npm"}}, Ceiling{Internet: true})
	if err != nil {
		t.Fatal(err)
	}
	p := o.Packages()
	for _, tt := range []struct {
		host, method, path string
		want               bool
	}{
		{"registry.npmjs.org", "GET", "/left-pad", true},
		{"registry.npmjs.org", "HEAD", "/@scope%2fname", true},
		{"registry.npmjs.org", "PUT", "/left-pad", false},
		{"registry.npmjs.org", "POST", "/-/npm/v1/security/advisories/bulk", false},
		{"registry.npmjs.org", "get", "/left-pad", false},
		{"storage.googleapis.com", "GET", "/proxy-golang-org-prod/x", true},
		{"storage.googleapis.com", "GET", "/evil/x", false},
		{"storage.googleapis.com", "GET", "/proxy-golang-org-prod/../evil/x", false},
		{"storage.googleapis.com", "GET", "/proxy-golang-org-prod/%2e%2e/evil/x", false},
		{"pypi.org", "GET", "/simple/", false},
	} {
		if v := p.Judge(tt.host, tt.method, tt.path); (v.Effect == Allow) != tt.want {
			t.Errorf("%s https://%s%s: got %+v, want %v", tt.method, tt.host, tt.path, v, tt.want)
		}
	}
}

func TestPackagesAndMirrorsAreChecked(t *testing.T) {
	if _, err := ParsePackages("npm, gems"); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "crates, debian, go, npm, pypi") {
		t.Errorf("got %v, want that it lists the known ones", err)
	}
	if got, err := ParsePackages(" pypi,npm,,npm"); err != nil || strings.Join(got, " ") != "npm pypi" {
		t.Errorf("got %q, %v", got, err)
	}
	for _, s := range []string{
		"npm", "npm=", "gems=https://a.example", "npm=ftp://a.example", "npm=https://10.0.0.1/", "npm=https://u:p@a.example", "npm=https://a.example/?x", "npm=https://a.example:0", "npm=https://a.example:99999", "npm=https://a.example/%2e",
	} {
		if m, err := ParseMirror(s); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: got %+v, %v", s, m, err)
		}
	}
	m, err := ParseMirror("npm=https://a.example/npm/")
	if err != nil {
		t.Fatal(err)
	}
	c := Ceiling{Mirrors: []Mirror{m}}
	if env := c.Environment([]string{"npm"}); env["npm_config_registry"] != "https://a.example/npm/" {
		t.Errorf("got %v", env)
	}
	if env := c.Environment([]string{"pypi"}); len(env) != 0 {
		t.Errorf("got %v for a sandbox that asked for another registry", env)
	}
}

func FuzzParseMirror(f *testing.F) {
	f.Add("npm=https://a.example:8443/npm")
	f.Add("pypi=http://[::1]/simple")
	f.Fuzz(func(t *testing.T, s string) {
		m, err := ParseMirror(s)
		if err != nil {
			return
		}
		if again, err := ParseMirror(m.Registry + "=" + m.URL); err != nil || again != m {
			t.Fatalf("%+v became %+v, %v", m, again, err)
		}
	})
}
