package delivery

import (
	"context"
	"errors"
	"fmt"
	"time"

	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/store"
)

// Finish implements [oversight.Finisher]: it stores a sealed copy of the sent
// message in the inbox, and a bounce for the recipients that were given up.
func (q *Queue) Finish(ctx context.Context, tx *store.Tx, a oversight.Action, o oversight.Outcome) error {
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		return err
	}
	b, err := directory.Lookup(ctx, tx, a.Inbox)
	if errors.Is(err, directory.ErrNoInbox) {
		return nil // deleted meanwhile: there is no inbox to keep a copy in
	}
	if err != nil {
		return fmt.Errorf("inbox %q: %w", a.Inbox, err)
	}
	ds, err := deliveries(ctx, tx, a.ID, &env)
	if err != nil {
		return err
	}
	if o.State != oversight.Approved {
		some := false
		for _, d := range ds {
			some = some || d.State == Delivered
		}
		if some {
			if err := q.keepCopy(ctx, tx, a, b, env.Raw); err != nil {
				return err
			}
		}
	}
	return q.tell(ctx, tx, a, b, env, ds)
}

// keepCopy stores what was sent in the inbox that sent it. The flag "copied"
// makes it happen once, even if Finish is repeated.
func (q *Queue) keepCopy(ctx context.Context, tx *store.Tx, a oversight.Action, b directory.Inbox, raw []byte) error {
	fresh, err := tx.Changed(ctx, `update sent_message set copied = 1 where action_id = $1 and copied = 0`, a.ID)
	if err != nil || !fresh {
		return err
	}
	id, err := q.parts.Mailbox.KeepSent(ctx, tx, b, raw)
	if err != nil {
		return err
	}
	return q.parts.Mailbox.Announce(ctx, tx, b, event.MessageSent, id, a.ID)
}

// tell stores one bounce message (RFC 3464) in the inbox for the recipients
// that failed and were not reported to it yet.
func (q *Queue) tell(ctx context.Context, tx *store.Tx, a oversight.Action, b directory.Inbox, env mail.Envelope, ds []Delivery) error {
	var failed []mail.BouncedRecipient
	for _, d := range ds {
		if d.State != Bounced && d.State != Suppressed || !d.told.IsZero() {
			continue
		}
		failed = append(failed, mail.BouncedRecipient{Address: d.Recipient, Status: d.Status, Code: d.Code, Detail: d.Detail, Remote: d.Remote, Last: d.Last})
		if _, err := tx.ExecContext(ctx, `update delivery set told_at = $1 where action_id = $2 and n = $3`, store.Time(time.Now()), a.ID, d.n); err != nil {
			return fmt.Errorf("note bounce: %w", err)
		}
		if err := sealDelivery(ctx, tx, a.ID, d.n); err != nil {
			return err
		}
	}
	if len(failed) == 0 {
		return nil
	}
	domain := mail.Domain(b.Address)
	if b.Connected { // the report is this server's, not the provider's
		domain = q.parts.Directory.Domain()
	}
	raw, err := mail.ComposeBounce(mail.Bounce{
		Domain: domain, To: b.Address, Original: env.Raw, Arrived: a.Created, Recipients: failed,
	}, time.Now())
	if err != nil {
		return fmt.Errorf("compose bounce: %w", err)
	}
	id, err := q.parts.Mailbox.KeepReceived(ctx, tx, b, raw)
	if err != nil {
		return err
	}
	return q.parts.Mailbox.Announce(ctx, tx, b, event.MessageReceived, id)
}
