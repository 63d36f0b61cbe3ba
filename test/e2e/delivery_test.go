package e2e

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/emersion/go-msgauth/dkim"

	"postern/internal/mailauth/dnstest"
	"postern/internal/smtpclient/postfixtest"
)

// TestDirectMail delivers approved mail, signed, to the Postfix that DNS names. An
// unknown recipient bounces and is suppressed. Anybody can verify what arrived.
func TestDirectMail(t *testing.T) {
	t.Parallel()
	addr, maildir := postfixtest.Start(t)
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	dns := dnstest.Start(t, postfixtest.Domain+". MX 10 mx."+postfixtest.Domain+".", "mx."+postfixtest.Domain+". A 127.0.0.1", "null.example. MX 0 .")
	s := start(t, t.TempDir(), "--deliver", "mx", "--mx-port", port, "--mx-private", "--resolver", dns.Addr, "--cold", "--pool-max", "0")
	from, key := s.inbox("analyst")
	send := func(to ...string) string {
		t.Helper()
		var a struct{ ID string }
		status, err := call(client, "POST", "http://"+s.web+"/v1/inboxes/"+from+"/messages", key, map[string]any{"to": to, "subject": "For " + to[0], "text": "hello\n.\n"}, &a)
		if err != nil || status != http.StatusAccepted {
			t.Fatalf("propose: %d, %v", status, err)
		}
		s.mustCLI("approve", a.ID)
		return a.ID
	}
	states := func(id string) (out []string) {
		t.Helper()
		var v struct {
			Deliveries []struct{ Recipient, State string }
		}
		for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
			if _, err := call(client, "GET", "http://"+s.web+"/v1/actions/"+id+"/deliveries", key, nil, &v); err != nil {
				t.Fatal(err)
			}
			out = nil
			waits := len(v.Deliveries) == 0
			for _, d := range v.Deliveries {
				out = append(out, d.Recipient+" "+d.State)
				waits = waits || d.State == "queued" || d.State == "sending"
			}
			if !waits || time.Now().After(deadline) {
				return out
			}
		}
	}
	first := send("b@"+postfixtest.Domain, "nobody@"+postfixtest.Domain, "x@null.example", "x@nowhere.example")
	want := "b@y.example delivered, nobody@y.example bounced, x@null.example bounced, x@nowhere.example bounced"
	if got := strings.Join(states(first), ", "); got != want {
		t.Errorf("deliveries: %s, want %s", got, want)
	}
	again := send("nobody@" + postfixtest.Domain)
	if got := strings.Join(states(again), ", "); got != "nobody@y.example suppressed" {
		t.Errorf("the second time: %s", got)
	}
	if out := s.mustCLI("suppression", "find", "nobody@"+postfixtest.Domain); !strings.Contains(out, "bounced") {
		t.Errorf("suppression find says: %s", out)
	}
	var inbox struct {
		Messages []struct{ From, Subject string }
	}
	// They are added after the deliveries are recorded.
	eventually(t, "a bounce in the inbox for each message", func() bool {
		if _, err := call(client, "GET", "http://"+s.web+"/v1/inboxes/"+from+"/messages", key, nil, &inbox); err != nil {
			t.Fatal(err)
		}
		bounces := 0
		for _, m := range inbox.Messages {
			if strings.Contains(m.From, "mailer-daemon@") {
				bounces++
			}
		}
		if bounces > 2 {
			t.Fatalf("%d bounces in the inbox, want one for each message: %+v", bounces, inbox.Messages)
		}
		return bounces == 2
	})

	// What Postfix kept: both DKIM signatures hold by the records that the
	// server says to publish, and the statement by the keys that it publishes.
	var kept []string
	for deadline := time.Now().Add(2 * time.Minute); len(kept) == 0 && time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		kept, _ = filepath.Glob(filepath.Join(maildir, "b", "new", "*"))
	}
	if len(kept) != 1 {
		t.Fatalf("b got %d messages, want 1", len(kept))
	}
	raw, err := os.ReadFile(kept[0])
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.SplitSeq(s.mustCLI("dkim", "list"), "\n") {
		if name, text, ok := strings.Cut(strings.TrimSpace(line), ". TXT "); ok {
			dns.TXT(name, strings.Trim(text, `"`))
		}
	}
	vs, err := dkim.VerifyWithOptions(bytes.NewReader(bytes.ReplaceAll(raw, []byte("\n"), []byte("\r\n"))), &dkim.VerifyOptions{
		LookupTXT: func(name string) ([]string, error) { return dns.Resolver().LookupTXT(context.Background(), name) },
	})
	if err != nil || len(vs) != 2 || vs[0].Err != nil || vs[1].Err != nil {
		t.Errorf("DKIM: %+v, %v", vs, err)
	}
	if out := s.mustCLI("dkim", "check"); strings.Count(out, "published") < 2 {
		t.Errorf("dkim check says: %s", out)
	}
	resp, err := client.Get("http://" + s.web + "/.well-known/postern-keys.json")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	doc, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	keys := filepath.Join(t.TempDir(), "keys.json")
	if err := os.WriteFile(keys, doc, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(s.bin, "verify-message", kept[0], "--keys", keys, "--recipient", "b@"+postfixtest.Domain).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "a person, who saw it") || !strings.Contains(string(out), from) {
		t.Errorf("verify-message says: %s, %v", out, err)
	}
}
