package mailapi

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/storetest"
)

func TestCodeInASandboxProposesAndWaits(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.person.Project, Template: "base"}
	f.srv.conf.Denials = func(id string) []api.Denial {
		return []api.Denial{{Time: time.Now(), Kind: "request", Host: "a.example.com", Reason: "of " + id}, {Time: time.Now().Add(-time.Hour), Kind: "dns", Host: "b.example.com"}}
	}
	other := box
	other.ID = "i2"
	// These routes are inside sandboxes; docs/openapi.yaml does not describe them.
	do := func(who, method, path, body string) answered {
		t.Helper()
		if who == "person" {
			return f.do(t, who, method, path, body)
		}
		h := f.srv.Inner(map[string]auth.Principal{"box": box, "other box": other}[who])
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, "http://postern.internal"+path, strings.NewReader(body)))
		return answered{w.Code, w.Header(), w.Body.String()}
	}

	a := do("box", "POST", "/proposals", `{"hosts":["api.example.com","b.example.com"],"why":"to look up orders","for":"2h"}`)
	id := a.field(t, "id")
	if a.code != http.StatusAccepted || a.header.Get("Location") != "/proposals/"+id || a.field(t, "state") != "pending" || !strings.Contains(a.field(t, "next"), "?wait=60") {
		t.Fatalf("got %d %v: %s", a.code, a.header, a.body)
	}
	for _, tt := range []struct {
		who, method, path, body string
		want                    int
	}{
		{"other box", "GET", "/proposals/" + id, "", 404},
		{"box", "GET", "/proposals/act_none", "", 404},
		{"box", "GET", "/proposals/" + id + "?wait=301", "", 400},
		{"box", "GET", "/proposals/" + id + "?wait=0", "", 400},
		{"box", "GET", "/proposals/" + id + "?wait=1", "", 200},
		{"box", "GET", "/proposals/" + id + "?waits=1", "", 400},
		{"box", "DELETE", "/proposals/" + id, "", 405},
		{"box", "POST", "/proposals", `{"hosts":["localhost"]}`, 400},
		{"box", "POST", "/proposals", `{"hosts":["a.example.com"],"for":"9w"}`, 400},
		{"box", "POST", "/proposals", `{"hosts":["a.example.com"],"sandbox":"i2"}`, 400},
		{"box", "POST", "/proposals", `{"hosts":["` + strings.Repeat("a", 20<<10) + `"]}`, 413},
		{"box", "GET", "/denials?since=yesterday", "", 400},
		{"box", "GET", "/denials", "", 200},
	} {
		if got := do(tt.who, tt.method, tt.path, tt.body); got.code != tt.want {
			t.Errorf("%s %s %s %.60s: got %d: %s", tt.who, tt.method, tt.path, tt.body, got.code, got.body)
		}
	}
	if got := do("box", "GET", "/denials?since="+time.Now().Add(-time.Minute).UTC().Format(time.RFC3339), ""); strings.Contains(got.body, "b.example.com") || !strings.Contains(got.body, "of i1") || !strings.Contains(got.body, askAt) {
		t.Errorf("got %s", got.body)
	}
	if got := do("other box", "GET", "/proposals", ""); strings.Contains(got.body, id) {
		t.Errorf("another sandbox reads %s", got.body)
	}
	// A page in a browser inside is not the agent.
	r := httptest.NewRequestWithContext(t.Context(), "POST", "http://postern.internal/proposals", strings.NewReader(`{"hosts":["a.example.com"]}`))
	r.Header.Set("Origin", "https://evil.example")
	w := httptest.NewRecorder()
	f.srv.Inner(box).ServeHTTP(w, r)
	if w.Code != http.StatusForbidden {
		t.Errorf("a web page proposed: %d", w.Code)
	}

	// A person narrows it and approves while the program waits.
	done := make(chan answered, 1)
	go func() { done <- do("box", "GET", "/proposals/"+id+"?wait=60", "") }()
	n := f.do(t, "person", "POST", "/v1/actions/"+id+"/narrowing", `{"version":1,"hosts":["api.example.com"],"methods":["GET"],"paths":["/v1/*"],"for":"1h"}`)
	if n.code != http.StatusOK {
		t.Fatalf("got %d: %s", n.code, n.body)
	}
	if wide := f.do(t, "person", "POST", "/v1/actions/"+id+"/narrowing", `{"version":2,"hosts":["api.example.com","c.example.com"]}`); wide.code != http.StatusBadRequest {
		t.Errorf("it was widened: %d: %s", wide.code, wide.body)
	}
	act, err := f.gate.Action(t.Context(), f.person, id)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: id, Version: act.Version, Digest: act.Hex(), Approve: true, Reason: "for today"}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.gate.RunOne(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := <-done
	for _, want := range []string{`"state":"done"`, `"narrowed":true`, `"hosts":["api.example.com"]`, `"methods":["GET"]`, `"reason":"for today"`, `"permit":{"id":"prm_`, `"decider":""`} {
		if !strings.Contains(got.body, want) {
			t.Errorf("got %s without %s", got.body, want)
		}
	}
	if strings.Contains(got.body, "ann") {
		t.Errorf("code reads who decided: %s", got.body)
	}
	if got := do("box", "GET", "/permits", ""); !strings.Contains(got.body, `"prm_`) || strings.Contains(got.body, "ann") {
		t.Errorf("got %s", got.body)
	}
	if got := do("other box", "GET", "/permits", ""); strings.Contains(got.body, `"prm_`) {
		t.Errorf("another sandbox reads %s", got.body)
	}
}

// TestBoundSandboxesAreRefusedWhatTheirContractLacks: the answer is 403 with the contract's
// name, and nobody is asked.
func TestBoundSandboxesAreRefusedWhatTheirContractLacks(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	c, err := contract.Parse([]byte("version: 1\nname: closed\ncommands: {allow: [{run: ls}]}\n"))
	if err != nil {
		t.Fatal(err)
	}
	bounds := contract.NewBounds(f.srv.log, func(context.Context, string, string) (*contract.Contract, error) { return c, nil })
	f.srv.conf.Permits = permit.New(f.srv.log, f.db, f.gate, permit.Config{Bounds: bounds})
	box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.person.Project, Contract: "closed@" + c.Digest()}
	for _, body := range []string{`{"hosts":["api.example.com"]}`, `{"hosts":["api.example.com"],"scope":"project"}`} {
		w := httptest.NewRecorder()
		f.srv.Inner(box).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "POST", "http://postern.internal/proposals", strings.NewReader(body)))
		if w.Code != http.StatusForbidden || !strings.Contains(w.Body.String(), "the contract closed, which binds this sandbox, does not have") {
			t.Errorf("%s: got %d: %s", body, w.Code, w.Body)
		}
	}
	if list, err := f.gate.Actions(t.Context(), f.person, oversight.Query{}); err != nil || len(list) != 0 {
		t.Errorf("a person is asked about %+v, %v", list, err)
	}
}
