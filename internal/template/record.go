package template

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"postern/internal/rootfs"
)

// A Record says what is in a template.
type Record struct {
	ID     string    `json:"id"`
	Names  []string  `json:"names"`           // that resolve to it; none of one that an older program has built
	Built  time.Time `json:"built"`           // time of the build
	Digest string    `json:"digest,omitzero"` // of the image, in hex; empty if it has none
	Path   string    `json:"path"`            // absolute path of the image, or of the directory if it has none
	Bytes  int64     `json:"bytes"`           // of the image, or of the directory

	Packages []rootfs.Package `json:"packages"` // sorted by kind and name; none of one without an image
}

// List returns the templates that are on this machine, also those of older programs,
// sorted by ID. It does not keep others from removing them.
func (c *Cache) List() ([]Template, error) {
	dirs, err := os.ReadDir(filepath.Join(c.cfg.Dir, "templates")) // sorted
	if err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	var out []Template
	for _, d := range dirs {
		t, err := c.read(d.Name())
		if errors.Is(err, os.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil {
			return nil, fmt.Errorf("list templates: %w", err)
		}
		out = append(out, t)
	}
	return out, nil
}

// Record returns what is in a template of this machine. Its error wraps [ErrNotFound]
// if there is none with that ID.
func (c *Cache) Record(id string) (Record, error) {
	if !plain(id) {
		return Record{}, fmt.Errorf("inspect template %.64q: %w", id, ErrNotFound)
	}
	t, err := c.open(id)
	if errors.Is(err, os.ErrNotExist) {
		return Record{}, fmt.Errorf("inspect template %.64q: %w", id, ErrNotFound)
	} else if err != nil {
		return Record{}, fmt.Errorf("inspect template %.64q: %w", id, err)
	}
	r := Record{ID: t.ID, Built: t.Built, Path: t.Rootfs, Bytes: t.Bytes}
	for _, known := range c.recipes {
		if known.id() == id {
			r.Names = known.names()
		}
	}
	if t.RootImage != "" {
		st, err := os.Stat(t.RootImage)
		if err != nil {
			return Record{}, fmt.Errorf("inspect template %s: %w", id, err)
		}
		r.Path, r.Bytes = t.RootImage, st.Size()
		r.Digest = strings.TrimSuffix(strings.TrimPrefix(filepath.Base(t.RootImage), rootPrefix), imageSuffix)
	}
	if t.RootImage == "" {
		return r, nil
	}
	tree, err := rootfs.Open(t.RootImage)
	if err != nil {
		return Record{}, fmt.Errorf("inspect template %s: %w", id, err)
	}
	r.Packages = tree.Packages()
	return r, tree.Close()
}

// WriteSPDX writes what is in a template as a document in SPDX 2.3 (JSON). Its error wraps
// [ErrNotFound] if there is no template with that ID.
func (c *Cache) WriteSPDX(w io.Writer, id string) error {
	r, err := c.Record(id)
	if err != nil {
		return err
	}
	var d rootfs.Document
	if n, err := hex.Decode(d.Image[:], []byte(r.Digest)); err != nil || n != len(d.Image) {
		return fmt.Errorf("inspect template %s: an older program has built it without an image", id)
	}
	d.Name, d.Created, d.Tool = id, r.Built, "postern"
	tree, err := rootfs.Open(r.Path)
	if err != nil {
		return fmt.Errorf("inspect template %s: %w", id, err)
	}
	return errors.Join(tree.WriteSPDX(w, d), tree.Close())
}
