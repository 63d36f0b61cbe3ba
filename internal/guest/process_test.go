package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"postern/internal/guest/processpb"
)

func TestEndEventSaysHowItEnded(t *testing.T) {
	g := newRig(t)
	for _, tt := range []struct {
		name, script   string
		code           int32
		exited         bool
		status, errMsg string
		stdout, stderr string
	}{
		{"success", "echo out; echo err >&2", 0, true, "exit status 0", "", "out\n", "err\n"},
		{"failure", "exit 7", 7, true, "exit status 7", "exit status 7", "", ""},
		{"killed", "kill -9 $$", -1, false, "signal: killed", "signal: killed", "", ""},
		{"terminated", "kill $$", -1, false, "signal: terminated", "signal: terminated", "", ""},
		{"no input", "cat; echo $?", 0, true, "exit status 0", "", "0\n", ""},
		{"session of its own", "ps -o pid=,sid=,pgid= -p $$ | (read a b c; [ $a = $b ] && [ $a = $c ] && echo yes)", 0, true, "exit status 0", "", "yes\n", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := g.sh(tt.script)
			e := got.end
			if e.GetExitCode() != tt.code || e.GetExited() != tt.exited || e.GetStatus() != tt.status || e.GetError() != tt.errMsg || (e.Error != nil) != (tt.errMsg != "") {
				t.Errorf("end: got %v, want %d %v %q %q", e, tt.code, tt.exited, tt.status, tt.errMsg)
			}
			if string(got.stdout) != tt.stdout || string(got.stderr) != tt.stderr {
				t.Errorf("output: got %q %q, want %q %q", got.stdout, got.stderr, tt.stdout, tt.stderr)
			}
		})
	}
}

func TestStartErrors(t *testing.T) {
	g := newRig(t)
	missing, empty := "/no/such/dir", ""
	file := "/etc/passwd"
	for _, tt := range []struct {
		name string
		req  *connect.Request[processpb.StartRequest]
		code connect.Code
		text string
	}{
		{"no command", connect.NewRequest(&processpb.StartRequest{}), connect.CodeInvalidArgument, "process.cmd"},
		{"cwd missing", connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "true", Cwd: &missing}}), connect.CodeInvalidArgument, "cwd '/no/such/dir' does not exist"},
		{"cwd is a file", connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "true", Cwd: &file}}), connect.CodeInvalidArgument, "not a directory"},
		{"command missing", connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/no/such", Cwd: &empty}}), connect.CodeInvalidArgument, "no such file"},
		{"command not in PATH", connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "no-such-command"}}), connect.CodeInvalidArgument, "not in PATH"},
		{"zero byte", connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "true", Args: []string{"a\x00b"}}}), connect.CodeInvalidArgument, ""},
		{"bad variable", connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "true", Envs: map[string]string{"A=B": ""}}}), connect.CodeInvalidArgument, "process.envs"},
		{"unknown user", asUser(connect.NewRequest(shell("true")), "nobody-at-all"), connect.CodeUnauthenticated, "nobody-at-all"},
		{"cwd of root's", asUser(connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "true", Cwd: new(privateDir(t))}}), testUser), connect.CodePermissionDenied, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := g.run(tt.req)
			if connect.CodeOf(err) != tt.code || !strings.Contains(fmt.Sprint(err), tt.text) {
				t.Errorf("got %v, want %v with %q", err, tt.code, tt.text)
			}
		})
	}
}

// privateDir is a directory that only root may enter, with a file in it.
func privateDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "guest-private-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.WriteFile(dir+"/secret", []byte("root's"), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestIdentity(t *testing.T) {
	g := newRig(t)
	for _, tt := range []struct{ name, user, want string }{
		{"default", "", "65534 65534 65534\n"},
		{"named", testUser, "65534 65534 65534\n"},
		{"root", "root", "0 0 0\n"},
	} {
		req := connect.NewRequest(shell(`echo $(id -u) $(id -g) $(id -G)`))
		if tt.user != "" {
			asUser(req, tt.user)
		}
		got, err := g.run(req)
		if err != nil || string(got.stdout) != tt.want {
			t.Errorf("%s: got %q, %v, want %q", tt.name, got.stdout, err, tt.want)
		}
	}
	// The guest's own descriptors and environment are out of reach.
	got := g.sh(`echo $(ls /proc/self/fd); cat /proc/$PPID/environ`)
	if string(got.stdout) != "0 1 2 3\n" || got.end.GetExitCode() == 0 { // ls itself opens one
		t.Errorf("leak: got descriptors %q, environment %q", got.stdout, got.stderr)
	}
}

func (g *rig) begin(ctx context.Context, req *connect.Request[processpb.StartRequest]) (*connect.ServerStreamForClient[processpb.StartResponse], uint32) {
	g.t.Helper()
	st, err := g.proc.Start(ctx, req)
	if err != nil {
		g.t.Fatal(err)
	}
	if !st.Receive() {
		g.t.Fatal(st.Err())
	}
	if st.Msg().GetEvent().GetStart() == nil {
		g.t.Fatalf("first event: got %v, want start", st.Msg())
	}
	return st, st.Msg().GetEvent().GetStart().GetPid()
}

func byPid(pid uint32) *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}
}

func stdin(s string) *processpb.ProcessInput {
	return &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte(s)}}
}

func TestInputReachesTheProcess(t *testing.T) {
	g := newRig(t)
	// Absent stdin means that there is one.
	st, pid := g.begin(t.Context(), connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "cat"}, Tag: new("my cat")}))
	defer st.Close()
	tag := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Tag{Tag: "my cat"}}
	if _, err := g.proc.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: tag, Input: stdin("one ")})); err != nil {
		t.Fatal(err)
	}
	in := g.proc.StreamInput(t.Context())
	_ = in.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Start{Start: &processpb.StreamInputRequest_StartEvent{Process: byPid(pid)}}})
	for range 2 {
		_ = in.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Data{Data: &processpb.StreamInputRequest_DataEvent{Input: stdin("two ")}}})
	}
	if _, err := in.CloseAndReceive(); err != nil {
		t.Fatal(err)
	}
	list, err := g.proc.List(t.Context(), connect.NewRequest(&processpb.ListRequest{}))
	if err != nil || len(list.Msg.GetProcesses()) != 1 || list.Msg.GetProcesses()[0].GetTag() != "my cat" || list.Msg.GetProcesses()[0].GetConfig().GetCmd() != "cat" {
		t.Errorf("list: got %v, %v", list, err)
	}
	if _, err := g.proc.CloseStdin(t.Context(), connect.NewRequest(&processpb.CloseStdinRequest{Process: byPid(pid)})); err != nil {
		t.Fatal(err)
	}
	var r result
	for st.Receive() {
		r.take(st.Msg().GetEvent())
	}
	if got, want := string(r.stdout), "one two two "; got != want || r.end.GetExitCode() != 0 {
		t.Errorf("got %q %v, want %q", got, r.end, want)
	}
	_, err = g.proc.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: byPid(pid), Input: stdin("x")}))
	if got, want := connect.CodeOf(err), connect.CodeNotFound; got != want {
		t.Errorf("input after the end: got %v, want %v", got, want)
	}
}

// A process that does not read its input holds only who writes to it.
func TestInputNotRead(t *testing.T) {
	g := newRig(t)
	st, pid := g.begin(t.Context(), connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "sleep", Args: []string{"60"}}}))
	defer st.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := g.proc.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{Process: byPid(pid), Input: stdin(strings.Repeat("x", 1<<20))}))
	if got, want := connect.CodeOf(err), connect.CodeDeadlineExceeded; got != want {
		t.Errorf("got %v, want %v", err, want)
	}
	if _, err := g.proc.SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{Process: byPid(pid), Signal: processpb.Signal_SIGNAL_SIGKILL})); err != nil {
		t.Errorf("kill: %v", err)
	}
}

func TestSignalReachesTheGroup(t *testing.T) {
	g := newRig(t)
	st, pid := g.begin(t.Context(), connect.NewRequest(shell("sleep 60 & sleep 60; true")))
	defer st.Close()
	for _, bad := range []processpb.Signal{0, 15 + 1} {
		_, err := g.proc.SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{Process: byPid(pid), Signal: bad}))
		if got, want := connect.CodeOf(err), connect.CodeInvalidArgument; got != want {
			t.Errorf("signal %d: got %v, want %v", bad, got, want)
		}
	}
	if _, err := g.proc.SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{Process: byPid(pid), Signal: processpb.Signal_SIGNAL_SIGKILL})); err != nil {
		t.Fatal(err)
	}
	var r result
	for st.Receive() {
		r.take(st.Msg().GetEvent())
	}
	if r.end.GetExitCode() != -1 || r.end.GetError() != "signal: killed" {
		t.Errorf("got %v, want killed", r.end)
	}
	_, err := g.proc.SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{Process: byPid(pid), Signal: processpb.Signal_SIGNAL_SIGKILL}))
	if got, want := connect.CodeOf(err), connect.CodeNotFound; got != want {
		t.Errorf("signal after the end: got %v, want %v", got, want)
	}
}

// A client that goes leaves the process running; another one can join it, and
// also hear its end when it is late.
func TestConnect(t *testing.T) {
	g := newRig(t)
	ctx, leave := context.WithCancel(t.Context())
	st, pid := g.begin(ctx, connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "cat"}}))
	leave()
	st.Close()
	time.Sleep(100 * time.Millisecond)
	join := func() (result, error) {
		c, err := g.proc.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: byPid(pid)}))
		if err != nil {
			return result{}, err
		}
		defer c.Close()
		var r result
		for c.Receive() {
			r.take(c.Msg().GetEvent())
			if r.end == nil && len(r.stdout) == 0 {
				_, _ = g.proc.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: byPid(pid), Input: stdin("hello")}))
				_, _ = g.proc.CloseStdin(t.Context(), connect.NewRequest(&processpb.CloseStdinRequest{Process: byPid(pid)}))
			}
		}
		return r, c.Err()
	}
	r, err := join()
	if err != nil || string(r.stdout) != "hello" || r.end == nil || r.pid != pid {
		t.Errorf("join: got %v, %v", r, err)
	}
	r, err = join()
	if err != nil || len(r.stdout) != 0 || r.end.GetStatus() != "exit status 0" || r.pid != pid {
		t.Errorf("join after the end: got %v, %v", r, err)
	}
}

func TestDeadlineKills(t *testing.T) {
	g := newRig(t)
	// begun has a process with a deadline begin. On a machine that stands still
	// for as long it would be over before, so then it gets more time.
	begun := func() (*connect.ServerStreamForClient[processpb.StartResponse], uint32, context.CancelFunc) {
		for limit := 500 * time.Millisecond; ; limit *= 2 {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			st, err := g.proc.Start(ctx, connect.NewRequest(shell("sleep 600; true")))
			if err == nil && st.Receive() {
				return st, st.Msg().GetEvent().GetStart().GetPid(), cancel
			}
			if err == nil {
				err = st.Err()
				st.Close()
			}
			cancel()
			if connect.CodeOf(err) != connect.CodeDeadlineExceeded || limit > time.Minute {
				t.Fatal(err)
			}
		}
	}
	for _, stay := range []bool{true, false} {
		st, pid, cancel := begun()
		if stay {
			for st.Receive() {
			}
			if got, want := connect.CodeOf(st.Err()), connect.CodeDeadlineExceeded; got != want {
				t.Errorf("got %v, want %v", st.Err(), want)
			}
		} else {
			cancel()
		}
		st.Close()
		cancel()
		for end := time.Now().Add(3 * time.Minute); unix.Kill(int(pid), 0) == nil; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("process %d lives after its deadline (client stays: %v)", pid, stay)
			}
		}
	}
}

func TestKeepalive(t *testing.T) {
	g := newRig(t)
	// One each second, but for those seconds in which this machine stands still.
	for _, sleep := range []string{"1.5", "5", "30"} {
		req := connect.NewRequest(shell("sleep " + sleep))
		req.Header().Set("Keepalive-Ping-Interval", "1")
		begin := time.Now()
		r, err := g.run(req)
		if most := int(time.Since(begin) / time.Second); err != nil || r.keepalives > most || r.keepalives == 0 && sleep == "30" {
			t.Errorf("got %d keepalives, %v, want at most %d, and some", r.keepalives, err, most)
		}
		if r.keepalives > 0 {
			break
		}
	}
	req := connect.NewRequest(shell("true"))
	req.Header().Set("Keepalive-Ping-Interval", "-1")
	if _, err := g.run(req); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("got %v, want invalid argument", err)
	}
}

// 1 GiB to a client that reads late: nothing is lost, and the guest does not
// keep it meanwhile.
func TestBackpressure(t *testing.T) {
	g := newRig(t)
	const size = 1 << 30
	st, pid := g.begin(t.Context(), connect.NewRequest(shell(fmt.Sprintf("head -c %d /dev/zero", size))))
	defer st.Close()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	time.Sleep(time.Second)
	if unix.Kill(int(pid), 0) != nil {
		t.Errorf("the process could write all of %d bytes although nobody read", size)
	}
	n := 0
	for st.Receive() {
		b := st.Msg().GetEvent().GetData().GetStdout()
		if len(bytes.Trim(b, "\x00")) > 0 {
			t.Fatal("other bytes than were written")
		}
		n += len(b)
	}
	if n != size || st.Err() != nil {
		t.Errorf("got %d bytes, %v, want %d", n, st.Err(), size)
	}
	runtime.ReadMemStats(&after)
	if grown := int64(after.Sys) - int64(before.Sys); grown > 256<<20 { // the client is in here too
		t.Errorf("memory grew by %d MiB", grown>>20)
	}
}

// lines checks that what a client heard are numbered lines without a gap, the
// first and the last perhaps in part, and returns the first and last whole ones.
func lines(t *testing.T, b []byte) (first, last int) {
	t.Helper()
	whole := bytes.Split(b, []byte("\n"))
	if len(whole) < 3 {
		t.Fatalf("got %d bytes only", len(b))
	}
	whole = whole[1 : len(whole)-1]
	for i, l := range whole {
		n, err := strconv.Atoi(string(l))
		if err != nil || (i > 0 && n != last+1) {
			t.Fatalf("line %q after %d", l, last)
		}
		if i == 0 {
			first = n
		}
		last = n
	}
	return first, last
}

// A reader that leaves holds nobody up, one that comes (back) hears all from
// then on, and one that stays hears all there is.
func TestReadersComeAndGo(t *testing.T) {
	g := newRig(t)
	const end = 9_000_000
	signal := userDir(t) + "/go"
	stays, pid := g.begin(t.Context(), connect.NewRequest(shell(fmt.Sprintf("until [ -e %s ]; do sleep 0.02; done; seq 1000000 %d", signal, end))))
	defer stays.Close()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	leaves, err := g.proc.Connect(ctx, connect.NewRequest(&processpb.ConnectRequest{Process: byPid(pid)}))
	if err != nil || !leaves.Receive() {
		t.Fatal(err, leaves.Err())
	}
	if err := os.WriteFile(signal, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	heard := make(chan result, 1)
	var progress atomic.Int64
	go func() {
		var r result
		for stays.Receive() {
			r.take(stays.Msg().GetEvent())
			progress.Store(int64(len(r.stdout)))
		}
		heard <- r
	}()
	// The one that leaves reads nothing, so that the other waits; then it goes.
	held := int64(-1)
	for held != progress.Load() {
		held = progress.Load()
		time.Sleep(300 * time.Millisecond)
	}
	if all := int64(8 * (end - 1000000)); held >= all {
		t.Fatal("nobody was held up by a reader that does not read")
	}
	leave()
	for progress.Load() == held {
		time.Sleep(time.Millisecond)
	}
	back, err := g.proc.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: byPid(pid)}))
	if err != nil {
		t.Fatal(err)
	}
	defer back.Close()
	var again result
	for back.Receive() {
		again.take(back.Msg().GetEvent())
	}
	r := <-heard
	if first, last := lines(t, append([]byte("\n"), r.stdout...)); first != 1000000 || last != end || r.end.GetExitCode() != 0 {
		t.Errorf("the one that stays: got %d to %d, %v", first, last, r.end)
	}
	if bytes.Count(again.stdout, []byte("\n")) > 2 { // else all was over when it came
		if _, last := lines(t, again.stdout); last != end {
			t.Errorf("the one that comes back: got up to %d, want %d", last, end)
		}
	}
	if again.end == nil {
		t.Error("the one that comes back does not hear the end")
	}
}

// Without any reader the process goes on.
func TestNobodyReads(t *testing.T) {
	g := newRig(t)
	ctx, leave := context.WithCancel(t.Context())
	st, pid := g.begin(ctx, connect.NewRequest(shell("sleep 0.2; head -c 50000000 /dev/zero; exit 5")))
	leave()
	st.Close()
	c, err := g.proc.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: byPid(pid)}))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	for end := time.Now().Add(time.Minute); unix.Kill(int(pid), 0) == nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it waits for a reader who has gone")
		}
	}
	var r result
	for r.end == nil {
		c, err := g.proc.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: byPid(pid)}))
		if err != nil {
			t.Fatal(err)
		}
		for c.Receive() {
			r.take(c.Msg().GetEvent())
		}
		c.Close()
	}
	if r.end.GetExitCode() != 5 {
		t.Errorf("got %v, want exit 5", r.end)
	}
}

// Both encodings over both versions of HTTP.
func TestAllWireFormatsWork(t *testing.T) {
	g := newRig(t)
	var h2c http.Protocols
	h2c.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: &h2c, DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	for name, client := range map[string]processpb.ProcessClient{
		"HTTP/1.1, binary": processpb.NewProcessClient(g.http, g.url),
		"HTTP/1.1, JSON":   processpb.NewProcessClient(g.http, g.url, connect.WithProtoJSON()),
		"h2c, binary":      processpb.NewProcessClient(&http.Client{Transport: channelTransport{tr}}, g.url),
		"h2c, JSON":        processpb.NewProcessClient(&http.Client{Transport: channelTransport{tr}}, g.url, connect.WithProtoJSON()),
		"gRPC":             processpb.NewProcessClient(&http.Client{Transport: channelTransport{tr}}, g.url, connect.WithGRPC()),
	} {
		t.Run(name, func(t *testing.T) {
			g := *g
			g.t, g.proc = t, client
			st, pid := g.begin(t.Context(), connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "cat"}}))
			defer st.Close()
			in := client.StreamInput(t.Context())
			_ = in.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Start{Start: &processpb.StreamInputRequest_StartEvent{Process: byPid(pid)}}})
			_ = in.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Keepalive{Keepalive: &processpb.StreamInputRequest_KeepAlive{}}})
			_ = in.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Data{Data: &processpb.StreamInputRequest_DataEvent{Input: stdin("hello")}}})
			if _, err := in.CloseAndReceive(); err != nil {
				t.Fatal(err)
			}
			if _, err := client.CloseStdin(t.Context(), connect.NewRequest(&processpb.CloseStdinRequest{Process: byPid(pid)})); err != nil {
				t.Fatal(err)
			}
			var r result
			for st.Receive() {
				r.take(st.Msg().GetEvent())
			}
			if string(r.stdout) != "hello" || r.end.GetStatus() != "exit status 0" || st.Err() != nil {
				t.Errorf("got %q, %v, %v", r.stdout, r.end, st.Err())
			}
		})
	}
}

func TestTerminal(t *testing.T) {
	g := newRig(t)
	req := connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-i"}, Envs: map[string]string{"PS1": "> "}},
		Pty:     &processpb.PTY{Size: &processpb.PTY_Size{Cols: 100, Rows: 40}},
	})
	st, pid := g.begin(t.Context(), req)
	defer st.Close()
	var r result
	until := func(want string) {
		t.Helper()
		for !strings.Contains(string(r.pty), want) {
			if !st.Receive() {
				t.Fatalf("no %q in %q: %v", want, r.pty, st.Err())
			}
			r.take(st.Msg().GetEvent())
		}
	}
	say := func(s string) {
		t.Helper()
		in := &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: []byte(s)}}
		if _, err := g.proc.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: byPid(pid), Input: in})); err != nil {
			t.Fatal(err)
		}
	}
	say("stty size; test -O $(tty) && echo mi''ne\n")
	until("40 100")
	until("mine")
	if _, err := g.proc.Update(t.Context(), connect.NewRequest(&processpb.UpdateRequest{Process: byPid(pid), Pty: &processpb.PTY{Size: &processpb.PTY_Size{Cols: 33, Rows: 11}}})); err != nil {
		t.Fatal(err)
	}
	say("stty size\n")
	until("11 33")
	_, err := g.proc.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: byPid(pid), Input: stdin("x")}))
	if got, want := connect.CodeOf(err), connect.CodeFailedPrecondition; got != want {
		t.Errorf("stdin to a terminal: got %v, want %v", got, want)
	}
	say("sleep 77 & exit 3\n") // what is left in the background does not hold the end
	for st.Receive() {
		r.take(st.Msg().GetEvent())
	}
	if r.end.GetExitCode() != 3 {
		t.Errorf("got %v, %v, want exit 3", r.end, st.Err())
	}
}

// TestKillOfTerminalReachesJobs: a job in the background of a shell with job control, which
// has a group of its own, ends with the terminal.
func TestKillOfTerminalReachesJobs(t *testing.T) {
	g := newRig(t)
	req := connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", "set -m; sleep 78 & echo job:$!:; read x"}},
		Pty:     &processpb.PTY{Size: &processpb.PTY_Size{Cols: 100, Rows: 40}},
	})
	st, pid := g.begin(t.Context(), req)
	defer st.Close()
	var r result
	for strings.Count(string(r.pty), ":") < 2 {
		if !st.Receive() {
			t.Fatalf("%q: %v", r.pty, st.Err())
		}
		r.take(st.Msg().GetEvent())
	}
	job, err := strconv.Atoi(strings.Split(string(r.pty), ":")[1])
	if err != nil {
		t.Fatal(err)
	}
	if group, err := unix.Getpgid(job); err != nil || group != job {
		t.Fatalf("the job is in the group %d, %v, want its own", group, err)
	}
	if _, err := g.proc.SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{Process: byPid(pid), Signal: processpb.Signal_SIGNAL_SIGKILL})); err != nil {
		t.Fatal(err)
	}
	for st.Receive() {
		r.take(st.Msg().GetEvent())
	}
	procs, _ := readProcs("/proc")
	for _, p := range procs {
		if p.pid == job && !p.dead {
			t.Errorf("the job goes on: %+v", p)
		}
	}
}

func TestSelector(t *testing.T) {
	g := newRig(t)
	_, err := g.proc.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: byPid(1)}))
	if err == nil {
		c, _ := g.proc.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: byPid(1)}))
		c.Receive()
		err = c.Err()
	}
	if got, want := connect.CodeOf(err), connect.CodeNotFound; got != want {
		t.Errorf("a process of others: got %v, want %v", err, want)
	}
	_, err = g.proc.SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{Signal: processpb.Signal_SIGNAL_SIGKILL}))
	if got, want := connect.CodeOf(err), connect.CodeInvalidArgument; got != want {
		t.Errorf("no selector: got %v, want %v", err, want)
	}
	if errors.Is(err, context.Canceled) {
		t.Error("canceled")
	}
}
