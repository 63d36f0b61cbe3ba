package console_test

import (
	"errors"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestTwoApproversAreCountedOnceEach: an action that two must approve says who has, does not let
// one of them count twice, and leaves after the second.
func TestTwoApproversAreCountedOnceEach(t *testing.T) {
	f := setup(t)
	f.enter()
	f.judge.verdict = policy.Verdict{Effect: policy.Ask, Reason: "rule big: two people", Rule: "big", Approvers: 2, Within: 3 * time.Hour}
	a := f.propose(draft())
	path := "/console/actions/" + a.ID
	contains(t, "queue", f.get("/console/review").body, "0 of 2</span>", "expires in 2 h")
	page := f.get(path)
	contains(t, "page", page.body, "2 people must approve this: any reviewer.", "Approve as one of 2")
	if got := f.submit(path+"/decision", f.form(page.body, "approve-form")); got.status != http.StatusSeeOther {
		t.Fatalf("first approval: %d\n%s", got.status, got.body)
	}
	if got := f.state(a.ID); got.State != oversight.Pending || got.Approvals != 1 {
		t.Fatalf("after one of two it is %s with %d approvals", got.State, got.Approvals)
	}
	page2 := f.get(path)
	contains(t, "page", page2.body, "You approved this. One more approval is needed.", "1 of 2 so far:", "ann")
	if strings.Contains(page2.body, `id="approve-form"`) {
		t.Error("who has approved is offered to approve again")
	}
	// The same click again, from a page of before: it counts once.
	f.submit(path+"/decision", f.form(page.body, "approve-form"))
	if got := f.state(a.ID); got.State != oversight.Pending || got.Approvals != 1 {
		t.Errorf("after the same click again it is %s with %d approvals", got.State, got.Approvals)
	}
	contains(t, "queue", f.get("/console/review").body, "1 of 2</span>")
	bob := f.colleague("bob")
	if err := f.gate.Decide(t.Context(), bob, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true}); err != nil {
		t.Fatal(err)
	}
	f.drain()
	contains(t, "page", f.get(path).body, `data-state="done"`, "2 of 2 required approvals", "approved, as one of several")
}

// TestOnlyNamedApproversDecide: a person whom policy does not ask is told so, and their click,
// sent all the same, changes nothing.
func TestOnlyNamedApproversDecide(t *testing.T) {
	f := setup(t)
	f.enter()
	f.judge.verdict = policy.Verdict{Effect: policy.Ask, Reason: "rule money", Who: []string{"bob", "carol"}}
	a := f.propose(draft())
	path := "/console/actions/" + a.ID
	page := f.get(path)
	contains(t, "page", page.body, "One person must approve this: bob or carol.", "Policy assigns this decision to other reviewers")
	if strings.Contains(page.body, "approve-form") || strings.Contains(page.body, "reject-form") {
		t.Error("who is not asked has buttons")
	}
	for _, d := range []string{"approve", "reject"} {
		got := f.submit(path+"/decision", url.Values{"version": {"1"}, "digest": {a.Hex()}, "decision": {d}, "reason": {"x"}})
		if got.status != http.StatusForbidden || !strings.Contains(got.body, "to other reviewers") {
			t.Errorf("%s by who is not asked: %d", d, got.status)
		}
	}
	if got := f.get("/console/review?asked=me"); !strings.Contains(got.body, "No matching actions") {
		t.Error("what others are asked is among what one is asked oneself")
	}
	if got := f.state(a.ID); got.State != oversight.Pending {
		t.Errorf("it is %s", got.State)
	}
}

// TestSecondFactor: where policy asks for one, the page leads there, and a click
// without it changes nothing.
func TestSecondFactor(t *testing.T) {
	f := setup(t)
	f.enter()
	f.judge.verdict = policy.Verdict{Effect: policy.Ask, Reason: "rule money", StepUp: true}
	a := f.propose(draft())
	path := "/console/actions/" + a.ID
	page := f.get(path)
	contains(t, "page", page.body, "Approving requires a second factor", `id="prove"`, "next=%2Fconsole%2Factions%2F"+a.ID)
	if strings.Contains(page.body, "approve-form") {
		t.Error("the button to approve is there before the proof")
	}
	click := url.Values{"version": {"1"}, "digest": {a.Hex()}, "decision": {"approve"}}
	if got := f.submit(path+"/decision", click); got.status != http.StatusForbidden || !strings.Contains(got.body, "requires a second factor") {
		t.Errorf("approval without a second factor: %d", got.status)
	}
	f.exec(`update session set strong_at = $1`, time.Now().UnixMicro())
	if got := f.submit(path+"/decision", f.form(f.get(path).body, "approve-form")); got.status != http.StatusSeeOther {
		t.Errorf("approval with a second factor: %d", got.status)
	}
}

// TestComments: what people say is shown as text, and to the agent only what was
// meant for it.
func TestComments(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(draft())
	path := "/console/actions/" + a.ID
	for _, form := range []url.Values{{"text": {"is <b>this</b> ours?\r\nlook"}}, {"text": {"name the region"}, "agent": {"yes"}}} {
		if got := f.submit(path+"/comment", form); got.status != http.StatusSeeOther || got.location != path+"#s-talk" {
			t.Errorf("comment: %d to %q", got.status, got.location)
		}
	}
	page := f.get(path)
	contains(t, "page", page.body, "is &lt;b&gt;this&lt;/b&gt; ours?\nlook", "visible to the agent", "commented on")
	rs, err := f.gate.Remarks(t.Context(), f.agent, a.ID)
	if err != nil || len(rs) != 1 || rs[0].Text != "name the region" {
		t.Errorf("the agent reads %v, %v", rs, err)
	}
	for _, text := range []string{"", " ", strings.Repeat("x", 2001)} {
		got := f.submit(path+"/comment", url.Values{"text": {text}})
		if got.status != http.StatusBadRequest {
			t.Errorf("comment of %d bytes: %d", len(text), got.status)
		}
		if text != "" && text != " " {
			contains(t, "the page after it", got.body, text)
		}
	}
}

// TestSwitchStopsApproval: while a switch is on nothing can be approved, and
// the page says why.
func TestSwitchStopsApproval(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(draft())
	path := "/console/actions/" + a.ID
	before := f.form(f.get(path).body, "approve-form")
	if _, err := f.gate.SwitchOn(t.Context(), f.person, oversight.Switch{Scope: oversight.ScopeInbox, Target: f.inbox.ID, Reason: "it <i>spams</i>"}); err != nil {
		t.Fatal(err)
	}
	page := f.get(path)
	contains(t, "page", page.body, "blocks approval", "it &lt;i&gt;spams&lt;/i&gt;", "reject-form")
	if strings.Contains(page.body, "approve-form") {
		t.Error("the button to approve is there while a switch stops it")
	}
	if got := f.submit(path+"/decision", before); got.status != http.StatusConflict || !strings.Contains(got.body, "kill switch blocks this action") {
		t.Errorf("a click from before: %d", got.status)
	}
}

// TestEdit: a reviewer's edit waits as a new revision whose difference is shown,
// and what was shown before it cannot be approved any more.
func TestEdit(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(draft())
	path := "/console/actions/" + a.ID
	before := f.form(f.get(path).body, "approve-form")
	page := f.get(path + "/edit")
	contains(t, "form", page.body, "Bob Buyer &lt;bob@shop.example&gt;", "north 150", "totals.csv")
	form := f.form(page.body, "edit-form")
	write := func(changes url.Values) url.Values {
		v := url.Values{
			"version": form["version"], "digest": form["digest"], "to": {`"Bob Buyer" <bob@shop.example>`}, "cc": {"carol@shop.example"}, "bcc": {"eve@hidden.example"},
			"subject": {"Totals by region"}, "text": {"north 150\r\nsouth 98\r\n"},
		}
		maps.Copy(v, changes)
		return v
	}
	for _, tt := range []struct {
		name   string
		change url.Values
		status int
		text   string
	}{
		{"an invalid recipient", url.Values{"to": {"nobody"}}, http.StatusBadRequest, "Nothing was changed"},
		{"a header of its own", url.Values{"subject": {"x\r\nBcc: y@evil.example"}}, http.StatusBadRequest, "Nothing was changed"},
		{"a file that is not there", url.Values{"drop": {"7"}}, http.StatusBadRequest, "place of a file"},
		{"of another version", url.Values{"version": {"9"}}, http.StatusConflict, "changed nothing"},
		{"of other bytes", url.Values{"digest": {strings.Repeat("0", 64)}}, http.StatusConflict, "changed nothing"},
	} {
		if got := f.submit(path+"/edit", write(tt.change)); got.status != tt.status || !strings.Contains(got.body, tt.text) {
			t.Errorf("%s: %d, %s", tt.name, got.status, got.body)
		}
	}
	if got := f.state(a.ID); got.Version != 1 {
		t.Fatalf("after what could not be taken it is at version %d", got.Version)
	}
	got := f.submit(path+"/edit", write(url.Values{"text": {"north 151\r\nsouth 98\r\n<script>x</script>\r\n"}, "bcc": {""}, "drop": {"0"}}))
	if got.status != http.StatusSeeOther || got.location != path+"#s-changes" {
		t.Fatalf("edit: %d to %q\n%s", got.status, got.location, got.body)
	}
	now := f.state(a.ID)
	if now.Version != 2 || now.Hex() == a.Hex() || now.State != oversight.Pending || now.Proposer != a.Proposer || now.Author != "person:ann" {
		t.Errorf("after the edit: %+v", now)
	}
	page = f.get(path)
	contains(t, "page", page.body, ">Changes<", "<del><bdi>north 150</bdi></del>", "<ins><bdi>north 151</bdi></ins>", "<del><bdi>eve@hidden.example</bdi></del>", "&lt;script&gt;x&lt;/script&gt;", "Edited by", "Version 2 (current)")
	if got := f.submit(path+"/decision", before); got.status != http.StatusConflict || !strings.Contains(got.body, "changed nothing") {
		t.Errorf("approval of what was there before the edit: %d", got.status)
	}
	if got := f.submit(path+"/decision", f.form(page.body, "approve-form")); got.status != http.StatusSeeOther {
		t.Errorf("approval of the edit: %d", got.status)
	}
	f.drain()
	if f.hop.sent() != 1 || strings.Contains(string(f.hop.got[0].Raw), "totals.csv") || !strings.Contains(string(f.hop.got[0].Raw), "north 151") {
		t.Errorf("%d were sent", f.hop.sent())
	}
	if got := f.get(path + "/edit"); got.status != http.StatusConflict {
		t.Errorf("the form of what has left: %d", got.status)
	}
}

// TestBatch: what was each shown, and is still that, is decided on together;
// what changed, what was not ticked and what needs a look of its own is left.
func TestBatch(t *testing.T) {
	f := setup(t)
	f.enter()
	plain := func(subject string) oversight.Action {
		d := draft()
		d.Subject, d.Bcc, d.Attachments = subject, nil, nil
		return f.propose(d)
	}
	one, two, three, changed := plain("one <script>1</script>"), plain("two"), plain("three"), plain("changed")
	long := draft()
	long.Subject, long.Text, long.Attachments, long.Bcc = "long", strings.Repeat("word ", 1000), nil, nil
	alone := f.propose(long)
	files := draft()
	files.Subject, files.Bcc = "with a file", nil
	filed := f.propose(files)
	contains(t, "queue", f.get("/console/review").body, `href="/console/batch?inbox=`+f.inbox.ID+`"`)
	page := f.get("/console/batch").body
	tick := func(a oversight.Action) string { return a.ID + ":1:" + a.Hex() }
	contains(t, "page", page, tick(one), tick(two), tick(three), tick(changed), "one &lt;script&gt;1&lt;/script&gt;", "too long to show here", "files to review", one.Hex(), "Open it first")
	if strings.Contains(page, tick(alone)) || strings.Contains(page, tick(filed)) {
		t.Error("what is not shown in full can be ticked")
	}
	for name, form := range map[string]url.Values{
		"nothing":      {"decision": {"approve"}},
		"no reason":    {"decision": {"reject"}, "act": {tick(one)}},
		"no decision":  {"act": {tick(one)}},
		"no token":     {"decision": {"approve"}, "act": {"act_x:1:2"}},
		"many":         {"decision": {"approve"}, "act": strings.Split(strings.Repeat("x", 26), "")},
		"half a token": {"decision": {"approve"}, "act": {one.ID}},
	} {
		if got := f.submit("/console/batch", form); got.status != http.StatusBadRequest {
			t.Errorf("%s: %d", name, got.status)
		}
	}
	// One changes between look and click.
	f.exec(`update action set version = 2 where id = $1`, changed.ID)
	got := f.submit("/console/batch", url.Values{"decision": {"approve"}, "act": {tick(one), tick(two), tick(changed), tick(alone), tick(filed), tick(one)}})
	contains(t, "answers", got.body, "approved", "changed since it was shown", "not approved: open it first, its text is too long", "not approved: open it first, it has files")
	for id, want := range map[string]oversight.State{one.ID: oversight.Approved, two.ID: oversight.Approved, three.ID: oversight.Pending, changed.ID: oversight.Pending, alone.ID: oversight.Pending, filed.ID: oversight.Pending} {
		if got := f.state(id).State; got != want {
			t.Errorf("%s is %s, want %s", id, got, want)
		}
	}
	got = f.submit("/console/batch", url.Values{"decision": {"reject"}, "reason": {"not today"}, "act": {tick(three), tick(one)}})
	contains(t, "answers", got.body, "rejected", "already decided")
	if got := f.state(three.ID); got.State != oversight.Denied || got.Reason != "not today" {
		t.Errorf("rejected: %+v", got)
	}
}

// TestUncountedApprovalIsExplained: a page says why an approval does not count and what is missing,
// and a click that is sent all the same changes nothing.
func TestUncountedApprovalIsExplained(t *testing.T) {
	f := setup(t)
	f.enter()
	f.judge.verdict = policy.Verdict{Effect: policy.Ask, Approvers: 2}
	var bob auth.Principal
	f.update(func(tx *store.Tx) error {
		_, link, err := auth.NewInvitation(t.Context(), tx, auth.Invitation{Project: f.project.Project, Role: auth.Reviewer, CreatedBy: f.person.String()})
		if err == nil {
			bob, err = auth.Redeem(t.Context(), tx, link, "bob", "x")
		}
		return err
	})
	a := f.propose(draft())
	path := "/console/actions/" + a.ID
	before := f.form(f.get(path).body, "approve-form")
	if err := f.gate.Decide(t.Context(), bob, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true}); err != nil {
		t.Fatal(err)
	}
	f.update(func(tx *store.Tx) error { // from before the operator's did not count
		_, err := tx.ExecContext(t.Context(), `insert into approval (action_id, version, person, at, reason) values ($1, $2, 'person:local-root', 1, '')`, a.ID, a.Version)
		return errors.Join(err, storetest.Reseal(t.Context(), tx))
	})
	page := f.get(path).body
	contains(t, "page", page, "1 of 2 so far:", "does not count: may be anybody with an account", "Still needed: 1 of 2 approvals, by different people",
		`id="bars"`, "person:ann may be the same person as person:bob", "opened by person:ann (joined)")
	if strings.Contains(page, `id="approve-form"`) || !strings.Contains(page, `id="reject-form"`) {
		t.Error("want a button to reject, and none to approve")
	}
	if got := f.submit(path+"/decision", before); got.status != http.StatusForbidden || !strings.Contains(got.body, "your approval would not count") {
		t.Errorf("a click of before: %d\n%s", got.status, got.body)
	}
	f.exec(`update person_change set at = 1`) // more than a day ago
	page = f.get(path).body
	if got := f.submit(path+"/decision", f.form(page, "approve-form")); got.status != http.StatusSeeOther {
		t.Errorf("a day later: %d\n%s", got.status, got.body)
	}
	if got := f.state(a.ID); got.State == oversight.Pending {
		t.Errorf("a day later it waits, with %d approvals", got.Approvals)
	}
}
