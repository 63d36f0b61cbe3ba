package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"time"

	"postern/client"
	"postern/internal/api"
)

const (
	eventWait   = 20 * time.Second // of one question for events
	cancelWait  = time.Minute      // for the end of a run that was cancelled
	lookAgain   = time.Second      // between looks at files that wait for people
	settleTime  = 10 * time.Second // for files that policy has decided on to be released
	silentTries = 30               // failed questions, a second apart, after which the server counts as lost
	hiddenTime  = 2 * time.Second  // after which a file counts as waiting for a person, if the key may not see its action

	reviewPerson = "person" // of [api.RunArtifact]: always a person decides
)

// A follower shows a run until its end.
type follower struct {
	t   *runTool
	l   *local
	out *output
	p   *runScreen
	id  string

	after  int64  // number of the last event that was shown
	review string // action that was announced
}

// follow shows the run until its end, and returns its exit status as an error.
func (f *follower) follow(ctx context.Context) error {
	err := f.watch(ctx, f.t.wait)
	if ctx.Err() != nil {
		return f.interrupted(ctx)
	}
	if errors.Is(err, errUnreviewed) {
		if _, cerr := f.l.api.Runs.Cancel(ctx, f.id); cerr != nil {
			return fmt.Errorf("%s: %w, and it could not be cancelled: %w", f.id, err, cerr)
		}
		f.p.line("%s: %v; it was cancelled", f.id, err)
		return f.report(ctx, statusUnreviewed)
	}
	if err != nil {
		return fmt.Errorf("%s: %w; postern runs show %s shows its state", f.id, err, f.id)
	}
	return f.report(ctx, 0)
}

// errUnreviewed means that nobody has decided within the time that was given.
var errUnreviewed = errors.New("nobody reviewed it in time")

// watch shows events until the run has ended. Patience bounds the wait for the review; 0
// means without end.
func (f *follower) watch(ctx context.Context, patience time.Duration) error {
	start, failed, state := time.Now(), 0, ""
	for {
		wait := eventWait
		if left := patience - time.Since(start); patience > 0 && state == api.RunProposed {
			wait = max(min(wait, left), time.Second)
		}
		list, err := f.l.api.Runs.Events(ctx, f.id, f.after, wait)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && (failed == silentTries || !f.passing(err)):
			return err
		case err != nil:
			failed++ // the server may be restarting
			if err := runPause(ctx, time.Second); err != nil {
				return err
			}
			continue
		}
		failed = 0
		for _, e := range list.Events {
			f.after = e.N
			if err := f.event(e); err != nil {
				return err
			}
		}
		state = list.State
		if state == api.RunProposed {
			if err := f.announce(ctx); err != nil {
				return err
			}
			if patience > 0 && time.Since(start) > patience {
				return errUnreviewed
			}
		}
		if len(list.Events) == 0 && (state == api.RunEnded || state == api.RunRefused) {
			return nil
		}
	}
}

// passing reports whether an error may pass: the server could not be reached, is busy, or
// limits how often it is asked.
func (f *follower) passing(err error) bool {
	var said *client.Error
	return !errors.As(err, &said) || said.Status == http.StatusTooManyRequests || said.Status >= http.StatusBadGateway
}

func runPause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// announce says once who has to decide, and how. What policy has decided waits for
// nobody.
func (f *follower) announce(ctx context.Context) error {
	if f.review != "" {
		return nil
	}
	r, err := f.l.api.Runs.Get(ctx, f.id)
	if err != nil || r.Action == "" {
		return err
	}
	a, err := f.l.api.Actions.Get(ctx, r.Action)
	if errors.Is(err, client.ErrNotFound) || errors.Is(err, client.ErrForbidden) {
		return nil // this key does not see reviews; the events say how it ends
	}
	if err != nil || a.State != api.StatePending {
		return err
	}
	f.review = r.Action
	f.p.line("%s waits for a person: postern show %s, then postern approve %s", r.ID, r.Action, r.Action)
	f.p.status("waiting for the review")
	return nil
}

// event shows an event. Its text may be hostile.
func (f *follower) event(e api.RunEvent) error {
	if f.t.events {
		return f.out.line(e)
	}
	switch e.Kind {
	case api.RunEventOutput:
		f.p.status("running, %s of output", megabytes(e.Bytes))
		return nil
	case api.RunEventState:
		if e.State == api.RunDraft || e.State == api.RunProposed { // announce says more
			return nil
		}
		f.p.status("%s", cell(e.State))
	}
	f.p.line("%s  %s", e.At.Local().Format(time.TimeOnly), runEventText(e))
	return nil
}

// runEventText returns what an event says, on one line. Parts of it are hostile.
func runEventText(e api.RunEvent) string {
	text := cut(strings.TrimSpace(e.Text), longLine)
	switch {
	case e.Kind == api.RunEventExit:
		what := "has no exit status"
		if e.ExitCode != nil {
			what = fmt.Sprintf("exited with %d, %s of output", *e.ExitCode, megabytes(e.Bytes))
		}
		return strings.TrimSuffix(fmt.Sprintf("command %d %s: %s", e.Command, what, text), ": ")
	case e.Kind == api.RunEventOutput:
		return fmt.Sprintf("command %d: %s of output", e.Command, megabytes(e.Bytes))
	case e.Kind == api.RunEventState && e.Outcome != "":
		return strings.TrimSuffix(cell(outcomeWords(e.Outcome))+": "+text, ": ")
	case e.Kind == api.RunEventCommand:
		return "start " + text
	case text == "":
		return cell(e.State)
	}
	return text
}

// interrupted cancels the run and waits for its end. A second interrupt leaves at once.
func (f *follower) interrupted(ctx context.Context) error {
	ctx, stop := signal.NotifyContext(context.WithoutCancel(ctx), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, cancelWait)
	defer cancel()
	f.p.line("cancelling %s; a second Ctrl-C leaves at once", f.id)
	if _, err := f.l.api.Runs.Cancel(ctx, f.id); err != nil {
		return fmt.Errorf("cancel %s: %w; postern runs cancel %s tries again", f.id, err, f.id)
	}
	if err := f.watch(ctx, 0); err != nil {
		return fmt.Errorf("%s was cancelled, but waiting for its end failed: %w", f.id, err)
	}
	return f.report(ctx, statusLost)
}

// A runResult is what --json prints.
type runResult struct {
	api.Run

	Artifacts []api.RunArtifact `json:"artifacts"`
	Saved     []string          `json:"saved,omitempty"` // names in the directory of --out
}

// report prints what came of the run, saves its files and returns its exit status, or
// the given one unless that is 0.
func (f *follower) report(ctx context.Context, status int) error {
	var res runResult
	var err error
	if res.Run, err = f.l.api.Runs.Get(ctx, f.id); err != nil {
		return err
	}
	if res.State == api.RunEnded {
		if res.Artifacts, err = f.artifacts(ctx, status == 0 && f.t.out != ""); err != nil {
			return err
		}
	}
	var missed error // an artifact that could not be saved
	if f.t.out != "" && res.State == api.RunEnded {
		res.Saved, missed = save(ctx, f.l, f.id, res.Artifacts, f.t.out, f.t.force)
	}
	f.p.end()
	if f.t.events {
		err = nil
	} else {
		err = f.out.facts(res, func() error { return printResult(f.out, res) })
	}
	if err = errors.Join(missed, err); err != nil {
		return err
	}
	if status == 0 {
		status = exitStatus(res.Run)
	}
	if status == 0 {
		return nil
	}
	return exitError(status)
}

// artifacts returns the files of the run, once those that policy lets go are released.
// With wait it waits until people have decided about each, as long as --wait-review says.
func (f *follower) artifacts(ctx context.Context, wait bool) ([]api.RunArtifact, error) {
	said := map[string]bool{}
	for start := time.Now(); ; {
		list, err := f.l.api.Runs.Artifacts(ctx, f.id)
		if err != nil {
			return nil, err
		}
		waiting, people := 0, 0
		passed := time.Since(start)
		for _, a := range list.Artifacts {
			if a.State != api.ArtifactWaiting {
				continue
			}
			waiting++
			pending, err := f.pending(ctx, a, passed)
			if err != nil {
				return nil, err
			}
			if !pending {
				continue
			}
			people++
			if wait && !said[a.Action] {
				f.p.line("%s waits for a person: postern show %s, then postern approve %s", cell(a.Path), a.Action, a.Action)
				said[a.Action] = true
			}
		}
		settling := waiting > people && passed < settleTime
		if !settling && (!wait || waiting == 0 || f.t.wait > 0 && passed > f.t.wait) {
			return list.Artifacts, nil
		}
		pause := lookAgain
		if settling {
			pause = lookAgain / 5
		}
		if people > 0 {
			f.p.status("files that wait for a person: %d", people)
		}
		if err := runPause(ctx, pause); err != nil {
			return list.Artifacts, nil //nolint:nilerr // interrupted: what is released is saved
		}
	}
}

// pending reports whether a file that waits does so for a person, and not for the moment
// in which what policy has decided is carried out. A project's key may not see the action: it
// is the sandbox that has proposed it. Then only the file's own record says anything, after
// the time that policy needs.
func (f *follower) pending(ctx context.Context, a api.RunArtifact, passed time.Duration) (bool, error) {
	act, err := f.l.api.Actions.Get(ctx, a.Action)
	switch {
	case errors.Is(err, client.ErrNotFound), errors.Is(err, client.ErrForbidden):
		return a.DecidedAt == nil && (a.Review == reviewPerson || passed > hiddenTime), nil
	case err != nil:
		return false, err
	}
	return act.State == api.StatePending, nil
}

// exitStatus returns the exit status that stands for what came of a run.
func exitStatus(r api.Run) int {
	switch {
	case r.State == api.RunRefused && r.Refused == api.RunRefusedByTime:
		return statusUnreviewed
	case r.State == api.RunRefused:
		return statusRefused
	case r.State != api.RunEnded:
		return statusLost
	}
	switch r.Outcome {
	case api.RunSucceeded:
		return 0
	case api.RunViolated:
		return statusViolated
	case api.RunTimedOut:
		return statusTimedOut
	case api.RunFailed:
		if r.ExitCode != nil && *r.ExitCode > 0 && *r.ExitCode < 256 {
			return *r.ExitCode
		}
		return 1 // its command ended well, and something that it had to make is missing
	}
	return statusLost // also an outcome of a newer server: it is no success
}
