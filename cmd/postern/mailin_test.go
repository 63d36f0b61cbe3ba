package main

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/store"
	"postern/internal/storetest"
)

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
	d := &daemon{log: log, db: db, post: mailbox.New(log, db, oversight.NewGate(log, db, oversighttest.Rules(nil)), mailbox.Config{Blobs: blobs, Domain: "agents.example"})}
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
	if _, _, err := d.post.CreateInbox(t.Context(), person, directory.NewInbox{Address: "abuse"}, ""); err != nil {
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
