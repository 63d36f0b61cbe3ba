package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/signing"
	"postern/internal/store"
)

// TestAudit is the command line of whoever examines a record: with the server's
// database, a copy of it, an export, and a proof, and after somebody has
// written into the database.
func TestAudit(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	db, err := store.Open(ctx, filepath.Join(dir, "postern.db"), "")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.UseKey(make([]byte, 32)); err != nil {
		t.Fatal(err)
	}
	ring, err := signing.New(db, signing.Config{Key: make([]byte, 32)})
	if err != nil {
		t.Fatal(err)
	}
	points := filepath.Join(dir, "points")
	record, err := audit.NewKeeper(nil, db, audit.KeeperConfig{
		Signer: func(ctx context.Context) (note.Signer, error) { return ring.CheckpointSigner(ctx, "agents.test/audit") }, Dir: points,
	})
	if err != nil {
		t.Fatal(err)
	}
	grow := func(n int) {
		t.Helper()
		err := db.Update(ctx, func(tx *store.Tx) error {
			for range n {
				if err := audit.Append(ctx, tx, auth.Principal{Kind: auth.Person, ID: "ann", Project: "prj_1"}, "person.renew", "ann", audit.Fields{"reason": "line\nbreak"}); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	grow(20)
	if _, err := record.Make(ctx); err != nil {
		t.Fatal(err)
	}
	grow(3)
	cli := func(want int, args ...string) string {
		t.Helper()
		var out, errs bytes.Buffer
		if got := run(ctx, append([]string{"audit"}, args...), &out, &errs); got != want {
			t.Fatalf("audit %s: status %d, want %d: %s%s", strings.Join(args, " "), got, want, &out, &errs)
		}
		return out.String() + errs.String()
	}
	has := func(text string, wants ...string) {
		t.Helper()
		for _, w := range wants {
			if !strings.Contains(text, w) {
				t.Errorf("%q is not in:\n%s", w, text)
			}
		}
	}
	data := []string{"--data", dir}
	at := func(args ...string) []string { return append(args, data...) }
	key := filepath.Join(dir, "key")
	if err := os.WriteFile(key, []byte(cli(0, at("keys")...)), 0o600); err != nil {
		t.Fatal(err)
	}
	plain := cli(0, at("verify")...)
	has(plain, "the audit chain holds: 24 entries", "head 24:", "not shown:", "nothing that was kept elsewhere was given")
	with := cli(0, at("verify", "--checkpoint", points, "--key", key)...)
	has(with, "the entries 1 to 21 are exactly those", "the entries 22 to 24, which are newer")
	has(cli(0, at("verify", "--checkpoint", points)...), "it is from the database itself")

	// A copy, and exports.
	copied := filepath.Join(dir, "copy.db")
	if err := db.Backup(ctx, copied); err != nil {
		t.Fatal(err)
	}
	has(cli(0, "verify", "--file", copied, "--checkpoint", points, "--key", key), "1 to 21")
	has(cli(0, "checkpoint", "--file", copied), "agents.test/audit\n21\n")
	whole := filepath.Join(dir, "whole.jsonl")
	cli(0, at("export", "--out", whole)...)
	cli(1, at("export", "--out", whole)...) // it is there
	has(cli(0, "verify", "--file", whole, "--key", key), "24 entries", "in line 22 of the export")
	grow(2)
	f, err := os.OpenFile(whole, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"seq":25,"at":"20`); err != nil { // who wrote it was interrupted
		t.Fatal(err)
	}
	f.Close()
	cli(0, at("export", "--out", whole, "--resume")...)
	cli(0, at("export", "--out", whole, "--resume")...)
	has(cli(0, "verify", "--file", whole, "--key", key, "--checkpoint", points), "26 entries")
	part := filepath.Join(dir, "part.jsonl")
	cli(0, at("export", "--out", part, "--verb", "person.", "--since", "1h", "--actor", "person:")...)
	has(cli(1, "verify", "--file", part), "broken at entry 21")
	has(cli(0, "verify", "--file", part, "--partial"), "each line of this part", "that no other entry was left out")
	has(cli(0, at("export", "--format", "cef", "--after", "25")...), "CEF:0|Postern|", `msg=reason: line\nbreak`)
	has(cli(0, at("export", "--format", "syslog", "--after", "25")...), "<109>1 ", `seq="26"`)
	if got := cli(0, at("list", "--actor", "system:")...); strings.Contains(got, "person:ann") || !strings.Contains(got, "signing.add") {
		t.Errorf("list by actor:\n%s", got)
	}

	// A proof, for somebody who has the key alone.
	proof := filepath.Join(dir, "7.tlog-proof")
	cli(0, at("prove", "7", "--out", proof)...)
	good := cli(0, "check", proof, "--key", key)
	has(good, "The proof holds: entry 7", `reason="line\nbreak"`, "over 21 entries")
	has(cli(2, "check", proof), "--key is missing")
	_, stranger, err := note.GenerateKey(rand.Reader, "agents.test/audit")
	if err != nil {
		t.Fatal(err)
	}
	has(cli(1, "check", proof, "--key", stranger), "no known key has signed it")
	has(cli(1, at("prove", "400")...), "there is no entry 400")
	has(cli(1, at("prove", "26")...), "newer than each checkpoint") // and no server runs
	for _, bad := range [][]string{{"prove"}, {"prove", "x"}, {"prove", "0"}, {"verify", "--head", "x"}, {"verify", "--partial"}, {"export", "--format", "xml"}, {"export", "--resume"}, {"list", "--since", "soon"}, {"check"}} {
		cli(2, at(bad...)...)
	}
	has(cli(1, at("verify", "--checkpoint", points, "--key", stranger)...), "no known key has signed it")
	has(cli(1, at("verify", "--checkpoint", dir)...), "has none")

	// Somebody writes into the database.
	if err := db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update audit_entry set actor = 'person:eve' where seq = 12`)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	has(cli(1, at("verify")...), "broken at entry 12")
	cli(1, "check", changedProof(t, db, dir), "--key", key)
}

// changedProof is what the changed database says about its changed entry.
func changedProof(t *testing.T, db *store.DB, dir string) string {
	t.Helper()
	path := filepath.Join(dir, strconv.Itoa(12)+".tlog-proof")
	err := audit.View(t.Context(), db, func(tx *store.Tx) error {
		p, err := audit.ProveEntry(t.Context(), tx, "", 12)
		if err != nil {
			return err
		}
		b, err := p.Marshal()
		if err != nil {
			return err
		}
		return os.WriteFile(path, b, 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
	return path
}
