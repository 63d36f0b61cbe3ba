package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain makes this program also the keeper, a server that is killed, and two
// kinds of attackers.
func TestMain(m *testing.M) {
	if IsKeeper(os.Args) {
		Main()
	}
	switch os.Args[0] {
	case "server":
		serverMain()
	case "stranger":
		strangerMain()
	case "impostor":
		impostorMain()
	}
	os.Exit(m.Run())
}

// serverMain opens the keeper of its directory, puts descriptor 3 and waits to
// be killed.
func serverMain() {
	k, err := Open(context.Background(), os.Args[1], 10)
	if err == nil {
		err = k.Put(context.Background(), "i1", os.NewFile(3, "link"))
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ready")
	select {}
}

// strangerMain prints what the keeper of its directory answers to another user.
func strangerMain() {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
	if err == nil {
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: os.Args[1]})
	}
	if err == nil {
		_, err = unix.Write(fd, encode(opAll, 1, nil))
	}
	n := 0
	if err == nil {
		n, err = unix.Read(fd, make([]byte, 100))
	}
	fmt.Println("got", n, err)
	os.Exit(0)
}

// impostorMain listens in place of a keeper.
func impostorMain() {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: os.Args[1]})
	}
	if err == nil {
		err = errors.Join(os.Chmod(os.Args[1], 0o777), unix.Listen(fd, 4))
	}
	fmt.Println("ready", err)
	conn, _, err := unix.Accept(fd)
	if err != nil {
		os.Exit(1)
	}
	n, err := unix.Read(conn, make([]byte, 100))
	fmt.Println("heard", n, err)
	os.Exit(0)
}

// as starts this program in a role, as the given user.
func as(t *testing.T, role, arg string, uid uint32, files ...*os.File) (*exec.Cmd, io.Reader) {
	t.Helper()
	c := exec.CommandContext(t.Context(), "/proc/self/exe")
	c.Args, c.ExtraFiles = []string{role, arg}, files
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if uid != 0 {
		c.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	}
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	return c, out
}

func line(t *testing.T, r io.Reader) string {
	t.Helper()
	var b []byte
	for c := make([]byte, 1); ; {
		if _, err := r.Read(c); err != nil || c[0] == '\n' {
			return string(b)
		}
		b = append(b, c...)
	}
}

// pids returns the keepers of dir in the list of processes.
func pids(t *testing.T, dir string) (all []int) {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		cmd, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err == nil && string(cmd) == argv0+"\x00"+dir+"\x00" {
			all = append(all, pid)
		}
	}
	return all
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

func open(t *testing.T, dir string, most int) *Keeper {
	t.Helper()
	k, err := Open(t.Context(), dir, most)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Error(err)
		}
		eventually(t, "the keeper has ended", func() bool { return len(pids(t, dir)) == 0 })
	})
	return k
}

// link returns the host's end of a link, which is closed after the test, and the
// sandbox's end.
func link(t testing.TB) (host, inside *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	host, inside = os.NewFile(uintptr(fds[0]), "host"), os.NewFile(uintptr(fds[1]), "inside")
	t.Cleanup(func() { host.Close(); inside.Close() })
	return host, inside
}

// carries checks that host and inside are the ends of one link.
func carries(t *testing.T, host, inside *os.File) {
	t.Helper()
	want := []byte("packet")
	if _, err := inside.Write(want); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 10)
	host.SetReadDeadline(time.Now().Add(time.Minute))
	n, err := host.Read(got)
	if err != nil || !bytes.Equal(got[:n], want) {
		t.Errorf("got %q, %v; want %q", got[:n], err, want)
	}
}

func all(t *testing.T, k *Keeper) map[string]*os.File {
	t.Helper()
	m, err := k.All(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(m) })
	return m
}

func names(t *testing.T, k *Keeper) string {
	t.Helper()
	m, err := k.All(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(m)
	return strings.Join(slices.Sorted(maps.Keys(m)), " ")
}

func TestPutDropAll(t *testing.T) {
	k := open(t, t.TempDir(), 10)
	a, aIn := link(t)
	b, bIn := link(t)
	c, cIn := link(t)
	for _, tc := range []struct {
		name string
		do   func() error
		want string
	}{
		{"nothing yet", func() error { return nil }, ""},
		{"one", func() error { return k.Put(t.Context(), "i1", a) }, "i1"},
		{"two", func() error { return k.Put(t.Context(), "i2", b) }, "i1 i2"},
		{"in the place of one", func() error { return k.Put(t.Context(), "i1", c) }, "i1 i2"},
		{"drop", func() error { k.Drop("i2"); return nil }, "i1"},
		{"drop a missing entry", func() error { k.Drop("i2"); k.Drop(strings.Repeat("x", 500)); return nil }, "i1"},
	} {
		if err := tc.do(); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		if got := names(t, k); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
	got := all(t, k)
	carries(t, got["i1"], cIn)
	closeAll(got)
	// Dropped and replaced ends are held by nobody else.
	a.Close()
	b.Close()
	for name, f := range map[string]*os.File{"replaced": aIn, "dropped": bIn} {
		eventually(t, name+" link has ended", func() bool {
			_, err := f.Write([]byte("x"))
			return errors.Is(err, unix.EPIPE)
		})
	}
}

func TestPutRefuses(t *testing.T) {
	dir := t.TempDir()
	k := open(t, dir, 2)
	host, _ := link(t)
	for _, id := range []string{"i1", "i2"} {
		if err := k.Put(t.Context(), id, host); err != nil {
			t.Fatal(err)
		}
	}
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, tc := range []struct {
		name string
		id   string
		f    *os.File
		want string
	}{
		{"too many", "i3", host, "2 links are held, which is the limit"},
		{"no name", "", host, "want 1 to 64"},
		{"a long name", strings.Repeat("x", 65), host, "want 1 to 64"},
		{"a file", "i1", file, "not a socket"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := k.Put(t.Context(), tc.id, tc.f); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
	if err := k.Put(t.Context(), "i2", host); err != nil {
		t.Errorf("in the place of one at the limit: %v", err)
	}
	if got := names(t, k); got != "i1 i2" {
		t.Errorf("got %q", got)
	}
	if _, err := Open(t.Context(), dir, 0); err == nil {
		t.Error("opened for no link")
	}
	if _, err := Open(t.Context(), filepath.Join(dir, "none"), 1); err == nil {
		t.Error("opened in no directory")
	}
}

// TestSurvivesItsServer: the server, its process group and its session are killed,
// and signals that end other processes arrive. Then the next server finds the link.
func TestSurvivesItsServer(t *testing.T) {
	// Longer than a socket's address may be.
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	host, inside := link(t)
	server, out := as(t, "server", dir, 0, host)
	if got := line(t, out); got != "ready" {
		t.Fatal(got)
	}
	host.Close()
	pid := pids(t, dir)
	if len(pid) != 1 {
		t.Fatalf("got keepers %v", pid)
	}
	for _, s := range []syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGUSR1} {
		syscall.Kill(-server.Process.Pid, s)
		syscall.Kill(pid[0], s)
	}
	syscall.Kill(-server.Process.Pid, syscall.SIGKILL)
	server.Wait()

	k := open(t, dir, 10)
	if now := pids(t, dir); !slices.Equal(now, pid) {
		t.Errorf("got keepers %v, want %v", now, pid)
	}
	got := all(t, k)
	carries(t, got["i1"], inside)
	closeAll(got)
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(filepath.Join(dir, socketName)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after goodbye the socket is there: %v", err)
	}
	eventually(t, "the link has ended", func() bool {
		_, err := inside.Write([]byte("x"))
		return errors.Is(err, unix.EPIPE)
	})
}

// TestInheritsNothing: besides links a keeper holds no lock, no pipe and no secret.
func TestInheritsNothing(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("POSTERN_SECRET", "x")
	// A descriptor that a shell has left open for all its children.
	leaked, err := unix.Open(os.DevNull, unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(leaked)
	open(t, dir, 1)
	pid := pids(t, dir)[0]
	// A container may not have the right to be spared.
	if st, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid)); err != nil || maySpare(t) && strings.TrimSpace(string(st)) != "-900" {
		t.Errorf("oom_score_adj: got %q, %v; want -900", st, err)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range fds {
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, e.Name()))
		null := to == os.DevNull && (e.Name() == "0" || e.Name() == "1" || e.Name() == "2")
		if err == nil && !null && !strings.HasPrefix(to, "socket:") && !strings.HasPrefix(to, "anon_inode:") {
			t.Errorf("it has %s open at %s", to, e.Name())
		}
	}
	for what, want := range map[string]string{"environ": "", "cwd": "/"} {
		got, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, what))
		if what == "cwd" {
			var to string
			to, err = os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
			got = []byte(to)
		}
		if err != nil || string(got) != want {
			t.Errorf("%s: got %q, %v; want %q", what, got, err, want)
		}
	}
	if sid, err := unix.Getsid(pid); err != nil || sid != pid {
		t.Errorf("session: got %d, %v; want its own, %d", sid, err, pid)
	}
}

// maySpare reports whether this process may lower its oom_score_adj.
func maySpare(t *testing.T) bool {
	t.Helper()
	const path = "/proc/self/oom_score_adj"
	was, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if os.WriteFile(path, []byte("-900"), 0) != nil {
		return false
	}
	if err := os.WriteFile(path, bytes.TrimSpace(was), 0); err != nil {
		t.Fatal(err)
	}
	return true
}

func TestKilledKeeperIsReplaced(t *testing.T) {
	dir := t.TempDir()
	k := open(t, dir, 10)
	a, aIn := link(t)
	b, bIn := link(t)
	if err := k.Put(t.Context(), "i1", a); err != nil {
		t.Fatal(err)
	}
	was := pids(t, dir)
	if err := syscall.Kill(was[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the keeper is dead", func() bool { return len(pids(t, dir)) == 0 })
	if err := k.Put(t.Context(), "i2", b); err != nil {
		t.Fatalf("the first after the keeper was killed: %v", err)
	}
	got := all(t, k)
	if len(got) != 2 {
		t.Fatalf("got %v, want both", got)
	}
	carries(t, got["i1"], aIn)
	carries(t, got["i2"], bIn)
	if now := pids(t, dir); len(now) != 1 || now[0] == was[0] {
		t.Errorf("got keepers %v, was %v", now, was)
	}
}

// TestDropsDeadLinks: the link of an ended sandbox is dropped.
func TestDropsDeadLinks(t *testing.T) {
	k := open(t, t.TempDir(), 10)
	host, inside := link(t)
	if err := k.Put(t.Context(), "i1", host); err != nil {
		t.Fatal(err)
	}
	inside.Close()
	eventually(t, "the link is dropped", func() bool { return names(t, k) == "" })
}

func TestTwoDirectoriesTwoKeepers(t *testing.T) {
	one, two := t.TempDir(), t.TempDir()
	a, b := open(t, one, 1), open(t, two, 1)
	host, _ := link(t)
	if err := a.Put(t.Context(), "i1", host); err != nil {
		t.Fatal(err)
	}
	if got := names(t, b); got != "" {
		t.Errorf("the other has %q", got)
	}
	if p, q := pids(t, one), pids(t, two); len(p) != 1 || len(q) != 1 || p[0] == q[0] {
		t.Errorf("got keepers %v and %v", p, q)
	}
}

// TestStrangersGetNothing: even if file modes let others in, the check of the
// peer's user keeps them out.
func TestStrangersGetNothing(t *testing.T) {
	const nobody = 65534
	dir, err := os.MkdirTemp("/tmp", "keeper")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, socketName)

	t.Run("a keeper of another user is refused", func(t *testing.T) {
		c, out := as(t, "impostor", path, nobody)
		if got := line(t, out); got != "ready <nil>" {
			t.Fatal(got)
		}
		if _, err := Open(t.Context(), dir, 1); err == nil || !strings.Contains(err.Error(), "the peer is user 65534") {
			t.Errorf("got %v", err)
		}
		if got := line(t, out); got != "heard 0 <nil>" {
			t.Errorf("the impostor %s", got)
		}
		c.Wait()
		os.Remove(path)
	})
	t.Run("another user is hung up on", func(t *testing.T) {
		server, _ := link(t)
		k := open(t, dir, 1)
		if err := k.Put(t.Context(), "i1", server); err != nil {
			t.Fatal(err)
		}
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("mode: got %v, %v; want 0600", st.Mode(), err)
		}
		if err := os.Chmod(path, 0o777); err != nil {
			t.Fatal(err)
		}
		k.mu.Lock()
		k.hangUpLocked() // or it would wait behind us
		k.mu.Unlock()
		c, out := as(t, "stranger", path, nobody)
		if got := line(t, out); !strings.HasPrefix(got, "got 0") && !strings.HasPrefix(got, "got -1") {
			t.Errorf("the stranger %s", got)
		}
		c.Wait()
		if got := names(t, k); got != "i1" {
			t.Errorf("after the stranger: got %q", got)
		}
	})
}

func TestKeeperEndsWithoutLinksAndServer(t *testing.T) {
	listen := func(t *testing.T) (dir string, listener int) {
		dir = t.TempDir()
		listener, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(unix.Bind(listener, &unix.SockaddrUnix{Name: filepath.Join(dir, socketName)}), unix.Listen(listener, 4)); err != nil {
			t.Fatal(err)
		}
		return dir, listener
	}
	serve := func(listener int) chan error {
		p := newProcess()
		p.lonely = 200 * time.Millisecond
		done := make(chan error, 1)
		go func() {
			done <- p.serve(listener)
			unix.Close(listener)
			unix.Close(p.epoll)
		}()
		return done
	}
	t.Run("never called", func(t *testing.T) {
		_, listener := listen(t)
		done := serve(listener)
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(time.Minute):
			t.Error("it stays")
		}
	})
	t.Run("not while it holds a link or has a server", func(t *testing.T) {
		dir, listener := listen(t)
		var k *Keeper
		opened := make(chan error, 1)
		go func() {
			var err error
			k, err = Open(t.Context(), dir, 1)
			opened <- err
		}()
		// It is called before it can feel lonely.
		eventually(t, "somebody calls", func() bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}, 0)
			return err == nil && n > 0
		})
		done := serve(listener)
		if err := <-opened; err != nil {
			t.Fatal(err)
		}
		stays := func(why string) {
			select {
			case err := <-done:
				t.Fatalf("ended, %s: %v", why, err)
			case <-time.After(500 * time.Millisecond):
			}
		}
		stays("with a server")
		host, inside := link(t)
		if err := k.Put(t.Context(), "i1", host); err != nil {
			t.Fatal(err)
		}
		k.conn.Close() // without a goodbye
		stays("with a link")
		inside.Close()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(time.Minute):
			t.Error("it stays")
		}
		unix.Close(k.held["i1"])
	})
}

// TestRefusesOtherVersions: the messages of a server with another version are
// refused, not guessed.
func TestRefusesOtherVersions(t *testing.T) {
	p := newProcess()
	for _, body := range [][]byte{nil, {version}, {version + 1, 0, 0, 0, 1}, {version, 0, 0, 0, 1, 0}} {
		if err := p.hello(body); err == nil {
			t.Errorf("%v: accepted", body)
		}
	}
	if err := p.hello([]byte{version, 0, 0, 0, 9}); err != nil || p.most != 9 {
		t.Errorf("got %d, %v", p.most, err)
	}
}

// FuzzHear sends anything to a keeper: it holds no more than its limit, and no
// other descriptors.
func FuzzHear(f *testing.F) {
	f.Add([]byte("p\x00\x00\x00\x01i1"), byte(1))
	f.Add([]byte("p\x00\x00\x00\x01i1"), byte(0))
	f.Add([]byte("p\x00\x00\x00\x01i1"), byte(3))
	f.Add([]byte("a\x00\x00\x00\x01"), byte(1))
	f.Add([]byte("d\x00\x00\x00\x02i1"), byte(0))
	f.Add([]byte("h\x00\x00\x00\x02\x01\x00\x00\x00\x05"), byte(0))
	f.Add([]byte("p"), byte(2))
	f.Add(append([]byte("p\x00\x00\x00\x01"), bytes.Repeat([]byte("x"), 300)...), byte(1))
	f.Fuzz(func(t *testing.T, b []byte, rights byte) {
		if len(b) == 0 {
			return // is the end of a connection
		}
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		var sent unix.Stat_t
		if err := unix.Fstat(fds[1], &sent); err != nil {
			t.Fatal(err)
		}
		p := newProcess()
		p.most = 1
		if p.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		p.listener, p.conn = -2, fds[0]
		if err := p.watch(p.conn, unix.EPOLLIN); err != nil {
			t.Fatal(err)
		}
		var oob []byte
		if n := int(rights % 6); n > 0 {
			oob = unix.UnixRights(slices.Repeat([]int{fds[1]}, n)...)
		}
		if err := unix.Sendmsg(fds[1], b, oob, nil, 0); err != nil {
			t.Fatal(err)
		}
		p.hear()
		if len(p.links) > 1 || len(p.links) != len(p.names) {
			t.Errorf("keeps %v, %v", p.links, p.names)
		}
		for name := range p.links {
			p.drop(name)
		}
		if p.conn >= 0 {
			unix.Close(p.conn)
		}
		unix.Close(fds[1])
		unix.Close(p.epoll)
		if n := timesOpen(t, sent); n > 0 {
			t.Errorf("%d of %d descriptors that were sent are still open", n, rights%6)
		}
	})
}

// timesOpen counts how often this process has that file open. Other open files do
// not matter, since those of earlier tests may still be closing.
func timesOpen(tb testing.TB, file unix.Stat_t) (n int) {
	tb.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	for _, e := range d {
		var st unix.Stat_t
		if unix.Stat("/proc/self/fd/"+e.Name(), &st) == nil && st.Dev == file.Dev && st.Ino == file.Ino {
			n++
		}
	}
	return n
}

// BenchmarkPutDrop measures what each create costs.
func BenchmarkPutDrop(b *testing.B) {
	k, err := Open(b.Context(), b.TempDir(), 1000)
	if err != nil {
		b.Fatal(err)
	}
	defer k.Close()
	host, _ := link(b)
	for i := range 500 {
		if err := k.Put(b.Context(), fmt.Sprint("other", i), host); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		if err := k.Put(b.Context(), "i1", host); err != nil {
			b.Fatal(err)
		}
		k.Drop("i1")
	}
}
