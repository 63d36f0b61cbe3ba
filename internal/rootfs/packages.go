package rootfs

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
)

// A Package is a piece of software that a package manager has installed in a tree.
type Package struct {
	Kind    string `json:"kind"` // "deb", "apk", "pypi" or "npm"
	Name    string `json:"name"`
	Version string `json:"version"`
	Arch    string `json:"arch,omitempty"` // of a package with machine code
}

// The limits for reading about packages. All of the data may be hostile.
const (
	maxPackages = 20_000
	maxStatus   = 64 << 20 // bytes of a package manager's database
	maxMetadata = 64 << 10 // bytes of one package's description that are read
	maxField    = 256      // bytes of a name or version
	maxOpened   = 100_000  // number of descriptions that are read
	maxRead     = 64 << 20 // bytes of all descriptions that are read
)

// Packages returns the software in the tree, sorted, each version once. It reads the
// databases of dpkg and apk, and the metadata of Python and npm packages in all
// directories. Malformed entries are left out, and so are packages beyond the first 20,000.
// The database of rpm is not read.
func (t *Tree) Packages() []Package {
	c := collector{seen: map[Package]bool{}}
	for _, name := range []string{"/lib/apk/db/installed", "/usr/lib/apk/db/installed"} {
		c.fields(t.open(name), "apk", "P", "V", "A")
	}
	c.fields(t.open("/var/lib/dpkg/status"), "deb", "Package", "Version", "Architecture")
	if d, err := t.lookup("/var/lib/dpkg/status.d"); err == nil { // images without dpkg
		for name, n := range d.Entries {
			if !strings.HasSuffix(name, ".md5sums") {
				c.fields(opened(n, maxMetadata), "deb", "Package", "Version", "Architecture")
			}
		}
	}
	c.walk("", "", t.root)
	slices.SortFunc(c.list, func(a, b Package) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Version, b.Version), cmp.Compare(a.Arch, b.Arch))
	})
	return c.list[:min(len(c.list), maxPackages)]
}

// open returns a reader of a file of the tree. The reader is empty if there is no file.
func (t *Tree) open(name string) io.Reader {
	n, err := t.lookup(name)
	if err != nil {
		return bytes.NewReader(nil)
	}
	return opened(n, maxStatus)
}

// opened returns a reader of the beginning of a regular file.
func opened(n *erofs.Node, most int64) io.Reader {
	if n.Kind() != unix.S_IFREG {
		return bytes.NewReader(nil)
	}
	return io.LimitReader(content(n), most)
}

// A collector collects packages.
type collector struct {
	list   []Package
	seen   map[Package]bool
	opened int   // descriptions read
	read   int64 // bytes of these
}

func (c *collector) add(p Package) {
	for _, s := range []*string{&p.Name, &p.Version, &p.Arch} {
		*s = strings.TrimSpace(*s)
		if len(*s) > maxField || !utf8.ValidString(*s) || strings.ContainsFunc(*s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return
		}
	}
	if p.Name == "" || p.Version == "" || c.seen[p] {
		return
	}
	// Collect more packages than are returned, so that the result does not depend on
	// their order.
	if len(c.list) < maxOpened {
		c.seen[p] = true
		c.list = append(c.list, p)
	}
}

// fields reads a package list in the format of dpkg and apk: "NAME: value" lines, and an
// empty line after each package.
func (c *collector) fields(r io.Reader, kind, name, version, arch string) {
	var p Package
	removed := false
	done := func() {
		if p.Kind = kind; !removed {
			c.add(p)
		}
		p, removed = Package{}, false
	}
	for line := range lines(r) {
		if line == "" {
			done()
			continue
		}
		key, value, _ := strings.Cut(line, ":")
		switch key {
		case name:
			p.Name = value
		case version:
			p.Version = value
		case arch:
			p.Arch = value
		case "Status": // of dpkg, which also lists removed packages with configuration files
			removed = !strings.HasSuffix(strings.TrimSpace(value), " installed")
		}
	}
	done()
}

// lines yields the lines of a text. It skips lines that are too long.
func lines(r io.Reader) func(func(string) bool) {
	return func(yield func(string) bool) {
		b := bufio.NewReaderSize(r, 4096)
		for {
			line, err := b.ReadSlice('\n')
			for long := err; errors.Is(long, bufio.ErrBufferFull); {
				line = nil
				_, long = b.ReadSlice('\n')
				err = long
			}
			if line != nil && (err == nil || len(line) > 0) && !yield(strings.TrimRight(string(line), "\r\n")) {
				return
			}
			if err != nil {
				return
			}
		}
	}
}

// walk looks for the descriptions of packages below a directory.
func (c *collector) walk(name, parent string, n *erofs.Node) {
	for _, e := range sortedNames(n) {
		child := n.Entries[e]
		if child.Kind() == unix.S_IFDIR {
			c.walk(e, name, child)
			continue
		}
		if c.opened >= maxOpened || c.read >= maxRead || child.Kind() != unix.S_IFREG {
			continue
		}
		switch {
		case e == "METADATA" && strings.HasSuffix(name, ".dist-info"), e == "PKG-INFO" && strings.HasSuffix(name, ".egg-info"),
			strings.HasSuffix(e, ".egg-info"):
			c.count(child)
			c.python(opened(child, maxMetadata))
		case e == "package.json" && (parent == "node_modules" || strings.HasPrefix(parent, "@")):
			c.count(child)
			c.node(opened(child, maxMetadata))
		}
	}
}

func (c *collector) count(n *erofs.Node) {
	c.opened++
	c.read += min(n.Size, maxMetadata)
}

// python reads the metadata of a Python package. It has header fields like a mail.
func (c *collector) python(r io.Reader) {
	p := Package{Kind: "pypi"}
	for line := range lines(r) {
		if line == "" {
			break
		}
		switch key, value, _ := strings.Cut(line, ":"); key {
		case "Name":
			p.Name = value
		case "Version":
			p.Version = value
		}
	}
	c.add(p)
}

// node reads the package.json of a Node package.
func (c *collector) node(r io.Reader) {
	var p struct{ Name, Version string }
	b, err := io.ReadAll(r)
	if err != nil || json.Unmarshal(b, &p) != nil {
		return
	}
	c.add(Package{Kind: "npm", Name: p.Name, Version: p.Version})
}
