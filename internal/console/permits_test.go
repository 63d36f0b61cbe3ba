package console_test

import (
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/permit"
)

// TestPermitPages: an owner narrows what code in a sandbox asks for, approves that,
// sees that it holds and ends it.
func TestPermitPages(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "empty page", f.get("/console/permits").body, "No permit is in force")
	box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.person.Project, Template: "base"}
	a, err := f.permits.Propose(t.Context(), box, "proposal", permit.Proposal{Hosts: []string{"api.example.com", "*.cdn.example.net"}, Why: "<b>to</b> read", For: permit.Duration(2 * permit.DefaultFor), Scope: permit.ForProject})
	if err != nil {
		t.Fatal(err)
	}
	page := "/console/actions/" + a.ID
	contains(t, "action", f.get(page).body, "Network permit", "api.example.com", "&lt;b&gt;to&lt;/b&gt; read", "every sandbox of the project", ">Narrow <", "not inspected")
	form := f.get(page + "/narrow").body
	contains(t, "form", form, "*.cdn.example.net", `value="2h"`, `value="project" selected`)
	values := url.Values{"version": {"1"}, "digest": {a.Hex()}, "hosts": {"api.example.com"}, "methods": {"GET HEAD"}, "paths": {"/v1/*"}, "for": {"1h"}, "scope": {"sandbox"}}
	for field, bad := range map[string]string{"hosts": "other.example.com", "for": "3h", "paths": "v1", "port": "22", "scope": "all"} {
		v := url.Values{}
		for k := range values {
			v.Set(k, values.Get(k))
		}
		v.Set(field, bad)
		if got := f.submit(page+"/narrow", v); got.status != http.StatusBadRequest || !strings.Contains(got.body, "Nothing was changed") {
			t.Errorf("%s %s: %d", field, bad, got.status)
		}
	}
	if got := f.submit(page+"/narrow", values); got.status != http.StatusSeeOther {
		t.Fatalf("narrow: %d\n%s", got.status, got.body)
	}
	if got := f.submit(page+"/narrow", values); got.status != http.StatusConflict {
		t.Errorf("a second time: %d", got.status)
	}
	contains(t, "narrowed", f.get(page).body, "GET HEAD", "/v1/*", "sandbox i1")
	now, err := f.gate.Action(t.Context(), f.person, a.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: a.ID, Version: now.Version, Digest: now.Hex(), Approve: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.gate.RunOne(t.Context()); err != nil {
		t.Fatal(err)
	}
	list := f.get("/console/permits").body
	contains(t, "list", list, "api.example.com", "GET", "/v1/*", ">End<")
	end := regexp.MustCompile(`/console/permits/prm_\w+/end`).FindString(list)
	if got := f.submit(end, url.Values{}); got.status != http.StatusSeeOther {
		t.Errorf("end: %d", got.status)
	}
	contains(t, "ended", f.get("/console/permits").body, "No permit is in force", ">Ended</h2>")
}
