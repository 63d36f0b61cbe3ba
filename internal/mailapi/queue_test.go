package mailapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// queue returns what a client sees of the queue.
func (f *fixture) queue(t *testing.T, who, query string) api.ReviewQueue {
	t.Helper()
	got := f.do(t, who, "GET", "/v1/queue"+query, "")
	var q api.ReviewQueue
	if err := json.Unmarshal([]byte(got.body), &q); err != nil || got.code != http.StatusOK {
		t.Fatalf("queue%s as %s: %d, %v: %.300s", query, who, got.code, err, got.body)
	}
	return q
}

// ids returns the ids of a queue in its order.
func ids(q api.ReviewQueue) []string {
	var out []string
	for _, a := range q.Actions {
		out = append(out, a.ID)
	}
	return out
}

// waiting proposes mail that waits, and returns its action.
func (f *fixture) waiting(t *testing.T, body string) string {
	t.Helper()
	got := f.do(t, "key a", "POST", "/v1/inboxes/"+f.a.ID+"/messages", body)
	if got.code != http.StatusAccepted {
		t.Fatalf("propose: %+v", got)
	}
	return got.field(t, "id")
}

func TestQueue(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		plain := f.waiting(t, fresh(1))
		file := f.waiting(t, `{"to":["dora@example.org"],"subject":"the list","text":"t","attachments":[{"name":"list.txt","content_base64":"eA==","content_type":"text/plain"}]}`)
		other := f.do(t, "key b", "POST", "/v1/inboxes/"+f.b.ID+"/messages", fresh(2)).field(t, "id")
		foreign := f.do(t, "foreign key", "POST", "/v1/inboxes/"+f.foreign.ID+"/messages", fresh(3)).field(t, "id")

		q := f.queue(t, "person", "")
		if got, want := ids(q), []string{file, plain, other}; !slices.Equal(got, want) {
			t.Errorf("by risk: %v, want %v", got, want)
		}
		if q.Total != 3 || q.Counts.Waiting != 3 || q.Counts.Kinds["email.send"] != 3 || q.Counts.Inboxes[f.a.ID] != 2 || q.Counts.Snoozed != 0 {
			t.Errorf("counts: %+v", q)
		}
		if a := q.Actions[0]; a.Risk <= q.Actions[1].Risk || !slices.Contains(a.Reasons, "1 file") || a.Review == nil || a.Version != 1 || a.View != nil {
			t.Errorf("the first: %+v", a)
		}
		for query, want := range map[string][]string{
			"?order=age":                      {plain, file, other},
			"?order=age&limit=2":              {plain, file},
			"?inbox=" + f.b.ID:                {other},
			"?inbox=" + f.b.Address:           {other},
			"?recipient=example.org":          {file},
			"?recipient=dora@example.org":     {file},
			"?q=list":                         {file},
			"?q=" + url.QueryEscape("list %"): nil,
			"?kind=email.send,net.request":    {file, plain, other},
			"?kind=net.request":               nil,
			"?proposer=agent:crd_nobody":      nil,
			"?mine=true":                      {file, plain, other},
			"?assigned=true":                  nil,
			"?grave=true":                     nil,
			"?snoozed=true":                   nil,
		} {
			if got := ids(f.queue(t, "person", query)); !slices.Equal(got, want) {
				t.Errorf("%s: %v, want %v", query, got, want)
			}
		}
		var pages []string
		for cursor := ""; ; {
			page := f.queue(t, "person", "?limit=1&cursor="+cursor)
			if pages = append(pages, ids(page)...); len(pages) > 3 || page.Total != 3 {
				t.Fatalf("pages: %v, %+v", pages, page)
			}
			if cursor = page.NextCursor; cursor == "" {
				break
			}
		}
		if want := []string{file, plain, other}; !slices.Equal(pages, want) {
			t.Errorf("pages: %v, want %v", pages, want)
		}

		// The attacks: another project's actions, and texts that the database does not take.
		if got := ids(f.queue(t, "foreign person", "")); !slices.Equal(got, []string{foreign}) {
			t.Errorf("a foreign person sees %v", got)
		}
		if got := f.do(t, "foreign person", "GET", "/v1/queue?inbox="+f.a.ID, ""); got.code != http.StatusNotFound {
			t.Errorf("a foreign inbox: %+v", got)
		}
		for _, bad := range []string{
			"order=odd", "kind=odd", "kind=email.send,email.send", "mine=yes", "limit=0", "limit=501", "wanted=all", "cursor=x", "cursor=MSAxIAA", // "1 1 \0"
			"q=%00", "recipient=%ff", "proposer=%00", "inbox=%00", "q=" + strings.Repeat("a", maxQueueText+1),
		} {
			if got := f.do(t, "person", "GET", "/v1/queue?"+bad, ""); got.code != http.StatusBadRequest {
				t.Errorf("%s: %d %.200s", bad, got.code, got.body)
			}
		}
		for _, key := range []string{"key a", "project"} {
			if got := f.do(t, key, "GET", "/v1/queue", ""); got.code != http.StatusForbidden {
				t.Errorf("%s sees the queue: %+v", key, got)
			}
		}
	})
}

func TestSnooze(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.signIn(t, "rita", auth.Reviewer)
		f.signIn(t, "vic", auth.Viewer)
		id := f.waiting(t, fresh(1))
		path := "/v1/actions/" + id + "/snooze"
		until := func(d time.Duration) string {
			return fmt.Sprintf(`{"until":%q}`, time.Now().Add(d).Format(time.RFC3339))
		}

		got := f.do(t, "rita", "PUT", path, until(2*time.Hour))
		if got.code != http.StatusOK || got.field(t, "on_answer") != "false" {
			t.Fatalf("snooze: %+v", got)
		}
		if q := f.queue(t, "rita", ""); len(q.Actions) != 0 || q.Counts.Snoozed != 1 || q.Counts.Waiting != 0 {
			t.Errorf("her queue: %+v", q)
		}
		q := f.queue(t, "rita", "?snoozed=true")
		if len(q.Actions) != 1 || q.Actions[0].Snooze == nil || q.Actions[0].Snooze.Until.Before(time.Now().Add(time.Hour)) {
			t.Errorf("what she has put off: %+v", q)
		}
		if q := f.queue(t, "person", ""); len(q.Actions) != 1 || q.Actions[0].Snooze != nil {
			t.Errorf("everybody else's queue: %+v", q)
		}
		// Until its agent answers; repeating it changes it.
		if got := f.do(t, "rita", "PUT", path, strings.Replace(until(time.Hour), "{", `{"on_answer":true,`, 1)); got.code != http.StatusOK || got.field(t, "on_answer") != "true" {
			t.Errorf("on answer: %+v", got)
		}
		if got := f.do(t, "key a", "POST", "/v1/actions/"+id+"/revision", strings.Replace(fresh(2), "{", `{"version":1,`, 1)); got.code != http.StatusAccepted {
			t.Fatalf("revise: %+v", got)
		}
		if q := f.queue(t, "rita", ""); len(q.Actions) != 1 {
			t.Errorf("it did not come back: %+v", q)
		}
		if got := f.do(t, "rita", "PUT", path, until(time.Hour)); got.code != http.StatusOK {
			t.Errorf("again: %+v", got)
		}
		for range 2 { // the second changes nothing
			if got := f.do(t, "rita", "DELETE", path, ""); got.code != http.StatusNoContent {
				t.Errorf("unsnooze: %+v", got)
			}
		}
		if q := f.queue(t, "rita", ""); len(q.Actions) != 1 {
			t.Errorf("after that: %+v", q)
		}

		for name, tt := range map[string]struct {
			who, body string
			code      int
			err       string
		}{
			"nothing":             {"rita", `{}`, 400, "invalid_request"},
			"the past":            {"rita", until(-time.Hour), 422, "snooze_refused"},
			"too long":            {"rita", until(31 * 24 * time.Hour), 422, "snooze_refused"},
			"a viewer":            {"vic", until(time.Hour), 403, "forbidden"},
			"its agent":           {"key a", until(time.Hour), 403, "forbidden"}, // the attack: it hides its proposal
			"a project key":       {"project", until(time.Hour), 403, "forbidden"},
			"somebody else's":     {"foreign person", until(time.Hour), 404, "not_found"},
			"an unknown property": {"rita", `{"until":"2027-01-31T12:00:00Z","for":"ann"}`, 400, "invalid_request"},
		} {
			if got := f.do(t, tt.who, "PUT", path, tt.body); got.code != tt.code || got.field(t, "error") != tt.err {
				t.Errorf("%s: got %d %s, want %d %s", name, got.code, got.body, tt.code, tt.err)
			}
		}
		f.setState(t, id, "cancelled")
		if got := f.do(t, "rita", "PUT", path, until(time.Hour)); got.code != http.StatusConflict || got.field(t, "error") != "stale" {
			t.Errorf("what does not wait: %+v", got)
		}
	})
}

func TestAssign(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.signIn(t, "rita", auth.Reviewer)
		f.signIn(t, "bea", auth.Reviewer)
		f.signIn(t, "vic", auth.Viewer)
		id := f.waiting(t, fresh(1))
		path := "/v1/actions/" + id + "/assignee"

		if got := f.do(t, "rita", "PUT", path, `{"person":"bea"}`); got.code != http.StatusOK || got.field(t, "assignee") != "bea" {
			t.Fatalf("assign: %+v", got)
		}
		if got := ids(f.queue(t, "bea", "?assigned=true")); !slices.Equal(got, []string{id}) {
			t.Errorf("assigned to bea: %v", got)
		}
		if got := ids(f.queue(t, "rita", "?assigned=true")); got != nil {
			t.Errorf("assigned to rita: %v", got)
		}
		if q := f.queue(t, "rita", ""); len(q.Actions) != 1 || q.Actions[0].Assignee != "bea" {
			t.Errorf("everybody sees it: %+v", q)
		}
		if got := f.do(t, "key a", "GET", "/v1/actions/"+id, ""); strings.Contains(got.body, "bea") {
			t.Errorf("its agent sees to whom it is assigned: %s", got.body)
		}
		for name, tt := range map[string]struct {
			who, body string
			code      int
			err       string
		}{
			"a viewer as assignee":    {"rita", `{"person":"vic"}`, 422, "assignment_refused"},
			"nobody of the project":   {"rita", `{"person":"mallory"}`, 422, "assignment_refused"},
			"no name":                 {"rita", `{"person":""}`, 400, "invalid_request"},
			"a name with a NUL":       {"rita", `{"person":"b\u0000"}`, 400, "invalid_request"},
			"by a viewer":             {"vic", `{"person":"bea"}`, 403, "forbidden"},
			"by its agent":            {"key a", `{"person":"bea"}`, 403, "forbidden"},
			"by a project key":        {"project", `{"person":"bea"}`, 403, "forbidden"},
			"of another project's":    {"foreign person", `{"person":"bea"}`, 404, "not_found"},
			"by the key of a session": {"nobody", `{"person":"bea"}`, 401, "unauthorized"},
		} {
			if got := f.do(t, tt.who, "PUT", path, tt.body); got.code != tt.code || got.field(t, "error") != tt.err {
				t.Errorf("%s: got %d %s, want %d %s", name, got.code, got.body, tt.code, tt.err)
			}
		}
		// It limits nobody: another reviewer decides.
		if got := f.do(t, "rita", "DELETE", path, ""); got.code != http.StatusNoContent {
			t.Errorf("unassign: %+v", got)
		}
		if q := f.queue(t, "bea", "?assigned=true"); len(q.Actions) != 0 {
			t.Errorf("after that: %+v", q)
		}
		if got := f.do(t, "rita", "PUT", path, `{"person":"bea"}`); got.code != http.StatusOK {
			t.Errorf("again: %+v", got)
		}
		shown := f.do(t, "rita", "GET", "/v1/actions/"+id, "")
		if got := f.do(t, "rita", "POST", "/v1/actions/"+id+"/decision", fmt.Sprintf(`{"version":1,"digest":%q,"approve":true}`, shown.field(t, "digest"))); got.code != http.StatusOK {
			t.Errorf("another decides: %+v", got)
		}
	})
}

func TestApproveAndAllow(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.member(t, "ann", auth.Owner)
		f.signIn(t, "rita", auth.Reviewer)
		if got := f.do(t, "person", "PATCH", "/v1/inboxes/"+f.a.ID, `{"mode":"gated_send"}`); got.code != http.StatusOK {
			t.Fatalf("mode: %+v", got)
		}
		until := time.Now().Add(24 * time.Hour).Truncate(time.Second).UTC()
		decide := func(who, id, more string) answered {
			shown := f.do(t, "person", "GET", "/v1/actions/"+id, "")
			return f.do(t, who, "POST", "/v1/actions/"+id+"/decision", fmt.Sprintf(`{"version":1,"digest":%q,%s}`, shown.field(t, "digest"), more))
		}
		list := func() (l api.AllowList) {
			got := f.do(t, "person", "GET", "/v1/inboxes/"+f.a.ID+"/allowlist", "")
			if err := json.Unmarshal([]byte(got.body), &l); err != nil {
				t.Fatal(err)
			}
			return l
		}
		allow := func(what string, until time.Time) string {
			return fmt.Sprintf(`"approve":true,"allow":{%s,"until":%q}`, what, until.Format(time.RFC3339))
		}

		id := f.waiting(t, fresh(1))
		for name, tt := range map[string]struct {
			who, more string
			code      int
			err       string
		}{
			"somebody else":     {"person", allow(`"address":"eve@example.com"`, until), 422, "allowance_refused"},
			"another domain":    {"person", allow(`"domain":"example.org"`, until), 422, "allowance_refused"},
			"both":              {"person", allow(`"address":"bob@example.com","domain":"example.com"`, until), 422, "allowance_refused"},
			"neither":           {"person", allow(`"files":true`, until), 422, "allowance_refused"},
			"too long":          {"person", allow(`"address":"bob@example.com"`, until.AddDate(0, 0, 91)), 422, "allowance_refused"},
			"no end":            {"person", `"approve":true,"allow":{"address":"bob@example.com"}`, 422, "allowance_refused"},
			"a hidden pattern":  {"person", allow(`"address":"*@example.com"`, until), 422, "allowance_refused"},
			"with a rejection":  {"person", `"approve":false,"reason":"no","allow":{"address":"bob@example.com","until":"2027-01-31T12:00:00Z"}`, 400, "invalid_request"},
			"by a reviewer":     {"rita", allow(`"address":"bob@example.com"`, until), 403, "forbidden"},
			"by its agent":      {"key a", allow(`"address":"bob@example.com"`, until), 403, "forbidden"},
			"an unknown member": {"person", allow(`"address":"bob@example.com","forever":true`, until), 400, "invalid_request"},
		} {
			if got := decide(tt.who, id, tt.more); got.code != tt.code || got.field(t, "error") != tt.err {
				t.Errorf("%s: got %d %s, want %d %s", name, got.code, got.body, tt.code, tt.err)
			}
		}
		// The attack: a batch that opens doors.
		shown := f.do(t, "person", "GET", "/v1/actions/"+id, "")
		batch := fmt.Sprintf(`{"decisions":[{"id":%q,"version":1,"digest":%q,%s}]}`, id, shown.field(t, "digest"), allow(`"address":"bob@example.com"`, until))
		if got := f.do(t, "person", "POST", "/v1/actions/decisions", batch); got.code != http.StatusBadRequest {
			t.Errorf("a batch: %+v", got)
		}
		if a := f.do(t, "person", "GET", "/v1/actions/"+id, ""); a.field(t, "state") != "pending" || len(list().Entries) != 0 {
			t.Fatalf("what was refused changed something: %s, %+v", a.body, list())
		}

		if got := decide("person", id, allow(`"address":"bob@example.com"`, until)); got.code != http.StatusOK {
			t.Fatalf("approve and allow: %+v", got)
		}
		l := list()
		if len(l.Entries) != 1 || l.Entries[0].Pattern != "bob@example.com" || l.Entries[0].Files || l.Entries[0].Action != id || l.Entries[0].ExpiresAt == nil || !l.Entries[0].ExpiresAt.Equal(until) {
			t.Errorf("the allow list: %+v", l)
		}
		second := f.waiting(t, `{"to":["bob@example.com"],"subject":"f","text":"t","attachments":[{"name":"a.txt","content_base64":"eA==","content_type":"text/plain"}]}`)
		if a := f.do(t, "person", "GET", "/v1/actions/"+second, ""); a.field(t, "state") != "pending" {
			t.Fatalf("a file: %s", a.body)
		}
		if got := decide("person", second, allow(`"domain":"example.com","files":true`, until)); got.code != http.StatusOK {
			t.Fatalf("allow the domain: %+v", got)
		}
		if i := slices.IndexFunc(list().Entries, func(e api.AllowEntry) bool { return e.Pattern == "*@example.com" && e.Files }); i < 0 {
			t.Errorf("the allow list: %+v", list())
		}
	})
}
