package mailapi

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/store"
	"postern/internal/storetest"
)

// account makes an account of the first project, as client name.
func (f *fixture) account(t *testing.T, name string) {
	t.Helper()
	_, token, err := f.post.Keys.NewAccount(t.Context(), f.person, name)
	if err != nil {
		t.Fatal(err)
	}
	f.byKey(name, token)
}

func (f *fixture) makeInbox(t *testing.T, who, body string) directory.Inbox {
	t.Helper()
	got := f.do(t, who, "POST", "/v1/inboxes", body)
	if got.code != 201 {
		t.Fatalf("create = %+v", got)
	}
	return directory.Inbox{ID: got.field(t, "id"), Address: got.field(t, "address"), Project: f.a.Project}
}

func TestBare(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"an address", "bob@example.com", "bob@example.com"},
		{"with a name", "Bob <bob@example.com>", "bob@example.com"},
		{"a name that is an address", `"noreply@service.example" <eve@evil.example>`, "eve@evil.example"},
		{"two addresses", "noreply@service.example, eve@evil.example", "noreply@service.example, eve@evil.example"},
		{"nothing", "", ""},
		{"text", "not an address", "not an address"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := bare(tt.in); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestSignup(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	if got := f.do(t, "nobody", "POST", "/v1/signup", ""); got.code != 403 || !strings.Contains(got.body, "--signup") {
		t.Errorf("closed = %+v", got)
	}
	f.srv.conf.Signup = true
	got := f.do(t, "nobody", "POST", "/v1/signup", "")
	if got.code != 200 || !strings.HasPrefix(got.field(t, "token"), "pgr_") {
		t.Fatalf("open = %+v", got)
	}
	// Whoever makes one after the other is told to wait.
	for i := 0; ; i++ {
		if got := f.do(t, "nobody", "POST", "/v1/signup", ""); got.code == 429 {
			break
		} else if got.code != 200 || i > 100 {
			t.Fatalf("number %d = %+v", i, got)
		}
	}
	// An account has no more inboxes than it may.
	f.byKey("account", auth.Secret(got.field(t, "token")))
	for range maxAccountInboxes {
		f.makeInbox(t, "account", `{}`)
	}
	if got := f.do(t, "account", "POST", "/v1/inboxes", `{}`); got.code != 403 || !strings.Contains(got.body, "25") {
		t.Errorf("one more = %+v", got)
	}
	if got := f.do(t, "account", "GET", "/v1/account", ""); !strings.Contains(got.body, `"inboxCount":25`) || !strings.Contains(got.body, `"maxInboxes":25`) {
		t.Errorf("account = %+v", got)
	}
	list := f.do(t, "project", "GET", "/v1/accounts", "")
	if list.code != 200 || !strings.Contains(list.body, `"inbox_count":25`) || strings.Contains(list.body, "pgr_") {
		t.Errorf("accounts = %+v", list)
	}
	if got := f.do(t, "foreign project", "GET", "/v1/accounts", ""); got.field(t, "accounts") != "[]" {
		t.Errorf("another project's = %+v", got)
	}
}

func TestLobsterRefuses(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.account(t, "account")
	b := f.makeInbox(t, "account", `{"localPart":"lobster-1","displayName":"Lobster"}`)
	draft := func(more string) string {
		return fmt.Sprintf(`{"from":%q,"to":["bob@example.com"],"subject":"s","body":{"text":"t"}%s}`, b.Address, more)
	}
	for _, tt := range []struct {
		name, method, path, body string
		want                     int
	}{
		{"a name that is taken", "POST", "/v1/inboxes", `{"localPart":"alice"}`, 409},
		{"a name that is reserved", "POST", "/v1/inboxes", `{"localPart":"postmaster"}`, 409},
		{"a name that is none", "POST", "/v1/inboxes", `{"localPart":"a b"}`, 400},
		{"a domain of nobody", "POST", "/v1/inboxes", `{"localPart":"lobster","domain":"example.com"}`, 400},
		{"since", "GET", "/v1/inboxes/" + b.ID + "/emails?since=yesterday", "", 400},
		{"direction", "GET", "/v1/inboxes/" + b.ID + "/emails?direction=up", "", 400},
		{"limit", "GET", "/v1/inboxes/" + b.ID + "/emails?limit=101", "", 400},
		{"cursor", "GET", "/v1/inboxes/" + b.ID + "/emails?cursor=%27", "", 400},
		{"timeout", "GET", "/v1/inboxes/" + b.ID + "/emails/poll?timeout=26", "", 400},
		{"another's inbox", "GET", "/v1/inboxes/" + f.a.ID + "/emails", "", 403},
		{"search in another's inbox", "GET", "/v1/emails/search?q=x&inboxId=" + f.a.ID, "", 403},
		{"hasAttachments", "GET", "/v1/emails/search?hasAttachments=maybe", "", 400},
		{"until", "GET", "/v1/emails/search?until=x", "", 400},
		{"text that is no query", "GET", "/v1/emails/search?q=Re:+50%25+%22(", "", 200},
		{"nothing to look for", "GET", "/v1/emails/search?q=", "", 200},
		{"from another's inbox", "POST", "/v1/emails/send", strings.ReplaceAll(draft(""), b.Address, f.a.Address), 403},
		{"from nobody", "POST", "/v1/emails/send", strings.ReplaceAll(draft(""), b.Address, ""), 400},
		{"line break in replyTo", "POST", "/v1/emails/send", draft(`,"replyTo":"a@example.com\r\nBcc: eve@evil.example"`), 400},
		{"threadId", "POST", "/v1/emails/send", draft(`,"threadId":"'; drop table"`), 400},
		{"a thread that is not there", "POST", "/v1/emails/send", draft(`,"threadId":"thr_AAAAAAAAAAAAAAAAAAAAAAAAAA"`), 404},
		{"attachment", "POST", "/v1/emails/send", draft(`,"attachments":[{"filename":"x","content":"*"}]`), 400},
		{"unknown field", "POST", "/v1/emails/send", draft(`,"bcc":["eve@evil.example"]`), 400},
		{"webhook of another's inbox", "POST", "/v1/webhooks", `{"url":"https://example.com/x","inboxId":"` + f.a.ID + `"}`, 403},
		{"webhook of an event that there is not", "POST", "/v1/webhooks", `{"url":"https://example.com/x","events":["email.thread.new"]}`, 400},
		{"webhook to a metadata service", "POST", "/v1/webhooks", `{"url":"http://169.254.169.254/"}`, 400},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := f.do(t, "account", tt.method, tt.path, tt.body); got.code != tt.want {
				t.Errorf("got %d %.300s, want %d", got.code, got.body, tt.want)
			}
		})
	}
	// The account sees what it proposed, and how it fares.
	sent := f.do(t, "account", "POST", "/v1/emails/send", draft(""))
	if sent.code != 202 || sent.field(t, "status") != "pending_approval" {
		t.Fatalf("send = %+v", sent)
	}
	if got := f.do(t, "account", "GET", "/v1/actions/"+sent.field(t, "id"), ""); got.code != 200 || got.field(t, "state") != "pending" {
		t.Errorf("action = %+v", got)
	}
}

func TestLobsterSocket(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		srv := httptest.NewServer(f.srv.Handler())
		t.Cleanup(srv.Close)
		f.account(t, "account")
		one, two := f.makeInbox(t, "account", `{}`), f.makeInbox(t, "account", `{}`)
		url := srv.URL + "/v1/ws?token=" + f.key("account").Reveal()
		c, _, err := f.dial(t, url, "")
		if err != nil {
			t.Fatal(err)
		}
		c.want("authenticated")
		c.say(fmt.Sprintf(`{"type":"subscribe","id":"req_1","inbox_ids":[%q,%q,%q]}`, one.ID, f.a.ID, two.ID))
		if m := c.want("error"); m["code"] != "forbidden" || m["inbox_id"] != f.a.ID {
			t.Errorf("another's inbox: %v", m)
		}
		if m := c.want("subscribed"); fmt.Sprint(m["inbox_ids"]) != fmt.Sprint([]string{one.ID, two.ID}) {
			t.Errorf("subscribed: %v", m)
		}
		f.receive(t, f.a, "foreign")
		f.receive(t, one, "first")
		m := c.want("event")
		data := m["data"].(map[string]any)
		if m["inbox_id"] != one.ID || m["event_type"] != "email.received" || data["subject"] != "first" || data["from"] != "bob@example.com" || data["body"] != nil {
			t.Errorf("event: %v", m)
		}
		c.say(fmt.Sprintf(`{"type":"unsubscribe","id":"req_2","inbox_ids":[%q]}`, one.ID))
		c.want("unsubscribed")
		f.receive(t, one, "unheard")
		f.receive(t, two, "second")
		if m := c.want("event"); m["inbox_id"] != two.ID {
			t.Errorf("event: %v", m)
		}
		c.say(`{"type":"ping"}`)
		c.want("pong")
		// An inbox that goes is told to be gone, and the rest goes on.
		if got := f.do(t, "account", "DELETE", "/v1/inboxes/"+two.ID, ""); got.code != 200 {
			t.Fatal(got)
		}
		if m := c.want("error"); m["inbox_id"] != two.ID {
			t.Errorf("a deleted inbox: %v", m)
		}
		// A token that is revoked hears no more.
		f.revoke(t, "account")
		if m := c.want("error"); m["code"] != "unauthorized" {
			t.Errorf("after revoking: %v", m)
		}
		if _, err := c.hear(); websocket.CloseStatus(err) != websocket.StatusPolicyViolation {
			t.Errorf("after revoking: %v", err)
		}
		if _, resp, err := f.dial(t, url, ""); err == nil || resp.StatusCode != 401 {
			t.Errorf("a revoked token: %v, %v", resp, err)
		}
		if strings.Contains(f.log.String(), f.key("account").Reveal()) {
			t.Error("the token in the address is in the log")
		}
	})
}

// TestLobsterPoll: who waits is told of what fits and arrives, and a filter
// that nothing fits ends with 204.
func TestLobsterPoll(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.account(t, "account")
	b := f.makeInbox(t, "account", `{}`)
	path := "/v1/inboxes/" + b.ID + "/emails/poll?since=" + time.Now().Add(-time.Minute).UTC().Format(time.RFC3339)
	answers := make(chan answered, 1)
	go func() {
		for end := time.Now().Add(patience); ; { // again if the machine stood still for all of the wait
			got := f.do(t, "account", "GET", path+"&from=bob@example.com&subject=fits", "")
			if got.code != 204 || time.Now().After(end) {
				answers <- got
				return
			}
		}
	}()
	f.untilWaiting(t, 1)
	f.receive(t, b, "another")
	f.receive(t, b, "this-fits")
	select {
	case got := <-answers:
		if got.code != 200 || !strings.Contains(got.body, "this-fits") || strings.Contains(got.body, "another") {
			t.Errorf("got %+v", got)
		}
	case <-time.After(2 * patience):
		t.Fatal("it waits still")
	}
	for _, filter := range []string{"&from=eve@evil.example", "&subject=never"} {
		if got := f.do(t, "account", "GET", path+"&timeout=0"+filter, ""); got.code != 204 || got.body != "" {
			t.Errorf("%s = %+v", filter, got)
		}
	}
}
