package auth

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"time"

	"postern/internal/store"
)

// A Secret is a credential in the clear. It is shown once, to whom it is for,
// and never stored or logged: it prints as a placeholder.
type Secret string

// String keeps a secret out of logs and error texts.
func (Secret) String() string { return "[secret]" }

// GoString keeps it out of %#v.
func (Secret) GoString() string { return "[secret]" }

// Reveal returns the secret itself.
func (s Secret) Reveal() string { return string(s) }

func (s Secret) hash() []byte {
	// A key has 160 random bits or more, so that no salt or slow hash is needed.
	h := sha256.Sum256([]byte(s))
	return h[:]
}

// The forms of keys. Older official E2B SDKs check the project key's.
var (
	projectKey = regexp.MustCompile(`^e2b_[0-9a-f]{40}$`)
	inboxKey   = regexp.MustCompile(`^pib_[A-Z2-7]{26}$`)
)

// NewProject makes a project with its first key.
func NewProject(ctx context.Context, tx *store.Tx, name string) (id string, key Secret, err error) {
	id = "prj_" + rand.Text()
	if _, err := tx.ExecContext(ctx, `insert into project (id, name, created_at) values ($1, $2, $3)`,
		id, name, store.Time(time.Now())); err != nil {
		return "", "", fmt.Errorf("insert project: %w", err)
	}
	_, key, err = NewProjectKey(ctx, tx, id)
	return id, key, err
}

// NewProjectKey makes another key of a project.
func NewProjectKey(ctx context.Context, tx *store.Tx, project string) (id string, key Secret, err error) {
	b := make([]byte, 20)
	rand.Read(b) // never fails
	key = Secret("e2b_" + hex.EncodeToString(b))
	id, err = insertCredential(ctx, tx, project, Project, "", key)
	return id, key, err
}

// FirstProject returns the id of the oldest project, or [store.ErrNotFound] on
// a fresh database.
func FirstProject(ctx context.Context, tx *store.Tx) (id string, err error) {
	err = tx.One(ctx, `select id from project order by created_at, id limit 1`, nil, &id)
	return id, err
}

// ProjectName returns the name of a project.
func ProjectName(ctx context.Context, tx *store.Tx, id string) (name string, err error) {
	if err := tx.One(ctx, `select name from project where id = $1`, []any{id}, &name); err != nil {
		return "", fmt.Errorf("find project %s: %w", id, err)
	}
	return name, nil
}

// NewInboxKey makes a key that acts for one inbox alone.
func NewInboxKey(ctx context.Context, tx *store.Tx, project, inbox string) (id string, key Secret, err error) {
	key = Secret("pib_" + rand.Text())
	id, err = insertCredential(ctx, tx, project, Agent, inbox, key)
	return id, key, err
}

func insertCredential(ctx context.Context, tx *store.Tx, project string, kind Kind, inbox string, key Secret) (string, error) {
	id := "crd_" + rand.Text()
	_, err := tx.ExecContext(ctx,
		`insert into credential (id, project_id, kind, inbox_id, hash, created_at, revoked_at) values ($1, $2, $3, $4, $5, $6, 0)`,
		id, project, kind, inbox, key.hash(), store.Time(time.Now()))
	if err != nil {
		return "", fmt.Errorf("insert credential: %w", err)
	}
	return id, nil
}

// CheckKey returns whose key this is, or [ErrUnauthenticated].
func CheckKey(ctx context.Context, db *store.DB, key Secret) (Principal, error) {
	if !projectKey.MatchString(key.Reveal()) && !inboxKey.MatchString(key.Reveal()) {
		return Principal{}, ErrUnauthenticated // spares the database the guessers
	}
	var p Principal
	err := db.View(ctx, func(tx *store.Tx) error {
		// The index is searched by hash: timing tells about hashes, not keys.
		return tx.One(ctx, `select id, project_id, kind, inbox_id from credential where hash = $1 and revoked_at = 0`,
			[]any{key.hash()}, &p.ID, &p.Project, &p.Kind, &p.Inbox)
	})
	if errors.Is(err, store.ErrNotFound) {
		return Principal{}, ErrUnauthenticated
	}
	if err != nil {
		return Principal{}, fmt.Errorf("check key: %w", err)
	}
	return p, nil
}
