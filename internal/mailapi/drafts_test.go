package mailapi

import (
	"encoding/base64"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestDrafts writes a draft, changes it, and sends it once.
func TestDrafts(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		at := "/v1/inboxes/" + f.a.ID + "/drafts"
		got := f.do(t, "key a", "POST", at, `{"subject":"Kohlrabi","attachments":[{"name":"../a.html","content_base64":"PGI+","content_type":"text/html"},{"name":"b","content_base64":"Yg=="}]}`)
		id := got.field(t, "id")
		if got.code != 201 || got.header.Get("Location") != at+"/"+id {
			t.Fatalf("created = %+v", got)
		}
		one := at + "/" + id
		if got := f.do(t, "key a", "GET", at, ""); got.code != 200 || strings.Count(got.body, `"id"`) != 1 || !strings.Contains(got.body, `"subject":"Kohlrabi"`) {
			t.Errorf("list = %s", got.body)
		}
		if got := f.do(t, "key a", "GET", one+"/attachments/0", ""); got.body != "<b>" || got.header.Get("Content-Type") != "application/octet-stream" || got.header.Get("Content-Disposition") != "attachment; filename=_.._a.html" {
			t.Errorf("file = %+v", got)
		}
		// It has nobody to go to yet, and that is told when it is sent.
		if got := f.do(t, "key a", "POST", one+"/send", `{}`); got.code != 400 || !strings.Contains(got.body, "to:") {
			t.Errorf("sent without recipients = %d %s", got.code, got.body)
		}
		if got := f.do(t, "key a", "POST", one, `{"version":1,"to":["bob@example.com"],"subject":"Kohlrabi 2","text":"see file","keep_attachments":[1]}`); got.code != 200 || got.field(t, "version") != "2" {
			t.Fatalf("update = %+v", got)
		}
		for name, body := range map[string]string{"update": `{"version":1,"subject":"late"}`, "with files": `{"version":1,"keep_attachments":[0]}`} {
			if got := f.do(t, "key a", "POST", one, body); got.code != 409 {
				t.Errorf("%s of a version that is gone = %d", name, got.code)
			}
		}
		if got := f.do(t, "key a", "POST", one+"/send", `{"version":1}`); got.code != 409 {
			t.Errorf("sent in a version that is gone = %d", got.code)
		}
		got = f.do(t, "key a", "GET", one, "")
		for _, want := range []string{`"text":"see file"`, `"name":"b"`, `"version":2`} {
			if !strings.Contains(got.body, want) || strings.Contains(got.body, "a.html") {
				t.Errorf("draft %s lacks %s", got.body, want)
			}
		}
		// Several who send it at the same time propose it once, and all hear of it.
		answers := make([]answered, 4)
		var wg sync.WaitGroup
		for i := range answers {
			wg.Go(func() { answers[i] = f.do(t, "key a", "POST", one+"/send", `{"version":2}`) })
		}
		wg.Wait()
		actions := map[string]bool{}
		for _, a := range answers {
			if a.code != 202 {
				t.Errorf("send = %d %s", a.code, a.body)
				continue
			}
			actions[a.field(t, "id")] = true
		}
		// So does who asks later, since the first answer was lost.
		for _, version := range []string{`{"version":2}`, `{}`} {
			again := f.do(t, "key a", "POST", one+"/send", version)
			if again.code != 202 || again.header.Get("Idempotency-Replayed") != "true" {
				t.Errorf("sent again as %s = %d %s", version, again.code, again.body)
				continue
			}
			actions[again.field(t, "id")] = true
		}
		if got := f.do(t, "key a", "POST", one+"/send", `{"version":1}`); got.code != 404 {
			t.Errorf("another version than was sent = %d %s", got.code, got.body)
		}
		if len(actions) != 1 {
			t.Errorf("proposed as %v", actions)
		}
		if got := f.do(t, "key a", "GET", one, ""); got.code != 404 {
			t.Errorf("after it was sent = %d", got.code)
		}
		if got := f.do(t, "person", "GET", "/v1/actions?state=pending", ""); strings.Count(got.body, `"id":"act_`) != 1 {
			t.Errorf("pending = %s", got.body)
		}

		for name, body := range map[string]string{
			"many people": `{"to":["` + strings.Repeat(`a@b.example","`, 60) + `"]}`, "a long text": `{"text":"` + strings.Repeat("a", 300000) + `"}`,
			"not base64": `{"attachments":[{"name":"a","content_base64":"!"}]}`, "a time": `{"send_at":"2030-01-01T00:00:00Z"}`, "no id": `{"reply_to":"'"}`,
			"large files": `{"attachments":[{"name":"a","content_base64":"` + base64.StdEncoding.EncodeToString(make([]byte, 26<<20)) + `"}]}`,
		} {
			if got := f.do(t, "key a", "POST", at, body); got.code != 400 && name != "large files" || got.code < 400 {
				t.Errorf("%s = %d %.200s", name, got.code, got.body)
			}
		}
		if got := f.do(t, "key a", "GET", at, ""); strings.Contains(got.body, `"id"`) {
			t.Errorf("what was refused is there: %.300s", got.body)
		}
		// A reader's answer to a message, deleted.
		id = f.do(t, "key a", "POST", at, fmt.Sprintf(`{"reply_to":%q,"text":"thanks"}`, f.message(t, f.a, "key a"))).field(t, "id")
		if got := f.do(t, "key a", "DELETE", at+"/"+id, ""); got.code != 204 {
			t.Errorf("delete = %d", got.code)
		}
		if got := f.do(t, "key a", "DELETE", at+"/"+id, ""); got.code != 404 {
			t.Errorf("delete again = %d", got.code)
		}
	})
}

// TestContactsAndExport is what an inbox can take along.
func TestContactsAndExport(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.arrive(t, f.a, "key a", "From: Zoë Bob <bob@EXAMPLE.com>\r\nSubject: 1\r\n\r\nFrom the start\r\n>From a quote\r\nplain\r\n")
	f.arrive(t, f.a, "key a", "From: \"Mallory, bob@example.com\" <mallory@evil.example>\r\nSubject: 2\r\n\r\nx")
	f.arrive(t, f.a, "key a", "From: Bob <bob@example.com>\r\nSubject: 3\r\n\r\nx\r\n")
	at := "/v1/inboxes/" + f.a.ID
	got := f.do(t, "key a", "GET", at+"/contacts", "")
	for _, want := range []string{`{"address":"bob@example.com","name":"Bob","received":2,"sent":0,`, `{"address":"mallory@evil.example","name":"Mallory, bob@example.com","received":1,`} {
		if !strings.Contains(got.body, want) {
			t.Errorf("contacts %s lack %s", got.body, want)
		}
	}
	if got := f.do(t, "key a", "GET", at+"/contacts?q=MALL", ""); strings.Count(got.body, `"address"`) != 1 {
		t.Errorf("contacts by name = %s", got.body)
	}
	if got := f.do(t, "key a", "GET", at+"/contacts?limit=1", ""); got.field(t, "next_cursor") != "1" {
		t.Errorf("a page of contacts = %s", got.body)
	}
	if got := f.do(t, "key a", "GET", at+"/contacts?limit=1&cursor=1", ""); got.field(t, "next_cursor") != "" || !strings.Contains(got.body, "mallory@") {
		t.Errorf("the next = %s", got.body)
	}
	got = f.do(t, "key a", "GET", at+"/export", "")
	if got.code != 200 || got.header.Get("Content-Type") != "application/mbox" || strings.Contains(got.body, "\r") {
		t.Fatalf("export = %d %v", got.code, got.header)
	}
	var froms []string
	for line := range strings.SplitSeq(got.body, "\n") {
		if strings.HasPrefix(line, "From ") {
			froms = append(froms, strings.Fields(line)[1])
		}
	}
	if s := strings.Join(froms, " "); s != "bob@example.com mallory@evil.example bob@example.com" {
		t.Errorf("messages of %s", s)
	}
	if !strings.Contains(got.body, "\n>From the start\n>>From a quote\nplain\n\nFrom ") {
		t.Errorf("not quoted: %s", got.body)
	}
	if got := f.do(t, "person", "GET", "/v1/audit?verb=inbox.export", ""); strings.Count(got.body, f.a.ID) != 1 {
		t.Errorf("audit = %s", got.body)
	}
}

// TestDraftingKey writes, replaces and deletes drafts with a key that reads none back.
func TestDraftingKey(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		made := f.do(t, "key a", "POST", "/v1/inboxes/"+f.a.ID+"/keys", `{"scopes":["draft"],"name":"writer"}`)
		if made.code != 201 || made.field(t, "scope") != "draft" {
			t.Fatalf("key = %+v", made)
		}
		f.byKey("writer", auth.Secret(made.field(t, "key")))
		at := "/v1/inboxes/" + f.a.ID + "/drafts"
		got := f.do(t, "writer", "POST", at, `{"subject":"Kohlrabi","text":"one","attachments":[{"name":"b","content_base64":"Yg=="}]}`)
		if got.code != 201 {
			t.Fatalf("created = %+v", got)
		}
		one := at + "/" + got.field(t, "id")
		if got := f.do(t, "writer", "POST", one, `{"version":1,"to":["bob@example.com"],"subject":"Kohlrabi 2","text":"two"}`); got.code != 200 || got.field(t, "version") != "2" {
			t.Errorf("replaced = %+v", got)
		}
		for name, got := range map[string]answered{
			"list": f.do(t, "writer", "GET", at, ""), "read": f.do(t, "writer", "GET", one, ""), "keep a file": f.do(t, "writer", "POST", one, `{"version":2,"keep_attachments":[0]}`),
			"send the draft": f.do(t, "writer", "POST", one+"/send", `{}`), "send": f.do(t, "writer", "POST", "/v1/inboxes/"+f.a.ID+"/messages", `{"to":["bob@example.com"],"subject":"s","text":"t"}`),
			"events": f.do(t, "writer", "GET", "/v1/inboxes/"+f.a.ID+"/events", ""), "keys": f.do(t, "writer", "GET", "/v1/inboxes/"+f.a.ID+"/keys", ""),
		} {
			if got.code != 403 || strings.Contains(got.body, "Kohlrabi") {
				t.Errorf("a drafting key may %s: %d %s", name, got.code, got.body)
			}
		}
		if got := f.do(t, "key a", "GET", one, ""); got.code != 200 || !strings.Contains(got.body, `"text":"two"`) || strings.Contains(got.body, `"name":"b"`) {
			t.Errorf("the inbox's key reads %s", got.body)
		}
		if got := f.do(t, "writer", "DELETE", one, ""); got.code != 204 {
			t.Errorf("deleted = %+v", got)
		}
		// It replaces itself, and no other.
		who, err := auth.CheckKey(t.Context(), f.db, f.secret("key a"))
		if err != nil {
			t.Fatal(err)
		}
		if got := f.do(t, "writer", "POST", "/v1/inboxes/"+f.a.ID+"/keys/"+who.ID+"/rotate", ""); got.code != 403 {
			t.Errorf("it rotates another key: %+v", got)
		}
		again := f.do(t, "writer", "POST", "/v1/inboxes/"+f.a.ID+"/keys/"+made.field(t, "id")+"/rotate", "")
		if again.code != 201 || again.field(t, "scope") != "draft" {
			t.Fatalf("rotated = %+v", again)
		}
		if got := f.do(t, "writer", "POST", at, `{"subject":"late"}`); got.code != 401 {
			t.Errorf("the replaced key = %+v", got)
		}
		f.byKey("writer", auth.Secret(again.field(t, "key")))
		if got := f.do(t, "writer", "POST", at, `{"subject":"anew"}`); got.code != 201 {
			t.Errorf("the new key = %+v", got)
		}
	})
}

// TestKeyRequests refuses keys with scopes and tools that are none.
func TestKeyRequests(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		at := "/v1/inboxes/" + f.a.ID + "/keys"
		for body, want := range map[string]string{
			`{"scope":"root"}`:                              "scope:",
			`{"scope":"recover"}`:                           "scope:",
			`{"scopes":["read","recover"]}`:                 "scope:",
			`{"scope":"read","scopes":["send"]}`:            "scopes:",
			`{"scope":"read","tools":["email send"]}`:       "tools[0]",
			`{"scope":"read","tools":["<script>"]}`:         "tools[0]",
			`{"tools":["email_send"]}`:                      "tools:", // a full key makes itself another
			`{"scope":"full","tools":["email_send"]}`:       "tools:",
			`{"scope":"full read","tools":["email_inbox"]}`: "tools:",
		} {
			if got := f.do(t, "key a", "POST", at, body); got.code != 400 || !strings.Contains(got.body, want) {
				t.Errorf("%s = %d %s", body, got.code, got.body)
			}
		}
		for body, want := range map[string]string{
			`{"scope":"propose"}`: `"scope":"propose","scopes":["read","draft","send"],"tools":[]`, `{"scopes":["send","read","draft"]}`: `"scope":"propose"`,
			`{"scope":"send read"}`: `"scope":"read send","scopes":["read","send"]`, `{"scope":"send","tools":["email_send","email_help","email_send"]}`: `"tools":["email_help","email_send"]`,
			`{}`: `"scope":"full","scopes":["full"]`,
		} {
			if got := f.do(t, "key a", "POST", at, body); got.code != 201 || !strings.Contains(got.body, want) {
				t.Errorf("%s = %d %s", body, got.code, got.body)
			}
		}
		if got := f.do(t, "key a", "POST", "/v1/inboxes/"+f.a.ID+"/grants", fmt.Sprintf(`{"scope":"send draft","tools":["email_send"],"expires_at":%q}`, time.Now().Add(time.Hour).Format(time.RFC3339))); got.code != 201 || !strings.Contains(got.body, `"tools":["email_send"]`) {
			t.Errorf("grant = %d %s", got.code, got.body)
		}
	})
}
