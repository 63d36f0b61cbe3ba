package mailapi

import (
	"fmt"
	"net/http"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/mailbox"
)

// A grantServer serves grants over inboxes.
type grantServer struct {
	access

	post  *mailbox.PostOffice
	tools []string // the names of all tools
}

func (s grantServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/grants", 0, s.listInboxGrants},
		{"POST", "/v1/inboxes/{inbox}/grants", maxBody, s.grant},
		{"DELETE", "/v1/inboxes/{inbox}/grants/{id}", 0, s.revokeInboxGrant},
		{"GET", "/v1/grants", 0, s.listGrants},
		{"DELETE", "/v1/grants/{id}", 0, s.revokeGrant},
	}
}

const grantNotice = "Keep the grant: it is shown this once and stored nowhere. It opens the inboxes that their own keys have granted it, until each one's end or until it is revoked."

func (s grantServer) listInboxGrants(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Keys.Parts(r.Context(), c.Principal, r.PathValue("inbox"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.GrantList{Grants: partsOf(list, auth.Grant)})
	return nil
}

// grant makes a grant over the inbox, or adds the inbox to one.
func (s grantServer) grant(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	var in api.NewGrant
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	n, err := keyRequest(in.NewKey, s.tools)
	if err != nil {
		return err
	}
	if in.Grant == "" {
		p, key, err := s.post.Keys.Grant(r.Context(), c.Principal, k, n)
		if err != nil {
			return err
		}
		answerKey(w, p, key, grantNotice)
		return nil
	}
	if !idForm().MatchString(in.Grant) || in.Name != "" || len(in.Tools) > 0 {
		return fmt.Errorf("%w: grant: must be the id of a grant (crd_…), which has its name and its tools already", errRequest)
	}
	p, err := s.post.Keys.Extend(r.Context(), c.Principal, k, in.Grant, n)
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, partOf(p))
	return nil
}

// revokeInboxGrant ends a grant in one inbox.
func (s grantServer) revokeInboxGrant(w http.ResponseWriter, r *http.Request, c caller) error {
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

func (s grantServer) listGrants(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Keys.Grants(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.GrantList{Grants: partsOf(list, auth.Grant)})
	return nil
}

// revokeGrant ends a grant in every inbox.
func (s grantServer) revokeGrant(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	if err := s.post.Keys.RevokeGrant(r.Context(), c.Principal, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
