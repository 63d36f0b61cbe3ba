package oversight

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

const (
	// executionTime bounds one execution.
	executionTime = 15 * time.Minute
	// leaseTime is how long an executing action belongs to the program that
	// executes it unless that renews the lease.
	leaseTime = 30 * time.Second
	// sweepTime is how long it takes at most, on an idle server, until people see
	// that an action was changed in the database.
	sweepTime = time.Minute
	// shutdownGrace is how long an execution may go on while the program stops.
	shutdownGrace = 5 * time.Second
)

// Recover moves the actions that a stopped program left executing to [Unknown], or
// to what their [Recoverer] says. It is called once before [Gate.Run]. With alone no
// other program executes actions of the same database, so that leases are ignored.
func (g *Gate) Recover(ctx context.Context, alone bool) error {
	now := time.Now()
	before := store.Time(now)
	if alone {
		before = 1<<63 - 1
	}
	for {
		var n int
		err := g.db.Update(ctx, func(tx *store.Tx) (err error) {
			n, err = g.recoverSome(ctx, tx, before, alone)
			return err
		})
		if err != nil || n < g.page { // recovered ones are no longer executing, so the next page has others
			return err
		}
	}
}

// recoverSome recovers a page of the actions whose lease ended before a time, and
// returns how many it found.
func (g *Gate) recoverSome(ctx context.Context, tx *store.Tx, before int64, alone bool) (int, error) {
	as, err := list(ctx, tx, `where state = $1 and lease < $2 order by created_at, id limit $3`, Executing, before, g.page)
	if err != nil {
		return 0, err
	}
	for _, a := range as {
		o := Outcome{State: Unknown, Detail: "the program stopped while this was being executed: it may or may not have happened"}
		if r, ok := g.exec[a.Kind].(Recoverer); ok {
			if o, err = r.Interrupted(ctx, tx, a); err != nil {
				return 0, fmt.Errorf("recover action %s: %w", a.ID, err)
			}
		}
		if err := g.settle(ctx, tx, a, ended{Outcome: o, version: a.Version, left: true, alone: alone}, true); err != nil {
			return 0, err
		}
	}
	return len(as), nil
}

// maxExecuting is how many actions one Run executes at the same time. An executor
// must bound how many of these wait for one slow destination, so that it delays
// nothing else.
const maxExecuting = 32

// An action's payload is in memory while it is executed. The attack: maxExecuting of
// the largest at a time, for a destination that takes minutes, which exhaust the
// machine's memory.
const (
	// maxHeld bounds the payloads larger than smallPayload that one Gate executes at
	// the same time, in bytes. A payload that does not fit waits in the queue, and
	// small ones overtake it.
	maxHeld = 192 << 20
	// smallPayload is the size in bytes up to which a payload is not counted:
	// maxExecuting of them are 32 MB.
	smallPayload = 1 << 20
)

// Run executes approved actions, oldest first and up to maxExecuting at a time, moves
// scheduled ones to pending when their time comes and denies expired ones, until ctx
// is done. It returns when the executions in progress have ended. Several Runs may
// work on one database, also in several programs.
func (g *Gate) Run(ctx context.Context) error {
	slots := make(chan struct{}, maxExecuting)
	swept := time.Now()
	var wg sync.WaitGroup
	defer wg.Wait()
	for ctx.Err() == nil {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		a, release, ok, err := g.next(ctx)
		if ok {
			wg.Go(func() {
				defer func() { <-slots }()
				err := g.carryOut(ctx, a)
				release()
				if err != nil {
					g.log.ErrorContext(ctx, "run action", "action", a.ID, "err", err)
				}
				g.poke() // it may be due again at once, and there is room for a large one
			})
			continue
		}
		<-slots
		if err != nil {
			if ctx.Err() != nil {
				break
			}
			g.log.ErrorContext(ctx, "run action", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-g.wake:
		case <-time.After(time.Second): // what becomes due, and what another program approved
			// Another program may have stopped in the middle of something.
			if err := g.recoverOthers(ctx); err != nil && ctx.Err() == nil {
				g.log.ErrorContext(ctx, "recover actions", "err", err)
			}
			if time.Since(swept) > sweepTime {
				if _, err := g.Sweep(ctx); err != nil && ctx.Err() == nil && !errors.Is(err, ErrStale) {
					g.log.ErrorContext(ctx, "look for changed actions", "err", err)
				}
				swept = time.Now()
			}
		}
	}
	return ctx.Err()
}

// recoverOthers calls [Gate.Recover] if there is something to recover. The check
// takes no lock.
func (g *Gate) recoverOthers(ctx context.Context) error {
	var n int
	err := g.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from action where state = $1 and lease < $2`, []any{Executing, store.Time(time.Now())}, &n)
	})
	if err != nil || n == 0 {
		return err
	}
	if err := g.Recover(ctx, false); err != nil && !errors.Is(err, ErrStale) { // another program recovers them too
		return err
	}
	return nil
}

// RunOne does once what [Gate.Run] does, with at most one execution, and reports
// whether there was one.
func (g *Gate) RunOne(ctx context.Context) (bool, error) {
	a, release, ok, err := g.next(ctx)
	if err != nil || !ok {
		return false, err
	}
	defer release()
	return true, g.carryOut(ctx, a)
}

// maxClaims is how many times in a row another Run may be faster, until this one
// looks again after a while.
const maxClaims = 32

// next moves scheduled and expired actions, then claims the oldest approved one that
// is due and whose payload fits, if there is one. The caller must call release.
func (g *Gate) next(ctx context.Context) (a Action, release func(), ok bool, err error) {
	if err := g.wakeScheduled(ctx); err != nil {
		return Action{}, nil, false, err
	}
	if err := g.expire(ctx); err != nil {
		return Action{}, nil, false, err
	}
	for tries := 0; tries < maxClaims; {
		if a, release, err = g.claim(ctx); errors.Is(err, ErrStale) {
			tries++ // another Run was faster: take the next
		} else if !errors.Is(err, errNotDue) { // that has moved, as a switch or policy stopped it: take the next
			break
		}
	}
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, ErrStale) {
		return Action{}, nil, false, nil // nothing to do
	}
	return a, release, err == nil, err
}

// carryOut executes a claimed action and records the outcome.
func (g *Gate) carryOut(ctx context.Context, a Action) error {
	// From here on a shutdown waits: an effect that has begun must be recorded.
	done, stopping := context.WithoutCancel(ctx), ctx
	ctx, cancel := context.WithTimeout(done, executionTime)
	defer cancel()
	// But it does not wait for the slowest: executors stop what has had no effect yet.
	defer context.AfterFunc(stopping, func() {
		select {
		case <-time.After(shutdownGrace):
			cancel()
		case <-ctx.Done():
		}
	})()
	held := make(chan struct{})
	go func() {
		defer close(held)
		g.hold(ctx, cancel, a)
	}()
	o := g.execute(ctx, a)
	cancel()
	<-held
	record := func(tell bool) error {
		return g.db.UpdateIn(done, a.turn(), func(tx *store.Tx) error {
			if f, ok := g.exec[a.Kind].(Finisher); ok && tell {
				if err := f.Finish(done, tx, a, o); err != nil {
					return err
				}
			}
			return g.settle(done, tx, a, ended{Outcome: o, version: a.Version}, tell)
		})
	}
	err := record(true)
	if err == nil {
		return nil
	}
	// The outcome is recorded even if the executor cannot keep its own records.
	g.log.ErrorContext(done, "finish action", "action", a.ID, "err", err)
	return record(false)
}

// hold renews the lease of an action that is being executed, until ctx is done. If
// the lease is lost, because this program was suspended for so long that another
// recovered the action, it cancels the execution.
func (g *Gate) hold(ctx context.Context, lost context.CancelFunc, a Action) {
	t := time.NewTicker(leaseTime / 6)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		ours := true
		err := g.db.UpdateIn(ctx, a.turn(), func(tx *store.Tx) error {
			now, err := peek(ctx, tx, a.ID)
			if err != nil {
				return err
			}
			_, err = g.advance(ctx, tx, now, held{version: a.Version, now: time.Now()})
			if ours = !errors.Is(err, ErrStale); !ours {
				return nil
			}
			return err
		})
		if err != nil && ctx.Err() == nil {
			g.log.ErrorContext(ctx, "renew lease", "action", a.ID, "err", err)
		}
		if !ours {
			lost()
			return
		}
	}
}

// execute calls the executor of a, with the payload whose digest was approved.
func (g *Gate) execute(ctx context.Context, a Action) Outcome {
	e, ok := g.exec[a.Kind]
	if !ok {
		return Outcome{State: Failed, Detail: fmt.Sprintf("there is no executor for kind %q", a.Kind)}
	}
	if err := a.intact(); err != nil {
		return Outcome{State: Failed, Detail: err.Error()}
	}
	return e.Execute(ctx, a)
}

// expire denies the pending actions that nobody decided on in time.
func (g *Gate) expire(ctx context.Context) error {
	var late []Action
	err := g.db.View(ctx, func(tx *store.Tx) (err error) {
		late, err = list(ctx, tx, `where state = $1 and expires_at > 0 and expires_at <= $2 order by expires_at, id limit 100`, Pending, store.Time(time.Now()))
		return err
	})
	if err != nil {
		return err
	}
	for _, a := range late {
		err := g.db.UpdateIn(ctx, a.turn(), func(tx *store.Tx) error {
			id := a.ID
			a, err := peek(ctx, tx, id) // the list was read in another transaction
			if err == nil {
				a, err = g.advance(ctx, tx, a, timeEnded{time.Now()})
			}
			if doubted, err := g.unlessTrusted(ctx, tx, id, err); doubted || err != nil {
				return err
			}
			return g.refused(ctx, tx, a, audit.ActionExpire)
		})
		if err != nil && !errors.Is(err, ErrStale) { // somebody decided, or another Run was faster
			return err
		}
	}
	return nil
}

// wakeScheduled moves the scheduled actions whose time has come to pending.
func (g *Gate) wakeScheduled(ctx context.Context) error {
	var due []Action
	err := g.db.View(ctx, func(tx *store.Tx) (err error) {
		due, err = list(ctx, tx, `where state = $1 and ask_at <= $2 order by ask_at, id limit 100`, Scheduled, store.Time(time.Now()))
		return err
	})
	if err != nil {
		return err
	}
	for _, a := range due {
		err := g.db.UpdateIn(ctx, a.turn(), func(tx *store.Tx) error {
			id := a.ID
			a, err := peek(ctx, tx, id) // the list was read in another transaction
			if err == nil {
				a, err = g.advance(ctx, tx, a, timeCame{time.Now()})
			}
			if doubted, err := g.unlessTrusted(ctx, tx, id, err); doubted || err != nil {
				return err
			}
			f := audit.Fields{"digest": a.Hex()}
			a.asking(f)
			if err := enter(ctx, tx, system(a), audit.ActionAsk, a, f); err != nil {
				return err
			}
			return g.moved(ctx, tx, a)
		})
		if err != nil && !errors.Is(err, ErrStale) { // it was cancelled or revised, or another Run was faster
			return err
		}
	}
	return nil
}

// due returns the id of the oldest due action, the turn in which it moves, and how many bytes of g.held were
// acquired for its payload: none for a small one. It never blocks. A large payload
// that does not fit is overtaken by small ones only, so that it has its turn when
// the executions in progress end.
func (g *Gate) due(ctx context.Context, now time.Time) (id string, turn store.Turn, taken int64, err error) {
	var project, inbox string
	var size int64
	err = g.db.Peek(ctx, `select id, project_id, inbox_id, length(payload) from action where state = $1 and not_before <= $2 order by created_at, id limit 1`,
		[]any{Approved, store.Time(now)}, &id, &project, &inbox, &size)
	if err == nil && size > smallPayload {
		if size = min(size, g.room); g.held.TryAcquire(size) {
			return id, Turn(project, inbox), size, nil
		}
		err = g.db.Peek(ctx, `select id, project_id, inbox_id from action where state = $1 and not_before <= $2 and length(payload) <= $3 order by created_at, id limit 1`,
			[]any{Approved, store.Time(now), smallPayload}, &id, &project, &inbox)
	}
	return id, Turn(project, inbox), 0, err
}

// errNotDue means that the action which was due has moved and is not executed.
var errNotDue = errors.New("the action is no longer due")

// claim marks the next due action as executing, before any effect.
func (g *Gate) claim(ctx context.Context) (a Action, release func(), err error) {
	id, turn, taken, err := g.due(ctx, time.Now())
	if err != nil {
		return Action{}, nil, err
	}
	release = func() { g.held.Release(taken) }
	moved := false
	err = g.db.UpdateIn(ctx, turn, func(tx *store.Tx) error {
		now := time.Now()
		moved = false
		a, err = scanOne(tx.QueryRowContext(ctx, `select `+columns+`, payload from action where id = $1`, id).Scan)
		if err != nil {
			return err
		}
		e := claimed{answer: answer{now: now}}
		if e.stop, err = g.stop(ctx, tx, a.Project, a.Inbox, a.Request); err != nil {
			return err
		}
		if err := g.rejudge(ctx, tx, a, &e); err != nil {
			return err
		}
		a, err = g.claimParts(ctx, tx, a, e)
		if doubted, err := g.unlessTrusted(ctx, tx, id, err); doubted || err != nil {
			moved = doubted
			return err
		}
		switch a.State {
		case Pending:
			moved = true
			f := audit.Fields{"rule": a.Rule, "verdict": a.Verdict, "digest": a.Hex()}
			a.asking(f)
			if err := enter(ctx, tx, system(a), audit.ActionAsk, a, f); err != nil {
				return err
			}
			return g.moved(ctx, tx, a)
		case Denied, Failed:
			moved = true
			return g.refused(ctx, tx, a, audit.ActionStop)
		case Executing, Scheduled, Approved, Done, Unknown, Cancelled:
		}
		// An action that waits is claimed again and again with the same result. The
		// attack: a thousand mails to a slow destination, which fill the audit until
		// nobody reads it. So its entry is written by [Gate.Begin], when it begins.
		if a.waits {
			return nil
		}
		if err := executes(ctx, tx, a); err != nil {
			return err
		}
		return g.moved(ctx, tx, a)
	})
	if err == nil && moved {
		err = errNotDue
	}
	if err != nil {
		release()
		return Action{}, nil, err
	}
	return a, release, nil
}

// claimParts applies e to a unless one of its parts is in an earlier state than when
// it was put back for a retry.
func (g *Gate) claimParts(ctx context.Context, tx *store.Tx, a Action, e event) (Action, error) {
	now, err := g.parts(ctx, tx, &a)
	if err != nil {
		return a, err
	}
	if !goOn(a.parts, now) {
		return a, &doubtError{"a recipient who had received it is waiting again in the database"}
	}
	return g.advance(ctx, tx, a, e)
}

// rejudge puts a new verdict into e if a rule approved a, not a person, and its
// executor is a [Refresher].
func (g *Gate) rejudge(ctx context.Context, tx *store.Tx, a Action, e *claimed) (err error) {
	r, ok := g.exec[a.Kind].(Refresher)
	if !ok || a.Decider != "" || e.stop != "" {
		return nil
	}
	e.judge = true
	if e.request, err = r.Refresh(ctx, tx, a); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("refresh action %s: %w", a.ID, err)
		}
		// A person decides, so that one such action does not block the queue.
		g.log.ErrorContext(ctx, "refresh action", "action", a.ID, "err", err)
		e.request, e.verdict = a.Request, policy.Verdict{Effect: policy.Ask, Reason: "what has changed since it was proposed is not known: a person decides"}
		return nil
	}
	e.request.Time = stored(e.now)
	if e.verdict, err = g.judge.Judge(ctx, tx, a.Project, e.request); err != nil {
		return fmt.Errorf("judge action %s: %w", a.ID, err)
	}
	return nil
}

// executes records that an execution of a begins.
func executes(ctx context.Context, tx *store.Tx, a Action) error {
	return enter(ctx, tx, system(a), audit.ActionExecute, a, audit.Fields{"attempt": strconv.FormatInt(a.Attempts, 10), "digest": a.Hex()})
}

// Begin checks that the execution of a may go on, and records that it began if it
// had only waited so far. It returns [ErrStopped] if a kill switch stops a, and
// [ErrStale] if another program has recovered it. An executor calls it in every
// transaction that makes its intent durable, before each part of its effect.
func (g *Gate) Begin(ctx context.Context, tx *store.Tx, a Action) error {
	now, err := peek(ctx, tx, a.ID)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	e := begun{version: a.Version}
	if e.stop, err = g.stop(ctx, tx, now.Project, now.Inbox, now.Request); err != nil {
		return err
	}
	waited := now.waits
	if now, err = g.advance(ctx, tx, now, e); err != nil {
		return fmt.Errorf("begin action %s: %w", a.ID, err)
	}
	if !waited {
		return nil
	}
	return executes(ctx, tx, now)
}

// settle records the outcome of an execution, and notifies the executor if tell.
func (g *Gate) settle(ctx context.Context, tx *store.Tx, claimed Action, o ended, tell bool) error {
	before, err := peek(ctx, tx, claimed.ID)
	if err != nil {
		return fmt.Errorf("settle: %w", err)
	}
	o.now = time.Now()
	if o.State == Approved {
		if o.stop, err = g.stop(ctx, tx, before.Project, before.Inbox, before.Request); err != nil {
			return err
		}
	}
	a, err := g.advance(ctx, tx, before, o)
	if d, ok := errors.AsType[*doubtError](err); ok {
		// The effect has happened and is recorded. Whether it was the approved one, a
		// person finds out.
		return g.distrust(ctx, tx, before.ID, d.why, string(o.State)+": "+o.Detail)
	}
	if err != nil {
		return fmt.Errorf("settle action %s: %w", before.ID, err)
	}
	if a.State == Approved {
		if err := g.noteParts(ctx, tx, &a); err != nil {
			return err
		}
	}
	free := a.waits && a.State == Approved
	if before.waits && !free { // its executor began without calling Begin
		if err := executes(ctx, tx, before); err != nil {
			return err
		}
	}
	var verb audit.Verb
	switch {
	case free && before.waits && before.Result == a.Result:
		return nil // the audit has the entry that it waits
	case free:
		verb = audit.ActionDefer
	case a.State == Approved:
		verb = audit.ActionRetry
	case o.State == Approved:
		return g.refused(ctx, tx, a, audit.ActionStop)
	case a.State == Done:
		verb = audit.ActionDone
	case a.State == Failed:
		verb = audit.ActionFailed
	default:
		verb = audit.ActionUnknown
	}
	if err := enter(ctx, tx, system(a), verb, a, audit.Fields{"result": a.Result}); err != nil {
		return err
	}
	if !tell || free { // it is approved, as before it was claimed
		return nil
	}
	return g.moved(ctx, tx, a)
}

// system returns the principal of the gate itself in a's project.
func system(a Action) auth.Principal {
	return auth.Principal{Kind: auth.System, ID: "gate", Project: a.Project}
}

// poke wakes one Run, if it sleeps.
func (g *Gate) poke() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}
