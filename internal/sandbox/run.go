package sandbox

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"postern/internal/audit"
	"postern/internal/store"
)

// Run ends or pauses sandboxes whose time is up and keeps the pool filled,
// until ctx is done; then it freezes what runs, so that the next server goes on
// with it. It is called once, after [Fleet.Recover].
func (f *Fleet) Run(ctx context.Context) error {
	var bg sync.WaitGroup
	bg.Go(func() { f.pool.fill(ctx) })
	bg.Go(func() { f.thaw(ctx) })
	var current []Base
	for _, template := range f.conf.Prepare {
		base, err := f.conf.Base(ctx, template)
		if err != nil {
			f.log.WarnContext(ctx, "prepare template", "template", template, "err", err)
			continue
		}
		f.templates.source(template, base)
		current = append(current, base)
	}
	f.templates.dropOutdated(ctx, current)
	t := time.NewTicker(250 * time.Millisecond)
	defer t.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-t.C:
			f.expire(ctx)
		}
	}
	bg.Wait()
	f.freezeAll(context.WithoutCancel(ctx))
	f.workers.Wait()
	return ctx.Err()
}

// expire deals with the sandboxes whose time is up.
func (f *Fleet) expire(ctx context.Context) {
	due, err := f.rows.expired(ctx)
	if err == nil && f.conf.KeepPaused > 0 {
		var old []Info
		old, err = f.rows.list(ctx, `where state = $1 and paused_at <= $2`, Paused, store.Time(time.Now().Add(-f.conf.KeepPaused)))
		due = append(due, old...)
	}
	if err != nil {
		if ctx.Err() == nil {
			f.log.ErrorContext(ctx, "find expired sandboxes", "err", err)
		}
		return
	}
	for _, s := range due {
		// Each in its own goroutine: one slow end must not delay the others.
		// One that is not done by the next round is found again, and waits.
		f.mu.Lock()
		l := f.live[s.ID]
		busy := l != nil && len(l.claim) > 0
		f.mu.Unlock()
		if !busy {
			f.workers.Go(func() { f.timeUp(context.WithoutCancel(ctx), s.ID) })
		}
	}
}

// timeUp ends or pauses a sandbox if its time is still up.
func (f *Fleet) timeUp(ctx context.Context, id string) {
	over := func(s Info) bool {
		return s.State == Running && !time.Now().Before(s.Ends) || s.State == Paused && f.conf.KeepPaused > 0 && time.Since(s.PausedAt) >= f.conf.KeepPaused
	}
	s, err := f.rows.row(ctx, id)
	if err == nil && s.State == Running && s.Options.AutoPause {
		err = f.autoPause(ctx, id, over)
	} else if err == nil {
		err = f.kill(ctx, system(s), id, "its time was up", over)
	}
	if err != nil && !errors.Is(err, ErrNotFound) {
		f.log.ErrorContext(ctx, "end expired sandbox", "sandbox", id, "err", err)
	}
}

// pauseAgainAfter is how much longer a sandbox runs that could not be paused
// when its time was up, for want of disk space say. It is not killed: its
// creator was promised that nothing is lost.
const pauseAgainAfter = 10 * time.Second

func (f *Fleet) autoPause(ctx context.Context, id string, over func(Info) bool) error {
	ctx, l, err := f.claim(ctx, id)
	if err != nil {
		return err
	}
	defer f.release(l)
	s, err := f.rows.row(ctx, id)
	if err != nil || !over(s) || s.State != Running {
		return err
	}
	err = f.pause(ctx, l, system(s), s, s.Options.FilesOnly, "its time was up")
	if err == nil {
		return nil
	}
	if s, rerr := f.rows.row(ctx, id); rerr == nil && s.State == Running {
		s.Ends = time.Now().Add(pauseAgainAfter)
		err = errors.Join(err, f.rows.record(ctx, system(s), &s, change{
			from: []State{Running}, to: Running, verb: audit.SandboxTimeout, fields: audit.Fields{"ends": s.Ends.UTC().Format(time.RFC3339), "reason": "it could not be paused"},
		}))
	}
	return err
}

// freezeWorkers is how many sandboxes are frozen or brought back at a time:
// the disk is shared.
const freezeWorkers = 4

// freezeAll pauses what runs, to come back by itself. What cannot be paused is
// ended: its link ends in this process.
func (f *Fleet) freezeAll(ctx context.Context) {
	f.mu.Lock()
	f.closed = true
	f.stop()
	ids := slices.Collect(maps.Keys(f.live))
	f.mu.Unlock()
	var g errgroup.Group
	g.SetLimit(freezeWorkers)
	for _, id := range ids {
		g.Go(func() error {
			// What had no part here when its turn came has nothing to freeze.
			if err := f.freeze(ctx, id); err != nil && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrBusy) {
				f.log.ErrorContext(ctx, "freeze sandbox", "sandbox", id, "err", err)
			}
			return nil
		})
	}
	_ = g.Wait() // each has been logged
}

func (f *Fleet) freeze(ctx context.Context, id string) error {
	// Not with the claim's context: who waits to end it may find the server
	// closed when its turn comes, and would leave a row that says that it runs.
	_, l, err := f.claim(ctx, id)
	if err != nil {
		return err
	}
	defer f.release(l)
	s, err := f.rows.row(ctx, id)
	if err != nil {
		return errors.Join(err, f.takeDown(ctx, l))
	}
	if s.State != Running {
		return nil
	}
	s.Restart = true
	err = f.pause(ctx, l, system(s), s, false, "the server was stopped")
	if err == nil {
		return nil
	}
	f.log.WarnContext(ctx, "freeze sandbox; it is ended", "sandbox", id, "err", err)
	if s, err = f.rows.row(ctx, id); err != nil {
		return err
	}
	return f.finish(ctx, l, system(s), s, Killed, "the server was stopped and it could not be frozen")
}

// thaw brings back the sandboxes that a stop of the server froze. Who asks for
// one meanwhile does not wait for the others.
func (f *Fleet) thaw(ctx context.Context) {
	frozen, err := f.rows.list(ctx, `where state = $1 and restart = 1 order by started_at`, Paused)
	if err != nil {
		f.log.ErrorContext(ctx, "find frozen sandboxes", "err", err)
		return
	}
	var g errgroup.Group
	g.SetLimit(freezeWorkers)
	for _, s := range frozen {
		g.Go(func() error {
			if ctx.Err() != nil {
				return nil //nolint:nilerr // the next start brings it back
			}
			if err := f.thawOne(ctx, s.ID); err != nil {
				f.log.ErrorContext(ctx, "bring back sandbox; it stays paused", "sandbox", s.ID, "err", err)
			}
			return nil
		})
	}
	_ = g.Wait() // each has been logged
}

func (f *Fleet) thawOne(ctx context.Context, id string) error {
	ctx, l, err := f.claim(ctx, id)
	if err != nil {
		return err
	}
	defer f.release(l)
	s, err := f.rows.row(ctx, id)
	if err != nil || s.State != Paused || !s.Restart {
		return err
	}
	if !time.Now().Before(s.Ends) {
		if !s.Options.AutoPause {
			return f.finish(ctx, l, system(s), s, Killed, "its time was up while the server did not run")
		}
		s.Restart = false
		return f.rows.record(ctx, system(s), &s, change{from: []State{Paused}, to: Paused, verb: audit.SandboxPaused, fields: audit.Fields{"why": "its time was up while the server did not run"}})
	}
	_, err = f.resume(ctx, l, system(s), s, false, "the server was started")
	if err == nil {
		return nil
	}
	// It is not tried again at each start: the owner may, and sees why not.
	if s, rerr := f.rows.row(ctx, id); rerr == nil && s.State == Paused {
		s.Restart = false
		err = errors.Join(err, f.rows.record(ctx, system(s), &s, change{from: []State{Paused}, to: Paused, verb: audit.SandboxPaused, fields: audit.Fields{"why": err.Error()}}))
	}
	return err
}
