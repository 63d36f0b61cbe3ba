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
	"postern/internal/extract"
	"postern/internal/seal"
	"postern/internal/store"
)

// The errors about the keys of an inbox.
var (
	// ErrNoKey means that there is no such key or grant in the inbox.
	ErrNoKey = errors.New("no such key")
	// ErrLastKey means that the change would leave an inbox without a key that
	// manages it. Nobody could then add a key, so its mail would be lost.
	ErrLastKey = errors.New("the last key that manages the inbox cannot be removed: without one, its mail can never be opened again")
	// ErrKeys means that an inbox has the maximum number of keys.
	ErrKeys = fmt.Errorf("the inbox has %d keys and grants, which is the limit", maxKeys)
)

// maxKeys bounds the keys, grants and recovery keys of one inbox. Each costs
// one wrapping per epoch whenever the inbox is re-keyed.
const maxKeys = 100

// maxTools bounds the tools that a key names.
const maxTools = 100

// MaxGrant is the longest lifetime of a grant. A grant that is still needed is
// created again, so that a person reviews it at least once a year.
const MaxGrant = 366 * 24 * time.Hour

// A Part is what one credential may do in one inbox.
type Part struct {
	Credential string // its ID
	Inbox      string
	Kind       auth.Kind // Agent: a key of the inbox; Grant; Recovery
	Name       string
	Scope      seal.Scope
	Created    time.Time
	CreatedBy  string    // a principal, or empty if that is not known
	Used       time.Time // when the credential was last used, to ten minutes; zero means never
	Expires    time.Time // zero means never
	Account    bool      // the grant is an account: it becomes a member of each inbox that it creates
	Tools      []string  // the only tools that it may call; empty means all that its scope permits
}

const partColumns = `k.credential_id, k.inbox_id, c.kind, c.name, k.scope, k.created_at, c.created_at, k.created_by, c.used_at, k.expires_at, c.expires_at, c.account, c.tools`

// parts returns the parts that match a condition in SQL, oldest first. Parts of
// revoked credentials are left out.
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
		var tools string
		if err := rows.Scan(&p.Credential, &p.Inbox, &p.Kind, &p.Name, &p.Scope, &created, &made, &p.CreatedBy, &used, &expires, &ends, &p.Account, &tools); err != nil {
			return nil, fmt.Errorf("list keys: %w", err)
		}
		p.Tools = strings.Fields(tools)
		if created == 0 { // an old row, from before this column existed
			created = made
		}
		// Both the part and its credential can expire; the earlier time counts.
		if expires == 0 || ends != 0 && ends < expires {
			expires = ends
		}
		p.Created, p.Used, p.Expires = store.FromTime(created), store.FromTime(used), store.FromTime(expires)
		out = append(out, p)
	}
	return out, rows.Err()
}

// Managed returns an inbox that who manages, either as a manager of its project
// or with a credential of scope [seal.Manage].
func (r *Ring) Managed(ctx context.Context, tx *store.Tx, who auth.Principal, name string) (directory.Inbox, error) {
	if directory.MayManage(who) != nil {
		b, s, err := r.ReachIn(ctx, tx, who, name)
		if err == nil && !s.Includes(seal.Manage) {
			err = fmt.Errorf("%s does not manage inbox %s: use one of its keys with scope %s: %w", who, b.ID, seal.Manage, auth.ErrForbidden)
		}
		return b, err
	}
	return directory.LookupFor(ctx, tx, who, name)
}

// Parts returns what each credential may do in an inbox that who manages. It
// never returns the credentials themselves, which the server does not store.
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

// Grants returns all parts of the grants in who's project. A grant sees only
// its own.
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
	Scope   seal.Scope // empty means manage for a key, read for a grant
	Expires time.Time  // zero means never; a grant must have an end, MaxGrant away at most
	Tools   []string   // the only tools that it may call; empty means all that its scope permits
}

// check returns an error that wraps [directory.ErrInvalid] and names the first
// invalid field.
func (n *NewKey) check() error {
	switch {
	case !utf8.ValidString(n.Name) || utf8.RuneCountInString(n.Name) > 100 || strings.ContainsFunc(n.Name, func(r rune) bool { return !unicode.IsPrint(r) }):
		return fmt.Errorf("%w: name: must be at most 100 printable characters", directory.ErrInvalid)
	case extract.CheckName(n.Name) != nil:
		return fmt.Errorf("%w: name: %w", directory.ErrInvalid, extract.CheckName(n.Name))
	case !n.Scope.Valid():
		return fmt.Errorf("%w: scope: must be some of %v, separated by spaces", directory.ErrInvalid, seal.Scopes)
	case !n.Expires.IsZero() && !n.Expires.After(time.Now()):
		return fmt.Errorf("%w: expires_at: must be in the future", directory.ErrInvalid)
	case len(n.Tools) > 0 && n.Scope == seal.Manage:
		// The attack: it makes itself another key, without the limit.
		return fmt.Errorf("%w: tools: a key with scope %s may call every tool: choose other scopes too", directory.ErrInvalid, seal.Manage)
	case len(n.Tools) > maxTools:
		return fmt.Errorf("%w: tools: must be at most %d", directory.ErrInvalid, maxTools)
	}
	for i, t := range n.Tools {
		if !auth.ToolName(t) {
			return fmt.Errorf("%w: tools[%d]: must be the name of a tool, such as email_send", directory.ErrInvalid, i)
		}
	}
	slices.Sort(n.Tools)
	n.Tools = slices.Compact(n.Tools)
	return nil
}

// fields adds to f what the audit records of a new key.
func (n *NewKey) fields(f audit.Fields) audit.Fields {
	f["scope"], f["ends"] = string(n.Scope), ends(n.Expires)
	if len(n.Tools) > 0 {
		f["tools"] = strings.Join(n.Tools, " ")
	}
	return f
}

// hold locks the inbox of k, opens it again for who, and calls f with the
// current keys. The lock keeps everybody else from adding or revoking keys
// until tx ends. Without it, a key that is added during a revocation could miss
// the new epoch, or a revoked key could get it.
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
		// k was opened before the lock: it may lack a newer epoch, or have been
		// revoked or narrowed since.
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

// lockInbox locks the membership of an inbox until tx ends. The update changes
// nothing; it takes the row lock on PostgreSQL and the write lock on SQLite.
func lockInbox(ctx context.Context, tx *store.Tx, inbox string) error {
	if _, err := tx.ExecContext(ctx, `update inbox set epoch = epoch where id = $1`, inbox); err != nil {
		return fmt.Errorf("lock inbox %s: %w", inbox, err)
	}
	return nil
}

// room returns [ErrKeys] if an inbox already has the maximum number of keys. Tx
// has locked the inbox.
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

// issue creates a credential that opens b with scope s, and returns its ID and
// the secret, which is not stored. K holds the keys of b to wrap for it; it may be nil
// if s opens no mail.
func issue(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, k *seal.Key, c auth.Credential, s seal.Scope) (string, auth.Secret, error) {
	if err := room(ctx, tx, b.ID); err != nil {
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

// onePart returns the part of one credential in an inbox, or an error that
// wraps [ErrNoKey].
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

// ends formats an expiry for the audit log.
func ends(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return t.UTC().Format(time.RFC3339)
}

// Add creates another key of the inbox that k manages. The secret is returned
// only this once.
func (r *Ring) Add(ctx context.Context, who auth.Principal, k *seal.Key, n NewKey) (p Part, key auth.Secret, err error) {
	return r.AddThen(ctx, who, k, n, func(*store.Tx, Part, auth.Secret) error { return nil })
}

// AddThen is [Ring.Add], and calls then in the transaction that adds the key.
func (r *Ring) AddThen(ctx context.Context, who auth.Principal, k *seal.Key, n NewKey, then func(*store.Tx, Part, auth.Secret) error) (p Part, key auth.Secret, err error) {
	if n.Scope == "" {
		n.Scope = seal.Manage
	}
	if err := n.check(); err != nil {
		return Part{}, "", err
	}
	err = r.hold(ctx, who, k, seal.Manage, func(tx *store.Tx, b directory.Inbox, k *seal.Key) error {
		p, key, err = add(ctx, tx, who, b, k, n, then)
		return err
	})
	return p, key, err
}

// AddClosed creates a key that opens no mail, of an inbox that who manages as an owner
// of its project: it needs no key of the inbox. Then is called in the transaction that
// adds the key.
func (r *Ring) AddClosed(ctx context.Context, who auth.Principal, inbox string, n NewKey, then func(*store.Tx, Part, auth.Secret) error) (p Part, key auth.Secret, err error) {
	if !who.Manages() {
		return Part{}, "", fmt.Errorf("%s may not add keys, only an owner may: %w", who, auth.ErrForbidden)
	}
	if err := n.check(); err != nil {
		return Part{}, "", err
	}
	if n.Scope.Opens() {
		return Part{}, "", fmt.Errorf("only a full key of the inbox can add a key that reads: %w", auth.ErrForbidden)
	}
	err = r.db.Update(ctx, func(tx *store.Tx) error {
		b, err := directory.LookupFor(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		if err := lockInbox(ctx, tx, b.ID); err != nil {
			return err
		}
		p, key, err = add(ctx, tx, who, b, nil, n, then)
		return err
	})
	return p, key, err
}

// add creates a key of b and records it. Tx has locked the inbox.
func add(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, k *seal.Key, n NewKey, then func(*store.Tx, Part, auth.Secret) error) (p Part, key auth.Secret, err error) {
	id, key, err := issue(ctx, tx, who, b, k, auth.Credential{Kind: auth.Agent, Inbox: b.ID, Name: n.Name, Expires: n.Expires, Tools: n.Tools}, n.Scope)
	if err != nil {
		return Part{}, "", err
	}
	if p, err = onePart(ctx, tx, b.ID, id); err != nil {
		return Part{}, "", err
	}
	if err := audit.Append(ctx, tx, who, audit.InboxKeyAdd, b.ID, n.fields(audit.Fields{"credential": id})); err != nil {
		return Part{}, "", err
	}
	return p, key, then(tx, p, key)
}

// Drop removes a key for the program that it was made for, in tx, and re-keys its inbox
// if it opened mail. A key that is gone already is no error. Why goes into the audit.
func (r *Ring) Drop(ctx context.Context, tx *store.Tx, who auth.Principal, inbox, id, why string) error {
	if err := lockInbox(ctx, tx, inbox); err != nil {
		return err
	}
	p, err := onePart(ctx, tx, inbox, id)
	if errors.Is(err, ErrNoKey) {
		return nil
	}
	if err != nil {
		return err
	}
	return r.dropAndRekey(ctx, tx, who, p, why)
}

// AddRecovery creates a recovery key of the inbox that k manages, for a person
// to keep offline. The secret is returned only this once. A recovery key reads
// no mail: [Ring.Recover] uses it to create a new key of the inbox.
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

// Recover creates a new managing key of the inbox that the recovery key belongs
// to. If revoke is set, it also revokes every other key and grant of the inbox
// and re-keys it: for keys that were stolen rather than lost. The recovery key
// itself stays valid.
func (r *Ring) Recover(ctx context.Context, who auth.Principal, recovery auth.Secret, revoke bool) (b directory.Inbox, p Part, key auth.Secret, err error) {
	if who.Kind != auth.Recovery {
		return directory.Inbox{}, Part{}, "", fmt.Errorf("a %s cannot recover an inbox: only its recovery key (prk_…) can: %w", who.Kind, auth.ErrForbidden)
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
			// Re-key after all drops, so that no revoked credential is among
			// those that the new epoch is wrapped for.
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

// Rotate replaces a key of the inbox that k opens with a new one of the same
// scope and expiry, and re-keys the inbox. A key may rotate itself; rotating
// another key, or a recovery key, requires a managing key.
func (r *Ring) Rotate(ctx context.Context, who auth.Principal, k *seal.Key, id string) (p Part, key auth.Secret, err error) {
	want := seal.Manage
	if id == who.ID && id == k.Credential().ID && who.Kind == auth.Agent { // a sandbox with a lent key may not rotate it
		want = seal.Read
	}
	err = r.hold(ctx, who, k, want, func(tx *store.Tx, b directory.Inbox, k *seal.Key) error {
		p, key, err = r.replace(ctx, tx, who, b, k, id)
		return err
	})
	return p, key, err
}

// RotateClosed is [Ring.Rotate] for a key whose scope opens no mail: who replaces the
// key of its own that it shows.
func (r *Ring) RotateClosed(ctx context.Context, who auth.Principal, id string) (p Part, key auth.Secret, err error) {
	if who.Kind != auth.Agent || id != who.ID {
		return Part{}, "", fmt.Errorf("this key can rotate only itself: %w", auth.ErrForbidden)
	}
	err = r.db.Update(ctx, func(tx *store.Tx) error {
		if err := lockInbox(ctx, tx, who.Inbox); err != nil {
			return err
		}
		b, s, err := r.ReachIn(ctx, tx, who, "") // read behind the lock
		if err != nil {
			return err
		}
		if s.Opens() {
			return fmt.Errorf("this key opens mail, and is rotated as such: %w", auth.ErrForbidden) // unreachable: the scope of a key does not change
		}
		p, key, err = r.replace(ctx, tx, who, b, nil, id)
		return err
	})
	return p, key, err
}

// replace puts a new key in the place of the key id of b. K is nil if that opens no
// mail. Tx has locked the inbox.
func (r *Ring) replace(ctx context.Context, tx *store.Tx, who auth.Principal, b directory.Inbox, k *seal.Key, id string) (p Part, key auth.Secret, err error) {
	old, err := onePart(ctx, tx, b.ID, id)
	if err != nil {
		return Part{}, "", err
	}
	if old.Kind == auth.Grant {
		return Part{}, "", fmt.Errorf("%w: a grant cannot be rotated: revoke it and create another", directory.ErrInvalid)
	}
	fresh, key, err := issue(ctx, tx, who, b, k, auth.Credential{Kind: old.Kind, Inbox: b.ID, Name: old.Name, Expires: old.Expires, Tools: old.Tools}, old.Scope)
	if err != nil {
		return Part{}, "", err
	}
	// The old key is dropped before the re-keying, so that it does not open the new
	// epoch.
	if err := r.dropAndRekey(ctx, tx, who, old, "rotation"); err != nil {
		return Part{}, "", err
	}
	if p, err = onePart(ctx, tx, b.ID, fresh); err != nil {
		return Part{}, "", err
	}
	return p, key, audit.Append(ctx, tx, who, audit.InboxKeyRotate, b.ID, audit.Fields{"credential": fresh, "replaces": id})
}

// Revoke removes a credential from an inbox that who manages, and re-keys the
// inbox, so that the credential opens nothing that arrives later. It refuses to
// remove the last managing key with [ErrLastKey], since the mail would be lost
// with it, unless evenLast is set and who is a manager of the project.
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
		if b, err = r.Managed(ctx, tx, who, b.ID); err != nil { // read again behind the lock
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
		return r.dropAndRekey(ctx, tx, who, p, "revocation")
	})
}

// RevokeGrant revokes a grant of who's project in all of its inboxes.
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
		// All locks are taken first and in one order. Otherwise two concurrent
		// revocations could deadlock on PostgreSQL.
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

// dropAndRekey removes a part and re-keys its inbox, whether or not the inbox
// is live. Tx has locked the inbox.
func (r *Ring) dropAndRekey(ctx context.Context, tx *store.Tx, who auth.Principal, p Part, why string) error {
	b, err := directory.LookupStored(ctx, tx, p.Inbox)
	if err != nil {
		return err
	}
	if err := r.drop(ctx, tx, who, p, why); err != nil || !p.Scope.Opens() {
		return err // what opened nothing needs no new epoch
	}
	_, err = r.rekey(ctx, tx, who, b)
	return err
}

// drop removes a part with its wrapped keys, and revokes the credential with
// its last inbox. An account is not revoked then, since it can create more
// inboxes.
func (r *Ring) drop(ctx context.Context, tx *store.Tx, who auth.Principal, p Part, why string) error {
	tx.AfterCommit(func() { r.removed.Store(true) })
	if _, err := tx.ExecContext(ctx, `delete from inbox_wrap where inbox_id = $1 and credential_id = $2`, p.Inbox, p.Credential); err != nil {
		return fmt.Errorf("remove key of inbox %s: %w", p.Inbox, err)
	}
	if _, err := tx.ExecContext(ctx, `delete from inbox_key where inbox_id = $1 and credential_id = $2`, p.Inbox, p.Credential); err != nil {
		return fmt.Errorf("remove key of inbox %s: %w", p.Inbox, err)
	}
	if _, err := tx.ExecContext(ctx, `delete from context_grant where credential_id = $1`, p.Credential); err != nil {
		return fmt.Errorf("remove context grant %s: %w", p.Credential, err)
	}
	_, err := tx.ExecContext(ctx, `update credential set revoked_at = $1 where id = $2 and revoked_at = 0 and account = $3
		and not exists (select 1 from inbox_key k where k.credential_id = $2)`, store.Time(time.Now()), p.Credential, false)
	if err != nil {
		return fmt.Errorf("revoke credential %s: %w", p.Credential, err)
	}
	return audit.Append(ctx, tx, who, audit.InboxKeyRevoke, p.Inbox, audit.Fields{"credential": p.Credential, "kind": string(p.Kind), "scope": string(p.Scope), "why": why})
}

// rekey starts a new epoch: it creates a key pair, to which all later mail is
// sealed, and wraps the private key for the current members. It needs none of
// their secrets, only their public keys, and does not keep the private key.
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
		return directory.Inbox{}, fmt.Errorf("re-key inbox %s: it changed meanwhile", b.ID) // unreachable: the caller holds the lock
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

// publicKeys returns the public keys of the current members of an inbox that open its
// mail, by credential ID. A credential from before credentials had key pairs has none
// until its next use; it is then the only member, since adding another requires
// using it.
func publicKeys(ctx context.Context, tx *store.Tx, inbox string) (map[string][]byte, error) {
	rows, err := tx.QueryContext(ctx, `select k.credential_id, k.public_key, k.scope from inbox_key k join credential c on c.id = k.credential_id
		where k.inbox_id = $1 and c.revoked_at = 0 and (k.expires_at = 0 or k.expires_at > $2) and length(k.public_key) > 0`, inbox, store.Time(time.Now()))
	if err != nil {
		return nil, fmt.Errorf("list keys of inbox %s: %w", inbox, err)
	}
	defer rows.Close()
	out := map[string][]byte{}
	for rows.Next() {
		var id string
		var key []byte
		var scope seal.Scope
		if err := rows.Scan(&id, &key, &scope); err != nil {
			return nil, fmt.Errorf("list keys of inbox %s: %w", inbox, err)
		}
		if scope.Opens() {
			out[id] = key
		}
	}
	return out, rows.Err()
}

// checkGrant is check with the stricter rules of grants: no managing scope, and
// an expiry within [MaxGrant].
func (n *NewKey) checkGrant() error {
	if n.Scope == "" {
		n.Scope = seal.Read
	}
	switch {
	case n.Scope == seal.Manage:
		return fmt.Errorf("%w: scope: a grant must have some of the scopes %s, %s and %s", directory.ErrInvalid, seal.Read, seal.Draft, seal.Send)
	case n.Expires.IsZero() || n.Expires.After(time.Now().Add(MaxGrant)):
		return fmt.Errorf("%w: expires_at: a grant must expire, at most %d days from now", directory.ErrInvalid, MaxGrant/(24*time.Hour))
	}
	return n.check()
}

// Grant creates a grant for the inbox that k manages, for example for an
// orchestrator. The secret is returned only this once. [Ring.Extend] adds other
// inboxes to the grant.
func (r *Ring) Grant(ctx context.Context, who auth.Principal, k *seal.Key, n NewKey) (p Part, key auth.Secret, err error) {
	if err := n.checkGrant(); err != nil {
		return Part{}, "", err
	}
	err = r.hold(ctx, who, k, seal.Manage, func(tx *store.Tx, b directory.Inbox, k *seal.Key) error {
		if room(ctx, tx, b.ID) != nil {
			return room(ctx, tx, b.ID)
		}
		id, secret, err := auth.NewCredential(ctx, tx, auth.Credential{Project: b.Project, Kind: auth.Grant, Name: n.Name, CreatedBy: who.String(), Tools: n.Tools})
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
		return audit.Append(ctx, tx, who, audit.GrantMake, id, n.fields(audit.Fields{"inbox": b.ID}))
	})
	return p, key, err
}

// Extend adds the inbox that k manages to an existing grant. It needs only the
// ID of the grant, not its secret.
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
			return fmt.Errorf("%w: grant %s already covers this inbox: revoke it first", directory.ErrInvalid, grant)
		} else if !errors.Is(err, ErrNoKey) {
			return err
		}
		if err := enrol(ctx, tx, who, b.ID, grant, to, n.Scope, n.Expires, k); err != nil {
			return err
		}
		if p, err = onePart(ctx, tx, b.ID, grant); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.GrantExtend, grant, n.fields(audit.Fields{"inbox": b.ID}))
	})
	return p, err
}

// NewAccount creates an account in a project: a grant with scope [seal.Manage]
// in each inbox that it creates, and in no other. The secret is returned only
// this once.
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
