package mailbox

import (
	"context"
	"fmt"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// A Demotion sets when an inbox that sends without approval is put back into
// gated_send: because of bounces, complaints or rejections since its mode last
// changed. An owner may raise it again; earlier results do not count then.
type Demotion struct {
	Window     time.Duration // period that the rates are computed over; 0 means a day
	Bounces    int           // recipients that bounced in it; 0 means 5, below 0 never
	Bounced    float64       // and that were more than this share of all; 0 means 0.1
	Complaints int           // readers that complained in it; 0 means 2, below 0 never
	Complained float64       // and that were more than this share of all; 0 means 0.003
	Denials    int           // of what it proposed to send, by people, in a row; 0 means 3, below 0 never
}

func (d *Demotion) fill() {
	if d.Window <= 0 {
		d.Window = 24 * time.Hour
	}
	for _, n := range []struct {
		field *int
		to    int
	}{{&d.Bounces, 5}, {&d.Complaints, 2}, {&d.Denials, 3}} {
		if *n.field == 0 {
			*n.field = n.to
		}
	}
	if d.Bounced <= 0 {
		d.Bounced = 0.1
	}
	if d.Complained <= 0 {
		d.Complained = 0.003
	}
}

// demoter is the system principal that changes modes by rule.
func demoter(project string) auth.Principal {
	return auth.Principal{Kind: auth.System, ID: "demotion", Project: project}
}

// demote puts an inbox into a stricter mode. An inbox in that mode, or a
// stricter one, is not changed.
func (m *PostOffice) demote(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, to policy.Mode, why string) error {
	if !b.Mode.Looser(to) {
		return nil
	}
	_, err := m.change(ctx, tx, who, b, to, audit.InboxDemote, why, "")
	return err
}

// demoteBad demotes an inbox with too many bounces or complaints. B may be
// stale.
func (m *PostOffice) demoteBad(ctx context.Context, tx *store.Tx, b directory.Inbox, now time.Time) error {
	if !b.Mode.Looser(policy.GatedSend) {
		return nil
	}
	b, err := directory.LookupStored(ctx, tx, b.ID)
	if err != nil || !b.Mode.Looser(policy.GatedSend) || !b.Deleted.IsZero() {
		return err
	}
	d := &m.cfg.Demotion
	since := max(store.Time(now.Add(-d.Window)), store.Time(b.ModeAt))
	var sent, bounced, complained int
	err = tx.One(ctx, `select count(*), coalesce(sum(case when state = 'bounced' then 1 else 0 end), 0), coalesce(sum(case when complained_at > 0 then 1 else 0 end), 0)
		from delivery where inbox_id = $1 and settled_at > $2 and state in ('delivered', 'bounced')`, []any{b.ID, since}, &sent, &bounced, &complained)
	if err != nil {
		return fmt.Errorf("count bounces: %w", err)
	}
	switch {
	case d.Bounces > 0 && bounced >= d.Bounces && float64(bounced) > d.Bounced*float64(sent):
		return m.demote(ctx, tx, demoter(b.Project), b, policy.GatedSend, fmt.Sprintf("%d of %d recipients bounced", bounced, sent))
	case d.Complaints > 0 && complained >= d.Complaints && float64(complained) > d.Complained*float64(sent):
		return m.demote(ctx, tx, demoter(b.Project), b, policy.GatedSend, fmt.Sprintf("%d of %d recipients complained", complained, sent))
	}
	return nil
}

// demoteDenied demotes an inbox after too many of its proposals in a row were
// rejected.
func (m *PostOffice) demoteDenied(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	most := m.cfg.Demotion.Denials
	if _, ok := decided(a); !ok || a.State != oversight.Denied || a.Kind != SendKind || most < 0 {
		return nil
	}
	b, err := directory.LookupStored(ctx, tx, a.Inbox)
	if err != nil || !b.Mode.Looser(policy.GatedSend) || !b.Deleted.IsZero() {
		return err
	}
	var since int64 // of the last approval by a person
	err = tx.One(ctx, `select coalesce(max(decided_at), 0) from action where inbox_id = $1 and kind = $2 and state <> 'denied' and substr(decider, 1, 7) = 'person:'`,
		[]any{b.ID, SendKind}, &since)
	if err != nil {
		return fmt.Errorf("count denials: %w", err)
	}
	var n int
	err = tx.One(ctx, `select count(*) from action where inbox_id = $1 and kind = $2 and state = 'denied' and substr(decider, 1, 7) = 'person:' and decided_at > $3`,
		[]any{b.ID, SendKind, max(since, store.Time(b.ModeAt))}, &n)
	if err != nil {
		return fmt.Errorf("count denials: %w", err)
	}
	if n < most {
		return nil
	}
	return m.demote(ctx, tx, demoter(b.Project), b, policy.GatedSend, fmt.Sprintf("people rejected %d of its proposals in a row", n))
}

// Stopped implements [oversight.Stopper]. A stopped inbox is put into
// read_only, and the inboxes of a stopped project into gated_send. So after the
// switch is turned off, nothing sends without approval until an owner raises
// the mode.
func (x sendExecutor) Stopped(ctx context.Context, tx *store.Tx, who auth.Principal, s oversight.Switch) error {
	to, where, args := policy.GatedSend, `project_id = $1`, []any{s.Project}
	switch s.Scope {
	case oversight.ScopeInbox:
		to, where, args = policy.ReadOnly, `project_id = $1 and id = $2`, append(args, s.Target)
	case oversight.ScopeProject:
	case oversight.ScopeEverything:
		where, args = `project_id <> $1`, []any{""}
	case oversight.ScopeCapability, oversight.ScopeDomain:
		return nil
	}
	list, err := directory.List(ctx, tx, where+` and deleted_at = 0`, args...)
	if err != nil {
		return err
	}
	for _, b := range list {
		who.Project = b.Project // the audit entry belongs to the project of the inbox
		if err := x.m.demote(ctx, tx, who, b, to, s.String()); err != nil {
			return err
		}
	}
	return nil
}
