package mailapi

import (
	"net/http"

	"postern/internal/api"
	"postern/internal/mail"
	"postern/internal/mailbox"
)

// A quarantineServer serves mail that was held on arrival.
type quarantineServer struct {
	access

	post *mailbox.PostOffice
}

func (s quarantineServer) routes() []route {
	return []route{
		{"GET", "/v1/quarantine", 0, s.listQuarantine},
		{"POST", "/v1/quarantine/{id}/release", 0, s.releaseMessage},
		{"POST", "/v1/quarantine/{id}/drop", 0, s.dropMessage},
		{"GET", "/v1/inboxes/{inbox}/quarantine", 0, s.listHeld},
		{"GET", "/v1/inboxes/{inbox}/quarantine/{id}", 0, s.getHeld},
	}
}

func (s quarantineServer) listQuarantine(w http.ResponseWriter, r *http.Request, c caller) error {
	q := r.URL.Query()
	n, err := limit(q, 50, 200)
	if err != nil {
		return err
	}
	list, next, err := s.post.Quarantine(r.Context(), c.Principal, "", q.Get("cursor"), n)
	if err != nil {
		return err
	}
	out := []api.Held{}
	for _, h := range list {
		out = append(out, api.Held{
			ID: h.ID, Inbox: h.Inbox, CreatedAt: h.At, Size: h.Size, Score: h.Score, Reason: string(h.Reason), Categories: categoriesOf(h.Categories),
			SPF: h.Checks["spf"], DKIM: h.Checks["dkim"], DMARC: h.Checks["dmarc"], ARC: h.Checks["arc"], Action: h.Action,
		})
	}
	answer(w, http.StatusOK, api.HeldList{Held: out, NextCursor: next})
	return nil
}

func (s quarantineServer) releaseMessage(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	if err := s.post.Release(r.Context(), c.Principal, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s quarantineServer) dropMessage(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	if err := s.post.Drop(r.Context(), c.Principal, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s quarantineServer) listHeld(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	n, err := limit(q, 50, 200)
	if err != nil {
		return err
	}
	ms, next, err := s.post.HeldMessages(r.Context(), c.Principal, k, q.Get("cursor"), n)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.MessageList{Messages: messagesOf(ms), NextCursor: next})
	return nil
}

// getHeld shows a held message to a caller with the inbox's key, and only in the form
// that an agent should read: never the original text.
func (s quarantineServer) getHeld(w http.ResponseWriter, r *http.Request, c caller) error {
	done, err := s.read(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	k, id, err := s.item(r, c)
	if err != nil {
		return err
	}
	m, raw, err := s.post.HeldMessage(r.Context(), c.Principal, k, id)
	if err != nil {
		return err
	}
	p := mail.Read(raw)
	out := api.HeldMessage{Message: messageOf(m)}
	if m.Security != nil {
		out.Security.Findings = append(out.Security.Findings, findingsOf(m.Security.Findings)...)
	}
	out.SafeContent = safeOf(out.Message, p.Text, p.HTML)
	answer(w, http.StatusOK, out)
	return nil
}
