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

// errRefused means that a webhook leads where it must not.
var errRefused = errors.New("refused")

// private lists what the operator can open: each range whole, and none in
// which a cloud's metadata service is, which [policy] names more narrowly.
var private = []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8", "fc00::/7", "::1/128"}

// A guard decides which addresses may be connected to.
type guard struct {
	rules *policy.Outbound
	own   bool // addresses of this machine may be connected to
}

func newGuard(openPrivate bool) (guard, error) {
	c := policy.Ceiling{Internet: true}
	if openPrivate {
		c.Allow = private
	}
	rules, err := policy.NewOutbound(policy.Egress{Internet: true}, c)
	return guard{rules, openPrivate}, err
}

// check returns an error that says why a may not be connected to.
func (g guard) check(a netip.AddrPort) error {
	if v := g.rules.Connect(policy.Connection{Addr: a}); v.Effect != policy.Allow {
		return fmt.Errorf("%w: %s", errRefused, v.Reason)
	}
	if g.own {
		return nil
	}
	// A public address may be this machine's too. Asked each time: one may have come since.
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

// control is called by the dialer for each address that a name resolved to,
// before it connects. There is no time between this and the connection in
// which DNS could say something else.
func (g guard) control(_ context.Context, _, address string, _ syscall.RawConn) error {
	a, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("%w: %q is no address", errRefused, address)
	}
	return g.check(a)
}

// newClient returns the client for deliveries. It takes no proxy from the
// environment: the guard would see the proxy's address, not the receiver's.
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
		// A redirect would be asked for by the receiver, not by who made the webhook.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// absoluteName ends the name in a host:port with a dot. Without it a name is looked
// for below the domains of this machine too, where another host may have it.
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

// checkURL says early what an attempt would find later. What a name resolves
// to is checked at each connection, not here.
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
		// The attack: a person who is shown it reads another than the receiver gets.
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
		// Below 1024 live protocols that would take a request for something else.
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
