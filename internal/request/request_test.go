package request_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/connection"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/request"
	"postern/internal/rulebook"
	"postern/internal/store"
	"postern/internal/storetest"
)

// rules allow reading from a host, ask about other requests to it and deny deletions.
const rules = `rules:
  - id: read
    kind: net.request
    when: host == 'api.example.com' && method == 'GET' && !path.startsWith('/admin/')
    then: allow
  - id: no-delete
    kind: net.request
    when: host == 'api.example.com' && (method == 'DELETE' || path.startsWith('/admin/'))
    then: deny
    reason: nothing is deleted there
  - id: write
    kind: net.request
    when: host == 'api.example.com'
    then: ask
  - id: deploy
    kind: secret.use
    when: "'deploy' in secrets"
    then: ask
    who: ["role:owner"]
  - id: mails
    then: allow
    when: to.all(a, a.under('example.net'))
`

// holds makes text the policy.
func (f *fixture) holds(text string) {
	f.t.Helper()
	a := f.propose(rulebook.Change{Text: text})
	f.approve(a)
	if a = f.run(a); a.State != oversight.Done {
		f.t.Fatalf("got %s: %s", a.State, a.Result)
	}
}

// A server is a program on the fixture's database.
type server struct {
	*request.Admission
	gate    *oversight.Gate
	permits *permit.Register
	rules   *connection.Admission
}

func (f *fixture) start(hold time.Duration) server {
	book, gate := f.server(f.db)
	s := server{gate: gate, permits: permit.New(f.log, f.db, gate, permit.Config{}), rules: connection.New(f.log, f.db, book, gate, hold)}
	s.Admission = request.New(f.log, f.db, gate, s.rules, request.Permits{Register: s.permits}, hold)
	for _, g := range []*oversight.Gate{gate, f.gate} {
		g.Handle(policy.KindRequest, s.Admission)
		g.Handle(policy.KindSecret, s.Admission)
		g.Handle(policy.KindPermit, s.permits)
	}
	return s
}

func (f *fixture) waiting() []oversight.Action {
	f.t.Helper()
	list, err := f.gate.Actions(f.t.Context(), f.owner, oversight.Query{States: []oversight.State{oversight.Pending}})
	if err != nil {
		f.t.Fatal(err)
	}
	return list
}

func (f *fixture) read(id string) oversight.Action {
	f.t.Helper()
	a, err := f.gate.Action(f.t.Context(), f.owner, id)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func (f *fixture) box() auth.Principal {
	return auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.owner.Project, Template: "base"}
}

// used reports whether an approval was used, and with what result.
func (f *fixture) used(action string) (used bool, result string) {
	f.t.Helper()
	err := f.db.View(f.t.Context(), func(tx *store.Tx) error {
		err := tx.One(f.t.Context(), `select result from request_use where action_id = $1`, []any{action}, &result)
		if used = err == nil; errors.Is(err, store.ErrNotFound) {
			return nil
		}
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return used, result
}

// one returns the only action that waits.
func (f *fixture) one() oversight.Action {
	f.t.Helper()
	until(f.t, "one action waits", func() bool { return len(f.waiting()) > 0 })
	if n := len(f.waiting()); n != 1 {
		f.t.Fatalf("got %d actions that wait, want 1", n)
	}
	return f.read(f.waiting()[0].ID)
}

// decide decides on the only action that waits, and carries it out.
func (f *fixture) decide(yes bool) oversight.Action {
	f.t.Helper()
	a := f.one()
	err := f.gate.Decide(f.t.Context(), f.owner, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: yes, Reason: "as I please"})
	if err != nil {
		f.t.Fatal(err)
	}
	if !yes {
		return f.read(a.ID)
	}
	if a = f.run(a); a.State != oversight.Done {
		f.t.Fatalf("got %s: %s", a.State, a.Result)
	}
	return a
}

// until waits for something to become so.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it has not come to be: %s", what)
		}
	}
}

func get(method, path, body string, uses ...outgoing.Use) *outgoing.Request {
	p, query, _ := strings.Cut(path, "?")
	r := &outgoing.Request{
		Method: method, Scheme: "https", Host: "api.example.com", Port: 443, Path: p, Query: query, Header: http.Header{"Content-Type": {"application/json"}},
		Body: []byte(body), Whole: true, Size: int64(len(body)), Uses: uses,
	}
	for _, u := range uses {
		r.Header.Set("Authorization", "Bearer "+u.Sentinel)
	}
	return r
}

func secret(name, approval string) outgoing.Use {
	return outgoing.Use{ID: "sec_" + name, Secret: name, Sentinel: "pst_" + strings.Repeat("a", 30) + name, Where: "header Authorization", Approval: approval}
}

// ask judges r and holds it if a person is asked.
func (s server) ask(ctx context.Context, who auth.Principal, r *outgoing.Request) policy.Verdict {
	v := s.Judge(ctx, who, r)
	if v.Effect == policy.Ask {
		v = s.Hold(ctx, who, r, v)
	}
	return v
}

func TestRulesDecideOnRequests(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.holds(rules)
	s := f.start(time.Millisecond)
	ctx := t.Context()
	other := get("POST", "/", "")
	other.Host = "other.example.com"
	large := get("GET", "/", "")
	override := get("POST", "/v1", "")
	override.Header.Set("X-HTTP-Method-Override", "delete")
	dashes := get("POST", "/v1", "")
	dashes.Header["X_HTTP_METHOD_OVERRIDE"] = []string{"DELETE"}
	typed := func(kind, body string) *outgoing.Request {
		r := get("POST", "/v1", body)
		r.Header.Set("Content-Type", kind)
		return r
	}
	const form = "application/x-www-form-urlencoded"
	unread, packed, own := typed(form, ""), typed(form, "\x1f\x8b"), typed(form, "_method=POST")
	unread.Whole = false
	packed.Header.Set("Content-Encoding", "gzip")
	elsewhere := typed(form, "_method=DELETE")
	elsewhere.Host = "other.example.com"
	lenient := get("GET", "/", "", secret("k", "always"))
	lenient.Host = "api.example.net"
	for _, tt := range []struct {
		name string
		r    *outgoing.Request
		want policy.Effect
		rule string
	}{
		{"a read", get("GET", "/v1/orders", ""), policy.Allow, "read"},
		{"a write", get("POST", "/v1/orders", "{}"), policy.Ask, "write"},
		{"a deletion", get("DELETE", "/v1/orders/7", ""), policy.Deny, "no-delete"},
		{"another host", other, policy.Allow, ""},
		{"an unknown size", large, policy.Allow, "read"},
		{"a denied path", get("GET", "/admin/x", ""), policy.Deny, "no-delete"},
		{"dot segments", get("GET", "/v1/../admin/x", ""), policy.Deny, "no-delete"},
		{"escaped dot segments", get("GET", "/v1/%2e%2E/admin/x", ""), policy.Deny, "no-delete"},
		{"escaped twice", get("GET", "/v1/%252e%252e/admin/x", ""), policy.Deny, "no-delete"},
		{"empty segments", get("GET", "//admin/x", ""), policy.Deny, "no-delete"},
		{"an escaped letter", get("GET", "/%61dmin/x", ""), policy.Deny, "no-delete"},
		{"an escaped slash", get("GET", "/admin%2fx", ""), policy.Deny, "no-delete"},
		{"a backslash", get("GET", "/v1/..%5cadmin/x", ""), policy.Deny, "no-delete"},
		{"a path parameter", get("GET", "/v1/..;/admin/x", ""), policy.Deny, "no-delete"},
		{"a method in a header", override, policy.Deny, "no-delete"},
		{"a method in the query", get("POST", "/v1?_method=DELETE", ""), policy.Deny, "no-delete"},
		{"a method with underscores", dashes, policy.Deny, "no-delete"},
		{"the last of many methods", get("POST", "/v1?_method=A1&_method=A2&_method=A3&_method=DELETE", ""), policy.Deny, "no-delete"},
		{"a method in a form", typed(form, "a=b&%5Fmethod=delete"), policy.Deny, "no-delete"},
		{"a method in JSON", typed("application/json", `{"_method":"DELETE"}`), policy.Deny, "no-delete"},
		{"a method in a part", typed("multipart/form-data; boundary=b", "--b\r\nContent-Disposition: form-data; name=\"_method\"\r\n\r\nDELETE\r\n--b--"), policy.Deny, "no-delete"},
		{"a form that is not read", unread, policy.Deny, ""},
		{"a form that is compressed", packed, policy.Deny, ""},
		{"its own method in a form", own, policy.Ask, "write"},
		{"a method where no rule is about one", elsewhere, policy.Allow, ""},
		{"a secret that asks always", get("GET", "/", "", secret("k", "always")), policy.Ask, ""},
		{"a secret that asks at first", get("GET", "/", "", secret("k", "first")), policy.Ask, ""},
		{"a secret that never asks", get("GET", "/", "", secret("k", "never")), policy.Allow, "read"},
		{"an unknown setting", get("GET", "/", "", secret("k", "")), policy.Ask, ""},
		{"a secret that a rule asks about", get("GET", "/", "", secret("deploy", "never")), policy.Ask, "deploy"},
		{"a rule without a kind does not loosen a secret", lenient, policy.Ask, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if v := s.Judge(ctx, f.box(), tt.r); v.Effect != tt.want || v.Rule != tt.rule {
				t.Errorf("got %+v, want %s by %q", v, tt.want, tt.rule)
			}
		})
	}
	for host, want := range map[string]bool{"api.example.com": true, "www.example.com": false, "": true} {
		if got := s.Concerns(ctx, f.box(), host); got != want {
			t.Errorf("concerns %q: got %v, want %v", host, got, want)
		}
	}
}

func TestApprovedRequestIsMadeOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.holds(rules)
		servers := []server{f.start(time.Millisecond), f.start(time.Millisecond)}
		ctx := t.Context()
		r := func() *outgoing.Request { return get("POST", "/v1/orders", `{"n":1}`) }
		v := servers[0].ask(ctx, f.box(), r())
		a := f.one()
		if v.Effect != policy.Deny || !strings.Contains(v.Reason, a.ID) || !strings.Contains(v.Reason, "repeat the same request") {
			t.Fatalf("got %+v, want that it names %s", v, a.ID)
		}
		if servers[1].ask(ctx, f.box(), r()); len(f.waiting()) != 1 {
			t.Error("a repetition is another action")
		}
		f.decide(true)
		// Changed bytes, and another sandbox, need approvals of their own.
		changed := r()
		changed.Header.Set("X-A", "b")
		other := f.box()
		other.ID = "i2"
		for who, r := range map[auth.Principal]*outgoing.Request{f.box(): changed, other: r()} {
			if v := servers[0].ask(ctx, who, r); v.Effect != policy.Deny {
				t.Errorf("got %+v, want that it is asked about", v)
			}
		}
		// Many at once, in two servers: one is made.
		var made atomic.Int32
		var wg sync.WaitGroup
		for i := range 12 {
			wg.Go(func() {
				one := r()
				if servers[i%2].ask(ctx, f.box(), one).Effect == policy.Allow {
					made.Add(1)
					servers[i%2].Made(ctx, f.box(), one, "200, 17 bytes")
				}
			})
		}
		wg.Wait()
		if made.Load() != 1 {
			t.Errorf("made %d times, want once", made.Load())
		}
		if used, result := f.used(a.ID); !used || result != "200, 17 bytes" {
			t.Errorf("used: %v, with the result %q", used, result)
		}
		// A restarted server knows it, too.
		if v := f.start(time.Millisecond).ask(ctx, f.box(), r()); v.Effect != policy.Deny {
			t.Errorf("got %+v after a restart, want that it is asked about again", v)
		}
	})
}

// TestApprovalFromBeforeARestoreIsNotUsed: the original may have made the request since the
// copy was taken.
func TestApprovalFromBeforeARestoreIsNotUsed(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.holds(rules)
		ctx := t.Context()
		r := func() *outgoing.Request { return get("POST", "/v1/orders", `{"n":1}`) }
		f.start(time.Millisecond).ask(ctx, f.box(), r())
		first := f.decide(true)
		f.void = time.Now()
		restored := f.start(time.Millisecond)
		if v := restored.ask(ctx, f.box(), r()); v.Effect != policy.Deny {
			t.Errorf("got %+v, want that it is asked about again", v)
		}
		if again := f.decide(true); again.ID == first.ID {
			t.Errorf("asked again by %s, want a new action", again.ID)
		}
		if v := restored.ask(ctx, f.box(), r()); v.Effect != policy.Allow {
			t.Errorf("got %+v for what was approved since", v)
		}
	})
}

func TestHeldRequestGoesOnWhenApproved(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.holds(rules)
	s := f.start(time.Hour)
	for _, yes := range []bool{true, false} {
		done := make(chan policy.Verdict, 1)
		go func() { done <- s.ask(t.Context(), f.box(), get("POST", "/v1/orders", "held")) }()
		a := f.decide(yes)
		v := <-done
		if (v.Effect == policy.Allow) != yes || !strings.Contains(v.Reason, a.ID) || !yes && !strings.Contains(v.Reason, "as I please") {
			t.Errorf("approved %v: got %+v", yes, v)
		}
	}
	if v := s.ask(t.Context(), f.box(), get("POST", "/v1/orders", "held")); v.Effect != policy.Deny || len(f.waiting()) != 0 {
		t.Errorf("got %+v, want that a rejected request is refused without a new question", v)
	}
	// A program that gives up uses nothing.
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan policy.Verdict, 1)
	go func() { done <- s.ask(ctx, f.box(), get("POST", "/v1/orders", "gone")) }()
	a := f.one()
	cancel()
	if v := <-done; v.Effect != policy.Deny {
		t.Errorf("got %+v", v)
	}
	f.decide(true)
	if used, _ := f.used(a.ID); used {
		t.Error("the approval is used although the program gave up")
	}
}

func TestSwitchAndTimeEndApprovals(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.holds(rules)
		ctx := t.Context()
		s := f.start(time.Millisecond)
		r := func() *outgoing.Request { return get("POST", "/v1/orders", "x") }
		s.ask(ctx, f.box(), r())
		f.decide(true)
		sw, err := f.gate.SwitchOn(ctx, f.owner, oversight.Switch{Scope: oversight.ScopeCapability, Target: string(policy.KindRequest), Reason: "enough"})
		if err != nil {
			t.Fatal(err)
		}
		stopped := f.start(time.Millisecond)
		if v := stopped.Judge(ctx, f.box(), get("GET", "/", "")); v.Effect != policy.Deny || !strings.Contains(v.Reason, "enough") {
			t.Errorf("got %+v, want the switch's reason", v)
		}
		if !stopped.Concerns(ctx, f.box(), "www.example.com") {
			t.Error("a switch for requests does not concern every host")
		}
		if v := stopped.MayContinue(ctx, f.box(), get("GET", "/", "")); v.Effect != policy.Deny {
			t.Errorf("got %+v, want that requests under way end", v)
		}
		if err := f.gate.SwitchOff(ctx, f.owner, sw.ID); err != nil {
			t.Fatal(err)
		}
		if v := f.start(time.Millisecond).ask(ctx, f.box(), r()); v.Effect != policy.Deny || len(f.waiting()) != 1 {
			t.Errorf("got %+v, want that a switch in between ends the approval", v)
		}
		a := f.decide(true)
		// The attack: somebody who can write the database makes an old approval new.
		err = db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update action set settled_at = settled_at - $1 where id = $2`, (2 * time.Hour).Microseconds(), a.ID)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if v := f.start(time.Millisecond).ask(ctx, f.box(), r()); v.Effect != policy.Deny || len(f.waiting()) != 1 {
			t.Errorf("got %+v, want that an old approval does not count", v)
		}
		forged := f.one().ID
		if err := db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update action set state = 'done', settled_at = $1, decider = 'person:ann' where id = $2`, store.Time(time.Now()), forged)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if v := f.start(time.Millisecond).ask(ctx, f.box(), r()); v.Effect != policy.Deny {
			t.Errorf("got %+v, want that an approval in the database alone does not count", v)
		}
	})
}

func TestFirstUseOfASecretIsAGrant(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.holds(rules)
		ctx := t.Context()
		s := f.start(time.Millisecond)
		use := func(path string) *outgoing.Request { return get("GET", path, "", secret("github", "first")) }
		s.ask(ctx, f.box(), use("/1"))
		s.ask(ctx, f.box(), use("/2"))
		a := f.decide(true) // one question for both
		if a.Kind != policy.KindSecret {
			t.Errorf("got %s", a.Kind)
		}
		r := use("/3")
		if v := s.ask(ctx, f.box(), r); v.Effect != policy.Allow || len(r.Permits) != 1 {
			t.Fatalf("got %+v under %v, want a grant", v, r.Permits)
		}
		if v := s.MayContinue(ctx, f.box(), r); v.Effect != policy.Allow {
			t.Errorf("got %+v", v)
		}
		other := f.box()
		other.ID = "i2"
		if v := s.Judge(ctx, other, use("/3")); v.Effect != policy.Ask {
			t.Errorf("got %+v for another sandbox, want ask", v)
		}
		renamed := secret("github", "first")
		renamed.ID = "sec_new"
		if v := s.Judge(ctx, f.box(), get("GET", "/", "", renamed)); v.Effect != policy.Ask {
			t.Errorf("got %+v for a new secret of the same name, want ask", v)
		}
		if v := s.Judge(ctx, f.box(), get("GET", "/", "", secret("github", "always"))); v.Effect != policy.Ask {
			t.Errorf("got %+v for a secret that asks always by now, want ask", v)
		}
		if _, err := s.permits.End(ctx, f.owner, r.Permits[0]); err != nil {
			t.Fatal(err)
		}
		if v := s.MayContinue(ctx, f.box(), r); v.Effect != policy.Deny {
			t.Errorf("got %+v, want that the end of a grant ends requests under way", v)
		}
		if v := s.ask(ctx, f.box(), use("/4")); v.Effect != policy.Deny || len(f.waiting()) != 1 {
			t.Errorf("got %+v, want a new question", v)
		}
		f.decide(false)
		if v := s.ask(ctx, f.box(), use("/5")); v.Effect != policy.Deny || len(f.waiting()) != 0 {
			t.Errorf("got %+v, want that a rejected use is refused for each request", v)
		}
	})
}

func TestAlwaysAsksAboutEachRequest(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.holds(rules)
	ctx := t.Context()
	s := f.start(time.Millisecond)
	use := func() *outgoing.Request { return get("GET", "/1", "", secret("github", "always")) }
	s.ask(ctx, f.box(), use())
	f.decide(true)
	if v := s.ask(ctx, f.box(), use()); v.Effect != policy.Allow {
		t.Errorf("got %+v, want allow", v)
	}
	if v := s.ask(ctx, f.box(), use()); v.Effect != policy.Deny || len(f.waiting()) != 1 {
		t.Errorf("got %+v, want a new question", v)
	}
	f.decide(false)
	// Who approves the request approves its secret, but not one that a rule asks about.
	post := func(u outgoing.Use) *outgoing.Request { return get("POST", "/1", "{}", u) }
	s.ask(ctx, f.box(), post(secret("github", "always")))
	if a := f.decide(true); a.Kind != policy.KindRequest {
		t.Errorf("got %s", a.Kind)
	}
	if v := s.ask(ctx, f.box(), post(secret("github", "always"))); v.Effect != policy.Allow {
		t.Errorf("got %+v, want allow", v)
	}
	s.ask(ctx, f.box(), post(secret("deploy", "never")))
	f.decide(true)
	if v := s.ask(ctx, f.box(), post(secret("deploy", "never"))); v.Effect != policy.Deny {
		t.Errorf("got %+v, want that the secret is asked about as well", v)
	}
	if a := f.decide(true); a.Kind != policy.KindSecret || a.Rule != "deploy" {
		t.Errorf("got %s by %q", a.Kind, a.Rule)
	}
	if v := s.ask(ctx, f.box(), post(secret("deploy", "never"))); v.Effect != policy.Allow {
		t.Errorf("got %+v, want allow after both", v)
	}
}

// TestFloodOfRequests is the attacker's: code that makes many requests asks a person a
// few times, and holds a few.
func TestFloodOfRequests(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.holds(rules)
	s := f.start(time.Millisecond)
	for i := range 30 {
		if v := s.ask(t.Context(), f.box(), get("POST", "/", strings.Repeat("x", i+1))); v.Effect != policy.Deny {
			t.Fatalf("got %+v", v)
		}
	}
	if n := len(f.waiting()); n != 20 {
		t.Errorf("got %d actions that wait, want 20", n)
	}
	other := f.box()
	other.ID = "i2"
	for i := range 8 {
		s.ask(t.Context(), other, get("POST", "/", strings.Repeat("x", 10<<20-i)))
	}
	if n := len(f.waiting()); n != 26 {
		t.Errorf("got %d actions that wait, want 26: of 10 MiB each, 6 fit in 64 MiB", n)
	}
	long := f.start(time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var refused atomic.Int32
	for range 40 {
		wg.Go(func() {
			if v := long.ask(ctx, f.box(), get("POST", "/", "x")); strings.Contains(v.Reason, "wait for a person already") {
				refused.Add(1)
			}
		})
	}
	until(t, "all but those that are held are refused", func() bool { return refused.Load() == 40-16 })
	cancel()
	wg.Wait()
}

// TestCallsOfToolsAreJudgedByEveryMethod: a rule about the method of a call counts for each
// that a server may read.
func TestCallsOfToolsAreJudgedByEveryMethod(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.holds("rules:\n  - {id: no-puts, kind: mcp.call, when: \"method == 'PUT'\", then: deny}\n")
	s := f.start(time.Millisecond)
	for name, want := range map[string]policy.Effect{"X-Other": policy.Allow, "X_HTTP_METHOD": policy.Deny} {
		r := get("POST", "/mcp", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"erase","arguments":{}}}`)
		r.Header = http.Header{"Content-Type": {"application/json"}, name: {"PUT"}}
		if v := s.Judge(t.Context(), f.box(), r); v.Effect != want {
			t.Errorf("%s: got %+v, want %s", name, v, want)
		}
	}
}
