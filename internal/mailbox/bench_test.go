package mailbox

import (
	"context"
	crand "crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

const benchMessages = 100_000

// bench is an inbox with many messages.
type bench struct {
	m   *PostOffice
	who auth.Principal
	k   *seal.Key
}

// seed makes an inbox with n messages of about 800 bytes of text in a random
// vocabulary, in the database and the blobs directly: all are sealed by a holder
// of the key, which is quick, but the newest, fresh of them, which are sealed as those
// that arrive are. One in 30,000 has the word kohlrabi.
func seed(b *testing.B, n, fresh int, blobs bool) bench {
	b.Helper()
	ctx := b.Context()
	log := slog.New(slog.DiscardHandler)
	dir := b.TempDir()
	bl, err := store.OpenBlobs(dir)
	if err != nil {
		b.Fatal(err)
	}
	db := storetest.SQLite(b)
	m := New(log, db, oversight.NewGate(log, db, oversighttest.Rules(nil)), Config{Blobs: bl, Domain: "agents.test"})
	var project string
	err = db.Update(ctx, func(tx *store.Tx) error {
		project, _, err = auth.NewProject(ctx, tx, "one")
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	box, key, err := m.CreateInbox(ctx, auth.Principal{Kind: auth.Project, ID: "crd_x", Project: project}, directory.NewInbox{Address: "analyst"}, "")
	if err != nil {
		b.Fatal(err)
	}
	who, err := auth.CheckKey(ctx, db, key)
	if err != nil {
		b.Fatal(err)
	}
	k, err := m.Keys.Open(ctx, who, key, "")
	if err != nil {
		b.Fatal(err)
	}
	r := rand.New(rand.NewSource(1))
	words := make([]string, 20000)
	for i := range words {
		for range 2 + r.Intn(3) {
			words[i] += string("bcdfghklmnprstvz"[r.Intn(16)]) + string("aeiou"[r.Intn(5)])
		}
	}
	zipf := rand.NewZipf(r, 1.1, 10, uint64(len(words)-1))
	text := func(n int) string {
		var t strings.Builder
		for range n {
			t.WriteString(words[zipf.Uint64()] + " ")
		}
		return t.String()
	}
	begin := time.Now().Add(-time.Duration(n) * time.Minute)
	for at := 0; at < n; at += 5000 {
		err := db.Update(ctx, func(tx *store.Tx) error {
			for i := at; i < min(at+5000, n); i++ {
				body := text(130)
				if i%30000 == 7 {
					body += "kohlrabi"
				}
				raw := []byte(fmt.Sprintf("From: Person %d <p%d@host%d.example>\r\nTo: analyst@agents.test\r\nSubject: %s\r\nMessage-ID: <%d@x>\r\n\r\n%s\r\n", i%500, i%500, i%50, text(6), i, body))
				if err := seedOne(ctx, tx, m, box, k, i, n, fresh, begin, raw, dir, blobs); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	return bench{m, who, k}
}

func seedOne(ctx context.Context, tx *store.Tx, m *PostOffice, box directory.Inbox, k *seal.Key, i, n, fresh int, begin time.Time, raw []byte, dir string, blobs bool) error {
	p := mail.Read(raw)
	id := "msg_" + crand.Text()
	summary, err := json.Marshal(message.Summarise(p))
	if err != nil {
		return err
	}
	close := func(part string, data []byte) ([]byte, error) {
		if n-i <= fresh {
			return seal.Seal(box.PublicKey, box.ID, id, part, data)
		}
		return k.Seal(id, part, data)
	}
	sealed, err := close("summary", summary)
	if err != nil {
		return err
	}
	if blobs {
		whole, err := close("message", raw)
		if err != nil {
			return err
		}
		blob := blobID(id)
		path := filepath.Join(dir, blob[len(blob)-2:], blob)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			return err
		}
	}
	l := letter{id: id, inbox: box, direction: message.In, at: begin.Add(time.Duration(i) * time.Minute), size: len(raw), summary: sealed}
	return keepLetter(ctx, tx, l)
}

func BenchmarkList100k(b *testing.B) {
	s := seed(b, benchMessages, 256, false)
	s.m.Index.foldMax = 1 << 30 // BenchmarkFold measures what a list of new mail does besides
	for b.Loop() {
		if ms, _, err := s.m.List(b.Context(), s.who, s.k, Listing{Limit: 50}); err != nil || len(ms) != 50 {
			b.Fatal(len(ms), err)
		}
	}
}

func BenchmarkSearch100k(b *testing.B) {
	s := seed(b, benchMessages, 256, true)
	begin := time.Now()
	for {
		f, err := s.m.Index.Search(b.Context(), s.who, s.k, Search{Query: "nothing-such"})
		if err != nil {
			b.Fatal(err)
		}
		if f.Pending == 0 {
			break
		}
	}
	b.Logf("folded %d messages, sealed by a holder, in %s", benchMessages, time.Since(begin).Round(time.Millisecond))
	for _, q := range []struct {
		name, query string
		want        int
	}{
		{"a rare word", "kohlrabi", 4},
		{"no such word", "asparagus", 0},
		{"a phrase that is not there", `"no such phrase"`, 0},
		{"a sender", "from:p77@host27.example", 50},
		{"a sender and a word", "from:p77 kohlrabi", 0},
		{"frequent words", "larger:100 -kohlrabi", 50},
		{"a label that none has", "is:starred", 0},
	} {
		b.Run(q.name, func(b *testing.B) {
			for b.Loop() {
				f, err := s.m.Index.Search(b.Context(), s.who, s.k, Search{Query: q.query})
				if err != nil || q.want != len(f.Messages) {
					b.Fatal(len(f.Messages), err)
				}
			}
		})
	}
}

// BenchmarkFold is what the index costs a message that arrived as mail does.
func BenchmarkFold(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		s := seed(b, 256, 256, true)
		b.StartTimer()
		if err := s.m.Index.fold(b.Context(), s.k, time.Now()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/256, "µs/message")
}

// BenchmarkSearchAfterFlood is the first search after 4,000 messages arrived that
// nobody has listed: whether it is complete, and what a message costs it.
func BenchmarkSearchAfterFlood(b *testing.B) {
	const n = 4000
	for b.Loop() {
		b.StopTimer()
		s := seed(b, n, n, true)
		b.StartTimer()
		if f, err := s.m.Index.Search(b.Context(), s.who, s.k, Search{Query: "asparagus"}); err != nil || !f.Complete {
			b.Fatal(f.Pending, err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/n, "µs/message")
}

// BenchmarkThreads10k lists pages of 50 threads of an inbox that has 10,000: the first
// one and the last one.
func BenchmarkThreads10k(b *testing.B) {
	const n = 10_000
	s := seed(b, n, n, false)
	list := func(b *testing.B, cursor string, limit int) (next string) {
		b.Helper()
		out, next, err := s.m.Threads(b.Context(), s.who, s.k, limit, cursor)
		if err != nil || len(out) != limit || out[0].Newest.Subject == "" {
			b.Fatal(len(out), err)
		}
		return next
	}
	cursor := list(b, "", n-50)
	for _, page := range []struct{ name, cursor string }{{"first", ""}, {"last", cursor}} {
		b.Run(page.name, func(b *testing.B) {
			for b.Loop() {
				list(b, page.cursor, 50)
			}
		})
	}
}
