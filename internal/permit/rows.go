package permit

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// Sealed is the table of permits, see [store.Sealed]. The attack: somebody who can
// write the database inserts a permit, or makes one longer.
func Sealed() store.Sealed { return store.Sealed{Table: "permit", Key: []string{"id"}} }

const columns = `id, project_id, sandbox_id, kind, hosts, methods, paths, port, secret, why, created_at, until_at, action_id, decider, ended_at, ended_by`

func scan(row func(...any) error) (p Permit, err error) {
	var hosts, methods, paths string
	var port, created, until, ended int64
	err = row(&p.ID, &p.Project, &p.Sandbox, &p.Kind, &hosts, &methods, &paths, &port, &p.Secret, &p.Why, &created, &until, &p.Action, &p.Decider, &ended, &p.EndedBy)
	if err != nil {
		return p, store.NotFound(err)
	}
	p.Port = uint16(port)
	p.Created, p.Until, p.Ended = store.FromTime(created), store.FromTime(until), store.FromTime(ended)
	for _, l := range []struct {
		text string
		to   *[]string
	}{{hosts, &p.Hosts}, {methods, &p.Methods}, {paths, &p.Paths}} {
		if err := json.Unmarshal([]byte(l.text), l.to); err != nil {
			return p, fmt.Errorf("read permit %s: %w", p.ID, err)
		}
	}
	return p, nil
}

func list(l []string) string {
	if l == nil {
		l = []string{}
	}
	b, _ := json.Marshal(l) // of texts, it cannot fail
	return string(b)
}

// ErrNobody means that a permit was to be granted that no person has decided on.
var ErrNobody = errors.New("no person has allowed it")

// Grant stores p as part of tx, with an ID and its time of creation, and records it.
// Project, Kind, Until, Action and Decider must be set; Decider must be a person, or
// Grant returns [ErrNobody]. One action has one permit: if it has one already, Grant
// returns that.
func Grant(ctx context.Context, tx *store.Tx, p Permit) (Permit, error) {
	if name, ok := strings.CutPrefix(p.Decider, string(auth.Person)+":"); !ok || name == "" {
		return Permit{}, ErrNobody
	}
	if p.Project == "" || p.Action == "" || p.Until.IsZero() || !slices.Contains(Kinds(), p.Kind) || (p.Kind == Secret) != (p.Secret != "") {
		return Permit{}, fmt.Errorf("grant permit: %w: project, action, until and kind must be set, and the secret for that kind", ErrInvalid)
	}
	was, err := scan(tx.QueryRowContext(ctx, `select `+columns+` from permit where action_id = $1`, p.Action).Scan)
	if !errors.Is(err, store.ErrNotFound) {
		return was, err
	}
	p.ID, p.Created, p.Ended, p.EndedBy = "prm_"+rand.Text(), time.Now().UTC().Truncate(time.Microsecond), time.Time{}, ""
	p.Until = p.Until.UTC().Truncate(time.Microsecond)
	_, err = tx.ExecContext(ctx, `insert into permit (`+columns+`) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, 0, '')`,
		p.ID, p.Project, p.Sandbox, string(p.Kind), list(p.Hosts), list(p.Methods), list(p.Paths), int64(p.Port), p.Secret, p.Why, store.Time(p.Created), store.Time(p.Until), p.Action, p.Decider)
	if err != nil {
		return Permit{}, fmt.Errorf("insert permit: %w", err)
	}
	if err := tx.Seal(ctx, Sealed(), `id = $1`, p.ID); err != nil {
		return Permit{}, err
	}
	who := auth.Principal{Kind: auth.System, ID: "gate", Project: p.Project}
	return p, audit.Append(ctx, tx, who, audit.PermitGrant, p.ID, p.fields())
}

// fields describes p for the record.
func (p *Permit) fields() audit.Fields {
	f := audit.Fields{"kind": string(p.Kind), "until": p.Until.Format(time.RFC3339), "action": p.Action, "decider": p.Decider}
	for k, v := range map[string]string{
		"sandbox": p.Sandbox, "hosts": strings.Join(p.Hosts, " "), "methods": strings.Join(p.Methods, " "), "paths": strings.Join(p.Paths, " "), "secret": p.Secret,
	} {
		if v != "" {
			f[k] = v
		}
	}
	return f
}

// A Query selects permits. Zero fields select all.
type Query struct {
	Sandbox string // those that hold for it: its own and those of the project
	Kind    Kind
	All     bool // also those that have ended
	Limit   int  // 0 means 100; at most 500
}

// List returns the permits of who's project, newest first. A sandbox sees those
// that hold for it.
func (r *Register) List(ctx context.Context, who auth.Principal, q Query) (out []Permit, err error) {
	switch who.Kind {
	case auth.Person, auth.Project:
	case auth.Sandbox:
		q.Sandbox = who.ID
	case auth.Agent, auth.Grant, auth.Recovery, auth.System:
		return nil, fmt.Errorf("%s may not see permits: %w", who, auth.ErrForbidden)
	}
	if q.Limit <= 0 {
		q.Limit = 100
	}
	where, args := `project_id = $1`, []any{who.Project}
	add := func(cond string, arg any) {
		args = append(args, arg)
		where += fmt.Sprintf(" and "+cond, len(args))
	}
	if q.Sandbox != "" {
		add(`sandbox_id in ('', $%d)`, q.Sandbox)
	}
	if q.Kind != "" {
		add(`kind = $%d`, string(q.Kind))
	}
	if !q.All {
		add(`ended_at = 0 and until_at > $%d`, store.Time(time.Now()))
	}
	err = r.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, scan, `select `+columns+` from permit where `+where+fmt.Sprintf(` order by created_at desc, id limit %d`, min(q.Limit, 500)), args...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list permits: %w", err)
	}
	if who.Contract != "" {
		// What its contract does not have does not hold for it.
		for i := range out {
			if out[i].Kind == Network {
				out[i].Hosts = r.bounds.Hosts(ctx, who.Project, who.Contract, out[i].Hosts)
			}
		}
		out = slices.DeleteFunc(out, func(p Permit) bool { return p.Kind == Network && len(p.Hosts) == 0 })
	}
	return out, nil
}

// Get returns one permit of who's project. It returns [ErrNotFound].
func (r *Register) Get(ctx context.Context, who auth.Principal, id string) (p Permit, err error) {
	err = r.db.View(ctx, func(tx *store.Tx) error {
		p, err = get(ctx, tx, who, id)
		return err
	})
	return p, err
}

func get(ctx context.Context, tx *store.Tx, who auth.Principal, id string) (Permit, error) {
	if who.Kind != auth.Person && who.Kind != auth.Project && who.Kind != auth.Sandbox {
		return Permit{}, fmt.Errorf("%s may not see permits: %w", who, auth.ErrForbidden)
	}
	p, err := scan(tx.QueryRowContext(ctx, `select `+columns+` from permit where id = $1 and project_id = $2`, id, who.Project).Scan)
	if err == nil && who.Kind == auth.Sandbox && p.Sandbox != "" && p.Sandbox != who.ID {
		err = store.ErrNotFound
	}
	if err != nil {
		return Permit{}, fmt.Errorf("permit %s: %w", id, err)
	}
	return p, nil
}

// End ends a permit now, and returns it. People who decide may, and the project's
// keys, since it only takes a right away. Ending it again changes nothing. It
// returns [ErrNotFound] or [auth.ErrForbidden].
func (r *Register) End(ctx context.Context, who auth.Principal, id string) (p Permit, err error) {
	err = r.db.Update(ctx, func(tx *store.Tx) error {
		if p, err = get(ctx, tx, who, id); err != nil {
			return err
		}
		if !who.Decides() && who.Kind != auth.Project {
			return fmt.Errorf("%s may not end permits: %w", who, auth.ErrForbidden)
		}
		now := time.Now()
		if !p.Holds(now) {
			return nil
		}
		if err := end(ctx, tx, who, &p, now); err != nil {
			return err
		}
		tx.AfterCommit(func() { r.forget(p.Project) })
		return nil
	})
	return p, err
}
