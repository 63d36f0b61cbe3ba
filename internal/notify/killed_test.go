package notify_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/notify"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/secret"
	"postern/internal/store"
	"postern/internal/storetest"
)

// The environment of a process that runs a notifier until it is killed: its database, and
// the URL of its Slack.
const (
	childDB    = "POSTERN_TEST_NOTIFIER_DB"
	childSlack = "POSTERN_TEST_NOTIFIER_SLACK"
)

func TestMain(m *testing.M) {
	if db := os.Getenv(childDB); db != "" {
		fmt.Fprintln(os.Stderr, runChild(db, os.Getenv(childSlack)))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// runChild runs a notifier on a database.
func runChild(path, slack string) error {
	ctx, log := context.Background(), slog.New(slog.DiscardHandler)
	db, err := store.Open(ctx, path, "")
	if err != nil {
		return err
	}
	if err := db.UseKey(storetest.Key); err != nil {
		return err
	}
	gate, rules := oversight.NewGate(log, db, &judge{}), &judge{}
	gate.Handle("email.send", &effect{})
	s, err := secret.New(ctx, log, db, secret.Config{Server: make([]byte, 32)})
	if err != nil {
		return err
	}
	box, err := s.Box("notices")
	if err != nil {
		return err
	}
	n, err := notify.New(log, db, gate, notify.Config{
		Base: "https://postern.example", Remind: 0.5, Rules: rules, Box: box, SlackURL: slack, Private: true, PerHour: 1000, Poll: 5 * time.Millisecond,
	})
	if err != nil {
		return err
	}
	return n.Run(ctx)
}

// A counter is Slack, Teams and a push service, and counts the messages of each action.
type counter struct {
	t    *testing.T
	url  string
	push *pushService

	mu    sync.Mutex
	got   map[string]int // by channel and action
	until int            // after so many further messages it says so on full; 0 means never
	quiet bool           // and does not answer any more
	full  chan struct{}
}

var inMessage = regexp.MustCompile(`/console/actions/(act_[A-Z0-9]+)`)

func newCounter(t *testing.T) *counter {
	c := &counter{t: t, push: newPushService(t), got: map[string]int{}, full: make(chan struct{}, 1)}
	srv := httptest.NewServer(c)
	t.Cleanup(srv.Close)
	c.url = srv.URL
	return c
}

func (c *counter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return // killed before it was sent: a server does not act on a part
	}
	channel := strings.Split(r.URL.Path, "/")[1]
	if channel == "push" {
		if b, err = decryptPush(b, c.push.key, c.push.secret); err != nil {
			c.t.Errorf("push: %v", err)
		}
	}
	m := inMessage.FindSubmatch(b)
	if m == nil {
		c.t.Errorf("%s: no action in %s", channel, b)
		return
	}
	c.mu.Lock()
	c.got[channel+" "+string(m[1])]++
	hang := c.quiet && c.until == 0
	if c.until > 0 {
		if c.until--; c.until == 0 {
			c.full <- struct{}{}
			hang = c.quiet
		}
	}
	c.mu.Unlock()
	if hang {
		<-r.Context().Done() // who is killed hears no answer
		return
	}
	w.WriteHeader(http.StatusOK)
	_ = json.NewEncoder(w).Encode(map[string]any{"ok": true, "ts": "1700000000.000001"})
}

// after has the counter say so after n messages, and then answer or not.
func (c *counter) after(n int, quiet bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.until, c.quiet = n, quiet
}

func (c *counter) count(channel, action string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.got[channel+" "+action]
}

// child starts a process with a notifier, and returns how to kill it: with SIGKILL.
func (f *fixture) child(path string, c *counter) (kill func()) {
	f.t.Helper()
	self, err := os.Executable()
	if err != nil {
		f.t.Fatal(err)
	}
	cmd := exec.CommandContext(f.t.Context(), self)
	cmd.Env = append(os.Environ(), childDB+"="+path, childSlack+"="+c.url+"/slack/")
	cmd.Stderr = f.t.Output()
	if err := cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	kill = sync.OnceFunc(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	f.t.Cleanup(kill)
	return kill
}

// TestKilledServerSendsNothingTwice kills a server with SIGKILL, again and again, while it
// sends to Slack, to Teams and to a browser. No message is sent twice. What is missing was
// being sent at that moment, and its reminder comes.
func TestKilledServerSendsNothingTwice(t *testing.T) {
	db := storetest.SQLite(t)
	f := setup(t, db, nil)
	f.judge.say(policy.Verdict{Within: 24 * time.Hour})
	var path string
	if err := db.View(t.Context(), func(tx *store.Tx) error {
		return tx.One(t.Context(), `select file from pragma_database_list where name = 'main'`, nil, &path)
	}); err != nil {
		t.Fatal(err)
	}
	c := newCounter(t)
	f.slackRoomOf(false)
	f.teamsRoom("teams", c.url+"/teams/x")
	sub := c.push.subscription()
	sub.Endpoint = c.url + "/push/x"
	if err := f.n.AddDevice(t.Context(), f.who("bob", auth.Reviewer), sub, "x"); err != nil {
		t.Fatal(err)
	}
	channels := []string{"slack", "teams", "push"}
	var all []oversight.Action
	const kills = 6
	for i := range kills {
		for j := range 4 {
			all = append(all, f.propose(fmt.Sprintf("text %d %d", i, j)))
		}
		// Every other time the server is killed before it hears the answer.
		c.after(2+i, i%2 == 0)
		kill := f.child(path, c)
		select {
		case <-c.full:
		case <-time.After(time.Minute):
			t.Fatal("nothing was sent within a minute")
		}
		kill()
	}
	c.after(0, false)
	kill := f.child(path, c)
	f.until("all notices", func() bool {
		rounds := f.count(`select count(*) from notice_round`)
		return rounds == len(all) && f.count(`select count(*) from notice where state = 'waiting'`) == 0 && f.count(`select count(*) from notice`) == len(all)*len(channels)
	})
	kill()
	lost := 0
	for _, a := range all {
		for _, channel := range channels {
			n := c.count(channel, a.ID)
			if n > 1 {
				t.Errorf("%s was told %d times of %s", channel, n, a.ID)
			}
			if n == 1 {
				continue
			}
			lost++
			if got := f.count(`select count(*) from notice where action_id = $1 and channel = $2 and state = 'sending'`, a.ID, channel); got != 1 {
				t.Errorf("%s got no notice of %s, which was not being sent when the server was killed", channel, a.ID)
			}
		}
	}
	if most := (kills + 1) * 2 * len(channels); lost > most {
		t.Errorf("%d notices are missing, want at most %d: two sends of each channel for each kill", lost, most)
	}
	t.Logf("%d notices, %d kills, %d missing", len(all)*len(channels), kills, lost)

	// The reminder of each action comes once, also of what is missing.
	f.exec(`update notice_round set remind_at = 1`)
	kill = f.child(path, c)
	f.until("the reminders", func() bool {
		return f.count(`select count(*) from notice where kind = 'reminder' and state = 'sent'`) == len(all)*len(channels)
	})
	kill()
	for _, a := range all {
		for _, channel := range channels {
			if n := c.count(channel, a.ID); n < 1 || n > 2 {
				t.Errorf("%s was told %d times of %s with its reminder", channel, n, a.ID)
			}
		}
	}
}
