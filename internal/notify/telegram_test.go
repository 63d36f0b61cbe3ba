package notify_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf16"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/notify"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

const bobs, anns, strangers = 1001, 1002, 6666 // users, and their chats, in Telegram

// chatting returns a fixture whose bob has linked a chat, without mail.
func chatting(t *testing.T, db *store.DB, change func(*notify.Config)) *fixture {
	t.Helper()
	f := setup(t, db, func(c *notify.Config) {
		c.From = ""
		if change != nil {
			change(c)
		}
	})
	f.link("bob", auth.Reviewer, bobs)
	return f
}

// TestTelegram: what waits is shown in the chat with all that would leave, is
// decided there as the person whose chat it is, and the message says so then.
func TestTelegram(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := chatting(t, db, nil)
		text := "Dear Bob,\nsee https://evil.example/ and @evil_bot /stop \U0001F600 <b>x</b> *y*\u202e"
		a := f.propose(text)
		f.step(f.n, f.notifier())
		m := f.chats.last(bobs)
		if n := len(f.chats.in(bobs)); n != 2 { // with the word that it is linked
			t.Fatalf("%d messages, want 2", n)
		}
		for _, want := range []string{"An email waits for your decision.", "recipients: 1, at shop[.]example", "https://evil.example/ and @evil_bot /stop", `\u{202e}`, "To: bob@shop.example", a.Hex()[:16], "https://postern.example/look/"} {
			if !strings.Contains(m.text, want) {
				t.Errorf("the message does not say %q:\n%s", want, m.text)
			}
		}
		if !strings.Contains(m.preset, `"is_disabled":true`) {
			t.Errorf("Telegram's servers fetch the link: %q", m.preset)
		}
		f.onlyQuoted(m, "evil", "bob@")
		for _, b := range m.buttons() {
			if _, data, _ := strings.Cut(b, " "); len(data) > 64 {
				t.Errorf("a button sends %d bytes, Telegram takes 64", len(data))
			}
		}
		f.chats.press(bobs, bobs, m.id, m.data(t, "Approve"))
		f.poll()
		if got := f.chats.answered(); got != "Approved." {
			t.Errorf("the bot says %q", got)
		}
		if got := f.action(a.ID); got.State != oversight.Approved || got.Decider != "person:bob" {
			t.Fatalf("the action is %s by %q", got.State, got.Decider)
		}
		f.step()
		m = f.chats.last(bobs)
		if !strings.Contains(m.text, "Approved by bob.") || len(m.buttons()) != 0 || strings.Contains(m.text, "evil") {
			t.Errorf("the message is now %q with %v", m.text, m.buttons())
		}
		f.step()
		if m := f.chats.last(bobs); m.edits != 1 {
			t.Errorf("it was edited %d times", m.edits)
		}
	})
}

// onlyQuoted fails the test if a word of an agent's stands outside of what is
// marked as preformatted, where nothing is made a link.
func (f *fixture) onlyQuoted(m chatMessage, words ...string) {
	f.t.Helper()
	var marks []struct {
		Type           string
		Offset, Length int
	}
	if err := json.Unmarshal([]byte(m.marks), &marks); err != nil {
		f.t.Fatalf("entities %q: %v", m.marks, err)
	}
	units := utf16.Encode([]rune(m.text))
	for _, k := range marks {
		if k.Type != "pre" {
			f.t.Errorf("an entity of type %s", k.Type)
		}
		for i := k.Offset; i < k.Offset+k.Length; i++ {
			units[i] = '.'
		}
	}
	for _, w := range words {
		if strings.Contains(string(utf16.Decode(units)), w) {
			f.t.Errorf("%q stands outside of what is quoted:\n%s", w, string(utf16.Decode(units)))
		}
	}
}

// TestTelegramReject: a rejection asks for its reason and is none without.
func TestTelegramReject(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := chatting(t, db, nil)
		a := f.propose("text")
		f.step()
		m := f.chats.last(bobs)
		f.chats.press(bobs, bobs, m.id, m.data(t, "Reject"))
		f.poll()
		if got := f.action(a.ID).State; got != oversight.Pending {
			t.Fatalf("it is %s before a reason was given", got)
		}
		q := f.chats.last(bobs)
		if !strings.Contains(q.text, "why do you reject it") || !strings.Contains(q.markup, "force_reply") {
			t.Fatalf("the bot asks %q %q", q.text, q.markup)
		}
		f.chats.write(bobs, "no reply to anything", 0)
		f.chats.write(strangers, "I say no", q.id) // somebody else's answer to a message of that number
		f.chats.write(bobs, strings.Repeat("x", 1001), q.id)
		f.poll()
		if got := f.action(a.ID).State; got != oversight.Pending {
			t.Fatalf("it is %s", got)
		}
		if got := f.chats.last(bobs).text; !strings.Contains(got, "1 to 1000") {
			t.Errorf("the bot says %q", got)
		}
		f.chats.write(bobs, "the price is wrong", q.id)
		f.poll()
		got := f.action(a.ID)
		if got.State != oversight.Denied || got.Reason != "the price is wrong" || got.Decider != "person:bob" {
			t.Errorf("it is %s by %q: %q", got.State, got.Decider, got.Reason)
		}
		f.step()
		b := f.propose("another")
		f.step()
		f.chats.write(bobs, "once more", q.id) // the question is answered
		f.poll()
		if got := f.action(b.ID).State; got != oversight.Pending {
			t.Errorf("an old question decides on something else: %s", got)
		}
	})
}

// TestForgedPresses: a button decides only from the very message that asked this
// person this, pressed by the linked user in the linked chat, and not twice.
func TestForgedPresses(t *testing.T) {
	f := chatting(t, storetest.SQLite(t), nil)
	f.link("ann", auth.Owner, anns)
	f.judge.say(policy.Verdict{Who: []string{"bob"}})
	a := f.propose("text")
	f.step()
	m := f.chats.last(bobs)
	good := m.data(t, "Approve")
	parts := strings.Split(good, ":")
	with := func(i int, s string) string {
		p := slices.Clone(parts)
		p[i] = s
		return strings.Join(p, ":")
	}
	f.judge.say(policy.Verdict{Who: []string{"ann"}})
	b := f.propose("for ann alone")
	f.step()
	anns1 := f.chats.last(anns)
	for _, tt := range []struct {
		name       string
		user, chat int64
		message    int
		data       string
	}{
		{"a stranger in a chat of their own", strangers, strangers, m.id, good},
		{"a stranger who names bob's chat", strangers, bobs, m.id, good},
		{"bob's user in another chat", bobs, strangers, m.id, good},
		{"another person's chat", anns, anns, m.id, good},
		{"another person in bob's chat", anns, bobs, m.id, good},
		{"another message", bobs, bobs, m.id + 40, good},
		{"no message", bobs, bobs, 0, good},
		{"another action, under this message", bobs, bobs, m.id, with(1, strings.TrimPrefix(b.ID, "act_"))},
		{"what asks ann alone, with her button's data", bobs, bobs, m.id, anns1.data(t, "Approve")},
		{"another version", bobs, bobs, m.id, with(2, "2")},
		{"version 0", bobs, bobs, m.id, with(2, "0")},
		{"another digest", bobs, bobs, m.id, with(3, strings.Repeat("0", 16))},
		{"a short digest", bobs, bobs, m.id, with(3, parts[3][:8])},
		{"no digest", bobs, bobs, m.id, with(3, "")},
		{"an unknown verb", bobs, bobs, m.id, with(0, "x")},
		{"nothing", bobs, bobs, m.id, ""},
		{"SQL", bobs, bobs, m.id, "a:' or '1'='1:1:" + parts[3]},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f.chats.press(tt.user, tt.chat, tt.message, tt.data)
			f.poll()
			if f.action(a.ID).State != oversight.Pending || f.action(b.ID).State != oversight.Pending {
				t.Fatal("it decided")
			}
		})
	}
	if got := f.count(`select count(*) from audit_entry where verb in ('action.approve', 'action.reject', 'action.vote')`); got != 0 {
		t.Errorf("%d decisions on the record", got)
	}
	f.chats.press(bobs, bobs, m.id, good)
	f.chats.press(bobs, bobs, m.id, good)
	f.poll()
	if got := f.action(a.ID); got.State != oversight.Approved {
		t.Fatalf("the true one does not: %s, %q", got.State, f.chats.answered())
	}
	if got := f.chats.answered(); !strings.Contains(got, "decided already") {
		t.Errorf("the second time the bot says %q", got)
	}
	if got := f.count(`select count(*) from audit_entry where verb = 'action.approve'`); got != 1 {
		t.Errorf("%d approvals on the record, want 1", got)
	}
}

// TestTelegramShowsOrRefuses: what the message does not show whole has no button that
// decides, and a button's data made up for it does not approve either.
func TestTelegramShowsOrRefuses(t *testing.T) {
	for _, tt := range []struct {
		name    string
		verdict policy.Verdict
		conf    func(*notify.Config)
		view    func(*oversight.View)
		text    string
		flags   []string
		says    string // to who presses all the same
	}{
		{"second factor", policy.Verdict{StepUp: true}, nil, nil, "text", nil, "second factor"},
		{"what is masked", policy.Verdict{}, nil, nil, "the password is ****", []string{"secret"}, "does not show all"},
		{"a file", policy.Verdict{}, nil, func(v *oversight.View) { v.Files = []oversight.File{{Name: "a.pdf"}} }, "text", nil, "does not show all"},
		{"HTML", policy.Verdict{}, nil, func(v *oversight.View) { v.HTML = []byte("<p>x") }, "text", nil, "does not show all"},
		{"octets that are not shown", policy.Verdict{}, nil, func(v *oversight.View) { v.Partial = "40 octets of it are not shown" }, "text", nil, "does not show all"},
		{"long", policy.Verdict{}, nil, nil, strings.Repeat("\U0001F600", 1950), nil, "does not show all"},
		{"a field of long letters", policy.Verdict{}, nil, func(v *oversight.View) {
			v.Fields = append(v.Fields, oversight.Field{Name: "X-Data", Value: strings.Repeat("漢", 6000) + "the end"})
		}, "text", nil, "does not show all"},
		{"a note of long letters", policy.Verdict{}, nil, func(v *oversight.View) { v.Notes = []string{strings.Repeat("漢", 6000) + "the end"} }, "text", nil, "does not show all"},
		{"nothing leaves this server", policy.Verdict{}, func(c *notify.Config) { c.TelegramOmitContent = true }, nil, "SECRET", nil, "does not show all"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := chatting(t, storetest.SQLite(t), tt.conf)
			f.judge.say(tt.verdict)
			f.effect.view = tt.view
			a := f.flagged(tt.text, tt.flags)
			f.step()
			m := f.chats.last(bobs)
			want := 0 // a second factor can be asked for in the console alone, but anybody may say no
			if tt.verdict.StepUp {
				want = 1
			}
			if len(m.buttons()) != want || want == 1 && !strings.HasPrefix(m.buttons()[0], "Reject ") {
				t.Errorf("buttons %v, want %d, and never Approve", m.buttons(), want)
			}
			if strings.Contains(m.text, "SECRET") {
				t.Errorf("the message holds content:\n%s", m.text)
			}
			f.chats.press(bobs, bobs, m.id, forged(a))
			f.poll()
			if got := f.action(a.ID).State; got != oversight.Pending {
				t.Errorf("it is %s", got)
			}
			if got := f.chats.answered(); !strings.Contains(got, tt.says) {
				t.Errorf("the bot says %q, want %q", got, tt.says)
			}
		})
	}
}

// TestChangedBetweenLookAndPress: what is written anew, or decided elsewhere,
// between the message and the press is not decided by it.
func TestChangedBetweenLookAndPress(t *testing.T) {
	f := chatting(t, storetest.SQLite(t), nil)
	a := f.propose("first")
	f.step()
	m := f.chats.last(bobs)
	f.update(func(tx *store.Tx) error {
		_, err := f.gate.Revise(t.Context(), tx, f.agent, a.ID, 1, oversight.Proposal{Request: policy.Request{Kind: "email.send"}, Inbox: "ibx_1", Via: "rest", Payload: []byte("second")})
		return err
	})
	f.chats.press(bobs, bobs, m.id, m.data(t, "Approve"))
	f.poll()
	if got := f.action(a.ID); got.State != oversight.Pending || got.Decider != "" {
		t.Fatalf("an old button approved what was written anew: %s", got.State)
	}
	f.step()
	ms := f.chats.in(bobs)
	if old := ms[1]; !strings.Contains(old.text, "was edited") || len(old.buttons()) != 0 {
		t.Errorf("the old message says %q with %v", old.text, old.buttons())
	}
	m = f.chats.last(bobs)
	if !strings.Contains(m.text, "second") {
		t.Fatalf("the new version was not announced:\n%s", m.text)
	}
	// The person said no to the first; the question is about that one alone.
	f.chats.press(bobs, bobs, m.id, m.data(t, "Reject"))
	f.poll()
	q := f.chats.last(bobs)
	f.update(func(tx *store.Tx) error {
		_, err := f.gate.Revise(t.Context(), tx, f.agent, a.ID, 2, oversight.Proposal{Request: policy.Request{Kind: "email.send"}, Inbox: "ibx_1", Via: "rest", Payload: []byte("third")})
		return err
	})
	f.chats.write(bobs, "no", q.id)
	f.poll()
	if got := f.action(a.ID).State; got != oversight.Pending {
		t.Errorf("a reason for the second decided on the third: %s", got)
	}
	// The database changed under it.
	f.step()
	m = f.chats.last(bobs)
	f.exec(`update action set payload = $1`, []byte("fourth"))
	f.chats.press(bobs, bobs, m.id, m.data(t, "Approve"))
	f.poll()
	if got := f.action(a.ID).State; got != oversight.Pending {
		t.Errorf("a payload that was changed in the database was approved: %s", got)
	}
}

// TestTwoPersonsInTelegram: with two approvals needed one person's button counts
// once, and two people at once are two.
func TestTwoPersonsInTelegram(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := chatting(t, db, nil)
		f.link("ann", auth.Owner, anns)
		f.judge.say(policy.Verdict{Approvers: 2})
		a := f.propose("text")
		f.step()
		mb, ma := f.chats.last(bobs), f.chats.last(anns)
		f.chats.press(bobs, bobs, mb.id, mb.data(t, "Approve"))
		f.chats.press(bobs, bobs, mb.id, mb.data(t, "Approve"))
		f.poll()
		if got := f.action(a.ID); got.State != oversight.Pending || got.Approvals != 1 {
			t.Fatalf("after bob's two presses it is %s with %d approvals", got.State, got.Approvals)
		}
		if got := f.chats.answered(); got != "Recorded: 1 of 2 approvals." {
			t.Errorf("the bot says %q", got)
		}
		// Ann presses and a second reviewer rejects in the console at the same time: one of them counts.
		var wg sync.WaitGroup
		f.chats.press(anns, anns, ma.id, ma.data(t, "Approve"))
		var console error
		wg.Go(func() {
			console = f.gate.Decide(context.WithoutCancel(t.Context()), f.who("cat", auth.Reviewer), decision(a, false))
		})
		wg.Go(f.poll)
		wg.Wait()
		got := f.action(a.ID)
		switch {
		case got.State == oversight.Approved && errors.Is(console, oversight.ErrStale):
		case got.State == oversight.Denied && console == nil && strings.Contains(f.chats.answered(), "decided already"):
		default:
			t.Errorf("it is %s, the console said %v and the bot %q", got.State, console, f.chats.answered())
		}
		f.step()
		for _, chat := range []int64{bobs, anns} {
			if m := f.chats.last(chat); m.edits != 1 || len(m.buttons()) != 0 {
				t.Errorf("chat %d: %q has still %v", chat, m.text, m.buttons())
			}
		}
	})
}

// TestLinkingAChat: a code is good once, for a while, in a chat of two, and one
// account is one person.
func TestLinkingAChat(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ann, bob := f.who("ann", auth.Owner), f.who("bob", auth.Reviewer)
		links := func() int { return f.count(`select count(*) from telegram_link`) }
		for _, tt := range []struct {
			name string
			who  auth.Principal
			err  error
		}{
			{"an owner for another: one person would decide as two", ann, auth.ErrForbidden},
			{"another person", f.who("cat", auth.Reviewer), auth.ErrForbidden},
			{"an agent that has bob's name", auth.Principal{Kind: auth.Agent, ID: "bob", Project: f.project}, auth.ErrForbidden},
			{"a sandbox that has bob's name", auth.Principal{Kind: auth.Sandbox, ID: "bob", Project: f.project}, auth.ErrForbidden},
			{"a bob of another project", auth.Principal{Kind: auth.Person, ID: "bob", Project: "prj_other", Role: auth.Reviewer}, store.ErrNotFound},
			{"bob", bob, nil},
			{"the operator at the machine", auth.Principal{Kind: auth.Person, ID: "local-root", Project: f.project, Role: auth.Owner, Operator: true}, nil},
		} {
			if _, _, err := f.n.Code(t.Context(), tt.who, "bob"); !errors.Is(err, tt.err) {
				t.Errorf("%s: %v, want %v", tt.name, err, tt.err)
			}
			// The attack: the operator links his own phone to bob, and approves as both.
			want := bob.String()
			if tt.who.Operator {
				want = "" // who may be anybody
			}
			f.update(func(tx *store.Tx) error {
				roll, err := auth.ReadRoll(t.Context(), tx, f.project, time.Now())
				if got := roll.Human(bob.String()); got != want {
					t.Errorf("after %s has asked for a code bob counts as %q, want %q", tt.name, got, want)
				}
				return err
			})
		}
		code := func(who auth.Principal) string {
			c, _, err := f.n.Code(t.Context(), who, who.ID)
			if err != nil {
				t.Fatal(err)
			}
			return c.Reveal()
		}
		old := code(bob)
		c := code(bob)
		for name, do := range map[string]func(){
			"a code that was replaced": func() { f.chats.write(bobs, "/start "+old, 0) },
			"made up":                  func() { f.chats.write(bobs, "/start "+strings.Repeat("A", 26), 0) },
			"no code":                  func() { f.chats.write(bobs, "/start ' or 1=1", 0) },
			"in a group": func() {
				f.chats.add(map[string]any{"message": map[string]any{"message_id": 1, "date": 1, "from": user(bobs), "chat": map[string]any{"id": -5, "type": "group"}, "text": "/start " + c}})
			},
			"by a channel": func() {
				f.chats.add(map[string]any{"message": map[string]any{"message_id": 1, "date": 1, "chat": map[string]any{"id": -6, "type": "channel"}, "text": "/start " + c}})
			},
		} {
			do()
			f.poll()
			if links() != 0 {
				t.Fatalf("%s: it is linked", name)
			}
		}
		if got := f.count(`select count(*) from telegram_code where hash = $1`, c); got != 0 {
			t.Error("the code is stored as it is")
		}
		f.chats.write(bobs, "/start "+c, 0)
		f.chats.write(strangers, "/start "+c, 0) // who saw it over a shoulder
		f.poll()
		if links() != 1 || f.count(`select count(*) from telegram_link where user_id = $1 and person_id = 'per_bob'`, bobs) != 1 {
			t.Fatal("the code did not link bob once")
		}
		// The same account for ann.
		f.chats.write(bobs, "/start "+code(ann), 0)
		f.poll()
		if got := f.chats.last(bobs).text; links() != 1 || !strings.Contains(got, "already linked to another person") {
			t.Errorf("one account is two people: the bot says %q", got)
		}
		// An expired code.
		c = code(ann)
		f.exec(`update telegram_code set expires_at = 1 where used_at = 0`)
		f.chats.write(anns, "/start "+c, 0)
		f.poll()
		if links() != 1 {
			t.Error("an expired code is good")
		}
		// Bob takes another phone: the old one is out.
		f.chats.write(1003, "/start "+code(bob), 0)
		f.poll()
		if links() != 1 || f.count(`select count(*) from telegram_link where user_id = 1003`) != 1 {
			t.Error("the new phone is not the only one")
		}
		if err := f.n.Unlink(t.Context(), f.who("cat", auth.Reviewer), "bob"); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("cat ends bob's link: %v", err)
		}
		f.chats.write(1003, "/stop", 0)
		f.poll()
		if links() != 0 {
			t.Error("/stop did not end it")
		}
		f.chats.write(1003, "/start "+code(bob), 0)
		f.poll()
		if err := f.n.Unlink(t.Context(), ann, "bob"); err != nil || links() != 0 {
			t.Errorf("an owner does not end it: %v", err)
		}
		before := len(f.chats.in(strangers))
		f.chats.write(strangers, "hello?", 0)
		f.poll()
		if len(f.chats.in(strangers)) != before {
			t.Error("the bot answers strangers")
		}
	})
}

// TestWhoLeftPressesNothing: rights are read when a button is pressed.
func TestWhoLeftPressesNothing(t *testing.T) {
	for _, tt := range []struct{ name, change string }{
		{"disabled", `update person set disabled_at = 1 where name = 'bob'`},
		{"a viewer now", `update person set role = 'viewer' where name = 'bob'`},
		{"unlinked", `delete from telegram_link`},
		{"policy asks another now", `update action set who = 'ann'`},
		{"expired", `update action set expires_at = 5`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := chatting(t, storetest.SQLite(t), nil)
			a := f.propose("text")
			f.step()
			m := f.chats.last(bobs)
			f.chats.press(bobs, bobs, m.id, m.data(t, "Reject"))
			f.poll()
			q := f.chats.last(bobs)
			f.exec(tt.change)
			f.chats.press(bobs, bobs, m.id, m.data(t, "Approve"))
			f.chats.write(bobs, "no", q.id)
			f.poll()
			if got := f.action(a.ID); got.State != oversight.Pending || got.Approvals != 0 {
				t.Errorf("it is %s", got.State)
			}
		})
	}
}

// TestTelegramErrorsDecideOnRetry: a message that Telegram certainly did not accept
// is retried; one that it refused, or that may have arrived, is not.
func TestTelegramErrorsDecideOnRetry(t *testing.T) {
	for _, tt := range []struct {
		code  int
		state string
	}{
		{429, "waiting"},
		{403, "failed"},
		{400, "failed"},
		{401, "waiting"},
		{500, "sent"}, // it may be there
	} {
		t.Run(fmt.Sprint(tt.code), func(t *testing.T) {
			f := chatting(t, storetest.SQLite(t), nil)
			f.chats.failing(func(method string) (int, string) {
				if method == "sendMessage" {
					return tt.code, "no, bot" + botToken
				}
				return 0, ""
			})
			f.propose("text")
			f.step()
			if f.count(`select count(*) from notice where state = $1`, tt.state) != 1 {
				t.Errorf("it is not %s", tt.state)
			}
			if f.count(`select count(*) from notice where error like '%' || $1 || '%'`, botToken) != 0 {
				t.Error("the token is in the row")
			}
		})
	}
}

// TestOneServerPollsTelegram: one server polls at a time; another one takes over what
// it did not finish; handled updates are not handled again after a restart; and the
// wait grows while Telegram does not answer.
func TestOneServerPollsTelegram(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		two := f.notifier()
		f.poll()
		asked := f.chats.asked
		if wait, err := two.Poll(t.Context(), "two", 0); err != nil || wait == 0 || f.chats.asked != asked {
			t.Errorf("a second server reads too: wait %v, %v", wait, err)
		}
		f.exec(`update telegram_bot set until_at = 1`) // the first is dead
		if _, err := two.Poll(t.Context(), "two", 0); err != nil || f.chats.asked == asked {
			t.Errorf("nobody reads: %v", err)
		}
		c, _, err := two.Code(t.Context(), f.who("bob", auth.Reviewer), "bob")
		if err != nil {
			t.Fatal(err)
		}
		f.chats.write(bobs, "/start "+c.Reveal(), 0)
		if _, err := two.Poll(t.Context(), "two", 0); err != nil {
			t.Fatal(err)
		}
		n := len(f.chats.in(bobs))
		if n != 1 {
			t.Fatalf("%d messages, want 1", n)
		}
		// The stand-in keeps what it is not told to forget: only the number stops a replay.
		f.exec(`update telegram_bot set until_at = 1`)
		f.poll()
		if _, err := f.notifier().Poll(t.Context(), "one", 0); err != nil {
			t.Fatal(err)
		}
		if len(f.chats.in(bobs)) != n {
			t.Error("an update is done twice")
		}
		// A server that sends old updates all the same.
		f.chats.mu.Lock()
		for _, u := range f.chats.updates {
			u["update_id"] = u["update_id"].(int64) - 100
		}
		f.chats.mu.Unlock()
		f.poll()
		if len(f.chats.in(bobs)) != n {
			t.Error("a replayed update is done")
		}
		f.chats.failing(func(string) (int, string) { return 502, "bad gateway" })
		if _, err := f.n.Poll(t.Context(), "one", 0); err == nil || strings.Contains(err.Error(), botToken) {
			t.Errorf("a failure is %v", err)
		}
		f.chats.failing(nil)
		f.chats.add(map[string]any{"message": "what?"}) // one that cannot be read
		f.chats.write(bobs, "hello", 0)
		f.poll()
		if len(f.chats.in(bobs)) != n+1 {
			t.Error("one update that cannot be read stops all others")
		}
	})
}

// TestRunTelegram runs the loops as the server does.
func TestRunTelegram(t *testing.T) {
	f := chatting(t, storetest.SQLite(t), func(c *notify.Config) { c.Poll = 10 * time.Millisecond })
	f.exec(`update telegram_bot set until_at = 1`)
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 2 {
		n := f.notifier()
		wg.Go(func() { _ = n.Run(ctx) })
		wg.Go(func() { _ = n.RunTelegram(ctx) })
	}
	defer wg.Wait()
	defer stop()
	a := f.propose("text")
	eventually(t, "the message", func() bool { return len(f.chats.in(bobs)) == 2 })
	m := f.chats.last(bobs)
	eventually(t, "the row", func() bool { return f.count(`select count(*) from notice where message_id = $1`, m.id) == 1 })
	f.chats.press(bobs, bobs, m.id, m.data(t, "Approve"))
	eventually(t, "the decision", func() bool { return f.action(a.ID).State == oversight.Approved })
	eventually(t, "the edit", func() bool { return strings.Contains(f.chats.last(bobs).text, "Approved by bob.") })
	if n := len(f.chats.in(bobs)); n != 2 {
		t.Errorf("%d messages, want 2", n)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s did not come", what)
		}
	}
}

// TestLostPhone: a stolen session links no phone where there is a second factor,
// and whose factors are reset, or who is disabled, has no chat any more.
func TestLostPhone(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := chatting(t, db, nil)
		bob := f.who("bob", auth.Reviewer)
		f.exec(`insert into passkey (id, person_id, host, name, credential, created_at, used_at, cloned_at) values ('x', 'per_bob', 'h', 'n', '{}', 1, 0, 0)`)
		if _, _, err := f.n.Code(t.Context(), bob, "bob"); !errors.Is(err, auth.ErrStepUp) {
			t.Errorf("without the second factor: %v", err)
		}
		bob.Strong = time.Now().Add(-time.Hour)
		if _, _, err := f.n.Code(t.Context(), bob, "bob"); !errors.Is(err, auth.ErrStepUp) {
			t.Errorf("with one of an hour ago: %v", err)
		}
		bob.Strong = time.Now()
		if _, _, err := f.n.Code(t.Context(), bob, "bob"); err != nil {
			t.Errorf("with the second factor: %v", err)
		}
		persons, err := people.New(db, people.Config{Key: make([]byte, 32)})
		if err != nil {
			t.Fatal(err)
		}
		ann := f.who("ann", auth.Owner)
		if err := persons.Reset(t.Context(), ann, "bob"); err != nil {
			t.Fatal(err)
		}
		if got := f.count(`select count(*) from telegram_link`) + f.count(`select count(*) from telegram_code`); got != 0 {
			t.Error("the phone that was lost is still linked")
		}
		f.link("bob", auth.Reviewer, bobs)
		if err := persons.Disable(t.Context(), ann, "bob"); err != nil {
			t.Fatal(err)
		}
		if err := persons.Enable(t.Context(), ann, "bob"); err != nil {
			t.Fatal(err)
		}
		if got := f.count(`select count(*) from telegram_link`); got != 0 {
			t.Error("who was disabled and let in again decides in the old chat")
		}
	})
}

func FuzzParsePress(f *testing.F) {
	for _, s := range []string{"a:ABCDEFGHIJKLMNOPQRSTUVWXYZ:1:0123456789abcdef", "r:", "", "a:::", "a:' or 1=1:1:0123456789abcdef", "a:ABCDEFGHIJKLMNOPQRSTUVWXYZ:zzzzzzzzzzzzz:0123456789abcdef"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if notify.ParsePress(s) && (len(s) > 64 || mail.Printable(s, 100) != s) {
			t.Errorf("%q was taken", s)
		}
	})
}

func FuzzInert(f *testing.F) {
	for _, s := range []string{"shop.example", "https://x.example/", "a@b", "\u202e", "/x", "#x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := notify.Inert(s, 80)
		bare := strings.NewReplacer("[.]", "", "[:]", "", "[/]", "", " (at) ", "").Replace(got)
		if strings.ContainsAny(bare, "@.:/#<>&\"\r\n\x00") || strings.ContainsFunc(got, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("%q became %q", s, got)
		}
	})
}

// forged is the data of a button that approves a, as an attacker makes it up.
func forged(a oversight.Action) string {
	return "a:" + strings.TrimPrefix(a.ID, "act_") + ":1:" + a.Hex()[:16]
}
