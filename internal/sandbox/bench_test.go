package sandbox_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestBenchesEndWithTheirTime: at the close, at the timeout, when they die and with the
// server; each gives its place to another, and its end is on the record.
func TestBenchesEndWithTheirTime(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.MaxBenches, c.MaxSandboxes, c.BenchEgress = 1, 1, policy.Egress{Packages: []string{"npm"}}
	})
	stop := f.run()
	base := sandbox.Base{Rootfs: "/", Key: "k"}
	open := func(timeout time.Duration) *sandbox.Bench {
		t.Helper()
		b, err := f.fleet.OpenBench(t.Context(), f.who, sandbox.BenchRequest{Base: base, Timeout: timeout, MemoryMB: 77})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	gone := func(b *sandbox.Bench) func() bool {
		return func() bool { _, ok := f.runtime.Spec(b.ID); return !ok }
	}
	closed := func() (ends []string) {
		t.Helper()
		err := audit.View(t.Context(), f.db, func(tx *store.Tx) error {
			es, err := audit.List(t.Context(), tx, audit.Query{Verb: string(audit.BenchClose)})
			for _, e := range slices.Backward(es) {
				ends = append(ends, e.Object+" "+e.Detail)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return ends
	}
	ended := func(b *sandbox.Bench) func() bool { // its record is the last that is made
		return func() bool {
			ends := closed()
			return len(ends) > 0 && strings.HasPrefix(ends[len(ends)-1], b.ID)
		}
	}
	if _, err := f.fleet.OpenBench(t.Context(), auth.Principal{Kind: auth.Agent, ID: "a", Project: f.who.Project}, sandbox.BenchRequest{Base: base, Timeout: time.Minute}); !errors.Is(err, auth.ErrForbidden) {
		t.Errorf("an agent: %v", err)
	}
	if _, err := f.fleet.OpenBench(t.Context(), f.who, sandbox.BenchRequest{Base: base}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("without a timeout: %v", err)
	}

	b := open(time.Hour)
	s, _ := f.runtime.Spec(b.ID)
	if s.MemoryMB != 77 || s.Hostname == b.ID || s.LargestMB == 0 || !slices.Contains(s.Env, "POSTERN_BENCH=1") {
		t.Errorf("spec: %+v", s)
	}
	if told := f.link.told(b.ID); told.SandboxID != "" || !told.kept {
		t.Errorf("the guest was told %+v", told)
	}
	if who := f.link.owner(b.ID); !who.Bench || who.Project != f.who.Project || who.Inbox != "" {
		t.Errorf("owner of the link: %+v", who)
	}
	if _, err := f.fleet.OpenBench(t.Context(), f.who, sandbox.BenchRequest{Base: base, Timeout: time.Hour}); !errors.Is(err, sandbox.ErrFull) {
		t.Errorf("one too many: %v", err)
	}
	f.create(sandbox.Request{Template: "base"}) // the limit of sandboxes is another one
	if all, err := f.fleet.List(t.Context(), f.who, true); err != nil || len(all) != 1 || all[0].ID == b.ID {
		t.Errorf("list: %v, %v", all, err)
	}
	if _, err := f.fleet.Get(t.Context(), f.who, b.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("get: %v", err)
	}
	if err := f.fleet.Kill(t.Context(), f.who, b.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("kill: %v", err)
	}
	if err := errors.Join(b.Close(), b.Close()); err != nil || !gone(b)() {
		t.Errorf("close: %v", err)
	}

	late := open(time.Second)
	f.waitFor("it ends at its timeout", ended(late))
	if err := late.MakeDir(t.Context(), "/x", ""); err == nil || !strings.Contains(err.Error(), "its time of 1s was up") {
		t.Errorf("after its time: %v", err)
	}
	dead := open(time.Hour)
	f.runtime.Die(dead.ID, "out of memory")
	f.waitFor("a dead one is removed", ended(dead))
	if err := dead.MakeDir(t.Context(), "/x", ""); err == nil || !strings.Contains(err.Error(), "out of memory") {
		t.Errorf("after its death: %v", err)
	}
	last := open(time.Hour)
	stop()
	if !gone(last)() {
		t.Error("it outlives the server")
	}
	ends := closed()
	for i, want := range []string{b.ID + " the build's sandbox has been closed", late.ID + " its time of 1s was up", dead.ID + " the sandbox ended: out of memory", last.ID + " the server is stopping"} {
		if id, reason, _ := strings.Cut(want, " "); i >= len(ends) || !strings.HasPrefix(ends[i], id) || !strings.Contains(ends[i], reason) {
			t.Errorf("on the record: %q, want %q at %d", ends, want, i)
		}
	}
}

// TestLayersAreFiltered: what belongs to the one sandbox is not in a template, removed
// files stay removed, and an archive cannot say that it is larger than the disk.
func TestLayersAreFiltered(t *testing.T) {
	var in bytes.Buffer
	w := tar.NewWriter(&in)
	for _, h := range []*tar.Header{
		{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./run/postern/generation.new", Typeflag: tar.TypeChar},
		{Name: "./etc/hosts", Typeflag: tar.TypeReg, Size: 1},
		{Name: "./gone", Typeflag: tar.TypeLink, Linkname: "./run/postern/generation.new"},
		{Name: "./kept", Typeflag: tar.TypeReg, Size: 1},
		{Name: "./too", Typeflag: tar.TypeLink, Linkname: "./kept"},
	} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	archive := in.Bytes()
	var out bytes.Buffer
	if err := sandbox.FilterLayer(&out, bytes.NewReader(archive), 100); err != nil {
		t.Fatal(err)
	}
	got := ""
	for tr := tar.NewReader(&out); ; {
		h, err := tr.Next()
		if err != nil {
			break
		}
		got += h.Name + " " + string(h.Typeflag) + "\n"
	}
	if want := "./ 5\n./gone 3\n./kept 0\n./too 1\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if err := sandbox.FilterLayer(&out, bytes.NewReader(archive), 0); err == nil {
		t.Error("a layer beyond the limit is taken")
	}
}

// FuzzLayer: a compromised kernel writes the archive.
func FuzzLayer(f *testing.F) {
	var in bytes.Buffer
	w := tar.NewWriter(&in)
	_ = w.WriteHeader(&tar.Header{Name: "./a", Typeflag: tar.TypeReg, Size: 1})
	_, _ = w.Write([]byte("x"))
	_ = w.WriteHeader(&tar.Header{Name: "./b", Typeflag: tar.TypeLink, Linkname: "./a", PAXRecords: map[string]string{"SCHILY.xattr.user.x": "y"}})
	_ = w.Close()
	f.Add(in.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		var out bytes.Buffer
		const most = 1 << 16
		if err := sandbox.FilterLayer(&out, bytes.NewReader(b), most); err == nil && out.Len() > most+16*len(b)+4096 {
			t.Errorf("%d bytes became %d", len(b), out.Len())
		}
	})
}

// TestOutputIsCutIntoLines: long lines, bytes that are no text, and a stream that ends in
// the middle of one.
func TestOutputIsCutIntoLines(t *testing.T) {
	frame := func(kind byte, s string) string {
		return string(binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(s)))) + s
	}
	long := strings.Repeat("y", 40<<10)
	in := frame('o', "a\nb") + frame('e', "x\r\n") + frame('.', "") + frame('o', "c\n\xff\n"+long) + frame('x', `{"code":3,"status":"exit status 3"}`)
	var got []string
	code, err := sandbox.ReadFrames(strings.NewReader(in), func(stream, line string) { got = append(got, stream[3:4]+":"+line) })
	want := []string{"o:a", "e:x", "o:bc", "o:\uFFFD", "o:" + long[:16<<10], "o:" + long[:16<<10], "o:" + long[:8<<10]}
	if err != nil || code != 3 || !slices.Equal(got, want) {
		t.Errorf("got %d, %v, %.100q, want %.100q", code, err, got, want)
	}
	for name, bad := range map[string]string{"cut": in[:len(in)-3], "huge": "o\xff\xff\xff\xff", "no end": frame('o', "x"), "no JSON": frame('x', "x"), "nothing": ""} {
		if _, err := sandbox.ReadFrames(strings.NewReader(bad), func(string, string) {}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// TestTemplatesThatAreGoneHaveNoSnapshot: after a restart of the server the snapshots of
// templates that exist are used, and others are removed.
func TestTemplatesThatAreGoneHaveNoSnapshot(t *testing.T) {
	known := map[string]bool{"base": true, "b1": true, "b2": true}
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Inboxes = false, nil
		c.Base = func(_ context.Context, template string) (sandbox.Base, error) {
			if !known[template] {
				return sandbox.Base{}, sandbox.ErrNoTemplate
			}
			return sandbox.Base{Rootfs: "/", Key: template, MemoryMB: 64}, nil
		}
	})
	for _, name := range []string{"b1", "b2"} {
		for range 2 { // the second finds the first's
			if err := f.fleet.MakeTemplateSnapshot(t.Context(), name, func(string) {}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := f.snapshots(); len(got) != 2 {
		t.Fatalf("snapshots: %q", got)
	}
	s := f.create(sandbox.Request{Template: "b1"})
	if !f.link.told(s.ID).Restored || s.MemoryMB != 64 {
		t.Errorf("it was not started from the snapshot of its template: %+v", s)
	}
	if err := f.fleet.Kill(t.Context(), f.who, s.ID); err != nil {
		t.Fatal(err)
	}
	delete(known, "b2")
	f.open()
	stop := f.run()
	f.waitFor("the snapshot of a template that is gone is removed", func() bool { return len(f.snapshots()) == 1 })
	s = f.create(sandbox.Request{Template: "b1"})
	if !f.link.told(s.ID).Restored {
		t.Error("the snapshot of the former server is not used")
	}
	if err := f.fleet.Kill(t.Context(), f.who, s.ID); err != nil {
		t.Fatal(err)
	}
	if err := f.fleet.ForgetTemplate(t.Context(), "b1"); err != nil {
		t.Fatal(err)
	}
	stop()
	if left, err := os.ReadDir(f.conf.Dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestTemplateForgottenWhileItIsSaved: its snapshot is not left on the disk.
func TestTemplateForgottenWhileItIsSaved(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) { c.Cold, c.Inboxes = false, nil })
	f.process.saves = make(chan struct{})
	made := make(chan error)
	go func() { made <- f.fleet.MakeTemplateSnapshot(t.Context(), "b1", func(string) {}) }()
	f.waitFor("a sandbox of the template runs", func() bool {
		running, err := f.runtime.List(t.Context())
		return err == nil && len(running) == 1
	})
	if err := f.fleet.ForgetTemplate(t.Context(), "b1"); err != nil {
		t.Fatal(err)
	}
	close(f.process.saves)
	if err := <-made; !errors.Is(err, sandbox.ErrNoTemplate) {
		t.Errorf("MakeTemplateSnapshot = %v, want ErrNoTemplate", err)
	}
	if left, err := os.ReadDir(f.conf.Dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestFullDiskEndsWhoFillsIt: not others, whose owners wrote nothing, and nobody if no
// sandbox is to blame.
func TestFullDiskEndsWhoFillsIt(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) { c.KeepFreeMB = 1 << 40 })
	a, b := f.create(sandbox.Request{Template: "base"}), f.create(sandbox.Request{Template: "base"})
	bench, err := f.fleet.OpenBench(t.Context(), f.who, sandbox.BenchRequest{Base: sandbox.Base{Rootfs: "/", Key: "k"}, Timeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer bench.Close()
	relieve := func() {
		t.Helper()
		if err := f.fleet.RelieveDisk(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	alive := func() (n int) {
		for _, id := range []string{a.ID, b.ID, bench.ID} {
			if _, ok := f.runtime.Spec(id); ok {
				n++
			}
		}
		return n
	}
	f.runtime.SetUsage(a.ID, sandbox.Usage{Disk: 1 << 20})
	if relieve(); alive() != 3 {
		t.Error("a sandbox was ended for one mebibyte")
	}
	f.runtime.SetUsage(b.ID, sandbox.Usage{Disk: 5 << 30})
	f.runtime.SetUsage(bench.ID, sandbox.Usage{Disk: 1 << 30})
	relieve()
	if _, err := f.fleet.Get(t.Context(), f.who, b.ID); !errors.Is(err, sandbox.ErrNotFound) || alive() != 2 {
		t.Errorf("who fills the disk is not ended: %v, %d alive", err, alive())
	}
	relieve()
	f.waitFor("the bench is next", func() bool { return alive() == 1 })
	if err := bench.MakeDir(t.Context(), "/x", ""); err == nil || !strings.Contains(err.Error(), "nearly full") {
		t.Errorf("the bench: %v", err)
	}
	if _, err := f.fleet.Get(t.Context(), f.who, a.ID); err != nil {
		t.Errorf("the other: %v", err)
	}
}

// TestPooledSandboxHasTheNameThatIsUsed: its owner is told nothing new, so the shell that
// waits in it is of use.
func TestPooledSandboxHasTheNameThatIsUsed(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Prepare, c.Inboxes, c.Pool = false, []string{"base"}, nil, sandbox.PoolConfig{Min: 1, Max: 1, MemoryMB: 1 << 20}
	})
	stop := f.run()
	defer stop()
	f.waitFor("the pool is full", func() bool { return f.fleet.PooledOf("base") == 1 })
	first := f.create(sandbox.Request{Template: "base", Asked: "alias"})
	f.waitFor("the pool is full again", func() bool { return f.fleet.PooledOf("base") == 1 })
	f.link.mu.Lock()
	defer f.link.mu.Unlock()
	pooled := 0
	for id, in := range f.link.inits {
		if id != first.ID && in.EnvVars["E2B_TEMPLATE_ID"] == "alias" {
			pooled++
		}
	}
	if pooled != 1 {
		t.Errorf("%d pooled sandboxes have the name, want 1", pooled)
	}
}

// TestPoolFollowsDemandForEachTemplate: within the limit of all, the first template keeps
// its minimum, and a template that is gone has none.
func TestPoolFollowsDemandForEachTemplate(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Prepare, c.Inboxes, c.Pool = false, []string{"base"}, nil, sandbox.PoolConfig{Min: 1, Max: 3, MemoryMB: 1 << 20}
	})
	stop := f.run()
	defer stop()
	f.waitFor("the first template has its minimum", func() bool { return f.fleet.PooledOf("base") == 1 })
	if err := f.fleet.MakeTemplateSnapshot(t.Context(), "b1", func(string) {}); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		s := f.create(sandbox.Request{Template: "b1"})
		if err := f.fleet.Kill(t.Context(), f.who, s.ID); err != nil {
			t.Fatal(err)
		}
	}
	f.waitFor("another one that is wanted has some of the rest", func() bool {
		base, b1 := f.fleet.PooledOf("base"), f.fleet.PooledOf("b1")
		if base+b1 > 3 {
			t.Errorf("%d are pooled, at most 3 may be", base+b1)
		}
		return base == 1 && b1 > 0
	})
	if err := f.fleet.ForgetTemplate(t.Context(), "b1"); err != nil {
		t.Fatal(err)
	}
	f.waitFor("one that is gone has none", func() bool { return f.fleet.PooledOf("b1") == 0 })
}
