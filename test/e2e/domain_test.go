package e2e

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestDomain: a server with a domain of its own gets its certificate from a
// real certificate authority, which asks the server's own DNS, and then the
// official SDK needs nothing but E2B_DOMAIN.
func TestDomain(t *testing.T) {
	ca := startAuthority(t)
	data := t.TempDir()
	flags := []string{
		"--domain", "boxes.test", "--listen-tls", ca.ip + ":443", "--listen-dns", ca.ip + ":53", "--public-address", ca.ip,
		"--acme", "--acme-directory", ca.directory, "--acme-roots", ca.own, "--listen", ca.ip + ":0",
	}
	s := start(t, data, flags...)
	roots := ca.roots(t)
	// Every name resolves at once, even those of sandboxes that do not exist.
	first := ca.leaf(t, roots, "api.boxes.test")
	ca.leaf(t, roots, "3000-iabcdefghij0123456789.boxes.test")
	ca.leaf(t, roots, "boxes.test")
	if c := ca.leaf(t, "", "sandbox.boxes.test"); !slices.Contains(c.DNSNames, "*.boxes.test") {
		t.Errorf("got a certificate for %v", c.DNSNames)
	}

	conf := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(conf, []byte("nameserver "+ca.ip+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	// In a mount namespace of its own the SDK asks this server's DNS.
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "sh", "-c", `mount --bind "$1" "$(readlink -f /etc/resolv.conf)" && exec node domain.mjs`, "sh", conf)
	_, port, _ := net.SplitHostPort(s.web)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir(), "E2B_DOMAIN=boxes.test", "E2B_API_KEY=" + s.key, "NODE_EXTRA_CA_CERTS=" + roots, "PLAIN_PORT=" + port}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, &errs)
	}
	got := map[string]any{}
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"domain": "boxes.test", "run": "hello", "code": "42", "download": "https: <h1>from inside</h1>",
		"page": "200 <h1>from inside</h1>", "stranger": 403.0, "closed": "The sandbox is running but port is not open",
		"plain": "308 https://HOST/a?b=c", "inTheClear": 403.0, "strict": "max-age=31536000", "strictInside": nil,
		"killed": "The sandbox was not found",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("the SDK saw (-want +got):\n%s", d)
	}

	// Made-up names cause no request to the authority.
	orders := ca.count("POST /order-plz")
	if orders == 0 {
		t.Error("the authority saw no order; does its log still say so?")
	}
	for i := range 20 {
		name := fmt.Sprintf("%d-i%020d.boxes.test", 1000+i, i)
		ca.leaf(t, roots, name)
	}
	if got := ca.count("POST /order-plz"); got != orders {
		t.Errorf("%d orders more", got-orders)
	}
	// A certificate on disk is not requested again.
	if err := s.kill(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	start(t, data, flags...)
	if again := ca.leaf(t, roots, "api.boxes.test"); again.SerialNumber.Cmp(first.SerialNumber) != 0 {
		t.Error("after a restart there is another certificate")
	}
}

// An authority is a running Pebble, Let's Encrypt's own test server, that asks
// DNS at ip.
type authority struct {
	ip        string // of loopback; the test's own
	directory string // URL
	own       string // file of the certificate of the authority's own server
	manage    string // URL
	log       *lockedBuffer
	client    *http.Client
}

func startAuthority(t *testing.T) *authority {
	t.Helper()
	out, err := exec.Command("go", "tool", "-modfile=../../tools/pebble/go.mod", "-n", "pebble").CombinedOutput()
	if err != nil {
		t.Fatalf("build pebble: %v\n%s", err, out)
	}
	lines := strings.Fields(string(out))
	dir := t.TempDir()
	a := &authority{
		ip:  fmt.Sprintf("127.%d.%d.%d", 2+mathrand.IntN(250), mathrand.IntN(256), 1+mathrand.IntN(250)),
		own: filepath.Join(dir, "own.pem"), log: &lockedBuffer{},
	}
	key := filepath.Join(dir, "own.key")
	pool := selfSigned(t, a.own, key)
	a.client = &http.Client{Timeout: time.Minute, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	listen, manage := "127.0.0.1:"+freePort(t), "127.0.0.1:"+freePort(t)
	a.directory, a.manage = "https://"+listen+"/dir", "https://"+manage
	conf, err := json.Marshal(map[string]any{"pebble": map[string]any{
		"listenAddress": listen, "managementListenAddress": manage, "certificate": a.own, "privateKey": key,
		"httpPort": 1, "tlsPort": 1, "keyAlgorithm": "ecdsa",
	}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "pebble.json")
	if err := os.WriteFile(file, conf, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(lines[len(lines)-1], "-config", file, "-strict", "-dnsserver", a.ip+":53")
	cmd.Env = append(os.Environ(), "PEBBLE_VA_NOSLEEP=1", "PEBBLE_WFE_NONCEREJECT=20")
	cmd.Stdout, cmd.Stderr = a.log, a.log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("pebble's log:\n%s", tail(a.log.String(), 40))
		}
	})
	// A server that cannot reach the authority backs off.
	eventually(t, "pebble listens", func() bool {
		for _, addr := range []string{listen, manage} {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				return false
			}
			c.Close()
		}
		return true
	})
	return a
}

// count returns how often what is in the authority's log.
func (a *authority) count(what string) int { return strings.Count(a.log.String(), what) }

// roots returns a file of the authority's root certificate.
func (a *authority) roots(t *testing.T) string {
	t.Helper()
	resp, err := a.client.Get(a.manage + "/roots/0")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "roots.pem")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// leaf returns the certificate that the server presents for name, once it chains to
// roots. Without roots any certificate will do.
func (a *authority) leaf(t *testing.T, roots, name string) *x509.Certificate {
	t.Helper()
	conf := &tls.Config{ServerName: name, InsecureSkipVerify: roots == "", NextProtos: []string{"h2"}}
	if roots != "" {
		b, err := os.ReadFile(roots)
		if err != nil {
			t.Fatal(err)
		}
		conf.RootCAs = x509.NewCertPool()
		conf.RootCAs.AppendCertsFromPEM(b)
	}
	var err error
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		var c *tls.Conn
		if c, err = tls.Dial("tcp", a.ip+":443", conf); err == nil {
			defer c.Close()
			if got := c.ConnectionState().NegotiatedProtocol; got != "h2" {
				t.Errorf("got protocol %q, want h2", got)
			}
			return c.ConnectionState().PeerCertificates[0]
		}
	}
	t.Fatalf("no certificate for %s: %v", name, err)
	return nil
}

// selfSigned writes a self-signed certificate for 127.0.0.1.
func selfSigned(t *testing.T, certFile, keyFile string) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "pebble"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	chain := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(certFile, chain, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: k}), 0o600); err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(chain)
	return pool
}
