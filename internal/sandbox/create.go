package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/tracing"
)

// A Request asks for a sandbox.
type Request struct {
	Template string            // its ID
	Asked    string            // what the creator named, see [Info.Asked]; empty means Template
	Snapshot string            // ID of a snapshot of the same template to start from; empty means the template itself
	Metadata map[string]string // at most 100 entries and 64 KiB
	EnvVars  map[string]string // at most 100 entries and 64 KiB
	Egress   policy.Egress     // where it may connect, within the project's ceiling
	Inbox    string            // ID of the inbox it may propose mail for, or empty
	InboxKey auth.Secret       // credential that lets the sandbox read Inbox; empty means it cannot
	Options  Options

	// Contract is the contract that binds the sandbox, "name@sha256:…". Empty means none.
	// Nobody can reach a bound sandbox before Prepare has confined it, see [Fleet.Confine].
	Contract  string
	CPUs      float64 // cores; 0 means the template's
	MemoryMB  int64   // mebibytes; 0 means the template's
	Processes int64   // processes and threads; 0 means the server's
	// Prepare is called once the guest is initialised, before anybody else can reach the
	// sandbox. Its error ends the creation. It may be nil.
	Prepare func(ctx context.Context, s Info) error
}

// A LoanError means that a sandbox cannot have the inbox key of the request.
type LoanError struct{ Err error }

// Error implements error.
func (e *LoanError) Error() string { return "lend inbox: " + e.Err.Error() }

// Unwrap returns the reason.
func (e *LoanError) Unwrap() error { return e.Err }

// errNoInboxes is the reason on a server without inboxes.
var errNoInboxes = fmt.Errorf("%w: this server has no inboxes", ErrInvalid)

// CheckTimeout returns an error that wraps [ErrInvalid] unless d is a valid
// lifetime for a sandbox.
func (f *Fleet) CheckTimeout(d time.Duration) error {
	if d <= 0 {
		return fmt.Errorf("%w: timeout must be greater than 0", ErrInvalid)
	}
	if d > f.conf.MaxTimeout {
		return fmt.Errorf("%w: timeout is %d s; at most %d s are allowed", ErrInvalid, int64(d.Seconds()), int64(f.conf.MaxTimeout.Seconds()))
	}
	return nil
}

// check checks the fields of r that depend on nothing else.
func (f *Fleet) check(r Request) error {
	if err := f.CheckTimeout(r.Options.Timeout); err != nil {
		return err
	}
	switch o := r.Options; {
	case o.FilesOnly && !o.AutoPause:
		return fmt.Errorf("%w: autoPauseMemory: false needs autoPause", ErrInvalid)
	case o.FilesOnly && o.AutoResume:
		return fmt.Errorf("%w: autoResume: traffic does not resume a sandbox that was paused without its memory; set autoPauseMemory to true", ErrInvalid)
	case o.AutoResume && !o.AutoPause:
		return fmt.Errorf("%w: autoResume: needs autoPause", ErrInvalid)
	}
	if len(r.Options.Volumes) > 0 && f.conf.Mount == nil {
		return fmt.Errorf("%w: volumeMounts: this server has no volumes", ErrInvalid)
	}
	if err := checkMap("metadata", r.Metadata); err != nil {
		return err
	}
	for _, k := range slices.Sorted(maps.Keys(r.EnvVars)) {
		// The guest checks this too, but its error does not name the field.
		if k == "" || strings.Contains(k, "=") {
			return fmt.Errorf("%w: envVars: %q is not a name of an environment variable", ErrInvalid, k)
		}
	}
	return checkMap("envVars", r.EnvVars)
}

// checkContract checks the limits of a request and, if a contract binds the sandbox, refuses
// options that a bound sandbox cannot have. Among them are those that would make it boot
// again, because a boot loses the view of files.
func (f *Fleet) checkContract(r Request, base Base) error {
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, a...))
	}
	cpus, memory := max(base.CPUs, f.conf.CPUs), max(base.MemoryMB, f.conf.MemoryMB)
	switch {
	case r.CPUs < 0 || r.CPUs > cpus:
		return bad("limits.cpus is %v; a sandbox of this template has at most %v", r.CPUs, cpus)
	case r.MemoryMB < 0 || r.MemoryMB > memory:
		return bad("limits.memory is %d MiB; a sandbox of this template has at most %d", r.MemoryMB, memory)
	case r.Processes < 0 || r.Processes > f.conf.Processes:
		return bad("limits.processes is %d; a sandbox has at most %d", r.Processes, f.conf.Processes)
	case r.Contract == "":
		return nil
	case len(r.Contract) > 256:
		return bad("contract: its name and digest have more than 256 bytes")
	case r.Prepare == nil:
		return bad("contract: nothing would confine the sandbox")
	case r.Options.FilesOnly:
		return bad("autoPauseMemory: a sandbox that a contract binds must keep its memory in a pause")
	case len(r.Options.Volumes) > 0:
		return bad("volumeMounts: a sandbox that a contract binds cannot have volumes")
	case r.Snapshot != "":
		return bad("templateID: a sandbox that a contract binds must start from a template, not from a snapshot")
	case r.InboxKey != "":
		return bad("inbox key: a sandbox that a contract binds can propose mail, but cannot read it")
	}
	return nil
}

// checkMap checks the limits of metadata and environments.
func checkMap(field string, m map[string]string) error {
	size := 0
	for _, k := range slices.Sorted(maps.Keys(m)) {
		v := m[k]
		if slices.Contains([]byte(k+v), 0) {
			return fmt.Errorf("%w: %s[%q] holds a NUL byte", ErrInvalid, field, k)
		}
		size += len(k) + len(v)
	}
	if len(m) > 100 || size > 64<<10 {
		return fmt.Errorf("%w: %s has %d entries and %d bytes; at most 100 entries and 65536 bytes are allowed", ErrInvalid, field, len(m), size)
	}
	return nil
}

// checkAttachments returns an error unless who's project has the volumes of r and
// what its network rules name, and the inbox key of r opens its inbox. It starts nothing.
func (f *Fleet) checkAttachments(ctx context.Context, who auth.Principal, r Request) error {
	if len(r.Options.Volumes) > 0 && f.conf.CheckVolumes != nil {
		if err := f.conf.CheckVolumes(ctx, who.Project, r.Options.Volumes); err != nil {
			return err
		}
	}
	if f.conf.CheckEgress != nil {
		if err := f.conf.CheckEgress(ctx, who, r.Egress); err != nil {
			return err
		}
	}
	if r.InboxKey == "" {
		return nil
	}
	if f.conf.Inboxes == nil {
		return &LoanError{errNoInboxes}
	}
	sandbox := auth.Principal{Kind: auth.Sandbox, ID: "new", Project: who.Project, Inbox: r.Inbox}
	if err := f.conf.Inboxes.CheckLoan(ctx, sandbox, r.InboxKey); err != nil {
		return &LoanError{err}
	}
	return nil
}

// Create makes a sandbox for who's project and returns when its guest answers.
// If any step fails, everything that the earlier steps did is undone: nothing
// runs, no volume is mounted and no inbox is lent. The row stays, with the reason.
func (f *Fleet) Create(ctx context.Context, who auth.Principal, r Request) (Info, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Info{}, err
	}
	if err := f.mayCreate(who, r); err != nil {
		return Info{}, err
	}
	if err := f.check(r); err != nil {
		return Info{}, err
	}
	if err := f.checkAttachments(ctx, who, r); err != nil {
		return Info{}, err
	}
	base, err := f.base(ctx, r.Template)
	if err != nil {
		return Info{}, err
	}
	// The limit is checked again with the insert. Without this first check a
	// refused request would cost a pooled sandbox, and a restore to replace it.
	if err := f.db.View(ctx, func(tx *store.Tx) error { return f.rows.roomToRun(ctx, tx) }); err != nil {
		return Info{}, fmt.Errorf("create sandbox: %w", err)
	}
	if err := f.checkContract(r, base); err != nil {
		return Info{}, err
	}
	c := creation{
		base: base, body: initBody{EnvVars: environment(r.EnvVars), still: r.Contract != ""}, inboxKey: r.InboxKey,
		info: Info{
			ID: newID(), Project: who.Project, Template: r.Template, Asked: or(r.Asked, r.Template), State: Creating, Metadata: r.Metadata, Inbox: r.Inbox, Egress: r.Egress,
			Options: r.Options, Execution: newExecution(),
			CPUs: or(r.CPUs, base.CPUs), MemoryMB: or(r.MemoryMB, base.MemoryMB), DiskMB: base.DiskMB, Started: time.Now(), Contract: r.Contract,
		},
		prepare: r.Prepare, processes: r.Processes,
	}
	switch {
	case r.Snapshot != "":
		n, err := f.snapshot(ctx, who, r.Snapshot)
		if err != nil {
			return Info{}, err
		}
		c.from = source{dir: f.dir(n.ID), channel: n.Sandbox}
		c.info.CPUs, c.info.MemoryMB, c.info.DiskMB = n.cpus, n.memoryMB, n.diskMB
	case len(r.Options.Volumes) > 0:
		// Boot. Memory can be restored only with the mounts that it was saved with,
		// and neither the template's snapshot nor a pooled sandbox has volumes.
	case c.info.CPUs != base.CPUs || c.info.MemoryMB != base.MemoryMB:
		// Pooled sandboxes have the template's CPUs and memory.
		c.from = f.templates.source(r.Template, base)
	default:
		if c.warm = f.pool.take(base.Key, c.info.Asked); c.warm != nil {
			c.info.ID = c.warm.live.id
		} else {
			c.from = f.templates.source(r.Template, base)
		}
	}
	tracing.About(ctx, c.info.Project, c.info.ID)
	return f.create(ctx, who, c)
}

// environment returns env, or an empty map for nil. The guest takes nil as "keep
// the environment of the snapshot".
func environment(env map[string]string) map[string]string {
	if env == nil {
		return map[string]string{}
	}
	return env
}

// over returns the variables of lower and env, of which env wins.
func over(lower, env map[string]string) map[string]string {
	out := environment(maps.Clone(lower))
	maps.Copy(out, env)
	return out
}

// A creation is a sandbox to be created, and what it is made from.
type creation struct {
	info      Info // in state Creating
	base      Base
	from      source       // if warm is nil
	warm      *warmSandbox // a pooled sandbox, claimed; or nil
	body      initBody
	copyOf    string                                  // the sandbox whose environment is in body; empty means that the creator asked for it
	inboxKey  auth.Secret                             // lent to the sandbox; empty means none
	prepare   func(ctx context.Context, s Info) error // see [Request.Prepare]; may be nil
	processes int64                                   // see [Request.Processes]
}

// A source is what a sandbox is started from. The zero source is a boot.
type source struct {
	dir      string // of a snapshot
	channel  string // the sandbox whose channel key the guest in the snapshot has
	files    bool   // the snapshot holds files only, so the guest boots
	template bool   // the snapshot is its template's own
}

// create records a sandbox and brings it up. After the row has been written, a
// failure of any step ends in finish, which undoes all of them.
func (f *Fleet) create(caller context.Context, who auth.Principal, c creation) (_ Info, err error) {
	s := c.info
	s.Ends = s.Started.Add(f.conf.StartTimeout)
	var ctx context.Context // of a pooled sandbox: from when it was restored
	var l *liveSandbox
	if c.warm != nil {
		ctx, l = tracing.Of(c.warm.ctx, caller), c.warm.live
	} else if ctx, l, err = f.claim(caller, s.ID); err != nil {
		return Info{}, err
	}
	defer f.release(l)
	// A caller that disconnects would never learn the ID, so its request is given up.
	stop := context.AfterFunc(caller, l.cancel)
	defer stop()
	_, end := tracing.Begin(ctx, "insert row")
	err = f.rows.insert(ctx, who, s)
	end(err)
	if err != nil {
		err = errors.Join(err, f.takeDown(context.WithoutCancel(ctx), l))
		if errors.Is(err, ErrNoTemplate) { // its snapshot may have been begun for this sandbox
			err = errors.Join(err, f.ForgetTemplate(context.WithoutCancel(ctx), s.Template))
		}
		return Info{}, err
	}
	if f.conf.Environment != nil && c.body.EnvVars != nil {
		c.body.EnvVars, err = f.conf.Environment(ctx, s, c.copyOf, c.body.EnvVars)
	}
	if c.body.EnvVars != nil {
		// After Environment, which fills placeholders in: those of a template that
		// another project has published must not be filled.
		c.body.EnvVars = over(c.base.Env, c.body.EnvVars)
	}
	if err == nil {
		err = f.bringUpNew(ctx, l, s, c)
	}
	if err == nil && c.prepare != nil {
		err = f.prepare(ctx, l, s, c)
	}
	if err == nil && c.inboxKey != "" {
		err = f.lend(ctx, who, s, c.inboxKey)
	}
	if err == nil {
		s.Started = time.Now().UTC().Truncate(time.Microsecond)
		s.Ends = s.Started.Add(s.Options.Timeout)
		_, end := tracing.Begin(ctx, "record as running")
		err = f.rows.record(ctx, who, &s, change{
			from: []State{Creating}, to: Running, verb: audit.SandboxRunning, event: event.Created, fields: audit.Fields{"ends": s.Ends.Format(time.RFC3339)},
		})
		end(err)
	}
	if err != nil {
		err = fmt.Errorf("start sandbox %s: %w", s.ID, err)
		// The caller may be gone; the undo must not end with its context.
		return Info{}, errors.Join(err, f.finish(context.WithoutCancel(ctx), l, system(s), s, Failed, err.Error()))
	}
	f.setReady(l, true)
	return s, nil
}

// prepare calls [Request.Prepare], and checks that a bound sandbox is confined afterwards.
func (f *Fleet) prepare(ctx context.Context, l *liveSandbox, s Info, c creation) error {
	ctx, done := f.untilDeath(ctx, l)
	defer done()
	f.mu.Lock()
	l.processes = c.processes
	f.mu.Unlock()
	ctx, end := tracing.Begin(ctx, "prepare")
	err := c.prepare(ctx, s)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w (%w)", context.Cause(ctx), err)
	}
	end(err)
	if err == nil {
		err = f.stillConfined(ctx, s)
	}
	return err
}

// bringUpNew starts the machine's part of a new sandbox in the fastest way that
// works: a pooled sandbox, the template's snapshot, a boot.
func (f *Fleet) bringUpNew(ctx context.Context, l *liveSandbox, s Info, c creation) error {
	whole, cancel := context.WithTimeout(ctx, f.conf.StartTimeout)
	defer cancel()
	from := c.from
	if c.warm != nil {
		err := f.handOver(whole, l, s, c.base, c.body)
		if err == nil {
			return nil
		}
		err = errors.Join(err, f.takeDown(context.WithoutCancel(ctx), l))
		f.log.WarnContext(ctx, "hand over a pooled sandbox; starting another", "sandbox", s.ID, "err", err)
		from = f.templates.source(s.Template, c.base)
	}
	if !from.template {
		return f.bringUp(whole, l, s, c.base, from, c.body)
	}
	err := f.bringUpFast(whole, l, s, c.base, from, c.body)
	if err == nil || whole.Err() != nil {
		return err
	}
	// The template's snapshot only saves time. A sandbox can do without it.
	err = errors.Join(err, f.takeDown(ctx, l))
	f.log.WarnContext(ctx, "start from a template's snapshot; booting instead", "sandbox", s.ID, "err", err)
	f.templates.drop(ctx, c.base.Key)
	return f.bringUp(whole, l, s, c.base, source{}, c.body)
}

// lend lets a claimed sandbox read its inbox. The claim excludes that the sandbox
// ends in between, so its end always comes later and returns the loan.
func (f *Fleet) lend(ctx context.Context, who auth.Principal, s Info, key auth.Secret) error {
	if f.conf.Inboxes == nil {
		return &LoanError{errNoInboxes}
	}
	if err := f.conf.Inboxes.Lend(ctx, who, s.Principal(), key); err != nil {
		return &LoanError{err}
	}
	return nil
}
