package e2bapi

import (
	"fmt"
	"net/http"
	"time"

	"postern/internal/auth"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// listTeams answers with the caller's only team, its project. The key in it is the
// caller's own: the server stores no other in the clear.
func (s *Server) listTeams(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx := r.Context()
	var name string
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		name, err = auth.ProjectName(ctx, tx, who.Project)
		return err
	})
	if err != nil {
		return err
	}
	w.Header().Set("Cache-Control", "no-store")
	reply(w, http.StatusOK, []any{map[string]any{
		"teamID": who.Project, "name": name, "apiKey": r.Header.Get("X-Api-Key"), "isDefault": true,
	}})
	return nil
}

// team returns the samples of the team in r's path.
func (s *Server) team(r *http.Request, who auth.Principal) ([]sandbox.TeamSample, error) {
	if r.PathValue("id") != who.Project {
		return nil, fmt.Errorf("the key belongs to another team: %w", auth.ErrForbidden)
	}
	start, end, err := interval(r.URL.Query())
	if err != nil {
		return nil, err
	}
	return s.conf.Metrics.Team(who, start, end)
}

// teamMetrics answers with the samples of a team.
func (s *Server) teamMetrics(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	samples, err := s.team(r, who)
	if err != nil {
		return err
	}
	out := []any{}
	for _, m := range samples {
		out = append(out, map[string]any{
			"timestamp": m.At.Format(time.RFC3339Nano), "timestampUnix": m.At.Unix(),
			"concurrentSandboxes": m.Running, "sandboxStartRate": m.StartRate,
		})
	}
	reply(w, http.StatusOK, out)
	return nil
}

// teamMetricsMax answers with the maximum of one metric in an interval.
func (s *Server) teamMetricsMax(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var of func(sandbox.TeamSample) float64
	switch m := r.URL.Query().Get("metric"); m {
	case "concurrent_sandboxes":
		of = func(t sandbox.TeamSample) float64 { return float64(t.Running) }
	case "sandbox_start_rate":
		of = func(t sandbox.TeamSample) float64 { return t.StartRate }
	default:
		return fmt.Errorf("%w: metric: must be concurrent_sandboxes or sandbox_start_rate", errRequest)
	}
	samples, err := s.team(r, who)
	if err != nil {
		return err
	}
	at, most := time.Now().UTC(), 0.0
	for i, t := range samples {
		if v := of(t); i == 0 || v > most {
			at, most = t.At, v
		}
	}
	reply(w, http.StatusOK, map[string]any{"timestamp": at.Format(time.RFC3339Nano), "timestampUnix": at.Unix(), "value": most})
	return nil
}
