package delivery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// record stores the results of a batch, and releases its destination.
func (q *Queue) record(ctx context.Context, tx *store.Tx, a oversight.Action, b directory.Inbox, x batch, holder string, results []mail.Delivery) error {
	now := time.Now()
	answered := false
	ds, err := deliveries(ctx, tx, a.ID, nil)
	if err != nil {
		return err
	}
	x.to = slices.Clone(x.to) // the transaction may be retried
	for i, r := range results {
		d := x.to[i]
		d.Attempts++
		if d.First.IsZero() {
			d.First = now
		}
		d.outside = x.hop.Kind != HopLocal
		d.Last, d.Code, d.Status, d.Detail, d.Remote = now, r.Code, r.Status, mail.Printable(r.Detail, 1000), mail.Printable(r.Remote, 200)
		answered = answered || r.Code != 0 || r.Outcome == mail.Accepted
		switch r.Outcome {
		case mail.Accepted:
			d.State = Delivered
		case mail.Refused:
			d.State = Bounced
		case mail.Uncertain:
			d.State = Uncertain
		case mail.NotSent:
			d.State, d.Next = Deferred, now.Add(q.conf.retryAfter(d.Attempts))
			if d.Next.Sub(d.First) > q.conf.Lifetime {
				d.State, d.Next = Bounced, time.Time{}
				d.Detail = fmt.Sprintf("given up after %d attempts; the last one: %s", d.Attempts, d.Detail)
				if d.Status == "" || strings.HasPrefix(d.Status, "4") {
					d.Status = "4.4.7" // RFC 3463: delivery time expired
				}
			}
		}
		is, err := among(ds, d.n)
		if err != nil {
			return err
		}
		if _, ours := is.part().End(d.Attempts, d.State); !ours {
			continue // this process was suspended, and another has delivered since
		}
		x.to[i] = d
		if err := q.note(ctx, tx, a, d); err != nil {
			return err
		}
		if d.State == Delivered && a.Kind != policy.KindCopy {
			if err := q.parts.Mailbox.CountSent(ctx, tx, b.ID, d.Recipient, 1); err != nil {
				return err
			}
		}
		if d.State == Bounced && r.Gone && a.Kind != policy.KindCopy {
			if err := q.parts.Suppression.add(ctx, tx, b.Project, b.ID, d.Recipient, SuppressedBounce); err != nil {
				return err
			}
		}
	}
	if err := q.release(ctx, tx, x.hop, holder, answered, now); err != nil {
		return err
	}
	if err := q.judge(ctx, tx, b, now); err != nil {
		return err
	}
	// Last, since it takes the lock of the audit chain, which all writers need.
	for _, d := range x.to {
		if err := q.announceDelivery(ctx, tx, a, b, d); err != nil {
			return err
		}
	}
	return nil
}

// note stores the current state of d. The times of attempts are stored by
// begin.
func (q *Queue) note(ctx context.Context, tx *store.Tx, a oversight.Action, d Delivery) error {
	if d.open() {
		d.Settled = time.Time{}
	} else if d.Settled.IsZero() && d.State != Uncertain {
		d.Settled, d.Next = time.Now(), time.Time{}
	}
	if d.State == Uncertain {
		d.Next = time.Time{}
	}
	_, err := tx.ExecContext(ctx, `update delivery set state = $1, asked = 0, code = $2, status = $3, detail = $4, remote = $5, next_at = $6, settled_at = $7
		where action_id = $8 and n = $9`,
		d.State, d.Code, d.Status, d.Detail, d.Remote, store.Time(d.Next), store.Time(d.Settled), a.ID, d.n)
	if err != nil {
		return fmt.Errorf("record delivery: %w", err)
	}
	return sealDelivery(ctx, tx, a.ID, d.n)
}

// outcome sums the deliveries of an action up for the gate, with one line of
// detail per recipient.
func outcome(ds []Delivery, now time.Time) oversight.Outcome {
	var lines []string
	var parts []oversight.Part
	var next time.Time
	for _, d := range ds {
		parts = append(parts, d.part())
		if d.open() && (next.IsZero() || d.Next.Before(next)) {
			next = d.Next
		}
		word := string(d.State)
		if d.State == Delivered {
			word = string(mail.Accepted)
		}
		lines = append(lines, strings.TrimSpace(fmt.Sprintf("%s: %s %s", d.Recipient, word, d.Detail)))
	}
	o := oversight.Outcome{State: oversight.Sum(parts), Detail: strings.Join(lines, "\n")}
	if o.State == oversight.Approved {
		o.After = max(next.Sub(now), 0)
	}
	return o
}

// Interrupted implements [oversight.Recoverer], after a crash. Recipients in
// state sending become uncertain; the others are delivered to as usual.
func (q *Queue) Interrupted(ctx context.Context, tx *store.Tx, a oversight.Action) (oversight.Outcome, error) {
	var env *mail.Envelope
	var payload []byte
	if err := tx.One(ctx, `select payload from action where id = $1`, []any{a.ID}, &payload); err != nil {
		return oversight.Outcome{}, fmt.Errorf("recover deliveries: %w", err)
	}
	if e, err := mail.ParsePayload(payload); err == nil {
		env = &e
	}
	ds, err := deliveries(ctx, tx, a.ID, env)
	if err != nil {
		return oversight.Outcome{}, err
	}
	for i := range ds {
		d := &ds[i]
		left := d.part().Interrupted().State
		if left == d.State {
			continue
		}
		d.State, d.Detail = left, "the program stopped while this was being sent: it may or may not have arrived"
		_, err := tx.ExecContext(ctx, `update delivery set state = $1, detail = $2 where action_id = $3 and n = $4`, d.State, d.Detail, a.ID, d.n)
		if err != nil {
			return oversight.Outcome{}, fmt.Errorf("recover deliveries: %w", err)
		}
		if err := sealDelivery(ctx, tx, a.ID, d.n); err != nil {
			return oversight.Outcome{}, err
		}
	}
	q.recall(tx, a.ID, ds)
	if len(ds) == 0 {
		return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before anything was sent"}, nil
	}
	return outcome(ds, time.Now()), nil
}

// Moved follows a decision of a person, or of the gate, about an action: to
// retry, to cancel, or how an uncertain delivery ended.
func (q *Queue) Moved(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	if a.Version == 1 {
		return nil // it is being proposed, so it has none
	}
	ds, err := deliveries(ctx, tx, a.ID, nil)
	if err != nil {
		return err
	}
	arrived := false
	now := time.Now()
	for _, d := range ds {
		p := d.part().Follow(a.State)
		if p == d.part() { // the decision does not concern this recipient
			continue
		}
		d.State, d.asked = p.State, p.Asked
		switch d.State {
		case Queued:
			d.Next = now
		case Delivered:
			d.Detail, d.Settled, arrived = "a person confirmed that it arrived", now, true
		case Bounced:
			d.Detail, d.Settled, d.told = "a person gave up on it", now, now
		case Cancelled:
			d.Next, d.Settled = time.Time{}, now
		case Sending, Deferred, Suppressed, Uncertain:
		}
		_, err := tx.ExecContext(ctx, `update delivery set state = $1, asked = $2, detail = $3, next_at = $4, settled_at = $5, told_at = $6 where action_id = $7 and n = $8`,
			d.State, store.Flag(d.asked), d.Detail, store.Time(d.Next), store.Time(d.Settled), store.Time(d.told), a.ID, d.n)
		if err != nil {
			return fmt.Errorf("follow action %s: %w", a.ID, err)
		}
		if err := sealDelivery(ctx, tx, a.ID, d.n); err != nil {
			return err
		}
	}
	if a.State == oversight.Done && arrived {
		return q.copyOf(ctx, tx, a)
	}
	return nil
}

// copyOf stores a copy of the message of an action after a person confirmed
// that it arrived.
func (q *Queue) copyOf(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	var payload []byte
	if err := tx.One(ctx, `select payload from action where id = $1`, []any{a.ID}, &payload); err != nil {
		return fmt.Errorf("copy message: %w", err)
	}
	env, err := mail.ParsePayload(payload)
	if err != nil {
		return nil //nolint:nilerr // the message has been deleted
	}
	b, err := directory.Lookup(ctx, tx, a.Inbox)
	if errors.Is(err, directory.ErrNoInbox) {
		return nil
	}
	if err != nil {
		return err
	}
	return q.keepCopy(ctx, tx, a, b, env.Raw)
}
