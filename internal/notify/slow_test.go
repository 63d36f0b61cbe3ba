package notify_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/notify"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A hanging is a server that takes requests and answers none before the test ends.
type hanging struct {
	url string

	mu    sync.Mutex
	under map[string]int // requests under way by path
	most  int            // of one path at the same time
	taken int
	ended int // requests whose client did not wait any longer
}

func newHanging(t *testing.T) *hanging {
	h := &hanging{under: map[string]int{}}
	over := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		h.mu.Lock()
		h.taken++
		h.under[r.URL.Path]++
		h.most = max(h.most, h.under[r.URL.Path])
		h.mu.Unlock()
		select {
		case <-over:
		case <-r.Context().Done():
			h.mu.Lock()
			h.ended++
			h.mu.Unlock()
		}
		h.mu.Lock()
		h.under[r.URL.Path]--
		h.mu.Unlock()
	}))
	t.Cleanup(srv.Close)
	t.Cleanup(func() { close(over) }) // before the server waits for its requests
	h.url = srv.URL
	return h
}

// counts returns how many requests were taken, and for how many nobody waits any longer.
func (h *hanging) counts() (taken, ended, most int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.taken, h.ended, h.most
}

// running runs the notifier until the test ends.
func (f *fixture) running() {
	f.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(f.t.Context()))
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = f.n.Run(ctx)
	}()
	f.t.Cleanup(func() { cancel(); <-done })
}

// until waits until ok, for at most a minute.
func (f *fixture) until(what string, ok func() bool) {
	f.t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			f.t.Fatalf("%s: not within a minute", what)
		}
	}
}

// teamsRoom sets up a room.
func (f *fixture) teamsRoom(name, url string) notify.Room {
	f.t.Helper()
	room, err := f.n.AddRoom(f.t.Context(), f.who("ann", auth.Owner), notify.NewRoom{Kind: notify.Teams, Name: name, URL: auth.Secret(url)})
	if err != nil {
		f.t.Fatal(err)
	}
	return room
}

// TestSlowServersDelayNobody: the attack is to set up all rooms but one at a server that
// never answers. The last room and everybody's mail get their notices meanwhile.
func TestSlowServersDelayNobody(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *notify.Config) { c.Poll, c.PerHour = 10*time.Millisecond, 100 })
		slow, flow := newHanging(t), newWorkflow(t)
		for i := range 19 {
			f.teamsRoom(fmt.Sprintf("slow %d", i), fmt.Sprintf("%s/%d", slow.url, i))
		}
		f.teamsRoom("zzz", flow.url)
		for i := range 5 {
			f.propose(fmt.Sprintf("text %d", i))
		}
		f.running()
		f.until("cards and mail", func() bool {
			flow.mu.Lock()
			defer flow.mu.Unlock()
			to, _ := f.mailed()
			return len(flow.cards) == 5 && len(to) == 10 // to ann and bob
		})
		taken, ended, most := slow.counts()
		if taken == 0 || ended != 0 || most > 2 {
			t.Errorf("%d requests were taken by the slow server, at most %d of one room, and %d were given up: want some, at most 2, and none", taken, most, ended)
		}
	})
}

// TestSlowEditsDelayNobody: Slack takes a message and then never answers when it is to be
// edited. What waits afterwards is told all the same.
func TestSlowEditsDelayNobody(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		slow := newHanging(t)
		posts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/chat.postMessage") {
				_ = json.NewEncoder(w).Encode(map[string]any{"ok": true, "ts": "1700000000.000001"})
				return
			}
			ctx, cancel := context.WithCancel(r.Context())
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, slow.url+r.URL.Path, r.Body)
			if err != nil {
				t.Error(err)
				return
			}
			if resp, err := http.DefaultClient.Do(req); err == nil {
				resp.Body.Close()
			}
		}))
		t.Cleanup(posts.Close)
		f := setup(t, db, func(c *notify.Config) { c.Poll, c.SlackURL = 10*time.Millisecond, posts.URL+"/api/" })
		f.slackRoomOf(false)
		first := f.propose("text 1")
		f.running()
		f.until("the first message", func() bool { return f.count(`select count(*) from notice where channel = 'slack' and open = 1`) == 1 })
		if err := f.gate.Decide(t.Context(), f.who("bob", auth.Reviewer), decision(first, true)); err != nil {
			t.Fatal(err)
		}
		f.until("the edit", func() bool { taken, _, _ := slow.counts(); return taken > 0 })
		before := len(f.hop.mails())
		f.propose("text 2")
		f.until("mail about the second", func() bool { return len(f.hop.mails()) == before+2 })
		if taken, ended, _ := slow.counts(); taken != 1 || ended != 0 {
			t.Errorf("%d edits were begun, %d given up: want 1, and the mail before its end", taken, ended)
		}
	})
}

// TestSlowPushServiceDelaysNoOtherBrowser: one browser of a person is at a push service that
// never answers.
func TestSlowPushServiceDelaysNoOtherBrowser(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *notify.Config) { c.Poll = 10 * time.Millisecond })
		slow, quick := newHanging(t), newPushService(t)
		for i := range 4 { // their order is random
			sub := quick.subscription()
			sub.Endpoint = fmt.Sprintf("%s/%d", slow.url, i)
			if err := f.n.AddDevice(t.Context(), f.who("bob", auth.Reviewer), sub, "slow"); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range []string{"bob", "cat"} {
			sub := quick.subscription()
			sub.Endpoint += name
			if err := f.n.AddDevice(t.Context(), f.who(name, auth.Reviewer), sub, "quick"); err != nil {
				t.Fatal(err)
			}
		}
		f.propose("text")
		f.running()
		f.until("both messages", func() bool {
			quick.mu.Lock()
			defer quick.mu.Unlock()
			return len(quick.messages) == 2
		})
		if _, ended, _ := slow.counts(); ended != 0 {
			t.Errorf("%d requests were given up before the others had theirs", ended)
		}
	})
}

// TestBrokenAnswersAreNotRepeated: a server that takes a message and hangs up, or answers
// that it is broken, may have shown it. It is not sent twice.
func TestBrokenAnswersAreNotRepeated(t *testing.T) {
	for name, broken := range map[string]http.HandlerFunc{
		"hangs up": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"500":      func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
		"nonsense": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") },
	} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			taken := map[string]int{}
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				mu.Lock()
				taken[strings.Split(r.URL.Path, "/")[1]]++
				mu.Unlock()
				broken(w, r)
			}))
			t.Cleanup(srv.Close)
			f := setup(t, storetest.SQLite(t), func(c *notify.Config) { c.SlackURL = srv.URL + "/slack/" })
			f.hop.answer(mail.Accepted)
			f.slackRoomOf(false)
			f.teamsRoom("teams", srv.URL+"/teams/x")
			sub := newPushService(t).subscription()
			sub.Endpoint = srv.URL + "/push/x"
			if err := f.n.AddDevice(t.Context(), f.who("bob", auth.Reviewer), sub, "x"); err != nil {
				t.Fatal(err)
			}
			f.propose("text")
			f.step()
			f.exec(`update notice set due_at = 1`)
			f.step(f.n, f.notifier())
			mu.Lock()
			defer mu.Unlock()
			if taken["slack"] != 1 || taken["teams"] != 1 || taken["push"] != 1 {
				t.Errorf("requests: %v, want one each", taken)
			}
		})
	}
}
