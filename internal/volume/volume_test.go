package volume

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// newStore returns a store of small volumes, and a principal of its project. At the
// end of the test it unmounts all of them.
func newStore(t testing.TB, db *store.DB, conf Config) (*Store, auth.Principal) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("volumes are mounted, which needs root")
	}
	if conf.Dir == "" {
		conf.Dir = filepath.Join(t.TempDir(), "volumes")
	}
	conf.Key = bytes.Repeat([]byte{7}, 32)
	if conf.SizeMB == 0 {
		conf.SizeMB = 32
	}
	s, err := New(slog.New(slog.NewTextHandler(t.Output(), nil)), db, conf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ids, err := mountsBelow(s.conf.Dir)
		if err != nil {
			t.Error(err)
		}
		for _, id := range ids {
			if err := s.unmount(id); err != nil {
				t.Error(err)
			}
		}
	})
	return s, project(t, db)
}

func project(t testing.TB, db *store.DB) auth.Principal {
	t.Helper()
	who := auth.Principal{Kind: auth.Project, ID: "crd_1"}
	err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
		who.Project, _, err = auth.NewProject(t.Context(), tx, "p"+rand.Text())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return who
}

func create(t *testing.T, s *Store, who auth.Principal, name string) Volume {
	t.Helper()
	v, err := s.Create(t.Context(), who, name)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func content(t *testing.T, s *Store, id string) *Content {
	t.Helper()
	c, err := s.Content(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func write(t *testing.T, c *Content, p, text string) {
	t.Helper()
	if _, err := c.Write(p, strings.NewReader(text), Attributes{}, true); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, c *Content, p string) string {
	t.Helper()
	f, _, err := c.Open(p)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestLifeOfAVolume(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s, who := newStore(t, db, Config{MaxVolumes: 2})
		ctx := t.Context()
		v := create(t, s, who, "data_1-A")
		if got, err := s.Get(ctx, who, v.ID); err != nil || got.Name != v.Name || got.SizeMB != 32 || !got.Created.Equal(v.Created) {
			t.Errorf("get: %+v, %v, want %+v", got, err, v)
		}
		other := project(t, db)
		if _, err := s.Get(ctx, other, v.ID); !errors.Is(err, ErrNotFound) {
			t.Errorf("another project gets it: %v", err)
		}
		if err := s.Delete(ctx, other, v.ID); !errors.Is(err, ErrNotFound) {
			t.Errorf("another project deletes it: %v", err)
		}
		if _, err := s.Mount(ctx, other.Project, "i1", v.Name); !errors.Is(err, ErrNotFound) {
			t.Errorf("another project mounts it: %v", err)
		}
		if _, err := s.Create(ctx, who, v.Name); !errors.Is(err, ErrExists) {
			t.Errorf("the same name again: %v", err)
		}
		create(t, s, other, v.Name) // each project has its own names
		w := create(t, s, who, "second")
		if _, err := s.Create(ctx, who, "third"); !errors.Is(err, ErrTooMany) {
			t.Errorf("over the limit: %v", err)
		}
		list, err := s.List(ctx, who)
		if err != nil || len(list) != 2 || list[0].ID != v.ID || list[1].ID != w.ID {
			t.Errorf("list: %+v, %v", list, err)
		}

		// In use by two sandboxes, one of which asked twice.
		for _, sb := range []string{"i1", "i2", "i2"} {
			m, err := s.Mount(ctx, who.Project, sb, v.Name)
			if err != nil {
				t.Fatal(err)
			}
			if st, err := os.Stat(m.Source); err != nil || !st.IsDir() || m.Volume != v.ID {
				t.Fatalf("mount: %+v, %v", m, err)
			}
		}
		for _, sb := range []string{"i1", "i2"} {
			if err := s.Delete(ctx, who, v.ID); !errors.Is(err, ErrInUse) {
				t.Errorf("delete before %s lets go: %v", sb, err)
			}
			if err := s.Unmounted(ctx, sb); err != nil {
				t.Error(err)
			}
		}
		if err := s.Delete(ctx, who, v.ID); err != nil {
			t.Errorf("delete: %v", err)
		}
		if _, err := os.Stat(filepath.Join(s.conf.Dir, v.ID)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("its directory after delete: %v", err)
		}
		if err := s.Delete(ctx, who, v.ID); !errors.Is(err, ErrNotFound) {
			t.Errorf("delete again: %v", err)
		}
		if _, err := s.Content(t.Context(), v.ID); err == nil {
			t.Error("the content of a deleted volume can be opened")
		}
		create(t, s, who, v.Name) // the name is free again
		if err := s.Unmounted(ctx, "i9"); err != nil {
			t.Errorf("a sandbox that had none: %v", err)
		}
	})
}

func TestCreateRefuses(t *testing.T) {
	db := storetest.SQLite(t)
	s, who := newStore(t, db, Config{})
	for _, name := range []string{"", "a b", "a/b", "..", "ü", "a.b", strings.Repeat("a", 129), "a\n", "a\x00"} {
		if _, err := s.Create(t.Context(), who, name); !errors.Is(err, ErrInvalid) {
			t.Errorf("name %q: %v", name, err)
		}
	}
	free, err := freeMB(s.conf.Dir)
	if err != nil {
		t.Fatal(err)
	}
	// The disk could keep one promise of this size and not two.
	big, who := newStore(t, db, Config{Dir: filepath.Join(t.TempDir(), "v"), SizeMB: free / 3 * 2, ReserveMB: 1})
	create(t, big, who, "one")
	if _, err := big.Create(t.Context(), who, "two"); !errors.Is(err, ErrFull) {
		t.Errorf("more than the disk can hold: %v", err)
	}
	list, err := big.List(t.Context(), who)
	if err != nil || len(list) != 1 || list[0].UsedMB > 64 {
		t.Errorf("after it: %+v, %v", list, err)
	}
}

func TestToken(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s, who := newStore(t, db, Config{})
		v, w := create(t, s, who, "a"), create(t, s, who, "b")
		if got, err := s.CheckToken(t.Context(), v.ID, s.Token(v.ID)); err != nil || got.ID != v.ID || got.Project != who.Project {
			t.Errorf("its own: %+v, %v", got, err)
		}
		for name, token := range map[string]auth.Secret{"of another volume": s.Token(w.ID), "none": "", "cut short": s.Token(v.ID)[:20]} {
			if _, err := s.CheckToken(t.Context(), v.ID, token); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := s.Delete(t.Context(), who, v.ID); err != nil {
			t.Fatal(err)
		}
		if _, err := s.CheckToken(t.Context(), v.ID, s.Token(v.ID)); !errors.Is(err, ErrNotFound) {
			t.Errorf("of a deleted volume: %v", err)
		}
		if fmt.Sprint(s.Token(v.ID)) != "[secret]" {
			t.Error("a token can be logged")
		}
	})
}

// TestRecover: a killed server leaves mounts, rows in intermediate states, and an
// upload.
func TestRecover(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s, who := newStore(t, db, Config{})
		ctx := t.Context()
		used, unused, half := create(t, s, who, "used"), create(t, s, who, "unused"), create(t, s, who, "half")
		for _, v := range []Volume{used, unused} {
			c, err := s.Content(t.Context(), v.ID)
			if err != nil {
				t.Fatal(err)
			}
			write(t, c, "/kept", v.Name)
			if _, err := unix.Openat(int(c.incoming.Fd()), "newHALF", unix.O_CREAT|unix.O_WRONLY, 0o600); err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
		for sb, name := range map[string]string{"ialive": "used", "idead": "unused"} {
			if _, err := s.Mount(ctx, who.Project, sb, name); err != nil {
				t.Fatal(err)
			}
		}
		if err := db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update volume set state = 'making' where id = $1`, half.ID)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		stray := filepath.Join(s.conf.Dir, "vol_"+rand.Text())
		if err := os.Mkdir(stray, 0o700); err != nil {
			t.Fatal(err)
		}

		next, _ := newStore(t, db, Config{Dir: s.conf.Dir})
		if err := next.Recover(ctx, []string{"ialive", "iother"}); err != nil {
			t.Fatal(err)
		}
		mounted, err := mountsBelow(s.conf.Dir)
		if err != nil || !cmp.Equal(mounted, []string{used.ID}) {
			t.Errorf("mounted: %v, %v, want the used one", mounted, err)
		}
		if err := next.Delete(ctx, who, used.ID); !errors.Is(err, ErrInUse) {
			t.Errorf("delete of the one in use: %v", err)
		}
		for _, v := range []Volume{used, unused} {
			c := content(t, next, v.ID)
			if got := read(t, c, "/kept"); got != v.Name {
				t.Errorf("%s: %q", v.Name, got)
			}
			left, err := c.incoming.Readdirnames(-1)
			if _, serr := c.incoming.Seek(0, io.SeekStart); err != nil || serr != nil || len(left) > 0 {
				t.Errorf("%s: half an upload is left: %v, %v, %v", v.Name, left, err, serr)
			}
		}
		if _, err := next.Get(ctx, who, half.ID); !errors.Is(err, ErrNotFound) {
			t.Errorf("the one half made: %v", err)
		}
		if _, err := os.Stat(filepath.Join(s.conf.Dir, half.ID)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("its directory: %v", err)
		}
		if _, err := os.Stat(stray); err != nil {
			t.Errorf("a directory that the database does not know was touched: %v", err)
		}

		// Another server of the database has another disk: it neither ends the
		// use of these nor sees them.
		other, _ := newStore(t, db, Config{Server: "srv_other", Dir: t.TempDir()})
		if err := other.Recover(ctx, nil); err != nil {
			t.Fatal(err)
		}
		if vs, err := other.List(ctx, who); err != nil || len(vs) != 0 {
			t.Errorf("another server lists %v, %v", vs, err)
		}
		if err := next.Delete(ctx, who, used.ID); !errors.Is(err, ErrInUse) {
			t.Errorf("delete of the one in use, after another server's start: %v", err)
		}
	})
}

// TestOneDevice: an image that another mount namespace still has mounted must
// not be attached a second time.
func TestOneDevice(t *testing.T) {
	s, who := newStore(t, storetest.SQLite(t), Config{})
	v := create(t, s, who, "a")
	c := content(t, s, v.ID)
	write(t, c, "/f", "x")
	// As a gofer has it: a second mount of the same, elsewhere.
	elsewhere := t.TempDir()
	if err := unix.Mount(c.disk.files(), elsewhere, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(elsewhere, unix.MNT_DETACH) })
	image, err := os.Open(c.disk.image())
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	before, err := attached(image)
	if err != nil || before == nil {
		t.Fatalf("its device: %v, %v", before, err)
	}
	before.Close()
	if err := s.unmount(v.ID); err != nil {
		t.Fatal(err)
	}
	again := content(t, s, v.ID)
	after, err := attached(image)
	if err != nil || after == nil || after.Name() != before.Name() {
		t.Fatalf("its device: %v, %v, want %s", after, err, before.Name())
	}
	after.Close()
	write(t, again, "/g", "y")
	if b, err := os.ReadFile(filepath.Join(elsewhere, "g")); string(b) != "y" || err != nil {
		t.Errorf("the other mount sees %q, %v", b, err)
	}
}

func TestIdleVolumeIsUnmounted(t *testing.T) {
	s, who := newStore(t, storetest.SQLite(t), Config{})
	v := create(t, s, who, "a")
	mounted := func() int {
		ids, err := mountsBelow(s.conf.Dir)
		if err != nil {
			t.Fatal(err)
		}
		return len(ids)
	}
	s.sweep(t.Context(), time.Hour)
	if mounted() != 1 {
		t.Error("unmounted at once")
	}
	if _, err := s.Mount(t.Context(), who.Project, "i1", "a"); err != nil {
		t.Fatal(err)
	}
	s.sweep(t.Context(), 0)
	if mounted() != 1 {
		t.Error("unmounted under a sandbox")
	}
	if err := s.Unmounted(t.Context(), "i1"); err != nil {
		t.Fatal(err)
	}
	c, err := s.Content(t.Context(), v.ID)
	if err != nil {
		t.Fatal(err)
	}
	s.sweep(t.Context(), 0)
	if mounted() != 1 {
		t.Error("unmounted under a caller")
	}
	c.Close()
	s.sweep(t.Context(), 0)
	if mounted() != 0 {
		t.Error("not unmounted")
	}
	image, err := os.Open(filepath.Join(s.conf.Dir, v.ID, "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) { // it goes when nobody has it open, who looks at it for a moment included
		dev, err := attached(image)
		if dev == nil && err == nil {
			break
		}
		dev.Close()
		if err != nil || time.Now().After(end) {
			t.Fatalf("its loop device is left: %v, %v", dev, err)
		}
	}
	write(t, content(t, s, v.ID), "/f", "x") // and back
}

// TestDeleteWhileMounting: no sandbox gets a deleted volume, in either order.
func TestDeleteWhileMounting(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s, who := newStore(t, db, Config{})
		for i := range 5 {
			v := create(t, s, who, "a")
			var wg sync.WaitGroup
			var merr, derr error
			wg.Go(func() { _, merr = s.Mount(context.WithoutCancel(t.Context()), who.Project, "i1", "a") })
			wg.Go(func() { derr = s.Delete(context.WithoutCancel(t.Context()), who, v.ID) })
			wg.Wait()
			if (merr == nil) == (derr == nil) {
				t.Errorf("round %d: mount: %v, delete: %v", i, merr, derr)
			}
			if err := s.Unmounted(t.Context(), "i1"); err != nil {
				t.Fatal(err)
			}
			if derr != nil {
				if err := s.Delete(t.Context(), who, v.ID); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

func TestCheckWants(t *testing.T) {
	many := make([]Want, maxMounts+1)
	for i := range many {
		many[i] = Want{"v", fmt.Sprintf("/mnt/%d", i)}
	}
	tests := []struct {
		name  string
		wants []Want
		ok    bool
	}{
		{"usual", []Want{{"v", "/mnt/data"}, {"v", "/data"}, {"w", "/home/user"}, {"x", "/var/lib/x"}, {"y", "/tmp/y"}, {"z", "/opt"}}, true},
		{"none", nil, true},
		{"as many as may be", many[:maxMounts], true},
		{"one more", many, false},
		{"relative", []Want{{"v", "mnt"}}, false},
		{"empty path", []Want{{"v", ""}}, false},
		{"dots", []Want{{"v", "/mnt/../etc"}}, false},
		{"slash at the end", []Want{{"v", "/mnt/"}}, false},
		{"double slash", []Want{{"v", "//mnt"}}, false},
		{"root", []Want{{"v", "/"}}, false},
		{"home of all", []Want{{"v", "/home"}}, false},
		{"proc", []Want{{"v", "/proc/self"}}, false},
		{"guest", []Want{{"v", "/usr/local/sbin"}}, false},
		{"link to run", []Want{{"v", "/var/run/x"}}, false},
		{"only alike", []Want{{"v", "/devices"}, {"w", "/runs/x"}}, true},
		{"twice", []Want{{"v", "/mnt/a"}, {"w", "/mnt/a"}}, false},
		{"one in the other", []Want{{"v", "/mnt/a/b"}, {"w", "/mnt/a"}}, false},
		{"control character", []Want{{"v", "/mnt/a\nb"}}, false},
		{"comma is no separator", []Want{{"v", "/mnt/a,b"}}, true},
		{"name", []Want{{"../v", "/mnt/a"}}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := CheckWants(tt.wants); (err == nil) != tt.ok || err != nil && !errors.Is(err, ErrInvalid) {
				t.Errorf("got %v, want ok %v", err, tt.ok)
			}
		})
	}
}

func TestMountFlags(t *testing.T) {
	s, who := newStore(t, storetest.SQLite(t), Config{})
	c := content(t, s, create(t, s, who, "a").ID)
	var st unix.Statfs_t
	if err := unix.Statfs(c.disk.files(), &st); err != nil {
		t.Fatal(err)
	}
	const want = unix.ST_NOSUID | unix.ST_NODEV | 0x2000 /* ST_NOSYMFOLLOW */
	if st.Flags&want != want {
		t.Errorf("mounted with flags %#x, want %#x among them", st.Flags, want)
	}
	if err := syscall.Mknod(filepath.Join(c.disk.files(), "null"), syscall.S_IFCHR|0o666, 1<<8|3); err != nil {
		t.Fatal(err)
	}
	if f, err := os.Open(filepath.Join(c.disk.files(), "null")); err == nil {
		f.Close()
		t.Error("a device in a volume is one")
	}
}
