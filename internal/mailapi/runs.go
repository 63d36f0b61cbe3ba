package mailapi

import (
	"fmt"
	"net/http"
	"strconv"

	"postern/internal/api"
	"postern/internal/door"
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
	return offeredIf(s.runs != nil, "runs", []route{
		{"GET", "/v1/runs", 0, s.list},
		{"POST", "/v1/runs", maxBody, s.propose},
		{"GET", "/v1/runs/{id}", 0, s.get},
		{"PUT", "/v1/runs/{id}/input", -maxInput, s.input},
		{"POST", "/v1/runs/{id}/propose", 0, s.submit},
		{"GET", "/v1/runs/{id}/events", 0, s.events},
		{"POST", "/v1/runs/{id}/cancel", 0, s.cancel},
	})
}

// answerWith answers with what a service returned, as the API describes it, or returns the
// service's error.
func answerWith[S, T any](w http.ResponseWriter, out S, err error, api func(S) T) error {
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api(out))
	return nil
}

func runOf(r run.Run) api.Run { return r.API() }

func (s runServer) list(w http.ResponseWriter, r *http.Request, c caller) error {
	v := r.URL.Query()
	if err := onlyParameters(v, "state", "contract", "limit"); err != nil {
		return err
	}
	most, err := limit(v, 50, 200)
	if err != nil {
		return err
	}
	list, err := s.runs.List(r.Context(), c.Principal, run.Query{State: run.State(v.Get("state")), Contract: v.Get("contract"), Limit: most})
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.RunList{Runs: each(list, func(r run.Run) api.Run { return r.Brief() })})
	return nil
}

func (s runServer) propose(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.NewRun
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	p := run.Proposal{Contract: in.Contract, Text: in.ContractText, Task: in.Task, Commands: in.Commands, Answers: in.Answers}
	for _, f := range in.Inputs {
		p.Inputs = append(p.Inputs, run.Input{Path: f.Path, Size: f.Size, SHA256: f.SHA256})
	}
	out, err := s.runs.Propose(r.Context(), c.Principal, "rest", p)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/runs/"+out.ID)
	answer(w, http.StatusCreated, out.API())
	return nil
}

func (s runServer) get(w http.ResponseWriter, r *http.Request, c caller) error {
	out, err := s.runs.Get(r.Context(), c.Principal, r.PathValue("id"))
	return answerWith(w, out, err, runOf)
}

func (s runServer) input(w http.ResponseWriter, r *http.Request, c caller) error {
	v := r.URL.Query()
	if err := onlyParameters(v, "path"); err != nil {
		return err
	}
	out, err := s.runs.PutInput(r.Context(), c.Principal, r.PathValue("id"), v.Get("path"), r.Body)
	return answerWith(w, out, err, runOf)
}

func (s runServer) submit(w http.ResponseWriter, r *http.Request, c caller) error {
	out, err := s.runs.Submit(r.Context(), c.Principal, r.PathValue("id"))
	return answerWith(w, out, err, runOf)
}

func (s runServer) cancel(w http.ResponseWriter, r *http.Request, c caller) error {
	out, err := s.runs.Cancel(r.Context(), c.Principal, r.PathValue("id"))
	return answerWith(w, out, err, runOf)
}

// events answers with what happened in a run, the oldest first.
func (s runServer) events(w http.ResponseWriter, r *http.Request, c caller) error {
	v := r.URL.Query()
	if err := onlyParameters(v, "after", "wait"); err != nil {
		return err
	}
	var after int64
	if v.Has("after") {
		n, err := strconv.ParseInt(v.Get("after"), 10, 64)
		if err != nil || n < 0 {
			return fmt.Errorf("%w: after: must be the number of an event, or 0", errRequest)
		}
		after = n
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
	list, state, err := s.runs.Events(r.Context(), c.Principal, r.PathValue("id"), after, wait, s.closing)
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
	return offeredIf(s.runs != nil, "contracts of runs", []route{
		{"GET", "/v1/contracts", 0, s.list},
		{"GET", "/v1/contracts/{name}", 0, s.get},
		{"PUT", "/v1/contracts/{name}", maxBody, s.put},
		{"DELETE", "/v1/contracts/{name}", 0, s.remove},
		{"GET", "/v1/boundary", 0, s.boundary},
		{"PUT", "/v1/boundary", maxBody, s.setBoundary},
		{"DELETE", "/v1/boundary", 0, s.removeBoundary},
	})
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
	if err := onlyParameters(r.URL.Query()); err != nil {
		return err
	}
	list, err := s.runs.Contracts(r.Context(), c.Principal)
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
	out, err := s.runs.Contract(r.Context(), c.Principal, r.PathValue("name"))
	return answerWith(w, out, err, contractOf)
}

func (s contractServer) put(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.ContractText
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	out, err := s.runs.PutContract(r.Context(), c.Principal, r.PathValue("name"), in.Text)
	return answerWith(w, out, err, contractOf)
}

func (s contractServer) remove(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := s.runs.DeleteContract(r.Context(), c.Principal, r.PathValue("name")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s contractServer) boundary(w http.ResponseWriter, r *http.Request, c caller) error {
	out, err := s.runs.Boundary(r.Context(), c.Principal)
	return answerWith(w, out, err, boundaryOf)
}

func (s contractServer) setBoundary(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.ContractText
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	out, err := s.runs.SetBoundary(r.Context(), c.Principal, in.Text)
	return answerWith(w, out, err, boundaryOf)
}

func (s contractServer) removeBoundary(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := s.runs.RemoveBoundary(r.Context(), c.Principal); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
