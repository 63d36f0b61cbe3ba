package imapmail

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/emersion/go-imap/v2"

	"postern/internal/connector"
)

// serve answers IMAP commands by their names, as a hostile server does. An answer is
// what precedes the final OK; one that ends in "!" replaces it.
func serve(t *testing.T, answers map[string]string) (*Opener, connector.Settings) {
	t.Helper()
	// Borrowed for its certificate and the authority of that.
	web := httptest.NewUnstartedServer(nil)
	web.StartTLS()
	t.Cleanup(web.Close)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: web.TLS.Certificates, MinVersion: tls.VersionTLS12})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go converse(c, answers)
		}
	}()
	o, err := New(Config{Hostname: "postern.test", Dial: (&net.Dialer{}).DialContext, Roots: web.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs})
	if err != nil {
		t.Fatal(err)
	}
	return o, connector.Settings{Kind: Kind, Address: "b@y.example", Credential: "correct horse", Public: map[string]string{IMAP: l.Addr().String(), SMTP: "127.0.0.1:9", User: "b@y.example"}}
}

func converse(c net.Conn, answers map[string]string) {
	defer c.Close()
	usual := map[string]string{
		"CAPABILITY": "* CAPABILITY IMAP4rev1 IDLE UIDPLUS MOVE CONDSTORE\r\n",
		"LIST":       "* LIST () \"/\" INBOX\r\n",
		"STATUS":     "* STATUS INBOX (MESSAGES 1 UIDNEXT 2 UIDVALIDITY 7 HIGHESTMODSEQ 3)\r\n",
		"SELECT":     "* 1 EXISTS\r\n* OK [UIDVALIDITY 7] ok\r\n* OK [UIDNEXT 2] ok\r\n* OK [PERMANENTFLAGS (\\Seen \\*)] ok\r\n",
		"SEARCH":     "* SEARCH 1\r\n",
		"FETCH":      "* 1 FETCH (UID 1 FLAGS () INTERNALDATE \"23-Nov-2026 10:00:00 +0000\" BODY[]<0> {5}\r\nhello)\r\n",
	}
	greeting := "* OK [CAPABILITY IMAP4rev1 IDLE UIDPLUS MOVE CONDSTORE] hello\r\n"
	if a, ok := answers["GREETING"]; ok {
		greeting = a
	}
	write := func(s string) error {
		if rest, endless := strings.CutPrefix(s, "ENDLESS "); endless {
			head, tail, _ := strings.Cut(rest, "|")
			if _, err := io.WriteString(c, head); err != nil {
				return err
			}
			for block := strings.Repeat(tail, 64<<10/len(tail)+1); ; {
				if _, err := io.WriteString(c, block); err != nil {
					return err
				}
			}
		}
		_, err := io.WriteString(c, s)
		return err
	}
	if write(greeting) != nil {
		return
	}
	for lines := bufio.NewScanner(c); lines.Scan(); {
		words := strings.Fields(lines.Text())
		if len(words) < 2 {
			continue
		}
		tag, name := words[0], strings.ToUpper(words[1])
		if name == "UID" && len(words) > 2 {
			name = strings.ToUpper(words[2])
		}
		a, ok := answers[name]
		if !ok {
			a = usual[name]
		}
		if final, replaced := strings.CutSuffix(a, "!"); replaced {
			if write(fmt.Sprintf(final, tag)) != nil {
				return
			}
			continue
		}
		if write(a) != nil || write(tag+" OK done\r\n") != nil {
			return
		}
	}
}

// TestHostileServers: whatever a server answers, the client ends, uses little memory,
// and says nothing of the credential.
func TestHostileServers(t *testing.T) { //nolint:tparallel // each would count the memory of the others
	t.Parallel()
	for _, tt := range []struct {
		name    string
		answers map[string]string
		want    string // in the error of Changes or Fetch
	}{
		{"an endless greeting", map[string]string{"GREETING": "ENDLESS * OK |x"}, ""},
		{"endless folders", map[string]string{"LIST": "ENDLESS |* LIST () \"/\" a\r\n"}, "folders"},
		{"a folder with an endless name", map[string]string{"LIST": "ENDLESS * LIST () \"/\" \"|x"}, ""},
		{"a range of all numbers", map[string]string{"STATUS": "* STATUS INBOX (MESSAGES 1 UIDNEXT 4294967295 UIDVALIDITY 7 HIGHESTMODSEQ 3)\r\n", "SEARCH": "* ESEARCH (TAG \"T9\") UID ALL 1:4294967294\r\n* SEARCH 1:4294967294\r\n"}, ""},
		{"endless numbers", map[string]string{"SEARCH": "ENDLESS * SEARCH| 1"}, ""},
		{"endless messages", map[string]string{"FETCH": "ENDLESS |* 1 FETCH (UID 1 FLAGS ())\r\n"}, ""},
		{"endless flags", map[string]string{"FETCH": "ENDLESS * 1 FETCH (UID 1 FLAGS (|a "}, ""},
		{"a literal of four gigabytes", map[string]string{"FETCH": "ENDLESS * 1 FETCH (UID 1 FLAGS () INTERNALDATE \"23-Nov-2026 10:00:00 +0000\" BODY[]<0> {4294967295}\r\n|x"}, ""},
		{"endlessly nested lists", map[string]string{"FETCH": "ENDLESS * 1 FETCH (UID 1 BODYSTRUCTURE |("}, ""},
		{"a message without octets", map[string]string{"FETCH": "* 1 FETCH (UID 1 FLAGS () INTERNALDATE \"23-Nov-2026 10:00:00 +0000\" BODY[]<0> NIL)\r\n"}, connector.ErrGone.Error()},
		{"another answer than asked for", map[string]string{"STATUS": "* STATUS OTHER (MESSAGES 1)\r\n"}, ""},
		{"a state without numbers", map[string]string{"STATUS": "* STATUS INBOX (MESSAGES 1)\r\n"}, "does not say"},
		{"endless unsolicited data", map[string]string{"STATUS": "ENDLESS |* 1 EXISTS\r\n"}, ""},
		{"the password in a refusal", map[string]string{"LIST": "%s NO [ALERT] your password is correct horse\r\n!"}, "withheld"},
		{"a refused sign-in that repeats the password", map[string]string{"LOGIN": "%s NO correct horse\r\n!"}, connector.ErrSignIn.Error()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o, set := serve(t, tt.answers)
			p, err := o.Open(t.Context(), set, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			id := ""
			_, err = p.Changes(t.Context(), "", connector.Bounds{Most: 10}, func(c connector.Change) error { id = c.ID; return nil })
			if err == nil && id != "" {
				_, err = p.Fetch(t.Context(), id)
			}
			runtime.ReadMemStats(&after)
			if err == nil && tt.want != "" || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
			if err != nil && (strings.Contains(err.Error(), "correct horse") || len(err.Error()) > 1000) {
				t.Errorf("the error has the password or is too long: %.2000v", err)
			}
			if grown := after.TotalAlloc - before.TotalAlloc; grown > 1<<30 {
				t.Errorf("it allocated %d MB", grown>>20)
			}
		})
	}
}

// TestWaitEnds: a server that does not answer IDLE or its end delays a shutdown only
// briefly.
func TestWaitEnds(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]string{"start": "%.0s!", "end": "+ idling\r\n%.0s!"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, set := serve(t, map[string]string{"IDLE": answer})
			p, err := o.Open(t.Context(), set, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			if _, err := p.Changes(t.Context(), "", connector.Bounds{Most: 10}, func(connector.Change) error { return nil }); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_ = p.Wait(ctx, "") // an error, or none: only that it ends matters
			}()
			time.AfterFunc(500*time.Millisecond, cancel)
			select {
			case <-ended:
			case <-time.After(commandTime / 2):
				t.Error("it still waits for the server")
			}
		})
	}
}

// TestCertificatesAreVerified: a server with the certificate of another name, or of
// nobody's authority, gets no password.
func TestCertificatesAreVerified(t *testing.T) {
	t.Parallel()
	o, set := serve(t, nil)
	o.conf.Roots = nil
	p, err := o.Open(t.Context(), set, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := p.Changes(t.Context(), "", connector.Bounds{}, nil); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("got %v, want an error about the certificate", err)
	}
}

func FuzzCursor(f *testing.F) {
	f.Add(`[{"n":"INBOX","v":7,"x":9,"m":3,"c":2,"u":"1:3,8"}]`)
	f.Add(`[{"n":"a","u":"1:4294967295"}]`)
	f.Add(`{}`)
	f.Fuzz(func(t *testing.T, s string) {
		marks, err := parseCursor(s)
		if err != nil {
			if !errors.Is(err, connector.ErrCursor) {
				t.Errorf("got %v", err)
			}
			return
		}
		for _, m := range marks {
			uids, err := parseUIDs(m.UIDs)
			if err != nil {
				t.Fatal(err)
			}
			if again, err := parseUIDs(formatUIDs(uids)); err != nil || len(again) != len(uids) {
				t.Errorf("%q: got %d UIDs, want %d: %v", m.UIDs, len(again), len(uids), err)
			}
		}
	})
}

func TestUIDSets(t *testing.T) {
	t.Parallel()
	uids := []imap.UID{1, 2, 3, 8, 10, 11}
	if got := formatUIDs(uids); got != "1:3,8,10:11" {
		t.Errorf("got %q", got)
	}
	for _, s := range []string{"0", "2:1", "1:4294967295", "x", "1,,2", "-1", "1:600002"} {
		if _, err := parseUIDs(s); err == nil {
			t.Errorf("%q is taken", s)
		}
	}
}
