package guest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"postern/internal/guest/filesystempb"
)

// The routes below /run are for the host only. They bind the sandbox to a contract, put
// inputs into it, run commands, and read the files that these have written.
//
// A bound guest starts processes only in its view, whoever asks. It reads and writes files
// only there, with the rights of the caller's user, and refuses all other requests about
// files, and those that reach ports. It stays bound until the sandbox ends: the
// contract is part of its settings, which are in every snapshot and which a restarted guest
// reads. A restarted guest has lost the view and starts nothing.

// bound holds the state of a guest that a contract binds.
type bound struct {
	mu        sync.RWMutex // held for reading while a process is started
	view      *view        // nil if the guest is not bound, or has lost its view
	processes int64        // the contract's limit; 0 means none
	memory    atomic.Int64 // the contract's limit in bytes; 0 means none
	starved   atomic.Int64 // processes that were ended for lack of memory
}

// A boundError is the refusal of a request by a bound guest. Its value is the contract.
type boundError string

func (e boundError) Error() string {
	return fmt.Sprintf("the sandbox is bound by contract %s; files leave as artifacts of the run", string(e))
}

// errNoView means that a bound guest has lost its view, or has not created it yet.
var errNoView = errors.New("the sandbox is bound by a contract, but has no view of files; kill it")

// viewLocked returns the view, or nil in a sandbox without a contract. The caller holds
// s.bound.mu.
func (s *Server) viewLocked() (*view, error) {
	if s.current().Contract == "" {
		return nil, nil
	}
	if s.bound.view == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errNoView)
	}
	return s.bound.view, nil
}

// confined returns the view, or an error if there is none.
func (s *Server) confined() (*view, error) {
	s.bound.mu.RLock()
	defer s.bound.mu.RUnlock()
	if s.bound.view == nil {
		return nil, &statusError{http.StatusConflict, errors.New("the sandbox is not confined")}
	}
	return s.bound.view, nil
}

// boundView returns the view, or nil if there is none.
func (s *Server) boundView() *view {
	s.bound.mu.RLock()
	defer s.bound.mu.RUnlock()
	return s.bound.view
}

// as calls f with a's rights and, in a bound guest, in its view: a caller sees and writes
// what the processes of the view may, and the kernel decides.
func (s *Server) as(a account, f func() error) error {
	s.bound.mu.RLock()
	v, err := s.viewLocked()
	s.bound.mu.RUnlock()
	switch {
	case err != nil:
		return &statusError{http.StatusConflict, err}
	case v != nil:
		return v.as(a, f)
	}
	return as(a, f)
}

// boundCalls are the calls about files that a bound guest serves. Watches are not among
// them: they would be of the files outside of the view.
func boundCalls() []string {
	return []string{
		filesystempb.FilesystemStatProcedure, filesystempb.FilesystemMakeDirProcedure, filesystempb.FilesystemMoveProcedure,
		filesystempb.FilesystemListDirProcedure, filesystempb.FilesystemRemoveProcedure,
	}
}

// inView serves the requests of h in a bound guest too, if they are for one of paths.
func (s *Server) inView(h http.Handler, paths ...string) http.Handler {
	other := s.unlessBound(h)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if slices.Contains(paths, r.URL.Path) {
			h.ServeHTTP(w, r)
			return
		}
		other.ServeHTTP(w, r)
	})
}

// unlessBound refuses the requests of h in a bound guest.
func (s *Server) unlessBound(h http.Handler) http.Handler {
	rpc := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch contract := s.current().Contract; {
		case contract == "":
			h.ServeHTTP(w, r)
		case rpc.IsSupported(r):
			_ = rpc.Write(w, r, connect.NewError(connect.CodePermissionDenied, boundError(contract)))
		default:
			w.Header().Set("Connection", "close") // the body is not read
			writeError(w, http.StatusForbidden, boundError(contract).Error())
		}
	})
}

// maxRunRequest is the largest body in bytes of a request below /run, except for files.
const maxRunRequest = 2 << 20

// readRunRequest decodes the JSON body of a request below /run.
func readRunRequest(w http.ResponseWriter, r *http.Request, v any) error {
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRunRequest))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return badRequest(fmt.Errorf("the body is not valid JSON for this route: %w", err))
	}
	return nil
}

// postConfine binds the guest, ends all other processes, and creates the view.
func (s *Server) postConfine(w http.ResponseWriter, r *http.Request) error {
	var req viewRequest
	if err := readRunRequest(w, r, &req); err != nil {
		return err
	}
	if err := req.check(); err != nil {
		return badRequest(err)
	}
	if s.conf.ViewDir == "" {
		return errors.New("this guest cannot make views")
	}
	s.bound.mu.Lock() // no process is started meanwhile
	defer s.bound.mu.Unlock()
	if err := s.bind(req.Contract); err != nil {
		return err
	}
	s.shells.stop()
	if s.conf.Alone {
		if err := s.aloneWithInit(r.Context()); err != nil {
			return err
		}
		if err := s.killAll(); err != nil {
			return err
		}
	}
	if req.Processes > 0 {
		// Children inherit the limit. The guest itself is exempt.
		limitProcesses(s.log, req.Processes)
		s.bound.processes = req.Processes
	}
	s.bound.memory.Store(req.MemoryMB << 20)
	v, err := newView(req, s.conf.ViewDir)
	if err != nil {
		return err
	}
	s.bound.view = v
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// bind stores the contract in the guest's settings, so that a restarted guest is bound too.
func (s *Server) bind(contract string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if was := s.settings.Contract; was != "" {
		return &statusError{http.StatusConflict, boundError(was)}
	}
	next := s.settings
	next.Contract = contract
	if err := s.state.save(next); err != nil {
		return err
	}
	s.settings = next
	return nil
}

// aloneWithInit makes the first process forget the services, so that it does not start them
// again after they are killed.
func (s *Server) aloneWithInit(ctx context.Context) error {
	if err := unix.Kill(1, aloneSignal); err != nil {
		return fmt.Errorf("end services: %w", err)
	}
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(200 * time.Microsecond) {
		if aloneMark(s.conf.State) {
			return nil
		}
		if ctx.Err() != nil || time.Now().After(end) {
			return errors.New("end services: the first process does not answer")
		}
	}
}

// killTimeout is how long killAll tries.
const killTimeout = 10 * time.Second

// killAll kills all processes except the first one and the guest. It returns nil when none
// is left.
//
// The attack: processes start others faster than they are killed. So all are stopped first,
// in rounds, until no new one appears. A stopped process starts no others, and still counts
// towards the limit on processes. One look at /proc is not one moment: a process can start
// another where the look has been, and end before the look comes to it. So none is left only
// if several looks in a row find none. What cannot be read counts as alive.
func (s *Server) killAll() error {
	const looks = 3
	end := time.Now().Add(killTimeout)
	for none := 0; ; {
		stopped := map[int]bool{}
		for found := true; found && time.Now().Before(end); {
			found = false
			others, _ := s.others() // the last look below decides
			for _, p := range others {
				if !stopped[p.pid] && unix.Kill(p.pid, unix.SIGSTOP) == nil {
					stopped[p.pid], found = true, true
				}
			}
		}
		left, err := s.others()
		for _, p := range left {
			_ = unix.Kill(p.pid, unix.SIGKILL)
		}
		if len(left) > 0 || err != nil {
			none = 0
		} else if none++; none == looks {
			return nil
		}
		if !time.Now().Before(end) {
			return errors.Join(fmt.Errorf("%d processes are left after %v", len(left), killTimeout), err)
		}
		time.Sleep(500 * time.Microsecond)
	}
}

// others returns the processes except the first one, the guest and zombies. In a bound
// sandbox all of them belong to the run. The error is that of [readProcs].
func (s *Server) others() ([]procStat, error) {
	if !s.conf.Alone {
		return nil, nil
	}
	self := os.Getpid()
	list, err := readProcs("/proc")
	return slices.DeleteFunc(list, func(p procStat) bool { return p.pid == 1 || p.pid == self || p.dead }), err
}

// getRunState returns the guest's [runState].
func (s *Server) getRunState(w http.ResponseWriter, _ *http.Request) error {
	s.bound.mu.RLock()
	defer s.bound.mu.RUnlock()
	return writeJSON(w, runState{s.current().Contract, s.bound.view != nil})
}

// A runState is the answer to GET /run/state.
type runState struct {
	Contract string `json:"contract"` // empty if the guest is not bound
	View     bool   `json:"view"`     // the view exists, so processes can be started
}

// putRunFile puts an input into the view.
func (s *Server) putRunFile(w http.ResponseWriter, r *http.Request) error {
	v, err := s.confined()
	if err != nil {
		return err
	}
	path := r.URL.Query().Get("path")
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" {
		return badRequest(fmt.Errorf("path: %.1024q is not an absolute, clean path of a file", path))
	}
	name := rand.Text()
	f, err := os.OpenFile(filepath.Join(v.inputsFrom(), name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o555)
	if err != nil {
		return err
	}
	if err := errors.Join(copyBytes(f, r.Body), f.Close()); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	if err := v.put(path, name); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// A runCommand is the body of POST /run/command.
type runCommand struct {
	Args []string          `json:"args"`
	Dir  string            `json:"dir"` // empty means the contract's
	Env  map[string]string `json:"env"`
}

// A runEnd is how a command of a run ended.
type runEnd struct {
	PID    int    `json:"pid"`    // 0 if it was not started
	Code   int    `json:"code"`   // 128 and the signal if a signal ended it
	Signal int    `json:"signal"` // 0 if none
	Reason string `json:"reason"` // error message if it was not started or failed
	Memory bool   `json:"memory"` // meanwhile the guest ended a process for lack of memory
}

// The exit codes of shells for commands that cannot be started.
const (
	codeRefused  = 126
	codeNotFound = 127
)

// postRunCommand runs a command in the view and sends its output. If the host disconnects,
// the command and its descendants are killed.
func (s *Server) postRunCommand(w http.ResponseWriter, r *http.Request) error {
	var c runCommand
	if err := readRunRequest(w, r, &c); err != nil {
		return err
	}
	v, err := s.confined()
	if err != nil {
		return err
	}
	st, err := s.startOf(v.account, c.Args, c.Env, c.Dir, v.dir)
	if err != nil {
		return err
	}
	before := s.bound.starved.Load()
	exited := make(chan struct{})
	st.exited, st.cancelled = func() { close(exited) }, r.Context().Done()
	p, sub, err := s.launch(st)
	w.Header().Set("Content-Type", "application/octet-stream")
	send := sendFrame(w)
	if err != nil {
		code := codeNotFound
		if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
			code = codeRefused
		}
		b, merr := json.Marshal(runEnd{Code: code, Reason: plainError(err).Error()})
		if merr != nil {
			return merr
		}
		_ = send(frameEnd, b) // an error means that the host has disconnected
		return nil
	}
	defer p.unsubscribe(sub)
	end := sendOutput(r, sub, exited, send, p.close)
	if end == nil {
		s.killTree(p.pid)
		return nil
	}
	e := runEnd{PID: p.pid, Code: int(end.GetExitCode()), Signal: p.endSignal(), Reason: end.GetError(), Memory: s.bound.starved.Load() > before}
	if e.Signal != 0 {
		e.Code = 128 + e.Signal
	}
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	_ = send(frameEnd, b)
	return nil
}

// postKill kills a process and its descendants, or all processes.
func (s *Server) postKill(w http.ResponseWriter, r *http.Request) error {
	if _, err := s.confined(); err != nil {
		return err
	}
	pid, err := strconv.Atoi(r.URL.Query().Get("pid"))
	if err != nil || pid < 0 || pid == 1 || pid == os.Getpid() {
		return badRequest(errors.New("pid: want the ID of a process of the run, or 0 for all"))
	}
	if pid == 0 {
		err = s.killAll()
	} else {
		s.killTree(pid)
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// killTree kills a process, its descendants and the other processes of its session. A
// descendant that has detached itself from all of them ends with the run.
func (s *Server) killTree(pid int) {
	_ = unix.Kill(pid, unix.SIGSTOP)
	tree := map[int]bool{pid: true}
	for found := true; found; {
		found = false
		others, _ := s.others() // what is not found ends with the run
		for _, p := range others {
			if tree[p.pid] || !tree[p.parent] && p.session != pid {
				continue
			}
			// Stop it first, so that it starts no further children.
			_ = unix.Kill(p.pid, unix.SIGSTOP)
			tree[p.pid], found = true, true
		}
	}
	for other := range tree {
		_ = unix.Kill(other, unix.SIGKILL)
	}
}

// postRunList lists files, see [view.list].
func (s *Server) postRunList(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Patterns []string `json:"patterns"`
		Most     int      `json:"most"`
	}
	if err := readRunRequest(w, r, &req); err != nil {
		return err
	}
	v, err := s.confined()
	if err != nil {
		return err
	}
	found, err := v.list(req.Patterns, req.Most)
	if err != nil {
		return err
	}
	return writeJSON(w, map[string][]runFile{"files": found})
}

// getRunFile sends a file that the run has written, see [view.open].
func (s *Server) getRunFile(w http.ResponseWriter, r *http.Request) error {
	v, err := s.confined()
	if err != nil {
		return err
	}
	most, err := strconv.ParseInt(r.URL.Query().Get("most"), 10, 64)
	if err != nil || most < 0 {
		return badRequest(errors.New("most: want a number of bytes"))
	}
	f, err := v.open(r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if fi.Size() > most {
		return &statusError{http.StatusRequestEntityTooLarge, fmt.Errorf("the file has %d bytes, at most %d are allowed", fi.Size(), most)}
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	_ = copyBytes(w, io.LimitReader(f, most+1)) // if the file has grown, the host sees one byte too many
	return nil
}
