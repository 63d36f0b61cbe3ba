package mailapi

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/storetest"
)

// TestWhoNeverReads: one inbox's connections that ask for large messages and
// take nothing keep nobody else from reading.
func TestWhoNeverReads(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	srv := httptest.NewServer(f.srv.Handler())
	t.Cleanup(srv.Close)
	f.receive(t, f.b, "small")
	raw := "From: a@example.com\r\nSubject: large\r\n\r\n" + strings.Repeat(strings.Repeat("x", 76)+"\r\n", 250_000)
	err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "a@example.com", To: []string{f.a.Address}, Raw: []byte(raw)}})
	if err != nil {
		t.Fatal(err)
	}
	first := func(who string, b directory.Inbox) string {
		w := f.wait(t, who, "/v1/inboxes/"+b.ID+"/messages")
		return "/v1/inboxes/" + b.ID + "/messages/" + w.Messages[0].ID + "/raw"
	}
	large, small := first("key a", f.a), first("key b", f.b)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ask := func(ctx context.Context, who, path string) (*http.Response, error) {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, srv.URL+path, nil)
		if err != nil {
			t.Error(err)
			return nil, err
		}
		r.Header = f.clients[who].header.Clone()
		return srv.Client().Do(r)
	}
	begun := make(chan bool, 20)
	for range cap(begun) {
		go func() {
			resp, err := ask(ctx, "key a", large)
			begun <- err == nil
			if err == nil {
				<-ctx.Done() // and never reads
				resp.Body.Close()
			}
		}()
	}
	for range 2 {
		if !<-begun {
			t.Fatal("the first got no answer")
		}
	}
	soon, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	resp, err := ask(soon, "key b", small)
	if err != nil {
		t.Fatalf("another inbox waits for who never reads: %v", err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(b), "small") {
		t.Errorf("got %.100q, %v", b, err)
	}
}

// TestSocketsOfManyKeys: keys that a key made give it no more connections.
func TestSocketsOfManyKeys(t *testing.T) {
	c := crowd{by: map[string]int{}}
	n := 0
	for i := range 100 {
		for range maxEach {
			if _, err := c.enterSocket(caller{Principal: auth.Principal{Kind: auth.Agent, ID: fmt.Sprint("crd_", i), Inbox: "ibx_A"}}); err == nil {
				n++
			}
		}
	}
	if n != maxEach {
		t.Errorf("one inbox has %d connections, want %d", n, maxEach)
	}
	for i := range 100 {
		for range maxEach {
			_, _ = c.enterSocket(caller{Principal: auth.Principal{Kind: auth.Grant, ID: fmt.Sprint("crd_g", i)}})
		}
	}
	if _, err := c.enterSocket(caller{Principal: auth.Principal{Kind: auth.Agent, ID: "crd_B", Inbox: "ibx_B"}}); err != nil {
		t.Errorf("grants keep a key out: %v", err)
	}
	leave, err := c.enterSocket(caller{Principal: auth.Principal{Kind: auth.Agent, ID: "crd_C", Inbox: "ibx_C"}})
	if err != nil {
		t.Fatal(err)
	}
	leave()
	if c.by["sockets of ibx_C"] != 0 {
		t.Error("who left is counted still")
	}
}

// TestReaderMakesNoWebhook: LobsterMail's door asks for the same scope as ours.
func TestReaderMakesNoWebhook(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	got := f.do(t, "key a", "POST", "/v1/inboxes/"+f.a.ID+"/keys", `{"scope":"read"}`)
	f.byKey("reader", auth.Secret(got.field(t, "key")))
	for _, body := range []string{`{"url":"https://example.com/x"}`, `{"url":"https://example.com/x","inboxId":"` + f.a.ID + `"}`} {
		if got := f.do(t, "reader", "POST", "/v1/webhooks", body); got.code != 403 {
			t.Errorf("%s = %d %s, want 403", body, got.code, got.body)
		}
	}
	if got := f.do(t, "key a", "POST", "/v1/webhooks", `{"url":"https://example.com/x"}`); got.code != 201 {
		t.Errorf("the key that manages = %+v", got)
	}
}

// TestAccountThatMakesAndDeletes: deleted inboxes keep their addresses, and the
// disk, and so count.
func TestAccountThatMakesAndDeletes(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.account(t, "account")
	for range maxAccountInboxes {
		b := f.makeInbox(t, "account", `{}`)
		if got := f.do(t, "account", "DELETE", "/v1/inboxes/"+b.ID, ""); got.code != 200 {
			t.Fatalf("delete = %+v", got)
		}
	}
	if got := f.do(t, "account", "POST", "/v1/inboxes", `{}`); got.code != 403 {
		t.Errorf("one more = %d %s, want 403", got.code, got.body)
	}
}

// TestLargeMailIsWaitedForCheaply: who waits is told what a list shows, and no
// whole message is read for it.
func TestLargeMailIsWaitedForCheaply(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.receive(t, f.a, "one")
	list := f.wait(t, "key a", "/v1/inboxes/"+f.a.ID+"/messages")
	who, err := auth.CheckKey(t.Context(), f.db, f.key("key a"))
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.post.Keys.Open(t.Context(), who, f.key("key a"), "")
	if err != nil {
		t.Fatal(err)
	}
	if m, err := f.post.Listed(t.Context(), who, k, list.Messages[0].ID); err != nil || m.Subject != "one" {
		t.Errorf("listed %+v, %v", m, err)
	}
	other, err := auth.CheckKey(t.Context(), f.db, f.key("key b"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.post.Listed(t.Context(), other, k, list.Messages[0].ID); err == nil {
		t.Error("another's key was taken")
	}
	start := time.Now()
	if w := f.wait(t, "key a", "/v1/inboxes/"+f.a.ID+"/messages/wait?after=0&timeout=60"); w.subjects() != "one" {
		t.Errorf("waited for %q, %v", w.subjects(), time.Since(start))
	}
}
