package mcpgateway

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// installTime bounds the installation of a server.
const installTime = 10 * time.Minute

// A layout has the paths of the gateway.
type layout struct {
	root  string // directory of packages and homes
	bin   string // PATH of the system's programs
	owner uint32 // the user that installs packages; 0 in tests: the current user
}

// standard is the layout in sandboxes.
var standard = layout{root: "/var/lib/mcp-gateway", bin: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", owner: firstUser - 1}

// firstUser is the user ID of the first server. These users are not in /etc/passwd, and no
// Debian package creates users with such IDs.
const firstUser = 61000

// packages returns the directory of a server's npm package, or of its repository().
func (l *layout) packages(s *Server) string {
	what := s.Entry.NPM + "@" + s.Entry.Version
	if s.custom != nil {
		what = s.Name + "\n" + s.custom.InstallCmd
	}
	sum := sha256.Sum256([]byte(what))
	return filepath.Join(l.root, "packages", hex.EncodeToString(sum[:8]))
}

func (l *layout) home(s *Server) string { return filepath.Join(l.root, "home", s.Slug) }

// path returns the PATH of a server.
func (l *layout) path(s *Server) string {
	if s.Entry.NPM == "" {
		return l.bin
	}
	return filepath.Join(l.packages(s), "node_modules/.bin") + ":" + l.bin
}

// work returns the working directory of a server.
func (l *layout) work(s *Server, home string) string {
	if s.custom != nil && (s.custom.InstallCmd != "" || repository().MatchString(s.Name)) {
		return l.packages(s)
	}
	return home
}

// install installs the packages that the server needs, unless they are installed.
func (c *child) install(ctx context.Context, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, installTime)
	defer cancel()
	s := &c.server
	if len(s.Entry.Debian) > 0 {
		if err := c.debian(ctx); err != nil {
			return err
		}
	}
	repo := repository().FindStringSubmatch(s.Name)
	if s.Entry.NPM == "" && (s.custom == nil || repo == nil && s.custom.InstallCmd == "") {
		return nil
	}
	dir := c.paths.packages(s)
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	log.InfoContext(ctx, "install server", "server", s.Name)
	// Install into a temporary directory and rename it, so that an installed package is
	// complete.
	tmp := dir + ".new"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(tmp, 0o755); err != nil {
		return err
	}
	home := filepath.Join(c.paths.root, "install")
	if err := os.MkdirAll(home, 0o755); err != nil {
		return err
	}
	if c.paths.owner != 0 {
		for _, d := range []string{tmp, home} {
			if err := os.Lchown(d, int(c.paths.owner), int(c.paths.owner)); err != nil {
				return err
			}
		}
	}
	var err error
	switch {
	case s.Entry.NPM != "":
		// Scripts of packages do not run: what npm unpacks is all that these servers need.
		err = c.do(ctx, c.paths.owner, tmp, home, "npm", "install", "--prefix", tmp, "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=60000", s.Entry.NPM+"@"+s.Entry.Version)
	case repo != nil:
		err = c.do(ctx, c.paths.owner, tmp, home, "git", "clone", "--quiet", "--depth", "1", "--", "https://github.com/"+repo[1]+"/"+repo[2], tmp)
		fallthrough
	default:
		if err == nil && s.custom.InstallCmd != "" {
			err = c.do(ctx, c.paths.owner, tmp, home, "/bin/sh", "-c", s.custom.InstallCmd)
		}
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	return os.Rename(tmp, dir)
}

// debian installs missing Debian packages.
func (c *child) debian(ctx context.Context) error {
	missing := []string{}
	for _, p := range c.server.Entry.Debian {
		out, err := exec.CommandContext(ctx, "dpkg-query", "-W", "-f", "${Status}", p).Output()
		if err != nil || !bytes.Contains(out, []byte("install ok installed")) {
			missing = append(missing, p)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if err := c.do(ctx, 0, "/", "/root", "apt-get", "update", "-qq"); err != nil {
		return err
	}
	return c.do(ctx, 0, "/", "/root", "apt-get", append([]string{"install", "-qq", "-y", "--no-install-recommends", "--"}, missing...)...)
}

// do runs a program of an installation. If it fails, the error has the end of its output.
func (c *child) do(ctx context.Context, uid uint32, dir, home, name string, args ...string) error {
	path := name
	if !strings.Contains(name, "/") {
		var err error
		if path, err = look(name, c.paths.bin); err != nil {
			return err
		}
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir, cmd.SysProcAttr = dir, attributes(uid)
	cmd.Env = append([]string{"HOME=" + home, "PATH=" + c.paths.bin, "LANG=C.UTF-8", "DEBIAN_FRONTEND=noninteractive", "GIT_TERMINAL_PROMPT=0"}, c.base...)
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	words := &lastWords{}
	cmd.Stdout, cmd.Stderr = words, words
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, words)
	}
	return nil
}
