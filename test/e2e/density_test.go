package e2e

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// times returns the number of repetitions of a test: the value of the environment
// variable, or fallback if it is not set. "make soak-tests" sets them.
func times(t *testing.T, variable string, fallback int) int {
	t.Helper()
	v := os.Getenv(variable)
	if v == "" {
		return fallback
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return n
}

// A holding counts the machine's resources that a server holds, by kind.
type holding map[string]int64

// holds counts what can leak. A namespace lives as long as its processes, mounts or
// descriptors, and these are counted. Bytes are those of the data directory, without
// its database and the event log, which grow by design.
func (s *server) holds() holding {
	s.t.Helper()
	h := holding{}
	count := func(kind, pattern string) {
		found, err := filepath.Glob(pattern)
		if err != nil {
			s.t.Fatal(err)
		}
		h[kind] = int64(len(found))
	}
	proc := fmt.Sprintf("/proc/%d", s.cmd.Process.Pid)
	// Connections to the database are pooled, and clients' come and go. Of the
	// former there are at most nine, of two or three files each.
	fds, err := filepath.Glob(proc + "/fd/*")
	if err != nil {
		s.t.Fatal(err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && !strings.HasPrefix(to, filepath.Join(s.data, "postern.db")) {
			h["descriptors of the server"]++
		}
	}
	count("threads of the server", proc+"/task/*")
	for _, p := range []string{"runsc-", "postern-launcher"} {
		all, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			s.t.Fatal(err)
		}
		for _, f := range all {
			if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), p) && strings.Contains(string(b), s.data) {
				h["processes "+p]++
			}
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		s.t.Fatal(err)
	}
	h["mounts"] = int64(strings.Count(string(mounts), s.data))
	for _, dir := range []string{"sandboxes", "snapshots", "blobs"} {
		err := filepath.WalkDir(filepath.Join(s.data, dir), func(_ string, d fs.DirEntry, err error) error {
			if err != nil {
				return nil //nolint:nilerr // it went while we looked
			}
			h["files in "+dir]++
			if filepath.Ext(d.Name()) == ".state" {
				return nil // its length varies: runsc writes a time without its trailing zeros, and process IDs
			}
			if i, err := d.Info(); err == nil && !d.IsDir() {
				h["bytes in "+dir] += i.Size()
			}
			return nil
		})
		if err != nil {
			s.t.Fatal(err)
		}
	}
	return h
}

// TestCyclesLeaveNothing creates, pauses, forks, copies and kills sandboxes. They
// leave no process, mount, namespace, cgroup, descriptor, file or byte. POSTERN_TEST_CYCLES multiplies their number.
func TestCyclesLeaveNothing(t *testing.T) {
	s := start(t, t.TempDir(), "--pool-min", "0", "--pool-max", "0", "--prepared", "1", "--snapshots")
	s.await("made snapshot of template")
	var ids []string
	cycle := func(i int) {
		b := s.sandbox(nil)
		ids = append(ids, b.id)
		if i%5 == 0 {
			b.run("echo x >x")
			for _, call := range []string{"pause", "connect", "fork", "snapshots"} {
				if status, _, body := s.project("POST", "/sandboxes/"+b.id+"/"+call, `{}`); status >= 300 {
					t.Fatalf("%s: %d %s", call, status, body)
				}
			}
			if r := b.run("cat x"); r.stdout != "x\n" {
				t.Errorf("its file: %+v", r)
			}
		}
		s.project("DELETE", "/sandboxes/"+b.id, "")
	}
	clear := func() {
		for s.killAll() > 0 {
		}
		_, _, body := s.project("GET", "/snapshots", "")
		for _, id := range snapshotIDs(t, body) {
			s.project("DELETE", "/templates/"+strings.ReplaceAll(id, "/", "%2F"), "")
		}
	}
	for i := range 6 {
		cycle(i)
	}
	clear()
	time.Sleep(2 * time.Second) // until killed processes are reaped: they must not count as held before
	eventually(t, "a sandbox is prepared", func() bool {
		waiting, err := filepath.Glob(filepath.Join(s.data, "sandboxes", "p*", "runsc-*.sock"))
		return err == nil && len(waiting) == 1
	})
	var before holding
	eventually(t, "it is complete", func() bool {
		was := s.holds()
		time.Sleep(time.Second)
		before = s.holds()
		return was["files in sandboxes"] == before["files in sandboxes"] && was["processes runsc-"] == before["processes runsc-"] && before["processes runsc-"] > 0
	})
	// More than the slack below of each kind, so that one left by each cycle shows.
	n := 20 * times(t, "POSTERN_TEST_CYCLES", 1)
	for i := range n {
		cycle(i)
	}
	clear()
	// Killed processes are reaped and idle connections closed asynchronously.
	var more []string
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(500 * time.Millisecond) {
		more = nil
		for kind, a := range s.holds() {
			slack := int64(0)
			switch kind {
			case "descriptors of the server":
				slack = 8 // of the connections of this test
			case "threads of the server":
				slack = max(16, int64(n/2)) // the runtime keeps what it needed at its busiest moment
			}
			if b := before[kind]; a > b+slack {
				more = append(more, fmt.Sprintf("%s: %d before and %d after %d cycles", kind, b, a, n))
			}
		}
		if len(more) == 0 || time.Now().After(end) {
			break
		}
	}
	for _, m := range more {
		t.Error(m)
	}
	nothingLeft(t, ids...)
}

// killAll kills all sandboxes of the project and returns their number.
func (s *server) killAll() int {
	s.t.Helper()
	_, _, b := s.project("GET", "/v2/sandboxes", "")
	ids := sandboxIDs(s.t, b)
	for _, id := range ids {
		s.project("DELETE", "/sandboxes/"+id, "")
	}
	return len(ids)
}

// TestManySandboxesAnswer starts POSTERN_TEST_MANY sandboxes at once. All answer.
func TestManySandboxesAnswer(t *testing.T) {
	n := times(t, "POSTERN_TEST_MANY", 16)
	s := start(t, t.TempDir(), "--max-sandboxes", strconv.Itoa(n), "--pool-min", "0", "--pool-max", "0")
	s.await("made snapshot of template")
	boxes := make([]*box, n)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 4)
	for i := range boxes {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			status, b, err := s.create(map[string]any{"templateID": "base", "timeout": 3600, "envVars": map[string]string{"I": strconv.Itoa(i)}})
			if err != nil || status != http.StatusCreated {
				t.Errorf("number %d: status %d, %v", i, status, err)
				return
			}
			boxes[i] = b
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	for i, b := range boxes {
		if r := b.run("echo $I"); r.stdout != fmt.Sprintln(i) {
			t.Errorf("number %d answers %+v", i, r)
		}
	}
	if err := s.kill(syscall.SIGTERM); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	for _, b := range boxes {
		nothingLeft(t, b.id)
	}
}

func sandboxIDs(t testing.TB, body []byte) (ids []string) {
	t.Helper()
	var page []struct{ SandboxID string }
	if err := json.Unmarshal(body, &page); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	for _, e := range page {
		ids = append(ids, e.SandboxID)
	}
	return ids
}

func snapshotIDs(t testing.TB, body []byte) (ids []string) {
	t.Helper()
	var page []struct{ SnapshotID string }
	if err := json.Unmarshal(body, &page); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	for _, e := range page {
		ids = append(ids, e.SnapshotID)
	}
	return ids
}
