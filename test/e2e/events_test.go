package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A taken is one delivery as its receiver got it.
type taken struct {
	Secret  string            `json:"secret"`
	Raw     bool              `json:"raw"`
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body"`
	At      int64             `json:"at"` // milliseconds since 1970: when it came
}

// A hookReceiver receives webhook deliveries.
type hookReceiver struct {
	*httptest.Server
	mu   sync.Mutex // guards what follows
	down bool       // it answers 503
	got  []taken
}

func newHookReceiver(t *testing.T) *hookReceiver {
	r := &hookReceiver{}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		b, err := io.ReadAll(req.Body)
		r.mu.Lock()
		defer r.mu.Unlock()
		if err != nil || r.down {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		h := map[string]string{}
		for k := range req.Header {
			h[strings.ToLower(k)] = req.Header.Get(k)
		}
		r.got = append(r.got, taken{Headers: h, Body: string(b), At: time.Now().UnixMilli()})
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *hookReceiver) set(down bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.down = down
}

func (r *hookReceiver) all() []taken {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]taken(nil), r.got...)
}

// different returns the number of distinct deliveries: one may arrive twice.
func (r *hookReceiver) different() int {
	seen := map[string]bool{}
	for _, d := range r.all() {
		seen[d.Headers["e2b-webhook-id"]+" "+d.Headers["webhook-id"]] = true
	}
	return len(seen)
}

var whsecText = regexp.MustCompile(`whsec_\S+`)

// verifyWithLibrary verifies deliveries with the official Standard Webhooks library.
func verifyWithLibrary(t *testing.T, ds []taken) {
	t.Helper()
	var in bytes.Buffer
	for _, d := range ds {
		if err := json.NewEncoder(&in).Encode(d); err != nil {
			t.Fatal(err)
		}
	}
	script, err := filepath.Abs("../webhook/verify.mjs")
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command("node", script)
	c.Stdin = &in
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%v: install it with make deps-test", err)
	}
	n := 0
	for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); n++ {
		if s.Text() != "ok" {
			t.Errorf("delivery %d: %s", n, s.Text())
		}
	}
	if n != len(ds) {
		t.Errorf("%d deliveries were verified, want %d", n, len(ds))
	}
}

func within(t testing.TB, d time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(d); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", d, what)
		}
	}
}

// TestObserve checks logs, metrics and events of a sandbox, while it runs and after
// its end.
func TestObserve(t *testing.T) {
	t.Parallel()
	r := newHookReceiver(t)
	s := start(t, t.TempDir(), "--webhook-private")
	out := s.mustCLI("webhook", "create", r.URL+"/made")
	made := whsecText.FindString(out)
	const raw = "a secret that somebody chose"
	status, _, b := s.project("POST", "/events/webhooks", `{"name":"raw","url":"`+r.URL+`/raw","events":["sandbox.lifecycle.killed"],"signatureSecret":"`+raw+`"}`)
	var hook struct{ ID, SignatureSecret string }
	if err := json.Unmarshal(b, &hook); err != nil || status != http.StatusCreated || hook.SignatureSecret != "" {
		t.Fatalf("create webhook: %d %s", status, b)
	}

	x := s.sandbox(map[string]any{"metadata": map[string]string{"n": "1"}})
	if status, _, b := s.project("GET", "/sandboxes/"+x.id+"/metrics", ""); status != http.StatusOK || !json.Valid(b) {
		t.Errorf("metrics at once: %d %s", status, b)
	}
	x.run("head -c 20000000 /dev/zero >/home/user/file; true")
	type metric struct{ CPUCount, CPUUsedPct, MemUsed, MemTotal, DiskUsed, DiskTotal, TimestampUnix float64 }
	var ms []metric
	within(t, 2*time.Minute, "a metric with what was written", func() bool {
		status, _, b := s.project("GET", "/sandboxes/"+x.id+"/metrics", "")
		if status != http.StatusOK || json.Unmarshal(b, &ms) != nil {
			t.Fatalf("metrics: %d %s", status, b)
		}
		return len(ms) > 0 && ms[len(ms)-1].DiskUsed >= 20000000
	})
	if m := ms[len(ms)-1]; m.CPUCount != 2 || m.CPUUsedPct < 0 || m.CPUUsedPct > 100 || m.MemUsed < 1<<20 || m.MemUsed > m.MemTotal || m.DiskUsed > m.DiskTotal {
		t.Errorf("metric: %+v", m)
	}
	status, _, b = s.project("GET", "/sandboxes/metrics?sandbox_ids="+x.id+",i00000000000000000000", "")
	var many struct{ Sandboxes map[string]metric }
	if err := json.Unmarshal(b, &many); err != nil || status != http.StatusOK || len(many.Sandboxes) != 1 || many.Sandboxes[x.id].MemTotal == 0 {
		t.Errorf("metrics of many: %d %s", status, b)
	}
	if status, _, b := s.project("GET", "/sandboxes/"+x.id+"/metrics?start=1&end=2", ""); status != http.StatusOK || string(b) != "[]" {
		t.Errorf("metrics of 1970: %d %s", status, b)
	}
	var teams []struct{ TeamID, Name, APIKey string }
	if _, _, b := s.project("GET", "/teams", ""); json.Unmarshal(b, &teams) != nil || len(teams) != 1 || teams[0].APIKey != s.key {
		t.Fatalf("teams: %s", b)
	}
	var most struct{ Value float64 }
	if _, _, b := s.project("GET", "/teams/"+teams[0].TeamID+"/metrics/max?metric=concurrent_sandboxes", ""); json.Unmarshal(b, &most) != nil || most.Value != 1 {
		t.Errorf("most sandboxes at once: %s", b)
	}
	for path, want := range map[string]int{
		"/teams/prj_OTHER/metrics": 403, "/teams/" + teams[0].TeamID + "/metrics/max?metric=x": 400,
		"/sandboxes/i00000000000000000000/metrics": 404, "/sandboxes/i00000000000000000000/logs": 404, "/v2/sandboxes/" + x.id + "/logs?direction=up": 400,
		"/sandboxes/metrics": 400, "/events/sandboxes?limit=101": 400, "/events/sandboxes/x": 400, "/events/webhooks/whk_X": 404,
		"/sandboxes/" + x.id + "/metrics?start=x": 400, "/sandboxes/" + x.id + "/metrics?start=9&end=8": 400,
	} {
		status, _, b := s.project("GET", path, "")
		var e struct{ Code int }
		if json.Unmarshal(b, &e) != nil || status != want || e.Code != want {
			t.Errorf("GET %s: %d %s, want %d", path, status, b, want)
		}
	}
	if status, _, _ := s.project("DELETE", "/sandboxes/"+x.id, ""); status != http.StatusNoContent {
		t.Fatalf("kill: %d", status)
	}

	var es []struct {
		ID, Type, SandboxID string
		EventData           map[string]any
	}
	_, _, b = s.project("GET", "/events/sandboxes/"+x.id+"?orderAsc=true", "")
	if err := json.Unmarshal(b, &es); err != nil || len(es) != 2 || es[0].Type != "sandbox.lifecycle.created" || es[1].Type != "sandbox.lifecycle.killed" || es[1].EventData["execution"] == nil {
		t.Fatalf("events: %s", b)
	}
	// The log of a sandbox that ended, as the CLI reads it.
	var logs struct {
		Logs []struct{ Timestamp, Line string }
	}
	if _, _, b := s.project("GET", "/sandboxes/"+x.id+"/logs", ""); json.Unmarshal(b, &logs) != nil || len(logs.Logs) < 2 {
		t.Fatalf("logs: %s", b)
	}
	var said []string
	for _, l := range logs.Logs {
		var line struct{ Level, Logger, Message string }
		if err := json.Unmarshal([]byte(l.Line), &line); err != nil || line.Level == "" || line.Logger == "" {
			t.Errorf("line %s: %v", l.Line, err)
		}
		said = append(said, line.Logger+": "+line.Message)
	}
	if text := strings.Join(said, "\n"); !strings.Contains(text, "postern: sandbox created") || !strings.Contains(text, "postern: sandbox killed: killed") {
		t.Errorf("the log says:\n%s", text)
	}

	within(t, 2*time.Minute, "three deliveries", func() bool { return r.different() == 3 })
	ds := r.all()
	for i := range ds {
		if ds[i].Secret = made; ds[i].Headers["e2b-webhook-id"] == hook.ID {
			ds[i].Secret, ds[i].Raw = raw, true
		}
	}
	verifyWithLibrary(t, ds)
	within(t, 2*time.Minute, "it on record", func() bool {
		return strings.Contains(s.mustCLI("webhook", "deliveries", hook.ID), "delivered")
	})
	delivery := regexp.MustCompile(`dlv_\w+`).FindString(s.mustCLI("webhook", "deliveries", hook.ID))
	before := len(r.all())
	s.mustCLI("webhook", "redeliver", hook.ID, delivery)
	within(t, 2*time.Minute, "redelivery", func() bool { return len(r.all()) > before })
	s.mustCLI("webhook", "delete", hook.ID)
	if out, err := s.cli("webhook", "deliveries", hook.ID); err == nil {
		t.Errorf("a deleted webhook has deliveries: %s", out)
	}
	if out := s.mustCLI("audit", "list", "--verb", "webhook."); strings.Count(out, "webhook.") < 4 || strings.Contains(out, raw) {
		t.Errorf("audit:\n%s", out)
	}
}

// TestWebhookCrash kills the server again and again between an event and its
// delivery. Every recorded event is delivered, and its signature verifies.
func TestWebhookCrash(t *testing.T) {
	t.Parallel()
	r := newHookReceiver(t)
	data := t.TempDir()
	s := start(t, data, "--webhook-private", "--log", "warn")
	key := s.key
	secret := whsecText.FindString(s.mustCLI("webhook", "create", r.URL))
	x := s.sandbox(map[string]any{"timeout": 600})
	acknowledged := 0
	for round := range 6 {
		r.set(round%2 == 0) // sometimes what was sent must be sent again
		for end := time.Now().Add(rand.N(700 * time.Millisecond)); time.Now().Before(end); {
			status, _, b := s.project("POST", "/sandboxes/"+x.id+"/timeout", fmt.Sprintf(`{"timeout": %d}`, 500+rand.N(100)))
			if status != http.StatusNoContent {
				t.Fatalf("timeout: %d %s", status, b)
			}
			acknowledged++
		}
		_ = s.kill(syscall.SIGKILL)
		s = start(t, data, "--webhook-private", "--log", "warn")
		s.key = key
		if status, _, _ := s.project("GET", "/sandboxes/"+x.id, ""); status != http.StatusOK {
			x = s.sandbox(map[string]any{"timeout": 600}) // it was lost, and its events are not
		}
	}
	r.set(false)
	want := map[string]bool{}
	for offset := 0; ; offset += 100 {
		_, _, b := s.project("GET", fmt.Sprintf("/events/sandboxes?limit=100&offset=%d", offset), "")
		var es []struct{ ID string }
		if err := json.Unmarshal(b, &es); err != nil {
			t.Fatal(err)
		}
		for _, e := range es {
			want[e.ID] = true
		}
		if len(es) < 100 {
			break
		}
	}
	if len(want) < acknowledged {
		t.Errorf("%d events are on record after %d changes were acknowledged", len(want), acknowledged)
	}
	within(t, 10*time.Minute, "every event delivered", func() bool {
		got := map[string]bool{}
		for _, d := range r.all() {
			got[d.Headers["webhook-id"]] = true
		}
		for id := range want {
			if !got[id] {
				return false
			}
		}
		return true
	})
	ds := r.all()
	for i := range ds {
		ds[i].Secret = secret
	}
	verifyWithLibrary(t, ds)
	t.Logf("%d changes acknowledged, %d events, %d deliveries", acknowledged, len(want), len(ds))
	s.project("DELETE", "/sandboxes/"+x.id, "")
}

// TestWebhookAttackers: without --webhook-private no webhook URL reaches this
// machine or a private address (server-side request forgery).
func TestWebhookAttackers(t *testing.T) {
	t.Parallel()
	r := newHookReceiver(t)
	s := start(t, t.TempDir())
	port := r.URL[strings.LastIndexByte(r.URL, ':')+1:]
	for _, u := range []string{
		r.URL, "https://127.0.0.1:" + port, "https://[::ffff:127.0.0.1]:" + port, "https://2130706433:" + port, "https://169.254.169.254/latest/meta-data",
		"https://10.0.0.1/", "https://user@example.com/", "file:///etc/passwd", "https://0/", "https://[fd00:ec2::254]/",
	} {
		if out, err := s.cli("webhook", "create", u); err == nil {
			t.Errorf("webhook create %s: %s", u, out)
		}
	}
	// A name can only be refused once it has resolved to an address.
	id := regexp.MustCompile(`whk_\w+`).FindString(s.mustCLI("webhook", "create", "https://localhost:"+port+"/"))
	x := s.sandbox(nil)
	within(t, 2*time.Minute, "refusal", func() bool {
		return strings.Contains(s.mustCLI("webhook", "deliveries", id), "127.0.0.1 is loopback and never reachable") ||
			strings.Contains(s.mustCLI("webhook", "deliveries", id), "::1 is loopback and never reachable")
	})
	if n := len(r.all()); n != 0 {
		t.Errorf("the receiver got %d requests", n)
	}
	// A sandbox or an agent's key cannot create one.
	_, agent := s.inbox("hooked")
	status, _ := call(client, "POST", "http://"+s.web+"/events/webhooks", agent, map[string]any{"name": "x", "url": "https://example.com", "events": []string{"sandbox.lifecycle.created"}}, nil)
	if status != http.StatusUnauthorized && status != http.StatusForbidden {
		t.Errorf("an inbox key made a webhook: %d", status)
	}
	s.project("DELETE", "/sandboxes/"+x.id, "")
}
