package rootfs

import (
	"archive/tar"
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
)

// Delta writes the difference between two upper layers of a sandbox as an OCI layer. Below
// is the tree that the sandbox was started from; Delta does not change it. Before is the
// earlier upper layer, or nil if there was none. After is the later one. Both are tar
// archives as gVisor writes them. Times after clamp become clamp. The digest of the layer
// is "sha256:" and 64 hex digits.
//
// The same changes in two sandboxes produce the same bytes: entries are sorted, and traces
// of the sandbox itself are left out, see [Tree.untrace]. The layer contains neither a file
// that was created and deleted again, nor a directory of which only the time changed.
//
// Delta needs below because an overlay leaves whiteouts for names that never existed in the
// lower layer, such as temporary files. Otherwise two runs of one command would differ.
//
// The contents come from the agent and are hostile. A layer cannot contain a file whose
// name begins with ".wh.": for such a file the error wraps [ErrInvalid].
func Delta(w io.Writer, below *Tree, before, after *os.File, clamp time.Time) (digest string, err error) {
	state := func(upper *os.File) (*Tree, error) {
		t := below.clone()
		var err error
		if upper != nil {
			err = t.apply(upper, Limits{}, true)
		}
		if err == nil {
			err = t.untrace(below)
		}
		if err != nil {
			err = errors.Join(err, t.Close())
		}
		return t, err
	}
	old, err := state(before)
	if err != nil {
		return "", fmt.Errorf("read the earlier state: %w", err)
	}
	defer func() { err = errors.Join(err, old.Close()) }()
	now, err := state(after)
	if err != nil {
		return "", fmt.Errorf("read the later state: %w", err)
	}
	defer func() { err = errors.Join(err, now.Close()) }()

	sum := sha256.New()
	out := bufio.NewWriterSize(io.MultiWriter(w, sum), 1<<16)
	d := differ{w: tar.NewWriter(out), clamp: clamp.Truncate(time.Second), below: below, now: now}
	if err := d.link(old, now); err != nil {
		return "", err
	}
	if err := d.dir("", old.root, now.root); err != nil {
		return "", fmt.Errorf("write layer: %w", err)
	}
	if err := errors.Join(d.w.Close(), out.Flush()); err != nil {
		return "", fmt.Errorf("write layer: %w", err)
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil)), nil
}

// clone returns a copy of the tree. The copy reads contents through t, so it must not be
// used after t is closed.
func (t *Tree) clone() *Tree {
	c := *t
	c.files, c.root = nil, copied(t.root, map[*erofs.Node]*erofs.Node{})
	return &c
}

// copied returns a copy of a file and everything below it. Seen maps files to their copies,
// because a file may have several names.
func copied(n *erofs.Node, seen map[*erofs.Node]*erofs.Node) *erofs.Node {
	if m := seen[n]; m != nil {
		return m
	}
	m := *n
	if n.Kind() != unix.S_IFDIR {
		seen[n] = &m
		return &m
	}
	m.Entries = make(map[string]*erofs.Node, len(n.Entries))
	for name, e := range n.Entries {
		m.Entries[name] = copied(e, seen)
	}
	return &m
}

// A differ writes the differences of two trees.
type differ struct {
	w          *tar.Writer
	clamp      time.Time
	below, now *Tree
	// Files with several names. Either all names of a file are written or none: a layer
	// cannot have a hard link to a file of another layer.
	groups map[*erofs.Node]*group
	// Files that are written although their content did not change: the name was a hard
	// link to a file that stays, and now is a file of its own.
	apart map[*erofs.Node]bool
}

// A group holds the state of one file with several names.
type group struct {
	write bool
	first string // name with which the content was written; empty before that
}

// linked returns the regular files with several names, each with its sorted names.
func (t *Tree) linked() map[*erofs.Node][]string {
	count := map[*erofs.Node]int{}
	_ = t.walk(func(_ string, n *erofs.Node) error {
		if n.Kind() == unix.S_IFREG {
			count[n]++
		}
		return nil
	})
	names := map[*erofs.Node][]string{}
	_ = t.walk(func(path string, n *erofs.Node) error {
		if count[n] > 1 {
			names[n] = append(names[n], path)
		}
		return nil
	})
	return names
}

// at returns the file of a path in the form of walk, or nil. It follows no links.
func (t *Tree) at(path string) *erofs.Node {
	n := t.root
	for part := range strings.SplitSeq(strings.TrimPrefix(path, "/"), "/") {
		if n = n.Entries[part]; n == nil {
			return nil
		}
	}
	return n
}

// link determines which files with several names have to be written.
func (d *differ) link(old, now *Tree) error {
	d.groups, d.apart = map[*erofs.Node]*group{}, map[*erofs.Node]bool{}
	for o, paths := range old.linked() {
		var stays *erofs.Node
		for _, p := range paths {
			n := now.at(p)
			if n == nil || n == stays {
				continue
			}
			same, err := d.same(o, n)
			if err != nil {
				return err
			}
			if same && stays == nil {
				stays = n
				continue
			}
			d.apart[n] = true
		}
	}
	for n, paths := range now.linked() {
		o := old.at(paths[0])
		same, err := d.same(o, n)
		if err != nil {
			return err
		}
		g := &group{write: d.apart[n] || !same}
		for _, p := range paths[1:] {
			g.write = g.write || old.at(p) != o
		}
		d.groups[n] = g
	}
	return nil
}

// time returns the modification time of a file in a layer.
func (d *differ) time(n *erofs.Node) time.Time {
	if m := time.Unix(n.Sec, 0); m.Before(d.clamp) {
		return m
	}
	return d.clamp
}

// same reports whether two files are equal in a layer. The first may be nil.
func (d *differ) same(o, n *erofs.Node) (bool, error) {
	if o == n {
		return true, nil
	}
	if o == nil || o.Mode != n.Mode || o.UID != n.UID || o.GID != n.GID {
		return false, nil
	}
	switch n.Kind() {
	case unix.S_IFDIR:
		return true, nil
	case unix.S_IFREG:
		if o.Size != n.Size || !d.time(o).Equal(d.time(n)) {
			return false, nil
		}
		return sameContent(o, n)
	}
	return o.Text == n.Text && d.time(o).Equal(d.time(n)), nil
}

// sameContent compares two files of the same size.
func sameContent(a, b *erofs.Node) (bool, error) {
	if a.From == b.From && a.At == b.At && a.Text == b.Text {
		return true, nil
	}
	const piece = 1 << 18
	x, y := make([]byte, min(piece, a.Size)), make([]byte, min(piece, a.Size))
	ra, rb := content(a), content(b)
	for left := a.Size; left > 0; {
		n := min(left, piece)
		if _, err := io.ReadFull(ra, x[:n]); err != nil {
			return false, err
		}
		if _, err := io.ReadFull(rb, y[:n]); err != nil {
			return false, err
		}
		if !bytes.Equal(x[:n], y[:n]) {
			return false, nil
		}
		left -= n
	}
	return true, nil
}

// content reads a regular file.
func content(n *erofs.Node) io.Reader {
	if n.From == nil {
		return strings.NewReader(n.Text)
	}
	return io.NewSectionReader(n.From, n.At, n.Size)
}

// dir writes the differences below a directory. Old is nil if the directory is new.
func (d *differ) dir(path string, old, now *erofs.Node) error {
	var was map[string]*erofs.Node
	if old != nil {
		was = old.Entries
	}
	names := slices.Collect(maps.Keys(was))
	for name := range now.Entries {
		if was[name] == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		o, n := was[name], now.Entries[name]
		if n == nil {
			if err := d.w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: path + whiteoutPrefix + name, ModTime: d.clamp}); err != nil {
				return err
			}
			continue
		}
		same, err := d.same(o, n)
		if err != nil {
			return err
		}
		write := !same || d.apart[n]
		if g := d.groups[n]; g != nil {
			write = g.write
		}
		if write {
			if err := d.write(path+name, n); err != nil {
				return err
			}
		}
		if n.Kind() != unix.S_IFDIR || n == o {
			continue
		}
		if o != nil && o.Kind() != unix.S_IFDIR {
			o = nil
		}
		if err := d.dir(path+name+"/", o, n); err != nil {
			return err
		}
	}
	return nil
}

// write writes an entry.
func (d *differ) write(path string, n *erofs.Node) error {
	h := &tar.Header{Name: path, Mode: int64(n.Mode & 0o7777), Uid: int(n.UID), Gid: int(n.GID), ModTime: d.time(n)}
	switch n.Kind() {
	case unix.S_IFDIR:
		h.Typeflag, h.Name = tar.TypeDir, path+"/"
	case unix.S_IFLNK:
		h.Typeflag, h.Linkname = tar.TypeSymlink, n.Text
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, n.Size
		if g := d.groups[n]; g != nil && g.first != "" {
			h.Typeflag, h.Size, h.Linkname = tar.TypeLink, 0, g.first
		} else if g != nil {
			g.first = path
		}
	default:
		return nil // devices of the image below
	}
	if err := d.w.WriteHeader(h); err != nil {
		return fmt.Errorf("%.256q: %w", path, err)
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	_, err := io.Copy(d.w, d.content(path, n))
	return err
}

// content returns the content of a file in a layer. A .pyc file contains the time of its
// source, and Python compiles again if the source has another time. So .pyc files get the
// time that their source has in the layer.
//
//	PEP 552: magic number, flags, time, size of the source; each 4 bytes
func (d *differ) content(path string, n *erofs.Node) io.Reader {
	all := content(n)
	dir, base := split(path)
	dir, cached := strings.CutSuffix(dir, "__pycache__/")
	name, _, _ := strings.Cut(base, ".")
	if !cached || !strings.HasSuffix(base, ".pyc") || n.Size < 16 {
		return all
	}
	head := make([]byte, 16)
	if _, err := io.ReadFull(content(n), head); err != nil || string(head[2:8]) != "\r\n\x00\x00\x00\x00" {
		return all // it contains a hash of the source, or is not a .pyc file
	}
	source := d.now.at("/" + dir + name + ".py")
	was := d.below.at("/" + dir + name + ".py")
	le := binary.LittleEndian
	// gVisor rounds times to seconds, and Python cuts them off.
	if source == nil || uint32(source.Sec)-le.Uint32(head[8:]) > 1 || was != nil && was.Sec == source.Sec { // no layer has it
		return all
	}
	le.PutUint32(head[8:], uint32(d.time(source).Unix()))
	_, _ = io.CopyN(io.Discard, all, int64(len(head))) // the next read returns the error
	return io.MultiReader(bytes.NewReader(head), all)
}
