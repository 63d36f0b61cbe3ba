package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/store"
	"postern/internal/webhook"
)

// A webhooksPage lists the project's webhooks, and has the form that makes one.
type webhooksPage struct {
	Hooks  []webhook.Webhook
	Types  []event.Type
	Notice string
	Name   string // as typed into a rejected form
	URL    string
	Chosen []string
}

// Has reports whether a type of event was chosen.
func (p webhooksPage) Has(t event.Type) bool { return slices.Contains(p.Chosen, string(t)) }

// webhookHandlers manages the webhooks of the project.
type webhookHandlers struct{ *Server }

func (s webhookHandlers) routes() []route {
	return []route{
		{"GET", "/console/webhooks", views, s.webhooks},
		{"POST", "/console/webhooks", manages, s.createWebhook},
		{"GET", "/console/webhooks/{id}", views, s.webhook},
		{"POST", "/console/webhooks/{id}", manages, s.changeWebhook},
	}
}

func (s webhookHandlers) webhooks(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showWebhooks(w, r, who, http.StatusOK, webhooksPage{})
}

func (s webhookHandlers) showWebhooks(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, p webhooksPage) error {
	var err error
	if p.Hooks, err = s.conf.Hooks.List(r.Context(), who); err != nil {
		return err
	}
	p.Types = append(event.Types(), event.MailTypes()...)
	return s.render(r.Context(), w, status, page{Name: "webhooks", Title: "Webhooks", Who: who, Here: "settings", Body: p})
}

// A secretPage shows a secret. The secret is shown only once.
type secretPage struct {
	What, Name, Secret string
	Back, Note         string
}

func (s *Server) showSecret(ctx context.Context, w http.ResponseWriter, who auth.Principal, p secretPage) error {
	return s.render(ctx, w, http.StatusCreated, page{Name: "secret", Title: p.What, Who: who, Here: "settings", Body: p})
}

func (s webhookHandlers) createWebhook(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	p := webhooksPage{Name: strings.TrimSpace(r.PostForm.Get("name")), URL: strings.TrimSpace(r.PostForm.Get("url")), Chosen: r.PostForm["event"]}
	c := webhook.Change{Name: &p.Name, URL: &p.URL, Events: []event.Type{}}
	for _, t := range p.Chosen {
		c.Events = append(c.Events, event.Type(t))
	}
	h, secret, err := s.conf.Hooks.Create(r.Context(), who, c)
	if errors.Is(err, webhook.ErrInvalid) {
		p.Notice = "Nothing was created: " + strings.TrimPrefix(err.Error(), webhook.ErrInvalid.Error()+": ") + "."
		return s.showWebhooks(w, r, who, http.StatusBadRequest, p)
	}
	if err != nil {
		return err
	}
	return s.showSecret(r.Context(), w, who, secretPage{
		What: "Webhook secret", Name: h.Name, Secret: secret.Reveal(), Back: "/console/webhooks/" + url.PathEscape(h.ID),
		Note: "The receiver uses this secret to verify the signature of each request.",
	})
}

// perDeliveries is how many deliveries of a webhook a page shows.
const perDeliveries = 50

// A webhookPage is one webhook and its log.
type webhookPage struct {
	webhook.Webhook
	Deliveries []webhook.Delivery
	Newer      int // page before this one, or 0
	Older      int // page after it, or 0
	Notice     string
}

func (s webhookHandlers) webhook(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showWebhook(w, r, who, http.StatusOK, "")
}

func (s webhookHandlers) showWebhook(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	n := 1
	if v := r.URL.Query().Get("page"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil || n < 1 || n > 1000 {
			return fmt.Errorf("%w: page must be a number from 1 to 1000", errForm)
		}
	}
	id := r.PathValue("id")
	h, err := s.conf.Hooks.Get(r.Context(), who, id)
	if err != nil {
		return err
	}
	p := webhookPage{Webhook: h, Notice: notice, Newer: n - 1}
	if p.Deliveries, err = s.conf.Hooks.Deliveries(r.Context(), who, id, (n-1)*perDeliveries, perDeliveries+1); err != nil {
		return err
	}
	if len(p.Deliveries) > perDeliveries {
		p.Deliveries, p.Older = p.Deliveries[:perDeliveries], n+1
	}
	return s.render(r.Context(), w, status, page{Name: "webhook", Title: h.Name, Who: who, Here: "settings", Body: p})
}

// changeWebhook handles the buttons on a webhook's page.
func (s webhookHandlers) changeWebhook(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx, id := r.Context(), r.PathValue("id")
	back := "/console/webhooks/" + url.PathEscape(id)
	var err error
	switch do := r.PostForm.Get("do"); do {
	case "enable", "disable":
		on := do == "enable"
		_, err = s.conf.Hooks.Update(ctx, who, id, webhook.Change{Enabled: &on})
	case "redeliver":
		_, err = s.conf.Hooks.Redeliver(ctx, who, id, r.PostForm.Get("delivery"))
	case "delete":
		err, back = s.conf.Hooks.Delete(ctx, who, id), "/console/webhooks"
	default:
		return fmt.Errorf("%w: do must be enable, disable, redeliver or delete", errForm)
	}
	if errors.Is(err, webhook.ErrInvalid) {
		return s.showWebhook(w, r, who, http.StatusBadRequest, "Nothing was changed: "+strings.TrimPrefix(strings.TrimPrefix(err.Error(), "redeliver: "), webhook.ErrInvalid.Error()+": ")+".")
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, back, http.StatusSeeOther)
	return nil
}

// A keysPage lists the keys of programs that are not for a single inbox.
type keysPage struct {
	Project, Grants []auth.Credential
	Inboxes         int
	Notice          string
	Name            string
}

// keyHandlers manages the keys of the project.
type keyHandlers struct{ *Server }

func (s keyHandlers) routes() []route {
	return []route{
		{"GET", "/console/keys", views, s.keys},
		{"POST", "/console/keys", manages, s.createKey},
		{"POST", "/console/keys/{id}/end", manages, s.endKey},
	}
}

func (s keyHandlers) keys(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showKeys(w, r, who, http.StatusOK, keysPage{})
}

func (s keyHandlers) showKeys(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, p keysPage) error {
	all, err := s.conf.People.Keys(r.Context(), who)
	if err != nil {
		return err
	}
	for _, c := range all {
		if c.Kind == auth.Project {
			p.Project = append(p.Project, c)
		} else {
			p.Grants = append(p.Grants, c)
		}
	}
	boxes, err := s.post.Directory.Inboxes(r.Context(), who)
	if err != nil {
		return err
	}
	p.Inboxes = len(boxes)
	return s.render(r.Context(), w, status, page{Name: "keys", Title: "Keys", Who: who, Here: "settings", Body: p})
}

func (s keyHandlers) createKey(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	p := keysPage{Name: strings.TrimSpace(r.PostForm.Get("name"))}
	_, key, err := s.conf.People.NewKey(r.Context(), who, p.Name)
	if errors.Is(err, auth.ErrInvalid) {
		p.Notice = "Nothing was created: enter a name of 1 to 100 characters."
		return s.showKeys(w, r, who, http.StatusBadRequest, p)
	}
	if err != nil {
		return err
	}
	return s.showSecret(r.Context(), w, who, secretPage{
		What: "Project key", Name: p.Name, Secret: key.Reveal(), Back: "/console/keys",
		Note: "Programs use this key (E2B_API_KEY) to start sandboxes and create inboxes. It cannot decide on actions or open mail.",
	})
}

func (s keyHandlers) endKey(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id := r.PathValue("id")
	if !credentialID().MatchString(id) {
		return fmt.Errorf("key %q: %w", id, store.ErrNotFound)
	}
	err := s.conf.People.EndKey(r.Context(), who, id)
	if errors.Is(err, store.ErrNotFound) {
		return s.showKeys(w, r, who, http.StatusConflict, keysPage{Notice: "Your click changed nothing: the key no longer exists."})
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/keys", http.StatusSeeOther)
	return nil
}
