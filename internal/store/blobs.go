package store

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"
)

// Blobs keeps immutable byte strings as files in a directory. What it keeps is
// sealed by its owner; it is not a secret store.
type Blobs struct {
	dir string

	// names is held while directories are made, until they are durable: a blob that
	// found one before that could vanish with it.
	names sync.RWMutex
}

// OpenBlobs returns the blobs in dir, creating the directory if needed.
func OpenBlobs(dir string) (*Blobs, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open blobs: %w", err)
	}
	// A process that was killed may have left directories that are not durable.
	if err := syncDir(dir); err != nil {
		return nil, fmt.Errorf("open blobs: %w", err)
	}
	return &Blobs{dir: dir}, nil
}

// blobID is strict because an id becomes a file name.
var blobID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-zA-Z0-9_]{3,64}$`) })

// idFile is the file in a directory of blobs that names the directory. Its name is not
// that of a blob.
const idFile = "store.id"

// ID returns the name of the directory, which it makes once: copies of the directory have
// it as well.
func (b *Blobs) ID() (string, error) {
	path := filepath.Join(b.dir, idFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		data = []byte("blo_" + rand.Text() + "\n")
		err = WriteFile(path, data, 0o600)
	}
	if err != nil {
		return "", fmt.Errorf("read name of blobs: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// path returns the file of a blob. It refuses everything that is not a plain ID,
// so that no name leads out of the directory.
func (b *Blobs) path(id string) (string, error) {
	if !blobID().MatchString(id) {
		return "", fmt.Errorf("blob id %q: %w", id, ErrNotFound)
	}
	return filepath.Join(b.dir, id[len(id)-2:], id), nil
}

// Put stores data as id, which is new. When it returns nil the blob is durable. The
// row that refers to a blob is committed after Put: a crash in between leaves a blob
// without a row, perhaps cut short, never a row without its blob. So the file has its
// name from the start: a rename would need a second commit of the file system's journal.
func (b *Blobs) Put(id string, data []byte) (err error) {
	path, err := b.path(id)
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	f, err := b.create(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = b.makeDirs(dir); err == nil {
			f, err = b.create(path)
		}
	}
	if err != nil {
		return fmt.Errorf("put blob: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("put blob: %w", err), f.Close(), os.Remove(f.Name()))
		}
	}()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := syncDir(dir); err != nil { // the name
		return err
	}
	return f.Close()
}

func (b *Blobs) create(path string) (*os.File, error) {
	b.names.RLock()
	defer b.names.RUnlock()
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
}

// endings are the letters of [crypto/rand.Text], in which ids end.
const endings = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"

// makeDirs creates dir, the directory of blobs whose ids end alike, and those that
// differ from it in the last letter alone. They share one sync, which the first thousand
// messages of a server would otherwise make one by one.
func (b *Blobs) makeDirs(dir string) error {
	b.names.Lock()
	defer b.names.Unlock()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	for _, last := range endings {
		if err := os.MkdirAll(dir[:len(dir)-1]+string(last), 0o700); err != nil {
			return err
		}
	}
	return syncDir(b.dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Get returns the blob id, or an error that wraps [ErrNotFound].
func (b *Blobs) Get(id string) ([]byte, error) {
	path, err := b.path(id)
	if err != nil {
		return nil, err
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("blob %s: %w", id, ErrNotFound)
	}
	return data, err
}

// Delete removes the blob id. Removing one that is not there is not an error.
func (b *Blobs) Delete(id string) error {
	path, err := b.path(id)
	if err != nil {
		return nil //nolint:nilerr // an id that cannot be stored is not there
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete blob: %w", err)
	}
	return nil
}

// Old hands to fn the ids of the blobs that were stored before a moment, some
// hundreds at a time, and removes what writes that old have left unfinished. It
// ends with fn's first error.
func (b *Blobs) Old(before time.Time, fn func(ids []string) error) error {
	var ids []string
	flush := func() error {
		if len(ids) == 0 {
			return nil
		}
		defer func() { ids = nil }()
		return fn(ids)
	}
	err := filepath.WalkDir(b.dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || e.Name() == idFile {
			return gone(err)
		}
		i, err := e.Info()
		if err != nil || !i.ModTime().Before(before) {
			return gone(err)
		}
		if !blobID().MatchString(e.Name()) {
			return gone(os.Remove(path)) //nolint:gosec // the directory is ours alone: nobody else makes links in it
		}
		if ids = append(ids, e.Name()); len(ids) < 500 {
			return nil
		}
		return flush()
	})
	if err == nil {
		err = flush()
	}
	if err != nil {
		return fmt.Errorf("go through blobs: %w", err)
	}
	return nil
}

// gone returns err unless it says that a file is not there any more.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
