package permit

import (
	"context"
	"errors"
	"slices"
	"time"

	"postern/internal/auth"
	"postern/internal/outgoing"
	"postern/internal/store"
)

// Add is [Grant], and has this program know of the permit at once.
func (r *Register) Add(ctx context.Context, tx *store.Tx, p Permit) (Permit, error) {
	p, err := Grant(ctx, tx, p)
	if err == nil {
		tx.AfterCommit(func() { r.forget(p.Project) })
	}
	return p, err
}

// OfAction returns the permit that came of an action of a project, as part of tx. It
// returns [ErrNotFound] if there is none, and for one that this program did not write.
func OfAction(ctx context.Context, tx *store.Tx, project, action string) (Permit, error) {
	p, err := scan(tx.QueryRowContext(ctx, `select `+columns+` from permit where action_id = $1 and project_id = $2`, action, project).Scan)
	if err != nil {
		return Permit{}, err
	}
	holding, err := tx.Holding(ctx, Sealed(), `id = $1`, p.ID)
	if err == nil && !holding {
		err = ErrNotFound
	}
	return p, err
}

// Secret returns the ID of a permit by which the sandbox who may use a secret, given
// by its ID, and that was asked for because of why. It is empty if there is none.
func (r *Register) Secret(ctx context.Context, who auth.Principal, secret, why string) string {
	for p := range r.all(ctx, who) {
		if p.Kind == Secret && secret != "" && p.Secret == secret && p.Why == why {
			return p.ID
		}
	}
	return ""
}

// Request returns the ID of a permit that names the methods of a request of the
// sandbox who and allows it. One that is for every method names none. Rule is the ID of
// the rule that asks: a permit of kind [Request] answers the one that it was made for.
func (r *Register) Request(ctx context.Context, who auth.Principal, q *outgoing.Request, rule string) (id string, ok bool) {
	for p := range r.answers(ctx, who, Request, rule) {
		if p.opens(q.Port) && slices.Contains(p.Hosts, q.Host) && len(p.Methods) > 0 && p.allows(q) {
			return p.ID, true
		}
	}
	for p := range r.holding(ctx, who) {
		if len(p.Methods) > 0 && p.names(q.Host, q.Port) && p.allows(q) {
			return p.ID, true
		}
	}
	return "", false
}

// InForce reports whether a permit of a project is in force. If that is not known, it
// is not.
func (r *Register) InForce(ctx context.Context, project, id string) bool {
	s, err := r.inForce(ctx, project)
	if err != nil {
		return false
	}
	now := time.Now()
	if i := slices.IndexFunc(s.permits, func(p Permit) bool { return p.ID == id }); i >= 0 {
		return s.permits[i].Holds(now)
	}
	// Another program may have granted it since.
	holds := false
	err = r.db.View(ctx, func(tx *store.Tx) error {
		p, err := scan(tx.QueryRowContext(ctx, `select `+columns+` from permit where id = $1 and project_id = $2`, id, project).Scan)
		if err != nil || !p.Holds(now) {
			return err
		}
		holds, err = tx.Holding(ctx, Sealed(), `id = $1`, id)
		return err
	})
	if err != nil && !errors.Is(err, ErrNotFound) {
		r.log.ErrorContext(ctx, "read permit", "permit", id, "err", err)
	}
	return err == nil && holds
}
