package mailapi

import (
	"fmt"
	"net/http"
	"slices"

	"postern/internal/api"
	"postern/internal/door"
	"postern/internal/mailbox"
	"postern/internal/store"
)

// A labelServer serves labels.
type labelServer struct {
	access

	post *mailbox.PostOffice
}

func (s labelServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/labels", 0, s.listLabels},
		{"POST", "/v1/inboxes/{inbox}/labels", maxBody, s.changeLabels},
	}
}

func (s labelServer) listLabels(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	ls, err := s.post.Labels(r.Context(), c.Principal, k)
	if err != nil {
		return err
	}
	out := []api.Label{}
	for _, l := range ls {
		out = append(out, api.Label(l))
	}
	answer(w, http.StatusOK, api.LabelList{Labels: out})
	return nil
}

func (s labelServer) changeLabels(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	var in api.LabelChange
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	// A database need not see what cannot be an id.
	if i := slices.IndexFunc(in.IDs, func(id string) bool { return !idForm().MatchString(id) }); i >= 0 && len(in.IDs) <= mailbox.MaxLabelChange {
		return fmt.Errorf("ids[%d]: %w", i, store.ErrNotFound)
	}
	list, err := s.post.Label(r.Context(), c.Principal, k, in.IDs, in.Add, in.Remove)
	if err != nil {
		return err
	}
	out := []api.LabelledMessage{}
	for _, l := range list {
		out = append(out, api.LabelledMessage{ID: l.ID, Labels: append([]string{}, l.Labels...)})
	}
	answer(w, http.StatusOK, api.LabelledMessages{Messages: out})
	return nil
}
