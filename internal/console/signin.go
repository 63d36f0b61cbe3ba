package console

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// A signInForm is what the pages for signing in and for the first account show.
type signInForm struct {
	Next     string // page to go to then
	Token    string // of the set-up link
	Name     string // as typed
	Problem  string
	Elsehow  bool // came by a link from elsewhere
	MinBytes int  // of a password
}

func (s *Server) setupPage(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	token := r.URL.Query().Get("token")
	// Only looked at: whatever fetches the link, a chat program's preview for
	// instance, must not use it up.
	err := s.db.View(r.Context(), func(tx *store.Tx) error {
		_, err := auth.CheckSetup(r.Context(), tx, auth.Secret(token)) //nolint:contextcheck // r's context is what is passed
		return err
	})
	if errors.Is(err, auth.ErrUnauthenticated) {
		return errLink
	}
	if err != nil {
		return err
	}
	return s.showSetup(w, http.StatusOK, signInForm{Token: token})
}

func (s *Server) showSetup(w http.ResponseWriter, status int, f signInForm) error {
	f.MinBytes = auth.MinPassword
	return s.render(w, status, page{Name: "setup", Title: "Make your account", Body: f})
}

func (s *Server) setup(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	ctx := r.Context()
	token, f := auth.Secret(r.PostForm.Get("token")), signInForm{Token: r.PostForm.Get("token"), Name: r.PostForm.Get("name")}
	// First the link: hashing a password is work that no guesser gets done.
	err := s.db.View(ctx, func(tx *store.Tx) error {
		_, err := auth.CheckSetup(ctx, tx, token)
		return err
	})
	if errors.Is(err, auth.ErrUnauthenticated) {
		return errLink
	}
	if err != nil {
		return err
	}
	if r.PostForm.Get("password") != r.PostForm.Get("again") {
		f.Problem = "The two passwords are not the same."
		return s.showSetup(w, http.StatusBadRequest, f)
	}
	hash, err := auth.HashPassword(r.PostForm.Get("password"))
	var session auth.Secret
	if err == nil {
		err = s.db.Update(ctx, func(tx *store.Tx) error {
			who, err := auth.Redeem(ctx, tx, token, f.Name, hash)
			if err != nil {
				return err
			}
			if err := audit.Append(ctx, tx, who, "person.create", who.ID, audit.Fields{"by": "set-up link", "remote": remote(r)}); err != nil {
				return err
			}
			session, err = auth.NewSession(ctx, tx, who)
			return err
		})
	}
	switch {
	case errors.Is(err, auth.ErrInvalid):
		f.Problem = sentence(strings.TrimPrefix(err.Error(), auth.ErrInvalid.Error()+" "))
		return s.showSetup(w, http.StatusBadRequest, f)
	case errors.Is(err, auth.ErrUnauthenticated): // somebody was faster
		return errLink
	case err != nil:
		return err
	}
	s.setCookie(w, session)
	http.Redirect(w, r, "/console/", http.StatusSeeOther)
	return nil
}

func (s *Server) signInPage(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	next := localPath(r.URL.Query().Get("next"))
	if _, err := s.session(r); err == nil {
		http.Redirect(w, r, next, http.StatusSeeOther) //nolint:gosec // next is checked to be a path of ours
		return nil
	}
	// The cookie is SameSite=Strict: who follows a link from elsewhere comes
	// without it and seems to be signed out. One more click, from here, shows.
	elsehow := r.Header.Get("Sec-Fetch-Site") == "cross-site"
	return s.showSignIn(w, http.StatusOK, signInForm{Next: next, Elsehow: elsehow})
}

func (s *Server) showSignIn(w http.ResponseWriter, status int, f signInForm) error {
	return s.render(w, status, page{Name: "signin", Title: "Sign in", Body: f})
}

func (s *Server) signin(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	ctx := r.Context()
	name := r.PostForm.Get("name")
	f := signInForm{Next: localPath(r.PostForm.Get("next")), Name: name}
	who, err := auth.Principal{}, auth.ErrUnauthenticated
	if len(name) <= 63 && utf8.ValidString(name) && !strings.Contains(name, "\x00") { // else it is nobody's
		who, err = s.signIn.Check(ctx, name, remote(r), r.PostForm.Get("password"))
	}
	switch {
	case errors.Is(err, auth.ErrTooMany):
		f.Problem = sentence(auth.ErrTooMany.Error())
		return s.showSignIn(w, http.StatusTooManyRequests, f)
	case errors.Is(err, auth.ErrUnauthenticated):
		if err := s.recordFailure(ctx, name, remote(r)); err != nil {
			return err
		}
		f.Problem = "The name or the password is not right."
		return s.showSignIn(w, http.StatusUnauthorized, f)
	case err != nil:
		return err
	}
	var session auth.Secret
	err = s.db.Update(ctx, func(tx *store.Tx) error {
		if c, err := r.Cookie(s.cookie()); err == nil { // one browser, one session
			if err := auth.EndSession(ctx, tx, auth.Secret(c.Value)); err != nil {
				return err
			}
		}
		if session, err = auth.NewSession(ctx, tx, who); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, "person.signin", who.ID, audit.Fields{"remote": remote(r)})
	})
	if err != nil {
		return err
	}
	s.setCookie(w, session)
	http.Redirect(w, r, f.Next, http.StatusSeeOther)
	return nil
}

func (s *Server) signout(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	ctx := r.Context()
	who, err := s.session(r)
	if err == nil {
		c, _ := r.Cookie(s.cookie()) // session read it
		err = s.db.Update(ctx, func(tx *store.Tx) error {
			if err := auth.EndSession(ctx, tx, auth.Secret(c.Value)); err != nil {
				return err
			}
			return audit.Append(ctx, tx, who, "person.signout", who.ID, nil)
		})
	}
	if err != nil && !errors.Is(err, auth.ErrUnauthenticated) {
		return err
	}
	s.setCookie(w, "")
	http.Redirect(w, r, "/console/signin", http.StatusSeeOther)
	return nil
}

// cookie returns the name of the cookie with the session. With the prefix a
// browser takes it from this very host alone: pages of sandboxes have names
// under the same domain, and their scripts could otherwise set one for all of
// it, and so sign a reviewer in as somebody else (RFC 6265bis section 4.1.3.2).
func (s *Server) cookie() string {
	if s.conf.Secure {
		return "__Host-" + auth.SessionCookie
	}
	return auth.SessionCookie
}

// setCookie gives the browser its session; an empty one takes it away.
func (s *Server) setCookie(w http.ResponseWriter, session auth.Secret) {
	path := "/console"
	if s.conf.Secure {
		path = "/" // as the name's prefix demands
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

// failures bounds what guessing at passwords writes into the record.
type failures struct {
	minute   int64
	recorded int // in this minute
	left     int // not recorded since the last one that was
}

// maxFailures is how many failed sign-ins are recorded, a minute.
const maxFailures = 30

// next reports whether one more failure is recorded, and how many were not
// before it.
func (f *failures) next(now time.Time) (left int, ok bool) {
	if m := now.Unix() / 60; m != f.minute {
		f.minute, f.recorded = m, 0
	}
	if f.recorded >= maxFailures {
		f.left++
		return 0, false
	}
	f.recorded++
	left, f.left = f.left, 0
	return left, true
}

// recordFailure records a failed sign-in.
func (s *Server) recordFailure(ctx context.Context, name, remote string) error {
	s.mu.Lock()
	left, ok := s.failed.next(time.Now())
	s.mu.Unlock()
	if !ok {
		return nil
	}
	detail := audit.Fields{"remote": remote}
	if left > 0 {
		detail["unrecorded"] = strconv.Itoa(left)
	}
	return s.db.Update(ctx, func(tx *store.Tx) error {
		project, err := auth.FirstProject(ctx, tx)
		if err != nil {
			return err
		}
		// People type passwords where the name goes, and the record is for
		// good: only the name of somebody who has an account is written.
		object := "(no such account)"
		if utf8.ValidString(name) && !strings.Contains(name, "\x00") && name != "" {
			made, err := audit.List(ctx, tx, audit.Query{Verb: "person.create", Object: name, Limit: 1})
			if err != nil {
				return err
			}
			if len(made) > 0 {
				object, project = name, made[0].Project
			}
		}
		who := auth.Principal{Kind: auth.System, ID: "console", Project: project}
		return audit.Append(ctx, tx, who, "person.signin_failed", object, detail)
	})
}
