package notify

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/store"
)

// An outgoing is a notice that is in state sending.
type outgoing struct {
	id, kind string
	channel  Channel
	attempts int64
	to       person
	action   oversight.Action
	token    auth.Secret // of its link
	last     bool        // the last one of this hour: later ones go into a digest
	others   int         // of a digest: how many actions it covers; then action is zero
}

// A result is the outcome of one attempt to send.
type result struct {
	state   string        // sent; failed; or waiting: certainly not sent, and retried
	err     error         // the reason, for the log and the row
	after   time.Duration // the least wait before the retry, as the server asks for
	chat    int64         // of a message with buttons; else 0
	message int           // likewise
	whole   bool          // the message showed all that would leave
}

const (
	maxAttempts = 8
	sendTime    = 2 * time.Minute // for one attempt
	stopGrace   = 5 * time.Second // for attempts under way when the program stops
)

// backoff returns how long to wait after an attempt: 1, 4, 16, 64 minutes, then
// 4 hours.
func backoff(attempts int64) time.Duration {
	return min(time.Minute<<(2*min(attempts-1, 4)), 4*time.Hour)
}

// dispatch starts to send the notices that are due.
func (n *Notifier) dispatch(ctx context.Context, sending *sync.WaitGroup) error {
	for _, c := range []Channel{Mail, Telegram} {
		if !n.On(c) {
			continue
		}
		var ids []string
		err := n.db.View(ctx, func(tx *store.Tx) (err error) {
			ids, err = tx.Strings(ctx, `select id from notice where state = 'waiting' and due_at <= $1 and channel = $2 order by due_at, at, id limit 100`, store.Time(time.Now()), c)
			return err
		})
		if err != nil {
			return fmt.Errorf("find notices: %w", err)
		}
		for _, id := range ids {
			select {
			case n.slots[c] <- struct{}{}:
			default:
				id = "" // all slots are in use; the rest waits for the next pass
			}
			if id == "" {
				break
			}
			p, err := n.takeNotice(ctx, id)
			if err != nil {
				<-n.slots[c]
				if errors.Is(err, store.ErrNotFound) {
					continue // another server took it, or it is held or dropped now
				}
				return fmt.Errorf("take notice: %w", err)
			}
			n.begin(ctx, sending, p)
		}
	}
	return nil
}

// begin sends p in the background and frees the slot that the caller has taken.
func (n *Notifier) begin(ctx context.Context, sending *sync.WaitGroup, p outgoing) {
	sending.Go(func() {
		defer func() { <-n.slots[p.channel] }()
		done, stopping := context.WithoutCancel(ctx), ctx
		ctx, cancel := context.WithTimeout(done, sendTime)
		defer cancel()
		// A send under way may finish when the program stops, within stopGrace.
		defer context.AfterFunc(stopping, func() {
			select {
			case <-time.After(stopGrace):
				cancel()
			case <-ctx.Done():
			}
		})()
		if err := n.finish(done, p, n.send(ctx, p)); err != nil {
			n.log.ErrorContext(done, "record notice", "notice", p.id, "err", err)
		}
	})
}

// send sends p over its channel. It does not touch the database.
func (n *Notifier) send(ctx context.Context, p outgoing) result {
	switch p.channel {
	case Mail:
		return n.sendMail(ctx, p)
	case Telegram:
		return n.sendTelegram(ctx, p)
	}
	return result{state: "failed", err: fmt.Errorf("there is no channel %q", p.channel)}
}

// takeNotice moves a notice to sending. If it moves it to held or dropped instead,
// or another server took it, it returns [store.ErrNotFound].
func (n *Notifier) takeNotice(ctx context.Context, id string) (p outgoing, err error) {
	took := false
	err = n.db.Update(ctx, func(tx *store.Tx) error {
		p, took = outgoing{id: id, token: auth.Secret(rand.Text())}, false
		now := time.Now()
		var holder, action string
		var version int64
		err := tx.One(ctx, `select person_id, channel, kind, action_id, version, attempts from notice where id = $1 and state = 'waiting' and due_at <= $2`,
			[]any{id, store.Time(now)}, &holder, &p.channel, &p.kind, &action, &version, &p.attempts)
		if err != nil {
			return err
		}
		to := func(state string) error {
			_, err := tx.ExecContext(ctx, `update notice set state = $1 where id = $2 and state = 'waiting'`, state, id)
			return err
		}
		if p.action, err = oversight.ActionUnchecked(ctx, tx, action); err != nil {
			return err
		}
		if p.action.State != oversight.Pending || p.action.Version != version {
			return to("dropped")
		}
		p.to, err = withoutForged(ctx, tx)(scanPerson(tx.QueryRowContext(ctx, selectPeople+`and p.id = $1`, holder).Scan))
		if errors.Is(err, store.ErrNotFound) {
			return to("dropped")
		}
		if err != nil {
			return err
		}
		said, err := approved(ctx, tx, p.action, p.to)
		if err != nil {
			return err
		}
		// Rights change: an owner of the time of the round may be one no longer.
		asks := p.to.asked(p.action) || (p.kind == kindUnclaimed || p.kind == kindUnclaimedReminder) && p.to.Manages()
		if said || !asks || !n.canReach(p.to, p.channel) {
			return to("dropped")
		}
		if p.attempts == 0 {
			room, last, err := n.countNotice(ctx, tx, p.to.id, p.channel, now)
			if err != nil {
				return err
			}
			if !room {
				return to("held")
			}
			p.last = last
		}
		p.attempts++
		took, err = tx.Changed(ctx, `update notice set state = 'sending', attempts = $1, token = $2 where id = $3 and state = 'waiting'`, p.attempts, digest(p.token), id)
		return err
	})
	if err == nil && !took {
		err = store.ErrNotFound
	}
	return p, err
}

// countNotice counts a notice against a person's hour. It reports whether there
// was room, and whether this was the last one.
func (n *Notifier) countNotice(ctx context.Context, tx *store.Tx, person string, c Channel, now time.Time) (room, last bool, err error) {
	_, err = tx.ExecContext(ctx, `insert into notice_flow (person_id, channel, window_at, sent) values ($1, $2, $3, 0) on conflict do nothing`, person, c, store.Time(now))
	if err != nil {
		return false, false, fmt.Errorf("count notices: %w", err)
	}
	var window, sent int64
	err = tx.One(ctx, `select window_at, sent from notice_flow where person_id = $1 and channel = $2`, []any{person, c}, &window, &sent)
	if err != nil {
		return false, false, fmt.Errorf("count notices: %w", err)
	}
	if now.Sub(store.FromTime(window)) >= time.Hour {
		window, sent = store.Time(now), 0
	}
	if sent >= int64(n.conf.PerHour) {
		return false, false, nil
	}
	sent++
	_, err = tx.ExecContext(ctx, `update notice_flow set window_at = $1, sent = $2 where person_id = $3 and channel = $4`, window, sent, person, c)
	if err != nil {
		return false, false, fmt.Errorf("count notices: %w", err)
	}
	return true, sent == int64(n.conf.PerHour), nil
}

// finish records the result of p.
func (n *Notifier) finish(ctx context.Context, p outgoing, r result) error {
	why := ""
	if r.err != nil {
		why = truncate(r.err.Error(), 300)
		n.log.WarnContext(ctx, "send notice", "notice", p.id, "channel", p.channel, "person", p.to.ID, "state", r.state, "err", r.err)
	}
	if p.others > 0 {
		return n.finishDigest(ctx, p, r, why)
	}
	due := time.Time{}
	if r.state == "waiting" {
		if p.attempts >= maxAttempts {
			r.state = "failed"
		} else {
			due = time.Now().Add(max(r.after, backoff(p.attempts)))
		}
	}
	return n.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update notice set state = $1, due_at = $2, sent_at = $3, error = $4, chat_id = $5, message_id = $6, whole = $7, open = $8 where id = $9 and state = 'sending'`,
			r.state, store.Time(due), store.Time(time.Now()), why, r.chat, r.message, store.Flag(r.whole), store.Flag(r.message != 0), p.id)
		if err != nil {
			return fmt.Errorf("record notice: %w", err)
		}
		if r.state == "waiting" {
			return nil
		}
		verb := audit.NotifySent
		if r.state == "failed" {
			verb = audit.NotifyFailed
		}
		return audit.Append(ctx, tx, system(p.action), verb, p.action.ID, audit.Fields{"person": p.to.ID, "channel": string(p.channel), "kind": p.kind})
	})
}

// digests sends the held notices of people whose hour is over, as one each.
func (n *Notifier) digests(ctx context.Context, sending *sync.WaitGroup) error {
	type flow struct {
		person  string
		channel Channel
		window  int64
	}
	var flows []flow
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		flows, err = store.List(ctx, tx, func(row func(...any) error) (f flow, err error) {
			err = row(&f.person, &f.channel, &f.window)
			return f, err
		}, `select person_id, channel, window_at from notice_flow f where window_at <= $1
			and exists (select 1 from notice h where h.person_id = f.person_id and h.channel = f.channel and h.state = 'held')`, store.Time(time.Now().Add(-time.Hour)))
		return err
	})
	if err != nil {
		return fmt.Errorf("find held notices: %w", err)
	}
	for _, f := range flows {
		if !n.On(f.channel) {
			continue
		}
		select {
		case n.slots[f.channel] <- struct{}{}:
		default:
			continue
		}
		p, err := n.takeDigest(ctx, f.person, f.channel, f.window)
		if err == nil && p.others > 0 {
			n.begin(ctx, sending, p)
			continue
		}
		<-n.slots[f.channel]
		if err != nil {
			return fmt.Errorf("gather held notices: %w", err)
		}
	}
	return nil
}

// takeDigest combines all notices that are held for a person. The result covers
// no actions if another server took them, or none of them is pending any more.
func (n *Notifier) takeDigest(ctx context.Context, holder string, c Channel, window int64) (p outgoing, err error) {
	err = n.db.Update(ctx, func(tx *store.Tx) error {
		p = outgoing{id: "dig_" + rand.Text(), channel: c}
		ours, err := tx.Changed(ctx, `update notice_flow set window_at = $1, sent = 1 where person_id = $2 and channel = $3 and window_at = $4`,
			store.Time(time.Now()), holder, c, window)
		if err != nil || !ours {
			return err
		}
		_, err = tx.ExecContext(ctx, `update notice set state = 'dropped' where person_id = $1 and channel = $2 and state = 'held'
			and not exists (select 1 from action a where a.id = action_id and a.version = notice.version and a.state = 'pending')`, holder, c)
		if err != nil {
			return err
		}
		p.to, err = withoutForged(ctx, tx)(scanPerson(tx.QueryRowContext(ctx, selectPeople+`and p.id = $1`, holder).Scan))
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
		if err != nil || !p.to.Decides() || !n.canReach(p.to, c) {
			_, err = tx.ExecContext(ctx, `update notice set state = 'dropped' where person_id = $1 and channel = $2 and state = 'held'`, holder, c)
			return err
		}
		// An action with both a notice and a reminder counts once.
		err = tx.One(ctx, `select count(distinct action_id) from notice where person_id = $1 and channel = $2 and state = 'held'`, []any{holder, c}, &p.others)
		if err != nil || p.others == 0 {
			return err
		}
		_, err = tx.ExecContext(ctx, `update notice set state = 'sending', error = $1 where person_id = $2 and channel = $3 and state = 'held'`, p.id, holder, c)
		return err
	})
	return p, err
}

// finishDigest records the result of a digest, for all notices in it. They are
// found by the digest's ID, which is in their column error while it is being sent.
func (n *Notifier) finishDigest(ctx context.Context, p outgoing, r result, why string) error {
	return n.db.Update(ctx, func(tx *store.Tx) error {
		if r.state == "waiting" {
			// Retry soon, by letting the window end after the wait.
			_, err := tx.ExecContext(ctx, `update notice_flow set window_at = $1 where person_id = $2 and channel = $3`,
				store.Time(time.Now().Add(max(r.after, 5*time.Minute)-time.Hour)), p.to.id, p.channel)
			if err != nil {
				return fmt.Errorf("record notice: %w", err)
			}
			_, err = tx.ExecContext(ctx, `update notice set state = 'held', error = $1 where error = $2 and state = 'sending'`, why, p.id)
			return err
		}
		_, err := tx.ExecContext(ctx, `update notice set state = $1, sent_at = $2, error = $3 where error = $4 and state = 'sending'`, r.state, store.Time(time.Now()), why, p.id)
		return err
	})
}
