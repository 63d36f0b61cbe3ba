package egress

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"postern/internal/auth"
	"postern/internal/inspect"
	"postern/internal/outgoing"
	"postern/internal/policy"
)

// The heads of the PROXY protocol, in which a connection to a server begins that stands
// behind another one.
const (
	proxyV1      = "PROXY TCP4 192.0.2.1 192.0.2.2 4000 8443\r\n"
	proxyUnknown = "PROXY UNKNOWN\r\n"
	proxyV2      = "\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c\xc0\x00\x02\x01\xc0\x00\x02\x02\x0f\xa0\x20\xfb"
	proxyLocal   = "\r\n\r\n\x00\r\nQUIT\n\x20\x00\x00\x00"
)

// hello returns a ClientHello for name, which may be empty, in records of at most size
// bytes.
func hello(name string, size int, ech []byte) string {
	ours, theirs := net.Pipe()
	conf := &tls.Config{ServerName: name, InsecureSkipVerify: true, EncryptedClientHelloConfigList: ech}
	if ech != nil {
		conf.MinVersion = tls.VersionTLS13
	}
	go func() { _ = tls.Client(ours, conf).Handshake() }()
	defer ours.Close()
	head := make([]byte, 5)
	io.ReadFull(theirs, head)
	body := make([]byte, int(head[3])<<8|int(head[4]))
	io.ReadFull(theirs, body)
	var out []byte
	for len(body) > 0 {
		n := min(size, len(body))
		out = append(out, 0x16, 3, 1, byte(n>>8), byte(n))
		out, body = append(out, body[:n]...), body[n:]
	}
	return string(out)
}

// falseNames are the first bytes of connections that do not prove that they are for a
// host that is not inspected, by what they are.
func falseNames(t *testing.T) map[string]string {
	const whole = 1 << 14
	true1, true2 := hello("example.com", whole, nil), "DELETE / HTTP/1.1\r\nHost: example.com\r\n\r\n"
	return map[string]string{
		"TLS for a name on no list":               hello("x.test", whole, nil),
		"TLS for it, in small records":            hello("x.test", 7, nil),
		"TLS for a name that has no address":      hello("none.allowed.test", whole, nil),
		"TLS without a name":                      hello("", whole, nil),
		"TLS that hides its name":                 hello("shared.test", whole, echConfig(t)),
		"TLS for a name that is an address":       strings.ReplaceAll(hello("aa-aaa-aaa-aa", whole, nil), "aa-aaa-aaa-aa", "93.184.216.34"),
		"a malformed ClientHello":                 "\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",
		"a ServerHello":                           "\x16\x03\x03\x00\x04\x02\x00\x00\x00",
		"a TLS alert":                             "\x15\x03\x03\x00\x02\x01\x00" + true1,
		"TLS data before the ClientHello":         "\x17\x03\x03\x00\x01x" + true1,
		"a ClientHello of SSL 2":                  "\x80\x2e\x01\x03\x01\x00\x15\x00\x00\x00\x10" + strings.Repeat("x", 0x25),
		"HTTP for a name on no list":              "DELETE / HTTP/1.1\r\nHost: x.test\r\n\r\n",
		"HTTP for a name without an address":      "GET / HTTP/1.1\r\nHost: none.allowed.test\r\n\r\n",
		"HTTP for the address":                    "GET / HTTP/1.1\r\nHost: 93.184.216.34:9000\r\n\r\n",
		"HTTP for two hosts":                      "GET / HTTP/1.1\r\nHost: shared.test\r\nHost: example.com\r\n\r\n",
		"HTTP with another target":                "GET http://example.com/ HTTP/1.1\r\nHost: shared.test\r\n\r\n",
		"HTTP with a user in its host":            "GET / HTTP/1.1\r\nHost: shared.test@example.com\r\n\r\n",
		"HTTP without a host":                     "GET / HTTP/1.0\r\n\r\n",
		"HTTP of one line":                        "GET /\r\n",
		"HTTP in lower case":                      "get / http/1.1\r\nhost: example.com\r\n\r\n",
		"HTTP with bare line ends":                "GET / HTTP/1.1\nHost: example.com\n\n",
		"HTTP after empty lines":                  "\r\n\r\n" + true2,
		"HTTP after zeros":                        "\x00\x00" + true2,
		"HTTP with a method of nobody":            "FOO\t/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
		"WebSocket for a name on no list":         "GET / HTTP/1.1\r\nHost: x.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
		"HTTP/2 without TLS":                      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x0e\x01\x05\x00\x00\x00\x01\x82\x87\x84\x41\x09shared.te",
		"HTTP CONNECT":                            "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n",
		"HTTP CONNECT for another host":           "CONNECT shared.test:443 HTTP/1.1\r\nHost: shared.test:443\r\n\r\n",
		"SOCKS 4":                                 "\x04\x01\x20\xfb\x5d\xb8\xd8\x22\x00" + true1,
		"SOCKS 5":                                 "\x05\x01\x00" + "\x05\x01\x00\x01\x5d\xb8\xd8\x22\x20\xfb" + true1,
		"PROXY, version 1, before TLS":            proxyV1 + true1,
		"PROXY, version 1, before HTTP":           proxyV1 + true2,
		"PROXY, version 1, of nobody before TLS":  proxyUnknown + true1,
		"PROXY, version 1, of nobody before HTTP": proxyUnknown + true2,
		"PROXY, version 2, before TLS":            proxyV2 + true1,
		"PROXY, version 2, before HTTP":           proxyV2 + true2,
		"PROXY, version 2, local, before TLS":     proxyLocal + true1,
		"SSH":                                     "SSH-2.0-x\r\n",
		"SSH before HTTP":                         "SSH-2.0-x\r\n" + true2,
		"a word":                                  "PING\r\n",
		"an unknown request":                      "FOO bar\r\nBAZ\r\n\r\n",
		"PostgreSQL":                              "\x00\x00\x00\x08\x04\xd2\x16\x2f",
		"Redis":                                   "*2\r\n$3\r\nGET\r\n$6\r\nsecret\r\n",
		"zeros":                                   strings.Repeat("\x00", 100),
		"one byte":                                "x",
		"nothing":                                 "",
	}
}

// secretOf is a sandbox with a secret for example.com and what e opens.
func secretOf(e policy.Egress) policy.Egress {
	e.Secrets = []string{"github"}
	return e
}

// openings are the ways in which a list opens the ports 8443 and 9000 of example.com
// without its address.
func openings() map[string]policy.Egress {
	return map[string]policy.Egress{
		"by name":           {AllowOut: []string{"example.com:8443", "example.com:9000", "shared.test:8443", "shared.test:9000", "*.allowed.test:8443", "*.allowed.test:9000", "public.test:8443", "public.test:9000"}},
		"by a wildcard":     {AllowOut: []string{"*.com:8443", "*.com:9000", "*.test:8443", "*.test:9000"}, DenyOut: []string{"0.0.0.0/0"}},
		"the Internet":      {Internet: true},
		"all addresses":     {AllowOut: []string{"0.0.0.0/0"}},
		"both halves of it": {AllowOut: []string{"0.0.0.0/1", "128.0.0.0/1", "64.0.0.0/2", "example.com", "shared.test", "*.allowed.test", "public.test"}},
	}
}

// newFalseNames returns a world in which example.com is inspected and shares its address
// with shared.test.
func newFalseNames(t *testing.T, cfg inspect.Config, change func(*Config)) *inspectedWorld {
	t.Helper()
	cfg.Secrets = vault{hosts: []string{"example.com"}}
	w := newInspected(t, cfg, func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, secretValue) }, change)
	w.standsFor(site+":8443", w.outside.Listener)
	w.web(site + ":9000")
	w.says("shared.test", site)
	w.says("public.test", site) // of echConfig
	return w
}

// talk sends bytes on a connection inside, ends its side and returns the answer.
func talk(b *box, to, bytes string) string {
	c, err := b.dial(to)
	if err != nil {
		return ""
	}
	defer c.Close()
	_, _ = io.WriteString(c, bytes)
	_ = c.(interface{ CloseWrite() error }).CloseWrite()
	answer, _ := io.ReadAll(c)
	return string(answer)
}

// TestAFalseNameDoesNotTurnInspectionOff: at an address of an inspected host, on every
// port, nothing passes that does not prove which host it is for.
func TestAFalseNameDoesNotTurnInspectionOff(t *testing.T) {
	for how, e := range openings() {
		t.Run(how, func(t *testing.T) {
			w := newFalseNames(t, inspect.Config{}, nil)
			w.web(site + ":80")
			b := w.box("i1", secretOf(e))
			for _, n := range []string{"example.com", "shared.test"} {
				if _, err := b.ask("10.0.0.1:53", n+".", dnsmessage.TypeA); err != nil {
					t.Fatal(err)
				}
			}
			ports := []string{"8443", "9000"}
			if e.Internet {
				ports = append(ports, "443", "80")
			}
			for _, port := range ports {
				for what, bytes := range falseNames(t) {
					w.passesNot(b, what, port, bytes)
				}
				w.wait("a refusal that names the host", func(e Event) bool {
					return e.Kind == Denied && e.Dst.String() == site+":"+port && strings.Contains(e.Reason, "requests to example.com are inspected")
				})
			}
		})
	}
}

// passesNot reports an error if the first bytes of a connection to site make the wall
// dial, or if the server's answer comes back.
func (w *inspectedWorld) passesNot(b *box, what, port, bytes string) {
	w.tb.Helper()
	before, _ := w.world.outside()
	if answer := talk(b, site+":"+port, bytes); strings.Contains(answer, "hello") || strings.Contains(answer, secretValue) {
		w.tb.Errorf("%s, at port %s: got %q", what, port, answer)
	}
	if now, _ := w.world.outside(); len(now) != len(before) {
		w.tb.Errorf("%s, at port %s: the wall dialled %v", what, port, now[len(before):])
	}
}

// TestInspectedHostsAreInspectedAtPortsThatAreOpened: the real name is served through
// the inspector at each port, and its secret is masked.
func TestInspectedHostsAreInspectedAtPortsThatAreOpened(t *testing.T) {
	for how, e := range openings() {
		t.Run(how, func(t *testing.T) {
			j := &judge{decide: func(r *outgoing.Request) policy.Verdict {
				if r.Method == "DELETE" {
					return policy.Verdict{Effect: policy.Deny, Reason: "no DELETE"}
				}
				return policy.Verdict{Effect: policy.Allow}
			}}
			w := newFalseNames(t, inspect.Config{Judge: j}, nil)
			b := w.box("i1", secretOf(e))
			c := w.client(b, false)
			if resp, answer := do(t, c, "GET", "https://example.com:8443/", ""); resp.StatusCode != 200 || strings.Contains(answer, secretValue) || !strings.Contains(answer, "***") {
				t.Errorf("got %d %q, want the value masked", resp.StatusCode, answer)
			}
			for _, u := range []string{"https://example.com:8443/", "http://example.com:9000/"} {
				if resp, answer := do(t, c, "DELETE", u, ""); resp.StatusCode != 403 || !strings.Contains(answer, "no DELETE") {
					t.Errorf("%s: got %d %s", u, resp.StatusCode, answer)
				}
			}
			// In TLS for the real name, the request names another host.
			conn := tls.Client(b.mustDial(site+":8443"), &tls.Config{ServerName: "example.com", RootCAs: w.trust(b).RootCAs})
			io.WriteString(conn, "DELETE / HTTP/1.1\r\nHost: shared.test\r\nConnection: close\r\n\r\n")
			if answer, _ := io.ReadAll(conn); !bytes.HasPrefix(answer, []byte("HTTP/1.1 421")) {
				t.Errorf("got %q", answer)
			}
			if n := w.seen.Load(); n != 1 {
				t.Errorf("%d requests arrived, want 1", n)
			}
		})
	}
}

// TestAHostThatSharesTheAddressIsReachedByItsName: a name that is allowed and not
// inspected decides, and what it resolves to is dialled.
func TestAHostThatSharesTheAddressIsReachedByItsName(t *testing.T) {
	for how, e := range openings() {
		t.Run(how, func(t *testing.T) {
			const other = "93.184.216.35"
			w := newFalseNames(t, inspect.Config{}, nil)
			w.says("else.allowed.test", other)
			w.web(other + ":9000")
			b := w.box("i1", secretOf(e))
			c := w.client(b, false)
			if resp, answer := do(t, c, "GET", "http://shared.test:9000/", ""); resp.StatusCode != 200 || answer != "hello shared.test:9000" {
				t.Errorf("got %d %s", resp.StatusCode, answer)
			}
			do(t, c, "GET", "http://example.com:9000/", "") // now its address is known
			if resp, answer := do(t, c, "GET", "http://shared.test:9000/again", ""); resp.StatusCode != 200 || answer != "hello shared.test:9000" {
				t.Errorf("with example.com known: got %d %s", resp.StatusCode, answer)
			}
			if answer := talk(b, site+":9000", "GET / HTTP/1.1\r\nHost: shared.test\r\n\r\nDELETE / HTTP/1.1\r\nHost: example.com\r\n\r\n"); !strings.Contains(answer, "hello shared.test") || strings.Contains(answer, "hello example.com") {
				t.Errorf("a second request: got %q", answer)
			}
			if answer := talk(b, site+":9000", "GET / HTTP/1.1\r\nHost: else.allowed.test\r\nConnection: close\r\n\r\n"); !strings.Contains(answer, "hello else.allowed.test") {
				t.Errorf("a name with another address: got %q", answer)
			}
			dialed, _ := w.world.outside()
			if dialed[len(dialed)-1] != other+":9000" {
				t.Errorf("dialled %v, want the address of the name last", dialed)
			}
		})
	}
}

// TestAnInspectedHostIsNotForgotten: neither many names for its address nor the age of
// the answer make the wall forget that an inspected host has it.
func TestAnInspectedHostIsNotForgotten(t *testing.T) {
	w := newFalseNames(t, inspect.Config{}, nil)
	b := w.box("i1", secretOf(policy.Egress{Internet: true}))
	names := []string{"example.com"}
	for i := range 3 * namesOfOne {
		names = append(names, fmt.Sprintf("n%d.allowed.test", i))
		w.says(names[i+1], site)
	}
	for _, n := range names {
		if _, err := b.ask("10.0.0.1:53", n+".", dnsmessage.TypeA); err != nil {
			t.Fatal(err)
		}
	}
	a, err := w.wall.find("i1")
	if err != nil {
		t.Fatal(err)
	}
	a.names.mu.Lock()
	a.names.byAddr[netip.MustParseAddr(site)].until = time.Unix(1, 0)
	a.names.mu.Unlock()
	talk(b, site+":9000", "PING\r\n")
	if dialed, _ := w.world.outside(); len(dialed) > 0 {
		t.Errorf("the wall dialled %v", dialed)
	}
}

// TestSilenceProvesNothing: a program that waits until the wall has stopped to look for
// a name gets nothing, whatever it sends then.
func TestSilenceProvesNothing(t *testing.T) {
	for _, port := range []string{"8443", "9000"} {
		w := newFalseNames(t, inspect.Config{}, func(c *Config) { c.Limits.SniffTimeout = 50 * time.Millisecond })
		b := w.box("i1", secretOf(policy.Egress{Internet: true}))
		if _, err := b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil {
			t.Fatal(err)
		}
		c := b.mustDial(site + ":" + port)
		w.wait("refused", func(e Event) bool { return e.Kind == Denied && strings.Contains(e.Reason, "requests to example.com") })
		io.WriteString(c, "DELETE / HTTP/1.1\r\nHost: example.com\r\n\r\n")
		if b, _ := io.ReadAll(c); len(b) > 0 {
			t.Errorf("port %s: got %q", port, b)
		}
		if dialed, _ := w.world.outside(); len(dialed) > 0 {
			t.Errorf("the wall dialled %v", dialed)
		}
	}
}

// TestAServerThatSpeaksFirstProvesNothing: also a server that greets is not reached.
func TestAServerThatSpeaksFirstProvesNothing(t *testing.T) {
	w := newFalseNames(t, inspect.Config{}, func(c *Config) { c.Limits.SniffTimeout = 50 * time.Millisecond })
	w.at(site+":3306", func(c net.Conn) { io.WriteString(c, "greeting "+secretValue); c.Close() })
	b := w.box("i1", secretOf(policy.Egress{AllowOut: []string{"example.com:3306"}}))
	if _, err := b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(b.mustDial(site + ":3306")); err == nil || len(got) > 0 {
		t.Errorf("got %q, %v", got, err)
	}
	w.wait("refused", func(e Event) bool {
		return e.Kind == Denied && strings.Contains(e.Reason, "name the address in allowOut")
	})
}

// TestAnAddressOpensOtherProtocols: whoever writes the address opens every protocol but
// TLS and HTTP, which have to prove their host there as well.
func TestAnAddressOpensOtherProtocols(t *testing.T) {
	w := newFalseNames(t, inspect.Config{}, func(c *Config) { c.Limits.FirstByte = 50 * time.Millisecond })
	w.at(site+":22", func(c net.Conn) { io.WriteString(c, "SSH-2.0-x\r\n"); io.Copy(c, c) })
	w.at(site+":3306", func(c net.Conn) { io.WriteString(c, "greeting"); io.Copy(c, c) })
	w.at(site+":5432", echo)
	w.at(site+":8443", echo)
	w.at(site+":9000", echo)
	b := w.box("i1", secretOf(policy.Egress{AllowOut: []string{site, "example.com"}, DenyOut: []string{"0.0.0.0/0"}}))
	if _, err := b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil {
		t.Fatal(err)
	}
	for port, hello := range map[string]string{"22": "SSH-2.0-y\r\n", "3306": "", "5432": "\x00\x00\x00\x08\x04\xd2\x16\x2f"} {
		c := b.mustDial(site + ":" + port)
		io.WriteString(c, hello)
		want := map[string]string{"22": "SSH-2.0-x\r\n" + hello, "3306": "greeting", "5432": hello}[port]
		got := make([]byte, len(want))
		if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
			t.Errorf("port %s: got %q, %v; want %q", port, got, err, want)
		}
	}
	for what, bytes := range falseNames(t) {
		if !strings.HasPrefix(what, "TLS for") && !strings.HasPrefix(what, "TLS without") && !strings.HasPrefix(what, "TLS that") && !strings.HasPrefix(what, "HTTP") {
			continue
		}
		for _, port := range []string{"8443", "9000"} {
			if answer := talk(b, site+":"+port, bytes); answer != "" && !strings.HasPrefix(answer, "HTTP/1.1 403") && answer != "\x15\x03\x03\x00\x02\x02\x31" {
				t.Errorf("%s, at port %s: got %q", what, port, answer)
			}
		}
	}
	// What begins late is not looked at as a request, and so may not be one.
	c := b.mustDial(site + ":8443")
	w.wait("connected", func(e Event) bool { return e.Kind == Connected && e.Dst.String() == site+":8443" })
	io.WriteString(c, hello("example.com", 1<<14, nil))
	if got, _ := io.ReadAll(c); len(got) > 0 {
		t.Errorf("TLS that begins late passed: got %d bytes", len(got))
	}
}

// TestWhatAPortOpenedByNameCarries: at a port that a name opens, and whose host is not
// inspected, TLS and HTTP are for that name. All that is known of other protocols is that
// our resolver gave the address.
func TestWhatAPortOpenedByNameCarries(t *testing.T) {
	const whole = 1 << 14
	named := policy.Egress{AllowOut: []string{"www.example.com:7000", "shared.test", "shared.test:7001"}, DenyOut: []string{"0.0.0.0/0"}}
	w := newFalseNames(t, inspect.Config{}, nil)
	got := make(chan string, 1)
	w.at(site+":7000", func(c net.Conn) {
		defer c.Close()
		b, _ := io.ReadAll(c)
		got <- string(b)
	})
	b := w.box("i1", named)
	for _, n := range []string{"www.example.com", "shared.test"} {
		if _, err := b.ask("10.0.0.1:53", n+".", dnsmessage.TypeA); err != nil {
			t.Fatal(err)
		}
	}
	for what, tc := range map[string]struct {
		first, reason string // empty: it passes
	}{
		"TLS for it":                           {hello("www.example.com", whole, nil), ""},
		"TLS for it, in small records":         {hello("www.example.com", 9, nil), ""},
		"TLS without a name":                   {hello("", whole, nil), ""},
		"TLS for another host":                 {hello("x.test", whole, nil), "does not name x.test"},
		"TLS for another host, in records":     {hello("x.test", 9, nil), "does not name x.test"},
		"TLS for a host at other ports":        {hello("shared.test", whole, nil), "shared.test:7000 opens that port"},
		"a malformed ClientHello":              {"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00", "malformed"},
		"HTTP for it":                          {"GET / HTTP/1.1\r\nHost: www.example.com:7000\r\n\r\n", ""},
		"HTTP for another host":                {"GET / HTTP/1.1\r\nHost: x.test\r\n\r\n", "does not name x.test"},
		"HTTP for a host at other ports":       {"GET / HTTP/1.1\r\nHost: shared.test\r\n\r\n", "shared.test:7000 opens that port"},
		"HTTP for two hosts":                   {"GET / HTTP/1.1\r\nHost: www.example.com\r\nHost: x.test\r\n\r\n", "names two hosts"},
		"HTTP without a host":                  {"GET / HTTP/1.0\r\n\r\n", "names no host"},
		"HTTP with bare line ends":             {"GET / HTTP/1.1\nHost: x.test\n\n", "does not end in CR LF"},
		"HTTP after empty lines":               {"\r\n\r\nGET / HTTP/1.1\r\nHost: x.test\r\n\r\n", "empty line"},
		"HTTP/2 without TLS":                   {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "malformed"},
		"HTTP CONNECT":                         {"CONNECT x.test:443 HTTP/1.1\r\nHost: x.test:443\r\n\r\n", "CONNECT"},
		"a second request for another host":    {"GET / HTTP/1.1\r\nHost: www.example.com\r\n\r\nGET / HTTP/1.1\r\nHost: x.test\r\n\r\n", "does not name x.test"},
		"PostgreSQL":                           {"\x00\x00\x00\x08\x04\xd2\x16\x2f", ""},
		"Redis":                                {"*1\r\n$4\r\nPING\r\n", ""},
		"a line of words":                      {"SET a b\r\n", ""},
		"a word without an end":                {"ruok", ""},
		"blanks":                               {"\r\n", ""},
		"SSH":                                  {"SSH-2.0-x\r\n", ""},
		"PROXY, version 2, which tells us all": {proxyV2 + "x", ""},
	} {
		t.Run(what, func(t *testing.T) {
			talk(b, site+":7000", tc.first)
			arrived := <-got
			switch {
			case tc.reason == "" && arrived != tc.first:
				t.Errorf("%q arrived, want %q", arrived, tc.first)
			case tc.reason != "" && arrived != "" && what != "a second request for another host" || strings.Contains(arrived, "x.test"):
				t.Errorf("%q arrived", arrived)
			case tc.reason != "" && !strings.Contains(w.wall.Denials("i1")[0].Reason, tc.reason):
				t.Errorf("got %+v, want %q", w.wall.Denials("i1")[0], tc.reason)
			}
		})
	}
}

// TestARequestMayComeInPieces: a word is sent on before it is known whether it becomes a
// request, and the request is judged all the same.
func TestARequestMayComeInPieces(t *testing.T) {
	w := newFalseNames(t, inspect.Config{}, nil)
	got, begun := make(chan string, 1), make(chan string, 1)
	w.at(site+":7000", func(c net.Conn) {
		defer c.Close()
		word := make([]byte, 2)
		n, _ := io.ReadFull(c, word)
		begun <- string(word[:n])
		b, _ := io.ReadAll(c)
		got <- string(b)
	})
	b := w.box("i1", policy.Egress{AllowOut: []string{"www.example.com:7000"}})
	if _, err := b.ask("10.0.0.1:53", "www.example.com.", dnsmessage.TypeA); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ first, rest, want string }{
		{"GE", "T / HTTP/1.1\r\nHost: x.test\r\n\r\n", ""},
		{"GE", "T / HTTP/1.1\r\nHost: www.example.com\r\n\r\n", "T / HTTP/1.1\r\nHost: www.example.com\r\n\r\n"},
		{"FO", "O / HTTP/1.1\r\nHost: x.test\r\n\r\n", ""},
		{"FO", "O / HTTP/1.1\r\nHost: www.example.com\r\nUpgrade: h2c\r\n\r\n", "O / HTTP/1.1\r\nHost: www.example.com\r\n\r\n"},
		{"ru", "ok", "ok"},
	} {
		c := b.mustDial(site + ":7000")
		io.WriteString(c, tc.first)
		if s := <-begun; s != tc.first {
			t.Fatalf("got %q", s)
		}
		io.WriteString(c, tc.rest)
		c.(interface{ CloseWrite() error }).CloseWrite()
		if s := <-got; s != tc.want {
			t.Errorf("%q, %q: got %q", tc.first, tc.rest, s)
		}
	}
}

// TestAnInspectedNameAtAnUnknownAddressIsRefused: with the Internet open, a program that
// has the address from elsewhere does not get past the inspection with the true name.
func TestAnInspectedNameAtAnUnknownAddressIsRefused(t *testing.T) {
	for _, e := range []policy.Egress{{Internet: true}, {AllowOut: []string{site}}} {
		for name, first := range map[string]string{
			"TLS":            hello("example.com", 1<<14, nil),
			"HTTP":           "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n",
			"malformed HTTP": "GET / HTTP/1.1\r\nHost: example.com\r\nHost: x.test\r\n\r\n",
		} {
			w := newFalseNames(t, inspect.Config{}, nil)
			got := make(chan string, 1)
			w.at(site+":7000", func(c net.Conn) {
				defer c.Close()
				b, _ := io.ReadAll(c)
				got <- string(b)
			})
			b := w.box("i1", secretOf(e))
			talk(b, site+":7000", first)
			if s := <-got; s != "" {
				t.Errorf("%s: %q arrived", name, s)
			}
			w.wait("a refusal", func(e Event) bool {
				return e.Kind == Denied && strings.Contains(e.Reason, "look the name up with the sandbox's resolver")
			})
		}
	}
}

// TestANewRuleEndsConnectionsOnEveryPort: what passed before its host became inspected is
// cut. What the list has by its address stays once it was seen to be another protocol.
func TestANewRuleEndsConnectionsOnEveryPort(t *testing.T) {
	for how, tc := range map[string]struct {
		e    policy.Egress
		name string
	}{
		"by name":      {policy.Egress{AllowOut: []string{"example.com:5432"}}, "example.com"},
		"the Internet": {policy.Egress{Internet: true}, "example.com"},
	} {
		t.Run(how, func(t *testing.T) {
			w := newFalseNames(t, inspect.Config{}, nil)
			w.at(site+":5432", echo)
			b := w.box("i1", tc.e)
			if _, err := b.ask("10.0.0.1:53", tc.name+".", dnsmessage.TypeA); err != nil {
				t.Fatal(err)
			}
			c := b.mustDial(site + ":5432")
			io.WriteString(c, "\x00\x01")
			if _, err := io.ReadFull(c, make([]byte, 2)); err != nil {
				t.Fatal(err)
			}
			e := tc.e
			e.Rules = ruled(nil).Rules
			if err := w.wall.Update(t.Context(), w.principal("i1", ""), e); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v, want that it ends", err)
			}
			w.wait("cut", func(e Event) bool { return e.Kind == Cut && strings.Contains(e.Reason, "are inspected now") })
		})
	}
	w := newFalseNames(t, inspect.Config{}, nil)
	w.at(site+":5432", echo)
	e := policy.Egress{AllowOut: []string{site, "example.com"}, DenyOut: []string{"0.0.0.0/0"}, Rules: ruled(nil).Rules}
	b := w.box("i1", e)
	if _, err := b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil {
		t.Fatal(err)
	}
	c := b.mustDial(site + ":5432")
	say := func() error {
		io.WriteString(c, "\x00\x01")
		_, err := io.ReadFull(c, make([]byte, 2))
		return err
	}
	if err := say(); err != nil {
		t.Fatal(err)
	}
	w.wall.Recheck(t.Context(), "prj_1")
	if err := say(); err != nil {
		t.Errorf("got %v, want that it goes on", err)
	}
	e.AllowOut, e.DenyOut, e.Internet = nil, nil, true
	if err := w.wall.Update(t.Context(), w.principal("i1", ""), e); err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	var late net.Error
	if _, err := io.Copy(io.Discard, c); errors.As(err, &late) && late.Timeout() {
		t.Error("it goes on without the address in the list")
	}
	w.wait("cut", func(e Event) bool { return e.Kind == Cut && strings.Contains(e.Reason, "are inspected now") })
}

var _ RequestGranter = oneGrant{}

// oneGrant opens a host at one port for GET requests.
type oneGrant struct {
	host string
	port uint16
}

func (g oneGrant) Allows(_ context.Context, _ auth.Principal, host string, port uint16) (policy.Verdict, bool) {
	if host != "" && host != g.host || port != 0 && port != g.port {
		return policy.Verdict{Effect: policy.Deny, Reason: "no permit"}, false
	}
	return policy.Verdict{Effect: policy.Allow, Rule: "prm_1", Reason: "permitted"}, true
}

func (g oneGrant) Find(ctx context.Context, who auth.Principal, r *outgoing.Request) policy.Verdict {
	if v, _ := g.Allows(ctx, who, r.Host, r.Port); v.Effect == policy.Allow && r.Method == "GET" {
		return v
	}
	return policy.Verdict{Effect: policy.Deny, Reason: "no permit allows " + r.Method}
}

// TestAPermitForRequestsHoldsAtItsPort: only the permitted requests pass, at another port
// than the web's as well, and nothing else passes at an address of its host.
func TestAPermitForRequestsHoldsAtItsPort(t *testing.T) {
	e := policy.Egress{AllowOut: []string{"shared.test:9000", "*.allowed.test:9000"}}
	w := newFalseNames(t, inspect.Config{}, func(c *Config) { c.Grants = oneGrant{"example.com", 9000} })
	b := w.box("i1", e)
	for _, n := range []string{"example.com", "shared.test"} {
		if _, err := b.ask("10.0.0.1:53", n+".", dnsmessage.TypeA); err != nil {
			t.Fatal(err)
		}
	}
	c := w.client(b, false)
	if resp, answer := do(t, c, "GET", "http://example.com:9000/", ""); resp.StatusCode != 200 || answer != "hello example.com:9000" {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if resp, answer := do(t, c, "DELETE", "http://example.com:9000/", ""); resp.StatusCode != 403 || !strings.Contains(answer, "no permit allows DELETE") {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if resp, answer := do(t, c, "DELETE", "http://shared.test:9000/", ""); resp.StatusCode != 200 {
		t.Errorf("a host that the list opens: got %d %s", resp.StatusCode, answer)
	}
	for what, bytes := range falseNames(t) {
		w.passesNot(b, what, "9000", bytes)
	}
}

// TestRegistriesAreOnlyReadOnEveryPort: also where the Internet is open, a registry that
// the sandbox may read is read at each port, and nothing else.
func TestRegistriesAreOnlyReadOnEveryPort(t *testing.T) {
	w := newFalseNames(t, inspect.Config{}, nil)
	w.says("registry.npmjs.org", site)
	b := w.box("i1", policy.Egress{Internet: true, Packages: []string{"npm"}})
	c := w.client(b, false)
	if resp, answer := do(t, c, "GET", "http://registry.npmjs.org:9000/", ""); resp.StatusCode != 200 {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if resp, answer := do(t, c, "PUT", "http://registry.npmjs.org:9000/x", "x"); resp.StatusCode != 403 || !strings.Contains(answer, "only read") {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	for _, bytes := range []string{"\x00\x01", "PUT / HTTP/1.1\r\nHost: x.test\r\n\r\n", hello("x.test", 1<<14, nil)} {
		w.passesNot(b, fmt.Sprintf("%.20q", bytes), "9000", bytes)
	}
}

// TestNamesOpenOnlyTheirPorts: a name opens 80 and 443, and what is named.
func TestNamesOpenOnlyTheirPorts(t *testing.T) {
	w := newWorld(t, open)
	for _, p := range []string{"80", "443", "22", "5432", "7000"} {
		w.at(site+":"+p, echo)
	}
	w.says("example.com", site)
	w.says("a.example.com", site)
	b := w.box("i1", policy.Egress{AllowOut: []string{"example.com", "example.com:5432", "*.example.com:7000"}})
	dial := func(port string) bool {
		c, err := b.dial(site + ":" + port)
		if err == nil {
			c.Close()
		}
		return err == nil
	}
	if _, err := b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil {
		t.Fatal(err)
	}
	for port, want := range map[string]bool{"80": true, "443": true, "5432": true, "22": false, "7000": false} {
		if got := dial(port); got != want {
			t.Errorf("port %s: got %v", port, got)
		}
	}
	w.wait("a reason with the next step", func(e Event) bool {
		return e.Kind == Denied && e.Dst.String() == site+":22" && strings.Contains(e.Reason, "example.com:22 opens that port")
	})
	if _, err := b.ask("10.0.0.1:53", "a.example.com.", dnsmessage.TypeA); err != nil {
		t.Fatal(err)
	}
	if !dial("7000") {
		t.Error("a name below the wildcard does not open its port")
	}
}
