package guest

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A runFile is a regular file that a run has written.
type runFile struct {
	Path     []byte    `json:"path"` // any bytes but NUL
	Size     int64     `json:"size"`
	Modified time.Time `json:"modified"`
}

const (
	// maxListed is how many directory entries list reads at most.
	maxListed = 200_000
	// maxDepth and maxRunPath are the limits of a path, in components and in bytes.
	maxDepth, maxRunPath = 64, 4096
	// everything, as the last component of a pattern, matches all files below.
	everything = "**"
)

// list returns the regular files in writable directories that match one of patterns, except
// inputs. "*" matches any text within one name, and "**" as the last component matches
// everything below. Links are not followed.
//
// It reads through descriptors that were opened before any process of the view ran. It reads
// as root, because programs may create files without any permission.
func (v *view) list(patterns []string, most int) ([]runFile, error) {
	if len(patterns) > maxViewPaths {
		return nil, badRequest(fmt.Errorf("patterns: there are %d, at most %d are allowed", len(patterns), maxViewPaths))
	}
	l := runListing{view: v, most: most, found: map[string]runFile{}}
	for _, p := range patterns {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p || strings.Count(p, "/") > maxDepth {
			return nil, badRequest(fmt.Errorf("patterns: %.1024q is not an absolute, clean path", p))
		}
		for i, w := range v.writes {
			rest, ok := restOf(p, w)
			if !ok {
				continue
			}
			dir, err := openIn(v.opened[i], ".", true)
			if err != nil {
				return nil, err
			}
			err = l.walk(dir, w, rest)
			if err != nil {
				return nil, err
			}
		}
	}
	out := make([]runFile, 0, len(l.found))
	for _, f := range l.found {
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b runFile) int { return strings.Compare(string(a.Path), string(b.Path)) })
	return out, nil
}

// restOf returns the components of a pattern that are left below dir. It returns false if the
// first components of the pattern do not match dir.
func restOf(pattern, dir string) ([]string, bool) {
	p, d := strings.Split(pattern[1:], "/"), strings.Split(dir[1:], "/")
	for i, name := range d {
		if i >= len(p)-1 && p[len(p)-1] == everything {
			return p[len(p)-1:], true
		}
		if i >= len(p)-1 || !matchName(p[i], name) {
			return nil, false
		}
	}
	return p[len(d):], true
}

// matchName reports whether a name matches a pattern in which "*" matches any text.
func matchName(pattern, name string) bool {
	parts := strings.Split(pattern, "*")
	if len(parts) == 1 {
		return pattern == name
	}
	first, last := parts[0], parts[len(parts)-1]
	if len(name) < len(first)+len(last) || !strings.HasPrefix(name, first) || !strings.HasSuffix(name, last) {
		return false
	}
	name = name[len(first) : len(name)-len(last)]
	for _, part := range parts[1 : len(parts)-1] {
		i := strings.Index(name, part)
		if i < 0 {
			return false
		}
		name = name[i+len(part):]
	}
	return true
}

// A runListing is the state of one call of list.
type runListing struct {
	view  *view
	most  int                // allowed length of found
	seen  int                // directory entries read so far
	found map[string]runFile // by path
}

// walk adds the files below a directory that match the components of a pattern, and closes
// the directory.
func (l *runListing) walk(dir *os.File, path string, pattern []string) error {
	defer dir.Close()
	for {
		names, err := dir.Readdirnames(1024)
		for _, name := range names {
			if l.seen++; l.seen > maxListed {
				return &statusError{http.StatusRequestEntityTooLarge, fmt.Errorf("there are more than %d files", maxListed)}
			}
			rest := pattern[1:]
			if pattern[0] == everything {
				rest = pattern
			} else if !matchName(pattern[0], name) {
				continue
			}
			if err := l.add(dir, path+"/"+name, name, rest); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// add adds one entry of a directory if it matches, or the matching files below it.
func (l *runListing) add(dir *os.File, path, name string, rest []string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil //nolint:nilerr // it was removed meanwhile
	}
	all := len(rest) > 0 && rest[0] == everything
	switch {
	case len(rest) > 0 && st.Mode&unix.S_IFMT == unix.S_IFDIR:
		if strings.Count(path, "/") > maxDepth || len(path) > maxRunPath {
			return &statusError{http.StatusRequestEntityTooLarge, fmt.Errorf("a directory has a path of more than %d components or %d bytes", maxDepth, maxRunPath)}
		}
		sub, err := openIn(dir, name, true)
		if err != nil {
			return nil //nolint:nilerr // it was removed or replaced meanwhile
		}
		return l.walk(sub, path, rest)
	case len(rest) > 0 && !all || st.Mode&unix.S_IFMT != unix.S_IFREG || l.view.isInput(path):
		return nil
	}
	if len(path) > maxRunPath {
		return &statusError{http.StatusRequestEntityTooLarge, fmt.Errorf("a file has a path of more than %d bytes", maxRunPath)}
	}
	l.found[path] = runFile{[]byte(path), st.Size, time.Unix(st.Mtim.Unix()).UTC()}
	if len(l.found) > l.most {
		return &statusError{http.StatusRequestEntityTooLarge, fmt.Errorf("more than %d files match", l.most)}
	}
	return nil
}

// isInput reports whether the file at a path is an input.
func (v *view) isInput(path string) bool {
	v.inputsMu.Lock()
	defer v.inputsMu.Unlock()
	return v.inputs[path]
}

// openIn opens an entry of dir for reading: a directory or a regular file, as the caller
// demands. It does not follow a link, and does not block on a named pipe.
//
// The attack: a link in place of a directory. O_DIRECTORY is not used, because with it gVisor
// follows a link in spite of O_NOFOLLOW.
func openIn(dir *os.File, name string, directory bool) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	fi, err := f.Stat()
	switch {
	case err != nil:
	case directory && !fi.IsDir():
		err = &os.PathError{Op: "open", Path: name, Err: unix.ENOTDIR}
	case !directory && !fi.Mode().IsRegular():
		err = badRequest(fmt.Errorf("%.1024q is not a regular file", name))
	default:
		return f, nil
	}
	f.Close()
	return nil, err
}

// open opens a regular file in a writable directory. No component below the directory may be
// a link.
func (v *view) open(path string) (*os.File, error) {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || strings.ContainsRune(path, 0) || strings.Count(path, "/") > maxDepth {
		return nil, badRequest(fmt.Errorf("path: %.1024q is not an absolute, clean path", path))
	}
	i := slices.IndexFunc(v.writes, func(w string) bool { return below(path, w) && path != w })
	if i < 0 || v.isInput(path) {
		return nil, &statusError{http.StatusForbidden, fmt.Errorf("path: %.1024q is not a file that the run could write", path)}
	}
	dir, err := openIn(v.opened[i], ".", true)
	if err != nil {
		return nil, err
	}
	names := strings.Split(strings.TrimPrefix(path, v.writes[i]+"/"), "/")
	for _, name := range names[:len(names)-1] {
		next, err := openIn(dir, name, true)
		dir.Close()
		if err != nil {
			return nil, err
		}
		dir = next
	}
	f, err := openIn(dir, names[len(names)-1], false)
	dir.Close()
	return f, err
}
