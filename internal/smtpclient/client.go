// Package smtpclient delivers messages to other mail servers over SMTP.
//
// Its most important result is the outcome. For each recipient it distinguishes:
// accepted by the next server; refused permanently; certainly not delivered; and
// uncertain, because the last octet of the message may have arrived and no reply
// came. The border between the last two is the final dot: before it is written
// completely no server may deliver, after that any server may have. This package
// never sends a message twice.
//
// The protocol is implemented here and not by go-smtp's client, which does not
// report whether a failure came before or after the final dot, does not bound
// replies, and greets as "localhost" before STARTTLS.
//
// The next server is configured (routes, a relay) or found in DNS; then servers are
// tried in the order of preference of the domain, under its MTA-STS policy. The
// package does not decide who may send what.
package smtpclient

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/delivery"
	"postern/internal/mail"
	"postern/internal/policy"
)

// Config says where messages go and bounds the time of each step.
type Config struct {
	// Hostname is the name that the client greets with. Required.
	Hostname string

	// Own is the host:port at which this server accepts mail for the domains for
	// which Serves returns true. Both may be empty.
	Own    string
	Serves func(ctx context.Context, domain string) (bool, error)

	// Routes maps a recipient domain, in lower case, to the host:port of its server.
	Routes map[string]string
	// Relay is the host:port for all other domains; empty means that recipients
	// without a route are refused.
	Relay string
	// Direct sends mail for all other domains to the servers in their MX records; nil
	// does not. Set at most one of Relay and Direct.
	Direct *Direct
	// NoRoute is the hint for people in refusals of recipients without a route.
	// Empty means one that names the fields of this struct.
	NoRoute string

	// Dial makes a TCP connection; nil means net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// TLS is used when the server offers STARTTLS. nil encrypts without verifying
	// the certificate: an attacker who could forge one could also remove STARTTLS.
	TLS *tls.Config
	// RequireTLS refuses to send to a server without STARTTLS, or with a
	// certificate that TLS does not accept.
	RequireTLS bool

	DialTimeout    time.Duration // for a connection; zero means 1 minute
	CommandTimeout time.Duration // for a reply, or for one write of the message; zero means 5 minutes
	// FinalTimeout bounds the wait for the reply after the final dot, even if the
	// context is done: giving up early would turn a certain outcome into an uncertain
	// one. Zero means the 10 minutes of RFC 5321 4.5.3.2.6.
	FinalTimeout time.Duration
}

var (
	_ delivery.Transport = (*Client)(nil)
	_ delivery.Router    = (*Client)(nil)
	_ delivery.Guide     = (*Client)(nil)
)

// A Client is safe for concurrent use; each delivery opens its own connections.
type Client struct {
	cfg    Config
	public *policy.Outbound // what is on the public Internet; nil without Direct
	sts    *policies        // likewise
}

// New returns a client; it connects to nothing.
func New(cfg Config) (*Client, error) {
	if cfg.Hostname == "" || strings.ContainsAny(cfg.Hostname, " \t\r\n\x00") {
		return nil, fmt.Errorf("configure smtp client: hostname %q is not a host name", cfg.Hostname)
	}
	routes := map[string]string{}
	for domain, addr := range cfg.Routes {
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return nil, fmt.Errorf("configure smtp client: route of %s: %w", domain, err)
		}
		routes[strings.ToLower(domain)] = addr
	}
	cfg.Routes = routes
	if cfg.Relay != "" {
		if _, _, err := net.SplitHostPort(cfg.Relay); err != nil {
			return nil, fmt.Errorf("configure smtp client: relay: %w", err)
		}
	}
	if cfg.Relay != "" && cfg.Direct != nil {
		return nil, errors.New("configure smtp client: set Relay or Direct, not both")
	}
	if cfg.RequireTLS && cfg.TLS == nil {
		return nil, errors.New("configure smtp client: RequireTLS needs TLS")
	}
	if cfg.NoRoute == "" {
		cfg.NoRoute = "set a relay for all domains or a route for this one"
	}
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{}).DialContext
	}
	def := func(d *time.Duration, to time.Duration) {
		if *d <= 0 {
			*d = to
		}
	}
	def(&cfg.DialTimeout, time.Minute)
	def(&cfg.CommandTimeout, 5*time.Minute)
	def(&cfg.FinalTimeout, 10*time.Minute)
	c := &Client{cfg: cfg}
	if cfg.Direct == nil {
		return c, nil
	}
	d := *cfg.Direct
	c.cfg.Direct = &d
	if d.Resolver == nil {
		d.Resolver = net.DefaultResolver
	}
	if d.Port == "" {
		d.Port = "25"
	}
	var err error
	if c.public, err = policy.NewOutbound(policy.Egress{Internet: true}, policy.Ceiling{Internet: true}); err != nil {
		return nil, fmt.Errorf("configure smtp client: %w", err)
	}
	c.sts = newPolicies(&d, c.mayConnect)
	return c, nil
}

// Deliver sends env to the next server of each recipient and returns the outcomes in
// the order of env.To. The servers receive exactly the bytes of env.Prefix and
// env.Raw. It tries each server once, one after the other. An error means that env
// cannot be sent as it is, and that nothing was sent.
func (c *Client) Deliver(ctx context.Context, env mail.Envelope) ([]mail.Delivery, error) {
	for _, part := range [][]byte{env.Prefix, env.Raw} { // each ends its last line
		if err := mail.CheckRaw(part); err != nil {
			return nil, fmt.Errorf("deliver message: %w", err)
		}
	}
	if _, err := (mail.Envelope{From: env.From, To: env.To}).Payload(); err != nil { // no address ends its command
		return nil, fmt.Errorf("deliver message: %w", err)
	}
	all := make([]mail.Delivery, len(env.To))
	groups := map[string][]*mail.Delivery{}
	var order []string
	for i, to := range env.To {
		all[i] = mail.Delivery{Recipient: to, Outcome: mail.NotSent}
		addr, err := c.next(ctx, mail.Domain(to))
		if err != nil {
			all[i].Detail = "cannot determine now whether this server accepts mail for " + mail.Printable(mail.Domain(to), maxDetail)
			continue
		}
		if addr == "" && c.cfg.Direct != nil {
			addr = direct + mail.Domain(to)
		}
		if addr == "" {
			all[i].Outcome = mail.Refused
			all[i].Detail = mail.Printable(fmt.Sprintf("no route to %s: %s", mail.Domain(to), c.cfg.NoRoute), maxDetail)
			continue
		}
		if !slices.Contains(order, addr) {
			order = append(order, addr)
		}
		groups[addr] = append(groups[addr], &all[i])
	}
	for _, addr := range order {
		if domain, ok := strings.CutPrefix(addr, direct); ok {
			c.deliverDirect(ctx, domain, env, groups[addr])
		} else {
			c.deliverTo(ctx, addr, env, groups[addr])
		}
	}
	return all, nil
}

// direct is the prefix that marks a domain, instead of a host:port, as a group.
const direct = "mx "

// next returns the host:port of the configured server for a domain, or the empty
// string if there is none.
func (c *Client) next(ctx context.Context, domain string) (string, error) {
	if addr, ok := c.cfg.Routes[domain]; ok {
		return addr, nil
	}
	// The attack: a domain in another spelling, which bypasses its route.
	domain = canonicalDomain(domain)
	if addr, ok := c.cfg.Routes[domain]; ok {
		return addr, nil
	}
	if c.cfg.Serves != nil {
		ok, err := c.cfg.Serves(ctx, domain)
		if err != nil {
			return "", fmt.Errorf("ask whether %s is served here: %w", domain, err)
		}
		if ok {
			return c.cfg.Own, nil
		}
	}
	return c.cfg.Relay, nil
}

// Unroutable implements [delivery.Guide]. If a lookup fails the domain counts as
// routable.
func (c *Client) Unroutable(ctx context.Context, recipients []string) (domains []string, hint string) {
	for _, to := range recipients {
		domain := canonicalDomain(mail.Domain(to))
		if addr, err := c.next(ctx, domain); err == nil && addr == "" && c.cfg.Direct == nil && !slices.Contains(domains, domain) {
			domains = append(domains, domain)
		}
	}
	return domains, c.cfg.NoRoute
}

// canonicalDomain returns a domain in its canonical form, or as it is if it has
// none.
func canonicalDomain(domain string) string {
	if name, ok := policy.Host(domain); ok {
		return name
	}
	return domain
}

// Hop implements [delivery.Router]. The domain is canonical, so that each spelling
// does not get a limit of its own.
func (c *Client) Hop(ctx context.Context, recipient string) delivery.Hop {
	domain := canonicalDomain(mail.Domain(recipient))
	switch addr, err := c.next(ctx, domain); {
	case err == nil && addr == "" && c.cfg.Direct != nil:
		return delivery.Hop{Kind: delivery.HopDirect, Name: domain}
	case err != nil || addr == "" || addr == c.cfg.Own:
		return delivery.Hop{Kind: delivery.HopLocal, Name: addr} // also recipients that Deliver refuses
	default:
		return delivery.Hop{Kind: delivery.HopRelay, Name: addr}
	}
}

// setOutcome sets the outcome of all ds.
func setOutcome(ds []*mail.Delivery, o mail.Outcome, format string, args ...any) {
	for _, d := range ds {
		d.Outcome, d.Detail = o, mail.Printable(fmt.Sprintf(format, args...), maxDetail)
	}
}

// deliverTo sends env to the recipients ds over the server at addr.
func (c *Client) deliverTo(ctx context.Context, addr string, env mail.Envelope, ds []*mail.Delivery) {
	for _, d := range ds {
		d.Remote = addr
	}
	host, _, _ := net.SplitHostPort(addr)
	v, err := c.open(ctx, target{addr: addr, host: host, tls: c.cfg.TLS, require: c.cfg.RequireTLS, dial: c.cfg.DialTimeout})
	if err != nil {
		setFailed(ds, err)
		return
	}
	v.deliver(env, ds)
}

// deliver sends env to the recipients ds and ends the conversation.
func (v *conversation) deliver(env mail.Envelope, ds []*mail.Delivery) {
	defer v.close()
	ds = v.envelope(env, ds)
	if len(ds) == 0 {
		return
	}
	if _, err := v.command(354, "DATA"); err != nil {
		setFailed(ds, err)
		return
	}
	if err := v.body(env.Prefix, env.Raw); err != nil {
		setFailed(ds, err)
		return
	}
	v.finish(ds)
}

// setFailed sets the outcome of an error before the final dot: refused after a
// permanent reply, else not sent.
func setFailed(ds []*mail.Delivery, err error) {
	o := mail.NotSent
	var r *replyError
	if errors.As(err, &r) && r.code/100 == 5 || errors.Is(err, errUnsupported) {
		o = mail.Refused
	}
	setOutcome(ds, o, "%v", err)
	if r != nil {
		r.setCodes(ds)
	}
}

// setCodes sets the reply's codes on the recipients whose outcome it decided.
func (e *replyError) setCodes(ds []*mail.Delivery) {
	for _, d := range ds {
		d.Code, d.Status = e.code, status(e.code, e.text)
		d.Gone = d.Outcome == mail.Refused && e.to == "RCPT" && e.permanent()
	}
}

// permanent reports whether a refused recipient does not exist. A refusal because of
// the content or the sender is not about the recipient, who may accept another
// message.
func (e *replyError) permanent() bool {
	switch s := status(e.code, e.text); s {
	case "5.1.1", "5.1.2", "5.1.3", "5.1.6", "5.1.10", "5.2.1":
		return true
	case "":
		return e.code == 550 || e.code == 553 // RFC 5321 4.2.2: mailbox not found, its name not allowed
	}
	return false
}

var enhanced = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^([245])\.\d{1,3}\.\d{1,3}(?:\s|$)`) })

// status returns the enhanced status code (RFC 2034) at the beginning of a reply, if
// its class agrees with the reply's code.
func status(code int, text string) string {
	m := enhanced().FindStringSubmatch(text)
	if m == nil || int(m[1][0]-'0') != code/100 {
		return ""
	}
	return strings.TrimSpace(m[0])
}

// errUnsupported means that the server lacks an extension that this message needs,
// so that a retry is pointless.
var errUnsupported = errors.New("the server cannot take this message")

// envelope sends MAIL and RCPT and returns the recipients that were accepted.
func (v *conversation) envelope(env mail.Envelope, ds []*mail.Delivery) []*mail.Delivery {
	from, err := v.mailCommand(env, ds)
	if err == nil {
		_, err = v.command(250, "%s", from)
	}
	if err != nil {
		setFailed(ds, err)
		return nil
	}
	var taken []*mail.Delivery
	for i, d := range ds {
		// RFC 5321 has 251 as well: "will forward".
		_, err := v.command(25, "RCPT TO:<%s>", d.Recipient)
		var r *replyError
		switch {
		case err == nil:
			taken = append(taken, d)
		case errors.As(err, &r) && r.code != 421:
			setFailed([]*mail.Delivery{d}, err)
		default: // the connection is lost, and with it the accepted recipients
			setFailed(append(taken, ds[i:]...), err)
			return nil
		}
	}
	return taken
}

// mailCommand returns the MAIL command that the message needs.
func (v *conversation) mailCommand(env mail.Envelope, ds []*mail.Delivery) (string, error) {
	cmd := "MAIL FROM:<" + env.From + ">"
	header := env.Raw
	if i := bytes.Index(env.Raw, []byte("\r\n\r\n")); i >= 0 {
		header = env.Raw[:i]
	}
	utf8 := !ascii(env.Prefix) || !ascii(header) || !ascii([]byte(env.From)) || slices.ContainsFunc(ds, func(d *mail.Delivery) bool { return !ascii([]byte(d.Recipient)) })
	eight := !ascii(env.Prefix) || !ascii(env.Raw)
	octets := len(env.Prefix) + len(env.Raw)
	_, hasUTF8 := v.ext["SMTPUTF8"]
	_, hasEight := v.ext["8BITMIME"]
	switch {
	case utf8 && !hasUTF8:
		return "", fmt.Errorf("%w: an address or a header has letters outside ASCII and the server has no SMTPUTF8", errUnsupported)
	case eight && !hasEight:
		return "", fmt.Errorf("%w: it has octets above 127 and the server has no 8BITMIME; encode it as quoted-printable or base64", errUnsupported)
	}
	if size, ok := v.ext["SIZE"]; ok {
		var most int
		if _, err := fmt.Sscanf(size, "%d", &most); err == nil && most > 0 && octets > most {
			return "", fmt.Errorf("%w: it has %d octets and the server takes at most %d", errUnsupported, octets, most)
		}
		cmd += fmt.Sprintf(" SIZE=%d", octets)
	}
	if eight {
		cmd += " BODY=8BITMIME"
	}
	if utf8 {
		cmd += " SMTPUTF8"
	}
	return cmd, nil
}

// ascii reports whether b is ASCII.
func ascii(b []byte) bool {
	for _, c := range b {
		if c >= 0x80 {
			return false
		}
	}
	return true
}
