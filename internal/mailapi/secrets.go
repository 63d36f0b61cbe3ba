package mailapi

import (
	"fmt"
	"net/http"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/inject"
	"postern/internal/secret"
)

// A secretServer serves the secrets of a project. No answer has a value.
type secretServer struct {
	secrets *secret.Store // nil: the server has none
}

func (s secretServer) routes() []route {
	return []route{
		{"GET", "/v1/secrets", 0, s.list},
		{"POST", "/v1/secrets", maxBody, s.create},
		{"GET", "/v1/secrets/{id}", 0, s.get},
		{"PATCH", "/v1/secrets/{id}", maxBody, s.update},
		{"DELETE", "/v1/secrets/{id}", 0, s.remove},
		{"POST", "/v1/secrets/{id}/rotation", maxBody, s.rotate},
	}
}

// store returns the secrets, or an error if the server has none.
func (s secretServer) store() (*secret.Store, error) {
	if s.secrets == nil {
		return nil, fmt.Errorf("secrets: %w", errNotOffered)
	}
	return s.secrets, nil
}

func secretOf(c secret.Secret) api.Secret {
	out := api.Secret{
		ID: c.ID, Name: c.Name, Kind: string(c.Kind), Hosts: c.Hosts, Env: c.Env, Approval: string(c.Approval), Metadata: c.Metadata, Version: c.Version,
		CreatedAt: c.Created, CreatedBy: c.CreatedBy, UpdatedAt: c.Updated, RotatedAt: timeOrNull(c.Rotated), LastUsedAt: timeOrNull(c.LastUsed),
	}
	if out.Hosts == nil {
		out.Hosts = []string{}
	}
	out.Headers, out.Places = c.Fields(), each(c.Places, func(p inject.Place) api.SecretPlace {
		return api.SecretPlace{Host: p.Host, Method: p.Method, Path: p.Path, In: string(p.In), Name: p.Name}
	})
	return out
}

// placesOf returns the places in a request; the store checks them.
func placesOf(list []api.SecretPlace) []inject.Place {
	return each(list, func(p api.SecretPlace) inject.Place {
		return inject.Place{Host: p.Host, Method: p.Method, Path: p.Path, In: inject.In(p.In), Name: p.Name}
	})
}

// secretValueOf returns the value in a request for a secret of a kind.
func secretValueOf(kind secret.Kind, v api.SecretValue) (secret.Value, error) {
	switch {
	case kind == secret.AWS && v.Value != "":
		return secret.Value{}, fmt.Errorf("%w: value: a secret of kind aws has access_key_id, secret_access_key and perhaps session_token", errRequest)
	case kind == secret.AWS:
		return secret.Value{Text: auth.Secret(v.SecretAccessKey), AccessKey: v.AccessKeyID, SessionToken: auth.Secret(v.SessionToken)}, nil
	case v.SecretAccessKey != "" || v.AccessKeyID != "" || v.SessionToken != "":
		return secret.Value{}, fmt.Errorf("%w: kind: must be aws for a secret with access_key_id, secret_access_key or session_token", errRequest)
	}
	return secret.Value{Text: auth.Secret(v.Value)}, nil
}

func (s secretServer) list(w http.ResponseWriter, r *http.Request, c caller) error {
	ss, err := s.store()
	if err != nil {
		return err
	}
	all, err := ss.List(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.SecretList{Secrets: each(all, secretOf)})
	return nil
}

func (s secretServer) create(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.NewSecret
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	ss, err := s.store()
	if err != nil {
		return err
	}
	kind := secret.Kind(in.Kind)
	v, err := secretValueOf(kind, in.SecretValue)
	if err != nil {
		return err
	}
	out, err := ss.Create(r.Context(), c.Principal, in.Name, kind, v, secret.Settings{
		Hosts: in.Hosts, Env: in.Env, Approval: secret.Approval(in.Approval), Headers: in.Headers, Places: placesOf(in.Places), Metadata: in.Metadata,
	})
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/secrets/"+out.ID)
	answer(w, http.StatusCreated, secretOf(out))
	return nil
}

func (s secretServer) get(w http.ResponseWriter, r *http.Request, c caller) error {
	ss, err := s.store()
	if err != nil {
		return err
	}
	out, err := ss.Get(r.Context(), c.Principal, r.PathValue("id"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, secretOf(out))
	return nil
}

func (s secretServer) update(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.SecretChange
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	ss, err := s.store()
	if err != nil {
		return err
	}
	ch := secret.Change{Hosts: in.Hosts, Env: in.Env, Headers: in.Headers, Metadata: in.Metadata}
	if in.Places != nil {
		ch.Places = new(placesOf(*in.Places))
	}
	if in.Approval != nil {
		ch.Approval = new(secret.Approval(*in.Approval))
	}
	out, err := ss.Update(r.Context(), c.Principal, r.PathValue("id"), ch)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, secretOf(out))
	return nil
}

func (s secretServer) rotate(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.SecretValue
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	ss, err := s.store()
	if err != nil {
		return err
	}
	was, err := ss.Get(r.Context(), c.Principal, r.PathValue("id"))
	if err != nil {
		return err
	}
	v, err := secretValueOf(was.Kind, in)
	if err != nil {
		return err
	}
	out, err := ss.Update(r.Context(), c.Principal, was.ID, secret.Change{Value: &v})
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, secretOf(out))
	return nil
}

func (s secretServer) remove(w http.ResponseWriter, r *http.Request, c caller) error {
	ss, err := s.store()
	if err != nil {
		return err
	}
	if err := ss.Delete(r.Context(), c.Principal, r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
