package oversight_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A slow executor holds what is large until it is let go.
type slow struct {
	effect
	gone chan struct{}

	mu         sync.Mutex // guards what follows
	held, most int
	large      int // begun
	small      int // done
}

func (s *slow) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	s.mu.Lock()
	s.held += len(a.Payload)
	s.most = max(s.most, s.held)
	isLarge := len(a.Payload) > 1<<20
	if isLarge {
		s.large++
	}
	s.mu.Unlock()
	if isLarge {
		select {
		case <-s.gone:
		case <-ctx.Done():
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held -= len(a.Payload)
	if !isLarge {
		s.small++
	}
	return oversight.Outcome{State: oversight.Done}
}

// TestHeld: however many of the largest are due for a destination that takes
// its time, few are in memory, what is small passes them, and each has its turn.
func TestHeld(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, oversighttest.Rules{{ID: "all", Kind: "*", Effect: policy.Allow}})
		s := &slow{gone: make(chan struct{})}
		f.gate.Handle("test.effect", s)
		const larges, smalls, most = 8, 40, 13 << 20
		f.gate.Hold(most)
		big := string(make([]byte, 2<<20))
		for range larges {
			f.propose(big)
		}
		for range smalls {
			f.propose("x")
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = f.gate.Run(ctx)
		}()
		wait := func(what string, ready func() bool) {
			t.Helper()
			for start := time.Now(); !ready(); time.Sleep(10 * time.Millisecond) {
				if time.Since(start) > 5*time.Minute {
					t.Fatalf("%s: %d large begun, %d small done, at most %d bytes", what, s.large, s.small, s.most)
				}
			}
		}
		wait("small ones pass large ones", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.small == smalls && s.large == most/len(big)
		})
		close(s.gone)
		wait("all have their turn", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.large == larges && s.held == 0
		})
		cancel()
		<-done
		as, err := f.gate.Actions(t.Context(), f.person, oversight.Query{States: []oversight.State{oversight.Done}})
		if err != nil || len(as) != larges+smalls {
			t.Errorf("%d actions are done, %v; want %d", len(as), err, larges+smalls)
		}
		if s.large != larges || s.most > most+smalls {
			t.Errorf("%d large ones begun, want %d; at most %d bytes were held, want %d", s.large, larges, s.most, most)
		}
	})
}
