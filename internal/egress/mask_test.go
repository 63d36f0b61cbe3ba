package egress

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/inspect"
	"postern/internal/outgoing"
	"postern/internal/policy"
)

// nameValue is a value that can be the name of a field.
const nameValue = "ToK-AbCdEfGh_12"

// A guardedVault has one secret for example.com. Only the sandbox i1 has it. The host can
// have been told a former value of it as well.
type guardedVault struct {
	hosts []string
	fails bool
}

const formerValue = "former-value-0123456789"

func (v guardedVault) Bound(_ context.Context, who auth.Principal, _ *policy.Egress) ([]inject.Secret, error) {
	if who.ID != "i1" {
		return nil, nil
	}
	return []inject.Secret{{ID: "sec_1", Name: "github", Sentinel: sentinel, Hosts: v.hosts, Kind: inject.KindValue}}, nil
}

func (guardedVault) Open(context.Context, auth.Principal, string) (inject.Value, error) {
	return inject.Value{Value: []byte(nameValue)}, nil
}

func (v guardedVault) Guarded(context.Context, auth.Principal) ([]inject.Guarded, error) {
	return []inject.Guarded{{ID: "sec_1", Name: "github", Hosts: v.hosts}, {ID: "sec_1", Name: "github", Hosts: v.hosts, Former: 1}, {ID: "sec_2", Name: "gone", Hosts: v.hosts}}, nil
}

func (v guardedVault) OpenGuarded(_ context.Context, _ auth.Principal, g inject.Guarded) (inject.Value, error) {
	switch {
	case v.fails:
		return inject.Value{}, errors.New("it is locked")
	case g.ID == "sec_2":
		return inject.Value{}, inject.ErrGone
	case g.Former > 0:
		return inject.Value{Value: []byte(formerValue)}, nil
	}
	return inject.Value{Value: []byte(nameValue)}, nil
}

// raw is a server outside that answers each request with text.
func raw(t *testing.T, secrets inspect.Secrets, text *string) *inspectedWorld {
	w := newInspected(t, inspect.Config{Secrets: secrets}, func(rw http.ResponseWriter, _ *http.Request) {
		c, _, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, *text)
	}, nil)
	w.outside.TLS.NextProtos = []string{"http/1.1"}
	return w
}

// folded is s as programs compare the names of fields.
func folded(s string) string { return strings.ReplaceAll(strings.ToLower(s), "_", "-") }

// TestNoPartOfAnAnswerHasTheValue: the server says the value as a name, as it is and as Go
// writes it, and in the reason phrase, in every part of an answer that has fields.
func TestNoPartOfAnAnswerHasTheValue(t *testing.T) {
	var text string
	w := raw(t, guardedVault{hosts: []string{"example.com"}}, &text)
	b := w.box("i1", ruled(map[string]string{"Authorization": "Bearer ${e2b.secrets.github}"}))
	ask := func(t *testing.T, upgrade bool) string {
		c, err := w.tls(b, "example.com", "http/1.1")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		more := "Connection: close\r\n"
		if upgrade {
			more = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
		}
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: example.com\r\nTE: trailers\r\n"+more+"\r\n")
		got, _ := io.ReadAll(bufio.NewReader(c))
		return string(got)
	}
	for _, value := range []string{nameValue, http.CanonicalHeaderKey(nameValue), "X-" + strings.ToLower(nameValue)} {
		for name, answer := range map[string]string{
			"reason":                  "HTTP/1.1 200 " + value + "\r\nContent-Length: 2\r\n\r\nok",
			"reason of an error":      "HTTP/1.1 499 " + value + "\r\nContent-Length: 2\r\n\r\nok",
			"reason of a redirect":    "HTTP/1.1 302 " + value + "\r\nLocation: /\r\nContent-Length: 2\r\n\r\nok",
			"header":                  "HTTP/1.1 200 OK\r\n" + value + ": 1\r\nContent-Length: 2\r\n\r\nok",
			"interim answer":          "HTTP/1.1 103 Early Hints\r\n" + value + ": 1\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
			"reason of interim":       "HTTP/1.1 103 " + value + "\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
			"trailer":                 "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n" + value + ": 1\r\n\r\n",
			"announced trailer":       "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: " + value + "\r\n\r\n2\r\nok\r\n0\r\n" + value + ": 1\r\n\r\n",
			"announced, not sent":     "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum, " + value + "\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n",
			"value of a trailer":      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n2\r\nok\r\n0\r\nX-Sum: " + value + "\r\n\r\n",
			"list of names":           "HTTP/1.1 200 OK\r\nAccess-Control-Expose-Headers: A, " + value + "\r\nVary: " + value + "\r\nContent-Length: 2\r\n\r\nok",
			"names in a body":         "HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\nok" + (`{"headers": {"` + value + `": "1"}}` + strings.Repeat(" ", 58))[:58],
			"chunk extension":         "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;" + value + "=1\r\nok\r\n0;x=" + value + "\r\n\r\n",
			"websocket: name":         "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + value + ": 1\r\n\r\nok",
			"websocket: reason":       "HTTP/1.1 101 " + value + "\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nok",
			"websocket: value, bytes": "HTTP/1.1 101 x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Protocol: " + value + "\r\n\r\nok " + value + "\n",
			"websocket: trailer":      "HTTP/1.1 101 x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nTrailer: " + value + "\r\n\r\nok",
		} {
			t.Run(name+"/"+value, func(t *testing.T) {
				text = answer
				got := ask(t, strings.HasPrefix(name, "websocket"))
				if !strings.Contains(got, "ok") || strings.Contains(folded(got), folded(nameValue)) {
					t.Errorf("got %q", got)
				}
			})
		}
	}
}

// TestNoValueIsInTheLog is a server that has the library complain about it, in words that
// repeat what the server sent, while the log has every detail.
func TestNoValueIsInTheLog(t *testing.T) {
	var text string
	w := raw(t, guardedVault{hosts: []string{"example.com"}}, &text)
	b := w.box("i1", ruled(map[string]string{"Authorization": "Bearer ${e2b.secrets.github}"}))
	for _, answer := range []string{
		nameValue, "HTTP/1.1 " + nameValue + "\r\n\r\n", "HTTP/" + nameValue + " 200 OK\r\n\r\n", "HTTP/1.1 20x" + nameValue + " OK\r\n\r\n",
		"HTTP/1.1 200 OK\r\n" + nameValue + "\r\n\r\n", "HTTP/1.1 200 OK\r\nBad Name " + nameValue + ": 1\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: " + nameValue + "\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: " + nameValue + "\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: " + nameValue + ", Content-Length\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + nameValue + "\r\nok\r\n0\r\n\r\n",
		"HTTP/1.1 103 x\r\n" + nameValue + "\r\n\r\n", "HTTP/1.1 101 " + nameValue + "\r\nUpgrade: " + nameValue + "\r\nConnection: Upgrade\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Encoding: " + nameValue + "\r\n\r\nx",
	} {
		text = answer
		req, _ := http.NewRequestWithContext(t.Context(), "GET", "https://example.com/", nil)
		if resp, err := w.client(b, false).Do(req); err == nil {
			got, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if strings.Contains(folded(string(got)), folded(nameValue)) {
				t.Errorf("%q: got %s", answer, got)
			}
		}
	}
	// A certificate for another name, which is the value.
	w.at(site+":8443", func(c net.Conn) {
		tls.Server(c, &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return w.authority.Leaf("i9", "tok-abcdefgh-12.example")
		}}).Handshake()
	})
	do(t, w.client(b, false), "GET", "https://example.com:8443/", "")
	if log := w.log.String(); !strings.Contains(log, "request failed") || strings.Contains(folded(log), folded(nameValue)) {
		t.Errorf("the log is %s", log)
	}
	for _, e := range w.record() {
		if strings.Contains(folded(e.Reason), folded(nameValue)) {
			t.Errorf("the record has %+v", e)
		}
	}
}

// TestOtherSandboxesOfTheProjectAreMasked: one sandbox has the server store the value, and
// another of the project, which has no secret and no rule, reads it.
func TestOtherSandboxesOfTheProjectAreMasked(t *testing.T) {
	var stored string
	handler := func(rw http.ResponseWriter, r *http.Request) {
		if r.Method == "POST" {
			stored = r.Header.Get("Authorization")
			return
		}
		if r.Header.Get("Range") != "" || r.Header.Get("Accept-Encoding") != "identity" {
			http.Error(rw, "a part, or compressed", 400)
		}
		io.WriteString(rw, stored+", before "+formerValue)
	}
	for _, hosts := range [][]string{{"example.com"}, {"*.com"}} {
		w := newInspected(t, inspect.Config{Secrets: guardedVault{hosts: hosts}}, handler, nil)
		first := w.client(w.box("i1", ruled(map[string]string{"Authorization": "Bearer ${e2b.secrets.github}"})), false)
		if resp, _ := do(t, first, "POST", "https://example.com/", ""); resp.StatusCode != 200 || stored != "Bearer "+nameValue {
			t.Fatalf("got %d, the server has %q", resp.StatusCode, stored)
		}
		second := w.box("i2", policy.Egress{Internet: true})
		versions(t, func(t *testing.T, h2 bool) {
			c := w.client(second, h2)
			resp, answer := do(t, c, "GET", "https://example.com/", "", "Range", "bytes=0-9", "Accept-Encoding", "gzip")
			if resp.StatusCode != 200 || !strings.HasPrefix(answer, "Bearer *") || strings.Contains(answer, nameValue) || strings.Contains(answer, formerValue) {
				t.Errorf("got %d %q", resp.StatusCode, answer)
			}
		})
		if hosts[0] == "example.com" { // another host of the address keeps its certificate
			c := tls.Client(w.box("i3", policy.Egress{Internet: true}).mustDial(site+":443"), &tls.Config{RootCAs: w.outside.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs, ServerName: "www.example.com"})
			if err := c.Handshake(); err != nil {
				t.Errorf("a host of no secret is inspected: %v", err)
			}
		}
	}
	w := newInspected(t, inspect.Config{Secrets: guardedVault{hosts: []string{"example.com"}, fails: true}}, handler, nil)
	if resp, answer := do(t, w.client(w.box("i2", policy.Egress{Internet: true}), false), "GET", "https://example.com/", ""); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("got %d %q although the values cannot be read", resp.StatusCode, answer)
	}
}

// TestWhatIsApprovedAtAGuardedHostIsWhatLeaves: the answer must be plain and whole, so the
// request asks for that before a person sees it.
func TestWhatIsApprovedAtAGuardedHostIsWhatLeaves(t *testing.T) {
	fields := func(h http.Header) string {
		return fmt.Sprintf("%q %q", h.Values("Accept-Encoding"), h.Values("Range"))
	}
	var seen, arrived string
	ask := policy.Verdict{Effect: policy.Ask}
	j := &judge{all: true, decide: func(*outgoing.Request) policy.Verdict { return ask }, hold: func(r *outgoing.Request) policy.Verdict {
		seen = fields(r.Header)
		return policy.Verdict{Effect: policy.Allow}
	}}
	w := newInspected(t, inspect.Config{Judge: j, Secrets: guardedVault{hosts: []string{"example.com"}}}, func(_ http.ResponseWriter, r *http.Request) {
		arrived = fields(r.Header)
	}, nil)
	c := w.client(w.box("i2", policy.Egress{Internet: true}), false)
	resp, answer := do(t, c, "GET", "https://example.com/", "", "Range", "bytes=0-9", "Accept-Encoding", "gzip")
	if resp.StatusCode != 200 || seen != arrived || seen != `["identity"] []` {
		t.Errorf("got %d %q; a person saw %s, and %s arrived", resp.StatusCode, answer, seen, arrived)
	}
}

// TestASecretMadeWhileAPersonDecidesIsMasked: another sandbox stores its value at the
// server meanwhile.
func TestASecretMadeWhileAPersonDecidesIsMasked(t *testing.T) {
	v := &guardedVault{}
	ask := policy.Verdict{Effect: policy.Ask}
	j := &judge{all: true, decide: func(*outgoing.Request) policy.Verdict { return ask }, hold: func(*outgoing.Request) policy.Verdict {
		v.hosts = []string{"example.com"}
		return policy.Verdict{Effect: policy.Allow}
	}}
	w := newInspected(t, inspect.Config{Judge: j, Secrets: v}, func(rw http.ResponseWriter, r *http.Request) {
		io.WriteString(rw, "stored "+nameValue+" "+r.Header.Get("Range"))
	}, nil)
	c := w.client(w.box("i2", policy.Egress{Internet: true}), false)
	resp, answer := do(t, c, "GET", "https://example.com/", "", "Range", "bytes=0-9")
	if resp.StatusCode != 200 || !strings.HasPrefix(answer, "stored *") || strings.Contains(answer, nameValue) || strings.Contains(answer, "bytes=") {
		t.Errorf("got %d %q", resp.StatusCode, answer)
	}
}

// A logged holds a log. It is safe for concurrent use.
type logged struct {
	mu sync.Mutex
	b  strings.Builder
}

// Write implements [io.Writer].
func (b *logged) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

// String returns what was written.
func (b *logged) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
