// Package semaphore bounds how many callers work at a time, and how many of them
// for one key, so that nobody can take every place.
package semaphore

import (
	"context"
	"sync"
)

// A Keyed is a semaphore with a limit in all and a limit for each key. The
// attack: the connections of one inbox that read slowly, or come by the thousand,
// while those of all others wait behind them. It is safe for concurrent use.
//
// A caller takes a place of its key first and one of the whole then. So those
// that wait for a busy key hold no place of the whole.
type Keyed struct {
	all  chan struct{} // a place in all
	each int           // places of one key

	mu    sync.Mutex // guards byKey and the users in it
	byKey map[string]*keyPlaces
}

// keyPlaces are the places of one key, for as long as somebody uses it or waits
// for one.
type keyPlaces struct {
	places chan struct{}
	users  int
}

// New returns a semaphore of all places, of which one key has at most each.
func New(all, each int) *Keyed {
	return &Keyed{all: make(chan struct{}, all), each: each, byKey: map[string]*keyPlaces{}}
}

// Acquire waits for a place until ctx is done, and returns ctx's error then. The
// caller must call release when its work is done; further calls do nothing.
func (s *Keyed) Acquire(ctx context.Context, key string) (release func(), err error) {
	s.mu.Lock()
	k := s.byKey[key]
	if k == nil {
		k = &keyPlaces{places: make(chan struct{}, s.each)}
		s.byKey[key] = k
	}
	k.users++
	s.mu.Unlock()
	leave := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if k.users--; k.users == 0 {
			delete(s.byKey, key) // or keys would pile up
		}
	}
	select {
	case k.places <- struct{}{}:
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
	select {
	case s.all <- struct{}{}:
	case <-ctx.Done():
		<-k.places
		leave()
		return nil, ctx.Err()
	}
	return sync.OnceFunc(func() {
		<-s.all
		<-k.places
		leave()
	}), nil
}
