package mcpserver

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/storetest"
)

// TestOrder finds mail, reads its thread, and puts it away.
func TestOrder(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	_, key := f.inbox(t, "analyst")
	cs := connect(t, f.srv.Handler(), key, "")
	for i, header := range []string{"Message-ID: <1@h>", "Message-ID: <2@h>\r\nIn-Reply-To: <1@h>", "Message-ID: <3@h>"} {
		raw := fmt.Sprintf("From: Bob <bob@example.com>\r\nSubject: number %d\r\n%s\r\n\r\nkohlrabi %d\r\n", i, header, i)
		if err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{To: []string{"analyst@agents.test"}, Raw: []byte(raw)}, Remote: "192.0.2.1"}); err != nil {
			t.Fatal(err)
		}
	}
	found := func(q string) (ids []string) {
		t.Helper()
		r := call(t, cs, "email_search", args{"q": q})
		if r.isErr {
			t.Fatal(r.text)
		}
		for _, m := range r.data["messages"].([]any) {
			ids = append(ids, m.(map[string]any)["id"].(string))
		}
		return ids
	}
	ids := found("from:bob kohlrabi")
	if len(ids) != 3 || len(found("nothing-such")) != 0 {
		t.Fatalf("found %v", ids)
	}
	if r := call(t, cs, "email_search", args{"q": "form:bob"}); !r.isErr || !strings.HasPrefix(r.text, `q: term "form:bob"`) {
		t.Errorf("a term that is none: %+v", r)
	}
	r := call(t, cs, "email_thread_get", args{"id": ids[2]})
	if a, b := strings.Index(r.text, "kohlrabi 0"), strings.Index(r.text, "kohlrabi 1"); r.isErr || a < 0 || b < a || strings.Contains(r.text, "kohlrabi 2") || !strings.Contains(r.text, "<<<") {
		t.Errorf("thread = %+v", r)
	}
	if again := call(t, cs, "email_thread_get", args{"id": r.field("threadId")}); again.isErr || len(again.data["messages"].([]any)) != 2 {
		t.Errorf("thread by its id = %+v", again)
	}
	for tool, id := range map[string]string{"email_archive": ids[0], "email_trash": ids[1]} {
		r := call(t, cs, tool, args{"id": id})
		if r.isErr || r.field("status") != "pending_approval" { // by these rules everything waits
			t.Errorf("%s: %+v", tool, r)
		}
		a, err := f.gate.Action(t.Context(), f.person, r.field("actionId"))
		if err != nil {
			t.Fatal(err)
		}
		if v, err := f.gate.Show(a); err != nil || !strings.Contains(fmt.Sprint(v.Fields), "Bob") || !strings.Contains(v.Title, "Move a message") {
			t.Errorf("%s: the reviewer sees %+v, %v", tool, v, err)
		}
		if got := found("in:inbox"); !slices.Contains(got, id) {
			t.Errorf("%s: it was done unasked", tool)
		}
		f.decide(t, a.ID, true, "")
		if ran, err := f.gate.RunOne(t.Context()); !ran || err != nil {
			t.Fatal(ran, err)
		}
		if r := call(t, cs, "email_action_status", args{"actionId": a.ID}); r.field("state") != "done" || strings.Contains(r.text, "recipients") || r.field("kind") != strings.Replace(tool, "_", ".", 1) {
			t.Errorf("%s: %+v", tool, r)
		}
	}
	if got := found("in:inbox"); len(got) != 1 || got[0] != ids[2] {
		t.Errorf("in:inbox = %v", got)
	}
	if r := call(t, cs, "email_labels_list", args{}); r.isErr || !strings.Contains(r.text, "trash: 1 messages") {
		t.Errorf("labels = %+v", r)
	}
	if r := call(t, cs, "email_draft_create", args{"to": []string{"bob@example.com"}, "subject": "s", "body": "b"}); r.isErr || !strings.HasPrefix(r.field("draftId"), "drf_") {
		t.Errorf("draft = %+v", r)
	}
	for name, a := range map[string]args{"no subject": {"to": []string{"bob@example.com"}, "body": "b"}, "no id": {"id": "'"}} {
		tool := "email_draft_create"
		if name == "no id" {
			tool = "email_thread_get"
		}
		if r := call(t, cs, tool, a); !r.isErr {
			t.Errorf("%s: %+v", name, r)
		}
	}
}
