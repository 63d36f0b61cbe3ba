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

// A Rate is a token bucket: Burst requests at once, refilled with PerSecond
// requests per second.
type Rate struct {
	PerSecond float64 // requests; 0 means no limit
	Burst     int     // requests; 0 means those of one second, and at least one
}

// Limits are the rate limits of the control API.
type Limits struct {
	API     Rate // per project, all calls
	Create  Rate // per project, calls that create sandboxes
	Unknown Rate // per address, calls without a valid key and signed URLs that match no sandbox
}

// DefaultLimits are the limits that E2B publishes for its API, except for 5
// creations per second. That one keeps a shared service fair; here the number of
// concurrent sandboxes bounds a creator.
var DefaultLimits = Limits{
	API:     Rate{PerSecond: 20_000.0 / 30, Burst: 20_000},
	Create:  Rate{PerSecond: 100, Burst: 1000},
	Unknown: Rate{PerSecond: 5, Burst: 100},
}

// missingRate is how often an address may ask for sandboxes that do not exist.
// Clients do that to learn that a sandbox has ended.
var missingRate = Rate{PerSecond: 200, Burst: 2000}

// maxBuckets bounds the callers remembered per limit. Beyond it the least recently
// seen caller is forgotten, and starts with a full bucket.
const maxBuckets = 10_000

// A limiter holds a token bucket per caller.
type limiter struct {
	rate Rate

	mu    sync.Mutex               // guards what follows
	by    map[string]*list.Element // elements of order; their values are *bucket
	order *list.List               // most recently seen first
}

type bucket struct {
	key    string
	tokens float64
	at     time.Time // when tokens was last updated
}

func newLimiter(r Rate) *limiter {
	if r.Burst <= 0 {
		r.Burst = max(1, int(math.Ceil(r.PerSecond)))
	}
	return &limiter{rate: r, by: map[string]*list.Element{}, order: list.New()}
}

// take takes n tokens, possibly 0, or returns how long to wait for them.
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

// forgetLocked drops full buckets: a new one would be full as well.
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

// limits are the limiters of a server.
type limits struct {
	api, create, unknown *limiter
	missing              *limiter // per address: sandboxes that do not exist
	known                *known   // keys
	ids                  *known   // IDs of sandboxes
}

func newLimits(l Limits) *limits {
	return &limits{
		newLimiter(l.API), newLimiter(l.Create), newLimiter(l.Unknown), newLimiter(missingRate),
		&known{until: map[[32]byte]time.Time{}}, &known{until: map[[32]byte]time.Time{}},
	}
}

// A limitError means that a caller has exceeded a rate limit.
type limitError struct {
	what string
	wait time.Duration
}

// Error implements error.
func (e *limitError) Error() string {
	return fmt.Sprintf("too many %s; try again in %d s", e.what, e.seconds())
}

// seconds is the value of Retry-After, which clients expect to be a whole number
// above 0.
func (e *limitError) seconds() int64 { return max(1, int64(math.Ceil(e.wait.Seconds()))) }

// setRetryAfter sets the Retry-After header.
func (e *limitError) setRetryAfter(h http.Header) {
	h.Set("Retry-After", strconv.FormatInt(e.seconds(), 10))
}

// limited adds rate limits to an authentication function.
func (s *Server) limited(who func(*http.Request) (auth.Principal, error)) func(*http.Request) (auth.Principal, error) {
	return func(r *http.Request) (auth.Principal, error) {
		now := time.Now()
		key := r.Header.Get("X-Api-Key")
		// A key that was valid a moment ago is checked even if the address has no
		// tokens left. Otherwise one caller with wrong keys behind a shared
		// address, such as a proxy's, would lock out the others.
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

// creates are the patterns of the routes that create sandboxes.
var creates = map[string]bool{"POST /v2/sandboxes": true, "POST /sandboxes": true, "POST /sandboxes/{id}/fork": true}

// maySearch reports whether r's address may cause another search for the signer of
// a URL.
func (l *limits) maySearch(r *http.Request) bool {
	return l.unknown.take(addressOf(r), 0, time.Now()) == 0
}

// foundNothing counts a search that found no sandbox.
func (l *limits) foundNothing(r *http.Request) { l.unknown.take(addressOf(r), 1, time.Now()) }

// addressOf returns the key that a request without a valid API key is counted
// under: the IPv4 address, or the /64 network of an IPv6 address, since one host
// has all addresses in it.
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

// knownFor is how long a key is remembered after it was valid.
const knownFor = 10 * time.Minute

// maxKnown bounds how many keys or IDs are remembered.
const maxKnown = 1000

// known remembers keys or IDs that were valid recently, as hashes. It never grants
// access: the key is still checked every time.
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
