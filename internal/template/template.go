// Package template builds and stores the root file systems that sandboxes start
// from: the server's own. Those of projects are package build's.
//
// A template is built from a recipe (a file of definitions/ and the files of recipe/
// that it names, embedded in the binary) and packages of Debian and npm. It is stored
// under the SHA-256 of its recipe. So a program whose recipe has not changed finds it
// in milliseconds. A program with a new recipe builds a new template next to the old
// one, which running programs continue to use. The cache directory holds
//
//	templates/<id>/images/        the root file system and guests as images, see image.go
//	templates/<id>/template.json  its description; written before the directory appears
//	templates/<id>/rootfs         an empty directory; of older programs, the root file system
//	templates/<id>/in-use         locked shared by every process that uses it
//	packages/<key>.tar.zst        the packages of a template, installed; see build.go
//	build-<random>/               a build that runs, or that was killed
//	apt/, npm/                    what builds that did not succeed have downloaded
//	build.log                     output of the newest build
//	lock                          locked by the process that builds
//	base-current                  symbolic link to the image of the newest base, for people
//
// A build happens in build-<random>, is flushed to disk and then renamed. So if it
// is killed at any time, there is a complete template or none.
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

// ErrNotBuilt means that a template is being built, or could not be. The text says
// which, and how far it is.
var ErrNotBuilt = errors.New("template not built yet")

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
	Bytes    int64     `json:"bytes"`    // of the image
	Packages int       `json:"packages"` // of Debian and npm
	Ready    *Ready    `json:"ready"`    // when its services are warm; nil if it has none

	Rootfs     string `json:"-"` // absolute path of a directory: empty, or, of an older program, the root file system; it must not be written to
	RootImage  string `json:"-"` // absolute path of the EROFS image of the root file system; empty if an older program has built it without
	GuestImage string `json:"-"` // that of an image of the guest alone, which RootImage lacks; empty if there is none

	Aliases []string `json:"-"` // other names that resolve to it
}

// Ready is an HTTP GET that answers 200 once all services of a sandbox are up and
// warm. A snapshot taken earlier is not good for starting other sandboxes from.
type Ready struct {
	Port uint16 `json:"port" yaml:"port"` // on the sandbox's loopback
	Path string `json:"path" yaml:"path"` // begins with a slash
}

// A Cache builds templates and finds them again. It is safe for concurrent use,
// also by several processes.
type Cache struct {
	log     *slog.Logger
	cfg     Config
	recipes []recipe // the first one is the default
	digest  string   // SHA-256 of cfg.Guest, in hex

	etcApt  string // directory of the host's package sources
	keyring string // glob of Debian's keys on the host

	mu       sync.Mutex
	held     map[string]*os.File // template ID → its in-use file, locked shared
	building map[string]*background

	stop    context.CancelFunc // ends builds in the background
	stopped context.Context    //nolint:containedctx // of builds in the background
	wg      sync.WaitGroup
}

// New returns a cache in cfg.Dir. It does not build anything, but removes what killed
// builds have left there.
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
	rs, err := recipes()
	if err != nil {
		return nil, fmt.Errorf("open template cache: %w", err)
	}
	for _, d := range []string{"", "templates", "packages", "apt", "npm"} {
		if err := os.MkdirAll(filepath.Join(cfg.Dir, d), 0o700); err != nil {
			return nil, fmt.Errorf("open template cache: %w", err)
		}
	}
	// The directory may have existed with wider permissions.
	if err := os.Chmod(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("open template cache: %w", err)
	}
	sum := sha256.Sum256(cfg.Guest)
	c := &Cache{
		log: log, cfg: cfg, recipes: rs, digest: hex.EncodeToString(sum[:]),
		etcApt: "/etc/apt", keyring: "/usr/share/keyrings/debian-archive-keyring.*",
		held: map[string]*os.File{}, building: map[string]*background{},
	}
	c.stopped, c.stop = context.WithCancel(context.Background())
	if unlock, err := c.tryLock(); err == nil {
		err := c.sweep()
		unlock()
		if err != nil {
			return nil, fmt.Errorf("open template cache: %w", err)
		}
	} else if !errors.Is(err, errLocked) {
		return nil, fmt.Errorf("open template cache: %w", err)
	}
	return c, nil
}

// Close ends builds in the background and releases the templates that were returned.
// From now on Prune of another process may remove them.
func (c *Cache) Close() error {
	c.stop()
	c.wg.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for id, f := range c.held {
		errs = append(errs, f.Close())
		delete(c.held, id)
	}
	return errors.Join(errs...)
}

// find returns the recipe with a client's name for its template.
func (c *Cache) find(name string) (recipe, error) {
	bare := strings.TrimSuffix(name, ":default")
	for _, r := range c.recipes {
		if slices.Contains(r.names(), bare) {
			return r, nil
		}
	}
	return recipe{}, fmt.Errorf("resolve template %.64q: %w (there are %s)", name, ErrNotFound, strings.Join(c.Names(), ", "))
}

// Names returns the names that [Cache.Resolve] knows: first the default and its other
// names.
func (c *Cache) Names() []string {
	var names []string
	for _, r := range c.recipes {
		names = append(names, r.names()...)
	}
	return names
}

// Lookup returns the ID of the template with a client's name for it, whether it is
// built or not. Its error wraps [ErrNotFound] if there is none.
func (c *Cache) Lookup(name string) (id string, err error) {
	r, err := c.find(name)
	if err != nil {
		return "", err
	}
	return r.id(), nil
}

// Resolve returns the template with a client's name for it. Its error wraps
// [ErrNotFound] if there is none. The default template is built if it is missing; the
// build of another begins in the background, and the error wraps [ErrNotBuilt].
func (c *Cache) Resolve(ctx context.Context, name string) (Template, error) {
	r, err := c.find(name)
	if err != nil {
		return Template{}, err
	}
	if r.name != c.recipes[0].name {
		if _, err := c.open(r.id()); errors.Is(err, os.ErrNotExist) {
			return Template{}, c.buildInBackground(r)
		}
	}
	return c.get(ctx, r, c.cfg.Progress)
}

// Build returns the templates with the given names, each once, and builds the missing
// ones. No names mean the default.
func (c *Cache) Build(ctx context.Context, names ...string) ([]Template, error) {
	if len(names) == 0 {
		names = []string{c.recipes[0].name}
	}
	var out []Template
	for _, n := range names {
		r, err := c.find(n)
		if err != nil {
			return out, err
		}
		if slices.ContainsFunc(out, func(o Template) bool { return o.ID == r.id() }) {
			continue
		}
		t, err := c.get(ctx, r, c.cfg.Progress)
		if err != nil {
			return out, err
		}
		out = append(out, t)
	}
	return out, nil
}

// ByID returns a template by its ID, also a former version that a paused sandbox
// still needs. Its error wraps [ErrNotFound] if there is none.
func (c *Cache) ByID(ctx context.Context, id string) (Template, error) {
	for _, r := range c.recipes {
		if id == r.id() {
			return c.get(ctx, r, c.cfg.Progress)
		}
	}
	if !plain(id) {
		return Template{}, fmt.Errorf("open template %.64q: %w", id, ErrNotFound)
	}
	t, err := c.open(id)
	if errors.Is(err, os.ErrNotExist) {
		return Template{}, fmt.Errorf("open template %.64q: %w", id, ErrNotFound)
	}
	if t.GuestImage == "" { // an older program was killed between the two
		t.RootImage = ""
	}
	return t, err
}

// plain reports whether id is the name of a file, not a path to elsewhere.
func plain(id string) bool { return id == filepath.Base(id) && id != ".." && id != "." }

// Base returns the default template, with the guest of this program beside it. If it is
// not in the cache it is built, which takes some minutes and needs the network.
// If another process is building it, Base waits.
func (c *Cache) Base(ctx context.Context) (Template, error) {
	return c.get(ctx, c.recipes[0], c.cfg.Progress)
}

// get finds or builds the template of r and makes the image of the guest. It writes what
// it does to out.
func (c *Cache) get(ctx context.Context, r recipe, out io.Writer) (Template, error) {
	t, err := c.prepare(ctx, r, out)
	if err != nil {
		return Template{}, fmt.Errorf("prepare template %s: %w", r.name, err)
	}
	return t, nil
}

func (c *Cache) prepare(ctx context.Context, r recipe, out io.Writer) (Template, error) {
	t, err := c.open(r.id())
	if err == nil && filepath.Base(t.GuestImage) == c.guestImage() {
		return t, nil
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return Template{}, err
	}
	unlock, err := c.lock(ctx, r.name, out)
	if err != nil {
		return Template{}, err
	}
	defer unlock()
	// The previous holder of the lock may have built it.
	t, err = c.open(r.id())
	if errors.Is(err, os.ErrNotExist) {
		if err := c.build(ctx, r, out); err != nil {
			return Template{}, err
		}
		t, err = c.open(r.id())
	}
	if err != nil {
		return Template{}, err
	}
	if err := c.addGuest(t); err != nil {
		return Template{}, fmt.Errorf("make image of the guest: %w", err)
	}
	if t, err = c.open(r.id()); err == nil && r.name == c.recipes[0].name {
		c.point(t)
	}
	return t, err
}

// A background is a build in the background.
type background struct {
	done  chan struct{}
	ended time.Time // set before done is closed
	err   error     // likewise

	progress *lastLine
}

// retryAfter is how long the error of a build in the background is told before the next
// attempt.
const retryAfter = time.Minute

// buildInBackground starts to build the template of r, unless that is going on, and says
// how far it is.
func (c *Cache) buildInBackground(r recipe) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := c.building[r.id()]
	if b != nil {
		select {
		case <-b.done:
			if b.err != nil && time.Since(b.ended) < retryAfter {
				return fmt.Errorf("%w: %s: the build has failed and is tried again within a minute: %w", ErrNotBuilt, r.name, b.err)
			}
			b = nil
		default:
		}
	}
	if b == nil {
		b = &background{done: make(chan struct{}), progress: &lastLine{out: c.cfg.Progress}}
		c.building[r.id()] = b
		c.wg.Go(func() {
			_, err := c.get(c.stopped, r, b.progress)
			if err != nil && c.stopped.Err() == nil {
				c.log.Error("build template", "template", r.name, "err", err)
			}
			b.err, b.ended = err, time.Now()
			close(b.done)
		})
	}
	return fmt.Errorf("%w: %s is being built since its first use (%s); try again in a minute, or build it beforehand with \"postern template build %s\"", ErrNotBuilt, r.name, b.progress, r.name)
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
	for _, r := range c.recipes {
		if r.id() == id {
			t.Aliases = r.aliases
		}
	}
	if t.Ready == nil && strings.HasPrefix(id, "base-") { // of an older program, which did not write it
		t.Ready = c.recipes[0].ready
	}
	return t, nil
}

// point makes base-current a link to the image of t. It is for people only.
func (c *Cache) point(t Template) {
	link, target := filepath.Join(c.cfg.Dir, "base-current"), filepath.Join("templates", t.ID, imagesDir, filepath.Base(t.RootImage))
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
	unlock, err := c.lock(ctx, c.recipes[0].name, c.cfg.Progress)
	if err != nil {
		return nil, fmt.Errorf("prune templates: %w", err)
	}
	defer unlock()
	if err := c.prunePackages(); err != nil {
		return nil, fmt.Errorf("prune templates: %w", err)
	}
	dirs, err := os.ReadDir(filepath.Join(c.cfg.Dir, "templates"))
	if err != nil {
		return nil, fmt.Errorf("prune templates: %w", err)
	}
	var gone []string
	for _, d := range dirs {
		if slices.ContainsFunc(c.recipes, func(r recipe) bool { return d.Name() == r.id() }) {
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

// prunePackages removes the installed packages that no recipe uses.
func (c *Cache) prunePackages() error {
	have, err := filepath.Glob(filepath.Join(c.cfg.Dir, "packages", "*"))
	if err != nil {
		return err
	}
	for _, h := range have {
		if !slices.ContainsFunc(c.recipes, func(r recipe) bool { return h == c.packed(r) }) {
			if err := os.Remove(h); err != nil {
				return err
			}
		}
	}
	return nil
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
