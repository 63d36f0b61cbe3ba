// Package console serves the pages on which people review and decide.
//
// Pages are rendered on the server and work without scripts. The only script on
// most pages refreshes stale content, and never discards what a person typed.
// Text from agents, sandboxes and mail is hostile: it reaches a page only as
// text through html/template, with invisible characters made visible.
//
// The console makes no decisions. Pages show the state of the gate, the fleet
// and the audit log; each form makes one call to them for a signed-in person,
// with the version and digest that the page showed. No GET changes anything, so
// a link preview or a mail scanner cannot act on a request.
package console

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/domain"
	"postern/internal/door"
	"postern/internal/gmail"
	"postern/internal/inside"
	"postern/internal/mailbox"
	"postern/internal/notify"
	"postern/internal/oauth"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/sandbox"
	"postern/internal/secret"
	"postern/internal/store"
	"postern/internal/webhook"
)

//go:embed static
var static embed.FS

// Config is the configuration of the console.
type Config struct {
	// Hosts are the names under which people open the console: "host:port" is
	// matched exactly, "host" with any port. Requests for other names are
	// refused; without any name, all requests are.
	Hosts []string
	// Secure says that people reach the console over HTTPS alone, so that the
	// session cookie is never sent without TLS.
	Secure bool
	// People are the people who can sign in, and their second factors. Required.
	People *people.People
	// Book has the versions of the policy. Required.
	Book *rulebook.Book
	// Hooks are the webhooks. Required.
	Hooks *webhook.Hooks
	// Secrets are the secrets for sandboxes; nil means that there are none.
	Secrets *secret.Store
	// Mailboxes are the connections to mailboxes at other providers; nil means that the
	// server connects none.
	Mailboxes *connector.Connections
	Gmail     *gmail.SignIns // nil means that this server connects no mailboxes at Gmail
	// Permits are the permits that people have given sandboxes for a time; nil means that
	// there are none.
	Permits *permit.Register
	// Ceiling is the most that sandboxes may connect to, as the wall has it.
	Ceiling policy.Ceiling
	// Runs are the runs of all projects; nil means that the server makes none.
	Runs Runs
	// RunFiles and RunReports are the results of runs; nil means that nothing is kept.
	RunFiles   RunFiles
	RunReports RunReports
	// Notify notifies people of waiting actions; nil disables notifications.
	Notify *notify.Notifier
	// Prompt returns the sentence with which an agent connects itself with a code; nil means
	// that the code alone is shown.
	Prompt func(code string) string
	// Record makes the audit's checkpoints; nil means that none are made.
	Record *audit.Keeper
	// OAuth connects programs that an owner allows; nil means that none connect.
	OAuth *oauth.Server
	// Samples are the measurements of sandboxes; nil means that there are none.
	Samples *sandbox.Sampler
	// Logs are the logs of guests; nil means that none are kept.
	Logs *sandbox.Logbook
	// Casts are the recordings of terminals; nil means that none are made.
	Casts *inside.Casts
	// PortAddress returns the URL at which a port of a sandbox is reached; nil means that
	// this server has no domain for them.
	PortAddress func(id string, port uint16) string
	// RecordKeys returns the public keys of checkpoints; nil means that there are none.
	RecordKeys func(context.Context) ([]audit.Key, error)
	// Data is the data directory, whose size the disk page shows; empty means that the
	// directory is not measured. [Server.Run] measures it.
	Data string
	// Commands are the records of programs in sandboxes; nil means that none are kept.
	Commands Commands
	// Inside is the transport to the guests of sandboxes; nil means that of the fleet.
	Inside http.RoundTripper
	// Builds are the builds of templates; nil means that the server makes none.
	Builds Builds
	// KeepPaused is how long a paused sandbox is kept; 0 means for ever.
	KeepPaused time.Duration
}

// maxForm bounds the body of a request, in bytes.
const maxForm = 64 << 10

// Server serves the console. It is safe for concurrent use.
type Server struct {
	log     *slog.Logger
	db      *store.DB
	gate    *oversight.Gate
	fleet   *sandbox.Fleet
	post    *mailbox.PostOffice
	domains *domain.Registry
	conf    Config
	// verifying has capacity 1: reading the whole audit log is expensive.
	verifying chan struct{}
	disk      *diskMeter
	inside    *inside.Door
	shells    shells        // open terminals
	drawing   chan struct{} // has capacity 2: a picture takes up to 200 MB while it is drawn
	closed    chan struct{} // by Close
	closing   sync.Once

	mu     sync.Mutex // guards what follows
	briefs map[string]brief
	pulses map[string]pulse // by project
	live   map[string]int   // streams of events by person
	read   verification     // the newest verification of the whole record
}

// New returns the console of the people in db.
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, fleet *sandbox.Fleet, post *mailbox.PostOffice, domains *domain.Registry, conf Config) *Server {
	if conf.Inside == nil {
		conf.Inside = fleet.Transport()
	}
	conf.Hosts = slices.Clone(conf.Hosts)
	for i, h := range conf.Hosts {
		conf.Hosts[i] = strings.ToLower(h)
	}
	return &Server{
		log: log, db: db, gate: gate, fleet: fleet, post: post, domains: domains, conf: conf,
		verifying: make(chan struct{}, 1), disk: newDiskMeter(conf.Data), drawing: make(chan struct{}, 2), closed: make(chan struct{}), briefs: map[string]brief{},
		pulses: map[string]pulse{}, live: map[string]int{}, inside: inside.New(fleet, conf.Inside), shells: shells{tickets: map[string]ticket{}},
	}
}

// A right is the least access that a route requires.
type right string

// The rights, from none to an owner's. The packages behind the forms check roles
// again; this first check also decides which pages a viewer can open.
const (
	open    right = ""       // no session needed; the handler gets the zero Principal
	views   right = "view"   // any signed-in person
	decides right = "decide" // a reviewer or an owner
	manages right = "manage" // an owner
)

// holds reports whether who has the right.
func (r right) holds(who auth.Principal) bool {
	switch r {
	case open:
		return true
	case views:
		return who.Kind == auth.Person
	case decides:
		return who.Decides()
	case manages:
		return who.Manages()
	}
	return false
}

// A route is one method of one path.
type route struct {
	method, path string
	needs        right
	serve        func(http.ResponseWriter, *http.Request, auth.Principal) error
}

// table returns all routes; each file of this package declares those that it
// serves. HEAD is served as GET.
func (s *Server) table() []route {
	return slices.Concat(
		overviewHandlers{reviews{s}}.routes(),
		diskHandlers{s}.routes(),
		agentHandlers{s}.routes(),
		queueHandlers{reviews{s}}.routes(),
		liveHandlers{s}.routes(),
		batchHandlers{reviews{s}}.routes(),
		actionHandlers{reviews{s}}.routes(),
		putOffHandlers{actionHandlers{reviews{s}}}.routes(),
		contentHandlers{reviews{s}}.routes(),
		attachmentHandlers{reviews{s}}.routes(),
		contextHandlers{reviews{s}}.routes(),
		editHandlers{actionHandlers{reviews{s}}}.routes(),
		sandboxHandlers{reviews{s}}.routes(),
		fileHandlers{sandboxHandlers{reviews{s}}}.routes(),
		shellHandlers{sandboxHandlers{reviews{s}}}.routes(),
		runHandlers{s}.routes(),
		inboxHandlers{s}.routes(),
		quarantineHandlers{reviews{s}}.routes(),
		sendingHandlers{reviews{s}}.routes(),
		domainHandlers{s}.routes(),
		modeHandlers{inboxHandlers{s}}.routes(),
		policyHandlers{reviews{s}}.routes(),
		switchHandlers{s}.routes(),
		webhookHandlers{s}.routes(),
		secretHandlers{s}.routes(),
		mailboxHandlers{s}.routes(),
		gmailHandlers{mailboxHandlers{s}}.routes(),
		permitHandlers{actionHandlers{reviews{s}}}.routes(),
		keyHandlers{s}.routes(),
		connectHandlers{s}.routes(),
		auditHandlers{s}.routes(),
		signInHandlers{s}.routes(),
		stepUpHandlers{s}.routes(),
		accountHandlers{s}.routes(),
		notificationHandlers{s}.routes(),
		peopleHandlers{reviews{s}}.routes(),
		[]route{{"GET", "/console/static/{name}", open, s.static}},
	)
}

// Handler returns all routes. They are below /console/.
func (s *Server) Handler() http.Handler {
	all := door.Routes[route]{}
	for _, rt := range s.table() {
		all.Add(rt.method, rt.path, rt)
	}
	inner := all.Handler(s.serve, s.fail)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		guard(w.Header())
		// The attack: DNS rebinding. A host name of the attacker resolves to this
		// machine, so that for the browser the attacker's pages share our origin.
		if !s.knows(r.Host) {
			s.fail(w, r, errHost)
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxForm)
		inner.ServeHTTP(w, r)
	})
}

// guard sets the security headers of every response: only our own styles, icons
// and scripts load, no other page can frame ours, and nothing is cached.
// frame-src 'self' also keeps the mail frame from navigating to another site
// when a reviewer clicks a link in a mail.
// worker-src and manifest-src are for push messages and for installing the console:
// without them default-src refuses both. The attack that 'self' stops is a worker of
// another site, which would outlive the page; ours handles no requests.
func guard(h http.Header) {
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; img-src 'self'; script-src 'self'; connect-src 'self'; frame-src 'self'; worker-src 'self'; manifest-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer") // the set-up link's token is in its address
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}

func (s *Server) knows(host string) bool {
	host = strings.ToLower(host)
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host // without a port
	}
	return host != "" && (slices.Contains(s.conf.Hosts, host) || slices.Contains(s.conf.Hosts, name))
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, method string, rt route) error {
	var who auth.Principal
	if rt.needs != open {
		var err error
		if who, err = s.session(r); err != nil {
			return err
		}
		if !rt.needs.holds(who) {
			return fmt.Errorf("%s: the %s right is required: %w", rt.path, rt.needs, auth.ErrForbidden)
		}
	}
	if method == http.MethodPost {
		// Handlers read PostForm, not the query: a link cannot fill a form.
		if err := r.ParseForm(); err != nil {
			return formError(err)
		}
	}
	return rt.serve(w, r, who)
}

// session returns the signed-in person. Only the session cookie is accepted: a
// key, wherever the request carries it, never identifies a person.
func (s *Server) session(r *http.Request) (auth.Principal, error) {
	c, err := r.Cookie(s.cookie())
	if err != nil || c.Value == "" {
		return auth.Principal{}, auth.ErrUnauthenticated
	}
	return auth.CheckSession(r.Context(), s.db, auth.Secret(c.Value))
}

// version identifies the static files of this build in their URLs, so that
// browsers can cache them.
var version = sync.OnceValue(func() string {
	h := sha256.New()
	for _, name := range []string{"style.css", "live.js", "keys.js", "passkey.js", "terminal.js", "xterm.js", "xterm-fit.js", "xterm.css", "push.js", "manifest.webmanifest"} {
		b, err := static.ReadFile("static/" + name)
		if err != nil {
			panic(err) // unreachable: it is embedded
		}
		h.Write(b)
	}
	return hex.EncodeToString(h.Sum(nil)[:6])
})

func (s *Server) static(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	name := r.PathValue("name")
	b, err := static.ReadFile("static/" + name)
	if err != nil {
		return fmt.Errorf("file %q: %w", name, store.ErrNotFound)
	}
	w.Header().Set("Cache-Control", "public, max-age=86400")
	if strings.HasSuffix(name, ".webmanifest") { // Go and many systems do not know this type
		w.Header().Set("Content-Type", "application/manifest+json")
	}
	http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(b))
	return nil
}
