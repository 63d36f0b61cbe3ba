package oversight

import (
	"context"
	"fmt"
	"time"

	"postern/internal/store"
)

const (
	// soonest and latest are how long what the database kept from its effect waits
	// until it is tried again, at first and at the most.
	soonest = 5 * time.Second
	latest  = 5 * time.Minute
	// maxTries is how many times that is tried before it is given up: for about
	// half an hour. Who proposed it, and who approved it, then know that it is not
	// so; until then nobody could take it back.
	maxTries = 12
)

// Later returns how long a, whose effect is on this program's own database and
// could not be written, waits until it is tried again: longer each time.
func (a *Action) Later() time.Duration {
	d := soonest
	for range a.Attempts - 1 {
		if d *= 2; d >= latest {
			return latest
		}
	}
	return d
}

// Again returns the outcome of an execution of a whose effect is on this
// program's own database and could not be written: it is tried again, later and
// later, and after some tries it is given up, if r, asked as after a crash, knows
// of no effect. Nothing says in words that there was none.
func Again(ctx context.Context, db *store.DB, r Recoverer, a Action, nothing string) Outcome {
	o := Outcome{State: Approved, Detail: nothing + ": the server's records could not be written; it is tried again", After: a.Later()}
	if a.Attempts < maxTries {
		return o
	}
	// In its turn: what was being committed when the connection was lost is there, or is not.
	err := db.Update(ctx, func(tx *store.Tx) error {
		left, err := r.Interrupted(ctx, tx, a)
		switch {
		case err != nil:
			return err
		case left.State == Approved:
			o = Outcome{State: Failed, Detail: fmt.Sprintf("%s: the server's records could not be written in %d tries, and it is given up: propose it again", nothing, a.Attempts)}
		default:
			o = left
		}
		return nil
	})
	if err != nil { // whether it is there cannot be told yet
		return Outcome{State: Approved, Detail: nothing + " that can be told: the server's records cannot be read; it is tried again", After: a.Later()}
	}
	return o
}
