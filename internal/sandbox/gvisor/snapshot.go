package gvisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/state/checkpointfiles"

	"postern/internal/sandbox"
)

const (
	// snapshotFormat is that of a snapshot's directory, and of all that a
	// sandbox is made of apart from what its specification says: a sandbox that
	// goes on from memory has the mounts and rights of the one that was saved.
	snapshotFormat = 1
	// gvisorVersion is the module's. A sentry can read only what one of its own
	// version has written: the state is that of its Go structures.
	gvisorVersion = "v0.0.0-20260905035102-160fafc42237"

	snapshotFile = "snapshot.json"
	maxSnapshot  = 64 << 10 // bytes of that file
)

// A kind says what a snapshot holds.
type kind string

const (
	kindMemory kind = "memory" // all of a running sandbox
	kindFiles  kind = "files"  // what it had written to its root file system
)

// A snapshot is what snapshot.json says of the files beside it. It is written
// by this program and not by a sentry.
type snapshot struct {
	Format int             `json:"format"`
	GVisor string          `json:"gvisor"`
	Kind   kind            `json:"kind"`
	Mounts []snapshotMount `json:"mounts"`
}

type snapshotMount struct {
	Destination string `json:"destination"`
	ReadOnly    bool   `json:"readOnly"`
}

// snapshotFiles are those that the sentry writes and reads, in the order of
// gVisor's calls. The last one holds pages and may be opened for direct I/O.
func snapshotFiles(k kind) []string {
	if k == kindFiles {
		return []string{
			checkpointfiles.FSCheckpointManifestFileName, checkpointfiles.FSCheckpointMultiTarFileName,
			checkpointfiles.PagesMetadataFileName, checkpointfiles.PagesFileName,
		}
	}
	return []string{checkpointfiles.StateFileName, checkpointfiles.PagesMetadataFileName, checkpointfiles.PagesFileName}
}

// openSnapshot opens the directory that Save wrote and reads what it says of
// itself. It refuses what s cannot be started from.
func openSnapshot(dir string, s sandbox.Spec) (f *os.File, snap snapshot, err error) {
	fail := func(err error) (*os.File, snapshot, error) {
		if f != nil {
			f.Close()
		}
		return nil, snapshot{}, fmt.Errorf("open snapshot: %w", err)
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(&os.PathError{Op: "open", Path: dir, Err: err})
	}
	f = os.NewFile(uintptr(fd), dir)
	fd, err = unix.Openat(fd, snapshotFile, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return fail(fmt.Errorf("%s is no snapshot: there is no %s in it", dir, snapshotFile))
	}
	if err != nil {
		return fail(err)
	}
	j := os.NewFile(uintptr(fd), snapshotFile)
	defer j.Close()
	if err := json.NewDecoder(io.LimitReader(j, maxSnapshot)).Decode(&snap); err != nil {
		return fail(fmt.Errorf("read %s: %w", snapshotFile, err))
	}
	if err := snap.fits(s); err != nil {
		return fail(err)
	}
	return f, snap, nil
}

// fits says why a sandbox cannot be started from the snapshot, if it cannot.
func (snap snapshot) fits(s sandbox.Spec) error {
	switch {
	case snap.Format != snapshotFormat:
		return fmt.Errorf("it has format %d and this program reads %d: it was made by another version of postern", snap.Format, snapshotFormat)
	case snap.GVisor != gvisorVersion:
		return fmt.Errorf("it was made by gVisor %q and this is %q: it can be read only by the version that wrote it", snap.GVisor, gvisorVersion)
	case snap.Kind != kindMemory && snap.Kind != kindFiles:
		return fmt.Errorf("it holds %q, which this program does not know", snap.Kind)
	}
	if snap.Kind == kindFiles {
		return nil // a boot, which takes any mounts
	}
	// What was open in a mount has to be found again, and the sandbox's table of
	// mounts is in its memory: a new one would not appear in it.
	have := slices.Clone(snap.Mounts)
	for _, m := range s.Mounts {
		i := slices.Index(have, snapshotMount{m.Destination, m.ReadOnly})
		if i < 0 {
			return fmt.Errorf("%w: a sandbox that goes on from memory has the mounts that it had, and %s (read-only: %v) is not one of them", sandbox.ErrInvalid, m.Destination, m.ReadOnly)
		}
		have = slices.Delete(have, i, i+1)
	}
	if len(have) > 0 {
		return fmt.Errorf("%w: a sandbox that goes on from memory has the mounts that it had, and %s is missing", sandbox.ErrInvalid, have[0].Destination)
	}
	return nil
}

// createSnapshotFiles makes the files that a sentry is to fill.
func createSnapshotFiles(dir string, k kind) (fs []*os.File, err error) {
	names := snapshotFiles(k)
	for i, name := range names {
		flags := os.O_CREATE | os.O_EXCL | os.O_RDWR
		path := filepath.Join(dir, name)
		var f *os.File
		if i == len(names)-1 {
			// Past the page cache: it would be charged to the sandbox, and
			// writing it out takes four times as long.
			f, err = os.OpenFile(path, flags|unix.O_DIRECT, 0o600)
			if errors.Is(err, unix.EINVAL) { // a file system that cannot; it may have made the file
				_ = os.Remove(path)
				f = nil
			}
		}
		if f == nil {
			f, err = os.OpenFile(path, flags, 0o600)
		}
		if err != nil {
			for _, f := range fs {
				f.Close()
			}
			return nil, fmt.Errorf("make snapshot: %w", err)
		}
		fs = append(fs, f)
	}
	return fs, nil
}

// readsDirect says whether to read a snapshot's pages past the page cache. That
// is faster for a large one, which is not in the cache since it was written past
// it, and spares the memory. But what is started from twice is a template's, and
// the cache is the place for its pages.
func (r *Runtime) readsDirect(dir *os.File) bool {
	const large, most = 32 << 20, 1024
	var st, pages unix.Stat_t
	if unix.Fstat(int(dir.Fd()), &st) != nil || unix.Fstatat(int(dir.Fd()), checkpointfiles.PagesFileName, &pages, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.started) >= most {
		clear(r.started)
	}
	k := [2]uint64{st.Dev, st.Ino}
	r.started[k]++
	return pages.Size > large && r.started[k] == 1
}

// syncDir makes the names in a directory durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
