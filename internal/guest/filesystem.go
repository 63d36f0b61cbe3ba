package guest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"

	"connectrpc.com/connect"

	"postern/internal/guest/filesystempb"
)

// maxEntries bounds a listing, which is built in memory.
const maxEntries = 50_000

// filesystem serves [filesystempb.FilesystemHandler].
type filesystem struct{ s *Server }

var _ filesystempb.FilesystemHandler = (*filesystem)(nil)

// act calls f with the absolute form of path and the user's rights.
func (h *filesystem) act(header http.Header, path string, f func(a account, path string) error) error {
	a, abs, err := h.target(header, path)
	if err != nil {
		return err
	}
	return rpcError(h.s.as(a, func() error { return f(a, abs) }))
}

// target returns the user and the absolute path of a request.
func (h *filesystem) target(header http.Header, path string) (account, string, error) {
	a, err := h.s.caller(header)
	if err != nil {
		return account{}, "", err
	}
	abs, err := h.s.resolve(a, path)
	if err != nil {
		return account{}, "", invalid("path: %w", err)
	}
	return a, abs, nil
}

// Stat implements [filesystempb.FilesystemHandler].
func (h *filesystem) Stat(_ context.Context, req *connect.Request[filesystempb.StatRequest]) (*connect.Response[filesystempb.StatResponse], error) {
	res := &filesystempb.StatResponse{}
	err := h.act(req.Header(), req.Msg.GetPath(), func(_ account, path string) (err error) {
		res.Entry, err = h.s.newListing().entry(path)
		return err
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

// MakeDir implements [filesystempb.FilesystemHandler].
func (h *filesystem) MakeDir(_ context.Context, req *connect.Request[filesystempb.MakeDirRequest]) (*connect.Response[filesystempb.MakeDirResponse], error) {
	a, path, err := h.target(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if err := h.s.as(a, func() error {
		switch fi, err := os.Stat(path); {
		case err == nil && fi.IsDir():
			return connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory %s already exists", path))
		case err == nil:
			return invalid("%s exists and is not a directory", path)
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
		return nil
	}); err != nil {
		return nil, rpcError(err)
	}
	res := &filesystempb.MakeDirResponse{}
	if err := h.s.withTop(a, path, func() error {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		var err error
		res.Entry, err = h.s.newListing().entry(path)
		return err
	}); err != nil {
		return nil, rpcError(err)
	}
	return connect.NewResponse(res), nil
}

// Move implements [filesystempb.FilesystemHandler].
func (h *filesystem) Move(_ context.Context, req *connect.Request[filesystempb.MoveRequest]) (*connect.Response[filesystempb.MoveResponse], error) {
	res := &filesystempb.MoveResponse{}
	err := h.act(req.Header(), req.Msg.GetSource(), func(a account, from string) error {
		to, err := h.s.resolve(a, req.Msg.GetDestination())
		if err != nil {
			return invalid("destination: %w", err)
		}
		if _, err := os.Lstat(from); err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if err := os.Rename(from, to); err != nil {
			return err
		}
		res.Entry, err = h.s.newListing().entry(to)
		return err
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

// ListDir implements [filesystempb.FilesystemHandler].
func (h *filesystem) ListDir(_ context.Context, req *connect.Request[filesystempb.ListDirRequest]) (*connect.Response[filesystempb.ListDirResponse], error) {
	res := &filesystempb.ListDirResponse{}
	depth := max(req.Msg.GetDepth(), 1)
	err := h.act(req.Header(), req.Msg.GetPath(), func(_ account, path string) error {
		if fi, err := os.Stat(path); err != nil {
			return err
		} else if !fi.IsDir() {
			return invalid("%s is not a directory", path)
		}
		return h.s.newListing().list(path, depth, &res.Entries)
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

// list appends the entries of dir, and of directories below it down to depth. It
// does not follow symbolic links to directories.
func (l *listing) list(dir string, depth uint32, to *[]*filesystempb.EntryInfo) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, d := range entries {
		path := filepath.Join(dir, d.Name())
		fi, err := os.Lstat(path)
		if err != nil {
			continue // removed since
		}
		if len(*to) >= maxEntries {
			return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("more than %d entries: list a smaller depth or a part", maxEntries))
		}
		*to = append(*to, l.entryOf(path, fi))
		if depth > 1 && fi.IsDir() {
			err := l.list(path, depth-1, to)
			if err != nil && !errors.Is(err, fs.ErrPermission) && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// Remove implements [filesystempb.FilesystemHandler].
func (h *filesystem) Remove(_ context.Context, req *connect.Request[filesystempb.RemoveRequest]) (*connect.Response[filesystempb.RemoveResponse], error) {
	err := h.act(req.Header(), req.Msg.GetPath(), func(_ account, path string) error {
		if path == "/" {
			return invalid("the root directory cannot be removed")
		}
		return os.RemoveAll(path)
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystempb.RemoveResponse{}), nil
}
