package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestOversightSandbox: a sandbox's captured mail is refused with a reason, a kill
// switch cuts its open connection, and another connection is held until a person
// approves. It runs in a network namespace, as TestEgress does.
func TestOversightSandbox(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestOversightSandbox$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestOversightSandbox") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"addr", "add", outside + "/32", "dev", "lo"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	open, heard := make(chan struct{}, 1000), make(chan struct{}, 1000)
	l, err := net.Listen("tcp", outside+":9000")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { // it greets, and keeps the connection for as long as the other does
				_, _ = io.WriteString(c, "hello\n")
				open <- struct{}{}
				if n, _ := c.Read(make([]byte, 1)); n > 0 { // it has read the greeting
					heard <- struct{}{}
				}
				_, _ = io.Copy(io.Discard, c)
				c.Close()
			}()
		}
	}()

	s := start(t, t.TempDir(), "--egress-allow", outside, "--pool-max", "0", "--inbox-limits", "day=4")
	op := shell{s: s}
	address, _ := s.inbox("alice")
	b := s.sandbox(map[string]any{"metadata": map[string]string{"postern.inbox": address}})

	mails := 0
	mail := func() string {
		t.Helper()
		mails++
		r := b.run(fmt.Sprintf(`python3 - <<'END'
import smtplib
c = smtplib.SMTP("%s", 25, timeout=120)
try:
    c.ehlo(); c.mail("%s"); c.rcpt("bob@example.com")
    print(*c.data(b"From: %s\r\nTo: bob@example.com\r\nSubject: number %d\r\n\r\nhello\r\n"))
except smtplib.SMTPResponseException as e:
    print(e.smtp_code, e.smtp_error)
END`, outside, address, address, mails))
		if r.exit != 0 {
			t.Fatalf("exit %d: %s", r.exit, r.stderr)
		}
		return r.stdout
	}
	said := func(name, got string, want ...string) {
		t.Helper()
		for _, w := range want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: the program is told %q, which has no %q", name, got, w)
			}
		}
	}
	said("it is held", mail(), "250 ", "held for approval as act_")
	op.must(t, []string{"inbox", "mode", address, "read_only"})
	said("read only", mail(), "550 ", "5.7.1", "read_only")
	op.must(t, []string{"inbox", "mode", address, "gated_send", "--reason", "it is over"})
	on := switchID.FindString(op.must(t, []string{"stop", "capability", "email.send", "--reason", "we look into it"}))
	got := mail()
	said("a kill switch", got, "550 ", "5.7.1", "we look into it")
	op.must(t, []string{"audit", "list", "--object", actionID.FindString(got)}, "action.propose", "denied")
	op.must(t, []string{"resume", on})
	changePolicy(t, op, op, "version: 1\nrules:\n  - {id: shop, kind: email.send, then: deny, reason: not from a sandbox}\n")
	said("a rule that denies", mail(), "550 ", "5.7.1", "not from a sandbox")
	changePolicy(t, op, op, "version: 1\nrules: []\n")
	for got = ""; mails < 10 && !strings.HasPrefix(got, "452"); {
		got = mail()
	}
	said("a limit", got, "452 ", "4.7.1", "day")
	if out := op.must(t, []string{"pending"}); strings.Count(out, "email.send, pending") < 1 || strings.Contains(out, "number 2\n") || strings.Contains(out, "number 3\n") || strings.Contains(out, "number 4\n") {
		t.Errorf("what was refused waits: %s", out)
	}

	connect := func(port int) string {
		return fmt.Sprintf(`python3 - <<'END'
import socket
try:
    c = socket.create_connection(("%s", %d), timeout=120)
    print(c.recv(100))
    c.sendall(b"read")
    c.settimeout(120)
    print("ended", c.recv(100))
except TimeoutError: print("nothing came")
except OSError as e: print("cut:", e.strerror)
END`, outside, port)
	}
	// background starts a command and returns a function that waits for its end.
	background := func(command string) func() string {
		var r result
		var err error
		var wg sync.WaitGroup
		wg.Go(func() { r, err = b.try(command, 5*time.Minute) })
		return func() string {
			t.Helper()
			wg.Wait()
			if err != nil {
				t.Fatal(err)
			}
			return r.stdout + r.stderr
		}
	}
	opened := func() {
		t.Helper()
		select {
		case <-heard:
		case <-time.After(2 * time.Minute):
			t.Fatal("the sandbox has not connected")
		}
	}
	// recorded waits for an entry in the record: a connection is cut before the
	// entry is written.
	recorded := func(want ...string) {
		t.Helper()
		eventually(t, fmt.Sprintf("%q is on the record", want), func() bool {
			out, _ := op.run(t, "", "audit", "list", "--object", b.id, "--verb", "egress.")
			return !slices.ContainsFunc(want, func(w string) bool { return !strings.Contains(out, w) })
		})
	}
	t.Run("a switch cuts what is open", func(t *testing.T) {
		end := background(connect(9000))
		opened()
		on := switchID.FindString(op.must(t, []string{"stop", "capability", "net.connect", "--reason", "it talks too much"}))
		if got := end(); !strings.Contains(got, "hello") || strings.Contains(got, "nothing came") {
			t.Errorf("the connection: %q, want one that was cut", got)
		}
		if got := b.run(connect(9000)).stdout; strings.Contains(got, "hello") {
			t.Errorf("a new one: %q", got)
		}
		recorded("egress.cut", "egress.denied", "it talks too much")
		op.must(t, []string{"resume", on})
		// The switch takes effect within moments. The sandbox retries until then.
		eventually(t, "it may connect again", func() bool {
			return strings.Contains(b.run(strings.Replace(connect(9000), "    c.settimeout(120)", "    raise SystemExit", 1)).stdout, "hello")
		})
	})
	t.Run("a person lets it through", func(t *testing.T) {
		changePolicy(t, op, op, "version: 1\nrules:\n  - {id: net, kind: net.connect, then: ask, reason: who is that}\n")
		waiting := func() string {
			t.Helper()
			id := ""
			eventually(t, "the connection waits for a person", func() bool {
				var list struct{ Actions []struct{ ID, Kind string } }
				if _, err := call(s.local(), "GET", "http://x/v1/actions?state=pending", "", nil, &list); err != nil {
					t.Fatal(err)
				}
				for _, a := range list.Actions {
					if a.Kind == "net.connect" {
						id = a.ID
					}
				}
				return id != ""
			})
			return id
		}
		// The rule takes effect within moments. Earlier connections are allowed.
		greet := strings.Replace(connect(9000), "    c.settimeout(120)", "    raise SystemExit", 1)
		for len(open) > 0 {
			<-open
		}
		var end func() string
		eventually(t, "the rule holds", func() bool {
			end = background(greet)
			for {
				select {
				case <-open:
					end()
					return false
				case <-time.After(100 * time.Millisecond):
				}
				if out, _ := op.run(t, "", "pending"); strings.Contains(out, "net.connect, pending") {
					return true
				}
			}
		})
		id := waiting()
		if len(open) > 0 {
			t.Fatal("it was connected before a person decided")
		}
		op.must(t, []string{"pending"}, id, outside+":9000", b.id)
		op.must(t, []string{"approve", id}, "approved", "may connect to")
		if got := end(); !strings.Contains(got, "hello") {
			t.Errorf("the connection that was held: %q", got)
		}
		if got := b.run(greet).stdout; !strings.Contains(got, "hello") {
			t.Errorf("the next one: %q", got)
		}
		end = background(connect(9001))
		op.must(t, []string{"reject", waiting(), "--reason", "not there"}, "rejected")
		if got := end(); !strings.Contains(got, "cut:") {
			t.Errorf("one that was refused: %q", got)
		}
		recorded("not there")
	})
	op.must(t, []string{"audit", "verify"}, "holds")
}

// TestOversightTwoServers: two servers on one PostgreSQL act as one. A switch, an
// approval and a policy at one hold at the other.
func TestOversightTwoServers(t *testing.T) {
	t.Parallel()
	dsn := database(t)
	out, addr := listen(t)
	ss := pair(t, dsn, "--route", "sink.test="+addr, "--log", "warn", "--pool-max", "0")
	one, other := ss[0](), ss[1]()
	first := shell{s: one}
	one.person("ann")
	first.join(t, "rita", "reviewer")
	second := shell{s: other}
	settle(t, one.data, dsn)
	ann, rita := first.as(t, "ann"), second.as(t, "rita")
	address, key := one.inbox("alice")
	here, there := first.with("POSTERN_INBOX_KEY="+key), second.with("POSTERN_INBOX_KEY="+key)
	const either, stopped, after = "n-100", "n-101", "n-102" // subjects that the sink reads
	got := func(subject string) int {
		out.mu.Lock()
		defer out.mu.Unlock()
		return out.got[subject]
	}

	// A policy is proposed and approved at one. The other server applies it.
	changePolicy(t, rita, ann, "version: 1\nrules:\n  - {id: two, kind: email.send, when: 'to.exists(a, a.under(\"sink.test\"))', then: ask, approvers: 2}\n")
	second.must(t, []string{"policy", "history"}, "person:rita", "person:ann")

	// Two people approve at once, each at one server.
	for i := range 5 {
		subject := fmt.Sprintf("n-%d", i)
		id, _ := []shell{here, there}[i%2].sends(t, "bob@sink.test", subject)
		var wg sync.WaitGroup
		var outs [2]string
		var status [2]int
		for n, who := range []shell{ann, rita} {
			wg.Go(func() { outs[n], status[n] = who.run(t, "", "approve", id) })
		}
		wg.Wait()
		if status != [2]int{} {
			t.Errorf("%s: %v: %q", subject, status, outs)
		}
		eventually(t, subject+" has left", func() bool { return got(subject) > 0 })
		eventually(t, "both know it", func() bool {
			for _, s := range []*server{one, other} {
				var a struct{ State string }
				if _, err := call(s.local(), "GET", "http://x/v1/actions/"+id, "", nil, &a); err != nil {
					t.Fatal(err)
				}
				if a.State != "done" {
					return false
				}
			}
			return true
		})
		if n := got(subject); n != 1 {
			t.Errorf("%s was delivered %d times", subject, n)
		}
		record := first.must(t, []string{"audit", "list", "--object", id, "--database", dsn}, "person:ann", "person:rita")
		if n := strings.Count(record, "action.execute"); n != 1 {
			t.Errorf("%s was executed %d times:\n%s", subject, n, record)
		}
	}

	// One approves and one rejects, at once: one of them gets an error, and the
	// action has one outcome.
	id, _ := here.sends(t, "bob@sink.test", either)
	rita.must(t, []string{"approve", id}, "it still needs")
	var wg sync.WaitGroup
	var status [2]int
	wg.Go(func() { _, status[0] = ann.run(t, "", "approve", id) })
	wg.Go(func() { _, status[1] = second.run(t, "", "reject", id, "--reason", "no") })
	wg.Wait()
	if (status[0] == 0) == (status[1] == 0) {
		t.Errorf("an approval and a rejection end with %v: want that one of them holds", status)
	}
	if status[0] == 0 {
		eventually(t, "it has left", func() bool { return got(either) == 1 })
	} else if n := got(either); n != 0 {
		t.Errorf("rejected, and delivered %d times", n)
	}

	// A switch that is turned on at one stops what the other would deliver: it is
	// approved at both, and waits for its undo time.
	id, _ = there.sends(t, "bob@sink.test", stopped, "--undo", "120")
	ann.must(t, []string{"approve", id}, "it still needs")
	rita.must(t, []string{"approve", id}, "approved")
	on := switchID.FindString(first.must(t, []string{"stop", "inbox", address, "--reason", "we look into it"}, "1 actions had been approved"))
	second.must(t, []string{"stop"}, on, address, "we look into it")
	second.must(t, []string{"inbox", "mode", address}, "read_only")
	there.refused(t, []string{"send", "--to", "bob@sink.test", "--subject", "later"}, "read_only")
	var a struct{ State, Reason string }
	if _, err := call(other.local(), "GET", "http://x/v1/actions/"+id, "", nil, &a); err != nil || a.State != "denied" || !strings.Contains(a.Reason, "we look into it") {
		t.Errorf("what was stopped is %+v, %v", a, err)
	}
	ann.must(t, []string{"resume", on})
	second.must(t, []string{"stop"}, "No kill switch is on.")
	second.must(t, []string{"inbox", "mode", address, "gated_send", "--reason", "it is over"})
	last, _ := here.sends(t, "bob@sink.test", after)
	rita.must(t, []string{"approve", last})
	ann.must(t, []string{"approve", last})
	eventually(t, "what was sent after it has left", func() bool { return got(after) == 1 })
	if n := got(stopped); n != 0 {
		t.Errorf("what was stopped was delivered %d times", n)
	}
	if status, err := call(other.local(), http.MethodGet, "http://x/v1/actions/"+id, "", nil, &a); err != nil || status != http.StatusOK || a.State != "denied" {
		t.Errorf("afterwards it is %+v: %d, %v", a, status, err)
	}
	// A session that ends at one server has ended at the other.
	rita.must(t, []string{"logout"}, "Signed out.")
	first.with(rita.env...).refused(t, []string{"pending"}, "sign in again")
	first.must(t, []string{"audit", "verify", "--database", dsn}, "holds")
	second.must(t, []string{"audit", "verify", "--database", dsn}, "holds")
}
