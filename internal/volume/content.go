package volume

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A Kind is the kind of an entry of a volume.
type Kind string

// The kinds of entries. Pipes, sockets and devices are Unknown: they can be listed
// and removed but not opened.
const (
	Unknown   Kind = "unknown"
	File      Kind = "file"
	Directory Kind = "directory"
	Symlink   Kind = "symlink"
)

// An Entry is a file or directory of a volume. Its name comes from a sandbox and
// may hold any byte but "/" and NUL.
type Entry struct {
	Name   string
	Path   string // absolute; the volume's root is "/"
	Kind   Kind
	Size   int64  // bytes
	Mode   uint32 // the permission bits
	UID    uint32
	GID    uint32
	Access time.Time
	Modify time.Time
	Change time.Time
	Target string // of a Symlink
}

// Attributes are the owner and mode for a file or directory. Nil means no change,
// or the default for a new one.
type Attributes struct {
	UID  *uint32
	GID  *uint32
	Mode *uint32 // permission bits only
}

// Defaults for new entries. Everybody in a sandbox may use them.
const (
	defaultFileMode = 0o666
	defaultDirMode  = 0o777
)

// check returns an error that wraps [ErrInvalid] if an attribute is out of range.
func (a Attributes) check() error {
	switch {
	case a.Mode != nil && *a.Mode > 0o777:
		return fmt.Errorf("%w: mode: %#o has more than permission bits", ErrInvalid, *a.Mode)
	case a.UID != nil && *a.UID == math.MaxUint32:
		return fmt.Errorf("%w: uid: %d is not a user ID", ErrInvalid, *a.UID)
	case a.GID != nil && *a.GID == math.MaxUint32:
		return fmt.Errorf("%w: gid: %d is not a group ID", ErrInvalid, *a.GID)
	}
	return nil
}

// or returns a with defaults for the unset attributes.
func (a Attributes) or(mode uint32) Attributes {
	id := uint32(ownerID)
	if a.UID == nil {
		a.UID = &id
	}
	if a.GID == nil {
		a.GID = &id
	}
	if a.Mode == nil {
		a.Mode = &mode
	}
	return a
}

// apply sets the given attributes on the open file f: its path may be another
// file's by now. The mode comes last, since changing the owner clears bits of it.
func (a Attributes) apply(f *os.File) error {
	id := func(v *uint32) int {
		if v == nil {
			return -1
		}
		return int(*v)
	}
	if a.UID != nil || a.GID != nil {
		if err := f.Chown(id(a.UID), id(a.GID)); err != nil {
			return err
		}
	}
	if a.Mode != nil {
		return f.Chmod(os.FileMode(*a.Mode))
	}
	return nil
}

// Content is the files of one volume. Every path is hostile, the caller's and those
// that a sandbox made, and may change between two system calls. None may lead out
// of the volume.
type Content struct {
	disk *disk
	// Set once, and valid until Close.
	root     *os.Root
	incoming *os.File
}

// Content opens the files of volume id. The caller has checked the right to it, and
// must close it.
func (s *Store) Content(ctx context.Context, id string) (*Content, error) {
	d, err := s.open(ctx, id)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return &Content{disk: d, root: d.root, incoming: d.incoming}, nil
}

// Close releases the volume.
func (c *Content) Close() { c.disk.release() }

// clean returns a caller's path relative to the volume's root.
func clean(p string) (string, error) {
	if p == "" {
		return "", fmt.Errorf("%w: path is missing", ErrInvalid)
	}
	if len(p) > 4096 || strings.ContainsRune(p, 0) {
		return "", fmt.Errorf("%w: path is longer than 4096 bytes or holds a NUL", ErrInvalid)
	}
	p = path.Clean("/" + p) // ".." stops at the root
	if p == "/" {
		return ".", nil
	}
	return p[1:], nil
}

// pathError maps the error of a system call on a path to an error of this package.
func pathError(what, p string, err error) error {
	p = "/" + strings.TrimPrefix(p, ".")
	var pe *fs.PathError
	var no unix.Errno
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s %q: %w", what, p, ErrNoPath)
	case errors.Is(err, unix.ENOTEMPTY):
		return fmt.Errorf("%s %q: %w: it is a directory that is not empty", what, p, ErrInvalid)
	case errors.Is(err, fs.ErrExist):
		return fmt.Errorf("%s %q: it %w", what, p, ErrExists)
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("%s %q: %w in the volume", what, p, ErrFull)
	case errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("%s %q: %w: a part of the path is not a directory", what, p, ErrInvalid)
	case errors.Is(err, unix.EISDIR):
		return fmt.Errorf("%s %q: %w: it is a directory", what, p, ErrInvalid)
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.EACCES), errors.Is(err, unix.ENODEV):
		return fmt.Errorf("%s %q: %w: it is not a regular file", what, p, ErrInvalid)
	case errors.Is(err, unix.ENAMETOOLONG):
		return fmt.Errorf("%s %q: %w: a name is longer than 255 bytes", what, p, ErrInvalid)
	case errors.Is(err, unix.ELOOP):
		return fmt.Errorf("%s %q: %w: too many links on the way", what, p, ErrInvalid)
	case errors.As(err, &pe) && !errors.As(err, &no):
		// From os.Root itself.
		return fmt.Errorf("%s %q: %w: a link on the way leads out of the volume", what, p, ErrInvalid)
	}
	return fmt.Errorf("%s %q: %w", what, p, err)
}

// look describes an open file.
func look(f *os.File, p string) (Entry, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Entry{}, err
	}
	return entry(&st, p), nil
}

// entry returns the Entry for the kernel's description of p, which is relative.
func entry(st *unix.Stat_t, p string) Entry {
	e := Entry{
		Name: path.Base(p), Path: "/" + p, Kind: Unknown, Size: st.Size, Mode: st.Mode & 0o777, UID: st.Uid, GID: st.Gid,
		Access: time.Unix(st.Atim.Unix()).UTC(), Modify: time.Unix(st.Mtim.Unix()).UTC(), Change: time.Unix(st.Ctim.Unix()).UTC(),
	}
	if p == "." {
		e.Name, e.Path = "/", "/"
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		e.Kind = File
	case unix.S_IFDIR:
		e.Kind = Directory
	case unix.S_IFLNK:
		e.Kind = Symlink
	}
	return e
}

// openDir opens a directory and follows links within the volume. [os.Root.OpenRoot]
// would hang on a pipe; O_DIRECTORY refuses it.
func (c *Content) openDir(p string) (*os.File, error) {
	return c.root.OpenFile(p, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
}

// Stat describes p itself, even if it is a link.
func (c *Content) Stat(p string) (Entry, error) {
	p, err := clean(p)
	if err != nil {
		return Entry{}, err
	}
	if p == "." {
		d, err := c.openDir(p)
		if err != nil {
			return Entry{}, pathError("look at", p, err)
		}
		defer d.Close()
		return look(d, p)
	}
	dir, err := c.openDir(path.Dir(p))
	if err != nil {
		return Entry{}, pathError("look at", p, err)
	}
	defer dir.Close()
	e, err := statAt(dir, path.Base(p), p)
	return e, pathError("look at", p, err)
}

// statAt describes name in dir, whose path is p.
func statAt(dir *os.File, name, p string) (Entry, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return Entry{}, err
	}
	e := entry(&st, p)
	if e.Kind == Symlink {
		buf := make([]byte, unix.PathMax)
		// It may have been replaced; then it has no target.
		if n, err := unix.Readlinkat(int(dir.Fd()), name, buf); err == nil {
			e.Target = string(buf[:n])
		}
	}
	return e, nil
}

// The limits of a listing.
const (
	maxDepth   = 10
	maxEntries = 1 << 16
)

// List returns the entries of the directory p, and of directories below it down to
// depth levels; 0 means 1. Each directory comes before its entries.
func (c *Content) List(ctx context.Context, p string, depth int) ([]Entry, error) {
	p, err := clean(p)
	if err != nil {
		return nil, err
	}
	if depth < 0 || depth > maxDepth {
		return nil, fmt.Errorf("%w: depth must be between 1 and %d", ErrInvalid, maxDepth)
	}
	dir, err := c.openDir(p)
	if err != nil {
		return nil, pathError("list", p, err)
	}
	defer dir.Close()
	out := []Entry{}
	err = list(ctx, dir, strings.TrimPrefix(p, "."), max(1, depth), &out)
	return out, pathError("list", p, err)
}

// list appends the entries of dir, whose path is p, and descends until depth is 0.
func list(ctx context.Context, dir *os.File, p string, depth int, out *[]Entry) error {
	var names []string
	for {
		some, err := dir.Readdirnames(1024)
		names = append(names, some...)
		if len(names)+len(*out) > maxEntries {
			return fmt.Errorf("%w: there are more than %d entries; list a directory below, or fewer levels", ErrInvalid, maxEntries)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	slices.Sort(names)
	for _, name := range names {
		e, err := statAt(dir, name, path.Join(p, name))
		if errors.Is(err, unix.ENOENT) {
			continue // removed since
		}
		if err != nil {
			return err
		}
		*out = append(*out, e)
		if e.Kind != Directory || depth == 1 {
			continue
		}
		fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			continue // not a directory any more
		}
		sub := os.NewFile(uintptr(fd), name)
		err = list(ctx, sub, path.Join(p, name), depth-1, out)
		sub.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// MakeDir makes the directory p. With force it also makes missing parents, and an
// existing directory is not an error.
func (c *Content) MakeDir(p string, a Attributes, force bool) (Entry, error) {
	p, err := clean(p)
	if err != nil {
		return Entry{}, err
	}
	if err := a.check(); err != nil {
		return Entry{}, err
	}
	a = a.or(defaultDirMode)
	if force {
		if err := c.makeParents(p, a); err != nil {
			return Entry{}, pathError("make directory", p, err)
		}
	}
	err = c.mkdir(p, a)
	if err != nil && (!force || !errors.Is(err, fs.ErrExist)) {
		return Entry{}, pathError("make directory", p, err)
	}
	d, derr := c.openDir(p)
	if errors.Is(derr, unix.ENOTDIR) && err != nil {
		derr = err // something else exists there
	}
	if derr != nil {
		return Entry{}, pathError("make directory", p, derr)
	}
	defer d.Close()
	e, err := look(d, p)
	return e, pathError("make directory", p, err)
}

// mkdir makes one directory.
func (c *Content) mkdir(p string, a Attributes) error {
	if p == "." {
		return fs.ErrExist
	}
	if err := c.root.Mkdir(p, 0o700); err != nil {
		return err
	}
	d, err := c.openDir(p)
	if err != nil {
		return err
	}
	defer d.Close()
	return a.apply(d)
}

// makeParents makes the missing directories above p.
func (c *Content) makeParents(p string, a Attributes) error {
	mode := uint32(defaultDirMode)
	a.Mode = &mode
	for i, r := range p {
		if r != '/' {
			continue
		}
		if err := c.mkdir(p[:i], a); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// Open opens the regular file p for reading.
func (c *Content) Open(p string) (*os.File, Entry, error) {
	p, err := clean(p)
	if err != nil {
		return nil, Entry{}, err
	}
	f, e, err := c.openFile(p, File)
	return f, e, pathError("open", p, err)
}

// openFile opens p if it is of one of the kinds. O_NONBLOCK is needed since a pipe
// that a sandbox left would block the caller forever. The kind is checked on the
// open file, not the path, which a sandbox may replace in between.
func (c *Content) openFile(p string, kinds ...Kind) (*os.File, Entry, error) {
	f, err := c.root.OpenFile(p, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, Entry{}, err
	}
	e, err := look(f, p)
	if err == nil && !slices.Contains(kinds, e.Kind) {
		err = unix.ENXIO
		if e.Kind == Directory {
			err = unix.EISDIR
		}
	}
	if err != nil {
		return nil, Entry{}, errors.Join(err, f.Close())
	}
	return f, e, nil
}

// SetAttributes changes owner and mode of the file or directory p.
func (c *Content) SetAttributes(p string, a Attributes) (Entry, error) {
	p, err := clean(p)
	if err != nil {
		return Entry{}, err
	}
	if err := a.check(); err != nil {
		return Entry{}, err
	}
	f, _, err := c.openFile(p, File, Directory)
	if err != nil {
		return Entry{}, pathError("change", p, err)
	}
	defer f.Close()
	if err := a.apply(f); err != nil {
		return Entry{}, pathError("change", p, err)
	}
	e, err := look(f, p)
	return e, pathError("change", p, err)
}

// Write creates the regular file p with the content of r. Without force p must not
// exist. With force it is replaced, and missing parents are made. The file appears
// when all of it is on disk; if r fails nothing is left.
func (c *Content) Write(p string, r io.Reader, a Attributes, force bool) (Entry, error) {
	p, err := clean(p)
	if err != nil {
		return Entry{}, err
	}
	if err := a.check(); err != nil {
		return Entry{}, err
	}
	if p == "." {
		return Entry{}, pathError("write", p, unix.EISDIR)
	}
	a = a.or(defaultFileMode)
	if force {
		if err := c.makeParents(p, a); err != nil {
			return Entry{}, pathError("write", p, err)
		}
	}
	// Check before reading the content, to refuse early. The rename decides.
	dir, err := c.openDir(path.Dir(p))
	if err != nil {
		return Entry{}, pathError("write", p, err)
	}
	defer dir.Close()
	switch old, err := statAt(dir, path.Base(p), p); {
	case errors.Is(err, unix.ENOENT):
	case err != nil:
		return Entry{}, pathError("write", p, err)
	case old.Kind == Directory:
		return Entry{}, pathError("write", p, unix.EISDIR)
	case !force:
		return Entry{}, pathError("write", p, fs.ErrExist)
	}
	return c.receive(dir, p, r, a, force)
}

// receive writes r to a file in incoming, syncs it, and renames it to p in dir.
func (c *Content) receive(dir *os.File, p string, r io.Reader, a Attributes, force bool) (_ Entry, err error) {
	name := "new" + rand.Text()
	fd, err := unix.Openat(int(c.incoming.Fd()), name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return Entry{}, pathError("write", p, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	defer func() {
		if err != nil {
			_ = unix.Unlinkat(int(c.incoming.Fd()), name, 0) // otherwise the next mount removes it
		}
	}()
	if _, err := io.CopyBuffer(struct{ io.Writer }{f}, r, make([]byte, 256<<10)); err != nil {
		return Entry{}, pathError("write", p, err)
	}
	if err := a.apply(f); err != nil {
		return Entry{}, pathError("write", p, err)
	}
	if err := f.Sync(); err != nil {
		return Entry{}, pathError("write", p, err)
	}
	flags := uint(0)
	if !force {
		flags = unix.RENAME_NOREPLACE
	}
	if err := unix.Renameat2(int(c.incoming.Fd()), name, int(dir.Fd()), path.Base(p), flags); err != nil {
		return Entry{}, pathError("write", p, err)
	}
	if err := dir.Sync(); err != nil {
		return Entry{}, pathError("write", p, err)
	}
	e, err := look(f, p)
	return e, pathError("write", p, err)
}

// Remove removes p, with its content if it is a directory. For all others it
// disappears at once.
func (c *Content) Remove(ctx context.Context, p string) error {
	p, err := clean(p)
	if err != nil {
		return err
	}
	if p == "." {
		return fmt.Errorf("%w: the root of a volume cannot be removed", ErrInvalid)
	}
	dir, err := c.openDir(path.Dir(p))
	if err != nil {
		return pathError("remove", p, err)
	}
	defer dir.Close()
	if _, err := statAt(dir, path.Base(p), p); err != nil {
		return pathError("remove", p, err)
	}
	// A file is removed at once, also if the volume is too full to move it.
	err = remove(int(dir.Fd()), path.Base(p))
	if !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
		return pathError("remove", p, err)
	}
	old := "old" + rand.Text()
	if err := unix.Renameat(int(dir.Fd()), path.Base(p), int(c.incoming.Fd()), old); err != nil {
		return pathError("remove", p, err)
	}
	return pathError("remove", p, clear(ctx, c.incoming, old))
}
