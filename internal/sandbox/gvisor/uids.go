package gvisor

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox/launch"
)

// An IDRange is a range of the host's user and group IDs. Each sandbox runs as one
// of them: its user ID and its group ID are the same number.
type IDRange struct {
	First uint32
	Count uint32
}

// DefaultIDs returns a range that neither Debian's adduser nor systemd assigns
// (https://systemd.io/UIDS-GIDS).
func DefaultIDs() IDRange { return IDRange{First: 1_900_000_000, Count: 10_000} }

// ParseIDRange parses "FIRST-COUNT".
func ParseIDRange(s string) (IDRange, error) {
	first, count, ok := strings.Cut(s, "-")
	f, ferr := strconv.ParseUint(first, 10, 32)
	n, nerr := strconv.ParseUint(count, 10, 32)
	if !ok || ferr != nil || nerr != nil {
		return IDRange{}, fmt.Errorf("%q is not FIRST-COUNT, such as %s", s, DefaultIDs())
	}
	r := IDRange{First: uint32(f), Count: uint32(n)}
	return r, r.check()
}

// String returns the form that [ParseIDRange] parses.
func (r IDRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Count) }

// end is the first ID after the range.
func (r IDRange) end() uint64 { return uint64(r.First) + uint64(r.Count) }

const (
	leastID = launch.LeastID
	endOfID = 1 << 31 // other programs mistake IDs from here on for negative numbers
	nobody  = 65534   // used by everything without a user of its own
)

func (r IDRange) check() error {
	switch {
	case r.Count == 0:
		return fmt.Errorf("the range %s of user ids is empty", r)
	case r.First < leastID || r.end() > endOfID:
		return fmt.Errorf("the range %s of user ids must lie between %d and %d", r, leastID, endOfID-1)
	case r.overlaps(nobody, 1):
		return fmt.Errorf("the range %s of user ids holds %d, which is nobody", r, nobody)
	}
	return nil
}

func (r IDRange) overlaps(first, count uint64) bool {
	return count > 0 && first < r.end() && uint64(r.First) < first+count
}

// idFiles are the files that list a machine's assigned IDs, with the fields of the
// ID and, for ranges, of the number of IDs.
var idFiles = []struct {
	path      string
	id, count int
}{{"/etc/passwd", 2, -1}, {"/etc/group", 2, -1}, {"/etc/subuid", 1, 2}, {"/etc/subgid", 1, 2}}

// checkUnused refuses a range with IDs that the machine has assigned to others:
// their processes could signal and trace a sandbox.
func (r IDRange) checkUnused() error {
	for _, f := range idFiles {
		file, err := os.Open(f.path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("look for user ids that are in use: %w", err)
		}
		line, err := r.usedIn(file, f.id, f.count)
		file.Close()
		if err != nil {
			return fmt.Errorf("look for user ids that are in use: read %s: %w", f.path, err)
		}
		if line != "" {
			return fmt.Errorf("the range %s of user ids for sandboxes is in use: %s says %q; choose another", r, f.path, line)
		}
	}
	for _, path := range []string{"/proc/self/uid_map", "/proc/self/gid_map"} {
		b, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("look for user ids: %w", err)
		}
		if !r.mapped(string(b)) {
			return fmt.Errorf("the range %s of user ids for sandboxes is not in %s, the ids that this container has; choose one that is", r, path)
		}
	}
	return nil
}

// usedIn returns the first line of a file that names an ID of the range. It ignores
// lines of another form, such as those of NIS.
func (r IDRange) usedIn(f io.Reader, id, count int) (string, error) {
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		fields := strings.Split(sc.Text(), ":")
		if len(fields) <= max(id, count) {
			continue
		}
		first, err := strconv.ParseUint(fields[id], 10, 32)
		if err != nil {
			continue
		}
		n := uint64(1)
		if count >= 0 {
			if n, err = strconv.ParseUint(fields[count], 10, 32); err != nil {
				continue
			}
		}
		if r.overlaps(first, n) {
			return sc.Text(), nil
		}
	}
	return "", sc.Err()
}

// mapped reports whether the whole range is in one line of a user namespace's map
// (user_namespaces(7)).
func (r IDRange) mapped(idMap string) bool {
	for l := range strings.Lines(idMap) {
		f := strings.Fields(l)
		if len(f) != 3 {
			continue
		}
		first, err1 := strconv.ParseUint(f[0], 10, 32)
		n, err2 := strconv.ParseUint(f[2], 10, 32)
		if err1 == nil && err2 == nil && first <= uint64(r.First) && r.end() <= first+n {
			return true
		}
	}
	return false
}

// ids gives each sandbox an ID that no other sandbox has, including those of other
// servers on this machine with an overlapping range. A directory lists the IDs in
// use. Each entry is a symbolic link, whose name is the ID and whose target is the
// directory of its sandbox. So the list outlives this process, as sandboxes do, and
// IDs of a server whose data was deleted can be recognized.
type ids struct {
	dir    string // directory of the links
	of     IDRange
	within string // the state directory

	mu   sync.Mutex
	next uint32            // where to look first, from the range's start: a freed ID is not reused at once
	have map[string]uint32 // by sandbox, of this state directory
}

// openIDs reads which sandboxes of the state directory have an ID.
func openIDs(dir string, of IDRange, within string) (*ids, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of user ids in use: %w", err)
	}
	s := &ids{dir: dir, of: of, within: within, have: map[string]uint32{}}
	return s, s.read()
}

// errNoIDs means that every id of the range is in use.
var errNoIDs = errors.New("no user id is free")

// take returns an ID for a sandbox whose directory exists. No other sandbox gets
// the ID until the directory is gone or give is called.
func (s *ids) take(sandbox string) (uint32, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// Only one server at a time looks for free IDs.
	d, err := os.Open(s.dir)
	if err != nil {
		return 0, fmt.Errorf("find a user id: %w", err)
	}
	defer d.Close()
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
		return 0, fmt.Errorf("find a user id: %w", err)
	}
	for range s.of.Count {
		id := s.of.First + s.next
		s.next = (s.next + 1) % s.of.Count
		link := s.link(id)
		if old, err := os.Readlink(link); err == nil {
			if _, err := os.Lstat(old); !errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err := os.Remove(link); err != nil {
				return 0, fmt.Errorf("free user id %d: %w", id, err)
			}
		}
		if err := os.Symlink(filepath.Join(s.within, sandbox), link); err != nil {
			return 0, fmt.Errorf("take user id %d: %w", id, err)
		}
		s.have[sandbox] = id
		return id, nil
	}
	return 0, fmt.Errorf("%w: all of %s have a sandbox; make the range of --sandbox-uids larger", errNoIDs, s.of)
}

// give frees the ID of a sandbox that has no more processes. It does nothing for a
// sandbox without an ID.
func (s *ids) give(sandbox string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.have[sandbox]; !ok { // another process of this program may have started it
		if err := s.read(); err != nil {
			return err
		}
	}
	id, ok := s.have[sandbox]
	if !ok {
		return nil
	}
	delete(s.have, sandbox)
	// If the directory was gone, another server may have freed the ID.
	if at, err := os.Readlink(s.link(id)); err != nil || at != filepath.Join(s.within, sandbox) {
		return nil // it is not ours to free
	}
	if err := os.Remove(s.link(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("free user id %d: %w", id, err)
	}
	return nil
}

// has returns the user ID of a sandbox, and whether it has one.
func (s *ids) has(sandbox string) (uint32, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, ok := s.have[sandbox]
	return id, ok
}

// read notes which sandboxes of the state directory have an ID.
func (s *ids) read() error {
	es, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("list user ids in use: %w", err)
	}
	for _, e := range es {
		id, err := strconv.ParseUint(e.Name(), 10, 32)
		if err != nil {
			continue
		}
		at, err := os.Readlink(filepath.Join(s.dir, e.Name()))
		if err == nil && filepath.Dir(at) == s.within {
			s.have[filepath.Base(at)] = uint32(id)
		}
	}
	return nil
}

func (s *ids) link(id uint32) string {
	return filepath.Join(s.dir, strconv.FormatUint(uint64(id), 10))
}
