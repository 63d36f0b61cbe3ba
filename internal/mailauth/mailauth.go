// Package mailauth proves who a message that arrived is from: SPF (RFC 7208),
// DKIM (RFC 6376, 8301, 8463), ARC (RFC 8617) and, from these, DMARC (RFC 9989,
// by the DNS tree walk), told in an Authentication-Results field (RFC 8601).
//
// Everything that it reads is hostile: the message, and every DNS answer, which
// the sender's own servers give. Lookups are bounded in number, each message in
// time and in signatures, and what is slow or broken becomes a result of its
// own (temperror) instead of an error: mail is not refused because somebody's
// DNS is down, and is marked as unproved.
//
// It must not decide what becomes of a message; [mail.Results.Policy] says only
// what the domain asks for.
//
// go-msgauth verifies DKIM too, but shows neither its canonicalisation nor its
// keys, which ARC needs, searches every field for every name that a signature
// lists, and takes any l= for a failure. It is what the tests here compare with.
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

// The bounds of what one message may make us do.
const (
	maxSignatures = 8         // DKIM signatures that are looked at, the first ones
	maxARCSets    = 50        // RFC 8617 section 4.2.1
	maxSignField  = 32 << 10  // bytes of one signature field
	maxSignedKeys = 500       // names in its h=
	maxLookups    = 200       // questions to DNS in all
	maxSPFLookups = 60        // of those, for one SPF check: ten terms, of which an mx may need ten more
	maxTexts      = 50        // text records of one name that are looked at
	maxFields     = 1000      // of a header
	maxHeader     = 256 << 10 // bytes of it; package mail reads no longer one either
	maxBodyHashes = 4         // ways in which one body is hashed; each costs as much as its length
)

// Config says how a [Verifier] works.
type Config struct {
	Resolver *net.Resolver // required
	Hostname string        // our name, under which results are written down; required
	// Timeout bounds all of one message's lookups together; zero means 20 s.
	Timeout time.Duration
	// Own answers questions for text records of our own domains before DNS is
	// asked, so that a domain without any DNS proves its own mail. It is called
	// concurrently; nil knows none.
	Own func(ctx context.Context, name string) (texts []string, known bool)
	// Ours reports whether an address sends only through this server: an inbox's, or
	// any in the mail domain. It is called concurrently; nil means that none does.
	Ours func(ctx context.Context, address string) bool
}

// A Verifier is safe for concurrent use.
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

// A Message is what arrived, and from where.
type Message struct {
	Remote netip.Addr // the peer; the zero Addr if it is not known
	Helo   string     // what it called itself
	From   string     // the reverse path; empty for a bounce
	Raw    []byte     // lines end in CR LF
}

// local says whether m came from this machine: from a program here, or from a
// mail server in front that has taken it from outside. SPF can say nothing about
// either, so that no domain's policy is applied, nor asked for: a domain without
// any DNS works too. That holds only for strangers' addresses, see [Config.Ours].
func (m Message) local() bool { return m.Remote.Unmap().IsLoopback() }

// Verify says who m is from. The field that it returns says the same and more
// as a header field with its line end, to be put on top of the message once
// [Verifier.Strip] has taken false ones out.
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

	if m.From == "" { // RFC 7208 2.4: a bounce is from its host
		from = helo
		from.domain = heloDomain(m.Helo)
	}
	r := mail.Results{SPF: from.Check(), DKIM: best(sigs, author.domain), ARC: chain.Check()}
	r.DMARC, r.Policy = evaluate(ctx, ask, author, from, sigs)
	return r, v.field(m, from, helo, sigs, chain, author, r)
}

// best returns the check of the signature that says most: one that passed, of
// the author's own domain before another's.
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
