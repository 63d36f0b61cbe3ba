package people_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pquerna/otp/totp"

	"postern/internal/auth"
	"postern/internal/people"
	"postern/internal/store"
	"postern/internal/storetest"
)

var browser = people.Visit{Kind: auth.Browser, Remote: "192.0.2.1", Agent: "test"}

// code returns the code of a secret a number of steps away from now.
func (f *fixture) code(secret auth.Secret, steps int) string {
	f.t.Helper()
	c, err := totp.GenerateCode(secret.Reveal(), time.Now().Add(time.Duration(steps)*30*time.Second))
	if err != nil {
		f.t.Fatal(err)
	}
	return c
}

// rewind forgets which code was used last, as time would.
func (f *fixture) rewind() {
	f.update(func(tx *store.Tx) error {
		_, err := tx.ExecContext(f.t.Context(), `update totp set step = 0`)
		return err
	})
}

// forgive forgets all failures.
func (f *fixture) forgive() {
	f.update(func(tx *store.Tx) error {
		_, err := tx.ExecContext(f.t.Context(), `delete from sign_in_try`)
		return err
	})
}

// still makes the minutes and days in which guesses are counted last for the
// rest of the test, however long that takes here.
func (f *fixture) still() {
	f.update(func(tx *store.Tx) error {
		_, err := tx.ExecContext(f.t.Context(), `update sign_in_try set ends_at = 4000000000000000`)
		return err
	})
}

// app sets up an authenticator app and returns its secret and recovery codes.
func (f *fixture) app(session auth.Secret) (auth.Secret, []string) {
	f.t.Helper()
	e, err := f.people.BeginTOTP(f.t.Context(), session, password, "localhost", browser)
	if err != nil {
		f.t.Fatal(err)
	}
	codes, err := f.people.ConfirmTOTP(f.t.Context(), session, e.Token, f.code(e.Secret, 0), browser)
	if err != nil {
		f.t.Fatal(err)
	}
	f.rewind()
	return e.Secret, codes
}

func (f *fixture) who(session auth.Secret) auth.Principal {
	f.t.Helper()
	p, err := auth.CheckSession(f.t.Context(), f.db, session)
	if err != nil {
		f.t.Fatal(err)
	}
	return p
}

// age makes it long ago that a session proved anything.
func (f *fixture) age() {
	f.update(func(tx *store.Tx) error {
		if _, err := tx.ExecContext(f.t.Context(), `update session set strong_at = $1`, store.Time(time.Now().Add(-auth.StepUpTime-time.Minute))); err != nil {
			return err
		}
		return storetest.Reseal(f.t.Context(), tx)
	})
}

func TestTOTP(t *testing.T) {
	each(t, func(f *fixture) {
		ctx, p := f.t.Context(), f.people
		ann := f.join("ann", auth.Owner)
		begun, err := p.Password(ctx, "ann", password, browser)
		if err != nil || begun.Token == "" || begun.Who != ann {
			f.t.Fatalf("with a password alone: %+v, %v", begun, err)
		}
		session, thief := begun.Token, f.session(ann)

		// A stolen session adds nothing.
		_, err = p.BeginTOTP(ctx, thief, "guess guess guess", "localhost", browser)
		f.is("set up without the password", err, people.ErrPassword)
		e, err := p.BeginTOTP(ctx, session, password, "console.example:8443", browser)
		if err != nil || !strings.HasPrefix(e.URL.Reveal(), "otpauth://totp/Postern%20console.example%208443:ann?") {
			f.t.Fatalf("BeginTOTP = %q, %v", e.URL.Reveal(), err)
		}
		_, err = p.ConfirmTOTP(ctx, thief, e.Token, f.code(e.Secret, 0), browser)
		f.is("confirm in another session", err, people.ErrChallenge)
		_, err = p.ConfirmTOTP(ctx, session, e.Token, f.code(e.Secret, 5), browser)
		f.is("confirm with a code of another time", err, people.ErrCode)
		again, err := p.Enrolling(ctx, session, e.Token, "console.example:8443")
		if err != nil || again != e {
			f.t.Errorf("Enrolling = %+v, %v", again, err)
		}
		// A step may end meanwhile: codes of this one and the next are taken then, too.
		this, next := f.code(e.Secret, 0), f.code(e.Secret, 1)
		codes, err := p.ConfirmTOTP(ctx, session, e.Token, this, browser)
		if err != nil || len(codes) != 10 || len(codes[0]) != 19 {
			f.t.Fatalf("ConfirmTOTP = %q, %v", codes, err)
		}
		if f.in(thief) || !f.who(session).Proved() {
			f.t.Error("another session goes on, or this one is not strong")
		}
		f.update(func(tx *store.Tx) error {
			var sealed []byte
			if err := tx.One(ctx, `select secret from totp`, nil, &sealed); err != nil || bytes.Contains(sealed, []byte(e.Secret)) {
				f.t.Errorf("the secret is stored as it is (%v)", err)
			}
			return nil
		})

		// Sign in: the password is not enough.
		begun, err = p.Password(ctx, "ann", password, browser)
		if err != nil || begun.Token != "" || begun.Next == "" || !begun.TOTP {
			f.t.Fatalf("Password = %+v, %v", begun, err)
		}
		if _, err := auth.CheckSession(ctx, f.db, begun.Next); !errors.Is(err, auth.ErrUnauthenticated) {
			f.t.Errorf("the question is a session: %v", err)
		}
		_, err = p.Second(ctx, begun.Next, this, browser)
		f.is("the code that set it up, again", err, auth.ErrUnauthenticated)
		in, err := p.Second(ctx, begun.Next, " "+next[:3]+" "+next[3:], browser)
		if err != nil || in.Session.Factor != "totp" || !f.who(in.Token).Proved() {
			f.t.Fatalf("Second = %+v, %v", in, err)
		}
		_, err = p.Second(ctx, begun.Next, f.code(e.Secret, 1), browser)
		f.is("the question a second time", err, people.ErrChallenge)
		_, err = p.SignIn(ctx, "ann", password, next, browser)
		f.is("a code a second time", err, auth.ErrUnauthenticated)
		for name, code := range map[string]string{"empty": "", "zeros": "000000 ", "far ahead": f.code(e.Secret, 3), "far behind": f.code(e.Secret, -3), "a letter": "12345a"} {
			f.forgive()
			if _, err := p.SignIn(ctx, "ann", password, code, browser); !errors.Is(err, auth.ErrUnauthenticated) {
				f.t.Errorf("code %s: %v", name, err)
			}
		}
		f.forgive()

		// Recovery codes, each once, however typed.
		if in, err = p.SignIn(ctx, "ann", password, strings.ToLower(strings.ReplaceAll(codes[3], "-", "")), browser); err != nil || in.Session.Factor != "recovery code" {
			f.t.Errorf("recovery code: %+v, %v", in, err)
		}
		_, err = p.SignIn(ctx, "ann", password, codes[3], browser)
		f.is("a recovery code a second time", err, auth.ErrUnauthenticated)
		if me, err := p.Me(ctx, ann); err != nil || me.Codes != 9 {
			f.t.Errorf("%d codes left, %v", me.Codes, err)
		}

		// Step-up, and what it is for.
		f.forgive()
		f.rewind()
		f.age()
		for name, err := range map[string]error{
			"remove":       p.RemoveTOTP(ctx, f.who(in.Token)),
			"invite":       second(p.Invite(ctx, f.who(in.Token), auth.Invitation{Role: auth.Owner})),
			"redirect":     p.SetEmail(ctx, f.who(in.Token), "ann", "eve@evil.example"),
			"new password": p.SetPassword(ctx, in.Token, password, password+"!", browser),
			"another app":  first(p.BeginTOTP(ctx, in.Token, password, "localhost", browser)),
			"new codes":    first(p.NewCodes(ctx, f.who(in.Token))),
			"another key":  first(p.BeginPasskey(ctx, in.Token, password, people.Site{Host: "localhost"}, browser)),
		} {
			f.is(name+" long after the proof", err, auth.ErrStepUp)
		}
		f.is("step up with a wrong code", p.StepUp(ctx, in.Token, auth.Browser, f.code(e.Secret, 7), "192.0.2.1"), people.ErrCode)
		f.is("step up with another kind of session", p.StepUp(ctx, in.Token, auth.Bearer, f.code(e.Secret, 0), "192.0.2.1"), auth.ErrUnauthenticated)
		f.is("step up with a forged session", p.StepUp(ctx, "AAAA", auth.Browser, f.code(e.Secret, 0), "192.0.2.1"), auth.ErrUnauthenticated)
		this = f.code(e.Secret, 0)
		f.is("step up", p.StepUp(ctx, in.Token, auth.Browser, this, "192.0.2.1"), nil)
		f.is("step up with the same code", p.StepUp(ctx, in.Token, auth.Browser, this, "192.0.2.1"), people.ErrCode)
		fresh, err := p.NewCodes(ctx, f.who(in.Token))
		if err != nil || slices.Contains(fresh, codes[0]) {
			f.t.Errorf("NewCodes = %v, %v", fresh, err)
		}
		_, err = p.SignIn(ctx, "ann", password, codes[0], browser)
		f.is("a former recovery code", err, auth.ErrUnauthenticated)
		f.is("remove", p.RemoveTOTP(ctx, f.who(in.Token)), nil)
		if me, err := p.Me(ctx, ann); err != nil || me.Strong() || me.Codes != 0 {
			f.t.Errorf("after removing: %+v, %v", me, err)
		}
		f.is("step up without a second factor", p.StepUp(ctx, in.Token, auth.Browser, "123456", "192.0.2.1"), people.ErrNoFactor)

		got := f.verbs()
		want := []string{"signin ann", "totp_add ann", "step_up ann", "recovery_codes ann", "signin_failed ann", "signin ann"}
		if len(got) < 7 || !slices.Equal(got[1:7], want) {
			f.t.Errorf("record: %q, want %q after the invitation", got, want)
		}
	})
}

func first[T any](_ T, err error) error          { return err }
func second[T, U any](_ T, _ U, err error) error { return err }

// TestOneCodeAtOnce: of many who show the same code at once, at several
// servers, one comes in.
func TestOneCodeAtOnce(t *testing.T) {
	each(t, func(f *fixture) {
		ctx := f.t.Context()
		secret, codes := f.app(f.session(f.join("ann", auth.Owner)))
		for _, name := range []string{"a code", "a recovery code"} {
			f.forgive()
			code := codes[0]
			if name == "a code" {
				code = f.code(secret, 0)
			}
			var in atomic.Int64
			var wg sync.WaitGroup
			for range 4 {
				other, err := people.New(f.db, people.Config{Key: []byte("0123456789abcdef0123456789abcdef")})
				if err != nil {
					f.t.Fatal(err)
				}
				wg.Go(func() {
					if _, err := other.SignIn(ctx, "ann", password, code, browser); err == nil {
						in.Add(1)
					} else if !errors.Is(err, auth.ErrUnauthenticated) {
						f.t.Error(err)
					}
				})
			}
			wg.Wait()
			if in.Load() != 1 {
				f.t.Errorf("%s: %d came in", name, in.Load())
			}
		}
	})
}

// TestGuessing: guesses at passwords and codes share a bound, and so do those at
// many names from one address.
func TestGuessing(t *testing.T) {
	each(t, func(f *fixture) {
		ctx, p := f.t.Context(), f.people
		secret, _ := f.app(f.session(f.join("ann", auth.Owner)))
		begun, err := p.Password(ctx, "ann", password, browser)
		if err != nil {
			f.t.Fatal(err)
		}
		for i := range 3 {
			_, err := p.Second(ctx, begun.Next, fmt.Sprintf("00000%d", i), browser)
			f.is("a wrong code", err, auth.ErrUnauthenticated)
			f.still()
		}
		for range 2 {
			_, err := p.Password(ctx, "ann", "guess guess guess", browser)
			f.is("a wrong password", err, auth.ErrUnauthenticated)
			f.still()
		}
		_, err = p.Second(ctx, begun.Next, f.code(secret, 0), browser)
		f.is("the right code after five wrong guesses", err, auth.ErrTooMany)
		_, err = p.Password(ctx, "ann", password, browser)
		f.is("the right password after five wrong guesses", err, auth.ErrTooMany)

		// A day's guesses at codes are bounded, too: wait a minute, guess on.
		f.forgive()
		n := 0
		for err = nil; !errors.Is(err, auth.ErrTooMany) && n < 100; n++ {
			f.update(func(tx *store.Tx) error {
				_, err := tx.ExecContext(ctx, `delete from sign_in_try where key not like 'second:%'`)
				return err
			})
			_, err = p.Second(ctx, begun.Next, "000000", browser)
		}
		if n != 31 {
			f.t.Errorf("%d guesses at codes a day, want 30", n-1)
		}

		// One password, many names, one address. Hashing is not what is tested.
		f.forgive()
		tries := 0
		for i := range 100 {
			if err := auth.CountAttempt(ctx, f.db, auth.AttemptsByName(fmt.Sprint("name", i)), auth.AttemptsFrom(fmt.Sprintf("2001:db8::%d", i)), auth.AttemptsInAll()); err == nil {
				if tries++; tries == 1 {
					f.still()
				}
			} else if !errors.Is(err, auth.ErrTooMany) {
				f.t.Fatal(err)
			}
		}
		if tries != 60 {
			f.t.Errorf("%d names were tried from one network, want 60", tries)
		}
		_, err = p.Password(ctx, "name1", "guess guess guess", people.Visit{Kind: auth.Browser, Remote: "2001:db8::ffff"})
		f.is("one more name", err, auth.ErrTooMany)
		_, err = p.Password(ctx, "ann", password, browser)
		f.is("from elsewhere", err, nil)
	})
}

func TestPasskeys(t *testing.T) {
	site := people.Site{Host: "localhost:8080"}
	each(t, func(f *fixture) {
		ctx, p := f.t.Context(), f.people
		ann, rita := f.join("ann", auth.Owner), f.join("rita", auth.Reviewer)
		session, other := f.session(ann), f.session(rita)
		add := func(session auth.Secret, d *device) error {
			q, err := p.BeginPasskey(ctx, session, password, site, browser)
			if err != nil {
				return err
			}
			codes, err := p.FinishPasskey(ctx, session, q.Token, "laptop", d.create(q), site, browser)
			if err == nil && len(codes) != 10 {
				f.t.Errorf("%d recovery codes", len(codes))
			}
			return err
		}
		// What is no good, each with a question of its own.
		for name, d := range map[string]*device{
			"of another origin":     newDevice(f.t, "http://localhost:9090"),
			"of another site":       newDevice(f.t, "https://evil.example"),
			"without a look at who": {t: f.t, origin: "http://localhost:8080", flags: present, id: []byte("0123456789abcdef"), key: newDevice(f.t, "").key},
		} {
			f.is("a passkey "+name, add(session, d), people.ErrChallenge)
		}
		for _, bad := range []people.Site{{Host: "127.0.0.1:8080"}, {Host: "[::1]:8080"}, {Host: "console.example"}, {Host: "192.0.2.1", Secure: true}, {}} {
			f.is("a passkey at "+bad.Host, bad.Usable(), people.ErrSite)
		}
		f.is("a passkey over https", people.Site{Host: "console.example:8443", Secure: true}.Usable(), nil)

		mine, hers := newDevice(f.t, "http://localhost:8080"), newDevice(f.t, "http://localhost:8080")
		q, err := p.BeginPasskey(ctx, session, password, site, browser)
		f.is("begin", err, nil)
		answer := mine.create(q)
		_, err = p.FinishPasskey(ctx, other, q.Token, "", answer, site, browser)
		f.is("finish in another's session", err, people.ErrChallenge)
		if _, err := p.FinishPasskey(ctx, session, q.Token, "laptop", answer, site, browser); err != nil {
			f.t.Fatal(err)
		}
		_, err = p.FinishPasskey(ctx, session, q.Token, "laptop", answer, site, browser)
		f.is("finish twice", err, people.ErrChallenge)
		f.is("hers", add(other, hers), nil)

		// Signing in, without a name or a password.
		signIn := func(d *device) (people.Started, error) {
			q, err := p.AskPasskey(ctx, site, browser)
			if err != nil {
				f.t.Fatal(err)
			}
			return p.Passkey(ctx, q.Token, d.get(q), site, browser)
		}
		mine.count++
		in, err := signIn(mine)
		if err != nil || in.Who.ID != "ann" || in.Who.Role != auth.Owner || !f.who(in.Token).Proved() || in.Session.Factor != "passkey" {
			f.t.Fatalf("Passkey = %+v, %v", in, err)
		}
		begun, err := p.Password(ctx, "ann", password, browser)
		if err != nil || begun.Token != "" || !begun.Passkey || begun.TOTP {
			f.t.Errorf("the password alone: %+v, %v", begun, err)
		}
		_, err = p.Second(ctx, begun.Next, "123456", browser)
		f.is("a code without an app", err, auth.ErrUnauthenticated)
		f.forgive()

		// Replayed and foreign answers.
		q, err = p.AskPasskey(ctx, site, browser)
		f.is("ask", err, nil)
		mine.count++
		replay := mine.get(q)
		if _, err = p.Passkey(ctx, q.Token, replay, site, browser); err != nil {
			f.t.Fatal(err)
		}
		_, err = p.Passkey(ctx, q.Token, replay, site, browser)
		f.is("the answer again", err, people.ErrChallenge)
		q2, err := p.AskPasskey(ctx, site, browser)
		f.is("ask", err, nil)
		_, err = p.Passkey(ctx, q2.Token, replay, site, browser)
		f.is("the answer to another question", err, people.ErrChallenge)
		_, err = p.Passkey(ctx, q2.Token, mine.get(q2), site, browser)
		f.is("a question that was answered wrongly", err, people.ErrChallenge)
		q, err = p.AskPasskey(ctx, site, browser)
		f.is("ask", err, nil)
		_, err = p.Passkey(ctx, q.Token, mine.get(q), people.Site{Host: "other.localhost:8080"}, browser)
		f.is("an answer at another name of the console", err, people.ErrChallenge)
		for name, d := range map[string]device{
			"another's id":          {user: hers.user, id: mine.id, key: mine.key},
			"another's key":         {user: mine.user, id: mine.id, key: hers.key},
			"nobody's id":           {user: []byte("per_x"), id: mine.id, key: mine.key},
			"no look at who":        {user: mine.user, id: mine.id, key: mine.key, flags: present},
			"a page of another":     {user: mine.user, id: mine.id, key: mine.key, origin: "https://evil.example"},
			"a credential of hers":  {user: mine.user, id: hers.id, key: hers.key},
			"nobody to hold a user": {id: mine.id, key: mine.key},
		} {
			d.t, d.count = f.t, 99
			if d.origin == "" {
				d.origin = "http://localhost:8080"
			}
			if d.flags == 0 {
				d.flags = present | verified
			}
			_, err := signIn(&d)
			f.is(name, err, people.ErrChallenge)
		}
		for _, bad := range []string{"", "{}", "null", `{"id":"AAAA","rawId":"AAAA","type":"public-key","response":{}}`, strings.Repeat("[", 40000)} {
			q, err := p.AskPasskey(ctx, site, browser)
			f.is("ask", err, nil)
			_, err = p.Passkey(ctx, q.Token, []byte(bad), site, browser)
			f.is("an answer that is none", err, people.ErrChallenge)
		}
		q, err = p.AskPasskey(ctx, site, browser)
		f.is("ask", err, nil)
		f.update(func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update challenge set expires_at = 1`)
			return err
		})
		mine.count++
		_, err = p.Passkey(ctx, q.Token, mine.get(q), site, browser)
		f.is("an answer too late", err, people.ErrChallenge)

		// Step-up: in the session that was asked, by its person.
		f.forgive()
		f.age()
		mine.count += 10
		hers.count++
		ask := func() people.Question {
			q, err := p.AskStepUp(ctx, in.Token, auth.Browser, site)
			if err != nil {
				f.t.Fatal(err)
			}
			return q
		}
		q = ask()
		f.is("step up in another's session", p.StepUpPasskey(ctx, other, auth.Browser, q.Token, mine.get(q), site), people.ErrChallenge)
		f.is("step up with another's passkey", p.StepUpPasskey(ctx, in.Token, auth.Browser, q.Token, hers.get(q), site), people.ErrChallenge)
		unseen := *mine
		unseen.flags = present
		q = ask()
		f.is("step up without a look at who", p.StepUpPasskey(ctx, in.Token, auth.Browser, q.Token, unseen.get(q), site), people.ErrChallenge)
		q, err = p.AskPasskey(ctx, site, browser)
		f.is("ask", err, nil)
		f.is("step up with the answer to a sign-in", p.StepUpPasskey(ctx, in.Token, auth.Browser, q.Token, mine.get(q), site), people.ErrChallenge)
		if f.who(in.Token).Proved() {
			f.t.Error("one of those was taken")
		}
		q = ask()
		_, err = p.Passkey(ctx, q.Token, mine.get(q), site, browser)
		f.is("sign in with the answer to a step-up", err, people.ErrChallenge)
		q = ask()
		f.is("step up", p.StepUpPasskey(ctx, in.Token, auth.Browser, q.Token, mine.get(q), site), nil)
		if !f.who(in.Token).Proved() {
			f.t.Error("the session is not strong")
		}

		// A copy of the key: its counter goes back, and it is refused from then on.
		f.forgive()
		mine.count = 3
		_, err = signIn(mine)
		f.is("a counter that goes back", err, people.ErrChallenge)
		mine.count = 500
		_, err = signIn(mine)
		f.is("the passkey after that", err, people.ErrChallenge)
		keys, err := p.Passkeys(ctx, f.who(in.Token))
		if err != nil || len(keys) != 1 || keys[0].Cloned.IsZero() || keys[0].Name != "laptop" {
			f.t.Errorf("Passkeys = %+v, %v", keys, err)
		}
		if got := f.verbs(); !slices.Contains(got, "passkey_cloned ann") {
			f.t.Errorf("record: %q", got)
		}
		f.is("remove another's", p.RemovePasskey(ctx, f.who(in.Token), b64(hers.id)), people.ErrNotFound)
		f.is("remove", p.RemovePasskey(ctx, f.who(in.Token), keys[0].ID), nil)

		// Who lost everything is let in by an owner, with the password.
		f.is("reset", p.Reset(ctx, ann, "rita"), nil)
		_, err = signIn(hers)
		f.is("a passkey after the reset", err, people.ErrChallenge)
		f.forgive()
		if begun, err := p.Password(ctx, "rita", password, browser); err != nil || begun.Token == "" {
			f.t.Errorf("the password after the reset: %+v, %v", begun, err)
		}
	})
}

func TestSessions(t *testing.T) {
	each(t, func(f *fixture) {
		ctx, p := f.t.Context(), f.people
		ann, rita := f.join("ann", auth.Owner), f.join("rita", auth.Reviewer)
		planted := f.session(rita) // the attack: a session of the attacker's, put into ann's browser before she signs in
		begun, err := p.Password(ctx, "ann", password, people.Visit{Kind: auth.Browser, Remote: "192.0.2.1", Agent: "a\x00b\xff" + strings.Repeat("x", 500), Former: planted})
		if err != nil || begun.Token == planted || f.in(planted) {
			f.t.Fatalf("signing in keeps a session that was there: %v", err)
		}
		bearer, err := p.SignIn(ctx, "ann", password, "", people.Visit{Kind: auth.Bearer, Remote: "192.0.2.2"})
		if err != nil || !auth.IsBearer(bearer.Token) {
			f.t.Fatalf("SignIn = %+v, %v", bearer, err)
		}
		list, err := p.Sessions(ctx, ann)
		if err != nil || len(list) != 2 || list[0].Kind != auth.Bearer || list[1].Remote != "192.0.2.1" || len(list[1].Agent) > 210 {
			f.t.Errorf("Sessions = %+v, %v", list, err)
		}
		if id, err := p.Current(ctx, begun.Token, auth.Browser); err != nil || id != list[1].ID {
			f.t.Errorf("Current = %q, %v", id, err)
		}
		f.is("end another's session", p.EndSession(ctx, rita, list[0].ID), people.ErrNotFound)
		f.is("end", p.EndSession(ctx, ann, list[0].ID), nil)
		_, err = auth.CheckBearer(ctx, f.db, bearer.Token)
		f.is("a session that was ended", err, auth.ErrUnauthenticated)

		f.is("a new password without the former", p.SetPassword(ctx, begun.Token, "guess guess guess", "correct horse staple", browser), people.ErrPassword)
		f.is("a short one", p.SetPassword(ctx, begun.Token, password, "short", browser), auth.ErrInvalid)
		thief := f.session(ann)
		f.is("a new password", p.SetPassword(ctx, begun.Token, password, "correct horse staple", browser), nil)
		if f.in(thief) || !f.in(begun.Token) {
			f.t.Error("after a new password another session goes on, or this one does not")
		}
		_, err = p.Password(ctx, "ann", password, browser)
		f.is("the former password", err, auth.ErrUnauthenticated)

		// A sign-in that is half done ends with what it began with.
		session := f.session(rita)
		secret, _ := f.app(session)
		begun, err = p.Password(ctx, "rita", password, browser)
		f.is("half", err, nil)
		f.is("a new password", p.SetPassword(ctx, session, password, "correct horse staple", browser), nil)
		_, err = p.Second(ctx, begun.Next, f.code(secret, 0), browser)
		f.is("the other half", err, people.ErrChallenge)
		begun, err = p.Password(ctx, "rita", "correct horse staple", browser)
		f.is("half", err, nil)
		f.is("disable", p.Disable(ctx, ann, "rita"), nil)
		_, err = p.Second(ctx, begun.Next, f.code(secret, 0), browser)
		f.is("the other half", err, people.ErrChallenge)
	})
}
