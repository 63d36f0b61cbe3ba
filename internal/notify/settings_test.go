package notify_test

import (
	"errors"
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

// TestQuietHours: by the clock on the wall, over midnight and where clocks change.
func TestQuietHours(t *testing.T) {
	night := notify.Settings{Zone: "Europe/Berlin", From: "22:00", To: "07:30"}
	weekend := notify.Settings{Zone: "Europe/Berlin", From: "00:00", To: "23:59", Days: []time.Weekday{time.Saturday, time.Sunday}}
	for _, tt := range []struct {
		name     string
		s        notify.Settings
		at, want string // RFC 3339
	}{
		{"none", notify.Settings{}, "2026-01-05T03:00:00Z", "2026-01-05T03:00:00Z"},
		{"before", night, "2026-01-05T20:59:59Z", "2026-01-05T20:59:59Z"},
		{"evening", night, "2026-01-05T21:00:00Z", "2026-01-06T06:30:00Z"},
		{"after midnight", night, "2026-01-06T02:00:00Z", "2026-01-06T06:30:00Z"},
		{"morning", night, "2026-01-06T06:30:00Z", "2026-01-06T06:30:00Z"},
		{"the night of summer time", night, "2026-03-28T21:30:00Z", "2026-03-29T05:30:00Z"},
		{"the night of winter time", night, "2026-10-24T21:30:00Z", "2026-10-25T06:30:00Z"},
		{"a Saturday", weekend, "2026-01-10T12:00:00Z", "2026-01-10T22:59:00Z"},
		{"a Monday", weekend, "2026-01-12T12:00:00Z", "2026-01-12T12:00:00Z"},
	} {
		at, err := time.Parse(time.RFC3339, tt.at)
		if err != nil {
			t.Fatal(err)
		}
		if got := tt.s.Awake(at).UTC().Format(time.RFC3339); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

// quiet are settings whose quiet hours hold now.
func quiet() notify.Settings {
	now := time.Now().UTC()
	return notify.Settings{From: now.Add(-time.Hour).Format("15:04"), To: now.Add(2 * time.Hour).Format("15:04")}
}

// TestSettingsHold: quiet hours and collecting hold back what is not grave, and it
// comes as one message afterwards.
func TestSettingsHold(t *testing.T) {
	for _, tt := range []struct {
		name    string
		own     notify.Settings
		verdict policy.Verdict
		flags   []string
		sent    int
	}{
		{"nothing set", notify.Settings{}, policy.Verdict{}, nil, 2},
		{"quiet", quiet(), policy.Verdict{}, nil, 0},
		{"collected", notify.Settings{Collect: 600}, policy.Verdict{}, nil, 0},
		{"grave, in quiet hours", quiet(), policy.Verdict{}, []string{"secret"}, 2},
		{"grave, collected", notify.Settings{Collect: 600}, policy.Verdict{StepUp: true}, nil, 2},
		{"over before the quiet hours are", quiet(), policy.Verdict{Within: time.Hour}, nil, 2},
		{"grave, but silence is wanted", func() notify.Settings { s := quiet(); s.Silent = true; return s }(), policy.Verdict{}, []string{"secret"}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				f := setup(t, db, func(c *notify.Config) { c.Remind = 0 })
				bob := f.who("bob", auth.Reviewer)
				if err := f.n.SetOwn(t.Context(), bob, &tt.own); err != nil {
					t.Fatal(err)
				}
				v := tt.verdict
				v.Who = []string{"bob"}
				f.judge.say(v)
				f.flagged("one", tt.flags)
				f.flagged("two", tt.flags)
				f.step(f.n, f.notifier())
				if to, _ := f.mailed(); len(to) != tt.sent {
					t.Fatalf("%d mails, want %d", len(to), tt.sent)
				}
				if tt.sent > 0 {
					return
				}
				f.exec(`update notice set due_at = 1 where state = 'held'`) // the time is over
				f.step(f.n, f.notifier())
				if to, text := f.mailed(); len(to) != 1 || !contains(text, "2 actions wait") {
					t.Errorf("%d mails, want one of 2 actions:\n%s", len(to), text)
				}
				if n := f.count(`select count(*) from notice where state <> 'sent'`); n != 0 {
					t.Errorf("%d notices are left", n)
				}
			})
		})
	}
}

// TestOneHeldIsSentAsItIs: a digest of one would say less than the notice.
func TestOneHeldIsSentAsItIs(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.judge.say(policy.Verdict{Who: []string{"bob"}})
		if err := f.n.SetProject(t.Context(), f.who("ann", auth.Owner), quiet()); err != nil { // the project's, since bob has none
			t.Fatal(err)
		}
		f.propose("one")
		f.step()
		f.exec(`update notice set due_at = 1 where state = 'held'`)
		f.step()
		if to, text := f.mailed(); len(to) != 1 || !contains(text, "/look/") {
			t.Errorf("%d mails:\n%s", len(to), text)
		}
	})
}

// TestEscalation: others are told when nobody decides, once, and nothing is approved.
func TestEscalation(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *notify.Config) { c.Remind = 0 })
		room := f.slackRoomOf(false)
		f.judge.say(policy.Verdict{Who: []string{"bob"}, Within: time.Hour})
		err := f.n.SetProject(t.Context(), f.who("ann", auth.Owner), notify.Settings{EscalateAfter: 30, EscalateTo: []string{"person:ann", "room:" + room.ID}})
		if err != nil {
			t.Fatal(err)
		}
		a, b := f.propose("one"), f.propose("two")
		f.step()
		if err := f.gate.Decide(t.Context(), f.who("bob", auth.Reviewer), decision(b, true)); err != nil {
			t.Fatal(err)
		}
		before, _ := f.mailed()
		f.exec(`update notice_round set escalate_at = 1 where escalate_at > 0`)
		f.step(f.n, f.notifier())
		to, text := f.mailed()
		if len(to) != len(before)+1 || to[len(to)-1] != "ann@people.example" || !contains(text, "nobody has decided") {
			t.Errorf("mails to %v after those to %v:\n%s", to, before, text)
		}
		if n := len(f.slack.posted()); n != 3 { // two notices, and one escalation
			t.Errorf("%d messages in the room, want 3", n)
		}
		f.step(f.n, f.notifier())
		if again, _ := f.mailed(); len(again) != len(to) {
			t.Errorf("escalated again: %v", again)
		}
		if got := f.action(a.ID); got.State != oversight.Pending || got.Approvals != 0 {
			t.Errorf("escalation decided: %s with %d approvals", got.State, got.Approvals)
		}
		if n := f.count(`select count(*) from audit_entry where verb = 'notify.escalate'`); n != 1 {
			t.Errorf("%d escalations on the record, want 1", n)
		}
	})
}

// TestSettingsAreChecked: what cannot be set, and by whom.
func TestSettingsAreChecked(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ann := f.who("ann", auth.Owner)
		for _, s := range []notify.Settings{
			{Zone: "Mars/Base"},
			{Zone: "Local"},
			{From: "22:00"},
			{From: "25:00", To: "07:00"},
			{From: "07:00", To: "07:00"},
			{Days: []time.Weekday{9}},
			{Collect: -1},
			{Collect: 1441},
			{EscalateAfter: 5},
			{EscalateTo: []string{"role:owner"}},
			{EscalateAfter: 5, EscalateTo: []string{"person:nobody"}},
			{EscalateAfter: 5, EscalateTo: []string{"room:rom_x"}},
			{EscalateAfter: 5, EscalateTo: []string{"role:viewer"}},
			{EscalateAfter: 5, EscalateTo: []string{"https://x"}},
		} {
			if err := f.n.SetProject(t.Context(), ann, s); !errors.Is(err, notify.ErrInvalid) {
				t.Errorf("%+v: %v", s, err)
			}
		}
		for _, who := range []auth.Principal{f.who("bob", auth.Reviewer), f.who("vic", auth.Viewer), f.agent} {
			if err := f.n.SetProject(t.Context(), who, notify.Settings{}); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s sets the project's: %v", who, err)
			}
		}
		if err := f.n.SetOwn(t.Context(), f.agent, &notify.Settings{}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("an agent's: %v", err)
		}
		vic := f.who("vic", auth.Viewer)
		if err := f.n.SetOwn(t.Context(), vic, &notify.Settings{Collect: 15, EscalateAfter: 1, EscalateTo: []string{"person:ann"}}); err != nil {
			t.Fatal(err)
		}
		own, isOwn, _, err := f.n.Settings(t.Context(), vic)
		if err != nil || !isOwn || own.Collect != 15 || own.EscalateAfter != 0 {
			t.Errorf("%+v, %v, %v", own, isOwn, err)
		}
		if err := f.n.SetOwn(t.Context(), vic, nil); err != nil {
			t.Fatal(err)
		}
		if own, isOwn, _, err = f.n.Settings(t.Context(), vic); err != nil || isOwn || own.Collect != 0 {
			t.Errorf("back to the project's: %+v, %v, %v", own, isOwn, err)
		}
		// The attack: settings in the database that silence a person for good.
		f.exec(`insert into notify_setting (id, settings, at) values ('per_bob', '{"from":"00:00","to":"00:00","silent":true}', 1)`)
		f.judge.say(policy.Verdict{Who: []string{"bob"}})
		f.propose("one")
		f.step()
		if to, _ := f.mailed(); len(to) != 1 {
			t.Errorf("%d mails, want 1", len(to))
		}
	})
}

func contains(text, part string) bool { return strings.Contains(text, part) }
