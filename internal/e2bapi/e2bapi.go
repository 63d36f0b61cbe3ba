// Package e2bapi serves sandboxes on the wire of E2B, so that its official SDKs
// work unchanged: the control API, and the proxy of the data plane to guests
// and other services inside.
//
// It must not decide where a sandbox may connect, which is policy's task, and must
// not forward credentials that a client sent for the host to services inside.
//
// The protocol is that of the SDKs named in docs/compat.md. Field names are E2B's.
package e2bapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/command"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/mailbox"
	"postern/internal/mcpgateway"
	"postern/internal/policy"
	"postern/internal/run"
	"postern/internal/sandbox"
	"postern/internal/secret"
	"postern/internal/store"
	"postern/internal/template"
	"postern/internal/volume"
	"postern/internal/webhook"
)

// InboxKeyHeader is the request header with which the creator of a sandbox lends it
// the credential of its inbox, so that it can read mail.
const InboxKeyHeader = "X-Postern-Inbox-Key"

// InboxMetadata is the metadata key whose value is the address of the inbox that a
// sandbox may propose mail for.
const InboxMetadata = "postern.inbox"

// Config holds the settings of a [Server].
type Config struct {
	// Domain is the domain of host names of the form "<port>-<id>.<domain>" that
	// reach this server. Empty means no such names; clients then set
	// E2B_SANDBOX_URL.
	Domain string
	// Ceiling is the maximum that the project allows. It is not enforced here:
	// responses use it to tell creators what they really get.
	Ceiling policy.Ceiling

	// Commands records what clients have sandboxes do. Nil: nothing is recorded.
	Commands *command.Admission

	// Hosts are further host names of this server. Only under the server's own
	// names may headers select a sandbox. Addresses, localhost and names of Domain
	// need not be listed.
	Hosts []string
	// PublicPorts lets creators open the ports of their sandboxes to everybody.
	PublicPorts bool
	// MaxConnections bounds the concurrent requests to one sandbox; 0 means 500.
	MaxConnections int
	// Webhooks, Metrics and Logs serve the routes with these names.
	Webhooks *webhook.Hooks
	Metrics  *sandbox.Sampler
	Logs     *sandbox.Logbook
	// Limits are the rate limits of the control API; nil means [DefaultLimits].
	Limits *Limits
	// SealProxy encrypts the password of a sandbox's proxy for a project. Nil: proxies
	// have no password.
	SealProxy func(project string, p *policy.Proxy, password auth.Secret) error
	// Secrets are the secrets of all projects; nil means that there are none.
	Secrets *secret.Store
	// Volumes are the volumes of all projects; nil means that there are none.
	Volumes *volume.Store
	// Tools decides on calls of tools in sandboxes that were created with mcp; nil means
	// that all are forwarded.
	Tools Tools
	// Catalog has the operator's servers of the Model Context Protocol, beside those that
	// [mcpgateway.Builtin] has.
	Catalog mcpgateway.Catalog
	// Builds are the templates of all projects and of the server. Nil is for tests
	// without sandboxes.
	Builds *build.Service
	// Runs creates sandboxes that a stored contract binds. Nil means that contracts are not
	// available.
	Runs *run.Service
	// CPUs (cores), MemoryMB and DiskMB (mebibytes) are what sandboxes get if their
	// template does not say.
	CPUs             float64
	MemoryMB, DiskMB int64
	// UploadKey is the server's key, from which that of the URLs for uploads follows.
	UploadKey []byte
	// HTTPS says that clients reach this server by HTTPS, also where it serves HTTP to
	// a proxy.
	HTTPS bool
}

// Server serves the control API and the data plane.
type Server struct {
	log      *slog.Logger
	db       *store.DB
	fleet    *sandbox.Fleet
	mail     *mailbox.PostOffice
	conf     Config
	boxes    liveSandboxes
	hosts    map[string]bool // see ownHost
	requests *requests
	limits   *limits
	proxy    *httputil.ReverseProxy
	uploads  *uploader
}

// New returns a server for the sandboxes in fleet.
func New(log *slog.Logger, db *store.DB, fleet *sandbox.Fleet, mail *mailbox.PostOffice, c Config) *Server {
	s := &Server{log: log, db: db, fleet: fleet, mail: mail, conf: c}
	s.openData(fleet, fleet.Transport())
	return s
}

// openData prepares the data plane of the sandboxes in b. Inside is the transport
// to services in them.
func (s *Server) openData(b liveSandboxes, inside http.RoundTripper) {
	s.conf.Domain = strings.ToLower(s.conf.Domain)
	if s.conf.MaxConnections == 0 {
		s.conf.MaxConnections = 500
	}
	if s.conf.Limits == nil {
		s.conf.Limits = &DefaultLimits
	}
	s.boxes, s.hosts = b, ownHosts(s.conf)
	s.requests = &requests{max: s.conf.MaxConnections, by: map[requestKey]int{}}
	s.limits = newLimits(*s.conf.Limits)
	s.uploads = newUploader(s.conf.UploadKey)
	s.proxy = s.newProxy(inside)
}

// maxBody bounds the body of a control request, in bytes.
const maxBody = 1 << 20

// bodyTime is how long a client may take to send the body of a control request.
const bodyTime = 30 * time.Second

// readBody reads all of r's body before the handler runs, so that a client that
// sends slowly does not hold what the handler holds.
func readBody(w http.ResponseWriter, r *http.Request) error {
	c := http.NewResponseController(w)
	// Responses of tests have no connection to set deadlines on.
	if err := c.SetReadDeadline(time.Now().Add(bodyTime)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("set deadline for body: %w", err)
	}
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var tooBig *http.MaxBytesError
	switch {
	case errors.As(err, &tooBig):
		return err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: body: not received within %s", errRequest, bodyTime)
	case err != nil:
		return fmt.Errorf("%w: body: ended early", errRequest)
	}
	// The deadline would otherwise end the request itself.
	if err := c.SetReadDeadline(time.Time{}); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("clear deadline for body: %w", err)
	}
	r.Body = io.NopCloser(bytes.NewReader(b))
	return nil
}

// Handler returns the routes of the control API for callers with a project's key.
func (s *Server) Handler() http.Handler {
	return s.routes(s.limited(func(r *http.Request) (auth.Principal, error) {
		key := auth.Secret(r.Header.Get("X-Api-Key"))
		if key == "" {
			return auth.Principal{}, fmt.Errorf("header X-API-Key is missing: %w", auth.ErrUnauthenticated)
		}
		who, err := auth.CheckKey(r.Context(), s.db, key)
		if err == nil && who.Kind != auth.Project {
			return auth.Principal{}, fmt.Errorf("an inbox key does not manage sandboxes: %w", auth.ErrForbidden)
		}
		return who, err
	}), s.byToken)
}

// HandlerFor returns the routes for requests whose caller is known in another way,
// such as those on the operator's local socket.
func (s *Server) HandlerFor(who func(*http.Request) (auth.Principal, error)) http.Handler {
	return s.routes(who, s.byOwner(who))
}

// routes returns the routes for callers that who authenticates. MayUse decides who
// may access the content of a volume.
func (s *Server) routes(who func(*http.Request) (auth.Principal, error), mayUse func(*http.Request, string) error) http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, h func(w http.ResponseWriter, r *http.Request, who auth.Principal) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			p, err := who(r)
			if err == nil {
				err = readBody(w, r)
			}
			if err == nil {
				err = h(w, r, p)
			}
			if err != nil {
				s.fail(w, r, err)
			}
		})
	}
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "OK") })
	handle("POST /v2/sandboxes", s.create)
	handle("POST /sandboxes", s.create)
	handle("GET /v2/sandboxes", s.list)
	handle("GET /sandboxes", s.listRunning)
	handle("GET /sandboxes/{id}", s.get)
	handle("DELETE /sandboxes/{id}", s.kill)
	handle("POST /sandboxes/{id}/timeout", s.setTimeout)
	handle("POST /v2/sandboxes/{id}/connect", s.connect)
	handle("POST /sandboxes/{id}/connect", s.connect)
	handle("POST /sandboxes/{id}/resume", s.connect)
	handle("POST /sandboxes/{id}/refreshes", s.refresh)
	handle("POST /sandboxes/{id}/pause", s.pause)
	handle("POST /sandboxes/{id}/fork", s.fork)
	handle("PUT /sandboxes/{id}/network", s.setNetwork)
	handle("POST /sandboxes/{id}/snapshots", s.createSnapshot)
	handle("GET /snapshots", s.listSnapshots)
	s.templateRoutes(mux, handle)
	// Its body is not read beforehand: it has gigabytes.
	mux.HandleFunc("POST /templates/{template}/import", func(w http.ResponseWriter, r *http.Request) {
		p, err := who(r)
		if err == nil {
			err = s.importTemplate(w, r, p)
		}
		if err != nil {
			w.Header().Set("Connection", "close") // the rest of a refused body is not read
			s.fail(w, r, err)
		}
	})
	s.volumeRoutes(mux, handle, mayUse)
	s.secretRoutes(handle)
	s.observe(handle)
	// E2B's routes for its dashboard and its operators, which take no project's key there
	// either.
	for _, p := range []string{"/api-keys", "/api-keys/{id}", "/access-tokens", "/access-tokens/{id}", "/nodes", "/nodes/{id}", "/admin/"} {
		handle(p, func(_ http.ResponseWriter, r *http.Request, _ auth.Principal) error {
			return fmt.Errorf("%s is not for a project's key: people manage keys and the server with the command \"postern\" or in the console: %w", r.URL.Path, auth.ErrForbidden)
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, pattern := mux.Handler(r)
		if pattern != "" {
			mux.ServeHTTP(w, r) // not h, which lacks the path values
			return
		}
		// The mux answers in plain text, but clients read the status from JSON.
		refused := statusOnly{header: w.Header()}
		h.ServeHTTP(&refused, r)
		msg := r.Method + " " + r.URL.Path + " is not a route of this server"
		if refused.status != http.StatusMethodNotAllowed {
			refused.status = http.StatusNotFound // redirects are not answered either
			refused.header.Del("Location")
		}
		reply(w, refused.status, map[string]any{"code": refused.status, "message": msg})
	})
}

// Operation returns the name of the operation on a sandbox that r requests and whose
// steps are worth measuring: create, connect, resume, pause, fork or snapshots. For
// other requests it returns "".
func Operation(r *http.Request) string {
	if r.Method != http.MethodPost {
		return ""
	}
	path := strings.Split(strings.TrimPrefix(r.URL.Path, "/v2"), "/")
	switch {
	case len(path) == 2 && path[1] == "sandboxes":
		return "create"
	case len(path) == 4 && path[1] == "sandboxes" && slices.Contains([]string{"connect", "resume", "pause", "fork", "snapshots"}, path[3]):
		return path[3]
	}
	return ""
}

// A statusOnly is a response that keeps status and header and drops the body.
type statusOnly struct {
	header http.Header
	status int
}

// Header implements [http.ResponseWriter].
func (s *statusOnly) Header() http.Header { return s.header }

// WriteHeader implements [http.ResponseWriter].
func (s *statusOnly) WriteHeader(status int) { s.status = status }

// Write implements [io.Writer].
func (*statusOnly) Write(b []byte) (int, error) { return len(b), nil }

var errNotYet = errors.New("not supported by this version of Postern, see docs/compat.md")

// fail answers with the status of err's category. The SDKs read the status from the
// body.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	status, msg := s.status(r, err)
	if limited, ok := errors.AsType[*limitError](err); ok {
		limited.setRetryAfter(w.Header())
	}
	reply(w, status, map[string]any{"code": status, "message": msg})
}

// status is the table from errors to HTTP statuses and texts. Unknown errors are
// logged and answered as "internal error".
func (s *Server) status(r *http.Request, err error) (status int, msg string) {
	var tooBig *http.MaxBytesError
	var limited *limitError
	status, msg = http.StatusInternalServerError, "internal error"
	switch {
	case errors.Is(err, sandbox.ErrNotResumed): // first: it may wrap another error's "not found", but the sandbox exists
		msg = sandbox.ErrNotResumed.Error()
		s.log.ErrorContext(r.Context(), "resume sandbox", "path", r.URL.Path, "err", err)
	case errors.As(err, &limited):
		status, msg = http.StatusTooManyRequests, err.Error()
	case volumeStatus(err) != 0:
		status, msg = volumeStatus(err), err.Error()
	case templateStatus(err) != 0:
		status, msg = templateStatus(err), err.Error()
	case contractStatus(err) != 0:
		status, msg = contractStatus(err), err.Error()
	case secretStatus(err) != 0: // before the placeholders of rules
		status, msg = secretStatus(err), err.Error()
	case errors.Is(err, auth.ErrUnauthenticated):
		status, msg = http.StatusUnauthorized, "the API key is missing or not valid"
	case errors.Is(err, auth.ErrForbidden):
		status, msg = http.StatusForbidden, err.Error()
	case errors.Is(err, sandbox.ErrNotFound), errors.Is(err, sandbox.ErrNoTemplate), errors.Is(err, sandbox.ErrNoSnapshot), errors.Is(err, webhook.ErrNotFound):
		status, msg = http.StatusNotFound, err.Error()
	case errors.Is(err, directory.ErrNoInbox):
		status, msg = http.StatusBadRequest, err.Error() // a field of the request is wrong, not its path
	case errors.Is(err, policy.ErrPlaceholder):
		status, msg = http.StatusBadRequest, "Network transform header contains a malformed E2B placeholder. "+err.Error()
	case errors.Is(err, sandbox.ErrInvalid), errors.Is(err, errRequest), errors.Is(err, policy.ErrInvalid),
		errors.Is(err, webhook.ErrInvalid), errors.Is(err, event.ErrInvalid):
		status, msg = http.StatusBadRequest, err.Error()
	case errors.As(err, &tooBig):
		status, msg = http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is larger than %d bytes", tooBig.Limit)
	case errors.Is(err, sandbox.ErrPaused), errors.Is(err, sandbox.ErrRunning), errors.Is(err, sandbox.ErrBusy):
		status, msg = http.StatusConflict, err.Error()
	case store.DiskFull(err):
		status, msg = http.StatusInsufficientStorage, store.DiskFullText
		s.log.ErrorContext(r.Context(), "serve control request", "method", r.Method, "path", r.URL.Path, "err", err)
	case errors.Is(err, template.ErrNotBuilt):
		status, msg = http.StatusServiceUnavailable, err.Error()
	case errors.Is(err, sandbox.ErrFull):
		status, msg = http.StatusTooManyRequests, err.Error()
	case errors.Is(err, errNotYet):
		status, msg = http.StatusNotImplemented, err.Error()
	case errors.Is(err, context.Canceled):
		s.log.DebugContext(r.Context(), "caller disconnected", "method", r.Method, "path", r.URL.Path)
		status = 499 // nginx's code for it in logs; nobody reads the answer
	default:
		s.log.ErrorContext(r.Context(), "serve control request", "method", r.Method, "path", r.URL.Path, "err", err)
	}
	return status, msg
}

// reply sends v as JSON.
func reply(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil { // unreachable: our own types
		http.Error(w, "internal error", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b)
}

// errRequest means that a request is malformed. The text says why.
var errRequest = errors.New("invalid request")

// decode parses the body as a JSON object. Unknown fields are refused: ignoring one
// could mean running with less protection than the caller requested. So is data behind
// the object, which another parser might take for the request.
func decode(r *http.Request, v any) error {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	err := d.Decode(v)
	var tooBig *http.MaxBytesError
	switch {
	case errors.Is(err, io.EOF): // clients may omit an empty body
		return nil
	case err == nil:
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			return fmt.Errorf("%w: body: there is more behind the JSON object", errRequest)
		}
		return nil
	case errors.As(err, &tooBig):
		return err
	}
	return fmt.Errorf("%w: body: %s", errRequest, strings.TrimPrefix(err.Error(), "json: "))
}
