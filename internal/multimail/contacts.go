package multimail

import (
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"

	"postern/internal/door"
	"postern/internal/mailbox"
	"postern/internal/seal"
	"postern/internal/store"
)

func (s *Server) contactRoutes() []route {
	return []route{
		{method: "GET", path: "/v1/contacts", serve: s.listContacts},
		{method: "POST", path: "/v1/contacts", body: maxBody, serve: s.addContact},
		{method: "DELETE", path: "/v1/contacts/{id}", serve: s.deleteContact},
	}
}

// A contact is an entry of an address book. MultiMail has one for an account. Here
// each mailbox has its own, sealed like its mail, and a key sees those of its
// mailboxes as one.
type contact struct {
	ID        string   `json:"id"`
	Name      string   `json:"name"`
	Email     string   `json:"email"`
	Tags      []string `json:"tags"`
	MailboxID string   `json:"mailbox_id"`
	CreatedAt int64    `json:"created_at"` // milliseconds since 1970
}

func contactOf(c mailbox.SavedContact) contact {
	return contact{c.ID, c.Name, c.Address, append([]string{}, c.Tags...), c.Inbox, c.Created.UnixMilli()}
}

func (s *Server) listContacts(w http.ResponseWriter, r *http.Request, c caller) error {
	q := r.URL.Query()
	if err := parameters(q, "q", "query"); err != nil {
		return err
	}
	want := strings.ToLower(q.Get("q") + q.Get("query"))
	if len(want) > 200 {
		return fmt.Errorf("%w: q: must be at most 200 bytes", errRequest)
	}
	opened, err := s.keys(r, c, seal.Read)
	if err != nil {
		return err
	}
	out := []contact{}
	for _, k := range opened {
		list, err := s.post.SavedContacts(r.Context(), c.Principal, k)
		if err != nil {
			return err
		}
		for _, x := range list {
			if strings.Contains(strings.ToLower(x.Name), want) || strings.Contains(x.Address, want) {
				out = append(out, contactOf(x))
			}
		}
	}
	answer(w, http.StatusOK, map[string]any{"contacts": out})
	return nil
}

func (s *Server) addContact(w http.ResponseWriter, r *http.Request, c caller) error {
	opened, err := s.keys(r, c, readAndSend)
	if err != nil {
		return err
	}
	var in struct {
		Name      string   `json:"name"`
		Email     string   `json:"email"`
		Tags      []string `json:"tags"`
		MailboxID string   `json:"mailbox_id"` // ours; empty means the first by address
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if in.Name == "" || in.Email == "" {
		return fmt.Errorf("%w: name, email: are required", errRequest)
	}
	if in.MailboxID != "" {
		opened = slices.DeleteFunc(opened, func(k *seal.Key) bool { return k.Inbox() != in.MailboxID })
	}
	if len(opened) == 0 {
		return fmt.Errorf("%w: mailbox_id: this key has no such mailbox; create one with POST /v1/mailboxes", errRequest)
	}
	saved, err := s.post.SaveContact(r.Context(), c.Principal, opened[0], mailbox.SavedContact{Name: in.Name, Address: in.Email, Tags: in.Tags})
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, contactOf(saved))
	return nil
}

var contactForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^con_[A-Z0-9]{10,40}$`) })

func (s *Server) deleteContact(w http.ResponseWriter, r *http.Request, c caller) error {
	opened, err := s.keys(r, c, readAndSend)
	if err != nil {
		return err
	}
	id := r.PathValue("id")
	if !contactForm().MatchString(id) {
		return fmt.Errorf("id in the path: %w", store.ErrNotFound)
	}
	for _, k := range opened {
		err := s.post.DeleteContact(r.Context(), c.Principal, k, id)
		if err == nil {
			answer(w, http.StatusOK, map[string]any{"deleted": true, "id": id})
			return nil
		}
		if !errors.Is(err, store.ErrNotFound) {
			return err
		}
	}
	return fmt.Errorf("contact %s: %w", id, store.ErrNotFound)
}
