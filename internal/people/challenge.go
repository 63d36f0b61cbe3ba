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

// challengeTime is how long a challenge can be answered.
const challengeTime = 5 * time.Minute

// A purpose says what a response to a challenge does. A response for one purpose
// is invalid for another.
type purpose string

const (
	forSecond    purpose = "second"          // the password was right, a second factor is missing
	forTOTP      purpose = "totp"            // an authenticator app is being set up
	forPasskey   purpose = "passkey"         // a passkey is being made
	forSignIn    purpose = "passkey signin"  // somebody shows a passkey
	forStepUp    purpose = "passkey step-up" // likewise, in a session
	maxAnonymous         = 5000              // open challenges to nobody in particular
)

// A challenge is a pending step of a sign-in or an enrolment. It is a row of the
// database, so that any server can take the response, and only one takes it.
type challenge struct {
	purpose purpose
	person  string // ID; empty means that the response identifies the person
	session string // ID of the session it was created in; empty means none
	data    []byte // state that the check of the response needs
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

// readChallenge returns the challenge of a token without using it up. Purpose and
// session must be those of c.
func readChallenge(ctx context.Context, tx *store.Tx, token auth.Secret, c challenge) (challenge, error) {
	err := tx.One(ctx, `select person_id, data from challenge where hash = $1 and purpose = $2 and session_id = $3 and expires_at > $4`,
		[]any{token.Digest(), c.purpose, c.session, store.Time(time.Now())}, &c.person, &c.data)
	if errors.Is(err, store.ErrNotFound) {
		return c, ErrChallenge
	}
	return c, err
}

// takeChallenge deletes a challenge and returns it, so that there can be only one
// response, right or wrong. Purpose and session must be those of c, and so must the
// person if c names one.
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
