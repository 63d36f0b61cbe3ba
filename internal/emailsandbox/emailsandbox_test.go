package emailsandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/mcpserver"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

type fixture struct {
	db   *store.DB
	gate *oversight.Gate
	post *mailbox.PostOffice
	srv  *Server

	project, person auth.Principal
	projectKey      auth.Secret
}

func setup(t *testing.T) *fixture {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	f := &fixture{db: storetest.SQLite(t)}
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f.gate = oversight.NewGate(log, f.db, oversighttest.Rules{
		{ID: "no-evil", Kind: "email.send", To: "*@evil.example", Effect: policy.Deny, Reason: "evil is blocked"},
		{ID: "home", Kind: "email.send", To: "boss@home.example", Effect: policy.Allow},
	})
	f.post = mailbox.New(log, f.db, f.gate, mailbox.Config{Blobs: blobs, Domain: "agents.test"})
	fleet, err := sandbox.New(log, f.db, nil, nil, sandboxtest.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	f.srv = New(mcpserver.New(log, f.db, f.gate, f.post, fleet, mcpserver.Config{}))
	f.project, f.projectKey = f.newProject(t, "one")
	f.person = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: f.project.Project}
	return f
}

func (f *fixture) newProject(t *testing.T, name string) (who auth.Principal, key auth.Secret) {
	t.Helper()
	err := f.db.Update(t.Context(), func(tx *store.Tx) (err error) {
		who.Project, key, err = auth.NewProject(t.Context(), tx, name)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	who.Kind, who.ID = auth.Project, "crd_"+name
	return who, key
}

func (f *fixture) inbox(t *testing.T, who auth.Principal, name string) (directory.Inbox, auth.Secret) {
	t.Helper()
	b, key, err := f.post.CreateInbox(t.Context(), who, directory.NewInbox{Address: name}, "")
	if err != nil {
		t.Fatal(err)
	}
	return b, key
}

// receive stores a message and returns its id, as the key's inbox has it.
func (f *fixture) receive(t *testing.T, b directory.Inbox, key auth.Secret) string {
	t.Helper()
	raw := "From: Bob <bob@example.com>\r\nTo: " + b.Address + "\r\nSubject: Kohlrabi\r\nMessage-ID: <" + b.ID + "@example.com>\r\n\r\nKohlrabi\r\n"
	if err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1"}); err != nil {
		t.Fatal(err)
	}
	who, err := auth.CheckKey(t.Context(), f.db, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.post.Keys.Open(t.Context(), who, key, "")
	if err != nil {
		t.Fatal(err)
	}
	ms, err := f.post.Messages(t.Context(), who, k, 1)
	if err != nil {
		t.Fatal(err)
	}
	return ms[0].ID
}

type header map[string]string

// do makes one request, each from an address of its own.
func do(t *testing.T, h http.Handler, method, path string, headers header, body string) (int, map[string]any) {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, "http://postern.example"+Path+path, strings.NewReader(body))
	r.RemoteAddr = fmt.Sprintf("[2001:db8:%x:%x::1]:1", rand.IntN(1<<16), rand.IntN(1<<16))
	for k, v := range headers {
		r.Header.Set(k, v)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	var out map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &out); err != nil && w.Code != http.StatusMethodNotAllowed {
		t.Fatalf("%s %s: %d, %v: %s", method, path, w.Code, err, w.Body)
	}
	return w.Code, out
}

func bearer(key auth.Secret) header { return header{"Authorization": "Bearer " + key.Reveal()} }

// TestStory: a program written for email-sandbox reads, proposes, waits and learns what
// a person said, with nothing but POSTs.
func TestStory(t *testing.T) {
	f := setup(t)
	b, key := f.inbox(t, f.project, "analyst")
	id := f.receive(t, b, key)
	h := f.srv.Handler()
	tool := func(name, body string) (int, map[string]any) {
		t.Helper()
		return do(t, h, "POST", "/api/tools/"+name, bearer(key), body)
	}
	status, out := tool("email_inbox", `{"limit": 100}`)
	if ms, _ := out["messages"].([]any); status != 200 || len(ms) != 1 || ms[0].(map[string]any)["id"] != id {
		t.Fatalf("inbox: %d %v", status, out)
	}
	if status, out := tool("email_message_get", `{"id": "`+id+`"}`); status != 200 || !strings.Contains(fmt.Sprint(out["untrusted"]), "Kohlrabi") {
		t.Errorf("message: %d %v", status, out)
	}
	// No body is no arguments.
	if status, out := tool("email_labels_list", ""); status != 200 || out["labels"] == nil {
		t.Errorf("labels: %d %v", status, out)
	}
	status, out = tool("email_send", `{"to": ["bob@example.com"], "subject": "s", "body": "b", "attachments": [{"name": "a.txt", "content_base64": "eA=="}]}`)
	action, _ := out["actionId"].(string)
	if status != 202 || out["status"] != "pending_approval" || !strings.HasPrefix(action, "act_") || out["approvalId"] != action {
		t.Fatalf("send: %d %v", status, out)
	}
	if status, out := tool("email_action_status", `{"approvalId": "`+action+`"}`); status != 200 || out["status"] != "pending" {
		t.Errorf("status: %d %v", status, out)
	}
	a, err := f.gate.Action(t.Context(), f.person, action)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: action, Version: a.Version, Digest: a.Hex(), Reason: "not so soon"}); err != nil {
		t.Fatal(err)
	}
	if status, out := tool("email_action_status", `{"actionId": "`+action+`", "waitSeconds": 60}`); status != 200 || out["status"] != "denied" || out["reason"] != "not so soon" {
		t.Errorf("after the decision: %d %v", status, out)
	}
	if status, out := tool("email_send", `{"to": ["boss@home.example"], "subject": "s", "body": "b"}`); status != 200 || out["status"] != "approved" {
		t.Errorf("what a rule allows: %d %v", status, out)
	}
	if status, out := tool("email_send", `{"to": ["x@evil.example"], "subject": "s", "body": "b"}`); status != 400 || out["status"] != "blocked" || !strings.Contains(fmt.Sprint(out["error"]), "evil is blocked") {
		t.Errorf("what policy forbids: %d %v", status, out)
	}
	for _, name := range []string{"email_archive", "email_trash"} {
		if status, out := tool(name, `{"id": "`+id+`"}`); status != 202 || out["status"] != "pending_approval" {
			t.Errorf("%s: %d %v", name, status, out)
		}
	}
	if status, out := tool("email_reply", `{"messageId": "`+id+`", "body": "b", "replyAll": true}`); status != 202 {
		t.Errorf("reply: %d %v", status, out)
	}
	if status, out := tool("email_forward", `{"messageId": "`+id+`", "to": ["x@example.com"]}`); status != 202 {
		t.Errorf("forward: %d %v", status, out)
	}
	if status, out := tool("email_draft_create", `{"to": [], "subject": "", "body": ""}`); status != 200 || out["status"] != "saved" {
		t.Errorf("draft: %d %v", status, out)
	}
	if status, out := do(t, h, "GET", "/api/tools/email_send", bearer(key), ""); status != 200 || out["tool"] != "email_send" || out["examples"] == nil {
		t.Errorf("help: %d %v", status, out)
	}
	if status, out := do(t, h, "GET", "/api/tools", header{"X-API-Key": key.Reveal()}, ""); status != 200 || out["tools"] == nil {
		t.Errorf("overview: %d %v", status, out)
	}
	// The Model Context Protocol, for programs that append its path.
	headers := bearer(key)
	headers["Content-Type"] = "application/json"
	if status, out := do(t, h, "POST", "/mcp", headers, `{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{}}`); status != 200 || !strings.Contains(fmt.Sprint(out), "email_send") {
		t.Errorf("MCP: %d %v", status, out)
	}
}

// TestRefusals: what cannot be taken is told as email-sandbox tells it, and leaves
// nothing behind.
func TestRefusals(t *testing.T) {
	f := setup(t)
	b, key := f.inbox(t, f.project, "analyst")
	f.receive(t, b, key)
	h := f.srv.Handler()
	for _, tt := range []struct {
		name, method, path, body string
		header                   header
		status                   int
		want                     string
	}{
		{"unknown message", "POST", "/api/tools/email_message_get", `{"id": "msg_AAAAAAAAAAAAAAAAAAAAAAAAAA"}`, nil, 404, "not found"},
		{"unknown action", "POST", "/api/tools/email_action_status", `{"actionId": "act_AAAAAAAAAAAAAAAAAAAAAAAAAA"}`, nil, 404, "not found"},
		{"unknown tool", "POST", "/api/tools/email_approve", `{}`, nil, 404, "no tool"},
		{"tool of another set", "POST", "/api/tools/email_cancel", `{}`, nil, 404, "no tool"},
		{"tool with code", "POST", "/api/tools/run_code", `{"code": "1"}`, nil, 404, "no tool"},
		{"help on an unknown tool", "GET", "/api/tools/email_approve", ``, nil, 404, "no such tool"},
		{"unknown path", "GET", "/api/messages", ``, nil, 404, "no such path"},
		{"no id", "POST", "/api/tools/email_message_get", `{}`, nil, 400, "id: is required"},
		{"no JSON", "POST", "/api/tools/email_send", `to=bob`, nil, 400, "arguments"},
		{"a list", "POST", "/api/tools/email_send", `[]`, nil, 400, "arguments"},
		{"two objects", "POST", "/api/tools/email_inbox", `{} {}`, nil, 400, "arguments"},
		{"misspelt", "POST", "/api/tools/email_send", `{"to": ["x@example.com"], "subject": "s", "body": "b", "bbc": []}`, nil, 400, "bbc"},
		{"line break in the subject", "POST", "/api/tools/email_send", `{"to": ["x@example.com"], "subject": "a\r\nBcc: eve@example.com", "body": "b"}`, nil, 400, "subject: contains a line break"},
		{"a path of the server", "POST", "/api/tools/email_send", `{"to": ["x@example.com"], "subject": "s", "body": "b", "attachments": ["/etc/passwd"]}`, nil, 400, "paths are read only from within a sandbox"},
		{"a page elsewhere", "POST", "/api/tools/email_inbox", `{}`, header{"Origin": "https://evil.example"}, 403, "another server"},
		{"no key", "POST", "/api/tools/email_inbox", `{}`, header{"Authorization": ""}, 401, "pib_"},
		{"a wrong key", "POST", "/api/tools/email_inbox", `{}`, header{"Authorization": "Bearer pib_AAAAAAAAAAAAAAAAAAAAAAAAAA"}, 401, "pib_"},
	} {
		headers := bearer(key)
		maps.Copy(headers, tt.header)
		status, out := do(t, h, tt.method, tt.path, headers, tt.body)
		if status != tt.status || !strings.Contains(fmt.Sprint(out), tt.want) {
			t.Errorf("%s: %d %v, want %d with %q", tt.name, status, out, tt.status, tt.want)
		}
	}
	if as, err := f.gate.Actions(t.Context(), f.person, oversight.Query{}); err != nil || len(as) != 0 {
		t.Errorf("refused calls left %d actions, %v", len(as), err)
	}
	if w := httptest.NewRecorder(); true {
		r := httptest.NewRequestWithContext(t.Context(), "DELETE", "http://postern.example"+Path+"/api/tools/email_inbox", nil)
		r.Header.Set("Authorization", "Bearer "+key.Reveal())
		if h.ServeHTTP(w, r); w.Code != http.StatusNotFound && w.Code != http.StatusMethodNotAllowed {
			t.Errorf("DELETE: %d", w.Code)
		}
	}
}

// calls has every tool of this door and its arguments. A tool that is added to the set
// core needs a row here.
var calls = map[string]struct {
	args string
	need seal.Scope // what the caller must have in the inbox; empty: nothing
}{
	"email_account":       {`{"inbox": "INBOX"}`, "member"},
	"email_inbox":         {`{"inbox": "INBOX"}`, seal.Read},
	"email_search":        {`{"inbox": "INBOX", "q": "kohlrabi"}`, seal.Read},
	"email_message_get":   {`{"inbox": "INBOX", "id": "MESSAGE"}`, seal.Read},
	"email_thread_get":    {`{"inbox": "INBOX", "id": "MESSAGE"}`, seal.Read},
	"email_labels_list":   {`{"inbox": "INBOX"}`, seal.Read},
	"email_draft_create":  {`{"inbox": "INBOX", "to": [], "subject": "s", "body": "b"}`, seal.Draft},
	"email_archive":       {`{"inbox": "INBOX", "id": "MESSAGE"}`, "read send order"},
	"email_trash":         {`{"inbox": "INBOX", "id": "MESSAGE"}`, "read send order"},
	"email_send":          {`{"inbox": "INBOX", "to": ["x@example.com"], "subject": "s", "body": "NUMBER"}`, seal.Send},
	"email_reply":         {`{"inbox": "INBOX", "messageId": "MESSAGE", "body": "NUMBER"}`, "read send"},
	"email_forward":       {`{"inbox": "INBOX", "messageId": "MESSAGE", "to": ["x@example.com"], "body": "NUMBER"}`, "read send"},
	"email_action_status": {`{"actionId": "ACTION"}`, "member"},
	"email_help":          {`{}`, ""},
}

// TestIsolation tries every kind of caller on every tool and inbox. What a caller may do
// here is what it may do with the same tool elsewhere.
func TestIsolation(t *testing.T) {
	f := setup(t)
	ctx := t.Context()
	for _, name := range mcpserver.CoreTools() {
		if _, ok := calls[name]; !ok {
			t.Errorf("tool %s is in no row of calls: who may use it?", name)
		}
	}
	foreign, foreignProject := f.newProject(t, "two")
	inboxes, keys, messages, actions := map[string]directory.Inbox{}, map[string]auth.Secret{"nobody": "", "project": f.projectKey, "foreign project": foreignProject}, map[string]string{}, map[string]string{}
	for name, who := range map[string]auth.Principal{"a": f.project, "b": f.project, "foreign": foreign} {
		b, key := f.inbox(t, who, "inbox-"+name)
		inboxes[name], keys["key "+name], messages[name] = b, key, f.receive(t, b, key)
		agent, err := auth.CheckKey(ctx, f.db, key)
		if err != nil {
			t.Fatal(err)
		}
		p, err := f.post.Send(ctx, agent, "test", mailbox.Outgoing{Draft: mail.Draft{To: []string{"x@example.com"}, Subject: "s", Text: name}})
		if err != nil {
			t.Fatal(err)
		}
		actions[name] = p.ID
	}
	who, err := auth.CheckKey(ctx, f.db, keys["key a"])
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.post.Keys.Open(ctx, who, keys["key a"], "")
	if err != nil {
		t.Fatal(err)
	}
	for name, n := range map[string]keyring.NewKey{"reading key a": {Scope: seal.Read}, "drafting key a": {Scope: seal.Draft}, "sending key a": {Scope: seal.Send}, "revoked key a": {}, "searching key a": {Scope: seal.Propose, Tools: []string{"email_search"}}} {
		p, key, err := f.post.Keys.Add(ctx, who, k, n)
		if err != nil {
			t.Fatal(err)
		}
		if keys[name] = key; name == "revoked key a" {
			if err := f.post.Keys.Revoke(ctx, who, "", p.Credential, false); err != nil {
				t.Fatal(err)
			}
		}
	}
	_, keys["grant a"], err = f.post.Keys.Grant(ctx, who, k, keyring.NewKey{Scope: seal.Propose, Expires: time.Now().Add(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	box := func(id, inbox string) auth.Principal {
		return auth.Principal{Kind: auth.Sandbox, ID: id, Project: f.project.Project, Inbox: inbox}
	}
	doors := map[string]http.Handler{
		"sandbox of a": f.srv.HandlerFor(box("sbx1", inboxes["a"].ID)), "sandbox of none": f.srv.HandlerFor(box("sbx2", "")),
	}
	n := 0
	for _, c := range []struct {
		name  string
		scope map[string]seal.Scope
		door  int // the status at the door, 0 if it gets in
	}{
		{"nobody", nil, 401},
		{"project", nil, 403},
		{"foreign project", nil, 403},
		{"revoked key a", nil, 401},
		{"key a", map[string]seal.Scope{"a": seal.Manage}, 0},
		{"key b", map[string]seal.Scope{"b": seal.Manage}, 0},
		{"key foreign", map[string]seal.Scope{"foreign": seal.Manage}, 0},
		{"reading key a", map[string]seal.Scope{"a": seal.Read}, 0},
		{"drafting key a", map[string]seal.Scope{"a": seal.Draft}, 0},
		{"sending key a", map[string]seal.Scope{"a": seal.Send}, 0},
		{"searching key a", map[string]seal.Scope{"a": seal.Propose}, 0},
		{"grant a", map[string]seal.Scope{"a": seal.Propose}, 0},
		{"sandbox of a", map[string]seal.Scope{"a": "draft send"}, 0},
		{"sandbox of none", nil, 0},
	} {
		h := doors[c.name]
		if h == nil {
			h = f.srv.Handler()
		}
		for tool, row := range calls {
			for inbox, b := range inboxes {
				n++
				body := strings.NewReplacer("INBOX", b.ID, "MESSAGE", messages[inbox], "ACTION", actions[inbox], "NUMBER", fmt.Sprint("number ", n)).Replace(row.args)
				var headers header
				if key := keys[c.name]; key != "" {
					headers = bearer(key)
				}
				status, out := do(t, h, "POST", "/api/tools/"+tool, headers, body)
				want := may(c.scope[inbox], row.need)
				if c.name == "searching key a" && tool != "email_search" && tool != "email_help" {
					want = false
				}
				switch ok := status == 200 || status == 202; {
				case c.door != 0:
					if status != c.door && (c.door != 403 || ok) {
						t.Errorf("%s on %s as %s: %d, want %d: %v", tool, inbox, c.name, status, c.door, out)
					}
				case ok != want:
					t.Errorf("%s on %s as %s: %d %v, want success %v", tool, inbox, c.name, status, out, want)
				case !ok && (status >= 500 || strings.Contains(fmt.Sprint(out), "Kohlrabi") || strings.Contains(fmt.Sprint(out), "bob@")):
					t.Errorf("%s on %s as %s: the refusal tells: %d %v", tool, inbox, c.name, status, out)
				}
			}
		}
	}
	t.Logf("%d trials", n)
}

// may reports whether a caller with a scope in an inbox may use a tool that needs one.
func may(has, need seal.Scope) bool {
	switch need {
	case "":
		return true
	case "member":
		return has != ""
	case "read send order":
		return has.Includes("read send")
	default:
		return has.Includes(need)
	}
}

// TestLongPoll: a call that waits for a decision ends with it, and one whose program
// has left ends at once.
func TestLongPoll(t *testing.T) {
	f := setup(t)
	_, key := f.inbox(t, f.project, "analyst")
	srv := httptest.NewServer(f.srv.Handler())
	defer srv.Close()
	post := func(ctx context.Context, tool, body string) (out map[string]any, err error) {
		r, err := http.NewRequestWithContext(ctx, "POST", srv.URL+Path+"/api/tools/"+tool, bytes.NewReader([]byte(body)))
		if err != nil {
			return nil, err
		}
		r.Header.Set("Authorization", "Bearer "+key.Reveal())
		resp, err := srv.Client().Do(r)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		return out, json.NewDecoder(resp.Body).Decode(&out)
	}
	out, err := post(t.Context(), "email_send", `{"to": ["x@example.com"], "subject": "s", "body": "b"}`)
	if err != nil {
		t.Fatal(err)
	}
	id := out["actionId"].(string)
	waits := `{"waitSeconds": 60, "actionId": "` + id + `"}`
	left, leave := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		_, err := post(left, "email_action_status", waits)
		gone <- err
	}()
	leave()
	if err := <-gone; err == nil {
		t.Error("a call whose program left has an answer")
	}
	said := make(chan map[string]any, 1)
	go func() {
		out, err := post(t.Context(), "email_action_status", waits)
		if err != nil {
			out = map[string]any{"error": err.Error()}
		}
		said <- out
	}()
	a, err := f.gate.Action(t.Context(), f.person, id)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: id, Version: a.Version, Digest: a.Hex(), Reason: "ask Bob first"}); err != nil {
		t.Fatal(err)
	}
	if out := <-said; out["status"] != "denied" || out["reason"] != "ask Bob first" {
		t.Errorf("the decision: %v", out)
	}
}
