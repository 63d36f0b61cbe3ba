package guest

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// A stateFile keeps what the host has said over a restart of the guest's
// server: without it, whoever kills the server would lock the host out, since
// the channel's key of a restored sandbox is nowhere else.
//
// It is a file in memory without a name, which the first process holds and
// hands to each server that it starts. So a full disk cannot keep the host from
// saying who the sandbox is, and a boot begins without it. Processes of users
// cannot reach it. Root's can, through /proc/1/fd, and may destroy it: then the
// server knows the first key only, the host is locked out, and that sandbox
// alone is lost. It is no secret either: a key's hash, and what the
// environment of each process shows.
//
// It has two slots that are written in turn, each with a number and a
// checksum, so that a server that dies while it writes leaves the other one.
type stateFile struct {
	f   *os.File
	seq uint64 // of the record that is valid
}

// slotSize bounds a record: the environment's bound and room for the rest.
const slotSize = 2 * maxInit

// slotHeader is the number, the length and the SHA-256 of a record's content.
const slotHeader = 8 + 4 + sha256.Size

// newStateFile makes an empty one. The descriptor is closed on exec: it is
// given to a server by name.
func newStateFile() (*os.File, error) {
	fd, err := unix.MemfdCreate("postern-state", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make state file: %w", err)
	}
	return os.NewFile(uintptr(fd), "postern-state"), nil
}

// load reads the newest whole record into v. It reports false if there is none.
func (s *stateFile) load(v any) (bool, error) {
	if s.f == nil {
		return false, nil
	}
	var best []byte
	damaged := false
	for slot := range int64(2) {
		b := make([]byte, slotHeader)
		if _, err := s.f.ReadAt(b, slot*slotSize); err != nil {
			continue // never written
		}
		seq, size := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:])
		if seq == 0 {
			continue
		}
		if size > slotSize-slotHeader {
			damaged = true
			continue
		}
		content := make([]byte, size)
		if _, err := s.f.ReadAt(content, slot*slotSize+slotHeader); err != nil || sha256.Sum256(content) != [sha256.Size]byte(b[12:]) {
			damaged = true
			continue
		}
		if seq > s.seq {
			s.seq, best = seq, content
		}
	}
	if best == nil {
		if damaged {
			return false, errors.New("read state file: no record in it is whole")
		}
		return false, nil
	}
	if err := json.Unmarshal(best, v); err != nil {
		return false, fmt.Errorf("read state file: %w", err)
	}
	return true, nil
}

// save writes v. When it returns, another server would load it.
func (s *stateFile) save(v any) error {
	if s.f == nil {
		return nil
	}
	content, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("write state file: %w", err)
	}
	if len(content) > slotSize-slotHeader {
		return fmt.Errorf("write state file: %d bytes are more than %d", len(content), slotSize-slotHeader)
	}
	next := s.seq + 1
	sum := sha256.Sum256(content)
	b := binary.LittleEndian.AppendUint64(nil, next)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(content)))
	b = append(append(b, sum[:]...), content...)
	if _, err := s.f.WriteAt(b, int64(next%2)*slotSize); err != nil {
		return fmt.Errorf("write state file: %w", err)
	}
	s.seq = next
	return nil
}
