package permit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/store"
	"postern/internal/storetest"
)

type fixture struct {
	t          *testing.T
	db         *store.DB
	gate       *oversight.Gate
	reg        *permit.Register
	owner, box auth.Principal
}

func setup(t *testing.T, db *store.DB, conf permit.Config) *fixture {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	f := &fixture{t: t, db: db}
	book := rulebook.New(log, db)
	f.gate = oversight.NewGate(log, db, book)
	f.reg = permit.New(log, db, f.gate, conf)
	f.gate.Handle(policy.KindPermit, f.reg)
	f.gate.Handle(policy.KindChange, book)
	f.owner = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
		f.owner.Project, _, err = auth.NewProject(t.Context(), tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	f.box = auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.owner.Project, Template: "base"}
	return f
}

func (f *fixture) propose(who auth.Principal, p permit.Proposal) oversight.Action {
	f.t.Helper()
	a, err := f.reg.Propose(f.t.Context(), who, "proposal", p)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func (f *fixture) decide(a oversight.Action, who auth.Principal, approve bool) error {
	return f.gate.Decide(f.t.Context(), who, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: approve, Reason: "so be it"})
}

// approved returns the action after an owner has approved it and it was carried out.
func (f *fixture) approved(a oversight.Action) oversight.Action {
	f.t.Helper()
	if err := f.decide(a, f.owner, true); err != nil {
		f.t.Fatal(err)
	}
	if _, err := f.gate.RunOne(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	a, err := f.gate.Action(f.t.Context(), f.owner, a.ID)
	if err != nil || a.State != oversight.Done {
		f.t.Fatalf("got %s: %s, %v", a.State, a.Result, err)
	}
	return a
}

func (f *fixture) allows(who auth.Principal, host string, port uint16) bool {
	v, _ := f.reg.Allows(f.t.Context(), who, host, port)
	return v.Effect == policy.Allow
}

func TestAnOwnerOpensHostsForATime(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, permit.Config{})
		if f.allows(f.box, "api.example.com", 443) || f.allows(f.box, "", 443) {
			t.Error("a host is open without any permit")
		}
		a := f.propose(f.box, permit.Proposal{Hosts: []string{"API.example.com", "*.cdn.example.net"}, Why: "to build"})
		if again := f.propose(f.box, permit.Proposal{Hosts: []string{"*.cdn.example.net", "api.example.com"}, Why: "to build"}); again.ID != a.ID {
			t.Error("the same proposal asks a person twice")
		}
		if a.State != oversight.Pending || f.allows(f.box, "api.example.com", 443) {
			t.Errorf("got %s, want that it waits", a.State)
		}
		reviewer := f.owner
		reviewer.ID, reviewer.Role = "bob", auth.Reviewer
		for _, who := range []auth.Principal{f.box, reviewer, {Kind: auth.Project, ID: "k", Project: f.owner.Project}} {
			if err := f.decide(a, who, true); !errors.Is(err, auth.ErrForbidden) && !errors.Is(err, store.ErrNotFound) {
				t.Errorf("%s approved: %v", who, err)
			}
		}
		a = f.approved(a)
		other := f.box
		other.ID = "i2"
		foreign := f.box
		foreign.Project = "prj_other"
		for _, tt := range []struct {
			who  auth.Principal
			host string
			port uint16
			want bool
		}{
			{f.box, "api.example.com", 443, true},
			{f.box, "api.example.com", 80, true},
			{f.box, "api.example.com", 0, true},
			{f.box, "", 443, true},
			{f.box, "x.cdn.example.net", 443, true},
			{f.box, "cdn.example.net", 443, false},
			{f.box, "xcdn.example.net", 443, false},
			{f.box, "a.api.example.com", 443, false},
			{f.box, "api.example.com", 22, false},
			{f.box, "example.com", 443, false},
			{other, "api.example.com", 443, false},
			{foreign, "api.example.com", 443, false},
			{f.owner, "api.example.com", 443, false},
		} {
			if got := f.allows(tt.who, tt.host, tt.port); got != tt.want {
				t.Errorf("%s to %s:%d: got %v, want %v", tt.who, tt.host, tt.port, got, tt.want)
			}
		}
		list, err := f.reg.List(t.Context(), f.box, permit.Query{})
		if err != nil || len(list) != 1 || list[0].Action != a.ID || list[0].Decider != "person:ann" || list[0].Why != "to build" {
			t.Fatalf("got %+v, %v", list, err)
		}
		if mine, err := f.reg.List(t.Context(), other, permit.Query{}); err != nil || len(mine) != 0 {
			t.Errorf("another sandbox sees %+v, %v", mine, err)
		}
		if _, err := f.reg.End(t.Context(), f.box, list[0].ID); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a sandbox ended its permit: %v", err)
		}
		if _, err := f.reg.End(t.Context(), reviewer, list[0].ID); err != nil {
			t.Fatal(err)
		}
		if f.allows(f.box, "api.example.com", 443) {
			t.Error("a permit that was ended still opens its hosts")
		}
	})
}

func TestPermitsForRequestsAreInspected(t *testing.T) {
	f := setup(t, storetest.SQLite(t), permit.Config{})
	ctx := t.Context()
	f.approved(f.propose(f.box, permit.Proposal{Hosts: []string{"api.example.com"}, Methods: []string{"get", "POST"}, Paths: []string{"/v1/*", "/health"}}))
	if v, inspect := f.reg.Allows(ctx, f.box, "api.example.com", 443); v.Effect != policy.Allow || !inspect {
		t.Errorf("got %+v, %v, want that it is inspected", v, inspect)
	}
	for _, tt := range []struct {
		method, path string
		want         bool
	}{
		{"GET", "/v1/x", true},
		{"POST", "/v1/x/y%20z", true},
		{"GET", "/health", true},
		{"DELETE", "/v1/x", false},
		{"get", "/v1/x", false},
		{"GET", "/v1", false},
		{"GET", "/health/x", false},
		{"GET", "/admin", false},
		{"GET", "/v1/../admin", false},
		{"GET", "/v1/%2e%2e/admin", false},
		{"GET", "/v1/.%2E/admin", false},
		{"GET", "/v1/..%2fadmin", false},
		{"GET", "/v1/..%5cadmin", false},
		{"GET", `/v1/..\admin`, false},
		{"GET", "/v1/%252e%252e/admin", false},
		{"GET", "/v1/..;/admin", false},
		{"GET", "/v1//../admin", false},
		{"GET", "//v1/x", false},
		{"GET", "/v1/%00", false},
		{"GET", "/v1/%zz", false},
		{"GET", "*", false},
		{"GET", "", false},
	} {
		if v := f.reg.Find(ctx, f.box, to("api.example.com", tt.method, tt.path, nil, "")); (v.Effect == policy.Allow) != tt.want {
			t.Errorf("%s %s: got %+v, want %v", tt.method, tt.path, v, tt.want)
		}
	}
	if v := f.reg.Find(ctx, f.box, to("example.com", "GET", "/v1/x", nil, "")); v.Effect == policy.Allow {
		t.Error("another host is allowed")
	}
}

// to is a request to a host, with a body that is whole.
func to(host, method, target string, header http.Header, body string) *outgoing.Request {
	path, query, _ := strings.Cut(target, "?")
	return &outgoing.Request{
		Method: method, Scheme: "https", Host: host, Port: 443, Path: path, Query: query, Header: header, Body: []byte(body), Whole: true, Size: int64(len(body)),
	}
}

// TestPermitsAllowEveryMethodOfARequest: a permit for one method lets no request through
// of which a server may read another one.
func TestPermitsAllowEveryMethodOfARequest(t *testing.T) {
	f := setup(t, storetest.SQLite(t), permit.Config{})
	ctx := t.Context()
	const host = "api.example.com"
	f.approved(f.propose(f.box, permit.Proposal{Hosts: []string{host}, Methods: []string{"POST", "PUT"}, Paths: []string{"/v1/*"}}))
	f.approved(f.propose(f.box, permit.Proposal{Hosts: []string{host}, Methods: []string{"DELETE"}, Paths: []string{"/v1/*"}}))
	f.approved(f.propose(f.box, permit.Proposal{Hosts: []string{host}, Paths: []string{"/any/*"}}))
	form, text := http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}, http.Header{"Content-Type": {"application/json"}}
	half := to(host, "POST", "/v1/x", form, "a=")
	half.Whole = false
	packed := form.Clone()
	packed.Set("Content-Encoding", "gzip")
	for name, tt := range map[string]struct {
		r    *outgoing.Request
		want bool
	}{
		"plain":                          {to(host, "POST", "/v1/x?a=b", form, "a=b"), true},
		"another method that is allowed": {to(host, "POST", "/v1/x", form, "_method=PUT"), true},
		"its own method":                 {to(host, "POST", "/v1/x", http.Header{"X-Http-Method-Override": {"POST"}}, ""), true},
		"a header":                       {to(host, "POST", "/v1/x", http.Header{"X-HTTP-Method-Override": {"PATCH"}}, ""), false},
		"a header for OData":             {to(host, "POST", "/v1/x", http.Header{"X-Http-Method": {"MERGE"}}, ""), false},
		"the query":                      {to(host, "POST", "/v1/x?_method=PATCH", nil, ""), false},
		"a form":                         {to(host, "POST", "/v1/x", form, "a=b&_method=PATCH"), false},
		"JSON":                           {to(host, "POST", "/v1/x", text, `{"_method":"PATCH"}`), false},
		"the method of another permit":   {to(host, "POST", "/v1/x", form, "_method=DELETE"), false},
		"a body that is not read":        {half, false},
		"a compressed body":              {to(host, "POST", "/v1/x", packed, "\x1f\x8b"), false},
		"a permit for every method":      {to(host, "POST", "/any/x", form, "_method=PATCH"), true},
	} {
		if v := f.reg.Find(ctx, f.box, tt.r); (v.Effect == policy.Allow) != tt.want {
			t.Errorf("%s: got %+v, want %v", name, v, tt.want)
		}
		if _, ok := f.reg.Request(ctx, f.box, tt.r, "rule"); ok != (tt.want && tt.r.Path != "/any/x") {
			t.Errorf("%s: answers a rule: %v", name, ok)
		}
	}
}

func TestProposalsAreCheckedAndOnlyNarrowed(t *testing.T) {
	f := setup(t, storetest.SQLite(t), permit.Config{})
	ctx := t.Context()
	for _, body := range []string{
		`{}`, `{"hosts":[]}`, `{"hosts":["localhost"]}`, `{"hosts":["10.0.0.1"]}`, `{"hosts":["127.1"]}`, `{"hosts":["[::1]"]}`, `{"hosts":["metadata.google.internal"]}`,
		`{"hosts":["*"]}`, `{"hosts":["*.com"]}`, `{"hosts":["*.co.uk"]}`, `{"hosts":["a.*.example.com"]}`, `{"hosts":["https://a.example.com"]}`, `{"hosts":["a.example.com:443"]}`,
		`{"hosts":["а.example.com"]}`, `{"hosts":["a.example.com"],"methods":["CONNECT"]}`, `{"hosts":["a.example.com"],"methods":["TRACE"]}`,
		`{"hosts":["a.example.com"],"paths":["v1"]}`, `{"hosts":["a.example.com"],"paths":["/v1*"]}`, `{"hosts":["a.example.com"],"paths":["/*/x"]}`, `{"hosts":["a.example.com"],"paths":["/a/../b"]}`,
		`{"hosts":["a.example.com"],"paths":["/a?b"]}`, `{"hosts":["a.example.com"],"for":"10s"}`, `{"hosts":["a.example.com"],"for":"31d"}`, `{"hosts":["a.example.com"],"for":"-1h"}`, `{"hosts":["a.example.com"],"for":"99999d"}`,
		`{"hosts":["a.example.com"],"scope":"all"}`, `{"hosts":["a.example.com"],"port":25}`, `{"hosts":["a.example.com"],"port":8443,"methods":["GET"]}`, `{"hosts":["a.example.com"],"port":70000}`,
		`{"hosts":["a.example.com"],"why":"a\u202eb"}`, `{"hosts":["a.example.com"],"why":"` + strings.Repeat("x", 501) + `"}`, `{"hosts":["a.example.com"],"sandbox":"i2"}`, `{"hosts":["a.example.com"]}{}`, `null`, `[]`, ``,
	} {
		if p, err := parse([]byte(body)); !errors.Is(err, permit.ErrInvalid) {
			t.Errorf("%s: got %+v, %v, want that it is refused", body, p, err)
		}
	}
	asked := permit.Proposal{Hosts: []string{"*.example.com", "b.example.net"}, Methods: []string{"GET", "POST"}, Paths: []string{"/v1/*"}, For: permit.Duration(2 * time.Hour), Scope: permit.ForProject, Why: "w"}
	a := f.propose(f.box, asked)
	for name, change := range map[string]func(*permit.Proposal){
		"another host":     func(p *permit.Proposal) { p.Hosts = []string{"c.example.net"} },
		"the name above":   func(p *permit.Proposal) { p.Hosts = []string{"example.com"} },
		"a wider pattern":  func(p *permit.Proposal) { p.Hosts = []string{"*.example.net"} },
		"another method":   func(p *permit.Proposal) { p.Methods = []string{"DELETE"} },
		"every method":     func(p *permit.Proposal) { p.Methods = nil },
		"every path":       func(p *permit.Proposal) { p.Paths = nil },
		"another path":     func(p *permit.Proposal) { p.Paths = []string{"/v2/*"} },
		"a path above":     func(p *permit.Proposal) { p.Paths = []string{"/*"} },
		"a longer time":    func(p *permit.Proposal) { p.For = permit.Duration(3 * time.Hour) },
		"another port":     func(p *permit.Proposal) { p.Methods, p.Paths, p.Port = nil, nil, 8443 },
		"an address":       func(p *permit.Proposal) { p.Hosts = []string{"10.0.0.1"} },
		"nothing at all":   func(p *permit.Proposal) { p.Hosts = nil },
		"a path with dots": func(p *permit.Proposal) { p.Paths = []string{"/v1/../x"} },
	} {
		n := asked
		change(&n)
		if _, err := f.reg.Narrow(ctx, f.owner, a.ID, a.Version, n); !errors.Is(err, permit.ErrWider) && !errors.Is(err, permit.ErrInvalid) {
			t.Errorf("%s: got %v, want that it is refused", name, err)
		}
	}
	n := permit.Proposal{Hosts: []string{"a.example.com"}, Methods: []string{"GET"}, Paths: []string{"/v1/models"}, For: permit.Duration(time.Hour), Scope: permit.ForSandbox}
	if _, err := f.reg.Narrow(ctx, f.box, a.ID, a.Version, n); !errors.Is(err, auth.ErrForbidden) {
		t.Errorf("a sandbox narrowed: %v", err)
	}
	b, err := f.reg.Narrow(ctx, f.owner, a.ID, a.Version, n)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.decide(a, f.owner, true); !errors.Is(err, oversight.ErrStale) {
		t.Errorf("what was proposed at first was approved after it was narrowed: %v", err)
	}
	b = f.approved(b)
	p, box, err := permit.Of(b)
	if err != nil || box != "i1" || p.Why != "w" || p.Hosts[0] != "a.example.com" {
		t.Errorf("got %+v of %s, %v", p, box, err)
	}
	if !f.allows(f.box, "a.example.com", 443) || f.allows(f.box, "b.example.com", 443) || f.allows(f.box, "b.example.net", 443) {
		t.Error("the permit is not what was approved")
	}
}

func TestAnEndOfAPermitIsReported(t *testing.T) {
	f := setup(t, storetest.SQLite(t), permit.Config{})
	f.approved(f.propose(f.box, permit.Proposal{Hosts: []string{"a.example.com"}, Scope: permit.ForProject}))
	changes := make(chan string, 100)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- f.reg.Run(ctx, func() []string { return []string{f.box.Project} }, func(_ context.Context, project string) { changes <- project })
	}()
	defer func() { cancel(); <-done }()
	<-changes // the first read
	other := f.box
	other.ID = "i2"
	if !f.allows(other, "a.example.com", 443) {
		t.Fatal("a permit of the project is not for its other sandboxes")
	}
	if _, err := f.gate.SwitchOn(ctx, f.owner, oversight.Switch{Scope: oversight.ScopeCapability, Target: string(policy.KindPermit), Reason: "stop"}); err != nil {
		t.Fatal(err)
	}
	if project := <-changes; project != f.box.Project || f.allows(other, "a.example.com", 443) {
		t.Error("a switch did not end the permit")
	}
	list, err := f.reg.List(ctx, f.owner, permit.Query{All: true})
	if err != nil || len(list) != 1 || list[0].EndedBy != "person:ann" {
		t.Errorf("got %+v, %v", list, err)
	}
}

func TestPermitsThatNobodyApprovedDoNotHold(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, permit.Config{})
		f.approved(f.propose(f.box, permit.Proposal{Hosts: []string{"a.example.com"}}))
		if !f.allows(f.box, "a.example.com", 443) {
			t.Fatal("the permit does not hold")
		}
		for _, statement := range []string{
			`update permit set hosts = '["b.example.com"]'`,
			`update permit set hosts = '["a.example.com"]', until_at = until_at + 1000000`,
			`update permit set until_at = until_at - 1000000, sandbox_id = ''`,
		} {
			err := db.Update(t.Context(), func(tx *store.Tx) error {
				_, err := tx.ExecContext(t.Context(), statement)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			reg := permit.New(slog.New(slog.DiscardHandler), db, f.gate, permit.Config{})
			for _, host := range []string{"a.example.com", "b.example.com"} {
				if v, _ := reg.Allows(t.Context(), f.box, host, 443); v.Effect == policy.Allow {
					t.Errorf("%s: %s is open after the row was changed in the database", statement, host)
				}
			}
		}
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := permit.Grant(t.Context(), tx, permit.Permit{Project: f.box.Project, Kind: permit.Secret, Secret: "sec_1", Until: time.Now().Add(time.Hour), Action: "act_1", Decider: "system:gate"})
			return err
		})
		if !errors.Is(err, permit.ErrNobody) {
			t.Errorf("got %v, want that a permit needs a person", err)
		}
	})
}

func TestUsesOfSecretsAreGranted(t *testing.T) {
	f := setup(t, storetest.SQLite(t), permit.Config{Off: true})
	g := permit.Permit{Project: f.box.Project, Sandbox: "i1", Kind: permit.Secret, Secret: "sec_1", Until: time.Now().Add(time.Hour), Action: "act_1", Decider: "person:ann"}
	for range 2 { // a second time it is the same
		err := f.db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := permit.Grant(t.Context(), tx, g)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	other := f.box
	other.ID = "i2"
	for _, tt := range []struct {
		who    auth.Principal
		secret string
		want   bool
	}{{f.box, "sec_1", true}, {f.box, "sec_2", false}, {f.box, "", false}, {other, "sec_1", false}} {
		if _, got := f.reg.Holding(t.Context(), tt.who, tt.secret); got != tt.want {
			t.Errorf("%s with %q: got %v, want %v", tt.who, tt.secret, got, tt.want)
		}
	}
	if f.allows(f.box, "", 443) {
		t.Error("the use of a secret opens hosts")
	}
}

func TestOffMeansThatNothingIsOpened(t *testing.T) {
	db := storetest.SQLite(t)
	f := setup(t, db, permit.Config{})
	a := f.propose(f.box, permit.Proposal{Hosts: []string{"b.example.com"}})
	f.approved(f.propose(f.box, permit.Proposal{Hosts: []string{"a.example.com"}}))
	off := permit.New(slog.New(slog.DiscardHandler), db, f.gate, permit.Config{Off: true})
	if v, _ := off.Allows(t.Context(), f.box, "a.example.com", 443); v.Effect == policy.Allow {
		t.Error("a permit holds although permits are off")
	}
	if _, err := off.Propose(t.Context(), f.box, "proposal", permit.Proposal{Hosts: []string{"a.example.com"}}); !errors.Is(err, permit.ErrOff) {
		t.Errorf("got %v", err)
	}
	if o := off.Execute(t.Context(), a); o.State != oversight.Failed {
		t.Errorf("got %+v", o)
	}
}

func TestASandboxCannotFloodThePeople(t *testing.T) {
	f := setup(t, storetest.SQLite(t), permit.Config{})
	var err error
	for i := 0; err == nil && i < 100; i++ {
		_, err = f.reg.Propose(t.Context(), f.box, "proposal", permit.Proposal{Hosts: []string{"a.example.com"}, Why: strings.Repeat("x", i)})
	}
	if !errors.Is(err, permit.ErrMany) {
		t.Errorf("got %v", err)
	}
}

// parse reads a proposal as the doors do.
func parse(body []byte) (permit.Proposal, error) {
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	var p permit.Proposal
	if err := dec.Decode(&p); err != nil {
		return p, fmt.Errorf("%w: %w", permit.ErrInvalid, err)
	}
	if dec.More() {
		return p, fmt.Errorf("%w: must be one JSON object", permit.ErrInvalid)
	}
	return p.Normal()
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"hosts":["*.example.com"],"methods":["GET"],"paths":["/v1/*"],"for":"2h","scope":"project","why":"x"}`))
	f.Add([]byte(`{"hosts":["a.example.com"],"port":8443,"for":"7d"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		p, err := parse(body)
		if err != nil {
			return
		}
		again, err := p.Normal()
		if err != nil || again.For != p.For || len(again.Hosts) != len(p.Hosts) {
			t.Fatalf("%+v became %+v, %v", p, again, err)
		}
		for _, h := range p.Hosts {
			if _, err := policy.PublicName(strings.TrimPrefix(h, "*.")); err != nil {
				t.Fatalf("%q is taken: %v", h, err)
			}
		}
	})
}

// TestEndedWhileItIsRead: a permit that ends while the register is read ends at once, for
// whoever asks next.
func TestEndedWhileItIsRead(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f, ctx := setup(t, db, permit.Config{}), t.Context()
		for name, finish := range map[string]func(id string) error{
			"by a person":      func(id string) error { _, err := f.reg.End(ctx, f.owner, id); return err },
			"with its sandbox": func(string) error { return f.reg.EndOf(ctx, f.owner, f.box.ID) },
		} {
			p := permit.Permit{Kind: permit.Network, Project: f.owner.Project, Sandbox: f.box.ID, Hosts: []string{"a.example.com"}, Decider: f.owner.String(), Action: "act_" + name, Until: time.Now().Add(time.Hour)}
			err := db.Update(ctx, func(tx *store.Tx) (err error) {
				p, err = f.reg.Add(ctx, tx, p)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			allowed := func() bool {
				v, _ := f.reg.Allows(ctx, f.box, "a.example.com", 443)
				return v.Effect == policy.Allow
			}
			if !allowed() {
				t.Fatal("the permit does not hold")
			}
			err = f.reg.SlowRead(ctx, f.owner.Project, func() {
				if err := finish(p.ID); err != nil {
					t.Fatal(err)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			if allowed() || f.reg.InForce(ctx, f.owner.Project, p.ID) {
				t.Errorf("%s: what was read before it ended holds after", name)
			}
		}
	})
}
