package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/store"
)

// A permitsPage lists what sandboxes may do at the moment beyond their lists, and permits
// that have ended.
type permitsPage struct {
	Holding, Ended []permit.Permit
}

// permitHandlers shows and ends permits, and narrows proposals for them.
type permitHandlers struct{ actionHandlers }

func (s permitHandlers) routes() []route {
	return []route{
		{"GET", "/console/permits", views, s.permits},
		{"POST", "/console/permits/{id}/end", decides, s.end},
		{"GET", "/console/actions/{id}/narrow", decides, s.narrowForm},
		{"POST", "/console/actions/{id}/narrow", decides, s.narrow},
	}
}

func (s permitHandlers) register() (*permit.Register, error) {
	if s.conf.Permits == nil {
		return nil, fmt.Errorf("this server has no permits: %w", store.ErrNotFound)
	}
	return s.conf.Permits, nil
}

func (s permitHandlers) permits(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	reg, err := s.register()
	if err != nil {
		return err
	}
	var p permitsPage
	if p.Holding, err = reg.List(r.Context(), who, permit.Query{Limit: 500}); err != nil {
		return err
	}
	all, err := reg.List(r.Context(), who, permit.Query{All: true, Limit: 100})
	if err != nil {
		return err
	}
	for _, one := range all {
		if !slices.ContainsFunc(p.Holding, func(h permit.Permit) bool { return h.ID == one.ID }) && len(p.Ended) < 20 {
			p.Ended = append(p.Ended, one)
		}
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "permits", Title: "Permits", Who: who, Here: "settings", Body: p})
}

func (s permitHandlers) end(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	reg, err := s.register()
	if err != nil {
		return err
	}
	if _, err := reg.End(r.Context(), who, r.PathValue("id")); err != nil {
		return err
	}
	http.Redirect(w, r, "/console/permits", http.StatusSeeOther)
	return nil
}

// A narrowPage is the form in which a reviewer narrows a proposal.
type narrowPage struct {
	ID, Digest            string
	Filter                filter
	Version               int64
	Notice                string
	Sandbox               string
	Asked                 permit.Proposal
	Hosts, Methods, Paths string // one a line; methods between spaces
	For                   string
	Scope                 permit.Scope
	Port                  string
}

// narrowable reads a proposal as its form shows it.
func (s permitHandlers) narrowable(r *http.Request, who auth.Principal, id string) (narrowPage, error) {
	a, err := s.gate.Action(r.Context(), who, id)
	if err != nil {
		return narrowPage{}, err
	}
	if a.Kind != policy.KindPermit || !a.Dropped.IsZero() {
		return narrowPage{}, fmt.Errorf("proposal %s: %w", id, store.ErrNotFound)
	}
	if a.State != oversight.Pending {
		return narrowPage{}, fmt.Errorf("narrow %s, which is %s: %w", id, a.State, oversight.ErrTooLate)
	}
	p, box, err := permit.Of(a)
	if err != nil {
		return narrowPage{}, err
	}
	out := narrowPage{
		ID: id, Digest: a.Hex(), Version: a.Version, Sandbox: box, Asked: p,
		Hosts: strings.Join(p.Hosts, "\n"), Methods: strings.Join(p.Methods, " "), Paths: strings.Join(p.Paths, "\n"), For: p.For.String(), Scope: p.Scope,
	}
	if out.Filter, err = filterOf(r); err != nil {
		return narrowPage{}, err
	}
	if p.Port != 0 {
		out.Port = strconv.Itoa(int(p.Port))
	}
	return out, nil
}

func (s permitHandlers) narrowForm(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	p, err := s.narrowable(r, who, id)
	if errors.Is(err, oversight.ErrTooLate) {
		return s.after(w, r, who, id, err)
	}
	if err != nil {
		return err
	}
	return s.showNarrow(r.Context(), w, http.StatusOK, who, p)
}

func (s permitHandlers) showNarrow(ctx context.Context, w http.ResponseWriter, status int, who auth.Principal, p narrowPage) error {
	return s.render(ctx, w, status, page{Name: "narrow", Title: "Narrow the proposal", Who: who, Here: "queue", Body: p})
}

// narrow replaces the waiting proposal by the reviewer's.
func (s permitHandlers) narrow(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	reg, err := s.register()
	if err != nil {
		return err
	}
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	version, err := shownVersion(r)
	if err != nil {
		return err
	}
	shown, err := s.narrowable(r, who, id)
	if errors.Is(err, oversight.ErrTooLate) || err == nil && (shown.Version != version || shown.Digest != r.PostForm.Get("digest")) {
		return s.after(w, r, who, id, oversight.ErrStale)
	}
	if err != nil {
		return err
	}
	p := shown
	p.Hosts, p.Methods, p.Paths, p.For, p.Port, p.Scope = typed(r, "hosts"), typed(r, "methods"), typed(r, "paths"), strings.TrimSpace(typed(r, "for")), strings.TrimSpace(typed(r, "port")), permit.Scope(typed(r, "scope"))
	n := permit.Proposal{Hosts: hostList(p.Hosts), Methods: hostList(p.Methods), Paths: linesOf(p.Paths), Scope: p.Scope}
	if p.Port != "" {
		port, err := strconv.ParseUint(p.Port, 10, 16)
		if err != nil || port == 0 {
			p.Notice = "Nothing was changed: port: must be 1 to 65535, or empty."
			return s.showNarrow(r.Context(), w, http.StatusBadRequest, who, p)
		}
		n.Port = uint16(port)
	}
	if n.For, err = permit.ParseDuration(p.For); err == nil {
		_, err = reg.Narrow(r.Context(), who, id, version, n)
	}
	switch {
	case errors.Is(err, permit.ErrInvalid), errors.Is(err, permit.ErrWider):
		p.Notice = "Nothing was changed: " + strings.TrimPrefix(err.Error(), permit.ErrInvalid.Error()+": ") + "."
		return s.showNarrow(r.Context(), w, http.StatusBadRequest, who, p)
	case err != nil:
		return s.after(w, r, who, id, err)
	}
	return s.back(w, r, id, "")
}

// narrowed returns the changes that a revision of a proposal made to the one before it.
func narrowed(before, after oversight.Revision) (out []mail.Change, err error) {
	was, _, err := permit.Of(oversight.Action{Payload: before.Payload})
	if err != nil {
		return nil, err
	}
	is, _, err := permit.Of(oversight.Action{Payload: after.Payload})
	if err != nil {
		return nil, err
	}
	all := func(l []string) string {
		if len(l) == 0 {
			return "all"
		}
		return strings.Join(l, " ")
	}
	for _, c := range []mail.Change{
		{Field: "Hosts", Old: all(was.Hosts), New: all(is.Hosts)},
		{Field: "Methods", Old: all(was.Methods), New: all(is.Methods)},
		{Field: "Paths", Old: all(was.Paths), New: all(is.Paths)},
		{Field: "Port", Old: strconv.Itoa(int(was.Port)), New: strconv.Itoa(int(is.Port))},
		{Field: "For", Old: was.For.String(), New: is.For.String()},
		{Field: "For whom", Old: string(was.Scope), New: string(is.Scope)},
	} {
		if c.Old != c.New {
			out = append(out, c)
		}
	}
	return out, nil
}

// Narrowable reports whether a reviewer can narrow what is proposed.
func (r *review) Narrowable() bool {
	return r.Kind == policy.KindPermit && r.State == oversight.Pending && !r.Changed && r.Unshown == ""
}
