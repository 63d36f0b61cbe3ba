package oversight

import "fmt"

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

// Left returns p when its program stopped in its middle.
func (p Part) Left() Part {
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
