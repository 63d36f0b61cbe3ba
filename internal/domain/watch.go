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

// Check looks at the DNS now and returns what the domain is after that. It
// returns [ErrTooSoon] where that was done moments ago: whoever has a key could
// otherwise make this server ask others' DNS servers without an end.
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
	if errors.Is(err, errChanged) { // somebody else looked at the same time: theirs is as good
		return g.Find(ctx, who, id)
	}
	return d, err
}

// errChanged means that a domain is not any more what was looked at.
var errChanged = errors.New("the domain has changed meanwhile")

// check looks at the DNS and records what follows.
func (g *Registry) check(ctx context.Context, who auth.Principal, d Domain) (Domain, error) {
	found, err := g.checkDNS(ctx, d)
	if err != nil {
		return Domain{}, fmt.Errorf("check domain %s: %w", d.Name, err)
	}
	if err := ctx.Err(); err != nil { // what broke off says nothing about the DNS
		return Domain{}, err
	}
	next := g.nextState(d, found, time.Now().UTC().Truncate(time.Microsecond))
	err = g.record(ctx, who, d, &next)
	if errors.Is(err, ErrHeld) {
		// The proof is there, and the name is somebody's. It is not shown whose.
		next = d
		next.checks, next.Checked = found, time.Now().UTC().Truncate(time.Microsecond)
		next.Next = next.Checked.Add(jitter(g.cfg.Interval))
		for i := range next.checks {
			if r := &next.checks[i]; r.Kind == Ownership {
				r.setResult(Wrong, "The proof is there, but another project of this server holds the domain or one above it. It is free %s after that project's proof is gone from the DNS.", formatDays(g.cfg.LoseAfter+g.cfg.Grace))
			}
		}
		err = g.record(ctx, who, d, &next)
	}
	if err != nil {
		return Domain{}, fmt.Errorf("check domain %s: %w", d.Name, err)
	}
	return next, nil
}

// nextState returns what d is after a look that found these records.
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
		n.State, n.Missing = d.State, time.Time{} // a DNS that is slow does not degrade a domain
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
		if proof == Unreachable { // a DNS server that is down is no owner who took the proof away
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

// after returns when the domain is looked at again by itself.
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

// jitter returns d and up to a fifth more or less, so that domains that were
// added together are not asked about together for ever.
func jitter(d time.Duration) time.Duration {
	return d*4/5 + rand.N(d*2/5+1) //nolint:gosec // nobody gains by guessing
}

// record records the move from was to n, unless somebody moved it meanwhile.
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

// auditEntry returns what the record says of a move; nothing where there is none.
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

// How the watcher works.
const (
	watchers = 4                // domains that are looked at at the same time
	lease    = 2 * time.Minute  // after which another process takes over from one that died
	poll     = 10 * time.Second // what is due is looked for at least so often
)

func (g *Registry) wakeUp() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// Run looks at domains when they are due, until ctx is done. Several processes
// may run it on one database: each domain is taken by one.
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

// RunOne looks at one domain that is due, and reports whether there was one.
func (g *Registry) RunOne(ctx context.Context) (bool, error) {
	now := time.Now()
	var d Domain
	err := g.db.Update(ctx, func(tx *store.Tx) (err error) {
		// Whoever comes second waits here, finds it taken and changes nothing.
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
