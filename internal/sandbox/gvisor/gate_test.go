package gvisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
)

// A judge refuses programs of one sandbox whose Path, Name or first argument has the base
// name "id", and holds those with an argument "held" until it is told the verdict.
type judge struct {
	t    testing.TB
	held chan bool // the verdict on each held program

	mu     sync.Mutex
	execs  []sandbox.Exec
	exits  map[int32]sandbox.Exit // by PID
	opens  []sandbox.Open
	gaveUp int // held programs that were withdrawn
	waits  int // programs that are held now
	missed uint64
}

func newJudge(t testing.TB) *judge {
	return &judge{t: t, held: make(chan bool), exits: map[int32]sandbox.Exit{}}
}

func (j *judge) Exec(ctx context.Context, e sandbox.Exec) bool {
	j.mu.Lock()
	j.execs = append(j.execs, e)
	hold := slices.Contains(e.Args, "held")
	if hold {
		j.waits++
	}
	j.mu.Unlock()
	if !hold {
		return filepath.Base(e.Path) != "id" && filepath.Base(e.Name) != "id" && (len(e.Args) == 0 || filepath.Base(e.Args[0]) != "id")
	}
	defer func() {
		j.mu.Lock()
		j.waits--
		j.mu.Unlock()
	}()
	select {
	case allow := <-j.held:
		return allow
	case <-ctx.Done():
		j.mu.Lock()
		j.gaveUp++
		j.mu.Unlock()
		return true // no verdict counts any more, not even this one
	}
}

func (j *judge) Exited(e sandbox.Exit) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.exits[e.PID] = e
}

func (j *judge) Opened(o sandbox.Open) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.opens = append(j.opens, o)
}

func (j *judge) Missed(n uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.missed += n
}

// last returns the last program with this argument that the judge was asked about.
func (j *judge) last(arg string) (e sandbox.Exec) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, x := range slices.Backward(j.execs) {
		if slices.Contains(x.Args, arg) {
			return x
		}
	}
	j.t.Errorf("no program was started with the argument %q", arg)
	return e
}

// until waits until ok returns true. It calls ok with mu held.
func (j *judge) until(what string, ok func() bool) {
	j.t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		j.mu.Lock()
		done := ok()
		j.mu.Unlock()
		if done {
			return
		}
		if time.Now().After(end) {
			j.t.Fatalf("waited for a minute: %s", what)
		}
	}
}

// shellRoot returns a root file system with the test's guest and a shell, as a directory
// and as an image.
func shellRoot(t testing.TB) (dir string, image sandbox.Image) {
	t.Helper()
	small, err := rootfs()
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(small)); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"bin", "usr/bin", "work"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "tmp"), 0o1777); err != nil {
		t.Fatal(err)
	}
	withBusybox(t, dir)
	for _, name := range []string{"cp", "ln", "mv", "kill", "true", "seq", "wait"} {
		if err := os.Symlink("busybox", filepath.Join(dir, "bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{"usr/bin/script": "#!/bin/sh\necho said \"$@\"\n", "usr/bin/id": "#!/bin/sh\necho not this one\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	i := sandbox.Image{Root: filepath.Join(t.TempDir(), "root-1.erofs")}
	f, err := os.Create(i.Root)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := erofs.Write(t.Context(), f, dir, func(string) erofs.Pick { return erofs.Keep }); err != nil {
		t.Fatal(err)
	}
	return dir, i
}

// sh runs a shell script in a sandbox as a user.
func (h *host) sh(t testing.TB, uid int, script string) string {
	t.Helper()
	return h.do(t, uid, "exec", "/bin/sh", "-c", script)
}

// TestGateJudgesEachProgram: the kernel of a sandbox starts no program that the host
// refuses, however it is started, and describes each one as the host needs it.
func TestGateJudgesEachProgram(t *testing.T) {
	needRoot(t)
	dir, image := shellRoot(t)
	for name, i := range map[string]sandbox.Image{"directory": {}, "image": image} {
		t.Run(name, func(t *testing.T) {
			r, j := newRuntime(t, t.TempDir()), newJudge(t)
			s, h := start(t, r, func(s *sandbox.Spec) { s.Rootfs, s.Image, s.Watch = dir, i, j })
			t.Run("refused", func(t *testing.T) { checkRefused(t, h, j) })
			t.Run("described", func(t *testing.T) { checkDescribed(t, h, j) })
			t.Run("many", func(t *testing.T) { checkMany(t, h, j) })
			t.Run("held", func(t *testing.T) { checkHeld(t, h, j) })
			t.Run("opens", func(t *testing.T) { checkOpens(t, r, s.ID, h, j) })
			t.Run("files", func(t *testing.T) { checkFiles(t, r, s.ID, h, j) })
			t.Run("digests", func(t *testing.T) { checkDigests(t, r, s.ID, h, j, dir) })
			if j.missed > 0 {
				t.Errorf("%d events were missed", j.missed)
			}
		})
	}
}

// checkRefused tries to start a refused program in many ways.
func checkRefused(t *testing.T, h *host, j *judge) {
	for name, script := range map[string]string{
		// With a slash, since BusyBox's shell has an id of its own.
		"by its path":       "/bin/id",
		"by a child":        "(/bin/sh -c 'cd /bin; ./id')",
		"a script":          "/usr/bin/id",
		"by another name":   "ln -s /usr/bin/id /tmp/allowed; /tmp/allowed",
		"in the background": "/bin/id & wait $!",
	} {
		if got := h.sh(t, 1000, script+` ; echo "ended $?"`); !strings.Contains(got, "ended 126") || strings.Contains(got, "uid=") {
			t.Errorf("%s: got %q, want status 126", name, got)
		}
	}
	if got := h.do(t, 1000, "exec", "/bin/id"); !strings.Contains(got, "permission denied") {
		t.Errorf("execve: got %q, want EACCES", got)
	}
	if got := h.do(t, 1000, "execat", "file", "/bin/busybox", "id"); !strings.Contains(got, "permission denied") {
		t.Errorf("execveat: got %q, want EACCES", got)
	}
	if got := h.sh(t, 1000, "/bin/echo goes on"); got != "goes on" {
		t.Errorf("another program: got %q", got)
	}
}

// checkDescribed checks what the kernel reports about programs and exits.
func checkDescribed(t *testing.T, h *host, j *judge) {
	run := func(arg, script string) sandbox.Exec {
		t.Helper()
		if got := h.sh(t, 1000, script); strings.Contains(got, "denied") || strings.Contains(got, "error") {
			t.Errorf("%s: %s", arg, got)
		}
		return j.last(arg)
	}
	check := func(e sandbox.Exec, path, name string, fixed bool) {
		t.Helper()
		if e.Path != path || e.Name != name || e.Fixed != fixed || e.UID != 1000 || e.Cut {
			t.Errorf("got path %q, name %q, fixed %v, user %d, cut %v; want %q, %q, %v, 1000", e.Path, e.Name, e.Fixed, e.UID, e.Cut, path, name, fixed)
		}
	}
	e := run("plain", "cd /work; A=b /bin/echo plain 'two words' ''")
	check(e, "/bin/busybox", "/bin/echo", true)
	if want := []string{"/bin/echo", "plain", "two words", ""}; !slices.Equal(e.Args, want) || e.Dir != "/work" || !slices.Contains(e.Env, "A=b") {
		t.Errorf("got %q in %q with %q", e.Args, e.Dir, e.Env)
	}
	if parent := j.last("-c"); e.Parent == 0 || e.PID == 0 || e.Parent != parent.PID && e.PID != parent.PID {
		t.Errorf("got process %d of %d; the shell is %d", e.PID, e.Parent, parent.PID)
	}
	check(run("by script", "script 'by script'"), "/usr/bin/script", "/usr/bin/script", true)
	check(run("relative", "cd /bin; ./echo relative"), "/bin/busybox", "./echo", true)
	// A file that the sandbox has written is not Fixed, also if it has a name of the template's.
	check(run("copied", "mkdir -p /tmp/usr/bin; cp /bin/busybox /tmp/usr/bin/echo; /tmp/usr/bin/echo copied"), "/tmp/usr/bin/echo", "/tmp/usr/bin/echo", false)
	check(run("own script", "printf '#!/bin/sh\\n' > /tmp/own; chmod +x /tmp/own; /tmp/own 'own script'"), "/tmp/own", "/tmp/own", false)
	check(run("linked", "ln -s /bin/busybox /tmp/echo; /tmp/echo linked"), "/bin/busybox", "/tmp/echo", true)
	h.do(t, 0, "exec", "/bin/sh", "-c", "cp /bin/busybox /work/echo; mv /work/echo /bin/renamed; cp /bin/busybox /bin/x; mv /bin/x /bin/echo2; chmod 755 /bin/echo2")
	check(run("overwritten", "/bin/renamed echo overwritten"), "/bin/renamed", "/bin/renamed", false)
	// By descriptor the caller chooses every name, so Path is empty.
	if got := h.do(t, 1000, "execat", "file", "/bin/busybox", "echo", "by descriptor"); got != "by descriptor" {
		t.Errorf("by descriptor: %q", got)
	}
	if e := j.last("by descriptor"); e.Path != "" || !strings.HasPrefix(e.Name, "/dev/fd/") || !e.Fixed {
		t.Errorf("by descriptor: path %q, name %q, fixed %v", e.Path, e.Name, e.Fixed)
	}
	if got := h.do(t, 1000, "execat", "memory", "/bin/busybox", "echo", "from memory"); got != "from memory" {
		t.Errorf("from memory: %q", got)
	}
	if e := j.last("from memory"); e.Path != "" || e.Fixed {
		t.Errorf("from memory: path %q, name %q, fixed %v", e.Path, e.Name, e.Fixed)
	}
	// /proc/self/exe is a link to the process's own program.
	if got := h.do(t, 1000, "exec", "/proc/self/exe", "euid"); got != "1000" {
		t.Errorf("/proc/self/exe: %q", got)
	}
	if e := j.last("euid"); filepath.Base(e.Path) != "postern-guest" || e.Name != "/proc/self/exe" || !e.Fixed {
		t.Errorf("/proc/self/exe: path %q, name %q, fixed %v", e.Path, e.Name, e.Fixed)
	}
	// In a user namespace of its own a process can mount anything, so no path identifies a file.
	if got := h.do(t, 1000, "userns", "/bin/echo", "in a namespace"); got != "in a namespace" {
		t.Errorf("user namespace: %q", got)
	}
	if e := j.last("in a namespace"); e.Path != "" || e.Fixed {
		t.Errorf("user namespace: path %q, fixed %v", e.Path, e.Fixed)
	}
	long := strings.Repeat("x", 100_000)
	if got := h.do(t, 1000, "exec", "/bin/sh", "-c", `x=$(seq -s. 20000); /bin/true long "$x"`); got != "" {
		t.Errorf("long argument: %q", got)
	}
	if e := j.last("long"); !e.Cut || len(strings.Join(e.Args, "")) > len(long) {
		t.Errorf("long argument: cut %v, %d bytes", e.Cut, len(strings.Join(e.Args, "")))
	}
	// Exits, with codes and signals.
	h.sh(t, 1000, "/bin/sh -c 'exit 7' seven; /bin/sh -c 'kill -9 $$' killed; /bin/true zero")
	for arg, want := range map[string]sandbox.Exit{"seven": {Code: 7}, "killed": {Code: 137, Signal: 9}, "zero": {}} {
		pid := j.last(arg).PID
		j.until("the exit of "+arg, func() bool { _, ok := j.exits[pid]; return ok })
		if got := j.exits[pid]; got.Code != want.Code || got.Signal != want.Signal {
			t.Errorf("%s: got %+v, want %+v", arg, got, want)
		}
	}
}

// TestGateKnowsForeignRoots: whoever chooses the root directory of a program, or the file system
// that it is in, does not choose its path for those who judge it.
func TestGateKnowsForeignRoots(t *testing.T) {
	needRoot(t)
	needsPatches(t)
	dir, image := shellRoot(t)
	r, j := newRuntime(t, t.TempDir()), newJudge(t)
	_, h := start(t, r, func(s *sandbox.Spec) { s.Rootfs, s.Image, s.Watch = dir, image, j })
	const guest, only = "/usr/local/sbin/postern-guest", "/usr/bin/busybox"
	if got := h.do(t, 0, "exec", "/bin/sh", "-c", "mkdir -p /tmp/j/usr/local/sbin /tmp/j/usr/bin /tmp/j/bin; cp /bin/busybox /tmp/j"+guest+"; cp /bin/busybox /tmp/j"+only+"; cp /bin/busybox /tmp/j/bin/busybox"); got != "" {
		t.Fatal(got)
	}
	unknown := func(what, arg string) {
		t.Helper()
		if e := j.last(arg); e.Path != "" || e.Fixed {
			t.Errorf("%s: path %q, fixed %v; want neither", what, e.Path, e.Fixed)
		}
	}
	if got := h.do(t, 1000, "chroot", "/tmp/j", only, "echo"); !strings.Contains(got, "error: operation not permitted") {
		t.Errorf("a user changes the root: %q", got)
	}
	for name, program := range map[string]string{"as the guest": guest, "as a program of the template": "/bin/busybox"} {
		// By its name BusyBox would be another program, and it says so once it runs.
		if got := h.do(t, 0, "chroot", "/tmp/j", program, "echo", name); got != name && !strings.Contains(got, "applet not found") {
			t.Errorf("%s: got %q", name, got)
		}
		unknown(name, name)
	}
	for i := range 20 {
		name := fmt.Sprintf("flipped %d", i)
		if got := h.do(t, 0, "flip", "/tmp/j", only, "echo", name); got != name {
			t.Fatalf("%s: got %q", name, got)
		}
		unknown(name, name)
	}
	if got := h.do(t, 1000, "foreign", only, "busybox", "echo", "of another namespace"); got != "of another namespace" {
		t.Errorf("of another namespace: got %q", got)
	}
	unknown("of another namespace", "of another namespace")
	// The same root again is no other root: package managers start scripts so.
	if got := h.do(t, 0, "chroot", "/", "/bin/busybox", "echo", "the same root"); got != "the same root" {
		t.Errorf("the same root: got %q", got)
	}
	if e := j.last("the same root"); e.Path != "/bin/busybox" || !e.Fixed {
		t.Errorf("the same root: path %q, fixed %v", e.Path, e.Fixed)
	}
}

// checkMany starts many programs at the same time.
func checkMany(t *testing.T, h *host, j *judge) {
	const n, most = 300, 100 // in all; at the same time, because of the limit on processes
	for range n / most {
		if got := h.do(t, 1000, "execs", fmt.Sprint(most), "/bin/true", "one of many"); got != fmt.Sprint(most) {
			t.Errorf("%s of %d programs were started", got, most)
		}
	}
	seen := 0
	for _, e := range j.execs {
		if slices.Contains(e.Args, "one of many") {
			seen++
		}
	}
	if seen < n {
		t.Errorf("the judge was asked %d times, want %d", seen, n)
	}
}

// checkHeld checks programs that wait for their verdict.
func checkHeld(t *testing.T, h *host, j *judge) {
	said := make(chan string)
	hold := func(script string) {
		t.Helper()
		go func() { said <- h.sh(t, 1000, script) }()
		j.until("a held program", func() bool { return j.waits > 0 })
	}
	hold("/bin/echo held")
	if got := h.sh(t, 1000, "/bin/echo meanwhile"); got != "meanwhile" {
		t.Errorf("while a program waits: %q", got)
	}
	j.held <- true
	if got := <-said; got != "held" {
		t.Errorf("allowed: got %q", got)
	}
	hold("/bin/echo held; echo $?")
	j.held <- false
	if got := <-said; !strings.HasSuffix(got, "126") {
		t.Errorf("refused: got %q", got)
	}
	// A killed process stops waiting, and the host is told.
	hold("/bin/echo held & sleep 0.1; kill -9 $!; wait $!; echo $?")
	if got := <-said; !strings.HasSuffix(got, "137") {
		t.Errorf("killed: got %q", got)
	}
	j.until("no program waits", func() bool { return j.waits == 0 && j.gaveUp > 0 })
	// A process handles a signal, and then asks again.
	hold("/bin/echo held & p=$!; /bin/sleep 0.1; kill -STOP $p; /bin/sleep 0.1; kill -CONT $p; wait $p; echo $?")
	given := j.gaveUp
	j.until("it has asked again", func() bool { return j.gaveUp > given && j.waits > 0 })
	j.held <- true
	if got := <-said; !strings.HasSuffix(got, "held\n0") {
		t.Errorf("stopped: got %q", got)
	}
}

// checkOpens checks the reports of files that are opened for writing.
func checkOpens(t *testing.T, r *Runtime, id string, h *host, j *judge) {
	if err := r.Observe(t.Context(), id, sandbox.Observed{Opens: true}); err != nil {
		t.Fatal(err)
	}
	h.sh(t, 1000, "cd /tmp; echo x > opened; echo x > /etc/refused; echo x > ../work/refused; cat opened > /dev/null; ln -s opened by-link; echo y >> by-link")
	want := []sandbox.Open{
		{Path: "/tmp/opened"}, {Path: "/etc/refused", Err: int(unix.EACCES)}, {Path: "/work/refused", Err: int(unix.EACCES)}, {Path: "/dev/null"}, {Path: "/tmp/opened"},
	}
	got := func() (all []sandbox.Open) {
		for _, o := range j.opens {
			if o.Op != "" {
				continue
			}
			if strings.HasSuffix(o.Path, "opened") || strings.HasSuffix(o.Path, "refused") || o.Path == "/dev/null" {
				all = append(all, sandbox.Open{Path: o.Path, Err: o.Err})
			}
		}
		return all
	}
	if err := r.Settle(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if o := got(); len(o) < len(want) || !slices.Equal(o[:len(want)], want) {
		t.Errorf("got %v, want %v", o, want)
	}
}

// checkFiles checks the reports of what is made, removed, renamed and linked, and of files
// that are read.
func checkFiles(t *testing.T, r *Runtime, id string, h *host, j *judge) {
	if err := r.Observe(t.Context(), id, sandbox.Observed{Reads: true}); err != nil {
		t.Fatal(err)
	}
	if err := r.Settle(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	j.mu.Lock()
	j.opens = nil
	j.mu.Unlock()
	h.sh(t, 1000, `cd /tmp; mkdir made; echo x > made/f; mv made/f made/g; ln made/g made/h; ln -s made/g to; cat to > /dev/null
		rm to made/h; mkdir /etc/refused; mv made/g /etc/g; rm made/g; rmdir made; mknod pipe p; rm pipe`)
	if err := r.Settle(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, want := range []sandbox.Open{
		{Op: "mkdir", Path: "/tmp/made"},
		{Op: "rename", Path: "/tmp/made/f", To: "/tmp/made/g"},
		{Op: "link", Path: "/tmp/made/g", To: "/tmp/made/h"},
		{Op: "symlink", Path: "/tmp/to", To: "made/g"},
		{Op: "read", Path: "/tmp/made/g"}, // through the link
		{Op: "unlink", Path: "/tmp/to"},
		{Op: "unlink", Path: "/tmp/made/h"},
		{Op: "mkdir", Path: "/etc/refused", Err: int(unix.EACCES)},
		{Op: "rename", Path: "/tmp/made/g", To: "/etc/g", Err: int(unix.EACCES)},
		{Op: "unlink", Path: "/tmp/made/g"},
		{Op: "rmdir", Path: "/tmp/made"},
		{Op: "mknod", Path: "/tmp/pipe"},
	} {
		if !slices.ContainsFunc(j.opens, func(o sandbox.Open) bool {
			return o.Op == want.Op && o.Path == want.Path && o.To == want.To && o.Err == want.Err && o.PID > 0
		}) {
			t.Errorf("not reported: %+v", want)
		}
	}
	if t.Failed() {
		t.Logf("reported: %+v", j.opens)
	}
}

// checkDigests checks the digests of programs, also of one that was changed without a change
// of its size and time.
func checkDigests(t *testing.T, r *Runtime, id string, h *host, j *judge, dir string) {
	if err := r.Observe(t.Context(), id, sandbox.Observed{Digests: true}); err != nil {
		t.Fatal(err)
	}
	h.sh(t, 1000, "/bin/true digest")
	b, err := os.ReadFile(filepath.Join(dir, "bin/busybox"))
	if err != nil {
		t.Fatal(err)
	}
	h.sh(t, 1000, "/bin/true 'digest again'")
	for _, arg := range []string{"digest", "digest again"} {
		if got, want := j.last(arg).SHA256, sum(b); got != want {
			t.Errorf("%s: got %x, want %x", arg, got, want)
		}
	}
	good, bad := "#!/bin/sh\necho good\n", "#!/bin/sh\necho evil\n"
	h.sh(t, 1000, fmt.Sprintf("printf %q > /tmp/tool; chmod +x /tmp/tool; touch -d 2020-01-01 /tmp/tool; /tmp/tool first", good))
	h.sh(t, 1000, fmt.Sprintf("printf %q > /tmp/tool; touch -d 2020-01-01 /tmp/tool; /tmp/tool second", bad))
	if got, want := j.last("first").SHA256, sum([]byte(good)); got != want {
		t.Errorf("got %x, want %x", got, want)
	}
	if got, want := j.last("second").SHA256, sum([]byte(bad)); got != want {
		t.Errorf("a changed program has the digest %x, want %x", got, want)
	}
}

// TestGateWorksAfterRestore: programs are judged in each sandbox that is restored from a
// snapshot of memory, and a program that waited when it was saved asks again.
func TestGateWorksAfterRestore(t *testing.T) {
	needRoot(t)
	dir, image := shellRoot(t)
	r, j := newRuntime(t, t.TempDir()), newJudge(t)
	s, h := start(t, r, func(s *sandbox.Spec) { s.Rootfs, s.Image, s.Watch = dir, image, j })
	said := make(chan string, 1)
	go func() { said <- h.sh(t, 1000, "/bin/sh -c '/bin/echo held > /tmp/said'") }()
	j.until("a held program", func() bool { return j.waits > 0 })
	fork := filepath.Join(t.TempDir(), "fork")
	begin := time.Now()
	if err := r.Save(t.Context(), s.ID, fork, sandbox.SaveOptions{Keep: true, Brief: true}); err != nil {
		t.Fatal(err)
	}
	t.Logf("saved in %v", time.Since(begin))
	// The original sandbox goes on.
	j.until("it has asked again", func() bool { return j.gaveUp > 0 && j.waits > 0 })
	j.held <- true
	if got := <-said; got != "" {
		t.Errorf("in the original: %q", got)
	}
	paused := filepath.Join(t.TempDir(), "paused")
	// A shell starts it in the background. The guest must not start it itself: Go uses
	// vfork, and would wait for it.
	h.sh(t, 1000, "(sleep 0.2; /bin/echo held) > /tmp/background 2>&1 &")
	j.until("a second held program", func() bool { return j.waits > 0 })
	if err := r.Save(t.Context(), s.ID, paused, sandbox.SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	j.until("the held program is withdrawn", func() bool { return j.waits == 0 })
	for name, from := range map[string]string{"forked": fork, "resumed": paused} {
		for _, prepared := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, prepared %v", name, prepared), func(t *testing.T) {
				j := newJudge(t)
				h, link := newLink(t)
				c := specWith(t, link)
				c.Rootfs, c.Image, c.Watch, c.From = dir, image, j, from
				if prepared {
					if _, err := r.Prepare(t.Context(), []sandbox.Spec{c}); err != nil {
						t.Fatal(err)
					}
				}
				if err := r.Start(t.Context(), c); err != nil {
					t.Fatal(err)
				}
				defer func() {
					if err := r.Stop(context.Background(), c.ID); err != nil {
						t.Error(err)
					}
				}()
				h.ping(t)
				j.until("the program that waited asks again", func() bool { return j.waits > 0 })
				if got := h.do(t, 1000, "exec", "/bin/id"); !strings.Contains(got, "permission denied") {
					t.Errorf("got %q, want EACCES", got)
				}
				if err := r.Observe(t.Context(), c.ID, sandbox.Observed{Opens: true, Digests: true}); err != nil {
					t.Error(err)
				}
				h.sh(t, 1000, "/bin/true restored > /tmp/restored")
				j.until("an open", func() bool {
					return slices.ContainsFunc(j.opens, func(o sandbox.Open) bool { return o.Path == "/tmp/restored" && o.Err == 0 })
				})
				if j.last("restored").SHA256 == [32]byte{} {
					t.Error("a program has no digest")
				}
				j.held <- true
				if name == "forked" {
					j.until("its end", func() bool {
						for _, x := range j.execs {
							if _, ok := j.exits[x.PID]; ok && slices.Contains(x.Args, "held") {
								return true
							}
						}
						return false
					})
					if got := h.do(t, 1000, "cat", "/tmp/said"); got != "held" {
						t.Errorf("the program that waited said %q", got)
					}
				}
			})
		}
	}
}

// TestSandboxEndsWithoutItsGate: a sandbox ends when the host's end of its gate is closed.
// While a duplicate of it is kept, programs wait, and the next server adopts the gate.
func TestSandboxEndsWithoutItsGate(t *testing.T) {
	needRoot(t)
	dir, image := shellRoot(t)
	state := t.TempDir()
	r, j := newRuntime(t, state), newJudge(t)
	s, h := start(t, r, func(s *sandbox.Spec) { s.Rootfs, s.Image, s.Watch = dir, image, j })
	kept, err := r.Gate(s.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	said := make(chan string, 2)
	go func() { said <- h.sh(t, 1000, "/bin/echo held; true") }()
	j.until("a held program", func() bool { return j.waits > 0 })
	// The server is killed: its descriptor is closed, and the keeper's is not.
	r.all[s.ID].gate.abandon()
	go func() { said <- h.sh(t, 1000, "/bin/echo while no server ran") }()
	next, j2 := newRuntime(t, state), newJudge(t)
	if err := next.AdoptGate(s.ID, kept, j2); err != nil {
		t.Fatal(err)
	}
	j2.until("the unanswered question is repeated", func() bool { return j2.waits == 1 })
	if got := <-said; got != "while no server ran" {
		t.Errorf("got %q", got)
	}
	j2.held <- true
	if got := <-said; got != "held" {
		t.Errorf("got %q", got)
	}
	seen := 0
	for _, e := range j2.execs {
		if slices.Contains(e.Args, "held") || slices.Contains(e.Args, "ran") {
			seen++
		}
	}
	if seen != 2 {
		t.Errorf("the second judge was asked %d times, want 2: %v", seen, j2.execs)
	}
	if got := h.sh(t, 1000, "/bin/id"); !strings.Contains(got, "denied") {
		t.Errorf("got %q, want a refusal", got)
	}
	kept.Close()
	next.all[s.ID].gate.abandon()
	if reason, err := next.Wait(t.Context(), s.ID); err != nil {
		t.Errorf("%q, %v", reason, err)
	}
}

// A kernelEnd is the kernel's end of a gate, for tests that play the kernel.
type kernelEnd struct {
	t testing.TB
	*os.File
}

// openTestGate returns a gate whose questions w answers. Both ends are closed when the test
// ends.
func openTestGate(t testing.TB, w sandbox.Watcher) (*gate, kernelEnd) {
	t.Helper()
	r := &Runtime{}
	r.buffers.New = newGateBuffer
	g, theirs, err := r.newGate(w)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		theirs.Close()
		g.close()
	})
	return g, kernelEnd{t, theirs}
}

func (k kernelEnd) send(e launch.Event) {
	k.t.Helper()
	if _, err := k.Write(e.Append(nil)); err != nil {
		k.t.Fatal(err)
	}
}

// receive returns the next command, which must be of this kind.
func (k kernelEnd) receive(kind launch.CommandKind) launch.Command {
	k.t.Helper()
	b := make([]byte, 64)
	n, err := k.Read(b)
	if err != nil {
		k.t.Fatal(err)
	}
	c, err := launch.ParseCommand(b[:n])
	if err != nil || c.Kind != kind {
		k.t.Fatalf("got %+v, %v", c, err)
	}
	return c
}

// TestMalformedMessagesCloseTheGate: the host stops reading a gate after a malformed message
// of a compromised kernel. [instance.watchGate] then ends the sandbox.
func TestMalformedMessagesCloseTheGate(t *testing.T) {
	for name, msg := range map[string][]byte{
		"no hello": {'e', 0, 0, 0, 1, 0, 0, 0, 0}, "nonsense": {0xff}, "half": {'x', 0}, "too long": bytes.Repeat([]byte{'x'}, 300<<10),
	} {
		g, kernel := openTestGate(t, nil)
		if name != "no hello" {
			if _, err := kernel.Write([]byte{'h', 1}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := kernel.Write(msg); err != nil {
			t.Fatal(err)
		}
		select {
		case <-g.done:
		case <-time.After(time.Minute):
			t.Errorf("%s: the gate is still open", name)
		}
	}
}

// TestQuestionsAreBounded: questions beyond the limit are refused, and more are accepted
// once earlier ones are answered or withdrawn.
func TestQuestionsAreBounded(t *testing.T) {
	j := newJudge(t)
	g, kernel := openTestGate(t, j)
	const n, more = maxAsked, 300
	expectVerdict := func(want bool, ids func(id uint64) bool) {
		t.Helper()
		if c := kernel.receive(launch.Verdict); c.Allow != want || !ids(c.ID) {
			t.Fatalf("got %+v", c)
		}
	}
	kernel.send(launch.Event{Kind: launch.Hello})
	for id := range uint64(n + more) {
		kernel.send(launch.Event{Kind: launch.Exec, ID: id, Args: []string{"held"}})
		if id >= n {
			expectVerdict(false, func(got uint64) bool { return got == id })
		}
	}
	kernel.send(launch.Event{Kind: launch.Exec, ID: 0, Args: []string{"held"}}) // a second time: the judge is asked once
	j.until("the questions wait", func() bool { return j.waits == n })
	if j.missed != more {
		t.Errorf("%d are missed, want %d", j.missed, more)
	}
	for id := range uint64(n) {
		if id%2 == 0 {
			kernel.send(launch.Event{Kind: launch.GiveUp, ID: id})
		}
	}
	for range n / 2 {
		expectVerdict(true, func(got uint64) bool { return got%2 == 0 }) // a verdict without effect
	}
	j.until("half of the questions are withdrawn", func() bool { return j.gaveUp == n/2 && j.waits == n/2 })
	for range n / 2 {
		j.held <- false
	}
	for range n / 2 {
		expectVerdict(false, func(got uint64) bool { return got%2 == 1 })
	}
	// Large questions are bounded by their total size.
	long := strings.Repeat("x", 90<<10)
	refused := 0
	for id := range uint64(200) {
		e := launch.Event{Kind: launch.Exec, ID: 1000 + id, Args: []string{"held", long}}
		kernel.send(e)
		if (int(id)+1)*len(e.Append(nil)) > maxAskedBytes {
			refused++
			expectVerdict(false, func(got uint64) bool { return got == 1000+id })
		}
	}
	if refused == 0 {
		t.Error("none was refused")
	}
	g.close()
	<-g.done
	j.until("the end of the gate ends all questions", func() bool { return j.waits == 0 })
}

// TestSettleAwaitsAnswers: a question that was asked before [Runtime.Settle] is answered
// when it returns, also if whoever asked has ended. The attack is on a run: a service of its
// template asks just before it is ended, and a late answer counts as the run's violation.
func TestSettleAwaitsAnswers(t *testing.T) {
	j := newJudge(t)
	g, kernel := openTestGate(t, j)
	kernel.send(launch.Event{Kind: launch.Hello})
	settle := func(ctx context.Context, id uint64) chan error {
		t.Helper()
		kernel.send(launch.Event{Kind: launch.Exec, ID: id, Args: []string{"held"}})
		settled := make(chan error, 1)
		go func() { settled <- g.settle(ctx) }()
		kernel.send(launch.Event{Kind: launch.Done, ID: kernel.receive(launch.Observe).ID})
		j.until("the question waits", func() bool { return j.waits == 1 })
		return settled
	}
	settled := settle(t.Context(), 7)
	select {
	case err := <-settled:
		t.Fatalf("it returned %v before the answer", err)
	case <-time.After(50 * time.Millisecond):
	}
	j.held <- true
	if err := <-settled; err != nil {
		t.Fatal(err)
	}
	kernel.receive(launch.Verdict)
	// The attack: the question is never answered, so that the run waits for ever.
	ctx, cancel := context.WithCancel(t.Context())
	settled = settle(ctx, 8)
	cancel()
	if err := <-settled; !errors.Is(err, context.Canceled) {
		t.Errorf("with a question that stays open: %v", err)
	}
	if err := g.conn.Close(); err != nil {
		t.Fatal(err)
	}
	if err := g.settle(t.Context()); err == nil {
		t.Error("a closed gate settles")
	}
}

// TestUnreadVerdictsAreBounded: a kernel that reads no verdicts cannot make goroutines pile
// up in the server.
func TestUnreadVerdictsAreBounded(t *testing.T) {
	g, kernel := openTestGate(t, nil)
	before := runtime.NumGoroutine()
	send := func(e launch.Event) error { return unix.Send(int(kernel.Fd()), e.Append(nil), unix.MSG_DONTWAIT) }
	if err := send(launch.Event{Kind: launch.Hello}); err != nil {
		t.Fatal(err)
	}
	stuck := 0
	for id := uint64(0); id < 8*maxAsked && stuck < 100; {
		switch err := send(launch.Event{Kind: launch.Exec, ID: id, Args: []string{"true"}}); {
		case err == nil:
			id, stuck = id+1, 0
			if id%64 == 0 { // give the goroutines time to judge them
				time.Sleep(2 * time.Millisecond)
			}
		case errors.Is(err, unix.EAGAIN):
			stuck++
			time.Sleep(time.Millisecond)
		default:
			t.Fatal(err)
		}
	}
	if n := runtime.NumGoroutine() - before; n > maxAsked+50 {
		t.Errorf("%d goroutines wait, want at most %d", n, maxAsked)
	}
	g.close()
	<-g.done
}
