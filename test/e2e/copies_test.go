package e2e

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A machine is one with a machine-id of its own.
type machine struct{ etc string }

func newMachine(t *testing.T, id string) machine {
	t.Helper()
	m := machine{filepath.Join(t.TempDir(), "etc")}
	must(t, "cp", "-a", "/etc", m.etc)
	if err := os.WriteFile(filepath.Join(m.etc, "machine-id"), []byte(id+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return m
}

// start starts a server without sandboxes on m: in a mount namespace that has m's /etc.
func (m machine) start(t *testing.T, data string, flags ...string) *server {
	t.Helper()
	by := []string{"unshare", "--mount", "sh", "-c", `mount --bind "$0" /etc && exec "$@"`, m.etc}
	return startBy(t, by, data, append(flags, "--sandboxes", "off")...)
}

// must runs a command of the machine.
func must(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}

// mounted returns a directory that has the file system of a disk's image.
func mounted(t *testing.T, image string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "disk")
	must(t, "mkdir", dir)
	must(t, "mount", "-o", "loop", image, dir)
	t.Cleanup(func() { must(t, "umount", dir) })
	return dir
}

// TestCopiesSendNothing: what was approved when a backup or a clone was taken leaves the
// original once, and no copy before a person says so there. The data directory is a disk of
// its own, so that a clone has the same inodes.
func TestCopiesSendNothing(t *testing.T) {
	t.Parallel()
	out, addr := listen(t)
	flags := []string{"--route", "sink.test=" + addr, "--log", "warn"}
	images := t.TempDir()
	disk := filepath.Join(images, "disk")
	must(t, "truncate", "-s", "128M", disk)
	must(t, "mkfs.ext4", "-q", disk)
	mount := mounted(t, disk)
	data := filepath.Join(mount, "postern")
	one := newMachine(t, strings.Repeat("1", 32))
	s := one.start(t, data, flags...)
	address, key := s.inbox("analyst")

	at := time.Now().Add(40 * time.Second).Truncate(time.Second)
	soon := s.scheduled(address, key, "n-1", at)
	later := s.scheduled(address, key, "n-2", at.Add(time.Hour))
	state := func(s *server, id string) (a struct {
		State, Note, Digest string
		Version             int64
	},
	) {
		t.Helper()
		if status, err := call(s.local(), http.MethodGet, "http://x/v1/actions/"+id, "", nil, &a); err != nil || status != http.StatusOK {
			t.Fatalf("read %s: %d, %v", id, status, err)
		}
		return a
	}

	// The backup and the clones are taken while the server runs and the mail waits.
	backup := t.TempDir()
	s.mustCLI("backup", filepath.Join(backup, "postern.db"))
	must(t, "cp", "-a", filepath.Join(data, "server.key"), filepath.Join(data, "blobs"), filepath.Join(data, "artifacts"), filepath.Join(data, "runs"), backup)
	must(t, "fsfreeze", "--freeze", mount)
	for _, n := range []string{"2", "3"} {
		must(t, "cp", disk, filepath.Join(images, n))
	}
	must(t, "fsfreeze", "--unfreeze", mount)
	if got := state(s, soon); got.State != "approved" {
		t.Fatalf("n-1 was %s before the copies were complete: %s", got.State, got.Note)
	}

	// A server that was killed is no copy.
	_ = s.kill(syscall.SIGKILL)
	s = one.start(t, data, flags...)
	for _, id := range []string{soon, later} {
		if got := state(s, id); got.State != "approved" {
			t.Errorf("after kill -9 %s is %s in the original, %q", id, got.State, got.Note)
		}
	}

	// Clones start beside the original.
	var clones []*server
	for _, n := range []string{"2", "3"} {
		clone := newMachine(t, strings.Repeat(n, 32)).start(t, filepath.Join(mounted(t, filepath.Join(images, n)), "postern"), flags...)
		clones = append(clones, clone)
		for _, id := range []string{soon, later} {
			if got := state(clone, id); got.State != "pending" || !strings.Contains(got.Note, "machine-id") {
				t.Errorf("clone %s: %s is %s, %q, want pending", n, id, got.State, got.Note)
			}
		}
		if text := clone.mustCLI("audit", "list", "--verb", "record.copy"); !strings.Contains(text, "record.copy") {
			t.Errorf("clone %s: the record does not say so:\n%s", n, text)
		}
	}
	until(t, "the original has sent n-1", func() bool { return out.count("n-1") == 1 && state(s, soon).State == "done" })
	if got := state(s, later); got.State != "approved" {
		t.Errorf("n-2 is %s in the original, %q", got.State, got.Note)
	}

	// The newer checkpoint is gone with the old directory.
	empty := filepath.Join(t.TempDir(), "data")
	must(t, "cp", "-a", backup, empty)
	restored := one.start(t, empty, flags...)
	for _, id := range []string{soon, later} {
		if got := state(restored, id); got.State != "pending" {
			t.Errorf("restored elsewhere: %s is %s, want pending", id, got.State)
		}
	}

	// The newer checkpoint is there: it does not start before the operator says so.
	if err := s.kill(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for _, end := range []string{"", "-wal", "-shm"} {
		must(t, "rm", "-f", filepath.Join(data, "postern.db"+end))
	}
	must(t, "cp", filepath.Join(backup, "postern.db"), data)
	refused, err := exec.Command(postern(t), "up", "--data", data, "--listen", "127.0.0.1:0", "--smtp", "127.0.0.1:0", "--sandboxes", "off").CombinedOutput()
	if err == nil || !strings.Contains(string(refused), "--accept-rollback") {
		t.Fatalf("started on an older copy: %v\n%s", err, refused)
	}
	s = one.start(t, data, append(flags, "--accept-rollback")...)
	for _, id := range []string{soon, later} {
		if got := state(s, id); got.State != "pending" {
			t.Errorf("restored in its place: %s is %s, want pending", id, got.State)
		}
	}

	// A person lets a copy send.
	if out.count("n-1") != 1 {
		t.Fatalf("n-1 was sent %d times", out.count("n-1"))
	}
	got := state(clones[0], soon)
	if status, err := call(clones[0].local(), http.MethodPost, "http://x/v1/actions/"+soon+"/decision", "",
		map[string]any{"version": got.Version, "digest": got.Digest, "approve": true}, nil); err != nil || status != http.StatusOK {
		t.Fatalf("approve in the clone: %d, %v", status, err)
	}
	until(t, "the clone sends what a person approved in it", func() bool { return state(clones[0], soon).State == "done" })
	if out.count("n-1") != 2 || out.count("n-2") != 0 {
		t.Errorf("n-1 arrived %d times, n-2 %d times", out.count("n-1"), out.count("n-2"))
	}
}

// scheduled proposes a mail that leaves at a time, approves it, and returns its action.
func (s *server) scheduled(address, key, subject string, at time.Time) string {
	s.t.Helper()
	var a struct {
		ID, Digest string
		Version    int64
	}
	status, err := call(http.DefaultClient, http.MethodPost, fmt.Sprintf("http://%s/v1/inboxes/%s/messages", s.web, address), key,
		map[string]any{"to": []string{"someone@sink.test"}, "subject": subject, "text": "x", "send_at": at}, &a)
	if err != nil || status != http.StatusAccepted {
		s.t.Fatalf("propose: %d, %v", status, err)
	}
	if status, err := call(s.local(), http.MethodGet, "http://x/v1/actions/"+a.ID, "", nil, &a); err != nil || status != http.StatusOK {
		s.t.Fatalf("read the action: %d, %v", status, err)
	}
	status, err = call(s.local(), http.MethodPost, "http://x/v1/actions/"+a.ID+"/decision", "", map[string]any{"version": a.Version, "digest": a.Digest, "approve": true}, nil)
	if err != nil || status != http.StatusOK {
		s.t.Fatalf("approve: %d, %v", status, err)
	}
	return a.ID
}

// count returns how often a subject arrived.
func (s *sink) count(subject string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.got[subject]
}
