package sandbox_test

import (
	"errors"
	"net"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestOtherServersSandboxesAreKept: a fleet neither sees nor changes the sandboxes
// of another server on the database, also in Recover, and does not count them.
func TestOtherServersSandboxesAreKept(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		one := setup(t, db, func(c *sandbox.Config) { c.Server, c.MaxSandboxes, c.Snapshots = "srv_one", 1, true })
		s := one.create(sandbox.Request{})
		named, err := one.fleet.Snapshot(t.Context(), one.who, s.ID, "kept")
		if err != nil {
			t.Fatal(err)
		}

		// Another machine: of the first one's sandboxes there is nothing on it.
		other := &fixture{
			t: t, db: db, runtime: &sandboxtest.Fake{}, conf: sandboxtest.Config(t), who: one.who,
			link: &link{attached: map[string]net.Listener{}, inits: map[string]initRequest{}, owners: map[string]auth.Principal{}},
		}
		other.conf.Server, other.conf.MaxSandboxes, other.conf.Snapshots = "srv_two", 1, true
		other.open()
		if err := other.fleet.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if list, err := other.fleet.List(t.Context(), one.who, true); err != nil || len(list) != 0 {
			t.Errorf("the other lists %v, %v", list, err)
		}
		if list, err := other.fleet.Snapshots(t.Context(), one.who); err != nil || len(list) != 0 {
			t.Errorf("the other lists snapshots %v, %v", list, err)
		}
		if err := other.fleet.Kill(t.Context(), one.who, s.ID); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("the other kills it: %v", err)
		}
		other.create(sandbox.Request{}) // the one that the first has does not count here

		if got, err := one.fleet.Get(t.Context(), one.who, s.ID); err != nil || got.State != sandbox.Running {
			t.Errorf("got %+v, %v, want it to run on", got, err)
		}
		if _, err := one.fleet.FindSnapshot(t.Context(), one.who, named.ID); err != nil {
			t.Errorf("its snapshot: %v", err)
		}
	})
}

// TestFirstServerOwnsOldRows: rows from before there were server IDs belong to the
// first server.
func TestFirstServerOwnsOldRows(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		s := f.create(sandbox.Request{})
		h, err := sandbox.Own(t.Context(), db, "srv_one", "the one on a with --data /x")
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close(t.Context())
		f.conf.Server = "srv_one"
		f.open()
		if _, err := f.fleet.Get(t.Context(), f.who, s.ID); err != nil {
			t.Errorf("a row of before: %v", err)
		}
	})
}

// TestSecondServerIsRefused: a second server gets an error that names the first,
// and takes over when the first has ended.
func TestSecondServerIsRefused(t *testing.T) {
	url := storetest.PostgresURL(t)
	if url == "" {
		t.Logf("%s is not set: not run; a SQLite database is one server's", storetest.PostgresVar)
		return
	}
	var dbs []*store.DB
	for range 2 {
		db, err := store.Open(t.Context(), url, "")
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		dbs = append(dbs, db)
	}
	h, err := sandbox.Own(t.Context(), dbs[0], "srv_one", "the one on a with --data /x")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sandbox.Own(t.Context(), dbs[1], "srv_two", "y"); !errors.Is(err, sandbox.ErrOwned) || !strings.Contains(err.Error(), "--data /x") {
		t.Errorf("owned twice: %v", err)
	}
	if err := h.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if h, err = sandbox.Own(t.Context(), dbs[1], "srv_two", "y"); err != nil {
		t.Fatal(err)
	}
	if err := h.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}
