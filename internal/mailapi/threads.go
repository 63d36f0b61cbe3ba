package mailapi

import (
	"net/http"
	"time"

	"postern/internal/mailbox"
)

var threadRoutes = []route{
	{"GET", "/v1/inboxes/{inbox}/threads", 0, (*Server).listThreads},
	{"GET", "/v1/inboxes/{inbox}/threads/{id}", 0, (*Server).getThread},
}

type threadJSON struct {
	ID        string      `json:"id"`
	Inbox     string      `json:"inbox"`
	UpdatedAt time.Time   `json:"updated_at"` // when its newest message was stored
	Messages  int         `json:"message_count"`
	Unread    int         `json:"unread_count"`
	Newest    messageJSON `json:"newest"`
}

func (s *Server) listThreads(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	n, err := limit(r.URL.Query(), 50, 100)
	if err != nil {
		return err
	}
	ts, next, err := s.post.Threads(r.Context(), c.Principal, k, n, r.URL.Query().Get("cursor"))
	if err != nil {
		return err
	}
	out := []threadJSON{}
	for _, t := range ts {
		out = append(out, threadOf(k, t))
	}
	answer(w, http.StatusOK, map[string]any{"threads": out, "next_cursor": next})
	return nil
}

func threadOf(k *mailbox.Key, t mailbox.Thread) threadJSON {
	return threadJSON{ID: t.ID, Inbox: k.Inbox(), UpdatedAt: t.At, Messages: t.Messages, Unread: t.Unread, Newest: messageOf(t.Newest)}
}

func (s *Server) getThread(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	ms, err := s.post.Thread(r.Context(), c.Principal, k, id)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"id": id, "inbox": k.Inbox(), "messages": messagesOf(ms)})
	return nil
}
