package run

import (
	"context"
	"fmt"
	"time"

	"postern/internal/store"
)

const (
	// unprovedAge is how long after a run's end its missing statement is written here.
	// Until then the server that performed the run writes it.
	unprovedAge = time.Minute
	// unprovedMost is how long after a run's end that is tried.
	unprovedMost = 7 * 24 * time.Hour
)

// proveMissing writes the missing reports and statements of runs that have ended, in
// case a server was killed before it wrote them, or could not write them.
func (s *Service) proveMissing(ctx context.Context) error {
	if s.conf.Prover == nil {
		return nil
	}
	now := time.Now()
	var left []Run
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		left, err = store.List(ctx, tx, scanRun, `select `+columns+` from run where state = $1 and begun_at > 0 and kept_until = 0 and ended_at > $2 and ended_at < $3
			and not exists (select 1 from run_report where run_report.run_id = run.id and run_report.statement <> '') order by ended_at, id limit 20`,
			Ended, store.Time(now.Add(-unprovedMost)), store.Time(now.Add(-unprovedAge)))
		return err
	})
	if err != nil {
		return fmt.Errorf("list runs without a statement: %w", err)
	}
	for i := range left {
		if err := s.prove(ctx, left[i]); err != nil {
			s.log.WarnContext(ctx, "write the report of a run", "run", left[i].ID, "err", err)
		}
	}
	return nil
}
