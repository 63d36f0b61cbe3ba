package guest

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
)

const (
	maxSources = 10_000  // per composed file
	maxCompose = 4 << 20 // bytes of a request
)

// A composeRequest is the body of POST /files/compose.
type composeRequest struct {
	SourcePaths []string `json:"source_paths"`
	Destination string   `json:"destination"`
	Username    string   `json:"username"`
}

// postCompose concatenates files to a new one and removes them. With it a client
// can upload the parts of a large file in parallel. The destination is replaced
// atomically, and if anything fails nothing is removed.
func (s *Server) postCompose(w http.ResponseWriter, r *http.Request) error {
	var req composeRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxCompose)).Decode(&req); err != nil {
		return badRequest(fmt.Errorf("the body is not valid JSON for compose: %w", err))
	}
	switch {
	case len(req.SourcePaths) == 0:
		return badRequest(errors.New("source_paths is empty"))
	case len(req.SourcePaths) > maxSources:
		return badRequest(fmt.Errorf("source_paths has more than %d paths", maxSources))
	case req.Destination == "":
		return badRequest(errors.New("destination is empty"))
	}
	a, err := s.account(req.Username)
	if err != nil {
		return err
	}
	c := composition{account: a}
	if c.to, err = s.resolve(a, req.Destination); err != nil {
		return badRequest(fmt.Errorf("destination: %w", err))
	}
	asked := c.to
	for _, p := range req.SourcePaths {
		if p, err = s.resolve(a, p); err != nil {
			return badRequest(fmt.Errorf("source_paths: %w", err))
		}
		c.from = append(c.from, p)
	}
	if err := as(a, c.prepare); err != nil {
		return err
	}
	if err := c.run(); err != nil {
		return err
	}
	return writeJSON(w, written{Name: filepath.Base(asked), Type: "file", Path: asked})
}

// A composition is the state of one request.
type composition struct {
	account account
	from    []string
	to      string      // without symbolic links
	mode    fs.FileMode // mode of the existing file, or of a new one
	size    int64
}

// prepare checks the request with the caller's rights.
func (c *composition) prepare() error {
	var there fs.FileInfo
	c.mode = 0o644
	if to, err := filepath.EvalSymlinks(c.to); err == nil {
		c.to = to // a symbolic link keeps pointing to the file
		if there, err = os.Stat(to); err != nil {
			return err
		}
		if !there.Mode().IsRegular() {
			return badRequest(fmt.Errorf("destination '%s' is not a regular file", c.to))
		}
		c.mode = there.Mode().Perm()
	}
	for _, p := range c.from {
		fi, err := os.Stat(p)
		switch {
		case err != nil:
			return err
		case !fi.Mode().IsRegular():
			return badRequest(fmt.Errorf("source '%s' is not a regular file", p))
		case p == c.to || (there != nil && os.SameFile(there, fi)):
			return badRequest(fmt.Errorf("source '%s' is the destination", p))
		}
		c.size += fi.Size()
	}
	dir := filepath.Dir(c.to)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return checkSpace(dir, c.size)
}

// run writes a file beside the destination, renames it and removes the sources.
func (c *composition) run() error {
	fresh := filepath.Join(filepath.Dir(c.to), ".compose-"+rand.Text())
	var f *os.File
	err := as(c.account, func() (err error) {
		f, err = os.OpenFile(fresh, os.O_WRONLY|os.O_CREATE|os.O_EXCL, c.mode)
		return err
	})
	if err != nil {
		return err
	}
	for _, p := range c.from {
		if err = c.add(f, p); err != nil {
			break
		}
	}
	return as(c.account, func() error {
		err := errors.Join(err, f.Chmod(c.mode), f.Close())
		if err == nil {
			err = os.Rename(fresh, c.to)
		}
		if err != nil {
			return errors.Join(err, os.Remove(fresh))
		}
		for _, p := range c.from {
			_ = os.Remove(p) // a source may be listed twice, and the result exists
		}
		return nil
	})
}

func (c *composition) add(to *os.File, path string) error {
	var part *os.File
	err := as(c.account, func() (err error) {
		part, _, err = openRegular(path, os.O_RDONLY)
		return err
	})
	if err != nil {
		return err
	}
	defer part.Close()
	return copyBytes(to, part)
}
