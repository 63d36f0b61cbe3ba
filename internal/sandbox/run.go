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

// Run ends or pauses sandboxes whose lifetime is over, and keeps the pool filled and
// other sandboxes prepared.
// When ctx is done it freezes the running sandboxes to disk, so that the next
// server resumes them. Call it once, after [Fleet.Recover].
func (f *Fleet) Run(ctx context.Context) error {
	var bg sync.WaitGroup
	bg.Go(func() { f.pool.fill(ctx) })
	bg.Go(func() { f.prepared.fill(ctx) })
	bg.Go(func() { f.thaw(ctx) })
	bg.Go(func() { f.guardDisk(ctx) })
	var current []Base
	for _, template := range f.conf.Prepare {
		base, err := f.base(ctx, template)
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

// expire starts to end or pause each sandbox whose lifetime is over.
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
		// Each in its own goroutine, so that a slow one does not delay the others.
		// A sandbox that is still being ended is skipped, and found again if that
		// fails.
		f.mu.Lock()
		l := f.live[s.ID]
		busy := l != nil && len(l.claim) > 0
		f.mu.Unlock()
		if !busy {
			f.workers.Go(func() { f.timeUp(context.WithoutCancel(ctx), s.ID) })
		}
	}
}

// timeUp ends or pauses a sandbox if its lifetime is still over: its owner may have
// extended it in the meantime.
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

// autoPauseRetry is how much longer a sandbox runs if it could not be paused at the
// end of its life, for example because the disk was full. It is not killed: its
// creator was promised that nothing is lost.
const autoPauseRetry = 10 * time.Second

// autoPause pauses a sandbox if over still holds.
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
		s.Ends = time.Now().Add(autoPauseRetry)
		err = errors.Join(err, f.rows.record(ctx, system(s), &s, change{
			from: []State{Running}, to: Running, verb: audit.SandboxTimeout, fields: audit.Fields{"ends": s.Ends.UTC().Format(time.RFC3339), "reason": "it could not be paused"},
		}))
	}
	return err
}

// freezeWorkers is how many sandboxes are frozen or resumed at a time. They share
// the disk.
const freezeWorkers = 4

// freezeAll pauses all running sandboxes and marks them for the next server to
// resume. A sandbox that cannot be paused is ended, since its link ends with this
// process.
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
			// The sandbox may have ended before its turn came.
			if err := f.freeze(ctx, id); err != nil && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrBusy) {
				f.log.ErrorContext(ctx, "freeze sandbox", "sandbox", id, "err", err)
			}
			return nil
		})
	}
	_ = g.Wait() // each error has been logged
}

// freeze pauses one sandbox for the next server, or ends it.
func (f *Fleet) freeze(ctx context.Context, id string) error {
	// The claim's context is not used. Somebody who waits to end the sandbox
	// cancels it, but may find the server closed at their turn. Then the row would
	// say that the sandbox runs.
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

// thaw resumes the sandboxes that freezeAll froze. A request for one of them does
// not wait for the others.
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
	_ = g.Wait() // each error has been logged
}

// thawOne resumes one frozen sandbox. If its life ended while no server ran, it
// pauses or ends it as its options say.
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
	// Do not retry at each start of the server. The owner can resume the sandbox,
	// and finds the reason in the record.
	if s, rerr := f.rows.row(ctx, id); rerr == nil && s.State == Paused {
		s.Restart = false
		err = errors.Join(err, f.rows.record(ctx, system(s), &s, change{from: []State{Paused}, to: Paused, verb: audit.SandboxPaused, fields: audit.Fields{"why": err.Error()}}))
	}
	return err
}
