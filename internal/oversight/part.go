package oversight

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"postern/internal/store"
)

// A Part is a part of an action's effect that is carried out and recorded separately:
// one recipient of a message. Executors whose effects have parts follow these rules,
// which the search in model_test.go covers together with those of life.go:
//
//	queued ──── sending ──┬─ delivered
//	  │ ↑           ↑     ├─ bounced     refused, or given up
//	  │ └─ deferred ┘ ←───┤
//	  │                   └─ uncertain   not known, so a person is asked
//	  ├─ suppressed   it must not be sent
//	  └─ cancelled    its action ended before it
//
// The intent (sending) must be durable, in a transaction that calls [Gate.Begin],
// before the effect; and the result before the next step of this part.
type Part struct {
	State    PartState
	Asked    bool  // a person is asked what became of it
	Attempts int64 // that have begun
}

// A PartState is where a [Part] is.
type PartState string

// The states of a part.
const (
	PartQueued     PartState = "queued"
	PartSending    PartState = "sending"
	PartDelivered  PartState = "delivered"
	PartDeferred   PartState = "deferred"
	PartBounced    PartState = "bounced"
	PartSuppressed PartState = "suppressed"
	PartUncertain  PartState = "uncertain"
	PartCancelled  PartState = "cancelled"
)

// Open reports whether p is still to be done, and no person is asked first.
func (p Part) Open() bool { return p.State == PartQueued || p.State == PartDeferred }

// Begin returns p as its effect is about to begin. It returns [ErrStale] if p has
// begun already, or has ended.
func (p Part) Begin() (Part, error) {
	if !p.Open() {
		return p, fmt.Errorf("it is %s: %w", p.State, ErrStale)
	}
	p.State, p.Attempts = PartSending, p.Attempts+1
	return p, nil
}

// End returns p after the attempt with this number, and whether that must be stored.
// The result of an old attempt is ignored unless it was delivered: this program may
// have been suspended, and another has tried it since. Its result must not be
// overwritten, or the recipient gets the message again.
func (p Part) End(attempt int64, to PartState) (Part, bool) {
	if p.Attempts != attempt || p.State != PartSending && to != PartDelivered {
		return p, false
	}
	p.State, p.Asked = to, false
	return p, true
}

// Interrupted returns p when its program stopped in the middle of an attempt.
func (p Part) Interrupted() Part {
	if p.State == PartSending {
		p.State = PartUncertain
	}
	return p
}

// Follow returns p after a person or the gate has moved its action to s.
func (p Part) Follow(s State) Part {
	switch s {
	case Unknown:
		if p.State == PartUncertain || p.State == PartSending {
			p.State, p.Asked = PartUncertain, true
		}
	case Approved: // a person said that it did not arrive
		if p.Asked {
			p.State, p.Asked = PartQueued, false
		}
	case Done:
		if p.Asked {
			p.State, p.Asked = PartDelivered, false
		}
	case Failed:
		if p.Asked {
			p.State, p.Asked = PartBounced, false
		}
		// If a switch or a rule stopped the action, some parts had not begun.
		if p.Open() {
			p.State = PartCancelled
		}
	case Denied, Cancelled:
		if p.Open() {
			p.State = PartCancelled
		}
	case Scheduled, Pending, Executing:
	}
	return p
}

// Sum returns the state of an [Outcome] with these parts.
func Sum(parts []Part) State {
	open, unsure, delivered := false, false, true
	for _, p := range parts {
		open = open || p.Open()
		unsure = unsure || p.State == PartUncertain || p.State == PartSending
		delivered = delivered && p.State == PartDelivered
	}
	switch {
	case open:
		return Approved
	case unsure:
		return Unknown
	case delivered:
		return Done
	}
	return Failed
}

// A Parter is an [Executor] whose effect has parts. When the gate puts an action back
// for a retry, it keeps the states of the parts in the action's sealed row. The
// attack: an old row of a part is put back, so that its recipient gets it twice.
type Parter interface {
	// PartsOf returns the parts of an action, always in the same order, as part of tx;
	// none before its first execution.
	PartsOf(ctx context.Context, tx *store.Tx, a Action) ([]Part, error)
}

// parts returns the states of a's parts as "attempts:open" for each, such as
// "1:0 2:1"; empty if it has none.
func (g *Gate) parts(ctx context.Context, tx *store.Tx, a *Action) (string, error) {
	x, ok := g.exec[a.Kind].(Parter)
	if !ok {
		return "", nil
	}
	list, err := x.PartsOf(ctx, tx, *a)
	if err != nil {
		return "", fmt.Errorf("read parts of action %s: %w", a.ID, err)
	}
	words := make([]string, len(list))
	for i, p := range list {
		words[i] = strconv.FormatInt(p.Attempts, 10) + ":" + strconv.Itoa(store.Flag(p.Open()))
	}
	return strings.Join(words, " "), nil
}

// goOn reports whether the states now can follow the states then: no closed part is
// open again, and none has begun less often.
func goOn(then, now string) bool {
	if then == "" {
		return true
	}
	was, is := strings.Fields(then), strings.Fields(now)
	if len(was) != len(is) {
		return false
	}
	for i := range was {
		before, shut, _ := strings.Cut(was[i], ":")
		after, open, _ := strings.Cut(is[i], ":")
		b, err1 := strconv.ParseInt(before, 10, 64)
		a, err2 := strconv.ParseInt(after, 10, 64)
		if err1 != nil || err2 != nil || a < b || shut == "0" && open == "1" {
			return false
		}
	}
	return true
}

// noteParts stores the states of a's parts in its row, as part of tx, which has just
// put it back for a retry.
func (g *Gate) noteParts(ctx context.Context, tx *store.Tx, a *Action) error {
	now, err := g.parts(ctx, tx, a)
	if err != nil || now == a.parts {
		return err
	}
	if _, err := tx.ExecContext(ctx, `update action set parts = $1 where id = $2`, now, a.ID); err != nil {
		return fmt.Errorf("note parts of action %s: %w", a.ID, err)
	}
	a.parts = now
	return g.seal(ctx, tx, a)
}

// BeginPart makes this program remember, once tx is committed, how often part n of an
// action has begun.
func (g *Gate) BeginPart(tx *store.Tx, action string, n int, attempts int64) {
	g.memory.Remember(tx, partOf(action, n), attempts)
}

// PartBegun returns how often part n has begun, as far as this program remembers: at
// least as often as a row of it says that tx has read, unless that was put back. Parts
// begin in the turn [store.All].
func (g *Gate) PartBegun(tx *store.Tx, action string, n int) int64 {
	attempts, _ := g.memory.Newest(tx, store.All(), partOf(action, n))
	return attempts
}

// partOf returns the name of a part in the gate's memory.
func partOf(action string, n int) string { return action + " " + strconv.Itoa(n) }
