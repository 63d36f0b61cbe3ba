package build

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"postern/internal/erofs"
	"postern/internal/store"
)

// clearWork removes the temporary files of an earlier process.
func (s *Service) clearWork() error {
	es, err := os.ReadDir(filepath.Join(s.conf.Dir, workDir))
	if err != nil {
		return fmt.Errorf("remove temporary files of builds: %w", err)
	}
	var errs []error
	for _, e := range es {
		if i, err := e.Info(); err == nil && i.ModTime().Before(s.born) {
			errs = append(errs, os.RemoveAll(filepath.Join(s.conf.Dir, workDir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// sweepEvery is the pause between two sweeps.
const sweepEvery = time.Hour

// runSweep calls Sweep from time to time until ctx ends.
func (s *Service) runSweep(ctx context.Context) {
	t := time.NewTicker(sweepEvery)
	defer t.Stop()
	for {
		if err := s.Sweep(ctx); err != nil && ctx.Err() == nil {
			s.log.WarnContext(ctx, "remove unused files of templates", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-s.sweeps:
		case <-t.C:
		}
	}
}

// sweepSoon makes the next sweep start now.
func (s *Service) sweepSoon() {
	select {
	case s.sweeps <- struct{}{}:
	default:
	}
}

// keepFailed is the number of failed builds of a template that are kept, with their logs.
const keepFailed = 20

// keepReady is the minimum time that a finished build without a tag is kept.
const keepReady = 10 * time.Minute

// Sweep removes unused builds and layers, and then files without a row.
func (s *Service) Sweep(ctx context.Context) error {
	if err := s.dropBuilds(ctx); err != nil {
		return fmt.Errorf("sweep builds: %w", err)
	}
	if err := s.dropLayers(ctx); err != nil {
		return fmt.Errorf("sweep layers: %w", err)
	}
	if err := s.dropFiles(ctx); err != nil {
		return fmt.Errorf("sweep files: %w", err)
	}
	if err := s.dropUploads(); err != nil {
		return fmt.Errorf("sweep uploads: %w", err)
	}
	if err := s.dropPulled(); err != nil {
		return fmt.Errorf("sweep images: %w", err)
	}
	return nil
}

// dropBuilds removes the rows of old builds: those that were never started, those that
// failed, and those without tags and sandboxes.
func (s *Service) dropBuilds(ctx context.Context) error {
	var all []Build
	tagged := map[string]bool{}
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		ids, err := tx.Strings(ctx, `select build_id from template_tag`)
		if err != nil {
			return err
		}
		for _, id := range ids {
			tagged[id] = true
		}
		all, err = store.List(ctx, tx, scanBuild, `select `+buildColumns+` from template_build where server_id = $1 and state <> $2 order by created_at desc`, s.conf.Server, Building)
		return err
	})
	if err != nil {
		return err
	}
	failed, finished := map[string]int{}, map[string]int{}
	for _, b := range all {
		switch b.State {
		case Waiting:
			if time.Since(b.Created) < 24*time.Hour {
				continue
			}
		case Failed:
			if failed[b.Template]++; failed[b.Template] <= keepFailed {
				continue
			}
		case Ready:
			// Its client may still read the log.
			if tagged[b.ID] || time.Since(b.Ended) < keepReady {
				continue
			}
			if finished[b.Template]++; finished[b.Template] <= s.conf.MaxBuilds {
				continue
			}
		case Building:
			continue
		}
		if err := s.dropBuild(ctx, b); err != nil && !errors.Is(err, ErrBusy) {
			return err
		}
	}
	return nil
}

// dropBuild removes the rows of one build, unless it is in use by now.
func (s *Service) dropBuild(ctx context.Context, b Build) error {
	err := s.db.Update(ctx, func(tx *store.Tx) error {
		if err := unused(ctx, tx, b.ID); err != nil {
			return err
		}
		var tags int
		if err := tx.One(ctx, `select count(*) from template_tag where build_id = $1`, []any{b.ID}, &tags); err != nil {
			return err
		}
		if tags > 0 {
			return ErrBusy
		}
		return deleteBuild(ctx, tx, b)
	})
	if err == nil && b.State == Ready {
		err = s.machine.ForgetTemplate(ctx, SandboxID(b.ID))
	}
	return err
}

// dropLayers removes the rows of layers that have not been used for a while and belong to
// no finished build.
func (s *Service) dropLayers(ctx context.Context) error {
	return s.db.Update(ctx, func(tx *store.Tx) error {
		before := store.Time(time.Now().Add(-s.conf.KeepUnused))
		var old int
		if err := tx.One(ctx, `select count(*) from template_layer where used_at < $1 and server_id = $2`, []any{before, s.conf.Server}, &old); err != nil || old == 0 {
			return err
		}
		kept, err := layersInUse(ctx, tx)
		if err != nil {
			return err
		}
		type row struct{ project, key, digest string }
		rows, err := store.List(ctx, tx, func(scan func(...any) error) (r row, err error) {
			err = scan(&r.project, &r.key, &r.digest)
			return r, err
		}, `select project_id, key, digest from template_layer where used_at < $1 and server_id = $2`, before, s.conf.Server)
		if err != nil {
			return err
		}
		for _, r := range rows {
			if kept[r.digest] {
				continue
			}
			if _, err := tx.ExecContext(ctx, `delete from template_layer where project_id = $1 and key = $2 and server_id = $3`, r.project, r.key, s.conf.Server); err != nil {
				return err
			}
		}
		return nil
	})
}

// makeRoom returns an error that wraps [ErrFull] unless the project may store size more
// bytes of images and layers. If needed, it first removes layers that belong to no finished
// build, the least recently used first. The attack: one project fills the disk of all.
func (s *Service) makeRoom(ctx context.Context, project string, size int64) error {
	return s.db.UpdateIn(ctx, store.Thing(project, "layers"), func(tx *store.Tx) error {
		builds, err := store.List(ctx, tx, scanBuild, `select `+buildColumns+` from template_build where project_id = $1 and server_id = $2 and image <> ''`, project, s.conf.Server)
		if err != nil {
			return err
		}
		total := size
		images, kept := map[string]bool{}, map[string]bool{}
		for _, b := range builds {
			if !images[b.Image] {
				images[b.Image] = true
				total += b.Result.Bytes
			}
			for _, l := range b.Result.Layers {
				kept[l] = true
			}
		}
		type row struct {
			key, digest string
			size        int64
		}
		rows, err := store.List(ctx, tx, func(scan func(...any) error) (r row, err error) {
			err = scan(&r.key, &r.digest, &r.size)
			return r, err
		}, `select key, digest, size from template_layer where project_id = $1 and server_id = $2 and size > 0 order by used_at`, project, s.conf.Server)
		if err != nil {
			return err
		}
		for _, r := range rows {
			total += r.size // twice if two keys share a layer, which is rare
		}
		limit := s.conf.MaxProjectMB << 20
		// A running build has used its layers within the longest time of a build.
		recent := store.Time(time.Now().Add(-s.conf.BuildTime))
		for _, r := range rows {
			if total <= limit {
				return nil
			}
			if kept[r.digest] {
				continue
			}
			gone, err := tx.Changed(ctx, `delete from template_layer where project_id = $1 and key = $2 and server_id = $3 and used_at < $4`, project, r.key, s.conf.Server, recent)
			if err != nil {
				return err
			}
			if gone {
				total -= r.size
			}
		}
		if total > limit {
			return fmt.Errorf("%w: the project's templates would use %d MiB of the allowed %d: delete some of them", ErrFull, total>>20, s.conf.MaxProjectMB)
		}
		return nil
	})
}

// layersInUse returns the digests of the layers of finished builds.
func layersInUse(ctx context.Context, tx *store.Tx) (map[string]bool, error) {
	results, err := tx.Strings(ctx, `select result from template_build where state = $1`, Ready)
	if err != nil {
		return nil, err
	}
	kept := map[string]bool{}
	for _, text := range results {
		var r Result
		if err := parseJSON(text, &r); err != nil {
			return nil, err
		}
		for _, l := range r.Layers {
			kept[l] = true
		}
	}
	return kept, nil
}

// dropFiles removes layers and images that no row names.
func (s *Service) dropFiles(ctx context.Context) error {
	s.files.Lock() // a file may have been published whose row is not written yet
	defer s.files.Unlock()
	var layers, images []string
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		if layers, err = tx.Strings(ctx, `select digest from template_layer where server_id = $1 and digest <> '' and key not like 'image %'`, s.conf.Server); err != nil {
			return err
		}
		images, err = tx.Strings(ctx, `select image from template_build where server_id = $1 and image <> ''`, s.conf.Server)
		return err
	})
	if err != nil {
		return err
	}
	for _, image := range slices.Clip(images) {
		// Without the parts of an image, neither it nor what is paused in it can start.
		parts, err := erofs.Parts(s.imagePath(image))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, p := range parts {
			images = append(images, p.String())
		}
	}
	return errors.Join(keepOnly(filepath.Join(s.conf.Dir, layersDir), layers, ".tar"), keepOnly(filepath.Join(s.conf.Dir, imagesDir), images, ".erofs"))
}

// keepOnly removes the files of a directory that names does not list.
func keepOnly(dir string, names []string, suffix string) error {
	kept := map[string]bool{}
	for _, n := range names {
		kept[n+suffix] = true
	}
	es, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range es {
		if !kept[e.Name()] {
			errs = append(errs, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// dropOld removes the files of a directory that were last used before a time.
func dropOld(dir string, before time.Time) error {
	es, err := os.ReadDir(dir)
	if err != nil {
		return ignoreMissing(err)
	}
	var errs []error
	for _, e := range es {
		if i, err := e.Info(); err == nil && !i.IsDir() && i.ModTime().Before(before) {
			errs = append(errs, ignoreMissing(os.Remove(filepath.Join(dir, e.Name()))))
		}
	}
	return errors.Join(errs...)
}

// dropUploads removes archives that have not been used for a while.
func (s *Service) dropUploads() error {
	s.files.Lock()
	defer s.files.Unlock()
	dir := filepath.Join(s.conf.Dir, uploadsDir)
	es, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	before := time.Now().Add(-max(s.conf.KeepUnused, 24*time.Hour))
	var errs []error
	for _, e := range es {
		project := filepath.Join(dir, e.Name())
		errs = append(errs, dropOld(project, before))
		_ = os.Remove(project) // if it is empty now
	}
	return errors.Join(errs...)
}

// A pruner is a [Puller] that stores the layers that it pulls.
type pruner interface {
	// Prune removes the layers for which keep returns false, and returns their IDs.
	Prune(keep func(diffID string) bool) ([]string, error)
}

// dropPulled removes pulled images that have not been used for a while, and their layers.
func (s *Service) dropPulled() error {
	dir := filepath.Join(s.conf.Dir, fromDir)
	s.files.Lock()
	defer s.files.Unlock()
	// A build that began an hour ago may still use one.
	if err := dropOld(dir, time.Now().Add(-max(s.conf.KeepUnused, s.conf.BuildTime+time.Hour))); err != nil {
		return err
	}
	p, ok := s.images.(pruner)
	if !ok {
		return nil
	}
	es, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	kept := map[string]bool{}
	for _, e := range es {
		name, ok := strings.CutSuffix(e.Name(), layersSuffix)
		if !ok {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, name+".erofs")); err != nil {
			_ = os.Remove(filepath.Join(dir, e.Name()))
			continue
		}
		var ids []string
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err == nil {
			err = json.Unmarshal(text, &ids)
		}
		if err != nil {
			continue
		}
		for _, id := range ids {
			kept[id] = true
		}
	}
	_, err = p.Prune(func(diffID string) bool { return kept[diffID] })
	return err
}

// layersSuffix ends the name of the file beside a pulled image that lists its layers.
const layersSuffix = ".layers.json"
