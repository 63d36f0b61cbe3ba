package mailbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// Allow implements [oversight.Allower]: with an approval of mail it adds the recipient, or
// the recipient's domain, to the inbox's allow list until a time. who needs the same rights
// as for adding an entry by hand. The entry covers no more than w says, and replaces no
// other entry.
func (x sendExecutor) Allow(ctx context.Context, tx *store.Tx, who auth.Principal, a oversight.Action, w oversight.Allowance) (audit.Fields, error) {
	refuse := func(why string) (audit.Fields, error) {
		return nil, fmt.Errorf("%s: %w", why, oversight.ErrAllowance)
	}
	pattern := w.Address
	if w.Domain != "" {
		pattern = "*@" + w.Domain
	}
	pattern, err := checkAllowed(pattern, w.Until)
	if err != nil {
		return refuse(err.Error())
	}
	if w.Address != "" && strings.HasPrefix(pattern, "*") {
		return refuse("address: must be one address; use domain for all addresses of a domain")
	}
	// The attack: a changed form, with which the approval of one mail lets the inbox write
	// to somebody whom the reviewer was not shown.
	if !slices.ContainsFunc(a.Request.To, func(to string) bool { return allows(map[string]bool{pattern: true}, to) }) {
		return refuse(pattern + " is not a recipient of this mail")
	}
	if host := hostOf(pattern); w.Domain != "" && slices.Contains(providers, host) {
		return refuse("anybody can get an address at " + host + ": allow the address alone")
	}
	if !who.Manages() {
		return nil, fmt.Errorf("%s may not add to an allow list, only an owner may: %w", who, auth.ErrForbidden)
	}
	b, err := directory.LookupFor(ctx, tx, who, a.Inbox)
	if err != nil {
		return nil, err
	}
	if b.Mode != policy.GatedSend {
		return refuse("the allow list counts only in mode gated_send, and the inbox is in mode " + string(b.Mode))
	}
	var n int
	err = tx.One(ctx, `select count(*) from allow_entry where inbox_id = $1 and pattern = $2 and (expires_at = 0 or expires_at > $3)`, []any{b.ID, pattern, store.Time(time.Now())}, &n)
	if err != nil {
		return nil, fmt.Errorf("read allow list of inbox %s: %w", b.ID, err)
	}
	if n > 0 {
		return refuse("the allow list has " + pattern + " already; change it there")
	}
	if err := x.m.gate.ByHand(ctx, tx, who, listing(b, pattern, w.Until)); err != nil {
		return nil, err
	}
	e, err := addAllowed(ctx, tx, who, b, AllowEntry{Pattern: pattern, Expires: w.Until, Action: a.ID, NoFiles: !w.Files})
	if errors.Is(err, directory.ErrInvalid) {
		return refuse(err.Error())
	}
	if err != nil {
		return nil, err
	}
	what := e.Pattern + " until " + ends(e.Expires)
	if e.NoFiles {
		what += ", without files"
	}
	return audit.Fields{"allowed": what, "entry": e.ID}, nil
}
