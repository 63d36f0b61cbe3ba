// Package mcpserver serves an agent's mail as tools, over the Model Context
// Protocol: tools that read, propose and ask, and none that decides. They are in
// sets, of which an agent sees a few unless somebody chose more.
//
// A sandbox reaches it at http://postern.internal/mcp and is known by its link;
// agents elsewhere reach it at /mcp with an inbox key. It keeps no sessions.
//
// It must not open a file of this machine on an agent's word, and must not hand
// mail to a model without saying that it is data. Whatever is sent waits in the
// gate: that it is held is the normal answer of email_send, not an error.
package mcpserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
	"golang.org/x/time/rate"

	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/sandbox"
	"postern/internal/seal"
	"postern/internal/store"
)

// Path is where the tools are served, inside sandboxes and outside.
const Path = "/mcp"

const (
	// maxBody bounds a request: attachments of 25 MB in base64, and its text.
	maxBody = 36 << 20 // bytes
	// bigBody is from where a request counts as a big one.
	bigBody = 1 << 20 // bytes
	// maxCalls and maxBig bound what one caller may have in progress, or a few
	// sandboxes could use up the memory of all.
	maxCalls = 16
	maxBig   = 2
)

// Server serves the tools. It is safe for concurrent use.
type Server struct {
	log   *slog.Logger
	db    *store.DB
	gate  *oversight.Gate
	post  *mailbox.PostOffice
	fleet *sandbox.Fleet
	conf  Config
	files *http.Client // into sandboxes

	closing chan struct{} // closed when waiting is to end

	mu      sync.Mutex      // guards what follows
	busy    map[string]load // by principal, while anything is in progress
	waiting map[string]int  // calls that wait, by principal
	waits   int             // all of them
	rates   map[string]*rate.Limiter
}

type load struct{ calls, big int }

// New returns a server of the mail in post. Attachments that a sandbox names by
// their paths are read from that sandbox, through fleet.
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, post *mailbox.PostOffice, fleet *sandbox.Fleet, conf Config) *Server {
	if conf.Inside == nil {
		conf.Inside = fleet.Transport()
	}
	return &Server{
		log: log, db: db, gate: gate, post: post, fleet: fleet, conf: conf, rates: map[string]*rate.Limiter{}, closing: make(chan struct{}), busy: map[string]load{}, waiting: map[string]int{},
		files: &http.Client{
			Transport: conf.Inside,
			// The attack: a guest whose answer sends us, with its channel's
			// key, to another sandbox.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// Close ends the waiting of calls, so that the server can stop. It is called once.
func (s *Server) Close() { close(s.closing) }

// A caller is who calls, and what a call can reach.
type caller struct {
	who auth.Principal
	// key opens the inbox that is named, empty for the caller's own, or says
	// why it cannot.
	key func(ctx context.Context, inbox string) (*seal.Key, error)

	tools    []*tool                                                        // that it is offered
	gone     context.Context                                                //nolint:containedctx // of the connection, which a call of the older revisions outlives otherwise
	progress func(ctx context.Context, done, total float64, message string) // tells the caller; nil if it did not ask
}

// HandlerFor returns the tools for a sandbox that is known by its link.
func (s *Server) HandlerFor(who auth.Principal) http.Handler {
	c := s.inhabitant(who)
	return s.guarded(func(w http.ResponseWriter, r *http.Request) { s.bounded(w, r, c) })
}

// Handler returns the tools for agents outside. They show an inbox key, or a
// grant over several inboxes, of which each call then names one.
func (s *Server) Handler() http.Handler {
	return s.guarded(func(w http.ResponseWriter, r *http.Request) {
		c, err := s.stranger(r)
		if err != nil {
			s.refuse(w, r, err)
			return
		}
		s.bounded(w, r, c)
	})
}

// inhabitant returns a sandbox as a caller.
func (s *Server) inhabitant(who auth.Principal) caller {
	return caller{who: who, key: func(ctx context.Context, inbox string) (*seal.Key, error) {
		if inbox != "" {
			if _, _, err := s.post.Keys.Reach(ctx, who, inbox); err != nil {
				return nil, err
			}
		}
		return s.post.Keys.Lent(ctx, who)
	}}
}

// stranger returns the caller whose key a request shows.
func (s *Server) stranger(r *http.Request) (caller, error) {
	who, key, err := s.authenticate(r)
	if err != nil {
		// The attack: keys that are tried out, and questions to the database
		// without number.
		if often := s.often("from "+remote(r), time.Minute/strangersPerMin, strangersAtOnce); often != nil {
			err = often
		}
		return caller{}, err
	}
	return caller{who: who, key: func(ctx context.Context, inbox string) (*seal.Key, error) {
		return s.post.Keys.Open(ctx, who, key, inbox)
	}}, nil
}

func (s *Server) guarded(h http.HandlerFunc) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(Path, func(w http.ResponseWriter, r *http.Request) {
		if !s.ownOrigin(r) {
			s.refuse(w, r, errOrigin)
			return
		}
		h(w, r)
	})
	return http.NewCrossOriginProtection().Handler(mux)
}

// authenticate returns whose inbox key the request shows, and the key.
func (s *Server) authenticate(r *http.Request) (auth.Principal, auth.Secret, error) {
	scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") || key == "" {
		return auth.Principal{}, "", auth.ErrUnauthenticated
	}
	secret := auth.Secret(strings.TrimSpace(key))
	who, secret, err := auth.Identify(r.Context(), s.db, secret)
	if err != nil {
		return auth.Principal{}, "", err
	}
	if who.Kind != auth.Agent && who.Kind != auth.Grant && who.Kind != auth.Project {
		return auth.Principal{}, "", fmt.Errorf("a %s key opens no inbox; the tools need an inbox key (pib_…): %w", who.Kind, auth.ErrForbidden)
	}
	return who, secret, nil
}

// admit fills in what c is offered by a request, and counts the request as in progress
// until done is called, unless too many are.
func (s *Server) admit(r *http.Request, c *caller) (done func(), err error) {
	if c.tools, err = chosen(r, c.who); err != nil {
		return nil, err
	}
	if err := s.often(c.who.String(), time.Second/callsPerSecond, callsAtOnce); err != nil {
		return nil, err
	}
	c.gone = r.Context()
	return s.begin(c.who, r.ContentLength < 0 || r.ContentLength > bigBody)
}

// bounded serves one request of c unless too many are in progress.
func (s *Server) bounded(w http.ResponseWriter, r *http.Request, c caller) {
	done, err := s.admit(r, &c)
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	defer done()
	if a := r.Header.Get("Accept"); a == "" || strings.Contains(a, "application/json") {
		// To ask for nothing is to take anything (RFC 9110, 12.5.1). The SDK
		// wants two types named, of which it is told below to use this one.
		r.Header.Set("Accept", "application/json, text/event-stream")
	}
	s.handler(c, streams(r)).ServeHTTP(w, r)
}

// maxPeek bounds the calls that are looked into for a wish to hear of progress.
const maxPeek = 64 << 10 // bytes

// streams reports whether r asks to hear of progress, which needs a stream.
// Everything else is answered with one JSON document.
func streams(r *http.Request) bool {
	if r.Body == nil || r.ContentLength < 0 || r.ContentLength > maxPeek || !strings.Contains(r.Header.Get("Accept"), "text/event-stream") {
		return false
	}
	b, err := io.ReadAll(r.Body)
	rest := r.Body
	r.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(b), failing{err}), rest}
	return bytes.Contains(b, []byte(`"progressToken"`))
}

// failing is the end of a body that was read before.
type failing struct{ err error }

// Read implements [io.Reader].
func (f failing) Read([]byte) (int, error) {
	if f.err != nil {
		return 0, f.err
	}
	return 0, io.EOF
}

var errOrigin = errors.New("pages of another server do not call these tools (the header Origin says whose page it is; --host names further hosts of this one)")

var errBusy = fmt.Errorf("too much at once: at most %d calls, and %d with attachments or more than 1 MB, may be in progress; wait for one to end", maxCalls, maxBig)

// begin counts one more in progress for who, until done is called.
func (s *Server) begin(who auth.Principal, big bool) (done func(), err error) {
	one := load{calls: 1}
	if big {
		one.big = 1
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.busy[who.String()]
	l.calls += one.calls
	l.big += one.big
	if l.calls > maxCalls || l.big > maxBig {
		return nil, errBusy
	}
	s.busy[who.String()] = l
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		l := s.busy[who.String()]
		l.calls -= one.calls
		l.big -= one.big
		if l == (load{}) {
			delete(s.busy, who.String())
			return
		}
		s.busy[who.String()] = l
	}, nil
}

// refuse answers what never reached the protocol.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	status, code, msg := http.StatusInternalServerError, "internal_error", "internal error"
	switch {
	case errors.Is(err, auth.ErrUnauthenticated):
		status, code, msg = http.StatusUnauthorized, "unauthorized", "send the header Authorization: Bearer with an inbox key (pib_…) or an access token"
		w.Header().Set("WWW-Authenticate", s.challenge(r, "invalid_token"))
	case errors.Is(err, auth.ErrForbidden):
		status, code, msg = http.StatusForbidden, "forbidden", err.Error()
		w.Header().Set("WWW-Authenticate", s.challenge(r, "insufficient_scope"))
	case errors.Is(err, errArgument):
		status, code, msg = http.StatusBadRequest, "bad_request", strings.TrimPrefix(err.Error(), errArgument.Error()+": ")
	case errors.Is(err, errOrigin):
		status, code, msg = http.StatusForbidden, "forbidden", err.Error()
	case errors.Is(err, errBusy), errors.Is(err, errTooOften):
		status, code, msg = http.StatusTooManyRequests, "too_many_requests", err.Error()
		w.Header().Set("Retry-After", "1")
	case r.Context().Err() != nil:
		s.log.DebugContext(r.Context(), "caller left", "path", r.URL.Path)
	default:
		s.log.ErrorContext(r.Context(), "serve tools", "err", err)
	}
	b, err := json.Marshal(map[string]any{"error": code, "message": msg, "status": status})
	if err != nil { // unreachable: strings and a number
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(b)
}

// handler returns the protocol's endpoint for one request of a caller, which is
// answered as a stream or with one JSON document.
func (s *Server) handler(c caller, stream bool) http.Handler {
	srv := mcp.NewServer(&mcp.Implementation{Name: "postern", Title: "Postern: email with oversight, and sandboxes", Version: "1"}, &mcp.ServerOptions{
		Instructions: c.instructions(),
		Capabilities: &mcp.ServerCapabilities{Tools: &mcp.ToolCapabilities{}},
	})
	srv.AddReceivingMiddleware(s.recovered)
	for _, t := range c.tools {
		t.add(s, srv, c)
	}
	return mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return srv }, &mcp.StreamableHTTPOptions{
		Stateless:           true,
		JSONResponse:        !stream,
		MaxRequestBodyBytes: maxBody,
		// Whose pages may call is checked before; programs behind a proxy on
		// this machine name the host that they called.
		DisableLocalhostProtection: true,
	})
}

// recovered turns a bug in a tool into one failed call. The SDK runs calls in
// goroutines of its own, where a panic would end the program.
func (s *Server) recovered(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (res mcp.Result, err error) {
		defer func() {
			if p := recover(); p != nil {
				s.log.ErrorContext(ctx, "tool panicked", "method", method, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
				res, err = nil, &jsonrpc.Error{Code: jsonrpc.CodeInternalError, Message: "internal error"}
			}
		}()
		return next(ctx, method, req)
	}
}
