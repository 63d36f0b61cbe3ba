package mailbox_test

import (
	"slices"
	"testing"

	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestArrange: what is asked to be put away is, once it is approved, and not
// before; what is gone by then is nobody's failure to find.
func TestArrange(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, key := f.inbox(t, "analyst")
		_, other, otherKey := f.inbox(t, "other")
		k, otherK := f.open(t, who, key), f.open(t, other, otherKey)
		f.incoming(t, b, "Plan")
		ms, err := f.post.Messages(ctx, who, k, 1)
		if err != nil || len(ms) != 1 {
			t.Fatal(ms, err)
		}
		id := ms[0].ID
		for name, err := range map[string]error{
			"another's key":     second(f.post.Arrange(ctx, other, "test", otherK, policy.KindTrash, id)),
			"with its own name": second(f.post.Arrange(ctx, other, "test", k, policy.KindTrash, id)),
			"no such message":   second(f.post.Arrange(ctx, who, "test", k, policy.KindTrash, "msg_x")),
			"another kind":      second(f.post.Arrange(ctx, who, "test", k, policy.KindSend, id)),
		} {
			if err == nil {
				t.Errorf("%s: it is taken", name)
			}
		}
		for _, kind := range []policy.Kind{policy.KindArchive, policy.KindTrash} {
			a, err := f.post.Arrange(ctx, who, "test", k, kind, id)
			if err != nil || a.State != oversight.Pending {
				t.Fatalf("%s: %+v, %v", kind, a, err)
			}
			if again, err := f.post.Arrange(ctx, who, "test", k, kind, id); err != nil || again.ID != a.ID {
				t.Errorf("%s: asked twice: %+v, %v", kind, again, err)
			}
			if err := f.gate.Decide(ctx, f.person, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true}); err != nil {
				t.Fatal(err)
			}
			if ran, err := f.gate.RunOne(ctx); !ran || err != nil {
				t.Fatal(ran, err)
			}
			m, err := f.post.Listed(ctx, who, k, id)
			if err != nil || !slices.Contains(m.Labels, map[policy.Kind]string{policy.KindArchive: mailbox.LabelArchived, policy.KindTrash: mailbox.LabelTrash}[kind]) {
				t.Errorf("%s: labels %v, %v", kind, m.Labels, err)
			}
		}
	})
}

func second[T any](_ T, err error) error { return err }

// TestArrangeByMode: what waits for a person in which mode.
func TestArrangeByMode(t *testing.T) {
	for _, tt := range []struct {
		kind policy.Kind
		mode policy.Mode
		want policy.Effect
	}{
		{policy.KindArchive, policy.GatedSend, policy.Allow},
		{policy.KindArchive, policy.GatedAll, policy.Ask},
		{policy.KindArchive, policy.Autonomous, policy.Allow},
		{policy.KindArchive, "", policy.Ask},
		{policy.KindTrash, policy.GatedSend, policy.Ask},
		{policy.KindTrash, policy.GatedAll, policy.Ask},
		{policy.KindTrash, policy.Monitored, policy.Allow},
		{policy.KindTrash, policy.ReadOnly, policy.Ask},
		{policy.KindTrash, "", policy.Ask},
	} {
		if got := policy.Decide(nil, policy.Request{Kind: tt.kind, Mode: tt.mode}).Effect; got != tt.want {
			t.Errorf("%s in mode %q: %s, want %s", tt.kind, tt.mode, got, tt.want)
		}
	}
}
