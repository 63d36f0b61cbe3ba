package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// State is where a sandbox is in its life.
type State string

// The states; see the package comment for the moves between them.
const (
	Creating State = "creating"
	Running  State = "running"
	Killed   State = "killed"
	Failed   State = "failed"
	Lost     State = "lost"
)

// Info is what is known of a sandbox.
type Info struct {
	ID       string
	Project  string
	Template string
	State    State
	Reason   string // why it ended, for a person
	Metadata map[string]string
	Inbox    string // id of the attached inbox, or empty
	Egress   policy.Egress
	CPUs     float64 // cores
	MemoryMB int64   // mebibytes
	DiskMB   int64   // mebibytes
	Started  time.Time
	Ends     time.Time // when it will be killed
	Ended    time.Time // zero while it lives
}

// Principal returns the sandbox as a caller.
func (s Info) Principal() auth.Principal {
	return auth.Principal{Kind: auth.Sandbox, ID: s.ID, Project: s.Project, Inbox: s.Inbox}
}

const columns = `id, project_id, template, state, reason, metadata, inbox_id, egress, cpus, memory_mb, disk_mb, started_at, ends_at, ended_at`

func scan(row func(...any) error) (Info, error) {
	var s Info
	var metadata, egress string
	var cpus, started, ends, ended int64
	err := row(&s.ID, &s.Project, &s.Template, &s.State, &s.Reason, &metadata, &s.Inbox, &egress, &cpus, &s.MemoryMB, &s.DiskMB, &started, &ends, &ended)
	if err != nil {
		return Info{}, err
	}
	s.CPUs = float64(cpus) / 1000
	s.Started, s.Ends, s.Ended = store.FromTime(started), store.FromTime(ends), store.FromTime(ended)
	return s, errors.Join(json.Unmarshal([]byte(metadata), &s.Metadata), json.Unmarshal([]byte(egress), &s.Egress))
}

// insert records a new sandbox, if there may be one more.
func (f *Fleet) insert(ctx context.Context, who auth.Principal, s Info) error {
	metadata, err := json.Marshal(s.Metadata)
	if err != nil {
		return err
	}
	egress, err := json.Marshal(s.Egress)
	if err != nil {
		return err
	}
	return f.db.Update(ctx, func(tx *store.Tx) error {
		// The entry comes first: its lock makes the count below exact.
		err := audit.Append(ctx, tx, who, "sandbox.create", s.ID, audit.Fields{
			"template": s.Template, "inbox": s.Inbox, "egress": string(egress), "metadata": string(metadata),
		})
		if err != nil {
			return err
		}
		var n int
		if err := tx.One(ctx, `select count(*) from sandbox where state in ($1, $2)`, []any{Creating, Running}, &n); err != nil {
			return err
		}
		if n >= f.conf.MaxSandboxes {
			return fmt.Errorf("%w: %d are running and at most %d may", ErrFull, n, f.conf.MaxSandboxes)
		}
		_, err = tx.ExecContext(ctx, `insert into sandbox (`+columns+`) values ($1, $2, $3, $4, '', $5, $6, $7, $8, $9, $10, $11, $12, 0)`,
			s.ID, s.Project, s.Template, s.State, string(metadata), s.Inbox, string(egress), int64(s.CPUs*1000), s.MemoryMB, s.DiskMB,
			store.Time(s.Started), store.Time(s.Ends))
		if err != nil {
			return fmt.Errorf("insert sandbox: %w", err)
		}
		return nil
	})
}

// running records that the guest answers; the sandbox's time begins.
func (f *Fleet) running(ctx context.Context, s Info, timeout time.Duration) (Info, error) {
	s.State, s.Started = Running, time.Now().UTC().Truncate(time.Microsecond)
	s.Ends = s.Started.Add(timeout)
	err := f.db.Update(ctx, func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `update sandbox set state = $1, started_at = $2, ends_at = $3 where id = $4 and state = $5`,
			Running, store.Time(s.Started), store.Time(s.Ends), s.ID, Creating)
		if err != nil {
			return fmt.Errorf("record sandbox %s as running: %w", s.ID, err)
		}
		if !ok {
			return fmt.Errorf("sandbox %s was ended while it started: %w", s.ID, ErrNotFound)
		}
		return audit.Append(ctx, tx, system(s), "sandbox.running", s.ID, audit.Fields{"ends": s.Ends.Format(time.RFC3339)})
	})
	if err == nil && !f.setReady(s.ID) {
		err = fmt.Errorf("sandbox %s was ended while it started: %w", s.ID, ErrNotFound)
	}
	return s, err
}

func (f *Fleet) ended(ctx context.Context, who auth.Principal, id string, to State, reason string) error {
	return f.db.Update(ctx, func(tx *store.Tx) error {
		var project string
		err := tx.One(ctx, `update sandbox set state = $1, reason = $2, ended_at = $3 where id = $4 and state in ($5, $6) returning project_id`,
			[]any{to, reason, store.Time(time.Now()), id, Creating, Running}, &project)
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("record end of sandbox %s: %w", id, err)
		}
		who.Project = project
		return audit.Append(ctx, tx, who, "sandbox."+string(to), id, audit.Fields{"reason": reason})
	})
}

func (f *Fleet) loseAll(ctx context.Context, reason string) error {
	live, err := f.list(ctx, `where state in ($1, $2)`, Creating, Running)
	if err != nil {
		return err
	}
	for _, s := range live {
		if err := f.ended(ctx, system(s), s.ID, Lost, reason); err != nil {
			return err
		}
	}
	return nil
}

func (f *Fleet) setEnds(ctx context.Context, who auth.Principal, s Info) error {
	return f.db.Update(ctx, func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `update sandbox set ends_at = $1 where id = $2 and state = $3`, store.Time(s.Ends), s.ID, Running)
		if err != nil {
			return fmt.Errorf("set timeout: %w", err)
		}
		if !ok {
			return fmt.Errorf("set timeout of %s: %w", s.ID, ErrNotFound)
		}
		return audit.Append(ctx, tx, who, "sandbox.timeout", s.ID, audit.Fields{"ends": s.Ends.UTC().Format(time.RFC3339)})
	})
}

func (f *Fleet) expired(ctx context.Context) ([]Info, error) {
	return f.list(ctx, `where state = $1 and ends_at <= $2`, Running, store.Time(time.Now()))
}

// Get returns a sandbox of who's project that lives. Those of other projects
// are not found.
func (f *Fleet) Get(ctx context.Context, who auth.Principal, id string) (Info, error) {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return Info{}, fmt.Errorf("%s may not manage sandboxes: %w", who, auth.ErrForbidden)
	}
	ss, err := f.list(ctx, `where id = $1 and project_id = $2 and state = $3`, id, who.Project, Running)
	if err != nil {
		return Info{}, err
	}
	if len(ss) == 0 {
		return Info{}, fmt.Errorf("sandbox %s: %w", id, ErrNotFound)
	}
	return ss[0], nil
}

// List returns the sandboxes of who's project that live, newest first; with
// all also those that ended, as far as 500 go.
func (f *Fleet) List(ctx context.Context, who auth.Principal, all bool) ([]Info, error) {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return nil, fmt.Errorf("%s may not manage sandboxes: %w", who, auth.ErrForbidden)
	}
	where := ` and state = 'running'`
	if all {
		where = ``
	}
	return f.list(ctx, `where project_id = $1`+where+` order by started_at desc, id limit 500`, who.Project)
}

// Live returns the ids of the sandboxes that can be dialled.
func (f *Fleet) Live() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var ids []string
	for id, l := range f.live {
		if l.ready && !l.ending {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

func (f *Fleet) list(ctx context.Context, where string, args ...any) (out []Info, err error) {
	err = f.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select `+columns+` from sandbox `+where, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			s, err := scan(rows.Scan)
			if err != nil {
				return err
			}
			out = append(out, s)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	return out, nil
}
