package guest

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// maxUnpacked bounds the entries of an archive. Their bytes are bounded by the disk.
const maxUnpacked = 1 << 20

// An unpacking copies the files of an archive to a place, as COPY does.
//
// The archive is hostile. What it writes must stay below the place: no name with "..",
// no way through a symbolic link that leads out, be it from the archive or from the
// image. Devices and pipes are refused.
type unpacking struct {
	source   string  // path in the archive; empty and "." mean everything
	dest     string  // absolute; a trailing slash means into it
	uid, gid int     // owner of everything that is made
	mode     *uint32 // permissions of all files and directories that are copied; nil keeps the archive's

	root  *os.Root // of the place, once known
	found bool     // something at source
	file  bool     // source is a file
}

var errArchive = errors.New("the archive")

func badArchive(format string, args ...any) error {
	return badRequest(fmt.Errorf("%w "+format, append([]any{errArchive}, args...)...))
}

// run reads the archive, plain or compressed with gzip.
func (u *unpacking) run(r io.Reader) error {
	u.source = path.Clean("/" + u.source)[1:] // never with ".."
	in := bufio.NewReaderSize(r, 64<<10)
	if magic, err := in.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(in)
		if err != nil {
			return badArchive("is not valid gzip: %v", err)
		}
		defer z.Close()
		r = z
	} else {
		r = in
	}
	defer func() {
		if u.root != nil {
			u.root.Close()
		}
	}()
	tr := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return badArchive("is not a valid tar: %v", err)
		}
		if n >= maxUnpacked {
			return badArchive("has more than %d entries", maxUnpacked)
		}
		if err := u.entry(h, tr); err != nil {
			return err
		}
	}
	if !u.found {
		return badArchive("has nothing at %.256q", or(u.source, "."))
	}
	return nil
}

// clean returns the name of an entry without a leading "./".
func cleanEntry(name string) (string, error) {
	if strings.ContainsRune(name, 0) || len(name) > 4096 {
		return "", badArchive("has a name with a zero byte or of more than 4096 bytes")
	}
	name = strings.TrimLeft(name, "/")
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", badArchive("has the name %.256q, which leads out of it", name)
		}
	}
	return path.Clean("/" + name)[1:], nil
}

// within returns the name relative to the source. It is empty for the source itself.
func (u *unpacking) within(name string) (string, bool) {
	if u.source == "" || name == u.source {
		return strings.TrimPrefix(name, u.source), true
	}
	return strings.CutPrefix(name, u.source+"/")
}

// entry copies one entry.
func (u *unpacking) entry(h *tar.Header, content io.Reader) error {
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink:
	case tar.TypeXGlobalHeader:
		return nil
	default:
		return badArchive("has an entry %.256q of type %q; only files, directories and links can be copied", h.Name, h.Typeflag)
	}
	name, err := cleanEntry(h.Name)
	if err != nil {
		return err
	}
	name, ok := u.within(name)
	if !ok {
		return nil
	}
	if u.file {
		return badArchive("has other entries below the file %.256q", u.source)
	}
	u.found = true
	into := u.dest
	if name == "" && h.Typeflag != tar.TypeDir {
		// A file: to the path itself, or into it.
		u.file = true
		if strings.HasSuffix(u.dest, "/") {
			name = path.Base(u.source)
		} else if fi, err := os.Stat(u.dest); err == nil && fi.IsDir() {
			name = path.Base(u.source)
		} else {
			into, name = filepath.Split(u.dest)
		}
	}
	if err := u.open(into); err != nil {
		return err
	}
	if name == "" {
		return nil // the directory itself keeps what it has
	}
	if err := u.put(name, h, content); err != nil {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			return err
		}
		if _, ok := errors.AsType[*statusError](err); ok {
			return err
		}
		return badArchive("has the entry %.256q, which cannot be copied: %v", h.Name, err)
	}
	return nil
}

// open makes the place and opens it.
func (u *unpacking) open(dir string) (err error) {
	if u.root != nil {
		return nil
	}
	if err := makeDirs(filepath.Clean(dir), u.uid, u.gid); err != nil {
		return badRequest(err)
	}
	u.root, err = os.OpenRoot(dir)
	return err
}

// put makes one file, directory or link. Root makes them, but every path is resolved
// below u.root.
func (u *unpacking) put(name string, h *tar.Header, content io.Reader) error {
	if err := u.parents(path.Dir(name)); err != nil {
		return err
	}
	mode := uint32(h.Mode) & 0o7777
	if u.mode != nil {
		mode = *u.mode
	}
	if h.Typeflag == tar.TypeDir {
		switch fi, err := u.root.Stat(name); {
		case err == nil && fi.IsDir(): // merged; it keeps what it has
			return nil
		case err == nil:
			return errors.New("a file is in its place")
		}
		if err := u.root.Mkdir(name, 0o700); err != nil {
			return err
		}
		if err := u.root.Lchown(name, u.uid, u.gid); err != nil {
			return err
		}
		return u.root.Chmod(name, fileMode(mode))
	}
	if fi, err := u.root.Lstat(name); err == nil {
		if fi.IsDir() {
			return errors.New("a directory is in its place")
		}
		if err := u.root.Remove(name); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeSymlink:
		if err := u.root.Symlink(h.Linkname, name); err != nil {
			return err
		}
		return u.root.Lchown(name, u.uid, u.gid)
	case tar.TypeLink:
		to, err := cleanEntry(h.Linkname)
		if err != nil {
			return err
		}
		to, ok := u.within(to)
		if !ok || to == "" {
			return fmt.Errorf("it is a hard link to %.256q, which is not copied", h.Linkname)
		}
		return u.root.Link(to, name)
	}
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := copyBytes(f, content); err != nil {
		return err
	}
	// The owner first: changing it would clear the set-user-ID bit.
	if err := errors.Join(f.Chown(u.uid, u.gid), f.Chmod(fileMode(mode)), f.Close()); err != nil {
		return err
	}
	if at := h.ModTime; at.After(time.Unix(0, 0)) && at.Before(time.Unix(1<<33, 0)) {
		return u.root.Chtimes(name, at, at)
	}
	return nil
}

// parents makes the directories above an entry that the archive does not have.
func (u *unpacking) parents(dir string) error {
	if dir == "." {
		return nil
	}
	if fi, err := u.root.Stat(dir); err == nil {
		if !fi.IsDir() {
			return errors.New("a file is in the place of a directory above it")
		}
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := u.parents(path.Dir(dir)); err != nil {
		return err
	}
	if err := u.root.Mkdir(dir, 0o755); err != nil {
		return err
	}
	return u.root.Lchown(dir, u.uid, u.gid)
}

// fileMode converts permissions with their three special bits.
func fileMode(bits uint32) fs.FileMode {
	m := fs.FileMode(bits & 0o777)
	if bits&0o4000 != 0 {
		m |= fs.ModeSetuid
	}
	if bits&0o2000 != 0 {
		m |= fs.ModeSetgid
	}
	if bits&0o1000 != 0 {
		m |= fs.ModeSticky
	}
	return m
}

// makeDirs makes a directory and those above it. Those that it makes belong to the
// user; others are left as they are.
func makeDirs(dir string, uid, gid int) error {
	fi, err := os.Stat(dir)
	if err == nil {
		if !fi.IsDir() {
			return fmt.Errorf("%.256q is not a directory", dir)
		}
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := makeDirs(filepath.Dir(dir), uid, gid); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	return os.Lchown(dir, uid, gid)
}
