// Package rulebook keeps the versions of each project's policy, and judges requests
// by the version in force.
//
// A version is never changed and never removed. It is replaced only by an action of
// kind [policy.KindChange], which names the version that it replaces and which a
// person approves; see [Book.Propose]. Package policy evaluates documents; this
// package must not add rules of its own.
package rulebook

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// A Version is one version of a project's policy, or the built-in default.
type Version struct {
	Number  int64  // 1 for the project's first; 0 for the built-in default
	Text    string // the document, empty in lists
	Tests   string // proposed together with Text; may be empty
	Digest  []byte // SHA-256 of Text
	At      time.Time
	Author  string // a principal; empty for the built-in default
	Decider string // a principal; empty for the built-in default
	Action  string // id of the action that put it in force; empty for the built-in default
	Reason  string // the author's; may be empty

	forged bool // its row does not have the server's seal
}

// SealedVersions is the table of versions, see [store.Sealed]. The attack: somebody
// who can write the database inserts a version that allows everything.
func SealedVersions() store.Sealed {
	return store.Sealed{Table: "policy_version", Key: []string{"project_id", "version"}}
}

// Hex returns the version's digest in hexadecimal, as the API and pages show it.
func (v *Version) Hex() string { return hex.EncodeToString(v.Digest) }

// maxCompiled bounds the compiled documents in memory, of all projects.
const maxCompiled = 64

// A Book judges requests by the documents of their projects. It is safe for
// concurrent use. Two programs on one database judge alike, since the version in force
// is read in the transaction of the request.
type Book struct {
	log *slog.Logger
	db  *store.DB

	mu       sync.Mutex
	compiled map[[sha256.Size]byte]*policy.Document // by digest of the text; at most maxCompiled
}

// New returns the Book of db.
func New(log *slog.Logger, db *store.DB) *Book {
	return &Book{log: log, db: db, compiled: map[[sha256.Size]byte]*policy.Document{}}
}

var _ oversight.Judge = (*Book)(nil)

// Judge implements [oversight.Judge].
func (b *Book) Judge(ctx context.Context, tx *store.Tx, project string, r policy.Request) (policy.Verdict, error) {
	v, err := active(ctx, tx, project)
	if err != nil {
		return policy.Verdict{}, err
	}
	d, err := b.Document(v)
	if err != nil {
		b.log.ErrorContext(ctx, "read policy", "project", project, "version", v.Number, "err", err)
		return unreadable(r, v, err), nil
	}
	return policy.Decide(d, r), nil
}

// unreadable returns the verdict if the document in force cannot be read, because the
// database was changed or another release wrote it. A person is asked even where the
// mode would allow, since the document may have denied it.
func unreadable(r policy.Request, v Version, err error) policy.Verdict {
	out := policy.Decide(nil, r)
	if out.Effect == policy.Deny {
		return out
	}
	return policy.Verdict{
		Effect: policy.Ask, Who: []string{"role:owner"}, Grave: out.Grave,
		Reason: fmt.Sprintf("version %d of the policy cannot be read: %v", v.Number, err),
	}
}

// Document returns the document of v, compiled and shared. It is an error if the
// text is not what people approved, or cannot be read by this release.
func (b *Book) Document(v Version) (*policy.Document, error) {
	if v.Number == 0 {
		return policy.Default(), nil
	}
	if v.forged {
		return nil, errors.New("its row was changed in or inserted into the database")
	}
	sum := sha256.Sum256([]byte(v.Text))
	// The attack: a text changed in the database after people approved it.
	if hex.EncodeToString(sum[:]) != v.Hex() {
		return nil, errors.New("its text is not what was approved")
	}
	b.mu.Lock()
	d := b.compiled[sum]
	b.mu.Unlock()
	if d != nil {
		return d, nil
	}
	d, err := policy.Parse([]byte(v.Text))
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.compiled) >= maxCompiled {
		clear(b.compiled)
	}
	b.compiled[sum] = d
	return d, nil
}

const columns = `version, text, tests, digest, at, author, decider, action_id, reason`

func scan(row func(...any) error) (v Version, err error) {
	var at int64
	err = row(&v.Number, &v.Text, &v.Tests, &v.Digest, &at, &v.Author, &v.Decider, &v.Action, &v.Reason)
	v.At = store.FromTime(at)
	return v, store.NotFound(err)
}

// builtin returns the default of this program.
func builtin() Version {
	d := policy.Default()
	sum := d.Digest()
	return Version{Text: d.Text(), Digest: sum[:]}
}

// active returns the version of a project that is in force.
func active(ctx context.Context, tx *store.Tx, project string) (Version, error) {
	v, err := scan(tx.QueryRowContext(ctx, `select `+columns+` from policy_version where project_id = $1 order by version desc limit 1`, project).Scan)
	if errors.Is(err, store.ErrNotFound) {
		return builtin(), nil
	}
	if err != nil {
		return Version{}, fmt.Errorf("read policy of %s: %w", project, err)
	}
	genuine, err := tx.Holding(ctx, SealedVersions(), `project_id = $1 and version = $2`, project, v.Number)
	if err != nil {
		return Version{}, fmt.Errorf("read policy of %s: %w", project, err)
	}
	v.forged = !genuine
	return v, nil
}

// InForce returns the version that is in force in a project, as part of tx. It
// checks no principal: it is for the parts of this program that apply the policy.
func (b *Book) InForce(ctx context.Context, tx *store.Tx, project string) (Version, error) {
	return active(ctx, tx, project)
}

// maySee returns an error unless who may read the policy: only people may. The
// attack: an agent reads which of its actions no rule notices.
func maySee(who auth.Principal) error {
	if who.Kind != auth.Person {
		return fmt.Errorf("no key may read the policy, only a person who is signed in or the operator at the machine: %w", auth.ErrForbidden)
	}
	return nil
}

// Active returns the version of who's project that is in force. Who must be a person.
func (b *Book) Active(ctx context.Context, who auth.Principal) (v Version, err error) {
	if err := maySee(who); err != nil {
		return Version{}, err
	}
	err = b.db.View(ctx, func(tx *store.Tx) error {
		v, err = active(ctx, tx, who.Project)
		return err
	})
	return v, err
}

// Versions returns up to limit versions of who's project without their texts, the
// newest first and the built-in default last. Who must be a person.
func (b *Book) Versions(ctx context.Context, who auth.Principal, limit int) (out []Version, err error) {
	if err := maySee(who); err != nil {
		return nil, err
	}
	err = b.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, scan,
			`select version, '', '', digest, at, author, decider, action_id, reason from policy_version where project_id = $1 order by version desc limit $2`, who.Project, limit)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list versions of policy: %w", err)
	}
	if len(out) < limit {
		own := builtin()
		own.Text = ""
		out = append(out, own)
	}
	return out, nil
}

// Version returns one version of who's project; 0 is the built-in default. Who must be
// a person.
func (b *Book) Version(ctx context.Context, who auth.Principal, number int64) (v Version, err error) {
	if err := maySee(who); err != nil {
		return Version{}, err
	}
	if number == 0 {
		return builtin(), nil
	}
	err = b.db.View(ctx, func(tx *store.Tx) error {
		v, err = scan(tx.QueryRowContext(ctx, `select `+columns+` from policy_version where project_id = $1 and version = $2`, who.Project, number).Scan)
		return err
	})
	if err != nil {
		return Version{}, fmt.Errorf("version %d of policy: %w", number, err)
	}
	return v, nil
}
