package mailapi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"time"

	"postern/internal/auth"
	"postern/internal/people"
	"postern/internal/store"
)

// A person signs in with a password and, where there is one, a second factor,
// and shows the session's token as other callers show keys. It is a person's
// alone: no key opens a session, whatever it may do otherwise.
func (s peopleServer) openRoutes() []route {
	return []route{
		{"POST", "/v1/session", maxBody, s.beginSession},
	}
}

// A peopleServer serves sessions, people and invitations.
type peopleServer struct {
	db     *store.DB
	people *people.People
}

func (s peopleServer) routes() []route {
	return []route{
		{"GET", "/v1/session", 0, s.showSession},
		{"DELETE", "/v1/session", 0, s.endSession},
		{"POST", "/v1/session/step-up", maxBody, s.stepUp},
		{"GET", "/v1/people", 0, s.listPeople},
		{"GET", "/v1/invitations", 0, s.listInvitations},
		{"POST", "/v1/invitations", maxBody, s.invite},
		{"DELETE", "/v1/invitations/{id}", 0, s.withdraw},
		{"PATCH", "/v1/people/{id}", maxBody, s.changePerson},
		{"POST", "/v1/people/{id}/disable", 0, s.onPerson((*people.People).Disable)},
		{"POST", "/v1/people/{id}/enable", 0, s.onPerson((*people.People).Enable)},
		{"POST", "/v1/people/{id}/reset", 0, s.onPerson((*people.People).Reset)},
		{"POST", "/v1/people/{id}/password-link", 0, s.passwordLink},
	}
}

// A sessionJSON is who is signed in.
type sessionJSON struct {
	Person    string     `json:"person"`
	Role      auth.Role  `json:"role"`
	StrongAt  *time.Time `json:"strong_at"` // when it last proved a second factor; null: never
	ExpiresAt *time.Time `json:"expires_at,omitempty"`
	Token     string     `json:"token,omitempty"` // when it was begun, once
}

func (s peopleServer) visit(r *http.Request) people.Visit {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		host = r.RemoteAddr
	}
	return people.Visit{Kind: auth.Bearer, Remote: host, Agent: r.UserAgent()}
}

func (s peopleServer) beginSession(w http.ResponseWriter, r *http.Request, _ caller) error {
	// An agent that was told a password is still an agent.
	if r.Header.Get("Authorization") != "" || r.Header.Get("X-Api-Key") != "" {
		return fmt.Errorf("header Authorization: a key opens no session, a person does, with a password: %w", auth.ErrForbidden)
	}
	var in struct {
		Name     string `json:"name"`
		Password string `json:"password"`
		Code     string `json:"code"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	begun, err := s.people.SignIn(r.Context(), in.Name, in.Password, in.Code, s.visit(r))
	if errors.Is(err, auth.ErrUnauthenticated) {
		return errSignIn
	}
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, sessionJSON{
		Person: begun.Who.ID, Role: begun.Who.Role, StrongAt: moment(begun.Who.Strong), ExpiresAt: moment(begun.Session.Expires), Token: begun.Token.Reveal(),
	})
	return nil
}

func (s peopleServer) showSession(w http.ResponseWriter, _ *http.Request, c caller) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("a %s has no session: %w", c.Kind, auth.ErrForbidden)
	}
	answer(w, http.StatusOK, sessionJSON{Person: c.ID, Role: c.Role, StrongAt: moment(c.Strong)})
	return nil
}

// inSession checks that the caller showed a session's token.
func (c caller) inSession() error {
	if c.session == "" {
		return fmt.Errorf("this caller has no session: sign in at POST /v1/session: %w", auth.ErrForbidden)
	}
	return nil
}

func (s peopleServer) endSession(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := c.inSession(); err != nil {
		return err
	}
	if err := s.people.SignOut(r.Context(), c.session, auth.Bearer); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s peopleServer) stepUp(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := c.inSession(); err != nil {
		return err
	}
	var in struct {
		Code string `json:"code"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	if err := s.people.StepUp(r.Context(), c.session, auth.Bearer, in.Code, s.visit(r).Remote); err != nil {
		return err
	}
	p, err := auth.CheckBearer(r.Context(), s.db, c.session)
	if err != nil {
		return err
	}
	return s.showSession(w, r, caller{Principal: p})
}

// A personJSON is one person, for owners.
type personJSON struct {
	Name          string     `json:"name"`
	Role          auth.Role  `json:"role"`
	Email         string     `json:"email"`
	CreatedAt     time.Time  `json:"created_at"`
	DisabledAt    *time.Time `json:"disabled_at"` // null: may come in
	TOTP          bool       `json:"totp"`
	Passkeys      int        `json:"passkeys"`
	RecoveryCodes int        `json:"recovery_codes"` // left
	Sessions      int        `json:"sessions"`
}

func personOf(p people.Person) personJSON {
	return personJSON{
		Name: p.Name, Role: p.Role, Email: p.Email, CreatedAt: p.Created, DisabledAt: moment(p.Disabled),
		TOTP: p.TOTP, Passkeys: p.Passkeys, RecoveryCodes: p.Codes, Sessions: p.Sessions,
	}
}

func (s peopleServer) listPeople(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.people.List(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"people": each(list, personOf)})
	return nil
}

// An invitationJSON is a one-time link.
type invitationJSON struct {
	ID        string     `json:"id"`
	Role      auth.Role  `json:"role"`
	Person    string     `json:"person"` // whose new password it is for; empty: a new account
	Email     string     `json:"email"`
	CreatedBy string     `json:"created_by"`
	CreatedAt *time.Time `json:"created_at"` // null: not known
	ExpiresAt time.Time  `json:"expires_at"`
	Path      string     `json:"path,omitempty"` // of the link, below the console's address; when it was made, once
}

func invitationOf(v auth.Invitation) invitationJSON {
	return invitationJSON{
		ID: v.ID, Role: v.Role, Person: v.Person, Email: v.Email, CreatedBy: v.CreatedBy, CreatedAt: moment(v.Created), ExpiresAt: v.Expires.UTC(),
	}
}

func (s peopleServer) listInvitations(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.people.Invitations(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"invitations": each(list, invitationOf)})
	return nil
}

func (s peopleServer) invite(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		Role  auth.Role `json:"role"`
		Email string    `json:"email"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	v, token, err := s.people.Invite(r.Context(), c.Principal, auth.Invitation{Role: in.Role, Email: in.Email})
	if err != nil {
		return err
	}
	answerLink(w, v, token)
	return nil
}

// answerLink shows a one-time link, this once.
func answerLink(w http.ResponseWriter, v auth.Invitation, token auth.Secret) {
	out := invitationOf(v)
	out.Path = "/console/setup?" + url.Values{"token": {token.Reveal()}}.Encode()
	answer(w, http.StatusCreated, out)
}

func (s peopleServer) withdraw(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := s.people.Withdraw(r.Context(), c.Principal, r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// changePerson changes a role, or where a person is told of what waits.
func (s peopleServer) changePerson(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		Role  *auth.Role `json:"role"`
		Email *string    `json:"email"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	if (in.Role != nil) == (in.Email != nil) {
		return fmt.Errorf("%w: role: name it or email, one of them", errRequest)
	}
	var err error
	if in.Email != nil {
		err = s.people.SetEmail(r.Context(), c.Principal, r.PathValue("id"), *in.Email)
	} else {
		err = s.people.SetRole(r.Context(), c.Principal, r.PathValue("id"), *in.Role)
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// onPerson serves what is done to a person without more being said.
func (s peopleServer) onPerson(f func(*people.People, context.Context, auth.Principal, string) error) handler {
	return func(w http.ResponseWriter, r *http.Request, c caller) error {
		if err := f(s.people, r.Context(), c.Principal, r.PathValue("id")); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
}

func (s peopleServer) passwordLink(w http.ResponseWriter, r *http.Request, c caller) error {
	v, token, err := s.people.RenewPassword(r.Context(), c.Principal, r.PathValue("id"))
	if err != nil {
		return err
	}
	answerLink(w, v, token)
	return nil
}
