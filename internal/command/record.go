package command

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"postern/internal/sandbox"
	"postern/internal/store"
)

// A Verdict is the decision on a start.
type Verdict string

// The verdicts.
const (
	Allowed  Verdict = "allowed"
	Denied   Verdict = "refused"
	Awaiting Verdict = "held" // a person was asked and has not decided, or the process gave up
)

// A Record lists the programs that were started in a sandbox, as its kernel and this
// server saw them. Texts come from the sandbox: they are valid UTF-8, and otherwise
// hostile. For a sandbox with a contract, the counts and lists begin when it was bound;
// Lines and SHA256 cover everything.
type Record struct {
	Sandbox  string
	Contract string // that binds it, "name@sha256:…", or empty

	Started, Refused, Held, Exited, Opened uint64
	// Missed is how many events were lost.
	Missed   uint64
	Programs map[string]uint64 // number of starts by the name of the program's file; the rest is under "(other)"

	// Lines is the number of recorded events. SHA256 is the digest of all their lines,
	// in hexadecimal, including those that are no longer kept.
	Lines  uint64
	SHA256 string
	// Complete means that every event of the sandbox is in the counts and the digest.
	Complete bool
	// Dropped is the number of lines in the middle that are no longer kept.
	Dropped uint64

	Commands []Command // the first and the newest, in the order of their starts
	Opens    []Opened
	Files    []Opened // other uses of files: in sandboxes under a contract
	Orders   []Order  // what clients had the sandbox do, in order; kept like Commands
	Ordered  uint64   // number of orders, including those that are no longer kept
	Ended    bool     // the sandbox has ended, and this was recorded
}

// A Command is a start of a program.
type Command struct {
	Time    time.Time
	PID     int32
	Parent  int32
	Path    string // of the file, with symbolic links resolved; empty if it has no name
	Name    string // as the caller wrote it
	Dir     string
	Args    []string // bounded, secrets masked
	Exact   bool     // Args is exactly what the program got
	Digest  string   // SHA-256 of the arguments, each followed by a zero byte, in hexadecimal; empty if Exact
	SHA256  string   // of the file, in hexadecimal; empty if not known
	Fixed   bool     // the file is the template's
	UID     uint32
	Verdict Verdict
	Why     string // why it was refused, or who approved it; may be empty
	Action  string // that asked a person, or empty
	Entry   int    // index in the contract's Commands.Allow; -1 if none

	Exited bool      // its end is in the record
	Became bool      // the process executed another program, the next Command of this PID
	Ended  time.Time // zero unless Exited or Became
	Code   int       // exit code, if Exited
	Signal int       // that ended it; 0 if none

	// Prepared means that a prepared shell ran it: the kernel saw the shell start before its
	// command was known, and Args is what the client ordered.
	Prepared bool

	hidden bool // a shell that waits for its command, or the stub of one
}

// Duration returns how long the program ran; 0 if that is not known.
func (c *Command) Duration() time.Duration {
	if c.Ended.IsZero() {
		return 0
	}
	return max(0, c.Ended.Sub(c.Time))
}

// An Opened is an attempt to open a file for writing.
type Opened struct {
	Time time.Time
	PID  int32
	Op   string // of Record.Files: read, mkdir, rmdir, unlink, rename, link, symlink, mknod or truncate; else empty
	Path string
	To   string // where rename, link and symlink lead
	Err  int    // errno; 0 means success
}

// readRecord reads the record of a sandbox.
func readRecord(dir, id string) (Record, error) {
	r := Record{Sandbox: id, Complete: true}
	b := builder{record: &r, running: map[int32]int{}, held: map[string]int{}, starts: map[int32][]int{}, exits: map[int32]exit{}, orders: map[uint64]int{}, inputs: map[string]int{}}
	var last state
	seen := uint64(0)
	found := false
	for _, part := range []string{partFirst, partOlder, partNow} {
		path := partPath(dir, id, part)
		s, sum, _, err := foldFile(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case errors.Is(err, errHeadless):
			// It has no line yet, or a crash came before its head was written.
			found = true
			continue
		case err != nil:
			return Record{}, fmt.Errorf("read record of commands: %w", err)
		}
		found = true
		f, err := os.Open(path)
		if err != nil {
			return Record{}, fmt.Errorf("read record of commands: %w", err)
		}
		_, err = eachLine(f, func(_ []byte, l *line) error {
			if l == nil || l.What != lineHead {
				seen++
			}
			if l != nil {
				b.add(l)
			}
			return nil
		})
		if err := errors.Join(err, f.Close()); err != nil {
			return Record{}, fmt.Errorf("read record of commands: %w", err)
		}
		last, r.SHA256 = s, hex.EncodeToString(sum.Sum(nil))
	}
	if !found {
		return Record{}, fmt.Errorf("sandbox %s has no record of commands: %w", id, sandbox.ErrNotFound)
	}
	b.finish()
	r.Contract, r.Programs, r.Ordered = last.Contract, last.Programs, last.Orders
	r.Started, r.Refused, r.Held, r.Exited, r.Opened = last.Started, last.Refused, last.Held, last.Exited, last.Opened
	r.Missed, r.Lines = last.Missed, last.Lines
	r.Complete = last.Missed == 0 && last.Broken == 0
	if last.Lines > seen {
		r.Dropped = last.Lines - seen
	}
	r.Ended = exists(partPath(dir, id, partEnd))
	return r, nil
}

// A builder assembles the lines of a record into a [Record].
type builder struct {
	record  *Record
	running map[int32]int  // by PID: index in Commands
	held    map[string]int // by PID and action: index in Commands
	bound   bool

	starts  map[int32][]int // by PID: indices in Commands, in order
	exits   map[int32]exit  // by PID: its end, where its start is not in the record
	orders  map[uint64]int  // by number: index in Orders
	inputs  map[string]int  // by process: index in typed
	typed   []Order         // input of processes
	clipped bool            // a start has another time than its place in Commands says
}

// An exit is the end of a process.
type exit struct {
	at           time.Time
	code, signal int
}

func (b *builder) add(l *line) {
	at := store.FromTime(l.Time)
	switch l.What {
	case lineBind:
		if !b.bound {
			b.bound = true
			b.record.Commands, b.record.Opens, b.record.Files = nil, nil, nil
			clear(b.running)
			clear(b.held)
			clear(b.starts)
			clear(b.exits)
		}
	case lineHeld, lineStart, lineRefuse:
		b.start(l, at)
	case lineExit:
		if i, ok := b.running[l.PID]; ok {
			c := &b.record.Commands[i]
			c.Exited, c.Ended, c.Code, c.Signal = true, at, l.Code, l.Signal
			delete(b.running, l.PID)
		} else if len(b.exits) < maxOrders {
			b.exits[l.PID] = exit{at, l.Code, l.Signal}
		}
	case lineFile:
		b.record.Files = append(b.record.Files, Opened{Time: at, PID: l.PID, Op: string(l.Op), Path: l.Path, To: l.To, Err: l.Err})
	case lineOrder, lineBegan, lineEnded, lineInput:
		b.order(l, at)
	case lineOpen:
		b.record.Opens = append(b.record.Opens, Opened{Time: at, PID: l.PID, Path: l.Path, Err: l.Err})
	}
}

func (b *builder) start(l *line, at time.Time) {
	c := Command{
		Time: at, PID: l.PID, Parent: l.Parent, Path: l.Path, Name: l.Name, Dir: l.Dir, Args: l.Args, Exact: l.Digest == "" && !l.Cut, Digest: l.Digest,
		SHA256: l.SHA256, Fixed: l.Fixed, UID: l.UID, Why: l.Why, Action: l.Action, Entry: -1,
	}
	if c.Name == "" {
		c.Name = c.Path
	}
	if l.Entry != nil {
		c.Entry = *l.Entry
	}
	switch l.What {
	case lineHeld:
		c.Verdict = Awaiting
	case lineStart:
		c.Verdict = Allowed
	default:
		c.Verdict = Denied
	}
	if before := b.starts[l.PID]; len(before) > 0 && c.Verdict == Allowed {
		if last := &b.record.Commands[before[len(before)-1]]; last.Exited && last.Parent == c.Parent && !c.Time.After(last.Ended.Add(time.Second)) {
			// It was killed while its kernel waited for the answer: the program never ran.
			c.Exited, c.Ended, c.Code, c.Signal = true, c.Time, last.Code, last.Signal
			b.starts[c.PID] = append(before, len(b.record.Commands))
			b.record.Commands = append(b.record.Commands, c)
			return
		}
	}
	key := fmt.Sprint(l.PID, " ", l.Action)
	if i, ok := b.held[key]; ok && l.Action != "" {
		if c.Verdict == Awaiting {
			return // the kernel asks again, after a pause or a signal
		}
		b.record.Commands[i] = c // the answer to a start that was held
		delete(b.held, key)
		b.note(c, i)
		return
	}
	if c.Verdict == Awaiting {
		b.held[key] = len(b.record.Commands)
	}
	b.record.Commands = append(b.record.Commands, c)
	b.note(c, len(b.record.Commands)-1)
}

// note remembers which program a process runs.
func (b *builder) note(c Command, i int) {
	if c.Verdict != Allowed {
		return
	}
	if was, ok := b.running[c.PID]; ok && was != i {
		before := &b.record.Commands[was]
		before.Became, before.Ended = true, c.Time
		if before.Path == sandbox.LauncherPath && before.UID == 0 && b.record.Commands[i].blank() {
			before.hidden, b.record.Commands[i].hidden = true, true
		}
	}
	b.running[c.PID] = i
	b.starts[c.PID] = append(b.starts[c.PID], i)
}
