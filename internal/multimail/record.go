package multimail

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/store"
)

func (s *Server) recordRoutes() []route {
	return []route{
		{method: "GET", path: "/v1/audit-log", serve: s.auditLog},
		{method: "GET", path: "/v1/suppression", serve: s.findSuppressed},
		{method: "DELETE", path: "/v1/suppression/{address}", serve: s.unsuppress},
	}
}

// An auditEntry is a line of the record in MultiMail's words.
type auditEntry struct {
	ID           string          `json:"id"`
	Action       string          `json:"action"`
	ResourceType string          `json:"resource_type"`
	ResourceID   string          `json:"resource_id"`
	Actor        string          `json:"actor_key_id"`
	Metadata     json.RawMessage `json:"metadata"`
	CreatedAt    time.Time       `json:"created_at"`
}

// auditLog lists the record, newest first. Keys do not read it: an agent would read
// what reviewers say about it.
func (s *Server) auditLog(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := onlyPeople(c, "the record"); err != nil {
		return err
	}
	q := r.URL.Query()
	if err := parameters(q, "limit", "cursor"); err != nil {
		return err
	}
	n, err := limit(q, 50)
	if err != nil {
		return err
	}
	query := audit.Query{Project: c.Project, Limit: n + 1}
	if v := q.Get("cursor"); v != "" {
		if query.Before, err = strconv.ParseInt(v, 10, 64); err != nil || query.Before < 1 {
			return fmt.Errorf("%w: cursor: must be the cursor of the page before", errRequest)
		}
	}
	var list []audit.Entry
	err = audit.View(r.Context(), s.db, func(tx *store.Tx) error { //nolint:contextcheck // r's context is what is passed
		list, err = audit.List(r.Context(), tx, query)
		return err
	})
	if err != nil {
		return err
	}
	next := ""
	if len(list) > n {
		list = list[:n]
		next = strconv.FormatInt(list[n-1].Seq, 10)
	}
	out := []auditEntry{}
	for _, e := range list {
		detail := json.RawMessage(e.Detail)
		if !json.Valid(detail) { // the database was tampered with: show what it holds
			if detail, err = json.Marshal(e.Detail); err != nil {
				return err
			}
		}
		kind, _, _ := strings.Cut(string(e.Verb), ".")
		out = append(out, auditEntry{strconv.FormatInt(e.Seq, 10), string(e.Verb), kind, e.Object, e.Actor, detail, e.At})
	}
	answer(w, http.StatusOK, map[string]any{"entries": out, "cursor": orNull(next)})
	return nil
}

// findSuppressed tells whether one address is suppressed. Only keyed hashes are kept,
// so there is no list. An agent's key does not ask: it would learn about the mail of
// other agents of the project.
func (s *Server) findSuppressed(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := directory.MayManage(c.Principal); err != nil {
		return err
	}
	q := r.URL.Query()
	if err := parameters(q, "address", "limit", "cursor"); err != nil {
		return err
	}
	if q.Get("address") == "" {
		return fmt.Errorf("suppression: only keyed hashes of addresses are kept, so there is no list; ask about one with ?address=: %w", errAbsent)
	}
	a, err := mail.CheckAddr("address", q.Get("address"))
	if err != nil {
		return err
	}
	v, err := s.post.Suppression.Find(r.Context(), c.Principal, a)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{
		"suppressions": []map[string]any{{"id": a, "email_address": a, "reason": v.Reason, "mailbox_id": orNull(v.Inbox), "created_at": v.Created}}, "cursor": nil,
	})
	return nil
}

func (s *Server) unsuppress(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := directory.MayManage(c.Principal); err != nil {
		return err
	}
	a, err := mail.CheckAddr("address", r.PathValue("address"))
	if err != nil {
		return err
	}
	if err := s.post.Suppression.Remove(r.Context(), c.Principal, a); err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"status": "removed", "email_address": a})
	return nil
}
