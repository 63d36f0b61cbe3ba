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

// Direct configures delivery to the servers in the MX records of a recipient's
// domain (RFC 5321 5.1). DNS answers are under the control of the domain's owner, who
// may be an attacker: they must not lead to hosts in private networks, cause loops,
// or make a delivery last for ever.
type Direct struct {
	Resolver *net.Resolver // nil means the system's
	Names    []string      // host names of this server, to detect loops
	DB       *store.DB     // keeps MTA-STS policies over restarts; nil keeps them in memory

	// Private allows addresses of private networks and of this machine. For labs.
	Private bool
	Port    string // of the servers; empty means 25. For labs
	// Roots are the CAs for servers of domains with an MTA-STS policy; nil means the
	// system's.
	Roots *x509.CertPool
	// PolicyPort is the port of policies; empty means 443. For labs.
	PolicyPort string
}

const (
	maxExchanges   = 10               // MX hosts of one domain that are resolved
	maxTries       = 8                // connection attempts for one message
	directDialTime = 30 * time.Second // for one address; shorter than DialTimeout, since there are others
)

// A routeError means that DNS has no usable server for a domain.
type routeError struct {
	text      string
	status    string // RFC 3463; its class says whether it is for good
	permanent bool   // the domain will never accept mail
}

// Error returns the reason.
func (e *routeError) Error() string { return e.text }

// An exchange is a host that accepts mail for a domain.
type exchange struct {
	host  string
	addrs []netip.Addr
	err   error // why addrs is empty, or nil
}

// asciiDomain returns a domain in the ASCII form for DNS, or a [routeError].
func asciiDomain(domain string) (string, error) {
	if strings.HasPrefix(domain, "[") {
		return "", &routeError{text: "mail to address literals is not supported", status: "5.1.2"}
	}
	name, err := idna.Lookup.ToASCII(strings.TrimSuffix(domain, "."))
	if err != nil || name == "" || len(name) > 253 {
		return "", &routeError{text: "the domain is not a valid DNS name", status: "5.1.2", permanent: true}
	}
	return name, nil
}

// exchanges returns the hosts that accept mail for a domain, in order of preference.
func (c *Client) exchanges(ctx context.Context, domain string) ([]exchange, error) {
	d := c.cfg.Direct
	mxs, err := d.Resolver.LookupMX(ctx, domain+".")
	var dnsErr *net.DNSError
	none := errors.As(err, &dnsErr) && dnsErr.IsNotFound
	if err != nil && !none && len(mxs) == 0 {
		return nil, fmt.Errorf("look up mail servers of %s: %w", domain, err)
	}
	if len(mxs) == 1 && strings.Trim(mxs[0].Host, ".") == "" {
		return nil, &routeError{text: domain + " accepts no mail: it has a null MX record (RFC 7505)", status: "5.1.10", permanent: true}
	}
	implicit := none
	if implicit { // RFC 5321 5.1: without MX records the domain's own address counts
		mxs = []*net.MX{{Host: domain + "."}}
	}
	mxs = slices.DeleteFunc(mxs, func(m *net.MX) bool { return strings.Trim(m.Host, ".") == "" })
	// RFC 5321 5.1: drop this server and all hosts that are not preferred to it, or
	// mail would loop.
	for _, m := range mxs {
		if c.isOwnHost(m.Host) {
			mxs = slices.DeleteFunc(mxs, func(o *net.MX) bool { return o.Pref >= m.Pref })
			if len(mxs) == 0 {
				return nil, &routeError{text: "mail for " + domain + " would loop: its MX record names this server, which does not accept mail for it", status: "5.4.6"}
			}
			break
		}
	}
	var out []exchange
	for _, m := range mxs[:min(len(mxs), maxExchanges)] {
		x := exchange{host: strings.ToLower(strings.TrimSuffix(m.Host, "."))}
		x.addrs, x.err = c.addresses(ctx, x.host)
		if implicit && errors.As(x.err, &dnsErr) && dnsErr.IsNotFound {
			return nil, &routeError{text: "the domain " + domain + " accepts no mail: it has neither MX records nor an address", status: "5.1.2", permanent: true}
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

// addresses returns the addresses of a host that may be connected to.
func (c *Client) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if _, err := netip.ParseAddr(host); err == nil {
		return nil, errors.New("the MX record has an address instead of a host name")
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

// mayConnect refuses addresses that are not on the public Internet. The attack: a
// domain whose MX record leads to an internal service, which trusts this machine.
func (c *Client) mayConnect(a netip.Addr) error {
	if c.cfg.Direct.Private {
		return nil
	}
	// These are the rules for sandboxes, which may not connect to mail ports. So the
	// check is done with another port.
	if v := c.public.Connect(policy.Connection{Addr: netip.AddrPortFrom(a, 443)}); v.Effect != policy.Allow {
		return fmt.Errorf("it leads to %v, which is not on the public Internet: %s", a, v.Reason)
	}
	return nil
}

// deliverDirect sends env to the recipients ds of one domain.
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
		// A refusal before MAIL is about this client or the server, not about the
		// message, so that a retry makes sense.
		setOutcome(ds, mail.NotSent, "%v", err)
		return
	}
	v.deliver(env, ds)
}

// connectDirect opens a conversation with the first server of a domain that answers.
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
