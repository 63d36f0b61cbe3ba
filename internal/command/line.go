package command

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"strings"
	"time"

	"postern/internal/extract"
	"postern/internal/leak"
	"postern/internal/sandbox"
)

const (
	maxText = 1 << 10 // bytes of one argument or path in the record; the rest is cut
	maxArgs = 4 << 10 // bytes of all arguments of a start in the record
	maxWhy  = 500     // bytes of a reason
)

// The kinds of lines of a record.
const (
	lineHead   = "head"   // the state at the beginning of a later file; not an event, and not in the digest
	lineBind   = "bind"   // the sandbox was bound to a contract
	lineHeld   = "held"   // a start waits for a person
	lineStart  = "start"  // a start was allowed
	lineRefuse = "refuse" // a start was refused
	lineExit   = "exit"   // a process ended
	lineOpen   = "open"   // a program opened a file for writing, or tried to
	lineFile   = "file"   // a program made, removed, renamed or linked a file, or read it, or tried to
	lineMissed = "missed" // events were lost
	lineOrder  = "order"  // a client has the sandbox do something, see [Order]
	lineBegan  = "began"  // an order has started a process
	lineEnded  = "ended"  // the client of an order has its answer
	lineInput  = "input"  // how much clients have sent to a process so far
)

// A line is one event of a record, as JSON. Its texts come from the sandbox.
type line struct {
	What   string   `json:"e"`
	Time   int64    `json:"t"` // Unix microseconds
	PID    int32    `json:"pid,omitempty"`
	Parent int32    `json:"ppid,omitempty"`
	Path   string   `json:"path,omitempty"`
	Name   string   `json:"name,omitempty"` // where it differs from Path
	Dir    string   `json:"dir,omitempty"`
	Args   []string `json:"args,omitempty"`
	// Digest is the SHA-256 of the arguments, each followed by a zero byte, if Args
	// differs from them: cut, masked or not valid UTF-8.
	Digest string `json:"args_sha256,omitempty"`
	SHA256 string `json:"sha256,omitempty"` // of the program's file
	Fixed  bool   `json:"fixed,omitempty"`
	UID    uint32 `json:"uid,omitempty"`
	Cut    bool   `json:"cut,omitempty"`
	Why    string `json:"why,omitempty"`
	Action string `json:"action,omitempty"`
	Entry  *int   `json:"entry,omitempty"` // index in the contract's Commands.Allow

	Code   int `json:"code,omitempty"`
	Signal int `json:"signal,omitempty"`

	Err int `json:"err,omitempty"` // errno of an open

	N        uint64 `json:"n,omitempty"`        // number of lost events, or of an order
	Contract string `json:"contract,omitempty"` // "name@sha256:…"

	// Of orders; Path, Dir, Args, SHA256 and PID as well.
	Via    Via       `json:"via,omitempty"`
	Op     Operation `json:"op,omitempty"`
	User   string    `json:"user,omitempty"`
	Tag    string    `json:"tag,omitempty"` // the client's name of the process; of input "pid N" or "tag NAME"
	To     string    `json:"to,omitempty"`
	Lang   string    `json:"lang,omitempty"`
	Size   int64     `json:"size,omitempty"`
	Out    int64     `json:"out,omitempty"` // bytes of standard output that the client got
	ErrOut int64     `json:"errout,omitempty"`

	State *state `json:"state,omitempty"` // of a head
}

// encode returns l with its line end.
func (l *line) encode() ([]byte, error) {
	b, err := json.Marshal(l)
	if err != nil {
		return nil, fmt.Errorf("encode line: %w", err)
	}
	return append(b, '\n'), nil
}

// startLine returns the line of a start. The environment is never part of it, because
// it has secrets and placeholders of secrets.
func startLine(e *sandbox.Exec) line {
	l := line{
		Time: e.Time.UnixMicro(), PID: e.PID, Parent: e.Parent, Path: kept(e.Path, maxText), Dir: kept(e.Dir, maxText),
		Fixed: e.Fixed, UID: e.UID, Cut: e.Cut,
	}
	if e.Time.IsZero() {
		l.Time = time.Now().UnixMicro()
	}
	if e.Name != e.Path {
		l.Name = kept(e.Name, maxText)
	}
	if e.SHA256 != [32]byte{} {
		l.SHA256 = hex.EncodeToString(e.SHA256[:])
	}
	l.Args, l.Digest = keptArgs(e.Args)
	return l
}

// keptArgs returns the arguments as the record has them, and their digest if they
// differ from args.
func keptArgs(args []string) (out []string, digest string) {
	room, exact := maxArgs, true
	for _, arg := range args {
		if room <= 0 {
			exact = false
			break
		}
		k := kept(arg, min(room, maxText))
		room -= len(k) + 1
		exact = exact && k == arg
		out = append(out, k)
	}
	// A secret may span two arguments: --password VALUE.
	if joined := strings.Join(out, "\n"); leak.Redact(joined) != joined {
		exact = false
		for i, arg := range out {
			out[i] = leak.Redact(arg)
		}
		if again := leak.Redact(strings.Join(out, "\n")); again != strings.Join(out, "\n") {
			// The masked text contains line ends, so the arguments can no longer be
			// separated.
			out = []string{out[0], again}
		}
	}
	if !exact {
		h := sha256.New()
		for _, arg := range args {
			h.Write([]byte(arg))
			h.Write([]byte{0})
		}
		digest = hex.EncodeToString(h.Sum(nil))
	}
	return out, digest
}

// kept returns the first most bytes of a text from the sandbox, as valid UTF-8.
func kept(s string, most int) string {
	if len(s) > most {
		s = extract.Cut(s[:most], most) + "…"
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// program returns the name under which starts of a program are counted.
func program(l *line) string {
	if l.Path == "" {
		return "(no name)"
	}
	return path.Base(l.Path)
}

// A state is the summary of a record's lines.
type state struct {
	Lines    uint64            `json:"lines"`
	Started  uint64            `json:"started"`
	Refused  uint64            `json:"refused"`
	Held     uint64            `json:"held"`
	Exited   uint64            `json:"exited"`
	Opened   uint64            `json:"opened"`
	Missed   uint64            `json:"missed"`
	Files    uint64            `json:"files,omitempty"`
	Orders   uint64            `json:"orders,omitempty"`
	Broken   uint64            `json:"broken,omitempty"` // lines that could not be read
	Contract string            `json:"contract,omitempty"`
	Programs map[string]uint64 `json:"programs,omitempty"` // starts by name; at most maxPrograms
	Used     map[int]int       `json:"used,omitempty"`     // starts by entry of the contract
	Sum      []byte            `json:"sum,omitempty"`      // the state of the digest
}

const (
	maxPrograms   = 200
	otherPrograms = "(other)"
)

// count adds l to the counts.
func (s *state) count(l *line) {
	s.Lines++
	switch l.What {
	case lineBind:
		if s.Contract == "" {
			// Earlier events are those of the template's services, which are being ended.
			*s = state{Lines: s.Lines, Missed: s.Missed, Broken: s.Broken, Orders: s.Orders}
		}
		s.Contract = l.Contract
	case lineHeld:
		s.Held++
	case lineStart:
		s.Started++
		name := program(l)
		if _, ok := s.Programs[name]; !ok && len(s.Programs) >= maxPrograms {
			name = otherPrograms
		}
		if s.Programs == nil {
			s.Programs = map[string]uint64{}
		}
		s.Programs[name]++
	case lineRefuse:
		s.Refused++
	case lineExit:
		s.Exited++
	case lineOpen:
		s.Opened++
	case lineMissed:
		s.Missed += l.N
	case lineOrder:
		s.Orders++
	case lineFile:
		s.Files++
	case lineBegan, lineEnded, lineInput:
	default:
		s.Broken++
	}
}
