package mailbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"postern/internal/mailbox"
)

func TestTurns(t *testing.T) {
	turns := mailbox.NewTurns(4, 2)
	within := func(d time.Duration, name string) (func(), error) {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		return turns.Take(ctx, name)
	}
	take := func(name string) (func(), error) { return within(time.Minute, name) }
	var done []func()
	for i := range 2 {
		d, err := take("greedy")
		if err != nil {
			t.Fatalf("turn %d: %v", i, err)
		}
		done = append(done, d)
	}
	// However many wait under one name, others have their turn.
	waiting, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 50)
	for range cap(ended) {
		go func() {
			_, err := turns.Take(waiting, "greedy")
			ended <- err
		}()
	}
	for i := range 2 {
		d, err := take(fmt.Sprint("other ", i))
		if err != nil {
			t.Fatalf("another's turn %d: %v", i, err)
		}
		done = append(done, d)
	}
	if _, err := within(30*time.Millisecond, "one too many"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one too many: %v", err)
	}
	cancel()
	for range cap(ended) {
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("who waited: %v", err)
		}
	}
	for _, d := range done {
		d()
		d() // twice does nothing
	}
	for range 4 { // all places are free again
		if _, err := take(fmt.Sprint(time.Now().UnixNano())); err != nil {
			t.Error(err)
		}
	}
}
