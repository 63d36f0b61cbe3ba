package console

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/directory"
	"postern/internal/gmail"
	"postern/internal/store"
)

// GmailCallback is the path to which Google sends a browser back.
const GmailCallback = "/console/mailboxes/gmail/callback"

// A gmailPage shows one of the steps in which a mailbox at Gmail is connected.
type gmailPage struct {
	Notice   string
	Redirect string // to register at Google

	// The first step: as typed before. The secret is not shown again.
	ClientID, Connection, Hint string

	URL string // the second step: the address at Google to go to

	// The third step: the parameters that Google sent.
	Back               bool
	State, Code, Error string
}

// gmailHandlers connects mailboxes at Gmail, by a sign-in at Google.
type gmailHandlers struct{ mailboxHandlers }

func (s gmailHandlers) routes() []route {
	return []route{
		{"GET", "/console/mailboxes/gmail", manages, s.form},
		{"POST", "/console/mailboxes/gmail", manages, s.begin},
		{"GET", GmailCallback, open, s.back},
		{"POST", GmailCallback, manages, s.finish},
	}
}

func (s gmailHandlers) signIns() (*gmail.SignIns, error) {
	if s.conf.Gmail == nil {
		return nil, fmt.Errorf("this server does not connect Gmail mailboxes: %w", store.ErrNotFound)
	}
	return s.conf.Gmail, nil
}

// redirect returns the address of the callback, under the host name that the browser used.
// The operator has set that name: requests with other names are refused before.
func (s gmailHandlers) redirect(r *http.Request) string {
	scheme := "http://"
	if s.site(r).Secure {
		scheme = "https://"
	}
	return scheme + r.Host + GmailCallback
}

func (s gmailHandlers) show(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, p gmailPage) error {
	p.Redirect = s.redirect(r)
	return s.render(r.Context(), w, status, page{Name: "gmail", Title: "Connect a mailbox at Gmail", Who: who, Here: "inboxes", Body: p})
}

func (s gmailHandlers) form(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if _, err := s.signIns(); err != nil {
		return err
	}
	return s.show(w, r, who, http.StatusOK, gmailPage{Connection: r.URL.Query().Get("connection")})
}

func (s gmailHandlers) begin(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	in, err := s.signIns()
	if err != nil {
		return err
	}
	p := gmailPage{ClientID: strings.TrimSpace(r.PostForm.Get("client")), Connection: strings.TrimSpace(r.PostForm.Get("connection")), Hint: strings.TrimSpace(r.PostForm.Get("hint"))}
	started, err := in.Begin(r.Context(), who, gmail.Request{
		App: gmail.App{ID: p.ClientID, Secret: auth.Secret(strings.TrimSpace(r.PostForm.Get("secret")))}, Redirect: s.redirect(r), Console: true, Hint: p.Hint,
	})
	if errors.Is(err, directory.ErrInvalid) {
		p.Notice = "Nothing was begun: " + because(err) + "."
		return s.show(w, r, who, http.StatusBadRequest, p)
	}
	if err != nil {
		return err
	}
	// The token is in this browser alone. The attack: a page sends another person's browser
	// to the callback with a code of the attacker's account.
	s.setSignIn(w, started.Token.Reveal()+"."+p.Connection, int(time.Until(started.Expire).Seconds()))
	// Show a link: a form must not lead to another site.
	return s.show(w, r, who, http.StatusOK, gmailPage{URL: started.URL})
}

// signInCookie returns the name of the cookie with a pending sign-in; see
// [Server.cookie].
func (s gmailHandlers) signInCookie() string {
	if s.conf.Secure {
		return "__Host-postern_gmail"
	}
	return "postern_gmail"
}

func (s gmailHandlers) setSignIn(w http.ResponseWriter, value string, seconds int) {
	path := "/console/mailboxes/"
	if s.conf.Secure {
		path = "/"
	}
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // as that of the session
		Name: s.signInCookie(), Value: value, Path: path, HttpOnly: true, Secure: s.conf.Secure, SameSite: http.SameSiteStrictMode, MaxAge: seconds,
	})
}

// back shows a form with what Google sent. A browser that comes from Google sends no cookie
// of ours, and a GET changes nothing. The person finishes the sign-in with the form's button.
func (s gmailHandlers) back(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	q := r.URL.Query()
	p := gmailPage{Back: true, State: q.Get("state"), Code: q.Get("code"), Error: q.Get("error")}
	if len(p.State) > 200 || len(p.Code) > 4096 || len(p.Error) > 200 {
		return fmt.Errorf("%w: this is not an answer from Google", errForm)
	}
	return s.show(w, r, auth.Principal{}, http.StatusOK, p)
}

func (s gmailHandlers) finish(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	in, err := s.signIns()
	if err != nil {
		return err
	}
	c, err := r.Cookie(s.signInCookie())
	if err != nil {
		return s.show(w, r, who, http.StatusBadRequest, gmailPage{Notice: "Nothing was connected. This browser has begun no sign-in, or it has expired. Begin again."})
	}
	token, connection, _ := strings.Cut(c.Value, ".")
	s.setSignIn(w, "", -1)
	a := gmail.Answer{Token: auth.Secret(token), State: r.PostForm.Get("state"), Code: r.PostForm.Get("code"), Error: r.PostForm.Get("error")}
	con, key, err := in.Finish(r.Context(), who, a, connection, connector.NewConnection{})
	if why, _ := unconnected(err); why != "" {
		return s.show(w, r, who, http.StatusBadRequest, gmailPage{Notice: "Nothing was connected. " + why})
	}
	if err != nil {
		return err
	}
	if key == "" {
		http.Redirect(w, r, "/console/mailboxes/"+con.ID, http.StatusSeeOther)
		return nil
	}
	return s.showKey(r.Context(), w, who, con, key)
}
