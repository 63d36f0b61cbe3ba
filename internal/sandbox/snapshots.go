package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/store"
)

// A Snapshot is a saved copy of a sandbox that other sandboxes can start from.
type Snapshot struct {
	ID       string
	Project  string
	Sandbox  string // ID of the sandbox that it is a copy of
	Template string
	Name     string // "alias:tag", or empty
	Created  time.Time

	cpus     float64
	memoryMB int64
	diskMB   int64
}

// ErrSnapshotsOff means that the operator does not allow snapshots.
var ErrSnapshotsOff = fmt.Errorf("snapshots are off: start the server with --snapshots (%w)", auth.ErrForbidden)

// ErrNoSnapshot means that the snapshot does not exist.
var ErrNoSnapshot = errors.New("snapshot not found")

// Snapshot copies a running sandbox of who's project, which continues. If name is
// not empty, an older snapshot with that name is replaced.
func (f *Fleet) Snapshot(ctx context.Context, who auth.Principal, id, name string) (Snapshot, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Snapshot{}, err
	}
	if !f.conf.Snapshots {
		return Snapshot{}, ErrSnapshotsOff
	}
	ctx, l, s, err := f.claimFor(ctx, who, id)
	if err != nil {
		return Snapshot{}, err
	}
	defer f.release(l)
	if s.State != Running {
		return Snapshot{}, fmt.Errorf("snapshot of %s: %w", id, ErrPaused)
	}
	if err := s.refuseIfBound("snapshot"); err != nil {
		return Snapshot{}, err
	}
	n := Snapshot{
		ID: "s" + random(), Project: s.Project, Sandbox: s.ID, Template: s.Template, Name: name, Created: time.Now().UTC().Truncate(time.Microsecond),
		cpus: s.CPUs, memoryMB: s.MemoryMB, diskMB: s.DiskMB,
	}
	// Check the limit before the work, and again in the transaction.
	err = f.db.View(ctx, func(tx *store.Tx) error {
		_, err := f.rows.replaced(ctx, tx, n)
		return err
	})
	if err != nil {
		return Snapshot{}, fmt.Errorf("snapshot of %s: %w", id, err)
	}
	if err := f.copyOf(ctx, s, n.ID, SaveOptions{Keep: true}); err != nil {
		return Snapshot{}, err
	}
	// It is on disk, and the end of the sandbox no reason to forget it.
	ctx = context.WithoutCancel(ctx)
	var old []Snapshot
	err = f.db.Update(ctx, func(tx *store.Tx) error {
		err := audit.Append(ctx, tx, who, audit.SnapshotCreate, n.ID, audit.Fields{"sandbox": s.ID, "name": name})
		if err != nil {
			return err
		}
		if old, err = f.rows.replaced(ctx, tx, n); err != nil {
			return err
		}
		for _, o := range old {
			if _, err := tx.ExecContext(ctx, `delete from snapshot where id = $1`, o.ID); err != nil {
				return err
			}
		}
		_, err = tx.ExecContext(ctx, `insert into snapshot (`+snapshotColumns+`, server_id) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`,
			n.ID, n.Project, n.Sandbox, n.Template, n.Name, int64(n.cpus*1000), n.memoryMB, n.diskMB, store.Time(n.Created), f.conf.Server)
		if err != nil {
			return err
		}
		return announce(ctx, tx, s, event.Checkpointed)
	})
	if err != nil {
		err = fmt.Errorf("record snapshot: %w", err)
		if !errors.Is(err, store.ErrCommit) { // then there may be a row, and if not, Recover removes the files
			err = errors.Join(err, f.discard(n.ID))
		}
		return Snapshot{}, err
	}
	for _, o := range old {
		if err := f.discard(o.ID); err != nil {
			f.log.WarnContext(ctx, "remove replaced snapshot", "snapshot", o.ID, "err", err)
		}
	}
	return n, nil
}

// copyOf saves a claimed, running sandbox as a snapshot and leaves it running.
func (f *Fleet) copyOf(ctx context.Context, s Info, name string, o SaveOptions) error {
	ctx, cancel := context.WithTimeout(ctx, f.conf.SaveTimeout)
	defer cancel()
	done, err := f.takeSpace(ctx, s.ID)
	if err != nil {
		return fmt.Errorf("copy sandbox %s: %w", s.ID, err)
	}
	defer done()
	if err := f.runtime.Save(ctx, s.ID, f.dir(name), o); err != nil {
		return fmt.Errorf("copy sandbox %s: %w", s.ID, err)
	}
	return nil
}

// Snapshots returns the snapshots of who's project, newest first.
func (f *Fleet) Snapshots(ctx context.Context, who auth.Principal) (out []Snapshot, err error) {
	if err := mayManage(who); err != nil {
		return nil, err
	}
	err = f.db.View(ctx, func(tx *store.Tx) error {
		out, err = f.rows.snapshots(ctx, tx, `where project_id = $1 order by created_at desc, id desc`, who.Project)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	return out, nil
}

// FindSnapshot returns a snapshot of who's project by its ID or name. Its error
// wraps [ErrNoSnapshot].
func (f *Fleet) FindSnapshot(ctx context.Context, who auth.Principal, idOrName string) (Snapshot, error) {
	all, err := f.Snapshots(ctx, who)
	if err != nil {
		return Snapshot{}, err
	}
	// The SDKs write "id:default" for "id", and "alias" or "team/alias:default" for
	// "alias:default".
	name := idOrName[strings.LastIndexByte(idOrName, '/')+1:]
	if !strings.Contains(name, ":") {
		name += ":default"
	}
	for _, n := range all {
		if n.ID+":default" == name || n.Name == name {
			return n, nil
		}
	}
	return Snapshot{}, fmt.Errorf("%w: %.100q", ErrNoSnapshot, idOrName)
}

// snapshot is FindSnapshot by ID only.
func (f *Fleet) snapshot(ctx context.Context, who auth.Principal, id string) (Snapshot, error) {
	n, err := f.FindSnapshot(ctx, who, id)
	if err == nil && n.ID != id {
		err = fmt.Errorf("%w: %.100q", ErrNoSnapshot, id)
	}
	return n, err
}

// DeleteSnapshot removes a snapshot of who's project. Sandboxes that were started
// from it continue.
func (f *Fleet) DeleteSnapshot(ctx context.Context, who auth.Principal, id string) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	n, err := f.snapshot(ctx, who, id)
	if err != nil {
		return err
	}
	err = f.db.Update(ctx, func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `delete from snapshot where id = $1`, n.ID)
		if err != nil {
			return err
		}
		if !ok {
			return ErrNoSnapshot
		}
		return audit.Append(ctx, tx, who, audit.SnapshotDelete, n.ID, nil)
	})
	if err != nil {
		return fmt.Errorf("delete snapshot %s: %w", n.ID, err)
	}
	return f.discard(n.ID)
}

// A Forked is the result of one copy of a fork: a sandbox or an error.
type Forked struct {
	Info
	Err error
}

// Fork makes count copies of a running sandbox of who's project, with its memory.
// The sandbox itself continues. One copy that fails does not fail the others.
func (f *Fleet) Fork(ctx context.Context, who auth.Principal, id string, timeout time.Duration, count int) ([]Forked, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return nil, err
	}
	const most = 100
	if count < 1 || count > most {
		return nil, fmt.Errorf("%w: count is %d, not between 1 and %d", ErrInvalid, count, most)
	}
	if err := f.CheckTimeout(timeout); err != nil {
		return nil, err
	}
	name := "f-" + random()
	defer func() {
		if err := f.discard(name); err != nil {
			f.log.WarnContext(ctx, "remove what was forked from", "sandbox", id, "err", err)
		}
	}()
	s, base, body, err := f.forkable(ctx, who, id, name)
	if err != nil {
		return nil, err
	}
	out := make([]Forked, count)
	var wg sync.WaitGroup
	for i := range out {
		wg.Go(func() {
			c := s
			c.ID, c.State, c.Started, c.Execution = newID(), Creating, time.Now(), newExecution()
			c.Options.Timeout = timeout
			out[i].Info, out[i].Err = f.create(ctx, who, creation{info: c, base: base, from: source{dir: f.dir(name), channel: id}, body: body, copyOf: id})
		})
	}
	wg.Wait()
	return out, nil
}

// forkable saves a running sandbox as the snapshot name. The body is what the guests
// of copies get: nothing, unless they need an environment of their own.
func (f *Fleet) forkable(ctx context.Context, who auth.Principal, id, name string) (_ Info, _ Base, body initBody, err error) {
	ctx, l, s, err := f.claimFor(ctx, who, id)
	if err != nil {
		return Info{}, Base{}, body, err
	}
	defer f.release(l)
	if s.State != Running {
		return Info{}, Base{}, body, fmt.Errorf("fork %s: %w", id, ErrPaused)
	}
	if err := s.refuseIfBound("fork"); err != nil {
		return Info{}, Base{}, body, err
	}
	// The limit is checked again for each copy. Here it saves writing the memory to
	// disk for nothing.
	if err := f.db.View(ctx, func(tx *store.Tx) error { return f.rows.roomToRun(ctx, tx) }); err != nil {
		return Info{}, Base{}, body, fmt.Errorf("fork %s: %w", id, err)
	}
	base, err := f.base(ctx, s.Template)
	if err != nil {
		return Info{}, Base{}, body, err
	}
	// Secrets have other sentinels in each copy.
	if f.conf.Environment != nil && len(s.Egress.Secrets) > 0 {
		if body.EnvVars, err = f.guestEnv(ctx, id); err != nil {
			return Info{}, Base{}, body, fmt.Errorf("fork %s: %w", id, err)
		}
	}
	if err := f.copyOf(ctx, s, name, SaveOptions{Keep: true, Brief: true}); err != nil {
		return Info{}, Base{}, body, err
	}
	return s, base, body, f.db.Update(ctx, func(tx *store.Tx) error {
		return errors.Join(audit.Append(ctx, tx, who, audit.SandboxFork, id, nil), announce(ctx, tx, s, event.Checkpointed))
	})
}

// tidySnapshots removes the snapshots that are not in keep and belong to no
// template. A crash between a snapshot and its row leaves such files.
func (f *Fleet) tidySnapshots(ctx context.Context, keep map[string]bool) error {
	es, err := os.ReadDir(f.conf.Dir)
	if err != nil {
		return fmt.Errorf("list snapshots: %w", err)
	}
	for _, e := range es {
		name := strings.TrimSuffix(e.Name(), ".json")
		if keep[name] || strings.HasPrefix(name, "t-") {
			continue
		}
		if err := f.discard(name); err != nil {
			return err
		}
		f.log.InfoContext(ctx, "removed a snapshot without a row", "snapshot", name)
	}
	return nil
}
