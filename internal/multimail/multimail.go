// Package multimail serves the REST API of MultiMail, for programs that were
// written for it and only get another base URL: its MCP server, its SDKs. Paths
// begin with /v1; the server mounts them at /multimail.
//
// It is a thin facade over the nouns of this program, and gives no right that
// they do not give. A key is one of ours: mm_live_… is a grant or an account
// (pgr_…) under another prefix, and a key of an inbox (pib_…) works as well. A
// mailbox is an inbox, an email a message (msg_…) or, until it has left, an action
// (act_…).
//
// The package must not send mail or decide by itself. MultiMail's scope oversight
// lets a key approve. Here only a signed-in person (pse_…) does, and only what
// they were shown. What does not exist here, such as billing, is answered with
// 501 and a sentence.
package multimail

import (
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/door"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/semaphore"
	"postern/internal/store"
	"postern/internal/webhook"
)

// Path is where the server mounts [Server.Handler].
const Path = "/multimail"

// KeyPrefix is what MultiMail's keys begin with. What follows is the random part
// of a grant or an account.
const KeyPrefix = "mm_live_"

const (
	maxBody = 1 << 20  // bytes of a request that brings no attachments
	maxSend = 36 << 20 // bytes of one that may: 25 MB in base64, and its text
	// maxSending bounds concurrent sends: each holds several copies of its message
	// in memory.
	maxSending     = 4
	maxSendingEach = 2 // of one mailbox
)

// answerTime is how long who reads a large answer may take for it.
const answerTime = time.Minute

// Config is what a [Server] works with.
type Config struct {
	Domains  *domain.Registry // required
	Webhooks *webhook.Hooks   // required
}

// Server serves the routes. It is safe for concurrent use.
type Server struct {
	log     *slog.Logger
	db      *store.DB
	gate    *oversight.Gate
	post    *mailbox.PostOffice
	conf    Config
	sending *semaphore.Keyed
}

// New returns a server of the inboxes in post and the actions in gate.
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, post *mailbox.PostOffice, c Config) *Server {
	return &Server{log: log, db: db, gate: gate, post: post, conf: c, sending: semaphore.New(maxSending, maxSendingEach)}
}

// A caller is the principal of a request, with the credential that it showed.
type caller struct {
	auth.Principal
	key auth.Secret // empty for people
}

// KeyFor returns a token of an account or a grant as programs for MultiMail show
// it, or the token itself if it is neither.
func KeyFor(token string) string {
	if bare, ok := strings.CutPrefix(token, "pgr_"); ok {
		return KeyPrefix + bare
	}
	return token
}

// who returns the caller of a request.
func (s *Server) who(r *http.Request) (caller, error) {
	key, err := door.Credential(r)
	if err != nil {
		return caller{}, err
	}
	if auth.IsBearer(key) {
		p, err := auth.CheckBearer(r.Context(), s.db, key)
		return caller{Principal: p}, err
	}
	// The same secret under another name. It is translated here and nowhere else, so
	// that one revocation ends it everywhere.
	if bare, ok := strings.CutPrefix(key.Reveal(), KeyPrefix); ok {
		key = auth.Secret("pgr_" + bare)
	}
	p, err := auth.CheckKey(r.Context(), s.db, key)
	if err == nil && p.Kind == auth.Recovery {
		err = fmt.Errorf("a recovery key makes a new key of its inbox and does nothing else: %w", auth.ErrForbidden)
	}
	return caller{Principal: p, key: key}, err
}

// A route is one method of one path.
type route struct {
	method, path string
	body         int64 // largest JSON request body in bytes; 0 means that none is read
	open         bool  // it needs no key: it tells everybody the same
	role         auth.Role
	serve        func(w http.ResponseWriter, r *http.Request, c caller) error
}

// table returns all routes. Each file of this package declares those that it serves.
// A person needs the role of a route, if it changes something; without one, the
// role is that of an owner, so that a forgotten role closes the route.
func (s *Server) table() []route {
	return slices.Concat(
		s.mailboxRoutes(), s.emailRoutes(), s.sendRoutes(), s.spamRoutes(), s.contactRoutes(), s.oversightRoutes(),
		s.accountRoutes(), s.keyRoutes(), s.webhookRoutes(), s.domainRoutes(), s.recordRoutes(), s.absentRoutes(),
	)
}

// Handler returns the routes.
func (s *Server) Handler() http.Handler {
	all := door.Routes[route]{}
	for _, rt := range s.table() {
		all.Add(rt.method, rt.path, rt)
	}
	return all.Handler(s.serve, s.fail)
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, method string, rt route) error {
	var c caller
	if !rt.open {
		var err error
		if c, err = s.who(r); err != nil {
			return err
		}
		if method != http.MethodGet {
			least := rt.role
			if least == "" {
				least = auth.Owner
			}
			if err := auth.Need(c.Principal, least); err != nil {
				return err
			}
		}
	}
	if err := door.Admit(w, r, rt.path, rt.body, "mailbox"); err != nil {
		return err
	}
	return rt.serve(w, r, c)
}
