package mailbox_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A nextHop is a fake transport that answers as told.
type nextHop struct {
	got     []mail.Envelope
	outcome mail.Outcome
}

func (n *nextHop) Deliver(_ context.Context, e mail.Envelope) ([]mail.Delivery, error) {
	e.Raw, e.Prefix = append(e.Prefix, e.Raw...), nil
	n.got = append(n.got, e)
	var ds []mail.Delivery
	for _, to := range e.To {
		ds = append(ds, mail.Delivery{Recipient: to, Outcome: n.outcome})
	}
	return ds, nil
}

type fixture struct {
	db    *store.DB
	gate  *oversight.Gate
	post  *mailbox.PostOffice
	hop   *nextHop
	blobs string

	project, person, other auth.Principal
}

func setup(t testing.TB, db *store.DB) *fixture {
	t.Helper()
	f := &fixture{db: db, hop: &nextHop{outcome: mail.Accepted}, blobs: t.TempDir()}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	blobs, err := store.OpenBlobs(f.blobs)
	if err != nil {
		t.Fatal(err)
	}
	f.gate = oversight.NewGate(log, db, oversighttest.Rules(nil))
	f.post = mailbox.New(log, db, f.gate, mailbox.Config{Blobs: blobs, Transport: f.hop, Domain: "agents.test", QuarantineScore: 0.75})
	err = db.Update(t.Context(), func(tx *store.Tx) error {
		id, key, err := auth.NewProject(t.Context(), tx, "one")
		if err != nil {
			return err
		}
		f.project = auth.Principal{Kind: auth.Project, ID: "crd_x", Project: id}
		f.person = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: id}
		_ = key
		id, _, err = auth.NewProject(t.Context(), tx, "two")
		f.other = auth.Principal{Kind: auth.Project, ID: "crd_y", Project: id}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *fixture) inbox(t testing.TB, name string) (directory.Inbox, auth.Principal, auth.Secret) {
	t.Helper()
	b, key, err := f.post.CreateInbox(t.Context(), f.project, directory.NewInbox{Address: name}, "")
	if err != nil {
		t.Fatal(err)
	}
	who, err := auth.CheckKey(t.Context(), f.db, key)
	if err != nil || who.Inbox != b.ID {
		t.Fatalf("key of %s is %+v, %v", name, who, err)
	}
	return b, who, key
}

const secretWord = "Kohlrabi"

var incoming = []byte("From: Bob <bob@example.com>\r\nTo: analyst@agents.test\r\nSubject: " + secretWord + " subject\r\nMessage-ID: <1@example.com>\r\n\r\n" + secretWord + " body\r\n")

func TestReceiveIsSealed(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, key := f.inbox(t, "analyst")
		if err := f.post.Receive(ctx, mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{"Analyst@Agents.Test", "analyst@agents.test"}, Raw: incoming}, Remote: "192.0.2.1"}); err != nil {
			t.Fatal(err)
		}
		k, err := f.post.Keys.Open(ctx, who, key, "")
		if err != nil {
			t.Fatal(err)
		}
		ms, err := f.post.Messages(ctx, who, k, 0)
		if err != nil || len(ms) != 1 {
			t.Fatalf("Messages = %d, %v; want 1", len(ms), err)
		}
		if m := ms[0]; m.Subject != secretWord+" subject" || m.From != "Bob <bob@example.com>" || m.Direction != message.In || m.Inbox != b.ID {
			t.Errorf("message = %+v", m)
		}
		if _, raw, err := f.post.Message(ctx, who, k, ms[0].ID); err != nil || !bytes.Equal(raw, incoming) {
			t.Errorf("Message = %q, %v", raw, err)
		}
		if _, _, err := f.post.Message(ctx, who, k, "msg_x"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("a message that is not there: %v", err)
		}

		// The stored bytes tell nothing: no word of the message, nor its sender.
		var n int
		err = filepath.WalkDir(f.blobs, func(path string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			n++
			data, err := os.ReadFile(path)
			if bytes.Contains(data, []byte(secretWord)) || bytes.Contains(data, []byte("example.com")) {
				t.Errorf("%s holds the message in the clear", path)
			}
			return err
		})
		if err != nil || n != 1 {
			t.Fatalf("%d blobs, %v", n, err)
		}
		err = db.View(ctx, func(tx *store.Tx) error {
			var summary []byte
			err := tx.One(ctx, `select summary from message`, nil, &summary)
			if bytes.Contains(summary, []byte(secretWord)) || bytes.Contains(summary, []byte("bob@")) {
				t.Error("the summary is in the clear")
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		// Moved to another message's place, it does not open.
		err = db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update message set id = 'msg_moved'`)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.post.Messages(ctx, who, k, 0); err == nil {
			t.Error("a sealed summary opened under another id")
		}
	})
}

// TestFullInbox is a sender who would fill the disk.
func TestFullInbox(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		b, _, _ := f.inbox(t, "analyst")
		f.inbox(t, "buyer")
		receive := func(to string) error {
			return f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{To: []string{to}, Raw: incoming}, Remote: "192.0.2.1"})
		}
		if err := receive("analyst@agents.test"); err != nil {
			t.Fatal(err)
		}
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `update inbox_use set bytes = $1 where inbox_id = $2`, int64(directory.MaxBytes), b.ID)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := receive("analyst@agents.test"); !errors.Is(err, mailbox.ErrFull) {
			t.Errorf("a full inbox: %v, want ErrFull", err)
		}
		if err := receive("buyer@agents.test"); err != nil {
			t.Errorf("its neighbour: %v", err)
		}
	})
}

// TestIsolation is every kind of principal at the door of an inbox that is not
// its own.
func TestIsolation(t *testing.T) {
	ctx := t.Context()
	f := setup(t, storetest.SQLite(t))
	a, agentA, keyA := f.inbox(t, "analyst")
	b, agentB, keyB := f.inbox(t, "buyer")
	ka, err := f.post.Keys.Open(ctx, agentA, keyA, "")
	if err != nil {
		t.Fatal(err)
	}
	sandbox := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.project.Project, Inbox: a.ID}
	loose := auth.Principal{Kind: auth.Sandbox, ID: "i2", Project: f.project.Project}

	for _, who := range []auth.Principal{agentB, f.project, f.person, f.other, loose, {}} {
		if _, err := f.post.Messages(ctx, who, ka, 0); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("%s with a key of A lists: %v, want ErrForbidden", who, err)
		}
		if _, _, err := f.post.Message(ctx, who, ka, "msg_x"); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("%s with a key of A reads: %v, want ErrForbidden", who, err)
		}
	}
	if _, err := f.post.Keys.Open(ctx, agentA, keyB, ""); err == nil {
		t.Error("A's wrapping opened with B's credential")
	}
	forged := agentA
	forged.Inbox = b.ID
	if _, err := f.post.Keys.Open(ctx, forged, keyA, ""); err == nil {
		t.Error("A's credential opened B's inbox")
	}
	for _, who := range []auth.Principal{f.project, f.person, sandbox} {
		if _, err := f.post.Keys.Open(ctx, who, keyA, ""); err == nil {
			t.Errorf("%s opened an inbox", who)
		}
	}

	// Sandboxes read only what was lent, and only while it is.
	if _, err := f.post.Keys.Lent(t.Context(), sandbox); !errors.Is(err, auth.ErrForbidden) {
		t.Errorf("nothing lent: %v", err)
	}
	if err := f.post.Keys.Lend(ctx, f.project, sandbox, keyB); !errors.Is(err, directory.ErrInvalid) {
		t.Errorf("lending another inbox's key: %v", err)
	}
	if err := f.post.Keys.Lend(ctx, f.project, sandbox, "pib_nonsense"); !errors.Is(err, directory.ErrInvalid) {
		t.Errorf("lending nonsense: %v", err)
	}
	if err := f.post.Keys.Lend(ctx, f.project, sandbox, keyA); err != nil {
		t.Fatal(err)
	}
	if k, err := f.post.Keys.Lent(t.Context(), sandbox); err != nil || k.Inbox() != a.ID {
		t.Errorf("Lent = %v", err)
	}
	impostor := sandbox
	impostor.Inbox = b.ID
	if _, err := f.post.Keys.Lent(t.Context(), impostor); err == nil {
		t.Error("a key was lent for another inbox")
	}
	f.post.Keys.Return(sandbox.ID)
	if _, err := f.post.Keys.Lent(t.Context(), sandbox); err == nil {
		t.Error("the key was not returned")
	}

	// Who may propose.
	for _, who := range []auth.Principal{f.project, f.person, loose, {}} {
		if _, err := f.post.Send(ctx, who, "test", mailbox.Outgoing{Draft: mail.Draft{To: []string{"bob@example.com"}, Text: "x"}}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("%s proposes: %v, want ErrForbidden", who, err)
		}
	}
	if bs, err := f.post.Directory.Inboxes(ctx, f.other); err != nil || len(bs) != 0 {
		t.Errorf("another project sees %d inboxes, %v", len(bs), err)
	}
	if bs, err := f.post.Directory.Inboxes(ctx, agentA); err != nil || len(bs) != 1 {
		t.Errorf("an agent sees %d inboxes, %v", len(bs), err)
	}
	if _, err := f.post.Directory.Find(ctx, f.other, a.Address); !errors.Is(err, directory.ErrNoInbox) {
		t.Errorf("another project finds A: %v", err)
	}
}

func TestSendWaitsAndIsDeliveredOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, agent, key := f.inbox(t, "analyst")
		sandbox := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: agent.Project, Inbox: b.ID}
		a, err := f.post.Send(ctx, sandbox, "mcp", mailbox.Outgoing{Draft: mail.Draft{
			To: []string{"bob@example.com"}, Bcc: []string{"eve@example.com"}, Subject: "Report", Text: "hello",
			Attachments: []mail.Attachment{{Name: "a.csv", Data: []byte("1,2\n")}},
		}})
		if err != nil || a.State != oversight.Pending {
			t.Fatalf("Send = %+v, %v", a, err)
		}
		v, err := f.gate.Show(a.Action)
		if err != nil {
			t.Fatal(err)
		}
		if got := fields(v); !slices.Contains(got, "Bcc: eve@example.com") || !slices.Contains(got, `To: bob@example.com`) || len(v.Files) != 1 || v.Files[0].Size != 4 {
			t.Errorf("a reviewer sees %+v", v)
		}
		if ran, err := f.gate.RunOne(ctx); ran || err != nil || len(f.hop.got) != 0 {
			t.Fatalf("before approval: ran %v, %v", ran, err)
		}
		if err := f.gate.Decide(ctx, f.person, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true}); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if _, err := f.gate.RunOne(ctx); err != nil {
				t.Fatal(err)
			}
		}
		if len(f.hop.got) != 1 || bytes.Contains(f.hop.got[0].Raw, []byte("eve@")) {
			t.Errorf("delivered %d times; Bcc in the bytes: %v", len(f.hop.got), len(f.hop.got) > 0 && bytes.Contains(f.hop.got[0].Raw, []byte("eve@")))
		}
		k, err := f.post.Keys.Open(ctx, agent, key, "")
		if err != nil {
			t.Fatal(err)
		}
		if ms, err := f.post.Messages(ctx, agent, k, 0); err != nil || len(ms) != 1 || ms[0].Direction != message.Out {
			t.Errorf("the sender's copy: %+v, %v", ms, err)
		}
	})
}

// TestShowNames is a display name that reads like other recipients.
func TestShowNames(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	_, agent, _ := f.inbox(t, "analyst")
	a, err := f.post.Send(t.Context(), agent, "rest", mailbox.Outgoing{Draft: mail.Draft{
		To: []string{`"boss@example.com, ops@example.com" <eve@example.com>`, "bob@example.com"}, Subject: "s", Text: "x",
	}})
	if err != nil {
		t.Fatal(err)
	}
	v, err := f.gate.Show(a.Action)
	if err != nil {
		t.Fatal(err)
	}
	var to []string
	for _, field := range v.Fields {
		if field.Name == "To" {
			to = append(to, field.Value)
		}
	}
	if len(to) != 2 || !strings.HasSuffix(to[0], "<eve@example.com>") || to[1] != "bob@example.com" {
		t.Errorf("a reviewer sees %q", to)
	}
}

func fields(v oversight.View) (out []string) {
	for _, f := range v.Fields {
		out = append(out, f.Name+": "+f.Value)
	}
	return out
}

func TestOutcomes(t *testing.T) {
	tests := []struct {
		outcome mail.Outcome
		want    oversight.State
	}{
		{mail.Accepted, oversight.Done},
		{mail.Refused, oversight.Failed},
		{mail.Uncertain, oversight.Unknown},
		{mail.NotSent, oversight.Approved},
	}
	for _, tt := range tests {
		t.Run(string(tt.outcome), func(t *testing.T) {
			f := setup(t, storetest.SQLite(t))
			_, agent, _ := f.inbox(t, "analyst")
			f.hop.outcome = tt.outcome
			a, err := f.post.Send(t.Context(), agent, "rest", mailbox.Outgoing{Draft: mail.Draft{To: []string{"bob@example.com"}, Text: "x"}})
			if err != nil {
				t.Fatal(err)
			}
			err = f.db.Update(t.Context(), func(tx *store.Tx) error {
				if _, err := tx.ExecContext(t.Context(), `update action set state = 'executing' where id = $1`, a.ID); err != nil {
					return err
				}
				return oversighttest.Settle(t.Context(), tx)
			})
			if err != nil {
				t.Fatal(err)
			}
			if o := f.post.Delivery.Execute(t.Context(), a.Action); o.State != tt.want {
				t.Errorf("outcome = %+v, want %s", o, tt.want)
			}
		})
	}
}

func TestCreateInboxRefuses(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	_, agent, _ := f.inbox(t, "analyst")
	tests := []struct {
		name    string
		who     auth.Principal
		address string
		mode    string
		want    error
	}{
		{"an agent", agent, "fresh", "", auth.ErrForbidden},
		{"taken", f.project, "Analyst", "", directory.ErrTaken},
		{"taken by another project", f.other, "analyst@agents.test", "", directory.ErrTaken},
		{"another domain", f.project, "x@example.com", "", directory.ErrInvalid},
		{"reserved", f.project, "postmaster", "", directory.ErrInvalid},
		{"too short", f.project, "ab", "", directory.ErrInvalid},
		{"line break", f.project, "abc\r\nx", "", directory.ErrInvalid},
		{"dots", f.project, "a..b", "", directory.ErrInvalid},
		{"a mode for owners alone", f.project, "fresh", "autonomous", auth.ErrForbidden},
		{"no mode", f.project, "fresh", "whatever", directory.ErrInvalid},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, _, err := f.post.CreateInbox(t.Context(), tt.who, directory.NewInbox{Address: tt.address, Mode: modeOf(tt.mode)}, ""); !errors.Is(err, tt.want) {
				t.Errorf("CreateInbox = %v, want %v", err, tt.want)
			}
		})
	}
}

// TestSendRefuses is line breaks and other people's names in every field.
func TestSendRefuses(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	_, agent, _ := f.inbox(t, "analyst")
	ok := mail.Draft{To: []string{"bob@example.com"}, Subject: "s", Text: "x"}
	tests := map[string]func(*mail.Draft){
		"another sender":        func(d *mail.Draft) { d.From = "boss@agents.test" },
		"another sender, named": func(d *mail.Draft) { d.From = "analyst@agents.test <boss@agents.test>" },
		"CRLF in from":          func(d *mail.Draft) { d.From = "analyst@agents.test\r\nBcc: x@example.com" },
		"CRLF in subject":       func(d *mail.Draft) { d.Subject = "s\r\nBcc: x@example.com" },
		"LF in to":              func(d *mail.Draft) { d.To = []string{"bob@example.com\nBcc: x@example.com"} },
		"CR in cc":              func(d *mail.Draft) { d.Cc = []string{"bob@example.com\rBcc: x@example.com"} },
		"CRLF in bcc":           func(d *mail.Draft) { d.Bcc = []string{"bob@example.com\r\nx"} },
		"CRLF in reply":         func(d *mail.Draft) { d.InReplyTo = "<a@b>\r\nX: y" },
		"CRLF in references":    func(d *mail.Draft) { d.References = []string{"<a@b>\r\nX: y"} },
		"CRLF in a file's name": func(d *mail.Draft) { d.Attachments = []mail.Attachment{{Name: "a\r\nX: y"}} },
		"CRLF in a file's type": func(d *mail.Draft) { d.Attachments = []mail.Attachment{{Name: "a", ContentType: "text/plain\r\nX: y"}} },
		"no recipient":          func(d *mail.Draft) { d.To = nil },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			d := ok
			change(&d)
			var field *mail.FieldError
			if a, err := f.post.Send(t.Context(), agent, "rest", mailbox.Outgoing{Draft: d}); !errors.As(err, &field) {
				t.Errorf("Send = %s, %v; want a FieldError", a.ID, err)
			}
		})
	}
	if as, err := f.gate.Actions(t.Context(), f.person, oversight.Query{}); err != nil || len(as) != 0 {
		t.Errorf("%d actions were stored, %v", len(as), err)
	}
}

func modeOf(s string) policy.Mode { return policy.Mode(s) }
