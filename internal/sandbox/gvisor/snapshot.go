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
	"postern/internal/sandbox/launch"
)

const (
	// snapshotFormat is the version of a snapshot's directory and of everything
	// about a sandbox that its specification does not say: a sandbox restored from
	// memory has the mounts and rights of the saved one.
	snapshotFormat = 1
	// gvisorVersion is the version of gVisor's module. A sentry can only read the
	// state written by its own version, since it consists of Go structures.
	gvisorVersion = "v0.0.0-20260905035102-160fafc42237"

	snapshotFile = "snapshot.json"
	maxSnapshot  = 64 << 10 // bytes of snapshotFile
)

// A kind is the kind of content of a snapshot.
type kind = launch.Kind

const (
	kindMemory = launch.Memory
	kindFiles  = launch.Files
)

// A snapshot is the content of snapshot.json, which this program writes, not a
// sentry.
type snapshot struct {
	Format int             `json:"format"`
	GVisor string          `json:"gvisor"`
	Kind   kind            `json:"kind"`
	Mounts []snapshotMount `json:"mounts"`
	// Images are the names of the images that the sandbox's root file system
	// consisted of. Empty means that it was a directory.
	Images imageNames `json:"images,omitzero"`
}

type snapshotMount struct {
	Destination string `json:"destination"`
	ReadOnly    bool   `json:"readOnly"`
}

// snapshotFiles returns the files that the sentry writes and reads, in the order of
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

// openSnapshot opens a directory that Save wrote, and reads its snapshot.json. Its
// error says if s cannot be started from it.
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
		return fail(fmt.Errorf("%s is not a snapshot: it has no %s", dir, snapshotFile))
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

// fits returns an error if a sandbox cannot be started from the snapshot.
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
		return nil // a boot, which may have any mounts
	}
	// Files that were open in a mount must exist again, and the sandbox's table of
	// mounts is in its memory, so a new mount would not appear in it.
	have := slices.Clone(snap.Mounts)
	for _, m := range s.Mounts {
		i := slices.Index(have, snapshotMount{m.Destination, m.ReadOnly})
		if i < 0 {
			return fmt.Errorf("%w: a sandbox restored from memory must have its old mounts, and %s (read-only: %v) is not one of them", sandbox.ErrInvalid, m.Destination, m.ReadOnly)
		}
		have = slices.Delete(have, i, i+1)
	}
	if len(have) > 0 {
		return fmt.Errorf("%w: a sandbox restored from memory must have its old mounts, and %s is missing", sandbox.ErrInvalid, have[0].Destination)
	}
	return nil
}

// createSnapshotFiles creates the files that a sentry fills. With cached, pages go
// through the page cache, see [Runtime.fitsCache].
func createSnapshotFiles(dir string, k kind, cached bool) (fs []*os.File, err error) {
	names := snapshotFiles(k)
	for i, name := range names {
		flags := os.O_CREATE | os.O_EXCL | os.O_RDWR
		path := filepath.Join(dir, name)
		var f *os.File
		if i == len(names)-1 && !cached {
			// Without the page cache: its memory would be charged to the sandbox,
			// and writing it out takes four times as long.
			f, err = os.OpenFile(path, flags|unix.O_DIRECT, 0o600)
			if errors.Is(err, unix.EINVAL) { // not supported by the file system; the file may exist now
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

// readsDirect reports whether to read a snapshot's pages without the page cache.
// That is faster for a large snapshot, which is not in the cache since it was
// written without it, and saves memory. But a snapshot that is started from twice
// belongs to a template, and its pages should be cached.
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

// fitsCache reports whether what a sandbox is saved to may stay in the page cache
// until it is written by the kernel in its own time, or removed. That memory is the
// sandbox's, whose limit must not be reached by it: then the kernel would end the
// sandbox. So there must be room for everything that it uses once more.
func (r *Runtime) fitsCache(id string) bool {
	const most, spare = 256 << 20, 32 << 20
	used, err := r.cgroups.memoryUsed(id)
	if err != nil || used > most {
		return false
	}
	room, err := r.cgroups.memoryRoom(id)
	return err == nil && used+spare <= room
}

// willRepeat notes that a snapshot will be started from several times, so that its
// pages are read through the page cache from the first time on.
func (r *Runtime) willRepeat(dir string) {
	var st unix.Stat_t
	if unix.Stat(dir, &st) != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.started[[2]uint64{st.Dev, st.Ino}]++
}

// syncDir syncs the names in a directory to disk.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
