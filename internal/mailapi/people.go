package mailapi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
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
	base   string // URL of the console's server, without a slash at its end; empty if it is not known
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
		{"POST", "/v1/people/{id}/link-operator", 0, s.byOperator((*people.People).LinkOperator)},
		{"POST", "/v1/people/{id}/unlink-operator", 0, s.byOperator((*people.People).UnlinkOperator)},
	}
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
	var in api.SignIn
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	begun, err := s.people.SignIn(r.Context(), in.Name, in.Password, in.Code, s.visit(r))
	if errors.Is(err, auth.ErrUnauthenticated) {
		return errSignIn
	}
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, api.Session{
		Person: begun.Who.ID, Role: api.Role(begun.Who.Role), StrongAt: moment(begun.Who.Strong), ExpiresAt: moment(begun.Session.Expires), Token: begun.Token.Reveal(),
	})
	return nil
}

func (s peopleServer) showSession(w http.ResponseWriter, _ *http.Request, c caller) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("a %s has no session: %w", c.Kind, auth.ErrForbidden)
	}
	answer(w, http.StatusOK, api.Session{Person: c.ID, Role: api.Role(c.Role), StrongAt: moment(c.Strong)})
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
	var in api.StepUp
	if err := door.Decode(r, &in); err != nil {
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

func personOf(p people.Person) api.Person {
	return api.Person{
		Name: p.Name, Role: api.Role(p.Role), Email: p.Email, CreatedAt: p.Created, DisabledAt: moment(p.Disabled),
		TOTP: p.TOTP, Passkeys: p.Passkeys, RecoveryCodes: p.Codes, Sessions: p.Sessions, OperatorFrom: moment(p.Operator.From),
	}
}

func (s peopleServer) listPeople(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.people.List(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.PersonList{People: each(list, personOf)})
	return nil
}

func invitationOf(v auth.Invitation) api.Invitation {
	return api.Invitation{
		ID: v.ID, Role: api.Role(v.Role), Person: v.Person, Email: v.Email, CreatedBy: v.CreatedBy, CreatedAt: moment(v.Created), ExpiresAt: v.Expires.UTC(),
	}
}

func (s peopleServer) listInvitations(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.people.Invitations(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.InvitationList{Invitations: each(list, invitationOf)})
	return nil
}

func (s peopleServer) invite(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.NewInvitation
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	v, token, err := s.people.Invite(r.Context(), c.Principal, auth.Invitation{Role: auth.Role(in.Role), Email: in.Email})
	if err != nil {
		return err
	}
	s.answerLink(w, v, token)
	return nil
}

// answerLink shows a one-time link, this once.
func (s peopleServer) answerLink(w http.ResponseWriter, v auth.Invitation, token auth.Secret) {
	out := invitationOf(v)
	out.Path = "/console/setup?" + url.Values{"token": {token.Reveal()}}.Encode()
	// The attack: a forged Host makes the link that somebody is sent lead to another server.
	if s.base != "" {
		out.URL = s.base + out.Path
	}
	answer(w, http.StatusCreated, out)
}

func (s peopleServer) withdraw(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := s.people.Withdraw(r.Context(), c.Principal, r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// changePerson changes a role, or the place of a person's notices.
func (s peopleServer) changePerson(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.PersonChange
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if (in.Role != nil) == (in.Email != nil) {
		return fmt.Errorf("%w: role: name it or email, one of them", errRequest)
	}
	var err error
	if in.Email != nil {
		err = s.people.SetEmail(r.Context(), c.Principal, r.PathValue("id"), *in.Email)
	} else {
		err = s.people.SetRole(r.Context(), c.Principal, r.PathValue("id"), auth.Role(*in.Role))
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

// byOperator is onPerson for the operator alone: others do it in the console, where a
// person can also confirm it.
func (s peopleServer) byOperator(f func(*people.People, context.Context, auth.Principal, string) error) handler {
	serve := s.onPerson(f)
	return func(w http.ResponseWriter, r *http.Request, c caller) error {
		if c.Kind != auth.Person || !c.Operator {
			return fmt.Errorf("only the operator at the machine says here who the operator is; owners do in the console: %w", auth.ErrForbidden)
		}
		return serve(w, r, c)
	}
}

func (s peopleServer) passwordLink(w http.ResponseWriter, r *http.Request, c caller) error {
	v, token, err := s.people.RenewPassword(r.Context(), c.Principal, r.PathValue("id"))
	if err != nil {
		return err
	}
	s.answerLink(w, v, token)
	return nil
}
