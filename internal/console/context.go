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

// Inboxes are sealed, and no page opens one, but for a reviewer to whom the holder of an
// inbox's key has given a context grant: then pages show what a waiting action is about,
// and who sent what is in quarantine. The grant's secret is kept under a key that this
// browser alone has, in a cookie of its own; see package keyring.

// deviceTime is how long a browser keeps its key. Browsers keep none for longer.
const deviceTime = 400 * 24 * time.Hour

// deviceCookie returns the name of the cookie with the browser's key; see [Server.cookie]
// for the prefix.
func (s *Server) deviceCookie() string {
	if s.conf.Secure {
		return "__Host-" + auth.DeviceCookie
	}
	return auth.DeviceCookie
}

// device returns the browser's key; it is empty if it has none.
func (s *Server) device(r *http.Request) auth.Secret {
	c, err := r.Cookie(s.deviceCookie())
	if err != nil || len(c.Value) != 52 {
		return ""
	}
	return auth.Secret(c.Value)
}

// keepDevice gives the browser its key. It outlives sessions: signing in needs a person
// each time, and the key alone is nobody.
func (s *Server) keepDevice(w http.ResponseWriter, device auth.Secret) {
	path := "/console"
	if s.conf.Secure {
		path = "/" // as the name's prefix demands
	}
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // Secure is the operator's: on the loopback there is no TLS
		Name: s.deviceCookie(), Value: device.Reveal(), Path: path, HttpOnly: true, Secure: s.conf.Secure,
		SameSite: http.SameSiteStrictMode, MaxAge: int(deviceTime.Seconds()),
	})
}

// A thread is what an action's page says of what it is about.
type thread struct {
	mailbox.Conversation
	Why  string // why nothing is shown; empty if something is
	Code bool   // a code of a grant would help
}

// thread returns what a is about, or why that is not shown. It is nil where a page has no
// place for it. An inbox that cannot be opened does not keep a reviewer from deciding.
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

// senders returns who sent what is in quarantine, by the IDs of the messages, for the
// inboxes that who may see in this browser, and the inboxes themselves.
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
			continue // it has just ended
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

// A seenInbox is an inbox whose waiting actions a person may understand.
type seenInbox struct {
	keyring.ContextGrant
	Address string
}

// A contextPage lists the inboxes that a person may read as far as grants go.
type contextPage struct {
	Grants []seenInbox
	Name   string // of the person: what the holder of a key needs
	Notice string
	Days   int // that a code lasts
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

// redeem takes a code from the form's body, never from an address: what opens mail is in
// no log and no history of a browser.
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
