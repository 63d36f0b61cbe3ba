package mcpgateway

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// The limits for a server's messages and for the time it takes.
const (
	maxMessage  = 16 << 20 // bytes
	maxTools    = 500
	maxWords    = 4 << 10 // bytes of standard error that are kept
	startTime   = time.Minute
	callTime    = 10 * time.Minute
	firstPause  = time.Second
	longestWait = time.Minute
	healthyTime = time.Minute // a server that ran longer is restarted after firstPause
)

// A message is one of JSON-RPC 2.0.
type message struct {
	Version string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  json.RawMessage `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *rpcError       `json:"error,omitempty"`
}

type rpcError struct {
	Code    int             `json:"code"`
	Message string          `json:"message"`
	Data    json.RawMessage `json:"data,omitempty"`
}

// Error implements error.
func (e *rpcError) Error() string { return e.Message }

// The codes of JSON-RPC.
const (
	codeParse    = -32700
	codeInvalid  = -32600
	codeMethod   = -32601
	codeParams   = -32602
	codeInternal = -32603
)

// A child keeps one server running. It is safe for concurrent use.
type child struct {
	log    *slog.Logger
	server Server
	told   Told
	base   []string // environment that every server has
	paths  layout
	uid    uint32 // 0 in tests: the current user

	ready chan struct{} // closed when it serves, or has failed, for the first time
	once  sync.Once

	mu    sync.Mutex // guards what follows
	conn  *conn      // nil while it does not run
	tools []tool
	why   string // why it does not run
}

// A tool is a tool of a server, in the server's own words.
type tool struct {
	name string
	all  map[string]json.RawMessage
}

// run keeps the server running until ctx is done.
func (c *child) run(ctx context.Context) {
	defer c.once.Do(func() { close(c.ready) })
	if err := c.install(ctx, c.log); err != nil {
		c.failed(fmt.Errorf("install: %w", err))
		return // another attempt would fail, too
	}
	pause := firstPause
	for ctx.Err() == nil {
		begun := time.Now()
		err := c.serve(ctx)
		c.failed(err)
		if time.Since(begun) > healthyTime {
			pause = firstPause
		}
		c.log.WarnContext(ctx, "server ended", "server", c.server.Name, "error", err, "again_in", pause)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, longestWait)
	}
}

func (c *child) failed(err error) {
	c.mu.Lock()
	c.conn, c.tools, c.why = nil, nil, "ended"
	if err != nil {
		c.why = err.Error()
	}
	c.mu.Unlock()
	c.once.Do(func() { close(c.ready) })
}

// state returns why the server does not serve, or an empty string.
func (c *child) state() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil && c.why == "" {
		return "starting"
	}
	if c.conn == nil {
		return c.why
	}
	return ""
}

// listed returns the tools of the server, if it runs.
func (c *child) listed() []tool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tools
}

// call forwards a call and returns the server's answer.
func (c *child) call(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	c.mu.Lock()
	conn, why := c.conn, c.why
	c.mu.Unlock()
	if conn == nil {
		return nil, &rpcError{Code: codeInternal, Message: "the server " + c.server.Slug + " does not run: " + or(why, "it is starting")}
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	return conn.call(ctx, method, params)
}

// serve starts the server once and returns when it has ended.
func (c *child) serve(ctx context.Context) error {
	home, err := c.home()
	if err != nil {
		return err
	}
	how, err := c.server.command(home, &c.told)
	if err != nil {
		return err
	}
	env := map[string]string{"HOME": home, "PATH": c.paths.path(&c.server), "LANG": "C.UTF-8"}
	maps.Copy(env, how.env)
	list := slices.Clone(c.base)
	for _, k := range slices.Sorted(maps.Keys(env)) {
		list = append(list, k+"="+env[k])
	}
	path := how.path
	if !strings.Contains(path, "/") {
		if path, err = look(path, env["PATH"]); err != nil {
			return err
		}
	}
	cmd := exec.Command(path, how.args...) //nolint:noctx // its whole group is ended below
	cmd.Args[0], cmd.Env, cmd.Dir = how.path, list, c.paths.work(&c.server, home)
	cmd.SysProcAttr = attributes(c.uid)
	words := &lastWords{}
	cmd.Stderr = words
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	conn := newConn(in)
	go conn.read(out)
	stop := context.AfterFunc(ctx, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	defer stop()
	tools, err := conn.begin(ctx)
	if err == nil {
		c.mu.Lock()
		c.conn, c.tools, c.why = conn, tools, ""
		c.mu.Unlock()
		c.once.Do(func() { close(c.ready) })
		c.log.InfoContext(ctx, "server runs", "server", c.server.Name, "tools", len(tools))
		for err == nil {
			select {
			case <-conn.changed:
				if tools, err := conn.list(ctx); err == nil {
					c.mu.Lock()
					c.tools = tools
					c.mu.Unlock()
				}
				continue
			case <-conn.stuck:
				err = errors.New("it does not read its standard input")
			case <-conn.done:
				err = conn.err
			}
		}
	}
	_ = in.Close()
	// Its child processes must not keep running, nor keep its standard error open.
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	_ = cmd.Wait()
	if said := words.String(); said != "" {
		err = fmt.Errorf("%w: %s", err, said)
	}
	return err
}

// home creates and returns the server's own home directory.
func (c *child) home() (string, error) {
	dir := c.paths.home(&c.server)
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	if c.uid != 0 {
		return dir, os.Lchown(dir, int(c.uid), int(c.uid))
	}
	return dir, nil
}

// attributes returns the attributes of a process of the user uid in its own process group.
func attributes(uid uint32) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setpgid: true}
	if uid != 0 {
		a.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	}
	return a
}

// look finds a program in the directories of path.
func look(name, path string) (string, error) {
	for dir := range strings.SplitSeq(path, ":") {
		p := filepath.Join(dir, name)
		if fi, err := os.Stat(p); err == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("there is no program %s in %s", name, path)
}

// lastWords keeps the end of a server's standard error.
type lastWords struct {
	mu sync.Mutex
	b  []byte
}

// Write implements [io.Writer].
func (w *lastWords) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.b = append(w.b, p...)
	if over := len(w.b) - maxWords; over > 0 {
		w.b = append(w.b[:0], w.b[over:]...)
	}
	return len(p), nil
}

// String returns the end of standard error on one line.
func (w *lastWords) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.TrimSpace(strings.ToValidUTF8(string(w.b), "\uFFFD"))
}

// A conn is a connection to a server over its standard input and output.
type conn struct {
	changed chan struct{} // gets a value when the server reports that its tools changed
	done    chan struct{} // closed when the connection ends
	err     error         // why it ended, once done is closed
	stuck   chan struct{} // gets a value when the server does not read

	writing sync.Mutex // held while a message is written
	out     io.WriteCloser

	mu    sync.Mutex // guards what follows
	last  int64
	waits map[string]chan message
}

func newConn(out io.WriteCloser) *conn {
	return &conn{changed: make(chan struct{}, 1), done: make(chan struct{}), stuck: make(chan struct{}, 1), out: out, waits: map[string]chan message{}}
}

// read reads messages until the server ends.
func (c *conn) read(in io.Reader) {
	r := bufio.NewReaderSize(in, 64<<10)
	var err error
	for err == nil {
		var line []byte
		if line, err = readLine(r); err == nil && len(bytes.TrimSpace(line)) > 0 {
			c.take(line)
		}
	}
	if errors.Is(err, io.EOF) {
		err = errors.New("it has ended")
	}
	c.err = err
	close(c.done)
}

// readLine returns a line of at most maxMessage bytes.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > maxMessage {
			return nil, fmt.Errorf("a message has more than %d bytes", maxMessage)
		}
		line = append(line, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

// take handles one message of the server. It ignores lines that are not JSON-RPC: some
// servers print greetings.
func (c *conn) take(line []byte) {
	var m message
	if json.Unmarshal(line, &m) != nil || m.Version != "2.0" {
		return
	}
	switch {
	case m.Method == "notifications/tools/list_changed":
		select {
		case c.changed <- struct{}{}:
		default:
		}
	case m.Method != "" && m.ID == nil:
	case m.Method == "ping":
		go func() { _ = c.send(message{ID: m.ID, Result: json.RawMessage(`{}`)}) }()
	case m.Method != "":
		go func() {
			_ = c.send(message{ID: m.ID, Error: &rpcError{Code: codeMethod, Message: "the gateway does not have " + m.Method}})
		}()
	default:
		c.mu.Lock()
		w := c.waits[string(m.ID)]
		delete(c.waits, string(m.ID))
		c.mu.Unlock()
		if w != nil {
			w <- m
		}
	}
}

func (c *conn) send(m message) error {
	m.Version = "2.0"
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	_, err = c.out.Write(append(b, '\n'))
	return err
}

// call sends a request and waits for the response.
func (c *conn) call(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	w := make(chan message, 1)
	c.mu.Lock()
	c.last++
	id := strconv.FormatInt(c.last, 10)
	c.waits[id] = w
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.waits, id)
		c.mu.Unlock()
	}()
	sent := make(chan error, 1)
	go func() { sent <- c.send(message{ID: json.RawMessage(id), Method: method, Params: params}) }()
	for {
		select {
		case err := <-sent:
			if err != nil {
				return nil, err
			}
			sent = nil
		case m := <-w:
			if m.Error != nil {
				return nil, m.Error
			}
			return m.Result, nil
		case <-c.done:
			return nil, c.err
		case <-ctx.Done():
			if sent != nil { // the server does not read: serve stops and restarts it
				select {
				case c.stuck <- struct{}{}:
				default:
				}
				return nil, errors.New("it does not read its standard input")
			}
			go func() {
				_ = c.send(message{Method: "notifications/cancelled", Params: json.RawMessage(`{"requestId":` + id + `}`)})
			}()
			return nil, fmt.Errorf("it did not answer: %w", ctx.Err())
		}
	}
}

// begin initializes the server and returns its tools.
func (c *conn) begin(ctx context.Context) ([]tool, error) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	_, err := c.call(ctx, "initialize", json.RawMessage(`{"protocolVersion":"`+versions[0]+`","capabilities":{},"clientInfo":{"name":"mcp-gateway","version":"1"}}`))
	if err != nil {
		return nil, err
	}
	if err := c.send(message{Method: "notifications/initialized"}); err != nil {
		return nil, err
	}
	return c.list(ctx)
}

// list returns all tools of the server that have a valid name.
func (c *conn) list(ctx context.Context) (out []tool, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	cursor := ""
	for range 50 {
		params := json.RawMessage(`{}`)
		if cursor != "" {
			if params, err = json.Marshal(map[string]string{"cursor": cursor}); err != nil {
				return nil, err
			}
		}
		b, err := c.call(ctx, "tools/list", params)
		var said *rpcError
		if errors.As(err, &said) && said.Code == codeMethod {
			return nil, nil // it has none
		}
		if err != nil {
			return nil, err
		}
		var page struct {
			Tools []map[string]json.RawMessage `json:"tools"`
			Next  string                       `json:"nextCursor"`
		}
		if err := json.Unmarshal(b, &page); err != nil {
			return nil, errors.New("its list of tools is malformed")
		}
		for _, t := range page.Tools {
			var name string
			if json.Unmarshal(t["name"], &name) == nil && toolName().MatchString(name) && len(out) < maxTools {
				out = append(out, tool{name, t})
			}
		}
		if cursor = page.Next; cursor == "" {
			return out, nil
		}
	}
	return out, nil
}

func or(s, empty string) string {
	if s == "" {
		return empty
	}
	return s
}
