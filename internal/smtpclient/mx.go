package smtpclient

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/idna"

	"postern/internal/mail"
	"postern/internal/policy"
	"postern/internal/store"
)

// Direct says how mail goes to the servers that a recipient's domain names in
// DNS (RFC 5321 5.1). All that DNS says is its owner's word, who may be an
// attacker: it must not lead to this machine's neighbours, nor round in a
// circle, nor make a delivery last for ever.
type Direct struct {
	Resolver *net.Resolver // nil means the system's
	Names    []string      // of this server: mail that DNS sends to them would come back
	DB       *store.DB     // keeps MTA-STS policies over restarts; nil keeps them in memory

	// Private lets mail go to addresses of private networks and of this
	// machine. For labs.
	Private bool
	Port    string // of the servers; empty means 25. For labs
	// Roots are the authorities by which servers of domains with an MTA-STS
	// policy are known; nil means the system's.
	Roots *x509.CertPool
	// PolicyPort is where policies are fetched; empty means 443. For labs.
	PolicyPort string
}

const (
	maxExchanges   = 10               // hosts of one domain that are looked at
	maxTries       = 8                // addresses that are connected to for one message
	directDialTime = 30 * time.Second // for one address, since there are others
)

// A routeError says that DNS gives no way to a recipient.
type routeError struct {
	text      string
	status    string // RFC 3463; its class says whether it is for good
	permanent bool   // there will never be one
}

// Error returns the reason.
func (e *routeError) Error() string { return e.text }

// An exchange is a host that takes mail for a domain.
type exchange struct {
	host  string
	addrs []netip.Addr
	err   error // why it has no address; nil if it has
}

// asciiDomain returns a domain as DNS has it.
func asciiDomain(domain string) (string, error) {
	if strings.HasPrefix(domain, "[") {
		return "", &routeError{text: "mail to an address literal is not sent", status: "5.1.2"}
	}
	name, err := idna.Lookup.ToASCII(strings.TrimSuffix(domain, "."))
	if err != nil || name == "" || len(name) > 253 {
		return "", &routeError{text: "the domain is not a name that DNS could have", status: "5.1.2", permanent: true}
	}
	return name, nil
}

// exchanges returns the hosts that take mail for a domain, the preferred first.
func (c *Client) exchanges(ctx context.Context, domain string) ([]exchange, error) {
	d := c.cfg.Direct
	mxs, err := d.Resolver.LookupMX(ctx, domain+".")
	var dnsErr *net.DNSError
	none := errors.As(err, &dnsErr) && dnsErr.IsNotFound
	if err != nil && !none && len(mxs) == 0 {
		return nil, fmt.Errorf("look up mail servers of %s: %w", domain, err)
	}
	if len(mxs) == 1 && strings.Trim(mxs[0].Host, ".") == "" {
		return nil, &routeError{text: domain + " takes no mail: it has a null MX record (RFC 7505)", status: "5.1.10", permanent: true}
	}
	implicit := none
	if implicit { // RFC 5321 5.1: without MX records the domain is its own
		mxs = []*net.MX{{Host: domain + "."}}
	}
	mxs = slices.DeleteFunc(mxs, func(m *net.MX) bool { return strings.Trim(m.Host, ".") == "" })
	// What comes back to us, and what is not preferred to it, is no way out.
	for _, m := range mxs {
		if c.isOwnHost(m.Host) {
			mxs = slices.DeleteFunc(mxs, func(o *net.MX) bool { return o.Pref >= m.Pref })
			if len(mxs) == 0 {
				return nil, &routeError{text: "mail for " + domain + " would come back to this server: its MX record names it, and it does not take mail for it", status: "5.4.6"}
			}
			break
		}
	}
	var out []exchange
	for _, m := range mxs[:min(len(mxs), maxExchanges)] {
		x := exchange{host: strings.ToLower(strings.TrimSuffix(m.Host, "."))}
		x.addrs, x.err = c.addresses(ctx, x.host)
		if implicit && errors.As(x.err, &dnsErr) && dnsErr.IsNotFound {
			return nil, &routeError{text: "there is no domain " + domain + " that takes mail: DNS knows neither mail servers nor an address of it", status: "5.1.2", permanent: true}
		}
		out = append(out, x)
	}
	return out, nil
}

// isOwnHost reports whether host is a name of this server.
func (c *Client) isOwnHost(host string) bool {
	host = strings.TrimSuffix(host, ".")
	return slices.ContainsFunc(c.cfg.Direct.Names, func(n string) bool { return n != "" && strings.EqualFold(n, host) })
}

// addresses returns those of a host that may be connected to.
func (c *Client) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if _, err := netip.ParseAddr(host); err == nil {
		return nil, errors.New("the MX record names an address and no host")
	}
	addrs, err := c.cfg.Direct.Resolver.LookupNetIP(ctx, "ip", host+".")
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", host, err)
	}
	var refused error
	var out []netip.Addr
	for _, a := range addrs {
		if err := c.mayConnect(a.Unmap()); err != nil {
			refused = fmt.Errorf("%s: %w", host, err)
			continue
		}
		out = append(out, a.Unmap())
	}
	if len(out) == 0 {
		return nil, refused
	}
	return out, nil
}

// mayConnect refuses what is no address of the public Internet. The attack: a
// domain whose MX leads to a service inside, to which we would speak in the
// name of this machine.
func (c *Client) mayConnect(a netip.Addr) error {
	if c.cfg.Direct.Private {
		return nil
	}
	// The port is any that is no mail port: those are not for connections of
	// sandboxes, whose rules these are.
	if v := c.public.Connect(policy.Connection{Addr: netip.AddrPortFrom(a, 443)}); v.Effect != policy.Allow {
		return fmt.Errorf("it leads to %v, which is not on the public Internet: %s", a, v.Reason)
	}
	return nil
}

// deliverDirect takes env to the recipients ds of one domain.
func (c *Client) deliverDirect(ctx context.Context, domain string, env mail.Envelope, ds []*mail.Delivery) {
	v, x, err := c.connectDirect(ctx, domain)
	if x.host != "" {
		for _, d := range ds {
			d.Remote = x.host
		}
	}
	var route *routeError
	switch {
	case errors.As(err, &route):
		o := mail.NotSent
		if strings.HasPrefix(route.status, "5") {
			o = mail.Refused
		}
		setOutcome(ds, o, "%s", route.text)
		for _, d := range ds {
			d.Status, d.Gone = route.status, route.permanent
		}
		return
	case err != nil:
		// Whatever a server says before it has heard of a message is about us
		// or about itself, and may be better tomorrow.
		setOutcome(ds, mail.NotSent, "%v", err)
		return
	}
	v.deliver(env, ds)
}

// connectDirect opens a conversation with the first server of a domain that has one.
func (c *Client) connectDirect(ctx context.Context, domain string) (*conversation, exchange, error) {
	name, err := asciiDomain(domain)
	if err != nil {
		return nil, exchange{}, err
	}
	xs, err := c.exchanges(ctx, name)
	if err != nil {
		return nil, exchange{}, err
	}
	sts := c.sts.policy(ctx, name)
	tries := 0
	var last error
	var at exchange
	for _, x := range xs {
		at = x
		if x.err != nil {
			last = x.err
			continue
		}
		if sts.Mode == stsEnforce && !sts.allows(x.host) {
			last = &routeError{text: fmt.Sprintf("the MTA-STS policy of %s does not name its mail server %s", name, x.host), status: "4.7.5"}
			continue
		}
		for _, a := range x.addrs {
			if tries++; tries > maxTries {
				return nil, at, last
			}
			t := target{addr: net.JoinHostPort(a.String(), c.cfg.Direct.Port), host: x.host, dial: directDialTime}
			if sts.Mode == stsEnforce {
				t.require, t.tls = true, &tls.Config{ServerName: x.host, RootCAs: c.cfg.Direct.Roots, MinVersion: tls.VersionTLS12}
			}
			v, err := c.open(ctx, t)
			if err == nil {
				return v, x, nil
			}
			if last = err; t.require {
				last = fmt.Errorf("the MTA-STS policy of %s requires TLS with a valid certificate: %s: %w", name, x.host, err)
			}
			if ctx.Err() != nil {
				return nil, at, last
			}
		}
	}
	if last == nil { // unreachable: exchanges returns at least one
		last = errors.New("no mail server of " + name + " could be tried")
	}
	return nil, at, last
}
