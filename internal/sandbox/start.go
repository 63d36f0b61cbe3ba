package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"postern/internal/audit"
)

// firstShare is the divisor of a start's time after which the first attempt is
// given up if the guest has not answered and there is another way.
const firstShare = 3

// errSilent means that a guest has not answered in its share of the time.
var errSilent = errors.New("the guest did not answer within a third of the start's time")

// bringUp creates the machine's part of a sandbox, until the guest knows its
// identity, within the time of a start. gVisor has had bugs that hang a program
// inside for ever (google/gvisor issues 14405, 14408 and 13920). So a start without
// an answer is ended and repeated, once, unless it had an effect that must not
// happen twice. If it fails, takeDown cleans up.
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

// firstTry returns the context of a first attempt, which ends after its share of
// the time if a second is possible. Call decide when the attempt has ended: it
// reports whether a second is needed. Then even a first attempt that answered in
// that moment is dropped, since its sandbox is muted.
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
// boot, or a start from the template's memory, has run nothing but what every boot
// runs. In a user's memory programs run on at once, before the guest answers, and
// must not do anything twice. So it must have sent nothing, which mayRepeat then
// enforces, and must have no access to anything that outlives it.
func (f *Fleet) mayRepeat(s Info, from source) bool {
	if from.dir == "" || from.files || from.template {
		return true
	}
	return len(s.Options.Volumes) == 0 && f.network.MuteIfSilent(s.ID)
}

// noteSilence records that a start is tried again, and logs what the abandoned
// attempt was doing.
func (f *Fleet) noteSilence(ctx context.Context, s Info, reason error) error {
	attrs := []any{"sandbox", s.ID, "err", reason}
	if e, ok := f.runtime.(Examiner); ok {
		summary, file := e.Examine(ctx, s.ID)
		attrs = append(attrs, "doing", summary, "evidence", file)
	}
	f.log.WarnContext(ctx, "a sandbox does not answer; it is started again", attrs...)
	if s.Project == "" { // a pooled sandbox, without a row
		return nil
	}
	return f.rows.record(ctx, system(s), &s, change{
		from: []State{s.State}, to: s.State, verb: audit.SandboxStartAgain, fields: audit.Fields{"reason": errSilent.Error()},
	})
}

// bringUpFast is bringUp from a template's snapshot. It waits no longer than its
// share of the time, since the caller can boot instead.
func (f *Fleet) bringUpFast(ctx context.Context, l *liveSandbox, s Info, base Base, from source, body initBody) error {
	first, decide := f.firstTry(ctx, s, from)
	err := f.bringUpOnce(first, l, s, base, from, body)
	if !decide() || ctx.Err() != nil {
		return err
	}
	return errors.Join(errSilent, err, f.noteSilence(ctx, s, err))
}

// bringUpOnce is one attempt of bringUp.
func (f *Fleet) bringUpOnce(ctx context.Context, l *liveSandbox, s Info, base Base, from source, body initBody) (err error) {
	ctx, done := f.untilDeath(ctx, l)
	defer done()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = fmt.Errorf("%w (%w)", context.Cause(ctx), err)
		}
	}()
	f.mu.Lock()
	l.up, l.since, l.mounted, l.traffic = true, time.Now(), len(s.Options.Volumes) > 0, s.Options.Traffic
	f.mu.Unlock()
	var mounts []Mount
	for _, v := range s.Options.Volumes {
		m, err := f.conf.Mount(ctx, s.Project, s.ID, v)
		if err != nil {
			return fmt.Errorf("mount volume %s: %w", v.Name, err)
		}
		mounts = append(mounts, m)
	}
	link, err := f.network.Attach(ctx, s.Principal(), s.Egress)
	if err != nil {
		return fmt.Errorf("attach network: %w", err)
	}
	if err := f.keepLink(ctx, s.ID); err != nil {
		link.Close()
		return err
	}
	err = f.runtime.Start(ctx, Spec{
		ID: s.ID, Rootfs: base.Rootfs, Hostname: s.ID, Link: link, From: from.dir, Mounts: mounts,
		CPUs: s.CPUs, MemoryMB: s.MemoryMB, DiskMB: s.DiskMB, Processes: f.conf.Processes,
		Env: []string{"POSTERN_CHANNEL_SHA256=" + f.channelHash(s.ID)},
	})
	if err != nil {
		return fmt.Errorf("start runtime: %w", err)
	}
	f.watch(l)      //nolint:contextcheck // it lives as long as the sandbox
	channel := s.ID // a guest that boots was told it by its environment
	if from.dir != "" && !from.files {
		channel, body.Restored = from.channel, true
	}
	return f.initGuest(ctx, s, channel, body)
}
