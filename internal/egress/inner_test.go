package egress

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"postern/internal/auth"
	"postern/internal/inspect"
	"postern/internal/policy"
)

// trusting returns what a program in the sandbox id trusts: the public authorities, and
// its sandbox's own, which is all that it needs here.
func trusting(t *testing.T, a *inspect.Authority, id string) *x509.CertPool {
	t.Helper()
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(a.CertificatePEM(id)) {
		t.Fatal("no certificate")
	}
	return roots
}

// TestInnerServerInTLS: https://postern.internal is who the sandbox's own programs verify
// it to be, and nobody else.
func TestInnerServerInTLS(t *testing.T) {
	authority, err := inspect.NewAuthority(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, func(c *Config) {
		c.Leaf = authority.Leaf
		c.Inner = func(who auth.Principal) http.Handler {
			return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, "you are ", who, ", TLS ", r.TLS != nil) })
		}
	})
	a, b := w.box("i1", policy.Egress{}), w.box("i2", policy.Egress{})
	for _, tc := range []struct {
		name      string
		box       *box
		sni, host string
		trusts    string
		want      string // of the answer, or of the error
	}{
		{"by name", a, "postern.internal", "postern.internal", "i1", "200 you are sandbox:i1, TLS true"},
		{"with the port", a, "postern.internal", "postern.internal:443", "i1", "200 you are sandbox:i1, TLS true"},
		{"another sandbox is another", b, "postern.internal", "postern.internal", "i2", "200 you are sandbox:i2, TLS true"},
		{"by address", a, "10.0.0.1", "10.0.0.1", "i1", "200 you are sandbox:i1, TLS true"},
		// The attacks: DNS rebinding, a server name of somebody else, another sandbox's authority.
		{"rebinding", a, "postern.internal", "evil.test", "i1", "421 "},
		{"the port of the other one", a, "postern.internal", "postern.internal:80", "i1", "421 "},
		{"another server's name", a, "bank.example", "bank.example", "i1", "internal error"},
		{"a name below", a, "x.postern.internal", "postern.internal", "i1", "internal error"},
		{"another sandbox's authority", a, "postern.internal", "postern.internal", "i2", "unknown authority"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := tls.Client(tc.box.mustDial("10.0.0.1:443"), &tls.Config{ServerName: tc.sni, RootCAs: trusting(t, authority, tc.trusts), NextProtos: []string{"h2", "http/1.1"}})
			if err := c.HandshakeContext(t.Context()); err != nil {
				if !strings.Contains(err.Error(), tc.want) {
					t.Errorf("got %v, want %q", err, tc.want)
				}
				return
			}
			got, err := get(c, "GET /mcp HTTP/1.1\r\nHost: "+tc.host+"\r\nConnection: close\r\n\r\n")
			if err != nil || !strings.HasPrefix(got, tc.want) {
				t.Errorf("got %q, %v; want %q", got, err, tc.want)
			}
		})
	}
	// Plain HTTP on the port for TLS is told so, and TLS on the port for plain HTTP fails.
	if got, err := get(a.mustDial("10.0.0.1:443"), "GET / HTTP/1.1\r\nHost: postern.internal\r\n\r\n"); err != nil || !strings.HasPrefix(got, "400 ") {
		t.Errorf("plain HTTP on port 443: %q, %v", got, err)
	}
	if err := tls.Client(a.mustDial("10.0.0.1:80"), &tls.Config{ServerName: Name, RootCAs: trusting(t, authority, "i1")}).HandshakeContext(t.Context()); err == nil {
		t.Error("TLS on port 80")
	}
}

// TestMailInTLS: the certificate on port 465, and that for STARTTLS, is for the server
// that the program asked for, by its sandbox's authority.
func TestMailInTLS(t *testing.T) {
	authority, err := inspect.NewAuthority(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, func(c *Config) { c.Leaf = authority.Leaf })
	b := w.boxFor("i1", "inb_1", policy.Egress{})
	m, err := b.ask("10.0.0.1:53", "smtp.gmail.test.", dnsmessage.TypeA)
	if err != nil || len(addrsOf(m)) != 1 {
		t.Fatalf("%+v, %v", m, err)
	}
	standIn := addrsOf(m)[0]
	for _, tt := range []struct{ name, addr, sni, want string }{
		{"the name that it asks for", standIn, "smtp.gmail.test", "smtp.gmail.test"},
		{"no name: that of the stand-in", standIn, "", "smtp.gmail.test"},
		{"no name: the address", "198.51.100.9", "", "198.51.100.9"},
		{"another name", standIn, "bank.example", "bank.example"}, // it is worth nothing elsewhere
	} {
		t.Run(tt.name, func(t *testing.T) {
			verified := func(c tls.ConnectionState) error {
				opts := x509.VerifyOptions{DNSName: tt.want, Roots: trusting(t, authority, "i1")}
				if tt.want == tt.addr {
					opts.DNSName = "[" + tt.want + "]"
				}
				if _, err := c.PeerCertificates[0].Verify(opts); err != nil {
					return err
				}
				return nil
			}
			// The client of this test sends the name it wants, or none, and verifies the name that it expects.
			conf := &tls.Config{ServerName: tt.sni, InsecureSkipVerify: true, VerifyConnection: verified}
			c := tls.Client(b.mustDial(tt.addr+":465"), conf)
			if err := c.HandshakeContext(t.Context()); err != nil {
				t.Fatal(err)
			}
			go func() { _, _ = c.Write([]byte("EHLO x\r\n")) }()
			m := <-w.mail
			if l, err := bufio.NewReader(m.conn).ReadString('\n'); l != "EHLO x\r\n" || err != nil || m.tls != nil {
				t.Errorf("got %q, %v, STARTTLS in TLS: %v", l, err, m.tls != nil)
			}
			m.conn.Close()
			close(m.over)

			c = tls.Client(b.mustDial(tt.addr+":587"), conf)
			done := make(chan error, 1)
			go func() { done <- c.HandshakeContext(t.Context()) }()
			m = <-w.mail
			if err := tls.Server(m.conn, m.tls).HandshakeContext(t.Context()); err != nil {
				t.Error(err)
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
			m.conn.Close()
			close(m.over)
		})
	}
	// What goes wrong on port 465 is on the record, with what to do about it.
	plain := b.mustDial(standIn + ":465")
	fmt.Fprint(plain, "EHLO x\r\n")
	w.wait("plain text on port 465", func(e Event) bool {
		return e.Kind == Denied && e.Name == "smtp.gmail.test" && strings.Contains(e.Reason, "did not begin with TLS")
	})
	pinned := tls.Client(b.mustDial("198.51.100.10:465"), &tls.Config{ServerName: "smtp.gmail.test", RootCAs: trusting(t, authority, "i2")})
	if err := pinned.HandshakeContext(t.Context()); err == nil {
		t.Error("another sandbox's authority is trusted")
	}
	w.wait("a client that refuses the certificate", func(e Event) bool {
		return e.Kind == Denied && e.Name == "198.51.100.10" && strings.Contains(e.Reason, "refused the sandbox's certificate")
	})
	bad := tls.Client(b.mustDial(standIn+":465"), &tls.Config{ServerName: "*.gmail.test", InsecureSkipVerify: true})
	if err := bad.HandshakeContext(t.Context()); err == nil {
		t.Error("a certificate for a wildcard")
	}
	// A sandbox without an inbox has no mail, in TLS or not.
	none := w.box("i2", policy.Egress{})
	for _, port := range []string{"25", "465", "587"} {
		if c, err := none.dial("198.51.100.9:" + port); err == nil {
			c.Close()
			t.Errorf("port %s without an inbox", port)
		}
	}
}
