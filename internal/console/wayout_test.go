package console_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/lookalike"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/store"
)

// asks proposes the request of order, or a connection, as a rule asks about it.
func (f *fixture) asks(kind policy.Kind, host string) (a oversight.Action) {
	f.t.Helper()
	who := auth.Principal{Kind: auth.Sandbox, ID: "i" + strings.Repeat("a", 20), Project: f.project.Project, Template: "base"}
	q := policy.Request{Kind: kind, Via: "link", To: []string{host}, Sandbox: who.ID, Template: who.Template}
	payload := []byte(`{"sandbox":"` + who.ID + `","template":"base","hosts":["` + host + `"],"port":443}`)
	if kind == policy.KindRequest {
		r := order()
		r.Host = host
		q.HTTP = &policy.HTTP{Host: host, Method: r.Method, Path: r.Path}
		var err error
		if payload, err = r.Encode(); err != nil {
			f.t.Fatal(err)
		}
	} else {
		q.Detail = map[string]string{"host": host, "port": "443"}
	}
	f.update(func(tx *store.Tx) (err error) {
		a, err = f.gate.Propose(f.t.Context(), tx, who, oversight.Proposal{Request: q, Via: "link", Payload: payload, Ask: true})
		return err
	})
	return a
}

// TestApproveAndAllowFromThePage: beside an approval of a request or a connection an owner
// makes a permit, which the page of permits has and ends. A reviewer, a second person, a
// second factor and a grave finding get no such form.
func TestApproveAndAllowFromThePage(t *testing.T) {
	f := setup(t)
	f.enter()
	f.all()
	f.judge.verdict.Rule = "careful"
	for _, tt := range []struct {
		kind  policy.Kind
		scope string
		wants []string
	}{
		{policy.KindRequest, "host:api.registry-data.example /v2/companies/search", []string{"to exactly this path, /v2/companies/search", "to every path below /v2/companies/", "to every path of this host", "the rule careful"}},
		{policy.KindConnect, "host:api.registry-data.example", []string{"connections of this sandbox to api.registry-data.example, port 443"}},
	} {
		a := f.asks(tt.kind, "api.registry-data.example")
		path := "/console/actions/" + a.ID
		page := f.get(path).body
		contains(t, string(tt.kind), page, `id="allow-sheet"`, `value="`+tt.scope+`"`, "You also make a permit")
		contains(t, string(tt.kind), page, tt.wants...)
		if strings.Contains(page, "also with files") {
			t.Error("it offers files")
		}
		form := f.form(page, "approve-form")
		form.Set("also", "allow")
		form.Set("ends", "week")
		form.Set("scope", "host:evil.example /*")
		if got := f.submit(path+"/decision", form); got.status != http.StatusUnprocessableEntity || f.state(a.ID).State != oversight.Pending {
			t.Errorf("%s: a host that was not shown: %d", tt.kind, got.status)
		}
		form.Set("scope", tt.scope)
		if got := f.submit(path+"/decision", form); got.status != http.StatusSeeOther {
			t.Fatalf("%s: %d\n%s", tt.kind, got.status, got.body)
		}
		f.drain()
		list, err := f.permits.List(t.Context(), f.person, permit.Query{})
		if err != nil || len(list) != 1 || list[0].Action != a.ID || time.Until(list[0].Until) > 8*24*time.Hour {
			t.Fatalf("permits %+v, %v", list, err)
		}
		contains(t, "permits", f.get("/console/permits").body, "api.registry-data.example", string(list[0].Kind)+"s that rule careful asks about", "/console/permits/"+list[0].ID+"/end")
		contains(t, "record", f.get("/console/audit?view=sentences").body, "api.registry-data.example")
		if got := f.submit("/console/permits/"+list[0].ID+"/end", f.form(f.get("/console/permits").body, "main")); got.status != http.StatusSeeOther {
			t.Errorf("end: %d", got.status)
		}
	}
	ask := f.judge.verdict
	for name, change := range map[string]func(v *policy.Verdict){
		"two people":      func(v *policy.Verdict) { v.Approvers = 2 },
		"a second factor": func(v *policy.Verdict) { v.StepUp = true },
		"a named person":  func(v *policy.Verdict) { v.Who = []string{"ann"} },
		"no rule":         func(v *policy.Verdict) { v.Rule = "" },
	} {
		f.judge.verdict = ask
		change(&f.judge.verdict)
		if page := f.get("/console/actions/" + f.asks(policy.KindRequest, "api.registry-data.example").ID).body; strings.Contains(page, "allow-sheet") {
			t.Errorf("%s: an open door is offered", name)
		}
	}
	f.judge.verdict = ask
	for _, host := range []string{"203.0.113.7", "db.internal"} {
		if page := f.get("/console/actions/" + f.asks(policy.KindConnect, host).ID).body; strings.Contains(page, "allow-sheet") {
			t.Errorf("%s: an open door is offered", host)
		}
	}
}

// TestLookalikeHostIsMarked: a host that looks like a known one is marked where it stands,
// beside its form for DNS, and needs its tick.
func TestLookalikeHostIsMarked(t *testing.T) {
	f := setup(t)
	f.enter()
	f.all()
	known := lookalike.New("agents.test")
	f.gate.Names(known.Examine, known.Learn)
	f.judge.verdict.Rule, f.judge.verdict.Grave = "careful", []string{policy.FindLookalike}
	good := f.asks(policy.KindConnect, "api.globex.example")
	if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: good.ID, Version: good.Version, Digest: good.Hex(), Approve: true}); err != nil {
		t.Fatal(err)
	}
	f.drain()
	for _, kind := range []policy.Kind{policy.KindConnect, policy.KindRequest} {
		page := f.get("/console/actions/" + f.asks(kind, "xn--glbex-kye.example").ID).body
		contains(t, string(kind), page, "gl<mark>", "really <code>xn--glbex-kye.example</code>", "xn--glbex-kye.example is not globex.example: its letters look the same", `class="check tick"`)
		if strings.Contains(page, "allow-sheet") || strings.Contains(page, "internationalized name") {
			t.Errorf("%s: an open door is offered, or a note repeats the finding", kind)
		}
		page = f.get("/console/actions/" + f.asks(kind, "api.g1obex.example").ID).body
		contains(t, string(kind), page, "api.g1obex.example is not globex.example", "ooks like another")
	}
	p := f.of(policy.KindPermit, []byte(`{"hosts":["*.xn--glbex-kye.example"],"for":"1h","scope":"sandbox","sandbox":"i1"}`), "*.xn--glbex-kye.example")
	page := f.get("/console/actions/" + p.ID).body
	contains(t, "permit", page, "looks like another", "is not globex.example", `class="check tick"`)
	if strings.Contains(page, "internationalized name") {
		t.Error("a note repeats the finding")
	}
}
