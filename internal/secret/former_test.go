package secret_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/secret"
	"postern/internal/store"
	"postern/internal/storetest"
)

// guards returns what answers to the sandbox are masked for: hosts and value.
func (f *fixture) guards(s *secret.Store) (out []string) {
	f.t.Helper()
	list, err := s.Guarded(f.t.Context(), f.sandbox)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, g := range list {
		v, err := s.OpenGuarded(f.t.Context(), f.sandbox, g)
		if err != nil {
			f.t.Fatal(err)
		}
		out = append(out, fmt.Sprintf("%s %v %s", g.Name, g.Hosts, v.Value))
	}
	slices.Sort(out)
	return out
}

// TestFormerValuesAreGuarded: a value is known for the answers of its hosts after a
// rotation, a change of hosts and a deletion, and for nothing else.
func TestFormerValuesAreGuarded(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f, ctx := setup(t, db), t.Context()
		check := func(what string, want ...string) {
			t.Helper()
			if got := f.guards(f.s); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s: got %q, want %q", what, got, want)
			}
		}
		check("without secrets")
		c := f.create("a", "first-value", "one.test")
		f.create("without-hosts", "other-value")
		check("created", "a [one.test] first-value")
		second, third := secret.Value{Text: "second-value"}, secret.Value{Text: "third-value"}
		if _, err := f.s.Update(ctx, f.key, "a", secret.Change{Value: &second}); err != nil {
			t.Fatal(err)
		}
		check("rotated", "a [one.test] first-value", "a [one.test] second-value")
		approval := secret.Always
		if _, err := f.s.Update(ctx, f.key, "a", secret.Change{Approval: &approval}); err != nil {
			t.Fatal(err)
		}
		check("with another approval", "a [one.test] first-value", "a [one.test] second-value")
		if _, err := f.s.Update(ctx, f.owner, "a", secret.Change{Hosts: &[]string{"two.test"}}); err != nil {
			t.Fatal(err)
		}
		check("moved", "a [one.test] first-value", "a [one.test] second-value", "a [two.test] second-value")
		if _, err := f.s.Update(ctx, f.key, "without-hosts", secret.Change{Value: &third}); err != nil {
			t.Fatal(err)
		}
		if err := f.s.Delete(ctx, f.key, c.ID); err != nil {
			t.Fatal(err)
		}
		check("deleted", "a [one.test] first-value", "a [one.test] second-value", "a [two.test] second-value", "without-hosts [] other-value")
		if v, err := f.s.Open(ctx, f.sandbox, c.ID); err == nil || v.Value != nil {
			t.Error("a request gets a former value")
		}
		list, _ := f.s.Guarded(ctx, f.sandbox)
		other := auth.Principal{Kind: auth.Sandbox, ID: "itwo", Project: f.other.Project}
		for name, who := range map[string]auth.Principal{"another project's sandbox": other, "a key": f.key, "an owner": f.owner} {
			if v, err := f.s.OpenGuarded(ctx, who, list[0]); err == nil || v.Value != nil {
				t.Errorf("%s opens a former value", name)
			}
		}
		if list, err := f.s.Guarded(ctx, other); err != nil || len(list) > 0 {
			t.Errorf("another project has %v, %v", list, err)
		}
	})
}

// TestFormerValuesEnd: a day later they are gone, also from the database. One that was
// changed there is not used.
func TestFormerValuesEnd(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f, ctx := setup(t, db), t.Context()
		f.create("a", "first-value", "one.test")
		rotate := func(text string) {
			t.Helper()
			if _, err := f.s.Update(ctx, f.key, "a", secret.Change{Value: &secret.Value{Text: auth.Secret(text)}}); err != nil {
				t.Fatal(err)
			}
		}
		rotate("second-value")
		list, _ := f.s.Guarded(ctx, f.sandbox)
		f.exec(`update secret_former set hosts = 'evil.test'`)
		if got := f.guards(open(t, db, nil)); len(got) != 1 {
			t.Errorf("a changed row is used: %q", got)
		}
		f.exec(`update secret_former set hosts = 'one.test', until = 1`)
		for _, g := range list {
			if _, err := f.s.OpenGuarded(ctx, f.sandbox, g); g.Former > 0 && !errors.Is(err, inject.ErrGone) {
				t.Errorf("opened after its time: %v", err)
			}
		}
		for i := range 20 {
			rotate(fmt.Sprint("value-number-", i))
		}
		var n, old int
		err := db.View(ctx, func(tx *store.Tx) error {
			if err := tx.One(ctx, `select count(*) from secret_former`, nil, &n); err != nil {
				return err
			}
			return tx.One(ctx, `select count(*) from secret_former where until <= 1`, nil, &old)
		})
		if err != nil || old != 0 || n != 16 {
			t.Errorf("%d rows, %d of them over, %v; want 16 and none", n, old, err)
		}
	})
}
