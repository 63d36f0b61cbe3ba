package console_test

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
)

// holder returns the key of the fixture's inbox, as its holder has it.
func (f *fixture) holder() *seal.Key {
	f.t.Helper()
	k, err := f.post.Keys.Open(f.t.Context(), f.agent, f.inboxKey, "")
	if err != nil {
		f.t.Fatal(err)
	}
	return k
}

// code makes a context grant of the fixture's inbox, and returns its code.
func (f *fixture) code(person string) string {
	f.t.Helper()
	_, code, err := f.post.Keys.AddContext(f.t.Context(), f.agent, f.holder(), person, time.Now().Add(24*time.Hour))
	if err != nil {
		f.t.Fatal(err)
	}
	return code.Reveal()
}

// arrive brings a mail to the fixture's inbox.
func (f *fixture) arrive(raw string, results mail.Results) {
	f.t.Helper()
	e := mailbox.Arrival{Envelope: mail.Envelope{From: "bob@shop.example", To: []string{f.inbox.Address}, Raw: []byte(strings.ReplaceAll(raw, "\n", "\r\n"))}, Remote: "192.0.2.1:9", Auth: results}
	if err := f.post.Receive(f.t.Context(), e); err != nil {
		f.t.Fatal(err)
	}
}

const asked = "From: Bob Buyer <bob@shop.example>\nTo: analyst@agents.test\nSubject: The list of October\nMessage-ID: <1@shop.example>\n\nCould you send me " + script + " the list?\n"

// answer proposes an answer to [asked].
func (f *fixture) answer() oversight.Action {
	f.t.Helper()
	ms, err := f.post.Messages(f.t.Context(), f.agent, f.holder(), 1)
	if err != nil || len(ms) != 1 {
		f.t.Fatal(err)
	}
	p, err := f.post.Send(f.t.Context(), f.agent, "rest", mailbox.Outgoing{ReplyTo: ms[0].ID, Key: f.holder(), Draft: mail.Draft{Text: "Here it is.\n"}})
	if err != nil {
		f.t.Fatal(err)
	}
	return p.Action
}

const threadWords = "Could you send me &lt;script&gt;"

// TestThreadIsShownByGrant: without a grant a reviewer reads why there is no thread; with
// one the thread, in this browser alone; without it again, nothing.
func TestThreadIsShownByGrant(t *testing.T) {
	f := setup(t)
	f.enter()
	f.arrive(asked, mail.Results{})
	a := f.answer()
	page := "/console/actions/" + a.ID
	got := f.get(page)
	contains(t, "without a grant", got.body, "What the thread was about", "The inbox is sealed.", `href="/console/account/context"`)
	if strings.Contains(got.body, "The list of October</bdi>") && strings.Contains(got.body, "Could you") {
		t.Error("the thread is shown without a grant")
	}
	contains(t, "how to get one", f.get("/console/account/context").body, "You have no grant", "postern grant create --for-reviewer ann")

	code := f.code("ann")
	if got := f.submit("/console/account/context", url.Values{"code": {"pcx_" + strings.Repeat("A", 26)}}); got.status != http.StatusBadRequest {
		t.Errorf("a guess: %d", got.status)
	}
	got = f.submit("/console/account/context", url.Values{"code": {" " + code + " "}})
	if got.status != http.StatusSeeOther {
		t.Fatalf("redeem: %d\n%s", got.status, got.body)
	}
	set := got.header.Get("Set-Cookie")
	for _, want := range []string{auth.DeviceCookie + "=", "HttpOnly", "SameSite=Strict", "Path=/console", "Max-Age="} {
		if !strings.Contains(set, want) {
			t.Errorf("the cookie %q lacks %s", set, want)
		}
	}
	contains(t, "the list", f.get("/console/account/context").body, "this browser", f.inbox.Address)
	got = f.get(page)
	contains(t, "with a grant", got.body, threadWords, "bob@shop.example", "1 mail, newest first", "That you read this is in the record")
	if strings.Contains(got.body, script) {
		t.Error("the thread is not text")
	}
	contains(t, "the record", f.get("/console/audit?object="+a.ID).body, "context.read")

	// The same person in another browser, and another person in this one.
	mine := f.client
	f.client = f.browser()
	f.submit("/console/signin", url.Values{"name": {"ann"}, "password": {password}})
	got = f.get(page)
	contains(t, "in another browser", got.body, "in another browser")
	if strings.Contains(got.body, threadWords) {
		t.Error("another browser shows the thread")
	}
	f.client = mine
	contains(t, "signed in here still", f.get(page).body, threadWords)

	list, err := f.post.Keys.ContextGrants(t.Context(), f.person, f.inbox.ID)
	if err != nil || len(list) != 1 {
		t.Fatalf("%+v, %v", list, err)
	}
	if got := f.submit("/console/account/context/"+list[0].ID+"/remove", url.Values{}); got.status != http.StatusSeeOther {
		t.Errorf("remove: %d", got.status)
	}
	if strings.Contains(f.get(page).body, threadWords) {
		t.Error("the thread is shown after the grant has ended")
	}
}

// TestViewerHasNoContext: a viewer sees no thread, and redeems nothing.
func TestViewerHasNoContext(t *testing.T) {
	f := setup(t)
	f.enter()
	f.arrive(asked, mail.Results{})
	a := f.answer()
	f.submit("/console/account/context", url.Values{"code": {f.code("ann")}})
	contains(t, "an owner", f.get("/console/actions/"+a.ID).body, threadWords)
	f.exec(`update person set role = $1 where name = $2`, auth.Viewer, "ann")
	got := f.get("/console/actions/" + a.ID)
	contains(t, "a viewer", got.body, "Only a reviewer can be given a grant")
	if strings.Contains(got.body, threadWords) {
		t.Error("a viewer reads the thread")
	}
	if got := f.submit("/console/account/context", url.Values{"code": {f.code("ann")}}); got.status != http.StatusForbidden {
		t.Errorf("a viewer redeems: %d", got.status)
	}
}

// TestQuarantineShowsSendersByGrant: sender and subject for who holds a grant, the proofs
// alone for everybody else.
func TestQuarantineShowsSendersByGrant(t *testing.T) {
	f := setup(t)
	f.enter()
	f.arrive("From: Eve <eve@evil.example>\nTo: analyst@agents.test\nSubject: "+script+"Pay\nMessage-ID: <evil@evil.example>\n\nsecret words\n",
		mail.Results{DMARC: mail.Check{Result: "fail", Domain: "evil.example"}, Policy: "quarantine"})
	got := f.get("/console/quarantine")
	contains(t, "without a grant", got.body, "nor who sent it", "A grant for context", "DMARC fail")
	if strings.Contains(got.body, "eve@evil.example") {
		t.Error("the sender is shown without a grant")
	}
	f.submit("/console/account/context", url.Values{"code": {f.code("ann")}})
	got = f.get("/console/quarantine")
	contains(t, "with a grant", got.body, "Eve &lt;eve@evil.example&gt;", "&lt;script&gt;", "DMARC fail")
	if strings.Contains(got.body, "secret words") || strings.Contains(got.body, script) || strings.Contains(got.body, "nor who sent it") {
		t.Errorf("with a grant: more than sender and subject\n%s", got.body)
	}
	contains(t, "the record", f.get("/console/audit?object="+f.inbox.ID).body, "context.held")
}

// TestArrivedMailShowsItsSenderByGrant: the page of mail that waits to be let in has what the
// quarantine has: the findings for everybody, sender and subject for who holds a grant.
func TestArrivedMailShowsItsSenderByGrant(t *testing.T) {
	f := setup(t)
	f.enter()
	if _, err := f.post.SetMode(t.Context(), f.person, f.inbox.ID, policy.GatedAll, ""); err != nil {
		t.Fatal(err)
	}
	f.arrive("From: Eve <eve@evil.example>\nTo: analyst@agents.test\nSubject: "+script+"Pay\nMessage-ID: <evil@evil.example>\n\nsecret words\n",
		mail.Results{DMARC: mail.Check{Result: "fail", Domain: "evil.example"}})
	as, err := f.gate.Actions(t.Context(), f.person, oversight.Query{States: []oversight.State{oversight.Pending}})
	if err != nil || len(as) != 1 || as[0].Kind != policy.KindReceive {
		t.Fatalf("waiting: %+v, %v", as, err)
	}
	path := "/console/actions/" + as[0].ID
	page := f.get(path).body
	contains(t, "without a grant", page, "What the scan found", "Who sent it: checks", "DMARC", "the domain of the From field")
	for _, bad := range []string{"eve@evil", "secret words", script} {
		if strings.Contains(page, bad) {
			t.Errorf("without a grant the page has %q", bad)
		}
	}
	f.submit("/console/account/context", url.Values{"code": {f.code("ann")}})
	page = f.get(path).body
	contains(t, "with a grant", page, "Sender and subject, by your grant", "Eve &lt;eve@evil.example&gt;", "&lt;script&gt;")
	if strings.Contains(page, "secret words") || strings.Contains(page, script) {
		t.Error("with a grant: more than sender and subject")
	}
	if got := f.get("/console/quarantine").body; !strings.Contains(got, ">Decide<") || strings.Contains(got, "/release") {
		t.Error("the quarantine offers to release mail that waits as an action")
	}
}
