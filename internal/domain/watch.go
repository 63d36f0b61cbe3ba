package domain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sync/errgroup"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// Check checks the DNS now and returns the domain with the result. It returns
// [ErrTooSoon] within [Config.MinCheckGap] of the last check: otherwise anybody
// with a key could make this server flood other people's DNS servers.
func (g *Registry) Check(ctx context.Context, who auth.Principal, id string) (Domain, error) {
	if err := auth.Need(who, auth.Reviewer); err != nil {
		return Domain{}, err
	}
	d, err := g.Find(ctx, who, id)
	if err != nil {
		return Domain{}, err
	}
	now := time.Now()
	err = g.db.Update(ctx, func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `update mail_domain set checked_at = $1 where id = $2 and checked_at <= $3`, store.Time(now), d.ID, store.Time(now.Add(-g.cfg.MinCheckGap)))
		if err == nil && !ok {
			err = fmt.Errorf("%s: %w: wait %s", d.Name, ErrTooSoon, g.cfg.MinCheckGap)
		}
		return err
	})
	if err != nil {
		return Domain{}, err
	}
	d, err = g.check(ctx, who, d)
	if errors.Is(err, errChanged) { // another check ran at the same time: its result is as good
		return g.Find(ctx, who, id)
	}
	return d, err
}

// errChanged means that the domain was changed during the check.
var errChanged = errors.New("the domain has changed meanwhile")

// check checks the DNS and records the resulting state.
func (g *Registry) check(ctx context.Context, who auth.Principal, d Domain) (Domain, error) {
	found, err := g.checkDNS(ctx, d)
	if err != nil {
		return Domain{}, fmt.Errorf("check domain %s: %w", d.Name, err)
	}
	if err := ctx.Err(); err != nil { // a cancelled check says nothing about the DNS
		return Domain{}, err
	}
	next := g.nextState(d, found, time.Now().UTC().Truncate(time.Microsecond))
	err = g.record(ctx, who, d, &next)
	if errors.Is(err, ErrHeld) {
		// The proof was found, but another project holds the name. Which one is not
		// disclosed.
		next = d
		next.checks, next.Checked = found, time.Now().UTC().Truncate(time.Microsecond)
		next.Next = next.Checked.Add(jitter(g.cfg.Interval))
		for i := range next.checks {
			if r := &next.checks[i]; r.Kind == Ownership {
				r.setResult(Wrong, "The proof was found, but another project on this server holds the domain or one above it. It becomes free %s after that project's proof is removed from the DNS.", formatDays(g.cfg.LoseAfter+g.cfg.Grace))
			}
		}
		err = g.record(ctx, who, d, &next)
	}
	if err != nil {
		return Domain{}, fmt.Errorf("check domain %s: %w", d.Name, err)
	}
	return next, nil
}

// nextState returns d after a check that found these records. It implements the
// state machine of the package comment and changes nothing.
func (g *Registry) nextState(d Domain, found []Record, now time.Time) Domain {
	proof, whole := Missing, true
	unknown := false
	for _, r := range found {
		switch {
		case r.Kind == Ownership:
			proof = r.Result
		case r.Need == Wanted && r.Result == Unreachable:
			unknown = true
		case r.Need == Wanted && !r.good():
			whole = false
		}
	}
	n := d
	n.checks, n.Checked = found, now
	switch {
	case proof == OK && d.State != StatePending && d.State != StateLost && whole && unknown:
		n.State, n.Missing = d.State, time.Time{} // a failed lookup does not degrade a domain
	case proof == OK && whole && !unknown:
		n.State, n.Missing, n.Lost = StateVerified, time.Time{}, time.Time{}
	case proof == OK:
		n.State, n.Missing, n.Lost = StateDegraded, time.Time{}, time.Time{}
	case d.State == StateVerified || d.State == StateDegraded:
		if n.Missing.IsZero() {
			n.Missing = now
		}
		n.State = StateDegraded
		patience := g.cfg.LoseAfter
		if proof == Unreachable { // unreachable DNS is not a withdrawal
			patience *= 3
		}
		if now.Sub(n.Missing) >= patience {
			n.State, n.Lost = StateLost, now
		}
	case d.State == StateLost && now.Sub(d.Lost) >= g.cfg.Grace:
		n.State, n.Missing, n.Lost, n.Verified = StatePending, time.Time{}, time.Time{}, time.Time{}
	}
	if n.Verified.IsZero() && n.State != StatePending {
		n.Verified = now
	}
	n.failures = d.failures + 1
	if n.State == StateVerified || n.State != d.State {
		n.failures = 0
	}
	n.Next = g.after(n, now)
	return n
}

// after returns the time of the next scheduled check, or the zero time for none.
func (g *Registry) after(d Domain, now time.Time) time.Time {
	if d.State == StatePending && now.Sub(d.Created) > g.cfg.StopChecking {
		return time.Time{}
	}
	wait := g.cfg.Interval
	if d.State != StateVerified {
		if wait = g.cfg.Retry << min(d.failures, 20); wait > g.cfg.Interval || wait <= 0 {
			wait = g.cfg.Interval
		}
	}
	next := now.Add(jitter(wait))
	if end := d.Lost.Add(g.cfg.Grace); d.State == StateLost && next.After(end) && end.After(now) {
		next = end
	}
	return next
}

// jitter returns d plus or minus up to a fifth, so that domains that were added
// together do not stay in step.
func jitter(d time.Duration) time.Duration {
	return d*4/5 + rand.N(d*2/5+1) //nolint:gosec // nobody gains by guessing
}

// record stores the transition from was to n in one conditional update, with its
// audit entry. It returns [errChanged] if the domain was changed since was was
// read, and [ErrHeld] if the project would take a name that another one holds.
func (g *Registry) record(ctx context.Context, who auth.Principal, was Domain, n *Domain) error {
	checks, err := json.Marshal(n.checks)
	if err != nil {
		return err
	}
	return g.db.Update(ctx, func(tx *store.Tx) error {
		if n.State != was.State {
			if err := lock(ctx, tx); err != nil {
				return err
			}
		}
		takes := was.State == StatePending && n.State != StatePending
		if takes {
			if err := g.checkFree(ctx, tx, *n); err != nil {
				return err
			}
		}
		ok, err := tx.Changed(ctx, `update mail_domain set state = $1, version = version + 1, checks = $2, failures = $3, verified_at = $4, checked_at = $5, next_at = $6, missing_since = $7, lost_at = $8
			where id = $9 and version = $10`, n.State, string(checks), n.failures, store.Time(n.Verified), store.Time(n.Checked), store.Time(n.Next), store.Time(n.Missing), store.Time(n.Lost), n.ID, was.version)
		if err != nil {
			return fmt.Errorf("record check: %w", err)
		}
		if !ok {
			return errChanged
		}
		n.version = was.version + 1
		if takes && g.cfg.OnHeld != nil {
			if err := g.cfg.OnHeld(ctx, tx, n.Project, n.Name); err != nil {
				return err
			}
		}
		verb, f := auditEntry(was, *n)
		if verb == "" {
			return nil
		}
		return audit.Append(ctx, tx, who, verb, n.ID, f)
	})
}

// auditEntry returns the audit entry of a transition, or an empty verb for none.
func auditEntry(was, n Domain) (verb audit.Verb, f audit.Fields) {
	f = audit.Fields{"name": n.Name, "was": string(was.State)}
	switch {
	case n.State == was.State && n.Missing.IsZero() != was.Missing.IsZero() && n.State == StateDegraded:
		verb = audit.DomainDegrade
		if n.Missing.IsZero() {
			verb = audit.DomainFound
		}
	case n.State == was.State:
		return "", nil
	case n.State == StateVerified:
		verb = audit.DomainVerify
	case n.State == StateDegraded:
		verb = audit.DomainDegrade
	case n.State == StateLost:
		verb = audit.DomainLose
	case n.State == StatePending:
		verb = audit.DomainRelease
	}
	if problem := n.Problem(); problem != "" {
		f["problem"] = problem
	}
	return verb, f
}

const (
	watchers = 4                // checks at the same time
	lease    = 2 * time.Minute  // after which another process repeats the check of one that died
	poll     = 10 * time.Second // the longest interval between searches for due checks
)

// wakeUp makes a waiting watcher search for due checks.
func (g *Registry) wakeUp() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// Run checks domains when they are due, until ctx is done. Several processes may
// run it on one database; a lease gives each check to one of them.
func (g *Registry) Run(ctx context.Context) error {
	w, ctx := errgroup.WithContext(ctx)
	for range watchers {
		w.Go(func() error {
			for {
				ran, err := g.RunOne(ctx)
				if ctx.Err() != nil {
					return ctx.Err()
				}
				if err != nil {
					g.log.ErrorContext(ctx, "check domain", "err", err)
				}
				if ran && err == nil {
					continue
				}
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-g.wake:
				case <-time.After(jitter(min(poll, g.cfg.Retry))):
				}
			}
		})
	}
	return w.Wait()
}

// RunOne does one check that is due, and reports whether there was one.
func (g *Registry) RunOne(ctx context.Context) (bool, error) {
	now := time.Now()
	var d Domain
	err := g.db.Update(ctx, func(tx *store.Tx) (err error) {
		// A second process waits here, then matches no row.
		d, err = scan(tx.QueryRowContext(ctx, `update mail_domain set next_at = $1
			where id = (select id from mail_domain where next_at > 0 and next_at <= $2 order by next_at, id limit 1) and next_at > 0 and next_at <= $2
			returning `+columns, store.Time(now.Add(lease)), store.Time(now)).Scan)
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("take domain that is due: %w", err)
	}
	who := auth.Principal{Kind: auth.System, ID: "domain", Project: d.Project}
	if _, err := g.check(ctx, who, d); err != nil && !errors.Is(err, errChanged) {
		return true, err
	}
	return true, nil
}
