package console

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/store"
)

// Inboxes are sealed, and no page can open one. There is one exception: the holder of an
// inbox's key can give a reviewer a context grant. Pages then show that reviewer the
// conversations of waiting actions, and the senders of messages in quarantine. The grant's
// secret is encrypted with a key that only this browser has, in a cookie of its own; see
// package keyring.

// deviceTime is how long a browser keeps its key. Browsers keep no cookie for longer.
const deviceTime = 400 * 24 * time.Hour

// deviceCookie returns the name of the cookie with the browser's key; see [Server.cookie]
// for the prefix.
func (s *Server) deviceCookie() string {
	if s.conf.Secure {
		return "__Host-" + auth.DeviceCookie
	}
	return auth.DeviceCookie
}

// device returns the browser's key. It is empty if the browser has none.
func (s *Server) device(r *http.Request) auth.Secret {
	c, err := r.Cookie(s.deviceCookie())
	if err != nil || len(c.Value) != 52 {
		return ""
	}
	return auth.Secret(c.Value)
}

// keepDevice gives the browser its key. The key outlives sessions: a person must sign in
// each time, and the key alone gives no access.
func (s *Server) keepDevice(w http.ResponseWriter, device auth.Secret) {
	path := "/console"
	if s.conf.Secure {
		path = "/" // the prefix of the name requires it
	}
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // Secure is the operator's: on the loopback there is no TLS
		Name: s.deviceCookie(), Value: device.Reveal(), Path: path, HttpOnly: true, Secure: s.conf.Secure,
		SameSite: http.SameSiteStrictMode, MaxAge: int(deviceTime.Seconds()),
	})
}

// A thread is the conversation that an action belongs to, as the action's page shows it.
type thread struct {
	mailbox.Conversation
	Why  string // why nothing is shown; empty if something is
	Code bool   // the code of a grant would help
}

// thread returns the conversation that a belongs to, or why it is not shown. It returns nil
// if a does not wait or is not mail. A reviewer can decide even if the inbox cannot be opened.
func (s reviews) thread(r *http.Request, who auth.Principal, a *oversight.Action) *thread {
	if a.State != oversight.Pending || a.Inbox == "" || a.Kind != mailbox.SendKind && a.Kind != mailbox.ReceiveKind {
		return nil
	}
	if !who.Decides() {
		return &thread{Why: "Only a reviewer can be given a grant to see it."}
	}
	ctx := r.Context()
	device := s.device(r)
	k, err := s.post.Keys.OpenContext(ctx, who, device, a.Inbox)
	if err == nil {
		var c mailbox.Conversation
		if c, err = s.post.Contexts.Of(ctx, who, k, a); err == nil {
			t := &thread{Conversation: c}
			if len(c.Said) == 0 {
				t.Why = "This mail answers none of the inbox."
			}
			return t
		}
	}
	if !errors.Is(err, keyring.ErrNoContext) && !errors.Is(err, auth.ErrForbidden) && !errors.Is(err, directory.ErrNoInbox) {
		s.log.ErrorContext(ctx, "read what an action is about", "action", a.ID, "err", err)
		return &thread{Why: "It could not be read. The server’s log says why."}
	}
	t := &thread{Code: true, Why: "The inbox is sealed. Who holds its key can let you see what its waiting actions are about."}
	list, err := s.post.Keys.ContextOf(ctx, who, device)
	if err == nil && slices.ContainsFunc(list, func(g keyring.ContextGrant) bool { return g.Inbox == a.Inbox }) {
		t.Why = "You may see it, but in another browser: this one does not have the key."
	}
	return t
}

// senders returns the senders of messages in quarantine, by the IDs of the messages, for the
// inboxes that who may see in this browser. open has the IDs of these inboxes.
func (s reviews) senders(r *http.Request, who auth.Principal) (byID map[string]mailbox.Sender, open map[string]bool, err error) {
	byID, open = map[string]mailbox.Sender{}, map[string]bool{}
	device := s.device(r)
	if device == "" || !who.Decides() {
		return byID, open, nil
	}
	ctx := r.Context()
	grants, err := s.post.Keys.ContextOf(ctx, who, device)
	if err != nil {
		return nil, nil, err
	}
	for _, g := range grants {
		if !g.Here || open[g.Inbox] {
			continue
		}
		list, err := s.heldIn(ctx, who, device, g.Inbox)
		if errors.Is(err, keyring.ErrNoContext) || errors.Is(err, auth.ErrForbidden) || errors.Is(err, directory.ErrNoInbox) {
			continue // the grant has just ended
		}
		if err != nil {
			return nil, nil, err
		}
		open[g.Inbox] = true
		for _, m := range list {
			byID[m.ID] = m
		}
	}
	return byID, open, nil
}

func (s reviews) heldIn(ctx context.Context, who auth.Principal, device auth.Secret, inbox string) ([]mailbox.Sender, error) {
	k, err := s.post.Keys.OpenContext(ctx, who, device, inbox)
	if err != nil {
		return nil, err
	}
	return s.post.Contexts.Held(ctx, who, k)
}

// A seenInbox is an inbox that a person has a context grant for.
type seenInbox struct {
	keyring.ContextGrant
	Address string
}

// A contextPage lists the inboxes that a person has context grants for.
type contextPage struct {
	Grants []seenInbox
	Name   string // of the person; the holder of a key needs it
	Notice string
	Days   int // for which a code is valid
}

// contextHandlers redeem context grants, and end them.
type contextHandlers struct{ reviews }

func (s contextHandlers) routes() []route {
	return []route{
		{"GET", "/console/account/context", views, s.list},
		{"POST", "/console/account/context", decides, s.redeem},
		{"POST", "/console/account/context/{id}/remove", decides, s.remove},
	}
}

func (s contextHandlers) list(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.show(w, r, who, http.StatusOK, "")
}

func (s contextHandlers) show(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	list, err := s.post.Keys.ContextOf(r.Context(), who, s.device(r))
	if err != nil {
		return err
	}
	names, err := s.addresses(r.Context(), who)
	if err != nil {
		return err
	}
	v := contextPage{Name: who.ID, Notice: notice, Days: int(keyring.ContextCodeTime.Hours() / 24)}
	for _, g := range list {
		v.Grants = append(v.Grants, seenInbox{g, or(names[g.Inbox], g.Inbox)})
	}
	return s.render(r.Context(), w, status, page{Name: "context", Title: "Inboxes that you may read", Who: who, Here: "account", Body: v})
}

// redeem takes a code from the form's body, never from an address: a secret that opens mail
// must not get into a log or the history of a browser.
func (s contextHandlers) redeem(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	device := s.device(r)
	if device == "" {
		device = auth.Secret(rand.Text() + rand.Text())
	}
	code := auth.Secret(strings.TrimSpace(r.PostForm.Get("code")))
	_, err := s.post.Keys.RedeemContext(r.Context(), who, code, device, r.UserAgent())
	switch {
	case errors.Is(err, keyring.ErrContextCode):
		return s.show(w, r, who, http.StatusBadRequest, "Nothing was changed: this code is not for you, was used already, or has ended. Ask for a new one.")
	case errors.Is(err, keyring.ErrKeys), errors.Is(err, directory.ErrNoInbox):
		return s.show(w, r, who, http.StatusConflict, "Nothing was changed: "+err.Error()+".")
	case err != nil:
		return err
	}
	s.keepDevice(w, device)
	http.Redirect(w, r, "/console/account/context", http.StatusSeeOther)
	return nil
}

func (s contextHandlers) remove(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id := r.PathValue("id")
	if !credentialID().MatchString(id) {
		return fmt.Errorf("grant %q: %w", id, store.ErrNotFound)
	}
	err := s.post.Keys.LeaveContext(r.Context(), who, id)
	if errors.Is(err, keyring.ErrNoKey) {
		return s.show(w, r, who, http.StatusConflict, "Nothing was changed: you have no such grant.")
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/account/context", http.StatusSeeOther)
	return nil
}
