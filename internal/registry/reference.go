package registry

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
)

const maxReference = 1024 // bytes

// parse parses a reference. A short name, such as "debian:12", refers to Docker Hub. A name
// without tag and digest has the tag "latest".
func parse(s string) (name.Reference, error) {
	if s == "" || len(s) > maxReference {
		return nil, fmt.Errorf("%w: the reference must have 1 to %d bytes, such as debian:12", ErrInvalid, maxReference)
	}
	if strings.HasPrefix(s, "http://") || strings.HasPrefix(s, "https://") || strings.HasPrefix(s, "docker://") {
		return nil, fmt.Errorf("%w: %s: write the reference without a scheme, such as registry.example.com/app:1", ErrInvalid, printable(s))
	}
	r, err := name.ParseReference(s)
	if err != nil {
		return nil, fmt.Errorf("%w: %s is not an image reference, such as debian:12 or registry.example.com/app:1", ErrInvalid, printable(s))
	}
	if d, ok := r.(name.Digest); ok && !strings.HasPrefix(d.DigestStr(), "sha256:") {
		return nil, fmt.Errorf("%w: %s: only sha256 digests are supported", ErrInvalid, printable(s))
	}
	if _, err := parseEndpoint(r.Context().RegistryStr()); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrInvalid, printable(s), err)
	}
	return r, nil
}

// CheckAllow validates an entry of [Config.Allow].
func CheckAllow(s string) error {
	if e, err := parseEndpoint(s); err != nil || e.prefix != "" {
		return errors.New("must be HOST, HOST:PORT or http://HOST:PORT")
	}
	return nil
}

// CheckMirror validates an entry of [Config.Mirrors].
func CheckMirror(host, u string) error {
	if _, err := registryHost(host); err != nil {
		return err
	}
	if _, err := parseEndpoint(u); err != nil {
		return fmt.Errorf("mirror of %s: %w", host, err)
	}
	return nil
}

// registryHost returns a registry's host in the form that references use: "docker.io"
// becomes "index.docker.io".
func registryHost(s string) (string, error) {
	r, err := name.NewRegistry(s)
	if err != nil {
		return "", fmt.Errorf("registry: %q is not the host of a registry", s)
	}
	return r.RegistryStr(), nil
}

// An endpoint is the address of a registry's API.
type endpoint struct {
	scheme string // "https" or "http"
	host   string // lower case, without port; an IPv6 address without brackets
	port   string
	prefix string // put before repositories; empty or ends with "/"
}

// address returns HOST:PORT.
func (e endpoint) address() string { return net.JoinHostPort(e.host, e.port) }

// url returns the URL of a path of the API.
func (e endpoint) url(path string) *url.URL {
	return &url.URL{Scheme: e.scheme, Host: e.address(), Path: path}
}

// parseEndpoint parses HOST, HOST:PORT or a URL. The default scheme is https.
func parseEndpoint(s string) (endpoint, error) {
	if !strings.Contains(s, "://") {
		s = "https://" + s
	}
	u, err := url.Parse(s)
	if err != nil {
		return endpoint{}, errors.New("is not a URL") // the error would quote it
	}
	e, err := endpointOf(u)
	if err != nil {
		return endpoint{}, err
	}
	if u.RawQuery != "" || u.Fragment != "" {
		return endpoint{}, errors.New("must not have a query or a fragment")
	}
	if p := strings.Trim(u.Path, "/"); p != "" {
		e.prefix = p + "/"
	}
	return e, nil
}

// endpointOf returns the endpoint of a URL, which may come from a registry.
func endpointOf(u *url.URL) (endpoint, error) {
	e := endpoint{scheme: u.Scheme, host: strings.ToLower(u.Hostname()), port: u.Port()}
	switch {
	case e.scheme != "https" && e.scheme != "http" || u.Opaque != "":
		return e, errors.New("must begin with https://")
	case u.User != nil:
		return e, errors.New("must not have a user name or password")
	case e.host == "" || strings.ContainsFunc(e.host, func(r rune) bool { return r <= ' ' || r > '~' }):
		return e, errors.New("must name a host in ASCII")
	case strings.Contains(e.host, "%"): // the zone of an address
		return e, errors.New("must not have a zone")
	}
	if e.port == "" {
		e.port = map[string]string{"https": "443", "http": "80"}[e.scheme]
	}
	if n, err := strconv.Atoi(e.port); err != nil || n < 1 || n > 65535 {
		return e, errors.New("port: must be 1 to 65535")
	}
	if a, err := netip.ParseAddr(e.host); err == nil {
		e.host = a.Unmap().String()
	}
	return e, nil
}

// printable returns s for a message: shortened, and in printable ASCII.
func printable(s string) string {
	if len(s) > 200 {
		s = s[:200] + "…"
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' && r != '…' {
			return '?'
		}
		return r
	}, s)
}
