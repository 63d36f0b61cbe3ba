package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/store"
)

const columns = `id, project_id, proposer, inbox_id, via, state, outcome, refused, reason, contract, contract_text, contract_digest, boundary_digest, task, commands, inputs, answers, ` +
	`scope, action_id, approved, payload, sandbox_id, template, created_at, begun_at, started_at, ended_at, kept_until, cancelled_by, version, results, evidence`

func scanRun(row func(...any) error) (r Run, err error) {
	var text, commands, inputs, answers, results, evidence string
	var created, begun, started, ended, kept int64
	err = row(&r.ID, &r.Project, &r.Proposer, &r.Inbox, &r.Via, &r.State, &r.Outcome, &r.Refused, &r.Reason, &text, &r.ContractText, &r.ContractDigest, &r.BoundaryDigest, &r.Task, &commands, &inputs, &answers,
		&r.scope, &r.Action, &r.Approved, &r.payload, &r.Sandbox, &r.template, &created, &begun, &started, &ended, &kept, &r.cancelled, &r.Version, &results, &evidence)
	if err != nil {
		return r, store.NotFound(err)
	}
	r.Created, r.begun, r.Started, r.Ended, r.kept = store.FromTime(created), store.FromTime(begun), store.FromTime(started), store.FromTime(ended), store.FromTime(kept)
	r.Contract = &contract.Contract{}
	for _, part := range []struct {
		text string
		to   any
	}{{text, r.Contract}, {commands, &r.Commands}, {inputs, &r.Inputs}, {answers, &r.Answers}, {results, &r.Results}, {evidence, &r.evidence}} {
		if err := json.Unmarshal([]byte(part.text), part.to); err != nil {
			return r, fmt.Errorf("read run %s: %w", r.ID, err)
		}
	}
	return r, nil
}

// text returns v as JSON. Our own types can always be written.
func text(v any) string {
	b, err := json.Marshal(v)
	if err != nil { // unreachable
		return "null"
	}
	return string(b)
}

func insertRun(ctx context.Context, tx *store.Tx, r *Run) error {
	r.Version = 1
	_, err := tx.ExecContext(ctx, `insert into run (id, project_id, proposer, inbox_id, via, state, outcome, refused, reason, contract_name, contract, contract_text, contract_digest, boundary_digest,
			task, commands, inputs, answers, scope, action_id, approved, payload, sandbox_id, template, created_at, begun_at, started_at, ended_at, kept_until, cancelled_by, version, events, results, evidence)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27, $28, $29, $30, $31, 0, $32, $33)`,
		r.ID, r.Project, r.Proposer, r.Inbox, r.Via, r.State, r.Outcome, r.Refused, r.Reason, r.Contract.Name, string(r.Contract.Canonical()), r.ContractText, r.ContractDigest, r.BoundaryDigest,
		r.Task, text(r.Commands), text(r.Inputs), text(r.Answers), r.scope, r.Action, r.Approved, filled(r.payload), r.Sandbox, r.template,
		store.Time(r.Created), store.Time(r.begun), store.Time(r.Started), store.Time(r.Ended), store.Time(r.kept), r.cancelled, r.Version, text(r.Results), text(r.evidence))
	if err != nil {
		return fmt.Errorf("insert run: %w", err)
	}
	return nil
}

// filled returns b, or an empty slice for nil, which would be stored as null.
func filled(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// update writes the columns that change in the life of a run, if it is still at
// r.Version. It does not write cancelled_by, which others may write meanwhile.
func update(ctx context.Context, tx *store.Tx, r *Run) error {
	res, err := tx.ExecContext(ctx, `update run set state = $3, outcome = $4, refused = $5, reason = $6, inputs = $7, action_id = $8, approved = $9, payload = $10, sandbox_id = $11, template = $12,
			begun_at = $13, started_at = $14, ended_at = $15, kept_until = $16, results = $17, evidence = $18, boundary_digest = $19, version = version + 1
		where id = $1 and version = $2`,
		r.ID, r.Version, r.State, r.Outcome, r.Refused, r.Reason, text(r.Inputs), r.Action, r.Approved, filled(r.payload), r.Sandbox, r.template,
		store.Time(r.begun), store.Time(r.Started), store.Time(r.Ended), store.Time(r.kept), text(r.Results), text(r.evidence), r.BoundaryDigest)
	if err != nil {
		return fmt.Errorf("update run %s: %w", r.ID, err)
	}
	if n, err := res.RowsAffected(); err != nil || n != 1 {
		return errors.Join(fmt.Errorf("run %s has changed meanwhile: %w", r.ID, oversight.ErrStale), err)
	}
	r.Version++
	return nil
}

// turn returns the turn in which a run is written.
func (r *Run) turn() store.Turn { return store.Thing(r.Project, r.ID) }

// find returns a run as part of tx.
func find(ctx context.Context, tx *store.Tx, where string, args ...any) (Run, error) {
	r, err := scanRun(tx.QueryRowContext(ctx, `select `+columns+` from run where `+where, args...).Scan)
	if err != nil {
		return r, fmt.Errorf("run: %w", err)
	}
	return r, nil
}

// maySee reports whether who may see r: people and keys of its project, and the agent
// that proposed it.
func (r *Run) maySee(who auth.Principal) bool {
	if who.Project != r.Project {
		return false
	}
	switch who.Kind {
	case auth.Person, auth.Project:
		return true
	case auth.Agent:
		return who.Inbox != "" && who.Inbox == r.Inbox
	case auth.Grant, auth.Recovery, auth.Sandbox, auth.System:
	}
	return false
}

// visible returns a run that who may see, and [store.ErrNotFound] for others. The
// attack: guessing IDs, if "not yours" differed from "not found".
func visible(ctx context.Context, tx *store.Tx, who auth.Principal, id string) (Run, error) {
	r, err := find(ctx, tx, `id = $1`, id)
	if err == nil && !r.maySee(who) {
		err = fmt.Errorf("run: %w", store.ErrNotFound)
	}
	if err != nil {
		return Run{}, err
	}
	return r, nil
}

// maxEvents bounds the events of a run. Later events are dropped.
const maxEvents = 2000

// note adds an event to a run as part of tx.
func (s *Service) note(ctx context.Context, tx *store.Tx, id string, e Event) error {
	var n int64
	err := tx.One(ctx, `update run set events = events + 1 where id = $1 and events < $2 returning events`, []any{id, maxEvents}, &n)
	if errors.Is(err, store.ErrNotFound) {
		return nil // the run has as many events as are kept
	}
	if err != nil {
		return fmt.Errorf("number event of %s: %w", id, err)
	}
	e.N, e.At = n, store.FromTime(store.Time(time.Now()))
	if _, err := tx.ExecContext(ctx, `insert into run_event (run_id, n, body) values ($1, $2, $3)`, id, n, text(e)); err != nil {
		return fmt.Errorf("insert event of %s: %w", id, err)
	}
	tx.AfterCommit(s.notify)
	return nil
}

// move writes r in a new state, with its event and its audit entry, as part of tx.
func (s *Service) move(ctx context.Context, tx *store.Tx, who auth.Principal, r *Run, to State, verb audit.Verb, why string) error {
	r.State = to
	if err := update(ctx, tx, r); err != nil {
		return err
	}
	f := audit.Fields{"contract": r.Contract.Name, "digest": r.ContractDigest, "state": string(to)}
	if r.Outcome != "" {
		f["outcome"] = string(r.Outcome)
	}
	for name, v := range map[string]string{"action": r.Action, "approved": r.Approved, "sandbox": r.Sandbox, "refused": r.Refused} {
		if v != "" {
			f[name] = v
		}
	}
	if err := audit.Append(ctx, tx, who, verb, r.ID, f); err != nil {
		return err
	}
	return s.note(ctx, tx, r.ID, Event{Kind: "state", State: string(to), Outcome: string(r.Outcome), Text: why, Action: r.Action})
}

// moved calls move in a transaction of its own.
func (s *Service) moved(ctx context.Context, r *Run, to State, verb audit.Verb, why string) error {
	return s.db.UpdateIn(ctx, r.turn(), func(tx *store.Tx) error {
		c := *r // a transaction may be tried again
		if err := s.move(ctx, tx, system(r), &c, to, verb, why); err != nil {
			return err
		}
		*r = c
		return nil
	})
}

// save writes r in a transaction of its own, with an event unless its kind is empty.
func (s *Service) save(ctx context.Context, r *Run, e Event) error {
	return s.db.UpdateIn(ctx, r.turn(), func(tx *store.Tx) error {
		c := *r
		if err := update(ctx, tx, &c); err != nil {
			return err
		}
		r.Version = c.Version
		if e.Kind == "" {
			return nil
		}
		return s.note(ctx, tx, r.ID, e)
	})
}

// system returns this package as a principal of the audit.
func system(r *Run) auth.Principal {
	return auth.Principal{Kind: auth.System, ID: "run", Project: r.Project}
}

// itself returns the run as the principal that owns its sandbox.
func (r *Run) itself() auth.Principal {
	return auth.Principal{Kind: auth.Project, ID: r.ID, Project: r.Project}
}
