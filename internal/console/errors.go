package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/door"
	"postern/internal/oauth"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/sandbox"
	"postern/internal/secret"
	"postern/internal/store"
	"postern/internal/webhook"
)

var (
	errHost = errors.New("the console is not served under this name")
	errLink = errors.New("the link is not valid")
	// errForm means that a form or an address is not valid; the text says why.
	errForm = errors.New("invalid request")
)

// formError returns the error of a body that could not be read.
func formError(err error) error {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return err
	}
	return fmt.Errorf("%w: the form could not be read", errForm)
}

// A failure is the page that is shown instead of the requested one.
type failure struct {
	status      int
	Title, Text string
	Link, Label string // where to go from here; may be empty
}

// fail renders the error page for err. This is the console's only table from
// errors to statuses; unknown errors are logged and reported as internal.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	var tooBig *http.MaxBytesError
	var app *oauth.Error
	f := failure{http.StatusInternalServerError, "Internal error", "An unexpected error occurred. See the server log for details.", "/console/review", "Go to the queue"}
	switch {
	case errors.Is(err, errHost):
		f = failure{
			http.StatusMisdirectedRequest, "Unknown host name",
			"The console accepts only configured host names, to prevent DNS rebinding. Open the address that the server printed at startup, or start the server with --host and this name.", "", "",
		}
	case errors.Is(err, door.ErrOrigin):
		f = failure{
			http.StatusForbidden, "Refused",
			"The request came from another site. Nothing was changed. If you intended this, use the console directly.", "/console/review", "Go to the queue",
		}
	case errors.Is(err, auth.ErrUnauthenticated):
		back := signInAddress(returnPath(r))
		if r.Method == http.MethodGet || r.Method == http.MethodHead {
			http.Redirect(w, r, back, http.StatusSeeOther)
			return
		}
		f = failure{http.StatusUnauthorized, "Signed out", "Your session has ended. Nothing was changed. Sign in and try again.", back, "Sign in"}
	case errors.Is(err, errLink):
		f = failure{
			http.StatusGone, "This link cannot be used",
			"A setup link creates one account and expires after 24 hours. This link is incomplete, expired or already used. If you did not use it yourself, tell the operator; \u201cpostern setup\u201d on the server creates a new one.", "/console/signin", "Sign in",
		}
	case errors.Is(err, auth.ErrStepUp):
		back := "/console/stepup?" + url.Values{"next": {returnPath(r)}}.Encode()
		if r.Method == http.MethodGet || r.Method == http.MethodHead {
			http.Redirect(w, r, back, http.StatusSeeOther)
			return
		}
		f = failure{
			http.StatusForbidden, "Confirm it’s you",
			"This operation requires a recent second factor, because a session can be stolen. Nothing was changed. Confirm your second factor, then try again.", back, "Confirm with a second factor",
		}
	case errors.Is(err, auth.ErrForbidden):
		f = failure{http.StatusForbidden, "Not allowed", "Your role does not allow this. Nothing was changed.", "/console/review", "Go to the queue"}
	case errors.As(err, &tooBig):
		f = failure{http.StatusRequestEntityTooLarge, "Too large", fmt.Sprintf("A form may hold at most %d bytes. Nothing was changed.", tooBig.Limit), "/console/review", "Go to the queue"}
	case errors.Is(err, errForm):
		f = failure{http.StatusBadRequest, "Invalid request", sentence(strings.TrimPrefix(err.Error(), errForm.Error()+": ")), "/console/review", "Go to the queue"}
	case errors.As(err, &app):
		f = failure{http.StatusBadRequest, "This app cannot be connected", "Its request is not valid. " + sentence(app.Detail) + " Nothing was sent to the app.", "/console/review", "Go to the queue"}
	case errors.Is(err, errOther):
		f = failure{http.StatusConflict, "Changed", "The action's content has changed since the page was loaded, or is no longer stored. Open the action again.", "/console/review", "Go to the queue"}
	case errors.Is(err, oversight.ErrStale):
		f = failure{http.StatusConflict, "Changed", sentence(oversight.ErrStale.Error()), "/console/review", "Go to the queue"}
	case errors.Is(err, errStreams):
		f = failure{http.StatusTooManyRequests, "Too many pages", "You have too many console pages open. Close some of them.", "/console/review", "Go to the queue"}
	case errors.Is(err, door.ErrMethod):
		f = failure{http.StatusMethodNotAllowed, "Method not allowed", "Nothing was changed. Use the buttons on the page; links never change anything.", "/console/review", "Go to the queue"}
	case errors.Is(err, store.ErrNotFound), errors.Is(err, people.ErrNotFound), errors.Is(err, sandbox.ErrNotFound), errors.Is(err, directory.ErrNoInbox), errors.Is(err, webhook.ErrNotFound), errors.Is(err, secret.ErrNotFound):
		f = failure{http.StatusNotFound, "Not found", "This page does not exist, or you do not have access to it.", "/console/review", "Go to the queue"}
	case errors.Is(err, context.Canceled):
		s.log.DebugContext(r.Context(), "caller left", "method", r.Method, "path", r.URL.Path)
	case store.DiskFull(err):
		f = failure{http.StatusInsufficientStorage, "The disk is full", sentence(store.DiskFullText), "/console/disk", "See what takes space"}
		s.log.ErrorContext(r.Context(), "serve console", "method", r.Method, "path", r.URL.Path, "err", err)
	default:
		s.log.ErrorContext(r.Context(), "serve console", "method", r.Method, "path", r.URL.Path, "err", err)
	}
	if err := s.render(r.Context(), w, f.status, page{Name: "failure", Title: f.Title, Body: f}); err != nil {
		s.log.ErrorContext(r.Context(), "render failure", "err", err)
		http.Error(w, "internal error", http.StatusInternalServerError)
	}
}

func sentence(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:] + "."
}

func signInAddress(next string) string {
	if next == "/console/" {
		return "/console/signin"
	}
	return "/console/signin?" + url.Values{"next": {next}}.Encode()
}

// returnPath returns where to go after signing in: the requested page, or the page of the
// form that was sent.
func returnPath(r *http.Request) string {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return localPath(r.URL.RequestURI())
	}
	p := r.URL.EscapedPath()
	switch {
	case p == "/console/inboxes/invite", strings.HasPrefix(p, "/console/inboxes/codes/"):
		return "/console/inboxes"
	case strings.HasPrefix(p, "/console/mailboxes/gmail/"):
		return "/console/mailboxes"
	case strings.HasPrefix(p, "/console/quarantine/"):
		return "/console/quarantine"
	case strings.HasPrefix(p, "/console/sending/"):
		return "/console/sending"
	case strings.HasPrefix(p, "/console/account/"):
		return "/console/account"
	case strings.HasPrefix(p, "/console/people/invitations/"):
		return "/console/people"
	}
	for _, form := range []string{"/decision", "/resolution", "/kill", "/pause", "/resume", "/fork", "/extend", "/download", "/command", "/terminal", "/verify", "/check", "/remove", "/settings", "/limits", "/delete", "/restore", "/revoke", "/mode", "/code", "/allow", "/disallow", "/off", "/end", "/comment", "/snooze", "/wake", "/assign", "/cancel", "/edit", "/role", "/reach", "/disable", "/enable", "/reset"} {
		p = strings.TrimSuffix(p, form)
	}
	return localPath(p)
}

// localPath returns next if it is the address of a page of the console, else that of the
// overview. The attack: a sign-in link ends on another site, on a page that looks like
// this one.
func localPath(next string) string {
	const home, most = "/console/", 2000 // bytes
	if len(next) > most || strings.ContainsFunc(next, func(r rune) bool { return r <= ' ' || r == '\\' || r == 0x7f }) {
		return home
	}
	u, err := url.Parse(next)
	if err != nil || u.Scheme != "" || u.Host != "" || u.User != nil || u.Opaque != "" || !strings.HasPrefix(u.EscapedPath(), home) {
		return home
	}
	for part := range strings.SplitSeq(u.Path[1:], "/") {
		// Browsers resolve .. before they send a request, even if it is escaped.
		if part == ".." || part == "." || strings.ContainsFunc(part, func(r rune) bool { return r < ' ' || r == '\\' || r == 0x7f }) {
			return home
		}
	}
	for _, p := range []string{"/console/signin", "/console/signout", "/console/setup", "/console/stepup"} {
		if u.Path == p || strings.HasPrefix(u.Path, p+"/") {
			return home
		}
	}
	local := (&url.URL{Path: u.Path, RawPath: u.RawPath, RawQuery: u.RawQuery}).String()
	if len(local) > most { // escaping has made it longer
		return home
	}
	return local
}
