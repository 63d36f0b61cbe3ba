package console_test

import (
	"bytes"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// note proposes a mail without anything to look at closely.
func (f *fixture) note(subject string) oversight.Action {
	f.t.Helper()
	return f.propose(mail.Draft{To: []string{"dora@partner.example"}, Subject: subject, Text: "Hello Dora,\n\nthe parcel has left.\n"})
}

// card proposes a mail with the number of a payment card, which policy calls grave.
func (f *fixture) card() oversight.Action {
	f.t.Helper()
	f.judge.verdict.Grave = []string{"payment_card"}
	a := f.propose(mail.Draft{To: []string{"dora@partner.example"}, Subject: "The card", Text: "Pay with 4539148803436467 please.\n"})
	if len(a.Grave()) != 1 {
		f.t.Fatalf("grave findings: %v, want one; %+v", a.Grave(), a.Request)
	}
	return a
}

// TestNextActionOpensAfterADecision: a decision leads to the action that followed in the
// queue, as it was sorted and filtered, with a line of what was done.
func TestNextActionOpensAfterADecision(t *testing.T) {
	f := setup(t)
	f.enter()
	var all []oversight.Action
	for i := range 4 {
		all = append(all, f.note(fmt.Sprint("Note ", i)))
	}
	const order = "?group=none&sort=age"
	first := f.get("/console/actions/" + all[1].ID + order)
	contains(t, "place", first.body, "<b>2</b> of 4", `rel="prev" href="/console/actions/`+all[0].ID, `rel="next" href="/console/actions/`+all[2].ID, `value="group=none&amp;sort=age"`)
	got := f.submit("/console/actions/"+all[1].ID+"/decision", f.form(first.body, "approve-form"))
	if want := "/console/actions/" + all[2].ID + "?done=" + all[1].ID + "&group=none&sort=age"; got.status != http.StatusSeeOther || got.location != want {
		t.Fatalf("after the decision: %d to %q, want %q", got.status, got.location, want)
	}
	next := f.get(got.location)
	contains(t, "next", next.body, "Approved “Note 1”", "This is the next one.", "Note 2", "<b>2</b> of 3")
	// The last one leads to the first that was passed over, and the very last to the queue.
	reject := f.form(f.get("/console/actions/"+all[3].ID+order).body, "reject-form")
	reject.Set("why", "unasked")
	got = f.submit("/console/actions/"+all[3].ID+"/decision", reject)
	if !strings.HasPrefix(got.location, "/console/actions/"+all[0].ID+"?done="+all[3].ID) {
		t.Errorf("after the last: %q", got.location)
	}
	contains(t, "rejected", f.get(got.location).body, "Rejected “Note 3”; analyst was told.")
	if s := f.state(all[3].ID); s.Reason != "Nobody asked for it" {
		t.Errorf("the chosen reason is recorded as %q", s.Reason)
	}
	for _, a := range []oversight.Action{all[0], all[2]} {
		got = f.submit("/console/actions/"+a.ID+"/decision", f.form(f.get("/console/actions/"+a.ID).body, "approve-form"))
	}
	if got.location != "/console/review?done="+all[2].ID {
		t.Errorf("when nothing is left: %q", got.location)
	}
	contains(t, "empty", f.get(got.location).body, "Approved “Note 2”", "Nothing is waiting")
	// What the line says is read from the action: an address cannot put words there.
	for _, done := range []string{"<script>", "act_" + strings.Repeat("A", 26), "Everything is fine"} {
		if page := f.get("/console/review?" + url.Values{"done": {done}}.Encode()); page.status != http.StatusOK || strings.Contains(page.body, `class="flash`) {
			t.Errorf("done=%s: %d, with a line", done, page.status)
		}
	}
}

// TestUntickedGraveFindingIsRefused: the tick of a grave finding is asked for by the
// server, whatever the form says.
func TestUntickedGraveFindingIsRefused(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.card()
	path := "/console/actions/" + a.ID
	page := f.get(path).body
	contains(t, "page", page, `name="seen" value="`+a.Grave()[0]+`" form="approve-form" required`, "1 finding needs your tick")
	if strings.Contains(page, `" form="approve-form" required checked`) || strings.Contains(page, "allow-sheet") {
		t.Error("a tick is preselected, or an open door is offered beside a grave finding")
	}
	form := f.form(page, "approve-form")
	for name, seen := range map[string][]string{"none": nil, "another": {"lookalike:partner.example"}, "empty": {""}} {
		form["seen"] = seen
		got := f.submit(path+"/decision", form)
		if got.status != http.StatusUnprocessableEntity || !strings.Contains(got.body, "each grave finding needs its own tick") {
			t.Errorf("tick %s: %d", name, got.status)
		}
		if s := f.state(a.ID); s.State != oversight.Pending {
			t.Fatalf("tick %s: it is %s", name, s.State)
		}
	}
	form["seen"] = a.Grave()
	form.Set("also", "allow")
	form.Set("scope", "address:dora@partner.example")
	form.Set("ends", "week")
	if got := f.submit(path+"/decision", form); got.status != http.StatusUnprocessableEntity || f.state(a.ID).State != oversight.Pending {
		t.Errorf("an allowance beside a grave finding: %d", got.status)
	}
	form.Del("also")
	if got := f.submit(path+"/decision", form); got.status != http.StatusSeeOther || f.state(a.ID).State == oversight.Pending {
		t.Errorf("with the tick: %d", got.status)
	}
	b := f.card()
	reject := f.form(f.get("/console/actions/"+b.ID).body, "reject-form")
	reject.Set("reason", "no cards by mail")
	if got := f.submit("/console/actions/"+b.ID+"/decision", reject); got.status != http.StatusSeeOther {
		t.Errorf("a rejection without the tick: %d, want none to be needed", got.status)
	}
}

// TestBatchTakesWarnedActionsOnlyAfterTheyWereOpened: by this person, in this version, on
// their own pages; and a grave finding has its own tick there too.
func TestBatchTakesWarnedActionsOnlyAfterTheyWereOpened(t *testing.T) {
	f := setup(t)
	f.enter()
	a, plain := f.card(), f.note("plain")
	token := func(a oversight.Action) string { return fmt.Sprintf("%s:%d:%s", a.ID, a.Version, a.Hex()) }
	if page := f.get("/console/batch").body; strings.Contains(page, token(a)) || !strings.Contains(page, token(plain)) || !strings.Contains(page, "Open it first") {
		t.Error("a warned action can be selected before it was opened")
	}
	tick := url.Values{"decision": {"approve"}, "act": {token(a)}, "seen": {a.ID + ":" + a.Grave()[0]}}
	contains(t, "forged", f.submit("/console/batch", tick).body, "not approved: open it first")
	// Neither a look of somebody else nor a page that a browser fetched ahead counts.
	ann := f.client
	f.client = f.browser()
	_, link := f.invite()
	f.submit("/console/setup", url.Values{"token": {link}, "name": {"bob"}, "password": {password}, "again": {password}})
	f.get("/console/actions/" + a.ID)
	f.client = ann
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, f.url+"/console/actions/"+a.ID, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Sec-Purpose", "prefetch")
	f.do(req)
	contains(t, "not opened", f.submit("/console/batch", tick).body, "not approved: open it first")
	f.get("/console/actions/" + a.ID)
	page := f.get("/console/batch").body
	contains(t, "opened", page, token(a), `value="`+a.ID+":"+a.Grave()[0]+`"`)
	untick := url.Values{"decision": {"approve"}, "act": {token(a), token(plain)}, "seen": {plain.ID + ":" + a.Grave()[0]}}
	contains(t, "without the tick", f.submit("/console/batch", untick).body, "not approved: a grave finding has no tick")
	if f.state(a.ID).State != oversight.Pending || f.state(plain.ID).State == oversight.Pending {
		t.Errorf("they are %s and %s", f.state(a.ID).State, f.state(plain.ID).State)
	}
	contains(t, "with the tick", f.submit("/console/batch", tick).body, "approved")
	if f.state(a.ID).State == oversight.Pending {
		t.Error("the ticked one still waits")
	}
}

// invite makes the token of an account for another owner.
func (f *fixture) invite() (id, token string) {
	f.t.Helper()
	f.update(func(tx *store.Tx) error {
		v, link, err := auth.NewInvitation(f.t.Context(), tx, auth.Invitation{Project: f.project.Project, Role: auth.Owner, CreatedBy: f.person.String()})
		id, token = v.ID, link.Reveal()
		return err
	})
	return id, token
}

// TestSnoozeLeavesOneList: what a person puts off is out of that person's list, comes back
// on wish, and stays decided in time.
func TestSnoozeLeavesOneList(t *testing.T) {
	f := setup(t)
	f.enter()
	a, b := f.note("one"), f.note("two")
	path := "/console/actions/" + a.ID
	for _, until := range []string{"", "never", "2099-01-01"} {
		if got := f.submit(path+"/snooze", url.Values{"until": {until}}); got.status != http.StatusBadRequest {
			t.Errorf("until %q: %d", until, got.status)
		}
	}
	got := f.submit(path+"/snooze", url.Values{"until": {"hour"}})
	if got.status != http.StatusSeeOther || !strings.HasPrefix(got.location, "/console/actions/"+b.ID) {
		t.Fatalf("snooze: %d to %q", got.status, got.location)
	}
	contains(t, "next", f.get(got.location).body, "Put off “one” until", "1 snoozed", "<b>1</b> of 1")
	queue := f.get("/console/review").body
	if strings.Contains(queue, a.ID) || !strings.Contains(queue, b.ID) {
		t.Error("what was put off is still in the list, or the other is not")
	}
	contains(t, "snoozed", f.get("/console/review?show=snoozed").body, a.ID)
	contains(t, "its page", f.get(path).body, "You have put this off until", `id="approve-form"`)
	f.submit(path+"/wake", url.Values{})
	contains(t, "awake", f.get("/console/review").body, a.ID, b.ID)
	f.submit(path+"/assign", url.Values{"person": {"ann"}})
	contains(t, "assigned", f.get("/console/review?show=assigned").body, a.ID, "for ann")
	if got := f.submit(path+"/assign", url.Values{"person": {"nobody-here"}}); got.status != http.StatusUnprocessableEntity {
		t.Errorf("assigned to nobody of the project: %d", got.status)
	}
	if s := f.state(a.ID); s.State != oversight.Pending {
		t.Errorf("it is %s", s.State)
	}
}

// TestLookalikeIsMarked: a name with letters outside ASCII has each of them marked and
// its form for DNS beside it; a list has that form alone.
func TestLookalikeIsMarked(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(mail.Draft{To: []string{"accounts@n\u043erdwerft.example"}, Bcc: []string{"eve@hidden.example"}, Subject: "Invoices", Text: "Please pay.\n"})
	contains(t, "page", f.get("/console/actions/"+a.ID).body, "accounts@n<mark>\u043e</mark>rdwerft.example", "accounts@xn--nrdwerft-nbh.example", "marked Cyrillic \u043e",
		"hidden from the others", "Approve and send to 2, 1 hidden")
	// The finding says it, and no note repeats it.
	if n := strings.Count(strings.ToLower(f.get("/console/actions/"+a.ID).body), "letters outside ascii"); n != 0 {
		t.Errorf("%d notes repeat the finding", n)
	}
	queue := f.get("/console/review").body
	contains(t, "queue", queue, "accounts@xn--nrdwerft-nbh.example", "1 hidden")
	if strings.Contains(queue, "n\u043erdwerft") {
		t.Error("the list shows the name as it looks")
	}
}

// TestQueueStateOfFormsIsChecked: the state of the queue in a form is read like that of
// an address, and leads nowhere else.
func TestQueueStateOfFormsIsChecked(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.note("one")
	form := url.Values{"version": {"1"}, "digest": {a.Hex()}, "decision": {"reject"}, "reason": {"no"}}
	for _, queue := range []string{"%zz", "kind=" + strings.Repeat("x", 300), "q=%00"} {
		form.Set("queue", queue)
		if got := f.submit("/console/actions/"+a.ID+"/decision", form); got.status != http.StatusBadRequest || f.state(a.ID).State != oversight.Pending {
			t.Errorf("queue %.20q: %d", queue, got.status)
		}
	}
	form.Set("queue", "next=https%3A%2F%2Fevil.example&q=%0d%0aSet-Cookie&group=none")
	form.Set("queue", "next=https%3A%2F%2Fevil.example&group=none")
	if got := f.submit("/console/actions/"+a.ID+"/decision", form); got.location != "/console/review?done="+a.ID+"&group=none" {
		t.Errorf("leads to %q", got.location)
	}
}

// BenchmarkQueue10000 is the first paint of the queue, and of an action in it, with 10,000
// waiting and nothing in any cache.
func BenchmarkQueue10000(b *testing.B) {
	f := setup(b)
	f.enter()
	first := f.propose(draft())
	for n := 0; n < 10_000; n += 100 {
		f.update(func(tx *store.Tx) error {
			for i := range 100 {
				// As long as what it replaces, so that nothing else changes.
				payload := bytes.ReplaceAll(first.Payload, []byte("north 150"), fmt.Appendf(nil, "nr %06d", n+i))
				r := policy.Request{Kind: policy.KindSend, To: []string{"bob@shop.example", "carol@shop.example", "eve@hidden.example"}, Subject: "Totals by region", Size: int64(len(payload)), Files: first.Request.Files}
				if i%7 == 0 {
					r.Flags = []string{"iban"}
				}
				if _, err := f.gate.Propose(b.Context(), tx, f.agent, oversight.Proposal{Request: r, Inbox: fmt.Sprint("ibx_", n/100), Via: "rest", Payload: payload}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for _, path := range []string{"/console/review", "/console/actions/" + first.ID, "/console/review?q=nothing+like+this", "/console/review?sort=age&group=none"} {
		b.Run(path[:min(len(path), 20)], func(b *testing.B) {
			var took []time.Duration
			for b.Loop() {
				f.cold()
				start := time.Now()
				if got := f.bytes(path); got.status != http.StatusOK {
					b.Fatalf("%s: %d", path, got.status)
				}
				took = append(took, time.Since(start))
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Milliseconds()), "median-ms")
			b.ReportMetric(float64(took[len(took)-1].Milliseconds()), "slowest-ms")
		})
	}
}

// cold empties the console's cache of contents.
func (f *fixture) cold() { f.console.ForgetBriefs() }
