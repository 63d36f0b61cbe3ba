package inspect

import (
	"fmt"
	"net/http"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"postern/internal/outgoing"
	"postern/internal/policy"
)

// hopByHop are the fields that are for one connection only (RFC 9110 §7.6.1), and
// those that servers and clients of old treat so.
func hopByHop() []string {
	return []string{"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade", "Http2-Settings"}
}

// read returns the request as it would leave. It refuses what servers could read
// differently than we do.
func (s *session) read(in *http.Request) (*outgoing.Request, *refusal) {
	host, port, ok := authority(in.Host)
	switch want := s.conn; {
	case want.Misdirected != "":
		return nil, misdirected(want.Misdirected)
	case !ok:
		return nil, malformed("the host of the request is malformed")
	case host != want.Host || port != "" && port != strconv.Itoa(int(want.Dst.Port())):
		// The attack: a server that many names share serves the one in Host, which
		// nobody has judged. RFC 9110 §15.5.20: a client may repeat the request on
		// another connection.
		return nil, misdirected(fmt.Sprintf("this connection is for %s: a request for %s needs its own", want.Host, clip(in.Host)))
	}
	switch in.Method {
	case http.MethodConnect:
		return nil, denied("CONNECT is refused: what a tunnel carries could not be judged")
	case http.MethodTrace:
		// The attack: its answer has the request's header with the secrets in it
		// (RFC 9110 §9.3.8).
		return nil, denied("TRACE is refused: the answer would repeat the header with its secrets")
	}
	if in.Method != strings.ToUpper(in.Method) {
		return nil, malformed("the method is not in upper case")
	}
	if in.URL.Host != "" && in.URL.Scheme != s.scheme() || in.URL.Opaque != "" || in.URL.User != nil {
		return nil, malformed("the target of the request is not a path on this host")
	}
	path := in.URL.EscapedPath()
	if path == "" {
		path = "/"
	}
	if path == "*" && in.Method != http.MethodOptions {
		return nil, malformed("the target * is for OPTIONS only")
	}
	if why := ambiguousPath(path, in.URL.Path); why != "" {
		return nil, malformed(why)
	}
	// The attack: in HTTP/2 a query may have a space, which ends the target in HTTP/1.1
	// (RFC 9112 §3). Some servers cut off a fragment, which no request has.
	if strings.ContainsFunc(in.URL.RawQuery, func(c rune) bool { return c <= ' ' || c == 0x7f || c == '#' }) {
		return nil, malformed("the query has a space, a control character or #")
	}
	r := &outgoing.Request{
		Method: in.Method, Scheme: s.scheme(), Host: host, Port: s.conn.Dst.Port(), Path: path, Query: in.URL.RawQuery,
		Header: in.Header.Clone(), Size: in.ContentLength, Inbox: s.l.who.Inbox,
	}
	switch {
	case in.ContentLength < 0:
		r.Size = outgoing.UnknownSize
	case in.ContentLength == 0:
		r.Whole = true
	}
	if (in.Method == http.MethodGet || in.Method == http.MethodHead) && in.ContentLength < 0 && in.ProtoMajor == 1 {
		return nil, malformed("a " + in.Method + " request with a chunked body is refused (RFC 9110 §9.3.1)")
	}
	stripHopByHop(r.Header)
	delete(r.Header, "Host")
	delete(r.Header, "Content-Length")
	// The attack: a rule denies /admin/, and the server takes the path from X-Original-URL,
	// or the host from X-Forwarded-Host. Only a proxy that the server trusts writes these.
	for name := range r.Header {
		if outgoing.RoutingField(name) {
			delete(r.Header, name)
		}
	}
	// Some servers merge trailers into the header (RFC 9110 §6.5.1), long after it was judged.
	for name := range in.Trailer {
		if outgoing.OverrideField(name) {
			return nil, malformed("the trailer " + clip(name) + " could change how the request is read")
		}
	}
	for name, values := range r.Header {
		for _, v := range values {
			if !httpguts.ValidHeaderFieldValue(v) {
				return nil, malformed("the value of the header field " + clip(name) + " has control characters")
			}
		}
	}
	return r, nil
}

func (s *session) scheme() string {
	if s.conn.TLS {
		return "https"
	}
	return "http"
}

// authority splits the host of a request, "name" or "name:port". The name is
// normalised.
func authority(hostport string) (host, port string, ok bool) {
	host, port, _ = strings.Cut(hostport, ":")
	if p, err := strconv.ParseUint(port, 10, 16); port != "" && (err != nil || strconv.Itoa(int(p)) != port) || strings.HasSuffix(hostport, ":") {
		return "", "", false
	}
	host, err := policy.Name(host)
	return host, port, err == nil && host != ""
}

// ambiguousPath says why servers and rules could read a path differently: with dot
// segments, also encoded, or with control characters. Clients remove dot segments
// before they send a request (RFC 3986 §5.2.4). The attack: "/public/%2e%2e/admin"
// against a rule about /public/.
func ambiguousPath(escaped, decoded string) string {
	if escaped != "*" && !strings.HasPrefix(escaped, "/") {
		return "the path does not begin with /"
	}
	for seg := range strings.FieldsFuncSeq(decoded, func(r rune) bool { return r == '/' || r == '\\' }) {
		// Some servers cut off what follows a semicolon (RFC 3986 §3.3).
		seg, _, _ = strings.Cut(seg, ";")
		if twice, err := url.PathUnescape(seg); err == nil {
			seg = twice
		}
		if seg == "." || seg == ".." || strings.Contains(seg, "../") || strings.Contains(seg, `..\`) {
			return `the path has a segment "." or ".."`
		}
	}
	if strings.ContainsFunc(decoded, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return "the path has control characters"
	}
	return ""
}

// stripHopByHop removes the fields that are for this connection only, also those
// that Connection names. The only one that is kept is "TE: trailers", which gRPC
// needs.
func stripHopByHop(h http.Header) {
	trailers := httpguts.HeaderValuesContainsToken(h["Te"], "trailers")
	for _, v := range h["Connection"] {
		for name := range strings.SplitSeq(v, ",") {
			delete(h, textproto.CanonicalMIMEHeaderKey(textproto.TrimString(name)))
		}
	}
	for _, name := range hopByHop() {
		delete(h, name)
	}
	if trailers {
		h["Te"] = []string{"trailers"}
	}
}

// plainName returns the name of a header field as programs of the CGI kind see it:
// they take "_" for "-", and do not know case.
func plainName(name string) string {
	return strings.ReplaceAll(strings.ToLower(name), "_", "-")
}

// set sets a header field, whatever the program has sent. The attack: X_Api_Key
// beside X-Api-Key, which servers of the CGI kind take for one field.
func set(h http.Header, name, value string) {
	plain := plainName(name)
	for other := range h {
		if plainName(other) == plain {
			delete(h, other)
		}
	}
	h[textproto.CanonicalMIMEHeaderKey(name)] = []string{value}
}

func clip(s string) string { return s[:min(len(s), 255)] }
