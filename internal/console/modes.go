package console

import (
	"errors"
	"net/http"
	"net/url"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// A modeChoice is a mode that an inbox may be put into.
type modeChoice struct {
	Mode    policy.Mode
	Means   string
	Current bool
	Looser  bool // looser than the current one
}

// modeChoices returns all modes; now is the current one.
func modeChoices(now policy.Mode) (out []modeChoice) {
	past := false
	for _, m := range policy.Modes() {
		out = append(out, modeChoice{m, m.Means(), m == now, past})
		past = past || m == now
	}
	return out
}

// modeHandlers changes the mode and the allow list of an inbox.
type modeHandlers struct{ inboxHandlers }

func (s modeHandlers) routes() []route {
	return []route{
		{"POST", "/console/inboxes/{id}/mode", decides, s.setMode},
		{"POST", "/console/inboxes/{id}/code", manages, s.modeCode},
		{"POST", "/console/inboxes/{id}/allow", manages, s.allow},
		{"POST", "/console/inboxes/{id}/disallow", decides, s.disallow},
	}
}

// setMode sets the mode of an inbox. A reviewer can choose a stricter mode; a
// looser one needs an owner.
func (s modeHandlers) setMode(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	b, err := s.findInbox(r, who)
	if err != nil {
		return err
	}
	_, err = s.post.SetMode(r.Context(), who, b.ID, policy.Mode(r.PostForm.Get("mode")), typed(r, "reason"))
	if errors.Is(err, oversight.ErrByHand) || errors.Is(err, oversight.ErrNotAsked) || errors.Is(err, auth.ErrStepUp) {
		return s.back(w, r, who, err)
	}
	if errors.Is(err, auth.ErrForbidden) {
		return s.showInbox(w, r, who, http.StatusForbidden, "Nothing was changed: only an owner can set a mode with less review.", "")
	}
	return s.back(w, r, who, err)
}

// modeCode makes a code with which a holder of the inbox's key can set the mode, once.
func (s modeHandlers) modeCode(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	b, err := s.findInbox(r, who)
	if err != nil {
		return err
	}
	code, expires, err := s.post.ModeCode(r.Context(), who, b.ID, policy.Mode(r.PostForm.Get("mode")), typed(r, "reason"))
	if err != nil {
		return s.back(w, r, who, err)
	}
	return s.showSecret(r.Context(), w, who, secretPage{
		What: "Code for " + r.PostForm.Get("mode"), Name: b.Address, Secret: code.Reveal(), Back: "/console/inboxes/" + url.PathEscape(b.ID),
		Note: "The holder of a key of this inbox can use this code once to set the mode. It expires " + until(time.Until(expires)) + ". Give it only to the intended agent.",
	})
}

// allow puts somebody on an inbox's allow list.
func (s modeHandlers) allow(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	b, err := s.findInbox(r, who)
	if err != nil {
		return err
	}
	ends, err := formDate(r, "until")
	if err == nil {
		_, err = s.post.AllowList.Add(r.Context(), who, b.ID, strings.TrimSpace(r.PostForm.Get("pattern")), ends)
	}
	return s.back(w, r, who, err)
}

// disallow takes an entry off an inbox's allow list.
func (s modeHandlers) disallow(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	b, err := s.findInbox(r, who)
	if err != nil {
		return err
	}
	err = s.post.AllowList.Remove(r.Context(), who, b.ID, r.PostForm.Get("entry"))
	if errors.Is(err, store.ErrNotFound) && !errors.Is(err, directory.ErrNoInbox) {
		return s.showInbox(w, r, who, http.StatusConflict, "Your click changed nothing: the entry no longer exists.", "")
	}
	return s.back(w, r, who, err)
}
