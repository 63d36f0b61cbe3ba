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
	// paused. It is false for one that has ended, and cheap: it is asked for
	// each request.
	Traffic(id string) (traffic, bool)
	// Wake returns when the sandbox runs. Its errors wrap [sandbox.ErrNotFound],
	// [sandbox.ErrPaused] and [sandbox.ErrBusy].
	Wake(ctx context.Context, id string) error

	AccessToken(id string) auth.Secret
	TrafficToken(id string) auth.Secret
	ChannelKey(id string) auth.Secret
}

// traffic is who may reach the ports of a sandbox, and how.
type traffic struct {
	Public     bool     // without a token, if the operator allows it too
	MaskHost   string   // what services inside see as Host; ${PORT} stands for the port; empty leaves it
	HTTPSPorts []uint16 // where the service inside speaks TLS
}

// fleetBoxes are the sandboxes of a fleet.
type fleetBoxes struct{ *sandbox.Fleet }

// Traffic implements boxes.
func (f fleetBoxes) Traffic(id string) (traffic, bool) {
	t, ok := f.Fleet.Traffic(id)
	return traffic(t), ok
}
