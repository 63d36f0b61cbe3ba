package main

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	slash "path"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxSavedName is the size limit of the name of a saved artifact, in bytes.
const maxSavedName = 200

// savedName returns the name under which an artifact is saved here. Code in a sandbox
// chose the path: "../", a name that begins with "-" and is taken for a flag, control
// characters that a terminal obeys, and marks that turn "fdp.exe" around.
func savedName(path string) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case r == utf8.RuneError, r == '/', r == '\\', unicode.Is(unicode.Cf, r), !unicode.IsPrint(r):
			return '_'
		}
		return r
	}, slash.Base(path))
	for len(name) > maxSavedName {
		_, n := utf8.DecodeRuneInString(name)
		name = name[n:] // the end has the type
	}
	switch {
	case strings.Trim(name, "._ ") == "":
		return "artifact"
	case name[0] == '.' || name[0] == '-' || name[0] == '~' || name[0] == ' ':
		return "_" + name[1:]
	}
	return name
}

// A saver writes released artifacts into a directory.
type saver struct {
	root  *os.Root
	force bool // replace files
	taken map[string]bool
}

func newSaver(dir string, force bool) (*saver, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("--out: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("--out: %w", err)
	}
	return &saver{root: root, force: force, taken: map[string]bool{}}, nil
}

// save writes one artifact and returns its name in the directory. Nothing is left there
// unless it is whole and has the digest that was approved.
func (s *saver) save(path, sum string, from io.Reader) (name string, err error) {
	name = savedName(path)
	for n := 2; s.taken[name]; n++ { // of another directory in the sandbox
		name = fmt.Sprintf("%d-%s", n, savedName(path))
	}
	s.taken[name] = true
	to := name
	if s.force {
		to = ".postern-" + rand.Text()
	}
	f, err := s.root.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("%s exists; --force overwrites it", name)
	}
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.root.Remove(to))
		}
	}()
	h := sha256.New()
	if _, err := io.Copy(io.MultiWriter(f, h), from); err != nil {
		return "", errors.Join(fmt.Errorf("%s: the answer broke off: %w", name, err), f.Close())
	}
	if err := f.Close(); err != nil {
		return "", err
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != strings.TrimPrefix(sum, "sha256:") {
		return "", fmt.Errorf("%s: has SHA-256 %s, but %s was approved", name, got, sum)
	}
	if to != name {
		return name, s.root.Rename(to, name)
	}
	return name, nil
}
