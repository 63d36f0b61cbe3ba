package sandbox_test

import (
	"path"
	"strings"
	"testing"

	"postern/internal/sandbox"
)

// FuzzListing: whatever a guest answers, each parsed path is absolute, clean and unique,
// and there are at most as many files as allowed.
func FuzzListing(f *testing.F) {
	for _, s := range []string{
		`{"files":[{"path":"L3dvcmsvYQ==","size":3,"modified":"2026-01-02T03:04:05Z"}]}`,
		`{"files":[{"path":"L3dvcmsvLi4vZXRj","size":3}]}`, `{"files":[{"path":"L2EAYg==","size":1}]}`, `{"files":[{"path":"L2E=","size":-1}]}`,
		`{"files":[{"path":"L2E="},{"path":"L2E="}]}`, `{"files":null}`, `[]`, ``, `{"files":[{"path":"//8=","size":1}]}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		files, err := sandbox.ParseListing(b, 3)
		if err != nil {
			return
		}
		seen := map[string]bool{}
		for _, e := range files {
			if seen[e.Path] || !path.IsAbs(e.Path) || path.Clean(e.Path) != e.Path || strings.ContainsRune(e.Path, 0) || e.Size < 0 {
				t.Errorf("%+v", e)
			}
			seen[e.Path] = true
		}
		if len(files) > 3 {
			t.Errorf("%d files", len(files))
		}
	})
}
