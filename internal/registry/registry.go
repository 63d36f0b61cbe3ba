// Package registry fetches container images: from registries with the OCI Distribution
// Specification, from OCI layouts, and from files of "docker save".
//
// Callers choose names and credentials, and everything that a registry sends is hostile.
// Each blob is bounded, and verified against its digest. The package stores layers as tar
// archives and never unpacks them.
//
// All pulls share the stored layers, but a caller gets only layers that it may read: see
// [Puller.Pull].
package registry

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"
)

// The errors of this package. Their texts name the image, the registry's response and what
// to do, and never contain a credential.
var (
	// ErrInvalid means that a reference, credentials or an image are malformed or exceed
	// a limit. The text says which.
	ErrInvalid = errors.New("invalid image")
	// ErrDenied means that the credentials are wrong or missing, or that the image does
	// not exist: many registries do not distinguish these.
	ErrDenied = errors.New("the registry denies access")
	// ErrNotFound means that the registry has no such image.
	ErrNotFound = errors.New("image not found")
	// ErrUnreachable means that the registry cannot be reached, or that it failed.
	ErrUnreachable = errors.New("the registry cannot be used")
	// ErrFull means that the disk has too little space for an image.
	ErrFull = errors.New("no space")
)

// Credentials authenticate a pull at one registry. The zero value means none.
type Credentials struct {
	Username, Password string // basic

	AWSKeyID, AWSSecret, AWSRegion string // of Amazon ECR
	GCPKey                         string // JSON of a service account, for Google Artifact Registry
}

// An Image is an image whose layers are on this machine.
type Image struct {
	Name   string   // as the caller wrote it
	Digest string   // "sha256:" and 64 hex digits, of the manifest for this machine's platform
	Env    []string // NAME=value
	Layers []Layer  // from the bottom up
}

// A Layer is one layer of an image.
type Layer struct {
	Digest string // of the compressed blob
	DiffID string // of the tar archive
	Path   string // absolute path of the tar archive, uncompressed; read only
	Size   int64  // bytes of the tar archive
}

// A Dial connects to address, which is HOST:PORT.
type Dial func(ctx context.Context, network, address string) (net.Conn, error)

// A Config holds the settings of a [Puller].
type Config struct {
	// Dir is the directory for layers. It is created if missing. One Puller at a time
	// may use it.
	Dir string
	// Dial connects to hosts that callers and registries name. It must resolve the name
	// itself, and refuse addresses that callers must not reach.
	Dial Dial
	// DialAllowed connects to the hosts of Allow and Mirrors. Nil means Dial.
	DialAllowed Dial
	// Allow lists registries that the operator allows although Dial refuses their
	// addresses: HOST or HOST:PORT, or http://HOST:PORT for one without TLS.
	Allow []string
	// Mirrors maps a registry's host to the URL of a mirror of its public images. A path
	// in the URL is put before the repository. Callers' credentials are never sent to a
	// mirror: a pull with credentials uses the registry itself.
	Mirrors map[string]string
	// Roots are the trusted authorities of registries' certificates. Nil means the
	// system's.
	Roots *x509.CertPool

	MaxBytes      int64         // of an image's layers, uncompressed; 0 means 16 GiB
	MaxCompressed int64         // of an image's layers, compressed; 0 means 8 GiB
	MaxLayers     int           // of an image; 0 means 128
	KeepFreeMB    int64         // mebibytes of the disk that pulls must leave free
	Timeout       time.Duration // of one pull; 0 means 30 minutes
}

const (
	maxManifest = 4 << 20 // bytes, as the Distribution Specification advises
	maxConfig   = 8 << 20 // bytes of an image's configuration
	parallel    = 3       // layers of one pull that are fetched at once
)

// A Puller fetches images. It is safe for concurrent use.
type Puller struct {
	conf            Config
	public, allowed *http.Client
	hosts           map[string]string   // schemes of allowed hosts, by HOST:PORT
	mirrors         map[string]endpoint // by registry
	ecr             func(region, suffix string, fips bool) string

	busy   busy
	mu     sync.Mutex // guards the records of layers
	paused time.Duration
}

// New returns a Puller. It removes the temporary files of an earlier process.
func New(c Config) (*Puller, error) {
	if c.Dial == nil || c.Dir == "" {
		return nil, errors.New("registry: Dir and Dial must be set")
	}
	if c.DialAllowed == nil {
		c.DialAllowed = c.Dial
	}
	c.MaxBytes = defaulted(c.MaxBytes, 16<<30)
	c.MaxCompressed = defaulted(c.MaxCompressed, 8<<30)
	c.MaxLayers = defaulted(c.MaxLayers, 128)
	c.Timeout = defaulted(c.Timeout, 30*time.Minute)
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	c.Dir = dir
	p := &Puller{conf: c, hosts: map[string]string{}, mirrors: map[string]endpoint{}, ecr: ecrURL, paused: time.Second}
	for _, a := range c.Allow {
		if err := CheckAllow(a); err != nil {
			return nil, fmt.Errorf("registry: allowed host %q: %w", a, err)
		}
		e, err := parseEndpoint(a)
		if err != nil {
			return nil, fmt.Errorf("registry: allowed host %q: %w", a, err)
		}
		p.hosts[e.address()] = e.scheme
	}
	for _, host := range slices.Sorted(maps.Keys(c.Mirrors)) {
		u := c.Mirrors[host]
		e, err := parseEndpoint(u)
		if err != nil {
			return nil, fmt.Errorf("registry: mirror of %s: %w", host, err)
		}
		if host, err = registryHost(host); err != nil {
			return nil, err
		}
		p.hosts[e.address()] = e.scheme
		p.mirrors[host] = e
	}
	p.public, p.allowed = newClient(c.Dial, c.Roots), newClient(c.DialAllowed, c.Roots)
	// A killed pull leaves files in tmp only.
	if err := os.RemoveAll(p.tmp()); err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	for _, d := range []string{p.tmp(), p.blobs()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("registry: %w", err)
		}
	}
	return p, nil
}

func defaulted[T int | int64 | time.Duration](v, otherwise T) T {
	if v <= 0 {
		return otherwise
	}
	return v
}

// newClient returns a client that connects with dial only. It ignores proxies from the
// environment: dial would check the proxy's address instead of the registry's.
func newClient(dial Dial, roots *x509.CertPool) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:            dial,
			TLSClientConfig:        &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
			ForceAttemptHTTP2:      true,
			TLSHandshakeTimeout:    15 * time.Second,
			ResponseHeaderTimeout:  60 * time.Second,
			MaxIdleConnsPerHost:    4,
			IdleConnTimeout:        30 * time.Second,
			MaxResponseHeaderBytes: 64 << 10,
			DisableCompression:     true, // digests cover the bytes as sent
		},
		// Redirects are followed by session.follow, without credentials.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Pull fetches the image that ref names, for this machine's platform. It downloads only
// layers that are not stored yet. It calls progress with human-readable lines, one at a
// time; progress may be nil.
//
// A stored layer is used only if the caller may read it: the same repository has sent it
// before, or the same registry confirms that this repository has it. From any other
// registry, such as one that the caller runs, the layer is downloaded. So knowing the
// digest of a private layer is not enough to get it.
func (p *Puller) Pull(ctx context.Context, ref string, c Credentials, progress func(string)) (Image, error) {
	ctx, cancel := context.WithTimeout(ctx, p.conf.Timeout)
	defer cancel()
	s, err := p.session(ref, c)
	if err != nil {
		return Image{}, err
	}
	img, err := s.pull(ctx, serial(progress))
	if err != nil {
		if ctx.Err() != nil && context.Cause(ctx) == context.DeadlineExceeded { //nolint:errorlint // Cause returns it as it is
			err = fmt.Errorf("the pull took longer than %v: %w", p.conf.Timeout, err)
		}
		return Image{}, fmt.Errorf("image %s: %w", printable(ref), err)
	}
	img.Name = ref
	return img, nil
}

// serial returns a function that calls progress, one call at a time. Progress may be nil.
func serial(progress func(string)) func(string) {
	var mu sync.Mutex
	return func(line string) {
		if progress != nil {
			mu.Lock()
			defer mu.Unlock()
			progress(line)
		}
	}
}

func (s *session) pull(ctx context.Context, progress func(string)) (Image, error) {
	progress(fmt.Sprintf("pulling %s from %s", s.ref.Identifier(), s.where()))
	m, digest, err := s.manifest(ctx)
	if err != nil {
		return Image{}, err
	}
	sum, err := checkLayers(m, s.p.conf)
	if err != nil {
		return Image{}, err
	}
	b, err := s.small(ctx, m.Config, maxConfig)
	if err != nil {
		return Image{}, fmt.Errorf("configuration: %w", err)
	}
	c, err := parseConfig(b, m)
	if err != nil {
		return Image{}, err
	}
	progress(fmt.Sprintf("%s: %d layers, %s", digest, len(m.Layers), megabytes(sum)))
	img := Image{Digest: digest.String(), Env: c.Config.Env, Layers: make([]Layer, len(m.Layers))}
	left := newBudget(s.p.conf.MaxBytes)
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for i, d := range m.Layers {
		g.Go(func() error {
			l, cached, err := s.layer(gctx, d, c.RootFS.DiffIDs[i], left)
			if err != nil {
				return fmt.Errorf("layer %d of %d: %w", i+1, len(m.Layers), err)
			}
			img.Layers[i] = l
			how := "fetched"
			if cached {
				how = "cached"
			}
			progress(fmt.Sprintf("layer %d of %d: %s, %s", i+1, len(m.Layers), megabytes(l.Size), how))
			return nil
		})
	}
	return img, g.Wait()
}

// megabytes formats a number of bytes.
func megabytes(n int64) string { return strconv.FormatFloat(float64(n)/1e6, 'f', 1, 64) + " MB" }

// platform reports whether p is this machine's platform. Nil counts as this machine's.
func platform(p *v1.Platform) bool {
	if p == nil {
		return true
	}
	if p.OS != "linux" || p.Architecture != runtime.GOARCH {
		return false
	}
	// The basic variants. Others may use instructions that this machine lacks.
	switch p.Variant {
	case "", "v1", "v8":
		return true
	}
	return false
}
