package mailbox_test

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestStoredBytes looks through every column of every table, every blob and the
// log for what arrived and was read and searched for.
func TestStoredBytes(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		var log bytes.Buffer
		blobs, err := store.OpenBlobs(f.blobs)
		if err != nil {
			t.Fatal(err)
		}
		logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		f.post = mailbox.New(logger, db, oversight.NewGate(logger, db, oversighttest.Rules(nil)), mailbox.Config{Blobs: blobs, Transport: f.hop, Domain: "agents.test", QuarantineScore: 0.75})
		b, _, key := f.inbox(t, "analyst")
		words := map[string]string{}
		for _, what := range []string{"sender", "name", "subject", "messageid", "header", "text", "html", "filename", "content", "copy"} {
			words[what] = what + strings.ToLower(rand.Text())
		}
		raw := fmt.Sprintf("From: %q <%s@example.com>\r\nTo: %s\r\nCc: %s@example.com\r\nSubject: %s\r\nMessage-ID: <%s@example.com>\r\nX-Header: %s\r\nMIME-Version: 1.0\r\n"+
			"Content-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\nContent-Type: text/plain\r\n\r\n%s\r\n--b\r\nContent-Type: text/html\r\n\r\n<p>%s</p>\r\n"+
			"--b\r\nContent-Type: text/csv\r\nContent-Disposition: attachment; filename=%s.csv\r\n\r\n%s\r\n--b--\r\n",
			words["name"], words["sender"], b.Address, words["copy"], words["subject"], words["messageid"], words["header"], words["text"], words["html"], words["filename"], words["content"])
		for range 2 {
			err := f.post.Receive(ctx, mailbox.Arrival{Envelope: mail.Envelope{From: words["sender"] + "@example.com", To: []string{b.Address}, Raw: []byte(raw)}, Remote: "192.0.2.1:25"})
			if err != nil {
				t.Fatal(err)
			}
		}
		who, k := f.show(t, key, "")
		ms, err := f.post.Messages(ctx, who, k, 0)
		if err != nil || len(ms) != 2 || ms[0].Subject != words["subject"] {
			t.Fatalf("messages = %+v, %v", ms, err)
		}
		if _, got, err := f.post.Message(ctx, who, k, ms[0].ID); err != nil || string(got) != raw {
			t.Errorf("message = %q, %v", got, err)
		}
		for _, q := range []string{words["text"], "from:" + words["sender"], "subject:" + words["subject"], "nothing"} {
			if _, err := f.post.Index.Search(ctx, who, k, mailbox.Search{Query: q}); err != nil {
				t.Errorf("search: %v", err)
			}
		}

		check := func(where string, data []byte) {
			for what, w := range words {
				if bytes.Contains(data, []byte(w)) || bytes.Contains(data, []byte(base64.StdEncoding.EncodeToString([]byte(w))[:20])) {
					t.Errorf("%s holds the %s", where, what)
				}
			}
			if bytes.Contains(data, []byte(key.Reveal())) {
				t.Errorf("%s holds the key", where)
			}
		}
		rows := 0
		for _, table := range f.tables(t, "") {
			f.each(t, table, func(row []byte) {
				rows++
				check("table "+table, row)
			})
		}
		if rows < 20 {
			t.Errorf("only %d rows were looked at", rows)
		}
		err = filepath.WalkDir(f.blobs, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			data, err := os.ReadFile(path)
			check("blob "+d.Name(), data)
			return err
		})
		if err != nil {
			t.Error(err)
		}
		check("the log", log.Bytes())
	})
}

// each calls do with every row of a table, all its columns in one.
func (f *fixture) each(t *testing.T, table string, do func([]byte)) {
	t.Helper()
	err := f.db.View(t.Context(), func(tx *store.Tx) error {
		rows, err := tx.QueryContext(t.Context(), `select * from `+table)
		if err != nil {
			return err
		}
		defer rows.Close()
		names, err := rows.Columns()
		if err != nil {
			return err
		}
		for rows.Next() {
			values := make([]any, len(names))
			for i := range values {
				values[i] = new([]byte)
			}
			if err := rows.Scan(values...); err != nil {
				return err
			}
			var row []byte
			for _, v := range values {
				row = append(append(row, *v.(*[]byte)...), 0)
			}
			do(row)
		}
		return rows.Err()
	})
	if err != nil {
		t.Fatal(table, err)
	}
}

// FuzzNameFor makes names of any text: none that is no name, and none that is
// reserved.
func FuzzNameFor(f *testing.F) {
	for _, s := range []string{"", "Sarah Shield", "Zoë's", "postmaster", "ＡＤＭＩＮ", "a\x00b", "\xff\xfe", "..--__", strings.Repeat("é", 500), "ſupport", "ıt"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if name := mailbox.NameFor(text); name != "" {
			if err := mailbox.CheckName(name); err != nil {
				t.Errorf("NameFor(%q) = %q: %v", text, name, err)
			}
		}
	})
}
