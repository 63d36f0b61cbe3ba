package mailapi

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/event"
	"postern/internal/oversight"
	"postern/internal/store"
	"postern/internal/storetest"
)

// clearWebhooks makes room for more.
func (f *fixture) clearWebhooks(t *testing.T) {
	t.Helper()
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		if _, err := tx.ExecContext(t.Context(), `delete from webhook`); err != nil {
			return err
		}
		// Those who delete theirs take back what is asked for them.
		_, err := tx.ExecContext(t.Context(), `delete from action where kind = 'webhook.create'`)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestEventTypes: the description names the types that there are.
func TestEventTypes(t *testing.T) {
	d, err := description()
	if err != nil {
		t.Fatal(err)
	}
	var got, want []string
	for _, v := range d.defs["EventType"].(map[string]any)["enum"].([]any) {
		got = append(got, v.(string))
	}
	for _, typ := range event.MailTypes() {
		want = append(want, string(typ))
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestWebhooks(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		var mu sync.Mutex
		var got []string
		receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			mu.Lock()
			defer mu.Unlock()
			got = append(got, r.Header.Get("webhook-signature")+" "+string(b))
		}))
		t.Cleanup(receiver.Close)
		requests := func() []string {
			mu.Lock()
			defer mu.Unlock()
			return append([]string{}, got...)
		}
		until := func(what string, ok func() bool) {
			t.Helper()
			for end := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("not within %v: %s", patience, what)
				}
			}
		}
		ended := make(chan struct{})
		go func() { defer close(ended); _ = f.hooks.Run(t.Context()) }()
		t.Cleanup(func() { <-ended })
		path := "/v1/inboxes/" + f.a.ID + "/webhooks"
		made := f.do(t, "key a", "POST", path, `{"url":"`+receiver.URL+`/x?token=1","name":"mine","events":["message.received"]}`)
		hook := path + "/" + made.field(t, "id")
		if made.code != 201 || !strings.HasPrefix(made.field(t, "secret"), "whsec_") {
			t.Fatalf("create = %+v", made)
		}
		if got := f.do(t, "key a", "GET", path, ""); strings.Contains(got.body, "whsec_") || !strings.Contains(got.body, `"mine"`) {
			t.Errorf("list = %s", got.body)
		}
		// A person sees where it leads before anything is sent.
		if made.field(t, "state") != "waiting" {
			t.Fatalf("created as %+v, want it to wait", made)
		}
		asked, err := f.gate.Action(t.Context(), f.person, made.field(t, "action_id"))
		if err != nil {
			t.Fatal(err)
		}
		if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: asked.ID, Version: asked.Version, Digest: asked.Hex(), Approve: true}); err != nil {
			t.Fatal(err)
		}
		if ran, err := f.gate.RunOne(t.Context()); err != nil || !ran {
			t.Fatal(ran, err)
		}
		if got := f.do(t, "key a", "GET", hook, ""); got.field(t, "state") != "active" {
			t.Fatalf("allowed, it is %+v", got)
		}
		f.receive(t, f.a, "secret")
		f.receive(t, f.b, "other")
		until("a delivery", func() bool { return len(requests()) > 0 })
		if r := requests()[0]; strings.Contains(r, "secret") || !strings.Contains(r, f.a.ID) || strings.Count(r, "v1,") != 1 {
			t.Errorf("received %s", r)
		}
		rotated := f.do(t, "key a", "POST", hook+"/rotation", `{"overlap_seconds":3600}`)
		if rotated.code != 200 || rotated.field(t, "secret") == made.field(t, "secret") {
			t.Errorf("rotate = %+v", rotated)
		}
		var log struct {
			Deliveries []struct{ ID, State, Type string }
		}
		until("the log", func() bool {
			if err := json.Unmarshal([]byte(f.do(t, "key a", "GET", hook+"/deliveries?limit=1", "").body), &log); err != nil {
				t.Fatal(err)
			}
			return len(log.Deliveries) == 1 && log.Deliveries[0].State == "delivered"
		})
		if again := f.do(t, "key a", "POST", hook+"/deliveries/"+log.Deliveries[0].ID+"/redelivery", ""); again.code != 202 {
			t.Errorf("redeliver = %+v", again)
		}
		// A delivery whose answer was late comes once more, so it need not be the second.
		until("the redelivery, with two signatures", func() bool {
			return slices.ContainsFunc(requests(), func(r string) bool { return strings.Count(r, "v1,") == 2 })
		})
		if got := f.do(t, "key a", "PATCH", hook, `{"enabled":false,"name":"off"}`); got.code != 200 || got.field(t, "enabled") != "false" || got.field(t, "name") != "off" {
			t.Errorf("update = %+v", got)
		}
		for _, tt := range []struct{ name, method, path, body string }{
			{"no url", "POST", path, `{}`},
			{"another scheme", "POST", path, `{"url":"ftp://example.com"}`},
			{"metadata service", "POST", path, `{"url":"http://169.254.169.254/latest"}`},
			{"an event of sandboxes", "POST", path, `{"url":"https://example.com","events":["sandbox.lifecycle.killed"]}`},
			{"no event", "POST", path, `{"url":"https://example.com","events":[]}`},
			{"long overlap", "POST", hook + "/rotation", `{"overlap_seconds":604801}`},
			{"unknown field", "PATCH", hook, `{"secret":"x"}`},
			{"cursor", "GET", hook + "/deliveries?cursor=x", ""},
		} {
			if got := f.do(t, "key a", tt.method, tt.path, tt.body); got.code != 400 {
				t.Errorf("%s = %+v", tt.name, got)
			}
		}
		if got := f.do(t, "key a", "DELETE", hook, ""); got.code != 204 {
			t.Errorf("delete = %+v", got)
		}
		if got := f.do(t, "key a", "GET", hook, ""); got.code != 404 {
			t.Errorf("get what is gone = %+v", got)
		}
	})
}
