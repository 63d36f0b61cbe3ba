package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A session is the state of an SDK user's sandbox before and after a restart.
type session struct {
	ID            string
	PIDs          []int
	Text          string
	Beats         []float64 // times when a shell that starts nothing counted, in seconds since 1970
	Starts        []float64 // times when the counter had started a program
	First, Second int
	Attempts      []string
}

// play runs test/conformance/restart.mjs against the server.
func (s *server) play(args ...string) (p session) {
	s.t.Helper()
	cmd := exec.Command("node", append([]string{"../conformance/restart.mjs"}, args...)...)
	cmd.Env = append(os.Environ(), "E2B_API_KEY="+s.key, "E2B_API_URL=http://"+s.web, "E2B_SANDBOX_URL=http://"+s.web)
	out, err := cmd.CombinedOutput()
	if err == nil {
		err = json.Unmarshal(out, &p)
	}
	if err != nil {
		s.t.Fatalf("restart.mjs %v: %v\n%s", args, err, out)
	}
	return p
}

// again starts the next server on the same data directory, for the test t and later
// ones.
func (s *server) again(t *testing.T, flags ...string) *server {
	t.Helper()
	next := start(t, s.data, flags...)
	next.key = s.key
	return next
}

// keeperOf returns the ID of the process that holds the links of a data directory's
// sandboxes, or 0.
func keeperOf(t testing.TB, data string) int {
	t.Helper()
	for pid, cmd := range commandLines(t) {
		if cmd == "postern-keeper\x00"+data+"\x00" {
			return pid
		}
	}
	return 0
}

func commandLines(t testing.TB) map[int]string {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	all := map[int]string{}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			b, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")) // it may end meanwhile
			all[pid] = string(b)
		}
	}
	return all
}

// sentryOf returns the ID of the process of a sandbox's gVisor kernel.
func sentryOf(t testing.TB, data, id string) int {
	t.Helper()
	if name, err := os.Readlink(filepath.Join(data, "sandboxes", id)); err == nil {
		id = name // it was prepared under a name of its own
	}
	for pid, cmd := range commandLines(t) {
		if strings.HasPrefix(cmd, "runsc-sandbox\x00") && strings.HasSuffix(cmd, "\x00"+id+"\x00") {
			return pid
		}
	}
	t.Fatalf("no process is the kernel of %s", id)
	return 0
}

var cgroupOf = regexp.MustCompile(`/(postern/[^/\n]+)/([ip][a-z0-9]{20})`)

// footprint returns the processes, mounts and cgroups of a data directory's sandboxes,
// found without the server. Those of other servers are not included.
func footprint(t testing.TB, data string) (all []string) {
	t.Helper()
	state := filepath.Join(data, "sandboxes")
	ids, err := os.ReadDir(state)
	if err != nil {
		t.Fatal(err)
	}
	parents := map[string]bool{}
	for pid, cmd := range commandLines(t) {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		m := cgroupOf.FindStringSubmatch(string(b))
		ours := strings.Contains(cmd, state)
		if m != nil && (ours || slices.ContainsFunc(ids, func(e os.DirEntry) bool { return e.Name() == m[2] })) {
			parents[m[1]], ours = true, true
		}
		if ours {
			all = append(all, fmt.Sprintf("process %d %s", pid, strings.ReplaceAll(cmd, "\x00", " ")))
		}
	}
	for _, e := range ids {
		all = append(all, "file "+e.Name())
	}
	for p := range parents {
		dirs, _ := filepath.Glob("/sys/fs/cgroup/*/" + p + "/[ip]*")
		v2, _ := filepath.Glob("/sys/fs/cgroup/" + p + "/[ip]*")
		for _, d := range append(dirs, v2...) {
			all = append(all, "cgroup "+d)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(mounts)) {
		if strings.Contains(l, data) {
			all = append(all, "mount "+l)
		}
	}
	return all
}

// noFootprint waits until the sandboxes of a data directory have nothing on this
// machine: the kernel removes ended ones asynchronously.
func noFootprint(t testing.TB, data string) {
	t.Helper()
	var left []string
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if left = footprint(t, data); len(left) == 0 || time.Now().After(end) {
			break
		}
	}
	if len(left) > 0 {
		t.Errorf("left:\n%s", strings.Join(left, "\n"))
	}
}

// sweep kills the processes of a killed server that a failed test has left.
func sweep(t testing.TB, data string) {
	t.Helper()
	left := []int{keeperOf(t, data)}
	for _, l := range footprint(t, data) {
		var pid int
		if _, err := fmt.Sscanf(l, "process %d", &pid); err == nil {
			left = append(left, pid)
		}
	}
	for _, pid := range left {
		if pid > 0 {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// reason returns the reason in the record for which a sandbox was lost.
func (s *server) reason(id string) string {
	s.t.Helper()
	for l := range strings.Lines(s.mustCLI("audit", "list", "--object", id)) {
		if strings.Contains(l, "sandbox.lost") {
			return l
		}
	}
	return ""
}

// An outsideWorld holds the two servers that a sandbox tries to reach.
type outsideWorld struct {
	mu  sync.Mutex // guards got
	got map[string][]time.Time
}

func (o *outsideWorld) serve(t *testing.T, addr string) {
	t.Helper()
	if out, err := exec.Command("ip", "addr", "add", addr+"/32", "dev", "lo").CombinedOutput(); err != nil {
		t.Fatalf("ip addr add: %v: %s", err, out)
	}
	l, err := net.Listen("tcp", addr+":80")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			o.mu.Lock()
			o.got[addr] = append(o.got[addr], time.Now())
			o.mu.Unlock()
			fmt.Fprint(c, "hello")
			c.Close()
		}
	}()
}

// heard returns once all earlier connections to addr are counted.
func (o *outsideWorld) heard(t *testing.T, addr string) {
	t.Helper()
	c, err := net.Dial("tcp", addr+":80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.ReadAll(c); err != nil {
		t.Fatal(err)
	}
}

// between counts connections between two times.
func (o *outsideWorld) between(addr string, from, to time.Time) (n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, at := range o.got[addr] {
		if at.After(from) && at.Before(to) {
			n++
		}
	}
	return n
}

// goesOn checks that a session still has its state.
func (p session) goesOn(t *testing.T, begun session, atLeast int) {
	t.Helper()
	if p.Text != "42" {
		t.Errorf("the interpreter says %q, want 42", p.Text)
	}
	if p.First < atLeast || p.Second <= p.First {
		t.Errorf("the counter: got %d, then %d; want at least %d and more", p.First, p.Second, atLeast)
	}
	for _, pid := range begun.PIDs {
		if !slices.Contains(p.PIDs, pid) {
			t.Errorf("process %d is gone: got %v", pid, p.PIDs)
		}
	}
	for _, a := range p.Attempts {
		if strings.HasPrefix(a, "203.0.113.11 ") && strings.HasSuffix(a, "hello") {
			t.Errorf("it reached what it may not: %s", a)
		}
	}
}

// TestRestart kills and stops the server under running sandboxes. It runs in a
// network namespace of its own, with an outside that it can watch.
func TestRestart(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestRestart$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestRestart") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("ip link: %v: %s", err, out)
	}
	top := t
	const may, mayNot = "203.0.113.10", "203.0.113.11"
	o := &outsideWorld{got: map[string][]time.Time{}}
	o.serve(t, may)
	o.serve(t, mayNot)
	data := t.TempDir()
	t.Cleanup(func() { sweep(t, data) }) // after the servers have ended
	flags := []string{"--egress-allow", may, "--egress-allow", mayNot, "--pool-max", "1"}
	s := start(t, data, flags...)

	begun := s.play("begin")
	dying := s.sandbox(nil)
	brief := s.sandbox(nil)
	began := time.Now()
	eventually(t, "the sandbox reaches the outside", func() bool { return o.between(may, began, time.Now()) > 0 })

	t.Run("kill -9", func(t *testing.T) {
		keeper := keeperOf(t, s.data)
		before := s.play("check", begun.ID)
		if status, _, answer := s.project("POST", "/sandboxes/"+brief.id+"/timeout", `{"timeout": 4}`); status != http.StatusNoContent { // which ends while no server runs
			t.Fatalf("timeout: %d %s", status, answer)
		}
		s.kill(syscall.SIGKILL)
		o.heard(t, may) // a connection that was made in the moment of the kill is allowed
		down := time.Now()
		syscall.Kill(sentryOf(t, s.data, dying.id), syscall.SIGKILL)
		time.Sleep(5 * time.Second)
		up := time.Now()
		s = s.again(top, flags...)
		if got := keeperOf(t, s.data); got != keeper || keeper == 0 {
			t.Errorf("the keeper: got process %d, want %d", got, keeper)
		}
		if n := o.between(may, down, up); n > 0 {
			t.Errorf("%d connections got out while no server ran", n)
		}
		after := s.play("check", begun.ID)
		after.goesOn(t, begun, before.Second)
		beats := 0
		for _, at := range after.Beats {
			if at > float64(down.UnixMilli())/1000 && at < float64(up.UnixMilli())/1000 {
				beats++
			}
		}
		if beats < 2 {
			t.Errorf("it counted %d times while no server ran", beats)
		}
		// Running processes go on, but no program starts while nobody can judge and record it.
		starts := 0
		for _, at := range after.Starts {
			if at > float64(down.UnixMilli())/1000+1 && at < float64(up.UnixMilli())/1000 {
				starts++
			}
		}
		if starts > 0 {
			t.Errorf("it started %d programs while no server ran", starts)
		}
		eventually(t, "what it may reach it reaches again", func() bool { return o.between(may, up, time.Now()) > 0 })
		for id, want := range map[string]string{dying.id: "died", brief.id: ""} {
			eventually(t, "end of "+id, func() bool {
				status, _, _ := s.project("GET", "/sandboxes/"+id, "")
				return status == http.StatusNotFound
			})
			if want != "" {
				eventually(t, "the end of "+id+" on the record", func() bool { return s.reason(id) != "" })
			}
			if got := s.reason(id); !strings.Contains(got, want) || (want == "") != (got == "") {
				t.Errorf("%s: lost for the reason %q, want %q", id, got, want)
			}
		}
		eventually(t, "nothing is left of those that ended", func() bool {
			return !slices.ContainsFunc(footprint(t, s.data), func(l string) bool { return strings.Contains(l, dying.id) || strings.Contains(l, brief.id) })
		})
	})

	t.Run("kill -9 three times in a row", func(t *testing.T) {
		for range 3 {
			s.kill(syscall.SIGKILL)
			s = s.again(top, flags...)
		}
		s.play("check", begun.ID).goesOn(t, begun, 1)
	})

	t.Run("SIGTERM", func(t *testing.T) {
		before := s.play("check", begun.ID)
		if err := s.kill(syscall.SIGTERM); err != nil {
			t.Errorf("it ended with %v", err)
		}
		noFootprint(t, s.data)
		eventually(t, "the keeper's end", func() bool { return keeperOf(t, s.data) == 0 })
		stopped := time.Now()
		time.Sleep(time.Second)
		s = s.again(top, flags...)
		eventually(t, "the sandbox is back", func() bool {
			_, _, b := s.project("GET", "/sandboxes/"+begun.ID, "")
			return strings.Contains(string(b), `"running"`)
		})
		s.play("check", begun.ID).goesOn(t, begun, before.Second)
		eventually(t, "what it may reach it reaches again", func() bool { return o.between(may, stopped, time.Now()) > 0 })
	})

	t.Run("kill -9 of the keeper too", func(t *testing.T) {
		s.kill(syscall.SIGKILL)
		pid := keeperOf(t, s.data)
		if pid == 0 {
			t.Fatal("no keeper")
		}
		syscall.Kill(pid, syscall.SIGKILL)
		s = s.again(top, append(flags, "--pool-min", "0", "--pool-max", "0", "--prepared", "0")...)
		if got := s.reason(begun.ID); !strings.Contains(got, "its link was not kept") && !strings.Contains(got, "died") { // since its gate was not kept either
			t.Errorf("lost for the reason %q", got)
		}
		noFootprint(t, s.data)
	})
	if n := o.between(mayNot, began, time.Now()); n > 0 {
		t.Errorf("%d connections reached what is forbidden", n)
	}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(3 * time.Minute); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// TestKilledUnderLoad kills the server at random instants while sandboxes are
// made, paused, resumed and ended, and each time compares the rows with the
// machine.
func TestKilledUnderLoad(t *testing.T) {
	t.Parallel()
	kills := min(30, times(t, "POSTERN_TEST_KILLS", 12)) // make soak-tests asks for 300, which would take hours here
	data := t.TempDir()
	t.Cleanup(func() { sweep(t, data) }) // after the servers have ended
	s := start(t, data, "--pool-max", "1", "--log", "warn")
	work := func(s *server, end <-chan struct{}) {
		over := func() bool {
			select {
			case <-end:
				return true
			default:
				return false
			}
		}
		for !over() {
			status, b, err := s.create(map[string]any{"templateID": "base", "timeout": 300})
			if err != nil {
				return // it has been killed
			}
			if status != http.StatusCreated {
				t.Errorf("create: status %d", status)
				return
			}
			for _, step := range []string{"pause", "connect", ""} {
				if rand.IntN(3) == 0 {
					break // some stay as they are
				}
				if over() || s.step(b.id, step) != nil {
					break
				}
			}
		}
	}
	states := map[string]int{}
	for i := range kills {
		end := make(chan struct{})
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { work(s, end) })
		}
		time.Sleep(time.Second/2 + rand.N(4*time.Second))
		s.kill(syscall.SIGKILL)
		close(end)
		wg.Wait()
		s = s.again(t, "--pool-max", "1", "--log", "warn")
		for id, state := range s.truth(i) {
			states[state]++
			if err := s.step(id, ""); err != nil {
				t.Errorf("end %s, which is %s: %v", id, state, err)
			}
		}
		if t.Failed() {
			break
		}
	}
	t.Logf("%d kills; found afterwards %v", kills, states)
	if !t.Failed() && kills >= 30 && (states["running"] == 0 || states["paused"] == 0) {
		t.Errorf("the test met too little: %v", states)
	}
	if err := s.kill(syscall.SIGTERM); err != nil {
		t.Errorf("it ended with %v", err)
	}
	noFootprint(t, s.data)
	saved, err := filepath.Glob(filepath.Join(s.data, "snapshots", "p-*"))
	if err != nil || len(saved) > 0 {
		t.Errorf("snapshots are left: %v, %v", saved, err)
	}
}

// step pauses, resumes or kills a sandbox.
func (s *server) step(id, what string) error {
	method, path, body := "POST", "/sandboxes/"+id+"/"+what, `{"timeout": 300}`
	switch what {
	case "":
		method, path, body = "DELETE", "/sandboxes/"+id, ""
	case "pause":
		body = "{}"
	}
	req, err := http.NewRequest(method, "http://"+s.web+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("X-API-KEY", s.key)
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 300 {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, text)
		if resp.StatusCode < 500 {
			s.t.Error(err)
		}
	}
	return err
}

// truth compares each listed sandbox with its real state, and the machine with the
// list. It returns the states.
func (s *server) truth(round int) map[string]string {
	t := s.t
	t.Helper()
	status, _, b := s.project("GET", "/v2/sandboxes?limit=100&state=running,paused", "")
	var rows []struct{ SandboxID, State, EnvdAccessToken string }
	if err := json.Unmarshal(b, &rows); err != nil || status != http.StatusOK {
		t.Fatalf("list: %d %s", status, b)
	}
	states := map[string]string{}
	for _, r := range rows {
		states[r.SandboxID] = r.State
		// Connecting resumes a paused one and returns the token.
		status, _, b := s.project("POST", "/sandboxes/"+r.SandboxID+"/connect", `{"timeout": 300}`)
		var c struct{ EnvdAccessToken string }
		if err := json.Unmarshal(b, &c); err != nil || status >= 300 {
			t.Errorf("round %d: connect to %s, which is %s: %d %s", round, r.SandboxID, r.State, status, b)
			continue
		}
		x := &box{s: s, id: r.SandboxID, access: c.EnvdAccessToken}
		if out, err := x.try("echo $((6*7))", 2*time.Minute); err != nil || out.stdout != "42\n" {
			t.Errorf("round %d: %s, which is %s, says %+v, %v", round, r.SandboxID, r.State, out, err)
		}
	}
	// One more is in the warm pool, or about to be, and has no row.
	var others map[string]bool
	var seen []string
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		others, seen = map[string]bool{}, footprint(t, s.data)
		for _, l := range seen {
			id := sandboxID.FindString(l)
			if _, ok := states[id]; !ok {
				others[id] = true
			}
		}
		if len(others) <= 2 || time.Now().After(end) {
			break
		}
	}
	if len(others) > 2 {
		t.Errorf("round %d: %v are on the machine and in no row:\n%s", round, others, strings.Join(seen, "\n"))
	}
	return states
}

var sandboxID = regexp.MustCompile(`\bi[a-z0-9]{20}\b`)
