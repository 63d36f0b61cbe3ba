package signing_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/emersion/go-msgauth/dkim"
	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mailauth/dnstest"
	"postern/internal/signing"
	"postern/internal/store"
	"postern/internal/storetest"
)

// prepared returns a ring with the first keys of agents.test, and its owner.
func prepared(t *testing.T, db *store.DB, dns *dnstest.Server) (*signing.Ring, auth.Principal) {
	t.Helper()
	r := ring(t, db, dns)
	if err := r.Prepare(t.Context(), "agents.test"); err != nil {
		t.Fatal(err)
	}
	return r, person(t, db)
}

// execSQL is what somebody does who can write the database; tests also let time
// pass with it.
func execSQL(t *testing.T, db *store.DB, query string, args ...any) {
	t.Helper()
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), query, args...)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// byKind returns the published keys of a kind, newest first.
func byKind(t *testing.T, r *signing.Ring, kind signing.Kind) []signing.Key {
	t.Helper()
	ks, err := r.Keys(t.Context(), "agents.test")
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(ks, func(k signing.Key) bool { return k.Kind != kind })
}

// TestRolesManageKeys: a reviewer looks at what is published, an owner makes and
// removes keys, and a viewer does neither.
func TestRolesManageKeys(t *testing.T) {
	dns := dnstest.Start(t)
	r, who := prepared(t, storetest.SQLite(t), dns)
	for role, may := range map[auth.Role]struct{ rotate, check bool }{
		auth.Owner: {true, true}, auth.Reviewer: {false, true}, auth.Viewer: {false, false}, "": {false, false},
	} {
		who.Role = role
		_, rerr := r.Rotate(t.Context(), who, "agents.test")
		_, cerr := r.Check(t.Context(), who, "agents.test")
		derr := r.Remove(t.Context(), who, "agents.test", "missing")
		if may.rotate != (rerr == nil) || may.check != (cerr == nil) || may.rotate == errors.Is(derr, auth.ErrForbidden) {
			t.Errorf("a %q: rotates %v, checks %v, removes %v", role, rerr, cerr, derr)
		}
	}
}

// TestNextKeySignsAfterTheWait rotates without ever seeing a record: the former
// keys sign until the wait is over, then the next do, and the former stay
// published for mail that is under way.
func TestNextKeySignsAfterTheWait(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		r, who := prepared(t, db, dnstest.Start(t))
		first := byKind(t, r, signing.DKIMRSA)[0]
		if _, err := r.Rotate(t.Context(), who, "AGENTS.test"); err != nil {
			t.Fatal(err)
		}
		ks := byKind(t, r, signing.DKIMRSA)
		if len(ks) != 2 || ks[1].ID != first.ID || !ks[1].Until.Equal(ks[0].From) || !ks[0].Until.IsZero() {
			t.Fatalf("after the rotation: %+v", ks)
		}
		if wait := time.Until(ks[0].From); wait > 48*time.Hour || wait < 47*time.Hour {
			t.Errorf("the next key waits for %v, want 48 h", wait)
		}
		if wait := time.Until(byKind(t, r, signing.Statement)[0].From); wait > time.Hour || wait < 59*time.Minute {
			t.Errorf("the next statement key, which this server publishes, waits for %v, want an hour", wait)
		}
		selector := func() string {
			t.Helper()
			prefix, err := r.Sign(t.Context(), []byte(raw), about())
			if err != nil {
				t.Fatal(err)
			}
			_, rest, _ := strings.Cut(string(prefix), "a=rsa-sha256")
			_, rest, _ = strings.Cut(rest, "s=")
			s, _, _ := strings.Cut(rest, ";")
			return strings.TrimSpace(s)
		}
		if got := selector(); got != first.ID {
			t.Errorf("while the next key waits %s signs, want %s", got, first.ID)
		}
		execSQL(t, db, `update signing_key set use_from = $1 where use_from > $1`, store.Time(time.Now()))
		if got := selector(); got != ks[0].ID {
			t.Errorf("after the wait %s signs, want %s", got, ks[0].ID)
		}
		if _, _, err := r.PublicRecord(t.Context(), "agents.test", first.ID); err != nil {
			t.Errorf("the former key is not published any more: %v", err)
		}
	})
}

// TestRemovedKeyIsGone: its private half is not in the database any more, and
// what it signed as a statement before stays true until its removal.
func TestRemovedKeyIsGone(t *testing.T) {
	db := storetest.SQLite(t)
	r, who := prepared(t, db, dnstest.Start(t))
	if _, err := r.Rotate(t.Context(), who, "agents.test"); err != nil {
		t.Fatal(err)
	}
	ks := byKind(t, r, signing.Statement)
	if err := r.Remove(t.Context(), who, "agents.test", ks[0].ID); !errors.Is(err, signing.ErrInUse) {
		t.Errorf("removing a key that will sign: %v, want ErrInUse", err)
	}
	execSQL(t, db, `update signing_key set use_from = $1 where id = $2`, store.Time(time.Now()), ks[0].ID)
	if err := r.Remove(t.Context(), who, "elsewhere.test", ks[1].ID); !errors.Is(err, signing.ErrNotFound) {
		t.Errorf("removing another domain's: %v, want ErrNotFound", err)
	}
	if err := r.Remove(t.Context(), who, "agents.test", ks[1].ID); err != nil {
		t.Fatal(err)
	}
	if err := r.Remove(t.Context(), who, "agents.test", ks[1].ID); !errors.Is(err, signing.ErrNotFound) {
		t.Errorf("removing it twice: %v, want ErrNotFound", err)
	}
	err := db.View(t.Context(), func(tx *store.Tx) error {
		var private []byte
		err := tx.One(t.Context(), `select private from signing_key where id = $1`, []any{ks[1].ID}, &private)
		if len(private) != 0 {
			t.Error("the private half of a removed key is in the database")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	statements, err := r.StatementKeys(t.Context(), "agents.test")
	if err != nil || len(statements) != 2 || statements[1].ID != ks[1].ID || statements[1].Until.IsZero() || statements[1].Until.After(time.Now()) {
		t.Errorf("statement keys: %+v, %v; want the removed one with its end", statements, err)
	}
}

// TestOnlyThePublishedKeyBeginsToSign answers the check of new keys with what a
// hostile or a careless owner of the DNS publishes: none of it makes a key sign
// whose public half is not there.
func TestOnlyThePublishedKeyBeginsToSign(t *testing.T) {
	for name, tt := range map[string]struct {
		publish func(dns *dnstest.Server, next, former signing.Key)
		found   bool
		detail  string
	}{
		"nothing":         {func(*dnstest.Server, signing.Key, signing.Key) {}, false, "there is no TXT record"},
		"the former key":  {func(d *dnstest.Server, n, f signing.Key) { d.TXT(n.Name(), f.Record()) }, false, "another key"},
		"half of it":      {func(d *dnstest.Server, n, _ signing.Key) { d.TXT(n.Name(), n.Record()[:100]) }, false, "another key"},
		"a revoked key":   {func(d *dnstest.Server, n, _ signing.Key) { d.TXT(n.Name(), "v=DKIM1; k=rsa; p=") }, false, "another key"},
		"no DKIM record":  {func(d *dnstest.Server, n, _ signing.Key) { d.TXT(n.Name(), "hello\x00world; q=1") }, false, "another key"},
		"a broken server": {func(d *dnstest.Server, n, _ signing.Key) { d.Fail(n.Name(), true) }, false, "the DNS lookup failed"},
		"the key":         {func(d *dnstest.Server, n, _ signing.Key) { d.TXT(n.Name(), n.Record()) }, true, "published"},
		"it among others": {func(d *dnstest.Server, n, f signing.Key) { d.TXT(n.Name(), f.Record(), "x", n.Record()) }, true, "published"},
		"it with white space": {func(d *dnstest.Server, n, _ signing.Key) {
			d.TXT(n.Name(), strings.Replace(n.Record(), "; p=", ";p = ", 1)[:60]+" "+strings.Replace(n.Record(), "; p=", ";p = ", 1)[60:])
		}, true, "published"},
	} {
		t.Run(name, func(t *testing.T) {
			dns := dnstest.Start(t)
			r, who := prepared(t, storetest.SQLite(t), dns)
			if _, err := r.Rotate(t.Context(), who, "agents.test"); err != nil {
				t.Fatal(err)
			}
			ks := byKind(t, r, signing.DKIMRSA)
			tt.publish(dns, ks[0], ks[1])
			who.Role = auth.Reviewer
			ps, err := r.Check(t.Context(), who, "agents.test")
			if err != nil {
				t.Fatal(err)
			}
			i := slices.IndexFunc(ps, func(p signing.Published) bool { return p.ID == ks[0].ID })
			if i < 0 || ps[i].Found != tt.found || !strings.Contains(ps[i].Detail, tt.detail) {
				t.Errorf("check: %+v, want found %v, %q", ps, tt.found, tt.detail)
			}
			if got := byKind(t, r, signing.DKIMRSA)[0].InUse(time.Now()); got != tt.found {
				t.Errorf("the next key signs: %v, want %v", got, tt.found)
			}
		})
	}
}

// TestKeysAreBoundToTheirRow moves sealed private keys between the rows of one
// domain, and cuts one off.
func TestKeysAreBoundToTheirRow(t *testing.T) {
	for name, attack := range map[string]string{
		"the statement key signs mail": `update signing_key set private = (select private from signing_key o where o.kind = 'statement') where kind = 'dkim-ed25519'`,
		"a key is cut off":             `update signing_key set private = substr(private, 1, 20) where kind = 'dkim-rsa'`,
		"a key is empty":               `update signing_key set private = '' where kind = 'statement'`,
		"a key gets another name":      `update signing_key set id = 'p19990101e' where kind = 'dkim-ed25519'`,
	} {
		db := storetest.SQLite(t)
		r, _ := prepared(t, db, nil)
		execSQL(t, db, attack)
		if prefix, err := r.Sign(t.Context(), []byte(raw), about()); err == nil || !strings.Contains(err.Error(), "not sealed with this server's key") {
			t.Errorf("%s: %q, %v", name, prefix, err)
		}
	}
	if _, err := signing.New(storetest.SQLite(t), signing.Config{Key: serverKey[:31]}); err == nil {
		t.Error("a ring was made with a short key")
	}
}

// TestNoticesHaveNoStatement signs what this server wrote itself: two good
// signatures, and no statement that an agent wrote it.
func TestNoticesHaveNoStatement(t *testing.T) {
	dns := dnstest.Start(t)
	r, _ := prepared(t, storetest.SQLite(t), dns)
	publish(t, dns, r)
	prefix, err := r.SignOwn(t.Context(), "agents.test", []byte(raw))
	if err != nil {
		t.Fatalf("%q, %v", prefix, err)
	}
	vs, err := dkim.VerifyWithOptions(bytes.NewReader(append(prefix, raw...)), &dkim.VerifyOptions{
		LookupTXT: func(name string) ([]string, error) { return dns.Resolver().LookupTXT(t.Context(), name) },
	})
	if err != nil || len(vs) != 2 || vs[0].Err != nil || vs[1].Err != nil {
		t.Errorf("signatures: %+v, %v", vs, err)
	}
	for line := range strings.SplitSeq(string(prefix), "\r\n") {
		if strings.HasPrefix(line, "Postern-Statement:") {
			t.Errorf("a notice has a statement: %s", line)
		}
	}
	if _, err := r.SignOwn(t.Context(), "elsewhere.test", []byte(raw)); !errors.Is(err, signing.ErrNotFound) {
		t.Errorf("signing for another's domain: %v, want ErrNotFound", err)
	}
}

// TestCheckpointKeysAreOfNoDomain makes the key of the record at several servers
// at once, signs with it, rotates it, and checks both signatures; it is never a
// key of the mail domain.
func TestCheckpointKeysAreOfNoDomain(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		r, who := prepared(t, db, nil)
		name := signing.CheckpointName("Agents.TEST")
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if _, err := ring(t, db, nil).CheckpointSigner(t.Context(), name); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		sign := func() []byte {
			t.Helper()
			s, err := r.CheckpointSigner(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			b, err := note.Sign(&note.Note{Text: "a checkpoint\n"}, s)
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
		keys := func() []audit.Key {
			t.Helper()
			ks, err := r.CheckpointKeys(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			return ks
		}
		first := sign()
		if n := len(keys()); n != 1 {
			t.Fatalf("three servers made %d keys, want 1", n)
		}
		if _, err := r.Rotate(t.Context(), who, name); err != nil {
			t.Fatal(err)
		}
		execSQL(t, db, `update signing_key set use_from = $1 where use_from > $1`, store.Time(time.Now()))
		second := sign()
		ks := keys()
		if len(ks) != 2 || !ks[0].Until.IsZero() || ks[1].Until.IsZero() {
			t.Fatalf("after the rotation: %+v", ks)
		}
		for i, tt := range []struct {
			signed []byte
			key    audit.Key
		}{{first, ks[1]}, {second, ks[0]}} {
			v, err := note.NewVerifier(tt.key.VKey)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := note.Open(tt.signed, note.VerifierList(v)); err != nil {
				t.Errorf("checkpoint %d: %v", i, err)
			}
			other, err := note.NewVerifier(ks[i].VKey)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := note.Open(tt.signed, note.VerifierList(other)); err == nil {
				t.Errorf("checkpoint %d is signed with the other key, too", i)
			}
		}
		if n := len(byKind(t, r, signing.Checkpoint)); n != 0 {
			t.Errorf("the mail domain has %d keys of the record", n)
		}
		if err := db.View(t.Context(), func(tx *store.Tx) error {
			all, err := signing.CheckpointKeys(t.Context(), tx, "")
			if len(all) != 2 {
				t.Errorf("%d keys in all records, want 2", len(all))
			}
			return err
		}); err != nil {
			t.Error(err)
		}
	})
}
