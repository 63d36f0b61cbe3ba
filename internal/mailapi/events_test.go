package mailapi

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// patience bounds every wait for something that must happen.
const patience = time.Minute

func (f *fixture) receive(t *testing.T, b directory.Inbox, subject string) {
	t.Helper()
	raw := "From: Bob <bob@example.com>\r\nTo: " + b.Address + "\r\nSubject: " + subject + "\r\nMessage-ID: <" + subject + "@example.com>\r\n\r\nHello\r\n"
	err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1"})
	if err != nil {
		t.Error(err)
	}
}

type waited struct {
	After    string
	Messages []struct{ ID, Subject string }
	Events   []struct {
		ID, Type, Inbox string
		Data            map[string]string
	}
}

func (f *fixture) wait(t *testing.T, who, path string) (out waited) {
	t.Helper()
	got := f.do(t, who, "GET", path, "")
	if err := json.Unmarshal([]byte(got.body), &out); err != nil || got.code != 200 {
		t.Fatalf("%s: %d %s", path, got.code, got.body)
	}
	return out
}

func (w waited) subjects() string {
	var s []string
	for _, m := range w.Messages {
		s = append(s, m.Subject)
	}
	return strings.Join(s, " ")
}

func (w waited) types() string {
	var s []string
	for _, e := range w.Events {
		s = append(s, e.Type)
	}
	return strings.Join(s, " ")
}

func TestEvents(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		path := "/v1/inboxes/" + f.a.ID + "/events"
		f.receive(t, f.a, "one")
		f.receive(t, f.b, "other")
		act := f.do(t, "key a", "POST", "/v1/inboxes/"+f.a.ID+"/messages", draft).field(t, "id")
		shown := f.do(t, "person", "GET", "/v1/actions/"+act, "")
		f.do(t, "person", "POST", "/v1/actions/"+act+"/decision", fmt.Sprintf(`{"version":1,"digest":%q,"approve":true}`, shown.field(t, "digest")))
		if ran, err := f.gate.RunOne(t.Context()); !ran || err != nil {
			t.Fatal(ran, err)
		}
		all := f.wait(t, "key a", path)
		for _, want := range []string{"inbox.created message.received oversight.pending oversight.approved", "message.sent"} {
			if !strings.Contains(all.types(), want) {
				t.Errorf("got %s, want %s", all.types(), want)
			}
		}
		for _, e := range all.Events {
			if e.Inbox != f.a.ID || strings.HasPrefix(e.Type, "oversight.") && e.Data["action"] != act {
				t.Errorf("event %+v", e)
			}
		}
		got := f.do(t, "key a", "GET", path, "")
		for _, secret := range []string{"bob", "one", "example"} {
			if strings.Contains(got.body, secret) {
				t.Errorf("events tell %q: %s", secret, got.body)
			}
		}
		// From any place on, and by pages.
		if rest := f.wait(t, "key a", path+"?after="+all.Events[1].ID); rest.types() != strings.TrimPrefix(all.types(), "inbox.created message.received ") {
			t.Errorf("after the second = %s", rest.types())
		}
		if rest := f.wait(t, "key a", path+"?after="+act); !strings.HasPrefix(rest.types(), "oversight.approved") {
			t.Errorf("after the action's first = %s", rest.types())
		}
		var paged []string
		for after := ""; ; {
			p := f.wait(t, "key a", path+"?limit=2&after="+after)
			if len(p.Events) == 0 {
				break
			}
			paged, after = append(paged, p.types()), p.After
		}
		if strings.Join(paged, " ") != all.types() {
			t.Errorf("pages = %s, want %s", paged, all.types())
		}
		if none := f.wait(t, "key a", path+"?timeout=0&after="+all.After); len(none.Events) != 0 || none.After != all.After {
			t.Errorf("after the last = %+v", none)
		}
		for _, bad := range []string{"?after=x", "?after=-1", "?after=evt_AAAAAAAAAAAAAA", "?after=%00", "?limit=101", "?timeout=61", "?timeout=-1"} {
			if got := f.do(t, "key a", "GET", path+bad, ""); got.code != 400 {
				t.Errorf("%s = %d %s", bad, got.code, got.body)
			}
		}
		// Another inbox's event is none of this one's.
		theirs := f.wait(t, "key b", "/v1/inboxes/"+f.b.ID+"/events")
		if got := f.do(t, "key a", "GET", path+"?after="+theirs.Events[0].ID, ""); got.code != 400 {
			t.Errorf("after another inbox's event = %d %s", got.code, got.body)
		}
	})
}

func TestWaitForMessages(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		path := "/v1/inboxes/" + f.a.ID + "/messages/wait"
		f.receive(t, f.a, "old")
		first := f.wait(t, "key a", path+"?timeout=0")
		if len(first.Messages) != 0 {
			t.Fatalf("what was there already = %+v", first)
		}
		// Between two requests nothing is missed.
		f.receive(t, f.a, "one")
		f.receive(t, f.b, "other")
		f.receive(t, f.a, "two")
		got := f.wait(t, "key a", path+"?timeout=60&after="+first.After)
		if got.subjects() != "one two" {
			t.Fatalf("got %s, want one two", got.subjects())
		}
		if again := f.wait(t, "key a", path+"?timeout=60&after="+got.Messages[0].ID); again.subjects() != "two" {
			t.Errorf("after a message = %s", again.subjects())
		}
		// Who waits is answered when it arrives, long before the time is over.
		answers := make(chan waited, 1)
		go func() { answers <- f.wait(t, "key a", path+"?timeout=60&after="+got.After) }()
		f.receive(t, f.b, "other again")
		f.receive(t, f.a, "three")
		select {
		case w := <-answers:
			if w.subjects() != "three" {
				t.Errorf("got %s, want three", w.subjects())
			}
		case <-time.After(patience):
			t.Fatal("the waiting was not answered")
		}
	})
}

// TestWaitEndsWithTheKey: who waits with a key that is revoked meanwhile is not
// told what comes after.
func TestWaitEndsWithTheKey(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	for _, path := range []string{"/messages/wait?timeout=60", "/events?timeout=60&after=" + f.wait(t, "key b", "/v1/inboxes/"+f.b.ID+"/events").After} {
		t.Run(path, func(t *testing.T) {
			inbox, who := f.a, "key a"
			if strings.HasPrefix(path, "/events") {
				inbox, who = f.b, "key b"
			}
			answers := make(chan answered, 1)
			go func() { answers <- f.do(t, who, "GET", "/v1/inboxes/"+inbox.ID+path, "") }()
			f.untilWaiting(t, 1)
			f.revoke(t, who)
			f.receive(t, inbox, "late")
			select {
			case got := <-answers:
				if got.code < 400 || strings.Contains(got.body, "late") {
					t.Errorf("got %d %s", got.code, got.body)
				}
			case <-time.After(patience):
				t.Fatal("it waits still")
			}
		})
	}
}

// untilWaiting waits until n wait for events.
func (f *fixture) untilWaiting(t *testing.T, n int) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		f.srv.crowd.mu.Lock()
		all := f.srv.crowd.all
		f.srv.crowd.mu.Unlock()
		if all == n {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d wait, want %d", all, n)
		}
	}
}

func (f *fixture) revoke(t *testing.T, who string) {
	t.Helper()
	p, err := auth.CheckKey(t.Context(), f.db, f.key(who))
	if err != nil {
		t.Fatal(err)
	}
	if err := f.db.Update(t.Context(), func(tx *store.Tx) error { return auth.Revoke(t.Context(), tx, p.ID) }); err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) key(who string) auth.Secret {
	return auth.Secret(strings.TrimPrefix(f.clients[who].header.Get("Authorization"), "Bearer "))
}

// TestCrowd: one inbox's waiting keeps nobody else from it, and its end makes
// room again.
func TestCrowd(t *testing.T) {
	c := crowd{by: map[string]int{}}
	var leaves []func()
	for range maxEach {
		leave, err := c.enter("a", maxEach)
		if err != nil {
			t.Fatal(err)
		}
		leaves = append(leaves, leave)
	}
	if _, err := c.enter("a", maxEach); err == nil {
		t.Error("one more was let in")
	}
	other, err := c.enter("b", maxEach)
	if err != nil {
		t.Fatal(err)
	}
	other()
	for _, leave := range leaves {
		leave()
		leave() // twice does nothing
	}
	if c.all != 0 || len(c.by) != 0 {
		t.Errorf("left are %d %v", c.all, c.by)
	}
	// A socket's end makes room, too: a key's, and a grant's, which counts twice.
	for _, who := range []auth.Principal{{Kind: auth.Agent, ID: "crd_a", Inbox: "ibx_A"}, {Kind: auth.Grant, ID: "crd_g"}} {
		for range maxEach + 1 {
			leave, err := c.enterSocket(caller{Principal: who})
			if err != nil {
				t.Fatalf("%s is not let in again: %v", who, err)
			}
			leave()
			leave()
		}
	}
	if c.all != 0 || c.granted != 0 || len(c.by) != 0 {
		t.Errorf("left of sockets are %d, %d of grants, %v", c.all, c.granted, c.by)
	}
}

// A socketClient is the other end of a WebSocket.
type socketClient struct {
	*websocket.Conn
	t *testing.T
}

func (f *fixture) dial(t *testing.T, url, who string, header ...string) (*socketClient, *http.Response, error) {
	t.Helper()
	h := http.Header{}
	if who != "" {
		h = f.clients[who].header.Clone()
	}
	for i := 0; i < len(header); i += 2 {
		h.Set(header[i], header[i+1])
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, resp, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(url, "http"), &websocket.DialOptions{HTTPHeader: h})
	if err != nil {
		return nil, resp, err
	}
	t.Cleanup(func() { _ = c.CloseNow() })
	return &socketClient{c, t}, resp, nil
}

func (c *socketClient) say(s string) {
	c.t.Helper()
	if err := c.Write(c.t.Context(), websocket.MessageText, []byte(s)); err != nil {
		c.t.Fatal(err)
	}
}

// hear returns the next message, or the error that ended the connection.
func (c *socketClient) hear() (m map[string]any, err error) {
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	_, b, err := c.Read(ctx)
	if err != nil {
		return nil, err
	}
	return m, json.Unmarshal(b, &m)
}

func (c *socketClient) want(typ string) map[string]any {
	c.t.Helper()
	m, err := c.hear()
	if err != nil || m["type"] != typ {
		c.t.Fatalf("got %v, %v, want %s", m, err, typ)
	}
	return m
}

func TestSocket(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		srv := httptest.NewServer(f.srv.Handler())
		t.Cleanup(srv.Close)
		url := srv.URL + "/v1/inboxes/" + f.a.ID + "/ws"
		byHeader, _, err := f.dial(t, url, "key a")
		if err != nil {
			t.Fatal(err)
		}
		byMessage, _, err := f.dial(t, url, "")
		if err != nil {
			t.Fatal(err)
		}
		byMessage.say(fmt.Sprintf(`{"type":"auth","key":%q}`, f.key("key a").Reveal()))
		ready := byHeader.want("ready")
		byMessage.want("ready")
		if ready["inbox"] != f.a.ID {
			t.Errorf("ready = %v", ready)
		}
		f.receive(t, f.b, "other")
		f.receive(t, f.a, "one")
		for _, c := range []*socketClient{byHeader, byMessage} {
			e := c.want("event")["event"].(map[string]any)
			if e["type"] != "message.received" || e["inbox"] != f.a.ID {
				t.Errorf("event = %v", e)
			}
		}
		byHeader.say(`{"type":"ping"}`)
		byHeader.want("pong")
		byHeader.say(`{"type":"dance"}`)
		byHeader.want("error")
		// Who was away goes on where it was, and misses nothing.
		f.receive(t, f.a, "two")
		again, _, err := f.dial(t, url+"?after="+ready["after"].(string), "key a")
		if err != nil {
			t.Fatal(err)
		}
		again.want("ready")
		again.want("event")
		again.want("event")
		// A key that is revoked hears of nothing any more.
		byHeader.want("event")
		f.revoke(t, "key a")
		f.receive(t, f.a, "late")
		if m := byHeader.want("error"); m["code"] != "unauthorized" {
			t.Errorf("after revoking = %v", m)
		}
		if _, err := byHeader.hear(); websocket.CloseStatus(err) != websocket.StatusPolicyViolation {
			t.Errorf("after revoking: %v", err)
		}
	})
}

// TestSocketEndsWithTheToken: a connected app hears of nothing after the end of its
// token, although its key is still valid.
func TestSocketEndsWithTheToken(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	_, token := f.connect(t, seal.Read)
	f.byKey("app", auth.Secret(token))
	srv := httptest.NewServer(f.srv.Handler())
	defer srv.Close()
	s, _, err := f.dial(t, srv.URL+"/v1/inboxes/"+f.a.ID+"/ws", "app")
	if err != nil {
		t.Fatal(err)
	}
	s.want("ready")
	f.exec(t, `update oauth_token set expires_at = 1`)
	f.receive(t, f.a, "late")
	if m := s.want("error"); m["code"] != "unauthorized" {
		t.Errorf("after the end = %v", m)
	}
}

// TestSocketAttacks: who should not be heard is not, and who does not listen
// is cut off.
func TestSocketAttacks(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	srv := httptest.NewServer(f.srv.Handler())
	t.Cleanup(srv.Close)
	url := srv.URL + "/v1/inboxes/" + f.a.ID + "/ws"
	for _, tt := range []struct {
		name, url, who string
		header         []string
		want           int
	}{
		{"another inbox's key", url, "key b", nil, 403},
		{"a project key", url, "project", nil, 403},
		{"another project's key", url, "foreign key", nil, 403},
		{"no key that there is", url, "", []string{"Authorization", "Bearer pib_AAAAAAAAAAAAAAAAAAAAAAAAAA"}, 401},
		{"a page of another origin, with a key", url, "key a", []string{"Origin", "https://evil.example"}, 403},
		{"a page of another origin, without", url, "", []string{"Origin", "https://evil.example"}, 403},
		{"no origin", url, "", []string{"Origin", "null"}, 403},
		{"an inbox that is not there", srv.URL + "/v1/inboxes/ibx_AAAAAAAAAAAAAAAAAAAAAAAAAA/ws", "key a", nil, 403},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, resp, err := f.dial(t, tt.url, tt.who, tt.header...)
			if err == nil || resp == nil || resp.StatusCode != tt.want {
				t.Errorf("got %v, %v, want %d", resp, err, tt.want)
			}
		})
	}
	if got := f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.ID+"/ws", ""); got.code != 426 {
		t.Errorf("without upgrade = %+v", got)
	}
	for _, tt := range []struct{ name, say string }{
		{"another inbox's key", fmt.Sprintf(`{"type":"auth","key":%q}`, f.key("key b").Reveal())},
		{"no key", `{"type":"auth"}`},
		{"not auth", `{"type":"ping"}`},
		{"not JSON", `hello`},
		{"too long", `{"type":"auth","key":"` + strings.Repeat("x", maxCommand) + `"}`},
		{"after nonsense", fmt.Sprintf(`{"type":"auth","key":%q,"after":"nonsense"}`, f.key("key a").Reveal())},
	} {
		t.Run("first message: "+tt.name, func(t *testing.T) {
			c, _, err := f.dial(t, url, "")
			if err != nil {
				t.Fatal(err)
			}
			c.say(tt.say)
			for {
				m, err := c.hear()
				if err != nil {
					if ok := []websocket.StatusCode{websocket.StatusPolicyViolation, websocket.StatusUnsupportedData, websocket.StatusMessageTooBig}; !slices.Contains(ok, websocket.CloseStatus(err)) {
						t.Errorf("it ended with %v", err)
					}
					return
				}
				if m["type"] != "error" {
					t.Fatalf("it was told %v", m)
				}
			}
		})
	}
	t.Run("too many", func(t *testing.T) {
		f.untilWaiting(t, 0)
		for range maxEach {
			c, _, err := f.dial(t, url, "key a")
			if err != nil {
				t.Fatal(err)
			}
			c.want("ready")
		}
		if _, resp, err := f.dial(t, url, "key a"); err == nil || resp.StatusCode != 429 {
			t.Errorf("one more: %v, %v, want 429", resp, err)
		}
		other, _, err := f.dial(t, srv.URL+"/v1/inboxes/"+f.b.ID+"/ws", "key b")
		if err != nil {
			t.Fatalf("another inbox: %v", err)
		}
		other.want("ready")
	})
}

// TestCloseEndsWaiting: a server that stops does not wait for who waits.
func TestCloseEndsWaiting(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	srv := httptest.NewServer(f.srv.Handler())
	t.Cleanup(srv.Close)
	c, _, err := f.dial(t, srv.URL+"/v1/inboxes/"+f.a.ID+"/ws", "key a")
	if err != nil {
		t.Fatal(err)
	}
	c.want("ready")
	var wg sync.WaitGroup
	for _, path := range []string{"/messages/wait?timeout=60", "/events?timeout=60&after=" + f.wait(t, "key a", "/v1/inboxes/"+f.a.ID+"/events").After} {
		wg.Go(func() {
			if got := f.do(t, "key a", "GET", "/v1/inboxes/"+f.a.ID+path, ""); got.code != 200 {
				t.Errorf("got %+v", got)
			}
		})
	}
	f.untilWaiting(t, 3)
	f.srv.Close()
	wg.Wait()
	if _, err := c.hear(); websocket.CloseStatus(err) != websocket.StatusGoingAway {
		t.Errorf("the socket ended with %v", err)
	}
}

// TestAnotherProcess: who waits here is told soon of what another process on
// the same database received.
func TestAnotherProcess(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		go func() { _ = f.post.Events().Run(t.Context()) }()
		blobs, err := store.OpenBlobs(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		log := slog.New(slog.NewTextHandler(t.Output(), nil))
		there := mailbox.New(log, db, oversight.NewGate(log, db, oversighttest.Rules(nil)), mailbox.Config{Blobs: blobs, Domain: "agents.test"})
		path := "/v1/inboxes/" + f.a.ID + "/events?timeout=60&after=" + f.wait(t, "key a", "/v1/inboxes/"+f.a.ID+"/events").After
		answers := make(chan waited, 1)
		go func() { answers <- f.wait(t, "key a", path) }()
		f.untilWaiting(t, 1)
		raw := "From: bob@example.com\r\nTo: " + f.a.Address + "\r\nSubject: there\r\n\r\nHello\r\n"
		err = there.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{f.a.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1"})
		if err != nil {
			t.Fatal(err)
		}
		select {
		case got := <-answers:
			if got.types() != "message.received" {
				t.Errorf("got %s", got.types())
			}
		case <-time.After(patience):
			t.Fatal("it waits still")
		}
	})
}
