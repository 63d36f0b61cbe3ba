package guest

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"postern/internal/guest/processpb"
)

// TestMain lets the test's binary be the first process of a "sandbox": its
// waiting for every child would take those of other tests.
func TestMain(m *testing.M) {
	if dir := os.Getenv("GUEST_TEST_INIT"); dir != "" {
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
		i := &Init{
			Server:       []string{"/bin/sh", "-c", "echo $$ >> " + dir + "/server; (sleep 0.05 & echo $! >> " + dir + "/orphan); exec sleep 100"},
			ServicesFile: dir + "/services", User: testUser,
			Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		}
		err := i.Run(ctx)
		stop()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// pids returns the numbers in a file, waiting until there are n.
func pids(t *testing.T, file string, n int) []int {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		b, _ := os.ReadFile(file)
		if f := strings.Fields(string(b)); len(f) >= n {
			var list []int
			for _, s := range f {
				pid, _ := strconv.Atoi(s)
				list = append(list, pid)
			}
			return list
		}
		if time.Now().After(end) {
			t.Fatalf("%s: got %q, want %d lines", file, b, n)
		}
	}
}

func TestInitKeepsRunning(t *testing.T) {
	dir := userDir(t)
	service := dir + "/service.sh"
	for name, text := range map[string]string{
		"/service.sh": "#!/bin/sh\nid -un > $1/who\necho $$ >> $1/$2\nexec sleep 100\n",
		"/services":   "# comment\n" + service + "  " + dir + " runs # why\n/no/such thing\n",
	} {
		if err := os.WriteFile(dir+name, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "GUEST_TEST_INIT="+dir)
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	server := pids(t, dir+"/server", 1)[0]
	run := pids(t, dir+"/runs", 1)[0]
	if who, _ := os.ReadFile(dir + "/who"); string(who) != testUser+"\n" {
		t.Errorf("service runs as %q, want %s", who, testUser)
	}
	orphan := pids(t, dir+"/orphan", 1)[0]
	gone := func(what string, pid int) {
		t.Helper()
		for end := time.Now().Add(time.Minute); unix.Kill(pid, 0) == nil; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s %d is still there", what, pid)
			}
		}
	}
	gone("orphan", orphan) // also as a zombie
	for n, pid := range []int{server, run} {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		gone("killed process", pid)
		if again := pids(t, filepath.Join(dir, []string{"server", "runs"}[n]), 2)[1]; again == pid {
			t.Errorf("got pid %d again", pid)
		}
	}
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("init: %v", err)
	}
	gone("server", pids(t, dir+"/server", 2)[1])
	gone("service", pids(t, dir+"/runs", 2)[1])
}

func TestParseServices(t *testing.T) {
	for _, tt := range []struct {
		name, in, want string
		fails          bool
	}{
		{"empty", "", "[]", false},
		{"comments and blanks", "# a\n\n  /bin/x  -a\tb # c\n", "[[/bin/x -a b]]", false},
		{"relative", "/bin/x\nsleep 1\n", "[]", true},
	} {
		got, err := parseServices(strings.NewReader(tt.in))
		if fmt.Sprint(got) != tt.want || (err != nil) != tt.fails {
			t.Errorf("%s: got %v, %v, want %s", tt.name, got, err, tt.want)
		}
	}
}

// TestProcessLimit: daemonized processes of a user count too, and the guest still answers
// at the limit. (Linux exempts root from
// this limit, gVisor does not: the end-to-end test has root's bomb.)
func TestProcessLimit(t *testing.T) {
	// An account that nothing else on the machine runs as: the limit counts all.
	const limit, account = 40, "games"
	anywhere := "/"
	g := newRig(t, func(c *Config) { c.MaxProcesses, c.DefaultUser = limit, account })
	a := must(lookupAccount(account))
	// Not a bomb without end: at most 100, gone after a minute or when they are killed.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	t.Cleanup(func() { endAll(t, a.uid) })
	bomb := shell("for i in $(seq 100); do setsid sh -c '(sleep 60 >/dev/null 2>&1 &)' & done; wait")
	bomb.Process.Cwd = &anywhere
	st, err := g.proc.Start(ctx, connect.NewRequest(bomb))
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond)
	if _, err := g.proc.List(t.Context(), connect.NewRequest(&processpb.ListRequest{})); err != nil {
		t.Errorf("list: %v", err)
	}
	var r result
	for st.Receive() {
		r.take(st.Msg().GetEvent())
	}
	if !strings.Contains(string(r.stderr), "fork") {
		t.Errorf("got %q %v, want forks to fail", r.stderr, r.end)
	}
	st.Close()
	endAll(t, a.uid)
	// At the limit, a client gets an error that says so.
	var refused error
	for range limit + 1 {
		sleep := shell("exec sleep 600")
		sleep.Process.Cwd = &anywhere
		st, err := g.proc.Start(t.Context(), connect.NewRequest(sleep))
		if err == nil {
			defer st.Close()
			st.Receive()
			err = st.Err()
		}
		if refused = err; err != nil {
			break
		}
	}
	if got, want := connect.CodeOf(refused), connect.CodeResourceExhausted; got != want {
		t.Errorf("at the limit: got %v, want %v", refused, want)
	}
}

// endAll ends all processes of a user and waits until they are gone.
func endAll(t *testing.T, uid uint32) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		left := 0
		all, _ := filepath.Glob("/proc/[0-9]*")
		for _, proc := range all {
			var st unix.Stat_t
			if unix.Stat(proc, &st) != nil || st.Uid != uid {
				continue
			}
			if stat, _ := os.ReadFile(proc + "/stat"); strings.Contains(string(stat), ") Z ") {
				continue // its parent's to reap
			}
			left++
			if pid, err := strconv.Atoi(filepath.Base(proc)); err == nil {
				_ = unix.Kill(pid, unix.SIGKILL) // it may have ended
			}
		}
		if left == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d processes of %d stay", left, uid)
		}
	}
}

// TestCapabilitiesAreTaken: root's processes cannot lift the limit, whichever thread of the
// guest started them.
func TestCapabilitiesAreTaken(t *testing.T) {
	if _, _, e := syscall.AllThreadsSyscall(unix.SYS_GETPID, 0, 0, 0); e != 0 {
		t.Fatal("the guest is built without cgo: set CGO_ENABLED=0 to test it as it is")
	}
	g := newRig(t)
	const sysAdmin, sysResource = uint64(1) << 21, uint64(1) << 24
	for range 20 {
		r, err := g.run(asUser(connect.NewRequest(shell("grep -h CapBnd /proc/self/status")), "root"))
		if err != nil {
			t.Fatal(err)
		}
		set, err := strconv.ParseUint(strings.TrimSpace(strings.TrimPrefix(string(r.stdout), "CapBnd:")), 16, 64)
		if err != nil || set&(sysAdmin|sysResource) != 0 {
			t.Fatalf("got %q, %v, want a set without CAP_SYS_ADMIN and CAP_SYS_RESOURCE", r.stdout, err)
		}
	}
	threads, _ := filepath.Glob("/proc/self/task/*/status")
	for _, file := range threads {
		b, _ := os.ReadFile(file)
		for line := range strings.Lines(string(b)) {
			if rest, ok := strings.CutPrefix(line, "CapBnd:"); ok {
				if set, err := strconv.ParseUint(strings.TrimSpace(rest), 16, 64); err != nil || set&(sysAdmin|sysResource) != 0 {
					t.Errorf("%s: got %q", file, line)
				}
			}
		}
	}
}
