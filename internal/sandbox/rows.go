package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/policy"
	"postern/internal/store"
)

// State is where a sandbox is in its life.
type State string

// The states; see the package comment for the moves between them.
const (
	Creating State = "creating"
	Running  State = "running"
	Pausing  State = "pausing"
	Paused   State = "paused"
	Resuming State = "resuming"
	Killed   State = "killed"
	Failed   State = "failed"
	Lost     State = "lost"
)

// onMachine are the states in which a sandbox uses memory of this machine.
var onMachine = []State{Creating, Running, Pausing, Resuming}

// Options are settings from a sandbox's creation that last as long as the sandbox.
// Zero values are E2B's defaults, except for Traffic.Public.
type Options struct {
	Timeout    time.Duration `json:"timeout"`     // lifetime that the creator requested
	AutoPause  bool          `json:"auto_pause"`  // pause at the end of the lifetime instead of killing
	FilesOnly  bool          `json:"files_only"`  // the automatic pause keeps files, not memory
	AutoResume bool          `json:"auto_resume"` // traffic to a port resumes it
	Traffic    Traffic       `json:"traffic"`
	Volumes    []VolumeMount `json:"volumes,omitempty"`
	Most       time.Duration `json:"most,omitempty"`  // longest lifetime from its creation, pauses included; 0 means no limit
	Owner      string        `json:"owner,omitempty"` // [OwnerOf] whom it was created for to work in, and ends when idle for Timeout; empty means nobody
}

// Traffic says how the ports of a sandbox may be reached from outside. The zero
// Traffic needs the traffic token.
type Traffic struct {
	Public     bool     `json:"public,omitempty"`      // without the traffic token
	MaskHost   string   `json:"mask_host,omitempty"`   // Host header that services see, with ${PORT} replaced; empty means the client's
	HTTPSPorts []uint16 `json:"https_ports,omitempty"` // ports whose services speak TLS
	MCP        bool     `json:"mcp,omitempty"`         // the port of the MCP gateway takes nothing but the Model Context Protocol
	Closed     bool     `json:"closed,omitempty"`      // only this server may reach it, because it belongs to a run

	Asleep   bool   `json:"-"` // the sandbox is paused; only [Fleet.Traffic] sets it
	Contract string `json:"-"` // the contract that binds the sandbox, so that only its processes may be reached; see trafficOf
}

// A VolumeMount asks for a volume of the project to be mounted in a sandbox.
type VolumeMount struct {
	Name string `json:"name"` // name of the volume in its project
	Path string `json:"path"` // absolute path inside
}

// Info describes a sandbox.
type Info struct {
	ID        string
	Project   string
	Template  string // its ID; of a project's template that of the build
	Asked     string // the template or snapshot as the creator named it
	State     State
	Reason    string // why it ended, in words for a person; empty while it lives
	Metadata  map[string]string
	Inbox     string // ID of the attached inbox, or empty
	Egress    policy.Egress
	Options   Options
	Execution string  // ID of its present or last run
	CPUs      float64 // cores
	MemoryMB  int64   // mebibytes
	DiskMB    int64   // mebibytes
	Started   time.Time
	Ends      time.Time // end of its lifetime
	PausedAt  time.Time // zero unless it is paused
	Ended     time.Time // zero while it lives
	Restart   bool      // frozen by a stop of the server, to be resumed at the next start
	Contract  string    // the contract that binds it, "name@sha256:…"; empty means none

	bench bool   // it is a bench and has no row
	saved string // name of the snapshot to resume from; empty unless it is paused or changing
}

// Principal returns the sandbox as the caller of other parts of the program.
func (s *Info) Principal() auth.Principal {
	return auth.Principal{Kind: auth.Sandbox, ID: s.ID, Project: s.Project, Inbox: s.Inbox, Template: s.Template, Bench: s.bench, Contract: s.Contract}
}

// limitEnd returns ends, or the latest end that [Options.Most] allows if that is earlier. The
// error wraps [ErrBound] if that time has passed.
//
// The attack: a user of a sandbox that a contract binds extends its lifetime, or pauses and
// resumes it, past the contract's time.
func (s *Info) limitEnd(ends time.Time) (time.Time, error) {
	last := s.Started.Add(s.Options.Most)
	if s.Options.Most <= 0 || !ends.After(last) {
		return ends, nil
	}
	if !time.Now().Before(last) {
		return ends, fmt.Errorf("%w: %s: its time of %s is over", ErrBound, s.Contract, s.Options.Most)
	}
	return last, nil
}

// end sets the fields of a sandbox that has ended, and drops what only a living one
// needs.
func (s *Info) end(reason string) {
	s.Reason, s.Ended, s.saved, s.PausedAt, s.Restart = reason, time.Now(), "", time.Time{}, false
}

const columns = `id, project_id, template, asked, state, reason, metadata, inbox_id, egress, options, execution, cpus, memory_mb, disk_mb, ` +
	`started_at, ends_at, paused_at, ended_at, restart, saved, contract`

// scan reads a row with the given columns.
func scan(row func(...any) error) (Info, error) {
	var s Info
	var metadata, egress, options string
	var cpus, started, ends, paused, ended, restart int64
	err := row(&s.ID, &s.Project, &s.Template, &s.Asked, &s.State, &s.Reason, &metadata, &s.Inbox, &egress, &options, &s.Execution, &cpus, &s.MemoryMB, &s.DiskMB,
		&started, &ends, &paused, &ended, &restart, &s.saved, &s.Contract)
	if err != nil {
		return Info{}, err
	}
	s.CPUs, s.Restart = float64(cpus)/1000, restart != 0
	s.Asked = or(s.Asked, s.Template) // a row of an earlier version has none
	s.Started, s.Ends, s.PausedAt, s.Ended = store.FromTime(started), store.FromTime(ends), store.FromTime(paused), store.FromTime(ended)
	return s, errors.Join(
		json.Unmarshal([]byte(metadata), &s.Metadata), json.Unmarshal([]byte(egress), &s.Egress), json.Unmarshal([]byte(options), &s.Options))
}

// A registry is the rows of this server's sandboxes and snapshots. It knows
// nothing of what runs; it writes each change together with its audit entry and
// its event.
type registry struct {
	db   *store.DB
	conf *Config // of the fleet
}

// insert records a new sandbox. Its error wraps [ErrFull] if the machine has no
// room for another one, and [ErrNoTemplate] if its template was deleted.
func (g *registry) insert(ctx context.Context, who auth.Principal, s Info) error {
	metadata, err1 := json.Marshal(s.Metadata)
	egress, err2 := json.Marshal(s.Egress)
	options, err3 := json.Marshal(s.Options)
	redacted, err4 := json.Marshal(s.Egress.Redacted())
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	return g.db.Update(ctx, func(tx *store.Tx) error {
		fields := audit.Fields{
			"template": s.Template, "asked": or(s.Asked, s.Template), "inbox": s.Inbox, "egress": string(redacted), "metadata": string(metadata), "options": string(options),
		}
		if s.Contract != "" {
			fields["contract"] = s.Contract
		}
		err := audit.Append(ctx, tx, who, audit.SandboxCreate, s.ID, fields)
		if err != nil {
			return err
		}
		if err := g.roomToRun(ctx, tx); err != nil {
			return err
		}
		if err := g.roomForAgent(ctx, tx, who, s); err != nil {
			return err
		}
		// The attack: delete the template after the sandbox's start was prepared. The
		// sandbox could not be resumed, because its image would be removed. From this
		// row on a deletion is refused.
		if g.conf.CheckTemplate != nil {
			if err := g.conf.CheckTemplate(ctx, tx, s.Template); err != nil {
				return err
			}
		}
		_, err = tx.ExecContext(ctx, `insert into sandbox (`+columns+`, server_id)
			values ($1, $2, $3, $4, $5, '', $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, 0, 0, 0, '', $16, $17)`,
			s.ID, s.Project, s.Template, or(s.Asked, s.Template), s.State, string(metadata), s.Inbox, string(egress), string(options), s.Execution, int64(s.CPUs*1000), s.MemoryMB, s.DiskMB,
			store.Time(s.Started), store.Time(s.Ends), s.Contract, g.conf.Server)
		if err != nil {
			return fmt.Errorf("insert sandbox: %w", err)
		}
		return nil
	})
}

// roomToRun returns an error that wraps [ErrFull] unless one more sandbox may run
// on this machine. The count is exact if tx has the turn [store.All].
func (g *registry) roomToRun(ctx context.Context, tx *store.Tx) error {
	var n int
	if err := tx.One(ctx, `select count(*) from sandbox where server_id = $1 and state in (`+quoted(onMachine)+`)`, []any{g.conf.Server}, &n); err != nil {
		return err
	}
	if n >= g.conf.MaxSandboxes {
		return fmt.Errorf("%w: %d are running and at most %d may", ErrFull, n, g.conf.MaxSandboxes)
	}
	return nil
}

// quoted returns states as an SQL list. They are constants of this package, so they
// need no escaping.
func quoted(states []State) string {
	var b strings.Builder
	for i, s := range states {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString("'" + string(s) + "'")
	}
	return b.String()
}

// A change is one step in a sandbox's life: a row update, an audit entry and an
// event, in one transaction.
type change struct {
	from   []State
	to     State
	verb   audit.Verb
	event  event.Type // empty means no event
	fields audit.Fields
	check  func(ctx context.Context, tx *store.Tx) error // last condition, in the transaction; nil means none
}

// record writes all of s in the state c.to, if the row is in one of the states
// c.from. Otherwise its error wraps [ErrNotFound]. On success it sets s.State.
func (g *registry) record(ctx context.Context, who auth.Principal, s *Info, c change) error {
	egress, err1 := json.Marshal(s.Egress)
	options, err2 := json.Marshal(s.Options)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	who.Project = s.Project
	restart := 0
	if s.Restart {
		restart = 1
	}
	turn := store.Thing(s.Project, s.ID)
	if c.check != nil {
		turn = store.All() // it may count what others do
	}
	err := g.db.UpdateIn(ctx, turn, func(tx *store.Tx) error {
		if err := audit.Append(ctx, tx, who, c.verb, s.ID, c.fields); err != nil {
			return err
		}
		if c.check != nil {
			if err := c.check(ctx, tx); err != nil {
				return err
			}
		}
		ok, err := tx.Changed(ctx, `update sandbox set state = $1, reason = $2, egress = $3, options = $4, execution = $5,
			started_at = $6, ends_at = $7, paused_at = $8, ended_at = $9, restart = $10, saved = $11
			where id = $12 and state in (`+quoted(c.from)+`)`,
			c.to, s.Reason, string(egress), string(options), s.Execution,
			store.Time(s.Started), store.Time(s.Ends), store.Time(s.PausedAt), store.Time(s.Ended), restart, s.saved, s.ID)
		if err != nil {
			return err
		}
		if !ok {
			return ErrNotFound
		}
		if c.event == "" {
			return nil
		}
		return announce(ctx, tx, *s, c.event)
	})
	if err != nil {
		return fmt.Errorf("record %s of sandbox %s: %w", strings.TrimPrefix(string(c.verb), "sandbox."), s.ID, err)
	}
	s.State = c.to
	return nil
}

// announce appends an event about s to the project's history, in the caller's
// transaction. Webhooks deliver it.
func announce(ctx context.Context, tx *store.Tx, s Info, t event.Type) error {
	data := map[string]any{"sandbox_metadata": s.Metadata, "end_at": s.Ends.UTC().Format(time.RFC3339Nano)}
	if s.Reason != "" {
		data["reason"] = s.Reason
	}
	if t == event.Paused || t == event.Killed {
		begun, err := event.LastStart(ctx, tx, s.ID)
		if err != nil {
			return err
		}
		if !begun.IsZero() {
			data["execution"] = map[string]any{
				"started_at": begun.Format(time.RFC3339Nano), "vcpu_count": s.CPUs, "memory_mb": s.MemoryMB, "execution_time": time.Since(begun).Milliseconds(),
			}
		}
	}
	if t == event.Updated {
		data["set_timeout"] = data["end_at"]
	}
	return event.Append(ctx, tx, event.Event{
		Project: s.Project, Type: t, Sandbox: s.ID, Template: or(s.Asked, s.Template), Build: s.Template, Execution: s.Execution, Data: data,
	})
}

// expired returns the running sandboxes whose lifetime is over.
func (g *registry) expired(ctx context.Context) ([]Info, error) {
	return g.list(ctx, `where state = $1 and ends_at <= $2`, Running, store.Time(time.Now()))
}

// row returns a sandbox of any project and in any state.
func (g *registry) row(ctx context.Context, id string) (Info, error) {
	ss, err := g.list(ctx, `where id = $1`, id)
	if err != nil {
		return Info{}, err
	}
	if len(ss) == 0 {
		return Info{}, fmt.Errorf("sandbox %s: %w", id, ErrNotFound)
	}
	return ss[0], nil
}

// alive are the states in which a sandbox is visible to its owner.
var alive = []State{Running, Pausing, Paused, Resuming}

// list returns the sandboxes of this server that match where, the end of an SQL
// statement. The inner select hides the sandboxes of other servers: this machine
// does not have them, so Recover would record them as lost.
func (g *registry) list(ctx context.Context, where string, args ...any) (out []Info, err error) {
	err = g.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, scan, `select `+columns+` from (select `+columns+` from sandbox where server_id = `+fmt.Sprintf("$%d", len(args)+1)+`) as here `+where, append(slices.Clip(args), g.conf.Server)...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	return out, nil
}

// roomToPause returns an error that wraps [ErrFull] unless one more sandbox may be
// paused. Sandboxes that the server froze do not count, since it resumes them
// itself. The count is exact if the caller has appended to the audit in tx.
func (g *registry) roomToPause(ctx context.Context, tx *store.Tx) error {
	var n int
	if err := tx.One(ctx, `select count(*) from sandbox where state in ($1, $2) and restart = 0 and server_id = $3`, []any{Pausing, Paused, g.conf.Server}, &n); err != nil {
		return err
	}
	if n >= g.conf.MaxPaused {
		return fmt.Errorf("%w: %d are paused and at most %d may be: kill some of them", ErrFull, n, g.conf.MaxPaused)
	}
	return nil
}

// roomForSnapshot returns an error that wraps [ErrFull] unless one more snapshot
// may be kept.
func (g *registry) roomForSnapshot(ctx context.Context, tx *store.Tx) error {
	var n int
	if err := tx.One(ctx, `select count(*) from snapshot where server_id = $1`, []any{g.conf.Server}, &n); err != nil {
		return err
	}
	if n >= g.conf.MaxSnapshots {
		return fmt.Errorf("%w: there are %d snapshots and at most %d may be kept: delete some of them", ErrFull, n, g.conf.MaxSnapshots)
	}
	return nil
}

// allSnapshots returns the snapshots of all projects.
func (g *registry) allSnapshots(ctx context.Context) (out []Snapshot, err error) {
	err = g.db.View(ctx, func(tx *store.Tx) error {
		out, err = g.snapshots(ctx, tx, `where true`)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	return out, nil
}

// replaced returns the snapshots that n replaces because it has their name. Its
// error wraps [ErrFull] if there is none and n would be one too many.
func (g *registry) replaced(ctx context.Context, tx *store.Tx, n Snapshot) (old []Snapshot, err error) {
	if n.Name != "" {
		old, err = g.snapshots(ctx, tx, `where project_id = $1 and name = $2`, n.Project, n.Name)
		if err != nil || len(old) > 0 {
			return old, err
		}
	}
	return nil, g.roomForSnapshot(ctx, tx)
}

const snapshotColumns = `id, project_id, sandbox_id, template, name, cpus, memory_mb, disk_mb, created_at`

// snapshots returns the snapshots of this server that match where, the end of an
// SQL statement.
func (g *registry) snapshots(ctx context.Context, tx *store.Tx, where string, args ...any) (out []Snapshot, err error) {
	rows, err := tx.QueryContext(ctx, `select `+snapshotColumns+` from (select `+snapshotColumns+` from snapshot where server_id = `+fmt.Sprintf("$%d", len(args)+1)+`) as here `+where,
		append(slices.Clip(args), g.conf.Server)...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var n Snapshot
		var cpus, created int64
		if err := rows.Scan(&n.ID, &n.Project, &n.Sandbox, &n.Template, &n.Name, &cpus, &n.memoryMB, &n.diskMB, &created); err != nil {
			return nil, err
		}
		n.cpus, n.Created = float64(cpus)/1000, store.FromTime(created)
		out = append(out, n)
	}
	return out, rows.Err()
}
