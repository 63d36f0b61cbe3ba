// Package emailsandbox serves the tools of package mcpserver over plain HTTP, with the
// statuses of email-sandbox: 200 with data, 202 for what waits for a person, 400, 404.
// Programs written for email-sandbox set EMAIL_SANDBOX_API_URL to this door.
//
// It has no tool, no right and no limit of its own, and must not get any: each request
// is one call of a tool, made as the caller that the tools' own door knows.
package emailsandbox

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"

	"postern/internal/auth"
	"postern/internal/mcpserver"
)

// Path is where the door is. Programs append their paths to it.
const Path = "/email-sandbox"

// A Server serves email-sandbox's HTTP. It is safe for concurrent use.
type Server struct{ tools *mcpserver.Server }

// New returns a server of tools.
func New(tools *mcpserver.Server) *Server { return &Server{tools} }

// Handler returns the door for programs outside, with an inbox's key or a grant in the
// header Authorization or X-API-Key. The Model Context Protocol is served there too, for
// programs that append its path to EMAIL_SANDBOX_API_URL.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(Path+mcpserver.Path, http.StripPrefix(Path, s.tools.Handler()))
	mux.Handle(Path+"/", s.tools.Wire(serve))
	return mux
}

// HandlerFor returns the door for a sandbox that is known by its link.
func (s *Server) HandlerFor(who auth.Principal) http.Handler {
	mux := http.NewServeMux()
	mux.Handle(Path+mcpserver.Path, http.StripPrefix(Path, s.tools.HandlerFor(who)))
	mux.Handle(Path+"/", s.tools.WireFor(who, serve))
	return mux
}

// helpTool explains the other tools.
const helpTool = "email_help"

// serve serves one request of a caller.
func serve(w http.ResponseWriter, r *http.Request, s *mcpserver.Session) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+Path+"/api/tools/{tool}", func(w http.ResponseWriter, r *http.Request) {
		arguments, err := io.ReadAll(r.Body)
		if err != nil {
			refuseBody(w, err)
			return
		}
		call(w, r, s, r.PathValue("tool"), arguments)
	})
	mux.HandleFunc("GET "+Path+"/api/tools", func(w http.ResponseWriter, r *http.Request) { call(w, r, s, helpTool, nil) })
	mux.HandleFunc("GET "+Path+"/api/tools/{tool}", func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(mcpserver.CoreTools(), r.PathValue("tool")) {
			refuse(w, http.StatusNotFound, "there is no such tool: GET "+Path+"/api/tools lists them")
			return
		}
		b, err := json.Marshal(map[string]string{"tool": r.PathValue("tool")})
		if err != nil { // unreachable: a string
			return
		}
		call(w, r, s, helpTool, b)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusNotFound, "there is no such path: POST "+Path+"/api/tools/{tool} calls a tool, GET "+Path+"/api/tools lists them")
	})
	mux.ServeHTTP(w, r)
}

// call answers with what a tool answers.
func call(w http.ResponseWriter, r *http.Request, s *mcpserver.Session, tool string, arguments json.RawMessage) {
	data, err := s.Call(r.Context(), tool, arguments)
	if failed, ok := errors.AsType[*mcpserver.CallError](err); ok {
		if failed.Status == http.StatusTooManyRequests {
			w.Header().Set("Retry-After", "1")
		}
		refuse(w, failed.Status, failed.Text)
		return
	}
	b, err := json.Marshal(data)
	if err != nil { // unreachable: tools answer with plain structs
		refuse(w, http.StatusInternalServerError, "internal error")
		return
	}
	// An action that waits is accepted. One that policy forbids is no success: a program
	// must not take it for sent mail.
	var of struct {
		Status   string `json:"status"`
		ActionID string `json:"actionId"`
		Message  string `json:"message"`
		Kind     string `json:"kind"` // only email_action_status answers with it
	}
	if err := json.Unmarshal(b, &of); err != nil || of.ActionID == "" || of.Kind != "" {
		answer(w, http.StatusOK, b)
		return
	}
	switch of.Status {
	case "pending_approval":
		answer(w, http.StatusAccepted, b)
	case "blocked":
		refused, err := json.Marshal(map[string]string{"status": of.Status, "error": of.Message, "actionId": of.ActionID, "approvalId": of.ActionID})
		if err != nil { // unreachable: strings
			return
		}
		answer(w, http.StatusBadRequest, refused)
	default:
		answer(w, http.StatusOK, b)
	}
}

func refuseBody(w http.ResponseWriter, err error) {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		refuse(w, http.StatusRequestEntityTooLarge, "the body is too large: attachments are at most 25 MB together")
		return
	}
	refuse(w, http.StatusBadRequest, "the body could not be read to its end")
}

// refuse answers with an error, as email-sandbox's clients read it.
func refuse(w http.ResponseWriter, status int, text string) {
	b, err := json.Marshal(map[string]string{"status": "error", "error": text})
	if err != nil { // unreachable: strings
		return
	}
	answer(w, status, b)
}

func answer(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n'))
}
