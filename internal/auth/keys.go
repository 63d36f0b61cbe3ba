package auth

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/scrub"
	"postern/internal/store"
)

// A Secret is a credential in the clear. It is returned once, to the caller it is
// for, and never stored or logged: it prints as a placeholder.
type Secret string

// String keeps a secret out of logs and error texts.
func (Secret) String() string { return "[secret]" }

// GoString keeps it out of %#v.
func (Secret) GoString() string { return "[secret]" }

// Reveal returns the secret itself.
func (s Secret) Reveal() string { return string(s) }

// Digest returns the form in which a secret is stored, if it has so many random
// bits that it cannot be guessed: a key or token, not a password.
func (s Secret) Digest() []byte { return s.hash() }

func (s Secret) hash() []byte {
	// A key has 130 random bits or more, so it needs no salt and no slow hash.
	b := []byte(s)
	h := sha256.Sum256(b)
	// Short copies are on the stack, see scrub.Stack.
	clear(b)
	scrub.Stack()
	return h[:]
}

// The forms of keys. Older official E2B SDKs check that of the project key.
var (
	projectKey = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^e2b_[0-9a-f]{40}$`) })
	inboxKey   = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^p(ib|gr|rk)_[A-Z2-7]{26}$`) }) // of an inbox, a grant, a recovery key
)

// ContextKey is the kind of the credential of a reviewer's context grant. No principal is
// of this kind: [CheckKey] does not know such a key, so whoever has one is nobody to any
// door. Only package keyring accepts it, together with a person's session.
const ContextKey = "context"

const contextPrefix = "pcx_"

// IsContextCode reports whether a secret has the form of a context grant's code.
func IsContextCode(code Secret) bool {
	rest, ok := strings.CutPrefix(code.Reveal(), contextPrefix)
	return ok && len(rest) == 26 && strings.Trim(rest, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") == ""
}

// NewProject creates a project with its first key.
func NewProject(ctx context.Context, tx *store.Tx, name string) (id string, key Secret, err error) {
	id = "prj_" + rand.Text()
	if _, err := tx.ExecContext(ctx, `insert into project (id, name, created_at) values ($1, $2, $3)`,
		id, name, store.Time(time.Now())); err != nil {
		return "", "", fmt.Errorf("insert project: %w", err)
	}
	_, key, err = NewProjectKey(ctx, tx, id)
	return id, key, err
}

// NewProjectKey creates another key of a project, without a name.
func NewProjectKey(ctx context.Context, tx *store.Tx, project string) (id string, key Secret, err error) {
	return NewKeyOf(ctx, tx, project, "", "")
}

// NewKeyOf creates another key of a project with a name, for the principal by.
func NewKeyOf(ctx context.Context, tx *store.Tx, project, name, by string) (id string, key Secret, err error) {
	b := make([]byte, 20)
	rand.Read(b) // never fails
	key = Secret("e2b_" + hex.EncodeToString(b))
	id, err = insertCredential(ctx, tx, Credential{Project: project, Kind: Project, Name: name, CreatedBy: by}, key)
	return id, key, err
}

// KeysOf returns the live keys of a project that are not bound to one inbox, oldest
// first: project keys and grants.
func KeysOf(ctx context.Context, tx *store.Tx, project string) ([]Credential, error) {
	return store.List(ctx, tx, func(row func(...any) error) (Credential, error) {
		c := Credential{Project: project}
		var created, used, expires int64
		err := row(&c.ID, &c.Kind, &c.Name, &created, &c.CreatedBy, &used, &expires, &c.Account)
		c.Created, c.Used, c.Expires = store.FromTime(created), store.FromTime(used), store.FromTime(expires)
		return c, err
	}, `select id, kind, name, created_at, created_by, used_at, expires_at, account from credential
		where project_id = $1 and kind in ($2, $3) and revoked_at = 0 and (expires_at = 0 or expires_at > $4) order by created_at, id`,
		project, Project, Grant, store.Time(time.Now()))
}

// FirstProject returns the id of the oldest project, or [store.ErrNotFound] on
// a fresh database.
func FirstProject(ctx context.Context, tx *store.Tx) (id string, err error) {
	err = tx.One(ctx, `select id from project order by created_at, id limit 1`, nil, &id)
	return id, err
}

// A ProjectInfo describes a project.
type ProjectInfo struct {
	ID, Name string
	Created  time.Time
}

// Projects returns all projects, the oldest first. It is for the operator.
func Projects(ctx context.Context, tx *store.Tx) ([]ProjectInfo, error) {
	return store.List(ctx, tx, func(row func(...any) error) (p ProjectInfo, err error) {
		var created int64
		err = row(&p.ID, &p.Name, &created)
		p.Created = store.FromTime(created)
		return p, err
	}, `select id, name, created_at from project order by created_at, id`)
}

// ProjectName returns the name of a project.
func ProjectName(ctx context.Context, tx *store.Tx, id string) (name string, err error) {
	if err := tx.One(ctx, `select name from project where id = $1`, []any{id}, &name); err != nil {
		return "", fmt.Errorf("find project %s: %w", id, err)
	}
	return name, nil
}

// A Credential is the stored record of a key, without the secret.
type Credential struct {
	ID        string
	Project   string
	Kind      Kind
	Inbox     string    // of an Agent or a Recovery; else empty
	Name      string    // for people; may be empty
	Created   time.Time // zero in a request for a new one
	CreatedBy string    // a principal, or empty if it is not known
	Used      time.Time // last use, with a resolution of [UseResolution]; zero means never
	Expires   time.Time // zero means never
	Account   bool      // of a Grant: it gets access to each inbox that it creates
	Tools     []string  // the only tools that it may call; empty means all, see [Principal.MayCall]
}

// NewCredential creates an inbox key, a grant or a recovery key. The key cannot
// decrypt anything yet: a holder of an inbox's private key must first seal that
// to it.
func NewCredential(ctx context.Context, tx *store.Tx, c Credential) (id string, key Secret, err error) {
	if c.Kind == ContextKey {
		key = Secret(contextPrefix + rand.Text())
		id, err = insertCredential(ctx, tx, c, key)
		return id, key, err
	}
	switch c.Kind {
	case Agent:
		key = Secret("pib_" + rand.Text())
	case Grant:
		key = Secret("pgr_" + rand.Text())
	case Recovery:
		key = Secret("prk_" + rand.Text())
	case Project, Person, Sandbox, System:
		return "", "", fmt.Errorf("create key: there are no such keys for a %s: %w", c.Kind, ErrForbidden)
	}
	id, err = insertCredential(ctx, tx, c, key)
	return id, key, err
}

// insertCredential stores a key by its hash and returns the ID of the row.
func insertCredential(ctx context.Context, tx *store.Tx, c Credential, key Secret) (string, error) {
	id := "crd_" + rand.Text()
	_, err := tx.ExecContext(ctx,
		`insert into credential (id, project_id, kind, inbox_id, hash, created_at, revoked_at, name, expires_at, used_at, created_by, account, tools)
		values ($1, $2, $3, $4, $5, $6, 0, $7, $8, 0, $9, $10, $11)`,
		id, c.Project, c.Kind, c.Inbox, key.hash(), store.Time(time.Now()), c.Name, store.Time(c.Expires), c.CreatedBy, c.Account, strings.Join(c.Tools, " "))
	if err != nil {
		return "", fmt.Errorf("insert credential: %w", err)
	}
	return id, nil
}

// Revoke ends a credential. It is idempotent.
func Revoke(ctx context.Context, tx *store.Tx, id string) error {
	_, err := tx.ExecContext(ctx, `update credential set revoked_at = $1 where id = $2 and revoked_at = 0`, store.Time(time.Now()), id)
	if err != nil {
		return fmt.Errorf("revoke credential %s: %w", id, err)
	}
	return nil
}

// UseResolution is how often the use of a key is recorded. Recording each request
// would turn every reader into a writer.
const UseResolution = 10 * time.Minute

// ErrToolsOnly means that a key names the tools that it may call, and was shown where
// nothing is called by the name of a tool.
var ErrToolsOnly = fmt.Errorf("this key can only call tools, over MCP or email-sandbox's HTTP: use a key without a list of tools (%w)", ErrForbidden)

// CheckKey returns the principal of a key, or [ErrUnauthenticated]. For a key that names
// its tools, it returns [ErrToolsOnly]: what is not called by the name of a tool would
// lead around that limit. Doors with tools call [Identify].
func CheckKey(ctx context.Context, db *store.DB, key Secret) (Principal, error) {
	p, err := anyKey(ctx, db, key)
	if err == nil && p.Tools != "" {
		return Principal{}, ErrToolsOnly
	}
	return p, err
}

// anyKey is CheckKey for keys with and without a list of tools.
func anyKey(ctx context.Context, db *store.DB, key Secret) (Principal, error) {
	if !projectKey().MatchString(key.Reveal()) && !inboxKey().MatchString(key.Reveal()) {
		return Principal{}, ErrUnauthenticated // malformed keys cost no database query
	}
	var p Principal
	var used int64
	now := time.Now()
	// The index is searched by hash, so timing reveals hashes, not keys.
	err := db.Peek(ctx, `select id, project_id, kind, inbox_id, used_at, tools from credential
		where hash = $1 and revoked_at = 0 and (expires_at = 0 or expires_at > $2)`,
		[]any{key.hash(), store.Time(now)}, &p.ID, &p.Project, &p.Kind, &p.Inbox, &used, &p.Tools)
	if errors.Is(err, store.ErrNotFound) {
		return Principal{}, ErrUnauthenticated
	}
	if err == nil && now.Sub(store.FromTime(used)) >= UseResolution {
		err = db.UpdateIn(ctx, store.Task("used "+p.ID), func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update credential set used_at = $1 where id = $2 and used_at < $1`, store.Time(now), p.ID)
			return err
		})
	}
	if err != nil {
		return Principal{}, fmt.Errorf("check key: %w", err)
	}
	return p, nil
}

// A KeyName is what a key can be called by.
type KeyName struct {
	ID, Name, Inbox string // Inbox is an ID, or empty
	Kind            Kind
}

// KeyNames returns the names of keys by their IDs, also of those that have ended. IDs of
// none are left out.
func KeyNames(ctx context.Context, tx *store.Tx, ids []string) (map[string]KeyName, error) {
	out := map[string]KeyName{}
	for chunk := range slices.Chunk(ids, 200) {
		args := make([]any, len(chunk))
		for i, id := range chunk {
			args[i] = id
		}
		_, err := store.List(ctx, tx, func(row func(...any) error) (k KeyName, err error) {
			err = row(&k.ID, &k.Kind, &k.Name, &k.Inbox)
			out[k.ID] = k
			return k, err
		}, `select id, kind, name, inbox_id from credential where id in (`+store.Places(1, len(chunk))+`)`, args...)
		if err != nil {
			return nil, fmt.Errorf("name keys: %w", err)
		}
	}
	return out, nil
}
