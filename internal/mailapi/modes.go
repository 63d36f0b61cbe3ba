package mailapi

import (
	"fmt"
	"net/http"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// A modeServer serves what decides how closely people watch an inbox: modes, allow lists and overseers.
type modeServer struct {
	post *mailbox.PostOffice
}

func (s modeServer) routes() []route {
	return []route{
		{"POST", "/v1/inboxes/{inbox}/mode-codes", maxBody, s.makeModeCode},
		{"POST", "/v1/inboxes/{inbox}/upgrade", maxBody, s.raiseMode},
		{"POST", "/v1/inboxes/{inbox}/request-upgrade", maxBody, s.requestUpgrade},
		{"GET", "/v1/inboxes/{inbox}/allowlist", 0, s.listAllowed},
		{"POST", "/v1/inboxes/{inbox}/allowlist", maxBody, s.addAllowed},
		{"DELETE", "/v1/inboxes/{inbox}/allowlist/{id}", 0, s.removeAllowed},
		{"POST", "/v1/inboxes/{inbox}/allowlist/requests", maxBody, s.requestAllowed},
		{"GET", "/v1/inboxes/{inbox}/overseers", 0, s.getOverseers},
		{"POST", "/v1/inboxes/{inbox}/overseers", maxBody, s.setOverseers},
		{"GET", "/v1/overseers", 0, s.getOverseers},
		{"POST", "/v1/overseers", maxBody, s.setOverseers},
	}
}

func (s modeServer) makeModeCode(w http.ResponseWriter, r *http.Request, c caller) error {
	if !c.Manages() {
		return fmt.Errorf("no key makes a code that raises a mode, only an owner does: %w", auth.ErrForbidden)
	}
	var in api.NewModeCode
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	code, expires, err := s.post.ModeCode(r.Context(), c.Principal, r.PathValue("inbox"), policy.Mode(in.Mode), in.Reason)
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, api.ModeCode{Code: code.Reveal(), Mode: in.Mode, ExpiresAt: expires})
	return nil
}

func (s modeServer) raiseMode(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.ModeUpgrade
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	b, err := s.post.RaiseMode(r.Context(), c.Principal, r.PathValue("inbox"), auth.Secret(in.Code))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, inboxOf(b))
	return nil
}

func (s modeServer) requestUpgrade(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.ModeRequest
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	a, err := s.post.RequestMode(r.Context(), c.Principal, "rest", r.PathValue("inbox"), policy.Mode(in.TargetMode), in.Reason)
	return s.asked(w, c, a, err)
}

// asked answers who has asked an owner for something.
func (s modeServer) asked(w http.ResponseWriter, c caller, a oversight.Action, err error) error {
	if err != nil {
		return err
	}
	if a.State == oversight.Denied {
		return &blockedError{a.ID, a.Verdict}
	}
	answer(w, http.StatusAccepted, actionOf(c, a))
	return nil
}

func allowedOf(c caller, e mailbox.AllowEntry) api.AllowEntry {
	out := api.AllowEntry{ID: e.ID, Pattern: e.Pattern, CreatedAt: e.Created, Action: e.Action, ExpiresAt: moment(e.Expires), Files: !e.NoFiles}
	if c.Kind == auth.Person || c.Kind == auth.Project {
		out.CreatedBy = e.CreatedBy
	}
	return out
}

func (s modeServer) listAllowed(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.AllowList.Entries(r.Context(), c.Principal, r.PathValue("inbox"))
	if err != nil {
		return err
	}
	out := []api.AllowEntry{}
	for _, e := range list {
		out = append(out, allowedOf(c, e))
	}
	answer(w, http.StatusOK, api.AllowList{Entries: out})
	return nil
}

func (s modeServer) addAllowed(w http.ResponseWriter, r *http.Request, c caller) error {
	if !c.Manages() {
		return fmt.Errorf("only an owner adds to an allow list; ask for it with POST …/allowlist/requests: %w", auth.ErrForbidden)
	}
	var in api.NewAllowEntry
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	e, err := s.post.AllowList.Add(r.Context(), c.Principal, r.PathValue("inbox"), in.Pattern, orZero(in.ExpiresAt))
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, allowedOf(c, e))
	return nil
}

func orZero(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

func (s modeServer) removeAllowed(w http.ResponseWriter, r *http.Request, c caller) error {
	// An entry goes by its id, or by its pattern.
	if err := s.post.AllowList.Remove(r.Context(), c.Principal, r.PathValue("inbox"), r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s modeServer) requestAllowed(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.AllowRequest
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	a, err := s.post.AllowList.Request(r.Context(), c.Principal, "rest", r.PathValue("inbox"), in.Pattern, orZero(in.ExpiresAt), in.Reason)
	return s.asked(w, c, a, err)
}

func (s modeServer) getOverseers(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Overseers.List(r.Context(), c.Principal, r.PathValue("inbox"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.Overseers{Addresses: append([]string{}, list...)})
	return nil
}

func (s modeServer) setOverseers(w http.ResponseWriter, r *http.Request, c caller) error {
	if !c.Manages() {
		return fmt.Errorf("only an owner says who oversees: %w", auth.ErrForbidden)
	}
	var in api.Overseers
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	list, err := s.post.Overseers.Set(r.Context(), c.Principal, r.PathValue("inbox"), in.Addresses)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.Overseers{Addresses: append([]string{}, list...)})
	return nil
}
