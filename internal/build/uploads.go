package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/auth"
	"postern/internal/store"
)

// The directories below Config.Dir.
const (
	workDir    = "work"
	fromDir    = "from"
	layersDir  = "steps"
	imagesDir  = "images"
	uploadsDir = "uploads"

	// emptyDir is the root directory of sandboxes if their image cannot be used: templates
	// of projects are never directories.
	emptyDir = "empty"
)

// Uploads are looked up by project and by the hash that the client computed. The server
// cannot verify it: it is the hash of the files, not of the archive. A project that sends
// a wrong hash harms only itself.

// uploadPath returns the path of a project's archive, or an error for a malformed hash.
func (s *Service) uploadPath(project, hash string) (string, error) {
	hash = strings.ToLower(hash)
	if !isHex(hash, 64) {
		return "", fmt.Errorf("%w: Invalid files hash", ErrInvalid)
	}
	if project == "" || project != filepath.Base(project) || strings.HasPrefix(project, ".") {
		return "", fmt.Errorf("%w: project %.50q", ErrInvalid, project)
	}
	return filepath.Join(s.conf.Dir, uploadsDir, project, hash), nil
}

// ownTemplate returns an error unless the template belongs to who's project.
func (s *Service) ownTemplate(ctx context.Context, who auth.Principal, nameOrID string) error {
	n, err := parseName(nameOrID)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	return s.db.View(ctx, func(tx *store.Tx) error {
		_, err := findOwn(ctx, tx, who, n)
		return err
	})
}

// FilePresent reports whether an archive with the files of a COPY has been uploaded for
// who's project. If so, the archive is kept for at least another day.
func (s *Service) FilePresent(ctx context.Context, who auth.Principal, nameOrID, hash string) (bool, error) {
	if err := mayManage(who); err != nil {
		return false, err
	}
	path, err := s.uploadPath(who.Project, hash)
	if err != nil {
		return false, err
	}
	if err := s.ownTemplate(ctx, who, nameOrID); err != nil {
		return false, fmt.Errorf("look for files: %w", err)
	}
	s.files.RLock()
	defer s.files.RUnlock()
	now := time.Now()
	if err := os.Chtimes(path, now, now); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("look for files: %w", err)
	}
	return true, nil
}

// Upload reads an archive with the files of a COPY from r, size bytes, and stores it. It
// replaces an archive with the same hash. Its error wraps [ErrTooLarge] if the archive is too
// large, and [ErrFull] if all archives of the project together are, or if the disk is full.
func (s *Service) Upload(ctx context.Context, who auth.Principal, nameOrID, hash string, size int64, r io.Reader) (err error) {
	if err := mayManage(who); err != nil {
		return err
	}
	path, err := s.uploadPath(who.Project, hash)
	if err != nil {
		return err
	}
	switch {
	case size < 0:
		return fmt.Errorf("%w: Content-Length: the size of the archive must be known", ErrInvalid)
	case size > min(s.conf.MaxUploadMB, s.conf.MaxUploadsMB)<<20:
		return fmt.Errorf("%w: the archive has %d bytes, at most %d MiB are allowed: copy fewer files", ErrTooLarge, size, min(s.conf.MaxUploadMB, s.conf.MaxUploadsMB))
	}
	if err := s.ownTemplate(ctx, who, nameOrID); err != nil {
		return fmt.Errorf("upload files: %w", err)
	}
	if err := s.room(size); err != nil {
		return err
	}
	dir := filepath.Dir(path)
	done, err := s.reserve(who.Project, dir, size)
	if err != nil {
		return fmt.Errorf("upload files: %w", err)
	}
	defer done()
	f, err := os.CreateTemp(filepath.Join(s.conf.Dir, workDir), uploadPrefix)
	if err != nil {
		return fmt.Errorf("upload files: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, ignoreMissing(os.Remove(f.Name())))
		}
	}()
	n, err := io.Copy(f, io.LimitReader(r, size+1))
	if err == nil && n != size {
		err = fmt.Errorf("%w: the archive does not have %d bytes", ErrInvalid, size)
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("upload files: %w", err)
	}
	s.files.RLock()
	defer s.files.RUnlock()
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("upload files: %w", err)
	}
	return publish(f.Name(), path)
}

// uploadPrefix begins the names of archives that are being received.
const uploadPrefix = "upload-"

// reserve returns an error that wraps [ErrFull] unless a project may upload size more
// bytes. The caller calls done when the upload has ended, also after an error. Without the
// reservation, a thousand uploads at once would each find enough space.
func (s *Service) reserve(project, dir string, size int64) (done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	used, err := usage(dir)
	if err != nil {
		return nil, err
	}
	if used += s.uploading[project] + size; used > s.conf.MaxUploadsMB<<20 {
		return nil, fmt.Errorf("%w: the project's archives would use %d MiB of the allowed %d: archives are removed when they have not been used for a while", ErrFull, used>>20, s.conf.MaxUploadsMB)
	}
	s.uploading[project] += size
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.uploading[project] -= size; s.uploading[project] == 0 {
			delete(s.uploading, project)
		}
	}, nil
}

// publishOnce is publish for a file whose name is the digest of its content. An existing
// file stays, because running sandboxes share its pages.
func publishOnce(from, to string) error {
	now := time.Now()
	if err := os.Chtimes(to, now, now); err == nil {
		return os.Remove(from)
	}
	return publish(from, to)
}

// publish renames a synced file to its final name, durably. It replaces an existing file.
func publish(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return syncDir(filepath.Dir(to))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// usage returns the bytes of the files in a directory, which may be missing.
func usage(dir string) (n int64, err error) {
	es, err := os.ReadDir(dir)
	if err != nil {
		return 0, ignoreMissing(err)
	}
	for _, e := range es {
		if i, err := e.Info(); err == nil {
			n += i.Size()
		}
	}
	return n, nil
}

// room returns an error that wraps [ErrFull] unless the disk has space for size more bytes.
func (s *Service) room(size int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.conf.Dir, &st); err != nil {
		return &fs.PathError{Op: "statfs", Path: s.conf.Dir, Err: err}
	}
	if free := int64(st.Bavail) * st.Bsize; free-size < s.conf.KeepFreeMB<<20 {
		return fmt.Errorf("%w: the server's disk has %d MiB free; %d MiB must stay free in addition to the %d MiB needed", ErrFull, free>>20, s.conf.KeepFreeMB, size>>20)
	}
	return nil
}
