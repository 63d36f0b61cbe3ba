package oversight

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"postern/internal/store"
)

// A Part is a part of an action's effect that is carried out and recorded by
// itself: one recipient of a message. What an executor with several of them
// writes down follows these rules, which are searched with those of life.go:
//
//	queued ──── sending ──┬─ delivered
//	  │ ↑           ↑     ├─ bounced     refused, or given up
//	  │ └─ deferred ┘ ←───┤
//	  │                   └─ uncertain   nobody can tell, so a person is asked
//	  ├─ suppressed   it must not be sent
//	  └─ cancelled    its action ended before it
//
// The intent (sending) is durable, in a transaction that calls [Gate.Begin],
// before the effect, and the result before anything else of this part.
type Part struct {
	State    PartState
	Asked    bool  // a person is asked what became of it
	Attempts int64 // begun
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

// Open reports whether there is still something to do for p without a person.
func (p Part) Open() bool { return p.State == PartQueued || p.State == PartDeferred }

// Begin returns p when its effect is about to begin, or [ErrStale] if somebody
// else has begun, or ended, it.
func (p Part) Begin() (Part, error) {
	if !p.Open() {
		return p, fmt.Errorf("it is %s: %w", p.State, ErrStale)
	}
	p.State, p.Attempts = PartSending, p.Attempts+1
	return p, nil
}

// End returns p when its attempt with this number brought it to a state, and
// whether that is to be written down. The attack on doing so in any case: this
// program stood still, was taken for dead, and another has sent it since. Its
// word stays, or the recipient is written to once more; but what was delivered
// was delivered.
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

// Follow returns p when a person or the gate has moved its action to s.
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
		// Where a switch, or a rule, stopped it in its middle some had not begun.
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

// Sum returns the state of an outcome whose parts are as these.
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

// A Parter is an [Executor] whose effect has parts. When the gate puts an action
// back to be tried again, it keeps the state of the parts in the action's sealed
// row. So it notices if an old row of a part is put back.
type Parter interface {
	// PartsOf returns the parts of an action in their order, as part of tx; none
	// before its first execution.
	PartsOf(ctx context.Context, tx *store.Tx, a Action) ([]Part, error)
}

// parts returns the state of a's parts: how often each was begun, and whether it
// is open.
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

// goOn reports whether the state now of the parts may follow the state then: none
// is open again, and none was begun less often.
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

// noteParts stores the state of a's parts in its row, as part of tx, which has
// just put it back to be tried again.
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

// BeginPart makes this program remember, once tx is committed, how often a part
// of an action was begun.
func (g *Gate) BeginPart(tx *store.Tx, action string, n int, attempts int64) {
	tx.AfterCommit(func() { g.memory.moved(action+" "+strconv.Itoa(n), attempts) })
}

// PartBegun returns how often this program remembers to have begun a part.
func (g *Gate) PartBegun(action string, n int) int64 {
	attempts, _ := g.memory.version(action + " " + strconv.Itoa(n))
	return attempts
}
