package auth_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// attempts returns how many attempts are let through before the limit, with
// most as the bound of the test itself.
func attempts(t *testing.T, db *store.DB, most int, limits ...auth.AttemptLimit) int {
	t.Helper()
	for n := range most {
		switch err := auth.CountAttempt(t.Context(), db, limits...); {
		case errors.Is(err, auth.ErrTooMany):
			return n
		case err != nil:
			t.Fatal(err)
		}
	}
	return most
}

// TestAttemptsAreLimited counts what a guesser gets by each limit, however the
// address or the name is written.
func TestAttemptsAreLimited(t *testing.T) {
	db := storetest.SQLite(t)
	for _, tt := range []struct {
		name  string
		limit auth.AttemptLimit
		want  int
	}{
		{"at a password", auth.AttemptsByName("ann"), 5},
		{"at the same password", auth.AttemptsByName("ann"), 0},
		{"at another's", auth.AttemptsByName("bob"), 5},
		{"at a second factor", auth.AttemptsAtSecondFactor("ann"), 30},
		{"from an address", auth.AttemptsFrom("192.0.2.1"), 60},
		{"from the same address, mapped to IPv6", auth.AttemptsFrom("::ffff:192.0.2.1"), 0},
		{"from its neighbour", auth.AttemptsFrom("192.0.2.2"), 60},
		{"from an IPv6 network", auth.AttemptsFrom("2001:db8::1"), 60},
		{"from another address of that network", auth.AttemptsFrom("2001:db8::ffff:ffff:ffff:ffff"), 0},
		{"from that network, with a zone", auth.AttemptsFrom("2001:db8::2%eth0"), 0},
		{"from the next network", auth.AttemptsFrom("2001:db8:0:1::1"), 60},
		{"from no address", auth.AttemptsFrom(""), 60},
		{"from hostile text", auth.AttemptsFrom(strings.Repeat("x", 100_000) + "\x00\xff"), 60},
		{"from text that is cut to the same", auth.AttemptsFrom(strings.Repeat("x", 100_001)), 0},
	} {
		if got := attempts(t, db, 70, tt.limit); got != tt.want {
			t.Errorf("%s: %d attempts, want %d", tt.name, got, tt.want)
		}
	}
}

// TestProxyIsNotOneGuesser: behind an address of this machine is a proxy, and
// behind that everybody.
func TestProxyIsNotOneGuesser(t *testing.T) {
	db := storetest.SQLite(t)
	for _, remote := range []string{"127.0.0.1", "::1", "::ffff:127.0.0.1"} {
		if got := attempts(t, db, 100, auth.AttemptsFrom(remote)); got != 100 {
			t.Errorf("from %s: %d attempts, want more than 99", remote, got)
		}
	}
}

// TestRefusedAttemptCountsNothing: who has used up one limit does not use up
// another's with what is refused. The attack: one who guesses at ann's name
// uses up everybody's attempts.
func TestRefusedAttemptCountsNothing(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		name, other := auth.AttemptsByName("ann"), auth.AttemptsByName("bob")
		attempts(t, db, 6, name)
		for range 20 {
			if err := auth.CountAttempt(t.Context(), db, other, name); !errors.Is(err, auth.ErrTooMany) {
				t.Fatalf("an attempt beyond a limit: %v, want ErrTooMany", err)
			}
		}
		if got := attempts(t, db, 6, other); got != 5 {
			t.Errorf("bob has %d attempts left, want 5", got)
		}
	})
}

// TestRightPasswordUsesUpNoAttempt refunds attempts, but never more than were
// counted.
func TestRightPasswordUsesUpNoAttempt(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		limit := auth.AttemptsByName("ann")
		for range 3 {
			if err := auth.RefundAttempt(t.Context(), db, limit); err != nil {
				t.Fatal(err)
			}
		}
		for range 12 {
			if err := auth.CountAttempt(t.Context(), db, limit); err != nil {
				t.Fatal(err)
			}
			if err := auth.RefundAttempt(t.Context(), db, limit); err != nil {
				t.Fatal(err)
			}
		}
		if got := attempts(t, db, 10, limit); got != 5 {
			t.Errorf("%d attempts after refunds, want 5", got)
		}
	})
}

// TestAttemptsComeBack ends the window of a limit.
func TestAttemptsComeBack(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	limit := auth.AttemptsByName("ann")
	attempts(t, f.db, 6, limit)
	f.exec(`update sign_in_try set ends_at = $1`, store.Time(time.Now()))
	if got := attempts(t, f.db, 6, limit); got != 5 {
		t.Errorf("%d attempts in the next window, want 5", got)
	}
}

// TestServersShareTheLimit guesses at several servers of one database at once.
func TestServersShareTheLimit(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		var let atomic.Int64
		var wg sync.WaitGroup
		for range 4 {
			server := storetest.Reopen(t, db)
			wg.Go(func() {
				for range 10 {
					err := auth.CountAttempt(t.Context(), server, auth.AttemptsByName("ann"), auth.AttemptsInAll())
					if err == nil {
						let.Add(1)
					} else if !errors.Is(err, auth.ErrTooMany) {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		if n := let.Load(); n != 5 {
			t.Errorf("%d attempts at four servers, want 5", n)
		}
	})
}

// TestOnePasswordOnManyNames is an attacker who tries one password on a
// thousand names from one address.
func TestOnePasswordOnManyNames(t *testing.T) {
	db := storetest.SQLite(t)
	for n := range 1000 {
		err := auth.CountAttempt(t.Context(), db, auth.AttemptsByName(fmt.Sprint("name", n)), auth.AttemptsFrom("198.51.100.7"), auth.AttemptsInAll())
		if errors.Is(err, auth.ErrTooMany) {
			if n != 60 {
				t.Errorf("stopped after %d names, want 60", n)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Error("a thousand names were tried")
}
