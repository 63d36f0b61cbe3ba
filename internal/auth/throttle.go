package auth

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"postern/internal/store"
)

// ErrTooMany means that too many sign-ins failed; try again in a minute.
var ErrTooMany = errors.New("too many failed sign-ins; try again in a minute")

// An AttemptLimit bounds the attempts at something within a window. Attempts are
// counted in the database, so several servers share the limit.
type AttemptLimit struct {
	key   string
	most  int
	every time.Duration
}

// AttemptsByName limits attempts at a person's password or code to 5 a minute.
// Names without an account count too: otherwise the limit would reveal which
// accounts exist.
func AttemptsByName(name string) AttemptLimit {
	sum := sha256.Sum256([]byte(name))
	return AttemptLimit{"name:" + hex.EncodeToString(sum[:16]), 5, time.Minute}
}

// AttemptsAtSecondFactor limits attempts at a person's second factor to 30 a day.
// Of a million codes with six digits three are right at any time, so an attacker
// who knows the password and guesses for a year succeeds with a probability of 3 %.
func AttemptsAtSecondFactor(name string) AttemptLimit {
	sum := sha256.Sum256([]byte(name))
	return AttemptLimit{"second:" + hex.EncodeToString(sum[:16]), 30, 24 * time.Hour}
}

// AttemptsFrom limits attempts from an address, or an IPv6 network, to 60 a minute.
// The attack: one password tried on a thousand names.
func AttemptsFrom(remote string) AttemptLimit {
	most := 60
	if a, err := netip.ParseAddr(remote); err == nil {
		if a.IsLoopback() { // a reverse proxy with all clients behind it
			most = 1000
		}
		a = a.Unmap().WithZone("")
		remote = a.String()
		if a.Is6() { // a host can use any address of its network
			p, _ := a.Prefix(64) // 64 bits are in range
			remote = p.String()
		}
	}
	return AttemptLimit{"remote:" + truncate(remote, 80), most, time.Minute}
}

// RegistrationsFrom limits the programs that register themselves from an address, or an
// IPv6 network, to 20 an hour; 1000 through a proxy on this machine.
func RegistrationsFrom(remote string) AttemptLimit {
	t := AttemptsFrom(remote)
	if t.most == 60 {
		t.most = 20
	}
	return AttemptLimit{"register " + t.key, t.most, time.Hour}
}

// RegistrationsInAll limits the registrations of all programs together to 1000 an hour.
func RegistrationsInAll() AttemptLimit { return AttemptLimit{"register all", 1000, time.Hour} }

// AttemptsInAll limits the attempts of all clients together to 1000 a minute.
func AttemptsInAll() AttemptLimit { return AttemptLimit{"all", 1000, time.Minute} }

// CountAttempt counts one attempt against each limit. If one of them is reached it
// counts none and returns [ErrTooMany].
func CountAttempt(ctx context.Context, db *store.DB, tries ...AttemptLimit) error {
	// Read first: a refused attempt does not queue for the write lock.
	err := db.View(ctx, func(tx *store.Tx) error {
		for _, t := range tries {
			var n int
			err := tx.One(ctx, `select n from sign_in_try where key = $1 and ends_at > $2`, []any{t.key, store.Time(time.Now())}, &n)
			if err == nil && n >= t.most {
				return ErrTooMany
			}
			if err != nil && !errors.Is(err, store.ErrNotFound) {
				return err
			}
		}
		return nil
	})
	if err == nil {
		err = db.Update(ctx, func(tx *store.Tx) error { return countAttempt(ctx, tx, tries) })
	}
	if err != nil && !errors.Is(err, ErrTooMany) {
		return fmt.Errorf("count sign-in: %w", err)
	}
	return err
}

// countAttempt is the transaction of [CountAttempt]. The conditional update makes
// the limits exact for parallel attempts, also at several servers. Its error rolls
// back the limits that were counted before the one that was reached.
func countAttempt(ctx context.Context, tx *store.Tx, tries []AttemptLimit) error {
	now := time.Now()
	if _, err := tx.ExecContext(ctx, `delete from sign_in_try where ends_at <= $1`, store.Time(now)); err != nil {
		return err
	}
	for _, t := range tries {
		ok, err := tx.Changed(ctx, `insert into sign_in_try (key, n, ends_at) values ($1, 1, $2)
			on conflict (key) do update set n = sign_in_try.n + 1 where sign_in_try.n < $3`,
			t.key, store.Time(now.Add(t.every)), t.most)
		if err != nil {
			return err
		}
		if !ok {
			return ErrTooMany
		}
	}
	return nil
}

// RefundAttempt takes back an attempt that [CountAttempt] counted, because it
// succeeded.
func RefundAttempt(ctx context.Context, db *store.DB, tries ...AttemptLimit) error {
	err := db.Update(ctx, func(tx *store.Tx) error {
		for _, t := range tries {
			if _, err := tx.ExecContext(ctx, `update sign_in_try set n = n - 1 where key = $1 and n > 0`, t.key); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("count sign-in: %w", err)
	}
	return nil
}
