package mailbox_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// again returns another program on the same database and blobs.
func (f *fixture) again(t *testing.T) *mailbox.PostOffice {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	blobs, err := store.OpenBlobs(f.blobs)
	if err != nil {
		t.Fatal(err)
	}
	return mailbox.New(log, f.db, oversight.NewGate(log, f.db, oversighttest.Rules(nil)), mailbox.Config{Blobs: blobs, Domain: "agents.test"})
}

// search returns the subjects of what is found, page by page.
func search(t *testing.T, m *mailbox.PostOffice, who auth.Principal, k *seal.Key, query string, limit int) string {
	t.Helper()
	var subjects []string
	for cursor := ""; ; {
		found, err := m.Index.Search(t.Context(), who, k, mailbox.Search{Query: query, Limit: limit, Cursor: cursor})
		if err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		if found.Pending != 0 || len(found.Messages) > max(limit, 0) && limit > 0 {
			t.Fatalf("%s: %d found, %d pending", query, len(found.Messages), found.Pending)
		}
		for _, msg := range found.Messages {
			subjects = append(subjects, msg.Subject)
		}
		if cursor = found.Next; cursor == "" {
			return strings.Join(subjects, " ")
		}
		if len(subjects) > 1000 {
			t.Fatal("endless pages")
		}
	}
}

// TestSearch looks for mail before, while and after it is folded: what is found
// is always the same.
func TestSearch(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, who, key := f.inbox(t, "analyst")
		_, other, otherKey := f.inbox(t, "buyer")
		for i := range 13 {
			body := "plain words"
			if i%5 == 0 {
				body = secretWord + " is ripe"
			}
			header := fmt.Sprintf("Subject: %c", 'a'+i)
			if i == 3 {
				header += "|Cc: carol@example.org|Content-Disposition: attachment; filename=report.pdf"
			}
			f.arriveBody(t, "analyst@agents.test", header, body)
		}
		f.arriveBody(t, "buyer@agents.test", "Subject: foreign", secretWord)
		k := f.open(t, who, key)
		ms, err := f.post.Messages(t.Context(), who, k, 0)
		if err != nil {
			t.Fatal(err)
		}
		byName := map[string]string{}
		for _, m := range ms {
			byName[m.Subject] = m.ID
		}
		label := func(name string, add, remove []string) {
			t.Helper()
			if _, err := f.post.Label(t.Context(), who, k, []string{byName[name]}, add, remove); err != nil {
				t.Fatal(err)
			}
		}
		label("b", []string{"starred", "read"}, nil)
		label("c", []string{"trash"}, nil)
		label("k", []string{"read", "own"}, nil)
		tests := []struct{ query, want string }{
			{secretWord, "k f a"},
			{"kohlrab", "k f a"},
			{`"ripe"`, "k f a"},
			{"ripe is:unread", "f a"},
			{"is:starred", "b"},
			{"is:read", "k b"},
			{"label:own ripe", "k"},
			{"label:none", ""},
			{"plain -is:starred", "m l j i h g e"}, // d is a file
			{"in:trash", "c"},
			{"plain in:anywhere", "m l j i h g e c b"},
			{"has:attachment", "d"},
			{"filename:pdf", "d"},
			{"cc:carol", "d"},
			{"from:bob", "m l k j i h g f e d b a"},
			{"is:unread", "m l j i h g f e d a"},
			{"subject:foreign", ""},
			{"to:me OR subject:m", "m"},
		}
		for _, stage := range []struct {
			name        string
			least, most int
		}{{"none folded", 100, 100}, {"some folded", 9, 9}, {"all folded", 2, 4}, {"again", 2, 4}} {
			t.Run(stage.name, func(t *testing.T) {
				f.post.FoldAt(stage.least, stage.most)
				for _, tt := range tests {
					for _, limit := range []int{0, 1, 3} {
						if got := search(t, f.post, who, k, tt.query, limit); got != tt.want {
							t.Errorf("%s, %d a page: found %q, want %q", tt.query, limit, got, tt.want)
						}
					}
				}
			})
		}
		// Labels count as they are now, not as they were when it was folded.
		label("b", nil, []string{"starred"})
		label("c", nil, []string{"trash"})
		label("m", []string{"starred"}, nil)
		if got := search(t, f.post, who, k, "is:starred OR subject:c", 0); got != "m c" {
			t.Errorf("after labels were changed: %q", got)
		}
		if got := search(t, f.post, other, f.open(t, other, otherKey), secretWord, 0); got != "foreign" {
			t.Errorf("another inbox finds %q", got)
		}
		// Nobody else searches, whatever key they got hold of.
		for _, who := range []auth.Principal{other, f.project, f.person, {}} {
			if _, err := f.post.Index.Search(t.Context(), who, k, mailbox.Search{Query: "a"}); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s searches: %v", who, err)
			}
		}
		for _, bad := range []string{"", "form:bob", "(", strings.Repeat("a", 3000)} {
			if _, err := f.post.Index.Search(t.Context(), who, k, mailbox.Search{Query: bad}); !errors.Is(err, directory.ErrInvalid) {
				t.Errorf("%.20q: %v", bad, err)
			}
		}
		// Nothing of it can be read where it is kept.
		for _, path := range f.blobFiles(t) {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, word := range []string{secretWord, strings.ToLower(secretWord), "plain words", "carol", "report"} {
				if bytes.Contains(data, []byte(word)) {
					t.Errorf("%s holds %q in the clear", path, word)
				}
			}
		}
	})
}

// arriveBody receives a message with the given header and body.
func (f *fixture) arriveBody(t *testing.T, to, header, body string) {
	t.Helper()
	f.arrive(t, to, header+"||"+body)
}

// TestFoldAtOnce is two programs that fold one inbox: each message is in one
// segment, and found once.
func TestFoldAtOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, who, key := f.inbox(t, "analyst")
		for i := range 30 {
			f.arriveBody(t, "analyst@agents.test", fmt.Sprintf("Subject: s%02d", i), "turnip")
		}
		k := f.open(t, who, key)
		posts := []*mailbox.PostOffice{f.post, f.again(t), f.again(t)}
		var wg sync.WaitGroup
		for _, m := range posts {
			m.FoldAt(2, 5)
			wg.Go(func() {
				for range 3 {
					found, err := m.Index.Search(t.Context(), who, k, mailbox.Search{Query: "turnip"})
					if err != nil || len(found.Messages)+found.Pending < 30 || len(found.Messages) > 30 {
						t.Errorf("%d found, %d pending, %v", len(found.Messages), found.Pending, err)
					}
				}
			})
		}
		wg.Wait()
		if got := strings.Fields(search(t, f.post, who, k, "turnip", 7)); len(got) != 30 {
			t.Errorf("afterwards %d are found: %v", len(got), got)
		}
		count := func(query string) (n int) {
			if err := db.View(t.Context(), func(tx *store.Tx) error { return tx.One(t.Context(), query, nil, &n) }); err != nil {
				t.Fatal(err)
			}
			return n
		}
		if n := count(`select cast(sum(messages) as bigint) from mail_segment`); n != 30-count(`select count(*) from message where segment_id = ''`) {
			t.Errorf("the segments hold %d messages", n)
		}
		if n := count(`select count(*) from mail_segment s where s.messages <> (select count(*) from message m where m.segment_id = s.id)`); n != 0 {
			t.Errorf("%d segments hold others than their messages", n)
		}
		// Each blob belongs to something: a message, or one of a segment's two.
		if got, want := len(f.blobFiles(t)), 30+2*count(`select count(*) from mail_segment`); got != want {
			t.Errorf("%d blobs, want %d", got, want)
		}
	})
}

// TestTrashLeavesTheIndex: what was removed for good is in no segment once a
// holder of the key has come, or after a week.
func TestTrashLeavesTheIndex(t *testing.T) {
	for _, holder := range []bool{true, false} {
		t.Run(fmt.Sprintf("holder %v", holder), func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				ctx := t.Context()
				f := setup(t, db)
				f.post.FoldAt(2, 4)
				_, who, key := f.inbox(t, "analyst")
				for i := range 8 {
					f.arriveBody(t, "analyst@agents.test", fmt.Sprintf("Subject: s%d", i), "turnip")
				}
				k := f.open(t, who, key)
				if got := search(t, f.post, who, k, "turnip", 0); got != "s7 s6 s5 s4 s3 s2 s1 s0" {
					t.Fatal(got)
				}
				ms, err := f.post.Messages(ctx, who, k, 0)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := f.post.Label(ctx, who, k, []string{ms[0].ID, ms[1].ID, ms[2].ID, ms[3].ID, ms[5].ID}, []string{"trash"}, nil); err != nil {
					t.Fatal(err)
				}
				later := func(query string) {
					err := db.Update(ctx, func(tx *store.Tx) error {
						_, err := tx.ExecContext(ctx, query, int64(31*24*3600*1e6))
						return err
					})
					if err != nil {
						t.Fatal(err)
					}
				}
				later(`update message set trashed_at = trashed_at - $1 where trashed_at > 0`)
				if n, err := f.post.EmptyTrash(ctx); n != 5 || err != nil {
					t.Fatal(n, err)
				}
				if n, err := f.post.Index.DropStale(ctx); n != 0 || err != nil {
					t.Fatal("dropped before its time:", n, err)
				}
				blobs := 3 // what is left
				if !holder {
					later(`update mail_segment set stale_at = stale_at - $1 where stale_at > 0`)
					if n, err := f.post.Index.DropStale(ctx); n != 2 || err != nil {
						t.Fatal(n, err)
					}
					if got := len(f.blobFiles(t)); got != blobs {
						t.Errorf("%d blobs, want %d", got, blobs)
					}
				}
				if got := search(t, f.post, who, k, "turnip in:anywhere", 0); got != "s3 s1 s0" {
					t.Errorf("found %q", got)
				}
				if got := len(f.blobFiles(t)); got != blobs+2 {
					t.Errorf("%d blobs, want those of the messages and of one segment", got)
				}
				var stale int
				if err := db.View(ctx, func(tx *store.Tx) error {
					return tx.One(ctx, `select count(*) from mail_segment where stale_at > 0`, nil, &stale)
				}); err != nil || stale != 0 {
					t.Errorf("%d stale segments, %v", stale, err)
				}
			})
		})
	}
}

// TestSearchSaysWhatItHasNotSeen: a search that has not looked at all messages says
// so, unless none of them can be on its page; and one that may wait looks at all.
func TestSearchSaysWhatItHasNotSeen(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, who, key := f.inbox(t, "analyst")
		for i := range 13 {
			body := "plain words"
			if i == 1 || i == 12 {
				body = secretWord
			}
			f.arriveBody(t, "analyst@agents.test", fmt.Sprintf("Subject: %c", 'a'+i), body)
		}
		k := f.open(t, who, key)
		f.post.FoldAt(2, 2)
		look := func(s mailbox.Search) (subjects string, found mailbox.Found) {
			found, err := f.post.Index.Search(t.Context(), who, k, s)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range found.Messages {
				subjects += m.Subject
			}
			if found.Complete != (found.Pending == 0) && found.Next == "" || (found.Pending == 0) != found.Behind.IsZero() {
				t.Errorf("%+v: complete %v, %d pending behind %v", s, found.Complete, found.Pending, found.Behind)
			}
			return subjects, found
		}
		// Two of 13 are folded and four are looked at.
		if got, found := look(mailbox.Search{Query: "subject:b", Wait: 1}); got != "" || found.Complete || found.Pending != 7 {
			t.Errorf("found %q, complete %v, %d pending", got, found.Complete, found.Pending)
		}
		if got, found := look(mailbox.Search{Query: secretWord, Wait: 1}); got != "m" || found.Complete || found.Pending != 5 {
			t.Errorf("found %q, complete %v, %d pending", got, found.Complete, found.Pending)
		}
		if got, found := look(mailbox.Search{Query: "plain", Limit: 2, Wait: 1}); got != "lk" || !found.Complete || found.Pending != 3 || found.Next == "" {
			t.Errorf("a page of the newest: %q, complete %v, %d pending", got, found.Complete, found.Pending)
		}
		if got, found := look(mailbox.Search{Query: secretWord}); got != "mb" || !found.Complete || found.Pending != 0 {
			t.Errorf("found %q, complete %v, %d pending", got, found.Complete, found.Pending)
		}
	})
}

// TestSearchFields finds mail by fields that few messages have, before and after it is
// folded.
func TestSearchFields(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, who, key := f.inbox(t, "analyst")
		f.arriveBody(t, "analyst@agents.test", "Subject: a|List-Id: News <news.lists.example.com>|Delivered-To: sales@example.org", "plain words near the end")
		f.arriveBody(t, "analyst@agents.test", "Subject: b|X-Priority: 1 (Highest)", "news.lists.example.com")
		f.arriveBody(t, "analyst@agents.test", "Subject: c|Importance: low|Bcc: Dave <dave@example.net>", "plain")
		k := f.open(t, who, key)
		for _, most := range []int{100, 2} {
			f.post.FoldAt(most, most)
			for query, want := range map[string]string{
				"list:news.lists.example.com": "a", "list:dave": "", "deliveredto:sales@example.org": "a", "is:important": "b", "-is:important": "c a",
				"bcc:dave": "c", "plain AROUND 3 end": "a", "plain AROUND 2 end": "",
			} {
				if got := search(t, f.post, who, k, query, 0); got != want {
					t.Errorf("folded at %d: %s finds %q, want %q", most, query, got, want)
				}
			}
		}
	})
}
