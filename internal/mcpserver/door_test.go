package mcpserver

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"golang.org/x/time/rate"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/site"
	"postern/internal/store"
	"postern/internal/storetest"
)

const listTools = `{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{}}`

// post makes one request at the door, changed by with.
func post(t *testing.T, h http.Handler, key auth.Secret, body string, with func(*http.Request)) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), "POST", "http://api.example.com"+Path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key.Reveal())
	}
	if with != nil {
		with(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// TestOrigin: a browser's page calls only if it is ours, whatever name leads here.
func TestOrigin(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	b, key := f.inbox(t, "analyst")
	who, _ := f.sandbox(t, b.ID)
	outside, inside := f.srv.Handler(), f.srv.HandlerFor(who)
	for _, tt := range []struct {
		host, origin string
		want         int
	}{
		{"api.example.com", "", 200},
		{"evil.example", "", 200}, // a program behind a proxy: no browser is without an origin
		{"localhost:3000", "http://localhost:3000", 200},
		{"127.0.0.1:3000", "http://127.0.0.1:3000", 200},
		{"[::1]:3000", "http://[::1]:3000", 200},
		{"postern.example", "https://postern.example", 200},
		{"postern.example:8443", "https://postern.example:8443", 200},
		{"evil.example", "http://evil.example", 403}, // a name that was made to lead here
		{"localhost.evil.example", "http://localhost.evil.example", 403},
		{"127.0.0.1.evil.example", "http://127.0.0.1.evil.example", 403},
		{"192.0.2.7", "http://192.0.2.7", 403},
		{"localhost:3000", "http://localhost:4000", 403}, // another page of this machine
		{"localhost:3000", "https://evil.example", 403},
		{"localhost:3000", "null", 403},
		{"localhost:3000", "localhost:3000", 403},
	} {
		with := func(r *http.Request) {
			r.Host = tt.host
			if tt.origin != "" {
				r.Header.Set("Origin", tt.origin)
			}
		}
		for name, w := range map[string]*httptest.ResponseRecorder{"outside": post(t, outside, key, listTools, with), "inside": post(t, inside, "", listTools, with)} {
			if w.Code != tt.want {
				t.Errorf("%s: %s with origin %q: %d, want %d", name, tt.host, tt.origin, w.Code, tt.want)
			}
		}
	}
	two := post(t, outside, key, listTools, func(r *http.Request) {
		r.Host = "localhost"
		r.Header["Origin"] = []string{"http://localhost", "http://evil.example"}
	})
	if two.Code != 403 {
		t.Errorf("two origins: %d, want 403", two.Code)
	}
}

// TestMetadata: who has no key is told where the document is that says how to
// come by one, and finds it.
func TestMetadata(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	for _, tt := range []struct {
		name    string
		conf    Config
		want    string // the resource
		issuers int
	}{
		{"as it was called", Config{Site: site.Site{Base: "http://localhost:3000", Hosts: []string{"api.example.com"}}}, "http://api.example.com/mcp", 0},
		{"by its URL", Config{Site: site.Site{Base: "https://mail.example.com/"}, Issuers: []string{"https://login.example.com"}}, "https://mail.example.com/mcp", 1},
		{"behind a proxy", Config{Site: site.Site{Hosts: []string{"api.example.com"}, HTTPS: true}}, "https://api.example.com/mcp", 0},
		{"by a forged name", Config{Site: site.Site{Base: "http://localhost:3000", Hosts: []string{"10.0.0.7:3000"}}, OAuth: true}, "http://localhost:3000/mcp", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f.srv.conf = tt.conf
			w := post(t, f.srv.Handler(), "", listTools, nil)
			challenge := w.Header().Get("WWW-Authenticate")
			at := strings.TrimSuffix(tt.want, Path) + "/.well-known/oauth-protected-resource/mcp"
			if w.Code != 401 || !strings.HasPrefix(challenge, "Bearer ") || !strings.Contains(challenge, `resource_metadata="`+at+`"`) || strings.Contains(challenge, "error=") {
				t.Errorf("without a key: %d %s", w.Code, challenge)
			}
			w = post(t, f.srv.Handler(), "pib_AAAAAAAAAAAAAAAAAAAAAAAAAA", listTools, nil)
			if c := w.Header().Get("WWW-Authenticate"); w.Code != 401 || !strings.Contains(c, `error="invalid_token"`) {
				t.Errorf("with a wrong one: %d %s", w.Code, c)
			}
			// An access token of somebody else is no key.
			w = post(t, f.srv.Handler(), "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4ifQ.", listTools, nil)
			if w.Code != 401 {
				t.Errorf("with a JWT: %d", w.Code)
			}
			for _, path := range MetadataPaths {
				r := httptest.NewRequestWithContext(t.Context(), "GET", "http://api.example.com"+path, nil)
				got := httptest.NewRecorder()
				f.srv.Metadata().ServeHTTP(got, r)
				var doc metadata
				if err := json.Unmarshal(got.Body.Bytes(), &doc); err != nil || got.Code != 200 || doc.Resource != tt.want || len(doc.Issuers) != tt.issuers {
					t.Errorf("%s: %d %s, %v", path, got.Code, got.Body, err)
				}
			}
		})
	}
	r := httptest.NewRequestWithContext(t.Context(), "POST", "http://api.example.com"+metadataPath, nil)
	w := httptest.NewRecorder()
	f.srv.Metadata().ServeHTTP(w, r)
	if w.Code != 405 {
		t.Errorf("POST: %d, want 405", w.Code)
	}
	// The attack: a Host that breaks out of the header's quotes.
	f.srv.conf = Config{Site: site.Site{Base: "http://localhost:3000"}}
	w = post(t, f.srv.Handler(), "", listTools, func(r *http.Request) { r.Host = `x", error="` })
	if c := w.Header().Get("WWW-Authenticate"); strings.Count(c, `"`)%2 != 0 || strings.Contains(c, "error=") {
		t.Errorf("challenge = %s", c)
	}
}

// TestRates: nobody calls without number, with a key or without, and who does
// takes nothing from the others.
func TestRates(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	_, key := f.inbox(t, "analyst")
	_, keyB := f.inbox(t, "bella")
	h := f.srv.Handler()
	from := func(addr string) func(*http.Request) { return func(r *http.Request) { r.RemoteAddr = addr } }
	// nearly leaves a caller a few calls, which do not come back: else a slow
	// machine never calls faster than they do.
	nearly := func(who string) {
		t.Helper()
		f.srv.mu.Lock()
		defer f.srv.mu.Unlock()
		l := f.srv.rates[who]
		if l == nil {
			t.Fatalf("the calls of %s are not counted", who)
		}
		l.SetLimit(rate.Every(24 * time.Hour))
		if !l.AllowN(time.Now(), int(l.Tokens())-5) {
			t.Fatalf("%s has %v calls", who, l.Tokens())
		}
	}
	stranger := func() int {
		return post(t, h, "pib_AAAAAAAAAAAAAAAAAAAAAAAAAA", listTools, from("203.0.113.1:1")).Code
	}
	if first := stranger(); first != 401 {
		t.Errorf("a stranger's first try: %d, want 401", first)
	}
	nearly("from 203.0.113.1")
	last := 0
	for range 10 {
		last = stranger()
	}
	if last != 429 {
		t.Errorf("a stranger's many tries: %d, want 429", last)
	}
	for name, got := range map[string]int{
		"the same address with a key": post(t, h, key, listTools, from("203.0.113.1:2")).Code, "another address": post(t, h, keyB, listTools, from("203.0.113.2:1")).Code,
	} {
		if got != 200 {
			t.Errorf("%s: %d, want 200", name, got)
		}
	}
	nearly(f.who(t, key).String())
	for range 10 {
		last = post(t, h, key, `{}`, nil).Code
	}
	if last != 429 {
		t.Errorf("many calls with a key: %d, want 429", last)
	}
	f.srv.mu.Lock()
	for i := range maxRateLimitings {
		f.srv.mu.Unlock()
		_ = f.srv.often(fmt.Sprint("from ", i), time.Hour, 1)
		f.srv.mu.Lock()
	}
	n := len(f.srv.rates)
	f.srv.mu.Unlock()
	if n > maxRateLimitings+1 {
		t.Errorf("%d callers are remembered, want %d", n, maxRateLimitings)
	}
}

// TestSessions: there are none, so another's id opens nothing and ends nothing.
func TestSessions(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	_, key := f.inbox(t, "analyst")
	_, keyB := f.inbox(t, "bella")
	h := f.srv.Handler()
	const start = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"x","version":"1"}}}`
	w := post(t, h, key, start, nil)
	if id := w.Header().Get("Mcp-Session-Id"); w.Code != 200 || id != "" {
		t.Errorf("initialize: %d, session %q, want none", w.Code, id)
	}
	f.receive(t, "From: a@example.com\r\nSubject: private\r\n\r\nx\r\n")
	const inbox = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"email_inbox","arguments":{}}}`
	for _, id := range []string{"", "of analyst", strings.Repeat("x", 5000)} {
		w := post(t, h, keyB, inbox, func(r *http.Request) { r.Header.Set("Mcp-Session-Id", id) })
		if strings.Contains(w.Body.String(), "private") {
			t.Errorf("with session %.20q: %s", id, w.Body)
		}
		for _, method := range []string{"GET", "DELETE"} {
			if w := post(t, h, keyB, "", func(r *http.Request) { r.Method = method; r.Header.Set("Mcp-Session-Id", id) }); w.Code != 405 {
				t.Errorf("%s of session %.20q: %d, want 405", method, id, w.Code)
			}
		}
	}
}

// TestNoToolDecides: an agent that is offered everything, and calls it with
// whatever it likes, has decided on nothing afterwards.
func TestNoToolDecides(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		b, key := f.inbox(t, "analyst")
		who, _ := f.sandbox(t, b.ID)
		if err := f.post.Keys.Lend(t.Context(), f.project, who, key); err != nil {
			t.Fatal(err)
		}
		outside, inside := connect(t, f.srv.Handler(), key, ""), connect(t, f.srv.HandlerFor(who), "", "")
		id := call(t, outside, "email_send", args{"to": []string{"bob@example.com"}, "subject": "s", "body": "b"}).field("actionId")
		before, err := f.gate.Action(t.Context(), f.person, id)
		if err != nil {
			t.Fatal(err)
		}
		for _, tool := range catalog() {
			if tool.Name == "email_cancel" || tool.Name == "email_edit" { // which take it back, or ask anew
				continue
			}
			for _, a := range []args{
				{"actionId": id, "approve": true},
				{"actionId": id, "decision": "approve"},
				{"id": id, "state": "approved"},
				{"actionId": id, "version": before.Version, "digest": before.Hex(), "approve": true},
				{"actionId": id},
				{"approvalId": id, "waitSeconds": 0},
				{"code": id},
				{"mode": "autonomous", "reason": "r"},
				{"pattern": "*@example.com", "reason": "r"},
			} {
				for _, cs := range []*mcp.ClientSession{outside, inside} {
					if tool.set == Network && cs == outside || (tool.set == Code || tool.set == Runs) && cs == inside {
						continue // it is not offered
					}
					if r := call(t, cs, tool.Name, a); r.field("status") == "approved" {
						t.Errorf("%s %v: %+v", tool.Name, a, r)
					}
				}
			}
		}
		for _, name := range []string{"email_approve", "decide_email", "tools/call", "../v1/actions/" + id + "/decision", "oversight/decide"} {
			body := fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":%q,"arguments":{"actionId":%q,"approve":true}}}`, name, id)
			if w := post(t, f.srv.Handler(), key, body, nil); strings.Contains(w.Body.String(), `"result"`) {
				t.Errorf("%s: %s", name, w.Body)
			}
		}
		after, err := f.gate.Action(t.Context(), f.person, id)
		if err != nil || after.State != oversight.Pending || after.Version != before.Version || after.Hex() != before.Hex() {
			t.Errorf("after all of it: %+v, %v", after, err)
		}
		if now, err := f.post.Directory.Find(t.Context(), f.person, b.ID); err != nil || now.Mode != policy.GatedSend {
			t.Errorf("the inbox is in mode %s, %v", now.Mode, err)
		}
		if list, err := f.post.AllowList.Entries(t.Context(), f.person, b.ID); err != nil || len(list) != 0 {
			t.Errorf("the allow list has %v, %v", list, err)
		}
	})
}

// TestAsking: an agent asks for more and gets it by a person's word alone; less
// it may always have.
func TestAsking(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		b, key := f.inbox(t, "analyst")
		who, _ := f.sandbox(t, b.ID)
		cs, inside := connect(t, f.srv.Handler(), key, ""), connect(t, f.srv.HandlerFor(who), "", "")
		watched := func() string {
			t.Helper()
			r := call(t, cs, "email_oversight_get", nil)
			if r.isErr {
				t.Fatal(r.text)
			}
			return r.field("mode") + " " + fmt.Sprint(len(r.data["allowList"].([]any)))
		}
		run := func() {
			t.Helper()
			if ran, err := f.gate.RunOne(t.Context()); !ran || err != nil {
				t.Fatal(ran, err)
			}
		}
		if got := watched(); got != "gated_send 0" {
			t.Fatal(got)
		}
		until := time.Now().Add(24 * time.Hour).UTC().Format(time.RFC3339)
		allow := call(t, inside, "email_allow_request", args{"pattern": "bob@example.com", "reason": "daily report", "until": until})
		mode := call(t, cs, "email_mode_request", args{"mode": "autonomous", "reason": "please"})
		for _, r := range []result{allow, mode} {
			if r.isErr || r.field("status") != "pending_approval" || call(t, cs, "email_action_status", args{"actionId": r.field("actionId")}).field("status") != "pending" {
				t.Errorf("asked: %+v", r)
			}
		}
		if got := watched(); got != "gated_send 0" {
			t.Errorf("before anybody decided: %s", got)
		}
		f.decide(t, allow.field("actionId"), true, "")
		run()
		f.decide(t, mode.field("actionId"), false, "not yet")
		if got := watched(); got != "gated_send 1" {
			t.Errorf("after the decisions: %s", got)
		}
		if r := call(t, cs, "email_action_status", args{"actionId": mode.field("actionId")}); r.field("reason") != "not yet" || r.field("kind") != "inbox.mode" {
			t.Errorf("status: %+v", r)
		}
		// A person's code, which a sandbox cannot use.
		code, _, err := f.post.ModeCode(t.Context(), f.person, b.ID, policy.Autonomous, "three good weeks")
		if err != nil {
			t.Fatal(err)
		}
		for name, r := range map[string]result{
			"a sandbox's use": call(t, inside, "email_mode_code", args{"code": code.Reveal()}), "a wrong code": call(t, cs, "email_mode_code", args{"code": "AAAA-BBBB-CCCC-DDDD"}),
			"no reason": call(t, cs, "email_mode_request", args{"mode": "autonomous"}), "no mode": call(t, cs, "email_mode_request", args{"mode": "free", "reason": "r"}),
			"everybody": call(t, cs, "email_allow_request", args{"pattern": "*", "reason": "r"}), "no time": call(t, cs, "email_allow_request", args{"pattern": "a@example.com", "reason": "r", "until": "soon"}),
		} {
			if !r.isErr || strings.Contains(r.text, "internal error") {
				t.Errorf("%s: %+v", name, r)
			}
		}
		for _, want := range []bool{false, true} { // the second time it is used up
			if r := call(t, cs, "email_mode_code", args{"code": code.Reveal()}); r.isErr != want {
				t.Errorf("the code: %+v", r)
			}
		}
		if got := watched(); got != "autonomous 1" {
			t.Errorf("by the code: %s", got)
		}
		if r := call(t, inside, "email_mode_request", args{"mode": "read_only", "reason": "r"}); !r.isErr {
			t.Errorf("a sandbox goes down: %+v", r)
		}
		if r := call(t, cs, "email_mode_request", args{"mode": "read_only", "reason": "I was misled"}); r.isErr || r.field("status") != "approved" {
			t.Errorf("down: %+v", r)
		}
		if got := watched(); got != "read_only 1" {
			t.Errorf("in the end: %s", got)
		}
	})
}
