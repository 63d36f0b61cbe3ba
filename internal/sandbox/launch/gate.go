package launch

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The messages on a gate: the socket, of type SOCK_SEQPACKET, on which the kernel of a
// sandbox asks the host before it starts a program. The first octet of a message is its
// kind. Numbers are big-endian, and each string follows its length.
//
//	kernel → host: an [Event]
//	host → kernel: a [Command]
//
// The kernel's first message is a [Hello]: without it the host must not rely on the gate.
// The host answers every [Exec] with a verdict, in any order, unless a [GiveUp] for it
// arrives first. After [Again] the kernel sends [Done] and repeats all execs that wait for
// a verdict, because a host that was killed may have read them.

// An EventKind is the kind of an [Event].
type EventKind byte

// The kinds of events.
const (
	Hello  EventKind = 'h'
	Exec   EventKind = 'x' // a program is about to be started
	GiveUp EventKind = 'g' // nothing waits for the verdict any more
	Exit   EventKind = 'e' // a process has ended
	Open   EventKind = 'o' // an attempt to open a file for writing succeeded or failed
	File   EventKind = 'f' // another attempt to use a path, see Event.Name
	Missed EventKind = 'm' // exits and opens were dropped
	Done   EventKind = 'd' // a command was carried out
)

// An Event is a message of a sandbox's kernel. The kernel may be compromised, so every
// field is hostile.
type Event struct {
	Kind EventKind
	ID   uint64 // Exec, GiveUp: ID of the exec; Done: ID of the command; Missed: number of events
	PID  int32
	Code int32 // Exit: wait status; Open, File: errno, 0 on success

	// The other fields belong to Exec; Path belongs to Open as well. File has in Path the
	// path, in Name what was done: read, mkdir, rmdir, unlink, rename, link, symlink, mknod or
	// truncate; and in Dir where rename, link and symlink lead.
	Parent          int32
	UID             uint32
	Fixed           bool // the file is unchanged since the template
	Cut             bool // a text or list was too long and was shortened
	Guest           bool // the process ran the guest's program until now
	SHA256          [32]byte
	Path, Name, Dir string
	Args, Env       []string
}

// Limits of messages, in bytes. Longer content is cut before it is sent. A socket's buffer
// must hold a whole message, and Linux's default buffer has 208 KiB.
const (
	maxArgs  = 96 << 10 // including 4 for the length of each argument
	maxEnv   = 32 << 10 // including 4 for the length of each variable
	maxPath  = 4096
	MaxEvent = maxArgs + maxEnv + 3*maxPath + 256
)

const gateVersion = 1

var errGate = errors.New("malformed message")

// Append appends the encoded event to b, cut to the limits of messages.
func (e *Event) Append(b []byte) []byte {
	b = append(b, byte(e.Kind))
	switch e.Kind {
	case Hello:
		return append(b, gateVersion)
	case GiveUp, Missed, Done:
		return binary.BigEndian.AppendUint64(b, e.ID)
	case Exit:
		return appendInt32(appendInt32(b, e.PID), e.Code)
	case Open:
		path := e.Path
		if len(path) > maxPath {
			path = path[:maxPath]
		}
		return appendText(appendInt32(appendInt32(b, e.PID), e.Code), path)
	case File:
		b = appendInt32(appendInt32(b, e.PID), e.Code)
		for _, s := range []string{e.Name, e.Path, e.Dir} {
			b = appendText(b, s[:min(len(s), maxPath)])
		}
		return b
	case Exec:
	}
	b = binary.BigEndian.AppendUint64(b, e.ID)
	b = binary.BigEndian.AppendUint32(appendInt32(appendInt32(b, e.PID), e.Parent), e.UID)
	flags := len(b)
	b = append(b, 0)
	b = append(b, e.SHA256[:]...)
	cut := e.Cut
	for _, p := range []string{e.Path, e.Name, e.Dir} {
		if len(p) > maxPath { // half a path could be that of another file
			p, cut = "", true
		}
		b = appendText(b, p)
	}
	var over bool
	b, over = appendTexts(b, e.Args, maxArgs)
	cut = cut || over
	b, over = appendTexts(b, e.Env, maxEnv)
	cut = cut || over
	if e.Fixed {
		b[flags] |= 1
	}
	if cut {
		b[flags] |= 2
	}
	if e.Guest {
		b[flags] |= 4
	}
	return b
}

func appendInt32(b []byte, n int32) []byte { return binary.BigEndian.AppendUint32(b, uint32(n)) }

func appendText(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint32(b, uint32(len(s))), s...)
}

// appendTexts appends as much of texts as fits into most bytes, and reports whether it cut.
func appendTexts(b []byte, texts []string, most int) (_ []byte, cut bool) {
	count := len(b)
	b = append(b, 0, 0, 0, 0)
	n := uint32(0)
	for _, s := range texts {
		if most < 4 {
			cut = true
			break
		}
		most -= 4
		if len(s) > most {
			s, cut = s[:most], true
		}
		most -= len(s)
		b = appendText(b, s)
		n++
		if cut {
			break
		}
	}
	binary.BigEndian.PutUint32(b[count:], n)
	return b, cut
}

// ParseEvent parses a hostile message of a sandbox's kernel. It does not retain b, and
// allocates at most a small multiple of its length.
func ParseEvent(b []byte) (e Event, err error) {
	if len(b) == 0 || len(b) > MaxEvent {
		return Event{}, fmt.Errorf("%w: %d bytes", errGate, len(b))
	}
	e.Kind = EventKind(b[0])
	p := parser{b: b[1:]}
	switch e.Kind {
	case Hello:
		if v := p.octet(); v != gateVersion {
			return Event{}, fmt.Errorf("%w: version %d, want %d", errGate, v, gateVersion)
		}
	case GiveUp, Missed, Done:
		e.ID = p.uint64()
	case Exit:
		e.PID, e.Code = int32(p.uint32()), int32(p.uint32())
	case Open:
		e.PID, e.Code = int32(p.uint32()), int32(p.uint32())
		e.Path = p.text()
	case File:
		e.PID, e.Code = int32(p.uint32()), int32(p.uint32())
		e.Name, e.Path, e.Dir = p.text(), p.text(), p.text()
	case Exec:
		e.ID = p.uint64()
		e.PID, e.Parent, e.UID = int32(p.uint32()), int32(p.uint32()), p.uint32()
		flags := p.octet()
		e.Fixed, e.Cut, e.Guest = flags&1 != 0, flags&2 != 0, flags&4 != 0
		copy(e.SHA256[:], p.take(len(e.SHA256)))
		e.Path, e.Name, e.Dir = p.text(), p.text(), p.text()
		e.Args, e.Env = p.texts(), p.texts()
	default:
		return Event{}, fmt.Errorf("%w: kind %d", errGate, e.Kind)
	}
	if p.short || len(p.b) > 0 {
		return Event{}, fmt.Errorf("%w of kind %q: its lengths do not add up", errGate, byte(e.Kind))
	}
	return e, nil
}

// A parser reads from b. A read beyond the end of b sets short; from then on all reads
// return zero values.
type parser struct {
	b     []byte
	short bool
}

func (p *parser) take(n int) []byte {
	if p.short || n > len(p.b) {
		p.short, p.b = true, nil
		return nil
	}
	t := p.b[:n]
	p.b = p.b[n:]
	return t
}

func (p *parser) octet() byte {
	if t := p.take(1); t != nil {
		return t[0]
	}
	return 0
}

func (p *parser) uint32() uint32 {
	if t := p.take(4); t != nil {
		return binary.BigEndian.Uint32(t)
	}
	return 0
}

func (p *parser) uint64() uint64 {
	if t := p.take(8); t != nil {
		return binary.BigEndian.Uint64(t)
	}
	return 0
}

func (p *parser) text() string {
	n := p.uint32()
	if uint64(n) > uint64(len(p.b)) { // the attack: a length that is allocated before it is compared
		p.short, p.b = true, nil
		return ""
	}
	return string(p.take(int(n)))
}

func (p *parser) texts() (all []string) {
	n := p.uint32()
	if uint64(n) > uint64(len(p.b)/4) { // each text has a length of four bytes
		p.short, p.b = true, nil
		return nil
	}
	for range n {
		if all = append(all, p.text()); p.short {
			return nil
		}
	}
	return all
}

// A CommandKind is the kind of a [Command].
type CommandKind byte

// The kinds of commands.
const (
	Verdict CommandKind = 'v' // allow or refuse an exec
	Again   CommandKind = 'r' // repeat all execs that wait
	Observe CommandKind = 't' // report opens, other uses of files, or digests from now on
)

// A Command is a message of the host.
type Command struct {
	Kind  CommandKind
	ID    uint64 // Verdict: ID of the exec; otherwise ID of this command
	Allow bool   // Verdict only

	// Observe only. Files are other changes of files than opens, and Reads are opens for
	// reading.
	Opens, Digests, Files, Reads bool
}

// Append appends the command to b.
func (c Command) Append(b []byte) []byte {
	var flags byte
	for i, set := range []bool{c.Allow, c.Opens, c.Digests, c.Files, c.Reads} {
		if set {
			flags |= 1 << i
		}
	}
	return append(binary.BigEndian.AppendUint64(append(b, byte(c.Kind)), c.ID), flags)
}

// ParseCommand parses a message of the host.
func ParseCommand(b []byte) (Command, error) {
	if len(b) != 10 {
		return Command{}, fmt.Errorf("%w: %d bytes, want 10", errGate, len(b))
	}
	c := Command{Kind: CommandKind(b[0]), ID: binary.BigEndian.Uint64(b[1:]), Allow: b[9]&1 != 0, Opens: b[9]&2 != 0, Digests: b[9]&4 != 0, Files: b[9]&8 != 0, Reads: b[9]&16 != 0}
	switch c.Kind {
	case Verdict, Again, Observe:
		return c, nil
	}
	return Command{}, fmt.Errorf("%w: kind %d", errGate, c.Kind)
}
