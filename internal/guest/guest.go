// Package guest is the program's half inside a sandbox: it starts processes
// and reads and writes files for those whom the host lets through.
//
// It is root in a place where everything else is hostile: the processes it
// starts, the files it opens and whoever connects to its port. So
//
//   - a request is served only if it shows the channel's token, which only the
//     host has; the guest knows no more than its hash (channel.go);
//   - processes run as the user who is asked for, each in a session of its own,
//     all together under one limit (limits.go);
//   - every touch of a file is made by a thread that has the user's identity
//     and not root's, so the kernel decides and no path check can be raced
//     (rights.go);
//   - nothing that a process writes is kept: one that nobody reads fast enough
//     waits (process.go).
//
// It holds no secret and must never be given one. Code that has become root
// inside the sandbox can stop the guest: that hurts that sandbox alone.
//
// It must stay small: it is copied into every sandbox and imports nothing else
// of this module.
package guest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"connectrpc.com/connect"

	"postern/internal/guest/filesystempb"
	"postern/internal/guest/processpb"
)

// maxMessage bounds one RPC message, in bytes: what a client may send to a
// process's input in one piece. Files do not travel in messages.
const maxMessage = 8 << 20

// A Config is what the host tells the guest when the sandbox starts.
type Config struct {
	// ChannelSHA256 is the SHA-256 of the channel's token, in hex. Required.
	ChannelSHA256 string
	// DefaultUser runs what names no user. Empty means "user".
	DefaultUser string
	// Path is PATH for processes. Empty means Debian's default.
	Path string
	// MemoryMB is what the sandbox may use, in mebibytes. Zero means that
	// nobody watches it.
	MemoryMB int64
	// MaxProcesses bounds the processes and threads of users. Zero means no
	// bound.
	MaxProcesses int64
	// RunDir is where facts about the sandbox are left for processes to read.
	// Empty means that none are.
	RunDir string
	// EnvFile gets the sandbox's environment as a JSON object, for services
	// that started before it was known. Empty means none.
	EnvFile string
	// GenerationFile gets a fresh random line whenever the sandbox was restored
	// from a snapshot: what keeps random state must then seed it anew. Empty
	// means none.
	GenerationFile string
	// MachineIDFile is /etc/machine-id: made anew with the sandbox's identity.
	// Empty means none.
	MachineIDFile string
	// HostnameFile is /etc/hostname. Empty means none.
	HostnameFile string
	// State keeps what the host says over a restart of this program. Nil means
	// that it is forgotten.
	State *os.File
	// HostsFile is where the sandbox's host name is given an address; without
	// one each sudo asks DNS for it. Empty means none.
	HostsFile string
}

// A Server serves the guest's RPCs and files. It is safe for concurrent use.
type Server struct {
	log  *slog.Logger
	conf Config
	// processLog is about the processes of users, for who created the sandbox.
	processLog *slog.Logger
	conns      conns
	tunnels    chan struct{} // holds a token for each open tunnel
	users      userDB
	watch      watchers
	table      processTable

	mu       sync.Mutex
	settings settings  // guarded by mu; replaced, never changed
	state    stateFile // guarded by mu

	cpu cpuMeter
}

// New returns a guest. Its process must be root.
func New(log *slog.Logger, c Config) (*Server, error) {
	sum, err := channelSum(c.ChannelSHA256)
	if err != nil {
		return nil, fmt.Errorf("read configuration: the channel's SHA-256: %w", err)
	}
	if c.DefaultUser == "" {
		c.DefaultUser = "user"
	}
	if c.Path == "" {
		c.Path = defaultPath
	}
	s := &Server{log: log.With("logger", "guest"), processLog: log.With("logger", "process"), conf: c, tunnels: make(chan struct{}, maxTunnels)}
	s.settings = settings{Channel: sum, DefaultUser: c.DefaultUser}
	s.state.f = c.State
	if _, err := s.state.load(&s.settings); err != nil {
		// Root's processes have destroyed it. The first key is the only one known:
		// of a sandbox that was restored nobody has it, so nobody gets in.
		log.Error("what the host has said is lost", "error", err)
	}
	s.table.init()
	s.watch.init()
	return s, nil
}

// Handler returns all that the guest serves, behind the channel's check.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	opts := []connect.HandlerOption{connect.WithReadMaxBytes(maxMessage), connect.WithRecover(s.recovered)}
	mux.Handle(processpb.NewProcessHandler(&processes{s}, opts...))
	mux.Handle(filesystempb.NewFilesystemHandler(&filesystem{s}, opts...))
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET /metrics", s.serve(s.getMetrics))
	mux.HandleFunc("GET /envs", s.serve(s.getEnvs))
	mux.HandleFunc("POST /init", s.serve(s.postInit))
	mux.HandleFunc("POST /warm", s.serve(s.postWarm))
	mux.HandleFunc("GET /files", s.serve(s.getFile))
	mux.HandleFunc("POST /files", s.serve(s.postFiles))
	mux.HandleFunc("POST /files/compose", s.serve(s.postCompose))
	return s.checkChannel(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodConnect { // has no path that a mux could match
			s.serve(s.tunnel)(w, r)
			return
		}
		mux.ServeHTTP(w, r)
	}))
}

// Serve answers on l until ctx is done, and watches the sandbox's memory
// meanwhile. Running processes are left alone. It is called once.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{
		Handler: s.Handler(),
		// No timeout on bodies or answers: a command's stream and an upload
		// may take hours. Headers must come at once.
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       15 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		Protocols:         &protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: 1000},
		ConnContext:       withConn,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	stop := context.AfterFunc(ctx, func() {
		srv.Close()
		s.conns.closeBut(nil)
	})
	defer stop()
	watchCtx, cancel := context.WithCancel(ctx)
	prepareServer(s.log, s.conf.MaxProcesses)
	var wg sync.WaitGroup
	wg.Go(func() { s.newMemoryWatch().run(watchCtx) })
	defer wg.Wait()
	defer cancel()
	if err := srv.Serve(s.conns.listen(l)); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve: %w", err)
	}
	return nil
}

// recovered turns a bug in a handler into one failed call: the processes of
// the sandbox must not die with it.
func (s *Server) recovered(ctx context.Context, spec connect.Spec, _ http.Header, r any) error {
	s.log.ErrorContext(ctx, "handler panicked", "procedure", spec.Procedure, "panic", fmt.Sprint(r))
	return connect.NewError(connect.CodeInternal, errors.New("internal error"))
}
