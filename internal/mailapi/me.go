package mailapi

import (
	"net/http"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/seal"
)

// A meServer tells callers who they are.
type meServer struct {
	access

	gate  *oversight.Gate
	post  *mailbox.PostOffice
	tools func(auth.Principal) []string // nil: it is not told
}

func (s meServer) routes() []route {
	return []route{
		{"GET", "/v1/me", 0, s.get},
	}
}

func (s meServer) get(w http.ResponseWriter, r *http.Request, c caller) error {
	out := api.Me{Kind: string(c.Kind), ID: c.ID, Role: string(c.Role), Scopes: []string{}}
	if err := s.mayDo(r, c, &out); err != nil {
		return err
	}
	if c.Inbox != "" && c.Kind != auth.Recovery {
		if err := s.inbox(w, r, c, &out); err != nil {
			return err
		}
	}
	if s.tools != nil {
		out.Tools = s.tools(c.Principal)
	}
	answer(w, http.StatusOK, out)
	return nil
}

// mayDo fills in what the caller may do, and the inboxes of a grant.
func (s meServer) mayDo(r *http.Request, c caller, out *api.Me) (err error) {
	switch c.Kind {
	case auth.Sandbox:
		if c.Inbox == "" {
			out.ReadDetail = detailOf(errNoInbox)
			return nil
		}
		scope := seal.Join(seal.Draft, seal.Send)
		if out.CanRead, out.ReadDetail, err = s.canRead(r.Context(), c.Principal); out.CanRead {
			scope = seal.Join(scope, seal.Read)
		}
		out.Scopes = scope.List()
		return err
	case auth.Agent:
		_, scope, err := s.post.Keys.Reach(r.Context(), c.Principal, "")
		if err != nil {
			return err
		}
		out.Scopes, out.CanRead = scope.List(), scope.Includes(seal.Read)
		if !out.CanRead {
			out.ReadDetail = detailOf(keyring.Lacks(c.Inbox, scope, seal.Read))
		}
	case auth.Grant:
		list, err := s.post.Directory.Inboxes(r.Context(), c.Principal)
		if err != nil {
			return err
		}
		for _, b := range list[:min(len(list), maxPage)] {
			out.Inboxes = append(out.Inboxes, b.Address)
		}
		out.CanRead = len(list) > 0
		out.ReadDetail = "what a grant may do differs by inbox"
	case auth.Recovery:
		out.Scopes, out.ReadDetail = append(out.Scopes, string(seal.Recover)), detailOf(keyring.MayOpen(c.Principal, c.Inbox))
	case auth.Project, auth.Person, auth.System:
		if directory.MayManage(c.Principal) == nil {
			out.Scopes = append(out.Scopes, "manage")
		}
		if c.Decides() {
			out.Scopes = append(out.Scopes, "decide")
		}
		out.ReadDetail = detailOf(keyring.MayOpen(c.Principal, ""))
	}
	return nil
}

// detailOf returns the text of an error as callers read it.
func detailOf(err error) string {
	if err == nil {
		return ""
	}
	_, detail := classify(err)
	return detail
}

// inbox fills in the caller's own inbox, its limits and its queue.
func (s meServer) inbox(w http.ResponseWriter, r *http.Request, c caller, out *api.Me) error {
	b, _, err := s.post.Keys.Reach(r.Context(), c.Principal, "")
	if err != nil {
		return err
	}
	out.Inbox = &api.OwnInbox{ID: b.ID, Address: b.Address, DisplayName: b.DisplayName, Mode: api.Mode(b.Mode), ModeReason: b.ModeReason, MaxBytes: b.MaxBytes}
	set, left, err := s.post.Quotas.Sends(r.Context(), c.Principal, b.ID)
	if err != nil {
		return err
	}
	rateLimits(w.Header(), left)
	out.Sending = new(sendStatusOf(set, left))
	waiting, err := s.gate.Waiting(r.Context(), c.Project, b.ID)
	if err != nil {
		return err
	}
	out.Queue = &api.Queue{Waiting: waiting, Limit: oversight.MaxPending}
	out.Message = &api.MessageMax{Recipients: mail.MaxRecipients, Subject: mail.MaxSubject, Text: mail.MaxText, AttachmentBytes: mail.MaxAttachmentsBytes}
	return nil
}
