package gmail_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/gmail"
	"postern/internal/gmail/gmailtest"
	"postern/internal/mail"
)

const ann = "ann@gmail.example"

var app = gmail.App{ID: "123-abc.apps.googleusercontent.com", Secret: "GOCSPX-secret-of-the-client"}

// newFixture returns a stand-in with one account and a service that speaks to it.
func newFixture(t *testing.T) (*gmailtest.Server, *gmail.Service) {
	t.Helper()
	g := gmailtest.Start()
	t.Cleanup(g.Close)
	g.AddClient(gmailtest.Client{ID: app.ID, Secret: string(app.Secret)})
	g.AddAccount(ann)
	s, err := gmail.New(gmail.Config{Transport: &http.Transport{}, Base: g.URL, Backoff: time.Millisecond, MaxWait: 5 * time.Second, PollEvery: 5 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	return g, s
}

func mailbox(g *gmailtest.Server, s *gmail.Service) *gmail.Mailbox {
	return s.Mailbox(gmail.Credential{App: app, Refresh: auth.Secret(g.Grant(app.ID, ann, gmail.Scope))})
}

func letter(subject, more string) []byte {
	return []byte("From: Bob <bob@partner.example>\r\nTo: " + ann + "\r\nSubject: " + subject + "\r\nDate: Mon, 23 Nov 2026 10:00:00 +0000\r\nMessage-ID: <" + strings.ReplaceAll(subject, " ", "") + "@partner.example>\r\n" + more + "\r\nHello " + subject + "\r\n")
}

// reported collects what Changes reports.
func reported(t *testing.T, m *gmail.Mailbox, cursor string, b connector.Bounds) (list []connector.Change, next string) {
	t.Helper()
	next, err := m.Changes(t.Context(), cursor, b, func(c connector.Change) error {
		if !c.Gone && time.Since(c.Received) > time.Minute {
			t.Errorf("message %s was received at %v", c.ID, c.Received)
		}
		c.Received = time.Time{}
		list = append(list, c)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list, next
}

func TestChangesFollowTheMailbox(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	first := g.Deliver(ann, letter("first", ""))
	g.Label(ann, first, []string{"Work/Clients 2026", "STARRED"}, []string{"UNREAD"})
	spam := g.Deliver(ann, letter("spam", ""), "SPAM", "UNREAD")
	trashed := g.Deliver(ann, letter("trashed", ""), "TRASH")
	second := g.Deliver(ann, letter("second", ""))
	m := mailbox(g, s)

	got, cursor := reported(t, m, "", connector.Bounds{})
	want := []connector.Change{
		{ID: second, At: connector.State{Place: connector.Inbox, Labels: []string{"category/personal"}}, Total: 4},
		{ID: trashed, At: connector.State{Place: connector.Trash, Read: true}, Total: 4},
		{ID: first, At: connector.State{Place: connector.Inbox, Read: true, Starred: true, Labels: []string{"category/personal", "work/clients-2026"}}, Total: 4},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("first look (-want +got):\n%s", d)
	}
	if got, _ := reported(t, m, "", connector.Bounds{Most: 1}); len(got) != 1 || got[0].ID != second {
		t.Errorf("the newest alone: got %+v", got)
	}
	if got, _ := reported(t, m, "", connector.Bounds{Since: time.Now().Add(time.Hour)}); len(got) != 0 {
		t.Errorf("since a later time: got %+v, want nothing", got)
	}

	// Nothing, then everything that can happen to a message.
	if got, _ := reported(t, m, cursor, connector.Bounds{}); len(got) != 0 {
		t.Errorf("without a change: got %+v", got)
	}
	third := g.Deliver(ann, letter("third", ""))
	g.Label(ann, second, nil, []string{"INBOX"})
	g.Label(ann, spam, []string{"INBOX"}, []string{"SPAM"})
	g.Delete(ann, first)
	short := g.Deliver(ann, letter("short", ""))
	g.Delete(ann, short)
	if err := m.Wait(t.Context(), cursor); err != nil {
		t.Fatal(err)
	}
	got, cursor = reported(t, m, cursor, connector.Bounds{})
	want = []connector.Change{
		{ID: third, At: connector.State{Place: connector.Inbox, Labels: []string{"category/personal"}}},
		{ID: second, At: connector.State{Place: connector.Archive, Labels: []string{"category/personal"}}},
		{ID: spam, At: connector.State{Place: connector.Inbox}},
		{ID: first, Gone: true},
		{ID: short, Gone: true},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("changes (-want +got):\n%s", d)
	}

	g.ForgetHistory(ann)
	if _, err := m.Changes(t.Context(), cursor, connector.Bounds{}, nil); !errors.Is(err, connector.ErrCursor) {
		t.Errorf("a forgotten history: got %v, want ErrCursor", err)
	}
	if err := m.Wait(t.Context(), cursor); err != nil {
		t.Errorf("waiting on a forgotten history: got %v, want nil", err)
	}
	if _, err := m.Changes(t.Context(), "x' or 1", connector.Bounds{}, nil); !errors.Is(err, connector.ErrCursor) {
		t.Errorf("an invalid cursor: got %v, want ErrCursor", err)
	}
	// What each refuses ends it.
	stop := errors.New("stop")
	if _, err := m.Changes(t.Context(), "", connector.Bounds{}, func(connector.Change) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("a caller that stops: got %v", err)
	}
}

// TestManyChanges goes through pages, of lists and of the history.
func TestManyChanges(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	m := mailbox(g, s)
	_, cursor := reported(t, m, "", connector.Bounds{})
	const n = 130
	for range n {
		g.Deliver(ann, letter("one of many", ""))
	}
	if got, _ := reported(t, m, "", connector.Bounds{}); len(got) != n {
		t.Errorf("listed %d messages, want %d", len(got), n)
	}
	got, next := reported(t, m, cursor, connector.Bounds{})
	if len(got) != n || next != g.History(ann) {
		t.Errorf("the history has %d messages to %s, want %d to %s", len(got), next, n, g.History(ann))
	}
}

func TestFetch(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	m := mailbox(g, s)
	raw := letter("with bytes", "X-Odd: \xff\xfe\r\n")
	id := g.Deliver(ann, raw)
	got, err := m.Fetch(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(string(got.Raw), string(raw)) || got.Thread != id || got.AuthServ != "mx.google.com" || time.Since(got.At) > time.Minute || got.State.Place != connector.Inbox {
		t.Errorf("got %+v", got)
	}
	for _, id := range []string{"0123456789abcdef", "../../settings", "", "a b"} {
		if _, err := m.Fetch(t.Context(), id); !errors.Is(err, connector.ErrGone) {
			t.Errorf("fetch %q: got %v, want ErrGone", id, err)
		}
	}
}

func TestApply(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	m := mailbox(g, s)
	id := g.Deliver(ann, letter("one", ""))
	g.Label(ann, id, []string{"Old Label"}, nil)
	yes, no := true, false
	for _, step := range []struct {
		name string
		mod  connector.Modification
		want []string
	}{
		{"read, starred, labels", connector.Modification{Read: &yes, Starred: &yes, Add: []string{"new/one"}, Remove: []string{"old-label", "unknown"}}, []string{"CATEGORY_PERSONAL", "INBOX", "STARRED", "new/one"}},
		{"archive", connector.Modification{Move: connector.Archive}, []string{"CATEGORY_PERSONAL", "STARRED", "new/one"}},
		{"again", connector.Modification{Move: connector.Archive, Read: &yes}, []string{"CATEGORY_PERSONAL", "STARRED", "new/one"}},
		{"trash, unread", connector.Modification{Move: connector.Trash, Read: &no}, []string{"CATEGORY_PERSONAL", "STARRED", "TRASH", "UNREAD", "new/one"}},
		{"back to the inbox", connector.Modification{Move: connector.Inbox, Starred: &no}, []string{"CATEGORY_PERSONAL", "INBOX", "UNREAD", "new/one"}},
		{"an own label of Gmail's other spelling", connector.Modification{Add: []string{"old-label"}}, []string{"CATEGORY_PERSONAL", "INBOX", "Old Label", "UNREAD", "new/one"}},
	} {
		now, err := m.Apply(t.Context(), id, step.mod)
		if err != nil || now != id {
			t.Fatalf("%s: got %q, %v", step.name, now, err)
		}
		if d := cmp.Diff(step.want, g.LabelsOf(ann, id)); d != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, d)
		}
	}
	g.Delete(ann, id)
	if _, err := m.Apply(t.Context(), id, connector.Modification{Read: &yes}); !errors.Is(err, connector.ErrGone) {
		t.Errorf("a message that is gone: got %v, want ErrGone", err)
	}
}

// TestRates: what Gmail refuses for its rate is repeated, within bounds.
func TestRates(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	m := mailbox(g, s)
	for name, f := range map[string]gmailtest.Fault{
		"429":                         {Status: 429, Reason: "rateLimitExceeded", Times: 3},
		"403":                         {Status: 403, Reason: "userRateLimitExceeded", Message: "User-rate limit exceeded.  Retry after 2020-01-01T00:00:00.000Z", Times: 2},
		"503":                         {Status: 503, Reason: "backendError", Times: 2, RetryAfter: "0"},
		"an answer that is not JSON":  {Status: 502, Raw: "<html>"},
		"a success without an answer": {Status: 200, Raw: "{"},
	} {
		f.Path = "/profile"
		g.Fail(f)
		if p, err := m.Profile(t.Context()); err != nil || p.Address != ann {
			t.Errorf("%s: got %+v, %v", name, p, err)
		}
	}
	for _, tt := range []struct {
		name string
		f    gmailtest.Fault
		min  time.Duration
		max  time.Duration
	}{
		{"Retry-After beyond the wait", gmailtest.Fault{Status: 429, Reason: "rateLimitExceeded", RetryAfter: "3600"}, time.Hour, time.Hour},
		{"a wait of a hundred years", gmailtest.Fault{Status: 429, Reason: "rateLimitExceeded", RetryAfter: "2000000000"}, 24 * time.Hour, 24 * time.Hour},
		{"the day's quota", gmailtest.Fault{Status: 403, Reason: "dailyLimitExceeded"}, time.Hour, time.Hour},
		{"a time in the text", gmailtest.Fault{Status: 429, Reason: "userRateLimitExceeded", Message: "User-rate limit exceeded.  Retry after " + time.Now().Add(10*time.Minute).UTC().Format("2006-01-02T15:04:05.000Z")}, 9 * time.Minute, 10 * time.Minute},
	} {
		tt.f.Path = "/labels"
		g.Fail(tt.f)
		_, err := m.Apply(t.Context(), g.Deliver(ann, letter("x", "")), connector.Modification{})
		var later *connector.RetryError
		if !errors.As(err, &later) || later.After < tt.min || later.After > tt.max {
			t.Errorf("%s: got %v, want a RetryError of %v to %v", tt.name, err, tt.min, tt.max)
		}
	}
}

// TestSignInEnds: each way in which a kept sign-in stops to work needs a person, in words.
func TestSignInEnds(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	m := mailbox(g, s)
	ctx := t.Context()
	if _, err := m.Profile(ctx); err != nil {
		t.Fatal(err)
	}
	g.ExpireTokens()
	if _, err := m.Profile(ctx); err != nil {
		t.Errorf("an access token that expired: got %v, want it renewed", err)
	}
	g.Revoke(ann)
	_, err := m.Profile(ctx)
	if !errors.Is(err, connector.ErrSignIn) || !strings.Contains(err.Error(), "seven days") {
		t.Errorf("revoked at Google: got %v, want ErrSignIn with Testing's seven days", err)
	}
	few := s.Mailbox(gmail.Credential{App: app, Refresh: auth.Secret(g.Grant(app.ID, ann, "openid"))})
	if _, err := few.Profile(ctx); !errors.Is(err, connector.ErrSignIn) || !strings.Contains(err.Error(), "permission") {
		t.Errorf("without the scope: got %v, want ErrSignIn", err)
	}
	m = mailbox(g, s)
	g.Fail(gmailtest.Fault{Path: "/profile", Status: 401, Reason: "authError", Times: 2})
	if _, err := m.Profile(ctx); !errors.Is(err, connector.ErrSignIn) {
		t.Errorf("a fresh token that is refused: got %v, want ErrSignIn", err)
	}
	for code, says := range map[string]string{"invalid_client": "client secret", "admin_policy_enforced": "administrator", "access_denied": "test users", "deleted_client": "deleted"} {
		g.Fail(gmailtest.Fault{Path: "/token", Status: 400, Reason: code, Message: "Bad Request"})
		if _, err := mailbox(g, s).Profile(ctx); !errors.Is(err, gmail.ErrRefused) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: got %v, want words about it", code, err)
		}
	}
	c := gmail.Credential{App: app, Refresh: auth.Secret(g.Grant(app.ID, ann, gmail.Scope))}
	if err := s.Revoke(ctx, c); err != nil || g.Revocations() != 1 {
		t.Errorf("revoke: got %v, %d revocations", err, g.Revocations())
	}
	if err := s.Revoke(ctx, c); err != nil {
		t.Errorf("revoke again: got %v, want nil", err)
	}
}

// TestSettings: what a connection keeps opens the mailbox again, for its own address.
func TestSettings(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	ctx := t.Context()
	set, err := gmail.Credential{App: app, Refresh: auth.Secret(g.Grant(app.ID, ann, gmail.Scope))}.Settings()
	if err != nil {
		t.Fatal(err)
	}
	set, err = s.Prepare(ctx, set)
	if err != nil || set.Address != ann || set.Public["client_id"] != app.ID {
		t.Fatalf("prepare: got %+v, %v", set.Public, err)
	}
	for _, v := range set.Public {
		if strings.Contains(v, string(app.Secret)) {
			t.Error("the client's secret is public")
		}
	}
	p, err := s.Open(ctx, set, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Changes(ctx, "", connector.Bounds{}, func(connector.Change) error { return nil }); err != nil {
		t.Error(err)
	}
	set.Address = "other@gmail.example"
	if _, err := s.Prepare(ctx, set); !errors.Is(err, gmail.ErrRefused) || !strings.Contains(err.Error(), ann) {
		t.Errorf("another account: got %v", err)
	}
	set.Credential = "hunter2"
	if _, err := s.Prepare(ctx, set); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("no credential: got %v", err)
	}
}

// TestHostileServer: what Google's server says is bounded and goes into no path.
func TestHostileServer(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	m := mailbox(g, s)
	ctx := t.Context()
	each := func(connector.Change) error { return nil }
	for _, tt := range []struct{ name, path, raw string }{
		{"an ID that is a path", "/messages", `{"messages":[{"id":"../labels"}]}`},
		{"an invalid address", "/profile", `{"emailAddress":"x\r\ny","historyId":"1"}`},
		{"an invalid history ID", "/profile", `{"emailAddress":"` + ann + `","historyId":"-1"}`},
		{"endless pages", "/messages", `{"nextPageToken":"again"}`},
	} {
		g.Fail(gmailtest.Fault{Path: tt.path, Status: 200, Raw: tt.raw})
		_, err := m.Changes(ctx, "", connector.Bounds{}, func(c connector.Change) error {
			if !c.Gone {
				t.Errorf("%s: reported %+v", tt.name, c)
			}
			return each(c)
		})
		if err != nil && !errors.Is(err, gmail.ErrRefused) {
			t.Errorf("%s: got %v", tt.name, err)
		}
	}
	id := g.Deliver(ann, letter("x", ""))
	for name, raw := range map[string]string{
		"another message": `{"id":"0000000000000000","raw":""}`,
		"no base64":       `{"id":"` + id + `","raw":"$$$"}`,
	} {
		g.Fail(gmailtest.Fault{Path: "/messages/", Status: 200, Raw: raw})
		if _, err := m.Fetch(ctx, id); !errors.Is(err, gmail.ErrRefused) {
			t.Errorf("%s: got %v, want ErrRefused", name, err)
		}
	}
	// A redirect would take the token elsewhere.
	g.Fail(gmailtest.Fault{Path: "/messages/", Status: 302, Raw: ""})
	if _, err := m.Fetch(ctx, id); err == nil {
		t.Error("a redirect was followed")
	}
}

var envelope = mail.Envelope{
	From: ann, To: []string{"bob@partner.example", "cy@partner.example", "secret@partner.example"},
	Raw: []byte("From: Ann <" + ann + ">\r\nTo: \"Roe, Bob\" <bob@partner.example>\r\nCc: cy@Partner.example\r\nSubject: Offer\r\nDate: Mon, 23 Nov 2026 10:00:00 +0000\r\nMessage-ID: <offer@agents.example>\r\n\r\nHello\r\n"),
}

func TestSend(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	g.AddAccount("secret@partner.example")
	m := mailbox(g, s)
	ctx := t.Context()
	all := func(o mail.Outcome) func([]mail.Delivery) bool {
		return func(ds []mail.Delivery) bool {
			return len(ds) == 3 && !slices.ContainsFunc(ds, func(d mail.Delivery) bool { return d.Outcome != o })
		}
	}
	want := "Bcc: secret@partner.example\r\n" + string(envelope.Raw)
	for _, tt := range []struct {
		name  string
		fault *gmailtest.Fault
		want  func([]mail.Delivery) bool
		sent  int
	}{
		{"plainly", nil, all(mail.Accepted), 1},
		{"limited at first", &gmailtest.Fault{Status: 429, Reason: "rateLimitExceeded"}, all(mail.Accepted), 1},
		{"the answer is lost", &gmailtest.Fault{Cut: true}, all(mail.Accepted), 1},
		{"the server fails", &gmailtest.Fault{Status: 503, Reason: "backendError"}, all(mail.Uncertain), 0},
		{"refused", &gmailtest.Fault{Status: 400, Reason: "invalidArgument", Message: "Recipient address required"}, all(mail.Refused), 0},
		{"an answer that is not JSON", &gmailtest.Fault{Status: 200, Raw: "<html>"}, all(mail.Accepted), 0},
	} {
		before := len(g.Sent(ann))
		if tt.fault != nil {
			tt.fault.Path = "/send"
			g.Fail(*tt.fault)
		}
		// Each message has a date of its own, as composed ones do.
		e := envelope
		e.Raw = []byte(strings.Replace(string(e.Raw), "Offer", "Offer "+strings.ReplaceAll(tt.name, " ", ""), 1))
		got, err := m.Send(ctx, e)
		if err != nil || !tt.want(got) {
			t.Errorf("%s: got %+v, %v", tt.name, got, err)
		}
		sent := g.Sent(ann)[before:]
		if len(sent) != tt.sent {
			t.Errorf("%s: %d messages left, want %d", tt.name, len(sent), tt.sent)
		}
		for _, x := range sent {
			if w := strings.Replace(want, "Offer", "Offer "+strings.ReplaceAll(tt.name, " ", ""), 1); string(x.Raw) != w {
				t.Errorf("%s: left as\n%q\nwant\n%q", tt.name, x.Raw, w)
			}
		}
	}
	g.Fail(gmailtest.Fault{Path: "/send", Status: 403, Reason: "dailyLimitExceeded"})
	var later *connector.RetryError
	if _, err := m.Send(ctx, envelope); !errors.As(err, &later) {
		t.Errorf("the day's limit: got %v, want a RetryError", err)
	}
	big := envelope
	big.Raw = append(slices.Clone(envelope.Raw), []byte(strings.Repeat(strings.Repeat("x", 76)+"\r\n", 60_000))...)
	if got, err := m.Send(ctx, big); err != nil || !all(mail.Accepted)(got) {
		t.Errorf("an upload: got %+v, %v", got, err)
	}
	if sent := g.Sent(ann); string(sent[len(sent)-1].Raw) != "Bcc: secret@partner.example\r\n"+string(big.Raw) {
		t.Error("an upload does not leave byte for byte")
	}
	g.Revoke(ann)
	g.ExpireTokens()
	if _, err := m.Send(ctx, envelope); !errors.Is(err, connector.ErrSignIn) {
		t.Errorf("revoked: got %v, want ErrSignIn", err)
	}
}

func TestReplyStaysInItsThread(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	m := mailbox(g, s)
	id := g.Deliver(ann, letter("question", ""))
	for field, thread := range map[string]string{
		"<question@partner.example>": id, "<unknown@partner.example>": "", "<x OR in:anywhere@partner.example>": "",
	} {
		e := mail.Envelope{From: ann, To: []string{"bob@partner.example"}, Raw: []byte("From: " + ann + "\r\nTo: bob@partner.example\r\nSubject: Re: question\r\nIn-Reply-To: " + field + "\r\nMessage-ID: <a@b.example>\r\n\r\nYes\r\n")}
		got, err := m.Send(t.Context(), e)
		if err != nil || got[0].Outcome != mail.Accepted {
			t.Fatalf("%s: got %+v, %v", field, got, err)
		}
		sent := g.Sent(ann)
		if last := sent[len(sent)-1]; thread != "" && last.Thread != thread || thread == "" && last.Thread == id {
			t.Errorf("%s: it is in thread %s, want %q", field, last.Thread, thread)
		}
	}
}

func TestWaitEnds(t *testing.T) {
	t.Parallel()
	g, s := newFixture(t)
	m := mailbox(g, s)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Wait(ctx, g.History(ann)) }()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want Canceled", err)
	}
}
