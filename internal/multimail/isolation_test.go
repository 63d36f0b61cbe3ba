package multimail

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A principal of the isolation test: what it is, in which project, and what it may do
// in which mailbox.
type principal struct {
	name    string
	kind    auth.Kind // empty: nobody, or who has no valid key any more
	foreign bool
	parts   map[string]seal.Scope
	account bool
}

var principals = []principal{
	{name: "nobody"},
	{name: "project", kind: auth.Project},
	{name: "person", kind: auth.Person},
	{name: "key a", kind: auth.Agent, parts: map[string]seal.Scope{"a": seal.Manage}},
	{name: "reading key a", kind: auth.Agent, parts: map[string]seal.Scope{"a": seal.Read}},
	{name: "proposing key a", kind: auth.Agent, parts: map[string]seal.Scope{"a": seal.Propose}},
	{name: "sending key a", kind: auth.Agent, parts: map[string]seal.Scope{"a": seal.Send}},
	{name: "revoked key a"},
	{name: "recovery key a", kind: auth.Recovery},
	{name: "key a for a tool", kind: auth.Recovery}, // as a recovery key, it does nothing here
	{name: "key b", kind: auth.Agent, parts: map[string]seal.Scope{"b": seal.Manage}},
	{name: "key of a deleted inbox", kind: auth.Agent},
	{name: "proposing grant a, b", kind: auth.Grant, parts: map[string]seal.Scope{"a": seal.Propose, "b": seal.Propose}},
	{name: "reading grant b", kind: auth.Grant, parts: map[string]seal.Scope{"b": seal.Read}},
	{name: "revoked grant a"},
	{name: "other account", kind: auth.Grant, account: true},
	{name: "foreign project", kind: auth.Project, foreign: true},
	{name: "foreign person", kind: auth.Person, foreign: true},
	{name: "foreign key", kind: auth.Agent, foreign: true, parts: map[string]seal.Scope{"foreign": seal.Manage}},
	{name: "foreign account", kind: auth.Grant, foreign: true, account: true},
}

func (p principal) manages() bool { return p.kind == auth.Project || p.kind == auth.Person }

// has reports whether p has a part in any mailbox that includes want.
func (p principal) has(want seal.Scope) bool {
	for _, s := range p.parts {
		if s.Includes(want) {
			return true
		}
	}
	return false
}

// targets are what a path names as the mailbox.
var targets = []struct{ name, inbox string }{
	{"a", "a"}, {"a by address", "a"}, {"b", "b"}, {"foreign", "foreign"}, {"missing", ""}, {"hostile", ""}, {"deleted", ""},
}

// A rule says which status a principal gets for a mailbox, if the operation would
// answer ok.
type rule func(p principal, inbox string, ok int) int

func when(may bool, ok int) int {
	if may {
		return ok
	}
	return http.StatusForbidden
}

// known in a mailbox: a principal with any part in it
func parted(p principal, inbox string, ok int) int { return when(p.parts[inbox] != "", ok) }

func scoped(want seal.Scope) rule {
	return func(p principal, inbox string, ok int) int { return when(p.parts[inbox].Includes(want), ok) }
}

var (
	reads    = scoped(seal.Read)
	proposes = scoped(seal.Send)
	changes  = scoped(readAndSend)
	holds    = scoped(seal.Manage)
	managers = func(p principal, inbox string, ok int) int {
		if inbox == "" || (inbox == "foreign") != p.foreign {
			return http.StatusNotFound
		}
		return ok
	}
	// known: managers of its project, and any key with a part in it.
	known rule = func(p principal, inbox string, ok int) int {
		if p.manages() {
			return managers(p, inbox, ok)
		}
		return parted(p, inbox, ok)
	}
	// steered: managers of its project, and its own full key.
	steered rule = func(p principal, inbox string, ok int) int {
		if p.manages() {
			return managers(p, inbox, ok)
		}
		return holds(p, inbox, ok)
	}

	// What names no mailbox.

	anybody     rule = func(_ principal, _ string, ok int) int { return ok }
	noKey       rule = func(principal, string, int) int { return http.StatusForbidden } // a key is told who may
	people      rule = func(p principal, _ string, ok int) int { return when(p.kind == auth.Person, ok) }
	onlyManager rule = func(p principal, _ string, ok int) int { return when(p.manages(), ok) }
	ofManagers  rule = func(p principal, _ string, ok int) int {
		if p.manages() && p.foreign {
			return http.StatusNotFound
		}
		return when(p.manages(), ok)
	}
	// readers: principals that can read a mailbox, or have none yet.
	readers rule = func(p principal, _ string, ok int) int { return when(p.has(seal.Read) || p.account || p.orphan(), ok) }
	writers rule = func(p principal, _ string, ok int) int {
		return when(p.has(readAndSend) || p.account || p.orphan(), ok)
	}
)

// orphan reports whether p has a valid key of a mailbox that is deleted.
func (p principal) orphan() bool { return p.name == "key of a deleted inbox" }

// A trial is one request, as its operation prepares it.
type trial struct {
	t     *testing.T
	f     *fixture
	n     int
	inbox directory.Inbox // the target's, or a where the target is none
	key   string          // the client with that inbox's full key
	want  int

	email, thread, id, query, body string
	after                          func()
}

// An operation is a route with who may use it.
type operation struct {
	method, route string
	who           rule
	ok            int
	prepare       func(*trial)
}

func body(s string) func(*trial) {
	return func(x *trial) {
		x.body = s
		if strings.Contains(s, "%d") {
			x.body = fmt.Sprintf(s, x.n)
		}
	}
}

// operations is the whole of this door: each route has its row here.
var operations = []operation{
	{"GET", "/v1/mailboxes", anybody, 200, nil},
	{"POST", "/v1/mailboxes", func(p principal, _ string, ok int) int { return when(p.manages() || p.account, ok) }, 201, body(`{"address_local":"new-%d"}`)},
	{"GET", "/v1/mailboxes/{mailbox}", known, 200, nil},
	{"PATCH", "/v1/mailboxes/{mailbox}", steered, 200, body(`{"display_name":"Number %d"}`)},
	{"PATCH", "/v1/mailboxes/{mailbox}/configure", steered, 200, body(`{"mcp_configured":1}`)},
	{"DELETE", "/v1/mailboxes/{mailbox}", steered, 200, func(x *trial) {
		x.after = func() {
			owner := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: x.inbox.Project}
			_, _ = x.f.post.Undelete(x.t.Context(), owner, x.inbox.ID) // it may be there
		}
	}},
	{"POST", "/v1/mailboxes/{mailbox}/request-upgrade", proposes, 200, func(x *trial) {
		x.exec(`delete from send_use`)
		x.body = `{"target_mode":"monitored","reason":"please"}`
	}},
	{"POST", "/v1/mailboxes/{mailbox}/upgrade", holds, 403, body(`{"code":"AAAA-AAAA-AAAA-AAAA"}`)}, // a wrong one
	{"POST", "/v1/mailboxes/{mailbox}/send", proposes, 202, body(`{"to":["bob@example.com"],"subject":"s %d","markdown":"t"}`)},
	{"POST", "/v1/mailboxes/{mailbox}/reply/{email}", changes, 202, body(`{"markdown":"t %d"}`)},
	{"GET", "/v1/mailboxes/{mailbox}/emails", reads, 200, nil},
	{"GET", "/v1/mailboxes/{mailbox}/emails/{email}", reads, 200, nil},
	{"GET", "/v1/mailboxes/{mailbox}/emails/{email}/attachments/{name}", reads, 200, nil},
	{"GET", "/v1/mailboxes/{mailbox}/emails/{email}/attachments/{name}/url", reads, 200, nil},
	{"POST", "/v1/mailboxes/{mailbox}/emails/{email}/cancel", proposes, 200, (*trial).proposed},
	{"PATCH", "/v1/mailboxes/{mailbox}/emails/{email}/schedule", proposes, 200, func(x *trial) {
		x.proposed()
		x.body = fmt.Sprintf(`{"subject":"other %d"}`, x.n)
	}},
	{"GET", "/v1/mailboxes/{mailbox}/emails/{email}/tags", reads, 200, nil},
	{"PUT", "/v1/mailboxes/{mailbox}/emails/{email}/tags", changes, 200, body(`{"tags":{"color":"red"}}`)},
	{"DELETE", "/v1/mailboxes/{mailbox}/emails/{email}/tags/{key}", changes, 200, nil},
	{"GET", "/v1/mailboxes/{mailbox}/threads/{thread}", reads, 200, nil},

	{"GET", "/v1/emails", readers, 200, nil},
	// Messages of a: who has a key of another mailbox does not find them.
	{"POST", "/v1/emails/{email}/report-spam", inMailboxA, 200, nil},
	{"POST", "/v1/emails/{email}/not-spam", inMailboxA, 200, nil},
	{"GET", "/v1/contacts", readers, 200, nil},
	{"POST", "/v1/contacts", func(p principal, i string, ok int) int {
		if p.orphan() { // it has no mailbox to keep it in; the accounts have made some above
			return http.StatusBadRequest
		}
		return writers(p, i, ok)
	}, 201, body(`{"name":"Carl","email":"carl%d@example.com"}`)},
	{"DELETE", "/v1/contacts/{id}", inMailboxA, 200, func(x *trial) {
		x.id = x.f.want(x.t, 201, "key a", "POST", "/v1/contacts", `{"name":"Carl","email":"carl@example.com"}`).text("id")
		x.after = func() { x.exec(`delete from inbox_note where kind = 'contact'`) }
	}},

	// No key decides, and nobody sees what waits elsewhere.
	{"GET", "/v1/oversight/pending", people, 200, nil},
	{"POST", "/v1/oversight/decide", func(p principal, _ string, ok int) int {
		if p.kind == auth.Person && p.foreign {
			return http.StatusNotFound
		}
		return when(p.kind == auth.Person, ok)
	}, 200, func(x *trial) {
		x.proposed()
		a, err := x.f.gate.Action(x.t.Context(), x.f.person, x.email)
		x.f.must(x.t, err)
		x.body = fmt.Sprintf(`{"email_id":%q,"action":"reject","reason":"no"}`, boundID(a))
	}},
	{"GET", "/v1/approve/{token}", noKey, 0, nil},
	{"POST", "/v1/approve/{token}", noKey, 0, nil},

	{"GET", "/v1/account", anybody, 200, nil},
	{"PATCH", "/v1/account", people, 501, nil},
	{"DELETE", "/v1/account", people, 501, nil},
	{"GET", "/v1/usage", readers, 200, nil},
	{"GET", "/v1/api-keys", func(p principal, _ string, ok int) int {
		return when(p.manages() || p.has(seal.Manage) || p.account || p.orphan(), ok)
	}, 200, nil},
	{"POST", "/v1/api-keys", func(p principal, _ string, ok int) int {
		if p.orphan() { // it has no mailbox that a key could open
			return http.StatusConflict
		}
		return when(p.has(seal.Manage) || p.account, ok)
	}, 201, func(x *trial) {
		x.body, x.after = fmt.Sprintf(`{"name":"number %d","scopes":["read","send"]}`, x.n), x.tidy
	}},
	{"PATCH", "/v1/api-keys/{id}", anybody, 501, nil},
	{"DELETE", "/v1/api-keys/{id}", func(p principal, _ string, ok int) int {
		switch {
		case p.manages() && !p.foreign, p.name == "key a":
			return ok
		case p.manages(), p.has(seal.Manage), p.account, p.orphan():
			return http.StatusNotFound
		}
		return http.StatusForbidden
	}, 200, func(x *trial) {
		x.id = x.f.spare[x.f.a.ID]
		if x.want == 200 {
			x.id = x.f.want(x.t, 201, "key a", "POST", "/v1/api-keys", `{"name":"x"}`).text("id")
			x.after = x.tidy
		}
	}},
	{"GET", "/v1/audit-log", people, 200, nil},
	{"GET", "/v1/suppression", onlyManager, 501, nil},
	{"DELETE", "/v1/suppression/{address}", onlyManager, 404, nil}, // nothing is suppressed

	{"GET", "/v1/webhooks", hooked, 200, nil},
	{"POST", "/v1/webhooks", hooked, 201, func(x *trial) {
		x.body = `{"url":"https://example.com/new","events":["message.received"]}`
		x.after = func() { x.exec(`delete from webhook`) }
	}},
	{"GET", "/v1/webhooks/{id}", ofHook, 200, (*trial).webhook},
	{"DELETE", "/v1/webhooks/{id}", ofHook, 200, (*trial).webhook},
	{"GET", "/v1/webhook-deliveries", hooked, 200, nil},

	{"GET", "/v1/domains", onlyManager, 200, nil},
	{"POST", "/v1/domains", onlyManager, 201, body(`{"domain":"one-%d.example"}`)},
	{"GET", "/v1/domains/{id}", ofManagers, 200, (*trial).domain},
	{"DELETE", "/v1/domains/{id}", ofManagers, 200, (*trial).domain},
	{"POST", "/v1/domains/{id}/verify", ofManagers, 200, (*trial).domain},
}

// The rules of things that a key has, wherever they are.
var (
	inMailboxA rule = func(p principal, _ string, ok int) int {
		switch {
		case p.parts["a"].Includes(readAndSend):
			return ok
		case p.has(readAndSend), p.account, p.orphan():
			return http.StatusNotFound
		}
		return http.StatusForbidden
	}
	hooked rule = func(p principal, _ string, ok int) int {
		if p.orphan() {
			return http.StatusNotFound // its mailbox is gone
		}
		return when(p.manages() || p.has(seal.Manage) || p.account, ok)
	}
	ofHook rule = func(p principal, _ string, ok int) int {
		switch p.name {
		case "key a":
			return ok
		case "reading key a", "proposing key a", "sending key a": // they see that it is there
			return http.StatusForbidden
		}
		return http.StatusNotFound
	}
)

// proposed proposes an email of the target's mailbox.
func (x *trial) proposed() {
	x.email = x.f.want(x.t, 202, x.key, "POST", "/v1/mailboxes/"+x.inbox.ID+"/send", fmt.Sprintf(`{"to":["bob@example.com"],"subject":"p %d","markdown":"t"}`, x.n)).text("id")
}

func (x *trial) webhook() {
	x.id = x.f.want(x.t, 201, "key a", "POST", "/v1/webhooks", `{"url":"https://example.com/x","events":["email.received"]}`).text("id")
	x.after = func() { x.exec(`delete from webhook`) }
}

func (x *trial) domain() {
	x.id = x.f.want(x.t, 201, "person", "POST", "/v1/domains", fmt.Sprintf(`{"domain":"two-%d.example"}`, x.n)).text("id")
}

func (x *trial) exec(query string) {
	x.t.Helper()
	x.f.update(x.t, func(tx *store.Tx) error {
		_, err := tx.ExecContext(x.t.Context(), query)
		return err
	})
}

// tidy forgets the keys that trials made: a mailbox has room for so many.
func (x *trial) tidy() {
	x.exec(`delete from inbox_wrap where credential_id in (select id from credential where kind = 'grant' and name like 'number %')`)
	x.exec(`delete from inbox_key where credential_id in (select id from credential where kind = 'grant' and name like 'number %')`)
}

// TestIsolation tries every principal on every operation and mailbox, and fails for a
// route that is in no row.
func TestIsolation(t *testing.T) {
	absent := func(rt route) bool {
		return slices.ContainsFunc(absences, func(a struct{ method, path, why string }) bool { return a.method == rt.method && a.path == rt.path })
	}
	for _, rt := range new(Server).table() {
		if !absent(rt) && !slices.ContainsFunc(operations, func(o operation) bool { return o.method == rt.method && o.route == rt.path }) {
			t.Errorf("%s %s is in no row of operations: who may use it?", rt.method, rt.path)
		}
		if rt.open && !absent(rt) && !strings.HasPrefix(rt.path, "/v1/approve/") {
			t.Errorf("%s %s needs no key", rt.method, rt.path)
		}
	}
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.principals(t)
		n := 0
		for _, o := range operations {
			on := targets
			switch {
			case !strings.Contains(o.route, "{mailbox}"):
				on = targets[:1]
			case strings.HasSuffix(t.Name(), "postgres"): // who may do what is the same there; what is no text is not
				on = targets[5:6]
			}
			refusals := map[string]string{}
			for _, target := range on {
				for _, p := range principals {
					n++
					f.try(t, o, target.name, target.inbox, p, n, refusals)
				}
			}
		}
		for _, a := range absences {
			if got := f.do(t, "nobody", a.method, strings.ReplaceAll(a.path, "{slug}", "x"), `{}`); got.code != 501 || !strings.Contains(got.body, "error") {
				t.Errorf("%s %s: got %d %s", a.method, a.path, got.code, got.body)
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

func (f *fixture) try(t *testing.T, o operation, target, inbox string, p principal, n int, refusals map[string]string) {
	t.Helper()
	x := &trial{t: t, f: f, n: n, inbox: f.a, key: "key a", after: func() {}}
	switch inbox {
	case "b":
		x.inbox, x.key = f.b, "key b"
	case "foreign":
		x.inbox, x.key = f.foreign, "foreign key"
	}
	name := x.inbox.ID
	switch target {
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
	x.email, x.thread, x.id = f.message[x.inbox.ID], f.thread[x.inbox.ID], f.spare[x.inbox.ID]
	x.want = http.StatusUnauthorized
	switch {
	case strings.HasPrefix(o.route, "/v1/approve/"):
		x.want = http.StatusForbidden
	case p.kind == auth.Recovery:
		x.want = http.StatusForbidden
	case p.orphan() && target == "deleted":
		x.want = http.StatusNotFound // it knows that there was one
	case p.kind != "":
		x.want = o.who(p, inbox, o.ok)
	}
	if o.prepare != nil {
		o.prepare(x)
	}
	path := strings.NewReplacer("{mailbox}", url.PathEscape(name), "{email}", x.email, "{thread}", x.thread, "{id}", x.id, "{name}", "kohlrabi.txt", "{key}", "color", "{token}", "abc", "{address}", "bob@example.com").Replace(o.route) + x.query
	got := f.do(t, p.name, o.method, path, x.body)
	x.after()
	if got.code != x.want {
		t.Errorf("%s %s (%s) as %s: got %d, want %d: %.300s", o.method, o.route, target, p.name, got.code, x.want, got.body)
	}
	if got.code < 400 {
		return
	}
	for _, word := range []string{"Kohlrabi", "kohlrabi", "bob@", f.foreign.ID} {
		if strings.Contains(got.body, word) && p.parts["foreign"] == "" {
			t.Errorf("%s %s (%s) as %s: the refusal tells: %s", o.method, o.route, target, p.name, got.body)
		}
	}
	// The attack: telling by the answer whether somebody else has a mailbox.
	if target != "foreign" && target != "missing" || p.parts["foreign"] != "" || p.foreign {
		return
	}
	told := strings.NewReplacer(name, "", fmt.Sprintf("%q", name), "").Replace(got.body)
	if other, ok := refusals[p.name]; ok && other != told {
		t.Errorf("%s %s as %s: a mailbox that is foreign and one that is not there differ:\n%s\n%s", o.method, o.route, p.name, other, told)
	}
	refusals[p.name] = told
}
