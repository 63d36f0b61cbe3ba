package mailapi

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

func TestIdempotencyKey(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		path := "/v1/inboxes/" + f.a.ID + "/messages"
		first := f.do(t, "key a", "POST", path, fresh(1), "Idempotency-Key", `"one"`)
		if first.code != 202 || first.header.Get("Idempotency-Replayed") != "" {
			t.Fatal(first)
		}
		for name, again := range map[string]answered{
			"once more":        f.do(t, "key a", "POST", path, fresh(1), "Idempotency-Key", `"one"`),
			"without quotes":   f.do(t, "key a", "POST", path, fresh(1), "Idempotency-Key", `one`),
			"as a field":       f.do(t, "key a", "POST", path, strings.Replace(fresh(1), "{", `{"idempotency_key":"one",`, 1)),
			"header and field": f.do(t, "key a", "POST", path, strings.Replace(fresh(1), "{", `{"idempotency_key":"one",`, 1), "Idempotency-Key", `"one"`),
		} {
			if again.code != 202 || again.body != first.body || again.header.Get("Idempotency-Replayed") != "true" || again.header.Get("Location") != first.header.Get("Location") {
				t.Errorf("%s: %d %s, replayed %q; want the first answer", name, again.code, again.body, again.header.Get("Idempotency-Replayed"))
			}
		}
		if got := f.do(t, "key a", "POST", path, fresh(2), "Idempotency-Key", `"one"`); got.code != 422 || got.field(t, "error") != "idempotency_key_reused" {
			t.Errorf("the key with another email: %d %s", got.code, got.body)
		}
		if got := f.do(t, "key b", "POST", "/v1/inboxes/"+f.b.ID+"/messages", fresh(1), "Idempotency-Key", `"one"`); got.code != 202 || got.header.Get("Idempotency-Replayed") != "" {
			t.Errorf("another inbox with the key: %d %s", got.code, got.body)
		}
		for _, key := range []string{`"`, `""`, `"one`, strings.Repeat("x", 256), "a\x01b", "ü"} {
			if got := f.do(t, "key a", "POST", path, fresh(3), "Idempotency-Key", key); got.code != 400 || !strings.Contains(got.body, "Idempotency-Key") {
				t.Errorf("key %q: %d %s", key, got.code, got.body)
			}
		}
		if got := f.do(t, "key a", "POST", path, strings.Replace(fresh(3), "{", `{"idempotency_key":"two",`, 1), "Idempotency-Key", `"one"`); got.code != 400 {
			t.Errorf("two keys: %d %s", got.code, got.body)
		}
	})
}

func TestDuplicate(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, oversighttest.Rules{{ID: "all", Kind: "*", Effect: policy.Allow}})
		path := "/v1/inboxes/" + f.a.ID + "/messages"
		first := f.do(t, "key a", "POST", path, draft)
		got := f.do(t, "key a", "POST", path, draft)
		if got.code != 409 || got.field(t, "error") != "duplicate" || got.field(t, "id") != first.field(t, "id") || !strings.Contains(got.field(t, "detail"), "allow_duplicate") {
			t.Errorf("the same: %d %s", got.code, got.body)
		}
		got = f.do(t, "key a", "POST", path, strings.Replace(draft, "{", `{"allow_duplicate":true,`, 1))
		if got.code != 202 || got.field(t, "status") != "pending_send_approval" || !strings.Contains(got.field(t, "note"), first.field(t, "id")) {
			t.Errorf("meant: %d %s; want it held, with a note", got.code, got.body)
		}
		// Who reviews it reads the note.
		if got := f.do(t, "person", "GET", "/v1/actions/"+got.field(t, "id"), ""); !strings.Contains(got.body, "proposed the same email") {
			t.Errorf("the reviewer: %s", got.body)
		}
	})
}

func TestRateLimits(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		path := "/v1/inboxes/" + f.a.ID + "/messages"
		set := f.do(t, "project", "POST", "/v1/inboxes/"+f.a.ID+"/sending", `{"undo_seconds":30,"limits":{"per_day":2,"recipients_per_day":100}}`)
		if set.code != 200 || set.header.Get("RateLimit-Policy") != `"inbox-day";q=2;w=86400, "inbox-day-recipients";q=100;w=86400;qu="recipients"` {
			t.Fatalf("set: %d %s %q", set.code, set.body, set.header.Get("RateLimit-Policy"))
		}
		one := f.do(t, "key a", "POST", path, fresh(1))
		if got := one.header.Get("RateLimit"); one.code != 202 || !strings.HasPrefix(got, `"inbox-day";r=1;t=`) || !strings.Contains(got, `, "inbox-day-recipients";r=99;t=`) {
			t.Errorf("the first: %d, RateLimit %q", one.code, got)
		}
		f.do(t, "key a", "POST", path, fresh(2))
		three := f.do(t, "key a", "POST", path, fresh(3))
		if got := three.header.Get("RateLimit"); three.code != 429 || three.field(t, "error") != "limit_reached" || !strings.HasPrefix(got, `"inbox-day";r=0;t=`) || three.header.Get("Retry-After") == "" {
			t.Errorf("the third: %d %s, RateLimit %q, Retry-After %q", three.code, three.body, got, three.header.Get("Retry-After"))
		}
		if got := f.do(t, "key b", "POST", "/v1/inboxes/"+f.b.ID+"/messages", fresh(3)); got.code != 202 || got.header.Get("RateLimit") != "" {
			t.Errorf("another inbox: %d %s", got.code, got.body)
		}
		if got := f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.ID+"/sending", ""); got.code != 200 || got.field(t, "undo_seconds") != "30" || !strings.Contains(got.body, `"left":0`) {
			t.Errorf("asked: %d %s", got.code, got.body)
		}
		for _, body := range []string{`{"undo_seconds":121}`, `{"undo_seconds":-1}`, `{"limits":{"per_day":-2}}`, `{"limits":{"per_year":1}}`, `[]`} {
			if got := f.do(t, "project", "POST", "/v1/inboxes/"+f.a.ID+"/sending", body); got.code != 400 {
				t.Errorf("%s: %d %s", body, got.code, got.body)
			}
		}
	})
}

// TestScheduled is a mail that leaves later, in either order, is changed and is
// taken back.
func TestScheduled(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		path := "/v1/inboxes/" + f.a.ID + "/messages"
		at := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
		timed := func(n int, timing mailbox.Timing) answered {
			return f.do(t, "key a", "POST", path, strings.Replace(fresh(n), "{", fmt.Sprintf(`{"send_at":%q,"gate_timing":%q,`, at.Format(time.RFC3339), timing), 1))
		}
		first := timed(1, mailbox.GateFirst)
		if first.code != 202 || first.field(t, "status") != "pending_send_approval" || first.field(t, "send_at") != at.Format(time.RFC3339) {
			t.Errorf("gate_first: %d %s", first.code, first.body)
		}
		later := timed(2, mailbox.ScheduleFirst)
		if later.code != 202 || later.field(t, "status") != "scheduled" {
			t.Fatalf("schedule_first: %d %s", later.code, later.body)
		}
		id := later.field(t, "id")
		if got := f.do(t, "key a", "GET", "/v1/actions?state=scheduled", ""); !strings.Contains(got.body, id) {
			t.Errorf("scheduled: %s", got.body)
		}
		got := f.do(t, "key a", "POST", "/v1/actions/"+id+"/revision", strings.Replace(fresh(3), "{", `{"version":1,`, 1))
		if got.code != 202 || got.field(t, "id") != id || got.field(t, "status") != "pending_send_approval" || got.field(t, "digest") == later.field(t, "digest") || got.field(t, "version") != "2" {
			t.Errorf("revised: %d %s", got.code, got.body)
		}
		if got := f.do(t, "key a", "POST", "/v1/actions/"+id+"/revision", strings.Replace(fresh(4), "{", `{"version":1,`, 1)); got.code != 409 || got.field(t, "error") != "stale" {
			t.Errorf("revised once more from the old version: %d %s", got.code, got.body)
		}
		if got := f.do(t, "key a", "POST", "/v1/actions/"+id+"/cancel", ""); got.code != 200 || got.field(t, "state") != "cancelled" {
			t.Errorf("cancelled: %d %s", got.code, got.body)
		}
		if got := f.do(t, "key a", "POST", "/v1/actions/"+id+"/cancel", ""); got.code != 200 {
			t.Errorf("cancelled twice: %d %s", got.code, got.body)
		}
		f.setState(t, id, oversight.Done)
		for _, op := range []string{"/cancel", "/revision"} {
			body := ""
			if op == "/revision" {
				body = fresh(5)
			}
			if got := f.do(t, "key a", "POST", "/v1/actions/"+id+op, body); got.code != 409 || got.field(t, "error") != "too_late" {
				t.Errorf("%s when done: %d %s", op, got.code, got.body)
			}
		}
	})
}

// TestUnsubscribe: bulk mail names a way out that its one reader can take, and a
// program that looks behind links cannot take for him.
func TestUnsubscribe(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		path := "/v1/inboxes/" + f.a.ID + "/messages"
		if got := f.do(t, "key a", "POST", path, `{"to":["bob@example.com","carol@example.com"],"subject":"news","text":"t","bulk":true}`); got.code != 400 || !strings.Contains(got.body, "bulk: requires exactly one recipient") {
			t.Errorf("bulk to two: %d %s", got.code, got.body)
		}
		id := f.do(t, "key a", "POST", path, `{"to":["Bob <bob@example.com>"],"subject":"news","text":"t","bulk":true}`).field(t, "id")
		a, err := f.gate.Action(t.Context(), f.person, id)
		if err != nil {
			t.Fatal(err)
		}
		_, link, ok := strings.Cut(string(a.Payload), "List-Unsubscribe: <https://mail.example")
		link, _, _ = strings.Cut(link, ">")
		if !ok || !strings.Contains(string(a.Payload), "\r\nList-Unsubscribe-Post: List-Unsubscribe=One-Click\r\n") {
			t.Fatalf("it names no way out:\n%s", a.Payload)
		}
		suppressed := func() bool {
			_, err := f.post.Suppression.Find(t.Context(), f.person, "bob@example.com")
			return err == nil
		}
		if got := f.do(t, "nobody", "GET", link, ""); got.code != 200 || !strings.Contains(got.body, "<form") || suppressed() {
			t.Errorf("looked at: %d %s, suppressed %v", got.code, got.body, suppressed())
		}
		for _, bad := range []string{link + "x", link[:len(link)-1], "/v1/unsubscribe/x", "/v1/unsubscribe/..."} {
			if got := f.do(t, "nobody", "POST", bad, ""); got.code != 400 {
				t.Errorf("%s: %d %s", bad, got.code, got.body)
			}
		}
		if suppressed() {
			t.Error("a link that is not ours ended something")
		}
		for range 2 {
			if got := f.do(t, "nobody", "POST", link, ""); got.code != 200 || !suppressed() {
				t.Errorf("clicked: %d %s, suppressed %v", got.code, got.body, suppressed())
			}
		}
		many := make([]string, 11)
		for i := range many {
			many[i] = fmt.Sprintf(`"m%d@example.com"`, i)
		}
		id = f.do(t, "key a", "POST", path, `{"to":[`+strings.Join(many, ",")+`],"subject":"all","text":"t"}`).field(t, "id")
		if a, err = f.gate.Action(t.Context(), f.person, id); err != nil || !strings.Contains(string(a.Payload), "List-Unsubscribe: <mailto:alice@agents.test?subject=unsubscribe>\r\n") {
			t.Errorf("to many: %v\n%s", err, a.Payload)
		}
	})
}
