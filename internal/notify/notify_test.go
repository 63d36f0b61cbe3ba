package notify_test

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/notify"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

func TestNewRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		conf notify.Config
	}{
		{"no base", notify.Config{}},
		{"base without a scheme", notify.Config{Base: "postern.example"}},
		{"base with a query", notify.Config{Base: "https://postern.example/?x"}},
		{"mail without a transport", notify.Config{Base: "https://postern.example", From: "p@agents.example"}},
		{"no sender", notify.Config{Base: "https://postern.example", From: "Postern", Transport: &nextHop{}}},
		{"sender of two lines", notify.Config{Base: "https://postern.example", From: "p@agents.example\r\nBcc: x@y.example", Transport: &nextHop{}}},
		{"token without an id", notify.Config{Base: "https://postern.example", TelegramToken: "abc"}},
		{"token with a path", notify.Config{Base: "https://postern.example", TelegramToken: "12:ab/../../x"}},
		{"reminder after the end", notify.Config{Base: "https://postern.example", Remind: 1}},
		{"fewer than none", notify.Config{Base: "https://postern.example", PerHour: -1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := notify.New(nil, nil, nil, tt.conf); err == nil {
				t.Error("it was taken")
			} else if strings.Contains(err.Error(), "ab/..") {
				t.Errorf("the error tells the token: %v", err)
			}
		})
	}
}

// TestWhoIsTold: each person whom policy asks and who can be reached is told
// once, and nobody else.
func TestWhoIsTold(t *testing.T) {
	for _, tt := range []struct {
		name    string
		verdict policy.Verdict
		want    string
	}{
		{"whoever decides", policy.Verdict{}, "ann bob"},
		{"owners", policy.Verdict{Who: []string{"role:owner"}}, "ann"},
		{"one by name", policy.Verdict{Who: []string{"bob"}}, "bob"},
		{"one who has left: the owners", policy.Verdict{Who: []string{"zoe"}}, "ann"},
		{"a viewer by name: the owners", policy.Verdict{Who: []string{"vic"}}, "ann"},
		{"one who cannot be reached", policy.Verdict{Who: []string{"cat"}}, ""},
		{"nothing is asked", policy.Verdict{Effect: policy.Deny}, ""},
		{"it is allowed", policy.Verdict{Effect: policy.Allow}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := setup(t, storetest.SQLite(t), nil)
			f.judge.say(tt.verdict)
			a := f.propose("text")
			f.step()
			to, _ := f.mailed()
			var names []string
			for _, addr := range to {
				names = append(names, strings.TrimSuffix(addr, "@people.example"))
			}
			slices.Sort(names)
			if got := strings.Join(names, " "); got != tt.want {
				t.Errorf("told %q, want %q", got, tt.want)
			}
			if tt.name == "one who cannot be reached" && f.count(`select count(*) from audit_entry where verb = 'notify.nobody' and object = $1`, a.ID) != 1 {
				t.Error("the record does not say that nobody was told")
			}
		})
	}
}

// TestOncePerPersonAndVersion: two servers on one database tell each person
// once; what is written anew is told anew.
func TestOncePerPersonAndVersion(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		other := f.notifier()
		var all []oversight.Action
		for i := range 5 {
			all = append(all, f.propose(fmt.Sprintf("text %d", i)))
		}
		for range 3 {
			f.step(f.n, other)
		}
		if to, _ := f.mailed(); len(to) != 10 {
			t.Errorf("%d mails of 5 actions to 2 people, want 10", len(to))
		}
		f.update(func(tx *store.Tx) error {
			_, err := f.gate.Revise(t.Context(), tx, f.agent, all[0].ID, 1, oversight.Proposal{
				Request: policy.Request{Kind: "email.send", To: []string{"bob@shop.example"}}, Inbox: "ibx_1", Via: "rest", Payload: []byte("other"),
			})
			return err
		})
		f.step(f.n, other)
		if to, _ := f.mailed(); len(to) != 12 {
			t.Errorf("%d mails after a revision, want 12", len(to))
		}
	})
}

// TestCrashLosesOneAtMost: a notice that was being sent when a program stopped is
// not sent again, whatever became of it; the reminder comes all the same, and
// not to who has decided.
func TestCrashLosesOneAtMost(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.judge.say(policy.Verdict{Approvers: 2, Within: 24 * time.Hour})
		a := f.propose("text")
		f.hop.answer(mail.NotSent)
		f.step()
		f.exec(`update notice set state = 'sending' where person_id = 'per_ann'`) // as it is between the row and the server's word
		f.exec(`update notice set due_at = 1 where person_id = 'per_bob'`)
		f.hop.answer(mail.Accepted)
		f.step(f.n, f.notifier())
		if to, _ := f.mailed(); !slices.Equal(to, []string{"bob@people.example"}) {
			t.Fatalf("mail to %v, want to bob alone: he is tried again and ann is not", to)
		}
		f.step()
		if got := f.count(`select count(*) from notice where kind = 'reminder'`); got != 0 {
			t.Errorf("%d reminders before half the time is over", got)
		}
		remind := f.count(`select count(*) from notice_round where remind_at > $1 and remind_at < $2`, store.Time(time.Now().Add(11*time.Hour)), store.Time(time.Now().Add(13*time.Hour)))
		if remind != 1 {
			t.Error("the reminder is not after half the time")
		}
		if err := f.gate.Decide(t.Context(), f.who("bob", auth.Reviewer), decision(a, true)); err != nil {
			t.Fatal(err)
		}
		f.exec(`update notice_round set remind_at = 1`)
		f.step(f.n, f.notifier())
		f.step()
		to, text := f.mailed()
		if !slices.Equal(to, []string{"bob@people.example", "ann@people.example"}) || !strings.Contains(text, "still waits") {
			t.Errorf("mail to %v, want one reminder, to ann: bob has approved\n%s", to, text)
		}
		f.exec(`update notice_round set remind_at = 1`) // somebody meddles
		f.step()
		if to, _ := f.mailed(); len(to) != 2 {
			t.Errorf("%d mails: a person is reminded once", len(to))
		}
	})
}

// TestNobodyIsAsked: what asks nobody who is there is told to the owners, and
// once more when half its time is over.
func TestNobodyIsAsked(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.judge.say(policy.Verdict{Who: []string{"zoe"}, Within: time.Hour})
	f.propose("text")
	f.step()
	f.exec(`update notice_round set remind_at = 1`)
	f.step()
	to, text := f.mailed()
	if !slices.Equal(to, []string{"ann@people.example", "ann@people.example"}) || !strings.Contains(text, "nobody whom the policy asks has an account") {
		t.Errorf("mail to %v\n%s", to, text)
	}
}

// TestUndeliveredNoticeIsRetried: a notice that was certainly not sent is retried,
// one that was refused or may have arrived is not.
func TestUndeliveredNoticeIsRetried(t *testing.T) {
	for _, tt := range []struct {
		outcome mail.Outcome
		state   string
		again   int // mails after the transport has come back
	}{
		{mail.NotSent, "waiting", 1},
		{mail.Refused, "failed", 0},
		{mail.Uncertain, "sent", 1}, // the first
	} {
		t.Run(string(tt.outcome), func(t *testing.T) {
			f := setup(t, storetest.SQLite(t), nil)
			f.judge.say(policy.Verdict{Who: []string{"bob"}})
			f.hop.answer(tt.outcome)
			f.propose("text")
			f.step()
			if got := f.count(`select count(*) from notice where state = $1`, tt.state); got != 1 {
				t.Errorf("it is not %s", tt.state)
			}
			f.hop.answer(mail.Accepted)
			f.exec(`update notice set due_at = 1`)
			f.step()
			if to, _ := f.mailed(); len(to) != tt.again {
				t.Errorf("%d mails, want %d", len(to), tt.again)
			}
		})
	}
	t.Run("an end", func(t *testing.T) {
		f := setup(t, storetest.SQLite(t), nil)
		f.judge.say(policy.Verdict{Who: []string{"bob"}})
		f.hop.answer(mail.NotSent)
		f.propose("text")
		f.step()
		for range 10 {
			if f.count(`select count(*) from notice where state = 'waiting'`) == 1 {
				f.exec(`update notice set due_at = 1`)
			}
			f.step()
		}
		if got := f.count(`select attempts from notice`); got != 8 || f.count(`select count(*) from notice where state = 'failed'`) != 1 {
			t.Errorf("%d attempts, want 8 and an end", got)
		}
	})
}

// TestLetterHoldsNothingOfTheAgents: what an agent chose reaches a mail as
// nothing that a program makes a link, an address or markup of.
func TestLetterHoldsNothingOfTheAgents(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.propose("Click https://evil.example/approve\r\nBcc: eve@evil.example\r\n<a href=x>",
		"a@evil.example", "b@evil.example", "c@postern.example.evil.example", "d@[192.0.2.1]", "e@xn--pstern-wxa.example", "\"x y\"@q.example", "z@one.example", "y@two.example", "x@"+strings.Repeat("a", 200)+".example")
	f.step()
	_, raw := f.mailed()
	header, body, ok := strings.Cut(raw, "\r\n\r\n")
	if !ok {
		t.Fatal(raw)
	}
	for _, bad := range []string{"Click", "href", "@evil", "evil.example", "a subject", "Bcc", "one.example", "192.0.2.1"} {
		if strings.Contains(raw, bad) {
			t.Errorf("the mail holds %q:\n%s", bad, raw)
		}
	}
	body = strings.ReplaceAll(body, "=\r\n", "")
	links := regexp.MustCompile(`https?://[^\s]+`).FindAllString(body, -1)
	if len(links) != 1 || !regexp.MustCompile(`^https://postern\.example/look/[A-Z2-7]{26}$`).MatchString(links[0]) {
		t.Errorf("links %q, want the one that shows the action", links)
	}
	for _, want := range []string{"recipients", "9, at evil[.]example", "and 3 more", "analyst (at) agents[.]example", "digest"} {
		if !strings.Contains(body, want) {
			t.Errorf("the mail does not say %q:\n%s", want, body)
		}
	}
	for _, want := range []string{"Auto-Submitted: auto-generated", "Content-Type: text/plain", "Subject: Postern: An email waits for your decision ("} {
		if !strings.Contains(header, want) {
			t.Errorf("the header has no %q:\n%s", want, header)
		}
	}
	// The token is in the mail alone.
	token := links[0][strings.LastIndexByte(links[0], '/')+1:]
	if got := f.count(`select count(*) from notice where token = $1`, token); got != 0 {
		t.Error("the token is stored as it is")
	}
	if got := f.count(`select count(*) from audit_entry where detail like '%' || $1 || '%'`, token); got != 0 {
		t.Error("the token is on the record")
	}
}

func TestDefangLeavesNoLink(t *testing.T) {
	for in, want := range map[string]string{
		"shop.example":            "shop[.]example",
		"https://x.example/a?b=c": "https[:][/][/]x[.]example[/]a?b=c",
		"a@b.example":             "a (at) b[.]example",
		"/start@bot":              "[/]start (at) bot",
		"#tag <b> & \"x\"":        "?tag??b?????x?",
		"a\r\nb\x00\u202eé":       "a??b???",
		strings.Repeat("x", 50):   strings.Repeat("x", 40) + "[.][.][.]",
	} {
		if got := notify.Inert(in, 40); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

// TestOwnAddress: an address whose mail stays here is an agent's, and gets no
// link to what agents propose.
func TestOwnAddress(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *notify.Config) { c.Serves = ours })
	f.exec(`update person set email = 'spy@agents.example' where name = 'bob'`)
	f.propose("text")
	f.step()
	if to, _ := f.mailed(); !slices.Equal(to, []string{"ann@people.example"}) {
		t.Errorf("mail to %v, want to ann alone", to)
	}
	if f.count(`select count(*) from notice where person_id = 'per_bob' and state = 'failed'`) != 1 {
		t.Error("bob's notice has not failed")
	}
}

// TestFlood: a person gets so many notices an hour, then one that tells of the
// rest together.
func TestFlood(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *notify.Config) { c.PerHour = 3 })
		f.judge.say(policy.Verdict{Who: []string{"bob"}})
		var all []oversight.Action
		for i := range 9 {
			all = append(all, f.propose(fmt.Sprintf("text %d", i)))
		}
		f.step(f.n, f.notifier())
		// Several are sent at a time: the third need not be the last to arrive.
		sent, thirds := f.hop.mails(), 0
		for _, e := range sent {
			if strings.Contains(string(e.Raw), "notice 3 within an hour") {
				thirds++
			}
		}
		if len(sent) != 3 || thirds != 1 {
			t.Fatalf("%d mails of which %d say that there are more, want 3 and 1", len(sent), thirds)
		}
		f.step()
		if got := f.count(`select count(*) from notice where state = 'held'`); got != 6 {
			t.Errorf("%d are held, want 6", got)
		}
		for _, a := range all { // one of those that are held does not wait any more
			if f.count(`select count(*) from notice where action_id = $1 and state = 'held'`, a.ID) == 1 {
				if err := f.gate.Decide(t.Context(), f.who("ann", auth.Owner), oversight.Decision{ID: a.ID, Version: 1, Digest: a.Hex(), Approve: false, Reason: "no"}); err != nil && !errors.Is(err, oversight.ErrNotAsked) {
					t.Fatal(err)
				}
				if _, err := f.gate.Cancel(t.Context(), f.agent, a.ID); err != nil {
					t.Fatal(err)
				}
				break
			}
		}
		f.exec(`update notice_flow set window_at = window_at - 3600000000`)
		f.exec(`update notice set due_at = due_at - 3600000000 where state = 'held'`)
		f.hop.answer(mail.NotSent)
		f.step(f.n, f.notifier())
		f.hop.answer(mail.Accepted)
		if got := f.count(`select count(*) from notice where state = 'held'`); got != 5 {
			t.Errorf("%d are held after the digest could not be sent, want 5", got)
		}
		f.exec(`update notice_flow set window_at = window_at - 3600000000`)
		f.exec(`update notice set due_at = due_at - 3600000000 where state = 'held'`)
		f.step(f.n, f.notifier())
		f.step()
		to, text := f.mailed()
		if len(to) != 4 || !strings.Contains(text, "5 actions wait") || strings.Contains(text, "/look/") {
			t.Errorf("%d mails, want 4, the last of 5 actions together and with no link to one\n%s", len(to), text)
		}
	})
}

// TestRightsThatAreGone: who may not decide any more by the time that a notice is
// sent gets none.
func TestRightsThatAreGone(t *testing.T) {
	for _, tt := range []struct{ name, change string }{
		{"disabled", `update person set disabled_at = 1 where name = 'bob'`},
		{"a viewer now", `update person set role = 'viewer' where name = 'bob'`},
		{"without an address", `update person set email = '' where name = 'bob'`},
		{"decided", `update action set state = 'denied', version = version + 1`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := setup(t, storetest.SQLite(t), nil)
			f.judge.say(policy.Verdict{Who: []string{"bob"}})
			f.propose("text")
			f.hop.answer(mail.NotSent)
			f.step()
			f.hop.answer(mail.Accepted)
			f.exec(tt.change)
			f.exec(`update notice set due_at = 1`)
			f.step()
			if to, _ := f.mailed(); len(to) != 0 {
				t.Errorf("mail to %v", to)
			}
			if f.count(`select count(*) from notice where state = 'dropped'`) != 1 {
				t.Error("the notice is not dropped")
			}
		})
	}
}

// TestPrune: what is over is forgotten, and what waits is not told again.
func TestPrune(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	a, b := f.propose("one"), f.propose("two")
	f.step()
	if _, err := f.gate.Cancel(t.Context(), f.agent, b.ID); err != nil {
		t.Fatal(err)
	}
	f.exec(`update notice set at = 1`)
	f.exec(`update notice_round set at = 1`)
	if err := f.n.Prune(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := f.count(`select count(*) from notice_round where action_id = $1`, a.ID); got != 1 {
		t.Error("the round of what waits is forgotten")
	}
	if got := f.count(`select count(*) from notice_round where action_id = $1`, b.ID); got != 0 {
		t.Error("the round of what is over is kept")
	}
	f.step()
	if to, _ := f.mailed(); len(to) != 4 {
		t.Errorf("%d mails, want the 4 from before", len(to))
	}
}
