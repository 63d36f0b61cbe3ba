// Package quota enforces the sending limits of inboxes and projects. It counts
// proposals in fixed windows in the database, and makes no other decision about
// a message.
package quota

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/store"
)

// Limits bound what an inbox, or a project, proposes to send. Windows are
// fixed, not sliding: one starts with the first message after the previous one
// has ended. 0 means no limit.
type Limits struct {
	PerMinute  int64 // messages
	PerHour    int64 // messages
	PerDay     int64 // messages
	Recipients int64 // per day, summed over messages
	Bytes      int64 // per day, of the messages as sent
}

// Unlimited in the [Limits] of a [Sending] means no limit, since 0 means the
// server's default there.
const Unlimited = -1

// Sending holds the sending settings of an inbox or a project. The zero Sending
// means the server's defaults.
type Sending struct {
	Undo   time.Duration // of an inbox: for how long a send can be undone, 0 to [MaxUndo]
	Limits Limits        // 0 means the server's, [Unlimited] none
}

// MaxUndo bounds how long a send can be undone.
const MaxUndo = 2 * time.Minute

// A Quota is one limit and what remains of it.
type Quota struct {
	Name   string        // "inbox-minute", "project-day-recipients", …
	Limit  int64         // of the window
	Left   int64         // 0 or more
	Window time.Duration // its length
	Resets time.Duration // until the window ends
}

// ErrLimit means that an inbox, or its project, has used up a sending limit.
// The error is a [LimitError].
var ErrLimit = errors.New("the sending limit is reached")

// A LimitError says which limit was reached.
type LimitError struct {
	Quota         // the one that is reached
	All   []Quota // every limit that was checked, the reached one last
}

// Error names the limit and when it resets.
func (e *LimitError) Error() string {
	return fmt.Sprintf("%s: %s allows %d in %v and resets in %v", ErrLimit, e.Name, e.Limit, e.Window, e.Resets.Round(time.Second))
}

// Is makes it an [ErrLimit].
func (e *LimitError) Is(target error) bool { return target == ErrLimit }

// Quotas enforces the limits of the inboxes and projects of a server. It is
// safe for concurrent use, also by several processes: the counts are in the
// database.
type Quotas struct {
	db             *store.DB
	dir            *directory.Directory
	keys           *keyring.Ring
	inbox, project Limits // the defaults
}

// New returns the quotas in db. Inbox and project are the default limits.
func New(db *store.DB, dir *directory.Directory, keys *keyring.Ring, inbox, project Limits) *Quotas {
	return &Quotas{db: db, dir: dir, keys: keys, inbox: inbox, project: project}
}

// TakeSend counts one message of b against the limits of the inbox and of its
// project, or returns a [LimitError]. It returns the settings of the inbox and
// what remains of every limit. The counts are part of tx: they are undone if it
// is rolled back. Those of the project stay locked until then, so call it late in tx.
func (q *Quotas) TakeSend(ctx context.Context, tx *store.Tx, b directory.Inbox, recipients, bytes int64) (rule Sending, left []Quota, err error) {
	rules, err := rules(ctx, tx, b.ID, b.Project)
	if err != nil {
		return Sending{}, nil, err
	}
	rule, project := rules[b.ID], rules[b.Project]
	// The inbox's limits come first: a message that they refuse must not use up
	// the project's.
	if left, err = Take(ctx, tx, "inbox", b.ID, rule.Limits.within(q.inbox), recipients, bytes); err != nil {
		return Sending{}, nil, err
	}
	// The attack: new accounts use up what the project itself may send.
	scope, id := "project", b.Project
	if apart, err := directory.IsApart(ctx, tx, b.ID); err != nil {
		return Sending{}, nil, err
	} else if apart {
		scope, id = "signups", b.Project+" signups"
	}
	all, err := Take(ctx, tx, scope, id, project.Limits.within(q.project), recipients, bytes)
	return rule, append(left, all...), err
}

func or(n, otherwise int64) int64 {
	if n == 0 {
		return otherwise
	}
	return n
}

// within returns l with the zero fields taken from d.
func (l Limits) within(d Limits) Limits {
	return Limits{or(l.PerMinute, d.PerMinute), or(l.PerHour, d.PerHour), or(l.PerDay, d.PerDay), or(l.Recipients, d.Recipients), or(l.Bytes, d.Bytes)}
}

// Rule returns the settings stored for a scope, the ID of an inbox or a
// project, or the zero [Sending].
func Rule(ctx context.Context, tx *store.Tx, scope string) (Sending, error) {
	out, err := rules(ctx, tx, scope, scope)
	return out[scope], err
}

// rules returns the settings stored for two scopes, by scope.
func rules(ctx context.Context, tx *store.Tx, scope, other string) (map[string]Sending, error) {
	out := map[string]Sending{}
	_, err := store.List(ctx, tx, func(row func(...any) error) (s Sending, err error) {
		var of string
		var undo int64
		err = row(&of, &undo, &s.Limits.PerMinute, &s.Limits.PerHour, &s.Limits.PerDay, &s.Limits.Recipients, &s.Limits.Bytes)
		s.Undo = time.Duration(undo) * time.Microsecond
		out[of] = s
		return s, err
	}, `select scope, undo, per_minute, per_hour, per_day, recipients, bytes from send_rule where scope in ($1, $2)`, scope, other)
	if err != nil {
		return nil, fmt.Errorf("read limits of %s: %w", scope, err)
	}
	return out, nil
}

// A window is one counting period of a scope, and its limits.
type window struct {
	name    string
	length  time.Duration
	most    int64 // messages
	to      int64 // recipients
	bytes   int64
	counted bool // at least one limit is set
}

// windows returns the windows that have a limit. Scope is the prefix of their
// names: "inbox", "project" or "signups".
func (l Limits) windows(scope string) []window {
	all := []window{
		{scope + "-minute", time.Minute, l.PerMinute, 0, 0, l.PerMinute > 0},
		{scope + "-hour", time.Hour, l.PerHour, 0, 0, l.PerHour > 0},
		{scope + "-day", 24 * time.Hour, l.PerDay, l.Recipients, l.Bytes, l.PerDay > 0 || l.Recipients > 0 || l.Bytes > 0},
	}
	var out []window
	for _, w := range all {
		if w.counted {
			out = append(out, w)
		}
	}
	return out
}

// quotas returns what remains in the window that started at starts, in
// microseconds since 1970, after the given use.
func (w window) quotas(now time.Time, starts, messages, recipients, bytes int64) (out []Quota) {
	resets := max(store.FromTime(starts).Add(w.length).Sub(now), 0)
	for _, q := range []struct {
		suffix      string
		limit, used int64
	}{{"", w.most, messages}, {"-recipients", w.to, recipients}, {"-bytes", w.bytes, bytes}} {
		if q.limit > 0 {
			out = append(out, Quota{Name: w.name + q.suffix, Limit: q.limit, Left: max(q.limit-q.used, 0), Window: w.length, Resets: resets})
		}
	}
	return out
}

// bound returns limit, or for no limit a number that no count reaches. It is
// half of the maximum so that the sum of two does not overflow.
func bound(limit int64) int64 {
	if limit <= 0 {
		return math.MaxInt64 / 2
	}
	return limit
}

// Take counts one message to some recipients, with its size in bytes, against
// the limits of a scope, or returns a [LimitError]. Scope is the prefix of the
// limits' names, id the key of the counts. The check and the count are one
// conditional upsert, so the limits hold exactly under concurrency.
func Take(ctx context.Context, tx *store.Tx, scope, id string, l Limits, recipients, bytes int64) (out []Quota, err error) {
	for _, w := range l.windows(scope) {
		now := time.Now()
		ended := store.Time(now.Add(-w.length))
		if recipients <= bound(w.to) && bytes <= bound(w.bytes) {
			var starts, n, to, size int64
			err := tx.One(ctx, `insert into send_use (scope, seconds, starts, messages, recipients, bytes) values ($1, $2, $3, 1, $4, $5)
				on conflict (scope, seconds) do update set
					starts = case when send_use.starts <= $6 then excluded.starts else send_use.starts end,
					messages = case when send_use.starts <= $6 then 1 else send_use.messages + 1 end,
					recipients = case when send_use.starts <= $6 then excluded.recipients else send_use.recipients + excluded.recipients end,
					bytes = case when send_use.starts <= $6 then excluded.bytes else send_use.bytes + excluded.bytes end
				where send_use.starts <= $6
					or send_use.messages < $7 and send_use.recipients + excluded.recipients <= $8 and send_use.bytes + excluded.bytes <= $9
				returning starts, messages, recipients, bytes`,
				[]any{id, int64(w.length.Seconds()), store.Time(now), recipients, bytes, ended, bound(w.most), bound(w.to), bound(w.bytes)}, &starts, &n, &to, &size)
			if err == nil {
				out = append(out, w.quotas(now, starts, n, to, size)...)
				continue
			}
			if !errors.Is(err, store.ErrNotFound) {
				return nil, fmt.Errorf("count sends of %s: %w", id, err)
			}
		}
		qs, err := w.used(ctx, tx, id, now)
		if err != nil {
			return nil, err
		}
		// The upsert changed no row, so some limit is reached. Find which one,
		// for the error.
		reached := qs[0]
		for _, q := range qs {
			need := int64(1)
			switch q.Name {
			case w.name + "-recipients":
				need = recipients
			case w.name + "-bytes":
				need = bytes
			}
			if q.Left < need {
				reached = q
				break
			}
		}
		return nil, &LimitError{Quota: reached, All: append(append(out, qs...), reached)}
	}
	return out, nil
}

// used returns the quotas of a window as of now. A window that has ended counts
// as unused.
func (w window) used(ctx context.Context, tx *store.Tx, id string, now time.Time) ([]Quota, error) {
	var starts, n, to, size int64
	err := tx.One(ctx, `select starts, messages, recipients, bytes from send_use where scope = $1 and seconds = $2`, []any{id, int64(w.length.Seconds())}, &starts, &n, &to, &size)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return nil, fmt.Errorf("read sends of %s: %w", id, err)
	}
	if !store.FromTime(starts).Add(w.length).After(now) {
		starts, n, to, size = store.Time(now), 0, 0, 0
	}
	return w.quotas(now, starts, n, to, size), nil
}

// Sends returns the effective sending settings of an inbox, or of the project
// if inbox is empty, and what remains of its limits. Managers may read both; a
// credential of an inbox may read those of the inbox.
func (q *Quotas) Sends(ctx context.Context, who auth.Principal, inbox string) (s Sending, left []Quota, err error) {
	scope, id, defaults, err := q.scope(ctx, who, inbox, false)
	if err != nil {
		return Sending{}, nil, err
	}
	now := time.Now()
	err = q.db.View(ctx, func(tx *store.Tx) error {
		if s, err = Rule(ctx, tx, id); err != nil {
			return err
		}
		s.Limits = s.Limits.within(defaults)
		for _, w := range s.Limits.windows(scope) {
			qs, err := w.used(ctx, tx, id, now)
			if err != nil {
				return err
			}
			left = append(left, qs...)
		}
		return nil
	})
	return s, left, err
}

// scope resolves and authorizes: it returns the kind of scope ("inbox" or
// "project"), its ID and its default limits. An empty inbox means the project.
// Change is set for writes, which only managers may do.
func (q *Quotas) scope(ctx context.Context, who auth.Principal, inbox string, change bool) (scope, id string, defaults Limits, err error) {
	switch {
	case directory.MayManage(who) == nil && inbox == "":
		return "project", who.Project, q.project, nil
	case directory.MayManage(who) == nil && !directory.ValidName(inbox):
		return "", "", Limits{}, directory.ErrNoInbox
	case directory.MayManage(who) == nil:
		b, err := q.dir.Find(ctx, who, inbox)
		return "inbox", b.ID, q.inbox, err
	case change || inbox == "":
		return "", "", Limits{}, directory.MayManage(who)
	}
	b, _, err := q.keys.Reach(ctx, who, inbox)
	return "inbox", b.ID, q.inbox, err
}

// SetSending sets how an inbox sends, or how the project does if inbox is
// empty. Only managers may: an inbox must not raise its own limits.
func (q *Quotas) SetSending(ctx context.Context, who auth.Principal, inbox string, s Sending) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	scope, id, _, err := q.scope(ctx, who, inbox, true)
	if err != nil {
		return err
	}
	if s.Undo < 0 || s.Undo > MaxUndo || scope == "project" && s.Undo != 0 {
		return fmt.Errorf("%w: undo_seconds: must be 0 to %v, and 0 for a project", directory.ErrInvalid, MaxUndo.Seconds())
	}
	for _, l := range []struct {
		field string
		n     int64
	}{
		{"per_minute", s.Limits.PerMinute},
		{"per_hour", s.Limits.PerHour},
		{"per_day", s.Limits.PerDay},
		{"recipients_per_day", s.Limits.Recipients},
		{"bytes_per_day", s.Limits.Bytes},
	} {
		if l.n < Unlimited || l.n > 1<<50 {
			return fmt.Errorf("%w: %s: must be 1 to 2^50, 0 for the server's default, or -1 for no limit", directory.ErrInvalid, l.field)
		}
	}
	return q.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `insert into send_rule (scope, undo, per_minute, per_hour, per_day, recipients, bytes) values ($1, $2, $3, $4, $5, $6, $7)
			on conflict (scope) do update set undo = excluded.undo, per_minute = excluded.per_minute, per_hour = excluded.per_hour,
				per_day = excluded.per_day, recipients = excluded.recipients, bytes = excluded.bytes`,
			id, s.Undo.Microseconds(), s.Limits.PerMinute, s.Limits.PerHour, s.Limits.PerDay, s.Limits.Recipients, s.Limits.Bytes)
		if err != nil {
			return fmt.Errorf("set limits of %s: %w", id, err)
		}
		l := s.Limits
		verb := audit.InboxSending
		if scope == "project" {
			verb = audit.ProjectSending
		}
		return audit.Append(ctx, tx, who, verb, id, audit.Fields{
			"undo": s.Undo.String(), "limits": fmt.Sprintf("minute %d, hour %d, day %d, recipients %d, bytes %d", l.PerMinute, l.PerHour, l.PerDay, l.Recipients, l.Bytes),
		})
	})
}
