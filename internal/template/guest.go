package template

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// GuestDigest returns the SHA-256 of the guest in the templates, in hex. A snapshot
// made with another guest is out of date.
func (c *Cache) GuestDigest() string { return c.digest }

// guestIsCurrent reports whether the guest in a root file system is this program's.
// It is called for each sandbox, so it compares the same file only once.
func (c *Cache) guestIsCurrent(rootfs string) bool {
	root, err := os.OpenRoot(rootfs)
	if err != nil {
		return false
	}
	defer root.Close()
	now, err := root.Stat(GuestPath[1:])
	if err != nil {
		return false
	}
	c.mu.Lock()
	known := c.compared[rootfs]
	c.mu.Unlock()
	if known != nil && os.SameFile(known, now) && known.ModTime().Equal(now.ModTime()) && known.Size() == now.Size() {
		return true
	}
	have, err := root.ReadFile(GuestPath[1:])
	if err != nil || !bytes.Equal(have, c.cfg.Guest) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.compared[rootfs] = now
	return true
}

// installGuest makes GuestPath point to our guest. The guests of other versions of
// this program stay beside it: a snapshot maps its guest's code from that file when
// it is restored, and would crash with other content. The caller holds the lock.
func (c *Cache) installGuest(rootfs string) error {
	// A Root, so that a symbolic link in a package cannot lead out of it.
	root, err := os.OpenRoot(rootfs)
	if err != nil {
		return err
	}
	defer root.Close()
	dir, name := filepath.Split(GuestPath[1:])
	dir = filepath.Clean(dir)
	if err := root.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// Remove what a killed process left.
	d, err := root.Open(dir)
	if err != nil {
		return err
	}
	names, err := d.Readdirnames(-1)
	_ = d.Close()
	if err != nil {
		return err
	}
	for _, n := range names {
		if strings.HasPrefix(n, "."+name+".") {
			if err := root.Remove(filepath.Join(dir, n)); err != nil {
				return err
			}
		}
	}
	version := name + "-" + c.digest[:16]
	tmp := filepath.Join(dir, "."+name+"."+rand.Text())
	if have, err := root.ReadFile(filepath.Join(dir, version)); err != nil || !bytes.Equal(have, c.cfg.Guest) {
		if err := writeFile(root, tmp, c.cfg.Guest, 0o755); err != nil {
			return err
		}
		if err := root.Rename(tmp, filepath.Join(dir, version)); err != nil {
			return err
		}
	}
	if err := root.Symlink(version, tmp); err != nil {
		return err
	}
	return root.Rename(tmp, GuestPath[1:])
}

// writeFile writes a file and syncs it to disk.
func writeFile(root *os.Root, name string, b []byte, perm os.FileMode) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	// Chmod, since the process's umask applies to OpenFile.
	if err := errors.Join(err, f.Chmod(perm), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}
