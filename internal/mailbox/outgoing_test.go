package mailbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/quota"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// An office is one process: a post office with a database handle of its own.
type office struct {
	db   *store.DB
	gate *oversight.Gate
	post *mailbox.PostOffice
}

// offices runs fn with two processes on one database.
func offices(t *testing.T, rules oversighttest.Rules, c mailbox.Config, fn func(t *testing.T, f *fixture, a, b office)) {
	t.Helper()
	run := func(t *testing.T, source string) {
		var os []office
		for range 2 {
			os = append(os, office{db: storetest.Open(t, source)})
		}
		f := setup(t, os[0].db)
		log := slog.New(slog.NewTextHandler(t.Output(), nil))
		for i := range os {
			os[i].gate = oversight.NewGate(log, os[i].db, rules)
			blobs, err := store.OpenBlobs(f.blobs)
			if err != nil {
				t.Fatal(err)
			}
			c.Blobs, c.Transport, c.Domain = blobs, f.hop, "agents.test"
			os[i].post = mailbox.New(log, os[i].db, os[i].gate, c)
		}
		f.gate, f.post = os[0].gate, os[0].post
		fn(t, f, os[0], os[1])
	}
	t.Run("sqlite", func(t *testing.T) { run(t, filepath.Join(t.TempDir(), "postern.db")) })
	source := storetest.PostgresURL(t)
	if source == "" {
		t.Logf("%s is not set: not run on PostgreSQL", storetest.PostgresVar)
		return
	}
	t.Run("postgres", func(t *testing.T) { run(t, source) })
}

var everything = oversighttest.Rules{{ID: "all", Kind: "*", Effect: policy.Allow}}

func letter(subject string, to ...string) mailbox.Outgoing {
	if len(to) == 0 {
		to = []string{"bob@example.com"}
	}
	return mailbox.Outgoing{Draft: mail.Draft{To: to, Subject: subject, Text: "t"}}
}

func (f *fixture) shift(t *testing.T, query string, args ...any) {
	t.Helper()
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		if _, err := tx.ExecContext(t.Context(), query, args...); err != nil {
			return err
		}
		return oversighttest.Settle(t.Context(), tx)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestOnce: a request with a key is made once, whichever process it reaches,
// and the key means nothing to another inbox.
func TestOnce(t *testing.T) {
	offices(t, everything, mailbox.Config{}, func(t *testing.T, f *fixture, a, b office) {
		_, who, _ := f.inbox(t, "alice")
		_, other, _ := f.inbox(t, "bella")
		o := letter("hello")
		o.IdempotencyKey = "k"
		var mu sync.Mutex // guards ids, fresh
		ids, fresh := map[string]bool{}, 0
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				p, err := []office{a, b}[i%2].post.Send(t.Context(), who, "rest", o)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				ids[p.ID] = true
				if !p.Replayed {
					fresh++
				}
			})
		}
		wg.Wait()
		if len(ids) != 1 || fresh != 1 {
			t.Fatalf("8 requests made %d actions, %d of them new", len(ids), fresh)
		}
		if p, err := f.post.Send(t.Context(), other, "rest", o); err != nil || p.Replayed || ids[p.ID] {
			t.Errorf("another inbox with the key: %v, %v", p.Replayed, err)
		}
		for _, tt := range []struct {
			name   string
			change func(*mailbox.Outgoing)
		}{
			{"text", func(o *mailbox.Outgoing) { o.Text = "u" }},
			{"a hidden recipient", func(o *mailbox.Outgoing) { o.Bcc = []string{"eve@example.com"} }},
			{"a file", func(o *mailbox.Outgoing) { o.Attachments = []mail.Attachment{{Name: "a"}} }},
			{"time", func(o *mailbox.Outgoing) { o.SendAt = time.Now().Add(time.Hour) }},
			{"undo", func(o *mailbox.Outgoing) { o.Undo = new(time.Duration) }},
		} {
			changed := o
			tt.change(&changed)
			if _, err := f.post.Send(t.Context(), who, "rest", changed); !errors.Is(err, mailbox.ErrIdempotency) {
				t.Errorf("the key with other %s: %v, want ErrIdempotency", tt.name, err)
			}
		}
		// What was answered first is answered again, whatever has become of it.
		for range 10 {
			ran, err := f.gate.RunOne(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if !ran {
				break
			}
		}
		if p, err := b.post.Send(t.Context(), who, "rest", o); err != nil || !p.Replayed || p.State != oversight.Approved {
			t.Errorf("replayed when done: %s, %v; want what was answered then", p.State, err)
		}
		f.shift(t, `update send_once set at = at - $1`, (25 * time.Hour).Microseconds())
		f.shift(t, `delete from send_content`)
		if p, err := f.post.Send(t.Context(), who, "rest", o); err != nil || p.Replayed || ids[p.ID] {
			t.Errorf("the key a day later: %v, %v; want a new action", p.Replayed, err)
		}
	})
}

// TestReplayIsFirst: what was taken once is answered alike, although it could not
// be taken now.
func TestReplayIsFirst(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		b, who, key := f.inbox(t, "alice")
		k, id := f.arrived(t, b, who, key, "From: bob@example.com\r\nMessage-ID: <1@x>\r\nSubject: x\r\n\r\nx\r\n")
		o := mailbox.Outgoing{Key: k, ReplyTo: id, IdempotencyKey: "k", Draft: mail.Draft{Text: "yes"}}
		first, err := f.post.Send(t.Context(), who, "rest", o)
		if err != nil {
			t.Fatal(err)
		}
		f.shift(t, `delete from message where id = $1`, id)
		if p, err := f.post.Send(t.Context(), who, "rest", o); err != nil || p.ID != first.ID || !p.Replayed {
			t.Errorf("an answer to what is gone: %s, %v; want the first", p.ID, err)
		}
		o.IdempotencyKey = ""
		if _, err := f.post.Send(t.Context(), who, "rest", o); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("without the key: %v, want ErrNotFound", err)
		}
	})
}

// TestOnceRefused: a request that was refused has not used up its key.
func TestOnceRefused(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, who, _ := f.inbox(t, "alice")
		o := letter("hello", "nonsense")
		o.IdempotencyKey = "k"
		if _, err := f.post.Send(t.Context(), who, "rest", o); err == nil {
			t.Fatal("sent to nonsense")
		}
		o.To = []string{"bob@example.com"}
		if p, err := f.post.Send(t.Context(), who, "rest", o); err != nil || p.Replayed {
			t.Errorf("corrected: %v, %v", p.Replayed, err)
		}
	})
}

// TestDuplicate: the same content within a minute is not sent twice unseen, in
// any mode and through any process.
func TestDuplicate(t *testing.T) {
	offices(t, everything, mailbox.Config{}, func(t *testing.T, f *fixture, a, b office) {
		_, who, _ := f.inbox(t, "alice")
		_, other, _ := f.inbox(t, "bella")
		var mu sync.Mutex // guards made, refused
		var made []string
		refused := 0
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				o := letter("hello")
				o.IdempotencyKey = fmt.Sprint(i) // another key makes it no other content
				p, err := []office{a, b}[i%2].post.Send(t.Context(), who, "rest", o)
				mu.Lock()
				defer mu.Unlock()
				var same *mailbox.DuplicateError
				switch {
				case err == nil:
					made = append(made, p.ID)
				case errors.As(err, &same):
					refused++
				default:
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if len(made) != 1 || refused != 7 {
			t.Fatalf("8 of the same made %d actions and %d were refused", len(made), refused)
		}
		var same *mailbox.DuplicateError
		if _, err := f.post.Send(t.Context(), who, "mcp", letter("hello")); !errors.As(err, &same) || same.Action != made[0] || !errors.Is(err, mailbox.ErrDuplicate) {
			t.Errorf("by another door: %v, want a DuplicateError naming %s", err, made[0])
		}
		if _, err := f.post.Send(t.Context(), other, "rest", letter("hello")); err != nil {
			t.Errorf("from another inbox: %v", err)
		}
		if _, err := f.post.Send(t.Context(), who, "rest", letter("hello", "bob@example.com", "carol@example.com")); err != nil {
			t.Errorf("to somebody else too: %v", err)
		}
		o := letter("hello")
		o.AllowDuplicate = true
		p, err := f.post.Send(t.Context(), who, "rest", o)
		if err != nil || p.State != oversight.Pending || !strings.Contains(p.Note, made[0]) {
			t.Fatalf("meant: %s with note %q, %v; want it pending, with a note", p.State, p.Note, err)
		}
		v, err := f.gate.Show(p.Action)
		if err != nil || !slices.Contains(v.Notes, p.Note) {
			t.Errorf("the reviewer reads %q, %v", v.Notes, err)
		}
		// What was taken back was not sent.
		if _, err := f.post.Cancel(t.Context(), who, p.ID); err != nil {
			t.Fatal(err)
		}
		again, err := f.post.Send(t.Context(), who, "rest", letter("hello"))
		if err != nil || again.State != oversight.Approved {
			t.Errorf("after it was cancelled: %s, %v", again.State, err)
		}
		f.shift(t, `update send_content set at = at - $1`, (2 * time.Minute).Microseconds())
		if p, err := f.post.Send(t.Context(), who, "rest", letter("hello")); err != nil || p.State != oversight.Approved {
			t.Errorf("two minutes later: %s, %v", p.State, err)
		}
	})
}

const captured = "From: alice@agents.test\r\nTo: bob@example.com\r\nSubject: hello\r\nMessage-ID: <%s@sandbox>\r\n\r\nt\r\n"

// TestRawOnce is a program that lost our 250 and sends once more.
func TestRawOnce(t *testing.T) {
	offices(t, everything, mailbox.Config{}, func(t *testing.T, f *fixture, a, b office) {
		_, who, _ := f.inbox(t, "alice")
		raw := func(o office, id string, to ...string) mailbox.Proposed {
			t.Helper()
			p, err := o.post.SendRaw(t.Context(), who, "smtp", "alice@agents.test", to, fmt.Appendf(nil, captured, id))
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		first := raw(a, "1", "bob@example.com")
		if p := raw(b, "1", "bob@example.com"); p.ID != first.ID || !p.Replayed {
			t.Errorf("the same once more is %s, replayed %v; want %s", p.ID, p.Replayed, first.ID)
		}
		if p := raw(a, "1", "carol@example.com"); p.ID == first.ID || p.State != oversight.Approved {
			t.Errorf("the same to another, as mail programs split it: %s, %s", p.ID, p.State)
		}
		if p := raw(b, "2", "bob@example.com"); p.ID == first.ID || p.State != oversight.Pending || !strings.Contains(p.Note, first.ID) {
			t.Errorf("the same under another Message-ID: %s with note %q, want it held", p.State, p.Note)
		}
		if _, err := f.post.Send(t.Context(), who, "rest", letter("hello")); !errors.Is(err, mailbox.ErrDuplicate) {
			t.Errorf("the same through another door: %v, want ErrDuplicate", err)
		}
	})
}

// TestLimitsAreExact: however many processes send, exactly so many are taken,
// and one inbox takes nothing from another.
func TestLimitsAreExact(t *testing.T) {
	const most, tries = 25, 60
	c := mailbox.Config{InboxLimits: quota.Limits{PerDay: most, PerMinute: 1000}}
	offices(t, nil, c, func(t *testing.T, f *fixture, a, b office) {
		_, who, _ := f.inbox(t, "alice")
		_, other, _ := f.inbox(t, "bella")
		var mu sync.Mutex // guards taken, left
		taken, left := 0, map[int64]bool{}
		var wg sync.WaitGroup
		for w := range 6 {
			wg.Go(func() {
				for i := range tries / 6 {
					p, err := []office{a, b}[w%2].post.Send(t.Context(), who, "rest", letter(fmt.Sprint(w, i)))
					var reached *quota.LimitError
					switch {
					case err == nil:
						mu.Lock()
						taken++
						for _, q := range p.Left {
							if q.Name == "inbox-day" {
								left[q.Left] = true
							}
						}
						mu.Unlock()
					case errors.As(err, &reached):
						if reached.Name != "inbox-day" || reached.Limit != most || reached.Left != 0 || reached.Resets <= 0 || !errors.Is(err, quota.ErrLimit) {
							t.Errorf("refused by %+v", reached)
						}
					default:
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		if taken != most || len(left) != most {
			t.Errorf("%d of %d tries were taken, with %d different numbers left; want %d", taken, tries, len(left), most)
		}
		as, err := f.gate.Actions(t.Context(), f.person, oversight.Query{Limit: 500})
		if err != nil || len(as) != most {
			t.Errorf("%d actions, %v; want %d", len(as), err, most)
		}
		if _, err := b.post.Send(t.Context(), other, "rest", letter("x")); err != nil {
			t.Errorf("the other inbox: %v", err)
		}
		f.shift(t, `update send_use set starts = starts - $1`, (25 * time.Hour).Microseconds())
		p, err := b.post.Send(t.Context(), who, "rest", letter("tomorrow"))
		if err != nil {
			t.Errorf("in the next window: %v", err)
		}
		if i := slices.IndexFunc(p.Left, func(q quota.Quota) bool { return q.Name == "inbox-day" }); i < 0 || p.Left[i].Left != most-1 {
			t.Errorf("in the next window are left %+v", p.Left)
		}
	})
}

func TestLimitKinds(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		limited := func(who auth.Principal, want string, o mailbox.Outgoing) {
			t.Helper()
			_, err := f.post.Send(ctx, who, "rest", o)
			var reached *quota.LimitError
			if want == "" && err != nil || want != "" && (!errors.As(err, &reached) || reached.Name != want) {
				t.Errorf("Send = %v, want limit %q", err, want)
			}
		}
		set := func(inbox string, l quota.Limits) {
			t.Helper()
			if err := f.post.Quotas.SetSending(ctx, f.project, inbox, quota.Sending{Limits: l}); err != nil {
				t.Fatal(err)
			}
		}
		b, who, _ := f.inbox(t, "alice")
		_, other, _ := f.inbox(t, "bella")
		set(b.ID, quota.Limits{Recipients: 3})
		limited(who, "inbox-day-recipients", letter("1", "a@x.test", "b@x.test", "c@x.test", "d@x.test"))
		limited(who, "", letter("2", "a@x.test", "b@x.test"))
		limited(who, "inbox-day-recipients", letter("3", "a@x.test", "b@x.test"))
		limited(who, "", letter("4", "a@x.test"))
		limited(other, "", letter("5", "a@x.test", "b@x.test", "c@x.test", "d@x.test"))

		set(b.ID, quota.Limits{Bytes: 5000, Recipients: quota.Unlimited})
		big := letter("6")
		big.Text = strings.Repeat("x", 4000)
		limited(who, "inbox-day-bytes", big)
		set(b.ID, quota.Limits{PerHour: 1})
		limited(who, "", letter("7"))
		limited(who, "inbox-hour", letter("8"))

		// All inboxes of a project together, and no other project's.
		set(b.ID, quota.Limits{})
		set("", quota.Limits{PerMinute: 2})
		limited(who, "", letter("9"))
		limited(other, "", letter("10"))
		limited(who, "project-minute", letter("11"))
		limited(other, "project-minute", letter("12"))
		_, key, err := f.post.CreateInbox(ctx, f.other, directory.NewInbox{Address: "foreign"}, "")
		if err != nil {
			t.Fatal(err)
		}
		foreign, err := auth.CheckKey(ctx, db, key)
		if err != nil {
			t.Fatal(err)
		}
		limited(foreign, "", letter("13"))

		// What is refused by one limit is counted by none.
		_, left, err := f.post.Quotas.Sends(ctx, f.project, "")
		if err != nil || len(left) != 1 || left[0].Left != 0 || left[0].Limit != 2 {
			t.Errorf("left of the project: %+v, %v", left, err)
		}
		for _, tt := range []struct {
			name  string
			who   auth.Principal
			inbox string
			s     quota.Sending
			want  error
		}{
			{"an inbox for itself", who, b.ID, quota.Sending{}, auth.ErrForbidden},
			{"an inbox for all", who, "", quota.Sending{}, auth.ErrForbidden},
			{"another project", f.other, b.ID, quota.Sending{}, directory.ErrNoInbox},
			{"a hostile name", f.project, "'; drop table\x00", quota.Sending{}, directory.ErrNoInbox},
			{"a long undo", f.project, b.ID, quota.Sending{Undo: time.Hour}, directory.ErrInvalid},
			{"less than none", f.project, b.ID, quota.Sending{Limits: quota.Limits{PerDay: -2}}, directory.ErrInvalid},
			{"beyond numbers", f.project, b.ID, quota.Sending{Limits: quota.Limits{Bytes: 1 << 62}}, directory.ErrInvalid},
		} {
			if err := f.post.Quotas.SetSending(ctx, tt.who, tt.inbox, tt.s); !errors.Is(err, tt.want) {
				t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
			}
		}
	})
}

// TestUndoOfInbox: a manager gives an inbox time to think, and each mail may ask
// for another.
func TestUndoOfInbox(t *testing.T) {
	offices(t, everything, mailbox.Config{}, func(t *testing.T, f *fixture, _, _ office) {
		b, who, _ := f.inbox(t, "alice")
		if err := f.post.Quotas.SetSending(t.Context(), f.person, b.ID, quota.Sending{Undo: time.Minute}); err != nil {
			t.Fatal(err)
		}
		now := letter("now")
		now.Undo = new(time.Duration)
		for _, tt := range []struct {
			o    mailbox.Outgoing
			want time.Duration
		}{{letter("later"), time.Minute}, {now, 0}} {
			before := time.Now().Truncate(time.Microsecond)
			p, err := f.post.Send(t.Context(), who, "rest", tt.o)
			if err != nil || p.Undo != tt.want || tt.want > 0 && p.Due.Sub(before) < tt.want {
				t.Errorf("%s: undo %v, due %v, %v; want %v", tt.o.Subject, p.Undo, p.Due, err, tt.want)
			}
		}
	})
}

func (f *fixture) arrived(t *testing.T, b directory.Inbox, who auth.Principal, key auth.Secret, raw string) (*seal.Key, string) {
	t.Helper()
	err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}})
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.post.Keys.Open(t.Context(), who, key, "")
	if err != nil {
		t.Fatal(err)
	}
	ms, err := f.post.Messages(t.Context(), who, k, 1)
	if err != nil || len(ms) != 1 {
		t.Fatal(len(ms), err)
	}
	return k, ms[0].ID
}

// read returns the message that an action would send.
func read(t *testing.T, a oversight.Action) (mail.Envelope, mail.Message) {
	t.Helper()
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		t.Fatal(err)
	}
	m, err := mail.Parse(env.Raw)
	if err != nil {
		t.Fatal(err)
	}
	return env, m
}

func TestReplyAndForward(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, key := f.inbox(t, "alice")
		sandbox := auth.Principal{Kind: auth.Sandbox, ID: "isb1", Project: b.Project, Inbox: b.ID}
		original, err := mail.Compose(mail.Draft{
			From: "Bob <bob@example.com>", To: []string{b.Address, "carol@example.com"}, Cc: []string{"dave@example.com"}, Subject: "Plan",
			Text: "Please send the report.", Attachments: []mail.Attachment{{Name: "plan.pdf", ContentType: "application/pdf", Data: []byte("%PDF")}},
			InReplyTo: "<0@example.com>", References: []string{"<0@example.com>"},
		}, time.Now(), "example.com")
		if err != nil {
			t.Fatal(err)
		}
		k, id := f.arrived(t, b, who, key, string(original.Raw))
		first, err := mail.Parse(original.Raw)
		if err != nil {
			t.Fatal(err)
		}

		p, err := f.post.Send(ctx, who, "rest", mailbox.Outgoing{Key: k, ReplyTo: id, ReplyAll: true, Quote: true, Draft: mail.Draft{Markdown: "**Here** it is."}})
		if err != nil {
			t.Fatal(err)
		}
		env, m := read(t, p.Action)
		slices.Sort(env.To)
		if want := []string{"bob@example.com", "carol@example.com", "dave@example.com"}; !slices.Equal(env.To, want) {
			t.Errorf("goes to %q, want %q", env.To, want)
		}
		if m.Subject != "Re: Plan" || !slices.Equal(m.InReplyTo, []string{first.MessageID}) || !slices.Equal(m.References, []string{"<0@example.com>", first.MessageID}) {
			t.Errorf("subject %q, in reply to %q, references %q", m.Subject, m.InReplyTo, m.References)
		}
		if m.AutoSubmitted != "auto-replied" || !strings.Contains(m.Text, "**Here** it is.\n\nOn ") || !strings.Contains(m.Text, "\n> Please send the report.") || !strings.Contains(m.HTML, "<strong>Here</strong>") {
			t.Errorf("auto-submitted %q, text:\n%s\nhtml:\n%s", m.AutoSubmitted, m.Text, m.HTML)
		}
		if len(m.Attachments) != 0 {
			t.Error("an answer takes the files along")
		}

		// Who writes an answer anew still answers.
		p, err = f.post.Revise(ctx, who, "rest", p.ID, 0, letter("Re: Plan"))
		if err != nil {
			t.Fatal(err)
		}
		if _, m = read(t, p.Action); !slices.Equal(m.InReplyTo, []string{first.MessageID}) || len(m.References) != 2 || m.AutoSubmitted != "auto-replied" {
			t.Errorf("revised: in reply to %q, references %q, %q", m.InReplyTo, m.References, m.AutoSubmitted)
		}

		p, err = f.post.Send(ctx, who, "rest", mailbox.Outgoing{Key: k, Forward: id, Draft: mail.Draft{To: []string{"erin@example.com"}, Text: "fyi", Attachments: []mail.Attachment{{Name: "own.txt", Data: []byte("own")}}}})
		if err != nil {
			t.Fatal(err)
		}
		env, m = read(t, p.Action)
		if !slices.Equal(env.To, []string{"erin@example.com"}) || m.Subject != "Fwd: Plan" || len(m.InReplyTo) != 0 || !strings.HasPrefix(m.Text, "fyi\n\n-----") {
			t.Errorf("forwarded to %q as %q: %s", env.To, m.Subject, m.Text)
		}
		if len(m.Attachments) != 2 || m.Attachments[0].Digest() != first.Attachments[0].Digest() || m.Attachments[0].Name != "plan.pdf" || m.Attachments[1].Name != "own.txt" {
			t.Errorf("files: %+v", m.Attachments)
		}

		// A reply to a stranger is shown as such.
		k, odd := f.arrived(t, b, who, key, "From: Bob <bob@example.com>\r\nReply-To: eve@evil.example\r\nTo: alice@agents.test\r\nSubject: x\r\nMessage-ID: <odd@example.com>\r\n\r\nx\r\n")
		p, err = f.post.Send(ctx, who, "rest", mailbox.Outgoing{Key: k, ReplyTo: odd, Draft: mail.Draft{Text: "sure"}})
		if err != nil || !strings.Contains(p.Note, "eve@evil.example") {
			t.Errorf("note %q, %v", p.Note, err)
		}

		bb, whoB, keyB := f.inbox(t, "bella")
		kB, foreign := f.arrived(t, bb, whoB, keyB, "From: bob@example.com\r\nSubject: "+secretWord+"\r\n\r\n"+secretWord+"\r\n")
		for _, tt := range []struct {
			name string
			who  auth.Principal
			o    mailbox.Outgoing
			want error
		}{
			{"without the key", who, mailbox.Outgoing{ReplyTo: id}, auth.ErrForbidden},
			{"with another inbox's key", who, mailbox.Outgoing{Key: kB, Forward: foreign, Draft: mail.Draft{To: []string{"x@example.com"}}}, auth.ErrForbidden},
			{"another inbox's message", who, mailbox.Outgoing{Key: k, Forward: foreign, Draft: mail.Draft{To: []string{"x@example.com"}}}, store.ErrNotFound},
			{"a sandbox without a loan", sandbox, mailbox.Outgoing{Forward: id, Draft: mail.Draft{To: []string{"x@example.com"}}}, auth.ErrForbidden},
			{"both", who, mailbox.Outgoing{Key: k, ReplyTo: id, Forward: id}, directory.ErrInvalid},
			{"an answer to others", who, mailbox.Outgoing{Key: k, ReplyTo: id, Draft: mail.Draft{To: []string{"x@example.com"}}}, directory.ErrInvalid},
			{"a quote of nothing", who, mailbox.Outgoing{Quote: true, Draft: mail.Draft{To: []string{"x@example.com"}}}, directory.ErrInvalid},
		} {
			if p, err := f.post.Send(ctx, tt.who, "rest", tt.o); !errors.Is(err, tt.want) || strings.Contains(fmt.Sprint(err), secretWord) {
				t.Errorf("%s: %s, %v; want %v", tt.name, p.ID, err, tt.want)
			}
		}
	})
}

// TestRevise: the reviewers are asked about the new bytes, and the old ones
// cannot be approved any more.
func TestRevise(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, _ := f.inbox(t, "alice")
		o := letter("first")
		o.SendAt, o.Timing = time.Now().Add(time.Hour), mailbox.ScheduleFirst
		p, err := f.post.Send(ctx, who, "rest", o)
		if err != nil || p.State != oversight.Scheduled {
			t.Fatal(p.State, err)
		}
		o = letter("second")
		o.IdempotencyKey = "edit"
		r, err := f.post.Revise(ctx, who, "rest", p.ID, p.Version, o)
		if err != nil || r.ID != p.ID || r.State != oversight.Pending || r.Hex() == p.Hex() {
			t.Fatalf("revised: %s %s, %v", r.ID, r.State, err)
		}
		if again, err := f.post.Revise(ctx, who, "rest", p.ID, p.Version, o); err != nil || !again.Replayed || again.Version != r.Version {
			t.Errorf("the same edit once more: %+v, %v", again.Replayed, err)
		}
		if _, err := f.post.Revise(ctx, who, "rest", p.ID, p.Version, letter("third")); !errors.Is(err, oversight.ErrStale) {
			t.Errorf("an edit of what is not there any more: %v", err)
		}
		if _, err := f.post.Revise(ctx, who, "rest", p.ID, 0, letter("second")); err != nil {
			t.Errorf("revised to the same: %v", err)
		}
		err = f.gate.Decide(ctx, f.person, oversight.Decision{ID: p.ID, Version: p.Version, Digest: p.Hex(), Approve: true})
		if !errors.Is(err, oversight.ErrStale) {
			t.Errorf("approval of what was shown before: %v, want ErrStale", err)
		}
		_, other, _ := f.inbox(t, "bella")
		if _, err := f.post.Revise(ctx, other, "rest", p.ID, 0, letter("x")); err == nil {
			t.Error("another inbox revised it")
		}
		if _, err := f.post.Revise(ctx, f.person, "rest", p.ID, 0, letter("x")); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a person wrote in the agent's name: %v", err)
		}
		_ = b
	})
}

// TestForget removes what is too old to matter, and nothing else.
func TestForget(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, who, _ := f.inbox(t, "alice")
		for i, s := range []string{"old", "new"} {
			o := letter(s)
			o.IdempotencyKey = s
			if _, err := f.post.Send(t.Context(), who, "rest", o); err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				f.shift(t, `update send_once set at = at - $1`, (25 * time.Hour).Microseconds())
				f.shift(t, `update send_content set at = at - $1`, (25 * time.Hour).Microseconds())
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- f.post.RunForget(ctx) }()
		left := func() (n int) {
			err := db.View(t.Context(), func(tx *store.Tx) error {
				return tx.One(t.Context(), `select (select count(*) from send_once) + (select count(*) from send_content)`, nil, &n)
			})
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		for deadline := time.Now().Add(2 * time.Minute); left() != 2 && time.Now().Before(deadline); {
			time.Sleep(10 * time.Millisecond)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) || left() != 2 {
			t.Errorf("%d are left, %v; want the two of the new request", left(), err)
		}
	})
}
