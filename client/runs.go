package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"postern/internal/api"
)

// RunService proposes runs and follows them.
type RunService struct{ c *Client }

// A RunQuery selects runs. Its zero value selects all.
type RunQuery struct {
	State    string // such as RunRunning
	Contract string // name of the contract
	Limit    int    // at most 200; 0 means 50
}

// Propose proposes a run. If it has inputs it is a draft: upload each with Upload, then
// call Submit. Otherwise it waits for its review, or starts.
func (s *RunService) Propose(ctx context.Context, n NewRun) (Run, error) {
	return post[Run](ctx, s.c, n, "v1", "runs")
}

// Upload stores the content of an input that a draft announced.
func (s *RunService) Upload(ctx context.Context, id, path string, r io.Reader) (out Run, err error) {
	resp, err := s.c.upload(ctx, http.MethodPut, url.Values{"path": {path}}, r, "v1", "runs", id, "input")
	if err != nil {
		return out, err
	}
	return out, decode(resp, &out)
}

// Submit proposes a draft after all its inputs were uploaded.
func (s *RunService) Submit(ctx context.Context, id string) (Run, error) {
	return post[Run](ctx, s.c, nil, "v1", "runs", id, "propose")
}

// List returns runs, the newest first.
func (s *RunService) List(ctx context.Context, q RunQuery) ([]Run, error) {
	v := url.Values{}
	if q.State != "" {
		v.Set("state", q.State)
	}
	if q.Contract != "" {
		v.Set("contract", q.Contract)
	}
	if q.Limit != 0 {
		v.Set("limit", strconv.Itoa(q.Limit))
	}
	l, err := get[api.RunList](ctx, s.c, v, "v1", "runs")
	return l.Runs, err
}

// Get returns one run.
func (s *RunService) Get(ctx context.Context, id string) (Run, error) {
	return get[Run](ctx, s.c, nil, "v1", "runs", id)
}

// Events returns the events of a run with numbers above after, the oldest first, and the
// run's state. If there are none and the run is not over, it waits for an event for up to
// wait, at most a minute.
func (s *RunService) Events(ctx context.Context, id string, after int64, wait time.Duration) (out RunEventList, err error) {
	v := url.Values{}
	if after != 0 {
		v.Set("after", strconv.FormatInt(after, 10))
	}
	if wait > 0 {
		v.Set("wait", strconv.FormatInt(int64((wait+time.Second-1)/time.Second), 10))
	}
	err = s.c.do(ctx, request{method: http.MethodGet, path: []string{"v1", "runs", id, "events"}, query: v, wait: wait}, &out)
	return out, err
}

// Cancel cancels a run. A run that waits is not started, and one that runs is stopped.
func (s *RunService) Cancel(ctx context.Context, id string) (Run, error) {
	return post[Run](ctx, s.c, nil, "v1", "runs", id, "cancel")
}

// ContractService manages the contracts of the project, and its boundary.
type ContractService struct{ c *Client }

// List returns the newest version of each contract, by name.
func (s *ContractService) List(ctx context.Context) ([]Contract, error) {
	l, err := get[api.ContractList](ctx, s.c, nil, "v1", "contracts")
	return l.Contracts, err
}

// Get returns the newest version of a contract.
func (s *ContractService) Get(ctx context.Context, name string) (Contract, error) {
	return get[Contract](ctx, s.c, nil, "v1", "contracts", name)
}

// Put stores a new version of a contract. The name must be the one in its text.
func (s *ContractService) Put(ctx context.Context, name, text string) (out Contract, err error) {
	err = s.c.do(ctx, request{method: http.MethodPut, path: []string{"v1", "contracts", name}, in: api.ContractText{Text: text}}, &out)
	return out, err
}

// Delete removes a contract. Runs that were proposed with it stay as they are.
func (s *ContractService) Delete(ctx context.Context, name string) error {
	return s.c.remove(ctx, "v1", "contracts", name)
}

// Boundary returns the project's boundary.
func (s *ContractService) Boundary(ctx context.Context) (Boundary, error) {
	return get[Boundary](ctx, s.c, nil, "v1", "boundary")
}

// SetBoundary replaces the project's boundary. Only an owner may.
func (s *ContractService) SetBoundary(ctx context.Context, text string) (out Boundary, err error) {
	err = s.c.do(ctx, request{method: http.MethodPut, path: []string{"v1", "boundary"}, in: api.ContractText{Text: text}}, &out)
	return out, err
}

// RemoveBoundary removes the project's boundary. Only an owner may.
func (s *ContractService) RemoveBoundary(ctx context.Context) error {
	return s.c.remove(ctx, "v1", "boundary")
}
