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
	room     Room // instead of a person, if it has an ID
	chat     bool // policy lets a chat decide on the action
	detail   bool // the person wants details in push messages
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
	chat    int64         // of a Telegram message, which can be edited later; else 0
	message int           // likewise
	posted  string        // Slack's ID of the message, which can be edited later; else empty
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
	for _, c := range channels() {
		if !n.On(c) {
			continue
		}
		list, err := n.due(ctx, c)
		if err != nil {
			return fmt.Errorf("find notices: %w", err)
		}
		for _, d := range list {
			release, ok := n.sends.take(c, d.project, d.holder)
			if !ok {
				continue // the next pass tries again
			}
			p, err := n.takeNotice(ctx, d.id)
			if err != nil {
				release()
				if errors.Is(err, store.ErrNotFound) {
					continue // another server took it, or it is held or dropped now
				}
				return fmt.Errorf("take notice: %w", err)
			}
			n.begin(ctx, sending, p, release)
		}
	}
	return nil
}

// A dueNotice is a notice that waits and is due.
type dueNotice struct{ id, project, holder string }

// due returns notices over c that are due, the oldest first. It returns at most maxDue for
// each person and room, so that those to a server that never answers do not hide all others.
func (n *Notifier) due(ctx context.Context, c Channel) (list []dueNotice, err error) {
	err = n.db.View(ctx, func(tx *store.Tx) error {
		list, err = store.List(ctx, tx, func(row func(...any) error) (d dueNotice, err error) {
			err = row(&d.id, &d.project, &d.holder)
			return d, err
		}, `select id, project_id, person_id from (
				select id, project_id, person_id, due_at, at, row_number() over (partition by person_id order by due_at, at, id) as nth
				from notice where state = 'waiting' and due_at <= $1 and channel = $2) as due
			where nth <= $3 order by due_at, at, id limit 1000`, store.Time(time.Now()), c, maxDue)
		return err
	})
	return list, err
}

// begin sends p in the background and frees the places that the caller has taken.
func (n *Notifier) begin(ctx context.Context, sending *sync.WaitGroup, p outgoing, release func()) {
	sending.Go(func() {
		defer release()
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

// send sends p over its channel. It does not change the notice's row.
func (n *Notifier) send(ctx context.Context, p outgoing) result {
	switch p.channel {
	case Mail:
		return n.sendMail(ctx, p)
	case Telegram:
		return n.sendTelegram(ctx, p)
	case Slack:
		return n.sendSlack(ctx, p)
	case Teams:
		return n.sendTeams(ctx, p)
	case Push:
		return n.sendPush(ctx, p)
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
		if p.chat, err = n.chatDecides(ctx, tx, p.action); err != nil {
			return err
		}
		reaches, err := n.recipient(ctx, tx, &p, holder)
		if err != nil {
			return err
		}
		if !reaches {
			return to("dropped")
		}
		if p.attempts == 0 {
			room, last, err := n.countNotice(ctx, tx, holder, p.channel, now)
			if err != nil {
				return err
			}
			if !room {
				return n.hold(ctx, tx, id, holder, p)
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

// recipient sets the person or the room that p goes to. It reports false if p must
// not be sent any more.
func (n *Notifier) recipient(ctx context.Context, tx *store.Tx, p *outgoing, holder string) (bool, error) {
	var err error
	if p.channel.isRoom() {
		p.room, err = n.roomByID(ctx, tx, p.action.Project, holder)
		if errors.Is(err, store.ErrNotFound) {
			return false, nil
		}
		return err == nil, err
	}
	p.to, err = withoutForged(ctx, tx)(scanPerson(tx.QueryRowContext(ctx, selectPeople+`and p.id = $1`, holder).Scan))
	if errors.Is(err, store.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	s, err := settingsOf(ctx, tx, p.to)
	if err != nil {
		return false, err
	}
	p.detail = s.Detail
	if p.kind == kindEscalated { // the project names the recipients, not policy
		return n.canReach(p.to, p.channel), nil
	}
	said, err := approved(ctx, tx, p.action, p.to)
	// Roles change: whoever was an owner at the time of the round may not be one any more.
	asks := p.to.asked(p.action) || (p.kind == kindUnclaimed || p.kind == kindUnclaimedReminder) && p.to.Manages()
	return err == nil && !said && asks && n.canReach(p.to, p.channel), err
}

// hold holds a notice that is over the limit until the hour has ended. If that is in the
// person's quiet hours, the notice is held until these have ended.
func (n *Notifier) hold(ctx context.Context, tx *store.Tx, id, holder string, p outgoing) error {
	var window int64
	if err := tx.One(ctx, `select window_at from notice_flow where person_id = $1 and channel = $2`, []any{holder, p.channel}, &window); err != nil {
		return fmt.Errorf("hold notice: %w", err)
	}
	due := store.FromTime(window).Add(time.Hour)
	if !p.channel.isRoom() {
		s, err := settingsOf(ctx, tx, p.to)
		if err != nil {
			return err
		}
		due = s.awake(due)
	}
	_, err := tx.ExecContext(ctx, `update notice set state = 'held', due_at = $1 where id = $2 and state = 'waiting'`, store.Time(due), id)
	if err != nil {
		return fmt.Errorf("hold notice: %w", err)
	}
	return nil
}

// countNotice counts a notice against the hourly limit of a person or room. It reports
// whether there was room, and whether this was the last one.
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
		n.log.WarnContext(ctx, "send notice", "notice", p.id, "channel", p.channel, "person", p.to.ID, "room", p.room.Name, "state", r.state, "err", r.err)
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
		_, err := tx.ExecContext(ctx, `update notice set state = $1, due_at = $2, sent_at = $3, error = $4, chat_id = $5, message_id = $6, whole = $7, open = $8, posted = $9 where id = $10 and state = 'sending'`,
			r.state, store.Time(due), store.Time(time.Now()), why, r.chat, r.message, store.Flag(r.whole), store.Flag(r.message != 0 || r.posted != ""), r.posted, p.id)
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
		return audit.Append(ctx, tx, system(p.action), verb, p.action.ID, p.fields())
	})
}

// fields returns the fields of the audit entry about p.
func (p *outgoing) fields() audit.Fields {
	f := audit.Fields{"channel": string(p.channel), "kind": p.kind}
	if p.room.ID != "" {
		f["room"] = p.room.Name
	} else {
		f["person"] = p.to.ID
	}
	return f
}

// digests sends the held notices that are due: those over the hourly limit, collected, or
// from quiet hours. A person or room gets one message over each channel.
func (n *Notifier) digests(ctx context.Context, sending *sync.WaitGroup) error {
	type held struct {
		holder, project string
		channel         Channel
	}
	var list []held
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		list, err = store.List(ctx, tx, func(row func(...any) error) (h held, err error) {
			err = row(&h.holder, &h.channel, &h.project)
			return h, err
		}, `select distinct person_id, channel, project_id from notice where state = 'held' and due_at <= $1`, store.Time(time.Now()))
		return err
	})
	if err != nil {
		return fmt.Errorf("find held notices: %w", err)
	}
	for _, h := range list {
		if !n.On(h.channel) {
			continue
		}
		release, ok := n.sends.take(h.channel, h.project, h.holder)
		if !ok {
			continue
		}
		p, err := n.takeDigest(ctx, h.holder, h.channel)
		if err == nil && p.others > 0 {
			n.begin(ctx, sending, p, release)
			continue
		}
		release()
		if err != nil {
			return fmt.Errorf("gather held notices: %w", err)
		}
	}
	return nil
}

// takeDigest combines all due notices that are held for a person or a room. The result
// covers no actions if another server took the notices, or if no action is pending any more.
// It covers none either if only one action is pending: that notice is then sent on its own.
func (n *Notifier) takeDigest(ctx context.Context, holder string, c Channel) (p outgoing, err error) {
	err = n.db.Update(ctx, func(tx *store.Tx) error {
		p = outgoing{id: "dig_" + rand.Text(), channel: c}
		now := store.Time(time.Now())
		_, err := tx.ExecContext(ctx, `update notice set state = 'dropped' where person_id = $1 and channel = $2 and state = 'held'
			and not exists (select 1 from action a where a.id = action_id and a.version = notice.version and a.state = 'pending')`, holder, c)
		if err != nil {
			return err
		}
		if c.isRoom() {
			p.room, err = n.roomByID(ctx, tx, "", holder)
		} else {
			p.to, err = withoutForged(ctx, tx)(scanPerson(tx.QueryRowContext(ctx, selectPeople+`and p.id = $1`, holder).Scan))
		}
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
		if err != nil || !c.isRoom() && (!p.to.Decides() || !n.canReach(p.to, c)) {
			_, err = tx.ExecContext(ctx, `update notice set state = 'dropped' where person_id = $1 and channel = $2 and state = 'held'`, holder, c)
			return err
		}
		// A second server that updates the same rows waits here, and then finds none.
		_, err = tx.ExecContext(ctx, `update notice set state = 'sending', error = $1 where person_id = $2 and channel = $3 and state = 'held' and due_at <= $4`, p.id, holder, c, now)
		if err != nil {
			return err
		}
		// An action with both a notice and a reminder counts once.
		if err = tx.One(ctx, `select count(distinct action_id) from notice where error = $1 and state = 'sending'`, []any{p.id}, &p.others); err != nil || p.others == 0 {
			return err
		}
		if p.others == 1 {
			p.others = 0
			_, err = tx.ExecContext(ctx, `update notice set state = 'waiting', error = '', attempts = 0 where error = $1 and state = 'sending'`, p.id)
			return err
		}
		_, _, err = n.countNotice(ctx, tx, holder, c, time.Now())
		return err
	})
	return p, err
}

// finishDigest records the result of a digest, for all notices in it. They are
// found by the digest's ID, which is in their column error while it is being sent.
func (n *Notifier) finishDigest(ctx context.Context, p outgoing, r result, why string) error {
	return n.db.Update(ctx, func(tx *store.Tx) error {
		if r.state == "waiting" {
			_, err := tx.ExecContext(ctx, `update notice set state = 'held', error = $1, due_at = $2 where error = $3 and state = 'sending'`,
				why, store.Time(time.Now().Add(max(r.after, 5*time.Minute))), p.id)
			return err
		}
		_, err := tx.ExecContext(ctx, `update notice set state = $1, sent_at = $2, error = $3 where error = $4 and state = 'sending'`, r.state, store.Time(time.Now()), why, p.id)
		return err
	})
}
