package imapserver

import (
	"fmt"
	"io"
	"regexp"
	"strings"
	"sync"

	"github.com/emersion/go-imap/v2"

	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/seal"
)

// AppendLimit returns how many octets a message of APPEND has at most.
func (c *session) AppendLimit() uint32 { return maxAppend }

// Append saves a draft. Mail gets into the other folders by arriving, and by being
// sent through this server.
func (c *session) Append(name string, r imap.LiteralReader, _ *imap.AppendOptions) (*imap.AppendData, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, err := c.opened()
	if err != nil {
		return nil, err
	}
	to, err := named(name)
	if err != nil {
		return nil, err
	}
	if to.folder != mailbox.FolderDrafts {
		return nil, no(imap.ResponseCodeCannot, "APPEND goes to Drafts alone: "+titled(to.folder)+" has what arrived or was sent through this server, and nothing that a program says so")
	}
	if err := keyring.May(k, seal.Draft); err != nil {
		return nil, c.fail(err)
	}
	if r.Size() > largeMessage {
		done, err := c.s.bulk.Acquire(c.ctx, c.inbox)
		if err != nil {
			return nil, c.fail(err)
		}
		defer done()
	}
	defer c.s.cfg.Scrub.Touch()
	raw := make([]byte, r.Size())
	defer clear(raw)
	if _, err := io.ReadFull(r, raw); err != nil {
		return nil, fmt.Errorf("read message: %w", err)
	}
	o, err := draftOf(raw)
	if err != nil {
		return nil, c.fail(err)
	}
	o.Inbox = c.inbox
	d, err := c.s.cfg.Post.Drafts.Save(c.ctx, c.who, o)
	if err != nil {
		return nil, c.fail(err)
	}
	l, err := c.s.cfg.Post.Filing(c.ctx, c.who, k, mailbox.FolderDrafts)
	if err != nil {
		return nil, c.fail(err)
	}
	for _, f := range l.Messages {
		if f.ID == d.ID {
			return &imap.AppendData{UIDValidity: l.Validity, UID: imap.UID(f.UID)}, nil
		}
	}
	return nil, nil // it was changed or sent just now
}

var htmlBody = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`(?is)<body[^>]*>(.*)</body\s*>`) })

// draftOf reads a message as a draft: addresses, subject, texts, files, and what it
// answers. Other fields are not kept: what is sent is composed by this server.
func draftOf(raw []byte) (mailbox.Outgoing, error) {
	m, err := mail.Parse(raw)
	if err != nil {
		return mailbox.Outgoing{}, no(imap.ResponseCodeCannot, err.Error())
	}
	var o mailbox.Outgoing
	o.To, o.Cc, o.Bcc = written(m.To), written(m.Cc), written(m.Bcc)
	o.Subject, o.Text = m.Subject, m.Text
	if o.HTML = m.HTML; o.HTML != "" {
		if b := htmlBody().FindStringSubmatch(o.HTML); b != nil {
			o.HTML = b[1] // a draft has a fragment, which is put into a document
		}
	}
	if len(m.InReplyTo) > 0 {
		o.InReplyTo = m.InReplyTo[0]
	}
	o.References = m.References[max(0, len(m.References)-mail.MaxRecipients):]
	for _, a := range m.Attachments {
		o.Attachments = append(o.Attachments, mail.Attachment{Name: a.Name, ContentType: a.ContentType, Data: a.Data})
	}
	for _, w := range m.Warnings {
		if strings.Contains(w, "longer than") { // a text that would be cut off
			return mailbox.Outgoing{}, no(imap.ResponseCodeCannot, w)
		}
	}
	return o, nil
}

// written returns addresses as a draft holds them.
func written(as []mail.Address) (out []string) {
	for _, a := range as {
		if a.Name == "" || a.Addr == "" {
			out = append(out, a.String())
			continue
		}
		out = append(out, `"`+strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(a.Name)+`" <`+a.Addr+">")
	}
	return out
}
