package mcpgateway

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
)

// versions are the revisions of the protocol that the gateway speaks, the newest first.
var versions = []string{"2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"}

var toolName = form(`^[A-Za-z0-9_.-]{1,128}$`)

// The limits of requests.
const (
	maxRequest = 4 << 20 // bytes
	maxCalls   = 64      // in progress
)

// A gateway serves the tools of all servers. It is safe for concurrent use.
type gateway struct {
	children []*child
	token    [sha256.Size]byte // hash of the token
	calls    chan struct{}     // semaphore
}

func newGateway(children []*child, token string) *gateway {
	return &gateway{children: children, token: sha256.Sum256([]byte(token)), calls: make(chan struct{}, maxCalls)}
}

// ServeHTTP implements [http.Handler].
func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path == "/health" && r.Method == http.MethodGet:
		g.health(w)
		return
	case r.URL.Path != Path:
		http.Error(w, "the tools are at "+Path, http.StatusNotFound)
		return
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	shown := sha256.Sum256([]byte(strings.TrimSpace(token)))
	if !strings.EqualFold(scheme, "Bearer") || subtle.ConstantTimeCompare(shown[:], g.token[:]) != 1 {
		w.Header().Set("WWW-Authenticate", `Bearer realm="mcp-gateway"`)
		http.Error(w, "send the header Authorization: Bearer with the gateway's token", http.StatusUnauthorized)
		return
	}
	if r.Method != http.MethodPost { // there is no stream of the server's own, and no session to delete
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "only POST", http.StatusMethodNotAllowed)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err != nil {
		http.Error(w, "the message is larger than 4 MiB or incomplete", http.StatusRequestEntityTooLarge)
		return
	}
	var m message
	if json.Unmarshal(body, &m) != nil {
		answer(w, http.StatusBadRequest, message{ID: json.RawMessage("null"), Error: &rpcError{Code: codeParse, Message: "want one JSON-RPC message"}})
		return
	}
	if m.Version != "2.0" || m.Method == "" && m.ID == nil {
		answer(w, http.StatusBadRequest, message{ID: json.RawMessage("null"), Error: &rpcError{Code: codeInvalid, Message: "want a JSON-RPC 2.0 message"}})
		return
	}
	if m.ID == nil || m.Method == "" { // notifications, and responses although we send no requests
		w.WriteHeader(http.StatusAccepted)
		return
	}
	select {
	case g.calls <- struct{}{}:
		defer func() { <-g.calls }()
	default:
		answer(w, http.StatusOK, message{ID: m.ID, Error: &rpcError{Code: codeInternal, Message: "too many calls at once"}})
		return
	}
	result, err := g.handle(r.Context(), m)
	out := message{ID: m.ID, Result: result}
	if err != nil {
		if !errors.As(err, &out.Error) {
			out.Error = &rpcError{Code: codeInternal, Message: err.Error()}
		}
	}
	answer(w, http.StatusOK, out)
}

func answer(w http.ResponseWriter, status int, m message) {
	m.Version = "2.0"
	b, err := json.Marshal(m)
	if err != nil { // unreachable: take parsed the server's response as JSON
		http.Error(w, "internal error", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(b)
}

// health reports which servers run, without their error texts.
func (g *gateway) health(w http.ResponseWriter) {
	states := map[string]string{}
	for _, c := range g.children {
		states[c.server.Slug] = "running"
		if c.state() != "" {
			states[c.server.Slug] = "not running"
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"servers": states})
}

// handle answers a request.
func (g *gateway) handle(ctx context.Context, m message) (json.RawMessage, error) {
	switch m.Method {
	case "initialize":
		var p struct {
			Version string `json:"protocolVersion"`
		}
		_ = json.Unmarshal(m.Params, &p)
		if !slices.Contains(versions, p.Version) {
			p.Version = versions[0]
		}
		return json.Marshal(map[string]any{
			"protocolVersion": p.Version, "capabilities": map[string]any{"tools": map[string]any{}},
			"serverInfo": map[string]string{"name": "mcp-gateway", "title": "Tools of a sandbox", "version": "1"},
		})
	case "ping":
		return json.RawMessage(`{}`), nil
	case "tools/list":
		return g.list()
	case "tools/call":
		return g.call(ctx, m.Params)
	}
	return nil, &rpcError{Code: codeMethod, Message: "the gateway does not have " + m.Method}
}

// list returns the tools of all running servers, with the server's name as a prefix.
func (g *gateway) list() (json.RawMessage, error) {
	all := []map[string]json.RawMessage{}
	for _, c := range g.children {
		for _, t := range c.listed() {
			out := maps.Clone(t.all)
			name, err := json.Marshal(c.server.Slug + Separator + t.name)
			if err != nil {
				return nil, err
			}
			out["name"] = name
			all = append(all, out)
		}
	}
	return json.Marshal(map[string]any{"tools": all})
}

// call forwards a call to the server that the tool's name begins with.
func (g *gateway) call(ctx context.Context, params json.RawMessage) (json.RawMessage, error) {
	var p map[string]json.RawMessage
	var full string
	if json.Unmarshal(params, &p) != nil || json.Unmarshal(p["name"], &full) != nil {
		return nil, &rpcError{Code: codeParams, Message: "params.name: want the name of a tool"}
	}
	slug, name, _ := strings.Cut(full, Separator)
	i := slices.IndexFunc(g.children, func(c *child) bool { return c.server.Slug == slug })
	if i < 0 || !toolName().MatchString(name) {
		return nil, &rpcError{Code: codeParams, Message: "there is no tool with that name: see tools/list"}
	}
	var err error
	if p["name"], err = json.Marshal(name); err != nil {
		return nil, err
	}
	if params, err = json.Marshal(p); err != nil {
		return nil, err
	}
	result, err := g.children[i].call(ctx, "tools/call", params)
	if err == nil && !bytes.HasPrefix(bytes.TrimSpace(result), []byte("{")) {
		err = errors.New("its response is not a valid result")
	}
	return result, err
}
