package mailbox_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/delivery"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/signing"
	"postern/internal/statement"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A world is a transport that answers for each recipient as told, the first
// answer first and the last one for ever, and counts who got what.
type world struct {
	mu      sync.Mutex // guards what follows
	answers map[string][]mail.Delivery
	got     map[string]int
	copies  []mail.Envelope
	kind    delivery.HopKind
	block   map[string]chan struct{} // by domain: closed when it answers
	now     map[string]int           // conversations under way, by domain
	most    map[string]int
}

func newWorld() *world {
	return &world{answers: map[string][]mail.Delivery{}, got: map[string]int{}, kind: delivery.HopDirect, block: map[string]chan struct{}{}, now: map[string]int{}, most: map[string]int{}}
}

func (w *world) Hop(_ context.Context, to string) delivery.Hop {
	return delivery.Hop{Kind: w.kind, Name: mail.Domain(to)}
}

func (w *world) Deliver(ctx context.Context, e mail.Envelope) (out []mail.Delivery, err error) {
	name := mail.Domain(e.To[0])
	w.mu.Lock()
	w.now[name]++
	w.most[name] = max(w.most[name], w.now[name])
	block := w.block[name]
	w.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now[name]--
	e.Raw, e.Prefix = append(e.Prefix, e.Raw...), nil
	w.copies = append(w.copies, e)
	for _, to := range e.To {
		d := mail.Delivery{Outcome: mail.Accepted, Code: 250, Detail: "250 ok"}
		if as := w.answers[to]; len(as) > 0 {
			d = as[0]
			if len(as) > 1 {
				w.answers[to] = as[1:]
			}
		}
		d.Recipient = to
		if d.Outcome == mail.Accepted || d.Outcome == mail.Uncertain {
			w.got[to]++
		}
		out = append(out, d)
	}
	return out, nil
}

// delivering is a fixture whose inbox "analyst" sends without asking.
type delivering struct {
	*fixture
	t     *testing.T
	w     *world
	inbox directory.Inbox
	agent auth.Principal
	key   auth.Secret
	ring  *signing.Ring
}

var secret = bytes.Repeat([]byte("s"), 32)

func deliver(t *testing.T, db *store.DB, c delivery.Config) *delivering {
	t.Helper()
	if c.FirstRetry == 0 {
		c.FirstRetry = time.Hour // the next attempt comes when run says so, however slow the machine is
	}
	f := setup(t, db)
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	blobs, err := store.OpenBlobs(f.blobs)
	if err != nil {
		t.Fatal(err)
	}
	d := &delivering{fixture: f, t: t, w: newWorld()}
	if d.ring, err = signing.New(db, signing.Config{Key: secret}); err != nil {
		t.Fatal(err)
	}
	f.gate = oversight.NewGate(log, db, oversighttest.Rules{{ID: "all", Kind: "*", Effect: policy.Allow}})
	f.post = mailbox.New(log, db, f.gate, mailbox.Config{Blobs: blobs, Transport: d.w, Domain: "agents.test", Secret: secret, Signer: d.ring, Delivery: c})
	d.inbox, d.agent, d.key = f.fixtureInbox(t)
	return d
}

func (f *fixture) fixtureInbox(t *testing.T) (directory.Inbox, auth.Principal, auth.Secret) {
	t.Helper()
	return f.inbox(t, "analyst")
}

func (d *delivering) send(to, bcc []string) oversight.Action {
	d.t.Helper()
	a, err := d.post.Send(d.t.Context(), d.agent, "rest", mailbox.Outgoing{Draft: mail.Draft{To: to, Bcc: bcc, Subject: "Report " + fmt.Sprint(time.Now().UnixNano()), Text: "hello"}})
	if err != nil {
		d.t.Fatal(err)
	}
	return a.Action
}

// run executes all that is due, and again as if its time had come, times times.
func (d *delivering) run(times int) {
	d.t.Helper()
	for range times {
		d.due()
		for {
			ran, err := d.gate.RunOne(d.t.Context())
			if err != nil {
				d.t.Fatal(err)
			}
			if !ran {
				break
			}
		}
	}
}

func (d *delivering) due() {
	d.t.Helper()
	d.exec(`update action set not_before = 0`)
	d.exec(`update delivery set next_at = 1 where state in ('queued', 'deferred')`)
	d.exec(`update destination set not_before = 0, slot_at = 0`)
}

func (d *delivering) exec(query string, args ...any) {
	d.t.Helper()
	err := d.db.Update(d.t.Context(), func(tx *store.Tx) error {
		if _, err := tx.ExecContext(d.t.Context(), query, args...); err != nil {
			return err
		}
		return oversighttest.Settle(d.t.Context(), tx)
	})
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *delivering) state(id string) oversight.Action {
	d.t.Helper()
	a, err := d.gate.Action(d.t.Context(), d.person, id)
	if err != nil {
		d.t.Fatal(err)
	}
	return a
}

// states are those of an action's recipients, "bob@a.test:delivered …".
func (d *delivering) states(id string) string {
	d.t.Helper()
	ds, err := d.post.Deliveries(d.t.Context(), d.agent, id)
	if err != nil {
		d.t.Fatal(err)
	}
	var out []string
	for _, x := range ds {
		out = append(out, x.Recipient+":"+string(x.State))
	}
	return strings.Join(out, " ")
}

func (d *delivering) messages(dir message.Direction) (out []message.Message) {
	d.t.Helper()
	k, err := d.post.Keys.Open(d.t.Context(), d.agent, d.key, "")
	if err != nil {
		d.t.Fatal(err)
	}
	ms, err := d.post.Messages(d.t.Context(), d.agent, k, 0)
	if err != nil {
		d.t.Fatal(err)
	}
	for _, m := range ms {
		if m.Direction == dir {
			out = append(out, m)
		}
	}
	return out
}

var (
	later   = mail.Delivery{Outcome: mail.NotSent, Code: 451, Status: "4.7.1", Detail: "451 4.7.1 come again"}
	silence = mail.Delivery{Outcome: mail.NotSent, Detail: "connect: no route"}
	nobody  = mail.Delivery{Outcome: mail.Refused, Code: 550, Status: "5.1.1", Detail: "550 5.1.1 no such user", Remote: "mx.b.test", Gone: true}
	spam    = mail.Delivery{Outcome: mail.Refused, Code: 554, Status: "5.7.1", Detail: "554 5.7.1 not that"}
	unsure  = mail.Delivery{Outcome: mail.Uncertain, Detail: "no reply came"}
	taken   = mail.Delivery{Outcome: mail.Accepted, Code: 250, Detail: "250 ok"}
)

// TestEachRecipient: every recipient ends as its server says, each gets the
// message once, and who waits delays nobody.
func TestEachRecipient(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		d := deliver(t, db, delivery.Config{})
		d.w.answers["slow@a.test"] = []mail.Delivery{later, silence, taken}
		d.w.answers["none@b.test"] = []mail.Delivery{nobody}
		d.w.answers["fog@c.test"] = []mail.Delivery{unsure, taken}
		a := d.send([]string{"bob@a.test", "slow@a.test", "none@b.test", "fog@c.test"}, nil)
		d.run(1)
		if got, want := d.states(a.ID), "bob@a.test:delivered slow@a.test:deferred none@b.test:bounced fog@c.test:uncertain"; got != want {
			t.Errorf("after the first attempt: %s, want %s", got, want)
		}
		if got := d.state(a.ID); got.State != oversight.Approved {
			t.Errorf("while one is deferred: %s", got.State)
		}
		d.run(2)
		if got, want := d.states(a.ID), "bob@a.test:delivered slow@a.test:delivered none@b.test:bounced fog@c.test:uncertain"; got != want {
			t.Errorf("after three: %s, want %s", got, want)
		}
		got := d.state(a.ID)
		if got.State != oversight.Unknown {
			t.Fatalf("with one uncertain: %s, want unknown", got.State)
		}
		d.run(2)
		if d.w.got["fog@c.test"] != 1 {
			t.Errorf("the uncertain one was sent to %d times before a person spoke", d.w.got["fog@c.test"])
		}
		if err := d.gate.Resolve(t.Context(), d.person, a.ID, got.Version, oversight.Approved, "it did not arrive"); err != nil {
			t.Fatal(err)
		}
		d.run(1)
		if got := d.state(a.ID); got.State != oversight.Failed || !strings.Contains(got.Result, "none@b.test: bounced") {
			t.Errorf("at last: %s %q, want failed for the one that bounced", got.State, got.Result)
		}
		for to, want := range map[string]int{"bob@a.test": 1, "slow@a.test": 1, "none@b.test": 0, "fog@c.test": 2} {
			if d.w.got[to] != want {
				t.Errorf("%s got it %d times, want %d", to, d.w.got[to], want)
			}
		}
		if out := d.messages(message.Out); len(out) != 1 {
			t.Errorf("%d copies of what was sent", len(out))
		}
	})
}

func TestResolveDelivery(t *testing.T) {
	for _, tt := range []struct {
		to   oversight.State
		want string
	}{{oversight.Done, "fog@c.test:delivered"}, {oversight.Failed, "fog@c.test:bounced"}} {
		d := deliver(t, storetest.SQLite(t), delivery.Config{})
		d.w.answers["fog@c.test"] = []mail.Delivery{unsure}
		a := d.send([]string{"fog@c.test"}, nil)
		d.run(1)
		if err := d.gate.Resolve(t.Context(), d.person, a.ID, d.state(a.ID).Version, tt.to, "asked"); err != nil {
			t.Fatal(err)
		}
		if got := d.states(a.ID); got != tt.want {
			t.Errorf("resolved as %s: %s, want %s", tt.to, got, tt.want)
		}
		if n := len(d.messages(message.Out)); (n == 1) != (tt.to == oversight.Done) {
			t.Errorf("resolved as %s: %d copies", tt.to, n)
		}
	}
}

// TestGivenUp: what is deferred is tried for days and then bounced, and the
// sender is told in a message that programs read.
func TestGivenUp(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		d := deliver(t, db, delivery.Config{})
		d.w.answers["slow@a.test"] = []mail.Delivery{later}
		a := d.send([]string{"slow@a.test"}, nil)
		d.run(20)
		ds, err := d.post.Deliveries(t.Context(), d.agent, a.ID)
		if err != nil || ds[0].State != delivery.Deferred || ds[0].Attempts != 20 || time.Until(ds[0].Next) > 4*time.Hour {
			t.Fatalf("after 20 attempts within a moment: %+v, %v", ds, err)
		}
		d.exec(`update delivery set first_at = first_at - $1`, (4 * 24 * time.Hour).Microseconds())
		d.run(1)
		if got := d.state(a.ID); got.State != oversight.Failed || !strings.Contains(got.Result, "given up after 21 attempts") {
			t.Errorf("after four days: %s %q", got.State, got.Result)
		}
		in := d.messages(message.In)
		if len(in) != 1 || in[0].From != "Mail Delivery System <mailer-daemon@agents.test>" {
			t.Fatalf("the sender is told by %+v", in)
		}
		k, err := d.post.Keys.Open(t.Context(), d.agent, d.key, "")
		if err != nil {
			t.Fatal(err)
		}
		_, raw, err := d.post.Message(t.Context(), d.agent, k, in[0].ID)
		if err != nil {
			t.Fatal(err)
		}
		r, ok := mail.ParseReport(raw)
		if !ok || r.Kind != mail.DeliveryReport || len(r.Recipients) != 1 || r.Recipients[0].Address != "slow@a.test" || r.Recipients[0].Status != "4.4.7" && r.Recipients[0].Status != "5.0.0" || r.MessageID == "" {
			t.Errorf("as a report it reads %+v, %v", r, ok)
		}
		d.run(2)
		if n := len(d.messages(message.In)); n != 1 {
			t.Errorf("told %d times", n)
		}
	})
}

// TestSuppression: who does not exist is not written to again, by this project.
func TestSuppression(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx, d := t.Context(), deliver(t, db, delivery.Config{})
		d.w.answers["none@b.test"] = []mail.Delivery{nobody, taken}
		d.w.answers["picky@b.test"] = []mail.Delivery{spam, taken}
		d.send([]string{"none@b.test", "picky@b.test"}, nil)
		d.run(1)
		if s, err := d.post.Suppression.Find(ctx, d.project, "None@B.test"); err != nil || s.Reason != delivery.SuppressedBounce || s.Inbox != d.inbox.ID {
			t.Errorf("who does not exist: %+v, %v", s, err)
		}
		if _, err := d.post.Suppression.Find(ctx, d.project, "picky@b.test"); err == nil {
			t.Error("who refused one message is suppressed")
		}
		for _, who := range []auth.Principal{d.agent, {Kind: auth.Sandbox, Project: d.agent.Project}} {
			if err := d.post.Suppression.Remove(ctx, who, "none@b.test"); err == nil {
				t.Errorf("%s took an address off the list", who)
			}
		}
		if _, err := d.post.Suppression.Find(ctx, d.other, "none@b.test"); err == nil {
			t.Error("another project sees the list")
		}
		a := d.send([]string{"none@b.test", "picky@b.test"}, nil)
		d.run(1)
		if got, want := d.states(a.ID), "none@b.test:suppressed picky@b.test:delivered"; got != want {
			t.Errorf("the next message: %s, want %s", got, want)
		}
		a = d.send([]string{"none@\uff42.test"}, nil) // the same domain, written with a wide letter
		d.run(1)
		if got, want := d.states(a.ID), "none@\uff42.test:suppressed"; got != want {
			t.Errorf("the same address, written another way: %s, want %s", got, want)
		}
		// Who copies the database finds no address in the list.
		err := db.View(ctx, func(tx *store.Tx) error {
			var hash []byte
			err := tx.One(ctx, `select hash from suppression`, nil, &hash)
			if len(hash) != 32 || bytes.Contains(hash, []byte("none")) {
				t.Errorf("stored as %q", hash)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := d.post.Suppression.Remove(ctx, d.person, "none@b.test"); err != nil {
			t.Fatal(err)
		}
		a = d.send([]string{"none@b.test"}, nil)
		d.run(1)
		if got := d.states(a.ID); got != "none@b.test:delivered" {
			t.Errorf("off the list: %s", got)
		}

		token := d.post.Suppression.Token(d.inbox, "bored@b.test")
		if strings.Contains(token, "bored") {
			t.Errorf("the token shows the address: %s", token)
		}
		for _, forged := range []string{"", "x", token + "x", strings.Replace(token, d.inbox.ID, "ibx_X", 1), strings.ToUpper(token), strings.Repeat("a.", 200)} {
			if err := d.post.Suppression.Unsubscribe(ctx, forged); err == nil {
				t.Errorf("a forged link was taken: %q", forged)
			}
		}
		if err := d.post.Suppression.Unsubscribe(ctx, token); err != nil {
			t.Fatal(err)
		}
		if s, err := d.post.Suppression.Find(ctx, d.person, "bored@b.test"); err != nil || s.Reason != delivery.SuppressedUnsubscribe {
			t.Errorf("who unsubscribed: %+v, %v", s, err)
		}
	})
}

// TestSlowDestination: a destination that never answers holds at most its
// places, and all others go on.
func TestSlowDestination(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		d := deliver(t, db, delivery.Config{Connections: 2})
		block := make(chan struct{})
		d.w.block["tar.test"] = block
		for i := range 8 {
			d.send([]string{fmt.Sprintf("u%d@tar.test", i)}, nil)
		}
		last := d.send([]string{"bob@a.test"}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 2)
		for range 2 { // as two programs on one database
			go func() { done <- d.gate.Run(ctx) }()
		}
		for deadline := time.Now().Add(2 * time.Minute); d.state(last.ID).State != oversight.Done; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("the last one is %s while another destination does not answer", d.state(last.ID).State)
			}
		}
		close(block)
		for deadline := time.Now().Add(3 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
			d.exec(`update action set not_before = 0 where state = 'approved'`)
			d.exec(`update delivery set next_at = 1 where state in ('queued', 'deferred')`)
			as, err := d.gate.Actions(ctx, d.person, oversight.Query{States: []oversight.State{oversight.Done}})
			if err != nil {
				t.Fatal(err)
			}
			if len(as) == 9 {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d of 9 were delivered", len(as))
			}
		}
		cancel()
		<-done
		<-done
		d.w.mu.Lock()
		defer d.w.mu.Unlock()
		if d.w.most["tar.test"] > 2 {
			t.Errorf("%d conversations at the same time with one destination, want at most 2", d.w.most["tar.test"])
		}
		for i := range 8 {
			if n := d.w.got[fmt.Sprintf("u%d@tar.test", i)]; n != 1 {
				t.Errorf("u%d got it %d times", i, n)
			}
		}
	})
}

func TestRateOfDestination(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		d := deliver(t, db, delivery.Config{PerMinute: 3})
		var last oversight.Action
		for i := range 5 {
			last = d.send([]string{fmt.Sprintf("u%d@a.test", i)}, nil)
		}
		d.run(1)
		if n := len(d.w.got); n != 3 {
			t.Errorf("%d got it within the minute, want 3", n)
		}
		if a := d.state(last.ID); a.State != oversight.Approved || a.Attempts != 0 || !strings.Contains(a.Result, "waits: the limit for a.test is 3 messages a minute") {
			t.Errorf("what waits is %s after %d attempts: %s", a.State, a.Attempts, a.Result)
		}
		d.exec(`update destination set window_at = 1`)
		d.run(1)
		if n := len(d.w.got); n != 5 {
			t.Errorf("%d got it after the minute, want 5", n)
		}
	})
}

func TestSilentDestination(t *testing.T) {
	d := deliver(t, storetest.SQLite(t), delivery.Config{})
	for i := range 5 {
		to := fmt.Sprintf("u%d@a.test", i)
		d.w.answers[to] = []mail.Delivery{silence, taken}
		d.send([]string{to}, nil)
	}
	d.due()
	for range 5 {
		if _, err := d.gate.RunOne(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(d.w.copies); n != 3 {
		t.Errorf("it was tried %d times in a row, want 3 and then to be left alone", n)
	}
	d.run(2)
	if n := len(d.w.got); n != 5 {
		t.Errorf("%d got it once it answered, want 5", n)
	}
}

// TestInterrupted is a program that stops in the middle: whom it had not begun
// with get the message, whom it had are uncertain.
func TestInterrupted(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		d := deliver(t, db, delivery.Config{Instance: "here"})
		within := d.send([]string{"bob@b.test", "carol@c.test"}, nil)
		d.w.answers["bob@b.test"], d.w.answers["carol@c.test"] = []mail.Delivery{later, taken}, []mail.Delivery{later, taken}
		d.run(1)
		before := d.send([]string{"bob@a.test"}, nil)
		d.exec(`update delivery set state = 'sending' where action_id = $1 and n = 0`, within.ID)
		d.exec(`update action set state = 'executing'`)
		d.exec(`insert into destination_use (destination, holder, until_at) values ('a.test', 'here/x', 9000000000000000), ('a.test', 'there/x', 9000000000000000)`)
		if err := d.post.Delivery.FreeDestinations(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := d.gate.Recover(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		d.run(2)
		if got := d.state(before.ID); got.State != oversight.Done || d.w.got["bob@a.test"] != 1 {
			t.Errorf("what had not begun: %s, delivered %d times", got.State, d.w.got["bob@a.test"])
		}
		if got, want := d.states(within.ID), "bob@b.test:uncertain carol@c.test:delivered"; got != want || d.state(within.ID).State != oversight.Unknown {
			t.Errorf("what had: %s (%s), want %s", got, d.state(within.ID).State, want)
		}
		if d.w.got["bob@b.test"] != 0 {
			t.Error("the uncertain one was sent to again")
		}
		var n int
		if err := db.View(t.Context(), func(tx *store.Tx) error {
			return tx.One(t.Context(), `select count(*) from destination_use where holder like '%/x'`, nil, &n)
		}); err != nil || n != 1 {
			t.Errorf("%d places are held after the restart, %v; want the other program's", n, err)
		}
	})
}

// sameDay waits out the last minute of a day, for a test of what counts by days.
func sameDay() {
	const day, minute = 86400, 60
	if left := day - time.Now().Unix()%day; left <= minute {
		time.Sleep(time.Duration(left) * time.Second)
	}
}

// TestForgetDeliveries: what is old goes, what is in use stays.
func TestForgetDeliveries(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		sameDay()
		d := deliver(t, db, delivery.Config{WarmUp: true})
		d.send([]string{"bob@a.test", "bob@b.test"}, nil)
		d.run(1)
		d.exec(`update destination set window_at = 1 where name = 'a.test'`)
		d.exec(`update sent_message set sent_at = 1`)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- d.post.RunSweep(ctx) }()
		count := func(query string) (n int) {
			err := db.View(t.Context(), func(tx *store.Tx) error { return tx.One(t.Context(), query, nil, &n) })
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		for deadline := time.Now().Add(2 * time.Minute); count(`select count(*) from destination`) != 1 || count(`select count(*) from sent_message`) != 0; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("what is old stays")
			}
		}
		if n := count(`select count(*) from sending_day`); n == 0 {
			t.Error("no day is remembered")
		}
		cancel()
		<-done
	})
}

func TestWarmUp(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		sameDay()
		d := deliver(t, db, delivery.Config{WarmUp: true, PerMinute: 10000})
		send := func(n int) {
			for i := range n {
				d.send([]string{fmt.Sprintf("u%d@a%d.test", i, time.Now().UnixNano())}, nil)
			}
			d.run(1)
		}
		today := func() int64 { return time.Now().Unix() / 86400 }
		before := 0
		for day := today(); ; day = today() {
			send(52)
			if today() == day {
				break
			}
			// Midnight was in between, and the next day has room of its own: once more, on that one.
			d.exec(`delete from sending_day`)
			d.run(1)
			d.exec(`delete from sending_day`)
			before = len(d.w.got)
		}
		if n := len(d.w.got) - before; n != 50 {
			t.Errorf("on its first day it wrote to %d, want 50", n)
		}
		d.exec(`update sending_day set day = day - 7`)
		d.run(1)
		if n := len(d.w.got) - before; n != 52 {
			t.Errorf("in its second week the rest waits still: %d", n)
		}
		d.exec(`delete from sending_day`)
		d.w.kind = delivery.HopRelay
		send(51)
		if n := len(d.w.got) - before; n != 103 {
			t.Errorf("over a relay it is held back: %d", n)
		}
	})
}

// verbs are what the audit says of an action, oldest first.
func (d *delivering) verbs(action string) string {
	var out []string
	err := audit.View(d.t.Context(), d.db, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(d.t.Context(), `select verb from audit_entry where object = $1 order by seq`, action)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var verb string
			if err := rows.Scan(&verb); err != nil {
				return err
			}
			out = append(out, verb)
		}
		return rows.Err()
	})
	if err != nil {
		d.t.Fatal(err)
	}
	return strings.Join(out, " ")
}

// TestSuspension: an inbox whose mail bounces stops, its neighbours do not, and
// only a person lets it go on.
func TestSuspension(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		d := deliver(t, db, delivery.Config{Reputation: delivery.Reputation{MinSent: 10}})
		bad := func(n int) { // of ten, three bounce
			for i := range 10 {
				to := fmt.Sprintf("u%d.%d@a.test", n, i)
				if i >= 7 {
					d.w.answers[to] = []mail.Delivery{spam}
				}
				d.send([]string{to}, nil)
			}
			d.run(1)
		}
		bad(1)
		ss, err := d.post.Delivery.Suspensions(ctx, d.project)
		if err != nil || len(ss) != 1 || ss[0].Scope != d.inbox.ID || ss[0].Reason != "3 of 10 recipients bounced" {
			t.Fatalf("suspended: %+v, %v; want the inbox alone", ss, err)
		}
		a := d.send([]string{"bob@a.test"}, nil)
		d.run(3)
		if got := d.state(a.ID); got.State != oversight.Approved || !strings.Contains(got.Result, "suspended") || d.w.got["bob@a.test"] != 0 {
			t.Errorf("while suspended: %s %q", got.State, got.Result)
		}
		waited := "action.propose action.execute action.defer" // once, however often it looks
		if got := d.verbs(a.ID); got != waited {
			t.Errorf("while suspended the audit has %q, want %q", got, waited)
		}
		_, neighbour, _ := d.fixture.inbox(t, "neighbour")
		self := d.agent
		d.agent = neighbour
		d.send([]string{"carol@a.test"}, nil)
		d.run(1)
		if d.w.got["carol@a.test"] != 1 {
			t.Error("its neighbour is stopped with it")
		}
		d.agent = self
		for _, who := range []auth.Principal{d.agent, d.project} {
			if err := d.post.Delivery.Lift(ctx, who, d.inbox.ID, "please"); err == nil {
				t.Errorf("%s lifted it", who)
			}
		}
		stranger := d.other
		stranger.Kind = auth.Person
		if err := d.post.Delivery.Lift(ctx, stranger, d.inbox.ID, "please"); err == nil {
			t.Error("a person of another project lifted it")
		}
		if err := d.post.Delivery.Lift(ctx, d.person, d.inbox.ID, "the list was cleaned"); err != nil {
			t.Fatal(err)
		}
		d.run(2)
		if got := d.state(a.ID); got.State != oversight.Done {
			t.Errorf("after it was lifted: %s %q", got.State, got.Result)
		}
		if got, want := d.verbs(a.ID), waited+" action.execute action.done"; got != want {
			t.Errorf("after it was lifted the audit has %q, want %q", got, want)
		}
		// Several inboxes that send little, and all badly: the domain stops.
		var agents []auth.Principal
		for i := range 4 {
			_, agent, _ := d.fixture.inbox(t, fmt.Sprintf("little%d", i))
			agents = append(agents, agent)
		}
		for i := range 12 {
			to := fmt.Sprintf("v%d@a.test", i)
			d.w.answers[to] = []mail.Delivery{spam}
			d.agent = agents[i%4]
			d.send([]string{to}, nil)
		}
		d.run(1)
		ss, err = d.post.Delivery.Suspensions(ctx, d.project)
		if err != nil || len(ss) != 1 || ss[0].Scope != "agents.test" {
			t.Errorf("suspended: %+v, %v; want the domain", ss, err)
		}
	})
}

// reply makes the report that a server would send about the last copy.
func (d *delivering) report(status, to string) []byte {
	d.w.mu.Lock()
	defer d.w.mu.Unlock()
	raw, err := mail.ComposeBounce(mail.Bounce{
		Domain: "b.test", To: d.inbox.Address, Original: d.w.copies[len(d.w.copies)-1].Raw, Arrived: time.Now(),
		Recipients: []mail.BouncedRecipient{{Address: to, Status: status, Code: 550, Detail: "no such user"}},
	}, time.Now())
	if err != nil {
		d.t.Fatal(err)
	}
	return raw
}

func (d *delivering) arrive(raw []byte) {
	d.t.Helper()
	if err := d.post.Receive(d.t.Context(), mailbox.Arrival{Envelope: mail.Envelope{To: []string{d.inbox.Address}, Raw: raw}, Remote: "192.0.2.1:25"}); err != nil {
		d.t.Fatal(err)
	}
}

func complaint(original []byte, to string) []byte {
	header, _, _ := bytes.Cut(original, []byte("\r\n\r\n"))
	return []byte("From: fbl@b.test\r\nTo: analyst@agents.test\r\nSubject: FW\r\nMIME-Version: 1.0\r\nContent-Type: multipart/report; report-type=feedback-report; boundary=b\r\n\r\n" +
		"--b\r\nContent-Type: text/plain\r\n\r\nspam\r\n--b\r\nContent-Type: message/feedback-report\r\n\r\nFeedback-Type: abuse\r\nUser-Agent: x/1\r\nVersion: 1\r\nOriginal-Rcpt-To: " + to + "\r\n\r\n" +
		"--b\r\nContent-Type: text/rfc822-headers\r\n\r\n" + string(header) + "\r\n\r\n--b--\r\n")
}

// TestReports: what comes back later counts where it is about something that
// the inbox sent, and a forged one changes nothing.
func TestReports(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		d := deliver(t, db, delivery.Config{})
		a := d.send([]string{"bob@b.test", "carol@b.test"}, nil)
		d.run(1)
		good := d.report("5.1.1", "bob@b.test")
		forged := map[string][]byte{
			"another message":    bytes.ReplaceAll(good, []byte("Message-ID: <"), []byte("Message-ID: <x")),
			"without statement":  bytes.ReplaceAll(good, []byte("Postern-Statement:"), []byte("X-Statement:")),
			"a statement forged": bytes.ReplaceAll(good, []byte("by=policy"), []byte("by=person")),
			"somebody else":      bytes.ReplaceAll(good, []byte("bob@b.test"), []byte("eve@b.test")),
			"only delayed":       bytes.ReplaceAll(good, []byte("Action: failed"), []byte("Action: delayed")),
		}
		for name, raw := range forged {
			d.arrive(raw)
			if got := d.states(a.ID); got != "bob@b.test:delivered carol@b.test:delivered" {
				t.Errorf("%s: %s", name, got)
			}
		}
		// To another inbox of the project it is not about its own mail.
		f := d.fixture
		f.inbox(t, "buyer")
		if err := d.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{To: []string{"buyer@agents.test"}, Raw: good}}); err != nil {
			t.Fatal(err)
		}
		if got := d.states(a.ID); got != "bob@b.test:delivered carol@b.test:delivered" {
			t.Errorf("at another inbox: %s", got)
		}
		d.arrive(good)
		if got := d.states(a.ID); got != "bob@b.test:bounced carol@b.test:delivered" {
			t.Errorf("the true one: %s", got)
		}
		if s, err := d.post.Suppression.Find(t.Context(), d.project, "bob@b.test"); err != nil || s.Reason != delivery.SuppressedBounce {
			t.Errorf("suppressed: %+v, %v", s, err)
		}
		d.arrive(complaint(d.w.copies[0].Raw, "carol@b.test"))
		ds, err := d.post.Deliveries(t.Context(), d.agent, a.ID)
		if err != nil || ds[1].Complained.IsZero() || !ds[0].Complained.IsZero() {
			t.Errorf("after a complaint: %+v, %v", ds, err)
		}
		if s, err := d.post.Suppression.Find(t.Context(), d.project, "carol@b.test"); err != nil || s.Reason != delivery.SuppressedComplaint {
			t.Errorf("suppressed: %+v, %v", s, err)
		}
	})
}

// TestReportsAtOnce: more bounces at the same moment than there are connections
// to the database.
func TestReportsAtOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		d := deliver(t, db, delivery.Config{})
		a := d.send([]string{"bob@b.test"}, nil)
		d.run(1)
		raw := d.report("5.1.1", "bob@b.test")
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		var wg sync.WaitGroup
		for range 40 {
			wg.Go(func() {
				if err := d.post.Receive(ctx, mailbox.Arrival{Envelope: mail.Envelope{To: []string{a.Request.Inbox}, Raw: raw}}); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if got := d.states(a.ID); got != "bob@b.test:bounced" {
			t.Errorf("got %s, want it bounced", got)
		}
	})
}

// TestWhatLeaves: signature fields, then exactly the approved bytes; a hidden
// recipient gets a copy whose statement is for it alone.
func TestWhatLeaves(t *testing.T) {
	d := deliver(t, storetest.SQLite(t), delivery.Config{})
	a := d.send([]string{"bob@b.test", "carol@b.test"}, []string{"eve@b.test"})
	d.run(1)
	env, err := mail.ParsePayload(d.state(a.ID).Payload)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := d.ring.StatementKeys(t.Context(), "agents.test")
	if err != nil {
		t.Fatal(err)
	}
	if len(d.w.copies) != 2 {
		t.Fatalf("%d copies left, want one for those who are named and one for eve", len(d.w.copies))
	}
	for _, c := range d.w.copies {
		prefix, ok := bytes.CutSuffix(c.Raw, env.Raw)
		if !ok || bytes.Count(prefix, []byte("DKIM-Signature: ")) != 2 || !bytes.Contains(prefix, []byte("\r\nPostern-Statement: ")) || bytes.Contains(prefix, []byte("\r\n\r\n")) {
			t.Errorf("what left is not signature fields and then the approved bytes:\n%s", c.Raw)
		}
		for _, to := range []string{"bob@b.test", "carol@b.test", "eve@b.test", "mallory@b.test"} {
			_, err := statement.Verify(c.Raw, keys, statement.Options{Recipient: to})
			if got, want := err == nil, slices.Contains(c.To, to); got != want {
				t.Errorf("the copy to %v verifies for %s: %v (%v)", c.To, to, got, err)
			}
		}
		if bytes.Contains(c.Raw, []byte("eve@")) {
			t.Error("the hidden recipient is named")
		}
	}
}
