package rootfs

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
)

// A Document describes a tree for its SPDX document.
type Document struct {
	Name    string       // of the template
	Image   erofs.Digest // of the tree's image
	Layers  []string     // digests from the bottom up: "sha256:" and 64 hex digits
	Created time.Time    // of the document
	Tool    string       // that made it, with its version: "postern-1.2"
}

// The parts of SPDX 2.3 that are used.
type (
	spdxDocument struct {
		Version       string             `json:"spdxVersion"`
		License       string             `json:"dataLicense"`
		ID            string             `json:"SPDXID"`
		Name          string             `json:"name"`
		Namespace     string             `json:"documentNamespace"`
		Creation      spdxCreation       `json:"creationInfo"`
		Packages      []spdxPackage      `json:"packages"`
		Relationships []spdxRelationship `json:"relationships"`
	}
	spdxCreation struct {
		Created  string   `json:"created"`
		Creators []string `json:"creators"`
	}
	spdxPackage struct {
		ID        string         `json:"SPDXID"`
		Name      string         `json:"name"`
		Version   string         `json:"versionInfo,omitempty"`
		Location  string         `json:"downloadLocation"`
		Analyzed  bool           `json:"filesAnalyzed"`
		Purpose   string         `json:"primaryPackagePurpose,omitempty"`
		Checksums []spdxChecksum `json:"checksums,omitempty"`
		Refs      []spdxRef      `json:"externalRefs,omitempty"`
		Comment   string         `json:"comment,omitempty"`
	}
	spdxChecksum struct {
		Algorithm string `json:"algorithm"`
		Value     string `json:"checksumValue"`
	}
	spdxRef struct {
		Category string `json:"referenceCategory"`
		Type     string `json:"referenceType"`
		Locator  string `json:"referenceLocator"`
	}
	spdxRelationship struct {
		From string `json:"spdxElementId"`
		Kind string `json:"relationshipType"`
		To   string `json:"relatedSpdxElement"`
	}
)

// WriteSPDX writes the contents of the tree as an SPDX 2.3 document in JSON: the image, its
// layers and the packages. Files are counted, not listed. The same tree and Document
// produce the same bytes.
func (t *Tree) WriteSPDX(w io.Writer, d Document) error {
	const document, image = "SPDXRef-DOCUMENT", "SPDXRef-image"
	out := spdxDocument{
		Version: "SPDX-2.3", License: "CC0-1.0", ID: document, Name: d.Name,
		Namespace: "https://spdx.org/spdxdocs/" + url.PathEscape(d.Name) + "-" + d.Image.String(),
		Creation:  spdxCreation{d.Created.UTC().Format("2006-01-02T15:04:05Z"), []string{"Tool: " + d.Tool}},
	}
	files, bytes := t.count()
	comment := fmt.Sprintf("%d files of %d bytes", files, bytes)
	if t.hasRPM() {
		comment += "; the database of rpm is not read, so its packages are not listed"
	}
	add := func(p spdxPackage, in, relation string) {
		p.Location = "NOASSERTION"
		out.Packages = append(out.Packages, p)
		out.Relationships = append(out.Relationships, spdxRelationship{in, relation, p.ID})
	}
	add(spdxPackage{ID: image, Name: d.Name, Version: d.Image.String(), Purpose: "CONTAINER", Comment: comment}, document, "DESCRIBES")
	for i, l := range d.Layers {
		p := spdxPackage{ID: fmt.Sprintf("SPDXRef-layer-%d", i+1), Name: l, Purpose: "ARCHIVE"}
		if sum, ok := strings.CutPrefix(l, "sha256:"); ok {
			p.Checksums = []spdxChecksum{{"SHA256", sum}}
		}
		add(p, image, "CONTAINS")
	}
	system := t.system()
	packages := t.Packages()
	for i, p := range packages {
		add(spdxPackage{
			ID: fmt.Sprintf("SPDXRef-package-%d", i+1), Name: p.Name, Version: p.Version,
			Refs: []spdxRef{{"PACKAGE-MANAGER", "purl", p.purl(system)}},
		}, image, "CONTAINS")
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", " ")
	enc.SetEscapeHTML(false)
	return enc.Encode(out)
}

// purl returns the package URL: https://github.com/package-url/purl-spec.
func (p Package) purl(system string) string {
	at := "pkg:" + p.Kind + "/"
	name := p.Name
	switch p.Kind {
	case "deb", "apk":
		at += url.PathEscape(system) + "/"
	case "pypi":
		name = strings.ReplaceAll(strings.ToLower(name), "_", "-")
	case "npm":
		if scope, rest, ok := strings.Cut(name, "/"); ok {
			at, name = at+"%40"+url.PathEscape(strings.TrimPrefix(scope, "@"))+"/", rest
		}
	}
	at += url.PathEscape(name) + "@" + url.PathEscape(p.Version)
	if p.Arch != "" {
		at += "?arch=" + url.QueryEscape(p.Arch)
	}
	return at
}

// system returns the distribution's name from os-release: "debian", "alpine".
func (t *Tree) system() string {
	for _, name := range []string{"/etc/os-release", "/usr/lib/os-release"} {
		b, err := t.ReadFile(name, maxMetadata)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			if id, ok := strings.CutPrefix(strings.TrimSpace(line), "ID="); ok && len(id) < 64 {
				return strings.Trim(id, `"'`)
			}
		}
	}
	return "linux"
}

// count returns the number of regular files and their total size in bytes.
func (t *Tree) count() (files, bytes int64) {
	seen := map[*erofs.Node]bool{}
	_ = t.walk(func(_ string, n *erofs.Node) error {
		if n.Kind() == unix.S_IFREG && !seen[n] {
			seen[n] = true
			files, bytes = files+1, bytes+n.Size
		}
		return nil
	})
	return files, bytes
}

func (t *Tree) hasRPM() bool {
	for _, d := range []string{"/var/lib/rpm", "/usr/lib/sysimage/rpm"} {
		if n, err := t.lookup(d); err == nil && len(n.Entries) > 0 {
			return true
		}
	}
	return false
}

func sortedNames(n *erofs.Node) []string { return slices.Sorted(maps.Keys(n.Entries)) }
