package inspect

import (
	"compress/gzip"
	"compress/zlib"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"
	"syscall"

	"postern/internal/inject"
	"postern/internal/outgoing"
	"postern/internal/policy"
)

// forward makes the request and streams the answer back.
func (x *exchange) forward(ctx context.Context) *refusal {
	r := *x.r
	r.Header = x.r.Header.Clone()
	if x.asked { // while a person decided, a secret may have been made
		if bad := x.guard(ctx); bad != nil {
			return bad
		}
		if len(x.guarded) > 0 {
			x.askPlain(r.Header)
		}
	}
	mask, bad := x.putIn(ctx, &r)
	if bad != nil {
		return bad
	}
	out, bad := x.outgoing(ctx, &r, mask)
	if bad != nil {
		return bad
	}
	t := x.s.transport(x.upgrade)
	if x.asked {
		// What was approved once is made once. On a connection that was idle the library
		// would repeat a request that got no answer.
		t = x.s.newTransport(x.upgrade)
		defer t.CloseIdleConnections()
	}
	resp, err := t.RoundTrip(out)
	x.endInterim()
	if err != nil {
		x.tellStays(context.WithoutCancel(ctx))
		return x.failed(ctx, err)
	}
	defer resp.Body.Close()
	masked := hide(mask, resp.Header, resp.Trailer)
	if resp.StatusCode == http.StatusSwitchingProtocols {
		x.status = resp.StatusCode
		return x.switched(ctx, resp, mask, masked)
	}
	defer mask.Wipe()
	body, bad := x.answerBody(resp, mask, len(x.guarded) > 0)
	if bad != nil {
		return bad
	}
	x.answerHead(resp)
	err = x.answer(body)
	masked += hide(mask, resp.Trailer) // the library has put in the values
	for name, values := range resp.Trailer {
		for _, v := range values {
			x.w.Header().Add(http.TrailerPrefix+name, v)
		}
	}
	if m, ok := body.(*inject.MaskedReader); ok {
		masked += m.Hits()
	}
	x.made(ctx, masked)
	if err != nil {
		// The program must not take what it has read for all of the answer.
		panic(http.ErrAbortHandler)
	}
	return nil
}

// hide masks all the fields that an answer has: its header, its trailers, whose names
// are announced before their values come, or the header of an interim answer. It returns
// how many it masked. A nil mask has no values.
func hide(mask *inject.Mask, fields ...http.Header) (masked int) {
	if mask == nil {
		return 0
	}
	for _, h := range fields {
		masked += mask.Header(h)
	}
	return masked
}

// guard reads whose values are masked in the answer besides those of the sandbox's own
// secrets. While that is not known, the request is refused.
func (x *exchange) guard(ctx context.Context) *refusal {
	var err error
	if x.guarded, err = x.s.l.guarded(ctx, x.s.conn.Host); err != nil {
		x.s.l.log.ErrorContext(ctx, "secrets of a project cannot be read", "err", err)
		return unavailable("the secrets of the project cannot be read at the moment")
	}
	return nil
}

// askPlain changes a request so that a value in the answer can be found: the answer must
// be plain and whole.
func (x *exchange) askPlain(h http.Header) {
	h["Accept-Encoding"] = []string{"identity"}
	delete(h, "Range")
	delete(h, "If-Range")
	if x.upgrade {
		delete(h, "Sec-Websocket-Extensions") // permessage-deflate (RFC 7692)
	}
}

// putIn replaces the sentinels in r by values. The mask hides these in the answer, those
// of the host's other secrets, and guarded ones; it is nil if there are none.
func (x *exchange) putIn(ctx context.Context, r *outgoing.Request) (*inject.Mask, *refusal) {
	values, list := map[string]inject.Value{}, []inject.Value{}
	defer func() {
		for _, v := range list {
			v.Wipe()
		}
	}()
	open := func(s *inject.Secret) *refusal {
		if _, ok := values[s.ID]; ok {
			return nil
		}
		v, err := x.s.l.in.cfg.Secrets.Open(ctx, x.s.l.who, s.ID)
		if err != nil {
			x.s.l.log.ErrorContext(ctx, "secret cannot be opened", "secret", s.ID, "err", err)
			return unavailable("the secret " + s.Name + " cannot be opened at the moment")
		}
		values[s.ID] = v
		list = append(list, v)
		return nil
	}
	for _, u := range r.Uses {
		for i := range x.secrets {
			s := &x.secrets[i]
			if u.Sentinel != s.Sentinel && (s.AccessKey == "" || u.Sentinel != s.AccessKey) {
				continue
			}
			if bad := open(s); bad != nil {
				return nil, bad
			}
		}
	}
	for _, s := range x.echoes() {
		if bad := open(s); bad != nil {
			return nil, bad
		}
	}
	for _, g := range x.guarded {
		if _, ok := values[g.ID]; ok && g.Former == 0 {
			continue
		}
		v, err := x.s.l.in.cfg.Secrets.(Guards).OpenGuarded(ctx, x.s.l.who, g)
		if errors.Is(err, inject.ErrGone) {
			continue // it was deleted just now, or its time is over
		}
		if err != nil {
			x.s.l.log.ErrorContext(ctx, "secret cannot be opened", "secret", g.ID, "err", err)
			return nil, unavailable("a secret of " + x.s.conn.Host + " cannot be opened at the moment")
		}
		list = append(list, v) // for the mask alone
	}
	if len(list) == 0 {
		return nil, nil
	}
	if err := inject.Apply(r, x.secrets, values); err != nil {
		return nil, denied("the secrets cannot be put into the request: " + err.Error())
	}
	return inject.NewMask(list...), nil
}

// outgoing returns the request for the transport.
func (x *exchange) outgoing(ctx context.Context, r *outgoing.Request, mask *inject.Mask) (*http.Request, *refusal) {
	u := &url.URL{}
	if r.Path != "*" {
		var err error
		if u, err = url.ParseRequestURI(r.Path); err != nil || u.Host != "" || u.EscapedPath() != r.Path {
			return nil, malformed("the path is malformed")
		}
	} else {
		u.Path = "*"
	}
	host := r.Host
	if r.Scheme == "https" && r.Port != 443 || r.Scheme == "http" && r.Port != 80 {
		host = net.JoinHostPort(r.Host, strconv.Itoa(int(r.Port)))
	}
	u.Scheme, u.Host, u.RawQuery = r.Scheme, host, r.Query
	body, length := x.rest(r.Body)
	body = x.watched(body)
	if r.Header.Get("User-Agent") == "" {
		r.Header["User-Agent"] = []string{""} // none, instead of the library's
	}
	if x.upgrade {
		r.Header["Connection"] = []string{"Upgrade"}
	}
	if x.r.Whole {
		delete(r.Header, "Expect") // the body has been read: nobody waits
	}
	out := &http.Request{
		Method: r.Method, URL: u, Host: host, Header: r.Header, ContentLength: length, Body: io.NopCloser(body), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}
	if body == http.NoBody {
		out.Body = http.NoBody
	}
	if !x.r.Whole && len(x.in.Trailer) > 0 {
		out.Trailer = x.in.Trailer // the library fills in the values at the end of the body
	}
	return out.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			head := http.Header(h).Clone()
			hide(mask, head)
			if code == http.StatusContinue {
				return nil // sent when the body is read
			}
			x.interim(code, head)
			return nil
		},
	})), nil
}

// interim sends an interim answer (RFC 9110 §15.2), unless the answer has begun. The
// transport calls it on goroutines of its own.
func (x *exchange) interim(code int, head http.Header) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.begun {
		return
	}
	h := x.w.Header()
	copyHeader(h, head)
	x.w.WriteHeader(code)
	clear(h)
}

// endInterim keeps interim answers from being sent after it has returned.
func (x *exchange) endInterim() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.begun = true
}

// failed says why a request got no answer. The library's error can have parts of
// the request, so that only known errors are shown.
func (x *exchange) failed(ctx context.Context, err error) *refusal {
	host := x.s.conn.Host
	var cert *tls.CertificateVerificationError
	var name x509.HostnameError
	var netErr net.Error
	x.mu.Lock()
	broken, method := x.broken, x.method
	x.mu.Unlock()
	switch {
	case errors.Is(context.Cause(ctx), errCut):
		return denied("the request was ended: it is no longer allowed")
	case errors.Is(err, errMethod):
		return methodProblem(method)
	case broken != nil || ctx.Err() != nil:
		return malformed("the program ended the request before its answer, or its body is malformed")
	case errors.As(err, &cert), errors.As(err, &name):
		return refuse(http.StatusBadGateway, "the certificate of "+host+" is not trusted: "+certificateProblem(err))
	case errors.As(err, &netErr) && netErr.Timeout():
		return refuse(http.StatusGatewayTimeout, host+" did not answer in time")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return refuse(http.StatusBadGateway, host+" closed the connection without an answer")
	}
	x.s.l.log.DebugContext(ctx, "request failed", "host", host, "err", kindOf(err))
	return refuse(http.StatusBadGateway, host+" cannot be reached, or its answer is malformed")
}

// kindOf describes an error for the log without its text, which can have what the server
// sent, and so the value of a secret.
func kindOf(err error) string {
	var kinds []string
	for e := err; e != nil; e = errors.Unwrap(e) {
		var n syscall.Errno
		if errors.Unwrap(e) == nil && errors.As(e, &n) {
			kinds = append(kinds, n.Error())
			break
		}
		kinds = append(kinds, fmt.Sprintf("%T", e))
	}
	return strings.Join(kinds, " of ")
}

func certificateProblem(err error) string {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var name x509.HostnameError
	switch {
	case errors.As(err, &unknown):
		return "it is signed by an unknown authority"
	case errors.As(err, &name):
		return "it is for another name"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "it has expired or is not yet valid"
	}
	return "it is not valid"
}

// answerBody returns the body of the answer for the program. If it could have a value, it
// is plain and masked.
func (x *exchange) answerBody(resp *http.Response, mask *inject.Mask, guarded bool) (io.Reader, *refusal) {
	if mask == nil {
		return resp.Body, nil
	}
	none := x.in.Method == http.MethodHead || resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotModified || resp.ContentLength == 0
	encoding := strings.ToLower(strings.TrimSpace(strings.Join(resp.Header["Content-Encoding"], ",")))
	if encoding == "" || encoding == "identity" || none || !guarded && len(x.echoes()) == 0 {
		return mask.Reader(resp.Body), nil
	}
	// The attack: an answer that is compressed although it was asked for plain hides
	// the value from the mask.
	var plain io.Reader
	var err error
	switch encoding {
	case "gzip", "x-gzip":
		plain, err = gzip.NewReader(resp.Body)
	case "deflate":
		plain, err = zlib.NewReader(resp.Body)
	default:
		err = errors.ErrUnsupported
	}
	if err != nil {
		return nil, refuse(http.StatusBadGateway, fmt.Sprintf("the answer of %s is compressed (%s) although it was asked for plain, so secrets in it could not be masked", x.s.conn.Host, clip(encoding)))
	}
	for _, name := range []string{"Content-Encoding", "Content-Length", "Content-Md5", "Digest", "Content-Digest"} {
		delete(resp.Header, name)
	}
	resp.ContentLength = -1
	return mask.Reader(plain), nil
}

// answerHead sends the head of the answer.
func (x *exchange) answerHead(resp *http.Response) {
	h := resp.Header
	stripHopByHop(h)
	delete(h, "Te")
	// HTTP/3 and other hosts would be another way to this one. UDP does not leave a
	// sandbox, so programs would try in vain (RFC 7838).
	delete(h, "Alt-Svc")
	copyHeader(x.w.Header(), h)
	for name := range resp.Trailer {
		x.w.Header().Add("Trailer", name)
	}
	if x.w.Header()["Date"] == nil {
		x.w.Header()["Date"] = nil // no Date of our own
	}
	if x.w.Header()["Content-Type"] == nil {
		x.w.Header()["Content-Type"] = nil // no guess of our own
	}
	x.status = resp.StatusCode
	x.w.WriteHeader(resp.StatusCode)
}

func copyHeader(to, from http.Header) {
	for name, values := range from {
		to[name] = append(to[name], values...)
	}
}

// answer streams the body of the answer. Each piece is sent at once: the next may
// take long.
func (x *exchange) answer(body io.Reader) error {
	rc := http.NewResponseController(x.w)
	buf := make([]byte, 8<<10)
	if err := rc.Flush(); err != nil {
		return err
	}
	for {
		n, err := body.Read(buf)
		if n > 0 {
			x.bytes += int64(n)
			if _, werr := x.w.Write(buf[:n]); werr != nil {
				return werr
			}
			if n < len(buf) {
				if werr := rc.Flush(); werr != nil {
					return werr
				}
			} else if n < 256<<10 {
				buf = make([]byte, 2*n) // grows with the traffic
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// made records a request that was answered.
func (x *exchange) made(ctx context.Context, masked int) {
	ctx = context.WithoutCancel(ctx)
	l := x.s.l
	l.report(ctx, Event{
		Kind: Made, Dst: x.s.conn.Dst, Method: x.r.Method, Scheme: x.r.Scheme, Host: x.r.Host, Path: x.in.URL.EscapedPath(), Status: x.status, Bytes: x.bytes,
	})
	x.tellStays(ctx)
	if masked > 0 {
		x.tell(ctx, Masked, policy.Verdict{Reason: "the answer had the value of a secret, which was masked"})
	}
	if j := l.in.cfg.Judge; j != nil {
		j.Made(ctx, l.who, x.r, fmt.Sprintf("status %d, %d bytes", x.status, x.bytes))
	}
}
