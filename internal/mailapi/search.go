package mailapi

import (
	"net/http"

	"postern/internal/api"
	"postern/internal/mailbox"
)

// A searchServer serves search over an inbox.
type searchServer struct {
	access

	post *mailbox.PostOffice
}

func (s searchServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/search", 0, s.searchMessages},
	}
}

func (s searchServer) searchMessages(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	n, err := limit(q, 50, 200)
	if err != nil {
		return err
	}
	found, err := s.post.Index.Search(r.Context(), c.Principal, k, mailbox.Search{Query: q.Get("q"), Limit: n, Cursor: q.Get("cursor")})
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.SearchResult{Messages: messagesOf(found.Messages), NextCursor: found.Next, Complete: found.Complete, Pending: found.Pending, Behind: moment(found.Behind)})
	return nil
}
