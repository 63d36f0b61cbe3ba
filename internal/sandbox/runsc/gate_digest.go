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

// Digests computes the digests of programs. It keeps those of files that nothing in the
// sandbox can have written.
//
// gVisor can compute them as well. But its cache goes by number, size and time of a file:
// a program can set the time, and would keep the digest of what the file was before. And
// without the cache each start of a program reads its whole file, in Node's case 100 MB.
type digests struct {
	mu   sync.Mutex
	kept map[digestKey][sha256.Size]byte
}

// A digestKey names a file of the template.
type digestKey struct {
	path string
	ino  uint64
	size int64
}

const (
	maxDigests = 512
	// maxDigested is the size of the largest file with a digest, in bytes.
	maxDigested = 512 << 20
)

// of returns the digest of a program's file, or zero if it is not known: if the file has
// no path, or the path now leads to another one. A file that the sandbox can write may
// change after it was read, as long as the program runs.
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
	root := t.FSContext().RootDirectory()
	defer root.DecRef(t)
	f, err := t.Kernel().VFS().OpenAt(t, t.Credentials(), &vfs.PathOperation{Root: root, Start: root, Path: fspath.Parse(e.Path)},
		&vfs.OpenOptions{Flags: linux.O_RDONLY | linux.O_NONBLOCK | linux.O_NOFOLLOW, FileExec: true})
	if err != nil {
		return sum
	}
	defer f.DecRef(t)
	// The attack: another thread puts another file there, so that its digest is taken for
	// that of the program, and kept.
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
