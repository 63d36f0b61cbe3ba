package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/crypto/ssh"

	"postern/internal/guest/processpb"
	"postern/internal/template"
)

// serveSSH speaks SSH (RFC 4251 to 4254) with one client. Sessions become
// processes of the sandbox, and forwarded connections go to its ports. Ports of
// other machines are refused, and so is everything else.
func (d *dataPlane) serveSSH(ctx context.Context, config *ssh.ServerConfig, in io.ReadCloser, out io.WriteCloser) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, channels, requests, err := ssh.NewServerConn(&pipeConn{in, out}, config)
	if err != nil {
		return fmt.Errorf("begin SSH: %w", err)
	}
	defer conn.Close()
	context.AfterFunc(ctx, func() { _ = conn.Close() })
	if user := conn.User(); user != templateUser {
		d.user = user
	}
	go ssh.DiscardRequests(requests) // -R and everything else is refused; keepalives need just an answer
	var open sync.WaitGroup
	for c := range channels {
		switch c.ChannelType() {
		case "session":
			open.Go(func() { d.sshSession(ctx, c) })
		case "direct-tcpip":
			open.Go(func() { d.sshForward(ctx, c) })
		default:
			_ = c.Reject(ssh.UnknownChannelType, "only sessions and connections to ports of the sandbox")
		}
	}
	cancel() // the client has gone: so do its processes
	open.Wait()
	return nil
}

// A pipeConn is a connection that is two pipes.
type pipeConn struct {
	io.ReadCloser
	w io.WriteCloser
}

func (c *pipeConn) Write(b []byte) (int, error)      { return c.w.Write(b) }
func (c *pipeConn) Close() error                     { return errors.Join(c.ReadCloser.Close(), c.w.Close()) }
func (c *pipeConn) LocalAddr() net.Addr              { return pipeAddr{} }
func (c *pipeConn) RemoteAddr() net.Addr             { return pipeAddr{} }
func (c *pipeConn) SetDeadline(time.Time) error      { return nil }
func (c *pipeConn) SetReadDeadline(time.Time) error  { return nil }
func (c *pipeConn) SetWriteDeadline(time.Time) error { return nil }

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "pipe" }

// sshForward joins a channel to a port of the sandbox (RFC 4254 section 7.2).
func (d *dataPlane) sshForward(ctx context.Context, c ssh.NewChannel) {
	var to struct {
		Host   string
		Port   uint32
		Origin string
		From   uint32
	}
	if err := ssh.Unmarshal(c.ExtraData(), &to); err != nil || to.Port == 0 || to.Port > 65535 {
		_ = c.Reject(ssh.ConnectionFailed, "want a host and a port")
		return
	}
	// The sandbox's own ports only: to others it connects itself, past its wall's
	// rules.
	switch to.Host {
	case "localhost", "127.0.0.1", "::1", "0.0.0.0", d.box.SandboxID, d.box.SandboxID + sshSuffix:
	default:
		_ = c.Reject(ssh.Prohibited, "only ports of the sandbox itself, as localhost")
		return
	}
	ch, requests, err := c.Accept()
	if err != nil {
		return
	}
	go ssh.DiscardRequests(requests)
	defer ch.Close()
	_, _ = d.port(ctx, uint16(to.Port), ch, ch) // the client sees that the connection ends
}

// port joins a stream to a port of the sandbox.
func (d *dataPlane) port(ctx context.Context, port uint16, in io.Reader, out io.Writer) (*processpb.ProcessEvent_EndEvent, error) {
	stdin := true
	start := &processpb.StartRequest{Stdin: &stdin, Process: &processpb.ProcessConfig{Cmd: template.GuestPath, Args: []string{"connect", strconv.Itoa(int(port))}}}
	return d.pipe(ctx, start, in, out, io.Discard, nil)
}

// An sshSession is a session channel before and while its process runs.
type sshSession struct {
	d   *dataPlane
	ch  ssh.Channel
	env map[string]string
	pty *processpb.PTY

	mu  sync.Mutex
	pid uint32 // 0 before it runs
}

// maxEnv bounds the environment that a client sets.
const maxEnv = 256

// sshSession serves the requests of a session (RFC 4254 section 6). One of them
// starts a process.
func (d *dataPlane) sshSession(ctx context.Context, c ssh.NewChannel) {
	ch, requests, err := c.Accept()
	if err != nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &sshSession{d: d, ch: ch, env: map[string]string{}}
	var running sync.WaitGroup
	started := false
	for r := range requests {
		var config *processpb.ProcessConfig
		ok := true
		switch r.Type {
		case "env":
			ok = !started && s.setEnv(r.Payload)
		case "pty-req":
			ok = !started && s.setPTY(r.Payload)
		case "window-change":
			s.resize(ctx, r.Payload)
		case "signal":
			s.signal(ctx, r.Payload)
		default:
			config = processOf(r)
			ok = config != nil && !started
		}
		if r.WantReply {
			_ = r.Reply(ok, nil) // an error ends the loop, too
		}
		if config != nil && ok {
			started = true
			running.Go(func() { s.run(ctx, config) })
		}
	}
	cancel()
	running.Wait()
}

// processOf returns what a request starts, or nil.
func processOf(r *ssh.Request) *processpb.ProcessConfig {
	var text struct{ Text string }
	switch r.Type {
	case "shell":
		return &processpb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l"}}
	case "exec":
		if ssh.Unmarshal(r.Payload, &text) == nil {
			return &processpb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", text.Text}}
		}
	case "subsystem":
		if ssh.Unmarshal(r.Payload, &text) == nil && text.Text == "sftp" {
			return &processpb.ProcessConfig{Cmd: template.GuestPath, Args: []string{"sftp"}}
		}
	}
	return nil
}

func (s *sshSession) setEnv(payload []byte) bool {
	var v struct{ Name, Value string }
	if ssh.Unmarshal(payload, &v) != nil || v.Name == "" || strings.ContainsAny(v.Name, "=\x00") || strings.Contains(v.Value, "\x00") || len(s.env) >= maxEnv {
		return false
	}
	s.env[v.Name] = v.Value
	return true
}

func (s *sshSession) setPTY(payload []byte) bool {
	var v struct {
		Term                      string
		Cols, Rows, Width, Height uint32
		Modes                     string
	}
	if ssh.Unmarshal(payload, &v) != nil {
		return false
	}
	s.env["TERM"] = v.Term
	s.pty = ptyOf(v.Cols, v.Rows)
	return true
}

// ptyOf is a terminal's size. Clients without a terminal of their own send 0.
func ptyOf(cols, rows uint32) *processpb.PTY {
	if cols == 0 || rows == 0 {
		cols, rows = 80, 24
	}
	return &processpb.PTY{Size: &processpb.PTY_Size{Cols: min(cols, 65535), Rows: min(rows, 65535)}}
}

func (s *sshSession) process() *processpb.ProcessSelector {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pid == 0 {
		return nil
	}
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: s.pid}}
}

func (s *sshSession) resize(ctx context.Context, payload []byte) {
	var v struct{ Cols, Rows, Width, Height uint32 }
	which := s.process()
	if ssh.Unmarshal(payload, &v) != nil || which == nil || s.pty == nil {
		return
	}
	_, _ = s.d.processes().Update(ctx, connect.NewRequest(&processpb.UpdateRequest{Process: which, Pty: ptyOf(v.Cols, v.Rows)})) // the next change says it again
}

// signal passes a signal on. The sandbox's processes are sent TERM and KILL; the
// other signals that end a program become TERM.
func (s *sshSession) signal(ctx context.Context, payload []byte) {
	var v struct{ Name string }
	which := s.process()
	if ssh.Unmarshal(payload, &v) != nil || which == nil {
		return
	}
	sig := processpb.Signal_SIGNAL_SIGTERM
	switch v.Name {
	case "KILL":
		sig = processpb.Signal_SIGNAL_SIGKILL
	case "TERM", "HUP", "INT", "QUIT", "ABRT":
	default:
		return
	}
	_, _ = s.d.processes().SendSignal(ctx, connect.NewRequest(&processpb.SendSignalRequest{Process: which, Signal: sig})) // it may have ended
}

// run runs the session's process and tells the client how it ended.
func (s *sshSession) run(ctx context.Context, config *processpb.ProcessConfig) {
	defer s.ch.Close()
	config.Envs = s.env
	stdin := true
	end, err := s.d.pipe(ctx, &processpb.StartRequest{Process: config, Pty: s.pty, Stdin: &stdin}, s.ch, s.ch, s.ch.Stderr(), func(pid uint32) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.pid = pid
	})
	if err != nil {
		fmt.Fprintf(s.ch.Stderr(), "postern: %s\r\n", printable(err.Error()))
		_, _ = s.ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{255}))
		return
	}
	_ = s.ch.CloseWrite()
	if end.GetExitCode() >= 0 {
		_, _ = s.ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{uint32(end.GetExitCode())}))
		return
	}
	name := "TERM"
	for text, n := range map[string]string{"killed": "KILL", "hangup": "HUP", "interrupt": "INT", "segmentation": "SEGV", "abort": "ABRT", "pipe": "PIPE"} {
		if strings.Contains(end.GetStatus()+end.GetError(), text) {
			name = n
		}
	}
	_, _ = s.ch.SendRequest("exit-signal", false, ssh.Marshal(struct {
		Name     string
		Core     bool
		Text     string
		Language string
	}{name, false, printable(end.GetStatus()), ""}))
}

// pipe runs a process with its input and outputs, binary, and returns its end.
// Started is called with its PID. If ctx ends first, the process is killed.
func (d *dataPlane) pipe(ctx context.Context, start *processpb.StartRequest, in io.Reader, out, errs io.Writer, started func(pid uint32)) (*processpb.ProcessEvent_EndEvent, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := d.processes().Start(ctx, connect.NewRequest(start))
	if err != nil {
		return nil, inSandbox(err)
	}
	defer stream.Close()
	var pid uint32
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().GetEvent().(type) {
		case *processpb.ProcessEvent_Start:
			pid = e.Start.GetPid()
			if started != nil {
				started(pid)
			}
			go d.input(ctx, pid, start.GetPty() != nil, in)
		case *processpb.ProcessEvent_Data:
			var err error
			switch o := e.Data.GetOutput().(type) {
			case *processpb.ProcessEvent_DataEvent_Stdout:
				_, err = out.Write(o.Stdout)
			case *processpb.ProcessEvent_DataEvent_Stderr:
				_, err = errs.Write(o.Stderr)
			case *processpb.ProcessEvent_DataEvent_Pty:
				_, err = out.Write(o.Pty)
			}
			if err != nil {
				d.kill(ctx, pid)
				return nil, err
			}
		case *processpb.ProcessEvent_End:
			return e.End, nil
		}
	}
	d.kill(ctx, pid)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := stream.Err(); err != nil {
		return nil, inSandbox(err)
	}
	return nil, io.ErrUnexpectedEOF
}

// input passes a process's input on, in one request, and then its end.
func (d *dataPlane) input(ctx context.Context, pid uint32, terminal bool, in io.Reader) {
	which := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}
	stream := d.processes().StreamInput(ctx)
	if stream.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Start{Start: &processpb.StreamInputRequest_StartEvent{Process: which}}}) != nil {
		return
	}
	b := make([]byte, 64<<10)
	for {
		n, err := in.Read(b)
		if n > 0 {
			input := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: b[:n]}}
			if terminal {
				input = &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: b[:n]}}
			}
			if stream.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Data{Data: &processpb.StreamInputRequest_DataEvent{Input: input}}}) != nil {
				break // the process has ended
			}
		}
		if err != nil {
			break
		}
	}
	_, _ = stream.CloseAndReceive()
	if terminal {
		return // the end of a terminal's input is a key
	}
	_, _ = d.processes().CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: which})) // it may have ended
}
