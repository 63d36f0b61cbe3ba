package console

import (
	"errors"
	"net/http"
	"net/url"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/people"
	"postern/internal/store"
)

// A peoplePage lists the people who may sign in, and the invitations.
type peoplePage struct {
	People      []people.Person
	Invitations []auth.Invitation
	Roles       []auth.Role
	Link        string // of an invitation that was just made; shown only once
	For         auth.Role
	Notice      string
}

// peopleHandlers lets owners manage people and invitations.
type peopleHandlers struct{ reviews }

func (s peopleHandlers) routes() []route {
	return []route{
		{"GET", "/console/people", manages, s.people},
		{"POST", "/console/people", manages, s.invite},
		{"POST", "/console/people/invitations/{id}/withdraw", manages, s.withdraw},
		{"GET", "/console/people/{id}", manages, s.person},
		{"POST", "/console/people/{id}/role", manages, s.setRole},
		{"POST", "/console/people/{id}/reach", manages, s.setReachOf},
		{"POST", "/console/people/{id}/disable", manages, s.disablePerson},
		{"POST", "/console/people/{id}/enable", manages, s.enablePerson},
		{"POST", "/console/people/{id}/reset", manages, s.resetPerson},
		{"POST", "/console/people/{id}/link-operator", manages, s.linkOperator},
		{"POST", "/console/people/{id}/unlink-operator", manages, s.unlinkOperator},
	}
}

func (s peopleHandlers) people(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showPeople(w, r, who, http.StatusOK, peoplePage{})
}

func (s peopleHandlers) showPeople(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, v peoplePage) error {
	var err1, err2 error
	v.Roles = []auth.Role{auth.Reviewer, auth.Viewer, auth.Owner} // the first is chosen
	v.People, err1 = s.conf.People.List(r.Context(), who)
	v.Invitations, err2 = s.conf.People.Invitations(r.Context(), who)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	return s.render(r.Context(), w, status, page{Name: "people", Title: "People", Who: who, Here: "people", Body: v})
}

func (s peopleHandlers) invite(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	form := r.PostForm
	v, token, err := s.conf.People.Invite(r.Context(), who, auth.Invitation{
		Role: auth.Role(form.Get("role")), Email: strings.TrimSpace(form.Get("email")),
	})
	if why := declined(err); why != "" {
		return s.showPeople(w, r, who, http.StatusBadRequest, peoplePage{Notice: why})
	}
	if err != nil {
		return err
	}
	site := s.site(r)
	link := url.URL{Scheme: "http", Host: site.Host, Path: "/console/setup", RawQuery: url.Values{"token": {token.Reveal()}}.Encode()}
	if site.Secure {
		link.Scheme = "https"
	}
	return s.showPeople(w, r, who, http.StatusCreated, peoplePage{Link: link.String(), For: v.Role})
}

func (s peopleHandlers) withdraw(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if err := s.conf.People.Withdraw(r.Context(), who, r.PathValue("id")); err != nil {
		return err
	}
	http.Redirect(w, r, "/console/people", http.StatusSeeOther)
	return nil
}

// A personPage is one person, as owners see them.
type personPage struct {
	people.Person
	Roles  []auth.Role
	Self   bool // the person is the viewer
	Notice string
}

// Linked reports whether the operator at the machine is linked to the person, and
// LinkHolds whether that link counts already.
func (p personPage) Linked() bool    { return !p.Operator.From.IsZero() }
func (p personPage) LinkHolds() bool { return p.Linked() && !p.Operator.From.After(time.Now()) }

// MayLink reports whether the operator can be linked to the person.
func (p personPage) MayLink() bool {
	return !p.Linked() && p.Disabled.IsZero() && auth.Principal{Kind: auth.Person, Role: p.Role}.Decides()
}

func (s peopleHandlers) person(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showPerson(w, r, who, http.StatusOK, "")
}

func (s peopleHandlers) showPerson(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	list, err := s.conf.People.List(r.Context(), who)
	if err != nil {
		return err
	}
	for _, p := range list {
		if p.Name == r.PathValue("id") {
			return s.render(r.Context(), w, status, page{Name: "person", Title: p.Name, Who: who, Here: "people", Body: personPage{p, auth.Roles, p.Name == who.ID, notice}})
		}
	}
	return store.ErrNotFound
}

// did redirects to the person's page, or shows there why nothing was changed.
func (s peopleHandlers) did(w http.ResponseWriter, r *http.Request, who auth.Principal, err error) error {
	if why := declined(err); why != "" {
		return s.showPerson(w, r, who, http.StatusConflict, why)
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/people/"+url.PathEscape(r.PathValue("id")), http.StatusSeeOther)
	return nil
}

func (s peopleHandlers) setRole(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.did(w, r, who, s.conf.People.SetRole(r.Context(), who, r.PathValue("id"), auth.Role(r.PostForm.Get("role"))))
}

func (s peopleHandlers) setReachOf(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.did(w, r, who, s.conf.People.SetEmail(r.Context(), who, r.PathValue("id"), strings.TrimSpace(r.PostForm.Get("email"))))
}

func (s peopleHandlers) disablePerson(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.did(w, r, who, s.conf.People.Disable(r.Context(), who, r.PathValue("id")))
}

func (s peopleHandlers) enablePerson(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.did(w, r, who, s.conf.People.Enable(r.Context(), who, r.PathValue("id")))
}

func (s peopleHandlers) resetPerson(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.did(w, r, who, s.conf.People.Reset(r.Context(), who, r.PathValue("id")))
}

func (s peopleHandlers) linkOperator(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.did(w, r, who, s.conf.People.LinkOperator(r.Context(), who, r.PathValue("id")))
}

func (s peopleHandlers) unlinkOperator(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.did(w, r, who, s.conf.People.UnlinkOperator(r.Context(), who, r.PathValue("id")))
}
