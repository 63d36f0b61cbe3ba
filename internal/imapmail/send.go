package imapmail

import (
	"context"
	"time"

	"github.com/emersion/go-imap/v2"

	"postern/internal/connector"
	"postern/internal/mail"
	"postern/internal/smtpclient"
)

// submission returns the server that takes the mailbox's mail.
func (p *Provider) submission() smtpclient.Submission {
	addr := p.set.Public[SMTP]
	s := smtpclient.Submission{Addr: addr, Implicit: implicit(addr, "587", "25"), TLS: p.o.tls(addr), User: p.set.Public[User], Password: p.set.Credential}
	if p.set.Public[Auth] == "xoauth2" {
		s.Token, s.Password = p.set.Credential, ""
	}
	return s
}

// Send implements [connector.Provider].
func (p *Provider) Send(ctx context.Context, e mail.Envelope) ([]mail.Delivery, error) {
	out, err := p.o.smtp.Submit(ctx, p.submission(), e)
	if err != nil {
		return nil, signIn(err)
	}
	for _, d := range out {
		if d.Outcome == mail.Accepted {
			p.keep(ctx, e.Raw)
			break
		}
	}
	return out, nil
}

// keep puts a copy of what was sent into the folder for it. It is for the person alone:
// if it fails, the message has left all the same.
func (p *Provider) keep(ctx context.Context, raw []byte) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commandTime)
	defer cancel()
	if p.set.Public[SentCopy] == "provider" {
		return
	}
	if _, err := p.folders(ctx); err != nil {
		return
	}
	// Gmail and Exchange keep copies themselves.
	if p.caps.Has("X-GM-EXT-1") {
		return
	}
	f, err := p.ensure(ctx, connector.Sent)
	if err != nil {
		return
	}
	_ = p.do(ctx, "keep copy", fetchTime, answerBytes, func() error {
		cmd := p.c.Append(f.name, int64(len(raw)), &imap.AppendOptions{Flags: []imap.Flag{imap.FlagSeen}, Time: time.Now()})
		if _, err := cmd.Write(raw); err != nil {
			return err
		}
		if err := cmd.Close(); err != nil {
			return err
		}
		_, err := cmd.Wait()
		return err
	})
}
