package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestCredentials plays test/conformance/rules.mjs: the official SDK puts secrets and
// identity tokens on requests of sandboxes, against a real HTTPS server and a real
// SOCKS5 server in a network namespace. At the end it searches for what must be
// nowhere.
func TestCredentials(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestCredentials$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestCredentials") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"addr", "add", outside + "/32", "dev", "lo"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	w := newRulesWorld(t)
	s := start(t, t.TempDir(), "--dns", nameServer(t), "--egress", "allow", "--egress-allow", outside, "--egress-ca", w.ca, "--public-url", "https://issuer.rules.test", "--max-sandboxes", "20")
	w.issuer.Store("http://" + s.web)

	cmd := exec.Command("node", "--test", "--test-force-exit", "--test-reporter=spec", "../conformance/rules.mjs")
	cmd.Env = append(os.Environ(), "E2B_API_URL=http://"+s.web, "E2B_SANDBOX_URL=http://"+s.web, "E2B_API_KEY="+s.key, "RULES_ADMIN="+w.admin, "RULES_OUTSIDE="+outside, "NODE_EXTRA_CA_CERTS="+w.ca, "NO_COLOR=1")
	out, err := cmd.CombinedOutput()
	summary, failures, _ := strings.Cut(string(out), "\n✖ failing tests:")
	if err != nil {
		t.Errorf("%v\n%s\n%s", err, tail(summary, 60), tail(failures, 200))
	} else {
		t.Log(tail(strings.TrimSpace(summary), 40))
	}

	canaries := []string{"ghp_0123456789abcdefghij", "ghp_second_98765", "s3cret pass"}
	record := s.mustCLI("audit", "list", "--json")
	for _, c := range canaries {
		if strings.Contains(record, c) {
			t.Errorf("the record has %q", c)
		}
		if strings.Contains(s.log.String(), c) {
			t.Errorf("the server's log has %q", c)
		}
	}
	for _, want := range []string{"sandbox.create", "${e2b.secrets.github}"} {
		if !strings.Contains(record, want) {
			t.Errorf("the record has no %q", want)
		}
	}
	err = filepath.WalkDir(s.data, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil //nolint:nilerr // files come and go
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return nil //nolint:nilerr // likewise
		}
		for _, c := range canaries {
			if strings.Contains(string(b), c) {
				t.Errorf("%s has %q", path, c)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// A rulesWorld is what is outside in [TestCredentials].
type rulesWorld struct {
	ca    string // file of the authority of the HTTPS server, in PEM
	admin string // URL that tells what was seen

	extra   http.Handler // serves other requests than those for the issuer, if set
	issuer  atomicString
	mu      sync.Mutex
	seen    []map[string]any
	proxied []string
}

// An atomicString is a string that is set once it is known.
type atomicString struct {
	mu sync.Mutex
	s  string
}

func (a *atomicString) Store(s string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.s = s
}

func (a *atomicString) Load() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.s
}

func newRulesWorld(t *testing.T) *rulesWorld {
	t.Helper()
	w := &rulesWorld{}
	cert := w.authority(t)
	serve := func(address string, s *http.Server) net.Listener {
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		s.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug) // the handshakes that clients end
		t.Cleanup(func() { s.Close() })
		return l
	}
	web := &http.Server{Handler: http.HandlerFunc(w.serve), TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2", "http/1.1"}}}
	l := serve(outside+":443", web)
	go func() { _ = web.ServeTLS(l, "", "") }()

	admin := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		defer w.mu.Unlock()
		switch r.URL.Path {
		case "/seen":
			_ = json.NewEncoder(rw).Encode(append([]map[string]any{}, w.seen...))
			w.seen = nil
		case "/proxied":
			_ = json.NewEncoder(rw).Encode(append([]string{}, w.proxied...))
			w.proxied = nil
		}
	}))
	t.Cleanup(admin.Close)
	w.admin = admin.URL

	socks, err := net.Listen("tcp", outside+":1080")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { socks.Close() })
	go func() {
		for {
			c, err := socks.Accept()
			if err != nil {
				return
			}
			go w.socks(c)
		}
	}()
	return w
}

// serve records a request and repeats its headers in the answer. Requests for the
// issuer go to the server under test, as a proxy in front of it would send them.
func (w *rulesWorld) serve(rw http.ResponseWriter, r *http.Request) {
	if r.Host == "issuer.rules.test" {
		if u, err := url.Parse(w.issuer.Load()); err == nil {
			httputil.NewSingleHostReverseProxy(u).ServeHTTP(rw, r)
		}
		return
	}
	if w.extra != nil {
		w.extra.ServeHTTP(rw, r)
		return
	}
	w.mu.Lock()
	w.seen = append(w.seen, map[string]any{"host": r.Host, "uri": r.RequestURI, "method": r.Method, "headers": r.Header})
	w.mu.Unlock()
	_ = r.Header.Write(rw)
}

// socks serves one connection by SOCKS5 (RFC 1928, RFC 1929) to the user "agent".
func (w *rulesWorld) socks(c net.Conn) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(2 * time.Minute))
	read := func(n int) []byte {
		b := make([]byte, n)
		_, _ = io.ReadFull(c, b)
		return b
	}
	if !slices.Contains(read(int(read(2)[1])), 2) {
		_, _ = c.Write([]byte{5, 0xff})
		return
	}
	_, _ = c.Write([]byte{5, 2})
	user := read(int(read(2)[1]))
	if password := read(int(read(1)[0])); string(user) != "agent" || string(password) != "s3cret pass" {
		_, _ = c.Write([]byte{1, 1})
		return
	}
	_, _ = c.Write([]byte{1, 0})
	if head := read(4); head[3] != 1 {
		return
	}
	to := net.IP(read(4)).String()
	to = fmt.Sprintf("%s:%d", to, binary.BigEndian.Uint16(read(2)))
	up, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer up.Close()
	w.mu.Lock()
	w.proxied = append(w.proxied, to)
	w.mu.Unlock()
	_, _ = c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
	go func() {
		_, _ = io.Copy(up, c)
		up.Close()
	}()
	_, _ = io.Copy(c, up)
}

// authority makes an authority, writes its certificate to a file, and returns a
// certificate for the names of this test.
func (w *rulesWorld) authority(t *testing.T, more ...string) tls.Certificate {
	t.Helper()
	make1 := func(template, parent *x509.Certificate, signer *ecdsa.PrivateKey) ([]byte, *ecdsa.PrivateKey) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if signer == nil {
			signer = key
		}
		template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
		if err != nil {
			t.Fatal(err)
		}
		return der, key
	}
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "outside of the test"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, caKey := make1(ca, ca, nil)
	w.ca = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(w.ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "rules.test"}, DNSNames: append([]string{"*.rules.test", "rules.test", "*.eu.rules.test"}, more...),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	ld, key := make1(leaf, ca, caKey)
	return tls.Certificate{Certificate: [][]byte{ld, der}, PrivateKey: key}
}
