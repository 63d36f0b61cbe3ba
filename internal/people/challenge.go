package people

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

// challengeTime is how long somebody has to answer.
const challengeTime = 5 * time.Minute

// A purpose is what an answer to a challenge does. An answer to one is none to
// another.
type purpose string

const (
	forSecond    purpose = "second"          // the password was right, a second factor is missing
	forTOTP      purpose = "totp"            // an authenticator app is being set up
	forPasskey   purpose = "passkey"         // a passkey is being made
	forSignIn    purpose = "passkey signin"  // somebody shows a passkey
	forStepUp    purpose = "passkey step-up" // likewise, in a session
	maxAnonymous         = 5000              // open challenges to nobody in particular
)

// A challenge is what somebody has to answer to. It is in a row, so that any
// server of the database takes the answer, and only one does.
type challenge struct {
	purpose purpose
	person  string // id; empty means whoever answers
	session string // id of the session it was made in; empty means none
	data    []byte
}

// newChallenge stores a challenge and returns its token.
func newChallenge(ctx context.Context, tx *store.Tx, c challenge) (auth.Secret, error) {
	now := time.Now()
	if _, err := tx.ExecContext(ctx, `delete from challenge where expires_at <= $1`, store.Time(now)); err != nil {
		return "", fmt.Errorf("remove old challenges: %w", err)
	}
	if c.person == "" {
		var n int
		if err := tx.One(ctx, `select count(*) from challenge where person_id = ''`, nil, &n); err != nil {
			return "", fmt.Errorf("count challenges: %w", err)
		}
		if n >= maxAnonymous {
			return "", auth.ErrTooMany
		}
	}
	if c.data == nil {
		c.data = []byte{}
	}
	token := auth.Secret(rand.Text())
	_, err := tx.ExecContext(ctx, `insert into challenge (hash, purpose, person_id, session_id, data, expires_at) values ($1, $2, $3, $4, $5, $6)`,
		token.Digest(), c.purpose, c.person, c.session, c.data, store.Time(now.Add(challengeTime)))
	if err != nil {
		return "", fmt.Errorf("insert challenge: %w", err)
	}
	return token, nil
}

// readChallenge returns the challenge of a token without using it up.
func readChallenge(ctx context.Context, tx *store.Tx, token auth.Secret, c challenge) (challenge, error) {
	err := tx.One(ctx, `select person_id, data from challenge where hash = $1 and purpose = $2 and session_id = $3 and expires_at > $4`,
		[]any{token.Digest(), c.purpose, c.session, store.Time(time.Now())}, &c.person, &c.data)
	if errors.Is(err, store.ErrNotFound) {
		return c, ErrChallenge
	}
	return c, err
}

// takeChallenge takes a challenge away and returns it: of two answers one comes too late,
// also when the first was wrong. It has to be one of the purpose and the session
// of c, and where c names a person, of them.
func takeChallenge(ctx context.Context, tx *store.Tx, token auth.Secret, c challenge) (challenge, error) {
	person := c.person
	err := tx.One(ctx, `delete from challenge where hash = $1 and purpose = $2 and session_id = $3 and expires_at > $4 and ($5 = '' or person_id = $5) returning person_id, data`,
		[]any{token.Digest(), c.purpose, c.session, store.Time(time.Now()), person}, &c.person, &c.data)
	if errors.Is(err, store.ErrNotFound) {
		return c, ErrChallenge
	}
	if err != nil {
		return c, fmt.Errorf("use challenge: %w", err)
	}
	return c, nil
}
