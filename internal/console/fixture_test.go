package console_test

import (
	"context"
	"errors"
	"fmt"
	"html"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/console"
	"postern/internal/directory"
	"postern/internal/domain"
	"postern/internal/gmail"
	"postern/internal/imapmail"
	"postern/internal/inside"
	"postern/internal/mail"
	"postern/internal/mailauth"
	"postern/internal/mailauth/dnstest"
	"postern/internal/mailbox"
	"postern/internal/notify"
	"postern/internal/oauth"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/people"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
	"postern/internal/secret"
	"postern/internal/site"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/webhook"
)

// A nextHop is a fake transport that answers as told.
type nextHop struct {
	mu      sync.Mutex
	got     []mail.Envelope
	outcome mail.Outcome
	detail  string
}

func (n *nextHop) Deliver(_ context.Context, e mail.Envelope) ([]mail.Delivery, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e.Raw, e.Prefix = append(e.Prefix, e.Raw...), nil
	n.got = append(n.got, e)
	var ds []mail.Delivery
	for _, to := range e.To {
		ds = append(ds, mail.Delivery{Recipient: to, Outcome: n.outcome, Detail: n.detail})
	}
	return ds, nil
}

func (n *nextHop) sent() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.got)
}

func (n *nextHop) answer(o mail.Outcome, detail string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.outcome, n.detail = o, detail
}

// A machine is a fake runtime and network whose sandboxes hold one guest that
// only says that it is up.
type machine struct {
	guest string // address

	mu   sync.Mutex
	gone map[string]chan struct{}
}

func (m *machine) Attach(context.Context, auth.Principal, policy.Egress) (*os.File, error) {
	return os.Open(os.DevNull)
}
func (m *machine) Detach(string)            {}
func (m *machine) MuteIfSilent(string) bool { return true }

func (m *machine) Adopt(context.Context, auth.Principal, policy.Egress, *os.File) error { return nil }

func (m *machine) Handle(string) (*os.File, error) { return os.Open(os.DevNull) }

func (m *machine) Update(context.Context, auth.Principal, policy.Egress) error { return nil }

func (m *machine) Save(context.Context, string, string, sandbox.SaveOptions) error {
	return sandbox.ErrNotFound
}

func (m *machine) Usage(context.Context, string) (sandbox.Usage, error) { return sandbox.Usage{}, nil }

func (m *machine) Dial(ctx context.Context, _ string, _ uint16) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", m.guest)
}

func (m *machine) Start(_ context.Context, s sandbox.Spec) error {
	s.Link.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gone[s.ID] = make(chan struct{})
	return nil
}

func (m *machine) Stop(_ context.Context, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.gone[id]; c != nil {
		close(c)
	}
	delete(m.gone, id)
	return nil
}

func (m *machine) Wait(ctx context.Context, id string) (string, error) {
	m.mu.Lock()
	c := m.gone[id]
	m.mu.Unlock()
	if c == nil {
		return "killed", nil
	}
	select {
	case <-c:
		return "killed", nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (m *machine) List(context.Context) ([]string, error) { return nil, nil }

// A bench judges as a test tells it: everything is asked about, and verdict
// says of whom.
type bench struct{ verdict policy.Verdict }

func (b *bench) Judge(context.Context, *store.Tx, string, policy.Request) (policy.Verdict, error) {
	return b.verdict, nil
}

// A fixture is a console with an agent that asks, and a person who decides.
type fixture struct {
	record *audit.Keeper
	vkey   string // of its checkpoints

	t       testing.TB
	db      *store.DB
	judge   *bench
	gate    *oversight.Gate
	post    *mailbox.PostOffice
	people  *people.People
	oauth   *oauth.Server
	fleet   *sandbox.Fleet
	guest   http.Handler // what guests answer besides that they are up; nil means nothing else
	casts   *inside.Casts
	domains *domain.Registry
	dns     *dnstest.Server
	hop     *nextHop
	console *console.Server
	notify  *notify.Notifier
	handler http.Handler
	url     string

	project, person, agent auth.Principal
	projectKey, inboxKey   auth.Secret
	inbox                  directory.Inbox
	link                   auth.Secret // set-up token
	client                 *http.Client
	permits                *permit.Register
	narrows                oversight.Action // a proposal that waits and can be narrowed; only after settings
	runs                   *ledger
	commands               logs
	builds                 *unusedBuilds
	mailboxes              *connector.Connections
	provider               *provider // of the mailboxes over IMAP
}

// A provider opens mailboxes as another opener does, which a test can set. Without one it
// knows the password "right", and no mail.
type provider struct{ connector.Opener }

func (p *provider) Prepare(ctx context.Context, set connector.Settings) (connector.Settings, error) {
	if p.Opener != nil {
		return p.Opener.Prepare(ctx, set)
	}
	if set.Credential != "right" {
		return set, fmt.Errorf("%w: imap: %w", directory.ErrInvalid, connector.ErrSignIn)
	}
	return set, nil
}

func (p *provider) Open(ctx context.Context, set connector.Settings, renewed func(context.Context, string) error) (connector.Provider, error) {
	if p.Opener != nil {
		return p.Opener.Open(ctx, set, renewed)
	}
	return nil, connector.ErrSignIn
}

const password = "correct horse battery"

func setup(t testing.TB) *fixture {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return setupAt(t, l)
}

func setupAt(t testing.TB, l net.Listener) *fixture {
	t.Helper()
	return setupOn(t, l, storetest.SQLite(t))
}

func setupOn(t testing.TB, l net.Listener, db *store.DB) *fixture {
	t.Helper()
	f := &fixture{t: t, commands: logs{}, builds: &unusedBuilds{}, db: db, judge: &bench{policy.Verdict{Effect: policy.Ask, Reason: "no rule allows it: a person decides"}}, hop: &nextHop{outcome: mail.Accepted, detail: "250 2.0.0 ok"}}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f.gate = oversight.NewGate(log, f.db, f.judge)
	f.post = mailbox.New(log, f.db, f.gate, mailbox.Config{Blobs: blobs, Transport: f.hop, Domain: "agents.test"})
	guest := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f.guest != nil && r.URL.Path != "/health" && r.URL.Path != "/init" {
			f.guest.ServeHTTP(w, r)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(guest.Close)
	m := &machine{guest: guest.Listener.Addr().String(), gone: map[string]chan struct{}{}}
	if f.fleet, err = sandbox.New(log, f.db, m, m, sandboxtest.Config(t)); err != nil {
		t.Fatal(err)
	}
	f.update(func(tx *store.Tx) (err error) {
		f.project.Kind, f.project.ID = auth.Project, "crd_project"
		if f.project.Project, f.projectKey, err = auth.NewProject(t.Context(), tx, "one"); err != nil {
			return err
		}
		f.person = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: f.project.Project}
		f.link, err = auth.NewSetup(t.Context(), tx, f.project.Project)
		return err
	})
	f.inbox, f.inboxKey = f.newInbox("analyst")
	if f.agent, err = auth.CheckKey(t.Context(), f.db, f.inboxKey); err != nil {
		t.Fatal(err)
	}
	f.newRecord()
	f.dns = dnstest.Start(t)
	f.domains, err = domain.New(log, f.db, domain.Config{Domain: "agents.test", Host: "mx.agents.test", Resolver: f.dns.Resolver(), MinCheckGap: time.Nanosecond, InUse: directory.InboxesIn, OnHeld: directory.FreeAddresses})
	if err != nil {
		t.Fatal(err)
	}
	if f.people, err = people.New(f.db, people.Config{Key: make([]byte, 32)}); err != nil {
		t.Fatal(err)
	}
	book := rulebook.New(log, f.db)
	f.gate.Handle(policy.KindChange, book)
	hooks, err := webhook.New(log, f.db, f.gate, webhook.Config{Key: []byte(strings.Repeat("k", 32)), Private: true})
	if err != nil {
		t.Fatal(err)
	}
	f.permits = permit.New(log, f.db, f.gate, permit.Config{})
	f.gate.Handle(policy.KindPermit, f.permits)
	secrets, err := secret.New(t.Context(), log, f.db, secret.Config{Server: []byte(strings.Repeat("k", 32))})
	if err != nil {
		t.Fatal(err)
	}
	f.provider = &provider{}
	f.mailboxes, err = connector.New(log, f.db, f.post, secrets, connector.Config{
		Instance: "test", Openers: map[connector.Kind]connector.Opener{imapmail.Kind: f.provider, gmail.Kind: f.provider}, Strip: func(raw []byte) []byte { return raw }, Results: mailauth.Given,
	})
	if err != nil {
		t.Fatal(err)
	}
	box, err := secrets.Box("notices")
	if err != nil {
		t.Fatal(err)
	}
	f.notify, err = notify.New(log, f.db, f.gate, notify.Config{Base: "http://" + l.Addr().String(), Box: box, Rules: f.judge, Private: true})
	if err != nil {
		t.Fatal(err)
	}
	f.runs = &ledger{}
	if f.casts, err = inside.NewCasts(log, t.TempDir(), []byte("0123456789abcdef0123456789abcdef")); err != nil {
		t.Fatal(err)
	}
	f.oauth = oauth.New(log, f.db, f.post, oauth.Config{Site: site.Site{Hosts: []string{"127.0.0.1", "example.com", "localhost", "postern.test", "console.test"}}})
	f.console = console.New(log, f.db, f.gate, f.fleet, f.post, f.domains, console.Config{Hosts: []string{l.Addr().String(), "console.test"}, People: f.people, Book: book, Hooks: hooks, Secrets: secrets, Permits: f.permits, Ceiling: policy.Ceiling{Allow: []string{"example.com"}}, Runs: f.runs, RunFiles: shelf{f.runs}, RunReports: f.runs, Record: f.record, RecordKeys: f.recordKeys, OAuth: f.oauth, Casts: f.casts, Mailboxes: f.mailboxes, Data: f.data(), Commands: f.commands, Builds: f.builds, Notify: f.notify})
	f.handler = f.console.Handler()
	s := &httptest.Server{Listener: l, Config: &http.Server{Handler: f.handler, ReadHeaderTimeout: time.Minute}}
	s.Start()
	t.Cleanup(s.Close)
	f.url = "http://" + l.Addr().String()
	f.client = f.browser()
	return f
}

func (f *fixture) newInbox(name string) (directory.Inbox, auth.Secret) {
	f.t.Helper()
	b, key, err := f.post.CreateInbox(f.t.Context(), f.project, directory.NewInbox{Address: name}, "")
	if err != nil {
		f.t.Fatal(err)
	}
	return b, key
}

func (f *fixture) update(fn func(tx *store.Tx) error) {
	f.t.Helper()
	if err := f.db.Update(f.t.Context(), fn); err != nil {
		f.t.Fatal(err)
	}
}

// colleague makes an owner's account, which has been a person's own for long,
// unless it is there.
func (f *fixture) colleague(name string) (p auth.Principal) {
	f.t.Helper()
	f.update(func(tx *store.Tx) error {
		p = f.person
		p.ID = name
		var n int
		if err := tx.One(f.t.Context(), `select count(*) from person where name = $1`, []any{name}, &n); err != nil || n > 0 {
			return err
		}
		_, link, err := auth.NewInvitation(f.t.Context(), tx, auth.Invitation{Project: f.project.Project, Role: auth.Owner})
		if err == nil {
			p, err = auth.Redeem(f.t.Context(), tx, link, name, "x")
		}
		if err == nil {
			_, err = tx.ExecContext(f.t.Context(), `update person_change set at = 1`)
		}
		return errors.Join(err, storetest.Reseal(f.t.Context(), tx))
	})
	return p
}

func (f *fixture) exec(query string, args ...any) {
	f.t.Helper()
	f.update(func(tx *store.Tx) error {
		ok, err := tx.Changed(f.t.Context(), query, args...)
		if err == nil && !ok {
			err = errors.New("nothing was changed")
		}
		if err != nil {
			return err
		}
		if !strings.HasPrefix(query, "update action") {
			return storetest.Reseal(f.t.Context(), tx)
		}
		return oversighttest.Settle(f.t.Context(), tx)
	})
}

// browser returns a client that keeps cookies and follows nothing.
func (f *fixture) browser() *http.Client {
	jar, err := cookiejar.New(nil)
	if err != nil {
		f.t.Fatal(err)
	}
	return &http.Client{Jar: jar, Timeout: 2 * time.Minute, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// An answer is a response, read.
type answer struct {
	status   int
	body     string
	header   http.Header
	location string
}

func (f *fixture) do(req *http.Request) answer {
	f.t.Helper()
	a := f.fetch(req)
	if strings.HasPrefix(a.header.Get("Content-Type"), "text/html") && req.Method != http.MethodHead && a.status != http.StatusSeeOther {
		wellFormed(f.t, req.Method+" "+req.URL.Path, a.body)
	}
	return a
}

func (f *fixture) fetch(req *http.Request) answer {
	f.t.Helper()
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return answer{resp.StatusCode, string(b), resp.Header, resp.Header.Get("Location")}
}

func (f *fixture) get(path string) answer { return f.send(http.MethodGet, path, nil) }

// bytes is get for what is no page.
func (f *fixture) bytes(path string) answer {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), http.MethodGet, f.url+path, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	return f.fetch(req)
}

func (f *fixture) submit(path string, form url.Values) answer {
	return f.send(http.MethodPost, path, form)
}

func (f *fixture) send(method, path string, form url.Values) answer {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), method, f.url+path, strings.NewReader(form.Encode()))
	if err != nil {
		f.t.Fatal(err)
	}
	if form != nil {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		// As a browser sends it.
		req.Header.Set("Origin", f.url)
		req.Header.Set("Sec-Fetch-Site", "same-origin")
	}
	return f.do(req)
}

// stranger makes the account of eve, a person of another project, and signs her in.
func (f *fixture) stranger() {
	f.t.Helper()
	var token auth.Secret
	f.update(func(tx *store.Tx) error {
		id, _, err := auth.NewProject(f.t.Context(), tx, "two")
		if err == nil {
			token, err = auth.NewSetup(f.t.Context(), tx, id)
		}
		return err
	})
	f.client = f.browser()
	if a := f.submit("/console/setup", url.Values{"token": {token.Reveal()}, "name": {"eve"}, "password": {password}, "again": {password}}); a.status != http.StatusSeeOther {
		f.t.Fatalf("set up: status %d\n%s", a.status, a.body)
	}
}

// enter makes ann's account and signs her in.
func (f *fixture) enter() {
	f.t.Helper()
	a := f.submit("/console/setup", url.Values{"token": {f.link.Reveal()}, "name": {"ann"}, "password": {password}, "again": {password}})
	if a.status != http.StatusSeeOther || a.location != "/console/" {
		f.t.Fatalf("set up: status %d, Location %q\n%s", a.status, a.location, a.body)
	}
}

func draft() mail.Draft {
	return mail.Draft{
		To: []string{"Bob Buyer <bob@shop.example>"}, Cc: []string{"carol@shop.example"}, Bcc: []string{"eve@hidden.example"},
		Subject: "Totals by region", Text: "north 150\nsouth 98\n",
		Attachments: []mail.Attachment{{Name: "totals.csv", ContentType: "text/csv", Data: []byte("north,150\n")}},
	}
}

func (f *fixture) propose(d mail.Draft) oversight.Action {
	f.t.Helper()
	f.update(func(tx *store.Tx) error { // the same draft again is not what these tests are about
		_, err := tx.ExecContext(f.t.Context(), `delete from send_content`)
		return err
	})
	a, err := f.post.Send(f.t.Context(), f.agent, "rest", mailbox.Outgoing{Draft: d})
	if err != nil {
		f.t.Fatal(err)
	}
	return a.Action
}

func (f *fixture) state(id string) oversight.Action {
	f.t.Helper()
	a, err := f.gate.Action(f.t.Context(), f.person, id)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

// drain executes what is approved, as a worker of the daemon would.
func (f *fixture) drain() {
	f.t.Helper()
	for range 20 {
		if ran, err := f.gate.RunOne(f.t.Context()); err != nil {
			f.t.Fatal(err)
		} else if !ran {
			return
		}
	}
}

var hiddenField = regexp.MustCompile(`<input type="hidden" name="(\w+)" value="([^"]*)">`)

// form returns the hidden fields of the form with this id, as the page has it.
func (f *fixture) form(page, id string) url.Values {
	f.t.Helper()
	_, rest, ok := strings.Cut(page, `id="`+id+`"`)
	if !ok {
		f.t.Fatalf("the page has no form %s:\n%s", id, page)
	}
	rest, _, _ = strings.Cut(rest, "</form>")
	v := url.Values{}
	for _, m := range hiddenField.FindAllStringSubmatch(rest, -1) {
		v.Set(m[1], html.UnescapeString(m[2]))
	}
	return v
}

func contains(t testing.TB, what, body string, wants ...string) {
	t.Helper()
	for _, want := range wants {
		if !strings.Contains(body, want) {
			t.Errorf("%s does not contain %q", what, want)
			if testing.Verbose() {
				t.Log(body)
			}
		}
	}
}
