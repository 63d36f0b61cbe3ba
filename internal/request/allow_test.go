package request_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

const rulesThatAsk = `rules:
  - id: write
    kind: net.request
    when: method == 'POST'
    then: ask
  - id: admin
    kind: net.request
    when: path.startsWith('/v1/admin')
    then: ask
  - id: factor
    kind: net.request
    when: path.startsWith('/pay')
    then: ask
    step_up: true
  - id: two
    kind: net.request
    when: path.startsWith('/two')
    then: ask
    approvers: 2
`

// TestApproveAndAllowRequests: an owner allows, beside an approval, what is like the request,
// and nothing more: not another host, method, path, sandbox or rule, and not for ever.
func TestApproveAndAllowRequests(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.holds(rulesThatAsk)
		s := f.start(time.Millisecond)
		ctx := t.Context()
		week := time.Now().Add(7 * 24 * time.Hour)
		decide := func(who auth.Principal, a oversight.Action, w oversight.Allowance) error {
			return f.gate.Decide(ctx, who, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true, Allow: &w})
		}
		reviewer := f.owner
		reviewer.ID, reviewer.Role = "bob", auth.Reviewer
		if v := s.ask(ctx, f.box(), get("POST", "/v1/orders", "{}")); v.Effect == policy.Allow {
			t.Fatalf("got %+v", v)
		}
		a := f.one()
		host := "api.example.com"
		for _, tt := range []struct {
			name string
			who  auth.Principal
			w    oversight.Allowance
			want error
		}{
			{"another host", f.owner, oversight.Allowance{Address: "evil.example.com", Path: "/v1/orders", Until: week}, oversight.ErrAllowance},
			{"a domain", f.owner, oversight.Allowance{Domain: host, Path: "/v1/orders", Until: week}, oversight.ErrAllowance},
			{"no path", f.owner, oversight.Allowance{Address: host, Until: week}, oversight.ErrAllowance},
			{"another path", f.owner, oversight.Allowance{Address: host, Path: "/v2/*", Until: week}, oversight.ErrAllowance},
			{"a path that climbs", f.owner, oversight.Allowance{Address: host, Path: "/v1/../*", Until: week}, oversight.ErrAllowance},
			{"part of a name", f.owner, oversight.Allowance{Address: host, Path: "/v1/or*", Until: week}, oversight.ErrAllowance},
			{"files", f.owner, oversight.Allowance{Address: host, Path: "/v1/orders", Files: true, Until: week}, oversight.ErrAllowance},
			{"for too long", f.owner, oversight.Allowance{Address: host, Path: "/v1/orders", Until: time.Now().Add(91 * 24 * time.Hour)}, oversight.ErrAllowance},
			{"for ever", f.owner, oversight.Allowance{Address: host, Path: "/v1/orders"}, oversight.ErrAllowance},
			{"a reviewer", reviewer, oversight.Allowance{Address: host, Path: "/v1/orders", Until: week}, auth.ErrForbidden},
		} {
			if err := decide(tt.who, a, tt.w); !errors.Is(err, tt.want) {
				t.Errorf("%s: got %v, want %v", tt.name, err, tt.want)
			}
			if got := f.read(a.ID); got.State != oversight.Pending {
				t.Fatalf("%s: it is %s although the allowance was refused", tt.name, got.State)
			}
		}
		if err := decide(f.owner, a, oversight.Allowance{Address: host, Path: "/v1/orders/*", Until: week}); !errors.Is(err, oversight.ErrAllowance) {
			t.Errorf("below the path: %v", err)
		}
		if err := decide(f.owner, a, oversight.Allowance{Address: host, Path: "/v1/*", Until: week}); err != nil {
			t.Fatal(err)
		}
		f.run(a)
		list, err := s.permits.List(ctx, f.owner, permit.Query{})
		if err != nil || len(list) != 1 || list[0].Kind != permit.Request || list[0].Sandbox != "i1" || list[0].Action != a.ID || list[0].Why != "rule write" || list[0].Decider != f.owner.String() {
			t.Fatalf("permits %+v, %v", list, err)
		}
		other := f.box()
		other.ID = "i2"
		elsewhere := get("POST", "/v1/orders", "{}")
		elsewhere.Host = "other.example.com"
		port := get("POST", "/v1/orders", "{}")
		port.Port = 8443
		override := get("POST", "/v1/orders", "{}")
		override.Header.Set("X-HTTP-Method-Override", "PUT")
		if v := s.ask(ctx, f.box(), get("POST", "/v1/orders/7?x=1", `{"other":"body"}`)); v.Effect != policy.Allow {
			t.Errorf("a request like it: %+v", v)
		}
		for name, r := range map[string]struct {
			who policy.Verdict
		}{
			"another sandbox": {s.Judge(ctx, other, get("POST", "/v1/orders", "{}"))},
			"another host":    {s.Judge(ctx, f.box(), elsewhere)},
			"another port":    {s.Judge(ctx, f.box(), port)},
			"another path":    {s.Judge(ctx, f.box(), get("POST", "/v2/orders", "{}"))},
			"it climbs":       {s.Judge(ctx, f.box(), get("POST", "/v1/../v2/orders", "{}"))},
			"it is escaped":   {s.Judge(ctx, f.box(), get("POST", "/v1/%2e%2e/v2/orders", "{}"))},
			"another method":  {s.Judge(ctx, f.box(), override)},
			"another rule":    {s.Judge(ctx, f.box(), get("GET", "/v1/admin", ""))},
		} {
			if r.who.Effect == policy.Allow {
				t.Errorf("%s: got %+v, want that a person is asked", name, r.who)
			}
		}
		// A secret has its own setting all the same.
		if v := s.Judge(ctx, f.box(), get("POST", "/v1/orders", "{}", secret("k", "always"))); v.Effect == policy.Allow {
			t.Errorf("the permit covers the use of a secret: %+v", v)
		}
		// A permit of this kind opens no host.
		if v, _ := s.permits.Allows(ctx, f.box(), host, 443); v.Effect == policy.Allow {
			t.Error("it opens the host beyond the lists")
		}
		open := get("POST", "/v1/orders", "{}")
		if v := s.Judge(ctx, f.box(), open); v.Effect != policy.Allow || len(open.Permits) != 1 || open.Permits[0] != list[0].ID {
			t.Fatalf("got %+v under %v", v, open.Permits)
		}
		// Its end cuts what is under way, and asks again.
		if _, err := s.permits.End(ctx, f.owner, list[0].ID); err != nil {
			t.Fatal(err)
		}
		if v := s.MayContinue(ctx, f.box(), open); v.Effect != policy.Deny {
			t.Errorf("after the end: %+v", v)
		}
		if v := s.Judge(ctx, f.box(), get("POST", "/v1/orders/8", "{}")); v.Effect != policy.Ask {
			t.Errorf("after the end: %+v", v)
		}
		// Two people, and a second factor, are not answered by one owner.
		for _, path := range []string{"/two/x", "/pay/x"} {
			s.ask(ctx, f.box(), get("GET", path, ""))
			waits := f.one()
			who := f.owner
			who.Strong = time.Now()
			if err := decide(who, waits, oversight.Allowance{Address: host, Path: path, Until: week}); !errors.Is(err, oversight.ErrAllowance) {
				t.Errorf("%s: %v", path, err)
			}
			if err := f.gate.Decide(ctx, who, oversight.Decision{ID: waits.ID, Version: waits.Version, Digest: waits.Hex(), Reason: "no"}); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestAllowanceIsRefusedWhereRulesRefusePermits: whoever may not make a permit by hand may
// not make one beside an approval, a grave finding is reviewed each time, and a kill switch
// ends what was allowed.
func TestAllowanceIsRefusedWhereRulesRefusePermits(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.holds(rulesThatAsk + "  - id: no-permits\n    kind: net.permit\n    then: deny\n    reason: none here\n")
	s := f.start(time.Millisecond)
	ctx := t.Context()
	allow := func(a oversight.Action, seen ...string) error {
		return f.gate.Decide(ctx, f.owner, oversight.Decision{
			ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true, Seen: seen,
			Allow: &oversight.Allowance{Address: "api.example.com", Path: "/v1/orders", Until: time.Now().Add(time.Hour)},
		})
	}
	s.ask(ctx, f.box(), get("POST", "/v1/orders", "{}"))
	if err := allow(f.one()); !errors.Is(err, oversight.ErrByHand) || !strings.Contains(err.Error(), "none here") {
		t.Errorf("where a rule denies permits: %v", err)
	}
	f.holds(rulesThatAsk)
	s = f.start(time.Millisecond)
	a := f.one()
	grave := "lookalike:api.example.com"
	s.gate.Names(func(_ context.Context, _ *store.Tx, _ string, r *policy.Request) error {
		r.Findings = []policy.Finding{{ID: grave, Kind: policy.FindLookalike, Subject: "api.example.com", Title: "it looks like another"}}
		return nil
	}, nil)
	if err := f.gate.Decide(ctx, f.owner, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Reason: "no"}); err != nil {
		t.Fatal(err)
	}
	s.ask(ctx, f.box(), get("POST", "/v1/orders", `{"second":1}`))
	b := f.one()
	if err := allow(b, grave); !errors.Is(err, oversight.ErrAllowance) || !strings.Contains(err.Error(), "grave finding") {
		t.Errorf("beside a grave finding: %v", err)
	}
	if err := f.gate.Decide(ctx, f.owner, oversight.Decision{ID: b.ID, Version: b.Version, Digest: b.Hex(), Reason: "no"}); err != nil {
		t.Fatal(err)
	}
	s.gate.Names(nil, nil)
	s.ask(ctx, f.box(), get("POST", "/v1/orders", `{"third":1}`))
	a = f.one()
	if err := allow(a); err != nil {
		t.Fatal(err)
	}
	f.run(a)
	if v := s.Judge(ctx, f.box(), get("POST", "/v1/orders", `{"fourth":1}`)); v.Effect != policy.Allow {
		t.Fatalf("got %+v", v)
	}
	sw, err := f.gate.SwitchOn(ctx, f.owner, oversight.Switch{Scope: oversight.ScopeCapability, Target: string(policy.KindPermit), Reason: "stop"})
	if err != nil {
		t.Fatal(err)
	}
	if list, err := s.permits.List(ctx, f.owner, permit.Query{}); err != nil || len(list) != 0 {
		t.Errorf("a kill switch for permits leaves %+v, %v", list, err)
	}
	if err := f.gate.SwitchOff(ctx, f.owner, sw.ID); err != nil {
		t.Fatal(err)
	}
	if v := s.Judge(ctx, f.box(), get("POST", "/v1/orders", `{"fifth":1}`)); v.Effect == policy.Allow {
		t.Errorf("the permit is back: %+v", v)
	}
}
