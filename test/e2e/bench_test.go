package e2e

import (
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/internal/smtpclient/postfixtest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// BenchmarkInbound gives messages of 4 kB to Postern, which seals them and
// keeps them in its database, and to a Postfix beside it, which queues them:
// both answer 250 only for what is durable. The figure to compare is msg/s.
func BenchmarkInbound(b *testing.B) {
	s := start(b, b.TempDir(), "--cold")
	to, _ := s.inbox("analyst")
	postfix, _ := postfixtest.Start(b)
	for _, links := range []int{1, 8} {
		for _, server := range []struct{ name, addr, to string }{{"postfix", postfix, "b@" + postfixtest.Domain}, {"postern", s.smtp, to}} {
			b.Run(fmt.Sprintf("%s/links=%d", server.name, links), func(b *testing.B) {
				var left atomic.Int64
				left.Store(int64(b.N))
				var all sync.WaitGroup
				for range links {
					all.Go(func() {
						for left.Load() > 0 {
							if err := deliverSome(server.addr, server.to, &left); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				all.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
			})
		}
	}
}

// deliverSome gives up to 50 messages over one connection.
func deliverSome(addr, to string, left *atomic.Int64) error {
	m, err := dialMail(addr)
	if err != nil {
		return err
	}
	defer m.Close()
	text := strings.Repeat(strings.Repeat("x", 76)+"\r\n", 52)
	for range 50 {
		n := left.Add(-1)
		if n < 0 {
			break
		}
		if err := m.deliver(to, fmt.Sprintf("figures-%d", n), text); err != nil {
			return err
		}
	}
	return m.say("QUIT", 221)
}

// BenchmarkIdleInbox creates inboxes and reports what each costs while it is idle:
// memory of the server and bytes on disk.
func BenchmarkIdleInbox(b *testing.B) {
	data := b.TempDir()
	s := start(b, data, "--cold")
	s.inbox("first") // what the first one brings along is not an inbox's
	pid := strconv.Itoa(s.cmd.Process.Pid)
	memory, disk := privateBytes(b, pid), bytesIn(b, data)
	local := s.local()
	for i := range b.N {
		var made struct{ Address string }
		status, err := call(local, "POST", "http://x/v1/inboxes", "", map[string]any{"address": fmt.Sprintf("agent-%d", i)}, &made)
		if err != nil || status != http.StatusCreated {
			b.Fatalf("create: %d, %v", status, err)
		}
	}
	b.ReportMetric(float64(privateBytes(b, pid)-memory)/float64(b.N), "B-memory/inbox")
	b.ReportMetric(float64(bytesIn(b, data)-disk)/float64(b.N), "B-disk/inbox")
}

// privateBytes returns the memory that the process shares with no other.
func privateBytes(b *testing.B, pid string) (n int64) {
	text, err := os.ReadFile("/proc/" + pid + "/smaps_rollup")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var kb int64
		if _, err := fmt.Sscanf(line, "Private_Dirty: %d kB", &kb); err == nil {
			n += kb << 10
		}
	}
	return n
}

// bytesIn returns the size of all files below a folder.
func bytesIn(b *testing.B, dir string) (n int64) {
	err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // it has gone meanwhile
		}
		if i, err := e.Info(); err == nil && i.Mode().IsRegular() {
			n += i.Size()
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	return n
}

// BenchmarkGate measures the gate of one server, or of two on one database, with
// 400 actions waiting: the time from a proposal to its place in the queue, proposals
// over eight connections, and decisions over eight. On SQLite each is durable.
// test/with-postgres does not sync.
func BenchmarkGate(b *testing.B) {
	free := []string{"--cold", "--inbox-limits", "none", "--project-limits", "none"}
	b.Run("sqlite", func(b *testing.B) {
		s := start(b, b.TempDir(), free...)
		gate(b, s, s)
	})
	b.Run("postgres", func(b *testing.B) {
		s := pair(b, database(b), free[1:]...)[0]()
		gate(b, s, s)
	})
	b.Run("postgres-two", func(b *testing.B) {
		ss := pair(b, database(b), free[1:]...)
		gate(b, ss[0](), ss[1]())
	})
}

// gate measures with agents at both servers and reviewers at both.
func gate(b *testing.B, one, other *server) {
	locals := []*http.Client{one.local(), other.local()}
	local := locals[1] // whose queue is looked at
	web := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}
	type action struct {
		ID, Digest string
		Version    int64
	}
	propose := func(b *testing.B, address, key string, n int64) (a action) {
		at := []*server{one, other}[n%2]
		status, err := call(web, "POST", "http://"+at.web+"/v1/inboxes/"+address+"/messages", key,
			map[string]any{"to": []string{"someone@example.com"}, "subject": fmt.Sprintf("n-%d", n), "text": strings.Repeat("word ", 400)}, &a)
		if err != nil || status != http.StatusAccepted {
			b.Errorf("propose: %d, %v", status, err)
		}
		return a
	}
	reject := func(b *testing.B, by *http.Client, a action) {
		status, err := call(by, "POST", "http://x/v1/actions/"+a.ID+"/decision", "",
			map[string]any{"version": a.Version, "digest": a.Digest, "approve": false, "reason": "no"}, nil)
		if err != nil || status != http.StatusOK {
			b.Errorf("decide: %d, %v", status, err)
		}
	}
	var n atomic.Int64
	address, key := one.inbox("waiting")
	for range 400 {
		propose(b, address, key, n.Add(1))
	}
	address, key = one.inbox("busy")
	b.Run("visible", func(b *testing.B) {
		var took time.Duration
		for range b.N {
			began := time.Now()
			a := propose(b, address, key, n.Add(1))
			var list struct{ Actions []action }
			if _, err := call(local, "GET", "http://x/v1/actions?state=pending&limit=50", "", nil, &list); err != nil {
				b.Fatal(err)
			}
			took += time.Since(began)
			if len(list.Actions) == 0 || list.Actions[0].ID != a.ID {
				b.Fatal("what was proposed does not stand in the queue")
			}
			reject(b, local, list.Actions[0])
		}
		b.ReportMetric(float64(took.Microseconds())/1000/float64(b.N), "ms-visible")
	})
	// At most 500 wait in one inbox, so what is proposed is decided in turns.
	b.Run("many", func(b *testing.B) {
		var proposing, deciding time.Duration
		for left := int64(b.N); left > 0; left -= 400 {
			var todo, decide atomic.Int64
			todo.Store(min(left, 400))
			began := time.Now()
			inParallel(8, func() {
				for todo.Add(-1) >= 0 {
					propose(b, address, key, n.Add(1))
				}
			})
			proposing += time.Since(began)
			var list struct{ Actions []action }
			if _, err := call(local, "GET", fmt.Sprintf("http://x/v1/actions?state=pending&limit=%d", min(left, 400)), "", nil, &list); err != nil {
				b.Fatal(err)
			}
			decide.Store(int64(len(list.Actions)))
			began = time.Now()
			inParallel(8, func() {
				for {
					i := decide.Add(-1)
					if i < 0 {
						return
					}
					reject(b, locals[i%2], list.Actions[i])
				}
			})
			deciding += time.Since(began)
		}
		b.ReportMetric(float64(b.N)/proposing.Seconds(), "proposals/s")
		b.ReportMetric(float64(b.N)/deciding.Seconds(), "decisions/s")
	})
}

// BenchmarkGateMixed measures two servers on one database of PostgreSQL, with eight
// agents at each, every one with an inbox of its own, in one project. Every second
// proposal is decided at once, at the other server. It counts proposals.
func BenchmarkGateMixed(b *testing.B) {
	url := database(b)
	starts := pair(b, url, "--inbox-limits", "none")
	ss := []*server{starts[0](), starts[1]()}
	locals := []*http.Client{ss[0].local(), ss[1].local()}
	web := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 16}}
	limits := map[string]any{"limits": map[string]int{"per_minute": -1, "per_hour": -1, "per_day": 1 << 40}} // one count of the project
	if status, err := call(locals[0], "POST", "http://x/v1/sending", "", limits, nil); err != nil || status != http.StatusOK {
		b.Fatal(err)
	}
	type inbox struct{ address, key string }
	inboxes := make([]inbox, 16)
	for i := range inboxes {
		inboxes[i].address, inboxes[i].key = ss[0].inbox(fmt.Sprintf("busy-%d", i))
	}
	db, err := store.OpenReadOnly(b.Context(), url)
	if err != nil {
		b.Fatal(err)
	}
	defer db.Close()
	var n, worker atomic.Int64
	b.Run("two", func(b *testing.B) {
		servers, backends := cpu(b, ss[0].cmd.Process.Pid, ss[1].cmd.Process.Pid), cpu(b, backendPIDs(b, db)...)
		var left atomic.Int64
		left.Store(int64(b.N))
		worker.Store(0)
		b.ResetTimer()
		inParallel(16, func() {
			w := worker.Add(1) - 1
			for i := w; left.Add(-1) >= 0; i++ {
				var a struct {
					ID, Digest string
					Version    int64
				}
				status, err := call(web, "POST", "http://"+ss[w%2].web+"/v1/inboxes/"+inboxes[w].address+"/messages", inboxes[w].key,
					map[string]any{"to": []string{"someone@example.com"}, "subject": fmt.Sprintf("n-%d", n.Add(1)), "text": strings.Repeat("word ", 400)}, &a)
				if err != nil || status != http.StatusAccepted {
					b.Errorf("propose: %d, %v", status, err)
					return
				}
				if i%2 == 0 {
					continue
				}
				status, err = call(locals[1-w%2], "POST", "http://x/v1/actions/"+a.ID+"/decision", "",
					map[string]any{"version": a.Version, "digest": a.Digest, "approve": false, "reason": "no"}, nil)
				if err != nil || status != http.StatusOK {
					b.Errorf("decide: %d, %v", status, err)
					return
				}
			}
		})
		b.StopTimer()
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "proposals/s")
		b.ReportMetric((cpu(b, ss[0].cmd.Process.Pid, ss[1].cmd.Process.Pid)-servers).Seconds()*1000/float64(b.N), "ms-cpu-servers/proposal")
		b.ReportMetric((cpu(b, backendPIDs(b, db)...)-backends).Seconds()*1000/float64(b.N), "ms-cpu-postgres/proposal")
	})
	storetest.NoDeadlocks(b, db)
}

// backendPIDs returns the processes of PostgreSQL that serve a database.
func backendPIDs(b *testing.B, db *store.DB) (pids []int) {
	err := db.View(b.Context(), func(tx *store.Tx) (err error) {
		pids, err = store.List(b.Context(), tx, func(row func(...any) error) (pid int, err error) {
			err = row(&pid)
			return pid, err
		}, `select pid from pg_stat_activity where datname = current_database()`)
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return pids
}

// cpu returns the processor time that processes have used.
func cpu(b *testing.B, pids ...int) (used time.Duration) {
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // it has ended
		}
		f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:])) // the name before may have spaces
		for _, ticks := range f[11:13] {                                               // in user mode, and in the kernel
			n, err := strconv.ParseInt(ticks, 10, 64)
			if err != nil {
				b.Fatal(err)
			}
			used += time.Duration(n) * 10 * time.Millisecond
		}
	}
	return used
}

func inParallel(n int, f func()) {
	var all sync.WaitGroup
	for range n {
		all.Go(f)
	}
	all.Wait()
}
