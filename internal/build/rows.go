package build

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"strconv"
	"time"

	"postern/internal/audit"
	"postern/internal/store"
)

// readBuild returns a build of any project.
func (s *Service) readBuild(ctx context.Context, id string) (b Build, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		b, err = oneBuild(ctx, tx, id)
		return err
	})
	return b, err
}

// findRow returns the digest of a project's layer or image with a key, or "".
func (s *Service) findRow(ctx context.Context, project, key string) (digest string, err error) {
	err = s.db.Peek(ctx, `select digest from template_layer where project_id = $1 and key = $2 and server_id = $3`, []any{project, key, s.conf.Server}, &digest)
	if errors.Is(err, store.ErrNotFound) {
		return "", nil
	}
	return digest, err
}

// findLayer returns the layer of a project with a key. Its digest is empty if the step
// changed nothing.
func (s *Service) findLayer(ctx context.Context, project, key string) (digest string, ok bool, err error) {
	err = s.db.Peek(ctx, `select digest from template_layer where project_id = $1 and key = $2 and server_id = $3`, []any{project, key, s.conf.Server}, &digest)
	if errors.Is(err, store.ErrNotFound) {
		return "", false, nil
	}
	if err != nil {
		return "", false, err
	}
	if digest != "" {
		// Keep the sweep from removing the file now, and mark it as used.
		s.files.RLock()
		defer s.files.RUnlock()
		now := time.Now()
		if err := os.Chtimes(s.layerPath(digest), now, now); errors.Is(err, fs.ErrNotExist) {
			return "", false, nil // removed outside of Postern
		} else if err != nil {
			return "", false, err
		}
	}
	return digest, true, s.recordUse(ctx, project, key)
}

// recordUse notes that a layer was used.
func (s *Service) recordUse(ctx context.Context, project, key string) error {
	return s.db.UpdateIn(ctx, store.Thing(project, "layers"), func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update template_layer set used_at = $1 where project_id = $2 and key = $3 and server_id = $4`, store.Time(time.Now()), project, key, s.conf.Server)
		return err
	})
}

// recordLayer writes the row of a layer whose file has been published.
func (s *Service) recordLayer(ctx context.Context, project, key, digest string, size int64) error {
	return s.db.UpdateIn(ctx, store.Thing(project, "layers"), func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `insert into template_layer (project_id, key, server_id, digest, size, created_at, used_at) values ($1, $2, $3, $4, $5, $6, $6)
			on conflict (project_id, key, server_id) do update set digest = excluded.digest, size = excluded.size, used_at = excluded.used_at`,
			project, key, s.conf.Server, digest, size, store.Time(time.Now()))
		return err
	})
}

// recordImage records the published image of a build. From then on sandboxes can start
// from the build by its ID.
func (s *Service) recordImage(ctx context.Context, e *engine) error {
	result, err := json.Marshal(e.result)
	if err != nil {
		return err
	}
	b := e.j.b
	return s.db.UpdateIn(ctx, store.Thing(e.j.who.Project, b.ID), func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `update template_build set image = $1, parent = $2, result = $3 where id = $4 and state = $5`, b.Image, b.Parent, string(result), b.ID, Building)
		if err == nil && !ok {
			err = errCanceled
		}
		return err
	})
}

// recordReady records that a build is ready: its state, its tags and the audit entry.
func (s *Service) recordReady(ctx context.Context, e *engine) error {
	j := e.j
	return s.db.UpdateIn(ctx, store.Project(j.who.Project), func(tx *store.Tx) error {
		now := store.Time(time.Now())
		ok, err := tx.Changed(ctx, `update template_build set state = $1, ended_at = $2 where id = $3 and state = $4`, Ready, now, j.b.ID, Building)
		if err == nil && !ok {
			err = errCanceled
		}
		if err != nil {
			return err
		}
		fields := audit.Fields{
			"name": j.t.Names[0], "build": j.b.ID, "steps": strconv.Itoa(len(j.b.Definition.Steps)), "layers": strconv.Itoa(len(e.layers)),
			"image": j.b.Image, "from": j.b.Parent,
		}
		if err := audit.Append(ctx, tx, j.who, audit.TemplateBuild, j.t.ID, fields); err != nil {
			return err
		}
		if err := s.tag(ctx, tx, j.who, j.t.ID, j.b.ID, j.b.Tags); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `update template set updated_at = $1 where id = $2`, now, j.t.ID)
		return err
	})
}
