// Package rootfs holds root file systems in memory as trees. A [Tree] has the names,
// owners and modes of all files. Their contents stay where they are: in an EROFS image
// or in the tar archive of a layer. A tree is written as one flat EROFS image.
//
// Layers are never unpacked onto the host. So a hostile layer cannot write outside of
// its root: there are no paths of the host to write to.
//
// What a tree does not keep:
//
//   - Extended attributes, since gVisor's reader of images has none. So a program with
//     capabilities in security.capability, such as ping, runs without them.
//   - Devices and pipes. Each sandbox has its own /dev.
//   - Times of access and change.
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

// ErrInvalid means that a layer is malformed or beyond a limit. The text names the
// entry and the limit.
var ErrInvalid = errors.New("invalid layer")

// ErrNotExist means that a tree has no such file.
var ErrNotExist = errors.New("no such file in the image")

// Limits bound what layers may hold. They count everything that was ever put into the
// tree, also what a later layer removed.
type Limits struct {
	Bytes   int64 // of all contents of the tree; 0 means 32 GiB
	Entries int   // files and directories of the tree; 0 means 1 million
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
	maxDepth  = 256       // directories in each other
	maxPath   = 4095      // bytes of an entry's name, as Linux has it
	maxName   = 255       // bytes of one part of it
	maxTarget = 4000      // bytes of the target of a symbolic link, which an image can hold
	maxText   = 256 << 20 // bytes of all names and targets of a tree
	maxLinks  = 40        // symbolic links in one path, as Linux has it
	maxSteps  = 1 << 24   // parts of names that are looked up for one layer: less than a second
)

// GuestPath is where the guest's program is mounted in each sandbox. Each image has an
// empty file there.
const GuestPath = "/usr/local/sbin/postern-guest"

// A Tree is a root file system in memory. It is not safe for concurrent use.
type Tree struct {
	root  *erofs.Node
	files []*os.File // that contents refer to

	limits  Limits // of the last layer
	bytes   int64  // put in so far: of contents
	entries int    // files and directories
	text    int64  // bytes of names and targets
	steps   int64  // parts of names looked up since the last layer began
}

// New returns a tree that is an empty directory of root.
func New() *Tree {
	return &Tree{root: newDir(), entries: 1, limits: Limits{}.orDefault()}
}

func newDir() *erofs.Node {
	return &erofs.Node{Mode: unix.S_IFDIR | 0o755, Entries: map[string]*erofs.Node{}}
}

// Open returns the tree of an EROFS image that this program wrote. The tree keeps the
// image open, and the file must not change. The caller closes the tree.
func Open(path string) (*Tree, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	root, _, err := erofs.Read(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	t := &Tree{root: root, files: []*os.File{f}, limits: Limits{}.orDefault()}
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

// Close closes the files that the tree holds open. Contents cannot be read any more.
func (t *Tree) Close() error {
	var err error
	for _, f := range t.files {
		err = errors.Join(err, f.Close())
	}
	t.files = nil
	return err
}

// WriteImage writes the tree to the empty file w as an EROFS image, with an empty file
// at [GuestPath]. The same tree gives the same bytes. WriteImage does not sync w. If it
// returns an error, w holds no image.
func (t *Tree) WriteImage(ctx context.Context, w *os.File) (erofs.Digest, error) {
	if err := t.placeGuest(); err != nil {
		return erofs.Digest{}, err
	}
	return erofs.WriteTree(ctx, w, t.root)
}

// placeGuest puts an empty file where the guest is mounted.
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

// ReadFile returns the content of a regular file. Symbolic links are followed within
// the tree. More than max bytes are an error that wraps [ErrInvalid]; a missing file is
// [ErrNotExist].
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
		return nil, fmt.Errorf("%w: %.256q has %d bytes; at most %d are read", ErrInvalid, name, n.Size, max)
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

// WriteFile puts a regular file of root into the tree, and the directories above it. A
// symbolic link at name is replaced, and a directory is an error.
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

// walk calls f with each file and its path, in the order of names: a directory before
// what is in it. A file with several names comes with each.
func (t *Tree) walk(f func(path string, n *erofs.Node) error) error {
	return walk("", t.root, f)
}

// split splits a path into its directory and its last part.
func split(name string) (dir, base string) {
	name = strings.TrimRight(name, "/")
	i := strings.LastIndexByte(name, '/')
	return name[:i+1], name[i+1:]
}

// badName reports whether one part of a path cannot be the name of a file.
func badName(s string) bool {
	return s == "" || s == "." || s == ".." || len(s) > maxName || strings.ContainsAny(s, "/\x00")
}
