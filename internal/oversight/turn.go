package oversight

import (
	"context"
	"fmt"

	"postern/internal/auth"
	"postern/internal/store"
)

// Turn returns the turn of a transaction that moves an action of an inbox, by its id.
// What decides on the action there is the inbox's too: its mode, its history, how much
// of it waits. Actions of no inbox are counted by their project, and take its turn.
func Turn(project, inbox string) store.Turn { return store.Thing(project, inbox) }

// turn returns the turn of a transaction that moves a.
func (a *Action) turn() store.Turn { return Turn(a.Project, a.Inbox) }

// turnOf returns the turn of an action of who's project. An action of another project
// is not found, and its turn is not waited for.
func (g *Gate) turnOf(ctx context.Context, who auth.Principal, id string) (store.Turn, error) {
	var project, inbox string
	err := g.db.Peek(ctx, `select project_id, inbox_id from action where id = $1`, []any{id}, &project, &inbox)
	if err == nil && project != who.Project {
		err = store.ErrNotFound
	}
	if err != nil {
		return store.Turn{}, fmt.Errorf("action %s: %w", id, err)
	}
	return Turn(project, inbox), nil
}

// UpdateAction is [store.DB.UpdateIn] with the turn of an action of who's project.
func (g *Gate) UpdateAction(ctx context.Context, who auth.Principal, id string, fn func(tx *store.Tx) error) error {
	turn, err := g.turnOf(ctx, who, id)
	if err != nil {
		return err
	}
	return g.db.UpdateIn(ctx, turn, fn)
}

// inTurn returns an error unless tx excludes other moves of a, as it was read in tx.
// The attack: somebody who can write the database moves the action to another inbox
// before it is its turn, so that what that inbox may do is counted twice.
func inTurn(tx *store.Tx, a *Action) error {
	if !tx.Turn().Includes(a.turn()) {
		return fmt.Errorf("move action %s of %s in the turn of %s: %w", a.ID, a.turn(), tx.Turn(), ErrStale)
	}
	return nil
}
