package registry

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	maxFiles  = 100_000 // in an archive
	maxImages = 64      // in an archive
)

// Import imports the images for this machine's platform from an OCI layout (a directory or
// a tar archive) or from a file of "docker save". Archives may be compressed with gzip or
// zstd. The names in an archive are never used as paths of the host.
func (p *Puller) Import(ctx context.Context, name string) ([]Image, error) {
	ctx, cancel := context.WithTimeout(ctx, p.conf.Timeout)
	defer cancel()
	src, err := p.source(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("import image: %w", err)
	}
	defer src.Close()
	images, err := p.importFrom(ctx, src)
	if err != nil {
		return nil, fmt.Errorf("import image: %w", err)
	}
	return images, nil
}

// A source reads the files of an archive or a directory. Names are relative, with slashes.
type source interface {
	io.Closer

	// open returns a file's contents and their size. The error wraps fs.ErrNotExist if
	// there is no such file.
	open(name string) (io.ReadCloser, int64, error)
}

func (p *Puller) importFrom(ctx context.Context, src source) ([]Image, error) {
	i := &importer{p: p, src: src}
	if b, err := i.read("index.json", maxManifest); err == nil {
		return i.layout(ctx, b)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	b, err := i.read("manifest.json", maxManifest)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: it is neither an OCI layout (with index.json) nor a file of docker save (with manifest.json)", ErrInvalid)
	}
	if err != nil {
		return nil, err
	}
	return i.saved(ctx, b)
}

// An importer reads the images of one source.
type importer struct {
	p   *Puller
	src source
}

// read returns a small file.
func (i *importer) read(name string, limit int64) ([]byte, error) {
	r, size, err := i.src.open(name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	if size > limit {
		return nil, fmt.Errorf("%w: %s is larger than %d bytes", ErrInvalid, printable(name), limit)
	}
	b, err := io.ReadAll(io.LimitReader(r, limit))
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrInvalid, printable(name), err)
	}
	return b, nil
}

// blob returns a small blob of an OCI layout, verified.
func (i *importer) blob(d v1.Descriptor, limit int64) ([]byte, error) {
	if d.Digest.Hex == "" {
		return nil, fmt.Errorf("%w: a descriptor has no digest", ErrInvalid)
	}
	b, err := i.read(blobName(d), limit)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: the blob %s is missing", ErrInvalid, d.Digest)
	}
	if err == nil && (hashOf(b) != d.Digest || int64(len(b)) != d.Size) {
		return nil, fmt.Errorf("%w: the file of %s does not match its digest", ErrInvalid, d.Digest)
	}
	return b, err
}

// blobName returns the path of a blob in an OCI layout. The digest was validated when it
// was parsed: an algorithm and hex digits.
func blobName(d v1.Descriptor) string { return "blobs/" + d.Digest.Algorithm + "/" + d.Digest.Hex }

// layout imports the images of an OCI layout: "Image Layout" of the Image Specification.
func (i *importer) layout(ctx context.Context, index []byte) (out []Image, err error) {
	if bytes.Count(index, []byte("{")) > maxParts {
		return nil, fmt.Errorf("%w: index.json has more than %d parts", ErrInvalid, maxParts)
	}
	var x v1.IndexManifest
	if err := json.Unmarshal(index, &x); err != nil {
		return nil, fmt.Errorf("%w: index.json is malformed: %w", ErrInvalid, err)
	}
	if len(x.Manifests) > maxImages {
		return nil, fmt.Errorf("%w: it has more than %d images", ErrInvalid, maxImages)
	}
	var other error
	for _, d := range x.Manifests {
		img, err := i.descriptor(ctx, d)
		if errors.Is(err, errPlatform) {
			other = err
			continue
		}
		if err != nil {
			return nil, err
		}
		img.Name = d.Annotations["io.containerd.image.name"]
		if img.Name == "" {
			img.Name = d.Annotations["org.opencontainers.image.ref.name"]
		}
		out = append(out, img)
	}
	if len(out) == 0 && other != nil {
		return nil, other
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: it has no images", ErrInvalid)
	}
	return out, nil
}

// descriptor imports the image that d refers to.
func (i *importer) descriptor(ctx context.Context, d v1.Descriptor) (Image, error) {
	for range maxDepth {
		if !d.MediaType.IsImage() && !d.MediaType.IsIndex() || !platform(d.Platform) {
			return Image{}, fmt.Errorf("%w: it has %s", errPlatform, printable(string(d.MediaType)))
		}
		b, err := i.blob(d, maxManifest)
		if err != nil {
			return Image{}, err
		}
		m, next, err := parseManifest(b, string(d.MediaType))
		if err != nil {
			return Image{}, err
		}
		if m != nil {
			return i.image(ctx, m, hashOf(b))
		}
		d = *next
	}
	return Image{}, fmt.Errorf("%w: more than %d indexes lead to its manifest", ErrInvalid, maxDepth-1)
}

func (i *importer) image(ctx context.Context, m *v1.Manifest, digest v1.Hash) (Image, error) {
	if _, err := checkLayers(m, i.p.conf); err != nil {
		return Image{}, err
	}
	b, err := i.blob(m.Config, maxConfig)
	if err != nil {
		return Image{}, err
	}
	c, err := parseConfig(b, m)
	if err != nil {
		return Image{}, err
	}
	return i.take(ctx, m, c, digest, func(n int) string { return blobName(m.Layers[n]) })
}

// take imports the layers of an image. name returns the file of a layer.
func (i *importer) take(ctx context.Context, m *v1.Manifest, c *configuration, digest v1.Hash, name func(int) string) (Image, error) {
	img := Image{Digest: digest.String(), Env: c.Config.Env}
	left := newBudget(i.p.conf.MaxBytes)
	for n, d := range m.Layers {
		r, size, err := i.src.open(name(n))
		if errors.Is(err, fs.ErrNotExist) {
			return Image{}, fmt.Errorf("%w: layer %d, %s, is missing", ErrInvalid, n+1, printable(name(n)))
		}
		if err != nil {
			return Image{}, err
		}
		if size != d.Size {
			r.Close()
			return Image{}, fmt.Errorf("%w: layer %d has %d bytes, not %d", ErrInvalid, n+1, size, d.Size)
		}
		diff := c.RootFS.DiffIDs[n]
		// No origin: a pull of this blob must download it from its registry.
		size, err = i.p.ingest(ctx, r, d, diff, left, "")
		r.Close()
		if err != nil {
			return Image{}, fmt.Errorf("layer %d of %d: %w", n+1, len(m.Layers), err)
		}
		img.Layers = append(img.Layers, Layer{Digest: d.Digest.String(), DiffID: diff.String(), Path: i.p.path(diff), Size: size})
	}
	return img, nil
}

// saved imports the images of a file of "docker save", of any version. Such a file has no
// OCI manifests, so the digest of an image is that of a manifest made here.
func (i *importer) saved(ctx context.Context, list []byte) (out []Image, err error) {
	var x []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(list, &x); err != nil {
		return nil, fmt.Errorf("%w: manifest.json is malformed: %w", ErrInvalid, err)
	}
	if len(x) == 0 || len(x) > maxImages {
		return nil, fmt.Errorf("%w: it has %d images, not 1 to %d", ErrInvalid, len(x), maxImages)
	}
	for _, e := range x {
		b, err := i.read(e.Config, maxConfig)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w: the configuration %s is missing", ErrInvalid, printable(e.Config))
		}
		if err != nil {
			return nil, err
		}
		m := &v1.Manifest{
			SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Layers: []v1.Descriptor{},
			Config: v1.Descriptor{MediaType: types.OCIConfigJSON, Size: int64(len(b)), Digest: hashOf(b)},
		}
		if len(e.Layers) > i.p.conf.MaxLayers {
			return nil, fmt.Errorf("%w: it has %d layers, more than %d", ErrInvalid, len(e.Layers), i.p.conf.MaxLayers)
		}
		for _, l := range e.Layers {
			d, err := i.describe(ctx, l)
			if err != nil {
				return nil, err
			}
			m.Layers = append(m.Layers, d)
		}
		if _, err := checkLayers(m, i.p.conf); err != nil {
			return nil, err
		}
		c, err := parseConfig(b, m)
		if err != nil {
			return nil, err
		}
		made, err := json.Marshal(m)
		if err != nil {
			return nil, fmt.Errorf("manifest: %w", err)
		}
		img, err := i.take(ctx, m, c, hashOf(made), func(n int) string { return e.Layers[n] })
		if err != nil {
			return nil, err
		}
		if len(e.RepoTags) > 0 {
			img.Name = e.RepoTags[0]
		}
		out = append(out, img)
	}
	return out, nil
}

// describe returns the descriptor of a layer's file.
func (i *importer) describe(ctx context.Context, name string) (v1.Descriptor, error) {
	r, size, err := i.src.open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return v1.Descriptor{}, fmt.Errorf("%w: the layer %s is missing", ErrInvalid, printable(name))
	}
	if err != nil {
		return v1.Descriptor{}, err
	}
	defer r.Close()
	h := sha256.New()
	if _, err := io.Copy(h, contextReader{ctx, r}); err != nil {
		return v1.Descriptor{}, fmt.Errorf("layer %s: %w", printable(name), err)
	}
	return v1.Descriptor{MediaType: types.OCIUncompressedLayer, Size: size, Digest: v1.Hash{Algorithm: "sha256", Hex: hexSum(h)}}, nil
}

// source opens the file or directory of an import.
func (p *Puller) source(ctx context.Context, name string) (source, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	if info.IsDir() {
		root, err := os.OpenRoot(name)
		if err != nil {
			return nil, fmt.Errorf("open: %w", err)
		}
		return dirSource{root}, nil
	}
	if !info.Mode().IsRegular() { // a pipe would block
		return nil, fmt.Errorf("%w: it is neither a file nor a directory", ErrInvalid)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	if f, err = p.plain(ctx, f); err != nil {
		return nil, err
	}
	s, err := newTarSource(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return s, nil
}

// plain returns the decompressed archive of f, in a temporary file without a name. It
// closes f unless it returns it.
func (p *Puller) plain(ctx context.Context, f *os.File) (*os.File, error) {
	magic := make([]byte, 4)
	n, _ := f.ReadAt(magic, 0) // the tar reader rejects a shorter file
	if !strings.HasPrefix(string(magic[:n]), "\x1f\x8b") && string(magic[:n]) != "\x28\xb5\x2f\xfd" {
		return f, nil
	}
	defer f.Close()
	r, err := uncompressed(bufio.NewReaderSize(f, 1<<20))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	out, err := os.CreateTemp(p.tmp(), "")
	if err != nil {
		return nil, fmt.Errorf("unpack: %w", err)
	}
	os.Remove(out.Name()) // so that a crash leaves nothing
	w := &sink{p: p, f: out, left: newBudget(p.conf.MaxBytes)}
	if _, err := io.Copy(w, contextReader{ctx, r}); err != nil {
		out.Close()
		if w.err != nil || ctx.Err() != nil {
			return nil, fmt.Errorf("unpack: %w", err)
		}
		return nil, fmt.Errorf("%w: it is damaged: %w", ErrInvalid, err)
	}
	return out, nil
}

// A dirSource is a directory. os.Root refuses links that lead out of it.
type dirSource struct{ *os.Root }

func (d dirSource) open(name string) (io.ReadCloser, int64, error) {
	if !fs.ValidPath(name) {
		return nil, 0, fmt.Errorf("%w: the name %s leads out of the directory", ErrInvalid, printable(name))
	}
	info, err := d.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, fmt.Errorf("%s: %w", printable(name), fs.ErrNotExist)
	}
	if err != nil || !info.Mode().IsRegular() {
		return nil, 0, fmt.Errorf("%w: %s is not a file in the directory", ErrInvalid, printable(name))
	}
	f, err := d.Open(name)
	if err != nil {
		return nil, 0, fmt.Errorf("open: %w", err)
	}
	return f, info.Size(), nil
}

// A tarSource is an uncompressed tar archive.
type tarSource struct {
	*os.File

	files map[string]span
	links map[string]string // targets of links, which older versions of docker save write
}

type span struct{ offset, size int64 }

func newTarSource(f *os.File) (*tarSource, error) {
	s := &tarSource{File: f, files: map[string]span{}, links: map[string]string{}}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("archive: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("archive: %w", err)
	}
	// The reader is not buffered, so after Next the file is at the entry's contents.
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return s, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%w: it is not a tar archive: %w", ErrInvalid, err)
		}
		if len(s.files)+len(s.links) >= maxFiles {
			return nil, fmt.Errorf("%w: it has more than %d files", ErrInvalid, maxFiles)
		}
		name := strings.TrimPrefix(h.Name, "./")
		switch h.Typeflag {
		case tar.TypeDir, tar.TypeXGlobalHeader:
			continue
		case tar.TypeReg, tar.TypeSymlink, tar.TypeLink:
		default:
			return nil, fmt.Errorf("%w: %s is neither a file nor a link", ErrInvalid, printable(h.Name))
		}
		_, file := s.files[name]
		_, link := s.links[name]
		switch {
		case !fs.ValidPath(name) || len(name) > 4096:
			return nil, fmt.Errorf("%w: %s is not a plain relative name", ErrInvalid, printable(h.Name))
		case file || link:
			return nil, fmt.Errorf("%w: %s is in it twice", ErrInvalid, printable(h.Name))
		case h.Typeflag == tar.TypeSymlink:
			s.links[name] = path.Join(path.Dir(name), h.Linkname) //nolint:gosec // a key of files, never a path of the host
			continue
		case h.Typeflag == tar.TypeLink:
			s.links[name] = path.Clean(h.Linkname)
			continue
		}
		for k := range h.PAXRecords {
			if strings.HasPrefix(k, "GNU.sparse") { // the contents are stored in pieces
				return nil, fmt.Errorf("%w: %s is stored as a sparse file", ErrInvalid, printable(h.Name))
			}
		}
		at, err := f.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, fmt.Errorf("archive: %w", err)
		}
		if h.Size > info.Size()-at {
			return nil, fmt.Errorf("%w: it ends within %s", ErrInvalid, printable(h.Name))
		}
		s.files[name] = span{at, h.Size}
	}
}

func (s *tarSource) open(name string) (io.ReadCloser, int64, error) {
	for range 8 { // links may lead to links, or form a cycle
		if f, ok := s.files[name]; ok {
			return io.NopCloser(io.NewSectionReader(s.File, f.offset, f.size)), f.size, nil
		}
		to, ok := s.links[name]
		if !ok {
			return nil, 0, fmt.Errorf("%s: %w", printable(name), fs.ErrNotExist)
		}
		name = to
	}
	return nil, 0, fmt.Errorf("%w: %s is a cycle of links", ErrInvalid, printable(name))
}
