package mailbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// byPolicy judges by a document and the modes, as a server does.
type byPolicy struct{ d *policy.Document }

func (j byPolicy) Judge(_ context.Context, _ *store.Tx, _ string, r policy.Request) (policy.Verdict, error) {
	return policy.Decide(j.d, r), nil
}

// post is the way of mail between inboxes of this server and one outside, whose addresses
// forward what they get.
type post struct {
	mu      sync.Mutex
	forward map[string]string // outside address: where its mail goes
	rewrite bool              // the outside server writes as itself, and leaves fields of programs out
	queue   []mail.Envelope
	sent    int
}

func (p *post) Deliver(_ context.Context, e mail.Envelope) (out []mail.Delivery, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, to := range e.To {
		p.sent++
		one := mail.Envelope{From: e.From, To: []string{to}, Raw: e.Raw}
		if next, ok := p.forward[to]; ok {
			one.To = []string{next}
			if p.rewrite {
				one.From = to
				one.Raw = fmt.Appendf(nil, "From: %s\r\nTo: %s\r\nSubject: forwarded %d\r\nMessage-ID: <%d@out.test>\r\nAuto-Submitted: auto-generated\r\n\r\nhello\r\n", to, next, p.sent, p.sent)
			}
		}
		p.queue = append(p.queue, one)
		out = append(out, mail.Delivery{Recipient: to, Outcome: mail.Accepted, Code: 250, Detail: "250 ok"})
	}
	return out, nil
}

// A bot is an agent that answers whatever comes, to whom it is told.
type bot struct {
	inbox directory.Inbox
	who   auth.Principal
	key   *seal.Key
	to    string // empty: the sender, as a reply
	fresh bool   // it writes a new mail with a new subject instead of a reply
	read  map[string]bool
}

type loop struct {
	*fixture
	t    *testing.T
	way  *post
	bots []*bot
	n    int
}

// looping returns bots whose inboxes are in mode autonomous, under a policy.
func looping(t *testing.T, db *store.DB, document string, names ...string) *loop {
	t.Helper()
	f := setup(t, db)
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	blobs, err := store.OpenBlobs(f.blobs)
	if err != nil {
		t.Fatal(err)
	}
	d, err := policy.Parse([]byte(document))
	if err != nil {
		t.Fatal(err)
	}
	l := &loop{fixture: f, t: t, way: &post{forward: map[string]string{}}}
	f.gate = oversight.NewGate(log, db, byPolicy{d})
	f.post = mailbox.New(log, db, f.gate, mailbox.Config{Blobs: blobs, Transport: l.way, Domain: "agents.test", Secret: secret})
	for _, name := range names {
		b, key, err := f.post.CreateInbox(t.Context(), f.person, directory.NewInbox{Address: name, Mode: policy.Autonomous}, "")
		if err != nil {
			t.Fatal(err)
		}
		who, err := auth.CheckKey(t.Context(), db, key)
		if err != nil {
			t.Fatal(err)
		}
		k, err := f.post.Keys.Open(t.Context(), who, key, "")
		if err != nil {
			t.Fatal(err)
		}
		l.bots = append(l.bots, &bot{inbox: b, who: who, key: k, read: map[string]bool{}})
	}
	return l
}

// deliver executes what may leave, and brings it where it goes.
func (l *loop) deliver() {
	l.t.Helper()
	for {
		ran, err := l.gate.RunOne(l.t.Context())
		if err != nil {
			l.t.Fatal(err)
		}
		if !ran {
			break
		}
	}
	l.way.mu.Lock()
	queue := l.way.queue
	l.way.queue = nil
	l.way.mu.Unlock()
	for _, e := range queue {
		if strings.HasSuffix(e.To[0], "@agents.test") {
			if err := l.post.Receive(l.t.Context(), mailbox.Arrival{Envelope: e, Remote: "127.0.0.1"}); err != nil {
				l.t.Fatal(err)
			}
		}
	}
}

func (l *loop) send(b *bot, to string) mailbox.Proposed {
	l.t.Helper()
	l.n++
	p, err := l.post.Send(l.t.Context(), b.who, "mcp", mailbox.Outgoing{Draft: mail.Draft{To: []string{to}, Subject: fmt.Sprint("matter ", l.n), Text: fmt.Sprint("text ", l.n)}})
	if err != nil {
		l.t.Fatal(err)
	}
	return p
}

// answer has each bot answer what came since it last looked, and returns what it proposed.
func (l *loop) answer() (out []mailbox.Proposed) {
	l.t.Helper()
	for _, b := range l.bots {
		list, err := l.post.Messages(l.t.Context(), b.who, b.key, 0)
		if err != nil {
			l.t.Fatal(err)
		}
		for _, m := range list {
			if m.Direction != message.In || b.read[m.ID] {
				continue
			}
			b.read[m.ID] = true
			switch {
			case b.to != "":
				out = append(out, l.send(b, b.to))
			case b.fresh:
				from, err := mail.ParseAddress("from", m.From)
				if err != nil {
					l.t.Fatal(err)
				}
				out = append(out, l.send(b, from.Addr))
			default:
				l.n++
				p, err := l.post.Send(l.t.Context(), b.who, "mcp", mailbox.Outgoing{ReplyTo: m.ID, Key: b.key, Draft: mail.Draft{Text: fmt.Sprint("text ", l.n)}})
				if err != nil {
					l.t.Fatal(err)
				}
				out = append(out, p)
			}
		}
	}
	return out
}

// run has the bots answer for many turns, and returns what was held.
func (l *loop) run() (held []mailbox.Proposed) {
	l.t.Helper()
	for range 60 {
		l.deliver()
		list := l.answer()
		for _, p := range list {
			if p.State != oversight.Approved {
				held = append(held, p)
			}
		}
		if len(list) == 0 {
			break
		}
	}
	return held
}

const answering = "version: 1\nmachines: ['*@out.test']\nrules: []\n"

// TestLoopsStop has agents answer one another, under a policy that lets them answer the
// machines outside as well: only the limit of automatic answers stops them.
func TestLoopsStop(t *testing.T) {
	for _, tc := range []struct {
		name   string
		bots   []string
		wire   func(l *loop)
		most   int // mails, the first one too
		fields string
	}{
		{"a pair that replies", []string{"anna", "bert"}, func(*loop) {}, 1 + policy.MaxAnswers, ""},
		{"a pair that writes anew", []string{"anna", "bert"}, func(l *loop) { l.bots[0].fresh, l.bots[1].fresh = true, true }, 1 + policy.MaxAnswers, ""},
		{"a ring of three", []string{"anna", "bert", "carl"}, func(l *loop) {
			l.bots[0].to, l.bots[1].to, l.bots[2].to = "bert@agents.test", "carl@agents.test", "anna@agents.test"
		}, 1 + 3*policy.MaxAnswers, ""},
		{"a detour over a server that forwards", []string{"anna", "bert"}, func(l *loop) {
			l.way.forward = map[string]string{"x@out.test": "bert@agents.test", "y@out.test": "anna@agents.test"}
			l.bots[0].to, l.bots[1].to = "x@out.test", "y@out.test"
		}, 2 + 2*policy.MaxAnswers, ""},
		{"a detour over a server that writes as itself", []string{"anna", "bert"}, func(l *loop) {
			l.way.forward, l.way.rewrite = map[string]string{"x@out.test": "bert@agents.test", "y@out.test": "anna@agents.test"}, true
			l.bots[0].to, l.bots[1].to = "x@out.test", "y@out.test"
		}, 2 + 2*policy.MaxAnswers, ""},
		{"an outside machine with a new tag each time", []string{"anna"}, func(l *loop) {
			l.way.forward, l.way.rewrite = map[string]string{"x@out.test": "anna@agents.test"}, true
			for i := range 100 {
				l.way.forward[fmt.Sprintf("x+%d@out.test", i)] = "anna@agents.test"
			}
			l.bots[0].to = "x+%d@out.test"
		}, 2 + policy.MaxAnswers, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				l := looping(t, db, answering, tc.bots...)
				tc.wire(l)
				first := l.bots[0].to
				if first == "" {
					first = "bert@agents.test"
				}
				if strings.Contains(first, "%d") { // the bot puts the number of its mail there
					l.tagged(t, first, tc.most)
					return
				}
				if p := l.send(l.bots[0], first); p.State != oversight.Approved {
					t.Fatalf("the first mail is %s: %s", p.State, p.Verdict)
				}
				held := l.run()
				if l.way.sent > tc.most || l.way.sent < policy.MaxAnswers {
					t.Errorf("%d mails left, want at most %d", l.way.sent, tc.most)
				}
				l.heldByLimit(t, held)
			})
		})
	}
}

// tagged has the only bot write to an address with a new tag for whatever comes.
func (l *loop) tagged(t *testing.T, form string, most int) {
	t.Helper()
	var held []mailbox.Proposed
	for i := range 40 {
		p := l.send(l.bots[0], fmt.Sprintf(form, i))
		if p.State != oversight.Approved {
			held = append(held, p)
			break
		}
		l.deliver()
	}
	if l.way.sent > most {
		t.Errorf("%d mails left, want at most %d", l.way.sent, most)
	}
	l.heldByLimit(t, held)
}

// heldByLimit checks that mail was held because of the limit, that a reviewer and the record
// say so, and that it leaves when a person approves it.
func (l *loop) heldByLimit(t *testing.T, held []mailbox.Proposed) {
	t.Helper()
	ctx := t.Context()
	if len(held) == 0 {
		t.Fatal("nothing was held")
	}
	p := held[0]
	if p.State != oversight.Pending || p.Rule != policy.RuleAnswers || !strings.Contains(p.Verdict, "6 automatic answers") {
		t.Fatalf("held as %s by %q: %s", p.State, p.Rule, p.Verdict)
	}
	a, err := l.gate.Action(ctx, l.person, p.ID)
	if err != nil {
		t.Fatal(err)
	}
	if f := a.Findings(); len(f) == 0 || f[0].Kind != policy.FindAnswers && !a.FoundAbout(policy.FindAnswers, a.Request.AnswersTo) {
		t.Errorf("the reviewer sees %+v", f)
	}
	if err := audit.NewSequencer(slog.New(slog.DiscardHandler), l.db).Recover(ctx); err != nil {
		t.Fatal(err)
	}
	if n := l.count(t, `select count(*) from audit_entry where verb = $1`, string(audit.InboxAnswers)); n == 0 {
		t.Error("the record does not say that automatic answers were held")
	}
	before := l.way.sent
	if err := l.gate.Decide(ctx, l.person, oversight.Decision{ID: p.ID, Version: a.Version, Digest: a.Hex(), Approve: true, Seen: a.Grave()}); err != nil {
		t.Fatal(err)
	}
	l.deliver()
	if l.way.sent != before+1 {
		t.Errorf("%d mails left after the approval, want %d", l.way.sent, before+1)
	}
}

// TestAnswersToMachinesWait has machines write to an inbox in mode autonomous.
func TestAnswersToMachinesWait(t *testing.T) {
	const from = "From: Bob <bob@out.test>\r\n"
	for _, tc := range []struct {
		name, header string
		sender       string // of the envelope
		held         bool
	}{
		{"a person", from, "bob@out.test", false},
		{"a person who says so", from + "Auto-Submitted: no\r\n", "bob@out.test", false},
		{"a receipt that is not wanted", from + "X-Auto-Response-Suppress: DR, RN\r\n", "bob@out.test", false},
		{"a contact form", "From: noreply@out.test\r\nReply-To: bob@out.test\r\n", "bob@out.test", false},
		{"a vacation notice", from + "Auto-Submitted: auto-replied (vacation)\r\n", "bob@out.test", true},
		{"one that says both", from + "Auto-Submitted: no\r\nauto-submitted: auto-replied\r\n", "bob@out.test", true},
		{"sendmail's", from + "Precedence: bulk\r\n", "bob@out.test", true},
		{"a list", from + "List-Id: <talk.out.test>\r\n", "bob@out.test", true},
		{"Exchange's", from + "X-Auto-Response-Suppress: DR, OOF, AutoReply\r\n", "bob@out.test", true},
		{"a rule of Exchange's", from + "X-MS-Exchange-Generated-Message-Source: Mailbox Rules Agent\r\n", "bob@out.test", true},
		{"an autoresponder", from + "X-Autorespond: yes\r\n", "bob@out.test", true},
		{"a bounce", from, "", true},
		{"nobody reads", "From: No Reply <no-reply@out.test>\r\n", "x@out.test", true},
		{"one that poses as an agent of the project", "From: bert@agents.test\r\nReply-To: robot@out.test\r\nAuto-Submitted: auto-replied\r\n", "bert@agents.test", true},
		{"another agent of the project", "From: bert@agents.test\r\nAuto-Submitted: auto-replied\r\n", "bert@agents.test", false},
		{"a daemon", "From: MAILER-DAEMON@out.test\r\n", "x@out.test", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				l := looping(t, db, "version: 1\nrules: []\n", "anna", "dora", "carl", "bert")
				bots := l.bots
				for i, how := range []string{"a reply", "a new mail", "a reply over SMTP that names it, later"} {
					t.Run(how, func(t *testing.T) {
						b := bots[i]
						l.t, l.bots = t, bots[i:i+1]
						raw := []byte(tc.header + "Subject: hello\r\nMessage-ID: <7@out.test>\r\n\r\nhello\r\n")
						arrival := mailbox.Arrival{Envelope: mail.Envelope{From: tc.sender, To: []string{b.inbox.Address}, Raw: raw}, Remote: "192.0.2.1"}
						if err := l.post.Receive(t.Context(), arrival); err != nil {
							t.Fatal(err)
						}
						m := mail.Read(raw)
						to := m.From[0].Addr
						if len(m.ReplyTo) > 0 {
							to = m.ReplyTo[0].Addr
						}
						var p mailbox.Proposed
						var err error
						switch how {
						case "a reply":
							p = l.answer()[0]
						case "a new mail":
							p = l.send(b, to)
						default:
							l.exec(t, `update heard set at = at - $1 where inbox_id = $2`, int64(48*3600*1e6), b.inbox.ID)
							raw := []byte("From: " + b.inbox.Address + "\r\nTo: carol@out.test\r\nSubject: Re: hello\r\nIn-Reply-To: <7@out.test>\r\n\r\nyes\r\n")
							if p, err = l.post.SendRaw(t.Context(), b.who, "smtp", b.inbox.Address, []string{"carol@out.test"}, raw); err != nil {
								t.Fatal(err)
							}
						}
						want := oversight.Approved
						if tc.held {
							want = oversight.Pending
						}
						if p.State != want || tc.held && (p.Rule != policy.RuleMachines || len(p.Findings()) == 0) {
							t.Errorf("%s by %q: %s; findings %+v", p.State, p.Rule, p.Verdict, p.Findings())
						}
					})
				}
			})
		})
	}
}

// TestApprovedMailIsUnmarked checks the owner's choice for the field Auto-Submitted, on the
// bytes that a person approves and on those that leave.
func TestApprovedMailIsUnmarked(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		l := looping(t, db, "version: 1\nrules:\n  - {id: board, kind: email.send, when: \"to.exists(a, a == 'board@out.test')\", then: ask}\n", "anna")
		b := l.bots[0]
		unapproved := directory.SubmittedUnapproved
		if _, err := l.post.Update(ctx, b.who, b.inbox.ID, mailbox.Change{AutoSubmitted: &unapproved}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("the agent itself: %v", err)
		}
		odd := directory.AutoSubmitted("sometimes")
		if _, err := l.post.Update(ctx, l.person, b.inbox.ID, mailbox.Change{AutoSubmitted: &odd}); !errors.Is(err, directory.ErrInvalid) {
			t.Errorf("an odd value: %v", err)
		}
		field := func(id string) string {
			a, err := l.gate.Action(ctx, l.person, id)
			if err != nil {
				t.Fatal(err)
			}
			env, err := mail.ParsePayload(a.Payload)
			if err != nil {
				t.Fatal(err)
			}
			p := mail.Read(env.Raw)
			return p.AutoSubmitted
		}
		approve := func(id string) {
			a, err := l.gate.Action(ctx, l.person, id)
			if err != nil {
				t.Fatal(err)
			}
			if err := l.gate.Decide(ctx, l.person, oversight.Decision{ID: id, Version: a.Version, Digest: a.Hex(), Approve: true, Seen: a.Grave()}); err != nil {
				t.Fatal(err)
			}
			for {
				if ran, err := l.gate.RunOne(ctx); err != nil || !ran {
					break
				}
			}
			if n := len(l.way.queue); n == 0 || !strings.Contains(string(l.way.queue[n-1].Raw), "\r\nMIME-Version: 1.0\r\n") {
				t.Fatalf("%d mails left", n)
			}
		}
		left := func() string {
			p := mail.Read(l.way.queue[len(l.way.queue)-1].Raw)
			return p.AutoSubmitted
		}

		held := l.send(b, "board@out.test")
		if got := field(held.ID); got != "auto-generated" {
			t.Errorf("by default what waits has %q", got)
		}
		if approve(held.ID); left() != "auto-generated" {
			t.Errorf("by default what left has %q", left())
		}
		if _, err := l.post.Update(ctx, l.person, b.inbox.ID, mailbox.Change{AutoSubmitted: &unapproved}); err != nil {
			t.Fatal(err)
		}
		held = l.send(b, "board@out.test")
		if got := field(held.ID); held.State != oversight.Pending || got != "" {
			t.Errorf("what waits is %s and has %q", held.State, got)
		}
		subject := "another matter"
		a, err := l.post.ReviseByPerson(ctx, l.person, held.ID, held.Version, mail.Edit{Subject: &subject})
		if err != nil {
			t.Fatal(err)
		}
		if got := field(a.ID); got != "" {
			t.Errorf("what a person edited has %q", got)
		}
		if approve(a.ID); left() != "" {
			t.Errorf("what was approved left with %q", left())
		}
		if p := l.send(b, "carol@out.test"); p.State != oversight.Approved || field(p.ID) != "auto-generated" {
			t.Errorf("what nobody approves is %s and has %q", p.State, field(p.ID))
		}
	})
}
