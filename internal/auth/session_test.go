package auth_test

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestCookieIsNoBearerToken shows each kind of token where the other belongs.
// The attacks: a page makes a browser send its cookie to the API, and a script
// that got a token opens the console with it.
func TestCookieIsNoBearerToken(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := newFixture(t, db)
		ann := f.join("ann", auth.Owner, "")
		cookie, bearer := f.session(ann, auth.Session{Kind: auth.Browser}), f.session(ann, auth.Session{Kind: auth.Bearer})
		if p, err := auth.CheckSession(f.ctx, db, cookie); err != nil || p != ann {
			t.Errorf("the cookie: %+v, %v", p, err)
		}
		if p, err := auth.CheckBearer(f.ctx, db, bearer); err != nil || p != ann {
			t.Errorf("the bearer token: %+v, %v", p, err)
		}
		for name, check := range map[string]func() (auth.Principal, error){
			"a cookie as bearer token":       func() (auth.Principal, error) { return auth.CheckBearer(f.ctx, db, cookie) },
			"a cookie with the prefix":       func() (auth.Principal, error) { return auth.CheckBearer(f.ctx, db, "pse_"+cookie) },
			"a bearer token as cookie":       func() (auth.Principal, error) { return auth.CheckSession(f.ctx, db, bearer) },
			"a bearer token without prefix":  func() (auth.Principal, error) { return auth.CheckSession(f.ctx, db, bearer[4:]) },
			"a project key as bearer token":  func() (auth.Principal, error) { return auth.CheckBearer(f.ctx, db, f.key) },
			"a bearer token as a key":        func() (auth.Principal, error) { return auth.CheckKey(f.ctx, db, bearer) },
			"nothing as cookie":              func() (auth.Principal, error) { return auth.CheckSession(f.ctx, db, "") },
			"the digest of a cookie instead": func() (auth.Principal, error) { return auth.CheckSession(f.ctx, db, auth.Secret(cookie.Digest())) },
		} {
			if p, err := check(); !errors.Is(err, auth.ErrUnauthenticated) || p != (auth.Principal{}) {
				t.Errorf("%s: %+v, %v; want ErrUnauthenticated and nobody", name, p, err)
			}
		}
	})
}

// TestSessionEnds ends sessions by time, by signing out, by disabling the
// person, and all but one.
func TestSessionEnds(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	ann, bob := f.join("ann", auth.Owner, ""), f.join("bob", auth.Reviewer, "person:ann")
	valid := func(token auth.Secret) bool {
		t.Helper()
		_, err := auth.CheckSession(f.ctx, f.db, token)
		if err != nil && !errors.Is(err, auth.ErrUnauthenticated) {
			t.Fatal(err)
		}
		return err == nil
	}
	browser := auth.Session{Kind: auth.Browser}
	first, second, his := f.session(ann, browser), f.session(ann, browser), f.session(bob, browser)
	f.update(func(tx *store.Tx) error {
		return errors.Join(auth.EndSession(f.ctx, tx, first), auth.EndSession(f.ctx, tx, first))
	})
	if valid(first) || !valid(second) || !valid(his) {
		t.Errorf("after signing out of one session: %v %v %v, want false true true", valid(first), valid(second), valid(his))
	}
	third := f.session(ann, browser)
	f.update(func(tx *store.Tx) error {
		_, keep, err := auth.SessionPrincipal(f.ctx, tx, third, auth.Browser)
		return errors.Join(err, auth.EndSessions(f.ctx, tx, f.idIn(tx, "ann"), keep))
	})
	if valid(second) || !valid(third) || !valid(his) {
		t.Errorf("after ending all others: %v %v %v, want false true true", valid(second), valid(third), valid(his))
	}
	f.update(func(tx *store.Tx) error {
		if _, err := tx.ExecContext(f.ctx, `update person set disabled_at = 1 where name = 'bob'`); err != nil {
			return err
		}
		return auth.SealPerson(f.ctx, tx, f.idIn(tx, "bob"))
	})
	if valid(his) {
		t.Error("a disabled person's session is valid")
	}
	if err := f.db.Update(f.ctx, func(tx *store.Tx) error {
		_, _, err := auth.BeginSession(f.ctx, tx, bob, auth.Session{Kind: auth.Browser})
		return err
	}); !errors.Is(err, auth.ErrUnauthenticated) {
		t.Errorf("a disabled person signs in: %v", err)
	}
	f.update(func(tx *store.Tx) error {
		if _, err := tx.ExecContext(f.ctx, `update session set expires_at = $1`, store.Time(time.Now())); err != nil {
			return err
		}
		return storetest.Reseal(f.ctx, tx)
	})
	if valid(third) {
		t.Error("a session is valid at its end")
	}
	f.session(ann, browser)
	if n := f.count(`select count(*) from session`); n != 1 {
		t.Errorf("%d sessions are stored, want the new one: expired ones are removed at a sign-in", n)
	}
}

// TestOnlyPeopleHaveSessions: no other principal, and nobody without an
// account, gets one.
func TestOnlyPeopleHaveSessions(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	ann := f.join("ann", auth.Owner, "")
	for name, tt := range map[string]struct {
		who  auth.Principal
		want error
	}{
		"an agent":          {auth.Principal{Kind: auth.Agent, ID: "ann", Project: ann.Project}, auth.ErrForbidden},
		"the system":        {auth.Principal{Kind: auth.System, ID: "ann", Project: ann.Project}, auth.ErrForbidden},
		"nobody":            {auth.Principal{Kind: auth.Person, ID: "eve", Project: ann.Project}, auth.ErrUnauthenticated},
		"of another tenant": {auth.Principal{Kind: auth.Person, ID: "ann", Project: "prj_other"}, auth.ErrUnauthenticated},
	} {
		err := f.db.Update(f.ctx, func(tx *store.Tx) error {
			_, _, err := auth.BeginSession(f.ctx, tx, tt.who, auth.Session{Kind: auth.Browser})
			return err
		})
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
}

// TestHostileUserAgentIsStoredShort begins a session with what a hostile client
// calls itself; PostgreSQL would refuse a NUL and half a character.
func TestHostileUserAgentIsStoredShort(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := newFixture(t, db)
		ann := f.join("ann", auth.Owner, "")
		for _, agent := range []string{"\x00", "\xff\xfe", strings.Repeat("é", 150), strings.Repeat("x", 199) + "é", strings.Repeat("\x00", 1<<16)} {
			f.exec(`delete from session`)
			f.session(ann, auth.Session{Kind: auth.Browser, Agent: agent})
			var got string
			f.update(func(tx *store.Tx) error { return tx.One(f.ctx, `select agent from session`, nil, &got) })
			if len(got) > 200 || !utf8.ValidString(got) || strings.Contains(got, "\x00") {
				t.Errorf("%.20q is stored as %q", agent, got)
			}
		}
	})
}

// TestPasswordsAreComparedByHash checks passwords against stored hashes, of
// which some are what no program wrote: none of those may match or panic.
func TestPasswordsAreComparedByHash(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	again, err := auth.HashPassword(password)
	if err != nil {
		t.Fatal(err)
	}
	if again == f.hash || strings.Contains(f.hash, password) {
		t.Error("a hash has no salt, or holds the password")
	}
	f.join("ann", auth.Owner, "")
	signIn := auth.NewSignIn(f.db)
	set := func(hash string) {
		t.Helper()
		f.update(func(tx *store.Tx) error {
			if _, err := tx.ExecContext(f.ctx, `update person set password = $1`, hash); err != nil {
				return err
			}
			_, err := tx.ExecContext(f.ctx, `delete from sign_in_try`)
			return errors.Join(err, auth.SealPerson(f.ctx, tx, f.idIn(tx, "ann")))
		})
	}
	half := strings.LastIndex(f.hash, "$")
	for name, tt := range map[string]struct {
		hash, password string
		ok             bool
	}{
		"right":                     {f.hash, password, true},
		"right, with another salt":  {again, password, true},
		"other letters":             {f.hash, strings.ToUpper(password), false},
		"with a space":              {f.hash, password + " ", false},
		"empty":                     {f.hash, "", false},
		"the hash itself":           {f.hash, f.hash, false},
		"no hash":                   {"", "", false},
		"a hash in the clear":       {password, password, false},
		"a hash without its sum":    {f.hash[:half+1], password, false},
		"a hash that was cut":       {f.hash[:half], password, false},
		"a hash of another version": {strings.Replace(f.hash, "v=19", "v=16", 1), password, false},
		"a hash that is no base64":  {f.hash[:half] + "$!!!!", password, false},
		"another cost, so another":  {strings.Replace(f.hash, "t=2", "t=1", 1), password, false},
	} {
		set(tt.hash)
		_, err := signIn.Check(f.ctx, "ann", "", tt.password)
		if (err == nil) != tt.ok || err != nil && !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("%s: %v, want right: %v", name, err, tt.ok)
		}
	}
}
