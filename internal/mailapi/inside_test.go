package mailapi

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/keyring"
	"postern/internal/oversight"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// sandbox adds a client inside a sandbox of an inbox, to which key is lent unless it is
// empty.
func (f *fixture) sandbox(t *testing.T, name, inbox string, key auth.Secret) auth.Principal {
	t.Helper()
	who := auth.Principal{Kind: auth.Sandbox, ID: "i" + strings.ReplaceAll(name, " ", ""), Project: f.person.Project, Inbox: inbox, Template: "base"}
	if key != "" {
		if err := f.post.Keys.Lend(t.Context(), f.person, who, key); err != nil {
			t.Fatal(err)
		}
	}
	f.clients[name] = client{f.srv.Inside(who), nil}
	return who
}

// What a sandbox needs for a route: nothing but its inbox, the lent key, or that it
// proposed what is named. For an order no sandbox has enough: a lent key reads.
type need int

const (
	needsInbox need = iota
	needsLoan
	needsOwn
	needsMore
	needsNothing
)

// insideRows is the door into sandboxes: each route that is open to them has its row here.
var insideRows = map[string]need{
	"GET /v1/me":              needsNothing,
	"GET /v1/inboxes":         needsNothing,
	"GET /v1/inboxes/{inbox}": needsInbox,

	"GET /v1/inboxes/{inbox}/messages":                          needsLoan,
	"POST /v1/inboxes/{inbox}/messages":                         needsInbox,
	"GET /v1/inboxes/{inbox}/messages/wait":                     needsLoan,
	"GET /v1/inboxes/{inbox}/messages/{id}":                     needsLoan,
	"GET /v1/inboxes/{inbox}/messages/{id}/raw":                 needsLoan,
	"GET /v1/inboxes/{inbox}/messages/{id}/attachments/{index}": needsLoan,
	"POST /v1/inboxes/{inbox}/messages/{id}/reply":              needsLoan,
	"POST /v1/inboxes/{inbox}/messages/{id}/forward":            needsLoan,
	"GET /v1/inboxes/{inbox}/threads":                           needsLoan,
	"GET /v1/inboxes/{inbox}/threads/{id}":                      needsLoan,
	"GET /v1/inboxes/{inbox}/search":                            needsLoan,
	"GET /v1/inboxes/{inbox}/contacts":                          needsLoan,
	"GET /v1/inboxes/{inbox}/events":                            needsLoan,
	"GET /v1/inboxes/{inbox}/labels":                            needsLoan,
	"POST /v1/inboxes/{inbox}/labels":                           needsMore,
	"GET /v1/inboxes/{inbox}/quarantine":                        needsLoan,
	"GET /v1/inboxes/{inbox}/quarantine/{id}":                   needsLoan,

	"GET /v1/inboxes/{inbox}/drafts":                          needsLoan,
	"POST /v1/inboxes/{inbox}/drafts":                         needsInbox,
	"GET /v1/inboxes/{inbox}/drafts/{id}":                     needsLoan,
	"POST /v1/inboxes/{inbox}/drafts/{id}":                    needsMore,
	"DELETE /v1/inboxes/{inbox}/drafts/{id}":                  needsMore,
	"GET /v1/inboxes/{inbox}/drafts/{id}/attachments/{index}": needsLoan,
	"POST /v1/inboxes/{inbox}/drafts/{id}/send":               needsMore,

	"GET /v1/inboxes/{inbox}/sending":             needsInbox,
	"GET /v1/inboxes/{inbox}/allowlist":           needsInbox,
	"POST /v1/inboxes/{inbox}/allowlist/requests": needsInbox,
	"POST /v1/inboxes/{inbox}/request-upgrade":    needsInbox,

	"GET /v1/actions":                 needsNothing,
	"GET /v1/actions/{id}":            needsInbox,
	"GET /v1/actions/{id}/comments":   needsInbox,
	"GET /v1/actions/{id}/deliveries": needsInbox,
	"POST /v1/actions/{id}/cancel":    needsOwn,
	"POST /v1/actions/{id}/revision":  needsOwn,

	"GET /v1/openapi.yaml":    needsNothing,
	"GET /v1/openapi.json":    needsNothing,
	"GET /v1/problems/{code}": needsNothing,
}

// A box is a sandbox of the isolation test.
type box struct {
	name  string
	inbox string // a, b or empty
	lent  bool
}

var boxes = []box{{"box lent", "a", true}, {"box", "a", false}, {"box after revocation", "a", false}, {"box of none", "", false}, {"box of b", "b", true}}

// status returns what a sandbox must get for a route on an inbox, which is empty if the
// path names none. What its path names by an id belongs to that inbox, and else to a.
func (b box) status(method, path, inbox string, ok int) int {
	need, open := insideRows[method+" "+path]
	named := strings.Contains(path, "{inbox}")
	switch {
	case !open:
		return http.StatusForbidden
	case need == needsNothing:
		return ok
	case named && (inbox == "" || b.inbox != inbox):
		return http.StatusForbidden
	case !named && b.inbox != "a":
		return http.StatusNotFound // somebody else's action
	case need == needsInbox, need == needsLoan && b.lent:
		return ok
	}
	return http.StatusForbidden
}

// TestInsideIsolation tries every route of this door from inside of sandboxes, with and
// without stolen keys. A route that has no row here is closed to all of them.
func TestInsideIsolation(t *testing.T) {
	for r := range insideRoutes {
		if _, ok := insideRows[r]; !ok {
			t.Errorf("%s is open to sandboxes and in no row of insideRows: what does it need?", r)
		}
	}
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.principals(t)
		whos := map[string]auth.Principal{
			"box lent": f.sandbox(t, "box lent", f.a.ID, f.secret("key a")), "box": f.sandbox(t, "box", f.a.ID, ""), "box of none": f.sandbox(t, "box of none", "", ""),
			"box of b": f.sandbox(t, "box of b", f.b.ID, f.secret("key b")), "box after revocation": f.lendAndRevoke(t, "box after revocation"),
		}
		names := map[string]string{"me": "me", "a": f.a.ID, "a by address": f.a.Address, "b": f.b.Address, "foreign": f.foreign.ID, "missing": "nobody@agents.test"}
		stolen := []string{f.secret("key a").Reveal(), f.secret("foreign key").Reveal(), f.secret("project").Reveal(), "pse_" + strings.Repeat("A", 26)}
		n, known := 0, map[string]bool{}
		for _, rt := range slices.Concat(f.srv.table(), f.srv.openTable()) {
			known[rt.method+" "+rt.path] = true
			for _, b := range boxes {
				f.clients[b.name] = client{f.srv.Inside(whos[b.name]), nil} // a new one, since each has a limit
				for target, name := range names {
					if !strings.Contains(rt.path, "{inbox}") && target != "me" {
						continue
					}
					for _, header := range []string{"", stolen[n%len(stolen)]} {
						n++
						f.tryInside(t, rt, b, target, name, header, n)
					}
				}
			}
		}
		for r := range insideRows {
			if !known[r] {
				t.Errorf("%s is in insideRows and no route", r)
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

// lendAndRevoke adds a client inside a sandbox to which a key was lent that is revoked.
func (f *fixture) lendAndRevoke(t *testing.T, name string) auth.Principal {
	t.Helper()
	who, err := auth.CheckKey(t.Context(), f.db, f.secret("key a"))
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.post.Keys.Open(t.Context(), who, f.secret("key a"), "")
	if err != nil {
		t.Fatal(err)
	}
	p, key, err := f.post.Keys.Add(t.Context(), who, k, keyring.NewKey{Scope: seal.Read})
	if err != nil {
		t.Fatal(err)
	}
	box := f.sandbox(t, name, f.a.ID, key)
	if err := f.post.Keys.Revoke(t.Context(), who, "", p.Credential, false); err != nil {
		t.Fatal(err)
	}
	return box
}

// tryInside makes one request from a sandbox.
func (f *fixture) tryInside(t *testing.T, rt route, b box, target, name, stolen string, n int) {
	t.Helper()
	inbox := map[string]string{"a": "a", "a by address": "a", "b": "b", "me": b.inbox}[target]
	x := &trial{t: t, f: f, n: 100_000 + n, target: targets[0], inbox: f.a, holder: "key a", after: func() {}}
	if inbox == "b" {
		x.inbox, x.holder = f.b, "key b"
	}
	i := slices.IndexFunc(operations, func(o operation) bool { return o.method == rt.method && o.route == rt.path })
	ok := http.StatusOK
	if i >= 0 {
		ok = operations[i].ok
	}
	x.want = b.status(rt.method, rt.path, inbox, ok)
	_, open := insideRows[rt.method+" "+rt.path]
	if open && i >= 0 && operations[i].prepare != nil {
		operations[i].prepare(x)
	}
	path := strings.NewReplacer("{inbox}", url.PathEscape(name), "{id}", cmp.Or(x.id, "x"), "{index}", "0", "{code}", "forbidden", "{", "", "}", "").Replace(rt.path) + x.query
	var header []string
	if stolen != "" {
		header = []string{"Authorization", "Bearer " + stolen, "X-Api-Key", stolen, "X-Postern-Inbox-Key", stolen}
	}
	f.exec(t, `delete from send_use`)
	got := f.do(t, b.name, rt.method, path, x.body, header...)
	x.after()
	if got.code != x.want {
		t.Errorf("%s %s (%s) from %s, key %.6s: got %d, want %d: %.300s", rt.method, rt.path, target, b.name, stolen, got.code, x.want, got.body)
	}
	if got.code < 400 {
		return
	}
	for _, word := range []string{"ohlrabi", "bob@", f.foreign.Address, f.foreign.ID} {
		if strings.Contains(strings.ReplaceAll(got.body, name, ""), word) {
			t.Errorf("%s %s (%s) from %s: the refusal tells: %s", rt.method, rt.path, target, b.name, got.body)
		}
	}
}

// TestInside follows a program that has nothing but HTTP: it proposes, sees that it waits,
// reads, and answers.
func TestInside(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.srv.conf.Offered = func(who auth.Principal) []string { return []string{string(who.Kind)} }
		f.sandbox(t, "lent", f.a.ID, f.secret("key a"))
		f.sandbox(t, "box", f.a.ID, "")
		f.sandbox(t, "none", "", "")
		f.arrive(t, f.a, "key a", "From: bob@example.com\r\nSubject: Kohlrabi\r\n\r\nKohlrabi\r\n")

		me := func(who string) (out api.Me) {
			t.Helper()
			got := f.do(t, who, "GET", "/v1/me", "")
			if err := json.Unmarshal([]byte(got.body), &out); err != nil || got.code != 200 {
				t.Fatalf("%s: %d %s", who, got.code, got.body)
			}
			return out
		}
		if m := me("lent"); m.Kind != "sandbox" || m.ID != "ilent" || m.Inbox == nil || m.Inbox.Address != f.a.Address || m.Inbox.Mode != api.ModeGatedSend || !m.CanRead || fmt.Sprint(m.Scopes) != "[read draft send]" ||
			m.Queue.Waiting != 0 || m.Queue.Limit != oversight.MaxPending || m.Sending == nil || m.Message.Recipients != 50 || fmt.Sprint(m.Tools) != "[sandbox]" {
			t.Errorf("lent: %+v", m)
		}
		if m := me("box"); m.CanRead || fmt.Sprint(m.Scopes) != "[draft send]" || !strings.Contains(m.ReadDetail, "X-Postern-Inbox-Key") {
			t.Errorf("not lent: %+v", m)
		}
		if m := me("none"); m.Inbox != nil || len(m.Scopes) != 0 || !strings.Contains(m.ReadDetail, "postern.inbox") {
			t.Errorf("no inbox: %+v", m)
		}
		if m := me("key a"); m.Kind != "agent" || m.Inbox.ID != f.a.ID || fmt.Sprint(m.Scopes) != "[full]" || !m.CanRead {
			t.Errorf("key: %+v", m)
		}
		if m := me("project"); m.Kind != "project" || fmt.Sprint(m.Scopes) != "[manage]" || m.CanRead || m.Inbox != nil {
			t.Errorf("project: %+v", m)
		}
		if m := me("person"); m.Kind != "person" || m.Role != "owner" || fmt.Sprint(m.Scopes) != "[manage decide]" {
			t.Errorf("person: %+v", m)
		}

		sent := f.do(t, "box", "POST", "/v1/inboxes/me/messages", `{"to":["bob@example.com"],"subject":"s","text":"t"}`)
		if sent.code != 202 || sent.field(t, "status") != "pending_send_approval" {
			t.Fatalf("propose: %d %s", sent.code, sent.body)
		}
		id := sent.field(t, "id")
		if m := me("box"); m.Queue.Waiting != 1 {
			t.Errorf("queue: %+v", m.Queue)
		}
		done := make(chan answered, 1)
		go func() { done <- f.do(t, "box", "GET", "/v1/actions/"+id+"?wait=60", "") }()
		a, err := f.gate.Action(t.Context(), f.person, id)
		if err != nil || a.Proposer != "sandbox:ibox" || a.Via != "rest" {
			t.Fatalf("%+v, %v", a, err)
		}
		if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: id, Version: a.Version, Digest: a.Hex(), Reason: "not now"}); err != nil {
			t.Fatal(err)
		}
		if got := <-done; got.field(t, "state") != "denied" || got.field(t, "reason") != "not now" {
			t.Errorf("waited: %s", got.body)
		}
		list := f.do(t, "lent", "GET", "/v1/inboxes/"+f.a.Address+"/search?q=kohlrabi", "")
		var found api.MessageList
		if err := json.Unmarshal([]byte(list.body), &found); err != nil || len(found.Messages) != 1 {
			t.Fatalf("search: %s", list.body)
		}
		if got := f.do(t, "lent", "POST", "/v1/inboxes/me/messages/"+found.Messages[0].ID+"/reply", `{"text":"thanks"}`); got.code != 202 {
			t.Errorf("reply: %s", got.body)
		}
		// Outside, too, a key may call its inbox me; who has several or none may not.
		if got := f.do(t, "key a", "GET", "/v1/inboxes/me", ""); got.field(t, "id") != f.a.ID {
			t.Errorf("me: %s", got.body)
		}
		if got := f.do(t, "project", "GET", "/v1/inboxes/me", ""); got.code != 404 {
			t.Errorf("the project's me: %s", got.body)
		}
	})
}

// TestInsideTakesNoMoreThanItsShare: the attack is code that asks without end.
func TestInsideTakesNoMoreThanItsShare(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.sandbox(t, "box", f.a.ID, "")
	refused := 0
	for range insideAtOnce + 50 {
		if got := f.do(t, "box", "GET", "/v1/problems/forbidden", ""); got.code == http.StatusTooManyRequests {
			refused++
		}
	}
	if refused == 0 {
		t.Error("nothing was refused")
	}
	// Another sandbox does not feel it.
	f.sandbox(t, "other", f.a.ID, "")
	if got := f.do(t, "other", "GET", "/v1/me", ""); got.code != 200 {
		t.Errorf("another sandbox: %s", got.body)
	}
}
