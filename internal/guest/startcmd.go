package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"postern/internal/guest/processpb"
)

// The routes below /template are for the host alone, which has the guest run the start
// command and the ready command of the sandbox's template.

// startedCommand is a template's start command. It survives in a snapshot.
type startedCommand struct {
	mu      sync.Mutex
	running bool
	end     *processpb.ProcessEvent_EndEvent // nil until it has ended
	lines   lineBuffer
}

// A startState is the answer to GET /template/start.
type startState struct {
	Running bool     `json:"running"`
	Code    int      `json:"code"` // of its end; -1 if a signal ended it
	Lines   []string `json:"lines"`
	Next    int      `json:"next"` // number of the next line
}

// A readyState is the answer to POST /template/ready.
type readyState struct {
	Code  int      `json:"code"`
	Lines []string `json:"lines"`
}

// A lineBuffer keeps the last lines of an output.
type lineBuffer struct {
	lines []string
	first int // number of the first one
	rest  []byte
}

// The limits of a lineBuffer.
const (
	keptLines   = 200
	maxKeptLine = 1 << 10 // bytes; longer lines are cut into several
)

func (l *lineBuffer) write(b []byte) {
	for len(b) > 0 {
		line, after, whole := bytes.Cut(b, []byte("\n"))
		if room := maxKeptLine - len(l.rest); len(line) > room {
			line, after, whole = b[:room], b[room:], true
		}
		l.rest, b = append(l.rest, line...), after
		if whole {
			l.flush()
		}
	}
}

func (l *lineBuffer) flush() {
	l.lines = append(l.lines, utf8(strings.TrimSuffix(string(l.rest), "\r")))
	l.rest = l.rest[:0]
	if over := len(l.lines) - keptLines; over > 0 {
		l.lines = append(l.lines[:0], l.lines[over:]...)
		l.first += over
	}
}

// since returns the lines from a number on, and the number of the next one.
func (l *lineBuffer) since(n int) ([]string, int) {
	at := min(max(n-l.first, 0), len(l.lines))
	return append([]string{}, l.lines[at:]...), l.first + len(l.lines)
}

// templateCommand is the body of POST /template/start and /template/ready.
type templateCommand struct {
	Cmd string `json:"cmd"` // for a shell
}

// readTemplateCommand returns what to start for a request: a login shell of the default
// user in the default directory.
func (s *Server) readTemplateCommand(w http.ResponseWriter, r *http.Request) (start, error) {
	var c templateCommand
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBenchCommand)).Decode(&c); err != nil {
		return start{}, badRequest(fmt.Errorf("the body is not valid JSON of a command: %w", err))
	}
	a, err := s.account("")
	if err != nil {
		return start{}, err
	}
	return start{
		config:  &processpb.ProcessConfig{Cmd: shellPath, Args: []string{"-l", "-c", c.Cmd}},
		account: a, dir: s.startDir(a), env: s.environ(a, nil), exited: func() {},
	}, nil
}

// postStart starts the template's command in the background.
func (s *Server) postStart(w http.ResponseWriter, r *http.Request) error {
	st, err := s.readTemplateCommand(w, r)
	if err != nil {
		return err
	}
	c := &s.started
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running {
		return badRequest(errors.New("it runs already"))
	}
	p, sub, err := s.launch(st)
	if err != nil {
		return plainError(err)
	}
	c.running, c.end, c.lines = true, nil, lineBuffer{}
	go func() {
		defer p.unsubscribe(sub)
		for ev := range sub.events {
			c.mu.Lock()
			if end := ev.GetEnd(); end != nil {
				c.running, c.end = false, end
				if len(c.lines.rest) > 0 {
					c.lines.flush()
				}
				c.mu.Unlock()
				return
			}
			c.lines.write(ev.GetData().GetStdout())
			c.lines.write(ev.GetData().GetStderr())
			c.mu.Unlock()
		}
	}()
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// plainError is an error of launch for a plain HTTP route.
func plainError(err error) error {
	if e, ok := errors.AsType[*connect.Error](err); ok && e.Code() == connect.CodeInvalidArgument {
		return badRequest(errors.New(e.Message()))
	}
	return err
}

// getStart tells how the template's command is.
func (s *Server) getStart(w http.ResponseWriter, r *http.Request) error {
	from := 0
	if _, err := fmt.Sscanf(r.URL.Query().Get("from"), "%d", &from); err != nil {
		from = 0
	}
	c := &s.started
	c.mu.Lock()
	defer c.mu.Unlock()
	st := startState{Running: c.running}
	if c.end != nil {
		st.Code = int(c.end.GetExitCode())
	}
	st.Lines, st.Next = c.lines.since(from)
	return writeJSON(w, st)
}

// readyTimeout bounds one run of the ready command.
const readyTimeout = time.Minute

// postReady runs the ready command to its end.
func (s *Server) postReady(w http.ResponseWriter, r *http.Request) error {
	st, err := s.readTemplateCommand(w, r)
	if err != nil {
		return err
	}
	p, sub, err := s.launch(st)
	if err != nil {
		return plainError(err)
	}
	defer p.unsubscribe(sub)
	ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
	defer cancel()
	var lines lineBuffer
	for {
		select {
		case ev := <-sub.events:
			if end := ev.GetEnd(); end != nil {
				if len(lines.rest) > 0 {
					lines.flush()
				}
				out := readyState{Code: int(end.GetExitCode())}
				out.Lines, _ = lines.since(0)
				return writeJSON(w, out)
			}
			lines.write(ev.GetData().GetStdout())
			lines.write(ev.GetData().GetStderr())
		case <-ctx.Done():
			_ = p.signal(unix.SIGKILL)
			return writeJSON(w, readyState{Code: -1, Lines: []string{"the ready command did not end within " + readyTimeout.String()}})
		}
	}
}

// errNoShell means that a shell was asked for and the root file system has none.
var errNoShell = errors.New("the template has no shell; run a program by its path")

// otherShell returns the program for a command of bash where the image has no bash.
func otherShell(cmd string) (string, error) {
	if cmd != shellPath {
		return "", os.ErrNotExist
	}
	if _, err := os.Stat(shellPath); err == nil {
		return "", os.ErrNotExist // it is there, and something else is missing
	}
	if _, err := os.Stat("/bin/sh"); err != nil {
		return "", invalid("%w", errNoShell)
	}
	return "/bin/sh", nil
}
