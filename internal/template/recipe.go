package template

import (
	"bytes"
	"crypto/sha256"
	"crypto/sha512"
	"embed"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// The server's own templates. Each file of definitions/ is one; recipe/ has the files
// and scripts that they name.
//
//go:embed definitions/*.yaml
var definitionFiles embed.FS

//go:embed all:recipe
var recipeFiles embed.FS

// The first of them is what sandboxes start from by default.
var definitionNames = []string{"base", "slim"}

// These are part of every key. Increment them if build.go changes the result of the same
// recipe: of the packages, or only of what is done on top of them.
const (
	packagesVersion = "2"
	finishVersion   = "2"
)

// A definition is a file of definitions/, as it is written.
type definition struct {
	Name     string            `yaml:"name"`
	Aliases  []string          `yaml:"aliases"`
	Suite    string            `yaml:"suite"`
	Variant  string            `yaml:"variant"`
	Packages []string          `yaml:"packages"`
	Exclude  []string          `yaml:"exclude"`
	NPM      []npmPackage      `yaml:"npm"`
	Links    map[string]string `yaml:"links"`
	Files    map[string]string `yaml:"files"`
	Finish   []string          `yaml:"finish"`
	Services []string          `yaml:"services"`
	Ready    *Ready            `yaml:"ready"`
}

// An npmPackage is a package of the npm registry.
type npmPackage struct {
	Package   string            `yaml:"package"`
	Arch      string            `yaml:"arch"` // Go's name of an architecture; empty for all
	Version   string            `yaml:"version"`
	Integrity string            `yaml:"integrity"` // "sha512-" and base64, of the archive
	Files     map[string]string `yaml:"files"`     // path in the archive, without its first directory, to path inside
}

// sum returns the SHA-512 of the archive.
func (n npmPackage) sum() ([]byte, error) {
	b, ok := strings.CutPrefix(n.Integrity, "sha512-")
	sum, err := base64.StdEncoding.DecodeString(b)
	if !ok || err != nil || len(sum) != sha512.Size {
		return nil, fmt.Errorf("npm package %s: the integrity %q is not \"sha512-\" and a SHA-512 in base64", n.Package, n.Integrity)
	}
	return sum, nil
}

// A recipe determines the content of a root file system, except for the versions of
// Debian's packages: those are the current ones.
type recipe struct {
	name     string
	aliases  []string     // not part of the key
	suite    string       // Debian release
	variant  string       // of mmdebstrap: the initial set of packages
	packages []string     // Debian packages, sorted
	exclude  []string     // paths that dpkg does not unpack
	npm      []npmPackage // for this architecture
	links    []file       // symbolic links, sorted; the text is the target
	files    []file       // written before finish
	finish   string       // shell script that runs inside at the end of the build
	ready    *Ready       // probe of its services; not part of the key
}

// A file is written into the root file system, owned by root.
type file struct {
	path string // absolute, inside
	text string
}

// recipes returns the recipes of all definitions.
func recipes() ([]recipe, error) {
	var out []recipe
	for _, name := range definitionNames {
		b, err := definitionFiles.ReadFile("definitions/" + name + ".yaml")
		if err != nil {
			return nil, fmt.Errorf("read recipes: %w", err)
		}
		r, err := parseRecipe(b, recipeFiles)
		if err != nil {
			return nil, fmt.Errorf("read recipe %s: %w", name, err)
		}
		out = append(out, r)
	}
	return out, nil
}

// parseRecipe parses a definition. The files that it names are below recipe/ in from.
func parseRecipe(b []byte, from fs.FS) (recipe, error) {
	dec := yaml.NewDecoder(bytes.NewReader(b))
	dec.KnownFields(true)
	var d definition
	if err := dec.Decode(&d); err != nil {
		return recipe{}, err
	}
	r := recipe{
		name: d.Name, aliases: d.Aliases, suite: d.Suite, variant: d.Variant,
		packages: d.Packages, exclude: d.Exclude, ready: d.Ready,
	}
	slices.Sort(r.packages)
	// They become arguments of a program that splits on commas and spaces.
	for _, p := range append([]string{d.Name, d.Suite, d.Variant}, r.packages...) {
		if p == "" || strings.Trim(p, "abcdefghijklmnopqrstuvwxyz0123456789.+-") != "" || p[0] == '-' {
			return recipe{}, fmt.Errorf("%q is not the name of a template, a release or a Debian package", p)
		}
	}
	if len(r.packages) == 0 {
		return recipe{}, errors.New("no packages")
	}
	for _, n := range d.NPM {
		if _, err := n.sum(); err != nil {
			return recipe{}, err
		}
		if n.Arch == "" || n.Arch == runtime.GOARCH {
			r.npm = append(r.npm, n)
		}
	}
	for at, to := range sorted(d.Links) {
		r.links = append(r.links, file{at, to})
	}
	if err := addFiles(&r, d, from); err != nil {
		return recipe{}, err
	}
	for _, f := range append(slices.Clone(r.links), r.files...) {
		if !path.IsAbs(f.path) || path.Clean(f.path) != f.path {
			return recipe{}, fmt.Errorf("%q is not a clean absolute path", f.path)
		}
	}
	return r, nil
}

// addFiles adds the files and scripts of d to r.
func addFiles(r *recipe, d definition, from fs.FS) error {
	for at, source := range sorted(d.Files) {
		err := fs.WalkDir(from, path.Join("recipe", source), func(p string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				if err == nil && e.Name() == "__pycache__" { // of a developer
					return fs.SkipDir
				}
				return err
			}
			text, err := fs.ReadFile(from, p)
			r.files = append(r.files, file{at + strings.TrimPrefix(p, path.Join("recipe", source)), string(text)})
			return err
		})
		if err != nil {
			return err
		}
	}
	if len(d.Services) > 0 {
		r.files = append(r.files, file{ServicesPath, strings.Join(d.Services, "\n") + "\n"})
	}
	for _, name := range d.Finish {
		text, err := fs.ReadFile(from, path.Join("recipe", name))
		if err != nil {
			return err
		}
		r.finish += string(text) + "\n"
	}
	return nil
}

// sorted returns the entries of m in the order of their keys.
func sorted(m map[string]string) func(yield func(string, string) bool) {
	return func(yield func(string, string) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}

// digest returns the SHA-256, in hex, of parts, with the length of each, so that moving
// text from one part to the next changes it.
func digest(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:", len(p))
		_, _ = io.WriteString(h, p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// packagesKey returns the SHA-256, in hex, of everything that determines the first stage
// of the build: the packages.
func (r recipe) packagesKey() string {
	parts := []string{packagesVersion, runtime.GOARCH, r.suite, r.variant, fmt.Sprint(len(r.packages), len(r.exclude), len(r.npm))}
	parts = append(append(parts, r.packages...), r.exclude...)
	for _, n := range r.npm {
		parts = append(parts, n.Package, n.Version, n.Integrity, strconv.Itoa(len(n.Files)))
		for from, to := range sorted(n.Files) {
			parts = append(parts, from, to)
		}
	}
	return digest(parts...)
}

// key returns the SHA-256, in hex, of everything that determines the result.
func (r recipe) key() string {
	parts := []string{finishVersion, r.packagesKey(), r.name, r.finish, fmt.Sprint(len(r.links), len(r.files))}
	for _, f := range append(slices.Clone(r.links), r.files...) {
		parts = append(parts, f.path, f.text)
	}
	return digest(parts...)
}

func (r recipe) id() string { return r.name + "-" + r.key()[:16] }

// names returns all names of the recipe's template.
func (r recipe) names() []string { return append([]string{r.name}, r.aliases...) }

// lines returns the lines of s without comments, surrounding spaces and empty
// lines.
func lines(s string) []string {
	var out []string
	for l := range strings.Lines(s) {
		if l = strings.TrimSpace(l); l != "" && l[0] != '#' {
			out = append(out, l)
		}
	}
	return out
}
