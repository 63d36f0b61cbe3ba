package mailbox

import (
	"context"
	"time"

	"postern/internal/auth"
	"postern/internal/delivery"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/mail"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/store"
)

// A sendExecutor executes actions of kind [SendKind] and follows their state.
// The delivery itself is in package delivery.
type sendExecutor struct{ m *PostOffice }

var (
	_ oversight.Executor  = sendExecutor{}
	_ oversight.Finisher  = sendExecutor{}
	_ oversight.Recoverer = sendExecutor{}
	_ oversight.Parter    = sendExecutor{}
	_ oversight.Watcher   = sendExecutor{}
	_ oversight.Refresher = sendExecutor{}
	_ oversight.Opener    = sendExecutor{}
	_ oversight.Stopper   = sendExecutor{}
	_ oversight.Teller    = sendExecutor{}
	_ oversight.Finder    = sendExecutor{}
	_ oversight.Allower   = sendExecutor{}
)

// Execute implements [oversight.Executor].
func (x sendExecutor) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	if ByRequest(a.Payload) {
		return x.m.permitRequest(ctx, a)
	}
	return x.m.Delivery.Execute(ctx, a)
}

// Finish implements [oversight.Finisher].
func (x sendExecutor) Finish(ctx context.Context, tx *store.Tx, a oversight.Action, o oversight.Outcome) error {
	if ByRequest(a.Payload) {
		return nil // the copy is kept when the request is made
	}
	return x.m.Delivery.Finish(ctx, tx, a, o)
}

// Interrupted implements [oversight.Recoverer].
func (x sendExecutor) Interrupted(ctx context.Context, tx *store.Tx, a oversight.Action) (oversight.Outcome, error) {
	return x.m.Delivery.Interrupted(ctx, tx, a)
}

// PartsOf implements [oversight.Parter].
func (x sendExecutor) PartsOf(ctx context.Context, tx *store.Tx, a oversight.Action) ([]oversight.Part, error) {
	return x.m.Delivery.PartsOf(ctx, tx, a)
}

// Moved implements [oversight.Watcher]: it updates the deliveries, demotes an
// inbox after too many rejections, and announces the decision.
func (x sendExecutor) Moved(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	if err := x.m.Delivery.Moved(ctx, tx, a); err != nil {
		return err
	}
	if err := x.m.demoteDenied(ctx, tx, a); err != nil {
		return err
	}
	if err := x.m.learn(ctx, tx, a); err != nil {
		return err
	}
	return x.m.announceMove(ctx, tx, a)
}

// A sentBox is the [delivery.Mailbox] of a [PostOffice].
type sentBox struct{ m *PostOffice }

var _ delivery.Mailbox = sentBox{}

// Announce implements [delivery.Mailbox].
func (x sentBox) Announce(ctx context.Context, tx *store.Tx, b directory.Inbox, t event.Type, objects ...string) error {
	return x.m.announce(ctx, tx, b, t, objects...)
}

// KeepSent implements [delivery.Mailbox].
func (x sentBox) KeepSent(ctx context.Context, tx *store.Tx, b directory.Inbox, raw []byte) (string, error) {
	id, err := x.m.shownSent(ctx, tx, b, raw)
	if err != nil || id != "" {
		return id, err
	}
	if id, err = x.m.put(ctx, tx, b, message.Out, raw); err != nil {
		return "", err
	}
	return id, x.m.noteSent(ctx, tx, b, id, raw)
}

// KeepReceived implements [delivery.Mailbox].
func (x sentBox) KeepReceived(ctx context.Context, tx *store.Tx, b directory.Inbox, raw []byte) (string, error) {
	return x.m.put(ctx, tx, b, message.In, raw)
}

// CountSent implements [delivery.Mailbox].
func (x sentBox) CountSent(ctx context.Context, tx *store.Tx, inbox, address string, n int64) error {
	return x.m.exchanged(ctx, tx, inbox, address, n, 0)
}

// EnsureCopy implements [delivery.Mailbox].
func (x sentBox) EnsureCopy(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope) error {
	return x.m.ensureCopy(ctx, a, b, env)
}

// Judge implements [delivery.Mailbox].
func (x sentBox) Judge(ctx context.Context, tx *store.Tx, b directory.Inbox, now time.Time) error {
	return x.m.demoteBad(ctx, tx, b, now)
}

// unqueue deletes the deliveries of an action whose message was replaced, and
// lets its overseers' copy be created again.
func (m *PostOffice) unqueue(ctx context.Context, tx *store.Tx, action string) error {
	if err := recopy(ctx, tx, action); err != nil {
		return err
	}
	return m.Delivery.Unqueue(ctx, tx, action)
}

// Deliveries returns the delivery state of each recipient of an action that who
// may see. There are none before the first attempt.
func (m *PostOffice) Deliveries(ctx context.Context, who auth.Principal, action string) ([]delivery.Delivery, error) {
	who, err := m.As(ctx, who, action)
	if err != nil {
		return nil, err
	}
	return m.Delivery.Deliveries(ctx, who, action)
}
