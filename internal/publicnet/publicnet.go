// Package publicnet makes connections of the server to hosts that callers name: the
// receivers of webhooks and registries of images. It refuses addresses of this
// machine and of private networks.
//
// The wall (package egress) decides about sandboxes' connections. This package is for
// the server's own.
package publicnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"postern/internal/policy"
)

// ErrRefused means that an address is blocked.
var ErrRefused = errors.New("refused")

// private lists the ranges that the operator can allow. Clouds' metadata services
// stay blocked: [policy] has narrower rules for their addresses.
var private = []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8", "fc00::/7", "::1/128"}

// A Guard decides which addresses the server may connect to.
type Guard struct {
	rules *policy.Outbound
	own   bool // allow addresses of this machine
}

// NewGuard returns a guard. openPrivate allows private addresses and those of this
// machine.
func NewGuard(openPrivate bool) (Guard, error) {
	c := policy.Ceiling{Internet: true}
	if openPrivate {
		c.Allow = private
	}
	rules, err := policy.NewOutbound(policy.Egress{Internet: true}, c)
	return Guard{rules, openPrivate}, err
}

// Check returns an error that says why a is blocked, or nil. The error wraps
// [ErrRefused].
func (g Guard) Check(a netip.AddrPort) error {
	if v := g.rules.Connect(policy.Connection{Addr: a}); v.Effect != policy.Allow {
		return fmt.Errorf("%w: %s", ErrRefused, v.Reason)
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
			return fmt.Errorf("%w: %v is an address of the machine that Postern runs on", ErrRefused, a.Addr())
		}
	}
	return nil
}

// control is called by the dialer with each resolved address, right before it connects.
// There is no further lookup in between, so DNS rebinding has no effect.
func (g Guard) control(_ context.Context, _, address string, _ syscall.RawConn) error {
	a, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("%w: %q is not an address", ErrRefused, address)
	}
	return g.Check(a)
}

// Dial returns a function that connects to HOST:PORT, if the guard allows the address. It
// resolves names with r. The timeout is for one connection.
func (g Guard) Dial(r *net.Resolver, timeout time.Duration) func(ctx context.Context, network, address string) (net.Conn, error) {
	d := &net.Dialer{Timeout: timeout, ControlContext: g.control, Resolver: r}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		return d.DialContext(ctx, network, absoluteName(address))
	}
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
