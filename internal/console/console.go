// Package console serves the pages on which people review and decide.
//
// Everything is rendered here and works without a script; no page holds one.
// What agents, sandboxes and mail say is hostile: it reaches a page as text
// only, through html/template, with characters that are not seen made visible.
//
// Nothing is decided here. Each page shows what the gate, the fleet and the
// record say; each form is one call of theirs, by a signed-in person, with the
// version and the digest that the person was shown. No GET changes anything: a
// link in a mail that somebody or something fetches shows, and never acts on,
// a request.
package console

import (
	"bytes"
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

	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/sandbox"
	"postern/internal/store"
)

//go:embed static
var static embed.FS

// Config is what the operator sets for the console.
type Config struct {
	// Hosts are the names under which people open the console: "host:port" is
	// matched exactly, "host" with any port. Requests for other names are
	// refused; with none set all are.
	Hosts []string
	// Secure says that people reach the console over HTTPS alone, so that the
	// session's cookie is never sent without.
	Secure bool
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
	signIn  *auth.SignIn
	// verifying has room for one: reading the whole record is work.
	verifying chan struct{}

	mu     sync.Mutex // guards what follows
	briefs map[string]brief
	failed failures
}

// New returns the console of the people in db.
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, fleet *sandbox.Fleet, post *mailbox.PostOffice, domains *domain.Registry, conf Config) *Server {
	conf.Hosts = slices.Clone(conf.Hosts)
	for i, h := range conf.Hosts {
		conf.Hosts[i] = strings.ToLower(h)
	}
	return &Server{
		log: log, db: db, gate: gate, fleet: fleet, post: post, domains: domains, conf: conf, signIn: auth.NewSignIn(db),
		verifying: make(chan struct{}, 1), briefs: map[string]brief{},
	}
}

// A route is one method of one path.
type route struct {
	method, path string
	open         bool // for those who are not signed in, too; who is then nobody
	serve        func(*Server, http.ResponseWriter, *http.Request, auth.Principal) error
}

// table is all that there is. HEAD is served as GET.
var table = []route{
	{"GET", "/console/{$}", false, (*Server).queue},
	{"GET", "/console/actions/{id}", false, (*Server).action},
	{"GET", "/console/actions/{id}/text", false, (*Server).text},
	{"POST", "/console/actions/{id}/decision", false, (*Server).decide},
	{"POST", "/console/actions/{id}/resolution", false, (*Server).resolve},
	{"POST", "/console/actions/{id}/cancel", false, (*Server).cancel},
	{"GET", "/console/decided", false, (*Server).decided},
	{"GET", "/console/sandboxes", false, (*Server).sandboxes},
	{"GET", "/console/sandboxes/{id}", false, (*Server).sandbox},
	{"POST", "/console/sandboxes/{id}/kill", false, (*Server).kill},
	{"GET", "/console/inboxes", false, (*Server).inboxes},
	{"POST", "/console/inboxes", false, (*Server).createInbox},
	{"GET", "/console/inboxes/{id}", false, (*Server).inbox},
	{"POST", "/console/inboxes/{id}/settings", false, (*Server).changeInbox},
	{"POST", "/console/inboxes/{id}/limits", false, (*Server).limitInbox},
	{"POST", "/console/inboxes/{id}/delete", false, (*Server).deleteInbox},
	{"POST", "/console/inboxes/{id}/restore", false, (*Server).restoreInbox},
	{"POST", "/console/inboxes/{id}/revoke", false, (*Server).revokeKey},
	{"GET", "/console/recover", false, (*Server).recoverForm},
	{"POST", "/console/recover", false, (*Server).recoverInbox},
	{"GET", "/console/quarantine", false, (*Server).quarantine},
	{"POST", "/console/quarantine/{id}/release", false, (*Server).releaseMessage},
	{"POST", "/console/quarantine/{id}/drop", false, (*Server).dropMessage},
	{"GET", "/console/sending", false, (*Server).sending},
	{"POST", "/console/sending/lookup", false, (*Server).lookUp},
	{"POST", "/console/sending/suppression", false, (*Server).suppress},
	{"POST", "/console/sending/lift", false, (*Server).lift},
	{"GET", "/console/domains", false, (*Server).domainList},
	{"POST", "/console/domains", false, (*Server).addDomain},
	{"GET", "/console/domains/{id}", false, (*Server).domain},
	{"POST", "/console/domains/{id}/check", false, (*Server).checkDomain},
	{"POST", "/console/domains/{id}/remove", false, (*Server).removeDomain},
	{"GET", "/console/audit", false, (*Server).audit},
	{"POST", "/console/audit/verify", false, (*Server).verify},
	{"GET", "/console/setup", true, (*Server).setupPage},
	{"POST", "/console/setup", true, (*Server).setup},
	{"GET", "/console/signin", true, (*Server).signInPage},
	{"POST", "/console/signin", true, (*Server).signin},
	{"POST", "/console/signout", true, (*Server).signout},
	{"GET", "/console/static/{name}", true, (*Server).static},
}

// Handler returns all routes. They are below /console/.
func (s *Server) Handler() http.Handler {
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
			if err := s.serve(w, r, methods); err != nil {
				s.fail(w, r, err)
			}
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.fail(w, r, fmt.Errorf("page: %w", store.ErrNotFound))
	})
	// The attack: a page of another origin, that of a sandbox on this very
	// host included, whose form or script decides in a person's name.
	p := http.NewCrossOriginProtection()
	p.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.fail(w, r, errOrigin) }))
	inner := p.Handler(mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		guard(w.Header())
		// The attack: a name of the attacker's that resolves to this machine
		// (DNS rebinding). To the browser its pages are of our origin then.
		if !s.knows(r.Host) {
			s.fail(w, r, errHost)
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxForm)
		inner.ServeHTTP(w, r)
	})
}

// guard sets what holds for every answer: nothing but our own style and icon
// is loaded, nobody frames a page, and nothing is kept.
func guard(h http.Header) {
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
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

func (s *Server) serve(w http.ResponseWriter, r *http.Request, methods map[string]route) error {
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
	var who auth.Principal
	if !rt.open {
		var err error
		if who, err = s.session(r); err != nil {
			return err
		}
	}
	if method == http.MethodPost {
		// Not the query: a link cannot fill a form.
		if err := r.ParseForm(); err != nil {
			return formError(err)
		}
	}
	return rt.serve(s, w, r, who)
}

// session returns the person who is signed in. Nothing but the cookie counts:
// a key, wherever it is put, is not a person.
func (s *Server) session(r *http.Request) (auth.Principal, error) {
	c, err := r.Cookie(s.cookie())
	if err != nil || c.Value == "" {
		return auth.Principal{}, auth.ErrUnauthenticated
	}
	return auth.CheckSession(r.Context(), s.db, auth.Secret(c.Value))
}

// version names the static files of this build, so that they may be kept.
var version = func() string {
	b, err := static.ReadFile("static/style.css")
	if err != nil {
		panic(err) // unreachable: it is embedded
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:6])
}()

func (s *Server) static(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	name := r.PathValue("name")
	b, err := static.ReadFile("static/" + name)
	if err != nil {
		return fmt.Errorf("file %q: %w", name, store.ErrNotFound)
	}
	w.Header().Set("Cache-Control", "public, max-age=86400")
	http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(b))
	return nil
}
