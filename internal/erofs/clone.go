package erofs

import (
	"bufio"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// An output writes the content of an image after its inodes, from one file after the
// other. Where the file system can, blocks of a source are shared instead of copied
// (FICLONERANGE: XFS, btrfs), so that images of templates with a common base take its
// bytes on the disk once.
type output struct {
	w   *os.File
	at  int64 // offset of the next byte that goes to w
	sum hash.Hash
	buf *bufio.Writer // to w and sum

	share map[*os.File]bool // sources, and whether their blocks can be shared
	// What is shared next. Files that follow each other in a source and in the image
	// are one range.
	next struct {
		from     *os.File
		src, dst int64
		size     int64 // 0 means nothing
	}
}

func newOutput(w *os.File, at int64, sum hash.Hash) *output {
	o := &output{w: w, at: at, sum: sum, share: map[*os.File]bool{}}
	o.buf = bufio.NewWriterSize(io.MultiWriter(o, sum), 1<<20)
	return o
}

// Write writes to the image alone.
func (o *output) Write(b []byte) (int, error) {
	n, err := o.w.WriteAt(b, o.at)
	o.at += int64(n)
	return n, err
}

// flush writes everything that is still to be written.
func (o *output) flush() error { return errors.Join(o.buf.Flush(), o.clone()) }

// node writes the content of a regular file and zeros up to the end of the block.
func (o *output) node(n *inode) error {
	switch {
	case n.path != "":
		return writeFrom(o.buf, n)
	case n.From == nil:
		return writePadded(o.buf, strings.NewReader(n.Text), n)
	}
	if shared, err := o.shareNode(n); shared || err != nil {
		return err
	}
	return writePadded(o.buf, io.NewSectionReader(n.From, n.At, n.Size), n)
}

// shareNode takes the blocks of a file from its source, if they can be shared.
func (o *output) shareNode(n *inode) (bool, error) {
	can, known := o.share[n.From]
	if !known {
		can = sameDisk(n.From, o.w)
		o.share[n.From] = can
	}
	size := (n.Size + blockSize - 1) &^ (blockSize - 1)
	if !can || n.At%blockSize != 0 {
		return false, nil
	}
	// The end of the last block must be zero, as in an image; in an archive the next
	// file's header is there.
	last := make([]byte, blockSize)
	if got, err := n.From.ReadAt(last, n.At+size-blockSize); got < blockSize {
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return false, err
	}
	for _, b := range last[blockSize-(size-n.Size):] {
		if b != 0 {
			return false, nil
		}
	}
	if err := o.buf.Flush(); err != nil {
		return false, err
	}
	if _, err := io.CopyN(o.sum, io.NewSectionReader(n.From, n.At, size), size); err != nil {
		return false, fmt.Errorf("read %s: %w", n.name(), err)
	}
	next := &o.next
	if next.from != n.From || next.src+next.size != n.At || next.dst+next.size != o.at {
		if err := o.clone(); err != nil {
			return false, err
		}
		next.from, next.src, next.dst = n.From, n.At, o.at
	}
	next.size += size
	o.at += size
	if known {
		return true, nil
	}
	return true, o.clone() // whether it works shows here
}

// clone shares the next range. Where that fails it is copied.
func (o *output) clone() error {
	next := o.next
	o.next.size = 0
	if next.size == 0 {
		return nil
	}
	err := unix.IoctlFileCloneRange(int(o.w.Fd()), &unix.FileCloneRange{
		Src_fd: int64(next.from.Fd()), Src_offset: uint64(next.src), Src_length: uint64(next.size), Dest_offset: uint64(next.dst),
	})
	if err == nil {
		return nil
	}
	o.share[next.from] = false
	got, err := io.Copy(io.NewOffsetWriter(o.w, next.dst), io.NewSectionReader(next.from, next.src, next.size))
	if err == nil && got != next.size {
		err = fmt.Errorf("%s: a file has become shorter meanwhile", next.from.Name())
	}
	return err
}

// sameDisk reports whether two files are on one file system.
func sameDisk(a, b *os.File) bool {
	var x, y unix.Stat_t
	return unix.Fstat(int(a.Fd()), &x) == nil && unix.Fstat(int(b.Fd()), &y) == nil && x.Dev == y.Dev
}
