// Package mailapi serves inboxes and oversight over REST and WebSocket, under
// /v1. docs/openapi.yaml describes it; the JSON is that of package api.
//
// Remote callers show a key. The key of an inbox reads and proposes for that
// inbox alone; a project's key manages inboxes and opens none. People show a
// session (pse_…); callers of the operator's local socket are people too. Only
// people decide on actions.
//
// Each noun has a handler type in the file of its name, with the fields that it
// uses. [Server] routes to them: it authenticates, checks the role that a route
// needs, bounds the body, and turns errors into problems (RFC 9457).
//
// The package must not send mail or decide by itself. A proposal to send is
// answered with 202, also when it is held for a person.
package mailapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/connector"
	"postern/internal/domain"
	"postern/internal/door"
	"postern/internal/gmail"
	"postern/internal/mailbox"
	"postern/internal/notify"
	"postern/internal/oauth"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/permit"
	"postern/internal/rulebook"
	"postern/internal/run"
	"postern/internal/secret"
	"postern/internal/semaphore"
	"postern/internal/store"
	"postern/internal/tracing"
	"postern/internal/webhook"
)

const (
	maxBody = 1 << 20  // bytes of a request that brings no attachments
	maxSend = 36 << 20 // bytes of one that may: 25 MB in base64, and its text
	// maxSending bounds concurrent sends: each holds several copies of its message
	// in memory.
	maxSending     = 8
	maxSendingEach = 2 // of one inbox
	maxExporting   = 4 // one of an inbox
)

// Server serves the routes. It is safe for concurrent use.
type Server struct {
	log       *slog.Logger
	db        *store.DB
	gate      *oversight.Gate
	post      *mailbox.PostOffice
	domains   *domain.Registry
	hooks     *webhook.Hooks
	sending   *semaphore.Keyed
	exporting *semaphore.Keyed
	crowd     crowd         // who waits for events
	closing   chan struct{} // closed when waiting is to end
	conf      Config
	signups   *signupLimiter
	connects  *signupLimiter // of those with a wrong code
}

// Config is what a [Server] works with, and what the operator sets.
type Config struct {
	Domains  *domain.Registry // required
	Webhooks *webhook.Hooks   // required
	Book     *rulebook.Book   // required
	People   *people.People   // required
	Record   *audit.Keeper    // makes checkpoints; nil means that this server makes none
	Notify   *notify.Notifier // tells people of what waits; nil means that nobody is notified
	Secrets  *secret.Store    // nil means that this server has none
	// Connections are those to mailboxes at other providers; nil means that this server
	// has none.
	Connections *connector.Connections
	Permits     *permit.Register // nil means that this server has none
	// Denials returns the last refusals by the wall of a sandbox, newest first. Nil: none
	// are known.
	Denials func(sandbox string) []api.Denial
	// Traces holds the newest operations on sandboxes; nil means that the server keeps
	// none.
	Traces  *tracing.Recorder
	Runs    *run.Service // nil means that this server performs no runs
	Exports *run.Exports // artifacts of runs; nil means that they are not available
	Prover  *run.Prover  // reports and statements of runs; nil means that they are not available
	// Commands has the records of the programs that were started in sandboxes; nil means
	// that the server keeps none.
	Commands *command.Admission
	Tools    []string // the names of the tools that keys can be limited to; nil means any
	// Offered returns the names of the tools that a caller is offered over the Model
	// Context Protocol; nil means that it is not said.
	Offered func(who auth.Principal) []string
	OAuth   *oauth.Server  // connects programs; nil means that none connect
	Gmail   *gmail.SignIns // nil means that this server connects no mailboxes at Gmail
	// Console is the URL at which people reach the console's server, for links to it: what
	// the operator configured, or where the server listens. Empty: links have a path alone.
	Console string
	// Prompt returns the sentence by which an agent connects itself with a code. Nil: none
	// is made.
	Prompt func(code string) string
	Opens  api.OpenSettings // what the operator opens to sandboxes, for verifications
	Signup bool             // anybody may make an account, in the oldest project
	// Proxies are the networks of the reverse proxies whose X-Forwarded-For names the
	// client. Nil: none is trusted.
	Proxies []netip.Prefix
}

// New returns a server of the inboxes in post and the actions in gate.
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, post *mailbox.PostOffice, c Config) *Server {
	return &Server{
		log: log, db: db, gate: gate, post: post, domains: c.Domains, hooks: c.Webhooks, sending: semaphore.New(maxSending, maxSendingEach), exporting: semaphore.New(maxExporting, 1),
		crowd: crowd{by: map[string]int{}}, closing: make(chan struct{}), conf: c, signups: newSignupLimiter("sign-ups"), connects: newSignupLimiter("connect codes that are wrong"),
	}
}

// Close ends all long polls and WebSockets, so that shutdown need not wait for
// them. It must be called once.
func (s *Server) Close() { close(s.closing) }

// A caller is the principal of a request, with the credential that it showed.
type caller struct {
	auth.Principal
	key     auth.Secret // empty if it has none, as people do
	shown   auth.Secret // what was shown for key: itself, or a token of a connected app
	session auth.Secret // of a person who signed in over REST; else empty
}

// Handler returns the routes for callers that show a key.
func (s *Server) Handler() http.Handler { return s.routes(keyAuth{s.db}.byKey) }

// HandlerFor returns the routes for callers whose principal is known without a
// key, such as the person at the operator's local socket.
func (s *Server) HandlerFor(who func(*http.Request) (auth.Principal, error)) http.Handler {
	return s.routes(func(r *http.Request) (caller, error) {
		p, err := who(r)
		return caller{Principal: p}, err
	})
}

// A keyAuth finds the principal of a request by the key or the session token
// that it shows.
type keyAuth struct{ db *store.DB }

func (s keyAuth) byKey(r *http.Request) (caller, error) {
	key, err := door.Credential(r)
	if err != nil {
		return caller{}, err
	}
	if auth.IsBearer(key) {
		p, err := auth.CheckBearer(r.Context(), s.db, key)
		return caller{Principal: p, session: key}, err
	}
	return s.withKey(r.Context(), key)
}

func (s keyAuth) withKey(ctx context.Context, key auth.Secret) (caller, error) {
	p, secret, err := auth.Identify(ctx, s.db, key)
	if err == nil && p.Tools != "" {
		err = auth.ErrToolsOnly
	}
	return caller{Principal: p, key: secret, shown: key}, err
}

// forToolKeys are the routes for keys that name the tools that they may call. Every
// other route refuses them: the attack is to do over REST what the key's tools do not.
var forToolKeys = []string{"GET /v1/me", "POST /v1/inboxes/{inbox}/keys/{id}/rotate"}

// A handler serves one route. An error that it returns is answered as a problem;
// see [classify].
type handler func(w http.ResponseWriter, r *http.Request, c caller) error

// A route is one method of one path.
type route struct {
	method, path string
	body         int64 // largest JSON request body in bytes; 0 means none; negative means a body of any type, of at most -body bytes
	serve        handler
}

// An offer is a route and whether it needs a key.
type offer struct {
	route
	open bool // anonymous callers are served; the caller is then the zero one
}

// offeredIf returns the routes. If the server does not offer what they serve, each
// answers with that.
func offeredIf(offered bool, what string, routes []route) []route {
	if offered {
		return routes
	}
	for i := range routes {
		routes[i].serve = func(http.ResponseWriter, *http.Request, caller) error {
			return fmt.Errorf("%s: %w", what, errNotOffered)
		}
	}
	return routes
}

// table returns the routes that need a key; docs/openapi.yaml describes them.
// Each file of this package declares the routes that it serves.
func (s *Server) table() []route {
	a := access{s.post}
	slots := sendSlots{s.sending}
	watch := s.watcher()
	return slices.Concat(
		meServer{a, s.gate, s.post, s.conf.Offered}.routes(),
		inboxServer{a, s.db, s.post}.routes(),
		modeServer{s.post}.routes(),
		keyServer{a, s.post, s.conf.Tools}.routes(),
		grantServer{a, s.post, s.conf.Tools}.routes(),
		contextServer{a, s.post}.routes(),
		domainServer{s.domains}.routes(),
		secretServer{s.conf.Secrets}.routes(),
		gmailServer{s.conf.Gmail}.routes(),
		connectionServer{s.conf.Connections}.routes(),
		permitServer{s.gate, s.conf.Permits}.routes(),
		traceServer{s.conf.Traces}.routes(),
		commandServer{s.conf.Commands}.routes(),
		runServer{s.conf.Runs, &s.crowd, s.closing}.routes(),
		contractServer{s.conf.Runs}.routes(),
		resultServer{s.conf.Runs, s.conf.Exports, s.conf.Prover}.routes(),
		messageServer{a, s.post}.routes(),
		quarantineServer{a, s.post}.routes(),
		threadServer{a, s.post}.routes(),
		labelServer{a, s.post}.routes(),
		searchServer{a, s.post}.routes(),
		draftServer{a, slots, s.post}.routes(),
		contactServer{a, s.post}.routes(),
		exportServer{a, s.log, s.post, s.exporting}.routes(),
		actionServer{watch, s.gate, s.post}.routes(),
		queueServer{s.gate, s.post}.routes(),
		switchServer{s.gate, s.post}.routes(),
		policyServer{s.gate, s.conf.Book}.routes(),
		eventServer{a, watch, s.post}.routes(),
		webhookServer{a, s.hooks}.routes(),
		notifyServer{s.conf.Notify}.routes(),
		accountServer{s.post}.routes(),
		appServer{s.conf.OAuth}.routes(),
		s.connect().routes(),
		peopleServer{s.db, s.conf.People, strings.TrimSuffix(s.conf.Console, "/")}.routes(),
		s.lobster().routes(),
		sendServer{a, slots, s.gate, s.post}.routes(),
		deliveryServer{s.post}.routes(),
		auditServer{s.db, s.conf.Record}.routes(),
		verificationServer{s.log, s.db, s.conf.Opens}.routes(),
	)
}

// openTable returns the routes that need no key, or check it themselves.
func (s *Server) openTable() []route {
	return slices.Concat(
		documentServer{}.routes(),
		unsubscribeServer{s.post}.routes(),
		socketServer{access{s.post}, s.watcher(), s.log, keyAuth{s.db}}.routes(),
		s.lobster().openRoutes(),
		peopleServer{s.db, s.conf.People, strings.TrimSuffix(s.conf.Console, "/")}.openRoutes(),
		s.connect().openRoutes(),
	)
}

func (s *Server) watcher() watcher { return watcher{s.db, s.post, &s.crowd, s.closing} }

func (s *Server) connect() connectServer {
	return connectServer{s.post, s.connects, &s.conf, s.conf.Prompt}
}

func (s *Server) lobster() lobsterServer {
	return lobsterServer{
		access: access{s.post}, watcher: s.watcher(), sendSlots: sendSlots{s.sending}, log: s.log, db: s.db, post: s.post, hooks: s.hooks,
		keys: keyAuth{s.db}, signups: s.signups, conf: &s.conf,
	}
}

func (s *Server) routes(who func(*http.Request) (caller, error)) http.Handler {
	return s.routesFor(who, func(string, string) error { return nil })
}

// routesFor returns the routes for callers that who finds. It serves those for which
// open returns nil.
func (s *Server) routesFor(who func(*http.Request) (caller, error), open func(method, path string) error) http.Handler {
	all := door.Routes[offer]{}
	for _, rt := range s.table() {
		all.Add(rt.method, rt.path, offer{rt, false})
	}
	for _, rt := range s.openTable() {
		all.Add(rt.method, rt.path, offer{rt, true})
	}
	return all.Handler(func(w http.ResponseWriter, r *http.Request, method string, rt offer) error {
		if err := open(method, rt.path); err != nil {
			return err
		}
		return serve(w, r, who, method, rt)
	}, s.fail)
}

// minRole is the role that a person needs for a route that changes something. A
// route that has no row needs an owner, so that a forgotten row closes the route
// and does not open it. The packages below check the role once more.
var minRole = map[string]auth.Role{
	"DELETE /v1/session":                        auth.Viewer, // their own
	"POST /v1/session/step-up":                  auth.Viewer,
	"POST /v1/notify/test":                      auth.Viewer, // likewise
	"POST /v1/notify/telegram":                  auth.Viewer,
	"DELETE /v1/notify/telegram/{person}":       auth.Viewer,
	"PUT /v1/notify/settings":                   auth.Viewer,
	"DELETE /v1/notify/settings":                auth.Viewer,
	"DELETE /v1/notify/devices/{id}":            auth.Viewer,
	"POST /v1/notify/slack":                     auth.Viewer,
	"POST /v1/notify/slack/lookup":              auth.Viewer,
	"DELETE /v1/notify/slack/{person}":          auth.Viewer,
	"PUT /v1/actions/{id}/snooze":               auth.Reviewer,
	"DELETE /v1/actions/{id}/snooze":            auth.Reviewer,
	"PUT /v1/actions/{id}/assignee":             auth.Reviewer,
	"DELETE /v1/actions/{id}/assignee":          auth.Reviewer,
	"POST /v1/policy/evaluation":                auth.Viewer,   // it changes nothing
	"POST /v1/policy":                           auth.Reviewer, // an owner decides on what is proposed
	"PATCH /v1/inboxes/{inbox}":                 auth.Reviewer, // its mode goes down; the rest is an owner's
	"DELETE /v1/inboxes/{inbox}/allowlist/{id}": auth.Reviewer,
	"POST /v1/actions/{id}/decision":            auth.Reviewer,
	"POST /v1/actions/{id}/resolution":          auth.Reviewer,
	"POST /v1/actions/decisions":                auth.Reviewer,
	"POST /v1/actions/{id}/comments":            auth.Reviewer,
	"POST /v1/actions/{id}/edit":                auth.Reviewer,
	"POST /v1/actions/{id}/narrowing":           auth.Reviewer,
	"DELETE /v1/permits/{id}":                   auth.Reviewer, // it only takes a right away
	"POST /v1/switches":                         auth.Reviewer, // an owner turns it off
	"POST /v1/runs":                             auth.Reviewer, // the review is a separate step
	"PUT /v1/runs/{id}/input":                   auth.Reviewer,
	"POST /v1/runs/{id}/propose":                auth.Reviewer,
	"POST /v1/runs/{id}/cancel":                 auth.Reviewer, // it only takes something away
	"POST /v1/actions/{id}/cancel":              auth.Reviewer,
	"POST /v1/actions/{id}/revision":            auth.Reviewer,
	"POST /v1/quarantine/{id}/release":          auth.Reviewer,
	"POST /v1/quarantine/{id}/drop":             auth.Reviewer,
	"POST /v1/suppression":                      auth.Reviewer,
	"POST /v1/suppression/lookup":               auth.Reviewer,
	"POST /v1/domains/{id}/verify":              auth.Reviewer,
	"POST /v1/signing/{id}/check":               auth.Reviewer,
	"POST /v1/audit/checkpoint":                 auth.Reviewer,
}

// mayAsk refuses a person whose role is below the minimum of a route. Keys have
// no role: the nouns check what they may do.
func mayAsk(c caller, method, path string) error {
	if method == http.MethodGet {
		return nil
	}
	least, ok := minRole[method+" "+path]
	if !ok {
		least = auth.Owner
	}
	return auth.Need(c.Principal, least)
}

// serve serves a request with its route, for the caller that who finds.
func serve(w http.ResponseWriter, r *http.Request, who func(*http.Request) (caller, error), method string, rt offer) error {
	var c caller
	if !rt.open {
		var err error
		c, err = who(r)
		if errors.Is(err, auth.ErrToolsOnly) && slices.Contains(forToolKeys, method+" "+rt.path) {
			err = nil
		}
		if err != nil {
			return err
		}
		if err := mayAsk(c, method, rt.path); err != nil {
			return err
		}
	}
	if r.PathValue("inbox") == "me" && c.Inbox != "" { // no inbox has this name, see [directory.ValidName]
		r.SetPathValue("inbox", c.Inbox)
	}
	if err := door.Admit(w, r, rt.path, rt.body, "inbox"); err != nil {
		return err
	}
	return rt.serve(w, r, c)
}
