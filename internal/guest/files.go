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
	"mime/multipart"
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

// copyBuffers are what file contents pass through, one for each transfer: a
// file of any size takes this much memory.
var copyBuffers = sync.Pool{New: func() any { b := make([]byte, copySize); return &b }}

const copySize = 256 << 10 // bytes

// copyBytes is io.Copy in large steps, whatever the ends could do themselves:
// what they do is smaller steps, and each is a system call, which costs more
// here than on Linux. What was read before an error is written.
func copyBytes(w io.Writer, r io.Reader) error {
	b := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(b)
	for {
		n, rerr := 0, error(nil)
		for n < len(*b) && rerr == nil { // not io.ReadFull: its error for a short read is also r's for a cut one
			var more int
			more, rerr = r.Read((*b)[n:])
			n += more
		}
		if n > 0 {
			if _, err := w.Write((*b)[:n]); err != nil {
				return err
			}
		}
		if errors.Is(rerr, io.EOF) {
			return nil
		} else if rerr != nil {
			return rerr
		}
	}
}

// openRegular opens a file for reading or writing. It is called with the
// rights of who asks. Only regular files will do: a FIFO that a hostile
// process left in place of a file would hold the guest for ever (hence
// O_NONBLOCK), and /dev/zero has no end.
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

// target returns who asks, and for which file.
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
	err = as(a, func() (err error) {
		f, fi, err = openRegular(path, os.O_RDONLY)
		return err
	})
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
		// Empty, or one of the kernel's files whose size is not known before
		// they are read.
		b, err := io.ReadAll(io.LimitReader(f, 1<<20))
		if err != nil {
			return err
		}
		content = bytes.NewReader(b)
		if len(b) == 0 {
			// Clients tell "empty" from "no body" by this header.
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
	// An error here is the client's leaving, or the file's: the missing end of
	// the stream tells.
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

// wantsGzip reports whether to compress a file. It is slower than the wire to
// the host, so only a client that names gzip and nothing else gets it: the
// ones that send a list take every coding and mean none in particular.
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

// A written file, as the answer to POST /files tells.
type written struct {
	Name     string            `json:"name"`
	Type     string            `json:"type"`
	Path     string            `json:"path"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

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
		z, err := gzip.NewReader(bufio.NewReaderSize(r.Body, copySize))
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
		one, err := s.writeFile(r, path, body, size)
		if err != nil {
			return err
		}
		done = append(done, one)
	case "multipart/form-data":
		if params["boundary"] == "" {
			return badRequest(errors.New("the Content-Type has no boundary"))
		}
		if done, err = s.writeParts(r, path, newParts(body, params["boundary"])); err != nil {
			return err
		}
	default:
		return badRequest(fmt.Errorf("the Content-Type %q is not known: send multipart/form-data or application/octet-stream", kind))
	}
	return writeJSON(w, done)
}

// newParts reads the parts of a form. The parser reads 4 KiB at a time, which
// would be a system call each.
func newParts(body io.Reader, boundary string) *multipart.Reader {
	return multipart.NewReader(bufio.NewReaderSize(body, copySize), boundary)
}

func (s *Server) writeParts(r *http.Request, path string, parts *multipart.Reader) ([]written, error) {
	var done []written
	for {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, badRequest(fmt.Errorf("read multipart body: %w", err))
		}
		if part.FormName() != "file" {
			continue
		}
		to := path
		if to == "" {
			// Not part.FileName, which keeps only the last element.
			_, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			if err != nil {
				return nil, badRequest(fmt.Errorf("read multipart body: %w", err))
			}
			to = params["filename"]
		} else if len(done) > 0 {
			return nil, badRequest(errors.New("path names one file and the body has several: leave path out and name each"))
		}
		if _, abs, err := s.target(r, to); err != nil {
			return nil, err
		} else if slices.ContainsFunc(done, func(w written) bool { return w.Path == abs }) {
			return nil, badRequest(fmt.Errorf("the body has two files for %s: the first one was written", abs))
		}
		one, err := s.writeFile(r, to, part, -1)
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

// writeFile writes one file, in place as a shell's > would, so that links to
// it and who watches it see the new content. size is what is known of the
// content's length, or -1.
func (s *Server) writeFile(r *http.Request, to string, content io.Reader, size int64) (written, error) {
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
	read := &readErrors{r: content}
	err = copyBytes(f, read)
	meta, _ := headerMetadata(r.Header) // checked
	if err == nil {
		err = as(a, func() error { return setMetadata(f, meta) })
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		return written{Name: filepath.Base(path), Type: "file", Path: path, Metadata: meta}, nil
	}
	if created {
		_ = as(a, func() error { return os.Remove(path) }) // no half a file stays
	}
	if read.err != nil {
		return written{}, badRequest(fmt.Errorf("read the content of %s: %w", path, err))
	}
	return written{}, fmt.Errorf("write %s: %w", path, err)
}

// withTop calls f, which makes what is missing of dir, with a's rights. Where
// those do not do because a directory like /data is not there, and a is the
// sandbox's default user, it is made and given to a, and f is called again:
// clients of E2B write there without a thought. It is the only thing that this
// does as root for somebody else. Nobody but root can put anything in the way,
// and what is there already, such as /etc, stays as closed as it is.
func (s *Server) withTop(a account, dir string, f func() error) error {
	err := as(a, f)
	if !errors.Is(err, fs.ErrPermission) || a.uid == 0 || a.name != s.current().DefaultUser {
		return err
	}
	top, _, _ := strings.Cut(strings.TrimPrefix(filepath.Clean(dir), "/"), "/")
	top = "/" + top
	if os.Mkdir(top, 0o755) != nil || os.Lchown(top, int(a.uid), int(a.gid)) != nil {
		return err
	}
	return as(a, f)
}

// checkSpace refuses a file that cannot fit before anything of it is written.
func checkSpace(dir string, size int64) error {
	var st unix.Statfs_t
	if size <= 0 || unix.Statfs(dir, &st) != nil || st.Blocks == 0 {
		return nil //nolint:nilerr // the write will tell
	}
	if free := int64(st.Bavail) * st.Bsize; size > free {
		return &statusError{http.StatusInsufficientStorage, fmt.Errorf("not enough disk space: %d bytes wanted, %d free", size, free)}
	}
	return nil
}

// readErrors remembers that an error came from reading, not from writing.
type readErrors struct {
	r   io.Reader
	err error
}

// Read implements [io.Reader].
func (e *readErrors) Read(b []byte) (int, error) {
	n, err := e.r.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		e.err = err
	}
	return n, err
}
