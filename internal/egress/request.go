package egress

import (
	"bytes"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// maxRequestHead bounds a request's head, in bytes. Web servers accept 8 to 64 KiB.
const maxRequestHead = 64 << 10

// A request is the parsed head of an HTTP/1 request in the strict form of RFC 9112.
// If two servers could parse a head differently, problem says so.
type request struct {
	host      string // requested host as written, without port
	length    int64  // bytes of the body; -1 means chunked
	websocket bool   // it asks for an upgrade to WebSocket (RFC 6455) and nothing else
	upgrade   bool   // it has Upgrade fields
	problem   string // why it is refused, for a person; empty if it is not
}

// A headScan finds the end of a request's head in a growing buffer.
type headScan struct {
	at    int // bytes scanned
	line  int // start of the current line
	lines int // complete lines
	space bool
}

// next continues the scan in b, which begins with everything scanned before. It
// returns the length of the head, or zero if the head is incomplete.
func (h *headScan) next(b []byte) (end int, problem string) {
	for ; h.at < len(b); h.at++ {
		c := b[h.at]
		col := h.at - h.line
		switch {
		case c == '\n':
			if col == 0 || b[h.at-1] != '\r' {
				return 0, "the HTTP request has a line that does not end in CR LF" // RFC 9112 §2.2
			}
			if col == 1 {
				if h.lines == 0 {
					return 0, "the HTTP request begins with an empty line"
				}
				return h.at + 1, ""
			}
			if h.lines == 0 && !h.space {
				return 0, "the HTTP request line is malformed"
			}
			h.lines, h.line = h.lines+1, h.at+1
		case col > 0 && b[h.at-1] == '\r':
			return 0, "the HTTP request has a bare CR"
		case c == '\r':
		case c < ' ' && c != '\t' || c == 0x7f:
			return 0, "the HTTP request has control characters"
		case h.lines == 0 && !h.space:
			switch h.space = c == ' ' && col > 0; {
			case h.space:
			case c >= 'a' && c <= 'z':
				// RFC 9110 §9.1: methods are case-sensitive. Some servers take
				// "get" for GET. Others skip the line, and would take the body for
				// the next request.
				return 0, "the HTTP request's method is not in upper case"
			case !tokenByte(c) || col >= 32:
				return 0, "the HTTP request line is malformed"
			}
		}
	}
	if len(b) > maxRequestHead {
		return 0, fmt.Sprintf("the head of the HTTP request is longer than %d bytes", maxRequestHead)
	}
	return 0, ""
}

// parseRequest parses a head that headScan found.
func parseRequest(head []byte) (r request) {
	lines := bytes.Split(bytes.TrimSuffix(head, []byte("\r\n\r\n")), []byte("\r\n"))
	method, target, minor, ok := requestLine(lines[0])
	if !ok {
		r.problem = "the HTTP request line is malformed"
		return r
	}
	var f fields
	for _, l := range lines[1:] {
		if r.problem = f.read(l); r.problem != "" {
			r.host = clip(authorityHost(f.host))
			return r
		}
	}
	r.host = clip(authorityHost(f.host))
	fromTarget, problem := targetHost(method, target)
	if fromTarget != "" {
		// RFC 9112 §3.2.2: the host of the target takes precedence; here both must
		// be equal.
		if r.host = clip(authorityHost(fromTarget)); problem == "" && f.hosts > 0 && !sameHost(fromTarget, f.host) {
			problem = "the HTTP request names two hosts"
		}
	}
	if problem == "" {
		problem = f.body(minor)
	}
	switch {
	case problem != "":
	case f.hosts == 0 && minor == 1:
		problem = "the HTTP request has no Host field" // RFC 9112 §3.2
	case f.hosts > 0 && !plainAuthority(f.host):
		problem = "the HTTP Host field is malformed"
	case f.length != 0 && (method == "GET" || method == "HEAD" || method == "TRACE"):
		// RFC 9110 §9.3.1: some servers expect no body here, and would take it for
		// another request, which was not judged.
		problem = "an HTTP " + method + " request with a body is not passed on"
	}
	r.problem, r.length, r.upgrade = problem, f.length, f.upgrades > 0
	r.websocket = f.upgrades == 1 && f.websocket && f.length == 0 && method == "GET" && minor == 1
	return r
}

// requestLine splits a request line (RFC 9112 §3).
func requestLine(l []byte) (method, target string, minor int, ok bool) {
	p := strings.Split(string(l), " ")
	if len(p) != 3 || p[0] == "" || p[1] == "" || (p[2] != "HTTP/1.1" && p[2] != "HTTP/1.0") {
		return "", "", 0, false
	}
	for i := range len(p[0]) {
		if !tokenByte(p[0][i]) {
			return "", "", 0, false
		}
	}
	// Programs send letters outside ASCII in paths without escaping them.
	if strings.IndexByte(p[1], '\t') >= 0 {
		return "", "", 0, false
	}
	return p[0], p[1], int(p[2][7] - '0'), true
}

// targetHost returns the authority of a request's target, if it has one.
func targetHost(method, target string) (authority, problem string) {
	switch {
	case method == "CONNECT":
		// The host would be a proxy, whose destination policy cannot judge.
		return target, "HTTP CONNECT through an allowed host is not allowed"
	case target[0] == '/', target == "*" && method == "OPTIONS":
		return "", ""
	case len(target) >= 7 && strings.EqualFold(target[:7], "http://"):
		authority = target[7:]
		if i := strings.IndexAny(authority, "/?#"); i >= 0 {
			authority = authority[:i]
		}
		if !plainAuthority(authority) {
			return authority, "the target of the HTTP request is malformed"
		}
		return authority, ""
	default:
		return "", "the target of the HTTP request is malformed"
	}
}

// plainAuthority reports whether s is a host with an optional port. RFC 3986 §3.2
// allows more, and servers disagree about which part is the host:
// "evil.test:80@good.test".
func plainAuthority(s string) bool {
	if h, port, ok := strings.Cut(s, ":"); ok {
		if port == "" || len(port) > 5 || strings.Trim(port, "0123456789") != "" {
			return false
		}
		s = h
	}
	for i := range len(s) {
		if c := s[i]; (c|0x20 < 'a' || c|0x20 > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' && c != '.' {
			return false
		}
	}
	return s != ""
}

// authorityHost returns the host of an authority, also of a malformed one, for the
// record.
func authorityHost(s string) string {
	s = s[strings.LastIndexByte(s, '@')+1:]
	if i := strings.LastIndexByte(s, ':'); i >= 0 && !strings.HasSuffix(s, "]") {
		return s[:i]
	}
	return s
}

// sameHost reports whether two authorities name the same host, without their
// ports.
func sameHost(a, b string) bool {
	return strings.EqualFold(strings.TrimSuffix(authorityHost(a), "."), strings.TrimSuffix(authorityHost(b), "."))
}

// fields are the fields of a head or trailer that determine its host and its
// length.
type fields struct {
	trailer   bool
	host      string
	hosts     int
	length    int64 // -1 means chunked
	lengths   int
	chunked   bool
	upgrades  int
	websocket bool
}

// read parses one field line (RFC 9112 §5).
func (f *fields) read(l []byte) (problem string) {
	i := bytes.IndexByte(l, ':')
	if i <= 0 {
		return "the HTTP request has a malformed field"
	}
	for _, c := range l[:i] {
		if !tokenByte(c) { // a space before the colon, or a folded line
			return "the HTTP request has a malformed field"
		}
	}
	name, value := strings.ToLower(string(l[:i])), string(bytes.Trim(l[i+1:], " \t"))
	switch strings.ReplaceAll(name, "_", "-") {
	case "host", "content-length", "transfer-encoding":
		// CGI programs see no difference between "Content_Length" and
		// "Content-Length".
		if f.trailer || strings.Contains(name, "_") {
			return "the HTTP request has a malformed field"
		}
	}
	switch name {
	case "host":
		if f.hosts++; f.hosts > 1 {
			return "the HTTP request names two hosts"
		}
		f.host = value
	case "content-length":
		n, err := strconv.ParseUint(value, 10, 63)
		if f.lengths++; err != nil || value[0] == '+' || f.lengths > 1 {
			return "the HTTP request has a malformed Content-Length"
		}
		f.length = int64(n)
	case "transfer-encoding":
		if f.chunked || !strings.EqualFold(value, "chunked") {
			return "the HTTP request has a Transfer-Encoding other than chunked"
		}
		f.chunked = true
	case "upgrade":
		f.upgrades++
		f.websocket = strings.EqualFold(value, "websocket")
	case "connection":
		// RFC 9110 §7.6.1: a proxy behind the server would remove these fields.
		for v := range strings.SplitSeq(strings.ToLower(value), ",") {
			switch strings.Trim(v, " \t") {
			case "host", "content-length", "transfer-encoding":
				return "the HTTP request has a malformed Connection field"
			}
		}
	case "expect":
		// Servers disagree on whether a body follows an unknown expectation.
		if !strings.EqualFold(value, "100-continue") {
			return "the HTTP request has an Expect field other than 100-continue"
		}
	}
	return ""
}

// body determines how the body is delimited (RFC 9112 §6).
func (f *fields) body(minor int) (problem string) {
	switch {
	case f.chunked && f.lengths > 0:
		return "the HTTP request has both Content-Length and Transfer-Encoding"
	case f.chunked && minor == 0:
		return "the HTTP/1.0 request has a Transfer-Encoding"
	case f.chunked:
		f.length = -1
	}
	return ""
}

// tokenByte reports whether c may be in a token (RFC 9110 §5.6.2).
func tokenByte(c byte) bool {
	return c|0x20 >= 'a' && c|0x20 <= 'z' || c >= '0' && c <= '9' || c > ' ' && strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}

// withoutUpgrade returns a head without its Upgrade fields. RFC 9110 §7.8 lets
// every intermediary remove them, and we cannot parse the other protocols. The
// server then answers without an upgrade.
func withoutUpgrade(head []byte) []byte {
	var out []byte
	for l := range bytes.SplitAfterSeq(head, []byte("\r\n")) {
		if i := bytes.IndexByte(l, ':'); i < 0 || !bytes.EqualFold(l[:i], []byte("Upgrade")) {
			out = append(out, l...)
		}
	}
	return out
}

// A chunked parses a chunked body (RFC 9112 §7.1).
type chunked struct {
	left    int64 // bytes left in the current chunk
	line    []byte
	ends    bool // the line end after a chunk is expected
	trailer bool // the last chunk has been read
}

const (
	maxChunkLine = 256
	maxTrailer   = 8 << 10
)

// next returns how many bytes of p belong to the body, and whether the body has
// ended.
func (c *chunked) next(p []byte) (n int, over bool, problem string) {
	for n < len(p) {
		if c.left > 0 {
			k := min(c.left, int64(len(p)-n))
			n, c.left = n+int(k), c.left-k
			c.ends = c.left == 0
			continue
		}
		b := p[n]
		c.line = append(c.line, b)
		n++
		if b != '\n' {
			most := maxChunkLine
			if c.trailer {
				most = maxTrailer
			}
			switch {
			case len(c.line) > 1 && c.line[len(c.line)-2] == '\r', len(c.line) > most,
				b < ' ' && b != '\r' && b != '\t', b == 0x7f, c.ends && len(c.line) > 2:
				return n, false, "the HTTP request has a malformed chunk"
			}
			continue
		}
		l, ok := bytes.CutSuffix(c.line, []byte("\r\n"))
		if !ok {
			return n, false, "the HTTP request has a malformed chunk"
		}
		switch {
		case c.ends:
			if ok, c.ends = len(l) == 0, false; !ok {
				return n, false, "the HTTP request has a malformed chunk"
			}
		case c.trailer && len(l) == 0:
			return n, true, ""
		case c.trailer:
			f := fields{trailer: true}
			if problem := f.read(l); problem != "" {
				return n, false, problem
			}
		default:
			if c.left, ok = chunkSize(l); !ok {
				return n, false, "the HTTP request has a malformed chunk"
			}
			c.trailer = c.left == 0
		}
		c.line = c.line[:0]
	}
	return n, false, ""
}

// chunkSize parses the line before a chunk. Extensions are ignored.
func chunkSize(l []byte) (int64, bool) {
	digits, _, _ := bytes.Cut(l, []byte(";"))
	if len(digits) == 0 || len(digits) > 15 {
		return 0, false
	}
	for _, d := range digits {
		if (d < '0' || d > '9') && (d|0x20 < 'a' || d|0x20 > 'f') {
			return 0, false
		}
	}
	n, err := strconv.ParseInt(string(digits), 16, 64)
	return n, err == nil && n < math.MaxInt64
}
