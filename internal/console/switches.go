package console

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// scopeNames says what a switch stops.
var scopeNames = map[oversight.Scope]string{
	oversight.ScopeInbox: "one inbox", oversight.ScopeCapability: "one kind of action", oversight.ScopeDomain: "everything to one domain",
	oversight.ScopeProject: "everything in this project", oversight.ScopeEverything: "everything in all projects",
}

// A switchPage lists the switches that are on, and has the form that turns one on.
type switchPage struct {
	On      []switched
	Inboxes []choice
	Kinds   []choice
	Notice  string
	Scope   oversight.Scope // as typed into a rejected form
	Target  string
	Reason  string
	Hours   string
}

// A switched is a switch that is on, as a page names it.
type switched struct {
	oversight.Switch
	What string
}

// Ours reports whether an owner of the project can turn the switch off.
func (s switched) Ours() bool { return s.Project != "" }

// switchHandlers turns kill switches on and off.
type switchHandlers struct{ *Server }

func (s switchHandlers) routes() []route {
	return []route{
		{"GET", "/console/switches", views, s.switches},
		{"POST", "/console/switches", decides, s.switchOn},
		{"POST", "/console/switches/{id}/off", manages, s.switchOff},
	}
}

func (s switchHandlers) switches(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showSwitches(w, r, who, http.StatusOK, switchPage{Scope: oversight.ScopeInbox})
}

func (s switchHandlers) showSwitches(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, p switchPage) error {
	on, err := s.gate.Switches(r.Context(), who)
	if err != nil {
		return err
	}
	boxes, err := s.post.Directory.Inboxes(r.Context(), who)
	if err != nil {
		return err
	}
	names := map[string]string{}
	for _, b := range boxes {
		names[b.ID] = b.Address
		p.Inboxes = append(p.Inboxes, choice{b.ID, b.Address})
	}
	for _, k := range policy.Stoppable() {
		p.Kinds = append(p.Kinds, choice{string(k), k.Title()})
	}
	for _, x := range on {
		what := x.Target
		switch x.Scope {
		case oversight.ScopeInbox:
			what = or(names[x.Target], x.Target)
		case oversight.ScopeCapability:
			what = policy.Kind(x.Target).Title()
		case oversight.ScopeDomain, oversight.ScopeProject, oversight.ScopeEverything:
		}
		p.On = append(p.On, switched{x, what})
	}
	return s.render(r.Context(), w, status, page{Name: "switches", Title: "Switches", Who: who, Here: "switches", Body: p})
}

func (s switchHandlers) switchOn(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	p := switchPage{Scope: oversight.Scope(r.PostForm.Get("scope")), Reason: typed(r, "reason"), Hours: strings.TrimSpace(r.PostForm.Get("hours"))}
	x := oversight.Switch{Scope: p.Scope, Reason: p.Reason}
	switch p.Scope {
	case oversight.ScopeInbox:
		p.Target = r.PostForm.Get("inbox")
		if _, err := s.post.Directory.Find(r.Context(), who, p.Target); err != nil {
			p.Notice = "Nothing was stopped: choose an inbox."
		}
	case oversight.ScopeCapability:
		p.Target = r.PostForm.Get("kind")
	case oversight.ScopeDomain:
		p.Target = strings.TrimSpace(r.PostForm.Get("domain"))
	case oversight.ScopeProject, oversight.ScopeEverything:
	}
	x.Target = p.Target
	if p.Hours != "" {
		n, err := strconv.Atoi(p.Hours)
		if err != nil || n < 1 || n > 24*365 {
			p.Notice = "Nothing was stopped: hours must be a number from 1 to 8760, or empty."
		}
		x.Until = time.Now().Add(time.Duration(n) * time.Hour)
	}
	if p.Notice != "" {
		return s.showSwitches(w, r, who, http.StatusBadRequest, p)
	}
	_, err := s.gate.SwitchOn(r.Context(), who, x)
	switch {
	case errors.Is(err, oversight.ErrReason):
		p.Notice = "Nothing was stopped: give a reason of at most 1000 bytes."
	case errors.Is(err, auth.ErrInvalid):
		p.Notice = "Nothing was stopped: " + strings.TrimSuffix(strings.TrimPrefix(err.Error(), "turn switch on: "), ": "+auth.ErrInvalid.Error()) + "."
	case err != nil:
		return err
	}
	if p.Notice != "" {
		return s.showSwitches(w, r, who, http.StatusBadRequest, p)
	}
	http.Redirect(w, r, "/console/switches", http.StatusSeeOther)
	return nil
}

func (s switchHandlers) switchOff(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id := r.PathValue("id")
	if !strings.HasPrefix(id, "swi_") || len(id) != 30 {
		return fmt.Errorf("switch %q: %w", id, store.ErrNotFound)
	}
	err := s.gate.SwitchOff(r.Context(), who, id)
	if errors.Is(err, store.ErrNotFound) {
		return s.showSwitches(w, r, who, http.StatusConflict, switchPage{Scope: oversight.ScopeInbox, Notice: "Your click changed nothing: the switch no longer exists."})
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/switches", http.StatusSeeOther)
	return nil
}
