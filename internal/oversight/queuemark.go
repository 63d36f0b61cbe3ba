package oversight

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"postern/internal/auth"
	"postern/internal/store"
)

// A QueueMark is the state of a project's queue in short, from which a page knows
// whether what it shows is out of date, without reading any action.
type QueueMark struct {
	Waiting int // actions of the project that wait for a person, at most maxMarked
	// Mark changes when a waiting or unknown action comes, goes, changes or gets an
	// approval. It is opaque.
	Mark string
}

// maxMarked bounds how many actions a mark is made of.
const maxMarked = 1001

// QueueMark returns the mark of the queue of who's project. It is cheap enough to
// be called every second.
func (g *Gate) QueueMark(ctx context.Context, who auth.Principal) (p QueueMark, err error) {
	if who.Kind != auth.Person {
		return QueueMark{}, fmt.Errorf("%s may not see the queue, only a person may: %w", who, auth.ErrForbidden)
	}
	err = g.db.View(ctx, func(tx *store.Tx) error {
		p = QueueMark{}
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
			from action where project_id = $1 and state in ($2, $3) order by created_at, id limit $4`, who.Project, Pending, Unknown, maxMarked)
		p.Mark = hex.EncodeToString(h.Sum(nil)[:8])
		return err
	})
	if err != nil {
		return QueueMark{}, fmt.Errorf("read queue: %w", err)
	}
	return p, nil
}

// Mark returns an opaque text about one action of who's project, which changes when
// the action moves, is tried, or gets an approval or a comment.
func (g *Gate) Mark(ctx context.Context, who auth.Principal, id string) (mark string, err error) {
	if who.Kind != auth.Person {
		return "", fmt.Errorf("%s may not watch actions, only a person may: %w", who, auth.ErrForbidden)
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
