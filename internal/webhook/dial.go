package webhook

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"postern/internal/policy"
)

// errRefused means that a webhook's address is blocked.
var errRefused = errors.New("refused")

// private lists the ranges that the operator can allow. Clouds' metadata services
// stay blocked: [policy] has narrower rules for their addresses.
var private = []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8", "fc00::/7", "::1/128"}

// A guard decides which addresses deliveries may connect to.
type guard struct {
	rules *policy.Outbound
	own   bool // allow addresses of this machine
}

// newGuard returns the guard for a configuration.
func newGuard(openPrivate bool) (guard, error) {
	c := policy.Ceiling{Internet: true}
	if openPrivate {
		c.Allow = private
	}
	rules, err := policy.NewOutbound(policy.Egress{Internet: true}, c)
	return guard{rules, openPrivate}, err
}

// check returns an error that says why a is blocked, or nil.
func (g guard) check(a netip.AddrPort) error {
	if v := g.rules.Connect(policy.Connection{Addr: a}); v.Effect != policy.Allow {
		return fmt.Errorf("%w: %s", errRefused, v.Reason)
	}
	if g.own {
		return nil
	}
	// A public address may belong to this machine. The list is read each time, since
	// addresses can be added.
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("list own addresses: %w", err)
	}
	for _, ia := range addrs {
		if p, err := netip.ParsePrefix(ia.String()); err == nil && p.Addr().Unmap() == a.Addr().Unmap().WithZone("") {
			return fmt.Errorf("%w: %v is an address of the machine that Postern runs on", errRefused, a.Addr())
		}
	}
	return nil
}

// control is called by the dialer with each resolved address, right before it
// connects. So there is no second lookup in between that DNS rebinding could use.
func (g guard) control(_ context.Context, _, address string, _ syscall.RawConn) error {
	a, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("%w: %q is not an address", errRefused, address)
	}
	return g.check(a)
}

// newClient returns the client for deliveries. It ignores proxies in the
// environment: the guard would check the proxy's address, not the receiver's.
func newClient(c Config) (*http.Client, error) {
	g, err := newGuard(c.Private)
	if err != nil {
		return nil, err
	}
	d := &net.Dialer{Timeout: c.Timeout, ControlContext: g.control, Resolver: c.Resolver}
	return &http.Client{
		Timeout: c.Timeout,
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				return d.DialContext(ctx, network, absoluteName(address))
			},
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

// absoluteName appends a dot to the name in a host:port. Without it the resolver
// also tries the name below the search domains of this machine.
func absoluteName(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil || !strings.Contains(host, ".") || strings.HasSuffix(host, ".") {
		return address
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return address
	}
	return net.JoinHostPort(host+".", port)
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
	g, err := newGuard(h.conf.Private)
	if err != nil {
		return err
	}
	return g.check(netip.AddrPortFrom(a, uint16(port)))
}
