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

// GuestDigest returns the SHA-256 of the guest in the templates, in hex: what
// was saved with another one is not what would boot now.
func (c *Cache) GuestDigest() string { return c.digest }

// guestIsCurrent reports whether the guest in a root file system is ours.
// Comparing is faster than hashing; each create asks, so the same file is
// compared once.
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

// installGuest makes our guest the one that GuestPath names. The ones of other
// versions of this program stay beside it: what was saved while one ran reads
// its code from that very file again when it is restored, and would run into
// whatever else was there. The caller holds the lock.
func (c *Cache) installGuest(rootfs string) error {
	// A Root, so that no symbolic link of the packages' making leads out.
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
	// What an earlier one left when it was killed.
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

// writeFile writes a file that is on disk when it returns.
func writeFile(root *os.Root, name string, b []byte, perm os.FileMode) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	// Chmod, since the process's umask narrowed what OpenFile was asked for.
	if err := errors.Join(err, f.Chmod(perm), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}
