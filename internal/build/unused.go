package build

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// An Unused is a finished build that nothing needs: no tag names it, and no sandbox or
// snapshot was made from it.
type Unused struct {
	Build

	Name string // of its template
}

// Unused returns the unused builds of who's project, newest first. A build that has just
// ended is left out: whoever made it may be about to give it a tag.
func (s *Service) Unused(ctx context.Context, who auth.Principal) (out []Unused, err error) {
	if err := mayRead(who); err != nil {
		return nil, err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		builds, err := store.List(ctx, tx, scanBuild, `select `+buildColumns+` from template_build where project_id = $1 and server_id = $2 and state = $3 and ended_at < $4
			and not exists (select 1 from template_tag where build_id = template_build.id) order by created_at desc, id desc`, who.Project, s.conf.Server, Ready, store.Time(time.Now().Add(-keepReady)))
		if err != nil {
			return err
		}
		names := map[string]string{}
		for _, b := range builds {
			if err := unused(ctx, tx, b.ID); errors.Is(err, ErrBusy) {
				continue
			} else if err != nil {
				return err
			}
			if names[b.Template] == "" {
				t, err := oneTemplate(ctx, tx, `where t.id = $1`, b.Template)
				if err != nil {
					return err
				}
				names[b.Template] = t.Names[0]
			}
			out = append(out, Unused{b, names[b.Template]})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list unused builds: %w", err)
	}
	return out, nil
}

// DeleteBuild removes a finished build of a template of who's project. Its error wraps
// [ErrBusy] if a tag names it or if a sandbox, also a paused one, or a snapshot needs it, and
// [ErrNoBuild] if the project has no finished build with that ID. Files that no other build
// needs go with the next sweep, which begins at once.
func (s *Service) DeleteBuild(ctx context.Context, who auth.Principal, id string) error {
	if err := mayManage(who); err != nil {
		return err
	}
	// Sandboxes are inserted in turns of their own: one that is created at this moment is
	// either seen, or finds no build.
	err := s.db.Update(ctx, func(tx *store.Tx) error {
		b, err := oneBuild(ctx, tx, id)
		if err == nil && (b.project != who.Project || b.State != Ready) {
			err = ErrNoBuild
		}
		if err != nil {
			return err
		}
		if err := unused(ctx, tx, b.ID); err != nil {
			return err
		}
		tagged, err := tx.Strings(ctx, `select tag from template_tag where build_id = $1 limit 1`, b.ID)
		if err != nil {
			return err
		}
		if len(tagged) > 0 {
			return fmt.Errorf("%w: the tag %s names this build: give the tag to another build, or remove it", ErrBusy, tagged[0])
		}
		t, err := oneTemplate(ctx, tx, `where t.id = $1`, b.Template)
		if err != nil {
			return err
		}
		fields := audit.Fields{"name": t.Names[0], "build": b.ID, "bytes": strconv.FormatInt(b.Result.Bytes, 10)}
		if err := audit.Append(ctx, tx, who, audit.TemplateBuildDelete, t.ID, fields); err != nil {
			return err
		}
		return deleteBuild(ctx, tx, b)
	})
	if err != nil {
		return fmt.Errorf("delete build: %w", err)
	}
	if err := s.machine.ForgetTemplate(ctx, SandboxID(id)); err != nil {
		s.log.WarnContext(ctx, "remove snapshot of a deleted build", "build", id, "err", err)
	}
	s.sweepSoon()
	return nil
}

// deleteBuild removes the rows of a build, unless its state has changed.
func deleteBuild(ctx context.Context, tx *store.Tx, b Build) error {
	if _, err := tx.ExecContext(ctx, `delete from template_log where build_id = $1 and exists (select 1 from template_build where id = $1 and state = $2)`, b.ID, b.State); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `delete from template_build where id = $1 and state = $2`, b.ID, b.State)
	return err
}
