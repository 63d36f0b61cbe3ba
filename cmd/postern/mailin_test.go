package main

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailauth"
	"postern/internal/mailauth/dnstest"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/smtpserver"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestReceive: what becomes of mail whose sender is proved, is not, or cannot
// be asked about.
func TestReceive(t *testing.T) {
	dns := dnstest.Start(t,
		`bank.example. TXT "v=spf1 ip4:192.0.2.1 -all"`, `_dmarc.bank.example. TXT "v=DMARC1; p=reject"`,
		`shop.example. TXT "v=spf1 ip4:192.0.2.1 -all"`, `_dmarc.shop.example. TXT "v=DMARC1; p=quarantine"`,
		`_dmarc.slow.example. TXT "v=DMARC1; p=reject"`)
	dns.Fail("slow.example", true)
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	db := storetest.SQLite(t)
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	gate := oversight.NewGate(log, db, oversight.Fixed(nil))
	d := &daemon{log: log, db: db, gate: gate, resolver: dns.Resolver(), post: mailbox.New(log, db, gate, mailbox.Config{Blobs: blobs, Domain: "agents.test", QuarantineScore: 0.75})}
	d.conf.MailDomain = "agents.test"
	var project auth.Principal
	err = db.Update(t.Context(), func(tx *store.Tx) error {
		id, _, err := auth.NewProject(t.Context(), tx, "one")
		project = auth.Principal{Kind: auth.Project, ID: "crd_x", Project: id}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	b, key, err := d.post.CreateInbox(t.Context(), project, mailbox.NewInbox{Address: "agent"}, "")
	if err != nil {
		t.Fatal(err)
	}
	proofs, err := mailauth.New(mailauth.Config{Resolver: dns.Resolver(), Hostname: "agents.test", Own: d.ownRecord, Ours: d.ownAddress})
	if err != nil {
		t.Fatal(err)
	}
	who, err := auth.CheckKey(t.Context(), db, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := d.post.Open(t.Context(), who, key, b.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, dmarc, from, remote string
		refused                   string // empty: accepted
		quarantined               bool
		field                     string
	}{
		{"proved", "enforce", "a@bank.example", "192.0.2.1", "", false, "dmarc=pass"},
		{"forged", "enforce", "a@bank.example", "192.0.2.66", "bank.example, which asks to refuse", false, ""},
		{"forged, noted", "note", "a@bank.example", "192.0.2.66", "", true, "dmarc=fail"},
		{"forged, and the domain asks for less", "enforce", "a@shop.example", "192.0.2.66", "", true, "dmarc=fail"},
		{"its DNS is broken", "enforce", "a@slow.example", "192.0.2.66", "", false, "dmarc=temperror"},
		{"two authors", "enforce", "a@shop.example\r\nFrom: b@bank.example", "192.0.2.1", "nobody can prove", false, ""},
		{"as a neighbour, from outside", "enforce", "b@agents.test", "192.0.2.66", "", true, "dmarc=fail"},
		{"as a neighbour, from this machine", "enforce", "b@agents.test", "127.0.0.1", "", true, "dmarc=fail"},
		{"as a neighbour in other letters", "enforce", "B <B@Agents.TEST>", "::1", "", true, "dmarc=fail"},
		{"as the inbox itself", "enforce", b.Address, "::ffff:127.0.0.1", "", true, "dmarc=fail"},
		{"with a neighbour beside another", "enforce", "c@agents.test, b@agents.test", "127.0.0.1", "", true, "dmarc=fail"},
		{"through this machine", "enforce", "a@bank.example", "127.0.0.1", "", false, "dmarc=none"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d.conf.DMARC = tt.dmarc
			mailFrom, _, _ := strings.Cut(tt.from, "\r\n")
			raw := "Authentication-Results: agents.test; dmarc=pass header.from=forged.example\r\nFrom: " + tt.from + "\r\nTo: " + b.Address + "\r\nSubject: s\r\n\r\nhello, the meeting is at ten\r\n"
			err := d.receive(t.Context(), proofs, mail.Envelope{From: mailFrom, To: []string{b.Address}, Raw: []byte(raw)},
				smtpserver.Peer{Remote: netip.AddrPortFrom(netip.MustParseAddr(tt.remote), 25), Helo: "mx.example"})
			if no, refused := errors.AsType[*smtpserver.RefusalError](err); tt.refused != "" {
				if !refused || no.Code != 550 || !strings.Contains(no.Reason, tt.refused) {
					t.Errorf("got %v, want a refusal: %s", err, tt.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var raw2 []byte
			if held, _, herr := d.post.HeldMessages(t.Context(), who, k, "", 1); herr != nil || (len(held) > 0) != tt.quarantined {
				t.Fatalf("%d are held for a person, %v", len(held), herr)
			} else if tt.quarantined {
				_, raw2, err = d.post.HeldMessage(t.Context(), who, k, held[0].ID)
				if err := d.post.Drop(t.Context(), auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: project.Project}, held[0].ID); err != nil {
					t.Fatal(err)
				}
			} else {
				id := ""
				err = db.View(t.Context(), func(tx *store.Tx) error {
					return tx.One(t.Context(), `select id from message order by at desc limit 1`, nil, &id)
				})
				if err != nil {
					t.Fatal(err)
				}
				_, raw2, err = d.post.Message(t.Context(), who, k, id)
			}
			if err != nil || !strings.HasPrefix(string(raw2), "Authentication-Results: agents.test;") || !strings.Contains(string(raw2), tt.field) || strings.Contains(string(raw2), "forged.example") {
				t.Errorf("got %v, want %s:\n%s", err, tt.field, raw2)
			}
		})
	}
}

func TestOwnCertificate(t *testing.T) {
	path, now := filepath.Join(t.TempDir(), "mail.pem"), time.Now()
	first, err := ownCertificate(path, "mx.p.example", now)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Leaf.VerifyHostname("mx.p.example"); err != nil {
		t.Error(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("its file: %v, %v", fi.Mode(), err)
	}
	for _, tt := range []struct {
		name, host string
		now        time.Time
		kept       bool
	}{
		{"the next start", "mx.p.example", now.AddDate(5, 0, 0), true},
		{"nearly at its end", "mx.p.example", now.AddDate(9, 11, 20), false},
		{"another name", "mx.q.example", now, false},
	} {
		c, err := ownCertificate(path, tt.host, tt.now)
		if err != nil {
			t.Fatal(err)
		}
		if kept := bytes.Equal(c.Certificate[0], first.Certificate[0]); kept != tt.kept {
			t.Errorf("%s: kept %v, want %v", tt.name, kept, tt.kept)
		}
		first = c
	}
	if err := os.WriteFile(path, []byte("half a file"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ownCertificate(path, "mx.q.example", now); err != nil {
		t.Errorf("a file that was cut off: %v", err)
	}
}

// TestUnanswered: up names the addresses that a domain of the world should have
// and nobody has made, and none of a domain for tests.
func TestUnanswered(t *testing.T) {
	db := storetest.SQLite(t)
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	d := &daemon{log: log, db: db, post: mailbox.New(log, db, oversight.NewGate(log, db, oversight.Fixed(nil)), mailbox.Config{Blobs: blobs, Domain: "agents.example"})}
	d.conf.MailDomain = "agents.example"
	if got, want := strings.Join(d.unanswered(t.Context()), " "), "postmaster@agents.example abuse@agents.example"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	person := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err = db.Update(t.Context(), func(tx *store.Tx) error {
		person.Project, _, err = auth.NewProject(t.Context(), tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := d.post.CreateInbox(t.Context(), person, mailbox.NewInbox{Address: "abuse"}, ""); err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(d.unanswered(t.Context()), " "), "postmaster@agents.example"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	d.conf.MailDomain = "agents.internal"
	if got := d.unanswered(t.Context()); got != nil {
		t.Errorf("a domain for tests: %q", got)
	}
}
