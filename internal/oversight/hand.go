package oversight

import (
	"context"
	"fmt"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// ErrByHand means that policy does not let one person do this without an action.
var ErrByHand = fmt.Errorf("policy does not leave this to one person: %w", auth.ErrForbidden)

// ByHand returns an error unless policy lets who do r alone, without an action: for
// example raise a mode, or add to an allow list. It counts as one person's approval.
// The attack: policy asks two people about an agent's request, and one
// of them makes the change by hand instead. It returns [ErrByHand], [ErrNotAsked]
// or [ErrStepUp].
func (g *Gate) ByHand(ctx context.Context, tx *store.Tx, who auth.Principal, r policy.Request) error {
	if !who.Decides() {
		return fmt.Errorf("%s cannot decide, only a person who reviews can: %w", who, auth.ErrForbidden)
	}
	r.Via, r.Time = "hand", stored(time.Now())
	v, err := g.judge.Judge(ctx, tx, who.Project, r)
	if err != nil {
		return fmt.Errorf("judge what %s does: %w", who, err)
	}
	a := Action{Who: v.Who} // for Asks
	switch {
	case v.Effect == policy.Deny:
		return fmt.Errorf("%s: %w", v.Reason, ErrByHand)
	case v.Effect == policy.Allow:
		return nil
	case v.Approvers > 1:
		return fmt.Errorf("rule %s asks %d people about %s: let the agent of the inbox request it (postern inbox request), and approve that: %w", v.Rule, v.Approvers, r.Kind, ErrByHand)
	case !a.Asks(who):
		return fmt.Errorf("it asks %s: %w", strings.Join(v.Who, ", "), ErrNotAsked)
	case v.StepUp && !who.Proved():
		return ErrStepUp
	}
	return nil
}
