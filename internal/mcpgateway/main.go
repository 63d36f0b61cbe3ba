package mcpgateway

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Name is the name by which the program is called.
const Name = "mcp-gateway"

// The files of the gateway. TokenFile is E2B's: its SDK reads it.
const (
	stateDir  = "/etc/mcp-gateway"
	TokenFile = stateDir + "/.token"
	pidFile   = stateDir + "/.pid"
	logFile   = "/var/log/mcp-gateway.log"
)

// waitTime is how long the start waits for servers. The SDK gives up after a minute.
// Slower servers continue to start in the background.
const waitTime = 45 * time.Second

const usage = "usage: mcp-gateway --config JSON | mcp-gateway pull NAME…"

// Run runs the program with its arguments and environment and returns its exit status.
func Run(args []string, getenv func(string) string, stdin io.Reader, stdout, stderr io.Writer) int {
	var err error
	switch {
	case len(args) == 2 && args[0] == "--config":
		err = start(args[1], getenv)
	case len(args) == 1 && strings.HasPrefix(args[0], "--config="):
		err = start(strings.TrimPrefix(args[0], "--config="), getenv)
	case len(args) > 1 && args[0] == "pull":
		err = pull(args[1:], getenv, stdout)
	case len(args) == 1 && args[0] == "serve":
		err = serve(stdin)
	default:
		err = errors.New(usage)
	}
	if err != nil {
		fmt.Fprintln(stderr, "mcp-gateway:", err)
		return 1
	}
	return 0
}

// order is what the first process passes to the process that serves.
type order struct {
	Config json.RawMessage `json:"config"`
	Told   Told            `json:"told"`
	Token  string          `json:"token"`
	Base   []string        `json:"base"`
}

// known are the variables of the sandbox that every server gets: those for the wall and for
// the operator's mirrors. Other variables may hold secrets of the sandbox's creator.
var known = []string{
	"NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "AWS_CA_BUNDLE", "PIP_CERT", "DENO_CERT", "CARGO_HTTP_CAINFO", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
	"npm_config_registry", "YARN_NPM_REGISTRY_SERVER", "PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "GOPROXY", "TZ",
}

func environment(getenv func(string) string) (out []string) {
	for _, k := range known {
		if v := getenv(k); v != "" {
			out = append(out, k+"="+v)
		}
	}
	return out
}

// told returns what Postern has told the gateway.
func told(getenv func(string) string) (t Told, err error) {
	if v := getenv(Variable); v != "" {
		if err = json.Unmarshal([]byte(v), &t); err != nil {
			return t, fmt.Errorf("read $%s: %w", Variable, err)
		}
	}
	return t, nil
}

// start starts the gateway in the background, and returns when its servers are ready.
func start(config string, getenv func(string) string) (err error) {
	if os.Getuid() != 0 {
		return errors.New("only root can start the gateway: each server runs as its own user")
	}
	o := order{Config: json.RawMessage(config), Token: getenv("GATEWAY_ACCESS_TOKEN"), Base: environment(getenv)}
	if o.Token == "" {
		o.Token = rand.Text()
	}
	if o.Told, err = told(getenv); err != nil {
		return err
	}
	if _, err := ParseConfig(o.Config, Builtin().Merge(o.Told.Catalog)); err != nil {
		return err
	}
	if err := os.MkdirAll(stateDir, 0o700); err != nil {
		return err
	}
	if err := os.Chmod(stateDir, 0o700); err != nil {
		return err
	}
	end()
	if err := os.WriteFile(TokenFile, []byte(o.Token), 0o600); err != nil {
		return err
	}
	log, err := os.OpenFile(logFile, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	answer, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer answer.Close()
	b, err := json.Marshal(o)
	if err != nil {
		return err
	}
	// Not in the arguments, which every user of the sandbox sees.
	cmd := &exec.Cmd{Path: self, Args: []string{Name, "serve"}, Dir: "/", Stdin: strings.NewReader(string(b)), Stdout: log, Stderr: log, ExtraFiles: []*os.File{theirs}}
	cmd.Env = []string{"PATH=" + standard.bin, "LANG=C.UTF-8"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		return err
	}
	if err := os.WriteFile(pidFile, []byte(strconv.Itoa(cmd.Process.Pid)), 0o600); err != nil {
		return err
	}
	said, err := io.ReadAll(io.LimitReader(answer, 64<<10))
	switch text := strings.TrimSpace(string(said)); {
	case err != nil:
		return err
	case text == "ready":
		return nil
	case text == "":
		return errors.New("the gateway has ended; see " + logFile)
	default:
		end()
		return errors.New(text)
	}
}

// end ends a gateway that an earlier call has started.
func end() {
	b, err := os.ReadFile(pidFile)
	if err != nil {
		return
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid <= 1 {
		return
	}
	// The process ID may have been reused.
	if args, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline")); err == nil && string(args) == Name+"\x00serve\x00" {
		_ = syscall.Kill(pid, syscall.SIGTERM)
		for i := 0; i < 100 && syscall.Kill(pid, 0) == nil; i++ {
			time.Sleep(20 * time.Millisecond)
		}
	}
	_ = os.Remove(pidFile)
}

// serve runs the servers and the gateway. It reports the result of the start to the first
// process over file 3.
func serve(stdin io.Reader) error {
	syscall.CloseOnExec(3) // the servers must not keep it open
	first := os.NewFile(3, "first process")
	tell := func(text string) {
		_, _ = io.WriteString(first, text)
		_ = first.Close()
	}
	var o order
	b, err := io.ReadAll(io.LimitReader(stdin, 4<<20))
	if err == nil {
		err = json.Unmarshal(b, &o)
	}
	if err != nil {
		tell(err.Error())
		return err
	}
	syscall.Umask(0o022)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("0.0.0.0", strconv.Itoa(Port)))
	if err != nil {
		tell(err.Error())
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	children, err := o.children(log, standard)
	if err != nil {
		tell(err.Error())
		return err
	}
	var all sync.WaitGroup
	for _, c := range children {
		all.Go(func() { c.run(ctx) })
	}
	srv := &http.Server{Handler: newGateway(children, o.Token), ReadHeaderTimeout: time.Minute, MaxHeaderBytes: 64 << 10, IdleTimeout: 5 * time.Minute, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	go func() {
		deadline := time.After(waitTime)
		for _, c := range children {
			select {
			case <-c.ready:
				if why := c.state(); why != "" {
					tell("the server " + c.server.Name + " did not start: " + why)
					return
				}
			case <-deadline:
				tell("ready")
				return
			}
		}
		tell("ready")
	}()
	go func() {
		<-ctx.Done()
		_ = srv.Close()
	}()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	all.Wait()
	return nil
}

// children returns the servers of an order, each with its own user.
func (o *order) children(log *slog.Logger, paths layout) ([]*child, error) {
	servers, err := ParseConfig(o.Config, Builtin().Merge(o.Told.Catalog))
	if err != nil {
		return nil, err
	}
	var out []*child
	for i, s := range servers {
		uid := uint32(0)
		if paths.owner != 0 {
			uid = firstUser + uint32(i)
		}
		out = append(out, &child{log: log, server: s, told: o.Told, base: o.Base, paths: paths, uid: uid, ready: make(chan struct{})})
	}
	return out, nil
}

// pull installs the packages of servers of the catalogue.
func pull(names []string, getenv func(string) string, stdout io.Writer) error {
	t, err := told(getenv)
	if err != nil {
		return err
	}
	c := Builtin().Merge(t.Catalog)
	log := slog.New(slog.DiscardHandler)
	for _, name := range slices.Compact(slices.Sorted(slices.Values(names))) {
		s, err := parseServer(name, json.RawMessage(`{}`), c)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		k := &child{log: log, server: s, base: environment(getenv), paths: standard}
		syscall.Umask(0o022)
		if err := k.install(context.Background(), log); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		fmt.Fprintf(stdout, "%s: %s is installed\n", name, or(s.Entry.NPM+"@"+s.Entry.Version, s.Entry.Command))
	}
	return nil
}
