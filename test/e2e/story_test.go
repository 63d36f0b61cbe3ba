package e2e

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/internal/smtpclient/postfixtest"
)

// freePort returns a port that was free a moment ago. It is below the kernel's range
// of ephemeral ports, so that no other socket gets it meanwhile.
func freePort(t testing.TB) string {
	t.Helper()
	for range 100 {
		port := strconv.Itoa(12000 + rand.IntN(20000))
		if l, err := net.Listen("tcp", "127.0.0.1:"+port); err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return ""
}

// TestStory plays what make demo plays, with the official SDKs, against a
// server of its own, and ends it.
func TestStory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd := exec.Command("node", "../../demo/story.mjs", postern(t), dir, "--ports", freePort(t)+","+freePort(t), "--stop")
	out, err := cmd.CombinedOutput()
	for line := range strings.SplitSeq(string(out), "\n") {
		if strings.Contains(line, "FAIL") {
			t.Error(strings.TrimSpace(line))
		}
	}
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(dir, "server.log"))
		t.Fatalf("%v\n%s\nserver's log:\n%s", err, out, tail(string(log), 40))
	}
	t.Log(tail(strings.TrimSpace(string(out)), 1))
}

// TestBrowser lets a person decide in headless Chromium.
func TestBrowser(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--cold", "--pool-max", "0")
	from, key := s.inbox("analyst")
	to, toKey := s.inbox("buyer")
	hidden, _ := s.inbox("auditor")
	var a struct{ ID string }
	_, err := call(client, "POST", "http://"+s.web+"/v1/inboxes/"+from+"/messages", key, map[string]any{
		"to": []string{to}, "bcc": []string{hidden}, "subject": "Totals <b>by region</b>", "text": "north 150\n<script>alert(1)</script>\n",
		"attachments": []map[string]string{{"name": "totals.csv", "content_base64": "bm9ydGgsMTUwCg==", "content_type": "text/csv"}},
	}, &a)
	if err != nil || a.ID == "" {
		t.Fatalf("propose: %v", err)
	}
	shots := os.Getenv("POSTERN_TEST_SCREENSHOTS")
	if shots == "" {
		shots = t.TempDir()
	}
	out, err := exec.Command("node", "../browser/approve.mjs", "http://"+s.web, s.link, shots).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	var list struct{ Messages []struct{ Subject string } }
	eventually(t, "it has arrived", func() bool {
		_, err := call(client, "GET", "http://"+s.web+"/v1/inboxes/"+to+"/messages", toKey, nil, &list)
		return err == nil && len(list.Messages) > 0
	})
	if len(list.Messages) != 1 || list.Messages[0].Subject != "Totals <b>by region</b>" {
		t.Errorf("delivered: %+v", list.Messages)
	}
}

// TestPostfixGetsApprovedMailOnly: approved mail reaches a real mail server once, with
// the approved bytes. Rejected mail does not.
func TestPostfixGetsApprovedMailOnly(t *testing.T) {
	addr, maildir := postfixtest.Start(t)
	s := start(t, t.TempDir(), "--relay", addr, "--cold", "--pool-max", "0")
	from, key := s.inbox("analyst")
	var ids []string
	for _, subject := range []string{"Yes", "No"} {
		var a struct{ ID string }
		status, err := call(client, "POST", "http://"+s.web+"/v1/inboxes/"+from+"/messages", key, map[string]any{
			"to": []string{"b@" + postfixtest.Domain}, "bcc": []string{"c@" + postfixtest.Domain}, "subject": subject, "text": "hello\n.\n..dots\n",
		}, &a)
		if err != nil || status != http.StatusAccepted {
			t.Fatalf("propose: %d, %v", status, err)
		}
		ids = append(ids, a.ID)
	}
	s.mustCLI("reject", ids[1], "--reason", "no")
	s.mustCLI("approve", ids[0], "--seen", "hidden_recipient:c@"+postfixtest.Domain)
	for _, user := range []string{"b", "c"} {
		var got []string
		eventually(t, user+" has mail", func() bool {
			got, _ = filepath.Glob(filepath.Join(maildir, user, "new", "*"))
			return len(got) > 0
		})
		if len(got) != 1 {
			t.Fatalf("%s got %d messages, want 1", user, len(got))
		}
		b, err := os.ReadFile(got[0])
		if err != nil {
			t.Fatal(err)
		}
		if text := string(b); !strings.Contains(text, "Subject: Yes\n") || !strings.Contains(text, "\nhello\n.\n..dots\n") || strings.Contains(text, "\nTo: c@") || strings.Contains(text, "\nBcc:") {
			t.Errorf("%s got:\n%s", user, text)
		}
	}
}

// TestStoryOnPostgres runs the whole server on PostgreSQL: a sandbox, mail, a decision
// and the record.
func TestStoryOnPostgres(t *testing.T) {
	t.Parallel()
	url := database(t)
	s := start(t, t.TempDir(), "--database", url)
	from, key := s.inbox("analyst")
	to, toKey := s.inbox("buyer")
	if r := s.sandbox(map[string]any{"metadata": map[string]string{"postern.inbox": from}}).run("echo hello"); r.stdout != "hello\n" {
		t.Errorf("run: %+v", r)
	}
	var a struct{ ID string }
	if status, err := call(client, "POST", "http://"+s.web+"/v1/inboxes/"+from+"/messages", key,
		map[string]any{"to": []string{to}, "subject": "Report", "text": "x"}, &a); err != nil || status != http.StatusAccepted {
		t.Fatalf("propose: %d, %v", status, err)
	}
	s.mustCLI("approve", a.ID)
	var list struct{ Messages []struct{ Subject string } }
	eventually(t, "it is delivered", func() bool {
		_, err := call(client, "GET", "http://"+s.web+"/v1/inboxes/"+to+"/messages", toKey, nil, &list)
		return err == nil && len(list.Messages) == 1
	})
	if out := s.mustCLI("audit", "verify", "--database", url); !strings.Contains(out, "holds") {
		t.Error(out)
	}
	if err := s.kill(syscall.SIGTERM); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
}

// TestShutdownLeavesNothing: SIGTERM ends the server with status 0, and no process,
// mount or cgroup stays.
func TestShutdownLeavesNothing(t *testing.T) {
	s := start(t, t.TempDir())
	sandbox := s.sandbox(nil)
	sandbox.run("sleep 1000 >/dev/null 2>&1 &")
	before := leftovers(t, sandbox.id)
	if len(before) == 0 {
		t.Fatal("the test does not see what a running sandbox holds")
	}
	if err := s.kill(syscall.SIGTERM); err != nil {
		t.Errorf("after SIGTERM: %v, want status 0", err)
	}
	nothingLeft(t, sandbox.id)
}

// TestSandboxesSurviveAKilledServer: the next server adopts the sandboxes that still
// run, and records the others as lost.
func TestSandboxesSurviveAKilledServer(t *testing.T) {
	const beats = "cat /tmp/kept; a=$(cat /tmp/beat); for i in $(seq 600); do sleep 0.1; [ $a != $(cat /tmp/beat) ] && echo beats && break; done"
	data := t.TempDir()
	s := start(t, data)
	alive, dead := s.sandbox(nil), s.sandbox(nil)
	// A rename, so that no reader sees a half-written file.
	alive.run("echo kept >/tmp/kept; (while sleep 0.1; do date +%s%N >/tmp/next; mv /tmp/next /tmp/beat; done) >/dev/null 2>&1 & until [ -s /tmp/beat ]; do sleep 0.05; done")
	s.kill(syscall.SIGKILL)
	if len(leftovers(t, alive.id)) == 0 {
		t.Fatal("nothing was left by the killed server: the test shows nothing")
	}
	for _, pid := range processesOf(t, dead.id) {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Log(err) // it died with another
		}
	}
	s = start(t, data)
	alive.s, dead.s = s, s
	if r := alive.run(beats); r.stdout != "kept\nbeats\n" {
		t.Errorf("the one that lived: %+v", r)
	}
	nothingLeft(t, dead.id)
	if text := s.mustCLI("audit", "list", "--object", dead.id); !strings.Contains(text, "sandbox.lost") || !strings.Contains(text, "died") && !strings.Contains(text, "the sandbox ended") {
		t.Errorf("it is not on the record as lost:\n%s", text)
	}
	if out := s.mustCLI("sandbox", "list"); strings.Contains(out, dead.id) || !strings.Contains(out, alive.id) {
		t.Errorf("listed:\n%s", out)
	}
	// Stopping the server pauses it, and the next start resumes it.
	if err := s.kill(syscall.SIGTERM); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	nothingLeft(t, alive.id)
	s = start(t, data)
	alive.s = s
	if r := alive.run(beats); r.stdout != "kept\nbeats\n" {
		t.Errorf("the frozen one: %+v", r)
	}
}

// leftovers returns the processes, mounts and cgroups on this machine that name the
// sandbox.
func leftovers(t testing.TB, id string) (found []string) {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		// A process of this sandbox, not a command about it.
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), id) && strings.HasPrefix(string(b), "runsc") {
			found = append(found, p)
		}
	}
	if b, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(b), id) {
		found = append(found, "mount")
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(d.Name(), id) {
			found = append(found, path)
		}
		return nil
	})
	return found
}

// nothingLeft waits until nothing on this machine names the sandboxes: the kernel
// removes ended processes, mounts and cgroups asynchronously.
func nothingLeft(t testing.TB, ids ...string) {
	t.Helper()
	for _, id := range ids {
		var left []string
		for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
			if left = leftovers(t, id); len(left) == 0 || time.Now().After(end) {
				break
			}
		}
		if len(left) > 0 {
			t.Errorf("left of %s: %v", id, left)
		}
	}
}

// processesOf returns the processes of a sandbox on this machine.
func processesOf(t testing.TB, id string) (pids []int) {
	t.Helper()
	for _, p := range leftovers(t, id) {
		var pid int
		if n, _ := fmt.Sscanf(p, "/proc/%d/cmdline", &pid); n == 1 {
			pids = append(pids, pid)
		}
	}
	return pids
}
