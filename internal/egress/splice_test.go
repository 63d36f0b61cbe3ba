package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"

	"postern/internal/auth"
	"postern/internal/policy"
)

// A step is one turn in a conversation: "> " is the program's, "< " the server's.
type step string

// TestOtherProtocols: protocols other than mail pass unchanged, in lockstep. Where only
// a name opens the port, HTTP is for that host.
func TestOtherProtocols(t *testing.T) {
	hello := string(clientHello("example.com"))
	elsewhere := []string{"HTTP/2 without TLS", "a body about mail", "a proxy for the web"}
	for _, tc := range []struct {
		name  string
		steps []step
	}{
		{"SSH, server first", []step{"< SSH-2.0-OpenSSH_9\r\n", "> SSH-2.0-x\r\n", "> \x00\x00\x01\x02\x03", "< \x00\x00"}},
		{"SSH, both", []step{"> SSH-2.0-x\r\n", "< SSH-2.0-OpenSSH_9\r\n", "> \x00\x00\x01\x02\x03", "< \x00\x00"}},
		{"FTP", []step{"< 220-ftp.test\r\n220 go on\r\n", "> USER anonymous\r\n", "< 331 password\r\n", "> PASS a@b\r\n", "< 230 in\r\n", "> NOOP\r\n", "< 200 ok\r\n", "> RETR data.txt\r\n", "< 150 here\r\n", "> HELP\r\n", "< 214 ok\r\n"}},
		{"FTP over TLS", []step{"< 220 ftp.test\r\n", "> AUTH TLS\r\n", "< 234 go on\r\n", step("> " + hello), "< \x16\x03\x03\x00\x01\x02"}},
		{"dictionary", []step{"< 220 dict.test <auth.mime>\r\n", "> DEFINE * mail\r\n", "< 552 none\r\n"}},
		{"news", []step{"< 200 news.test\r\n", "> STARTTLS\r\n", "< 382 go on\r\n", step("> " + hello), "< \x16\x03\x03\x00\x01\x02"}},
		{"IMAP", []step{"< * OK ready\r\n", "> a1 STARTTLS\r\n", "< a1 OK\r\n", step("> " + hello), "< \x16\x03\x03\x00\x01\x02"}},
		{"POP3", []step{"< +OK ready\r\n", "> STLS\r\n", "< +OK\r\n", "> RSET\r\n", "< +OK\r\n"}},
		{"Redis", []step{"> *2\r\n$4\r\nAUTH\r\n$6\r\nsecret\r\n", "< +OK\r\n", "> *3\r\n$3\r\nSET\r\n$1\r\na\r\n$24\r\nRCPT TO:<a@b.test>\r\nDATA\r\n", "< +OK\r\n"}},
		{"Redis, by hand", []step{"> PING\r\n", "< +PONG\r\n", "> HELLO 3\r\n", "< -ERR\r\n", "> AUTH secret\r\n", "< +OK\r\n", "> MAIL\r\n", "< -ERR\r\n"}},
		{"PostgreSQL", []step{"> \x00\x00\x00\x08\x04\xd2\x16\x2f", "< N", "> \x00\x00\x00\x09\x00\x03\x00\x00\x00", "< R\x00\x00\x00\x08\x00\x00\x00\x00"}},
		{"MySQL", []step{"< \x4a\x00\x00\x00\x0a8.0.36\x00", "> \x20\x00\x00\x01\x85\xa6\xff\x01", "< \x07\x00\x00\x02\x00"}},
		{"git", []step{"> 0033git-upload-pack /a.git\x00host=example.com\x00", "< 003f", "> 0000", "< 0000"}},
		{"MQTT", []step{"> \x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00", "< \x20\x02\x00\x00", "> \xc0\x00", "< \xd0\x00"}},
		{"HTTP/2 without TLS", []step{"> PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "> \x00\x00\x00\x04\x00\x00\x00\x00\x00", "< \x00\x00\x00\x04\x00\x00\x00\x00\x00"}},
		{"WebSocket", []step{"> GET / HTTP/1.1\r\nHost: example.com\r\nUpgrade: websocket\r\n\r\n", "< HTTP/1.1 101 Switching Protocols\r\n\r\n", "> \x81\x04EHLO", "< \x81\x04EHLO"}},
		{"a body about mail", []step{"> POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\n\r\n", "> Mail me at a@b.test\r\nData: 5\r\nfrom: c\r\nTo reset, send NOOP.\r\nVrfy\r\n", "< HTTP/1.1 200 OK\r\n\r\n", "> RCPT TO:<a@b.test>\r\n", "< y"}},
		{"memcached", []step{"> get a\r\n", "< END\r\n", "> version\r\n", "< VERSION 1\r\n"}},
		{"bytes one by one", []step{"> M", "< 1", "> E", "< 2", "> H", "< 3"}},
		{"a proxy for the web", []step{"> CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n", "< HTTP/1.1 200 OK\r\n\r\n", step("> " + hello), "< \x16\x03\x03\x00\x01\x02", step("> " + strings.Repeat("\x17\x03\x03\x00\x01x", 2000)), "< \x17"}},
		{"SOCKS 5", []step{"> \x05\x01\x00", "< \x05\x00", "> \x05\x01\x00\x01\x01\x02\x03\x04\x01\xbb", "< \x05\x00\x00\x01\x00\x00\x00\x00\x00\x00", step("> " + hello), "< \x16\x03\x03\x00\x01\x02"}},
	} {
		for _, e := range []policy.Egress{{Internet: true}, named} {
			if !e.Internet && slices.Contains(elsewhere, tc.name) {
				continue
			}
			t.Run(fmt.Sprintf("%s, internet %v", tc.name, e.Internet), func(t *testing.T) {
				w := newWorld(t, open)
				served := make(chan error, 1)
				w.at(site+":7007", func(c net.Conn) {
					defer c.Close()
					served <- converse(c, tc.steps, "<")
				})
				b := w.box("i1", e)
				w.learn("i1", "example.com", site)
				if err := converse(b.mustDial(site+":7007"), tc.steps, ">"); err != nil {
					t.Error("program: ", err)
				}
				if err := <-served; err != nil {
					t.Error("server: ", err)
				}
			})
		}
	}
}

// converse sends one side's turns and expects the other's.
func converse(c net.Conn, steps []step, me string) error {
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	for i, s := range steps {
		text := string(s[2:])
		if strings.HasPrefix(string(s), me) {
			if _, err := io.WriteString(c, text); err != nil {
				return fmt.Errorf("step %d: %w", i, err)
			}
			continue
		}
		got := make([]byte, len(text))
		if n, err := io.ReadFull(c, got); string(got) != text {
			return fmt.Errorf("step %d: got %q, %w; want %q", i, got[:n], err, text)
		}
	}
	return nil
}

// TestOrdinaryRequests: web clients work as usual if a connection is allowed by
// name only.
func TestOrdinaryRequests(t *testing.T) {
	w := newWorld(t, open)
	seen := make(chan string, 100)
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Errorf("%s: %v", r.URL, err)
		}
		if r.Header.Get("Upgrade") == "websocket" {
			c, rest, err := rw.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
			io.Copy(c, rest)
			return
		}
		seen <- fmt.Sprintf("%s %s %s %d %s%s", r.Method, r.Host, r.URL.Path, len(body), r.Trailer.Get("X-Sum"), r.Header.Get("Upgrade"))
		fmt.Fprintf(rw, "hello %d", len(body))
	}))
	t.Cleanup(srv.Close)
	w.standsFor(site+":80", srv.Listener)
	w.says("example.com", site)
	b := w.box("i1", named)
	dials := 0
	client := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			dials++
			return gonet.DialContextTCP(ctx, b.stack, full(site+":80"), ipv4.ProtocolNumber)
		},
		ExpectContinueTimeout: time.Minute,
	}}
	t.Cleanup(client.CloseIdleConnections)
	big := bytes.Repeat([]byte("0123456789abcdef\r\n"), 300_000)
	for _, tc := range []struct {
		name   string
		change func(*http.Request)
		body   io.Reader
		want   string
	}{
		{"GET", func(*http.Request) {}, nil, "GET example.com /p 0 "},
		{"again", func(*http.Request) {}, nil, "GET example.com /p 0 "},
		{"upper case", func(r *http.Request) { r.Host = "Example.COM:80" }, nil, "GET Example.COM:80 /p 0 "},
		{"another method", func(r *http.Request) { r.Method = "VERSION-CONTROL" }, nil, "VERSION-CONTROL example.com /p 0 "},
		{"a body", func(r *http.Request) { r.Method = "POST" }, strings.NewReader("hello"), "POST example.com /p 5 "},
		{"a large body", func(r *http.Request) { r.Method = "PUT" }, bytes.NewReader(big), fmt.Sprintf("PUT example.com /p %d ", len(big))},
		{"chunks and a trailer", func(r *http.Request) { r.Method = "PUT"; r.Trailer = http.Header{"X-Sum": {"abc"}} }, struct{ io.Reader }{bytes.NewReader(big)}, fmt.Sprintf("PUT example.com /p %d abc", len(big))},
		{"wait for 100", func(r *http.Request) { r.Method = "POST"; r.Header.Set("Expect", "100-continue") }, strings.NewReader("hello"), "POST example.com /p 5 "},
		{"an offer of HTTP/2, as Java's client has it", func(r *http.Request) {
			r.Header.Set("Connection", "Upgrade, HTTP2-Settings")
			r.Header.Set("Upgrade", "h2c")
			r.Header.Set("HTTP2-Settings", "AAMAAABkAAQAAP__")
		}, nil, "GET example.com /p 0 "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, err := http.NewRequestWithContext(t.Context(), "GET", "http://example.com/p", tc.body)
			if err != nil {
				t.Fatal(err)
			}
			tc.change(r)
			resp, err := client.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || resp.StatusCode != 200 || !strings.HasPrefix(string(got), "hello") {
				t.Errorf("got %d %q, %v", resp.StatusCode, got, err)
			}
			if s := <-seen; s != tc.want {
				t.Errorf("the server saw %q, want %q", s, tc.want)
			}
		})
	}
	if dials != 1 {
		t.Errorf("%d connections for requests that one can carry", dials)
	}
	t.Run("as apt asks: ten at once", func(t *testing.T) {
		c := b.mustDial(site + ":80")
		io.WriteString(c, strings.Repeat("GET /p HTTP/1.1\r\nHost: example.com\r\nUser-Agent: Debian APT-HTTP/1.3\r\n\r\n", 10))
		answers := bufio.NewReader(c)
		for i := range 10 {
			resp, err := http.ReadResponse(answers, nil)
			if err != nil {
				t.Fatalf("answer %d: %v", i, err)
			}
			io.Copy(io.Discard, resp.Body)
			<-seen
		}
	})
	t.Run("HTTP/1.0 with a host, letter by letter", func(t *testing.T) {
		c := b.mustDial(site + ":80")
		for _, l := range "GET /p HTTP/1.0\r\nHost: example.com\r\n\r\n" {
			io.WriteString(c, string(l))
		}
		if got, err := get(c, ""); got != "200 hello 0" {
			t.Errorf("got %q, %v", got, err)
		}
		<-seen
	})
	t.Run("WebSocket", func(t *testing.T) {
		c := b.mustDial(site + ":80")
		io.WriteString(c, "GET /ws HTTP/1.1\r\nHost: example.com\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		answers := bufio.NewReader(c)
		if resp, err := http.ReadResponse(answers, nil); err != nil || resp.StatusCode != 101 {
			t.Fatalf("got %+v, %v", resp, err)
		}
		frame := "\x81\x05\r\nhi\n"
		io.WriteString(c, frame)
		got := make([]byte, len(frame))
		if _, err := io.ReadFull(answers, got); err != nil || string(got) != frame {
			t.Errorf("got %q, %v", got, err)
		}
	})
	if es := w.record(); slices.ContainsFunc(es, func(e Event) bool { return e.Kind != Connected }) {
		t.Errorf("recorded %+v", es)
	}
}

// TestLaterRequests: on a connection that is allowed by name each request must be
// for that name.
func TestLaterRequests(t *testing.T) {
	const first = "GET /1 HTTP/1.1\r\nHost: example.com\r\n\r\n"
	for _, tc := range []struct{ name, second, status, recorded, reason string }{
		{"another host", "GET /2 HTTP/1.1\r\nHost: evil.test\r\n\r\n", "403", "evil.test", "does not name evil.test"},
		{"another host that is allowed", "GET /2 HTTP/1.1\r\nHost: a.allowed.test\r\n\r\n", "421", "a.allowed.test", "needs its own"},
		{"in the target", "GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n", "403", "evil.test", "does not name evil.test"},
		{"lower case", "get /2 HTTP/1.1\r\nHost: evil.test\r\n\r\n", "403", "", "upper case"},
		{"an empty line before it", "\r\nGET /2 HTTP/1.1\r\nHost: evil.test\r\n\r\n", "403", "", "empty line"},
		{"TAB", "GET\t/2 HTTP/1.1\r\nHost: evil.test\r\n\r\n", "403", "", "request line is malformed"},
		{"user and host", "GET /2 HTTP/1.1\r\nHost: evil.test:80@example.com\r\n\r\n", "403", "example.com", "Host field is malformed"},
		{"a bare CR before a second host", "GET /2 HTTP/1.1\r\nHost: example.com\rHost: evil.test\r\n\r\n", "403", "", "bare CR"},
		{"an unusual method", "M-SEARCH * HTTP/1.1\r\nHost: evil.test\r\n\r\n", "403", "evil.test", "target of the HTTP request is malformed"},
		{"another unusual method", "VERSION-CONTROL / HTTP/1.1\r\nHost: evil.test\r\n\r\n", "403", "evil.test", "does not name evil.test"},
		{"HTTP/0.9", "GET /2\r\n\r\n", "403", "", "request line is malformed"},
		{"HTTP/1.0 without a host", "GET /2 HTTP/1.0\r\n\r\n", "403", "", "names no host"},
		{"a length and chunks", "POST /2 HTTP/1.1\r\nHost: example.com\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "403", "example.com", "both Content-Length and Transfer-Encoding"},
		{"a folded line", "GET /2 HTTP/1.1\r\nX: y\r\n Host: evil.test\r\nHost: example.com\r\n\r\n", "403", "", "malformed field"},
		{"a bad chunk", "POST /2 HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n", "403", "", "malformed chunk"},
		{"a host in a trailer", "POST /2 HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nHost: evil.test\r\n\r\n", "403", "", "malformed field"},
		{"CONNECT", "CONNECT evil.test:80 HTTP/1.1\r\nHost: evil.test\r\n\r\n", "403", "evil.test", "CONNECT"},
		{"a body where servers expect none", "GET /2 HTTP/1.1\r\nHost: example.com\r\nContent-Length: 39\r\n\r\nGET /3 HTTP/1.1\r\nHost: evil.test\r\n\r\n", "403", "example.com", "with a body"},
		{"HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "403", "", "request line is malformed"},
	} {
		for _, pipelined := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, pipelined %v", tc.name, pipelined), func(t *testing.T) {
				w := newWorld(t, open)
				paths := make(chan string, 10)
				srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
					paths <- r.Host + r.URL.Path
				}))
				t.Cleanup(srv.Close)
				w.standsFor(site+":80", srv.Listener)
				w.says("example.com", site)
				c := w.box("i1", named).mustDial(site + ":80")
				answers := bufio.NewReader(c)
				answer := func() string {
					resp, err := http.ReadResponse(answers, nil)
					if err != nil {
						t.Fatal(err)
					}
					io.Copy(io.Discard, resp.Body)
					return resp.Status[:3]
				}
				if pipelined {
					io.WriteString(c, first+tc.second)
				} else {
					io.WriteString(c, first)
				}
				if got := answer(); got != "200" {
					t.Errorf("the first: got %s", got)
				}
				if !pipelined {
					io.WriteString(c, tc.second)
				}
				got := answer()
				if got == "200" {
					got = answer() // the server did not wait for the body, which we refuse
				}
				if got != tc.status {
					t.Errorf("got %s, want %s", got, tc.status)
				}
				e := w.wait("denied", func(e Event) bool { return e.Kind == Denied })
				if e.Name != tc.recorded || !strings.Contains(e.Reason, tc.reason) {
					t.Errorf("got %+v, want %q: %s", e, tc.recorded, tc.reason)
				}
				if p := <-paths; p != "example.com/1" || len(paths) > 0 && <-paths != "example.com/2" {
					t.Errorf("the server saw %q and %d more", p, len(paths))
				}
			})
		}
	}
}

// TestSilentAtFirst: a program that sends nothing until the wall stops looking for
// a name is still judged. If its server speaks first it is left alone.
func TestSilentAtFirst(t *testing.T) {
	for _, tc := range []struct{ name, port, greets, says, want, reason string }{
		{"server first", "443", "SSH-2.0-x\r\n", "hello", "hello", ""},
		{"a request", "80", "", "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n", "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n", ""},
		{"for another host", "80", "", "GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n", "", "does not name evil.test"},
		{"that is not strict", "443", "", "\r\nGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n", "", "empty line"},
		{"TLS for another host", "443", "", string(clientHello("evil.test")), "", "does not name evil.test"},
		{"after a time-out of the server", "80", "HTTP/1.1 408 Request Timeout\r\n\r\n", "GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n", "", "names no host"},
		{"an unknown protocol", "443", "", "\x00\x01\x02", "", "neither HTTP, TLS nor SSH"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, func(c *Config) { open(c); c.Limits.SniffTimeout = time.Millisecond })
			dialed, arrived := make(chan struct{}), make(chan string, 1)
			w.at(site+":"+tc.port, func(c net.Conn) {
				close(dialed)
				io.WriteString(c, tc.greets)
				var got []byte
				buf := make([]byte, 1<<10)
				for {
					n, err := c.Read(buf)
					if got = append(got, buf[:n]...); err != nil || tc.want != "" && len(got) >= len(tc.want) {
						break
					}
				}
				c.Close()
				arrived <- string(got)
			})
			b := w.box("i1", named)
			w.learn("i1", "example.com", site)
			c := b.mustDial(site + ":" + tc.port)
			<-dialed
			if _, err := io.ReadFull(c, make([]byte, len(tc.greets))); err != nil {
				t.Fatal(err)
			}
			io.WriteString(c, tc.says)
			if got := <-arrived; got != tc.want {
				t.Errorf("arrived %q, want %q", got, tc.want)
			}
			if tc.reason != "" {
				w.wait("denied", func(e Event) bool { return e.Kind == Denied && strings.Contains(e.Reason, tc.reason) })
			}
		})
	}
}

// TestSSHOnTheWebsPort: a connection that begins like SSH only passes to servers
// that speak SSH.
func TestSSHOnTheWebsPort(t *testing.T) {
	for _, tc := range []struct{ name, greets, want string }{
		{"SSH", "SSH-2.0-y\r\n", "SSH-2.0-x\r\nGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"},
		{"the web", "HTTP/1.1 400 Bad Request\r\n\r\n", "SSH-2.0-x\r\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, open)
			arrived := make(chan string, 1)
			w.at(site+":443", func(c net.Conn) {
				defer c.Close()
				got := make([]byte, len(tc.want))
				n, _ := io.ReadFull(c, got[:len("SSH-2.0-x\r\n")])
				io.WriteString(c, tc.greets)
				m, _ := io.ReadFull(c, got[n:])
				arrived <- string(got[:n+m])
			})
			b := w.box("i1", named)
			w.learn("i1", "example.com", site)
			io.WriteString(b.mustDial(site+":443"), "SSH-2.0-x\r\nGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n")
			if got := <-arrived; got != tc.want {
				t.Errorf("arrived %q, want %q", got, tc.want)
			}
		})
	}
}

// TestSecondHello: if a TLS server asks for a second ClientHello, it must be for
// the same name.
func TestSecondHello(t *testing.T) {
	for _, tc := range []struct{ name, second, fail string }{
		{"the same name", "example.com", ""},
		{"another name", "evil.test", "reset"},
		{"none", "", "reset"},
	} {
		for _, early := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, early %v", tc.name, early), func(t *testing.T) {
				w := newWorld(t, open)
				w.says("example.com", site)
				arrived := make(chan string, 1)
				firstHello, second := clientHello("example.com"), clientHello(tc.second)
				w.at(site+":443", func(c net.Conn) {
					defer c.Close()
					io.ReadFull(c, make([]byte, len(firstHello)))
					c.Write(helloRetryRequest())
					got, _ := io.ReadAll(c)
					arrived <- string(got)
				})
				c := w.box("i1", named).mustDial(site + ":443")
				ccs := []byte{0x14, 3, 3, 0, 1, 1}
				c.Write(firstHello)
				if !early {
					io.ReadFull(c, make([]byte, len(helloRetryRequest())))
				}
				c.Write(append(ccs, second...))
				closeWrite(c)
				got := <-arrived
				if want := string(ccs) + string(second); tc.fail == "" && got != want {
					t.Errorf("arrived %d bytes, want %d", len(got), len(want))
				}
				if tc.fail != "" {
					if strings.Contains(got, string(second)) {
						t.Error("the second hello arrived")
					}
					w.wait("denied", func(e Event) bool { return e.Kind == Denied && e.Name == tc.second })
				}
			})
		}
	}
	t.Run("real", func(t *testing.T) {
		w := newWorld(t, open)
		w.says("example.com", site)
		srv := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, "secret") }))
		srv.TLS = &tls.Config{CurvePreferences: []tls.CurveID{tls.CurveP384}}
		srv.StartTLS()
		t.Cleanup(srv.Close)
		w.standsFor(site+":443", srv.Listener)
		// The client's first key share is of another curve: the server asks again.
		c := tls.Client(w.box("i1", named).mustDial(site+":443"), &tls.Config{ServerName: "example.com", InsecureSkipVerify: true, CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP384}})
		if got, err := get(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); got != "200 secret" {
			t.Errorf("got %q, %v", got, err)
		}
		if !c.ConnectionState().HelloRetryRequest {
			t.Error("the server did not ask again")
		}
	})
}

// helloRetryRequest returns the start of a server's answer: what the wall looks at,
// and some more.
func helloRetryRequest() []byte {
	b := []byte{0x16, 3, 3, 0, 80, 2, 0, 0, 76, 3, 3}
	b = append(b, "\xcf\x21\xad\x74\xe5\x9a\x61\x11\xbe\x1d\x8c\x02\x1e\x65\xb8\x91\xc2\xa2\x11\x16\x7a\xbb\x8c\x5e\x07\x9e\x09\xe2\xc8\xa8\x33\x9c"...)
	return append(b, make([]byte, 85-len(b))...)
}

// TestMailAfterOtherBytes: mail that begins after other bytes have passed is cut
// and recorded.
func TestMailAfterOtherBytes(t *testing.T) {
	for _, first := range []string{
		"HELP\r\n", "XYZZY\r\n", "AUTH PLAIN AGEAYg==\r\n", "\x00", strings.Repeat(" ", 70), strings.Repeat("\r\n", 40), "GET /\r\n", "PROXY TCP4 1.2.3.4 5.6.7.8 1 25\r\n",
	} {
		t.Run(fmt.Sprintf("%.10q", first), func(t *testing.T) {
			w := newWorld(t, func(c *Config) {
				open(c)
				c.SMTP = func(_ context.Context, _ auth.Principal, _ netip.AddrPort, conn net.Conn, _ []byte, _ *tls.Config) {
					conn.Close()
				}
			})
			mail := lenientMail{}
			delivered := make(chan bool, 1)
			w.at(site+":2526", func(c net.Conn) { delivered <- mail.serve(c) })
			c := w.box("i1", policy.Egress{Internet: true}).mustDial(site + ":2526")
			(&mailCase{pieces: [][]byte{[]byte(first), []byte("EHLO x\r\n"), []byte("MAIL FROM:<a@b.test>\r\n"), []byte("RCPT TO:<c@d.test>\r\n"), []byte("DATA\r\nsecret\r\n.\r\n")}, turns: true}).play(c)
			if <-delivered {
				t.Error("delivered")
			}
			w.wait("captured or cut", func(e Event) bool { return e.Kind == Captured || e.Kind == Cut })
		})
	}
}
