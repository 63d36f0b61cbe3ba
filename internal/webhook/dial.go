package webhook

import (
	"errors"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"postern/internal/policy"
	"postern/internal/publicnet"
)

// newClient returns the client for deliveries. It ignores proxies in the
// environment: the guard would check the proxy's address, not the receiver's.
func newClient(c Config) (*http.Client, error) {
	g, err := publicnet.NewGuard(c.Private)
	if err != nil {
		return nil, err
	}
	return &http.Client{
		Timeout: c.Timeout,
		Transport: &http.Transport{
			DialContext:            g.Dial(c.Resolver, c.Timeout),
			ForceAttemptHTTP2:      true,
			MaxIdleConnsPerHost:    2,
			IdleConnTimeout:        30 * time.Second,
			MaxResponseHeaderBytes: 16 << 10,
			DisableCompression:     true,
		},
		// A redirect would let the receiver choose a URL that nobody approved.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// checkURL checks the form of a URL, and an address in it. The addresses of a name
// are checked at each connection.
func (h *Hooks) checkURL(s string) error {
	if len(s) > 2048 {
		return errors.New("is longer than 2048 bytes")
	}
	u, err := url.Parse(s)
	if err != nil || !isText(s) {
		return errors.New("is not a URL") // the error would quote it
	}
	switch {
	case strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }):
		// The attack: characters that make a person read a different URL.
		return errors.New("must be ASCII without spaces: write other characters as %XX, and names as xn--")
	case u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.Opaque != "":
		return errors.New("must begin with https://")
	case u.Scheme == "http" && !h.conf.Private:
		return errors.New("must begin with https:// (the operator may allow http with --webhook-private)")
	case u.User != nil:
		return errors.New("must hold no user name or password")
	case u.Fragment != "":
		return errors.New("must hold no #fragment")
	}
	port := 443
	if u.Port() != "" {
		// Other ports below 1024 belong to protocols that could misread a request.
		if port, err = strconv.Atoi(u.Port()); err != nil || port > 65535 || port < 1024 && port != 443 && port != 80 {
			return errors.New("port: must be 443, 80 or 1024 to 65535")
		}
	}
	a, err := netip.ParseAddr(u.Hostname())
	if err != nil {
		if _, err := policy.Name(u.Hostname()); err != nil {
			return err
		}
		return nil
	}
	if a.Zone() != "" {
		return errors.New("must hold no zone")
	}
	g, err := publicnet.NewGuard(h.conf.Private)
	if err != nil {
		return err
	}
	return g.Check(netip.AddrPortFrom(a, uint16(port)))
}
