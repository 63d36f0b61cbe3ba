package template

import (
	"errors"
	"fmt"
	"os"
)

// GuestDigest returns the SHA-256 of the guest in the templates, in hex. A snapshot
// made with another guest is out of date.
func (c *Cache) GuestDigest() string { return c.digest }

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
