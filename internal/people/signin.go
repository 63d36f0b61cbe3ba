package people

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// A Visit describes the client of a sign-in.
type Visit struct {
	Kind   auth.SessionKind
	Remote string      // the client's address
	Agent  string      // the client's User-Agent
	Former auth.Secret // token of the browser's former session, which ends; may be empty
}

// session returns the session that a sign-in with this factor begins; empty means
// with a password alone.
func (v Visit) session(factor string) auth.Session {
	s := auth.Session{Kind: v.Kind, Remote: v.Remote, Agent: v.Agent, Factor: factor}
	if factor != "" {
		s.Strong = time.Now()
	}
	return s
}

// A Started is the result of the first step of a sign-in: a session or, if Token is
// empty, a challenge for a second factor, to be answered by [People.Second] with
// Next.
type Started struct {
	Who     auth.Principal // of a session
	Session auth.Session
	Token   auth.Secret // of the session; empty if there is none yet

	Next    auth.Secret // token of the challenge
	TOTP    bool        // the person has an authenticator app
	Passkey bool        // the person has a passkey and can sign in with that instead
}

// Password checks a name and password. It signs in a person without a second factor
// and returns a challenge for one with. The error is [auth.ErrUnauthenticated] for
// a wrong name or password, or [auth.ErrTooMany].
func (p *People) Password(ctx context.Context, name, password string, v Visit) (Started, error) {
	them, who, err := p.password(ctx, name, password, v)
	if err != nil {
		return Started{}, err
	}
	var out Started
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		if them, err = enabledPerson(ctx, tx, them.id); err != nil {
			return err
		}
		if !them.Strong() {
			out, err = beginSession(ctx, tx, who, v, "")
			return err
		}
		out = Started{TOTP: them.TOTP, Passkey: them.Passkeys > 0}
		out.Next, err = newChallenge(ctx, tx, challenge{purpose: forSecond, person: them.id})
		return err
	})
	return out, err
}

// password checks a name and a password.
func (p *People) password(ctx context.Context, name, password string, v Visit) (them Person, who auth.Principal, err error) {
	if len(name) > 63 || !utf8.ValidString(name) || strings.Contains(name, "\x00") {
		err = auth.ErrUnauthenticated // not a possible name, and PostgreSQL would refuse it
	} else {
		who, err = p.signIn.Check(ctx, name, v.Remote, password)
	}
	if err == nil {
		err = p.db.View(ctx, func(tx *store.Tx) error {
			them, err = find(ctx, tx, who, who.ID)
			return err
		})
	}
	if errors.Is(err, auth.ErrUnauthenticated) {
		return them, who, p.failed(ctx, name, v.Remote, "password")
	}
	return them, who, err
}

// Second completes a sign-in that [People.Password] began, with a code of an
// authenticator app or a recovery code. The error is [ErrChallenge] if the challenge
// is no longer open, and else as for Password.
func (p *People) Second(ctx context.Context, next auth.Secret, code string, v Visit) (out Started, err error) {
	var c challenge
	var them Person
	err = p.db.View(ctx, func(tx *store.Tx) error {
		if c, err = readChallenge(ctx, tx, next, challenge{purpose: forSecond}); err != nil {
			return err
		}
		them, err = enabledPerson(ctx, tx, c.person)
		return err
	})
	if err != nil {
		return out, err
	}
	err = p.countedAttempt(ctx, them.Name, v.Remote, func(tx *store.Tx) error {
		factor, err := p.code(ctx, tx, them, code)
		if err != nil {
			return err
		}
		if _, err := takeChallenge(ctx, tx, next, c); err != nil { // another request has used it
			return err
		}
		who := auth.Principal{Kind: auth.Person, ID: them.Name, Project: them.project, Role: them.Role}
		out, err = beginSession(ctx, tx, who, v, factor)
		return err
	})
	if errors.Is(err, auth.ErrUnauthenticated) {
		err = p.failed(ctx, them.Name, v.Remote, "second factor")
	}
	return out, err
}

// SignIn is [People.Password] and [People.Second] in one call. The code may be empty
// for a person without a second factor. The error does not reveal whether the
// password or the code was wrong.
func (p *People) SignIn(ctx context.Context, name, password, code string, v Visit) (Started, error) {
	out, err := p.Password(ctx, name, password, v)
	if err != nil || out.Token != "" {
		return out, err
	}
	return p.Second(ctx, out.Next, code, v)
}

// Redeem uses a set-up link. It creates an account and signs the person in, or sets
// the password of the person whom the link names, and signs them in unless they
// have a second factor.
func (p *People) Redeem(ctx context.Context, link auth.Secret, name, password string, v Visit) (out Started, err error) {
	hash, err := auth.HashPassword(password)
	if err != nil {
		return out, err
	}
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		invitation, err := auth.CheckSetup(ctx, tx, link)
		if err != nil {
			return err
		}
		who, err := auth.Redeem(ctx, tx, link, name, hash)
		if err != nil {
			return err
		}
		if invitation.Person != "" {
			them, err := find(ctx, tx, who, who.ID)
			if err != nil {
				return err
			}
			if err := audit.Append(ctx, tx, who, audit.PersonPassword, who.ID, audit.Fields{"by": "link", "link": invitation.ID, "remote": v.Remote}); err != nil || them.Strong() {
				return err
			}
			out, err = beginSession(ctx, tx, who, v, "")
			return err
		}
		f := audit.Fields{"by": "set-up link", "link": invitation.ID, "invited_by": invitation.CreatedBy, "role": string(who.Role), "remote": v.Remote}
		if err := audit.Append(ctx, tx, who, audit.PersonCreate, who.ID, f); err != nil {
			return err
		}
		out.Who = who
		out.Session, out.Token, err = auth.BeginSession(ctx, tx, who, v.session(""))
		return err
	})
	return out, err
}

// beginSession creates a session after all factors were checked.
func beginSession(ctx context.Context, tx *store.Tx, who auth.Principal, v Visit, factor string) (out Started, err error) {
	if v.Former != "" {
		if err := auth.EndSession(ctx, tx, v.Former); err != nil {
			return out, err
		}
	}
	out.Who = who
	if out.Session, out.Token, err = auth.BeginSession(ctx, tx, who, v.session(factor)); err != nil {
		return out, err
	}
	out.Who.Strong = out.Session.Strong
	return out, audit.Append(ctx, tx, who, audit.PersonSignIn, who.ID, audit.Fields{"remote": v.Remote, "factor": factor, "kind": string(v.Kind), "session": out.Session.ID})
}

// countedAttempt runs f, which checks a code of the person called name, if the
// limits allow another attempt. The limit by name is shared with passwords. A
// success does not count.
func (p *People) countedAttempt(ctx context.Context, name, remote string, f func(*store.Tx) error) error {
	tries := []auth.AttemptLimit{auth.AttemptsByName(name), auth.AttemptsAtSecondFactor(name), auth.AttemptsFrom(remote), auth.AttemptsInAll()}
	if err := auth.CountAttempt(ctx, p.db, tries...); err != nil {
		return err
	}
	err := p.db.Update(ctx, f)
	if err == nil || !errors.Is(err, auth.ErrUnauthenticated) {
		return errors.Join(err, auth.RefundAttempt(ctx, p.db, tries...))
	}
	return err
}

// StepUp proves a second factor in an existing session, with a code of an
// authenticator app or a recovery code.
func (p *People) StepUp(ctx context.Context, session auth.Secret, kind auth.SessionKind, code, remote string) error {
	var me Person
	var who auth.Principal
	err := p.db.View(ctx, func(tx *store.Tx) (err error) {
		if who, _, err = auth.SessionPrincipal(ctx, tx, session, kind); err != nil {
			return err
		}
		me, err = ownAccount(ctx, tx, who)
		return err
	})
	if err != nil {
		return err
	}
	if !me.Strong() {
		return ErrNoFactor
	}
	err = p.countedAttempt(ctx, me.Name, remote, func(tx *store.Tx) error {
		factor, err := p.code(ctx, tx, me, code)
		if err != nil {
			return err
		}
		return strengthen(ctx, tx, who, session, factor)
	})
	if errors.Is(err, auth.ErrUnauthenticated) {
		if err := p.failed(ctx, me.Name, remote, "second factor"); !errors.Is(err, auth.ErrUnauthenticated) {
			return err
		}
		return ErrCode
	}
	return err
}

// strengthen records that a session has just proved a second factor.
func strengthen(ctx context.Context, tx *store.Tx, who auth.Principal, session auth.Secret, factor string) error {
	ok, err := tx.Changed(ctx, `update session set strong_at = $1 where hash = $2`, store.Time(time.Now()), session.Digest())
	if err != nil {
		return fmt.Errorf("strengthen session: %w", err)
	}
	if !ok { // it has ended meanwhile
		return auth.ErrUnauthenticated
	}
	if err := auth.SealSession(ctx, tx, session.Digest()); err != nil {
		return err
	}
	return audit.Append(ctx, tx, who, audit.PersonStepUp, who.ID, audit.Fields{"factor": factor})
}

// failures limits the audit entries that an attacker can cause by guessing.
type failures struct {
	minute   int64
	recorded int // entries in this minute
	left     int // failures without an entry since the last entry
}

// maxFailures is how many failed sign-ins a server records in a minute.
const maxFailures = 30

// next counts a failure. It reports whether to record it, and how many before it
// were not recorded.
func (f *failures) next(now time.Time) (left int, ok bool) {
	if m := now.Unix() / 60; m != f.minute {
		f.minute, f.recorded = m, 0
	}
	if f.recorded >= maxFailures {
		f.left++
		return 0, false
	}
	f.recorded++
	left, f.left = f.left, 0
	return left, true
}

// failed records a sign-in that failed and returns [auth.ErrUnauthenticated].
func (p *People) failed(ctx context.Context, name, remote, what string) error {
	p.mu.Lock()
	left, ok := p.failures.next(time.Now())
	p.mu.Unlock()
	if !ok {
		return auth.ErrUnauthenticated
	}
	detail := audit.Fields{"remote": remote, "wrong": what}
	if left > 0 {
		detail["unrecorded"] = strconv.Itoa(left)
	}
	err := p.db.Update(ctx, func(tx *store.Tx) error {
		project, err := auth.FirstProject(ctx, tx)
		if err != nil {
			return err
		}
		// People type passwords into the field for the name, and audit entries cannot
		// be removed: only names of existing accounts are recorded.
		object := "(no such account)"
		if utf8.ValidString(name) && !strings.Contains(name, "\x00") {
			err := tx.One(ctx, `select name, project_id from person where name = $1`, []any{name}, &object, &project)
			if err != nil && !errors.Is(err, store.ErrNotFound) {
				return err
			}
		}
		who := auth.Principal{Kind: auth.System, ID: "signin", Project: project}
		return audit.Append(ctx, tx, who, audit.PersonSignInFailed, object, detail)
	})
	if err != nil {
		return fmt.Errorf("record failed sign-in: %w", err)
	}
	return auth.ErrUnauthenticated
}
