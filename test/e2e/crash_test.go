package e2e

import (
	crand "crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/emersion/go-smtp"

	"postern/internal/store"
	"postern/internal/storetest"
)

// A sink is a real SMTP server that counts the messages that it accepted.
type sink struct {
	mu  sync.Mutex // guards the two below
	got map[string]int
	at  map[string]time.Time // when it came first

	taken atomic.Int64
}

// listen serves a new sink and returns it with its address.
func listen(t *testing.T) (*sink, string) {
	t.Helper()
	out := &sink{got: map[string]int{}, at: map[string]time.Time{}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := smtp.NewServer(out)
	srv.Domain = "sink.test"
	srv.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0) // of connections whose other end was killed
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close() })
	return out, l.Addr().String()
}

func (s *sink) NewSession(*smtp.Conn) (smtp.Session, error) { return &sinkSession{sink: s}, nil }

type sinkSession struct{ sink *sink }

func (*sinkSession) Mail(string, *smtp.MailOptions) error { return nil }
func (*sinkSession) Rcpt(string, *smtp.RcptOptions) error { return nil }
func (*sinkSession) Reset()                               {}
func (*sinkSession) Logout() error                        { return nil }

var subjectLine = regexp.MustCompile(`(?m)^Subject: (n-\d+)\r?$`)

func (s *sinkSession) Data(r io.Reader) error {
	b, err := io.ReadAll(r)
	if err != nil {
		return err // the client died before the final dot: not taken
	}
	m := subjectLine.FindSubmatch(b)
	if m == nil {
		return fmt.Errorf("no subject")
	}
	s.sink.mu.Lock()
	if s.sink.got[string(m[1])]++; s.sink.got[string(m[1])] == 1 {
		s.sink.at[string(m[1])] = time.Now()
	}
	s.sink.mu.Unlock()
	s.sink.taken.Add(1)
	// Between accepting it and answering: a crash here leaves the sender in doubt.
	time.Sleep(rand.N(8 * time.Millisecond))
	return nil
}

// TestCrash kills the server at random points of propose, approve and deliver,
// and checks that no message was delivered twice, that no approved one is lost, and
// that each interrupted one is in state unknown.
func TestCrash(t *testing.T) {
	t.Parallel()                                // it waits for the disk most of the time, and has all for itself
	kills := times(t, "POSTERN_TEST_KILLS", 60) // make soak-tests kills it 300 times
	data := t.TempDir()
	crash(t, kills, func(flags []string) []func() *server {
		return []func() *server{func() *server { return start(t, data, flags...) }}
	})
}

// TestCrashTwoServers is [TestCrash] with two servers on one PostgreSQL. Actions are
// proposed at one, approved at the other and executed by either. Each is killed at
// random.
func TestCrashTwoServers(t *testing.T) {
	t.Parallel()
	url := database(t)
	crash(t, 16, func(flags []string) []func() *server { return pair(t, url, flags...) }, "--database", url)
	db, err := store.OpenReadOnly(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	storetest.NoDeadlocks(t, db)
}

// database returns the URL of an empty PostgreSQL database.
func database(t testing.TB) string {
	t.Helper()
	url := storetest.PostgresURL(t)
	if url == "" {
		t.Fatalf("%s is not set: run this under test/with-postgres", storetest.PostgresVar)
	}
	return url
}

// shareFiles makes data directories share the files of messages and runs with the first.
func shareFiles(t testing.TB, first string, others ...string) {
	t.Helper()
	for _, name := range []string{"blobs", "artifacts", "runs"} {
		dir := filepath.Join(first, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for _, other := range others {
			if err := os.Symlink(dir, filepath.Join(other, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// pair returns the functions that start two servers on one PostgreSQL database. They
// share the key and the files.
func pair(t testing.TB, url string, flags ...string) []func() *server {
	t.Helper()
	flags = append(flags, "--database", url, "--cold", "--pool-max", "0")
	one, other := t.TempDir(), t.TempDir()
	key := make([]byte, 32)
	crand.Read(key)
	for _, data := range []string{one, other} {
		if err := os.WriteFile(filepath.Join(data, "server.key"), key, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	shareFiles(t, one, other)
	// Only one server may run sandboxes. The other serves mail and people.
	return []func() *server{
		func() *server { return start(t, one, flags...) },
		func() *server { return start(t, other, append(slices.Clip(flags), "--sandboxes", "off")...) },
	}
}

func crash(t *testing.T, kills int, servers func(flags []string) []func() *server, where ...string) {
	out, addr := listen(t)
	starts := servers([]string{"--route", "sink.test=" + addr, "--log", "warn", "--inbox-limits", "none", "--project-limits", "none", "--cold", "--pool-max", "0"})
	alive := make([]*server, len(starts))
	for i, start := range starts {
		alive[i] = start()
	}
	address, key := alive[0].inbox("crash")

	var mu sync.Mutex               // guards the three below
	proposed := map[string]string{} // subject of each acknowledged proposal → its action
	approved := map[string]bool{}   // actions whose approval was acknowledged
	next := 0                       // number of the next subject
	work := func(at, by *server, end <-chan struct{}) {
		local, web := by.local(), &http.Client{Timeout: 60 * time.Second, Transport: &http.Transport{}}
		for {
			select {
			case <-end:
				return
			default:
			}
			mu.Lock()
			next++
			subject := fmt.Sprintf("n-%d", next)
			mu.Unlock()
			var a struct{ ID string }
			status, err := call(web, "POST", "http://"+at.web+"/v1/inboxes/"+address+"/messages", key,
				map[string]any{"to": []string{"someone@sink.test"}, "subject": subject, "text": "x"}, &a)
			if err != nil || status != http.StatusAccepted {
				return // it has been killed
			}
			mu.Lock()
			proposed[subject] = a.ID
			mu.Unlock()
			var full struct {
				Version int64
				Digest  string
			}
			if _, err := call(local, "GET", "http://x/v1/actions/"+a.ID, "", nil, &full); err != nil {
				return
			}
			status, err = call(local, "POST", "http://x/v1/actions/"+a.ID+"/decision", "",
				map[string]any{"version": full.Version, "digest": full.Digest, "approve": true}, nil)
			if err != nil {
				return
			}
			if status != http.StatusOK {
				t.Errorf("approve %s: status %d", a.ID, status)
				return
			}
			mu.Lock()
			approved[a.ID] = true
			mu.Unlock()
		}
	}
	for round := range kills {
		end := make(chan struct{})
		var wg sync.WaitGroup
		before := out.taken.Load()
		for i := range 3 {
			at, by := alive[i%len(alive)], alive[(i+1)%len(alive)]
			wg.Go(func() { work(at, by, end) })
		}
		if round%2 == 1 { // so that slow machines, too, meet deliveries
			for end := time.Now().Add(10 * time.Second); out.taken.Load() == before && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
		}
		time.Sleep(rand.N(60 * time.Millisecond))
		i := rand.N(len(alive))
		alive[i].kill(syscall.SIGKILL)
		close(end)
		wg.Wait()
		alive[i] = starts[i]()
	}
	s := alive[0]

	// Actions that were approved and not begun are delivered now.
	states := map[string]string{}               // by action
	deadline := time.Now().Add(5 * time.Minute) // with two servers, leases run out first
	for {
		var list struct{ Actions []struct{ ID, State string } }
		clear(states)
		if _, err := call(s.local(), "GET", "http://x/v1/actions?state=approved,executing", "", nil, &list); err != nil {
			t.Fatal(err)
		}
		if len(list.Actions) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d approved actions were not carried out: %+v", len(list.Actions), list.Actions[0])
		}
		time.Sleep(100 * time.Millisecond)
	}
	count := map[string]int{}
	out.mu.Lock()
	defer out.mu.Unlock()
	for subject, id := range proposed {
		var a struct{ State string }
		if status, err := call(s.local(), "GET", "http://x/v1/actions/"+id, "", nil, &a); err != nil || status != http.StatusOK {
			t.Errorf("%s was acknowledged and is lost: status %d, %v", id, status, err)
			continue
		}
		n := out.got[subject]
		count[a.State]++
		switch {
		case n > 1:
			t.Errorf("%s (%s, %s) was delivered %d times", subject, id, a.State, n)
		case a.State == "done" && n != 1:
			t.Errorf("%s is done and was delivered %d times", subject, n)
		case n == 1 && a.State != "done" && a.State != "unknown":
			t.Errorf("%s was delivered and is %s", subject, a.State)
		case approved[id] && a.State != "done" && a.State != "unknown":
			t.Errorf("%s was approved and is %s", subject, a.State)
		}
	}
	for subject, n := range out.got {
		if n > 1 {
			t.Errorf("%s was delivered %d times", subject, n)
		}
	}
	t.Logf("%d kills, %d proposals acknowledged, %d approvals acknowledged, %d delivered; states %v", kills, len(proposed), len(approved), len(out.got), count)
	if count["done"] == 0 || count["unknown"] == 0 && kills > 50 {
		t.Errorf("the test met too little: %v", count)
	}
	if text := s.mustCLI(append([]string{"audit", "verify"}, where...)...); !strings.Contains(text, "holds") {
		t.Error(text)
	}
}

// TestCrashSchedule kills the server while scheduled mail waits, and while its
// proposer retries lost answers with the same idempotency key. Each mail is proposed
// once and leaves once, not before its time, and never if it was cancelled.
func TestCrashSchedule(t *testing.T) {
	t.Parallel()
	const mails, kills = 24, 6
	out, addr := listen(t)
	data := t.TempDir()
	flags := []string{"--route", "sink.test=" + addr, "--log", "warn", "--inbox-limits", "none", "--project-limits", "none", "--cold", "--pool-max", "0"}
	s := start(t, data, flags...)
	address, key := s.inbox("crash")

	type scheduled struct {
		id, subject string
		at          time.Time
		cancelAt    time.Time // zero: it is not cancelled
		cancelled   bool      // was acknowledged
		late        bool      // it was too late for that
	}
	ms := make([]*scheduled, mails)
	for i := range ms {
		m := &scheduled{subject: fmt.Sprintf("n-%d", i), at: time.Now().Add(time.Second + rand.N(6*time.Second)).Truncate(time.Microsecond)}
		switch i % 6 {
		case 0: // long before it leaves
			m.at, m.cancelAt = m.at.Add(time.Hour), m.at
		case 3: // about when it leaves
			m.cancelAt = m.at.Add(rand.N(1500*time.Millisecond) - time.Second)
		}
		ms[i] = m
	}
	// work is what a client and a reviewer do until the server is killed. Only
	// one runs at a time.
	work := func(s *server, end <-chan struct{}) {
		local, web := s.local(), &http.Client{Timeout: 60 * time.Second, Transport: &http.Transport{}}
		for {
			for i, m := range ms {
				if m.id == "" {
					var a struct{ ID string }
					status, err := call(web, "POST", "http://"+s.web+"/v1/inboxes/"+address+"/messages", key, map[string]any{
						"to": []string{"someone@sink.test"}, "subject": m.subject, "text": "x", "send_at": m.at, "idempotency_key": m.subject,
						"gate_timing": []string{"gate_first", "schedule_first"}[i%2], "undo_seconds": i % 2,
					}, &a)
					if err != nil {
						return // it has been killed, and we do not know whether it heard us
					}
					if status != http.StatusAccepted {
						t.Errorf("propose %s: status %d", m.subject, status)
						return
					}
					m.id = a.ID
				}
				if m.cancelAt.IsZero() || m.cancelled || m.late || time.Now().Before(m.cancelAt) {
					continue
				}
				status, err := call(web, "POST", "http://"+s.web+"/v1/actions/"+m.id+"/cancel", key, nil, nil)
				if err != nil {
					return
				}
				if m.cancelled, m.late = status == http.StatusOK, status == http.StatusConflict; !m.cancelled && !m.late {
					t.Errorf("cancel %s: status %d", m.subject, status)
				}
			}
			var list struct {
				Actions []struct {
					ID, Digest string
					Version    int64
				}
			}
			if _, err := call(local, "GET", "http://x/v1/actions?state=pending", "", nil, &list); err != nil {
				return
			}
			for _, a := range list.Actions {
				// It may have been cancelled meanwhile. Then there is nothing to decide.
				if _, err := call(local, "POST", "http://x/v1/actions/"+a.ID+"/decision", "", map[string]any{"version": a.Version, "digest": a.Digest, "approve": true}, nil); err != nil {
					return
				}
			}
			select {
			case <-end:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	for range kills {
		end := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() { work(s, end) })
		time.Sleep(200*time.Millisecond + rand.N(800*time.Millisecond))
		s.kill(syscall.SIGKILL)
		close(end)
		wg.Wait()
		s = start(t, data, flags...)
	}
	end := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { work(s, end) })
	for deadline := time.Now().Add(3 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		var waits, all struct{ Actions []struct{ ID, State string } }
		if _, err := call(s.local(), "GET", "http://x/v1/actions?state=scheduled,pending,approved,executing", "", nil, &waits); err != nil {
			t.Fatal(err)
		}
		if _, err := call(s.local(), "GET", "http://x/v1/actions?limit=500", "", nil, &all); err != nil {
			t.Fatal(err)
		}
		if len(waits.Actions) == 0 && len(all.Actions) >= mails {
			if len(all.Actions) > mails {
				t.Errorf("%d mails were proposed as %d actions", mails, len(all.Actions))
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d actions wait: %+v", len(waits.Actions), len(all.Actions), waits.Actions)
		}
	}
	close(end)
	wg.Wait()

	count := map[string]int{}
	out.mu.Lock()
	defer out.mu.Unlock()
	for _, m := range ms {
		var a struct{ State string }
		if status, err := call(s.local(), "GET", "http://x/v1/actions/"+m.id, "", nil, &a); err != nil || status != http.StatusOK {
			t.Errorf("%s was acknowledged and is lost: status %d, %v", m.id, status, err)
			continue
		}
		n := out.got[m.subject]
		count[a.State]++
		switch {
		case n > 1:
			t.Errorf("%s (%s, %s) was delivered %d times", m.subject, m.id, a.State, n)
		case n == 1 && out.at[m.subject].Before(m.at):
			t.Errorf("%s left %v before its time", m.subject, m.at.Sub(out.at[m.subject]))
		case m.cancelled && a.State != "cancelled":
			t.Errorf("%s was taken back and is %s", m.subject, a.State)
		case a.State == "cancelled" && (n != 0 || m.cancelAt.IsZero()):
			t.Errorf("%s is cancelled and was delivered %d times", m.subject, n)
		case a.State == "done" && n != 1:
			t.Errorf("%s is done and was delivered %d times", m.subject, n)
		case a.State != "done" && a.State != "cancelled" && a.State != "unknown":
			t.Errorf("%s is %s", m.subject, a.State)
		}
	}
	t.Logf("%d kills, %d mails; states %v", kills, mails, count)
	if count["done"] == 0 || count["cancelled"] == 0 {
		t.Errorf("the test met too little: %v", count)
	}
	if text := s.mustCLI("audit", "verify"); !strings.Contains(text, "holds") {
		t.Error(text)
	}
}

// TestSecondServerMayNotRunSandboxes: only one server may run sandboxes on a database. A second is
// refused with an error that says where the first runs, unless it serves only mail
// and people. Once the first is killed, the next starts at once.
func TestSecondServerMayNotRunSandboxes(t *testing.T) {
	t.Parallel()
	url := database(t)
	flags := []string{"--database", url, "--cold", "--pool-max", "0"}
	one, other, third := t.TempDir(), t.TempDir(), t.TempDir()
	key := make([]byte, 32)
	crand.Read(key)
	for _, data := range []string{one, other, third} {
		if err := os.WriteFile(filepath.Join(data, "server.key"), key, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	shareFiles(t, one, other, third)
	first := start(t, one, flags...)
	args := append([]string{"up", "--data", other, "--listen", "127.0.0.1:0", "--smtp", "127.0.0.1:0"}, flags...)
	out, err := exec.Command(first.bin, args...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "another server runs the sandboxes") || !strings.Contains(string(out), one) || !strings.Contains(string(out), "--sandboxes=off") {
		t.Fatalf("a second server: %v\n%s", err, out)
	}
	// The accident: it shares the database and not the files, and lists messages that it
	// cannot read.
	fourth := t.TempDir()
	if err := os.WriteFile(filepath.Join(fourth, "server.key"), key, 0o600); err != nil {
		t.Fatal(err)
	}
	args = append([]string{"up", "--data", fourth, "--listen", "127.0.0.1:0", "--smtp", "127.0.0.1:0", "--sandboxes", "off"}, flags...)
	out, err = exec.Command(first.bin, args...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), filepath.Join(fourth, "blobs")) || !strings.Contains(string(out), "share the directories") {
		t.Fatalf("a server with files of its own: %v\n%s", err, out)
	}
	mail := start(t, third, append(slices.Clip(flags), "--sandboxes", "off")...)
	resp, err := (&http.Client{Timeout: time.Minute}).Get("http://" + mail.web + "/sandboxes")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("a server without sandboxes answers for them: %d", resp.StatusCode)
	}
	_ = first.kill(syscall.SIGKILL)
	again := start(t, one, flags...) // the same directory
	_ = again.kill(syscall.SIGKILL)
	start(t, other, flags...) // and another
}
