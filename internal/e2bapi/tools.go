package e2bapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"

	"postern/internal/auth"
	"postern/internal/mcpgateway"
	"postern/internal/outgoing"
	"postern/internal/policy"
	"postern/internal/request"
)

// Tools decides on calls of tools in sandboxes. It is safe for concurrent use.
type Tools interface {
	// Call decides on a call, and waits while a person decides. Allow means that it may
	// be made once, now.
	Call(ctx context.Context, who auth.Principal, r *outgoing.Request) policy.Verdict
	// Offered reports whether a tool is listed.
	Offered(ctx context.Context, who auth.Principal, server, tool string) bool
}

var _ Tools = (*request.Admission)(nil)

const (
	maxMessage = 4 << 20  // bytes of a message to an MCP gateway
	maxListing = 16 << 20 // bytes of its list of tools
)

// toTools reports whether t is the MCP gateway of a sandbox that was created with one.
func (s *Server) toTools(t target) bool {
	return t.port == mcpgateway.Port && t.traffic.MCP && s.conf.Tools != nil
}

// serveTools forwards a request to the MCP gateway of a sandbox: calls of tools that
// policy allows, and other messages. What is forwarded is written anew from what was
// judged. The attack: a message that the gateway reads as another one than we do.
func (s *Server) serveTools(w http.ResponseWriter, r *http.Request, t target) {
	r.Header.Del("Upgrade") // the protocol has none, and nothing on it would be judged
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodDelete, http.MethodOptions:
		r.Body, r.ContentLength = http.NoBody, 0
		s.forward(w, r, t)
		return
	case http.MethodPost:
	default:
		refuse(w, r, t, &refusal{http.StatusMethodNotAllowed, "the port of the MCP gateway takes GET, POST and DELETE"})
		return
	}
	if c := r.Header.Get("Content-Encoding"); c != "" && c != "identity" {
		refuse(w, r, t, &refusal{http.StatusUnsupportedMediaType, "a message to the MCP gateway must not be compressed"})
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxMessage))
	if err != nil {
		refuse(w, r, t, &refusal{http.StatusRequestEntityTooLarge, fmt.Sprintf("a message to the MCP gateway has at most %d bytes", maxMessage)})
		return
	}
	list, err := request.ParseMessages(body)
	if err != nil || len(list) != 1 || bytes.HasPrefix(bytes.TrimSpace(body), []byte("[")) {
		refuse(w, r, t, &refusal{http.StatusBadRequest, "want one message of JSON-RPC 2.0 in UTF-8, without a name that is there twice"})
		return
	}
	m := list[0]
	call, ok, err := request.NewInside(m, mcpgateway.Separator)
	if err != nil {
		rpcRefuse(w, m["id"], -32602, err.Error())
		return
	}
	if ok {
		info, err := s.fleet.Who(r.Context(), t.sandbox)
		if err != nil {
			refuse(w, r, t, s.refusalFor(r.Context(), t, err))
			return
		}
		if v := s.conf.Tools.Call(r.Context(), info, call); v.Effect != policy.Allow {
			s.log.InfoContext(r.Context(), "call of tool refused", "sandbox", t.sandbox, "server", call.Host, "rule", v.Rule, "reason", v.Reason)
			answerRefused(w, m["id"], v)
			return
		}
		// What was judged, with the caller's number. Progress is not told: nothing else
		// may be in the parameters.
		var judged map[string]json.RawMessage
		if err := json.Unmarshal(call.Body, &judged); err != nil { // unreachable: it was made here
			refuse(w, r, t, &refusal{http.StatusInternalServerError, "internal error"})
			return
		}
		judged["jsonrpc"] = json.RawMessage(`"2.0"`)
		if id, given := m["id"]; given {
			judged["id"] = id
		}
		m = judged
	}
	if body, err = request.Encode(m); err != nil { // unreachable: it was JSON
		refuse(w, r, t, &refusal{http.StatusInternalServerError, "internal error"})
		return
	}
	var method string
	_ = json.Unmarshal(m["method"], &method)
	t.listing = method == "tools/list"
	r.Body, r.ContentLength, r.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
	r.Trailer = nil
	r.Header.Del("Trailer")
	r.Header.Set("Content-Length", strconv.Itoa(len(body)))
	r.Header.Set("Content-Type", "application/json")
	if t.listing {
		r.Header.Set("Accept", "application/json")
		r.Header.Set("Accept-Encoding", "identity")
	}
	s.forward(w, r, t)
}

// rpcRefuse answers a message with an error of JSON-RPC.
func rpcRefuse(w http.ResponseWriter, id json.RawMessage, code int, text string) {
	if id == nil {
		id = json.RawMessage("null")
	}
	reply(w, http.StatusOK, map[string]any{"jsonrpc": "2.0", "id": id, "error": map[string]any{"code": code, "message": text}})
}

// answerRefused answers a call as a tool that has failed does, so that the model reads
// why.
func answerRefused(w http.ResponseWriter, id json.RawMessage, v policy.Verdict) {
	if id == nil {
		w.WriteHeader(http.StatusAccepted)
		return
	}
	text := "This call was not made: " + v.Reason
	if v.Action != "" && !strings.Contains(text, v.Action) {
		text += " (" + v.Action + ")"
	}
	reply(w, http.StatusOK, map[string]any{"jsonrpc": "2.0", "id": id, "result": map[string]any{
		"isError": true, "content": []map[string]string{{"type": "text", "text": text}},
	}})
}

// filterTools leaves out of a gateway's list of tools those that policy denies. What is
// no such list is not passed on: the gateway may have been replaced.
func (s *Server) filterTools(resp *http.Response, t target) error {
	if resp.StatusCode != http.StatusOK {
		return nil
	}
	fail := func(why string) error { return fmt.Errorf("list of tools: %s", why) }
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxListing+1))
	_ = resp.Body.Close()
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	switch {
	case err != nil:
		return err
	case len(b) > maxListing:
		return fail("is too long")
	case kind != "application/json" || resp.Header.Get("Content-Encoding") != "":
		return fail("is not JSON")
	}
	list, err := request.ParseMessages(b)
	if err != nil || len(list) != 1 {
		return fail("is not one message")
	}
	m := list[0]
	if raw, ok := m["result"]; ok {
		var result map[string]json.RawMessage
		var tools []map[string]json.RawMessage
		if json.Unmarshal(raw, &result) != nil || json.Unmarshal(result["tools"], &tools) != nil {
			return fail("has no tools")
		}
		who, err := s.fleet.Who(resp.Request.Context(), t.sandbox)
		if err != nil {
			return err
		}
		shown := []map[string]json.RawMessage{}
		for _, tool := range tools {
			var name string
			if json.Unmarshal(tool["name"], &name) != nil {
				continue
			}
			server, bare, ok := strings.Cut(name, mcpgateway.Separator)
			if !ok {
				server, bare = "", name
			}
			if s.conf.Tools.Offered(resp.Request.Context(), who, server, bare) {
				shown = append(shown, tool)
			}
		}
		if result["tools"], err = json.Marshal(shown); err != nil {
			return err
		}
		if m["result"], err = json.Marshal(result); err != nil {
			return err
		}
	}
	if b, err = request.Encode(m); err != nil {
		return err
	}
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(b)), int64(len(b))
	resp.Header.Set("Content-Length", strconv.Itoa(len(b)))
	resp.TransferEncoding = nil
	return nil
}
