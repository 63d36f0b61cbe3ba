package mailbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// The overseers of a monitored inbox get a copy of everything that it sends.
// The copy is an action of its own, of kind [CopyKind]. It is durable before
// the original is sent, and it is delivered, retried and recorded like other
// mail. A unique row limits it to one per action. A copy causes no further
// copies and counts for no reputation. It belongs to no inbox, so that no agent
// can see or cancel it.

// CopyKind is the kind of actions that deliver copies to overseers.
const CopyKind = policy.KindCopy

var errNoCopy = errors.New("the overseers' copy may not leave")

// ensureCopy creates the copy of a message that b is about to send, if one is
// required and does not exist.
func (m *PostOffice) ensureCopy(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope) error {
	if a.Kind != SendKind || b.Mode != policy.Monitored && a.Request.Mode != policy.Monitored {
		return nil
	}
	var made int
	var to []string
	err := m.db.View(ctx, func(tx *store.Tx) (err error) {
		if err := tx.One(ctx, `select count(*) from sent_copy where action_id = $1`, []any{a.ID}, &made); err != nil {
			return err
		}
		to, err = overseers(ctx, tx, b)
		return err
	})
	if err != nil || made > 0 || len(to) == 0 { // no overseers: then a person has approved it
		return err
	}
	from := b.Address
	if b.Connected { // this server has no right to write as its address
		from = "mailer-daemon@" + m.cfg.Domain
	}
	now := time.Now()
	c, err := mail.ComposeCopy(mail.Copy{Inbox: b.Address, From: from, To: to, Action: a.ID, Original: env, At: now}, now)
	if err != nil {
		return fmt.Errorf("compose copy: %w", err)
	}
	payload, err := c.Payload()
	if err != nil {
		return fmt.Errorf("compose copy: %w", err)
	}
	return m.db.Update(ctx, func(tx *store.Tx) error {
		fresh, err := tx.Changed(ctx, `insert into sent_copy (action_id, copy_id, inbox_id, at) values ($1, '', $2, $3) on conflict do nothing`, a.ID, b.ID, store.Time(now))
		if err != nil || !fresh { // another process has just created it
			return err
		}
		who := auth.Principal{Kind: auth.System, ID: "copies", Project: b.Project}
		made, err := m.gate.Propose(ctx, tx, who, oversight.Proposal{
			Request: policy.Request{Kind: CopyKind, Mode: b.Mode, Inbox: b.Address, Via: "copy", To: lowered(c.To), Size: int64(len(c.Raw)), Detail: map[string]string{"of": a.ID}},
			Via:     "copy", Payload: payload,
		})
		if err != nil {
			return err
		}
		if made.State != oversight.Approved {
			return errNoCopy // rolled back: the original waits, and the copy is created with it later
		}
		_, err = tx.ExecContext(ctx, `update sent_copy set copy_id = $1 where action_id = $2`, made.ID, a.ID)
		return err
	})
}

// recopy lets a revised action create a new copy. The attack: an agent has a
// harmless message copied, delays it, and revises it into another one, which
// would leave without a copy. The first copy is still delivered: it shows what
// was about to leave.
func recopy(ctx context.Context, tx *store.Tx, action string) error {
	_, err := tx.ExecContext(ctx, `update sent_copy set action_id = copy_id where action_id = $1 and copy_id <> ''`, action)
	if err != nil {
		return fmt.Errorf("forget copy of %s: %w", action, err)
	}
	return nil
}

// A copyExecutor delivers copies.
type copyExecutor struct{ m *PostOffice }

var (
	_ oversight.Executor  = copyExecutor{}
	_ oversight.Recoverer = copyExecutor{}
	_ oversight.Watcher   = copyExecutor{}
	_ oversight.Parter    = copyExecutor{}
)

// Execute implements [oversight.Executor].
func (x copyExecutor) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	b, err := x.of(ctx, a)
	if err != nil {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was sent: the original of this copy is unknown"}
	}
	a.Inbox = b // the sender of the copy
	return x.m.Delivery.Execute(ctx, a)
}

// of returns the inbox that a is a copy for.
func (x copyExecutor) of(ctx context.Context, a oversight.Action) (inbox string, err error) {
	err = x.m.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select inbox_id from sent_copy where copy_id = $1`, []any{a.ID}, &inbox)
	})
	return inbox, err
}

// Interrupted implements [oversight.Recoverer].
func (x copyExecutor) Interrupted(ctx context.Context, tx *store.Tx, a oversight.Action) (oversight.Outcome, error) {
	return x.m.Delivery.Interrupted(ctx, tx, a)
}

// PartsOf implements [oversight.Parter].
func (x copyExecutor) PartsOf(ctx context.Context, tx *store.Tx, a oversight.Action) ([]oversight.Part, error) {
	return x.m.Delivery.PartsOf(ctx, tx, a)
}

// Moved implements [oversight.Watcher]. If a copy cannot be delivered, nobody
// monitors the inbox: it is demoted, and its mail waits for approval again.
func (x copyExecutor) Moved(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	if err := x.m.Delivery.Moved(ctx, tx, a); err != nil || a.State != oversight.Failed {
		return err
	}
	var id string
	err := tx.One(ctx, `select inbox_id from sent_copy where copy_id = $1`, []any{a.ID}, &id)
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find inbox of copy %s: %w", a.ID, err)
	}
	b, err := directory.Lookup(ctx, tx, id)
	if errors.Is(err, directory.ErrNoInbox) {
		return nil
	}
	if err != nil || b.Mode != policy.Monitored {
		return err
	}
	return x.m.demote(ctx, tx, demoter(b.Project), b, policy.GatedSend, "an overseers' copy could not be delivered")
}

// Show implements [oversight.Executor].
func (x copyExecutor) Show(a oversight.Action) (oversight.View, error) {
	return sendExecutor(x).Show(a)
}
