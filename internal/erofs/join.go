package erofs

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// A joined image takes the content of most files from other images, its parts, without a
// copy. Its file holds only what is new:
//
//	head  an EROFS file system with one regular file, "image"
//	own   all inodes of the image, and the content that no part has
//
// The file "image" is the whole image: own, then the parts. In the head these are extents
// on several devices (the format's device table and chunk-based files): own is in the
// file itself, and each part is a device. The host's kernel joins them when it mounts the
// head, from files and without block devices. gVisor maps the result like any image.
//
// A part is named by the digest of its image and is in the same directory.
const (
	chunkBits     = 8 // blocks in an extent of the head, as a power of two: 1 MiB
	chunkBlocks   = 1 << chunkBits
	maxParts      = 16
	devicesAt     = superAt + superSize
	deviceSize    = 128
	deviceTag     = 64
	indexSize     = 8
	chunkBased    = 4 << 1 // an inode's format
	chunkIndexes  = 0x20   // of its content's format
	featureChunks = 0x4
	featureParts  = 0x8
	// joinedName is the name of the only file of the head.
	joinedName = "image"
)

// ErrJoin means that the host's kernel cannot join the parts of an image. On tmpfs it never
// can.
var ErrJoin = errors.New("the kernel cannot join the parts of an image; it needs root, Linux 6.12 or later with EROFS, and files on a disk")

// PartName returns the name of the file of an image that is a part of others.
func PartName(d Digest) string { return d.String() + ".erofs" }

// An Image is an open image.
type Image struct {
	*os.File // the image as one file

	Digest Digest
	// Parts are the images that it takes content from; nil unless it is joined.
	Parts []Digest

	segments []segment
}

// A segment is a range of blocks of an image that are in one file.
type segment struct {
	file          Digest
	start, blocks uint32 // in that file
}

// Open opens an image. That of a joined one needs root, and its parts in its directory;
// if the kernel cannot join them the error wraps [ErrJoin]. The caller closes the file.
func Open(path string) (*Image, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	i, err := open(f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open image %s: %w", path, err), f.Close())
	}
	return i, nil
}

func open(f *os.File) (*Image, error) {
	h, err := readHead(f)
	if err != nil {
		return nil, err
	}
	i := &Image{File: f, Digest: h.digest, segments: h.segments}
	if len(h.parts) == 0 {
		return i, nil
	}
	i.Parts = h.parts
	if i.File, err = join(f, h.parts); err != nil {
		return nil, err
	}
	return i, f.Close()
}

// Parts returns the images that the image at path takes content from, or nil. It needs
// neither them nor root.
func Parts(path string) ([]Digest, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h, err := readHead(f)
	if err != nil {
		return nil, fmt.Errorf("read image %s: %w", path, err)
	}
	return h.parts, nil
}

// A head is what the first block of a file says.
type head struct {
	digest   Digest
	parts    []Digest
	segments []segment
}

// readHead reads the head of a joined image, or the superblock of another one.
func readHead(f *os.File) (h head, err error) {
	bad := func(what string) (head, error) { return head{}, fmt.Errorf("%w: %s", ErrFormat, what) }
	st, err := f.Stat()
	if err != nil {
		return head{}, err
	}
	b := make([]byte, blockSize)
	if n, err := f.ReadAt(b, 0); n < blockSize {
		return bad(fmt.Sprintf("no superblock: %v", err))
	}
	le, sb := binary.LittleEndian, b[superAt:]
	if le.Uint32(sb) != magic {
		return bad("no superblock")
	}
	copy(h.digest[:], sb[48:])
	features, parts := le.Uint32(sb[80:]), int(le.Uint16(sb[86:]))
	if features == 0 {
		h.segments = []segment{{h.digest, 0, le.Uint32(sb[36:])}}
		return h, nil
	}
	if features != featureChunks|featureParts || parts < 1 || parts > maxParts {
		return bad("unknown features")
	}
	for i := range parts {
		d, err := parseDigest(b[devicesAt+i*deviceSize:][:2*len(Digest{})])
		if err != nil {
			return bad("the name of a part is not a digest")
		}
		h.parts = append(h.parts, d)
	}
	at := int64(devicesAt+parts*deviceSize) + 2*inodeSize // see writeHead
	size := le.Uint64(b[at+8:])
	chunks := (size>>blockBits + chunkBlocks - 1) >> chunkBits
	if size%blockSize != 0 || size>>blockBits > maxBlocks || at+inodeSize+int64(chunks)*indexSize > st.Size() {
		return bad("wrong size")
	}
	index := make([]byte, chunks*indexSize)
	if _, err := f.ReadAt(index, at+inodeSize); err != nil {
		return head{}, err
	}
	left := uint32(size >> blockBits)
	for c := range chunks {
		e := index[c*indexSize:]
		n := min(left, chunkBlocks)
		device, start := int(le.Uint16(e[2:])), le.Uint32(e[4:])
		if device > parts {
			return bad("an extent is on no part")
		}
		file := h.digest
		if device > 0 {
			file = h.parts[device-1]
		}
		left -= n
		if k := len(h.segments) - 1; k >= 0 && h.segments[k].file == file && h.segments[k].start+h.segments[k].blocks == start {
			h.segments[k].blocks += n
			continue
		}
		h.segments = append(h.segments, segment{file, start, n})
	}
	return h, nil
}

// join mounts the head f where nobody sees it and returns its file. The mount ends with
// the last descriptor of that file, also after a crash.
func join(f *os.File, parts []Digest) (*os.File, error) {
	fs, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrJoin, err)
	}
	defer unix.Close(fs)
	// By descriptor: a path may be too long for fsconfig(2).
	name := func(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }
	if err := unix.FsconfigSetString(fs, "source", name(f)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrJoin, err)
	}
	for _, d := range parts {
		p, err := os.Open(filepath.Join(filepath.Dir(f.Name()), PartName(d)))
		if err != nil {
			return nil, fmt.Errorf("open part: %w", err)
		}
		defer p.Close() // the kernel opens the part again, and keeps it open
		if h, err := readHead(p); err != nil {
			return nil, fmt.Errorf("read part %s: %w", p.Name(), err)
		} else if h.digest != d {
			return nil, fmt.Errorf("%w: part %s has the digest %s", ErrFormat, p.Name(), h.digest)
		}
		if err := unix.FsconfigSetString(fs, "device", name(p)); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrJoin, err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrJoin, err)
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrJoin, err)
	}
	defer unix.Close(mount)
	fd, err := unix.Openat(mount, joinedName, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open joined image: %w", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// WriteJoined is [WriteTree] for an image that takes from base the content of all nodes
// that refer to it. The parts of the new image are base, or the files that base consists
// of. If base has too many parts, the error wraps errors.ErrUnsupported. Only [Open]
// shows whether the kernel can join them.
func WriteJoined(ctx context.Context, w *os.File, root *Node, base *Image) (Digest, error) {
	b := builder{shared: map[*Node]*inode{}, base: base, parts: base.Files()}
	if len(b.parts) > maxParts {
		return Digest{}, fmt.Errorf("make image: %w: over %d parts", errors.ErrUnsupported, maxParts)
	}
	return b.writeTree(ctx, w, root)
}

// Files returns the images whose files i consists of, itself first. They become the parts
// of an image that is joined with i.
func (i *Image) Files() (files []Digest) {
	for _, s := range i.segments {
		if !slices.Contains(files, s.file) {
			files = append(files, s.file)
		}
	}
	return files
}

// inBase reports whether a file's content is taken from the base.
func (b *builder) inBase(n *inode) bool {
	return b.base != nil && n.Kind() == unix.S_IFREG && n.From == b.base.File && n.Size > 0 && n.At%blockSize == 0
}

// headSize returns the bytes of the head of an image with so many blocks.
func (b *builder) headSize(blocks uint64) int64 {
	chunks := (blocks + chunkBlocks - 1) >> chunkBits
	n := int64(devicesAt+len(b.parts)*deviceSize+3*inodeSize) + int64(chunks)*indexSize
	return (n + blockSize - 1) &^ (blockSize - 1)
}

// head returns the head of an image of which own blocks are in its file and the others
// in the parts.
func (b *builder) head(own, blocks uint64, d Digest) []byte {
	le := binary.LittleEndian
	out := make([]byte, b.headSize(blocks))
	number := map[Digest]uint16{} // of a device; the file itself has 0
	for i, p := range b.parts {
		number[p] = uint16(i + 1)
		device := out[devicesAt+i*deviceSize:]
		copy(device, p.String())
		for _, s := range b.base.segments {
			if s.file == p {
				le.PutUint32(device[deviceTag:], max(le.Uint32(device[deviceTag:]), s.start+s.blocks))
			}
		}
	}
	at := int64(devicesAt + len(b.parts)*deviceSize)
	file := &inode{Node: &Node{Mode: unix.S_IFREG | 0o444}, nlink: 1, offset: at + 2*inodeSize, size: blocks << blockBits}
	root := &inode{Node: &Node{Mode: unix.S_IFDIR | 0o755}, offset: at}
	root.begin()
	root.enter(joinedName, file)
	root.sort()
	root.inline = root.encode()
	root.size = uint64(len(root.inline))
	root.put(out, 1)
	file.put(out, 2)
	le.PutUint16(out[file.offset:], layoutExtended|chunkBased)
	le.PutUint32(out[file.offset+16:], chunkIndexes|chunkBits)
	index := out[file.offset+inodeSize:]
	extents := func(device uint16, start, n uint32) {
		for ; n > 0; n -= min(n, chunkBlocks) {
			le.PutUint16(index[2:], device)
			le.PutUint32(index[4:], start)
			index, start = index[indexSize:], start+chunkBlocks
		}
	}
	extents(0, uint32(len(out)>>blockBits), uint32(own))
	for _, s := range b.base.segments {
		extents(number[s.file], s.start, s.blocks)
	}
	sb := out[superAt:]
	le.PutUint32(sb[80:], featureChunks|featureParts)
	le.PutUint16(sb[86:], uint16(len(b.parts)))
	le.PutUint16(sb[88:], devicesAt/deviceSize)
	superblock(out, root, d, 2, uint32(len(out)>>blockBits)+uint32(own)) // the checksum includes all of it
	return out
}

// joinedDigest returns the digest of a joined image, given that of its own blocks.
func (b *builder) joinedDigest(own Digest) (d Digest) {
	sum := sha256.New()
	sum.Write(own[:])
	sum.Write(b.base.Digest[:])
	copy(d[:], sum.Sum(nil))
	return d
}

// CanClone reports whether the file system can share the blocks of an image with the empty
// file w, see [WriteTree]. It leaves w empty.
func (i *Image) CanClone(w *os.File) bool {
	err := unix.IoctlFileCloneRange(int(w.Fd()), &unix.FileCloneRange{Src_fd: int64(i.Fd()), Src_length: blockSize})
	return err == nil && w.Truncate(0) == nil
}
