package mailbox

import (
	"context"
	"fmt"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// sender returns the inbox that who may propose for. It is named by inbox, an
// id or an address; empty means who's own.
func (m *PostOffice) sender(ctx context.Context, who auth.Principal, inbox string) (Inbox, error) {
	switch who.Kind {
	case auth.Sandbox:
		if who.Inbox == "" {
			return Inbox{}, fmt.Errorf("this sandbox has no inbox: its creator attaches one with the metadata entry postern.inbox: %w", auth.ErrForbidden)
		}
	case auth.Agent, auth.Grant:
	default:
		return Inbox{}, fmt.Errorf("a %s does not send mail, only an inbox's key or a sandbox attached to one does: %w", who.Kind, auth.ErrForbidden)
	}
	b, s, err := m.Reach(ctx, who, inbox)
	if err != nil {
		return Inbox{}, err
	}
	if who.Kind != auth.Sandbox && !s.includes(Propose) {
		return Inbox{}, fmt.Errorf("this key reads in inbox %s and does not propose: %w", b.ID, auth.ErrForbidden)
	}
	return b, nil
}

// Address returns the address that who writes from when it writes for inbox,
// as in [PostOffice.Reach].
func (m *PostOffice) Address(ctx context.Context, who auth.Principal, inbox string) (string, error) {
	b, err := m.sender(ctx, who, inbox)
	return b.Address, err
}

// Send composes d and proposes to send it. Nothing leaves before the returned
// action is approved. From may be empty; it is always the inbox's address. Via
// names the door. What is wrong with d is told by a [mail.FieldError].
func (m *PostOffice) Send(ctx context.Context, who auth.Principal, via string, d mail.Draft) (oversight.Action, error) {
	b, err := m.sender(ctx, who, "")
	if err != nil {
		return oversight.Action{}, err
	}
	if d.From == "" {
		d.From = b.Address
	}
	// The attack: an agent that writes in somebody else's name.
	if from, err := mail.ParseAddress("from", d.From); err != nil {
		return oversight.Action{}, err
	} else if !strings.EqualFold(from.Addr, b.Address) {
		return oversight.Action{}, &mail.FieldError{Field: "from", Reason: "must be " + b.Address}
	}
	env, err := mail.Compose(d, time.Now(), m.cfg.Domain)
	if err != nil {
		return oversight.Action{}, err
	}
	return m.propose(ctx, who, via, b, env)
}

// SendRaw proposes to send a message that somebody else composed, as it came
// over SMTP with the reverse path from to the recipients rcpts.
func (m *PostOffice) SendRaw(ctx context.Context, who auth.Principal, via, from string, rcpts []string, raw []byte) (oversight.Action, error) {
	b, err := m.sender(ctx, who, "")
	if err != nil {
		return oversight.Action{}, err
	}
	env, err := mail.FromCaptured(raw, from, rcpts, b.Address, time.Now())
	if err != nil {
		return oversight.Action{}, err
	}
	return m.propose(ctx, who, via, b, env)
}

func (m *PostOffice) propose(ctx context.Context, who auth.Principal, via string, b Inbox, env mail.Envelope) (a oversight.Action, err error) {
	payload, err := env.Payload()
	if err != nil {
		return oversight.Action{}, err
	}
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		if err := m.checkSends(ctx, tx, b); err != nil {
			return err
		}
		a, err = m.gate.Propose(ctx, tx, who, oversight.Proposal{
			Request: policy.Request{Kind: SendKind, To: env.To}, Inbox: b.ID, Via: via, Payload: payload,
		})
		return err
	})
	return a, err
}

// Show implements [oversight.Executor].
func (m *PostOffice) Show(a oversight.Action) (oversight.View, error) {
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	s, err := mail.Describe(env)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	v := oversight.View{Title: s.Subject, Text: s.Text, Notes: s.Notes}
	// One field for each recipient. The attack: a display name that reads like
	// further addresses, or hides one, in a list that is joined by commas.
	add := func(name string, values ...string) {
		for _, value := range values {
			if value != "" {
				v.Fields = append(v.Fields, oversight.Field{Name: name, Value: value})
			}
		}
	}
	add("From", s.From)
	add("To", s.To...)
	add("Cc", s.Cc...)
	add("Bcc", s.Bcc...)
	add("Reply-To", s.ReplyTo...)
	add("Subject", s.Subject)
	for _, f := range s.Attachments {
		v.Files = append(v.Files, oversight.File{Name: f.Name, Type: f.ContentType, Size: int64(f.Size), SHA256: f.SHA256})
	}
	return v, nil
}
