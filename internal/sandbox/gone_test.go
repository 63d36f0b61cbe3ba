package sandbox_test

import (
	"os"
	"path/filepath"
	"testing"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/storetest"
)

// TestGoneFindsWhatTheFleetLeaves: Gone finds each trace that a faulty removal would leave
// behind, and finds none without such a fault.
func TestGoneFindsWhatTheFleetLeaves(t *testing.T) {
	k := &keeper{kept: map[string]bool{}}
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) { c.Keeper = k })
	ctx := t.Context()
	s := f.create(sandbox.Request{})
	there := func() map[string]bool {
		out := map[string]bool{}
		for _, tr := range f.fleet.Gone(ctx, s) {
			if !tr.Gone {
				out[tr.What] = true
			}
		}
		delete(out, "processes") // the fake runtime cannot search for them
		return out
	}
	alive := there()
	for _, what := range []string{"list of the runtime", "link", "guest", "ports and tokens", "keeper", "row"} {
		if !alive[what] {
			t.Errorf("%s of a running sandbox: not found", what)
		}
	}
	if err := f.fleet.Kill(ctx, f.who, s.ID); err != nil {
		t.Fatal(err)
	}
	if left := there(); len(left) > 0 {
		t.Fatalf("found of a removed sandbox: %v", left)
	}
	for what, fault := range map[string]struct{ plant, undo func() error }{
		"link": {func() error {
			file, err := f.link.Attach(ctx, auth.Principal{Kind: auth.Sandbox, ID: s.ID}, policy.Egress{})
			if err == nil {
				err = file.Close()
			}
			return err
		}, func() error { f.link.Detach(s.ID); return nil }},
		"keeper":              {func() error { return k.Put(ctx, s.ID, nil) }, func() error { k.Drop(s.ID); return nil }},
		"snapshots":           {func() error { return os.Mkdir(filepath.Join(f.conf.Dir, "t-x-"+s.ID), 0o700) }, func() error { return os.Remove(filepath.Join(f.conf.Dir, "t-x-"+s.ID)) }},
		"list of the runtime": {func() error { return f.runtime.Start(ctx, sandbox.Spec{ID: s.ID, Rootfs: "/"}) }, func() error { return f.runtime.Stop(ctx, s.ID) }},
	} {
		t.Run(what, func(t *testing.T) {
			if err := fault.plant(); err != nil {
				t.Fatal(err)
			}
			left := there()
			if !left[what] {
				t.Errorf("not found; found %v", left)
			}
			if what == "link" && !left["guest"] {
				t.Error("a guest that answers was not found")
			}
			if err := fault.undo(); err != nil {
				t.Fatal(err)
			}
			if left := there(); len(left) > 0 {
				t.Errorf("after the fault was undone: found %v", left)
			}
		})
	}
}
