package keyring

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/seal"
	"postern/internal/store"
)

// A context grant lets one reviewer read, in the console, the threads of an inbox's waiting
// actions. Its life:
//
//	made       by a holder of a full key of the inbox, for a person by name; the code
//	           (pcx_…) is returned once
//	redeemed   by that person, signed in: a new credential replaces that of the code; its
//	           secret is encrypted under the key of this browser and shown to nobody
//	open       for one request of that person in that browser, in memory
//	gone       at its expiry, or when a manager of the inbox or the person ends it
//
// The database has the new secret only encrypted under the browser's key, and the browser
// has only that key. So neither a copied database nor a copied cookie opens anything. A row
// that is moved to another person, inbox or credential does not open with any key.

var (
	// ErrContextCode means that a code is not for this person, was used, or has expired.
	// There is one error for all three, so that guessing reveals nothing.
	ErrContextCode = errors.New("this code is not for you, was used already, or has expired")
	// ErrNoContext means that a person has no context grant for an inbox in this browser.
	ErrNoContext = errors.New("no context grant in this browser")
)

// ContextCodeTime is how long the code of a context grant can be redeemed.
const ContextCodeTime = 7 * 24 * time.Hour

// A ContextGrant lets a person read the threads of an inbox's waiting actions.
type ContextGrant struct {
	ID        string // of its credential
	Inbox     string // id
	Person    string // name of the account that may redeem it
	Created   time.Time
	CreatedBy string // a principal
	Expires   time.Time
	Redeemed  time.Time // zero if its code was not redeemed yet
	Browser   string    // name of the browser that redeemed it; hostile
	Here      bool      // the request comes from that browser
}

// contextPlace is the context to which the secret of a grant is bound.
func contextPlace(credential, inbox, person string) string {
	return "postern context v1\x00" + credential + "\x00" + inbox + "\x00" + person
}

// AddContext makes a context grant for a person of the inbox's project; k must manage the
// inbox. It returns the code, which cannot be read again. It does not report whether the
// person exists, because a key of an inbox must not learn the names of accounts.
func (r *Ring) AddContext(ctx context.Context, who auth.Principal, k *seal.Key, person string, expires time.Time) (g ContextGrant, code auth.Secret, err error) {
	n := NewKey{Name: person, Scope: seal.Read, Expires: expires}
	if err := n.checkGrant(); err != nil {
		return g, "", err
	}
	if person = strings.TrimSpace(person); person == "" {
		return g, "", fmt.Errorf("%w: person: must be the name of an account", directory.ErrInvalid)
	}
	err = r.hold(ctx, who, k, seal.Manage, func(tx *store.Tx, b directory.Inbox, k *seal.Key) error {
		g = ContextGrant{Inbox: b.ID, Person: person, Created: time.Now(), CreatedBy: who.String(), Expires: expires}
		c := auth.Credential{Kind: auth.ContextKey, Inbox: b.ID, Name: person, Expires: expires}
		if g.ID, code, err = issue(ctx, tx, who, b, k, c, seal.Context); err != nil {
			return err
		}
		if err := insertContext(ctx, tx, b.Project, g, "", nil, nil); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.InboxContext, b.ID, audit.Fields{"credential": g.ID, "person": person, "ends": ends(expires)})
	})
	return g, code, err
}

func insertContext(ctx context.Context, tx *store.Tx, project string, g ContextGrant, person string, device, sealed []byte) error {
	if device == nil {
		device, sealed = []byte{}, []byte{}
	}
	_, err := tx.ExecContext(ctx, `insert into context_grant (credential_id, inbox_id, project_id, person, person_id, device, sealed, browser, created_at, created_by, redeemed_at)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)`,
		g.ID, g.Inbox, project, g.Person, person, device, sealed, g.Browser, store.Time(g.Created), g.CreatedBy, store.Time(g.Redeemed))
	if err != nil {
		return fmt.Errorf("insert context grant: %w", err)
	}
	return nil
}

// mayRedeem returns an error unless who is a person who may decide.
func mayRedeem(who auth.Principal) error {
	if !who.Decides() {
		return fmt.Errorf("%s may not read the threads of actions, only a reviewer may: %w", who, auth.ErrForbidden)
	}
	return nil
}

// RedeemContext exchanges a code for a grant that works in one browser, whose key is
// device. Afterwards the code opens nothing, because it may have been sent by mail or chat.
func (r *Ring) RedeemContext(ctx context.Context, who auth.Principal, code, device auth.Secret, browser string) (g ContextGrant, err error) {
	if err := mayRedeem(who); err != nil {
		return g, err
	}
	if !auth.IsContextCode(code) || device == "" {
		return g, ErrContextCode
	}
	err = r.db.Update(ctx, func(tx *store.Tx) error {
		old, err := contextOf(ctx, tx, who, code)
		if err != nil {
			return err
		}
		if err := lockInbox(ctx, tx, old.Inbox); err != nil {
			return err
		}
		part, err := onePart(ctx, tx, old.Inbox, old.ID) // of two concurrent calls only one finds it
		if errors.Is(err, ErrNoKey) {
			return ErrContextCode
		}
		if err != nil {
			return err
		}
		b, err := directory.LookupFor(ctx, tx, who, old.Inbox)
		if err != nil {
			return err
		}
		person, err := personID(ctx, tx, who)
		if err != nil {
			return err
		}
		g = ContextGrant{Inbox: b.ID, Person: who.ID, Created: old.Created, CreatedBy: old.CreatedBy, Expires: part.Expires, Redeemed: time.Now(), Browser: shortened(browser, 200), Here: true}
		if err := r.exchange(ctx, tx, who, b, part, code, device, person, &g); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.InboxContextUse, b.ID, audit.Fields{"credential": g.ID, "replaces": old.ID, "person": who.ID})
	})
	return g, err
}

// exchange replaces the credential of a code by a new one for g. tx must hold the lock of b.
func (r *Ring) exchange(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, old Part, code, device auth.Secret, person string, g *ContextGrant) error {
	cred, err := seal.CredentialKey(code.Reveal(), old.Credential)
	if err != nil {
		return err
	}
	k, _, err := r.unlockIn(ctx, tx, b, who, cred, "")
	if err != nil {
		return err
	}
	id, secret, err := issue(ctx, tx, who, b, k, auth.Credential{Kind: auth.ContextKey, Inbox: b.ID, Name: who.ID, Expires: old.Expires}, seal.Context)
	if err != nil {
		return err
	}
	sealed, err := seal.UnderToken(device.Reveal(), contextPlace(id, b.ID, person), secret.Reveal())
	if err != nil {
		return err
	}
	if g.ID = id; insertContext(ctx, tx, b.Project, *g, person, device.Digest(), sealed) != nil {
		return fmt.Errorf("insert context grant of inbox %s", b.ID)
	}
	return r.dropAndRekey(ctx, tx, who, old, "redeemed")
}

// contextOf returns the grant of a code if who may redeem it now.
func contextOf(ctx context.Context, tx *store.Tx, who auth.Principal, code auth.Secret) (g ContextGrant, err error) {
	var created int64
	now := time.Now()
	err = tx.One(ctx, `select g.credential_id, g.inbox_id, g.created_at, g.created_by from context_grant g join credential c on c.id = g.credential_id
		where c.hash = $1 and c.kind = $2 and g.project_id = $3 and g.person = $4 and g.redeemed_at = 0 and g.created_at > $5 and c.revoked_at = 0 and c.expires_at > $6`,
		[]any{code.Digest(), auth.ContextKey, who.Project, who.ID, store.Time(now.Add(-ContextCodeTime)), store.Time(now)}, &g.ID, &g.Inbox, &created, &g.CreatedBy)
	if errors.Is(err, store.ErrNotFound) {
		return g, ErrContextCode
	}
	g.Created = store.FromTime(created)
	return g, err
}

// personID returns the ID of a person's account. Unlike a name, an ID is never reused.
func personID(ctx context.Context, tx *store.Tx, who auth.Principal) (id string, err error) {
	err = tx.One(ctx, `select id from person where name = $1 and project_id = $2 and disabled_at = 0`, []any{who.ID, who.Project}, &id)
	if errors.Is(err, store.ErrNotFound) {
		return "", fmt.Errorf("%s has no account here: %w", who, auth.ErrForbidden)
	}
	return id, err
}

// OpenContext returns the key to the threads of an inbox's waiting actions, for the person
// who and the browser whose key is device. The error wraps [ErrNoContext] if there is no
// such grant. The key has the scope [seal.Context] and must not outlive the request.
func (r *Ring) OpenContext(ctx context.Context, who auth.Principal, device auth.Secret, inbox string) (k *seal.Key, err error) {
	if err := mayRedeem(who); err != nil {
		return nil, err
	}
	if device == "" {
		return nil, ErrNoContext
	}
	err = r.db.View(ctx, func(tx *store.Tx) error {
		b, err := directory.LookupFor(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		person, err := personID(ctx, tx, who)
		if err != nil {
			return err
		}
		var id string
		var sealed []byte
		err = tx.One(ctx, `select g.credential_id, g.sealed from context_grant g join credential c on c.id = g.credential_id
			where g.person_id = $1 and g.inbox_id = $2 and g.project_id = $3 and g.device = $4 and g.redeemed_at > 0 and c.revoked_at = 0 and c.expires_at > $5
			order by c.expires_at desc limit 1`, []any{person, b.ID, who.Project, device.Digest(), store.Time(time.Now())}, &id, &sealed)
		if errors.Is(err, store.ErrNotFound) {
			return ErrNoContext
		}
		if err != nil {
			return err
		}
		// The attack: somebody who can write the database assigns the row to another person,
		// or to a credential of another inbox.
		secret, err := seal.FromToken(device.Reveal(), contextPlace(id, b.ID, person), sealed)
		if errors.Is(err, seal.ErrSealed) {
			return ErrNoContext
		}
		if err != nil {
			return err
		}
		cred, err := seal.CredentialKey(secret, id)
		if err != nil {
			return err
		}
		k, _, err = r.unlockIn(ctx, tx, b, who, cred, "")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open context of inbox %s: %w", inbox, err)
	}
	if k.Scope() != seal.Context {
		return nil, ErrNoContext // unreachable: its scope does not change
	}
	return k, nil
}

const contextColumns = `g.credential_id, g.inbox_id, g.person, g.created_at, g.created_by, c.expires_at, g.redeemed_at, g.browser, g.device`

func listContext(ctx context.Context, tx *store.Tx, device auth.Secret, where string, args ...any) ([]ContextGrant, error) {
	return store.List(ctx, tx, func(row func(...any) error) (g ContextGrant, err error) {
		var created, expires, redeemed int64
		var of []byte
		err = row(&g.ID, &g.Inbox, &g.Person, &created, &g.CreatedBy, &expires, &redeemed, &g.Browser, &of)
		g.Created, g.Expires, g.Redeemed = store.FromTime(created), store.FromTime(expires), store.FromTime(redeemed)
		g.Here = device != "" && string(of) == string(device.Digest())
		return g, err
	}, `select `+contextColumns+` from context_grant g join credential c on c.id = g.credential_id
		where c.revoked_at = 0 and c.expires_at > $1 and `+where+` order by g.created_at, g.credential_id`, append([]any{store.Time(time.Now())}, args...)...)
}

// ContextOf returns the context grants that who has redeemed, in any browser.
func (r *Ring) ContextOf(ctx context.Context, who auth.Principal, device auth.Secret) (out []ContextGrant, err error) {
	if who.Kind != auth.Person {
		return nil, fmt.Errorf("only a person has context grants: %w", auth.ErrForbidden)
	}
	err = r.db.View(ctx, func(tx *store.Tx) error {
		person, err := personID(ctx, tx, who)
		if errors.Is(err, auth.ErrForbidden) { // the operator at the machine has no account
			return nil
		}
		if err != nil {
			return err
		}
		out, err = listContext(ctx, tx, device, `g.person_id = $2 and g.project_id = $3`, person, who.Project)
		return err
	})
	return out, err
}

// ContextGrants returns the context grants of an inbox that who manages.
func (r *Ring) ContextGrants(ctx context.Context, who auth.Principal, inbox string) (out []ContextGrant, err error) {
	err = r.db.View(ctx, func(tx *store.Tx) error {
		b, err := r.Managed(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		out, err = listContext(ctx, tx, "", `g.inbox_id = $2`, b.ID)
		return err
	})
	return out, err
}

// LeaveContext ends a context grant that who has redeemed, and re-keys its inbox.
func (r *Ring) LeaveContext(ctx context.Context, who auth.Principal, id string) error {
	if who.Kind != auth.Person {
		return fmt.Errorf("only a person has context grants: %w", auth.ErrForbidden)
	}
	return r.db.Update(ctx, func(tx *store.Tx) error {
		person, err := personID(ctx, tx, who)
		if err != nil {
			return err
		}
		var inbox string
		err = tx.One(ctx, `select inbox_id from context_grant where credential_id = $1 and person_id = $2 and project_id = $3`, []any{id, person, who.Project}, &inbox)
		if errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("%s: %w", id, ErrNoKey)
		}
		if err != nil {
			return err
		}
		return r.Drop(ctx, tx, who, inbox, id, "given up")
	})
}

// shortened returns at most n bytes of s.
func shortened(s string, n int) string {
	if s = strings.ToValidUTF8(s, "\ufffd"); len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
