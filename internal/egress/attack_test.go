package egress

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
)

// The attackers here combine, from one seed, what servers are known to skip, the
// attack, and cuts between its pieces. Each case is also run without the wall, so
// that the test fails if the attacker is harmless.

// A lenientMail is a mail server that skips everything before the first command
// that it knows, and accepts commands in any form and lines with any end.
type lenientMail struct {
	quirks mailQuirks
}

type mailQuirks struct {
	late   bool // greets after the program's first bytes
	packet bool // takes each packet for a line
	proxy  bool // takes the PROXY protocol's second version off
	socks  bool // is behind a SOCKS 5 proxy
	tunnel bool // is behind an HTTP proxy
}

// serve reports whether the connection delivered a message, or hid from us what it
// said.
func (l *lenientMail) serve(c net.Conn) (delivered bool) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	buf := make([]byte, 4<<10)
	var in []byte
	read := func() bool {
		n, err := c.Read(buf)
		in = append(in, buf[:n]...)
		return n > 0 || err == nil
	}
	switch {
	case l.quirks.socks: // one method, then a request with an IPv4 address
		for len(in) < 3+10 {
			if len(in) >= 3 && in[0] == 5 {
				io.WriteString(c, "\x05\x00")
			}
			if !read() {
				return false
			}
		}
		if in[0] != 5 || in[3] != 5 {
			return false
		}
		in = in[13:]
		io.WriteString(c, "\x05\x00\x00\x01\x01\x02\x03\x04\x00\x19")
	case l.quirks.tunnel:
		for !bytes.Contains(in, []byte("\r\n\r\n")) {
			if !read() {
				return false
			}
		}
		if !bytes.HasPrefix(in, []byte("CONNECT ")) {
			return false
		}
		_, in, _ = bytes.Cut(in, []byte("\r\n\r\n"))
		io.WriteString(c, "HTTP/1.1 200 Connection established\r\n\r\n")
	case l.quirks.late:
		if !read() {
			return false
		}
	}
	io.WriteString(c, "220 mx.test ESMTP\r\n")
	if l.quirks.proxy {
		for len(in) < 16 && read() {
		}
		if len(in) >= 28 && bytes.HasPrefix(in, []byte("\r\n\r\n\x00\r\nQUIT\n")) {
			in = in[28:]
		}
	}
	var mail, rcpt bool
	var line []byte
	do := func() {
		cmd := strings.ToUpper(string(bytes.TrimLeft(unseen(line), " \t")))
		line = line[:0]
		word := cmd[:min(4, len(cmd))]
		reply := "250 ok\r\n"
		switch {
		case word == "":
			return
		case word == "MAIL" || word == "SEND" || word == "SOML" || word == "SAML":
			mail = true
		case word == "RCPT" && mail:
			rcpt = true
		case (word == "DATA" || word == "BDAT") && rcpt:
			delivered = true
			reply = "354 go on\r\n"
		case strings.HasPrefix(cmd, "STARTTLS"):
			delivered = true // from here on the wall sees nothing
			reply = "220 go on\r\n"
		case slices.Contains([]string{"EHLO", "HELO", "LHLO", "NOOP", "RSET", "RCPT", "DATA"}, word):
		default:
			reply = "500 what?\r\n"
		}
		_, _ = io.WriteString(c, reply)
	}
	for {
		for _, b := range in {
			switch b {
			case '\r', '\n':
				do()
			default:
				if line = append(line, b); len(line) == 511 {
					do()
				}
			}
		}
		in = in[:0]
		if l.quirks.packet {
			do()
		}
		if !read() {
			do()
			return delivered
		}
	}
}

// unseen clears eighth bits and removes invisible bytes.
func unseen(line []byte) (out []byte) {
	for _, b := range line {
		if b &= 0x7f; b >= ' ' && b < 0x7f || b == '\t' {
			out = append(out, b)
		}
	}
	return out
}

// A mailCase is one connection of the attacker.
type mailCase struct {
	pieces [][]byte
	turns  bool // waits a moment for an answer to each
	quirks mailQuirks
}

func newMailCase(r *rand.Rand) (mc mailCase) {
	pick := func(s ...string) string { return s[r.IntN(len(s))] }
	eol := pick("\r\n", "\r\n", "\r\n", "\n", "\r")
	proxy2 := "\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c\x01\x02\x03\x04\x05\x06\x07\x08AAAA"
	junk := []string{
		"HELP" + eol, "XYZZY" + eol, "AUTH PLAIN AGEAYg==" + eol, "AUTH LOGIN" + eol, "\x00", strings.Repeat(" ", 70), strings.Repeat("\r\n", 40),
		"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n", "POST / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 400\r\n\r\n", "get /" + eol,
		"PROXY TCP4 1.2.3.4 5.6.7.8 1 25\r\n", "SSH-2.0-x\r\n", "\x16\x03\x01\x00\x05hello" + eol, "\x16\x03\x01\x02\x00", "\x80\x2e\x01\x00\x02" + eol,
		strings.Repeat("a", 511), strings.Repeat("b", 700) + eol, strings.Repeat("c", 5000) + eol, "USER anonymous" + eol, "*1\r\n$4\r\nPING\r\n",
		"\x00\x00\x00\x08\x04\xd2\x16\x2f", "NOOP" + eol, "RSET" + eol, "HELLO" + eol, "EHL" + eol, "\xff\xfb\x01", "\x04\x01\x00\x19\x01\x02\x03\x04\x00",
		"MAILX" + eol, "a001 LOGIN a b" + eol, "<?xml version='1.0'?><stream:stream>" + eol, "CAPA" + eol, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	}
	var parts []string
	switch r.IntN(12) {
	case 0:
		mc.quirks.proxy = true
		parts = append(parts, proxy2)
	case 1:
		mc.quirks.socks = true
		parts = append(parts, "\x05\x01\x00", "\x05\x01\x00\x01\x01\x02\x03\x04\x00\x19")
	case 2:
		mc.quirks.tunnel = true
		parts = append(parts, "CONNECT mx.test:25 HTTP/1.1\r\nHost: mx.test:25\r\n\r\n")
	case 3:
		mc.quirks.packet = true
		eol = pick("", "\n")
	}
	mc.quirks.late = r.IntN(3) == 0
	for range r.IntN(4) {
		parts = append(parts, junk[r.IntN(len(junk))])
	}
	say := func(word, arg string) {
		b := []byte(word)
		switch r.IntN(8) {
		case 0:
			b = bytes.ToLower(b)
		case 1:
			b[r.IntN(len(b))] |= 0x80
		case 2:
			b = slices.Insert(b, r.IntN(len(b)), pick("\x00", "\x01", "\x7f")[0])
		case 3:
			b[r.IntN(len(b))] ^= 0x20
		}
		lead := pick("", "", "", " ", "\t", "\x00", strings.Repeat(" ", 100))
		parts = append(parts, lead+string(b)+arg+eol)
	}
	if r.IntN(2) == 0 {
		say(pick("EHLO", "HELO", "LHLO"), " x")
	}
	if r.IntN(8) == 0 {
		say("STARTTLS", "")
	}
	say(pick("MAIL", "MAIL", "MAIL", "SEND", "SOML", "SAML"), pick(" FROM:<a@b.test>", "\tFROM:<>", " <a@b.test>"))
	if r.IntN(6) == 0 {
		parts = append(parts, strings.Repeat("d", 511))
	}
	say("RCPT", pick(" TO:<victim@c.test>", "\tTO:<v@c.test>", " <v@c.test>", "TO:<v@c.test>", ":<v@c.test>"))
	say(pick("DATA", "DATA", "BDAT"), pick("", " 5 LAST"))
	parts = append(parts, "Subject: x\r\n\r\nsecret\r\n.\r\n")
	switch mc.turns = r.IntN(3) == 0; {
	case mc.quirks.packet, mc.turns, r.IntN(2) == 0: // a write for each
		for _, p := range parts {
			mc.pieces = append(mc.pieces, []byte(p))
		}
	case r.IntN(3) == 0: // cuts anywhere
		for all := []byte(strings.Join(parts, "")); len(all) > 0; {
			n := 1 + r.IntN(min(len(all), 40))
			mc.pieces, all = append(mc.pieces, all[:n]), all[n:]
		}
	default:
		mc.pieces = [][]byte{[]byte(strings.Join(parts, ""))}
	}
	return mc
}

// play sends a case over c and reads until the other side has ended.
func (mc *mailCase) play(c net.Conn) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	answers := make(chan struct{}, 1)
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 4<<10)
		for {
			if _, err := c.Read(buf); err != nil {
				return
			}
			select {
			case answers <- struct{}{}:
			default:
			}
		}
	}()
	for _, p := range mc.pieces {
		if _, err := c.Write(p); err != nil {
			break
		}
		if mc.turns || mc.quirks.packet {
			select {
			case <-answers:
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		_ = h.CloseWrite()
	}
	<-read
}

// TestMailGoesThroughTheGate attacks with mail conversations behind everything that
// a lenient server skips. No server may get a message, and the record must show
// each one that would have been accepted.
func TestMailGoesThroughTheGate(t *testing.T) {
	cases := make([]int, 3000)
	if testing.Short() {
		cases = cases[:300]
	}
	for i := range cases {
		cases[i] = i
	}
	bites, holes := sendMail(t, cases, 50*time.Millisecond)
	t.Logf("%d of %d cases delivered where there was no wall", bites, len(cases))
	if bites < len(cases)*2/3 {
		t.Error("the attacker has no teeth")
	}
	// On a busy machine, a server may need longer to greet. Then the wall
	// cannot know what it is, and only what happens with the usual time, too, is a hole.
	t.Logf("to be played once more: %v", holes)
	_, holes = sendMail(t, slices.Sorted(maps.Keys(holes)), 5*time.Second)
	for _, hole := range holes {
		t.Error(hole)
	}
}

// sendMail plays cases with and without a wall that waits so long for a server to
// greet. It returns how many delivered a message where there was no wall, and what
// was wrong in the cases where the wall failed.
func sendMail(t *testing.T, cases []int, greeting time.Duration) (bites int, holes map[int]string) {
	t.Helper()
	var mu sync.Mutex
	holes = map[int]string{}
	handled, due, played := map[netip.AddrPort]bool{}, map[netip.AddrPort]int{}, map[int]string{}
	w := newWorld(t, func(c *Config) {
		open(c)
		c.Limits = Limits{NewConnections: 1e6, Questions: 1e6, Records: 1e6, SniffTimeout: greeting, DialTimeout: time.Minute, Window: time.Hour}
		c.Record = func(_ context.Context, _ auth.Principal, e Event) error {
			mu.Lock()
			defer mu.Unlock()
			handled[e.Dst] = handled[e.Dst] || e.Kind == Denied || e.Kind == Cut || e.Kind == Captured
			return nil
		}
		c.SMTP = func(_ context.Context, _ auth.Principal, _ netip.AddrPort, conn net.Conn, _ []byte, _ *tls.Config) {
			conn.Close()
		}
	})
	byAddress, byName := w.box("i1", policy.Egress{Internet: true}), w.box("i2", named)
	run := func(n int) (bites bool) {
		i := cases[n]
		r := rand.New(rand.NewPCG(11, uint64(i)))
		mc := newMailCase(r)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Error(err)
			return false
		}
		defer l.Close()
		serve := func() <-chan bool {
			done := make(chan bool, 1)
			go func() {
				c, err := l.Accept()
				if err != nil {
					done <- false
					return
				}
				s := lenientMail{quirks: mc.quirks}
				done <- s.serve(c)
			}()
			return done
		}
		done := serve()
		direct, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Error(err)
			return false
		}
		mc.play(direct)
		bites = <-done

		host := fmt.Sprintf("93.%d.%d.34", 100+i/250, 1+i%250)
		port := []string{"2526", "80", "443", "8025"}[r.IntN(4)]
		dst := netip.MustParseAddrPort(host + ":" + port)
		w.standsFor(dst.String(), l)
		b := byAddress
		if r.IntN(2) == 0 {
			b = byName
			name := fmt.Sprintf("n%d.allowed.test", i)
			w.says(name, host)
			w.learn("i2", name, host)
		}
		done = serve()
		c, err := b.dial(dst.String())
		if err != nil {
			t.Errorf("case %d: dial: %v", i, err)
			return false
		}
		mc.play(c)
		l.Close() // where nothing was dialled
		took := <-done
		mu.Lock()
		defer mu.Unlock()
		played[i] = fmt.Sprintf("case %d, at %v: %+q %+v", i, dst, mc.pieces, mc.quirks)
		if took {
			holes[i] = "the server took mail past the wall: " + played[i]
		}
		if bites {
			due[dst] = i
		}
		return bites
	}
	bites = inParallel(len(cases), run)
	w.wall.Detach("i1") // now all is on record
	w.wall.Detach("i2")
	for dst, i := range due {
		if !handled[dst] && holes[i] == "" {
			holes[i] = "nothing on record: " + played[i]
		}
	}
	return bites, holes
}

// learn makes a sandbox's resolver know an address by a name.
func (w *world) learn(id, name, addr string) {
	a, err := w.wall.find(id)
	if err != nil {
		w.tb.Error(err)
		return
	}
	a.names.learn(name, []netip.Addr{netip.MustParseAddr(addr)}, func(string) bool { return false })
}

// inParallel runs cases and counts the results that are true.
func inParallel(cases int, run func(i int) bool) (n int) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	next := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range next {
				if run(i) {
					mu.Lock()
					n++
					mu.Unlock()
				}
			}
		})
	}
	for i := range cases {
		next <- i
	}
	close(next)
	wg.Wait()
	return n
}

// A lenientWeb is one way in which a server may parse requests.
type lenientWeb struct {
	lastHost, at, underscore bool // which Host counts; the part behind "@"; "_" for "-"
	cr                       bool // a bare CR ends a line
	firstLength, lengthWins  bool // of two; over Transfer-Encoding
	websocket                bool // it takes upgrades
	noBody                   bool // GET and HEAD have none
	strictMethod             bool
}

// hosts returns the hosts of all requests in b, the bytes of one connection.
func (l lenientWeb) hosts(b []byte) (out []string) {
	line := func() (string, bool) {
		i := bytes.IndexByte(b, '\n')
		if l.cr {
			i = bytes.IndexAny(b, "\r\n")
		}
		if i < 0 {
			return "", false
		}
		s := string(bytes.TrimRight(b[:i], "\r"))
		if b = b[i+1:]; l.cr && len(b) > 0 && b[0] == '\n' {
			b = b[1:]
		}
		return s, true
	}
	for {
		first, ok := line()
		if !ok {
			return out
		}
		words := strings.Fields(strings.Trim(first, " \t\x00"))
		if len(words) < 2 || l.strictMethod && strings.ToUpper(words[0]) != words[0] || strings.HasSuffix(words[0], ":") {
			continue // it passes over what it does not understand
		}
		var host, upgrade string
		var lengths []int64
		var chunks bool
		if _, after, ok := strings.Cut(words[1], "://"); ok {
			host, _, _ = strings.Cut(after, "/")
			_, after, ok := strings.Cut(host, "@")
			if ok {
				host = after
			}
		}
		fromTarget := host != ""
		for {
			f, ok := line()
			if !ok {
				return out // no request yet
			}
			if f == "" {
				break
			}
			k, v, _ := strings.Cut(strings.Trim(f, " \t\x00"), ":")
			k, v = strings.ToLower(strings.Trim(k, " \t")), strings.Trim(v, " \t\x00\v\f")
			if l.underscore {
				k = strings.ReplaceAll(k, "_", "-")
			}
			switch k {
			case "host":
				if fromTarget || host != "" && !l.lastHost {
					continue
				}
				if before, after, ok := strings.Cut(v, "@"); ok {
					if v = after; l.at {
						v = before
					}
				}
				host, _, _ = strings.Cut(v, ":")
				host = strings.Trim(strings.TrimSuffix(host, "."), "[] ")
			case "content-length":
				n, _ := strconv.ParseInt(strings.TrimLeft(v, "+ "), 10, 64)
				lengths = append(lengths, n)
			case "transfer-encoding":
				chunks = chunks || strings.Contains(strings.ToLower(v), "chunked")
			case "upgrade":
				upgrade = v
			}
		}
		out = append(out, strings.ToLower(host))
		if l.websocket && upgrade == "websocket" {
			return out
		}
		if l.noBody && (strings.EqualFold(words[0], "GET") || strings.EqualFold(words[0], "HEAD")) {
			continue
		}
		if chunks && (len(lengths) == 0 || !l.lengthWins) {
			for {
				s, ok := line()
				if !ok {
					return out
				}
				s, _, _ = strings.Cut(s, ";")
				n, _ := strconv.ParseInt(strings.TrimPrefix(strings.Trim(s, " \t"), "0x"), 16, 64)
				if n <= 0 || n > int64(len(b)) {
					break
				}
				b = b[n:]
				if s, ok := line(); !ok || s != "" {
					break
				}
			}
			for s, ok := line(); ok && s != ""; s, ok = line() {
			}
			continue
		}
		if len(lengths) > 0 {
			n := lengths[len(lengths)-1]
			if l.firstLength {
				n = lengths[0]
			}
			b = b[max(0, min(n, int64(len(b)))):]
		}
	}
}

const evilHost = "evil.test"

// newWebCase returns the bytes of an attacker who may connect to goodHost.
func newWebCase(r *rand.Rand, goodHost string) (pieces [][]byte) {
	pick := func(s ...string) string { return s[r.IntN(len(s))] }
	// odd is mostly what everybody sends.
	odd := func(usual string, others ...string) string {
		if r.IntN(6) > 0 {
			return usual
		}
		return pick(others...)
	}
	request := func(host string) string {
		eol := odd("\r\n", "\n", "\r", "\r\r\n")
		method := odd(pick("GET", "POST", "PUT", "DELETE"), "get", "Post", "M-SEARCH", "VERSION-CONTROL", "HEAD", "OPTIONS", "X", "PRI", "TRACE", "G\x00ET", "\xc7ET", "CONNECT", strings.Repeat("M", 40))
		target := odd(pick("/", "/a?b=c"), "http://"+host+"/", "http://"+goodHost+"/", "http://"+goodHost+"@"+host+"/", "//"+host+"/", "*", "HTTP://"+host, "http:/"+host, "/\xa0x", "https://"+host+"/", host+":80")
		s := odd("", "\r\n", "\n", " ", "\t", "\x00", "XYZZY\r\n", "SSH-2.0-x\r\n", "\r", "HTTP/1.1 200 OK\r\n\r\n") +
			method + odd(" ", "\t", "  ", "\v") + target + odd(" HTTP/1.1", " HTTP/1.0", "", " HTTP/0.9", " HTTP/2.0", " http/1.1", "\tHTTP/1.1", " HTTP/1.1 ", " HTTP/1.10") + eol
		s += odd("Host: "+host+eol,
			"host:"+host+"."+eol, "Host: "+host+":80@"+goodHost+eol, "Host: "+goodHost+"@"+host+eol, "Host: "+goodHost+"\rHost: "+host+eol, "Host: "+goodHost+eol+"Host: "+host+eol,
			"Host: "+host+eol+"Host: "+goodHost+eol, "Host : "+host+eol, "Host: "+goodHost+eol+" "+host+eol, " Host: "+host+eol, "X: y"+eol+"\tHost: "+host+eol+"Host: "+goodHost+eol,
			"Host:\x00"+host+eol, "Host: "+goodHost+"\nHost: "+host+eol, "Host: "+goodHost+" "+host+eol, "Host: "+goodHost+","+host+eol, "Host: ["+host+"]"+eol, "Host: "+host+"#@"+goodHost+eol,
			"", "Ho\x00st: "+host+eol, "Host: "+host+"\x0b"+eol, "Host: "+strings.ToUpper(host)+":8080"+eol, "Host: %65vil.test"+eol, "Connection: host"+eol+"Host: "+goodHost+eol)
		if r.IntN(3) == 0 {
			s += pick("Connection: keep-alive", "Accept: */*", "X-Y: \xff", "Connection: close", "Expect: 100-continue", "Cookie: a=b", "Upgrade: h2c", "Upgrade: websocket\r\nConnection: Upgrade") + eol
		}
		inner := "GET / HTTP/1.1\r\nHost: " + evilHost + "\r\n\r\n"
		switch r.IntN(8) {
		case 0:
			s += "Content-Length: " + odd(strconv.Itoa(len(inner)), "0", "+5", "5, 5", "-1", "1e2", " 3 ", "99999999999999999999") + eol + eol + inner
		case 1:
			s += "Content-Length: 5" + eol + odd("Content-Length: 5", "Content-Length: 50", "Content_Length: 50", "Content-Length : 50") + eol + eol + "hello"
		case 2:
			s += odd("Transfer-Encoding: chunked", "Transfer-Encoding: xchunked", "Transfer-Encoding : chunked", "Transfer_Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: chunked\r\nContent-Length: 3", "Content-Length: 3\r\nTransfer-Encoding: chunked", "Transfer-Encoding:\vchunked", "Transfer-Encoding: \xffchunked") + eol + eol
			s += odd(fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(inner), inner), "5\nhello\n0\n\n"+inner, "0x5\r\nhello\r\n0\r\n\r\n", "5 \r\nhello\r\n0\r\n\r\n", "5;a=\nb\r\nhello\r\n0\r\n\r\n", "-1\r\n\r\n", "5\r\nhelloX\r\n0\r\n\r\n",
				"5\r\nhello0\r\n\r\n"+inner, "FFFFFFFFFFFFFFFFF5\r\nhello\r\n0\r\n\r\n", "0\r\nHost: "+evilHost+"\r\n\r\n", "0\r\nX: y\n\r\n"+inner, "0\r\n\r"+inner, "5;"+strings.Repeat("x", 300)+"\r\nhello\r\n0\r\n\r\n")
		default:
			s += eol
		}
		return s
	}
	var all string
	n := 1 + r.IntN(4)
	bad := r.IntN(n)
	for i := range n {
		host := goodHost
		if i == bad {
			host = evilHost
		}
		all += request(host)
	}
	switch r.IntN(3) {
	case 0:
		return [][]byte{[]byte(all)}
	case 1:
		for _, p := range strings.SplitAfter(all, "\r\n\r\n") {
			pieces = append(pieces, []byte(p))
		}
		return pieces
	default:
		for b := []byte(all); len(b) > 0; {
			k := 1 + r.IntN(min(len(b), 30))
			pieces, b = append(pieces, b[:k]), b[k:]
		}
		return pieces
	}
}

// TestRequestsAreJudged attacks with requests for a forbidden host at the address
// of an allowed one. No server may see one of them, however it parses.
func TestRequestsAreJudged(t *testing.T) {
	cases := 4000
	if testing.Short() {
		cases = 400
	}
	var mu sync.Mutex
	refused, due := map[netip.AddrPort]bool{}, map[netip.AddrPort][][]byte{}
	w := newWorld(t, func(c *Config) {
		open(c)
		c.Limits = Limits{NewConnections: 1e6, Questions: 1e6, Records: 1e6, SniffTimeout: 50 * time.Millisecond, DialTimeout: time.Minute, Window: time.Hour}
		c.Record = func(_ context.Context, _ auth.Principal, e Event) error {
			mu.Lock()
			defer mu.Unlock()
			refused[e.Dst] = refused[e.Dst] || e.Kind == Denied || e.Kind == Cut
			return nil
		}
	})
	b := w.box("i1", named)
	passed := 0
	run := func(i int) (bites bool) {
		r := rand.New(rand.NewPCG(12, uint64(i)))
		flip := func() bool { return r.IntN(2) == 0 }
		server := lenientWeb{flip(), flip(), flip(), flip(), flip(), flip(), flip(), flip(), flip()}
		silent := r.IntN(20) == 0 // for so long that the wall stops waiting for a name

		dst := fmt.Sprintf("94.%d.%d.34:%d", 100+i/250, 1+i%250, []int{80, 80, 443}[r.IntN(3)])
		host := netip.MustParseAddrPort(dst).Addr().String()
		arrived := make(chan []byte, 1)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Error(err)
			return false
		}
		defer l.Close()
		go func() {
			c, err := l.Accept()
			if err != nil {
				arrived <- nil
				return
			}
			defer c.Close()
			var got []byte
			buf := make([]byte, 4<<10)
			for {
				n, err := c.Read(buf)
				got = append(got, buf[:n]...)
				if err != nil {
					break
				}
				answer := "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
				if server.websocket && bytes.Contains(got, []byte("\r\nUpgrade: websocket\r\n")) {
					answer = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
				}
				_, _ = io.WriteString(c, answer)
			}
			arrived <- got
		}()
		name := fmt.Sprintf("n%06d.allowed.test", i)
		pieces := newWebCase(r, name)
		bites = slices.Contains(server.hosts(bytes.Join(pieces, nil)), evilHost)
		w.says(name, host)
		w.standsFor(dst, l)
		w.learn("i1", name, host)
		c, err := b.dial(dst)
		if err != nil {
			t.Errorf("case %d: dial: %v", i, err)
			return false
		}
		if silent {
			time.Sleep(80 * time.Millisecond)
		}
		mc := mailCase{pieces: pieces}
		mc.play(c)
		l.Close()
		got := <-arrived
		if hosts := server.hosts(got); slices.Contains(hosts, evilHost) {
			t.Errorf("case %d: the server saw a request for %v\n%+q\narrived %q\n%+v", i, hosts, pieces, got, server)
		}
		mu.Lock()
		defer mu.Unlock()
		if len(got) > 0 {
			passed++
		}
		if bites {
			due[netip.MustParseAddrPort(dst)] = pieces
		}
		return bites
	}
	bites := inParallel(cases, run)
	w.wall.Detach("i1") // now all is on record
	for dst, pieces := range due {
		if !refused[dst] {
			t.Errorf("nothing on record of %v: %+q", dst, pieces)
		}
	}
	t.Logf("%d of %d cases reached the host where there was no wall; of %d something arrived", bites, cases, passed)
	if bites < cases/2 || passed == 0 {
		t.Error("the attacker has no teeth")
	}
}
