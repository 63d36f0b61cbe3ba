package mailapi

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/internal/storetest"
)

// signUp signs up from an address, and returns the status and Retry-After.
func (f *fixture) signUp(t *testing.T, remote string, forwarded ...string) (code, retry int) {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), "POST", "http://postern.example/v1/signup", http.NoBody)
	r.RemoteAddr = remote
	for _, v := range forwarded {
		r.Header.Add("X-Forwarded-For", v)
	}
	w := httptest.NewRecorder()
	f.srv.Handler().ServeHTTP(w, r)
	retry, _ = strconv.Atoi(w.Header().Get("Retry-After"))
	return w.Code, retry
}

// TestSignupIsLimited is an attacker who signs up from one address, from all of its
// network, and through names of others in X-Forwarded-For.
func TestSignupIsLimited(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.srv.conf.Signup, f.srv.conf.Proxies = true, []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}

	var made atomic.Int32
	var all sync.WaitGroup
	for i := range 40 {
		all.Go(func() {
			code, retry := f.signUp(t, fmt.Sprintf("192.0.2.1:%d", 1000+i))
			if code == 200 {
				made.Add(1)
			} else if code != 429 || retry < 1 || retry > 600 {
				t.Errorf("refused with %d, Retry-After %d", code, retry)
			}
		})
	}
	all.Wait()
	if n := made.Load(); n != 5 {
		t.Errorf("%d of 40 sign-ups from one address at once succeeded", n)
	}

	// count signs up 40 times, with the remote address and the field that at returns.
	count := func(at func(i int) (remote, forwarded string)) (n int) {
		f.srv.signups.by, f.srv.signups.order = newSignupLimiter("").by, newSignupLimiter("").order
		for i := range 40 {
			remote, forwarded := at(i)
			var fields []string
			if forwarded != "" {
				fields = strings.Split(forwarded, "|")
			}
			if code, _ := f.signUp(t, remote, fields...); code == 200 {
				n++
			} else if code != 429 {
				t.Errorf("from %s: %d", remote, code)
			}
		}
		return n
	}
	for _, tt := range []struct {
		name string
		want int
		at   func(i int) (remote, forwarded string)
	}{
		{"a /24", 10, func(i int) (string, string) { return fmt.Sprintf("192.0.2.%d:1", i), "" }},
		{"a /64", 5, func(i int) (string, string) { return fmt.Sprintf("[2001:db8:1:1::%x]:1", i), "" }},
		{"a /48", 20, func(i int) (string, string) { return fmt.Sprintf("[2001:db8:1:%x::1]:1", i), "" }},
		{"IPv4 written as IPv6", 5, func(i int) (string, string) { return []string{"192.0.2.1:1", "[::ffff:192.0.2.1]:1"}[i%2], "" }},
		{"a zone", 5, func(i int) (string, string) { return fmt.Sprintf("[fe80::1%%eth%d]:1", i), "" }},
		{"a field from nobody's proxy", 5, func(i int) (string, string) { return "192.0.2.1:1", fmt.Sprintf("198.51.%d.1", i) }},
		{"a proxy", 40, func(i int) (string, string) { return "10.9.0.1:1", fmt.Sprintf("198.51.%d.1", i) }},
		{"two proxies", 40, func(i int) (string, string) { return "10.9.0.1:1", fmt.Sprintf("198.51.%d.1, 10.9.0.2", i) }},
		{"a proxy that writes ports", 40, func(i int) (string, string) { return "10.9.0.1:1", fmt.Sprintf("198.51.%d.1:99", i) }},
		{"a name before the proxy's", 5, func(i int) (string, string) { return "10.9.0.1:1", fmt.Sprintf("198.51.%d.1, 203.0.113.7", i) }},
		{"a field before the proxy's", 5, func(i int) (string, string) { return "10.9.0.1:1", fmt.Sprintf("198.51.%d.1|203.0.113.7", i) }},
		{"a field without an address", 5, func(i int) (string, string) { return "10.9.0.1:1", fmt.Sprintf("198.51.%d.1, unknown", i) }},
		{"many networks", 40, func(i int) (string, string) { return fmt.Sprintf("198.51.%d.1:1", i), "" }},
		{"no address", 5, func(int) (string, string) { return "@", "" }},
	} {
		if got := count(tt.at); got != tt.want {
			t.Errorf("%s: %d of 40 succeeded, want %d", tt.name, got, tt.want)
		}
	}
}

// TestSignupBuckets: memory is bounded, what is refused costs others nothing, and
// time gives back.
func TestSignupBuckets(t *testing.T) {
	l, now := newSignupLimiter("sign-ups"), time.Unix(1e9, 0)
	for i := range 3 * maxSignupBuckets {
		_ = l.take(netip.AddrFrom4([4]byte{byte(i >> 16), byte(i >> 8), byte(i), 1}), now)
	}
	if len(l.by) > maxSignupBuckets || l.order.Len() != len(l.by) {
		t.Errorf("%d buckets", len(l.by))
	}
	l = newSignupLimiter("sign-ups")
	addr, neighbour := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	for range 1000 {
		_ = l.take(addr, now)
	}
	for i := range 5 {
		if err := l.take(neighbour, now); err != nil {
			t.Errorf("number %d of the neighbour: %v", i, err)
		}
	}
	if err := l.take(addr, now.Add(9*time.Minute)); err == nil {
		t.Error("it was given back too early")
	}
	if err := l.take(addr, now.Add(10*time.Minute)); err != nil {
		t.Errorf("it is not given back: %v", err)
	}
}
