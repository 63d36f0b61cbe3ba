package semaphore_test

import (
	"testing"

	"postern/internal/semaphore"
)

// TestPerKeyDoesNotWait: a key has its places, whatever others have taken, and gets one
// back by each release.
func TestPerKeyDoesNotWait(t *testing.T) {
	places := semaphore.NewPerKey(2)
	take := func(key string, want bool) (release func()) {
		t.Helper()
		release, ok := places.TryAcquire(key)
		if ok != want {
			t.Errorf("place of %s: got %v, want %v", key, ok, want)
		}
		return release
	}
	first := take("greedy", true)
	take("greedy", true)
	take("greedy", false)
	take("other", true)
	first()
	first() // does nothing
	take("greedy", true)
	take("greedy", false)
}
