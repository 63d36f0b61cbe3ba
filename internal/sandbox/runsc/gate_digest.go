package runsc

import (
	"crypto/sha256"
	"errors"
	"io"
	"sync"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/fspath"
	"gvisor.dev/gvisor/pkg/sentry/fsimpl/overlay"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	pb "gvisor.dev/gvisor/pkg/sentry/seccheck/points/points_go_proto"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
	"gvisor.dev/gvisor/pkg/usermem"

	"postern/internal/sandbox/launch"
)

// digests computes the SHA-256 of programs' files. It caches the digests of files that
// nothing in the sandbox can have written.
//
// gVisor computes digests as well, but the key of its cache is the inode, size and time of
// a file. A program can set the time, so that a changed file keeps its old digest. Without
// a cache each start of a program reads the whole file: 100 MB for Node.
type digests struct {
	mu   sync.Mutex
	kept map[digestKey][sha256.Size]byte
}

// A digestKey identifies a file of the template.
type digestKey struct {
	path string
	ino  uint64
	size int64
}

const (
	maxDigests = 512 // entries in the cache
	// maxDigested is the size in bytes of the largest file that gets a digest.
	maxDigested = 512 << 20
)

// of returns the digest of a program's file. It returns zero if the file has no path, is
// too large, cannot be read, or is no longer at its path. A file that the sandbox can write
// may change between the digest and the exec.
func (d *digests) of(t *kernel.Task, e launch.Event, info *pb.ExecveInfo) (sum [sha256.Size]byte) {
	if e.Path == "" {
		return sum
	}
	k := digestKey{e.Path, info.BinaryIno, info.BinarySize}
	if e.Fixed {
		d.mu.Lock()
		sum, ok := d.kept[k]
		d.mu.Unlock()
		if ok {
			return sum
		}
	}
	// Not the task's root directory, which another thread may have changed since the path was
	// found.
	root := t.MountNamespace().Root(t)
	if !root.Ok() {
		return sum
	}
	defer root.DecRef(t)
	f, err := t.Kernel().VFS().OpenAt(t, t.Credentials(), &vfs.PathOperation{Root: root, Start: root, Path: fspath.Parse(e.Path)},
		&vfs.OpenOptions{Flags: linux.O_RDONLY | linux.O_NONBLOCK | linux.O_NOFOLLOW, FileExec: true})
	if err != nil {
		return sum
	}
	defer f.DecRef(t)
	// The attack: another thread replaces the file, so that the digest of the replacement
	// is reported for the program, and cached.
	stat, err := f.Stat(t, vfs.StatOptions{Mask: linux.STATX_TYPE | linux.STATX_INO | linux.STATX_SIZE})
	if err != nil || stat.Mode&linux.S_IFMT != linux.S_IFREG || stat.Ino != k.ino || overlay.IsOnLower(f.Dentry()) != info.BinaryOverlayfsLower || stat.Size > maxDigested {
		return sum
	}
	h, b := sha256.New(), make([]byte, 256<<10)
	for off := int64(0); off < maxDigested; {
		n, err := f.PRead(t, usermem.BytesIOSequence(b), off, vfs.ReadOptions{})
		h.Write(b[:n])
		off += n
		if errors.Is(err, io.EOF) || err == nil && n == 0 {
			break
		}
		if err != nil {
			return sum
		}
	}
	h.Sum(sum[:0])
	if e.Fixed {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.kept == nil || len(d.kept) >= maxDigests {
			d.kept = map[digestKey][sha256.Size]byte{}
		}
		d.kept[k] = sum
	}
	return sum
}
