// Package erofs writes EROFS images: read-only file systems in one file, which
// gVisor's kernel reads itself by mapping the file. It writes the small part of the
// format that gVisor reads (its package pkg/erofs): blocks of 4096 bytes, no
// compression, no extended attributes, and the content of regular files in whole
// blocks, since programs map them.
//
// An image has this layout:
//
//	0       1024 unused bytes, then the superblock
//	1152    inodes; symbolic links and the last parts of directories follow their inode
//	blocks  the other content of directories, then that of files
//
// The format is described in the Linux kernel, Documentation/filesystems/erofs.rst
// and fs/erofs/erofs_fs.h.
//
// An image is written from a directory or from a tree of nodes, and [Read] reads one as
// such a tree.
//
// The package must not follow symbolic links of the source, and must not write to
// it. The source must not change meanwhile. A directory is trusted: it is the root file
// system of a template, before any code of a user has run. Names, owners and contents
// of a tree may be hostile.
package erofs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	blockBits  = 12
	blockSize  = 1 << blockBits
	superAt    = 1024 // offset of the superblock
	superSize  = 128
	inodeSize  = 64 // of the extended form
	slotBits   = 5  // the number of an inode is its offset in units of 32 bytes
	direntSize = 12

	magic          = 0xe0f5e1e2
	compatChecksum = 1
	layoutExtended = 1      // bit 0 of an inode's format
	dataPlain      = 0 << 1 // content in whole blocks
	dataInline     = 2 << 1 // the last part of the content follows the inode
	maxNameLen     = 255
	maxSymlink     = blockSize - inodeSize // bytes, so that it fits behind its inode
	maxBlocks      = 1<<32 - 1             // block numbers have 32 bits: 16 TiB
	maxInodeBytes  = 1 << 28               // for all inodes; far more than any template has
)

// A Digest identifies an image: the first half of the SHA-256 of everything in it
// except for the superblock. It is also the UUID in the superblock.
type Digest [16]byte

// String returns d in hex.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// A Node is a file of a tree. The same Node under several names is a file with hard
// links; a directory has one name.
type Node struct {
	Mode     uint32 // type and permissions, as in st_mode
	UID, GID uint32
	Nsec     uint32 // of the time of the last modification
	Sec      int64  // of that time, since the epoch
	Rdev     uint64 // of a device: its number

	// The content of a regular file is Size bytes at offset At of From, or Text if From
	// is nil. Text is also the target of a symbolic link.
	Size int64
	At   int64
	From *os.File
	Text string

	Entries map[string]*Node // of a directory
}

// Kind returns the type of the file: the bits of S_IFMT.
func (n *Node) Kind() uint32 { return n.Mode & unix.S_IFMT }

// An inode is a file of the source.
type inode struct {
	*Node
	path    string // of the source, for reading its content; empty if it comes from a tree
	nlink   uint32
	entries []dirent // of a directory, sorted
	offset  int64    // of the inode in the image
	inline  []byte   // content that follows the inode
	blocks  []byte   // whole blocks of a directory
	block   uint32   // number of the first block of the content
	size    uint64   // bytes of content
	parent  *inode
}

type dirent struct {
	name string
	kind uint8
	to   *inode
}

// number returns the number of the inode in the image.
func (n *inode) number() uint64 { return uint64(n.offset) >> slotBits }

// A Pick says what becomes of a file of the source.
type Pick int

// The picks.
const (
	Keep  Pick = iota // it is in the image
	Omit              // it is not, nor what is below it
	Blank             // an empty regular file of root is in its place, to mount something over
)

// Write writes the image of the directory source to the empty file w. It calls pick
// with the path of each file relative to source; nil keeps all. Owners, permissions,
// times and hard links are kept, except that a directory without all of its files has no
// time, which would say when the missing ones changed. Extended attributes are not kept.
//
// Write does not sync w. If it returns an error, w holds no image.
func Write(ctx context.Context, w *os.File, source string, pick func(name string) Pick) (Digest, error) {
	b := builder{pick: pick, source: source, linked: map[[2]uint64]*inode{}}
	root, err := b.read(source, nil)
	if err != nil {
		return Digest{}, fmt.Errorf("make image of %s: %w", source, err)
	}
	d, err := b.write(ctx, w, root)
	if err != nil {
		return Digest{}, fmt.Errorf("make image of %s: %w", source, err)
	}
	return d, nil
}

// WriteTree writes the image of the tree below root to the empty file w. The image
// depends on nothing but names, nodes and contents: the same tree gives the same bytes.
//
// WriteTree does not sync w. If it returns an error, w holds no image.
func WriteTree(ctx context.Context, w *os.File, root *Node) (Digest, error) {
	b := builder{shared: map[*Node]*inode{}}
	return b.writeTree(ctx, w, root)
}

// writeTree writes the image of the tree below root.
func (b *builder) writeTree(ctx context.Context, w *os.File, root *Node) (Digest, error) {
	top, err := b.add(root, nil, "/")
	if err != nil {
		return Digest{}, fmt.Errorf("make image: %w", err)
	}
	d, err := b.write(ctx, w, top)
	if err != nil {
		return Digest{}, fmt.Errorf("make image: %w", err)
	}
	return d, nil
}

// WriteFile writes to w an image that is a single regular file: its root is the file.
// Only gVisor can mount it, over another file. Mode holds the permissions; the owner
// is root and the time is the epoch.
func WriteFile(w *os.File, content []byte, mode fs.FileMode) (Digest, error) {
	root := &inode{Node: &Node{Mode: unix.S_IFREG | uint32(mode.Perm())}, nlink: 1, size: uint64(len(content))}
	b := builder{all: []*inode{root}}
	d, err := b.writeContent(w, root, func(out *output) error {
		return writePadded(out.buf, bytes.NewReader(content), root)
	})
	if err != nil {
		return Digest{}, fmt.Errorf("make image of a file: %w", err)
	}
	return d, nil
}

// A builder makes one image.
type builder struct {
	pick   func(string) Pick
	source string
	linked map[[2]uint64]*inode // files with several names, by device and inode number
	shared map[*Node]*inode     // those of a tree
	all    []*inode             // in the order of their inodes

	base  *Image   // of a joined image; nil of others
	parts []Digest // the files that base consists of
}

// add adds a node of a tree and everything below it. The name is for errors.
func (b *builder) add(node *Node, parent *inode, name string) (*inode, error) {
	if first := b.shared[node]; first != nil {
		if node.Kind() == unix.S_IFDIR { // also if it is below itself
			return nil, fmt.Errorf("%q: the directory has two names", name)
		}
		first.nlink++
		return first, nil
	}
	n := &inode{Node: node, nlink: 1, parent: parent, size: uint64(node.Size)}
	b.shared[node] = n
	b.all = append(b.all, n)
	switch node.Kind() {
	case unix.S_IFREG:
		if node.Size < 0 || node.From == nil && node.Size != int64(len(node.Text)) {
			return nil, fmt.Errorf("%q: wrong size", name)
		}
	case unix.S_IFLNK:
		n.size = uint64(len(node.Text))
		if n.size == 0 || n.size > maxSymlink {
			return nil, fmt.Errorf("%q: the target of a symbolic link has %d bytes; 1 to %d are allowed", name, n.size, maxSymlink)
		}
	case unix.S_IFDIR:
		n.begin()
		for _, e := range slices.Sorted(maps.Keys(node.Entries)) {
			if e == "" || e == "." || e == ".." || len(e) > maxNameLen || strings.ContainsAny(e, "/\x00") {
				return nil, fmt.Errorf("%q: the name %.300q is not allowed", name, e)
			}
			c, err := b.add(node.Entries[e], n, e)
			if err != nil {
				return nil, err
			}
			n.enter(e, c)
		}
		n.sort()
	default:
		n.size = 0
	}
	return n, nil
}

// begin adds the entries that each directory has.
func (n *inode) begin() {
	n.nlink = 2
	up := n.parent
	if up == nil {
		up = n
	}
	n.entries = []dirent{{".", kindOf(unix.S_IFDIR), n}, {"..", kindOf(unix.S_IFDIR), up}}
}

// enter adds an entry.
func (n *inode) enter(name string, c *inode) {
	if c.Kind() == unix.S_IFDIR {
		n.nlink++
	}
	n.entries = append(n.entries, dirent{name, kindOf(c.Mode), c})
}

func (n *inode) sort() {
	slices.SortFunc(n.entries, func(a, b dirent) int { return strings.Compare(a.name, b.name) })
}

// read reads the file at path and everything below it.
func (b *builder) read(path string, parent *inode) (*inode, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return nil, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	n := &inode{path: path, nlink: 1, parent: parent, Node: &Node{
		Mode: st.Mode, UID: st.Uid, GID: st.Gid, Sec: st.Mtim.Sec, Nsec: uint32(st.Mtim.Nsec), Rdev: st.Rdev,
	}}
	key := [2]uint64{st.Dev, st.Ino}
	kind := n.Kind()
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		if first := b.linked[key]; first != nil {
			first.nlink++
			return first, nil
		}
		b.linked[key] = n
	}
	b.all = append(b.all, n)
	switch kind {
	case unix.S_IFREG:
		n.size = uint64(st.Size)
	case unix.S_IFLNK:
		target, err := os.Readlink(path)
		if err != nil {
			return nil, err
		}
		if len(target) > maxSymlink {
			return nil, fmt.Errorf("%s: the target of a symbolic link has over %d bytes", path, maxSymlink)
		}
		n.Text, n.size = target, uint64(len(target))
	case unix.S_IFDIR:
		if err := b.readDir(n); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// readDir reads the entries of a directory.
func (b *builder) readDir(n *inode) error {
	es, err := os.ReadDir(n.path)
	if err != nil {
		return err
	}
	n.begin()
	for _, e := range es {
		path := filepath.Join(n.path, e.Name())
		picked := Keep
		if b.pick != nil {
			rel, err := filepath.Rel(b.source, path)
			if err != nil {
				return err
			}
			picked = b.pick(rel)
		}
		if len(e.Name()) > maxNameLen {
			return fmt.Errorf("%s: the name has over %d bytes", path, maxNameLen)
		}
		var c *inode
		switch picked {
		case Omit:
			n.Sec, n.Nsec = 0, 0
			continue
		case Blank:
			n.Sec, n.Nsec = 0, 0
			c = &inode{path: path, nlink: 1, parent: n, Node: &Node{Mode: unix.S_IFREG | 0o644}}
			b.all = append(b.all, c)
		case Keep:
			if c, err = b.read(path, n); err != nil {
				return err
			}
		}
		n.enter(e.Name(), c)
	}
	n.sort()
	return nil
}

// kindOf returns the type of a file as directory entries hold it.
func kindOf(mode uint32) uint8 {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return 1
	case unix.S_IFDIR:
		return 2
	case unix.S_IFCHR:
		return 3
	case unix.S_IFBLK:
		return 4
	case unix.S_IFIFO:
		return 5
	case unix.S_IFSOCK:
		return 6
	case unix.S_IFLNK:
		return 7
	}
	return 0
}

// write writes the image of root.
func (b *builder) write(ctx context.Context, w *os.File, root *inode) (Digest, error) {
	// Only sizes are needed for the layout; numbers of inodes follow from it.
	for _, n := range b.all {
		switch n.Kind() {
		case unix.S_IFDIR:
			dir := n.encode()
			n.size = uint64(len(dir))
			whole := len(dir) &^ (blockSize - 1)
			if len(dir)-whole > blockSize-inodeSize { // does not fit behind the inode
				whole = len(dir)
			}
			n.blocks, n.inline = dir[:whole], dir[whole:]
		case unix.S_IFLNK:
			n.inline = []byte(n.Text)
		}
	}
	return b.writeContent(w, root, func(out *output) error {
		for _, n := range b.all {
			if len(n.blocks) == 0 {
				continue
			}
			if err := writePadded(out.buf, bytes.NewReader(n.blocks), &inode{Node: n.Node, size: uint64(len(n.blocks))}); err != nil {
				return err
			}
		}
		for _, n := range b.all {
			if n.Kind() != unix.S_IFREG || n.size == 0 || b.inBase(n) {
				continue
			}
			if err := ctx.Err(); err != nil {
				return context.Cause(ctx)
			}
			if err := out.node(n); err != nil {
				return err
			}
		}
		return nil
	})
}

// writeContent lays out the image, writes the inodes, and then what content writes:
// the whole blocks of directories and of files, in the order of b.all.
func (b *builder) writeContent(w *os.File, root *inode, content func(*output) error) (Digest, error) {
	at := int64(superAt + superSize)
	for _, n := range b.all {
		// The last part of the content must be in the block of its inode.
		need := int64(inodeSize + len(n.inline))
		if at%blockSize+need > blockSize {
			at = (at + blockSize - 1) &^ (blockSize - 1)
		}
		n.offset = at
		at = (at + need + inodeSize - 1) &^ (inodeSize - 1)
	}
	if at > maxInodeBytes {
		return Digest{}, fmt.Errorf("the inodes need %d bytes, over %d", at, maxInodeBytes)
	}
	next := uint64(at+blockSize-1) >> blockBits
	meta := make([]byte, next<<blockBits)
	place := func(n *inode, bytes uint64) {
		n.block = uint32(next)
		next += (bytes + blockSize - 1) >> blockBits
	}
	for _, n := range b.all {
		if len(n.blocks) > 0 {
			place(n, uint64(len(n.blocks)))
		}
	}
	for _, n := range b.all {
		if n.Kind() == unix.S_IFREG && n.size > 0 && !b.inBase(n) {
			place(n, n.size)
		}
	}
	own := next
	var headSize int64
	if b.base != nil {
		own = (next + chunkBlocks - 1) &^ (chunkBlocks - 1)
		for _, n := range b.all {
			if b.inBase(n) {
				n.block = uint32(own) + uint32(n.At>>blockBits)
			}
		}
		next = own
		for _, s := range b.base.segments {
			next += uint64(s.blocks)
		}
		headSize = b.headSize(next)
	}
	if next+uint64(headSize>>blockBits) > maxBlocks {
		return Digest{}, fmt.Errorf("it has %d blocks, over %d", next, uint64(maxBlocks))
	}
	for i, n := range b.all {
		if len(n.entries) > 0 { // again, now that the numbers are known
			dir := n.encode()
			n.blocks, n.inline = dir[:len(n.blocks)], dir[len(n.blocks):]
		}
		n.put(meta, uint32(i+1))
	}
	sum := sha256.New()
	sum.Write(meta[superAt+superSize:])
	if _, err := w.WriteAt(meta, headSize); err != nil {
		return Digest{}, err
	}
	out := newOutput(w, headSize+int64(len(meta)), sum)
	if err := errors.Join(content(out), out.flush()); err != nil {
		return Digest{}, err
	}
	var d Digest
	copy(d[:], sum.Sum(nil))
	if b.base != nil {
		d = b.joinedDigest(d)
	}
	// The superblock comes last: without it there is no image.
	_, err := w.WriteAt(superblock(meta, root, d, uint64(len(b.all)), uint32(next)), headSize+superAt)
	if b.base == nil || err != nil {
		return d, err
	}
	if err := w.Truncate(headSize + int64(own)<<blockBits); err != nil {
		return Digest{}, err
	}
	_, err = w.WriteAt(b.head(own, next, d), 0)
	return d, err
}

// put writes the inode and what follows it into meta.
func (n *inode) put(meta []byte, ino uint32) {
	format := uint16(layoutExtended | dataPlain)
	if len(n.inline) > 0 {
		format = layoutExtended | dataInline
	}
	u := n.block
	switch n.Kind() {
	case unix.S_IFCHR, unix.S_IFBLK: // as the kernel's new_encode_dev
		major, minor := unix.Major(n.Rdev), unix.Minor(n.Rdev)
		u = minor&0xff | major<<8 | minor&^0xff<<12
	}
	le := binary.LittleEndian
	b := meta[n.offset:]
	le.PutUint16(b[0:], format)
	le.PutUint16(b[4:], uint16(n.Mode))
	le.PutUint64(b[8:], n.size)
	le.PutUint32(b[16:], u)
	le.PutUint32(b[20:], ino)
	le.PutUint32(b[24:], n.UID)
	le.PutUint32(b[28:], n.GID)
	le.PutUint64(b[32:], uint64(n.Sec))
	le.PutUint32(b[40:], n.Nsec)
	le.PutUint32(b[44:], n.nlink)
	copy(b[inodeSize:], n.inline)
}

// encode returns the content of a directory: blocks that begin with entries and
// continue with their names. The last block is not padded.
func (n *inode) encode() []byte {
	var out []byte
	for left := n.entries; len(left) > 0; {
		count, size := 0, 0
		for _, e := range left {
			if size+direntSize+len(e.name) > blockSize {
				break
			}
			size += direntSize + len(e.name)
			count++
		}
		out = append(out, make([]byte, -len(out)&(blockSize-1))...)
		block, names := make([]byte, count*direntSize, size), 0
		for i, e := range left[:count] {
			d := block[i*direntSize:]
			binary.LittleEndian.PutUint64(d, e.to.number())
			binary.LittleEndian.PutUint16(d[8:], uint16(count*direntSize+names))
			d[10] = e.kind
			names += len(e.name)
		}
		for _, e := range left[:count] {
			block = append(block, e.name...)
		}
		out, left = append(out, block...), left[count:]
	}
	return out
}

// writeFrom writes the content of a regular file of a directory.
func writeFrom(w io.Writer, n *inode) error {
	fd, err := unix.Open(n.path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: n.path, Err: err}
	}
	f := os.NewFile(uintptr(fd), n.path)
	defer f.Close()
	return writePadded(w, f, n)
}

// writePadded writes n.size bytes of r and zeros up to the end of the block.
func writePadded(w io.Writer, r io.Reader, n *inode) error {
	got, err := io.Copy(w, io.LimitReader(r, int64(n.size)))
	if err == nil && uint64(got) != n.size {
		err = fmt.Errorf("%s: a file has become shorter meanwhile: %d bytes, not %d", n.name(), got, n.size)
	}
	if err != nil {
		return err
	}
	_, err = w.Write(make([]byte, -n.size&(blockSize-1)))
	return err
}

// name names the source of a file, for errors.
func (n *inode) name() string {
	switch {
	case n.path != "":
		return n.path
	case n.From != nil:
		return n.From.Name()
	}
	return "tree"
}

// superblock writes the superblock into the first block of meta, and returns it. Fields
// that it does not know stay as they are.
func superblock(meta []byte, root *inode, d Digest, inodes uint64, blocks uint32) []byte {
	le := binary.LittleEndian
	b := meta[superAt : superAt+superSize]
	le.PutUint32(b[0:], magic)
	le.PutUint32(b[8:], compatChecksum)
	b[12] = blockBits
	le.PutUint16(b[14:], uint16(root.number()))
	le.PutUint64(b[16:], inodes)
	le.PutUint32(b[36:], blocks)
	copy(b[48:], d[:])
	// The checksum includes the rest of the first block. As it stands in the format,
	// it is not inverted at the end.
	le.PutUint32(b[4:], ^crc32.Checksum(meta[superAt:blockSize], crc32.MakeTable(crc32.Castagnoli)))
	return b
}
