package oauth

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/keyring"
	"postern/internal/seal"
	"postern/internal/store"
)

// The rows that are kept of one connection: of access tokens the newest, of used refresh
// tokens those whose second use ends the connection. The attack: a program that
// refreshes without end.
const (
	maxAccess = 5
	maxUsed   = 50
)

// Tokens are what a program gets (RFC 6749, section 5.1).
type Tokens struct {
	Access  string `json:"access_token"`
	Type    string `json:"token_type"` // Bearer
	Expires int64  `json:"expires_in"` // seconds
	Refresh string `json:"refresh_token"`
	Scope   string `json:"scope"`
}

// A connection is a row of oauth_grant.
type connection struct {
	id, project, client, credential, inbox, resource string
	scope                                            seal.Scope
}

// find returns a connection, or an error that wraps [store.ErrNotFound].
func find(ctx context.Context, tx *store.Tx, id string) (c connection, err error) {
	c.id = id
	err = tx.One(ctx, `select project_id, client_id, credential_id, inbox_id, resource, scope from oauth_grant where id = $1`, []any{id}, &c.project, &c.client, &c.credential, &c.inbox, &c.resource, &c.scope)
	return c, err
}

// Exchange answers a request for tokens at the server base. It returns an error of type
// [*Error] for what the protocol refuses.
func (s *Server) Exchange(ctx context.Context, base string, form url.Values) (Tokens, error) {
	for _, name := range slices.Sorted(maps.Keys(form)) {
		values := form[name]
		if len(values) > 1 {
			return Tokens{}, refuse("invalid_request", printable(name)+": appears more than once")
		}
	}
	switch form.Get("grant_type") {
	case "authorization_code":
		return s.byCode(ctx, base, form)
	case "refresh_token":
		return s.byRefresh(ctx, base, form)
	}
	return Tokens{}, refuse("unsupported_grant_type", "grant_type: must be authorization_code or refresh_token")
}

var verifier = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9._~-]{43,128}$`) })

func (s *Server) byCode(ctx context.Context, base string, form url.Values) (t Tokens, err error) {
	code, again := auth.Secret(form.Get("code")), ""
	err = s.db.Update(ctx, func(tx *store.Tx) error {
		again = ""
		var grant, client, redirect, challenge string
		var sealed []byte
		var expires, used int64
		err := tx.One(ctx, `select grant_id, client_id, redirect_uri, challenge, sealed, expires_at, used_at from oauth_code where hash = $1`, []any{code.Digest()}, &grant, &client, &redirect, &challenge, &sealed, &expires, &used)
		if errors.Is(err, store.ErrNotFound) {
			return errCode
		}
		if err != nil {
			return err
		}
		// The attacks: a code that was read on its way, shown by another program; one
		// that was put into the answer to another request (code injection).
		sum := sha256.Sum256([]byte(form.Get("code_verifier")))
		proof := base64.RawURLEncoding.EncodeToString(sum[:])
		if client != form.Get("client_id") || redirect != form.Get("redirect_uri") || !verifier().MatchString(form.Get("code_verifier")) || subtle.ConstantTimeCompare([]byte(proof), []byte(challenge)) != 1 {
			return errCode
		}
		if used != 0 {
			again = grant // whoever was first may have been the thief
			return errCode
		}
		if store.FromTime(expires).Before(time.Now()) {
			return errCode
		}
		c, err := s.checkTarget(ctx, tx, base, grant, form, errCode)
		if err != nil {
			return err
		}
		if fresh, err := tx.Changed(ctx, `update oauth_code set used_at = $1, sealed = $2 where hash = $3 and used_at = 0`, store.Time(time.Now()), []byte{}, code.Digest()); err != nil || !fresh {
			again = grant
			return errors.Join(err, errCode)
		}
		key, err := seal.FromToken(code.Reveal(), codePlace(grant), sealed)
		if err != nil {
			return errCode // the row was changed
		}
		t, err = s.issue(ctx, tx, c, key)
		return err
	})
	return t, s.copied(ctx, again, "a code was used twice", err)
}

// checkTarget returns the connection of a code or token, unless the request names
// another resource than it is for.
func (s *Server) checkTarget(ctx context.Context, tx *store.Tx, base, grant string, form url.Values, gone *Error) (c connection, err error) {
	c, err = find(ctx, tx, grant)
	if errors.Is(err, store.ErrNotFound) {
		return c, gone
	}
	if err != nil || form.Get("resource") == "" {
		return c, err
	}
	if at, err := resource(base, form.Get("resource")); err != nil || at != c.resource {
		return c, refuse("invalid_target", "resource: the connection is for "+c.resource)
	}
	return c, nil
}

func (s *Server) byRefresh(ctx context.Context, base string, form url.Values) (t Tokens, err error) {
	token, again := auth.Secret(form.Get("refresh_token")), ""
	err = s.db.Update(ctx, func(tx *store.Tx) error {
		again = ""
		var grant string
		var sealed []byte
		var expires, used int64
		err := tx.One(ctx, `select grant_id, sealed, expires_at, used_at from oauth_token where hash = $1 and kind = 'refresh'`, []any{token.Digest()}, &grant, &sealed, &expires, &used)
		if errors.Is(err, store.ErrNotFound) {
			return errRefresh
		}
		if err != nil {
			return err
		}
		c, err := s.checkTarget(ctx, tx, base, grant, form, errRefresh)
		switch {
		case err != nil:
			return err
		case c.client != form.Get("client_id"):
			return errRefresh
		case used != 0:
			again = grant
			return errRefresh
		case store.FromTime(expires).Before(time.Now()):
			return errRefresh
		}
		if asked := form.Get("scope"); asked != "" && !c.scope.Includes(seal.Join(seal.Scope(asked))) {
			return refuse("invalid_scope", "scope: must be within "+strings.Join(c.scope.List(), " "))
		}
		if fresh, err := tx.Changed(ctx, `update oauth_token set used_at = $1, sealed = $2 where hash = $3 and used_at = 0`, store.Time(time.Now()), []byte{}, token.Digest()); err != nil || !fresh {
			again = grant
			return errors.Join(err, errRefresh)
		}
		key, err := seal.FromToken(token.Reveal(), refreshPlace(grant), sealed)
		if err != nil {
			return errRefresh // the row was changed
		}
		// The key may have been revoked where keys are.
		if holds, err := keyring.Holds(ctx, tx, c.credential, c.inbox); err != nil || !holds {
			return errors.Join(err, errRefresh)
		}
		t, err = s.issue(ctx, tx, c, key)
		return err
	})
	return t, s.copied(ctx, again, "a refresh token was used twice", err)
}

// copied ends the connection again if it is not empty: one of its secrets was used twice,
// so somebody has a copy. It returns err.
func (s *Server) copied(ctx context.Context, again, why string, err error) error {
	if again == "" {
		return err
	}
	s.log.WarnContext(ctx, "end a connection", "app", again, "why", why)
	ended := s.db.Update(context.WithoutCancel(ctx), func(tx *store.Tx) error {
		c, err := find(ctx, tx, again)
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		return s.end(ctx, tx, system(c.project), c, why)
	})
	if ended != nil {
		return ended
	}
	return err
}

// issue makes the next tokens of a connection, whose key is key.
func (s *Server) issue(ctx context.Context, tx *store.Tx, c connection, key string) (Tokens, error) {
	access, refresh, now := auth.Secret(auth.AccessPrefix+rand.Text()), auth.Secret("prt_"+rand.Text()), time.Now()
	for _, t := range []struct {
		kind, place string
		token       auth.Secret
		lasts       time.Duration
	}{
		{"access", auth.AccessPlace(c.id), access, AccessTime},
		{"refresh", refreshPlace(c.id), refresh, RefreshTime},
	} {
		sealed, err := seal.UnderToken(t.token.Reveal(), t.place, key)
		if err != nil {
			return Tokens{}, err
		}
		_, err = tx.ExecContext(ctx, `insert into oauth_token (hash, grant_id, kind, sealed, created_at, expires_at, used_at) values ($1, $2, $3, $4, $5, $6, 0)`,
			t.token.Digest(), c.id, t.kind, sealed, store.Time(now), store.Time(now.Add(t.lasts)))
		if err != nil {
			return Tokens{}, fmt.Errorf("store token: %w", err)
		}
	}
	for kind, most := range map[string]int{"access": maxAccess, "refresh": maxUsed} {
		_, err := tx.ExecContext(ctx, `delete from oauth_token where grant_id = $1 and kind = $2 and hash not in
			(select hash from oauth_token where grant_id = $1 and kind = $2 order by created_at desc, hash limit $3)`, c.id, kind, most)
		if err != nil {
			return Tokens{}, fmt.Errorf("remove old tokens: %w", err)
		}
	}
	return Tokens{access.Reveal(), "Bearer", int64(AccessTime / time.Second), refresh.Reveal(), strings.Join(c.scope.List(), " ")}, nil
}
