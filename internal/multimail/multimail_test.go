package multimail

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// ids returns the IDs of a list of emails.
func ids(a answered) (out []string) {
	for _, e := range a.list("emails") {
		out = append(out, fmt.Sprint(e["id"]))
	}
	return out
}

// TestStory: an account makes a mailbox, sends, is reviewed, receives and answers.
func TestStory(t *testing.T) {
	eachStore(t, func(t *testing.T, f *fixture) {
		f.account(t, "mine", f.a.Project)
		if !strings.HasPrefix(f.keys["mine"], KeyPrefix) {
			t.Fatal("the key has not MultiMail's prefix")
		}
		box := f.want(t, 201, "mine", "POST", "/v1/mailboxes", `{"address_local":"helper","display_name":"Helper"}`)
		path := "/v1/mailboxes/" + box.text("id")
		if box.text("address") != "helper@agents.test" || box.text("oversight_mode") != "gated_send" || !strings.HasPrefix(box.text("inbox_key"), "pib_") {
			t.Errorf("created %s", box.body)
		}
		f.want(t, 409, "mine", "POST", "/v1/mailboxes", `{"address_local":"helper"}`)
		f.want(t, 400, "mine", "POST", "/v1/mailboxes", `{}`)

		letter := fmt.Sprintf(`{"to":["bob@example.com"],"cc":["carl@example.com"],"bcc":["dora@example.com"],"subject":"Hello","markdown":"**Hi**","attachments":[{"name":"a.txt","content_base64":%q,"content_type":"text/plain"}],"idempotency_key":"k1"}`,
			base64.StdEncoding.EncodeToString([]byte("file")))
		sent := f.want(t, 202, "mine", "POST", path+"/send", letter)
		if sent.text("status") != pendingSend {
			t.Errorf("sent: %s", sent.body)
		}
		again := f.want(t, 200, "mine", "POST", path+"/send", letter)
		if again.text("id") != sent.text("id") || again.text("status") != "already_sent" || again.json["idempotent"] != true {
			t.Errorf("repeated: %s", again.body)
		}
		f.want(t, 409, "mine", "POST", path+"/send", strings.Replace(letter, "Hello", "Other", 1)) // the key is of another request
		dup := f.want(t, 409, "mine", "POST", path+"/send", strings.Replace(letter, "k1", "k2", 1))
		if dup.text("id") != sent.text("id") {
			t.Errorf("duplicate: %s", dup.body)
		}

		list := f.want(t, 200, "mine", "GET", path+"/emails?status=pending_send_approval", "")
		if got := ids(list); !slices.Equal(got, []string{sent.text("id")}) || list.list("emails")[0]["subject"] != "Hello" {
			t.Errorf("pending: %s", list.body)
		}
		one := f.want(t, 200, "mine", "GET", path+"/emails/"+sent.text("id"), "")
		if one.text("markdown") != "**Hi**" || !strings.Contains(one.body, "a.txt") || strings.Contains(one.body, "dora@") {
			t.Errorf("read: %s", one.body)
		}
		if got := f.want(t, 200, "mine", "GET", path+"/emails/"+sent.text("id")+"/attachments/a.txt", ""); got.body != "file" {
			t.Errorf("its file: %q", got.body)
		}
		if got := f.decide(t, sent.text("id"), "approve"); got.text("status") != "approved" {
			t.Errorf("decided: %s", got.body)
		}
		f.run(t)
		if len(f.hop.got) != 1 || !slices.Equal(f.hop.got[0].To, []string{"bob@example.com", "carl@example.com", "dora@example.com"}) {
			t.Fatalf("left: %+v", f.hop.got)
		}
		done := f.want(t, 200, "mine", "GET", path+"/emails/"+sent.text("id"), "")
		if done.text("status") != "sent" || done.json["approved_at"] == nil || done.json["approved_by"] != nil || done.json["delivered_at"] == nil {
			t.Errorf("sent: %s", done.body)
		}
		f.want(t, 409, "mine", "POST", path+"/emails/"+sent.text("id")+"/cancel", "")

		b, err := f.post.Directory.Find(t.Context(), f.person, box.text("id"))
		f.must(t, err)
		f.shows("support", auth.Secret(box.text("inbox_key")))
		in := f.arrive(t, b, "support", "Question")
		fresh := f.want(t, 200, "mine", "GET", path+"/emails?status=unread&since_id="+sent.text("id"), "")
		if got := ids(fresh); !slices.Equal(got, []string{in}) {
			t.Fatalf("arrived: %s", fresh.body)
		}
		thread := fmt.Sprint(fresh.list("emails")[0]["thread_id"])
		whole := f.want(t, 200, "support", "GET", path+"/emails/"+in, "")
		if whole.text("status") != "read" || !strings.Contains(whole.text("markdown"), "Text of Question") || whole.text("from") != "bob@example.com" {
			t.Errorf("read: %s", whole.body)
		}
		if got := f.want(t, 200, "mine", "GET", path+"/emails?status=unread", ""); len(ids(got)) != 0 {
			t.Errorf("unread: %s", got.body)
		}
		if got := f.want(t, 200, "mine", "GET", path+"/threads/"+thread, ""); got.text("message_count") != "1" || got.json["has_unanswered_inbound"] != true {
			t.Errorf("thread: %s", got.body)
		}
		answer := f.want(t, 202, "mine", "POST", path+"/reply/"+in, `{"markdown":"An answer"}`)
		if answer.text("thread_id") != thread {
			t.Errorf("answered: %s", answer.body)
		}
		f.want(t, 409, "mine", "POST", path+"/reply/"+in, `{"markdown":"An answer"}`)
		f.want(t, 400, "mine", "POST", path+"/reply/"+in, `{"markdown":"x","to":["eve@example.com"]}`)
		f.decide(t, answer.text("id"), "approve")
		f.run(t)
		if got := f.want(t, 200, "mine", "GET", path+"/threads/"+thread, ""); got.text("message_count") != "2" || got.json["has_unanswered_inbound"] != false {
			t.Errorf("thread: %s", got.body)
		}
		no := f.want(t, 202, "mine", "POST", path+"/send", `{"to":["bob@example.com"],"subject":"No","markdown":"t"}`)
		f.decide(t, no.text("id"), "reject")
		if got := f.want(t, 200, "mine", "GET", path+"/emails/"+no.text("id"), ""); got.text("status") != "rejected" || got.json["reason"] == nil {
			t.Errorf("rejected: %s", got.body)
		}
		if got := f.want(t, 200, "mine", "GET", "/v1/usage", ""); got.text("emails_sent") != "2" || got.text("emails_received") != "1" {
			t.Errorf("usage: %s", got.body)
		}
		if got := f.want(t, 200, "mine", "GET", "/v1/usage?period=daily", ""); len(got.list("data")) != 2 {
			t.Errorf("daily: %s", got.body)
		}
		if got := f.want(t, 200, "mine", "GET", "/v1/account", ""); got.text("emails_sent_this_month") != "2" || got.json["sending_disabled"] != false || got.text("max_mailboxes") != "25" {
			t.Errorf("account: %s", got.body)
		}
		f.want(t, 200, "mine", "DELETE", path, "")
		f.want(t, 403, "mine", "GET", path, "")
	})
}

// TestDecisionCoversWhatWasListed: an agent changes its email after a person has
// listed it. What the person then approves is not what would leave.
func TestDecisionCoversWhatWasListed(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	path := "/v1/mailboxes/" + f.a.ID
	id := f.want(t, 202, "key a", "POST", path+"/send", `{"to":["bob@example.com"],"subject":"Harmless","markdown":"t"}`).text("id")
	shown := f.want(t, 200, "person", "GET", "/v1/oversight/pending", "").list("emails")[0]
	f.want(t, 200, "key a", "PATCH", path+"/emails/"+id+"/schedule", `{"to":["eve@evil.example"],"markdown":"secrets"}`)
	old := f.want(t, 409, "person", "POST", "/v1/oversight/decide", fmt.Sprintf(`{"email_id":%q,"action":"approve"}`, shown["id"]))
	if !strings.Contains(old.text("error"), "again") {
		t.Error(old.body)
	}
	for _, forged := range []string{id, id + ".1.x", strings.Replace(fmt.Sprint(shown["id"]), ".1.", ".2.", 1)} {
		if got := f.do(t, "person", "POST", "/v1/oversight/decide", fmt.Sprintf(`{"email_id":%q,"action":"approve"}`, forged)); got.code != 400 && got.code != 409 {
			t.Errorf("%s: got %d %s", forged, got.code, got.body)
		}
	}
	now := f.want(t, 200, "person", "GET", "/v1/oversight/pending", "").list("emails")[0]
	if fmt.Sprint(now["to"]) != "[eve@evil.example]" || !strings.Contains(fmt.Sprint(now["body_markdown"]), "secrets") {
		t.Errorf("listed: %v", now)
	}
	f.want(t, 200, "person", "POST", "/v1/oversight/decide", fmt.Sprintf(`{"email_id":%q,"action":"reject"}`, now["id"]))
	f.run(t)
	if len(f.hop.got) != 0 {
		t.Errorf("left: %+v", f.hop.got)
	}
}

// TestListMerges: what arrived, what was sent, what waits and what is held are one
// list, newest first, and each email is on one page.
func TestListMerges(t *testing.T) {
	eachStore(t, func(t *testing.T, f *fixture) {
		path := "/v1/mailboxes/" + f.a.ID
		var want []string
		for i := range 7 {
			if i%2 == 0 {
				want = append(want, f.arrive(t, f.a, "key a", fmt.Sprintf("In %d", i)))
			} else {
				want = append(want, f.want(t, 202, "key a", "POST", path+"/send", fmt.Sprintf(`{"to":["bob@example.com"],"subject":"Out %d","markdown":"t"}`, i)).text("id"))
			}
			time.Sleep(time.Microsecond) // their times order them
		}
		slices.Reverse(want)
		var got []string
		for cursor, pages := "", 0; pages == 0 || cursor != ""; pages++ {
			page := f.want(t, 200, "key a", "GET", path+"/emails?limit=2&cursor="+cursor, "")
			got = append(got, ids(page)...)
			cursor, _ = page.json["cursor"].(string)
			if pages > 10 {
				t.Fatal("it does not end")
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
		for query, n := range map[string]int{
			"direction=inbound": 4, "direction=outbound": 3, "sender=BOB@": 4, "subject_contains=out+1": 1, "has_attachments=true": 4, "has_attachments=false": 3,
			"status=unread": 4, "status=read": 0, "status=pending_send_approval&direction=inbound": 0, "status=cancelled": 0, "status=archived": 0,
			"date_after=" + time.Now().Add(time.Hour).UTC().Format(time.RFC3339): 0, "date_before=" + time.Now().Add(time.Hour).UTC().Format(time.RFC3339): 7, "date_before=2020-01-01": 0,
			"since_id=" + want[2]: 2, "since_id=" + want[0]: 0, "offset=0&limit=100": 7,
		} {
			if got := f.want(t, 200, "key a", "GET", path+"/emails?"+query, ""); len(ids(got)) != n {
				t.Errorf("%s: got %d, want %d", query, len(ids(got)), n)
			}
		}
		for _, bad := range []string{"limit=0", "limit=101", "status=odd", "direction=up", "cursor=*", "since_id=msg_AAAAAAAAAAAAAAAAAAAAAAAAAA", "since_id=x", "date_after=yesterday", "has_attachments=maybe", "folder=x", "offset=20"} {
			f.want(t, 400, "key a", "GET", path+"/emails?"+bad, "")
		}
	})
}

// TestHeldMail: mail that waits for a person is listed, and no key lets it in.
func TestHeldMail(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	path := "/v1/mailboxes/" + f.a.ID
	f.want(t, 200, "key a", "PATCH", path+"/configure", `{"oversight_mode":"gated_all","mcp_configured":1}`)
	raw := "From: bob@example.com\r\nTo: alice@agents.test\r\nSubject: Held\r\n\r\nText\r\n"
	f.must(t, f.post.Receive(t.Context(), arrival(f.a, raw)))
	held := f.want(t, 200, "key a", "GET", path+"/emails?status=pending_inbound_approval", "")
	if len(ids(held)) != 1 || held.list("emails")[0]["subject"] != "Held" {
		t.Fatal(held.body)
	}
	id := ids(held)[0]
	if got := f.want(t, 200, "key a", "GET", path+"/emails/"+id, ""); got.text("status") != pendingIn || !strings.Contains(got.text("markdown"), "Text") {
		t.Error(got.body)
	}
	f.want(t, 403, "key a", "POST", "/v1/emails/"+id+"/not-spam", "")
	f.want(t, 409, "key a", "POST", path+"/emails/"+id+"/cancel", "")
	waits := f.want(t, 200, "person", "GET", "/v1/oversight/pending", "").list("emails")
	if len(waits) != 1 || waits[0]["direction"] != "inbound" || strings.Contains(fmt.Sprint(waits[0]), "Held") { // its content is sealed
		t.Fatal(waits)
	}
	f.want(t, 200, "person", "POST", "/v1/oversight/decide", fmt.Sprintf(`{"email_id":%q,"action":"approve"}`, waits[0]["id"]))
	f.run(t)
	if got := f.want(t, 200, "key a", "GET", path+"/emails?status=unread", ""); len(ids(got)) != 1 {
		t.Error(got.body)
	}
}

// TestSpam: a report takes a message out of the inbox, and back.
func TestSpam(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	id := f.arrive(t, f.a, "key a", "Win a prize")
	other := f.arrive(t, f.a, "key a", "Lunch")
	f.want(t, 200, "key a", "POST", "/v1/emails/"+id+"/report-spam", "")
	if got := f.want(t, 200, "key a", "GET", "/v1/emails", ""); !slices.Equal(ids(got), []string{id}) || got.list("emails")[0]["status"] != spamConfirmed {
		t.Error(got.body)
	}
	if got := f.want(t, 200, "key a", "GET", "/v1/mailboxes/"+f.a.ID+"/emails?status=unread", ""); !slices.Equal(ids(got), []string{other}) {
		t.Error(got.body)
	}
	f.want(t, 404, "key b", "POST", "/v1/emails/"+id+"/not-spam", "")
	f.want(t, 200, "key a", "POST", "/v1/emails/"+id+"/not-spam", "")
	if got := f.want(t, 200, "key a", "GET", "/v1/emails", ""); len(ids(got)) != 0 {
		t.Error(got.body)
	}
	if got := f.want(t, 200, "key a", "GET", "/v1/mailboxes/"+f.a.ID+"/emails?status=unread", ""); len(ids(got)) != 2 {
		t.Error(got.body)
	}
}

// TestTagsAndContacts: what agents write down is sealed, bounded, and theirs alone.
func TestTagsAndContacts(t *testing.T) {
	eachStore(t, func(t *testing.T, f *fixture) {
		id := f.arrive(t, f.a, "key a", "Invoice")
		path := "/v1/mailboxes/" + f.a.ID + "/emails/" + id + "/tags"
		f.want(t, 200, "key a", "PUT", path, `{"tags":{"due":"2027-01-31","amount":"kohlrabi 50"}}`)
		if got := f.want(t, 200, "key a", "PUT", path, `{"tags":{"due":"2027-02-28"}}`); fmt.Sprint(got.json["tags"]) != "map[amount:kohlrabi 50 due:2027-02-28]" {
			t.Error(got.body)
		}
		f.want(t, 200, "key a", "DELETE", path+"/due", "")
		if got := f.want(t, 200, "key a", "GET", path, ""); fmt.Sprint(got.json["tags"]) != "map[amount:kohlrabi 50]" {
			t.Error(got.body)
		}
		if got := f.want(t, 200, "key a", "GET", strings.TrimSuffix(path, "/tags"), ""); fmt.Sprint(got.json["tags"]) != "map[amount:kohlrabi 50]" {
			t.Error(got.body)
		}
		f.want(t, 400, "key a", "PUT", path, `{"tags":{"a\u0000b":"x"}}`)
		f.want(t, 400, "key a", "PUT", path, fmt.Sprintf(`{"tags":{"a":%q}}`, strings.Repeat("x", 1001)))
		f.want(t, 400, "key a", "PUT", path, `{"tags":{}}`)

		saved := f.want(t, 201, "key a", "POST", "/v1/contacts", `{"name":"Kohlrabi Farm","email":"Farm@Example.com","tags":["supplier"]}`)
		if got := f.want(t, 200, "key a", "GET", "/v1/contacts?q=kohl", ""); len(got.list("contacts")) != 1 || got.list("contacts")[0]["email"] != "farm@example.com" {
			t.Error(got.body)
		}
		for _, q := range []string{"?q=nobody", "?q=supplier"} { // by name or address alone
			if got := f.want(t, 200, "key a", "GET", "/v1/contacts"+q, ""); len(got.list("contacts")) != 0 {
				t.Error(got.body)
			}
		}
		for _, bad := range []string{`{"name":"x"}`, `{"name":"x","email":"no"}`, `{"name":"a\nb","email":"a@example.com"}`, `{"name":"x","email":"a@example.com","mailbox_id":"` + f.b.ID + `"}`} {
			f.want(t, 400, "key a", "POST", "/v1/contacts", bad)
		}
		if got := f.want(t, 200, "key b", "GET", "/v1/contacts", ""); len(got.list("contacts")) != 0 {
			t.Error(got.body)
		}
		var notes, plain int
		f.must(t, f.db.View(t.Context(), func(tx *store.Tx) error {
			rows, err := tx.QueryContext(t.Context(), `select data from inbox_note`)
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
				var data []byte
				if err := rows.Scan(&data); err != nil {
					return err
				}
				notes++
				if strings.Contains(strings.ToLower(string(data)), "kohlrabi") {
					plain++
				}
			}
			return rows.Err()
		}))
		if notes != 2 || plain != 0 {
			t.Errorf("%d notes, %d of them not sealed", notes, plain)
		}
		f.want(t, 200, "key a", "DELETE", "/v1/contacts/"+saved.text("id"), "")
		f.want(t, 404, "key a", "DELETE", "/v1/contacts/"+saved.text("id"), "")
	})
}

// TestScheduled: an email with a time is listed, changed and cancelled.
func TestScheduled(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	path := "/v1/mailboxes/" + f.a.ID
	at := time.Now().Add(time.Hour).UTC().Truncate(time.Second).Format(time.RFC3339)
	later := f.want(t, 202, "key a", "POST", path+"/send", fmt.Sprintf(`{"to":["bob@example.com"],"subject":"Later","markdown":"**t**","send_at":%q,"gate_timing":"schedule_first"}`, at))
	if later.text("status") != scheduled {
		t.Fatal(later.body)
	}
	email := path + "/emails/" + later.text("id")
	next := time.Now().Add(2 * time.Hour).UTC().Truncate(time.Second).Format(time.RFC3339)
	if got := f.want(t, 200, "key a", "PATCH", email+"/schedule", fmt.Sprintf(`{"send_at":%q,"subject":"Even later","bcc":["dora@example.com"]}`, next)); got.text("send_at") != next || got.text("status") != scheduled {
		t.Error(got.body)
	}
	got := f.want(t, 200, "key a", "GET", email, "")
	if got.text("subject") != "Even later" || got.text("markdown") != "**t**" {
		t.Error(got.body)
	}
	f.want(t, 400, "key a", "PATCH", email+"/schedule", `{}`)
	f.want(t, 400, "key a", "PATCH", email+"/schedule", `{"send_at":"2027-01-01T00:00:00+02:00"}`)
	f.want(t, 400, "key a", "PATCH", email+"/schedule", `{"to":["not an address"]}`)
	f.want(t, 404, "key b", "PATCH", strings.Replace(email, f.a.ID, f.b.ID, 1)+"/schedule", `{"subject":"x"}`)
	for range 2 { // a repetition changes nothing
		if got := f.want(t, 200, "key a", "POST", email+"/cancel", ""); got.text("status") != cancelled {
			t.Error(got.body)
		}
	}
	if got := f.want(t, 200, "key a", "GET", path+"/emails?status=cancelled", ""); len(ids(got)) != 1 {
		t.Error(got.body)
	}
}

// TestModes: a mode goes down freely and up by an owner.
func TestModes(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	path := "/v1/mailboxes/" + f.a.ID
	f.want(t, 403, "key a", "PATCH", path, `{"oversight_mode":"autonomous"}`)
	f.want(t, 400, "key a", "PATCH", path, `{"oversight_mode":"odd"}`)
	f.want(t, 403, "key a", "PATCH", path, `{"oversight_mode":"autonomous","display_name":"Half"}`)
	if got := f.want(t, 200, "key a", "GET", path, ""); got.json["display_name"] != nil {
		t.Errorf("half of a change was made: %s", got.body)
	}
	asked := f.want(t, 200, "key a", "POST", path+"/request-upgrade", `{"target_mode":"monitored"}`)
	if asked.text("status") != "upgrade_requested" || asked.text("id") == "" {
		t.Error(asked.body)
	}
	f.want(t, 400, "key a", "POST", path+"/request-upgrade", `{"target_mode":"read_only"}`)
	f.want(t, 403, "key a", "POST", path+"/upgrade", `{"code":"AAAA-AAAA-AAAA-AAAA"}`)
	code, _, err := f.post.ModeCode(t.Context(), f.person, f.a.ID, policy.Monitored, "three good weeks")
	f.must(t, err)
	if got := f.want(t, 200, "key a", "POST", path+"/upgrade", fmt.Sprintf(`{"code":%q}`, code.Reveal())); got.text("status") != "upgraded" || got.text("oversight_mode") != "monitored" {
		t.Error(got.body)
	}
	f.want(t, 403, "key a", "POST", path+"/upgrade", fmt.Sprintf(`{"code":%q}`, code.Reveal())) // once
	for _, absent := range []string{`{"auto_bcc":"eve@evil.example"}`, `{"signature_block":"x"}`, `{"forward_inbound":true}`, `{"webhook_url":"https://evil.example"}`, `{"scheduling_enabled":0}`, `{"default_gate_timing":"schedule_first"}`} {
		f.want(t, 501, "key a", "PATCH", path, absent)
	}
	f.want(t, 403, "key a", "PATCH", path, `{"ai_disclosure":0}`)
	f.want(t, 200, "key a", "PATCH", path+"/configure", `{"oversight_mode":"read_only","display_name":"Reader","auto_cc":null,"scheduling_enabled":1,"ai_disclosure":1,"mcp_configured":1}`)
	if got := f.want(t, 403, "key a", "POST", path+"/send", `{"to":["bob@example.com"],"subject":"s","markdown":"t"}`); !strings.Contains(got.text("error"), "read_only") {
		t.Error(got.body)
	}
}

// TestKeys: a key gives no more than the key that made it, ends everywhere at once,
// and never decides.
func TestKeys(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	for _, scope := range []string{"oversight", "admin"} {
		f.want(t, 403, "key a", "POST", "/v1/api-keys", fmt.Sprintf(`{"name":"x","scopes":["send",%q]}`, scope))
	}
	f.want(t, 400, "key a", "POST", "/v1/api-keys", `{"name":"x","scopes":["all"]}`)
	f.account(t, "mine", f.a.Project)
	f.want(t, 409, "mine", "POST", "/v1/api-keys", `{"name":"x"}`)
	one := f.want(t, 201, "mine", "POST", "/v1/mailboxes", `{"address_local":"one"}`).text("id")
	two := f.want(t, 201, "mine", "POST", "/v1/mailboxes", `{"address_local":"two"}`).text("id")
	made := f.want(t, 201, "mine", "POST", "/v1/api-keys", `{"name":"reader"}`)
	f.shows("reader", auth.Secret(made.text("api_key")))
	if !strings.HasPrefix(made.text("api_key"), KeyPrefix) || fmt.Sprint(made.json["scopes"]) != "[read]" {
		t.Error(made.body)
	}
	for _, box := range []string{one, two} {
		f.want(t, 200, "reader", "GET", "/v1/mailboxes/"+box+"/emails", "")
		f.want(t, 403, "reader", "POST", "/v1/mailboxes/"+box+"/send", `{"to":["bob@example.com"],"subject":"s","markdown":"t"}`)
	}
	f.want(t, 403, "reader", "GET", "/v1/mailboxes/"+f.a.ID+"/emails", "")
	f.want(t, 403, "reader", "GET", "/v1/api-keys", "")
	listed := f.want(t, 200, "mine", "GET", "/v1/api-keys", "")
	if strings.Contains(listed.body, made.text("api_key")) || !strings.Contains(listed.body, made.text("id")) {
		t.Error(listed.body)
	}
	f.want(t, 404, "key a", "DELETE", "/v1/api-keys/"+made.text("id"), "")
	f.want(t, 200, "mine", "DELETE", "/v1/api-keys/"+made.text("id"), "")
	if got := f.do(t, "reader", "GET", "/v1/mailboxes/"+one+"/emails", ""); got.code < 401 || got.code > 403 {
		t.Error(got.code, got.body)
	}
	// The same secret under its other name is the same key, and a session is none.
	f.shows("bare", auth.Secret("pgr_"+strings.TrimPrefix(f.keys["mine"], KeyPrefix)))
	f.want(t, 200, "bare", "GET", "/v1/mailboxes/"+one, "")
	for _, wrong := range []string{"mm_live_", "mm_live_x", "mm_test_" + strings.TrimPrefix(f.keys["mine"], KeyPrefix), KeyPrefix + strings.TrimPrefix(f.keys["key a"], "pib_")} {
		f.shows("wrong", auth.Secret(wrong))
		f.want(t, 401, "wrong", "GET", "/v1/mailboxes", "")
	}
	for key, want := range map[string]int{f.keys["mine"]: 200, f.keys["person"]: 401, "": 401} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", "http://postern.example"+Path+"/v1/mailboxes", http.NoBody)
		r.Header.Set("X-API-Key", key)
		w := httptest.NewRecorder()
		if f.h.ServeHTTP(w, r); w.Code != want {
			t.Errorf("X-API-Key: got %d, want %d", w.Code, want)
		}
	}
}

// TestHostileFiles: names of files lead nowhere, and two with one name differ.
func TestHostileFiles(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	part := func(name, kind, text string) string {
		return "--x\r\nContent-Type: " + kind + "\r\nContent-Disposition: attachment; filename=\"" + name + "\"\r\n\r\n" + text + "\r\n"
	}
	raw := "From: bob@example.com\r\nSubject: Files\r\nMIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=x\r\n\r\n" +
		part("a.txt", "text/plain", "one") + part("a.txt", "text/plain", "two") + part("../../etc/passwd", "text/html", "<script>") + part("url", "text/plain", "three") + "--x--\r\n"
	f.must(t, f.post.Receive(t.Context(), arrival(f.a, raw)))
	path := "/v1/mailboxes/" + f.a.ID + "/emails/"
	id := ids(f.want(t, 200, "key a", "GET", "/v1/mailboxes/"+f.a.ID+"/emails", ""))[0]
	var got []string
	for _, x := range f.want(t, 200, "key a", "GET", path+id, "").list("attachments") {
		name := fmt.Sprint(x["name"])
		file := f.want(t, 200, "key a", "GET", path+id+"/attachments/"+url.PathEscape(name), "")
		got = append(got, name+"="+file.body)
		if ct := file.header.Get("Content-Type"); strings.Contains(ct, "html") || file.header.Get("X-Content-Type-Options") != "nosniff" || strings.Contains(file.header.Get("Content-Disposition"), "/") {
			t.Errorf("%s: %v", name, file.header)
		}
		link := f.want(t, 200, "key a", "GET", path+id+"/attachments/"+url.PathEscape(name)+"/url", "")
		if !strings.HasPrefix(link.text("url"), "data:application/octet-stream;base64,") {
			t.Error(link.body)
		}
	}
	if want := []string{"a.txt=one", "a.txt (2)=two", "passwd=<script>", "url=three"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	f.want(t, 404, "key a", "GET", path+id+"/attachments/none", "")
}

// TestBodies: what is not exactly a request is refused, and nothing is done.
func TestBodies(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	path := "/v1/mailboxes/" + f.a.ID + "/send"
	for _, body := range []string{
		``, `[]`, `null x`, `{"to":["bob@example.com"],"subject":"s","markdown":"t"} {}`, `{"to":"bob@example.com","subject":"s","markdown":"t"}`, `{"to":["bob@example.com"],"subject":"s","markdown":"t","from":"eve@evil.example"}`,
		`{"to":[],"subject":"s","markdown":"t"}`, `{"to":["bob@example.com"],"subject":"s"}`, "{\"to\":[\"bob@example.com\"],\"subject\":\"s\\r\\nBcc: eve@evil.example\",\"markdown\":\"t\"}", "{\"to\":[\"bob@example.com\"],\"subject\":\"\xff\",\"markdown\":\"t\"}",
		`{"to":["bob@example.com"],"subject":"s","markdown":"t","attachments":[{"name":"a","content_base64":"*","content_type":"text/plain"}]}`, `{"to":["bob@example.com"],"subject":"s","markdown":"t","send_at":"tomorrow"}`,
		`{"to":["bob@example.com"],"subject":"s","markdown":"t","gate_timing":"never"}`,
	} {
		f.want(t, 400, "key a", "POST", path, body)
	}
	if got := f.want(t, 200, "key a", "GET", "/v1/mailboxes/"+f.a.ID+"/emails", ""); len(ids(got)) != 0 {
		t.Error(got.body)
	}
	f.want(t, 404, "key a", "GET", "/v1/nothing", "")
	f.want(t, 405, "key a", "PUT", "/v1/mailboxes", "")
	if got := f.do(t, "key a", "POST", "/v1/contacts", fmt.Sprintf(`{"name":%q}`, strings.Repeat("x", maxBody))); got.code != 413 {
		t.Error(got.code)
	}
	r := httptest.NewRequestWithContext(t.Context(), "POST", "http://postern.example"+Path+path, strings.NewReader(`{}`))
	r.Header.Set("Authorization", "Bearer "+f.keys["key a"])
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Origin", "https://evil.example")
	r.Header.Set("Sec-Fetch-Site", "cross-site")
	w := httptest.NewRecorder()
	if f.h.ServeHTTP(w, r); w.Code != 403 {
		t.Errorf("from a web page: %d", w.Code)
	}
}

func arrival(b directory.Inbox, raw string) mailbox.Arrival {
	return mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1"}
}

// FuzzBoundID: what reads as a bound ID is written the same way again, so that no two
// texts name one decision.
func FuzzBoundID(f *testing.F) {
	f.Add("act_AAAAAAAAAAAAAAAAAAAAAAAAAA.1." + strings.Repeat("A", 43))
	f.Add("act_AAAAAAAAAAAAAAAAAAAAAAAAAA.1." + strings.Repeat("A", 42) + "B")
	f.Add("act_AAAAAAAAAAAAAAAAAAAAAAAAAA.01." + strings.Repeat("_", 43))
	f.Add("act_A.0.x")
	f.Fuzz(func(t *testing.T, v string) {
		id, version, digest, ok := parseBound(v)
		if !ok {
			return
		}
		if again := bound(id, version, digest); again != v {
			t.Errorf("%q reads as %q", v, again)
		}
	})
}
