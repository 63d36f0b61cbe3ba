package run

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// hostileFiles are the files of a sandbox whose code changes them at every opportunity.
type hostileFiles struct {
	files map[string][]byte
	sizes map[string]int64 // that the listing claims; by default the true ones
	err   error            // of the listing
	opens map[string]int
	later func(path string, n int) []byte // contents of a file when it is opened for the nth time; nil means no change
	extra []sandbox.FileInfo
}

func (h *hostileFiles) ListFiles(context.Context, string, []string, int) (out []sandbox.FileInfo, err error) {
	if h.err != nil {
		return nil, h.err
	}
	for p, data := range h.files {
		size := int64(len(data))
		if s, ok := h.sizes[p]; ok {
			size = s
		}
		out = append(out, sandbox.FileInfo{Path: p, Size: size})
	}
	return append(out, h.extra...), nil
}

func (h *hostileFiles) OpenFile(_ context.Context, _, path string, _ int64) (io.ReadCloser, error) {
	data, ok := h.files[path]
	if !ok {
		return nil, sandbox.ErrNotFound
	}
	if h.opens == nil {
		h.opens = map[string]int{}
	}
	h.opens[path]++
	if h.later != nil {
		data = h.later(path, h.opens[path])
	}
	return io.NopCloser(bytes.NewReader(data)), nil
}

type exportFixture struct {
	t     *testing.T
	db    *store.DB
	gate  *oversight.Gate
	x     *Exports
	files *hostileFiles
	dir   string
	owner auth.Principal
}

func setupExports(t *testing.T, db *store.DB) *exportFixture {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	f := &exportFixture{t: t, db: db, files: &hostileFiles{files: map[string][]byte{}}, dir: t.TempDir()}
	book := rulebook.New(log, db)
	f.gate = oversight.NewGate(log, db, book)
	blobs, err := store.OpenBlobs(f.dir)
	if err != nil {
		t.Fatal(err)
	}
	if f.x, err = NewExports(log, db, f.gate, f.files, blobs, bytes.Repeat([]byte{7}, 32)); err != nil {
		t.Fatal(err)
	}
	f.gate.Handle(policy.KindExport, f.x)
	f.gate.Handle(policy.KindChange, book)
	f.owner = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err = db.Update(t.Context(), func(tx *store.Tx) (err error) {
		f.owner.Project, _, err = auth.NewProject(t.Context(), tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// run returns a run whose contract has these artifacts.
func (f *exportFixture) run(id string, artifacts ...contract.Artifact) Run {
	c := &contract.Contract{Version: 1, Name: "report", Artifacts: artifacts}
	c.Files.Write = []string{"/out"}
	return Run{ID: id, Project: f.owner.Project, Sandbox: "ibox" + id[4:], Contract: c, ContractDigest: "sha256:" + strings.Repeat("a", 64), State: Collecting, Created: time.Now()}
}

// ended inserts the row of a run that has ended, which rules wait for.
func (f *exportFixture) ended(id string, o Outcome) {
	f.t.Helper()
	err := f.db.Update(f.t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(f.t.Context(), `insert into run (id, project_id, proposer, inbox_id, via, state, outcome, refused, reason, contract_name, contract, contract_text, contract_digest, boundary_digest, task, commands, inputs, answers,
			scope, action_id, approved, payload, sandbox_id, template, created_at, begun_at, started_at, ended_at, kept_until, cancelled_by, version, events, results, evidence)
			values ($1, $2, '', '', '', $3, $4, '', '', '', '', '', '', '', '', '', '', '', '', '', '', '', '', '', 0, 0, 0, 0, 0, '', 1, 0, '', '')`, id, f.owner.Project, Ended, o)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *exportFixture) list(id string) []api.RunArtifact {
	f.t.Helper()
	l, err := f.x.List(f.t.Context(), f.owner, id)
	if err != nil {
		f.t.Fatal(err)
	}
	return l.Artifacts
}

func (f *exportFixture) decide(a api.RunArtifact, approve bool) error {
	f.t.Helper()
	act, err := f.gate.Action(f.t.Context(), f.owner, a.Action)
	if err != nil {
		f.t.Fatal(err)
	}
	if err := f.gate.Decide(f.t.Context(), f.owner, oversight.Decision{ID: act.ID, Version: act.Version, Digest: act.Hex(), Approve: approve, Reason: "so be it"}); err != nil {
		return err
	}
	_, err = f.gate.RunOne(f.t.Context())
	return err
}

func (f *exportFixture) blobs() (n int) {
	f.t.Helper()
	err := filepath.WalkDir(f.dir, func(_ string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			n++
		}
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return n
}

func TestArtifactsLeaveAsTheyWereApproved(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setupExports(t, db)
		// The code keeps writing: the file is different each time it is opened.
		f.files.files["/out/report.csv"] = []byte("id,name\n1,Anna\n")
		f.files.later = func(_ string, n int) []byte { return fmt.Appendf(nil, "id,name\n%d,Anna\n", n) }
		r := f.run("run_1", contract.Artifact{Path: "/out/*.csv", Type: "csv", Required: true})
		if err := f.x.Collect(t.Context(), r, Evidence{}); err != nil {
			t.Fatal(err)
		}
		if err := f.x.Collect(t.Context(), r, Evidence{}); err != nil { // once more, as after a crash
			t.Fatal(err)
		}
		list := f.list(r.ID)
		if len(list) != 1 || list[0].State != api.ArtifactWaiting || list[0].Action == "" {
			t.Fatalf("listed %+v", list)
		}
		a := list[0]
		if _, _, err := f.x.Open(t.Context(), f.owner, r.ID, 1); !errors.Is(err, ErrNotReleased) {
			t.Errorf("before the decision: %v", err)
		}
		act, err := f.gate.Action(t.Context(), f.owner, a.Action)
		if err != nil {
			t.Fatal(err)
		}
		v, err := f.gate.Show(act)
		if err != nil || !strings.Contains(v.Text, "Anna") || len(v.Files) != 1 || v.Files[0].SHA256 != a.SHA256 {
			t.Fatalf("shown %+v, %v", v, err)
		}
		_, seen, err := f.gate.File(t.Context(), f.owner, a.Action, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.decide(a, true); err != nil {
			t.Fatal(err)
		}
		got, data, err := f.x.Open(t.Context(), f.owner, r.ID, 1)
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(data)
		if !bytes.Equal(seen, data) || hex.EncodeToString(sum[:]) != a.SHA256 || got.State != api.ArtifactReleased || got.Decider != "person:ann" {
			t.Errorf("released %q as %+v, and %q was shown", data, got, seen)
		}
		if f.files.opens["/out/report.csv"] != 1 {
			t.Errorf("the file was read %d times", f.files.opens["/out/report.csv"])
		}
		// Another project cannot download it.
		other := f.owner
		other.Project = "prj_other"
		if _, _, err := f.x.Open(t.Context(), other, r.ID, 1); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("another project: %v", err)
		}
	})
}

func TestRejectedArtifactsAreRemoved(t *testing.T) {
	f := setupExports(t, storetest.SQLite(t))
	f.files.files["/out/a.csv"] = []byte("a\n1\n")
	f.files.files["/out/b.csv"] = []byte("a\n2\n")
	r := f.run("run_1", contract.Artifact{Path: "/out/*.csv", Type: "csv"})
	if err := f.x.Collect(t.Context(), r, Evidence{}); err != nil {
		t.Fatal(err)
	}
	if n := f.blobs(); n != 2 {
		t.Fatalf("%d blobs, want 2", n)
	}
	list := f.list(r.ID)
	if err := f.decide(list[0], false); err != nil {
		t.Fatal(err)
	}
	if err := f.decide(list[1], true); err != nil {
		t.Fatal(err)
	}
	list = f.list(r.ID)
	if list[0].State != api.ArtifactRejected || list[1].State != api.ArtifactReleased || f.blobs() != 1 {
		t.Errorf("%s and %s, %d blobs", list[0].State, list[1].State, f.blobs())
	}
	if _, _, err := f.x.Open(t.Context(), f.owner, r.ID, 1); !errors.Is(err, ErrNotReleased) {
		t.Errorf("a rejected one: %v", err)
	}
	// A blob without a row is removed, others are not.
	if err := f.x.blobs.Put("art_STRAY", []byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := f.x.Clean(t.Context(), time.Now().Add(2*sweepAge)); err != nil || f.blobs() != 1 {
		t.Errorf("after the sweep: %d blobs, %v", f.blobs(), err)
	}
	// When its time is over, the released one is removed as well.
	if err := f.x.Clean(t.Context(), time.Now().Add(KeepReleased+time.Hour)); err != nil || f.blobs() != 0 {
		t.Errorf("after its time: %d blobs, %v", f.blobs(), err)
	}
	if list = f.list(r.ID); list[1].State != api.ArtifactRemoved {
		t.Errorf("after its time it is %s", list[1].State)
	}
}

func TestUnpromisedFilesNeverLeave(t *testing.T) {
	f := setupExports(t, storetest.SQLite(t))
	long := "/out/" + strings.Repeat("x", 4000) + ".csv"
	f.files.files = map[string][]byte{
		"/out/program.csv": []byte("\x7fELF\x02\x01\x01"),
		"/out/big.csv":     bytes.Repeat([]byte("a,b\n"), 1000),
		"/out/ok.csv":      []byte("a,b\n1,2\n"),
		"/out/a\nb.csv":    []byte("a,b\n1,2\n"),
		long:               []byte("a,b\n"),
		"/etc/passwd":      []byte("root:x:0:0\n"), // the guest lists a file that the contract does not name
	}
	f.files.sizes = map[string]int64{"/out/big.csv": 3, "/out/ok.csv": 1 << 60} // the sizes of a listing are claims
	r := f.run("run_1", contract.Artifact{Path: "/out/*.csv", Type: "csv", Size: 100}, contract.Artifact{Path: "/out/must.json", Type: "json", Required: true})
	if err := f.x.Collect(t.Context(), r, Evidence{}); !errors.Is(err, ErrRunFailed) || !strings.Contains(err.Error(), "/out/must.json") {
		t.Errorf("a required artifact is missing: %v", err)
	}
	if err := f.x.Collect(t.Context(), r, Evidence{}); !errors.Is(err, ErrRunFailed) {
		t.Errorf("the second time: %v", err)
	}
	states := map[string]string{}
	for _, a := range f.list(r.ID) {
		states[a.Name] = a.State
		if strings.ContainsAny(a.Path, "\n") || len(a.Path) > 300 || a.State == api.ArtifactRefused && (a.Action != "" || a.Reason == "") {
			t.Errorf("listed %+v", a)
		}
		if a.Name == "ok.csv" && a.Size != 8 {
			t.Errorf("its size is %d", a.Size)
		}
	}
	if len(states) != 5 || states["program.csv"] != api.ArtifactRefused || states["big.csv"] != api.ArtifactRefused || states["ok.csv"] != api.ArtifactWaiting || states["a_b.csv"] != api.ArtifactWaiting {
		t.Errorf("states %v", states)
	}
	if f.blobs() != 2 {
		t.Errorf("%d blobs, want 2", f.blobs())
	}

	// Nothing leaves if there are too many files, or if the guest does not answer.
	for i, err := range []error{fmt.Errorf("list: %w", sandbox.ErrFull), errors.New("the guest is gone")} {
		f.files.err = err
		r := f.run(fmt.Sprintf("run_%d", 10+i), contract.Artifact{Path: "/out/*.csv", Type: "csv", Required: true})
		if err := f.x.Collect(t.Context(), r, Evidence{}); !errors.Is(err, ErrRunFailed) {
			t.Errorf("%v: %v", f.files.err, err)
		}
		l, err := f.x.List(t.Context(), f.owner, r.ID)
		if err != nil || len(l.Artifacts) != 0 || l.Why == "" || !l.Collected || !slices.Equal(l.Missing, []string{"/out/*.csv"}) {
			t.Errorf("%v: listed %+v, %v", f.files.err, l, err)
		}
	}
	f.files.err, f.files.extra = nil, make([]sandbox.FileInfo, maxArtifacts+1)
	if err := f.x.Collect(t.Context(), f.run("run_20", contract.Artifact{Path: "/out/*.csv", Type: "csv", Required: true}), Evidence{}); !errors.Is(err, ErrRunFailed) {
		t.Errorf("a listing beyond its limit: %v", err)
	}
}

func TestReviewDecidesWhoReleasesArtifacts(t *testing.T) {
	f := setupExports(t, storetest.SQLite(t))
	clean, found := []byte("a,b\n1,2\n"), []byte("PATH,/usr/bin\nHOME,/home/user\nUSER,user\n")
	for i, tt := range []struct {
		name, review string
		data         []byte
		e            Evidence
		outcome      Outcome
		want         string
	}{
		{"by a person", "person", clean, Evidence{}, Succeeded, api.ArtifactWaiting},
		{"by a person, as the default", "", clean, Evidence{}, Succeeded, api.ArtifactWaiting},
		{"by policy, which asks", "policy", clean, Evidence{}, Succeeded, api.ArtifactWaiting},
		{"by the scan, which found nothing", "flagged", clean, Evidence{}, Succeeded, api.ArtifactReleased},
		{"by the scan, which found an environment", "flagged", found, Evidence{}, Succeeded, api.ArtifactWaiting},
		{"by the scan, of a run that violated its contract", "flagged", clean, Evidence{Violations: []Violation{{Clause: "commands"}}}, Violated, api.ArtifactWaiting},
		{"by the scan, of a run that violated it after the collection", "flagged", clean, Evidence{}, Violated, api.ArtifactRejected},
		{"by the scan, of a run that was lost", "flagged", clean, Evidence{}, Lost, api.ArtifactRejected},
	} {
		f.files.files = map[string][]byte{"/out/a.csv": tt.data}
		r := f.run(fmt.Sprintf("run_%d", i), contract.Artifact{Path: "/out/*.csv", Type: "csv", Review: tt.review})
		if err := f.x.Collect(t.Context(), r, tt.e); err != nil {
			t.Fatal(err)
		}
		f.ended(r.ID, tt.outcome)
		if _, err := f.gate.RunOne(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := f.list(r.ID)[0]; got.State != tt.want {
			t.Errorf("%s: %s (%s), want %s", tt.name, got.State, got.Reason, tt.want)
		}
	}
}

// TestRulesWaitForTheEndOfTheRun: a file that a rule releases does not leave before the
// outcome of the run is known.
func TestRulesWaitForTheEndOfTheRun(t *testing.T) {
	f := setupExports(t, storetest.SQLite(t))
	f.files.files = map[string][]byte{"/out/a.csv": []byte("a\n1\n")}
	r := f.run("run_1", contract.Artifact{Path: "/out/*.csv", Type: "csv", Review: "flagged"})
	f.ended(r.ID, Succeeded)
	set := func(s State) {
		t.Helper()
		err := f.db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `update run set state = $1`, s)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	set(Collecting)
	if err := f.x.Collect(t.Context(), r, Evidence{}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.gate.RunOne(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := f.list(r.ID)[0]; got.State != api.ArtifactWaiting {
		t.Errorf("before the end it is %s", got.State)
	}
	set(Ended)
	time.Sleep(waitOutcome + 100*time.Millisecond) // until the action is due again
	if _, err := f.gate.RunOne(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := f.list(r.ID)[0]; got.State != api.ArtifactReleased || got.Decider != "" {
		t.Errorf("after the end it is %s by %q", got.State, got.Decider)
	}
}

// TestDatabaseWritesReleaseNothing: an attacker who can write rows or files, and has no
// key, neither releases a file nor changes what is released.
func TestDatabaseWritesReleaseNothing(t *testing.T) {
	f := setupExports(t, storetest.SQLite(t))
	f.files.files = map[string][]byte{"/out/a.csv": []byte("a\n1\n"), "/out/b.csv": []byte("a\n2\n")}
	r := f.run("run_1", contract.Artifact{Path: "/out/*.csv", Type: "csv"})
	if err := f.x.Collect(t.Context(), r, Evidence{}); err != nil {
		t.Fatal(err)
	}
	list := f.list(r.ID)
	exec := func(query string, args ...any) {
		t.Helper()
		err := f.db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), query, args...)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	exec(`update run_artifact set state = 'released' where n = 1`)
	if _, _, err := f.x.Open(t.Context(), f.owner, r.ID, 1); !errors.Is(err, ErrNotReleased) {
		t.Errorf("marked as released: %v", err)
	}
	exec(`update run_artifact set state = 'waiting' where n = 1`)
	if err := f.decide(list[0], true); err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.x.Open(t.Context(), f.owner, r.ID, 1); err != nil {
		t.Fatal(err)
	}
	// The row of what was approved, with the bytes of what was not.
	exec(`update run_artifact set blob_id = (select blob_id from run_artifact where n = 2), sha256 = (select sha256 from run_artifact where n = 2) where n = 1`)
	if _, _, err := f.x.Open(t.Context(), f.owner, r.ID, 1); err == nil {
		t.Error("other bytes leave as what was approved")
	}
	// The action of what was approved, for the row of what was not.
	exec(`update run_artifact set state = 'released', action_id = $1 where n = 2`, list[0].Action)
	if _, _, err := f.x.Open(t.Context(), f.owner, r.ID, 2); !errors.Is(err, ErrNotReleased) {
		t.Errorf("with another's action: %v", err)
	}

	// Bytes that were changed on the disk fail at the release.
	f.files.files = map[string][]byte{"/out/c.csv": []byte("a\n3\n")}
	r = f.run("run_2", contract.Artifact{Path: "/out/*.csv", Type: "csv"})
	if err := f.x.Collect(t.Context(), r, Evidence{}); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(f.dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		if err == nil {
			b[len(b)-1] ^= 1
			err = os.WriteFile(path, b, 0o600)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.decide(f.list(r.ID)[0], true); err != nil {
		t.Fatal(err)
	}
	if got := f.list(r.ID)[0]; got.State != api.ArtifactRejected {
		t.Errorf("changed bytes: %s", got.State)
	}
}
