package console_test

import (
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// TestSwitches: a person stops an inbox, sees it stopped, and an owner lets it
// go on; what cannot be taken changes nothing.
func TestSwitches(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "empty page", f.get("/console/switches").body, "Nothing is stopped", f.inbox.Address)
	for name, form := range map[string]url.Values{
		"no scope":            {"reason": {"x"}},
		"everything":          {"scope": {"everything"}, "reason": {"x"}},
		"no inbox":            {"scope": {"inbox"}, "reason": {"x"}},
		"an inbox not theirs": {"scope": {"inbox"}, "inbox": {"ibx_" + strings.Repeat("A", 26)}, "reason": {"x"}},
		"no domain":           {"scope": {"domain"}, "domain": {"a@b"}, "reason": {"x"}},
		"no reason":           {"scope": {"project"}},
		"a bad time":          {"scope": {"project"}, "reason": {"x"}, "hours": {"-1"}},
	} {
		want := http.StatusBadRequest
		if name == "everything" {
			want = http.StatusForbidden
		}
		if got := f.submit("/console/switches", form); got.status != want {
			t.Errorf("%s: %d, want %d", name, got.status, want)
		}
	}
	a := f.propose(draft())
	if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true}); err != nil {
		t.Fatal(err)
	}
	form := url.Values{"scope": {"inbox"}, "inbox": {f.inbox.ID}, "reason": {"it <b>spams</b>"}, "hours": {"2"}}
	if got := f.submit("/console/switches", form); got.status != http.StatusSeeOther {
		t.Fatalf("stop: %d\n%s", got.status, got.body)
	}
	page := f.get("/console/switches")
	contains(t, "page", page.body, "Stopped: one inbox", "it &lt;b&gt;spams&lt;/b&gt;", "1 approved action was denied", "in 119 min", f.inbox.Address)
	id := regexp.MustCompile(`swi_[A-Z2-7]{26}`).FindString(page.body)
	if got := f.state(a.ID).State; got != oversight.Denied {
		t.Errorf("what was approved is %s", got)
	}
	if got := f.submit("/console/switches/swi_"+strings.Repeat("A", 26)+"/off", press()); got.status != http.StatusConflict {
		t.Errorf("turning off what is not there: %d", got.status)
	}
	if got := f.submit("/console/switches/"+id+"/off", press()); got.status != http.StatusSeeOther {
		t.Errorf("turn off: %d", got.status)
	}
	contains(t, "page after", f.get("/console/switches").body, "Nothing is stopped")
}

// press is the form of a button without fields.
func press() url.Values { return url.Values{"x": {""}} }

// TestPolicyPages: a person writes another policy, tries it, proposes it, and it
// holds once an owner has approved what the page showed.
func TestPolicyPages(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "page", f.get("/console/policy").body, "The built-in policy is active", "built in", "Propose a change")
	page := f.get("/console/policy/draft")
	form := f.form(page.body, "draft-form")
	text := policy.Default().Text()
	tests := "tests:\n  - name: <script>1</script>\n    request: {kind: email.send, mode: gated_send, to: [a@b.example]}\n    want: ask\n  - name: wrong\n    request: {kind: email.send, mode: gated_send, to: [a@b.example]}\n    want: allow\n"
	send := func(do, text, tests string) answer {
		return f.submit("/console/policy", url.Values{"do": {do}, "replaces": form["replaces"], "text": {text}, "tests": {tests}, "reason": {"tidy"}})
	}
	contains(t, "tried", send("try", text, tests).body, "1 of 2 tests pass", "&lt;script&gt;1&lt;/script&gt;", "fails", "want allow")
	if got := send("try", "rules: {", tests); got.status != http.StatusBadRequest || !strings.Contains(got.body, "is invalid") || !strings.Contains(got.body, "rules: {") {
		t.Errorf("a document that is none: %d", got.status)
	}
	if got := send("propose", text, tests); got.status != http.StatusBadRequest || !strings.Contains(got.body, "Nothing was proposed") {
		t.Errorf("proposing with a test that fails: %d", got.status)
	}
	good := strings.SplitAfter(tests, "want: ask\n")[0]
	got := send("propose", "# tidy\n"+text, good)
	if got.status != http.StatusSeeOther || !strings.HasPrefix(got.location, "/console/actions/act_") {
		t.Fatalf("propose: %d to %q\n%s", got.status, got.location, got.body)
	}
	contains(t, "policy page", f.get("/console/policy").body, "1 change is waiting", got.location)
	action := f.get(got.location)
	contains(t, "action", action.body, "Change of policy", "approve-form")
	if got := f.submit(got.location+"/decision", f.form(action.body, "approve-form")); got.status != http.StatusSeeOther {
		t.Fatalf("approve: %d\n%s", got.status, got.body)
	}
	f.drain()
	contains(t, "policy page", f.get("/console/policy").body, "Version 1 is active", "# tidy", "tidy")
	contains(t, "version", f.get("/console/policy/versions/1").body, "# tidy", ">Tests</h2>")
	contains(t, "own version", f.get("/console/policy/versions/0").body, "Built-in policy")
	for path, want := range map[string]int{"/console/policy/versions/7": http.StatusNotFound, "/console/policy/versions/x": http.StatusBadRequest} {
		if got := f.get(path); got.status != want {
			t.Errorf("%s: %d, want %d", path, got.status, want)
		}
	}
	// Made from a version that holds no more.
	if got := send("propose", "# again\n"+text, good); got.status != http.StatusConflict || !strings.Contains(got.body, "active policy has changed") || !strings.Contains(got.body, "# again") {
		t.Errorf("from an old version: %d", got.status)
	}
}

// TestWebhookPages: a webhook is made, its secret is shown once, and its log has
// what was sent.
func TestWebhookPages(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "empty page", f.get("/console/webhooks").body, "No webhooks yet", "message.received")
	if got := f.submit("/console/webhooks", url.Values{"name": {"x"}, "url": {"ftp://x"}, "event": {"message.received"}}); got.status != http.StatusBadRequest || !strings.Contains(got.body, "Nothing was created") {
		t.Errorf("a bad address: %d", got.status)
	}
	made := f.submit("/console/webhooks", url.Values{"name": {"<i>ours</i>"}, "url": {"http://127.0.0.1:9999/hook"}, "event": {"message.received"}})
	if made.status != http.StatusCreated {
		t.Fatalf("make: %d\n%s", made.status, made.body)
	}
	contains(t, "secret", made.body, "&lt;i&gt;ours&lt;/i&gt;", "shown only once")
	list := f.get("/console/webhooks")
	path := regexp.MustCompile(`/console/webhooks/[\w-]+`).FindString(strings.Split(list.body, "<tbody>")[1])
	contains(t, "page", f.get(path).body, "No deliveries yet", "http://127.0.0.1:9999/hook", ">Disable<")
	for _, do := range []string{"disable", "enable"} {
		if got := f.submit(path, url.Values{"do": {do}}); got.status != http.StatusSeeOther {
			t.Errorf("%s: %d", do, got.status)
		}
	}
	for form, want := range map[string]int{"do=x": http.StatusBadRequest, "do=redeliver&delivery=x": http.StatusNotFound} {
		v, _ := url.ParseQuery(form)
		if got := f.submit(path, v); got.status != want {
			t.Errorf("%s: %d, want %d", form, got.status, want)
		}
	}
	if got := f.submit(path, url.Values{"do": {"delete"}}); got.status != http.StatusSeeOther || f.get(path).status != http.StatusNotFound {
		t.Errorf("delete: %d", got.status)
	}
}

// TestSecretPages: an owner creates, replaces and deletes a secret, and no page has its
// value.
func TestSecretPages(t *testing.T) {
	f := setup(t)
	f.enter()
	const value = "canary-of-the-console-1"
	contains(t, "empty page", f.get("/console/secrets").body, "No secrets yet")
	bad := f.submit("/console/secrets", url.Values{"name": {"x <b>"}, "value": {value}, "hosts": {"a.example.com"}})
	if bad.status != http.StatusBadRequest || !strings.Contains(bad.body, "Nothing was created: name") || strings.Contains(bad.body, value) {
		t.Errorf("a bad name: %d", bad.status)
	}
	if got := f.submit("/console/secrets", url.Values{"name": {"github"}, "value": {value + "\r\n"}, "hosts": {"api.github.com, *.example.com"}, "approval": {"first"}}); got.status != http.StatusSeeOther {
		t.Fatalf("create: %d\n%s", got.status, got.body)
	}
	list := f.get("/console/secrets").body
	contains(t, "list", list, "github", "api.github.com", "first use", "never")
	path := regexp.MustCompile(`/console/secrets/sec_\w+`).FindString(list)
	if got := f.submit(path, url.Values{"do": {"rotate"}, "value": {value + "2"}}); got.status != http.StatusSeeOther {
		t.Errorf("rotate: %d", got.status)
	}
	if got := f.submit(path, url.Values{"do": {"rotate"}, "value": {value + "\n2"}}); got.status != http.StatusBadRequest || strings.Contains(got.body, value) {
		t.Errorf("rotate to two lines: %d", got.status)
	}
	if got := f.submit(path, url.Values{"do": {"settings"}, "hosts": {"api.github.com"}, "approval": {"always"}, "env": {"TOKEN"}}); got.status != http.StatusSeeOther {
		t.Errorf("settings: %d", got.status)
	}
	if got := f.submit(path, url.Values{"do": {"settings"}, "hosts": {"api.github.com"}, "approval": {"always"}, "headers": {"x-key"}, "places": {"form:client_secret POST evil.example/token"}}); got.status != http.StatusBadRequest || !strings.Contains(got.body, "evil.example is not a host of the secret") {
		t.Errorf("a place at another host: %d", got.status)
	}
	if got := f.submit(path, url.Values{"do": {"settings"}, "hosts": {"api.github.com"}, "approval": {"always"}, "env": {"TOKEN"}, "headers": {"x-key, Authorization"}, "places": {"form:client_secret POST api.github.com/token\r\n\r\n"}}); got.status != http.StatusSeeOther {
		t.Errorf("a place: %d", got.status)
	}
	page := f.get(path).body
	contains(t, "page", page, "version 2", "<code>X-Key</code>", "POST api.github.com/token", "<code>form:client_secret</code>", "each request", "TOKEN", ">Delete secret<")
	if strings.Contains(page+list, value) {
		t.Error("a page has the value")
	}
	if got := f.submit(path, url.Values{"do": {"x"}}); got.status != http.StatusBadRequest {
		t.Errorf("another button: %d", got.status)
	}
	if got := f.submit(path, url.Values{"do": {"delete"}}); got.status != http.StatusSeeOther || f.get(path).status != http.StatusNotFound {
		t.Errorf("delete: %d", got.status)
	}
	if got, _ := f.verbs("secret."); strings.Join(got, " ") != "secret.create secret.rotate secret.update secret.open secret.update secret.delete" {
		t.Errorf("record: %v", got)
	}
}

// TestKeyPages: an owner makes a key, which is shown once and works, and ends it.
func TestKeyPages(t *testing.T) {
	f := setup(t)
	f.enter()
	if got := f.submit("/console/keys", url.Values{"name": {" "}}); got.status != http.StatusBadRequest {
		t.Errorf("no name: %d", got.status)
	}
	made := f.submit("/console/keys", url.Values{"name": {"CI <b>"}})
	key := auth.Secret(regexp.MustCompile(`e2b_[0-9a-f]{40}`).FindString(made.body))
	who, err := auth.CheckKey(t.Context(), f.db, key)
	if made.status != http.StatusCreated || err != nil || who.Kind != auth.Project || who.Project != f.project.Project {
		t.Fatalf("make: %d, %v, %v", made.status, who, err)
	}
	page := f.get("/console/keys")
	contains(t, "page", page.body, "CI &lt;b&gt;", who.ID, ">ann<")
	if strings.Contains(page.body, key.Reveal()) {
		t.Error("the key is shown again")
	}
	if got := f.submit("/console/keys/"+who.ID+"/end", press()); got.status != http.StatusSeeOther {
		t.Errorf("end: %d", got.status)
	}
	if _, err := auth.CheckKey(t.Context(), f.db, key); err == nil {
		t.Error("the key that was ended works")
	}
	if got := f.submit("/console/keys/"+who.ID+"/end", press()); got.status != http.StatusConflict {
		t.Errorf("end again: %d", got.status)
	}
	// An inbox's key is not ended here.
	if got := f.submit("/console/keys/"+f.agent.ID+"/end", press()); got.status != http.StatusConflict {
		t.Errorf("end an inbox's key: %d", got.status)
	}
	if got, _ := f.verbs("key."); strings.Join(got, " ") != "key.create key.revoke" {
		t.Errorf("record: %v", got)
	}
}

// TestModePages: who reviews watches an inbox more closely, an owner less; a code
// is shown once, and an allow list has what an owner put on it.
func TestModePages(t *testing.T) {
	f := setup(t)
	f.enter()
	path := "/console/inboxes/" + f.inbox.ID
	contains(t, "page", f.get(path).body, "gated_send", `id="m-autonomous"`, "The allow list is empty")
	if got := f.submit(path+"/mode", url.Values{"mode": {"autonomous"}, "reason": {"<b>trusted</b>"}}); got.status != http.StatusSeeOther {
		t.Fatalf("raise by an owner: %d\n%s", got.status, got.body)
	}
	contains(t, "page", f.get(path).body, "leaves at once, and nobody gets a copy", "&lt;b&gt;trusted&lt;/b&gt;")
	for _, form := range []url.Values{{"mode": {"root"}}, {}} {
		if got := f.submit(path+"/mode", form); got.status != http.StatusBadRequest {
			t.Errorf("mode %v: %d", form, got.status)
		}
	}
	f.exec(`update person set role = $1`, auth.Reviewer)
	if got := f.submit(path+"/mode", url.Values{"mode": {"read_only"}}); got.status != http.StatusSeeOther {
		t.Errorf("lower by a reviewer: %d", got.status)
	}
	if strings.Contains(f.get(path).body, `id="m-autonomous"`) {
		t.Error("a reviewer is offered to raise it")
	}
	if got := f.submit(path+"/mode", url.Values{"mode": {"gated_send"}}); got.status != http.StatusForbidden || !strings.Contains(got.body, "only an owner") {
		t.Errorf("raise by a reviewer: %d", got.status)
	}
	for _, form := range []string{"/code", "/allow"} {
		if got := f.submit(path+form, url.Values{"mode": {"autonomous"}, "pattern": {"*@shop.example"}}); got.status != http.StatusForbidden {
			t.Errorf("%s by a reviewer: %d", form, got.status)
		}
	}
	f.exec(`update person set role = $1`, auth.Owner)
	made := f.submit(path+"/code", url.Values{"mode": {"gated_send"}, "reason": {"it is over"}})
	code := regexp.MustCompile(`[A-Z2-7]{4}(-[A-Z2-7]{4}){3}`).FindString(made.body)
	if made.status != http.StatusCreated || code == "" {
		t.Fatalf("code: %d\n%s", made.status, made.body)
	}
	if b, err := f.post.RaiseMode(t.Context(), f.agent, f.inbox.ID, auth.Secret(code)); err != nil || b.Mode != policy.GatedSend {
		t.Errorf("raise by the code: %v, %v", b.Mode, err)
	}
	for pattern, want := range map[string]int{"*@shop.example": http.StatusSeeOther, "bob@shop.example": http.StatusSeeOther, "*": http.StatusBadRequest, "<b>": http.StatusBadRequest} {
		if got := f.submit(path+"/allow", url.Values{"pattern": {pattern}, "until": {""}}); got.status != want {
			t.Errorf("allow %q: %d, want %d", pattern, got.status, want)
		}
	}
	contains(t, "page", f.get(path).body, "*@shop.example", "bob@shop.example")
	es, err := f.post.AllowList.Entries(t.Context(), f.person, f.inbox.ID)
	if err != nil || len(es) != 2 {
		t.Fatalf("allow list: %v, %v", es, err)
	}
	for _, want := range []int{http.StatusSeeOther, http.StatusConflict} {
		if got := f.submit(path+"/disallow", url.Values{"entry": {es[0].ID}}); got.status != want {
			t.Errorf("remove: %d, want %d", got.status, want)
		}
	}
}
