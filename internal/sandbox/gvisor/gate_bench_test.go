package gvisor

import (
	"testing"

	"postern/internal/sandbox"
)

// BenchmarkExec starts 200 programs, one after the other, from one shell. Compare its cases
// with each other to see what a watcher and its reports cost.
func BenchmarkExec(b *testing.B) {
	const script = "i=0; while [ $i -lt 200 ]; do /bin/true; i=$((i+1)); done"
	dir, image := shellRoot(b)
	for name, bc := range map[string]struct {
		w sandbox.Watcher
		o sandbox.Observed
	}{
		"no judge": {}, "judge": {w: newJudge(b)}, "opens": {newJudge(b), sandbox.Observed{Opens: true}}, "digests": {newJudge(b), sandbox.Observed{Digests: true}},
	} {
		b.Run(name, func(b *testing.B) {
			r := newRuntime(b, b.TempDir())
			s, h := start(b, r, func(s *sandbox.Spec) { s.Rootfs, s.Image, s.Watch = dir, image, bc.w })
			if bc.o != (sandbox.Observed{}) {
				if err := r.Observe(b.Context(), s.ID, bc.o); err != nil {
					b.Fatal(err)
				}
			}
			h.sh(b, 1000, script)
			for b.Loop() {
				if got := h.sh(b, 1000, script); got != "" {
					b.Fatal(got)
				}
			}
		})
	}
}
