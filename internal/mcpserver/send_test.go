package mcpserver

import (
	"maps"
	"strings"
	"testing"
	"time"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/store"
	"postern/internal/storetest"
)

// sent returns what an action would send, and to whom.
func (f *fixture) sent(t *testing.T, id string) (mail.Envelope, mail.Message) {
	t.Helper()
	a, err := f.gate.Action(t.Context(), f.person, id)
	if err != nil {
		t.Fatal(err)
	}
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		t.Fatal(err)
	}
	m, err := mail.Parse(env.Raw)
	if err != nil {
		t.Fatal(err)
	}
	return env, m
}

// TestAnswers: an agent answers, passes on and takes back, with nothing but the
// tools; a sandbox that was lent no key answers nothing.
func TestAnswers(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		b, key := f.inbox(t, "analyst")
		who, _ := f.sandbox(t, b.ID)
		const raw = "From: Bob <bob@example.com>\r\nTo: analyst@agents.test, carol@example.com\r\nSubject: Plan\r\nMessage-ID: <1@example.com>\r\nMIME-Version: 1.0\r\n" +
			"Content-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\n\r\nHello\r\n--b\r\nContent-Type: text/csv\r\nContent-Disposition: attachment; filename=a.csv\r\n\r\n1,2\r\n--b--\r\n"
		if err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}}); err != nil {
			t.Fatal(err)
		}
		cs := connect(t, f.srv.Handler(), key, "")
		list := call(t, cs, "email_inbox", args{"limit": 1})
		messages, _ := list.data["messages"].([]any)
		if len(messages) != 1 {
			t.Fatalf("inbox: %+v", list)
		}
		id := messages[0].(map[string]any)["id"].(string)

		r := call(t, cs, "email_reply", args{"messageId": id, "body": "Yes.", "replyAll": true})
		if r.isErr || r.field("status") != "pending_approval" {
			t.Fatalf("reply: %+v", r)
		}
		if env, m := f.sent(t, r.field("actionId")); len(env.To) != 2 || m.Subject != "Re: Plan" || len(m.InReplyTo) != 1 || m.InReplyTo[0] != "<1@example.com>" || m.AutoSubmitted != "auto-replied" {
			t.Errorf("reply to %q: %q in reply to %q, %q", env.To, m.Subject, m.InReplyTo, m.AutoSubmitted)
		}
		r = call(t, cs, "email_forward", args{"messageId": id, "to": []string{"erin@example.com"}})
		if r.isErr || r.field("status") != "pending_approval" {
			t.Fatalf("forward: %+v", r)
		}
		if env, m := f.sent(t, r.field("actionId")); len(env.To) != 1 || m.Subject != "Fwd: Plan" || len(m.Attachments) != 1 || string(m.Attachments[0].Data) != "1,2" {
			t.Errorf("forward to %q: %q with %+v", env.To, m.Subject, m.Attachments)
		}
		cancelled := r.field("actionId")
		for range 2 {
			if r := call(t, cs, "email_cancel", args{"actionId": cancelled}); r.isErr || r.field("status") != "cancelled" {
				t.Errorf("cancel: %+v", r)
			}
		}
		if r := call(t, cs, "email_action_status", args{"actionId": cancelled}); r.field("status") != "denied" || r.field("state") != "cancelled" {
			t.Errorf("status: %+v", r)
		}

		// In a sandbox without a loan: it sends, and can neither answer nor pass on.
		inside := connect(t, f.srv.HandlerFor(who), "", "")
		for tool, a := range map[string]args{"email_reply": {"messageId": id, "body": "x"}, "email_forward": {"messageId": id, "to": []string{"eve@example.com"}}} {
			if r := call(t, inside, tool, a); !r.isErr || !strings.Contains(r.text, "X-Postern-Inbox-Key") {
				t.Errorf("%s without a key: %+v", tool, r)
			}
		}
		_, keyB := f.inbox(t, "bella")
		other := connect(t, f.srv.Handler(), keyB, "")
		for tool, a := range map[string]args{
			"email_reply": {"messageId": id, "body": "x"}, "email_forward": {"messageId": id, "to": []string{"eve@example.com"}}, "email_cancel": {"actionId": cancelled},
		} {
			if r := call(t, other, tool, a); !r.isErr || !strings.Contains(r.text, "not found") {
				t.Errorf("another inbox's %s: %+v", tool, r)
			}
		}
	})
}

// TestSendOptions: time, undo, keys and duplicates, as an agent meets them.
func TestSendOptions(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	_, key := f.inbox(t, "analyst")
	cs := connect(t, f.srv.Handler(), key, "")
	with := func(more args) args {
		out := args{"to": []string{"bob@example.com"}, "subject": "s", "body": "b"}
		maps.Copy(out, more)
		return out
	}
	at := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	if r := call(t, cs, "email_send", with(args{"sendAt": at, "gateTiming": "schedule_first"})); r.field("status") != "pending_approval" || r.field("state") != "scheduled" || !strings.Contains(r.text, at) {
		t.Errorf("scheduled: %+v", r)
	}
	first := call(t, cs, "email_send", with(args{"subject": "key", "idempotencyKey": "k"}))
	if r := call(t, cs, "email_send", with(args{"subject": "key", "idempotencyKey": "k"})); r.isErr || r.field("actionId") != first.field("actionId") || !strings.Contains(r.text, "made this call before") {
		t.Errorf("the same call: %+v", r)
	}
	if r := call(t, cs, "email_send", with(args{"subject": "other", "idempotencyKey": "k"})); !r.isErr || !strings.Contains(r.text, "idempotency key") {
		t.Errorf("the key with another email: %+v", r)
	}
	if r := call(t, cs, "email_send", with(args{"subject": "key"})); !r.isErr || !strings.Contains(r.text, first.field("actionId")) || !strings.Contains(r.text, "allowDuplicate") {
		t.Errorf("the same email: %+v", r)
	}
	if r := call(t, cs, "email_send", with(args{"subject": "key", "allowDuplicate": true})); r.isErr || r.field("status") != "pending_approval" || !strings.Contains(r.text, first.field("actionId")) {
		t.Errorf("the same email, meant: %+v", r)
	}
	r := call(t, cs, "email_send", with(args{"subject": "markdown", "body": "**b**", "markdown": true}))
	if _, m := f.sent(t, r.field("actionId")); !strings.Contains(m.HTML, "<strong>b</strong>") || strings.TrimSpace(m.Text) != "**b**" {
		t.Errorf("markdown: %q, %q", m.Text, m.HTML)
	}
	for name, tt := range map[string]struct {
		a    args
		want string
	}{
		"no time":        {args{"sendAt": "tomorrow"}, "sendAt: must be a time"},
		"in the past":    {args{"sendAt": "2020-01-01T00:00:00Z"}, "send_at: is in the past"},
		"no timing":      {args{"sendAt": at, "gateTiming": "never"}, "gate_timing"},
		"a long undo":    {args{"undoSeconds": 121}, "undoSeconds: must be 0 to 120"},
		"HTML, Markdown": {args{"html": true, "markdown": true}, "not both"},
		"a long key":     {args{"idempotencyKey": strings.Repeat("x", 256)}, "idempotency_key"},
	} {
		if r := call(t, cs, "email_send", with(tt.a)); !r.isErr || !strings.Contains(r.text, tt.want) {
			t.Errorf("%s: %+v, want %q", name, r, tt.want)
		}
	}
	for range 2 {
		if r := call(t, cs, "email_cancel", args{"actionId": first.field("actionId")}); r.isErr {
			t.Errorf("cancel: %+v", r)
		}
	}
	a, err := f.gate.Action(t.Context(), f.person, first.field("actionId"))
	if err != nil || a.State != oversight.Cancelled {
		t.Errorf("%s, %v", a.State, err)
	}
}
