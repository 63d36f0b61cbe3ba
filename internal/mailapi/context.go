package mailapi

import (
	"net/http"

	"postern/internal/api"
	"postern/internal/door"
	"postern/internal/keyring"
	"postern/internal/mailbox"
)

// A contextServer serves the grants by which reviewers see what waiting actions are about.
type contextServer struct {
	access

	post *mailbox.PostOffice
}

func (s contextServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/context-grants", 0, s.list},
		{"POST", "/v1/inboxes/{inbox}/context-grants", maxBody, s.add},
		{"DELETE", "/v1/inboxes/{inbox}/context-grants/{id}", 0, s.revoke},
	}
}

const contextNotice = "Give the code to this person alone: it is shown this once. They redeem it in the console, under Account, Inboxes that you may read, within 7 days. It works once, and for nobody else."

func contextGrantOf(g keyring.ContextGrant) api.ContextGrant {
	return api.ContextGrant{ID: g.ID, Inbox: g.Inbox, Person: g.Person, CreatedAt: g.Created, CreatedBy: g.CreatedBy, ExpiresAt: g.Expires, RedeemedAt: moment(g.Redeemed)}
}

func (s contextServer) list(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Keys.ContextGrants(r.Context(), c.Principal, r.PathValue("inbox"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.ContextGrantList{Grants: each(list, contextGrantOf)})
	return nil
}

// add makes a grant. It needs a full key of the inbox: neither the project nor a
// person can let somebody read it.
func (s contextServer) add(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	var in api.NewContextGrant
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	n, err := keyRequest(api.NewKey{ExpiresAt: in.ExpiresAt}, nil)
	if err != nil {
		return err
	}
	g, code, err := s.post.Keys.AddContext(r.Context(), c.Principal, k, in.Person, n.Expires)
	if err != nil {
		return err
	}
	out := contextGrantOf(g)
	out.Code, out.Notice = code.Reveal(), contextNotice
	answer(w, http.StatusCreated, out)
	return nil
}

func (s contextServer) revoke(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	if err := s.post.Keys.Revoke(r.Context(), c.Principal, r.PathValue("inbox"), id, false); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
