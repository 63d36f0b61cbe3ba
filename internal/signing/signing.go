// Package signing manages the keys that sign outgoing mail, and signs with them:
// DKIM (RFC 6376) with RSA and Ed25519 (RFC 8463), and the statements of package
// statement. It also signs the audit's checkpoints, the identity tokens of sandboxes
// and the statements of runs (package attest).
//
// The life of a key:
//
//	created, published ── in use ── published only ── removed
//
// A key signs from its start time until the start time of the next key of its kind.
// Rotation creates the next key with a start time in the future, so that DNS caches
// have its record before it signs. [Ring.Check] starts it earlier, once it has seen
// the record. A former key stays published, for mail in transit, until a person
// removes it. Nothing else changes a key.
//
// Private keys are stored only in the database, encrypted under a key derived from
// the server's, which is in a separate file. This package does not decide what is
// signed: it adds fields in front of a message and changes no byte of it.
package signing

import (
	"bytes"
	"context"
	"crypto"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/statement"
	"postern/internal/store"
)

// Kind is what a key is for.
type Kind string

// The kinds.
const (
	DKIMRSA     Kind = "dkim-rsa"
	DKIMEd25519 Kind = "dkim-ed25519"
	Statement   Kind = "statement"
	Checkpoint  Kind = "checkpoint" // of the audit; not of a domain, see [Ring.CheckpointSigner]
	Identity    Kind = "identity"   // of tokens of sandboxes; not of a domain, see [Issuer]
	Run         Kind = "run"        // of statements of runs; not of a domain, see [Ring.RunSigner]
)

var kinds = []Kind{DKIMRSA, DKIMEd25519, Statement}

// idSuffix is the last letter of key IDs, by kind: "p20261121r".
var idSuffix = map[Kind]string{DKIMRSA: "r", DKIMEd25519: "e", Statement: "s", Checkpoint: "c", Identity: "i", Run: "r"}

// The errors of this package, one for each answer that a door can give.
var (
	// ErrNotFound means that there is no such domain or key.
	ErrNotFound = errors.New("no such signing key")
	// ErrInUse means that a key signs now or later, and so cannot be removed.
	ErrInUse = errors.New("the key is in use")
)

// Config is the configuration of a [Ring].
type Config struct {
	// Key is the server's key, at least 32 bytes. The key that encrypts private keys
	// is derived from it.
	Key []byte
	// Wait is how long a new key is published before it signs, unless
	// [Ring.Check] sees its record earlier; zero means 48 hours.
	Wait time.Duration
	// Resolver looks up records; nil means the system's resolver.
	Resolver *net.Resolver
}

// A Ring manages the keys of all domains. It is safe for concurrent use.
type Ring struct {
	db   *store.DB
	conf Config
	aead cipher.AEAD

	mu     sync.Mutex               // guards opened
	opened map[string]crypto.Signer // decrypted keys, by domain and ID
}

// New returns the ring of the keys in db.
func New(db *store.DB, c Config) (*Ring, error) {
	if len(c.Key) < 32 {
		return nil, errors.New("signing: the server's key has fewer than 32 bytes")
	}
	if c.Wait <= 0 {
		c.Wait = 48 * time.Hour
	}
	if c.Resolver == nil {
		c.Resolver = net.DefaultResolver
	}
	key, err := hkdf.Key(sha256.New, c.Key, nil, "postern signing key v1", 32)
	if err != nil {
		return nil, fmt.Errorf("derive key for signing keys: %w", err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("derive key for signing keys: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("derive key for signing keys: %w", err)
	}
	return &Ring{db: db, conf: c, aead: aead, opened: map[string]crypto.Signer{}}, nil
}

// A Key is the public half of a key with its times.
type Key struct {
	Domain  string
	ID      string // DKIM's selector
	Kind    Kind
	Created time.Time
	From    time.Time // start time
	Until   time.Time // start time of the next key; zero while there is none
	Removed time.Time // zero while it is published

	public, private []byte // private is sealed
}

// InUse reports whether k signs at t.
func (k Key) InUse(t time.Time) bool {
	return k.Removed.IsZero() && !k.From.After(t) && (k.Until.IsZero() || k.Until.After(t))
}

// Name is where the DKIM record of k is published; empty for other kinds.
func (k Key) Name() string {
	if k.Kind != DKIMRSA && k.Kind != DKIMEd25519 {
		return ""
	}
	return k.ID + "._domainkey." + k.Domain
}

// Record is the TXT record of k at its [Key.Name]; empty for other kinds.
func (k Key) Record() string {
	switch k.Kind {
	case DKIMRSA:
		return "v=DKIM1; k=rsa; p=" + base64.StdEncoding.EncodeToString(k.public)
	case DKIMEd25519:
		return "v=DKIM1; k=ed25519; p=" + base64.StdEncoding.EncodeToString(k.public)
	case Statement, Checkpoint, Identity, Run:
	}
	return ""
}

// Keys returns the keys of a domain that are published, newest first.
func (r *Ring) Keys(ctx context.Context, domain string) (out []Key, err error) {
	err = r.db.View(ctx, func(tx *store.Tx) error {
		out, err = list(ctx, tx, domain)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list signing keys of %s: %w", domain, err)
	}
	return slices.DeleteFunc(out, func(k Key) bool { return !k.Removed.IsZero() }), nil
}

// PublicRecord returns the name and the text of the DNS record of a selector.
func (r *Ring) PublicRecord(ctx context.Context, domain, selector string) (name, text string, err error) {
	ks, err := r.Keys(ctx, domain)
	if err != nil {
		return "", "", err
	}
	for _, k := range ks {
		if k.ID == selector && k.Record() != "" {
			return k.Name(), k.Record(), nil
		}
	}
	return "", "", fmt.Errorf("selector %q of %s: %w", selector, domain, ErrNotFound)
}

// StatementKeys returns all statement keys of a domain, including removed ones, with
// the times between which their signatures are valid. A removed key ends at its
// removal at the latest.
func (r *Ring) StatementKeys(ctx context.Context, domain string) (out []statement.Key, err error) {
	err = r.db.View(ctx, func(tx *store.Tx) error {
		ks, err := list(ctx, tx, domain)
		for _, k := range ks {
			if k.Kind != Statement {
				continue
			}
			until := k.Until
			if !k.Removed.IsZero() && (until.IsZero() || k.Removed.Before(until)) {
				until = k.Removed
			}
			out = append(out, statement.Key{ID: k.ID, Domain: k.Domain, Public: k.public, From: k.From, Until: until})
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list statement keys of %s: %w", domain, err)
	}
	return out, nil
}

// list returns all keys of a domain, newest first, and sets Until from the start
// time of the next key of the same kind.
func list(ctx context.Context, tx *store.Tx, domain string) (out []Key, err error) {
	rows, err := tx.QueryContext(ctx, `select domain, id, kind, public, private, created_at, use_from, removed_at from signing_key
		where domain = $1 order by use_from desc, id desc`, strings.ToLower(domain))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	next := map[Kind]time.Time{}
	for rows.Next() {
		var k Key
		var created, from, removed int64
		if err := rows.Scan(&k.Domain, &k.ID, &k.Kind, &k.public, &k.private, &created, &from, &removed); err != nil {
			return nil, err
		}
		k.Created, k.From, k.Removed = store.FromTime(created), store.FromTime(from), store.FromTime(removed)
		k.Until = next[k.Kind]
		if k.Removed.IsZero() {
			next[k.Kind] = k.From
		}
		out = append(out, k)
	}
	return out, rows.Err()
}

// Prepare creates the first keys of a domain, which sign at once. It does nothing for
// kinds that exist. Several servers may call it at the same time.
func (r *Ring) Prepare(ctx context.Context, domain string) error {
	domain = strings.ToLower(domain)
	ks, err := r.Keys(ctx, domain)
	if err != nil {
		return err
	}
	for _, kind := range kinds {
		if slices.ContainsFunc(ks, func(k Key) bool { return k.Kind == kind }) {
			continue
		}
		// Servers that do this at the same time choose the same ID, and one insert wins.
		if err := r.add(ctx, auth.Principal{Kind: auth.System, ID: "signing"}, domain, kind, time.Now(), 0); err != nil {
			return err
		}
	}
	return nil
}

// add creates a key that signs after wait. It does nothing if its ID exists.
func (r *Ring) add(ctx context.Context, who auth.Principal, domain string, kind Kind, now time.Time, wait time.Duration) error {
	k := Key{Domain: domain, Kind: kind, ID: "p" + now.UTC().Format("20060102") + idSuffix[kind]}
	if wait > 0 { // a rotation: there may be several in one day
		k.ID = "p" + now.UTC().Format("20060102150405") + idSuffix[kind]
	}
	private, err := generate(&k)
	if err != nil {
		return err
	}
	sealed := r.aead.Seal(nil, nil, private, []byte(domain+"\x00"+k.ID)) //nolint:gosec // the nonce is random: NewGCMWithRandomNonce makes and prepends it
	return r.db.Update(ctx, func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `insert into signing_key (domain, id, kind, public, private, created_at, use_from, removed_at)
			values ($1, $2, $3, $4, $5, $6, $7, 0) on conflict do nothing`,
			domain, k.ID, kind, k.public, sealed, store.Time(now), store.Time(now.Add(wait)))
		if err != nil || !ok {
			return err
		}
		return audit.Append(ctx, tx, who, audit.SignIngAdd, domain, audit.Fields{"key": k.ID, "kind": string(kind), "from": now.Add(wait).UTC().Format(time.RFC3339)})
	})
}

// generate creates a key pair, sets k.public and returns the private key in PKCS #8.
func generate(k *Key) (private []byte, err error) {
	if k.Kind == DKIMRSA {
		key, err := rsa.GenerateKey(rand.Reader, 2048)
		if err != nil {
			return nil, fmt.Errorf("generate rsa key: %w", err)
		}
		if k.public, err = x509.MarshalPKIXPublicKey(key.Public()); err != nil {
			return nil, fmt.Errorf("generate rsa key: %w", err)
		}
		return x509.MarshalPKCS8PrivateKey(key)
	}
	if k.Kind == Identity {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return nil, fmt.Errorf("generate ecdsa key: %w", err)
		}
		if k.public, err = x509.MarshalPKIXPublicKey(key.Public()); err != nil {
			return nil, fmt.Errorf("generate ecdsa key: %w", err)
		}
		return x509.MarshalPKCS8PrivateKey(key)
	}
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generate ed25519 key: %w", err)
	}
	k.public = public
	return x509.MarshalPKCS8PrivateKey(key)
}

// mayManage returns [auth.ErrForbidden] unless who is a person. The caller has
// checked that the domain belongs to who's project.
func mayManage(who auth.Principal) error {
	if who.Kind != auth.Person {
		return fmt.Errorf("%s may not manage signing keys, only a person may: %w", who, auth.ErrForbidden)
	}
	return nil
}

// Rotate creates the next keys of a domain and returns all keys. They sign after
// [Config.Wait], or once [Ring.Check] has seen their records. It does nothing for
// kinds whose next key exists already.
func (r *Ring) Rotate(ctx context.Context, who auth.Principal, domain string) ([]Key, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return nil, err
	}
	if err := mayManage(who); err != nil {
		return nil, err
	}
	domain = strings.ToLower(domain)
	ks, err := r.Keys(ctx, domain)
	if err != nil {
		return nil, err
	}
	if len(ks) == 0 {
		return nil, fmt.Errorf("domain %q: %w", domain, ErrNotFound)
	}
	now := time.Now()
	for _, kind := range kindsOf(domain) {
		if slices.ContainsFunc(ks, func(k Key) bool { return k.Kind == kind && k.From.After(now) }) {
			continue
		}
		wait := r.conf.Wait
		if kind == Statement || kind == Checkpoint || kind == Identity || kind == Run {
			wait = time.Hour // this server publishes it, in a document that others may cache
		}
		if err := r.add(ctx, who, domain, kind, now, wait); err != nil {
			return nil, err
		}
	}
	return r.Keys(ctx, domain)
}

// Remove stops publishing a former key and deletes its private half.
func (r *Ring) Remove(ctx context.Context, who auth.Principal, domain, id string) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	if err := mayManage(who); err != nil {
		return err
	}
	return r.db.Update(ctx, func(tx *store.Tx) error {
		ks, err := list(ctx, tx, domain)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(ks, func(k Key) bool { return k.ID == id && k.Removed.IsZero() })
		if i < 0 {
			return fmt.Errorf("key %q of %s: %w", id, domain, ErrNotFound)
		}
		if ks[i].Until.IsZero() || ks[i].Until.After(time.Now()) {
			return fmt.Errorf("key %s of %s signs now or later: rotate, and remove it once the next key signs: %w", id, domain, ErrInUse)
		}
		// The private half is deleted; the public one still verifies old statements.
		_, err = tx.ExecContext(ctx, `update signing_key set removed_at = $1, private = $2 where domain = $3 and id = $4`,
			store.Time(time.Now()), []byte{}, ks[i].Domain, id)
		if err != nil {
			return fmt.Errorf("remove signing key: %w", err)
		}
		return audit.Append(ctx, tx, who, audit.SignIngRemove, ks[i].Domain, audit.Fields{"key": id})
	})
}

// A Published is a key with the result of the lookup of its record.
type Published struct {
	Key
	Found  bool
	Detail string // for people: what was found; printable
}

var keyTag = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`(?:^|;)\s*p\s*=([^;]*)`) })

// Check looks up the records of a domain's DKIM keys. Keys with a start time in the
// future start now if their record was found.
func (r *Ring) Check(ctx context.Context, who auth.Principal, domain string) ([]Published, error) {
	if err := auth.Need(who, auth.Reviewer); err != nil {
		return nil, err
	}
	if err := mayManage(who); err != nil {
		return nil, err
	}
	ks, err := r.Keys(ctx, domain)
	if err != nil {
		return nil, err
	}
	if len(ks) == 0 {
		return nil, fmt.Errorf("domain %q: %w", domain, ErrNotFound)
	}
	var out []Published
	for _, k := range ks {
		if k.Name() == "" {
			continue
		}
		p := Published{Key: k}
		p.Found, p.Detail = r.published(ctx, k)
		if p.Found && k.From.After(time.Now()) {
			if err := r.startUsing(ctx, who, k); err != nil {
				return nil, err
			}
			p.From = time.Now()
		}
		out = append(out, p)
	}
	return out, nil
}

// published looks up the record of k. The detail is a sentence for people.
func (r *Ring) published(ctx context.Context, k Key) (found bool, detail string) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	// The final dot keeps the resolver from trying search domains.
	texts, err := r.conf.Resolver.LookupTXT(ctx, k.Name()+".")
	var dnsErr *net.DNSError
	switch {
	case errors.As(err, &dnsErr) && dnsErr.IsNotFound:
		return false, "there is no TXT record at " + k.Name()
	case err != nil:
		return false, "the DNS lookup failed: " + strconv.Quote(err.Error())
	}
	for _, t := range texts {
		m := keyTag().FindStringSubmatch(t)
		if m == nil {
			continue
		}
		b, err := base64.StdEncoding.DecodeString(strings.Join(strings.Fields(m[1]), ""))
		if err == nil && bytes.Equal(b, k.public) {
			return true, "published"
		}
	}
	return false, "the TXT record at " + k.Name() + " has another key"
}

// startUsing makes a key sign from now on, unless it does.
func (r *Ring) startUsing(ctx context.Context, who auth.Principal, k Key) error {
	return r.db.Update(ctx, func(tx *store.Tx) error {
		now := store.Time(time.Now())
		ok, err := tx.Changed(ctx, `update signing_key set use_from = $1 where domain = $2 and id = $3 and use_from > $1 and removed_at = 0`, now, k.Domain, k.ID)
		if err != nil || !ok {
			return err
		}
		return audit.Append(ctx, tx, who, audit.SignIngUse, k.Domain, audit.Fields{"key": k.ID})
	})
}
