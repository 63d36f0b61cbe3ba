package console_test

import (
	"context"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/build"
)

// unusedBuilds are builds that nothing needs. The rules of which these are belong to package
// build, which has its own tests.
type unusedBuilds struct {
	mu     sync.Mutex
	owner  string // project
	builds []build.Unused
	busy   bool // something needs all of them by now
}

func (u *unusedBuilds) Unused(_ context.Context, who auth.Principal) ([]build.Unused, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if who.Project != u.owner {
		return nil, nil
	}
	return slices.Clone(u.builds), nil
}

func (u *unusedBuilds) DeleteBuild(_ context.Context, who auth.Principal, id string) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	i := slices.IndexFunc(u.builds, func(b build.Unused) bool { return b.ID == id })
	switch {
	case !who.Manages():
		return auth.ErrForbidden
	case i < 0 || who.Project != u.owner:
		return build.ErrNoBuild
	case u.busy:
		return build.ErrBusy
	}
	u.builds = slices.Delete(u.builds, i, i+1)
	return nil
}

// heap gives the project of f unused builds.
func (f *fixture) heap(n int) (ids []string) {
	f.builds.owner = f.project.Project
	for i := range n {
		id := "00000000-0000-4000-8000-" + strings.Repeat(string(rune('a'+i%6)), 12)
		ids = append(ids, id)
		f.builds.builds = append(f.builds.builds, build.Unused{Build: build.Build{ID: id, Ended: time.Now().Add(-time.Hour), Result: build.Result{Bytes: 188_000_000}}, Name: strange})
	}
	return ids
}

// TestUnusedBuilds: an owner deletes what nothing needs, after a question, and nobody else does.
func TestUnusedBuilds(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "none", f.get("/console/disk").body, "No build is unused")
	ids := f.heap(2)
	page := f.get("/console/disk").body
	contains(t, "disk", page, ids[0], "376 MB in all", "188 MB", "Delete the build", "cannot be brought back")
	del := func(id string) answer { return f.submit("/console/disk/builds/"+id+"/delete", url.Values{}) }
	f.builds.busy = true
	if got := del(ids[0]); got.status != 409 || !strings.Contains(got.body, "Nothing was deleted") {
		t.Errorf("a build that is needed by now: %d", got.status)
	}
	f.builds.busy = false
	for _, id := range []string{"x", "..%2f..", strings.Repeat("0", 36)} {
		if got := del(id); got.status != 404 {
			t.Errorf("build %q: %d, want 404", id, got.status)
		}
	}
	if got := del(ids[0]); got.status != 303 || got.location != "/console/disk#s-builds" {
		t.Errorf("delete: %d to %s", got.status, got.location)
	}
	if page := f.get("/console/disk").body; strings.Contains(page, ids[0]) || !strings.Contains(page, ids[1]) {
		t.Error("not the one that was named is gone")
	}
	f.exec(`update person set role = 'reviewer' where name = 'ann'`)
	if page := f.get("/console/disk").body; strings.Contains(page, "Delete the build") {
		t.Error("a reviewer is offered to delete a build")
	}
	if got := del(ids[1]); got.status != 403 {
		t.Errorf("a reviewer deletes a build: %d, want 403", got.status)
	}
	f.stranger()
	if got := del(ids[1]); got.status != 404 {
		t.Errorf("an owner of another project deletes a build: %d, want 404", got.status)
	}
}
