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

// Timing says which comes first for mail that leaves at a time: a person's
// word, or the time.
type Timing string

// The timings. The zero Timing is [GateFirst].
const (
	GateFirst     Timing = "gate_first"     // a person is asked now; it leaves at its time, if approved by then
	ScheduleFirst Timing = "schedule_first" // a person is asked when its time has come
)

// maxAhead is how far ahead mail can be scheduled.
const maxAhead = 366 * 24 * time.Hour

// An Outgoing is what somebody wants to send. From is always the inbox's.
type Outgoing struct {
	Inbox string    // id or address; empty means who's own
	Key   *seal.Key // opens the inbox; needed to answer or pass on one of its messages

	mail.Draft

	ReplyTo  string // id of the message that is answered; To and Subject may then be empty
	ReplyAll bool   // the answer goes to all who got the message
	Quote    bool   // the answer repeats the message below
	Forward  string // id of the message that is passed on, with its files

	SendAt time.Time // it leaves no sooner; zero means as soon as it may
	Timing Timing
	Undo   *time.Duration // 0 to [MaxUndo]; nil means what the inbox has
	Bulk   bool           // it is bulk mail, with a way to get no more of it

	// Context is what the reviewer is shown beside the mail and what does not
	// leave, such as the thread that it belongs to. It is not part of what the
	// request is known by.
	Context string

	// IdempotencyKey names the request: the same key within 24 hours is the
	// same request, and is answered with the first one's action.
	IdempotencyKey string
	// AllowDuplicate says that the same content is meant to be sent again: a
	// person then decides, in every mode.
	AllowDuplicate bool
}

// Send composes o and proposes to send it. Nothing leaves before the returned
// action is approved. Via names the door. What is wrong with o is told by a
// [mail.FieldError] or an [directory.ErrInvalid]; [ErrLimit], [ErrDuplicate] and
// [ErrIdempotency] mean that nothing was proposed.
func (m *PostOffice) Send(ctx context.Context, who auth.Principal, via string, o Outgoing) (Proposed, error) {
	return m.outgo(ctx, who, via, o, "", 0)
}

// Revise puts o in the place of an action that has not begun to leave. Reviewers
// are asked again. A version other than 0 must be the one that is there.
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

// keepThread lets d answer what the action's message answers: who revises an
// answer writes an answer.
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
	if err != nil { // it is dropped, and too late to revise
		return nil //nolint:nilerr // the gate says so
	}
	old, err := mail.Parse(env.Raw)
	if err != nil {
		return fmt.Errorf("read action %s: %v", action, err) //nolint:errorlint // we composed or checked it
	}
	if len(old.InReplyTo) == 1 {
		d.InReplyTo, d.References, d.Replied = old.InReplyTo[0], old.References, old.AutoSubmitted == "auto-replied"
	}
	return nil
}

func (m *PostOffice) outgo(ctx context.Context, who auth.Principal, via string, o Outgoing, action string, version int64) (Proposed, error) {
	b, err := m.sender(ctx, who, o.Inbox)
	if err != nil {
		return Proposed{}, err
	}
	how := proposalOptions{again: o.AllowDuplicate, undo: o.Undo, action: action, version: version, Proposal: oversight.Proposal{Via: via}}
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

// schedule fills in when p leaves and when a person is asked.
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

// draft returns what o becomes, and what a reviewer is to be warned of.
func (m *PostOffice) draft(ctx context.Context, who auth.Principal, b directory.Inbox, o Outgoing) (d mail.Draft, note string, err error) {
	d = o.Draft
	own := b.Address
	if b.DisplayName != "" {
		own = `"` + b.DisplayName + `" <` + b.Address + ">"
	}
	if d.From == "" {
		d.From = own
	}
	// The attack: an agent that writes in somebody else's name.
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

// manyRecipients is the number of recipients above which List-Unsubscribe is
// added to any mail.
const manyRecipients = 10

// addUnsubscribe adds List-Unsubscribe (RFC 2369) to bulk mail and to mail with
// many recipients. A one-click link (RFC 8058) is for one address, and all
// recipients get the same bytes: so bulk mail has one recipient a message, and mail
// to many has a mailto: link instead.
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

// original returns one message of the inbox, read.
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
		// The attack: a mail that looks like a colleague's and is answered to a stranger.
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

// behind puts a quotation below what d says, in each of its forms.
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

// As returns who as somebody of the inbox that an action is for, if its
// credential has a part in it. A grant is over several inboxes, so that who it
// is does not say which is meant; for others it changes nothing.
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

// Cancel takes back what has not begun to leave. Who must be a person, or one
// who may propose for the inbox; a sandbox takes back what it proposed itself. See [oversight.Gate.Cancel].
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
		if what.Kind == ReceiveKind { // to cancel it would be to drop it, which is for who lets it in
			return oversight.Action{}, fmt.Errorf("mail that is held for approval is let in or dropped by a person: %w", auth.ErrForbidden)
		}
		if _, err := m.sender(ctx, who, a.Inbox); err != nil {
			return oversight.Action{}, err
		}
		who = a
	}
	return m.gate.Cancel(ctx, who, action)
}
