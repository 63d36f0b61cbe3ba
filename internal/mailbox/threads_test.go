package mailbox_test

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// arrive receives a message with the given header, "Subject: x|Message-ID: <1>".
func (f *fixture) arrive(t *testing.T, to, header string) {
	t.Helper()
	raw := "From: bob@example.com\r\n" + strings.ReplaceAll(header, "|", "\r\n") + "\r\n\r\nbody\r\n"
	if err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{To: []string{to}, Raw: []byte(raw)}, Remote: "192.0.2.1"}); err != nil {
		t.Fatal(err)
	}
}

// open returns the key of an inbox.
func (f *fixture) open(t *testing.T, who auth.Principal, key auth.Secret) *seal.Key {
	t.Helper()
	k, err := f.post.Keys.Open(t.Context(), who, key, "")
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestThreading is headers as mail programs, and attackers, write them.
func TestThreading(t *testing.T) {
	long := "References:"
	for i := range 120 {
		long += fmt.Sprintf("|  <x%d@h>", i)
	}
	tests := []struct {
		name string
		mail []string // Subject is the one letter that the message is known by
		want string   // subjects of each thread, oldest first, newest thread first
	}{
		{"two", []string{"Subject: a|Message-ID: <1@h>", "Subject: b|Message-ID: <2@h>"}, "b a"},
		{"an answer", []string{"Subject: a|Message-ID: <1@h>", "Subject: b|Message-ID: <2@h>|In-Reply-To: <1@h>"}, "ab"},
		{"by References alone", []string{"Subject: a|Message-ID: <1@h>", "Subject: b|References: <0@h> <1@h>"}, "ab"},
		{"the answer came first", []string{"Subject: b|Message-ID: <2@h>|In-Reply-To: <1@h>", "Subject: a|Message-ID: <1@h>"}, "ba"},
		{"siblings before their parent", []string{"Subject: b|Message-ID: <2@h>|In-Reply-To: <1@h>", "Subject: c|Message-ID: <3@h>|In-Reply-To: <1@h>"}, "bc"},
		{"a long chain", []string{"Subject: a|Message-ID: <x0@h>", "Subject: b|Message-ID: <2@h>|" + long}, "ab"},
		{"no Message-ID", []string{"Subject: a", "Subject: b"}, "b a"},
		{"the same Message-ID", []string{"Subject: a|Message-ID: <1@h>", "Subject: b|Message-ID: <1@h>"}, "ab"},
		// The attack: two threads made one by who knows a Message-ID of each.
		{"a joiner", []string{"Subject: a|Message-ID: <1@h>", "Subject: b|Message-ID: <2@h>", "Subject: c|Message-ID: <3@h>|References: <1@h> <2@h>"}, "bc a"},
		{"a joiner, and an answer to it", []string{"Subject: a|Message-ID: <1@h>", "Subject: b|Message-ID: <2@h>", "Subject: c|Message-ID: <3@h>|In-Reply-To: <1@h>|References: <2@h>", "Subject: d|In-Reply-To: <2@h>"}, "bd ac"},
		{"nonsense", []string{"Subject: a|In-Reply-To: <<<>>> <> <a b>|References: \x01 ><", "Subject: b|In-Reply-To: <>|Message-ID: <>"}, "b a"},
	}
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		for i, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				name := fmt.Sprintf("clerk-%d", i)
				_, who, key := f.inbox(t, name)
				for _, m := range tt.mail {
					f.arrive(t, name+"@agents.test", m)
				}
				k := f.open(t, who, key)
				threads, _, err := f.post.Threads(t.Context(), who, k, 0, "")
				if err != nil {
					t.Fatal(err)
				}
				var got []string
				for _, th := range threads {
					ms, err := f.post.Thread(t.Context(), who, k, th.ID)
					if err != nil || len(ms) != th.Messages {
						t.Fatalf("Thread = %d messages of %d, %v", len(ms), th.Messages, err)
					}
					s := ""
					for _, m := range ms {
						s += m.Subject
					}
					got = append(got, s)
				}
				if s := strings.Join(got, " "); s != tt.want {
					t.Errorf("threads = %q, want %q", s, tt.want)
				}
			})
		}
		// Nobody's Message-ID is in the database, and the same one in another
		// inbox is another hash.
		err := db.View(t.Context(), func(tx *store.Tx) error {
			var refs, distinct int
			if err := tx.One(t.Context(), `select count(*), count(distinct ref) from thread_ref`, nil, &refs, &distinct); err != nil {
				return err
			}
			if refs == 0 || refs != distinct {
				t.Errorf("%d hashes, %d of them distinct", refs, distinct)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}

// TestThreadingAtOnce is answers to one message that come at the same time: they
// are one thread, whoever is first.
func TestThreadingAtOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, who, key := f.inbox(t, "analyst")
		f.inbox(t, "buyer")
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				raw := fmt.Appendf(nil, "From: bob@example.com\r\nSubject: %d\r\nMessage-ID: <%d@h>\r\nIn-Reply-To: <root@h>\r\n\r\nx\r\n", i, i)
				to := []string{"analyst@agents.test", "buyer@agents.test"}
				if i%2 == 0 {
					to[0], to[1] = to[1], to[0]
				}
				if err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{To: to, Raw: raw}}); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		threads, _, err := f.post.Threads(t.Context(), who, f.open(t, who, key), 0, "")
		if err != nil || len(threads) != 1 || threads[0].Messages != 8 || threads[0].Unread != 8 {
			t.Errorf("threads = %+v, %v; want one of 8", threads, err)
		}
	})
}

// TestEmptyTrash removes what has been in the trash for 30 days, and all that
// was kept for it.
func TestEmptyTrash(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, who, key := f.inbox(t, "analyst")
		for i := range 3 {
			f.arrive(t, "analyst@agents.test", fmt.Sprintf("Subject: %d|Message-ID: <%d@h>", i, i))
		}
		k := f.open(t, who, key)
		ms, err := f.post.Messages(t.Context(), who, k, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.post.Label(t.Context(), who, k, []string{ms[0].ID, ms[1].ID}, []string{mailbox.LabelTrash, "own"}, nil); err != nil {
			t.Fatal(err)
		}
		if n, err := f.post.EmptyTrash(t.Context()); n != 0 || err != nil {
			t.Fatalf("on the first day %d were removed, %v", n, err)
		}
		err = db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `update message set trashed_at = trashed_at - $1 where id = $2`, int64(31*24*3600*1e6), ms[0].ID)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := f.post.EmptyTrash(t.Context()); n != 1 || err != nil {
			t.Fatalf("after 30 days %d were removed, %v; want 1", n, err)
		}
		count := func(query string) (n int) {
			err := db.View(t.Context(), func(tx *store.Tx) error { return tx.One(t.Context(), query, nil, &n) })
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		for query, want := range map[string]int{
			`select count(*) from message`: 2, `select count(*) from thread`: 2, `select count(*) from thread_ref`: 2, `select count(*) from message_label`: 2,
			`select cast(bytes - (select sum(size) from message) as bigint) from inbox_use`: 0,
		} {
			if got := count(query); got != want {
				t.Errorf("%s = %d, want %d", query, got, want)
			}
		}
		if n := len(f.blobFiles(t)); n != 2 {
			t.Errorf("%d blobs, want 2", n)
		}
	})
}

func (f *fixture) blobFiles(t *testing.T) (out []string) {
	t.Helper()
	err := filepath.WalkDir(f.blobs, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}
