package e2bapi

import (
	"context"

	"postern/internal/auth"
	"postern/internal/sandbox"
)

// boxes is what the data plane needs of the fleet. It is safe for concurrent
// use.
type boxes interface {
	// Live returns the ids of the sandboxes whose guests can be asked.
	Live() []string
	// Traffic says who may reach the ports of a sandbox, also of one that is
	// paused. It is false for one that has ended.
	Traffic(id string) (sandbox.Traffic, bool)
	// Wake returns when the sandbox runs. Its errors wrap [sandbox.ErrNotFound],
	// [sandbox.ErrPaused] and [sandbox.ErrBusy].
	Wake(ctx context.Context, id string) error

	AccessToken(id string) auth.Secret
	TrafficToken(id string) auth.Secret
	ChannelKey(id string) auth.Secret
}

var _ boxes = (*sandbox.Fleet)(nil)
