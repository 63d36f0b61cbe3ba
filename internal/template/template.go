// Package template builds and stores the root file systems that sandboxes start
// from.
//
// A template is built from a recipe (the files in recipe/, embedded in the binary)
// and Debian's packages. It is stored under the SHA-256 of its recipe. So a program
// whose recipe has not changed finds it in milliseconds. A program with a new recipe
// builds a new template next to the old one, which running programs continue to use.
// The cache directory holds
//
//	templates/<id>/rootfs         the root file system
//	templates/<id>/template.json  its description; written before the directory appears
//	templates/<id>/images/        the root file system and guests as images, see image.go
//	templates/<id>/in-use         locked shared by every process that uses it
//	build-<random>/               a build that runs, or that was killed
//	apt/                          downloaded packages, for the next build
//	build.log                     output of the newest build
//	lock                          locked by the process that builds
//	base-current                  symbolic link to the newest base, for people
//
// A build happens in build-<random>, is flushed to disk and then renamed. So if it
// is killed at any time, there is a complete template or none.
//
// A root file system is a directory and, made from it, an EROFS image. A template of
// an older program, which has no image yet, gets one when it is used.
//
// The package must not start sandboxes, and must not run anything of a template
// except while it builds one. Only root can read the cache directory: a root file
// system holds setuid programs, and files whose user ID may belong to somebody on
// the host.
package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNotFound means that there is no template with that name.
var ErrNotFound = errors.New("template not found")

// baseNames are the names of the base template. By default the official SDKs
// request "base" and "code-interpreter-v1".
var baseNames = []string{"base", "code-interpreter-v1", "code-interpreter"}

// GuestPath is the path of the guest inside every root file system. It is a
// symbolic link to the file of one version.
const GuestPath = "/usr/local/sbin/postern-guest"

// ServicesPath is a file inside every root file system. Each line is the command
// line of a program that the guest runs as the sandbox's user.
const ServicesPath = "/etc/postern/services"

// Config holds the settings of a [Cache].
type Config struct {
	Dir      string    // cache directory, such as /var/cache/postern; created if missing
	Guest    []byte    // the guest: a static program, installed at GuestPath
	Sources  string    // Debian's package sources as in sources.list; empty means the host's /etc/apt, or mmdebstrap's own if that has none
	Progress io.Writer // gets lines for a person during long operations; nil for none
}

// A Template is a root file system that sandboxes can start from.
type Template struct {
	ID       string    `json:"id"`       // name, dash, 16 hex digits of the recipe's SHA-256
	Name     string    `json:"name"`     // "base"
	Built    time.Time `json:"built"`    // time of the build
	Bytes    int64     `json:"bytes"`    // on disk, without the guest
	Packages int       `json:"packages"` // Debian packages

	Rootfs     string `json:"-"` // absolute path of the directory, which must not be written to
	RootImage  string `json:"-"` // absolute path of the EROFS image of Rootfs; empty if there is none
	GuestImage string `json:"-"` // that of an image of the guest alone, which RootImage lacks; empty if there is none

	Aliases []string `json:"-"` // other names that resolve to it
	Ready   *Ready   `json:"-"` // when its services are warm; nil if it has none
}

// Ready is an HTTP GET that answers 200 once all services of a sandbox are up and
// warm. A snapshot taken earlier is not good for starting other sandboxes from.
type Ready struct {
	Port uint16 // on the sandbox's loopback
	Path string // begins with a slash
}

// A Cache builds templates and finds them again. It is safe for concurrent use,
// also by several processes.
type Cache struct {
	log    *slog.Logger
	cfg    Config
	recipe recipe
	digest string // SHA-256 of cfg.Guest, in hex

	etcApt  string // directory of the host's package sources
	keyring string // glob of Debian's keys on the host

	mu       sync.Mutex
	held     map[string]*os.File    // template ID → its in-use file, locked shared
	compared map[string]os.FileInfo // root file system → its guest, once found to be ours

	imageless bool // images could not be made
}

// New returns a cache in cfg.Dir. It does not build anything.
func New(log *slog.Logger, cfg Config) (*Cache, error) {
	if !filepath.IsAbs(cfg.Dir) {
		return nil, fmt.Errorf("open template cache: directory %q is not absolute", cfg.Dir)
	}
	if len(cfg.Guest) == 0 {
		return nil, errors.New("open template cache: no guest program given")
	}
	if cfg.Progress == nil {
		cfg.Progress = io.Discard
	}
	r, err := baseRecipe()
	if err != nil {
		return nil, fmt.Errorf("open template cache: %w", err)
	}
	for _, d := range []string{cfg.Dir, filepath.Join(cfg.Dir, "templates"), filepath.Join(cfg.Dir, "apt")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("open template cache: %w", err)
		}
	}
	// The directory may have existed with wider permissions.
	if err := os.Chmod(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("open template cache: %w", err)
	}
	sum := sha256.Sum256(cfg.Guest)
	return &Cache{
		log: log, cfg: cfg, recipe: r, digest: hex.EncodeToString(sum[:]),
		etcApt: "/etc/apt", keyring: "/usr/share/keyrings/debian-archive-keyring.*",
		held: map[string]*os.File{}, compared: map[string]os.FileInfo{},
	}, nil
}

// Close releases the templates that were returned. From now on Prune of another
// process may remove them.
func (c *Cache) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for id, f := range c.held {
		errs = append(errs, f.Close())
		delete(c.held, id)
	}
	return errors.Join(errs...)
}

// Resolve returns the template with a client's name for it. Its error wraps
// [ErrNotFound] if there is none.
func (c *Cache) Resolve(ctx context.Context, name string) (Template, error) {
	if !slices.Contains(baseNames, strings.TrimSuffix(name, ":default")) {
		return Template{}, fmt.Errorf("resolve template %.64q: %w (there are %s)", name, ErrNotFound, strings.Join(baseNames, ", "))
	}
	return c.Base(ctx)
}

// ByID returns a template by its ID, also a former version that a paused sandbox
// still needs. Its error wraps [ErrNotFound] if there is none.
func (c *Cache) ByID(ctx context.Context, id string) (Template, error) {
	if id == c.recipe.id() {
		return c.Base(ctx)
	}
	if id != filepath.Base(id) || id == ".." || id == "." {
		return Template{}, fmt.Errorf("open template %.64q: %w", id, ErrNotFound)
	}
	t, err := c.open(id)
	if errors.Is(err, os.ErrNotExist) {
		return Template{}, fmt.Errorf("open template %.64q: %w", id, ErrNotFound)
	}
	return t, err
}

// Base returns the base template, with the guest of this program in it. If it is
// not in the cache it is built, which takes a minute or two and needs the network.
// If another process is building it, Base waits.
func (c *Cache) Base(ctx context.Context) (Template, error) {
	t, err := c.base(ctx)
	if err != nil {
		return Template{}, fmt.Errorf("prepare template %s: %w", c.recipe.name, err)
	}
	return t, nil
}

// base finds or builds the base template and installs the guest in it.
func (c *Cache) base(ctx context.Context) (Template, error) {
	t, err := c.open(c.recipe.id())
	if err == nil && c.guestIsCurrent(t.Rootfs) && c.hasImages(t) {
		return t, nil
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return Template{}, err
	}
	unlock, err := c.lock(ctx)
	if err != nil {
		return Template{}, err
	}
	defer unlock()
	// The previous holder of the lock may have built it.
	t, err = c.open(c.recipe.id())
	if errors.Is(err, os.ErrNotExist) {
		if err := c.build(ctx); err != nil {
			return Template{}, err
		}
		t, err = c.open(c.recipe.id())
	}
	if err != nil {
		return Template{}, err
	}
	if !c.guestIsCurrent(t.Rootfs) {
		if err := c.installGuest(t.Rootfs); err != nil {
			return Template{}, fmt.Errorf("install guest: %w", err)
		}
	}
	if !c.hasImages(t) {
		if err := c.makeImages(ctx, t); err != nil {
			return Template{}, err
		}
	}
	c.point(t)
	return c.open(t.ID)
}

// open returns a template of the cache and marks it as in use until Close. Its
// error wraps os.ErrNotExist if it does not exist.
func (c *Cache) open(id string) (Template, error) {
	dir := filepath.Join(c.cfg.Dir, "templates", id)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held[id] == nil {
		f, err := os.Open(filepath.Join(dir, "in-use"))
		if err != nil {
			return Template{}, err
		}
		// Prune holds this lock exclusively while it moves the directory away.
		if err := unix.Flock(int(f.Fd()), unix.LOCK_SH); err != nil {
			return Template{}, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
		}
		if _, err := os.Stat(filepath.Join(dir, "in-use")); err != nil {
			return Template{}, errors.Join(err, f.Close())
		}
		c.held[id] = f
	}
	return c.read(id)
}

// read reads the description of a template.
func (c *Cache) read(id string) (Template, error) {
	dir := filepath.Join(c.cfg.Dir, "templates", id)
	b, err := os.ReadFile(filepath.Join(dir, "template.json"))
	if err != nil {
		return Template{}, err
	}
	var t Template
	if err := json.Unmarshal(b, &t); err != nil {
		return Template{}, fmt.Errorf("read template.json of %s: %w", id, err)
	}
	t.Rootfs = filepath.Join(dir, "rootfs")
	t.RootImage, t.GuestImage = c.images(dir)
	t.Aliases = baseNames[1:]
	t.Ready = c.recipe.ready
	return t, nil
}

// point makes base-current a link to t. It is for people only.
func (c *Cache) point(t Template) {
	link, target := filepath.Join(c.cfg.Dir, "base-current"), filepath.Join("templates", t.ID, "rootfs")
	if have, err := os.Readlink(link); err == nil && have == target {
		return
	}
	_ = os.Remove(link + ".new")
	if err := errors.Join(os.Symlink(target, link+".new"), os.Rename(link+".new", link)); err != nil {
		c.log.Debug("point base-current", "error", err)
	}
}

// Prune removes the templates that no process uses and this program would not use,
// and returns their IDs. A running sandbox needs its template, so call Prune only
// when all sandboxes of killed programs have been removed.
func (c *Cache) Prune(ctx context.Context) ([]string, error) {
	unlock, err := c.lock(ctx)
	if err != nil {
		return nil, fmt.Errorf("prune templates: %w", err)
	}
	defer unlock()
	dirs, err := os.ReadDir(filepath.Join(c.cfg.Dir, "templates"))
	if err != nil {
		return nil, fmt.Errorf("prune templates: %w", err)
	}
	var gone []string
	for _, d := range dirs {
		if d.Name() == c.recipe.id() {
			continue
		}
		ok, err := c.retire(d.Name())
		if err != nil {
			return gone, fmt.Errorf("prune template %s: %w", d.Name(), err)
		}
		if ok {
			gone = append(gone, d.Name())
		}
	}
	return gone, nil
}

// retire removes a template unless it is in use.
func (c *Cache) retire(id string) (bool, error) {
	dir := filepath.Join(c.cfg.Dir, "templates", id)
	f, err := os.OpenFile(filepath.Join(dir, "in-use"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return false, err
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	// Rename it first: a half-removed template would still look complete. If we are
	// killed after that, the next build removes it.
	trash := filepath.Join(c.cfg.Dir, "build-pruned-"+id)
	if err := os.Rename(dir, trash); err != nil {
		return false, err
	}
	return true, removeTree(trash)
}
