package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/event"
	"postern/internal/store"
)

// Run ends or pauses sandboxes whose time is up and keeps the pool filled,
// until ctx is done; then it freezes what runs, so that the next server goes on
// with it. It is called once, after [Fleet.Recover].
func (f *Fleet) Run(ctx context.Context) error {
	var bg sync.WaitGroup
	bg.Go(func() { f.fillPool(ctx) })
	bg.Go(func() { f.thaw(ctx) })
	for _, template := range f.conf.Prepare {
		base, err := f.conf.Base(ctx, template)
		if err != nil {
			f.log.WarnContext(ctx, "prepare template", "template", template, "err", err)
			continue
		}
		f.templateSource(template, base)
		f.dropOldTemplates(ctx, base)
	}
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
	due, err := f.expired(ctx)
	if err == nil && f.conf.KeepPaused > 0 {
		var old []Info
		old, err = f.list(ctx, `where state = $1 and paused_at <= $2`, Paused, store.Time(time.Now().Add(-f.conf.KeepPaused)))
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
	s, err := f.row(ctx, id)
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
	s, err := f.row(ctx, id)
	if err != nil || !over(s) || s.State != Running {
		return err
	}
	err = f.pause(ctx, l, system(s), s, s.Options.FilesOnly, "its time was up")
	if err == nil {
		return nil
	}
	if s, rerr := f.row(ctx, id); rerr == nil && s.State == Running {
		s.Ends = time.Now().Add(pauseAgainAfter)
		err = errors.Join(err, f.record(ctx, system(s), &s, change{
			from: []State{Running}, to: Running, verb: "timeout", fields: audit.Fields{"ends": s.Ends.UTC().Format(time.RFC3339), "reason": "it could not be paused"},
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
	ids := make(chan string, len(f.live))
	for id := range f.live {
		ids <- id
	}
	f.mu.Unlock()
	close(ids)
	var wg sync.WaitGroup
	for range freezeWorkers {
		wg.Go(func() {
			for id := range ids {
				// What had no part here when its turn came has nothing to freeze.
				if err := f.freeze(ctx, id); err != nil && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrBusy) {
					f.log.ErrorContext(ctx, "freeze sandbox", "sandbox", id, "err", err)
				}
			}
		})
	}
	wg.Wait()
}

func (f *Fleet) freeze(ctx context.Context, id string) error {
	ctx, l, err := f.claim(ctx, id)
	if err != nil {
		return err
	}
	defer f.release(l)
	s, err := f.row(ctx, id)
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
	if s, err = f.row(ctx, id); err != nil {
		return err
	}
	return f.finish(ctx, l, system(s), s, Killed, "the server was stopped and it could not be frozen")
}

// thaw brings back the sandboxes that a stop of the server froze. Who asks for
// one meanwhile does not wait for the others.
func (f *Fleet) thaw(ctx context.Context) {
	frozen, err := f.list(ctx, `where state = $1 and restart = 1 order by started_at`, Paused)
	if err != nil {
		f.log.ErrorContext(ctx, "find frozen sandboxes", "err", err)
		return
	}
	ids := make(chan string, len(frozen))
	for _, s := range frozen {
		ids <- s.ID
	}
	close(ids)
	var wg sync.WaitGroup
	for range freezeWorkers {
		wg.Go(func() {
			for id := range ids {
				if ctx.Err() != nil {
					return
				}
				if err := f.thawOne(ctx, id); err != nil {
					f.log.ErrorContext(ctx, "bring back sandbox; it stays paused", "sandbox", id, "err", err)
				}
			}
		})
	}
	wg.Wait()
}

func (f *Fleet) thawOne(ctx context.Context, id string) error {
	ctx, l, err := f.claim(ctx, id)
	if err != nil {
		return err
	}
	defer f.release(l)
	s, err := f.row(ctx, id)
	if err != nil || s.State != Paused || !s.Restart {
		return err
	}
	if !time.Now().Before(s.Ends) {
		if !s.Options.AutoPause {
			return f.finish(ctx, l, system(s), s, Killed, "its time was up while the server did not run")
		}
		s.Restart = false
		return f.record(ctx, system(s), &s, change{from: []State{Paused}, to: Paused, verb: "paused", fields: audit.Fields{"why": "its time was up while the server did not run"}})
	}
	_, err = f.resume(ctx, l, system(s), s, false, "the server was started")
	if err == nil {
		return nil
	}
	// It is not tried again at each start: the owner may, and sees why not.
	if s, rerr := f.row(ctx, id); rerr == nil && s.State == Paused {
		s.Restart = false
		err = errors.Join(err, f.record(ctx, system(s), &s, change{from: []State{Paused}, to: Paused, verb: "paused", fields: audit.Fields{"why": err.Error()}}))
	}
	return err
}

// dropOldTemplates removes the snapshots of former versions of the prepared
// templates: of another guest, other files or other limits.
func (f *Fleet) dropOldTemplates(ctx context.Context, current Base) {
	keep := []string{f.templatePrefix(current)}
	f.templates.mu.Lock()
	for _, t := range f.templates.all {
		keep = append(keep, f.templatePrefix(t.base))
	}
	f.templates.mu.Unlock()
	found, err := filepath.Glob(f.dir("t-*"))
	if err != nil {
		return // only for a bad pattern
	}
	for _, dir := range found {
		name := filepath.Base(dir)
		if slices.ContainsFunc(keep, func(p string) bool { return strings.HasPrefix(name, p) }) {
			continue
		}
		if err := f.discard(name); err != nil {
			f.log.WarnContext(ctx, "remove an old template's snapshot", "err", err)
		}
	}
}

// Recover deals with what a former process left on this machine: it goes on
// with the sandboxes that still run, and records those that do not as lost. It
// is called once, before anything else.
func (f *Fleet) Recover(ctx context.Context) error {
	rows, err := f.list(ctx, `where state in (`+quoted(onMachine)+`, 'paused')`)
	if err != nil {
		return err
	}
	links := map[string]*os.File{}
	if f.conf.Keeper != nil {
		if links, err = f.conf.Keeper.All(ctx); err != nil {
			return fmt.Errorf("find kept links: %w", err)
		}
	}
	defer func() {
		for _, l := range links {
			l.Close()
		}
	}()
	left, err := f.runtime.List(ctx)
	if err != nil {
		return fmt.Errorf("list what is left: %w", err)
	}
	on, keep, err := f.recoverRows(ctx, rows, left, links)
	if err != nil {
		return err
	}
	for id := range links {
		if !on[id] {
			f.conf.Keeper.Drop(id)
		}
	}
	for _, id := range left {
		if on[id] {
			continue
		}
		if err := f.runtime.Stop(ctx, id); err != nil {
			return fmt.Errorf("remove what is left of sandbox %s: %w", id, err)
		}
		f.log.InfoContext(ctx, "removed what was left of a sandbox", "sandbox", id)
	}
	named, err := f.allSnapshots(ctx)
	if err != nil {
		return err
	}
	for _, n := range named {
		keep[n.ID] = true
	}
	return f.tidySnapshots(ctx, keep)
}

// recoverWorkers is how many sandboxes are asked at a time whether they are
// well: code inside can stop its guest, and the server does not start before
// each has answered or has not.
const recoverWorkers = 16

// recoverRows is recoverOne for all. It returns by id what runs, and by name
// what must stay on disk.
func (f *Fleet) recoverRows(ctx context.Context, rows []Info, left []string, links map[string]*os.File) (on, keep map[string]bool, err error) {
	on, keep = map[string]bool{}, map[string]bool{}
	var mu sync.Mutex // guards the maps and err
	var wg sync.WaitGroup
	todo := make(chan Info, len(rows))
	for _, s := range rows {
		todo <- s
	}
	close(todo)
	for range min(recoverWorkers, len(rows)) {
		wg.Go(func() {
			for s := range todo {
				running, saved, rerr := f.recoverOne(ctx, s, slices.Contains(left, s.ID), links[s.ID])
				mu.Lock()
				on[s.ID], keep[saved] = running, true
				if rerr != nil && !errors.Is(rerr, ErrNotFound) { // its watch may have recorded its end
					err = errors.Join(err, fmt.Errorf("recover sandbox %s: %w", s.ID, rerr))
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return on, keep, err
}

func (f *Fleet) allSnapshots(ctx context.Context) (out []Snapshot, err error) {
	err = f.db.View(ctx, func(tx *store.Tx) error {
		out, err = snapshots(ctx, tx, ``)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	return out, nil
}

// recoverOne decides what becomes of a sandbox that was not at its end when a
// former process ended. It returns whether it runs, and the snapshot that it
// needs.
func (f *Fleet) recoverOne(ctx context.Context, s Info, left bool, link *os.File) (running bool, saved string, err error) {
	_, noSnapshot := os.Stat(f.dir(s.saved))
	frozen := s.saved != "" && noSnapshot == nil
	reason := "the server ended without ending it; it was removed at the next start"
	switch s.State { //nolint:exhaustive // one that was being created is lost; the others have ended
	case Paused:
		if frozen {
			return false, s.saved, nil
		}
		reason = "its snapshot is gone"
	case Pausing:
		// The snapshot appears whole or not at all. What has one has stopped.
		if frozen {
			s.PausedAt = time.Now()
			return false, s.saved, f.record(ctx, system(s), &s, change{from: []State{Pausing}, to: Paused, verb: "paused", event: event.Paused})
		}
		fallthrough
	case Running:
		if why := f.adopt(ctx, s, left, link); why == "" {
			s.saved = ""
			return true, "", f.record(ctx, system(s), &s, change{from: []State{s.State}, to: Running, verb: "recovered"})
		} else if link != nil || left {
			reason = why
		}
	case Resuming:
		// Nobody was told that it runs, so it has not.
		if frozen {
			return false, s.saved, f.record(ctx, system(s), &s, change{from: []State{Resuming}, to: Paused, verb: "resume_failed", fields: audit.Fields{"reason": reason}})
		}
	}
	s.Reason, s.Ended, s.saved, s.PausedAt, s.Restart = reason, time.Now(), "", time.Time{}, false
	return false, "", f.record(ctx, system(s), &s, change{
		from: []State{s.State}, to: Lost, verb: "lost", event: event.Killed, fields: audit.Fields{"reason": reason},
	})
}

// adoptTimeout is how long a guest that was left alone may take to answer.
const adoptTimeout = 5 * time.Second

// adopt goes on with a sandbox that a former process started. It returns why it
// cannot, or the empty string.
func (f *Fleet) adopt(ctx context.Context, s Info, left bool, link *os.File) (why string) {
	const itDied = "it died while no server ran"
	if left {
		_, err := f.runtime.Usage(ctx, s.ID)
		left = !errors.Is(err, ErrNotFound)
	}
	switch {
	case !left:
		return itDied
	case link == nil:
		return "its link was not kept"
	}
	_, l, err := f.claim(ctx, s.ID)
	if err != nil {
		return err.Error()
	}
	defer f.release(l)
	if err := f.network.Adopt(ctx, s.Principal(), s.Egress, link); err != nil {
		return err.Error()
	}
	ctx, cancel := context.WithTimeout(ctx, min(adoptTimeout, f.conf.StartTimeout))
	defer cancel()
	ctx, done := f.untilDeath(ctx, l)
	defer done()
	f.mu.Lock()
	l.up, l.since, l.mounted = true, s.Started, len(s.Options.Volumes) > 0
	f.mu.Unlock()
	f.watch(l) //nolint:contextcheck // it lives as long as the sandbox
	if err := f.greet(ctx, s.ID); err != nil {
		f.mu.Lock() // Recover removes the rest
		l.run()
		l.up = false
		f.mu.Unlock()
		f.network.Detach(s.ID)
		return fmt.Sprintf("it did not answer: %v", err)
	}
	f.setTraffic(l, s.Options.Traffic)
	f.setReady(l, true)
	return ""
}

// greet asks the guest whether it is well.
func (f *Fleet) greet(ctx context.Context, id string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://guest/envs", nil)
	if err != nil {
		return err
	}
	req.Header.Set(ChannelHeader, f.ChannelKey(id).Reveal())
	resp, err := f.guestClient(id).Do(req)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return nil
}
