package mailbox_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestModeAtCreation: who may make an inbox that sends without asking.
func TestModeAtCreation(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		reviewer := f.person
		reviewer.Role = auth.Reviewer
		for _, who := range []auth.Principal{f.person, f.project, reviewer} {
			for i, mode := range policy.Modes() {
				b, _, err := f.post.CreateInbox(t.Context(), who, directory.NewInbox{Mode: mode}, "")
				if want := (i <= 2 || who.Manages()) && who.Role != auth.Reviewer; (err == nil) != want {
					t.Errorf("%s (%s) makes an inbox in mode %s: %v", who, who.Role, mode, err)
				}
				if err != nil && !errors.Is(err, auth.ErrForbidden) {
					t.Errorf("mode %s: %v, want ErrForbidden", mode, err)
				}
				if err == nil && (b.Mode != mode || b.ModeBy != who.String()) {
					t.Errorf("made %s by %s, want %s by %s", b.Mode, b.ModeBy, mode, who)
				}
			}
		}
		if _, _, err := f.post.CreateInbox(t.Context(), f.person, directory.NewInbox{Mode: "free"}, ""); !errors.Is(err, directory.ErrInvalid) {
			t.Errorf("a mode that is none: %v", err)
		}
	})
}

// asked is a judge that remembers what it was asked.
type asked struct{ got []policy.Request }

func (a *asked) Judge(_ context.Context, _ *store.Tx, _ string, r policy.Request) (policy.Verdict, error) {
	a.got = append(a.got, r)
	return policy.Verdict{Effect: policy.Allow}, nil
}

// TestFacts: what policy is told about a mail.
func TestFacts(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		judge := &asked{}
		f.judgedBy(t, judge)
		b, who, _ := f.inbox(t, "alice")
		sandbox := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: who.Project, Inbox: b.ID, Template: "base"}
		o := letter("hello", "Bob@Example.com", "eve@example.org")
		o.Attachments = []mail.Attachment{{Name: "a.pdf", ContentType: "application/pdf; x=y", Data: []byte("%PDF")}}
		send := func(who auth.Principal, subject string) policy.Request {
			t.Helper()
			o.Subject = subject
			if _, err := f.post.Send(t.Context(), who, "mcp", o); err != nil {
				t.Fatal(err)
			}
			return judge.got[len(judge.got)-1]
		}
		r := send(sandbox, "one")
		if r.Kind != "email.send" || r.Mode != policy.GatedSend || r.Inbox != b.Address || r.Via != "mcp" || r.Listed || r.Size == 0 ||
			r.Sandbox != "i1" || r.Template != "base" || len(r.To) != 2 || r.To[0] != "bob@example.com" || r.History != (policy.History{}) {
			t.Errorf("asked about %+v", r)
		}
		if len(r.Files) != 1 || r.Files[0] != (policy.Attachment{Name: "a.pdf", Type: "application/pdf", Size: 4}) {
			t.Errorf("files %+v", r.Files)
		}
		if _, err := f.gate.RunOne(t.Context()); err != nil || len(f.hop.got) != 1 {
			t.Fatalf("%d sent, %v", len(f.hop.got), err)
		}
		if r := send(who, "two"); r.History != (policy.History{Sent: 1, Known: 2}) || r.Sandbox != "" {
			t.Errorf("history after one mail: %+v", r)
		}
		arrive := func(from, dmarc string) {
			t.Helper()
			err := f.post.Receive(t.Context(), mailbox.Arrival{
				Envelope: mail.Envelope{From: from, To: []string{b.Address}, Raw: []byte("From: " + from + "\r\nSubject: s\r\n\r\nt\r\n")},
				Auth:     mail.Results{DMARC: mail.Check{Result: dmarc}},
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		arrive("bob@example.com", "pass")
		arrive("eve@example.org", "fail") // somebody in her name
		if r := send(who, "three"); r.History.Replies {
			t.Error("a forged mail makes an answer")
		}
		arrive("Eve@example.org", "pass")
		if r := send(who, "four"); !r.History.Replies {
			t.Error("all have written, and it is not known")
		}
		// No address stands in the table.
		var hash []byte
		err := db.View(t.Context(), func(tx *store.Tx) error {
			return tx.One(t.Context(), `select hash from correspondent limit 1`, nil, &hash)
		})
		if err != nil || len(hash) != 32 {
			t.Errorf("stored %q, %v", hash, err)
		}
		if _, err := json.Marshal(r); err != nil {
			t.Error(err)
		}
	})
}

// judgedBy makes the post office anew with another judge.
func (f *fixture) judgedBy(t *testing.T, j oversight.Judge) {
	t.Helper()
	blobs, err := store.OpenBlobs(f.blobs)
	if err != nil {
		t.Fatal(err)
	}
	f.gate = oversight.NewGate(slog.New(slog.NewTextHandler(t.Output(), nil)), f.db, j)
	f.post = mailbox.New(slog.New(slog.NewTextHandler(t.Output(), nil)), f.db, f.gate, mailbox.Config{Blobs: blobs, Transport: f.hop, Domain: "agents.test", QuarantineScore: 0.75})
}

// TestReadOnly: nothing is proposed, and so nobody can approve it by mistake.
func TestReadOnly(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, key, err := f.post.CreateInbox(t.Context(), f.person, directory.NewInbox{Address: "quiet", Mode: policy.ReadOnly}, "")
		if err != nil {
			t.Fatal(err)
		}
		who, err := auth.CheckKey(t.Context(), db, key)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.post.Send(t.Context(), who, "rest", letter("s")); !errors.Is(err, directory.ErrReadOnly) || !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("Send: %v", err)
		}
		raw := []byte("From: quiet@agents.test\r\nTo: bob@example.com\r\nSubject: s\r\n\r\nt\r\n")
		if _, err := f.post.SendRaw(t.Context(), who, "smtp", "quiet@agents.test", []string{"bob@example.com"}, raw); !errors.Is(err, directory.ErrReadOnly) {
			t.Errorf("SendRaw: %v", err)
		}
		if list, err := f.gate.Actions(t.Context(), f.person, oversight.Query{}); err != nil || len(list) != 0 {
			t.Errorf("%d actions, %v", len(list), err)
		}
	})
}

// TestFlags: what the content checks find is told to policy and, masked, to the
// reviewer; nothing of it is in the audit.
func TestFlags(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		judge := &asked{}
		f.judgedBy(t, judge)
		_, who, _ := f.inbox(t, "alice")
		const secret = "pib_ABCDEFGHIJKLMNOPQRSTUVWX23"
		o := letter("password: Xk29!vmQp2")
		o.Text = "the key is " + secret + " and no other"
		o.Attachments = []mail.Attachment{{Name: "id_rsa", Data: []byte("x")}}
		p, err := f.post.Send(t.Context(), who, "rest", o)
		if err != nil {
			t.Fatal(err)
		}
		if got := judge.got[0].Flags; !slices.Contains(got, "secret") {
			t.Errorf("flags %v", got)
		}
		v, err := f.gate.Show(p.Action)
		if err != nil {
			t.Fatal(err)
		}
		shown := v.Title + v.Text + strings.Join(v.Notes, "\n") + fmt.Sprint(v.Fields)
		if strings.Contains(shown, secret) || strings.Contains(shown, "Xk29!vmQp2") || !strings.Contains(v.Text, "pib_… [30 characters] and no other") || !slices.Contains(v.Flags, "secret") {
			t.Errorf("shown as %s %v", shown, v.Flags)
		}
		if !bytes.Contains(v.Raw, []byte(secret)) {
			t.Error("the source is not what leaves")
		}
		err = audit.View(t.Context(), db, func(tx *store.Tx) error {
			list, err := audit.List(t.Context(), tx, audit.Query{Limit: 1000})
			for _, e := range list {
				if strings.Contains(e.Detail, secret[4:]) || strings.Contains(e.Detail, "Xk29") {
					t.Errorf("the audit tells: %s", e.Detail)
				}
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})
}
