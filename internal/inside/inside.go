// Package inside lets a person look and work inside a running sandbox: its processes, the
// ports at which it listens, its files, a command, a terminal.
//
// It asks the guest, so everything that it returns is hostile: root in a sandbox can
// replace the guest's answers, and programs there choose names, contents and numbers. Each
// answer is bounded in bytes, entries and time. The package wakes no paused sandbox, and
// enters none that a contract binds: people reviewed what that contract allows, and a
// person's shell would not be part of it.
//
// The package must not decide who may do what. Its callers do, and they record it.
package inside

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	rpc "connectrpc.com/connect"

	"postern/internal/auth"
	"postern/internal/guest/filesystempb"
	"postern/internal/sandbox"
)

// User is the user in the sandbox as which people work. The sandbox's own programs use it too.
const User = "user"

// Limits of a guest's answers.
const (
	maxAnswer  = 16 << 20 // bytes of one answer
	maxPath    = 4096     // bytes; PATH_MAX
	maxEntries = 20_000   // entries of a directory; further ones are left out
	patience   = 10 * time.Second
)

var (
	// ErrDown means that the sandbox is not running.
	ErrDown = errors.New("the sandbox does not run")
	// ErrSilent means that the guest did not answer in time, or that its answer is malformed.
	ErrSilent = errors.New("the sandbox does not answer")
)

// A RefusalError is the guest's refusal of a request. Its text is hostile.
type RefusalError struct{ Text string }

// Error implements error.
func (r *RefusalError) Error() string { return "the sandbox refuses: " + r.Text }

// A Door opens sandboxes for people. It is safe for concurrent use.
type Door struct {
	fleet  *sandbox.Fleet
	client *http.Client
}

// New returns the door to the sandboxes of a fleet. It reaches their guests through next.
func New(f *sandbox.Fleet, next http.RoundTripper) *Door {
	return &Door{f, &http.Client{Transport: next, CheckRedirect: func(*http.Request, []*http.Request) error {
		// The attack: the guest redirects to another sandbox, with the key of this one.
		return http.ErrUseLastResponse
	}}}
}

// check returns an error unless the sandbox runs and who may enter it. The error wraps
// [sandbox.ErrNotFound] if it belongs to another project, [sandbox.ErrBound] if a contract
// binds it, or [ErrDown].
func (d *Door) check(ctx context.Context, who auth.Principal, id string) error {
	s, err := d.fleet.Get(ctx, who, id)
	if err != nil {
		return err
	}
	if s.Contract != "" || s.Options.Traffic.Closed {
		return fmt.Errorf("enter %s: %w: %s", id, sandbox.ErrBound, s.Contract)
	}
	if s.State != sandbox.Running {
		return fmt.Errorf("enter %s, which is %s: %w", id, s.State, ErrDown)
	}
	return nil
}

func (d *Door) header(h http.Header, id string) {
	h.Set(sandbox.ChannelHeader, d.fleet.ChannelKey(id).Reveal())
	h.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(User+":")))
	h.Set("Accept-Encoding", "identity")
}

func guestURL(id, p string, query url.Values) string {
	u := url.URL{Scheme: "http", Host: net.JoinHostPort(id, strconv.Itoa(sandbox.GuestPort)), Path: p, RawQuery: query.Encode()}
	return u.String()
}

func options() []rpc.ClientOption {
	// No compression: a small answer must not become a large one.
	return []rpc.ClientOption{rpc.WithReadMaxBytes(maxAnswer), rpc.WithAcceptCompression("gzip", nil, nil)}
}

// guestError converts the error of a call to the guest into a [RefusalError] or [ErrSilent].
func guestError(id string, err error) error {
	if e, ok := errors.AsType[*rpc.Error](err); ok && e.Code() != rpc.CodeUnavailable && e.Code() != rpc.CodeUnknown && e.Code() != rpc.CodeInternal {
		return &RefusalError{e.Message()}
	}
	return fmt.Errorf("%w: %s: %w", ErrSilent, id, err)
}

// CheckPath returns an error that wraps [sandbox.ErrInvalid] unless p is an absolute, clean
// path of at most 4096 bytes in UTF-8, without NUL.
func CheckPath(p string) error {
	if len(p) > maxPath || !path.IsAbs(p) || path.Clean(p) != p || strings.ContainsRune(p, 0) || !utf8.ValidString(p) {
		return fmt.Errorf("%w: a path must be absolute, without . and .., and of at most %d bytes", sandbox.ErrInvalid, maxPath)
	}
	return nil
}

// A Kind is the type of a file.
type Kind string

// The kinds of files.
const (
	File  Kind = "file"
	Dir   Kind = "folder"
	Other Kind = "other" // a device, a pipe, a socket, or a link to nothing
)

// An Entry is a file in a directory. Its texts are hostile.
type Entry struct {
	Name    string
	Path    string
	Kind    Kind      // of the target if it is a symbolic link
	Size    int64     // bytes, as the guest reports it
	Changed time.Time // last modification; zero if the guest reports none
	Link    string    // target of a symbolic link; empty for other files
	Rights  string    // such as "-rw-r--r--"
	Owner   string    // name of the user
	CanOpen bool      // [CheckPath] accepts Path
}

func entryOf(dir string, e *filesystempb.EntryInfo) Entry {
	out := Entry{Name: e.GetName(), Size: max(0, e.GetSize()), Rights: e.GetPermissions(), Owner: e.GetOwner(), Link: e.GetSymlinkTarget(), Kind: Other}
	if t := e.GetModifiedTime(); t != nil && t.IsValid() {
		out.Changed = t.AsTime()
	}
	switch e.GetType() {
	case filesystempb.FileType_FILE_TYPE_FILE:
		out.Kind = File
	case filesystempb.FileType_FILE_TYPE_DIRECTORY:
		out.Kind = Dir
	case filesystempb.FileType_FILE_TYPE_UNSPECIFIED, filesystempb.FileType_FILE_TYPE_SYMLINK:
	}
	// The attack: a name such as "../../etc", so that a link leads elsewhere than it reads.
	out.Path = path.Join(dir, out.Name)
	out.CanOpen = out.Name != "" && out.Name != "." && out.Name != ".." && !strings.ContainsAny(out.Name, "/\x00") && !strings.ContainsRune(out.Name, utf8.RuneError) && CheckPath(out.Path) == nil
	return out
}

// List returns the files in a directory, directories first, then by name. If there are more
// than 20,000, it returns so many, and more is true.
func (d *Door) List(ctx context.Context, who auth.Principal, id, dir string) (out []Entry, more bool, err error) {
	if err := errors.Join(CheckPath(dir), d.check(ctx, who, id)); err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req := rpc.NewRequest(&filesystempb.ListDirRequest{Path: dir, Depth: 1})
	d.header(req.Header(), id)
	resp, err := filesystempb.NewFilesystemClient(d.client, guestURL(id, "", nil), options()...).ListDir(ctx, req)
	if err != nil {
		return nil, false, guestError(id, err)
	}
	entries := resp.Msg.GetEntries()
	if len(entries) > maxEntries {
		entries, more = entries[:maxEntries], true
	}
	for _, e := range entries {
		out = append(out, entryOf(dir, e))
	}
	slices.SortFunc(out, func(a, b Entry) int {
		if (a.Kind == Dir) != (b.Kind == Dir) {
			if a.Kind == Dir {
				return -1
			}
			return 1
		}
		return strings.Compare(a.Name, b.Name)
	})
	return out, more, nil
}

// Content is the beginning of a file.
type Content struct {
	Data []byte
	Size int64 // bytes of the whole file, as the guest reports it; -1 if it does not
	More bool  // Data is not the whole file
}

// Read returns at most limit bytes of a regular file, whatever size the guest reports. The
// guest refuses pipes and devices.
func (d *Door) Read(ctx context.Context, who auth.Principal, id, file string, limit int64) (c Content, err error) {
	if err := errors.Join(CheckPath(file), d.check(ctx, who, id)); err != nil {
		return c, err
	}
	ctx, cancel := context.WithTimeout(ctx, 6*patience)
	defer cancel()
	return d.read(ctx, id, file, limit)
}

func (d *Door) read(ctx context.Context, id, file string, limit int64) (c Content, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, guestURL(id, "/files", url.Values{"path": {file}, "username": {User}}), nil)
	if err != nil {
		return c, err
	}
	d.header(req.Header, id)
	// One byte more than wanted shows that there is more. The attack: a sparse file of a
	// terabyte. So only its beginning is requested.
	req.Header.Set("Range", fmt.Sprintf("bytes=0-%d", limit))
	resp, err := d.client.Do(req)
	if err != nil {
		return c, fmt.Errorf("%w: %s: %w", ErrSilent, id, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusPartialContent {
		var answer struct {
			Message string `json:"message"`
		}
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
		if json.Unmarshal(text, &answer) != nil || answer.Message == "" {
			answer.Message = fmt.Sprintf("status %d", resp.StatusCode)
		}
		return c, &RefusalError{answer.Message}
	}
	if c.Data, err = io.ReadAll(io.LimitReader(resp.Body, limit+1)); err != nil {
		return c, fmt.Errorf("%w: %s: %w", ErrSilent, id, err)
	}
	c.Size = total(resp)
	if int64(len(c.Data)) > limit {
		c.Data, c.More = c.Data[:limit], true
	} else {
		c.Size = int64(len(c.Data))
	}
	return c, nil
}

// total returns the size of the file that the guest reports, or -1.
func total(resp *http.Response) int64 {
	if _, of, ok := strings.Cut(resp.Header.Get("Content-Range"), "/"); ok {
		if n, err := strconv.ParseInt(of, 10, 64); err == nil && n >= 0 {
			return n
		}
	}
	return -1
}
