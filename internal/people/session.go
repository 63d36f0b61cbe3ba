package people

import (
	"context"
	"encoding/base32"
	"fmt"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// A signedIn is a person with a valid session.
type signedIn struct {
	who auth.Principal
	me  Person
	id  string // of the session
}

// reauthenticate checks that the caller is the person of a session, and not a thief
// of it: by a second factor that was proved recently or, without one, by the
// password.
func (p *People) reauthenticate(ctx context.Context, session auth.Secret, password string, v Visit) (in signedIn, err error) {
	err = p.db.View(ctx, func(tx *store.Tx) error {
		if in.who, in.id, err = auth.SessionPrincipal(ctx, tx, session, v.Kind); err != nil {
			return err
		}
		in.me, err = ownAccount(ctx, tx, in.who)
		return err
	})
	if err != nil {
		return in, err
	}
	if in.me.Strong() {
		return in, requireStepUp(in.who, in.me)
	}
	return in, p.checkPassword(ctx, in.me.Name, password, v)
}

// checkPassword checks the password of a person who is signed in.
func (p *People) checkPassword(ctx context.Context, name, password string, v Visit) error {
	if _, err := p.signIn.Check(ctx, name, v.Remote, password); err != nil {
		return wrongPassword(err)
	}
	return nil
}

// SetPassword sets the password of the person of a session, and ends their other
// sessions. It requires the former password and, if there is one, a second factor
// that was proved recently.
func (p *People) SetPassword(ctx context.Context, session auth.Secret, former, password string, v Visit) error {
	in, err := p.reauthenticate(ctx, session, former, v)
	if err != nil {
		return err
	}
	if in.me.Strong() { // reauthenticate has not checked the password
		if err := p.checkPassword(ctx, in.me.Name, former, v); err != nil {
			return err
		}
	}
	hash, err := auth.HashPassword(password)
	if err != nil {
		return err
	}
	return p.db.Update(ctx, func(tx *store.Tx) error {
		err := updateSealed(ctx, tx, in.me, func(tx *store.Tx, me Person) error {
			_, err := tx.ExecContext(ctx, `update person set password = $1 where id = $2`, hash, me.id)
			return err
		})
		if err != nil {
			return fmt.Errorf("set password: %w", err)
		}
		if err := auth.EndSessions(ctx, tx, in.me.id, in.id); err != nil {
			return err
		}
		return audit.Append(ctx, tx, in.who, audit.PersonPassword, in.me.Name, nil)
	})
}

// Sessions returns who's live sessions, newest first.
func (p *People) Sessions(ctx context.Context, who auth.Principal) (out []auth.Session, err error) {
	err = p.db.View(ctx, func(tx *store.Tx) error {
		me, err := ownAccount(ctx, tx, who)
		if err != nil {
			return err
		}
		out, err = store.List(ctx, tx, func(row func(...any) error) (s auth.Session, err error) {
			var created, expires, strong int64
			err = row(&s.ID, &s.Kind, &created, &expires, &strong, &s.Factor, &s.Remote, &s.Agent)
			s.Created, s.Expires, s.Strong = store.FromTime(created), store.FromTime(expires), store.FromTime(strong)
			return s, err
		}, `select id, kind, created_at, expires_at, strong_at, factor, remote, agent from session where person_id = $1 and expires_at > $2 order by created_at desc, id`,
			me.id, store.Time(time.Now()))
		return err
	})
	return out, err
}

// Current returns the ID of the session with this token.
func (p *People) Current(ctx context.Context, session auth.Secret, kind auth.SessionKind) (id string, err error) {
	err = p.db.View(ctx, func(tx *store.Tx) error {
		_, id, err = auth.SessionPrincipal(ctx, tx, session, kind)
		return err
	})
	return id, err
}

// EndSession ends one of who's sessions.
func (p *People) EndSession(ctx context.Context, who auth.Principal, id string) error {
	return p.db.Update(ctx, func(tx *store.Tx) error {
		me, err := ownAccount(ctx, tx, who)
		if err != nil {
			return err
		}
		ok, err := tx.Changed(ctx, `delete from session where id = $1 and person_id = $2`, id, me.id)
		if err != nil {
			return fmt.Errorf("end session: %w", err)
		}
		if !ok {
			return fmt.Errorf("session %q: %w", id, ErrNotFound)
		}
		return audit.Append(ctx, tx, who, audit.PersonSessionEnd, me.Name, audit.Fields{"session": id})
	})
}

// SignOut ends the session with this token. It returns [auth.ErrUnauthenticated] if
// there is none.
func (p *People) SignOut(ctx context.Context, session auth.Secret, kind auth.SessionKind) error {
	return p.db.Update(ctx, func(tx *store.Tx) error {
		who, id, err := auth.SessionPrincipal(ctx, tx, session, kind)
		if err != nil {
			return err
		}
		if err := auth.EndSession(ctx, tx, session); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.PersonSignOut, who.ID, audit.Fields{"session": id})
	})
}

// enabledPerson returns the person with this ID, or [ErrChallenge] if they are
// disabled: the ID comes from a challenge, which is then over.
func enabledPerson(ctx context.Context, tx *store.Tx, id string) (Person, error) {
	list, err := store.List(ctx, tx, scanPerson, selectPerson+`where p.id = $2 and p.disabled_at = 0`, store.Time(time.Now()), id)
	if err != nil {
		return Person{}, fmt.Errorf("find person: %w", err)
	}
	if len(list) == 0 {
		return Person{}, ErrChallenge
	}
	return list[0], nil
}

// decode32 decodes the secret of an authenticator app.
func decode32(s string) []byte {
	b, err := base32.StdEncoding.WithPadding(base32.NoPadding).DecodeString(strings.ToUpper(s))
	if err != nil {
		return nil // unreachable: it was written so
	}
	return b
}
