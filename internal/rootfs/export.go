package rootfs

import (
	"archive/tar"
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"time"
)

// WriteLayer writes the tree as one layer of an OCI image, and returns the layer's digest
// and size in bytes. The same tree produces the same bytes. Devices are left out.
func (t *Tree) WriteLayer(w io.Writer) (digest string, size int64, err error) {
	sum := sha256.New()
	n := &counter{}
	out := bufio.NewWriterSize(io.MultiWriter(w, sum, n), 1<<16)
	d := differ{w: tar.NewWriter(out), clamp: time.Unix(math.MaxInt32, 0)}
	empty := New()
	if err := d.link(empty, t); err != nil {
		return "", 0, fmt.Errorf("write layer: %w", err)
	}
	if err := d.dir("", empty.root, t.root); err != nil {
		return "", 0, fmt.Errorf("write layer: %w", err)
	}
	if err := errors.Join(d.w.Close(), out.Flush()); err != nil {
		return "", 0, fmt.Errorf("write layer: %w", err)
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil)), n.n, nil
}

type counter struct{ n int64 }

func (c *counter) Write(b []byte) (int, error) {
	c.n += int64(len(b))
	return len(b), nil
}
