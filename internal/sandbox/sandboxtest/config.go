package sandboxtest

import (
	"context"
	"testing"

	"postern/internal/sandbox"
)

// Config returns settings of a fleet for a test: every template is there, and
// each sandbox boots from "/". The template "gone" is not there. Little of the
// disk must stay free: others fill it, too.
func Config(t testing.TB) sandbox.Config {
	return sandbox.Config{
		Key: make([]byte, 32), Dir: t.TempDir(), Cold: true, KeepFreeMB: 1,
		Base: func(_ context.Context, template string) (sandbox.Base, error) {
			if template == "gone" {
				return sandbox.Base{}, sandbox.ErrNotFound
			}
			return sandbox.Base{Rootfs: "/", Key: template}, nil
		},
	}
}
