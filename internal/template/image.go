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

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
)

// A template has its root file system twice: as a directory, and as an EROFS image of
// it, which a sandbox's kernel reads without another process. The directory stays
// since the image is made from it, and since sandboxes that were saved on it continue
// on it.
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
	spareBytes  = 1 << 30 // that must stay free on the disk
)

// images returns the images of the template in dir. Empty paths mean that it has none.
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
	if root == "" || guest == "" {
		return "", ""
	}
	return root, guest
}

// guestImage returns the name of the image of this program's guest.
func (c *Cache) guestImage() string { return guestPrefix + c.digest[:32] + imageSuffix }

// hasImages reports whether nothing needs to be done for the images of t: it has them,
// with the guest of this program, or they could not be made.
func (c *Cache) hasImages(t Template) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.imageless || t.RootImage != "" && filepath.Base(t.GuestImage) == c.guestImage()
}

// makeImages makes the missing images of t. An error is logged, once: sandboxes then
// start from the directory. The caller holds the lock.
func (c *Cache) makeImages(ctx context.Context, t Template) error {
	err := c.tryImages(ctx, t)
	if err == nil || ctx.Err() != nil {
		return err
	}
	c.mu.Lock()
	c.imageless = true
	c.mu.Unlock()
	fmt.Fprintf(c.cfg.Progress, "template %s: no image: %v\n", t.Name, err)
	c.log.WarnContext(ctx, "sandboxes start more slowly: the template's image could not be made; when the cause is gone, run \"postern template build\" and restart", "template", t.ID, "err", err)
	return nil
}

func (c *Cache) tryImages(ctx context.Context, t Template) error {
	dir := filepath.Join(filepath.Dir(t.Rootfs), imagesDir)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
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
	if _, err := os.Stat(guest); errors.Is(err, fs.ErrNotExist) {
		err = makeImage(dir, func(f *os.File) (string, error) {
			_, err := erofs.WriteFile(f, c.cfg.Guest, 0o755)
			return guest, err
		})
		if err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	if root, _ := c.images(filepath.Dir(dir)); root != "" {
		return nil
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(dir, &disk); err != nil {
		return &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	if free := int64(disk.Bavail) * disk.Bsize; free < t.Bytes+spareBytes {
		return fmt.Errorf("%s has %d MB free, and the image needs %d MB and %d MB to spare", dir, free/1e6, t.Bytes/1e6, int64(spareBytes)/1e6)
	}
	began := time.Now()
	fmt.Fprintf(c.cfg.Progress, "template %s: making the image of the root file system\n", t.Name)
	var size int64
	if err := makeImage(dir, func(f *os.File) (string, error) {
		d, err := erofs.Write(ctx, f, t.Rootfs, withoutGuest)
		if err != nil {
			return "", err
		}
		st, err := f.Stat()
		if err != nil {
			return "", err
		}
		size = st.Size()
		return filepath.Join(dir, rootPrefix+d.String()+imageSuffix), nil
	}); err != nil {
		return err
	}
	took := time.Since(began).Round(time.Millisecond)
	fmt.Fprintf(c.cfg.Progress, "template %s: image made in %s: %d MB\n", t.Name, took, size/1e6)
	c.log.InfoContext(ctx, "template image made", "id", t.ID, "took", took, "bytes", size)
	return nil
}

// withoutGuest leaves all versions of the guest out of an image.
func withoutGuest(name string) erofs.Pick {
	dir, base := filepath.Split(GuestPath)
	switch at, in := strings.CutPrefix("/"+name, dir); {
	case !in || strings.Contains(at, "/"):
		return erofs.Keep
	case at == base:
		return erofs.Blank
	case strings.HasPrefix(at, base+"-"), strings.HasPrefix(at, "."+base+"."):
		return erofs.Omit
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
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
