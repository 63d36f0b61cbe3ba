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

// An Allowance lets actions that are similar to an approved one go without asking, until
// a time. Exactly one of Address and Domain is set.
type Allowance struct {
	Address string    // of the recipient, or the host of a request
	Domain  string    // all addresses of a domain
	Path    string    // of requests: "/v1/models", or "/v1/*" for everything below; else empty
	Files   bool      // of mail: also with files
	Until   time.Time // at most MaxAllowance ahead
}

// MaxAllowance is how far ahead the end of an [Allowance] may be.
const MaxAllowance = 90 * 24 * time.Hour

// ErrAllowance means that an approval cannot be combined with this allowance.
var ErrAllowance = errors.New("this cannot be allowed together with the approval")

// An Allower is an [Executor] that can carry out an [Allowance].
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
		return refuse("similar actions of kind " + string(a.Kind) + " cannot be allowed in advance")
	case (w.Address == "") == (w.Domain == ""):
		return refuse("name an address or a domain")
	case !w.Until.After(now) || w.Until.Sub(now) > MaxAllowance:
		return refuse("its end must be within 90 days")
	case len(a.Grave()) > 0:
		// The attack: a lookalike that was ticked for one mail gets an open door. One tick is
		// for this action alone.
		return refuse("it has a grave finding, so similar actions must be reviewed too")
	case slices.ContainsFunc(a.Request.Findings, func(f policy.Finding) bool { return f.Kind == policy.FindHidden }):
		// Also if the policy does not call it grave: a later mail would hide the recipient again.
		return refuse("it has a hidden recipient, so similar actions must be reviewed too")
	case a.State != Approved || a.Approvers > 1:
		return refuse("other people must approve this too, and one person alone cannot allow similar actions")
	default:
		return x.Allow(ctx, tx, who, *a, w)
	}
}
