package auth

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/store"
)

// SessionCookie is the name of the cookie with a person's session. The proxy never
// forwards it into a sandbox.
const SessionCookie = "postern_session"

// DeviceCookie is the name of the cookie with a browser's own key, which opens what the
// server keeps for a person in this browser alone. The proxy never forwards it either.
const DeviceCookie = "postern_device"

// SessionTime is how long a session lasts.
const SessionTime = 12 * time.Hour

// bearerPrefix begins the token of a session that is not a browser's.
const bearerPrefix = "pse_"

// A SessionKind says how a client sends a session's token. A token of one kind is
// invalid as the other: a page cannot make a browser send a bearer token, and a
// script with a bearer token is not signed in to the console.
type SessionKind string

// The kinds of session.
const (
	Browser SessionKind = "browser" // a cookie
	Bearer  SessionKind = "bearer"  // a program that a person started
)

// A Session is the record of a person's session, without its token.
type Session struct {
	ID      string
	Kind    SessionKind
	Created time.Time
	Expires time.Time
	Strong  time.Time // when it last proved a second factor; zero means never
	Factor  string    // second factor of the sign-in: "totp", "recovery code", "passkey", or empty
	Remote  string    // client address of the sign-in
	Agent   string    // the client's User-Agent, which is hostile text
}

// IsBearer reports whether a secret has the form of a bearer token.
func IsBearer(token Secret) bool { return strings.HasPrefix(token.Reveal(), bearerPrefix) }

// BeginSession signs a person in and returns the session and its token. The caller
// sets Kind, Strong, Factor, Remote and Agent of s.
func BeginSession(ctx context.Context, tx *store.Tx, who Principal, s Session) (Session, Secret, error) {
	if who.Kind != Person {
		return s, "", ErrForbidden
	}
	token, now := Secret(rand.Text()), time.Now()
	if s.Kind == Bearer {
		token = bearerPrefix + token
	}
	s.ID, s.Created, s.Expires = "ses_"+rand.Text(), now, now.Add(SessionTime)
	s.Agent = truncate(s.Agent, 200)
	if _, err := tx.ExecContext(ctx, `delete from session where expires_at <= $1`, store.Time(now)); err != nil {
		return s, "", fmt.Errorf("remove old sessions: %w", err)
	}
	var id string
	err := requireSeal(ctx, tx, SealedPeople(), `name = $1`, who.ID)
	if err == nil {
		err = tx.One(ctx, `select id from person where name = $1 and project_id = $2 and disabled_at = 0`, []any{who.ID, who.Project}, &id)
	}
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, ErrUnauthenticated) {
		return s, "", ErrUnauthenticated
	}
	if err != nil {
		return s, "", fmt.Errorf("find person: %w", err)
	}
	_, err = tx.ExecContext(ctx, `insert into session (hash, person_id, created_at, expires_at, strong_at, id, kind, remote, agent, factor)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`,
		token.hash(), id, store.Time(now), store.Time(s.Expires), store.Time(s.Strong), s.ID, s.Kind, s.Remote, s.Agent, s.Factor)
	if err != nil {
		return s, "", fmt.Errorf("insert session: %w", err)
	}
	return s, token, SealSession(ctx, tx, token.hash())
}

// truncate returns valid UTF-8 without NUL, which PostgreSQL would refuse, of at
// most most bytes.
func truncate(s string, most int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= most {
		return s
	}
	for !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most]
}

// CheckSession returns the person of a browser session, or [ErrUnauthenticated] if
// the token is invalid or has expired.
func CheckSession(ctx context.Context, db *store.DB, token Secret) (Principal, error) {
	return checkSession(ctx, db, token, Browser)
}

// CheckBearer returns the person of a bearer session, or [ErrUnauthenticated].
func CheckBearer(ctx context.Context, db *store.DB, token Secret) (Principal, error) {
	if !IsBearer(token) {
		return Principal{}, ErrUnauthenticated
	}
	return checkSession(ctx, db, token, Bearer)
}

// checkSession returns the person of the session with this token and kind. It does
// not wrap [ErrUnauthenticated], which callers compare with.
func checkSession(ctx context.Context, db *store.DB, token Secret, kind SessionKind) (p Principal, err error) {
	err = db.View(ctx, func(tx *store.Tx) error {
		p, _, err = SessionPrincipal(ctx, tx, token, kind)
		return err
	})
	if err != nil && !errors.Is(err, ErrUnauthenticated) {
		return Principal{}, fmt.Errorf("check session: %w", err)
	}
	return p, err
}

// SessionPrincipal returns the person and the ID of the session with this token and
// kind, as tx sees it, or [ErrUnauthenticated].
func SessionPrincipal(ctx context.Context, tx *store.Tx, token Secret, kind SessionKind) (p Principal, id string, err error) {
	p.Kind = Person
	var strong int64
	err = tx.One(ctx, `select p.name, p.project_id, p.role, p.keys_off, s.strong_at, s.id from session s join person p on p.id = s.person_id
		where s.hash = $1 and s.kind = $2 and s.expires_at > $3 and p.disabled_at = 0`,
		[]any{token.hash(), kind, store.Time(time.Now())}, &p.ID, &p.Project, &p.Role, &p.KeysOff, &strong, &id)
	if errors.Is(err, store.ErrNotFound) {
		return Principal{}, "", ErrUnauthenticated
	}
	if err != nil {
		return Principal{}, "", err
	}
	// The attack: a session or a person is inserted into the database.
	if err := requireSeal(ctx, tx, SealedSessions(), `hash = $1`, token.hash()); err != nil {
		return Principal{}, "", err
	}
	if err := requireSeal(ctx, tx, SealedPeople(), `name = $1`, p.ID); err != nil {
		return Principal{}, "", err
	}
	p.Strong = store.FromTime(strong)
	return p, id, nil
}

// EndSession signs out. It is idempotent.
func EndSession(ctx context.Context, tx *store.Tx, token Secret) error {
	_, err := tx.ExecContext(ctx, `delete from session where hash = $1`, token.hash())
	return err
}

// EndSessions ends all sessions of the person with this ID except the session but,
// which may be empty, and all unfinished sign-ins.
func EndSessions(ctx context.Context, tx *store.Tx, person, but string) error {
	if _, err := tx.ExecContext(ctx, `delete from session where person_id = $1 and id <> $2`, person, but); err != nil {
		return fmt.Errorf("end sessions: %w", err)
	}
	if _, err := tx.ExecContext(ctx, `delete from challenge where person_id = $1`, person); err != nil {
		return fmt.Errorf("end sign-ins: %w", err)
	}
	return nil
}
