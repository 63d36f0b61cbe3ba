//go:build !amd64

package guest

import "errors"

// canHold says that shells can be held on this machine.
const canHold = false

func launcherImage() []byte { return nil }

func (h *heldShell) keep() {
	h.err = errors.ErrUnsupported
	close(h.started)
}
