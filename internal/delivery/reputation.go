package delivery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/store"
)

// Reputation sets the bounce and complaint rates above which an inbox, or a
// whole domain, is suspended until a person lifts the suspension. Large
// providers block domains at lower rates.
type Reputation struct {
	Window     time.Duration // period that the rates are computed over; 0 means 7 days
	MinSent    int           // recipients in the window below which rates do not count; 0 means 100
	Bounces    float64       // highest share of bounced recipients; 0 means 0.05
	Complaints float64       // highest share of complaints; 0 means 0.003
	// MinBad is the number of bounces or complaints below which nobody is
	// suspended. The attack: a single recipient who complains, or forges a
	// report of mail that he got, stops an inbox. 0 means 3.
	MinBad int
}

func (r *Reputation) fill() {
	if r.Window <= 0 {
		r.Window = 7 * 24 * time.Hour
	}
	if r.MinSent <= 0 {
		r.MinSent = 100
	}
	if r.Bounces <= 0 {
		r.Bounces = 0.05
	}
	if r.Complaints <= 0 {
		r.Complaints = 0.003
	}
	if r.MinBad <= 0 {
		r.MinBad = 3
	}
}

// suspendedWait is how often waiting mail checks whether the suspension was
// lifted.
const suspendedWait = 2 * time.Minute

// warmUp holds the recipients per day that a new domain may send to in its
// first, second and third week.
var warmUp = []int64{50, 500, 5000}

// mayLeave returns until when a batch must wait, and why, if b or its domain is
// suspended. Local mail is never held back: it harms no reputation.
func (q *Queue) mayLeave(ctx context.Context, tx *store.Tx, b directory.Inbox, x batch, now time.Time) (wait time.Time, why string, err error) {
	if x.hop.Kind == HopLocal {
		return time.Time{}, "", nil
	}
	domain := mail.Domain(b.Address)
	for _, scope := range []string{b.ID, domain} {
		var reason string
		err := tx.One(ctx, `select reason from suspension where scope = $1`, []any{scope}, &reason)
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return time.Time{}, "", fmt.Errorf("look suspension up: %w", err)
		}
		if reason != "" {
			return now.Add(suspendedWait), "waits: sending is suspended for " + scope + " (" + reason + "); a person can lift it", nil
		}
	}
	return time.Time{}, "", nil
}

// MayLeaveElsewhere returns why mail of b to recipients may not leave by another
// server than this one, or nothing: sending is suspended, or an address is on the
// project's suppression list.
func (q *Queue) MayLeaveElsewhere(ctx context.Context, tx *store.Tx, b directory.Inbox, recipients []string) (why string, err error) {
	_, why, err = q.mayLeave(ctx, tx, b, batch{hop: Hop{Kind: HopDirect}}, time.Now())
	if why != "" || err != nil {
		return strings.TrimPrefix(why, "waits: "), err
	}
	for _, to := range recipients {
		reason, err := q.parts.Suppression.reason(ctx, tx, b.Project, to)
		if err != nil {
			return "", err
		}
		if reason != "" {
			return to + " is on this project's suppression list (" + string(reason) + "); a person or the project's key can remove it", nil
		}
	}
	return "", nil
}

// warm counts a batch against the daily limit of a domain that is new to direct
// sending. If the limit is reached, it returns until when to wait, and why.
func (q *Queue) warm(ctx context.Context, tx *store.Tx, b directory.Inbox, x batch, now time.Time) (wait time.Time, why string, err error) {
	domain := mail.Domain(b.Address)
	if x.hop.Kind != HopDirect || !q.conf.WarmUp {
		return time.Time{}, "", nil
	}
	// Days are UTC days since 1970.
	today := now.Unix() / 86400
	var first int64
	err = tx.One(ctx, `select min(day) from sending_day where domain = $1 having count(*) > 0`, []any{domain}, &first)
	if errors.Is(err, store.ErrNotFound) {
		first, err = today, nil
	}
	if err != nil {
		return time.Time{}, "", fmt.Errorf("count sending days: %w", err)
	}
	week := (today - first) / 7
	if week >= int64(len(warmUp)) {
		return time.Time{}, "", nil
	}
	n := int64(len(x.to))
	_, err = tx.ExecContext(ctx, `insert into sending_day (domain, day, sent) values ($1, $2, 0) on conflict do nothing`, domain, today)
	if err != nil {
		return time.Time{}, "", fmt.Errorf("count sending day: %w", err)
	}
	ok, err := tx.Changed(ctx, `update sending_day set sent = sent + $1 where domain = $2 and day = $3 and sent + $1 <= $4`, n, domain, today, warmUp[week])
	if err != nil {
		return time.Time{}, "", fmt.Errorf("count sending day: %w", err)
	}
	if ok {
		return time.Time{}, "", nil
	}
	return time.Unix((today+1)*86400, 0), fmt.Sprintf("waits until tomorrow: %s is a new sending domain, limited to %d recipients a day in week %d", domain, warmUp[week], week+1), nil
}

// judge suspends b, or its domain, if too many of its recent messages bounced
// or caused complaints.
func (q *Queue) judge(ctx context.Context, tx *store.Tx, b directory.Inbox, now time.Time) error {
	r := &q.conf.Reputation
	domain := mail.Domain(b.Address)
	suspended := map[string]string{}
	owner := b.Project
	if domain == q.parts.Directory.Domain() { // shared by all projects; the operators of the server lift it
		var err error
		if owner, err = auth.FirstProject(ctx, tx); err != nil {
			return fmt.Errorf("owner of %s: %w", domain, err)
		}
	}
	// The inbox is judged first, and the mail of a suspended inbox does not
	// count for its domain: one bad inbox must not stop all others. The domain
	// is suspended only if many inboxes together are bad.
	for _, s := range []struct{ scope, where, project string }{
		{b.ID, "inbox_id = $1", b.Project},
		{domain, "domain = $1 and not exists (select 1 from suspension s where s.scope = inbox_id and s.reason <> '')", owner},
	} {
		since := store.Time(now.Add(-r.Window))
		var lifted int64
		var reason string
		err := tx.One(ctx, `select reason, lifted_at from suspension where scope = $1`, []any{s.scope}, &reason, &lifted)
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("look suspension up: %w", err)
		}
		if reason != "" {
			continue
		}
		var sent, bounced, complained int
		err = tx.One(ctx, `select count(*), coalesce(sum(case when state = 'bounced' then 1 else 0 end), 0), coalesce(sum(case when complained_at > 0 then 1 else 0 end), 0)
			from delivery where `+s.where+` and settled_at > $2 and outside = 1 and state in ('delivered', 'bounced')`,
			[]any{s.scope, max(since, lifted)}, &sent, &bounced, &complained)
		if err != nil {
			return fmt.Errorf("count bounces: %w", err)
		}
		if sent < r.MinSent {
			continue
		}
		switch {
		case bounced >= r.MinBad && float64(bounced) > r.Bounces*float64(sent):
			reason = fmt.Sprintf("%d of %d recipients bounced", bounced, sent)
		case complained >= r.MinBad && float64(complained) > r.Complaints*float64(sent):
			reason = fmt.Sprintf("%d of %d recipients complained", complained, sent)
		default:
			continue
		}
		_, err = tx.ExecContext(ctx, `insert into suspension (scope, project_id, reason, suspended_at, lifted_at) values ($1, $2, $3, $4, 0)
			on conflict (scope) do update set reason = excluded.reason, suspended_at = excluded.suspended_at`, s.scope, s.project, reason, store.Time(now))
		if err != nil {
			return fmt.Errorf("suspend: %w", err)
		}
		suspended[s.scope] = reason
	}
	if err := q.parts.Mailbox.Judge(ctx, tx, b, now); err != nil {
		return err
	}
	who := auth.Principal{Kind: auth.System, ID: "reputation", Project: b.Project}
	for _, scope := range slices.Sorted(maps.Keys(suspended)) {
		if err := audit.Append(ctx, tx, who, audit.SendingSuspend, scope, audit.Fields{"reason": suspended[scope]}); err != nil {
			return err
		}
	}
	return nil
}

// A Suspension stops all mail from an inbox or a domain.
type Suspension struct {
	Scope  string // ID of the inbox, or name of the domain
	Reason string
	At     time.Time
}

// Suspensions returns the suspensions of the inboxes of who's project, and of
// the domains that it is responsible for.
func (q *Queue) Suspensions(ctx context.Context, who auth.Principal) (out []Suspension, err error) {
	if err := directory.MayManage(who); err != nil {
		return nil, err
	}
	err = q.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select scope, reason, suspended_at from suspension where project_id = $1 and reason <> '' order by suspended_at, scope`, who.Project)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var s Suspension
			var at int64
			if err := rows.Scan(&s.Scope, &s.Reason, &at); err != nil {
				return err
			}
			s.At = store.FromTime(at)
			out = append(out, s)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("list suspensions: %w", err)
	}
	return out, nil
}

// Lift ends the suspension of an inbox or domain of who's project. Results from
// before do not count any more. Only a person may lift it: with a key, an agent
// could undo its own suspension.
func (q *Queue) Lift(ctx context.Context, who auth.Principal, scope, reason string) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	if who.Kind != auth.Person {
		return fmt.Errorf("%s may not lift a suspension: only a person may: %w", who, auth.ErrForbidden)
	}
	return q.db.Update(ctx, func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `update suspension set reason = '', lifted_at = $1 where scope = $2 and project_id = $3 and reason <> ''`,
			store.Time(time.Now()), scope, who.Project)
		if err != nil {
			return fmt.Errorf("lift suspension: %w", err)
		}
		if !ok {
			return fmt.Errorf("suspension of %q: %w", scope, store.ErrNotFound)
		}
		return audit.Append(ctx, tx, who, audit.SendingLift, scope, audit.Fields{"reason": reason})
	})
}
