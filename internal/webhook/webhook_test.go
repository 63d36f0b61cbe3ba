package webhook_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/mailauth/dnstest"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/webhook"
)

var (
	serverKey = []byte("a server's key of 32 bytes or so.")
	all       = event.Types()
)

func project(t *testing.T, db *store.DB, name string) auth.Principal {
	t.Helper()
	who := auth.Principal{Kind: auth.Project, ID: "crd_" + name}
	err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
		who.Project, _, err = auth.NewProject(t.Context(), tx, name)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return who
}

func hooks(t *testing.T, db *store.DB, c webhook.Config) *webhook.Hooks {
	t.Helper()
	return hooksAt(t, db, oversighttest.Rules{{Kind: policy.KindWebhook, Effect: policy.Allow}}, c)
}

// hooksAt is hooks where somebody else judges what agents make.
func hooksAt(t *testing.T, db *store.DB, judge oversight.Judge, c webhook.Config) *webhook.Hooks {
	t.Helper()
	h, _ := gated(t, db, judge, c)
	return h
}

// gated is hooksAt with the gate, which runs.
func gated(t *testing.T, db *store.DB, judge oversight.Judge, c webhook.Config) (*webhook.Hooks, *oversight.Gate) {
	t.Helper()
	c.Key = serverKey
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	gate := oversight.NewGate(log, db, judge)
	h, err := webhook.New(log, db, gate, c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- gate.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return h, gate
}

// run starts h and returns what ends it.
func run(t *testing.T, h *webhook.Hooks) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func add(t *testing.T, db *store.DB, who auth.Principal, typ event.Type, sandbox string) {
	t.Helper()
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		return event.Append(t.Context(), tx, event.Event{
			Project: who.Project, Type: typ, Sandbox: sandbox, Template: "base",
			Data: map[string]any{"sandbox_metadata": map[string]string{"a": "b"}},
		})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func change(name, url string, types ...event.Type) webhook.Change {
	return webhook.Change{Name: &name, URL: &url, Events: types}
}

func create(t *testing.T, h *webhook.Hooks, who auth.Principal, c webhook.Change) (webhook.Webhook, auth.Secret) {
	t.Helper()
	w, secret, err := h.Create(t.Context(), who, c)
	if err != nil {
		t.Fatal(err)
	}
	free(t, h, who, w.ID)
	return w, secret
}

// free waits until a webhook that policy allows waits for nothing.
func free(t *testing.T, h *webhook.Hooks, who auth.Principal, id string) {
	t.Helper()
	eventually(t, "a webhook that policy allows", func() bool {
		w, err := h.Get(t.Context(), who, id)
		return err == nil && w.Waits == ""
	})
}

// A receiver takes deliveries and answers as it is told.
type receiver struct {
	*httptest.Server
	mu     sync.Mutex // guards what follows
	got    []request
	answer func(n int, w http.ResponseWriter) // nil means 204
}

type request struct {
	header http.Header
	body   []byte
}

func newReceiver(t *testing.T, answer func(n int, w http.ResponseWriter)) *receiver {
	r := &receiver{answer: answer}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		b, _ := io.ReadAll(req.Body)
		r.mu.Lock()
		req.Header.Set("X-Path", req.URL.Path)
		r.got = append(r.got, request{req.Header, b})
		n, answer := len(r.got), r.answer
		r.mu.Unlock()
		if answer == nil {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		answer(n, w)
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *receiver) requests() []request {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]request(nil), r.got...)
}

// eventually waits until ok, and fails if that takes too long.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within two minutes: %s", what)
		}
	}
}

func deliveries(t *testing.T, h *webhook.Hooks, who auth.Principal, id string) []webhook.Delivery {
	t.Helper()
	ds, err := h.Deliveries(t.Context(), who, id, 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	return ds
}

// verify checks both signatures as a receiver would, from the documents of
// Standard Webhooks and E2B, with nothing of ours.
func verify(t *testing.T, r request, secret string, key []byte) {
	t.Helper()
	m := hmac.New(sha256.New, key)
	fmt.Fprintf(m, "%s.%s.%s", r.header.Get("webhook-id"), r.header.Get("webhook-timestamp"), r.body)
	if got, want := r.header.Get("webhook-signature"), "v1,"+base64.StdEncoding.EncodeToString(m.Sum(nil)); got != want {
		t.Errorf("webhook-signature: got %s, want %s", got, want)
	}
	sum := sha256.Sum256([]byte(secret + string(r.body)))
	for name, want := range map[string]string{
		"e2b-signature":         base64.RawStdEncoding.EncodeToString(sum[:]),
		"e2b-signature-version": "v1",
		"content-type":          "application/json",
	} {
		if got := r.header.Get(name); got != want {
			t.Errorf("%s: got %s, want %s", name, got, want)
		}
	}
	if got, want := r.header.Get("e2b-signature"), base64.RawURLEncoding.EncodeToString(sum[:]); got != want {
		t.Errorf("e2b-signature: got %s, want it the same in the URL's alphabet: %s", got, want)
	}
}

func TestDelivery(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who, other := project(t, db, "one"), project(t, db, "two")
		h := hooks(t, db, webhook.Config{Private: true, Retry: time.Millisecond})
		r := newReceiver(t, nil)
		raw := auth.Secret("a secret that somebody chose")
		w1, made := create(t, h, who, change("all", r.URL+"/made", all...))
		c := change("some", r.URL+"/raw", event.Killed)
		c.Secret = &raw
		w2, shown := create(t, h, who, c)
		if shown != "" {
			t.Error("a secret that the caller chose was returned")
		}
		create(t, h, other, change("other", r.URL+"/other", all...))
		run(t, h)
		add(t, db, who, event.Created, "i1")
		add(t, db, who, event.Killed, "i1")
		eventually(t, "three requests", func() bool { return len(r.requests()) >= 3 })
		time.Sleep(300 * time.Millisecond)
		if n := len(r.requests()); n != 3 {
			t.Fatalf("got %d requests, want 3", n)
		}
		key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(made.Reveal(), "whsec_"))
		if err != nil || len(key) != 32 {
			t.Fatalf("secret %q is not whsec_ and 32 bytes", made.Reveal())
		}
		es, err := event.List(t.Context(), db, who, event.Query{Limit: 10, Asc: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, q := range r.requests() {
			switch q.header.Get("e2b-webhook-id") {
			case w1.ID:
				verify(t, q, made.Reveal(), key)
			case w2.ID:
				verify(t, q, raw.Reveal(), []byte(raw.Reveal()))
			default:
				t.Errorf("delivery for webhook %q", q.header.Get("e2b-webhook-id"))
			}
			var b struct {
				Version, ID, SandboxID string
				Type                   event.Type
				Snake                  string         `json:"sandbox_id"`
				Data                   map[string]any `json:"event_data"`
			}
			if err := json.Unmarshal(q.body, &b); err != nil {
				t.Fatal(err)
			}
			i := 0
			if b.Type == event.Killed {
				i = 1
			}
			if b.Version != "v1" || b.ID != es[i].ID || b.ID != q.header.Get("webhook-id") || b.SandboxID != "i1" || b.Snake != "i1" || b.Data == nil {
				t.Errorf("body: %s", q.body)
			}
		}
		eventually(t, "all on record", func() bool {
			ds := deliveries(t, h, who, w1.ID)
			return len(ds) == 2 && ds[0].State == webhook.Delivered && ds[1].State == webhook.Delivered
		})
		d := deliveries(t, h, who, w1.ID)[0]
		if d.Attempts != 1 || d.Status != 204 || d.Duration <= 0 || !d.Next.IsZero() || d.Error != "" {
			t.Errorf("got %+v", d)
		}
		// Redelivered: the same message once more.
		if _, err := h.Redeliver(t.Context(), who, w1.ID, d.ID); err != nil {
			t.Fatal(err)
		}
		eventually(t, "redelivery", func() bool { return len(r.requests()) == 4 })
		if got := r.requests()[3].header.Get("webhook-id"); got != d.Event {
			t.Errorf("redelivered webhook-id: got %s, want %s", got, d.Event)
		}
		if _, err := h.Redeliver(t.Context(), other, w1.ID, d.ID); !errors.Is(err, webhook.ErrNotFound) {
			t.Errorf("redelivery by another project: got %v", err)
		}
		if _, err := h.Redeliver(t.Context(), who, w2.ID, d.ID); !errors.Is(err, webhook.ErrNotFound) {
			t.Errorf("redelivery to another webhook: got %v", err)
		}
	})
}

func TestRetries(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who := project(t, db, "one")
		h := hooks(t, db, webhook.Config{Private: true, Retry: time.Millisecond, Timeout: 3 * time.Second})
		silent := make(chan struct{})
		r := newReceiver(t, func(n int, w http.ResponseWriter) {
			switch n {
			case 1:
				w.WriteHeader(http.StatusInternalServerError)
			case 2:
				<-silent // for longer than is waited
			case 3:
				panic(http.ErrAbortHandler) // closes the connection
			default:
				// The receiver must not be able to keep us reading.
				_, _ = w.Write(make([]byte, 10<<20))
			}
		})
		t.Cleanup(func() { close(silent) })
		w, _ := create(t, h, who, change("x", r.URL, all...))
		run(t, h)
		add(t, db, who, event.Created, "i1")
		eventually(t, "delivered", func() bool {
			ds := deliveries(t, h, who, w.ID)
			return len(ds) == 1 && ds[0].State == webhook.Delivered
		})
		ids := map[string]bool{}
		for _, q := range r.requests() {
			ids[q.header.Get("webhook-id")] = true
			ids[q.header.Get("e2b-delivery-id")] = true
		}
		// On a machine that stands still there may be more: an answer that is late
		// is no answer.
		if got, n := len(ids), len(r.requests()); got != n+1 || n < 4 {
			t.Errorf("got %d ids in %d requests, want one message and four attempts", got, n)
		}
	})
}

// TestTakenByADeadServer: what a killed server was sending is sent again.
func TestTakenByADeadServer(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who := project(t, db, "one")
		h := hooks(t, db, webhook.Config{Private: true})
		r := newReceiver(t, nil)
		w, _ := create(t, h, who, change("x", r.URL, all...))
		stop := run(t, h)
		add(t, db, who, event.Created, "i1")
		eventually(t, "delivered", func() bool {
			ds := deliveries(t, h, who, w.ID)
			return len(ds) == 1 && ds[0].State == webhook.Delivered
		})
		stop()
		// As if it had been killed before the answer was on record, half a minute ago.
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `update webhook_delivery set state = 'waiting', next_at = $1`, store.Time(time.Now()))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		add(t, db, who, event.Killed, "i1") // nobody is there to route it
		run(t, hooks(t, db, webhook.Config{Private: true}))
		eventually(t, "both sent", func() bool { return len(r.requests()) == 3 })
	})
}

func TestDisabled(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who := project(t, db, "one")
		h := hooks(t, db, webhook.Config{Private: true, Retry: 50 * time.Millisecond, DisableAfter: 200 * time.Millisecond, MaxWaiting: 3})
		broken := newReceiver(t, func(_ int, w http.ResponseWriter) { w.WriteHeader(http.StatusTeapot) })
		gone := newReceiver(t, func(_ int, w http.ResponseWriter) { w.WriteHeader(http.StatusGone) })
		w1, _ := create(t, h, who, change("broken", broken.URL, all...))
		w2, _ := create(t, h, who, change("gone", gone.URL, event.Killed))
		for range 4 {
			add(t, db, who, event.Updated, "i1")
		}
		add(t, db, who, event.Killed, "i1")
		run(t, h)
		reason := func(id string) string {
			w, err := h.Get(t.Context(), who, id)
			if err != nil {
				t.Fatal(err)
			}
			if w.Enabled {
				return ""
			}
			return w.Reason
		}
		eventually(t, "both disabled", func() bool { return reason(w1.ID) != "" && reason(w2.ID) != "" })
		if got, want := reason(w1.ID), "no delivery succeeded for 200ms"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		if got, want := reason(w2.ID), "the receiver answered 410 Gone"; got != want || len(gone.requests()) != 1 {
			t.Errorf("got %q after %d requests, want %q after 1", got, len(gone.requests()), want)
		}
		full := 0
		for _, d := range deliveries(t, h, who, w1.ID) {
			if d.State != webhook.Failed || !d.Next.IsZero() || d.Error == "" {
				t.Errorf("got %+v, want it failed", d)
			}
			if strings.Contains(d.Error, "waiting already") {
				full++
			}
		}
		if full != 2 {
			t.Errorf("got %d deliveries that found the queue full, want 2", full)
		}
		err := audit.View(t.Context(), db, func(tx *store.Tx) error {
			es, err := audit.List(t.Context(), tx, audit.Query{Verb: "webhook.disable", Limit: 10})
			if len(es) != 2 {
				t.Errorf("got %d entries of the audit, want 2", len(es))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		// Enabled again, it gets what comes and what is asked for.
		d := deliveries(t, h, who, w1.ID)[0]
		if _, err := h.Redeliver(t.Context(), who, w1.ID, d.ID); !errors.Is(err, webhook.ErrInvalid) {
			t.Errorf("redelivery while disabled: got %v", err)
		}
		broken.mu.Lock()
		broken.answer = nil
		broken.mu.Unlock()
		yes := true
		if w, err := h.Update(t.Context(), who, w1.ID, webhook.Change{Enabled: &yes}); err != nil || !w.Enabled || w.Reason != "" {
			t.Fatalf("enable: %+v, %v", w, err)
		}
		if _, err := h.Redeliver(t.Context(), who, w1.ID, d.ID); err != nil {
			t.Fatal(err)
		}
		eventually(t, "redelivered", func() bool {
			for _, x := range deliveries(t, h, who, w1.ID) {
				if x.ID == d.ID {
					return x.State == webhook.Delivered
				}
			}
			return false
		})
	})
}

func TestOwnersManageWebhooks(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who, other := project(t, db, "one"), project(t, db, "two")
		h := hooks(t, db, webhook.Config{})
		w, secret := create(t, h, who, change("first", "https://example.com/hook?token=hush", event.Killed, event.Created, event.Killed))
		if got := fmt.Sprint(w.Events); got != fmt.Sprint([]event.Type{event.Created, event.Killed}) {
			t.Errorf("events: %s", got)
		}
		name, no := "renamed", false
		if got, err := h.Update(t.Context(), who, w.ID, webhook.Change{Name: &name, Enabled: &no}); err != nil || got.Name != name || got.Enabled || got.URL != w.URL {
			t.Errorf("update: %+v, %v", got, err)
		}
		for op, err := range map[string]error{
			"get":        func() error { _, err := h.Get(t.Context(), other, w.ID); return err }(),
			"update":     func() error { _, err := h.Update(t.Context(), other, w.ID, webhook.Change{Name: &name}); return err }(),
			"delete":     h.Delete(t.Context(), other, w.ID),
			"deliveries": func() error { _, err := h.Deliveries(t.Context(), other, w.ID, 0, 1); return err }(),
			"get nul":    func() error { _, err := h.Get(t.Context(), who, "\x00\xff"); return err }(),
		} {
			if !errors.Is(err, webhook.ErrNotFound) {
				t.Errorf("%s: got %v, want ErrNotFound", op, err)
			}
		}
		for _, k := range []auth.Kind{auth.Agent, auth.Sandbox} {
			p := auth.Principal{Kind: k, Project: who.Project}
			_, _, cerr := h.Create(t.Context(), p, change("x", "https://example.com", all...))
			_, lerr := h.List(t.Context(), p)
			if !errors.Is(cerr, auth.ErrForbidden) || !errors.Is(lerr, auth.ErrForbidden) || !errors.Is(h.Delete(t.Context(), p, w.ID), auth.ErrForbidden) {
				t.Errorf("%s manages webhooks", k)
			}
		}
		// The stored secret is not the secret, and the audit shows no token.
		var stored []byte
		err := audit.View(t.Context(), db, func(tx *store.Tx) error {
			if err := tx.One(t.Context(), `select secret from webhook where id = $1`, []any{w.ID}, &stored); err != nil {
				return err
			}
			es, err := audit.List(t.Context(), tx, audit.Query{Verb: "webhook.", Limit: 10})
			for _, e := range es {
				if strings.Contains(e.Detail, "hush") || strings.Contains(e.Detail, secret.Reveal()) {
					t.Errorf("the audit tells a secret: %s", e.Detail)
				}
			}
			if len(es) != 2 {
				t.Errorf("got %d entries, want 2", len(es))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(stored), secret.Reveal()) {
			t.Error("the secret is stored in the clear")
		}
		for i := 1; i < 20; i++ {
			create(t, h, who, change(fmt.Sprint(i), "https://example.com", all...))
		}
		if _, _, err := h.Create(t.Context(), who, change("21", "https://example.com", all...)); !errors.Is(err, webhook.ErrInvalid) {
			t.Errorf("the 21st webhook: got %v", err)
		}
		if err := h.Delete(t.Context(), who, w.ID); err != nil {
			t.Error(err)
		}
		if ws, err := h.List(t.Context(), who); err != nil || len(ws) != 19 {
			t.Errorf("got %d, %v, want 19", len(ws), err)
		}
	})
}

func TestCreateRefuses(t *testing.T) {
	db := storetest.SQLite(t)
	who := project(t, db, "one")
	h := hooks(t, db, webhook.Config{})
	ok := "https://example.com/hook"
	secret := func(s string) webhook.Change {
		c, x := change("x", ok, all...), auth.Secret(s)
		c.Secret = &x
		return c
	}
	tests := []struct {
		name string
		c    webhook.Change
		want string
	}{
		{"no name", webhook.Change{URL: &ok, Events: all}, "name: is missing"},
		{"empty name", change("", ok, all...), "name: "},
		{"line in name", change("a\nb", ok, all...), "name: "},
		{"name in no encoding", change("\xff", ok, all...), "name: "},
		{"no events", change("x", ok), "events: is missing"},
		{"empty events", webhook.Change{Name: &ok, URL: &ok, Events: []event.Type{}}, "events: must name"},
		{"unknown event", change("x", ok, event.Created, "sandbox.lifecycle.forked"), `events[1]: "sandbox.lifecycle.forked"`},
		{"short secret", secret("hunter2"), "signatureSecret: "},
		{"secret with a line", secret("0123456789abcdef\n"), "signatureSecret: "},
		{"http", change("x", "http://example.com", all...), "https://"},
		{"file", change("x", "file:///etc/passwd", all...), "https://"},
		{"gopher", change("x", "gopher://example.com", all...), "https://"},
		{"no host", change("x", "https:///x", all...), "https://"},
		{"opaque", change("x", "https:example.com", all...), "https://"},
		{"password", change("x", "https://a:b@example.com", all...), "password"},
		{"fragment", change("x", "https://example.com/#x", all...), "#fragment"},
		{"control character", change("x", "https://example.com/\r\nX: y", all...), "not a URL"},
		{"mail port", change("x", "https://example.com:25/", all...), "port: "},
		{"no port", change("x", "https://example.com:99999/", all...), "port: "},
		{"long", change("x", "https://example.com/"+strings.Repeat("a", 2048), all...), "2048"},
		{"loopback", change("x", "https://127.0.0.1/", all...), "loopback"},
		{"metadata", change("x", "https://169.254.169.254/latest/", all...), "metadata"},
		{"private", change("x", "https://10.1.2.3/", all...), "private"},
		{"loopback in IPv6", change("x", "https://[::1]/", all...), "loopback"},
		{"IPv4 in IPv6", change("x", "https://[::ffff:127.0.0.1]/", all...), "loopback"},
		{"metadata in IPv6", change("x", "https://[::ffff:a9fe:a9fe]/", all...), "metadata"},
		{"NAT64", change("x", "https://[64:ff9b::7f00:1]/", all...), "embedded"},
		{"zone", change("x", "https://[fe80::1%25eth0]/", all...), "zone"},
		{"decimal address", change("x", "https://2130706433/", all...), "not a host name"},
		{"short address", change("x", "https://127.1/", all...), "not a host name"},
		{"hexadecimal address", change("x", "https://0x7f000001/", all...), "not a host name"},
		{"octal address", change("x", "https://0177.0.0.1/", all...), "not a host name"},
		{"unspecified", change("x", "https://0.0.0.0/", all...), "this network"},
		{"name of Unicode digits", change("x", "https://①②⑦.⓪.⓪.①/", all...), "must be ASCII"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, _, err := h.Create(t.Context(), who, tt.c)
			if !errors.Is(err, webhook.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want ErrInvalid with %q", err, tt.want)
			}
		})
	}
}

// TestAttackers: what only shows when the connection is made.
func TestAttackers(t *testing.T) {
	db := storetest.SQLite(t)
	who := project(t, db, "one")
	h := hooks(t, db, webhook.Config{Private: true})
	victim := newReceiver(t, nil)
	_, port, _ := strings.Cut(strings.TrimPrefix(victim.URL, "http://"), ":")
	redirect := func(to string) string {
		return newReceiver(t, func(_ int, w http.ResponseWriter) {
			w.Header().Set("Location", to)
			w.WriteHeader(http.StatusTemporaryRedirect)
		}).URL
	}
	// Made while the operator allowed private addresses, so that no check of
	// the URL's text is in the way.
	tests := []struct {
		name, url string
		private   bool
		want      string
	}{
		{"redirect to metadata", redirect("http://169.254.169.254/latest/meta-data/"), true, "redirects are not followed"},
		{"redirect to another service of this machine", redirect(victim.URL), true, "redirects are not followed"},
		{"name that resolves to loopback", "http://localhost:" + port + "/", false, "loopback"},
		{"IPv4 in IPv6", "http://[::ffff:127.0.0.1]:" + port + "/", false, "loopback"},
		{"address of this machine", victim.URL, false, "never reachable"},
	}
	ids := map[string]webhook.Webhook{}
	for _, tt := range tests {
		ids[tt.name], _ = create(t, h, who, change(tt.name, tt.url, all...))
	}
	for _, private := range []bool{false, true} {
		for _, tt := range tests {
			on := tt.private == private
			if _, err := h.Update(t.Context(), who, ids[tt.name].ID, webhook.Change{Enabled: &on}); err != nil {
				t.Fatal(err)
			}
		}
		sender := hooks(t, db, webhook.Config{Private: private})
		stop := run(t, sender)
		add(t, db, who, event.Created, "i1")
		for _, tt := range tests {
			if tt.private != private {
				continue
			}
			eventually(t, tt.name, func() bool {
				ds := deliveries(t, h, who, ids[tt.name].ID)
				return len(ds) == 1 && strings.Contains(ds[0].Error, tt.want)
			})
		}
		stop()
	}
	if n := len(victim.requests()); n != 0 {
		t.Errorf("the victim got %d requests", n)
	}
	// What the operator opens is not everything.
	for _, u := range []string{"http://169.254.169.254/", "http://[fd00:ec2::254]/", "http://100.100.100.200/", "http://[fe80::1]/", "http://0.0.0.0/", "http://224.0.0.1/"} {
		if _, _, err := h.Create(t.Context(), who, change("x", u, all...)); !errors.Is(err, webhook.ErrInvalid) {
			t.Errorf("%s with --webhook-private: got %v, want ErrInvalid", u, err)
		}
	}
}

func TestSecretsNeedTheServersKey(t *testing.T) {
	db := storetest.SQLite(t)
	who := project(t, db, "one")
	r := newReceiver(t, nil)
	w, _ := create(t, hooks(t, db, webhook.Config{Private: true}), who, change("x", r.URL, all...))
	h, err := webhook.New(slog.New(slog.DiscardHandler), db, oversight.NewGate(slog.New(slog.DiscardHandler), db, oversighttest.Rules(nil)), webhook.Config{Private: true, Key: []byte("another server's key of 32 bytes.")})
	if err != nil {
		t.Fatal(err)
	}
	run(t, h)
	add(t, db, who, event.Created, "i1")
	eventually(t, "failure", func() bool {
		ds := deliveries(t, h, who, w.ID)
		return len(ds) == 1 && strings.Contains(ds[0].Error, "not sealed with this server's key")
	})
	if n := len(r.requests()); n != 0 {
		t.Errorf("%d deliveries were sent that nobody signed", n)
	}
	if _, err := webhook.New(slog.New(slog.DiscardHandler), db, oversight.NewGate(slog.New(slog.DiscardHandler), db, oversighttest.Rules(nil)), webhook.Config{Key: []byte("short")}); err == nil {
		t.Error("a short key was taken")
	}
}

// TestResolver: a receiver is looked up where the operator said, under its own
// name and below no domain of this machine, and judged by what came of it.
func TestResolver(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who := project(t, db, "p")
		r := newReceiver(t, nil)
		dns := dnstest.Start(t, "hook.example. 1 IN A 127.0.0.1", "metadata.example. 1 IN A 169.254.169.254")
		h := hooks(t, db, webhook.Config{Private: true, Retry: time.Millisecond, Resolver: dns.Resolver()})
		_, port, _ := net.SplitHostPort(r.Listener.Addr().String())
		create(t, h, who, change("a", "http://hook.example:"+port+"/there", event.Created))
		bad, _ := create(t, h, who, change("b", "http://metadata.example:"+port+"/", event.Created))
		add(t, db, who, event.Created, "sbx_1")
		run(t, h)
		eventually(t, "a request", func() bool { return len(r.requests()) == 1 })
		eventually(t, "a refusal", func() bool {
			ds, err := h.Deliveries(t.Context(), who, bad.ID, 0, 10)
			return err == nil && len(ds) == 1 && strings.Contains(ds[0].Error, "refused")
		})
	})
}
