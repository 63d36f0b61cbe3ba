package gvisor

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
)

// joinedImages keeps joined images open, see [erofs.WriteJoined]. Each opening of one has
// pages of its own in the host's page cache. So the server opens it once, and all
// sandboxes get that file. The image is not mounted anywhere, and it is gone with the
// last process that has it open.
type joinedImages struct {
	mu   sync.Mutex
	open map[string]joinedImage // by path
}

type joinedImage struct {
	at   os.FileInfo // of the file at the path when it was opened
	file *os.File
}

// add adds the image to an order and its files, if it is a joined one. The caller calls
// release once the files were sent.
func (j *joinedImages) add(order *launch.Order, files []*os.File, i sandbox.Image) (_ []*os.File, release func(), err error) {
	f, err := j.file(i.Root)
	if f == nil || err != nil {
		return files, func() {}, err
	}
	order.Joined = true
	return append(files, f), func() { _ = f.Close() }, nil
}

// maxJoined bounds how many joined images are kept open.
const maxJoined = 256

// file returns the image at path as one file if it is joined, and nil if it is another
// one, which the launcher opens by its path. The caller closes the file.
func (j *joinedImages) file(path string) (*os.File, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.dropLocked()
	if path == "" {
		return nil, nil //nolint:nilnil // no image
	}
	i, ok := j.open[path]
	if !ok {
		parts, err := erofs.Parts(path)
		if err != nil || len(parts) == 0 {
			return nil, err
		}
		image, err := erofs.Open(path)
		if err != nil {
			return nil, err
		}
		i.file = image.File
		if i.at, err = os.Stat(path); err != nil {
			return nil, errors.Join(err, image.Close())
		}
		for old := range j.open {
			if len(j.open) < maxJoined {
				break
			}
			j.closeLocked(old)
		}
		if j.open == nil {
			j.open = map[string]joinedImage{}
		}
		j.open[path] = i
	}
	fd, err := unix.FcntlInt(i.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor of image %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// dropLocked closes the images whose files were removed, so that their disk space is
// free when the last sandbox has ended.
func (j *joinedImages) dropLocked() {
	for path, i := range j.open {
		if at, err := os.Stat(path); err != nil || !os.SameFile(at, i.at) {
			j.closeLocked(path)
		}
	}
}

func (j *joinedImages) closeLocked(path string) {
	_ = j.open[path].file.Close() // nothing was written to it
	delete(j.open, path)
}

// drop is dropLocked for callers without the lock.
func (j *joinedImages) drop() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.dropLocked()
}
