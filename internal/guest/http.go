package guest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
)

// A statusError is an error with an HTTP status.
type statusError struct {
	code int
	err  error
}

// Error implements error.
func (e *statusError) Error() string { return e.err.Error() }

// Unwrap returns the cause.
func (e *statusError) Unwrap() error { return e.err }

func badRequest(err error) error { return &statusError{http.StatusBadRequest, err} }

// serve returns the handler for a function that returns an error.
func (s *Server) serve(f func(http.ResponseWriter, *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := f(w, r); err != nil {
			code := httpStatus(err)
			if code == http.StatusInternalServerError {
				s.log.WarnContext(r.Context(), "request failed", "method", r.Method, "path", r.URL.Path, "error", err)
			}
			writeError(w, code, withDisk(err, code).Error())
		}
	}
}

// withDisk adds to the error of a full disk how large it is.
func withDisk(err error, code int) error {
	var st unix.Statfs_t
	if code != http.StatusInsufficientStorage || unix.Statfs("/", &st) != nil {
		return err
	}
	return fmt.Errorf("%w: this sandbox may write %d MiB in all", err, int64(st.Blocks)*st.Bsize>>20)
}

// httpStatus is the table from errors to statuses of the plain HTTP routes. Error
// texts are sent unchanged: callers may see everything in the sandbox.
func httpStatus(err error) int {
	var known *statusError
	switch {
	case errors.As(err, &known):
		return known.code
	case errors.Is(err, errUnknownUser):
		return http.StatusUnauthorized
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return http.StatusInsufficientStorage
	case errors.Is(err, fs.ErrNotExist):
		return http.StatusNotFound
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		return http.StatusForbidden
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENAMETOOLONG),
		errors.Is(err, unix.ELOOP), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ETXTBSY):
		return http.StatusBadRequest
	}
	return http.StatusInternalServerError
}

// rpcError is the table from errors to codes of the RPCs.
func rpcError(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*connect.Error](err); ok {
		return err
	}
	code := connect.CodeInternal
	switch httpStatus(err) {
	case http.StatusUnauthorized:
		code = connect.CodeUnauthenticated
	case http.StatusInsufficientStorage:
		code, err = connect.CodeResourceExhausted, withDisk(err, http.StatusInsufficientStorage)
	case http.StatusNotFound:
		code = connect.CodeNotFound
	case http.StatusForbidden:
		code = connect.CodePermissionDenied
	case http.StatusBadRequest:
		code = connect.CodeInvalidArgument
	}
	if errors.Is(err, fs.ErrExist) {
		code = connect.CodeAlreadyExists
	}
	return connect.NewError(code, err)
}

func writeJSON(w http.ResponseWriter, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	_, err = w.Write(b)
	return err
}
