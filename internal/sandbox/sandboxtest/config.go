package sandboxtest

import (
	"context"
	"testing"

	"postern/internal/sandbox"
)

// Config returns settings of a fleet for a test. Every template exists except
// "gone", and each sandbox boots from "/". KeepFreeMB is small, since other tests
// fill the disk, too.
func Config(t testing.TB) sandbox.Config {
	return sandbox.Config{
		Key: make([]byte, 32), Dir: t.TempDir(), Cold: true, KeepFreeMB: 1,
		Base: func(_ context.Context, template string) (sandbox.Base, error) {
			if template == "gone" {
				return sandbox.Base{}, sandbox.ErrNoTemplate
			}
			return sandbox.Base{Rootfs: "/", Key: template}, nil
		},
	}
}
