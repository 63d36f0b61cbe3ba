package command_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/command"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

func TestRecordListsWhatRan(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	a := f.start(command.Config{})
	ctx, at := t.Context(), time.Now().Truncate(time.Microsecond)
	e := run(2, "sh", "-c", "exec python3")
	e.Time, e.Env = at, []string{"KEY=sk_live_never"}
	a.Exec(ctx, f.box(), e)
	e = run(2, "python3", "--token", "AKIAQWERTYUIOPASDFGH", "a\xff", strings.Repeat("x", 3000))
	e.Time, e.Name = at.Add(time.Second), "python"
	a.Exec(ctx, f.box(), e)
	a.Opened(f.box(), sandbox.Open{PID: 2, Path: "/work/out\n.csv", Time: at})
	a.Opened(f.box(), sandbox.Open{PID: 2, Path: "/etc/passwd", Err: 13, Time: at})
	a.Exited(f.box(), sandbox.Exit{PID: 2, Code: 3, Time: at.Add(3 * time.Second)})
	a.Exited(f.box(), sandbox.Exit{PID: 77, Time: at}) // a forked child that executed nothing
	r, err := a.Record(ctx, boxID)
	if err != nil {
		t.Fatal(err)
	}
	if r.Started != 2 || r.Exited != 2 || r.Opened != 2 || r.Lines != 6 || !r.Complete || r.Dropped != 0 || len(r.Commands) != 2 || len(r.Opens) != 2 {
		t.Fatalf("got %+v", r)
	}
	sh, py := r.Commands[0], r.Commands[1]
	if !sh.Became || sh.Exited || sh.Duration() != time.Second || !sh.Exact || sh.Digest != "" {
		t.Errorf("got %+v", sh)
	}
	if !py.Exited || py.Code != 3 || py.Duration() != 2*time.Second || py.Exact || len(py.Digest) != 64 || py.Name != "python" || py.Path != "/usr/bin/python3" {
		t.Errorf("got %+v", py)
	}
	file := filepath.Join(f.dir, boxID+".commands")
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"sk_live_never", "AKIAQWERTYUIOPASDFGH"} {
		if strings.Contains(string(b), secret) {
			t.Errorf("%s is in the record", secret)
		}
	}
	if sum := sha256.Sum256(b); r.SHA256 != hex.EncodeToString(sum[:]) {
		t.Error("the digest is not that of the file")
	}
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("got %v, %v", st.Mode(), err)
	}
	a.Missed(f.box(), 4)
	if r, err := a.Record(ctx, boxID); err != nil || r.Complete || r.Missed != 4 {
		t.Errorf("got %+v, %v, want that it is not complete", r, err)
	}
}

// TestRecordSurvivesCrashes: the server is killed in the middle of a line, and between
// the steps of a rotation.
func TestRecordSurvivesCrashes(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	ctx := t.Context()
	a := f.start(command.Config{})
	n := 0
	more := func(a *command.Admission, times int) {
		for range times {
			n++
			if !a.Exec(ctx, f.box(), run(int32(n), "ls", fmt.Sprint("file-", n), strings.Repeat("y", 900))) {
				t.Fatal("refused")
			}
		}
	}
	check := func(a *command.Admission, when string) {
		t.Helper()
		r, err := a.Record(ctx, boxID)
		if err != nil || int(r.Started) != n || int(r.Lines) != n || !r.Complete || r.Programs["ls"] != uint64(n) {
			t.Fatalf("%s: got %d starts in %d lines, complete %v, %v; want %d", when, r.Started, r.Lines, r.Complete, err, n)
		}
	}
	path := filepath.Join(f.dir, boxID+".commands")
	more(a, 3)
	a.Close()
	file, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteString(`{"e":"start","t":1,"pa`); err != nil {
		t.Fatal(err)
	}
	file.Close()
	a = f.start(command.Config{})
	check(a, "in the middle of a line")
	more(a, 2)
	check(a, "after it")
	// Three files and more.
	more(a, 4*command.PartSize/1000)
	check(a, "rotated")
	r, _ := a.Record(ctx, boxID)
	if r.Dropped == 0 || len(r.Commands) == 0 || !strings.Contains(fmt.Sprint(r.Commands[0].Args), "file-1 ") || r.Commands[len(r.Commands)-1].PID != int32(n) {
		t.Errorf("dropped %d of %d; the first and the newest must be there", r.Dropped, r.Lines)
	}
	want := r.SHA256
	a.Close()
	if err := os.Rename(path, path+".older"); err != nil { // before the new file is there
		t.Fatal(err)
	}
	a = f.start(command.Config{})
	more(a, 1)
	check(a, "between two files")
	a.Close()
	if r, _ := f.start(command.Config{}).Record(ctx, boxID); r.SHA256 == want {
		t.Error("the digest does not change")
	}
	if err := os.Rename(path, path+".older"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(`{"e":"head","t":`), 0o600); err != nil { // the new file is not begun
		t.Fatal(err)
	}
	a = f.start(command.Config{})
	more(a, 1)
	check(a, "in the middle of a head")
	files, err := os.ReadDir(f.dir)
	if err != nil {
		t.Fatal(err)
	}
	var size int64
	for _, e := range files {
		st, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		size += st.Size()
	}
	if size > 3*command.PartSize {
		t.Errorf("the record has %d bytes", size)
	}
}

// TestDigestCoversEveryLine: the digest over rotated files is that of all lines.
func TestDigestCoversEveryLine(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	a := f.start(command.Config{})
	h := sha256.New()
	path := filepath.Join(f.dir, boxID+".commands")
	var size int64
	for i := range 1200 {
		a.Exec(t.Context(), f.box(), run(int32(i), "ls", strings.Repeat("z", 1000)))
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if int64(len(b)) < size { // a new file: a head, and the line
			_, rest, _ := strings.Cut(string(b), "\n")
			h.Write([]byte(rest))
		} else {
			h.Write(b[size:])
		}
		size = int64(len(b))
		if i == 700 {
			a.Close()
			a = f.start(command.Config{})
		}
	}
	r, err := a.Record(t.Context(), boxID)
	if err != nil || r.SHA256 != hex.EncodeToString(h.Sum(nil)) {
		t.Errorf("got %s, %v, want %x", r.SHA256, err, h.Sum(nil))
	}
}

// TestEndedRecordsAreAuditedAndRemoved: when a sandbox has ended, its counts are
// entered in the audit once, and its record is removed some days later.
func TestEndedRecordsAreAuditedAndRemoved(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	ctx := t.Context()
	row := func(ended time.Time) {
		t.Helper()
		err := f.db.Update(ctx, func(tx *store.Tx) error {
			if _, err := tx.ExecContext(ctx, `delete from sandbox`); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, `insert into sandbox (id, project_id, template, state, reason, metadata, inbox_id, egress, options, execution, cpus, memory_mb, disk_mb, started_at, ends_at, paused_at, ended_at, restart, saved, server_id)
				values ($1, $2, 'base', 'running', '', '{}', '', '{}', '{}', '', 1000, 512, 100, 1, 1, 0, $3, 0, '', '')`, boxID, f.owner.Project, store.Time(ended))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	entries := func() (out []audit.Entry) {
		t.Helper()
		err := f.db.View(ctx, func(tx *store.Tx) (err error) {
			out, err = audit.List(ctx, tx, audit.Query{Project: f.owner.Project, Verb: string(audit.SandboxCommands)})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	row(time.Time{})
	a := f.start(command.Config{})
	a.Exec(ctx, f.box(), run(2, "ls"))
	if err := command.CloseEnded(a, ctx); err != nil || len(entries()) != 0 {
		t.Fatalf("a living sandbox was closed: %v", err)
	}
	row(time.Now().Add(-time.Minute))
	for range 2 {
		if err := command.CloseEnded(a, ctx); err != nil {
			t.Fatal(err)
		}
		a = f.start(command.Config{}) // also after a restart
	}
	list := entries()
	r, err := a.Record(ctx, boxID)
	if err != nil || len(list) != 1 || !strings.Contains(list[0].Detail, r.SHA256) || !r.Ended {
		t.Fatalf("got %+v, %+v, %v", list, r, err)
	}
	if r, err := a.Read(ctx, f.owner, boxID); err != nil || r.Started != 1 {
		t.Errorf("got %+v, %v", r, err)
	}
	other := f.owner
	other.Project = "pr_other"
	if _, err := a.Read(ctx, other, boxID); err == nil {
		t.Error("another project reads the record")
	}
	if _, err := a.Read(ctx, f.box(), boxID); err == nil {
		t.Error("a sandbox reads the record")
	}
	if err := command.Prune(a, time.Now().Add(-time.Hour), 1<<20); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Record(ctx, boxID); err != nil {
		t.Errorf("the record was removed too early: %v", err)
	}
	if err := command.Prune(a, time.Now().Add(time.Hour), 1<<20); err != nil {
		t.Fatal(err)
	}
	if files, err := os.ReadDir(f.dir); err != nil || len(files) != 0 {
		t.Errorf("got %v, %v, want that nothing is left", files, err)
	}
}

// FuzzRecord reads files with any contents that a sandbox or a crash could cause.
func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"e":"start","t":1,"pid":2,"path":"/bin/ls","args":["ls"],"entry":0}`+"\n"), []byte(`{"e":"head","t":1,"state":{"lines":1}}`+"\n"))
	f.Add([]byte(`{"e":"held","t":1,"pid":2,"action":"act_1"}`+"\n"+`{"e":"refuse","t":1,"pid":2,"action":"act_1"}`), []byte("\n\n{}\n[1]\n\"x\"\nnull\n"))
	f.Add([]byte(`{"e":"exit","pid":-1}`+"\n"+`{"e":"missed","n":18446744073709551615}`+"\n"), []byte{})
	f.Fuzz(func(t *testing.T, first, now []byte) {
		dir := t.TempDir()
		for name, b := range map[string][]byte{".first": first, "": now} {
			if err := os.WriteFile(filepath.Join(dir, boxID+".commands"+name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		r, err := command.ReadRecord(dir, boxID)
		if err == nil && len(r.Commands) > strings.Count(string(first)+string(now), "\n") {
			t.Errorf("%d commands", len(r.Commands))
		}
	})
}

// FuzzQuote: a quoted word is one line without invisible characters, and different
// words are quoted differently.
func FuzzQuote(f *testing.F) {
	f.Add([]byte("a"), []byte("'a'"))
	f.Add([]byte(`\n`), []byte("\n"))
	f.Add([]byte("\xff"), []byte(`\xff`))
	f.Add([]byte("\u202e"), []byte(`\u202e`))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		q := command.Quote(a)
		if strings.ContainsAny(q, "\n\r\x1b\u202e\u2066\u200b") {
			t.Errorf("got %q", q)
		}
		if string(a) != string(b) && q == command.Quote(b) {
			t.Errorf("%q and %q are both %q", a, b, q)
		}
	})
}

// BenchmarkExec measures what the decision and the record add to each start.
func BenchmarkExec(b *testing.B) {
	f := setup(b, storetest.SQLite(b))
	a := f.start(command.Config{})
	e := run(2, "python3", "-m", "pytest", "-q", "tests/test_report.py", "-k", "not slow")
	b.Run("free", func(b *testing.B) {
		for b.Loop() {
			a.Exec(b.Context(), f.box(), e)
			a.Exited(f.box(), sandbox.Exit{PID: 2})
		}
	})
	bound := f.start(command.Config{Dir: b.TempDir()})
	if err := bound.Bind(boxID, (&side{}).binding(parse(b, job))); err != nil {
		b.Fatal(err)
	}
	b.Run("bound", func(b *testing.B) {
		for b.Loop() {
			bound.Exec(b.Context(), f.box(), e)
			bound.Exited(f.box(), sandbox.Exit{PID: 2})
		}
	})
	long := run(2, "cc", strings.Repeat("x", 4000))
	b.Run("long", func(b *testing.B) {
		for b.Loop() {
			a.Exec(b.Context(), f.box(), long)
		}
	})
}
