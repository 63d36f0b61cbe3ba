package console

import (
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/sandbox"
)

// A listedSandbox is one with the address of its inbox.
type listedSandbox struct {
	sandbox.Info
	Inbox string // the address
}

// Live reports whether it has not ended.
func (l listedSandbox) Live() bool { return l.Ended.IsZero() }

// IsPaused reports whether it is frozen on disk.
func (l listedSandbox) IsPaused() bool { return l.State == sandbox.Paused }

// Reach summarizes the network access that the sandbox requested.
func (l listedSandbox) Reach() string {
	if l.Egress.Internet {
		return "the Internet" + except(l.Egress)
	}
	if n := len(l.Egress.AllowOut); n > 0 {
		return strings.Join(l.Egress.AllowOut[:min(n, 3)], ", ") + more(n-3)
	}
	return "none"
}

func except(e policy.Egress) string {
	if len(e.DenyOut) == 0 {
		return ""
	}
	return " except " + strings.Join(e.DenyOut[:min(len(e.DenyOut), 3)], ", ") + more(len(e.DenyOut)-3)
}

func more(n int) string {
	if n <= 0 {
		return ""
	}
	return fmt.Sprintf(" and %d more", n)
}

// sandboxHandlers lists and ends sandboxes.
type sandboxHandlers struct{ reviews }

func (s sandboxHandlers) routes() []route {
	return []route{
		{"GET", "/console/sandboxes", views, s.sandboxes},
		{"GET", "/console/sandboxes/{id}", views, s.sandbox},
		{"POST", "/console/sandboxes/{id}/kill", decides, s.kill},
	}
}

func (s sandboxHandlers) allSandboxes(r *http.Request, who auth.Principal) ([]listedSandbox, error) {
	all, err := s.fleet.List(r.Context(), who, true)
	if err != nil {
		return nil, err
	}
	names, err := s.addresses(r.Context(), who)
	if err != nil {
		return nil, err
	}
	var out []listedSandbox
	for _, live := range []bool{true, false} {
		for _, i := range all {
			if l := (listedSandbox{i, names[i.Inbox]}); l.Live() == live {
				out = append(out, l)
			}
		}
	}
	return out, nil
}

func (s sandboxHandlers) sandboxes(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	all, err := s.allSandboxes(r, who)
	if err != nil {
		return err
	}
	return s.render(w, http.StatusOK, page{Name: "sandboxes", Title: "Sandboxes", Who: who, Here: "sandboxes", Body: all})
}

var sandboxID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^i[a-z0-9]{20}$`) })

// A sandboxPage is one sandbox in full.
type sandboxPage struct {
	listedSandbox
	Notice string
}

func (s sandboxHandlers) sandbox(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showSandbox(w, r, who, http.StatusOK, "")
}

func (s sandboxHandlers) showSandbox(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	id := r.PathValue("id")
	if !sandboxID().MatchString(id) {
		return fmt.Errorf("sandbox %q: %w", id, sandbox.ErrNotFound)
	}
	all, err := s.allSandboxes(r, who)
	if err != nil {
		return err
	}
	for _, l := range all {
		if l.ID == id {
			return s.render(w, status, page{Name: "sandbox", Title: "Sandbox " + id, Who: who, Here: "sandboxes", Body: sandboxPage{l, notice}})
		}
	}
	return fmt.Errorf("sandbox %s: %w", id, sandbox.ErrNotFound)
}

func (s sandboxHandlers) kill(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id := r.PathValue("id")
	if !sandboxID().MatchString(id) {
		return fmt.Errorf("sandbox %q: %w", id, sandbox.ErrNotFound)
	}
	err := s.fleet.Kill(r.Context(), who, id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return s.showSandbox(w, r, who, http.StatusConflict, "Your click changed nothing: the sandbox has already ended or has not started yet.")
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/sandboxes/"+id, http.StatusSeeOther) //nolint:gosec // a path of ours: id was found
	return nil
}
