package mailapi

import (
	"net/http"
	"time"

	"postern/internal/api"
	"postern/internal/door"
	"postern/internal/keyring"
	"postern/internal/mailbox"
)

// An accountServer serves accounts: grants that make inboxes of their own.
type accountServer struct {
	post *mailbox.PostOffice
}

// Accounts are made by managers, or by any caller where sign-up is open. An account is
// revoked like any other grant, at /v1/grants/{id}.
func (s accountServer) routes() []route {
	return []route{
		{"GET", "/v1/accounts", 0, s.listAccounts},
		{"POST", "/v1/accounts", maxBody, s.createAccount},
	}
}

func accountOf(a keyring.Account) api.Account {
	return api.Account{ID: a.ID, Name: a.Name, CreatedAt: a.Created, CreatedBy: a.CreatedBy, UsedAt: moment(a.Used), Inboxes: a.Inboxes}
}

func (s accountServer) listAccounts(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Keys.Accounts(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.AccountList{Accounts: each(list, accountOf)})
	return nil
}

func (s accountServer) createAccount(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.NewAccount
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	id, token, err := s.post.Keys.NewAccount(r.Context(), c.Principal, in.Name)
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, api.Account{ID: id, Name: in.Name, CreatedAt: time.Now().UTC(), CreatedBy: c.String(), Token: token.Reveal()})
	return nil
}
