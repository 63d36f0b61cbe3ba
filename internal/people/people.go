// Package people manages who may decide: a project's persons, their roles,
// their second factors and their sessions, each change with its entry in the
// record.
//
// A person is never deleted, only disabled: the record names people, and
// nobody else can take the name of one who decided. Each project keeps an
// owner who can come in.
//
// Whoever has a second factor needs it, each time: to sign in, where a password
// alone is not enough any more, and again to change what lets people in, since
// a session may have been stolen. Secrets are stored as digests, and those of
// authenticator apps, which the server must know, encrypted under its key.
package people

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/mail"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// The errors of this package, one for each answer that a door can give.
var (
	// ErrNotFound means that there is no such person, invitation, session or passkey.
	ErrNotFound = errors.New("no such person")
	// ErrLastOwner means that the project would be without an owner who can come in.
	ErrLastOwner = errors.New("a project keeps an owner: make somebody else one first")
	// ErrChallenge means that what is answered was not asked, was answered
	// already, or too long ago; or that the answer is none.
	ErrChallenge = errors.New("what this answers was not asked, or too long ago: begin anew")
	// ErrCode means that a code is wrong, was used already, or is too old.
	ErrCode = fmt.Errorf("%w code: it is wrong, was used already, or is too old", auth.ErrInvalid)
	// ErrPassword means that who is signed in typed a wrong password.
	ErrPassword = fmt.Errorf("%w password: it is not right", auth.ErrInvalid)
	// ErrNoFactor means that somebody who has no second factor is asked for one.
	ErrNoFactor = errors.New("there is no second factor yet: set one up")
)

func wrongPassword(err error) error {
	if errors.Is(err, auth.ErrUnauthenticated) {
		return ErrPassword
	}
	return err
}

// Config is what [People] work with.
type Config struct {
	// Key is the server's secret; the secrets of authenticator apps are
	// encrypted under one that is derived from it. At least 32 bytes.
	Key []byte
}

// People are the persons of all projects. It is safe for concurrent use.
type People struct {
	db     *store.DB
	aead   cipher.AEAD
	signIn *auth.SignIn

	mu       sync.Mutex // guards what follows
	failures failures
}

// New returns the people in db.
func New(db *store.DB, c Config) (*People, error) {
	if len(c.Key) < 32 {
		return nil, errors.New("people: the server's key has fewer than 32 bytes")
	}
	key, err := hkdf.Key(sha256.New, c.Key, nil, "postern second factor v1", 32)
	if err != nil {
		return nil, fmt.Errorf("derive key for second factors: %w", err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("derive key for second factors: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("derive key for second factors: %w", err)
	}
	return &People{db: db, aead: aead, signIn: auth.NewSignIn(db)}, nil
}

// A Person is an account, as owners and its own person see it.
type Person struct {
	Name     string
	Role     auth.Role
	Email    string // where to write of what waits; may be empty
	Created  time.Time
	Disabled time.Time // since when the person may not come in; zero means they may
	TOTP     bool      // an authenticator app is set up
	Passkeys int
	Codes    int // recovery codes that are left
	Sessions int // that have not ended

	id, project string
}

// Strong reports whether p has a second factor, so that a password alone does
// not sign in.
func (p Person) Strong() bool { return p.TOTP || p.Passkeys > 0 }

const selectPerson = `select p.id, p.project_id, p.name, p.role, p.email, p.created_at, p.disabled_at,
	(select count(*) from totp t where t.person_id = p.id), (select count(*) from passkey k where k.person_id = p.id),
	(select count(*) from recovery_code c where c.person_id = p.id and c.used_at = 0),
	(select count(*) from session s where s.person_id = p.id and s.expires_at > $1) from person p `

func scanPerson(row func(...any) error) (p Person, err error) {
	var created, disabled int64
	var totp int
	err = row(&p.id, &p.project, &p.Name, &p.Role, &p.Email, &created, &disabled, &totp, &p.Passkeys, &p.Codes, &p.Sessions)
	p.Created, p.Disabled, p.TOTP = store.FromTime(created), store.FromTime(disabled), totp > 0
	return p, err
}

// find returns the person of a name in the project of who.
func find(ctx context.Context, tx *store.Tx, who auth.Principal, name string) (Person, error) {
	list, err := store.List(ctx, tx, scanPerson, selectPerson+`where p.name = $2 and p.project_id = $3`, store.Time(time.Now()), name, who.Project)
	if err != nil {
		return Person{}, fmt.Errorf("find person: %w", err)
	}
	if len(list) == 0 {
		return Person{}, ErrNotFound
	}
	return list[0], nil
}

// ownAccount returns the account of who. The operator at the machine has none.
func ownAccount(ctx context.Context, tx *store.Tx, who auth.Principal) (Person, error) {
	if who.Kind != auth.Person {
		return Person{}, fmt.Errorf("%s is no person: %w", who, auth.ErrForbidden)
	}
	p, err := find(ctx, tx, who, who.ID)
	if errors.Is(err, ErrNotFound) {
		return Person{}, fmt.Errorf("%s has no account: %w", who, auth.ErrForbidden)
	}
	return p, err
}

// requireManager checks that who manages people, and that it was not only a session
// that was stolen: an owner with a second factor has to have proved it now.
func requireManager(ctx context.Context, tx *store.Tx, who auth.Principal) error {
	if !who.Manages() {
		return fmt.Errorf("%s may not manage people, only an owner may: %w", who, auth.ErrForbidden)
	}
	p, err := find(ctx, tx, who, who.ID)
	if errors.Is(err, ErrNotFound) { // the operator at the machine
		return nil
	}
	if err == nil {
		err = requireStepUp(who, p)
	}
	return err
}

// requireStepUp checks that a person with a second factor has proved it now.
func requireStepUp(who auth.Principal, p Person) error {
	if p.Strong() && !who.Proved() {
		return auth.ErrStepUp
	}
	return nil
}

// List returns the persons of the project, by name.
func (p *People) List(ctx context.Context, who auth.Principal) (out []Person, err error) {
	if !who.Manages() {
		return nil, fmt.Errorf("%s may not list people, only an owner may: %w", who, auth.ErrForbidden)
	}
	err = p.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, scanPerson, selectPerson+`where p.project_id = $2 order by p.name`, store.Time(time.Now()), who.Project)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list people: %w", err)
	}
	return out, nil
}

// Me returns the account of who.
func (p *People) Me(ctx context.Context, who auth.Principal) (me Person, err error) {
	err = p.db.View(ctx, func(tx *store.Tx) error {
		me, err = ownAccount(ctx, tx, who)
		return err
	})
	return me, err
}

// Invite makes a one-time link with which somebody makes an account of a role,
// and returns it and its token, this once.
func (p *People) Invite(ctx context.Context, who auth.Principal, v auth.Invitation) (out auth.Invitation, token auth.Secret, err error) {
	if err := checkEmail(v.Email); err != nil {
		return out, "", err
	}
	v.Project, v.Person, v.CreatedBy = who.Project, "", who.String()
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		if err := requireManager(ctx, tx, who); err != nil {
			return err
		}
		var n int
		if err := tx.One(ctx, `select count(*) from setup where project_id = $1 and used_at = 0 and expires_at > $2`, []any{who.Project, store.Time(time.Now())}, &n); err != nil {
			return err
		}
		if n >= maxInvitations {
			return fmt.Errorf("%w role: %d invitations are open, withdraw one first", auth.ErrInvalid, n)
		}
		if out, token, err = auth.NewInvitation(ctx, tx, v); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.PersonInvite, out.ID, audit.Fields{"role": string(v.Role), "email": v.Email})
	})
	return out, token, err
}

// maxInvitations bounds the links that are open at a time in a project.
const maxInvitations = 100

// RenewPassword makes a one-time link with which a person who has forgotten
// their password chooses another. Only the operator at the machine may: an
// owner who could would be able to decide in another's name, and so be two
// persons where two are asked for.
func (p *People) RenewPassword(ctx context.Context, who auth.Principal, name string) (out auth.Invitation, token auth.Secret, err error) {
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		if !who.Operator || !who.Manages() {
			return fmt.Errorf("only the operator at the machine gives a new password to another: %w", auth.ErrForbidden)
		}
		them, err := find(ctx, tx, who, name)
		if err != nil {
			return err
		}
		out, token, err = auth.NewInvitation(ctx, tx, auth.Invitation{Project: who.Project, Role: them.Role, Person: name, CreatedBy: who.String()})
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.PersonRenew, name, audit.Fields{"link": out.ID})
	})
	return out, token, err
}

// Invitations returns the links of the project that can still be used.
func (p *People) Invitations(ctx context.Context, who auth.Principal) (out []auth.Invitation, err error) {
	if !who.Manages() {
		return nil, fmt.Errorf("%s may not list invitations, only an owner may: %w", who, auth.ErrForbidden)
	}
	err = p.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, func(row func(...any) error) (v auth.Invitation, err error) {
			var created, expires int64
			err = row(&v.ID, &v.Project, &v.Role, &v.Email, &v.CreatedBy, &created, &expires, &v.Person)
			v.Created, v.Expires = store.FromTime(created), store.FromTime(expires)
			return v, err
		}, `select s.id, s.project_id, s.role, s.email, s.created_by, s.created_at, s.expires_at, coalesce(p.name, '')
			from setup s left join person p on p.id = s.person_id where s.project_id = $1 and s.used_at = 0 and s.expires_at > $2 order by s.created_at desc, s.id`,
			who.Project, store.Time(time.Now()))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list invitations: %w", err)
	}
	return out, nil
}

// Withdraw ends an invitation that was not used.
func (p *People) Withdraw(ctx context.Context, who auth.Principal, id string) error {
	return p.db.Update(ctx, func(tx *store.Tx) error {
		if err := requireManager(ctx, tx, who); err != nil {
			return err
		}
		// Those from before this column have no id, and end within a day.
		n, err := auth.EndSetups(ctx, tx, `id = $1 and id <> '' and project_id = $2`, id, who.Project)
		if err != nil {
			return fmt.Errorf("withdraw invitation: %w", err)
		}
		if n == 0 {
			return fmt.Errorf("invitation %q: %w", id, ErrNotFound)
		}
		return audit.Append(ctx, tx, who, audit.PersonWithdraw, id, nil)
	})
}

// SetRole gives a person another role. Their sessions end: what they may do is
// never a matter of when they signed in.
func (p *People) SetRole(ctx context.Context, who auth.Principal, name string, role auth.Role) error {
	if !role.Valid() {
		return fmt.Errorf("%w role: there is no %q, use owner, reviewer or viewer", auth.ErrInvalid, role)
	}
	return p.change(ctx, who, name, func(tx *store.Tx, them Person) error {
		if them.Role == role {
			return nil
		}
		if role != auth.Owner {
			if err := keepAnOwner(ctx, tx, who, them); err != nil {
				return err
			}
		}
		if err := auth.RecordChange(ctx, tx, them.id, who.String(), auth.RoleChanged); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `update person set role = $1 where id = $2`, role, them.id); err != nil {
			return fmt.Errorf("set role: %w", err)
		}
		// Also of who was an owner and reviews from now on: they may have been asked
		// as an owner.
		if role != auth.Owner {
			if err := withdrawApprovals(ctx, tx, who, them); err != nil {
				return err
			}
		}
		if err := auth.EndSessions(ctx, tx, them.id, ""); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.PersonRole, them.Name, audit.Fields{"from": string(them.Role), "to": string(role)})
	})
}

// Disable lets a person in no more, and ends their sessions.
func (p *People) Disable(ctx context.Context, who auth.Principal, name string) error {
	return p.change(ctx, who, name, func(tx *store.Tx, them Person) error {
		if !them.Disabled.IsZero() {
			return nil
		}
		if err := keepAnOwner(ctx, tx, who, them); err != nil {
			return err
		}
		if err := auth.RecordChange(ctx, tx, them.id, who.String(), auth.Disabled); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `update person set disabled_at = $1 where id = $2`, store.Time(time.Now()), them.id); err != nil {
			return fmt.Errorf("disable person: %w", err)
		}
		if err := withdrawApprovals(ctx, tx, who, them); err != nil {
			return err
		}
		if err := auth.EndSessions(ctx, tx, them.id, ""); err != nil {
			return err
		}
		// Who is let in again later does not find a way that was opened before.
		if _, err := auth.EndSetups(ctx, tx, `person_id = $1`, them.id); err != nil {
			return fmt.Errorf("disable person: %w", err)
		}
		if err := unlinkChat(ctx, tx, them.id); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.PersonDisable, them.Name, nil)
	})
}

// withdrawApprovals takes back what a person approved of that still waits for others. The
// attack: of two who have to approve one is found out and let in no more, and
// his yes would still count. That he gave it stays in the record.
func withdrawApprovals(ctx context.Context, tx *store.Tx, who auth.Principal, them Person) error {
	_, err := tx.ExecContext(ctx, `delete from approval where person = $1 and action_id in (select id from action where project_id = $2 and state = 'pending')`,
		auth.Principal{Kind: auth.Person, ID: them.Name}.String(), who.Project)
	if err != nil {
		return fmt.Errorf("take approvals back: %w", err)
	}
	return nil
}

// Enable lets a person in again.
func (p *People) Enable(ctx context.Context, who auth.Principal, name string) error {
	return p.change(ctx, who, name, func(tx *store.Tx, them Person) error {
		if them.Disabled.IsZero() {
			return nil
		}
		if err := auth.RecordChange(ctx, tx, them.id, who.String(), auth.Enabled); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `update person set disabled_at = 0 where id = $1`, them.id); err != nil {
			return fmt.Errorf("enable person: %w", err)
		}
		return audit.Append(ctx, tx, who, audit.PersonEnable, them.Name, nil)
	})
}

// Reset takes all second factors from a person who has lost them, and ends
// their sessions and the link of their chat. Their password is then enough until
// they set one up again.
func (p *People) Reset(ctx context.Context, who auth.Principal, name string) error {
	return p.change(ctx, who, name, func(tx *store.Tx, them Person) error {
		if err := removeFactors(ctx, tx, them.id); err != nil {
			return err
		}
		// The attack: an owner who knows the password resets the second factor, and
		// then approves as this person too.
		if err := auth.RecordChange(ctx, tx, them.id, who.String(), auth.Reset); err != nil {
			return err
		}
		if err := auth.EndSessions(ctx, tx, them.id, ""); err != nil {
			return err
		}
		if err := unlinkChat(ctx, tx, them.id); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.PersonReset, them.Name, nil)
	})
}

// unlinkChat ends the link of a person's chat with the bot. The attack: who found
// the phone decides there.
func unlinkChat(ctx context.Context, tx *store.Tx, id string) error {
	for _, table := range []string{"telegram_link", "telegram_code", "telegram_question"} {
		if _, err := tx.ExecContext(ctx, `delete from `+table+` where person_id = $1`, id); err != nil {
			return fmt.Errorf("end link of chat: %w", err)
		}
	}
	return nil
}

// removeFactors removes the second factors of a person.
func removeFactors(ctx context.Context, tx *store.Tx, id string) error {
	for _, table := range []string{"totp", "passkey", "recovery_code", "challenge"} {
		if _, err := tx.ExecContext(ctx, `delete from `+table+` where person_id = $1`, id); err != nil {
			return fmt.Errorf("remove second factors: %w", err)
		}
	}
	return nil
}

// SetEmail says where a person is written to of what waits; package notify has
// their chat. Everybody may for themself, and an owner for others.
func (p *People) SetEmail(ctx context.Context, who auth.Principal, name, email string) error {
	if err := checkEmail(email); err != nil {
		return err
	}
	set := func(tx *store.Tx, them Person) error {
		if _, err := tx.ExecContext(ctx, `update person set email = $1 where id = $2`, email, them.id); err != nil {
			return fmt.Errorf("set where to write: %w", err)
		}
		return audit.Append(ctx, tx, who, audit.PersonReach, them.Name, audit.Fields{"email": email})
	}
	if who.Kind == auth.Person && name == who.ID {
		return p.db.Update(ctx, func(tx *store.Tx) error {
			me, err := ownAccount(ctx, tx, who)
			if err == nil {
				// The attack: what waits is told to somebody with a stolen session.
				err = requireStepUp(who, me)
			}
			if err != nil {
				return err
			}
			return updateSealed(ctx, tx, me, set)
		})
	}
	return p.change(ctx, who, name, set)
}

// change runs f on a person whom who may manage.
func (p *People) change(ctx context.Context, who auth.Principal, name string, f func(*store.Tx, Person) error) error {
	return p.db.Update(ctx, func(tx *store.Tx) error {
		if err := requireManager(ctx, tx, who); err != nil {
			return err
		}
		them, err := find(ctx, tx, who, name)
		if err != nil {
			return err
		}
		return updateSealed(ctx, tx, them, f)
	})
}

// updateSealed changes a person's row by f and seals it. It does not seal a row that
// was forged.
func updateSealed(ctx context.Context, tx *store.Tx, them Person, f func(*store.Tx, Person) error) error {
	genuine, err := tx.Holding(ctx, auth.SealedPeople(), `id = $1`, them.id)
	if err != nil {
		return err
	}
	if err := f(tx, them); err != nil || !genuine {
		return err
	}
	return auth.SealPerson(ctx, tx, them.id)
}

// keepAnOwner checks that the project has another owner who can come in. Two owners
// who remove each other at once take turns: transactions that write do.
func keepAnOwner(ctx context.Context, tx *store.Tx, who auth.Principal, them Person) error {
	if them.Role != auth.Owner || !them.Disabled.IsZero() {
		return nil
	}
	var n int
	err := tx.One(ctx, `select count(*) from person where project_id = $1 and role = $2 and disabled_at = 0 and id <> $3`, []any{who.Project, auth.Owner, them.id}, &n)
	if err != nil {
		return fmt.Errorf("count owners: %w", err)
	}
	if n == 0 {
		return ErrLastOwner
	}
	return nil
}

// checkEmail checks where a person wants to be told of what waits.
func checkEmail(email string) error {
	if email != "" {
		a, err := mail.ParseAddress(email)
		if err != nil || a.Address != email || len(email) > 254 || strings.ContainsFunc(email, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
			return fmt.Errorf("%w email: want an address such as anna@example.com, without a name", auth.ErrInvalid)
		}
	}
	return nil
}
