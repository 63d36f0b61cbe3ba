package guest

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/guest/processpb"
)

// The routes below /bench are for the host alone, which runs the steps of a build with
// them. The images of builds may hold nothing but one program, so each step is done by
// this program itself and needs no tool of the image.

// A benchCommand is the body of POST /bench/run.
type benchCommand struct {
	Args []string          `json:"args"`
	User string            `json:"user"` // empty means root
	Dir  string            `json:"dir"`  // empty means the user's home
	Env  map[string]string `json:"env"`
}

// The answer to POST /bench/run is a sequence of frames: a letter, the length in four
// bytes, and the content.
const (
	frameStdout = 'o' // output, of at most 64 KiB
	frameStderr = 'e'
	frameAlive  = '.' // nothing; another one comes each ten seconds
	frameEnd    = 'x' // the last frame: a benchEnd in JSON
)

// A benchEnd is how a command ended.
type benchEnd struct {
	Code   int    `json:"code"`   // -1 if a signal ended it
	Status string `json:"status"` // in words
}

// maxBenchCommand bounds the body of POST /bench/run, in bytes.
const maxBenchCommand = 2 << 20

// leftoverGrace is how long processes that a command left may still write its output.
const leftoverGrace = 500 * time.Millisecond

// postRun runs a command, sends its output, and kills what it leaves running: the next
// step, and every sandbox from the template, must not depend on it.
func (s *Server) postRun(w http.ResponseWriter, r *http.Request) error {
	var c benchCommand
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBenchCommand)).Decode(&c); err != nil {
		return badRequest(fmt.Errorf("the body is not valid JSON of a command: %w", err))
	}
	a, err := s.account(or(c.User, "root"))
	if err != nil {
		return err
	}
	st, err := s.startOf(a, c.Args, c.Env, c.Dir, s.startDir(a))
	if err != nil {
		return err
	}
	s.steps.Lock()
	defer s.steps.Unlock()
	if err := s.untidy(r.Context()); err != nil {
		return err
	}
	exited := make(chan struct{})
	st.exited = func() { close(exited) }
	p, sub, err := s.launch(st)
	if err != nil {
		return plainError(err)
	}
	defer p.unsubscribe(sub)
	w.Header().Set("Content-Type", "application/octet-stream")
	send := sendFrame(w)
	end := sendOutput(r, sub, exited, send, s.killLeftovers)
	if end == nil {
		_ = p.signal(unix.SIGKILL)
	}
	s.killLeftovers() // before the end frame: after it, the host starts the next process
	if end == nil {
		return nil
	}
	if end.GetExitCode() < 0 { // there is no exit code
		if send(frameStderr, []byte("the command was ended: "+or(end.GetError(), end.GetStatus())+"\n")) != nil {
			return nil // the host has disconnected
		}
	}
	b, err := json.Marshal(benchEnd{int(end.GetExitCode()), end.GetStatus()})
	if err != nil {
		return err
	}
	_ = send(frameEnd, b) // an error means that the host has disconnected
	return nil
}

// startOf returns the start of a command that the host asks for, as an account. Dir is
// where it starts; empty means home. The error is that of a bad request.
func (s *Server) startOf(a account, args []string, env map[string]string, dir, home string) (start, error) {
	if len(args) == 0 || args[0] == "" {
		return start{}, badRequest(errors.New("args is empty"))
	}
	for k, v := range env {
		if err := checkEnv(k, v); err != nil {
			return start{}, badRequest(fmt.Errorf("env: %w", err))
		}
	}
	if dir != "" {
		var err error
		if home, err = s.resolve(a, dir); err != nil {
			return start{}, badRequest(fmt.Errorf("dir: %w", err))
		}
	}
	return start{config: &processpb.ProcessConfig{Cmd: args[0], Args: args[1:]}, account: a, dir: home, env: s.environ(a, env)}, nil
}

// sendFrame returns a function that sends a frame and flushes it.
func sendFrame(w http.ResponseWriter) func(kind byte, b []byte) error {
	out := http.NewResponseController(w)
	return func(kind byte, b []byte) error {
		head := binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(b)))
		if _, err := w.Write(append(head, b...)); err != nil {
			return err
		}
		return out.Flush()
	}
}

// sendOutput sends what a process writes until its output ends, and returns how the process
// ended. Nil means that the host has disconnected. If another process still has the output
// open leftoverGrace after the process exited, it calls close, which must end the output.
func sendOutput(r *http.Request, sub *subscriber, exited chan struct{}, send func(kind byte, b []byte) error, close func()) *processpb.ProcessEvent_EndEvent {
	alive := time.NewTicker(10 * time.Second)
	defer alive.Stop()
	var grace <-chan time.Time
	for {
		var err error
		select {
		case <-exited:
			exited, grace = nil, time.After(leftoverGrace)
		case <-grace:
			close()
		case ev := <-sub.events:
			if end := ev.GetEnd(); end != nil {
				return end
			}
			if b := ev.GetData().GetStdout(); len(b) > 0 {
				err = send(frameStdout, b)
			} else if b := ev.GetData().GetStderr(); len(b) > 0 {
				err = send(frameStderr, b)
			}
		case <-alive.C:
			err = send(frameAlive, nil)
		case <-r.Context().Done():
			err = r.Context().Err()
		}
		if err != nil {
			return nil
		}
	}
}

// killLeftovers kills all processes but the first one and this one.
func (s *Server) killLeftovers() {
	// A process may start others while this reads the list. Each round kills all that
	// it finds, and a fork bomb cannot outrun it for long: it has the limit of
	// processes, and root's bombs end with the bench.
	for range 50 {
		found := false
		es, err := os.ReadDir("/proc")
		if err != nil {
			return
		}
		for _, e := range es {
			pid, err := strconv.Atoi(e.Name())
			if err != nil || pid == 1 || pid == os.Getpid() || s.leftAlone(pid) {
				continue
			}
			if unix.Kill(pid, unix.SIGKILL) == nil {
				found = true
			}
		}
		if !found {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// leftAlone reports whether a process is none of the bench's: in tests, where this
// program shares the machine with others, and for zombies, which wait for their parent.
func (s *Server) leftAlone(pid int) bool {
	if s.conf.Bench != BenchHere {
		return true
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return true
	}
	st, ok := parseStat(string(b))
	return !ok || st.dead
}

// A BenchMode says whether the sandbox is for a build.
type BenchMode int

// The modes.
const (
	NoBench   BenchMode = iota // the routes below /bench do not exist
	BenchHere                  // all processes are the build's
	BenchTest                  // processes are left alone
)

// tidiness is whether the files that the guest wrote for this one sandbox are without
// what belongs to it.
type tidiness struct {
	mu   sync.Mutex
	tidy bool
}

// postTidy takes out of the bench's files what belongs to this bench alone, so that
// they can become part of a template.
func (s *Server) postTidy(w http.ResponseWriter, r *http.Request) error {
	s.steps.Lock()
	defer s.steps.Unlock()
	s.tidied.mu.Lock()
	defer s.tidied.mu.Unlock()
	s.killLeftovers()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.trust.remove(r.Context(), s.settings.Envs["JAVA_HOME"]); err != nil {
		return err
	}
	s.tidied.tidy = true
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// untidy puts back what postTidy has taken out.
func (s *Server) untidy(ctx context.Context) error {
	s.tidied.mu.Lock()
	defer s.tidied.mu.Unlock()
	if !s.tidied.tidy {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.settings.Authority != "" {
		if err := s.trust.install(ctx, s.settings.Authority, s.settings.Envs["JAVA_HOME"]); err != nil {
			return err
		}
	}
	s.tidied.tidy = false
	return nil
}

// postUnpack unpacks an archive, see [unpacking].
func (s *Server) postUnpack(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	a, err := s.account(or(q.Get("user"), "root"))
	if err != nil {
		return err
	}
	u := unpacking{source: q.Get("source"), dest: q.Get("dest"), uid: int(a.uid), gid: int(a.gid)}
	if m := q.Get("mode"); m != "" {
		mode, err := strconv.ParseUint(m, 8, 12)
		if err != nil {
			return badRequest(fmt.Errorf("mode: %q is not an octal number of at most 7777", m))
		}
		bits := uint32(mode)
		u.mode = &bits
	}
	if u.dest, err = s.benchPath(a, u.dest, q.Get("dir")); err != nil {
		return badRequest(fmt.Errorf("dest: %w", err))
	}
	if err := u.run(r.Body); err != nil {
		return err
	}
	// Read to the end, so that the host does not take the answer for a broken upload.
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// benchPath makes a path of a step absolute, and keeps a trailing slash.
func (s *Server) benchPath(a account, path, dir string) (string, error) {
	if path == "" {
		return "", errors.New("the path is empty")
	}
	slash := path[len(path)-1] == '/' || path == "." || len(path) > 1 && path[len(path)-2:] == "/."
	if path[0] != '/' && path[0] != '~' && dir != "" {
		path = dir + "/" + path
	}
	abs, err := s.resolve(a, path)
	if err == nil && slash && abs != "/" {
		abs += "/"
	}
	return abs, err
}

// postMakeDir makes a directory and those above it.
func (s *Server) postMakeDir(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	a, err := s.account(or(q.Get("user"), "root"))
	if err != nil {
		return err
	}
	path, err := s.resolve(a, q.Get("path"))
	if err != nil {
		return badRequest(err)
	}
	if err := makeDirs(path, int(a.uid), int(a.gid)); err != nil {
		return badRequest(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// postAddUser makes a user, see [addUser].
func (s *Server) postAddUser(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	if err := addUser("/", q.Get("name"), q.Get("sudo") == "true"); err != nil {
		return badRequest(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func or[T comparable](v, other T) T {
	var zero T
	if v == zero {
		return other
	}
	return v
}
