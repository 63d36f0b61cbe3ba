package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/quota"
	"postern/internal/store"
)

// A Wire serves these tools to programs that speak another protocol than MCP. It gets
// requests whose caller is known and within its limits, and calls tools with the
// [Session]. The tools are the same, with the same rights.
type Wire func(w http.ResponseWriter, r *http.Request, s *Session)

// A Session is one request of one caller on a [Wire].
type Session struct {
	srv *Server
	c   caller
}

// A CallError is why a tool did not do what it was asked to. Its text is for the
// caller.
type CallError struct {
	Text string
	// Status is the HTTP status that fits: 400 for an argument, 403, 404, 429, or 500
	// for an error of this server.
	Status int
}

// Error implements error.
func (e *CallError) Error() string { return e.Text }

// Wire returns w as a door for agents outside, who show a key as [Server.Handler] asks
// for it, in the header Authorization or X-API-Key. It has the limits of that door.
func (s *Server) Wire(w Wire) http.Handler {
	return s.sameOrigin(func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "" && r.Header.Get("X-Api-Key") != "" {
			r = r.Clone(r.Context())
			r.Header.Set("Authorization", "Bearer "+r.Header.Get("X-Api-Key"))
		}
		c, err := s.stranger(r)
		if err != nil {
			s.refuse(rw, r, err)
			return
		}
		s.wired(rw, r, c, w)
	})
}

// WireFor returns w as a door for a sandbox, which is known by its link.
func (s *Server) WireFor(who auth.Principal, w Wire) http.Handler {
	c := s.inhabitant(who)
	return s.sameOrigin(func(rw http.ResponseWriter, r *http.Request) { s.wired(rw, r, c, w) })
}

// sameOrigin refuses what pages of other servers send.
func (s *Server) sameOrigin(h http.HandlerFunc) http.Handler {
	c := http.NewCrossOriginProtection()
	c.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.refuse(w, r, errOrigin) }))
	return c.Handler(h)
}

// wired serves one request of c, unless it comes from a page of another server or too
// many are in progress.
func (s *Server) wired(rw http.ResponseWriter, r *http.Request, c caller, w Wire) {
	if !s.ownOrigin(r) {
		s.refuse(rw, r, errOrigin)
		return
	}
	done, err := s.admit(r, &c)
	if err != nil {
		s.refuse(rw, r, err)
		return
	}
	defer done()
	r.Body = http.MaxBytesReader(rw, r.Body, maxBody)
	w(rw, r, &Session{s, c})
}

// Call calls a tool of the set core with its arguments, a JSON object or nothing. It
// returns what the tool answers programs, or a [CallError].
func (s *Session) Call(ctx context.Context, name string, arguments json.RawMessage) (data any, err error) {
	t := find(name)
	switch {
	case t == nil || t.set != Core:
		return nil, &CallError{"there is no tool " + strconv.Quote(short(name)) + " here: " + strings.Join(CoreTools(), ", "), http.StatusNotFound}
	case !slices.Contains(s.c.tools, t):
		return nil, &CallError{fmt.Sprintf("this key may not call %s: use a key of an inbox (pib_…) without a list of tools, or with this tool in its list", name), http.StatusForbidden}
	}
	defer func() {
		// A bug in a tool is one failed call, as it is over MCP.
		if p := recover(); p != nil {
			s.srv.log.ErrorContext(ctx, "tool panicked", "tool", name, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			data, err = nil, &CallError{internalError, http.StatusInternalServerError}
		}
	}()
	data, err = t.call(s.srv, ctx, s.c, arguments)
	if err == nil {
		return data, nil
	}
	e := &CallError{s.srv.tell(ctx, name, err), http.StatusBadRequest}
	switch {
	case errors.Is(err, store.ErrNotFound):
		e.Status = http.StatusNotFound
	case errors.Is(err, auth.ErrForbidden):
		e.Status = http.StatusForbidden
	case errors.Is(err, errBusy), errors.Is(err, errCrowded), errors.Is(err, quota.ErrLimit), errors.Is(err, oversight.ErrFull):
		e.Status = http.StatusTooManyRequests
	case e.Text == internalError:
		e.Status = http.StatusInternalServerError
	}
	return nil, e
}

// CoreTools returns the names of the tools that [Session.Call] calls.
func CoreTools() (names []string) {
	for _, t := range catalog() {
		if t.set == Core {
			names = append(names, t.Name)
		}
	}
	return names
}
