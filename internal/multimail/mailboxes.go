package multimail

import (
	"fmt"
	"net/http"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/door"
	"postern/internal/keyring"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
)

func (s *Server) mailboxRoutes() []route {
	return []route{
		{method: "GET", path: "/v1/mailboxes", serve: s.listMailboxes},
		{method: "POST", path: "/v1/mailboxes", body: maxBody, serve: s.createMailbox},
		{method: "GET", path: "/v1/mailboxes/{mailbox}", serve: s.getMailbox},
		{method: "PATCH", path: "/v1/mailboxes/{mailbox}", body: maxBody, role: auth.Reviewer, serve: s.updateMailbox},
		{method: "DELETE", path: "/v1/mailboxes/{mailbox}", serve: s.deleteMailbox},
		{method: "PATCH", path: "/v1/mailboxes/{mailbox}/configure", body: maxBody, role: auth.Reviewer, serve: s.updateMailbox},
		{method: "POST", path: "/v1/mailboxes/{mailbox}/request-upgrade", body: maxBody, serve: s.requestUpgrade},
		{method: "POST", path: "/v1/mailboxes/{mailbox}/upgrade", body: maxBody, serve: s.upgrade},
	}
}

// maxAccountMailboxes bounds the mailboxes of an account, as for accounts of
// LobsterMail's client.
const maxAccountMailboxes = 25

// A mailboxAnswer is an inbox in MultiMail's words. What Postern has no setting
// for has the value of how it behaves.
type mailboxAnswer struct {
	ID             string  `json:"id"`
	TenantID       string  `json:"tenant_id"`
	Address        string  `json:"address"`
	DisplayName    *string `json:"display_name"`
	OversightMode  string  `json:"oversight_mode"`
	AutoCc         *string `json:"auto_cc"`
	AutoBcc        *string `json:"auto_bcc"`
	ForwardInbound int     `json:"forward_inbound"`
	WebhookURL     *string `json:"webhook_url"`
	OversightHook  *string `json:"oversight_webhook_url"`
	SignatureBlock *string `json:"signature_block"`
	GateTiming     string  `json:"default_gate_timing"`
	Scheduling     int     `json:"scheduling_enabled"`
	AIDisclosure   int     `json:"ai_disclosure"`
	// Configured keeps MultiMail's MCP server from asking for settings at each call:
	// the mode is the owners' and the rest has one value.
	Configured int   `json:"mcp_configured"`
	CreatedAt  int64 `json:"created_at"` // milliseconds since 1970
	IsActive   int   `json:"is_active"`
}

func mailboxOf(b directory.Inbox) mailboxAnswer {
	return mailboxAnswer{
		ID: b.ID, TenantID: b.Project, Address: b.Address, DisplayName: orNull(b.DisplayName), OversightMode: string(b.Mode),
		GateTiming: string(mailbox.GateFirst), Scheduling: 1, AIDisclosure: 1, Configured: 1, CreatedAt: b.Created.UnixMilli(), IsActive: 1,
	}
}

// readAndSend is what changes beside mail need: they are sealed, so that they are read
// before they are changed, and who only reads changes nothing.
const readAndSend = seal.Read + " " + seal.Send

// own returns the inbox that the request names, and what the caller's credential may
// do in it. Everybody who has no part in it gets the same answer whether it exists or
// not. The attack: finding out which addresses exist.
func (s *Server) own(r *http.Request, c caller) (directory.Inbox, seal.Scope, error) {
	if c.key == "" {
		return directory.Inbox{}, "", fmt.Errorf("a %s manages mailboxes but cannot open them, only a key can: %w", c.Kind, auth.ErrForbidden)
	}
	return s.post.Keys.Reach(r.Context(), c.Principal, r.PathValue("mailbox"))
}

// open returns the key of the inbox that the request names, if the caller's
// credential opens it and may do there what want says.
func (s *Server) open(r *http.Request, c caller, want seal.Scope) (*seal.Key, error) {
	b, _, err := s.own(r, c)
	if err != nil {
		return nil, err
	}
	k, err := s.post.Keys.Open(r.Context(), c.Principal, c.key, b.ID)
	if err != nil {
		return nil, err
	}
	return k, keyring.May(k, want)
}

// known returns the inbox that the request names, which the caller manages or has a
// part in.
func (s *Server) known(r *http.Request, c caller) (directory.Inbox, error) {
	if directory.MayManage(c.Principal) == nil {
		return s.post.Directory.Find(r.Context(), c.Principal, r.PathValue("mailbox"))
	}
	b, _, err := s.own(r, c)
	return b, err
}

func (s *Server) listMailboxes(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Directory.Inboxes(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"mailboxes": each(list, mailboxOf)})
	return nil
}

func (s *Server) createMailbox(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		AddressLocal string  `json:"address_local"`
		Address      string  `json:"address"` // the Python SDK's name for it
		DisplayName  string  `json:"display_name"`
		Mode         string  `json:"oversight_mode"` // a new mailbox is in gated_send whatever it says, as MultiMail documents
		WebhookURL   *string `json:"webhook_url"`
		AIDisclosure *flag   `json:"ai_disclosure"`
		ApprovalCode string  `json:"approval_code"` // nothing here waits for one
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if in.Address == "" {
		in.Address = in.AddressLocal
	}
	switch {
	case in.Address == "":
		return fmt.Errorf("%w: address_local: is missing", errRequest)
	case in.WebhookURL != nil:
		return fmt.Errorf("webhook_url: create a webhook with POST /v1/webhooks, whose URL waits for a person: %w", errAbsent)
	case in.AIDisclosure != nil && !bool(*in.AIDisclosure):
		return errDisclosure
	}
	if c.Kind == auth.Grant {
		// Those that it has deleted count until they are gone: each keeps an address.
		n, err := s.post.Keys.Opens(r.Context(), c.ID)
		if err != nil {
			return err
		}
		if n >= maxAccountMailboxes {
			return fmt.Errorf("this account has %d mailboxes, with those that it deleted in the last days, which is the limit: %w", n, auth.ErrForbidden)
		}
	}
	b, key, err := s.post.CreateInbox(r.Context(), c.Principal, directory.NewInbox{Address: in.Address, DisplayName: in.DisplayName}, c.key)
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, struct {
		mailboxAnswer
		// Key opens this mailbox alone. A manager has no other way in.
		Key    string `json:"inbox_key"`
		Notice string `json:"notice"`
	}{mailboxOf(b), key.Reveal(), "inbox_key is shown this once. It opens this mailbox alone; without any key its mail is lost. An account opens the mailboxes that it made without it."})
	return nil
}

var errDisclosure = fmt.Errorf("ai_disclosure: every message that leaves carries a signed statement, which cannot be switched off: %w", auth.ErrForbidden)

func (s *Server) getMailbox(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.known(r, c)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, mailboxOf(b))
	return nil
}

// A mailboxChange is what MultiMail can change of a mailbox.
type mailboxChange struct {
	Mode           *string `json:"oversight_mode"`
	DisplayName    *string `json:"display_name"`
	AutoCc         *string `json:"auto_cc"`
	AutoBcc        *string `json:"auto_bcc"`
	Forward        *flag   `json:"forward_inbound"`
	WebhookURL     *string `json:"webhook_url"`
	OversightHook  *string `json:"oversight_webhook_url"`
	SignatureBlock *string `json:"signature_block"`
	GateTiming     *string `json:"default_gate_timing"`
	Scheduling     *flag   `json:"scheduling_enabled"`
	AIDisclosure   *flag   `json:"ai_disclosure"`
	Configured     *flag   `json:"mcp_configured"`
}

// absent returns an error if in asks for what there is no setting for. What it says
// as it is anyway is allowed.
func (in *mailboxChange) absent() error {
	set := func(v *string) bool { return v != nil && *v != "" }
	switch {
	case set(in.AutoCc), set(in.AutoBcc):
		return fmt.Errorf("auto_cc, auto_bcc: owners say who gets copies (postern inbox overseers), in mode monitored: %w", errAbsent)
	case in.Forward != nil && bool(*in.Forward):
		return fmt.Errorf("forward_inbound: mail is sealed to the mailbox's keys and is not forwarded: %w", errAbsent)
	case set(in.WebhookURL), set(in.OversightHook):
		return fmt.Errorf("webhook_url, oversight_webhook_url: use POST /v1/webhooks, whose URL waits for a person: %w", errAbsent)
	case set(in.SignatureBlock):
		return fmt.Errorf("signature_block: nothing is added to a message that a reviewer approves; write it into the message: %w", errAbsent)
	case in.GateTiming != nil && *in.GateTiming != string(mailbox.GateFirst):
		return fmt.Errorf("default_gate_timing: is gate_first; set gate_timing on each email instead: %w", errAbsent)
	case in.Scheduling != nil && !bool(*in.Scheduling):
		return fmt.Errorf("scheduling_enabled: every mailbox can schedule: %w", errAbsent)
	case in.AIDisclosure != nil && !bool(*in.AIDisclosure):
		return errDisclosure
	}
	return nil
}

// updateMailbox changes the name and the mode. A looser mode needs an owner: the
// attack is an agent that frees itself.
func (s *Server) updateMailbox(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.known(r, c)
	if err != nil {
		return err
	}
	var in mailboxChange
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	// Everything is checked before anything is changed.
	if err := in.absent(); err != nil {
		return err
	}
	if in.DisplayName != nil {
		if err := auth.Need(c.Principal, auth.Owner); err != nil {
			return err
		}
		next := b
		next.DisplayName = *in.DisplayName
		if err := next.Check(); err != nil {
			return err
		}
	}
	mode := policy.Mode("")
	if in.Mode != nil {
		mode = policy.Mode(*in.Mode)
		switch {
		case !mode.Known():
			return fmt.Errorf("%w: oversight_mode: must be one of %v", errRequest, policy.Modes())
		case mode.Looser(b.Mode):
			return fmt.Errorf("oversight_mode: %s is looser than %s: ask for it with POST …/request-upgrade, and an owner decides: %w", mode, b.Mode, auth.ErrForbidden)
		}
	}
	if in.DisplayName != nil {
		if b, err = s.post.Update(r.Context(), c.Principal, b.ID, mailbox.Change{DisplayName: in.DisplayName}); err != nil {
			return err
		}
	}
	if in.Mode != nil {
		if b, err = s.post.SetMode(r.Context(), c.Principal, b.ID, mode, "set over MultiMail's API"); err != nil {
			return err
		}
	}
	if in.DisplayName == nil && in.Mode == nil {
		// There is nothing to write, but a caller without the right to write is refused.
		if err := s.manages(r, c); err != nil {
			return err
		}
	}
	answer(w, http.StatusOK, struct {
		Status string `json:"status"`
		mailboxAnswer
	}{"updated", mailboxOf(b)})
	return nil
}

// manages returns an error unless the caller manages the mailbox that the request
// names.
func (s *Server) manages(r *http.Request, c caller) error {
	if directory.MayManage(c.Principal) == nil {
		return nil
	}
	_, err := s.open(r, c, seal.Manage)
	return err
}

func (s *Server) deleteMailbox(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.post.Delete(r.Context(), c.Principal, r.PathValue("mailbox"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"status": "deleted", "id": b.ID, "purge_at": b.Purge})
	return nil
}

// requestUpgrade asks the owners for a looser mode. They approve the request, or
// give the agent a code. No code is mailed: a mail to the operator that passes
// through this server is one that an agent could get to read.
func (s *Server) requestUpgrade(w http.ResponseWriter, r *http.Request, c caller) error {
	b, _, err := s.own(r, c)
	if err != nil {
		return err
	}
	var in struct {
		TargetMode string `json:"target_mode"`
		Reason     string `json:"reason"` // ours: owners read it
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	a, err := s.post.RequestMode(r.Context(), c.Principal, "rest", b.ID, policy.Mode(in.TargetMode), in.Reason)
	if err != nil {
		return err
	}
	if a.State == oversight.Denied {
		return &blockedError{a.ID, a.Verdict}
	}
	answer(w, http.StatusOK, map[string]any{
		"status": "upgrade_requested", "id": a.ID, "target_mode": in.TargetMode,
		"message": "An owner decides. They approve the request, and the mode changes then, or they give you a code for POST …/upgrade, which works once within 24 hours.",
	})
	return nil
}

func (s *Server) upgrade(w http.ResponseWriter, r *http.Request, c caller) error {
	b, _, err := s.own(r, c)
	if err != nil {
		return err
	}
	var in struct {
		Code string `json:"code"`
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if b, err = s.post.RaiseMode(r.Context(), c.Principal, b.ID, auth.Secret(in.Code)); err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"status": "upgraded", "id": b.ID, "oversight_mode": b.Mode})
	return nil
}
