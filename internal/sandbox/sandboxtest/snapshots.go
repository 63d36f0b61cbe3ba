package sandboxtest

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"postern/internal/sandbox"
)

// write, read and the functions below are steps of a test inside a sandbox.
func write(t *testing.T, in Inside, path, content string) {
	t.Helper()
	if err := in.Write(path, content); err != nil {
		t.Fatalf("write %s: %v", path, err)
	}
}

func read(t *testing.T, in Inside, path, want string) {
	t.Helper()
	if got, err := in.Read(path); err != nil || got != want {
		t.Errorf("read %s: got %q, %v, want %q", path, got, err, want)
	}
}

func missing(t *testing.T, in Inside, path string) {
	t.Helper()
	if got, err := in.Read(path); err == nil {
		t.Errorf("read %s: got %q, want that it is not there", path, got)
	}
}

func remember(t *testing.T, in Inside, v string) {
	t.Helper()
	if err := in.Remember(v); err != nil {
		t.Fatalf("remember %q: %v", v, err)
	}
}

func remembered(t *testing.T, in Inside, want string) {
	t.Helper()
	if got, err := in.Remembered(); err != nil || got != want {
		t.Errorf("remembered: got %q, %v, want %q", got, err, want)
	}
}

func hostname(t *testing.T, in Inside, want string) {
	t.Helper()
	if got, err := in.Hostname(); err != nil || got != want {
		t.Errorf("host name: got %q, %v, want %q", got, err, want)
	}
}

// save saves to a new directory and returns its path.
func save(t *testing.T, r sandbox.Runtime, id string, o sandbox.SaveOptions) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "snapshot")
	if err := r.Save(t.Context(), id, dir, o); err != nil {
		t.Fatalf("save: %v", err)
	}
	// Nobody else may read what was in a sandbox's memory.
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		i, err := e.Info()
		if err == nil && i.Mode().Perm()&0o077 != 0 {
			t.Errorf("mode of %s: got %v, want that it is for its owner alone", path, i.Mode())
		}
		return err
	})
	if err != nil {
		t.Errorf("look at the snapshot: %v", err)
	}
	if es, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(es) != 1 {
		t.Errorf("beside the snapshot: got %v, %v, want it alone", es, err)
	}
	return dir
}

// from starts id from a snapshot.
func (subject Subject) from(t *testing.T, r sandbox.Runtime, id, dir, host string) Inside {
	t.Helper()
	s := subject.Spec(t, id)
	s.From, s.Hostname = dir, host
	subject.start(t, r, s)
	if err := s.Link.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the link after Start: got %v, want that it is closed", err)
	}
	return subject.Inside(t, id)
}

func stop(t *testing.T, r sandbox.Runtime, id string) {
	t.Helper()
	if err := r.Stop(t.Context(), id); err != nil {
		t.Fatalf("stop: %v", err)
	}
}

func (subject Subject) testSnapshots(t *testing.T) {
	t.Run("save and go on", func(t *testing.T) {
		r := subject.Open(t)
		s := subject.start(t, r, subject.Spec(t, NewID()))
		in := subject.Inside(t, s.ID)
		remember(t, in, "first")
		write(t, in, "/etc/file", "first")
		dir := save(t, r, s.ID, sandbox.SaveOptions{Keep: true})
		lives(t, r, s.ID)
		remembered(t, in, "first")
		remember(t, in, "second")
		write(t, in, "/etc/file", "second")
		write(t, in, "/etc/other", "second")

		// Two of one snapshot, beside the one that it was taken of.
		ids := []string{NewID(), NewID()}
		var ins []Inside
		for _, id := range ids {
			in := subject.from(t, r, id, dir, "host-"+id[:4])
			hostname(t, in, "host-"+id[:4])
			remembered(t, in, "first")
			read(t, in, "/etc/file", "first")
			missing(t, in, "/etc/other")
			remember(t, in, id)
			write(t, in, "/etc/file", id)
			write(t, in, "/etc/of-"+id, id)
			ins = append(ins, in)
		}
		for n, id := range ids {
			remembered(t, ins[n], id)
			read(t, ins[n], "/etc/file", id)
			missing(t, ins[n], "/etc/of-"+ids[1-n])
		}
		remembered(t, in, "second")
		read(t, in, "/etc/file", "second")
		missing(t, in, "/etc/of-"+ids[0])

		// One that was restored can be saved again.
		again := save(t, r, ids[0], sandbox.SaveOptions{Keep: true, Brief: true})
		third := subject.from(t, r, NewID(), again, "third")
		remembered(t, third, ids[0])
		read(t, third, "/etc/of-"+ids[0], ids[0])
	})

	t.Run("save and end", func(t *testing.T) {
		r := subject.Open(t)
		s := subject.start(t, r, subject.Spec(t, NewID()))
		in := subject.Inside(t, s.ID)
		write(t, in, "/etc/gone", "soon")
		for n, v := range []string{"a", "b", "c"} {
			remember(t, in, v)
			write(t, in, "/etc/"+v, v)
			if err := in.Remove("/etc/gone"); n == 0 && err != nil {
				t.Fatalf("remove: %v", err)
			}
			ends := make(chan string, 1)
			go func() {
				reason, err := waitForEnd(context.WithoutCancel(t.Context()), r, s.ID)
				if err != nil {
					t.Errorf("wait: %v", err)
				}
				ends <- reason
			}()
			waiting(t, 1)
			dir := save(t, r, s.ID, sandbox.SaveOptions{})
			select {
			case reason := <-ends:
				if reason != "saved" {
					t.Errorf("wait: got %q, want %q", reason, "saved")
				}
			case <-time.After(time.Minute):
				t.Fatal("the sandbox goes on after it was saved")
			}
			if err := r.Save(t.Context(), s.ID, dir+"-2", sandbox.SaveOptions{}); !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("save what has ended: got %v, want %v", err, sandbox.ErrNotFound)
			}
			stop(t, r, s.ID)
			in = subject.from(t, r, s.ID, dir, "box")
			remembered(t, in, v)
			read(t, in, "/etc/"+v, v)
			missing(t, in, "/etc/gone")
			if err := os.RemoveAll(dir); err != nil { // nobody needs it after the start
				t.Error(err)
			}
			remembered(t, in, v)
		}
		read(t, in, "/etc/a", "a")
	})

	t.Run("save files only", func(t *testing.T) {
		for _, keep := range []bool{true, false} {
			r := subject.Open(t)
			s := subject.start(t, r, subject.Spec(t, NewID()))
			in := subject.Inside(t, s.ID)
			remember(t, in, "lost")
			write(t, in, "/etc/kept", "kept")
			write(t, in, "/etc/removed", "removed")
			if err := in.Remove("/etc/removed"); err != nil {
				t.Fatal(err)
			}
			dir := save(t, r, s.ID, sandbox.SaveOptions{FilesOnly: true, Keep: keep})
			if keep {
				lives(t, r, s.ID)
				remembered(t, in, "lost")
			} else if _, err := r.Usage(t.Context(), s.ID); !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("usage of what has ended: got %v, want %v", err, sandbox.ErrNotFound)
			}
			for range 2 {
				in := subject.from(t, r, NewID(), dir, "booted")
				hostname(t, in, "booted")
				remembered(t, in, "")
				read(t, in, "/etc/kept", "kept")
				missing(t, in, "/etc/removed")
				write(t, in, "/etc/kept", "of one alone")
			}
		}
	})

	t.Run("a save that fails leaves nothing", func(t *testing.T) {
		r := subject.Open(t)
		s := subject.start(t, r, subject.Spec(t, NewID()))
		in := subject.Inside(t, s.ID)
		remember(t, in, "here")
		for _, o := range []sandbox.SaveOptions{{}, {Keep: true}, {FilesOnly: true}, {FilesOnly: true, Keep: true}} {
			dir := t.TempDir()
			if err := r.Save(t.Context(), s.ID, dir, o); !errors.Is(err, fs.ErrExist) {
				t.Errorf("save to what is there: got %v, want %v", err, fs.ErrExist)
			}
			empty(t, dir)
			if err := r.Save(t.Context(), s.ID, dir+"/no/snapshot", o); err == nil {
				t.Error("save to a directory that is not there: got no error")
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := r.Save(ctx, s.ID, dir+"/snapshot", o); !errors.Is(err, context.Canceled) {
				t.Errorf("save without time: got %v, want %v", err, context.Canceled)
			}
			empty(t, dir)
			lives(t, r, s.ID)
			remembered(t, in, "here")
		}
	})

	t.Run("a start from no snapshot leaves nothing", func(t *testing.T) {
		r := subject.Open(t)
		for _, dir := range []string{t.TempDir(), t.TempDir() + "/missing"} {
			s := subject.Spec(t, NewID())
			s.From = dir
			if err := r.Start(t.Context(), s); err == nil {
				t.Errorf("start from %s: got no error", dir)
			}
			ids, err := r.List(t.Context())
			if err != nil || len(ids) != 0 {
				t.Errorf("list: got %v, %v, want none", ids, err)
			}
		}
	})

	t.Run("another process saves it", func(t *testing.T) {
		first := subject.Open(t)
		s := subject.start(t, first, subject.Spec(t, NewID()))
		in := subject.Inside(t, s.ID)
		remember(t, in, "by another")
		second := subject.Open(t)
		if _, err := second.Usage(t.Context(), s.ID); err != nil {
			t.Errorf("usage: %v", err)
		}
		kept := save(t, second, s.ID, sandbox.SaveOptions{Keep: true})
		lives(t, second, s.ID)
		remembered(t, in, "by another")
		files := save(t, second, s.ID, sandbox.SaveOptions{FilesOnly: true, Keep: true})
		lives(t, second, s.ID)
		ended := save(t, second, s.ID, sandbox.SaveOptions{})
		stop(t, second, s.ID)
		stop(t, first, s.ID)
		for dir, want := range map[string]string{kept: "by another", ended: "by another", files: ""} {
			remembered(t, subject.from(t, second, NewID(), dir, "box"), want)
		}
	})
}

func (subject Subject) testMounts(t *testing.T) {
	t.Run("mounts", func(t *testing.T) {
		r := subject.Open(t)
		rw, ro := t.TempDir(), t.TempDir()
		for _, d := range []string{rw, ro} {
			if err := os.WriteFile(filepath.Join(d, "before"), []byte("before"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		mounts := []sandbox.Mount{
			{Source: rw, Destination: "/mnt/rw"},
			{Source: ro, Destination: "/data/read/only", ReadOnly: true},
		}
		check := func(in Inside, mark string) {
			t.Helper()
			read(t, in, "/mnt/rw/before", "before")
			read(t, in, "/data/read/only/before", "before")
			write(t, in, "/mnt/rw/"+mark, mark)
			if b, err := os.ReadFile(filepath.Join(rw, mark)); err != nil || string(b) != mark {
				t.Errorf("on the host: got %q, %v, want %q", b, err, mark)
			}
			if err := in.Write("/data/read/only/"+mark, mark); err == nil {
				t.Error("write to a read-only mount: got no error")
			}
			if err := os.WriteFile(filepath.Join(ro, mark), []byte(mark), 0o600); err != nil {
				t.Fatal(err)
			}
			read(t, in, "/data/read/only/"+mark, mark)
		}
		with := func(id, from string, mounts []sandbox.Mount) sandbox.Spec {
			s := subject.Spec(t, id)
			s.From, s.Mounts = from, mounts
			return s
		}
		refused := func(from string, mounts []sandbox.Mount) {
			t.Helper()
			if err := r.Start(t.Context(), with(NewID(), from, mounts)); !errors.Is(err, sandbox.ErrInvalid) {
				t.Errorf("start from memory with other mounts: got %v, want %v", err, sandbox.ErrInvalid)
			}
		}

		s := subject.start(t, r, with(NewID(), "", mounts))
		in := subject.Inside(t, s.ID)
		check(in, "first")
		if _, err := os.Lstat(filepath.Join(s.Rootfs, "data")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the root file system that all share: got %v, want that nothing was made in it", err)
		}
		remember(t, in, "mounted")
		files := save(t, r, s.ID, sandbox.SaveOptions{FilesOnly: true, Keep: true})
		dir := save(t, r, s.ID, sandbox.SaveOptions{})
		stop(t, r, s.ID)

		subject.start(t, r, with(s.ID, dir, mounts))
		in = subject.Inside(t, s.ID)
		remembered(t, in, "mounted")
		check(in, "second")
		stop(t, r, s.ID)
		if b, err := os.ReadFile(filepath.Join(rw, "second")); err != nil || string(b) != "second" {
			t.Errorf("after the stop: got %q, %v, want what was written", b, err)
		}

		refused(dir, nil)
		refused(dir, mounts[:1])
		refused(dir, append([]sandbox.Mount{{Source: rw, Destination: "/mnt/more"}}, mounts...))
		refused(dir, []sandbox.Mount{mounts[0], {Source: ro, Destination: "/data/read/only"}})

		other := subject.start(t, r, with(NewID(), files, mounts[1:]))
		in = subject.Inside(t, other.ID)
		read(t, in, "/data/read/only/before", "before")
		missing(t, in, "/mnt/rw/before")
	})
}

func (subject Subject) testUsage(t *testing.T) {
	t.Run("usage", func(t *testing.T) {
		r := subject.Open(t)
		s := subject.start(t, r, subject.Spec(t, NewID()))
		in := subject.Inside(t, s.ID)
		before, err := r.Usage(t.Context(), s.ID)
		if err != nil || before.CPU <= 0 || before.Memory <= 0 || before.Disk < 0 {
			t.Errorf("usage: got %+v, %v, want something of each", before, err)
		}
		content := make([]byte, 64<<10)
		for n := range content {
			content[n] = 'a' + byte(n%7)
		}
		write(t, in, "/etc/large", string(content))
		after, err := r.Usage(t.Context(), s.ID)
		if err != nil || after.CPU < before.CPU || after.Disk < before.Disk+int64(len(content)) {
			t.Errorf("usage after writing 64 KiB: got %+v, %v, before %+v", after, err, before)
		}
		if err := in.Remove("/etc/large"); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) { // it may take its time
			u, err := r.Usage(t.Context(), s.ID)
			if err != nil {
				t.Fatalf("usage: %v", err)
			}
			if u.Disk < after.Disk {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("disk after removing the file: got %d bytes, want less than %d", u.Disk, after.Disk)
			}
		}
	})
}
