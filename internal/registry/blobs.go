package registry

import (
	"bufio"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// Layers are stored in Dir:
//
//	tmp/                  temporary files; emptied by New
//	blobs/sha256/ID.tar   a layer, uncompressed; ID is the hex of its DiffID
//	blobs/sha256/ID.json  the layer's record, written after it
//
// A layer without a record is ignored.

func (p *Puller) tmp() string   { return filepath.Join(p.conf.Dir, "tmp") }
func (p *Puller) blobs() string { return filepath.Join(p.conf.Dir, "blobs", "sha256") }

// A record describes a stored layer.
type record struct {
	Size    int64    `json:"size"`    // bytes of the tar archive
	Digests []string `json:"digests"` // blobs that contained the layer
	Origins []string `json:"origins"` // HOST:PORT/REPOSITORY that sent the layer
}

// maxOrigins bounds the lists of a record. The oldest entries are dropped. Then a layer
// may be downloaded once more.
const maxOrigins = 64

// unused is how long Prune spares an unused layer, so that a pull's caller has time to
// start using it.
const unused = time.Hour

// layer returns the layer in the blob d, and whether it was stored already.
func (s *session) layer(ctx context.Context, d v1.Descriptor, diff v1.Hash, left *budget) (Layer, bool, error) {
	// Pulls wait only for pulls from the same registry. The attack: a slow registry that
	// offers the digest of a popular layer.
	release, err := s.p.busy.wait(ctx, s.at.address()+" "+d.Digest.String())
	if err != nil {
		return Layer{}, false, err
	}
	defer release()
	l := Layer{Digest: d.Digest.String(), DiffID: diff.String(), Path: s.p.path(diff)}
	if size, ok, err := s.readable(ctx, d, diff); err != nil {
		return Layer{}, false, err
	} else if ok {
		l.Size = size
		return l, true, left.take(size)
	}
	err = s.again(ctx, func() error {
		res, err := s.get(ctx, http.MethodGet, "/v2/"+s.repo+"/blobs/"+d.Digest.String(), nil)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		l.Size, err = s.p.ingest(ctx, res.Body, d, diff, left, s.origin())
		if errors.Is(err, errTransfer) && !errors.Is(err, ErrInvalid) && ctx.Err() == nil {
			err = s.unreachable(s.at, err)
		}
		return err
	})
	return l, false, err
}

// readable reports whether the layer is stored and this session's caller may read it.
func (s *session) readable(ctx context.Context, d v1.Descriptor, diff v1.Hash) (int64, bool, error) {
	r, ok := s.p.record(diff)
	// The image's configuration may pair a blob with the wrong layer. So the pair must
	// have been verified when the blob was decompressed.
	if !ok || !slices.Contains(r.Digests, d.Digest.String()) {
		return 0, false, nil
	}
	if !slices.Contains(r.Origins, s.origin()) {
		host := s.at.address() + "/"
		if !slices.ContainsFunc(r.Origins, func(o string) bool { return strings.HasPrefix(o, host) }) {
			return 0, false, nil
		}
		// Another repository of this registry has sent it. Ask whether this one has it.
		res, err := s.get(ctx, http.MethodHead, "/v2/"+s.repo+"/blobs/"+d.Digest.String(), nil)
		if err != nil {
			return 0, false, nil //nolint:nilerr // then it is downloaded, which returns the error
		}
		res.Body.Close()
	}
	return r.Size, true, s.p.note(diff, r.Size, d.Digest.String(), s.origin())
}

func (p *Puller) path(diff v1.Hash) string { return filepath.Join(p.blobs(), diff.Hex+".tar") }

// record returns the record of a stored layer.
func (p *Puller) record(diff v1.Hash) (r record, ok bool) {
	b, err := os.ReadFile(filepath.Join(p.blobs(), diff.Hex+".json"))
	if err != nil || json.Unmarshal(b, &r) != nil {
		return record{}, false
	}
	info, err := os.Stat(p.path(diff))
	return r, err == nil && info.Size() == r.Size
}

// note adds to a layer's record, and marks the layer as used.
func (p *Puller) note(diff v1.Hash, size int64, digest, origin string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if err := os.Chtimes(p.path(diff), now, now); err != nil {
		return fmt.Errorf("layer %s: %w", diff, err)
	}
	r, _ := p.record(diff)
	if slices.Contains(r.Digests, digest) && (origin == "" || slices.Contains(r.Origins, origin)) {
		return nil
	}
	r.Size = size
	r.Digests = added(r.Digests, digest)
	r.Origins = added(r.Origins, origin)
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("layer %s: %w", diff, err)
	}
	return p.place(bytesWriter(b), filepath.Join(p.blobs(), diff.Hex+".json"))
}

func added(list []string, v string) []string {
	if v == "" || slices.Contains(list, v) {
		return list
	}
	if len(list) >= maxOrigins {
		list = list[1:]
	}
	return append(list, v)
}

func bytesWriter(b []byte) func(*os.File) error {
	return func(f *os.File) error {
		_, err := f.Write(b)
		return err
	}
}

// place writes a temporary file, syncs it and renames it to name.
func (p *Puller) place(write func(*os.File) error, name string) error {
	f, err := os.CreateTemp(p.tmp(), "")
	if err != nil {
		return fmt.Errorf("keep: %w", err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if err := write(f); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("keep: %w", err)
	}
	if err := os.Rename(f.Name(), name); err != nil {
		return fmt.Errorf("keep: %w", err)
	}
	return nil
}

// ingest decompresses a blob, verifies both digests and stores the layer. The caller
// closes r.
func (p *Puller) ingest(ctx context.Context, r io.Reader, d v1.Descriptor, diff v1.Hash, left *budget, origin string) (size int64, err error) {
	blob := &counted{r: r, hash: sha256.New(), left: d.Size}
	err = p.place(func(f *os.File) error {
		tar, err := uncompressed(bufio.NewReaderSize(blob, 1<<20))
		if blob.err != nil {
			return fmt.Errorf("blob %s: %w: %w", d.Digest, errTransfer, blob.err)
		}
		if err != nil {
			return fmt.Errorf("blob %s: %w", d.Digest, err)
		}
		defer tar.Close()
		h := sha256.New()
		w := &sink{p: p, f: f, left: left}
		defer func() {
			if err != nil {
				left.give(w.taken) // another attempt takes it again
			}
		}()
		size, err = io.Copy(io.MultiWriter(w, h), contextReader{ctx, tar})
		if err == nil {
			_, err = io.Copy(io.Discard, blob) // bytes after the compressed stream
		}
		switch {
		case w.err != nil:
			return w.err
		case ctx.Err() != nil:
			return fmt.Errorf("blob %s: %w", d.Digest, context.Cause(ctx))
		case blob.err != nil:
			return fmt.Errorf("blob %s: %w: %w", d.Digest, errTransfer, blob.err)
		case err != nil:
			return fmt.Errorf("%w: the blob %s is damaged: %w", ErrInvalid, d.Digest, err)
		case hexSum(blob.hash) != d.Digest.Hex:
			return fmt.Errorf("%w: the registry sent bytes that do not match %s", ErrInvalid, d.Digest)
		case hexSum(h) != diff.Hex:
			return fmt.Errorf("%w: the blob %s does not contain the layer %s", ErrInvalid, d.Digest, diff)
		}
		return nil
	}, p.path(diff))
	if err != nil {
		return 0, err
	}
	return size, p.note(diff, size, d.Digest.String(), origin)
}

// errTransfer means that the transfer of a blob failed.
var errTransfer = errors.New("transfer")

func hexSum(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)) }

// counted reads left bytes and hashes them. More bytes are an error. The attack: a body
// without end.
type counted struct {
	r    io.Reader
	hash hash.Hash
	left int64
	err  error // of r, other than io.EOF
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if int64(n) > c.left {
		n, err = 0, fmt.Errorf("%w: the blob is larger than the manifest says", ErrInvalid)
	}
	c.left -= int64(n)
	c.hash.Write(p[:n])
	if errors.Is(err, io.EOF) && c.left > 0 {
		err = fmt.Errorf("%d bytes are missing: %w", c.left, io.ErrUnexpectedEOF)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		c.err = err
	}
	return n, err
}

// uncompressed returns the tar archive in a blob. It detects the compression from the first
// bytes, because registries' media types are often wrong. The caller verifies both digests.
func uncompressed(r *bufio.Reader) (io.ReadCloser, error) {
	magic, err := r.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err //nolint:wrapcheck // a reader's
	}
	switch {
	case strings.HasPrefix(string(magic), "\x1f\x8b"):
		z, err := gzip.NewReader(r)
		if err != nil {
			return nil, fmt.Errorf("%w: it is damaged: %w", ErrInvalid, err)
		}
		return z, nil
	case string(magic) == "\x28\xb5\x2f\xfd":
		// The attack: frames that declare a large window, in several layers at once.
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(32<<20), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, fmt.Errorf("%w: it is damaged: %w", ErrInvalid, err)
		}
		return z.IOReadCloser(), nil
	}
	return io.NopCloser(r), nil
}

// A contextReader fails when its context ends, also while it decompresses buffered bytes.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx) //nolint:wrapcheck // a reader's
	}
	return c.r.Read(p) //nolint:wrapcheck // a reader's
}

// A budget is the number of bytes that is left for an image's layers.
type budget struct {
	left  atomic.Int64
	limit int64
}

func newBudget(n int64) *budget {
	b := &budget{limit: n}
	b.left.Store(n)
	return b
}

func (b *budget) take(n int64) error {
	if b.left.Add(-n) < 0 {
		return fmt.Errorf("%w: its layers have more than %d bytes when uncompressed", ErrInvalid, b.limit)
	}
	return nil
}

func (b *budget) give(n int64) { b.left.Add(n) }

// A sink writes a layer within the budget and the disk's free space.
type sink struct {
	p       *Puller
	f       *os.File
	left    *budget
	taken   int64
	checked int64 // value of taken at the last check of the disk
	err     error
}

func (w *sink) Write(b []byte) (n int, err error) {
	defer func() { w.err = err }()
	w.taken += int64(len(b))
	if err := w.left.take(int64(len(b))); err != nil {
		return 0, err
	}
	if w.checked == 0 || w.taken-w.checked > 64<<20 {
		w.checked = w.taken
		var st unix.Statfs_t
		if err := unix.Fstatfs(int(w.f.Fd()), &st); err == nil && int64(st.Bavail)*st.Bsize < w.p.conf.KeepFreeMB<<20 {
			return 0, fmt.Errorf("%w: the disk has less than %d MiB free", ErrFull, w.p.conf.KeepFreeMB)
		}
	}
	n, err = w.f.Write(b)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return n, fmt.Errorf("%w: the disk is full", ErrFull)
	}
	return n, err
}

// Prune removes the layers for whose DiffIDs keep returns false, unless a pull has used
// them within the last hour. It returns the DiffIDs of the removed layers.
func (p *Puller) Prune(keep func(diffID string) bool) ([]string, error) {
	entries, err := os.ReadDir(p.blobs())
	if err != nil {
		return nil, fmt.Errorf("prune layers: %w", err)
	}
	var gone []string
	var errs []error
	for _, e := range entries {
		hexID, ok := strings.CutSuffix(e.Name(), ".tar")
		if !ok {
			continue
		}
		id := "sha256:" + hexID
		if keep(id) {
			continue
		}
		removed, err := p.prune(hexID)
		if removed {
			gone = append(gone, id)
		}
		errs = append(errs, err)
	}
	return gone, errors.Join(errs...)
}

func (p *Puller) prune(hexID string) (bool, error) {
	p.mu.Lock() // keep pulls from using the layer meanwhile
	defer p.mu.Unlock()
	tar := filepath.Join(p.blobs(), hexID+".tar")
	info, err := os.Stat(tar)
	if errors.Is(err, fs.ErrNotExist) || err == nil && time.Since(info.ModTime()) < unused {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("prune layers: %w", err)
	}
	// The record first: a layer without one is ignored.
	if err := os.Remove(filepath.Join(p.blobs(), hexID+".json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("prune layers: %w", err)
	}
	if err := os.Remove(tar); err != nil {
		return false, fmt.Errorf("prune layers: %w", err)
	}
	return true, nil
}

// busy is a set of locks with names. The zero value is ready for use.
type busy struct {
	mu   sync.Mutex
	done map[string]chan struct{}
}

// wait acquires the lock of key. The caller calls release.
func (b *busy) wait(ctx context.Context, key string) (release func(), err error) {
	for {
		b.mu.Lock()
		c, ok := b.done[key]
		if !ok {
			if b.done == nil {
				b.done = map[string]chan struct{}{}
			}
			c = make(chan struct{})
			b.done[key] = c
			b.mu.Unlock()
			return func() {
				b.mu.Lock()
				defer b.mu.Unlock()
				delete(b.done, key)
				close(c)
			}, nil
		}
		b.mu.Unlock()
		select {
		case <-c:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for another pull: %w", context.Cause(ctx))
		}
	}
}
