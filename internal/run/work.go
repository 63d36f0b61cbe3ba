package run

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// principal is an authenticated caller.
type principal = auth.Principal

// sweepTime is the interval at which leftovers of runs are removed.
const sweepTime = 30 * time.Second

// Run starts the runs that may start, and removes what they leave behind, until ctx is
// done. On a server without sandboxes it does nothing until then.
func (s *Service) Run(ctx context.Context) error {
	if s.conf.Fleet == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, s.conf.Running)
	t := time.NewTicker(time.Second)
	defer t.Stop()
	swept := time.Time{}
	for {
		if time.Since(swept) > sweepTime {
			swept = time.Now()
			if err := s.sweep(ctx); err != nil && ctx.Err() == nil {
				s.log.ErrorContext(ctx, "remove what runs have left", "err", err)
			}
			if err := s.proveMissing(ctx); err != nil && ctx.Err() == nil {
				s.log.ErrorContext(ctx, "write reports of runs", "err", err)
			}
		}
		s.sampleSessions(ctx)
		if err := s.endSessions(ctx); err != nil && ctx.Err() == nil {
			s.log.ErrorContext(ctx, "end runs of SDKs", "err", err)
		}
		if err := s.removeKept(ctx); err != nil && ctx.Err() == nil {
			s.log.ErrorContext(ctx, "remove kept sandboxes of runs", "err", err)
		}
		for ctx.Err() == nil && len(slots) < cap(slots) {
			r, ok, err := s.claim(ctx)
			if err != nil && ctx.Err() == nil {
				s.log.ErrorContext(ctx, "claim run", "err", err)
			}
			if !ok {
				break
			}
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots; s.wake() }()
				s.perform(ctx, r)
			})
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.due:
		case <-t.C:
		}
	}
}

// claim takes the oldest run that may start. A proposer has at most half of the places.
// The attack: an agent's runs keep all others waiting.
func (s *Service) claim(ctx context.Context) (r Run, ok bool, err error) {
	var waiting []Run
	err = s.db.Look(ctx, func(tx *store.Tx) error {
		waiting, err = store.List(ctx, tx, scanRun, `select `+columns+` from run w where state = $1 and begun_at = 0 and cancelled_by = ''
			and (select count(*) from run o where o.proposer = w.proposer and o.project_id = w.project_id and o.state in ($1, $2, $3) and o.begun_at > 0 and o.commands <> '[]') < $4
			order by created_at, id limit 1`, Starting, Running, Collecting, max(1, s.conf.Running/2))
		return err
	})
	if err != nil || len(waiting) == 0 {
		return Run{}, false, err
	}
	r = waiting[0]
	r.begun = time.Now()
	err = s.save(ctx, &r, Event{})
	if errors.Is(err, oversight.ErrStale) {
		return Run{}, false, nil
	}
	return r, err == nil, err
}

// Recover ends the runs that a former process has not finished: they are lost, and
// their sandboxes are removed. Nothing runs twice. It also binds the sandboxes of SDKs
// that are still alive. Call it once, after the fleet has found its sandboxes and
// before [Service.Run].
func (s *Service) Recover(ctx context.Context) error {
	if s.conf.Fleet == nil {
		return nil
	}
	var left []Run
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		left, err = store.List(ctx, tx, scanRun, `select `+columns+` from run where state in ($1, $2, $3) and begun_at > 0 and commands <> '[]' order by created_at, id`, Starting, Running, Collecting)
		return err
	})
	if err != nil {
		return fmt.Errorf("recover runs: %w", err)
	}
	for i := range left {
		if err := s.lose(ctx, left[i]); err != nil {
			return fmt.Errorf("recover run %s: %w", left[i].ID, err)
		}
	}
	return s.rebind(ctx)
}

// lose ends a run that a former process performed.
func (s *Service) lose(ctx context.Context, r Run) error {
	boxes, err := s.boxesOf(ctx, &r)
	if err != nil {
		return err
	}
	ev := r.evidence
	ev.Complete = false
	for _, box := range boxes {
		gone, traces, err := s.remove(ctx, &r, box)
		if err != nil {
			return err
		}
		r.Sandbox, ev.Gone, ev.Teardown = box.ID, gone, append(ev.Teardown, traces...)
	}
	if len(boxes) == 0 && r.Sandbox != "" {
		ev.Gone = time.Now()
		ev.Teardown = s.conf.Fleet.Gone(ctx, sandbox.Info{ID: r.Sandbox, Project: r.Project, Template: r.template})
	}
	for i := range r.Results {
		if r.Results[i].Ended.IsZero() {
			r.Results[i].Reason = "the server stopped while it ran"
		}
	}
	r.evidence, r.Outcome, r.Reason, r.Ended = ev, Lost, "the server stopped while it ran", time.Now()
	if err := s.moved(ctx, &r, Ended, audit.RunEnd, r.Reason); err != nil {
		return err
	}
	s.forget(ctx, &r)
	if err := s.prove(ctx, r); err != nil {
		s.log.WarnContext(ctx, "report of a lost run", "run", r.ID, "err", err)
	}
	return nil
}

// boxesOf returns the living sandboxes of a run. There may be one that was not recorded
// in its row yet.
func (s *Service) boxesOf(ctx context.Context, r *Run) (out []sandbox.Info, err error) {
	list, err := s.conf.Fleet.List(ctx, r.itself(), false)
	if err != nil {
		return nil, err
	}
	for _, box := range list {
		// Anybody can set metadata: a sandbox without a contract is not a run's, whatever
		// it says.
		if box.Contract != "" && (box.ID == r.Sandbox || box.Metadata[metadataRun] == r.ID) {
			out = append(out, box)
		}
	}
	return out, nil
}

// removeKept removes kept sandboxes whose time is over.
func (s *Service) removeKept(ctx context.Context) error {
	var due []Run
	err := s.db.Look(ctx, func(tx *store.Tx) (err error) {
		due, err = store.List(ctx, tx, scanRun, `select `+columns+` from run where state = $1 and kept_until > 0 and kept_until <= $2 order by kept_until, id limit 20`, Ended, store.Time(time.Now()))
		return err
	})
	if err != nil {
		return err
	}
	for i := range due {
		r := due[i]
		boxes, err := s.boxesOf(ctx, &r)
		if err != nil {
			return err
		}
		box := sandbox.Info{ID: r.Sandbox, Project: r.Project, Template: r.template}
		if len(boxes) > 0 {
			box = boxes[0]
		}
		if r.evidence.Gone, r.evidence.Teardown, err = s.remove(ctx, &r, box); err != nil {
			return err
		}
		r.kept = time.Time{}
		if err := s.moved(ctx, &r, Ended, audit.RunRemove, "its kept sandbox is removed"); err != nil {
			return err
		}
		if err := s.prove(ctx, r); err != nil {
			s.log.WarnContext(ctx, "report of a run", "run", r.ID, "err", err)
		}
	}
	return nil
}

// sweep ends drafts that were not proposed in time, and removes the bytes of inputs
// that no run needs any more.
func (s *Service) sweep(ctx context.Context) error {
	var old []Run
	err := s.db.Look(ctx, func(tx *store.Tx) (err error) {
		old, err = store.List(ctx, tx, scanRun, `select `+columns+` from run where state = $1 and created_at < $2 limit 100`, Draft, store.Time(time.Now().Add(-draftTime)))
		return err
	})
	if err != nil {
		return err
	}
	for i := range old {
		r := old[i]
		r.Outcome, r.Reason, r.Ended = Cancelled, "it was never proposed", time.Now()
		if err := s.moved(ctx, &r, Ended, audit.RunEnd, r.Reason); err != nil && !errors.Is(err, oversight.ErrStale) {
			return err
		}
		s.forget(ctx, &r)
	}
	// A blob is stored before its row, so only blobs that are older than any draft can
	// be orphans.
	return s.kept.Old(time.Now().Add(-2*draftTime), func(ids []string) error {
		for _, id := range ids {
			var n int
			// The IDs are random, and occur only in the JSON of the inputs.
			err := s.db.Peek(ctx, `select count(*) from run where state not in ($1, $2) and inputs like $3`, []any{Ended, Refused, "%" + id + "%"}, &n)
			if err != nil {
				return err
			}
			if n == 0 {
				if err := s.kept.Delete(id); err != nil {
					return err
				}
			}
		}
		return nil
	})
}
