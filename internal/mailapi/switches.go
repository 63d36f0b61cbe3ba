package mailapi

import (
	"fmt"
	"net/http"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/mailbox"
	"postern/internal/oversight"
)

// A switchServer serves kill switches.
type switchServer struct {
	gate *oversight.Gate
	post *mailbox.PostOffice
}

func (s switchServer) routes() []route {
	return []route{
		{"GET", "/v1/switches", 0, s.listSwitches},
		{"POST", "/v1/switches", maxBody, s.switchOn},
		{"DELETE", "/v1/switches/{id}", 0, s.switchOff},
	}
}

func switchOf(s oversight.Switch) api.Switch {
	return api.Switch{ID: s.ID, Scope: string(s.Scope), Target: s.Target, Reason: s.Reason, By: s.By, At: s.At, Until: moment(s.Until), Stopped: s.Stopped}
}

func (s switchServer) listSwitches(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.gate.Switches(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	out := []api.Switch{}
	for _, sw := range list {
		out = append(out, switchOf(sw))
	}
	answer(w, http.StatusOK, api.SwitchList{Switches: out})
	return nil
}

func (s switchServer) switchOn(w http.ResponseWriter, r *http.Request, c caller) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("no key stops or lets go: only a person who is signed in, or the operator at the machine: %w", auth.ErrForbidden)
	}
	var in api.NewSwitch
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if err := checkReason(in.Reason); err != nil {
		return err
	}
	sw := oversight.Switch{Scope: oversight.Scope(in.Scope), Target: in.Target, Reason: in.Reason}
	if in.Until != nil {
		sw.Until = *in.Until
	}
	if sw.Scope == oversight.ScopeInbox {
		b, err := s.post.Directory.Find(r.Context(), c.Principal, in.Target)
		if err != nil {
			return err
		}
		sw.Target = b.ID
	}
	sw, err := s.gate.SwitchOn(r.Context(), c.Principal, sw)
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, switchOf(sw))
	return nil
}

func (s switchServer) switchOff(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	if err := s.gate.SwitchOff(r.Context(), c.Principal, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
