package webhook_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/webhook"
)

// A post is a post office for tests, with the inboxes that it was asked for.
type post struct {
	*mailbox.PostOffice
	db  *store.DB
	who auth.Principal
}

func newPost(t *testing.T, db *store.DB) post {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	m := mailbox.New(log, db, oversight.NewGate(log, db, oversighttest.Rules(nil)), mailbox.Config{Blobs: blobs, Domain: "agents.test"})
	return post{m, db, project(t, db, "one")}
}

// inbox makes an inbox and returns it with the principal of its key.
func (p post) inbox(t *testing.T, name string) (directory.Inbox, auth.Principal) {
	t.Helper()
	b, key, err := p.CreateInbox(t.Context(), p.who, directory.NewInbox{Address: name}, "")
	if err != nil {
		t.Fatal(err)
	}
	who, err := auth.CheckKey(t.Context(), p.db, key)
	if err != nil {
		t.Fatal(err)
	}
	return b, who
}

func (p post) receive(t *testing.T, b directory.Inbox) {
	t.Helper()
	raw := "From: bob@example.com\r\nTo: " + b.Address + "\r\nSubject: secret\r\n\r\nsecret\r\n"
	err := p.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1"})
	if err != nil {
		t.Fatal(err)
	}
}

func (p post) revoke(t *testing.T, who auth.Principal) {
	t.Helper()
	if err := p.db.Update(t.Context(), func(tx *store.Tx) error { return auth.Revoke(t.Context(), tx, who.ID) }); err != nil {
		t.Fatal(err)
	}
}

// at returns what was sent to a path of r.
func (r *receiver) at(path string) (out []request) {
	for _, q := range r.requests() {
		if q.header.Get("X-Path") == path {
			out = append(out, q)
		}
	}
	return out
}

func signed(q request, secret auth.Secret) string {
	key, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret.Reveal(), "whsec_"))
	m := hmac.New(sha256.New, key)
	fmt.Fprintf(m, "%s.%s.%s", q.header.Get("webhook-id"), q.header.Get("webhook-timestamp"), q.body)
	return "v1," + base64.StdEncoding.EncodeToString(m.Sum(nil))
}

func TestInboxDelivery(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		p := newPost(t, db)
		a, keyA := p.inbox(t, "alice")
		b, keyB := p.inbox(t, "bella")
		h := hooks(t, db, webhook.Config{Private: true, Retry: time.Millisecond})
		r := newReceiver(t, nil)
		w, secret := create(t, h, keyA, change("a", r.URL+"/a", event.MessageReceived))
		create(t, h, keyB, change("b", r.URL+"/b", event.MailTypes()...))
		whole, _ := create(t, h, p.who, change("project", r.URL+"/project", event.MessageReceived))
		run(t, h)
		p.receive(t, a)
		eventually(t, "a request to each", func() bool { return len(r.at("/a")) > 0 && len(r.at("/project")) > 0 })
		q := r.at("/a")[0]
		if got, want := q.header.Get("webhook-signature"), signed(q, secret); got != want {
			t.Errorf("webhook-signature: got %s, want %s", got, want)
		}
		var body struct {
			ID, Type, Inbox, Timestamp string
			Data                       map[string]string
		}
		if err := json.Unmarshal(q.body, &body); err != nil || body.Type != "message.received" || body.Inbox != a.ID || !strings.HasPrefix(body.Data["message"], "msg_") || body.ID != q.header.Get("webhook-id") {
			t.Errorf("body: %s, %v", q.body, err)
		}
		for _, q := range r.requests() {
			if strings.Contains(string(q.body), "secret") || strings.Contains(string(q.body), "example") || q.header.Get("e2b-signature") != "" {
				t.Errorf("it tells too much: %s", q.body)
			}
		}
		// Whose they are: an inbox's keys see that inbox's, and nobody else does.
		for _, tt := range []struct {
			name string
			who  auth.Principal
			want []string
		}{
			{"the inbox's key", keyA, []string{"a"}},
			{"another inbox's key", keyB, []string{"b"}},
			{"the project", p.who, []string{"project"}},
			{"a person", auth.Principal{Kind: auth.Person, Role: auth.Owner, Project: p.who.Project, ID: "ann"}, []string{"project"}},
			{"another project", project(t, db, "two"), nil},
		} {
			list, err := h.List(t.Context(), tt.who)
			var got []string
			for _, w := range list {
				got = append(got, w.Name)
			}
			if err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("%s sees %v, %v, want %v", tt.name, got, err, tt.want)
			}
			if tt.name == "the inbox's key" {
				continue
			}
			_, getErr := h.Get(t.Context(), tt.who, w.ID)
			_, updateErr := h.Update(t.Context(), tt.who, w.ID, webhook.Change{})
			_, _, _, rotateErr := h.Rotate(t.Context(), tt.who, w.ID, 0)
			_, logErr := h.Deliveries(t.Context(), tt.who, w.ID, 0, 10)
			_, againErr := h.Redeliver(t.Context(), tt.who, w.ID, "dlv_X")
			for _, err := range []error{getErr, updateErr, rotateErr, logErr, againErr, h.Delete(t.Context(), tt.who, w.ID)} {
				if !errors.Is(err, webhook.ErrNotFound) {
					t.Errorf("%s: got %v, want ErrNotFound", tt.name, err)
				}
			}
		}
		if _, err := h.Get(t.Context(), keyA, whole.ID); !errors.Is(err, webhook.ErrNotFound) {
			t.Errorf("the project's, by an inbox's key: %v", err)
		}
		for _, who := range []auth.Principal{{Kind: auth.Sandbox, Project: a.Project, Inbox: a.ID}, {Kind: auth.Recovery, Project: a.Project, Inbox: a.ID}, {Kind: auth.Agent, Project: a.Project}} {
			if _, _, err := h.Create(t.Context(), who, change("x", r.URL, event.MessageReceived)); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("create by %s: %v", who, err)
			}
		}
		if _, _, err := h.Create(t.Context(), keyA, change("x", r.URL, event.Created)); !errors.Is(err, webhook.ErrInvalid) {
			t.Errorf("events of sandboxes for an inbox: %v", err)
		}
		p.receive(t, b)
		eventually(t, "the other inbox's", func() bool { return len(r.at("/b")) == 1 })
	})
}

// TestEndsWithItsKey: a webhook is told nothing any more once the key that made
// it is revoked, not even what waited.
func TestEndsWithItsKey(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		p := newPost(t, db)
		a, keyA := p.inbox(t, "alice")
		b, keyB := p.inbox(t, "bella")
		h := hooks(t, db, webhook.Config{Private: true, Retry: time.Millisecond})
		r := newReceiver(t, nil)
		w, _ := create(t, h, keyA, change("a", r.URL+"/a", event.MessageReceived))
		waits, _ := create(t, h, keyB, change("b", r.URL+"/b", event.MessageReceived))
		// Routed, and not yet sent.
		p.receive(t, b)
		if err := webhook.Route(t.Context(), h); err != nil {
			t.Fatal(err)
		}
		p.revoke(t, keyA)
		p.revoke(t, keyB)
		p.receive(t, a)
		run(t, h)
		for _, id := range []string{w.ID, waits.ID} {
			eventually(t, "disabled", func() bool {
				var enabled bool
				err := db.View(t.Context(), func(tx *store.Tx) error {
					return tx.One(t.Context(), `select enabled from webhook where id = $1`, []any{id}, &enabled)
				})
				return err == nil && !enabled
			})
		}
		if n := len(r.requests()); n != 0 {
			t.Errorf("%d requests were made after the key was revoked", n)
		}
		var entries []audit.Entry
		err := audit.View(t.Context(), db, func(tx *store.Tx) (err error) {
			entries, err = audit.List(t.Context(), tx, audit.Query{Project: a.Project, Verb: "webhook.disable", Limit: 10})
			return err
		})
		if err != nil || len(entries) != 2 {
			t.Errorf("got %d entries, %v, want 2", len(entries), err)
		}
	})
}

func TestRotate(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		p := newPost(t, db)
		a, keyA := p.inbox(t, "alice")
		h := hooks(t, db, webhook.Config{Private: true, Retry: time.Millisecond})
		r := newReceiver(t, nil)
		w, first := create(t, h, keyA, change("a", r.URL+"/a", event.MessageReceived))
		run(t, h)
		next := func(n int) request {
			t.Helper()
			p.receive(t, a)
			eventually(t, "a request", func() bool { return len(r.requests()) == n })
			return r.requests()[n-1]
		}
		_, second, until, err := h.Rotate(t.Context(), keyA, w.ID, time.Hour)
		if err != nil || until.Before(time.Now().Add(50*time.Minute)) {
			t.Fatal(until, err)
		}
		q := next(1)
		if got, want := q.header.Get("webhook-signature"), signed(q, second)+" "+signed(q, first); got != want {
			t.Errorf("while both are valid: got %s, want %s", got, want)
		}
		// The time is over.
		err = db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `update webhook set old_until = $1`, store.Time(time.Now().Add(-time.Second)))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		q = next(2)
		if got, want := q.header.Get("webhook-signature"), signed(q, second); got != want {
			t.Errorf("after that: got %s, want %s", got, want)
		}
		_, third, _, err := h.Rotate(t.Context(), keyA, w.ID, 0)
		if err != nil {
			t.Fatal(err)
		}
		q = next(3)
		if got, want := q.header.Get("webhook-signature"), signed(q, third); got != want {
			t.Errorf("without overlap: got %s, want %s", got, want)
		}
		for _, bad := range []time.Duration{-1, webhook.MaxOverlap + 1} {
			if _, _, _, err := h.Rotate(t.Context(), keyA, w.ID, bad); !errors.Is(err, webhook.ErrInvalid) {
				t.Errorf("overlap %v: %v", bad, err)
			}
		}
	})
}

// TestLobster: an account receives events of the inboxes that it shares, in
// LobsterMail's words.
func TestLobster(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		p := newPost(t, db)
		_, token, err := p.Keys.NewAccount(t.Context(), p.who, "account")
		if err != nil {
			t.Fatal(err)
		}
		account, err := auth.CheckKey(t.Context(), db, token)
		if err != nil {
			t.Fatal(err)
		}
		mine, _, err := p.CreateInbox(t.Context(), account, directory.NewInbox{Address: "mine"}, token)
		if err != nil {
			t.Fatal(err)
		}
		other, _ := p.inbox(t, "other")
		h := hooks(t, db, webhook.Config{Private: true, Retry: time.Millisecond})
		r := newReceiver(t, nil)
		made, secret, err := h.CreateAs(t.Context(), account, webhook.Lobster, change("l", r.URL+"/l", "email.received", "email.scan.complete"))
		if err != nil {
			t.Fatal(err)
		}
		free(t, h, account, made.ID)
		if _, _, err := h.CreateAs(t.Context(), account, webhook.Lobster, change("l", r.URL+"/l", "email.thread.new")); !errors.Is(err, webhook.ErrInvalid) {
			t.Errorf("an event that there is not: %v", err)
		}
		run(t, h)
		p.receive(t, other)
		p.receive(t, mine)
		eventually(t, "two requests", func() bool { return len(r.requests()) >= 2 })
		ids := map[string]bool{}
		for _, q := range r.requests() {
			var b struct {
				Event, Timestamp string
				Data             map[string]string
			}
			if err := json.Unmarshal(q.body, &b); err != nil || !strings.HasPrefix(b.Event, "email.") || b.Data["inboxId"] != mine.ID || !strings.HasPrefix(b.Data["emailId"], "msg_") {
				t.Errorf("body: %s, %v", q.body, err)
			}
			m := hmac.New(sha256.New, []byte(secret.Reveal()))
			m.Write(q.body)
			if got, want := q.header.Get("X-LobsterMail-Signature"), "sha256="+hex.EncodeToString(m.Sum(nil)); got != want {
				t.Errorf("got %s, want %s", got, want)
			}
			if got, want := q.header.Get("webhook-signature"), signed(q, secret); got != want {
				t.Errorf("got %s, want %s", got, want)
			}
			ids[q.header.Get("webhook-id")] = true
		}
		if len(ids) != 2 {
			t.Errorf("got ids %v, want two", ids)
		}
	})
}

// TestMultiMail: an account receives events of its inboxes in MultiMail's words.
func TestMultiMail(t *testing.T) {
	p := newPost(t, storetest.SQLite(t))
	_, token, err := p.Keys.NewAccount(t.Context(), p.who, "account")
	if err != nil {
		t.Fatal(err)
	}
	account, err := auth.CheckKey(t.Context(), p.db, token)
	if err != nil {
		t.Fatal(err)
	}
	mine, _, err := p.CreateInbox(t.Context(), account, directory.NewInbox{Address: "mine"}, token)
	if err != nil {
		t.Fatal(err)
	}
	other, _ := p.inbox(t, "other")
	h := hooks(t, p.db, webhook.Config{Private: true, Retry: time.Millisecond})
	r := newReceiver(t, nil)
	made, secret, err := h.CreateAs(t.Context(), account, webhook.MultiMail, change("m", r.URL+"/m", "message.received"))
	if err != nil {
		t.Fatal(err)
	}
	free(t, h, account, made.ID)
	run(t, h)
	p.receive(t, other)
	p.receive(t, mine)
	eventually(t, "a request", func() bool { return len(r.requests()) >= 1 })
	for _, q := range r.requests() {
		var b struct {
			Event     string
			Timestamp time.Time
			Data      map[string]string
		}
		if err := json.Unmarshal(q.body, &b); err != nil || b.Event != "message.received" || b.Timestamp.IsZero() || b.Data["mailbox_id"] != mine.ID || b.Data["direction"] != "inbound" || !strings.HasPrefix(b.Data["email_id"], "msg_") {
			t.Errorf("body: %s, %v", q.body, err)
		}
		m := hmac.New(sha256.New, []byte(secret.Reveal()))
		m.Write(q.body)
		if got, want := q.header.Get("X-MultiMail-Signature"), "sha256="+hex.EncodeToString(m.Sum(nil)); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		if got, want := q.header.Get("webhook-signature"), signed(q, secret); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
