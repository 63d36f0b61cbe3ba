package egress

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"postern/internal/policy"
	"postern/internal/sandbox"
)

func FuzzQuestion(f *testing.F) {
	long := strings.Repeat(strings.Repeat("a", 62)+".", 4)
	f.Add(query("example.com.", dnsmessage.TypeA))
	f.Add(query(".", dnsmessage.TypeTXT))
	f.Add(query(long, dnsmessage.TypeA))
	for _, version := range []uint8{0, 1} {
		f.Add(withEDNS(query(long, dnsmessage.TypeA), version))
		f.Add(withEDNS(withEDNS(query("a.test.", 65), version), version))
	}
	f.Add([]byte{0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xc0, 12, 0, 1, 0, 1})
	f.Add(make([]byte, 12))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, problem, drop := question(b)
		if drop {
			return
		}
		answers := []answer{problem}
		if problem.why == "" {
			answers = []answer{
				{addrs: slices.Repeat([]netip.Addr{sandbox.LinkGateway}, maxAnswers)},
				{addrs: []netip.Addr{sandbox.LinkAddress}, ede: edeForged, why: strings.Repeat("x", 1000)},
				{code: dnsmessage.RCodeNameError, ede: edeBlocked, why: "no \xff\n"},
			}
		}
		for _, ans := range answers {
			out := reply(r, ans)
			if out == nil {
				continue
			}
			if len(out) > maxReply {
				t.Errorf("the reply has %d bytes", len(out))
			}
			var m dnsmessage.Message
			if err := m.Unpack(out); err != nil || m.ID != r.header.ID || !m.Response {
				t.Errorf("the reply cannot be read: %v %+v", err, m)
			}
			// RFC 6891 §6.1.1: an OPT record in the answer if one was in the question.
			if (len(m.Additionals) == 1) != r.edns || len(m.Additionals) > 1 {
				t.Errorf("got %d additional records; the question had an OPT record: %v", len(m.Additionals), r.edns)
			}
		}
	})
}

// clientHello returns the first message of a TLS client.
func clientHello(name string) []byte {
	a, b := net.Pipe()
	go func() {
		a.SetDeadline(time.Now().Add(time.Minute))
		tls.Client(a, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake()
	}()
	defer b.Close()
	buf := make([]byte, 1<<14)
	n, _ := b.Read(buf)
	return buf[:n]
}

func FuzzSniff(f *testing.F) {
	hello := clientHello("example.com")
	f.Add(hello)
	split := append([]byte{0x16, 3, 1, 0, 10}, hello[5:15]...) // in two records
	split = append(split, 0x16, 3, 1, byte((len(hello)-15)>>8), byte(len(hello)-15))
	f.Add(append(split, hello[15:]...))
	f.Add(clientHello(""))
	f.Add([]byte("GET / HTTP/1.1\r\nHost: Example.com:80\r\n\r\n"))
	f.Add([]byte("GET http://a@b.test/?x HTTP/1.1\nHOST: b.test.\n\n"))
	f.Add([]byte("CONNECT a:25 HTTP/1.1\r\n\r\n"))
	f.Add([]byte("EHLO x\r\n"))
	f.Add([]byte("NOOP\r\nEHLO x\r\n"))
	f.Add([]byte("EHLO " + strings.Repeat("x", 100))) // was passed when longer than maxBlank
	f.Add([]byte("SSH-2.0-x\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 2*maxRequestHead {
			return
		}
		at := sniff(bytes.NewReader(b), nil)
		// How the bytes come in pieces must not change where they go.
		dripped := sniff(iotest.OneByteReader(bytes.NewReader(b)), nil)
		if at.name != dripped.name && at.problem == "" && dripped.problem == "" {
			t.Errorf("at once %q, one by one %q", at.name, dripped.name)
		}
		for _, s := range []sniffed{at, dripped} {
			if !bytes.HasPrefix(b, s.head) {
				t.Error("bytes were changed")
			}
			if s.problem == "" && s.name != "" {
				if n, err := policy.Name(s.name); err != nil || n != s.name {
					t.Errorf("%q is no name: %v", s.name, err)
				}
			}
		}
	})
}

func TestSniffSplitHello(t *testing.T) {
	hello := clientHello("Example.com")
	split := append([]byte{0x16, 3, 1, 0, 10}, hello[5:15]...)
	split = append(split, 0x16, 3, 1, byte((len(hello)-15)>>8), byte(len(hello)-15))
	split = append(split, hello[15:]...)
	for name, b := range map[string][]byte{"one record": hello, "two records": split} {
		if s := sniff(iotest.OneByteReader(bytes.NewReader(b)), nil); s.name != "example.com" || s.problem != "" || !s.tls {
			t.Errorf("%s: got %q %q", name, s.name, s.problem)
		}
	}
	if s := sniff(bytes.NewReader(append([]byte("GET / HTTP/1.1\r\nX: "), bytes.Repeat([]byte("a"), 2*maxRequestHead)...)), nil); s.problem == "" {
		t.Error("an endless header is no problem")
	}
}

func FuzzInspect(f *testing.F) {
	w := newWorld(f, func(c *Config) { c.Limits.Records = 1 })
	w.bare("i1", "", policy.Egress{Internet: true})
	a, _ := w.wall.find("i1")
	f.Add(syn(sandbox.LinkAddress, sandbox.LinkGateway, 1, 80))
	f.Add(packet(sandbox.LinkAddress, netip.MustParseAddr("8.8.8.8"), 17, make([]byte, 8)))
	f.Add(packet(sandbox.LinkAddress, netip.MustParseAddr("8.8.8.8"), 1, make([]byte, 8)))
	f.Add([]byte{0x60})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, p []byte) {
		if a.inspect(t.Context(), bytes.Clone(p)) && (len(p) < 28 || p[0] != 0x45 || !bytes.Equal(p[12:16], []byte{10, 0, 0, 2})) {
			t.Errorf("let through %x", p)
		}
	})
}

// FuzzRequest: Go's server parses an accepted head in the same way, and finds the
// same end of the body. How the bytes are cut into pieces changes nothing.
func FuzzRequest(f *testing.F) {
	for _, s := range []string{
		"GET / HTTP/1.1\r\nHost: example.com\r\n\r\nGET /",
		"POST http://example.com/a HTTP/1.1\r\nHost: Example.com.:80\r\nContent-Length: 5\r\n\r\nhelloGET /",
		"PUT /a HTTP/1.1\r\nhost:example.com\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\nGET /",
		"OPTIONS * HTTP/1.0\r\nHost: example.com\r\nUpgrade: websocket\r\nExpect: 100-continue\r\nConnection: a, host\r\n\r\n",
		"M-SEARCH / HTTP/1.1\r\nHost: a\rHost: b\r\n folded\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var scan, piecewise headScan
		end, problem := scan.next(b)
		for i := 1; i <= len(b) && len(b) <= maxRequestHead; i++ {
			e, p := piecewise.next(b[:i])
			if e > 0 || p != "" || i == len(b) {
				if e != end || p != problem {
					t.Fatalf("at once %d %q, one by one %d %q", end, problem, e, p)
				}
				break
			}
		}
		if end == 0 || problem != "" {
			return
		}
		r := parseRequest(b[:end])
		if r.problem != "" {
			return
		}
		rest := b[end:]
		if r.length < 0 {
			var c chunked
			n, over, problem := c.next(rest)
			if problem != "" || !over {
				return
			}
			rest = rest[n:]
		} else if r.length > int64(len(rest)) {
			return
		} else {
			rest = rest[r.length:]
		}
		in := bufio.NewReaderSize(bytes.NewReader(b), len(b)+16)
		theirs, err := http.ReadRequest(in)
		if err != nil {
			return // it is stricter, about paths
		}
		if got := authorityHost(theirs.Host); got != r.host && r.host != "" {
			t.Errorf("the host is %q, Go's is %q", r.host, got)
		}
		if theirs.ContentLength != r.length {
			t.Errorf("the length is %d, Go's is %d", r.length, theirs.ContentLength)
		}
		if _, err := io.Copy(io.Discard, theirs.Body); err != nil {
			return
		}
		if left, _ := io.ReadAll(in); !bytes.Equal(left, rest) {
			t.Errorf("%q is left, Go leaves %q", rest, left)
		}
	})
}

// FuzzMailWatch: no line that begins with RCPT passes unnoticed, however the bytes
// are cut.
func FuzzMailWatch(f *testing.F) {
	f.Add([]byte("HELP\r\nRCPT TO:<a@b.test>\r\n"), uint16(7))
	f.Add([]byte("\x00 \trC\x00pT\tTO:<a@b.test>"), uint16(3))
	f.Add(append(bytes.Repeat([]byte("a"), 511), "RCPT TO:<a>"...), uint16(500))
	f.Add([]byte("\x05\x01\x00\nSTARTTLS \r\n"), uint16(12))
	f.Fuzz(func(t *testing.T, b []byte, cut uint16) {
		var want bool
		for _, l := range bytes.FieldsFunc(b, func(r rune) bool { return r == '\r' || r == '\n' }) {
			l := bytes.TrimLeft(plain(l), " ")
			want = want || bytes.HasPrefix(l, []byte("RCPT")) || bytes.HasPrefix(l, []byte("STARTTLS ")) || len(l) == 8 && string(l) == "STARTTLS"
		}
		k := min(int(cut), len(b))
		for name, pieces := range map[string][][]byte{"at once": {b, []byte("\n")}, "in two": {b[:k], b[k:], []byte("\n")}, "one by one": append(slices.Collect(slices.Chunk(b, 1)), []byte("\n"))} {
			var m mailWatch
			var s mailSign
			for _, p := range pieces {
				s |= m.read(p)
			}
			if want && s&delivery == 0 {
				t.Errorf("%s: not seen", name)
			}
		}
	})
}
