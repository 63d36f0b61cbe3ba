package mailapi

import (
	"net/http"
	"time"

	"postern/internal/mailbox"
)

// An accountServer serves accounts: grants that make inboxes of their own.
type accountServer struct {
	post *mailbox.PostOffice
}

// Accounts are made by managers, or by whoever asks where signup is open. One is
// ended like any other grant, at /v1/grants/{id}.
func (s accountServer) routes() []route {
	return []route{
		{"GET", "/v1/accounts", 0, s.listAccounts},
		{"POST", "/v1/accounts", maxBody, s.createAccount},
	}
}

type accountJSON struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"`
	CreatedAt time.Time  `json:"created_at"`
	CreatedBy string     `json:"created_by"`
	UsedAt    *time.Time `json:"used_at"`
	Inboxes   int        `json:"inbox_count"`
	Token     string     `json:"token,omitempty"` // when it was made, once
}

func accountOf(a mailbox.Account) accountJSON {
	return accountJSON{ID: a.ID, Name: a.Name, CreatedAt: a.Created, CreatedBy: a.CreatedBy, UsedAt: moment(a.Used), Inboxes: a.Inboxes}
}

func (s accountServer) listAccounts(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Accounts(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"accounts": each(list, accountOf)})
	return nil
}

func (s accountServer) createAccount(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		Name string `json:"name"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	id, token, err := s.post.NewAccount(r.Context(), c.Principal, in.Name)
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, accountJSON{ID: id, Name: in.Name, CreatedAt: time.Now().UTC(), CreatedBy: c.String(), Token: token.Reveal()})
	return nil
}
