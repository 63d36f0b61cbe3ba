package e2bapi

import (
	"context"

	"postern/internal/auth"
	"postern/internal/sandbox"
)

// liveSandboxes is the part of the fleet that the data plane needs. It is safe for
// concurrent use.
type liveSandboxes interface {
	// Live returns the IDs of the sandboxes that can be dialled.
	Live() []string
	// Traffic says who may reach the ports of a sandbox, also of a paused one. It
	// returns false for a sandbox that has ended.
	Traffic(id string) (sandbox.Traffic, bool)
	// Wake returns when the sandbox runs. Its error wraps [sandbox.ErrNotFound],
	// [sandbox.ErrPaused] or [sandbox.ErrBusy].
	Wake(ctx context.Context, id string) error

	AccessToken(id string) auth.Secret
	TrafficToken(id string) auth.Secret
	ChannelKey(id string) auth.Secret
}

var _ liveSandboxes = (*sandbox.Fleet)(nil)
