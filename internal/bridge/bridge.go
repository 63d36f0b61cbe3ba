// Package bridge connects a desktop program (the host) that speaks the Model Context
// Protocol over standard input and output to the tools of a remote Postern server.
// It uses a person's key and, if the person chooses one, attaches files of a folder.
//
// It must not read a file outside of that folder at an agent's request, whatever the
// path or the symbolic links in it, must send the key to no other server, and writes
// nothing but the protocol to its output. It retries a call only if that cannot
// repeat the effect.
package bridge

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// Config is the configuration of a [Bridge].
type Config struct {
	Endpoint     string   // URL of the server's tools, "https://api.example.com/mcp"
	Key          string   // an inbox key or a grant
	Tools        []string // tools and sets of tools to offer; empty means the server's default
	Root         *os.Root // folder from which files may be attached; nil means none
	Instructions string   // for the host's model

	HTTP    *http.Client  // nil means a new client; redirects are never followed
	Retries int           // after a lost connection; 0 means 5
	Wait    time.Duration // before the first retry, doubling; 0 means 500 ms
}

// A Bridge serves one host. It is safe for concurrent use.
type Bridge struct {
	log  *slog.Logger
	conf Config
	way  *bearer // of conf.HTTP

	mu      sync.Mutex // guards what follows
	server  *mcp.ClientSession
	safe    map[string]bool // tools that are read-only or idempotent, by the server's annotations
	keyed   map[string]bool // tools with an idempotencyKey
	started map[string]call // calls with progress notifications, by the token sent to the server
}

// A call is a call for which the host requested progress notifications.
type call struct {
	host  *mcp.ServerSession
	token any
}

// New returns a bridge. It connects to the server at the host's first request.
func New(log *slog.Logger, c Config) (*Bridge, error) {
	if c.Endpoint == "" || c.Key == "" {
		return nil, errors.New("configure bridge: Endpoint and Key are required")
	}
	if c.HTTP == nil {
		c.HTTP = &http.Client{}
	}
	client := *c.HTTP
	// The attack: a redirect that sends the key to another server.
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	way := &bearer{key: c.Key, tools: strings.Join(c.Tools, ","), next: client.Transport}
	client.Transport = way
	c.HTTP = &client
	if c.Retries == 0 {
		c.Retries = 5
	}
	if c.Wait == 0 {
		c.Wait = 500 * time.Millisecond
	}
	return &Bridge{log: log, conf: c, way: way, safe: map[string]bool{}, keyed: map[string]bool{}, started: map[string]call{}}, nil
}

// maxLine bounds one message of the host, in bytes: attachments of 25 MB in base64,
// and text.
const maxLine = 40 << 20

// Run serves the host over in and out until in ends or ctx is done.
func (b *Bridge) Run(ctx context.Context, in io.ReadCloser, out io.WriteCloser) error {
	srv := mcp.NewServer(&mcp.Implementation{Name: "postern", Title: "Postern: email with oversight", Version: "1"}, &mcp.ServerOptions{
		Instructions: b.conf.Instructions, Logger: b.log,
		Capabilities: &mcp.ServerCapabilities{Tools: &mcp.ToolCapabilities{}},
	})
	srv.AddReceivingMiddleware(b.forward)
	err := srv.Run(ctx, &mcp.IOTransport{Reader: in, Writer: out, MaxLineLength: maxLine})
	b.mu.Lock()
	server := b.server
	b.server = nil
	b.mu.Unlock()
	if server != nil {
		_ = server.Close()
	}
	if ctx.Err() == nil && !errors.Is(err, io.EOF) { // otherwise a normal end
		return err
	}
	return nil
}

// forward forwards requests about tools to the server. The bridge itself answers all
// others.
func (b *Bridge) forward(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (mcp.Result, error) {
		switch method {
		case "tools/list":
			cursor := ""
			if p, ok := req.GetParams().(*mcp.ListToolsParams); ok && p != nil {
				cursor = p.Cursor
			}
			return b.list(ctx, cursor)
		case "tools/call":
			host, _ := req.GetSession().(*mcp.ServerSession)
			if p, ok := req.GetParams().(*mcp.CallToolParamsRaw); ok && p != nil {
				return b.call(ctx, host, p)
			}
		}
		return next(ctx, method, req)
	}
}

// errRefused means that the server rejected the request, such as for the key; the
// text says why.
var errRefused = errors.New("the server refuses")

// bearer is a transport that adds the key to requests.
type bearer struct {
	key, tools string
	next       http.RoundTripper // nil means the default

	mu      sync.Mutex // guards trouble
	trouble error      // of the last request, or nil
}

// RoundTrip implements [http.RoundTripper].
func (t *bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := t.send(r)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trouble = err
	return resp, err
}

// cause returns the error of the last request, or err. The SDK drops the details.
func (t *bearer) cause(err error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.trouble != nil {
		return t.trouble
	}
	return err
}

// send sends one request with the key. It turns refusals of the server into
// [errRefused] with the server's message, and temporary statuses into errors that
// are retried.
func (t *bearer) send(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+t.key)
	if t.tools != "" {
		r.Header.Set("Postern-Tools", t.tools)
	}
	next := t.next
	if next == nil {
		next = http.DefaultTransport
	}
	resp, err := next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	switch {
	case resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode >= 500:
		return nil, closing(resp, fmt.Errorf("the server answered %s", resp.Status))
	case resp.StatusCode >= 300 && !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/json"), resp.StatusCode == http.StatusUnauthorized,
		resp.StatusCode == http.StatusForbidden, resp.StatusCode >= 300 && resp.StatusCode < 400:
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 10_000))
		var said struct{ Message string }
		if json.Unmarshal(text, &said) != nil || said.Message == "" {
			said.Message = resp.Status
		}
		return nil, closing(resp, fmt.Errorf("%w: %s", errRefused, said.Message))
	}
	return resp, nil
}

func closing(resp *http.Response, err error) error {
	return errors.Join(err, resp.Body.Close())
}

// session returns the session with the server, and connects if there is none.
func (b *Bridge) session(ctx context.Context) (*mcp.ClientSession, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.server != nil {
		return b.server, nil
	}
	client := mcp.NewClient(&mcp.Implementation{Name: "postern-bridge", Version: "1"}, &mcp.ClientOptions{
		Capabilities: &mcp.ClientCapabilities{}, Logger: b.log, ProgressNotificationHandler: b.progress,
	})
	// A call that is cancelled must not end the connection of others.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	s, err := client.Connect(ctx, &mcp.StreamableClientTransport{Endpoint: b.conf.Endpoint, HTTPClient: b.conf.HTTP, DisableStandaloneSSE: true, MaxRetries: -1}, nil)
	if err != nil {
		return nil, err
	}
	b.server = s
	b.log.InfoContext(ctx, "connected", "server", b.conf.Endpoint, "protocol", s.InitializeResult().ProtocolVersion)
	return s, nil
}

// dropSession closes a session that no longer works.
func (b *Bridge) dropSession(s *mcp.ClientSession) {
	b.mu.Lock()
	if b.server == s {
		b.server = nil
	}
	b.mu.Unlock()
	if s != nil {
		_ = s.Close()
	}
}

// errOutcomeUnknown means that a call may or may not have been executed.
var errOutcomeUnknown = errors.New("the connection to the server was lost, and it is not known whether this was done: check before you repeat it")

// serverError returns the error with which the server responded, or nil if there was
// no response.
func serverError(err error) *jsonrpc.Error {
	said, ok := errors.AsType[*jsonrpc.Error](err)
	// -32003 to -32005 are the SDK's own codes for a closed connection.
	if !ok || said.Code <= -32003 && said.Code >= -32005 {
		return nil
	}
	return said
}

// withRetry runs f on a session with the server. If the connection is lost it retries
// on a new one: always before f was called, and after that only if again is true.
func withRetry[T any](ctx context.Context, b *Bridge, again bool, f func(*mcp.ClientSession) (T, error)) (out T, err error) {
	wait := b.conf.Wait
	for try := 0; ; try++ {
		s, cerr := b.session(ctx)
		err = cerr
		if err == nil {
			out, err = f(s)
		}
		if err == nil || cerr == nil && serverError(err) != nil {
			return out, err
		}
		if ctx.Err() != nil {
			return out, ctx.Err()
		}
		if err = b.way.cause(err); errors.Is(err, errRefused) {
			return out, err
		}
		b.dropSession(s)
		b.log.WarnContext(ctx, "the server does not answer", "err", err, "try", try+1)
		if cerr == nil && !again {
			return out, errOutcomeUnknown
		}
		if try >= b.conf.Retries {
			return out, fmt.Errorf("reach %s: %w", b.conf.Endpoint, err)
		}
		select {
		case <-time.After(wait):
			wait = min(2*wait, 5*time.Second)
		case <-ctx.Done():
			return out, ctx.Err()
		}
	}
}

// list returns the server's tools, with attachments described for this host.
func (b *Bridge) list(ctx context.Context, cursor string) (*mcp.ListToolsResult, error) {
	res, err := withRetry(ctx, b, true, func(s *mcp.ClientSession) (*mcp.ListToolsResult, error) {
		return s.ListTools(ctx, &mcp.ListToolsParams{Cursor: cursor})
	})
	if err != nil {
		return nil, rpcError(err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range res.Tools {
		b.safe[t.Name] = t.Annotations != nil && (t.Annotations.ReadOnlyHint || t.Annotations.IdempotentHint)
		if properties, ok := property(t.InputSchema, "properties"); ok {
			_, b.keyed[t.Name] = properties["idempotencyKey"]
			if files, ok := properties["attachments"].(map[string]any); ok {
				b.describe(files)
			}
		}
	}
	return res, nil
}

// property returns the object v[name] of a JSON schema.
func property(v any, name string) (map[string]any, bool) {
	m, _ := v.(map[string]any)
	out, ok := m[name].(map[string]any)
	return out, ok
}

// describe replaces the description of attachments: the server's is for agents in
// sandboxes.
func (b *Bridge) describe(files map[string]any) {
	objects := map[string]any{}
	if items, ok := property(files, "items"); ok {
		if either, ok := items["anyOf"].([]any); ok && len(either) == 2 {
			objects, _ = either[1].(map[string]any)
		}
	}
	if b.conf.Root == nil {
		files["description"] = "Files to attach, at most 25 MB together: objects with the content. Paths are not accepted, because the person has not chosen a folder."
		files["items"] = objects
		return
	}
	files["description"] = "Files to attach, at most 25 MB together: paths in the folder " + b.conf.Root.Name() + ", which the person has chosen, or objects with the content."
	files["items"] = map[string]any{"anyOf": []any{
		map[string]any{"type": "string", "description": "A path in that folder, absolute or relative to it, such as \"reports/march.pdf\"."}, objects,
	}}
}

// toolTraits reports whether a tool can be repeated safely, and whether it takes an
// idempotency key. It lists the tools if that was not done yet.
func (b *Bridge) toolTraits(ctx context.Context, tool string) (safe, keyed bool, err error) {
	b.mu.Lock()
	_, known := b.safe[tool]
	b.mu.Unlock()
	if !known {
		if _, err := b.list(ctx, ""); err != nil {
			return false, false, err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.safe[tool], b.keyed[tool], nil
}

// call forwards a call of the host to the server.
func (b *Bridge) call(ctx context.Context, host *mcp.ServerSession, p *mcp.CallToolParamsRaw) (*mcp.CallToolResult, error) {
	safe, keyed, err := b.toolTraits(ctx, p.Name)
	if err != nil {
		return failed(err), nil
	}
	arguments := map[string]json.RawMessage{}
	if len(p.Arguments) > 0 && string(p.Arguments) != "null" {
		if err := json.Unmarshal(p.Arguments, &arguments); err != nil {
			return failed(errors.New("arguments: must be an object")), nil
		}
	}
	files, err := b.attach(arguments)
	if err != nil {
		return failed(err), nil
	}
	if _, given := arguments["idempotencyKey"]; keyed && !given {
		// With an idempotency key a proposal can be retried after its response was
		// lost, and is made only once.
		arguments["idempotencyKey"] = json.RawMessage(`"bridge-` + rand.Text() + `"`)
	}
	out := &mcp.CallToolParams{Name: p.Name, Arguments: arguments}
	if token := p.GetProgressToken(); token != nil {
		own := rand.Text()
		out.SetProgressToken(own)
		b.mu.Lock()
		b.started[own] = call{host, token}
		b.mu.Unlock()
		defer func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			delete(b.started, own)
		}()
	}
	res, err := withRetry(ctx, b, safe || keyed, func(s *mcp.ClientSession) (*mcp.CallToolResult, error) { return s.CallTool(ctx, out) })
	if err != nil {
		if said := serverError(err); said != nil {
			return nil, said
		}
		return failed(err), nil
	}
	if len(files) > 0 && !res.IsError {
		lines := []string{"Read and attached from " + b.conf.Root.Name() + ":"}
		for _, f := range files {
			lines = append(lines, fmt.Sprintf("- %s: %d bytes, sha256 %s", f.name, f.size, f.sha256))
		}
		res.Content = append(slices.Clone(res.Content), &mcp.TextContent{Text: strings.Join(lines, "\n")})
	}
	return res, nil
}

// progress forwards a progress notification of the server to the host.
func (b *Bridge) progress(ctx context.Context, req *mcp.ProgressNotificationClientRequest) {
	own, _ := req.Params.ProgressToken.(string)
	b.mu.Lock()
	c, ok := b.started[own]
	b.mu.Unlock()
	if !ok {
		return
	}
	err := c.host.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: c.token, Progress: req.Params.Progress, Total: req.Params.Total, Message: req.Params.Message})
	if err != nil {
		b.log.DebugContext(ctx, "tell host of progress", "err", err)
	}
}

// failed returns the result of a failed call, for the model.
func failed(err error) *mcp.CallToolResult {
	return &mcp.CallToolResult{IsError: true, Content: []mcp.Content{&mcp.TextContent{Text: err.Error()}}}
}

// rpcError returns err as a JSON-RPC error, for the host.
func rpcError(err error) error {
	if said := serverError(err); said != nil {
		return said
	}
	return &jsonrpc.Error{Code: jsonrpc.CodeInternalError, Message: err.Error()}
}
