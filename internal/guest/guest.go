// Package guest is the server inside a sandbox. It starts processes, and reads and
// writes files, for requests that the host lets through.
//
// It runs as root in a place where everything else is hostile: the processes that
// it starts, the files that it opens and the clients of its port. So
//
//   - a request is served only with the channel token, which only the host has;
//     the guest knows its hash (channel.go);
//   - processes run as the requested user, each in a session of its own, all together
//     under one limit (limits.go);
//   - each file operation is made by a thread with the user's identity instead of
//     root's, so the kernel decides, and there is no race between check and use
//     (rights.go);
//   - the output of a process is not stored: a process whose reader is slow waits
//     (process.go).
//
// It holds no secret and must never be given one. Code that has become root in the
// sandbox can stop the guest, which hurts that sandbox only.
//
// It must stay small: it is copied into every sandbox and imports nothing else of
// this module.
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

// maxMessage bounds one RPC message, in bytes. So it bounds what a client may send
// to a process's input at once. Files are not sent in messages.
const maxMessage = 8 << 20

// A Config holds the settings of a [Server].
type Config struct {
	// ChannelSHA256 is the SHA-256 of the channel token, in hex. Required.
	ChannelSHA256 string
	// DefaultUser runs processes of requests without a user. Empty means "user".
	DefaultUser string
	// Path is PATH for processes. Empty means Debian's default.
	Path string
	// MemoryMB is the memory of the sandbox in mebibytes. Zero means that it is not
	// watched.
	MemoryMB int64
	// MaxProcesses bounds the processes and threads of users. Zero means no bound.
	MaxProcesses int64
	// RunDir is a directory for files that tell processes about the sandbox. Empty
	// means none.
	RunDir string
	// EnvFile receives the sandbox's environment as a JSON object, for services
	// that were started before it was known. Empty means none.
	EnvFile string
	// GenerationFile receives a new random line whenever the sandbox was restored
	// from a snapshot. Services with random state of their own must reseed it then.
	// Empty means none.
	GenerationFile string
	// MachineIDFile is /etc/machine-id, which is renewed with the sandbox's
	// identity. Empty means none.
	MachineIDFile string
	// HostnameFile is /etc/hostname. Empty means none.
	HostnameFile string
	// State stores the host's settings across restarts of this program. Nil means
	// that they are lost.
	State *os.File
	// LauncherFile receives the program that starts the shells of the next commands,
	// see [Server.launch]. Empty means that no shell is started in advance.
	LauncherFile string
	// HostsFile is where the sandbox's host name gets an address. Without it each
	// sudo asks DNS for the name. Empty means none.
	HostsFile string
	// TrustRoot is the directory whose etc, usr and opt hold the trust stores that
	// get the sandbox's certificate authority: "/" in a sandbox. Empty means that
	// none is installed.
	TrustRoot string
	// Bench says that the sandbox is for the steps of a build.
	Bench BenchMode
	// ViewDir is the directory on the disk for the files behind the view of a bound
	// sandbox. Empty means that the guest cannot be bound.
	ViewDir string
	// Alone reports that the guest may kill all processes except the first one and itself,
	// when the sandbox is bound and when the host asks. It is false in tests.
	Alone bool
}

// A Server serves the guest's RPCs and files. It is safe for concurrent use.
type Server struct {
	log  *slog.Logger
	conf Config
	// processLog logs processes of users, for the sandbox's creator.
	processLog *slog.Logger
	trust      trustStore
	conns      conns
	tunnels    chan struct{} // semaphore of open tunnels
	users      userDB
	watch      watchers
	table      processTable
	shells     shellPool
	tidied     tidiness
	steps      sync.Mutex // held from the start of a build's command until its leftovers are killed
	started    startedCommand
	bound      bound

	mu       sync.Mutex
	settings settings        // guarded by mu; replaced, never modified
	state    stateFile       // guarded by mu
	kept     keptFiles       // guarded by mu
	facts    map[string]bool // paths of the files of writeFacts; guarded by mu; nil if not known

	cpu cpuMeter
}

// New returns a guest server. The process must be root.
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
	s.trust = trustStore{s.log, c.TrustRoot, map[string]*keptFile{}}
	s.settings = settings{Channel: sum, DefaultUser: c.DefaultUser}
	s.state.f = c.State
	if _, err := s.state.load(&s.settings); err != nil {
		// A process of root has destroyed it. Only the first key is left. If the
		// sandbox was restored nobody has that key, so nobody gets in.
		log.Error("the host's settings are lost", "error", err)
	}
	s.table.init()
	s.shells.log, s.shells.launcher = s.log, c.LauncherFile
	s.watch.init()
	return s, nil
}

// Handler returns all routes of the guest, behind the channel check.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	opts := []connect.HandlerOption{connect.WithReadMaxBytes(maxMessage), connect.WithRecover(s.recovered)}
	mux.Handle(processpb.NewProcessHandler(&processes{s}, opts...))
	path, files := filesystempb.NewFilesystemHandler(&filesystem{s}, opts...)
	mux.Handle(path, s.inView(files, boundCalls()...))
	free := func(f func(http.ResponseWriter, *http.Request) error) http.Handler { return s.unlessBound(s.serve(f)) }
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET /metrics", s.serve(s.getMetrics))
	mux.HandleFunc("GET /envs", s.serve(s.getEnvs))
	mux.HandleFunc("POST /init", s.serve(s.postInit))
	mux.Handle("POST /warm", free(s.postWarm))
	mux.Handle("POST /template/start", free(s.postStart))
	mux.Handle("GET /template/start", free(s.getStart))
	mux.Handle("POST /template/ready", free(s.postReady))
	if s.conf.Bench != NoBench {
		mux.HandleFunc("POST /bench/run", s.serve(s.postRun))
		mux.HandleFunc("POST /bench/unpack", s.serve(s.postUnpack))
		mux.HandleFunc("POST /bench/dir", s.serve(s.postMakeDir))
		mux.HandleFunc("POST /bench/user", s.serve(s.postAddUser))
		mux.HandleFunc("POST /bench/tidy", s.serve(s.postTidy))
	}
	mux.Handle("GET /files", s.inView(s.serve(s.getFile), "/files"))
	mux.Handle("POST /files", s.inView(s.serve(s.postFiles), "/files"))
	mux.Handle("POST /files/compose", free(s.postCompose))
	mux.HandleFunc("POST /run/confine", s.serve(s.postConfine))
	mux.HandleFunc("GET /run/state", s.serve(s.getRunState))
	mux.HandleFunc("POST /run/command", s.serve(s.postRunCommand))
	mux.HandleFunc("POST /run/kill", s.serve(s.postKill))
	mux.HandleFunc("POST /run/list", s.serve(s.postRunList))
	mux.HandleFunc("GET /run/file", s.serve(s.getRunFile))
	mux.HandleFunc("PUT /run/file", s.serve(s.putRunFile))
	return s.checkChannel(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodConnect { // CONNECT has no path for the mux
			free(s.tunnel).ServeHTTP(w, r)
			return
		}
		mux.ServeHTTP(w, r)
	}))
}

// Serve serves requests on l and watches the sandbox's memory until ctx is done. It
// leaves running processes alone. Call it once.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{
		Handler: s.Handler(),
		// No time-out for bodies and responses, since a command's stream or an
		// upload may take hours. A client may connect before it has a request.
		ReadHeaderTimeout: time.Minute,
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
	defer s.shells.clear()
	if err := srv.Serve(s.conns.listen(l)); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve: %w", err)
	}
	return nil
}

// recovered turns a panic in a handler into an error of that call, so that the
// processes of the sandbox do not die with the guest.
func (s *Server) recovered(ctx context.Context, spec connect.Spec, _ http.Header, r any) error {
	s.log.ErrorContext(ctx, "handler panicked", "procedure", spec.Procedure, "panic", fmt.Sprint(r))
	return connect.NewError(connect.CodeInternal, errors.New("internal error"))
}
