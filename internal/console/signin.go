package console

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"

	"postern/internal/auth"
	"postern/internal/people"
	"postern/internal/store"
)

// A signInForm has what the pages for signing in and for a new account show.
type signInForm struct {
	Next     string // page to go to then
	Token    string // of the set-up link
	Name     string // as typed
	Problem  string
	Elsehow  bool // the browser followed a link from another site
	Passkeys bool // passkeys work under the host name of this request
	MinBytes int  // of a password
	Role     auth.Role
	Person   string // who gets a new password; empty for a new account
}

// signInHandlers creates accounts from invitations, and signs people in and out.
type signInHandlers struct{ *Server }

func (s signInHandlers) routes() []route {
	return []route{
		{"GET", "/console/setup", open, s.setupPage},
		{"POST", "/console/setup", open, s.setup},
		{"GET", "/console/signin", open, s.signInPage},
		{"POST", "/console/signin", open, s.signin},
		{"POST", "/console/signin/code", open, s.signinCode},
		{"POST", "/console/signin/passkey/ask", open, s.askSignin},
		{"POST", "/console/signin/passkey", open, s.signinPasskey},
		{"POST", "/console/signout", open, s.signout},
	}
}

func (s signInHandlers) setupPage(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	token := r.URL.Query().Get("token")
	// A GET must not use up the link: the link previews of chat programs fetch it
	// too.
	f, err := s.invited(r.Context(), token)
	if err != nil {
		return err
	}
	return s.showSetup(r.Context(), w, http.StatusOK, f)
}

// invited returns the form of a set-up link.
func (s signInHandlers) invited(ctx context.Context, token string) (f signInForm, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		v, err := auth.CheckSetup(ctx, tx, auth.Secret(token))
		f = signInForm{Token: token, Role: v.Role, Person: v.Person}
		return err
	})
	if errors.Is(err, auth.ErrUnauthenticated) {
		err = errLink
	}
	return f, err
}

func (s signInHandlers) showSetup(ctx context.Context, w http.ResponseWriter, status int, f signInForm) error {
	f.MinBytes = auth.MinPassword
	title := "Create your account"
	if f.Person != "" {
		title = "Choose a new password"
	}
	return s.render(ctx, w, status, page{Name: "setup", Title: title, Body: f})
}

func (s signInHandlers) setup(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	ctx := r.Context()
	// Check the link first: hashing a password is expensive, and a client that
	// guesses links must not cause that work.
	f, err := s.invited(ctx, r.PostForm.Get("token"))
	if err != nil {
		return err
	}
	f.Name = r.PostForm.Get("name")
	if r.PostForm.Get("password") != r.PostForm.Get("again") {
		f.Problem = "The passwords do not match."
		return s.showSetup(r.Context(), w, http.StatusBadRequest, f)
	}
	begun, err := s.conf.People.Redeem(ctx, auth.Secret(f.Token), f.Name, r.PostForm.Get("password"), s.visit(r))
	switch {
	case errors.Is(err, auth.ErrInvalid):
		f.Problem = sentence(strings.TrimPrefix(err.Error(), auth.ErrInvalid.Error()+" "))
		return s.showSetup(r.Context(), w, http.StatusBadRequest, f)
	case errors.Is(err, auth.ErrUnauthenticated): // the link was used in the meantime
		return errLink
	case err != nil:
		return err
	}
	if begun.Token == "" { // a new password, and the person has a second factor
		http.Redirect(w, r, "/console/signin", http.StatusSeeOther)
		return nil
	}
	s.setCookie(w, begun.Token)
	http.Redirect(w, r, "/console/", http.StatusSeeOther)
	return nil
}

func (s signInHandlers) signInPage(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	next := localPath(r.URL.Query().Get("next"))
	if _, err := s.session(r); err == nil {
		http.Redirect(w, r, next, http.StatusSeeOther) //nolint:gosec // next is checked to be a path of ours
		return nil
	}
	// The cookie is SameSite=Strict, so a browser that follows a link from another
	// site does not send it and appears signed out. A click on this page sends it.
	elsehow := r.Header.Get("Sec-Fetch-Site") == "cross-site"
	return s.showSignIn(w, r, http.StatusOK, signInForm{Next: next, Elsehow: elsehow})
}

func (s signInHandlers) showSignIn(w http.ResponseWriter, r *http.Request, status int, f signInForm) error {
	f.Passkeys = s.site(r).Usable() == nil
	return s.render(r.Context(), w, status, page{Name: "signin", Title: "Sign in", Body: f})
}

// visit describes r as an attempt to sign in.
func (s *Server) visit(r *http.Request) people.Visit {
	return people.Visit{Kind: auth.Browser, Remote: remote(r), Agent: r.UserAgent(), Former: s.token(r)}
}

// token returns the session that the browser keeps. It may be empty or not valid.
func (s *Server) token(r *http.Request) auth.Secret {
	c, err := r.Cookie(s.cookie())
	if err != nil {
		return ""
	}
	return auth.Secret(c.Value)
}

// site returns the host name under which the console was opened. The operator has set that
// name: requests with other names are refused before.
func (s *Server) site(r *http.Request) people.Site {
	return people.Site{Host: r.Host, Secure: s.conf.Secure || r.TLS != nil}
}

func (s signInHandlers) signin(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	f := signInForm{Next: localPath(r.PostForm.Get("next")), Name: r.PostForm.Get("name")}
	begun, err := s.conf.People.Password(r.Context(), f.Name, r.PostForm.Get("password"), s.visit(r))
	if err == nil && begun.Token == "" {
		return s.showSecond(w, r, http.StatusOK, secondForm{Next: f.Next, Token: begun.Next.Reveal(), TOTP: begun.TOTP, Passkey: begun.Passkey})
	}
	return s.entered(w, r, begun, f, err)
}

// entered gives the browser the session that a sign-in led to, or shows why there
// is none.
func (s signInHandlers) entered(w http.ResponseWriter, r *http.Request, begun people.Started, f signInForm, err error) error {
	switch {
	case errors.Is(err, auth.ErrTooMany):
		f.Problem = sentence(auth.ErrTooMany.Error())
		return s.showSignIn(w, r, http.StatusTooManyRequests, f)
	case errors.Is(err, auth.ErrUnauthenticated):
		f.Problem = "The name or password is wrong."
		return s.showSignIn(w, r, http.StatusUnauthorized, f)
	case errors.Is(err, people.ErrChallenge):
		s.log.DebugContext(r.Context(), "sign in", "err", err)
		f.Problem = "The request expired or was already used, or the passkey is unknown. Start again."
		return s.showSignIn(w, r, http.StatusUnauthorized, f)
	case err != nil:
		return err
	}
	s.setCookie(w, begun.Token)
	http.Redirect(w, r, f.Next, http.StatusSeeOther) // next was checked to be a path of ours
	return nil
}

// A secondForm asks for a second factor, after the password.
type secondForm struct {
	Next    string
	Token   string // of the question
	TOTP    bool
	Passkey bool
	Problem string
}

func (s signInHandlers) showSecond(w http.ResponseWriter, r *http.Request, status int, f secondForm) error {
	f.Passkey = f.Passkey && s.site(r).Usable() == nil
	return s.render(r.Context(), w, status, page{Name: "second", Title: "Second factor", Body: f})
}

func (s signInHandlers) signinCode(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	form := r.PostForm
	f := secondForm{Next: localPath(form.Get("next")), Token: form.Get("token"), TOTP: form.Get("totp") != "", Passkey: form.Get("passkey") != ""}
	begun, err := s.conf.People.Second(r.Context(), auth.Secret(f.Token), form.Get("code"), s.visit(r))
	switch {
	case errors.Is(err, auth.ErrUnauthenticated):
		f.Problem = "The code is wrong, already used, or expired."
		return s.showSecond(w, r, http.StatusUnauthorized, f)
	case errors.Is(err, auth.ErrTooMany):
		f.Problem = sentence(auth.ErrTooMany.Error())
		return s.showSecond(w, r, http.StatusTooManyRequests, f)
	}
	return s.entered(w, r, begun, signInForm{Next: f.Next}, err)
}

// An askPage makes the browser ask for a passkey. The page needs its script; without
// scripts it names the other ways.
type askPage struct {
	Title, Text string
	Action      string // where the answer goes
	Kind        string // what the browser does: create or get
	Options     string // for the browser, as JSON
	Token       string // of the question
	Next        string
	Label       string // what a new passkey will be called
	Button      string
}

func (s *Server) showAsk(ctx context.Context, w http.ResponseWriter, who auth.Principal, a askPage, q people.Question) error {
	a.Options, a.Token = q.Options, q.Token.Reveal()
	return s.render(ctx, w, http.StatusOK, page{Name: "ask", Title: a.Title, Who: who, Passkey: true, Body: a})
}

func (s signInHandlers) askSignin(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	next := localPath(r.PostForm.Get("next"))
	q, err := s.conf.People.AskPasskey(r.Context(), s.site(r), s.visit(r))
	if errors.Is(err, people.ErrSite) {
		return s.showSignIn(w, r, http.StatusBadRequest, signInForm{Next: next, Problem: sentence(err.Error())})
	}
	if err != nil {
		return s.entered(w, r, people.Started{}, signInForm{Next: next}, err)
	}
	return s.showAsk(r.Context(), w, auth.Principal{}, askPage{
		Title: "Sign in with a passkey", Text: "Your browser will ask for it. It replaces the password and the second factor.",
		Action: "/console/signin/passkey", Kind: "get", Next: next, Button: "Use a passkey",
	}, q)
}

func (s signInHandlers) signinPasskey(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	f := signInForm{Next: localPath(r.PostForm.Get("next"))}
	begun, err := s.conf.People.Passkey(r.Context(), auth.Secret(r.PostForm.Get("token")), []byte(r.PostForm.Get("response")), s.site(r), s.visit(r))
	return s.entered(w, r, begun, f, err)
}

func (s signInHandlers) signout(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	if err := s.conf.People.SignOut(r.Context(), s.token(r), auth.Browser); err != nil && !errors.Is(err, auth.ErrUnauthenticated) {
		return err
	}
	s.setCookie(w, "")
	// The attack: the next person at this computer presses Back. No page is cached, but
	// browsers keep whole pages in memory; this removes those too (Clear Site Data, section 3.1).
	// It also removes the service worker, so that no push message appears there any more.
	w.Header().Set("Clear-Site-Data", `"cache", "storage"`)
	http.Redirect(w, r, "/console/signin", http.StatusSeeOther)
	return nil
}

// cookie returns the name of the session cookie. With the prefix, a browser accepts the
// cookie from this host alone. Pages of sandboxes have names under the same domain: without
// the prefix, their scripts could set a cookie for the whole domain, and so sign a reviewer
// in as somebody else (RFC 6265bis section 4.1.3.2).
func (s *Server) cookie() string {
	if s.conf.Secure {
		return "__Host-" + auth.SessionCookie
	}
	return auth.SessionCookie
}

// setCookie gives the browser its session; an empty one removes it.
func (s *Server) setCookie(w http.ResponseWriter, session auth.Secret) {
	path := "/console"
	if s.conf.Secure {
		path = "/" // the prefix of the name requires it
	}
	c := &http.Cookie{ //nolint:gosec // Secure is the operator's: on the loopback there is no TLS
		Name: s.cookie(), Value: session.Reveal(), Path: path, HttpOnly: true, Secure: s.conf.Secure,
		SameSite: http.SameSiteStrictMode, MaxAge: int(auth.SessionTime.Seconds()),
	}
	if session == "" {
		c.MaxAge = -1
	}
	http.SetCookie(w, c)
}

func remote(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}
