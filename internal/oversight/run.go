package oversight

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

const (
	// executionTime bounds one execution.
	executionTime = 15 * time.Minute
	// leaseTime is how long an executing action belongs to the program that
	// executes it, without a word from it.
	leaseTime = 30 * time.Second
	// shutdownGrace is how long an execution goes on when the program stops.
	shutdownGrace = 5 * time.Second
)

// Recover moves the actions that a program left executing when it stopped to
// [Unknown]. It is called once before [Gate.Run]; alone says that no other
// program executes for the same database, so that no lease need run out first.
func (g *Gate) Recover(ctx context.Context, alone bool) error {
	before := store.Time(time.Now())
	if alone {
		before = 1<<63 - 1
	}
	return g.db.Update(ctx, func(tx *store.Tx) error {
		as, err := list(ctx, tx, `where state = $1 and lease < $2 order by created_at, id`, Executing, before)
		if err != nil {
			return err
		}
		for _, a := range as {
			o := Outcome{State: Unknown, Detail: "the program stopped while this was being executed: it may or may not have happened"}
			if r, ok := g.exec[a.Kind].(Recoverer); ok {
				if o, err = r.Interrupted(ctx, tx, a); err != nil {
					return fmt.Errorf("recover action %s: %w", a.ID, err)
				}
			}
			if err := g.settle(ctx, tx, a, o, true); err != nil {
				return err
			}
		}
		return nil
	})
}

// maxExecuting is how many actions one Run executes at the same time. An
// executor that waits for a slow other end must take far fewer of these for it:
// one bad destination delays nobody else.
const maxExecuting = 32

// An action's payload is in memory for as long as it is executed. The attack:
// as many of the largest as are executed at a time, for a destination that
// takes minutes, and the machine's memory is gone.
const (
	// maxHeld bounds the payloads larger than smallPayload that one Gate
	// executes at the same time, in bytes. What does not fit waits where it is;
	// those that are small do not wait for it.
	maxHeld = 192 << 20
	// smallPayload is how large, in bytes, a payload is that is not counted:
	// maxExecuting of them are few.
	smallPayload = 1 << 20
)

// Run executes approved actions, oldest first and many at a time, and asks
// about scheduled ones, until ctx is done. What is being executed then is
// finished first. Several Runs may work side by side, also in several programs.
func (g *Gate) Run(ctx context.Context) error {
	slots := make(chan struct{}, maxExecuting)
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
		case <-time.After(time.Second): // those whose time comes, and those that another process approved
			// Another program may have stopped in the middle of something.
			if err := g.recoverOthers(ctx); err != nil && ctx.Err() == nil {
				g.log.ErrorContext(ctx, "recover actions", "err", err)
			}
		}
	}
	return ctx.Err()
}

// recoverOthers is [Gate.Recover] where there is something to recover: to look
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

// RunOne asks about the scheduled actions whose time has come, executes the
// oldest approved one that is due, and reports whether there was one.
func (g *Gate) RunOne(ctx context.Context) (bool, error) {
	a, release, ok, err := g.next(ctx)
	if err != nil || !ok {
		return false, err
	}
	defer release()
	return true, g.carryOut(ctx, a)
}

// next asks about the scheduled actions whose time has come and claims the
// oldest approved one that is due and for whose payload there is room, if there
// is one. Its room is given back by release.
func (g *Gate) next(ctx context.Context) (a Action, release func(), ok bool, err error) {
	if err := g.ask(ctx); err != nil {
		return Action{}, nil, false, err
	}
	if err := g.expire(ctx); err != nil {
		return Action{}, nil, false, err
	}
	for {
		// Each that is stopped has moved and is due no more.
		if a, release, err = g.claim(ctx); !errors.Is(err, errElsewhere) {
			break
		}
	}
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, ErrStale) {
		return Action{}, nil, false, nil // nothing to do, or another Run was faster
	}
	return a, release, err == nil, err
}

// carryOut executes a claimed action and records what that brought.
func (g *Gate) carryOut(ctx context.Context, a Action) error {
	// From here on a shutdown waits: an effect that has begun is recorded.
	done, stopping := context.WithoutCancel(ctx), ctx
	ctx, cancel := context.WithTimeout(done, executionTime)
	defer cancel()
	// But not for the slowest: what has had no effect yet is broken off.
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
	if f, ok := g.exec[a.Kind].(Finisher); ok {
		err := g.db.Update(done, func(tx *store.Tx) error {
			if err := f.Finish(done, tx, a, o); err != nil {
				return err
			}
			return g.settle(done, tx, a, o, true)
		})
		if err == nil {
			return nil
		}
		// What happened outside is recorded even where the executor's own
		// records cannot be kept.
		g.log.ErrorContext(done, "finish action", "action", a.ID, "err", err)
		err = g.db.Update(done, func(tx *store.Tx) error { return g.settle(done, tx, a, o, false) })
		return err
	}
	err := g.db.Update(done, func(tx *store.Tx) error { return g.settle(done, tx, a, o, true) })
	if err != nil && !errors.Is(err, ErrStale) {
		err = g.db.Update(done, func(tx *store.Tx) error { return g.settle(done, tx, a, o, false) })
	}
	return err
}

// hold renews the lease of an action that is being executed, until ctx is done.
// Where it has lost it, since this program stood still for so long that another
// took it for dead, it breaks the execution off.
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
		err := g.db.Update(ctx, func(tx *store.Tx) (err error) {
			ours, err = tx.Changed(ctx, `update action set lease = $1 where id = $2 and version = $3 and state = $4`,
				store.Time(time.Now().Add(leaseTime)), a.ID, a.Version, Executing)
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

func (g *Gate) execute(ctx context.Context, a Action) Outcome {
	e, ok := g.exec[a.Kind]
	if !ok {
		return Outcome{State: Failed, Detail: fmt.Sprintf("there is no executor for kind %q", a.Kind)}
	}
	// The attack: a payload changed in the database after it was approved.
	if sum := sha256.Sum256(a.Payload); !bytes.Equal(sum[:], a.Digest) {
		return Outcome{State: Failed, Detail: "the stored payload is not what was approved; nothing was executed"}
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
		why := "nobody decided until " + a.Expires.Format(time.RFC1123)
		err := g.db.Update(ctx, func(tx *store.Tx) error { return g.end(ctx, tx, a, "action.expire", why) })
		if err != nil && !errors.Is(err, ErrStale) { // somebody decided, or another Run was faster
			return err
		}
	}
	return nil
}

// ask moves the scheduled actions whose time has come to pending.
func (g *Gate) ask(ctx context.Context) error {
	var due []Action
	err := g.db.View(ctx, func(tx *store.Tx) (err error) {
		due, err = list(ctx, tx, `where state = $1 and ask_at <= $2 order by ask_at, id limit 100`, Scheduled, store.Time(time.Now()))
		return err
	})
	if err != nil {
		return err
	}
	for _, a := range due {
		err := g.db.Update(ctx, func(tx *store.Tx) error {
			if err := move(ctx, tx, a.ID, a.Version, Scheduled, Pending); err != nil {
				return err
			}
			a.State, a.Version = Pending, a.Version+1
			if err := audit.Append(ctx, tx, system(a), "action.ask", a.ID, audit.Fields{"digest": a.Hex()}); err != nil {
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

// due returns the id of the oldest due action, and how many bytes of room were
// taken for its payload: those that are small need none. It never waits for
// room. A large one that finds none is passed over by small ones alone, so that
// the largest has its turn, too.
func (g *Gate) due(ctx context.Context, tx *store.Tx, now time.Time) (id string, taken int64, err error) {
	var size int64
	err = tx.One(ctx, `select id, length(payload) from action where state = $1 and not_before <= $2 order by created_at, id limit 1`,
		[]any{Approved, store.Time(now)}, &id, &size)
	if err != nil || size <= smallPayload {
		return id, 0, err
	}
	if size = min(size, g.room); g.held.TryAcquire(size) {
		return id, size, nil
	}
	err = tx.One(ctx, `select id from action where state = $1 and not_before <= $2 and length(payload) <= $3 order by created_at, id limit 1`,
		[]any{Approved, store.Time(now), smallPayload}, &id)
	return id, 0, err
}

// errElsewhere means that what was due is not any more: it has moved.
var errElsewhere = errors.New("the action has moved elsewhere")

// claim marks the next due action as executing, before any effect.
func (g *Gate) claim(ctx context.Context) (a Action, release func(), err error) {
	taken := int64(0)
	release = func() { g.held.Release(taken) }
	moved := false
	err = g.db.Update(ctx, func(tx *store.Tx) error {
		now := time.Now()
		moved = false
		var id string
		if id, taken, err = g.due(ctx, tx, now); err != nil {
			return err
		}
		a, err = scanOne(tx.QueryRowContext(ctx, `select `+columns+`, payload from action where id = $1`, id).Scan)
		if err != nil {
			return err
		}
		if s, on, err := g.Stopped(ctx, tx, a.Project, a.Inbox, a.Request); err != nil {
			return err
		} else if moved = on; on {
			return g.end(ctx, tx, a, "action.stop", s.String())
		}
		if err := move(ctx, tx, a.ID, a.Version, Approved, Executing); err != nil {
			return err
		}
		a.State, a.Version, a.Attempts = Executing, a.Version+1, a.Attempts+1
		if _, err := tx.ExecContext(ctx, `update action set attempts = $1, lease = $2 where id = $3`, a.Attempts, store.Time(now.Add(leaseTime)), a.ID); err != nil {
			return err
		}
		// What waits is looked at again and again, every look the same: the
		// attack is a thousand mails to a slow destination, which fill the audit
		// until nobody reads it. The entry comes with the intent, if it comes to
		// that, see [Gate.Begin].
		if w, err := waits(ctx, tx, a.ID); err != nil || w {
			return err
		}
		if err := executes(ctx, tx, a); err != nil {
			return err
		}
		return g.moved(ctx, tx, a)
	})
	if err == nil && moved {
		err = errElsewhere
	}
	if err != nil {
		release()
		return Action{}, nil, err
	}
	return a, release, nil
}

// waits reports whether the last execution of an action began nothing, and no
// later one has begun anything yet.
func waits(ctx context.Context, tx *store.Tx, id string) (bool, error) {
	var n int
	if err := tx.One(ctx, `select waits from action where id = $1`, []any{id}, &n); err != nil {
		return false, fmt.Errorf("look at action %s: %w", id, err)
	}
	return n == 1, nil
}

func executes(ctx context.Context, tx *store.Tx, a Action) error {
	return audit.Append(ctx, tx, system(a), "action.execute", a.ID, audit.Fields{"attempt": strconv.FormatInt(a.Attempts, 10), "digest": a.Hex()})
}

// Begin records that an action which waited is executed in earnest, and refuses
// what must not begin any more: with [ErrStopped] what a kill switch stops, and
// with [ErrStale] what another program has taken over. An executor calls it in
// each transaction that makes its intent durable, before each part of its effect.
func (g *Gate) Begin(ctx context.Context, tx *store.Tx, a Action) error {
	now, err := scanOne(tx.QueryRowContext(ctx, `select `+columns+`, payload from action where id = $1`, a.ID).Scan)
	if err != nil {
		return fmt.Errorf("begin action %s: %w", a.ID, err)
	}
	// The attack on going on: this program stood still and was taken for dead,
	// and the action has been stopped, or tried again, since.
	if now.State != Executing || now.Version != a.Version {
		return fmt.Errorf("begin action %s, which is %s: %w", a.ID, now.State, ErrStale)
	}
	if now.Stopped != "" {
		return fmt.Errorf("begin action %s: %s: %w", a.ID, now.Stopped, ErrStopped)
	}
	if s, on, err := g.Stopped(ctx, tx, now.Project, now.Inbox, now.Request); err != nil || on {
		if err == nil {
			err = fmt.Errorf("begin action %s: %s: %w", a.ID, s, ErrStopped)
		}
		return err
	}
	waited, err := tx.Changed(ctx, `update action set waits = 0 where id = $1 and version = $2 and waits = 1`, a.ID, a.Version)
	if err != nil {
		return fmt.Errorf("begin action %s: %w", a.ID, err)
	}
	if !waited {
		return nil
	}
	return executes(ctx, tx, a)
}

// settle moves an executing action to what its execution brought, and tells the
// executor if tell.
func (g *Gate) settle(ctx context.Context, tx *store.Tx, a Action, o Outcome, tell bool) error {
	now := time.Now()
	verb := "action." + string(o.State)
	if o.State == Approved {
		if why, err := g.stopping(ctx, tx, a); err != nil {
			return err
		} else if why != "" {
			// Turning the switch off again releases nothing: it ends here.
			if o.Free {
				a.Attempts--
			}
			a.Result = o.Detail
			return g.end(ctx, tx, a, "action.stop", why)
		}
	}
	if err := move(ctx, tx, a.ID, a.Version, Executing, o.State); err != nil {
		return err
	}
	waited, err := waits(ctx, tx, a.ID)
	if err != nil {
		return err
	}
	free := o.State == Approved && o.Free
	if waited && !free { // its executor did not say that it began
		if err := executes(ctx, tx, a); err != nil {
			return err
		}
	}
	same := waited && free && a.Result == o.Detail
	a.State, a.Version, a.Result, a.Due = o.State, a.Version+1, o.Detail, time.Time{}
	if o.State == Approved {
		verb, a.Due = "action.retry", stored(now.Add(o.After))
		if o.Free {
			verb, a.Attempts = "action.defer", a.Attempts-1
		}
	}
	if o.State.settled() {
		a.Settled = stored(now)
	}
	nowWaits := 0
	if free {
		nowWaits = 1
	}
	_, err = tx.ExecContext(ctx, `update action set result = $1, not_before = $2, attempts = $3, settled_at = $4, waits = $5 where id = $6`,
		a.Result, store.Time(a.Due), a.Attempts, store.Time(a.Settled), nowWaits, a.ID)
	if err != nil {
		return fmt.Errorf("record result: %w", err)
	}
	if same {
		return nil // it waits, as the audit says already
	}
	if err := audit.Append(ctx, tx, system(a), verb, a.ID, audit.Fields{"result": o.Detail}); err != nil {
		return err
	}
	if !tell || free { // it is where it was: approved, which its executor has heard
		return nil
	}
	return g.moved(ctx, tx, a)
}

// stopping says why an executing action must not be tried again, or is empty.
func (g *Gate) stopping(ctx context.Context, tx *store.Tx, a Action) (why string, err error) {
	if err := tx.One(ctx, `select stopped from action where id = $1`, []any{a.ID}, &why); err != nil {
		return "", fmt.Errorf("look at action %s: %w", a.ID, err)
	}
	if why != "" {
		return why, nil
	}
	s, on, err := g.Stopped(ctx, tx, a.Project, a.Inbox, a.Request)
	if err != nil || !on {
		return "", err
	}
	return s.String(), nil
}

func system(a Action) auth.Principal {
	return auth.Principal{Kind: auth.System, ID: "gate", Project: a.Project}
}

// move changes the state of one action, failing with ErrStale unless it is
// still at version and in state from.
func move(ctx context.Context, tx *store.Tx, id string, version int64, from, to State) error {
	ok, err := tx.Changed(ctx,
		`update action set state = $1, version = version + 1 where id = $2 and version = $3 and state = $4`, to, id, version, from)
	if err != nil {
		return fmt.Errorf("move action %s to %s: %w", id, to, err)
	}
	if !ok {
		return fmt.Errorf("move action %s to %s: %w", id, to, ErrStale)
	}
	return nil
}

func (g *Gate) poke() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}
