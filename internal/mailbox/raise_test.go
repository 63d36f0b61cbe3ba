package mailbox_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/delivery"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/keyring"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/quota"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

func (f *fixture) mode(t *testing.T, inbox string) policy.Mode {
	t.Helper()
	b, err := f.post.Directory.Find(t.Context(), f.person, inbox)
	if err != nil {
		t.Fatal(err)
	}
	return b.Mode
}

// runAll executes what is due.
func (f *fixture) runAll(t *testing.T) {
	t.Helper()
	for range 100 {
		ran, err := f.gate.RunOne(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !ran {
			return
		}
	}
	t.Fatal("there is always something to do")
}

func (f *fixture) decide(t *testing.T, who auth.Principal, id string, approve bool) error {
	t.Helper()
	a, err := f.gate.Action(t.Context(), f.person, id)
	if err != nil {
		t.Fatal(err)
	}
	return f.gate.Decide(t.Context(), who, oversight.Decision{ID: id, Version: a.Version, Digest: a.Hex(), Approve: approve, Reason: "because", Seen: a.Grave()})
}

// TestRaise is an agent that tries every road to a looser mode, on a server
// whose policy allows everything.
func TestRaise(t *testing.T) {
	offices(t, everything, mailbox.Config{}, func(t *testing.T, f *fixture, _, _ office) {
		ctx := t.Context()
		b, agent, key := f.inbox(t, "alice")
		_, other, _ := f.inbox(t, "bella")
		k, err := f.post.Keys.Open(ctx, agent, key, "")
		if err != nil {
			t.Fatal(err)
		}
		reader, readKey, err := f.post.Keys.Add(ctx, agent, k, keyring.NewKey{Scope: seal.Propose})
		if err != nil {
			t.Fatal(err)
		}
		proposing, err := auth.CheckKey(ctx, f.db, readKey)
		if err != nil || reader.Credential != proposing.ID {
			t.Fatal(err)
		}
		sandbox := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: agent.Project, Inbox: b.ID}
		reviewer, viewer, stranger := f.person, f.person, f.person
		reviewer.Role, viewer.Role, stranger.Project = auth.Reviewer, auth.Viewer, f.other.Project
		roleless := f.person
		roleless.Role = ""
		keys := map[string]auth.Principal{
			"agent": agent, "proposing key": proposing, "another's key": other, "sandbox": sandbox, "project": f.project, "reviewer": reviewer,
			"viewer": viewer, "a person without a role": roleless, "system": {Kind: auth.System, ID: "gate", Project: agent.Project},
		}
		for name, who := range keys {
			for _, to := range []policy.Mode{policy.Monitored, policy.Autonomous} {
				if _, err := f.post.SetMode(ctx, who, b.ID, to, ""); !errors.Is(err, auth.ErrForbidden) && !errors.Is(err, directory.ErrNoInbox) {
					t.Errorf("%s sets %s: %v", name, to, err)
				}
			}
			if _, _, err := f.post.ModeCode(ctx, who, b.ID, policy.Autonomous, "three good weeks"); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s makes a code: %v", name, err)
			}
			if _, err := f.post.AllowList.Add(ctx, who, b.ID, "eve@example.com", time.Time{}); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s adds to the allow list: %v", name, err)
			}
		}
		if _, err := f.post.SetMode(ctx, stranger, b.ID, policy.Autonomous, ""); !errors.Is(err, directory.ErrNoInbox) {
			t.Errorf("another project's owner: %v", err)
		}
		if _, _, err := f.post.ModeCode(ctx, stranger, b.ID, policy.Autonomous, "three good weeks"); !errors.Is(err, directory.ErrNoInbox) {
			t.Errorf("another project's owner makes a code: %v", err)
		}

		// A request is decided by a person, though the rules allow everything.
		a, err := f.post.RequestMode(ctx, sandbox, "mcp", "", policy.Autonomous, "please")
		if err != nil || a.State != oversight.Pending {
			t.Fatalf("request: %s, %v; want pending", a.State, err)
		}
		for name, who := range keys {
			if name == "reviewer" { // whom policy asks is policy's; see package rulebook
				continue
			}
			if err := f.decide(t, who, a.ID, true); !errors.Is(err, auth.ErrForbidden) && !errors.Is(err, store.ErrNotFound) {
				t.Errorf("%s approves: %v", name, err)
			}
		}
		// Who writes the database: the action is approved, and by nobody.
		f.shift(t, `update action set state = 'approved', version = version + 1 where id = $1`, a.ID)
		f.runAll(t)
		if got := f.mode(t, b.ID); got != policy.GatedSend {
			t.Fatalf("mode is %s", got)
		}
		e, err := f.post.AllowList.Request(ctx, sandbox, "mcp", "", "eve@example.com", time.Time{}, "please")
		if err != nil || e.State != oversight.Pending {
			t.Fatalf("request: %s, %v; want pending", e.State, err)
		}
		f.shift(t, `update action set state = 'approved', version = version + 1, decider = 'system:gate' where id = $1`, e.ID)
		f.runAll(t)
		if list, err := f.post.AllowList.Entries(ctx, agent, ""); err != nil || len(list) != 0 {
			t.Fatalf("allow list %v, %v", list, err)
		}

		// A code of another inbox, or for another mode, or guessed.
		code, _, err := f.post.ModeCode(ctx, f.person, "bella@agents.test", policy.Monitored, "three good weeks")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.post.RaiseMode(ctx, agent, "", code); !errors.Is(err, mailbox.ErrCode) {
			t.Errorf("another inbox's code: %v", err)
		}
		for name, who := range keys {
			if name == "another's key" {
				continue
			}
			if _, err := f.post.RaiseMode(ctx, who, "bella@agents.test", code); !errors.Is(err, auth.ErrForbidden) && !errors.Is(err, directory.ErrNoInbox) {
				t.Errorf("%s uses bella's code: %v", name, err)
			}
		}
		if got, err := f.post.RaiseMode(ctx, other, "", code); err != nil || got.Mode != policy.Monitored {
			t.Errorf("the code where it is for: %s, %v", got.Mode, err)
		}
		if _, err := f.post.RaiseMode(ctx, other, "", code); !errors.Is(err, mailbox.ErrCode) {
			t.Errorf("a code used twice: %v", err)
		}
	})
}

// TestCodes: a code dies by its time, by guesses and by a demotion, and is not
// in the database, the audit or an event.
func TestCodes(t *testing.T) {
	offices(t, everything, mailbox.Config{}, func(t *testing.T, f *fixture, a, b office) {
		ctx := t.Context()
		box, agent, _ := f.inbox(t, "alice")
		fresh := func() auth.Secret {
			t.Helper()
			code, _, err := f.post.ModeCode(ctx, f.person, box.ID, policy.Autonomous, "three good weeks")
			if err != nil {
				t.Fatal(err)
			}
			return code
		}
		back := func() {
			t.Helper()
			if got, err := f.post.SetMode(ctx, agent, "", policy.GatedSend, "enough"); err != nil || got.Mode != policy.GatedSend {
				t.Fatalf("down: %v", err)
			}
		}
		code := fresh()
		typed := auth.Secret(" " + strings.ToLower(strings.ReplaceAll(code.Reveal(), "-", " ")) + "\n")
		if got, err := f.post.RaiseMode(ctx, agent, "", typed); err != nil || got.Mode != policy.Autonomous || got.ModeReason != "raised by a person's code" {
			t.Errorf("as a person types it: %+v, %v", got, err)
		}
		back()

		code = fresh()
		f.shift(t, `update mode_code set expires_at = $1 where ended_at = 0`, store.Time(time.Now().Add(-time.Second)))
		if _, err := f.post.RaiseMode(ctx, agent, "", code); !errors.Is(err, mailbox.ErrCode) {
			t.Errorf("after its time: %v", err)
		}

		// Guesses from two processes together.
		code = fresh()
		for i := range 5 {
			if _, err := []office{a, b}[i%2].post.RaiseMode(ctx, agent, "", "AAAA-AAAA-AAAA-AAAA"); !errors.Is(err, mailbox.ErrCode) {
				t.Errorf("guess %d: %v", i, err)
			}
		}
		if _, err := f.post.RaiseMode(ctx, agent, "", code); !errors.Is(err, mailbox.ErrCode) {
			t.Errorf("after five guesses: %v", err)
		}
		for _, bad := range []auth.Secret{"", "x", "AAAA-AAAA-AAAA-AAA", auth.Secret(strings.Repeat("A", 1000)), "AAAA-AAAA-AAAA-AAA1", "'; drop table inbox"} {
			if _, err := f.post.RaiseMode(ctx, agent, "", bad); !errors.Is(err, mailbox.ErrCode) {
				t.Errorf("%q: %v", bad.Reveal(), err)
			}
		}

		// The attack: to keep a code for after the demotion.
		code = fresh()
		if _, err := f.post.SetMode(ctx, f.person, box.ID, policy.ReadOnly, "stop"); err != nil {
			t.Fatal(err)
		}
		if _, err := f.post.RaiseMode(ctx, agent, "", code); !errors.Is(err, mailbox.ErrCode) {
			t.Errorf("after a demotion: %v", err)
		}
		if got := f.mode(t, box.ID); got != policy.ReadOnly {
			t.Errorf("mode is %s", got)
		}
		if _, _, err := f.post.ModeCode(ctx, f.person, box.ID, policy.ReadOnly, "three good weeks"); !errors.Is(err, directory.ErrInvalid) {
			t.Errorf("a code for no step up: %v", err)
		}
		for range 5 {
			fresh()
		}
		if _, _, err := f.post.ModeCode(ctx, f.person, box.ID, policy.Autonomous, "three good weeks"); !errors.Is(err, directory.ErrInvalid) {
			t.Errorf("a sixth open code: %v", err)
		}

		bare := strings.ReplaceAll(code.Reveal(), "-", "")
		err := audit.View(ctx, f.db, func(tx *store.Tx) error {
			list, err := audit.List(ctx, tx, audit.Query{Limit: 1000})
			if err != nil {
				return err
			}
			wrong := 0
			for _, e := range list {
				if strings.Contains(e.Detail, bare) || strings.Contains(e.Detail, code.Reveal()) {
					t.Errorf("the audit has the code: %s", e.Detail)
				}
				if e.Verb == "inbox.code_wrong" {
					wrong++
				}
			}
			if wrong != 5 {
				t.Errorf("%d wrong codes in the audit, want 5", wrong)
			}
			es, err := event.OfInbox(ctx, tx, box.ID, 0, 100, event.InboxModeChanged)
			if err != nil || len(es) != 3 || es[2].Data["from"] != "gated_send" || es[2].Data["mode"] != "read_only" || es[2].Data["reason"] != "stop" {
				t.Errorf("events %+v, %v", es, err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// TestCodeRace: of two who use one code at once in two processes, one does.
func TestCodeRace(t *testing.T) {
	offices(t, everything, mailbox.Config{}, func(t *testing.T, f *fixture, a, b office) {
		box, agent, _ := f.inbox(t, "alice")
		for round := range 5 {
			code, _, err := f.post.ModeCode(t.Context(), f.person, box.ID, policy.Monitored, "three good weeks")
			if err != nil {
				t.Fatal(err)
			}
			var mu sync.Mutex // guards won
			won := 0
			var wg sync.WaitGroup
			for i := range 6 {
				wg.Go(func() {
					_, err := []office{a, b}[i%2].post.RaiseMode(context.WithoutCancel(t.Context()), agent, "", code)
					mu.Lock()
					defer mu.Unlock()
					if err == nil {
						won++
					} else if !errors.Is(err, mailbox.ErrCode) {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if won != 1 {
				t.Fatalf("round %d: the code was used %d times", round, won)
			}
			if _, err := f.post.SetMode(t.Context(), agent, "", policy.GatedSend, ""); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestModeRequest: an owner's approval raises the mode, once, and not of an
// inbox that was demoted meanwhile.
func TestModeRequest(t *testing.T) {
	offices(t, everything, mailbox.Config{}, func(t *testing.T, f *fixture, _, _ office) {
		ctx := t.Context()
		box, agent, _ := f.inbox(t, "alice")
		ask := func(mode policy.Mode) oversight.Action {
			t.Helper()
			a, err := f.post.RequestMode(ctx, agent, "rest", "", mode, "I have been good")
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		a := ask(policy.Monitored)
		late := ask(policy.Autonomous)
		v, err := f.gate.Show(a)
		if err != nil || !strings.Contains(v.Title, "alice@agents.test") || !strings.Contains(v.Title, "monitored") || v.Text != "I have been good" {
			t.Errorf("shown as %+v, %v", v, err)
		}
		if err := f.decide(t, f.person, a.ID, true); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		if got := f.mode(t, box.ID); got != policy.Monitored {
			t.Fatalf("mode is %s after the approval", got)
		}
		// What was asked for in another mode is not what is there now.
		if err := f.decide(t, f.person, late.ID, true); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		got, err := f.gate.Action(ctx, agent, late.ID)
		if err != nil || got.State != oversight.Failed || !strings.Contains(got.Result, "made the request in mode") || f.mode(t, box.ID) != policy.Monitored {
			t.Errorf("a request of before: %s, %q, %v", got.State, got.Result, err)
		}
		if _, err := f.post.RequestMode(ctx, agent, "rest", "", policy.GatedSend, ""); !errors.Is(err, directory.ErrInvalid) {
			t.Errorf("a request to go down: %v", err)
		}
		ask(policy.Autonomous)
		if _, err := f.post.RequestMode(ctx, agent, "rest", "", policy.Autonomous, ""); !errors.Is(err, quota.ErrLimit) {
			t.Errorf("a fourth request in the hour: %v", err)
		}
		// After a crash in the middle: what was done is done, what was not is tried again.
		if _, err := f.post.SetMode(ctx, agent, "", policy.GatedSend, ""); err != nil {
			t.Fatal(err)
		}
		f.shift(t, `delete from send_use`)
		a = ask(policy.Monitored)
		if err := f.decide(t, f.person, a.ID, true); err != nil {
			t.Fatal(err)
		}
		f.shift(t, `update action set state = 'executing', version = version + 1, lease = 0 where id = $1`, a.ID)
		if err := f.gate.Recover(ctx, true); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		if got := f.mode(t, box.ID); got != policy.Monitored {
			t.Errorf("mode is %s after a crash before the change", got)
		}
		f.shift(t, `update action set state = 'executing', version = version + 1, lease = 0, settled_at = 0 where id = $1`, a.ID)
		if err := f.gate.Recover(ctx, true); err != nil {
			t.Fatal(err)
		}
		if got, err := f.gate.Action(ctx, agent, a.ID); err != nil || got.State != oversight.Done {
			t.Errorf("after a crash behind the change: %s, %v", got.State, err)
		}
	})
}

// TestDemoted: what people and other servers say of an inbox's mail takes its
// freedom away, once, with a reason.
func TestDemoted(t *testing.T) {
	offices(t, oversighttest.Rules{{ID: "ask", Kind: "*", Effect: policy.Ask}}, mailbox.Config{Secret: []byte("s")}, func(t *testing.T, f *fixture, _, _ office) {
		ctx := t.Context()
		n := 0
		free := func() (directory.Inbox, auth.Principal) {
			t.Helper()
			n++
			b, key, err := f.post.CreateInbox(ctx, f.person, directory.NewInbox{Mode: policy.Autonomous}, "")
			if err != nil {
				t.Fatal(err)
			}
			who, err := auth.CheckKey(ctx, f.db, key)
			if err != nil {
				t.Fatal(err)
			}
			return b, who
		}
		propose := func(who auth.Principal) string {
			t.Helper()
			n++
			p, err := f.post.Send(ctx, who, "rest", letter("number "+strings.Repeat("i", n)))
			if err != nil {
				t.Fatal(err)
			}
			return p.ID
		}
		decide := func(id string, approve bool) {
			t.Helper()
			if err := f.decide(t, f.person, id, approve); err != nil {
				t.Fatal(err)
			}
		}
		b, who := free()
		for _, approve := range []bool{false, false, true, false, false} {
			decide(propose(who), approve)
		}
		if got := f.mode(t, b.ID); got != policy.Autonomous {
			t.Errorf("mode is %s: an approval stands between the denials", got)
		}
		decide(propose(who), false)
		got, err := f.post.Directory.Find(ctx, f.person, b.ID)
		if err != nil || got.Mode != policy.GatedSend || got.ModeBy != "system:demotion" || !strings.Contains(got.ModeReason, "3 of its proposals in a row") {
			t.Errorf("after three denials: %+v, %v", got, err)
		}
		// Raised again, what was before does not count.
		if _, err := f.post.SetMode(ctx, f.person, b.ID, policy.Autonomous, "once more"); err != nil {
			t.Fatal(err)
		}
		decide(propose(who), false)
		if got := f.mode(t, b.ID); got != policy.Autonomous {
			t.Errorf("mode is %s after one denial", got)
		}

		b, who = free()
		f.hop.outcome = "refused"
		for range 5 {
			decide(propose(who), true)
		}
		f.runAll(t)
		got, err = f.post.Directory.Find(ctx, f.person, b.ID)
		if err != nil || got.Mode != policy.GatedSend || !strings.Contains(got.ModeReason, "5 of 5 recipients bounced") {
			t.Errorf("after five bounces: %+v, %v", got, err)
		}
		err = audit.View(ctx, f.db, func(tx *store.Tx) error {
			list, err := audit.List(ctx, tx, audit.Query{Object: b.ID, Verb: "inbox.demote"})
			if err != nil || len(list) != 1 || !strings.Contains(list[0].Detail, "bounced") {
				t.Errorf("audit: %+v, %v", list, err)
			}
			es, err := event.OfInbox(ctx, tx, b.ID, 0, 100, event.InboxModeChanged)
			if err != nil || len(es) != 1 || es[0].Data["mode"] != "gated_send" {
				t.Errorf("events: %+v, %v", es, err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// TestStopped: a switch puts inboxes where nothing sends by itself, and turning
// it off does not raise them.
func TestStopped(t *testing.T) {
	offices(t, everything, mailbox.Config{}, func(t *testing.T, f *fixture, _, _ office) {
		ctx := t.Context()
		inbox := func(who auth.Principal) string {
			t.Helper()
			b, _, err := f.post.CreateInbox(ctx, who, directory.NewInbox{Mode: policy.Autonomous}, "")
			if err != nil {
				t.Fatal(err)
			}
			return b.ID
		}
		stranger := f.person
		stranger.Project = f.other.Project
		one, two, foreign := inbox(f.person), inbox(f.person), inbox(stranger)
		modeOf := func(who auth.Principal, id string) policy.Mode {
			t.Helper()
			b, err := f.post.Directory.Find(ctx, who, id)
			if err != nil {
				t.Fatal(err)
			}
			return b.Mode
		}
		on := func(scope oversight.Scope, target string) oversight.Switch {
			t.Helper()
			s, err := f.gate.SwitchOn(ctx, f.person, oversight.Switch{Scope: scope, Target: target, Reason: "it writes nonsense"})
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		on(oversight.ScopeInbox, foreign) // of another project: it stops nothing
		s := on(oversight.ScopeInbox, one)
		if modeOf(f.person, one) != policy.ReadOnly || modeOf(f.person, two) != policy.Autonomous || modeOf(stranger, foreign) != policy.Autonomous {
			t.Errorf("modes %s, %s, %s", modeOf(f.person, one), modeOf(f.person, two), modeOf(stranger, foreign))
		}
		if err := f.gate.SwitchOff(ctx, f.person, s.ID); err != nil {
			t.Fatal(err)
		}
		if got := modeOf(f.person, one); got != policy.ReadOnly {
			t.Errorf("mode %s once the switch is off", got)
		}
		on(oversight.ScopeProject, "")
		if modeOf(f.person, one) != policy.ReadOnly || modeOf(f.person, two) != policy.GatedSend || modeOf(stranger, foreign) != policy.Autonomous {
			t.Errorf("modes %s, %s, %s", modeOf(f.person, one), modeOf(f.person, two), modeOf(stranger, foreign))
		}
	})
}

// TestDemotedByComplaints: what two readers complain of sends no more by itself;
// a complaint counts once, and one that takes it back does not.
func TestDemotedByComplaints(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		d := deliver(t, db, delivery.Config{})
		owner := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: d.project.Project}
		if _, err := d.post.SetMode(ctx, owner, d.inbox.ID, policy.Autonomous, "it writes well"); err != nil {
			t.Fatal(err)
		}
		d.send([]string{"bob@b.test", "carol@b.test"}, nil)
		d.run(1)
		sent := d.w.copies[0].Raw
		kept := bytes.ReplaceAll(complaint(sent, "carol@b.test"), []byte("Feedback-Type: abuse"), []byte("Feedback-Type: not-spam"))
		for _, tt := range []struct {
			name   string
			report []byte
			want   policy.Mode
		}{
			{"one reader", complaint(sent, "bob@b.test"), policy.Autonomous},
			{"the same once more", complaint(sent, "bob@b.test"), policy.Autonomous},
			{"one who wants it", kept, policy.Autonomous},
			{"somebody who did not get it", complaint(sent, "eve@b.test"), policy.Autonomous},
			{"a second reader", complaint(sent, "carol@b.test"), policy.GatedSend},
		} {
			d.arrive(tt.report)
			got, err := d.post.Directory.Find(ctx, owner, d.inbox.ID)
			if err != nil || got.Mode != tt.want {
				t.Fatalf("%s: %s because %q, %v; want %s", tt.name, got.Mode, got.ModeReason, err, tt.want)
			}
			if tt.want == policy.GatedSend && (got.ModeBy != "system:demotion" || got.ModeReason != "2 of 2 recipients complained") {
				t.Errorf("%s: by %s, because %q", tt.name, got.ModeBy, got.ModeReason)
			}
		}
	})
}

// TestAskedTwice: what an agent has asked for already, and nobody has decided, is
// not put before people twice, whichever process it asks; but asking counts.
func TestAskedTwice(t *testing.T) {
	offices(t, everything, mailbox.Config{}, func(t *testing.T, f *fixture, one, two office) {
		ctx := t.Context()
		_, agent, _ := f.inbox(t, "alice")
		_, other, _ := f.inbox(t, "bella")
		ask := func(o office, who auth.Principal, mode policy.Mode, why string) oversight.Action {
			t.Helper()
			a, err := o.post.RequestMode(ctx, who, "rest", "", mode, why)
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		a := ask(one, agent, policy.Monitored, "please")
		if again := ask(two, agent, policy.Monitored, "please"); again.ID != a.ID || again.State != oversight.Pending {
			t.Errorf("the same once more is %s, %s; want %s", again.ID, again.State, a.ID)
		}
		if again := ask(two, agent, policy.Monitored, "for the reports"); again.ID == a.ID {
			t.Error("another reason is not shown to whoever decides")
		}
		if _, err := one.post.RequestMode(ctx, agent, "rest", "", policy.Monitored, "please"); !errors.Is(err, quota.ErrLimit) {
			t.Errorf("a fourth request in the hour: %v", err)
		}
		if foreign := ask(one, other, policy.Monitored, "please"); foreign.ID == a.ID {
			t.Error("another inbox is answered with this one's request")
		}
		// What was decided is asked anew.
		if err := f.decide(t, f.person, a.ID, false); err != nil {
			t.Fatal(err)
		}
		f.shift(t, `delete from send_use`)
		if again := ask(two, agent, policy.Monitored, "please"); again.ID == a.ID || again.State != oversight.Pending {
			t.Errorf("after the decision it is %s, %s", again.ID, again.State)
		}
		allow := func(o office) oversight.Action {
			t.Helper()
			a, err := o.post.AllowList.Request(ctx, agent, "rest", "", "bob@example.com", time.Time{}, "")
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		if first, second := allow(one), allow(two); first.ID != second.ID {
			t.Errorf("two requests for the allow list: %s, %s", first.ID, second.ID)
		}
	})
}
