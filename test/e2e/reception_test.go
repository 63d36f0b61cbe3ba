package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"postern/internal/store"
)

// TestReceptionCrash kills the server while mail comes in. Then each message that was
// answered with 250 is there, complete, exactly once, and nothing is left of those
// that were cut off (RFC 5321, section 6.1).
func TestReceptionCrash(t *testing.T) {
	t.Parallel()
	kills := times(t, "POSTERN_TEST_KILLS", 30)
	data := t.TempDir()
	s := start(t, data, "--cold", "--pool-max", "0", "--log", "warn")
	address, key := s.inbox("reception")
	var taken sync.Map // subject → true
	var next, acked atomic.Int64
	// A slow machine may accept nothing in so short a round. Then more and longer
	// rounds follow.
	for round := 0; round < kills || acked.Load() == 0 && round < 2*kills; round++ {
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				c, err := dialMail(s.smtp)
				if err != nil {
					return
				}
				defer c.Close()
				for {
					subject := fmt.Sprintf("n-%d", next.Add(1))
					if c.deliver(address, subject, strings.Repeat("line of text\r\n", 200)+"end of "+subject+"\r\n") != nil {
						return // it has been killed
					}
					taken.Store(subject, true)
					acked.Add(1)
				}
			})
		}
		time.Sleep(rand.N(80 * time.Millisecond * time.Duration(1+round/kills*10)))
		_ = s.kill(syscall.SIGKILL)
		all.Wait()
		s = start(t, data, "--cold", "--pool-max", "0", "--log", "warn")
	}

	count := map[string]int{}
	ids := map[string]string{}
	for cursor := ""; ; {
		var list struct {
			Messages []struct{ ID, Subject string }
			Next     string `json:"next_cursor"`
		}
		status, err := call(client, "GET", "http://"+s.web+"/v1/inboxes/"+address+"/messages?limit=200&cursor="+url.QueryEscape(cursor), key, nil, &list)
		if err != nil || status != http.StatusOK {
			t.Fatalf("list: %d, %v", status, err)
		}
		for _, m := range list.Messages {
			count[m.Subject]++
			ids[m.Subject] = m.ID
		}
		if cursor = list.Next; cursor == "" {
			break
		}
	}
	for subject, n := range count {
		if n > 1 {
			t.Errorf("%s is there %d times", subject, n)
		}
		var m struct{ Text string }
		if status, err := call(client, "GET", "http://"+s.web+"/v1/inboxes/"+address+"/messages/"+ids[subject], key, nil, &m); err != nil || status != http.StatusOK || !strings.HasSuffix(strings.TrimSpace(m.Text), "end of "+subject) {
			t.Errorf("%s is not whole: %d, %v, %.40q", subject, status, err, m.Text)
		}
	}
	taken.Range(func(subject, _ any) bool {
		if count[subject.(string)] == 0 {
			t.Errorf("%s was answered with 250 and is lost", subject)
		}
		return true
	})
	t.Logf("%d kills, %d messages begun, %d answered with 250, %d there", kills, next.Load(), acked.Load(), len(count))
	if acked.Load() == 0 || next.Load() == acked.Load() {
		t.Error("the test met too little")
	}
	// A message that was cut off may have left its sealed bytes. The next start
	// removes them once they are old; these are made so.
	_ = s.kill(syscall.SIGTERM)
	stored := func() []string {
		files, err := filepath.Glob(filepath.Join(data, "blobs", "*", "*"))
		if err != nil {
			t.Fatal(err)
		}
		return files
	}
	old := time.Now().Add(-2 * time.Hour)
	for _, f := range stored() {
		if err := os.Chtimes(f, old, old); err != nil {
			t.Fatal(err)
		}
	}
	start(t, data, "--cold", "--pool-max", "0")
	eventually(t, "what is stored is what rows name", func() bool {
		files := stored()
		for i := range files {
			files[i] = filepath.Base(files[i])
		}
		slices.Sort(files)
		return slices.Equal(files, blobsIn(t, filepath.Join(data, "postern.db")))
	})
}

// blobsIn returns the IDs of all blobs that rows of a database refer to, sorted.
func blobsIn(t *testing.T, file string) (ids []string) {
	t.Helper()
	db, err := store.OpenReadOnly(t.Context(), file)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	err = db.View(t.Context(), func(tx *store.Tx) error {
		tables, err := tx.Strings(t.Context(), `select m.name from sqlite_master m join pragma_table_info(m.name) c where m.type = 'table' and c.name = 'blob_id'`)
		if err != nil {
			return err
		}
		for _, table := range tables {
			named, err := tx.Strings(t.Context(), `select blob_id from `+table)
			if err != nil {
				return err
			}
			ids = append(ids, named...)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(ids)
	return ids
}
