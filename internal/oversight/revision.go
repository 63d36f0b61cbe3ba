package oversight

import (
	"context"
	"fmt"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

// A Revision is one content of an action: the current one, or one that was replaced.
type Revision struct {
	Version int64  // the last version of the action with this content
	Author  string // a principal
	At      time.Time
	Digest  []byte
	Payload []byte // nil once it is dropped
	Current bool   // the action has this content now
}

// maxKept is how many payloads of earlier revisions of one action are kept. The
// attack: an agent that revises in a loop, until the disk is full.
const maxKept = 5

// keep stores the content of a, which is about to be replaced, as a revision.
func keep(ctx context.Context, tx *store.Tx, a Action) error {
	author, at := a.Author, a.Written
	if author == "" {
		author = a.Proposer
	}
	_, err := tx.ExecContext(ctx, `insert into revision (action_id, version, author, at, digest, payload) values ($1, $2, $3, $4, $5, $6)`,
		a.ID, a.Version, author, store.Time(at), a.Digest, a.Payload)
	if err != nil {
		return fmt.Errorf("keep revision: %w", err)
	}
	if err := tx.Seal(ctx, sealedRevisions(), `action_id = $1 and version = $2`, a.ID, a.Version); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `update revision set payload = $1 where action_id = $2 and version not in
		(select version from revision where action_id = $2 order by version desc limit $3)`, []byte{}, a.ID, maxKept)
	if err != nil {
		return fmt.Errorf("drop old revisions: %w", err)
	}
	return nil
}

// Revisions returns the contents of an action, oldest first; the last one is the
// current one. Who must be a person.
func (g *Gate) Revisions(ctx context.Context, who auth.Principal, id string) (out []Revision, err error) {
	if who.Kind != auth.Person {
		return nil, fmt.Errorf("%s may not see revisions, only a person may: %w", who, auth.ErrForbidden)
	}
	err = g.db.View(ctx, func(tx *store.Tx) error {
		a, err := g.read(ctx, tx, who, id)
		if err != nil {
			return err
		}
		out, err = store.List(ctx, tx, func(row func(...any) error) (r Revision, err error) {
			var at int64
			err = row(&r.Version, &r.Author, &at, &r.Digest, &r.Payload)
			r.At = store.FromTime(at)
			if len(r.Payload) == 0 {
				r.Payload = nil
			}
			return r, err
		}, `select version, author, at, digest, payload from revision where action_id = $1 order by version`, id)
		if err != nil {
			return fmt.Errorf("list revisions: %w", err)
		}
		last := Revision{Version: a.Version, Author: a.Author, At: a.Written, Digest: a.Digest, Payload: a.Payload, Current: true}
		if last.Author == "" {
			last.Author = a.Proposer
		}
		if len(last.Payload) == 0 {
			last.Payload = nil
		}
		out = append(out, last)
		return nil
	})
	return out, err
}

// File returns one file of an action's view, by its index, with its content. Who must
// be a person. It returns [store.ErrNotFound] if there is none, or if the payload was
// dropped.
func (g *Gate) File(ctx context.Context, who auth.Principal, id string, index int) (File, []byte, error) {
	if who.Kind != auth.Person {
		return File{}, nil, fmt.Errorf("%s may not open files of proposals, only a person may: %w", who, auth.ErrForbidden)
	}
	a, err := g.Action(ctx, who, id)
	if err != nil {
		return File{}, nil, err
	}
	o, ok := g.exec[a.Kind].(Opener)
	if !ok || !a.Dropped.IsZero() {
		return File{}, nil, fmt.Errorf("file %d of action %s: %w", index, id, store.ErrNotFound)
	}
	return o.OpenFile(a, index)
}
