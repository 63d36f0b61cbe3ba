package imapserver

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// noTransport sends nothing.
type noTransport struct{}

func (noTransport) Deliver(context.Context, mail.Envelope) ([]mail.Delivery, error) { return nil, nil }

// A fixture is a server with two inboxes of one project and one of another.
type fixture struct {
	db    *store.DB
	gate  *oversight.Gate
	post  *mailbox.PostOffice
	srv   *Server
	addr  string // with TLS from the beginning
	clear string // with STARTTLS

	project, person auth.Principal
	projectKey      auth.Secret
	a, b, foreign   directory.Inbox
	keyA, keyB      auth.Secret
	keyForeign      auth.Secret
}

// Messages that say "quiet" are archived without approval.
func rules() oversighttest.Rules {
	return oversighttest.Rules{{ID: "archive", Kind: policy.KindArchive, Effect: policy.Allow}}
}

func setup(t testing.TB, db *store.DB, change func(*Config)) *fixture {
	t.Helper()
	ctx := t.Context()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{db: db, gate: oversight.NewGate(log, db, rules())}
	f.post = mailbox.New(log, db, f.gate, mailbox.Config{Blobs: blobs, Transport: noTransport{}, Domain: "agents.test", QuarantineScore: 0.5})
	for i, name := range []string{"one", "two"} {
		var who auth.Principal
		err := db.Update(ctx, func(tx *store.Tx) error {
			id, key, err := auth.NewProject(ctx, tx, name)
			who = auth.Principal{Kind: auth.Project, ID: "crd_x", Project: id}
			if i == 0 {
				f.projectKey, f.project = key, who
				f.person = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: id}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		inbox := func(address string) (directory.Inbox, auth.Secret) {
			b, key, err := f.post.CreateInbox(ctx, who, directory.NewInbox{Address: address}, "")
			if err != nil {
				t.Fatal(err)
			}
			return b, key
		}
		if i == 0 {
			f.a, f.keyA = inbox("alice")
			f.b, f.keyB = inbox("bella")
		} else {
			f.foreign, f.keyForeign = inbox("foreign")
		}
	}
	cfg := Config{DB: db, Post: f.post, Gate: f.gate, TLS: testTLS(t)}
	if change != nil {
		change(&cfg)
	}
	if f.srv, err = New(log, cfg); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 3)
	listen := func(implicit bool) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() { done <- f.srv.Serve(l, implicit) }()
		return l.Addr().String()
	}
	f.addr, f.clear = listen(true), listen(false)
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		if err := f.gate.Run(run); run.Err() == nil {
			done <- err
		} else {
			done <- nil
		}
	}()
	t.Cleanup(func() {
		end, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := f.srv.Shutdown(end); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		stop()
		for range 3 {
			if err := <-done; err != nil {
				t.Errorf("serve: %v", err)
			}
		}
	})
	return f
}

func testTLS(t testing.TB) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12}
}

// receive brings a message for an inbox.
func (f *fixture) receive(t testing.TB, b directory.Inbox, raw string) {
	t.Helper()
	raw = strings.ReplaceAll(raw, "\n", "\r\n")
	if err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1"}); err != nil {
		t.Fatal(err)
	}
}

// plain is a message of one text.
func plain(subject, text string) string {
	return "From: Bob <bob@example.com>\nTo: alice@agents.test\nSubject: " + subject + "\nDate: Fri, 02 Jan 2026 23:30:00 -0500\nMessage-ID: <" + strings.ReplaceAll(subject, " ", ".") + "@example.com>\n\n" + text + "\n"
}

// A client speaks IMAP by hand.
type client struct {
	net.Conn
	t testing.TB
	r *bufio.Reader
	n int
}

func newClient(t testing.TB, conn net.Conn) *client {
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	return &client{Conn: conn, t: t, r: bufio.NewReader(conn)}
}

// dial connects with TLS and reads the greeting.
func (f *fixture) dial(t testing.TB) *client {
	t.Helper()
	conn, err := tls.Dial("tcp", f.addr, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	c := newClient(t, conn)
	if got := c.line(); !strings.HasPrefix(got, "* OK [CAPABILITY IMAP4rev2 IMAP4rev1 ID ") {
		t.Fatalf("greeting: %q", got)
	}
	return c
}

// login connects and signs in.
func (f *fixture) login(t testing.TB, user string, key auth.Secret) *client {
	t.Helper()
	c := f.dial(t)
	c.ok("LOGIN %s %s", user, key.Reveal())
	return c
}

var literalEnd = regexp.MustCompile(`\{([0-9]+)\}\r\n$`)

// line reads one line with its literals.
func (c *client) line() string {
	c.t.Helper()
	var out strings.Builder
	for {
		s, err := c.r.ReadString('\n')
		out.WriteString(s)
		if err != nil {
			return out.String() + "(" + err.Error() + ")"
		}
		m := literalEnd.FindStringSubmatch(s)
		if m == nil {
			return out.String()
		}
		n, _ := strconv.Atoi(m[1])
		b := make([]byte, n)
		if _, err := io.ReadFull(c.r, b); err != nil {
			return out.String() + "(" + err.Error() + ")"
		}
		out.Write(b)
	}
}

// do sends a command and returns all that is answered, the last line last.
func (c *client) do(format string, args ...any) string {
	c.t.Helper()
	c.n++
	tag := fmt.Sprintf("t%d", c.n)
	if _, err := io.WriteString(c, tag+" "+fmt.Sprintf(format, args...)+"\r\n"); err != nil {
		return "(" + err.Error() + ")"
	}
	return c.until(tag)
}

// until reads until the line with a tag, "+", or the end.
func (c *client) until(tag string) string {
	var out strings.Builder
	for {
		s := c.line()
		if rest, ok := strings.CutPrefix(s, tag+" "); ok {
			return out.String() + rest
		}
		out.WriteString(s)
		if strings.HasPrefix(s, "+") || strings.HasSuffix(s, ")") && !strings.HasSuffix(s, "\n") {
			return out.String()
		}
	}
}

// ok sends a command that must succeed.
func (c *client) ok(format string, args ...any) string {
	c.t.Helper()
	got := c.do(format, args...)
	if i := strings.LastIndexByte(strings.TrimSuffix(got, "\r\n"), '\n'); !strings.HasPrefix(got[i+1:], "OK") {
		c.t.Fatalf("%.200s: %.500s", fmt.Sprintf(format, args...), got)
	}
	return got
}

// want sends a command whose answer must contain each text.
func (c *client) want(command string, texts ...string) string {
	c.t.Helper()
	got := c.do("%s", command)
	for _, w := range texts {
		if !strings.Contains(got, w) {
			c.t.Errorf("%s: want %q in %q", command, w, got)
		}
	}
	return got
}

// literal sends a command that ends in a literal.
func (c *client) literal(command, text string) string {
	c.t.Helper()
	c.n++
	tag := fmt.Sprintf("t%d", c.n)
	fmt.Fprintf(c, "%s %s {%d}\r\n", tag, command, len(text))
	if got := c.until(tag); !strings.HasPrefix(got, "+") {
		return got
	}
	io.WriteString(c, text+"\r\n")
	return c.until(tag)
}

// TestStory: a program reads an inbox from beginning to end.
func TestStory(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.receive(t, f.a, plain("First", "the first text"))
		f.receive(t, f.a, "From: =?utf-8?q?B=C3=B6b?= <bob@example.com>\nTo: alice@agents.test, \"C, D\" <cd@example.com>\nCc: e@example.com\nSubject: =?utf-8?q?Gr=C3=BC=C3=9Fe?=\nIn-Reply-To: <First@example.com>\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=x\n\npreamble\n--x\nContent-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: quoted-printable\n\nGr=C3=BC=C3=9Fe\n--x\nContent-Type: application/pdf; name=\"a.pdf\"\nContent-Disposition: attachment; filename=\"a.pdf\"\nContent-Transfer-Encoding: base64\n\naGVsbG8=\n--x--\n")
		c := f.login(t, f.a.Address, f.keyA)
		c.want("CAPABILITY", "IMAP4rev2", " ID ", "IDLE", "MOVE", "UIDPLUS", "SPECIAL-USE", "LITERAL+", "UNSELECT", "ENABLE", "BINARY", "APPENDLIMIT=36700160")
		c.want("ID NIL", `* ID ("name" "Postern")`, "OK")
		c.want("NAMESPACE", `* NAMESPACE (("" "/")) NIL NIL`)
		list := c.want(`LIST "" "*"`, `\Archive) "/" "Archive"`, `\Drafts) "/" "Drafts"`, `\Sent) "/" "Sent"`, `\Trash) "/" "Trash"`, `"/" INBOX`)
		if strings.Contains(list, "Junk") || strings.Contains(list, "uarantine") {
			t.Errorf("quarantine is listed: %s", list)
		}
		c.want("STATUS INBOX (MESSAGES UNSEEN UIDNEXT UIDVALIDITY SIZE DELETED)", "MESSAGES 2", "UNSEEN 2", "UIDNEXT 3", "UIDVALIDITY "+strconv.FormatInt(f.a.Created.Unix(), 10))
		c.want("SELECT INBOX", "* 2 EXISTS", "[UNSEEN 1]", "[UIDNEXT 3]", `\*)`, "[READ-WRITE]")
		c.want("FETCH 1:* (UID FLAGS INTERNALDATE RFC822.SIZE)", "* 1 FETCH (UID 1 FLAGS ()", "* 2 FETCH (UID 2")
		c.want("FETCH 2 ENVELOPE", `"=?utf-8?q?Gr=C3=BC=C3=9Fe?="`, `(("=?utf-8?q?B=C3=B6b?=" NIL "bob" "example.com"))`, `("C, D" NIL "cd" "example.com")`, `"<First@example.com>"`)
		c.want("FETCH 2 BODYSTRUCTURE", `(("text" "plain" ("charset" "utf-8") NIL NIL "quoted-printable" 15 0`, `("application" "pdf" ("name" "a.pdf") NIL NIL "base64" 8 NIL ("attachment" ("filename" "a.pdf"))`, `"mixed" ("boundary" "x")`)
		c.want("FETCH 2 (BODY.PEEK[1] BODY.PEEK[2.MIME] BODY.PEEK[HEADER.FIELDS (CC)])", "{15}\r\nGr=C3=BC=C3=9Fe BODY[2.MIME]", "filename=\"a.pdf\"\r\n", "Cc: e@example.com\r\n\r\n")
		c.want("FETCH 2 (BINARY.PEEK[2] BINARY.SIZE[1])", "~{5}\r\nhello", "BINARY.SIZE[1] 7")
		c.want("FETCH 1 BODY.PEEK[TEXT]<4.5>", "BODY[TEXT]<4> {5}\r\nfirst")
		c.want("UID FETCH 1 BODY[]", `FLAGS (\Seen)`, "the first text\r\n)")
		c.want("SEARCH UNSEEN", "* SEARCH 2\r\n")
		c.want("STORE 2 +FLAGS (\\Flagged project)", `* 2 FETCH (FLAGS (project \Flagged))`)
		c.want("UID SEARCH KEYWORD project FROM bob", "* SEARCH 2\r\n")
		c.want("NOOP", "OK")

		// To the archive without approval, to the trash with it.
		c.want("UID MOVE 1 Archive", "[COPYUID", " 1 1]", "* 1 EXPUNGE", "OK")
		got := c.want("UID MOVE 2 Trash", "NO [NOPERM] waits for approval as act_")
		id := regexp.MustCompile(`act_[A-Z0-9]+`).FindString(got)
		if again := c.want("UID MOVE 2 Trash", id); strings.HasPrefix(again, "OK ") {
			t.Error(again)
		}
		c.want("UID COPY 2 Sent", "NO [CANNOT]")
		a, err := f.gate.Action(t.Context(), f.person, id)
		if err != nil || a.Request.Via != via {
			t.Fatal(a, err)
		}
		if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: id, Version: a.Version, Digest: a.Hex(), Approve: true}); err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, "i IDLE\r\n")
		for got := ""; !strings.Contains(got, "* 1 EXPUNGE"); got = c.line() {
			if strings.Contains(got, "(") && !strings.HasSuffix(got, "\n") {
				t.Fatal(got)
			}
		}
		f.receive(t, f.a, plain("Third", "new mail"))
		for got := ""; !strings.Contains(got, "* 1 EXISTS"); got = c.line() {
			if strings.Contains(got, "(") && !strings.HasSuffix(got, "\n") {
				t.Fatal(got)
			}
		}
		io.WriteString(c, "DONE\r\n")
		c.until("i")
		c.want("STATUS Trash (MESSAGES)", "MESSAGES 1")
		c.want("SELECT Trash", "* 1 EXISTS")
		c.want("MOVE 1 INBOX", "[COPYUID", " 1 4]", "* 1 EXPUNGE", "OK")
		c.want("SELECT INBOX", "* 2 EXISTS", "project")
		c.want("UID FETCH 1:* FLAGS", `* 1 FETCH (UID 3`, `* 2 FETCH (UID 4 FLAGS (project \Flagged))`)

		// A draft.
		got = c.literal("APPEND Drafts (\\Draft)", "From: x@y.example\r\nTo: \"Bob B\" <bob@example.com>\r\nBcc: h@example.com\r\nSubject: Plan\r\n\r\nHello Bob\r\n")
		if !strings.Contains(got, "[APPENDUID") || !strings.Contains(got, " 1] ") {
			t.Errorf("APPEND: %s", got)
		}
		c.want("SELECT Drafts", "* 1 EXISTS")
		c.want("FETCH 1 (FLAGS ENVELOPE BODY.PEEK[])", `\Draft`, "From: alice@agents.test\r\n", "Bcc: h@example.com\r\n", "Hello Bob\r\n")
		c.want("STORE 1 +FLAGS (\\Deleted)", `\Deleted`)
		c.want("EXPUNGE", "* 1 EXPUNGE", "OK")
		c.want("LOGOUT", "* BYE", "OK")
	})
}
