package console

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

// An inviteForm has what a person asks of a connect code. [inviteForm.Chosen] fills empty
// fields with the defaults of the form.
type inviteForm struct {
	Name  string
	Mode  policy.Mode
	Scope seal.Scope
	For   string // how long the code is valid, as [time.ParseDuration] reads it
}

// An option is an entry of a list in a form.
type option struct{ Value, Text string }

// Scopes returns the scopes that a code's key can have. All of them can read: the key is
// the only one of its inbox.
func (inviteForm) Scopes() []option {
	return []option{
		{string(seal.Manage), "everything, also manage the inbox and its keys"},
		{string(seal.Propose), "read, write drafts and propose email"},
		{string(seal.Join(seal.Read, seal.Send)), "read and propose email"},
		{string(seal.Join(seal.Read, seal.Draft)), "read and write drafts"},
		{string(seal.Read), "read only"},
	}
}

// Times returns how long a code can be valid.
func (inviteForm) Times() []option {
	return []option{{"1h", "1 hour"}, {"8h", "8 hours"}, {"24h", "1 day"}, {"168h", "7 days"}, {"720h", "30 days"}}
}

// Chosen returns f with the defaults of the form in its empty fields.
func (f inviteForm) Chosen() inviteForm {
	if f.Mode == "" {
		f.Mode = policy.GatedSend
	}
	if f.Scope == "" {
		f.Scope = seal.Manage
	}
	f.For = or(f.For, "24h") // mailbox.ConnectTime
	return f
}

// isOpen reports whether somebody can still use a code.
func isOpen(c mailbox.ConnectCode) bool {
	return c.Used.IsZero() && c.Withdrawn.IsZero() && c.Expires.After(time.Now())
}

// An invitePage shows a connect code. The code is shown only once.
type invitePage struct {
	Code   mailbox.ConnectCode
	Prompt string // the sentence to paste, with the code in it
}

// inviteAgent makes a code with which an agent connects itself.
func (s inboxHandlers) inviteAgent(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	f := inviteForm{Name: strings.TrimSpace(r.PostForm.Get("name")), Mode: policy.Mode(r.PostForm.Get("mode")), Scope: seal.Scope(r.PostForm.Get("scope")), For: r.PostForm.Get("for")}.Chosen()
	n := mailbox.NewConnectCode{Address: f.Name, Mode: f.Mode, Scope: f.Scope}
	var c mailbox.ConnectCode
	var code auth.Secret
	valid, err := time.ParseDuration(f.For)
	if err != nil {
		err = fmt.Errorf("%w: valid for: must be a duration such as 2h", directory.ErrInvalid)
	} else {
		n.Expires = time.Now().Add(valid)
		c, code, err = s.post.NewConnectCode(r.Context(), who, n)
	}
	if why := refused(err); why != "" {
		return s.showInboxes(w, r, who, http.StatusBadRequest, inboxesPage{Notice: why, Invite: f})
	}
	if errors.Is(err, oversight.ErrByHand) || errors.Is(err, oversight.ErrNotAsked) {
		return s.showInboxes(w, r, who, http.StatusForbidden, inboxesPage{Notice: sentence(err.Error()) + " Nothing was changed.", Invite: f})
	}
	if err != nil {
		return err
	}
	v := invitePage{Code: c, Prompt: code.Reveal()}
	if s.conf.Prompt != nil {
		v.Prompt = s.conf.Prompt(code.Reveal())
	}
	return s.render(r.Context(), w, http.StatusCreated, page{Name: "invite", Title: "New agent", Who: who, Here: "inboxes", Body: v})
}

// withdrawCode ends a code that nobody has used.
func (s inboxHandlers) withdrawCode(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	err := s.post.WithdrawConnectCode(r.Context(), who, r.PathValue("id"))
	why := refused(err)
	if errors.Is(err, store.ErrNotFound) {
		why = "Your click changed nothing: the code no longer exists."
	}
	if why != "" {
		return s.showInboxes(w, r, who, http.StatusConflict, inboxesPage{Notice: why})
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/inboxes#s-codes", http.StatusSeeOther)
	return nil
}
