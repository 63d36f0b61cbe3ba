package run

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/command"
	"postern/internal/contract"
	"postern/internal/leak"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// The reasons for which a run is stopped, as the causes of its worker's context.
var (
	errCancelled  = errors.New("it was cancelled")
	errTime       = errors.New("its time was over")
	errOvertime   = errors.New("the time of a command was over")
	errOutput     = errors.New("it wrote more output than its contract allows")
	errDisk       = errors.New("it wrote more to its disk than its contract allows")
	errMemory     = errors.New("it used more memory than its contract allows")
	errUnrecorded = errors.New("the record of what it started is incomplete")
	errStopped    = errors.New("a process could not be ended")
)

const (
	sampleTime  = 500 * time.Millisecond // between measurements of a run's sandbox
	outputTime  = time.Second            // between events about output
	collectTime = 10 * time.Minute       // for files and teardown, after the time of the commands
	killTime    = 30 * time.Second       // for the end of processes, and of the sandbox
	tailSize    = 64 << 10               // of standard output and error that is kept in memory
	defaultTail = 2 << 10                // of standard error that is shown

	limitMemory = "memory"
	outOfMemory = "out of memory" // as the guest and [sandbox.Runtime] say it
)

// A worker performs one run.
type worker struct {
	s      *Service
	box    sandbox.Info
	limits contract.Limits
	stop   context.CancelCauseFunc

	mu sync.Mutex // guards what follows
	r  Run
	ev Evidence

	last time.Time // newest event about output
	base int64     // bytes on the sandbox's disk before the first command
}

// perform performs a run that this program has claimed, from its sandbox to its report.
// If ctx ends because the server stops, the run stays as it is in the database:
// [Service.Recover] ends it as lost.
func (s *Service) perform(server context.Context, r Run) {
	ctx, stop := context.WithCancelCause(server)
	defer stop(nil)
	s.mu.Lock()
	s.live[r.ID] = stop
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.live, r.ID)
	}()
	w := &worker{s: s, limits: r.Contract.Limited(), stop: stop, r: r, ev: Evidence{Complete: true}}
	outcome, why := w.run(ctx)
	if server.Err() != nil {
		return
	}
	// The clean-up must not end with the run's context.
	done, cancel := context.WithTimeout(context.WithoutCancel(ctx), collectTime)
	defer cancel()
	if err := w.finish(done, outcome, why); err != nil {
		s.log.ErrorContext(done, "end run", "run", r.ID, "err", err)
	}
}

// stop ends the work on a run, if this program performs it.
func (s *Service) stop(id string, why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if end, ok := s.live[id]; ok {
		end(why)
	}
}

// ended returns the outcome of a run whose context has ended.
func ended(ctx context.Context) (Outcome, string) {
	why := context.Cause(ctx)
	switch {
	case errors.Is(why, errCancelled):
		return Cancelled, "it was cancelled"
	case errors.Is(why, errTime), errors.Is(why, errOvertime):
		return TimedOut, why.Error()
	case errors.Is(why, errOutput), errors.Is(why, errDisk), errors.Is(why, errMemory):
		return Violated, why.Error()
	case errors.Is(why, errUnrecorded), errors.Is(why, errStopped):
		return Lost, why.Error()
	}
	return Lost, "the server stopped while it ran"
}

// run makes the sandbox and runs the commands.
func (w *worker) run(ctx context.Context) (Outcome, string) {
	if err := w.create(ctx); err != nil {
		if ctx.Err() != nil {
			return ended(ctx)
		}
		w.s.log.WarnContext(ctx, "make sandbox of a run", "run", w.r.ID, "err", err)
		return Failed, "its sandbox could not be made: " + bounded(err.Error(), 500)
	}
	w.mu.Lock()
	w.r.Started = time.Now()
	err := w.s.moved(ctx, &w.r, Running, audit.RunStart, "its commands run")
	w.mu.Unlock()
	if err != nil {
		return w.broken(ctx, err)
	}
	over := time.AfterFunc(time.Duration(w.limits.Time), func() {
		w.reached(ctx, "time", time.Duration(w.limits.Time).Microseconds(), time.Duration(w.limits.Time).Microseconds())
		w.stop(errTime)
	})
	defer over.Stop()
	watch, end := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		w.watch(watch)
	}()
	defer func() {
		end()
		<-watched
	}()
	outcome, why := Succeeded, ""
	for i := range w.r.Commands {
		code, failed, err := w.command(ctx, i)
		if err != nil && ctx.Err() == nil {
			return w.broken(ctx, err)
		}
		if ctx.Err() != nil {
			return ended(ctx)
		}
		if failed == "" {
			continue
		}
		outcome, why = Failed, fmt.Sprintf("command %d %s", i+1, failed)
		if code == nil || w.r.Contract.OnFailure.Exit != "continue" {
			break
		}
	}
	return outcome, why
}

// broken returns the outcome of a run whose records could not be written, or whose
// sandbox has failed.
func (w *worker) broken(ctx context.Context, err error) (Outcome, string) {
	if ctx.Err() != nil {
		return ended(ctx)
	}
	w.s.log.ErrorContext(ctx, "perform run", "run", w.r.ID, "err", err)
	if w.endedForMemory(ctx) {
		w.starved(ctx)
		err = fmt.Errorf("its sandbox was ended: %s; limits.memory is %s", outOfMemory, w.limits.Memory)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ev.Complete = false
	return Lost, "the server could not continue it: " + bounded(err.Error(), 300)
}

// create creates the sandbox, bound and confined, and copies the inputs into it.
func (w *worker) create(ctx context.Context) error {
	if err := w.s.checkApproved(ctx, &w.r); err != nil {
		return err
	}
	c, who := w.r.Contract, w.r.itself()
	id, image, err := w.s.template(ctx, who, c)
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	// The attack: the template's name is moved to another build after the review.
	if id != w.r.template {
		return fmt.Errorf("template: %s has another build than the one that was reviewed: propose the run again", cmp.Or(c.Template, "base"))
	}
	w.mu.Lock()
	w.r.template, w.ev.Template, w.ev.Image = id, id, image
	w.ev.Operator = w.s.opened()
	w.mu.Unlock()
	req, err := w.s.request(ctx, who, c, w.limits)
	if err != nil {
		return err
	}
	req.Template = id
	req.Metadata = map[string]string{metadataRun: w.r.ID, metadataContract: c.Name}
	req.Options.Timeout = min(time.Duration(w.limits.Time)+collectTime, w.s.conf.Longest)
	req.Options.Traffic.Closed = true
	req.Prepare = func(ctx context.Context, box sandbox.Info) error {
		w.box = box
		w.mu.Lock()
		w.r.Sandbox = box.ID
		// Record the sandbox before anything can start in it, so that it is found after a
		// crash.
		err := w.s.save(ctx, &w.r, Event{})
		w.mu.Unlock()
		if err != nil {
			return err
		}
		if err := w.s.confine(ctx, box.ID, c, w.stop, w.violated(context.WithoutCancel(ctx))); err != nil {
			return err
		}
		w.mu.Lock()
		w.ev.Traced, w.ev.Confined = true, time.Now()
		w.mu.Unlock()
		return w.putInputs(ctx, box.ID)
	}
	box, err := w.s.conf.Fleet.Create(ctx, who, req)
	if err != nil {
		return err
	}
	w.box = box
	// What the program inside opened until now, to make the view, counts as its own. Without
	// this a late report of it would count as the run's.
	if err := w.s.conf.Fleet.Settle(ctx, box.ID); err != nil {
		return err
	}
	// Nor did the run write what the template's services and the inputs have put on the disk.
	if u, err := w.measure(ctx); err == nil {
		w.base = u.Disk
	}
	return nil
}

// The metadata keys of sandboxes that are bound by a contract.
const (
	metadataRun      = "postern.run"
	metadataContract = "postern.contract"
)

// request returns the request for a sandbox that c binds.
func (s *Service) request(ctx context.Context, who principal, c *contract.Contract, l contract.Limits) (sandbox.Request, error) {
	req := sandbox.Request{
		Asked: c.Template, Egress: c.Egress(), Contract: c.Name + "@" + c.Digest(),
		CPUs: l.CPUs, MemoryMB: (int64(l.Memory) + 1<<20 - 1) >> 20, Processes: int64(l.Processes),
	}
	if req.Asked == "" {
		req.Asked = "base"
	}
	req.EnvVars = s.conf.Ceiling.Environment(req.Egress.Packages)
	if c.Mail.Inbox != "" {
		if s.conf.Post == nil {
			return req, errors.New("mail.inbox: this server has no inboxes")
		}
		b, err := s.conf.Post.Directory.Find(ctx, who, c.Mail.Inbox)
		if err != nil {
			return req, fmt.Errorf("mail.inbox: %w", err)
		}
		req.Inbox = b.ID
	}
	return req, nil
}

// bind makes c decide what starts in a sandbox.
func (s *Service) bind(id string, c *contract.Contract, stop func(error), violated func(command.Violation)) error {
	return s.conf.Commands.Bind(id, command.Binding{
		Contract: c,
		Kill:     func(ctx context.Context, pid int32) error { return s.conf.Fleet.KillProcess(ctx, id, int(pid)) },
		Stop:     func(reason string) { stop(fmt.Errorf("%w: %s", errStopped, reason)) },
		Violated: violated,
	})
}

// confine restricts a sandbox's view of files and binds the sandbox to c. Nothing but
// the template's programs may have started in it. Until it is bound nothing starts in
// it, so the template's services, which are ended meanwhile, neither restart nor count
// against c.
func (s *Service) confine(ctx context.Context, id string, c *contract.Contract, stop func(error), violated func(command.Violation)) error {
	err := s.conf.Fleet.Confine(ctx, id, sandbox.Confinement{
		Read: slices.Clone(c.Files.Read), Write: slices.Clone(c.Files.Write), Deny: slices.Clone(c.Files.Deny), Dir: c.Dir(), Trace: true, Reads: c.Files.RecordReads,
	})
	if err != nil {
		return err
	}
	// A service may have asked to start a program just before it was ended. An answer that
	// came after the binding would count as the run's violation.
	if err := s.conf.Fleet.Settle(ctx, id); err != nil {
		return err
	}
	return s.bind(id, c, stop, violated)
}

// putInputs copies the inputs into the sandbox. It compares their bytes with the
// approved digests once more. The attack: an input is swapped on the disk between the
// review and the start.
func (w *worker) putInputs(ctx context.Context, id string) error {
	for _, in := range w.r.Inputs {
		b, err := w.s.kept.open(in.Blob, []byte(in.Blob))
		if err != nil {
			return fmt.Errorf("input %.200q: %w", in.Path, err)
		}
		sum := sha256.Sum256(b)
		if hex.EncodeToString(sum[:]) != in.SHA256 || int64(len(b)) != in.Size {
			return fmt.Errorf("input %.200q: is not what was approved", in.Path)
		}
		if err := w.s.conf.Fleet.PutFile(ctx, id, in.Path, bytes.NewReader(b)); err != nil {
			return fmt.Errorf("input %.200q: %w", in.Path, err)
		}
	}
	return nil
}

// violated returns the function that is called for violations of the commands clause.
func (w *worker) violated(ctx context.Context) func(command.Violation) {
	return func(v command.Violation) { w.onViolation(ctx, v) }
}

func (w *worker) onViolation(ctx context.Context, v command.Violation) {
	w.mu.Lock()
	begun := !w.ev.Confined.IsZero()
	w.mu.Unlock()
	if !begun && v.What == command.Refused {
		return // the template's own services, which are being ended
	}
	switch v.What {
	case command.Unrecorded:
		w.mu.Lock()
		w.ev.Complete = false
		w.mu.Unlock()
		w.stop(errUnrecorded)
	case command.Overtime:
		w.reached(ctx, "time", 0, 0)
		w.stop(errOvertime)
	case command.Refused:
		w.mu.Lock()
		first := len(w.ev.Violations) < maxViolations
		if first {
			w.ev.Violations = append(w.ev.Violations, Violation{At: v.Time, Clause: "commands", Text: bounded(v.Text, 500), Rank: ByKernel})
		}
		w.mu.Unlock()
		if first {
			w.event(ctx, Event{Kind: api.RunEventViolation, Text: bounded(v.Text, 500)})
		}
	}
}

// maxViolations bounds the violations that are kept one by one; the record of commands
// has them all.
const maxViolations = 50

// reached records that a limit was reached.
func (w *worker) reached(ctx context.Context, name string, limit, seen int64) {
	w.mu.Lock()
	w.ev.Limits = append(w.ev.Limits, Reached{At: time.Now(), Name: name, Limit: limit, Seen: seen})
	w.mu.Unlock()
	w.event(ctx, Event{Kind: api.RunEventLimit, Text: "the limit on " + name + " was reached", Bytes: seen})
}

// breach records a limit whose breach ends the run.
func (w *worker) breach(ctx context.Context, name string, limit, seen int64, why error) {
	w.mu.Lock()
	w.ev.Violations = append(w.ev.Violations, Violation{At: time.Now(), Clause: "limits", Text: fmt.Sprintf("%s: %d bytes, and the contract allows %d", why, seen, limit), Rank: ByHost, Ended: true})
	w.mu.Unlock()
	w.reached(ctx, name, limit, seen)
	w.stop(why)
}

// event adds an event. If that fails, the run goes on.
func (w *worker) event(ctx context.Context, e Event) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	err := w.s.db.UpdateIn(ctx, store.Thing(w.r.Project, w.r.ID), func(tx *store.Tx) error { return w.s.note(ctx, tx, w.r.ID, e) })
	if err != nil {
		w.s.log.WarnContext(ctx, "record event of a run", "run", w.r.ID, "err", err)
	}
}

// watch measures the sandbox, and checks whether the run was cancelled on another
// server, until ctx ends.
func (w *worker) watch(ctx context.Context) {
	t := time.NewTicker(sampleTime)
	defer t.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if w.sample(ctx); w.over(ctx) {
			return
		}
		if n%4 != 0 {
			continue
		}
		var by string
		if err := w.s.db.Peek(ctx, `select cancelled_by from run where id = $1`, []any{w.r.ID}, &by); err == nil && by != "" {
			w.stop(errCancelled)
			return
		}
	}
}

// errUnmeasured means that this server cannot measure sandboxes.
var errUnmeasured = errors.New("sandboxes are not measured here")

// measure measures the sandbox. A full disk is not a breach: the host's file system adds
// blocks of its own to what the sandbox may write.
func (w *worker) measure(ctx context.Context) (sandbox.Usage, error) {
	if w.s.conf.Usage == nil {
		return sandbox.Usage{}, errUnmeasured
	}
	u, err := w.s.conf.Usage(ctx, w.box.ID)
	if w.box.DiskMB > 0 {
		u.Disk = min(u.Disk, w.box.DiskMB<<20)
	}
	return u, err
}

// sample measures the sandbox once, and reports whether that was possible.
func (w *worker) sample(ctx context.Context) bool {
	u, err := w.measure(ctx)
	if err != nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ev.Usage.add(u, w.base)
	return true
}

// over reports whether what was measured is over a limit, and records the first breach of
// it.
func (w *worker) over(ctx context.Context) bool {
	w.mu.Lock()
	name, limit, seen := w.ev.exceeded(w.limits)
	known := slices.ContainsFunc(w.ev.Limits, func(l Reached) bool { return l.Name == name })
	w.mu.Unlock()
	if name == "" {
		return false
	}
	if !known {
		w.breach(ctx, name, limit, seen, breaches(name))
	}
	return true
}

// breaches returns the reason of the breach of a limit.
func breaches(name string) error {
	switch name {
	case "disk":
		return errDisk
	case limitMemory:
		return errMemory
	}
	return errOutput
}

// starved records that a process was ended for lack of memory. That is no breach: the
// limit was held.
func (w *worker) starved(ctx context.Context) {
	w.mu.Lock()
	known := slices.ContainsFunc(w.ev.Limits, func(l Reached) bool { return l.Name == limitMemory })
	seen := w.ev.Usage.MemoryBytes
	w.mu.Unlock()
	if !known {
		w.reached(ctx, limitMemory, int64(w.limits.Memory), seen)
	}
}

// endedForMemory reports whether the host's kernel has ended the sandbox for lack of
// memory. The fleet notices the end of a sandbox a moment after the calls to it fail.
func (w *worker) endedForMemory(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	for range 20 {
		list, err := w.s.conf.Fleet.List(ctx, w.r.itself(), true)
		if err != nil {
			return false
		}
		i := slices.IndexFunc(list, func(box sandbox.Info) bool { return box.ID == w.box.ID })
		if i < 0 || list[i].State != sandbox.Running {
			return i >= 0 && strings.Contains(list[i].Reason, outOfMemory)
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(100 * time.Millisecond):
		}
	}
	return false
}

// A tail keeps the end of a stream.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if len(t.b) > 2*tailSize {
		t.b = append([]byte(nil), t.b[len(t.b)-tailSize:]...)
	}
	return len(p), nil
}

// text returns at most most bytes of the end as text, without secrets; "…" stands for what
// was cut off, and counts. It masks before it cuts: half of a secret would not be found.
func (t *tail) text(most int) string {
	s := leak.Redact(strings.ReplaceAll(strings.ToValidUTF8(string(t.b), "\uFFFD"), "\x00", "\uFFFD"))
	if len(s) <= most {
		return s
	}
	mark := cutMark
	if most < len(mark) {
		mark = ""
	}
	s = s[len(s)-most+len(mark):]
	for len(s) > 0 && !utf8.RuneStart(s[0]) {
		s = s[1:]
	}
	return mark + s
}

// command runs one command and records it. Failed says how it failed, and is empty if it
// did not.
func (w *worker) command(ctx context.Context, i int) (code *int, failed string, err error) {
	args := w.r.Commands[i]
	w.mu.Lock()
	w.r.Results = append(w.r.Results, Result{Command: args, Started: time.Now()})
	err = w.s.save(ctx, &w.r, Event{Kind: api.RunEventCommand, Command: i + 1, Text: CommandLine(args)})
	w.mu.Unlock()
	if err != nil {
		return nil, "", err
	}
	var stdout, stderr tail
	var out, errs int64
	end, err := w.s.conf.Fleet.RunCommand(ctx, w.box.ID, sandbox.Command{Args: args, Dir: w.r.Contract.Dir()}, func(stream byte, p []byte) error {
		if stream == 'e' {
			errs += int64(len(p))
			_, _ = stderr.Write(p) // it cannot fail
		} else {
			out += int64(len(p))
			_, _ = stdout.Write(p)
		}
		w.mu.Lock()
		w.ev.Usage.OutputBytes += int64(len(p))
		all := w.ev.Usage.OutputBytes
		w.mu.Unlock()
		if all > int64(w.limits.Output) {
			w.breach(ctx, "output", int64(w.limits.Output), all, errOutput)
			return errOutput
		}
		if now := time.Now(); now.Sub(w.last) > outputTime {
			w.last = now
			w.event(ctx, Event{Kind: api.RunEventOutput, Command: i + 1, Bytes: all})
		}
		return nil
	})
	// Record the result even if the run is being ended.
	done, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	res := Result{Command: args, Started: w.r.Results[i].Started, Ended: time.Now(), Signal: end.Signal, Stdout: out, Stderr: errs, Reason: bounded(end.Reason, 500)}
	switch {
	case ctx.Err() != nil:
		_, res.Reason = ended(ctx)
		failed = res.Reason
	case err != nil:
		res.Reason = "it could not be run"
		failed = res.Reason
	case end.PID == 0:
		failed = "was not started: " + res.Reason
	default:
		code = &end.Code
		res.Exit = code
		if end.Code != 0 {
			failed = "ended with exit code " + strconv.Itoa(end.Code)
		}
	}
	if end.Memory {
		w.starved(ctx)
		// The attack on the reader: exit code 137 alone could be anything.
		res.Reason = fmt.Sprintf("%s: a process was ended; limits.memory is %s", outOfMemory, w.limits.Memory)
		if failed != "" && ctx.Err() == nil {
			failed += ", " + res.Reason
		}
	}
	most := int(w.r.Contract.OnFailure.Stderr)
	if most <= 0 {
		most = defaultTail
	}
	res.Tail = stderr.text(min(most, tailSize))
	if w.r.Contract.OnFailure.Output {
		res.Output = stdout.text(tailSize)
	}
	w.mu.Lock()
	w.r.Results[i] = res
	serr := w.s.db.UpdateIn(done, w.r.turn(), func(tx *store.Tx) error {
		c := w.r
		if err := update(done, tx, &c); err != nil {
			return err
		}
		sum := sha256.Sum256([]byte(strings.Join(args, "\x00")))
		f := audit.Fields{
			"n": strconv.Itoa(i + 1), "sha256": hex.EncodeToString(sum[:]), "ms": strconv.FormatInt(res.Ended.Sub(res.Started).Milliseconds(), 10),
			"stdout": strconv.FormatInt(out, 10), "stderr": strconv.FormatInt(errs, 10),
		}
		if code != nil {
			f["exit"] = strconv.Itoa(*code)
		}
		if err := audit.Append(done, tx, system(&c), audit.RunCommand, c.ID, f); err != nil {
			return err
		}
		if err := w.s.note(done, tx, c.ID, Event{Kind: api.RunEventExit, Command: i + 1, ExitCode: code, Bytes: out + errs, Text: failed}); err != nil {
			return err
		}
		w.r.Version = c.Version
		return nil
	})
	w.mu.Unlock()
	if err != nil && ctx.Err() == nil {
		return code, failed, errors.Join(err, serr)
	}
	return code, failed, serr
}

// finish ends what still runs, collects the files, removes the sandbox, and writes the
// outcome and the report.
func (w *worker) finish(ctx context.Context, outcome Outcome, why string) error {
	s := w.s
	box := w.box.ID
	if box != "" {
		kill, cancel := context.WithTimeout(ctx, killTime)
		w.sample(kill) // a short run is measured as well
		err := s.conf.Fleet.KillAll(kill, box)
		// What they opened last may not be on the record yet.
		serr := s.conf.Fleet.Settle(kill, box)
		// The attack: a program writes its last bytes after the last sample. Nothing of it
		// runs now, so this measure has them all.
		final := w.sample(kill) && err == nil
		w.over(kill)
		cancel()
		w.mu.Lock()
		w.ev.Killed, w.ev.Traced, w.ev.Usage.Final = err == nil, w.ev.Traced && serr == nil, final
		w.mu.Unlock()
		if err := errors.Join(err, serr); err != nil {
			s.log.WarnContext(ctx, "end the processes of a run", "run", w.r.ID, "err", err)
		}
		w.examine(ctx)
	}
	w.mu.Lock()
	if outcome == Succeeded && len(w.ev.Violations) > 0 || outcome == Failed && len(w.ev.Violations) > 0 {
		// An attempt to start a program counts even if it was refused.
		v := w.ev.Violations[0]
		outcome, why = Violated, "clause "+v.Clause+": "+v.Text
	}
	if outcome == Lost {
		w.ev.Complete = false
	}
	w.r.evidence, w.r.Outcome, w.r.Reason = w.ev, outcome, bounded(why, 1000)
	err := error(nil)
	if w.r.State == Running {
		w.r.Outcome = "" // not before its end
		err = s.moved(ctx, &w.r, Collecting, audit.RunCollect, "its commands have ended")
		w.r.Outcome = outcome
	}
	w.mu.Unlock()
	if err != nil && box != "" {
		_, _, rerr := s.remove(ctx, &w.r, w.box)
		err = errors.Join(err, rerr)
	}
	if err != nil {
		return err
	}
	if w.r.State == Collecting && s.conf.Exports != nil && w.r.evidence.Killed && outcome != Cancelled {
		err := s.conf.Exports.Collect(ctx, w.r, w.r.evidence)
		switch {
		case err == nil:
		case errors.Is(err, ErrRunFailed) && outcome == Succeeded:
			outcome, why = Failed, err.Error()
		case !errors.Is(err, ErrRunFailed):
			s.log.WarnContext(ctx, "collect the files of a run", "run", w.r.ID, "err", err)
			if outcome == Succeeded {
				outcome, why = Failed, "its files could not be collected"
			}
		}
	}
	keep := time.Duration(w.r.Contract.Teardown.Keep)
	var kept, gone time.Time
	var traces []sandbox.Trace
	if keep > 0 && box != "" && w.r.State == Collecting && outcome != Cancelled && outcome != Lost {
		if err := s.conf.Fleet.Pause(ctx, w.r.itself(), box, false); err == nil {
			kept = time.Now().Add(keep)
		} else {
			s.log.WarnContext(ctx, "keep the sandbox of a run", "run", w.r.ID, "err", err)
		}
	}
	var rerr error
	if kept.IsZero() && box != "" {
		gone, traces, rerr = s.remove(ctx, &w.r, w.box)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ev.Kept, w.ev.Gone, w.ev.Teardown, w.r.kept = kept, gone, traces, kept
	w.r.evidence, w.r.Outcome, w.r.Reason, w.r.Ended = w.ev, outcome, bounded(why, 1000), time.Now()
	if err := s.moved(ctx, &w.r, Ended, audit.RunEnd, w.r.Reason); err != nil {
		return errors.Join(err, rerr)
	}
	s.forget(ctx, &w.r)
	return errors.Join(rerr, s.prove(ctx, w.r))
}

// examine adds the violations that only the records show.
func (w *worker) examine(ctx context.Context) {
	p, ok := w.s.conf.Prover.(interface {
		Violations(ctx context.Context, r Run, e Evidence) ([]Violation, error)
	})
	if !ok {
		return
	}
	w.mu.Lock()
	r, e := w.r, w.ev
	e.Violations = slices.Clone(e.Violations)
	w.mu.Unlock()
	found, err := p.Violations(ctx, r, e)
	if err != nil {
		w.s.log.WarnContext(ctx, "look for violations of a run", "run", w.r.ID, "err", err)
		return
	}
	w.mu.Lock()
	w.ev.Violations = append(w.ev.Violations, found...)
	w.mu.Unlock()
}

// prove writes the report of a run that is over.
func (s *Service) prove(ctx context.Context, r Run) error {
	if s.conf.Prover == nil {
		return nil
	}
	return s.conf.Prover.Prove(ctx, r, r.evidence)
}

// remove ends a sandbox of r, and looks for what it may have left.
func (s *Service) remove(ctx context.Context, r *Run, box sandbox.Info) (gone time.Time, traces []sandbox.Trace, err error) {
	defer s.conf.Commands.Unbind(box.ID)
	for range 3 {
		if err = s.conf.Fleet.Kill(ctx, r.itself(), box.ID); err == nil || errors.Is(err, sandbox.ErrNotFound) {
			err = nil
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
	if err != nil {
		return time.Time{}, nil, fmt.Errorf("remove sandbox of run %s: %w", r.ID, err)
	}
	return time.Now(), s.conf.Fleet.Gone(ctx, box), nil
}
