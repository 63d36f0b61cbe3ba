package connector

import (
	"context"
	"crypto/rand"
	"errors"
	mathrand "math/rand/v2"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/store"
)

const (
	// leaseTime is how long a connection belongs to the process that synchronises it,
	// unless that renews it.
	leaseTime  = 60 * time.Second
	leaseRenew = 20 * time.Second
	// firstRetry and lastRetry bound the delay after a temporary error, which doubles.
	firstRetry = 5 * time.Second
	lastRetry  = 10 * time.Minute
	// turnGap is the shortest time between two turns that only the provider asks for.
	turnGap = time.Second
	// maxWorkers bounds the connections that one process synchronises.
	maxWorkers = 200
)

// wakes tells workers that there is work.
type wakes struct {
	mu    sync.Mutex
	by    map[string]chan struct{} // inbox → its worker
	fresh chan struct{}            // there may be connections without a worker
}

func newWakes() *wakes {
	return &wakes{by: map[string]chan struct{}{}, fresh: make(chan struct{}, 1)}
}

// inbox wakes the worker of an inbox, if this process has one.
func (w *wakes) inbox(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if ch, ok := w.by[id]; ok {
		select {
		case ch <- struct{}{}:
		default: // it is awake
		}
	}
}

// all wakes everything.
func (w *wakes) all() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, ch := range w.by {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
	select {
	case w.fresh <- struct{}{}:
	default:
	}
}

// join registers the worker of an inbox; ok is false if there is one already.
func (w *wakes) join(inbox string) (ch <-chan struct{}, leave func(), ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, taken := w.by[inbox]; taken || len(w.by) >= maxWorkers {
		return nil, nil, false
	}
	c := make(chan struct{}, 1)
	w.by[inbox] = c
	return c, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.by, inbox)
	}, true
}

// Run synchronises the connections until ctx ends.
func (s *Connections) Run(ctx context.Context) error {
	err := s.db.Update(ctx, func(tx *store.Tx) error {
		prefix := s.conf.Instance + "/"
		_, err := tx.ExecContext(ctx, `update mail_connection set worker = '', until_at = 0 where substr(worker, 1, length($1)) = $1`, prefix)
		return err
	})
	if err != nil && ctx.Err() == nil {
		s.log.ErrorContext(ctx, "free connections of mailboxes", "err", err)
	}
	t := time.NewTicker(s.conf.Poll)
	defer t.Stop()
	var workers sync.WaitGroup
	defer workers.Wait()
	for {
		if err := s.start(ctx, &workers); err != nil && ctx.Err() == nil {
			s.log.ErrorContext(ctx, "list connections of mailboxes", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		case <-s.wake.fresh:
		}
	}
}

// start begins a worker for each connection that is due and has none, and wakes those
// whose inboxes have work.
func (s *Connections) start(ctx context.Context, workers *sync.WaitGroup) error {
	var due []Connection
	var dirty []string
	now := time.Now()
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		if due, err = list(ctx, tx, `c.state in ('syncing', 'connected') and c.retry_at <= $1 and c.until_at <= $1 and (b.expires_at = 0 or b.expires_at > $1)`, store.Time(now)); err != nil {
			return err
		}
		dirty, err = tx.Strings(ctx, `select distinct inbox_id from connected_message where dirty > 0 and gone = 0 and message_id <> '' and remote_id not like 'sent:%' limit 1000`)
		return err
	})
	if err != nil {
		return err
	}
	for _, inbox := range dirty { // changed by another process
		s.wake.inbox(inbox)
	}
	for _, c := range due {
		woken, leave, ok := s.wake.join(c.Inbox)
		if !ok {
			continue
		}
		workers.Go(func() {
			defer leave()
			w := worker{s: s, c: c, name: s.conf.Instance + "/" + rand.Text(), woken: woken}
			w.run(ctx)
		})
	}
	return nil
}

// A worker synchronises one connection while it has its lease.
type worker struct {
	s     *Connections
	c     Connection
	name  string
	woken <-chan struct{}
	p     Provider
	round int64
	last  time.Time // when the last turn ended
}

// errMoved means that the connection is not this worker's any more: a person has
// changed it, or another process has it.
var errMoved = errors.New("the connection was changed")

// run works until the connection is not the worker's any more, or fails.
func (w *worker) run(ctx context.Context) {
	ok, err := w.s.updated(ctx, w.c, `update mail_connection set worker = $1, until_at = $2 where id = $3 and until_at <= $4 and wanted = $5`,
		w.name, store.Time(time.Now().Add(leaseTime)), w.c.ID, store.Time(time.Now()), w.c.wanted)
	if err != nil || !ok {
		return
	}
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	var beat sync.WaitGroup
	beat.Go(func() { w.renew(own, cancel) })
	err = w.serve(own)
	cancel()
	beat.Wait()
	w.settle(context.WithoutCancel(ctx), err)
}

// renew renews the lease until ctx ends, and cancels if the connection was changed.
func (w *worker) renew(ctx context.Context, cancel func()) {
	t := time.NewTicker(min(leaseRenew, w.s.conf.Poll))
	defer t.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		var mine int
		err := w.s.db.View(ctx, func(tx *store.Tx) error {
			return tx.One(ctx, `select count(*) from mail_connection c join inbox b on b.id = c.inbox_id where c.id = $1 and c.worker = $2 and c.wanted = $3 and b.deleted_at = 0`, []any{w.c.ID, w.name, w.c.wanted}, &mine)
		})
		if err == nil && mine == 1 && time.Since(last) >= leaseRenew {
			var ok bool
			ok, err = w.s.updated(ctx, w.c, `update mail_connection set until_at = $1 where id = $2 and worker = $3 and wanted = $4`, store.Time(time.Now().Add(leaseTime)), w.c.ID, w.name, w.c.wanted)
			if ok {
				last = time.Now()
			}
		}
		if err == nil && mine == 0 || time.Since(last) > leaseTime-5*time.Second {
			cancel()
			return
		}
	}
}

// serve opens the provider and synchronises until ctx ends or something fails.
func (w *worker) serve(ctx context.Context) (err error) {
	if w.p, err = w.s.open(ctx, w.c); err != nil {
		return err
	}
	defer func() {
		if cerr := w.p.Close(); cerr != nil {
			w.s.log.DebugContext(ctx, "close provider", "connection", w.c.ID, "err", cerr)
		}
	}()
	for {
		if err := w.turn(ctx); err != nil {
			return err
		}
		if err := w.idle(ctx); err != nil {
			return err
		}
	}
}

// turn makes both sides equal once.
func (w *worker) turn(ctx context.Context) error {
	defer func() { w.last = time.Now() }()
	// What was decided here goes first: so the provider's answer shows it already.
	if err := w.push(ctx); err != nil {
		return err
	}
	if err := w.pull(ctx); err != nil {
		return err
	}
	// A person may have changed what a change here is about.
	if err := w.push(ctx); err != nil {
		return err
	}
	ok, err := w.s.updated(ctx, w.c, `update mail_connection set state = 'connected', problem = '', failures = 0, retry_at = 0, synced_at = $1 where id = $2 and worker = $3 and wanted = $4 and state in ('syncing', 'connected')`,
		store.Time(time.Now()), w.c.ID, w.name, w.c.wanted)
	if err == nil && !ok {
		err = errMoved
	}
	return err
}

// idle waits until there may be work.
func (w *worker) idle(ctx context.Context) error {
	select { // what happened during the turn
	case <-w.woken:
		return nil
	default:
	}
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	var woken sync.WaitGroup
	woken.Go(func() {
		select {
		case <-w.woken:
			cancel()
		case <-waiting.Done():
		}
	})
	err := w.p.Wait(waiting, w.c.cursor)
	// The attack: a server that announces news without end keeps this one busy.
	if rest := turnGap - time.Since(w.last); err == nil && rest > 0 {
		select {
		case <-waiting.Done():
		case <-time.After(rest):
		}
	}
	interrupted := waiting.Err() != nil
	cancel()
	woken.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if interrupted { // that it ended is what was asked for
		return nil
	}
	return err
}

// settle records why the worker stopped, and gives the connection back.
func (w *worker) settle(ctx context.Context, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	wait, problem := time.Duration(0), ""
	var retry *RetryError
	switch {
	case err == nil, errors.Is(err, errMoved), errors.Is(err, context.Canceled):
	case errors.Is(err, ErrSignIn):
		w.s.refuse(ctx, w.c, err)
	case errors.Is(err, ErrCursor) && w.c.cursor != "":
		wait, problem = w.s.backOff(0), "the provider no longer knows the state of the last synchronisation: everything is compared again"
		if _, err := w.s.updated(ctx, w.c, `update mail_connection set cursor = '', state = 'syncing', done = 0, total = 0 where id = $1 and worker = $2 and wanted = $3`, w.c.ID, w.name, w.c.wanted); err != nil {
			w.s.log.ErrorContext(ctx, "restart synchronisation", "connection", w.c.ID, "err", err)
		}
	case errors.As(err, &retry):
		wait, problem = max(retry.After, time.Second), retry.Error()
	default:
		wait, problem = w.s.backOff(w.c.failures), mail.Printable(err.Error(), 500)
		if errors.Is(err, mailbox.ErrFull) {
			problem = "the inbox takes no more mail for now: " + problem
		} else if errors.Is(err, oversight.ErrFull) {
			problem = "too much waits for a person: " + problem
		}
		w.s.log.InfoContext(ctx, "synchronise mailbox", "connection", w.c.ID, "err", err, "again", wait)
	}
	failed := int64(0)
	if problem != "" {
		failed = 1
	}
	_, err = w.s.updated(ctx, w.c, `update mail_connection set worker = '', until_at = 0, failures = case when $1 > 0 then failures + 1 else failures end,
		retry_at = case when $1 > 0 then cast($2 as bigint) else retry_at end, problem = case when $1 > 0 then cast($3 as text) else problem end where id = $4 and worker = $5`,
		failed, store.Time(time.Now().Add(wait)), problem, w.c.ID, w.name)
	if err != nil {
		w.s.log.ErrorContext(ctx, "give connection back", "connection", w.c.ID, "err", err)
	}
	w.s.wake.all()
}

// backOff returns how long to wait after failures in a row, with jitter so that many
// mailboxes of one provider do not come back at the same moment.
func (s *Connections) backOff(failures int64) time.Duration {
	d := min(s.conf.Retry<<min(failures, 10), lastRetry)
	return d/2 + mathrand.N(d/2+1) //nolint:gosec // nobody gains by guessing
}

// refuse records that the provider refuses the credential. Nothing is tried until a
// person signs in again: a provider locks an account after too many attempts.
func (s *Connections) refuse(ctx context.Context, c Connection, why error) {
	err := s.db.UpdateIn(ctx, store.Thing(c.Project, c.Inbox), func(tx *store.Tx) error {
		problem := mail.Printable(why.Error(), 500)
		ok, err := tx.Changed(ctx, `update mail_connection set state = 'sign_in', problem = $1 where id = $2 and wanted = $3 and state in ('syncing', 'connected')`, problem, c.ID, c.wanted)
		if err != nil || !ok {
			return err
		}
		who := auth.Principal{Kind: auth.System, ID: "connector", Project: c.Project}
		return audit.Append(ctx, tx, who, audit.MailboxRefused, c.ID, audit.Fields{"inbox": c.Inbox, "problem": problem})
	})
	if err != nil {
		s.log.ErrorContext(ctx, "record refused credential", "connection", c.ID, "err", err)
	}
}
