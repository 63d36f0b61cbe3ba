package mailapi

import (
	"fmt"
	"net/http"

	"postern/internal/api"
	"postern/internal/connector"
	"postern/internal/directory"
	"postern/internal/door"
	"postern/internal/policy"
)

// A connectionServer serves the connections to mailboxes at other providers. No answer
// has a credential.
type connectionServer struct {
	connections *connector.Connections // nil: the server has none
}

func (s connectionServer) routes() []route {
	return offeredIf(s.connections != nil, "connections", []route{
		{"GET", "/v1/connections", 0, s.list},
		{"POST", "/v1/connections", maxBody, s.connect},
		{"GET", "/v1/connections/{id}", 0, s.get},
		{"DELETE", "/v1/connections/{id}", 0, s.disconnect},
		{"POST", "/v1/connections/{id}/pause", 0, s.pause},
		{"POST", "/v1/connections/{id}/resume", 0, s.resume},
		{"POST", "/v1/connections/{id}/resync", 0, s.resync},
		{"POST", "/v1/connections/{id}/sign-in", maxBody, s.signIn},
	})
}

func connectionOf(c connector.Connection) api.Connection {
	out := api.Connection{
		ID: c.ID, Inbox: c.Inbox, Address: c.Address, Kind: string(c.Kind), Settings: c.Public, State: string(c.Phase), Problem: c.Problem, Since: timeOrNull(c.Since), Most: c.Most,
		Done: c.Done, Total: c.Total, LeftOut: c.LeftOut, CreatedAt: c.Created, CreatedBy: c.CreatedBy, SyncedAt: timeOrNull(c.Synced), RetryAt: timeOrNull(c.RetryAt),
	}
	if out.Settings == nil {
		out.Settings = map[string]string{}
	}
	return out
}

func (s connectionServer) list(w http.ResponseWriter, r *http.Request, c caller) error {
	all, err := s.connections.List(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.ConnectionList{Connections: each(all, connectionOf)})
	return nil
}

func (s connectionServer) connect(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.NewConnection
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if in.Kind == "" || in.Address == "" || in.Credential == "" {
		return fmt.Errorf("%w: kind, address and credential: are required", errRequest)
	}
	n := connector.NewConnection{
		Settings: connector.Settings{Kind: connector.Kind(in.Kind), Address: in.Address, Public: in.Settings, Credential: in.Credential},
		Bounds:   connector.Bounds{Most: in.Most},
		Inbox:    directory.NewInbox{DisplayName: in.DisplayName, Mode: policy.Mode(in.Mode), MaxBytes: in.MaxBytes},
	}
	if in.Since != nil {
		n.Bounds.Since = *in.Since
	}
	made, key, err := s.connections.Connect(r.Context(), c.Principal, n)
	if err != nil {
		return err
	}
	out := connectionOf(made)
	out.Key, out.Notice = key.Reveal(), lossNotice
	w.Header().Set("Location", "/v1/connections/"+made.ID)
	answer(w, http.StatusCreated, out)
	return nil
}

func (s connectionServer) get(w http.ResponseWriter, r *http.Request, c caller) error {
	found, err := s.connections.Get(r.Context(), c.Principal, r.PathValue("id"))
	return answerConnection(w, found, err)
}

func answerConnection(w http.ResponseWriter, c connector.Connection, err error) error {
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, connectionOf(c))
	return nil
}

func (s connectionServer) disconnect(w http.ResponseWriter, r *http.Request, c caller) error {
	ended, problem, err := s.connections.Disconnect(r.Context(), c.Principal, r.PathValue("id"))
	if problem != "" {
		ended.Problem = "the credential is deleted here, but the provider did not withdraw it: " + problem
	}
	return answerConnection(w, ended, err)
}

func (s connectionServer) pause(w http.ResponseWriter, r *http.Request, c caller) error {
	changed, err := s.connections.Pause(r.Context(), c.Principal, r.PathValue("id"))
	return answerConnection(w, changed, err)
}

func (s connectionServer) resume(w http.ResponseWriter, r *http.Request, c caller) error {
	changed, err := s.connections.Resume(r.Context(), c.Principal, r.PathValue("id"))
	return answerConnection(w, changed, err)
}

func (s connectionServer) resync(w http.ResponseWriter, r *http.Request, c caller) error {
	changed, err := s.connections.Resync(r.Context(), c.Principal, r.PathValue("id"))
	return answerConnection(w, changed, err)
}

func (s connectionServer) signIn(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.ConnectionCredential
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if in.Credential == "" {
		return fmt.Errorf("%w: credential: is required", errRequest)
	}
	changed, err := s.connections.SignIn(r.Context(), c.Principal, r.PathValue("id"), connector.Settings{Public: in.Settings, Credential: in.Credential})
	return answerConnection(w, changed, err)
}
