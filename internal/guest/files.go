package guest

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// The buffers for file contents. A transfer uses one of each at most, whatever the
// file's size. Most files fit in the first.
const (
	firstBuffer = 128 << 10 // bytes
	bigBuffer   = 1 << 20   // bytes
)

var (
	firstBuffers = sync.Pool{New: func() any { b := make([]byte, firstBuffer); return &b }}
	bigBuffers   = sync.Pool{New: func() any { b := make([]byte, bigBuffer); return &b }}
)

// copyBytes is io.Copy with large buffers. It does not use ReadFrom and WriteTo,
// which copy in smaller steps: each step is a system call, which is more expensive
// in gVisor than on Linux. Data read before an error is still written.
func copyBytes(w io.Writer, r io.Reader) error {
	more, err := copyPiece(w, r, &firstBuffers)
	for more && err == nil {
		more, err = copyPiece(w, r, &bigBuffers)
	}
	return err
}

// copyPiece copies as much as a buffer of pool holds. More is false at the end of r.
func copyPiece(w io.Writer, r io.Reader, pool *sync.Pool) (more bool, err error) {
	b := pool.Get().(*[]byte)
	defer pool.Put(b)
	n, rerr := 0, error(nil)
	for n < len(*b) && rerr == nil { // not io.ReadFull, whose error for a short read is also that of a truncated stream
		var k int
		k, rerr = r.Read((*b)[n:])
		n += k
	}
	if n > 0 {
		if _, err := w.Write((*b)[:n]); err != nil {
			return false, err
		}
	}
	if errors.Is(rerr, io.EOF) {
		return false, nil
	}
	return rerr == nil, rerr
}

// openRegular opens a regular file. The caller has taken the user's rights. It
// refuses other kinds: a hostile process could leave a FIFO in place of a file,
// which would block the guest forever (hence O_NONBLOCK), and /dev/zero has no end.
func openRegular(path string, flags int) (*os.File, fs.FileInfo, error) {
	f, err := os.OpenFile(path, flags|syscall.O_NONBLOCK|syscall.O_CLOEXEC|syscall.O_NOCTTY, 0o644)
	if err != nil {
		return nil, nil, err
	}
	fi, err := f.Stat()
	switch {
	case err != nil:
	case fi.IsDir():
		err = badRequest(fmt.Errorf("path '%s' is a directory", path))
	case !fi.Mode().IsRegular():
		err = badRequest(fmt.Errorf("path '%s' is not a regular file", path))
	default:
		return f, fi, nil
	}
	f.Close()
	return nil, nil, err
}

// target returns the user and the absolute path of a request.
func (s *Server) target(r *http.Request, path string) (account, string, error) {
	a, err := s.account(r.URL.Query().Get("username"))
	if err != nil {
		return account{}, "", err
	}
	if path == "" {
		return account{}, "", badRequest(errors.New("path is empty"))
	}
	path, err = s.resolve(a, path)
	if err != nil {
		return account{}, "", badRequest(err)
	}
	return a, path, nil
}

// getFile sends a file, compressed if the client insists on it.
func (s *Server) getFile(w http.ResponseWriter, r *http.Request) error {
	a, path, err := s.target(r, r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	compress, err := wantsGzip(r.Header)
	if err != nil {
		return err
	}
	var f *os.File
	var fi fs.FileInfo
	err = s.as(a, func() (err error) {
		f, fi, err = openRegular(path, os.O_RDONLY)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return &statusError{http.StatusNotFound, fmt.Errorf("path '%s' does not exist", path)} // E2B's text
	}
	if err != nil {
		return err
	}
	defer f.Close()
	h := w.Header()
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": filepath.Base(path)}))
	h.Set("Vary", "Accept-Encoding")
	h.Set("X-Content-Type-Options", "nosniff")
	var content io.ReadSeeker = f
	if fi.Size() == 0 {
		// An empty file, or a file of the kernel whose size is unknown until it is
		// read.
		b, err := io.ReadAll(io.LimitReader(f, 1<<20))
		if err != nil {
			return err
		}
		content = bytes.NewReader(b)
		if len(b) == 0 {
			// Clients use this header to distinguish an empty file from no body.
			h.Set("Content-Length", "0")
			h.Set("Content-Type", "text/plain; charset=utf-8")
			w.WriteHeader(http.StatusOK)
			return nil
		}
	}
	if !compress || r.Header.Get("Range") != "" || r.Method == http.MethodHead {
		http.ServeContent(w, r, filepath.Base(path), fi.ModTime(), content)
		return nil
	}
	h.Set("Content-Encoding", "gzip")
	h.Set("Content-Type", contentType(path))
	h.Set("Last-Modified", fi.ModTime().UTC().Format(http.TimeFormat))
	z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
	// If this fails the client has disconnected or the file cannot be read. The
	// missing end of the stream tells the client.
	if copyBytes(z, content) == nil {
		_ = z.Close()
	}
	return nil
}

func contentType(path string) string {
	if t := mime.TypeByExtension(filepath.Ext(path)); t != "" {
		return t
	}
	return "application/octet-stream"
}

// wantsGzip reports whether to compress a file. Compressing is slower than the link
// to the host, so only a client that accepts gzip and nothing else gets it. Clients
// that send a list accept any coding and prefer none.
func wantsGzip(h http.Header) (bool, error) {
	named, identity, others := false, true, false
	for part := range strings.SplitSeq(strings.Join(h.Values("Accept-Encoding"), ","), ",") {
		coding, params, _ := strings.Cut(part, ";")
		coding = strings.ToLower(strings.TrimSpace(coding))
		q := 1.0
		if v, ok := strings.CutPrefix(strings.TrimSpace(params), "q="); ok {
			var err error
			if q, err = strconv.ParseFloat(v, 64); err != nil {
				return false, badRequest(fmt.Errorf("the quality %q in Accept-Encoding is not a number", v))
			}
		}
		switch coding {
		case "":
		case "gzip":
			named = q > 0
		case "identity":
			identity = q > 0
			others = others || q > 0
		case "*":
			identity = identity && q > 0
		default:
			others = others || q > 0
		}
	}
	if !identity && !named {
		return false, &statusError{http.StatusNotAcceptable, errors.New("files come as identity or gzip, and Accept-Encoding allows neither")}
	}
	return named && (!others || !identity), nil
}

// A written file, in the answer to POST /files.
type written struct {
	Name     string            `json:"name"`
	Type     string            `json:"type"`
	Path     string            `json:"path"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// postFiles writes files: one from a raw body, or several from the parts of a
// form.
func (s *Server) postFiles(w http.ResponseWriter, r *http.Request) error {
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return badRequest(fmt.Errorf("the Content-Type does not parse: %w", err))
	}
	if _, err := headerMetadata(r.Header); err != nil {
		return badRequest(err)
	}
	var body io.Reader = r.Body
	size := r.ContentLength
	switch enc := strings.ToLower(r.Header.Get("Content-Encoding")); enc {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(bufio.NewReaderSize(r.Body, firstBuffer))
		if err != nil {
			return badRequest(fmt.Errorf("the body is not gzip: %w", err))
		}
		body, size = z, -1
	default:
		return badRequest(fmt.Errorf("the Content-Encoding %q is not known: send gzip or none", enc))
	}
	path := r.URL.Query().Get("path")
	var done []written
	switch kind {
	case "application/octet-stream":
		one, err := s.writeFile(r, path, func(w io.Writer) error { return copyBytes(w, body) }, size)
		if err != nil {
			return err
		}
		done = append(done, one)
	case "multipart/form-data":
		if params["boundary"] == "" {
			return badRequest(errors.New("the Content-Type has no boundary"))
		}
		f := newForm(body, params["boundary"])
		defer f.Close()
		if done, err = s.writeParts(r, path, f); err != nil {
			return err
		}
	default:
		return badRequest(fmt.Errorf("the Content-Type %q is not known: send multipart/form-data or application/octet-stream", kind))
	}
	return writeJSON(w, done)
}

// writeParts writes the file parts of a form, in their order. It stops at the
// first error.
func (s *Server) writeParts(r *http.Request, path string, f *form) ([]written, error) {
	var done []written
	for {
		part, err := f.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, badRequest(fmt.Errorf("read multipart body: %w", err))
		}
		if part.name != "file" {
			continue
		}
		to := path
		if to == "" {
			to = part.filename
		} else if len(done) > 0 {
			return nil, badRequest(errors.New("path names one file and the body has several: leave path out and name each"))
		}
		if _, abs, err := s.target(r, to); err != nil {
			return nil, err
		} else if slices.ContainsFunc(done, func(w written) bool { return w.Path == abs }) {
			return nil, badRequest(fmt.Errorf("the body has two files for %s: the first one was written", abs))
		}
		one, err := s.writeFile(r, to, f.writeTo, -1)
		if err != nil {
			return nil, err
		}
		done = append(done, one)
	}
	if len(done) == 0 {
		return nil, badRequest(errors.New("the body has no part named file"))
	}
	return done, nil
}

// tellOwner makes watchers of a file see a change of its attributes before its content
// comes, as E2B's guest does, which sets the owner of what it writes. Here the owner is
// right already.
func (s *Server) tellOwner(a account, f *os.File) {
	_ = s.as(a, func() error { // best effort: a file of another owner has no such event
		fi, err := f.Stat()
		if err != nil {
			return err
		}
		if st, ok := fi.Sys().(*syscall.Stat_t); ok && st.Uid == a.uid {
			return f.Chown(int(a.uid), -1)
		}
		return nil
	})
}

// writeFile writes one file in place, like a shell's >, so that hard links and
// watchers see the new content. Content writes it. Size is its length, or -1 if it is
// unknown.
func (s *Server) writeFile(r *http.Request, to string, content func(io.Writer) error, size int64) (written, error) {
	a, path, err := s.target(r, to)
	if err != nil {
		return written{}, err
	}
	var f *os.File
	created := false
	err = s.withTop(a, filepath.Dir(path), func() error {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := checkSpace(filepath.Dir(path), size); err != nil {
			return err
		}
		var err error
		f, _, err = openRegular(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
		if created = err == nil; created || !errors.Is(err, fs.ErrExist) {
			return err
		}
		f, _, err = openRegular(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC)
		return err
	})
	if err != nil {
		return written{}, err
	}
	s.tellOwner(a, f)
	out := &writeErrors{w: f}
	err = content(out)
	readFailed := err != nil && out.err == nil
	meta, _ := headerMetadata(r.Header)            // checked before
	if err == nil && (len(meta) > 0 || !created) { // a new file has none to remove
		err = s.as(a, func() error { return setMetadata(f, meta) })
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		return written{Name: filepath.Base(path), Type: "file", Path: path, Metadata: meta}, nil
	}
	if created {
		_ = s.as(a, func() error { return os.Remove(path) }) // remove the incomplete file
	}
	if readFailed {
		return written{}, badRequest(fmt.Errorf("read the content of %s: %w", path, err))
	}
	return written{}, fmt.Errorf("write %s: %w", path, err)
}

// withTop calls f, which creates the missing part of dir, with a's rights. Clients
// of E2B expect that they can write to a directory like /data. So if f fails
// because the top directory does not exist, and a is the default user, it is
// created for a, and f is called again. This is the only thing that withTop does as
// root. Only root could put something in the way, and existing directories such as
// /etc stay protected.
func (s *Server) withTop(a account, dir string, f func() error) error {
	err := s.as(a, f)
	if !errors.Is(err, fs.ErrPermission) || a.uid == 0 || a.name != s.current().DefaultUser || s.current().Contract != "" {
		return err
	}
	top, _, _ := strings.Cut(strings.TrimPrefix(filepath.Clean(dir), "/"), "/")
	top = "/" + top
	if os.Mkdir(top, 0o755) != nil || os.Lchown(top, int(a.uid), int(a.gid)) != nil {
		return err
	}
	return s.as(a, f)
}

// checkSpace refuses a file that cannot fit before any of it is written.
func checkSpace(dir string, size int64) error {
	var st unix.Statfs_t
	if size <= 0 || unix.Statfs(dir, &st) != nil || st.Blocks == 0 {
		return nil //nolint:nilerr // the write will fail instead
	}
	if free := int64(st.Bavail) * st.Bsize; size > free {
		return &statusError{http.StatusInsufficientStorage, fmt.Errorf("not enough disk space: %d bytes wanted, %d free", size, free)}
	}
	return nil
}

// writeErrors remembers whether an error came from writing instead of reading.
type writeErrors struct {
	w   io.Writer
	err error
}

// Write implements [io.Writer].
func (e *writeErrors) Write(b []byte) (int, error) {
	n, err := e.w.Write(b)
	if err != nil {
		e.err = err
	}
	return n, err
}
