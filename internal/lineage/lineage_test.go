package lineage_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"postern/internal/lineage"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A server is a data directory on a machine, whose files are below root.
type server struct {
	t    *testing.T
	db   *store.DB
	conf lineage.Config
}

func newServer(t *testing.T, db *store.DB) *server {
	t.Helper()
	s := &server{t: t, db: db, conf: lineage.Config{Data: t.TempDir(), Root: t.TempDir(), Original: true}}
	s.fact("etc/machine-id", "one")
	s.fact("sys/class/dmi/id/product_uuid", "one")
	s.fact("sys/firmware/qemu_fw_cfg/by_name/etc/vmgenid_guid/raw", "one")
	return s
}

func (s *server) fact(path, value string) {
	s.t.Helper()
	path = filepath.Join(s.conf.Root, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(value), 0o600)); err != nil {
		s.t.Fatal(err)
	}
}

// copied returns why a start takes the database or the directory for a copy, or "".
func (s *server) copied() string {
	s.t.Helper()
	l, err := lineage.Look(s.t.Context(), s.db, s.conf)
	if err != nil {
		s.t.Fatal(err)
	}
	return l.Copy()
}

// start starts the server, and returns why it takes the database for a copy. It runs until stop.
func (s *server) start() (why string, stop func()) {
	s.t.Helper()
	l, err := lineage.Look(s.t.Context(), s.db, s.conf)
	if err != nil {
		s.t.Fatal(err)
	}
	h, err := l.Keep(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	return l.Copy(), func() {
		if err := h.Close(s.t.Context()); err != nil {
			s.t.Error(err)
		}
	}
}

// restart starts the server and stops it.
func (s *server) restart() string {
	s.t.Helper()
	why, stop := s.start()
	stop()
	return why
}

func (s *server) exec(query string) {
	s.t.Helper()
	err := s.db.Update(s.t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(s.t.Context(), query)
		return err
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

// TestCopiesAreRecognised changes one thing at a time between two starts.
func TestCopiesAreRecognised(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(s *server)
		want   string // in the reason; empty: it is the original
	}{
		{"nothing", func(*server) {}, ""},
		{"an older database", func(s *server) {
			s.exec(`create table older as select * from lineage`)
			s.restart()
			s.exec(`delete from lineage`)
			s.exec(`insert into lineage select * from older`)
		}, "not the one with which"},
		{"a database from before the first start", func(s *server) { s.exec(`delete from lineage`) }, "not the one with which"},
		{"a backup", func(s *server) {
			if err := lineage.Stamp(s.t.Context(), s.db); err != nil {
				s.t.Fatal(err)
			}
		}, "not the one with which"},
		{"a copied directory", func(s *server) {
			to := filepath.Join(s.t.TempDir(), "data")
			if out, err := exec.Command("cp", "-a", s.conf.Data, to).CombinedOutput(); err != nil {
				s.t.Fatalf("%v: %s", err, out)
			}
			s.conf.Data = to
		}, "data directory was copied"},
		{"a new directory", func(s *server) { s.conf.Data = s.t.TempDir() }, "never been used"},
		{"a moved directory", func(s *server) {
			to := s.conf.Data + "-moved"
			if err := os.Rename(s.conf.Data, to); err != nil {
				s.t.Fatal(err)
			}
			s.t.Cleanup(func() { os.RemoveAll(to) })
			s.conf.Data = to
		}, ""},
		{"another machine", func(s *server) { s.fact("etc/machine-id", "two") }, "machine-id"},
		{"another firmware", func(s *server) { s.fact("sys/class/dmi/id/product_uuid", "two") }, "firmware's UUID"},
		{"another generation of the virtual machine", func(s *server) { s.fact("sys/firmware/qemu_fw_cfg/by_name/etc/vmgenid_guid/raw", "two") }, "generation"},
		{"a machine that tells nothing", func(s *server) { s.conf.Root = s.t.TempDir() }, ""},
		{"a cut mark", func(s *server) {
			if err := os.Truncate(filepath.Join(s.conf.Data, "lineage", "mark.json"), 20); err != nil {
				s.t.Fatal(err)
			}
		}, "not the one with which"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				s := newServer(t, db)
				if why := s.restart(); why != "" {
					t.Fatalf("a new server: %s", why)
				}
				if why := s.restart(); why != "" {
					t.Fatalf("the second start: %s", why)
				}
				tt.change(s)
				if why := s.copied(); tt.want == "" && why != "" || !strings.Contains(why, tt.want) {
					t.Errorf("got %q, want %q", why, tt.want)
				}
				s.restart()
				if why := s.copied(); why != "" {
					t.Errorf("after it was dealt with: %s", why)
				}
			})
		})
	}
}

// TestReplacedFileIsRecognised puts a copy of the database in its place that has the nonce
// of the last start.
func TestReplacedFileIsRecognised(t *testing.T) {
	file := filepath.Join(t.TempDir(), "postern.db")
	open := func() *server {
		db, err := store.Open(t.Context(), file, "test")
		if err != nil {
			t.Fatal(err)
		}
		s := newServer(t, db)
		s.conf.File = file
		return s
	}
	s := open()
	data, root := s.conf.Data, s.conf.Root
	s.restart()
	if err := s.db.Close(); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("sh", "-c", fmt.Sprintf("cp %[1]s %[1]s.copy && mv %[1]s.copy %[1]s", file)).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s = open()
	defer s.db.Close()
	s.conf.Data, s.conf.Root = data, root
	if why := s.copied(); !strings.Contains(why, "file was replaced") {
		t.Errorf("got %q", why)
	}
}

// TestInterruptedStartIsNoCopy stops between the directory and the database, and between
// the database and the directory.
func TestInterruptedStartIsNoCopy(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s := newServer(t, db)
		s.restart()
		mark := filepath.Join(s.conf.Data, "lineage", "mark.json")
		before, err := os.ReadFile(mark)
		if err != nil {
			t.Fatal(err)
		}
		restore := storetest.FailCommits(t, db, "lineage")
		l, err := lineage.Look(t.Context(), db, s.conf)
		if err != nil || l.Copy() != "" {
			t.Fatalf("%v, %s", err, l.Copy())
		}
		if _, err := l.Keep(t.Context()); err == nil {
			t.Fatal("kept although the commit failed")
		}
		restore()
		between, err := os.ReadFile(mark)
		if err != nil || string(between) == string(before) {
			t.Fatalf("the directory was not written first: %v", err)
		}
		if why := s.restart(); why != "" {
			t.Errorf("stopped before the commit: %s", why)
		}
		// Stopped after the commit: the directory has what it had in between.
		after, err := os.ReadFile(mark)
		if err != nil {
			t.Fatal(err)
		}
		halfway := strings.Replace(string(after), `"nonce": "`, `"nonce": "former", "next": "`, 1)
		if err := os.WriteFile(mark, []byte(halfway), 0o600); err != nil {
			t.Fatal(err)
		}
		if why := s.copied(); why != "" {
			t.Errorf("stopped after the commit: %s", why)
		}
	})
}

// TestServersJoinADatabaseOnWhichOneRuns: another data directory is a second server while the
// first one runs, and a restored one while none does.
func TestServersJoinADatabaseOnWhichOneRuns(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		if !db.Concurrent() {
			return // a SQLite database has one server
		}
		one, other := newServer(t, db), newServer(t, db)
		_, stop := one.start()
		if why := other.restart(); why != "" {
			t.Errorf("joining: %s", why)
		}
		stop()
		for _, s := range []*server{one, other} {
			if why := s.restart(); why != "" {
				t.Errorf("the next start: %s", why)
			}
		}
		if why := newServer(t, db).copied(); !strings.Contains(why, "no other server is running") {
			t.Errorf("while none runs: %q", why)
		}
		// What a restore from a dump does: the same rows in another table.
		one.exec(`create table dumped (like lineage including all)`)
		one.exec(`insert into dumped select * from lineage`)
		one.exec(`drop table lineage`)
		one.exec(`alter table dumped rename to lineage`)
		if why := one.copied(); !strings.Contains(why, "restored from a dump") {
			t.Errorf("after a dump: %q", why)
		}
	})
}

// TestUpgradesAreNoCopies: a database without marks of an earlier version has worked with this
// directory if the directory says so.
func TestUpgradesAreNoCopies(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s := newServer(t, db)
		s.conf.Original = false
		if why := s.copied(); why == "" {
			t.Error("a database with actions beside an empty directory is no copy")
		}
		s.conf.Original = true
		if why := s.restart(); why != "" {
			t.Errorf("an upgrade: %s", why)
		}
	})
}

// TestBlobsBelongToOneDatabase: a server with files of its own is refused.
func TestBlobsBelongToOneDatabase(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		dir := t.TempDir()
		match := func(dir string, accept bool) error {
			t.Helper()
			b, err := store.OpenBlobs(dir)
			if err != nil {
				t.Fatal(err)
			}
			return lineage.Match(t.Context(), db, "blobs", b, accept)
		}
		for range 2 {
			if err := match(dir, false); err != nil {
				t.Fatal(err)
			}
		}
		to := filepath.Join(t.TempDir(), "blobs")
		if out, err := exec.Command("cp", "-a", dir, to).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		link := filepath.Join(t.TempDir(), "blobs")
		if err := os.Symlink(dir, link); err != nil {
			t.Fatal(err)
		}
		for _, same := range []string{to, link} {
			if err := match(same, false); err != nil {
				t.Errorf("a copy or a link: %v", err)
			}
		}
		other := t.TempDir()
		if err := match(other, false); !errors.Is(err, lineage.ErrOtherBlobs) {
			t.Errorf("another directory: %v", err)
		}
		if err := match(other, true); err != nil {
			t.Errorf("accepted: %v", err)
		}
		if err := match(other, false); err != nil {
			t.Errorf("afterwards: %v", err)
		}
	})
}
