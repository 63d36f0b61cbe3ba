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

	"postern/internal/smtpclient/postfixtest"
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

// BenchmarkIdleInbox makes inboxes and tells what
// each costs while nobody uses it: memory of the server and bytes on disk.
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

// privateBytes returns the memory that only this process has.
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
