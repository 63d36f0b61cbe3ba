package e2bapi

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/sandbox"
)

// InterpreterPort is the TCP port of the code interpreter of a template. The
// SDK shows it the data plane's access token.
const InterpreterPort = 49999

// maxHeader bounds the header of what a service in a sandbox answers, in bytes.
const maxHeader = 256 << 10

// maxHints bounds how many interim answers (1xx) come before the final one.
// Each is passed on, and the transport itself sets no bound to what is.
const maxHints = 16

// IsData reports whether r is for the data plane, that is for something inside
// a sandbox.
func (s *Server) IsData(r *http.Request) bool {
	if _, ok := s.route(r); ok {
		return true
	}
	if r.Header.Get(idHeader) != "" {
		return true // at a host that is not ours: ServeData says so
	}
	// A browser asks whether it may send the headers before it sends them, and
	// the SDK's signed URLs name no sandbox; see signedFor.
	return s.ownHost(r.Host) && (isPreflight(r) && asksFor(r, idHeader) || isSigned(r))
}

// ServeData forwards r to the sandbox that it is for, if the caller may.
func (s *Server) ServeData(w http.ResponseWriter, r *http.Request) {
	t, ok := s.route(r)
	if !t.named || t.port == sandbox.GuestPort {
		allowOrigins(w.Header())
	}
	if isPreflight(r) && (!ok || t.port == sandbox.GuestPort) {
		allowPreflight(w, r)
		return
	}
	if !ok {
		var ref *refusal
		if t, ref = s.unnamed(r); ref != nil {
			refuse(w, r, t, ref)
			return
		}
	}
	leave, ref := s.admit(r, &t)
	if ref == nil {
		defer leave()
		// What is inside may answer before the whole request has come, as a stream
		// of events does. Otherwise net/http would close the request's body then,
		// and the proxy would take that for a failure and cut the stream: on a busy
		// machine commands and watches ended with "terminated".
		_ = http.NewResponseController(w).EnableFullDuplex() // always so with HTTP/2
		s.proxy.ServeHTTP(w, r.WithContext(withTarget(r.Context(), t)))
		return
	}
	refuse(w, r, t, ref)
}

// unnamed returns the target of a request that names none by host or header.
func (s *Server) unnamed(r *http.Request) (target, *refusal) {
	if !isSigned(r) || !s.ownHost(r.Host) {
		return target{}, &refusal{http.StatusMisdirectedRequest, "this server was not told that it has the name in Host: start it with --host or --domain"}
	}
	if !s.limits.maySearch(r) {
		return target{}, &refusal{http.StatusTooManyRequests, "too many signed URLs from this address that no sandbox signed"}
	}
	id := s.signedFor(r)
	if id == "" {
		s.limits.foundNothing(r)
		return target{}, errNoSandbox
	}
	return target{sandbox: id, port: sandbox.GuestPort}, nil
}

// A refusal is why a request does not reach its target, for outside.
type refusal struct {
	status int
	msg    string
}

var (
	errNoSandbox  = &refusal{http.StatusBadGateway, "The sandbox was not found"}
	errPaused     = &refusal{http.StatusBadGateway, "The sandbox is paused and does not resume on traffic"}
	errPortClosed = &refusal{http.StatusBadGateway, "The sandbox is running but port is not open"}
)

// admit decides whether r may go to t, and wakes the sandbox. Who is admitted
// calls leave at the end.
func (s *Server) admit(r *http.Request, t *target) (leave func(), ref *refusal) {
	switch {
	case t.sandbox == "":
		return nil, &refusal{http.StatusBadRequest, idHeader + ": want the id of a sandbox"}
	case t.port == 0:
		return nil, &refusal{http.StatusBadRequest, portHeader + ": want a TCP port from 1 to 65535"}
	case r.Method == http.MethodConnect:
		// It would be a tunnel past everything that is checked here.
		return nil, &refusal{http.StatusMethodNotAllowed, "CONNECT is not for sandboxes"}
	case t.port == sandbox.GuestPort && !strings.HasPrefix(r.URL.Path, "/"):
		return nil, &refusal{http.StatusBadRequest, "path: want one that begins with /"}
	case t.port == sandbox.GuestPort && controlPath(r.URL.Path):
		return nil, &refusal{http.StatusNotFound, "there is nothing at this path"}
	}
	if t.traffic, ref = s.find(r, *t); ref != nil {
		return nil, ref
	}
	open, ref := s.mayEnter(r, *t)
	if ref != nil {
		return nil, ref
	}
	leave, ok := s.visits.enter(t.sandbox, open)
	if !ok {
		return nil, &refusal{http.StatusTooManyRequests, "too many connections to this sandbox"}
	}
	// Who shows nothing learns whether the guest is there and does not wake it.
	if open && t.port == sandbox.GuestPort {
		return leave, nil
	}
	if err := s.boxes.Wake(r.Context(), t.sandbox); err != nil {
		leave()
		return nil, s.refusalFor(r.Context(), *t, err)
	}
	return leave, nil
}

// find returns how t may be reached. What is not running is looked for in the
// database, and anyone may ask for ids that they make up; so that is bounded
// for each address, but for ids that were there a moment ago.
func (s *Server) find(r *http.Request, t target) (sandbox.Traffic, *refusal) {
	now := time.Now()
	if s.limits.missing.take(addressOf(r), 0, now) > 0 && !s.limits.ids.has(t.sandbox, now) {
		return sandbox.Traffic{}, &refusal{http.StatusTooManyRequests, "too many requests for sandboxes that are not there from this address"}
	}
	traffic, ok := s.boxes.Traffic(t.sandbox)
	if !ok {
		s.limits.missing.take(addressOf(r), 1, now)
		return traffic, errNoSandbox
	}
	s.limits.ids.add(t.sandbox, now)
	return traffic, nil
}

// mayEnter decides whether r may reach t. It is open if nothing had to be
// shown for that.
func (s *Server) mayEnter(r *http.Request, t target) (open bool, ref *refusal) {
	access := s.boxes.AccessToken(t.sandbox)
	shown := same(r.Header.Get("X-Access-Token"), access.Reveal())
	switch t.port {
	case sandbox.GuestPort:
		switch {
		case shown:
			return false, nil
		case r.URL.Path == "/health" && r.Method == http.MethodGet:
			return true, nil
		case r.URL.Path == "/files":
			if msg := checkSignature(r, access.Reveal(), time.Now()); msg != "" {
				return false, &refusal{http.StatusUnauthorized, msg}
			}
			return false, nil
		}
		return false, &refusal{http.StatusUnauthorized, "missing or wrong X-Access-Token"}
	case InterpreterPort:
		if shown {
			return false, nil
		}
		// It runs code, and needs a token also where other ports are public.
		t.traffic.Public = false
	}
	if same(r.Header.Get("E2b-Traffic-Access-Token"), s.boxes.TrafficToken(t.sandbox).Reveal()) {
		return false, nil
	}
	// The defaults are closed, unlike E2B's: both the operator and the creator
	// must have opened it.
	if t.traffic.Public && s.conf.PublicPorts {
		return true, nil
	}
	return false, &refusal{http.StatusForbidden, "missing or wrong e2b-traffic-access-token"}
}

// controlPath reports whether only the host may ask the guest for path.
func controlPath(path string) bool {
	switch strings.TrimRight(path, "/") {
	case "/init", "/warm", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade":
		return true
	}
	// The guest's router cleans paths; what is not clean here could become one
	// of the above there.
	return strings.Contains(path, "//") || strings.Contains(path, "/.")
}

type targetKey struct{}

// withTarget hands t through httputil.ReverseProxy, whose hooks see only the
// request. It also ends a sandbox's endless interim answers.
func withTarget(ctx context.Context, t target) context.Context {
	hints := 0
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		Got1xxResponse: func(code int, _ textproto.MIMEHeader) error {
			if hints++; hints > maxHints {
				return errors.New("too many interim answers")
			}
			return nil
		},
	})
	return context.WithValue(ctx, targetKey{}, t)
}

func targetOf(ctx context.Context) target {
	t, _ := ctx.Value(targetKey{}).(target)
	return t
}

// secrets are the request headers that are meant for this server alone. What
// is inside is hostile: it gets no credential that a client or a browser sent
// along for the host.
var secrets = []string{"X-Access-Token", "X-Api-Key", "E2b-Traffic-Access-Token", sandbox.ChannelHeader, InboxKeyHeader, idHeader, portHeader}

func (s *Server) newProxy(inside http.RoundTripper) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Transport:     newRoads(inside),
		FlushInterval: -1, // streams of events must not wait in a buffer
		BufferPool:    &buffers,
		Rewrite: func(p *httputil.ProxyRequest) {
			t := targetOf(p.In.Context())
			traffic := t.traffic
			p.Out.URL.Scheme = "http"
			if slices.Contains(traffic.HTTPSPorts, t.port) {
				p.Out.URL.Scheme = "https"
			}
			port := strconv.Itoa(int(t.port))
			p.Out.URL.Host = t.sandbox + ":" + port
			p.Out.Host = p.In.Host
			// The server fills this map in when the body has been read; the copy
			// of it that was made for Out would stay empty.
			p.Out.Trailer = p.In.Trailer
			h := p.Out.Header
			for _, k := range secrets {
				h.Del(k)
			}
			dropCookie(h)
			if t.port == sandbox.GuestPort {
				h.Set(sandbox.ChannelHeader, s.boxes.ChannelKey(t.sandbox).Reveal())
			} else if traffic.MaskHost != "" {
				p.Out.Host = strings.ReplaceAll(traffic.MaskHost, "${PORT}", port)
			}
			// On a connection that has been upgraded nothing is checked any more:
			// to the guest, which has no use for it, and to HTTP/2 in disguise it
			// would carry requests that never passed here.
			if up := h.Get("Upgrade"); t.port == sandbox.GuestPort || strings.Contains(strings.ToLower(up), "h2c") {
				h.Del("Upgrade")
				h.Del("Connection")
				h.Del("Http2-Settings")
			}
		},
		ModifyResponse: func(resp *http.Response) error {
			t := targetOf(resp.Request.Context())
			disarm(resp.Header, t.named)
			disarmTrailers(resp, t.named)
			if !t.named || t.port == sandbox.GuestPort {
				allowOrigins(resp.Header)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if errors.Is(err, context.Canceled) && r.Context().Err() != nil {
				return // The caller has left; nobody reads an answer.
			}
			t := targetOf(r.Context())
			refuse(w, r, t, s.refusalFor(r.Context(), t, err))
		},
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// refusalFor is the one table from errors on the way inside to answers. What
// it does not know is not told: it may speak of the host.
func (s *Server) refusalFor(ctx context.Context, t target, err error) *refusal {
	switch {
	case errors.Is(err, sandbox.ErrNotFound):
		return errNoSandbox
	case errors.Is(err, sandbox.ErrPaused):
		return errPaused
	case errors.Is(err, sandbox.ErrBusy):
		return &refusal{http.StatusConflict, "The sandbox is changing its state; try again soon"}
	case errors.Is(err, sandbox.ErrFull):
		return &refusal{http.StatusTooManyRequests, "The sandbox cannot resume now: there are too many sandboxes"}
	case errors.Is(err, sandbox.ErrPortClosed):
		return errPortClosed
	}
	s.log.DebugContext(ctx, "proxy to sandbox", "sandbox", t.sandbox, "port", t.port, "err", err)
	return &refusal{http.StatusBadGateway, "The sandbox did not answer as HTTP wants"}
}

// roads are the ways to a service inside: HTTP/1.1, and HTTP/2 without TLS for
// gRPC, which speaks nothing else.
type roads struct {
	plain, grpc http.RoundTripper
}

// newRoads bounds what the fleet's transport takes from a sandbox.
func newRoads(inside http.RoundTripper) http.RoundTripper {
	base, ok := inside.(*http.Transport)
	if !ok {
		return inside
	}
	t := base.Clone()
	// Bodies pass through the larger buffers of copyBuffers and not these as well.
	t.ReadBufferSize, t.WriteBufferSize = 16<<10, 16<<10
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := base.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &wideConn{c}, nil
	}
	t.MaxResponseHeaderBytes = maxHeader
	// A client that waits for leave to send its body waits for the service's.
	t.ExpectContinueTimeout = time.Second
	// For httpsPorts: what serves inside has a certificate that nobody knows,
	// and the link to it is not one that others can listen on.
	t.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} //nolint:gosec // as E2B documents httpsPorts; see above
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	g := t.Clone()
	g.Protocols = new(http.Protocols)
	g.Protocols.SetUnencryptedHTTP2(true)
	g.Protocols.SetHTTP2(true)
	return &roads{t, g}
}

// RoundTrip implements [http.RoundTripper].
func (r *roads) RoundTrip(req *http.Request) (*http.Response, error) {
	// Interim answers are passed on as they come, and not through ModifyResponse:
	// a 103 could set the cookies that the final answer must not. This hook is
	// the newest, so it sees their fields before the one that passes them on.
	named := targetOf(req.Context()).named
	req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(_ int, h textproto.MIMEHeader) error {
			disarm(http.Header(h), named)
			return nil
		},
	}))
	if req.ProtoMajor == 2 && strings.HasPrefix(req.Header.Get("Content-Type"), "application/grpc") {
		return r.grpc.RoundTrip(req)
	}
	return r.plain.RoundTrip(req)
}

// copySize is the size of the buffers that bodies pass through, in bytes: two
// packets of a sandbox's link. Smaller ones leave its packets half empty, which
// costs both ends of it.
const copySize = 128 << 10

var buffers copyBuffers

// A wideConn is a connection into a sandbox to which request bodies are copied
// in large pieces; the transport's own are of 32 KiB.
type wideConn struct{ net.Conn }

// ReadFrom implements [io.ReaderFrom].
func (c *wideConn) ReadFrom(r io.Reader) (int64, error) {
	b := buffers.Get()
	defer buffers.Put(b)
	return io.CopyBuffer(struct{ io.Writer }{c.Conn}, r, b)
}

// CloseWrite ends the stream to the service and leaves the other open.
func (c *wideConn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// copyBuffers lends buffers, one for each body that is under way.
type copyBuffers struct{ pool sync.Pool }

// Get implements [httputil.BufferPool].
func (c *copyBuffers) Get() []byte {
	if b, ok := c.pool.Get().(*[]byte); ok {
		return *b
	}
	return make([]byte, copySize)
}

// Put implements [httputil.BufferPool].
func (c *copyBuffers) Put(b []byte) { c.pool.Put(&b) }

// visits counts the requests that are under way to each sandbox, so that
// neither their callers nor a sandbox that never answers take all of the
// server's memory: a request costs about a third of a mebibyte.
type visits struct {
	max int // for those who showed a token, and again for those who need none

	mu sync.Mutex // guards by
	by map[visit]int
}

// A visit is counted apart when anyone may make it: a stranger must not use up
// what the owner needs.
type visit struct {
	sandbox string
	open    bool
}

func (v *visits) enter(id string, open bool) (leave func(), ok bool) {
	k := visit{id, open}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.by[k] >= v.max {
		return nil, false
	}
	v.by[k]++
	return func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.by[k]--; v.by[k] == 0 {
			delete(v.by, k)
		}
	}, true
}
