package e2bapi

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/sandbox"
)

func (s *Server) pause(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Memory *bool `json:"memory"`
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	if err := s.fleet.Pause(r.Context(), who, shortID(r.PathValue("id")), b.Memory != nil && !*b.Memory); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// connect makes sure that a sandbox runs: it resumes a paused one, and extends the
// life of a running one.
func (s *Server) connect(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Timeout   *int64 `json:"timeout"`   // seconds
		Memory    *bool  `json:"memory"`    // false: a paused sandbox keeps only its files and boots
		AutoPause *bool  `json:"autoPause"` // sent by E2B's resume, and ignored: the setting of create stays
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	if err := s.refuseLoan(r, who, shortID(r.PathValue("id"))); err != nil {
		return err
	}
	i, resumed, err := s.fleet.Connect(r.Context(), who, shortID(r.PathValue("id")), sandbox.ConnectRequest{
		Resume:  strings.HasSuffix(r.URL.Path, "/resume"), // E2B's older route, which refuses a running one
		Timeout: timeoutOf(b.Timeout, 300*time.Second), Reboot: b.Memory != nil && !*b.Memory, InboxKey: auth.Secret(r.Header.Get(InboxKeyHeader)),
	})
	if err != nil {
		return nameInboxKey(err)
	}
	status := http.StatusOK
	if resumed {
		status = http.StatusCreated
	}
	reply(w, status, s.sandbox(i))
	return nil
}

// refresh is E2B's older way to extend the life of a sandbox.
func (s *Server) refresh(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Duration *int64 `json:"duration"` // seconds
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	if b.Duration != nil && (*b.Duration < 0 || *b.Duration > 3600) {
		return fmt.Errorf("%w: duration: want 0 to 3600 seconds", errRequest)
	}
	d := timeoutOf(b.Duration, 15*time.Second)
	if _, err := s.fleet.SetTimeout(r.Context(), who, shortID(r.PathValue("id")), d, true); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// fork makes copies of a running sandbox. One copy that fails does not fail the
// others.
func (s *Server) fork(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Timeout *int64 `json:"timeout"` // seconds
		Count   *int   `json:"count"`
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	count := 1
	if b.Count != nil {
		count = *b.Count
	}
	all, err := s.fleet.Fork(r.Context(), who, shortID(r.PathValue("id")), timeoutOf(b.Timeout, 300*time.Second), count)
	if err != nil {
		return err
	}
	out := make([]map[string]any, len(all))
	for i, f := range all {
		if f.Err == nil {
			out[i] = map[string]any{"sandbox": s.sandbox(f.Info)}
			continue
		}
		status, msg := s.status(r, f.Err)
		out[i] = map[string]any{"error": map[string]any{"code": status, "message": msg}}
	}
	reply(w, http.StatusCreated, out)
	return nil
}
