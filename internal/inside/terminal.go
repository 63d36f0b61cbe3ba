package inside

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	rpc "connectrpc.com/connect"

	"postern/internal/auth"
	"postern/internal/guest/processpb"
)

// Longest is how long a terminal can be open. Then its programs are ended.
const Longest = 4 * time.Hour

// shell starts bash, or sh if the template has no bash.
const shell = `cd 2>/dev/null; if command -v bash >/dev/null; then exec bash -l; fi; exec sh -l`

// A Terminal is a shell of a person in a sandbox. Read is called by one goroutine at a time;
// the other methods are safe for concurrent use.
type Terminal struct {
	d      *Door
	id     string
	pid    uint32
	client processpb.ProcessClient
	stream *rpc.ServerStreamForClient[processpb.StartResponse]
	cancel context.CancelFunc
	Exit   string // how the shell ended; set when Read has returned io.EOF; hostile
}

// OpenTerminal starts a shell with a terminal. It ends with ctx, after [Longest], or with
// Close, which must be called.
func (d *Door) OpenTerminal(ctx context.Context, who auth.Principal, id string, cols, rows uint32) (_ *Terminal, err error) {
	if err := d.check(ctx, who, id); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, Longest)
	defer func() {
		if err != nil {
			cancel()
		}
	}()
	t := &Terminal{d: d, id: id, client: processpb.NewProcessClient(d.client, guestURL(id, "", nil), options()...), cancel: cancel}
	req := rpc.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", shell}, Envs: map[string]string{"TERM": "xterm-256color"}},
		Pty:     &processpb.PTY{Size: size(cols, rows)},
	})
	d.header(req.Header(), id)
	if t.stream, err = t.client.Start(ctx, req); err != nil {
		return nil, guestError(id, err)
	}
	if !t.stream.Receive() {
		err := t.stream.Err()
		_ = t.stream.Close()
		return nil, guestError(id, errors.Join(err, errors.New("no terminal was opened")))
	}
	if t.pid = t.stream.Msg().GetEvent().GetStart().GetPid(); t.pid == 0 {
		_ = t.stream.Close()
		return nil, fmt.Errorf("%w: %s: a terminal without a process", ErrSilent, id)
	}
	return t, nil
}

// size bounds the window size that a browser reports.
func size(cols, rows uint32) *processpb.PTY_Size {
	return &processpb.PTY_Size{Cols: min(max(cols, 2), 1000), Rows: min(max(rows, 2), 1000)}
}

// Read returns the next output, or io.EOF when the shell has ended. The shell blocks while
// nobody reads.
func (t *Terminal) Read() ([]byte, error) {
	for t.stream.Receive() {
		e := t.stream.Msg().GetEvent()
		if end := e.GetEnd(); end != nil {
			t.Exit = end.GetStatus()
			return nil, io.EOF
		}
		if b := e.GetData().GetPty(); len(b) > 0 {
			return b, nil
		}
	}
	if err := t.stream.Err(); err != nil {
		return nil, guestError(t.id, err)
	}
	return nil, io.EOF
}

func (t *Terminal) selector() *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: t.pid}}
}

// Write sends b to the shell as typed input.
func (t *Terminal) Write(ctx context.Context, b []byte) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req := rpc.NewRequest(&processpb.SendInputRequest{Process: t.selector(), Input: &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: b}}})
	t.d.header(req.Header(), t.id)
	if _, err := t.client.SendInput(ctx, req); err != nil {
		return guestError(t.id, err)
	}
	return nil
}

// Resize sets the size of the window, in characters.
func (t *Terminal) Resize(ctx context.Context, cols, rows uint32) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req := rpc.NewRequest(&processpb.UpdateRequest{Process: t.selector(), Pty: &processpb.PTY{Size: size(cols, rows)}})
	t.d.header(req.Header(), t.id)
	if _, err := t.client.Update(ctx, req); err != nil {
		return guestError(t.id, err)
	}
	return nil
}

// Close kills the shell and its process group. It does not wait until they have ended.
// The attack: programs that a person started go on after the person has lost their rights.
func (t *Terminal) Close() error {
	defer t.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req := rpc.NewRequest(&processpb.SendSignalRequest{Process: t.selector(), Signal: processpb.Signal_SIGNAL_SIGKILL})
	t.d.header(req.Header(), t.id)
	_, err := t.client.SendSignal(ctx, req)
	if rpc.CodeOf(err) == rpc.CodeNotFound { // it has ended
		err = nil
	}
	t.cancel()
	_ = t.stream.Close()
	if err != nil {
		return guestError(t.id, err)
	}
	return nil
}

// Limits of one command of a person.
const (
	// RunTime is how long it may run.
	RunTime = 30 * time.Second
	// MaxOutput is how many bytes of output are kept. Further output is discarded.
	MaxOutput = 64 << 10
)

// A Ran is the outcome of a command. Its output is hostile.
type Ran struct {
	Output   []byte // standard output and error, in the order of arrival
	Cut      bool   // there was more output
	Code     int    // exit code; -1 if TimedOut and the guest reported none
	TimedOut bool
	Took     time.Duration
}

// Run runs one shell command line in a directory, without input.
func (d *Door) Run(ctx context.Context, who auth.Principal, id, dir, line string) (out Ran, err error) {
	if err := errors.Join(CheckPath(dir), d.check(ctx, who, id)); err != nil {
		return out, err
	}
	begun := time.Now()
	defer func() { out.Took = time.Since(begun) }()
	limited, cancel := context.WithTimeout(ctx, RunTime)
	defer cancel()
	req := rpc.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-l", "-c", line}, Cwd: &dir}, Stdin: new(false)})
	d.header(req.Header(), id)
	stream, err := processpb.NewProcessClient(d.client, guestURL(id, "", nil), options()...).Start(limited, req)
	if err != nil {
		return out, guestError(id, err)
	}
	defer stream.Close()
	for stream.Receive() {
		e := stream.Msg().GetEvent()
		for _, b := range [][]byte{e.GetData().GetStdout(), e.GetData().GetStderr()} {
			room := MaxOutput - len(out.Output)
			out.Cut = out.Cut || len(b) > room
			out.Output = append(out.Output, b[:min(len(b), room)]...)
		}
		if end := e.GetEnd(); end != nil {
			out.Code, out.TimedOut = int(end.GetExitCode()), limited.Err() != nil && ctx.Err() == nil
			return out, nil
		}
	}
	if ctx.Err() == nil && (limited.Err() != nil || rpc.CodeOf(stream.Err()) == rpc.CodeDeadlineExceeded) {
		out.Code, out.TimedOut = -1, true
		return out, nil
	}
	return out, guestError(id, errors.Join(stream.Err(), errors.New("the answer has no end")))
}
