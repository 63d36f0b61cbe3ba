package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// escapes tries to start programs and to write files that the contract of its run does not
// allow. It prints the outcome of each attempt in one line.
const escapes = `
import ctypes, errno, os, shutil, subprocess, sys

def say(name, f):
    try:
        print(name, "WORKED", f())
    except OSError as e:
        print(name, errno.errorcode.get(e.errno, e.errno))
    except Exception as e:
        print(name, "ERROR", type(e).__name__, e)

def run(*argv, **kw):
    return subprocess.run(argv, capture_output=True, timeout=20, **kw).returncode

libc = ctypes.CDLL(None, use_errno=True)

def memfd():
    fd = os.memfd_create("x", 0)
    with open("/usr/bin/id", "rb") as f:
        os.write(fd, f.read())
    pid = os.fork()
    if pid == 0:
        argv = (ctypes.c_char_p * 2)(b"sleep", None)
        libc.syscall(322, fd, b"", argv, (ctypes.c_char_p * 1)(None), 0x1000)
        os._exit(ctypes.get_errno())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise OSError(code, "execveat")
    return code

def renamed():
    shutil.copy("/usr/bin/id", "/out/sleep")
    os.chmod("/out/sleep", 0o755)
    return run("/out/sleep", "0")

def posing():
    return run("/usr/bin/id", executable="/usr/bin/id")

def posing0():
    return subprocess.run(["sleep", "0"], executable="/usr/bin/id", timeout=20).returncode

def itself():
    return run("/proc/self/exe", "-c", "print(1)")

def loader():
    import glob
    return run(glob.glob("/lib*/*/ld-linux*.so*")[0], "/usr/bin/id")

def script():
    open("/out/s", "w").write("#!/usr/bin/perl\nprint 1;\n")
    os.chmod("/out/s", 0o755)
    return run("/out/s")

def link():
    os.symlink("/usr/bin/id", "/out/python3")
    return run("/out/python3", "-I", "/in/job.py")

def outside(path):
    with open(path, "w") as f:
        f.write("x")

def hardlink():
    os.link("/in/job.py", "/out/hard")
    outside("/out/hard")

def symlinked():
    os.symlink("/in/job.py", "/out/soft")
    outside("/out/soft")

def descriptor():
    # Opened for reading, and opened again for writing through /proc.
    fd = os.open("/in/job.py", os.O_RDONLY)
    outside("/proc/self/fd/%d" % fd)

def inherited():
    fd = os.open("/in/job.py", os.O_RDONLY)
    pid = os.fork()
    if pid == 0:
        try:
            os.write(fd, b"x")
        except OSError as e:
            os._exit(e.errno)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise OSError(code, "write")

say("exec-other", posing)
say("exec-argv0", posing0)
say("exec-renamed", renamed)
say("exec-self", itself)
say("exec-memfd", memfd)
say("exec-loader", loader)
say("exec-script", script)
say("exec-link", link)
say("write-etc", lambda: outside("/etc/x"))
say("write-home", lambda: outside("/home/user/x"))
say("write-usr", lambda: outside("/usr/bin/x"))
say("write-in", lambda: outside("/in/x"))
say("write-input", lambda: outside("/in/job.py"))
say("write-hardlink", hardlink)
say("write-symlink", symlinked)
say("write-descriptor", descriptor)
say("write-inherited", inherited)
say("write-root", lambda: outside("/x"))
say("read-guest", lambda: open("/proc/1/environ").read())
say("read-home", lambda: os.listdir("/root"))
say("kill-guest", lambda: os.kill(1, 9))
say("chroot", lambda: os.chroot("/out"))
say("allowed", lambda: run("sleep", "0"))
open("/out/odd.txt", "w").write(open(__file__).read()[:0] + "ok\n")
`

// swapping leaves files with hostile names, and a daemon that rewrites an artifact endlessly.
const swapping = `
import os, sys, time
for name in ("odd\n2;rm -rf .txt", "odd\u202etxt.exe", "odd" + "x" * 240):
    try:
        open("/out/" + name, "w").write("text\n")
    except OSError as e:
        print(e)
try:
    os.symlink("/etc/passwd", "/out/odd-link")
    os.mkfifo("/out/odd-fifo")
except OSError as e:
    print(e)
open("/out/swapped.txt", "w").write("0\n")
if os.fork() == 0:
    os.setsid()
    n = 0
    while True:
        n += 1
        with open("/out/new", "w") as f:
            f.write("number %d\n" % n * 50)
        os.rename("/out/new", "/out/swapped.txt")
time.sleep(0.3)
`

// stubborn ignores all signals that can be ignored, and leaves daemons that do the same.
const stubborn = `
import os, signal, time
for s in range(1, 32):
    try:
        signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
while True:
    time.sleep(1)
`

// flooding writes endless output.
const flooding = `
import os
b = os.urandom(30000).hex().encode()
while True:
    os.write(1, b)
`

// attackRuns performs runs of hostile code.
func (s *server) attackRuns(t *testing.T) {
	t.Run("what the contract does not allow", func(t *testing.T) {
		s := s.in(t)
		j := s.playJob(jobContract, "escapes", strings.Replace(escapes, "import ctypes", "import sys; sys.stdout = sys.stderr\nimport ctypes", 1))
		if j.Outcome != "violated" {
			t.Errorf("outcome %q, want violated: %+v", j.Outcome, j)
		}
		var said string
		for _, r := range j.Results {
			said += r.Stderr
		}
		lines := map[string]string{}
		for line := range strings.Lines(said) {
			if name, text, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
				lines[name] = text
			}
		}
		for _, name := range []string{"exec-other", "exec-argv0", "exec-renamed", "exec-memfd", "exec-loader", "exec-script", "exec-link", "exec-self"} {
			if got := lines[name]; got != "EACCES" {
				t.Errorf("%s: %q, want EACCES", name, got)
			}
		}
		for _, name := range []string{"write-etc", "write-home", "write-usr", "write-in", "write-input", "write-hardlink", "write-symlink", "write-descriptor", "write-inherited", "write-root", "read-guest", "read-home", "kill-guest", "chroot"} {
			if got := lines[name]; got == "" || strings.Contains(got, "WORKED") || strings.Contains(got, "ERROR") {
				t.Errorf("%s: %q, want an error", name, got)
			}
		}
		for _, name := range []string{"write-etc", "write-usr", "write-in", "write-input", "write-root"} {
			if got := lines[name]; got != "EACCES" { // programs expect this error: in Python PermissionError
				t.Errorf("%s: %q, want EACCES", name, got)
			}
		}
		if lines["allowed"] != "WORKED 0" {
			t.Errorf("what is allowed: %q\n%s", lines["allowed"], said)
		}
		r := s.report(j.ID)
		if r.clause("commands") != "violated" {
			t.Errorf("the clause commands is %s", r.clause("commands"))
		}
		for _, f := range s.files(j.ID) {
			if f.State == "released" {
				t.Errorf("%s of a violated run was released without a person", f.Path)
			}
		}
	})

	t.Run("an artifact is swapped, and others have hostile names", func(t *testing.T) {
		s := s.in(t)
		j := s.playJob(jobContract, "swapping", swapping)
		for _, f := range s.files(j.ID) {
			if f.Path == "/out/swapped.txt" && f.State == "waiting" {
				t.Logf("waits for a person: %v %v, outcome %s", f.Flags, f.Findings, j.Outcome)
			}
			if f.State == "waiting" { // the copy was made before this decision
				s.approve(f.Action)
			}
		}
		released := 0
		for _, f := range s.files(j.ID) {
			if strings.ContainsAny(f.Path+f.Name, "\n\u202e/") && strings.ContainsAny(f.Name, "\n\u202e/") {
				t.Errorf("a name with control characters: %q as %q", f.Path, f.Name)
			}
			if strings.Contains(f.Path, "link") || strings.Contains(f.Path, "fifo") {
				t.Errorf("%s is an artifact", f.Path)
			}
			if f.State != "released" {
				continue
			}
			released++
			req, err := http.NewRequest("GET", fmt.Sprintf("http://%s/v1/runs/%s/artifacts/%d", s.web, j.ID, f.N), nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+s.key)
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			sum := sha256.Sum256(b)
			if err != nil || resp.StatusCode != 200 || hex.EncodeToString(sum[:]) != f.SHA256 {
				t.Errorf("%s: %s, %v: the downloaded file is not the listed one", f.Path, resp.Status, err)
			}
			if d := resp.Header.Get("Content-Disposition"); !strings.HasPrefix(d, "attachment") || strings.ContainsAny(d, "\r\n") {
				t.Errorf("%s: Content-Disposition %q", f.Path, d)
			}
		}
		if released == 0 {
			t.Errorf("nothing was released: %+v", s.files(j.ID))
		}
		nothingLeft(t, j.Sandbox)
	})

	t.Run("time is over", func(t *testing.T) {
		s := s.in(t)
		j := s.playJob(strings.Replace(jobContract, "time: 60s", "time: 3s", 1), "stubborn", stubborn)
		if j.Outcome != "timed_out" {
			t.Errorf("outcome %q, want timed_out: %+v", j.Outcome, j)
		}
		nothingLeft(t, j.Sandbox)
	})

	t.Run("output without end", func(t *testing.T) {
		s := s.in(t)
		j := s.playJob(jobContract, "flooding", flooding)
		if j.Outcome != "violated" && j.Outcome != "failed" {
			t.Errorf("outcome %q: %+v", j.Outcome, j)
		}
		r := s.report(j.ID)
		if len(r.Limits) == 0 {
			t.Errorf("the report names no limit that was reached: %+v", r)
		}
	})
}
