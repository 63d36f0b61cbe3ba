package build_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/erofs"
	"postern/internal/registry"
	"postern/internal/rootfs"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

func steps(args ...[]string) (out []build.Step) {
	for _, a := range args {
		out = append(out, build.Step{Type: a[0], Args: a[1:]})
	}
	return out
}

func TestBuildFromTemplate(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := newFixture(t, db, build.Config{})
		f.run()
		hash := strings.Repeat("0a", 32)
		tm, b, err := f.Create(t.Context(), f.a, build.Request{Name: "App:v1", Tags: []string{"latest"}, CPUs: 2, MemoryMB: 512})
		if err != nil {
			t.Fatal(err)
		}
		if ok, err := f.FilePresent(t.Context(), f.a, tm.ID, hash); ok || err != nil {
			t.Fatalf("FilePresent = %v, %v before the upload", ok, err)
		}
		tarball := archive(t, map[string]string{"main.py": "print(1)"})
		if err := f.Upload(t.Context(), f.a, tm.ID, hash, int64(len(tarball)), bytes.NewReader(tarball)); err != nil {
			t.Fatal(err)
		}
		d := build.Definition{
			FromTemplate: "base", StartCmd: "serve", ReadyCmd: "true",
			Steps: append(steps(
				[]string{"env", "GREETING", "Hello, World!", "TWICE", "$GREETING ${GREETING} ${NONE:-no}"},
				[]string{"RUN", "print hi there"},
				[]string{"WORKDIR", "/srv"}, []string{"WORKDIR", "app"},
				[]string{"RUN", "write file text"}, []string{"RUN", "env TWICE"},
				[]string{"USER", "app", "true"},
			), build.Step{Type: "COPY", Args: []string{"src/**/*.py", "code/"}, FilesHash: hash}),
		}
		if err := f.Start(t.Context(), f.a, "app", b.ID, d); err != nil {
			t.Fatal(err)
		}
		got := f.wait(f.a, tm.ID, b.ID)
		if got.State != build.Ready {
			t.Fatalf("build = %+v", got)
		}
		log := strings.Join(lines(got), "\n")
		for _, want := range []string{
			"Building template " + tm.ID + "/" + b.ID, "CACHED [base] FROM TEMPLATE base [", "[base] DEFAULT USER user [",
			"\n[builder 1/8] ENV GREETING Hello, World! TWICE", "[builder 2/8] [stdout]: hi there", "[builder 6/8] [stdout]: Hello, World! Hello, World! no",
			"[builder 8/8] COPY src/**/*.py code/ [", "[finalize] Finalizing template build [", "Build finished, took ",
		} {
			if !strings.Contains(log, want) {
				t.Errorf("the log lacks %q:\n%s", want, log)
			}
		}
		for _, name := range []string{"app:v1", "app:latest", tm.ID + ":v1", "app:" + b.ID} {
			if r, err := f.Resolve(t.Context(), f.a, name); err != nil || r.ID != build.SandboxID(b.ID) || r.Name != "app" {
				t.Errorf("Resolve(%q) = %+v, %v", name, r, err)
			}
		}
		if _, err := f.Resolve(t.Context(), f.a, "app"); !errors.Is(err, build.ErrNotFound) {
			t.Errorf("Resolve without a default tag = %v", err)
		}
		base, err := f.Base(t.Context(), build.SandboxID(b.ID))
		if err != nil {
			t.Fatal(err)
		}
		want := sandbox.Base{
			Rootfs: base.Rootfs, Image: base.Image, Key: base.Key, Probes: []sandbox.Probe{{Port: 49999, Path: "/health"}}, CPUs: 2, MemoryMB: 512, Project: f.a.Project,
			Env: map[string]string{"GREETING": "Hello, World!", "TWICE": "Hello, World! Hello, World! no"}, User: "app", Dir: "/srv/app", StartCmd: "serve", ReadyCmd: "true",
		}
		if diff := cmp.Diff(want, base); diff != "" {
			t.Error(diff)
		}
		f.content(base, map[string]string{"/srv/app/file": "text", "/srv/app/code/main.py": "print(1)", "/etc/os-release": "ID=small\n"})

		// Its children begin where it ends, and the user is user again.
		child := f.make(f.a, "child", build.Definition{FromTemplate: "app:v1", Steps: steps([]string{"RUN", "write more x"})})
		if child.State != build.Ready {
			t.Fatalf("child = %+v", child)
		}
		base, err = f.Base(t.Context(), build.SandboxID(child.Build))
		if err != nil {
			t.Fatal(err)
		}
		if base.User != "user" || base.Dir != "/srv/app" || base.Env["GREETING"] == "" || base.StartCmd != "serve" || len(base.Probes) != 1 {
			t.Errorf("base of a child = %+v", base)
		}
		f.content(base, map[string]string{"/srv/app/file": "text", "/srv/app/more": "x"})
		if left, err := os.ReadDir(filepath.Join(f.conf.Dir, "work")); err != nil || len(left) > 0 {
			t.Errorf("left in work: %v, %v", left, err)
		}
	})
}

// content checks files of an image.
func (f *fixture) content(b sandbox.Base, files map[string]string) {
	f.t.Helper()
	tree, err := rootfs.Open(b.Image.Root)
	if err != nil {
		f.t.Fatal(err)
	}
	defer tree.Close()
	for name, want := range files {
		if got, err := tree.ReadFile(name, 1<<20); err != nil || string(got) != want {
			f.t.Errorf("%s = %q, %v; want %q", name, got, err, want)
		}
	}
}

func TestBuildFromImage(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{})
	f.run()
	const secret = "hunter2-hunter2"
	d := build.Definition{FromImage: "debian:12", Credentials: registry.Credentials{Username: "ann", Password: secret}, Steps: steps([]string{"ENV", "PATH", "/app:$PATH"}, []string{"RUN", "env PATH"})}
	got := f.make(f.a, "deb", d)
	log := strings.Join(lines(got), "\n")
	if got.State != build.Ready || !strings.Contains(log, "[stdout]: /app:/opt/bin:/bin:/usr/local/sbin") || !strings.Contains(log, "\n[base] FROM debian:12 [") {
		t.Fatalf("build = %s\n%s", got.State, log)
	}
	f.images.err = errors.New("unauthorized: " + secret)
	failed := f.make(f.a, "deb2", d)
	if failed.State != build.Failed || failed.Failure.Step != "base" {
		t.Errorf("a pull that fails: %+v", failed)
	}
	f.images.err = nil
	if again := strings.Join(lines(f.make(f.a, "deb3", d)), "\n"); !strings.Contains(again, "CACHED [base] FROM debian:12") || !strings.Contains(again, "CACHED [builder 2/2] RUN") {
		t.Errorf("the second build:\n%s", again)
	}
	// The attack: a stolen copy of the database or of the data directory.
	err := filepath.Walk(f.dir, func(path string, i os.FileInfo, err error) error {
		if err != nil || i.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if bytes.Contains(text, []byte(secret)) {
			t.Errorf("%s has the password", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	rows := f.strings(`select message from template_log union all select definition || failure || result from template_build`)
	if strings.Contains(strings.Join(rows, "\n"), secret) {
		t.Error("the database has the password")
	}
}

// exec changes rows.
func (f *fixture) exec(query string) {
	f.t.Helper()
	err := f.db.Update(f.t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(f.t.Context(), query)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
}

// strings returns the rows of a query of one text column.
func (f *fixture) strings(query string) (out []string) {
	f.t.Helper()
	err := f.db.View(f.t.Context(), func(tx *store.Tx) (err error) {
		out, err = tx.Strings(f.t.Context(), query)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return out
}

func TestFailedStepStopsBuildAndNextOneGoesOn(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{})
	f.run()
	good := []string{"RUN", "write /one 1"}
	got := f.make(f.a, "app", build.Definition{FromTemplate: "base", Steps: steps(good, []string{"RUN", "exit 3"}, []string{"RUN", "print never"})})
	if got.State != build.Failed || got.Failure.Message != "failed to run command 'exit 3': exit status 3" || got.Failure.Step != "2" {
		t.Fatalf("build = %+v", got.Failure)
	}
	if es := got.Failure.Entries; len(es) == 0 || es[len(es)-1].Message != "[builder 2/3] [stderr]: something is wrong" {
		t.Errorf("last lines = %+v", es)
	}
	if diff := cmp.Diff([]string{"write /one 1", "exit 3"}, f.machine.commands()); diff != "" {
		t.Error(diff)
	}
	if _, err := f.Resolve(t.Context(), f.a, "app"); !errors.Is(err, build.ErrNotFound) {
		t.Errorf("Resolve of a template without a finished build = %v", err)
	}
	got = f.make(f.a, "app", build.Definition{FromTemplate: "base", Steps: steps(good, []string{"RUN", "write /two 2"})})
	if got.State != build.Ready || !strings.Contains(strings.Join(lines(got), "\n"), "CACHED [builder 1/2] RUN write /one 1") {
		t.Errorf("second build = %+v", got)
	}
	if diff := cmp.Diff([]string{"write /two 2"}, f.machine.commands()); diff != "" {
		t.Error(diff)
	}
	for name, st := range map[string]build.Step{
		"command type FROM is not implemented":                                                         {Type: "from", Args: []string{"x"}},
		"failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'": {Type: "RUN", Args: []string{"whoami", "root123"}},
		"ENV requires both a key and value arguments":                                                  {Type: "ENV", Args: []string{"A"}},
		"COPY requires files hash to be set":                                                           {Type: "COPY", Args: []string{"a", "b"}},
		"RUN requires command argument":                                                                {Type: "RUN"},
		`failed to create user: "a:b" is not a valid user name: want 1 to 32 letters, digits, _, - and ., not beginning with - or .`: {Type: "USER", Args: []string{"a:b"}},
	} {
		got := f.make(f.a, "wrong", build.Definition{FromTemplate: "base", Steps: []build.Step{st}})
		if got.State != build.Failed || !strings.HasPrefix(got.Failure.Message, name) && !strings.Contains(name, "root123") || got.Failure.Step != "1" {
			t.Errorf("%v = %+v, want %q", st, got.Failure, name)
		}
	}
}

func TestForceAndKeys(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{})
	f.run()
	d := build.Definition{FromTemplate: "base", Steps: steps([]string{"ENV", "A", "1"}, []string{"RUN", "write /one 1"}, []string{"RUN", "write /two 2"})}
	first := f.make(f.a, "app", d)
	f.machine.commands()
	image := func(s build.Status) string {
		bs, err := f.Builds(t.Context(), f.a, "app")
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range bs {
			if b.ID == s.Build {
				return b.Image
			}
		}
		return ""
	}
	cases := []struct {
		name   string
		change func(d *build.Definition)
		want   []string
	}{
		{"the same", func(*build.Definition) {}, nil},
		{"force", func(d *build.Definition) { d.Force = true }, []string{"write /one 1", "write /two 2"}},
		{"a forced step forces later ones", func(d *build.Definition) { d.Steps[1].Force = true }, []string{"write /one 1", "write /two 2"}},
		{"the last one forced", func(d *build.Definition) { d.Steps[2].Force = true }, []string{"write /two 2"}},
		{"another environment", func(d *build.Definition) { d.Steps[0].Args = []string{"A", "2"} }, []string{"write /one 1", "write /two 2"}},
	}
	for _, c := range cases {
		d := d
		d.Steps = append([]build.Step(nil), d.Steps...)
		c.change(&d)
		got := f.make(f.a, "app", d)
		if got.State != build.Ready {
			t.Fatalf("%s: %+v", c.name, got)
		}
		if diff := cmp.Diff(c.want, f.machine.commands()); diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
		if image(got) != image(first) {
			t.Errorf("%s: the image differs", c.name)
		}
	}
}

func TestProjectsDoNotSeeOneAnother(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := newFixture(t, db, build.Config{})
		f.run()
		ctx := t.Context()
		hash := strings.Repeat("0b", 32)
		d := build.Definition{FromTemplate: "base", Steps: steps([]string{"RUN", "write /one 1"})}
		got := f.make(f.a, "app", d)
		f.machine.commands()
		if err := f.Upload(ctx, f.a, "app", hash, 3, strings.NewReader("abc")); err != nil {
			t.Fatal(err)
		}
		tm, err := f.Get(ctx, f.a, "app")
		if err != nil {
			t.Fatal(err)
		}
		team := tm.Team + "/app"
		private := func(want error) {
			t.Helper()
			for name, try := range map[string]func() error{
				"status":  func() error { _, err := f.Status(ctx, f.b, tm.ID, got.Build, build.Logs{}); return err },
				"builds":  func() error { _, err := f.Builds(ctx, f.b, tm.ID); return err },
				"tags":    func() error { _, err := f.Tags(ctx, f.b, team); return err },
				"start":   func() error { return f.Start(ctx, f.b, tm.ID, got.Build, d) },
				"delete":  func() error { return f.Delete(ctx, f.b, tm.ID) },
				"publish": func() error { _, err := f.SetPublic(ctx, f.b, tm.ID, true); return err },
				"tag":     func() error { _, err := f.AssignTags(ctx, f.b, tm.ID, []string{"x"}); return err },
				"untag":   func() error { return f.RemoveTags(ctx, f.b, team, []string{"x"}) },
				"upload":  func() error { return f.Upload(ctx, f.b, tm.ID, hash, 3, strings.NewReader("abc")) },
				"files":   func() error { _, err := f.FilePresent(ctx, f.b, tm.ID, hash); return err },
			} {
				if err := try(); !errors.Is(err, want) {
					t.Errorf("%s by another project = %v, want %v", name, err, want)
				}
			}
		}
		private(build.ErrNotFound)
		for _, name := range []string{"app", team, tm.ID} {
			if _, err := f.Resolve(ctx, f.b, name); !errors.Is(err, build.ErrNotFound) {
				t.Errorf("Resolve(%q) by another project = %v", name, err)
			}
			if _, err := f.Get(ctx, f.b, name); !errors.Is(err, build.ErrNotFound) {
				t.Errorf("Get(%q) by another project = %v", name, err)
			}
		}
		// The same definition: neither CACHED nor the time tells what the other has built.
		if log := strings.Join(lines(f.make(f.b, "app", d)), "\n"); strings.Contains(log, "CACHED [builder") {
			t.Errorf("another project's layer was used:\n%s", log)
		}
		// The attack: a guessed hash of another's files.
		stolen := f.make(f.b, "app", build.Definition{FromTemplate: "base", Steps: []build.Step{{Type: "COPY", Args: []string{"a", "b"}, FilesHash: hash}}})
		if stolen.State != build.Failed || !strings.Contains(stolen.Failure.Message, "were not uploaded") {
			t.Errorf("COPY of another project's upload = %+v", stolen)
		}
		if ok, err := f.FilePresent(ctx, f.b, "app", hash); ok || err != nil {
			t.Errorf("FilePresent of another project's upload = %v, %v", ok, err)
		}
		if list, err := f.List(ctx, f.b); err != nil || len(list) != 1 || list[0].Project != f.b.Project {
			t.Errorf("List = %+v, %v", list, err)
		}

		if _, err := f.SetPublic(ctx, f.a, "app", true); err != nil {
			t.Fatal(err)
		}
		private(build.ErrForbidden)
		for _, name := range []string{team, strings.ToLower(team), tm.ID} {
			if r, err := f.Resolve(ctx, f.b, name); err != nil || r.ID != build.SandboxID(got.Build) {
				t.Errorf("Resolve(%q) of a published template = %+v, %v", name, r, err)
			}
		}
		if r, err := f.Resolve(ctx, f.b, "app"); err != nil || r.ID == build.SandboxID(got.Build) {
			t.Errorf("one's own template comes first: %+v, %v", r, err)
		}
		for _, who := range []auth.Principal{
			{Kind: auth.Agent, Project: f.a.Project},
			{Kind: auth.Sandbox, Project: f.a.Project},
			{Kind: auth.Person, Role: auth.Viewer, Project: f.a.Project},
			{Kind: auth.Person, Role: auth.Reviewer, Project: f.a.Project},
			{Kind: auth.Grant, Project: f.a.Project},
		} {
			if _, _, err := f.Create(ctx, who, build.Request{Name: "x"}); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("Create by %s = %v", who, err)
			}
			if err := f.Delete(ctx, who, "app"); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("Delete by %s = %v", who, err)
			}
		}
	})
}

func TestNames(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{})
	for _, name := range []string{
		"", "a b", "a:", "a:b:c", "/a", "a/", "x/y/z", "ä", "../a", "a:" + strings.Repeat("t", 200), strings.Repeat("n", 200), "base", "BASE:v2", "code-interpreter-v1", "mcp-gateway", "someone/app",
		"a:0a1b2c3d-0000-4000-8000-000000000000",
	} {
		if _, _, err := f.Create(t.Context(), f.a, build.Request{Name: name}); !errors.Is(err, build.ErrInvalid) {
			t.Errorf("Create(%q) = %v", name, err)
		}
	}
	for _, r := range []build.Request{{CPUs: 3}, {CPUs: 1.5}, {CPUs: 64}, {CPUs: -1}, {MemoryMB: 129}, {MemoryMB: 64}, {MemoryMB: 1 << 40}, {DiskMB: -1}, {DiskMB: 1 << 40}} {
		r.Name = "app"
		if _, _, err := f.Create(t.Context(), f.a, r); !errors.Is(err, build.ErrInvalid) {
			t.Errorf("Create(%+v) = %v", r, err)
		}
	}
	one, _, err := f.Create(t.Context(), f.a, build.Request{Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	two, _, err := f.Create(t.Context(), f.a, build.Request{Name: one.Team + "/APP:v2"})
	if err != nil || two.ID != one.ID || two.Builds != 2 {
		t.Errorf("the same name = %+v, %v", two, err)
	}
	for _, id := range []string{"b", "base", "b" + strings.Repeat("0", 31), "b" + strings.Repeat("g", 32), "../../etc/passwd"} {
		if _, err := f.Base(t.Context(), id); !errors.Is(err, sandbox.ErrNoTemplate) {
			t.Errorf("Base(%q) = %v", id, err)
		}
	}
}

func TestTags(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := newFixture(t, db, build.Config{})
		f.run()
		ctx := t.Context()
		one := f.make(f.a, "app", build.Definition{FromTemplate: "base"})
		two := f.make(f.a, "app", build.Definition{FromTemplate: "base", Steps: steps([]string{"ENV", "A", "1"})})
		if b, err := f.AssignTags(ctx, f.a, "app:"+one.Build, []string{"Stable", "v1"}); err != nil || b.ID != one.Build || !cmp.Equal(b.Tags, []string{"stable", "v1"}) {
			t.Fatalf("AssignTags = %+v, %v", b, err)
		}
		for name, want := range map[string]string{"app": two.Build, "app:stable": one.Build, "app:v1": one.Build} {
			if r, err := f.Resolve(ctx, f.a, name); err != nil || r.ID != build.SandboxID(want) {
				t.Errorf("Resolve(%q) = %+v, %v", name, r, err)
			}
		}
		if err := f.RemoveTags(ctx, f.a, "app", []string{"v1"}); err != nil {
			t.Error(err)
		}
		for _, tags := range [][]string{{"default"}, {}, {"a b"}} {
			if err := f.RemoveTags(ctx, f.a, "app", tags); !errors.Is(err, build.ErrInvalid) {
				t.Errorf("RemoveTags(%q) = %v", tags, err)
			}
		}
		if _, err := f.AssignTags(ctx, f.a, "app:nothing", []string{"x"}); !errors.Is(err, build.ErrNotFound) {
			t.Errorf("AssignTags of a missing tag = %v", err)
		}
		tags, err := f.Tags(ctx, f.a, "app")
		if err != nil || len(tags) != 2 || tags[0].Tag != "stable" || tags[1].Tag != "default" {
			t.Errorf("Tags = %+v, %v", tags, err)
		}
	})
}

func TestDeleteWaitsForSandboxes(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{})
	f.run()
	ctx := t.Context()
	got := f.make(f.a, "app", build.Definition{FromTemplate: "base", Steps: steps([]string{"RUN", "write /one 1"})})
	insert := func(state string) {
		t.Helper()
		err := f.db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `insert into sandbox (id, project_id, template, state, reason, metadata, inbox_id, egress, options, execution, cpus, memory_mb, disk_mb, started_at, ends_at, paused_at, ended_at, restart, saved, server_id)
				values ('i1', $1, $2, $3, '', '{}', '', '{}', '{}', '', 1, 1, 1, 1, 1, 0, 0, 0, '', '') on conflict (id) do update set state = $3`, f.b.Project, build.SandboxID(got.Build), state)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, state := range []string{"creating", "running", "paused", "pausing", "resuming"} {
		insert(state)
		if err := f.Delete(ctx, f.a, "app"); !errors.Is(err, build.ErrBusy) {
			t.Errorf("Delete with a sandbox that is %s = %v", state, err)
		}
	}
	insert("killed")
	if err := f.Delete(ctx, f.a, "app"); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Base(ctx, build.SandboxID(got.Build)); !errors.Is(err, sandbox.ErrNoTemplate) {
		t.Errorf("Base of a deleted template = %v", err)
	}
	if err := f.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(f.conf.Dir, "images", "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	// Its layer stays for the next build.
	if left, _ := filepath.Glob(filepath.Join(f.conf.Dir, "steps", "*")); len(left) != 1 {
		t.Errorf("layers: %v", left)
	}
}

// TestUnusedBuildsAreDeleted: an owner deletes what nothing needs, and nothing else: not what a
// tag names or a sandbox was started from, and nothing of another project.
func TestUnusedBuildsAreDeleted(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{})
	f.run()
	ctx := t.Context()
	var builds []string
	for _, n := range []string{"1", "2", "3"} {
		builds = append(builds, f.make(f.a, "app", build.Definition{FromTemplate: "base", Steps: steps([]string{"RUN", "write /f " + n})}).Build)
	}
	list := func(who auth.Principal) (out []string) {
		t.Helper()
		all, err := f.Unused(ctx, who)
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range all {
			if u.Name != "app" || u.Result.Bytes == 0 {
				t.Errorf("%+v", u)
			}
			out = append(out, u.ID)
		}
		return out
	}
	if got := list(f.a); len(got) != 0 {
		t.Errorf("builds that have just ended are called unused: %v", got)
	}
	f.exec(`update template_build set ended_at = ended_at - 3600000000`)
	f.exec(`insert into sandbox (id, project_id, template, state, reason, metadata, inbox_id, egress, options, execution, cpus, memory_mb, disk_mb, started_at, ends_at, paused_at, ended_at, restart, saved, server_id)
		values ('i1', '` + f.b.Project + `', '` + build.SandboxID(builds[1]) + `', 'paused', '', '{}', '', '{}', '{}', '', 1, 1, 1, 1, 1, 0, 0, 0, '', '')`)
	if got := list(f.a); !slices.Equal(got, builds[:1]) {
		t.Errorf("unused: %v, want %v", got, builds[:1])
	}
	if got := list(f.b); len(got) != 0 {
		t.Errorf("another project sees %v", got)
	}
	viewer := auth.Principal{Kind: auth.Person, Role: auth.Reviewer, ID: "vic", Project: f.a.Project}
	for name, tt := range map[string]struct {
		who  auth.Principal
		id   string
		want error
	}{
		"a paused sandbox needs it": {f.a, builds[1], build.ErrBusy},
		"a tag names it":            {f.a, builds[2], build.ErrBusy},
		"of another project":        {f.b, builds[0], build.ErrNoBuild},
		"not an owner":              {viewer, builds[0], auth.ErrForbidden},
		"no build":                  {f.a, "x", build.ErrNoBuild},
	} {
		if err := f.DeleteBuild(ctx, tt.who, tt.id); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if err := f.DeleteBuild(ctx, f.a, builds[0]); err != nil {
		t.Fatal(err)
	}
	if got := list(f.a); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
	if got := f.strings(`select object from audit_entry where verb = 'template.build_delete'`); len(got) != 1 {
		t.Errorf("entries of the record: %v", got)
	}
	for i, want := range []bool{false, true, true} {
		if _, err := f.Base(ctx, build.SandboxID(builds[i])); (err == nil) != want {
			t.Errorf("build %d: %v", i+1, err)
		}
	}
}

func TestQueueBoundsBuildsAndNewBuildReplacesOld(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{Builds: 2, BuildsPerProject: 1, Queue: 3})
	stop := f.run()
	ctx := t.Context()
	wait := build.Definition{FromTemplate: "base", Steps: steps([]string{"RUN", "wait"})}
	second := build.Definition{FromTemplate: "base", Steps: steps([]string{"RUN", "wait second"})}
	begin := func(who auth.Principal, name string, wait build.Definition) (string, error) {
		t.Helper()
		tm, b, err := f.Create(ctx, who, build.Request{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		return b.ID, f.Start(ctx, who, tm.ID, b.ID, wait)
	}
	first, err := begin(f.a, "one", wait)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := f.Status(ctx, f.a, "one", first, build.Logs{}); err != nil || s.State != build.Building {
		t.Errorf("right after the start: %+v, %v", s, err)
	}
	if err := f.Start(ctx, f.a, "one", first, wait); !errors.Is(err, build.ErrNotWaiting) {
		t.Errorf("a second start = %v", err)
	}
	if _, err := begin(f.a, "one", second); err != nil {
		t.Fatal(err)
	}
	if s := f.wait(f.a, "one", first); s.State != build.Failed || !strings.Contains(s.Failure.Message, "build was cancelled") {
		t.Errorf("replaced build = %+v", s.Failure)
	}
	if err := f.Delete(ctx, f.a, "one"); !errors.Is(err, build.ErrBusy) {
		t.Errorf("Delete while it is built = %v", err)
	}
	for !slices.Contains(f.machine.commands(), "wait second") { // until it has left the queue
		time.Sleep(time.Millisecond)
	}
	var queued []string
	for i := range 6 {
		id, err := begin(f.a, "q"+string(rune('a'+i)), wait)
		if err == nil {
			queued = append(queued, id)
		} else if !errors.Is(err, build.ErrFull) {
			t.Errorf("Start = %v", err)
		}
	}
	if len(queued) != 3 {
		t.Errorf("%d builds were queued, want 3", len(queued))
	}
	if _, err := begin(f.b, "other", wait); err != nil {
		t.Error(err)
	}
	stop()
	for _, s := range f.strings(`select state from template_build where started_at > 0`) {
		if s != string(build.Failed) {
			t.Errorf("after the stop a build is %s", s)
		}
	}
	f.machine.mu.Lock()
	defer f.machine.mu.Unlock()
	if f.machine.most > 2 || f.machine.open != 0 {
		t.Errorf("%d benches at once and %d left, want 2 at most and 0", f.machine.most, f.machine.open)
	}
}

func TestLogIsBounded(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{MaxLogLines: 100})
	f.run()
	var run [][]string
	for range 200 {
		run = append(run, []string{"RUN", "print \x1b[31mred\x00 " + strings.Repeat("x", 4<<10)})
	}
	got := f.make(f.a, "app", build.Definition{FromTemplate: "base", Steps: steps(run...)})
	if n := len(f.strings(`select message from template_log`)); got.State != build.Ready || n > 100 || n < 80 {
		t.Errorf("%s with %d lines", got.State, n)
	}
	log := strings.Join(f.strings(`select message from template_log order by n`), "\n")
	if !strings.Contains(log, "the log is full") || !strings.Contains(log, "Finalizing") || strings.ContainsAny(log, "\x1b\x00") {
		t.Errorf("the log:\n%.2000s", log)
	}
	all, err := f.Status(t.Context(), f.a, "app", got.Build, build.Logs{Level: "warn"})
	if err != nil || len(all.Entries) != 1 {
		t.Errorf("warnings = %+v, %v", all.Entries, err)
	}
	some, err := f.Status(t.Context(), f.a, "app", got.Build, build.Logs{Offset: 2, Limit: 3})
	if err != nil || len(some.Entries) != 3 || some.Entries[0].Message != got.Entries[2].Message {
		t.Errorf("a part of the log = %+v, %v", some.Entries, err)
	}
}

func TestStartCommandThatFailsLeavesNothing(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{})
	f.run()
	f.machine.snapshot = func(_ context.Context, output func(string)) error {
		output("[start] [stderr]: no port")
		return errors.Join(sandbox.ErrInvalid, errors.New("start command failed: exit status 1"))
	}
	got := f.make(f.a, "app", build.Definition{FromTemplate: "base", StartCmd: "serve", Steps: steps([]string{"RUN", "write /one 1"})})
	if got.State != build.Failed || got.Failure.Step != "finalize" || !strings.Contains(got.Failure.Message, "start command failed") {
		t.Errorf("build = %+v", got.Failure)
	}
	if _, err := f.Base(t.Context(), build.SandboxID(got.Build)); !errors.Is(err, sandbox.ErrNoTemplate) {
		t.Errorf("Base of a failed build = %v", err)
	}
	if err := f.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(f.conf.Dir, "images", "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestUploadsAreBounded(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{MaxUploadMB: 1, MaxUploadsMB: 2})
	ctx := t.Context()
	if _, _, err := f.Create(ctx, f.a, build.Request{Name: "app"}); err != nil {
		t.Fatal(err)
	}
	put := func(hash string, size int64, text string) error {
		return f.Upload(ctx, f.a, "app", hash, size, strings.NewReader(text))
	}
	h := func(c string) string { return strings.Repeat(c, 64) }
	mb := strings.Repeat("x", 1<<20)
	for _, c := range []struct {
		hash string
		size int64
		text string
		want error
	}{
		{"../../../../etc/passwd", 1, "x", build.ErrInvalid},
		{h("a")[1:], 1, "x", build.ErrInvalid},
		{h("a"), -1, "x", build.ErrInvalid},
		{h("a"), 5, "xxx", build.ErrInvalid},
		{h("a"), 2, "xxx", build.ErrInvalid},
		{h("a"), 1<<20 + 1, "", build.ErrTooLarge},
		{h("a"), 1 << 20, mb, nil},
		{h("b"), 1 << 20, mb, nil},
		{h("c"), 1 << 20, mb, build.ErrFull},
	} {
		if err := put(c.hash, c.size, c.text); !errors.Is(err, c.want) {
			t.Errorf("Upload(%.10s, %d) = %v, want %v", c.hash, c.size, err, c.want)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(f.conf.Dir, "work", "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestServerWithoutSandboxesBuildsNothing(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{Off: true})
	tm, b, err := f.Create(t.Context(), f.a, build.Request{Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	// It would wait for ever.
	if err := f.Start(t.Context(), f.a, tm.ID, b.ID, build.Definition{FromTemplate: "base"}); !errors.Is(err, build.ErrInvalid) {
		t.Errorf("Start = %v", err)
	}
}

func TestProjectsDiskIsBounded(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{MaxProjectMB: 1, BuildTime: time.Hour})
	f.run()
	big := func(n string) build.Definition {
		return build.Definition{FromTemplate: "base", Steps: steps([]string{"RUN", "write /" + n + " " + strings.Repeat(n, 250_000)}, []string{"RUN", "exit 1"})}
	}
	// Layers of builds that failed make room for newer ones, once no build can use them.
	var full int
	for _, n := range []string{"a", "b", "c", "d", "e", "f"} {
		if s := f.make(f.a, "app", big(n)); strings.Contains(s.Failure.Message, "of the allowed 1") {
			full++
		}
	}
	if full == 0 {
		t.Error("six layers of a quarter of a mebibyte fit into one")
	}
	f.exec(`update template_layer set used_at = used_at - 7200000000`) // two hours
	if s := f.make(f.a, "app", big("g")); s.Failure.Step != "2" {
		t.Errorf("after a while: %+v", s.Failure)
	}
	// Another project has room of its own.
	if s := f.make(f.b, "app", big("a")); s.Failure.Step != "2" {
		t.Errorf("another project: %+v", s.Failure)
	}
}

func TestSweepKeepsWhatIsNeeded(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t), build.Config{})
	f.run()
	ctx := t.Context()
	define := func(n string) build.Definition {
		return build.Definition{FromTemplate: "base", Steps: steps([]string{"RUN", "write /f " + n})}
	}
	var builds []string
	for _, n := range []string{"1", "2", "3", "4", "5"} {
		builds = append(builds, f.make(f.a, "app", define(n)).Build)
	}
	if _, err := f.AssignTags(ctx, f.a, "app:"+builds[0], []string{"keep"}); err != nil {
		t.Fatal(err)
	}
	f.make(f.a, "lost", build.Definition{FromTemplate: "base", Steps: steps([]string{"RUN", "write /g 6"}, []string{"RUN", "exit 1"})})
	f.exec(`update template_build set created_at = created_at - 2592000000000, ended_at = ended_at - 2592000000000`)
	f.exec(`update template_layer set used_at = used_at - 2592000000000`)
	if err := f.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	// Those with the tags keep and default, and the two newest others.
	for i, want := range []bool{true, false, true, true, true} {
		if _, err := f.Base(ctx, build.SandboxID(builds[i])); (err == nil) != want {
			t.Errorf("build %d: %v", i+1, err)
		}
	}
	shared := 0 // joined images need the one that they were started from
	for _, image := range f.strings(`select image from template_build where image <> ''`) {
		path := filepath.Join(f.conf.Dir, "images", image+".erofs")
		tree, err := rootfs.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		tree.Close()
		if parts, _ := erofs.Parts(path); len(parts) > 0 {
			shared = len(parts)
		}
	}
	for dir, want := range map[string]int{"images": 4 + shared, "steps": 4} {
		if left, _ := filepath.Glob(filepath.Join(f.conf.Dir, dir, "*")); len(left) != want {
			t.Errorf("%d files in %s, want %d", len(left), dir, want)
		}
	}
	if err := f.Delete(ctx, f.a, "app"); err != nil {
		t.Fatal(err)
	}
	if err := f.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(f.conf.Dir, "images", "*")); len(left) != 0 {
		t.Errorf("left of a deleted template: %v", left)
	}
}
