package oversight

import (
	"context"
	"fmt"
	"strings"

	"postern/internal/auth"
	"postern/internal/store"
)

// A Teller is an [Executor] that tells agents what people did beside deciding,
// so that an agent need not ask. Its methods are called in the transaction of
// what they tell of; their error undoes it.
type Teller interface {
	// Switched tells that s was turned on or off. It is called once for each
	// teller, whatever it stops.
	Switched(ctx context.Context, tx *store.Tx, s Switch, on bool) error
	// Commented tells that r, which its proposer may read, was said about a.
	Commented(ctx context.Context, tx *store.Tx, a Action, r Remark) error
}

// switched tells of a switch.
func (g *Gate) switched(ctx context.Context, tx *store.Tx, s Switch, on bool) error {
	told := map[Teller]bool{}
	for _, e := range g.exec {
		if t, ok := e.(Teller); ok && !told[t] {
			told[t] = true
			if err := t.Switched(ctx, tx, s, on); err != nil {
				return fmt.Errorf("tell of switch %s: %w", s.ID, err)
			}
		}
	}
	return nil
}

// commented tells who proposed a of a comment that is for them.
func (g *Gate) commented(ctx context.Context, tx *store.Tx, a Action, r Remark) error {
	t, ok := g.exec[a.Kind].(Teller)
	if !ok || !r.Agent {
		return nil
	}
	a.Payload = nil
	if err := t.Commented(ctx, tx, a, r); err != nil {
		return fmt.Errorf("tell of comment on %s: %w", a.ID, err)
	}
	return nil
}

// Person returns the name of the person who decided on a, and whether one did: a
// rule, the gate or a switch is none.
func (a *Action) Person() (name string, ok bool) {
	name, ok = strings.CutPrefix(a.Decider, string(auth.Person)+":")
	return name, ok && name != ""
}

// Told returns a's result as who proposed it reads it: which person found out
// what became of it is between the reviewers.
func (a *Action) Told() string {
	if _, said, ok := strings.Cut(a.Result, says); ok && strings.HasPrefix(a.Result, string(auth.Person)+":") {
		return "a person" + says + said
	}
	return a.Result
}

// says stands in a result between a person and what they found out.
const says = " says: "

// lapsed begins the reason of what is denied because its time to decide ended.
const lapsed = "nobody decided until "

// Lapsed reports whether a was denied because nobody decided in time.
func (a *Action) Lapsed() bool {
	return a.State == Denied && a.Decider == system(*a).String() && strings.HasPrefix(a.Reason, lapsed)
}
