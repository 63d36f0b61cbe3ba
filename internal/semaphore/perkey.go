package semaphore

import "sync"

// A PerKey is a semaphore with a limit for each key, for which nobody waits. It is safe
// for concurrent use.
type PerKey struct {
	each int // places of one key

	mu    sync.Mutex
	taken map[string]int // by key; none has 0
}

// NewPerKey returns a semaphore of which one key has at most each places.
func NewPerKey(each int) *PerKey { return &PerKey{each: each, taken: map[string]int{}} }

// TryAcquire takes a place of a key, and reports whether there was one. If so, the caller
// must call release when its work is done; further calls do nothing.
func (s *PerKey) TryAcquire(key string) (release func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[key] >= s.each {
		return nil, false
	}
	s.taken[key]++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.taken[key]--; s.taken[key] == 0 {
			delete(s.taken, key) // or keys would pile up
		}
	}), true
}
