package dockerfile

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// The errors of contexts. Their texts name the file.
var (
	// ErrOutside means that a source or a symbolic link leads out of the context.
	ErrOutside = errors.New("leads out of the context directory")
	// ErrTooLarge means that the files of one source are too many or too large.
	ErrTooLarge = errors.New("too large to copy")
	// ErrNothing means that there is no file to copy.
	ErrNothing = errors.New("nothing to copy")
)

// maxEntries bounds the entries of an archive, as the server does.
const maxEntries = 1 << 20

// A Context is the directory from which COPY takes its files. It is safe for concurrent
// use.
type Context struct {
	root  *os.Root
	rules []rule
}

// A rule is a line of .dockerignore.
type rule struct {
	match   *regexp.Regexp
	include bool // the line begins with "!"
}

// OpenContext opens a context directory. File is the Dockerfile's path: as in Docker, what
// FILE.dockerignore or else .dockerignore in the directory names is not copied. The caller
// closes it.
func OpenContext(dir, file string) (*Context, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open context directory: %w", err)
	}
	c := &Context{root: root}
	if err := c.readRules(file); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return c, nil
}

// maxRules is the maximum size of .dockerignore, in bytes.
const maxRules = 1 << 20

// readRules reads .dockerignore.
func (c *Context) readRules(file string) error {
	beside, err := os.OpenRoot(filepath.Dir(file))
	if err != nil {
		return fmt.Errorf("open directory of %s: %w", file, err)
	}
	defer beside.Close()
	name := filepath.Base(file) + ".dockerignore"
	text, err := readSmall(beside, name)
	if errors.Is(err, fs.ErrNotExist) {
		name = ".dockerignore"
		text, err = readSmall(c.root, name)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	for i, l := range strings.Split(strings.TrimPrefix(text, "\ufeff"), "\n") {
		if strings.HasPrefix(l, "#") {
			continue
		}
		l, include := strings.CutPrefix(strings.TrimSpace(l), "!")
		if l = strings.TrimPrefix(path.Clean("/"+strings.TrimSpace(l)), "/"); l == "" {
			continue
		}
		re, err := pattern(l)
		if err != nil {
			return fmt.Errorf("%s: line %d: %w", name, i+1, err)
		}
		c.rules = append(c.rules, rule{re, include})
	}
	return nil
}

// readSmall reads a regular file of at most maxRules bytes.
func readSmall(root *os.Root, name string) (string, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	i, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !i.Mode().IsRegular() || i.Size() > maxRules {
		return "", fmt.Errorf("want a file of at most %d bytes", maxRules)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxRules))
	return string(text), err
}

// Close closes the directory.
func (c *Context) Close() error { return c.root.Close() }

// pattern compiles a pattern of Go's [path.Match] with "**" for any number of directories.
func pattern(p string) (*regexp.Regexp, error) {
	var b strings.Builder
	b.WriteString(`(?s)^`)
	for i := 0; i < len(p); i++ {
		switch rest := p[i:]; {
		case strings.HasPrefix(rest, "**/"):
			b.WriteString(`(.*/)?`)
			i += 2
		case strings.HasPrefix(rest, "**"):
			b.WriteString(`.*`)
			i++
		case p[i] == '*':
			b.WriteString(`[^/]*`)
		case p[i] == '?':
			b.WriteString(`[^/]`)
		case p[i] == '[':
			end := strings.IndexByte(rest, ']')
			if end < 2 {
				return nil, fmt.Errorf("%.100q is not a valid pattern: [ is not closed", p)
			}
			b.WriteString(rest[:end+1])
			i += end
		case p[i] == '\\' && len(rest) > 1:
			i++
			b.WriteString(regexp.QuoteMeta(p[i : i+1]))
		default:
			b.WriteString(regexp.QuoteMeta(p[i : i+1]))
		}
	}
	re, err := regexp.Compile(b.String() + `$`)
	if err != nil {
		return nil, fmt.Errorf("%.100q is not a valid pattern: %w", p, err)
	}
	return re, nil
}

// ignored reports whether .dockerignore excludes a path. The last line that matches it or
// one of its parents decides.
func (c *Context) ignored(name string) bool {
	out := false
	for _, r := range c.rules {
		for p := name; p != "." && out == r.include; p = path.Dir(p) {
			if r.match.MatchString(p) {
				out = !r.include
			}
		}
	}
	return out
}

// Source returns the source of a COPY as a path relative to the context, with "." for all
// of it. As in Docker, a leading slash means the context directory. Its error wraps
// [ErrOutside] if the path begins outside.
func Source(source string) (string, error) {
	p := path.Clean(strings.TrimLeft(source, "/"))
	switch {
	case p == ".." || strings.HasPrefix(p, "../"): // the attack: COPY ../../home/ann/.ssh /
		return "", fmt.Errorf("%.200q %w", source, ErrOutside)
	case strings.ContainsAny(p, "\\{\x00"): // the server takes the first two for a pattern
		return "", fmt.Errorf("%.200q: a source may not contain a backslash, a brace or a NUL byte", source)
	}
	return p, nil
}

// resolve returns the path of the file that name leads to, over symbolic links. Its error
// wraps [ErrOutside] if it leads out of the context. It is a check with a clear error:
// [os.Root] refuses to open such files also if the links change in between.
func (c *Context) resolve(name string) (string, error) {
	at, rest := ".", strings.Split(name, "/")
	for links := 0; len(rest) > 0; {
		part := rest[0]
		rest = rest[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			if at == "." {
				return "", fmt.Errorf("%.200q %w", name, ErrOutside)
			}
			at = path.Dir(at)
			continue
		}
		next := path.Join(at, part)
		i, err := c.root.Lstat(next)
		if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(path.Join(next, path.Join(rest...))+"/", "../") {
			err = fmt.Errorf("%.200q %w", name, ErrOutside)
		}
		if err != nil {
			return "", err
		}
		if i.Mode()&fs.ModeSymlink == 0 {
			at = next
			continue
		}
		if links++; links > 40 {
			return "", fmt.Errorf("%.200q: %w", name, syscall.ELOOP)
		}
		to, err := c.root.Readlink(next)
		if err != nil {
			return "", err
		}
		if path.IsAbs(to) {
			return "", fmt.Errorf("%.200q: the symbolic link to %.200q %w", next, to, ErrOutside)
		}
		rest = append(strings.Split(to, "/"), rest...)
	}
	return at, nil
}

// Archive writes the files of a source, as [Source] returns it, to w: a tar archive that is
// the same for the same names, permissions, contents and links. A source that is a link
// stands for what it leads to; other links stay links, and must lead to a place in the
// context. Its error wraps [ErrOutside], [ErrNothing], or [ErrTooLarge] if the contents
// have more than limit bytes.
func (c *Context) Archive(ctx context.Context, w io.Writer, source string, limit int64) error {
	p := &packer{c: c, tar: tar.NewWriter(w), left: limit, limit: limit}
	var from string
	var as func(name string) string // its name in the archive; empty means that it is not copied
	if strings.ContainsAny(source, "*?[") {
		re, err := pattern(source)
		if err != nil {
			return err
		}
		from, as = ".", func(name string) string {
			for p := name; p != "."; p = path.Dir(p) {
				if re.MatchString(p) {
					return name
				}
			}
			return ""
		}
	} else {
		var err error
		if from, err = c.resolve(source); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%.200q: %w: there is no such file in the context directory", source, ErrNothing)
		} else if err != nil {
			return err
		}
		as = func(name string) string { return path.Join(source, strings.TrimPrefix(name, from)) }
		if from == "." {
			as = func(name string) string { return path.Join(source, name) }
		}
	}
	err := fs.WalkDir(c.root.FS(), from, func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case name == ".":
			return nil
		case c.ignored(name):
			if d.IsDir() && !slices.ContainsFunc(c.rules, func(r rule) bool { return r.include }) {
				return fs.SkipDir
			}
			return nil
		}
		if to := as(name); to != "" {
			return p.add(name, to, d.Type())
		}
		return nil
	})
	if err != nil {
		return err
	}
	if p.entries == 0 {
		return fmt.Errorf("%.200q: %w: no file matches, or .dockerignore excludes all", source, ErrNothing)
	}
	return p.tar.Close()
}

// A packer writes an archive.
type packer struct {
	c           *Context
	tar         *tar.Writer
	entries     int
	left, limit int64 // bytes of contents
}

// add writes the file name as the entry as.
func (p *packer) add(name, as string, kind fs.FileMode) error {
	if p.entries++; p.entries > maxEntries {
		return fmt.Errorf("%w: more than %d files: name fewer, or exclude some in .dockerignore", ErrTooLarge, maxEntries)
	}
	// A fixed time, as in the layers that the server makes of it.
	h := &tar.Header{Name: as, Mode: 0o777, ModTime: time.Unix(315532800, 0), Format: tar.FormatPAX}
	switch {
	case kind == fs.ModeDir:
		i, err := p.c.root.Lstat(name)
		if err != nil {
			return err
		}
		h.Typeflag, h.Name, h.Mode = tar.TypeDir, as+"/", int64(i.Mode().Perm())
		return p.tar.WriteHeader(h)
	case kind == fs.ModeSymlink:
		to, err := p.c.root.Readlink(name)
		if err != nil {
			return err
		}
		// The attack: a link in a cloned repository to a file with a secret, which some
		// later step would follow. What a link names inside need not exist.
		if _, err := p.c.resolve(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: remove the link, or exclude it in .dockerignore", err)
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, to
		return p.tar.WriteHeader(h)
	case kind.IsRegular():
		return p.file(name, h)
	}
	return fmt.Errorf("%.200q is neither a file nor a directory nor a symbolic link: exclude it in .dockerignore", name)
}

// file writes a regular file.
func (p *packer) file(name string, h *tar.Header) (err error) {
	// Without O_NONBLOCK a pipe that has taken the file's place would block for ever.
	f, err := p.c.root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	i, err := f.Stat()
	if err != nil {
		return err
	}
	if !i.Mode().IsRegular() {
		return fmt.Errorf("%.200q changed while it was read", name)
	}
	if p.left -= i.Size(); p.left < 0 {
		return fmt.Errorf("%w: more than %d MiB: copy fewer files with one COPY, or exclude some in .dockerignore", ErrTooLarge, p.limit>>20)
	}
	h.Typeflag, h.Size, h.Mode = tar.TypeReg, i.Size(), int64(i.Mode().Perm())
	if err := p.tar.WriteHeader(h); err != nil {
		return err
	}
	if _, err := io.CopyN(p.tar, f, i.Size()); err != nil {
		return fmt.Errorf("read %.200q, which may have changed: %w", name, err)
	}
	return nil
}
