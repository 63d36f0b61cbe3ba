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

// A Visit is how somebody comes to sign in.
type Visit struct {
	Kind   auth.SessionKind
	Remote string      // the address that asks
	Agent  string      // what the program there calls itself
	Former auth.Secret // a session that ends as the new one begins: one browser, one session; may be empty
}

func (v Visit) session(factor string) auth.Session {
	s := auth.Session{Kind: v.Kind, Remote: v.Remote, Agent: v.Agent, Factor: factor}
	if factor != "" {
		s.Strong = time.Now()
	}
	return s
}

// A Started is what a sign-in led to: a session, or, where Token is empty, the
// question for a second factor, whose answer goes to [People.Second] with Next.
type Started struct {
	Who     auth.Principal // of a session
	Session auth.Session
	Token   auth.Secret // of the session, this once; empty if there is none yet

	Next    auth.Secret // of the question
	TOTP    bool        // the person has an authenticator app
	Passkey bool        // and a passkey, with which they can sign in instead
}

// Password signs a person in who has no second factor, and asks others for it.
// It returns [auth.ErrUnauthenticated] or [auth.ErrTooMany].
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
		err = auth.ErrUnauthenticated // nobody's
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

// Second signs in who answered the question of [People.Password] with a code of
// their authenticator app, or with a recovery code. It returns [ErrChallenge] if
// the question is not open any more, and else what Password does.
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
		if _, err := takeChallenge(ctx, tx, next, c); err != nil { // somebody was faster
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

// SignIn signs in with all that is needed at once: the code may be empty for
// who has no second factor. An answer does not tell whether it was the password
// or the code that was wrong.
func (p *People) SignIn(ctx context.Context, name, password, code string, v Visit) (Started, error) {
	out, err := p.Password(ctx, name, password, v)
	if err != nil || out.Token != "" {
		return out, err
	}
	return p.Second(ctx, out.Next, code, v)
}

// Redeem uses a set-up link: it makes an account and signs its person in, or
// gives the person whom the link names a new password, and signs them in unless
// they have a second factor to prove.
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

// beginSession makes the session of who has proved everything.
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

// countedAttempt runs f, which looks at a guess at what belongs to a name, if any
// guesses are left. They are those at the password too.
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

// StepUp proves a second factor again in a session, with a code of an
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

// strengthen notes that a session has proved a second factor now.
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

// failures bounds what guessing writes into the record.
type failures struct {
	minute   int64
	recorded int // in this minute
	left     int // not recorded since the last one that was
}

// maxFailures is how many failed sign-ins a server records, a minute.
const maxFailures = 30

// next reports whether one more failure is recorded, and how many were not
// before it.
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
		// People type passwords where the name goes, and the record is for
		// good: only the name of somebody who has an account is written.
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
