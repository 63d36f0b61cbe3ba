// Package people manages accounts of people: their roles, second factors and
// sessions. Each change has its entry in the audit.
//
// A person is never deleted, only disabled: the audit names people, so nobody may
// take over the name of one who decided. Each project keeps an owner who can sign
// in.
//
// A person with a second factor needs it to sign in, where a password alone no
// longer suffices, and again to change a credential, since the session may be
// stolen. Secrets are stored as digests. Those of authenticator apps, which the
// server must know, are encrypted under a key that is derived from the server's.
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
	"slices"
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
	// ErrLastOwner means that the project would have no owner who can sign in.
	ErrLastOwner = errors.New("a project needs an owner: make somebody else an owner first")
	// ErrChallenge means that a challenge does not exist, was used or has expired,
	// or that the response to it is invalid.
	ErrChallenge = errors.New("this step has expired or was already completed: start again")
	// ErrCode means that a code is wrong, was used already, or is too old.
	ErrCode = fmt.Errorf("%w code: it is wrong, was used already, or is too old", auth.ErrInvalid)
	// ErrPassword means that a person who is signed in typed a wrong password.
	ErrPassword = fmt.Errorf("%w password: it is wrong", auth.ErrInvalid)
	// ErrNoFactor means that a second factor is required of a person without one.
	ErrNoFactor = errors.New("there is no second factor yet: set one up")
)

// wrongPassword turns a failed check of a password into [ErrPassword], for people
// who are signed in already.
func wrongPassword(err error) error {
	if errors.Is(err, auth.ErrUnauthenticated) {
		return ErrPassword
	}
	return err
}

// Config is the configuration of [People].
type Config struct {
	// Key is the server's key, at least 32 bytes. The key that encrypts secrets of
	// authenticator apps is derived from it.
	Key []byte
}

// People manages the accounts of all projects. It is safe for concurrent use.
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

// A Person is an account, as owners and the person see it.
type Person struct {
	Name     string
	Role     auth.Role
	Email    string // for notices; may be empty
	Created  time.Time
	Disabled time.Time // since when the person cannot sign in; zero if they can
	TOTP     bool      // an authenticator app is set up
	Passkeys int       // number of passkeys
	Codes    int       // number of unused recovery codes
	Sessions int       // number of live sessions

	// Operator is the link of the operator at the machine to this account, as
	// [People.List] returns it; zero if there is none.
	Operator auth.Link

	id, project string
}

// Strong reports whether p has a second factor, so that a password alone does not
// sign in.
func (p Person) Strong() bool { return p.TOTP || p.Passkeys > 0 }

const selectPerson = `select p.id, p.project_id, p.name, p.role, p.email, p.created_at, p.disabled_at,
	(select count(*) from totp t where t.person_id = p.id), (select count(*) from passkey k where k.person_id = p.id),
	(select count(*) from recovery_code c where c.person_id = p.id and c.used_at = 0),
	(select count(*) from session s where s.person_id = p.id and s.expires_at > $1) from person p `

// scanPerson reads a row of selectPerson.
func scanPerson(row func(...any) error) (p Person, err error) {
	var created, disabled int64
	var totp int
	err = row(&p.id, &p.project, &p.Name, &p.Role, &p.Email, &created, &disabled, &totp, &p.Passkeys, &p.Codes, &p.Sessions)
	p.Created, p.Disabled, p.TOTP = store.FromTime(created), store.FromTime(disabled), totp > 0
	return p, err
}

// find returns the person with a name in who's project, or [ErrNotFound].
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

// ownAccount returns the account of who, or [auth.ErrForbidden] if who has none, as
// the operator at the machine.
func ownAccount(ctx context.Context, tx *store.Tx, who auth.Principal) (Person, error) {
	if who.Kind != auth.Person {
		return Person{}, fmt.Errorf("%s is not a person: %w", who, auth.ErrForbidden)
	}
	p, err := find(ctx, tx, who, who.ID)
	if errors.Is(err, ErrNotFound) {
		return Person{}, fmt.Errorf("%s has no account: %w", who, auth.ErrForbidden)
	}
	return p, err
}

// requireManager checks that who may manage people. An owner with a second factor
// must have proved it recently, so that a stolen session is not enough.
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

// RequireManager returns an error unless who is an owner whose second factor, if there
// is one, was proved lately; or the operator at the machine. It is for changes that
// reach as far as those of people: credentials.
func RequireManager(ctx context.Context, tx *store.Tx, who auth.Principal) error {
	return requireManager(ctx, tx, who)
}

// requireStepUp returns [auth.ErrStepUp] for a person with a second factor who has
// not proved it recently.
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
		if err != nil {
			return err
		}
		roll, err := auth.ReadRoll(ctx, tx, who.Project, time.Now())
		l := roll.Link()
		if i := slices.IndexFunc(out, func(p Person) bool { return personal(p.Name) == l.Person }); i >= 0 {
			out[i].Operator = l
		}
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

// Invite creates a one-time link for a new account, and returns it and its token,
// which cannot be retrieved again.
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
			return fmt.Errorf("%w role: %d invitations are open, which is the limit; withdraw one first", auth.ErrInvalid, n)
		}
		if out, token, err = auth.NewInvitation(ctx, tx, v); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.PersonInvite, out.ID, audit.Fields{"role": string(v.Role), "email": v.Email})
	})
	return out, token, err
}

// maxInvitations bounds the open invitations of a project.
const maxInvitations = 100

// RenewPassword creates a one-time link with which a person who forgot their
// password sets a new one. Only the operator at the machine may. The attack: an
// owner uses such a link to decide as another person, and so is two persons where
// two have to approve.
func (p *People) RenewPassword(ctx context.Context, who auth.Principal, name string) (out auth.Invitation, token auth.Secret, err error) {
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		if !who.Operator || !who.Manages() {
			return fmt.Errorf("only the operator at the machine can reset another person's password: %w", auth.ErrForbidden)
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

// Invitations returns the open links of the project, newest first.
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

// Withdraw ends an open invitation.
func (p *People) Withdraw(ctx context.Context, who auth.Principal, id string) error {
	return p.db.Update(ctx, func(tx *store.Tx) error {
		if err := requireManager(ctx, tx, who); err != nil {
			return err
		}
		// Rows from before this column have no ID; they end within a day.
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

// SetRole gives a person another role and ends their sessions, so that no session
// has rights of an earlier role.
func (p *People) SetRole(ctx context.Context, who auth.Principal, name string, role auth.Role) error {
	if !role.Valid() {
		return fmt.Errorf("%w role: %q is not a role, use owner, reviewer or viewer", auth.ErrInvalid, role)
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
		if !(auth.Principal{Kind: auth.Person, Role: role}).Decides() {
			if err := endLink(ctx, tx, who, them); err != nil {
				return err
			}
		}
		// This includes an owner who becomes a reviewer: they may have approved an
		// action that asks for an owner.
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

// Disable keeps a person from signing in and ends their sessions.
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
		// A link from before must not work after the person is enabled again.
		if _, err := auth.EndSetups(ctx, tx, `person_id = $1`, them.id); err != nil {
			return fmt.Errorf("disable person: %w", err)
		}
		if err := unlinkChat(ctx, tx, them.id); err != nil {
			return err
		}
		if err := endLink(ctx, tx, who, them); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.PersonDisable, them.Name, nil)
	})
}

// withdrawApprovals removes a person's approvals of actions that still wait for
// others. The attack: of two people who have to approve, one is found to be
// malicious and disabled, and their approval still counts. The audit keeps it.
func withdrawApprovals(ctx context.Context, tx *store.Tx, who auth.Principal, them Person) error {
	_, err := tx.ExecContext(ctx, `delete from approval where person = $1 and action_id in (select id from action where project_id = $2 and state = 'pending')`,
		auth.Principal{Kind: auth.Person, ID: them.Name}.String(), who.Project)
	if err != nil {
		return fmt.Errorf("take approvals back: %w", err)
	}
	return nil
}

// Enable lets a disabled person sign in again.
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

// Reset removes all second factors of a person who has lost them, and ends their
// sessions and the link of their chat. Then the password alone signs in until they
// set up a factor again.
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

// unlinkChat ends the link of a person's chat with the bot. The attack: somebody
// who found the phone decides in the chat.
func unlinkChat(ctx context.Context, tx *store.Tx, id string) error {
	for _, table := range []string{"telegram_link", "telegram_code", "telegram_question", "slack_link", "push_device"} {
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

// SetEmail sets a person's address for notices; empty means none. People may set
// their own, and owners that of others.
func (p *People) SetEmail(ctx context.Context, who auth.Principal, name, email string) error {
	if err := checkEmail(email); err != nil {
		return err
	}
	set := func(tx *store.Tx, them Person) error {
		if _, err := tx.ExecContext(ctx, `update person set email = $1 where id = $2`, email, them.id); err != nil {
			return fmt.Errorf("set email: %w", err)
		}
		return audit.Append(ctx, tx, who, audit.PersonReach, them.Name, audit.Fields{"email": email})
	}
	if who.Kind == auth.Person && name == who.ID {
		return p.db.Update(ctx, func(tx *store.Tx) error {
			me, err := ownAccount(ctx, tx, who)
			if err == nil {
				// The attack: a thief with a stolen session redirects the notices.
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

// change runs f on a person, after a check that who may manage people.
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

// updateSealed runs f, which changes a person's row, and seals the row again. A row
// that was tampered with before stays unsealed.
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

// keepAnOwner returns [ErrLastOwner] if the project has no other owner who can sign
// in. Two owners cannot remove each other at once: transactions that write run one
// at a time.
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

// checkEmail checks an address for notices.
func checkEmail(email string) error {
	if email != "" {
		a, err := mail.ParseAddress(email)
		if err != nil || a.Address != email || len(email) > 254 || strings.ContainsFunc(email, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
			return fmt.Errorf("%w email: want an address such as anna@example.com, without a display name", auth.ErrInvalid)
		}
	}
	return nil
}
