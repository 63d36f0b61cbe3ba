package mailbox

import (
	"context"
	"fmt"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/quota"
	"postern/internal/seal"
)

// Timing is the order of a scheduled message's approval and its sending time.
type Timing string

// The timings. The zero Timing is [GateFirst].
const (
	GateFirst     Timing = "gate_first"     // a person is asked now; it leaves at its time, if approved by then
	ScheduleFirst Timing = "schedule_first" // a person is asked when its time has come
)

// maxAhead bounds how far ahead mail can be scheduled.
const maxAhead = 366 * 24 * time.Hour

// An Outgoing is a request to send a message. From is always the inbox.
type Outgoing struct {
	Inbox string    // id or address; empty means who's own
	Key   *seal.Key // opens the inbox; required for replies and forwards

	mail.Draft

	ReplyTo  string // ID of the message to reply to; To and Subject may then be empty
	ReplyAll bool   // the answer goes to all who got the message
	Quote    bool   // the answer repeats the message below
	Forward  string // ID of the message to forward, with its attachments

	SendAt time.Time // it leaves no sooner; zero means as soon as it may
	Timing Timing
	Undo   *time.Duration // 0 to [quota.MaxUndo]; nil means what the inbox has
	Bulk   bool           // it is bulk mail, with a way to get no more of it

	// Context is shown to the reviewer beside the message and is not sent, such
	// as the thread that the message belongs to. It is not part of the identity
	// of the request.
	Context string

	// IdempotencyKey identifies the request: a repeated key within 24 hours
	// returns the action of the first request.
	IdempotencyKey string
	// AllowDuplicate permits the same content again within a minute. A person
	// then decides, in every mode.
	AllowDuplicate bool
}

// Send composes o and proposes to send it. Nothing leaves before the returned
// action is approved. Via names the interface that o came through. An invalid o
// gives a [mail.FieldError] or an error that wraps [directory.ErrInvalid].
// After [quota.ErrLimit], [ErrDuplicate] and [ErrIdempotency] nothing was
// proposed.
func (m *PostOffice) Send(ctx context.Context, who auth.Principal, via string, o Outgoing) (Proposed, error) {
	return m.outgo(ctx, who, via, o, "", 0)
}

// Revise replaces the message of an action that has not begun to leave, and
// asks its reviewers again. A version other than 0 must be the current one.
func (m *PostOffice) Revise(ctx context.Context, who auth.Principal, via, action string, version int64, o Outgoing) (Proposed, error) {
	inbox, err := m.gate.InboxOf(ctx, who, action)
	if err != nil {
		return Proposed{}, err
	}
	o.Inbox = inbox
	if o.InReplyTo == "" {
		if err := m.keepThread(ctx, who, inbox, action, &o.Draft); err != nil {
			return Proposed{}, err
		}
	}
	return m.outgo(ctx, who, via, o, action, version)
}

// keepThread copies the reply headers of the action's message to d, so that a
// revised reply stays in its thread.
func (m *PostOffice) keepThread(ctx context.Context, who auth.Principal, inbox, action string, d *mail.Draft) error {
	b, err := m.sender(ctx, who, inbox)
	if err != nil {
		return err
	}
	who.Inbox = b.ID
	a, err := m.gate.Action(ctx, who, action)
	if err != nil {
		return err
	}
	env, err := mail.ParsePayload(a.Payload)
	if err != nil { // the payload is deleted: too late to revise
		return nil //nolint:nilerr // the gate says so
	}
	old, err := mail.Parse(env.Raw)
	if err != nil {
		return fmt.Errorf("read action %s: %v", action, err) //nolint:errorlint // we composed or checked it
	}
	if len(old.InReplyTo) == 1 {
		d.InReplyTo, d.References, d.Replied = old.InReplyTo[0], old.References, old.Replied()
	}
	return nil
}

func (m *PostOffice) outgo(ctx context.Context, who auth.Principal, via string, o Outgoing, action string, version int64) (Proposed, error) {
	b, err := m.sender(ctx, who, o.Inbox)
	if err != nil {
		return Proposed{}, err
	}
	how := proposalOptions{again: o.AllowDuplicate, undo: o.Undo, action: action, version: version, composed: true, Proposal: oversight.Proposal{Via: via}}
	if o.IdempotencyKey != "" {
		if err := checkKey(o.IdempotencyKey); err != nil {
			return Proposed{}, err
		}
		how.request.key = "key " + o.IdempotencyKey
		if action != "" {
			how.request.key = "revise " + action + " " + o.IdempotencyKey
		}
		if how.request.digest, err = requestOf(o); err != nil {
			return Proposed{}, err
		}
		if p, err := m.replay(ctx, who, b, how.request); err != nil || p.Replayed {
			return p, err
		}
	}
	if err := o.schedule(&how.Proposal); err != nil {
		return Proposed{}, err
	}
	d, note, err := m.draft(ctx, who, b, o)
	if err != nil {
		return Proposed{}, err
	}
	if err := m.addUnsubscribe(&d, b, o.Bulk); err != nil {
		return Proposed{}, err
	}
	how.Note, how.Context = note, o.Context
	env, err := mail.Compose(d, time.Now(), mail.Domain(b.Address))
	if err != nil {
		return Proposed{}, err
	}
	return m.propose(ctx, who, b, env, how)
}

// schedule sets when p leaves and when a person is asked.
func (o *Outgoing) schedule(p *oversight.Proposal) error {
	if o.Undo != nil && (*o.Undo < 0 || *o.Undo > quota.MaxUndo) {
		return fmt.Errorf("%w: undo_seconds: must be 0 to %v", directory.ErrInvalid, quota.MaxUndo.Seconds())
	}
	if o.Timing != "" && o.Timing != GateFirst && o.Timing != ScheduleFirst {
		return fmt.Errorf("%w: gate_timing: must be %s or %s", directory.ErrInvalid, GateFirst, ScheduleFirst)
	}
	if o.SendAt.IsZero() {
		if o.Timing == ScheduleFirst {
			return fmt.Errorf("%w: gate_timing: %s needs a send_at", directory.ErrInvalid, ScheduleFirst)
		}
		return nil
	}
	switch ahead := time.Until(o.SendAt); {
	case ahead < -time.Minute: // clocks differ
		return fmt.Errorf("%w: send_at: is in the past", directory.ErrInvalid)
	case ahead > maxAhead:
		return fmt.Errorf("%w: send_at: is more than a year ahead", directory.ErrInvalid)
	}
	p.NotBefore = o.SendAt
	if o.Timing == ScheduleFirst {
		p.AskAt = o.SendAt
	}
	return nil
}

// draft composes the message of o, and returns a warning for the reviewer, if
// any.
func (m *PostOffice) draft(ctx context.Context, who auth.Principal, b directory.Inbox, o Outgoing) (d mail.Draft, note string, err error) {
	d = o.Draft
	own := b.Address
	if b.DisplayName != "" {
		own = `"` + b.DisplayName + `" <` + b.Address + ">"
	}
	if d.From == "" {
		d.From = own
	}
	// The attack: an agent writes in somebody else's name.
	if from, err := mail.ParseAddress("from", d.From); err != nil {
		return d, "", err
	} else if !strings.EqualFold(from.Addr, b.Address) {
		return d, "", &mail.FieldError{Field: "from", Reason: "must be " + b.Address}
	}
	switch {
	case o.ReplyTo != "" && o.Forward != "":
		return d, "", fmt.Errorf("%w: forward: must not be combined with reply_to", directory.ErrInvalid)
	case o.ReplyTo == "" && (o.ReplyAll || o.Quote):
		return d, "", fmt.Errorf("%w: reply_all, quote: require a reply_to", directory.ErrInvalid)
	case o.ReplyTo != "":
		if len(d.To) > 0 {
			return d, "", fmt.Errorf("%w: to: a reply goes to the addresses that the message names: add others with cc or bcc, or forward it", directory.ErrInvalid)
		}
		original, err := m.original(ctx, who, b, o.Key, o.ReplyTo)
		if err != nil {
			return d, "", err
		}
		return reply(d, original, b.Address, o)
	case o.Forward != "":
		original, err := m.original(ctx, who, b, o.Key, o.Forward)
		if err != nil {
			return d, "", err
		}
		return forward(d, original), "", nil
	}
	return d, "", nil
}

// manyRecipients is the number of recipients above which all mail gets
// List-Unsubscribe.
const manyRecipients = 10

// addUnsubscribe adds List-Unsubscribe (RFC 2369) to bulk mail and to mail with
// many recipients. A one-click link (RFC 8058) is for one address, and all
// recipients get the same bytes. So bulk mail has one recipient per message,
// and other mail has a mailto: link.
func (m *PostOffice) addUnsubscribe(d *mail.Draft, b directory.Inbox, bulk bool) error {
	n := len(d.To) + len(d.Cc) + len(d.Bcc)
	mailto := "mailto:" + b.Address + "?subject=unsubscribe"
	switch {
	case bulk && (n != 1 || len(d.To) != 1):
		return fmt.Errorf("%w: bulk: requires exactly one recipient, in to: the unsubscribe link is for one address", directory.ErrInvalid)
	case bulk && m.cfg.PublicURL == "":
		d.Unsubscribe = mailto
	case bulk:
		to, err := mail.ParseAddress("to[0]", d.To[0])
		if err != nil {
			return err
		}
		d.Unsubscribe, d.OneClick = strings.TrimSuffix(m.cfg.PublicURL, "/")+"/v1/unsubscribe/"+m.Suppression.Token(b, to.Addr), true
	case n > manyRecipients:
		d.Unsubscribe = mailto
	}
	return nil
}

// original returns one message of the inbox, parsed.
func (m *PostOffice) original(ctx context.Context, who auth.Principal, b directory.Inbox, k *seal.Key, id string) (mail.Message, error) {
	if k == nil {
		return mail.Message{}, fmt.Errorf("replying and forwarding require a key that can read inbox %s: %w", b.ID, auth.ErrForbidden)
	}
	if k.Inbox() != b.ID {
		return mail.Message{}, fmt.Errorf("the key is of another inbox than the one that sends: %w", auth.ErrForbidden)
	}
	_, raw, err := m.Message(ctx, who, k, id)
	if err != nil {
		return mail.Message{}, err
	}
	p, err := mail.Parse(raw)
	if err != nil {
		return mail.Message{}, fmt.Errorf("%w: message %s cannot be parsed, so it can be neither replied to nor forwarded", directory.ErrInvalid, id)
	}
	return p, nil
}

func reply(d mail.Draft, original mail.Message, own string, o Outgoing) (mail.Draft, string, error) {
	r, err := mail.ReplyTo(original, []string{own}, o.ReplyAll)
	if err != nil {
		return d, "", err
	}
	d.To, d.Cc = r.To, append(r.Cc, d.Cc...)
	if d.Subject == "" {
		d.Subject = r.Subject
	}
	d.InReplyTo, d.References, d.Replied = r.InReplyTo, r.References, true
	if o.Quote {
		d = behind(d, mail.Quote(original))
	}
	if len(r.Elsewhere) > 0 {
		// The attack: a mail seems to come from a colleague, and its Reply-To
		// sends the answer to a stranger.
		return d, "the message that this answers has the Reply-To " + strings.Join(r.Elsewhere, ", ") + ", which is not its sender", nil
	}
	return d, "", nil
}

func forward(d mail.Draft, original mail.Message) mail.Draft {
	subject, text, files := mail.Forward(original)
	if d.Subject == "" {
		d.Subject = subject
	}
	d.Attachments = append(files, d.Attachments...)
	return behind(d, text)
}

// behind appends a quotation to the text of d, in each of its forms.
func behind(d mail.Draft, quotation string) mail.Draft {
	switch {
	case d.Markdown != "":
		d.Markdown = mail.Behind(d.Markdown, quotation)
		return d
	case d.HTML != "":
		if d.Text != "" {
			d.Text = mail.Behind(d.Text, quotation)
		}
		d.HTML = mail.BehindHTML(d.HTML, quotation)
		return d
	}
	d.Text = mail.Behind(d.Text, quotation)
	return d
}

// As returns who as a member of the inbox that an action belongs to, if its
// credential opens that inbox. A grant covers several inboxes, so its principal
// does not name one. Other principals are returned unchanged.
func (m *PostOffice) As(ctx context.Context, who auth.Principal, action string) (auth.Principal, error) {
	if who.Kind != auth.Grant {
		return who, nil
	}
	inbox, err := m.gate.InboxOf(ctx, who, action)
	if err != nil {
		return who, err
	}
	if _, _, err := m.Keys.Reach(ctx, who, inbox); err == nil {
		who.Inbox = inbox
	}
	return who, nil
}

// Cancel cancels an action that has not begun to leave. Who must be a person or
// have a key that may propose for the inbox; a sandbox may cancel only its own
// proposals. See [oversight.Gate.Cancel].
func (m *PostOffice) Cancel(ctx context.Context, who auth.Principal, action string) (oversight.Action, error) {
	if who.Kind == auth.Agent || who.Kind == auth.Grant {
		a, err := m.As(ctx, who, action)
		if err != nil {
			return oversight.Action{}, err
		}
		what, err := m.gate.Action(ctx, a, action)
		if err != nil {
			return oversight.Action{}, err
		}
		if what.Kind == ReceiveKind { // cancelling deletes the mail, which is up to its reviewers
			return oversight.Action{}, fmt.Errorf("mail that is held for approval is let in or dropped by a person: %w", auth.ErrForbidden)
		}
		if _, err := m.sender(ctx, who, a.Inbox); err != nil {
			return oversight.Action{}, err
		}
		who = a
	}
	return m.gate.Cancel(ctx, who, action)
}
