// Package rootfs represents root file systems as trees in memory. A [Tree] has the names,
// owners and modes of all files. The contents stay in an EROFS image or in the tar archive
// of a layer. A tree is written as one flat EROFS image.
//
// Layers are never unpacked onto the host. So a hostile layer cannot write outside of
// its root: no path of the host is involved.
//
// A tree does not keep:
//
//   - Extended attributes, because gVisor does not read them from images. So a program
//     with file capabilities, such as ping, runs without them.
//   - Devices and pipes. Each sandbox has its own /dev.
//   - Access and change times.
package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
)

// ErrInvalid means that a layer is malformed or exceeds a limit. The text names the entry
// and the limit.
var ErrInvalid = errors.New("invalid layer")

// ErrNotExist means that a tree has no such file.
var ErrNotExist = errors.New("no such file in the image")

// Limits bound the contents of layers. They count everything that was ever added to the
// tree, including files that a later layer removed.
type Limits struct {
	Bytes   int64 // of all contents of the tree; 0 means 32 GiB
	Entries int   // files and directories of the tree; 0 means 1,048,576
}

func (l Limits) orDefault() Limits {
	if l.Bytes == 0 {
		l.Bytes = 32 << 30
	}
	if l.Entries == 0 {
		l.Entries = 1 << 20
	}
	return l
}

// The limits that callers cannot change.
const (
	maxDepth  = 256       // nested directories
	maxPath   = 4095      // bytes of an entry's name, as in Linux
	maxName   = 255       // bytes of one part of a name
	maxTarget = 4000      // bytes of a symbolic link's target that an image can store
	maxText   = 256 << 20 // bytes of all names and targets of a tree
	maxLinks  = 40        // symbolic links in one path, as in Linux
	maxSteps  = 1 << 24   // path lookups for one layer: less than a second
)

// GuestPath is the path at which the guest's program is mounted in each sandbox. Each
// image has an empty file there.
const GuestPath = "/usr/local/sbin/postern-guest"

// A Tree is a root file system in memory. It is not safe for concurrent use.
type Tree struct {
	root  *erofs.Node
	base  *erofs.Image // that Open has opened, or nil
	files []*os.File   // opened for the contents

	limits  Limits // of the last layer
	bytes   int64  // of contents, added so far
	entries int    // files and directories, added so far
	text    int64  // bytes of names and targets, added so far
	steps   int64  // path lookups since the last layer began
}

// New returns a tree with nothing but its root directory, which belongs to root.
func New() *Tree {
	return &Tree{root: newDir(), entries: 1, limits: Limits{}.orDefault()}
}

func newDir() *erofs.Node {
	return &erofs.Node{Mode: unix.S_IFDIR | 0o755, Entries: map[string]*erofs.Node{}}
}

// Open returns the tree of an EROFS image that this program wrote. The tree keeps the
// image open. The file must not change. The caller closes the tree.
func Open(path string) (*Tree, error) {
	base, err := erofs.Open(path)
	if err != nil {
		return nil, err
	}
	root, _, err := erofs.Read(base.File)
	if err != nil {
		return nil, errors.Join(err, base.Close())
	}
	t := &Tree{root: root, base: base, files: []*os.File{base.File}, limits: Limits{}.orDefault()}
	seen := map[*erofs.Node]bool{}
	_ = t.walk(func(_ string, n *erofs.Node) error {
		if !seen[n] {
			seen[n] = true
			t.bytes += n.Size
			t.entries++
			t.text += int64(len(n.Text))
		}
		return nil
	})
	return t, nil
}

// Close closes the files that the tree keeps open. The contents cannot be read afterwards.
func (t *Tree) Close() error {
	var err error
	for _, f := range t.files {
		err = errors.Join(err, f.Close())
	}
	t.files = nil
	return err
}

// WriteImage writes the tree to the empty file w as an EROFS image, with an empty file
// at [GuestPath]. The same tree produces the same bytes. WriteImage does not sync w. If it
// returns an error, w is not a valid image.
func (t *Tree) WriteImage(ctx context.Context, w *os.File) (erofs.Digest, error) {
	if err := t.placeGuest(); err != nil {
		return erofs.Digest{}, err
	}
	return erofs.WriteTree(ctx, w, t.root)
}

// WriteJoined is WriteImage for an image that takes what it can from [Tree.Base], see
// [erofs.WriteJoined]. If it cannot, the error wraps errors.ErrUnsupported.
func (t *Tree) WriteJoined(ctx context.Context, w *os.File) (erofs.Digest, error) {
	if t.base == nil {
		return erofs.Digest{}, fmt.Errorf("%w: the tree was not read from an image", errors.ErrUnsupported)
	}
	if err := t.placeGuest(); err != nil {
		return erofs.Digest{}, err
	}
	return erofs.WriteJoined(ctx, w, t.root, t.base)
}

// Base returns the image that [Open] has read the tree from, or nil. It is open as long as
// the tree.
func (t *Tree) Base() *erofs.Image { return t.base }

// placeGuest adds the empty file on which the guest is mounted.
func (t *Tree) placeGuest() error {
	dir, base := split(GuestPath)
	d, err := t.makeDir(dir, 0o755)
	if err != nil {
		return err
	}
	if old := d.Entries[base]; old == nil || old.Kind() != unix.S_IFREG || old.Size > 0 {
		d.Entries[base] = &erofs.Node{Mode: unix.S_IFREG | 0o644}
	}
	return nil
}

// ReadFile returns the content of a regular file. It follows symbolic links within the
// tree. If the file has more than max bytes, the error wraps [ErrInvalid]. If it does not
// exist, the error wraps [ErrNotExist].
func (t *Tree) ReadFile(name string, max int64) ([]byte, error) {
	n, err := t.lookup(name)
	if err != nil {
		return nil, err
	}
	return readNode(name, n, max)
}

func readNode(name string, n *erofs.Node, max int64) ([]byte, error) {
	switch {
	case n.Kind() != unix.S_IFREG:
		return nil, fmt.Errorf("%w: %.256q is not a regular file", ErrInvalid, name)
	case n.Size > max:
		return nil, fmt.Errorf("%w: %.256q has %d bytes, at most %d are allowed", ErrInvalid, name, n.Size, max)
	case n.From == nil:
		return []byte(n.Text), nil
	}
	b := make([]byte, n.Size)
	if _, err := n.From.ReadAt(b, n.At); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %.256q: %w", name, err)
	} else if err != nil && len(b) > 0 {
		return nil, fmt.Errorf("read %.256q: %w", name, io.ErrUnexpectedEOF)
	}
	return b, nil
}

// WriteFile adds a regular file owned by root to the tree, and missing parent directories.
// It replaces a file or symbolic link at name, and fails if there is a directory.
func (t *Tree) WriteFile(name, content string, mode uint32) error {
	dir, base := split(name)
	d, err := t.makeDir(dir, 0o755)
	if err != nil {
		return err
	}
	if base == "" || badName(base) {
		return fmt.Errorf("%w: the name %.256q is not allowed", ErrInvalid, name)
	}
	if old := d.Entries[base]; old != nil && old.Kind() == unix.S_IFDIR {
		return fmt.Errorf("%w: %.256q is a directory", ErrInvalid, name)
	}
	d.Entries[base] = &erofs.Node{Mode: unix.S_IFREG | mode&0o7777, Text: content, Size: int64(len(content))}
	return nil
}

// walk calls f with each file and its path, sorted by name, each directory before its
// entries. It calls f for each name of a file.
func (t *Tree) walk(f func(path string, n *erofs.Node) error) error {
	return walk("", t.root, f)
}

// split splits a path into its directory and its last part.
func split(name string) (dir, base string) {
	name = strings.TrimRight(name, "/")
	i := strings.LastIndexByte(name, '/')
	return name[:i+1], name[i+1:]
}

// badName reports whether one part of a path is not a valid file name.
func badName(s string) bool {
	return s == "" || s == "." || s == ".." || len(s) > maxName || strings.ContainsAny(s, "/\x00")
}
