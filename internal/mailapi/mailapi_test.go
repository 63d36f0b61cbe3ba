package mailapi

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/connection"
	"postern/internal/connector"
	"postern/internal/directory"
	"postern/internal/domain"
	"postern/internal/gmail/gmailtest"
	"postern/internal/mail"
	"postern/internal/mailauth/dnstest"
	"postern/internal/mailbox"
	"postern/internal/oauth"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/people"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/run"
	"postern/internal/secret"
	"postern/internal/site"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/tracing"
	"postern/internal/webhook"
)

// A nextHop is a fake transport that answers as told.
type nextHop struct {
	got     []mail.Envelope
	outcome mail.Outcome
}

func (n *nextHop) Deliver(_ context.Context, e mail.Envelope) ([]mail.Delivery, error) {
	e.Raw, e.Prefix = append(e.Prefix, e.Raw...), nil
	n.got = append(n.got, e)
	var ds []mail.Delivery
	for _, to := range e.To {
		ds = append(ds, mail.Delivery{Recipient: to, Outcome: n.outcome})
	}
	return ds, nil
}

// A client is one caller: what it shows, or who the socket says that it is.
type client struct {
	h      http.Handler
	header http.Header
}

// logged is what was logged so far; connections may be at it still.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

type fixture struct {
	db     *store.DB
	gate   *oversight.Gate
	post   *mailbox.PostOffice
	people *people.People
	oauth  *oauth.Server
	hop    *nextHop
	srv    *Server
	record *audit.Keeper
	log    logged

	runs    *run.Service
	permits *permit.Register
	traces  *tracing.Recorder

	commands *command.Admission

	dns     *dnstest.Server
	domains *domain.Registry
	hooks   *webhook.Hooks
	google  *gmailtest.Server

	a, b    directory.Inbox // of one project
	foreign directory.Inbox // of another
	deleted directory.Inbox // of the one; made by principals
	// By inbox, made by principals:
	messages, threads, spare, spareGrant map[string]string
	made                                 int64 // when it had made the credentials
	person                               auth.Principal
	clients                              map[string]client
	secrets                              []string
	hash                                 string
}

// elsewhere is a provider that takes every credential. Nothing is synchronised here.
type elsewhere struct{ connector.Provider }

func (elsewhere) Prepare(_ context.Context, s connector.Settings) (connector.Settings, error) {
	return s, nil
}

func (x elsewhere) Open(context.Context, connector.Settings, func(context.Context, string) error) (connector.Provider, error) {
	return x, nil
}

func (elsewhere) Revoke(context.Context) error { return nil }
func (elsewhere) Close() error                 { return nil }

func setup(t *testing.T, db *store.DB, rules oversighttest.Rules) *fixture {
	t.Helper()
	ctx := t.Context()
	f := &fixture{db: db, hop: &nextHop{outcome: mail.Accepted}, clients: map[string]client{}}
	log := slog.New(slog.NewTextHandler(io.MultiWriter(&f.log, t.Output()), &slog.HandlerOptions{Level: slog.LevelDebug}))
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f.gate = oversight.NewGate(log, db, rules)
	f.post = mailbox.New(log, db, f.gate, mailbox.Config{Blobs: blobs, Transport: f.hop, Domain: "agents.test", PublicURL: "https://mail.example"})
	f.dns = dnstest.Start(t)
	f.domains, err = domain.New(log, db, domain.Config{Domain: "agents.test", Host: "agents.test", Resolver: f.dns.Resolver(), MinCheckGap: time.Nanosecond, MaxDomains: 500, InUse: directory.InboxesIn, OnHeld: directory.FreeAddresses})
	if err != nil {
		t.Fatal(err)
	}
	if f.hooks, err = webhook.New(log, db, f.gate, webhook.Config{Key: make([]byte, 32), Private: true, Retry: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	if f.people, err = people.New(db, people.Config{Key: make([]byte, 32)}); err != nil {
		t.Fatal(err)
	}
	if f.record, err = audit.NewKeeper(log, db, audit.KeeperConfig{Signer: checkpointSigner(t)}); err != nil {
		t.Fatal(err)
	}
	secrets, err := secret.New(ctx, log, db, secret.Config{Server: make([]byte, 32)})
	if err != nil {
		t.Fatal(err)
	}
	connections, err := connector.New(log, db, f.post, secrets, connector.Config{
		Openers: map[connector.Kind]connector.Opener{"imap": elsewhere{}}, Strip: func(raw []byte) []byte { return raw }, Results: func([]byte, string) (r mail.Results) { return r },
	})
	if err != nil {
		t.Fatal(err)
	}
	book := rulebook.New(log, db)
	f.gate.Handle(policy.KindChange, book)
	f.permits = permit.New(log, db, f.gate, permit.Config{})
	f.gate.Handle(policy.KindPermit, f.permits)
	f.traces = tracing.New("test", nil)
	if f.commands, err = command.New(log, db, f.gate, connection.New(log, db, book, f.gate, 0), command.Config{Dir: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	inputs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f.runs, err = run.New(log, db, f.gate, run.Config{
		Key: make([]byte, 32), Blobs: inputs, Post: f.post,
		Template: func(context.Context, auth.Principal, string) (string, string, error) { return "base", "", nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	f.gate.Handle(policy.KindRun, f.runs)
	f.oauth = oauth.New(log, db, f.post, oauth.Config{Site: site.Site{Hosts: []string{"127.0.0.1", "example.com", "localhost", "postern.test", "console.test"}}})
	srv := New(log, db, f.gate, f.post, Config{Runs: f.runs, Domains: f.domains, Webhooks: f.hooks, People: f.people, Record: f.record, Book: book, Secrets: secrets, Connections: connections, Permits: f.permits, Traces: f.traces, Commands: f.commands, OAuth: f.oauth, Gmail: f.signInsAtGoogle(t, log, secrets)})
	f.srv = srv
	// An HTTP server does not wait for its WebSockets. They must end before the database and
	// the log of this test.
	t.Cleanup(func() {
		select {
		case <-srv.closing:
		default:
			srv.Close()
		}
		f.untilWaiting(t, 0)
	})
	byKey := f.byKey
	byWho := func(name string, who auth.Principal) {
		f.clients[name] = client{srv.HandlerFor(func(*http.Request) (auth.Principal, error) { return who, nil }), nil}
	}
	f.clients["nobody"] = client{srv.Handler(), nil}
	for i, name := range []string{"", "foreign "} {
		var project auth.Principal
		err := db.Update(ctx, func(tx *store.Tx) error {
			id, key, err := auth.NewProject(ctx, tx, "p"+name)
			project = auth.Principal{Kind: auth.Project, ID: "crd_x", Project: id}
			byKey(name+"project", key)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		who := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: project.Project}
		byWho(name+"person", who)
		inbox := func(address, client string) directory.Inbox {
			b, key, err := f.post.CreateInbox(ctx, project, directory.NewInbox{Address: address}, "")
			if err != nil {
				t.Fatal(err)
			}
			byKey(client, key)
			return b
		}
		if i == 0 {
			f.person = who
			f.a, f.b = inbox("alice", "key a"), inbox("bella", "key b")
		} else {
			f.foreign = inbox("foreign", "foreign key")
		}
	}
	return f
}

// as adds a client whose principal is known, as at the local socket.
func (f *fixture) as(name string, who auth.Principal) {
	f.clients[name] = client{f.srv.HandlerFor(func(*http.Request) (auth.Principal, error) { return who, nil }), nil}
}

// byKey adds a client that shows a key.
func (f *fixture) byKey(name string, key auth.Secret) {
	f.secrets = append(f.secrets, key.Reveal())
	f.clients[name] = client{f.srv.Handler(), http.Header{"Authorization": {"Bearer " + key.Reveal()}}}
}

type answered struct {
	code   int
	header http.Header
	body   string
}

func (a answered) field(t *testing.T, name string) string {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal([]byte(a.body), &m); err != nil {
		t.Fatalf("%v: %s", err, a.body)
	}
	return fmt.Sprint(m[name])
}

func (f *fixture) do(t *testing.T, who, method, path, body string, header ...string) answered {
	t.Helper()
	c, ok := f.clients[who]
	if !ok {
		t.Fatalf("there is no client %q", who)
	}
	r := httptest.NewRequestWithContext(t.Context(), method, "http://postern.example"+path, strings.NewReader(body))
	maps.Copy(r.Header, c.header)
	if method == http.MethodPost || method == http.MethodPatch || method == http.MethodPut {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	c.h.ServeHTTP(w, r)
	a := answered{w.Code, w.Header(), w.Body.String()}
	checkAnswer(t, r, body, a)
	if a.code >= 400 && method != http.MethodHead {
		var p api.Problem
		if err := json.Unmarshal([]byte(a.body), &p); err != nil || p.Status != a.code || p.Code == "" || p.Message == "" || len(a.body) > 1500 {
			t.Errorf("%s %s as %s: not a problem: %d %.300s", method, path, who, a.code, a.body)
		}
		if (a.code == 401) != (a.header.Get("WWW-Authenticate") != "") {
			t.Errorf("%s %s as %s: %d with WWW-Authenticate %q", method, path, who, a.code, a.header.Get("WWW-Authenticate"))
		}
	}
	return a
}

func (f *fixture) message(t *testing.T, b directory.Inbox, as string) string {
	t.Helper()
	return f.arrive(t, b, as, "From: Bob <bob@example.com>\r\nTo: "+b.Address+"\r\nSubject: Kohlrabi\r\nMessage-ID: <1@example.com>\r\nX-Odd: yes\r\n\r\nHello\r\n")
}

// arrive receives raw and returns its id, as its reader sees it.
func (f *fixture) arrive(t *testing.T, b directory.Inbox, as, raw string) string {
	t.Helper()
	if err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1"}); err != nil {
		t.Fatal(err)
	}
	var out struct{ Messages []struct{ ID string } }
	if err := json.Unmarshal([]byte(f.do(t, as, "GET", "/v1/inboxes/"+b.ID+"/messages", "").body), &out); err != nil || len(out.Messages) == 0 {
		t.Fatal(err, out)
	}
	return out.Messages[0].ID
}

const draft = `{"to":["bob@example.com"],"subject":"s","text":"t"}`

// fresh is a draft that no other is the same as.
func fresh(n int) string { return strings.Replace(draft, `"s"`, fmt.Sprintf(`"s %d"`, n), 1) }

func (f *fixture) setState(t *testing.T, id string, s oversight.State) {
	t.Helper()
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		if _, err := tx.ExecContext(t.Context(), `update action set state = $1 where id = $2`, s, id); err != nil {
			return err
		}
		return oversighttest.Settle(t.Context(), tx)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestStory(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, oversighttest.Rules{
			{ID: "no-evil", Kind: "email.send", To: "*@evil.example", Effect: policy.Deny, Reason: "evil is blocked"},
			{ID: "home", Kind: "email.send", To: "boss@home.example", Effect: policy.Allow},
		})
		// An inbox with its key, once.
		got := f.do(t, "project", "POST", "/v1/inboxes", `{"address":"Analyst","mode":"gated_send"}`)
		if got.code != 201 || got.field(t, "address") != "analyst@agents.test" || !strings.HasPrefix(got.field(t, "key"), "pib_") {
			t.Fatalf("create = %+v", got)
		}
		if got := f.do(t, "project", "POST", "/v1/inboxes", `{"address":"analyst@agents.test"}`); got.code != 409 || got.field(t, "error") != "address_collision" {
			t.Errorf("again = %+v", got)
		}
		if got := f.do(t, "project", "GET", "/v1/inboxes", ""); strings.Contains(got.body, "pib_") || strings.Count(got.body, `"id":"ibx_`) != 2*3 || strings.Contains(got.body, f.foreign.ID) {
			t.Errorf("list = %s", got.body)
		}
		if got := f.do(t, "key a", "GET", "/v1/inboxes", ""); strings.Count(got.body, `"id":"ibx_`) != 2*1 || !strings.Contains(got.body, f.a.ID) {
			t.Errorf("list as key a = %s", got.body)
		}

		// Reading.
		id := f.message(t, f.a, "key a")
		got = f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.Address+"/messages/"+id, "")
		for _, want := range []string{`"subject":"Kohlrabi"`, `"text":"Hello"`, `{"name":"X-Odd","value":"yes"}`, `"direction":"in"`, `"attachments":[]`} {
			if !strings.Contains(got.body, want) {
				t.Errorf("message lacks %s: %s", want, got.body)
			}
		}
		got = f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.ID+"/messages/"+id+"/raw", "")
		if got.header.Get("Content-Type") != "message/rfc822" || !strings.HasPrefix(got.body, "From: Bob") || !strings.HasSuffix(got.body, "\r\nHello\r\n") {
			t.Errorf("raw = %+v", got)
		}

		// Proposing: held, with all that was asked.
		body := fmt.Sprintf(`{"to":["Bob <bob@example.com>"],"cc":["c@example.com"],"bcc":["eve@example.com"],"subject":"Result","text":"t","html":"<b>t</b>",
			"in_reply_to":"<1@example.com>","attachments":[{"name":"a.csv","content_base64":%q,"content_type":"text/csv"}]}`, base64.StdEncoding.EncodeToString([]byte("a,b")))
		got = f.do(t, "key a", "POST", "/v1/inboxes/"+f.a.ID+"/messages", body)
		act := got.field(t, "id")
		if got.code != 202 || got.field(t, "status") != "pending_send_approval" || got.header.Get("Location") != "/v1/actions/"+act {
			t.Fatalf("send = %+v", got)
		}
		mine := f.do(t, "key a", "GET", "/v1/actions/"+act, "")
		if mine.field(t, "state") != "pending" || strings.Contains(mine.body, `"view"`) || strings.Contains(mine.body, `"verdict"`) || strings.Contains(mine.body, `"decider"`) {
			t.Errorf("as its proposer = %s", mine.body)
		}
		shown := f.do(t, "person", "GET", "/v1/actions/"+act, "")
		for _, want := range []string{`{"name":"Bcc","value":"eve@example.com"}`, `"name":"a.csv"`, `"size":3`, `"title":"Result"`, `"version":1`, `"via":"rest"`} {
			if !strings.Contains(shown.body, want) {
				t.Errorf("a reviewer does not see %s: %s", want, shown.body)
			}
		}
		if got := f.do(t, "person", "GET", "/v1/actions?state=pending,unknown&limit=5", ""); strings.Count(got.body, `"id"`) != 1 || !strings.Contains(got.body, act) {
			t.Errorf("pending = %s", got.body)
		}
		if got := f.do(t, "person", "GET", "/v1/actions?state=denied", ""); got.body != "{\"actions\":[]}\n" {
			t.Errorf("denied = %s", got.body)
		}

		// Deciding: on what was shown, once, with a reason to reject.
		digest := shown.field(t, "digest")
		decision := "/v1/actions/" + act + "/decision"
		for name, tt := range map[string]struct {
			body string
			want int
		}{
			"another digest":   {fmt.Sprintf(`{"version":1,"digest":"%064d","approve":true}`, 0), 409},
			"another version":  {fmt.Sprintf(`{"version":2,"digest":%q,"approve":true}`, digest), 409},
			"no version":       {fmt.Sprintf(`{"digest":%q,"approve":true}`, digest), 400},
			"no digest":        {`{"version":1,"approve":true}`, 400},
			"no approve":       {fmt.Sprintf(`{"version":1,"digest":%q}`, digest), 400},
			"approve is text":  {fmt.Sprintf(`{"version":1,"digest":%q,"approve":"yes"}`, digest), 400},
			"reject, no words": {fmt.Sprintf(`{"version":1,"digest":%q,"approve":false}`, digest), 400},
			"long reason":      {fmt.Sprintf(`{"version":1,"digest":%q,"approve":false,"reason":%q}`, digest, strings.Repeat("x", 1001)), 400},
			"NUL in reason":    {fmt.Sprintf(`{"version":1,"digest":%q,"approve":false,"reason":"a\u0000b"}`, digest), 400},
			"unknown field":    {fmt.Sprintf(`{"version":1,"digest":%q,"approve":true,"force":true}`, digest), 400},
		} {
			if got := f.do(t, "person", "POST", decision, tt.body); got.code != tt.want {
				t.Errorf("%s: %+v, want %d", name, got, tt.want)
			}
		}
		approve := fmt.Sprintf(`{"version":1,"digest":%q,"approve":true}`, strings.ToUpper(digest))
		if got := f.do(t, "person", "POST", decision, approve); got.code != 200 || got.field(t, "state") != "approved" || got.field(t, "decider") != "person:ann" {
			t.Errorf("approve = %+v", got)
		}
		if got := f.do(t, "person", "POST", decision, approve); got.code != 409 || got.field(t, "error") != "stale" {
			t.Errorf("a second click = %+v", got)
		}
		f.hop.outcome = mail.Uncertain
		if ran, err := f.gate.RunOne(t.Context()); !ran || err != nil {
			t.Fatal(ran, err)
		}
		now := f.do(t, "person", "GET", "/v1/actions/"+act, "")
		if now.field(t, "state") != "unknown" {
			t.Fatalf("after execution = %+v", now)
		}

		// Resolving what is unknown.
		resolution := "/v1/actions/" + act + "/resolution"
		for name, tt := range map[string]struct {
			body string
			want int
		}{
			"no reason":     {`{"version":4,"state":"done"}`, 400},
			"pending":       {`{"version":4,"state":"pending","reason":"r"}`, 400},
			"no state":      {`{"version":4,"reason":"r"}`, 400},
			"stale":         {`{"version":3,"state":"done","reason":"r"}`, 409},
			"NUL in reason": {`{"version":4,"state":"done","reason":"\u0000"}`, 400},
		} {
			if got := f.do(t, "person", "POST", resolution, tt.body); got.code != tt.want {
				t.Errorf("%s: %+v, want %d", name, got, tt.want)
			}
		}
		if got := f.do(t, "person", "POST", resolution, `{"version":`+now.field(t, "version")+`,"state":"done","reason":"Bob has it"}`); got.code != 200 || got.field(t, "state") != "done" {
			t.Errorf("resolve = %+v", got)
		}
		if mine := f.do(t, "key a", "GET", "/v1/actions/"+act, ""); mine.field(t, "result") != "a person says: Bob has it" || strings.Contains(mine.body, "ann") {
			t.Errorf("as its proposer = %s", mine.body)
		}

		// What policy says.
		got = f.do(t, "key a", "POST", "/v1/inboxes/"+f.a.ID+"/messages", strings.ReplaceAll(draft, "bob@example.com", "x@evil.example"))
		if got.code != 403 || got.field(t, "error") != "blocked_by_policy" || !strings.Contains(got.body, "evil is blocked") {
			t.Errorf("blocked = %+v", got)
		}
		if mine := f.do(t, "key a", "GET", "/v1/actions/"+got.field(t, "id"), ""); mine.field(t, "state") != "denied" || mine.field(t, "reason") != "evil is blocked" {
			t.Errorf("blocked action = %s", mine.body)
		}
		if got := f.do(t, "key a", "POST", "/v1/inboxes/"+f.a.ID+"/messages", strings.ReplaceAll(draft, "bob@example.com", "boss@home.example")); got.field(t, "status") != "approved" {
			t.Errorf("allowed = %+v", got)
		}

		// The record.
		got = f.do(t, "person", "GET", "/v1/audit?object="+act+"&limit=50", "")
		for _, verb := range []string{"action.propose", "action.approve", "action.execute", "action.unknown", "action.resolve"} {
			if !strings.Contains(got.body, `"verb":"`+verb+`"`) {
				t.Errorf("audit lacks %s: %s", verb, got.body)
			}
		}
		if got := f.do(t, "person", "GET", "/v1/audit?verb=inbox.", ""); strings.Contains(got.body, "action.") || !strings.Contains(got.body, "inbox.create") || strings.Contains(got.body, f.foreign.ID) {
			t.Errorf("audit of inboxes = %s", got.body)
		}
		if got := f.do(t, "person", "GET", "/v1/audit?before=2", ""); strings.Count(got.body, `"seq"`) != 1 {
			t.Errorf("audit before 2 = %s", got.body)
		}
	})
}

func TestSendRefuses(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	path := "/v1/inboxes/" + f.a.ID + "/messages"
	with := func(field string, v any) string {
		m := map[string]any{"to": []string{"bob@example.com"}, "subject": "s", "text": "t"}
		m[field] = v
		b, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	file := func(name, content, kind string) any {
		return []map[string]string{{"name": name, "content_base64": content, "content_type": kind}}
	}
	const inject = "x\r\nBcc: eve@example.com"
	for _, tt := range []struct{ name, body, want string }{
		{"CR LF in to", with("to", []string{inject}), "to[0]: contains a line break"},
		{"CR LF in cc", with("cc", []string{inject}), "cc[0]: contains a line break"},
		{"CR LF in bcc", with("bcc", []string{inject}), "bcc[0]: contains a line break"},
		{"CR LF in a name", with("to", []string{"\"B\r\nX: y\" <b@example.com>"}), "to[0]: contains a line break"},
		{"CR LF in subject", with("subject", inject), "subject: contains a line break"},
		{"LF in subject", with("subject", "a\nb"), "subject: contains a line break"},
		{"CR LF in in_reply_to", with("in_reply_to", "<1@x>\r\nBcc: e@example.com"), "in_reply_to: contains a line break"},
		{"in_reply_to", with("in_reply_to", "msg <1>"), "in_reply_to: "},
		{"CR LF in file name", with("attachments", file(inject, "eA==", "")), "attachments[0].name: contains a line break"},
		{"CR LF in file type", with("attachments", file("x", "eA==", inject)), "attachments[0].content_type: contains a line break"},
		{"folder in file name", with("attachments", file("../x", "eA==", "")), "attachments[0].name: "},
		{"not base64", with("attachments", file("x", "*", "")), "attachments[0].content_base64: is not base64"},
		{"a path", with("attachments", []string{"/etc/passwd"}), "attachments: must be an object, not a string"},
		{"NUL in text", with("text", "a\x00b"), "text: contains a NUL"},
		{"long text", with("text", strings.Repeat("x", mail.MaxText+1)), "text: has 262145 characters, more than 262144"},
		{"long html", with("html", strings.Repeat("x", mail.MaxText+1)), "html: has 262145 characters, more than 262144"},
		{"long subject", with("subject", strings.Repeat("x", 999)), "subject: has 999 characters, more than 998"},
		{"many", with("bcc", slices.Repeat([]string{"x@example.com"}, 51)), "bcc: has 51 recipients, more than 50"},
		{"nobody", with("to", []string{}), "to: has no recipient"},
		{"from", with("from", "boss@example.com"), `body: unknown field \"from\"`},
		{"markdown too", with("markdown", "*x*"), "markdown: is given together with text or html"},
		{"in the past", with("send_at", "2020-01-01T00:00:00Z"), "send_at: is in the past"},
		{"in a century", with("send_at", "2126-01-01T00:00:00Z"), "send_at: is more than a year ahead"},
		{"no time", with("send_at", "tomorrow"), "send_at: must be a time such as 2027-01-31T12:00:00Z"},
		{"a number for a time", with("send_at", -5), "send_at: must be a time"},
		{"a number in to", with("to", []int{5}), "to: must be a string, not a number"},
		{"text for yes or no", with("bulk", "yes"), "bulk: must be true or false, not a string"},
		{"half a second", with("undo_seconds", 1.5), "undo_seconds: must be a whole number, not 1.5"},
		{"beyond numbers", with("undo_seconds", 1e30), "undo_seconds: must be a whole number, not 1e+30"},
		{"no timing", with("gate_timing", "never"), "gate_timing: must be gate_first or schedule_first"},
		{"timing without time", with("gate_timing", "schedule_first"), "gate_timing: schedule_first needs a send_at"},
		{"long undo", with("undo_seconds", 121), "undo_seconds: must be 0 to 120"},
		{"long key", with("idempotency_key", strings.Repeat("x", 256)), "idempotency_key: must be at most 255"},
		{"to is text", with("to", "bob@example.com"), "to: must be a list, not a string"},
		{"empty", "", "body: is empty"},
		{"list", "[]", "body: must be an object, not a list"},
		{"two objects", draft + draft, "body: something follows"},
		{"no UTF-8", with("text", "a") + "\xff", "body: is not valid UTF-8"},
		{"no UTF-8 in a text", strings.Replace(draft, "{", `{"html":"`+"\xc3("+`",`, 1), "body: is not valid UTF-8"},
		{"cut off", `{"to":`, "body: "},
		{"deep", strings.Repeat("[", 100000), "body: "},
		{"long unknown field", with(strings.Repeat("x", 10000), 1), "body: unknown field"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := f.do(t, "key a", "POST", path, tt.body); got.code != 400 || !strings.Contains(got.body, tt.want) {
				t.Errorf("got %d %.300s, want 400 with %q", got.code, got.body, tt.want)
			}
		})
	}
	t.Run("too large", func(t *testing.T) {
		got := f.do(t, "key a", "POST", path, `{"text":"`+strings.Repeat("x", maxSend)+`"}`)
		if got.code != 413 || !strings.Contains(got.body, "37748736") {
			t.Errorf("got %d %.300s, want 413", got.code, got.body)
		}
	})
	if got := f.do(t, "person", "GET", "/v1/actions", ""); got.body != "{\"actions\":[]}\n" {
		t.Errorf("something was stored: %s", got.body)
	}
	t.Run("25 MB", func(t *testing.T) {
		body := with("attachments", file("x", base64.StdEncoding.EncodeToString(make([]byte, mail.MaxAttachmentsBytes)), ""))
		if got := f.do(t, "key a", "POST", path, body); got.code != 202 {
			t.Errorf("got %d %.300s, want 202", got.code, got.body)
		}
	})
}

func TestRequests(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	inbox := "/v1/inboxes/" + f.a.ID
	key := f.clients["key a"].header.Get("Authorization")[len("Bearer "):]
	for _, tt := range []struct {
		name, who, method, path, body string
		header                        []string
		want                          int
	}{
		{"X-API-Key", "nobody", "GET", inbox + "/messages", "", []string{"X-API-Key", key}, 200},
		{"two keys", "key a", "GET", inbox + "/messages", "", []string{"X-API-Key", "pib_AAAAAAAAAAAAAAAAAAAAAAAAAA"}, 401},
		{"the same key twice", "key a", "GET", inbox + "/messages", "", []string{"X-API-Key", key}, 200},
		{"basic", "nobody", "GET", inbox + "/messages", "", []string{"Authorization", "Basic " + key}, 401},
		{"a key at the socket is not looked at", "person", "GET", inbox + "/messages", "", []string{"X-API-Key", key}, 403},
		{"no content type", "key a", "POST", inbox + "/messages", draft, []string{"Content-Type", ""}, 415},
		{"form", "key a", "POST", inbox + "/messages", draft, []string{"Content-Type", "application/x-www-form-urlencoded"}, 415},
		{"text", "key a", "POST", inbox + "/messages", draft, []string{"Content-Type", "text/plain"}, 415},
		{"charset", "key a", "POST", inbox + "/messages", draft, []string{"Content-Type", "application/json; charset=utf-8"}, 202},
		{"another origin", "key a", "POST", inbox + "/messages", draft, []string{"Origin", "https://evil.example"}, 403},
		{"put", "key a", "PUT", inbox + "/messages", "", nil, 405},
		{"delete", "project", "DELETE", "/v1/inboxes", "", nil, 405},
		{"decide by get", "person", "GET", "/v1/actions/act_AAAAAAAAAAAAAAAAAAAAAAAAAA/decision", "", nil, 405},
		{"preflight", "nobody", "OPTIONS", inbox + "/messages", "", []string{"Origin", "https://evil.example", "Access-Control-Request-Method", "POST"}, 405},
		{"head", "key a", "HEAD", inbox + "/messages", "", nil, 200},
		{"no such path", "key a", "GET", "/v1/nothing", "", nil, 404},
		{"limit 0", "key a", "GET", inbox + "/messages?limit=0", "", nil, 400},
		{"limit 201", "key a", "GET", inbox + "/messages?limit=201", "", nil, 400},
		{"limit text", "key a", "GET", inbox + "/messages?limit=x", "", nil, 400},
		{"no such message", "key a", "GET", inbox + "/messages/msg_AAAAAAAAAAAAAAAAAAAAAAAAAA", "", nil, 404},
		{"hostile message", "key a", "GET", inbox + "/messages/%00%ff", "", nil, 404},
		{"no such action", "key a", "GET", "/v1/actions/act_AAAAAAAAAAAAAAAAAAAAAAAAAA", "", nil, 404},
		{"hostile action", "person", "GET", "/v1/actions/%00", "", nil, 404},
		{"no such action to decide", "person", "POST", "/v1/actions/act_AAAAAAAAAAAAAAAAAAAAAAAAAA/decision", fmt.Sprintf(`{"version":1,"digest":"%064d","approve":true}`, 0), nil, 404},
		{"state", "person", "GET", "/v1/actions?state=open", "", nil, 400},
		{"states", "person", "GET", "/v1/actions?state=" + strings.Repeat("done,", 9), "", nil, 400},
		{"actions limit", "person", "GET", "/v1/actions?limit=501", "", nil, 400},
		{"actions by what they are not", "person", "GET", "/v1/actions?kind=email.send", "", nil, 400},
		{"audit by what it is not", "person", "GET", "/v1/audit?verbs=action.", "", nil, 400},
		{"proof of what it is not", "person", "GET", "/v1/audit/proof?seq=1&size=2", "", nil, 400},
		{"switch for a misspelt kind", "person", "POST", "/v1/switches", `{"scope":"capability","target":"email.sent","reason":"x"}`, nil, 400},
		{"switch for a project and more", "person", "POST", "/v1/switches", `{"scope":"project","target":"x","reason":"x"}`, nil, 400},
		{"audit before", "person", "GET", "/v1/audit?before=0", "", nil, 400},
		{"audit verb", "person", "GET", "/v1/audit?verb=%00", "", nil, 400},
		{"audit object", "person", "GET", "/v1/audit?object=%27", "", nil, 400},
		{"audit limit", "person", "GET", "/v1/audit?limit=1001", "", nil, 400},
		{"address", "project", "POST", "/v1/inboxes", `{"address":"a"}`, nil, 400},
		{"reserved", "project", "POST", "/v1/inboxes", `{"address":"postmaster"}`, nil, 400},
		{"another domain", "project", "POST", "/v1/inboxes", `{"address":"bob@example.com"}`, nil, 400},
		{"mode", "project", "POST", "/v1/inboxes", `{"address":"robert","mode":"free"}`, nil, 400},
		{"large", "project", "POST", "/v1/inboxes", `{"address":"` + strings.Repeat("x", maxBody) + `"}`, nil, 413},
		{"body of a get", "key a", "GET", inbox + "/messages", strings.Repeat("x", 100), nil, 200},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := f.do(t, tt.who, tt.method, tt.path, tt.body, tt.header...)
			if got.code != tt.want {
				t.Errorf("got %d %.300s, want %d", got.code, got.body, tt.want)
			}
			if (got.code == 405) != (got.header.Get("Allow") != "") {
				t.Errorf("%d with Allow %q", got.code, got.header.Get("Allow"))
			}
			for name := range got.header {
				if strings.HasPrefix(name, "Access-Control-") {
					t.Errorf("the answer has %s", name)
				}
			}
		})
	}
}

func TestInternalErrorsStayInside(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.db.Close()
	for who, path := range map[string]string{"key a": "/v1/inboxes", "person": "/v1/actions"} {
		if got := f.do(t, who, "GET", path, ""); got.code != 500 || got.field(t, "message") != "internal error" {
			t.Errorf("got %+v", got)
		}
	}
	if !strings.Contains(f.log.String(), "closed") {
		t.Error("the cause is not in the log")
	}
}
