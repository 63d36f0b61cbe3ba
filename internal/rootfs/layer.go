package rootfs

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
)

// Layers are tar archives with whiteouts: OCI image specification, layer.md. An entry
// ".wh.NAME" removes NAME from the layers below, and ".wh..wh..opq" everything in its
// directory. Upper layers of the overlay file systems of gVisor and Linux are supported
// too: there a device 0:0 is a whiteout, and an extended attribute marks an opaque
// directory.

const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh." // of AUFS: metadata, not files
	whiteoutOpaque = ".wh..wh..opq"
)

// isOpaque reports whether a PAX record of an overlay marks a directory as opaque: it hides
// the contents of the layers below.
func isOpaque(h *tar.Header) bool {
	return h.Typeflag == tar.TypeDir &&
		(h.PAXRecords["SCHILY.xattr.trusted.overlay.opaque"] == "y" || h.PAXRecords["SCHILY.xattr.user.overlay.opaque"] == "y")
}

// Apply applies a layer to the tree: an uncompressed tar archive. The tree keeps a
// duplicate of the file open. The file must not change. If the archive is invalid, the
// error wraps [ErrInvalid]. After an error, the tree must only be closed.
//
// An entry below a symbolic link is stored where the link leads within the tree, as
// container runtimes do: in some images /lib is a link to /usr/lib, and a layer has entries
// in /lib. A link in the last part of a name is not followed. Missing parents are created.
func (t *Tree) Apply(layer *os.File, l Limits) error { return t.apply(layer, l, false) }

// apply implements Apply. With upper, the layer is the upper layer of an overlay, whose
// whiteouts are devices.
func (t *Tree) apply(layer *os.File, l Limits, upper bool) error {
	f, err := dup(layer)
	if err != nil {
		return err
	}
	t.files = append(t.files, f)
	t.limits, t.steps = l.orDefault(), 0
	a := applier{t: t, f: f, upper: upper, seen: map[string]bool{}}
	// A whiteout hides files of the layers below, never of its own layer, in any order of
	// the entries. So apply the whiteouts first.
	if len(t.root.Entries) > 0 {
		if err := a.each(a.hide); err != nil {
			return err
		}
	}
	return a.each(a.entry)
}

// dup returns a duplicate of f.
func dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate %s: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// An applier applies one layer.
type applier struct {
	t     *Tree
	f     *os.File
	upper bool // see apply
	// For an upper layer: the entries so far. The value is true for directories.
	seen map[string]bool
}

// A cursor reads a file from its start and counts the offset. It ignores the offset of the
// descriptor.
type cursor struct {
	f        *os.File
	at, size int64
}

func (c *cursor) Read(b []byte) (int, error) {
	if c.at >= c.size {
		return 0, io.EOF
	}
	n, err := c.f.ReadAt(b[:min(int64(len(b)), c.size-c.at)], c.at)
	c.at += int64(n)
	return n, err
}

// Seek lets the tar reader skip contents.
func (c *cursor) Seek(off int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		off += c.at
	case io.SeekEnd:
		off += c.size
	}
	if off < 0 {
		return 0, errors.New("seek before the start")
	}
	c.at = off
	return off, nil
}

// each calls f with each entry, its cleaned name and the offset of its content. The name
// of the root is empty.
func (a *applier) each(f func(h *tar.Header, name string, at int64) error) error {
	st, err := a.f.Stat()
	if err != nil {
		return err
	}
	c := &cursor{f: a.f, size: st.Size()}
	r := tar.NewReader(c)
	for count := 0; ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, tar.ErrFieldTooLong) {
				err = fmt.Errorf("%w: the archive is malformed: %w", ErrInvalid, err)
			}
			return err
		}
		if h.Typeflag == tar.TypeXGlobalHeader { // written by "git archive"; not a file
			continue
		}
		if count++; count > a.t.limits.Entries {
			return fmt.Errorf("%w: more than %d entries", ErrInvalid, a.t.limits.Entries)
		}
		name, err := cleanName(h.Name)
		if err != nil {
			return err
		}
		if a.upper && strings.Contains("/"+name, "/"+whiteoutPrefix) {
			// The agent could hide any file with it, even from the template's list of
			// packages.
			return fmt.Errorf("%w: %.256q: a layer cannot contain files whose name begins with %q; rename or remove it", ErrInvalid, name, whiteoutPrefix)
		}
		if err := checkHeader(h, c); err != nil {
			return fmt.Errorf("entry %.256q: %w", h.Name, err)
		}
		if err := f(h, name, c.at); err != nil {
			return fmt.Errorf("entry %.256q: %w", h.Name, err)
		}
	}
}

// cleanName returns a name without slashes at its ends, empty parts and ".". It rejects
// names with "..", because tools do not write them, but attackers do.
func cleanName(name string) (string, error) {
	if len(name) > maxPath || strings.IndexByte(name, 0) >= 0 {
		return "", fmt.Errorf("%w: entry %.256q: the name has a zero byte or more than %d bytes", ErrInvalid, name, maxPath)
	}
	var parts []string
	for p := range strings.SplitSeq(name, "/") {
		switch {
		case p == "" || p == ".":
			continue
		case badName(strings.TrimPrefix(p, whiteoutPrefix)):
			return "", fmt.Errorf("%w: entry %.256q: the name %.300q is not allowed", ErrInvalid, name, p)
		}
		parts = append(parts, p)
	}
	return strings.Join(parts, "/"), nil
}

// checkHeader rejects entries that a layer must not have.
func checkHeader(h *tar.Header, c *cursor) error {
	if h.Typeflag == tar.TypeGNUSparse {
		return fmt.Errorf("%w: it is a sparse file", ErrInvalid)
	}
	for k := range h.PAXRecords {
		// The header states its size: a kilobyte in the archive could be a terabyte in
		// the image.
		if strings.HasPrefix(k, "GNU.sparse.") {
			return fmt.Errorf("%w: it is a sparse file", ErrInvalid)
		}
	}
	const maxID = 1<<32 - 2
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) > maxID || int64(h.Gid) > maxID {
		return fmt.Errorf("%w: invalid owner %d:%d", ErrInvalid, h.Uid, h.Gid)
	}
	if h.Size < 0 || h.Typeflag == tar.TypeReg && h.Size > c.size-c.at {
		return fmt.Errorf("%w: it has %d bytes, but the archive ends before that", ErrInvalid, h.Size)
	}
	return nil
}

// hide applies an entry if it is a whiteout.
func (a *applier) hide(h *tar.Header, name string, _ int64) error {
	dir, base := split(name)
	opaque := base == whiteoutOpaque
	hidden, whiteout := strings.CutPrefix(base, whiteoutPrefix)
	switch {
	case isOpaque(h):
		opaque, dir = true, name
	case isWhiteoutDevice(h):
		hidden, whiteout = base, true
	}
	if !opaque && (!whiteout || strings.HasPrefix(base, whiteoutMeta)) {
		return nil
	}
	at, err := a.below(dir)
	if err != nil || at == nil {
		return err
	}
	if opaque {
		clear(at.Entries)
	} else {
		delete(at.Entries, hidden)
	}
	return nil
}

// below returns a directory of the tree, or nil if there is none: then there is nothing to
// hide.
func (a *applier) below(dir string) (*erofs.Node, error) {
	n, err := a.t.lookup(dir)
	if errors.Is(err, ErrNotExist) || errors.Is(err, ErrInvalid) || err == nil && n.Kind() != unix.S_IFDIR {
		return nil, nil
	}
	return n, err
}

func isWhiteoutDevice(h *tar.Header) bool {
	return h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0
}

// entry applies an entry that is not a whiteout.
func (a *applier) entry(h *tar.Header, name string, at int64) error {
	dir, base := split(name)
	if a.upper {
		// gVisor writes each file once, after its directory. Insisting on this means that
		// no link of the tree below is ever followed.
		up := strings.TrimSuffix(dir, "/")
		if _, twice := a.seen[name]; twice || up != "" && !a.seen[up] {
			return fmt.Errorf("%w: it appears twice, or before its directory", ErrInvalid)
		}
		a.seen[name] = h.Typeflag == tar.TypeDir
	}
	if strings.HasPrefix(base, whiteoutPrefix) || isWhiteoutDevice(h) {
		return nil
	}
	if strings.HasPrefix(dir, whiteoutPrefix) || strings.Contains(dir, "/"+whiteoutPrefix) {
		if strings.HasPrefix(dir, whiteoutMeta) { // where AUFS kept hard links
			return nil
		}
		return fmt.Errorf("%w: it is below a whiteout", ErrInvalid)
	}
	n := &erofs.Node{UID: uint32(h.Uid), GID: uint32(h.Gid), Mode: uint32(h.Mode & 0o7777)}
	// Times before the epoch or in the far future overflow in programs that count
	// nanoseconds.
	if sec := h.ModTime.Unix(); sec >= 0 && sec < 1<<33 {
		n.Sec, n.Nsec = sec, uint32(h.ModTime.Nanosecond())
	}
	if base == "" {
		if h.Typeflag != tar.TypeDir {
			return fmt.Errorf("%w: the root is not a directory", ErrInvalid)
		}
		n.Mode |= unix.S_IFDIR
		n.Entries = a.t.root.Entries
		*a.t.root = *n
		return nil
	}
	// dir ends with a slash: create its last part, too.
	trail, last, parent, err := a.t.resolve(dir, true, true)
	if err == nil && last != "" {
		if parent == nil {
			parent, err = a.t.put(trail, last, newDir())
		} else if parent.Kind() != unix.S_IFDIR {
			err = fmt.Errorf("%w: %.300q is not a directory", ErrInvalid, last)
		}
		trail = append(trail, parent)
	}
	if err != nil {
		return err
	}
	old := trail.last().Entries[base]
	switch h.Typeflag {
	case tar.TypeReg:
		n.Mode |= unix.S_IFREG
		if a.t.bytes += h.Size; h.Size > a.t.limits.Bytes || a.t.bytes > a.t.limits.Bytes {
			return fmt.Errorf("%w: the files have more than %d bytes", ErrInvalid, a.t.limits.Bytes)
		}
		if h.Size > 0 {
			n.Size, n.From, n.At = h.Size, a.f, at
		}
	case tar.TypeDir:
		n.Mode |= unix.S_IFDIR
		if old != nil && old.Kind() == unix.S_IFDIR {
			n.Entries = old.Entries
			*old = *n
			return nil
		}
		n.Entries = map[string]*erofs.Node{}
	case tar.TypeSymlink:
		n.Mode, n.Text = unix.S_IFLNK|0o777, h.Linkname
		if len(n.Text) == 0 || len(n.Text) > maxTarget || strings.IndexByte(n.Text, 0) >= 0 {
			return fmt.Errorf("%w: the target of a symbolic link has %d bytes or a zero byte; 1 to %d are allowed", ErrInvalid, len(n.Text), maxTarget)
		}
	case tar.TypeLink:
		if n, err = a.target(h); err != nil || n == nil || n == old {
			return err
		}
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		delete(trail.last().Entries, base)
		return nil
	default:
		return fmt.Errorf("%w: type %q", ErrInvalid, h.Typeflag)
	}
	_, err = a.t.put(trail, base, n)
	return err
}

// target returns the target of a hard link, which must already be in the tree. It rejects
// directories, because a directory could then contain itself.
func (a *applier) target(h *tar.Header) (*erofs.Node, error) {
	name, err := cleanName(h.Linkname)
	if err != nil {
		return nil, err
	}
	_, _, n, err := a.t.resolve(name, false, false)
	switch {
	case err != nil && !errors.Is(err, ErrNotExist):
		return nil, err
	case n == nil:
		return nil, fmt.Errorf("%w: a hard link to %.256q, which does not exist", ErrInvalid, h.Linkname)
	case n.Kind() == unix.S_IFDIR:
		return nil, fmt.Errorf("%w: a hard link to the directory %.256q", ErrInvalid, h.Linkname)
	}
	return n, nil
}
