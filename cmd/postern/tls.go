package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/certmagic"
	"github.com/mholt/acmez/v3"
	"github.com/mholt/acmez/v3/acme"
	"go.uber.org/zap"

	"postern/internal/zone"
)

// validateTLS checks the settings of TLS and DNS, which need one another. One
// that would do nothing is an error: whoever sets it believes that it does.
func (c *Config) validateTLS(bad func(flag, format string, args ...any)) {
	files := c.TLSCert != "" || c.TLSKey != ""
	switch {
	case c.TLSCert == "" && files:
		bad("tls-key", "--tls-cert is missing")
	case c.TLSKey == "" && files:
		bad("tls-cert", "--tls-key is missing")
	case c.ACME && files:
		bad("acme", "--tls-cert is set too; want one or the other")
	case c.ListenTLS == "" && (files || c.ACME):
		bad("listen-tls", "want the address on which to serve TLS, such as :443")
	case c.ListenTLS != "" && !files && !c.ACME:
		bad("listen-tls", "want --tls-cert and --tls-key, or --acme")
	}
	if c.ACME && (c.Domain == "" || c.ListenDNS == "") {
		bad("acme", "--domain and --listen-dns are needed: the certificate is for all names of the domain, and its DNS proves that it is ours")
	}
	if !c.ACME && (c.ACMERoots != "" || c.ACMEEmail != "") {
		bad("acme", "is not set, but --acme-roots or --acme-email is")
	}
	if c.ListenDNS != "" && c.Domain == "" {
		bad("listen-dns", "--domain is missing")
	}
	if c.ListenDNS == "" && len(c.PublicAddresses) > 0 {
		bad("public-address", "--listen-dns is missing: nobody would be told")
	}
	if c.ListenDNS != "" && len(c.PublicAddresses) == 0 && !c.ACME {
		bad("public-address", "is missing: there is nothing to answer with")
	}
	for _, a := range c.PublicAddresses {
		if _, err := netip.ParseAddr(a); err != nil {
			bad("public-address", "%q is not an IP address", a)
		}
	}
}

// newZone returns the server of the domain's DNS, or nil if none is wanted.
func newZone(log *slog.Logger, c Config) (*zone.Server, error) {
	if c.ListenDNS == "" {
		return nil, nil //nolint:nilnil // there is none, and that is no error
	}
	var addrs []netip.Addr
	for _, a := range c.PublicAddresses {
		addr, err := netip.ParseAddr(a)
		if err != nil {
			return nil, fmt.Errorf("--public-address: %w", err)
		}
		addrs = append(addrs, addr.Unmap())
	}
	return zone.New(log, c.Domain, addrs)
}

// newTLS returns how connections are made with TLS, or nil if they are not.
// run gets and renews certificates until its context is done.
func newTLS(log *slog.Logger, c Config, z *zone.Server) (conf *tls.Config, run func(context.Context) error, err error) {
	conf = &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}}
	switch {
	case c.TLSCert != "":
		f := &certificateFiles{log: log, cert: c.TLSCert, key: c.TLSKey}
		if _, err := f.get(); err != nil {
			return nil, nil, fmt.Errorf("--tls-cert: %w", err)
		}
		conf.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return f.get() }
		return conf, nil, nil
	case c.ACME:
		m, run, err := newACME(log, c, z)
		if err != nil {
			return nil, nil, err
		}
		conf.GetCertificate = func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
			if h.ServerName == "" {
				h.ServerName = "api." + strings.ToLower(c.Domain) // asked for by address
			}
			return m.GetCertificate(h)
		}
		return conf, run, nil
	}
	return nil, nil, nil
}

// A certificateFiles is a certificate that the operator renews. It is read
// again when its files have changed. It is safe for concurrent use.
type certificateFiles struct {
	log       *slog.Logger
	cert, key string // paths

	mu      sync.Mutex // guards what follows
	current *tls.Certificate
	stamp   string    // of the files when they were last read
	looked  time.Time // when the stamp was last compared
}

// lookEvery bounds how often the files are looked at.
const lookEvery = time.Second

func (f *certificateFiles) get() (*tls.Certificate, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if f.current != nil && now.Sub(f.looked) < lookEvery {
		return f.current, nil
	}
	f.looked = now
	stamp := stampOf(f.cert) + stampOf(f.key)
	if f.current != nil && stamp == f.stamp {
		return f.current, nil
	}
	f.stamp = stamp
	c, err := tls.LoadX509KeyPair(f.cert, f.key)
	switch {
	case err == nil:
		if f.current != nil {
			f.log.Info("read the new certificate", "file", f.cert, "ends", c.Leaf.NotAfter)
		}
		f.current = &c
	case f.current == nil:
		return nil, err
	default:
		// One of the two files may be written a moment before the other.
		f.log.Warn("cannot read the new certificate; the old one is used on", "file", f.cert, "err", err)
	}
	return f.current, nil
}

func stampOf(path string) string {
	fi, err := os.Stat(path)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprint(fi.ModTime().UnixNano(), fi.Size(), " ")
}

// newACME returns what gets certificates for the domain and for all names
// below it from a certificate authority.
//
// One certificate for "*.domain", not one for each name when it is first asked
// for: public authorities give about fifty a week for a domain, which is less
// than thirty sandboxes, and whoever makes up names would use them up. So
// nothing that a stranger does here ever causes a request to the authority.
func newACME(log *slog.Logger, c Config, z *zone.Server) (*certmagic.Config, func(context.Context) error, error) {
	var roots *x509.CertPool
	if c.ACMERoots != "" {
		pem, err := os.ReadFile(c.ACMERoots)
		if err != nil {
			return nil, nil, fmt.Errorf("--acme-roots: %w", err)
		}
		roots = x509.NewCertPool()
		if !roots.AppendCertsFromPEM(pem) {
			return nil, nil, fmt.Errorf("--acme-roots: %s holds no certificate", c.ACMERoots)
		}
	}
	var m *certmagic.Config
	quiet := zap.NewNop() // what matters is told by OnEvent
	cache := certmagic.NewCache(certmagic.CacheOptions{
		GetConfigForCert: func(certmagic.Certificate) (*certmagic.Config, error) { return m, nil },
		Logger:           quiet,
	})
	m = certmagic.New(cache, certmagic.Config{
		Storage: &certmagic.FileStorage{Path: filepath.Join(c.Data, "certificates")},
		Logger:  quiet,
		OnEvent: func(ctx context.Context, event string, data map[string]any) error {
			logCertificate(ctx, log, event, data)
			return nil
		},
	})
	m.Issuers = []certmagic.Issuer{certmagic.NewACMEIssuer(m, certmagic.ACMEIssuer{
		CA: c.ACMEDirectory, Email: c.ACMEEmail, Agreed: true, TrustedRoots: roots, Logger: quiet, Resolver: c.ownDNS(),
		DisableHTTPChallenge: true, DisableTLSALPNChallenge: true, DNS01Solver: solver{z},
	})}
	domain := strings.ToLower(c.Domain)
	return m, func(ctx context.Context) error {
		defer cache.Stop()
		// In the background, with patience: an authority that is down must not
		// keep the server from serving what needs no certificate.
		if err := m.ManageAsync(ctx, []string{domain, "*." + domain}); err != nil {
			return fmt.Errorf("manage certificates: %w", err)
		}
		<-ctx.Done()
		return ctx.Err()
	}, nil
}

func logCertificate(ctx context.Context, log *slog.Logger, event string, data map[string]any) {
	switch event {
	case "cert_obtaining":
		log.InfoContext(ctx, "asking for a certificate", "name", data["identifier"])
	case "cert_obtained":
		log.InfoContext(ctx, "got a certificate", "name", data["identifier"], "renewal", data["renewal"])
	case "cert_failed":
		log.ErrorContext(ctx, "got no certificate; it is tried again", "name", data["identifier"], "err", data["error"])
	}
}

// A solver puts what an authority asks for into the domain's DNS.
type solver struct{ zone *zone.Server }

var _ acmez.Solver = solver{}

// Present implements [acmez.Solver].
func (s solver) Present(_ context.Context, c acme.Challenge) error {
	return s.zone.SetText(c.DNS01KeyAuthorization())
}

// CleanUp implements [acmez.Solver].
func (s solver) CleanUp(_ context.Context, c acme.Challenge) error {
	s.zone.RemoveText(c.DNS01KeyAuthorization())
	return nil
}

// onlyTLS keeps what has a name of ours, or comes from another machine, from
// being served in the clear when it could be served over TLS.
func onlyTLS(c Config, port string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := strings.ToLower(strings.TrimSuffix(hostOnly(r.Host), "."))
		named := name != "" && c.covers(name)
		if r.TLS != nil || !named && fromHere(r) {
			next.ServeHTTP(w, r)
			return
		}
		// What was sent with a key or a token has been seen by whoever listens.
		// To take it there silently would hide that.
		if named && (r.Method == http.MethodGet || r.Method == http.MethodHead) && !carriesSecret(r) {
			http.Redirect(w, r, "https://"+tlsName(name, port)+r.URL.RequestURI(), http.StatusPermanentRedirect) //nolint:gosec // name is one of ours
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		msg := "this is served over https only; a key or a token that came with this request was sent in the clear: renew it"
		_ = json.NewEncoder(w).Encode(map[string]any{"code": http.StatusForbidden, "message": msg})
	})
}

// tlsName returns how name is written in a URL, if TLS is served on port.
func tlsName(name, port string) string {
	if port == "443" {
		return name
	}
	return net.JoinHostPort(name, port)
}

// tlsPort returns the port of TLS, or the empty string.
func (l *listeners) tlsPort() string {
	if l.tls == nil {
		return ""
	}
	return portOf(l.tls.Addr().String())
}

// covers reports whether the server's certificate should be good for name.
func (c *Config) covers(name string) bool {
	domain := strings.ToLower(c.Domain)
	if domain != "" && (name == domain || strings.HasSuffix(name, "."+domain)) {
		return true
	}
	for _, h := range c.Hosts {
		if strings.EqualFold(hostOnly(h), name) {
			return true
		}
	}
	return false
}

func hostOnly(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		return h
	}
	return strings.Trim(host, "[]")
}

// fromHere reports whether r comes from this machine.
func fromHere(r *http.Request) bool {
	a, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return false
	}
	here, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return a.Addr().Unmap().IsLoopback() || ok && here.AddrPort().Addr().Unmap() == a.Addr().Unmap()
}

func carriesSecret(r *http.Request) bool {
	for _, k := range []string{"X-Api-Key", "X-Access-Token", "Authorization", "E2b-Traffic-Access-Token"} {
		if r.Header.Get(k) != "" {
			return true
		}
	}
	return r.URL.Query().Has("signature") || r.URL.Query().Has("token")
}

// strictTransport tells browsers to open the console's host over TLS only. The
// names below it are sandboxes', which may serve what they want.
func strictTransport(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS != nil {
			w.Header().Set("Strict-Transport-Security", "max-age=31536000")
		}
		next.ServeHTTP(w, r)
	})
}

// portOf returns the port of an address.
func portOf(addr string) string {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return ""
	}
	return port
}

// serveZone answers questions about the domain until ctx is done.
func serveZone(ctx context.Context, z *zone.Server, packets net.PacketConn, conns net.Listener) error {
	ended := make(chan error, 1)
	go func() { ended <- z.Serve(ctx, conns) }()
	err := z.ServePackets(ctx, packets)
	conns.Close()
	return errors.Join(err, <-ended)
}
