package volume

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A disk is a volume's part on this machine:
//
//	<store's directory>/<id>/image          its file system, sparse
//	<store's directory>/<id>/mnt            its mount point
//	<store's directory>/<id>/mnt/files      what sandboxes and callers see
//	<store's directory>/<id>/mnt/incoming   incomplete uploads, and what is
//	                                        being removed
type disk struct {
	id  string
	dir string

	mu       sync.Mutex // guards what follows, and mounting
	root     *os.Root   // files; nil if it is not mounted by us
	incoming *os.File   // the directory
	handles  int        // opened and not released
	users    map[string]bool
	since    time.Time // time of the last use
	gone     bool      // it is being deleted
}

func (d *disk) image() string { return filepath.Join(d.dir, "image") }
func (d *disk) mnt() string   { return filepath.Join(d.dir, "mnt") }
func (d *disk) files() string { return filepath.Join(d.dir, "mnt", "files") }

// disk returns the disk of a volume. It does not mount it.
func (s *Store) disk(id string) *disk {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.disks[id]
	if d == nil {
		d = &disk{id: id, dir: filepath.Join(s.conf.Dir, id), users: map[string]bool{}}
		s.disks[id] = d
	}
	return d
}

// open returns the volume's disk, mounted until it is released.
func (s *Store) open(ctx context.Context, id string) (*disk, error) {
	if !idPattern().MatchString(id) {
		return nil, fmt.Errorf("%w: %q", ErrNotFound, id) // it becomes a path
	}
	d := s.disk(id)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone {
		return nil, fmt.Errorf("%w: %s", ErrNotFound, id)
	}
	if d.root == nil {
		if err := d.mountLocked(ctx); err != nil {
			return nil, fmt.Errorf("mount volume %s: %w", id, err)
		}
	}
	d.handles++
	return d, nil
}

// release ends a use that open began.
func (d *disk) release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.handles--
	d.since = time.Now()
	if d.gone && d.handles == 0 {
		d.closeLocked()
	}
}

// use keeps the disk mounted until unuse.
func (d *disk) use(sandbox string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone {
		return fmt.Errorf("%w: %s", ErrNotFound, d.id)
	}
	d.users[sandbox] = true
	return nil
}

// unuse ends the use by a sandbox.
func (d *disk) unuse(sandbox string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.users[sandbox] {
		delete(d.users, sandbox)
		d.since = time.Now()
	}
}

// rest unmounts a disk that has not been used for age.
func (d *disk) rest(age time.Duration) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.root == nil || d.handles > 0 || len(d.users) > 0 || time.Since(d.since) < age {
		return nil
	}
	d.closeLocked()
	return detach(d.mnt())
}

// closeLocked closes our handles. The mount stays.
func (d *disk) closeLocked() {
	if d.root != nil {
		d.root.Close()
		d.incoming.Close()
		d.root, d.incoming = nil, nil
	}
}

// detach removes a mount. If a sandbox still has it in the mount namespace of its
// gofer, the file system and its loop device stay.
func detach(dir string) error {
	err := unix.Unmount(dir, unix.MNT_DETACH)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // not mounted, or missing
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	return nil
}

// unmount removes the mount of a volume that no row uses.
func (s *Store) unmount(id string) error {
	d := s.disk(id)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closeLocked()
	return detach(d.mnt())
}

// make creates a volume's disk and mounts it once, so that a machine that cannot
// have volumes fails here.
func (s *Store) make(ctx context.Context, v Volume) error {
	d := s.disk(v.ID)
	if err := os.Mkdir(d.dir, 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	f, err := os.OpenFile(d.image(), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	defer f.Close()
	if err := f.Truncate(v.SizeMB << 20); err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	if err := format(ctx, d.image()); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	if _, err := s.open(ctx, v.ID); err != nil {
		return err
	}
	d.release()
	return nil
}

// format creates an empty file system. It has a journal against power loss, and
// uses disk only for what is written.
func format(ctx context.Context, image string) error {
	mkfs, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		for _, p := range []string{"/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"} { // PATH may lack them
			if _, serr := os.Stat(p); serr == nil {
				mkfs, err = p, nil
				break
			}
		}
	}
	if err != nil {
		return fmt.Errorf("%w: there is no mkfs.ext4; install e2fsprogs", ErrUnsupported)
	}
	cmd := exec.CommandContext(ctx, mkfs, "-q", "-F", "-b", "4096", "-m", "0", "-E", "lazy_journal_init=1,root_owner=0:0", image) //nolint:gosec // a path of ours
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	if out, err := cmd.CombinedOutput(); err != nil {
		if errors.Is(hostFull(filepath.Dir(image)), unix.ENOSPC) {
			return fmt.Errorf("%w on the machine's disk", ErrFull)
		}
		return fmt.Errorf("make file system: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// hostFull reports whether the file system of dir is full.
func hostFull(dir string) error {
	if free, err := freeMB(dir); err == nil && free == 0 {
		return unix.ENOSPC
	}
	return nil
}

// mountFlags protect the host from the content of a volume: device files are inert,
// set-user-ID bits have no effect, and the kernel follows no symbolic links. Not
// noexec, since the sentry maps programs that a sandbox starts from a volume.
const mountFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOSYMFOLLOW | unix.MS_RELATIME

// mountLocked mounts the image, unless it is mounted already.
func (d *disk) mountLocked(ctx context.Context) error {
	if _, err := os.Stat(d.image()); err != nil {
		return fmt.Errorf("find its image on this machine: %w", err)
	}
	if err := os.Mkdir(d.mnt(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make mount point: %w", err)
	}
	mounted, err := mountsBelow(filepath.Dir(d.dir))
	if err != nil {
		return err
	}
	if !slices.Contains(mounted, d.id) { // otherwise a killed process of this program has mounted it
		dev, err := attach(d.image())
		if err != nil {
			return err
		}
		// Discard returns deleted blocks to the host's disk. After an error of the
		// host's disk the file system becomes read-only.
		err = unix.Mount(dev.Name(), d.mnt(), "ext4", mountFlags, "discard,errors=remount-ro")
		dev.Close() // the mount keeps the device
		if err != nil {
			return fmt.Errorf("mount %s: %w", dev.Name(), err)
		}
	}
	if err := d.openLocked(ctx); err != nil {
		d.closeLocked()
		return errors.Join(err, detach(d.mnt()))
	}
	d.since = time.Now()
	return nil
}

// ownerID is the default user and group of what callers write: the user "user" of
// the templates.
const ownerID = 1000

// openLocked opens the directories of a mounted disk, creates them if the disk is
// new, and removes what a killed process left in incoming.
func (d *disk) openLocked(ctx context.Context) (err error) {
	for _, dir := range []struct {
		name string
		mode os.FileMode
		id   int
	}{{"files", 0o777, ownerID}, {"incoming", 0o700, 0}} {
		p := filepath.Join(d.mnt(), dir.name)
		err := os.Mkdir(p, 0o700)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err == nil {
			err = errors.Join(os.Chown(p, dir.id, dir.id), os.Chmod(p, dir.mode))
		}
		if err != nil {
			return fmt.Errorf("prepare file system: %w", err)
		}
	}
	incoming, err := os.Open(filepath.Join(d.mnt(), "incoming"))
	if err != nil {
		return fmt.Errorf("open file system: %w", err)
	}
	root, err := os.OpenRoot(d.files())
	if err != nil {
		return errors.Join(fmt.Errorf("open file system: %w", err), incoming.Close())
	}
	d.root, d.incoming = root, incoming
	// What a killed process was receiving or removing. It is invisible. The
	// volume's first user waits for this, so it has a time-out, and the next mount
	// continues.
	ctx, cancel := context.WithTimeout(ctx, tidyTimeout)
	defer cancel()
	names, err := incoming.Readdirnames(-1)
	for _, name := range names {
		if err == nil {
			err = clear(ctx, incoming, name)
		}
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("tidy file system: %w", err)
	}
	return nil
}

const tidyTimeout = 5 * time.Second

// discard removes a volume's disk. Open handles keep working on a file system that
// is otherwise gone; its space is free when they are released.
func (s *Store) discard(id string) error {
	d := s.disk(id)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gone = true
	if d.handles == 0 {
		d.closeLocked()
	}
	if err := detach(d.mnt()); err != nil {
		return err
	}
	// Not RemoveAll: if the mount still existed it would remove the files in it.
	for _, p := range []string{d.mnt(), d.image(), d.dir} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove volume: %w", err)
		}
	}
	s.mu.Lock()
	delete(s.disks, id)
	s.mu.Unlock()
	return nil
}

// attach returns a loop device for image: the existing one, or a new one. It stays
// as long as it is open or mounted.
func attach(image string) (*os.File, error) {
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open image: %w", err)
	}
	defer f.Close()
	if dev, err := attached(f); dev != nil || err != nil {
		return dev, err
	}
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %w; loop devices are needed (modprobe loop, or run the container privileged)", ErrUnsupported, err)
	}
	defer ctl.Close()
	for try := 0; ; try++ {
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find free loop device: %w", err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("%w: %w; the loop devices are not in /dev", ErrUnsupported, err)
		}
		// Direct I/O: the host's page cache does not hold everything twice, and a
		// write that does not fit on the host's disk fails at once instead of after
		// it was accepted.
		conf := unix.LoopConfig{Fd: uint32(f.Fd()), Size: 4096, Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO}}
		copy(conf.Info.File_name[:len(conf.Info.File_name)-1], filepath.Base(filepath.Dir(image)))
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &conf)
		if err == nil {
			return dev, nil
		}
		dev.Close()
		// Another program may have taken the device.
		if !errors.Is(err, unix.EBUSY) || try == 20 {
			return nil, fmt.Errorf("configure loop device %d: %w", n, err)
		}
	}
}

// attached returns the loop device of image, or nil. It compares inodes, which are
// the same in every mount namespace.
func attached(image *os.File) (*os.File, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &st); err != nil {
		return nil, fmt.Errorf("examine image: %w", err)
	}
	used, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil { // the pattern is constant
		return nil, err
	}
	for _, p := range used {
		name := filepath.Join("/dev", strings.Split(p, "/")[3])
		dev, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			continue // gone, or not ours to write to
		}
		info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
		if err == nil && info.Inode == st.Ino && info.Device == st.Dev {
			return dev, nil
		}
		dev.Close()
	}
	return nil, nil //nolint:nilnil // no device is a valid result
}

// mountsBelow returns the IDs of the volumes in dir that are mounted.
func mountsBelow(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	defer f.Close()
	var ids []string
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		fields := strings.Fields(sc.Text())
		if len(fields) < 5 {
			continue
		}
		rest, ok := strings.CutPrefix(unescape(fields[4]), dir+"/")
		if id, isMnt := strings.CutSuffix(rest, "/mnt"); ok && isMnt && idPattern().MatchString(id) {
			ids = append(ids, id)
		}
	}
	return ids, sc.Err()
}

// unescape decodes a path from the kernel's table of mounts.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// freeMB returns the free space of dir's file system in mebibytes.
func freeMB(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("measure free space: %w", err)
	}
	return int64(st.Bavail) * st.Bsize >> 20, nil
}

// used returns how many mebibytes of the host's disk a volume uses.
func (s *Store) used(id string) int64 {
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(s.conf.Dir, id, "image"), &st); err != nil {
		return 0
	}
	return (st.Blocks*512 + 1<<20 - 1) >> 20
}

// clear removes name in dir, a directory that nobody else writes to, and everything
// below it.
//
// The attack: a sandbox leaves directories nested a hundred thousand levels deep, and
// descending needs an open file for each level; or it keeps writing while we remove.
// So directories below are moved up into dir and removed from there, which needs two
// open files at any depth, and ctx limits the time.
// takes two open files at any depth, and ctx bounds the time.
func clear(ctx context.Context, dir *os.File, name string) error {
	at := int(dir.Fd())
	for stack := []string{name}; len(stack) > 0; {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		top := stack[len(stack)-1]
		err := remove(at, top)
		if err == nil {
			stack = stack[:len(stack)-1]
			continue
		}
		if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("remove: %w", err)
		}
		moved, err := hollow(ctx, at, top)
		if err != nil {
			return err
		}
		stack = append(stack, moved...)
	}
	return nil
}

// remove removes one entry: a file of any kind, or an empty directory.
func remove(at int, name string) error {
	err := unix.Unlinkat(at, name, 0)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
		err = unix.Unlinkat(at, name, unix.AT_REMOVEDIR)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// hollow empties the directory name. It moves a limited number of its non-empty
// subdirectories next to it, and returns their names.
func hollow(ctx context.Context, at int, name string) (moved []string, err error) {
	const most = 64
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open what is removed: %w", err)
	}
	d := os.NewFile(uintptr(fd), name)
	defer d.Close()
	for len(moved) < most && ctx.Err() == nil {
		names, err := d.Readdirnames(256)
		if len(names) == 0 {
			return moved, nil // the end, or an error that the next removal reports
		}
		if err != nil {
			return moved, fmt.Errorf("read what is removed: %w", err)
		}
		for _, n := range names {
			err := remove(fd, n)
			if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
				to := "old" + rand.Text()
				if err = unix.Renameat(fd, n, at, to); err == nil {
					moved = append(moved, to)
				}
			}
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return moved, fmt.Errorf("remove %q: %w", n, err)
			}
		}
	}
	return moved, nil
}
