package e2e

import (
	"encoding/json"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	rest "postern/client"
)

// started is the output of postern sandbox commands --json.
type started struct {
	Started, Refused, Held, Missed int
	Complete, Ended                bool
	SHA256                         string
	Commands                       []struct {
		Path, Verdict, Why, Action string
		Args                       []string
		Fixed                      bool
		Exit                       *int
		Signal                     int
	}
}

// started returns the record of a sandbox's programs.
func (sh shell) started(t *testing.T, id string) (out started) {
	t.Helper()
	text := sh.must(t, []string{"sandbox", "commands", id, "--limit", "1000", "--json"})
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return out
}

// find returns the verdicts on the commands with these arguments, separated by spaces.
func (s *started) find(line string) (verdicts string) {
	for _, c := range s.Commands {
		if strings.Join(c.Args, " ") == line {
			verdicts += c.Verdict + " "
		}
	}
	return strings.TrimSpace(verdicts)
}

// TestCommandsWaitForPeople: each program of a sandbox is recorded, and a rule holds one
// until a person has decided. Other programs go on meanwhile. The held program survives a
// pause and a crash of the server.
func TestCommandsWaitForPeople(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	s := start(t, data, "--pool-max", "0")
	op := shell{s: s}
	b := s.sandbox(nil)

	// Children of scripts and interpreters are recorded.
	b.run(`printf '#!/bin/sh\nexec expr 6 \* 7\n' > /tmp/x; chmod +x /tmp/x; python3 -c 'import subprocess; subprocess.run(["/tmp/x"])'; cp /usr/bin/expr /tmp/harmless; /tmp/harmless 1 + 1; exit 3`)
	eventually(t, "the exit is recorded", func() bool {
		r := op.started(t, b.id)
		for _, c := range r.Commands {
			if len(c.Args) > 2 && strings.Contains(c.Args[len(c.Args)-1], "exit 3") && c.Exit != nil && *c.Exit == 3 {
				return true
			}
		}
		return false
	})
	r := op.started(t, b.id)
	if !r.Complete || r.Refused != 0 || r.find("expr 6 * 7") != "allowed" {
		t.Errorf("got %+v", r)
	}
	for _, c := range r.Commands {
		if args := strings.Join(c.Args, " "); strings.HasSuffix(args, " 1 + 1") && (c.Path != "/tmp/harmless" || c.Fixed) {
			t.Errorf("a copied program is %+v", c)
		}
	}
	if out := op.must(t, []string{"sandbox", "commands", b.id}); !strings.Contains(out, "expr 6 '*' 7") && !strings.Contains(out, "expr 6 * 7") {
		t.Errorf("got %s", out)
	}

	changePolicy(t, op, op, `version: 1
rules:
  - {id: ask, kind: process.exec, when: "detail.program.endsWith('/uname')", then: ask}
  - {id: never, kind: process.exec, when: "detail.program.endsWith('/whoami')", then: deny, reason: not needed here}
  - {id: word, kind: process.exec, when: "detail.command.contains('forbidden-word')", then: deny, reason: not this}
`)
	eventually(t, "the rule is in force", func() bool { return strings.Contains(b.run("whoami").stderr, "Permission denied") })
	// The attack: a prepared shell, which the kernel saw start before the rule, runs what the
	// rule denies with its builtins.
	for range 3 { // of which the second and the third could have one
		if got, err := b.try("echo forbidden-word > /tmp/forbidden", time.Minute); err == nil {
			t.Errorf("a rule about the text of a command did not see it: %+v", got)
		}
	}
	if got := b.run("ls /tmp/forbidden"); got.exit == 0 {
		t.Error("the denied command ran")
	}
	waiting := func() (id string) {
		t.Helper()
		eventually(t, "the command waits for a person", func() bool {
			var list struct{ Actions []struct{ ID, Kind string } }
			if _, err := call(s.local(), "GET", "http://x/v1/actions?state=pending", "", nil, &list); err != nil {
				t.Fatal(err)
			}
			for _, a := range list.Actions {
				if a.Kind == "process.exec" {
					id = a.ID
				}
			}
			return id != ""
		})
		return id
	}
	python := func(flag string) func() string {
		var r result
		var err error
		var wg sync.WaitGroup
		wg.Go(func() {
			r, err = b.try(`python3 -c 'import subprocess
try: print("ran", subprocess.run(["uname", "`+flag+`"], capture_output=True, text=True).stdout)
except PermissionError as e: print("refused", e.errno)'`, 5*time.Minute)
		})
		return func() string {
			t.Helper()
			wg.Wait()
			if err != nil {
				t.Fatal(err)
			}
			return r.stdout + r.stderr
		}
	}
	end := python("-s")
	id := waiting()
	if got := b.run("echo others go on; ls -d /tmp").stdout; got != "others go on\n/tmp\n" {
		t.Errorf("while a command waits: %q", got)
	}
	op.must(t, []string{"show", id}, "uname -s", "/usr/bin/uname", "a file of the template", b.id)
	op.must(t, []string{"approve", id}, "may start this once")
	if got := end(); !strings.Contains(got, "ran Linux") {
		t.Errorf("approved: %q", got)
	}
	end = python("-r")
	op.must(t, []string{"reject", waiting(), "--reason", "not that"}, "rejected")
	if got := end(); !strings.Contains(got, "refused 13") {
		t.Errorf("rejected: %q", got)
	}
	// A program that the guest itself starts is refused instead of held, because the guest
	// would be blocked with it.
	direct := func() ([]byte, error) {
		return exec.CommandContext(t.Context(), s.bin, "sandbox", "exec", "--data", data, b.id, "--", "uname", "-n").CombinedOutput()
	}
	if out, err := direct(); err == nil {
		t.Errorf("started without approval: %s", out)
	}
	if got := b.run("echo the guest serves").stdout; got != "the guest serves\n" {
		t.Errorf("got %q", got)
	}
	op.must(t, []string{"approve", waiting()})
	if out, err := direct(); err != nil {
		t.Errorf("approved: %v: %s", err, out)
	}
	// A kill switch refuses the held program and all others.
	end = python("-m")
	stopped := waiting()
	on := switchID.FindString(op.must(t, []string{"stop", "capability", "process.exec", "--reason", "we look into it"}))
	if got := end(); !strings.Contains(got, "refused 13") {
		t.Errorf("stopped: %q", got)
	}
	if r, err := b.try("/bin/true", time.Minute); err == nil && r.exit == 0 {
		t.Error("a command ran although a kill switch stops all")
	}
	op.must(t, []string{"resume", on})
	op.must(t, []string{"reject", stopped, "--reason", "stopped"})
	eventually(t, "commands run again", func() bool { r, err := b.try("/bin/true", time.Minute); return err == nil && r.exit == 0 })

	// A held program survives a pause.
	b.run("(uname -o > /tmp/paused 2>&1; echo $? >> /tmp/paused) > /dev/null 2>&1 &")
	id = waiting()
	op.must(t, []string{"sandbox", "pause", b.id})
	op.must(t, []string{"sandbox", "resume", b.id})
	if got := b.run("cat /tmp/paused").stdout; got != "" {
		t.Errorf("the program started without a decision: %q", got)
	}
	if again := waiting(); again != id {
		t.Errorf("a second action waits for the same program: %s", again)
	}
	op.must(t, []string{"approve", id})
	eventually(t, "it goes on after the pause", func() bool { return b.run("cat /tmp/paused").stdout == "GNU/Linux\n0\n" })

	// A held program survives a crash of the server.
	b.run("(uname -p > /tmp/killed 2>&1; echo $? >> /tmp/killed) > /dev/null 2>&1 &")
	id = waiting()
	before := op.started(t, b.id)
	if err := s.kill(syscall.SIGKILL); err != nil {
		t.Logf("kill: %v", err)
	}
	s = start(t, data, "--pool-max", "0")
	op, b.s = shell{s: s}, s
	op.must(t, []string{"approve", id})
	eventually(t, "it goes on under the next server", func() bool { return strings.HasSuffix(b.run("cat /tmp/killed").stdout, "\n0\n") })
	after := op.started(t, b.id)
	if after.Started <= before.Started || !after.Complete || after.find("uname -s") != "allowed" || !strings.HasPrefix(after.find("uname -r"), "refused") || strings.Contains(after.find("uname -r"), "allowed") {
		t.Errorf("before %d, after %d, complete %v: uname -s %s, uname -r %s", before.Started, after.Started, after.Complete, after.find("uname -s"), after.find("uname -r"))
	}
	op.must(t, []string{"sandbox", "kill", b.id})
	eventually(t, "the counts are in the audit", func() bool {
		out, _ := op.run(t, "", "audit", "list", "--object", b.id, "--verb", "sandbox.commands")
		return strings.Contains(out, "sha256")
	})
	if r := op.started(t, b.id); !r.Ended || !strings.Contains(op.must(t, []string{"audit", "list", "--object", b.id, "--verb", "sandbox.commands"}), r.SHA256) {
		t.Errorf("the audit has another digest than %s", r.SHA256)
	}
}

const commandsContract = `version: 1
name: commands
commands:
  allow:
    - run: python3 **
    - run: ls **
      max: 2
    - run: sleep *
      time: 2s
    - run: xz --version
  deny: [perl]
files:
  write: [/work]
  inputs: [{path: "/in/*", size: 64KiB}]
limits: {time: 2m, output: 64KiB, memory: 512MiB, disk: 64MiB}
on_failure: {output: true}
`

// commandsAttack tries to start programs that the commands clause does not allow. Each
// printed line except the last two means that an attack succeeded.
const commandsAttack = `
import os, shutil, subprocess, sys, threading
def tried(name, f):
    pid = os.fork()
    if pid == 0:
        try:
            f()
        except OSError as e:
            os._exit(7)
        os._exit(8)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 7:
        print("did", name, code, flush=True)
def run(*args, **kw):
    return lambda: subprocess.run(args, **kw)
def script(path, first):
    with open(path, "w") as f: f.write(first + "\nprint('script')\n")
    os.chmod(path, 0o755)
shutil.copy("/bin/sh", "/work/sh"); shutil.copy("/bin/sh", "/work/python3"); shutil.copy("/bin/ls", "/work/ls")
for p in ("sh", "python3", "ls"): os.chmod("/work/" + p, 0o755)
os.symlink("/bin/sh", "/work/linked"); os.mkdir("/work/bin"); os.symlink("/bin/sh", "/work/bin/python3")
script("/work/a.sh", "#!/bin/sh"); script("/work/a.py", "#!/usr/bin/python3"); script("/work/a.env", "#!/usr/bin/env python3")
def memfd():
    fd = os.memfd_create("ls")
    os.write(fd, open("/bin/ls", "rb").read())
    os.execve(fd, ["ls"], {})
tried("a shell", run("/bin/sh", "-c", "id"))
tried("a copy of a shell", run("/work/sh", "-c", "id"))
tried("a shell named python3", run("/work/python3", "-c", "id"))
tried("a copy of what is allowed", run("/work/ls"))
tried("a link to a shell", run("/work/linked", "-c", "id"))
tried("a link named python3", run("/work/bin/python3", "-c", "id"))
tried("a shell found by PATH", run("python3", "-c", "id", env={"PATH": "/work/bin"}))
tried("a shell that says that it is ls", run("ls", "-c", "id", executable="/bin/sh"))
tried("python that says that it is sh", run("sh", "-c", "id", executable="/usr/bin/python3"))
tried("itself under another name", lambda: os.execv("/proc/self/exe", ["sh"]))
tried("the same program under another name", run("unxz", "--version", executable="/usr/bin/xz"))
tried("an argument that is not allowed", run("xz", "--help"))
tried("memory", memfd)
tried("a descriptor", lambda: os.execve(os.open("/bin/sh", os.O_RDONLY), ["python3"], {}))
tried("a path in another root", lambda: os.execv("/proc/self/root/bin/sh", ["python3"]))
tried("the loader", run("/lib64/ld-linux-x86-64.so.2", "/bin/sh"))
tried("env", run("/usr/bin/env", "ls"))
tried("a script of a shell", run("/work/a.sh"))
tried("a script of python", run("/work/a.py"))
tried("a script of env", run("/work/a.env"))
tried("what is denied", run("perl", "-e", "1"))
tried("the starter", lambda: subprocess.run(["/.postern-start", "/bin/sh", "sh", "-c", "echo did"]).returncode == 126 and os._exit(7))
started = []
def ls():
    try: started.append(subprocess.run(["/usr/bin/ls"], capture_output=True).returncode)
    except OSError: pass
many = [threading.Thread(target=ls) for _ in range(20)]
for t in many: t.start()
for t in many: t.join()
print("ls", len(started), sum(started), flush=True)
subprocess.run([sys.executable, "-c", "print('python', flush=True)"])
`

// commandsOvertime starts a command in a session of its own that ignores the signals of a
// time-out.
const commandsOvertime = `
import os, signal, subprocess
def hide():
    os.setsid()
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)
p = subprocess.Popen(["sleep", "600"], preexec_fn=hide)
print("ended by", p.wait(), flush=True)
`

// TestCommandsClause: code in a run starts only the programs that its contract allows,
// however it calls them, and only as often and for as long as it allows.
func TestCommandsClause(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--memory", "512", "--pool-max", "0")
	op := shell{s: s}
	key, person := s.api()
	ctx := t.Context()
	perform := func(file, code string) rest.Run {
		t.Helper()
		yes, no := true, false
		r, err := key.Runs.Propose(ctx, rest.NewRun{
			ContractText: commandsContract, Task: file, Commands: [][]string{{"python3", "/in/" + file}}, Inputs: []rest.NewInput{newInput("/in/"+file, code)},
			Answers: rest.RunAnswers{Execution: &yes, Network: &no, Files: &yes, Credentials: &no, Check: "none", Timeout: "ends", Cleanup: "all", Export: "nothing"},
		})
		if err == nil {
			_, err = key.Runs.Upload(ctx, r.ID, "/in/"+file, strings.NewReader(code))
		}
		if err == nil {
			r, err = key.Runs.Submit(ctx, r.ID)
		}
		if err == nil && r.Approved == "" {
			err = approveRun(ctx, person, r.Action)
		}
		if err == nil {
			r, err = follow(ctx, key, r.ID)
		}
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := perform("attack.py", commandsAttack)
	if len(r.Results) != 1 || r.Results[0].Stdout != "ls 2 0\npython\n" || r.Outcome != rest.RunViolated {
		t.Fatalf("%s: %s: %+v", r.Outcome, r.Reason, r.Results)
	}
	rec := op.started(t, r.Sandbox)
	if !rec.Complete || rec.Refused < 35 || rec.find("/bin/sh -c id") != "refused" {
		t.Errorf("complete %v, %d refused, a shell was %s", rec.Complete, rec.Refused, rec.find("/bin/sh -c id"))
	}
	for _, c := range rec.Commands {
		if c.Verdict == "allowed" && (!c.Fixed || !strings.HasPrefix(c.Path, "/usr/bin/python3") && c.Path != "/usr/bin/ls") {
			t.Errorf("started: %+v", c)
		}
	}
	r = perform("overtime.py", commandsOvertime)
	if r.Outcome != rest.RunTimedOut && r.Outcome != rest.RunViolated || r.EndedAt.Sub(*r.StartedAt) > time.Minute {
		t.Errorf("a command that ignores its time limit: %s after %v: %+v", r.Outcome, r.EndedAt.Sub(*r.StartedAt), r.Results)
	}
}
