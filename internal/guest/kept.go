package guest

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// A sandbox that is started from a snapshot waits until its files have its new
// identity. Inside, each system call takes more than ten microseconds, and replacing
// a file takes nine of them. So the files stay open, also in the snapshot, and a new
// content of the same length is written over the old one: two calls, and it works
// with a full disk.

// keptFiles are files of this program that it writes again and again. The zero value
// is ready to use. It is not safe for concurrent use.
type keptFiles struct{ byPath map[string]*keptFile }

// maxKept bounds the open files: the facts of an environment have any number.
const maxKept = 32

// A keptFile is an open file, as it was when this program created it.
type keptFile struct {
	f  *os.File
	st unix.Stat_t
}

// put replaces the content of a file as [replaceFile] does.
func (k *keptFiles) put(path, content string, perm os.FileMode) error {
	if path == "" {
		return nil
	}
	if f := k.open(path, int64(len(content))); f != nil {
		// One write of the same length: a reader sees the old or the new content.
		if n, err := f.WriteAt([]byte(content), 0); err == nil && n == len(content) {
			return nil
		}
	}
	k.forget(path)
	f, err := replaceOpen(path, content, perm)
	if err != nil || f == nil {
		return err
	}
	file := &keptFile{f: f}
	if len(k.byPath) >= maxKept || unix.Fstat(int(f.Fd()), &file.st) != nil {
		return f.Close()
	}
	if k.byPath == nil {
		k.byPath = map[string]*keptFile{}
	}
	k.byPath[path] = file
	return nil
}

// open returns the kept file of a path, or nil if there is none, it does not have
// that size, or the path leads somewhere else by now: programs of root may have
// replaced the file, made a link to it for others or changed who may read it.
func (k *keptFiles) open(path string, size int64) *os.File {
	file := k.byPath[path]
	if file == nil {
		return nil
	}
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil || !sameFile(st, file.st) || st.Size != size {
		return nil
	}
	return file.f
}

// sameFile reports whether two results of stat are of one regular file with one name,
// and of the same owner and mode.
func sameFile(a, b unix.Stat_t) bool {
	return a.Ino == b.Ino && a.Dev == b.Dev && a.Mode == b.Mode && a.Uid == b.Uid && a.Gid == b.Gid && a.Nlink == 1 && a.Mode&unix.S_IFMT == unix.S_IFREG
}

// read returns the content of a kept file, or of the file at the path.
func (k *keptFiles) read(path string) ([]byte, error) {
	if file := k.byPath[path]; file != nil {
		b := make([]byte, file.st.Size+1)
		if n, err := unix.Pread(int(file.f.Fd()), b, 0); err == nil && n < len(b) && k.open(path, int64(n)) != nil {
			return b[:n], nil
		}
	}
	return os.ReadFile(path)
}

// forget closes a file.
func (k *keptFiles) forget(path string) {
	if file := k.byPath[path]; file != nil {
		file.f.Close()
		delete(k.byPath, path)
	}
}

// replaceOpen replaces a file atomically and returns it open. If the disk is full it
// overwrites the old file instead, which needs no space if the new content is not
// longer, and returns nil.
func replaceOpen(path, content string, perm os.FileMode) (*os.File, error) {
	fresh := path + ".new"
	f, err := writeNew(fresh, content, perm)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		f, err = writeNew(fresh, content, perm)
	}
	if err == nil {
		if err = os.Rename(fresh, path); err == nil {
			return f, nil
		}
		f.Close()
	}
	_ = os.Remove(fresh)
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		return nil, err
	}
	old, oerr := os.OpenFile(path, os.O_WRONLY|unix.O_NOFOLLOW, 0)
	if oerr != nil {
		return nil, err
	}
	defer old.Close()
	if _, err := old.WriteAt([]byte(content), 0); err != nil {
		return nil, err
	}
	return nil, old.Truncate(int64(len(content)))
}

// replaceFile replaces a file atomically. If the disk is full it overwrites the old
// file instead, which needs no space if the new content is not longer.
func replaceFile(path, content string, perm os.FileMode) error {
	if path == "" {
		return nil
	}
	f, err := replaceOpen(path, content, perm)
	if f != nil {
		err = errors.Join(err, f.Close())
	}
	return err
}

// writeNew writes a new file and returns it open. What an earlier one left is
// removed.
func writeNew(path, content string, perm os.FileMode) (*os.File, error) {
	const flags = os.O_RDWR | os.O_CREATE | os.O_EXCL
	f, err := os.OpenFile(path, flags, perm)
	if errors.Is(err, fs.ErrExist) {
		_ = os.Remove(path)
		f, err = os.OpenFile(path, flags, perm)
	}
	if err != nil {
		return nil, err
	}
	if _, err := f.WriteString(content); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
