package multimail

import (
	"errors"
	"fmt"
	"net/http"
	"slices"

	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/seal"
	"postern/internal/store"
)

func (s *Server) spamRoutes() []route {
	return []route{
		{method: "GET", path: "/v1/emails", serve: s.listSpam},
		{method: "POST", path: "/v1/emails/{email}/report-spam", serve: s.reportSpam},
		{method: "POST", path: "/v1/emails/{email}/not-spam", serve: s.notSpam},
	}
}

// keys opens every mailbox that the caller's credential may open for want.
func (s *Server) keys(r *http.Request, c caller, want seal.Scope) (out []*seal.Key, err error) {
	if c.key == "" || c.Kind != auth.Agent && c.Kind != auth.Grant {
		return nil, fmt.Errorf("a %s manages mailboxes but cannot open them, only a key can: %w", c.Kind, auth.ErrForbidden)
	}
	list, err := s.post.Directory.Inboxes(r.Context(), c.Principal)
	if err != nil {
		return nil, err
	}
	for _, b := range list {
		_, scope, err := s.post.Keys.Reach(r.Context(), c.Principal, b.ID)
		if err != nil {
			return nil, err
		}
		if !scope.Includes(want) {
			continue
		}
		k, err := s.post.Keys.Open(r.Context(), c.Principal, c.key, b.ID)
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	if len(out) == 0 && len(list) > 0 {
		return nil, fmt.Errorf("this key does not have the scope that this needs in any mailbox: %w", auth.ErrForbidden)
	}
	return out, nil
}

// listSpam lists what looks like an attack in all mailboxes of the key: what is held,
// what was reported, and what was let in with a high score.
func (s *Server) listSpam(w http.ResponseWriter, r *http.Request, c caller) error {
	q := r.URL.Query()
	if err := parameters(q, "status", "limit", "cursor"); err != nil {
		return err
	}
	n, err := limit(q, 20)
	if err != nil {
		return err
	}
	kinds := []string{spamFlagged, spamConfirmed}
	if v := q.Get("status"); v != "" {
		if !slices.Contains(kinds, v) {
			return fmt.Errorf("%w: status: must be one of %v", errRequest, kinds)
		}
		kinds = []string{v}
	}
	opened, err := s.keys(r, c, seal.Read)
	if err != nil {
		return err
	}
	var sources []*source
	for _, k := range opened {
		b, _, err := s.post.Keys.Reach(r.Context(), c.Principal, k.Inbox())
		if err != nil {
			return err
		}
		for _, status := range kinds {
			sources = append(sources, s.sources(c, b, k, filter{status: status})...)
		}
	}
	if err := begin(sources, q.Get("cursor")); err != nil {
		return err
	}
	out, next, err := merge(r.Context(), sources, n)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"emails": out, "cursor": orNull(next)})
	return nil
}

// notSpamLabel is the label of messages that a program said are none.
const notSpamLabel = "not-spam"

// judge labels the message that the request names, in whichever of the key's
// mailboxes it is.
func (s *Server) judge(r *http.Request, c caller, add, remove []string) (string, error) {
	id, err := email(r)
	if err != nil {
		return "", err
	}
	opened, err := s.keys(r, c, readAndSend)
	if err != nil {
		return "", err
	}
	if !messageForm().MatchString(id) {
		return "", fmt.Errorf("email %s: %w", id, store.ErrNotFound)
	}
	for _, k := range opened {
		_, err := s.post.Label(r.Context(), c.Principal, k, []string{id}, add, remove)
		if err == nil {
			return id, nil
		}
		if !errors.Is(err, store.ErrNotFound) {
			return "", err
		}
		if _, _, err := s.post.HeldMessage(r.Context(), c.Principal, k, id); err == nil {
			return "", fmt.Errorf("email %s is held: no key lets mail in or drops it, a person does: %w", id, auth.ErrForbidden)
		}
	}
	return "", fmt.Errorf("email %s: %w", id, store.ErrNotFound)
}

func (s *Server) reportSpam(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := s.judge(r, c, []string{reportedSpam, mailbox.LabelArchived}, []string{notSpamLabel})
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"id": id, "status": spamConfirmed, "user_label": "spam"})
	return nil
}

func (s *Server) notSpam(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := s.judge(r, c, []string{notSpamLabel}, []string{reportedSpam, mailbox.LabelArchived, mailbox.LabelRead})
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"id": id, "status": unread, "user_label": "not_spam"})
	return nil
}
