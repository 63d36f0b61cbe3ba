package oversight

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/policy"
	"postern/internal/store"
)

// columns are the columns of an action without its payload, in the order of
// scanOne. insert, save and restore write them.
const columns = `id, project_id, kind, proposer, inbox_id, via, digest, state, version, rule, verdict, created_at, decider, decided_at, reason, attempts, result,
	send_at, ask_at, undo, not_before, note, settled_at, dropped_at, request, context, approvers, who, step_up, expires_at, stopped, author, written_at, lease, waits, parts, result_by, lapsed,
	(select count(*) from approval v where v.action_id = action.id and v.version = action.version),
	coalesce((select s.person from assignment s where s.action_id = action.id), '')`

func scanOne(row func(...any) error, extra ...any) (Action, error) {
	var a Action
	s := soft{&a.broken}
	var created, decided, sendAt, askAt, undo, due, settled, dropped, stepUp, expires, written, lease, waits, lapsed, approvers int64
	var request, asked string
	dest := []any{
		s.text(&a.ID), s.text(&a.Project), s.text((*string)(&a.Kind)), s.text(&a.Proposer), s.text(&a.Inbox), s.text(&a.Via), s.bytes(&a.Digest),
		s.text((*string)(&a.State)), s.number(&a.Version), s.text(&a.Rule), s.text(&a.Verdict),
		s.number(&created), s.text(&a.Decider), s.number(&decided), s.text(&a.Reason), s.number(&a.Attempts), s.text(&a.Result),
		s.number(&sendAt), s.number(&askAt), s.number(&undo), s.number(&due), s.text(&a.Note), s.number(&settled), s.number(&dropped),
		s.text(&request), s.text(&a.Context), s.number(&approvers), s.text(&asked), s.number(&stepUp), s.number(&expires), s.text(&a.Stopped),
		s.text(&a.Author), s.number(&written), s.number(&lease), s.number(&waits), s.text(&a.parts), s.text(&a.ResultBy), s.number(&lapsed), &a.Approvals,
		s.text(&a.Assignee),
	}
	if extra == nil {
		extra = []any{s.bytes(&a.Payload)}
	}
	err := store.NotFound(row(append(dest, extra...)...))
	if err == nil && json.Unmarshal([]byte(request), &a.Request) != nil {
		a.Request, a.broken = policy.Request{Kind: a.Kind}, true
	}
	a.votes = a.Approvals
	a.Approvers = int(max(min(approvers, maxApprovers), 0))
	a.broken = a.broken || !slices.Contains(States, a.State) || a.Version < 1 || int64(a.Approvers) != approvers
	if asked != "" {
		a.Who = strings.Split(asked, ",")
	}
	a.StepUp, a.Expires, a.Written = stepUp == 1, store.FromTime(expires), store.FromTime(written)
	a.lease, a.waits, a.lapsed = store.FromTime(lease), waits == 1, lapsed == 1
	a.Created, a.Decided = store.FromTime(created), store.FromTime(decided)
	a.SendAt, a.AskAt, a.Undo = store.FromTime(sendAt), store.FromTime(askAt), time.Duration(undo)*time.Microsecond
	a.Settled, a.Dropped = store.FromTime(settled), store.FromTime(dropped)
	if a.State == Approved {
		a.Due = store.FromTime(due)
	}
	return a, err
}

// maxApprovers bounds the number of approvers in a row; a document asks far fewer.
const maxApprovers = 1 << 16

// soft scans columns whose values may be of any type, as SQLite stores any type in
// any column. The attack: a row that cannot be scanned, and blocks the queue behind
// it. A value of the wrong type becomes zero and marks the action as broken.
type soft struct{ broken *bool }

// A softly is a destination of such a scan. It never fails.
type softly func(v any) bool

// Scan implements [sql.Scanner].
func (f softly) Scan(v any) error {
	f(v)
	return nil
}

func (s soft) scan(f softly) sql.Scanner {
	return softly(func(v any) bool {
		ok := f(v)
		*s.broken = *s.broken || !ok
		return ok
	})
}

func (s soft) text(p *string) sql.Scanner {
	return s.scan(func(v any) (ok bool) {
		*p, ok = v.(string)
		return ok
	})
}

func (s soft) number(p *int64) sql.Scanner {
	return s.scan(func(v any) (ok bool) {
		*p, ok = v.(int64)
		return ok
	})
}

func (s soft) bytes(p *[]byte) sql.Scanner {
	return s.scan(func(v any) (ok bool) {
		b, ok := v.([]byte)
		*p = slices.Clone(b) // the driver's own otherwise
		return ok
	})
}

// An assignment is the value of one column.
type assignment struct {
	column string
	value  any
}

// split returns the columns and the values of a row.
func split(row []assignment) (columns []string, args []any) {
	for _, v := range row {
		columns, args = append(columns, v.column), append(args, v.value)
	}
	return columns, args
}

// changing returns the columns of an action that an event may change.
func (a *Action) changing() ([]assignment, error) {
	request, err := json.Marshal(a.Request)
	if err != nil {
		return nil, fmt.Errorf("write request: %w", err)
	}
	return []assignment{
		{"state", string(a.State)},
		{"version", a.Version},
		{"proposer", a.Proposer},
		{"author", a.Author},
		{"via", a.Via},
		{"rule", a.Rule},
		{"verdict", a.Verdict},
		{"decider", a.Decider},
		{"decided_at", store.Time(a.Decided)},
		{"reason", a.Reason},
		{"attempts", a.Attempts},
		{"result", a.Result},
		{"send_at", store.Time(a.SendAt)},
		{"ask_at", store.Time(a.AskAt)},
		{"undo", a.Undo.Microseconds()},
		{"not_before", store.Time(a.Due)},
		{"note", a.Note},
		{"settled_at", store.Time(a.Settled)},
		{"request", string(request)},
		{"context", a.Context},
		{"approvers", a.Approvers},
		{"who", strings.Join(a.Who, ",")},
		{"step_up", store.Flag(a.StepUp)},
		{"expires_at", store.Time(a.Expires)},
		{"stopped", a.Stopped},
		{"written_at", store.Time(a.Written)},
		{"lease", store.Time(a.lease)},
		{"waits", store.Flag(a.waits)},
		{"parts", a.parts},
		{"result_by", a.ResultBy},
		{"lapsed", store.Flag(a.lapsed)},
	}, nil
}

// insert stores a new action with its seal.
func insert(ctx context.Context, tx *store.Tx, a Action) error {
	row, err := a.changing()
	if err != nil {
		return err
	}
	row = append(row,
		assignment{"id", a.ID},
		assignment{"project_id", a.Project},
		assignment{"kind", string(a.Kind)},
		assignment{"inbox_id", a.Inbox},
		assignment{"payload", a.Payload},
		assignment{"digest", a.Digest},
		assignment{"created_at", store.Time(a.Created)},
	)
	mac, err := tx.SealOf(sealedActions(), overlay(nil, row))
	if err != nil {
		return fmt.Errorf("seal action %s: %w", a.ID, err)
	}
	columns, args := split(append(row, assignment{"seal", mac}))
	err = tx.Later(ctx, `insert into action (`+strings.Join(columns, ", ")+`) values (`+store.Places(1, len(columns))+`)`, args...)
	if err != nil {
		return fmt.Errorf("insert action: %w", err)
	}
	return enqueue(ctx, tx, "", &a)
}

// overlay returns row with the assignments made.
func overlay(row map[string]any, set []assignment) map[string]any {
	out := maps.Clone(row)
	if out == nil {
		out = map[string]any{}
	}
	for _, v := range set {
		out[v.column] = v.value
	}
	return out
}

// assign returns the "set" of an update, with its arguments.
func assign(set []assignment) (string, []any) {
	columns, args := split(set)
	for i, c := range columns {
		columns[i] = c + " = $" + strconv.Itoa(i+1)
	}
	return strings.Join(columns, ", "), args
}

// save stores a, which an event has made of before, without its payload, and with its
// seal. Row has the values of before's row, whose seal held. It returns [ErrStale] if
// the row is not at before's version any more.
func save(ctx context.Context, tx *store.Tx, before, a Action, row map[string]any) error {
	set, err := a.changing()
	if err != nil {
		return err
	}
	mac, err := tx.SealOf(sealedActions(), overlay(row, set))
	if err != nil {
		return fmt.Errorf("seal action %s: %w", a.ID, err)
	}
	sets, args := assign(append(set, assignment{"seal", mac}))
	n := len(args)
	ok, err := tx.Changed(ctx, fmt.Sprintf(`update action set %s where id = $%d and version = $%d and state = $%d and stopped = $%d`, sets, n+1, n+2, n+3, n+4),
		append(args, before.ID, before.Version, before.State, before.Stopped)...)
	if err != nil {
		return fmt.Errorf("move action %s to %s: %w", a.ID, a.State, err)
	}
	if !ok {
		return fmt.Errorf("move action %s to %s: %w", a.ID, a.State, ErrStale)
	}
	if before.State == a.State && before.Version == a.Version {
		return nil // an approval of several, or a lease
	}
	return enqueue(ctx, tx, before.State, &a)
}

// restore overwrites the whole row of an action that cannot be trusted, whatever it
// says by now.
func restore(ctx context.Context, tx *store.Tx, a Action) error {
	set, err := a.changing()
	if err != nil {
		return err
	}
	sets, args := assign(append(set,
		assignment{"kind", string(a.Kind)},
		assignment{"inbox_id", a.Inbox},
		assignment{"digest", bytesOf(a.Digest)},
		assignment{"payload", bytesOf(a.Payload)},
		assignment{"created_at", store.Time(a.Created)},
		assignment{"dropped_at", store.Time(a.Dropped)},
	))
	if _, err := tx.ExecContext(ctx, fmt.Sprintf(`update action set %s where id = $%d`, sets, len(args)+1), append(args, a.ID)...); err != nil {
		return fmt.Errorf("restore action %s: %w", a.ID, err)
	}
	return enqueue(ctx, tx, Pending, &a) // whatever the row said, it may be in the queue
}

// bytesOf returns b, or empty bytes where b is nil, which would be NULL.
func bytesOf(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}
