package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"sync"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/store"
)

// Builds are the builds of projects' templates. It is safe for concurrent use.
type Builds interface {
	// Unused returns the finished builds of who's project that nothing needs, newest first.
	Unused(ctx context.Context, who auth.Principal) ([]build.Unused, error)
	// DeleteBuild removes a build, with an entry in the record. Its error wraps
	// [build.ErrBusy] if something needs the build by now, and [build.ErrNoBuild] if the
	// build is not of who's project or is gone.
	DeleteBuild(ctx context.Context, who auth.Principal, id string) error
}

// maxUnusedRows bounds the list of unused builds.
const maxUnusedRows = 100

// unusedBuilds fills in the unused builds of a project.
func (s diskHandlers) unusedBuilds(ctx context.Context, who auth.Principal, v *diskPage) (err error) {
	if s.conf.Builds == nil {
		return nil
	}
	if v.Builds, err = s.conf.Builds.Unused(ctx, who); err != nil {
		return err
	}
	for i := range v.Builds {
		v.UnusedBytes += v.Builds[i].Result.Bytes
	}
	v.MoreBuilds = max(0, len(v.Builds)-maxUnusedRows)
	v.Builds = v.Builds[:len(v.Builds)-v.MoreBuilds]
	return nil
}

var buildID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[0-9a-f-]{36}$`) })

// deleteBuild removes a build that nothing needs.
func (s diskHandlers) deleteBuild(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id := r.PathValue("id")
	if s.conf.Builds == nil || !buildID().MatchString(id) {
		return fmt.Errorf("build %q: %w", id, store.ErrNotFound)
	}
	err := s.conf.Builds.DeleteBuild(r.Context(), who, id)
	switch {
	case errors.Is(err, build.ErrBusy):
		return s.showDisk(w, r, who, http.StatusConflict, "Nothing was deleted: "+err.Error()+".")
	case errors.Is(err, build.ErrNoBuild):
		return fmt.Errorf("build %q: %w", id, store.ErrNotFound)
	case err != nil:
		return err
	}
	http.Redirect(w, r, "/console/disk#s-builds", http.StatusSeeOther)
	return nil
}
