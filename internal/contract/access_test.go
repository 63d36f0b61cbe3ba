package contract_test

import (
	"errors"
	"strings"
	"testing"

	"postern/internal/contract"
)

func TestAccess(t *testing.T) {
	c := with(t, `
files:
  read: [/data, /work/lib]
  write: [/work, /data/out]
  deny: [/data/secret, /etc/ssl]
  inputs: [{path: /work/in/*}]
`)
	for p, want := range map[string]string{
		"/data/a": "r", "/data": "r", "/data/secret": "", "/data/secret/a": "", "/data/secrets": "r", "/data/out/a": "rw",
		"/work": "rw", "/work/a": "rw", "/work/lib/x": "r", "/work/in/a": "r", "/work/in/a/b": "rw", "/workshop": "",
		"/etc/passwd": "r", "/etc/ssl/private": "", "/usr": "r", "/home": "", "/proc/1": "", "/": "", "work": "", "/work/../etc/shadow": "", "": "",
	} {
		a := c.Access(p)
		got := ""
		if a.Read {
			got = "r"
		}
		if a.Write {
			got += "w"
		}
		if got != want || a.Why == "" {
			t.Errorf("%q: %+v, want %q", p, a, want)
		}
	}
}

func TestReach(t *testing.T) {
	c := with(t, "network: {allow: [api.example.com, '*.example.org', 192.0.2.0/24, 'db.example.com:5432']}\npackages: [{manager: npm}]")
	for host, want := range map[string]bool{
		"api.example.com": true, "API.example.com.": true, "example.com": false, "a.example.org": true, "example.org": false, "192.0.2.7": true, "192.0.3.7": false,
		"registry.npmjs.org": true, "pypi.org": false, "169.254.169.254": false, "::1": false, "not a host": false,
		"api.example.com:443": true, "api.example.com:8443": false, "db.example.com": true, "db.example.com:5432": true, "db.example.com:443": false, "registry.npmjs.org:443": true, "api.example.com:x": false,
	} {
		if ok, why := c.Reach(host); ok != want || why == "" {
			t.Errorf("%s: %t, %s", host, ok, why)
		}
	}
	open := with(t, "network: {allow: [0.0.0.0/0], deny: [8.8.8.0/24]}")
	for host, want := range map[string]bool{"any.example.com": true, "8.8.8.8": false, "9.9.9.9": true, "10.0.0.1": false, "169.254.169.254": false} {
		if ok, why := open.Reach(host); ok != want {
			t.Errorf("%s: %t, %s", host, ok, why)
		}
	}
}

func TestSample(t *testing.T) {
	b, err := contract.Sample("weekly-report")
	if err != nil {
		t.Fatal(err)
	}
	c := parse(t, string(b))
	if c.Name != "weekly-report" {
		t.Errorf("name %q", c.Name)
	}
	// The commented examples must be valid too when their "#" is removed.
	var text strings.Builder
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "# "); ok && (strings.HasPrefix(rest, "  ") || strings.HasSuffix(strings.TrimSpace(rest), ":")) && !strings.Contains(rest, ". ") {
			line = rest
		}
		text.WriteString(strings.NewReplacer("    # - run", "    - run", "    #   ask", "      ask", "  # read", "  read", "  # deny", "  deny").Replace(line))
	}
	c = parse(t, text.String())
	if len(c.Network.Allow) == 0 || len(c.Credentials) == 0 || c.Mail.Inbox == "" || len(c.Packages) == 0 || len(c.Commands.Allow) != 2 || len(c.Files.Read) == 0 {
		t.Errorf("with its examples: %s", c.Canonical())
	}
	for _, name := range []string{"", "A", "a b", "a\nversion: 1", strings.Repeat("a", 64)} {
		if _, err := contract.Sample(name); !errors.Is(err, contract.ErrInvalid) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
