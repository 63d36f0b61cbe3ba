// Package smtpclient delivers messages to other mail servers over SMTP.
//
// What it must get right is to say what happened. For each recipient it tells
// apart: the next server took it; it was refused for good; it has certainly
// not been delivered; and nobody can know, because the last octet of the
// message may have arrived and no reply came. The line between the last two is
// the final dot: before it is written completely no server may deliver, after
// it any server may have. A message is never sent a second time from here.
//
// The conversation is our own and not go-smtp's, since that library does not
// say whether a failure came before or after the final dot, bounds no reply,
// and greets as "localhost" before STARTTLS.
//
// Where a message goes is configured (routes, a relay), or found in DNS: then
// servers are tried in the order that their domain asks for, and MTA-STS holds.
// It decides nothing about who may send what.
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

// Config says where messages go and how long each step may take.
type Config struct {
	// Hostname is the name that the client greets with. Required.
	Hostname string

	// Own is the host:port at which this server takes mail for its own domains:
	// those for which Serves says so. Both may be empty.
	Own    string
	Serves func(ctx context.Context, domain string) (bool, error)

	// Routes maps a recipient domain, in lower case, to the host:port of its server.
	Routes map[string]string
	// Relay is the host:port that takes everything else; empty means that
	// recipients without a route are refused.
	Relay string
	// Direct sends everything else to the servers that DNS names; nil does not.
	// Set at most one of Relay and Direct.
	Direct *Direct
	// NoRoute tells the person who reads such a refusal what to set. Empty
	// means a sentence that names the fields of this struct.
	NoRoute string

	// Dial makes a TCP connection; nil means net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// TLS is used when the server offers STARTTLS. nil encrypts without
	// verifying: whoever could forge a certificate could remove STARTTLS too.
	TLS *tls.Config
	// RequireTLS refuses to send to a server without STARTTLS, or with a
	// certificate that TLS does not accept.
	RequireTLS bool

	DialTimeout    time.Duration // for a connection; zero means 1 minute
	CommandTimeout time.Duration // for a reply, or for a piece of the message to be taken; zero means 5 minutes
	// FinalTimeout is how long to wait for the reply after the final dot, also
	// when the context is done by then: giving up early makes a certain
	// outcome uncertain. Zero means the 10 minutes of RFC 5321 4.5.3.2.6.
	FinalTimeout time.Duration
}

var (
	_ delivery.Transport = (*Client)(nil)
	_ delivery.Router    = (*Client)(nil)
	_ delivery.Guide     = (*Client)(nil)
)

// A Client is safe for concurrent use; each delivery has connections of its own.
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
		return nil, errors.New("configure smtp client: mail goes through a relay or directly, not both")
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

// Deliver hands env to the next server of each recipient and returns what
// became of each, in the order of env.To. The servers receive exactly the
// bytes of env.Prefix and env.Raw. Servers are tried once and one after the other. An error,
// instead, means that env cannot be sent as it is and that nothing was.
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
			all[i].Detail = "it cannot be told now whether this server takes mail for " + mail.Printable(mail.Domain(to), maxDetail)
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

// direct begins what stands for the servers of a domain among addresses.
const direct = "mx "

// next returns the host:port of the server for a domain, or nothing.
func (c *Client) next(ctx context.Context, domain string) (string, error) {
	if addr, ok := c.cfg.Routes[domain]; ok {
		return addr, nil
	}
	// The attack: a domain written another way, which goes round its route.
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

// Unroutable implements [delivery.Guide]. A domain of which it cannot be told is none.
func (c *Client) Unroutable(ctx context.Context, recipients []string) (domains []string, hint string) {
	for _, to := range recipients {
		domain := canonicalDomain(mail.Domain(to))
		if addr, err := c.next(ctx, domain); err == nil && addr == "" && c.cfg.Direct == nil && !slices.Contains(domains, domain) {
			domains = append(domains, domain)
		}
	}
	return domains, c.cfg.NoRoute
}

// canonicalDomain returns a domain as DNS has it, if it can.
func canonicalDomain(domain string) string {
	if name, ok := policy.Host(domain); ok {
		return name
	}
	return domain
}

// Hop implements [delivery.Router]. One domain is one destination, however it is
// written, or its limits would be one for each way to write it.
func (c *Client) Hop(ctx context.Context, recipient string) delivery.Hop {
	domain := canonicalDomain(mail.Domain(recipient))
	switch addr, err := c.next(ctx, domain); {
	case err == nil && addr == "" && c.cfg.Direct != nil:
		return delivery.Hop{Kind: delivery.HopDirect, Name: domain}
	case err != nil || addr == "" || addr == c.cfg.Own:
		return delivery.Hop{Kind: delivery.HopLocal, Name: addr} // also what Deliver does not send at all
	default:
		return delivery.Hop{Kind: delivery.HopRelay, Name: addr}
	}
}

// setOutcome writes an outcome for every recipient of ds.
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

// setFailed writes the outcome of an error that came before the final dot.
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

// setCodes writes the codes of a reply beside the outcomes that it brought.
func (e *replyError) setCodes(ds []*mail.Delivery) {
	for _, d := range ds {
		d.Code, d.Status = e.code, status(e.code, e.text)
		d.Gone = d.Outcome == mail.Refused && e.to == "RCPT" && e.permanent()
	}
}

// permanent says whether a refused recipient is one that will never be there. What
// is refused for what it says, or for who sent it, is not: another message may
// be taken.
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

// status returns the RFC 2034 code that a reply begins with, if it is of the
// class of its code.
func status(code int, text string) string {
	m := enhanced().FindStringSubmatch(text)
	if m == nil || int(m[1][0]-'0') != code/100 {
		return ""
	}
	return strings.TrimSpace(m[0])
}

// errUnsupported means that the server cannot take this message, today or tomorrow.
var errUnsupported = errors.New("the server cannot take this message")

// envelope sends MAIL and RCPT and returns the recipients that were taken.
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
		default: // the connection is gone, and so is what was taken
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
