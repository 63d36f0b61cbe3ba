package mailapi

import (
	"errors"
	"fmt"
	"net/http"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/directory"
	"postern/internal/door"
	"postern/internal/gmail"
	"postern/internal/policy"
)

// A gmailServer connects mailboxes at Gmail. Its callers are owners with a fresh second
// factor; no answer has the credential.
type gmailServer struct {
	signIns *gmail.SignIns // nil: the server connects none
}

func (s gmailServer) routes() []route {
	return offeredIf(s.signIns != nil, "mailboxes at Gmail", []route{
		{"POST", "/v1/connections/gmail/sign-ins", maxBody, s.begin},
		{"POST", "/v1/connections/gmail", maxBody, s.finish},
	})
}

func (s gmailServer) begin(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.NewGmailSignIn
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	out, err := s.signIns.Begin(r.Context(), c.Principal, gmail.Request{
		App: gmail.App{ID: in.ClientID, Secret: auth.Secret(in.ClientSecret)}, Redirect: in.RedirectURI, Hint: in.LoginHint,
	})
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, api.GmailSignIn{SignIn: out.Token.Reveal(), URL: out.URL, UserCode: out.Code, Interval: int64(out.Every.Seconds()), ExpiresAt: out.Expire})
	return nil
}

func (s gmailServer) finish(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.NewGmailMailbox
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if in.Connection != "" && (in.DisplayName != "" || in.Mode != "" || in.Since != nil || in.Most != 0) {
		return fmt.Errorf("%w: connection: signs in again and changes nothing else; leave display_name, mode, since and most out", errRequest)
	}
	n := connector.NewConnection{
		Inbox:  directory.NewInbox{DisplayName: in.DisplayName, Mode: policy.Mode(in.Mode)},
		Bounds: connector.Bounds{Most: in.Most},
	}
	if in.Since != nil {
		n.Bounds.Since = *in.Since
	}
	con, key, err := s.signIns.Finish(r.Context(), c.Principal, gmail.Answer{Token: auth.Secret(in.SignIn), State: in.State, Code: in.Code, Error: in.Error}, in.Connection, n)
	if errors.Is(err, gmail.ErrPending) {
		answer(w, http.StatusAccepted, api.GmailMailbox{Status: api.GmailPending})
		return nil
	}
	if err != nil {
		return err
	}
	out := api.GmailMailbox{Status: api.GmailConnected, Connection: con.ID, Inbox: con.Inbox, Address: con.Address}
	if key != "" {
		out.Key, out.Notice = key.Reveal(), lossNotice
	}
	answer(w, http.StatusCreated, out)
	return nil
}
