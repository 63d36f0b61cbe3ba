package delivery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/statement"
	"postern/internal/store"
)

// announceDelivery records the event for the result of one recipient.
func (q *Queue) announceDelivery(ctx context.Context, tx *store.Tx, a oversight.Action, b directory.Inbox, d Delivery) error {
	if a.Kind == policy.KindCopy { // the agent must not learn of copies
		return nil
	}
	var t event.Type
	switch d.State {
	case Delivered:
		t = event.MessageDelivered
	case Deferred:
		t = event.MessageDeferred
	case Bounced, Suppressed:
		t = event.MessageBounced
	case Queued, Sending, Uncertain, Cancelled:
		return nil
	}
	return q.parts.Mailbox.Announce(ctx, tx, b, t, a.ID)
}

// Reports parses raw as a bounce (RFC 3464) or a complaint (RFC 5965), and
// returns it for each of the inboxes that it counts for, by inbox ID. Call it
// before the transaction that stores the message: it reads keys in a
// transaction of its own, and writers that each wait for a second connection
// could deadlock the pool.
//
// The attack: a forged report gets an address suppressed or a sender suspended.
// So a report counts only if it returns the header of a message that this inbox
// sent, with the statement that this server signed over that header. Only a
// recipient of the message can have it. Such a recipient can still lie about
// the other recipients; [Reputation.MinBad] limits the damage.
func (q *Queue) Reports(ctx context.Context, inboxes []directory.Inbox, raw []byte) (map[string]mail.Report, error) {
	r, ok := mail.ParseReport(raw)
	if !ok || r.MessageID == "" {
		return nil, nil
	}
	out := map[string]mail.Report{}
	for _, b := range inboxes {
		if ok, err := q.signedHere(ctx, b, r.Header); err != nil {
			return nil, err
		} else if ok {
			out[b.ID] = r
		}
	}
	return out, nil
}

// NoteReport applies a bounce or a complaint to the deliveries of the message
// that b sent. A report that matches no sent message is ignored.
func (q *Queue) NoteReport(ctx context.Context, tx *store.Tx, b directory.Inbox, r mail.Report) error {
	var action string
	err := tx.One(ctx, `select action_id from sent_message where inbox_id = $1 and hash = $2`, []any{b.ID, q.sentHash(b.ID, r.MessageID)}, &action)
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("match report: %w", err)
	}
	var payload []byte
	if err := tx.One(ctx, `select payload from action where id = $1`, []any{action}, &payload); err != nil {
		return fmt.Errorf("match report: %w", err)
	}
	env, err := mail.ParsePayload(payload)
	if err != nil {
		return nil //nolint:nilerr // the message has been deleted, and its recipients with it
	}
	ds, err := deliveries(ctx, tx, action, &env)
	if err != nil {
		return err
	}
	a := oversight.Action{ID: action, Project: b.Project, Inbox: b.ID}
	if r.Kind == mail.AbuseReport {
		err = q.noteComplaint(ctx, tx, a, b, r, ds)
	} else {
		err = q.noteBounces(ctx, tx, a, b, r, ds)
	}
	if err != nil {
		return err
	}
	return q.judge(ctx, tx, b, time.Now())
}

// signedHere reports whether this server signed the header for b. A server
// without signing keys accepts the match by Message-ID alone.
func (q *Queue) signedHere(ctx context.Context, b directory.Inbox, header []byte) (bool, error) {
	if q.parts.Signer == nil {
		return true, nil
	}
	keys, err := q.parts.Signer.StatementKeys(ctx, mail.Domain(b.Address))
	if err != nil {
		return false, err
	}
	s, err := statement.VerifyHeader(header, keys)
	return err == nil && strings.EqualFold(s.Inbox, b.Address), nil
}

// noteBounces turns delivered recipients into bounced ones. Each report counts
// once: a second one finds no delivered recipient.
func (q *Queue) noteBounces(ctx context.Context, tx *store.Tx, a oversight.Action, b directory.Inbox, r mail.Report, ds []Delivery) error {
	var fresh []Delivery
	for _, to := range r.Recipients {
		for _, d := range ds {
			if !strings.EqualFold(d.Recipient, to.Address) && !strings.EqualFold(d.Recipient, to.Final) {
				continue
			}
			if to.Action != mail.ReportFailed || d.State != Delivered {
				break
			}
			d.State, d.Status = Bounced, to.Status
			d.Remote = mail.Printable(to.RemoteMTA, 200)
			d.Detail = mail.Printable("a later report says: "+to.Diagnostic, 1000)
			if err := q.note(ctx, tx, a, d); err != nil {
				return err
			}
			fresh = append(fresh, d)
			if err := q.parts.Mailbox.CountSent(ctx, tx, b.ID, d.Recipient, -1); err != nil { // the message did not arrive
				return err
			}
			// The report itself is in the inbox, so no bounce is generated for
			// it.
			if _, err := tx.ExecContext(ctx, `update delivery set told_at = $1 where action_id = $2 and n = $3`, store.Time(time.Now()), a.ID, d.n); err != nil {
				return fmt.Errorf("note bounce: %w", err)
			}
			if err := sealDelivery(ctx, tx, a.ID, d.n); err != nil {
				return err
			}
			if gone(to.Status) {
				if err := q.parts.Suppression.add(ctx, tx, b.Project, b.ID, d.Recipient, SuppressedBounce); err != nil {
					return err
				}
			}
			break
		}
	}
	for _, d := range fresh {
		if err := q.announceDelivery(ctx, tx, a, b, d); err != nil {
			return err
		}
	}
	return nil
}

// gone reports whether a status means that the address does not exist and never
// will: codes of RFC 3463, and 5.1.10 of RFC 7505.
func gone(status string) bool {
	return slices.Contains([]string{"5.1.1", "5.1.2", "5.1.3", "5.1.6", "5.1.10", "5.2.1"}, status)
}

// noteComplaint marks the deliveries that a complaint is about and suppresses
// their addresses.
func (q *Queue) noteComplaint(ctx context.Context, tx *store.Tx, a oversight.Action, b directory.Inbox, r mail.Report, ds []Delivery) error {
	if r.Feedback == "not-spam" {
		return nil
	}
	for _, d := range ds {
		named := slices.ContainsFunc(r.Recipients, func(to mail.ReportRecipient) bool { return strings.EqualFold(to.Address, d.Recipient) })
		// Many providers remove the complaining address. With one recipient it
		// is known all the same; with several, nobody is marked.
		if !named && len(ds) > 1 || d.State != Delivered {
			continue
		}
		fresh, err := tx.Changed(ctx, `update delivery set complained_at = $1 where action_id = $2 and n = $3 and complained_at = 0`, store.Time(time.Now()), a.ID, d.n)
		if err != nil {
			return fmt.Errorf("note complaint: %w", err)
		}
		if !fresh {
			continue
		}
		if err := sealDelivery(ctx, tx, a.ID, d.n); err != nil {
			return err
		}
		if err := q.parts.Suppression.add(ctx, tx, b.Project, b.ID, d.Recipient, SuppressedComplaint); err != nil {
			return err
		}
		if err := q.parts.Mailbox.Announce(ctx, tx, b, event.MessageComplained, a.ID); err != nil {
			return err
		}
	}
	return nil
}
