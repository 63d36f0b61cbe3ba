package erofs

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrFormat means that a file is not an image as this package writes them.
var ErrFormat = errors.New("not an image of this program")

// The limits of images that are read.
const (
	maxDepth   = 1024    // of directories
	maxReadDir = 1 << 28 // bytes of one directory
)

// Read reads the tree of an image that this package wrote. The contents of regular
// files stay in f, which the nodes refer to. It is strict: what this package does not
// write is an error that wraps [ErrFormat].
func Read(f *os.File) (*Node, Digest, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, Digest{}, err
	}
	r := reader{f: f, size: st.Size(), nodes: map[uint64]*Node{}}
	root, err := r.image()
	if err != nil {
		return nil, Digest{}, fmt.Errorf("read image %s: %w", f.Name(), err)
	}
	return root, r.digest, nil
}

// parseDigest parses the text of a digest.
func parseDigest(text []byte) (d Digest, err error) {
	if n, err := hex.Decode(d[:], text); err != nil || n != len(d) {
		return Digest{}, fmt.Errorf("%w: %q is not a digest", ErrFormat, text)
	}
	return d, nil
}

// A reader reads one image.
type reader struct {
	f      *os.File
	size   int64 // of the file
	digest Digest
	left   uint64           // inodes that may still come
	room   int64            // bytes of contents that may still come: they do not overlap
	nodes  map[uint64]*Node // by their number
	// Inodes and the blocks of directories are in the order in which they are read, so
	// each has a window of its own.
	inodes, dirs window
}

// A window is a part of the file in memory.
type window struct {
	at int64
	b  []byte
}

// bytes returns n bytes at an offset, valid until the next call with this window.
func (r *reader) bytes(w *window, at, n int64) ([]byte, error) {
	if at < 0 || n < 0 || at > r.size-n {
		return nil, fmt.Errorf("%w: %d bytes at %d of %d", ErrFormat, n, at, r.size)
	}
	if at < w.at || at+n > w.at+int64(len(w.b)) {
		b := make([]byte, min(max(n, 1<<18), r.size-at))
		if _, err := r.f.ReadAt(b, at); err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		w.at, w.b = at, b
	}
	return w.b[at-w.at:][:n], nil
}

func (r *reader) image() (*Node, error) {
	b, err := r.bytes(&r.inodes, superAt, blockSize-superAt)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	blocks := int64(le.Uint32(b[36:]))
	switch {
	case le.Uint32(b) != magic, b[12] != blockBits, le.Uint32(b[8:]) != compatChecksum:
		return nil, fmt.Errorf("%w: no superblock", ErrFormat)
	case le.Uint32(b[80:]) != 0, le.Uint32(b[40:]) != 0: // incompatible features, place of the inodes
		return nil, fmt.Errorf("%w: unknown features", ErrFormat)
	case blocks<<blockBits != r.size:
		return nil, fmt.Errorf("%w: %d blocks in %d bytes", ErrFormat, blocks, r.size)
	}
	sum := bytes.Clone(b)
	le.PutUint32(sum[4:], 0)
	if ^crc32.Checksum(sum, crc32.MakeTable(crc32.Castagnoli)) != le.Uint32(b[4:]) {
		return nil, fmt.Errorf("%w: wrong checksum", ErrFormat)
	}
	copy(r.digest[:], b[48:])
	r.left, r.room = le.Uint64(b[16:]), r.size
	root, err := r.node(uint64(le.Uint16(b[14:])), 0)
	if err == nil && root.Kind() != unix.S_IFDIR {
		err = fmt.Errorf("%w: the root is not a directory", ErrFormat)
	}
	return root, err
}

// node reads an inode, and what is below it if it is a directory.
func (r *reader) node(number uint64, depth int) (*Node, error) {
	if n := r.nodes[number]; n != nil {
		if n.Kind() == unix.S_IFDIR { // a cycle would never end
			return nil, fmt.Errorf("%w: a directory has two names", ErrFormat)
		}
		return n, nil
	}
	if r.left == 0 || depth > maxDepth || number > uint64(r.size)>>slotBits {
		return nil, fmt.Errorf("%w: too many files or directories in each other", ErrFormat)
	}
	r.left--
	at := int64(number << slotBits)
	b, err := r.bytes(&r.inodes, at, inodeSize)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	format, xattrs, size, u := le.Uint16(b), le.Uint16(b[2:]), int64(le.Uint64(b[8:])), le.Uint32(b[16:])
	n := &Node{
		Mode: uint32(le.Uint16(b[4:])), UID: le.Uint32(b[24:]), GID: le.Uint32(b[28:]),
		Sec: int64(le.Uint64(b[32:])), Nsec: le.Uint32(b[40:]),
	}
	r.nodes[number] = n
	plain := format == layoutExtended|dataPlain
	if !plain && format != layoutExtended|dataInline || xattrs != 0 || size < 0 || size > r.size {
		return nil, fmt.Errorf("%w: inode %d has another layout", ErrFormat, number)
	}
	data, inline := int64(u)<<blockBits, int64(0)
	if !plain {
		inline = size & (blockSize - 1)
		if inline == 0 || (at+inodeSize)%blockSize+inline > blockSize {
			return nil, fmt.Errorf("%w: inode %d has another layout", ErrFormat, number)
		}
	}
	if r.room -= size; r.room < 0 {
		// A megabyte would be a terabyte if it were the content of all files.
		return nil, fmt.Errorf("%w: contents overlap", ErrFormat)
	}
	switch n.Kind() {
	case unix.S_IFREG:
		if !plain || data > r.size-size {
			return nil, fmt.Errorf("%w: the content of inode %d is not in whole blocks", ErrFormat, number)
		}
		if size > 0 {
			n.Size, n.From, n.At = size, r.f, data
		}
	case unix.S_IFLNK:
		if plain || size > maxSymlink {
			return nil, fmt.Errorf("%w: inode %d has another layout", ErrFormat, number)
		}
		text, err := r.bytes(&r.inodes, at+inodeSize, size)
		if err != nil {
			return nil, err
		}
		n.Text = string(text)
	case unix.S_IFDIR:
		if size > maxReadDir {
			return nil, fmt.Errorf("%w: a directory has %d bytes", ErrFormat, size)
		}
		dir := make([]byte, 0, size)
		if whole := size - inline; whole > 0 {
			if b, err = r.bytes(&r.dirs, data, whole); err != nil {
				return nil, err
			}
			dir = append(dir, b...)
		}
		if inline > 0 {
			if b, err = r.bytes(&r.inodes, at+inodeSize, inline); err != nil {
				return nil, err
			}
			dir = append(dir, b...)
		}
		n.Entries = map[string]*Node{}
		return n, r.entries(n, dir, depth)
	case unix.S_IFCHR, unix.S_IFBLK:
		n.Rdev = unix.Mkdev(u>>8&0xfff, u&0xff|u>>12&0xfff00)
	}
	return n, nil
}

// entries reads the entries of a directory from its content.
func (r *reader) entries(n *Node, dir []byte, depth int) error {
	le := binary.LittleEndian
	last := ""
	for len(dir) > 0 {
		block := dir[:min(len(dir), blockSize)]
		dir = dir[len(block):]
		if len(block) < direntSize {
			return fmt.Errorf("%w: a directory is cut off", ErrFormat)
		}
		names := int(le.Uint16(block[8:]))
		if names == 0 || names%direntSize != 0 || names > len(block) {
			return fmt.Errorf("%w: a directory is malformed", ErrFormat)
		}
		for i := 0; i < names; i += direntSize {
			from, to := int(le.Uint16(block[i+8:])), len(block)
			if i+direntSize < names {
				to = int(le.Uint16(block[i+direntSize+8:]))
			}
			if from < names || from > to || to > len(block) {
				return fmt.Errorf("%w: a directory is malformed", ErrFormat)
			}
			b := block[from:to]
			if to == len(block) { // zeros up to the end of the block
				b, _, _ = bytes.Cut(b, []byte{0})
			}
			name := string(b)
			if name == "" || len(name) > maxNameLen || strings.ContainsAny(name, "/\x00") || name <= last {
				return fmt.Errorf("%w: a directory has the name %.300q", ErrFormat, name)
			}
			last = name
			if name == "." || name == ".." {
				continue
			}
			c, err := r.node(le.Uint64(block[i:]), depth+1)
			if err != nil {
				return err
			}
			n.Entries[name] = c
		}
	}
	return nil
}
