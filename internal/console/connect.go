package console

import (
	"context"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/oauth"
	"postern/internal/seal"
	"postern/internal/store"
)

// connectHandlers asks an owner whether a program may use an inbox, and shows and ends
// these connections. See package oauth.
type connectHandlers struct{ *Server }

func (s connectHandlers) routes() []route {
	return []route{
		{"GET", oauth.ConsentPath, manages, s.ask},
		{"POST", oauth.ConsentPath, manages, s.answer},
		{"GET", oauth.AppsPath, views, s.apps},
		{"POST", oauth.AppsPath + "/{id}/end", manages, s.endApp},
	}
}

var errNoOAuth = fmt.Errorf("OAuth for apps is off on this server: %w", store.ErrNotFound)

// scopeMeans says what each of [oauth.Scopes] permits an app.
//
//exhaustive:ignore
var scopeMeans = map[seal.Scope]string{
	seal.Read:  "open the mail and the drafts of the inbox",
	seal.Draft: "write drafts, which nobody receives",
	seal.Send:  "propose email, which is held for review as the inbox’s mode says",
}

// A scopeChoice is one checkbox of the consent page.
type scopeChoice struct {
	Scope   seal.Scope
	Means   string
	Checked bool
}

// A connectPage asks for consent.
type connectPage struct {
	oauth.Request
	Fields  []hiddenField // the request as it was received
	Scopes  []scopeChoice // those that the app asks for
	Inboxes []directory.Inbox
	Notice  string
	Chosen  string // id of an inbox; empty for a new one
	Name    string // of the new inbox, as typed
}

type hiddenField struct{ Name, Value string }

// asked reads the request of an app from q. It requires a fresh second factor of a person
// who has one: consent gives the app a key.
func (s connectHandlers) asked(r *http.Request, who auth.Principal, q url.Values) (req oauth.Request, err error) {
	if s.conf.OAuth == nil {
		return req, errNoOAuth
	}
	me, err := s.conf.People.Me(r.Context(), who)
	if err != nil {
		return req, err
	}
	// The attack: somebody uses a session that was left open or stolen to connect a
	// program, which then stays connected.
	if me.Strong() && !who.Proved() {
		return req, auth.ErrStepUp
	}
	return s.conf.OAuth.Ask(r.Context(), s.conf.OAuth.Base(r), q)
}

func (s connectHandlers) ask(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	req, err := s.asked(r, who, r.URL.Query())
	if err != nil {
		return err
	}
	return s.showConnect(w, r, who, http.StatusOK, req, r.URL.Query(), connectPage{})
}

func (s connectHandlers) showConnect(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, req oauth.Request, q url.Values, p connectPage) error {
	list, err := s.post.Directory.Inboxes(r.Context(), who)
	if err != nil {
		return err
	}
	p.Request, p.Inboxes = req, list
	for _, name := range oauth.Fields {
		if q.Has(name) {
			p.Fields = append(p.Fields, hiddenField{name, q.Get(name)})
		}
	}
	for _, scope := range oauth.Scopes {
		if req.Scope.Includes(scope) {
			chosen := r.Method != http.MethodPost || strings.Contains(" "+strings.Join(r.PostForm["allow"], " ")+" ", " "+string(scope)+" ")
			p.Scopes = append(p.Scopes, scopeChoice{scope, scopeMeans[scope], chosen})
		}
	}
	return s.render(r.Context(), w, status, page{Name: "connect", Title: "Connect an app", Who: who, Here: "settings", Body: p})
}

// A connectedPage leads back to an app.
type connectedPage struct {
	App     string
	Returns string // where URL leads, in words
	Denied  bool
	Inbox   directory.Inbox
	Key     string       // of a new inbox, shown this once
	URL     template.URL // of the app: package oauth has checked its scheme
}

func (s connectHandlers) answer(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	req, err := s.asked(r, who, r.PostForm)
	if err != nil {
		return err
	}
	p := connectedPage{App: req.Client.Name, Returns: req.ReturnsTo}
	switch r.PostForm.Get("answer") {
	case "deny":
		p.Denied, p.URL = true, template.URL(req.Deny()) //nolint:gosec // see connectedPage.URL
		return s.showConnected(r.Context(), w, who, p)
	case "allow":
	default:
		return fmt.Errorf("%w: answer: must be allow or deny", errForm)
	}
	var scopes []seal.Scope
	for _, v := range r.PostForm["allow"] {
		scopes = append(scopes, seal.Scope(v))
	}
	c := oauth.Choice{
		Inbox: r.PostForm.Get("inbox"), Name: strings.TrimSpace(r.PostForm.Get("name")), Scope: seal.Join(scopes...), Key: auth.Secret(strings.TrimSpace(r.PostForm.Get("key"))),
	}
	if c.Inbox != "" && !inboxID().MatchString(c.Inbox) {
		return fmt.Errorf("%w: inbox: choose one of the list", errForm)
	}
	a, err := s.conf.OAuth.Allow(r.Context(), who, req, c)
	if why := refused(err); why != "" {
		why = strings.Replace(why, "Nothing was changed", "Nothing was connected", 1)
		return s.showConnect(w, r, who, http.StatusBadRequest, req, r.PostForm, connectPage{Notice: why, Chosen: c.Inbox, Name: c.Name})
	}
	if err != nil {
		return err
	}
	p.Inbox, p.Key, p.URL = a.Inbox, a.Key.Reveal(), template.URL(a.URL) //nolint:gosec // see connectedPage.URL
	return s.showConnected(r.Context(), w, who, p)
}

// showConnected leads the browser back to an app. Our own policy (form-action) would block a
// redirect in the answer to a form, so the page itself goes on to the app. If there is a
// key, the page stays: the key has to be copied first.
func (s connectHandlers) showConnected(ctx context.Context, w http.ResponseWriter, who auth.Principal, p connectedPage) error {
	title := "App connected"
	if p.Denied {
		title = "App refused"
	}
	if p.Key == "" {
		w.Header().Set("Refresh", "1; url="+string(p.URL))
	}
	return s.render(ctx, w, http.StatusOK, page{Name: "connected", Title: title, Who: who, Here: "settings", Body: p})
}

// An appsPage lists the connected apps.
type appsPage struct {
	Apps   []oauth.App
	Notice string
	Tools  string // the address for apps
}

func (s connectHandlers) apps(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showApps(w, r, who, http.StatusOK, "")
}

func (s connectHandlers) showApps(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	if s.conf.OAuth == nil {
		return errNoOAuth
	}
	list, err := s.conf.OAuth.Apps(r.Context(), who)
	if err != nil {
		return err
	}
	return s.render(r.Context(), w, status, page{Name: "apps", Title: "Connected apps", Who: who, Here: "settings", Body: appsPage{list, notice, s.conf.OAuth.Base(r) + "/mcp"}})
}

var appID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^app_[A-Z2-7]{26}$`) })

func (s connectHandlers) endApp(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id := r.PathValue("id")
	if s.conf.OAuth == nil || !appID().MatchString(id) {
		return fmt.Errorf("app %q: %w", id, store.ErrNotFound)
	}
	err := s.conf.OAuth.Revoke(r.Context(), who, id)
	if errors.Is(err, oauth.ErrNoApp) {
		return s.showApps(w, r, who, http.StatusConflict, "Your click changed nothing: the app is no longer connected.")
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, oauth.AppsPath, http.StatusSeeOther)
	return nil
}
