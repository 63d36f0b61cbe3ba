package oversight

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// ErrRemark means that a comment is empty, too long, or one too many.
var ErrRemark = errors.New("a comment has 1 to 2000 characters, and an action at most 200 comments")

const (
	maxRemark  = 2000 // bytes
	maxRemarks = 200
)

// A Remark is a person's comment on an action.
type Remark struct {
	ID     string
	Person string // a principal; only "person" where the reader is not a person
	At     time.Time
	Text   string
	Agent  bool // the proposer may read it
}

// Comment records a comment on an action by who, who must decide. If agent is set
// the proposer may read it, too.
func (g *Gate) Comment(ctx context.Context, who auth.Principal, id, text string, agent bool) (r Remark, err error) {
	if !who.Decides() {
		return Remark{}, fmt.Errorf("%s cannot comment, only a person who reviews can: %w", who, auth.ErrForbidden)
	}
	if text = strings.TrimSpace(text); text == "" || len(text) > maxRemark || strings.ContainsRune(text, 0) {
		return Remark{}, ErrRemark
	}
	err = g.UpdateAction(ctx, who, id, func(tx *store.Tx) error {
		r = Remark{ID: "rem_" + rand.Text(), Person: who.String(), At: stored(time.Now()), Text: text, Agent: agent}
		a, err := g.read(ctx, tx, who, id)
		if err != nil {
			return err
		}
		fresh, err := tx.Changed(ctx, `insert into remark (id, action_id, person, at, text, agent)
			select $1, $2, $3, $4, $5, $6 where (select count(*) from remark where action_id = $2) < $7`,
			r.ID, id, r.Person, store.Time(r.At), r.Text, store.Flag(agent), maxRemarks)
		if err != nil {
			return fmt.Errorf("record comment: %w", err)
		}
		if !fresh {
			return ErrRemark
		}
		if err := audit.Append(ctx, tx, who, audit.ActionComment, id, audit.Fields{"comment": r.ID, "size": strconv.Itoa(len(text))}); err != nil {
			return err
		}
		return g.commented(ctx, tx, a, r)
	})
	return r, err
}

// Remarks returns the comments on an action that who may see, oldest first. People
// get all of them; others get those that are for the proposer, without their
// authors.
func (g *Gate) Remarks(ctx context.Context, who auth.Principal, id string) (out []Remark, err error) {
	person := who.Kind == auth.Person
	err = g.db.View(ctx, func(tx *store.Tx) error {
		if _, err := g.read(ctx, tx, who, id); err != nil {
			return err
		}
		out, err = store.List(ctx, tx, func(row func(...any) error) (r Remark, err error) {
			var at, agent int64
			err = row(&r.ID, &r.Person, &at, &r.Text, &agent)
			r.At, r.Agent = store.FromTime(at), agent == 1
			if !person {
				r.Person = string(auth.Person)
			}
			return r, err
		}, `select id, person, at, text, agent from remark where action_id = $1 and agent >= $2 order by at, id`, id, store.Flag(!person))
		return err
	})
	return out, err
}
