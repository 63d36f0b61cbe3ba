// Package oversighttest lets a test change actions in the database as if the
// server itself had written them. It is for tests only.
package oversighttest

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// Settle makes good what tx has just written to actions and approvals, such as
// a time that is to have come or a state that a crash would leave: all rows are
// sealed, and what moved is on the record.
func Settle(ctx context.Context, tx *store.Tx) error {
	type row struct {
		id, project, state string
		version, waits     int64
	}
	rows, err := store.List(ctx, tx, func(scan func(...any) error) (r row, err error) {
		err = scan(&r.id, &r.project, &r.state, &r.version, &r.waits)
		return r, err
	}, `select id, project_id, state, version, waits from action`)
	if err != nil {
		return err
	}
	// Entries of the others do not say where an action stands.
	var moves []audit.Verb
	still := []audit.Verb{audit.ActionVote, audit.ActionComment, audit.ActionSnooze, audit.ActionAssign}
	for _, v := range audit.Verbs() {
		if strings.HasPrefix(string(v), "action.") && !slices.Contains(still, v) {
			moves = append(moves, v)
		}
	}
	for _, r := range rows {
		now := r.state + " " + strconv.FormatInt(r.version, 10)
		e, err := audit.Last(ctx, tx, r.id, moves)
		if err != nil && !errors.Is(err, store.ErrNotFound) && !errors.Is(err, audit.ErrUnsealed) {
			return err
		}
		last := e.Details()["stands"]
		if last == now || r.waits == 1 && strings.HasPrefix(last, "approved ") && (r.state == "approved" || r.state == "executing") {
			continue
		}
		verb := audit.ActionAsk
		if r.state == "executing" {
			verb = audit.ActionExecute
		}
		who := auth.Principal{Kind: auth.System, ID: "test", Project: r.project}
		if err := audit.Append(ctx, tx, who, verb, r.id, audit.Fields{"stands": now}); err != nil {
			return err
		}
	}
	return storetest.Reseal(ctx, tx)
}
