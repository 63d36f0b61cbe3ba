package mailbox

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/seal"
	"postern/internal/store"
)

// mayOpen returns the error of who may not read the inbox, in words that say
// what would. That a grant may was shown when its key was opened.
func mayOpen(who auth.Principal, inbox string) error {
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
	return fmt.Errorf("a %s manages inboxes and opens none, only the inbox's own key does: %w", who.Kind, auth.ErrForbidden)
}

// May returns an error that wraps [auth.ErrForbidden] unless k may do what want
// says in its inbox.
func May(k *seal.Key, want seal.Scope) error {
	if k.Allows(want) {
		return nil
	}
	return fmt.Errorf("this key may %s in inbox %s, not %s: %w", k.Scope().Verb(), k.Inbox(), want.Verb(), auth.ErrForbidden)
}

// membership is the part that a credential has in an inbox.
type membership struct {
	scope     seal.Scope
	publicKey []byte
	expires   int64
}

// nameForm is what the id or address of an inbox may look like; a database need
// not see anything else. It is compiled when it is first needed: each part of a
// sandbox is this program, and would otherwise compile it as it starts.
var nameForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9._@-]{3,320}$`) })

// Reach returns the inbox that name, an id or an address, means to who, and
// what who may do in it by a credential. An empty name is who's own inbox.
// Whether an inbox is somebody else's or is not there answers alike, so that
// nobody learns addresses by asking.
func (m *PostOffice) Reach(ctx context.Context, who auth.Principal, name string) (b Inbox, s seal.Scope, err error) {
	err = m.db.View(ctx, func(tx *store.Tx) error {
		b, s, err = m.reach(ctx, tx, who, name)
		return err
	})
	return b, s, err
}

func (m *PostOffice) reach(ctx context.Context, tx *store.Tx, who auth.Principal, name string) (Inbox, seal.Scope, error) {
	if who.Kind != auth.Grant {
		if err := mayOpen(who, who.Inbox); err != nil {
			return Inbox{}, "", err
		}
		if name == "" {
			name = who.Inbox
		}
	} else if name == "" {
		return Inbox{}, "", fmt.Errorf("%w: inbox: must be named, since a grant is over several", ErrInvalid)
	}
	b, err := Inbox{}, ErrNoInbox
	if nameForm().MatchString(name) {
		b, err = m.find(ctx, tx, name)
	}
	if err == nil && (b.Project != who.Project || who.Kind != auth.Grant && b.ID != who.Inbox) {
		err = ErrNoInbox
	}
	var p membership
	if err == nil && who.Kind != auth.Sandbox { // which has its part by what its creator attached
		p, err = member(ctx, tx, b.ID, who.ID)
	}
	if errors.Is(err, ErrNoInbox) || errors.Is(err, store.ErrNotFound) {
		if who.Kind == auth.Grant {
			return Inbox{}, "", fmt.Errorf("this grant is over other inboxes than the one named: %w", auth.ErrForbidden)
		}
		if name == who.Inbox {
			return Inbox{}, "", fmt.Errorf("inbox %s is deleted, or this key has no part in it: %w", who.Inbox, ErrNoInbox)
		}
		return Inbox{}, "", fmt.Errorf("this key is of another inbox than the one named; it opens inbox %s alone: %w", who.Inbox, auth.ErrForbidden)
	}
	return b, p.scope, err
}

// member returns the part that a credential has in an inbox now, or
// [store.ErrNotFound].
func member(ctx context.Context, tx *store.Tx, inbox, credentialID string) (membership, error) {
	var p membership
	err := tx.One(ctx, `select k.scope, k.public_key, k.expires_at from inbox_key k join credential c on c.id = k.credential_id
		where k.inbox_id = $1 and k.credential_id = $2 and (k.expires_at = 0 or k.expires_at > $3)
		and c.revoked_at = 0 and (c.expires_at = 0 or c.expires_at > $3)`,
		[]any{inbox, credentialID, store.Time(time.Now())}, &p.scope, &p.publicKey, &p.expires)
	return p, err
}

// Open returns the key of an inbox that credential opens; an empty inbox means
// the one that who acts for. Who is the credential's principal, as
// [auth.CheckKey] told.
func (m *PostOffice) Open(ctx context.Context, who auth.Principal, credential auth.Secret, inbox string) (*seal.Key, error) {
	if who.Kind != auth.Agent && who.Kind != auth.Grant {
		if err := mayOpen(who, who.Inbox); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("a %s shows no key of an inbox: %w", who.Kind, auth.ErrForbidden)
	}
	return m.unlock(ctx, who, credential, inbox)
}

// unlock opens an inbox for a credential of any kind.
func (m *PostOffice) unlock(ctx context.Context, who auth.Principal, credential auth.Secret, inbox string) (k *seal.Key, err error) {
	cred, err := seal.CredentialKey(credential.Reveal(), who.ID)
	if err != nil {
		return nil, err
	}
	var legacy bool
	err = m.db.View(ctx, func(tx *store.Tx) error {
		b, _, err := m.reach(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		k, legacy, err = m.unlockIn(ctx, tx, b, who, cred, credential)
		return err
	})
	if err != nil || !legacy {
		return k, err
	}
	if err := m.renew(ctx, k); err != nil {
		return nil, fmt.Errorf("give credential %s a key pair: %w", who.ID, err)
	}
	return k, nil
}

// unlockIn returns the key of b for a credential that has a part in it. Legacy
// says that the credential is from before credentials had key pairs; only then
// its secret is needed.
func (m *PostOffice) unlockIn(ctx context.Context, tx *store.Tx, b Inbox, who auth.Principal, cred seal.Credential, secret auth.Secret) (k *seal.Key, legacy bool, err error) {
	m.scrub.Touch()
	p, err := member(ctx, tx, b.ID, cred.ID)
	if errors.Is(err, store.ErrNotFound) {
		return nil, false, fmt.Errorf("%s has no key of inbox %s: %w", who, b.ID, auth.ErrForbidden)
	}
	if err != nil {
		return nil, false, fmt.Errorf("read key of inbox %s: %w", b.ID, err)
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

// renew stores the key pair of a credential that was made before there were
// any, and wraps the keys of its inbox for it anew.
func (m *PostOffice) renew(ctx context.Context, k *seal.Key) error {
	cred := k.Credential()
	list, err := k.WrapFor(cred.PublicKey(), cred.ID)
	if err != nil {
		return err
	}
	return m.db.Update(ctx, func(tx *store.Tx) error {
		fresh, err := tx.Changed(ctx, `update inbox_key set public_key = $1 where inbox_id = $2 and credential_id = $3 and length(public_key) = 0`,
			cred.PublicKey(), k.Inbox(), cred.ID)
		if err != nil || !fresh { // another request was faster
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

// enrol gives a credential, whose public key is to, a part in an inbox. Keys
// holds the keys of the inbox that the credential is to open.
func enrol(ctx context.Context, tx *store.Tx, who auth.Principal, inbox, credentialID string, to []byte, s seal.Scope, expires time.Time, keys seal.Wrapper) error {
	_, err := tx.ExecContext(ctx, `insert into inbox_key (inbox_id, credential_id, scope, public_key, expires_at, created_at, created_by) values ($1, $2, $3, $4, $5, $6, $7)`,
		inbox, credentialID, s, to, store.Time(expires), store.Time(time.Now()), who.String())
	if err != nil {
		return fmt.Errorf("insert inbox key: %w", err)
	}
	list, err := keys.WrapFor(to, credentialID)
	if err != nil {
		return err
	}
	return insertWrapped(ctx, tx, inbox, credentialID, list)
}

// insertWrapped stores private keys of an inbox that are closed for a credential.
func insertWrapped(ctx context.Context, tx *store.Tx, inbox, credentialID string, list []seal.Wrapped) error {
	for _, w := range list {
		if _, err := tx.ExecContext(ctx, `insert into inbox_wrap (inbox_id, credential_id, epoch, wrapped) values ($1, $2, $3, $4)`,
			inbox, credentialID, w.Epoch, w.Bytes); err != nil {
			return fmt.Errorf("insert inbox key: %w", err)
		}
	}
	return nil
}
