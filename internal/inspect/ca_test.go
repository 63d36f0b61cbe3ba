package inspect_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"postern/internal/inspect"
)

func newAuthority(t *testing.T, key string) *inspect.Authority {
	t.Helper()
	a, err := inspect.NewAuthority(bytes.Repeat([]byte(key), 32))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// parse returns the only certificate in b.
func parse(t *testing.T, b []byte) *x509.Certificate {
	t.Helper()
	block, rest := pem.Decode(b)
	if block == nil || len(rest) > 0 {
		t.Fatalf("not one certificate in PEM: %q", b)
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestAuthorityIsTheSameForOneSandboxAndAnotherForEachOther(t *testing.T) {
	was := newAuthority(t, "k").CertificatePEM("isandbox1")
	if now := newAuthority(t, "k").CertificatePEM("isandbox1"); !bytes.Equal(was, now) {
		t.Error("the certificate differs after a restart of the server")
	}
	for name, other := range map[string][]byte{
		"another sandbox": newAuthority(t, "k").CertificatePEM("isandbox2"),
		"another server":  newAuthority(t, "K").CertificatePEM("isandbox1"),
	} {
		if bytes.Equal(parse(t, was).RawSubjectPublicKeyInfo, parse(t, other).RawSubjectPublicKeyInfo) {
			t.Errorf("%s has the same key", name)
		}
	}
	// Running sandboxes have it: a change of this text breaks them.
	const want = "ece6a17369eb924d9a65e99fa09bba1e642d6e03"
	if got := fmt.Sprintf("%x", parse(t, was).SubjectKeyId); got != want {
		t.Errorf("key of the authority of isandbox1 is %s, want %s", got, want)
	}
}

func TestAuthorityMaySignServersOnly(t *testing.T) {
	c := parse(t, newAuthority(t, "k").CertificatePEM("isandbox1"))
	if !c.IsCA || !c.MaxPathLenZero || c.KeyUsage != x509.KeyUsageCertSign || len(c.SubjectKeyId) != 20 || c.SerialNumber.Sign() <= 0 {
		t.Errorf("IsCA %v, MaxPathLenZero %v, KeyUsage %v, SubjectKeyId %x, serial %v", c.IsCA, c.MaxPathLenZero, c.KeyUsage, c.SubjectKeyId, c.SerialNumber)
	}
	if c.NotAfter.Before(time.Now().AddDate(10, 0, 0)) || c.NotBefore.After(time.Now().AddDate(-1, 0, 0)) {
		t.Errorf("valid from %s to %s", c.NotBefore, c.NotAfter)
	}
	if len(c.URIs) != 1 || c.URIs[0].String() != "urn:postern:sandbox:isandbox1" {
		t.Errorf("names %v, not the sandbox", c.URIs)
	}
	// The guest makes the link /etc/ssl/certs/HASH.0 by the hash of this name.
	if got := c.Subject.String(); got != "CN=Postern sandbox authority,O=Postern" {
		t.Errorf("subject %s", got)
	}
}

func TestAuthorityRefusesAnIDThatNoCertificateCanHold(t *testing.T) {
	a := newAuthority(t, "k")
	for _, id := range []string{"", strings.Repeat("i", 41)} {
		if b := a.CertificatePEM(id); b != nil {
			t.Errorf("%q: got a certificate", id)
		}
		if _, err := a.Leaf(id, "api.example.com"); err == nil {
			t.Errorf("%q: got a server certificate", id)
		}
	}
	if _, err := inspect.NewAuthority(make([]byte, 31)); err == nil {
		t.Error("a short key was accepted")
	}
}

// handshake connects a client that trusts root to a server with the certificate.
func handshake(t *testing.T, cert *tls.Certificate, root []byte, host string) (server, client error) {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(root)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		a, err := l.Accept()
		if err != nil {
			done <- err
			return
		}
		defer a.Close()
		_ = a.SetDeadline(time.Now().Add(time.Minute))
		done <- tls.Server(a, &tls.Config{Certificates: []tls.Certificate{*cert}, MinVersion: tls.VersionTLS12}).Handshake()
	}()
	b, err := net.DialTimeout("tcp", l.Addr().String(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	_ = b.SetDeadline(time.Now().Add(time.Minute))
	c := tls.Client(b, &tls.Config{RootCAs: pool, ServerName: host})
	client = c.Handshake()
	if client == nil {
		_, _ = io.ReadAll(c)
	}
	b.Close()
	return <-done, client
}

func TestOnlyTheSandboxOfALeafTrustsIt(t *testing.T) {
	a := newAuthority(t, "k")
	for _, host := range []string{"api.example.com", "API.Example.com.", "192.0.2.7", "2001:db8::7", strings.Repeat("a.", 100) + "example"} {
		leaf, err := a.Leaf("isandbox1", host)
		if err != nil {
			t.Errorf("%s: %v", host, err)
			continue
		}
		name := strings.ToLower(strings.TrimSuffix(host, "."))
		if server, err := handshake(t, leaf, a.CertificatePEM("isandbox1"), name); err != nil || server != nil {
			t.Errorf("%s: %v, %v", host, err, server)
		}
		server, err := handshake(t, leaf, a.CertificatePEM("isandbox2"), name)
		if err == nil {
			t.Errorf("%s: another sandbox trusts it", host)
		}
		if got := inspect.ClientRefusal(server); !strings.HasPrefix(got, "the client refused the sandbox's certificate") {
			t.Errorf("%s: refusal %q of %v", host, got, server)
		}
		if _, err := handshake(t, leaf, a.CertificatePEM("isandbox1"), "other.example.com"); err == nil {
			t.Errorf("%s: it is valid for another host", host)
		}
	}
}

func TestLeafIsRefusedForNamesThatSpeakForOthers(t *testing.T) {
	a := newAuthority(t, "k")
	for _, host := range []string{"", ".", "*.example.com", "a..b", "a b.example", "a\x00.example", "fe80::1%eth0", "exämple.com", strings.Repeat("a", 64) + ".example", strings.Repeat("a.", 127) + "example"} {
		if c, err := a.Leaf("isandbox1", host); err == nil {
			t.Errorf("%q: got a certificate for %v", host, c.Leaf.DNSNames)
		}
	}
}

func TestLeafIsShortLivedAndRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)))
		a := newAuthority(t, "k")
		get := func() *x509.Certificate {
			c, err := a.Leaf("isandbox1", "api.example.com")
			if err != nil {
				t.Fatal(err)
			}
			return c.Leaf
		}
		first := get()
		if now := time.Now(); first.NotBefore.After(now.Add(-time.Hour)) || first.NotAfter.Sub(first.NotBefore) > 7*24*time.Hour || first.NotAfter.Before(now) {
			t.Errorf("at %s valid from %s to %s", now, first.NotBefore, first.NotAfter)
		}
		if get() != first {
			t.Error("a second one was made at once")
		}
		time.Sleep(5*24*time.Hour + time.Minute)
		if next := get(); next == first || time.Until(next.NotAfter) < 5*24*time.Hour {
			t.Errorf("the one of a day before its end was not replaced: valid to %s", next.NotAfter)
		}
	})
}

func TestCacheOfCertificatesIsBounded(t *testing.T) {
	a := newAuthority(t, "k")
	was := a.CertificatePEM("i0")
	for i := range 600 { // more than the cache holds
		if _, err := a.Leaf(fmt.Sprintf("i%d", i%300), fmt.Sprintf("h%d.example.com", i)); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Leaf("ibusy", fmt.Sprintf("h%d.example.com", i)); err != nil {
			t.Fatal(err)
		}
	}
	if authorities, leaves := inspect.Cached(a, "ibusy"); authorities > 256 || leaves > 128 {
		t.Errorf("%d sandboxes and %d hosts of one are in the cache", authorities, leaves)
	}
	if !bytes.Equal(was, a.CertificatePEM("i0")) {
		t.Error("an authority that left the cache came back as another one")
	}
}

func TestOtherErrorsAreNoRefusalOfTheCertificate(t *testing.T) {
	for _, err := range []error{nil, net.ErrClosed, errors.New("tls: first record does not look like a TLS handshake")} {
		if got := inspect.ClientRefusal(err); got != "" {
			t.Errorf("%v: %q", err, got)
		}
	}
}

func BenchmarkLeaf(b *testing.B) {
	a, err := inspect.NewAuthority(make([]byte, 32))
	if err != nil {
		b.Fatal(err)
	}
	for i := 0; b.Loop(); i++ {
		if _, err := a.Leaf("isandbox1", fmt.Sprintf("h%d.example.com", i)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAuthority(b *testing.B) {
	a, err := inspect.NewAuthority(make([]byte, 32))
	if err != nil {
		b.Fatal(err)
	}
	for i := 0; b.Loop(); i++ {
		if a.CertificatePEM(fmt.Sprintf("i%d", i)) == nil {
			b.Fatal("no certificate")
		}
	}
}

// TestRefusalOfOpenSSLIsOne: its alert in TLS 1.3 comes before its own keys are in
// use, so it cannot be read.
func TestRefusalOfOpenSSLIsOne(t *testing.T) {
	err := fmt.Errorf("handshake: %w", &net.OpError{Op: "local error", Err: errors.New("tls: bad record MAC")})
	if got := inspect.ClientRefusal(err); !strings.HasPrefix(got, "the client refused the sandbox's certificate") {
		t.Errorf("refusal %q", got)
	}
}
