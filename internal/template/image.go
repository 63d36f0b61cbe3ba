package template

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"postern/internal/erofs"
)

// A template's root file system is an EROFS image, which a sandbox's kernel reads without
// another process. The templates of older programs have it as a directory too, which
// sandboxes that were saved on it continue on.
//
// The guest changes with each version of this program, and the rest does not. So it is
// an image of its own, which takes milliseconds to make. In the image of the root file
// system an empty file is in its place. Images of other versions stay: a snapshot maps
// its guest from there.

const (
	imagesDir   = "images"
	rootPrefix  = "root-"  // and the digest of the image
	guestPrefix = "guest-" // and the first half of the guest's SHA-256
	imageSuffix = ".erofs"
)

// images returns the images of the template in dir. An empty path means that it has none.
// For an older template the guest is the newest that was made for it.
func (c *Cache) images(dir string) (root, guest string) {
	es, err := os.ReadDir(filepath.Join(dir, imagesDir)) // sorted
	if err != nil {
		return "", ""
	}
	var newest time.Time
	for _, e := range es {
		path := filepath.Join(dir, imagesDir, e.Name())
		switch {
		case !strings.HasSuffix(e.Name(), imageSuffix):
		case strings.HasPrefix(e.Name(), rootPrefix) && root == "":
			root = path
		case e.Name() == c.guestImage():
			guest, newest = path, time.Unix(1<<40, 0)
		case strings.HasPrefix(e.Name(), guestPrefix):
			if i, err := e.Info(); err == nil && i.ModTime().After(newest) {
				guest, newest = path, i.ModTime()
			}
		}
	}
	return root, guest
}

// guestImage returns the name of the image of this program's guest.
func (c *Cache) guestImage() string { return guestPrefix + c.digest[:32] + imageSuffix }

// addGuest makes the image of this program's guest, if t has none. The caller holds the
// lock.
func (c *Cache) addGuest(t Template) error {
	dir := filepath.Dir(t.RootImage)
	if t.RootImage == "" {
		return fmt.Errorf("template %s has lost its image: remove %s and start again", t.ID, filepath.Dir(t.Rootfs))
	}
	// Remove what a killed process left.
	left, err := filepath.Glob(filepath.Join(dir, ".making-*"))
	if err != nil {
		return err
	}
	for _, l := range left {
		if err := os.Remove(l); err != nil {
			return err
		}
	}
	guest := filepath.Join(dir, c.guestImage())
	if _, err := os.Stat(guest); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return makeImage(dir, func(f *os.File) (string, error) {
		_, err := erofs.WriteFile(f, c.cfg.Guest, 0o755)
		return guest, err
	})
}

// makeRootImage makes the image of rootfs in the template's directory dir, and returns
// its size in bytes.
func makeRootImage(ctx context.Context, dir, rootfs string) (size int64, err error) {
	dir = filepath.Join(dir, imagesDir)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return 0, err
	}
	err = makeImage(dir, func(f *os.File) (string, error) {
		d, err := erofs.Write(ctx, f, rootfs, withoutGuest)
		if err != nil {
			return "", err
		}
		st, err := f.Stat()
		if err != nil {
			return "", err
		}
		size = st.Size()
		return filepath.Join(dir, rootPrefix+d.String()+imageSuffix), nil
	})
	return size, err
}

// withoutGuest has an empty file in the guest's place.
func withoutGuest(name string) erofs.Pick {
	if "/"+name == GuestPath {
		return erofs.Blank
	}
	return erofs.Keep
}

// makeImage creates an image in dir, flushed to disk under the name that write returns.
// If the process is killed at any time, there is a complete image or none.
func makeImage(dir string, write func(*os.File) (name string, err error)) (err error) {
	f, err := os.CreateTemp(dir, ".making-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	name, err := write(f)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), name); err != nil {
		return err
	}
	return syncDir(dir)
}
