package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
)

// ErrBound means that a contract binds the sandbox and does not allow the request.
// Errors that wrap it name the contract.
var ErrBound = fmt.Errorf("the sandbox is bound by a contract (%w)", auth.ErrForbidden)

// refuseIfBound returns an error that wraps [ErrBound] if a contract binds s. The error says
// what was refused.
func (s *Info) refuseIfBound(what string) error {
	if s.Contract == "" {
		return nil
	}
	return fmt.Errorf("%s of %s: %w: %s", what, s.ID, ErrBound, s.Contract)
}

// A Confinement describes the files that the processes of a bound sandbox see. They always
// see the template's system directories, read-only. All paths are absolute and clean.
type Confinement struct {
	Read  []string // files and directories of the template, read-only
	Write []string // writable directories, empty at first and owned by the processes' user
	Deny  []string // hidden paths, also within Read and Write; of a symbolic link, its target
	Dir   string   // working directory and home; empty means the first of Write, else "/"
	Trace bool     // record the files that are opened for writing, made, removed and renamed, see [Open]
	Reads bool     // record the files that are opened for reading
}

// Ended is how a command ended, as the guest reports it. As evidence it ranks below the
// [Exit] that the sandbox's kernel reports.
type Ended struct {
	PID int // in the sandbox; 0 if it was not started
	// Code is the exit code: 128 plus the signal's number if a signal ended it, 126 or 127
	// as in shells if it was not started.
	Code   int
	Signal int    // 0 if none
	Reason string // why it was not started, or failed; printable
	// Memory means that the guest ended a process for lack of memory while the command
	// ran: the command itself, or another one.
	Memory bool
}

// A FileInfo describes a regular file that a bound sandbox wrote. Every field is hostile.
type FileInfo struct {
	Path     string // absolute and clean; any bytes but NUL, at most 4096
	Size     int64  // bytes
	Modified time.Time
}

// Limits of the answers of a confined sandbox's guest.
const (
	maxListing  = 32 << 20 // bytes
	maxFilePath = 4096     // bytes
	maxReason   = 1024     // bytes
	// guestSilence is how long the guest may send nothing while a command runs. It sends
	// at least an empty frame every ten seconds.
	guestSilence = 3 * time.Minute
)

// control sends a request of the host to the guest of a confined sandbox. It maps the
// guest's refusals to [ErrFull] and [ErrInvalid].
func (f *Fleet) control(ctx context.Context, id, method, path string, query url.Values, body io.Reader) (*http.Response, error) {
	resp, err := f.stream(ctx, f.guestClient(id), id, method, path, query, body)
	var said *guestError
	if !errors.As(err, &said) {
		return resp, err
	}
	switch said.status {
	case http.StatusRequestEntityTooLarge, http.StatusInsufficientStorage:
		return nil, fmt.Errorf("%w: %.1024s", ErrFull, said.message)
	case http.StatusBadRequest, http.StatusForbidden, http.StatusConflict, http.StatusNotFound:
		return nil, fmt.Errorf("%w: %.1024s", ErrInvalid, said.message)
	}
	return nil, err
}

// tell sends body as JSON like control, and discards the response's body.
func (f *Fleet) tell(ctx context.Context, id, method, path string, query url.Values, body any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	resp, err := f.control(ctx, id, method, path, query, bytes.NewReader(b))
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// Confine ends all processes in a sandbox with a contract, and creates its view of files.
// From then on every process runs in this view without capabilities, whoever starts it.
// Call Confine once, in [Request.Prepare].
func (f *Fleet) Confine(ctx context.Context, id string, c Confinement) error {
	s, err := f.rows.row(ctx, id)
	if err != nil {
		return err
	}
	if s.Contract == "" {
		return fmt.Errorf("%w: confine %s: no contract binds it", ErrInvalid, id)
	}
	if c.Dir == "" && len(c.Write) > 0 {
		c.Dir = c.Write[0]
	}
	f.mu.Lock()
	var processes int64
	if l := f.live[id]; l != nil {
		processes = l.processes
	}
	f.mu.Unlock()
	if _, ok := f.runtime.(Gatekeeper); ok {
		if err := f.observe(ctx, id, Observed{Opens: c.Trace, Reads: c.Reads, Digests: true}); err != nil {
			return err
		}
	}
	err = f.tell(ctx, id, http.MethodPost, "/run/confine", nil, map[string]any{
		"contract": s.Contract, "read": c.Read, "write": c.Write, "deny": c.Deny, "dir": or(c.Dir, "/"), "processes": processes, "memoryMB": s.MemoryMB,
	})
	if err != nil {
		return fmt.Errorf("confine %s: %w", id, err)
	}
	return nil
}

// stillConfined returns an error if a contract binds the sandbox, and its guest reports
// another contract or no view of files.
//
// The attack: make the guest lose its view by a boot or by a restart of its program, and
// start a process that sees all files.
func (f *Fleet) stillConfined(ctx context.Context, s Info) error {
	if s.Contract == "" {
		return nil
	}
	b, err := f.askGuest(ctx, s.ID, f.ChannelKey(s.ID), http.MethodGet, "/run/state", nil, http.StatusOK)
	if err != nil {
		return fmt.Errorf("ask guest whether it is confined: %w", err)
	}
	var st struct {
		Contract string `json:"contract"`
		View     bool   `json:"view"`
	}
	if json.Unmarshal(b, &st) != nil || st.Contract != s.Contract || !st.View {
		return errors.New("the sandbox is no longer confined")
	}
	return nil
}

// PutFile puts a file into the view of a confined sandbox, read-only. Call it before the
// first command.
func (f *Fleet) PutFile(ctx context.Context, id, path string, r io.Reader) error {
	resp, err := f.control(ctx, id, http.MethodPut, "/run/file", url.Values{"path": {path}}, r)
	if err != nil {
		return fmt.Errorf("put %.256q into %s: %w", path, id, err)
	}
	return resp.Body.Close()
}

// errSilentCommand means that the guest has sent nothing for guestSilence.
var errSilentCommand = fmt.Errorf("the guest has sent nothing for %v", guestSilence)

// RunCommand runs a command in the view of a confined sandbox, as the view's user; c.User is
// ignored. Output receives what the command writes, in pieces of at most 64 KiB; stream is
// 'o' for standard output and 'e' for standard error. If output returns an error or ctx
// ends, the command is killed and that error is returned.
//
// RunCommand returns when the command itself has ended. Processes that it left behind run
// on, but their output is discarded after a short grace period.
func (f *Fleet) RunCommand(ctx context.Context, id string, c Command, output func(stream byte, p []byte) error) (_ Ended, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := time.AfterFunc(guestSilence, func() { cancel(errSilentCommand) })
	defer silence.Stop()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	}()
	body, err := json.Marshal(map[string]any{"args": c.Args, "dir": c.Dir, "env": c.Env})
	if err != nil {
		return Ended{}, err
	}
	resp, err := f.control(ctx, id, http.MethodPost, "/run/command", nil, bytes.NewReader(body))
	if err != nil {
		return Ended{}, fmt.Errorf("run a command in %s: %w", id, err)
	}
	defer resp.Body.Close()
	var outputErr error
	last, err := eachFrame(resp.Body, func(kind byte, p []byte) error {
		silence.Reset(guestSilence)
		if kind == frameStdout || kind == frameStderr {
			outputErr = output(kind, p)
		}
		return outputErr
	})
	if outputErr != nil {
		return Ended{}, outputErr
	}
	if err != nil {
		return Ended{}, fmt.Errorf("run a command in %s: %w", id, err)
	}
	var e struct {
		PID    int32  `json:"pid"`
		Code   uint8  `json:"code"`
		Signal uint8  `json:"signal"`
		Reason string `json:"reason"`
		Memory bool   `json:"memory"`
	}
	if err := json.Unmarshal(last, &e); err != nil || e.PID < 0 {
		return Ended{}, fmt.Errorf("run a command in %s: %w", id, errMalformed)
	}
	reason := printable(e.Reason)
	return Ended{int(e.PID), int(e.Code), int(e.Signal), reason[:min(len(reason), maxReason)], e.Memory}, nil
}

// ListFiles returns the regular files in the writable directories of a confined sandbox
// that match one of patterns, sorted by path. In a pattern "*" matches any text within one
// name, and "**" as the last component matches everything below. Links are not followed.
// The error wraps [ErrFull] if more than most files match.
func (f *Fleet) ListFiles(ctx context.Context, id string, patterns []string, most int) ([]FileInfo, error) {
	body, err := json.Marshal(map[string]any{"patterns": patterns, "most": most})
	if err != nil {
		return nil, err
	}
	resp, err := f.control(ctx, id, http.MethodPost, "/run/list", nil, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("list files of %s: %w", id, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxListing+1))
	if err != nil {
		return nil, fmt.Errorf("list files of %s: %w", id, err)
	}
	if len(b) > maxListing {
		return nil, fmt.Errorf("list files of %s: %w: the list is larger than %d bytes", id, ErrFull, maxListing)
	}
	out, err := parseListing(b, most)
	if err != nil {
		return nil, fmt.Errorf("list files of %s: %w", id, err)
	}
	return out, nil
}

// parseListing parses a guest's hostile list of files.
func parseListing(b []byte, most int) ([]FileInfo, error) {
	var said struct {
		Files []struct {
			Path     []byte    `json:"path"`
			Size     int64     `json:"size"`
			Modified time.Time `json:"modified"`
		} `json:"files"`
	}
	if err := json.Unmarshal(b, &said); err != nil {
		return nil, errMalformed
	}
	if len(said.Files) > most {
		return nil, fmt.Errorf("%w: more than %d files match", ErrFull, most)
	}
	out := make([]FileInfo, 0, len(said.Files))
	for _, e := range said.Files {
		p := string(e.Path)
		if !path.IsAbs(p) || path.Clean(p) != p || p == "/" || len(p) > maxFilePath || strings.ContainsRune(p, 0) || e.Size < 0 {
			return nil, errMalformed
		}
		out = append(out, FileInfo{p, e.Size, e.Modified})
	}
	slices.SortFunc(out, func(a, b FileInfo) int { return strings.Compare(a.Path, b.Path) })
	for i := 1; i < len(out); i++ {
		if out[i].Path == out[i-1].Path {
			return nil, errMalformed
		}
	}
	return out, nil
}

// OpenFile opens a regular file in a writable directory of a confined sandbox, without
// following links. A read beyond most bytes returns an error that wraps [ErrFull].
// Processes of the sandbox may change the content while it is read.
func (f *Fleet) OpenFile(ctx context.Context, id, path string, most int64) (io.ReadCloser, error) {
	resp, err := f.control(ctx, id, http.MethodGet, "/run/file", url.Values{"path": {path}, "most": {strconv.FormatInt(most, 10)}}, nil) //nolint:bodyclose // the caller closes it
	if err != nil {
		return nil, fmt.Errorf("read %.256q of %s: %w", path, id, err)
	}
	return &limitedFile{resp.Body, most}, nil
}

// A limitedFile returns an error if more than left bytes are read from it.
type limitedFile struct {
	io.ReadCloser
	left int64
}

// Read implements [io.Reader].
func (l *limitedFile) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	// One byte beyond the limit shows that the file is too large.
	n, err := l.ReadCloser.Read(p[:min(int64(len(p)), l.left+1)])
	if int64(n) > l.left {
		n = int(l.left)
		err = fmt.Errorf("%w: the file is larger than allowed", ErrFull)
	}
	l.left -= int64(n)
	return n, err
}

// KillProcess kills a process of a confined sandbox and its descendants, except those that
// have detached themselves.
func (f *Fleet) KillProcess(ctx context.Context, id string, pid int) error {
	if pid <= 1 {
		return fmt.Errorf("%w: kill process %d of %s: it does not belong to a command", ErrInvalid, pid, id)
	}
	return f.killInside(ctx, id, pid)
}

// KillAll kills all processes in the view of a confined sandbox. It returns nil once none is
// left.
func (f *Fleet) KillAll(ctx context.Context, id string) error { return f.killInside(ctx, id, 0) }

// killInside kills a process, or all if pid is 0.
func (f *Fleet) killInside(ctx context.Context, id string, pid int) error {
	if err := f.tell(ctx, id, http.MethodPost, "/run/kill", url.Values{"pid": {strconv.Itoa(pid)}}, nil); err != nil {
		return fmt.Errorf("kill processes of %s: %w", id, err)
	}
	return nil
}
