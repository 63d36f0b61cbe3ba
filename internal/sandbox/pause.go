package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/store"
)

// Pause freezes a running sandbox of who's project. Its memory, or with filesOnly
// only its files, goes to disk; it then uses nothing else of this machine. Its
// error wraps [ErrPaused] if it is paused already. Callers that pause it at the same
// time all succeed. If the pause fails the sandbox continues unharmed.
func (f *Fleet) Pause(ctx context.Context, who auth.Principal, id string, filesOnly bool) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	was, err := f.Get(ctx, who, id)
	if err != nil {
		return err
	}
	ctx, l, s, err := f.claimFor(ctx, who, id)
	if err != nil {
		return err
	}
	defer f.release(l)
	if s.State == Paused && (was.State == Running || was.State == Pausing) {
		return nil // another caller paused it while this one waited
	}
	if s.State != Running {
		return fmt.Errorf("pause %s: %w", id, ErrPaused)
	}
	if filesOnly {
		if err := s.refuseIfBound("pause without memory"); err != nil {
			return err
		}
	}
	return f.pause(ctx, l, who, s, filesOnly, "asked for")
}

// pause freezes a claimed, running sandbox.
func (f *Fleet) pause(ctx context.Context, l *liveSandbox, who auth.Principal, s Info, filesOnly bool, why string) error {
	s.saved = "p-" + random()
	err := f.rows.record(ctx, who, &s, change{
		from: []State{Running}, to: Pausing, verb: audit.SandboxPause, fields: audit.Fields{"why": why, "files_only": strconv.FormatBool(filesOnly)},
		check: func(ctx context.Context, tx *store.Tx) error {
			if s.Restart {
				return nil // the server is stopping, and the alternative is to lose the sandbox
			}
			return f.rows.roomToPause(ctx, tx)
		},
	})
	if err != nil {
		return err
	}
	f.setReady(l, false)
	if err := f.save(ctx, s, filesOnly); err != nil {
		// Undo, also if somebody wants to end the sandbox: the end follows.
		ctx := context.WithoutCancel(ctx)
		err = errors.Join(fmt.Errorf("pause %s: %w", s.ID, err), f.discard(s.saved))
		s.saved, s.Restart = "", false
		rerr := f.rows.record(ctx, system(s), &s, change{from: []State{Pausing}, to: Running, verb: audit.SandboxPauseFailed, fields: audit.Fields{"reason": err.Error()}})
		f.setReady(l, true)
		return errors.Join(err, rerr)
	}
	// It is on disk and does not run again. The rest of its end follows with release.
	ctx = context.WithoutCancel(ctx)
	f.mu.Lock()
	l.spent = func() { _ = f.takeDown(ctx, l) } // it logs the error, and what is left is still listed
	f.mu.Unlock()
	f.network.Detach(l.id)
	s.PausedAt = time.Now()
	return f.rows.record(ctx, who, &s, change{from: []State{Pausing}, to: Paused, verb: audit.SandboxPaused, event: event.Paused})
}

// savedFiles is written beside a snapshot of files: what the guest must be told
// when it boots.
type savedFiles struct {
	EnvVars map[string]string `json:"env_vars"`
}

// save writes the snapshot s.saved of a sandbox, which stops.
func (f *Fleet) save(ctx context.Context, s Info, filesOnly bool) error {
	ctx, cancel := context.WithTimeout(ctx, f.conf.SaveTimeout)
	defer cancel()
	if !s.Restart { // a sandbox frozen at the server's stop has no second chance
		done, err := f.takeSpace(ctx, s.ID)
		if err != nil {
			return err
		}
		defer done()
	}
	if filesOnly {
		env, err := f.guestEnv(ctx, s.ID)
		if err != nil {
			return err
		}
		b, err := json.Marshal(savedFiles{env})
		if err != nil {
			return err
		}
		if err := os.WriteFile(f.dir(s.saved)+".json", b, 0o600); err != nil {
			return fmt.Errorf("save environment: %w", err)
		}
	}
	return f.runtime.Save(ctx, s.ID, f.dir(s.saved), SaveOptions{FilesOnly: filesOnly})
}

// keptFiles reports whether a paused sandbox has its files and no memory.
func (f *Fleet) keptFiles(s Info) bool {
	_, err := os.Stat(f.dir(s.saved) + ".json")
	return err == nil
}

// savedSource returns what a paused sandbox is resumed from, and what to tell its
// guest.
func (f *Fleet) savedSource(s Info) (source, initBody, error) {
	from := source{dir: f.dir(s.saved), channel: s.ID}
	b, err := os.ReadFile(from.dir + ".json")
	if errors.Is(err, os.ErrNotExist) {
		return from, initBody{}, nil
	}
	var saved savedFiles
	if err == nil {
		err = json.Unmarshal(b, &saved)
	}
	if err != nil {
		return source{}, initBody{}, fmt.Errorf("read saved environment: %w", err)
	}
	from.files = true
	return from, initBody{EnvVars: environment(saved.EnvVars)}, nil
}

// A ConnectRequest says how Connect finds or brings back a sandbox.
type ConnectRequest struct {
	Timeout  time.Duration // least lifetime from now
	Resume   bool          // refuse a running sandbox
	Reboot   bool          // a paused sandbox keeps its files only, and boots
	InboxKey auth.Secret   // credential that lets the sandbox read its inbox; empty means no change
}

// Connect resumes a paused sandbox of who's project, or extends the life of a
// running one. It reports whether the sandbox was resumed. If the inbox key is
// refused the error is a [LoanError], and the sandbox runs on. If the sandbox runs and
// r.Resume is set, the error wraps [ErrRunning].
func (f *Fleet) Connect(ctx context.Context, who auth.Principal, id string, r ConnectRequest) (_ Info, resumed bool, err error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Info{}, false, err
	}
	if err := f.CheckTimeout(r.Timeout); err != nil {
		return Info{}, false, err
	}
	ctx, l, s, err := f.claimFor(ctx, who, id)
	if err != nil {
		return Info{}, false, err
	}
	defer f.release(l)
	if r.Reboot {
		if err := s.refuseIfBound("reboot"); err != nil {
			return Info{}, false, err
		}
	}
	if r.InboxKey != "" {
		if err := s.refuseIfBound("loan of an inbox"); err != nil {
			return Info{}, false, err
		}
	}
	if s.State == Running && r.Resume {
		return Info{}, false, fmt.Errorf("sandbox %s %w", id, ErrRunning)
	}
	if s.State == Running {
		s, err = f.setTimeout(ctx, who, s, r.Timeout, true)
	} else {
		if s.Ends, err = s.limitEnd(time.Now().Add(r.Timeout)); err != nil {
			return Info{}, false, err
		}
		s, err = f.resume(ctx, l, who, s, r.Reboot, "asked for")
		resumed = true
	}
	if err == nil && r.InboxKey != "" {
		err = f.lend(ctx, who, s, r.InboxKey)
	}
	return s, resumed, err
}

// resume brings a claimed, paused sandbox back; with reboot without its memory. If
// that fails the sandbox stays paused.
func (f *Fleet) resume(ctx context.Context, l *liveSandbox, who auth.Principal, s Info, reboot bool, why string) (Info, error) {
	if s.State != Paused {
		return Info{}, fmt.Errorf("resume %s: %w", s.ID, ErrBusy)
	}
	was := s
	s.Execution = newExecution()
	err := f.rows.record(ctx, who, &s, change{
		from: []State{Paused}, to: Resuming, verb: audit.SandboxResume, fields: audit.Fields{"why": why},
		check: func(ctx context.Context, tx *store.Tx) error { return f.rows.roomToRun(ctx, tx) },
	})
	if err != nil {
		return Info{}, err
	}
	base, err := f.base(ctx, s.Template)
	var from source
	var body initBody
	if err == nil {
		from, body, err = f.savedSource(s)
	}
	if err == nil && (from.files || reboot) {
		err = s.refuseIfBound("boot") // a boot loses its view of files
	}
	if err == nil {
		err = f.bringUp(ctx, l, s, base, from, body)
	}
	if err == nil && reboot && !from.files {
		err = f.reboot(ctx, l, s, base)
	}
	if err == nil {
		err = f.stillConfined(ctx, s)
	}
	if err != nil {
		ctx := context.WithoutCancel(ctx)
		return Info{}, errors.Join(fmt.Errorf("resume %s: %w: %w", s.ID, ErrNotResumed, err), f.takeDown(ctx, l),
			f.rows.record(ctx, system(s), &was, change{from: []State{Resuming}, to: Paused, verb: audit.SandboxResumeFailed, fields: audit.Fields{"reason": err.Error()}}))
	}
	ctx = context.WithoutCancel(ctx)
	saved := s.saved
	s.saved, s.PausedAt, s.Restart = "", time.Time{}, false
	err = f.rows.record(ctx, who, &s, change{
		from: []State{Resuming}, to: Running, verb: audit.SandboxResumed, event: event.Resumed, fields: audit.Fields{"ends": s.Ends.UTC().Format(time.RFC3339)},
	})
	if err != nil {
		// The sandbox has run. It must not be resumed from its old memory, which
		// would run things twice. So the row stays in state resuming, with the
		// snapshot, for Recover.
		return Info{}, errors.Join(err, f.takeDown(ctx, l))
	}
	f.setReady(l, true)
	if err := f.discard(saved); err != nil {
		f.log.WarnContext(ctx, "remove the snapshot of a resumed sandbox", "sandbox", s.ID, "err", err)
	}
	return s, nil
}

// reboot replaces a running sandbox by one that boots with its files. There is no
// way to take the files out of a memory snapshot without running it.
func (f *Fleet) reboot(ctx context.Context, l *liveSandbox, s Info, base Base) error {
	s.saved = "p-" + random()
	defer func() {
		if err := f.discard(s.saved); err != nil {
			f.log.WarnContext(ctx, "remove files of a reboot", "sandbox", s.ID, "err", err)
		}
	}()
	if err := f.save(ctx, s, true); err != nil {
		return err
	}
	if err := f.takeDown(ctx, l); err != nil {
		return err
	}
	from, body, err := f.savedSource(s)
	if err != nil {
		return err
	}
	return f.bringUp(ctx, l, s, base, from, body)
}
