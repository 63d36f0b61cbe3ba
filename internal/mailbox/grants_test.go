package mailbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

func (f *fixture) receive(t *testing.T, b directory.Inbox, subject string) error {
	t.Helper()
	raw := []byte("From: Bob <bob@example.com>\r\nSubject: " + subject + "\r\n\r\n" + subject + "\r\n")
	return f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: raw}, Remote: "192.0.2.1"})
}

func (f *fixture) incoming(t *testing.T, b directory.Inbox, subject string) {
	t.Helper()
	if err := f.receive(t, b, subject); err != nil {
		t.Fatal(err)
	}
}

// subjects opens an inbox by a credential and returns what is in it, newest
// first, or why it could not.
func (f *fixture) subjects(ctx context.Context, key auth.Secret, inbox string) (string, error) {
	who, err := auth.CheckKey(ctx, f.db, key)
	if err != nil {
		return "", err
	}
	k, err := f.post.Keys.Open(ctx, who, key, inbox)
	if err != nil {
		return "", err
	}
	ms, err := f.post.Messages(ctx, who, k, 0)
	if err != nil {
		return "", err
	}
	var out []string
	for _, m := range ms {
		if _, _, err := f.post.Message(ctx, who, k, m.ID); err != nil {
			return "", err
		}
		out = append(out, m.Subject)
	}
	return strings.Join(out, " "), nil
}

func (f *fixture) reads(t *testing.T, key auth.Secret, inbox, want string) {
	t.Helper()
	if got, err := f.subjects(t.Context(), key, inbox); err != nil || got != want {
		t.Errorf("reads %q, %v; want %q", got, err, want)
	}
}

func (f *fixture) refused(t *testing.T, key auth.Secret, inbox string, want error) {
	t.Helper()
	if got, err := f.subjects(t.Context(), key, inbox); !errors.Is(err, want) {
		t.Errorf("reads %q, %v; want %v", got, err, want)
	}
}

func (f *fixture) show(t *testing.T, key auth.Secret, inbox string) (auth.Principal, *seal.Key) {
	t.Helper()
	who, err := auth.CheckKey(t.Context(), f.db, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.post.Keys.Open(t.Context(), who, key, inbox)
	if err != nil {
		t.Fatal(err)
	}
	return who, k
}

// must returns what a call that makes a key returned, if it did.
func must(p keyring.Part, key auth.Secret, err error) func(t *testing.T) (keyring.Part, auth.Secret) {
	return func(t *testing.T) (keyring.Part, auth.Secret) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return p, key
	}
}

// TestClosedKeys: a key that does not read has nothing to read with, whatever the
// database says of it, also after its inbox was re-keyed.
func TestClosedKeys(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, first := f.inbox(t, "analyst")
		f.incoming(t, b, "one")
		_, k := f.show(t, first, "")
		part, closed := must(f.post.Keys.Add(ctx, who, k, keyring.NewKey{Scope: "draft send"}))(t)
		sender, err := auth.CheckKey(ctx, db, closed)
		if err != nil {
			t.Fatal(err)
		}
		gone, _ := must(f.post.Keys.Add(ctx, who, k, keyring.NewKey{Scope: seal.Read}))(t)
		if err := f.post.Keys.Revoke(ctx, who, "", gone.Credential, false); err != nil { // a new epoch
			t.Fatal(err)
		}
		const wraps = `select count(*) from inbox_wrap where credential_id = $1`
		if n, full := f.count(t, wraps, part.Credential), f.count(t, wraps, who.ID); n != 0 || full != 2 {
			t.Errorf("the key has %d wrapped keys, and the full key %d", n, full)
		}
		f.refused(t, closed, "", auth.ErrForbidden)
		if _, err := f.post.Send(ctx, sender, "test", mailbox.Outgoing{Draft: mail.Draft{To: []string{"x@example.com"}, Text: "x"}}); err != nil {
			t.Errorf("it does not propose: %v", err)
		}
		if _, err := f.post.Send(ctx, sender, "test", mailbox.Outgoing{ReplyTo: "msg_" + strings.Repeat("A", 26), Draft: mail.Draft{Text: "x"}}); err == nil {
			t.Error("it replies to a message that it cannot read")
		}
		sandbox := auth.Principal{Kind: auth.Sandbox, ID: "s1", Project: who.Project, Inbox: b.ID}
		if err := f.post.Keys.Lend(ctx, f.person, sandbox, closed); !errors.Is(err, directory.ErrInvalid) {
			t.Errorf("it is lent for reading: %v", err)
		}
		// The attack: somebody who can write the database gives the key more scope.
		if err := db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update inbox_key set scope = 'full' where credential_id = $1`, part.Credential)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if _, err := f.post.Keys.Open(ctx, sender, closed, ""); err == nil {
			t.Error("it opens the inbox")
		}
	})
}

func TestKeys(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, first := f.inbox(t, "analyst")
		f.incoming(t, b, "one")
		_, k := f.show(t, first, "")

		// A second key opens what there is and what comes, within its scope.
		part, second := must(f.post.Keys.Add(ctx, who, k, keyring.NewKey{Name: "laptop", Scope: seal.Read}))(t)
		f.reads(t, second, "", "one")
		reader, rk := f.show(t, second, b.Address)
		if keyring.May(rk, seal.Read) != nil || !errors.Is(keyring.May(rk, seal.Propose), auth.ErrForbidden) || !errors.Is(keyring.May(rk, seal.Manage), auth.ErrForbidden) {
			t.Errorf("scope = %v", rk.Scope())
		}
		if _, err := f.post.Send(ctx, reader, "test", mailbox.Outgoing{Draft: mail.Draft{To: []string{"x@example.com"}, Text: "x"}}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a reading key proposes: %v", err)
		}
		for name, err := range map[string]error{
			"add a key":      func() error { _, _, err := f.post.Keys.Add(ctx, reader, rk, keyring.NewKey{}); return err }(),
			"add a recovery": func() error { _, _, err := f.post.Keys.AddRecovery(ctx, reader, rk); return err }(),
			"grant": func() error {
				_, _, err := f.post.Keys.Grant(ctx, reader, rk, keyring.NewKey{Expires: time.Now().Add(time.Hour)})
				return err
			}(),
			"rotate another": func() error { _, _, err := f.post.Keys.Rotate(ctx, reader, rk, who.ID); return err }(),
			"revoke":         f.post.Keys.Revoke(ctx, reader, "", who.ID, false),
			"delete":         func() error { _, err := f.post.Delete(ctx, reader, ""); return err }(),
			"update": func() error {
				s := "x"
				_, err := f.post.Update(ctx, reader, "", mailbox.Change{DisplayName: &s})
				return err
			}(),
			"list keys": func() error { _, err := f.post.Keys.Parts(ctx, reader, ""); return err }(),
		} {
			if !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("a reading key may %s: %v", name, err)
			}
		}

		// It may replace itself, and is then nothing.
		_, third := must(f.post.Keys.Rotate(ctx, reader, rk, part.Credential))(t)
		f.refused(t, second, "", auth.ErrUnauthenticated)
		f.incoming(t, b, "two")
		f.reads(t, third, "", "two one")
		f.reads(t, first, "", "two one")

		list, err := f.post.Keys.Parts(ctx, f.person, b.ID)
		if err != nil || len(list) != 2 || list[0].Credential != who.ID || list[0].Scope != seal.Manage || list[1].Name != "laptop" || list[1].Scope != seal.Read || list[1].Used.IsZero() {
			t.Errorf("keys = %+v, %v", list, err)
		}
		if _, err := f.post.Keys.Parts(ctx, f.other, b.ID); !errors.Is(err, directory.ErrNoInbox) {
			t.Errorf("another project lists keys: %v", err)
		}

		// The last key that manages stays, unless its project says otherwise.
		if err := f.post.Keys.Revoke(ctx, who, "", who.ID, true); !errors.Is(err, keyring.ErrLastKey) {
			t.Errorf("the last key revokes itself: %v", err)
		}
		if err := f.post.Keys.Revoke(ctx, f.person, b.ID, who.ID, false); !errors.Is(err, keyring.ErrLastKey) {
			t.Errorf("the last key is revoked: %v", err)
		}
		if err := f.post.Keys.Revoke(ctx, f.other, b.ID, who.ID, true); !errors.Is(err, directory.ErrNoInbox) {
			t.Errorf("another project revokes: %v", err)
		}
		if err := f.post.Keys.Revoke(ctx, f.project, b.Address, who.ID, true); err != nil {
			t.Error(err)
		}
		f.refused(t, first, "", auth.ErrUnauthenticated)
		f.reads(t, third, "", "two one")
		if err := f.post.Keys.Revoke(ctx, f.project, b.ID, "crd_NOTHING", true); !errors.Is(err, keyring.ErrNoKey) {
			t.Errorf("a key that there is not: %v", err)
		}

		for name, n := range map[string]keyring.NewKey{
			"a scope that there is not": {Scope: "everything"}, "recovery by its scope": {Scope: "recover"}, "a past end": {Expires: time.Now()},
			"a long name": {Name: strings.Repeat("x", 101)}, "a hidden name": {Name: "a\u202eb"}, "no UTF-8": {Name: "\xff"},
		} {
			if _, _, err := f.post.Keys.Add(ctx, who, k, n); !errors.Is(err, directory.ErrInvalid) {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

func TestRecovery(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, first := f.inbox(t, "analyst")
		f.incoming(t, b, "one")
		_, k := f.show(t, first, "")
		_, recovery := must(f.post.Keys.AddRecovery(ctx, who, k))(t)
		keeper, err := auth.CheckKey(ctx, db, recovery)
		if err != nil || keeper.Kind != auth.Recovery {
			t.Fatalf("recovery key = %+v, %v", keeper, err)
		}
		// By itself it opens nothing and proposes nothing.
		if _, err := f.post.Keys.Open(ctx, keeper, recovery, ""); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a recovery key opens: %v", err)
		}
		if _, err := f.post.Send(ctx, keeper, "test", mailbox.Outgoing{Draft: mail.Draft{To: []string{"x@example.com"}}}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a recovery key proposes: %v", err)
		}
		if _, _, _, err := f.post.Keys.Recover(ctx, who, first, false); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("an inbox key recovers: %v", err)
		}

		// The key is lost, and its project has ended it: mail goes on to arrive.
		if err := f.post.Keys.Revoke(ctx, f.person, b.ID, who.ID, true); err != nil {
			t.Fatal(err)
		}
		f.incoming(t, b, "two")
		_, _, second, err := f.post.Keys.Recover(ctx, keeper, recovery, false)
		if err != nil {
			t.Fatal(err)
		}
		f.reads(t, second, "", "two one")

		// It was stolen: everything else ends.
		_, _, third, err := f.post.Keys.Recover(ctx, keeper, recovery, true)
		if err != nil {
			t.Fatal(err)
		}
		f.refused(t, second, "", auth.ErrUnauthenticated)
		f.incoming(t, b, "three")
		f.reads(t, third, "", "three two one")
		// The key that it made can do all that a first key can.
		owner, k := f.show(t, third, "")
		_, fourth := must(f.post.Keys.Rotate(ctx, owner, k, keeper.ID))(t)
		if _, err := auth.CheckKey(ctx, db, recovery); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("a replaced recovery key: %v", err)
		}
		if !strings.HasPrefix(fourth.Reveal(), "prk_") {
			t.Error("a recovery key was replaced by another kind of key")
		}
	})
}

// TestGrants: an orchestrator's grant opens the inboxes that were granted, as
// far and as long as they were, and nothing else.
func TestGrants(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		a, agentA, keyA := f.inbox(t, "alice")
		b, agentB, keyB := f.inbox(t, "bella")
		c, _, _ := f.inbox(t, "clara")
		for _, box := range []directory.Inbox{a, b, c} {
			f.incoming(t, box, "one")
		}
		_, ka := f.show(t, keyA, "")
		_, kb := f.show(t, keyB, "")
		soon := time.Now().Add(time.Hour)
		part, grant := must(f.post.Keys.Grant(ctx, agentA, ka, keyring.NewKey{Name: "orchestrator", Expires: soon}))(t)
		if part.Scope != seal.Read || part.Expires.IsZero() {
			t.Errorf("grant = %+v", part)
		}
		f.reads(t, grant, a.Address, "one")
		f.refused(t, grant, b.Address, auth.ErrForbidden)
		if _, err := f.post.Keys.Extend(ctx, agentB, kb, part.Credential, keyring.NewKey{Scope: seal.Propose, Expires: soon}); err != nil {
			t.Fatal(err)
		}
		f.reads(t, grant, b.ID, "one")
		// What it is not over answers as what is not there.
		_, foreign := f.subjects(ctx, grant, c.ID)
		_, missing := f.subjects(ctx, grant, "nobody@agents.test")
		if foreign == nil || missing == nil || foreign.Error() != missing.Error() {
			t.Errorf("foreign: %v, missing: %v", foreign, missing)
		}
		holder, _ := f.show(t, grant, a.ID)
		if list, err := f.post.Directory.Inboxes(ctx, holder); err != nil || len(list) != 2 {
			t.Errorf("a grant lists %d inboxes, %v; want 2", len(list), err)
		}
		if _, err := f.post.Address(ctx, holder, b.ID); err != nil {
			t.Errorf("a proposing grant: %v", err)
		}
		if _, err := f.post.Address(ctx, holder, a.ID); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a reading grant proposes: %v", err)
		}
		if _, _, err := f.post.CreateInbox(ctx, holder, directory.NewInbox{}, grant); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a grant makes an inbox: %v", err)
		}
		_, gk := f.show(t, grant, b.ID)
		if _, _, err := f.post.Keys.Grant(ctx, holder, gk, keyring.NewKey{Expires: soon}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a grant grants: %v", err)
		}
		if list, err := f.post.Keys.Grants(ctx, f.person); err != nil || len(list) != 2 || list[0].Inbox != a.ID || list[0].CreatedBy != agentA.String() {
			t.Errorf("grants = %+v, %v", list, err)
		}

		for name, err := range map[string]error{
			"no end": func() error { _, _, err := f.post.Keys.Grant(ctx, agentA, ka, keyring.NewKey{}); return err }(),
			"an end too far": func() error {
				_, _, err := f.post.Keys.Grant(ctx, agentA, ka, keyring.NewKey{Expires: soon.Add(keyring.MaxGrant)})
				return err
			}(),
			"to manage": func() error {
				_, _, err := f.post.Keys.Grant(ctx, agentA, ka, keyring.NewKey{Scope: seal.Manage, Expires: soon})
				return err
			}(),
			"twice the same": func() error {
				_, err := f.post.Keys.Extend(ctx, agentA, ka, part.Credential, keyring.NewKey{Expires: soon})
				return err
			}(),
			"a key that is none": func() error {
				_, err := f.post.Keys.Extend(ctx, agentA, ka, agentB.ID, keyring.NewKey{Expires: soon})
				return err
			}(),
		} {
			if !errors.Is(err, directory.ErrInvalid) && !errors.Is(err, keyring.ErrNoKey) {
				t.Errorf("%s: %v", name, err)
			}
		}

		// Its own key takes one inbox back; the other stays.
		if err := f.post.Keys.Revoke(ctx, agentA, "", part.Credential, false); err != nil {
			t.Fatal(err)
		}
		f.refused(t, grant, a.ID, auth.ErrForbidden)
		f.incoming(t, a, "two")
		f.reads(t, keyA, "", "two one")
		f.reads(t, grant, b.ID, "one")
		// A manager takes all.
		if err := f.post.Keys.RevokeGrant(ctx, f.other, part.Credential); !errors.Is(err, keyring.ErrNoKey) {
			t.Errorf("another project revokes: %v", err)
		}
		if err := f.post.Keys.RevokeGrant(ctx, f.project, part.Credential); err != nil {
			t.Fatal(err)
		}
		f.refused(t, grant, b.ID, auth.ErrUnauthenticated)
		f.incoming(t, b, "two")
		f.reads(t, keyB, "", "two one")

		// One whose time is over opens nothing, noticed or not, and what is
		// wrapped for it goes when it is noticed.
		part, grant = must(f.post.Keys.Grant(ctx, agentA, ka, keyring.NewKey{Expires: soon}))(t)
		f.exec(t, `update inbox_key set expires_at = 1 where credential_id = $1`, part.Credential)
		f.refused(t, grant, a.ID, auth.ErrForbidden)
		if err := f.post.Expire(ctx); err != nil {
			t.Fatal(err)
		}
		f.refused(t, grant, a.ID, auth.ErrUnauthenticated)
		if n := f.count(t, `select count(*) from inbox_wrap where credential_id = $1`, part.Credential); n != 0 {
			t.Errorf("%d wrapped keys are left of a grant that ended", n)
		}
		f.incoming(t, a, "three")
		f.reads(t, keyA, "", "three two one")
	})
}

func (f *fixture) exec(t *testing.T, query string, args ...any) {
	t.Helper()
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		if _, err := tx.ExecContext(t.Context(), query, args...); err != nil {
			return err
		}
		return storetest.Reseal(t.Context(), tx)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) count(t *testing.T, query string, args ...any) (n int) {
	t.Helper()
	if err := audit.View(t.Context(), f.db, func(tx *store.Tx) error { return tx.One(t.Context(), query, args, &n) }); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestFormerHolder is what docs/background/threat-model.md says of who held a credential
// that was revoked and steals the database: from a copy of before, the mail of
// the epochs up to then; from one of after, nothing; of later mail, nothing.
func TestFormerHolder(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, key := f.inbox(t, "analyst")
		_, k := f.show(t, key, "")
		f.incoming(t, b, "before")
		part, grant := must(f.post.Keys.Grant(ctx, who, k, keyring.NewKey{Expires: time.Now().Add(time.Hour)}))(t)
		thief, _ := f.show(t, grant, b.ID)

		type wrapping struct {
			epoch   int64
			wrapped []byte
		}
		read := func() (out []wrapping) {
			err := db.View(ctx, func(tx *store.Tx) error {
				rows, err := tx.QueryContext(ctx, `select epoch, wrapped from inbox_wrap where credential_id = $1`, part.Credential)
				if err != nil {
					return err
				}
				defer rows.Close()
				for rows.Next() {
					var w wrapping
					if err := rows.Scan(&w.epoch, &w.wrapped); err != nil {
						return err
					}
					out = append(out, w)
				}
				return rows.Err()
			})
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
		copied := read()
		if strings.HasSuffix(t.Name(), "/sqlite") && !f.inFiles(t, copied[0].wrapped) {
			t.Error("the wrapped key is not found where it is")
		}
		if err := f.post.Keys.Revoke(ctx, who, "", part.Credential, false); err != nil {
			t.Fatal(err)
		}
		f.incoming(t, b, "after")
		if left := read(); len(copied) != 1 || len(left) != 0 {
			t.Errorf("%d wrapped keys before the revocation and %d after; want 1 and 0", len(copied), len(left))
		}
		if err := f.post.Expire(ctx); err != nil { // as the server does every half minute
			t.Fatal(err)
		}
		if strings.HasSuffix(t.Name(), "/sqlite") && f.inFiles(t, copied[0].wrapped) {
			t.Error("the wrapped key is left in the files of the database")
		}
		// The attack: whoever can write the database too puts back what they had
		// copied, and says that it is for the new epoch as well.
		f.exec(t, `update credential set revoked_at = 0 where id = $1`, part.Credential)
		f.exec(t, `insert into inbox_key (inbox_id, credential_id, scope, public_key) select inbox_id, $1, 'read', public_key from inbox_key where credential_id = $2`, part.Credential, who.ID)
		f.exec(t, `insert into inbox_wrap (inbox_id, credential_id, epoch, wrapped) values ($1, $2, 1, $3)`, b.ID, part.Credential, copied[0].wrapped)
		old, err := f.post.Keys.Open(ctx, thief, grant, b.ID)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.post.Messages(ctx, thief, old, 0); err == nil {
			t.Error("the old epoch's key opens mail of the new one")
		}
		f.exec(t, `insert into inbox_wrap (inbox_id, credential_id, epoch, wrapped) values ($1, $2, 2, $3)`, b.ID, part.Credential, copied[0].wrapped)
		if _, err := f.post.Keys.Open(ctx, thief, grant, b.ID); err == nil {
			t.Error("a wrapping of one epoch passes for another's")
		}
	})
}

// inFiles reports whether b is in the files of a SQLite database.
func (f *fixture) inFiles(t *testing.T, b []byte) bool {
	t.Helper()
	var path string
	err := f.db.View(t.Context(), func(tx *store.Tx) error {
		return tx.One(t.Context(), `select file from pragma_database_list where name = 'main'`, nil, &path)
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{path, path + "-wal"} {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(data, b[len(b)/2:]) || bytes.Contains(data, b[:100]) { // it may go over pages
			return true
		}
	}
	return false
}

// TestKeysAtOnce: keys that are added while others are revoked open all that
// there is and comes.
func TestKeysAtOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, key := f.inbox(t, "analyst")
		_, k := f.show(t, key, "")
		var mu sync.Mutex
		var kept []auth.Secret
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				for j := range 3 {
					_, stays, err := f.post.Keys.Add(ctx, who, k, keyring.NewKey{Name: fmt.Sprint(i, j)})
					if err != nil {
						t.Error(err)
						return
					}
					goes, _, err := f.post.Keys.Add(ctx, who, k, keyring.NewKey{Scope: seal.Read})
					if err == nil {
						err = f.post.Keys.Revoke(ctx, who, "", goes.Credential, false)
					}
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					kept = append(kept, stays)
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		f.incoming(t, b, "one")
		for _, key := range append(kept, key) {
			f.reads(t, key, "", "one")
		}
		if n := f.count(t, `select count(*) from inbox_wrap w where not exists (select 1 from inbox_key k where k.inbox_id = w.inbox_id and k.credential_id = w.credential_id)`); n != 0 {
			t.Errorf("%d wrapped keys of nobody", n)
		}
		if n := f.count(t, `select epoch from inbox where id = $1`, b.ID); n != 13 {
			t.Errorf("epoch %d, want 13 after 12 revocations", n)
		}
	})
}

// TestAccount: an account opens what it made, and nothing else.
func TestAccount(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		other, _, _ := f.inbox(t, "other")
		f.incoming(t, other, "one")
		_, key, err := f.post.Keys.NewAccount(ctx, f.person, "lobster")
		if err != nil {
			t.Fatal(err)
		}
		who, err := auth.CheckKey(ctx, db, key)
		if err != nil {
			t.Fatal(err)
		}
		b, own, err := f.post.CreateInbox(ctx, who, directory.NewInbox{DisplayName: "Sarah Shield"}, key)
		if err != nil || b.Address != "sarah-shield@agents.test" {
			t.Fatalf("inbox = %+v, %v", b, err)
		}
		f.incoming(t, b, "two")
		f.reads(t, key, b.ID, "two")
		f.reads(t, own, "", "two")
		f.refused(t, key, other.ID, auth.ErrForbidden)
		if _, err := f.post.Delete(ctx, who, b.ID); err != nil {
			t.Errorf("an account deletes its inbox: %v", err)
		}
		if _, err := f.post.Undelete(ctx, who, b.ID); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("an account undeletes: %v", err)
		}
		if _, _, err := f.post.Keys.NewAccount(ctx, who, "another"); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("an account makes an account: %v", err)
		}
	})
}

// TestLoanEnds: a sandbox reads by a loan as long as the key that was lent
// lives, also over a new epoch, and never more than reads.
func TestLoanEnds(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, key := f.inbox(t, "analyst")
		_, k := f.show(t, key, "")
		part, lent := must(f.post.Keys.Grant(ctx, who, k, keyring.NewKey{Expires: time.Now().Add(time.Hour)}))(t)
		sandbox := auth.Principal{Kind: auth.Sandbox, ID: "sbx", Project: b.Project, Inbox: b.ID}
		if err := f.post.Keys.Lend(ctx, f.project, sandbox, lent); err != nil {
			t.Fatal(err)
		}
		other, _ := must(f.post.Keys.Add(ctx, who, k, keyring.NewKey{}))(t)
		if err := f.post.Keys.Revoke(ctx, who, "", other.Credential, false); err != nil { // a new epoch
			t.Fatal(err)
		}
		f.incoming(t, b, "one")
		lk, err := f.post.Keys.Lent(ctx, sandbox)
		if err != nil {
			t.Fatal(err)
		}
		if ms, err := f.post.Messages(ctx, sandbox, lk, 0); err != nil || len(ms) != 1 {
			t.Errorf("a loan reads %d, %v", len(ms), err)
		}
		if err := keyring.May(lk, seal.Propose); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a loan is more than reading: %v", err)
		}
		if _, _, err := f.post.Keys.Add(ctx, sandbox, lk, keyring.NewKey{}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a sandbox makes a key: %v", err)
		}
		if err := f.post.Keys.Revoke(ctx, f.person, b.ID, part.Credential, false); err != nil {
			t.Fatal(err)
		}
		if _, err := f.post.Keys.Lent(ctx, sandbox); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a loan outlives its key: %v", err)
		}
	})
}

// TestKeyIsShared: a search opens messages of several epochs with one key in many
// goroutines. The race detector looks on.
func TestKeyIsShared(t *testing.T) {
	ctx := t.Context()
	f := setup(t, storetest.SQLite(t))
	b, _, key := f.inbox(t, "analyst")
	who, k := f.show(t, key, "")
	p, _ := must(f.post.Keys.Add(ctx, who, k, keyring.NewKey{Scope: seal.Read}))(t)
	const each = 8
	for range each {
		f.incoming(t, b, "kohlrabi")
	}
	if err := f.post.Keys.Revoke(ctx, who, "", p.Credential, false); err != nil { // the next epoch begins
		t.Fatal(err)
	}
	for range each {
		f.incoming(t, b, "kohlrabi")
	}
	who, k = f.show(t, key, "")
	if got, err := f.post.Index.Search(ctx, who, k, mailbox.Search{Query: "subject:kohlrabi"}); err != nil || len(got.Messages) != 2*each {
		t.Errorf("found %d, %v; want %d", len(got.Messages), err, 2*each)
	}
}
