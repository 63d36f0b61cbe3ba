package e2bapi

import (
	"container/list"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"postern/internal/auth"
)

// A Rate is how many requests may come: Burst at once, and Every second that
// passes gives back PerSecond.
type Rate struct {
	PerSecond float64 // requests; 0 means no limit
	Burst     int     // requests; 0 means one second's, and at least one
}

// Limits bound how often the control API is called.
type Limits struct {
	API     Rate // by each project, all calls
	Create  Rate // by each project, calls that make sandboxes
	Unknown Rate // by each address, calls without a valid key, and signed URLs that nobody signed
}

// DefaultLimits are those that E2B publishes for the API. Its 5 creations a
// second are not among them: they keep a shared service fair, and here the
// number of sandboxes at the same time bounds what a creator takes.
var DefaultLimits = Limits{
	API:     Rate{PerSecond: 20_000.0 / 30, Burst: 20_000},
	Create:  Rate{PerSecond: 100, Burst: 1000},
	Unknown: Rate{PerSecond: 5, Burst: 100},
}

// missingRate is how often an address may ask for sandboxes that are not there.
// Clients do so to learn that one has ended.
var missingRate = Rate{PerSecond: 200, Burst: 2000}

// maxBuckets bounds how many callers are remembered for each limit. Of more,
// who was not seen for longest is forgotten and begins with a full bucket.
const maxBuckets = 10_000

// A limiter is a token bucket for each of many callers.
type limiter struct {
	rate Rate

	mu    sync.Mutex               // guards what follows
	by    map[string]*list.Element // of order; the values are *bucket
	order *list.List               // the last seen first
}

type bucket struct {
	key    string
	tokens float64
	at     time.Time // when tokens was true
}

func newLimiter(r Rate) *limiter {
	if r.Burst <= 0 {
		r.Burst = max(1, int(math.Ceil(r.PerSecond)))
	}
	return &limiter{rate: r, by: map[string]*list.Element{}, order: list.New()}
}

// take takes n tokens, of which there may be 0, and returns how long to wait if
// they are not there.
func (l *limiter) take(key string, n float64, now time.Time) (wait time.Duration) {
	if l.rate.PerSecond <= 0 {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forgetLocked(now)
	b := l.bucketLocked(key, now)
	if now.After(b.at) {
		b.tokens = min(float64(l.rate.Burst), b.tokens+now.Sub(b.at).Seconds()*l.rate.PerSecond)
		b.at = now
	}
	if need := max(n, 1); b.tokens < need {
		return time.Duration((need - b.tokens) / l.rate.PerSecond * float64(time.Second))
	}
	b.tokens -= n
	return 0
}

func (l *limiter) bucketLocked(key string, now time.Time) *bucket {
	if e, ok := l.by[key]; ok {
		l.order.MoveToFront(e)
		b, _ := e.Value.(*bucket)
		return b
	}
	for l.order.Len() >= maxBuckets {
		l.dropLocked(l.order.Back())
	}
	b := &bucket{key: key, tokens: float64(l.rate.Burst), at: now}
	l.by[key] = l.order.PushFront(b)
	return b
}

// forgetLocked drops buckets that are full again: they say nothing.
func (l *limiter) forgetLocked(now time.Time) {
	full := time.Duration(float64(l.rate.Burst) / l.rate.PerSecond * float64(time.Second))
	for e := l.order.Back(); e != nil; e = l.order.Back() {
		b, _ := e.Value.(*bucket)
		if now.Sub(b.at) < full {
			return
		}
		l.dropLocked(e)
	}
}

func (l *limiter) dropLocked(e *list.Element) {
	b, _ := l.order.Remove(e).(*bucket)
	delete(l.by, b.key)
}

// limits are all limiters of a server.
type limits struct {
	api, create, unknown *limiter
	missing              *limiter // by address: sandboxes that are not there
	known                *known   // keys
	ids                  *known   // of sandboxes
}

func newLimits(l Limits) *limits {
	return &limits{
		newLimiter(l.API), newLimiter(l.Create), newLimiter(l.Unknown), newLimiter(missingRate),
		&known{until: map[[32]byte]time.Time{}}, &known{until: map[[32]byte]time.Time{}},
	}
}

// A limitError means that a caller must wait.
type limitError struct {
	what string
	wait time.Duration
}

// Error implements error.
func (e *limitError) Error() string {
	return fmt.Sprintf("too many %s; try again in %d s", e.what, e.seconds())
}

// seconds is for Retry-After, which clients want as a whole number above 0.
func (e *limitError) seconds() int64 { return max(1, int64(math.Ceil(e.wait.Seconds()))) }

// setRetryAfter says in an answer's header how long to wait.
func (e *limitError) setRetryAfter(h http.Header) {
	h.Set("Retry-After", strconv.FormatInt(e.seconds(), 10))
}

// limited makes of who one that counts its callers.
func (s *Server) limited(who func(*http.Request) (auth.Principal, error)) func(*http.Request) (auth.Principal, error) {
	return func(r *http.Request) (auth.Principal, error) {
		now := time.Now()
		key := r.Header.Get("X-Api-Key")
		// A key that was good a moment ago is tried all the same: behind one
		// address, such as a proxy's, one caller's wrong keys must not lock the
		// others out.
		if wait := s.limits.unknown.take(addressOf(r), 0, now); wait > 0 && !s.limits.known.has(key, now) {
			return auth.Principal{}, &limitError{"requests without a valid API key from this address", wait}
		}
		p, err := who(r)
		switch {
		case errors.Is(err, auth.ErrUnauthenticated), errors.Is(err, auth.ErrForbidden):
			s.limits.unknown.take(addressOf(r), 1, now)
			return p, err
		case err != nil:
			return p, err
		}
		s.limits.known.add(key, now)
		if wait := s.limits.api.take(p.Project, 1, now); wait > 0 {
			return p, &limitError{"requests with this project's keys", wait}
		}
		if creates[r.Pattern] {
			if wait := s.limits.create.take(p.Project, 1, now); wait > 0 {
				return p, &limitError{"new sandboxes of this project in a short time", wait}
			}
		}
		return p, nil
	}
}

// creates are the routes that make sandboxes.
var creates = map[string]bool{"POST /v2/sandboxes": true, "POST /sandboxes": true, "POST /sandboxes/{id}/fork": true}

// maySearch reports whether r's address may have another signed URL looked up.
func (l *limits) maySearch(r *http.Request) bool {
	return l.unknown.take(addressOf(r), 0, time.Now()) == 0
}

// foundNothing counts a search that was in vain.
func (l *limits) foundNothing(r *http.Request) { l.unknown.take(addressOf(r), 1, time.Now()) }

// addressOf returns whom a request without a valid key counts for: the IPv4
// address, or the IPv6 network of which one host has all addresses.
func addressOf(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return host
	}
	if a = a.Unmap(); a.Is4() {
		return a.String()
	}
	p, _ := a.WithZone("").Prefix(64)
	return p.String()
}

// knownFor is how long a key counts as good after it was.
const knownFor = 10 * time.Minute

// maxKnown bounds how many keys or ids are remembered.
const maxKnown = 1000

// known remembers, as hashes, keys or ids that were good lately. It never lets
// anyone in: each is checked every time.
type known struct {
	mu    sync.Mutex // guards until
	until map[[32]byte]time.Time
}

func (k *known) has(key string, now time.Time) bool {
	sum := sha256.Sum256([]byte(key))
	k.mu.Lock()
	defer k.mu.Unlock()
	return now.Before(k.until[sum])
}

func (k *known) add(key string, now time.Time) {
	sum := sha256.Sum256([]byte(key))
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.until) >= maxKnown {
		for s, t := range k.until {
			if now.After(t) || len(k.until) >= maxKnown {
				delete(k.until, s)
			}
		}
	}
	k.until[sum] = now.Add(knownFor)
}
