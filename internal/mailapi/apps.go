package mailapi

import (
	"net/http"
	"regexp"
	"sync"

	"postern/internal/api"
	"postern/internal/oauth"
)

// An appServer serves the programs that people have connected.
type appServer struct{ apps *oauth.Server }

func (s appServer) routes() []route {
	return offeredIf(s.apps != nil, "connected apps: the operator has named another authorization server", []route{
		{"GET", "/v1/apps", 0, s.listApps},
		{"DELETE", "/v1/apps/{id}", 0, s.revokeApp},
	})
}

func (s appServer) listApps(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.apps.Apps(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.AppList{Apps: each(list, func(a oauth.App) api.App {
		return api.App{
			ID: a.ID, Name: a.Name, ReturnsTo: a.ReturnsTo, Inbox: a.Inbox, Address: a.Address, Credential: a.Credential, Scopes: scopesOf(a.Scope),
			CreatedAt: a.Created, CreatedBy: a.CreatedBy, UsedAt: moment(a.Used),
		}
	})})
	return nil
}

var appID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^app_[A-Z2-7]{26}$`) })

func (s appServer) revokeApp(w http.ResponseWriter, r *http.Request, c caller) error {
	id := r.PathValue("id")
	if !appID().MatchString(id) {
		id = "" // is found nowhere
	}
	if err := s.apps.Revoke(r.Context(), c.Principal, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
