package bridge

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

const (
	maxFiles = 100      // attachments of one call
	maxBytes = 25 << 20 // of all of them together
	maxPath  = 4096     // bytes
)

// A file is a file that was attached.
type file struct {
	name   string // its path in the folder
	size   int
	sha256 string // hexadecimal
}

// attach replaces paths in the attachments of arguments by the content of the files,
// and returns the files.
func (b *Bridge) attach(arguments map[string]json.RawMessage) ([]file, error) {
	raw, ok := arguments["attachments"]
	if !ok {
		return nil, nil
	}
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, nil //nolint:nilerr // the server reports the error
	}
	if len(list) > maxFiles {
		return nil, fmt.Errorf("attachments: got %d, want at most %d", len(list), maxFiles)
	}
	var out []file
	left := maxBytes
	for i, one := range list {
		var path string
		if json.Unmarshal(one, &path) != nil {
			continue // an object; the server checks it
		}
		data, f, err := b.read(path, left)
		if err != nil {
			return nil, fmt.Errorf("attachments[%d]: %w", i, err)
		}
		left -= len(data)
		object := map[string]string{"name": filepath.Base(f.name), "content_base64": base64.StdEncoding.EncodeToString(data)}
		if kind := mime.TypeByExtension(filepath.Ext(f.name)); kind != "" {
			object["content_type"] = kind
		}
		if list[i], err = json.Marshal(object); err != nil {
			return nil, fmt.Errorf("attachments[%d]: %w", i, err)
		}
		out = append(out, f)
	}
	var err error
	arguments["attachments"], err = json.Marshal(list)
	return out, err
}

// read returns a file of the folder that the person has chosen, of at most most
// bytes. The attack: a model is tricked into attaching the person's keys by a path
// out of the folder, by "..", through a symbolic link, or through one that is created
// between check and use. So [os.Root] confines every step of the lookup.
func (b *Bridge) read(path string, most int) ([]byte, file, error) {
	failed := func(why string) ([]byte, file, error) {
		return nil, file{}, fmt.Errorf("%s: %s", strconv.Quote(truncate(path)), why)
	}
	switch {
	case b.conf.Root == nil:
		return failed("is a path, and the person has not chosen a folder for attachments (postern mcp --root DIR): use an object {name, content_base64, content_type}")
	case path == "" || len(path) > maxPath || strings.IndexByte(path, 0) >= 0:
		return failed(fmt.Sprintf("a path must have 1 to %d bytes and no NUL", maxPath))
	}
	name := path
	if filepath.IsAbs(path) {
		var err error
		if name, err = filepath.Rel(b.conf.Root.Name(), path); err != nil {
			return failed("is not in the folder " + b.conf.Root.Name())
		}
	}
	// O_NONBLOCK, since opening a named pipe would wait for a writer.
	f, err := b.conf.Root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return failed("there is no such file in " + b.conf.Root.Name())
	case errors.Is(err, fs.ErrPermission):
		return failed("may not be read")
	case err != nil:
		return failed("is not in the folder " + b.conf.Root.Name() + ", or leads out of it")
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return failed("is not a regular file")
	}
	data, err := io.ReadAll(io.LimitReader(f, int64(most)+1))
	if err != nil {
		return failed("could not be read")
	}
	if len(data) > most {
		return failed("the attachments together exceed 25 MB")
	}
	sum := sha256.Sum256(data)
	return data, file{name: filepath.ToSlash(filepath.Clean(name)), size: len(data), sha256: hex.EncodeToString(sum[:])}, nil
}

func truncate(s string) string {
	if r := []rune(s); len(r) > 200 {
		return string(r[:200]) + "…"
	}
	return s
}
