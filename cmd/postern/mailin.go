package main

import (
	"cmp"
	"context"
	"net/netip"
	"strconv"

	"postern/internal/auth"
	"postern/internal/imapserver"
	"postern/internal/mail"
	"postern/internal/smtpserver"
)

// smtpServer returns the server for all mail that comes in: from other servers,
// from programs that submit, and from sandboxes.
func (d *daemon) smtpServer() (*smtpserver.Server, error) {
	hostname := cmp.Or(d.conf.MailHost, d.conf.MailDomain)
	inboxes, err := smtpserver.NewInboxes(smtpserver.InboxesConfig{
		DB: d.db, Post: d.post, Domain: d.conf.MailDomain, Hostname: hostname, Resolver: d.resolver,
		PublicRecord: d.ring.PublicRecord, EnforceDMARC: d.conf.DMARC == "enforce",
	})
	if err != nil {
		return nil, err
	}
	mailTLS, err := d.mailTLS(hostname)
	if err != nil {
		return nil, err
	}
	return smtpserver.New(d.log, smtpserver.Config{
		Hostname: hostname,
		Accepts:  inboxes.Accepts,
		Deliver:  inboxes.Deliver,
		Propose: func(ctx context.Context, who auth.Principal, dst netip.AddrPort, env mail.Envelope) (string, error) {
			server := dst.String()
			if name := d.wall.NameOf(who.ID, dst.Addr()); name != "" {
				server = name + ":" + strconv.Itoa(int(dst.Port()))
			}
			return inboxes.ProposeCaptured(ctx, who, server, env)
		},
		Authenticate: inboxes.Authenticate,
		Submit:       inboxes.Submit,
		TLS:          mailTLS,
	})
}

// imapServer returns the server for mail programs that read inboxes.
func (d *daemon) imapServer() (*imapserver.Server, error) {
	mailTLS, err := d.mailTLS(cmp.Or(d.conf.MailHost, d.conf.MailDomain))
	if err != nil {
		return nil, err
	}
	return imapserver.New(d.log, imapserver.Config{DB: d.db, Post: d.post, Gate: d.gate, TLS: mailTLS, Scrub: &d.scrubber})
}
