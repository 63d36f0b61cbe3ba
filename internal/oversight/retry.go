package oversight

import (
	"context"
	"fmt"
	"time"

	"postern/internal/store"
)

const (
	// minRetry and maxRetry bound how long an action waits whose effect on this
	// program's own database could not be written, until it is tried again.
	minRetry = 5 * time.Second
	maxRetry = 5 * time.Minute
	// maxTries is how many times it is tried before it is given up: for about half
	// an hour. Until then nobody could cancel it, and whoever approved it believes
	// that it happened.
	maxTries = 12
)

// RetryAfter returns how long a, whose effect is on this program's own database
// and could not be written, waits until it is tried again: twice as long each time.
func (a *Action) RetryAfter() time.Duration {
	d := minRetry
	for range a.Attempts - 1 {
		if d *= 2; d >= maxRetry {
			return maxRetry
		}
	}
	return d
}

// Retry returns the outcome of an execution of a whose effect is on this program's
// own database and could not be written: it is tried again, and given up after
// maxTries unless r, asked as after a crash, finds the effect. Nothing is the detail
// text for "no effect", such as "the policy is unchanged".
func Retry(ctx context.Context, db *store.DB, r Recoverer, a Action, nothing string) Outcome {
	o := Outcome{State: Approved, Detail: nothing + ": the server's records could not be written; it is tried again", After: a.RetryAfter()}
	if a.Attempts < maxTries {
		return o
	}
	// The transaction whose connection was lost may have been committed. Update
	// waits for its turn, so that it is visible by now if it was.
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
	if err != nil { // it is not known yet whether there was an effect
		return Outcome{State: Approved, Detail: nothing + " as far as is known: the server's records cannot be read; it is tried again", After: a.RetryAfter()}
	}
	return o
}
