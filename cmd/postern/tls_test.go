package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// writeCertificate writes a self-signed certificate with a serial number.
func writeCertificate(t *testing.T, certFile, keyFile string, serial int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(serial), DNSNames: []string{"api.boxes.test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: k}} {
		if file == "" {
			continue
		}
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
		// The bubble's clock is not the file system's.
		at := time.Unix(serial*1000+int64(len(block.Type)), 0)
		if err := os.Chtimes(file, at, at); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCertificateFiles: a renewed certificate is used without a restart, and a
// broken one never.
func TestCertificateFiles(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	synctest.Test(t, func(t *testing.T) {
		f := &certificateFiles{log: slog.New(slog.DiscardHandler), cert: cert, key: key}
		if _, err := f.get(); err == nil {
			t.Fatal("files that are not there were read")
		}
		serial := func() int64 {
			t.Helper()
			c, err := f.get()
			if err != nil {
				t.Fatal(err)
			}
			return c.Leaf.SerialNumber.Int64()
		}
		steps := []struct {
			name string
			do   func()
			wait time.Duration
			want int64
		}{
			{"the first", func() { writeCertificate(t, cert, key, 1) }, 0, 1},
			{"renewed", func() { writeCertificate(t, cert, key, 2) }, 2 * time.Second, 2},
			{"renewed, a moment ago", func() { writeCertificate(t, cert, key, 3) }, lookEvery / 2, 2},
			{"and now", func() {}, lookEvery, 3},
			{"the certificate without its key", func() { writeCertificate(t, cert, "", 4) }, 2 * time.Second, 3},
			{"nonsense", func() { writeFile(t, cert, "x") }, 2 * time.Second, 3},
			{"gone", func() { os.Remove(cert) }, 2 * time.Second, 3},
			{"whole again", func() { writeCertificate(t, cert, key, 5) }, 2 * time.Second, 5},
		}
		for _, s := range steps {
			s.do()
			time.Sleep(s.wait)
			if got := serial(); got != s.want {
				t.Errorf("%s: got certificate %d, want %d", s.name, got, s.want)
			}
		}
	})
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestOnlyTLS: what has a name, or comes from elsewhere, is not served in the
// clear.
func TestOnlyTLS(t *testing.T) {
	conf := Config{Domain: "Boxes.test", Hosts: []string{"build.test:8443"}}
	tests := []struct {
		name, method, target, host, from string
		header                           string
		tls                              bool
		want                             int
		location                         string
	}{
		{"over TLS", "GET", "/x", "api.boxes.test", "192.0.2.1:1", "", true, 200, ""},
		{"this machine, by address", "GET", "/x", "127.0.0.1:3000", "127.0.0.1:1", "X-Api-Key", false, 200, ""},
		{"this machine, IPv6", "GET", "/x", "[::1]:3000", "[::1]:1", "", false, 200, ""},
		{"another machine, by address", "GET", "/x", "192.0.2.9:3000", "192.0.2.1:1", "", false, 403, ""},
		{"a browser", "GET", "/a//b?c=%2f", "api.Boxes.test:80", "192.0.2.1:1", "", false, 308, "https://api.boxes.test:8443/a//b?c=%2f"},
		{"a sandbox", "GET", "/", "3000-i.boxes.test", "127.0.0.1:1", "", false, 308, "https://3000-i.boxes.test:8443/"},
		{"a name that the operator gave", "HEAD", "/", "build.test", "192.0.2.1:1", "", false, 308, "https://build.test:8443/"},
		{"a name of somebody else's", "GET", "/", "evil.test", "192.0.2.1:1", "", false, 403, ""},
		{"a name that only ends alike", "GET", "/", "evilboxes.test", "192.0.2.1:1", "", false, 403, ""},
		{"a form", "POST", "/", "api.boxes.test", "192.0.2.1:1", "", false, 403, ""},
		{"with a key", "GET", "/", "api.boxes.test", "192.0.2.1:1", "X-Api-Key", false, 403, ""},
		{"with a signature", "GET", "/files?signature=x", "api.boxes.test", "192.0.2.1:1", "", false, 403, ""},
		{"no host", "GET", "/", "", "192.0.2.1:1", "", false, 403, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := onlyTLS(conf, "8443", strictTransport(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
			r := httptest.NewRequest(tt.method, tt.target, nil)
			r.Host, r.RemoteAddr = tt.host, tt.from
			r = r.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(192, 0, 2, 9), Port: 3000}))
			if tt.header != "" {
				r.Header.Set(tt.header, "x")
			}
			if tt.tls {
				r.TLS = &tls.ConnectionState{}
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if w.Code != tt.want || w.Header().Get("Location") != tt.location {
				t.Errorf("got %d %q, want %d %q", w.Code, w.Header().Get("Location"), tt.want, tt.location)
			}
			if got := w.Header().Get("Strict-Transport-Security") != ""; got != tt.tls {
				t.Errorf("got Strict-Transport-Security %v, want %v", got, tt.tls)
			}
		})
	}
}

// TestTLSUsage: settings that would do nothing are refused.
func TestTLSUsage(t *testing.T) {
	for line, want := range map[string]string{
		"--tls-cert x":                      "--tls-key",
		"--tls-key x":                       "--tls-cert",
		"--tls-cert x --tls-key y":          "--listen-tls",
		"--listen-tls :443":                 "--acme",
		"--listen-tls 443 --acme":           "host:port",
		"--acme --listen-tls :443":          "--listen-dns",
		"--acme-email a@b.example":          "--acme",
		"--listen-dns :53":                  "--domain",
		"--listen-dns :53 --domain b.test":  "--public-address",
		"--public-address 192.0.2.1":        "--listen-dns",
		"--public-address b.test":           "not an IP address",
		"--api-rate -1":                     "--api-rate",
		"--acme --tls-cert x --tls-key y":   "one or the other",
		"--max-connections 0":               "--max-connections",
		"--domain a..b --create-rate -0.01": "--create-rate",
	} {
		t.Run(line, func(t *testing.T) {
			var out, errs bytes.Buffer
			if got := run(t.Context(), append([]string{"up"}, strings.Fields(line)...), &out, &errs); got != 2 || !strings.Contains(errs.String(), want) {
				t.Errorf("status %d, %q; want 2 and %q", got, &errs, want)
			}
		})
	}
}
