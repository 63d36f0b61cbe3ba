package oversight

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// The attacker of this file can write any row of the database but does not have
// the server's key. Three checks stand between a forged row and an effect, and
// each move of an action makes all of them ([Gate.doubt]):
//
//   - the row's seal, a MAC over all its columns except the payload, which is
//     hashed and compared with its digest: against a changed, inserted or swapped
//     row;
//   - the action's last move in the audit, whose entry is sealed as well: against
//     an old row of the same action, put back so that it is sent twice;
//   - this program's memory of its own moves: against an old row that is put back
//     together with an old audit.
//
// An action in doubt moves only by [distrusted]: it is asked about again, or ends
// as the audit says that it ended.

// ErrTampered means that this program did not write an action's row in the
// database. It is an [ErrStale]: the action has been put before people again.
var ErrTampered = fmt.Errorf("its row in the database was changed behind the server's back, so it is asked again: review all of it: %w", ErrStale)

// A doubtError says why an action's row is not trusted.
type doubtError struct{ why string }

func (e *doubtError) Error() string { return e.why }

// Unwrap makes it an [ErrTampered] for callers that do not handle it.
func (*doubtError) Unwrap() error { return ErrTampered }

// The tables that are sealed.
func sealedActions() store.Sealed {
	return store.Sealed{Table: "action", Key: []string{"id"}, Omit: []string{"payload"}}
}

func sealedApprovals() store.Sealed {
	return store.Sealed{Table: "approval", Key: []string{"action_id", "version", "person"}}
}

// The payloads of revisions are dropped after a while; their digests are sealed.
func sealedRevisions() store.Sealed {
	return store.Sealed{Table: "revision", Key: []string{"action_id", "version"}, Omit: []string{"payload"}}
}

// moves are the verbs of the entries with the field stands: the action's state and
// version after the move.
func moves() []audit.Verb {
	return []audit.Verb{
		audit.ActionPropose, audit.ActionRevise, audit.ActionAsk, audit.ActionApprove, audit.ActionLate, audit.ActionReject, audit.ActionExpire, audit.ActionStop, audit.ActionCancel,
		audit.ActionExecute, audit.ActionDefer, audit.ActionRetry, audit.ActionDone, audit.ActionFailed, audit.ActionUnknown, audit.ActionResolve, audit.ActionTampered,
	}
}

// enter appends an entry about a with its state and version, for [Gate.doubt] and
// for verifying the record.
func enter(ctx context.Context, tx *store.Tx, who auth.Principal, verb audit.Verb, a Action, f audit.Fields) error {
	if f == nil {
		f = audit.Fields{}
	}
	f["stands"] = stands(a.State, a.Version)
	return audit.Append(ctx, tx, who, verb, a.ID, f)
}

// stands returns a state and a version as the audit has them: "pending 1".
func stands(s State, version int64) string { return string(s) + " " + strconv.FormatInt(version, 10) }

// A standing is where an action is according to the audit.
type standing struct {
	state   State // empty where no entry can be trusted
	version int64
	entries bool // there is one, trusted or not
	began   bool // it was executed at least once
}

// parseStands reads what [enter] wrote.
func parseStands(s string) (State, int64, bool) {
	state, number, ok := strings.Cut(s, " ")
	version, err := strconv.ParseInt(number, 10, 64)
	return State(state), version, ok && err == nil
}

// lastMove returns where an action is according to the audit, without began.
func lastMove(ctx context.Context, tx *store.Tx, id string) (s standing, err error) {
	e, err := audit.Last(ctx, tx, id, moves())
	switch {
	case err == nil:
		s.state, s.version, _ = parseStands(e.Details()["stands"])
		s.entries = true
	case errors.Is(err, audit.ErrUnsealed):
		s.entries = true
	case !errors.Is(err, store.ErrNotFound):
		return s, err
	}
	return s, nil
}

// onRecord returns where an action is according to the audit.
func onRecord(ctx context.Context, tx *store.Tx, id string) (s standing, err error) {
	if s, err = lastMove(ctx, tx, id); err != nil {
		return s, err
	}
	_, err = audit.Last(ctx, tx, id, []audit.Verb{audit.ActionExecute})
	if s.began = !errors.Is(err, store.ErrNotFound); s.began && !errors.Is(err, audit.ErrUnsealed) && err != nil {
		return s, err
	}
	return s, nil
}

// agrees reports whether a is in the state that the audit says. A waiting action
// is rechecked often, and has one entry for all rechecks.
func (s standing) agrees(a *Action) bool {
	if s.state == a.State && s.version == a.Version {
		return true
	}
	return a.waits && (a.State == Approved || a.State == Executing) && s.state == Approved && a.Version > s.version
}

// doubt returns why the row of a, as it was read, cannot be trusted, or "" and the
// values of the row. The row is that of tx's snapshot, which may be older than what others
// have committed since, unless tx has a's turn.
func (g *Gate) doubt(ctx context.Context, tx *store.Tx, a *Action) (why string, row map[string]any, err error) {
	rows, err := tx.Rows(ctx, sealedActions(), false, `id = $1`, a.ID)
	if err != nil {
		return "", nil, fmt.Errorf("check action %s: %w", a.ID, err)
	}
	if len(rows) == 0 {
		return "", nil, fmt.Errorf("check action %s: %w", a.ID, ErrStale)
	}
	if !rows[0].Holds || a.broken {
		return "its row in the database does not have this server's seal", nil, nil
	}
	on, err := lastMove(ctx, tx, a.ID)
	if err != nil {
		return "", nil, err
	}
	if !on.agrees(a) {
		return fmt.Sprintf("its row in the database says that it is %s at version %d, but the record does not", a.State, a.Version), nil, nil
	}
	if v, ok := g.memory.Newest(tx, a.turn(), a.ID); ok && v > a.Version {
		return fmt.Sprintf("its row in the database is at version %d again, but was already at %d", a.Version, v), nil, nil
	}
	if a.State != Pending || a.votes == 0 {
		return "", rows[0].Values, nil
	}
	approvals, err := tx.Rows(ctx, sealedApprovals(), false, `action_id = $1 and version = $2`, a.ID, a.Version)
	if err != nil {
		return "", nil, fmt.Errorf("check approvals of %s: %w", a.ID, err)
	}
	for _, r := range approvals {
		if !r.Holds {
			return "an approval of it in the database does not have this server's seal", nil, nil
		}
	}
	return "", rows[0].Values, nil
}

// advance applies e to a, as it was read in tx, and stores the result. It returns
// a [doubtError] if this program did not write a's row.
func (g *Gate) advance(ctx context.Context, tx *store.Tx, a Action, e event) (Action, error) {
	if err := inTurn(tx, &a); err != nil {
		return a, err
	}
	row, err := g.trust(ctx, tx, &a)
	if err != nil {
		return a, err
	}
	b, err := e.next(a)
	if err != nil {
		return a, err
	}
	if err := save(ctx, tx, a, b, row); err != nil {
		return b, err
	}
	g.remember(tx, &b)
	return b, nil
}

// trust returns the values of a's row, or a [doubtError] if this program did not write
// it.
func (g *Gate) trust(ctx context.Context, tx *store.Tx, a *Action) (row map[string]any, err error) {
	why, row, err := g.doubt(ctx, tx, a)
	if err == nil && why != "" {
		err = &doubtError{why}
	}
	return row, err
}

// Trusted returns an error that wraps [ErrTampered] unless this program wrote the row
// of a, which was read in tx: in a [store.DB.View] or in the action's turn, since elsewhere
// the row and its record may be of two moments. An executor whose effect comes once, after
// the action is done, calls [Gate.InForce] before that effect.
func (g *Gate) Trusted(ctx context.Context, tx *store.Tx, a *Action) error {
	if !tx.Steady(a.turn()) {
		return fmt.Errorf("check action %s of %s in the turn of %s: %w", a.ID, a.turn(), tx.Turn(), ErrStale)
	}
	_, err := g.trust(ctx, tx, a)
	return err
}

// ErrRestored means that an approval is from before the database was found to be an older
// copy, or a clone: it may have been used since. It is an [ErrStale].
var ErrRestored = fmt.Errorf("it was approved before this database was restored or copied, and may have been carried out since: ask again: %w", ErrStale)

// Void makes every approval from before a moment void: [Gate.Distrust] has people asked
// again about what is open, and an approval of which the effect comes later, when a sandbox
// uses it, has no effect any more. The zero time makes none void. It is called before
// anything is executed.
func (g *Gate) Void(before time.Time) { g.void.Store(store.Time(before)) }

// Voided reports whether a was done before the moment of [Gate.Void].
func (g *Gate) Voided(a *Action) bool {
	return !a.Settled.IsZero() && store.Time(a.Settled) < g.void.Load()
}

// InForce is [Gate.Trusted] for an approval that is used now, and returns [ErrRestored] if
// it is void.
func (g *Gate) InForce(ctx context.Context, tx *store.Tx, a *Action) error {
	if g.Voided(a) {
		return fmt.Errorf("use action %s: %w", a.ID, ErrRestored)
	}
	return g.Trusted(ctx, tx, a)
}

// seal seals a's row as tx has written it, and remembers its version once tx is
// committed.
func (g *Gate) seal(ctx context.Context, tx *store.Tx, a *Action) error {
	if err := tx.Seal(ctx, sealedActions(), `id = $1`, a.ID); err != nil {
		return fmt.Errorf("seal action %s: %w", a.ID, err)
	}
	g.remember(tx, a)
	return nil
}

// remember remembers a's version once tx is committed.
func (g *Gate) remember(tx *store.Tx, a *Action) {
	g.memory.Remember(tx, a.ID, a.Version)
}

// distrust moves an action whose row this program did not write to a state from which
// nothing leaves before a person has reviewed it, and records that. Detail is the
// outcome of an execution that has just ended, or empty.
func (g *Gate) distrust(ctx context.Context, tx *store.Tx, id, why, detail string) error {
	a, err := scanOne(tx.QueryRowContext(ctx, `select `+columns+`, payload from action where id = $1`, id).Scan)
	if err != nil {
		return fmt.Errorf("distrust action %s: %w", id, err)
	}
	was := stands(a.State, a.Version)
	on, err := onRecord(ctx, tx, id)
	if err != nil {
		return err
	}
	// The row may not say truly whose turn is a's, and a version that is too large does no harm.
	if v, ok := g.memory.Newest(tx, store.All(), id); ok {
		on.version = max(on.version, v)
	}
	e := distrusted{answer: answer{now: time.Now()}, why: why, detail: detail, on: on}
	if e.verdict, err = g.judge.Judge(ctx, tx, a.Project, a.Request); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("judge action %s: %w", id, err)
		}
		// This program writes no request that policy cannot read.
		e.verdict = policy.Verdict{Effect: policy.Ask, Reason: "its request cannot be read"}
	}
	e.asked = asks(ctx, tx, id)
	e.findings = g.refind(ctx, tx, a, e.verdict.Grave)
	a = e.settle(a)
	if err := restore(ctx, tx, a); err != nil {
		return err
	}
	// Forged approvals of later versions must not count either.
	if _, err := tx.ExecContext(ctx, `delete from approval where action_id = $1 and version >= $2`, id, a.Version); err != nil {
		return fmt.Errorf("distrust action %s: %w", id, err)
	}
	if err := g.seal(ctx, tx, &a); err != nil {
		return err
	}
	g.log.WarnContext(ctx, "an action was changed in the database behind the server's back", "action", id, "why", why, "was", was, "stands", stands(a.State, a.Version))
	f := audit.Fields{"why": why, "row": was, "digest": a.Hex(), "rule": a.Rule, "verdict": a.Verdict, "result": detail}
	a.asking(f)
	if err := enter(ctx, tx, system(a), audit.ActionTampered, a, f); err != nil {
		return err
	}
	if a.State.settled() && on.state == a.State {
		return nil // its executor was notified when it settled
	}
	return g.moved(ctx, tx, a)
}

// asking puts into f whom a asks and what is grave. Where the row cannot be trusted any
// more, [asks] and [Gate.refind] read it from there, and [Ledger] compares approvals with it.
func (a *Action) asking(f audit.Fields) {
	f["approvers"], f["asked"] = strconv.Itoa(a.Approvers), strings.Join(a.Who, ",")
	if a.StepUp {
		f["step_up"] = "true"
	}
	if ids := a.Grave(); len(ids) > 0 {
		f["grave"] = strings.Join(ids, "\n")
	}
}

// asks returns whom an action asks according to the audit; the zero Verdict if there
// is no entry.
func asks(ctx context.Context, tx *store.Tx, id string) (v policy.Verdict) {
	e, err := audit.Last(ctx, tx, id, []audit.Verb{audit.ActionPropose, audit.ActionRevise, audit.ActionAsk, audit.ActionTampered})
	if err != nil {
		return v
	}
	f := e.Details()
	v.Approvers, _ = strconv.Atoi(f["approvers"])
	if f["asked"] != "" {
		v.Who = strings.Split(f["asked"], ",")
	}
	v.StepUp = f["step_up"] == "true"
	return v
}

// foundChanged reports whether the last entry about a move of an action is that its
// row was found changed. Without a trustworthy entry it assumes so.
func foundChanged(ctx context.Context, tx *store.Tx, id string) (bool, error) {
	e, err := audit.Last(ctx, tx, id, moves())
	if errors.Is(err, audit.ErrUnsealed) || errors.Is(err, store.ErrNotFound) {
		return true, nil
	}
	return e.Verb == audit.ActionTampered, err
}

// unlessTrusted calls [Gate.distrust] for an action if err is a [doubtError], and
// then returns true. It returns other errors unchanged.
func (g *Gate) unlessTrusted(ctx context.Context, tx *store.Tx, id string, err error) (bool, error) {
	d, ok := errors.AsType[*doubtError](err)
	if !ok {
		return false, err
	}
	err = g.distrust(ctx, tx, id, d.why, "")
	return err == nil, err
}

// errCommitted means that a decision was not made because the action was in doubt.
// People are asked again instead, and that must be committed.
var errCommitted = errors.New("asked again")

// wrap adds what failed to err, which may be nil.
func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// Adopt upgrades a database of a version without seals, once: it seals settled
// actions and the rows of others as they are, and leaves open actions to [Gate.Sweep],
// which has people asked about them again. If the rows were sealed with another
// server's key it returns [audit.ErrOtherKey], or with anew seals them again.
func (g *Gate) Adopt(ctx context.Context, anew bool, others ...store.Sealed) error {
	n := 0
	err := g.db.Update(ctx, func(tx *store.Tx) error {
		var entries int64
		if err := tx.One(ctx, `select seq + (select count(*) from audit_pending) from audit_head where id = 1`, nil, &entries); err != nil {
			return fmt.Errorf("read chain head: %w", err)
		}
		done, err := audit.Sealed(ctx, tx, audit.RecordSeal)
		if anew && errors.Is(err, audit.ErrOtherKey) {
			err = nil
		}
		if err != nil || done || entries == 0 {
			return err
		}
		ids, err := tx.Strings(ctx, `select id from action where state in ($1, $2, $3, $4)`, Denied, Done, Failed, Cancelled)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if err := tx.Seal(ctx, sealedActions(), `id = $1`, id); err != nil {
				return err
			}
		}
		n = len(ids)
		// Approvals of open actions are sealed, too: Sweep removes them when it has
		// people asked again.
		for _, s := range append(others, sealedApprovals(), sealedRevisions(), SealedSwitches()) {
			if err := tx.Seal(ctx, s, `seal is null or seal is not null`); err != nil {
				return err
			}
		}
		return audit.Append(ctx, tx, auth.Principal{Kind: auth.System, ID: "gate"}, audit.RecordSeal, "", audit.Fields{"settled": strconv.Itoa(n)})
	})
	if err != nil {
		return fmt.Errorf("seal actions from before: %w", err)
	}
	return nil
}

// Sweep checks all open actions, and has people asked again about those whose rows
// this program did not write. It returns how many these were. It also brings the queue's
// rows up to date.
func (g *Gate) Sweep(ctx context.Context) (n int, err error) {
	var at int64
	for id := ""; ; {
		var page, doubtful []Action
		var whys []string
		err := g.db.View(ctx, func(tx *store.Tx) (err error) {
			page, doubtful, whys = nil, nil, nil
			page, err = list(ctx, tx, `where state not in ($1, $2, $3, $4) and (created_at > $5 or created_at = $5 and id > $6) order by created_at, id limit $7`,
				Denied, Done, Failed, Cancelled, at, id, g.page)
			if err != nil {
				return err
			}
			for _, a := range page {
				why, _, err := g.doubt(ctx, tx, &a)
				if err != nil {
					return err
				}
				if why != "" {
					doubtful, whys = append(doubtful, a), append(whys, why)
				}
			}
			return nil
		})
		if err != nil {
			return n, fmt.Errorf("check actions: %w", err)
		}
		for i, a := range doubtful {
			err := g.db.UpdateIn(ctx, a.turn(), func(tx *store.Tx) error {
				a, err := peek(ctx, tx, a.ID)
				if err != nil {
					return err
				}
				// It may have moved legitimately since the View.
				if why, _, err := g.doubt(ctx, tx, &a); err != nil || why == "" {
					return err
				}
				return g.distrust(ctx, tx, a.ID, whys[i], "")
			})
			if err != nil {
				return n, err
			}
			n++
		}
		if len(page) < g.page {
			return n, g.tidyQueue(ctx)
		}
		at, id = store.Time(page[len(page)-1].Created), page[len(page)-1].ID
	}
}

// Distrust has people asked again about every open action, because the database is
// not the one that this program wrote last, for example an older copy: approved
// actions may have been executed since. It returns how many these were.
func (g *Gate) Distrust(ctx context.Context, why string) (n int, err error) {
	var ids []string
	err = g.db.View(ctx, func(tx *store.Tx) (err error) {
		ids, err = tx.Strings(ctx, `select id from action where state not in ($1, $2, $3, $4) order by created_at, id`, Denied, Done, Failed, Cancelled)
		return err
	})
	for _, id := range ids {
		if err == nil {
			err = g.db.Update(ctx, func(tx *store.Tx) error {
				return g.distrust(ctx, tx, id, why, "")
			})
		}
	}
	if err != nil {
		return 0, fmt.Errorf("put actions before people again: %w", err)
	}
	return len(ids), nil
}
