package console_test

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/domain"
	"postern/internal/store"
)

// TestDomains is a person who brings a domain, looks at what the DNS says, and
// gives it up.
func TestDomains(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "no domains", f.get("/console/domains").body, "No domains yet", "agents.test")
	for name, want := range map[string]string{"co.uk": "public suffix", "x.agents.test": "own", "<script>alert(1)</script>": "not a domain name", "": "is empty", "192.0.2.1": "address"} {
		a := f.submit("/console/domains", url.Values{"domain": {name}})
		if a.status != http.StatusBadRequest || strings.Contains(a.body, "<script>") {
			t.Errorf("adding %q: %d", name, a.status)
		}
		contains(t, "adding "+name, a.body, want)
	}
	a := f.submit("/console/domains", url.Values{"domain": {"Bücher.example"}})
	if a.status != http.StatusSeeOther || !strings.HasPrefix(a.location, "/console/domains/dom_") {
		t.Fatalf("add: %d to %q", a.status, a.location)
	}
	one := a.location
	d, err := f.domains.Find(t.Context(), f.person, strings.TrimPrefix(one, "/console/domains/"))
	if err != nil {
		t.Fatal(err)
	}
	contains(t, "the new domain", f.get(one).body, "xn--bcher-kva.example", "bücher.example", d.Token, "_postern.xn--bcher-kva.example", "mx.agents.test", "v=spf1 mx ~all", "not checked yet")

	// What the DNS says is text.
	f.dns.TXT("_postern.xn--bcher-kva.example.", "<img src=x onerror=alert(1)>\u202e\x1b[2J", d.Token)
	f.dns.TXT("_dmarc.xn--bcher-kva.example.", "v=DMARC1; p=<script>alert(1)</script>", "v=DMARC1; p=\"><b>")
	f.dns.Add(t, "xn--bcher-kva.example. MX 5 elsewhere.example.")
	if a := f.submit(one+"/check", url.Values{}); a.status != http.StatusSeeOther || a.location != one {
		t.Fatalf("check: %d to %q", a.status, a.location)
	}
	body := f.get(one).body
	contains(t, "the checked domain", body, "degraded", "5 elsewhere.example", "Mail for xn--bcher-kva.example goes to other servers. Publish mx.agents.test with priority 10", "&lt;script&gt;")
	for _, bad := range []string{"<script>", "<img", "<b>", "\u202e", "\x1b"} {
		if strings.Contains(body, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	contains(t, "the list", f.get("/console/domains").body, "degraded", "xn--bcher-kva.example")

	// It goes only when its name is typed and no inbox is left.
	b, _, err := f.post.CreateInbox(t.Context(), f.project, directory.NewInbox{Address: "sales@bücher.example"}, "")
	if err != nil {
		t.Fatal(err)
	}
	if a := f.submit(one+"/remove", url.Values{}); a.status != http.StatusBadRequest {
		t.Errorf("remove without its name: %d", a.status)
	}
	if a := f.submit(one+"/remove", url.Values{"name": {"bücher.example"}}); a.status != http.StatusConflict {
		t.Errorf("remove with an inbox: %d", a.status)
	}
	f.exec(`update inbox set deleted_at = 1 where id = $1`, b.ID)
	if a := f.submit(one+"/remove", url.Values{"name": {"bücher.example"}}); a.status != http.StatusSeeOther {
		t.Errorf("remove: %d", a.status)
	}
	if a := f.get(one); a.status != http.StatusNotFound {
		t.Errorf("after its removal: %d", a.status)
	}
	got, _ := f.verbs("domain.")
	if strings.Join(got, " ") != "domain.add domain.degrade domain.remove" {
		t.Errorf("record: %v", got)
	}
}

// TestDomainOfAnotherProjectIsHidden: what another project brought is not there.
func TestDomainOfAnotherProjectIsHidden(t *testing.T) {
	f := setup(t)
	f.enter()
	var other auth.Principal
	f.update(func(tx *store.Tx) error {
		id, _, err := auth.NewProject(t.Context(), tx, "two")
		other = auth.Principal{Kind: auth.Project, ID: "crd_x", Project: id}
		return err
	})
	d, err := f.domains.Add(t.Context(), other, "example.org")
	if err != nil {
		t.Fatal(err)
	}
	page := "/console/domains/" + d.ID
	for _, a := range []answer{f.get(page), f.submit(page+"/check", url.Values{}), f.submit(page+"/remove", url.Values{"name": {d.Name}}), f.get("/console/domains/example.org"), f.get("/console/domains/%27")} {
		if a.status != http.StatusNotFound || strings.Contains(a.body, d.Token) {
			t.Errorf("got %d, want 404", a.status)
		}
	}
	if body := f.get("/console/domains").body; strings.Contains(body, "example.org") {
		t.Error("it is in the list")
	}
	if d, err := f.domains.Find(t.Context(), other, d.ID); err != nil || d.State != domain.StatePending || !d.Checked.IsZero() {
		t.Errorf("afterwards: %+v, %v", d, err)
	}
}
