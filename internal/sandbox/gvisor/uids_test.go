package gvisor

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
)

// processes returns the processes of a sandbox that r has started. Start does not wait
// for the end of its launcher, which is root's and in the sandbox's cgroup. It is the
// only child of this process there, so it is waited for.
func processes(t *testing.T, r *Runtime, id string) []int {
	t.Helper()
	pids, err := r.cgroups.pids(id)
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		// Not its command line, which is empty while it ends.
		stat, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat") // it may have ended
		_, after, _ := strings.Cut(string(stat), ") ")                 // state, parent
		if of := strings.Fields(after); len(of) > 1 && of[1] == strconv.Itoa(os.Getpid()) {
			awaitEnd(t, pid)
		}
	}
	if pids, err = r.cgroups.pids(id); err != nil || len(pids) < 3 {
		t.Fatalf("processes: got %v, %v", pids, err)
	}
	return pids
}

// statuses are those of all threads of a sandbox, by thread, and its processes.
func statuses(t *testing.T, r *Runtime, id string) (all map[string]map[string]string, pids []int) {
	t.Helper()
	pids = processes(t, r, id)
	all = map[string]map[string]string{}
	for _, pid := range pids {
		tasks, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/status")
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range tasks {
			b, err := os.ReadFile(path)
			if errors.Is(err, unix.ESRCH) || errors.Is(err, os.ErrNotExist) {
				continue // it has ended
			}
			if err != nil {
				t.Fatal(err)
			}
			fields := map[string]string{}
			for l := range strings.Lines(string(b)) {
				k, v, _ := strings.Cut(l, ":")
				fields[k] = strings.TrimSpace(v)
			}
			all[path] = fields
		}
	}
	return all, pids
}

// userOf is the one user that all threads of a sandbox have, really, in effect,
// saved and for files, and that is their only group, too.
func userOf(t *testing.T, r *Runtime, id string) (user uint32, pids []int) {
	t.Helper()
	all, pids := statuses(t, r, id)
	for path, f := range all {
		n, err := strconv.ParseUint(strings.Fields(f["Uid"])[0], 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		if user == 0 {
			user = uint32(n)
		}
		want := strings.TrimSpace(strings.Repeat(fmt.Sprint(user)+"\t", 4))
		if f["Uid"] != want || f["Gid"] != want || f["Groups"] != "" {
			t.Errorf("%s (%s): got users %q, groups %q and %q, want %q and no others", path, f["Name"], f["Uid"], f["Gid"], f["Groups"], want)
		}
	}
	return user, pids
}

// TestEachSandboxIsAUserOfItsOwn: the processes of a sandbox, including its gofer, run as a
// user that no other process on the host has.
func TestEachSandboxIsAUserOfItsOwn(t *testing.T) {
	needRoot(t)
	if err := syscall.Setgroups([]int{0, 4}); err != nil { // as a login of root's has
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Setgroups(nil); err != nil {
			t.Error(err)
		}
	})
	r := newRuntime(t, t.TempDir())
	volume := t.TempDir()
	a, ha := start(t, r, func(s *sandbox.Spec) {
		s.Mounts = []sandbox.Mount{{Source: volume, Destination: "/mnt/volume"}}
	})
	b, hb := start(t, r, nil)
	snapshot := filepath.Join(t.TempDir(), "snapshot")
	if err := r.Save(t.Context(), b.ID, snapshot, sandbox.SaveOptions{Keep: true}); err != nil {
		t.Fatal(err)
	}
	c, hc := start(t, r, func(s *sandbox.Spec) { s.From = snapshot })

	users := map[uint32]string{}
	all := map[string][]int{}
	for _, id := range []string{a.ID, b.ID, c.ID} {
		user, pids := userOf(t, r, id)
		if other := users[user]; other != "" {
			t.Errorf("%s and %s are both user %d", id, other, user)
		}
		if user == nobody || user < DefaultIDs().First || uint64(user) >= DefaultIDs().end() {
			t.Errorf("%s is user %d, want one of %s", id, user, DefaultIDs())
		}
		users[user], all[id] = id, pids
	}
	// What broke out of a sandbox as its user, and even saw the others.
	for user, id := range users {
		for other, pids := range all {
			for _, pid := range pids {
				kill := exec.Command("/bin/sh", "-c", "kill -0 "+strconv.Itoa(pid))
				kill.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
				out, err := kill.CombinedOutput()
				if own := id == other; (err == nil) != own && !strings.Contains(string(out), "No such process") {
					t.Errorf("a process with the user of %s may signal process %d of %s: got %v, want %v", id, pid, other, err == nil, own)
				}
			}
		}
	}
	for _, h := range []*host{ha, hb, hc} {
		if got := h.do(t, 0, "write", "/var/x", "1"); strings.Contains(got, "error") {
			t.Errorf("write a file: %s", got)
		}
	}
	// What a user inside makes in a volume belongs to that one, as ever.
	if got := ha.do(t, 0, "write", "/mnt/volume/x", "1"); strings.Contains(got, "error") {
		t.Errorf("write a file in a volume: %s", got)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(volume, "x"), &st); err != nil || st.Uid != 0 || st.Gid != 0 {
		t.Errorf("root's file in a volume: got owner %d:%d, %v, want 0:0", st.Uid, st.Gid, err)
	}
	// It is what the guest reads as its input. As its owner a sandbox could take
	// it away from the whole host.
	if err := unix.Stat(os.DevNull, &st); err != nil || users[st.Uid] != "" {
		t.Errorf("%s belongs to a sandbox: %d, %v", os.DevNull, st.Uid, err)
	}
	for id, pids := range all {
		for _, pid := range pids {
			m, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/mountinfo")
			if err == nil && strings.Contains(string(m), " - proc ") {
				t.Errorf("process %d of %s has a /proc of the host mounted:\n%s", pid, id, m)
			}
		}
		if err := r.Stop(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	if f := footprintOf(t, r); !f.none() {
		t.Errorf("left: %v", f)
	}
}

// TestUserIDsAreNeverShared: sandboxes of one server or of two never share a user ID, even
// after a server has ended. A removed sandbox frees its ID.
func TestUserIDsAreNeverShared(t *testing.T) {
	dir := t.TempDir()
	of := IDRange{First: 5000, Count: 3}
	open := func(state string) *ids {
		t.Helper()
		s, err := openIDs(dir, of, state)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	state1, state2 := t.TempDir(), t.TempDir()
	one, two := open(state1), open(state2)
	take := func(s *ids, sandbox string) uint32 {
		t.Helper()
		if err := os.Mkdir(filepath.Join(s.within, sandbox), 0o700); err != nil {
			t.Fatal(err)
		}
		id, err := s.take(sandbox)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	got := []uint32{take(one, "a"), take(two, "b"), take(one, "c")}
	if want := []uint32{5000, 5001, 5002}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if _, err := two.take("d"); !errors.Is(err, errNoIDs) || !strings.Contains(err.Error(), "--sandbox-uids") {
		t.Errorf("one more than there are: got %v", err)
	}
	// Of two sandboxes with one name, each server has its own.
	if err := two.give("a"); err != nil {
		t.Error(err)
	}
	if _, err := two.take("d"); !errors.Is(err, errNoIDs) {
		t.Errorf("after another server ended its own sandbox of that name: got %v", err)
	}
	// The next server ends what the former one left.
	if err := open(state1).give("a"); err != nil {
		t.Error(err)
	}
	if got := take(two, "d"); got != 5000 {
		t.Errorf("after its sandbox has ended: got %d, want 5000", got)
	}
	// The former one, if it still runs, frees nothing of others.
	if err := one.give("a"); err != nil {
		t.Error(err)
	}
	if _, err := one.take("e"); !errors.Is(err, errNoIDs) {
		t.Errorf("an id was given back twice: got %v", err)
	}
	// A server whose data was removed with all its sandboxes.
	if err := os.RemoveAll(state1); err != nil {
		t.Fatal(err)
	}
	if got := take(two, "f"); got != 5002 {
		t.Errorf("after a server's data is gone: got %d, want 5002", got)
	}
	for _, s := range []string{"b", "d", "f"} {
		if err := two.give(s); err != nil {
			t.Error(err)
		}
	}
	if es, err := os.ReadDir(dir); err != nil || len(es) > 0 {
		t.Errorf("left: %v, %v", es, err)
	}
}

// TestIDRange: a range of user IDs that others use is refused, with the reason.
func TestIDRange(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"70000-100", ""},
		{"1000-1", ""},
		{"2147483647-1", ""},
		{"", "not FIRST-COUNT"},
		{"70000", "not FIRST-COUNT"},
		{"70000-100-1", "not FIRST-COUNT"},
		{"-1-5", "not FIRST-COUNT"},
		{"70000:100", "not FIRST-COUNT"},
		{"4294967296-1", "not FIRST-COUNT"},
		{"70000-0", "empty"},
		{"0-100", "between"},
		{"999-1", "between"},
		{"2147483647-2", "between"},
		{"4294967295-4294967295", "between"},
		{"65000-1000", "nobody"},
	} {
		r, err := ParseIDRange(c.in)
		if c.want == "" && (err != nil || r.String() != c.in) || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%q: got %v, %v, want %q", c.in, r, err, c.want)
		}
	}
	if err := DefaultIDs().check(); err != nil {
		t.Errorf("the default: %v", err)
	}
	r := IDRange{First: 100_000, Count: 1000}
	for _, c := range []struct {
		name, file string
		id, count  int
		want       bool
	}{
		{"others", "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n", 2, -1, false},
		{"a user", "root:x:0:0::/:\nann:x:100999:1000::/home/ann:/bin/sh", 2, -1, true},
		{"just before and after", "a:x:99999:1::/:\nb:x:101000:1::/:\n", 2, -1, false},
		{"ranges of containers", "ann:165536:65536\n", 1, 2, false},
		{"a range that begins before", "ann:65536:65536\n", 1, 2, true},
		{"a range within", "ann:100500:1\n", 1, 2, true},
		{"an empty range", "ann:100500:0\n", 1, 2, false},
		{"malformed lines", "+\n\n# x:y:z\n::::::\nann:x:ten\n", 2, -1, false},
		{"too many for a number", "ann:100500:99999999999999999999\n", 1, 2, false},
	} {
		line, err := r.usedIn(strings.NewReader(c.file), c.id, c.count)
		if err != nil || (line != "") != c.want {
			t.Errorf("%s: got %q, %v, want %v", c.name, line, err, c.want)
		}
	}
	for _, c := range []struct {
		name, in string
		want     bool
	}{
		{"the host", "         0          0 4294967295\n", true},
		{"a container with few", "0 100000 65536\n", false},
		{"one with more", "0 100000 65536\n100000 300000 1000\n", true},
		{"half", "0 100000 100500\n", false},
		{"nothing", "", false},
		{"nonsense", "0 0\n-1 0 5\nx y z\n", false},
	} {
		if got := r.mapped(c.in); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
	// Of this machine: root's group, at least, is in its files.
	taken := IDRange{First: 0, Count: 1}
	if err := taken.checkUnused(); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a range with root: got %v", err)
	}
}
