package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// The sentry's calls that we use. gVisor's package with these names is its kernel,
// which the server is built without; a test compares them.
const (
	callPause     = "containerManager.Pause"
	callResume    = "containerManager.Resume"
	callSave      = "containerManager.Checkpoint"
	callSaveFiles = "containerManager.FSSave"
	callLayer     = "Fs.TarRootfsUpperLayer"
	callStacks    = "debug.Stacks"
	callWait      = "containerManager.Wait"
)

// maxReply bounds a sentry's answer, in bytes.
const maxReply = 16 << 10

// errNotAsked means that the call did not reach the sentry.
var errNotAsked = errors.New("connect to sentry")

// call calls a method of a sandbox's sentry and returns its answer. It works for
// every sandbox on this machine, also of another process, since the control socket
// is in the sandbox's directory.
//
// It implements gVisor's protocol itself. gVisor's client accepts answers of any
// length and with files, from a sentry that may be compromised; it has no deadline
// and keeps a thread waiting.
//
// If the error is errNotAsked the sentry did nothing. If it is a [remoteError] the
// sentry answered with it. After any other error it is unknown what the sentry does.
func (r *Runtime) call(ctx context.Context, id, method string, arg any, files ...*os.File) (json.RawMessage, error) {
	return r.callFor(ctx, maxReply, id, method, arg, files...)
}

// callFor is call with a limit for the answer, in bytes.
func (r *Runtime) callFor(ctx context.Context, most int64, id, method string, arg any, files ...*os.File) (json.RawMessage, error) {
	// As in the launcher: the path may be too long for a socket address.
	dir, err := os.Open(r.dir(id))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNotAsked, err)
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/runsc-%s.sock", dir.Fd(), r.name(id))})
	dir.Close()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNotAsked, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	b, err := json.Marshal(struct {
		Method string `json:"method"`
		Arg    any    `json:"arg"`
	}{method, arg})
	if err != nil {
		return nil, fmt.Errorf("encode call: %w", err)
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	// A call is far smaller than a socket's buffer, so it is written at once. The
	// files are sent with its first byte.
	if n, _, err := conn.WriteMsgUnix(b, rights, nil); err != nil || n < len(b) {
		return nil, fmt.Errorf("ask sentry: %w", because(ctx, errors.Join(err, shortWrite(n, len(b)))))
	}
	result, err := readReply(conn, most)
	if err != nil {
		return nil, because(ctx, err)
	}
	return result, nil
}

func shortWrite(n, want int) error {
	if n < want {
		return io.ErrShortWrite
	}
	return nil
}

// A remoteError is an error text from a sentry. It is not trusted, and not shown as
// a text of ours.
type remoteError string

func (e remoteError) Error() string { return "the sentry says: " + string(e) }

// readReply reads a sentry's answer of at most so many bytes. The answer is
// hostile.
func readReply(r io.Reader, most int64) (json.RawMessage, error) {
	var reply struct {
		Success bool            `json:"success"`
		Err     string          `json:"err"`
		Result  json.RawMessage `json:"result"`
	}
	if err := json.NewDecoder(io.LimitReader(r, most)).Decode(&reply); err != nil {
		return nil, fmt.Errorf("ask sentry: %w", err)
	}
	if !reply.Success {
		return nil, remoteError(reply.Err)
	}
	return reply.Result, nil
}
