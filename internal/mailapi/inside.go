package mailapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"golang.org/x/time/rate"

	"postern/internal/auth"
)

// insideRoutes are the routes that code in a sandbox may use, for the inbox that the
// sandbox's creator attached. A route that has no row is closed to sandboxes, so that a
// forgotten row closes the route and does not open it. What reads mail needs the lent key
// too, see [keyring.Ring.Lent].
var insideRoutes = map[string]bool{
	"GET /v1/me":              true,
	"GET /v1/inboxes":         true, // its own
	"GET /v1/inboxes/{inbox}": true,

	"GET /v1/inboxes/{inbox}/messages":                          true,
	"POST /v1/inboxes/{inbox}/messages":                         true,
	"GET /v1/inboxes/{inbox}/messages/wait":                     true,
	"GET /v1/inboxes/{inbox}/messages/{id}":                     true,
	"GET /v1/inboxes/{inbox}/messages/{id}/raw":                 true,
	"GET /v1/inboxes/{inbox}/messages/{id}/attachments/{index}": true,
	"POST /v1/inboxes/{inbox}/messages/{id}/reply":              true,
	"POST /v1/inboxes/{inbox}/messages/{id}/forward":            true,
	"GET /v1/inboxes/{inbox}/threads":                           true,
	"GET /v1/inboxes/{inbox}/threads/{id}":                      true,
	"GET /v1/inboxes/{inbox}/search":                            true,
	"GET /v1/inboxes/{inbox}/contacts":                          true,
	"GET /v1/inboxes/{inbox}/events":                            true,
	"GET /v1/inboxes/{inbox}/labels":                            true,
	"POST /v1/inboxes/{inbox}/labels":                           true, // a lent key reads, and so this tells why not
	"GET /v1/inboxes/{inbox}/quarantine":                        true,
	"GET /v1/inboxes/{inbox}/quarantine/{id}":                   true,

	"GET /v1/inboxes/{inbox}/drafts":                          true,
	"POST /v1/inboxes/{inbox}/drafts":                         true,
	"GET /v1/inboxes/{inbox}/drafts/{id}":                     true,
	"POST /v1/inboxes/{inbox}/drafts/{id}":                    true, // as for labels
	"DELETE /v1/inboxes/{inbox}/drafts/{id}":                  true,
	"GET /v1/inboxes/{inbox}/drafts/{id}/attachments/{index}": true,
	"POST /v1/inboxes/{inbox}/drafts/{id}/send":               true,

	"GET /v1/inboxes/{inbox}/sending":             true,
	"GET /v1/inboxes/{inbox}/allowlist":           true,
	"POST /v1/inboxes/{inbox}/allowlist/requests": true, // a person decides
	"POST /v1/inboxes/{inbox}/request-upgrade":    true, // likewise

	"GET /v1/actions":                 true,
	"GET /v1/actions/{id}":            true,
	"GET /v1/actions/{id}/comments":   true,
	"GET /v1/actions/{id}/deliveries": true,
	"POST /v1/actions/{id}/cancel":    true, // what this sandbox proposed
	"POST /v1/actions/{id}/revision":  true, // likewise

	"GET /v1/openapi.yaml":    true,
	"GET /v1/openapi.json":    true,
	"GET /v1/problems/{code}": true,
}

// mayInside refuses a route that is closed to sandboxes, and says why.
func mayInside(method, path string) error {
	if insideRoutes[method+" "+path] {
		return nil
	}
	why := "it is for those who manage the project"
	switch {
	case strings.Contains(path, "/decision"), strings.HasSuffix(path, "/resolution"), strings.HasSuffix(path, "/edit"), strings.HasSuffix(path, "/narrowing"),
		strings.HasSuffix(path, "/approvals"), strings.HasSuffix(path, "/revisions"), strings.HasSuffix(path, "/release"), strings.HasSuffix(path, "/drop"):
		why = "only a person decides"
	case strings.Contains(path, "/keys"), strings.Contains(path, "grants"), strings.Contains(path, "recover"), strings.HasSuffix(path, "/export"), strings.HasSuffix(path, "/webhooks"):
		why = "it needs the inbox's full key, outside of the sandbox"
	case strings.Contains(path, "/connect"):
		why = "agents outside connect themselves so"
	case strings.Contains(path, "/session"), strings.Contains(path, "/people"):
		why = "people sign in elsewhere"
	case strings.Contains(path, "/email"), strings.HasSuffix(path, "/ws"):
		why = "use /v1/inboxes/me/messages, /v1/inboxes/me/events and /v1/inboxes/me/search"
	}
	return fmt.Errorf("code in a sandbox may not use %s %s: %s: %w", method, path, why, auth.ErrForbidden)
}

// What one sandbox may ask for. It cannot be kept from asking, but from using up the
// server.
const (
	insidePerSecond = 50
	insideAtOnce    = 200 // a burst
	insideBusy      = 32  // requests in progress
)

var errInsideOften = fmt.Errorf("at most %d requests a second and %d at the same time: %w", insidePerSecond, insideBusy, errCrowded)

// Inside returns the routes for the sandbox who, below /v1. No key is needed: the link
// says who calls.
//
// The attack: code inside shows a key, which it found or was given, to do more than its
// sandbox may, or to find out whether the key is good. So the header Authorization, and
// each other with a key, is not read here at all.
func (s *Server) Inside(who auth.Principal) http.Handler {
	routes := s.routesFor(func(*http.Request) (caller, error) {
		if who.Kind != auth.Sandbox {
			return caller{}, auth.ErrUnauthenticated
		}
		return caller{Principal: who}, nil
	}, mayInside)
	often, busy := rate.NewLimiter(insidePerSecond, insideAtOnce), make(chan struct{}, insideBusy)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case busy <- struct{}{}:
			defer func() { <-busy }()
		default:
			s.fail(w, r, errInsideOften)
			return
		}
		if !often.Allow() {
			w.Header().Set("Retry-After", "1")
			s.fail(w, r, errInsideOften)
			return
		}
		routes.ServeHTTP(w, r)
	})
}

// errNoInbox is the answer to a sandbox without an inbox.
var errNoInbox = fmt.Errorf("this sandbox has no inbox: its creator can attach one with the metadata entry postern.inbox: %w", auth.ErrForbidden)

// canRead reports whether a sandbox was lent a key that reads its inbox, or why not.
func (s access) canRead(ctx context.Context, who auth.Principal) (ok bool, why string, err error) {
	_, err = s.post.Keys.Lent(ctx, who)
	if errors.Is(err, auth.ErrForbidden) {
		return false, strings.TrimSuffix(err.Error(), ": "+auth.ErrForbidden.Error()), nil
	}
	return err == nil, "", err
}
