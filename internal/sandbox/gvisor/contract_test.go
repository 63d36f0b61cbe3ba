package gvisor

import (
	"path/filepath"
	"strings"
	"testing"

	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
)

func TestContract(t *testing.T) {
	needRoot(t)
	// Longer than the address of a socket may be.
	dir := filepath.Join(t.TempDir(), strings.Repeat("long/", 30))
	sandboxtest.Run(t,
		func(t *testing.T) sandbox.Runtime { return newRuntime(t, dir) },
		func(t *testing.T, id string) sandbox.Spec {
			_, link := newLink(t)
			s := specWith(t, link)
			s.ID = id
			return s
		})
}
