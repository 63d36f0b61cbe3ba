package oversight

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"postern/internal/auth"
	"postern/internal/store"
)

// A Pulse tells whether a page about actions is still true, without reading any.
type Pulse struct {
	Waiting int    // actions of the project that wait for a person, at most maxPulse
	Mark    string // another whenever one of these, or of those that are unknown, came, went, changed or got one more approval
}

// maxPulse bounds how many actions a pulse looks at.
const maxPulse = 1001

// Pulse returns how the queue of who's project stands. It is cheap enough to be
// asked for each second.
func (g *Gate) Pulse(ctx context.Context, who auth.Principal) (p Pulse, err error) {
	if who.Kind != auth.Person {
		return Pulse{}, fmt.Errorf("%s does not look at the queue: %w", who, auth.ErrForbidden)
	}
	err = g.db.View(ctx, func(tx *store.Tx) error {
		p = Pulse{}
		h := sha256.New()
		scan := func(row func(...any) error) (struct{}, error) {
			var id, state string
			var version, votes int64
			err := row(&id, &state, &version, &votes)
			if State(state) == Pending {
				p.Waiting++
			}
			fmt.Fprintf(h, "%s %s %d %d\n", id, state, version, votes)
			return struct{}{}, err
		}
		_, err := store.List(ctx, tx, scan, `select id, state, version,
				(select count(*) from approval where approval.action_id = action.id and approval.version = action.version)
			from action where project_id = $1 and state in ($2, $3) order by created_at, id limit $4`, who.Project, Pending, Unknown, maxPulse)
		p.Mark = hex.EncodeToString(h.Sum(nil)[:8])
		return err
	})
	if err != nil {
		return Pulse{}, fmt.Errorf("read queue: %w", err)
	}
	return p, nil
}

// Mark returns how one action of who's project stands: another text whenever
// it moved, was tried, or got one more approval or comment.
func (g *Gate) Mark(ctx context.Context, who auth.Principal, id string) (mark string, err error) {
	if who.Kind != auth.Person {
		return "", fmt.Errorf("%s does not watch actions: %w", who, auth.ErrForbidden)
	}
	err = g.db.View(ctx, func(tx *store.Tx) error {
		var state string
		var version, attempts, votes, remarks int64
		err := tx.One(ctx, `select state, version, attempts, (select count(*) from remark where remark.action_id = action.id),
				(select count(*) from approval where approval.action_id = action.id and approval.version = action.version)
			from action where project_id = $1 and id = $2`, []any{who.Project, id}, &state, &version, &attempts, &remarks, &votes)
		mark = fmt.Sprintf("%s-%d-%d-%d-%d", state, version, attempts, votes, remarks)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("action %s: %w", id, err)
	}
	return mark, nil
}
