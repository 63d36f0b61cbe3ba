package multimail

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/event"
	"postern/internal/keyring"
	"postern/internal/seal"
	"postern/internal/webhook"
)

func (s *Server) webhookRoutes() []route {
	return []route{
		{method: "GET", path: "/v1/webhooks", serve: s.listWebhooks},
		{method: "POST", path: "/v1/webhooks", body: maxBody, serve: s.createWebhook},
		{method: "GET", path: "/v1/webhooks/{id}", serve: s.getWebhook},
		{method: "DELETE", path: "/v1/webhooks/{id}", serve: s.deleteWebhook},
		{method: "GET", path: "/v1/webhook-deliveries", serve: s.listDeliveries},
	}
}

// A subscription is a webhook in MultiMail's words.
type subscription struct {
	ID        string    `json:"id"`
	URL       string    `json:"url"`
	Events    []string  `json:"events"`
	MailboxID *string   `json:"mailbox_id"`
	Status    string    `json:"status"`    // active, waiting for a person, or disabled
	ActionID  *string   `json:"action_id"` // that a person decides on; null if none does
	CreatedAt time.Time `json:"created_at"`
	Secret    string    `json:"signing_secret,omitempty"` // when it was made, once
}

func subscriptionOf(h webhook.Webhook) subscription {
	return subscription{
		ID: h.ID, URL: h.URL, Events: each(h.Events, func(t event.Type) string { return string(t) }), MailboxID: orNull(h.Inbox), Status: h.State(), ActionID: orNull(h.Waits), CreatedAt: h.Created,
	}
}

// hooksOf returns as whom the caller manages webhooks: of the mailbox that is named,
// or of all that its key has. It needs the scope admin in each of them.
func (s *Server) hooksOf(r *http.Request, c caller, mailbox string) (auth.Principal, error) {
	who := c.Principal
	switch {
	case c.Kind == auth.Agent && mailbox == "":
		mailbox = c.Inbox
	case c.Kind == auth.Grant && mailbox == "":
		list, err := s.managed(r, c)
		if err != nil {
			return who, err
		}
		all, err := s.post.Directory.Inboxes(r.Context(), c.Principal)
		if err == nil && len(list) < len(all) {
			err = fmt.Errorf("this key does not have the scope admin in every mailbox: name one in mailbox_id: %w", auth.ErrForbidden)
		}
		return who, err
	case mailbox == "":
		return who, nil
	}
	if c.key == "" {
		return who, fmt.Errorf("webhooks of a mailbox belong to its keys: %w", auth.ErrForbidden)
	}
	k, err := s.post.Keys.Open(r.Context(), c.Principal, c.key, mailbox)
	if err != nil {
		return who, err
	}
	who.Inbox = k.Inbox()
	return who, keyring.May(k, seal.Manage)
}

// hooks returns the webhooks that the caller may see.
func (s *Server) hooks(r *http.Request, c caller) ([]webhook.Webhook, error) {
	who, err := s.hooksOf(r, c, "")
	if err != nil {
		return nil, err
	}
	return s.conf.Webhooks.List(r.Context(), who)
}

func (s *Server) listWebhooks(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.hooks(r, c)
	if err != nil {
		return err
	}
	out := each(list, subscriptionOf)
	answer(w, http.StatusOK, map[string]any{"subscriptions": out, "webhooks": out}) // the latter is the Python SDK's name
	return nil
}

func (s *Server) createWebhook(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		URL          string   `json:"url"`
		Events       []string `json:"events"`
		MailboxID    string   `json:"mailbox_id"`
		Secret       string   `json:"secret"`
		ApprovalCode string   `json:"approval_code"` // a person decides on the URL instead
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	who, err := s.hooksOf(r, c, in.MailboxID)
	if err != nil {
		return err
	}
	name := "MultiMail"
	change := webhook.Change{Name: &name, URL: &in.URL, Events: []event.Type{}}
	for _, t := range in.Events {
		// MultiMail's guides have email.received where its MCP server has message.received.
		if rest, ok := strings.CutPrefix(t, "email."); ok {
			t = "message." + rest
		}
		change.Events = append(change.Events, event.Type(t))
	}
	if in.Secret != "" {
		secret := auth.Secret(in.Secret)
		change.Secret = &secret
	}
	if u, err := url.Parse(in.URL); err != nil || u.Host == "" {
		return fmt.Errorf("%w: url: must be an https URL", errRequest)
	}
	h, secret, err := s.conf.Webhooks.CreateAs(r.Context(), who, webhook.MultiMail, change)
	if err != nil {
		return err
	}
	out := subscriptionOf(h)
	out.Secret = secret.Reveal()
	answer(w, http.StatusCreated, out)
	return nil
}

// hook returns the webhook that the request names, and as whom the caller manages it.
func (s *Server) hook(r *http.Request, c caller) (webhook.Webhook, auth.Principal, error) {
	name, err := id(r, "id")
	if err != nil {
		return webhook.Webhook{}, auth.Principal{}, err
	}
	who := c.Principal
	h, err := s.conf.Webhooks.Get(r.Context(), who, name)
	if err != nil {
		return h, who, err
	}
	who, err = s.hooksOf(r, c, h.Inbox)
	return h, who, err
}

func (s *Server) getWebhook(w http.ResponseWriter, r *http.Request, c caller) error {
	h, _, err := s.hook(r, c)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, subscriptionOf(h))
	return nil
}

func (s *Server) deleteWebhook(w http.ResponseWriter, r *http.Request, c caller) error {
	h, who, err := s.hook(r, c)
	if err != nil {
		return err
	}
	if err := s.conf.Webhooks.Delete(r.Context(), who, h.ID); err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"status": "deleted", "id": h.ID})
	return nil
}

// A delivery is an attempt to tell a webhook of an event.
type delivery struct {
	ID          string     `json:"id"`
	WebhookID   string     `json:"webhook_id"`
	EventType   string     `json:"event_type"`
	URL         string     `json:"url"`
	Status      string     `json:"status"` // pending, delivered or failed
	Attempts    int        `json:"attempts"`
	Response    *int       `json:"response_status"`
	CreatedAt   time.Time  `json:"created_at"`
	LastAttempt *time.Time `json:"last_attempt_at"`
}

// listDeliveries lists the newest deliveries of all webhooks together.
func (s *Server) listDeliveries(w http.ResponseWriter, r *http.Request, c caller) error {
	q := r.URL.Query()
	if err := parameters(q, "limit", "cursor"); err != nil {
		return err
	}
	n, err := limit(q, 50)
	if err != nil {
		return err
	}
	if q.Get("cursor") != "" {
		return fmt.Errorf("%w: cursor: this list has one page; GET /v1/inboxes/{inbox}/webhooks/{id}/deliveries of this server has all", errRequest)
	}
	list, err := s.hooks(r, c)
	if err != nil {
		return err
	}
	out := []delivery{}
	for _, h := range list {
		who, err := s.hooksOf(r, c, h.Inbox)
		if err != nil {
			return err
		}
		ds, err := s.conf.Webhooks.Deliveries(r.Context(), who, h.ID, 0, n)
		if err != nil {
			return err
		}
		for _, d := range ds {
			status := string(d.State)
			if d.State == webhook.Waiting {
				status = "pending"
			}
			out = append(out, delivery{d.ID, h.ID, string(d.Type), h.URL, status, d.Attempts, orNull(d.Status), d.Created, orNull(d.Last)})
		}
	}
	slices.SortStableFunc(out, func(a, b delivery) int { return b.CreatedAt.Compare(a.CreatedAt) })
	answer(w, http.StatusOK, map[string]any{"deliveries": out[:min(n, len(out))], "cursor": nil})
	return nil
}
