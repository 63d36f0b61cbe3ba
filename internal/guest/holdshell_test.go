package guest

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"postern/internal/guest/processpb"
)

// login is the request of a client's command, with a profile in its home.
func (g *rig) login(text string) *connect.Request[processpb.StartRequest] {
	no := false
	return connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{
			Cmd: "/bin/bash", Args: []string{"-l", "-c", text},
			Envs: map[string]string{"HOME": g.home, "MARK": "env", "LONG": strings.Repeat("long ", 200)},
		}, Stdin: &no,
	})
}

func (g *rig) profile(text string) {
	g.t.Helper()
	if err := os.WriteFile(filepath.Join(g.home, ".profile"), []byte(text), 0o644); err != nil {
		g.t.Fatal(err)
	}
}

// hold has the guest hold a shell that fits the request, and returns its PID.
func (g *rig) hold(req *connect.Request[processpb.StartRequest]) int {
	g.t.Helper()
	st := must((&processes{g.s}).readStart(g.t.Context(), req))
	k, _, ok := kindOf(st)
	if !ok {
		g.t.Fatalf("no shell can be held for %v", req.Msg)
	}
	for range 12000 {
		g.s.shells.mu.Lock()
		for _, h := range g.s.shells.held {
			select {
			case <-h.ready:
				if h.err == nil && h.kind == k.name() && len(h.world.files) == len(shellFiles)+len(g.s.shells.files) {
					g.s.shells.mu.Unlock()
					return h.p.pid
				}
			default:
			}
		}
		g.s.shells.kinds = []string{k.name()}
		g.s.shells.mu.Unlock()
		g.s.holdShell(k)
		time.Sleep(5 * time.Millisecond)
	}
	g.t.Fatal("no shell is held")
	return 0
}

// shown is what a client can see of a command, without numbers that differ from
// run to run.
func shown(r result, err error) string {
	if err != nil {
		return err.Error()
	}
	pid := regexp.MustCompile(`\b` + strconv.Itoa(int(r.pid)) + `\b`)
	clean := func(b []byte) string {
		s := pid.ReplaceAllString(string(b), "PID")
		return regexp.MustCompile(`(pipe|socket):\[\d+\]`).ReplaceAllString(s, "$1")
	}
	return fmt.Sprintf("stdout:\n%s\nstderr:\n%s\nend: %v %v %v", clean(r.stdout), clean(r.stderr), r.end.GetExitCode(), r.end.GetStatus(), r.end.GetError())
}

// loginTexts are commands whose result a shell could change. Those of /proc need
// a text without quotes, since they show it.
var loginTexts = []string{
	"", " ", "\n", "#", "# nothing", "true", "false", ":", "exit 3", "exit", "exit 256", "kill -9 $$", "kill -TERM $$", "kill -INT $$",
	"echo $0", "echo $#-$*-$@", "echo $-", "echo $_", "echo $?", "echo $$ $BASHPID $PPID", "echo $!", "echo $SHLVL $LINENO $((SECONDS < 60))",
	"echo $UID $EUID ${GROUPS[@]} $HOSTNAME $OSTYPE $MACHTYPE", "echo \"${PIPESTATUS[@]}\"", "false | true; echo ${PIPESTATUS[@]}",
	"echo $BASH $BASH_VERSION $BASH_SUBSHELL $BASH_ARGV0; declare -p BASH_SOURCE BASH_LINENO FUNCNAME BASH_ARGC BASH_ARGV BASH_ALIASES BASH_CMDS BASHOPTS SHELLOPTS",
	"echo \"$BASH_EXECUTION_STRING\"", "echo \"$BASH_COMMAND\"", "declare -p BASH_EXECUTION_STRING _ OPTIND IFS PS4", "declare -p SECONDS | sed 's/=.*//'",
	"set | grep -vE '^(RANDOM|SRANDOM|EPOCH|BASHPID|PPID|_=)'", "export -p", "env", "env | sort", "printenv MARK", "compgen -v | sort", "compgen -e",
	"compgen -A function; compgen -a; compgen -k; compgen -b", "declare -F; declare -f", "alias", "ll", "f 1 2", "shopt; shopt -o", "set -o", "trap -p", "trap", "ulimit -a", "umask; umask -S",
	"pwd; pwd -P; echo $PWD $OLDPWD; dirs; cd /tmp; pwd; cd -", "cd ..; pwd", "history; fc -l", "hash; type -a ls cd f", "times >/dev/null; jobs; disown", "bind -q abort", "help true | head -1",
	"ls -l /proc/self/fd | sed 's/.*[0-9] //; s/proc.*fd//'", "ls /proc/$$/fd", "for f in /proc/$$/fd/*; do [ -e $f ] && readlink $f; done", "readlink /proc/$$/cwd /proc/$$/root /proc/$$/exe",
	"tr '\\0' '\\n' </proc/$$/environ | sort", "exec tr '\\0' '\\n' </proc/self/cmdline", "exec cat /proc/self/environ | tr '\\0' '\\n'|sort",
	"grep -E '^(Name|State|Tgid|TracerPid|Uid|Gid|Groups|Threads|NoNewPrivs|Cap|Seccomp|Sig[BIC])' /proc/self/status", "grep -E '^(Name|TracerPid|Uid|Gid|Cap|SigIgn|SigBlk)' /proc/$$/status",
	"cut -d' ' -f3-8 /proc/$$/stat", "ps -o comm= -p $$", "cat /proc/$$/comm", "cat /proc/$$/limits", "cat /proc/self/limits | head -20", "cat /proc/$$/oom_score_adj", "nice",
	"exec true", "exec false", "exec nothing", "exec -a name sh -c 'echo $0'", "/bin/true", "/bin/echo one two", "ls /nonexistent", "nothing at all", "./nothing", "/etc/passwd", "command -v ls; command nothing",
	"echo 'one\ntwo'", "echo \"quo'te\\\"\"", "echo äöü€😀", "printf '%s\\n' 'ä' | wc -c", "printf '\\xff\\xfe\\x00\\x01' | od -c", "echo $'\\x01\\x02\\t' \x01\x7f",
	"cat <<E\nhere $MARK\nE", "cat <<'E'\nhere $MARK\nE", "cat <<-E\n\there\n\tE\necho after", "cat <<< string", "cat <<E\nunended", "cat < /dev/null; echo $?", "read x; echo $? $x",
	"echo (", "if true", "echo 'unended", "echo \"unended", "done", "for", "case x in", ")", "}", "&&", "echo ok\nif\n", "echo first; )", "f() {", "$(", "`", "${", "echo ${x!}", "echo ${", "[[ 1 ]", "((", "echo $((1/0))",
	"set -e; false; echo not", "set -u; echo $nothing; echo not", "set -x; echo traced", "set -v; echo verbose", "set -n; echo not", "set -o pipefail; false | true", "set -euo pipefail; echo a | grep b; echo not",
	"set -- a b; echo $@; shift; echo $1", "set -m; sleep 0 & wait; echo $?", "set -o posix; echo posix", "set -f; echo *", "shopt -s nullglob; echo *.none", "echo *; echo .*; echo ~; echo ~root ~nobody",
	"trap 'echo bye' EXIT", "trap 'echo bye; exit 4' EXIT; exit 2", "trap 'echo err' ERR; false", "trap 'echo usr' USR1; kill -USR1 $$", "trap 'echo dbg' DEBUG; true", "trap 'echo chld' CHLD; /bin/true; :", "trap '' TERM; kill $$; echo still",
	"sleep 0 & wait $!; echo $?", "(exit 5); echo $?", "(echo $BASHPID $$ $BASH_SUBSHELL) | sed 's/^[0-9]* //'", "sleep 100 & jobs; kill $!", "{ echo a; echo b >&2; } 2>&1", "echo out; echo err >&2", "echo err >&2 | cat", "exec 3>&1; echo three >&3", "exec >/dev/null; echo not", "exec 2>&1; nothing",
	"x=1; export x; env | grep ^x=", "x=(1 2 3); echo ${x[1]} ${#x[@]}", "declare -A m=([a]=1); echo ${m[a]}", "printf -v v %05d 42; echo $v", "readonly r=1; r=2; echo not", "local x", "return 3", "break", "continue", "source /dev/null; echo $?", ". /nonexistent; echo $?", "eval 'echo $0 $LINENO'", "eval 'echo ('; echo $?",
	"echo $LINENO\necho $LINENO", "f() { echo $FUNCNAME $LINENO; caller; }; f", "echo {1..3}{a,b}", "echo $(echo sub)", "echo `echo sub`", "cat <(echo proc)", "echo x > >(cat); wait", "select x in a; do break; done", "while read l; do echo $l; done < /etc/hostname | wc -l", "coproc cat; echo $?; kill $!; wait 2>/dev/null; true",
	"echo ${MARK@Q} ${HOME@A} ${LONG:0:9} ${#LONG}", "unset MARK; echo $MARK", "unset PATH; ls; echo $?", "PATH=; ls; echo $?", "HOME=/x; echo ~", "IFS=:; set -- $PATH; echo $#", "LC_ALL=C; echo ${#PATH}", "TIMEFORMAT=t; time true", "logout", "suspend", "enable -n echo; echo x", "builtin nothing", "bash -c 'echo $0 $SHLVL'", "sh -c 'echo $0'", "bash -lc 'echo $MARK'",
	"echo \\\n continued", "echo a;; echo b", "echo a & wait; echo b", "! true; echo $?", "! false", "[ 1 = 1 ] && echo y", "[[ abc =~ b(.) ]]; echo ${BASH_REMATCH[1]}", "((x=5)); echo $x $?", "let y=0; echo $?", "test -t 0; echo $?", "test -t 1 || echo no; tty", "stat -c %F /dev/stdin /dev/stdout 2>&1 | head -2", "ps -o pid=,ppid=,pgid=,sid= -p $$ | awk '{print ($1==$3), ($1==$4)}'",
	"python3 -c 'import os; print(os.getpgrp()==os.getppid(), os.getsid(0)==os.getppid(), os.umask(0))'; true", "echo " + strings.Repeat("x", 900), "echo " + strings.Repeat("x", maxHeldText-5), "echo " + strings.Repeat("x", maxHeldText-4), ": " + strings.Repeat("ü", 510), strings.Repeat("\n", 600) + "echo $LINENO; (", strings.Repeat(" ", 1015) + "echo",
}

// loginParts make up further commands.
var loginParts = []string{
	"x=$((x+1))", "echo $x", "echo $? $_", "false", "true", "(exit 3)", "f $x", "echo \"$-\"", "set -u", "set +e", "echo $LINENO", "trap 'echo t$?' EXIT", "cd /", "pwd", "echo ${PIPESTATUS[*]}",
	"y=$(echo $x; exit 2)", "echo a | cat | tr a b", "{ echo $MARK; }", "ll", "shopt -q extglob", "for i in 1 2; do echo $i; done", "case $x in 1) echo one;; *) echo more;; esac", "umask", "/bin/true", "/bin/echo $SHLVL", "nothing", "echo <(:) | sed 's/[0-9]*$//'", "z[3]=1; echo ${!z[@]}", "exit 7", "(", "'",
}

const testProfile = `umask 027
export MARK="$MARK profile"
PATH=$HOME/bin:$PATH
shopt -s extglob
alias ll='echo alias'
f() { echo f "$@"; }
echo profile $0 $- $# $SHLVL >&2
`

// A held shell must be the shell that would have been started.
func TestHeldShellDiffersInNothing(t *testing.T) {
	g := newRig(t)
	g.profile(testProfile)
	texts := loginTexts
	some := rand.New(rand.NewPCG(1, 2))
	for range soakTimes(60) {
		var parts []string
		for range 1 + some.IntN(5) {
			parts = append(parts, loginParts[some.IntN(len(loginParts))])
		}
		texts = append(texts, strings.Join(parts, []string{"; ", "\n", " && ", " || "}[some.IntN(4)]))
	}
	for _, text := range texts {
		g.s.shells.off = true
		want := shown(g.run(g.login(text)))
		g.s.shells.off = false
		_, _, holdable := kindOf(must((&processes{g.s}).readStart(t.Context(), g.login(text))))
		pid := 0
		if holdable {
			pid = g.hold(g.login(text))
		}
		r, err := g.run(g.login(text))
		if holdable && int(r.pid) != pid {
			t.Errorf("%q: process %d ran it, want the held %d", text, r.pid, pid)
		}
		if got := shown(r, err); got != want {
			t.Errorf("%q in a held shell:\n%s\nin a new one:\n%s", text, got, want)
		}
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func soakTimes(n int) int {
	if times, err := strconv.Atoi(os.Getenv("POSTERN_TEST_SOAK")); err == nil {
		return n * times
	}
	return n
}

// Whatever a new shell would see or do otherwise, the held one is not used.
func TestHeldShellIsNotUsedWhenANewOneWouldDiffer(t *testing.T) {
	for name, change := range map[string]func(g *rig, pid int, req *processpb.StartRequest){
		"other environment": func(_ *rig, _ int, req *processpb.StartRequest) { req.Process.Envs["MARK"] = "other" },
		"more environment":  func(_ *rig, _ int, req *processpb.StartRequest) { req.Process.Envs["MORE"] = "x" },
		"other directory":   func(_ *rig, _ int, req *processpb.StartRequest) { cwd := "/tmp"; req.Process.Cwd = &cwd },
		"input":             func(_ *rig, _ int, req *processpb.StartRequest) { yes := true; req.Stdin = &yes },
		"terminal": func(_ *rig, _ int, req *processpb.StartRequest) {
			req.Pty = &processpb.PTY{Size: &processpb.PTY_Size{Cols: 80, Rows: 24}}
		},
		"no login shell": func(_ *rig, _ int, req *processpb.StartRequest) { req.Process.Args = req.Process.Args[1:] },
		"other shell":    func(_ *rig, _ int, req *processpb.StartRequest) { req.Process.Cmd = "/usr/bin/bash" },
		"more arguments": func(_ *rig, _ int, req *processpb.StartRequest) { req.Process.Args = append(req.Process.Args, "x") },
		"longer text": func(_ *rig, _ int, req *processpb.StartRequest) {
			req.Process.Args[2] = "echo $$ #" + strings.Repeat("x", maxHeldText)
		},
		"preloaded library": func(_ *rig, _ int, req *processpb.StartRequest) { req.Process.Envs["LD_PRELOAD"] = "" },
		"ended":             func(_ *rig, pid int, _ *processpb.StartRequest) { _ = unix.Kill(pid, unix.SIGKILL) },
		"signal":            func(_ *rig, pid int, _ *processpb.StartRequest) { _ = unix.Kill(pid, unix.SIGTERM) },
		"ignored signal":    func(_ *rig, pid int, _ *processpb.StartRequest) { _ = unix.Kill(pid, unix.SIGWINCH) },
		"stopped":           func(_ *rig, pid int, _ *processpb.StartRequest) { _ = unix.Kill(pid, unix.SIGSTOP) },
		"trap signal":       func(_ *rig, pid int, _ *processpb.StartRequest) { _ = unix.Kill(pid, unix.SIGTRAP) },
		"new directory of that name": func(g *rig, _ int, _ *processpb.StartRequest) {
			ok(g.t, os.Rename(g.home, g.home+".old"))
			g.t.Cleanup(func() { os.RemoveAll(g.home + ".old") })
			ok(g.t, os.Mkdir(g.home, 0o755))
		},
		"directory by a link": func(g *rig, _ int, _ *processpb.StartRequest) {
			ok(g.t, os.Rename(g.home, g.home+".old"))
			g.t.Cleanup(func() { os.RemoveAll(g.home + ".old") })
			ok(g.t, os.Symlink(g.home+".old", g.home))
		},
		"other mode of the directory": func(g *rig, _ int, _ *processpb.StartRequest) { ok(g.t, os.Chmod(g.home, 0o711)) },
		"other user":                  func(*rig, int, *processpb.StartRequest) {},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t)
			g.profile("")
			req := g.login("echo $$")
			pid := g.hold(g.login("echo $$"))
			change(g, pid, req.Msg)
			if name == "other user" {
				asUser(req, "root")
			}
			r, err := g.run(req)
			if err != nil || int(r.pid) == pid {
				t.Fatalf("process %d of held %d: %v", r.pid, pid, err)
			}
			if !strings.Contains(string(r.stdout)+string(r.pty), strconv.Itoa(int(r.pid))) {
				t.Errorf("got %s", shown(r, err))
			}
		})
	}
	t.Run("directory that the user may not enter any more", func(t *testing.T) {
		g := newRig(t)
		g.hold(g.login("pwd"))
		ok(g.t, os.Chown(g.home, 0, 0))
		ok(g.t, os.Chmod(g.home, 0o700))
		if r, err := g.run(g.login("pwd")); err == nil {
			t.Errorf("got %s", shown(r, err))
		}
	})
}

func TestHeldShellReadsThePresentProfile(t *testing.T) {
	g := newRig(t)
	for i := range 3 {
		g.profile("echo before\n")
		pid := g.hold(g.login("echo command"))
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)); err != nil || !bytes.Contains(b, []byte("TracerPid:\t")) {
			t.Fatalf("%s: %v", b, err)
		}
		want := fmt.Sprintf("profile %d\ncommand\n", i)
		g.profile(fmt.Sprintf("echo profile %d\n", i))
		if r, err := g.run(g.login("echo command")); err != nil || string(r.stdout) != want || int(r.pid) != pid {
			t.Errorf("got %s, want %q", shown(r, err), want)
		}
	}
}

// Input, signals, deadlines and the list are those of any process.
func TestHeldShellIsAProcessOfItsClient(t *testing.T) {
	g := newRig(t)
	g.profile("")
	list := func() int {
		res, err := g.proc.List(t.Context(), connect.NewRequest(&processpb.ListRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		return len(res.Msg.GetProcesses())
	}
	yes := true
	withInput := func(text string) *connect.Request[processpb.StartRequest] {
		req := g.login(text)
		req.Msg.Stdin = &yes
		return req
	}
	pid := g.hold(withInput("cat"))
	if n := list(); n != 0 {
		t.Errorf("%d processes are listed while a shell is held", n)
	}
	st, started := g.begin(t.Context(), withInput("cat"))
	if int(started) != pid || list() != 1 {
		t.Errorf("process %d, held %d, %d listed", started, pid, list())
	}
	if _, err := g.proc.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: byPid(started), Input: stdin("in")})); err != nil {
		t.Fatal(err)
	}
	if _, err := g.proc.CloseStdin(t.Context(), connect.NewRequest(&processpb.CloseStdinRequest{Process: byPid(started)})); err != nil {
		t.Fatal(err)
	}
	var r result
	for st.Receive() {
		r.take(st.Msg().GetEvent())
	}
	if string(r.stdout) != "in" || r.end.GetExitCode() != 0 {
		t.Errorf("got %s", shown(r, st.Err()))
	}

	pid = g.hold(g.login("sleep 60 & sleep 60"))
	st, started = g.begin(t.Context(), g.login("sleep 60 & sleep 60"))
	if _, err := g.proc.SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{Process: byPid(started), Signal: processpb.Signal_SIGNAL_SIGKILL})); err != nil {
		t.Fatal(err)
	}
	for st.Receive() {
		r.take(st.Msg().GetEvent())
	}
	if int(started) != pid || r.end.GetStatus() != "signal: killed" {
		t.Errorf("process %d, held %d: %s", started, pid, shown(r, st.Err()))
	}

	pid = g.hold(g.login("sleep 60"))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	st, started = g.begin(ctx, g.login("sleep 60"))
	for st.Receive() {
		continue
	}
	for i := 0; list() > 0; i++ {
		if i > 6000 {
			t.Fatalf("process %d, held %d, is not killed at its deadline", started, pid)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestHeldShellsEnd(t *testing.T) {
	gone := func(t *testing.T, pid int) {
		t.Helper()
		for range 6000 {
			if unix.Kill(pid, 0) != nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("the held shell %d lives on", pid)
	}
	t.Run("with a restore", func(t *testing.T) {
		g := newRig(t)
		pid := g.hold(g.login("true"))
		if code, body, _ := g.do("POST", "/init", strings.NewReader(`{"restored":true,"sandboxID":"other"}`)); code != 204 {
			t.Fatalf("got %d %s", code, body)
		}
		gone(t, pid)
	})
	t.Run("with the environment", func(t *testing.T) {
		g := newRig(t)
		pid := g.hold(g.login("true"))
		if code, body, _ := g.do("POST", "/init", strings.NewReader(`{"envVars":{"A":"b"}}`)); code != 204 {
			t.Fatalf("got %d %s", code, body)
		}
		gone(t, pid)
	})
	t.Run("when they are too many", func(t *testing.T) {
		g := newRig(t)
		var pids []int
		for i := range maxHeld + 1 {
			req := g.login("true")
			req.Msg.Process.Envs["N"] = strconv.Itoa(i)
			pids = append(pids, g.hold(req))
		}
		gone(t, pids[0])
	})
	t.Run("with the server", func(t *testing.T) {
		pid := 0
		t.Run("serve", func(t *testing.T) {
			g := newRig(t)
			pid = g.hold(g.login("true"))
		})
		gone(t, pid)
	})
}

func TestNoShellIsHeldBelowTheLimits(t *testing.T) {
	const mb = 1 << 20
	for _, c := range []struct {
		name                            string
		most, running, total, usedBytes int64
		want                            bool
	}{
		{"no limits", 0, 1000, 0, 0, true},
		{"few processes allowed", fewProcesses - 1, 0, 0, 0, false},
		{"processes allowed", fewProcesses, fewProcesses / 2, 0, 0, true},
		{"many processes run", fewProcesses, fewProcesses/2 + 1, 0, 0, false},
		{"memory is free", 0, 0, 512 * mb, 300 * mb, true},
		{"little memory is free", 0, 0, 512 * mb, 450 * mb, false},
		{"only the reserve is free", 0, 0, 8192 * mb, 8080 * mb, false},
	} {
		if got := roomToHold(c.most, c.running, c.total, c.usedBytes); got != c.want {
			t.Errorf("%s: got %t, want %t", c.name, got, c.want)
		}
	}
}

func FuzzShellImage(f *testing.F) {
	if b, err := os.ReadFile(shellPath); err == nil {
		if im, err := readShellImage(bytes.NewReader(b)); err != nil {
			f.Errorf("%s: %v %+v", shellPath, err, im)
		}
		f.Add(b[:min(len(b), 4096)])
	}
	head := make([]byte, 64+2*64+64)
	copy(head, "\x7fELF\x02\x01")
	head[16], head[18], head[24], head[40], head[58], head[60] = 3, 62, 1, 64, 64, 2
	head[64+4], head[64+24], head[64+32], head[64+40] = 11, 192, 48, 1
	head[128+24], head[128+32] = 64, 200
	f.Add(head)
	f.Fuzz(func(t *testing.T, b []byte) {
		if im, err := readShellImage(bytes.NewReader(b)); err == nil && (im.startup == 0 || im.command == 0) {
			t.Errorf("got %+v", im)
		}
	})
}
