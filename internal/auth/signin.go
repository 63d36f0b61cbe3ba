package auth

import (
	"context"
	"errors"
	"fmt"

	"postern/internal/store"
)

// SignIn checks names and passwords and throttles attempts. It is safe for
// concurrent use.
type SignIn struct {
	db *store.DB
	// busy is a semaphore. It bounds the memory that argon2 takes: 64 MiB for each
	// check.
	busy chan struct{}
}

// NewSignIn returns a SignIn for the accounts in db.
func NewSignIn(db *store.DB) *SignIn {
	return &SignIn{db: db, busy: make(chan struct{}, 2)}
}

// Check returns the person with this name and password, [ErrUnauthenticated],
// or [ErrTooMany]. Remote is the client's address; an empty one has a limit of its
// own. The caller must also require the second factor of a person who has one: see
// package people.
func (s *SignIn) Check(ctx context.Context, name, remote, password string) (Principal, error) {
	tries := []AttemptLimit{AttemptsByName(name), AttemptsFrom(remote), AttemptsInAll()}
	// Count before the check. The attack: hundreds of parallel attempts, all begun
	// before the first one has failed.
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
		stored = noPasswordHash // takes as long as for an existing account
	} else if err != nil {
		return Principal{}, fmt.Errorf("sign in: %w", err)
	}
	if !samePassword(stored, password) || stored == noPasswordHash {
		return Principal{}, ErrUnauthenticated
	}
	return p, RefundAttempt(ctx, s.db, tries...)
}
