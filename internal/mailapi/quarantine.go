package mailapi

import (
	"net/http"
	"time"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/scan"
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

// A heldJSON is a message in quarantine as those see it who manage inboxes:
// nothing that its sender wrote.
type heldJSON struct {
	ID         string                    `json:"id"`
	Inbox      string                    `json:"inbox"`
	CreatedAt  time.Time                 `json:"created_at"`
	Size       int64                     `json:"size"` // bytes
	Score      float64                   `json:"score"`
	Reason     mailbox.QuarantineReason  `json:"reason"`
	Categories map[scan.Category]float64 `json:"categories"`
	SPF        string                    `json:"spf"`
	DKIM       string                    `json:"dkim"`
	DMARC      string                    `json:"dmarc"`
	ARC        string                    `json:"arc"`
	Action     string                    `json:"action"` // by which it is let in; empty where release and drop do
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
	out := []heldJSON{}
	for _, h := range list {
		out = append(out, heldJSON{
			ID: h.ID, Inbox: h.Inbox, CreatedAt: h.At, Size: h.Size, Score: h.Score, Reason: h.Reason, Categories: h.Categories,
			SPF: h.Checks["spf"], DKIM: h.Checks["dkim"], DMARC: h.Checks["dmarc"], ARC: h.Checks["arc"], Action: h.Action,
		})
	}
	answer(w, http.StatusOK, map[string]any{"held": out, "next_cursor": next})
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
	answer(w, http.StatusOK, map[string]any{"messages": messagesOf(ms), "next_cursor": next})
	return nil
}

// getHeld shows what is held to whoever has the inbox's key, and only as an
// agent should read it: there is no text here as it came.
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
	out := struct {
		messageJSON
		safeJSON
	}{messageJSON: messageOf(m)}
	if m.Security != nil {
		out.Security.Findings = append(out.Security.Findings, m.Security.Findings...)
	}
	out.safeJSON = safeOf(out.messageJSON, p.Text, p.HTML)
	answer(w, http.StatusOK, out)
	return nil
}
