package console

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// A recipient is an address that will receive something. The address is what
// counts: the name beside it says whatever the sender likes.
type recipient struct{ Addr, Name string }

// A recipients has all recipients of an email, each in exactly one of the lists.
type recipients struct {
	To, Cc []recipient
	Hidden []recipient // Bcc: no other recipient sees them
}

// An addressee is a recipient as the page of an action shows it.
type addressee struct {
	recipient
	Field  string // "To", "Cc", "Bcc"
	Hidden bool
	Alike  string // title of the finding that says what it looks like; empty if there is none
	spelled
}

// addressees returns all recipients, each with the finding about it.
func (r *review) addressees() (out []addressee) {
	for _, part := range []struct {
		field string
		list  []recipient
	}{{"To", r.To}, {"Cc", r.Cc}, {"Bcc", r.Hidden}} {
		for _, one := range part.list {
			a := addressee{recipient: one, Field: part.field, Hidden: part.field == "Bcc", spelled: spell(one.Addr)}
			for _, f := range r.View.Findings {
				if f.Kind == policy.FindLookalike && f.Subject != "" && strings.HasSuffix(asciiName(one.Addr), asciiName(f.Subject)) {
					a.Alike = f.Title
				}
			}
			out = append(out, a)
		}
	}
	return out
}

// Count returns the number of recipients.
func (r recipients) Count() int { return len(r.To) + len(r.Cc) + len(r.Hidden) }

// recipientsOf returns the recipients of env. It does not use the fields of the action's
// view: there the list is one string, and a display name with a comma in it would read as
// one more recipient.
func recipientsOf(env mail.Envelope) (recipients, error) {
	s, err := mail.Describe(env)
	if err != nil {
		return recipients{}, err
	}
	read := func(list []string) (out []recipient) {
		for _, one := range list {
			out = append(out, split(one, env.To))
		}
		return out
	}
	r := recipients{read(s.To), read(s.Cc), read(s.Bcc)}
	if r.Count() < len(env.To) {
		// unreachable unless Describe leaves somebody out
		return recipients{}, fmt.Errorf("%d recipients of %d are known", r.Count(), len(env.To))
	}
	return r, nil
}

// split splits "Name <local@domain>" if the text in the brackets is an address that the
// message goes to.
func split(s string, to []string) recipient {
	if i := strings.LastIndex(s, " <"); i >= 0 && strings.HasSuffix(s, ">") {
		addr := s[i+2 : len(s)-1]
		if slices.ContainsFunc(to, func(t string) bool { return strings.EqualFold(t, addr) }) {
			return recipient{Addr: addr, Name: s[:i]}
		}
	}
	return recipient{Addr: s}
}

// A sending is what an action sends: one email, or several by one request.
type sending struct {
	Envelopes []mail.Envelope
	Message   mail.Message // the only email; of several it has only the files of all
	Source    []byte       // what leaves, byte by byte
	ByRequest bool         // the sandbox makes a request to a mail service
}

// opened returns the email that an action would send.
func opened(a *oversight.Action) (o sending, err error) {
	if a.Kind != mailbox.SendKind && a.Kind != mailbox.CopyKind {
		return o, fmt.Errorf("action %s is no email: %w", a.ID, store.ErrNotFound)
	}
	if o.ByRequest = mailbox.ByRequest(a.Payload); o.ByRequest {
		q, err := mailbox.OpenRequest(a.Payload, a.Created)
		if err != nil {
			return o, fmt.Errorf("open action %s: %w", a.ID, err)
		}
		o.Envelopes, o.Source = q.Envelopes, a.Payload
	} else {
		env, err := mail.ParsePayload(a.Payload)
		if err != nil {
			return o, fmt.Errorf("open action %s: %w", a.ID, err)
		}
		o.Envelopes, o.Source = []mail.Envelope{env}, slices.Concat(env.Prefix, env.Raw)
	}
	var files []mail.Attachment
	for _, env := range o.Envelopes {
		if o.Message, err = mail.Parse(env.Raw); err != nil {
			return o, fmt.Errorf("open action %s: %w", a.ID, err)
		}
		files = append(files, o.Message.Attachments...)
	}
	if len(o.Envelopes) > 1 {
		o.Message = mail.Message{}
	}
	o.Message.Attachments = files
	return o, nil
}

// A review is an action as its page shows it.
type review struct {
	oversight.Action
	recipients
	Source    string // the email or request as it will leave, or the beginning of that
	Cut       bool   // Source is only the beginning
	ByRequest bool   // the sandbox makes a request to a mail service; it cannot be edited
	html      string // HTML of the email, unchanged
	HTML      bool   // it has HTML that can be rendered in a frame
	Remote    int    // pictures in the HTML that are not fetched
	View      oversight.View
	Inbox     string // the address; empty if the action has no inbox
	Changed   bool   // the stored content does not match the digest
	Unshown   string // why its content cannot be shown; empty if it can
	TextCut   bool   // View.Text is only the beginning
	TextSize  int64  // bytes of the whole text
}

// Decidable reports whether a person who reads the page may approve.
func (r *review) Decidable() bool {
	return r.State == oversight.Pending && !r.Changed && r.Unshown == ""
}

// Moving reports whether the state is about to change on its own. Such pages
// refresh, and therefore have no form whose input could be lost.
func (r *review) Moving() bool {
	return r.State == oversight.Executing || r.State == oversight.Approved && time.Until(r.Due) < 5*time.Minute
}

// Mail reports whether the action sends mail.
func (r *review) Mail() bool { return r.Kind == mailbox.SendKind || r.Kind == mailbox.CopyKind }

// source returns the bytes that leave or, if nothing leaves, those that are approved.
func source(v *oversight.View, a *oversight.Action) []byte {
	if v.Raw != nil {
		return v.Raw
	}
	return a.Payload
}

// Openable reports whether the action's files can be opened.
func (r *review) Openable() bool {
	return r.Kind == mailbox.SendKind && r.Unshown == "" && !r.Changed && r.Dropped.IsZero()
}

// Cancellable reports whether the action can be cancelled. An action that waits for a
// decision is rejected instead.
func (r *review) Cancellable() bool {
	return r.State == oversight.Scheduled || r.State == oversight.Approved && r.Attempts == 0
}

// maxSource is how much of an email's source is on the action's page, in bytes.
const maxSource = 16 << 10

// maxText is how much of a text is on the action's page, in bytes. All of it is
// on a page of its own.
const maxText = 100 << 10

// reviews reads actions for the pages that show them.
type reviews struct{ *Server }

// review reads an action in full.
func (s reviews) review(ctx context.Context, who auth.Principal, id string) (*review, error) {
	a, err := s.gate.Action(ctx, who, id)
	if err != nil {
		return nil, err
	}
	r := s.inspect(a)
	if r.TextSize = int64(len(r.View.Text)); r.TextSize > maxText {
		r.TextCut, r.View.Text = true, strings.ToValidUTF8(r.View.Text[:maxText], "")
		if q := r.View.Request; q != nil {
			q.Body = cutSpans(q.Body, maxText)
		}
	}
	if strings.TrimSpace(r.html) != "" {
		// HTML that cannot be rendered is read as text, which is made from all of it.
		if v, err := rendered(r.html); err == nil {
			r.HTML, r.Remote = true, v.Remote
		}
	}
	if gap := longestGap(r.View.Text); gap >= 12 {
		// The attack: the important sentence is far below the apparent end of the text.
		r.View.Notes = append(r.View.Notes, fmt.Sprintf("the text continues after %d empty lines", gap))
	}
	names, err := s.addresses(ctx, who)
	if err != nil {
		return nil, err
	}
	r.Inbox = names[a.Inbox]
	return r, nil
}

// inspect parses the content of an action without using the database.
func (s reviews) inspect(a oversight.Action) *review {
	r := &review{Action: a}
	sum := sha256.Sum256(a.Payload)
	r.Changed = a.Dropped.IsZero() && !bytes.Equal(sum[:], a.Digest)
	var err error
	if r.View, err = s.gate.Show(a); err == nil && r.Mail() && a.Dropped.IsZero() {
		err = r.open()
		r.View.Fields = slices.DeleteFunc(r.View.Fields, func(f oversight.Field) bool {
			return slices.Contains([]string{"To", "Cc", "Bcc", "Subject"}, f.Name) // shown separately
		})
	}
	if raw := source(&r.View, &a); err == nil && !r.Mail() && len(raw) > 0 {
		r.Source, r.Cut = lines(strings.ToValidUTF8(string(raw[:min(len(raw), maxSource)]), "\ufffd")), len(raw) > maxSource
	}
	if err != nil {
		r.Unshown, r.View, r.recipients = err.Error(), oversight.View{}, recipients{}
	}
	return r
}

// open reads the email that r would send.
func (r *review) open() error {
	o, err := opened(&r.Action)
	if err != nil {
		return err
	}
	for _, env := range o.Envelopes {
		one, err := recipientsOf(env)
		if err != nil {
			return err
		}
		r.To, r.Cc, r.Hidden = append(r.To, one.To...), append(r.Cc, one.Cc...), append(r.Hidden, one.Hidden...)
	}
	r.Source, r.Cut = lines(strings.ToValidUTF8(string(o.Source[:min(len(o.Source), maxSource)]), "\ufffd")), len(o.Source) > maxSource
	r.html, r.ByRequest = o.Message.HTML, o.ByRequest
	return nil
}

// cutSpans returns the first bytes of a text, at most most.
func cutSpans(list []oversight.Span, most int) (out []oversight.Span) {
	for _, s := range list {
		if most <= 0 {
			break
		}
		s.Text = strings.ToValidUTF8(s.Text[:min(len(s.Text), most)], "")
		most -= len(s.Text) + len(s.Secret)
		out = append(out, s)
	}
	return out
}

// longestGap returns the length of the longest run of empty lines between others.
func longestGap(text string) (longest int) {
	gap := 0
	for line := range strings.Lines(text) {
		if strings.TrimSpace(line) == "" {
			gap++
			continue
		}
		longest, gap = max(longest, gap), 0
	}
	return longest
}

// A brief is what a list shows of an action's content.
type brief struct {
	recipients
	Title       string
	Peek        string // the beginning of its text
	Files       int
	Notes       int
	Unshown     bool
	More        int // recipients in To and Cc that are not listed
	HiddenTotal int
}

// Limits of what a list shows of an action, and of how many briefs are kept.
const (
	briefTitle      = 300 // bytes
	briefPeek       = 160 // bytes
	briefRecipients = 12
	briefHidden     = 40
	maxBriefs       = 512
)

// brief returns the summary of a for lists, where a has no payload. Reading the
// payload is expensive (up to 36 MB), so summaries are cached by digest. The
// page of an action does not use the cache.
func (s reviews) brief(ctx context.Context, who auth.Principal, a *oversight.Action) (brief, error) {
	key := string(a.Kind) + " " + a.Hex()
	s.mu.Lock()
	b, ok := s.briefs[key]
	s.mu.Unlock()
	if ok {
		return b, nil
	}
	full, err := s.gate.Action(ctx, who, a.ID)
	if err != nil {
		return brief{}, err
	}
	r := s.inspect(full)
	b = brief{
		recipients: r.recipients, Title: mail.Printable(r.View.Title, briefTitle), Files: len(r.View.Files), Notes: len(r.View.Notes),
		Unshown: r.Unshown != "" || r.Changed, HiddenTotal: len(r.Hidden),
	}
	b.Peek = mail.Printable(strings.Join(strings.Fields(strings.ToValidUTF8(r.View.Text[:min(len(r.View.Text), 4*briefPeek)], "")), " "), briefPeek)
	if r.View.Request != nil && len(r.View.Fields) > 0 {
		b.Peek = mail.Printable(r.View.Fields[0].Value, briefPeek)
	}
	b.To = slices.Clone(b.To[:min(len(b.To), briefRecipients)])
	b.Cc = slices.Clone(b.Cc[:min(len(b.Cc), briefRecipients-len(b.To))])
	b.More = len(r.To) + len(r.Cc) - len(b.To) - len(b.Cc)
	b.Hidden = slices.Clone(b.Hidden[:min(len(b.Hidden), briefHidden)])
	if r.Changed || !a.Dropped.IsZero() {
		return b, nil // the content does not match the digest: do not cache it
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.briefs) >= maxBriefs {
		clear(s.briefs)
	}
	s.briefs[key] = b
	return b, nil
}

// addresses returns the addresses of the project's inboxes by their ids.
func (s reviews) addresses(ctx context.Context, who auth.Principal) (map[string]string, error) {
	boxes, err := s.post.Directory.Inboxes(ctx, who)
	if err != nil {
		return nil, err
	}
	out := make(map[string]string, len(boxes))
	for _, b := range boxes {
		out[b.ID] = b.Address
	}
	return out, nil
}
