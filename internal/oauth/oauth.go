// Package oauth lets programs connect themselves to an inbox by OAuth 2.1, as the Model
// Context Protocol asks of remote servers: they register (RFC 7591), a signed-in person
// consents in the console, and they get short-lived tokens.
//
// A connection is one key of one inbox, with the scopes that the person chose. The
// secret of the key is stored only under keys that follow from the code and the tokens
// (see [seal.UnderToken]), and these only by their hashes. So the server opens the inbox
// only while the program shows a token; the end of a token deletes a row, and the end of
// the connection revokes the key and re-keys the inbox.
//
//	asked ── a person allows ──▶ code (10 min, once) ──▶ access token (1 h)
//	                                                └──▶ refresh token (30 days, once) ──▶ the next pair
//
// A code or a refresh token that comes a second time was copied: the connection ends.
//
// The package decides nothing for a person. It never redirects a browser to a program
// before a signed-in person has answered, and gives no program the scope full.
package oauth

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/seal"
	"postern/internal/site"
	"postern/internal/store"
)

// The lifetimes.
const (
	CodeTime    = 10 * time.Minute
	AccessTime  = time.Hour
	RefreshTime = 30 * 24 * time.Hour // from the last exchange
)

// The paths of the console's pages, to which the authorization endpoint leads.
const (
	ConsentPath = "/console/connect"
	AppsPath    = "/console/apps"
)

// ErrNoApp means that there is no such connection in the project.
var ErrNoApp = errors.New("no such connected app")

// Scopes are those that a program can ask for. None manages an inbox.
var Scopes = []seal.Scope{seal.Read, seal.Draft, seal.Send}

// Config is what the operator sets.
type Config struct {
	// Site says where this server is reached.
	Site site.Site
}

// Server registers programs, takes the answers of people, and issues tokens. It is safe
// for concurrent use.
type Server struct {
	log   *slog.Logger
	db    *store.DB
	post  *mailbox.PostOffice
	conf  Config
	rates rates
}

// New returns the server of the inboxes in post.
func New(log *slog.Logger, db *store.DB, post *mailbox.PostOffice, conf Config) *Server {
	return &Server{log: log, db: db, post: post, conf: conf}
}

// Base returns the URL of this server as the caller of r knows it, without a slash at its
// end. It is the issuer of all tokens.
func (s *Server) Base(r *http.Request) string { return s.conf.Site.URL(r) }

// Run removes what has ended, once an hour, until ctx is done.
func (s *Server) Run(ctx context.Context) error {
	t := time.NewTicker(time.Hour)
	defer t.Stop()
	for {
		if err := s.Sweep(ctx); err != nil && ctx.Err() == nil {
			s.log.WarnContext(ctx, "remove ended connections", "err", err)
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// system is who ends connections by their rules.
func system(project string) auth.Principal {
	return auth.Principal{Kind: auth.System, ID: "oauth", Project: project}
}
