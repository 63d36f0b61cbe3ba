package mailapi

import (
	"fmt"
	"net/http"
	"strconv"

	"postern/internal/api"
	"postern/internal/run"
)

// maxInput is the size limit of one input of a run, in bytes. Contracts set lower ones.
const maxInput = 64 << 20

// A runServer serves runs.
type runServer struct {
	runs    *run.Service // nil: the server makes none
	crowd   *crowd
	closing <-chan struct{}
}

func (s runServer) routes() []route {
	return []route{
		{"GET", "/v1/runs", 0, s.list},
		{"POST", "/v1/runs", maxBody, s.propose},
		{"GET", "/v1/runs/{id}", 0, s.get},
		{"PUT", "/v1/runs/{id}/input", -maxInput, s.input},
		{"POST", "/v1/runs/{id}/propose", 0, s.submit},
		{"GET", "/v1/runs/{id}/events", 0, s.events},
		{"POST", "/v1/runs/{id}/cancel", 0, s.cancel},
	}
}

// service returns the runs, or an error if the server makes none.
func (s runServer) service() (*run.Service, error) { return runsOf(s.runs) }

func runsOf(s *run.Service) (*run.Service, error) {
	if s == nil {
		return nil, fmt.Errorf("runs: %w", errNotOffered)
	}
	return s, nil
}

// one calls f with the service and the id in the path, and answers with the run.
func (s runServer) one(w http.ResponseWriter, r *http.Request, f func(svc *run.Service, id string) (run.Run, error)) error {
	svc, err := s.service()
	if err != nil {
		return err
	}
	out, err := f(svc, r.PathValue("id"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, out.API())
	return nil
}

func (s runServer) list(w http.ResponseWriter, r *http.Request, c caller) error {
	svc, err := s.service()
	if err != nil {
		return err
	}
	v := r.URL.Query()
	if err := onlyParameters(v, "state", "contract", "limit"); err != nil {
		return err
	}
	q := run.Query{State: run.State(v.Get("state")), Contract: v.Get("contract")}
	if q.Limit, err = limit(v, 50, 200); err != nil {
		return err
	}
	list, err := svc.List(r.Context(), c.Principal, q)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.RunList{Runs: each(list, func(r run.Run) api.Run { return r.Brief() })})
	return nil
}

func (s runServer) propose(w http.ResponseWriter, r *http.Request, c caller) error {
	svc, err := s.service()
	if err != nil {
		return err
	}
	var in api.NewRun
	if err := decode(r, &in); err != nil {
		return err
	}
	p := run.Proposal{Contract: in.Contract, Text: in.ContractText, Task: in.Task, Commands: in.Commands, Answers: in.Answers}
	for _, f := range in.Inputs {
		p.Inputs = append(p.Inputs, run.Input{Path: f.Path, Size: f.Size, SHA256: f.SHA256})
	}
	out, err := svc.Propose(r.Context(), c.Principal, "rest", p)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/runs/"+out.ID)
	answer(w, http.StatusCreated, out.API())
	return nil
}

func (s runServer) get(w http.ResponseWriter, r *http.Request, c caller) error {
	return s.one(w, r, func(svc *run.Service, id string) (run.Run, error) { return svc.Get(r.Context(), c.Principal, id) })
}

func (s runServer) input(w http.ResponseWriter, r *http.Request, c caller) error {
	v := r.URL.Query()
	if err := onlyParameters(v, "path"); err != nil {
		return err
	}
	return s.one(w, r, func(svc *run.Service, id string) (run.Run, error) {
		return svc.PutInput(r.Context(), c.Principal, id, v.Get("path"), r.Body)
	})
}

func (s runServer) submit(w http.ResponseWriter, r *http.Request, c caller) error {
	return s.one(w, r, func(svc *run.Service, id string) (run.Run, error) { return svc.Submit(r.Context(), c.Principal, id) })
}

func (s runServer) cancel(w http.ResponseWriter, r *http.Request, c caller) error {
	return s.one(w, r, func(svc *run.Service, id string) (run.Run, error) { return svc.Cancel(r.Context(), c.Principal, id) })
}

// events answers with what happened in a run, the oldest first.
func (s runServer) events(w http.ResponseWriter, r *http.Request, c caller) error {
	svc, err := s.service()
	if err != nil {
		return err
	}
	v := r.URL.Query()
	if err := onlyParameters(v, "after", "wait"); err != nil {
		return err
	}
	var after int64
	if v.Has("after") {
		if after, err = strconv.ParseInt(v.Get("after"), 10, 64); err != nil || after < 0 {
			return fmt.Errorf("%w: after: must be the number of an event, or 0", errRequest)
		}
	}
	wait, err := seconds(v, "wait", 0, 60)
	if err != nil {
		return err
	}
	if wait > 0 {
		leave, err := s.crowd.enter("runs of "+c.ID, maxWaits)
		if err != nil {
			return err
		}
		defer leave()
	}
	list, state, err := svc.Events(r.Context(), c.Principal, r.PathValue("id"), after, wait, s.closing)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.RunEventList{Events: append([]api.RunEvent{}, list...), State: string(state)})
	return nil
}

// A contractServer serves stored contracts and the boundary.
type contractServer struct {
	runs *run.Service // nil: the server makes no runs
}

func (s contractServer) routes() []route {
	return []route{
		{"GET", "/v1/contracts", 0, s.list},
		{"GET", "/v1/contracts/{name}", 0, s.get},
		{"PUT", "/v1/contracts/{name}", maxBody, s.put},
		{"DELETE", "/v1/contracts/{name}", 0, s.remove},
		{"GET", "/v1/boundary", 0, s.boundary},
		{"PUT", "/v1/boundary", maxBody, s.setBoundary},
		{"DELETE", "/v1/boundary", 0, s.removeBoundary},
	}
}

func contractOf(s run.Stored) api.Contract {
	out := api.Contract{Name: s.Name, Version: s.Version, Digest: s.Digest, Text: s.Text, CreatedAt: s.At, CreatedBy: s.By}
	if s.Contract != nil {
		out.Explain, out.Warnings = s.Explain(), s.Warnings()
	}
	return out
}

func boundaryOf(s run.Stored) api.Boundary {
	return api.Boundary{Digest: s.Digest, Text: s.Text, CreatedAt: s.At, CreatedBy: s.By, Explain: filled(s.Explain())}
}

func (s contractServer) list(w http.ResponseWriter, r *http.Request, c caller) error {
	svc, err := runsOf(s.runs)
	if err != nil {
		return err
	}
	if err := onlyParameters(r.URL.Query()); err != nil {
		return err
	}
	list, err := svc.Contracts(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.ContractList{Contracts: each(list, func(v run.Stored) api.Contract {
		out := contractOf(v)
		out.Text, out.Explain, out.Warnings = "", nil, nil
		return out
	})})
	return nil
}

func (s contractServer) get(w http.ResponseWriter, r *http.Request, c caller) error {
	svc, err := runsOf(s.runs)
	if err != nil {
		return err
	}
	out, err := svc.Contract(r.Context(), c.Principal, r.PathValue("name"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, contractOf(out))
	return nil
}

func (s contractServer) put(w http.ResponseWriter, r *http.Request, c caller) error {
	svc, err := runsOf(s.runs)
	if err != nil {
		return err
	}
	var in api.ContractText
	if err := decode(r, &in); err != nil {
		return err
	}
	out, err := svc.PutContract(r.Context(), c.Principal, r.PathValue("name"), in.Text)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, contractOf(out))
	return nil
}

func (s contractServer) remove(w http.ResponseWriter, r *http.Request, c caller) error {
	svc, err := runsOf(s.runs)
	if err != nil {
		return err
	}
	if err := svc.DeleteContract(r.Context(), c.Principal, r.PathValue("name")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s contractServer) boundary(w http.ResponseWriter, r *http.Request, c caller) error {
	svc, err := runsOf(s.runs)
	if err != nil {
		return err
	}
	out, err := svc.Boundary(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, boundaryOf(out))
	return nil
}

func (s contractServer) setBoundary(w http.ResponseWriter, r *http.Request, c caller) error {
	svc, err := runsOf(s.runs)
	if err != nil {
		return err
	}
	var in api.ContractText
	if err := decode(r, &in); err != nil {
		return err
	}
	out, err := svc.SetBoundary(r.Context(), c.Principal, in.Text)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, boundaryOf(out))
	return nil
}

func (s contractServer) removeBoundary(w http.ResponseWriter, r *http.Request, c caller) error {
	svc, err := runsOf(s.runs)
	if err != nil {
		return err
	}
	if err := svc.RemoveBoundary(r.Context(), c.Principal); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
