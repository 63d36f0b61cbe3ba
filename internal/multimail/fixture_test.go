package multimail

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/domain"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailauth/dnstest"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/webhook"
)

// A nextHop is a fake transport that takes everything.
type nextHop struct{ got []mail.Envelope }

func (n *nextHop) Deliver(_ context.Context, e mail.Envelope) ([]mail.Delivery, error) {
	e.Raw, e.Prefix = append(e.Prefix, e.Raw...), nil
	n.got = append(n.got, e)
	var ds []mail.Delivery
	for _, to := range e.To {
		ds = append(ds, mail.Delivery{Recipient: to, Outcome: mail.Accepted})
	}
	return ds, nil
}

type fixture struct {
	db   *store.DB
	gate *oversight.Gate
	post *mailbox.PostOffice
	hop  *nextHop
	dns  *dnstest.Server
	h    http.Handler
	log  bytes.Buffer

	keys    map[string]string // what a client shows, by its name
	secrets []string
	person  auth.Principal // of the first project

	a, b, foreign, deleted directory.Inbox
	message                map[string]string // by inbox
	thread                 map[string]string
	spare                  map[string]string // a key of the inbox
}

func setup(t *testing.T, db *store.DB) *fixture {
	t.Helper()
	f := &fixture{db: db, hop: &nextHop{}, keys: map[string]string{"nobody": ""}, message: map[string]string{}, thread: map[string]string{}, spare: map[string]string{}}
	log := slog.New(slog.NewTextHandler(io.MultiWriter(&f.log, t.Output()), &slog.HandlerOptions{Level: slog.LevelDebug}))
	blobs, err := store.OpenBlobs(t.TempDir())
	f.must(t, err)
	f.gate = oversight.NewGate(log, db, oversighttest.Rules(nil))
	f.post = mailbox.New(log, db, f.gate, mailbox.Config{Blobs: blobs, Transport: f.hop, Domain: "agents.test"})
	f.dns = dnstest.Start(t)
	domains, err := domain.New(log, db, domain.Config{Domain: "agents.test", Host: "agents.test", Resolver: f.dns.Resolver(), MinCheckGap: time.Nanosecond, MaxDomains: 500, InUse: directory.InboxesIn, OnHeld: directory.FreeAddresses})
	f.must(t, err)
	hooks, err := webhook.New(log, db, f.gate, webhook.Config{Key: make([]byte, 32), Private: true, Announce: f.post.Announce})
	f.must(t, err)
	f.h = http.StripPrefix(Path, New(log, db, f.gate, f.post, Config{Domains: domains, Webhooks: hooks}).Handler())
	for i, name := range []string{"", "foreign "} {
		var project auth.Principal
		f.update(t, func(tx *store.Tx) error {
			id, key, err := auth.NewProject(t.Context(), tx, "p"+name)
			if err != nil {
				return err
			}
			project = auth.Principal{Kind: auth.Project, ID: "crd_x", Project: id}
			f.shows(name+"project", key)
			link, err := auth.NewSetup(t.Context(), tx, id)
			if err != nil {
				return err
			}
			who, err := auth.Redeem(t.Context(), tx, link, "ann"+strings.TrimSpace(name), "x")
			if err != nil {
				return err
			}
			_, token, err := auth.BeginSession(t.Context(), tx, who, auth.Session{Kind: auth.Bearer})
			f.shows(name+"person", token)
			if i == 0 {
				f.person = who
			}
			return err
		})
		if i == 0 {
			f.a, f.b = f.inbox(t, project, "alice", "key a"), f.inbox(t, project, "bella", "key b")
		} else {
			f.foreign = f.inbox(t, project, "foreign", "foreign key")
		}
	}
	return f
}

func (f *fixture) must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) update(t *testing.T, fn func(tx *store.Tx) error) {
	t.Helper()
	f.must(t, f.db.Update(t.Context(), fn))
}

func (f *fixture) shows(name string, key auth.Secret) {
	f.keys[name] = key.Reveal()
	f.secrets = append(f.secrets, key.Reveal())
}

func (f *fixture) inbox(t *testing.T, who auth.Principal, address, client string) directory.Inbox {
	t.Helper()
	b, key, err := f.post.CreateInbox(t.Context(), who, directory.NewInbox{Address: address}, "")
	f.must(t, err)
	f.shows(client, key)
	return b
}

// open returns a client's principal and the key of its inbox.
func (f *fixture) open(t *testing.T, client string) (auth.Principal, *seal.Key) {
	t.Helper()
	who, err := auth.CheckKey(t.Context(), f.db, auth.Secret(f.keys[client]))
	f.must(t, err)
	k, err := f.post.Keys.Open(t.Context(), who, auth.Secret(f.keys[client]), "")
	f.must(t, err)
	return who, k
}

// account makes an account, which its client shows as programs for MultiMail do.
func (f *fixture) account(t *testing.T, name, project string) {
	t.Helper()
	_, key, err := f.post.Keys.NewAccount(t.Context(), auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: project}, name)
	f.must(t, err)
	f.shows(name, auth.Secret(KeyFor(key.Reveal())))
}

// principals makes the credentials of the isolation test that setup does not make.
func (f *fixture) principals(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	who, a := f.open(t, "key a")
	whoB, b := f.open(t, "key b")
	soon := time.Now().Add(time.Hour)
	add := func(name string, scope seal.Scope) string {
		p, key, err := f.post.Keys.Add(ctx, who, a, keyring.NewKey{Scope: scope})
		f.must(t, err)
		f.shows(name, key)
		return p.Credential
	}
	add("reading key a", seal.Read)
	add("proposing key a", seal.Propose)
	add("sending key a", seal.Send)
	f.must(t, f.post.Keys.Revoke(ctx, who, "", add("revoked key a", seal.Manage), false))
	_, recovery, err := f.post.Keys.AddRecovery(ctx, who, a)
	f.must(t, err)
	f.shows("recovery key a", recovery)
	_, limited, err := f.post.Keys.Add(ctx, who, a, keyring.NewKey{Scope: seal.Propose, Tools: []string{"email_send"}})
	f.must(t, err)
	f.shows("key a for a tool", limited)
	grant := func(name string, who auth.Principal, k *seal.Key, scope seal.Scope) string {
		p, key, err := f.post.Keys.Grant(ctx, who, k, keyring.NewKey{Name: name, Scope: scope, Expires: soon})
		f.must(t, err)
		f.shows(name, auth.Secret(KeyFor(key.Reveal())))
		return p.Credential
	}
	both := grant("proposing grant a, b", who, a, seal.Propose)
	_, err = f.post.Keys.Extend(ctx, whoB, b, both, keyring.NewKey{Scope: seal.Propose, Expires: soon})
	f.must(t, err)
	grant("reading grant b", whoB, b, seal.Read)
	f.must(t, f.post.Keys.RevokeGrant(ctx, f.person, grant("revoked grant a", who, a, seal.Propose)))
	f.account(t, "account", f.a.Project)
	f.account(t, "other account", f.a.Project)
	f.account(t, "foreign account", f.foreign.Project)
	f.deleted = f.inbox(t, f.person, "deleted", "key of a deleted inbox")
	_, err = f.post.Delete(ctx, f.person, f.deleted.ID)
	f.must(t, err)
	for client, b := range map[string]directory.Inbox{"key a": f.a, "key b": f.b, "foreign key": f.foreign} {
		who, k := f.open(t, client)
		f.message[b.ID] = f.arrive(t, b, client, "Kohlrabi")
		m, err := f.post.Listed(ctx, who, k, f.message[b.ID])
		f.must(t, err)
		f.thread[b.ID] = m.Thread
		p, _, err := f.post.Keys.Add(ctx, who, k, keyring.NewKey{Scope: seal.Read})
		f.must(t, err)
		f.spare[b.ID] = p.Credential
	}
}

// arrive receives a message with one file and returns its ID.
func (f *fixture) arrive(t *testing.T, b directory.Inbox, client, subject string) string {
	t.Helper()
	raw := "From: Bob <bob@example.com>\r\nTo: " + b.Address + "\r\nSubject: " + subject + "\r\nMessage-ID: <" + strings.ReplaceAll(subject, " ", "-") + "@example.com>\r\nMIME-Version: 1.0\r\n" +
		"Content-Type: multipart/mixed; boundary=x\r\n\r\n--x\r\n\r\nText of " + subject + "\r\n--x\r\nContent-Type: text/plain\r\nContent-Disposition: attachment; filename=kohlrabi.txt\r\n\r\nKohlrabi\r\n--x--\r\n"
	f.must(t, f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1"}))
	who, k := f.open(t, client)
	ms, err := f.post.Messages(t.Context(), who, k, 1)
	f.must(t, err)
	return ms[0].ID
}

// An answered is an answer, with its JSON.
type answered struct {
	code   int
	header http.Header
	body   string
	json   map[string]any
}

// text returns a field of an answer's object.
func (a answered) text(name string) string { return fmt.Sprint(a.json[name]) }

// list returns a field of an answer's object that is a list of objects.
func (a answered) list(name string) (out []map[string]any) {
	items, _ := a.json[name].([]any)
	for _, x := range items {
		m, _ := x.(map[string]any)
		out = append(out, m)
	}
	return out
}

func (f *fixture) do(t *testing.T, client, method, path, body string) answered {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, "http://postern.example"+Path+path, strings.NewReader(body))
	key, ok := f.keys[client]
	if !ok {
		t.Fatalf("there is no client %q", client)
	}
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	f.h.ServeHTTP(w, r)
	a := answered{w.Code, w.Header(), w.Body.String(), nil}
	if strings.HasPrefix(a.header.Get("Content-Type"), "application/json") {
		if err := json.Unmarshal([]byte(a.body), &a.json); err != nil {
			t.Fatalf("%s %s as %s: %v: %s", method, path, client, err, a.body)
		}
	}
	if a.code >= 400 && (a.json["error"] == nil || a.text("error") == "" || len(a.body) > 1500) {
		t.Errorf("%s %s as %s: not an error of MultiMail's form: %d %.300s", method, path, client, a.code, a.body)
	}
	if (a.code == http.StatusUnauthorized) != (a.header.Get("WWW-Authenticate") != "") {
		t.Errorf("%s %s as %s: %d with WWW-Authenticate %q", method, path, client, a.code, a.header.Get("WWW-Authenticate"))
	}
	return a
}

// want is do for an answer with a status.
func (f *fixture) want(t *testing.T, status int, client, method, path, body string) answered {
	t.Helper()
	a := f.do(t, client, method, path, body)
	if a.code != status {
		t.Fatalf("%s %s as %s: got %d, want %d: %s", method, path, client, a.code, status, a.body)
	}
	return a
}

// decide approves what is pending, as MultiMail's programs do.
func (f *fixture) decide(t *testing.T, action, decision string) answered {
	t.Helper()
	for _, e := range f.want(t, 200, "person", "GET", "/v1/oversight/pending", "").list("emails") {
		if e["action_id"] == action {
			return f.want(t, 200, "person", "POST", "/v1/oversight/decide", fmt.Sprintf(`{"email_id":%q,"action":%q}`, e["id"], decision))
		}
	}
	t.Fatalf("%s is not pending", action)
	return answered{}
}

// run executes what was approved.
func (f *fixture) run(t *testing.T) {
	t.Helper()
	for {
		more, err := f.gate.RunOne(t.Context())
		f.must(t, err)
		if !more {
			return
		}
	}
}

func eachStore(t *testing.T, fn func(t *testing.T, f *fixture)) {
	t.Helper()
	storetest.Each(t, func(t *testing.T, db *store.DB) { fn(t, setup(t, db)) })
}
