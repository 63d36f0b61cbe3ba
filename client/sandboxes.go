package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// A Sandbox is a sandbox as the control API shows it, which is on E2B's wire.
// To run code in one, use an SDK of E2B.
type Sandbox struct {
	ID         string            `json:"sandboxID"`
	TemplateID string            `json:"templateID"`
	Alias      string            `json:"alias"` // of the template; may be empty
	State      string            `json:"state"` // running or paused
	StartedAt  time.Time         `json:"startedAt"`
	EndAt      time.Time         `json:"endAt"` // when it ends or is paused
	CPUs       int64             `json:"cpuCount"`
	MemoryMB   int64             `json:"memoryMB"`   // mebibytes
	DiskMB     int64             `json:"diskSizeMB"` // mebibytes
	Metadata   map[string]string `json:"metadata"`   // chosen by its creator
}

// SandboxService manages sandboxes with a project key or as a person.
type SandboxService struct{ c *Client }

// List returns the sandboxes that run or are paused.
func (s *SandboxService) List(ctx context.Context) iter.Seq2[Sandbox, error] {
	return all(ctx, func(ctx context.Context, token string) (page []Sandbox, next string, err error) {
		v := url.Values{}
		if token != "" {
			v.Set("nextToken", token)
		}
		resp, err := s.c.open(ctx, request{method: http.MethodGet, path: []string{"v2", "sandboxes"}, query: v})
		if err != nil {
			return nil, "", err
		}
		err = decode(resp, &page)
		return page, resp.Header.Get("X-Next-Token"), err
	})
}

// Get returns one sandbox.
func (s *SandboxService) Get(ctx context.Context, id string) (Sandbox, error) {
	return get[Sandbox](ctx, s.c, nil, "sandboxes", id)
}

// Pause freezes a sandbox to disk.
func (s *SandboxService) Pause(ctx context.Context, id string) error {
	return s.c.act(ctx, nil, "sandboxes", id, "pause")
}

// Resume lets a paused sandbox run for some time; 0 means the server's default.
func (s *SandboxService) Resume(ctx context.Context, id string, timeout time.Duration) (Sandbox, error) {
	var in any
	if timeout > 0 {
		in = map[string]int64{"timeout": int64(timeout / time.Second)}
	}
	return post[Sandbox](ctx, s.c, in, "sandboxes", id, "connect")
}

// Kill ends a sandbox. Everything in it is lost.
func (s *SandboxService) Kill(ctx context.Context, id string) error {
	return s.c.remove(ctx, "sandboxes", id)
}

// Commands returns the record of the programs that were started in a sandbox, with at most
// most of the newest commands: 0 means 100, and the limit is 1000. The record is kept for
// some days after the sandbox has ended.
func (s *SandboxService) Commands(ctx context.Context, id string, most int) (SandboxCommands, error) {
	v := url.Values{}
	if most > 0 {
		v.Set("limit", strconv.Itoa(most))
	}
	return get[SandboxCommands](ctx, s.c, v, "v1", "sandboxes", id, "commands")
}

// Trace returns how long the steps of the newest operation on a sandbox took. The
// server keeps the newest 64 operations, in memory.
func (s *SandboxService) Trace(ctx context.Context, id string) (Trace, error) {
	return get[Trace](ctx, s.c, nil, "v1", "sandboxes", id, "trace")
}
