package people

import (
	"context"
	"errors"
	"fmt"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// ErrOperatorLinked means that the operator is linked to another account.
var ErrOperatorLinked = errors.New("the operator is linked to another account: unlink it first")

// Operator returns which account the operator at the machine is linked to. The zero
// link means none. Who must be a person of the project.
func (p *People) Operator(ctx context.Context, who auth.Principal) (l auth.Link, err error) {
	if who.Kind != auth.Person {
		return l, fmt.Errorf("%s may not see who the operator is, only a person may: %w", who, auth.ErrForbidden)
	}
	err = p.db.View(ctx, func(tx *store.Tx) error {
		roll, err := auth.ReadRoll(ctx, tx, who.Project, time.Now())
		l = roll.Link()
		return err
	})
	return l, err
}

// LinkOperator says that the operator at the machine is the person called name. Owners
// and the operator may say so of somebody who decides, and it takes effect after
// [auth.SettleTime]. If the person says or confirms it in their own session, it takes
// effect at once; without an owner's role they can only confirm it. It returns
// [ErrOperatorLinked] if the operator is linked to another account. Linking the same
// account again changes nothing.
func (p *People) LinkOperator(ctx context.Context, who auth.Principal, name string) error {
	return p.db.Update(ctx, func(tx *store.Tx) error {
		them, l, err := operatorOf(ctx, tx, who, name)
		if err != nil {
			return err
		}
		linked := l.Person == personal(name)
		switch {
		case l.Person != "" && !linked:
			return fmt.Errorf("it is %s now: %w", l.Person, ErrOperatorLinked)
		case !linked && !who.Manages():
			return fmt.Errorf("%s may only confirm that they are the operator once an owner or the operator says so: %w", who, auth.ErrForbidden)
		case !(auth.Principal{Kind: auth.Person, Role: them.Role}).Decides() || !them.Disabled.IsZero():
			return fmt.Errorf("%w name: %s decides nothing: the account must be an owner's or a reviewer's, and enabled", auth.ErrInvalid, name)
		case linked && (!own(who, name) || !l.From.After(time.Now())):
			return nil
		}
		err = updateSealed(ctx, tx, them, func(tx *store.Tx, them Person) error {
			return auth.RecordChange(ctx, tx, them.id, who.String(), auth.Linked)
		})
		if err != nil {
			return err
		}
		roll, err := auth.ReadRoll(ctx, tx, who.Project, time.Now())
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.PersonLinkOperator, name, audit.Fields{"from": roll.Link().From.UTC().Format(time.RFC3339)})
	})
}

// UnlinkOperator ends the link of the operator to the person called name. Owners, the
// operator and the person may. Approvals over the local socket of actions that still
// wait count for nobody from then on.
func (p *People) UnlinkOperator(ctx context.Context, who auth.Principal, name string) error {
	return p.db.Update(ctx, func(tx *store.Tx) error {
		them, l, err := operatorOf(ctx, tx, who, name)
		if err != nil {
			return err
		}
		if l.Person != personal(name) {
			return fmt.Errorf("%w name: the operator is not linked to %s", auth.ErrInvalid, name)
		}
		return updateSealed(ctx, tx, them, func(tx *store.Tx, them Person) error { return endLink(ctx, tx, who, them) })
	})
}

// operatorOf returns the person called name and the operator's link, after a check that
// who may say whether the operator is that person.
func operatorOf(ctx context.Context, tx *store.Tx, who auth.Principal, name string) (them Person, l auth.Link, err error) {
	if own(who, name) {
		// The attack: a thief with a stolen session confirms.
		if them, err = ownAccount(ctx, tx, who); err == nil {
			err = requireStepUp(who, them)
		}
	} else if err = requireManager(ctx, tx, who); err == nil {
		them, err = find(ctx, tx, who, name)
	}
	if err != nil {
		return them, l, err
	}
	roll, err := auth.ReadRoll(ctx, tx, who.Project, time.Now())
	return them, roll.Link(), err
}

// endLink ends the operator's link to a person, if there is one. The caller seals the
// person's row.
func endLink(ctx context.Context, tx *store.Tx, who auth.Principal, them Person) error {
	roll, err := auth.ReadRoll(ctx, tx, them.project, time.Now())
	if err != nil || roll.Link().Person != personal(them.Name) {
		return err
	}
	if err := auth.RecordChange(ctx, tx, them.id, who.String(), auth.Unlinked); err != nil {
		return err
	}
	return audit.Append(ctx, tx, who, audit.PersonUnlinkOperator, them.Name, nil)
}

// own reports whether who is the person called name, in a session of their own.
func own(who auth.Principal, name string) bool {
	return who.Kind == auth.Person && !who.Operator && who.ID == name
}

// personal returns the principal of a person.
func personal(name string) string { return auth.Principal{Kind: auth.Person, ID: name}.String() }
