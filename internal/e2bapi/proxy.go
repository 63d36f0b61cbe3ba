package e2bapi

import (
	"context"
	"crypto/tls"
	"errors"
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

	"postern/internal/command"
	"postern/internal/orders"
	"postern/internal/sandbox"
)

// InterpreterPort is the TCP port of the template's code interpreter. The SDK sends
// it the data plane's access token.
const InterpreterPort = 49999

// maxHeader bounds the response header of a service in a sandbox, in bytes.
const maxHeader = 256 << 10

// maxHints bounds the number of interim responses (1xx) before the final one. Each
// is forwarded, and the transport has no limit of its own for those that are.
const maxHints = 16

// IsData reports whether r is for the data plane, that is, for a service in a
// sandbox.
func (s *Server) IsData(r *http.Request) bool {
	if _, ok := s.route(r); ok {
		return true
	}
	if r.Header.Get(idHeader) != "" {
		return true // not our host: ServeData answers with an error
	}
	// Two kinds of requests name no sandbox: a browser's preflight, which comes
	// before the headers, and the SDK's signed URLs (see signedFor).
	return s.ownHost(r.Host) && (isPreflight(r) && asksFor(r, idHeader) || isSigned(r))
}

// ServeData forwards r to its sandbox if the caller may reach it.
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
		// A service may answer before the whole request has been received, for
		// example with a stream of events. Without full duplex net/http would then
		// close the request's body. The proxy takes that for a failure and cuts the
		// stream: on a busy machine commands and watches ended with "terminated".
		_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/2 is always full duplex
		if s.beforeBound(w, r, t) {
			return
		}
		if s.toTools(t) {
			s.serveTools(w, r, t)
			return
		}
		s.forward(w, r, t)
		return
	}
	refuse(w, r, t, ref)
}

// unnamed returns the target of a request whose host and headers name no sandbox.
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

// A refusal is a status and a text for a request that does not reach its target.
type refusal struct {
	status int
	msg    string
}

var (
	errNoSandbox = &refusal{http.StatusBadGateway, "The sandbox was not found"}
	errPaused    = &refusal{http.StatusBadGateway, "The sandbox is paused and does not resume on traffic"}
	// errAsleep and the texts of [noToken] are E2B's.
	errAsleep     = &refusal{http.StatusForbidden, "This sandbox can't be resumed with the credentials provided. Check your access token and try again."}
	errPortClosed = &refusal{http.StatusBadGateway, "The sandbox is running but port is not open"}
)

// admit decides whether r may reach t, and wakes the sandbox. If it is admitted,
// the caller calls leave at the end of the request.
func (s *Server) admit(r *http.Request, t *target) (leave func(), ref *refusal) {
	switch {
	case t.sandbox == "":
		return nil, &refusal{http.StatusBadRequest, idHeader + ": want the id of a sandbox"}
	case t.port == 0:
		return nil, &refusal{http.StatusBadRequest, portHeader + ": want a TCP port from 1 to 65535"}
	case r.Method == http.MethodConnect:
		// It would be a tunnel past all checks of this proxy.
		return nil, &refusal{http.StatusMethodNotAllowed, "CONNECT is not allowed to sandboxes"}
	case t.port == sandbox.GuestPort && !strings.HasPrefix(r.URL.Path, "/"):
		return nil, &refusal{http.StatusBadRequest, "path: want one that begins with /"}
	case t.port == sandbox.GuestPort && controlPath(r.URL.Path):
		return nil, &refusal{http.StatusNotFound, "there is nothing at this path"}
	}
	if t.traffic, ref = s.find(r, *t); ref != nil {
		return nil, ref
	}
	open, ref := s.mayEnter(r, *t)
	if ref != nil && t.traffic.Asleep {
		ref = errAsleep
	}
	if ref != nil {
		return nil, ref
	}
	if ref := boundRefusal(r, *t); ref != nil { // after the credentials, since the refusal names the contract
		return nil, ref
	}
	leave, ok := s.requests.enter(t.sandbox, open)
	if !ok {
		return nil, &refusal{http.StatusTooManyRequests, "too many connections to this sandbox"}
	}
	// A request without credentials learns whether the guest is up, but does not
	// wake the sandbox.
	if open && t.port == sandbox.GuestPort {
		return leave, nil
	}
	if err := s.boxes.Wake(r.Context(), t.sandbox); err != nil {
		leave()
		return nil, s.refusalFor(r.Context(), *t, err)
	}
	return leave, nil
}

// find returns how t may be reached. A sandbox that does not run is looked up in
// the database, and anybody may send made-up IDs. So lookups are rate limited per
// address, except for IDs that existed a moment ago.
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

// mayEnter decides whether r may reach t. Open means that no credential was needed.
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
		// The interpreter runs code, so it needs a token even if other ports are
		// public.
		t.traffic.Public = false
	}
	if same(r.Header.Get(trafficHeader), s.boxes.TrafficToken(t.sandbox).Reveal()) {
		return false, nil
	}
	// Ports are closed by default, unlike E2B's. Both the operator and the creator
	// must have opened them.
	if t.traffic.Public && s.conf.PublicPorts {
		return true, nil
	}
	return false, noToken(r.Header.Get(trafficHeader) == "")
}

// trafficHeader is the header with the token for the ports of a sandbox.
const trafficHeader = "E2b-Traffic-Access-Token"

// noToken is the refusal of a request whose traffic token is missing or wrong.
func noToken(missing bool) *refusal {
	if missing {
		return &refusal{http.StatusForbidden, "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"}
	}
	return &refusal{http.StatusForbidden, "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"}
}

// controlPath reports whether path is one of the guest's that only the host may
// request.
func controlPath(path string) bool {
	switch strings.TrimRight(path, "/") {
	case "/init", "/warm", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade":
		return true
	}
	for _, own := range []string{"/bench", "/template", "/run"} { // steps of builds; start commands; runs
		if path == own || strings.HasPrefix(path, own+"/") {
			return true
		}
	}
	// The guest's router cleans paths, and could turn an unclean one into one of
	// the above.
	return strings.Contains(path, "//") || strings.Contains(path, "/.")
}

// forward passes a request on to its target.
func (s *Server) forward(w http.ResponseWriter, r *http.Request, t target) {
	s.proxy.ServeHTTP(withoutContinue{w}, r.WithContext(withTarget(r.Context(), t)))
}

// withoutContinue does not pass on "100 Continue". net/http sends its own when the
// transport begins to read the body, which it does once the service has said to continue.
// That of the service could follow it, or not, depending on which goroutine is first.
type withoutContinue struct{ http.ResponseWriter }

// WriteHeader writes the head of a response, unless it is "100 Continue".
func (w withoutContinue) WriteHeader(code int) {
	if code != http.StatusContinue {
		w.ResponseWriter.WriteHeader(code)
	}
}

// Unwrap is for [http.ResponseController].
func (w withoutContinue) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// targetKey is the context key of a request's target.
type targetKey struct{}

// withTarget adds t to the context, since the hooks of httputil.ReverseProxy see
// only the request. It also ends a response with endless interim responses.
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

// secrets are request headers meant for this server alone. Services inside are
// hostile, so they must not get the credentials that a client or a browser sent for
// the host.
var secrets = []string{"X-Access-Token", "X-Api-Key", trafficHeader, sandbox.ChannelHeader, InboxKeyHeader, idHeader, portHeader}

// newProxy returns the reverse proxy of the data plane.
func (s *Server) newProxy(inside http.RoundTripper) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Transport:     orders.Record(newTransports(inside, maxPumps), s.conf.Commands, command.ViaSDK),
		FlushInterval: -1, // event streams must not wait in a buffer
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
			// The server fills this map when the body has been read. The copy that
			// ReverseProxy made for Out would stay empty.
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
			// Nothing is checked on an upgraded connection. The guest does not use
			// upgrades, and HTTP/2 without TLS would carry further requests that
			// bypass all checks.
			if up := h.Get("Upgrade"); t.port == sandbox.GuestPort || strings.Contains(strings.ToLower(up), "h2c") {
				h.Del("Upgrade")
				h.Del("Connection")
				h.Del("Http2-Settings")
			}
		},
		ModifyResponse: func(resp *http.Response) error {
			t := targetOf(resp.Request.Context())
			cleanHeaders(resp.Header, t.named)
			cleanTrailers(resp, t.named)
			if !t.named || t.port == sandbox.GuestPort {
				allowOrigins(resp.Header)
			}
			if t.traffic.Contract != "" && s.conf.Runs != nil && strings.HasPrefix(resp.Request.URL.Path, "/process.Process/") {
				resp.Body = &countedBody{resp.Body, func(n int64) { s.conf.Runs.CountOutput(t.sandbox, n) }}
			}
			if t.listing {
				return s.filterTools(resp, t)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if errors.Is(err, context.Canceled) && r.Context().Err() != nil {
				return // the caller has disconnected
			}
			t := targetOf(r.Context())
			refuse(w, r, t, s.refusalFor(r.Context(), t, err))
		},
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// refusalFor is the table from errors of the way inside to refusals. Unknown errors
// may reveal something about the host, so their text is not shown.
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

// transports are the transports to services inside: HTTP/1.1, and HTTP/2 without TLS for
// gRPC, which needs it.
type transports struct {
	plain, grpc http.RoundTripper
}

// newTransports adds limits to the fleet's transport, since responses come from a
// sandbox. At most maxPumps large request bodies are sent by a pump at a time.
func newTransports(inside http.RoundTripper, maxPumps int) http.RoundTripper {
	base, ok := inside.(*http.Transport)
	if !ok {
		return inside
	}
	t := base.Clone()
	// Bodies are copied through copyBuffers and pumps instead, which are larger.
	t.ReadBufferSize, t.WriteBufferSize = 16<<10, 16<<10
	pumps := make(chan struct{}, maxPumps)
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := base.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &wideConn{c, pumps}, nil
	}
	t.MaxResponseHeaderBytes = maxHeader
	// A client that waits for "100 Continue" waits for the service's.
	t.ExpectContinueTimeout = time.Second
	// For httpsPorts: services inside have self-signed certificates, and nobody
	// else can read or change packets on the link.
	t.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} //nolint:gosec // E2B documents httpsPorts like this; see above
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	g := t.Clone()
	g.Protocols = new(http.Protocols)
	g.Protocols.SetUnencryptedHTTP2(true)
	g.Protocols.SetHTTP2(true)
	return &transports{t, g}
}

// RoundTrip implements [http.RoundTripper].
func (r *transports) RoundTrip(req *http.Request) (*http.Response, error) {
	// Interim responses are forwarded as they arrive and do not go through
	// ModifyResponse. A 103 could set the cookies that the final response must not.
	// This hook was added last, so it runs before the one that forwards them.
	named := targetOf(req.Context()).named
	req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(_ int, h textproto.MIMEHeader) error {
			cleanHeaders(http.Header(h), named)
			return nil
		},
	}))
	if req.ProtoMajor == 2 && strings.HasPrefix(req.Header.Get("Content-Type"), "application/grpc") {
		return r.grpc.RoundTrip(req)
	}
	return r.plain.RoundTrip(stream(req))
}

// copySize is the size of the copy buffers for bodies, in bytes: two packets of a
// link. Smaller buffers leave the link's packets half empty, which costs time at
// both ends.
const copySize = 128 << 10

var buffers copyBuffers

// copyBuffers is a pool of copy buffers, one per body in progress.
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

// requests counts the requests in progress per sandbox. Neither the callers nor a
// sandbox that never answers may use up the server's memory: a request costs about
// a third of a mebibyte.
type requests struct {
	max int // for callers with a token, and again for callers that need none

	mu sync.Mutex // guards by
	by map[requestKey]int
}

// A requestKey is the key of a count. Requests that anybody may send are counted
// separately, so that strangers cannot use up the owner's share.
type requestKey struct {
	sandbox string
	open    bool
}

// enter counts a request until leave is called. It returns false if there are too
// many.
func (v *requests) enter(id string, open bool) (leave func(), ok bool) {
	k := requestKey{id, open}
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
