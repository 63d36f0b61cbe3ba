package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"postern/internal/audit"
	"postern/internal/event"
)

// Recover deals with the sandboxes of a previous process of this server. It takes
// back those that still run, records the others as lost or paused, and removes
// everything else from the machine. Call it once, before anything else.
func (f *Fleet) Recover(ctx context.Context) error {
	rows, err := f.rows.list(ctx, `where state in (`+quoted(onMachine)+`, 'paused')`)
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
	for name := range links {
		if !on[strings.TrimPrefix(name, gateName(""))] {
			f.conf.Keeper.Drop(name)
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
	named, err := f.rows.allSnapshots(ctx)
	if err != nil {
		return err
	}
	for _, n := range named {
		keep[n.ID] = true
	}
	return f.tidySnapshots(ctx, keep)
}

// recoverWorkers is how many guests are asked at a time whether they still work.
// Code inside can stop its guest, and the server does not start before each has
// answered or timed out.
const recoverWorkers = 16

// recoverRows calls recoverOne for all rows. It returns the IDs of the sandboxes
// that run, and the names of the snapshots that must stay on disk.
func (f *Fleet) recoverRows(ctx context.Context, rows []Info, left []string, links map[string]*os.File) (on, keep map[string]bool, err error) {
	on, keep = map[string]bool{}, map[string]bool{}
	var mu sync.Mutex // guards the maps
	var g errgroup.Group
	g.SetLimit(recoverWorkers)
	for _, s := range rows {
		g.Go(func() error {
			running, saved, err := f.recoverOne(ctx, s, slices.Contains(left, s.ID), links[s.ID], links[gateName(s.ID)])
			mu.Lock()
			on[s.ID], keep[saved] = running, true
			mu.Unlock()
			if err != nil && !errors.Is(err, ErrNotFound) { // the watch may have recorded the end
				return fmt.Errorf("recover sandbox %s: %w", s.ID, err)
			}
			return nil
		})
	}
	return on, keep, g.Wait()
}

// recoverOne decides what becomes of a sandbox whose row does not say that it has
// ended. It returns whether the sandbox runs, and the name of the snapshot that it
// needs.
func (f *Fleet) recoverOne(ctx context.Context, s Info, left bool, link, gate *os.File) (running bool, saved string, err error) {
	_, noSnapshot := os.Stat(f.dir(s.saved))
	frozen := s.saved != "" && noSnapshot == nil
	reason := "the server ended without ending it; it was removed at the next start"
	switch s.State { //nolint:exhaustive // a sandbox in creation is lost; the other states are ends
	case Paused:
		if frozen {
			return false, s.saved, nil
		}
		reason = "its snapshot is gone"
	case Pausing:
		// A snapshot appears on disk complete or not at all, and only after the
		// sandbox has stopped.
		if frozen {
			s.PausedAt = time.Now()
			return false, s.saved, f.rows.record(ctx, system(s), &s, change{from: []State{Pausing}, to: Paused, verb: audit.SandboxPaused, event: event.Paused})
		}
		fallthrough
	case Running:
		if why := f.adopt(ctx, s, left, link, gate); why == "" {
			s.saved = ""
			return true, "", f.rows.record(ctx, system(s), &s, change{from: []State{s.State}, to: Running, verb: audit.SandboxRecovered})
		} else if link != nil || left {
			reason = why
		}
	case Resuming:
		// Nobody has been told that it runs, so nothing is lost by resuming again.
		if frozen {
			return false, s.saved, f.rows.record(ctx, system(s), &s, change{from: []State{Resuming}, to: Paused, verb: audit.SandboxResumeFailed, fields: audit.Fields{"reason": reason}})
		}
	}
	s.end(reason)
	return false, "", f.rows.record(ctx, system(s), &s, change{
		from: []State{s.State}, to: Lost, verb: audit.SandboxLost, event: event.Killed, fields: audit.Fields{"reason": reason},
	})
}

// adoptTimeout is how long the guest of a recovered sandbox may take to answer.
const adoptTimeout = 10 * time.Second

// adopt takes back a sandbox that a previous process started. It returns why that
// is not possible, or the empty string.
func (f *Fleet) adopt(ctx context.Context, s Info, left bool, link, gate *os.File) (why string) {
	if left {
		_, err := f.runtime.Usage(ctx, s.ID)
		left = !errors.Is(err, ErrNotFound)
	}
	switch {
	case !left:
		return "it died while no server ran"
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
	l.up, l.since, l.mounted, l.traffic = true, s.Started, len(s.Options.Volumes) > 0, trafficOf(s)
	f.mu.Unlock()
	f.watch(l) //nolint:contextcheck // the watch lives as long as the sandbox
	// The gate comes first: the guest cannot answer while a program that it starts waits.
	why = f.adoptGate(ctx, s, gate)
	if why == "" {
		why = f.askAdopted(ctx, s)
	}
	if why != "" {
		f.mu.Lock() // Recover removes what runs
		l.run()
		l.up = false
		f.mu.Unlock()
		f.network.Detach(s.ID)
		return why
	}
	f.setReady(l, true)
	return ""
}

// askAdopted checks that the guest of a recovered sandbox answers and is still confined. It
// returns why not, or the empty string.
func (f *Fleet) askAdopted(ctx context.Context, s Info) (why string) {
	if _, err := f.askGuest(ctx, s.ID, f.ChannelKey(s.ID), http.MethodGet, "/envs", nil, http.StatusOK); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Sprintf("it did not answer: %v", err)
	}
	if err := f.stillConfined(ctx, s); err != nil {
		return err.Error()
	}
	return ""
}
