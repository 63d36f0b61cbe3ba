package mailapi

import (
	"fmt"
	"net/http"
	"strconv"

	"postern/internal/api"
	"postern/internal/mailbox"
)

// A contactServer serves those with whom an inbox exchanges mail.
type contactServer struct {
	access

	post *mailbox.PostOffice
}

func (s contactServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/contacts", 0, s.listContacts},
	}
}

func (s contactServer) listContacts(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	n, err := limit(q, 50, 500)
	if err != nil {
		return err
	}
	// There is no order by which a page could be found again but their place.
	offset := 0
	if v := q.Get("cursor"); v != "" {
		if offset, err = strconv.Atoi(v); err != nil || offset < 0 || offset > 1<<20 {
			return fmt.Errorf("%w: cursor: must be the next_cursor of the page before", errRequest)
		}
	}
	if len(q.Get("q")) > 200 {
		return fmt.Errorf("%w: q: must be at most 200 bytes", errRequest)
	}
	list, more, err := s.post.Index.Contacts(r.Context(), c.Principal, k, q.Get("q"), offset, n)
	if err != nil {
		return err
	}
	out, next := []api.Contact{}, ""
	for _, x := range list {
		out = append(out, api.Contact{Address: x.Address, Name: x.Name, Received: x.Received, Sent: x.Sent, LastAt: x.Last})
	}
	if more {
		next = strconv.Itoa(offset + n)
	}
	answer(w, http.StatusOK, api.ContactList{Contacts: out, NextCursor: next})
	return nil
}
