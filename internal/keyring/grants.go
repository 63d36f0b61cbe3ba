package keyring

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/seal"
	"postern/internal/store"
)

// The errors about the keys of an inbox.
var (
	// ErrNoKey means that there is no such key or grant in the inbox.
	ErrNoKey = errors.New("no such key")
	// ErrLastKey means that an inbox would be left without a key that manages
	// it, and so its mail without anybody who can open it.
	ErrLastKey = errors.New("it is the last key that manages the inbox, and without one nobody can ever open its mail")
	// ErrKeys means that an inbox has as many keys as it may have.
	ErrKeys = fmt.Errorf("the inbox has %d keys and grants, which is the most", maxKeys)
)

// maxKeys bounds the keys, grants and recovery keys of one inbox: each costs a
// wrapping at each new epoch.
const maxKeys = 100

// MaxGrant is how long a grant may last. One that has to go on is made anew,
// so that somebody looks at it once a year.
const MaxGrant = 366 * 24 * time.Hour

// A Part is what one credential may do in one inbox.
type Part struct {
	Credential string // its id
	Inbox      string
	Kind       auth.Kind // Agent: a key of the inbox; Grant; Recovery
	Name       string
	Scope      seal.Scope
	Created    time.Time
	CreatedBy  string    // a principal, or empty if that is not known
	Used       time.Time // when the credential was last shown, to ten minutes; zero means never
	Expires    time.Time // zero means that it has no end
	Account    bool      // of a grant: it gets a part in each inbox that it makes
}

const partColumns = `k.credential_id, k.inbox_id, c.kind, c.name, k.scope, k.created_at, c.created_at, k.created_by, c.used_at, k.expires_at, c.expires_at, c.account`

func parts(ctx context.Context, tx *store.Tx, where string, args ...any) (out []Part, err error) {
	rows, err := tx.QueryContext(ctx, `select `+partColumns+` from inbox_key k join credential c on c.id = k.credential_id
		where c.revoked_at = 0 and `+where+` order by k.created_at, k.credential_id, k.inbox_id`, args...)
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var p Part
		var created, made, used, expires, ends int64
		if err := rows.Scan(&p.Credential, &p.Inbox, &p.Kind, &p.Name, &p.Scope, &created, &made, &p.CreatedBy, &used, &expires, &ends, &p.Account); err != nil {
			return nil, fmt.Errorf("list keys: %w", err)
		}
		if created == 0 { // from before it was written down
			created = made
		}
		if expires == 0 || ends != 0 && ends < expires {
			expires = ends
		}
		p.Created, p.Used, p.Expires = store.FromTime(created), store.FromTime(used), store.FromTime(expires)
		out = append(out, p)
	}
	return out, rows.Err()
}

// Managed returns an inbox that who manages: by its project, or by a credential
// of it whose scope says so.
func (r *Ring) Managed(ctx context.Context, tx *store.Tx, who auth.Principal, name string) (directory.Inbox, error) {
	if directory.MayManage(who) != nil {
		b, s, err := r.ReachIn(ctx, tx, who, name)
		if err == nil && !s.Includes(seal.Manage) {
			err = fmt.Errorf("%s does not manage inbox %s: that takes a key of it with the scope %s: %w", who, b.ID, seal.Manage, auth.ErrForbidden)
		}
		return b, err
	}
	return directory.LookupFor(ctx, tx, who, name)
}

// Parts returns what each credential may do in an inbox that who manages. The
// credentials themselves are shown to nobody.
func (r *Ring) Parts(ctx context.Context, who auth.Principal, inbox string) (out []Part, err error) {
	err = r.db.View(ctx, func(tx *store.Tx) error {
		b, err := r.Managed(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		out, err = parts(ctx, tx, `k.inbox_id = $1`, b.ID)
		return err
	})
	return out, err
}

// Grants returns all parts of grants in who's project, or those of the grant
// that who is.
func (r *Ring) Grants(ctx context.Context, who auth.Principal) (out []Part, err error) {
	where, args := `c.kind = $1 and c.project_id = $2`, []any{auth.Grant, who.Project}
	if who.Kind == auth.Grant {
		where, args = where+` and c.id = $3`, append(args, who.ID)
	} else if err := directory.MayManage(who); err != nil {
		return nil, err
	}
	err = r.db.View(ctx, func(tx *store.Tx) error {
		out, err = parts(ctx, tx, where, args...)
		return err
	})
	return out, err
}

// A NewKey is a request for a credential of an inbox.
type NewKey struct {
	Name    string     // what a person calls it, at most 100 characters; may be empty
	Scope   seal.Scope // empty means full for a key, read for a grant
	Expires time.Time  // zero means never; a grant must have an end, MaxGrant away at most
}

func (n *NewKey) check() error {
	switch {
	case !utf8.ValidString(n.Name) || utf8.RuneCountInString(n.Name) > 100 || strings.ContainsFunc(n.Name, func(r rune) bool { return !unicode.IsPrint(r) }):
		return fmt.Errorf("%w: name: must be at most 100 characters that can be seen", directory.ErrInvalid)
	case !n.Scope.Valid():
		return fmt.Errorf("%w: scope: must be one of %v", directory.ErrInvalid, seal.Scopes)
	case !n.Expires.IsZero() && !n.Expires.After(time.Now()):
		return fmt.Errorf("%w: expires_at: must be in the future", directory.ErrInvalid)
	}
	return nil
}

// hold does f with the keys of k's inbox as they are, while nobody else changes
// who has a part in it. The attack on doing it without: a key that is added
// while another is revoked would miss the new epoch, or see it.
func (r *Ring) hold(ctx context.Context, who auth.Principal, k *seal.Key, want seal.Scope, f func(tx *store.Tx, b directory.Inbox, k *seal.Key) error) error {
	if err := May(k, want); err != nil {
		return err
	}
	return r.db.Update(ctx, func(tx *store.Tx) error {
		if err := lockInbox(ctx, tx, k.Inbox()); err != nil {
			return err
		}
		b, err := directory.Lookup(ctx, tx, k.Inbox())
		if err != nil {
			return fmt.Errorf("inbox %q: %w", k.Inbox(), err)
		}
		fresh, _, err := r.unlockIn(ctx, tx, b, who, k.Credential(), "")
		if err != nil {
			return err
		}
		if err := May(fresh, want); err != nil {
			return err
		}
		return f(tx, b, fresh)
	})
}

// lockInbox keeps other transactions from changing who has a part in an inbox.
func lockInbox(ctx context.Context, tx *store.Tx, inbox string) error {
	if _, err := tx.ExecContext(ctx, `update inbox set epoch = epoch where id = $1`, inbox); err != nil {
		return fmt.Errorf("lock inbox %s: %w", inbox, err)
	}
	return nil
}

func room(ctx context.Context, tx *store.Tx, inbox string) error {
	var n int
	if err := tx.One(ctx, `select count(*) from inbox_key where inbox_id = $1`, []any{inbox}, &n); err != nil {
		return fmt.Errorf("count keys of inbox %s: %w", inbox, err)
	}
	if n >= maxKeys {
		return fmt.Errorf("%w: %w", directory.ErrInvalid, ErrKeys)
	}
	return nil
}

// issue makes a credential with a part in b, which k opens.
func issue(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, k *seal.Key, c auth.Credential, s seal.Scope) (string, auth.Secret, error) {
	if err := room(ctx, tx, k.Inbox()); err != nil {
		return "", "", err
	}
	c.Project, c.CreatedBy = b.Project, who.String()
	id, key, err := auth.NewCredential(ctx, tx, c)
	if err != nil {
		return "", "", err
	}
	cred, err := seal.CredentialKey(key.Reveal(), id)
	if err != nil {
		return "", "", err
	}
	return id, key, enrol(ctx, tx, who, b.ID, id, cred.PublicKey(), s, c.Expires, k)
}

func onePart(ctx context.Context, tx *store.Tx, inbox, id string) (Part, error) {
	list, err := parts(ctx, tx, `k.inbox_id = $1 and k.credential_id = $2`, inbox, id)
	if err == nil && len(list) == 0 {
		err = fmt.Errorf("%s: %w", id, ErrNoKey)
	}
	if err != nil {
		return Part{}, err
	}
	return list[0], nil
}

func ends(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return t.UTC().Format(time.RFC3339)
}

// Add makes another key of the inbox that k manages. It is shown this once.
func (r *Ring) Add(ctx context.Context, who auth.Principal, k *seal.Key, n NewKey) (p Part, key auth.Secret, err error) {
	if n.Scope == "" {
		n.Scope = seal.Manage
	}
	if err := n.check(); err != nil {
		return Part{}, "", err
	}
	err = r.hold(ctx, who, k, seal.Manage, func(tx *store.Tx, b directory.Inbox, k *seal.Key) error {
		var id string
		id, key, err = issue(ctx, tx, who, b, k, auth.Credential{Kind: auth.Agent, Inbox: b.ID, Name: n.Name, Expires: n.Expires}, n.Scope)
		if err != nil {
			return err
		}
		if p, err = onePart(ctx, tx, b.ID, id); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.InboxKeyAdd, b.ID, audit.Fields{"credential": id, "scope": string(n.Scope), "ends": ends(n.Expires)})
	})
	return p, key, err
}

// AddRecovery makes a recovery key of the inbox that k manages, for a person to
// keep away from any machine. It is shown this once and opens no mail by itself:
// [Ring.Recover] makes a new key of the inbox with it.
func (r *Ring) AddRecovery(ctx context.Context, who auth.Principal, k *seal.Key) (p Part, key auth.Secret, err error) {
	err = r.hold(ctx, who, k, seal.Manage, func(tx *store.Tx, b directory.Inbox, k *seal.Key) error {
		var id string
		id, key, err = issue(ctx, tx, who, b, k, auth.Credential{Kind: auth.Recovery, Inbox: b.ID, Name: "recovery key"}, seal.Recover)
		if err != nil {
			return err
		}
		if p, err = onePart(ctx, tx, b.ID, id); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.InboxRecoveryAdd, b.ID, audit.Fields{"credential": id})
	})
	return p, key, err
}

// Recover makes a new key of the inbox that a recovery key is of. With revoke,
// every other key and grant of the inbox ends, for when one was stolen and not
// only lost. The recovery key stays.
func (r *Ring) Recover(ctx context.Context, who auth.Principal, recovery auth.Secret, revoke bool) (b directory.Inbox, p Part, key auth.Secret, err error) {
	if who.Kind != auth.Recovery {
		return directory.Inbox{}, Part{}, "", fmt.Errorf("a %s recovers no inbox, only its recovery key (prk_…) does: %w", who.Kind, auth.ErrForbidden)
	}
	cred, err := seal.CredentialKey(recovery.Reveal(), who.ID)
	if err != nil {
		return directory.Inbox{}, Part{}, "", err
	}
	err = r.db.Update(ctx, func(tx *store.Tx) error {
		if err := lockInbox(ctx, tx, who.Inbox); err != nil {
			return err
		}
		if b, err = directory.Lookup(ctx, tx, who.Inbox); err != nil {
			return fmt.Errorf("inbox %q: %w", who.Inbox, err)
		}
		if revoke {
			others, err := parts(ctx, tx, `k.inbox_id = $1 and k.credential_id <> $2`, b.ID, who.ID)
			if err != nil {
				return err
			}
			for _, o := range others {
				if err := r.drop(ctx, tx, who, o, "recovery"); err != nil {
					return err
				}
			}
			if b, err = r.rekey(ctx, tx, who, b); err != nil {
				return err
			}
		}
		k, _, err := r.unlockIn(ctx, tx, b, who, cred, "")
		if err != nil {
			return err
		}
		var id string
		if id, key, err = issue(ctx, tx, who, b, k, auth.Credential{Kind: auth.Agent, Inbox: b.ID, Name: "recovered"}, seal.Manage); err != nil {
			return err
		}
		if p, err = onePart(ctx, tx, b.ID, id); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.InboxRecover, b.ID, audit.Fields{"credential": id, "revoked": strconv.FormatBool(revoke)})
	})
	return b, p, key, err
}

// Rotate replaces a key of the inbox that k opens by a new one with the same
// scope and end, and re-keys the inbox. A key may replace itself; to replace
// another, or a recovery key, takes one that manages.
func (r *Ring) Rotate(ctx context.Context, who auth.Principal, k *seal.Key, id string) (p Part, key auth.Secret, err error) {
	want := seal.Manage
	if id == who.ID && id == k.Credential().ID && who.Kind == auth.Agent { // not a sandbox that was lent the key
		want = seal.Read
	}
	err = r.hold(ctx, who, k, want, func(tx *store.Tx, b directory.Inbox, k *seal.Key) error {
		old, err := onePart(ctx, tx, b.ID, id)
		if err != nil {
			return err
		}
		if old.Kind == auth.Grant {
			return fmt.Errorf("%w: a grant is not rotated: revoke it and make another", directory.ErrInvalid)
		}
		var fresh string
		fresh, key, err = issue(ctx, tx, who, b, k, auth.Credential{Kind: old.Kind, Inbox: b.ID, Name: old.Name, Expires: old.Expires}, old.Scope)
		if err != nil {
			return err
		}
		if err := r.drop(ctx, tx, who, old, "rotation"); err != nil {
			return err
		}
		if _, err := r.rekey(ctx, tx, who, b); err != nil {
			return err
		}
		if p, err = onePart(ctx, tx, b.ID, fresh); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.InboxKeyRotate, b.ID, audit.Fields{"credential": fresh, "replaces": id})
	})
	return p, key, err
}

// Revoke ends the part of a credential in an inbox that who manages, and
// re-keys the inbox: whoever held the credential opens nothing that comes
// after. The last key that manages the inbox stays unless evenLast, which only
// its project or a person may say: its mail is lost with it.
func (r *Ring) Revoke(ctx context.Context, who auth.Principal, inbox, id string, evenLast bool) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	return r.db.Update(ctx, func(tx *store.Tx) error {
		b, err := r.Managed(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		if err := lockInbox(ctx, tx, b.ID); err != nil {
			return err
		}
		if b, err = r.Managed(ctx, tx, who, b.ID); err != nil { // as it is behind the lock
			return err
		}
		p, err := onePart(ctx, tx, b.ID, id)
		if err != nil {
			return err
		}
		if p.Kind == auth.Agent && p.Scope == seal.Manage {
			others, err := parts(ctx, tx, `k.inbox_id = $1 and k.credential_id <> $2 and c.kind = $3 and k.scope = $4 and k.expires_at = 0`, b.ID, id, auth.Agent, seal.Manage)
			if err != nil {
				return err
			}
			if len(others) == 0 && (!evenLast || directory.MayManage(who) != nil) {
				return fmt.Errorf("%s: %w", id, ErrLastKey)
			}
		}
		if err := r.drop(ctx, tx, who, p, "revocation"); err != nil {
			return err
		}
		_, err = r.rekey(ctx, tx, who, b)
		return err
	})
}

// RevokeGrant ends a grant of who's project in every inbox.
func (r *Ring) RevokeGrant(ctx context.Context, who auth.Principal, id string) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	if err := directory.MayManage(who); err != nil {
		return err
	}
	return r.db.Update(ctx, func(tx *store.Tx) error {
		var found int
		if err := tx.One(ctx, `select count(*) from credential where id = $1 and kind = $2 and project_id = $3 and revoked_at = 0`, []any{id, auth.Grant, who.Project}, &found); err != nil {
			return fmt.Errorf("find grant %s: %w", id, err)
		}
		if found == 0 {
			return fmt.Errorf("%s: %w", id, ErrNoKey)
		}
		list, err := parts(ctx, tx, `k.credential_id = $1`, id)
		if err != nil {
			return err
		}
		if err := auth.Revoke(ctx, tx, id); err != nil {
			return err
		}
		// All locks come first and in one order, or two revocations at once
		// would wait for each other.
		slices.SortFunc(list, func(a, b Part) int { return strings.Compare(a.Inbox, b.Inbox) })
		for _, p := range list {
			if err := lockInbox(ctx, tx, p.Inbox); err != nil {
				return err
			}
		}
		for _, p := range list {
			if err := r.dropAndRekey(ctx, tx, who, p, "revocation"); err != nil {
				return err
			}
		}
		return audit.Append(ctx, tx, who, audit.GrantRevoke, id, audit.Fields{"inboxes": strconv.Itoa(len(list))})
	})
}

// dropAndRekey needs the inbox's lock.
func (r *Ring) dropAndRekey(ctx context.Context, tx *store.Tx, who auth.Principal, p Part, why string) error {
	b, err := directory.LookupStored(ctx, tx, p.Inbox)
	if err != nil {
		return err
	}
	if err := r.drop(ctx, tx, who, p, why); err != nil {
		return err
	}
	_, err = r.rekey(ctx, tx, who, b)
	return err
}

// drop ends a part: what is wrapped for the credential is removed, and the
// credential itself ends with its last inbox. An account stays, since it makes
// more.
func (r *Ring) drop(ctx context.Context, tx *store.Tx, who auth.Principal, p Part, why string) error {
	tx.AfterCommit(func() { r.removed.Store(true) })
	if _, err := tx.ExecContext(ctx, `delete from inbox_wrap where inbox_id = $1 and credential_id = $2`, p.Inbox, p.Credential); err != nil {
		return fmt.Errorf("remove key of inbox %s: %w", p.Inbox, err)
	}
	if _, err := tx.ExecContext(ctx, `delete from inbox_key where inbox_id = $1 and credential_id = $2`, p.Inbox, p.Credential); err != nil {
		return fmt.Errorf("remove key of inbox %s: %w", p.Inbox, err)
	}
	_, err := tx.ExecContext(ctx, `update credential set revoked_at = $1 where id = $2 and revoked_at = 0 and account = $3
		and not exists (select 1 from inbox_key k where k.credential_id = $2)`, store.Time(time.Now()), p.Credential, false)
	if err != nil {
		return fmt.Errorf("revoke credential %s: %w", p.Credential, err)
	}
	return audit.Append(ctx, tx, who, audit.InboxKeyRevoke, p.Inbox, audit.Fields{"credential": p.Credential, "kind": string(p.Kind), "scope": string(p.Scope), "why": why})
}

// rekey gives an inbox a new key pair, for what comes after, and wraps it for
// the credentials that have a part in it now. It needs none of them, and the
// private key is forgotten when it returns.
func (r *Ring) rekey(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox) (directory.Inbox, error) {
	next := b.Epoch + 1
	pair, err := seal.NewPair(b.ID, next)
	if err != nil {
		return directory.Inbox{}, err
	}
	ok, err := tx.Changed(ctx, `update inbox set epoch = $1, public_key = $2 where id = $3 and epoch = $4`, next, pair.Public, b.ID, b.Epoch)
	if err != nil {
		return directory.Inbox{}, fmt.Errorf("re-key inbox %s: %w", b.ID, err)
	}
	if !ok {
		return directory.Inbox{}, fmt.Errorf("re-key inbox %s: it changed meanwhile", b.ID) // unreachable: it is locked
	}
	if _, err := tx.ExecContext(ctx, `insert into inbox_epoch (inbox_id, epoch, public_key, created_at) values ($1, $2, $3, $4)`,
		b.ID, next, pair.Public, store.Time(time.Now())); err != nil {
		return directory.Inbox{}, fmt.Errorf("re-key inbox %s: %w", b.ID, err)
	}
	keys, err := publicKeys(ctx, tx, b.ID)
	if err != nil {
		return directory.Inbox{}, err
	}
	for id, to := range keys {
		list, err := pair.WrapFor(to, id)
		if err == nil {
			err = insertWrapped(ctx, tx, b.ID, id, list)
		}
		if err != nil {
			return directory.Inbox{}, fmt.Errorf("re-key inbox %s: %w", b.ID, err)
		}
	}
	b.Epoch, b.PublicKey = next, pair.Public
	return b, audit.Append(ctx, tx, who, audit.InboxRekey, b.ID, audit.Fields{"epoch": strconv.FormatInt(next, 10), "credentials": strconv.Itoa(len(keys))})
}

// publicKeys returns the public keys of the credentials that have a part in an
// inbox. One from before there were such keys has none until it is shown; it
// is then the only one of its inbox, since only its holder can make others.
func publicKeys(ctx context.Context, tx *store.Tx, inbox string) (map[string][]byte, error) {
	rows, err := tx.QueryContext(ctx, `select k.credential_id, k.public_key from inbox_key k join credential c on c.id = k.credential_id
		where k.inbox_id = $1 and c.revoked_at = 0 and (k.expires_at = 0 or k.expires_at > $2) and length(k.public_key) > 0`, inbox, store.Time(time.Now()))
	if err != nil {
		return nil, fmt.Errorf("list keys of inbox %s: %w", inbox, err)
	}
	defer rows.Close()
	out := map[string][]byte{}
	for rows.Next() {
		var id string
		var key []byte
		if err := rows.Scan(&id, &key); err != nil {
			return nil, fmt.Errorf("list keys of inbox %s: %w", inbox, err)
		}
		out[id] = key
	}
	return out, rows.Err()
}

func (n *NewKey) checkGrant() error {
	if n.Scope == "" {
		n.Scope = seal.Read
	}
	switch {
	case n.Scope == seal.Manage:
		return fmt.Errorf("%w: scope: a grant is to %s or to %s", directory.ErrInvalid, seal.Read, seal.Propose)
	case n.Expires.IsZero() || n.Expires.After(time.Now().Add(MaxGrant)):
		return fmt.Errorf("%w: expires_at: a grant has an end, %d days away at most", directory.ErrInvalid, MaxGrant/(24*time.Hour))
	}
	return n.check()
}

// Grant makes a grant over the inbox that k manages, for an orchestrator. It is
// shown this once. [Ring.Extend] adds other inboxes to it.
func (r *Ring) Grant(ctx context.Context, who auth.Principal, k *seal.Key, n NewKey) (p Part, key auth.Secret, err error) {
	if err := n.checkGrant(); err != nil {
		return Part{}, "", err
	}
	err = r.hold(ctx, who, k, seal.Manage, func(tx *store.Tx, b directory.Inbox, k *seal.Key) error {
		if room(ctx, tx, b.ID) != nil {
			return room(ctx, tx, b.ID)
		}
		id, secret, err := auth.NewCredential(ctx, tx, auth.Credential{Project: b.Project, Kind: auth.Grant, Name: n.Name, CreatedBy: who.String()})
		if err != nil {
			return err
		}
		key = secret
		cred, err := seal.CredentialKey(key.Reveal(), id)
		if err != nil {
			return err
		}
		if err := enrol(ctx, tx, who, b.ID, id, cred.PublicKey(), n.Scope, n.Expires, k); err != nil {
			return err
		}
		if p, err = onePart(ctx, tx, b.ID, id); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.GrantMake, id, audit.Fields{"inbox": b.ID, "scope": string(n.Scope), "ends": ends(n.Expires)})
	})
	return p, key, err
}

// Extend gives a grant that there is a part in the inbox that k manages. It
// needs the grant's id alone, not the grant.
func (r *Ring) Extend(ctx context.Context, who auth.Principal, k *seal.Key, grant string, n NewKey) (p Part, err error) {
	if err := n.checkGrant(); err != nil {
		return Part{}, err
	}
	err = r.hold(ctx, who, k, seal.Manage, func(tx *store.Tx, b directory.Inbox, k *seal.Key) error {
		if err := room(ctx, tx, b.ID); err != nil {
			return err
		}
		var to []byte
		err := tx.One(ctx, `select k.public_key from inbox_key k join credential c on c.id = k.credential_id
			where c.id = $1 and c.kind = $2 and c.project_id = $3 and c.revoked_at = 0 and c.account = $4 order by k.created_at limit 1`,
			[]any{grant, auth.Grant, b.Project, false}, &to)
		if errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("%s: %w", grant, ErrNoKey)
		}
		if err != nil {
			return fmt.Errorf("find grant %s: %w", grant, err)
		}
		if _, err := onePart(ctx, tx, b.ID, grant); err == nil {
			return fmt.Errorf("%w: grant %s has a part in this inbox already: revoke it first", directory.ErrInvalid, grant)
		} else if !errors.Is(err, ErrNoKey) {
			return err
		}
		if err := enrol(ctx, tx, who, b.ID, grant, to, n.Scope, n.Expires, k); err != nil {
			return err
		}
		if p, err = onePart(ctx, tx, b.ID, grant); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.GrantExtend, grant, audit.Fields{"inbox": b.ID, "scope": string(n.Scope), "ends": ends(n.Expires)})
	})
	return p, err
}

// NewAccount makes an account in a project: a grant that gets a part with every
// right in each inbox that it makes, and in no other. It is shown this once.
func (r *Ring) NewAccount(ctx context.Context, who auth.Principal, name string) (id string, key auth.Secret, err error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return "", "", err
	}
	n := NewKey{Name: name, Scope: seal.Read}
	if err := n.check(); err != nil {
		return "", "", err
	}
	if who.Kind != auth.System {
		if err := directory.MayManage(who); err != nil {
			return "", "", err
		}
	}
	err = r.db.Update(ctx, func(tx *store.Tx) error {
		id, key, err = auth.NewCredential(ctx, tx, auth.Credential{Project: who.Project, Kind: auth.Grant, Name: name, CreatedBy: who.String(), Account: true})
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.GrantAccount, id, audit.Fields{"name": name})
	})
	return id, key, err
}
