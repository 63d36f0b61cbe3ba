package main

import (
	"cmp"
	"context"
	"errors"
	"net"
	"strings"

	"postern/internal/mail"
	"postern/internal/mailauth"
	"postern/internal/mailbox"
	"postern/internal/smtpserver"
)

func (d *daemon) smtpServer() (*smtpserver.Server, error) {
	hostname := cmp.Or(d.conf.MailHost, d.conf.MailDomain)
	proofs, err := mailauth.New(mailauth.Config{Resolver: d.resolver, Hostname: hostname, Own: d.ownRecord, Ours: d.ownAddress})
	if err != nil {
		return nil, err
	}
	mailTLS, err := d.mailTLS(hostname)
	if err != nil {
		return nil, err
	}
	return smtpserver.New(d.log, smtpserver.Config{
		Hostname: hostname,
		Accepts:  d.accepts,
		Deliver: func(ctx context.Context, env mail.Envelope, from smtpserver.Peer) error {
			return d.receive(ctx, proofs, env, from)
		},
		Propose:      d.proposeCaptured,
		Authenticate: d.authenticate,
		Submit:       d.submit,
		TLS:          mailTLS,
	})
}

// ownRecord answers for the keys with which this server signs, whether they are
// in the DNS yet or not. Only for the mail domain: a project's domain is proved
// by what everybody sees of it.
func (d *daemon) ownRecord(ctx context.Context, name string) (texts []string, known bool) {
	if strings.EqualFold(name, "_dmarc."+d.conf.MailDomain) {
		return d.ownPolicy(ctx, name)
	}
	selector, domain, ok := strings.Cut(name, "._domainkey.")
	if !ok || !strings.EqualFold(domain, d.conf.MailDomain) {
		return nil, false
	}
	_, text, err := d.ring.PublicRecord(ctx, domain, selector)
	if err != nil {
		return nil, false // it may be another server's of the same domain
	}
	return []string{text}, true
}

// ownPolicy returns the DMARC policy of the mail domain: what the DNS says, and
// where that says nothing, one. The attack: somebody outside who writes to an
// agent as another inbox of ours, in a domain for which nobody has published
// anything. What this server sends is signed, so that it is not held up.
func (d *daemon) ownPolicy(ctx context.Context, name string) (texts []string, known bool) {
	texts, err := d.resolver.LookupTXT(ctx, name+".")
	if de, ok := errors.AsType[*net.DNSError](err); ok && de.IsNotFound {
		return []string{"v=DMARC1; p=quarantine; psd=n"}, true
	}
	return texts, err == nil
}

// ownAddress reports whether mail from an address leaves only through this
// server: the address is in the mail domain or is an inbox's. On an error it
// returns true; signed mail is accepted all the same.
func (d *daemon) ownAddress(ctx context.Context, address string) bool {
	if strings.EqualFold(mail.Domain(address), d.conf.MailDomain) {
		return true
	}
	err := d.accepts(ctx, address)
	return !errors.Is(err, smtpserver.ErrRelay) && !errors.Is(err, smtpserver.ErrNoMailbox)
}

// accepts says whether there is an inbox for rcpt.
func (d *daemon) accepts(ctx context.Context, rcpt string) error {
	if ours, err := d.post.Serves(ctx, mail.Domain(rcpt)); err != nil {
		return err
	} else if !ours {
		return smtpserver.ErrRelay
	}
	err := d.post.Accepts(ctx, rcpt)
	if errors.Is(err, mailbox.ErrNoInbox) {
		return smtpserver.ErrNoMailbox
	}
	return err
}

// receive takes a message over that another server brings: what it claims of
// its sender is checked, written on top of it, and judged.
func (d *daemon) receive(ctx context.Context, proofs *mailauth.Verifier, env mail.Envelope, from smtpserver.Peer) error {
	results, field := proofs.Verify(ctx, mailauth.Message{Remote: from.Remote.Addr(), Helo: from.Helo, From: env.From, Raw: env.Raw})
	// An agent takes the From field for who speaks to it, and acts upon it. So
	// a domain that asks for it is obeyed by default, though RFC 9989 section
	// 7.4 leaves it to the receiver: mail that came over a list which changed
	// it is lost to the inbox then, but its sender hears of it, as this is
	// said before the message is taken.
	if d.conf.DMARC == "enforce" && results.Policy == "reject" {
		reason := "the message is not proved to be from " + results.DMARC.Domain + ", which asks to refuse such (DMARC)"
		if results.DMARC.Domain == "" {
			reason = "nobody can prove who the message is from: " + results.DMARC.Detail
		}
		return &smtpserver.RefusalError{Code: 550, Enhanced: [3]int{5, 7, 1}, Reason: reason}
	}
	env.Raw = append(field, proofs.Strip(env.Raw)...)
	err := d.post.Receive(ctx, mailbox.Arrival{Envelope: env, Remote: from.Remote.String(), Auth: results})
	if errors.Is(err, mailbox.ErrFull) {
		// No error of ours, which would be logged as one each time.
		return &smtpserver.RefusalError{Code: 452, Enhanced: [3]int{4, 2, 2}, Reason: "the inbox is full, try again later"}
	}
	return err
}
