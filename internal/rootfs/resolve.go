package rootfs

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
)

// Paths are resolved within the tree, as in a chroot: "/" and ".." never lead above its
// root.

// A trail is the way from the root to a directory.
type trail []*erofs.Node

func (s trail) last() *erofs.Node { return s[len(s)-1] }

// resolve returns the file of a path. It follows symbolic links; those in the last part
// only if follow is set. The trail is that of the file's directory, and name is the file's
// name there. The name is empty if the path leads to the last directory of the trail
// itself. If the file does not exist, the node is nil.
//
// With create, resolve creates missing directories before the last part, including those
// that links lead to.
func (t *Tree) resolve(path string, follow, create bool) (dir trail, name string, n *erofs.Node, err error) {
	dir = trail{t.root}
	rest, links := path, 0
	for {
		// A million entries, each with forty links of a thousand parts, would take hours.
		if t.steps++; t.steps > maxSteps {
			return nil, "", nil, fmt.Errorf("%w: its names need more than %d lookups", ErrInvalid, maxSteps)
		}
		rest = strings.TrimLeft(rest, "/")
		if rest == "" {
			return dir, "", dir.last(), nil
		}
		part, after, more := strings.Cut(rest, "/")
		more = more && strings.Trim(after, "/") != ""
		rest = after
		switch part {
		case ".":
			continue
		case "..":
			if len(dir) > 1 {
				dir = dir[:len(dir)-1]
			}
			continue
		}
		if badName(part) {
			return nil, "", nil, fmt.Errorf("%w: %.256q: the name %.300q is not allowed", ErrInvalid, path, part)
		}
		c := dir.last().Entries[part]
		switch {
		case c != nil && c.Kind() == unix.S_IFLNK && (more || follow):
			// A link may lead to itself.
			if links++; links > maxLinks {
				return nil, "", nil, fmt.Errorf("%w: %.256q: more than %d symbolic links", ErrInvalid, path, maxLinks)
			}
			if len(c.Text)+len(rest) > maxPath {
				return nil, "", nil, fmt.Errorf("%w: %.256q: the path has more than %d bytes with its links", ErrInvalid, path, maxPath)
			}
			if strings.HasPrefix(c.Text, "/") {
				dir = dir[:1]
			}
			rest = c.Text + "/" + rest
		case !more:
			return dir, part, c, nil
		case c == nil && create:
			if c, err = t.put(dir, part, newDir()); err != nil {
				return nil, "", nil, fmt.Errorf("%.256q: %w", path, err)
			}
			dir = append(dir, c)
		case c == nil:
			return dir, part, nil, fmt.Errorf("%w: %.256q", ErrNotExist, path)
		case c.Kind() != unix.S_IFDIR:
			return nil, "", nil, fmt.Errorf("%w: %.256q: %.300q is not a directory", ErrInvalid, path, part)
		default:
			dir = append(dir, c)
		}
	}
}

// put adds a node to a directory, within the limits. It replaces an existing entry.
func (t *Tree) put(dir trail, name string, n *erofs.Node) (*erofs.Node, error) {
	t.text += int64(len(name) + len(n.Text))
	switch {
	case len(dir) > maxDepth:
		// With links, even short paths can nest directories deeper and deeper.
		return nil, fmt.Errorf("%w: more than %d nested directories", ErrInvalid, maxDepth)
	case t.entries >= t.limits.Entries:
		return nil, fmt.Errorf("%w: more than %d files and directories", ErrInvalid, t.limits.Entries)
	case t.text > maxText:
		return nil, fmt.Errorf("%w: the names have more than %d bytes", ErrInvalid, maxText)
	}
	t.entries++
	dir.last().Entries[name] = n
	return n, nil
}

// lookup returns the file of a path, following links.
func (t *Tree) lookup(path string) (*erofs.Node, error) {
	_, _, n, err := t.resolve(path, true, false)
	if err == nil && n == nil {
		err = fmt.Errorf("%w: %.256q", ErrNotExist, path)
	}
	return n, err
}

// makeDir returns the directory of a path. It creates missing directories, owned by root,
// the last one with the given permissions.
func (t *Tree) makeDir(path string, mode uint32) (*erofs.Node, error) {
	dir, name, n, err := t.resolve(path, true, true)
	if err != nil {
		return nil, err
	}
	if n == nil {
		n = newDir()
		n.Mode = unix.S_IFDIR | mode
		if _, err := t.put(dir, name, n); err != nil {
			return nil, err
		}
	}
	if n.Kind() != unix.S_IFDIR {
		return nil, fmt.Errorf("%w: %.256q is not a directory", ErrInvalid, path)
	}
	return n, nil
}

func walk(path string, n *erofs.Node, f func(string, *erofs.Node) error) error {
	if err := f(path, n); err != nil {
		return err
	}
	for _, name := range sortedNames(n) {
		if err := walk(path+"/"+name, n.Entries[name], f); err != nil {
			return err
		}
	}
	return nil
}
