// Package keyring controls which credentials open which inboxes: keys of an
// inbox, grants for several inboxes, recovery keys, accounts, and keys lent to
// sandboxes.
//
// The private keys of inboxes are stored only wrapped for their credentials,
// and credentials only as hashes. So the server can open an inbox only while a
// caller presents one of its credentials, and a manager of the project cannot
// add itself: only a holder of a managing key can add members. When a
// credential is revoked or expires, its inboxes start a new epoch (see package
// seal) that it cannot open.
package keyring

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/scrub"
	"postern/internal/seal"
	"postern/internal/store"
)

// A Ring opens inboxes for their credentials, and adds and removes credentials.
// It is safe for concurrent use.
type Ring struct {
	db      *store.DB
	scrub   *scrub.Scrubber // touched whenever keys are open in this process
	removed atomic.Bool     // wrapped keys were deleted since the last Forget

	mu   sync.Mutex      // guards lent
	lent map[string]loan // by sandbox ID; in memory only, so loans end with the process
}

// New returns the keyring of the inboxes in db.
func New(db *store.DB, s *scrub.Scrubber) *Ring {
	return &Ring{db: db, scrub: s, lent: map[string]loan{}}
}

// MayOpen returns an error that wraps [auth.ErrForbidden] unless who may read
// the inbox whose key it holds. The text names the kind of key that could. For
// a grant, opening the key has already checked it.
func MayOpen(who auth.Principal, inbox string) error {
	switch who.Kind {
	case auth.Agent, auth.Sandbox:
		if who.Inbox != "" && who.Inbox == inbox {
			return nil
		}
		return fmt.Errorf("%s has no key of inbox %s: %w", who, inbox, auth.ErrForbidden)
	case auth.Grant:
		return nil
	case auth.Recovery:
		return fmt.Errorf("a recovery key makes a new key of its inbox and does nothing else: %w", auth.ErrForbidden)
	case auth.Project, auth.Person, auth.System:
	}
	return fmt.Errorf("a %s manages inboxes but cannot open them: only an inbox's own key can: %w", who.Kind, auth.ErrForbidden)
}

// May returns an error that wraps [auth.ErrForbidden] unless the scope of k
// includes want.
func May(k *seal.Key, want seal.Scope) error {
	if k.Allows(want) {
		return nil
	}
	return Lacks(k.Inbox(), k.Scope(), want)
}

// Lacks returns the error for a key with the scope has in an inbox, where want is
// needed. It wraps [auth.ErrForbidden].
func Lacks(inbox string, has, want seal.Scope) error {
	return fmt.Errorf("this key may %s in inbox %s, not %s: use one of its keys with scope %s: %w", has.Verb(), inbox, want.Verb(), want, auth.ErrForbidden)
}

// A membership is one credential's row in an inbox: its scope and its public
// key.
type membership struct {
	scope     seal.Scope
	publicKey []byte
	expires   int64
}

// Reach returns the inbox called name, an ID or an address, and the scope that
// who has in it. An empty name means who's own inbox. An inbox that belongs to
// somebody else and one that does not exist give the same error, so that nobody
// can probe for addresses.
func (r *Ring) Reach(ctx context.Context, who auth.Principal, name string) (b directory.Inbox, s seal.Scope, err error) {
	err = r.db.Look(ctx, func(tx *store.Tx) error {
		b, s, err = r.ReachIn(ctx, tx, who, name)
		return err
	})
	return b, s, err
}

// ReachIn is [Ring.Reach] within tx.
func (r *Ring) ReachIn(ctx context.Context, tx *store.Tx, who auth.Principal, name string) (directory.Inbox, seal.Scope, error) {
	if who.Kind != auth.Grant {
		if err := MayOpen(who, who.Inbox); err != nil {
			return directory.Inbox{}, "", err
		}
		if name == "" {
			name = who.Inbox
		}
	} else if name == "" {
		return directory.Inbox{}, "", fmt.Errorf("%w: inbox: is required: a grant may cover several inboxes", directory.ErrInvalid)
	}
	b, err := directory.Inbox{}, directory.ErrNoInbox
	if directory.ValidName(name) {
		b, err = directory.Lookup(ctx, tx, name)
	}
	if err == nil && (b.Project != who.Project || who.Kind != auth.Grant && b.ID != who.Inbox) {
		err = directory.ErrNoInbox
	}
	var p membership
	if err == nil && who.Kind != auth.Sandbox { // a sandbox is authorized by the inbox that its creator attached
		p, err = member(ctx, tx, b.ID, who.ID)
	}
	if errors.Is(err, directory.ErrNoInbox) || errors.Is(err, store.ErrNotFound) {
		if who.Kind == auth.Grant {
			return directory.Inbox{}, "", fmt.Errorf("this grant is over other inboxes than the one named: %w", auth.ErrForbidden)
		}
		if name == who.Inbox {
			return directory.Inbox{}, "", fmt.Errorf("inbox %s is deleted, or this key no longer opens it: %w", who.Inbox, directory.ErrNoInbox)
		}
		return directory.Inbox{}, "", fmt.Errorf("this key belongs to another inbox: it opens only inbox %s: %w", who.Inbox, auth.ErrForbidden)
	}
	return b, p.scope, err
}

// member returns the unexpired membership of a credential in an inbox, or an
// error that wraps [store.ErrNotFound].
func member(ctx context.Context, tx *store.Tx, inbox, credentialID string) (membership, error) {
	var p membership
	err := tx.One(ctx, `select k.scope, k.public_key, k.expires_at from inbox_key k join credential c on c.id = k.credential_id
		where k.inbox_id = $1 and k.credential_id = $2 and (k.expires_at = 0 or k.expires_at > $3)
		and c.revoked_at = 0 and (c.expires_at = 0 or c.expires_at > $3)`,
		[]any{inbox, credentialID, store.Time(time.Now())}, &p.scope, &p.publicKey, &p.expires)
	return p, err
}

// Open returns the key of an inbox that credential opens. An empty inbox means
// the one that who acts for. A credential whose scope lacks [seal.Read] opens none:
// [Ring.Reach] says what else it may do. Who is the principal of the credential, as
// returned by [auth.CheckKey].
func (r *Ring) Open(ctx context.Context, who auth.Principal, credential auth.Secret, inbox string) (*seal.Key, error) {
	if who.Kind != auth.Agent && who.Kind != auth.Grant {
		if err := MayOpen(who, who.Inbox); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("a %s shows no key of an inbox: %w", who.Kind, auth.ErrForbidden)
	}
	return r.unlock(ctx, who, credential, inbox)
}

// unlock opens an inbox for a credential of any kind.
func (r *Ring) unlock(ctx context.Context, who auth.Principal, credential auth.Secret, inbox string) (k *seal.Key, err error) {
	cred, err := seal.CredentialKey(credential.Reveal(), who.ID)
	if err != nil {
		return nil, err
	}
	var legacy bool
	err = r.db.View(ctx, func(tx *store.Tx) error {
		b, _, err := r.ReachIn(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		k, legacy, err = r.unlockIn(ctx, tx, b, who, cred, credential)
		return err
	})
	if err != nil || !legacy {
		return k, err
	}
	if err := r.renew(ctx, k); err != nil {
		return nil, fmt.Errorf("give credential %s a key pair: %w", who.ID, err)
	}
	return k, nil
}

// unlockIn returns the key of b for a member credential. Secret is needed only
// for a credential that was created before credentials had key pairs; legacy
// then is true, and the caller migrates it.
func (r *Ring) unlockIn(ctx context.Context, tx *store.Tx, b directory.Inbox, who auth.Principal, cred seal.Credential, secret auth.Secret) (k *seal.Key, legacy bool, err error) {
	r.scrub.Touch()
	p, err := member(ctx, tx, b.ID, cred.ID)
	if errors.Is(err, store.ErrNotFound) {
		return nil, false, fmt.Errorf("%s has no key of inbox %s: %w", who, b.ID, auth.ErrForbidden)
	}
	if err != nil {
		return nil, false, fmt.Errorf("read key of inbox %s: %w", b.ID, err)
	}
	if !p.scope.Opens() { // nothing is wrapped for it
		return nil, false, Lacks(b.ID, p.scope, seal.Read)
	}
	epochs, err := store.List(ctx, tx, func(row func(...any) error) (e seal.Epoch, err error) {
		return e, row(&e.Number, &e.Wrapped, &e.Public)
	}, `select w.epoch, w.wrapped, e.public_key from inbox_wrap w
		join inbox_epoch e on e.inbox_id = w.inbox_id and e.epoch = w.epoch
		where w.inbox_id = $1 and w.credential_id = $2 order by w.epoch`, b.ID, cred.ID)
	if err == nil && len(epochs) == 0 {
		err = store.ErrNotFound
	}
	if err != nil {
		return nil, false, fmt.Errorf("read key of inbox %s: %w", b.ID, err)
	}
	if legacy = len(p.publicKey) == 0; legacy {
		k, err = seal.NewLegacyKey(b.ID, p.scope, cred, secret.Reveal(), epochs)
	} else {
		k, err = seal.NewKey(b.ID, p.scope, cred, epochs)
	}
	return k, legacy, err
}

// renew migrates a credential from before credentials had key pairs: it stores
// its public key and wraps the keys of its inbox for it.
func (r *Ring) renew(ctx context.Context, k *seal.Key) error {
	cred := k.Credential()
	list, err := k.WrapFor(cred.PublicKey(), cred.ID)
	if err != nil {
		return err
	}
	return r.db.Update(ctx, func(tx *store.Tx) error {
		fresh, err := tx.Changed(ctx, `update inbox_key set public_key = $1 where inbox_id = $2 and credential_id = $3 and length(public_key) = 0`,
			cred.PublicKey(), k.Inbox(), cred.ID)
		if err != nil || !fresh { // another request has migrated it
			return err
		}
		for _, w := range list {
			if _, err := tx.ExecContext(ctx, `update inbox_wrap set wrapped = $1 where inbox_id = $2 and credential_id = $3 and epoch = $4`,
				w.Bytes, k.Inbox(), cred.ID, w.Epoch); err != nil {
				return err
			}
		}
		return nil
	})
}

// AddFirst creates the first key of a new inbox, whose secret is returned only
// this once. Scope is what it may do: an inbox whose first key lacks [seal.Manage] never
// gets another. If account is not nil, it is the public key of the account that who is,
// which becomes a member too.
func (r *Ring) AddFirst(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, pair seal.Pair, account []byte, scope seal.Scope) (id string, key auth.Secret, err error) {
	id, key, err = auth.NewCredential(ctx, tx, auth.Credential{Project: b.Project, Kind: auth.Agent, Inbox: b.ID, CreatedBy: who.String()})
	if err != nil {
		return "", "", err
	}
	cred, err := seal.CredentialKey(key.Reveal(), id)
	if err != nil {
		return "", "", err
	}
	if err := enrol(ctx, tx, who, b.ID, id, cred.PublicKey(), scope, time.Time{}, pair); err != nil {
		return "", "", err
	}
	if account == nil {
		return id, key, nil
	}
	return id, key, enrol(ctx, tx, who, b.ID, who.ID, account, seal.Manage, time.Time{}, pair)
}

// enrol makes a credential with the public key to a member of an inbox. Keys
// holds the private keys of the inbox, which are wrapped for it if its scope opens
// mail; otherwise keys may be nil.
func enrol(ctx context.Context, tx *store.Tx, who auth.Principal, inbox, credentialID string, to []byte, s seal.Scope, expires time.Time, keys seal.Wrapper) error {
	_, err := tx.ExecContext(ctx, `insert into inbox_key (inbox_id, credential_id, scope, public_key, expires_at, created_at, created_by) values ($1, $2, $3, $4, $5, $6, $7)`,
		inbox, credentialID, s, to, store.Time(expires), store.Time(time.Now()), who.String())
	if err != nil {
		return fmt.Errorf("insert inbox key: %w", err)
	}
	if !s.Opens() {
		return nil
	}
	list, err := keys.WrapFor(to, credentialID)
	if err != nil {
		return err
	}
	return insertWrapped(ctx, tx, inbox, credentialID, list)
}

// insertWrapped stores the private keys of an inbox that are wrapped for one
// credential.
func insertWrapped(ctx context.Context, tx *store.Tx, inbox, credentialID string, list []seal.Wrapped) error {
	for _, w := range list {
		if _, err := tx.ExecContext(ctx, `insert into inbox_wrap (inbox_id, credential_id, epoch, wrapped) values ($1, $2, $3, $4)`,
			inbox, credentialID, w.Epoch, w.Bytes); err != nil {
			return fmt.Errorf("insert inbox key: %w", err)
		}
	}
	return nil
}

// Holds reports whether a credential is a member of an inbox now.
func Holds(ctx context.Context, tx *store.Tx, credential, inbox string) (bool, error) {
	_, err := member(ctx, tx, inbox, credential)
	if errors.Is(err, store.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}
