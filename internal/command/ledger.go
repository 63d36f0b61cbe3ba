package command

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"
)

const (
	partSize = 1 << 20  // bytes of the largest file; each sandbox has three
	maxLine  = 64 << 10 // bytes of the longest line that is read
)

// The files of a record, in the order of their lines. The first one is never removed,
// so that a program cannot hide how it began by filling the record. Lines between the
// first and the older file are not kept, but are in the counts and the digest.
const (
	partFirst = ".first"
	partOlder = ".older"
	partNow   = ""

	partEnd = ".end" // an empty file: the sandbox has ended, and the audit has the counts
)

var (
	idPattern   = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^i[a-z0-9]{20}$`) })
	filePattern = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`^(i[a-z0-9]{20})\.commands(\.first|\.older|\.end)?$`)
	})
)

func partPath(dir, id, part string) string { return filepath.Join(dir, id+".commands"+part) }

// A ledger writes the record of one sandbox.
//
// Each line is written before its answer is sent. So after a crash of the server at
// most the last line is incomplete, and the kernel, which has no answer to it, asks
// again. A crash of the machine also ends the sandbox.
type ledger struct {
	dir, id string

	mu     sync.Mutex // guards what follows
	file   *os.File
	size   int64 // of file
	state  state
	sum    hash.Hash
	timers map[int32]*time.Timer
	// expected is the contract of a sandbox that is not bound; known means that it was
	// looked up.
	expected string
	known    bool
	project  string                 // of the sandbox; empty until it was looked up
	meters   map[string]*inputMeter // by process, what clients sent to it
	lost     uint64                 // lines that could not be written, and are not in the record yet
}

// openLedger opens the record of a sandbox, which may exist, and repairs it after a
// crash.
func openLedger(dir, id string) (*ledger, error) {
	if !idPattern().MatchString(id) {
		return nil, fmt.Errorf("sandbox %q has no valid ID", id)
	}
	l := &ledger{dir: dir, id: id, sum: sha256.New(), timers: map[int32]*time.Timer{}}
	for _, part := range []string{partNow, partOlder, partFirst} {
		s, sum, whole, err := foldFile(partPath(dir, id, part))
		switch {
		case errors.Is(err, fs.ErrNotExist), part == partNow && errors.Is(err, errHeadless):
			continue // the crash came between two steps of begin
		case err != nil:
			return nil, err
		}
		l.state, l.sum = s, sum
		if part != partNow {
			return l, l.begin()
		}
		f, err := os.OpenFile(partPath(dir, id, part), os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return nil, err
		}
		if err := f.Truncate(whole); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		l.file, l.size = f, whole
		return l, nil
	}
	return l, l.begin()
}

// begin creates the newest file. A file that is not the record's first begins with the
// state.
func (l *ledger) begin() error {
	f, err := os.OpenFile(partPath(l.dir, l.id, partNow), os.O_CREATE|os.O_TRUNC|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	l.file, l.size = f, 0
	if l.state.Lines == 0 {
		return nil
	}
	s := l.state
	if s.Sum, err = l.sum.(encoding.BinaryMarshaler).MarshalBinary(); err != nil {
		return err
	}
	b, err := (&line{What: lineHead, Time: time.Now().UnixMicro(), State: &s}).encode()
	if err != nil {
		return err
	}
	n, err := f.Write(b)
	l.size = int64(n)
	return err
}

// append writes a line.
func (l *ledger) append(e *line) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.appendLocked(e)
}

func (l *ledger) appendLocked(e *line) (err error) {
	if l.file == nil {
		return errors.New("the record is closed")
	}
	defer func() {
		if err != nil {
			l.lost++
		}
	}()
	if n := l.lost; n > 0 {
		// The disk was full. Say so first: a record that lacks lines is not complete.
		if err := l.writeLocked(&line{What: lineMissed, Time: time.Now().UnixMicro(), N: n}); err != nil {
			return err
		}
		l.lost = 0
	}
	return l.writeLocked(e)
}

func (l *ledger) writeLocked(e *line) error {
	b, err := e.encode()
	if err != nil {
		return err
	}
	if l.size+int64(len(b)) > partSize {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	n, err := l.file.Write(b)
	if err != nil {
		// The attack: code fills the disk so that only half of a line fits. Remove that
		// half before the next line.
		return errors.Join(err, l.file.Truncate(l.size))
	}
	l.size += int64(n)
	l.sum.Write(b)
	l.state.count(e)
	return nil
}

func (l *ledger) rotate() error {
	now := partPath(l.dir, l.id, partNow)
	to := partPath(l.dir, l.id, partOlder)
	if first := partPath(l.dir, l.id, partFirst); !exists(first) {
		to = first
	}
	err := errors.Join(l.file.Close(), os.Rename(now, to))
	l.file = nil
	if err != nil {
		return err
	}
	return l.begin()
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func (l *ledger) close() error {
	l.stopTimers()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return nil
	}
	err := errors.Join(l.endInputLocked(""), l.file.Close())
	l.file = nil
	return err
}

// wasBound reports whether the sandbox was ever bound.
func (l *ledger) wasBound() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state.Contract != ""
}

// bind records the contract of the sandbox.
func (l *ledger) bind(contract string, now time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if had := l.state.Contract; had != "" && had != contract {
		return fmt.Errorf("its record is of another contract, %s", had)
	}
	return l.appendLocked(&line{What: lineBind, Time: now.UnixMicro(), Contract: contract})
}

// reserve counts one start of an entry, unless it has had most already; 0 means no
// limit. The attack: concurrent starts that each see that one is left.
func (l *ledger) reserve(entry, most int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if most > 0 && l.state.Used[entry] >= most {
		return false
	}
	if l.state.Used == nil {
		l.state.Used = map[int]int{}
	}
	l.state.Used[entry]++
	return true
}

// release takes back a start that was not made.
func (l *ledger) release(entry int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Used[entry]--
}

// errHeadless means that a file has no complete line. If it is not the first file, its
// head is missing.
var errHeadless = errors.New("the file of a record has no complete line")

// foldFile returns the state after the lines of a file, and how many bytes of it are
// whole lines.
func foldFile(path string) (s state, sum hash.Hash, whole int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return s, nil, 0, err
	}
	defer f.Close()
	sum = sha256.New()
	first := true
	whole, err = eachLine(f, func(raw []byte, l *line) error {
		head := l != nil && l.What == lineHead
		switch {
		case head && first && l.State != nil:
			s = *l.State
			if err := sum.(encoding.BinaryUnmarshaler).UnmarshalBinary(s.Sum); err != nil {
				return fmt.Errorf("read state of %s: %w", filepath.Base(path), err)
			}
			s.Sum = nil
		case l == nil:
			s.Lines++
			s.Broken++
			sum.Write(raw)
		default:
			s.count(l)
			if l.What == lineStart && l.Entry != nil {
				if s.Used == nil {
					s.Used = map[int]int{}
				}
				s.Used[*l.Entry]++
			}
			sum.Write(raw)
		}
		first = false
		return nil
	})
	if err == nil && first {
		// Without a line it may be a later file whose head was not written before a
		// crash.
		err = errHeadless
	}
	return s, sum, whole, err
}

// eachLine calls do with each complete line of r, including its line end. l is nil if
// the line cannot be parsed. It returns the size of all complete lines, in bytes.
func eachLine(r io.Reader, do func(raw []byte, l *line) error) (whole int64, err error) {
	in := bufio.NewReaderSize(io.LimitReader(r, 2*partSize), maxLine)
	for {
		raw, err := in.ReadSlice('\n')
		switch {
		case errors.Is(err, io.EOF):
			return whole, nil // incomplete, after a crash
		case errors.Is(err, bufio.ErrBufferFull):
			return whole, errors.New("a line is too long")
		case err != nil:
			return whole, err
		}
		whole += int64(len(raw))
		l := &line{}
		dec := json.NewDecoder(bytes.NewReader(raw))
		if dec.Decode(l) != nil || l.What == "" {
			l = nil
		}
		if err := do(raw, l); err != nil {
			return whole, err
		}
	}
}
