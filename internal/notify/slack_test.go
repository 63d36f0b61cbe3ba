package notify_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/notify"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// slackRoomOf sets up a room of the project; operator says who does.
func (f *fixture) slackRoomOf(operator bool) notify.Room {
	f.t.Helper()
	who := f.who("ann", auth.Owner)
	if operator {
		who = auth.Principal{Kind: auth.Person, ID: "local-root", Project: f.project, Role: auth.Owner, Operator: true}
	}
	r, err := f.n.AddRoom(f.t.Context(), who, notify.NewRoom{Kind: notify.Slack, Name: "approvals", Channel: slackRoom, Token: slackToken, Signing: slackSigning})
	if err != nil {
		f.t.Fatal(err)
	}
	return r
}

// linkSlack links an account in Slack to a person, as people do: by pressing.
func (f *fixture) linkSlack(room notify.Room, name string, role auth.Role, user string, m *slackMessage) {
	f.t.Helper()
	if got := f.click(room, user, m, "approve", nil); got != http.StatusOK {
		f.t.Fatalf("press of an unlinked account: %d", got)
	}
	if err := f.n.LinkSlack(f.t.Context(), f.who(name, role), f.slackCode(user)); err != nil {
		f.t.Fatal(err)
	}
}

// slackCode returns the code that Slack showed last, to this account.
func (f *fixture) slackCode(user string) auth.Secret {
	f.t.Helper()
	told := f.slack.lastTold()
	_, rest, ok := strings.Cut(told, "15 minutes: ")
	if !ok || !strings.HasPrefix(told, user+": ") {
		f.t.Fatalf("Slack was told %q, want a code for %s", told, user)
	}
	code, _, _ := strings.Cut(rest, "\n")
	return auth.Secret(code)
}

func (f *fixture) wantTold(what string) {
	f.t.Helper()
	if got := f.slack.lastTold(); !strings.Contains(got, what) {
		f.t.Errorf("Slack was told %q, want %q", got, what)
	}
}

// TestSlack is a day in a channel: a message, a linked account, an approval, a
// rejection, and what the messages say afterwards.
func TestSlack(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		room := f.slackRoomOf(false)
		a := f.propose("Dear Bob, hello.")
		f.step()
		posted := f.slack.posted()
		if len(posted) != 1 {
			t.Fatalf("%d messages, want 1", len(posted))
		}
		m := posted[0]
		for _, want := range []string{"Dear Bob, hello.", "shop[.]example", "https://postern.example/console/actions/" + a.ID} {
			if !strings.Contains(m.flat(), want) {
				t.Errorf("the message lacks %q: %s", want, m.flat())
			}
		}
		if strings.Contains(m.flat(), "/look/") {
			t.Error("the message has a link that shows the action without signing in")
		}
		f.linkSlack(room, "bob", auth.Reviewer, "UBOB", m)
		if got := f.action(a.ID); got.State != oversight.Pending {
			t.Fatalf("the press of an unlinked account: %s", got.State)
		}
		f.click(room, "UBOB", m, "approve", nil)
		if got := f.action(a.ID); got.State != oversight.Approved || got.Decider != "person:bob" {
			t.Fatalf("%s by %q: %s", got.State, got.Decider, f.slack.lastTold())
		}
		f.wantTold("UBOB: Approved.")
		f.step()
		if m.edits != 1 || m.value("approve") != "" || !strings.Contains(m.flat(), "Approved by bob") || strings.Contains(m.flat(), "Dear Bob") {
			t.Errorf("after the decision: %d edits, %s", m.edits, m.flat())
		}
		f.click(room, "UBOB", m, "approve", func(c *slackClick) { c.value = forged(a) })
		f.wantTold("decided already")

		b := f.propose("Another one.")
		f.step()
		m = f.slack.posted()[1]
		f.click(room, "UBOB", m, "reject", nil)
		f.wantTold("write a reason")
		f.click(room, "UBOB", m, "reject", func(c *slackClick) { c.reason = "not to them" })
		if got := f.action(b.ID); got.State != oversight.Denied || got.Reason != "not to them" {
			t.Errorf("%s for %q", got.State, got.Reason)
		}
		if n := f.count(`select count(*) from audit_entry where verb = 'notify.decided'`); n != 2 {
			t.Errorf("%d decisions in a chat on the record, want 2", n)
		}
	})
}

// TestSlackForgeries are requests that nobody pressed, or that somebody else did.
func TestSlackForgeries(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		room := f.slackRoomOf(false)
		a := f.propose("Dear Bob, hello.")
		f.step()
		m := f.slack.posted()[0]
		f.linkSlack(room, "bob", auth.Reviewer, "UBOB", m)
		for _, c := range []struct {
			name   string
			change func(*slackClick)
			want   int
			told   string
		}{
			{"another key", func(c *slackClick) { c.secret = strings.Repeat("f", 32) }, http.StatusUnauthorized, ""},
			{"no key", func(c *slackClick) { c.secret = "" }, http.StatusUnauthorized, ""},
			{"six minutes old", func(c *slackClick) { c.at = c.at.Add(-6 * time.Minute) }, http.StatusUnauthorized, ""},
			{"from the future", func(c *slackClick) { c.at = c.at.Add(6 * time.Minute) }, http.StatusUnauthorized, ""},
			{"another type", func(c *slackClick) { c.kind = "view_submission" }, http.StatusBadRequest, ""},
			{"another channel", func(c *slackClick) { c.channel = "C9999999999" }, http.StatusOK, "does not belong"},
			{"another message", func(c *slackClick) { c.ts = "1700000000.999999" }, http.StatusOK, "does not belong"},
			{"another digest", func(c *slackClick) { c.value = c.value[:len(c.value)-1] + "z" }, http.StatusOK, "does not belong"},
			{"another action", func(c *slackClick) { c.value = "a:" + strings.Repeat("A", 26) + ":1:" + a.Hex()[:16] }, http.StatusOK, "does not belong"},
			{"no value", func(c *slackClick) { c.value = "" }, http.StatusOK, "does not belong"},
			{"the same name in another workspace", func(c *slackClick) { c.team = "T2" }, http.StatusOK, "is not linked"},
			{"a member who is not linked", func(c *slackClick) { c.user = "UMALLORY" }, http.StatusOK, "UMALLORY: Nothing was changed"},
		} {
			if got := f.click(room, "UBOB", m, "approve", c.change); got != c.want {
				t.Errorf("%s: %d, want %d", c.name, got, c.want)
			}
			if c.told != "" {
				f.wantTold(c.told)
			}
			if got := f.action(a.ID); got.State != oversight.Pending || got.Approvals != 0 {
				t.Fatalf("%s: %s, %d approvals", c.name, got.State, got.Approvals)
			}
		}
		// Nobody learns whether a room exists.
		body, h := f.slack.request(slackClick{user: "UBOB", team: "T1", channel: slackRoom, ts: m.ts, action: "approve", value: m.value("approve"), secret: slackSigning, at: time.Now(), kind: "block_actions"})
		if got := f.deliver(notify.Room{ID: "rom_" + strings.Repeat("A", 26)}, body, h); got != http.StatusUnauthorized {
			t.Errorf("a room that is none: %d", got)
		}
		// The signed request again: the first counts, the second is refused.
		f.judge.say(policy.Verdict{Approvers: 2})
		if got := f.deliver(room, body, h); got != http.StatusOK {
			t.Errorf("first: %d", got)
		}
		if got := f.deliver(room, body, h); got != http.StatusBadRequest {
			t.Errorf("replayed: %d, want 400", got)
		}
		if got := f.deliver(room, strings.Repeat("x", 300<<10), h); got != http.StatusRequestEntityTooLarge {
			t.Errorf("a large one: %d", got)
		}
	})
}

// TestSlackPressesTwice: however often and by whomever it is pressed, it counts once.
func TestSlackPressesTwice(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		room := f.slackRoomOf(true) // only the operator's room takes part where two must approve
		f.judge.say(policy.Verdict{Approvers: 2})
		a := f.propose("Dear Bob, hello.")
		f.step()
		m := f.slack.posted()[0]
		f.linkSlack(room, "bob", auth.Reviewer, "UBOB", m)
		for range 3 {
			f.click(room, "UBOB", m, "approve", nil)
		}
		f.wantTold("1 of 2")
		if got := f.action(a.ID); got.State != oversight.Pending || got.Approvals != 1 {
			t.Fatalf("%s with %d approvals, want 1 of 2", got.State, got.Approvals)
		}
		// The account cannot be linked to a second person.
		f.click(room, "UCAT", m, "approve", nil)
		code := f.slackCode("UCAT")
		if err := f.n.LinkSlack(t.Context(), f.who("cat", auth.Reviewer), code); err != nil {
			t.Fatal(err)
		}
		if err := f.n.LinkSlack(t.Context(), f.who("ann", auth.Owner), code); !errors.Is(err, notify.ErrCode) {
			t.Errorf("a used code: %v", err)
		}
		f.click(room, "UCAT", m, "approve", nil)
		if got := f.action(a.ID); got.State != oversight.Approved {
			t.Fatalf("after two people: %s, %s", got.State, f.slack.lastTold())
		}
	})
}

// TestSlackAsksForTheConsole: nothing is decided in a chat without the rule's word, or
// for what is not wholly there.
func TestSlackAsksForTheConsole(t *testing.T) {
	for _, c := range []struct {
		name    string
		verdict policy.Verdict
		console bool
		text    string
		flags   []string
		found   []policy.Finding
		view    func(*oversight.View)
	}{
		{name: "the rule says nothing of chats", console: true},
		{name: "a second factor", verdict: policy.Verdict{StepUp: true}},
		{name: "a long text", text: strings.Repeat("word ", 700)},
		{name: "a finding", flags: []string{"secret"}},
		{name: "an attachment", view: func(v *oversight.View) { v.Files = []oversight.File{{Name: "a.pdf"}} }},
		{name: "HTML", view: func(v *oversight.View) { v.HTML = []byte("<p>x") }},
		{name: "a hidden recipient", found: []policy.Finding{{ID: "hidden_recipient:x@y.example", Kind: "hidden_recipient", Subject: "x@y.example", Title: "a hidden recipient"}}},
		{name: "a warning", view: func(v *oversight.View) { v.Notes = []string{"look closely"} }},
		{name: "a view that is not whole", view: func(v *oversight.View) { v.Partial = "the parts' boundaries" }},
		{name: "no way to deliver", view: func(v *oversight.View) { v.Unroutable = []string{"x.example"} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				f := setup(t, db, func(conf *notify.Config) { conf.From, conf.TelegramToken = "", "" })
				room := f.slackRoomOf(false)
				f.judge.onlyConsole(c.console)
				f.judge.say(c.verdict)
				f.effect.view, f.found = c.view, c.found
				a := f.flagged(or(c.text, "Dear Bob, hello."), c.flags)
				f.step()
				posted := f.slack.posted()
				if len(posted) != 1 {
					t.Fatalf("%s: %d messages", c.name, len(posted))
				}
				m := posted[0]
				if m.value("approve") != "" || m.value("reject") != "" || strings.Contains(m.flat(), "Dear Bob") {
					t.Errorf("%s: the message decides: %s", c.name, m.flat())
				}
				// The attack: the button is made up.
				f.click(room, "UBOB", m, "approve", func(c *slackClick) { c.value = forged(a) })
				if err := f.n.LinkSlack(t.Context(), f.who("bob", auth.Reviewer), f.slackCode("UBOB")); err != nil {
					t.Fatal(err)
				}
				f.click(room, "UBOB", m, "approve", func(c *slackClick) { c.value = forged(a) })
				if got := f.action(a.ID); got.State != oversight.Pending {
					t.Errorf("%s: %s", c.name, got.State)
				}
			})
		})
	}
}

// TestPolicyTakesChatAway: a rule that says nothing of chats any more also stops the
// buttons that were sent before.
func TestPolicyTakesChatAway(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		room := f.slackRoomOf(false)
		f.link("bob", auth.Reviewer, 77)
		a := f.propose("Dear Bob, hello.")
		f.step()
		m := f.slack.posted()[0]
		f.linkSlack(room, "bob", auth.Reviewer, "UBOB", m)
		tg := f.chats.last(77)
		f.judge.onlyConsole(true)
		f.click(room, "UBOB", m, "approve", nil)
		f.wantTold("Policy does not let a chat decide")
		f.chats.press(77, 77, tg.id, tg.data(t, "Approve"))
		f.poll()
		if got := f.chats.answered(); !strings.Contains(got, "Policy does not let a chat decide") {
			t.Errorf("Telegram says %q", got)
		}
		if got := f.action(a.ID); got.State != oversight.Pending {
			t.Errorf("%s", got.State)
		}
		b := f.propose("A second one.")
		f.step()
		if got := f.chats.last(77); len(got.buttons()) != 0 {
			t.Errorf("Telegram has the buttons %q for %s", got.buttons(), b.ID)
		}
	})
}

// TestSlackOfAnotherProject: a room and its people are one project's.
func TestSlackOfAnotherProject(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		room := f.slackRoomOf(false)
		a := f.propose("Dear Bob, hello.")
		f.step()
		m := f.slack.posted()[0]
		f.click(room, "UEVE", m, "approve", nil)
		code := f.slackCode("UEVE")
		var other string
		f.update(func(tx *store.Tx) (err error) {
			other, _, err = auth.NewProject(t.Context(), tx, "two")
			return err
		})
		f.exec(`insert into person (id, project_id, name, password, created_at, role, email) values ('per_eve', $1, 'eve', 'x', 1, 'owner', '')`, other)
		eve := auth.Principal{Kind: auth.Person, ID: "eve", Project: other, Role: auth.Owner}
		if err := f.n.LinkSlack(t.Context(), eve, code); !errors.Is(err, notify.ErrCode) {
			t.Errorf("a code of another project: %v", err)
		}
		if err := f.n.RemoveRoom(t.Context(), eve, room.ID); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("remove another project's room: %v", err)
		}
		if rooms, err := f.n.Rooms(t.Context(), eve); err != nil || len(rooms) != 0 {
			t.Errorf("rooms of another project: %v, %v", rooms, err)
		}
		// The attack: her own room, whose secret she knows, and another project's action.
		theirs, err := f.n.AddRoom(t.Context(), eve, notify.NewRoom{Kind: notify.Slack, Name: "hers", Channel: slackRoom, Token: slackToken, Signing: slackSigning})
		if err != nil {
			t.Fatal(err)
		}
		f.click(theirs, "UEVE", m, "approve", nil)
		if err := f.n.LinkSlack(t.Context(), eve, f.slackCode("UEVE")); err != nil {
			t.Fatal(err)
		}
		f.click(theirs, "UEVE", m, "approve", nil)
		f.wantTold("does not belong")
		f.click(room, "UEVE", m, "approve", nil) // she is linked, but no person of this project
		f.wantTold("is not linked")
		if got := f.action(a.ID); got.State != oversight.Pending {
			t.Errorf("%s", got.State)
		}
	})
}

// TestOwnerSignsForOthers is an owner who set the room up, and so can sign presses of
// colleagues: they count only where the owner alone could decide.
func TestOwnerSignsForOthers(t *testing.T) {
	for _, v := range []policy.Verdict{{Approvers: 2}, {Who: []string{"bob"}}} {
		storetest.Each(t, func(t *testing.T, db *store.DB) {
			f := setup(t, db, func(conf *notify.Config) { conf.From, conf.TelegramToken = "", "" })
			room := f.slackRoomOf(false)
			f.judge.say(v)
			a := f.propose("Dear Bob, hello.")
			f.step()
			m := f.slack.posted()[0]
			f.linkSlack(room, "bob", auth.Reviewer, "UBOB", m)
			f.click(room, "UBOB", m, "approve", nil)
			f.wantTold("could press for others")
			if got := f.action(a.ID); got.State != oversight.Pending || got.Approvals != 0 {
				t.Errorf("%v: %s, %d approvals", v, got.State, got.Approvals)
			}
		})
	}
}

// TestFormerOwnerSignsForOthers is an owner who set the room up and lost the role or the
// account: they still know the secret with which Slack signs, and sign a colleague's press.
func TestFormerOwnerSignsForOthers(t *testing.T) {
	for _, tt := range []struct{ name, then string }{
		{"a viewer now", `update person set role = 'viewer' where id = 'per_ann'`},
		{"a reviewer now", `update person set role = 'reviewer' where id = 'per_ann'`},
		{"disabled", `update person set disabled_at = 1 where id = 'per_ann'`},
		{"removed", `delete from person where id = 'per_ann'`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				f := setup(t, db, func(conf *notify.Config) { conf.From, conf.TelegramToken = "", "" })
				room := f.slackRoomOf(false)
				a := f.propose("Dear Bob, hello.")
				f.step()
				m := f.slack.posted()[0]
				f.linkSlack(room, "bob", auth.Reviewer, "UBOB", m)
				f.exec(tt.then)
				f.click(room, "UBOB", m, "approve", nil)
				f.wantTold("could press for others")
				if got := f.action(a.ID); got.State != oversight.Pending || got.Approvals != 0 {
					t.Errorf("%s, %d approvals", got.State, got.Approvals)
				}
			})
		})
	}
}

// TestOwnerSignsForOwnWords is an owner who proposes something, and signs a colleague's
// press with the secret of the room that they set up.
func TestOwnerSignsForOwnWords(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(conf *notify.Config) { conf.From, conf.TelegramToken = "", "" })
		room := f.slackRoomOf(false)
		f.agent = f.who("ann", auth.Owner)
		a := f.propose("Dear Bob, hello.")
		f.step()
		m := f.slack.posted()[0]
		f.linkSlack(room, "bob", auth.Reviewer, "UBOB", m)
		f.click(room, "UBOB", m, "approve", nil)
		f.wantTold("could press for others")
		if got := f.action(a.ID); got.State != oversight.Pending || got.Approvals != 0 {
			t.Errorf("%s, %d approvals", got.State, got.Approvals)
		}
	})
}

// TestForgedSlackLink is who can write the database and links an account of theirs.
func TestForgedSlackLink(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		room := f.slackRoomOf(false)
		a := f.propose("Dear Bob, hello.")
		f.step()
		m := f.slack.posted()[0]
		f.update(func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `insert into slack_link (person_id, team_id, user_id, name, at) values ('per_bob', 'T1', 'UMALLORY', 'm', 1)`)
			return err
		})
		f.click(room, "UMALLORY", m, "approve", nil)
		f.wantTold("is not linked")
		if got := f.action(a.ID); got.State != oversight.Pending {
			t.Errorf("%s", got.State)
		}
	})
}

// TestSlackReadsNoMarkup: an agent's text notifies nobody, and links nowhere.
func TestSlackReadsNoMarkup(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.slackRoomOf(false)
		evil := "<!channel> <@U123> <https://evil.example|the console> *bold* &lt;!here&gt; :tada: " + strings.Repeat("\u202e", 3)
		f.propose(evil, "a@<!channel>.example")
		f.step()
		m := f.slack.posted()[0] // checkBlocks has refused any mrkdwn
		if strings.Contains(m.text, "evil") || strings.Contains(m.text, "<") {
			t.Errorf("the text for lists has an agent's words: %q", m.text)
		}
		for _, b := range m.blocks {
			if b["type"] == "section" || b["type"] == "header" {
				if s := b["text"].(map[string]any)["text"].(string); strings.ContainsAny(s, "<>") || strings.Contains(s, "evil.example") {
					t.Errorf("a block that Slack could read as markup: %q", s)
				}
			}
		}
		if strings.Contains(m.flat(), "\u202e") {
			t.Error("invisible characters are not shown")
		}
	})
}

// TestSlackErrors: what certainly was not taken is sent again, and nothing else.
func TestSlackErrors(t *testing.T) {
	for _, c := range []struct {
		name  string
		fail  func(w http.ResponseWriter)
		state string
		wait  time.Duration
	}{
		{"rate limited", func(w http.ResponseWriter) { w.Header().Set("Retry-After", "90"); w.WriteHeader(429) }, "waiting", 80 * time.Second},
		{"wrong token", func(w http.ResponseWriter) { _, _ = w.Write([]byte(`{"ok":false,"error":"token_revoked"}`)) }, "waiting", time.Second},
		{"blocks", func(w http.ResponseWriter) { _, _ = w.Write([]byte(`{"ok":false,"error":"invalid_blocks"}`)) }, "failed", 0},
		{"a failure inside", func(w http.ResponseWriter) { w.WriteHeader(500) }, "sent", 0},
		{"no JSON", func(w http.ResponseWriter) { _, _ = w.Write([]byte("<html>")) }, "sent", 0},
		{"a bomb", func(w http.ResponseWriter) {
			for range 64 {
				_, _ = w.Write(make([]byte, 1<<20))
			}
		}, "sent", 0},
		{"a redirect", func(w http.ResponseWriter) { w.Header().Set("Location", "https://evil.example/"); w.WriteHeader(302) }, "failed", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				f := setup(t, db, func(conf *notify.Config) { conf.From, conf.TelegramToken = "", "" })
				room := f.slackRoomOf(false)
				f.slack.failing(func(_ string, w http.ResponseWriter) bool { c.fail(w); return true })
				f.propose("Dear Bob, hello.")
				f.step()
				if n := f.count(`select count(*) from notice where person_id = $1 and state = $2 and due_at >= $3`, room.ID, c.state, map[bool]int64{true: store.Time(time.Now().Add(c.wait)), false: 0}[c.wait > 0]); n != 1 {
					t.Errorf("%s: %d notices in state %s, want 1", c.name, n, c.state)
				}
				rooms, err := f.n.Rooms(t.Context(), f.who("vic", auth.Viewer))
				if err != nil || len(rooms) != 1 || rooms[0].Failed == "" || strings.Contains(rooms[0].Failed, slackToken) {
					t.Errorf("%s: the room says %v, %v", c.name, rooms, err)
				}
			})
		})
	}
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// FuzzParseSlackPress: a body that is taken is one press of one button, by somebody. Slack
// signs what people make, so all of it is hostile.
func FuzzParseSlackPress(f *testing.F) {
	press := `{"type":"block_actions","team":{"id":"T1"},"user":{"id":"U1","username":"x","team_id":"T1"},"channel":{"id":"C1"},"container":{"message_ts":"1.2"},` +
		`"actions":[{"action_id":"approve","value":"a:ABC:1:0123456789abcdef"}],"state":{"values":{"reason":{"reason":{"value":"no"}}}}}`
	for _, s := range []string{
		"payload=" + url.QueryEscape(press), "payload=" + url.QueryEscape(press) + "&payload=%7B%7D", "payload=" + url.QueryEscape(strings.Replace(press, `"user":{"id":"U1"`, `"user":{"id":""`, 1)),
		"payload=" + url.QueryEscape(strings.Replace(press, `"actions":[`, `"actions":[{},`, 1)), "payload=" + url.QueryEscape(strings.Replace(press, "block_actions", "view_submission", 1)),
		"payload=" + url.QueryEscape(strings.Replace(press, `"value":"no"`, `"value":null`, 1)), "payload=%7B", "payload=", "", "%zz", ";payload={}", press, "payload=" + url.QueryEscape(press+press),
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if !notify.ParseSlackPress(body) {
			return
		}
		form, err := url.ParseQuery(string(body))
		if err != nil || len(form["payload"]) != 1 {
			t.Fatalf("%q was taken: %v", body, err)
		}
		var p struct {
			Type    string
			User    struct{ ID string }
			Actions []any
		}
		if err := json.Unmarshal([]byte(form.Get("payload")), &p); err != nil || p.Type != "block_actions" || p.User.ID == "" || len(p.Actions) != 1 {
			t.Errorf("%q was taken as a press: %+v, %v", body, p, err)
		}
	})
}
