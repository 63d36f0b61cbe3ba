package auth

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/store"
)

// SetupTime is how long a set-up link is valid.
const SetupTime = 24 * time.Hour

// ErrInvalid means that a field of a request is invalid; the text names the field.
var ErrInvalid = errors.New("invalid")

var personName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9][a-z0-9._@+-]{0,62}$`) })

// Roles lists all roles, the one with most rights first.
var Roles = []Role{Owner, Reviewer, Viewer}

// Valid reports whether r is a role that a person can have.
func (r Role) Valid() bool { return slices.Contains(Roles, r) }

// reserved reports whether a name belongs to a principal without an account. The
// attack: a person accepts an invitation as local-root, so that the audit shows
// their actions as the operator's, or counts them as a second person beside the
// operator.
func reserved(name string) bool {
	return name == "local" || strings.HasPrefix(name, "local-") || name == "system"
}

// An Invitation is the record of a one-time link, without its token. The link
// creates an account or, if it names a person, sets that person's password.
type Invitation struct {
	ID        string
	Project   string
	Role      Role   // of the account
	Email     string // of the account, for notices; may be empty
	Person    string // name of the person whose password it sets; empty for a new account
	CreatedBy string // a principal; empty for the server's own first link
	Created   time.Time
	Expires   time.Time
}

// NewSetup creates the link for a project's first account, an owner. Anybody with
// the token can use the link, so it is shown only to the operator.
func NewSetup(ctx context.Context, tx *store.Tx, project string) (Secret, error) {
	_, token, err := NewInvitation(ctx, tx, Invitation{Project: project, Role: Owner})
	return token, err
}

// NewInvitation creates a one-time link and returns it and its token. The caller
// has checked that this is allowed.
func NewInvitation(ctx context.Context, tx *store.Tx, v Invitation) (Invitation, Secret, error) {
	if !v.Role.Valid() {
		return v, "", fmt.Errorf("%w role: %q is not a role, use owner, reviewer or viewer", ErrInvalid, v.Role)
	}
	token, now := Secret(rand.Text()), time.Now()
	v.ID, v.Created, v.Expires = "inv_"+rand.Text(), now, now.Add(SetupTime)
	person := ""
	if v.Person != "" {
		if err := tx.One(ctx, `select id from person where name = $1 and project_id = $2`, []any{v.Person, v.Project}, &person); err != nil {
			return v, "", fmt.Errorf("find person %s: %w", v.Person, err)
		}
	}
	_, err := tx.ExecContext(ctx, `insert into setup (hash, project_id, expires_at, used_at, id, role, email, person_id, created_by, created_at)
		values ($1, $2, $3, 0, $4, $5, $6, $7, $8, $9)`,
		token.hash(), v.Project, store.Time(v.Expires), v.ID, v.Role, v.Email, person, v.CreatedBy, store.Time(now))
	if err != nil {
		return v, "", fmt.Errorf("insert set-up link: %w", err)
	}
	return v, token, tx.Seal(ctx, SealedSetups(), `hash = $1`, token.hash())
}

// CheckSetup returns the invitation of a token without using it up, or
// [ErrUnauthenticated].
func CheckSetup(ctx context.Context, tx *store.Tx, token Secret) (v Invitation, err error) {
	var created, expires int64
	err = tx.One(ctx, `select s.id, s.project_id, s.role, s.email, s.created_by, s.created_at, s.expires_at, coalesce(p.name, '')
		from setup s left join person p on p.id = s.person_id where s.hash = $1 and s.used_at = 0 and s.expires_at > $2`,
		[]any{token.hash(), store.Time(time.Now())}, &v.ID, &v.Project, &v.Role, &v.Email, &v.CreatedBy, &created, &expires, &v.Person)
	v.Created, v.Expires = store.FromTime(created), store.FromTime(expires)
	if errors.Is(err, store.ErrNotFound) {
		return v, ErrUnauthenticated
	}
	if err != nil {
		return v, err
	}
	return v, requireSeal(ctx, tx, SealedSetups(), `hash = $1`, token.hash())
}

// HasPeople reports whether the project has an account.
func HasPeople(ctx context.Context, tx *store.Tx, project string) (bool, error) {
	var n int
	err := tx.One(ctx, `select count(*) from person where project_id = $1`, []any{project}, &n)
	return n > 0, err
}

// Redeem uses up a set-up token. It creates an account called name with the
// invited role or, if the link names a person, sets that person's password and
// ignores name. Token and account change in one transaction, so that a token
// cannot create two accounts.
func Redeem(ctx context.Context, tx *store.Tx, token Secret, name, passwordHash string) (Principal, error) {
	v, err := CheckSetup(ctx, tx, token)
	if err != nil {
		return Principal{}, err
	}
	if v.Person == "" && (!personName().MatchString(name) || reserved(name)) {
		return Principal{}, fmt.Errorf("%w name: use 1 to 63 of a-z 0-9 . _ @ + -, beginning with a letter or digit; names that begin with local- are reserved", ErrInvalid)
	}
	now := store.Time(time.Now())
	ok, err := tx.Changed(ctx, `update setup set used_at = $1 where hash = $2 and used_at = 0 and expires_at > $1`, now, token.hash())
	if err != nil {
		return Principal{}, fmt.Errorf("use set-up link: %w", err)
	}
	if !ok { // another request has used it
		return Principal{}, ErrUnauthenticated
	}
	if err := tx.Seal(ctx, SealedSetups(), `hash = $1`, token.hash()); err != nil {
		return Principal{}, err
	}
	if v.Person != "" {
		return v.renew(ctx, tx, passwordHash)
	}
	// The attack: the row of a used link is restored with its former seal, and the
	// link creates a second account for one person.
	id := accountID(token)
	var there int
	if err := tx.One(ctx, `select count(*) from person where id = $1`, []any{id}, &there); err != nil {
		return Principal{}, fmt.Errorf("look for the account of a link: %w", err)
	}
	if there > 0 {
		return Principal{}, ErrUnauthenticated
	}
	ok, err = tx.Changed(ctx, `insert into person (id, project_id, name, password, created_at, role, email) values ($1, $2, $3, $4, $5, $6, $7) on conflict do nothing`,
		id, v.Project, name, passwordHash, now, v.Role, v.Email)
	if err != nil {
		return Principal{}, fmt.Errorf("insert person: %w", err)
	}
	if !ok {
		return Principal{}, fmt.Errorf("%w name: %s is taken", ErrInvalid, name)
	}
	// The attack: an owner creates a second account for themself and approves with
	// both.
	if err := recordJoined(ctx, tx, id, v.Project, v.CreatedBy, now); err != nil {
		return Principal{}, err
	}
	return Principal{Kind: Person, ID: name, Project: v.Project, Role: v.Role}, SealPerson(ctx, tx, id)
}

// accountID returns the ID of the account that a link creates. It follows from the
// token, so that a link cannot create two accounts even if its row was restored.
func accountID(token Secret) string {
	sum := sha256.Sum256(append([]byte("postern account of link\x00"), token.hash()...))
	return "per_" + base32.StdEncoding.EncodeToString(sum[:])[:26]
}

// renew sets the password of v's person and ends their sessions.
func (v Invitation) renew(ctx context.Context, tx *store.Tx, passwordHash string) (Principal, error) {
	p := Principal{Kind: Person, ID: v.Person}
	// Only a row that the server wrote may be sealed again.
	if err := requireSeal(ctx, tx, SealedPeople(), `name = $1`, v.Person); err != nil {
		return Principal{}, err
	}
	var id string
	err := tx.One(ctx, `update person set password = $1 where name = $2 and project_id = $3 and disabled_at = 0 returning id, project_id, role`,
		[]any{passwordHash, v.Person, v.Project}, &id, &p.Project, &p.Role)
	if errors.Is(err, store.ErrNotFound) {
		return Principal{}, ErrUnauthenticated
	}
	if err != nil {
		return Principal{}, fmt.Errorf("set password: %w", err)
	}
	// The attack: the operator uses the link, and approves both as this person and
	// with another account.
	if err := RecordChange(ctx, tx, id, v.CreatedBy, Renewed); err != nil {
		return Principal{}, err
	}
	if err := SealPerson(ctx, tx, id); err != nil {
		return Principal{}, err
	}
	return p, EndSessions(ctx, tx, id, "")
}
