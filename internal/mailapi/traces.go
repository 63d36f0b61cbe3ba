package mailapi

import (
	"fmt"
	"net/http"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/tracing"
)

// A traceServer serves the steps of operations on sandboxes.
type traceServer struct {
	traces *tracing.Recorder // nil: the server keeps none
}

func (s traceServer) routes() []route {
	return []route{{"GET", "/v1/sandboxes/{id}/trace", 0, s.get}}
}

func (s traceServer) get(w http.ResponseWriter, r *http.Request, c caller) error {
	// How long things take shows what else the machine does, and the sandbox of
	// another project must not be found by its ID.
	if c.Kind != auth.Project && c.Kind != auth.Person {
		return fmt.Errorf("traces: %w", auth.ErrForbidden)
	}
	id := r.PathValue("id")
	op, ok := s.traces.Last(c.Project, id)
	if !ok {
		return fmt.Errorf("id: no operation on this sandbox is in memory; the server keeps the newest 64: %w", store.ErrNotFound)
	}
	out := api.Trace{Sandbox: id, Steps: []api.TraceStep{}}
	for _, st := range op.Steps {
		out.Steps = append(out.Steps, api.TraceStep{Name: st.Name, Depth: st.Depth, Start: st.Start.UTC(), Duration: st.End.Sub(st.Start).Microseconds(), Failed: st.Failed})
	}
	answer(w, http.StatusOK, out)
	return nil
}
