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

// An AttemptLimit is one of a bounded number of guesses at something. What was tried is
// counted in the database: two servers on one do not give twice as many.
type AttemptLimit struct {
	key   string
	most  int
	every time.Duration
}

// AttemptsByName is a guess at what belongs to a person's name, a password or a code.
// Names that do not exist count too, or the answer would tell which do.
func AttemptsByName(name string) AttemptLimit {
	sum := sha256.Sum256([]byte(name))
	return AttemptLimit{"name:" + hex.EncodeToString(sum[:16]), 5, time.Minute}
}

// AttemptsAtSecondFactor is a guess at a second factor of the person with this name. Six
// digits are a million, three of which are right at a time: who knows the
// password and guesses for a year is right with a probability of 3 %.
func AttemptsAtSecondFactor(name string) AttemptLimit {
	sum := sha256.Sum256([]byte(name))
	return AttemptLimit{"second:" + hex.EncodeToString(sum[:16]), 30, 24 * time.Hour}
}

// AttemptsFrom is a guess that comes from an address. The attack: one password
// tried on a thousand names.
func AttemptsFrom(remote string) AttemptLimit {
	most := 60
	if a, err := netip.ParseAddr(remote); err == nil {
		if a.IsLoopback() { // a proxy, and behind it everybody
			most = 1000
		}
		a = a.Unmap().WithZone("")
		remote = a.String()
		if a.Is6() { // who has one has as many as he likes of its network
			p, _ := a.Prefix(64) // 64 bits are in range
			remote = p.String()
		}
	}
	return AttemptLimit{"remote:" + truncate(remote, 80), most, time.Minute}
}

// AttemptsInAll is a guess of anybody at anything.
func AttemptsInAll() AttemptLimit { return AttemptLimit{"all", 1000, time.Minute} }

// CountAttempt counts one more try of each and returns [ErrTooMany], with none counted,
// if there are none left of one.
func CountAttempt(ctx context.Context, db *store.DB, tries ...AttemptLimit) error {
	// Looked at first: who is refused anyway makes nobody wait for a turn to write.
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

// RefundAttempt takes back what [CountAttempt] counted: it was no guess.
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
