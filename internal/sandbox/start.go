package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"postern/internal/audit"
	"postern/internal/tracing"
)

// firstShare divides the time of a start. If the guest has not answered after the
// first share and there is another way to start it, the first attempt is given up.
const firstShare = 3

// errSilent means that a guest did not answer within the first share.
var errSilent = errors.New("the guest did not answer within a third of the start's time")

// bringUp starts the machine's part of a sandbox and returns when the guest knows
// its identity. gVisor has had bugs that hang a program inside forever
// (google/gvisor issues 14405, 14408 and 13920). So if the guest does not answer,
// the attempt is ended and repeated once, unless it had an effect that must not
// happen twice. After an error the caller cleans up with takeDown.
func (f *Fleet) bringUp(ctx context.Context, l *liveSandbox, s Info, base Base, from source, body initBody) error {
	ctx, cancel := context.WithTimeout(ctx, f.conf.StartTimeout)
	defer cancel()
	first, decide := f.firstTry(ctx, s, from)
	err := f.bringUpOnce(first, l, s, base, from, body)
	if silent := decide(); !silent || ctx.Err() != nil {
		return err
	}
	if err := f.noteSilence(ctx, s, err); err != nil {
		return err
	}
	if err := f.takeDown(ctx, l); err != nil {
		return err
	}
	return f.bringUpOnce(ctx, l, s, base, from, body)
}

// firstTry returns the context of a first attempt. The context ends after the first
// share of the time if a second attempt is possible. Call decide when the attempt
// has ended; it reports whether a second attempt is needed. In that case the first
// one is dropped even if it answered at the last moment, since its sandbox has been
// muted.
func (f *Fleet) firstTry(ctx context.Context, s Info, from source) (first context.Context, decide func() (silent bool)) {
	first, cancel := context.WithCancelCause(ctx)
	end, _ := ctx.Deadline()
	fired := make(chan struct{})
	t := time.AfterFunc(time.Until(end)/firstShare, func() {
		defer close(fired)
		if f.mayRepeat(s, from) {
			cancel(errSilent)
		}
	})
	return first, func() bool {
		if !t.Stop() {
			<-fired
		}
		cancel(nil)
		return errors.Is(context.Cause(first), errSilent)
	}
}

// mayRepeat reports whether a starting sandbox may be ended and started again. A
// boot and a start from the template's memory have only run what every boot runs.
// But programs in a user's memory continue at once, before the guest answers, and
// must not do anything twice. Such a sandbox may be repeated only if it has no
// volumes and has sent nothing; mayRepeat then drops whatever it sends from now on.
func (f *Fleet) mayRepeat(s Info, from source) bool {
	if from.dir == "" || from.files || from.template {
		return true
	}
	return len(s.Options.Volumes) == 0 && f.network.MuteIfSilent(s.ID)
}

// noteSilence records that a start is repeated, and logs what the abandoned attempt
// was doing.
func (f *Fleet) noteSilence(ctx context.Context, s Info, reason error) error {
	attrs := []any{"sandbox", s.ID, "err", reason}
	if e, ok := f.runtime.(Examiner); ok {
		summary, file := e.Examine(ctx, s.ID)
		attrs = append(attrs, "doing", summary, "evidence", file)
	}
	f.log.WarnContext(ctx, "a sandbox does not answer; it is started again", attrs...)
	if s.Project == "" || s.bench { // without a row
		return nil
	}
	return f.rows.record(ctx, system(s), &s, change{
		from: []State{s.State}, to: s.State, verb: audit.SandboxStartAgain, fields: audit.Fields{"reason": errSilent.Error()},
	})
}

// bringUpFast is bringUp from a template's snapshot. It gives up after the first
// share of the time, since the caller can boot instead.
func (f *Fleet) bringUpFast(ctx context.Context, l *liveSandbox, s Info, base Base, from source, body initBody) error {
	first, decide := f.firstTry(ctx, s, from)
	err := f.bringUpOnce(first, l, s, base, from, body)
	if !decide() || ctx.Err() != nil {
		return err
	}
	return errors.Join(errSilent, err, f.noteSilence(ctx, s, err))
}

// bringUpOnce makes one attempt to start the machine's part of a sandbox.
func (f *Fleet) bringUpOnce(ctx context.Context, l *liveSandbox, s Info, base Base, from source, body initBody) (err error) {
	ctx, done := f.untilDeath(ctx, l)
	defer done()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = fmt.Errorf("%w (%w)", context.Cause(ctx), err)
		}
	}()
	defer f.prepared.begin()()
	spec := f.frame(base, s.CPUs, s.MemoryMB, s.DiskMB)
	spec.Unhurried = s.Project == "" || s.bench // for the pool, a template or a build
	if from.dir != "" && !from.files && !spec.Unhurried && len(s.Options.Volumes) == 0 {
		f.prepared.use(spec)
	}
	f.mu.Lock()
	l.up, l.since, l.mounted, l.traffic = true, time.Now(), len(s.Options.Volumes) > 0, trafficOf(s)
	l.watcher = &watcher{commands: f.conf.Commands}
	l.watcher.setOwner(s)
	spec.Watch = l.watcher
	f.mu.Unlock()
	var mounts []Mount
	for _, v := range s.Options.Volumes {
		m, err := f.conf.Mount(ctx, s.Project, s.ID, v)
		if err != nil {
			return fmt.Errorf("mount volume %s: %w", v.Name, err)
		}
		mounts = append(mounts, m)
	}
	_, end := tracing.Begin(ctx, "attach network")
	link, err := f.network.Attach(ctx, s.Principal(), s.Egress)
	end(err)
	if err != nil {
		return fmt.Errorf("attach network: %w", err)
	}
	// Beside the start: if the server is killed before both are done, the sandbox has
	// not been recorded as running, and the next server removes it.
	kept := make(chan error, 1)
	go func() {
		_, end := tracing.Begin(ctx, "keep link")
		var err error
		if !s.bench { // which is never taken back
			err = f.keepLink(ctx, s.ID)
		}
		end(err)
		kept <- err
	}()
	inner, end := tracing.Begin(ctx, "start runtime")
	spec.ID, spec.Hostname, spec.Link, spec.From, spec.Mounts = s.ID, s.ID, link, from.dir, mounts
	spec.Env = []string{"POSTERN_CHANNEL_SHA256=" + f.channelHash(s.ID)}
	if body.bench {
		spec.Hostname, spec.LargestMB = benchHost, largestStepFile
		spec.Env = append(spec.Env, "POSTERN_BENCH=1", "POSTERN_SERVICES=/dev/null") // services would write files
	}
	err = f.runtime.Start(inner, spec)
	end(err)
	if err != nil {
		err = fmt.Errorf("start runtime: %w", err)
	}
	if kerr := <-kept; err == nil {
		err = kerr
	}
	if err == nil && !s.bench {
		err = f.keepGate(ctx, s.ID)
	}
	if err != nil {
		return err
	}
	f.watch(l)      //nolint:contextcheck // the watch lives as long as the sandbox
	channel := s.ID // a guest that boots has its own channel hash in its environment
	if from.dir != "" && !from.files {
		channel, body.Restored = from.channel, true
	}
	if err := f.initGuest(ctx, s, base, channel, body); err != nil {
		return err
	}
	if !body.Restored && !body.bench && !body.still {
		f.startBooted(ctx, s, base)
	}
	return nil
}
