package oversight

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// A question is an action by which people are asked about something that a sandbox wants
// to do now, such as a connection. The sandbox waits for the answer, or tries again later.
// The same payload is the same question, and is asked once.
const (
	// PassTime is how long an approval of a question counts, and how long a question that
	// a person has rejected is not asked again.
	PassTime = time.Hour
	// retryTime is how long a question is not asked again that nobody has decided on.
	retryTime = time.Minute
	// maxQuestions is how many questions of a sandbox, of one kind, wait for a person.
	maxQuestions = 20
)

// Newest returns the ID of the newest question of who with a payload of this digest, or
// [store.ErrNotFound].
func Newest(ctx context.Context, tx *store.Tx, who auth.Principal, kind policy.Kind, digest [sha256.Size]byte) (id string, err error) {
	err = tx.One(ctx, `select id from action where project_id = $1 and kind = $2 and proposer = $3 and digest = $4 order by created_at desc, id limit 1`,
		[]any{who.Project, kind, who.String(), digest[:]}, &id)
	return id, err
}

// Current returns [store.ErrNotFound] if the question a does not count any more and may be
// asked anew.
func (g *Gate) Current(ctx context.Context, tx *store.Tx, a *Action) error {
	counts := retryTime
	if _, byPerson := a.Person(); a.State == Done || byPerson {
		counts = PassTime
	}
	if !a.Settled.IsZero() && time.Since(a.Settled) > counts {
		return store.ErrNotFound
	}
	if a.State != Done {
		return nil
	}
	if g.Voided(a) {
		return store.ErrNotFound
	}
	// Turning a switch off restores nothing, also not what was approved before.
	stopped, err := g.StoppedSince(ctx, tx, a.Project, a.Request, a.Settled)
	if err == nil && (stopped || a.Stopped != "") { // since it was done, or since it was claimed
		err = store.ErrNotFound
	}
	return err
}

// Asked returns the newest question of who with a payload of this digest, if it still
// counts, or else [store.ErrNotFound].
func (g *Gate) Asked(ctx context.Context, tx *store.Tx, who auth.Principal, kind policy.Kind, digest [sha256.Size]byte) (Action, error) {
	id, err := Newest(ctx, tx, who, kind, digest)
	if err != nil {
		return Action{}, err
	}
	a, err := g.Find(ctx, tx, who, id)
	if err == nil {
		err = g.Current(ctx, tx, &a)
	}
	return a, err
}

// ProposeOnce returns the question that last finds, or else proposes p. Last returns
// [store.ErrNotFound] where no question counts. The error is [ErrFull] where too many
// questions of who wait for a person; what names them in its text.
func (g *Gate) ProposeOnce(ctx context.Context, who auth.Principal, p Proposal, what string, last func(tx *store.Tx) (Action, error)) (a Action, err error) {
	err = g.db.View(ctx, func(tx *store.Tx) error {
		a, err = last(tx)
		return err
	})
	if !errors.Is(err, store.ErrNotFound) {
		return a, err
	}
	err = g.db.Update(ctx, func(tx *store.Tx) error {
		// Another process may have asked since the View.
		if a, err = last(tx); !errors.Is(err, store.ErrNotFound) {
			return err
		}
		var n int
		err := tx.One(ctx, `select count(*) from action where project_id = $1 and kind = $2 and proposer = $3 and state = $4`,
			[]any{who.Project, p.Request.Kind, who.String(), Pending}, &n)
		if err != nil {
			return err
		}
		if n >= maxQuestions {
			// The attack: a scan of all ports, or a loop of programs, each of which asks a
			// person.
			return fmt.Errorf("%d %s of this sandbox wait for a person: %w", n, what, ErrFull)
		}
		a, err = g.Propose(ctx, tx, who, p)
		return err
	})
	return a, err
}

// Use uses up the approval of a question that allows something once, and reports whether
// it was not used before. Host is that of a request, or empty.
func Use(ctx context.Context, tx *store.Tx, a *Action, host string) (fresh bool, err error) {
	// The insert is what makes it once: the key is the action.
	fresh, err = tx.Changed(ctx, `insert into request_use (action_id, project_id, host, used_at) values ($1, $2, $3, $4) on conflict (action_id) do nothing`,
		a.ID, a.Project, host, store.Time(time.Now()))
	if err != nil {
		return false, fmt.Errorf("use approval: %w", err)
	}
	return fresh, nil
}

// Unused returns [store.ErrNotFound] if the approval of a question was used up.
func Unused(ctx context.Context, tx *store.Tx, a *Action) error {
	var n int
	err := tx.One(ctx, `select count(*) from request_use where action_id = $1`, []any{a.ID}, &n)
	if err == nil && n > 0 {
		err = store.ErrNotFound
	}
	return err
}

// Refusal returns why a question that has ended without an approval allows nothing.
func (a *Action) Refusal() string {
	_, byPerson := a.Person()
	switch {
	case a.State != Denied:
		return a.ID + " is " + string(a.State)
	case byPerson:
		return "a person has rejected it (" + a.ID + "): " + a.Reason
	case a.Reason != "":
		return a.ID + ": " + a.Reason
	}
	return a.ID + ": " + a.Verdict
}
