package mailapi

import (
	"container/list"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

// A signupRate is a token bucket: burst sign-ups at once, and one more after each
// interval.
type signupRate struct {
	name  string
	every time.Duration
	burst float64
}

// The rates of sign-ups. The attack: somebody who makes accounts until the disk is
// full, or until nobody else gets one: from one address, from all addresses of a
// network that they rent, and from many networks. A host has a /64 of IPv6 addresses,
// and a customer often a /48.
var (
	signupsAll      = signupRate{"this server", 10 * time.Second, 200}
	signupsOfHost   = signupRate{"this address", 10 * time.Minute, 5}
	signupsOfNet    = signupRate{"this network", 2 * time.Minute, 10}
	signupsOfNetBig = signupRate{"this network", time.Minute, 20} // a /48
)

// maxSignupBuckets bounds what is remembered of addresses and networks. Beyond it the
// one that was seen least recently is forgotten; who has that many addresses is bounded
// by the rate of the server.
const maxSignupBuckets = 20_000

// A signupLimiter limits sign-ups. It is safe for concurrent use.
type signupLimiter struct {
	what string        // there are too many of: "sign-ups"
	one  chan struct{} // held by the sign-up that writes: others wait here and not in the way of all writers

	mu    sync.Mutex               // guards what follows
	by    map[string]*list.Element // elements of order; their values are *signupBucket
	order *list.List               // the most recently seen first
}

type signupBucket struct {
	key    string
	tokens float64
	at     time.Time // when tokens was last updated
}

func newSignupLimiter(what string) *signupLimiter {
	return &signupLimiter{what: what, one: make(chan struct{}, 1), by: map[string]*list.Element{}, order: list.New()}
}

// A waitError means that a caller has to wait before it asks again.
type waitError struct {
	what string
	wait time.Duration
}

// Is makes it an [errCrowded].
func (e *waitError) Is(target error) bool { return target == errCrowded }

// Error says what there are too many of.
func (e *waitError) Error() string {
	return fmt.Sprintf("too many %s: try again in %d s", e.what, wholeSeconds(e.wait))
}

// take takes a token of every bucket that a client at addr has a part in, or none of
// them and returns a [waitError].
func (l *signupLimiter) take(addr netip.Addr, now time.Time) error {
	keys := signupKeys(addr)
	keys[""] = signupsAll
	return l.takeEach(keys, now)
}

// takeOf is take without the bucket of the server.
func (l *signupLimiter) takeOf(addr netip.Addr, now time.Time) error {
	return l.takeEach(signupKeys(addr), now)
}

// giveBack returns what takeOf took.
func (l *signupLimiter) giveBack(addr netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, r := range signupKeys(addr) {
		b := l.bucketLocked(key, r, time.Now())
		b.tokens = min(r.burst, b.tokens+1)
	}
}

func (l *signupLimiter) takeEach(keys map[string]signupRate, now time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var buckets []*signupBucket
	for key, r := range keys {
		b := l.bucketLocked(key, r, now)
		if b.tokens < 1 {
			wait := time.Duration(math.Ceil((1 - b.tokens) * float64(r.every)))
			return &waitError{l.what + " from " + r.name, wait}
		}
		buckets = append(buckets, b)
	}
	for _, b := range buckets {
		b.tokens--
	}
	return nil
}

// signupKeys returns the names of the buckets of an address, with their rates, but not
// that of the server. What
// is no address of the internet, such as the local socket's, has one bucket.
func signupKeys(addr netip.Addr) map[string]signupRate {
	keys := map[string]signupRate{}
	addr = addr.Unmap().WithZone("")
	add := func(bits int, r signupRate) {
		p, _ := addr.Prefix(bits)
		keys[p.String()] = r
	}
	switch {
	case addr.Is4():
		add(32, signupsOfHost)
		add(24, signupsOfNet)
	case addr.Is6():
		add(64, signupsOfHost)
		add(48, signupsOfNetBig)
	default:
		keys["local"] = signupsOfHost
	}
	return keys
}

func (l *signupLimiter) bucketLocked(key string, r signupRate, now time.Time) *signupBucket {
	if e, ok := l.by[key]; ok {
		l.order.MoveToFront(e)
		b, _ := e.Value.(*signupBucket)
		if now.After(b.at) {
			b.tokens, b.at = min(r.burst, b.tokens+float64(now.Sub(b.at))/float64(r.every)), now
		}
		return b
	}
	for l.order.Len() >= maxSignupBuckets {
		last, _ := l.order.Remove(l.order.Back()).(*signupBucket)
		delete(l.by, last.key)
	}
	b := &signupBucket{key: key, tokens: r.burst, at: now}
	l.by[key] = l.order.PushFront(b)
	return b
}

// clientOf returns the address of the client that made r. The attack: a client that
// names another address in X-Forwarded-For. So the field counts only where the
// connection is from a proxy that the operator trusts, and only as far as each name was
// written by such a proxy: from the end.
func clientOf(r *http.Request, proxies []netip.Prefix) netip.Addr {
	trusted := func(a netip.Addr) bool {
		for _, p := range proxies {
			if p.Contains(a) {
				return true
			}
		}
		return false
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	at, err := netip.ParseAddr(host)
	if err != nil {
		return netip.Addr{}
	}
	at = at.Unmap().WithZone("")
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for i := len(hops) - 1; i >= 0 && trusted(at); i-- {
		hop := strings.TrimSpace(hops[i])
		next, err := netip.ParseAddr(hop)
		if err != nil {
			withPort, err := netip.ParseAddrPort(hop)
			if err != nil {
				break // it is limited as the last proxy that is known
			}
			next = withPort.Addr()
		}
		at = next.Unmap().WithZone("")
	}
	return at
}

// lobsterSignup makes an account for any caller, if the operator has allowed
// sign-up.
func (s lobsterServer) lobsterSignup(w http.ResponseWriter, r *http.Request, _ caller) error {
	if !s.conf.Signup {
		return errSignupClosed
	}
	if err := s.signups.take(clientOf(r, s.conf.Proxies), time.Now()); err != nil {
		return err
	}
	select {
	case s.signups.one <- struct{}{}:
		defer func() { <-s.signups.one }()
	case <-time.After(maxSignupWait):
		return &waitError{"sign-ups at the same time", maxSignupWait}
	case <-r.Context().Done():
		return r.Context().Err()
	}
	who := auth.Principal{Kind: auth.System, ID: auth.Signup}
	err := s.db.View(r.Context(), func(tx *store.Tx) (err error) { //nolint:contextcheck // r's context is what is passed
		who.Project, err = auth.FirstProject(r.Context(), tx)
		return err
	})
	if err != nil {
		return err
	}
	id, token, err := s.post.Keys.NewAccount(r.Context(), who, "signed up "+time.Now().UTC().Format(time.RFC3339))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"id": id, "token": token.Reveal()})
	return nil
}

// maxSignupWait is how long a sign-up waits for those before it.
const maxSignupWait = 10 * time.Second

var errSignupClosed = fmt.Errorf("signup is closed here: ask the operator for a token (postern up --signup opens it): %w", auth.ErrForbidden)
