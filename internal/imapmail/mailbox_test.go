package imapmail_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/directory"
	"postern/internal/imapmail"
	"postern/internal/imapmail/dovecottest"
	"postern/internal/mail"
	"postern/internal/mailauth"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/secret"
	"postern/internal/smtpclient/postfixtest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// none is a transport that must not be used.
type none struct{ t testing.TB }

func (n none) Deliver(context.Context, mail.Envelope) ([]mail.Delivery, error) {
	n.t.Error("mail of a connected mailbox left by this server's own transport")
	return nil, errors.New("no transport")
}

// A world is a server of ours with its connections, on one database.
type world struct {
	t     testing.TB
	db    *store.DB
	blobs *store.Blobs
	gate  *oversight.Gate
	post  *mailbox.PostOffice
	conns *connector.Connections
	owner auth.Principal
	stop  func()
}

func newWorld(t testing.TB, db *store.DB, d dovecottest.Server) *world {
	t.Helper()
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, db: db, blobs: blobs}
	err = db.Update(t.Context(), func(tx *store.Tx) error {
		id, _, err := auth.NewProject(t.Context(), tx, "one")
		w.owner = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "local-ann", Project: id, Operator: true}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	w.start(d)
	t.Cleanup(func() { w.stop() })
	return w
}

// start starts the server on the database, as a new process does.
func (w *world) start(d dovecottest.Server) {
	w.t.Helper()
	log := slog.New(slog.NewTextHandler(w.t.Output(), nil))
	w.gate = oversight.NewGate(log, w.db, oversighttest.Rules{{ID: "a", Kind: policy.KindArchive, Effect: policy.Allow}, {ID: "t", Kind: policy.KindTrash, Effect: policy.Allow}})
	w.post = mailbox.New(log, w.db, w.gate, mailbox.Config{Blobs: w.blobs, Transport: none{w.t}, Domain: "agents.test", QuarantineScore: 0.75, Secret: bytes.Repeat([]byte{7}, 32)})
	secrets, err := secret.New(w.t.Context(), log, w.db, secret.Config{Server: bytes.Repeat([]byte{8}, 32)})
	if err != nil {
		w.t.Fatal(err)
	}
	opener, err := imapmail.New(imapmail.Config{Hostname: "postern.test", Dial: (&net.Dialer{}).DialContext, Roots: d.Roots, Poll: 200 * time.Millisecond})
	if err != nil {
		w.t.Fatal(err)
	}
	w.conns, err = connector.New(log, w.db, w.post, secrets, connector.Config{
		Instance: "test", Openers: map[connector.Kind]connector.Opener{imapmail.Kind: opener}, Strip: func(raw []byte) []byte { return raw }, Results: mailauth.Given,
		Poll: 100 * time.Millisecond, Retry: 100 * time.Millisecond,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	var running sync.WaitGroup
	running.Go(func() { _ = w.conns.Run(ctx) })
	running.Go(func() { _ = w.gate.Run(ctx) })
	w.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
}

// connect connects the mailbox of a user and opens its inbox.
func (w *world) connect(d dovecottest.Server, smtp, user string, b connector.Bounds, mode policy.Mode) (connector.Connection, auth.Principal, *seal.Key) {
	w.t.Helper()
	c, key, err := w.conns.Connect(w.t.Context(), w.owner, connector.NewConnection{
		Settings: connector.Settings{Kind: imapmail.Kind, Address: user + "@" + postfixtest.Domain, Credential: dovecottest.Password, Public: map[string]string{
			imapmail.IMAP: d.IMAPS, imapmail.SMTP: smtp, imapmail.AuthServ: "mx.y.example",
		}},
		Bounds: b, Inbox: directory.NewInbox{Mode: mode},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	who, err := auth.CheckKey(w.t.Context(), w.db, key)
	if err != nil {
		w.t.Fatal(err)
	}
	k, err := w.post.Keys.Open(w.t.Context(), who, key, c.Inbox)
	if err != nil {
		w.t.Fatal(err)
	}
	return c, who, k
}

// eventually waits until ok, at most half a minute.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("it did not happen: %s", what)
}

// subjects returns "subject [labels]" of the messages of an inbox, newest first.
func (w *world) subjects(who auth.Principal, k *seal.Key, l mailbox.Listing) (out []string) {
	w.t.Helper()
	l.Limit = 200
	list, _, err := w.post.List(w.t.Context(), who, k, l)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, m := range list {
		out = append(out, m.Subject+" ["+strings.Join(m.Labels, " ")+"]")
	}
	return out
}

func (w *world) has(who auth.Principal, k *seal.Key, want ...string) {
	w.t.Helper()
	var got []string
	defer func() {
		if w.t.Failed() {
			w.t.Logf("the inbox has %q, want %q", got, want)
		}
	}()
	eventually(w.t, fmt.Sprintf("the inbox has %q", want), func() bool {
		got = append(w.subjects(who, k, mailbox.Listing{}), w.subjects(who, k, mailbox.Listing{Label: mailbox.LabelTrash})...)
		return slices.Equal(sorted(got), sorted(want))
	})
}

func sorted(s []string) []string { s = slices.Clone(s); slices.Sort(s); return s }

func (w *world) id(who auth.Principal, k *seal.Key, subject string) string {
	w.t.Helper()
	list, _, err := w.post.List(w.t.Context(), who, k, mailbox.Listing{Limit: 200})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, m := range list {
		if m.Subject == subject {
			return m.ID
		}
	}
	w.t.Fatalf("no message %q", subject)
	return ""
}

func letter(from, subject string, more ...string) string {
	return strings.Join(more, "") + "From: " + from + "\r\nTo: b@y.example\r\nSubject: " + subject + "\r\nMessage-ID: <" + strings.ReplaceAll(subject, " ", ".") + "@" + mail.Domain(from) + ">\r\nDate: Mon, 23 Nov 2026 10:00:00 +0000\r\n\r\nThis is " + subject + ".\r\n"
}

// providers runs Dovecot and Postfix.
func providers(t testing.TB, c dovecottest.Config) (d dovecottest.Server, smtp, submission string) {
	t.Helper()
	d = dovecottest.Start(t, c)
	submission = fmt.Sprintf("127.0.0.1:%d", 20_000+mathrand.IntN(12_000))
	smtp, _ = postfixtest.Run(t, postfixtest.Config{LMTP: d.LMTP, Submission: submission, SASL: d.SASL, Cert: d.Cert, Key: d.Key})
	return d, smtp, submission
}

// TestMailboxAtDovecotAndPostfix: all that a connected mailbox does, with real servers.
func TestMailboxAtDovecotAndPostfix(t *testing.T) {
	t.Parallel()
	d, smtp, submission := providers(t, dovecottest.Config{})
	db := storetest.SQLite(t)
	w := newWorld(t, db, d)
	const b = "b@y.example"
	d.Save(t, b, "INBOX", letter("ann@victim.example", "old one"))
	d.Save(t, b, "INBOX", letter("ann@victim.example", "old two"))
	d.Save(t, b, "Archive", letter("ann@victim.example", "filed"))
	d.Save(t, b, "Junk", letter("spam@evil.example", "spam"))
	d.Admin(t, "mailbox", "create", "-u", b, "Work")
	d.Save(t, b, "Work", letter("ann@victim.example", "job"))
	d.Admin(t, "flags", "add", "-u", b, `\Seen`, "mailbox", "INBOX", "header", "Subject", "old one")

	c, who, k := w.connect(d, submission, "b", connector.Bounds{}, policy.GatedSend)
	w.has(who, k, "old one [read]", "old two []", "filed [archived]", "job [archived work]")
	eventually(t, "the connection is up to date", func() bool {
		got, err := w.conns.Get(t.Context(), w.owner, c.ID)
		return err == nil && got.Phase == connector.Connected && got.Done == 4 && got.Total == 4 && !got.Synced.IsZero()
	})

	// New mail, with what the provider says of its sender.
	deliver(t, smtp, "c@y.example", letter("c@y.example", "new", "Authentication-Results: mx.y.example; dmarc=pass header.from=y.example\r\n"))
	w.has(who, k, "old one [read]", "old two []", "filed [archived]", "job [archived work]", "new []")
	id := w.id(who, k, "new")
	msg, _, err := w.post.Message(t.Context(), who, k, id)
	if err != nil || msg.Security.Auth.DMARC.Result != "pass" || msg.Security.Auth.DMARC.Domain != "y.example" {
		t.Errorf("got %+v, %v, want what the provider says", msg.Security, err)
	}

	// A reply is held, approved, and leaves by Postfix, byte for byte.
	p, err := w.post.Send(t.Context(), who, "test", mailbox.Outgoing{Key: k, ReplyTo: id, Draft: mail.Draft{Text: "Yes."}})
	if err != nil {
		t.Fatal(err)
	}
	if p.State != oversight.Pending {
		t.Fatalf("got %s, want pending", p.State)
	}
	if err := w.gate.Decide(t.Context(), w.owner, oversight.Decision{ID: p.ID, Version: p.Version, Digest: p.Hex(), Approve: true}); err != nil {
		t.Fatal(err)
	}
	env, err := mail.ParsePayload(p.Payload)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the reply arrives", func() bool {
		for _, m := range d.Messages(t, "c", "INBOX") {
			if bytes.HasSuffix(m, env.Raw) {
				return true
			}
		}
		return false
	})
	w.has(who, k, "old one [read]", "old two []", "filed [archived]", "job [archived work]", "new []", "Re: new [read]")
	eventually(t, "the copy lies in Sent, unchanged", func() bool {
		sent := d.Messages(t, "b", "Sent")
		return len(sent) == 1 && bytes.Equal(sent[0], env.Raw)
	})

	// What is decided here happens there.
	for kind, subject := range map[policy.Kind]string{policy.KindArchive: "old one", policy.KindTrash: "old two"} {
		if _, err := w.post.Arrange(t.Context(), who, "test", k, kind, w.id(who, k, subject)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.post.Label(t.Context(), who, k, []string{id}, []string{"read", "starred", "urgent"}, nil); err != nil {
		t.Fatal(err)
	}
	lies := func(folder, subject string) bool {
		return slices.ContainsFunc(d.Messages(t, "b", folder), func(m []byte) bool { return bytes.Contains(m, []byte("Subject: "+subject+"\r\n")) })
	}
	eventually(t, "archive, trash and labels are in Dovecot", func() bool {
		flags := d.Admin(t, "fetch", "-u", b, "flags", "mailbox", "INBOX", "header", "Subject", "new")
		return lies("Archive", "old one") && !lies("INBOX", "old one") && lies("Trash", "old two") && !lies("INBOX", "old two") &&
			strings.Contains(flags, `\Seen`) && strings.Contains(flags, `\Flagged`) && strings.Contains(flags, "urgent")
	})
	all := []string{"old one [archived read]", "old two [trash]", "filed [archived]", "job [archived work]", "new [read starred urgent]", "Re: new [read]"}
	w.has(who, k, all...)

	// What a person does there happens here.
	d.Admin(t, "flags", "remove", "-u", b, `\Flagged`, "mailbox", "INBOX", "header", "Subject", "new")
	d.Admin(t, "move", "-u", b, "INBOX", "mailbox", "Archive", "header", "Subject", "filed")
	d.Admin(t, "expunge", "-u", b, "mailbox", "Trash", "all")
	w.has(who, k, "old one [archived read]", "filed []", "job [archived work]", "new [read urgent]", "Re: new [read]")
}

// deliver hands a message to Postfix as another server does.
func deliver(t testing.TB, smtp, from, raw string) {
	t.Helper()
	conn, err := net.Dial("tcp", smtp)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, line := range []string{"", "EHLO mx.victim.example", "MAIL FROM:<" + from + ">", "RCPT TO:<b@y.example>", "DATA", raw + ".", "QUIT"} {
		if line != "" {
			fmt.Fprintf(conn, "%s\r\n", strings.TrimSuffix(line, "\r\n"))
		}
		answer := make([]byte, 4096)
		if n, err := conn.Read(answer); err != nil || answer[0] > '3' {
			t.Fatalf("postfix answers %q with %q, %v", line[:min(len(line), 20)], answer[:n], err)
		}
	}
}

var _ = message.In
