package auth

import (
	"context"
	"errors"
	"fmt"

	"postern/internal/store"
)

// SignIn checks names and passwords and slows guessing down. It is safe for
// concurrent use.
type SignIn struct {
	db *store.DB
	// busy bounds the memory that guessers can make argon2 use.
	busy chan struct{}
}

// NewSignIn returns a checker on the accounts in db.
func NewSignIn(db *store.DB) *SignIn {
	return &SignIn{db: db, busy: make(chan struct{}, 2)}
}

// Check returns the person with this name and password, [ErrUnauthenticated],
// or [ErrTooMany]. Remote is the address that asks; empty counts as none. That
// the password is right is not enough for a person with a second factor: see
// package people.
func (s *SignIn) Check(ctx context.Context, name, remote, password string) (Principal, error) {
	tries := []AttemptLimit{AttemptsByName(name), AttemptsFrom(remote), AttemptsInAll()}
	// Counted before it is looked at. The attack: hundreds of guesses at once,
	// all of them before one has failed.
	if err := CountAttempt(ctx, s.db, tries...); err != nil {
		return Principal{}, err
	}
	select {
	case s.busy <- struct{}{}:
		defer func() { <-s.busy }()
	case <-ctx.Done():
		return Principal{}, ctx.Err()
	}
	p := Principal{Kind: Person, ID: name}
	var stored string
	err := s.db.View(ctx, func(tx *store.Tx) error {
		if err := requireSeal(ctx, tx, SealedPeople(), `name = $1`, name); err != nil {
			return err
		}
		return tx.One(ctx, `select project_id, role, password from person where name = $1 and disabled_at = 0`, []any{name}, &p.Project, &p.Role, &stored)
	})
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, ErrUnauthenticated) {
		stored = noPasswordHash // as much work as for a person who exists
	} else if err != nil {
		return Principal{}, fmt.Errorf("sign in: %w", err)
	}
	if !samePassword(stored, password) || stored == noPasswordHash {
		return Principal{}, ErrUnauthenticated
	}
	return p, RefundAttempt(ctx, s.db, tries...)
}
