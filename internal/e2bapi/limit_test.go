package e2bapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"postern/internal/auth"
)

func TestLimiter(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	type step struct {
		after time.Duration
		key   string
		n     float64
		wait  time.Duration
	}
	tests := []struct {
		name  string
		rate  Rate
		steps []step
	}{
		{"no limit", Rate{}, []step{{0, "a", 1, 0}, {0, "a", 1000, 0}}},
		{"burst, then the rate", Rate{2, 3}, []step{
			{0, "a", 1, 0},
			{0, "a", 1, 0},
			{0, "a", 1, 0},
			{0, "a", 1, 500 * time.Millisecond},
			{250 * time.Millisecond, "a", 1, 250 * time.Millisecond},
			{500 * time.Millisecond, "a", 1, 0},
		}},
		{"never more than the burst", Rate{2, 2}, []step{{0, "a", 2, 0}, {time.Hour, "a", 2, 0}, {time.Hour, "a", 1, 500 * time.Millisecond}}},
		{"each for itself", Rate{1, 1}, []step{{0, "a", 1, 0}, {0, "b", 1, 0}, {0, "a", 1, time.Second}}},
		{"asking takes nothing", Rate{1, 1}, []step{{0, "a", 0, 0}, {0, "a", 0, 0}, {0, "a", 1, 0}, {0, "a", 0, time.Second}}},
		{"no burst means a second's", Rate{PerSecond: 2.5}, []step{{0, "a", 3, 0}, {0, "a", 1, 400 * time.Millisecond}}},
		{"a clock that goes back", Rate{1, 1}, []step{{0, "a", 1, 0}, {-time.Hour, "a", 1, time.Second}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := newLimiter(tt.rate)
			for i, s := range tt.steps {
				if got := l.take(s.key, s.n, start.Add(s.after)).Round(time.Millisecond); got != s.wait {
					t.Errorf("step %d: got %v, want %v", i, got, s.wait)
				}
			}
		})
	}
}

// TestLimiterMemory: callers with made-up addresses cost bounded memory, and idle
// callers cost none.
func TestLimiterMemory(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	l := newLimiter(Rate{1, 10})
	for i := range 3 * maxBuckets {
		l.take(strconv.Itoa(i), 1, now)
	}
	if got := len(l.by); got != maxBuckets || l.order.Len() != maxBuckets {
		t.Errorf("got %d and %d buckets, want %d", got, l.order.Len(), maxBuckets)
	}
	l.take("new", 1, now.Add(11*time.Second))
	if got := len(l.by); got != 1 {
		t.Errorf("got %d buckets after a pause, want 1", got)
	}
	k := &known{until: map[[32]byte]time.Time{}}
	for i := range 3 * maxKnown {
		k.add(strconv.Itoa(i), now)
	}
	if len(k.until) > maxKnown {
		t.Errorf("%d keys are remembered", len(k.until))
	}
	if !k.has(strconv.Itoa(3*maxKnown-1), now) || k.has(strconv.Itoa(3*maxKnown-1), now.Add(knownFor)) {
		t.Error("the last key is not remembered, or for ever")
	}
}

func TestAddressOf(t *testing.T) {
	for remote, want := range map[string]string{
		"192.0.2.1:5": "192.0.2.1", "[::ffff:192.0.2.1]:5": "192.0.2.1", "[2001:db8::1]:5": "2001:db8::/64", "[2001:db8::ffff:1]:6": "2001:db8::/64",
		"[fe80::1%eth0]:5": "fe80::/64", "@": "@",
	} {
		if got := addressOf(&http.Request{RemoteAddr: remote}); got != want {
			t.Errorf("%s: got %s, want %s", remote, got, want)
		}
	}
}

// limitedServer is a control API with a few routes. Its keys are "good-" and the
// project's name.
func limitedServer(t *testing.T, l Limits) (s *httptest.Server, calls *atomic.Int64) {
	t.Helper()
	srv := &Server{log: slog.New(slog.NewTextHandler(t.Output(), nil)), conf: Config{Limits: &l}}
	srv.openData(&fakeSandboxes{}, http.DefaultTransport)
	who := srv.limited(func(r *http.Request) (auth.Principal, error) {
		project, ok := strings.CutPrefix(r.Header.Get("X-Api-Key"), "good-")
		if !ok {
			return auth.Principal{}, auth.ErrUnauthenticated
		}
		return auth.Principal{Kind: auth.Project, Project: project}, nil
	})
	calls = new(atomic.Int64)
	mux := http.NewServeMux()
	for _, pattern := range []string{"POST /v2/sandboxes", "GET /v2/sandboxes"} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			if _, err := who(r); err != nil {
				srv.fail(w, r, err)
				return
			}
			calls.Add(1)
			if r.Method == http.MethodGet {
				reply(w, http.StatusOK, []string{})
				return
			}
			reply(w, http.StatusCreated, map[string]any{"sandboxID": testID, "templateID": "base", "clientID": "x", "envdVersion": guestVersion, "domain": nil})
		})
	}
	s = httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s, calls
}

func TestLimits(t *testing.T) {
	slow := func(burst int) Rate { return Rate{PerSecond: 0.001, Burst: burst} }
	s, _ := limitedServer(t, Limits{API: slow(4), Create: slow(2), Unknown: slow(3)})
	type call struct {
		method, key string
		want        int
	}
	tests := []struct {
		name  string
		calls []call
	}{
		{"creation has its own", []call{{"POST", "good-a", 201}, {"POST", "good-a", 201}, {"POST", "good-a", 429}, {"GET", "good-a", 200}, {"GET", "good-a", 429}}},
		{"another project has its own", []call{{"GET", "good-b", 200}}},
		{"strangers share their address's", []call{{"GET", "bad", 401}, {"GET", "", 401}, {"POST", "bad2", 401}, {"GET", "bad3", 429}}},
		{"who was known goes on", []call{{"GET", "good-b", 200}, {"GET", "good-a", 429}}},
		{"who was not waits", []call{{"GET", "good-new", 429}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for i, c := range tt.calls {
				req, err := http.NewRequestWithContext(t.Context(), c.method, s.URL+"/v2/sandboxes", strings.NewReader("{}"))
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("X-Api-Key", c.key)
				resp, err := newClient(t).Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				if resp.StatusCode != c.want {
					t.Errorf("call %d: got %d, want %d", i, resp.StatusCode, c.want)
				}
				if c.want != 429 {
					continue
				}
				var b struct {
					Code    int
					Message string
				}
				after, err := strconv.Atoi(resp.Header.Get("Retry-After"))
				if jerr := json.NewDecoder(resp.Body).Decode(&b); jerr != nil || b.Code != 429 || b.Message == "" || err != nil || after < 1 || after > 1001 {
					t.Errorf("call %d: got %+v, Retry-After %q", i, b, resp.Header.Get("Retry-After"))
				}
			}
		})
	}
}

// TestLimitError: Retry-After is never 0.
func TestLimitError(t *testing.T) {
	for _, tt := range []struct {
		wait time.Duration
		want int64
	}{{time.Nanosecond, 1}, {time.Second, 1}, {1001 * time.Millisecond, 2}} {
		err := error(&limitError{"calls", tt.wait})
		var l *limitError
		if !errors.As(fmt.Errorf("x: %w", err), &l) || l.seconds() != tt.want {
			t.Errorf("%v: got %d, want %d", tt.wait, l.seconds(), tt.want)
		}
	}
}

// TestSDKRetries: the official SDK waits as long as Retry-After says, and succeeds.
func TestSDKRetries(t *testing.T) {
	if _, err := os.Stat("../../demo/node_modules/e2b"); err != nil {
		t.Fatalf("%v: make deps-test installs the official SDK", err)
	}
	s, calls := limitedServer(t, Limits{API: Rate{PerSecond: 100}, Create: Rate{PerSecond: 1, Burst: 1}, Unknown: Rate{PerSecond: 100}})
	const script = `
const { Sandbox } = require('e2b')
;(async () => {
  const start = Date.now()
  for (let i = 0; i < 3; i++) await Sandbox.create('base')
  console.log(Date.now() - start)
})().catch((e) => { console.error(e); process.exit(1) })`
	cmd := exec.CommandContext(t.Context(), "node", "-e", script)
	cmd.Dir = "../../demo"
	cmd.Env = append(os.Environ(), "E2B_API_URL="+s.URL, "E2B_API_KEY=good-sdk")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	took, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil || took < 1500 || calls.Load() != 3 {
		t.Errorf("took %s ms for %d sandboxes, %v; want 3 in more than 1500", out, calls.Load(), err)
	}
}
