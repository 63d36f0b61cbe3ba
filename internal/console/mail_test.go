package console_test

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/store"
)

// TestQuarantine is a person who judges mail by what was found, without reading
// it.
func TestQuarantine(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "nothing held", f.get("/console/quarantine").body, "Quarantine is empty")
	arrive := func(subject string) string {
		t.Helper()
		err := f.post.Receive(t.Context(), mailbox.Arrival{
			Envelope: mail.Envelope{From: "eve@evil.example", To: []string{f.inbox.Address}, Raw: []byte("From: Eve <eve@evil.example>\r\nSubject: " + subject + "\r\n\r\n" + subject + "\r\n")},
			Auth:     mail.Results{DMARC: mail.Check{Result: "fail", Domain: "<script>"}, SPF: mail.Check{Result: "softfail"}, Policy: "reject"},
		})
		if err != nil {
			t.Fatal(err)
		}
		held, _, err := f.post.Quarantine(t.Context(), f.person, "", "", 0)
		if err != nil || len(held) == 0 {
			t.Fatalf("held: %d, %v", len(held), err)
		}
		return held[0].ID
	}
	id := arrive("Kohlrabi")
	for _, path := range []string{"/console/quarantine", "/console/"} {
		body := f.get(path).body
		for _, bad := range []string{"Kohlrabi", "eve@", "<script>"} {
			if strings.Contains(body, bad) {
				t.Errorf("%s shows %q", path, bad)
			}
		}
	}
	contains(t, "the queue", f.get("/console/review").body, "1 incoming message is held in quarantine")
	contains(t, "the quarantine", f.get("/console/quarantine").body, "analyst@agents.test", "DMARC fail", "SPF softfail", "failed authentication", "/console/quarantine/"+id+"/release")
	err := f.post.Receive(t.Context(), mailbox.Arrival{
		Envelope: mail.Envelope{From: "eve@evil.example", To: []string{f.inbox.Address}, Raw: []byte("Subject: from nobody\r\n\r\nx\r\n")},
		Auth:     mail.Results{DMARC: mail.Check{Result: "permerror"}, Policy: "quarantine"},
	})
	if err != nil {
		t.Fatal(err)
	}
	contains(t, "the quarantine with one from nobody", f.get("/console/quarantine").body, "DMARC permerror", "does not name exactly one sender")
	held, _, err := f.post.Quarantine(t.Context(), f.person, "", "", 0)
	if err != nil || len(held) != 2 {
		t.Fatalf("held: %d, %v", len(held), err)
	}
	// The list stands beside the chosen message. With an unknown ID the first one is shown.
	contains(t, "the chosen one", f.get("/console/quarantine?message="+id).body, "<b>2</b> of 2", `aria-current="true"`, "/console/quarantine/"+id+"/release", `rel="prev" href="/console/quarantine?message=`+held[0].ID)
	contains(t, "no message", f.get("/console/quarantine?message=%3Cscript%3E").body, "<b>1</b> of 2", "/console/quarantine/"+held[0].ID+"/release")
	if a := f.submit("/console/quarantine/"+held[0].ID+"/drop", url.Values{}); a.status != http.StatusSeeOther {
		t.Errorf("drop: %d", a.status)
	}
	if a := f.submit("/console/quarantine/"+id+"/release", url.Values{}); a.status != http.StatusSeeOther {
		t.Errorf("release: %d", a.status)
	}
	for _, form := range []string{"/release", "/drop"} {
		if a := f.submit("/console/quarantine/"+id+form, url.Values{}); a.status != http.StatusConflict {
			t.Errorf("%s again: %d", form, a.status)
		}
	}
	k, err := f.post.Keys.Open(t.Context(), f.agent, f.inboxKey, "")
	if err != nil {
		t.Fatal(err)
	}
	if ms, err := f.post.Messages(t.Context(), f.agent, k, 0); err != nil || len(ms) != 1 || ms[0].Subject != "Kohlrabi" {
		t.Errorf("released: %+v, %v", ms, err)
	}
	id = arrive("Turnip")
	if a := f.submit("/console/quarantine/"+id+"/drop", url.Values{}); a.status != http.StatusSeeOther {
		t.Errorf("drop: %d", a.status)
	}
	if a := f.submit("/console/quarantine/x'/drop", url.Values{}); a.status != http.StatusNotFound {
		t.Errorf("a hostile id: %d", a.status)
	}

	// Another project's people neither see nor judge it.
	id = arrive("Radish")
	f.update(func(tx *store.Tx) error {
		project, _, err := auth.NewProject(t.Context(), tx, "two")
		if err == nil {
			f.link, err = auth.NewSetup(t.Context(), tx, project)
		}
		return err
	})
	f.client = f.browser()
	f.submit("/console/setup", url.Values{"token": {f.link.Reveal()}, "name": {"eve"}, "password": {password}, "again": {password}})
	contains(t, "another project's", f.get("/console/quarantine").body, "Quarantine is empty")
	for _, form := range []string{"/release", "/drop"} {
		if a := f.submit("/console/quarantine/"+id+form, url.Values{}); a.status != http.StatusConflict {
			t.Errorf("%s by another project: %d", form, a.status)
		}
	}
	if held, _, err := f.post.Quarantine(t.Context(), f.person, "", "", 0); err != nil || len(held) != 1 {
		t.Errorf("afterwards: %d held, %v", len(held), err)
	}
}

// TestSending: what became of each recipient; whom nothing is sent to; who
// sends nothing.
func TestSending(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "sending", f.get("/console/sending").body, "No deliveries in progress", "The list is empty")
	f.hop.answer(mail.Refused, "550 5.1.1 no <b>such</b> user\x1b[2J")
	a := f.propose(draft())
	v := f.form(f.get("/console/actions/"+a.ID).body, "approve-form")
	if got := f.submit("/console/actions/"+a.ID+"/decision", v); got.status != http.StatusSeeOther {
		t.Fatalf("approve: %d", got.status)
	}
	contains(t, "on its way", f.get("/console/sending").body, "Totals by region", "/console/actions/"+a.ID)
	f.drain()
	body := f.get("/console/actions/" + a.ID).body
	contains(t, "the action", body, "Delivery by recipient", "eve@hidden.example", "not delivered", "no &lt;b&gt;such")
	if strings.Contains(body, "<b>such") || strings.Contains(body, "\x1b") {
		t.Error("what a server said is not text")
	}

	look := func(address string) answer {
		return f.submit("/console/sending/lookup", url.Values{"address": {address}})
	}
	for _, bad := range []string{"", "x", "a@b\r\nc", "<script>@x", strings.Repeat("a", 300) + "@example.com"} {
		if a := look(bad); a.status != http.StatusBadRequest || strings.Contains(a.body, "<script>") {
			t.Errorf("looking up %.20q: %d", bad, a.status)
		}
	}
	contains(t, "looked up", look("Carl@Example.com").body, "Carl@Example.com<", "is not on the list")
	change := func(do, address string) answer {
		return f.submit("/console/sending/suppression", url.Values{"do": {do}, "address": {address}})
	}
	if a := change("add", "carl@example.com"); a.status != http.StatusSeeOther {
		t.Errorf("add: %d", a.status)
	}
	contains(t, "on the list", look("carl@example.com").body, "has been on the list since", "added by a person or a project key", "Remove from the list")
	if body := f.get("/console/sending").body; strings.Contains(body, "carl@") || !strings.Contains(body, "on the list") {
		t.Error("the list is shown, or not counted")
	}
	if a := change("remove", "carl@example.com"); a.status != http.StatusSeeOther {
		t.Errorf("remove: %d", a.status)
	}
	if a := change("remove", "carl@example.com"); a.status != http.StatusConflict {
		t.Errorf("remove again: %d", a.status)
	}
	if a := change("clear", "carl@example.com"); a.status != http.StatusBadRequest {
		t.Errorf("nonsense: %d", a.status)
	}

	f.exec(`insert into suspension (scope, project_id, reason, suspended_at, lifted_at) values ($1, $2, 'too many <b>bounces</b>', 1, 0)`, f.inbox.ID, f.project.Project)
	contains(t, "suspended", f.get("/console/sending").body, "analyst@agents.test", "too many &lt;b&gt;bounces", "Lift suspension")
	if a := f.submit("/console/sending/lift", url.Values{"scope": {f.inbox.ID}}); a.status != http.StatusBadRequest {
		t.Errorf("lift without a reason: %d", a.status)
	}
	if a := f.submit("/console/sending/lift", url.Values{"scope": {f.inbox.ID}, "reason": {"cleaned the list"}}); a.status != http.StatusSeeOther {
		t.Errorf("lift: %d", a.status)
	}
	if a := f.submit("/console/sending/lift", url.Values{"scope": {f.inbox.ID}, "reason": {"x"}}); a.status != http.StatusConflict {
		t.Errorf("lift again: %d", a.status)
	}
}
