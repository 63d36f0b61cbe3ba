package notify_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"postern/internal/auth"
	"postern/internal/notify"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A workflow is a stand-in for a workflow of Teams: it takes what the schema of
// Adaptive Cards 1.5 allows, and nothing else. It is no real Teams.
type workflow struct {
	t   *testing.T
	url string

	mu    sync.Mutex
	cards []map[string]any
	fail  func(http.ResponseWriter)
}

func newWorkflow(t *testing.T) *workflow {
	f := &workflow{t: t}
	srv := httptest.NewServer(f)
	t.Cleanup(srv.Close)
	f.url = srv.URL + "/workflows/abc?sig=the-signature"
	return f
}

func (f *workflow) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.URL.Query().Get("sig") != "the-signature" {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if f.fail != nil {
		f.fail(w)
		return
	}
	var in struct {
		Type        string
		Attachments []struct {
			ContentType string
			Content     map[string]any
		}
	}
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil || in.Type != "message" || len(in.Attachments) != 1 || in.Attachments[0].ContentType != "application/vnd.microsoft.card.adaptive" {
		f.t.Errorf("no message with one card: %v, %+v", err, in)
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	card := in.Attachments[0].Content
	if card["type"] != "AdaptiveCard" || card["version"] != "1.5" {
		f.t.Errorf("card %v of version %v", card["type"], card["version"])
	}
	for _, b := range card["body"].([]any) {
		if got := b.(map[string]any)["type"]; got != "RichTextBlock" { // TextBlock reads Markdown
			f.t.Errorf("element %v", got)
		}
	}
	for _, a := range card["actions"].([]any) {
		if got := a.(map[string]any)["type"]; got != "Action.OpenUrl" {
			f.t.Errorf("action %v", got)
		}
	}
	f.cards = append(f.cards, card)
	w.WriteHeader(http.StatusAccepted) // as workflows answer
}

// TestTeams: a card with a link for each action, and no decision.
func TestTeams(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f, flow := setup(t, db, nil), newWorkflow(t)
		room, err := f.n.AddRoom(t.Context(), f.who("ann", auth.Owner), notify.NewRoom{Kind: notify.Teams, Name: "ops", URL: auth.Secret(flow.url)})
		if err != nil {
			t.Fatal(err)
		}
		a := f.propose("[click](https://evil.example) **now** <at>everyone</at>", "x@[evil](https://evil.example)")
		f.step()
		if len(flow.cards) != 1 {
			t.Fatalf("%d cards, want 1", len(flow.cards))
		}
		b, _ := json.Marshal(flow.cards[0])
		if s := string(b); !strings.Contains(s, "https://postern.example/console/actions/"+a.ID) || strings.Contains(s, "evil.example") || strings.Contains(s, "/look/") {
			t.Errorf("card %s", s)
		}
		flow.fail = func(w http.ResponseWriter) { w.Header().Set("Retry-After", "60"); w.WriteHeader(429) }
		f.propose("later")
		f.step()
		if n := f.count(`select count(*) from notice where person_id = $1 and state = 'waiting'`, room.ID); n != 1 {
			t.Errorf("%d notices are sent again after 429, want 1", n)
		}
		if n := f.count(`select count(*) from notify_room where failed like '%429%' and failed not like '%signature%'`); n != 1 {
			t.Error("the room does not say why")
		}
	})
}

// TestRoomsAreChecked: what a room cannot be, and who sets one up.
func TestRoomsAreChecked(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *notify.Config) { c.Private = false })
		teams := func(u string) notify.NewRoom {
			return notify.NewRoom{Kind: notify.Teams, Name: "x", URL: auth.Secret(u)}
		}
		ann := f.who("ann", auth.Owner)
		for _, in := range []notify.NewRoom{
			teams("http://hooks.example/"), teams("https://127.0.0.1/"), teams("https://[::1]/"), teams("https://10.0.0.1/"), teams("https://169.254.169.254/latest"), teams("https://[::ffff:10.0.0.1]/"),
			teams("https://user:pass@hooks.example/"), teams("https://hooks.example:25/"), teams("file:///etc/passwd"), teams("https://hooks.example/\u202e"), teams(""),
			{Kind: notify.Slack, Name: "x", Channel: "#general", Token: slackToken},
			{Kind: notify.Slack, Name: "x", Channel: slackRoom, Token: "xoxp-111111111111"},
			{Kind: notify.Slack, Name: "x", Channel: slackRoom, Token: slackToken, Signing: "short"},
			{Kind: notify.Slack, Name: "", Channel: slackRoom, Token: slackToken},
			{Kind: notify.Slack, Name: "a\u202eb", Channel: slackRoom, Token: slackToken},
			{Kind: "mail", Name: "x"},
		} {
			_, err := f.n.AddRoom(t.Context(), ann, in)
			if err == nil {
				t.Errorf("%v: taken", in)
				continue
			}
			if in.Token != "" && strings.Contains(err.Error(), in.Token.Reveal()) || strings.Contains(err.Error(), "pass@") {
				t.Errorf("the error repeats a credential: %v", err)
			}
		}
		for _, who := range []auth.Principal{f.who("bob", auth.Reviewer), f.who("vic", auth.Viewer), f.agent} {
			if _, err := f.n.AddRoom(t.Context(), who, teams("https://hooks.example/x")); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s: %v", who, err)
			}
		}
		// The attack: a name that leads into this network, which shows only when it is dialled.
		if _, err := f.n.AddRoom(t.Context(), ann, teams("https://localhost:8443/x?sig=abc")); err != nil {
			t.Fatal(err)
		}
		f.propose("hello")
		f.step()
		if n := f.count(`select count(*) from notice where channel = 'teams' and state = 'failed' and error like '%not public%' and error not like '%sig=%'`); n != 1 {
			t.Errorf("%d notices to a private address failed, want 1", n)
		}
		// The attack: who can write the database moves the credentials to another row.
		f.exec(`update notify_room set created_by = 'person:bob' where kind = 'teams'`)
		f.propose("again")
		f.step()
		if n := f.count(`select count(*) from notice where channel = 'teams' and state = 'waiting' and error like '%key%'`); n != 1 {
			t.Errorf("%d notices through a changed row, want 1 that waits", n)
		}
	})
}
