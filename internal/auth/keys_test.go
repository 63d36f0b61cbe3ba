package auth_test

import (
	"errors"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestKeysEnd shows each kind of key before and after its end, by time and by
// revocation.
func TestKeysEnd(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := newFixture(t, db)
		refused := func(what string, key auth.Secret) {
			t.Helper()
			if p, err := auth.CheckKey(f.ctx, db, key); !errors.Is(err, auth.ErrUnauthenticated) || p != (auth.Principal{}) {
				t.Errorf("%s: %+v, %v; want ErrUnauthenticated and nobody", what, p, err)
			}
		}
		for _, kind := range []auth.Kind{auth.Agent, auth.Grant, auth.Recovery} {
			var id string
			var key, other, past auth.Secret
			f.update(func(tx *store.Tx) (err error) {
				c := auth.Credential{Project: f.project, Kind: kind, Inbox: "ibx_1", Expires: time.Now().Add(time.Hour)}
				if id, key, err = auth.NewCredential(f.ctx, tx, c); err != nil {
					return err
				}
				if _, other, err = auth.NewCredential(f.ctx, tx, c); err != nil {
					return err
				}
				c.Expires = time.Now().Add(-time.Microsecond)
				_, past, err = auth.NewCredential(f.ctx, tx, c)
				return err
			})
			p, err := auth.CheckKey(f.ctx, db, key)
			if err != nil || p.Kind != kind || p.ID != id || p.Project != f.project || p.Inbox != "ibx_1" || p.Role != "" {
				t.Errorf("a %s: %+v, %v", kind, p, err)
			}
			refused("a key that has expired", past)
			refused("a key in other letters", "P"+key[1:])
			refused("a key and more", key+"A")
			refused("the digest of a key", auth.Secret(key.Digest()))
			f.update(func(tx *store.Tx) error { return errors.Join(auth.Revoke(f.ctx, tx, id), auth.Revoke(f.ctx, tx, id)) })
			refused("a revoked key", key)
			if _, err := auth.CheckKey(f.ctx, db, other); err != nil {
				t.Errorf("another key of the same inbox ends with the revoked one: %v", err)
			}
		}
	})
}

// TestPeopleAndSandboxesHaveNoKeys: what proves a person or a sandbox is not a
// key, and none can be made for one.
func TestPeopleAndSandboxesHaveNoKeys(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	for _, kind := range []auth.Kind{auth.Project, auth.Person, auth.Sandbox, auth.System} {
		err := f.db.Update(f.ctx, func(tx *store.Tx) error {
			_, key, err := auth.NewCredential(f.ctx, tx, auth.Credential{Project: f.project, Kind: kind})
			if key != "" {
				t.Errorf("a %s has got a key", kind)
			}
			return err
		})
		if !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a key for a %s: %v, want ErrForbidden", kind, err)
		}
	}
}

// TestListShowsLiveKeysWithoutSecrets: ended keys and those of single inboxes
// are not in a project's list, nor are another project's.
func TestListShowsLiveKeysWithoutSecrets(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	var ended string
	f.update(func(tx *store.Tx) error {
		_, _, err := auth.NewKeyOf(f.ctx, tx, f.project, "ci", "person:ann")
		if err == nil {
			ended, _, err = auth.NewKeyOf(f.ctx, tx, f.project, "old ci", "person:ann")
		}
		if err == nil {
			_, _, err = auth.NewCredential(f.ctx, tx, auth.Credential{Project: f.project, Kind: auth.Grant, Name: "orchestrator", Account: true})
		}
		if err == nil {
			_, _, err = auth.NewCredential(f.ctx, tx, auth.Credential{Project: f.project, Kind: auth.Grant, Name: "expired", Expires: time.Now().Add(-time.Second)})
		}
		if err == nil {
			_, _, err = auth.NewCredential(f.ctx, tx, auth.Credential{Project: f.project, Kind: auth.Agent, Inbox: "ibx_1"})
		}
		if err == nil {
			_, _, err = auth.NewProject(f.ctx, tx, "another")
		}
		return errors.Join(err, auth.Revoke(f.ctx, tx, ended))
	})
	var got []auth.Credential
	f.update(func(tx *store.Tx) (err error) {
		got, err = auth.KeysOf(f.ctx, tx, f.project)
		return err
	})
	var names []string
	for _, c := range got {
		names = append(names, c.Name)
		if c.Project != f.project || c.ID == ended || !c.Used.IsZero() || c.Created.IsZero() {
			t.Errorf("listed: %+v", c)
		}
	}
	if len(names) != 3 || names[0] != "" || names[1] != "ci" || names[2] != "orchestrator" || !got[2].Account || got[1].CreatedBy != "person:ann" {
		t.Errorf("listed %q: %+v", names, got)
	}
}

// TestUseOfAKeyIsRecordedNowAndThen: a reader must not become a writer at each
// request, and a key that is in use must not look abandoned.
func TestUseOfAKeyIsRecordedNowAndThen(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	check := func() int {
		t.Helper()
		if _, err := auth.CheckKey(f.ctx, f.db, f.key); err != nil {
			t.Fatal(err)
		}
		return f.count(`select used_at from credential`)
	}
	first := check()
	if first == 0 {
		t.Fatal("the first use is not recorded")
	}
	if second := check(); second != first {
		t.Errorf("a second use moments later is recorded: %d, %d", first, second)
	}
	f.exec(`update credential set used_at = $1`, store.Time(time.Now().Add(-11*time.Minute)))
	if later := check(); later < first {
		t.Errorf("a use after eleven minutes is not recorded: %d, want %d or later", later, first)
	}
}
