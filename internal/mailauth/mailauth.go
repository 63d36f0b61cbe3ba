// Package mailauth authenticates the sender of a received message: SPF (RFC 7208), DKIM
// (RFC 6376, 8301, 8463), ARC (RFC 8617) and DMARC (RFC 9989, with the DNS tree walk). It
// reports the results in an Authentication-Results field (RFC 8601).
//
// All input is hostile: the message, and every DNS answer, since it comes from the
// sender's servers. The number of lookups and signatures and the time of each message
// are bounded. Slow or broken DNS gives the result temperror instead of an error: the
// mail is accepted and marked as unauthenticated.
//
// This package must not decide what happens to a message. [mail.Results.Policy] is only
// what the domain requests.
//
// go-msgauth verifies DKIM too, but it does not export its canonicalization and its
// keys, which ARC needs. It also searches all fields for each name that a signature
// lists, and treats any l= as a failure. The tests compare this package with it.
package mailauth

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"time"

	"postern/internal/mail"
)

// The limits of the work that one message can cause.
const (
	maxSignatures = 8         // DKIM signatures that are verified: the first ones
	maxARCSets    = 50        // RFC 8617 section 4.2.1
	maxSignField  = 32 << 10  // bytes of one signature field
	maxSignedKeys = 500       // names in its h=
	maxLookups    = 200       // DNS lookups in total
	maxSPFLookups = 60        // of those, for one SPF check: ten terms, each mx with up to ten hosts
	maxTexts      = 50        // TXT records of one name that are read
	maxFields     = 1000      // of a header
	maxHeader     = 256 << 10 // bytes of a header; package mail has the same limit
	maxBodyHashes = 4         // distinct (canonicalization, l=) pairs for which the body is hashed; each reads the whole body
)

// Config configures a [Verifier].
type Config struct {
	Resolver *net.Resolver // required
	Hostname string        // this server's name in Authentication-Results; required
	// Timeout bounds the verification of one message; zero means 20 s.
	Timeout time.Duration
	// Own returns the TXT records of this server's own domains. It is called before DNS,
	// so that mail of a domain without DNS can be authenticated. It is called
	// concurrently; nil means that no name is known.
	Own func(ctx context.Context, name string) (texts []string, known bool)
	// Ours reports whether an address sends only through this server: an inbox's, or
	// any in the mail domain. It is called concurrently; nil means that none does.
	Ours func(ctx context.Context, address string) bool
}

// A Verifier authenticates messages. It is safe for concurrent use.
type Verifier struct {
	cfg Config
	now func() time.Time
}

// New returns a verifier.
func New(cfg Config) (*Verifier, error) {
	if cfg.Resolver == nil {
		return nil, errors.New("configure mail authentication: Resolver is missing")
	}
	if !isHost(cfg.Hostname) {
		return nil, errors.New("configure mail authentication: Hostname is not a host name")
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = 20 * time.Second
	}
	return &Verifier{cfg: cfg, now: time.Now}, nil
}

// A Message is a received message and its SMTP envelope.
type Message struct {
	Remote netip.Addr // address of the SMTP client; the zero Addr if unknown
	Helo   string     // name that the client gave in HELO or EHLO
	From   string     // reverse path; empty for a bounce
	Raw    []byte     // lines end in CR LF
}

// local reports whether m came from this machine: from a local program, or from a mail
// server in front of this one, which has received it from outside. SPF cannot check
// either, so DMARC policy is neither looked up nor applied, and domains without DNS work
// too. This exception does not cover the server's own addresses: see [Config.Ours].
func (m Message) local() bool { return m.Remote.Unmap().IsLoopback() }

// Verify authenticates the sender of m. It also returns an Authentication-Results field
// with its line end, which the caller prepends to the message after [Verifier.Strip] has
// removed forged ones.
func (v *Verifier) Verify(ctx context.Context, m Message) (mail.Results, []byte) {
	ctx, cancel := context.WithTimeout(ctx, v.cfg.Timeout)
	defer cancel()
	ask := newAsker(v.cfg)
	h := splitMessage(m.Raw)

	var (
		wg       group
		from     spfResult
		helo     spfResult
		sigs     []signature
		chain    arcResult
		author   author
		bodySums = &bodyHashes{body: h.body}
	)
	wg.Go(func() { from = v.spfFrom(ctx, ask, m) })
	wg.Go(func() { helo = v.spfHelo(ctx, ask, m) })
	wg.Go(func() { sigs = v.verifyDKIM(ctx, ask, h, bodySums) })
	wg.Go(func() { chain = v.verifyARC(ctx, ask, h, bodySums) })
	wg.Go(func() { author = findAuthor(ctx, ask, m) })
	wg.Wait()

	if m.From == "" { // RFC 7208, section 2.4: a bounce is checked by its HELO name
		from = helo
		from.domain = heloDomain(m.Helo)
	}
	r := mail.Results{SPF: from.Check(), DKIM: best(sigs, author.domain), ARC: chain.Check()}
	r.DMARC, r.Policy = evaluate(ctx, ask, author, from, sigs)
	return r, v.field(m, from, helo, sigs, chain, author, r)
}

// best returns the check of the most significant signature: a passing one first, and
// among equals one of the author's domain.
func best(sigs []signature, author string) mail.Check {
	if len(sigs) == 0 {
		return mail.Check{Result: "none"}
	}
	rank := func(s signature) int {
		n := map[string]int{"pass": 100, "policy": 50, "temperror": 40, "fail": 30, "neutral": 20, "permerror": 10}[s.result]
		if author != "" && (s.domain == author || strings.HasSuffix(author, "."+s.domain)) {
			n += 5
		}
		return n
	}
	b := sigs[0]
	for _, s := range sigs[1:] {
		if rank(s) > rank(b) {
			b = s
		}
	}
	return b.Check()
}
