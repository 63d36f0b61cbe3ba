package oversight

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

// maySee reports whether who may see a: a person of its project, the agent, grant or
// sandbox that proposed it or has its inbox, or the project key that proposed it.
func maySee(who auth.Principal, a *Action) bool {
	if who.Project != a.Project {
		return false
	}
	switch who.Kind {
	case auth.Person:
		return true
	case auth.Agent, auth.Sandbox, auth.Grant:
		// A grant covers several inboxes: the caller has set who.Inbox to one of them,
		// after checking that the grant covers it.
		return a.Proposer == who.String() || who.Inbox != "" && who.Inbox == a.Inbox
	case auth.Project:
		return a.Proposer == who.String() // only reviewers see other proposals, not the keys that run sandboxes
	case auth.Recovery, auth.System:
		return false
	}
	return false
}

// read returns one action whole. An action that who may not see is not found. The
// attack: guessing ids, if "not yours" differed from "not there".
func (g *Gate) read(ctx context.Context, tx *store.Tx, who auth.Principal, id string) (Action, error) {
	a, err := scanOne(tx.QueryRowContext(ctx, `select `+columns+`, payload from action where id = $1`, id).Scan)
	if err == nil && !maySee(who, &a) {
		err = store.ErrNotFound
	}
	if err != nil {
		return Action{}, fmt.Errorf("action %s: %w", id, err)
	}
	as := []Action{a}
	if err := weigh(ctx, tx, as); err != nil {
		return Action{}, fmt.Errorf("action %s: %w", id, err)
	}
	return as[0], nil
}

// peek returns one action without its payload.
func peek(ctx context.Context, tx *store.Tx, id string) (Action, error) {
	var size int64
	a, err := scanOne(tx.QueryRowContext(ctx, `select `+columns+`, length(payload) from action where id = $1`, id).Scan, &size)
	if err != nil {
		return Action{}, fmt.Errorf("action %s: %w", id, err)
	}
	return a, nil
}

// ActionUnchecked returns any action, without its payload, as part of tx. It checks
// no principal: it is for the parts of this program that notify people or finish
// an action that they execute. No door may call it.
func ActionUnchecked(ctx context.Context, tx *store.Tx, id string) (Action, error) {
	as, err := list(ctx, tx, `where id = $1`, id)
	if err == nil && len(as) == 0 {
		err = store.ErrNotFound
	}
	if err == nil {
		err = weigh(ctx, tx, as)
	}
	if err != nil {
		return Action{}, fmt.Errorf("action %s: %w", id, err)
	}
	return as[0], nil
}

// Find returns one action with its payload, as part of tx.
func (g *Gate) Find(ctx context.Context, tx *store.Tx, who auth.Principal, id string) (Action, error) {
	return g.read(ctx, tx, who, id)
}

// Used reports whether anything was ever proposed.
func (g *Gate) Used(ctx context.Context) (used bool, err error) {
	var n int
	err = g.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from (select 1 from action limit 1) as one`, nil, &n)
	})
	return n > 0, wrap("look for actions", err)
}

// InboxOf returns the id of the inbox of an action of who's project. It may be
// empty.
func (g *Gate) InboxOf(ctx context.Context, who auth.Principal, id string) (inbox string, err error) {
	err = g.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select inbox_id from action where id = $1 and project_id = $2`, []any{id, who.Project}, &inbox)
	})
	if err != nil {
		return "", fmt.Errorf("action %s: %w", id, err)
	}
	return inbox, nil
}

// Action returns one action with its payload.
func (g *Gate) Action(ctx context.Context, who auth.Principal, id string) (a Action, err error) {
	err = g.db.View(ctx, func(tx *store.Tx) error {
		if a, err = g.read(ctx, tx, who, id); err != nil {
			return err
		}
		a.Doubt, _, err = g.doubt(ctx, tx, &a)
		return err
	})
	return a, err
}

// Show returns what a reviewer needs to see of a.
func (g *Gate) Show(a Action) (View, error) {
	if !a.Dropped.IsZero() {
		return View{Title: "(the content is no longer kept)", Notes: []string{
			"the content was shown to the people who decided, and was removed " + a.Dropped.Format(time.RFC1123) + "; its digest is kept",
		}}, nil
	}
	e, ok := g.exec[a.Kind]
	if !ok {
		return View{}, fmt.Errorf("show action: no executor for kind %q", a.Kind)
	}
	v, err := e.Show(a)
	if err != nil {
		return View{}, err
	}
	if !a.SendAt.IsZero() {
		v.Fields = append(v.Fields, Field{"Leaves", "not before " + a.SendAt.Format(time.RFC1123)})
		if a.State == Pending && time.Since(a.SendAt) > 0 && a.AskAt.IsZero() {
			v.Notes = append([]string{"its time to leave has passed"}, v.Notes...)
		}
	}
	v.Context, v.Flags, v.Findings = a.Context, a.Request.Flags, a.Findings()
	if a.Note != "" {
		v.Notes = append(strings.Split(a.Note, "\n"), v.Notes...)
	}
	if a.Doubt != "" {
		v.Notes = append([]string{"the server's database was changed behind its back: " + a.Doubt + ". It cannot be decided on in this state, and is asked again"}, v.Notes...)
	}
	return v, nil
}

// Missing returns what a waits for, for anybody who may see it; it is empty if a
// waits for nobody. [Action.Lacks] is the same for reviewers.
func (a *Action) Missing() string {
	switch {
	case a.State == Scheduled:
		return "its time: a person is asked " + a.AskAt.Format(time.RFC1123)
	case a.State != Pending:
		return ""
	case a.Approvers > 1:
		return fmt.Sprintf("%d of %d approvals", a.Approvers-a.Approvals, a.Approvers)
	}
	return "an approval"
}

// A Query selects actions. The zero Query selects the newest 100.
type Query struct {
	States []State // any of these; empty means all
	Limit  int     // at most so many; 0 means 100
	// Inboxes are ids of inboxes that a grant covers, as the caller has checked: the
	// grant also sees what is proposed for them. They are ignored for other
	// principals.
	Inboxes []string
}

// Actions returns the actions of who's project that who may see and q selects,
// newest first and without their payloads.
func (g *Gate) Actions(ctx context.Context, who auth.Principal, q Query) (out []Action, err error) {
	if q.Limit <= 0 {
		q.Limit = 100
	}
	where := `where project_id = $1`
	args := []any{who.Project}
	if who.Kind != auth.Grant {
		q.Inboxes = nil
	}
	if who.Kind != auth.Person {
		args = append(args, who.String(), who.Inbox)
		for _, inbox := range q.Inboxes {
			args = append(args, inbox)
		}
		where += ` and (proposer = $2 or inbox_id <> '' and inbox_id in (` + store.Places(3, 1+len(q.Inboxes)) + `))`
	}
	if len(q.States) > 0 {
		where += ` and state in (` + store.Places(len(args)+1, len(q.States)) + `)`
		for _, s := range q.States {
			args = append(args, s)
		}
	}
	args = append(args, q.Limit)
	where += fmt.Sprintf(` order by created_at desc, id limit $%d`, len(args))
	err = g.db.View(ctx, func(tx *store.Tx) error {
		if out, err = list(ctx, tx, where, args...); err != nil {
			return err
		}
		return weigh(ctx, tx, out)
	})
	return slices.DeleteFunc(out, func(a Action) bool { return !maySee(who, &a) && !slices.Contains(q.Inboxes, a.Inbox) }), err
}

// Waiting returns how many actions of an inbox wait for a person or for their time. The
// caller has checked that whoever asks has a part in the inbox.
func (g *Gate) Waiting(ctx context.Context, project, inbox string) (n int, err error) {
	err = g.db.View(ctx, func(tx *store.Tx) error {
		return tx.QueryRowContext(ctx, `select count(*) from action where project_id = $1 and inbox_id = $2 and state in ($3, $4)`,
			project, inbox, Pending, Scheduled).Scan(&n)
	})
	if err != nil {
		return 0, fmt.Errorf("count waiting actions: %w", err)
	}
	return n, nil
}

func list(ctx context.Context, tx *store.Tx, where string, args ...any) ([]Action, error) {
	// The payload is as large as a message; its length stands for it.
	scan := func(row func(...any) error) (Action, error) {
		var size int64
		return scanOne(row, &size)
	}
	out, err := store.List(ctx, tx, scan, `select `+columns+`, length(payload) from action `+where, args...)
	if err != nil {
		return nil, fmt.Errorf("list actions: %w", err)
	}
	return out, nil
}
