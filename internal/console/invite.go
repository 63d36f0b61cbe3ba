package console

import (
	"net/http"
	"strings"

	"postern/internal/auth"
	"postern/internal/mailbox"
)

// An invitePage shows a connect code, this once.
type invitePage struct {
	Code   mailbox.ConnectCode
	Prompt string // the sentence to paste, with the code in it
}

// inviteAgent makes a code with which an agent connects itself.
func (s inboxHandlers) inviteAgent(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	c, code, err := s.post.NewConnectCode(r.Context(), who, mailbox.NewConnectCode{Address: strings.TrimSpace(r.PostForm.Get("name"))})
	if why := refused(err); why != "" {
		return s.showInboxes(w, r, who, http.StatusBadRequest, why)
	}
	if err != nil {
		return err
	}
	v := invitePage{Code: c, Prompt: code.Reveal()}
	if s.conf.Prompt != nil {
		v.Prompt = s.conf.Prompt(code.Reveal())
	}
	return s.render(w, http.StatusCreated, page{Name: "invite", Title: "New agent", Who: who, Here: "inboxes", Body: v})
}
