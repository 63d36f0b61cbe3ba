package command

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"slices"
	"sort"
	"strings"
	"time"

	"postern/internal/connection"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// An Operation is what a client has a sandbox do.
type Operation string

// The operations.
const (
	OpRun      Operation = "run"      // start a command
	OpTerminal Operation = "terminal" // start a command in a terminal
	OpCode     Operation = "code"     // run a cell in the code interpreter
	OpInput    Operation = "input"    // send input to a process; see [Admission.Input]
	OpSignal   Operation = "signal"   // send a signal to a process
	OpRead     Operation = "read"     // read a file
	OpWrite    Operation = "write"    // write a file
	OpCompose  Operation = "compose"  // join files into one
	OpMakeDir  Operation = "mkdir"    // make a directory
	OpMove     Operation = "move"     // rename a file or a directory
	OpRemove   Operation = "remove"   // remove a file or a directory
)

// Via says through which door of the server an order came.
type Via string

// The doors.
const (
	ViaSDK     Via = "sdk"     // the data plane: SDKs, command lines, ssh
	ViaMCP     Via = "mcp"     // an agent's tool
	ViaConsole Via = "console" // a person, in the console
)

// An Order is what a client had a sandbox do, as the server saw it before the sandbox
// did. The kernel's events are what came of it: a builtin of a shell, and a cell that
// starts no program, have none.
type Order struct {
	Time time.Time
	Via  Via
	Op   Operation

	Args   []string // of OpRun and OpTerminal: bounded, secrets masked
	Exact  bool     // Args is exactly what was ordered
	Digest string   // SHA-256 of the arguments, each followed by a zero byte, in hexadecimal; empty if Exact
	Dir    string   // as the client wrote it; empty means the user's home
	User   string   // as the client wrote it; empty means the default user
	Tag    string   // the client's name of the process
	PID    int32    // of the process; 0 if it is not known, or did not start

	Path     string // of files; more than one are separated by line ends
	To       string // of OpMove
	Language string // of OpCode, as the client wrote it
	// Size is that of the code, the input or the file, in bytes; -1 if it is not known.
	Size   int64
	SHA256 string // of the code, or of the input if the policy says so, in hexadecimal; otherwise empty

	Stdout, Stderr int64 // bytes that the client got; of OpCode all is in Stdout
	Done           bool  // the sizes are final: the answer came to its end

	args []string // as the client wrote them
	n    uint64   // its number in the record
}

// Started reports whether o started a process, which has an entry of its own among the
// commands.
func (o *Order) Started() bool {
	return (o.Op == OpRun || o.Op == OpTerminal) && o.PID != 0
}

// Command sets what to run, with its arguments.
func (o *Order) Command(args []string) { o.args = args }

// A Ticket is an order that is in the record.
type Ticket struct {
	a  *Admission
	l  *ledger
	id string
	n  uint64
	// Plain means that the command must start as it would without prepared shells, so that
	// the kernel sees its text when it asks: rules about process.exec, or a contract, are
	// in force.
	Plain bool
}

// ErrUnrecorded means that the record of a sandbox under a contract cannot be written, so
// that nothing is done in it.
var ErrUnrecorded = errors.New("the record of commands cannot be written: nothing is done")

// Ordered records an order, before the sandbox gets it. Its error wraps [ErrUnrecorded].
func (a *Admission) Ordered(ctx context.Context, sandboxID string, o *Order) (*Ticket, error) {
	l, err := a.ledger(sandboxID)
	if err != nil {
		a.log.ErrorContext(ctx, "open record of commands", "sandbox", sandboxID, "err", err)
		return nil, ErrUnrecorded // it is unknown whether the sandbox has a contract
	}
	if o.Time.IsZero() {
		o.Time = time.Now()
	}
	e := line{
		What: lineOrder, Time: o.Time.UnixMicro(), Via: o.Via, Op: o.Op, Dir: kept(o.Dir, maxText), User: kept(o.User, maxName), Tag: kept(o.Tag, maxName), PID: o.PID,
		Path: kept(o.Path, maxText), To: kept(o.To, maxText), Lang: kept(o.Language, maxName), Size: o.Size, SHA256: o.SHA256,
	}
	e.Args, e.Digest = keptArgs(o.args)
	l.mu.Lock()
	e.N = l.state.Orders + 1
	err = l.appendLocked(&e)
	l.mu.Unlock()
	if err != nil {
		a.log.ErrorContext(ctx, "record order", "sandbox", sandboxID, "err", err)
		if a.hasContract(sandboxID, l) {
			return nil, ErrUnrecorded
		}
	}
	return &Ticket{a: a, l: l, id: sandboxID, n: e.N, Plain: o.Op == OpRun && a.judges(ctx, sandboxID, l)}, nil
}

// hasContract reports whether a contract binds the sandbox of a record, or did.
func (a *Admission) hasContract(id string, l *ledger) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.bindings[id] != nil || l.wasBound()
}

// judges reports whether somebody judges commands of a sandbox by their text.
func (a *Admission) judges(ctx context.Context, id string, l *ledger) bool {
	if a.hasContract(id, l) {
		return true
	}
	f, err := a.inForce(ctx, id, l)
	// The attack: a rule denies what the text of "bash -c" has, or a switch is on, and a
	// prepared shell, which the kernel saw start before, runs it with its builtins.
	return err != nil || f.Policy == nil || ruled(f.Policy) || stopped(f.Switches)
}

// inForce returns the policy and the switches of a sandbox's project.
func (a *Admission) inForce(ctx context.Context, id string, l *ledger) (connection.InForce, error) {
	l.mu.Lock()
	project := l.project
	l.mu.Unlock()
	if project == "" {
		err := a.db.View(ctx, func(tx *store.Tx) error {
			return tx.One(ctx, `select project_id from sandbox where id = $1`, []any{id}, &project)
		})
		if err != nil {
			return connection.InForce{}, fmt.Errorf("find project of sandbox %s: %w", id, err)
		}
		l.mu.Lock()
		l.project = project
		l.mu.Unlock()
	}
	return a.rules.InForce(ctx, project)
}

// Began records the process that an order has started.
func (t *Ticket) Began(pid int32) {
	t.write(&line{What: lineBegan, N: t.n, PID: pid})
}

// Ended records how much the order's client has got, and what became of the file or the
// input. Done means that all came to its end.
func (t *Ticket) Ended(stdout, stderr, size int64, path string, done bool) {
	e := line{What: lineEnded, N: t.n, Out: stdout, ErrOut: stderr, Size: size, Path: kept(path, maxText)}
	if !done {
		e.Cut = true
	}
	t.write(&e)
}

func (t *Ticket) write(e *line) {
	e.Time = time.Now().UnixMicro()
	if err := t.l.append(e); err != nil {
		t.a.log.Error("record order", "sandbox", t.id, "err", err)
	}
}

const maxName = 200 // bytes of a name that a client chose

// An inputMeter counts what clients sent to a process.
type inputMeter struct {
	size int64
	next int64     // size at which a line is written
	sum  hash.Hash // nil: the policy does not ask for the digest
}

// maxMeters bounds the processes of a sandbox whose input is counted one by one. The
// attack: a client names a process for each byte.
const maxMeters = 64

// Input records that a client sends input to a process, which is "pid N" or "tag NAME". The
// record has the first of it, then each doubling, and the total at the process's end, so
// that a terminal in which somebody types does not fill it. It has a digest of all of it if
// the policy says "record: [input]", or a contract binds the sandbox; single keys have none,
// since what was typed could be guessed from it.
func (a *Admission) Input(ctx context.Context, sandboxID, process string, b []byte) error {
	l, err := a.ledger(sandboxID)
	if err != nil {
		return ErrUnrecorded
	}
	bound := a.hasContract(sandboxID, l)
	digests := bound
	if !digests {
		f, err := a.inForce(ctx, sandboxID, l)
		digests = err == nil && f.Policy != nil && f.Policy.Records(policy.RecordInput)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.meters[process]
	if m == nil {
		if len(l.meters) >= maxMeters {
			process = "others"
			m = l.meters[process]
		}
		if m == nil {
			m = &inputMeter{}
			if digests {
				m.sum = sha256.New()
			}
			if l.meters == nil {
				l.meters = map[string]*inputMeter{}
			}
			l.meters[process] = m
		}
	}
	m.size += int64(len(b))
	if m.sum != nil {
		m.sum.Write(b)
	}
	if m.size < m.next {
		return nil
	}
	m.next = max(2*m.size, 64)
	if err := l.inputLocked(process, m, true); err != nil && bound {
		return ErrUnrecorded
	}
	return nil
}

// inputLocked writes a line about the input of a process so far.
func (l *ledger) inputLocked(process string, m *inputMeter, more bool) error {
	e := line{What: lineInput, Time: time.Now().UnixMicro(), Tag: kept(process, maxName), Size: m.size, Cut: more}
	if m.sum != nil && !more {
		e.SHA256 = hex.EncodeToString(m.sum.Sum(nil))
	}
	return l.appendLocked(&e)
}

// endInputLocked writes the total input of a process that has ended; "" means all
// processes.
func (l *ledger) endInputLocked(process string) (err error) {
	for name, m := range l.meters {
		if process != "" && name != process {
			continue
		}
		delete(l.meters, name)
		err = errors.Join(err, l.inputLocked(name, m, false))
	}
	return err
}

// The lines of orders in a [Record].

// maxOrders bounds the orders that are read from a record whose files are bounded anyway.
const maxOrders = 10_000

// order adds a line about an order to the record.
func (b *builder) order(l *line, at time.Time) {
	r := b.record
	switch l.What {
	case lineOrder:
		if len(r.Orders) >= maxOrders {
			r.Orders = slices.Delete(r.Orders, 0, maxOrders/2)
			clear(b.orders)
			for i := range r.Orders {
				b.orders[r.Orders[i].n] = i
			}
		}
		b.orders[l.N] = len(r.Orders)
		r.Orders = append(r.Orders, Order{
			Time: at, Via: l.Via, Op: l.Op, Args: l.Args, Exact: l.Digest == "", Digest: l.Digest, Dir: l.Dir, User: l.User, Tag: l.Tag, PID: l.PID,
			Path: l.Path, To: l.To, Language: l.Lang, Size: l.Size, SHA256: l.SHA256, n: l.N,
		})
	case lineBegan:
		if i, ok := b.orders[l.N]; ok {
			r.Orders[i].PID = l.PID
			b.began(&r.Orders[i])
		}
	case lineEnded:
		i, ok := b.orders[l.N]
		if !ok {
			return
		}
		o := &r.Orders[i]
		o.Stdout, o.Stderr, o.Done = l.Out, l.ErrOut, !l.Cut
		if l.Size != 0 {
			o.Size = l.Size
		}
		if l.Path != "" {
			o.Path = l.Path
		}
	case lineInput:
		key := l.Tag
		o := Order{Time: at, Op: OpInput, Tag: l.Tag, Size: l.Size, SHA256: l.SHA256, Done: !l.Cut, Exact: true}
		if i, ok := b.inputs[key]; ok && !b.typed[i].Done {
			o.Time = b.typed[i].Time // when it began
			b.typed[i] = o
			return
		}
		b.inputs[key] = len(b.typed)
		b.typed = append(b.typed, o)
	}
}

// began joins an order with the start of its process. The kernel has seen a prepared shell
// start before its command was known (package guest, holdshell.go): with blanks in the
// command's place, or, if it is from the template's snapshot, not at all.
func (b *builder) began(o *Order) {
	r := b.record
	for _, i := range slices.Backward(b.starts[o.PID]) {
		c := &r.Commands[i]
		// One that is not hidden had a stub that began before the sandbox had an owner. One
		// after the order has blanks for its text.
		if !c.blank() || c.Prepared || !c.hidden && !c.Time.Before(o.Time) {
			continue
		}
		c.Time, c.Args, c.Exact, c.Digest, c.Prepared, c.hidden = o.Time, o.Args, o.Exact, o.Digest, true, false
		b.clipped = true
		return
	}
	// It may have executed another program before the answer with its ID came by.
	since := b.starts[o.PID]
	since = since[sort.Search(len(since), func(i int) bool { return !r.Commands[since[i]].Time.Before(o.Time) }):]
	if slices.ContainsFunc(since, func(i int) bool { return slices.Equal(r.Commands[i].Args, o.Args) }) {
		return // the kernel has seen it start with its text
	}
	c := Command{Time: o.Time, PID: o.PID, Path: shellPath, Name: shellPath, Args: o.Args, Exact: o.Exact, Digest: o.Digest, Fixed: true, Verdict: Allowed, Entry: -1, Prepared: true}
	e, ended := b.exits[o.PID]
	switch {
	case len(since) > 0:
		c.Became, c.Ended = true, r.Commands[since[0]].Time
	case ended && !e.at.Before(o.Time):
		c.Exited, c.Ended, c.Code, c.Signal = true, e.at, e.code, e.signal
	default:
		b.running[o.PID] = len(r.Commands)
	}
	b.starts[o.PID] = append(b.starts[o.PID], len(r.Commands))
	r.Commands = append(r.Commands, c)
	b.clipped = true
}

const (
	shellPath = "/bin/bash"
	// heldText is the length of the blanks in place of the command of a prepared shell.
	heldText = 1023
)

// blank reports whether c is the start of a prepared shell.
func (c *Command) blank() bool {
	return len(c.Args) == 4 && c.Args[0] == shellPath && c.Args[1] == "-l" && c.Args[2] == "-c" && len(c.Args[3]) == heldText && strings.Trim(c.Args[3], " ") == ""
}

// finish ends the record: it leaves out the shells that wait for a command, and the stubs
// from which they were made, and adds the input of processes to the orders.
func (b *builder) finish() {
	r := b.record
	// A shell whose stub began before the sandbox had an owner is a child of the guest, as
	// other stubs are. The same blanks of another process stay: its startup files did run.
	guests := map[int32]bool{}
	for i := range r.Commands {
		if c := &r.Commands[i]; c.hidden && c.Path == sandbox.LauncherPath {
			guests[c.Parent] = true
		}
	}
	for i := range r.Commands {
		c := &r.Commands[i]
		if s := b.starts[c.PID]; c.blank() && !c.Prepared && c.Fixed && guests[c.Parent] && len(s) > 0 && s[0] == i {
			c.hidden = true // a refused or held one, which is none of the starts, is shown
		}
	}
	r.Commands = slices.DeleteFunc(r.Commands, func(c Command) bool { return c.hidden })
	r.Orders = append(r.Orders, b.typed...)
	slices.SortStableFunc(r.Orders, func(x, y Order) int { return x.Time.Compare(y.Time) })
	if b.clipped {
		slices.SortStableFunc(r.Commands, func(x, y Command) int { return x.Time.Compare(y.Time) })
	}
}
