package egress

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/net/proxy"

	"postern/internal/auth"
	"postern/internal/policy"
)

// ErrProxy means that a sandbox's proxy cannot be used. The text says why, and never
// has the password.
var ErrProxy = errors.New("egressProxy.address")

// A ProxyKey seals the passwords of proxies. It is safe for concurrent use.
type ProxyKey struct{ aead cipher.AEAD }

// NewProxyKey derives the key from the server's, which has at least 32 bytes.
func NewProxyKey(server []byte) (*ProxyKey, error) {
	if len(server) < 32 {
		return nil, errors.New("derive key for proxies: the server's key has fewer than 32 bytes")
	}
	key, err := hkdf.Key(sha256.New, server, nil, "postern proxy password v1", 32)
	if err != nil {
		return nil, fmt.Errorf("derive key for proxies: %w", err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("derive key for proxies: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("derive key for proxies: %w", err)
	}
	return &ProxyKey{aead}, nil
}

// Seal sets p.Sealed to the encrypted password. It opens again only for this project,
// address and user name: somebody who can write to the database cannot send it to a
// server of their own.
func (k *ProxyKey) Seal(project string, p *policy.Proxy, password auth.Secret) error {
	if n := len(password.Reveal()); n > 255 {
		return fmt.Errorf("%w: egressProxy.password: has %d bytes; at most 255 are allowed", policy.ErrInvalid, n)
	}
	if p.Username == "" {
		return fmt.Errorf("%w: egressProxy.password: needs a username", policy.ErrInvalid)
	}
	p.Sealed = k.aead.Seal(nil, nil, []byte(password.Reveal()), sealedFor(project, p)) //nolint:gosec // the nonce is random: NewGCMWithRandomNonce makes and prepends it
	return nil
}

// open returns the password of p, or the empty one if p has none.
func (k *ProxyKey) open(project string, p *policy.Proxy) (auth.Secret, error) {
	if len(p.Sealed) == 0 {
		return "", nil
	}
	b, err := k.aead.Open(nil, nil, p.Sealed, sealedFor(project, p))
	if err != nil {
		return "", fmt.Errorf("%w: its password is not sealed with this server's key", ErrProxy)
	}
	return auth.Secret(b), nil
}

// sealedFor returns what a sealed password is bound to. No field but the last, which
// has any bytes, can have a NUL.
func sealedFor(project string, p *policy.Proxy) []byte {
	return []byte(project + "\x00" + p.Address + "\x00" + p.Username)
}

// CheckProxy returns an error that wraps [ErrProxy] unless p can be resolved to an
// address that the ceiling allows. It connects to nothing.
func (w *Wall) CheckProxy(ctx context.Context, p *policy.Proxy) error {
	_, err := w.proxyAddress(ctx, p)
	return err
}

// proxyAddress returns the address of p that the ceiling allows. It is resolved and
// judged for each connection. The attack: the name of a proxy that turns to a private
// address after the check makes this process the way into the operator's network.
func (w *Wall) proxyAddress(ctx context.Context, p *policy.Proxy) (netip.AddrPort, error) {
	host, port, err := p.Split()
	if err != nil {
		return netip.AddrPort{}, err
	}
	if w.cfg.ProxyKey == nil {
		return netip.AddrPort{}, fmt.Errorf("%w: this server has no key for proxies", ErrProxy)
	}
	may, err := policy.NewOutbound(policy.Egress{Internet: true}, w.cfg.Ceiling)
	if err != nil {
		return netip.AddrPort{}, err
	}
	var names []string
	var addrs []netip.Addr
	if a, err := netip.ParseAddr(host); err == nil {
		addrs = []netip.Addr{a}
	} else {
		if v := may.Resolve(host); v.Effect != policy.Allow {
			return netip.AddrPort{}, fmt.Errorf("%w: %s", ErrProxy, v.Reason)
		}
		names = []string{host}
		if addrs, err = w.resolver.LookupNetIP(ctx, "ip", host+"."); err != nil {
			return netip.AddrPort{}, fmt.Errorf("%w: %s cannot be resolved", ErrProxy, host)
		}
		// IPv4 first: the other side of every sandbox is IPv4, too.
		slices.SortStableFunc(addrs, func(a, b netip.Addr) int { return len(a.Unmap().AsSlice()) - len(b.Unmap().AsSlice()) })
	}
	reason := "it has no address"
	for _, a := range addrs {
		a = a.Unmap()
		v := may.Connect(policy.Connection{Addr: netip.AddrPortFrom(a, port), Names: names, Own: w.isOwn(a)})
		if v.Effect == policy.Allow {
			return netip.AddrPortFrom(a, port), nil
		}
		reason = v.Reason
	}
	return netip.AddrPort{}, fmt.Errorf("%w: %s", ErrProxy, reason)
}

// dial connects to an allowed destination outside: through the sandbox's proxy, if it
// has one, else directly. It fails closed: without its proxy the sandbox connects to
// nothing. The proxy is given the address that we resolved and judged, not the name,
// which it could resolve to another place.
func (a *attached) dial(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	p := a.rules.Load().Egress().Proxy
	if p == nil {
		return a.w.cfg.Dial(ctx, "tcp", to.String())
	}
	at, err := a.w.proxyAddress(ctx, p)
	if err != nil {
		return nil, err
	}
	password, err := a.w.cfg.ProxyKey.open(a.who.Project, p)
	if err != nil {
		return nil, err
	}
	var login *proxy.Auth
	if p.Username != "" {
		login = &proxy.Auth{User: a.personal(p.Username), Password: a.personal(password.Reveal())}
	}
	d, err := proxy.SOCKS5("tcp", at.String(), login, dialerFunc(a.w.cfg.Dial))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrProxy, err)
	}
	cd, ok := d.(proxy.ContextDialer)
	if !ok { // unreachable: it is a *socks.Dialer
		return nil, fmt.Errorf("%w: its dialer takes no context", ErrProxy)
	}
	conn, err := cd.DialContext(ctx, "tcp", to.String())
	if err != nil {
		// Not %w: it could be a refusal of the proxy's own port, which says nothing of
		// the destination.
		return nil, fmt.Errorf("%w: %v", ErrProxy, err) //nolint:errorlint // see above
	}
	return conn, nil
}

// personal replaces E2B's placeholder in a login, so that a proxy can tell sandboxes
// apart.
func (a *attached) personal(s string) string {
	return strings.ReplaceAll(s, "{{sandboxID}}", a.who.ID)
}

// A dialerFunc is a function as a dialer of package proxy.
type dialerFunc func(ctx context.Context, network, address string) (net.Conn, error)

// Dial implements [proxy.Dialer]. It is not used.
func (f dialerFunc) Dial(network, address string) (net.Conn, error) {
	return f(context.Background(), network, address)
}

// DialContext implements [proxy.ContextDialer].
func (f dialerFunc) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return f(ctx, network, address)
}

// sameProxy reports whether two sandboxes' rules send connections the same way.
func sameProxy(a, b *policy.Proxy) bool {
	if a == nil || b == nil {
		return a == b
	}
	return strings.EqualFold(a.Address, b.Address) && a.Username == b.Username && slices.Equal(a.Sealed, b.Sealed)
}
