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

// A stateFile stores the host's settings across restarts of the guest's server.
// Without it, killing the server would lock the host out, since the channel hash of
// a restored sandbox is stored nowhere else.
//
// It is an unnamed file in memory, which the first process holds and passes to each
// server. So it works with a full disk, and it is empty at a boot. Processes of
// users cannot reach it. Those of root can, through /proc/1/fd, and may destroy it.
// Then the server knows only the first key, the host is locked out, and that one
// sandbox is lost. The content is not secret: a key's hash, and the environment
// that each process has.
//
// It has two slots, which are written in turn, each with a sequence number and a
// checksum. So a server that dies during a write leaves the other slot intact.
type stateFile struct {
	f   *os.File
	seq uint64 // sequence number of the valid record
}

// slotSize bounds a record: the limit for the environment, and as much for the
// rest.
const slotSize = 2 * maxInit

// slotHeader holds sequence number, length and SHA-256 of a record's content.
const slotHeader = 8 + 4 + sha256.Size

// newStateFile creates an empty one. It is close-on-exec, and passed to a server
// explicitly.
func newStateFile() (*os.File, error) {
	fd, err := unix.MemfdCreate("postern-state", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make state file: %w", err)
	}
	return os.NewFile(uintptr(fd), "postern-state"), nil
}

// load reads the newest valid record into v. It returns false if there is none.
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
			return false, errors.New("read state file: it has no complete record")
		}
		return false, nil
	}
	if err := json.Unmarshal(best, v); err != nil {
		return false, fmt.Errorf("read state file: %w", err)
	}
	return true, nil
}

// save writes v. When it returns, a restarted server would load v.
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

// aloneSignal makes the first process forget the services, see [Server.aloneWithInit].
const aloneSignal = unix.SIGUSR1

// markAlone records in the state file, behind the slots, that the first process has forgotten
// the services.
func markAlone(f *os.File) error {
	_, err := f.WriteAt([]byte{1}, 2*slotSize)
	return err
}

// aloneMark reports whether markAlone has been called.
func aloneMark(f *os.File) bool {
	b := []byte{0}
	if f == nil {
		return false
	}
	_, err := f.ReadAt(b, 2*slotSize)
	return err == nil && b[0] == 1
}
