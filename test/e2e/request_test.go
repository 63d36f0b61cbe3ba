package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// rulesOnRequests is the example of docs/reference/policy.md for a host of the test.
const rulesOnRequests = `rules:
  - id: read
    kind: net.request
    when: host == 'api.rules.test' && method in ['GET', 'HEAD']
    then: allow
  - id: no-delete
    kind: net.request
    when: host == 'api.rules.test' && method == 'DELETE'
    then: deny
    reason: nothing is deleted there
  - id: write
    kind: net.request
    when: host == 'api.rules.test'
    then: ask
`

// TestRequestsWaitForPeople: in a real sandbox, a rule about requests lets one be read,
// holds another until a person approves it at the command line, and denies a third.
// The one that was approved is made once.
func TestRequestsWaitForPeople(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestRequestsWaitForPeople$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestRequestsWaitForPeople") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"addr", "add", outside + "/32", "dev", "lo"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	w := newRulesWorld(t)
	s := start(t, t.TempDir(), "--dns", nameServer(t), "--egress", "allow", "--egress-allow", outside, "--egress-ca", w.ca)
	s.policy(t, rulesOnRequests)
	b := s.sandbox(map[string]any{"allow_internet_access": true})
	const api = "https://api.rules.test"

	if r := b.run("curl -sS -m 60 " + api + "/v1/orders"); r.exit != 0 || !strings.Contains(r.stdout, "Accept: */*") {
		t.Errorf("a read: %q %q", r.stdout, r.stderr)
	}
	r := b.run("curl -sS -m 60 -D - -X DELETE " + api + "/v1/orders/7")
	if !strings.Contains(r.stdout, " 403") || !strings.Contains(r.stdout, "application/problem+json") || !strings.Contains(r.stdout, `"rule":"no-delete"`) || !strings.Contains(r.stdout, "nothing is deleted there") {
		t.Errorf("a deletion: %q %q", r.stdout, r.stderr)
	}

	const post = `curl -sS -m 240 -d '{"order":7}' -H 'Content-Type: application/json' ` + api + "/v1/orders"
	answer := make(chan result, 1)
	go func() {
		r, err := b.try(post, 5*time.Minute)
		if err != nil {
			r.stderr += err.Error()
		}
		answer <- r
	}()
	id := s.oneWaiting(t)
	shown := s.mustCLI("show", id)
	for _, want := range []string{"POST https://api.rules.test/v1/orders", "content-type", `"order": 7`} {
		if !strings.Contains(shown, want) {
			t.Errorf("postern show does not have %q:\n%s", want, shown)
		}
	}
	if n := w.count("POST"); n != 0 {
		t.Errorf("%d requests left before anybody had approved one", n)
	}
	s.mustCLI("approve", id)
	if r := <-answer; !strings.Contains(r.stdout, "Content-Type: application/json") || w.count("POST") != 1 {
		t.Errorf("the approved request: %q %q, made %d times", r.stdout, r.stderr, w.count("POST"))
	}
	for _, want := range []string{"request.use", "request.made"} { // the latter after the program has its answer
		eventually(t, want+" is on the record", func() bool { return strings.Contains(s.mustCLI("audit", "list", "--object", id), want) })
	}

	// The same bytes once more are another question.
	go func() {
		r, _ := b.try(post, 5*time.Minute)
		answer <- r
	}()
	again := s.oneWaiting(t)
	s.mustCLI("reject", again, "--reason", "one was enough")
	if r := <-answer; !strings.Contains(r.stdout, "one was enough") || again == id || w.count("POST") != 1 {
		t.Errorf("the second request: %q, made %d times", r.stdout, w.count("POST"))
	}

	s.firstUse(t, w)
	s.toolCalls(t, w)
}

// firstUse plays the first use of a secret by a sandbox: a person approves it, further
// requests need nobody, and the end of the grant ends that.
func (s *server) firstUse(t *testing.T, w *rulesWorld) {
	t.Helper()
	const canary = "ghp_a_value_that_no_sandbox_sees"
	file := filepath.Join(t.TempDir(), "value")
	if err := os.WriteFile(file, []byte(canary), 0o600); err != nil {
		t.Fatal(err)
	}
	s.mustCLI("secret", "create", "github", "--host", "api.rules.test", "--approval", "first", "--file", file)
	b := s.sandbox(map[string]any{"allow_internet_access": true, "metadata": map[string]string{"postern.secrets": "github"}})
	get := func(path string) string {
		return `curl -sS -m 240 -H "Authorization: Bearer $GITHUB" https://api.rules.test` + path
	}
	answer := make(chan result, 2)
	for _, path := range []string{"/1", "/2"} {
		go func() {
			r, _ := b.try(get(path), 5*time.Minute)
			answer <- r
		}()
	}
	id := s.oneWaiting(t)
	if shown := s.mustCLI("show", id); !strings.Contains(shown, "secret.use") || !strings.Contains(shown, "Bearer ‹secret github›") || strings.Contains(shown, canary) || strings.Contains(shown, "pst_") {
		t.Errorf("postern show:\n%s", shown)
	}
	s.mustCLI("approve", id)
	for range 2 {
		if r := <-answer; !strings.Contains(r.stdout, "Authorization: Bearer ***") && !strings.Contains(r.stdout, "Authorization:") || strings.Contains(r.stdout, canary) {
			t.Errorf("an approved use: %q %q", r.stdout, r.stderr)
		}
	}
	if r := b.run(get("/3")); !strings.Contains(r.stdout, "Authorization:") {
		t.Errorf("another request under the grant: %q %q", r.stdout, r.stderr)
	}
	w.mu.Lock()
	got := 0
	for _, r := range w.seen {
		if h, _ := r["headers"].(http.Header); h.Get("Authorization") == "Bearer "+canary {
			got++
		}
	}
	w.mu.Unlock()
	if got != 3 {
		t.Errorf("the server outside got the secret %d times, want 3", got)
	}
}

// policy makes text the policy of the project.
func (s *server) policy(t *testing.T, text string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s.mustCLI("policy", "propose", file, "--reason", "as agreed")
	id := s.oneWaiting(t)
	s.mustCLI("approve", id)
	s.becomes(t, "the policy is in force", func() bool { return strings.Contains(s.mustCLI("policy", "show"), "no-delete") })
	time.Sleep(6 * time.Second) // what the server has in memory is at most five seconds old
}

// oneWaiting returns the id of the only action that waits for a person.
func (s *server) oneWaiting(t *testing.T) (id string) {
	t.Helper()
	s.becomes(t, "an action waits", func() bool {
		var list []struct {
			ID string `json:"id"`
		}
		if err := json.Unmarshal([]byte(s.mustCLI("pending", "--json")), &list); err != nil {
			t.Fatal(err)
		}
		if len(list) == 1 {
			id = list[0].ID
		}
		return id != ""
	})
	return id
}

// becomes waits until ok returns true.
func (s *server) becomes(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(200 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it has not come to be: %s\n%s", what, tail(s.log.String(), 30))
		}
	}
}

// count returns how many requests with a method the server outside has seen.
func (w *rulesWorld) count(method string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.seen {
		if r["method"] == method {
			n++
		}
	}
	return n
}
