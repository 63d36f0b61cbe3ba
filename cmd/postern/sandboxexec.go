package main

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"postern/internal/guest/processpb"
	"postern/internal/sandbox"
)

// An exitError is the status with which this program exits because another
// program, in a sandbox, did.
type exitError int

func (s exitError) Error() string { return fmt.Sprintf("the command exited with status %d", int(s)) }

// A dataPlane is the way to what runs inside one sandbox.
type dataPlane struct {
	l    *local
	box  sandboxFacts
	user string // empty means the template's
	http *http.Client
}

// inside returns the way into a sandbox. The sandbox's own token opens it, which
// only its project and the operator get.
func (l *local) inside(ctx context.Context, id, user string) (*dataPlane, error) {
	box, err := l.sandbox(ctx, id)
	if err != nil {
		return nil, err
	}
	return &dataPlane{l: l, box: box, user: user, http: &http.Client{Transport: l.http.Transport, CheckRedirect: l.http.CheckRedirect}}, nil
}

// base returns the address of the server. Sandboxes are named by headers, which
// count only at an address or at a name that is the server's own.
func (d *dataPlane) base() string { return cmp.Or(d.l.base, "http://127.0.0.1") }

// Do implements [connect.HTTPClient]: it names the sandbox and shows its token.
func (d *dataPlane) Do(req *http.Request) (*http.Response, error) {
	req.Header.Set("E2b-Sandbox-Id", d.box.SandboxID)
	req.Header.Set("E2b-Sandbox-Port", strconv.Itoa(sandbox.GuestPort))
	req.Header.Set("X-Access-Token", d.box.token)
	if d.user != "" {
		req.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(d.user+":")))
	}
	return d.http.Do(req)
}

func (d *dataPlane) processes() processpb.ProcessClient {
	return processpb.NewProcessClient(d, d.base())
}

// environ reads the --env flags.
func (s *sandboxTool) config(cmd string, args ...string) (*processpb.ProcessConfig, error) {
	envs, err := pairs("env", s.envs, "=")
	if err != nil {
		return nil, err
	}
	c := &processpb.ProcessConfig{Cmd: cmd, Args: args, Envs: envs}
	if s.dir != "" {
		c.Cwd = &s.dir
	}
	return c, nil
}

func (s *sandboxTool) exec(ctx context.Context, l *local, args []string, out *output) error {
	if len(args) > 1 && args[1] == "--" {
		args = append(args[:1:1], args[2:]...)
	}
	if len(args) < 2 {
		return fmt.Errorf("%w: want the ID of a sandbox and a command", errUsage)
	}
	config, err := s.config(args[1], args[2:]...)
	if err != nil {
		return err
	}
	d, err := l.inside(ctx, args[0], s.user)
	if err != nil {
		return err
	}
	return d.run(ctx, &processpb.StartRequest{Process: config, Stdin: &s.stdin}, out.Writer, func(ctx context.Context, pid uint32) error {
		if !s.stdin {
			return nil
		}
		which := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}
		err := d.feed(ctx, os.Stdin, func(b []byte) *processpb.SendInputRequest {
			return &processpb.SendInputRequest{Process: which, Input: &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: b}}}
		})
		if err != nil {
			return err
		}
		_, err = d.processes().CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: which}))
		return err
	})
}

// feed sends what is read, until its end, to a process.
func (d *dataPlane) feed(ctx context.Context, from io.Reader, request func([]byte) *processpb.SendInputRequest) error {
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		if n > 0 {
			if _, err := d.processes().SendInput(ctx, connect.NewRequest(request(b[:n]))); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// run starts a process, passes its output on, and returns its exit status as an
// [exitError] unless that is 0. Input is called in a goroutine of its own once
// the process runs; it may never return, as when a terminal is read.
func (d *dataPlane) run(ctx context.Context, start *processpb.StartRequest, out io.Writer, input func(context.Context, uint32) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := d.processes().Start(ctx, connect.NewRequest(start))
	if err != nil {
		return inSandbox(err)
	}
	defer stream.Close()
	var pid uint32
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().GetEvent().(type) {
		case *processpb.ProcessEvent_Start:
			pid = e.Start.GetPid()
			go func() { _ = input(ctx, pid) }() // a process that has ended takes none
		case *processpb.ProcessEvent_Data:
			var err error
			switch o := e.Data.GetOutput().(type) {
			case *processpb.ProcessEvent_DataEvent_Stdout:
				_, err = out.Write(o.Stdout)
			case *processpb.ProcessEvent_DataEvent_Stderr:
				_, err = os.Stderr.Write(o.Stderr)
			case *processpb.ProcessEvent_DataEvent_Pty:
				_, err = out.Write(o.Pty)
			}
			if err != nil {
				d.kill(ctx, pid)
				return err
			}
		case *processpb.ProcessEvent_End:
			return ended(e.End)
		}
	}
	if ctx.Err() != nil {
		d.kill(ctx, pid)
		return errors.New("interrupted; the process was killed")
	}
	return inSandbox(lost(cmp.Or(stream.Err(), io.ErrUnexpectedEOF)))
}

// ended returns the error that the end of a process is.
func ended(e *processpb.ProcessEvent_EndEvent) error {
	switch {
	case e.GetExitCode() > 0:
		return exitError(e.GetExitCode())
	case e.GetExitCode() < 0 || e.GetError() != "":
		return fmt.Errorf("the command ended: %s", printable(cmp.Or(e.GetError(), e.GetStatus())))
	}
	return nil
}

// kill ends a process that nobody waits for any more.
func (d *dataPlane) kill(ctx context.Context, pid uint32) {
	if pid == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_, _ = d.processes().SendSignal(ctx, connect.NewRequest(&processpb.SendSignalRequest{
		Process: &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}, Signal: processpb.Signal_SIGNAL_SIGKILL,
	})) // best effort: it ends with its sandbox in any case
}

// inSandbox explains an error of the data plane.
// lost returns err, and for a stream that broke off in the middle what that means: the
// library says which bytes are missing.
func lost(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || strings.Contains(err.Error(), "incomplete envelope") {
		return errors.New("the sandbox ended, or the connection to it broke, before the command did: postern sandbox show ID says why, and the server's log if its disk is full")
	}
	return err
}

func inSandbox(err error) error {
	if c, ok := errors.AsType[*connect.Error](err); ok {
		return errors.New(printable(c.Message()))
	}
	return err
}

func (s *sandboxTool) shell(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	if !isTerminal(os.Stdin) || !isTerminal(out) {
		return errors.New("shell needs a terminal; postern sandbox exec runs a command without one")
	}
	config, err := s.config("/bin/bash", "-i", "-l")
	if err != nil {
		return err
	}
	if term := os.Getenv("TERM"); config.Envs["TERM"] == "" {
		config.Envs["TERM"] = cmp.Or(term, "xterm")
	}
	d, err := l.inside(ctx, id, s.user)
	if err != nil {
		return err
	}
	restore, err := makeRaw(os.Stdin)
	if err != nil {
		return err
	}
	defer restore()
	stdin := true
	return d.run(ctx, &processpb.StartRequest{Process: config, Pty: terminalSize(), Stdin: &stdin}, out.Writer, func(ctx context.Context, pid uint32) error {
		which := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}
		go d.followSize(ctx, which)
		return d.feed(ctx, os.Stdin, func(b []byte) *processpb.SendInputRequest {
			return &processpb.SendInputRequest{Process: which, Input: &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: b}}}
		})
	})
}

// terminalSize returns the size of this terminal for one in a sandbox.
func terminalSize() *processpb.PTY {
	cols, rows := uint32(80), uint32(24)
	if size, err := unix.IoctlGetWinsize(int(os.Stdin.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 && size.Row > 0 {
		cols, rows = uint32(size.Col), uint32(size.Row)
	}
	return &processpb.PTY{Size: &processpb.PTY_Size{Cols: cols, Rows: rows}}
}

// followSize passes changes of this terminal's size on.
func (d *dataPlane) followSize(ctx context.Context, which *processpb.ProcessSelector) {
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGWINCH)
	defer signal.Stop(changed)
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			_, _ = d.processes().Update(ctx, connect.NewRequest(&processpb.UpdateRequest{Process: which, Pty: terminalSize()})) // the next change says it again
		}
	}
}

// makeRaw makes a terminal pass every key on at once, without an echo and
// without signals, until restore is called.
func makeRaw(f *os.File) (restore func(), err error) {
	fd := int(f.Fd())
	was, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("read the terminal's mode: %w", err)
	}
	raw := *was
	raw.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	raw.Oflag &^= unix.OPOST
	raw.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	raw.Cflag = raw.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, &raw); err != nil {
		return nil, fmt.Errorf("set the terminal's mode: %w", err)
	}
	return func() { _ = unix.IoctlSetTermios(fd, unix.TCSETS, was) }, nil // it was taken a moment ago
}

func (s *sandboxTool) copy(ctx context.Context, l *local, args []string, out *output) error {
	if len(args) != 2 {
		return fmt.Errorf("%w: want SOURCE and TARGET, got %d arguments", errUsage, len(args))
	}
	fromID, fromPath, out1 := sandboxPath(args[0])
	toID, toPath, in1 := sandboxPath(args[1])
	switch {
	case out1 == in1:
		return fmt.Errorf("%w: one of SOURCE and TARGET must be ID:PATH, and the other a file here", errUsage)
	case in1:
		d, err := l.inside(ctx, toID, s.user)
		if err != nil {
			return err
		}
		return d.upload(ctx, args[0], toPath)
	}
	d, err := l.inside(ctx, fromID, s.user)
	if err != nil {
		return err
	}
	return d.download(ctx, fromPath, args[1], s.force, out.bytes())
}

// sandboxPath splits ID:PATH. An ID has the letter i and 20 letters and digits:
// a file here whose name is like that is written ./NAME.
func sandboxPath(s string) (id, path string, ok bool) {
	id, path, ok = strings.Cut(s, ":")
	if !ok || !strings.HasPrefix(id, "i") || len(id) < 21 || strings.ContainsAny(id, "/.") || path == "" {
		return "", "", false
	}
	return id, path, true
}

func (d *dataPlane) filesURL(path string) string {
	q := url.Values{"path": {path}}
	if d.user != "" {
		q.Set("username", d.user)
	}
	return d.base() + "/files?" + q.Encode()
}

func (d *dataPlane) upload(ctx context.Context, name, path string) error {
	from := os.Stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		if i, err := f.Stat(); err != nil || i.IsDir() {
			return errors.Join(fmt.Errorf("%s is a directory: copy it as an archive; postern help sandbox cp shows how", name), err)
		}
		from = f
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.filesURL(path), from)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	resp, err := d.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return d.failure(resp, path)
}

func (d *dataPlane) download(ctx context.Context, path, name string, force bool, out io.Writer) (err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.filesURL(path), http.NoBody)
	if err != nil {
		return err
	}
	resp, err := d.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := d.failure(resp, path); err != nil {
		return err
	}
	if name == "-" {
		_, err = io.Copy(out, resp.Body)
		return err
	}
	how := os.O_CREATE | os.O_WRONLY | os.O_EXCL
	if force {
		how = os.O_CREATE | os.O_WRONLY | os.O_TRUNC
	}
	f, err := os.OpenFile(name, how, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s exists; --force overwrites it", name)
	}
	if err != nil {
		return err
	}
	if _, err := io.Copy(f, resp.Body); err != nil { // part of a file must not pass for the whole
		return errors.Join(fmt.Errorf("%s: the answer broke off: %w", name, err), f.Close(), os.Remove(name))
	}
	return f.Close()
}

// failure returns the error that an answer about a file is.
func (d *dataPlane) failure(resp *http.Response, path string) error {
	if resp.StatusCode < 300 {
		return nil
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return err
	}
	if resp.StatusCode == http.StatusNotFound {
		return fmt.Errorf("there is no file %q in sandbox %s", path, d.box.SandboxID)
	}
	return failure(resp, b)
}
