package template

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// Bounds of an npm package's archive.
const (
	maxNPMBytes = 1 << 30 // unpacked
	maxNPMFiles = 100_000
)

// addNPM fetches the recipe's npm packages and puts their files into rootfs.
func (c *Cache) addNPM(ctx context.Context, p *progress, r recipe, rootfs string) error {
	root, err := os.OpenRoot(rootfs)
	if err != nil {
		return fmt.Errorf("install npm packages: %w", err)
	}
	defer root.Close()
	for _, n := range r.npm {
		p.phase("installing npm package " + n.Package)
		f, err := c.fetchNPM(ctx, n)
		if err != nil {
			return fmt.Errorf("install npm package %s: %w", n.Package, err)
		}
		err = unpackNPM(root, f, n)
		if err := errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("install npm package %s: %w", n.Package, err)
		}
	}
	return nil
}

// fetchNPM returns the archive of a package, verified: from the cache, or from the
// registry that npm is configured for on this machine.
func (c *Cache) fetchNPM(ctx context.Context, n npmPackage) (*os.File, error) {
	sum, err := n.sum()
	if err != nil {
		return nil, err
	}
	have := filepath.Join(c.cfg.Dir, "npm", hex.EncodeToString(sum[:16])+".tgz")
	f, err := openVerified(have, sum)
	if err == nil {
		return f, nil
	}
	npm, err := exec.LookPath("npm")
	if err != nil {
		return nil, fmt.Errorf("%w; npm fetches it from the registry that it is configured for: install Node with npm", err)
	}
	dir, err := os.MkdirTemp(filepath.Join(c.cfg.Dir, "npm"), "fetch-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	cmd := exec.CommandContext(ctx, npm, "pack", "--silent", "--ignore-scripts", "--pack-destination="+dir, n.Package+"@"+n.Version)
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 5 * time.Second
	// npm's own cache would keep a second copy.
	cmd.Env = append(os.Environ(), "npm_config_cache="+filepath.Join(dir, "cache"), "npm_config_loglevel=error", "npm_config_update_notifier=false")
	var said bytes.Buffer
	cmd.Stderr = &said
	runtime.LockOSThread() // Pdeathsig is sent when the thread that started the process ends
	err = cmd.Run()
	runtime.UnlockOSThread()
	if err != nil {
		return nil, fmt.Errorf("npm pack %s@%s: %w; it says: %.2000s", n.Package, n.Version, err, strings.TrimSpace(said.String()))
	}
	got, err := filepath.Glob(filepath.Join(dir, "*.tgz"))
	if err != nil || len(got) != 1 {
		return nil, fmt.Errorf("npm pack %s@%s has made %d archives, not one: %w", n.Package, n.Version, len(got), err)
	}
	if f, err = openVerified(got[0], sum); err != nil {
		return nil, err
	}
	if err := os.Rename(got[0], have); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// openVerified opens a file with the given SHA-512.
func openVerified(name string, sum []byte) (*os.File, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	h := sha512.New()
	if _, err := io.Copy(h, f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if !bytes.Equal(h.Sum(nil), sum) {
		return nil, errors.Join(fmt.Errorf("%s has not the SHA-512 of its definition: the registry serves something else", filepath.Base(name)), f.Close())
	}
	_, err = f.Seek(0, io.SeekStart)
	return f, err
}

// unpackNPM writes the files of n that its definition names into root.
//
// The archive is the one whose digest is in the definition. Even so nothing of it may
// get elsewhere: names with "..", links and devices are refused, and all writes go
// through root.
func unpackNPM(root *os.Root, archive io.Reader, n npmPackage) error {
	z, err := gzip.NewReader(archive)
	if err != nil {
		return err
	}
	found := map[string]bool{}
	left, count := int64(maxNPMBytes), 0
	for t := tar.NewReader(z); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		if count++; count > maxNPMFiles {
			return fmt.Errorf("the archive has over %d files", maxNPMFiles)
		}
		if h.Typeflag == tar.TypeDir {
			continue
		}
		if h.Typeflag != tar.TypeReg || !filepath.IsLocal(h.Name) {
			return fmt.Errorf("the archive's entry %.200q is not a file below it", h.Name)
		}
		// npm ignores the name of the first directory.
		_, name, ok := strings.Cut(path.Clean(h.Name), "/")
		if !ok {
			return fmt.Errorf("the archive's entry %.200q is in no directory", h.Name)
		}
		from, to := n.place(name)
		if to == "" {
			continue
		}
		found[from] = true
		if left -= h.Size; left < 0 {
			return fmt.Errorf("the archive has over %d bytes", maxNPMBytes)
		}
		perm := fs.FileMode(0o644)
		if h.Mode&0o111 != 0 {
			perm = 0o755
		}
		if err := root.MkdirAll(path.Dir(to)[1:], 0o755); err != nil {
			return err
		}
		if err := copyFile(root, to[1:], t, perm, h.ModTime); err != nil {
			return err
		}
	}
	for from := range n.Files {
		if !found[from] {
			return fmt.Errorf("the archive has no %s", from)
		}
	}
	return nil
}

// place returns where the file name of the archive goes, and by which entry of n.Files.
// Both are empty if it is not wanted.
func (n npmPackage) place(name string) (from, to string) {
	for from, to := range n.Files {
		if from == "." {
			return from, path.Join(to, name)
		}
		if name == from || strings.HasPrefix(name, from+"/") {
			return from, path.Join(to, strings.TrimPrefix(name, from))
		}
	}
	return "", ""
}

// copyFile creates a file.
func copyFile(root *os.Root, name string, r io.Reader, perm fs.FileMode, mtime time.Time) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	if err := errors.Join(err, f.Chmod(perm), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return root.Chtimes(name, mtime, mtime)
}
