// Package secret keeps credentials that the wall puts on requests of sandboxes.
//
// A sandbox never has the value. It has a sentinel, a text that stands for the value
// in that one sandbox, and which nobody but this server can make. The wall replaces
// it, last of all, in requests to the hosts that the secret belongs to
// ([Store.Bound], [Store.Open]).
//
// Values are encrypted with AES-256-GCM under the operator's key and bound to their
// row. No method returns a value, except [Store.Open], whose caller wipes it. This
// package must not log, and no error or audit entry of it has a value.
package secret

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/inject"
	"postern/internal/scrub"
	"postern/internal/store"
)

// The errors of this package, one for each answer that a door can give.
var (
	// ErrInvalid means that the request is wrong. The text names the field, the rule
	// and never the value.
	ErrInvalid = errors.New("invalid secret")
	// ErrNotFound means that the project has no such secret.
	ErrNotFound = errors.New("no such secret")
	// ErrExists means that the project has a secret of that name.
	ErrExists = errors.New("the project has a secret of this name")
	// ErrTooMany means that the project has as many secrets as it can.
	ErrTooMany = errors.New("too many secrets")
	// ErrForged means that the row was changed in the database behind the server's
	// back. Such a secret is never used.
	ErrForged = errors.New("its row was changed in the database behind the server's back; delete it and create it again")
)

// A Kind is the kind of a secret.
type Kind string

// The kinds of secrets.
const (
	Plain Kind = "value" // one text
	AWS   Kind = "aws"   // an access key ID, a secret access key and perhaps a session token
)

// An Approval says when a person is asked about the use of a secret by a sandbox.
type Approval string

// The approvals, the strictest first.
const (
	Always Approval = "always" // each request
	First  Approval = "first"  // the first request of each sandbox; the grant ends at a time
	Never  Approval = "never"  // no request
)

var strictness = []Approval{Always, First, Never}

// looser reports whether b asks less often than a.
func looser(a, b Approval) bool { return slices.Index(strictness, b) > slices.Index(strictness, a) }

// stricter returns the one of two that asks more often.
func stricter(a, b Approval) Approval {
	if looser(a, b) {
		return a
	}
	return b
}

// A Secret describes a secret, without its value.
type Secret struct {
	ID       string // "sec_…"
	Project  string
	Name     string // unique in the project; lower case
	Kind     Kind
	Hosts    []string // "host" and "*.host"; empty means the hosts of the sandboxes' own rules
	Env      string   // environment variable for sandboxes to which it is attached; never empty
	Approval Approval
	Headers  []string          // header fields that may have the value, canonical; empty means [inject.Fields] of the hosts
	Places   []inject.Place    // other places in requests that an owner has opened
	Metadata map[string]string // the caller's own; never nil

	Version   int64 // of the value, from 1
	Created   time.Time
	CreatedBy string    // principal
	Rotated   time.Time // when the value was last replaced; zero means never
	Updated   time.Time
	LastUsed  time.Time // there may have been a later use, within [UseResolution]; zero means never

	revision int64
	sealed   []byte // the value, encrypted
}

// A Value is what a caller stores. Its texts print as placeholders.
type Value struct {
	Text         auth.Secret // the value, or the secret access key
	AccessKey    string      // of kind AWS; else empty
	SessionToken auth.Secret // of kind AWS, or empty
}

// String implements [fmt.Stringer].
func (Value) String() string { return "[secret]" }

// GoString implements [fmt.GoStringer].
func (Value) GoString() string { return "[secret]" }

// LogValue implements [slog.LogValuer].
func (Value) LogValue() slog.Value { return slog.StringValue("[secret]") }

// MarshalJSON implements [json.Marshaler].
func (Value) MarshalJSON() ([]byte, error) { return []byte(`"[secret]"`), nil }

// Settings are the fields of a secret that a caller can choose.
type Settings struct {
	Hosts    []string
	Env      string   // empty means the name in capitals
	Approval Approval // empty means Never
	Headers  []string // empty means [inject.Fields] of the hosts
	Places   []inject.Place
	Metadata map[string]string
}

// A Change changes a secret. What is nil stays.
type Change struct {
	Value    *Value
	Hosts    *[]string
	Env      *string
	Approval *Approval
	Headers  *[]string
	Places   *[]inject.Place
	Metadata map[string]string
}

// Config is the configuration of a [Store].
type Config struct {
	// Server is the server's key, at least 32 bytes. Sentinels are derived from it.
	Server []byte
	// Key is the operator's key, [KeySize] bytes, under which values are encrypted.
	// Nil means a key that is derived from Server.
	Key []byte
	// Bounds has the contracts that bind sandboxes. Nil: a sandbox that one binds has no
	// secrets.
	Bounds *contract.Bounds
	// Scrub is touched whenever a value is open in this process. Nil means that
	// nobody scrubs.
	Scrub *scrub.Scrubber
	// Changed is called after a secret of the project was created, changed or deleted, so
	// that connections and requests under way are judged again. Nil means that nothing is called.
	Changed func(ctx context.Context, project string)
}

// A Store keeps the secrets of all projects. It is safe for concurrent use.
type Store struct {
	log  *slog.Logger
	db   *store.DB
	conf Config
	keys keys

	mu      sync.Mutex
	guards  map[string]guarded // by project; guarded by mu
	changes int64              // how often guards was dropped; guarded by mu
}

// New returns the store of the secrets in db. The error wraps [ErrKey] if the key is
// not the one that the values are encrypted under; then nothing was changed.
func New(ctx context.Context, log *slog.Logger, db *store.DB, c Config) (*Store, error) {
	if c.Scrub == nil {
		c.Scrub = &scrub.Scrubber{}
	}
	if c.Changed == nil {
		c.Changed = func(context.Context, string) {}
	}
	k, err := newKeys(c.Server, c.Key)
	if err != nil {
		return nil, err
	}
	if err := db.Update(ctx, func(tx *store.Tx) error { return k.check(ctx, tx) }); err != nil {
		return nil, fmt.Errorf("check key of secrets: %w", err)
	}
	return &Store{log: log, db: db, conf: c, keys: k, guards: map[string]guarded{}}, nil
}

// Sealed is the table of secrets as rows are authenticated. The attack: somebody
// who can write the database adds their own host to a secret.
func Sealed() store.Sealed {
	return store.Sealed{Table: "secret", Key: []string{"id"}, Omit: []string{"last_used_at"}}
}

// mayManage returns an error unless who may create, change and delete secrets: a key
// of the project or an owner. The attack: code in a sandbox, or an inbox's key in an
// agent's hands, replaces a value.
func mayManage(who auth.Principal) error {
	if who.Project == "" || who.Kind != auth.Project && who.Kind != auth.Person {
		return fmt.Errorf("%s may not manage secrets, only a key of the project or an owner: %w", who, auth.ErrForbidden)
	}
	return auth.Need(who, auth.Owner)
}

// maySee returns an error unless who may list secrets, which never shows values.
func maySee(who auth.Principal) error {
	if who.Project == "" || who.Kind != auth.Project && who.Kind != auth.Person {
		return fmt.Errorf("%s may not see secrets, only a key of the project or a person: %w", who, auth.ErrForbidden)
	}
	return nil
}

// Create stores a new secret for who's project.
func (s *Store) Create(ctx context.Context, who auth.Principal, name string, kind Kind, v Value, set Settings) (Secret, error) {
	defer s.conf.Scrub.Touch()
	if err := mayManage(who); err != nil {
		return Secret{}, err
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	c := Secret{
		ID: idPrefix + rand.Text(), Project: who.Project, Name: strings.ToLower(name), Kind: kind, Version: 1, revision: 1,
		Created: now, CreatedBy: who.String(), Updated: now,
	}
	if c.Kind == "" {
		c.Kind = Plain
	}
	if err := checkName(c.Name); err != nil {
		return Secret{}, err
	}
	if err := c.set(set); err != nil {
		return Secret{}, err
	}
	if err := s.seal(&c, v); err != nil {
		return Secret{}, err
	}
	err := s.db.Update(ctx, func(tx *store.Tx) error {
		// Another server of the database may have replaced the key by now.
		if err := s.keys.check(ctx, tx); err != nil {
			return err
		}
		var n int
		if err := tx.One(ctx, `select count(*) from secret where project_id = $1`, []any{c.Project}, &n); err != nil {
			return err
		}
		if n >= maxSecrets {
			return fmt.Errorf("%w: the project has %d, which is the limit; delete some", ErrTooMany, n)
		}
		ok, err := tx.Changed(ctx, `insert into secret (id, project_id, name, kind, value, hosts, env, approval, headers, places, metadata, version, revision, created_at, created_by, rotated_at, updated_at, last_used_at)
			values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, 0, $16, 0) on conflict do nothing`,
			c.ID, c.Project, c.Name, c.Kind, c.sealed, strings.Join(c.Hosts, ","), c.Env, c.Approval, strings.Join(c.Headers, ","), encodePlaces(c.Places), encodeMetadata(c.Metadata), c.Version, c.revision, store.Time(c.Created), c.CreatedBy, store.Time(c.Updated))
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("name %q: %w; choose another, or rotate it", c.Name, ErrExists)
		}
		if err := tx.Seal(ctx, Sealed(), `id = $1`, c.ID); err != nil {
			return err
		}
		if err := recordPlaces(ctx, tx, who, &Secret{}, &c); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.SecretCreate, c.ID, c.fields())
	})
	if err != nil {
		return Secret{}, fmt.Errorf("create secret: %w", err)
	}
	s.forget(ctx, who.Project) // the project's other sandboxes are inspected at its hosts now
	return c, nil
}

// fields describes c for the record. It has no value and none of the metadata.
func (c *Secret) fields() audit.Fields {
	f := audit.Fields{
		"name": c.Name, "kind": string(c.Kind), "hosts": strings.Join(c.Hosts, ","), "approval": string(c.Approval), "version": strconv.FormatInt(c.Version, 10),
	}
	if len(c.Headers) > 0 {
		f["headers"] = strings.Join(c.Headers, ",")
	}
	if len(c.Places) > 0 {
		f["places"] = strconv.Itoa(len(c.Places)) // each has an entry of its own
	}
	return f
}

// Update changes a secret of who's project, found by its ID or name. With a Value it
// is rotated: sandboxes keep their sentinels, and the next request has the new value.
//
// Without a Value a project's key may neither add hosts, header fields and places nor
// have people asked less often. The attack: a stolen project key sends a value that it
// does not know to a host of its own, or into a text that its host gives back.
func (s *Store) Update(ctx context.Context, who auth.Principal, idOrName string, ch Change) (Secret, error) {
	defer s.conf.Scrub.Touch()
	if err := mayManage(who); err != nil {
		return Secret{}, err
	}
	var c Secret
	err := s.db.Update(ctx, func(tx *store.Tx) (err error) {
		if err := s.keys.check(ctx, tx); err != nil {
			return err
		}
		was, err := s.find(ctx, tx, who.Project, idOrName)
		if err != nil {
			return err
		}
		if c, err = s.changed(who, was, ch); err != nil {
			return err
		}
		if ch.Value != nil || !slices.Equal(was.Hosts, c.Hosts) {
			if err := keepFormer(ctx, tx, was); err != nil {
				return err
			}
		}
		ok, err := tx.Changed(ctx, `update secret set value = $1, hosts = $2, env = $3, approval = $4, headers = $5, places = $6, metadata = $7, version = $8, revision = $9, rotated_at = $10, updated_at = $11
			where id = $12 and revision = $13`,
			c.sealed, strings.Join(c.Hosts, ","), c.Env, c.Approval, strings.Join(c.Headers, ","), encodePlaces(c.Places), encodeMetadata(c.Metadata), c.Version, c.revision, store.Time(c.Rotated), store.Time(c.Updated), c.ID, was.revision)
		if err == nil && !ok {
			err = ErrNotFound
		}
		if err != nil {
			return err
		}
		if err := tx.Seal(ctx, Sealed(), `id = $1`, c.ID); err != nil {
			return err
		}
		if _, err := tx.Newest(store.All(), newestOf(c.ID), c.revision); err != nil {
			return err
		}
		verb := audit.SecretUpdate
		if ch.Value != nil {
			verb = audit.SecretRotate
		}
		if err := recordPlaces(ctx, tx, who, &was, &c); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, verb, c.ID, c.fields())
	})
	if err != nil {
		return Secret{}, fmt.Errorf("change secret: %w", err)
	}
	s.forget(ctx, who.Project)
	return c, nil
}

// changed returns was as ch changes it.
func (s *Store) changed(who auth.Principal, was Secret, ch Change) (Secret, error) {
	c := was
	c.revision++
	c.Updated = time.Now().UTC().Truncate(time.Microsecond)
	set := Settings{Hosts: c.Hosts, Env: c.Env, Approval: c.Approval, Headers: c.Headers, Places: c.Places, Metadata: c.Metadata}
	if ch.Hosts != nil {
		set.Hosts = *ch.Hosts
	}
	if ch.Env != nil {
		set.Env = *ch.Env
	}
	if ch.Approval != nil {
		set.Approval = *ch.Approval
	}
	if ch.Headers != nil {
		set.Headers = *ch.Headers
	}
	if ch.Places != nil {
		set.Places = *ch.Places
	}
	if ch.Metadata != nil {
		set.Metadata = ch.Metadata
	}
	if err := c.set(set); err != nil {
		return Secret{}, err
	}
	if ch.Value == nil {
		if who.Kind != auth.Person && (looser(was.Approval, c.Approval) || widened(was.Hosts, c.Hosts) || opened(&was, &c)) {
			return Secret{}, fmt.Errorf("a project's key may not add hosts, header fields or places, or lower the approval, without a new value; only an owner may: %w", auth.ErrForbidden)
		}
		return c, nil
	}
	c.Version++
	c.Rotated = c.Updated
	return c, s.seal(&c, *ch.Value)
}

// widened reports whether hosts allow more than was. No hosts means the rules of
// sandboxes, which may name any.
func widened(was, hosts []string) bool {
	if len(was) == 0 || len(hosts) == 0 {
		return !slices.Equal(was, hosts) && len(was) > 0
	}
	return slices.ContainsFunc(hosts, func(h string) bool {
		return !slices.ContainsFunc(was, func(w string) bool { return covers(w, h) })
	})
}

// covers reports whether the host pattern w contains the host or pattern h.
func covers(w, h string) bool {
	below, wild := strings.CutPrefix(w, "*")
	return w == h || wild && strings.HasSuffix(strings.TrimPrefix(h, "*"), below)
}

// Get returns a secret of who's project by its ID or name. Its error wraps
// [ErrNotFound].
func (s *Store) Get(ctx context.Context, who auth.Principal, idOrName string) (c Secret, err error) {
	if err := maySee(who); err != nil {
		return Secret{}, err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		c, err = s.find(ctx, tx, who.Project, idOrName)
		return err
	})
	if err != nil {
		return Secret{}, fmt.Errorf("get secret: %w", err)
	}
	return c, nil
}

// List returns the secrets of who's project, by name.
func (s *Store) List(ctx context.Context, who auth.Principal) (out []Secret, err error) {
	if err := maySee(who); err != nil {
		return nil, err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		if out, err = s.rows(ctx, tx, `project_id = $1`, who.Project); err != nil {
			return err
		}
		for i := range out {
			if out[i].LastUsed, err = lastUsed(ctx, tx, out[i].ID); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list secrets: %w", err)
	}
	slices.SortFunc(out, func(a, b Secret) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// Delete deletes a secret of who's project. Its sentinels stand for nothing from then
// on, also in sandboxes that have them.
func (s *Store) Delete(ctx context.Context, who auth.Principal, idOrName string) error {
	if err := mayManage(who); err != nil {
		return err
	}
	err := s.db.Update(ctx, func(tx *store.Tx) error {
		c, err := s.find(ctx, tx, who.Project, idOrName)
		if err != nil && !errors.Is(err, ErrForged) { // a forged one can be deleted
			return err
		}
		if err := keepFormer(ctx, tx, c); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `delete from secret where id = $1`, c.ID); err != nil {
			return err
		}
		// The attack: the row is put back with its seal. No revision of it counts any more.
		if _, err := tx.Newest(store.All(), newestOf(c.ID), math.MaxInt64); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.SecretDelete, c.ID, audit.Fields{"name": c.Name})
	})
	if err != nil {
		return fmt.Errorf("delete secret: %w", err)
	}
	s.forget(ctx, who.Project)
	return nil
}

// find returns a secret by its ID or name. Names cannot begin as IDs do. With an
// error that wraps [ErrForged] it returns the ID and name that the row has.
func (s *Store) find(ctx context.Context, tx *store.Tx, project, idOrName string) (Secret, error) {
	rows, err := s.rows(ctx, tx, `project_id = $1 and (id = $2 or name = $3)`, project, idOrName, strings.ToLower(idOrName))
	if err != nil {
		return Secret{}, err
	}
	if len(rows) == 0 {
		return Secret{}, fmt.Errorf("%w: %.100q", ErrNotFound, idOrName)
	}
	if rows[0].revision == forged {
		return rows[0], fmt.Errorf("secret %q: %w", rows[0].Name, ErrForged)
	}
	// Also for who changes it: what a rotation answers would say "never" else.
	rows[0].LastUsed, err = lastUsed(ctx, tx, rows[0].ID)
	return rows[0], err
}

// forged is the revision of a row whose seal does not hold.
const forged = -1

// rows returns the secrets that match. A row whose seal does not hold, or that is an
// earlier version of one that this process has seen, has revision forged.
func (s *Store) rows(ctx context.Context, tx *store.Tx, where string, args ...any) ([]Secret, error) {
	rows, err := tx.Rows(ctx, Sealed(), false, where, args...)
	if err != nil {
		return nil, err
	}
	out := make([]Secret, len(rows))
	for i, r := range rows {
		c := parse(r.Values)
		newest := int64(math.MaxInt64)
		if r.Holds { // else its revision is anybody's, and must not be remembered
			if newest, err = tx.Newest(store.All(), newestOf(c.ID), c.revision); err != nil {
				return nil, err
			}
		}
		// The attack: an earlier row, with the hosts of then, is restored.
		if newest > c.revision {
			c.revision = forged
		}
		out[i] = c
	}
	return out, nil
}

// UseResolution is how long after a recorded use of a secret no other is recorded: a use
// on each request would be a write on each request.
const UseResolution = time.Minute

// lastUsed returns when a secret was last used. The column is not sealed.
func lastUsed(ctx context.Context, tx *store.Tx, id string) (time.Time, error) {
	var at int64
	err := tx.One(ctx, `select last_used_at from secret where id = $1`, []any{id}, &at)
	return store.FromTime(at), err
}

func newestOf(id string) string { return "secret " + id }

// parse returns the secret in the columns of a row.
func parse(v map[string]any) Secret {
	text := func(column string) string { t, _ := v[column].(string); return t }
	number := func(column string) int64 { n, _ := v[column].(int64); return n }
	sealed, _ := v["value"].([]byte)
	c := Secret{
		ID: text("id"), Project: text("project_id"), Name: text("name"), Kind: Kind(text("kind")), Env: text("env"), Approval: Approval(text("approval")),
		Version: number("version"), Created: store.FromTime(number("created_at")), CreatedBy: text("created_by"), Rotated: store.FromTime(number("rotated_at")),
		Updated: store.FromTime(number("updated_at")), Metadata: map[string]string{}, revision: number("revision"), sealed: sealed,
	}
	if h := text("hosts"); h != "" {
		c.Hosts = strings.Split(h, ",")
	}
	if h := text("headers"); h != "" {
		c.Headers = strings.Split(h, ",")
	}
	if p := text("places"); p != "" {
		_ = json.Unmarshal([]byte(p), &c.Places) // of a forged row; it is not used
	}
	_ = json.Unmarshal([]byte(text("metadata")), &c.Metadata) // of a forged row; it is not used
	if c.Metadata == nil {
		c.Metadata = map[string]string{}
	}
	return c
}

func encodeMetadata(m map[string]string) string {
	b, _ := json.Marshal(m) // never fails: texts; keys are sorted
	return string(b)
}

// seal checks v and encrypts it into c, for its project, ID and version.
func (s *Store) seal(c *Secret, v Value) error {
	if err := v.check(c.Kind); err != nil {
		return err
	}
	var plain []byte
	for _, part := range []string{v.Text.Reveal(), v.AccessKey, v.SessionToken.Reveal()} {
		plain = binary.BigEndian.AppendUint32(plain, uint32(len(part)))
		plain = append(plain, part...)
	}
	defer clear(plain)
	c.sealed = s.keys.aead.Seal(nil, nil, plain, additional(c.Project, c.ID, c.Version)) //nolint:gosec // the nonce is random: NewGCMWithRandomNonce makes and prepends it
	return nil
}

// open decrypts the value of c. The caller wipes what it returns.
func (s *Store) open(c Secret) (text, accessKey, token []byte, err error) {
	s.conf.Scrub.Touch()
	plain, err := s.keys.aead.Open(nil, nil, c.sealed, additional(c.Project, c.ID, c.Version))
	if err != nil {
		return nil, nil, nil, fmt.Errorf("decrypt secret %s: %w", c.ID, ErrKey) // without the reason: it says nothing
	}
	defer clear(plain)
	var parts [3][]byte
	for i, rest := 0, plain; i < len(parts); i++ {
		if len(rest) < 4 || len(rest)-4 < int(binary.BigEndian.Uint32(rest)) {
			return nil, nil, nil, fmt.Errorf("decrypt secret %s: it is cut off", c.ID) // unreachable: it is authenticated
		}
		n := int(binary.BigEndian.Uint32(rest))
		parts[i], rest = slices.Clone(rest[4:4+n]), rest[4+n:]
	}
	return parts[0], parts[1], parts[2], nil
}

// set checks settings and takes them over.
func (c *Secret) set(set Settings) error {
	hosts, err := checkHosts(set.Hosts)
	if err != nil {
		return err
	}
	if set.Env == "" {
		set.Env = EnvOf(c.Name)
	}
	if err := checkEnv(set.Env); err != nil {
		return err
	}
	if set.Approval == "" {
		set.Approval = Never
	}
	if !slices.Contains(strictness, set.Approval) {
		return fmt.Errorf("%w: approval: %.40q is not always, first or never", ErrInvalid, set.Approval)
	}
	if err := checkMetadata(set.Metadata); err != nil {
		return err
	}
	if c.Headers, err = checkHeaders(set.Headers); err != nil {
		return err
	}
	if c.Places, err = checkPlaces(set.Places, hosts, c.Kind); err != nil {
		return err
	}
	c.Hosts, c.Env, c.Approval, c.Metadata = hosts, set.Env, set.Approval, maps.Clone(set.Metadata)
	if c.Metadata == nil {
		c.Metadata = map[string]string{}
	}
	return nil
}
