package mcpserver

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"postern/internal/policy"
	"postern/internal/quota"
	"postern/internal/storetest"
)

// TestAccount: an agent learns its address, how it is watched, what it may do, what is
// left of its limits, and what waits; each as it is for that caller.
func TestAccount(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	b, key := f.inbox(t, "analyst")
	other, otherKey := f.inbox(t, "other")
	if err := f.post.Quotas.SetSending(t.Context(), f.project, b.ID, quota.Sending{Undo: 30 * time.Second, Limits: quota.Limits{PerDay: 20}}); err != nil {
		t.Fatal(err)
	}
	cs := connect(t, f.srv.Handler(), key, "")
	who, _ := f.sandbox(t, b.ID)
	box := connect(t, f.srv.HandlerFor(who), "", "")
	for i := range 12 {
		if r := call(t, cs, "email_send", args{"to": []string{"x@example.com"}, "subject": "s", "body": fmt.Sprint(i)}); r.isErr {
			t.Fatal(r.text)
		}
	}
	r := call(t, cs, "email_account", nil)
	if r.isErr || r.field("address") != b.Address || r.field("inboxId") != b.ID || r.field("mode") != "gated_send" || r.data["mayRead"] != true || r.data["mayPropose"] != true || r.data["undoSeconds"] != 30.0 {
		t.Fatalf("account: %+v", r)
	}
	if q := r.data["queue"].(map[string]any); q["waiting"] != 12.0 || q["more"] != true || len(q["actions"].([]any)) != 10 {
		t.Errorf("queue: %v", q)
	}
	if l := r.data["sending"].([]any)[0].(map[string]any); l["name"] != "inbox-day" || l["limit"] != 20.0 || l["left"] != 8.0 {
		t.Errorf("limits: %v", l)
	}
	for _, want := range []string{b.Address, "gated_send", "8 of 20 left", "12 actions wait", "50 recipients", "25 MB"} {
		if !strings.Contains(r.text, want) {
			t.Errorf("the text lacks %q: %s", want, r.text)
		}
	}
	// A sandbox that was lent no key proposes and does not read.
	if r := call(t, box, "email_account", nil); r.isErr || r.data["mayRead"] != false || r.data["mayPropose"] != true || !strings.Contains(r.field("readDetail"), "X-Postern-Inbox-Key") {
		t.Errorf("in a sandbox: %+v", r)
	}
	// Another inbox is none of the caller's, and the queue is its own.
	if r := call(t, cs, "email_account", args{"inbox": other.ID}); !r.isErr || strings.Contains(r.text, other.Address) {
		t.Errorf("another inbox: %+v", r)
	}
	r = call(t, connect(t, f.srv.Handler(), otherKey, ""), "email_account", nil)
	if q := r.data["queue"].(map[string]any); q["waiting"] != 0.0 {
		t.Errorf("another's queue: %v", q)
	}
	if _, err := f.post.SetMode(t.Context(), f.person, b.ID, policy.ReadOnly, "enough"); err != nil {
		t.Fatal(err)
	}
	if r := call(t, cs, "email_account", nil); r.data["mayPropose"] != false || r.field("mode") != "read_only" {
		t.Errorf("read_only: %+v", r)
	}
	// The tools that an agent calls first say it, too.
	for _, tool := range []string{"email_inbox", "email_help"} {
		r := call(t, cs, tool, nil)
		if a, _ := r.data["account"].(map[string]any); r.isErr || a["address"] != b.Address || a["mode"] != "read_only" || !strings.HasPrefix(r.text, "Your address is "+b.Address) {
			t.Errorf("%s: %+v", tool, r)
		}
	}
}
