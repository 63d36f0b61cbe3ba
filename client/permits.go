package client

import (
	"context"
	"net/url"

	"postern/internal/api"
)

// PermitService manages what people have allowed sandboxes for a time.
type PermitService struct{ c *Client }

// A PermitQuery selects permits. Its zero value selects those that hold.
type PermitQuery struct {
	Sandbox string // id: those that hold for it
	Kind    string // PermitNetwork, PermitSecret, PermitConnection or PermitRequest
	All     bool   // also those that have ended
	Limit   int    // at most 500; 0 means 100
}

// List returns permits, newest first.
func (s *PermitService) List(ctx context.Context, q PermitQuery) ([]Permit, error) {
	v := url.Values{}
	if l := (PageQuery{Limit: q.Limit}).values(); l != nil {
		v = l
	}
	for name, value := range map[string]string{"sandbox": q.Sandbox, "kind": q.Kind} {
		if value != "" {
			v.Set(name, value)
		}
	}
	if q.All {
		v.Set("all", "true")
	}
	l, err := get[api.PermitList](ctx, s.c, v, "v1", "permits")
	return l.Permits, err
}

// Get returns one permit.
func (s *PermitService) Get(ctx context.Context, id string) (Permit, error) {
	return get[Permit](ctx, s.c, nil, "v1", "permits", id)
}

// End ends a permit now.
func (s *PermitService) End(ctx context.Context, id string) error {
	return s.c.remove(ctx, "v1", "permits", id)
}

// Narrow replaces the proposal of a waiting action for a network permit by one that
// asks for less.
func (s *PermitService) Narrow(ctx context.Context, id string, in NarrowedProposal) (Action, error) {
	return post[Action](ctx, s.c, in, "v1", "actions", id, "narrowing")
}
