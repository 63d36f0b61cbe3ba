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

// maxReply is the longest answer of a sentry that is read.
const maxReply = 16 << 10

// errNotAsked means that the sentry knows nothing of the call.
var errNotAsked = errors.New("connect to sentry")

// call asks the sentry of a sandbox to do something and returns its answer.
// It works for every sandbox on this machine, whoever started it: the control
// socket is in the sandbox's directory. It speaks gVisor's protocol itself:
// gVisor's client takes answers of any length and files with them, from a
// sentry that may have been broken into, knows no deadline and keeps a thread
// waiting. An error
// is errNotAsked, a [remoteError] that the sentry answers, or leaves unknown what
// the sentry does.
func (r *Runtime) call(ctx context.Context, id, method string, arg any, files ...*os.File) (json.RawMessage, error) {
	return r.callFor(ctx, maxReply, id, method, arg, files...)
}

// callFor is call with an answer of at most so many bytes.
func (r *Runtime) callFor(ctx context.Context, most int64, id, method string, arg any, files ...*os.File) (json.RawMessage, error) {
	// As in the launcher: the path may be too long for a socket's address.
	dir, err := os.Open(r.dir(id))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNotAsked, err)
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/runsc-%s.sock", dir.Fd(), id)})
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
	// A call is far smaller than a socket's buffer; the files come with its
	// first byte.
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

// A remoteError is what a sentry says went wrong. It is not to be trusted, nor
// shown as our own words.
type remoteError string

func (e remoteError) Error() string { return "the sentry says: " + string(e) }

// readReply reads a sentry's answer, of at most so many bytes. The answer cannot
// be trusted.
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
