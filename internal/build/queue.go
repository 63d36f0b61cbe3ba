package build

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// Why builds end. The first two texts are E2B's.
var (
	errCanceled = errors.New("build was cancelled")
	errTimeout  = errors.New("build timed out")
	errReplaced = errors.New("build was cancelled: a newer build of the template was started")
	errStopped  = errors.New("the server stopped; build again: the new build continues after the last step that succeeded")
)

// A job is a build in the queue or in an engine.
type job struct {
	who     auth.Principal
	t       Template
	b       Build
	journal *journal
	begin   time.Time // when it left the queue

	ctx    context.Context //nolint:containedctx // of this build, which outlives the request that started it
	cancel context.CancelCauseFunc
	runs   bool // guarded by Service.mu
}

func newJob(s *Service, who auth.Principal, t Template, b Build) *job {
	ctx, cancel := context.WithCancelCause(context.Background())
	return &job{who: who, t: t, b: b, journal: newJournal(s, b, b.Definition.Credentials), ctx: ctx, cancel: cancel}
}

// mayQueue returns an error if too many builds of who's project wait.
func (s *Service) mayQueue(who auth.Principal) error {
	if s.conf.Off {
		return fmt.Errorf("%w: this server runs no sandboxes, so it builds no templates: ask the one that does", ErrInvalid)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("%w: the server is stopping", ErrBusy)
	}
	n := 0
	for _, j := range s.queue {
		if j.who.Project == who.Project {
			n++
		}
	}
	if n >= s.conf.Queue {
		return fmt.Errorf("%w: %d builds of the project are waiting: start this one when some have ended", ErrFull, n)
	}
	return nil
}

// enqueue puts a build in the queue.
func (s *Service) enqueue(ctx context.Context, j *job) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.finish(ctx, j, errStopped)
		return fmt.Errorf("%w: the server is stopping", ErrBusy)
	}
	s.queue = append(s.queue, j)
	s.jobs[j.b.ID] = j
	s.mu.Unlock()
	s.poke()
	return nil
}

// poke wakes Run, which checks the queue.
func (s *Service) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// cancel ends a build if it runs or is in the queue.
func (s *Service) cancel(build string, why error) {
	s.mu.Lock()
	j := s.jobs[build]
	s.mu.Unlock()
	if j != nil {
		j.cancel(why)
		s.poke()
	}
}

// flush writes the pending log lines of a running build to the database.
func (s *Service) flush(ctx context.Context, build string) error {
	s.mu.Lock()
	j := s.jobs[build]
	s.mu.Unlock()
	if j == nil {
		return nil
	}
	return j.journal.flush(ctx)
}

// Run runs the builds in the queue until ctx ends, and sweeps unused files from time to
// time. It starts with [Service.Recover]. Builds that run when ctx ends have failed.
func (s *Service) Run(ctx context.Context) error {
	if err := s.Recover(ctx); err != nil {
		return err
	}
	var running sync.WaitGroup
	running.Go(func() { s.runSweep(ctx) })
	for ctx.Err() == nil {
		for _, j := range s.take() {
			running.Go(func() { s.run(j) }) //nolint:contextcheck // a build has a context of its own, which enqueue made
		}
		select {
		case <-ctx.Done():
		case <-s.wake:
		}
	}
	s.mu.Lock()
	s.closed = true
	left := s.queue
	s.queue = nil
	for _, j := range s.jobs {
		j.cancel(errStopped)
	}
	s.mu.Unlock()
	for _, j := range left {
		s.finish(context.WithoutCancel(ctx), j, errStopped)
	}
	running.Wait()
	return ctx.Err()
}

// take removes and returns the builds in the queue that may run now, and the canceled ones.
func (s *Service) take() (out []*job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, project := 0, map[string]int{}
	for _, j := range s.jobs {
		if j.runs {
			all++
			project[j.who.Project]++
		}
	}
	s.queue = slices.DeleteFunc(s.queue, func(j *job) bool {
		p := j.who.Project
		if j.ctx.Err() == nil && (all >= s.conf.Builds || project[p] >= s.conf.BuildsPerProject) {
			return false
		}
		all++
		project[p]++
		j.runs = true
		out = append(out, j)
		return true
	})
	return out
}

// run runs one build to its end.
func (s *Service) run(j *job) {
	ctx, cancel := context.WithTimeoutCause(j.ctx, s.conf.BuildTime, errTimeout)
	defer cancel()
	logging, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	go j.journal.run(logging)
	j.begin = time.Now()
	j.journal.add("info", "", fmt.Sprintf("Building template %s/%s", j.t.ID, j.b.ID))
	err := ctx.Err()
	if err == nil {
		err = s.build(ctx, j)
	}
	if why := context.Cause(ctx); err != nil && why != nil {
		if se, ok := errors.AsType[*stepError](err); ok {
			why = &stepError{step: se.step, err: why}
		}
		err = why
	}
	s.finish(context.WithoutCancel(ctx), j, err)
}

// A stepError is the failure of one phase of a build.
type stepError struct {
	step string // as in Entry
	err  error
}

func (e *stepError) Error() string { return e.err.Error() }
func (e *stepError) Unwrap() error { return e.err }

// finish records how a build ended and removes its job. If err is nil, the engine has
// already recorded the build as ready.
func (s *Service) finish(ctx context.Context, j *job, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	defer func() {
		s.mu.Lock()
		delete(s.jobs, j.b.ID)
		s.mu.Unlock()
		j.cancel(nil)
		s.poke()
		s.sweepSoon()
	}()
	if err == nil {
		if err := j.journal.flush(ctx); err != nil {
			s.log.WarnContext(ctx, "a build's last lines are lost", "build", j.b.ID, "err", err)
		}
		return
	}
	f := Failure{Message: j.journal.scrub(err.Error(), 4<<10)}
	if se, ok := errors.AsType[*stepError](err); ok {
		f.Step = se.step
		f.Entries = j.journal.tail(se.step)
	}
	j.journal.add("error", f.Step, "Build failed: "+f.Message)
	// The state is written last: a client stops reading the log when the build has ended.
	if err := j.journal.flush(ctx); err != nil {
		s.log.WarnContext(ctx, "a build's last lines are lost", "build", j.b.ID, "err", err)
	}
	rerr := s.db.UpdateIn(ctx, store.Thing(j.who.Project, j.b.ID), func(tx *store.Tx) error {
		if err := audit.Append(ctx, tx, j.who, audit.TemplateBuildFailed, j.t.ID, audit.Fields{"build": j.b.ID, "name": j.t.Names[0], "step": f.Step}); err != nil {
			return err
		}
		return fail(ctx, tx, j.b.ID, Building, f)
	})
	if rerr != nil {
		s.log.ErrorContext(ctx, "record the failure of a build; the next start of the server does it", "build", j.b.ID, "err", rerr)
	}
	s.log.InfoContext(ctx, "build failed", "template", j.t.ID, "build", j.b.ID, "step", f.Step, "err", f.Message)
}

// Recover marks the builds as failed that a crash of this server interrupted, and removes
// their temporary files. Call it before builds run; [Service.Run] does.
func (s *Service) Recover(ctx context.Context) error {
	// First the files: who sees that a build has failed finds nothing of it.
	cleared := s.clearWork()
	err := s.db.Update(ctx, func(tx *store.Tx) error {
		builds, err := store.List(ctx, tx, scanBuild, `select `+buildColumns+` from template_build where state = $1 and server_id = $2 and started_at < $3`, Building, s.conf.Server, store.Time(s.born))
		if err != nil {
			return err
		}
		for _, b := range builds {
			who := auth.Principal{Kind: auth.System, ID: "builds", Project: b.project}
			if err := audit.Append(ctx, tx, who, audit.TemplateBuildFailed, b.Template, audit.Fields{"build": b.ID, "reason": "the server stopped"}); err != nil {
				return err
			}
			if err := fail(ctx, tx, b.ID, Building, Failure{Message: errStopped.Error()}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return errors.Join(fmt.Errorf("recover builds: %w", err), cleared)
	}
	return cleared
}
