package delivery

import (
	"context"
	"crypto/hmac"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

// SuppressionReason is why an address is suppressed.
type SuppressionReason string

// The reasons.
const (
	SuppressedBounce      SuppressionReason = "bounced"      // the server of the address rejected it as unknown
	SuppressedComplaint   SuppressionReason = "complained"   // the recipient reported the mail as spam
	SuppressedUnsubscribe SuppressionReason = "unsubscribed" // the recipient used the unsubscribe link
	SuppressedAdded       SuppressionReason = "added"        // a manager added it
)

// A Suppression records that a project sends nothing more to an address. It
// does not hold the address, of which only a hash is stored.
type Suppression struct {
	Reason  SuppressionReason
	Inbox   string // ID of the inbox whose mail caused it; may be empty
	Created time.Time
}

// Suppressions are the suppression lists of projects. They hold keyed hashes,
// so a copy of the database reveals no address.
type Suppressions struct {
	db     *store.DB
	secret []byte // the server's
}

// NewSuppressions returns the lists in db. The keys of the hashes are derived
// from secret.
func NewSuppressions(db *store.DB, secret []byte) *Suppressions {
	return &Suppressions{db: db, secret: secret}
}

// suppressionHash returns the hash under which an address is stored. The local
// part is lowered, although RFC 5321 makes it case-sensitive: otherwise an
// agent could get around an unsubscription by writing Bob for bob.
func (l *Suppressions) suppressionHash(project, address string) []byte {
	return seal.Hash(l.secret, project, "postern suppression v1", strings.ToLower(policy.Address(strings.TrimSpace(address))))
}

// reason returns why project does not send to address, or "" if it does.
func (l *Suppressions) reason(ctx context.Context, tx *store.Tx, project, address string) (SuppressionReason, error) {
	var reason SuppressionReason
	err := tx.One(ctx, `select reason from suppression where project_id = $1 and hash = $2`, []any{project, l.suppressionHash(project, address)}, &reason)
	if errors.Is(err, store.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("look address up: %w", err)
	}
	return reason, nil
}

// add puts an address on the list. An address that is already on it keeps its
// first reason.
func (l *Suppressions) add(ctx context.Context, tx *store.Tx, project, inbox, address string, reason SuppressionReason) error {
	_, err := tx.ExecContext(ctx, `insert into suppression (project_id, hash, reason, inbox_id, created_at) values ($1, $2, $3, $4, $5) on conflict do nothing`,
		project, l.suppressionHash(project, address), reason, inbox, store.Time(time.Now()))
	if err != nil {
		return fmt.Errorf("suppress address: %w", err)
	}
	return nil
}

// suppressible checks that who manages inboxes, and returns address in its
// normal form.
func (l *Suppressions) suppressible(who auth.Principal, address string) (string, error) {
	if err := directory.MayManage(who); err != nil {
		return "", err
	}
	addr, err := mail.CheckAddr("address", address)
	if err != nil {
		return "", err
	}
	return addr, nil
}

// Find returns the suppression of an address in who's project, or an error that
// wraps [store.ErrNotFound].
func (l *Suppressions) Find(ctx context.Context, who auth.Principal, address string) (s Suppression, err error) {
	if address, err = l.suppressible(who, address); err != nil {
		return Suppression{}, err
	}
	var created int64
	err = l.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select reason, inbox_id, created_at from suppression where project_id = $1 and hash = $2`,
			[]any{who.Project, l.suppressionHash(who.Project, address)}, &s.Reason, &s.Inbox, &created)
	})
	if err != nil {
		return Suppression{}, fmt.Errorf("suppressed address: %w", err)
	}
	s.Created = store.FromTime(created)
	return s, nil
}

// Count returns how many addresses are suppressed in who's project, by reason.
// The addresses themselves are not stored.
func (l *Suppressions) Count(ctx context.Context, who auth.Principal) (map[SuppressionReason]int, error) {
	if err := directory.MayManage(who); err != nil {
		return nil, err
	}
	out := map[SuppressionReason]int{}
	err := l.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select reason, count(*) from suppression where project_id = $1 group by reason`, who.Project)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var r SuppressionReason
			var n int
			if err := rows.Scan(&r, &n); err != nil {
				return err
			}
			out[r] = n
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("count suppressed addresses: %w", err)
	}
	return out, nil
}

// Add puts an address on the list of who's project.
func (l *Suppressions) Add(ctx context.Context, who auth.Principal, address string) error {
	if err := auth.Need(who, auth.Reviewer); err != nil {
		return err
	}
	address, err := l.suppressible(who, address)
	if err != nil {
		return err
	}
	return l.db.Update(ctx, func(tx *store.Tx) error {
		if err := l.add(ctx, tx, who.Project, "", address, SuppressedAdded); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.SuppressionAdd, who.Project, audit.Fields{})
	})
}

// Remove takes an address off the list of who's project. It returns an error
// that wraps [store.ErrNotFound] if the address is not on it.
func (l *Suppressions) Remove(ctx context.Context, who auth.Principal, address string) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	address, err := l.suppressible(who, address)
	if err != nil {
		return err
	}
	return l.db.Update(ctx, func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `delete from suppression where project_id = $1 and hash = $2`, who.Project, l.suppressionHash(who.Project, address))
		if err != nil {
			return fmt.Errorf("remove suppressed address: %w", err)
		}
		if !ok {
			return fmt.Errorf("suppressed address: %w", store.ErrNotFound)
		}
		return audit.Append(ctx, tx, who, audit.SuppressionRemove, who.Project, audit.Fields{})
	})
}

// Token returns the token of an unsubscribe link (RFC 8058) in a message to
// address. It lets the holder unsubscribe that address and nothing else, and
// does not contain the address. It is the inbox ID, the hash of the address and
// a MAC of 16 bytes over both.
func (l *Suppressions) Token(b directory.Inbox, address string) string {
	body := b.ID + "." + base64.RawURLEncoding.EncodeToString(l.suppressionHash(b.Project, address))
	mac := seal.Hash(l.secret, b.ID, "postern unsubscribe v1", body)
	return body + "." + base64.RawURLEncoding.EncodeToString(mac[:16])
}

// CheckToken returns an error that wraps [directory.ErrInvalid] unless
// [Suppressions.Token] made token. It changes nothing.
func (l *Suppressions) CheckToken(token string) error {
	_, _, err := l.readToken(token)
	return err
}

// readToken verifies a token and returns its inbox ID and address hash.
func (l *Suppressions) readToken(token string) (inbox string, hash []byte, err error) {
	bad := fmt.Errorf("%w: the link is invalid or incomplete", directory.ErrInvalid)
	if len(token) > 300 {
		return "", nil, bad
	}
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return "", nil, bad
	}
	mac, merr := base64.RawURLEncoding.DecodeString(parts[2])
	hash, herr := base64.RawURLEncoding.DecodeString(parts[1])
	if merr != nil || herr != nil || !hmac.Equal(mac, seal.Hash(l.secret, parts[0], "postern unsubscribe v1", parts[0]+"."+parts[1])[:16]) {
		return "", nil, bad
	}
	return parts[0], hash, nil
}

// Unsubscribe puts the address of a token on the list of its project. A
// repeated call does nothing.
func (l *Suppressions) Unsubscribe(ctx context.Context, token string) error {
	inbox, hash, err := l.readToken(token)
	if err != nil {
		return err
	}
	return l.db.Update(ctx, func(tx *store.Tx) error {
		var project string
		err := tx.One(ctx, `select project_id from inbox where id = $1`, []any{inbox}, &project)
		if errors.Is(err, store.ErrNotFound) {
			return nil // a deleted inbox sends nothing
		}
		if err != nil {
			return fmt.Errorf("unsubscribe: %w", err)
		}
		fresh, err := tx.Changed(ctx, `insert into suppression (project_id, hash, reason, inbox_id, created_at) values ($1, $2, $3, $4, $5) on conflict do nothing`,
			project, hash, SuppressedUnsubscribe, inbox, store.Time(time.Now()))
		if err != nil || !fresh {
			return err
		}
		return audit.Append(ctx, tx, auth.Principal{Kind: auth.System, ID: "unsubscribe", Project: project}, audit.SuppressionAdd, project, audit.Fields{"inbox": inbox, "reason": string(SuppressedUnsubscribe)})
	})
}
