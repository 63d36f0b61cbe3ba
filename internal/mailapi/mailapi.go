// Package mailapi serves inboxes and oversight over REST, under /v1.
//
// Outside, callers show a key: an inbox's, which reads and proposes for that
// inbox alone, or a project's, which manages inboxes and opens none. Over the
// operator's local socket the caller is a person. Deciding is a person's: no
// key decides, whatever it may do otherwise.
//
// Nothing here sends mail. A send is answered with 202 when it is held, which
// is success.
package mailapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"slices"
	"strings"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/store"
)

const (
	maxBody = 1 << 20  // bytes of a request that brings no attachments
	maxSend = 36 << 20 // bytes of one that may: 25 MB in base64, and its text
	// maxSending bounds the sends in progress, each of which holds a message
	// several times in memory.
	maxSending = 8
)

// Server serves the routes. It is safe for concurrent use.
type Server struct {
	log     *slog.Logger
	db      *store.DB
	gate    *oversight.Gate
	post    *mailbox.PostOffice
	sending chan struct{} // has room for maxSending
}

// New returns a server of the inboxes in post and the actions in gate.
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, post *mailbox.PostOffice) *Server {
	return &Server{log: log, db: db, gate: gate, post: post, sending: make(chan struct{}, maxSending)}
}

// A caller is who asks, with the credential that opens its inbox if it has one.
type caller struct {
	auth.Principal
	key auth.Secret
}

// Handler returns the routes for callers that show a key.
func (s *Server) Handler() http.Handler { return s.routes(s.byKey) }

// HandlerFor returns the routes for callers whose principal is known without a
// key, such as the person at the operator's local socket.
func (s *Server) HandlerFor(who func(*http.Request) (auth.Principal, error)) http.Handler {
	return s.routes(func(r *http.Request) (caller, error) {
		p, err := who(r)
		return caller{Principal: p}, err
	})
}

func (s *Server) byKey(r *http.Request) (caller, error) {
	key := r.Header.Get("X-Api-Key")
	if h := r.Header.Get("Authorization"); h != "" {
		scheme, bearer, _ := strings.Cut(h, " ")
		if bearer = strings.TrimSpace(bearer); !strings.EqualFold(scheme, "Bearer") || key != "" && key != bearer {
			return caller{}, auth.ErrUnauthenticated
		}
		key = bearer
	}
	p, err := auth.CheckKey(r.Context(), s.db, auth.Secret(key))
	return caller{p, auth.Secret(key)}, err
}

// A route is one method of one path.
type route struct {
	method, path string
	body         int64 // most bytes of its body; 0 means that it has none
	serve        func(*Server, http.ResponseWriter, *http.Request, caller) error
}

// table is all that there is; docs/openapi.yaml describes it.
var table = []route{
	{"GET", "/v1/inboxes", 0, (*Server).listInboxes},
	{"POST", "/v1/inboxes", maxBody, (*Server).createInbox},
	{"GET", "/v1/inboxes/{inbox}/messages", 0, (*Server).listMessages},
	{"POST", "/v1/inboxes/{inbox}/messages", maxSend, (*Server).send},
	{"GET", "/v1/inboxes/{inbox}/messages/{id}", 0, (*Server).getMessage},
	{"GET", "/v1/inboxes/{inbox}/messages/{id}/raw", 0, (*Server).getRaw},
	{"GET", "/v1/actions", 0, (*Server).listActions},
	{"GET", "/v1/actions/{id}", 0, (*Server).getAction},
	{"POST", "/v1/actions/{id}/decision", maxBody, (*Server).decide},
	{"POST", "/v1/actions/{id}/resolution", maxBody, (*Server).resolve},
	{"GET", "/v1/audit", 0, (*Server).listAudit},
}

func (s *Server) routes(who func(*http.Request) (caller, error)) http.Handler {
	byPath := map[string]map[string]route{}
	for _, rt := range table {
		if byPath[rt.path] == nil {
			byPath[rt.path] = map[string]route{}
		}
		byPath[rt.path][rt.method] = rt
	}
	mux := http.NewServeMux()
	for path, methods := range byPath {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			if err := s.serve(w, r, who, methods); err != nil {
				s.fail(w, r, err)
			}
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.fail(w, r, fmt.Errorf("path: there is nothing at this address: %w", store.ErrNotFound))
	})
	// A browser's page of another origin asks for nothing here: there is no
	// CORS, and what changes anything is refused before a key is looked at.
	p := http.NewCrossOriginProtection()
	p.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.fail(w, r, fmt.Errorf("header Origin: requests from web pages are not taken: %w", auth.ErrForbidden))
	}))
	return p.Handler(mux)
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, who func(*http.Request) (caller, error), methods map[string]route) error {
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	rt, ok := methods[method]
	if !ok {
		var allow []string
		for m := range methods {
			allow = append(allow, m)
		}
		slices.Sort(allow)
		w.Header().Set("Allow", strings.Join(allow, ", "))
		return errMethod
	}
	c, err := who(r)
	if err != nil {
		return err
	}
	if rt.body > 0 {
		if t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || t != "application/json" {
			return errMediaType
		}
	}
	r.Body = http.MaxBytesReader(w, r.Body, rt.body)
	w.Header().Set("Cache-Control", "no-store") // mail and keys are in nobody's cache
	return rt.serve(s, w, r, c)
}

var (
	errMethod    = errors.New("the method is not one of those in the header Allow")
	errMediaType = errors.New("header Content-Type: must be application/json")
	// errRequest means that a request cannot be taken; the text names the field.
	errRequest = errors.New("invalid request")
)

// A blockedError is a send that policy does not allow.
type blockedError struct{ id, verdict string }

func (e *blockedError) Error() string { return "policy does not allow this email: " + e.verdict }

// A problem is the body of every answer that is not a success.
type problem struct {
	Error   string `json:"error"`   // for programs
	Message string `json:"message"` // for people: the field and the limit
	Status  int    `json:"status"`  // the HTTP status once more
	ID      string `json:"id,omitempty"`
}

// fail answers with the status of err's category: the one table of this door.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	var tooBig *http.MaxBytesError
	var field *mail.FieldError
	var blocked *blockedError
	p := problem{Error: "internal_error", Message: "internal error", Status: http.StatusInternalServerError}
	set := func(status int, code string) {
		p.Status, p.Error = status, code
		p.Message = strings.TrimPrefix(strings.TrimPrefix(err.Error(), errRequest.Error()+": "), mailbox.ErrInvalid.Error()+": ")
	}
	switch {
	case errors.Is(err, auth.ErrUnauthenticated):
		w.Header().Set("WWW-Authenticate", `Bearer realm="postern"`)
		set(http.StatusUnauthorized, "unauthorized")
		p.Message = "send a valid key in the header Authorization: Bearer, or in X-API-Key"
	case errors.As(err, &blocked):
		set(http.StatusForbidden, "blocked_by_policy")
		p.ID = blocked.id
	case errors.Is(err, auth.ErrForbidden):
		set(http.StatusForbidden, "forbidden")
	case errors.As(err, &tooBig):
		set(http.StatusRequestEntityTooLarge, "too_large")
		p.Message = fmt.Sprintf("body: is larger than %d bytes", tooBig.Limit)
	case errors.As(err, &field), errors.Is(err, errRequest), errors.Is(err, mailbox.ErrInvalid), errors.Is(err, auth.ErrInvalid):
		set(http.StatusBadRequest, "invalid_request")
	case errors.Is(err, oversight.ErrReason):
		set(http.StatusBadRequest, "invalid_request")
		p.Message = "reason: " + oversight.ErrReason.Error()
	case errors.Is(err, mailbox.ErrTaken):
		set(http.StatusConflict, "address_collision")
	case errors.Is(err, oversight.ErrStale):
		set(http.StatusConflict, "stale")
	case errors.Is(err, oversight.ErrFull):
		set(http.StatusTooManyRequests, "too_many_requests")
	case errors.Is(err, store.ErrNotFound), errors.Is(err, mailbox.ErrNoInbox):
		set(http.StatusNotFound, "not_found")
	case errors.Is(err, errMethod):
		set(http.StatusMethodNotAllowed, "method_not_allowed")
	case errors.Is(err, errMediaType):
		set(http.StatusUnsupportedMediaType, "unsupported_media_type")
	case errors.Is(err, context.Canceled):
		s.log.DebugContext(r.Context(), "caller left", "method", r.Method, "path", r.URL.Path)
	default:
		s.log.ErrorContext(r.Context(), "serve mail request", "method", r.Method, "path", r.URL.Path, "err", err)
	}
	answer(w, p.Status, p)
}

func answer(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil { // unreachable: our own types
		http.Error(w, "internal error", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
}

// decode reads the one JSON object of a request. Fields that this version does
// not know are refused: who sets one believes that it has an effect.
func decode(r *http.Request, v any) error {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	err := d.Decode(v)
	if err == nil {
		var more any
		if err = d.Decode(&more); errors.Is(err, io.EOF) {
			return nil
		} else if err == nil {
			err = errors.New("something follows the object")
		}
	}
	var tooBig *http.MaxBytesError
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &tooBig):
		return err
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%w: body: is empty, a JSON object is needed", errRequest)
	case errors.As(err, &wrong) && wrong.Field != "":
		return fmt.Errorf("%w: %s: must be of another type than %s", errRequest, wrong.Field, strings.Fields(wrong.Value)[0])
	}
	msg := strings.TrimPrefix(err.Error(), "json: ")
	if len(msg) > 200 { // it may quote a name of any length
		msg = strings.ToValidUTF8(msg[:200], "") + "…"
	}
	return fmt.Errorf("%w: body: %s", errRequest, msg)
}
