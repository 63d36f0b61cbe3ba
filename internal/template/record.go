package template

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// A Record says what is in a template.
type Record struct {
	ID     string    `json:"id"`
	Names  []string  `json:"names"`           // that resolve to it; none of one that an older program has built
	Built  time.Time `json:"built"`           // time of the build
	Digest string    `json:"digest,omitzero"` // of the image, in hex; empty if it has none
	Path   string    `json:"path"`            // absolute path of the image, or of the directory if it has none
	Bytes  int64     `json:"bytes"`           // of the image, or of the directory

	Packages []Package `json:"packages"` // sorted by kind and name
}

// A Package is an installed package.
type Package struct {
	Kind    string `json:"kind"` // "deb" or "npm"
	Name    string `json:"name"`
	Version string `json:"version"`
	Arch    string `json:"arch,omitzero"` // Debian's name of the architecture; empty for npm
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
	b, err := os.ReadFile(filepath.Join(filepath.Dir(t.Rootfs), "record.json"))
	if errors.Is(err, os.ErrNotExist) { // of an older program
		status, err := os.ReadFile(filepath.Join(t.Rootfs, "var/lib/dpkg/status"))
		if err != nil {
			return Record{}, fmt.Errorf("inspect template %s: %w", id, err)
		}
		r.Packages = debs(string(status))
		return r, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &r.Packages)
	}
	if err != nil {
		return Record{}, fmt.Errorf("inspect template %s: %w", id, err)
	}
	return r, nil
}

// debs returns the installed packages in dpkg's status file.
func debs(status string) []Package {
	var out []Package
	for stanza := range strings.SplitSeq(status, "\n\n") {
		f := fields(stanza)
		if f["package"] != "" && strings.HasSuffix(f["status"], " installed") {
			out = append(out, Package{Kind: "deb", Name: f["package"], Version: f["version"], Arch: f["architecture"]})
		}
	}
	slices.SortFunc(out, func(a, b Package) int { return strings.Compare(a.Name+"\x00"+a.Arch, b.Name+"\x00"+b.Arch) })
	return out
}
