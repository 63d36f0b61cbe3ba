package e2e

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"postern/internal/smtpclient/postfixtest"
)

// A telegramStub speaks the part of Telegram's Bot API that the server uses.
type telegramStub struct {
	*httptest.Server

	mu      sync.Mutex
	updates []map[string]any
	sent    []map[string]string // forms of sendMessage, with their message_id
	edited  []string
	answers []string
}

const stubToken = "4711:AA-bb_cc"

func startTelegram(t *testing.T) *telegramStub {
	s := &telegramStub{}
	s.Server = httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(s.Close)
	return s
}

func (s *telegramStub) serve(w http.ResponseWriter, r *http.Request) {
	method, ok := strings.CutPrefix(r.URL.Path, "/bot"+stubToken+"/")
	if !ok {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	_ = r.ParseMultipartForm(1 << 20) // getMe has no body, getUpdates another kind of form
	if method == "getUpdates" {
		s.mu.Lock()
		empty := len(s.updates) == 0
		s.mu.Unlock()
		if empty { // it holds the request for a while, as the real one does
			select {
			case <-r.Context().Done():
			case <-time.After(300 * time.Millisecond):
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var result any = true
	message := func(id int) map[string]any {
		chat, _ := strconv.ParseInt(r.FormValue("chat_id"), 10, 64)
		return map[string]any{"message_id": id, "date": 1, "chat": map[string]any{"id": chat, "type": "private"}}
	}
	switch method {
	case "getMe":
		result = map[string]any{"id": 4711, "is_bot": true, "first_name": "p", "username": "postern_stub_bot"}
	case "getUpdates":
		offset, _ := strconv.ParseInt(r.FormValue("offset"), 10, 64)
		list := []map[string]any{}
		for _, u := range s.updates {
			if u["update_id"].(int64) >= offset {
				list = append(list, u)
			}
		}
		s.updates = list // what is below the offset is confirmed
		result = list
	case "sendMessage":
		form := map[string]string{"message_id": strconv.Itoa(100 + len(s.sent))}
		for k := range r.Form {
			form[k] = r.FormValue(k)
		}
		s.sent = append(s.sent, form)
		result = message(99 + len(s.sent))
	case "editMessageText":
		s.edited = append(s.edited, r.FormValue("text"))
		id, _ := strconv.Atoi(r.FormValue("message_id"))
		result = message(id)
	case "answerCallbackQuery":
		s.answers = append(s.answers, r.FormValue("text"))
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"ok": true, "result": result})
}

// add queues an update with the next number.
func (s *telegramStub) add(n int64, u map[string]any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	u["update_id"] = n
	s.updates = append(s.updates, u)
}

// find returns the newest message that holds a text.
func (s *telegramStub) find(text string) map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range slices.Backward(s.sent) {
		if strings.Contains(m["text"], text) {
			return m
		}
	}
	return nil
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(3 * time.Minute); !ok(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s did not come", what)
		}
	}
}

// person creates the first account at the set-up link, as a browser does, and
// returns the browser's client.
func (s *server) person(name string) *http.Client {
	s.t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		s.t.Fatal(err)
	}
	c := &http.Client{Jar: jar, Timeout: time.Minute, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	u, err := url.Parse(s.link)
	if err != nil {
		s.t.Fatal(err)
	}
	status, _ := s.form(c, "/console/setup", url.Values{"token": {u.Query().Get("token")}, "name": {name}, "password": {"correct horse battery"}, "again": {"correct horse battery"}})
	if status != http.StatusSeeOther {
		s.t.Fatalf("set up: status %d", status)
	}
	return c
}

// form submits a form of the console.
func (s *server) form(c *http.Client, path string, v url.Values) (int, string) {
	s.t.Helper()
	req, err := http.NewRequest("POST", "http://"+s.web+path, strings.NewReader(v.Encode()))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.Header.Set("Origin", "http://"+s.web)
	req.Header.Set("Sec-Fetch-Site", "same-origin")
	resp, err := c.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

// TestNotify: the server mails a link over a real Postfix. A person opens it, reads
// the waiting action and approves it in Telegram. The link itself can never decide,
// and expires with the decision. A used button does nothing when pressed again.
func TestNotify(t *testing.T) {
	t.Parallel()
	postfix, maildir := postfixtest.Start(t)
	stub := startTelegram(t)
	s := start(t, t.TempDir(), "--notify-from", "Postern <postern@agents.internal>", "--route", postfixtest.Domain+"="+postfix,
		"--telegram-token", stubToken, "--telegram-url", stub.URL, "--pool-min", "0", "--pool-max", "0")
	ann := s.person("ann")
	// Before anybody has a channel, so that nobody is told of this change.
	s.policy(t, "version: 1\nrules:\n  - id: chat-but-no-delete\n    kind: email.send\n    then: ask\n    chat: true\n")
	if status, err := call(s.local(), "PATCH", "http://postern/v1/people/ann", "", map[string]string{"email": "b@" + postfixtest.Domain}, nil); err != nil || status != 204 {
		t.Fatalf("set address: %d, %v", status, err)
	}
	code := regexp.MustCompile(`/start ([A-Z2-7]{26})`).FindStringSubmatch(s.mustCLI("notify", "link", "ann"))
	if code == nil {
		t.Fatal("no code")
	}
	const user = 1001
	from := map[string]any{"id": user, "is_bot": false, "first_name": "a", "username": "ann"}
	chat := map[string]any{"id": user, "type": "private"}
	stub.add(1, map[string]any{"message": map[string]any{"message_id": 1, "date": 1, "from": from, "chat": chat, "text": code[0]}})
	until(t, "the link of the chat", func() bool { return stub.find("Linked: ") != nil })
	if out := s.mustCLI("notify", "test", "ann"); strings.Count(out, " sent\n") != 2 {
		t.Errorf("postern notify test ann:\n%s", out)
	}
	if out := s.mustCLI("notify", "list"); !strings.Contains(out, "b@"+postfixtest.Domain) || !strings.Contains(out, "ann") {
		t.Errorf("postern notify list:\n%s", out)
	}

	_, key := s.inbox("analyst")
	base := "http://" + s.web
	propose := func(text string) (id string) {
		t.Helper()
		var a struct{ ID string }
		status, err := call(client, "POST", base+"/v1/inboxes/analyst@agents.internal/messages", key, map[string]any{"to": []string{"c@" + postfixtest.Domain}, "subject": "Totals https://evil.example/", "text": text}, &a)
		if err != nil || status != 202 {
			t.Fatalf("propose: %d, %v", status, err)
		}
		return a.ID
	}
	state := func(id string) string {
		t.Helper()
		var a struct{ State string }
		if status, err := call(client, "GET", base+"/v1/actions/"+id, key, nil, &a); err != nil || status != 200 {
			t.Fatalf("status: %d, %v", status, err)
		}
		return a.State
	}
	id := propose("north 150")
	link := ""
	until(t, "the mail", func() bool {
		files, _ := filepath.Glob(filepath.Join(maildir, "b", "new", "*"))
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err == nil && strings.Contains(string(b), "View it:") {
				text := strings.ReplaceAll(strings.ReplaceAll(string(b), "\r\n", "\n"), "=\n", "")
				link = regexp.MustCompile(`http://[0-9.:]+/look/[A-Z2-7]{26}`).FindString(text)
				if strings.Contains(text, "evil.example") || strings.Contains(text, "north 150") {
					t.Fatalf("the mail holds what the agent wrote:\n%s", text)
				}
				for _, want := range []string{"DKIM-Signature:", "From: \"Postern\" <postern@agents.internal>"} {
					if !strings.Contains(text, want) {
						t.Errorf("the mail has no %q:\n%s", want, text)
					}
				}
				return true
			}
		}
		return false
	})
	if link == "" {
		t.Fatal("the mail has no link")
	}
	look := func(method string) (int, string) {
		t.Helper()
		req, err := http.NewRequest(method, link, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		if resp.Header.Get("Referrer-Policy") != "no-referrer" || resp.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s: headers %v", method, resp.Header)
		}
		return resp.StatusCode, string(b)
	}
	for range 3 { // scanners
		if status, page := look("GET"); status != 200 || !strings.Contains(page, "north 150") || !strings.Contains(page, "/console/actions/"+id) {
			t.Fatalf("look: status %d\n%s", status, page)
		}
	}
	if status, _ := look("POST"); status != http.StatusMethodNotAllowed {
		t.Errorf("POST to the link: status %d", status)
	}
	if got := state(id); got != "pending" {
		t.Fatalf("looking made it %s", got)
	}

	until(t, "the message", func() bool { return stub.find("north 150") != nil })
	m := stub.find("north 150")
	button := regexp.MustCompile(`a:[A-Z2-7]{26}:\w+:[0-9a-f]{16}`).FindString(m["reply_markup"])
	number, _ := strconv.Atoi(m["message_id"])
	press := func(n, who int64) {
		f := map[string]any{"id": who, "is_bot": false, "first_name": "x"}
		stub.add(n, map[string]any{"callback_query": map[string]any{
			"id": strconv.FormatInt(n, 10), "from": f, "chat_instance": "1", "data": button,
			"message": map[string]any{"message_id": number, "date": 1, "chat": chat},
		}})
	}
	answers := func() int {
		stub.mu.Lock()
		defer stub.mu.Unlock()
		return len(stub.answers)
	}
	press(2, 6666) // a stranger who has ann's chat and button
	until(t, "the word to a stranger", func() bool { return answers() == 1 })
	if got := state(id); got != "pending" {
		t.Fatalf("a stranger's press made it %s", got)
	}
	// The message's row is written just after the message. Repeated presses count
	// once.
	next := int64(3)
	until(t, "the effect", func() bool {
		press(next, user)
		next++
		return state(id) == "done"
	})
	until(t, "the edit", func() bool {
		stub.mu.Lock()
		defer stub.mu.Unlock()
		return len(stub.edited) > 0 && strings.Contains(stub.edited[0], "Approved by ann.")
	})
	if status, page := look("GET"); status != http.StatusGone || strings.Contains(page, "north 150") {
		t.Errorf("the link is not over: status %d\n%s", status, page)
	}
	out := s.mustCLI("audit", "list", "--object", id)
	if strings.Count(out, "action.approve") != 1 || !strings.Contains(out, "person:ann") {
		t.Errorf("the record:\n%s", out)
	}

	t.Run("linked anew in the console", func(t *testing.T) {
		account := func() string {
			resp, err := ann.Get(base + "/console/account")
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			b, _ := io.ReadAll(resp.Body)
			return string(b)
		}
		if page := account(); !strings.Contains(page, "</span> with <bdi>") || !strings.Contains(page, `id="chat-remove"`) {
			t.Errorf("the account does not say that a chat is linked:\n%s", page)
		}
		if status, _ := s.form(ann, "/console/account/telegram/unlink", nil); status != http.StatusSeeOther || strings.Contains(account(), `id="chat-remove"`) {
			t.Fatalf("end the link: status %d", status)
		}
		status, page := s.form(ann, "/console/account/telegram", nil)
		code := regexp.MustCompile(`/start ([A-Z2-7]{26})<`).FindStringSubmatch(page)
		if status != http.StatusOK || code == nil || !strings.Contains(page, `href="https://t.me/postern_stub_bot?start=`+code[1]+`"`) {
			t.Fatalf("link a chat: status %d\n%s", status, page)
		}
		stub.add(next, map[string]any{"message": map[string]any{"message_id": 2, "date": 1, "from": from, "chat": chat, "text": "/start " + code[1]}})
		until(t, "the link", func() bool { return strings.Contains(account(), `id="chat-remove"`) })
		if strings.Contains(s.log.String(), code[1]) {
			t.Error("the log holds a code")
		}
	})

	t.Run("a session that was ended", func(t *testing.T) {
		u, _ := url.Parse(base)
		old := ann.Jar.Cookies(u)
		id := propose("second")
		var a struct{ Digest string }
		if _, err := call(s.local(), "GET", "http://postern/v1/actions/"+id, "", nil, &a); err != nil {
			t.Fatal(err)
		}
		if status, _ := s.form(ann, "/console/signout", nil); status != http.StatusSeeOther {
			t.Fatalf("sign out: status %d", status)
		}
		ann.Jar.SetCookies(u, old) // the attacker has kept it
		status, _ := s.form(ann, "/console/actions/"+id+"/decision", url.Values{"decision": {"approve"}, "version": {"1"}, "digest": {a.Digest}})
		if status != http.StatusUnauthorized || state(id) != "pending" {
			t.Errorf("a replayed session: status %d, and it is %s", status, state(id))
		}
	})
	if log := s.log.String(); strings.Contains(log, stubToken) || strings.Contains(log, strings.TrimPrefix(link, base+"/look/")) || strings.Contains(log, code[1]) {
		t.Error("the log holds a token, a link or a code")
	}
}

// described returns the method and path of each operation of docs/openapi.yaml.
func described(t *testing.T) (out [][2]string) {
	t.Helper()
	b, err := os.ReadFile("../../docs/openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Paths map[string]map[string]any
	}
	if err := yaml.Unmarshal(b, &doc); err != nil {
		t.Fatal(err)
	}
	for path, methods := range doc.Paths {
		for method := range methods {
			if method != "parameters" {
				out = append(out, [2]string{strings.ToUpper(method), path})
			}
		}
	}
	return out
}

// TestNoKeyDecides: an agent with every kind of key, and a sandbox, try every route
// of every API to decide on their own action, raise their mode, turn a switch or
// become a person. Nothing changes.
func TestNoKeyDecides(t *testing.T) {
	t.Parallel()
	stub := startTelegram(t)
	s := start(t, t.TempDir(), "--telegram-token", stubToken, "--telegram-url", stub.URL)
	ann := s.person("ann")
	address, key := s.inbox("analyst")
	_, other := s.inbox("other")
	base := "http://" + s.web
	var a struct{ ID, Digest string }
	if status, err := call(client, "POST", base+"/v1/inboxes/"+address+"/messages", key, map[string]any{"to": []string{"x@elsewhere.example"}, "subject": "s", "text": "x"}, &a); err != nil || status != 202 {
		t.Fatalf("propose: %d, %v", status, err)
	}
	var grant struct{ Grant, Key, Token string }
	if status, err := call(client, "POST", base+"/v1/inboxes/"+address+"/grants", key, map[string]any{"scope": "propose", "expires_at": time.Now().Add(time.Hour)}, &grant); err != nil || status != 201 {
		t.Fatalf("grant: %d, %v", status, err)
	}
	granted := grant.Grant + grant.Key + grant.Token
	if !strings.HasPrefix(granted, "pgr_") {
		t.Fatalf("grant: %+v", grant)
	}
	var inboxes struct {
		Inboxes []struct{ ID, Address string }
	}
	if _, err := call(client, "GET", base+"/v1/inboxes", s.key, nil, &inboxes); err != nil {
		t.Fatal(err)
	}
	inbox := ""
	for _, b := range inboxes.Inboxes {
		if b.Address == address {
			inbox = b.ID
		}
	}
	bodies := []map[string]any{
		{"version": 1, "digest": a.Digest, "approve": true, "reason": "I say so"},
		{"version": 1, "state": "done", "reason": "I say so"},
		{"email_id": a.ID + ".1." + boundDigest(t, a.Digest), "action": "approve", "reason": "I say so"},
		{"mode": "autonomous", "reason": "I say so"},
		{"oversight_mode": "autonomous"},
		{"name": "me", "scopes": []string{"oversight"}},
		{"scope": "project", "reason": "I say so"},
		{"pattern": "*@elsewhere.example", "reason": "I say so"},
		{"role": "owner", "name": "me", "person": "ann", "email": "me@elsewhere.example"},
		{"actions": []map[string]any{{"id": a.ID, "version": 1, "digest": a.Digest, "approve": true}}, "decisions": []map[string]any{{"id": a.ID, "version": 1, "digest": a.Digest, "approve": true}}},
	}
	routes := described(t)
	for _, path := range []string{
		"/console/", "/console/actions/{id}", "/console/actions/{id}/decision", "/console/actions/{id}/resolution", "/console/actions/{id}/cancel", "/console/actions/{id}/comment",
		"/console/decisions", "/console/switches", "/console/policy", "/console/people", "/console/inboxes/{inbox}/mode", "/console/inboxes/{inbox}/settings", "/console/setup", "/console/account",
		"/look/" + strings.Repeat("A", 26), "/v1/switches", "/v1/policy", "/v1/people", "/v1/decisions", "/sandboxes", "/v2/sandboxes", "/templates", "/teams", "/events/webhooks", "/volumes",
		"/multimail/v1/oversight/pending", "/multimail/v1/oversight/decide", "/multimail/v1/approve/{id}", "/multimail/v1/account", "/multimail/v1/api-keys",
		"/multimail/v1/mailboxes/{inbox}", "/multimail/v1/mailboxes/{inbox}/configure", "/multimail/v1/mailboxes/{inbox}/upgrade", "/multimail/v1/mailboxes/{inbox}/emails/{id}/schedule",
	} {
		routes = append(routes, [2]string{"GET", path}, [2]string{"POST", path}, [2]string{"PUT", path}, [2]string{"PATCH", path})
	}
	// Routes that revoke the agent's own keys, or that block, are left out: the test needs the keys.
	skip := regexp.MustCompile(`^DELETE |/(rotate|recover|revoke|wait|poll|signup|delete|restore)$|/events|^GET /v1/.*(ws|socket)`)
	asked, refused := 0, 0
	for _, rt := range routes {
		method, path := rt[0], strings.NewReplacer("{inbox}", inbox, "{id}", a.ID, "{person}", "ann", "{index}", "0", "{provider}", "x", "{delivery}", "x", "{key}", "x").Replace(rt[1])
		if skip.MatchString(method + " " + rt[1]) {
			continue
		}
		for who, k := range map[string]string{"the inbox's key": key, "another inbox's key": other, "the grant": granted, "the project's key": s.key, "nobody": ""} {
			for i, in := range bodies {
				if method == "GET" && i > 0 {
					break
				}
				b, err := json.Marshal(in)
				if err != nil {
					t.Fatal(err)
				}
				req, err := http.NewRequest(method, base+path, strings.NewReader(string(b)))
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Content-Type", "application/json")
				if k != "" {
					req.Header.Set("Authorization", "Bearer "+k)
					req.Header.Set("X-Api-Key", k)
					req.Header.Set("Cookie", "postern_session="+k+"; __Host-postern_session="+k)
				}
				if strings.HasPrefix(path, "/console/") {
					v := url.Values{"decision": {"approve"}, "version": {"1"}, "digest": {a.Digest}, "reason": {"x"}, "mode": {"autonomous"}, "scope": {"project"}, "outcome": {"happened"}, "role": {"owner"}}
					req, err = http.NewRequest(method, base+path+"?"+v.Encode(), strings.NewReader(v.Encode()))
					if err != nil {
						t.Fatal(err)
					}
					req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
					req.Header.Set("Cookie", "postern_session="+k+"; __Host-postern_session="+k)
					req.Header.Set("Authorization", "Bearer "+k)
				}
				resp, err := client.Do(req)
				if err != nil {
					t.Fatalf("%s %s as %s: %v", method, path, who, err)
				}
				_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20))
				resp.Body.Close()
				asked++
				if resp.StatusCode >= 400 || resp.StatusCode == http.StatusSeeOther {
					refused++
				}
				if resp.StatusCode >= 500 && resp.StatusCode != http.StatusNotImplemented {
					t.Errorf("%s %s as %s: status %d", method, path, who, resp.StatusCode)
				}
			}
		}
	}
	if asked < 1000 || refused == asked {
		t.Errorf("%d of %d requests were refused: the keys were not good, or there were few routes", refused, asked)
	}
	t.Logf("%d requests, %d refused", asked, refused)

	t.Run("from a sandbox", func(t *testing.T) {
		b := s.sandbox(map[string]any{"metadata": map[string]string{"postern.inbox": address}})
		out := b.run(fmt.Sprintf(mcpScript, a.ID, a.Digest))
		if out.exit != 0 || !strings.Contains(out.stdout, "tools called") {
			t.Fatalf("exit %d: %s %s", out.exit, out.stdout, out.stderr)
		}
		t.Log(strings.TrimSpace(out.stdout))
	})

	record := s.mustCLI("audit", "list", "--limit", "1000")
	for line := range strings.SplitSeq(record, "\n") {
		deciding := regexp.MustCompile(`\b(action\.(approve|reject|vote|resolve|comment)|policy\.(set|change)|inbox\.(raise|mode)|switch\.(on|off)|person\.\w+|notify\.(link|code))\b`).FindString(line)
		if deciding != "" && !strings.Contains(line, "person:ann") {
			t.Errorf("on the record: %s", line)
		}
	}
	var after struct {
		State, Decider string
		Version        int64
	}
	if _, err := call(s.local(), "GET", "http://postern/v1/actions/"+a.ID, "", nil, &after); err != nil || after.State != "pending" && after.State != "cancelled" || strings.Contains(after.Decider, "agent") {
		t.Errorf("the action is %+v, %v", after, err)
	}
	// The same form, sent by a person, decides: the attempts above were well-formed.
	if after.State == "pending" {
		status, _ := s.form(ann, "/console/actions/"+a.ID+"/decision", url.Values{"decision": {"reject"}, "version": {strconv.FormatInt(after.Version, 10)}, "digest": {a.Digest}, "reason": {"no"}})
		if status != http.StatusSeeOther {
			t.Errorf("a person's rejection: status %d", status)
		}
	}
}

// mcpScript calls every tool of a sandbox with arguments that could decide.
const mcpScript = `cat > /tmp/walk.py <<'END'
import json, urllib.request
session = None
def rpc(method, params, notify=False):
    global session
    body = {"jsonrpc": "2.0", "method": method, "params": params}
    if not notify: body["id"] = 1
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    if session: headers["Mcp-Session-Id"] = session
    r = urllib.request.urlopen(urllib.request.Request("http://postern.internal/mcp", json.dumps(body).encode(), headers), timeout=120)
    session = r.headers.get("Mcp-Session-Id") or session
    text = r.read().decode()
    for line in text.split("\n"):
        if line.startswith("data:"): text = line[5:]
    return json.loads(text) if text.strip() else None
rpc("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "walk", "version": "1"}})
rpc("notifications/initialized", {}, True)
tools = rpc("tools/list", {})["result"]["tools"]
values = {"id": "%[1]s", "action": "%[1]s", "action_id": "%[1]s", "approve": True, "decision": "approve", "version": 1, "digest": "%[2]s", "reason": "I say so", "mode": "autonomous", "state": "approved", "code": "AAAA-AAAA", "pattern": "*@elsewhere.example"}
names = []
for t in tools:
    names.append(t["name"])
    if any(w in t["name"] for w in ("approve", "decide", "reject", "wait", "cancel")) and "wait" not in t["name"] and "cancel" not in t["name"]:
        raise SystemExit("a tool to decide: " + t["name"])
    if "wait" in t["name"] or "cancel" in t["name"]: continue
    properties = t["inputSchema"].get("properties", {})
    arguments = {k: v for k, v in values.items() if k in properties}
    for extra in ({}, {"approve": True, "state": "approved", "mode": "autonomous"}):
        try: rpc("tools/call", {"name": t["name"], "arguments": {**arguments, **extra}})
        except urllib.error.HTTPError as e: print(t["name"], e.code)
for name in ("approve", "decide", "reject", "approve_email", "resolve", "set_mode", "switch_off"):
    try: r = rpc("tools/call", {"name": name, "arguments": values})
    except urllib.error.HTTPError: continue
    if "result" in r and not r["result"].get("isError"): raise SystemExit(name + " is there: " + json.dumps(r))
print(len(names), "tools called:", " ".join(names))
END
python3 /tmp/walk.py`

// boundDigest returns a digest as MultiMail's API has it in the id of a decision.
func boundDigest(t *testing.T, digest string) string {
	t.Helper()
	sum, err := hex.DecodeString(digest)
	if err != nil {
		t.Fatal(err)
	}
	return base64.RawURLEncoding.EncodeToString(sum)
}
