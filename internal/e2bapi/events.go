package e2bapi

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/webhook"
)

// handlerFunc is the type of the handlers of the control API.
type handlerFunc = func(w http.ResponseWriter, r *http.Request, who auth.Principal) error

// observe declares the routes for observing sandboxes: events, webhooks, metrics,
// logs and teams.
func (s *Server) observe(handle func(pattern string, h handlerFunc)) {
	handle("GET /events/sandboxes", s.listEvents)
	handle("GET /events/sandboxes/{id}", s.listEvents)
	handle("GET /events/webhooks", s.listWebhooks)
	handle("POST /events/webhooks", s.createWebhook)
	handle("GET /events/webhooks/{id}", s.getWebhook)
	handle("PATCH /events/webhooks/{id}", s.updateWebhook)
	handle("DELETE /events/webhooks/{id}", s.deleteWebhook)
	handle("GET /events/webhooks/{id}/deliveries", s.listDeliveries)
	handle("POST /events/webhooks/{id}/deliveries/{delivery}/redeliver", s.redeliver)
	handle("GET /sandboxes/{id}/metrics", s.sandboxMetrics)
	handle("GET /sandboxes/metrics", s.sandboxesMetrics)
	handle("GET /sandboxes/{id}/logs", s.sandboxLogs)
	handle("GET /v2/sandboxes/{id}/logs", s.sandboxLogsV2)
	handle("GET /teams", s.listTeams)
	handle("GET /teams/{id}/metrics", s.teamMetrics)
	handle("GET /teams/{id}/metrics/max", s.teamMetricsMax)
}

// number returns a query parameter as a number from least to most, or unset if it
// is missing.
func number(q url.Values, name string, unset, least, most int64) (int64, error) {
	v := q.Get(name)
	if v == "" {
		return unset, nil
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < least || n > most {
		return 0, fmt.Errorf("%w: %s: must be a number from %d to %d", errRequest, name, least, most)
	}
	return n, nil
}

// flagOf returns a query parameter as a boolean; a missing one is false.
func flagOf(q url.Values, name string) (bool, error) {
	switch q.Get(name) {
	case "", "false", "0":
		return false, nil
	case "true", "1":
		return true, nil
	}
	return false, fmt.Errorf("%w: %s: must be true or false", errRequest, name)
}

// offsetOf returns the query's offset and limit.
func offsetOf(q url.Values) (offset, limit int, err error) {
	o, err := number(q, "offset", 0, 0, 1<<31)
	if err != nil {
		return 0, 0, err
	}
	l, err := number(q, "limit", 10, 1, 100)
	return int(o), int(l), err
}

// listEvents answers with events in the lives of the project's sandboxes, or of
// one of them.
func (s *Server) listEvents(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	q := r.URL.Query()
	offset, limit, err := offsetOf(q)
	if err != nil {
		return err
	}
	asc, err := flagOf(q, "orderAsc")
	if err != nil {
		return err
	}
	query := event.Query{Offset: offset, Limit: limit, Asc: asc}
	if id := r.PathValue("id"); id != "" {
		if query.Sandbox = shortID(id); !sandboxID().MatchString(query.Sandbox) {
			return fmt.Errorf("%w: %q is not the ID of a sandbox", errRequest, id)
		}
	}
	es, err := event.List(r.Context(), s.db, who, query)
	if err != nil {
		return err
	}
	if es == nil {
		es = []event.Event{}
	}
	reply(w, http.StatusOK, es)
	return nil
}

// hook is a webhook in JSON. E2B's documentation has spelled the team's field in
// both ways.
type hook struct {
	ID        string       `json:"id"`
	TeamID    string       `json:"teamId"`
	TeamID2   string       `json:"teamID"`
	Name      string       `json:"name"`
	URL       string       `json:"url"`
	Enabled   bool         `json:"enabled"`
	Events    []event.Type `json:"events"`
	CreatedAt string       `json:"createdAt"`
	Reason    string       `json:"disabledReason,omitempty"`  // why the server disabled it
	Secret    string       `json:"signatureSecret,omitempty"` // only in the answer to create, and only if the server generated it
}

// hookOf returns a webhook in JSON.
func hookOf(w webhook.Webhook) hook {
	return hook{
		ID: w.ID, TeamID: w.Project, TeamID2: w.Project, Name: w.Name, URL: w.URL, Enabled: w.Enabled, Events: w.Events,
		CreatedAt: w.Created.Format(time.RFC3339Nano), Reason: w.Reason,
	}
}

// hookChange is the body of create and update.
type hookChange struct {
	Name    *string      `json:"name"`
	URL     *string      `json:"url"`
	Enabled *bool        `json:"enabled"`
	Events  []event.Type `json:"events"`
	Secret  *string      `json:"signatureSecret"`
	Alias   *string      `json:"secret"` // alternative name of signatureSecret
}

// change checks the fields of the body and returns them as a change of a webhook.
func (c hookChange) change() (webhook.Change, error) {
	out := webhook.Change{Name: c.Name, URL: c.URL, Enabled: c.Enabled, Events: c.Events}
	if c.Secret == nil {
		c.Secret = c.Alias
	} else if c.Alias != nil {
		return out, fmt.Errorf("%w: secret: means the same as signatureSecret; send only one of them", errRequest)
	}
	if c.Secret != nil {
		secret := auth.Secret(*c.Secret)
		out.Secret = &secret
	}
	return out, nil
}

func (s *Server) listWebhooks(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	all, err := s.conf.Webhooks.List(r.Context(), who)
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, each(all, hookOf))
	return nil
}

// createWebhook creates a webhook. A generated secret is in this answer only.
func (s *Server) createWebhook(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b hookChange
	if err := decode(r, &b); err != nil {
		return err
	}
	c, err := b.change()
	if err != nil {
		return err
	}
	made, secret, err := s.conf.Webhooks.Create(r.Context(), who, c)
	if err != nil {
		return err
	}
	out := hookOf(made)
	out.Secret = secret.Reveal()
	w.Header().Set("Cache-Control", "no-store")
	reply(w, http.StatusCreated, out)
	return nil
}

func (s *Server) getWebhook(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	h, err := s.conf.Webhooks.Get(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, hookOf(h))
	return nil
}

func (s *Server) updateWebhook(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b hookChange
	if err := decode(r, &b); err != nil {
		return err
	}
	c, err := b.change()
	if err != nil {
		return err
	}
	h, err := s.conf.Webhooks.Update(r.Context(), who, r.PathValue("id"), c)
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, hookOf(h))
	return nil
}

func (s *Server) deleteWebhook(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if err := s.conf.Webhooks.Delete(r.Context(), who, r.PathValue("id")); err != nil {
		return err
	}
	reply(w, http.StatusOK, map[string]any{"id": r.PathValue("id")})
	return nil
}

// delivery is a delivery of a webhook in JSON. Times in the future are null.
type delivery struct {
	ID            string        `json:"id"`
	WebhookID     string        `json:"webhookId"`
	EventID       string        `json:"eventId"`
	EventType     event.Type    `json:"eventType"`
	SandboxID     string        `json:"sandboxId"`
	Status        webhook.State `json:"status"`
	Attempts      int           `json:"attempts"`
	ResponseCode  *int          `json:"responseStatusCode"`
	DurationMS    *float64      `json:"durationMs"`
	Error         *string       `json:"error"`
	CreatedAt     *string       `json:"createdAt"`
	LastAttemptAt *string       `json:"lastAttemptAt"`
	NextAttemptAt *string       `json:"nextAttemptAt"`
}

// deliveryOf returns a delivery in JSON.
func deliveryOf(d webhook.Delivery) delivery {
	at := func(t time.Time) *string {
		if t.IsZero() {
			return nil
		}
		return new(t.Format(time.RFC3339Nano))
	}
	out := delivery{
		ID: d.ID, WebhookID: d.Webhook, EventID: d.Event, EventType: d.Type, SandboxID: d.Sandbox, Status: d.State, Attempts: d.Attempts,
		CreatedAt: at(d.Created), LastAttemptAt: at(d.Last), NextAttemptAt: at(d.Next),
	}
	if d.Status != 0 {
		out.ResponseCode = &d.Status
	}
	if d.Duration != 0 {
		out.DurationMS = new(float64(d.Duration.Microseconds()) / 1000)
	}
	if d.Error != "" {
		out.Error = &d.Error
	}
	return out
}

func (s *Server) listDeliveries(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	offset, limit, err := offsetOf(r.URL.Query())
	if err != nil {
		return err
	}
	ds, err := s.conf.Webhooks.Deliveries(r.Context(), who, r.PathValue("id"), offset, limit)
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, each(ds, deliveryOf))
	return nil
}

// redeliver schedules a delivery once more.
func (s *Server) redeliver(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	d, err := s.conf.Webhooks.Redeliver(r.Context(), who, r.PathValue("id"), r.PathValue("delivery"))
	if err != nil {
		return err
	}
	reply(w, http.StatusAccepted, deliveryOf(d))
	return nil
}
