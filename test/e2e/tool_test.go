package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// rulesOnTools are about the tools of a sandbox's servers, and of those elsewhere.
const rulesOnTools = `rules:
  - id: no-delete
    kind: mcp.call
    when: detail.tool.startsWith('delete')
    then: deny
    reason: nothing is deleted there
  - id: payments
    kind: mcp.call
    when: detail.tool == 'pay' && arguments.amount > 100
    then: ask
`

// aServer is a server of the Model Context Protocol that says what it was asked.
const aServer = `
import json, sys
for line in sys.stdin:
    m = json.loads(line)
    if "id" not in m: continue
    r = {}
    if m["method"] == "initialize": r = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "bank", "version": "1"}}
    if m["method"] == "tools/list": r = {"tools": [{"name": n, "inputSchema": {"type": "object"}} for n in ["balance", "pay", "delete_account"]]}
    if m["method"] == "tools/call":
        with open("calls", "a") as f: f.write(json.dumps(m["params"], sort_keys=True) + "\\n")
        r = {"content": [{"type": "text", "text": "done"}]}
    print(json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": r}), flush=True)
`

// toolCalls plays somebody outside who calls tools in a sandbox, and code inside that
// calls tools elsewhere: by the rules they are made, denied, or wait for a person, and
// what the person approved is made once.
func (s *server) toolCalls(t *testing.T, w *rulesWorld) {
	t.Helper()
	s.policy(t, rulesOnTools)
	servers := map[string]any{"bank": map[string]any{"runCmd": "python3 /home/user/bank.py"}}
	b := s.sandbox(map[string]any{"allow_internet_access": true, "mcp": servers})
	config, err := json.Marshal(servers)
	if err != nil {
		t.Fatal(err)
	}
	if r := b.run("cat > bank.py <<'E'" + aServer + "E\nsudo GATEWAY_ACCESS_TOKEN=token mcp-gateway --config '" + string(config) + "'"); r.exit != 0 {
		t.Fatalf("start the gateway: %q %q", r.stdout, r.stderr)
	}
	post := func(body string) (int, string) {
		req := b.request("POST", "/mcp", strings.NewReader(body))
		req.Header.Set("E2b-Sandbox-Port", "50005")
		req.Header.Set("E2b-Traffic-Access-Token", b.traffic)
		req.Header.Set("Authorization", "Bearer token")
		req.Header.Set("Content-Type", "application/json")
		resp, err := (&http.Client{Timeout: 5 * time.Minute}).Do(req)
		if err != nil {
			return 0, err.Error()
		}
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		if err != nil {
			return 0, err.Error()
		}
		return resp.StatusCode, string(got)
	}
	call := func(id int, tool, arguments string) string {
		_, got := post(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"bank__%s","arguments":%s,"_meta":{"progressToken":%d}}}`, id, tool, arguments, id))
		return got
	}
	calls := func() string { return b.run("sudo cat /var/lib/mcp-gateway/home/bank/calls").stdout }

	if _, got := post(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`); !strings.Contains(got, "bank__pay") || strings.Contains(got, "delete_account") {
		t.Errorf("the list has what is denied, or lacks what is not: %s", got)
	}
	if got := call(2, "balance", `{"of": "ann"}`); !strings.Contains(got, `"done"`) || !strings.Contains(got, `"id":2`) {
		t.Errorf("a call that no rule is about: %s", got)
	}
	if got := call(3, "pay", `{"amount": 5}`); !strings.Contains(got, `"done"`) {
		t.Errorf("a small payment: %s", got)
	}
	for _, tool := range []string{"delete_account", `delete\u005faccount`} {
		if got := call(4, tool, `{}`); !strings.Contains(got, "nothing is deleted there") || !strings.Contains(got, `"isError":true`) {
			t.Errorf("%s: %s", tool, got)
		}
	}
	// The attacks: messages that the gateway could read as another one.
	for _, body := range []string{
		`{"jsonrpc":"2.0","id":5,"method":"ping","method":"tools/call","params":{"name":"bank__delete_account"}}`,
		`{"jsonrpc":"2.0","id":5,"method":"ping","Method":"tools/call","params":{"name":"bank__delete_account"}}`,
		`{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"bank__balance","name":"bank__delete_account"}}`,
		`[{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"bank__delete_account"}}]`,
		`[{"jsonrpc":"2.0","id":5,"method":"ping"},{"jsonrpc":"2.0","id":6,"method":"tools/call","params":{"name":"bank__delete_account"}}]`,
		`{"jsonrpc":"2.0","id":5,"method":"ping"}{"jsonrpc":"2.0","id":6,"method":"tools/call","params":{"name":"bank__delete_account"}}`,
	} {
		if status, got := post(body); status != 400 {
			t.Errorf("%s: status %d, %s", body, status, got)
		}
	}

	answer := make(chan string, 1)
	const large = `{"amount": 2500.50, "to": "DE02 <b>Bob</b>"}`
	go func() { answer <- call(7, "pay", large) }()
	id := s.oneWaiting(t)
	shown := s.mustCLI("show", id)
	for _, want := range []string{"mcp.call", "bank", "pay", `"amount": 2500.50`, `"to": "DE02 <b>Bob</b>"`} {
		if !strings.Contains(shown, want) {
			t.Errorf("postern show does not have %q:\n%s", want, shown)
		}
	}
	if strings.Contains(calls(), "2500") {
		t.Error("it was made before anybody approved it")
	}
	s.mustCLI("approve", id)
	if got := <-answer; !strings.Contains(got, `"done"`) || !strings.Contains(got, `"id":7`) {
		t.Errorf("the approved call: %s", got)
	}
	go func() { answer <- call(8, "pay", large) }()
	again := s.oneWaiting(t)
	s.mustCLI("reject", again, "--reason", "one was enough")
	if got := <-answer; !strings.Contains(got, "one was enough") || again == id {
		t.Errorf("the same call once more: %s", got)
	}
	if got := calls(); strings.Count(got, "2500.5") != 1 || strings.Contains(got, "delete") || strings.Contains(got, "_meta") || !strings.Contains(got, `"to": "DE02 <b>Bob</b>"`) {
		t.Errorf("the server was asked:\n%s", got)
	}

	// Code inside calls a server elsewhere.
	w.mu.Lock()
	w.seen = nil
	w.mu.Unlock()
	curl := func(body string, more string) string {
		return `curl -sS -m 240 -d '` + body + `' -H 'Content-Type: application/json' ` + more + ` https://api.rules.test/mcp`
	}
	if r := b.run(curl(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"balance","arguments":{}}}`, "")); !strings.Contains(r.stdout, "Content-Type") {
		t.Errorf("a call elsewhere that no rule is about: %q %q", r.stdout, r.stderr)
	}
	for _, cmd := range []string{
		curl(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"delete_all"}}`, ""),
		curl(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"delete_all"}}`, "-H 'Content-Type: text/plain' -H 'Transfer-Encoding: chunked'"),
		curl(`{"jsonrpc":"2.0","id":1,"method":"ping","Method":"tools/call","params":{"name":"delete_all"}}`, ""),
		curl(`{"jsonrpc":"2.0","id":NaN,"method":"tools/call","params":{"name":"delete_all"}}`, ""),
		`echo '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"delete_all"}}' | gzip | curl -sS -m 60 --data-binary @- -H 'Content-Type: application/json' -H 'Content-Encoding: gzip' https://api.rules.test/mcp`,
	} {
		if r := b.run(cmd); !strings.Contains(r.stdout, "problem") && !strings.Contains(r.stdout, "rule") {
			t.Errorf("%s: %q %q", cmd, r.stdout, r.stderr)
		}
	}
	outside := make(chan result, 1)
	go func() {
		r, _ := b.try(curl(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"pay","arguments":{"amount":1000}}}`, ""), 5*time.Minute)
		outside <- r
	}()
	id = s.oneWaiting(t)
	if shown := s.mustCLI("show", id); !strings.Contains(shown, "api.rules.test") || !strings.Contains(shown, `"amount": 1000`) {
		t.Errorf("postern show:\n%s", shown)
	}
	s.mustCLI("approve", id)
	if r := <-outside; !strings.Contains(r.stdout, "Content-Type") || w.count("POST") != 2 {
		t.Errorf("the approved call elsewhere: %q %q, %d requests", r.stdout, r.stderr, w.count("POST"))
	}
	if !bytes.Contains([]byte(s.mustCLI("audit", "list", "--object", id)), []byte("request.use")) {
		t.Error("the record has no request.use")
	}
}
