package console

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/secret"
)

// A secretsPage lists the project's secrets, and has the form that creates one. It has no
// values, not even one that was typed into a rejected form.
type secretsPage struct {
	Secrets []secret.Secret
	Notice  string
	Name    string // as typed; so are the next two
	Hosts   string
	Ask     secret.Approval
}

// secretHandlers manages the secrets of the project.
type secretHandlers struct{ *Server }

func (s secretHandlers) routes() []route {
	return []route{
		{"GET", "/console/secrets", views, s.secrets},
		{"POST", "/console/secrets", manages, s.create},
		{"GET", "/console/secrets/{id}", views, s.secret},
		{"POST", "/console/secrets/{id}", manages, s.change},
	}
}

// store returns the secrets, or [secret.ErrNotFound] if the server has none.
func (s secretHandlers) store() (*secret.Store, error) {
	if s.conf.Secrets == nil {
		return nil, fmt.Errorf("this server has no secrets: %w", secret.ErrNotFound)
	}
	return s.conf.Secrets, nil
}

func (s secretHandlers) secrets(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showList(w, r, who, http.StatusOK, secretsPage{Ask: secret.Never})
}

func (s secretHandlers) showList(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, p secretsPage) error {
	ss, err := s.store()
	if err != nil {
		return err
	}
	if p.Secrets, err = ss.List(r.Context(), who); err != nil {
		return err
	}
	return s.render(r.Context(), w, status, page{Name: "secrets", Title: "Secrets", Who: who, Here: "settings", Body: p})
}

// hostList returns the hosts in a form, separated by commas, spaces or lines.
func hostList(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r <= ' ' })
}

// placeList returns the places in a form, a line each.
func placeList(text string) (*[]inject.Place, error) {
	places := []inject.Place{}
	for line := range strings.Lines(text) {
		if strings.TrimSpace(line) == "" {
			continue
		}
		p, err := secret.ParsePlace(line)
		if err != nil {
			return nil, err
		}
		places = append(places, p)
	}
	return &places, nil
}

// valueOf returns the value in a form, without a line end: a browser sends one that was
// pasted with the value.
func valueOf(r *http.Request) secret.Value {
	return secret.Value{
		Text:      auth.Secret(strings.TrimRight(r.PostForm.Get("value"), "\r\n")),
		AccessKey: strings.TrimSpace(r.PostForm.Get("access")), SessionToken: auth.Secret(strings.TrimSpace(r.PostForm.Get("session"))),
	}
}

// reasonOf returns the reason of an error that a person can correct, or the empty
// string.
func reasonOf(err error) string {
	switch {
	case errors.Is(err, secret.ErrInvalid):
		_, after, _ := strings.Cut(err.Error(), secret.ErrInvalid.Error()+": ")
		return after
	case errors.Is(err, secret.ErrExists), errors.Is(err, secret.ErrTooMany), errors.Is(err, secret.ErrForged):
		_, after, _ := strings.Cut(err.Error(), ": ")
		return after
	}
	return ""
}

func (s secretHandlers) create(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ss, err := s.store()
	if err != nil {
		return err
	}
	p := secretsPage{Name: strings.TrimSpace(r.PostForm.Get("name")), Hosts: r.PostForm.Get("hosts"), Ask: secret.Approval(r.PostForm.Get("approval"))}
	v, kind := valueOf(r), secret.Plain
	if v.AccessKey != "" {
		kind = secret.AWS
	}
	c, err := ss.Create(r.Context(), who, p.Name, kind, v, secret.Settings{Hosts: hostList(p.Hosts), Approval: p.Ask})
	if why := reasonOf(err); why != "" {
		p.Notice = "Nothing was created: " + why + "."
		return s.showList(w, r, who, http.StatusBadRequest, p)
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, "/console/secrets/"+url.PathEscape(c.ID), http.StatusSeeOther)
	return nil
}

// A credentialPage is one secret, without its value.
type credentialPage struct {
	secret.Secret
	Fields []string // header fields that may have the value
	Notice string
}

func (s secretHandlers) secret(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.show(w, r, who, http.StatusOK, "")
}

func (s secretHandlers) show(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	ss, err := s.store()
	if err != nil {
		return err
	}
	c, err := ss.Get(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	return s.render(r.Context(), w, status, page{Name: "credential", Title: c.Name, Who: who, Here: "settings", Body: credentialPage{c, c.Fields(), notice}})
}

// change handles the forms on a secret's page.
func (s secretHandlers) change(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ss, err := s.store()
	if err != nil {
		return err
	}
	ctx, id := r.Context(), r.PathValue("id")
	back := "/console/secrets/" + url.PathEscape(id)
	switch r.PostForm.Get("do") {
	case "rotate":
		v := valueOf(r)
		_, err = ss.Update(ctx, who, id, secret.Change{Value: &v})
	case "settings":
		hosts, approval := hostList(r.PostForm.Get("hosts")), secret.Approval(r.PostForm.Get("approval"))
		ch := secret.Change{Hosts: &hosts, Approval: &approval}
		if r.PostForm.Has("env") { // the page of an AWS pair has none
			env := strings.TrimSpace(r.PostForm.Get("env"))
			ch.Env = &env
		}
		if r.PostForm.Has("headers") {
			headers := hostList(r.PostForm.Get("headers"))
			ch.Headers = &headers
		}
		if r.PostForm.Has("places") {
			if ch.Places, err = placeList(r.PostForm.Get("places")); err != nil {
				break
			}
		}
		_, err = ss.Update(ctx, who, id, ch)
	case "delete":
		err, back = ss.Delete(ctx, who, id), "/console/secrets"
	default:
		return fmt.Errorf("%w: do must be rotate, settings or delete", errForm)
	}
	if why := reasonOf(err); why != "" {
		return s.show(w, r, who, http.StatusBadRequest, "Nothing was changed: "+why+".")
	}
	if err != nil {
		return err
	}
	http.Redirect(w, r, back, http.StatusSeeOther)
	return nil
}
