package build

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/erofs"
	"postern/internal/registry"
	"postern/internal/rootfs"
	"postern/internal/store"
)

// A Record describes what a finished build consists of.
type Record struct {
	Template Template
	Build    Build
	Tags     []string         // current tags of the build, sorted
	Packages []rootfs.Package // software in its root file system, sorted
}

// finished returns the finished build that a name refers to: a build of who's project, or
// of a published template. An empty tag means "default".
func (s *Service) finished(ctx context.Context, who auth.Principal, nameOrID string) (t Template, b Build, tags []string, err error) {
	if err := mayRead(who); err != nil {
		return Template{}, Build{}, nil, err
	}
	n, err := parseName(nameOrID)
	if err != nil {
		return Template{}, Build{}, nil, fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		if t, err = find(ctx, tx, who, n); err != nil {
			return err
		}
		if b, err = tagged(ctx, tx, t, n.tag); err != nil {
			return err
		}
		tags, err = tx.Strings(ctx, `select tag from template_tag where template_id = $1 and build_id = $2 order by tag`, t.ID, b.ID)
		return err
	})
	if err == nil && b.server != s.conf.Server {
		err = fmt.Errorf("%w: its image is on another server", ErrNotFound)
	}
	if err != nil {
		return Template{}, Build{}, nil, fmt.Errorf("template %.100q: %w", nameOrID, err)
	}
	return t, b, tags, nil
}

// open opens the image of a build. Its caller closes the tree.
func (s *Service) open(b Build) (*rootfs.Tree, error) {
	t, err := rootfs.Open(s.imagePath(b.Image))
	if err != nil {
		return nil, fmt.Errorf("open image of build %s: %w", b.ID, err)
	}
	return t, nil
}

// Record describes the finished build that a name refers to.
func (s *Service) Record(ctx context.Context, who auth.Principal, nameOrID string) (out Record, err error) {
	if out.Template, out.Build, out.Tags, err = s.finished(ctx, who, nameOrID); err != nil {
		return Record{}, err
	}
	tree, err := s.open(out.Build)
	if err != nil {
		return Record{}, err
	}
	out.Packages = tree.Packages()
	return out, tree.Close()
}

// WriteSPDX writes the record as an SPDX 2.3 document in JSON.
func (s *Service) WriteSPDX(ctx context.Context, who auth.Principal, nameOrID, tool string, w io.Writer) error {
	t, b, _, err := s.finished(ctx, who, nameOrID)
	if err != nil {
		return err
	}
	tree, err := s.open(b)
	if err != nil {
		return err
	}
	d := rootfs.Document{Name: t.Names[0], Layers: b.Result.Layers, Created: b.Ended, Tool: tool}
	sum, err := hex.DecodeString(b.Image)
	if err == nil && len(sum) == len(erofs.Digest{}) {
		d.Image = erofs.Digest(sum)
	}
	return errors.Join(tree.WriteSPDX(w, d), tree.Close())
}

// An Export is a finished build that can be written as an OCI image.
type Export struct {
	s     *Service
	tree  *rootfs.Tree
	t     Template
	build Build
}

// Export opens the finished build that a name refers to for export. The caller closes it.
func (s *Service) Export(ctx context.Context, who auth.Principal, nameOrID string) (*Export, error) {
	t, b, _, err := s.finished(ctx, who, nameOrID)
	if err != nil {
		return nil, err
	}
	select {
	case s.exports <- struct{}{}: // each reads the image twice
	default:
		return nil, fmt.Errorf("%w: two templates are already being exported: try again later", ErrFull)
	}
	tree, err := s.open(b)
	if err != nil {
		<-s.exports
		return nil, err
	}
	return &Export{s, tree, t, b}, nil
}

// Close ends the export.
func (e *Export) Close() error {
	<-e.s.exports
	return e.tree.Close()
}

// Name returns the suggested file name.
func (e *Export) Name() string { return e.t.Names[0] + ".tar" }

// Write writes an OCI layout as a tar archive, with the root file system as one layer.
// The same build gives the same bytes.
func (e *Export) Write(ctx context.Context, w io.Writer) error {
	// The name of a blob is its digest, and precedes its bytes in the archive. Reading the
	// image twice avoids a temporary file of gigabytes.
	digest, size, err := e.tree.WriteLayer(contextWriter{ctx, io.Discard})
	if err != nil {
		return err
	}
	var env []string
	for _, k := range slices.Sorted(maps.Keys(e.build.Result.Env)) {
		env = append(env, k+"="+e.build.Result.Env[k])
	}
	config := map[string]any{"Env": env, "User": e.build.Result.User, "WorkingDir": e.build.Result.Dir}
	if c := e.build.Result.StartCmd; c != "" {
		config["Cmd"] = []string{"/bin/sh", "-c", c}
	}
	type descriptor struct {
		MediaType   string            `json:"mediaType"`
		Digest      string            `json:"digest"`
		Size        int64             `json:"size"`
		Annotations map[string]string `json:"annotations,omitempty"`
	}
	blobs := map[string][]byte{}
	add := func(kind string, v any) descriptor {
		b, _ := json.Marshal(v) // our own types
		sum := sha256.Sum256(b)
		d := descriptor{MediaType: kind, Digest: "sha256:" + hex.EncodeToString(sum[:]), Size: int64(len(b))}
		blobs[d.Digest] = b
		return d
	}
	c := add("application/vnd.oci.image.config.v1+json", map[string]any{
		"created": e.build.Ended.UTC().Format(time.RFC3339), "os": "linux", "architecture": runtime.GOARCH, "config": config,
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest}},
	})
	m := add("application/vnd.oci.image.manifest.v1+json", map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": c,
		"layers": []descriptor{{MediaType: "application/vnd.oci.image.layer.v1.tar", Digest: digest, Size: size}},
	})
	m.Annotations = map[string]string{"org.opencontainers.image.ref.name": e.t.Names[0]}
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []descriptor{m}})
	if err != nil {
		return fmt.Errorf("export template: %w", err)
	}
	out := tar.NewWriter(w)
	file := func(name string, b []byte) error {
		err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(b))})
		if err == nil {
			_, err = out.Write(b)
		}
		return err
	}
	errs := []error{file("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)), file("index.json", index)}
	for _, d := range slices.Sorted(maps.Keys(blobs)) {
		errs = append(errs, file(blobName(d), blobs[d]))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("export template: %w", err)
	}
	if err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: blobName(digest), Mode: 0o644, Size: size}); err != nil {
		return fmt.Errorf("export template: %w", err)
	}
	if again, _, err := e.tree.WriteLayer(contextWriter{ctx, out}); err != nil || again != digest {
		return fmt.Errorf("export template: layer %s, then %s: %w", digest, again, err)
	}
	return out.Close()
}

func blobName(digest string) string { return "blobs/" + strings.Replace(digest, ":", "/", 1) }

// A contextWriter fails when its context ends.
type contextWriter struct {
	ctx context.Context
	w   io.Writer
}

func (c contextWriter) Write(b []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.w.Write(b)
}

// An Importer is a [Puller] that also imports images from files.
type Importer interface {
	// Import returns the images in a file of "docker save" or an OCI layout. It stores
	// their layers on this machine.
	Import(ctx context.Context, name string) ([]registry.Image, error)
}

// Import builds a template of who's project from the image in r: a file of "docker save",
// or an OCI layout as a tar archive, which may be compressed. It returns when the build
// has been started.
func (s *Service) Import(ctx context.Context, who auth.Principal, q Request, r io.Reader) (Template, Build, error) {
	fail := func(err error) (Template, Build, error) {
		return Template{}, Build{}, fmt.Errorf("import template: %w", err)
	}
	if err := mayManage(who); err != nil {
		return Template{}, Build{}, err
	}
	images, ok := s.images.(Importer)
	if !ok {
		return fail(fmt.Errorf("%w: this server imports no images", ErrInvalid))
	}
	select {
	case s.imports <- struct{}{}:
		defer func() { <-s.imports }()
	default:
		return fail(fmt.Errorf("%w: another image is being imported: try again later", ErrFull))
	}
	f, err := os.CreateTemp(filepath.Join(s.conf.Dir, workDir), "")
	if err != nil {
		return fail(err)
	}
	defer f.Close()
	if err := os.Remove(f.Name()); err != nil { // so that a crash leaves nothing
		return fail(err)
	}
	if err := s.spool(f, r); err != nil {
		return fail(err)
	}
	got, err := images.Import(ctx, fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return fail(err)
	}
	if len(got) != 1 {
		return fail(fmt.Errorf("%w: the file holds %d images: save one", ErrInvalid, len(got)))
	}
	t, b, err := s.Create(ctx, who, q)
	if err != nil {
		return fail(err)
	}
	name := clean(got[0].Name, 200)
	if name == "" {
		name = "imported image"
	}
	return t, b, s.Start(ctx, who, t.ID, b.ID, Definition{FromImage: name, Imported: &got[0]})
}

// spool copies r to f. It enforces the limit for uploads and the disk's free space.
func (s *Service) spool(f *os.File, r io.Reader) error {
	limit := s.conf.MaxUploadsMB << 20
	for n := int64(0); ; {
		if err := s.room(64 << 20); err != nil {
			return err
		}
		m, err := io.CopyN(f, r, 64<<20)
		if n += m; n > limit {
			return fmt.Errorf("%w: the image has more than %d MiB: import a smaller one", ErrTooLarge, s.conf.MaxUploadsMB)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive image: %w", err)
		}
	}
}
