package mailapi

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oauth"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/sandbox"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/tracing"
)

// A principal of the isolation test: what it is, in which project, and what it
// may do in which inbox.
type principal struct {
	name    string
	kind    auth.Kind // empty: nobody, or who has no valid key any more
	foreign bool      // of the other project
	parts   map[string]seal.Scope
	account bool
	tools   bool // it names its tools, so REST is closed to it
}

// The principals of TestIsolation; [fixture.principals] makes those that setup
// does not.
var principals = []principal{
	{name: "nobody"},
	{name: "project", kind: auth.Project},
	{name: "person", kind: auth.Person},
	{name: "key a", kind: auth.Agent, parts: map[string]seal.Scope{"a": seal.Manage}},
	{name: "reading key a", kind: auth.Agent, parts: map[string]seal.Scope{"a": seal.Read}},
	{name: "proposing key a", kind: auth.Agent, parts: map[string]seal.Scope{"a": seal.Propose}},
	{name: "drafting key a", kind: auth.Agent, parts: map[string]seal.Scope{"a": seal.Draft}},
	{name: "sending key a", kind: auth.Agent, parts: map[string]seal.Scope{"a": seal.Send}},
	{name: "key a for a tool", kind: auth.Agent, parts: map[string]seal.Scope{"a": seal.Send}, tools: true},
	{name: "grant a for a tool", kind: auth.Grant, parts: map[string]seal.Scope{"a": seal.Propose}, tools: true},
	{name: "app of a", kind: auth.Agent, parts: map[string]seal.Scope{"a": seal.Propose}},
	{name: "expired key a"},
	{name: "revoked key a"},
	{name: "recovery key a", kind: auth.Recovery},
	{name: "key b", kind: auth.Agent, parts: map[string]seal.Scope{"b": seal.Manage}},
	{name: "key of a deleted inbox", kind: auth.Agent},
	{name: "reading grant a", kind: auth.Grant, parts: map[string]seal.Scope{"a": seal.Read}},
	{name: "proposing grant a, b", kind: auth.Grant, parts: map[string]seal.Scope{"a": seal.Propose, "b": seal.Propose}},
	{name: "grant b", kind: auth.Grant, parts: map[string]seal.Scope{"b": seal.Propose}},
	{name: "ended grant a", kind: auth.Grant}, // by its time, and not noticed yet
	{name: "grant b, formerly a", kind: auth.Grant, parts: map[string]seal.Scope{"b": seal.Read}},
	{name: "revoked grant a"},
	{name: "account", kind: auth.Grant, account: true},
	{name: "foreign project", kind: auth.Project, foreign: true},
	{name: "foreign person", kind: auth.Person, foreign: true},
	{name: "foreign key", kind: auth.Agent, foreign: true, parts: map[string]seal.Scope{"foreign": seal.Manage}},
	{name: "foreign grant", kind: auth.Grant, foreign: true, parts: map[string]seal.Scope{"foreign": seal.Propose}},
	{name: "foreign account", kind: auth.Grant, foreign: true, account: true},
}

func (p principal) manages() bool { return p.kind == auth.Project || p.kind == auth.Person }

// A target is what a path names as the inbox.
type target struct {
	name  string
	inbox string // which inbox that is; empty if there is none
}

var targets = []target{
	{"a", "a"}, {"a by address", "a"}, {"b", "b"}, {"foreign", "foreign"}, {"missing", ""}, {"hostile", ""}, {"deleted", ""},
}

// A rule says which status a principal gets, if the operation is in order and
// would answer ok.
type rule func(p principal, t target, ok int) int

// forbidUnless is a rule by what a credential may do in the inbox: all others get the
// same answer, whether the inbox is there or not.
func forbidUnless(want seal.Scope) rule {
	return func(p principal, t target, ok int) int {
		if s, has := p.parts[t.inbox]; has && (want == "" || s.Includes(want)) {
			return ok
		}
		if p.name == "key of a deleted inbox" && t.name == "deleted" {
			return http.StatusNotFound // it knows that there was one
		}
		return http.StatusForbidden
	}
}

// The rules. An operation that needs another has it written out in its row.
var (
	member   = forbidUnless("")                              // any credential with a part in the inbox
	reads    = forbidUnless(seal.Read)                       // one that opens mail
	drafts   = forbidUnless(seal.Draft)                      // one that writes drafts
	proposes = forbidUnless(seal.Send)                       // one that may propose
	arranges = forbidUnless(seal.Join(seal.Read, seal.Send)) // one that opens mail, and proposes what becomes of it
	holds    = forbidUnless(seal.Manage)                     // its own full key: no manager can, since it takes the inbox's keys

	// managers of its project alone.
	managed rule = func(p principal, t target, ok int) int {
		switch {
		case !p.manages():
			return http.StatusForbidden
		case t.inbox == "" || (t.inbox == "foreign") != p.foreign:
			return http.StatusNotFound
		}
		return ok
	}
	// managers of its project, and its own full key.
	steered rule = func(p principal, t target, ok int) int {
		if p.manages() {
			return managed(p, t, ok)
		}
		return holds(p, t, ok)
	}
	// people of its project alone.
	owned rule = func(p principal, t target, ok int) int {
		if p.kind != auth.Person {
			return http.StatusForbidden
		}
		return managed(p, t, ok)
	}
	// managers of its project, and any credential with a part in it.
	known rule = func(p principal, t target, ok int) int {
		if p.manages() {
			return managed(p, t, ok)
		}
		return member(p, t, ok)
	}

	// What names no inbox.

	anybody       rule = func(_ principal, _ target, ok int) int { return ok }
	nobody        rule = func(principal, target, int) int { return http.StatusForbidden }
	onlyManagers  rule = func(p principal, _ target, ok int) int { return when(p.manages(), ok) }
	onlyPeople    rule = func(p principal, _ target, ok int) int { return when(p.kind == auth.Person, ok) }
	ofOurManagers rule = func(p principal, _ target, ok int) int { // an object of the project
		if p.manages() && p.foreign {
			return http.StatusNotFound
		}
		return when(p.manages(), ok)
	}
	ofOurPeople rule = func(p principal, _ target, ok int) int {
		if p.kind == auth.Person && p.foreign {
			return http.StatusNotFound
		}
		return when(p.kind == auth.Person, ok)
	}
)

// The rules of runs.
var (
	readsRuns rule = func(p principal, _ target, ok int) int { return when(p.manages() || p.kind == auth.Agent, ok) }
	// ofRun allows the project's managers, and every key of the inbox that proposed the run.
	ofRun rule = func(p principal, t target, ok int) int {
		switch {
		case p.kind == auth.Agent && p.parts["a"] != "", p.manages() && !p.foreign:
			return ok
		case p.kind == auth.Agent, p.manages():
			return http.StatusNotFound
		}
		return http.StatusForbidden
	}
	// proposedRun allows only keys of the inbox that proposed the run, except reading keys.
	proposedRun rule = func(p principal, t target, ok int) int {
		if s := p.parts["a"]; s != "" && !s.Includes(seal.Send) || p.manages() && !p.foreign {
			return http.StatusForbidden
		}
		return ofRun(p, t, ok)
	}
)

func when(may bool, ok int) int {
	if may {
		return ok
	}
	return http.StatusForbidden
}

// A trial is one request of the isolation test, as its operation prepares it.
type trial struct {
	t      *testing.T
	f      *fixture
	n      int // another for each trial
	target target
	inbox  directory.Inbox // the target's, or a where the target is none
	holder string          // the client with that inbox's full key
	want   int             // the status that the rule says

	id, query, body string // of the path's {id}, after its ?, and the request's
	after           func() // puts things in order again
}

// An operation is a route with who may use it. If the route names an inbox, all
// targets are tried. Prepare fills in what a request needs to be in order.
type operation struct {
	method, route string
	who           rule
	ok            int
	prepare       func(*trial)
}

// operations is the whole of this door: each route has its row here.
var operations = []operation{
	// A key of a deleted inbox has none to tell of.
	{"GET", "/v1/me", func(p principal, _ target, ok int) int {
		if p.name == "key of a deleted inbox" {
			return http.StatusNotFound
		}
		return ok
	}, 200, nil},
	{"GET", "/v1/inboxes", func(p principal, _ target, ok int) int {
		if p.kind == auth.Recovery {
			return 200 // and its own inbox alone is in it
		}
		return ok
	}, 200, nil},
	{"POST", "/v1/inboxes", func(p principal, _ target, ok int) int { return when(p.manages() || p.account, ok) }, 201, body(`{"address":"new-%d"}`)},
	{"GET", "/v1/inboxes/{inbox}", known, 200, nil},
	{"PATCH", "/v1/inboxes/{inbox}", steered, 200, body(`{"display_name":"Number %d"}`)},
	{"DELETE", "/v1/inboxes/{inbox}", steered, 200, func(x *trial) { x.after = x.undelete }},
	{"POST", "/v1/inboxes/{inbox}/undelete", func(p principal, t target, ok int) int {
		if t.name == "deleted" && p.manages() && !p.foreign {
			return ok
		}
		return managed(p, t, ok)
	}, 200, func(x *trial) {
		if x.target.inbox != "" {
			x.delete(x.inbox)
		}
		x.after = func() {
			x.undelete()
			x.delete(x.f.deleted)
		}
	}},
	// A looser mode and an entry on the allow list are an owner's to give, and a
	// key's to ask for; the way back is free.
	{"POST", "/v1/inboxes/{inbox}/mode-codes", owned, 201, func(x *trial) {
		x.f.exec(x.t, `delete from mode_code`)
		x.body = `{"mode":"monitored","reason":"three good weeks"}`
	}},
	{"POST", "/v1/inboxes/{inbox}/upgrade", holds, 403, body(`{"code":"AAAA-AAAA-AAAA-AAAA"}`)}, // a wrong one
	{"POST", "/v1/inboxes/{inbox}/request-upgrade", proposes, 202, func(x *trial) {
		x.f.exec(x.t, `delete from send_use`)
		x.body = `{"target_mode":"monitored","reason":"please"}`
	}},
	{"GET", "/v1/inboxes/{inbox}/allowlist", known, 200, nil},
	{"POST", "/v1/inboxes/{inbox}/allowlist", owned, 201, body(`{"pattern":"bob%d@example.com"}`)},
	{"DELETE", "/v1/inboxes/{inbox}/allowlist/{id}", steered, 204, func(x *trial) {
		e, err := x.f.post.AllowList.Add(x.t.Context(), x.manager(x.inbox), x.inbox.ID, "carl@example.com", time.Time{})
		if err != nil {
			x.t.Fatal(err)
		}
		x.id = e.ID
	}},
	{"POST", "/v1/inboxes/{inbox}/allowlist/requests", proposes, 202, func(x *trial) {
		x.f.exec(x.t, `delete from send_use`)
		x.body = `{"pattern":"*@example.com"}`
	}},
	{"GET", "/v1/inboxes/{inbox}/overseers", managed, 200, nil},
	{"POST", "/v1/inboxes/{inbox}/overseers", owned, 200, body(`{"addresses":["boss@example.com"]}`)},
	{"GET", "/v1/overseers", onlyManagers, 200, nil},
	{"POST", "/v1/overseers", onlyPeople, 200, body(`{"addresses":["boss@example.com"]}`)},
	{"GET", "/v1/inboxes/{inbox}/keys", steered, 200, nil},
	{"POST", "/v1/inboxes/{inbox}/keys", holds, 201, body(`{"scope":"read","name":"number %d"}`)},
	{"POST", "/v1/inboxes/{inbox}/keys/{id}/rotate", holds, 201, (*trial).key},
	{"DELETE", "/v1/inboxes/{inbox}/keys/{id}", steered, 204, (*trial).key},
	{"POST", "/v1/inboxes/{inbox}/recovery-key", holds, 201, nil},
	{"POST", "/v1/inboxes/{inbox}/recover", func(p principal, t target, ok int) int {
		return when(p.kind == auth.Recovery && t.inbox == "a", ok)
	}, 201, body(`{}`)},
	{"GET", "/v1/inboxes/{inbox}/grants", steered, 200, nil},
	{"POST", "/v1/inboxes/{inbox}/grants", holds, 201, func(x *trial) {
		x.body = fmt.Sprintf(`{"name":"number %d","scope":"propose","expires_at":%q}`, x.n, time.Now().Add(time.Hour).Format(time.RFC3339))
	}},
	{"DELETE", "/v1/inboxes/{inbox}/grants/{id}", steered, 204, (*trial).grant},
	{"GET", "/v1/inboxes/{inbox}/context-grants", steered, 200, nil},
	{"POST", "/v1/inboxes/{inbox}/context-grants", holds, 201, func(x *trial) {
		x.body = fmt.Sprintf(`{"person":"ann","expires_at":%q}`, time.Now().Add(time.Hour).Format(time.RFC3339))
	}},
	{"DELETE", "/v1/inboxes/{inbox}/context-grants/{id}", steered, 204, (*trial).contextGrant},
	// A code is an owner's to make: no key hands out inboxes that outlive it.
	{"GET", "/v1/connect-codes", onlyManagers, 200, nil},
	{"POST", "/v1/connect-codes", onlyPeople, 201, func(x *trial) {
		x.body, x.after = `{"mode":"gated_all","scopes":["read","send"]}`, func() { x.f.exec(x.t, `delete from connect_code`) }
	}},
	{"DELETE", "/v1/connect-codes/{id}", ofOurPeople, 204, func(x *trial) {
		c, _, err := x.f.post.NewConnectCode(x.t.Context(), x.manager(x.f.a), mailbox.NewConnectCode{})
		if err != nil {
			x.t.Fatal(err)
		}
		x.id, x.after = c.ID, func() { x.f.exec(x.t, `delete from connect_code`) }
	}},
	{"GET", "/v1/grants", func(p principal, _ target, ok int) int { return when(p.manages() || p.kind == auth.Grant, ok) }, 200, nil},
	{"DELETE", "/v1/grants/{id}", ofOurManagers, 204, (*trial).grant},
	{"GET", "/v1/apps", onlyManagers, 200, nil},
	{"DELETE", "/v1/apps/{id}", ofOurManagers, 204, (*trial).app},

	{"GET", "/v1/inboxes/{inbox}/messages", reads, 200, nil},
	{"POST", "/v1/inboxes/{inbox}/messages", proposes, 202, body(`{"to":["bob@example.com"],"subject":"s %d","text":"t"}`)},
	{"POST", "/v1/inboxes/{inbox}/messages/{id}/reply", arranges, 202, func(x *trial) {
		x.message()
		x.body = fmt.Sprintf(`{"text":"t %d"}`, x.n)
	}},
	{"POST", "/v1/inboxes/{inbox}/messages/{id}/forward", arranges, 202, func(x *trial) {
		x.message()
		x.body = fmt.Sprintf(`{"to":["bob@example.com"],"text":"t %d"}`, x.n)
	}},
	{"GET", "/v1/inboxes/{inbox}/sending", known, 200, nil},
	{"POST", "/v1/inboxes/{inbox}/sending", managed, 200, body(`{"limits":{"per_day":100000}}`)}, // no inbox gives itself more
	{"GET", "/v1/sending", onlyManagers, 200, nil},
	{"POST", "/v1/sending", onlyManagers, 200, body(`{"limits":{"per_day":100000}}`)},
	{"GET", "/v1/inboxes/{inbox}/messages/{id}", reads, 200, (*trial).message},
	{"GET", "/v1/inboxes/{inbox}/messages/{id}/raw", reads, 200, (*trial).message},
	{"GET", "/v1/inboxes/{inbox}/messages/{id}/attachments/{index}", reads, 200, (*trial).message},
	{"GET", "/v1/inboxes/{inbox}/quarantine", reads, 200, nil},
	{"GET", "/v1/inboxes/{inbox}/quarantine/{id}", reads, 200, (*trial).held},
	{"GET", "/v1/quarantine", onlyManagers, 200, nil},
	// No key lets mail in, also the inbox's own.
	{"POST", "/v1/quarantine/{id}/release", ofOurPeople, 204, (*trial).held},
	{"POST", "/v1/quarantine/{id}/drop", ofOurPeople, 204, (*trial).held},
	{"GET", "/v1/inboxes/{inbox}/messages/wait", reads, 200, func(x *trial) { x.query = "?timeout=0" }},
	{"GET", "/v1/inboxes/{inbox}/events", reads, 200, nil},
	{"GET", "/v1/inboxes/{inbox}/threads", reads, 200, nil},
	{"GET", "/v1/inboxes/{inbox}/search", reads, 200, func(x *trial) { x.query = "?q=kohlrabi" }},
	{"GET", "/v1/inboxes/{inbox}/contacts", reads, 200, nil},
	{"GET", "/v1/inboxes/{inbox}/export", holds, 200, nil},
	{"GET", "/v1/inboxes/{inbox}/drafts", reads, 200, nil},
	{"POST", "/v1/inboxes/{inbox}/drafts", drafts, 201, func(x *trial) {
		x.body, x.after = savedDraft, x.undraft
	}},
	{"GET", "/v1/inboxes/{inbox}/drafts/{id}", reads, 200, (*trial).draft},
	{"GET", "/v1/inboxes/{inbox}/drafts/{id}/attachments/{index}", reads, 200, (*trial).draft},
	// The files that it keeps are read; TestDraftingKey replaces a draft without.
	{"POST", "/v1/inboxes/{inbox}/drafts/{id}", forbidUnless(seal.Join(seal.Read, seal.Draft)), 200, func(x *trial) {
		x.draft()
		x.body = `{"version":1,"subject":"other","keep_attachments":[0]}`
	}},
	{"DELETE", "/v1/inboxes/{inbox}/drafts/{id}", drafts, 204, (*trial).draft},
	{"POST", "/v1/inboxes/{inbox}/drafts/{id}/send", arranges, 202, func(x *trial) {
		x.draft()
		x.body = `{"version":1}`
	}},
	{"GET", "/v1/inboxes/{inbox}/threads/{id}", reads, 200, func(x *trial) { x.id = x.f.threads[x.inbox.ID] }},
	{"GET", "/v1/inboxes/{inbox}/labels", reads, 200, nil},
	{"POST", "/v1/inboxes/{inbox}/labels", arranges, 200, func(x *trial) {
		x.body = fmt.Sprintf(`{"ids":[%q],"add":["starred"]}`, x.f.messages[x.inbox.ID])
	}},

	{"GET", "/v1/inboxes/{inbox}/webhooks", reads, 200, nil},
	{"POST", "/v1/inboxes/{inbox}/webhooks", holds, 201, func(x *trial) {
		x.body, x.after = `{"url":"https://example.com/new"}`, func() { x.f.clearWebhooks(x.t) }
	}},
	{"GET", "/v1/inboxes/{inbox}/webhooks/{id}", reads, 200, (*trial).webhook},
	{"PATCH", "/v1/inboxes/{inbox}/webhooks/{id}", holds, 200, (*trial).webhook},
	{"DELETE", "/v1/inboxes/{inbox}/webhooks/{id}", holds, 204, (*trial).webhook},
	{"POST", "/v1/inboxes/{inbox}/webhooks/{id}/rotation", holds, 200, (*trial).webhook},
	{"GET", "/v1/inboxes/{inbox}/webhooks/{id}/deliveries", reads, 200, (*trial).webhook},
	// Who may finds that there is no such delivery.
	{"POST", "/v1/inboxes/{inbox}/webhooks/{id}/deliveries/{delivery}/redelivery", holds, 404, (*trial).webhook},

	// In this test nobody is told of anything.
	{"GET", "/v1/notify", onlyPeople, 501, nil},
	{"POST", "/v1/notify/test", onlyPeople, 501, body(`{"person":"ann"}`)},
	{"POST", "/v1/notify/telegram", onlyPeople, 501, body(`{"person":"ann"}`)},
	{"DELETE", "/v1/notify/telegram/{person}", onlyPeople, 501, nil},
	{"GET", "/v1/notify/settings", onlyPeople, 501, nil},
	{"PUT", "/v1/notify/settings", onlyPeople, 501, body(`{"zone":"Europe/Berlin"}`)},
	{"DELETE", "/v1/notify/settings", onlyPeople, 501, nil},
	{"PUT", "/v1/notify/settings/project", onlyPeople, 501, body(`{"zone":"Europe/Berlin"}`)},
	{"GET", "/v1/notify/rooms", onlyPeople, 501, nil},
	{"POST", "/v1/notify/rooms", onlyPeople, 501, body(`{"kind":"teams","name":"x","url":"https://teams.example/x"}`)},
	{"POST", "/v1/notify/rooms/{id}/test", onlyPeople, 501, (*trial).notified},
	{"DELETE", "/v1/notify/rooms/{id}", onlyPeople, 501, (*trial).notified},
	{"GET", "/v1/notify/devices", onlyPeople, 501, nil},
	{"DELETE", "/v1/notify/devices/{id}", onlyPeople, 501, (*trial).notified},
	{"GET", "/v1/notify/slack", onlyPeople, 501, nil},
	{"POST", "/v1/notify/slack", onlyPeople, 501, body(`{"code":"x","team":"T1","user":"U1"}`)},
	{"POST", "/v1/notify/slack/lookup", onlyPeople, 501, body(`{"code":"x"}`)},
	{"DELETE", "/v1/notify/slack/{person}", onlyPeople, 501, nil},

	{"GET", "/v1/accounts", onlyManagers, 200, nil},
	{"POST", "/v1/accounts", onlyManagers, 201, body(`{"name":"number %d"}`)},
	{"GET", "/v1/account", anybody, 200, nil},
	{"POST", "/v1/verify/{provider}", anybody, 200, body(`{"handle":"x"}`)},
	{"GET", "/v1/inboxes/{inbox}/emails", reads, 200, nil},
	{"GET", "/v1/inboxes/{inbox}/emails/poll", reads, 204, func(x *trial) { x.query = "?timeout=0" }},
	{"GET", "/v1/inboxes/{inbox}/emails/{id}", reads, 200, (*trial).message},
	{"GET", "/v1/inboxes/{inbox}/emails/{id}/attachments/{index}", reads, 200, (*trial).message},
	{"POST", "/v1/inboxes/{inbox}/emails/{id}/extract", reads, 501, (*trial).message},
	// The inbox is named by from, here a.
	{"POST", "/v1/emails/send", proposes, 202, func(x *trial) {
		x.body = fmt.Sprintf(`{"from":%q,"to":["bob@example.com"],"subject":"number %d","body":{"text":"t"}}`, x.f.a.Address, x.n)
	}},
	{"GET", "/v1/emails/search", reads, 200, func(x *trial) { x.query = "?q=kohlrabi&inboxId=" + x.f.a.ID }},
	// Everybody sees their own, and a recovery key does nothing else.
	{"GET", "/v1/webhooks", func(p principal, _ target, ok int) int { return when(p.kind != auth.Recovery, ok) }, 200, nil},
	{"POST", "/v1/webhooks", holds, 201, func(x *trial) {
		x.body, x.after = fmt.Sprintf(`{"url":"https://example.com/new","inboxId":%q}`, x.f.a.ID), func() { x.f.clearWebhooks(x.t) }
	}},
	{"DELETE", "/v1/webhooks/{id}", func(p principal, t target, ok int) int {
		switch {
		case p.kind == auth.Recovery:
			return http.StatusForbidden
		case p.kind == auth.Agent && p.parts["a"] != "":
			return holds(p, t, ok)
		}
		return http.StatusNotFound
	}, 200, (*trial).webhook},

	{"GET", "/v1/actions", func(p principal, _ target, ok int) int {
		return when(p.kind != auth.Project && p.kind != auth.Recovery, ok)
	}, 200, nil},
	// Not found, for whoever may not see it; a sibling inbox's key too.
	{"GET", "/v1/actions/{id}", func(p principal, _ target, ok int) int {
		if p.kind == auth.Person && !p.foreign || p.parts["a"] != "" {
			return ok
		}
		return http.StatusNotFound
	}, 200, (*trial).action},
	// Who may propose for the inbox takes back what waits in it, and so does a person.
	{"POST", "/v1/actions/{id}/cancel", func(p principal, _ target, ok int) int {
		switch {
		case p.kind == auth.Person && !p.foreign, p.parts["a"].Includes(seal.Send):
			return ok
		case p.parts["a"] != "":
			return http.StatusForbidden
		}
		return http.StatusNotFound
	}, 200, func(x *trial) {
		x.action()
		x.body = ""
	}},
	// A person decides on what others wrote, and writes nothing in their name.
	{"POST", "/v1/actions/{id}/revision", func(p principal, _ target, ok int) int {
		switch {
		case p.parts["a"].Includes(seal.Send):
			return ok
		case p.kind == auth.Person && !p.foreign, p.parts["a"] != "":
			return http.StatusForbidden
		}
		return http.StatusNotFound
	}, 202, func(x *trial) {
		x.action()
		x.body = fresh(-x.n)
	}},
	// No key decides, also the one that proposed; not even another's.
	{"POST", "/v1/actions/{id}/decision", ofOurPeople, 200, (*trial).action},
	{"POST", "/v1/actions/{id}/resolution", ofOurPeople, 200, func(x *trial) {
		x.action()
		x.f.setState(x.t, x.id, oversight.Unknown)
		x.body = strings.Replace(x.body, `"approve":false`, `"state":"failed"`, 1)
		x.body = strings.Replace(x.body, `"digest":"`+x.digest()+`",`, "", 1)
	}},
	// What waits for a person is shown to people alone, and only they put it off or
	// assign it: an agent that did would hide its proposal.
	{"GET", "/v1/queue", onlyPeople, 200, nil},
	{"PUT", "/v1/actions/{id}/snooze", ofOurPeople, 200, func(x *trial) {
		x.action()
		x.body = fmt.Sprintf(`{"until":%q}`, time.Now().Add(time.Hour).Format(time.RFC3339))
	}},
	{"DELETE", "/v1/actions/{id}/snooze", ofOurPeople, 204, func(x *trial) {
		x.action()
		x.body = ""
	}},
	// Who may finds that there is nobody of this name.
	{"PUT", "/v1/actions/{id}/assignee", ofOurPeople, 422, func(x *trial) {
		x.action()
		x.body = `{"person":"nobody"}`
	}},
	{"DELETE", "/v1/actions/{id}/assignee", ofOurPeople, 204, func(x *trial) {
		x.action()
		x.body = ""
	}},
	// A batch answers each by itself.
	{"POST", "/v1/actions/decisions", onlyPeople, 200, func(x *trial) {
		x.action()
		x.body = `{"decisions":[` + strings.Replace(x.body, "{", fmt.Sprintf(`{"id":%q,`, x.id), 1) + `]}`
		x.id = ""
	}},
	{"GET", "/v1/actions/{id}/approvals", ofOurPeople, 200, (*trial).action},
	{"GET", "/v1/actions/{id}/comments", func(p principal, _ target, ok int) int {
		if p.kind == auth.Person && !p.foreign || p.parts["a"] != "" {
			return ok
		}
		return http.StatusNotFound
	}, 200, (*trial).action},
	{"POST", "/v1/actions/{id}/comments", ofOurPeople, 201, func(x *trial) {
		x.action()
		x.body = `{"text":"why?"}`
	}},
	{"POST", "/v1/actions/{id}/edit", ofOurPeople, 200, func(x *trial) {
		x.action()
		x.body = `{"version":1,"subject":"another"}`
	}},
	{"GET", "/v1/actions/{id}/revisions", ofOurPeople, 200, (*trial).action},
	{"GET", "/v1/actions/{id}/files/{index}", ofOurPeople, 200, func(x *trial) {
		x.id = x.f.do(x.t, "key a", "POST", "/v1/inboxes/"+x.f.a.ID+"/messages",
			fmt.Sprintf(`{"to":["bob@example.com"],"subject":"f %d","text":"t","attachments":[{"name":"a.txt","content_type":"text/plain","content_base64":"YQ=="}]}`, x.n)).field(x.t, "id")
		x.body = ""
	}},
	// No key stops anything, nor lets it go.
	{"GET", "/v1/switches", onlyPeople, 200, nil},
	{"POST", "/v1/switches", onlyPeople, 201, body(`{"scope":"domain","target":"nobody%d.example","reason":"a trial"}`)},
	{"DELETE", "/v1/switches/{id}", ofOurPeople, 204, func(x *trial) {
		s, err := x.f.gate.SwitchOn(x.t.Context(), x.f.person, oversight.Switch{Scope: oversight.ScopeDomain, Target: "nobody.example", Reason: "a trial"})
		if err != nil {
			x.t.Fatal(err)
		}
		x.id = s.ID
	}},
	{"GET", "/v1/audit", onlyPeople, 200, nil},
	// The record is one, and its checkpoints are for all people in it; its entries are each project's.
	{"GET", "/v1/audit/checkpoint", onlyPeople, 200, func(x *trial) { x.f.entry(x.t) }},
	{"POST", "/v1/audit/checkpoint", onlyPeople, 200, nil},
	{"GET", "/v1/audit/proof", ofOurPeople, 200, func(x *trial) { x.query = fmt.Sprintf("?seq=%d", x.f.entry(x.t)) }},
	// No key looks up what is not noticed, and none writes what it is judged by.
	{"GET", "/v1/policy", onlyPeople, 200, nil},
	{"POST", "/v1/policy", onlyPeople, 202, body(`{"text":"rules: [] # %d"}`)},
	{"GET", "/v1/policy/versions", onlyPeople, 200, nil},
	{"GET", "/v1/policy/versions/{id}", onlyPeople, 200, func(x *trial) { x.id = "0" }},
	{"POST", "/v1/policy/evaluation", onlyPeople, 200, body(`{"request":{"kind":"email.send"}}`)},

	{"GET", "/v1/actions/{id}/deliveries", func(p principal, _ target, ok int) int {
		if p.kind == auth.Person && !p.foreign || p.parts["a"] != "" {
			return ok
		}
		return http.StatusNotFound
	}, 200, (*trial).action},
	{"GET", "/v1/suppression", onlyManagers, 200, nil},
	{"POST", "/v1/suppression", onlyManagers, 204, body(`{"address":"bob%d@example.com"}`)},
	{"POST", "/v1/suppression/lookup", onlyManagers, 200, (*trial).suppressed},
	{"POST", "/v1/suppression/removal", onlyManagers, 204, (*trial).suppressed},
	{"GET", "/v1/suspensions", onlyManagers, 200, nil},
	// Who may finds that nothing of his is suspended.
	{"POST", "/v1/suspensions/{id}/lift", onlyPeople, 404, func(x *trial) { x.id, x.body = x.f.a.ID, `{"reason":"clean"}` }},
	// And that this server signs nothing.
	{"GET", "/v1/signing", onlyPeople, 200, nil},
	{"GET", "/v1/signing/{id}", onlyPeople, 404, func(x *trial) { x.id = "agents.test" }},
	{"POST", "/v1/signing/{id}/rotation", onlyPeople, 404, func(x *trial) { x.id = "agents.test" }},
	{"POST", "/v1/signing/{id}/check", onlyPeople, 404, func(x *trial) { x.id = "agents.test" }},
	{"DELETE", "/v1/signing/{id}/keys/{key}", onlyPeople, 404, func(x *trial) { x.id = "agents.test" }},

	{"GET", "/v1/permits", onlyManagers, 200, nil},
	{"GET", "/v1/permits/{id}", ofOurManagers, 200, (*trial).permit},
	{"GET", "/v1/sandboxes/{id}/trace", ofOurManagers, 200, (*trial).traced},
	{"POST", "/v1/verifications", onlyPeople, 201, body(`{"template":"base","checks":3}`)},
	{"POST", "/v1/verifications/{id}", onlyPeople, 204, func(x *trial) {
		x.id = "ver_" + rand.Text()
		x.body = `{"passed":2,"failed":1,"digest":"sha256:` + strings.Repeat("0", 64) + `"}`
	}},
	{"GET", "/v1/sandboxes/{id}/commands", ofOurManagers, 200, (*trial).started},
	{"DELETE", "/v1/permits/{id}", ofOurManagers, 204, (*trial).permit},
	{"POST", "/v1/actions/{id}/narrowing", ofOurPeople, 200, (*trial).proposal},
	{"GET", "/v1/runs", readsRuns, 200, nil},
	{"POST", "/v1/runs", func(p principal, _ target, ok int) int {
		switch {
		case p.manages(), p.kind == auth.Agent && slices.ContainsFunc(slices.Collect(maps.Values(p.parts)), func(s seal.Scope) bool { return s.Includes(seal.Send) }):
			return ok
		case p.name == "key of a deleted inbox": // it knows that there was one
			return http.StatusNotFound
		}
		return http.StatusForbidden
	}, 201, func(x *trial) {
		x.f.exec(x.t, `delete from run_event`)
		x.f.exec(x.t, `delete from run`)
		x.f.exec(x.t, `delete from action where kind = 'run.start'`)
		x.body = newRun(x.n, "")
	}},
	{"GET", "/v1/runs/{id}", ofRun, 200, (*trial).draftRun},
	// Only the proposer may add inputs to a proposal.
	{"PUT", "/v1/runs/{id}/input", proposedRun, 400, (*trial).draftRun},
	{"POST", "/v1/runs/{id}/propose", proposedRun, 400, (*trial).draftRun},
	{"GET", "/v1/runs/{id}/events", ofRun, 200, (*trial).draftRun},
	{"POST", "/v1/runs/{id}/cancel", func(p principal, t target, ok int) int {
		if s := p.parts["a"]; s != "" && !s.Includes(seal.Send) {
			return http.StatusForbidden
		}
		return ofRun(p, t, ok)
	}, 200, (*trial).draftRun},
	// The server of this test has no exports and no prover.
	{"GET", "/v1/runs/{id}/artifacts", anybody, 501, (*trial).noRun},
	{"GET", "/v1/runs/{id}/artifacts/{n}", anybody, 501, (*trial).noRun},
	{"GET", "/v1/runs/{id}/report", anybody, 501, (*trial).noRun},
	{"GET", "/v1/runs/{id}/statement", anybody, 501, (*trial).noRun},
	{"GET", "/v1/contracts", readsRuns, 200, nil},
	{"GET", "/v1/contracts/{name}", readsRuns, 404, nil},
	{"PUT", "/v1/contracts/{name}", onlyManagers, 400, body(`{"text":"version: %d"}`)},
	{"DELETE", "/v1/contracts/{name}", onlyManagers, 404, nil},
	{"GET", "/v1/boundary", readsRuns, 404, nil},
	{"PUT", "/v1/boundary", onlyPeople, 400, body(`{"text":"version: %d"}`)},
	{"DELETE", "/v1/boundary", onlyPeople, 404, nil},

	// No key connects a mailbox: whose it is decides what agents read.
	{"POST", "/v1/connections/gmail/sign-ins", onlyPeople, 201, body(`{"client_id":"` + gmailApp + `","client_secret":"s3cret"}`)},
	{"POST", "/v1/connections/gmail", ownSignIn, 201, func(x *trial) {
		x.body = fmt.Sprintf(`{"sign_in":%q}`, x.f.begun(x.t, "person", fmt.Sprintf("trial-%d@gmail.example", x.n)))
	}},
	{"GET", "/v1/secrets", onlyManagers, 200, nil},
	{"POST", "/v1/secrets", onlyManagers, 201, body(`{"name":"new-%d","value":"12345678"}`)},
	{"GET", "/v1/secrets/{id}", ofOurManagers, 200, (*trial).secret},
	{"PATCH", "/v1/secrets/{id}", ofOurManagers, 200, (*trial).secret},
	{"POST", "/v1/secrets/{id}/rotation", ofOurManagers, 200, func(x *trial) {
		x.secret()
		x.body = `{"value":"87654321"}`
	}},
	{"DELETE", "/v1/secrets/{id}", ofOurManagers, 204, (*trial).secret},
	{"GET", "/v1/connections", onlyPeople, 200, nil},
	{"POST", "/v1/connections", onlyPeople, 201, body(`{"kind":"imap","address":"new-%d@elsewhere.example","credential":"secret"}`)},
	{"GET", "/v1/connections/{id}", ofOurPeople, 200, (*trial).connection},
	{"POST", "/v1/connections/{id}/pause", ofOurPeople, 200, (*trial).connection},
	{"POST", "/v1/connections/{id}/resume", ofOurPeople, 200, func(x *trial) {
		x.connection()
		x.f.do(x.t, "person", "POST", "/v1/connections/"+x.id+"/pause", "")
	}},
	{"POST", "/v1/connections/{id}/resync", ofOurPeople, 200, (*trial).connection},
	{"POST", "/v1/connections/{id}/sign-in", ofOurPeople, 200, func(x *trial) {
		x.connection()
		x.body = `{"credential":"another"}`
	}},
	{"DELETE", "/v1/connections/{id}", ofOurPeople, 200, (*trial).connection},
	{"GET", "/v1/domains", onlyManagers, 200, nil},
	{"POST", "/v1/domains", onlyManagers, 201, body(`{"domain":"new-%d.example"}`)},
	{"GET", "/v1/domains/{id}", ofOurManagers, 200, (*trial).domain},
	{"GET", "/v1/domains/{id}/records", ofOurManagers, 200, (*trial).domain},
	{"POST", "/v1/domains/{id}/verify", ofOurManagers, 200, (*trial).domain},
	{"DELETE", "/v1/domains/{id}", ofOurManagers, 200, (*trial).domain},
	// Sessions are shown by none of these: the socket's person has none.
	{"GET", "/v1/session", onlyPeople, 200, nil},
	{"DELETE", "/v1/session", nobody, 204, nil},
	{"POST", "/v1/session/step-up", nobody, 200, body(`{"code":"123456"}`)},
	{"GET", "/v1/people", onlyPeople, 200, nil},
	{"GET", "/v1/invitations", onlyPeople, 200, nil},
	{"POST", "/v1/invitations", onlyPeople, 201, func(x *trial) {
		x.body, x.after = `{"role":"viewer"}`, x.f.clearInvitations
	}},
	{"DELETE", "/v1/invitations/{id}", ofOurPeople, 204, (*trial).invitation},
	{"PATCH", "/v1/people/{id}", ofOurPeople, 204, func(x *trial) {
		x.id, x.body = x.f.someone(x.t), `{"email":"vic@example.com"}`
	}},
	{"POST", "/v1/people/{id}/disable", ofOurPeople, 204, func(x *trial) { x.id = x.f.someone(x.t) }},
	{"POST", "/v1/people/{id}/enable", ofOurPeople, 204, func(x *trial) { x.id = x.f.someone(x.t) }},
	{"POST", "/v1/people/{id}/reset", ofOurPeople, 204, func(x *trial) { x.id = x.f.someone(x.t) }},
	{"POST", "/v1/people/{id}/link-operator", nobody, 204, func(x *trial) { x.id = x.f.someone(x.t) }},
	{"POST", "/v1/people/{id}/unlink-operator", nobody, 204, func(x *trial) { x.id = x.f.someone(x.t) }},
	{"POST", "/v1/people/{id}/password-link", nobody, 201, func(x *trial) {
		x.id, x.after = x.f.someone(x.t), x.f.clearInvitations
	}},
}

// body prepares a request with this body, in which %d is another number each
// time.
func body(format string) func(*trial) {
	return func(x *trial) {
		x.body = format
		if strings.Contains(format, "%d") {
			x.body = fmt.Sprintf(format, x.n)
		}
	}
}

func (x *trial) message() { x.id = x.f.messages[x.inbox.ID] }

// held makes a message arrive that waits for a person.
func (x *trial) held() {
	e := mailbox.Arrival{
		Envelope: mail.Envelope{From: "bob@example.com", To: []string{x.inbox.Address}, Raw: []byte(fmt.Sprintf("From: bob@example.com\r\nSubject: Kohlrabi %d\r\n\r\nKohlrabi\r\n", x.n))},
		Auth:     mail.Results{DMARC: mail.Check{Result: "fail"}, Policy: "quarantine"}, Remote: "192.0.2.1",
	}
	if err := x.f.post.Receive(x.t.Context(), e); err != nil {
		x.t.Fatal(err)
	}
	list, _, err := x.f.post.Quarantine(x.t.Context(), x.manager(x.inbox), x.inbox.ID, "", 1)
	if err != nil || len(list) != 1 {
		x.t.Fatal(list, err)
	}
	x.id = list[0].ID
}

const savedDraft = `{"to":["bob@example.com"],"subject":"Kohlrabi","text":"t","attachments":[{"name":"a.txt","content_base64":"YQ==","content_type":"text/plain"}]}`

// draft saves a draft in the inbox.
func (x *trial) draft() {
	x.id = "drf_AAAAAAAAAAAAAAAA"
	if x.want < 400 {
		body := strings.Replace(savedDraft, "Kohlrabi", fmt.Sprintf("draft %d", x.n), 1)
		x.id = x.f.do(x.t, x.holder, "POST", "/v1/inboxes/"+x.inbox.ID+"/drafts", body).field(x.t, "id")
	}
	x.after = x.undraft
}

// undraft removes the drafts: an inbox has room for so many.
func (x *trial) undraft() {
	err := x.f.db.Update(x.t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(x.t.Context(), `delete from draft`)
		return err
	})
	if err != nil {
		x.t.Error(err)
	}
}

// key makes a key of the inbox, to be rotated or revoked.
func (x *trial) key() {
	if x.want >= 400 { // one that there is will do
		x.id = x.f.spare[x.inbox.ID]
		return
	}
	x.id = x.f.do(x.t, x.holder, "POST", "/v1/inboxes/"+x.inbox.ID+"/keys", `{"scope":"read"}`).field(x.t, "id")
}

// grant makes a grant over the inbox, to be revoked.
func (x *trial) grant() {
	if x.want >= 400 {
		x.id = x.f.spareGrant[x.inbox.ID]
		return
	}
	body := fmt.Sprintf(`{"expires_at":%q}`, time.Now().Add(time.Hour).Format(time.RFC3339))
	x.id = x.f.do(x.t, x.holder, "POST", "/v1/inboxes/"+x.inbox.ID+"/grants", body).field(x.t, "id")
}

// contextGrant makes a context grant of the inbox.
func (x *trial) contextGrant() {
	if x.want >= 400 {
		x.id = x.f.spareGrant[x.inbox.ID]
		return
	}
	body := fmt.Sprintf(`{"person":"ann","expires_at":%q}`, time.Now().Add(time.Hour).Format(time.RFC3339))
	x.id = x.f.do(x.t, x.holder, "POST", "/v1/inboxes/"+x.inbox.ID+"/context-grants", body).field(x.t, "id")
}

// webhook makes a webhook of the inbox.
func (x *trial) webhook() {
	x.id = x.f.do(x.t, x.holder, "POST", "/v1/inboxes/"+x.inbox.ID+"/webhooks", `{"url":"https://example.com/x"}`).field(x.t, "id")
	x.body, x.after = `{}`, func() { x.f.clearWebhooks(x.t) }
}

// action proposes something in inbox a, to be looked at and decided on.
func (x *trial) action() {
	x.id = x.f.do(x.t, "key a", "POST", "/v1/inboxes/"+x.f.a.ID+"/messages", fresh(x.n)).field(x.t, "id")
	a, err := x.f.gate.Action(x.t.Context(), x.f.person, x.id)
	if err != nil {
		x.t.Fatal(err)
	}
	x.body = fmt.Sprintf(`{"version":%d,"digest":%q,"approve":false,"reason":"no"}`, a.Version, a.Hex())
}

func (x *trial) digest() string {
	a, err := x.f.gate.Action(x.t.Context(), x.f.person, x.id)
	if err != nil {
		x.t.Fatal(err)
	}
	return a.Hex()
}

// suppressed puts an address on the lists of both projects.
func (x *trial) suppressed() {
	x.body = fmt.Sprintf(`{"address":"bob%d@example.com"}`, x.n)
	for _, who := range []string{"person", "foreign person"} {
		x.f.do(x.t, who, "POST", "/v1/suppression", x.body)
	}
}

func (x *trial) secret() {
	x.id = x.f.do(x.t, "person", "POST", "/v1/secrets", fmt.Sprintf(`{"name":"one-%d","value":"12345678","hosts":["a.example"]}`, x.n)).field(x.t, "id")
	x.body = `{"metadata":{"a":"b"}}`
}

// connection connects a mailbox of our project.
func (x *trial) connection() {
	x.id = x.f.do(x.t, "person", "POST", "/v1/connections", fmt.Sprintf(`{"kind":"imap","address":"one-%d@elsewhere.example","credential":"a secret"}`, x.n)).field(x.t, "id")
}

// permit grants a permit.
func (x *trial) permit() {
	err := x.f.db.Update(x.t.Context(), func(tx *store.Tx) error {
		p, err := permit.Grant(x.t.Context(), tx, permit.Permit{
			Project: x.f.person.Project, Sandbox: "i1", Kind: permit.Network, Hosts: []string{"a.example.com"}, Until: time.Now().Add(time.Hour), Action: fmt.Sprintf("act_%d", x.n), Decider: "person:ann",
		})
		x.id = p.ID
		return err
	})
	if err != nil {
		x.t.Fatal(err)
	}
	x.body = ""
}

func (x *trial) notified() { x.id, x.body = "rom_AAAAAAAAAAAAAAAAAAAAAAAAAA", "" }

func (x *trial) noRun() { x.id, x.body = "run_"+fmt.Sprint(x.n), "" }

// newRun returns the body of a proposal, with inputs as further members of the object.
func newRun(n int, inputs string) string {
	return fmt.Sprintf(`{"contract_text":"{version: 1, name: job, commands: {allow: [{run: 'true'}]}, files: {write: [/work], inputs: [{path: /in/a}]}}","task":"number %d","commands":[["true"]],`+
		`"answers":{"check":"none","cleanup":"none","export":"none"}%s}`, n, inputs)
}

// draftRun creates a draft, proposed with key a, that waits for its input.
func (x *trial) draftRun() {
	x.f.exec(x.t, `delete from run_event`)
	x.f.exec(x.t, `delete from run`)
	x.id = x.f.do(x.t, "key a", "POST", "/v1/runs", newRun(x.n, `,"inputs":[{"path":"/in/a","size":0,"sha256":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}]`)).field(x.t, "id")
	x.body = ""
}

// traced makes an operation on a sandbox of the project.
func (x *trial) traced() {
	x.id, x.body = fmt.Sprintf("i%d", x.n), ""
	h := x.f.traces.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		tracing.About(r.Context(), x.f.person.Project, x.id)
	}), func(*http.Request) string { return "create" })
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(x.t.Context(), http.MethodPost, "/", http.NoBody))
}

// started inserts a sandbox of the project, and records a program in it.
func (x *trial) started() {
	x.id, x.body = fmt.Sprintf("i%020d", x.n), ""
	who := auth.Principal{Kind: auth.Sandbox, ID: x.id, Project: x.f.person.Project}
	err := x.f.db.Update(x.t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(x.t.Context(), `insert into sandbox (id, project_id, template, state, reason, metadata, inbox_id, egress, options, execution, cpus, memory_mb, disk_mb, started_at, ends_at, paused_at, ended_at, restart, saved, server_id)
			values ($1, $2, 'base', 'running', '', '{}', '', '{}', '{}', '', 1000, 512, 100, 1, 1, 0, 0, 0, '', '')`, x.id, who.Project)
		return err
	})
	if err != nil {
		x.t.Fatal(err)
	}
	if !x.f.commands.Exec(x.t.Context(), who, sandbox.Exec{PID: 2, Path: "/bin/ls", Args: []string{"ls"}}) {
		x.t.Fatal("the program was refused")
	}
}

// connect connects a program to inbox a, and returns its id and its access token.
func (f *fixture) connect(t *testing.T, scope seal.Scope) (id, token string) {
	t.Helper()
	ctx, owner := t.Context(), auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: f.a.Project}
	const back, base = "https://app.example/", "https://x.example"
	verifier := strings.Repeat("a", 43)
	sum := sha256.Sum256([]byte(verifier))
	c, err := f.oauth.Register(ctx, "127.0.0.1", "App", []string{back})
	if err != nil {
		t.Fatal(err)
	}
	r, err := f.oauth.Ask(ctx, base, url.Values{
		"response_type": {"code"}, "client_id": {c.ID}, "redirect_uri": {back}, "code_challenge_method": {"S256"}, "code_challenge": {base64.RawURLEncoding.EncodeToString(sum[:])},
	})
	if err != nil {
		t.Fatal(err)
	}
	a, err := f.oauth.Allow(ctx, owner, r, oauth.Choice{Inbox: f.a.ID, Scope: scope, Key: f.secret("key a")})
	if err != nil {
		t.Fatal(err)
	}
	_, query, _ := strings.Cut(a.URL, "?")
	q, err := url.ParseQuery(query)
	if err != nil {
		t.Fatal(err)
	}
	got, err := f.oauth.Exchange(ctx, base, url.Values{"grant_type": {"authorization_code"}, "client_id": {c.ID}, "code": {q.Get("code")}, "redirect_uri": {back}, "code_verifier": {verifier}})
	if err != nil {
		t.Fatal(err)
	}
	list, err := f.oauth.Apps(ctx, owner)
	if err != nil || len(list) == 0 {
		t.Fatal(err)
	}
	return list[len(list)-1].ID, got.Access
}

// app connects a program, to be disconnected.
func (x *trial) app() {
	x.id, _ = x.f.connect(x.t, seal.Send)
	x.after = func() { // if the trial did not
		_ = x.f.oauth.Revoke(x.t.Context(), auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: x.f.a.Project}, x.id)
	}
}

// proposal proposes a permit.
func (x *trial) proposal() {
	box := auth.Principal{Kind: auth.Sandbox, ID: fmt.Sprintf("i%d", x.n), Project: x.f.person.Project}
	a, err := x.f.permits.Propose(x.t.Context(), box, "proposal", permit.Proposal{Hosts: []string{"a.example.com", "b.example.com"}})
	if err != nil {
		x.t.Fatal(err)
	}
	x.id, x.body = a.ID, `{"version":1,"hosts":["a.example.com"],"methods":["GET"],"for":"10m"}`
}

func (x *trial) domain() {
	x.id = x.f.do(x.t, "person", "POST", "/v1/domains", fmt.Sprintf(`{"domain":"one-%d.example"}`, x.n)).field(x.t, "id")
}

func (x *trial) manager(b directory.Inbox) auth.Principal {
	return auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: b.Project}
}

func (x *trial) delete(b directory.Inbox) {
	_, _ = x.f.post.Delete(x.t.Context(), x.manager(b), b.ID) // it may be deleted already
}

func (x *trial) undelete() {
	_, _ = x.f.post.Undelete(x.t.Context(), x.manager(x.inbox), x.inbox.ID) // it may be there
}

// principals makes the credentials that setup does not, and what the trials ask
// for.
func (f *fixture) principals(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	fatal := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	soon := time.Now().Add(time.Hour)
	open := func(client string) (auth.Principal, *seal.Key) {
		secret := f.secret(client)
		who, err := auth.CheckKey(ctx, f.db, secret)
		fatal(err)
		k, err := f.post.Keys.Open(ctx, who, secret, "")
		fatal(err)
		return who, k
	}
	who, a := open("key a")
	whoB, b := open("key b")
	add := func(name string, n keyring.NewKey) string {
		p, key, err := f.post.Keys.Add(ctx, who, a, n)
		fatal(err)
		f.byKey(name, key)
		return p.Credential
	}
	grant := func(name string, who auth.Principal, k *seal.Key, s seal.Scope) string {
		p, key, err := f.post.Keys.Grant(ctx, who, k, keyring.NewKey{Name: name, Scope: s, Expires: soon})
		fatal(err)
		f.byKey(name, key)
		return p.Credential
	}
	add("reading key a", keyring.NewKey{Scope: seal.Read})
	add("proposing key a", keyring.NewKey{Scope: seal.Propose})
	add("drafting key a", keyring.NewKey{Scope: seal.Draft})
	add("sending key a", keyring.NewKey{Scope: seal.Send})
	add("key a for a tool", keyring.NewKey{Scope: seal.Send, Tools: []string{"email_send"}})
	_, limited, err := f.post.Keys.Grant(ctx, who, a, keyring.NewKey{Name: "for a tool", Scope: seal.Propose, Expires: soon, Tools: []string{"email_send"}})
	fatal(err)
	f.byKey("grant a for a tool", limited)
	_, token := f.connect(t, seal.Propose)
	f.byKey("app of a", auth.Secret(token))
	expired := add("expired key a", keyring.NewKey{Scope: seal.Manage, Expires: soon})
	fatal(f.post.Keys.Revoke(ctx, who, "", add("revoked key a", keyring.NewKey{}), false))
	_, recovery, err := f.post.Keys.AddRecovery(ctx, who, a)
	fatal(err)
	f.byKey("recovery key a", recovery)

	f.spareGrant = map[string]string{}
	f.spareGrant[f.a.ID] = grant("reading grant a", who, a, seal.Read)
	both := grant("proposing grant a, b", who, a, seal.Propose)
	_, err = f.post.Keys.Extend(ctx, whoB, b, both, keyring.NewKey{Scope: seal.Propose, Expires: soon})
	fatal(err)
	f.spareGrant[f.b.ID] = grant("grant b", whoB, b, seal.Propose)
	ended := grant("ended grant a", who, a, seal.Read)
	formerly := grant("grant b, formerly a", who, a, seal.Read)
	_, err = f.post.Keys.Extend(ctx, whoB, b, formerly, keyring.NewKey{Scope: seal.Read, Expires: soon})
	fatal(err)
	fatal(f.post.Keys.Revoke(ctx, who, "", formerly, false))
	fatal(f.post.Keys.RevokeGrant(ctx, f.person, grant("revoked grant a", who, a, seal.Propose)))
	fatal(f.db.Update(ctx, func(tx *store.Tx) error {
		past := store.Time(time.Now().Add(-time.Hour))
		if _, err := tx.ExecContext(ctx, `update inbox_key set expires_at = $1 where credential_id in ($2, $3)`, past, expired, ended); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `update credential set expires_at = $1 where id = $2`, past, expired)
		return err
	}))

	foreign, k := open("foreign key")
	f.spareGrant[f.foreign.ID] = grant("foreign grant", foreign, k, seal.Propose)
	for name, project := range map[string]string{"account": f.a.Project, "foreign account": f.foreign.Project} {
		_, key, err := f.post.Keys.NewAccount(ctx, auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: project}, name)
		fatal(err)
		f.byKey(name, key)
	}
	var key auth.Secret
	f.deleted, key, err = f.post.CreateInbox(ctx, f.person, directory.NewInbox{Address: "deleted"}, "")
	fatal(err)
	f.byKey("key of a deleted inbox", key)
	_, err = f.post.Delete(ctx, f.person, f.deleted.ID)
	fatal(err)

	const raw = "From: bob@example.com\r\nSubject: Kohlrabi\r\nMIME-Version: 1.0\r\nContent-Disposition: attachment; filename=kohlrabi.txt\r\n\r\nKohlrabi\r\n"
	f.made = store.Time(time.Now())
	f.messages, f.threads, f.spare = map[string]string{}, map[string]string{}, map[string]string{}
	for client, b := range map[string]directory.Inbox{"key a": f.a, "key b": f.b, "foreign key": f.foreign} {
		who, _ := open(client)
		f.spare[b.ID] = who.ID
		f.messages[b.ID] = f.arrive(t, b, client, raw)
		f.threads[b.ID] = f.do(t, client, "GET", "/v1/inboxes/"+b.ID+"/messages/"+f.messages[b.ID], "").field(t, "thread")
	}
}

// tidy forgets the credentials that trials made: an inbox has room for so many.
func (f *fixture) tidy(t *testing.T) {
	t.Helper()
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		for _, table := range []string{"inbox_wrap", "inbox_key"} {
			if _, err := tx.ExecContext(t.Context(), `delete from `+table+` where credential_id in (select id from credential where created_at > $1)`, f.made); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// exec changes the database behind the server's back.
func (f *fixture) exec(t *testing.T, query string) {
	t.Helper()
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), query)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// secret returns what a client shows.
func (f *fixture) secret(client string) auth.Secret {
	return auth.Secret(strings.TrimPrefix(f.clients[client].header.Get("Authorization"), "Bearer "))
}

// TestIsolation tries every principal on every operation and inbox, and fails
// for a route that is in no row.
func TestIsolation(t *testing.T) {
	for _, rt := range new(Server).table() {
		if !slices.ContainsFunc(operations, func(o operation) bool { return o.method == rt.method && o.route == rt.path }) {
			t.Errorf("%s %s is in no row of operations: who may use it?", rt.method, rt.path)
		}
	}
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.principals(t)
		n := 0
		for _, o := range operations {
			on := targets
			if !strings.Contains(o.route, "{inbox}") {
				on = []target{{"a", "a"}}
			}
			refusals := map[string]string{} // by principal: what it is told of an inbox that is not its own
			for _, target := range on {
				for _, p := range principals {
					n++
					f.try(t, o, target, p, n, refusals)
				}
			}
		}
		for _, s := range f.secrets {
			if strings.Contains(f.log.String(), s) {
				t.Error("a key is in the log")
			}
		}
		t.Logf("%d trials", n)
	})
}

func (f *fixture) try(t *testing.T, o operation, target target, p principal, n int, refusals map[string]string) {
	t.Helper()
	x := &trial{t: t, f: f, n: n, target: target, inbox: f.a, holder: "key a", after: func() {}}
	switch target.inbox {
	case "b":
		x.inbox, x.holder = f.b, "key b"
	case "foreign":
		x.inbox, x.holder = f.foreign, "foreign key"
	}
	name := x.inbox.ID
	switch target.name {
	case "a by address":
		name = f.a.Address
	case "foreign":
		name = f.foreign.Address
	case "missing":
		name = "nobody@agents.test"
	case "hostile":
		name = "'; drop table\x00 inbox; --\xff"
	case "deleted":
		name = f.deleted.ID
	}
	x.want = http.StatusUnauthorized
	if p.kind != "" {
		x.want = o.who(p, target, o.ok)
	}
	if p.tools && !slices.Contains(forToolKeys, o.method+" "+o.route) {
		x.want = http.StatusForbidden
	}
	if o.prepare != nil {
		o.prepare(x)
	}
	path := strings.NewReplacer("{inbox}", url.PathEscape(name), "{id}", x.id, "{index}", "0").Replace(o.route) + x.query
	got := f.do(t, p.name, o.method, path, x.body)
	x.after()
	if strings.Contains(o.route, "key") || strings.Contains(o.route, "grants") || strings.Contains(o.route, "recover") {
		f.tidy(t)
	}
	if got.code != x.want {
		t.Errorf("%s %s (%s) as %s: got %d, want %d: %.300s", o.method, o.route, target.name, p.name, got.code, x.want, got.body)
	}
	if got.code < 400 {
		return
	}
	for _, word := range []string{"Kohlrabi", "kohlrabi", "bob@", f.foreign.ID} {
		if strings.Contains(got.body, word) && p.parts["foreign"] == "" {
			t.Errorf("%s %s (%s) as %s: the refusal tells: %s", o.method, o.route, target.name, p.name, got.body)
		}
	}
	// The attack: telling by the answer whether somebody else has an inbox.
	if target.name != "foreign" && target.name != "missing" || p.parts["foreign"] != "" || p.foreign {
		return
	}
	told := strings.NewReplacer(got.field(t, "requestId"), "", name, "").Replace(got.body)
	if other, ok := refusals[p.name]; ok && other != told {
		t.Errorf("%s %s as %s: an inbox that is foreign and one that is not there differ:\n%s\n%s", o.method, o.route, p.name, other, told)
	}
	refusals[p.name] = told
}

// TestPagesOfInboxes: each inbox is on one page.
func TestPagesOfInboxes(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		for _, name := range []string{"clara", "b-two", "b.one", "b0", "zoe"} {
			if got := f.do(t, "project", "POST", "/v1/inboxes", `{"address":"`+name+`"}`); got.code != 201 && len(name) > 2 {
				t.Fatal(got.body)
			}
		}
		var got []string
		for cursor := ""; ; {
			path := "/v1/inboxes?limit=2"
			if cursor != "" {
				path += "&cursor=" + cursor
			}
			var page struct {
				Inboxes []struct{ Address string }
				Next    string `json:"next_cursor"`
			}
			if err := json.Unmarshal([]byte(f.do(t, "person", "GET", path, "").body), &page); err != nil || len(got) > 10 {
				t.Fatal(err, got)
			}
			for _, b := range page.Inboxes {
				got = append(got, strings.TrimSuffix(b.Address, "@agents.test"))
			}
			if cursor = page.Next; cursor == "" {
				break
			}
		}
		if want := []string{"alice", "b-two", "b.one", "bella", "clara", "zoe"}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
		for _, bad := range []string{"cursor=*", "cursor=", "limit=0", "limit=1001", "deleted=maybe"} {
			if got := f.do(t, "person", "GET", "/v1/inboxes?"+bad, ""); got.code != 400 {
				t.Errorf("%s: %d", bad, got.code)
			}
		}
	})
}
