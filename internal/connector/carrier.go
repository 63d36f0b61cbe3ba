package connector

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"

	"postern/internal/delivery"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/store"
)

var _ delivery.Carrier = (*Connections)(nil)

func newID() string { return "con_" + rand.Text() }

// of returns the connection of an inbox.
func (s *Connections) of(ctx context.Context, inbox string) (c Connection, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		found, err := list(ctx, tx, `c.inbox_id = $1`, inbox)
		if err == nil && len(found) == 0 {
			err = fmt.Errorf("inbox %s: %w", inbox, ErrNotFound)
		}
		if err != nil {
			return err
		}
		c = found[0]
		return nil
	})
	return c, err
}

// open opens the provider of a connection.
func (s *Connections) open(ctx context.Context, c Connection) (Provider, error) {
	set, err := s.settings(c)
	if err != nil {
		return nil, err
	}
	o, ok := s.conf.Openers[c.Kind]
	if !ok {
		return nil, fmt.Errorf("this server does not support mailboxes of kind %s", c.Kind)
	}
	return o.Open(ctx, set, s.renewed(c, set))
}

// Carry implements [delivery.Carrier]. While the connection is paused or needs a
// sign-in, the message waits.
func (s *Connections) Carry(ctx context.Context, b directory.Inbox, e mail.Envelope) (out []mail.Delivery, err error) {
	c, err := s.of(ctx, b.ID)
	if err != nil {
		return nil, err
	}
	switch c.Phase {
	case Syncing, Connected:
	case Paused:
		return nil, errors.New("the connection to the mailbox is paused: resume it, and the message leaves")
	case SignIn:
		return nil, errors.New("the provider refuses the credential of the mailbox: sign in again, and the message leaves")
	case Revoked:
		return refused(e.To, "the mailbox was disconnected"), nil
	}
	p, err := s.open(ctx, c)
	if err != nil {
		return nil, err
	}
	out, err = p.Send(ctx, e)
	if errors.Is(err, ErrSignIn) {
		s.refuse(ctx, c, err)
	}
	if cerr := p.Close(); cerr != nil {
		s.log.DebugContext(ctx, "close provider", "connection", c.ID, "err", cerr)
	}
	return out, err
}

// Check implements [delivery.Carrier].
func (s *Connections) Check(ctx context.Context, b directory.Inbox, e mail.Envelope) error {
	c, err := s.of(ctx, b.ID)
	if err != nil {
		return err
	}
	if c.Phase == Revoked {
		return fmt.Errorf("%w: the mailbox %s was disconnected: an owner can sign in again", directory.ErrInvalid, c.Address)
	}
	if k, ok := s.conf.Openers[c.Kind].(Checker); ok {
		return k.Check(e)
	}
	return nil
}

func refused(to []string, detail string) (out []mail.Delivery) {
	for _, r := range to {
		out = append(out, mail.Delivery{Recipient: r, Outcome: mail.Refused, Detail: detail})
	}
	return out
}
