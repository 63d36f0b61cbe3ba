package people_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/people"
	"postern/internal/store"
	"postern/internal/storetest"
)

const password = "correct horse battery"

// A fixture is a project with an operator at its machine.
type fixture struct {
	t        *testing.T
	db       *store.DB
	people   *people.People
	operator auth.Principal
	hash     string
}

func each(t *testing.T, run func(f *fixture)) {
	t.Helper()
	hash, err := auth.HashPassword(password)
	if err != nil {
		t.Fatal(err)
	}
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := &fixture{t: t, db: db, hash: hash, operator: auth.Principal{Kind: auth.Person, ID: "local-root", Role: auth.Owner, Operator: true}}
		f.people, err = people.New(db, people.Config{Key: []byte("0123456789abcdef0123456789abcdef")})
		if err != nil {
			t.Fatal(err)
		}
		f.update(func(tx *store.Tx) (err error) {
			f.operator.Project, _, err = auth.NewProject(t.Context(), tx, "one")
			return err
		})
		run(f)
	})
}

func (f *fixture) update(fn func(tx *store.Tx) error) {
	f.t.Helper()
	if err := f.db.Update(f.t.Context(), fn); err != nil {
		f.t.Fatal(err)
	}
}

// join makes an account by invitation.
func (f *fixture) join(name string, role auth.Role) (p auth.Principal) {
	f.t.Helper()
	_, link, err := f.people.Invite(f.t.Context(), f.operator, auth.Invitation{Role: role})
	if err != nil {
		f.t.Fatal(err)
	}
	f.update(func(tx *store.Tx) (err error) {
		p, err = auth.Redeem(f.t.Context(), tx, link, name, f.hash)
		return err
	})
	return p
}

// session signs a person in.
func (f *fixture) session(p auth.Principal) (token auth.Secret) {
	f.t.Helper()
	f.update(func(tx *store.Tx) (err error) {
		_, token, err = auth.BeginSession(f.t.Context(), tx, p, auth.Session{Kind: auth.Browser})
		return err
	})
	return token
}

func (f *fixture) in(token auth.Secret) bool {
	f.t.Helper()
	_, err := auth.CheckSession(f.t.Context(), f.db, token)
	if err != nil && !errors.Is(err, auth.ErrUnauthenticated) {
		f.t.Fatal(err)
	}
	return err == nil
}

// verbs returns what the record says of people, oldest first.
func (f *fixture) verbs() (out []string) {
	f.t.Helper()
	err := audit.View(f.t.Context(), f.db, func(tx *store.Tx) error {
		es, err := audit.List(f.t.Context(), tx, audit.Query{Verb: "person."})
		for _, e := range slices.Backward(es) {
			out = append(out, strings.TrimPrefix(string(e.Verb), "person.")+" "+e.Object)
		}
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return out
}

func (f *fixture) is(what string, err, want error) {
	f.t.Helper()
	if !errors.Is(err, want) {
		f.t.Errorf("%s: got %v, want %v", what, err, want)
	}
}

func TestRoles(t *testing.T) {
	each(t, func(f *fixture) {
		ctx, p := f.t.Context(), f.people
		ann, rita, vic := f.join("ann", auth.Owner), f.join("rita", auth.Reviewer), f.join("vic", auth.Viewer)
		for _, tt := range []struct {
			who  auth.Principal
			want auth.Role
		}{{ann, auth.Owner}, {rita, auth.Reviewer}, {vic, auth.Viewer}} {
			got, err := auth.CheckSession(ctx, f.db, f.session(tt.who))
			if err != nil || got.Role != tt.want || got.ID != tt.who.ID {
				f.t.Errorf("%s's session: %+v, %v; want role %s", tt.who, got, err, tt.want)
			}
		}
		list, err := p.List(ctx, ann)
		if err != nil || len(list) != 3 || list[1].Name != "rita" || list[1].Role != auth.Reviewer || list[1].Sessions != 1 || list[1].Strong() {
			f.t.Errorf("List = %+v, %v", list, err)
		}

		agent := auth.Principal{Kind: auth.Agent, ID: "crd_x", Project: ann.Project, Role: auth.Owner} // a role makes no person
		elsewhere := auth.Principal{Kind: auth.Person, ID: "ann", Project: "prj_other", Role: auth.Owner}
		for _, who := range []auth.Principal{rita, vic, agent, {Kind: auth.Project, Project: ann.Project}, {}} {
			_, err := p.List(ctx, who)
			f.is(who.String()+" lists", err, auth.ErrForbidden)
			_, err = p.Invitations(ctx, who)
			f.is(who.String()+" lists invitations", err, auth.ErrForbidden)
			_, _, err = p.Invite(ctx, who, auth.Invitation{Role: auth.Owner})
			f.is(who.String()+" invites", err, auth.ErrForbidden)
			_, _, err = p.RenewPassword(ctx, who, "ann")
			f.is(who.String()+" takes a password", err, auth.ErrForbidden)
			f.is(who.String()+" withdraws", p.Withdraw(ctx, who, "inv_x"), auth.ErrForbidden)
			f.is(who.String()+" promotes", p.SetRole(ctx, who, "rita", auth.Owner), auth.ErrForbidden)
			f.is(who.String()+" disables", p.Disable(ctx, who, "ann"), auth.ErrForbidden)
			f.is(who.String()+" enables", p.Enable(ctx, who, "ann"), auth.ErrForbidden)
			f.is(who.String()+" resets", p.Reset(ctx, who, "ann"), auth.ErrForbidden)
			f.is(who.String()+" redirects", p.SetEmail(ctx, who, "ann", "eve@evil.example"), auth.ErrForbidden)
		}
		f.is("a stranger disables", p.Disable(ctx, elsewhere, "ann"), people.ErrNotFound)
		f.is("a stranger resets", p.Reset(ctx, elsewhere, "rita"), people.ErrNotFound)
		_, _, err = p.RenewPassword(ctx, ann, "rita")
		f.is("an owner takes a password", err, auth.ErrForbidden)
		_, _, err = p.Invite(ctx, ann, auth.Invitation{Role: "root"})
		f.is("a role that there is not", err, auth.ErrInvalid)
		f.is("a role that there is not", p.SetRole(ctx, ann, "rita", ""), auth.ErrInvalid)
		for _, bad := range []string{"a", "Ann <ann@example.com>", "a@b\r\nBcc: eve@evil.example", strings.Repeat("a", 260) + "@example.com"} {
			f.is("mail to "+bad, p.SetEmail(ctx, rita, "rita", bad), auth.ErrInvalid)
		}
		f.is("reach", p.SetEmail(ctx, rita, "rita", "rita@example.com"), nil)
		if me, err := p.Me(ctx, rita); err != nil || me.Email != "rita@example.com" {
			f.t.Errorf("Me = %+v, %v", me, err)
		}

		// A change of role ends sessions, and is what the next one has.
		token := f.session(rita)
		f.is("promote", p.SetRole(ctx, ann, "rita", auth.Owner), nil)
		if f.in(token) {
			f.t.Error("a session outlives a change of role")
		}
		rita.Role = auth.Owner
		token = f.session(rita)
		f.is("disable", p.Disable(ctx, rita, "ann"), nil)
		f.is("the last owner disables herself", p.Disable(ctx, rita, "rita"), people.ErrLastOwner)
		f.is("the operator disables the last owner", p.Disable(ctx, f.operator, "rita"), people.ErrLastOwner)
		f.is("the last owner demotes herself", p.SetRole(ctx, rita, "rita", auth.Viewer), people.ErrLastOwner)
		if !f.in(token) {
			f.t.Error("what was refused ended a session")
		}
		f.is("somebody disabled signs in", f.db.Update(ctx, func(tx *store.Tx) error {
			_, _, err := auth.BeginSession(ctx, tx, ann, auth.Session{Kind: auth.Browser})
			return err
		}), auth.ErrUnauthenticated)
		_, err = auth.NewSignIn(f.db).Check(ctx, "ann", "", password)
		f.is("somebody disabled has the password", err, auth.ErrUnauthenticated)
		f.is("enable", p.Enable(ctx, rita, "ann"), nil)
		f.is("then demote", p.SetRole(ctx, ann, "rita", auth.Viewer), nil)

		got := f.verbs()
		got = slices.DeleteFunc(got, func(v string) bool { return strings.HasPrefix(v, "invite ") })
		if want := []string{"reach rita", "role rita", "disable ann", "enable ann", "role rita"}; !slices.Equal(got, want) {
			f.t.Errorf("record: %q, want %q", got, want)
		}
	})
}

func TestInvitations(t *testing.T) {
	each(t, func(f *fixture) {
		ctx, p := f.t.Context(), f.people
		ann := f.join("ann", auth.Owner)
		redeem := func(link auth.Secret, name string) error {
			return f.db.Update(ctx, func(tx *store.Tx) error { _, err := auth.Redeem(ctx, tx, link, name, f.hash); return err })
		}
		invite := func() (auth.Invitation, auth.Secret) {
			v, link, err := p.Invite(ctx, ann, auth.Invitation{Role: auth.Viewer, Email: "vic@example.com", Person: "ann", Project: "prj_other", CreatedBy: "person:eve"})
			if err != nil {
				f.t.Fatal(err)
			}
			return v, link
		}
		v, link := invite()
		if v.Person != "" || v.Project != ann.Project || v.CreatedBy != "person:ann" {
			f.t.Errorf("an invitation says of itself %+v", v)
		}
		// The attack: the name of who decides without an account.
		for _, name := range []string{"local", "local-root", "local-1000", "system", "ann", "Vic", "vic:ann"} {
			f.is("to be "+name, redeem(link, name), auth.ErrInvalid)
		}
		f.is("use", redeem(link, "vic"), nil)
		f.is("use twice", redeem(link, "eve"), auth.ErrUnauthenticated)
		if list, err := p.List(ctx, ann); err != nil || len(list) != 2 || list[1].Role != auth.Viewer || list[1].Email != "vic@example.com" {
			f.t.Errorf("List = %+v, %v", list, err)
		}
		v, link = invite()
		if list, err := p.Invitations(ctx, ann); err != nil || len(list) != 1 || list[0].ID != v.ID || list[0].Role != auth.Viewer {
			f.t.Errorf("Invitations = %+v, %v", list, err)
		}
		f.is("withdraw", p.Withdraw(ctx, ann, v.ID), nil)
		f.is("use what was withdrawn", redeem(link, "eve"), auth.ErrUnauthenticated)
		f.is("withdraw twice", p.Withdraw(ctx, ann, v.ID), people.ErrNotFound)
		f.is("withdraw none", p.Withdraw(ctx, ann, ""), people.ErrNotFound)
		_, link = invite()
		f.update(func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update setup set expires_at = 1 where used_at = 0`)
			return err
		})
		f.is("use too late", redeem(link, "eve"), auth.ErrUnauthenticated)

		// The operator at the machine lets somebody choose a new password.
		token := f.session(ann)
		_, link, err := p.RenewPassword(ctx, f.operator, "ann")
		f.is("renew", err, nil)
		f.is("use it", redeem(link, "eve"), nil) // the name counts for nothing
		if f.in(token) {
			f.t.Error("a session outlives a new password")
		}
		if list, err := p.List(ctx, ann); err != nil || len(list) != 2 {
			f.t.Errorf("a link for a password made an account: %+v, %v", list, err)
		}
		_, link, err = p.RenewPassword(ctx, f.operator, "vic")
		f.is("renew", err, nil)
		f.is("disable", p.Disable(ctx, ann, "vic"), nil)
		f.is("use it when disabled", redeem(link, "vic"), auth.ErrUnauthenticated)
	})
}

// TestKeyboard checks that people turn keys off for themselves alone.
func TestKeyboard(t *testing.T) {
	each(t, func(f *fixture) {
		ann, bob := f.join("ann", auth.Owner), f.join("bob", auth.Viewer)
		off := func(who auth.Principal) bool {
			t.Helper()
			in, err := auth.CheckSession(t.Context(), f.db, f.session(who))
			if err != nil {
				t.Fatal(err)
			}
			return in.KeysOff
		}
		if off(ann) || off(bob) {
			t.Error("keys are off before anybody turned them off")
		}
		if err := f.people.SetKeys(t.Context(), bob, false); err != nil {
			t.Fatal(err)
		}
		if !off(bob) || off(ann) {
			t.Errorf("off after bob's choice: ann %v, bob %v, want bob alone", off(ann), off(bob))
		}
		other := bob // the attacker: somebody of the same name in another project
		other.Project = "prj_other"
		if err := f.people.SetKeys(t.Context(), other, true); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("keys set from another project: %v, want %v", err, auth.ErrForbidden)
		}
		if err := f.people.SetKeys(t.Context(), bob, true); err != nil || off(bob) {
			t.Errorf("keys turned on again: %v, off %v", err, off(bob))
		}
		if err := f.people.SetKeys(t.Context(), f.operator, false); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("keys set without an account: %v, want %v", err, auth.ErrForbidden)
		}
	})
}
