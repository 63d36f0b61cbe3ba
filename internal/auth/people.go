package auth

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/argon2"

	"postern/internal/store"
)

// SessionCookie is the name of the cookie that keeps a person's session. It is
// never passed on to what runs inside a sandbox.
const SessionCookie = "postern_session"

// How long a session and a set-up link last.
const (
	SessionTime = 12 * time.Hour
	SetupTime   = 24 * time.Hour
)

// ErrInvalid means that a field of a form cannot be taken; the text names it.
var ErrInvalid = errors.New("invalid")

// ErrTooMany means that too many sign-ins failed; try again in a minute.
var ErrTooMany = errors.New("too many failed sign-ins; try again in a minute")

var personName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9][a-z0-9._@+-]{0,62}$`) })

// NewSetup makes a one-time link's token. Whoever opens the link first makes
// an account that decides, so the token is shown to the operator alone.
func NewSetup(ctx context.Context, tx *store.Tx, project string) (Secret, error) {
	token := Secret(rand.Text())
	_, err := tx.ExecContext(ctx, `insert into setup (hash, project_id, expires_at, used_at) values ($1, $2, $3, 0)`,
		token.hash(), project, store.Time(time.Now().Add(SetupTime)))
	if err != nil {
		return "", fmt.Errorf("insert setup: %w", err)
	}
	return token, nil
}

// CheckSetup reports whether token opens a set-up page, without using it up.
func CheckSetup(ctx context.Context, tx *store.Tx, token Secret) error {
	var project string
	err := tx.One(ctx, `select project_id from setup where hash = $1 and used_at = 0 and expires_at > $2`,
		[]any{token.hash(), store.Time(time.Now())}, &project)
	if errors.Is(err, store.ErrNotFound) {
		return ErrUnauthenticated
	}
	return err
}

// HasPeople reports whether the project has an account.
func HasPeople(ctx context.Context, tx *store.Tx, project string) (bool, error) {
	var n int
	err := tx.One(ctx, `select count(*) from person where project_id = $1`, []any{project}, &n)
	return n > 0, err
}

// Redeem uses a set-up token to make a person's account. The token is used up
// in the same transaction: it cannot make two.
func Redeem(ctx context.Context, tx *store.Tx, token Secret, name, passwordHash string) (Principal, error) {
	if !personName().MatchString(name) {
		return Principal{}, fmt.Errorf("%w name: use 1 to 63 of a-z 0-9 . _ @ + -, beginning with a letter or digit", ErrInvalid)
	}
	now := store.Time(time.Now())
	p := Principal{Kind: Person, ID: name, Role: Owner}
	err := tx.One(ctx, `update setup set used_at = $1 where hash = $2 and used_at = 0 and expires_at > $1 returning project_id`,
		[]any{now, token.hash()}, &p.Project)
	if errors.Is(err, store.ErrNotFound) {
		return Principal{}, ErrUnauthenticated
	}
	if err != nil {
		return Principal{}, fmt.Errorf("use set-up link: %w", err)
	}
	ok, err := tx.Changed(ctx, `insert into person (id, project_id, name, password, created_at) values ($1, $2, $3, $4, $5) on conflict do nothing`,
		"per_"+rand.Text(), p.Project, name, passwordHash, now)
	if err != nil {
		return Principal{}, fmt.Errorf("insert person: %w", err)
	}
	if !ok {
		return Principal{}, fmt.Errorf("%w name: %s is taken", ErrInvalid, name)
	}
	return p, nil
}

// argon2id's cost: RFC 9106 section 4, the second recommended choice (64 MiB)
// with one pass less of its three, measured at about 60 ms on a small machine.
const (
	argonTime    = 2
	argonMemory  = 64 * 1024 // KiB
	argonThreads = 1
	argonSize    = 32
)

// MinPassword is the least length of a password, in bytes.
const MinPassword = 10

// HashPassword returns what is stored for a password.
func HashPassword(password string) (string, error) {
	if len(password) < MinPassword || len(password) > 256 {
		return "", fmt.Errorf("%w password: use %d to 256 characters", ErrInvalid, MinPassword)
	}
	salt := make([]byte, 16)
	rand.Read(salt)
	h := argon2.IDKey([]byte(password), salt, argonTime, argonMemory, argonThreads, argonSize)
	b64 := base64.RawStdEncoding
	return fmt.Sprintf("$argon2id$v=%d$m=%d,t=%d,p=%d$%s$%s", argon2.Version, argonMemory, argonTime, argonThreads,
		b64.EncodeToString(salt), b64.EncodeToString(h)), nil
}

func samePassword(stored, password string) bool {
	var v, m, t, p int
	head, tail, ok := strings.Cut(strings.TrimPrefix(stored, "$argon2id$"), "$")
	if !ok {
		return false
	}
	params, tail, ok := strings.Cut(tail, "$")
	if !ok {
		return false
	}
	if _, err := fmt.Sscanf(head+" "+params, "v=%d m=%d,t=%d,p=%d", &v, &m, &t, &p); err != nil || v != argon2.Version {
		return false
	}
	s, h, ok := strings.Cut(tail, "$")
	if !ok {
		return false
	}
	salt, err1 := base64.RawStdEncoding.DecodeString(s)
	want, err2 := base64.RawStdEncoding.DecodeString(h)
	if err1 != nil || err2 != nil || len(want) == 0 {
		return false
	}
	got := argon2.IDKey([]byte(password), salt, uint32(t), uint32(m), uint8(p), uint32(len(want)))
	return subtle.ConstantTimeCompare(got, want) == 1
}

// SignIn checks names and passwords and slows guessing down. It is safe for
// concurrent use.
type SignIn struct {
	db *store.DB
	// busy bounds the memory that guessers can make argon2 use.
	busy chan struct{}

	mu sync.Mutex // guards failed
	// failed counts failures by name. Names that do not exist count too, or
	// the answer would tell which do.
	failed map[string]failures
}

// failures are those of one name within a minute of the first.
type failures struct {
	n     int
	since time.Time
}

// NewSignIn returns a checker on the accounts in db.
func NewSignIn(db *store.DB) *SignIn {
	return &SignIn{db: db, busy: make(chan struct{}, 2), failed: map[string]failures{}}
}

const (
	failuresPerName = 5 // a minute
	failuresInAll   = 1000
)

// Check returns the person with this name and password, [ErrUnauthenticated],
// or [ErrTooMany].
func (s *SignIn) Check(ctx context.Context, name, password string) (Principal, error) {
	if !s.mayTry(name) {
		return Principal{}, ErrTooMany
	}
	select {
	case s.busy <- struct{}{}:
		defer func() { <-s.busy }()
	case <-ctx.Done():
		return Principal{}, ctx.Err()
	}
	// The attack: hundreds of guesses at once, all of them before one has failed.
	if !s.mayTry(name) {
		return Principal{}, ErrTooMany
	}
	p := Principal{Kind: Person, ID: name}
	var stored string
	err := s.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select project_id, role, password from person where name = $1`, []any{name}, &p.Project, &p.Role, &stored)
	})
	if errors.Is(err, store.ErrNotFound) {
		stored = absent // as much work as for a person who exists
	} else if err != nil {
		return Principal{}, fmt.Errorf("sign in: %w", err)
	}
	if !samePassword(stored, password) || stored == absent {
		s.fail(name)
		return Principal{}, ErrUnauthenticated
	}
	return p, nil
}

// absent is compared with when the name is not known; no password matches.
const absent = "$argon2id$v=19$m=65536,t=2,p=1$AAAAAAAAAAAAAAAAAAAAAA$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"

func (s *SignIn) mayTry(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.failed[name]
	if ok && time.Since(f.since) < time.Minute {
		return f.n < failuresPerName
	}
	if len(s.failed) >= failuresInAll {
		maps.DeleteFunc(s.failed, func(_ string, f failures) bool { return time.Since(f.since) >= time.Minute })
	}
	return len(s.failed) < failuresInAll
}

func (s *SignIn) fail(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.failed[name]
	if time.Since(f.since) >= time.Minute {
		f = failures{since: time.Now()}
	}
	f.n++
	s.failed[name] = f
}

// NewSession signs a person in and returns what their browser keeps.
func NewSession(ctx context.Context, tx *store.Tx, who Principal) (Secret, error) {
	if who.Kind != Person {
		return "", ErrForbidden
	}
	token := Secret(rand.Text())
	now := time.Now()
	if _, err := tx.ExecContext(ctx, `delete from session where expires_at <= $1`, store.Time(now)); err != nil {
		return "", fmt.Errorf("remove old sessions: %w", err)
	}
	var id string
	err := tx.One(ctx, `select id from person where name = $1 and project_id = $2`, []any{who.ID, who.Project}, &id)
	if errors.Is(err, store.ErrNotFound) {
		return "", ErrUnauthenticated
	}
	if err != nil {
		return "", fmt.Errorf("find person: %w", err)
	}
	_, err = tx.ExecContext(ctx, `insert into session (hash, person_id, created_at, expires_at) values ($1, $2, $3, $4)`,
		token.hash(), id, store.Time(now), store.Time(now.Add(SessionTime)))
	if err != nil {
		return "", fmt.Errorf("insert session: %w", err)
	}
	return token, nil
}

// CheckSession returns the person whose session this is, or
// [ErrUnauthenticated], also when it has expired.
func CheckSession(ctx context.Context, db *store.DB, token Secret) (Principal, error) {
	p := Principal{Kind: Person}
	var strong int64
	err := db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select p.name, p.project_id, p.role, s.strong_at from session s join person p on p.id = s.person_id where s.hash = $1 and s.expires_at > $2`,
			[]any{token.hash(), store.Time(time.Now())}, &p.ID, &p.Project, &p.Role, &strong)
	})
	p.Strong = store.FromTime(strong)
	if errors.Is(err, store.ErrNotFound) {
		return Principal{}, ErrUnauthenticated
	}
	if err != nil {
		return Principal{}, fmt.Errorf("check session: %w", err)
	}
	return p, nil
}

// EndSession signs out. Ending a session that is not there is not an error.
func EndSession(ctx context.Context, tx *store.Tx, token Secret) error {
	_, err := tx.ExecContext(ctx, `delete from session where hash = $1`, token.hash())
	return err
}
