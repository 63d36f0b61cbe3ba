package run

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/secret"
	"postern/internal/store"
)

// A Fleet creates the sandboxes of runs and works in them. [sandbox.Fleet] implements
// it. Implementations are safe for concurrent use. What comes from a sandbox is
// hostile.
type Fleet interface {
	Files
	Create(ctx context.Context, who auth.Principal, r sandbox.Request) (sandbox.Info, error)
	Get(ctx context.Context, who auth.Principal, id string) (sandbox.Info, error)
	List(ctx context.Context, who auth.Principal, all bool) ([]sandbox.Info, error)
	Kill(ctx context.Context, who auth.Principal, id string) error
	Pause(ctx context.Context, who auth.Principal, id string, filesOnly bool) error
	Confine(ctx context.Context, id string, c sandbox.Confinement) error
	Settle(ctx context.Context, id string) error
	PutFile(ctx context.Context, id, path string, r io.Reader) error
	RunCommand(ctx context.Context, id string, c sandbox.Command, output func(stream byte, p []byte) error) (sandbox.Ended, error)
	KillProcess(ctx context.Context, id string, pid int) error
	KillAll(ctx context.Context, id string) error
	Gone(ctx context.Context, s sandbox.Info) []sandbox.Trace
}

var _ Fleet = (*sandbox.Fleet)(nil)

// A Binder binds sandboxes to contracts. [command.Admission] implements it. The
// contract of a bound sandbox decides first what starts in it.
type Binder interface {
	Bind(sandboxID string, b command.Binding) error
	Unbind(sandboxID string)
}

// A Collector collects the artifacts of runs. [Exports] implements it.
type Collector interface {
	Collect(ctx context.Context, r Run, e Evidence) error
}

// A Concluder writes reports and statements. [Prover] implements it.
type Concluder interface {
	Prove(ctx context.Context, r Run, e Evidence) error
}

// Config is the configuration of a [Service].
type Config struct {
	Key   []byte       // the server's, of at least 32 bytes; required
	Blobs *store.Blobs // for inputs, of this service alone; required
	// Fleet creates sandboxes. Nil means that this server runs none: another server on
	// the same database starts the runs that are proposed here.
	Fleet    Fleet
	Commands Binder    // required with Fleet
	Exports  Collector // nil means that no files leave
	Prover   Concluder // nil means that no reports are written
	// Template returns the ID of the template that who calls name, and the digest of its
	// image if that is known. Required.
	Template func(ctx context.Context, who auth.Principal, name string) (id, image string, err error)
	// Usage measures a sandbox; nil means that memory and disk are not sampled.
	Usage   func(ctx context.Context, id string) (sandbox.Usage, error)
	Ceiling policy.Ceiling      // of connections, of every project
	Secrets *secret.Store       // nil means that there are none
	Post    *mailbox.PostOffice // nil means that there are no inboxes
	// Running is the maximum number of runs at a time; 0 means 8.
	Running int
	// Longest is the maximum time of a run; 0 means 24 hours.
	Longest time.Duration
}

// A Service performs runs. It is safe for concurrent use. It is the executor of
// [policy.KindRun].
type Service struct {
	log  *slog.Logger
	db   *store.DB
	gate *oversight.Gate
	conf Config
	kept *vault // of inputs

	uploads *semaphore.Weighted // of maxHeld bytes

	due chan struct{} // of capacity one: a run may be started

	mu      sync.Mutex
	changed chan struct{}                      // closed and replaced when a run has an event
	live    map[string]context.CancelCauseFunc // runs that this process performs
	// sessions are those of the sandboxes of SDKs that run here, by the sandbox's ID.
	sessions map[string]*session
}

// New returns a service of the runs in db. The caller registers it with the gate for
// [policy.KindRun], then calls [Service.Recover] and [Service.Run].
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, c Config) (*Service, error) {
	if len(c.Key) < 32 || c.Blobs == nil || c.Template == nil {
		return nil, errors.New("runs: Key, Blobs and Template are required")
	}
	if c.Fleet != nil && c.Commands == nil {
		return nil, errors.New("runs: Commands is required with Fleet")
	}
	if c.Running <= 0 {
		c.Running = 8
	}
	if c.Longest <= 0 {
		c.Longest = 24 * time.Hour
	}
	kept, err := newVault(c.Blobs, c.Key, "postern inputs of runs v1")
	if err != nil {
		return nil, fmt.Errorf("vault of inputs: %w", err)
	}
	return &Service{
		log: log, db: db, gate: gate, conf: c, kept: kept, uploads: semaphore.NewWeighted(maxHeld), due: make(chan struct{}, 1), changed: make(chan struct{}), live: map[string]context.CancelCauseFunc{}, sessions: map[string]*session{},
	}, nil
}

// notify wakes those who wait for events.
func (s *Service) notify() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.changed)
	s.changed = make(chan struct{})
}

// nextChange returns a channel that is closed at the next event of any run.
func (s *Service) nextChange() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// wake wakes [Service.Run].
func (s *Service) wake() {
	select {
	case s.due <- struct{}{}:
	default:
	}
}

// Get returns a run of who's project. To others it is not found.
func (s *Service) Get(ctx context.Context, who auth.Principal, id string) (r Run, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		if err := mayRead(who); err != nil {
			return err
		}
		r, err = visible(ctx, tx, who, id)
		return err
	})
	return r, err
}

// List returns runs, newest first. For an agent it returns those that the agent
// proposed.
func (s *Service) List(ctx context.Context, who auth.Principal, q Query) (out []Run, err error) {
	if err := mayRead(who); err != nil {
		return nil, err
	}
	if q.Limit <= 0 || q.Limit > 200 {
		q.Limit = 50
	}
	inbox := ""
	if who.Kind == auth.Agent {
		if inbox = who.Inbox; inbox == "" {
			return nil, nil
		}
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, scanRun, `select `+columns+` from run where project_id = $1 and ($2 = '' or inbox_id = $2) and ($3 = '' or state = $3) and ($4 = '' or contract_name = $4)
			order by created_at desc, id limit `+strconv.Itoa(q.Limit), who.Project, inbox, q.State, q.Contract)
		return err
	})
	return out, err
}

// Events returns the events of a run after number after, at most 200, and the run's
// state. If there are none and the run is not over, it waits for up to wait, or until
// closing is closed.
func (s *Service) Events(ctx context.Context, who auth.Principal, id string, after int64, wait time.Duration, closing <-chan struct{}) (out []Event, state State, err error) {
	if err := mayRead(who); err != nil {
		return nil, "", err
	}
	over := time.NewTimer(wait)
	defer over.Stop()
	// Other servers on the same database do not notify this one.
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		changed := s.nextChange()
		err = s.db.View(ctx, func(tx *store.Tx) error {
			r, err := visible(ctx, tx, who, id)
			if err != nil {
				return err
			}
			state = r.State
			out, err = store.List(ctx, tx, scanEvent, `select body from run_event where run_id = $1 and n > $2 order by n limit 200`, id, after)
			return err
		})
		if err != nil || len(out) > 0 || state.Over() || wait <= 0 {
			return out, state, err
		}
		select {
		case <-changed:
		case <-t.C:
		case <-over.C:
			return nil, state, nil
		case <-closing:
			return nil, state, nil
		case <-ctx.Done():
			return nil, state, ctx.Err()
		}
	}
}
