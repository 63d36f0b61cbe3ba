package mailbox_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// TestMonitored: what a monitored inbox sends leaves at once, and its overseers
// get one copy of it, which the agent neither sees nor stops.
func TestMonitored(t *testing.T) {
	offices(t, nil, mailbox.Config{Secret: []byte("s")}, func(t *testing.T, f *fixture, _, _ office) {
		ctx := t.Context()
		f.judgedBy(t, modes{})
		b, agent, k := f.agentIn(t, "alice", policy.Monitored)
		p, err := f.post.Send(ctx, agent, "rest", letter("before there is anybody"))
		if err != nil || p.State != oversight.Pending || !strings.Contains(p.Note, "no overseers") {
			t.Errorf("without overseers: %s, %q, %v; want pending", p.State, p.Note, err)
		}
		if _, err := f.post.Overseers.Set(ctx, f.person, "", []string{"boss@example.com", "Audit@example.org", "boss@example.com"}); err != nil {
			t.Fatal(err)
		}
		o := letter("the plan")
		o.Bcc = []string{"hidden@example.net"}
		p, err = f.post.Send(ctx, agent, "rest", o)
		if err != nil || p.State != oversight.Approved {
			t.Fatalf("with overseers: %s, %v; want approved", p.State, err)
		}
		f.runAll(t)
		if len(f.hop.got) != 2 {
			t.Fatalf("%d messages left, want the mail and its copy", len(f.hop.got))
		}
		c := f.hop.got[slices.IndexFunc(f.hop.got, func(e mail.Envelope) bool { return e.From == "" })]
		m, err := mail.Parse(c.Raw)
		if err != nil || !slices.Equal(c.To, []string{"Audit@example.org", "boss@example.com"}) || m.AutoSubmitted != "auto-generated" || m.Subject != "[copy] the plan" {
			t.Errorf("copy to %v: %+v, %v", c.To, m, err)
		}
		for _, want := range []string{mail.CopyField + ": " + p.ID, "Hidden:    hidden@example.net", "Recipient: bob@example.com", "Subject: the plan", "message/rfc822"} {
			if !bytes.Contains(c.Raw, []byte(want)) {
				t.Errorf("the copy does not say %q:\n%s", want, c.Raw)
			}
		}
		original := f.hop.got[1-slices.IndexFunc(f.hop.got, func(e mail.Envelope) bool { return e.From == "" })]
		if !bytes.Contains(c.Raw, original.Raw) {
			t.Error("the copy is not what left")
		}
		// For persons it is an action like others; for the agent there is none.
		list, err := f.gate.Actions(ctx, f.person, oversight.Query{})
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(list, func(a oversight.Action) bool { return a.Kind == mailbox.CopyKind })
		if i < 0 || list[i].State != oversight.Done {
			t.Fatalf("actions %+v", list)
		}
		mine, err := f.gate.Actions(ctx, agent, oversight.Query{})
		if err != nil || slices.ContainsFunc(mine, func(a oversight.Action) bool { return a.Kind == mailbox.CopyKind }) {
			t.Errorf("the agent sees its copy: %v", err)
		}
		if _, err := f.gate.Action(ctx, agent, list[i].ID); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("the agent reads its copy: %v", err)
		}
		if _, err := f.post.Cancel(ctx, agent, list[i].ID); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("the agent cancels its copy: %v", err)
		}
		ms, err := f.post.Messages(ctx, agent, k, 0)
		if err != nil || len(ms) != 1 || ms[0].Subject != "the plan" {
			t.Errorf("the inbox keeps %d messages, %v; want the mail alone", len(ms), err)
		}

		// A crash after it was made: there is no second one.
		f.shift(t, `update action set state = 'approved', version = version + 1, settled_at = 0 where id = $1`, p.ID)
		f.shift(t, `update delivery set state = 'queued', settled_at = 0, next_at = 0 where action_id = $1`, p.ID)
		f.runAll(t)
		n := 0
		for _, e := range f.hop.got {
			if e.From == "" {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%d copies", n)
		}

		// While the copy may not leave, the mail waits.
		s, err := f.gate.SwitchOn(ctx, f.person, oversight.Switch{Scope: oversight.ScopeDomain, Target: "example.org", Reason: "theirs is broken"})
		if err != nil {
			t.Fatal(err)
		}
		was := len(f.hop.got)
		if p, err = f.post.Send(ctx, agent, "rest", letter("behind a switch")); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		if got, err := f.gate.Action(ctx, agent, p.ID); err != nil || got.State != oversight.Approved || len(f.hop.got) != was || !strings.Contains(got.Result, "overseers") {
			t.Errorf("while its copy is stopped: %s %q, %v, %d left", got.State, got.Result, err, len(f.hop.got)-was)
		}
		if err := f.gate.SwitchOff(ctx, f.person, s.ID); err != nil {
			t.Fatal(err)
		}
		f.shift(t, `update action set not_before = 0 where id = $1`, p.ID)
		f.runAll(t)
		if len(f.hop.got) != was+2 {
			t.Errorf("%d left afterwards, want 2", len(f.hop.got)-was)
		}

		// An inbox whose copies reach nobody is not monitored.
		f.hop.outcome = mail.Refused
		if _, err := f.post.Send(ctx, agent, "rest", letter("to nobody")); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		if got, err := f.post.Directory.Find(ctx, f.person, b.ID); err != nil || got.Mode != policy.GatedSend || !strings.Contains(got.ModeReason, "overseers' copy") {
			t.Errorf("after its copy bounced: %+v, %v", got, err)
		}
	})
}

// TestModeMatrix: each mode at each door, to one who is on the allow list and to
// one who is not, as the modes alone judge it.
func TestModeMatrix(t *testing.T) {
	offices(t, nil, mailbox.Config{}, func(t *testing.T, f *fixture, _, _ office) {
		ctx := t.Context()
		f.judgedBy(t, modes{})
		if _, err := f.post.Overseers.Set(ctx, f.person, "", []string{"boss@example.com"}); err != nil {
			t.Fatal(err)
		}
		for _, mode := range policy.Modes() {
			name := strings.ReplaceAll(string(mode), "_", "-")
			b, agent, _ := f.agentIn(t, name, mode)
			if _, err := f.post.AllowList.Add(ctx, f.person, b.ID, "*@listed.example", noEnd); err != nil {
				t.Fatal(err)
			}
			sandbox := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: agent.Project, Inbox: b.ID}
			for _, to := range []string{"bob@listed.example", "bob@example.com"} {
				want := map[policy.Mode]oversight.State{policy.GatedAll: oversight.Pending, policy.GatedSend: oversight.Pending, policy.Monitored: oversight.Approved, policy.Autonomous: oversight.Approved}[mode]
				if mode == policy.GatedSend && strings.HasSuffix(to, "listed.example") {
					want = oversight.Approved
				}
				raw := func(subject string) []byte {
					return []byte("From: " + b.Address + "\r\nTo: " + to + "\r\nSubject: " + subject + "\r\n\r\nt\r\n")
				}
				for door, send := range map[string]func() (mailbox.Proposed, error){
					"rest": func() (mailbox.Proposed, error) { return f.post.Send(ctx, agent, "rest", letter("rest", to)) },
					"mcp":  func() (mailbox.Proposed, error) { return f.post.Send(ctx, sandbox, "mcp", letter("mcp", to)) },
					"submission": func() (mailbox.Proposed, error) {
						return f.post.SendRaw(ctx, agent, "submission", b.Address, []string{to}, raw("submission"))
					},
					"captured": func() (mailbox.Proposed, error) {
						return f.post.SendRaw(ctx, sandbox, "smtp", b.Address, []string{to}, raw("captured"))
					},
				} {
					p, err := send()
					if mode == policy.ReadOnly {
						if !errors.Is(err, directory.ErrReadOnly) || !strings.Contains(err.Error(), "read_only") {
							t.Errorf("%s, %s, to %s: %v, want ErrReadOnly", mode, door, to, err)
						}
						continue
					}
					if err != nil || p.State != want {
						t.Errorf("%s, %s, to %s: %s, %v; want %s", mode, door, to, p.State, err, want)
					}
				}
			}
			// One who is not listed among those who are.
			p, err := f.post.Send(ctx, agent, "rest", letter("both", "bob@listed.example", "eve@example.com"))
			if mode == policy.GatedSend && (err != nil || p.State != oversight.Pending) {
				t.Errorf("%s to both: %s, %v", mode, p.State, err)
			}
		}
		// What a rule approved is judged again when it leaves: the list was
		// shortened, and the mode lowered, meanwhile.
		late := func(mode policy.Mode, to string, change func(agent auth.Principal)) oversight.State {
			t.Helper()
			b, agent, _ := f.agentIn(t, "", mode) //nolint:contextcheck // the test's own
			if _, err := f.post.AllowList.Add(ctx, f.person, b.ID, "*@listed.example", noEnd); err != nil {
				t.Fatal(err)
			}
			p, err := f.post.Send(ctx, agent, "rest", letter("late", to))
			if err != nil || p.State != oversight.Approved {
				t.Fatalf("%s, %v", p.State, err)
			}
			change(agent)
			f.runAll(t) //nolint:contextcheck // the test's own
			a, err := f.gate.Action(ctx, f.person, p.ID)
			if err != nil {
				t.Fatal(err)
			}
			return a.State
		}
		if got := late(policy.GatedSend, "bob@listed.example", func(agent auth.Principal) {
			if err := f.post.AllowList.Remove(ctx, agent, "", "*@listed.example"); err != nil {
				t.Fatal(err)
			}
		}); got != oversight.Pending {
			t.Errorf("off the list before it left: %s, want pending", got)
		}
		for mode, want := range map[policy.Mode]oversight.State{policy.GatedSend: oversight.Pending, policy.ReadOnly: oversight.Denied} {
			got := late(policy.Autonomous, "bob@example.com", func(agent auth.Principal) {
				if _, err := f.post.SetMode(ctx, agent, "", mode, ""); err != nil {
					t.Fatal(err)
				}
			})
			if got != want {
				t.Errorf("lowered to %s before it left: %s, want %s", mode, got, want)
			}
		}
	})
}

// noEnd is the end of what has none.
var noEnd time.Time
