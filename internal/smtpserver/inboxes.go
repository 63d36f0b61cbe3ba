package smtpserver

import (
	"context"
	"errors"
	"net"
	"strings"

	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailauth"
	"postern/internal/mailbox"
	"postern/internal/store"
)

// InboxesConfig says how [Inboxes] works. All fields are required unless they
// say otherwise.
type InboxesConfig struct {
	DB   *store.DB
	Post *mailbox.PostOffice
	// Domain is the server's own mail domain, where inboxes get their addresses
	// unless a project brings a domain of its own.
	Domain string
	// Hostname names this server in Authentication-Results.
	Hostname string
	Resolver *net.Resolver
	// PublicRecord returns the name and the text of the DNS record for a DKIM
	// selector of this server.
	PublicRecord func(ctx context.Context, domain, selector string) (name, text string, err error)
	// EnforceDMARC refuses a message that is not proved to be from the domain in
	// its From field, if that domain asks for refusal (p=reject). When false the
	// result is only recorded.
	EnforceDMARC bool
}

// Inboxes is what stands behind a [Server] in production: it receives mail for
// the inboxes of this installation and proposes what they send. Its methods
// are the functions that [Config] asks for. It is safe for concurrent use.
type Inboxes struct {
	cfg      InboxesConfig
	verifier *mailauth.Verifier
}

// NewInboxes returns the inboxes of a configuration.
func NewInboxes(cfg InboxesConfig) (*Inboxes, error) {
	b := &Inboxes{cfg: cfg}
	var err error
	b.verifier, err = mailauth.New(mailauth.Config{
		Resolver: cfg.Resolver, Hostname: cfg.Hostname, Own: b.ownRecord, Ours: b.ownAddress,
	})
	return b, err
}

// ownRecord answers for the keys with which this server signs, whether or not
// they are in the DNS yet. It answers only for the mail domain: a project's
// domain is proved by what is published for everybody.
func (b *Inboxes) ownRecord(ctx context.Context, name string) (texts []string, known bool) {
	if strings.EqualFold(name, "_dmarc."+b.cfg.Domain) {
		return b.ownPolicy(ctx, name)
	}
	selector, domain, ok := strings.Cut(name, "._domainkey.")
	if !ok || !strings.EqualFold(domain, b.cfg.Domain) {
		return nil, false
	}
	_, text, err := b.cfg.PublicRecord(ctx, domain, selector)
	if err != nil {
		return nil, false // it may be another server's of the same domain
	}
	return []string{text}, true
}

// ownPolicy returns the DMARC policy of the mail domain: the published one, or
// p=quarantine where none is published. The attack: somebody outside writes to
// an agent as another inbox of ours, in a domain for which nobody has published
// a policy. What this server sends is signed, so the default does not hold it up.
func (b *Inboxes) ownPolicy(ctx context.Context, name string) (texts []string, known bool) {
	texts, err := b.cfg.Resolver.LookupTXT(ctx, name+".")
	if de, ok := errors.AsType[*net.DNSError](err); ok && de.IsNotFound {
		return []string{"v=DMARC1; p=quarantine; psd=n"}, true
	}
	return texts, err == nil
}

// ownAddress reports whether mail from an address leaves only through this
// server: the address is in the mail domain or belongs to an inbox. On an error
// it returns true, which is the strict answer; signed mail is accepted anyway.
func (b *Inboxes) ownAddress(ctx context.Context, address string) bool {
	if strings.EqualFold(mail.Domain(address), b.cfg.Domain) {
		return true
	}
	err := b.Accepts(ctx, address)
	return !errors.Is(err, ErrRelay) && !errors.Is(err, ErrNoMailbox)
}

// Accepts implements [Config.Accepts].
func (b *Inboxes) Accepts(ctx context.Context, rcpt string) error {
	if ours, err := b.cfg.Post.Directory.Serves(ctx, mail.Domain(rcpt)); err != nil {
		return err
	} else if !ours {
		return ErrRelay
	}
	err := b.cfg.Post.Accepts(ctx, rcpt)
	if errors.Is(err, directory.ErrNoInbox) {
		return ErrNoMailbox
	}
	return err
}

// Deliver implements [Config.Deliver]: it verifies who the message is from,
// records the result on top of the message, applies DMARC and stores it.
func (b *Inboxes) Deliver(ctx context.Context, env mail.Envelope, from Peer) error {
	results, field := b.verifier.Verify(ctx, mailauth.Message{Remote: from.Remote.Addr(), Helo: from.Helo, From: env.From, Raw: env.Raw})
	// An agent takes the From field for who speaks to it and acts upon it. So a
	// domain's p=reject is obeyed by default, though RFC 9989 section 7.4 leaves
	// it to the receiver. Mail that a mailing list changed on its way is then
	// lost to the inbox, but its sender hears of it: the refusal comes before
	// the message is accepted.
	if b.cfg.EnforceDMARC && results.Policy == "reject" {
		reason := "the message is not proved to be from " + results.DMARC.Domain + ", which asks to refuse such (DMARC)"
		if results.DMARC.Domain == "" {
			reason = "nobody can prove who the message is from: " + results.DMARC.Detail
		}
		return &RefusalError{Code: 550, Enhanced: [3]int{5, 7, 1}, Reason: reason}
	}
	env.Raw = append(field, b.verifier.Strip(env.Raw)...)
	err := b.cfg.Post.Receive(ctx, mailbox.Arrival{Envelope: env, Remote: from.Remote.String(), Auth: results})
	if errors.Is(err, mailbox.ErrFull) {
		// Not an error of this server: one would be logged for each attempt.
		return &RefusalError{Code: 452, Enhanced: [3]int{4, 2, 2}, Reason: "the inbox is full, try again later"}
	}
	return err
}
