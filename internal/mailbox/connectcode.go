package mailbox

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

// A connect code creates one inbox for the first client that uses it. A person gives it
// to an agent, which needs no other credential. The code is the secret; the sentence
// around it is none. Its rights were checked when it was made, and are checked again
// when it is used.

const (
	// ConnectTime is how long a connect code is valid unless its maker says otherwise.
	ConnectTime = 24 * time.Hour
	// MaxConnectTime is the longest life of a connect code.
	MaxConnectTime = 30 * 24 * time.Hour
	// maxConnectCodes is how many codes of a project may be unused.
	maxConnectCodes = 100
	// keepConnectCodes is how long a code is listed after its end.
	keepConnectCodes = 30 * 24 * time.Hour
)

// ErrConnect means that a connect code makes nothing: it is unknown, withdrawn or
// expired.
var ErrConnect = fmt.Errorf("the code is wrong, withdrawn or expired: ask the person who gave it to you for another (%w)", auth.ErrForbidden)

// A UsedError means that a connect code was used before. It wraps [auth.ErrForbidden].
type UsedError struct {
	At time.Time // when it was used
}

// Error says what to do about it: only who has the code learns it.
func (e *UsedError) Error() string {
	return fmt.Sprintf("the code was used at %s, and works once: if that was not you, tell the person who gave it to you, since somebody else then has the inbox: %v",
		e.At.UTC().Format(time.RFC3339), auth.ErrForbidden)
}

// Unwrap implements the interface that [errors.Is] uses.
func (*UsedError) Unwrap() error { return auth.ErrForbidden }

// A NewConnectCode is a request for a code. The zero one asks for an inbox whose address
// is drawn, in mode gated_send, whose key does all.
type NewConnectCode struct {
	Address     string      // as in [directory.NewInbox]
	DisplayName string      // likewise
	Mode        policy.Mode // likewise
	Scope       seal.Scope  // of the inbox's key; empty means [seal.Manage]
	Expires     time.Time   // of the code; zero means after [ConnectTime]; [MaxConnectTime] away at most
}

// A ConnectCode is a code as its makers see it: without the secret.
type ConnectCode struct {
	ID          string
	Project     string
	Address     string // as asked for; empty means that one is drawn
	DisplayName string
	Mode        policy.Mode
	Scope       seal.Scope
	Created     time.Time
	CreatedBy   string // a principal
	Expires     time.Time
	Withdrawn   time.Time // zero means that it was not
	Used        time.Time // zero means that it was not
	Inbox       string    // ID of the inbox that it made; empty before
	Again       time.Time // when somebody last tried it after it was used; zero means never
}

const connectColumns = `id, project_id, address, display_name, mode, scope, created_at, created_by, expires_at, withdrawn_at, used_at, inbox_id, again_at`

func scanConnectCode(row func(...any) error) (c ConnectCode, err error) {
	var created, expires, withdrawn, used, again int64
	err = row(&c.ID, &c.Project, &c.Address, &c.DisplayName, &c.Mode, &c.Scope, &created, &c.CreatedBy, &expires, &withdrawn, &used, &c.Inbox, &again)
	c.Created, c.Expires, c.Withdrawn, c.Used, c.Again = store.FromTime(created), store.FromTime(expires), store.FromTime(withdrawn), store.FromTime(used), store.FromTime(again)
	return c, err
}

// SealedConnectCodes describes the sealed table of connect codes. The attack: somebody
// who can write the database inserts a code for an inbox that nobody watches.
func SealedConnectCodes() store.Sealed {
	return store.Sealed{Table: "connect_code", Key: []string{"id"}, Omit: []string{"again_at"}}
}

var connectForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^pcc_[A-Z2-7]{26}$`) })

// connectHash is what a code is kept as. It is under a key of the server's, so that a
// copy of the database is nothing to search in.
func (m *PostOffice) connectHash(code auth.Secret) []byte {
	return seal.Hash(m.cfg.Secret, "", "postern connect code v1", code.Reveal())
}

// mayConnect returns an error unless who is an owner. The attack: an agent with the
// project's key hands out inboxes that outlive that key.
func mayConnect(who auth.Principal) error {
	if !who.Manages() {
		return fmt.Errorf("%s may not manage connect codes: only an owner may: %w", who, auth.ErrForbidden)
	}
	return nil
}

// plan returns the inbox that a code makes for its maker, without keys.
func (m *PostOffice) plan(maker auth.Principal, c ConnectCode) (directory.Inbox, []string, error) {
	return m.Directory.Plan(maker, directory.NewInbox{Address: c.Address, DisplayName: c.DisplayName, Mode: c.Mode})
}

// loosened asks policy whether a maker may create b in its mode by hand.
func (m *PostOffice) loosened(ctx context.Context, tx *store.Tx, maker auth.Principal, b directory.Inbox) error {
	if !b.Mode.Looser(policy.GatedSend) {
		return nil
	}
	from := b
	from.Mode = policy.GatedSend
	return m.gate.ByHand(ctx, tx, maker, raising(from, b.Mode))
}

// NewConnectCode creates a code. The secret is returned only this once. Who is an owner.
func (m *PostOffice) NewConnectCode(ctx context.Context, who auth.Principal, n NewConnectCode) (c ConnectCode, code auth.Secret, err error) {
	if err := mayConnect(who); err != nil {
		return c, "", err
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	c = ConnectCode{
		ID: "ccd_" + rand.Text(), Project: who.Project, Address: strings.ToLower(strings.TrimSpace(n.Address)), DisplayName: n.DisplayName, Mode: n.Mode, Scope: n.Scope,
		Created: now, CreatedBy: who.String(), Expires: n.Expires.UTC().Truncate(time.Microsecond),
	}
	if c.Mode == "" {
		c.Mode = policy.GatedSend
	}
	if c.Scope == "" {
		c.Scope = seal.Manage
	}
	if n.Expires.IsZero() {
		c.Expires = now.Add(ConnectTime)
	}
	switch {
	case !c.Scope.Valid():
		return c, "", fmt.Errorf("%w: scopes: must be some of %v", directory.ErrInvalid, seal.Scopes)
	case !c.Scope.Includes(seal.Read):
		// Its key is the only one that the inbox gets.
		return c, "", fmt.Errorf("%w: scopes: must include %s, since nobody else could open the inbox's mail", directory.ErrInvalid, seal.Read)
	case !c.Expires.After(now) || c.Expires.After(now.Add(MaxConnectTime)):
		return c, "", fmt.Errorf("%w: expires_at: must be in the future, %d days away at most", directory.ErrInvalid, MaxConnectTime/(24*time.Hour))
	}
	b, _, err := m.plan(who, c)
	if err != nil {
		return c, "", err
	}
	code = auth.Secret("pcc_" + rand.Text())
	err = m.db.Update(ctx, func(tx *store.Tx) error { return m.insertConnectCode(ctx, tx, who, c, code, b) })
	if err != nil {
		return c, "", err
	}
	return c, code, nil
}

func (m *PostOffice) insertConnectCode(ctx context.Context, tx *store.Tx, who auth.Principal, c ConnectCode, code auth.Secret, b directory.Inbox) error {
	if err := m.loosened(ctx, tx, who, b); err != nil {
		return err
	}
	if c.Address != "" {
		if _, err := directory.Lookup(ctx, tx, b.Address); err == nil {
			return &directory.TakenError{Address: b.Address}
		} else if !errors.Is(err, directory.ErrNoInbox) {
			return err
		}
	}
	if _, err := tx.ExecContext(ctx, `delete from connect_code where project_id = $1 and expires_at < $2`, c.Project, store.Time(c.Created.Add(-keepConnectCodes))); err != nil {
		return fmt.Errorf("remove old connect codes: %w", err)
	}
	var open int
	err := tx.One(ctx, `select count(*) from connect_code where project_id = $1 and used_at = 0 and withdrawn_at = 0 and expires_at > $2`, []any{c.Project, store.Time(c.Created)}, &open)
	if err != nil {
		return fmt.Errorf("count connect codes: %w", err)
	}
	if open >= maxConnectCodes {
		return fmt.Errorf("%w: the project has %d unused connect codes, which is the limit: withdraw some", directory.ErrInvalid, open)
	}
	_, err = tx.ExecContext(ctx, `insert into connect_code (id, project_id, hash, address, display_name, mode, scope, created_at, created_by, expires_at) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`,
		c.ID, c.Project, m.connectHash(code), c.Address, c.DisplayName, c.Mode, c.Scope, store.Time(c.Created), c.CreatedBy, store.Time(c.Expires))
	if err != nil {
		return fmt.Errorf("insert connect code: %w", err)
	}
	if err := tx.Seal(ctx, SealedConnectCodes(), `id = $1`, c.ID); err != nil {
		return err
	}
	return audit.Append(ctx, tx, who, audit.ConnectCreate, c.ID, audit.Fields{"address": c.Address, "mode": string(c.Mode), "scope": string(c.Scope), "ends": ends(c.Expires)})
}

// ConnectCodes returns the codes of who's project, newest first, without their secrets.
func (m *PostOffice) ConnectCodes(ctx context.Context, who auth.Principal) (out []ConnectCode, err error) {
	if err := directory.MayManage(who); err != nil {
		return nil, err
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, scanConnectCode, `select `+connectColumns+` from connect_code where project_id = $1 order by created_at desc, id limit 1000`, who.Project)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list connect codes: %w", err)
	}
	return out, nil
}

// WithdrawConnectCode ends an unused code. To withdraw one again changes nothing.
func (m *PostOffice) WithdrawConnectCode(ctx context.Context, who auth.Principal, id string) error {
	if err := mayConnect(who); err != nil {
		return err
	}
	return m.db.Update(ctx, func(tx *store.Tx) error {
		c, holds, err := m.connectCode(ctx, tx, `id = $1 and project_id = $2`, id, who.Project)
		if err != nil {
			return err
		}
		switch {
		case !c.Used.IsZero():
			return fmt.Errorf("%w: the code was used: delete its inbox %s instead", directory.ErrInvalid, c.Inbox)
		case !c.Withdrawn.IsZero():
			return nil
		}
		if _, err := tx.ExecContext(ctx, `update connect_code set withdrawn_at = $1 where id = $2`, store.Time(time.Now()), id); err != nil {
			return fmt.Errorf("withdraw connect code: %w", err)
		}
		if holds { // a forged row stays invalid
			if err := tx.Seal(ctx, SealedConnectCodes(), `id = $1`, id); err != nil {
				return err
			}
		}
		return audit.Append(ctx, tx, who, audit.ConnectWithdraw, id, nil)
	})
}

// connectCode returns the code that matches where, locked until tx ends, and whether
// the server wrote its row.
func (m *PostOffice) connectCode(ctx context.Context, tx *store.Tx, where string, args ...any) (c ConnectCode, holds bool, err error) {
	rows, err := tx.Rows(ctx, SealedConnectCodes(), true, where, args...)
	if err != nil {
		return c, false, err
	}
	if len(rows) == 0 {
		return c, false, fmt.Errorf("connect code: %w", store.ErrNotFound)
	}
	id, _ := rows[0].Values["id"].(string)
	list, err := store.List(ctx, tx, scanConnectCode, `select `+connectColumns+` from connect_code where id = $1`, id)
	if err != nil || len(list) == 0 {
		return c, false, errors.Join(err, store.ErrNotFound)
	}
	return list[0], rows[0].Holds, nil
}

// Redeem uses up a code: it creates the code's inbox and returns it with its key, which
// is shown only this once. Of two who show one code at the same time, one gets the inbox
// and the other a [UsedError], which the record and the code's makers see too.
func (m *PostOffice) Redeem(ctx context.Context, code auth.Secret) (b directory.Inbox, scope seal.Scope, key auth.Secret, err error) {
	if !connectForm().MatchString(code.Reveal()) {
		return b, "", "", ErrConnect
	}
	hash := m.connectHash(code)
	var again *UsedError
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		again = nil
		c, holds, err := m.connectCode(ctx, tx, `hash = $1`, hash)
		if errors.Is(err, store.ErrNotFound) {
			return ErrConnect
		}
		if err != nil {
			return err
		}
		now := time.Now().UTC().Truncate(time.Microsecond)
		switch {
		case !holds:
			return ErrConnect
		case !c.Used.IsZero():
			again = &UsedError{c.Used}
			return usedAgain(ctx, tx, c, now)
		case !c.Withdrawn.IsZero() || !c.Expires.After(now):
			return ErrConnect
		}
		scope = c.Scope
		b, key, err = m.redeem(ctx, tx, c, hash, now)
		return err
	})
	if err == nil && again != nil {
		err = again
	}
	if err != nil {
		return directory.Inbox{}, "", "", err
	}
	return b, scope, key, nil
}

// usedAgain records that somebody showed a code that was used. It writes once a minute
// at most. The attack: the first user of a code fills the record with its repetition.
func usedAgain(ctx context.Context, tx *store.Tx, c ConnectCode, now time.Time) error {
	if now.Sub(c.Again) < time.Minute {
		return nil
	}
	if _, err := tx.ExecContext(ctx, `update connect_code set again_at = $1 where id = $2`, store.Time(now), c.ID); err != nil {
		return fmt.Errorf("note use of connect code: %w", err)
	}
	return audit.Append(ctx, tx, auth.Principal{Kind: auth.System, ID: auth.Connect, Project: c.Project}, audit.ConnectAgain, c.ID, audit.Fields{"inbox": c.Inbox})
}

// redeem creates the inbox of a code in tx, which holds the code's row.
func (m *PostOffice) redeem(ctx context.Context, tx *store.Tx, c ConnectCode, hash []byte, now time.Time) (b directory.Inbox, key auth.Secret, err error) {
	maker, err := makerOf(ctx, tx, c)
	if err != nil {
		return b, "", err
	}
	b, more, err := m.plan(maker, c)
	if err != nil {
		return b, "", err
	}
	// The attack: the row of a used code is restored with its former seal, and the code
	// makes a second inbox. So the ID of the inbox follows from the code.
	b.ID = "ibx_" + base32.StdEncoding.EncodeToString(seal.Hash(m.cfg.Secret, "", "postern inbox of connect code v1", string(hash)))[:26]
	if _, err := directory.LookupStored(ctx, tx, b.ID); err == nil {
		return b, "", ErrConnect
	} else if !errors.Is(err, directory.ErrNoInbox) {
		return b, "", err
	}
	// The attack: a code from before policy asked two people for its mode.
	if err := m.loosened(ctx, tx, maker, b); err != nil {
		return b, "", err
	}
	for len(more) > 0 { // the address was drawn: take the first free one
		if _, err := directory.Lookup(ctx, tx, b.Address); err != nil {
			break
		}
		b.Address, more = more[0], more[1:]
	}
	pair, err := seal.NewPair(b.ID, b.Epoch)
	if err != nil {
		return b, "", err
	}
	b.PublicKey = pair.Public
	who := auth.Principal{Kind: auth.System, ID: auth.Connect, Project: c.Project}
	if key, err = m.insert(ctx, tx, who, b, pair, nil, c.Scope); err != nil {
		return b, "", err
	}
	if _, err := tx.ExecContext(ctx, `update connect_code set used_at = $1, inbox_id = $2 where id = $3`, store.Time(now), b.ID, c.ID); err != nil {
		return b, "", fmt.Errorf("use connect code: %w", err)
	}
	if err := tx.Seal(ctx, SealedConnectCodes(), `id = $1`, c.ID); err != nil {
		return b, "", err
	}
	return b, key, audit.Append(ctx, tx, who, audit.ConnectUse, c.ID, audit.Fields{"inbox": b.ID, "address": b.Address, "by": c.CreatedBy})
}

// makerOf returns the owner who made a code, if they are still one. The attack: somebody
// who leaves the project keeps a code.
func makerOf(ctx context.Context, tx *store.Tx, c ConnectCode) (auth.Principal, error) {
	name := strings.TrimPrefix(c.CreatedBy, string(auth.Person)+":")
	maker := auth.Principal{Kind: auth.Person, ID: name, Project: c.Project, Role: auth.Owner, Strong: time.Now()}
	if name == "local" || strings.HasPrefix(name, "local-") { // the operator: no account has such a name
		maker.Operator = true
		return maker, nil
	}
	var n int
	err := tx.One(ctx, `select count(*) from person where name = $1 and project_id = $2 and role = $3 and disabled_at = 0`, []any{name, c.Project, auth.Owner}, &n)
	if err != nil {
		return maker, fmt.Errorf("find the maker of a connect code: %w", err)
	}
	if n == 0 {
		return maker, ErrConnect
	}
	return maker, nil
}
