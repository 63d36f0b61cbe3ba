package connection_test

import (
	"errors"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestApproveAndAllowConnections: an owner allows, beside an approval, connections of the
// sandbox to the same host and port, and the end of the permit cuts those that are open.
func TestApproveAndAllowConnections(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.holds(rulesOnConnections)
		box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.owner.Project, Template: "base"}
		ctx := t.Context()
		permits := permit.New(f.log, f.db, f.gate, permit.Config{})
		c := f.connections(time.Millisecond)
		c.Honour(permits)
		week := time.Now().Add(7 * 24 * time.Hour)
		decide := func(who auth.Principal, a oversight.Action, w oversight.Allowance) error {
			return f.gate.Decide(ctx, who, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true, Allow: &w})
		}
		one := func(d policy.Connection) oversight.Action {
			t.Helper()
			if v := c.Permit(ctx, box, d); v.Effect == policy.Allow {
				t.Fatalf("%v: got %+v, want that a person is asked", d, v)
			}
			w := f.waiting() //nolint:contextcheck // the fixture has the test's
			if len(w) != 1 {
				t.Fatalf("%d actions wait, want 1", len(w))
			}
			return f.read(w[0].ID) //nolint:contextcheck // likewise
		}
		reject := func(a oversight.Action) {
			t.Helper()
			if err := f.gate.Decide(ctx, f.owner, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Reason: "no"}); err != nil {
				t.Fatal(err)
			}
		}
		a := one(to(443, "api.example"))
		reviewer := f.owner
		reviewer.ID, reviewer.Role = "bob", auth.Reviewer
		for _, tt := range []struct {
			name string
			who  auth.Principal
			w    oversight.Allowance
			want error
		}{
			{"another host", f.owner, oversight.Allowance{Address: "evil.example", Until: week}, oversight.ErrAllowance},
			{"a domain", f.owner, oversight.Allowance{Domain: "api.example", Until: week}, oversight.ErrAllowance},
			{"a path", f.owner, oversight.Allowance{Address: "api.example", Path: "/*", Until: week}, oversight.ErrAllowance},
			{"for too long", f.owner, oversight.Allowance{Address: "api.example", Until: time.Now().Add(91 * 24 * time.Hour)}, oversight.ErrAllowance},
			{"a reviewer", reviewer, oversight.Allowance{Address: "api.example", Until: week}, auth.ErrForbidden},
		} {
			if err := decide(tt.who, a, tt.w); !errors.Is(err, tt.want) || f.read(a.ID).State != oversight.Pending {
				t.Errorf("%s: got %v, want %v", tt.name, err, tt.want)
			}
		}
		if err := decide(f.owner, a, oversight.Allowance{Address: "api.example", Until: week}); err != nil {
			t.Fatal(err)
		}
		f.run(a)
		list, err := permits.List(ctx, f.owner, permit.Query{})
		if err != nil || len(list) != 1 || list[0].Kind != permit.Connection || list[0].Port != 443 || list[0].Sandbox != "i1" || list[0].Why != "rule careful" {
			t.Fatalf("permits %+v, %v", list, err)
		}
		// What the approval itself allows for an hour does not hide the permit: another
		// program knows nothing of it.
		c = f.connections(time.Millisecond)
		c.Honour(permits)
		if v := c.Permit(ctx, box, to(443, "api.example")); v.Effect != policy.Allow || v.Rule != "careful" {
			t.Errorf("got %+v, want that the permit answers the rule", v)
		}
		other := box
		other.ID = "i2"
		for name, v := range map[string]policy.Verdict{
			"another sandbox":         c.Permit(ctx, other, to(443, "api.example")),
			"another port":            c.Permit(ctx, box, to(22, "api.example")),
			"another host":            c.Permit(ctx, box, to(443, "www.api.example")),
			"a name that shares it":   c.Permit(ctx, box, to(443, "api.example", "www.api.example")),
			"one that a rule forbids": c.Permit(ctx, box, to(443, "api.example", "evil.example")),
		} {
			if v.Effect == policy.Allow {
				t.Errorf("%s: got %+v", name, v)
			}
		}
		for _, w := range f.waiting() {
			reject(f.read(w.ID))
		}
		if v, _ := permits.Allows(ctx, box, "api.example", 443); v.Effect == policy.Allow {
			t.Error("it opens the host beyond the lists")
		}
		if v := c.MayContinue(ctx, box, to(443, "api.example")); v.Effect != policy.Allow {
			t.Errorf("while it holds: %+v", v)
		}
		if _, err := permits.End(ctx, f.owner, list[0].ID); err != nil {
			t.Fatal(err)
		}
		if v := c.MayContinue(ctx, box, to(443, "api.example")); v.Effect != policy.Deny {
			t.Errorf("after its end an open connection goes on: %+v", v)
		}
		// Connections of others, which no permit allowed, go on as before.
		if v := c.MayContinue(ctx, other, to(443, "api.example")); v.Effect != policy.Allow {
			t.Errorf("another sandbox: %+v", v)
		}
		// An address is no public name.
		b := one(to(22))
		if err := decide(f.owner, b, oversight.Allowance{Address: "203.0.113.7", Until: week}); !errors.Is(err, oversight.ErrAllowance) {
			t.Errorf("an address: %v", err)
		}
		reject(b)
		// A forged row answers nothing.
		err = db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update permit set ended_at = 0, ended_by = '' where id = $1`, list[0].ID)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		fresh := permit.New(f.log, f.db, f.gate, permit.Config{})
		if _, ok := fresh.Connect(ctx, box, []string{"api.example"}, 443, "careful"); ok {
			t.Error("a row that somebody has put back answers a rule")
		}
		// Where the operator has turned permits off, none is made and none counts.
		off := permit.New(f.log, f.db, f.gate, permit.Config{Off: true})
		c.Honour(off)
		if _, ok := off.Connect(ctx, box, []string{"api.example"}, 443, "careful"); ok {
			t.Error("a permit counts although they are off")
		}
	})
}
