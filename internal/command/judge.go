package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/sandbox"
)

// guestProgram is the program that serves inside a sandbox.
const guestProgram = "/usr/local/sbin/postern-guest"

// A verdict is the decision on one start.
type verdict struct {
	allow    bool
	why      string // why it is refused, or what allowed it; may be empty
	action   string // that asked a person, or empty
	entry    int    // index in the contract's Commands.Allow, -1 if none; if allow is set, one of its starts is reserved
	time     time.Duration
	violates bool // the contract does not allow it
}

func no(format string, args ...any) verdict {
	return verdict{why: fmt.Sprintf(format, args...), entry: -1}
}

// Exec implements [sandbox.Commands].
func (a *Admission) Exec(ctx context.Context, who auth.Principal, e sandbox.Exec) bool {
	l, err := a.ledger(who.ID)
	if err != nil {
		a.log.ErrorContext(ctx, "open record of commands", "sandbox", who.ID, "err", err)
		// It is unknown whether the sandbox has a contract: fail closed.
		return false
	}
	b, err := a.bound(ctx, who, l)
	if b != nil && e.Path == sandbox.StarterPath {
		return true // only the stub; the program that it executes is judged next
	}
	var v verdict
	switch {
	case guest(&e), err != nil && e.Path == guestProgram && e.UID == 0 && !l.wasBound():
		// The guest boots before its sandbox is bound to the contract. Until then only
		// the template's programs have run. Without this exception, such a sandbox could
		// start from a memory snapshot only.
		v = verdict{allow: true, entry: -1, why: "the guest"}
	case err != nil:
		v = no("%v", err)
	default:
		v = a.judge(ctx, who, &e, l, b)
	}
	line := startLine(&e)
	line.What, line.Why, line.Action = lineRefuse, kept(v.why, maxWhy), v.action
	if v.allow {
		line.What = lineStart
	}
	if v.entry >= 0 {
		line.Entry = &v.entry
	}
	if v.allow && v.time > 0 && b != nil {
		// Set the limit before the answer, so that the exit of a program that ends at
		// once removes it.
		a.limit(ctx, who, l, b, e.PID, v.time)
	}
	if err := l.append(&line); err != nil {
		a.log.ErrorContext(ctx, "record command", "sandbox", who.ID, "err", err)
		if b != nil {
			// The attack: code fills the disk first, so that what it starts is not
			// recorded.
			b.tell(e.PID, Unrecorded, "the record of commands cannot be written: nothing is started")
			return false
		}
	}
	if b != nil && v.violates {
		b.tell(e.PID, Refused, brief(&e)+": "+v.why)
	}
	return v.allow
}

// guest reports whether the guest executes its own program, which serves the sandbox
// and is not a command of the contract. Nothing else in a sandbox can pass for it: the
// file is mounted there, and the process was the guest until now. In a bound sandbox
// the processes of the run see neither, and are never root.
func guest(e *sandbox.Exec) bool {
	return e.Guest && e.Path == guestProgram && e.UID == 0
}

func (b *binding) tell(pid int32, what ViolationKind, text string) {
	if b.Violated != nil {
		b.Violated(Violation{Time: time.Now(), PID: pid, What: what, Text: text})
	}
}

// bound returns the binding of a sandbox, or nil if it has no contract. An error means
// that it has a contract and is not bound, for example after a restart of the server,
// or that this is unknown.
func (a *Admission) bound(ctx context.Context, who auth.Principal, l *ledger) (*binding, error) {
	a.mu.Lock()
	b := a.bindings[who.ID]
	a.mu.Unlock()
	if b != nil {
		return b, nil
	}
	l.mu.Lock()
	expected, known := cmp.Or(l.state.Contract, l.expected), l.known
	l.mu.Unlock()
	if expected == "" && !known {
		var err error
		if expected, err = a.conf.Contract(ctx, who.ID); err != nil {
			a.log.ErrorContext(ctx, "read contract of sandbox", "sandbox", who.ID, "err", err)
			return nil, errors.New("it is unknown at the moment whether the sandbox has a contract: nothing is started")
		}
		l.mu.Lock()
		l.expected, l.known = expected, true
		l.mu.Unlock()
	}
	if expected != "" {
		return nil, fmt.Errorf("the sandbox has the contract %s, which is not in force any more: nothing is started", expected)
	}
	return nil, nil
}

// judge decides on a start.
func (a *Admission) judge(ctx context.Context, who auth.Principal, e *sandbox.Exec, l *ledger, b *binding) verdict {
	v := verdict{allow: true, entry: -1}
	s := start(who, e, b)
	ask := false
	if b != nil {
		m := b.Contract.Start(contract.Started{Path: e.Path, Name: e.Name, Dir: e.Dir, Args: e.Args, Fixed: e.Fixed, Cut: e.Cut})
		if !m.Allowed {
			v = no("the contract does not allow it: %s", m.Why)
			v.violates = true
			return v
		}
		if m.Index < 0 || m.Index >= len(b.Contract.Commands.Allow) { // unreachable: every match has an entry
			return no("the contract does not allow it")
		}
		c := b.Contract.Commands.Allow[m.Index]
		if !l.reserve(m.Index, c.Max) {
			v = no("the contract allows %d starts of %q, and all of them were used", c.Max, c.Run)
			v.violates = true
			return v
		}
		v.entry, v.time, ask = m.Index, time.Duration(c.Time), m.Ask
	}
	w := a.byRules(ctx, who, s)
	if w.Effect == policy.Ask || w.Effect == policy.Allow && ask {
		w, v.action = a.hold(ctx, who, e, s, l, ask)
	}
	if w.Effect != policy.Allow {
		if v.entry >= 0 {
			l.release(v.entry)
		}
		return verdict{why: cmp.Or(w.Reason, "rule "+w.Rule+" denies it"), action: v.action, entry: -1}
	}
	v.why = w.Reason
	return v
}

// byRules returns the verdict of switches and policy about a start, without waiting.
//
// Both always apply to a sandbox that is bound by a contract. To other sandboxes they
// apply only if a rule names the kind process.exec, or a switch stops it. Otherwise a
// rule about all kinds, written for mail, would ask a person about each program, and a
// switch that stops what leaves a project would stop every shell in it, although a
// shell sends nothing.
func (a *Admission) byRules(ctx context.Context, who auth.Principal, s *Start) policy.Verdict {
	f, err := a.rules.InForce(ctx, who.Project)
	if err != nil {
		return refused(unreadable)
	}
	if f.Policy == nil {
		return refused("the project's policy cannot be read: nothing is started until an owner has replaced it")
	}
	ruled := ruled(f.Policy)
	if !ruled && s.Contract == "" && !stopped(f.Switches) {
		return policy.Verdict{Effect: policy.Allow}
	}
	r := s.request(who)
	if v := f.Stopped(r); v.Effect != policy.Allow {
		return v
	}
	if !ruled {
		return policy.Verdict{Effect: policy.Allow}
	}
	if s.cut {
		// The attack: so many arguments that the one which a rule denies is cut off.
		return refused("its command line or its environment is longer than the rules about commands can judge")
	}
	v, matched := f.Policy.Match(r)
	if !matched {
		return policy.Verdict{Effect: policy.Allow}
	}
	return v
}

// ruled reports whether a rule names the kind process.exec.
func ruled(d *policy.Document) bool {
	return slices.ContainsFunc(d.Clauses(), func(c policy.Clause) bool { return slices.Contains(c.Kinds, policy.KindExec) })
}

// stopped reports whether a switch stops process.exec itself.
func stopped(on []oversight.Switch) bool {
	return slices.ContainsFunc(on, func(w oversight.Switch) bool {
		return w.Scope == oversight.ScopeCapability && w.Target == string(policy.KindExec)
	})
}

func refused(reason string) policy.Verdict {
	return policy.Verdict{Effect: policy.Deny, Reason: reason}
}

// limit ends the process of a start when its time is over. A process keeps the limit of
// its first start when it executes another program. The attack: a program executes
// itself again just before its time is over.
//
// ctx is that of the kernel's question. Once it is done, the process may have exited,
// and nothing would remove the limit before another process gets its number.
func (a *Admission) limit(ctx context.Context, who auth.Principal, l *ledger, b *binding, pid int32, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timers[pid] != nil || ctx.Err() != nil {
		return
	}
	l.timers[pid] = time.AfterFunc(d, func() { a.overtime(who, l, b, pid, d) }) //nolint:contextcheck // the question's ends with its answer
}

// overtime ends a process whose time is over, and the sandbox if that does not help.
func (a *Admission) overtime(who auth.Principal, l *ledger, b *binding, pid int32, d time.Duration) {
	b.tell(pid, Overtime, fmt.Sprintf("process %d ran for longer than %v", pid, d))
	ctx, cancel := context.WithTimeout(context.Background(), a.killTime)
	defer cancel()
	if err := b.Kill(ctx, pid); err != nil {
		a.log.WarnContext(ctx, "end process of sandbox", "sandbox", who.ID, "pid", pid, "err", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timers[pid] == nil {
		return // it has exited
	}
	l.timers[pid] = time.AfterFunc(a.killTime, func() {
		l.mu.Lock()
		alive := l.timers[pid] != nil
		l.mu.Unlock()
		if alive {
			b.Stop(fmt.Sprintf("process %d could not be ended when its time was over", pid))
		}
	})
}

func (l *ledger) stopTimers() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for pid, t := range l.timers {
		t.Stop()
		delete(l.timers, pid)
	}
}

// Exited implements [sandbox.Commands].
func (a *Admission) Exited(who auth.Principal, e sandbox.Exit) {
	l := line{What: lineExit, Time: micro(e.Time), PID: e.PID, Code: e.Code, Signal: e.Signal}
	a.note(who, &l, func(l *ledger) {
		if t := l.timers[e.PID]; t != nil {
			t.Stop()
			delete(l.timers, e.PID)
		}
		if err := l.endInputLocked("pid " + strconv.Itoa(int(e.PID))); err != nil {
			a.log.Error("record input", "sandbox", who.ID, "err", err)
		}
	})
}

// Opened implements [sandbox.Commands].
func (a *Admission) Opened(who auth.Principal, o sandbox.Open) {
	l := line{What: lineOpen, Time: micro(o.Time), PID: o.PID, Path: kept(o.Path, maxText), Err: o.Err}
	if o.Op != "" {
		l.What, l.Op, l.To = lineFile, Operation(kept(o.Op, maxName)), kept(o.To, maxText)
	}
	a.note(who, &l, nil)
}

// Missed implements [sandbox.Commands].
func (a *Admission) Missed(who auth.Principal, n uint64) {
	a.note(who, &line{What: lineMissed, Time: time.Now().UnixMicro(), N: n}, nil)
	a.mu.Lock()
	b := a.bindings[who.ID]
	a.mu.Unlock()
	if b != nil {
		b.tell(0, Unrecorded, fmt.Sprintf("%d events of the sandbox were lost", n))
	}
}

// note records an event. If then is not nil, it is called first, with the ledger
// locked.
func (a *Admission) note(who auth.Principal, e *line, then func(*ledger)) {
	l, err := a.ledger(who.ID)
	if err == nil {
		l.mu.Lock()
		if then != nil {
			then(l)
		}
		err = l.appendLocked(e)
		l.mu.Unlock()
	}
	if err != nil {
		a.log.Error("record event of sandbox", "sandbox", who.ID, "err", err)
	}
}

func micro(t time.Time) int64 {
	if t.IsZero() {
		t = time.Now()
	}
	return t.UnixMicro()
}

// ledger returns the record of a sandbox, and opens it at its first event.
func (a *Admission) ledger(id string) (*ledger, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if l := a.ledgers[id]; l != nil {
		return l, nil
	}
	l, err := openLedger(a.conf.Dir, id)
	if err != nil {
		return nil, err
	}
	a.ledgers[id] = l
	return l, nil
}
