package semaphore_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"postern/internal/semaphore"
)

// TestOneKeyCannotTakeEveryPlace: callers of one key wait for each other, and
// callers of other keys do not wait for them.
func TestOneKeyCannotTakeEveryPlace(t *testing.T) {
	places := semaphore.New(4, 2)
	within := func(d time.Duration, name string) (func(), error) {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		return places.Acquire(ctx, name)
	}
	take := func(name string) (func(), error) { return within(time.Minute, name) }
	var done []func()
	for i := range 2 {
		d, err := take("greedy")
		if err != nil {
			t.Fatalf("place %d: %v", i, err)
		}
		done = append(done, d)
	}
	// However many wait for one key, others get their place.
	waiting, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 50)
	for range cap(ended) {
		go func() {
			_, err := places.Acquire(waiting, "greedy")
			ended <- err
		}()
	}
	for i := range 2 {
		d, err := take(fmt.Sprint("other ", i))
		if err != nil {
			t.Fatalf("place %d of another key: %v", i, err)
		}
		done = append(done, d)
	}
	if _, err := within(30*time.Millisecond, "one too many"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one too many: %v", err)
	}
	cancel()
	for range cap(ended) {
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled while waiting: %v", err)
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
