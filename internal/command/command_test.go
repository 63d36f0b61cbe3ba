package command_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/internal/command"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

const job = `version: 1
name: job
commands:
  allow:
    - run: python3 **
    - run: ls
      max: 3
    - run: sleep *
      time: 1s
    - run: git push **
      ask: true
  deny:
    - curl **
`

func TestContractDecidesOnCommands(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	a := f.start(command.Config{Hold: time.Millisecond})
	s := &side{}
	if err := a.Bind(boxID, s.binding(parse(t, job))); err != nil {
		t.Fatal(err)
	}
	if err := a.Bind(boxID, s.binding(parse(t, strings.Replace(job, "curl **", "wget **", 1)))); err == nil {
		t.Error("a bound sandbox was bound to another contract")
	}
	ctx := t.Context()
	made := run(9, "python3", "x.py")
	made.Fixed = false
	guest := run(10, "/usr/local/sbin/postern-guest")
	guest.UID, guest.Guest, guest.Fixed = 0, true, false
	planted := guest
	planted.Guest = false
	user := guest
	user.UID = 1000
	for _, tt := range []struct {
		name string
		e    sandbox.Exec
		want bool
	}{
		{"allowed", run(2, "python3", "report.py"), true},
		{"not named", run(3, "bash", "-c", "id"), false},
		{"denied", run(4, "curl", "http://x"), false},
		{"written in the sandbox", made, false},
		{"other arguments", run(5, "ls", "/etc"), false},
		{"asks", run(6, "git", "push"), false},
		{"the guest", guest, true},
		{"a file in the guest's place", planted, false},
		{"the guest's program as a user", user, false},
	} {
		if got := a.Exec(ctx, f.box(), tt.e); got != tt.want {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
	_, _, violations := s.seen()
	if len(violations) != 6 {
		t.Errorf("got %d violations, want 6: %+v", len(violations), violations)
	}
	for _, v := range violations {
		if v.What != command.Refused || v.Text == "" || v.Time.IsZero() {
			t.Errorf("got %+v", v)
		}
	}
	r, err := a.Record(ctx, boxID)
	if err != nil {
		t.Fatal(err)
	}
	if r.Started != 2 || r.Refused != 7 || r.Held != 1 || !r.Complete || r.Programs["python3"] != 1 || !strings.HasPrefix(r.Contract, "job@sha256:") {
		t.Errorf("got %+v", r)
	}
	if _, err := a.Record(ctx, "../../etc/passwd"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("got %v", err)
	}
}

// TestCountsHoldForParallelStarts: an attacker makes many starts at the same time. They
// share the limit, also across a restart of the server.
func TestCountsHoldForParallelStarts(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	a := f.start(command.Config{})
	if err := a.Bind(boxID, (&side{}).binding(parse(t, job))); err != nil {
		t.Fatal(err)
	}
	var started atomic.Int32
	var wg sync.WaitGroup
	for i := range int32(40) {
		wg.Go(func() {
			if a.Exec(t.Context(), f.box(), run(100+i, "ls")) {
				started.Add(1)
			}
		})
	}
	wg.Wait()
	if started.Load() != 3 {
		t.Errorf("started %d times, want 3", started.Load())
	}
	a.Close()
	b := f.start(command.Config{})
	if err := b.Bind(boxID, (&side{}).binding(parse(t, job))); err != nil {
		t.Fatal(err)
	}
	if b.Exec(t.Context(), f.box(), run(200, "ls")) {
		t.Error("a restart of the server gives back starts that were made")
	}
	if !b.Exec(t.Context(), f.box(), run(201, "python3")) {
		t.Error("what has no limit is refused")
	}
}

// TestLostBindingStartsNothing: nothing starts in a sandbox whose contract is not in
// force, whatever the reason.
func TestLostBindingStartsNothing(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	name, fail := "", errors.New("the database is away")
	a := f.start(command.Config{Contract: func(context.Context, string) (string, error) { return name, fail }})
	starts := func(a *command.Admission) bool { return a.Exec(t.Context(), f.box(), run(2, "ls")) }
	if starts(a) {
		t.Error("it starts although nobody knows whether it has a contract")
	}
	name, fail = "job@sha256:00", nil
	if starts(a) {
		t.Error("it starts although its contract is not in force")
	}
	guest := run(7, "/usr/local/sbin/postern-guest", "serve")
	guest.UID = 0
	if !a.Exec(t.Context(), f.box(), guest) {
		t.Error("the guest cannot boot in a sandbox that is to be bound")
	}
	if err := a.Bind(boxID, (&side{}).binding(parse(t, job))); err != nil {
		t.Fatal(err)
	}
	if !starts(a) {
		t.Error("it does not start under its contract")
	}
	// Refusals before the binding concern the template and not the contract.
	if r, err := a.Record(t.Context(), boxID); err != nil || r.Refused != 0 || r.Started != 1 || len(r.Commands) != 1 || r.Lines < 3 {
		t.Errorf("got %+v, %v", r, err)
	}
	a.Unbind(boxID)
	if starts(a) {
		t.Error("it starts after its contract has ended")
	}
	a.Close()
	// A restarted server knows it from the record, even if the row is wrong.
	if b := f.start(command.Config{Contract: func(context.Context, string) (string, error) { return "", nil }}); starts(b) {
		t.Error("it starts after a restart, without its contract")
	} else if err := b.Bind(boxID, (&side{}).binding(parse(t, strings.Replace(job, "curl **", "wget **", 1)))); err == nil {
		t.Error("it is bound to another contract after a restart")
	}
	other := f.box()
	other.ID = "ibbbbbbbbbbbbbbbbbbbb"
	if free := f.start(command.Config{Contract: func(context.Context, string) (string, error) { return "", nil }}); !free.Exec(t.Context(), other, run(2, "bash")) {
		t.Error("a sandbox without a contract starts nothing")
	}
}

// TestCommandsEndWhenTheirTimeIsOver: a process is killed when the time of its command
// is over, also if it has executed another program. If that fails, the sandbox is
// stopped.
func TestCommandsEndWhenTheirTimeIsOver(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	a := f.start(command.Config{})
	a.SetKillTime(50 * time.Millisecond)
	s := &side{}
	if err := a.Bind(boxID, s.binding(parse(t, job))); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	starts := func(e sandbox.Exec) {
		t.Helper()
		if !a.Exec(ctx, f.box(), e) {
			t.Fatalf("%v is refused", e.Args)
		}
	}
	starts(run(2, "sleep", "1"))
	a.Exited(f.box(), sandbox.Exit{PID: 2, Time: time.Now()})
	// The attack: it executes itself, or another program, in the same process.
	starts(run(3, "sleep", "9"))
	starts(run(3, "python3"))
	until(t, "it is killed", func() bool { killed, _, _ := s.seen(); return len(killed) > 0 })
	a.Exited(f.box(), sandbox.Exit{PID: 3, Signal: 9, Code: 137, Time: time.Now()})
	starts(run(4, "sleep", "99"))
	until(t, "the sandbox is stopped", func() bool { _, stopped, _ := s.seen(); return len(stopped) > 0 })
	killed, stopped, violations := s.seen()
	if len(killed) != 2 || killed[0] != 3 || killed[1] != 4 || len(stopped) != 1 {
		t.Errorf("killed %v, stopped %v", killed, stopped)
	}
	for _, v := range violations {
		if v.What != command.Overtime {
			t.Errorf("got %+v", v)
		}
	}
}

// TestExitedProcessGetsNoTimeLimit: a process that was killed while its start was
// judged gets no time limit, which would apply to a later process with the same PID.
func TestExitedProcessGetsNoTimeLimit(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	a := f.start(command.Config{})
	a.SetKillTime(time.Millisecond)
	s := &side{}
	if err := a.Bind(boxID, s.binding(parse(t, job))); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	a.Exited(f.box(), sandbox.Exit{PID: 2, Signal: 9, Code: 137, Time: time.Now()})
	a.Limit(ctx, f.box(), 2, time.Minute)
	if a.Timers(boxID) != 0 {
		t.Error("it has a time limit")
	}
	if !a.Exec(t.Context(), f.box(), run(2, "sleep", "9")) || a.Timers(boxID) != 1 {
		t.Error("the next process with its PID is refused, or has no time limit")
	}
}

const rules = `rules:
  - id: push
    kind: process.exec
    when: detail['command'].startsWith('git push')
    then: ask
  - id: no-nmap
    kind: process.exec
    when: detail['program'].endsWith('/nmap') || detail['command'].contains('nmap')
    then: deny
    reason: nobody is scanned from here
`

func TestRulesDecideOnCommands(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	starts := func(a *command.Admission, e sandbox.Exec) bool { return a.Exec(t.Context(), f.box(), e) }
	// Rules about all kinds, and switches, do not apply to programs until a rule names
	// them.
	f.setPolicy("rules:\n  - {id: all, then: deny}\n")
	off := f.switched(oversight.ScopeProject, "")
	if a := f.start(command.Config{}); !starts(a, run(2, "ls")) {
		t.Error("a rule about all kinds stops every program")
	}
	bound := f.start(command.Config{Dir: t.TempDir()})
	if err := bound.Bind(boxID, (&side{}).binding(parse(t, job))); err != nil {
		t.Fatal(err)
	}
	if starts(bound, run(2, "python3")) {
		t.Error("a run goes on although its project is stopped")
	}
	off()
	off = f.switched(oversight.ScopeCapability, string(policy.KindExec))
	if a := f.start(command.Config{}); starts(a, run(2, "ls")) {
		t.Error("a switch for process.exec stops nothing")
	}
	off()
	f.setPolicy(rules)
	a := f.start(command.Config{Hold: time.Millisecond})
	long := run(3, "ls")
	long.Cut = true
	notUTF8 := run(4, "/tmp/\xffnmap")
	for _, tt := range []struct {
		name string
		e    sandbox.Exec
		want bool
	}{
		{"no rule", run(2, "ls", "-l"), true},
		{"denied by its program", run(2, "/opt/nmap"), false},
		{"denied by an argument", run(2, "bash", "-c", "nmap 10.0.0.0/8"), false},
		{"denied by a late argument", run(2, append([]string{"echo"}, append(strings.Split(strings.Repeat("x ", 5000), " "), "nmap")...)...), false},
		{"asks", run(2, "git", "push"), false},
		{"too long to be judged", long, false},
		{"a name that is not UTF-8", notUTF8, false},
	} {
		if got := starts(a, tt.e); got != tt.want {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
	if n := len(f.waiting()); n != 1 {
		t.Errorf("got %d actions that wait, want 1", n)
	}
}

// TestRulesDoNotBelieveTheNameOfAProgram: without a path from the kernel, which programs below a
// root of their own and those by a descriptor lack, a rule that allows the programs of a
// directory does not take what the caller wrote for one of them.
func TestRulesDoNotBelieveTheNameOfAProgram(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.setPolicy(`rules:
  - {id: system, kind: process.exec, when: "detail['program'].startsWith('/usr/bin/')", then: allow}
  - {id: others, kind: process.exec, then: deny}
`)
	a := f.start(command.Config{})
	claimed, byDescriptor := run(3, "ls"), run(4, "ls")
	claimed.Path, claimed.Fixed = "", false
	byDescriptor.Path, byDescriptor.Name = "", "/usr/bin/../../dev/fd/5"
	for _, tt := range []struct {
		name string
		e    sandbox.Exec
		want bool
	}{
		{"a path from the kernel", run(2, "ls"), true},
		{"a name by the caller", claimed, false},
		{"a descriptor", byDescriptor, false},
	} {
		if got := a.Exec(t.Context(), f.box(), tt.e); got != tt.want {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
	// A contract allows nothing without a path either, except where it allows everything.
	bound := f.start(command.Config{Dir: t.TempDir()})
	if err := bound.Bind(boxID, (&side{}).binding(parse(t, job))); err != nil {
		t.Fatal(err)
	}
	claimed = run(5, "python3")
	claimed.Path = ""
	if bound.Exec(t.Context(), f.box(), claimed) {
		t.Error("a contract allows a program by the name that the caller wrote")
	}
}

func TestApprovedCommandIsStartedOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.setPolicy(rules)
		servers := []*command.Admission{f.start(command.Config{Hold: time.Millisecond}), f.start(command.Config{Hold: time.Millisecond, Dir: t.TempDir()})}
		ctx := t.Context()
		push := func(pid int32, args ...string) sandbox.Exec {
			return run(pid, append([]string{"git", "push"}, args...)...)
		}
		if servers[0].Exec(ctx, f.box(), push(2)) {
			t.Fatal("it was not asked about")
		}
		servers[1].Exec(ctx, f.box(), push(3))
		a := f.one()
		f.answer(a, true)
		other := f.box()
		other.ID = "ibbbbbbbbbbbbbbbbbbbb"
		changed := push(4)
		changed.SHA256[0]++
		if servers[0].Exec(ctx, f.box(), push(4, "--force")) || servers[0].Exec(ctx, other, push(4)) || servers[0].Exec(ctx, f.box(), changed) {
			t.Error("the approval holds for another start")
		}
		var started atomic.Int32
		var wg sync.WaitGroup
		for i := range int32(12) {
			wg.Go(func() {
				if servers[i%2].Exec(ctx, f.box(), push(10+i)) {
					started.Add(1)
				}
			})
		}
		wg.Wait()
		if started.Load() != 1 {
			t.Errorf("started %d times, want once", started.Load())
		}
	})
}

func TestHeldCommandGoesOnWhenApproved(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.setPolicy(rules)
	a := f.start(command.Config{})
	ctx := t.Context()
	asks := func(ctx context.Context, pid int32, args ...string) chan bool {
		done := make(chan bool, 1)
		go func() { done <- a.Exec(ctx, f.box(), run(pid, append([]string{"git", "push"}, args...)...)) }()
		return done
	}
	first := asks(ctx, 2)
	waits := f.one()
	if !a.Exec(ctx, f.box(), run(3, "ls")) {
		t.Error("a held start stops others")
	}
	// Two identical starts ask one question. Each needs its own approval.
	second := asks(ctx, 4)
	f.answer(waits, true)
	var got bool
	var left chan bool
	select {
	case got = <-first:
		left = second
	case got = <-second:
		left = first
	}
	if !got {
		t.Error("an approved start is refused")
	}
	f.answer(f.one(), false)
	if <-left {
		t.Error("a rejected start is made")
	}
	if <-asks(ctx, 5) || len(f.waiting()) != 0 {
		t.Error("what was rejected is asked about again")
	}
	linked := run(5, "git", "push") // as a program that walks through PATH does
	if linked.Name = "/bin/git"; a.Exec(ctx, f.box(), linked) || len(f.waiting()) != 0 {
		t.Error("what was rejected is asked about again under another name of the same file")
	}
	// The process gives up, as at a pause or a signal, and the kernel asks again.
	gone, cancel := context.WithCancel(ctx)
	third := asks(gone, 6, "origin")
	waits = f.one()
	cancel()
	if <-third {
		t.Error("a process that gave up has started its program")
	}
	again := asks(ctx, 6, "origin")
	f.answer(waits, true)
	if !<-again {
		t.Error("the approval does not hold for the same process after it asked again")
	}
	// The guest itself is not held: everybody else would wait with it.
	direct := run(8, "git", "push", "direct")
	direct.Guest = true
	if a.Exec(ctx, f.box(), direct) {
		t.Error("what the guest starts was not asked about")
	}
	f.answer(f.one(), true)
	if !a.Exec(ctx, f.box(), direct) {
		t.Error("what the guest starts is refused although it was approved")
	}
	// A switch refuses held starts, and those that were approved before it.
	fourth := asks(ctx, 7, "main")
	f.one()
	off := f.switched(oversight.ScopeCapability, string(policy.KindExec))
	defer off()
	f.refresh(a)
	if <-fourth {
		t.Error("a held start was made although a switch stops it")
	}
	r, err := a.Record(ctx, boxID)
	if err != nil {
		t.Fatal(err)
	}
	verdicts := ""
	for _, c := range r.Commands {
		verdicts += fmt.Sprintf("%d %s\n", c.PID, c.Verdict)
	}
	for _, want := range []string{"3 allowed", "5 refused", "6 allowed", "7 refused"} {
		if !strings.Contains(verdicts, want) {
			t.Errorf("want %q in the record, got\n%s", want, verdicts)
		}
	}
}

// TestCommandFlood: an attacker's loop of starts asks a person only a few times.
func TestCommandFlood(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.setPolicy("rules:\n  - {id: all, kind: process.exec, then: ask}\n")
	a := f.start(command.Config{Hold: time.Millisecond})
	for i := range 30 {
		if a.Exec(t.Context(), f.box(), run(2, "ls", fmt.Sprint(i))) {
			t.Fatal("it was not asked about")
		}
	}
	if n := len(f.waiting()); n != 20 {
		t.Errorf("got %d actions that wait, want 20", n)
	}
	long := f.start(command.Config{Dir: t.TempDir()})
	ctx, cancel := context.WithCancel(t.Context())
	var refused atomic.Int32
	var wg sync.WaitGroup
	for i := range int32(40) {
		wg.Go(func() {
			if long.Exec(ctx, f.box(), run(i, "ls", "0")) {
				t.Error("it was not asked about")
			}
			refused.Add(1)
		})
	}
	until(t, "all but those that are held are refused", func() bool { return refused.Load() == 40-16 })
	cancel()
	wg.Wait()
}

// TestShowHidesNothing: a person sees each argument. No argument can look like another
// one or change how the page reads.
func TestShowHidesNothing(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.setPolicy("rules:\n  - {id: all, kind: process.exec, then: ask}\n")
	a := f.start(command.Config{Hold: time.Millisecond})
	e := run(2, "python3", "-c", "print(1)\nargument 3: harmless\n\x1b[2J", "\u202egnp.exe", "a\xffb", "AKIAQWERTYUIOPASDFGH")
	e.Fixed, e.Path = false, "/work/x\u200b"
	a.Exec(t.Context(), f.box(), e)
	act := f.one()
	v, err := a.Show(act)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"argument 2, 3 lines:\n  | print(1)\n  | argument 3: harmless\n", `\u{1b}`, `\u202e`, `\xff`} {
		if !strings.Contains(v.Text, want) {
			t.Errorf("want %q in\n%s", want, v.Text)
		}
	}
	if all := fmt.Sprint(v.Title, v.Fields, v.Text, v.Notes); strings.ContainsAny(all, "\x1b\u202e\u200b") || !strings.Contains(fmt.Sprint(v.Notes), "made or changed in the sandbox") {
		t.Errorf("got %q", all)
	}
	if strings.Contains(v.Text, "AKIAQWERTYUIOPASDFGH") != (v.Partial == "") {
		t.Errorf("partial %q with\n%s", v.Partial, v.Text)
	}
	// What cannot be shown is not asked about.
	e.Cut = true
	if a.Exec(t.Context(), f.box(), e); len(f.waiting()) != 1 {
		t.Error("a person is asked about an incomplete command")
	}
}

// TestApprovalFromBeforeARestoreStartsNothing: the original may have started it since the
// copy was taken.
func TestApprovalFromBeforeARestoreStartsNothing(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.setPolicy(rules)
		a := f.start(command.Config{Hold: time.Millisecond})
		push := run(2, "git", "push")
		a.Exec(t.Context(), f.box(), push)
		first := f.answer(f.one(), true)
		f.void = time.Now()
		restored := f.start(command.Config{Hold: time.Millisecond, Dir: t.TempDir()})
		if restored.Exec(t.Context(), f.box(), push) {
			t.Error("it was started without a new question")
		}
		if again := f.one(); again.ID == first.ID {
			t.Errorf("asked again by %s, want a new action", again.ID)
		}
		f.answer(f.one(), true)
		if !restored.Exec(t.Context(), f.box(), push) {
			t.Error("what was approved since does not start")
		}
	})
}
