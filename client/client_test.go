package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/client"
	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/mail"
	"postern/internal/mailapi"
	"postern/internal/mailauth/dnstest"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/people"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/webhook"
)

// A server is the real API over HTTP, for keys, and over a socket, for its
// operator.
type server struct {
	post    *mailbox.PostOffice
	gate    *oversight.Gate
	url     string
	project *client.Client // with the project's key
	person  *client.Client // over the local socket
}

// accepted delivers everything.
type accepted struct{}

func (accepted) Deliver(_ context.Context, e mail.Envelope) (ds []mail.Delivery, err error) {
	for _, to := range e.To {
		ds = append(ds, mail.Delivery{Recipient: to, Outcome: mail.Accepted})
	}
	return ds, nil
}

func start(t *testing.T) *server {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	db := storetest.SQLite(t)
	blobs, err := store.OpenBlobs(t.TempDir())
	must(t, err)
	s := &server{gate: oversight.NewGate(log, db, oversighttest.Rules(nil))}
	s.post = mailbox.New(log, db, s.gate, mailbox.Config{Blobs: blobs, Transport: accepted{}, Domain: "agents.test"})
	domains, err := domain.New(log, db, domain.Config{Domain: "agents.test", Host: "agents.test", Resolver: dnstest.Start(t).Resolver()})
	must(t, err)
	hooks, err := webhook.New(log, db, s.gate, webhook.Config{Key: make([]byte, 32), Private: true})
	must(t, err)
	persons, err := people.New(db, people.Config{Key: make([]byte, 32)})
	must(t, err)
	book := rulebook.New(log, db)
	s.gate.Handle(policy.KindChange, book)
	var id string
	var key auth.Secret
	must(t, db.Update(t.Context(), func(tx *store.Tx) (err error) {
		id, key, err = auth.NewProject(t.Context(), tx, "one")
		return err
	}))
	api := mailapi.New(log, db, s.gate, s.post, mailapi.Config{Domains: domains, Webhooks: hooks, People: persons, Book: book})
	outside := httptest.NewServer(api.Handler())
	t.Cleanup(outside.Close)
	s.url = outside.URL
	s.project, err = client.New(s.url, key.Reveal())
	must(t, err)

	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	must(t, err)
	local := &httptest.Server{Listener: l, Config: &http.Server{Handler: api.HandlerFor(func(*http.Request) (auth.Principal, error) {
		return auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: id}, nil
	})}}
	local.Start()
	t.Cleanup(local.Close)
	s.person, err = client.New("unix:"+socket, "")
	must(t, err)
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// inbox makes an inbox, and a client with its key.
func (s *server) inbox(t *testing.T, name string) (client.Inbox, *client.Client) {
	t.Helper()
	b, err := s.project.Inboxes.Create(t.Context(), client.NewInbox{Address: name})
	must(t, err)
	c, err := client.New(s.url, b.Key)
	must(t, err)
	return b, c
}

func (s *server) receive(t *testing.T, b client.Inbox, subject string) {
	t.Helper()
	raw := fmt.Sprintf("From: Bob <bob@example.com>\r\nTo: %s\r\nSubject: %s\r\nMessage-ID: <%s@example.com>\r\n\r\nHello\r\n", b.Address, subject, subject)
	must(t, s.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1"}))
}

// TestASendIsApprovedAndDelivered goes the whole way: an agent proposes, may not
// approve itself, a person approves what was shown, and it is delivered.
func TestASendIsApprovedAndDelivered(t *testing.T) {
	ctx := t.Context()
	s := start(t)
	b, agent := s.inbox(t, "alice")
	p, err := agent.Messages.Send(ctx, b.ID, client.NewMessage{
		To: []string{"bob@example.com"}, Subject: "Report", Text: "Here.", Attachments: []client.NewAttachment{client.Attach("a.txt", "text/plain", []byte("figures"))},
	})
	if err != nil || p.Status != client.StatusPending {
		t.Fatalf("send: %+v, %v", p, err)
	}
	mine, err := agent.Actions.Get(ctx, p.ID)
	if err != nil || mine.State != client.StatePending || mine.Review != nil {
		t.Fatalf("the agent sees %+v, %v", mine, err)
	}
	if _, err := agent.Actions.Approve(ctx, mine, ""); err == nil {
		t.Error("an agent decides without having been shown a version")
	}
	yes := true
	if _, err := agent.Actions.Decide(ctx, p.ID, client.Decision{Version: p.Version, Digest: p.Digest, Approve: &yes}); !errors.Is(err, client.ErrForbidden) {
		t.Errorf("an agent decides: %v", err)
	}

	waiting, err := s.person.Actions.List(ctx, 0, client.StatePending)
	if err != nil || len(waiting) != 1 || waiting[0].ID != p.ID {
		t.Fatalf("waiting: %+v, %v", waiting, err)
	}
	shown, err := s.person.Actions.Get(ctx, p.ID)
	if err != nil || shown.View == nil || shown.View.Text != "Here." || len(shown.View.Files) != 1 || shown.Digest != p.Digest {
		t.Fatalf("shown: %+v, %v", shown, err)
	}
	file, err := s.person.Actions.File(ctx, p.ID, 0)
	must(t, err)
	if got, err := io.ReadAll(file); err != nil || string(got) != "figures" {
		t.Errorf("file %q, %v", got, err)
	}
	must(t, file.Close())
	if _, err := s.person.Actions.Comment(ctx, p.ID, client.NewComment{Text: "fine", ToAgent: true}); err != nil {
		t.Error(err)
	}
	if _, err := s.person.Actions.Approve(ctx, shown, "fine"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.person.Actions.Approve(ctx, shown, "again"); !errors.Is(err, client.ErrStale) {
		t.Errorf("the second approval: %v", err)
	}
	go func() { _, _ = s.gate.RunOne(ctx) }()
	done, err := agent.Actions.Wait(ctx, p.ID)
	if err != nil || done.State != client.StateDone {
		t.Fatalf("done: %+v, %v", done, err)
	}
	ds, err := agent.Actions.Deliveries(ctx, p.ID)
	if err != nil || len(ds) != 1 || ds[0].State != client.DeliveryDelivered || ds[0].Recipient != "bob@example.com" {
		t.Errorf("deliveries %+v, %v", ds, err)
	}
	said, err := agent.Actions.Comments(ctx, p.ID)
	if err != nil || len(said) != 1 || said[0].Text != "fine" {
		t.Errorf("comments %+v, %v", said, err)
	}
	var verbs []string
	for e, err := range s.person.Audit.List(ctx, client.AuditQuery{Object: p.ID, Limit: 1}) {
		must(t, err)
		verbs = append(verbs, e.Verb)
	}
	if len(verbs) < 3 || !strings.HasPrefix(verbs[len(verbs)-1], "action.") {
		t.Errorf("the audit log has %v", verbs)
	}
}

// TestOneKeyProposesOnce: the same key and content is one proposal, and the same
// key with other content is refused.
func TestOneKeyProposesOnce(t *testing.T) {
	ctx := t.Context()
	s := start(t)
	b, agent := s.inbox(t, "alice")
	m := client.NewMessage{To: []string{"bob@example.com"}, Subject: "Report", Text: "Here.", IdempotencyKey: "k1"}
	first, err := agent.Messages.Send(ctx, b.ID, m)
	must(t, err)
	again, err := agent.Messages.Send(ctx, b.ID, m)
	if err != nil || again.ID != first.ID {
		t.Errorf("again: %+v, %v", again, err)
	}
	m.Subject = "Other"
	if _, err := agent.Messages.Send(ctx, b.ID, m); !errors.Is(err, client.ErrIdempotencyKey) {
		t.Errorf("other content: %v", err)
	}
	m.IdempotencyKey, m.Subject = "", "Report"
	_, err = agent.Messages.Send(ctx, b.ID, m)
	var e *client.Error
	if !errors.Is(err, client.ErrDuplicate) || !errors.As(err, &e) || e.Action != first.ID {
		t.Errorf("a duplicate: %v", err)
	}
	m.To = []string{"bob"}
	if _, err := agent.Messages.Send(ctx, b.ID, m); !errors.Is(err, client.ErrInvalid) || !errors.As(err, &e) || e.Field() != "to[0]" && e.Field() != "to" || e.RequestID == "" {
		t.Errorf("a wrong recipient: %#v", err)
	}
}

// TestListsGoOverAllPages: an iterator fetches page after page, and stops when
// the loop does.
func TestListsGoOverAllPages(t *testing.T) {
	ctx := t.Context()
	s := start(t)
	b, agent := s.inbox(t, "alice")
	for i := range 5 {
		s.receive(t, b, fmt.Sprintf("n%d", i))
	}
	var got []string
	for m, err := range agent.Messages.List(ctx, b.ID, client.MessageQuery{PageQuery: client.PageQuery{Limit: 2}}) {
		must(t, err)
		got = append(got, m.Subject)
	}
	if strings.Join(got, " ") != "n4 n3 n2 n1 n0" {
		t.Errorf("got %v", got)
	}
	for m, err := range agent.Messages.List(ctx, b.ID, client.MessageQuery{}) {
		must(t, err)
		full, err := agent.Messages.Get(ctx, b.ID, m.ID)
		if err != nil || full.Text != "Hello\n" && full.Text != "Hello\r\n" && full.Text != "Hello" || !strings.Contains(full.Fenced, "Hello") {
			t.Errorf("message %+v, %v", full, err)
		}
		if _, err := agent.Labels.Change(ctx, b.ID, client.LabelChange{IDs: []string{m.ID}, Add: []string{"todo"}}); err != nil {
			t.Error(err)
		}
		break
	}
	found := 0
	for _, err := range agent.Messages.Search(ctx, b.ID, "label:todo") {
		must(t, err)
		found++
	}
	if found != 1 {
		t.Errorf("found %d", found)
	}
	_, foreign := s.inbox(t, "bella")
	for _, err := range foreign.Messages.List(ctx, b.ID, client.MessageQuery{}) {
		if !errors.Is(err, client.ErrForbidden) {
			t.Errorf("another inbox's key: %v", err)
		}
	}
	if own, err := foreign.Inboxes.Own(ctx); err != nil || own.Address != "bella@agents.test" {
		t.Errorf("own: %+v, %v", own, err)
	}
}

// TestWaitingHearsWhatArrives: mail that arrives between taking a position and
// waiting is not missed, and a stream goes on after the event that was seen.
func TestWaitingHearsWhatArrives(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s := start(t)
	b, agent := s.inbox(t, "alice")
	now, err := agent.Messages.Position(ctx, b.ID)
	must(t, err)
	s.receive(t, b, "early")
	a, err := agent.Messages.Wait(ctx, b.ID, now)
	if err != nil || len(a.Messages) != 1 || a.Messages[0].Subject != "early" {
		t.Fatalf("wait: %+v, %v", a, err)
	}
	go func() {
		time.Sleep(50 * time.Millisecond)
		_ = s.post.Receive(ctx, mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte("Subject: late\r\n\r\nx\r\n")}, Remote: "192.0.2.1"})
	}()
	if a, err = agent.Messages.Wait(ctx, b.ID, a.After); err != nil || len(a.Messages) != 1 || a.Messages[0].Subject != "late" {
		t.Fatalf("wait: %+v, %v", a, err)
	}
	var last string
	seen := 0
	for e, err := range agent.Events.Stream(ctx, b.ID, now) {
		must(t, err)
		if e.Type == client.EventMessageReceived {
			last = e.ID
			break
		}
	}
	for e, err := range agent.Events.Stream(ctx, b.ID, last) {
		must(t, err)
		if e.ID == last {
			t.Error("the event that was seen came again")
		}
		if e.Type == client.EventMessageReceived {
			seen++
			break
		}
	}
	if seen != 1 {
		t.Errorf("the stream has %d more messages", seen)
	}
	stopped, stop := context.WithCancel(ctx)
	stop()
	for _, err := range agent.Events.Stream(stopped, b.ID, "") {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("a stream of a cancelled context: %v", err)
		}
	}
}

// TestManagersRunTheHouse does what keys of projects and people do.
func TestManagersRunTheHouse(t *testing.T) {
	ctx := t.Context()
	s := start(t)
	b, agent := s.inbox(t, "alice")
	end := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	changed, err := s.project.Inboxes.Update(ctx, b.ID, client.InboxChange{DisplayName: new("Alice"), ExpiresAt: client.ExpireAt(end)})
	if err != nil || changed.DisplayName != "Alice" || changed.ExpiresAt == nil || !changed.ExpiresAt.Equal(end) {
		t.Errorf("update: %+v, %v", changed, err)
	}
	if changed, err = s.project.Inboxes.Update(ctx, b.ID, client.InboxChange{ExpiresAt: client.NeverExpire()}); err != nil || changed.ExpiresAt != nil {
		t.Errorf("never: %+v, %v", changed, err)
	}
	if _, err := s.person.Inboxes.Allow(ctx, b.Address, client.NewAllowEntry{Pattern: "*@example.com"}); err != nil {
		t.Error(err)
	}
	if l, err := agent.Inboxes.AllowList(ctx, b.ID); err != nil || len(l) != 1 || l[0].Pattern != "*@example.com" {
		t.Errorf("allow list %+v, %v", l, err)
	}
	k, err := agent.Keys.Create(ctx, b.ID, client.NewKey{Name: "reader", Scope: client.ScopeRead})
	if err != nil || k.Key == "" {
		t.Fatalf("key %+v, %v", k, err)
	}
	reader, err := client.New(s.url, k.Key)
	must(t, err)
	if _, err := reader.Messages.Send(ctx, b.ID, client.NewMessage{To: []string{"bob@example.com"}, Text: "x"}); !errors.Is(err, client.ErrForbidden) {
		t.Errorf("a key that reads sends: %v", err)
	}
	must(t, agent.Keys.Revoke(ctx, b.ID, k.ID, false))
	if _, err := reader.Messages.Page(ctx, b.ID, client.MessageQuery{}); !errors.Is(err, client.ErrUnauthorized) {
		t.Errorf("a revoked key: %v", err)
	}
	if _, err := s.project.Inboxes.Create(ctx, client.NewInbox{Address: "alice"}); !errors.Is(err, client.ErrTaken) {
		t.Errorf("a taken address: %v", err)
	}
	sw, err := s.person.Switches.TurnOn(ctx, client.NewSwitch{Scope: client.SwitchInbox, Target: b.ID, Reason: "look"})
	must(t, err)
	must(t, s.person.Switches.TurnOff(ctx, sw.ID))
	pol, err := s.person.Policy.Get(ctx)
	if err != nil || pol.PolicyText == nil {
		t.Errorf("policy %+v, %v", pol, err)
	}
	v, err := s.person.Policy.Evaluate(ctx, client.Evaluation{Request: &client.PolicyRequest{Kind: "email.send", To: []string{"bob@example.com"}}})
	if err != nil || v.Verdict == nil || v.Verdict.Effect != client.Ask {
		t.Errorf("evaluation %+v, %v", v, err)
	}
	must(t, s.person.Suppressed.Add(ctx, "eve@example.com"))
	if sup, err := s.person.Suppressed.Get(ctx, "eve@example.com"); err != nil || sup.Reason == "" {
		t.Errorf("suppressed %+v, %v", sup, err)
	}
	if _, err := s.person.Suppressed.Get(ctx, "bob@example.com"); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("not suppressed: %v", err)
	}
	if ps, err := s.person.People.List(ctx); err != nil || len(ps) != 0 {
		t.Errorf("people %+v, %v", ps, err)
	}
	var out map[string]any
	if err := s.person.Call(ctx, "GET", "/v1/actions?limit=1", nil, &out); err != nil || out["actions"] == nil {
		t.Errorf("call: %v, %v", out, err)
	}
	gone, err := s.project.Inboxes.Delete(ctx, b.ID)
	if err != nil || gone.DeletedAt == nil {
		t.Errorf("delete: %+v, %v", gone, err)
	}
	if back, err := s.project.Inboxes.Restore(ctx, b.ID); err != nil || back.DeletedAt != nil {
		t.Errorf("restore: %+v, %v", back, err)
	}
}
