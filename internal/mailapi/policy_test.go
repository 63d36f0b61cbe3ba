package mailapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/store"
	"postern/internal/storetest"
)

func inJSON(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

func TestPolicy(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		own := f.do(t, "person", "GET", "/v1/policy", "")
		if own.code != 200 || own.field(t, "version") != "0" || !strings.Contains(own.body, "hidden_text") {
			t.Fatalf("got %d %s, want the program's own", own.code, own.body)
		}
		const text = "rules:\n  - id: bob\n    kind: email.send\n    when: \"'bob@example.com' in to\"\n    then: allow\n"
		const tests = "tests:\n  - name: bob\n    request: {kind: email.send, to: [bob@example.com]}\n    want: allow\n"
		made := f.do(t, "person", "POST", "/v1/policy", fmt.Sprintf(`{"text":%s,"tests":%s,"reason":"bob is one of us","replaces":%q}`, inJSON(text), inJSON(tests), own.field(t, "digest")))
		if made.code != 202 || made.field(t, "kind") != "policy.change" || made.field(t, "state") != "pending" || !strings.Contains(made.body, "+  - id: bob") {
			t.Fatalf("got %d %s, want a pending action with the difference", made.code, made.body)
		}
		id := made.field(t, "id")
		decision := fmt.Sprintf(`{"version":%s,"digest":%q,"approve":true}`, made.field(t, "version"), made.field(t, "digest"))
		if got := f.do(t, "person", "POST", "/v1/actions/"+id+"/decision", decision); got.code != 200 {
			t.Fatalf("got %d %s", got.code, got.body)
		}
		if _, err := f.gate.RunOne(t.Context()); err != nil {
			t.Fatal(err)
		}
		now := f.do(t, "person", "GET", "/v1/policy", "")
		if now.field(t, "version") != "1" || now.field(t, "text") != text || now.field(t, "tests") != tests || now.field(t, "action") != id || now.field(t, "author") != "person:ann" {
			t.Errorf("got %s, want the new one", now.body)
		}
		if got := f.do(t, "person", "GET", "/v1/policy/versions/1", ""); got.field(t, "text") != text {
			t.Errorf("got %s", got.body)
		}
		if got := f.do(t, "person", "GET", "/v1/policy/versions", ""); strings.Count(got.body, `"digest"`) != 2 || strings.Contains(got.body, "rules") {
			t.Errorf("got %s, want two without texts", got.body)
		}
		for _, path := range []string{"2", "-1", "x", "99999999999999999999"} {
			if got := f.do(t, "person", "GET", "/v1/policy/versions/"+path, ""); got.code != 404 {
				t.Errorf("version %s: got %d %s, want 404", path, got.code, got.body)
			}
		}
		if got := f.do(t, "foreign person", "GET", "/v1/policy/versions/1", ""); got.code != 404 {
			t.Errorf("got %d %s for another project's, want 404", got.code, got.body)
		}
		if got := f.do(t, "person", "POST", "/v1/policy", fmt.Sprintf(`{"text":"rules: []","replaces":%q}`, own.field(t, "digest"))); got.code != 409 {
			t.Errorf("got %d %s for a change of what held before, want 409", got.code, got.body)
		}
		try := f.do(t, "person", "POST", "/v1/policy/evaluation", `{"request":{"kind":"email.send","to":["bob@example.com"]},"tests":`+inJSON(tests+"  - name: eve\n    request: {kind: email.send, to: [eve@example.com]}\n    want: deny\n")+`}`)
		for _, want := range []string{`"effect":"allow"`, `"rule":"bob"`, `"outcome":"matched"`, `"name":"bob","line":2,"passed":true`, `"name":"eve","line":5,"passed":false`, "the verdict is ask, want deny"} {
			if try.code != 200 || !strings.Contains(try.body, want) {
				t.Errorf("got %d %s, want %s in it", try.code, try.body, want)
			}
		}
		other := f.do(t, "person", "POST", "/v1/policy/evaluation", `{"text":"rules: []","request":{"kind":"email.send","to":["bob@example.com"]}}`)
		if !strings.Contains(other.body, `"rule":"gated_send"`) || !strings.Contains(other.body, `"effect":"ask"`) {
			t.Errorf("got %s, want that the mode asks", other.body)
		}
	})
}

func TestPolicyRefuses(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	for _, tt := range []struct{ path, body, want string }{
		{"", `{}`, "text: invalid policy: line 1: is empty"},
		{"", `{"text":"rules:\n  - id: a\n    then: maybe\n"}`, "text: invalid policy: line 3: rules[0].then"},
		{"", `{"text":"rules: []","tests":"tests: []"}`, "tests: invalid policy: line 1"},
		{"", `{"text":"rules: []","why":"x"}`, "why"},
		{"/evaluation", `{"text":"rules:"}`, "text: invalid policy: line 1: rules: must be a list"},
		{"/evaluation", `{"request":{}}`, "request.kind"},
		{"/evaluation", `{"request":{"kind":"email.send","subject":"x"}}`, "subject"},
		{"/evaluation", `{"request":{"kind":"email.send","size":"x"}}`, "size"},
	} {
		got := f.do(t, "person", "POST", "/v1/policy"+tt.path, tt.body)
		if got.code != 400 || !strings.Contains(got.field(t, "detail"), tt.want) {
			t.Errorf("%s %s: got %d %s, want 400 with %q", tt.path, tt.body, got.code, got.body, tt.want)
		}
	}
}

// TestPolicyViewer is the attacker's: who only looks proposes nothing.
func TestPolicyViewer(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	who := f.person
	who.Role = auth.Viewer
	f.clients["viewer"] = client{f.srv.HandlerFor(func(*http.Request) (auth.Principal, error) { return who, nil }), nil}
	if got := f.do(t, "viewer", "GET", "/v1/policy", ""); got.code != 200 {
		t.Errorf("got %d %s, want that who looks may look", got.code, got.body)
	}
	if got := f.do(t, "viewer", "POST", "/v1/policy", `{"text":"rules: []"}`); got.code != 403 {
		t.Errorf("got %d %s, want 403", got.code, got.body)
	}
	list, err := f.gate.Actions(t.Context(), f.person, oversight.Query{})
	if err != nil || len(list) != 0 {
		t.Errorf("got %d actions, %v", len(list), err)
	}
}
