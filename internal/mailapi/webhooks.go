package mailapi

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/event"
	"postern/internal/keyring"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/webhook"
)

// A webhookServer serves the webhooks of an inbox.
type webhookServer struct {
	access

	hooks *webhook.Hooks
}

// Webhooks of an inbox belong to its keys; the project has others, at
// /events/webhooks.
func (s webhookServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/webhooks", 0, s.listWebhooks},
		{"POST", "/v1/inboxes/{inbox}/webhooks", maxBody, s.createWebhook},
		{"GET", "/v1/inboxes/{inbox}/webhooks/{id}", 0, s.getWebhook},
		{"PATCH", "/v1/inboxes/{inbox}/webhooks/{id}", maxBody, s.updateWebhook},
		{"DELETE", "/v1/inboxes/{inbox}/webhooks/{id}", 0, s.deleteWebhook},
		{"POST", "/v1/inboxes/{inbox}/webhooks/{id}/rotation", maxBody, s.rotateWebhook},
		{"GET", "/v1/inboxes/{inbox}/webhooks/{id}/deliveries", 0, s.listDeliveries},
		{"POST", "/v1/inboxes/{inbox}/webhooks/{id}/deliveries/{delivery}/redelivery", 0, s.redeliver},
	}
}

func webhookOf(w webhook.Webhook) api.Webhook {
	return api.Webhook{
		ID: w.ID, Name: w.Name, URL: w.URL, Events: each(w.Events, func(t event.Type) string { return string(t) }), Enabled: w.Enabled, State: w.State(), Action: w.Waits, Reason: w.Reason,
		Credential: w.Credential, CreatedAt: w.Created,
	}
}

// hookOwner returns as whom the caller manages the webhooks of the inbox that
// the request names, if its scope there includes want.
func (s webhookServer) hookOwner(r *http.Request, c caller, want seal.Scope) (auth.Principal, error) {
	k, err := s.open(r, c)
	if err != nil {
		return auth.Principal{}, err
	}
	if err := keyring.May(k, want); err != nil {
		return auth.Principal{}, err
	}
	who := c.Principal
	who.Inbox = k.Inbox()
	return who, nil
}

// ownHook is hookOwner for a request that names one of them, whose id it returns
// too.
func (s webhookServer) ownHook(r *http.Request, c caller, want seal.Scope) (auth.Principal, string, error) {
	who, err := s.hookOwner(r, c, want)
	if err != nil {
		return auth.Principal{}, "", err
	}
	name, err := id(r)
	return who, name, err
}

func (s webhookServer) listWebhooks(w http.ResponseWriter, r *http.Request, c caller) error {
	who, err := s.hookOwner(r, c, seal.Read)
	if err != nil {
		return err
	}
	list, err := s.hooks.List(r.Context(), who)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.WebhookList{Webhooks: each(list, webhookOf)})
	return nil
}

// hookChange returns the change that c asks for.
func hookChange(c api.WebhookChange) webhook.Change {
	out := webhook.Change{Name: c.Name, URL: c.URL, Enabled: c.Enabled}
	if c.Events != nil { // an empty list differs from none
		out.Events = each(c.Events, func(t string) event.Type { return event.Type(t) })
	}
	return out
}

func (s webhookServer) createWebhook(w http.ResponseWriter, r *http.Request, c caller) error {
	who, err := s.hookOwner(r, c, seal.Manage)
	if err != nil {
		return err
	}
	var in api.WebhookChange
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if in.Name == nil {
		in.Name = new("webhook")
	}
	if in.Events == nil {
		in.Events = each(event.MailTypes(), func(t event.Type) string { return string(t) })
	}
	h, secret, err := s.hooks.Create(r.Context(), who, hookChange(in))
	if err != nil {
		return err
	}
	out := webhookOf(h)
	out.Secret = secret.Reveal()
	answer(w, http.StatusCreated, out)
	return nil
}

func (s webhookServer) getWebhook(w http.ResponseWriter, r *http.Request, c caller) error {
	who, id, err := s.ownHook(r, c, seal.Read)
	if err != nil {
		return err
	}
	h, err := s.hooks.Get(r.Context(), who, id)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, webhookOf(h))
	return nil
}

func (s webhookServer) updateWebhook(w http.ResponseWriter, r *http.Request, c caller) error {
	who, id, err := s.ownHook(r, c, seal.Manage)
	if err != nil {
		return err
	}
	var in api.WebhookChange
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	h, err := s.hooks.Update(r.Context(), who, id, hookChange(in))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, webhookOf(h))
	return nil
}

func (s webhookServer) deleteWebhook(w http.ResponseWriter, r *http.Request, c caller) error {
	who, id, err := s.ownHook(r, c, seal.Manage)
	if err != nil {
		return err
	}
	if err := s.hooks.Delete(r.Context(), who, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// overlap is how long two secrets are valid unless a rotation says otherwise.
const overlap = 24 * time.Hour

func (s webhookServer) rotateWebhook(w http.ResponseWriter, r *http.Request, c caller) error {
	who, id, err := s.ownHook(r, c, seal.Manage)
	if err != nil {
		return err
	}
	var in api.WebhookRotation
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	both := overlap
	if in.OverlapSeconds != nil {
		most := int64(webhook.MaxOverlap / time.Second)
		if *in.OverlapSeconds < 0 || *in.OverlapSeconds > most {
			return fmt.Errorf("%w: overlap_seconds: must be 0 to %d", errRequest, most)
		}
		both = time.Duration(*in.OverlapSeconds) * time.Second
	}
	h, secret, until, err := s.hooks.Rotate(r.Context(), who, id, both)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.RotatedWebhook{ID: h.ID, Secret: secret.Reveal(), OldSecretUntil: until})
	return nil
}

func deliveryOf(d webhook.Delivery) api.WebhookDelivery {
	out := api.WebhookDelivery{ID: d.ID, Event: d.Event, Type: string(d.Type), State: string(d.State), Attempts: d.Attempts, Error: d.Error, CreatedAt: d.Created}
	if d.Status != 0 {
		out.Status = &d.Status
	}
	if d.Duration != 0 {
		out.Duration = new(float64(d.Duration.Microseconds()) / 1000)
	}
	if !d.Last.IsZero() {
		out.LastAttemptAt = &d.Last
	}
	if !d.Next.IsZero() {
		out.NextAttemptAt = &d.Next
	}
	return out
}

func (s webhookServer) listDeliveries(w http.ResponseWriter, r *http.Request, c caller) error {
	who, id, err := s.ownHook(r, c, seal.Read)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	n, err := limit(q, 50, 99)
	if err != nil {
		return err
	}
	// The log grows at its beginning: a page may repeat what the one before
	// had, and leaves nothing out.
	offset := 0
	if q.Has("cursor") {
		if offset, err = strconv.Atoi(q.Get("cursor")); err != nil || offset < 0 || offset > 1<<20 {
			return fmt.Errorf("%w: cursor: must be the next_cursor of the page before", errRequest)
		}
	}
	ds, err := s.hooks.Deliveries(r.Context(), who, id, offset, n+1)
	if err != nil {
		return err
	}
	out, next := []api.WebhookDelivery{}, ""
	for i, d := range ds {
		if i == n {
			next = strconv.Itoa(offset + n)
			break
		}
		out = append(out, deliveryOf(d))
	}
	answer(w, http.StatusOK, api.WebhookDeliveryList{Deliveries: out, NextCursor: next})
	return nil
}

func (s webhookServer) redeliver(w http.ResponseWriter, r *http.Request, c caller) error {
	who, id, err := s.ownHook(r, c, seal.Manage)
	if err != nil {
		return err
	}
	if !idForm().MatchString(r.PathValue("delivery")) {
		return fmt.Errorf("delivery in the path: %w", store.ErrNotFound)
	}
	d, err := s.hooks.Redeliver(r.Context(), who, id, r.PathValue("delivery"))
	if err != nil {
		return err
	}
	answer(w, http.StatusAccepted, deliveryOf(d))
	return nil
}
