package mailbox_test

import (
	"crypto/rand"
	"errors"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// account makes an account, and returns its person.
func (f *fixture) account(t *testing.T, project auth.Principal, name string, role auth.Role) (p auth.Principal) {
	t.Helper()
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		_, link, err := auth.NewInvitation(t.Context(), tx, auth.Invitation{Project: project.Project, Role: role})
		if err == nil {
			p, err = auth.Redeem(t.Context(), tx, link, name, "x")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	p.Role = role
	return p
}

func device() auth.Secret { return auth.Secret(rand.Text() + rand.Text()) }

// A reader is a person with a context grant of an inbox.
type reader struct {
	auth.Principal
	grant  keyring.ContextGrant
	device auth.Secret
}

// reader gives a person a grant, who redeems it.
func (f *fixture) reader(t *testing.T, holder auth.Principal, k *seal.Key, p auth.Principal) reader {
	t.Helper()
	_, code, err := f.post.Keys.AddContext(t.Context(), holder, k, p.ID, time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	r := reader{Principal: p, device: device()}
	if r.grant, err = f.post.Keys.RedeemContext(t.Context(), p, code, r.device, "Firefox"); err != nil {
		t.Fatal(err)
	}
	return r
}

// sees returns what r reads of an action, newest first, or why it reads nothing.
func (f *fixture) sees(t *testing.T, r reader, inbox string, a oversight.Action) (mailbox.Conversation, error) {
	t.Helper()
	k, err := f.post.Keys.OpenContext(t.Context(), r.Principal, r.device, inbox)
	if err != nil {
		return mailbox.Conversation{}, err
	}
	return f.post.Contexts.Of(t.Context(), r.Principal, k, &a)
}

// answered is an inbox with a thread of three mails, another mail, and an answer that waits.
func (f *fixture) answered(t *testing.T, name string) (b directory.Inbox, holder auth.Principal, k *seal.Key, a oversight.Action) {
	t.Helper()
	b, holder, key := f.inbox(t, name)
	k = f.open(t, holder, key)
	f.arrive(t, b.Address, "To: "+b.Address+"|Subject: The list|Message-ID: <1@h>")
	f.arrive(t, b.Address, "Subject: Something else|Message-ID: <9@h>")
	f.arrive(t, b.Address, "Subject: Re: The list|Message-ID: <2@h>|In-Reply-To: <1@h>")
	ms, err := f.post.Messages(t.Context(), holder, k, 1)
	if err != nil {
		t.Fatal(err)
	}
	p, err := f.post.Send(t.Context(), holder, "rest", mailbox.Outgoing{ReplyTo: ms[0].ID, Key: k, Draft: mail.Draft{Text: "Here it is.\n"}})
	if err != nil || p.State != oversight.Pending {
		t.Fatalf("send: %v, %v", p.State, err)
	}
	full, err := f.gate.Action(t.Context(), f.person, p.ID)
	if err != nil {
		t.Fatal(err)
	}
	return b, holder, k, full
}

// TestContextShowsTheThread: a reviewer with a grant reads the thread that a waiting action
// answers, and nothing else; the record says so, once.
func TestContextShowsTheThread(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		b, holder, k, a := f.answered(t, "analyst")
		r := f.reader(t, holder, k, f.account(t, f.project, "rita", auth.Reviewer))
		for range 3 {
			c, err := f.sees(t, r, b.ID, a)
			if err != nil || len(c.Said) != 2 || c.Total != 2 || c.Apart {
				t.Fatalf("%+v, %v", c, err)
			}
			if s := c.Said[0]; s.Subject != "Re: The list" || s.From != "bob@example.com" || s.Text != "body" || s.Out {
				t.Errorf("%+v", s)
			}
			if c.Said[1].Subject != "The list" {
				t.Errorf("%+v", c.Said[1])
			}
		}
		if n := f.count(t, `select count(*) from audit_entry where verb = 'context.read' and object = $1 and actor = 'person:rita'`, a.ID); n != 1 {
			t.Errorf("%d entries of the record, want 1", n)
		}
		// Mail that comes after a revocation elsewhere, in a new epoch, opens too.
		f.arrive(t, b.Address, "Subject: Re: Re: The list|Message-ID: <3@h>|In-Reply-To: <2@h>")
		if c, err := f.sees(t, r, b.ID, a); err != nil || len(c.Said) != 3 {
			t.Errorf("%+v, %v", c, err)
		}
		if n := f.count(t, `select count(*) from audit_entry where verb = 'context.read'`); n != 2 {
			t.Errorf("%d entries of the record, want another one for the new mail", n)
		}
		// After the decision the grant shows nothing of the thread.
		a.State = oversight.Denied
		if c, err := f.sees(t, r, b.ID, a); err != nil || len(c.Said) != 0 {
			t.Errorf("decided: %+v, %v", c, err)
		}
	})
}

// TestContextOfAnotherThread: a mail that names the Message-ID of a thread in which no
// recipient has part is shown with it, and said to be apart.
func TestContextOfAnotherThread(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	b, holder, k, _ := f.answered(t, "analyst")
	r := f.reader(t, holder, k, f.account(t, f.project, "rita", auth.Reviewer))
	p, err := f.post.Send(t.Context(), holder, "rest", mailbox.Outgoing{Draft: mail.Draft{To: []string{"eve@evil.example"}, Subject: "Re: The list", Text: "x\n", InReplyTo: "<2@h>"}})
	if err != nil {
		t.Fatal(err)
	}
	a, err := f.gate.Action(t.Context(), f.person, p.ID)
	if err != nil {
		t.Fatal(err)
	}
	if c, err := f.sees(t, r, b.ID, a); err != nil || !c.Apart {
		t.Errorf("%+v, %v", c, err)
	}
}

// TestContextIsClosedToOthers: whoever has a part of what opens it, but not all.
func TestContextIsClosedToOthers(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, holder, k, a := f.answered(t, "analyst")
		b2, holder2, k2, a2 := f.answered(t, "buyer")
		r := f.reader(t, holder, k, f.account(t, f.project, "rita", auth.Reviewer))
		other := f.reader(t, holder2, k2, f.account(t, f.project, "otto", auth.Reviewer))
		stranger := f.account(t, f.other, "eve", auth.Owner)
		viewer := r
		viewer.Role = auth.Viewer
		closed := func(name string, r reader, inbox string, a oversight.Action) {
			t.Helper()
			if c, err := f.sees(t, r, inbox, a); err == nil && len(c.Said) > 0 {
				t.Errorf("%s reads %+v", name, c)
			}
		}
		closed("the grant of another inbox", r, b2.ID, a2)
		closed("the grant of another inbox, for an action of this one", other, b2.ID, a)
		closed("a viewer", viewer, b.ID, a)
		closed("another person with the cookie", reader{Principal: other.Principal, device: r.device}, b.ID, a)
		closed("a person of another project with the cookie", reader{Principal: stranger, device: r.device}, b.ID, a)
		closed("the person in another browser", reader{Principal: r.Principal, device: device()}, b.ID, a)
		closed("the person without a cookie", reader{Principal: r.Principal}, b.ID, a)
		if _, err := f.sees(t, r, b.ID, a); err != nil {
			t.Fatal(err)
		}

		// Who can write the database, and has a browser of their own.
		f.exec(t, `update context_grant set person_id = (select id from person where name = 'otto'), device = $1 where credential_id = $2`, other.device.Digest(), r.grant.ID)
		closed("the row moved to another person", other, b.ID, a)
		f.exec(t, `update context_grant set person_id = (select id from person where name = 'rita'), device = $1 where credential_id = $2`, r.device.Digest(), r.grant.ID)
		f.exec(t, `update context_grant set inbox_id = $1 where credential_id = $2`, b2.ID, r.grant.ID)
		closed("the row moved to another inbox", r, b2.ID, a2)
		f.exec(t, `update context_grant set inbox_id = $1 where credential_id = $2`, b.ID, r.grant.ID)
		f.exec(t, `update inbox_key set scope = 'read' where credential_id = $1`, r.grant.ID)
		closed("the scope widened", r, b.ID, a)
		f.exec(t, `update inbox_key set scope = 'context' where credential_id = $1`, r.grant.ID)

		// Its key opens a thread for a reviewer, and no list, search or message for anybody.
		key, err := f.post.Keys.OpenContext(ctx, r.Principal, r.device, b.ID)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.post.Messages(ctx, r.Principal, key, 0); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("messages: %v", err)
		}
		if _, _, err := f.post.HeldMessages(ctx, r.Principal, key, "", 0); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("held messages: %v", err)
		}
		if _, _, err := f.post.Keys.Add(ctx, r.Principal, key, keyring.NewKey{}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("another key: %v", err)
		}
		if _, _, err := f.post.Keys.AddContext(ctx, r.Principal, key, "rita", time.Now().Add(time.Hour)); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("another grant: %v", err)
		}
		// The holder's own key is not taken for a reviewer's.
		if _, err := f.post.Contexts.Of(ctx, r.Principal, k, &a); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a full key: %v", err)
		}
	})
}

// TestContextEnds: by its time, its holder, an owner, and the person.
func TestContextEnds(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, holder, k, a := f.answered(t, "analyst")
		rita := f.account(t, f.project, "rita", auth.Reviewer)
		for name, end := range map[string]func(r reader) error{
			"its holder": func(r reader) error { return f.post.Keys.Revoke(ctx, holder, b.ID, r.grant.ID, false) },
			"an owner":   func(r reader) error { return f.post.Keys.Revoke(ctx, f.person, b.ID, r.grant.ID, false) },
			"the person": func(r reader) error { return f.post.Keys.LeaveContext(ctx, r.Principal, r.grant.ID) },
			"its time": func(r reader) error {
				f.exec(t, `update credential set expires_at = 1 where id = $1`, r.grant.ID) //nolint:contextcheck // the fixture lives in the test
				return f.post.Keys.Expire(ctx)
			},
		} {
			r := f.reader(t, holder, k, rita)
			if _, err := f.sees(t, r, b.ID, a); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if err := end(r); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if _, err := f.sees(t, r, b.ID, a); !errors.Is(err, keyring.ErrNoContext) {
				t.Errorf("ended by %s: %v", name, err)
			}
		}
		if n := f.count(t, `select count(*) from context_grant`); n != 0 {
			t.Errorf("%d rows are left", n)
		}
		r := f.reader(t, holder, k, rita)
		if err := f.post.Keys.LeaveContext(ctx, f.account(t, f.project, "otto", auth.Reviewer), r.grant.ID); !errors.Is(err, keyring.ErrNoKey) {
			t.Errorf("another person ends it: %v", err)
		}
	})
}

// TestContextCode: a code is for one person, once, for some days.
func TestContextCode(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		_, holder, k, _ := f.answered(t, "analyst")
		rita, otto := f.account(t, f.project, "rita", auth.Reviewer), f.account(t, f.project, "otto", auth.Reviewer)
		code := func() auth.Secret {
			t.Helper()
			_, code, err := f.post.Keys.AddContext(ctx, holder, k, "rita", time.Now().Add(24*time.Hour))
			if err != nil || !auth.IsContextCode(code) {
				t.Fatal(err)
			}
			return code
		}
		refused := func(name string, who auth.Principal, c auth.Secret, want error) {
			t.Helper()
			if _, err := f.post.Keys.RedeemContext(ctx, who, c, device(), ""); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", name, err, want)
			}
		}
		c := code()
		refused("another person", otto, c, keyring.ErrContextCode)
		refused("a person of that name in another project", auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "rita", Project: f.other.Project}, c, keyring.ErrContextCode)
		viewer := rita
		viewer.Role = auth.Viewer
		refused("a viewer", viewer, c, auth.ErrForbidden)
		refused("an agent", holder, c, auth.ErrForbidden)
		refused("no code", rita, "", keyring.ErrContextCode)
		refused("a guess", rita, "pcx_"+auth.Secret(rand.Text()), keyring.ErrContextCode)
		if _, err := auth.CheckKey(ctx, f.db, c); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("as a key: %v", err)
		}
		if _, err := f.post.Keys.RedeemContext(ctx, rita, c, device(), "Firefox"); err != nil {
			t.Fatal(err)
		}
		refused("twice", rita, c, keyring.ErrContextCode)

		// At once: one of them gets it.
		c = code()
		done := make(chan error, 4)
		for range 4 {
			go func() {
				_, err := f.post.Keys.RedeemContext(ctx, rita, c, device(), "")
				done <- err
			}()
		}
		won := 0
		for range 4 {
			if err := <-done; err == nil {
				won++
			} else if !errors.Is(err, keyring.ErrContextCode) {
				t.Errorf("at once: %v", err)
			}
		}
		if won != 1 {
			t.Errorf("%d redeemed it", won)
		}
		c = code()
		f.exec(t, `update context_grant set created_at = 1 where redeemed_at = 0`)
		refused("after its days", rita, c, keyring.ErrContextCode)

		for name, end := range map[string]time.Time{"no end": {}, "an end far away": time.Now().Add(400 * 24 * time.Hour), "an end in the past": time.Now().Add(-time.Hour)} {
			if _, _, err := f.post.Keys.AddContext(ctx, holder, k, "rita", end); !errors.Is(err, directory.ErrInvalid) {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// TestContextOfArrivals: of mail that is held, a reviewer with a grant sees sender and
// subject, and not the text.
func TestContextOfArrivals(t *testing.T) {
	offices(t, nil, mailbox.Config{}, func(t *testing.T, f *fixture, _, _ office) {
		ctx := t.Context()
		f.judgedBy(t, modes{})
		b, holder, k := f.agentIn(t, "analyst", policy.GatedAll)
		r := f.reader(t, holder, k, f.account(t, f.project, "rita", auth.Reviewer))
		if err := f.post.Receive(ctx, mailbox.Arrival{Envelope: mail.Envelope{To: []string{b.Address}, Raw: incoming}}); err != nil {
			t.Fatal(err)
		}
		a := f.pendingOf(t, auth.Principal{Kind: auth.System, ID: "smtp"})
		c, err := f.sees(t, r, b.ID, a)
		if err != nil || len(c.Said) != 1 || !c.Arrival || c.Said[0].Subject != secretWord+" subject" || !strings.Contains(c.Said[0].From, "bob@example.com") || c.Said[0].Text != "" {
			t.Errorf("%+v, %v", c, err)
		}
		key, err := f.post.Keys.OpenContext(ctx, r.Principal, r.device, b.ID)
		if err != nil {
			t.Fatal(err)
		}
		if list, err := f.post.Contexts.Held(ctx, r.Principal, key); err != nil || len(list) != 1 || list[0].Subject != secretWord+" subject" {
			t.Errorf("%+v, %v", list, err)
		}
		if n := f.count(t, `select count(*) from audit_entry where verb = 'context.held' and object = $1`, b.ID); n != 1 {
			t.Errorf("%d entries of the record", n)
		}
	})
}
