package main

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/signing"
	"postern/internal/store"
)

// A once counts what it executes.
type once struct{ ran int }

// Execute implements [oversight.Executor].
func (o *once) Execute(context.Context, oversight.Action) oversight.Outcome {
	o.ran++
	return oversight.Outcome{State: oversight.Done}
}

// Show implements [oversight.Executor].
func (*once) Show(oversight.Action) (oversight.View, error) { return oversight.View{}, nil }

// starting returns as much of a server on the data in dir as deals with its record.
func starting(t *testing.T, dir string, accept bool, x *once) *daemon {
	t.Helper()
	d := &daemon{log: slog.New(slog.NewTextHandler(t.Output(), nil)), conf: Config{}}
	d.conf.Data, d.conf.MailDomain, d.conf.AcceptRollback = dir, "agents.test", accept
	d.conf.CheckpointEvery = 1000
	key, err := serverKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	if d.db, err = store.Open(t.Context(), d.conf.source(), ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.db.Close() })
	if err := d.db.UseKey(key); err != nil {
		t.Fatal(err)
	}
	if d.ring, err = signing.New(d.db, signing.Config{Key: key}); err != nil {
		t.Fatal(err)
	}
	name := signing.CheckpointName(d.conf.MailDomain)
	d.record, err = audit.NewKeeper(d.log, d.db, audit.KeeperConfig{
		Signer: func(ctx context.Context) (note.Signer, error) { return d.ring.CheckpointSigner(ctx, name) }, Memory: filepath.Join(dir, memory),
	})
	if err != nil {
		t.Fatal(err)
	}
	d.sequencer = audit.NewSequencer(d.log, d.db)
	d.gate = oversight.NewGate(d.log, d.db, oversighttest.Rules{})
	d.gate.Handle("test", x)
	d.permits = permit.New(d.log, d.db, d.gate, permit.Config{})
	return d
}

// keeps starts d: database and directory are one another's afterwards.
func (d *daemon) keeps(t *testing.T) {
	t.Helper()
	if err := d.checkRecord(t.Context()); err != nil {
		t.Fatal(err)
	}
	h, err := d.lineage.Keep(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// approved has an agent propose an action, and a person of its project approve it.
func (d *daemon) approved(t *testing.T) (person auth.Principal, a oversight.Action) {
	t.Helper()
	ctx := t.Context()
	person = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err := d.db.Update(ctx, func(tx *store.Tx) (err error) {
		if person.Project, _, err = auth.NewProject(ctx, tx, "p"); err != nil {
			return err
		}
		agent := auth.Principal{Kind: auth.Agent, ID: "crd_1", Project: person.Project, Inbox: "i"}
		a, err = d.gate.Propose(ctx, tx, agent, oversight.Proposal{Request: policy.Request{Kind: "test"}, Inbox: "i", Payload: []byte("once")})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.gate.Decide(ctx, person, oversight.Decision{ID: a.ID, Version: 1, Digest: a.Hex(), Approve: true}); err != nil {
		t.Fatal(err)
	}
	return person, a
}

// TestCopiesAskAgain puts a copy of the database in which an action is approved, which the
// original has executed, in places where no newer checkpoint is.
func TestCopiesAskAgain(t *testing.T) {
	for _, tt := range []struct {
		name  string
		place func(t *testing.T, data, backup string) (dir string)
		want  oversight.State
	}{
		{"a backup in a new directory", func(t *testing.T, data, backup string) string {
			dir := t.TempDir()
			sh(t, "cp", backup, filepath.Join(dir, "postern.db"))
			sh(t, "cp", "-a", filepath.Join(data, "server.key"), filepath.Join(data, "blobs"), filepath.Join(data, "artifacts"), filepath.Join(data, "runs"), dir)
			return dir
		}, oversight.Pending},
		{"a backup in the directory it is from", func(t *testing.T, data, backup string) string {
			sh(t, "sh", "-c", "rm -f "+data+"/postern.db-* && cat "+backup+" > "+data+"/postern.db")
			return data
		}, oversight.Pending},
		{"a copied directory", func(t *testing.T, data, _ string) string {
			dir := filepath.Join(t.TempDir(), "data")
			sh(t, "cp", "-a", data, dir)
			return dir
		}, oversight.Pending},
		{"the original", func(_ *testing.T, data, _ string) string { return data }, oversight.Approved},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, data, x := t.Context(), t.TempDir(), &once{}
			d := starting(t, data, false, x)
			d.keeps(t)
			person, a := d.approved(t)
			backup := filepath.Join(t.TempDir(), "copy.db")
			var out, errs bytes.Buffer
			if code := run(ctx, []string{"backup", "--data", data, backup}, &out, &errs); code != 0 {
				t.Fatalf("backup: %s%s", &out, &errs)
			}
			if err := d.db.Close(); err != nil {
				t.Fatal(err)
			}
			e := starting(t, tt.place(t, data, backup), false, x)
			e.keeps(t)
			got, err := e.gate.Action(ctx, person, a.ID)
			if err != nil || got.State != tt.want {
				t.Errorf("the action is %s, want %s; note %q, %v", got.State, tt.want, got.Note, err)
			}
			if _, err := e.gate.RunOne(ctx); err != nil || (x.ran == 0) != (tt.want == oversight.Pending) {
				t.Errorf("executed %d times, %v", x.ran, err)
			}
			if tt.want == oversight.Approved {
				return
			}
			if !e.gate.Voided(&oversight.Action{Settled: time.Now().Add(-time.Minute)}) {
				t.Error("an approval that is used later still counts")
			}
			// A person says so, and it is executed.
			if err := e.gate.Decide(ctx, person, oversight.Decision{ID: a.ID, Version: got.Version, Digest: got.Hex(), Approve: true}); err != nil {
				t.Fatal(err)
			}
			if _, err := e.gate.RunOne(ctx); err != nil || x.ran != 1 {
				t.Errorf("executed %d times after a person said so, %v", x.ran, err)
			}
			if err := e.db.Close(); err != nil {
				t.Fatal(err)
			}
			next := starting(t, e.conf.Data, false, x)
			next.keeps(t)
			if next.lineage.Copy() != "" || !next.gate.Voided(&oversight.Action{Settled: time.Now().Add(-time.Minute)}) {
				t.Errorf("the next start: a copy %q; or earlier approvals count again", next.lineage.Copy())
			}
		})
	}
}

// sh runs a command.
func sh(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}

// TestRollback puts an older copy of the database in its place, in which what has
// been sent since is approved still.
func TestRollback(t *testing.T) {
	ctx, dir, x := t.Context(), t.TempDir(), &once{}
	d := starting(t, dir, false, x)
	if err := d.checkRecord(ctx); err != nil {
		t.Fatalf("the first start: %v", err)
	}
	person, a := d.approved(t)
	old := filepath.Join(t.TempDir(), "old.db")
	if err := d.db.Backup(ctx, old); err != nil {
		t.Fatal(err)
	}
	if _, err := d.gate.RunOne(ctx); err != nil || x.ran != 1 {
		t.Fatalf("ran %d, %v", x.ran, err)
	}
	if _, err := d.record.Make(ctx); err != nil {
		t.Fatal(err)
	}
	verify := func() (int, string) {
		var out, errs bytes.Buffer
		code := run(ctx, []string{"audit", "verify", "--data", dir}, &out, &errs)
		return code, out.String() + errs.String()
	}
	if code, out := verify(); code != 0 || !strings.Contains(out, "person's approval") {
		t.Fatalf("verify as it is: %d\n%s", code, out)
	}
	if err := starting(t, dir, false, x).checkRecord(ctx); err != nil {
		t.Fatalf("a start as it is: %v", err)
	}
	if err := d.db.Close(); err != nil {
		t.Fatal(err)
	}
	for _, end := range []string{"", "-wal", "-shm"} {
		if err := os.RemoveAll(filepath.Join(dir, "postern.db"+end)); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(old)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "postern.db"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out := verify(); code == 0 || !strings.Contains(out, memory) {
		t.Errorf("verify of an older copy: %d\n%s", code, out)
	}
	err = starting(t, dir, false, x).checkRecord(ctx)
	if err == nil || !strings.Contains(err.Error(), "--accept-rollback") {
		t.Fatalf("a start on an older copy: %v", err)
	}
	e := starting(t, dir, true, x)
	if err := e.checkRecord(ctx); err != nil {
		t.Fatalf("a start on an older copy that is accepted: %v", err)
	}
	for range 3 {
		if _, err := e.gate.RunOne(ctx); err != nil {
			t.Fatal(err)
		}
	}
	got, err := e.gate.Action(ctx, person, a.ID)
	if err != nil || x.ran != 1 || got.State != oversight.Pending || !strings.Contains(got.Note, "older copy") {
		t.Errorf("what had been sent: %s, note %q, ran %d, %v", got.State, got.Note, x.ran, err)
	}
	if _, err := e.record.Make(ctx); err != nil {
		t.Errorf("the next checkpoint: %v", err)
	}
	if kept, err := filepath.Glob(filepath.Join(dir, memory+".replaced-*")); err != nil || len(kept) != 1 {
		t.Errorf("kept of what was signed before: %v, %v", kept, err)
	}
	if err := starting(t, dir, false, x).checkRecord(ctx); err != nil {
		t.Errorf("the next start: %v", err)
	}
	if code, out := verify(); code != 0 {
		t.Errorf("verify afterwards: %d\n%s", code, out)
	}
}

// TestAnotherServersKey starts on a database that another server has sealed.
func TestAnotherServersKey(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	d := starting(t, dir, false, &once{})
	if _, err := d.record.Make(ctx); err != nil { // which makes the record's first entry, of its key
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "server.key")); err != nil {
		t.Fatal(err)
	}
	if err := starting(t, dir, false, &once{}).checkRecord(ctx); err == nil || !strings.Contains(err.Error(), "server.key") {
		t.Errorf("with another key: %v", err)
	}
}
