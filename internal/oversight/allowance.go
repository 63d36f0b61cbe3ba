package oversight

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// An Allowance is what a person allows together with an approval: what is like this
// action, until a time. Exactly one of Address and Domain is set.
type Allowance struct {
	Address string    // of the recipient, or the host of a request
	Domain  string    // all addresses of a domain
	Path    string    // of requests: "/v1/models", or "/v1/*" for everything below; else empty
	Files   bool      // also mail with files
	Until   time.Time // at most MaxAllowance ahead
}

// MaxAllowance is how far ahead the end of an [Allowance] may be.
const MaxAllowance = 90 * 24 * time.Hour

// ErrAllowance means that an approval cannot also allow what is like the action.
var ErrAllowance = errors.New("this cannot be allowed together with the approval")

// An Allower is an [Executor] that can allow what is like an action until a time.
type Allower interface {
	// Allow makes the allowance in tx, the transaction of who's approval of a, and returns
	// audit fields that say what it is. An error that wraps [ErrAllowance] says why it
	// cannot be made, and refuses the approval.
	Allow(ctx context.Context, tx *store.Tx, who auth.Principal, a Action, w Allowance) (audit.Fields, error)
}

// allow makes the allowance of an approval that has just approved a. It returns what
// the record says about it.
func (g *Gate) allow(ctx context.Context, tx *store.Tx, who auth.Principal, a *Action, w Allowance) (audit.Fields, error) {
	refuse := func(why string) (audit.Fields, error) { return nil, fmt.Errorf("%s: %w", why, ErrAllowance) }
	now := time.Now()
	switch x, ok := g.exec[a.Kind].(Allower); {
	case !ok:
		return refuse("what is like " + string(a.Kind) + " cannot be allowed here")
	case (w.Address == "") == (w.Domain == ""):
		return refuse("name an address or a domain")
	case !w.Until.After(now) || w.Until.Sub(now) > MaxAllowance:
		return refuse("its end must be within 90 days")
	case len(a.Grave()) > 0:
		// The attack: a lookalike that was ticked for one mail gets an open door. One tick is
		// for this action alone.
		return refuse("it has a grave finding, so each one is reviewed")
	case slices.ContainsFunc(a.Request.Findings, func(f policy.Finding) bool { return f.Kind == policy.FindHidden }):
		// Also where the policy does not call it grave: a later mail would hide it again.
		return refuse("it has a hidden recipient, so each one is reviewed")
	case a.State != Approved || a.Approvers > 1:
		return refuse("other people must approve this too, and an allowance is one person's")
	default:
		return x.Allow(ctx, tx, who, *a, w)
	}
}
