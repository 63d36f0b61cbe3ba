package oversight

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"postern/internal/store"
)

// A Teller is an [Executor] that notifies agents of what people did besides
// deciding, so that agents need not poll. Its methods are called in the transaction
// of the change that they report; their error undoes it.
type Teller interface {
	// Switched reports that s was turned on or off. It is called once for each
	// Teller, whatever s stops.
	Switched(ctx context.Context, tx *store.Tx, s Switch, on bool) error
	// Commented reports the comment r on a, which its proposer may read.
	Commented(ctx context.Context, tx *store.Tx, a Action, r Remark) error
}

// switched reports a switch to each Teller.
func (g *Gate) switched(ctx context.Context, tx *store.Tx, s Switch, on bool) error {
	done := map[Teller]bool{} // one executor may serve several kinds
	for _, kind := range slices.Sorted(maps.Keys(g.exec)) {
		e := g.exec[kind]
		if t, ok := e.(Teller); ok && !done[t] {
			done[t] = true
			if err := t.Switched(ctx, tx, s, on); err != nil {
				return fmt.Errorf("report switch %s: %w", s.ID, err)
			}
		}
	}
	return nil
}

// commented reports r to the proposer of a, if it is for them.
func (g *Gate) commented(ctx context.Context, tx *store.Tx, a Action, r Remark) error {
	t, ok := g.exec[a.Kind].(Teller)
	if !ok || !r.Agent {
		return nil
	}
	a.Payload = nil
	if err := t.Commented(ctx, tx, a, r); err != nil {
		return fmt.Errorf("report comment on %s: %w", a.ID, err)
	}
	return nil
}
