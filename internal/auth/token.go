package auth

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"postern/internal/seal"
	"postern/internal/store"
)

// AccessPrefix begins the access tokens of connected programs (OAuth 2.1). Package
// oauth issues them.
const AccessPrefix = "pat_"

// AccessPlace names the row of an access token of a connection, for [seal.UnderToken].
func AccessPlace(connection string) string { return "access " + connection }

var accessToken = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^pat_[A-Z2-7]{26}$`) })

// Identify returns the principal of what a caller shows, and the key that it stands for:
// a key stands for itself, an access token for the key of its connection. The
// caller asks [Principal.MayCall] before it calls a tool. Doors without tools, and those
// that only take keys, call [CheckKey]. It returns [ErrUnauthenticated] for what is not valid.
func Identify(ctx context.Context, db *store.DB, shown Secret) (Principal, Secret, error) {
	if !strings.HasPrefix(shown.Reveal(), AccessPrefix) {
		p, err := anyKey(ctx, db, shown)
		return p, shown, err
	}
	if !accessToken().MatchString(shown.Reveal()) {
		return Principal{}, "", ErrUnauthenticated
	}
	var connection string
	var sealed []byte
	err := db.Peek(ctx, `select grant_id, sealed from oauth_token where hash = $1 and kind = 'access' and expires_at > $2`,
		[]any{shown.hash(), store.Time(time.Now())}, &connection, &sealed)
	if errors.Is(err, store.ErrNotFound) {
		return Principal{}, "", ErrUnauthenticated
	}
	if err != nil {
		return Principal{}, "", fmt.Errorf("check access token: %w", err)
	}
	// The attack: somebody who can write the database moves a token's row to another
	// connection. It then does not open.
	key, err := seal.FromToken(shown.Reveal(), AccessPlace(connection), sealed)
	if err != nil {
		return Principal{}, "", ErrUnauthenticated
	}
	p, err := anyKey(ctx, db, Secret(key))
	return p, Secret(key), err
}
