// Package client is a Go client of Postern's REST API: inboxes, messages, sends
// and drafts, actions and decisions, policy, the audit log, deliveries, domains,
// webhooks, people, keys and grants.
//
// A [Client] acts for whoever its credential belongs to. The key of an inbox
// (pib_…) or a grant (pgr_…) reads mail and proposes to send it; a project's
// key manages inboxes and opens none; a session (pse_…) or the server's local
// socket is a person, who decides on actions. docs/reference/api.md has the whole
// table, and the server checks it on each request.
//
// Each noun has a service: c.Inboxes, c.Messages, c.Actions and so on. Lists
// are iterators that fetch page after page. Every error that the server answered
// with is an [*Error]. Requests that are safe to repeat are retried when the
// connection or the server fails; see [Config.Retries].
//
// A Client is safe for concurrent use. It depends on the standard library alone.
package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"
)

const (
	maxAnswer  = 64 << 20               // bytes of one JSON answer
	firstPause = 100 * time.Millisecond // before the first retry; doubles for each further one
	longPause  = 5 * time.Second        // longest pause between retries
)

// A Config says how to reach a server.
type Config struct {
	// URL is the server's address, "https://mail.example.com", or its local
	// socket, "unix:/var/lib/postern/postern.sock". Over http, a key is only
	// sent to this machine.
	URL string

	// Key is the credential: a key of an inbox or a project, a grant, an account
	// or a session. Empty: requests carry none, as over the local socket.
	Key string

	// HTTP does the requests. Nil: a client of its own with a timeout of one
	// minute that follows no redirects. With URLs of sockets it must be nil.
	HTTP *http.Client

	// Retries is how often a request that is safe to repeat is tried again. 0:
	// twice; negative: never. Reads are safe to repeat, and so are proposals to
	// send: they carry an idempotency key.
	Retries int

	// UserAgent is the header User-Agent. Empty: "postern-client".
	UserAgent string
}

// A Client calls the API of one server with one credential.
type Client struct {
	base    *url.URL
	http    *http.Client
	key     string
	retries int
	agent   string

	Inboxes    *InboxService
	Keys       *KeyService
	Grants     *GrantService
	Apps       *AppService
	Accounts   *AccountService
	Connect    *ConnectService
	Messages   *MessageService
	Threads    *ThreadService
	Labels     *LabelService
	Drafts     *DraftService
	Events     *EventService
	Webhooks   *WebhookService
	Actions    *ActionService
	Switches   *SwitchService
	Policy     *PolicyService
	Audit      *AuditService
	Sending    *SendingService
	Suppressed *SuppressionService
	Signing    *SigningService
	Domains    *DomainService
	Secrets    *SecretService
	Gmail      *GmailService
	Connected  *ConnectionService
	Permits    *PermitService
	Quarantine *QuarantineService
	People     *PeopleService
	Session    *SessionService
	Notify     *NotifyService
	Sandboxes  *SandboxService
	Runs       *RunService
	Contracts  *ContractService

	Verifications *VerificationService
}

// New returns a client of the server at serverURL that shows key. See [Config]
// for both.
func New(serverURL, key string) (*Client, error) { return Config{URL: serverURL, Key: key}.New() }

// New returns the client that c describes. It does not connect.
func (conf Config) New() (*Client, error) {
	c := &Client{http: conf.HTTP, key: conf.Key, retries: conf.Retries, agent: conf.UserAgent}
	if c.retries == 0 {
		c.retries = 2
	}
	if c.agent == "" {
		c.agent = "postern-client"
	}
	socket, local := strings.CutPrefix(conf.URL, "unix:")
	switch {
	case local && conf.HTTP != nil:
		return nil, errors.New("config: HTTP must be nil with the URL of a socket")
	case local:
		c.base = &url.URL{Scheme: "http", Host: "postern"} // the host is not looked up
		c.http = newHTTP(func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		})
	default:
		u, err := CheckURL(conf.URL)
		if err != nil {
			return nil, err
		}
		c.base = u
		if c.http == nil {
			c.http = newHTTP((&net.Dialer{Timeout: 10 * time.Second}).DialContext)
		}
	}
	c.services()
	return c, nil
}

func (c *Client) services() {
	c.Inboxes, c.Keys, c.Grants, c.Accounts, c.Apps = &InboxService{c}, &KeyService{c}, &GrantService{c}, &AccountService{c}, &AppService{c}
	c.Connect = &ConnectService{c}
	c.Messages, c.Threads, c.Labels, c.Drafts = &MessageService{c}, &ThreadService{c}, &LabelService{c}, &DraftService{c}
	c.Events, c.Webhooks = &EventService{c}, &WebhookService{c}
	c.Actions, c.Switches, c.Policy, c.Audit = &ActionService{c}, &SwitchService{c}, &PolicyService{c}, &AuditService{c}
	c.Gmail = &GmailService{c}
	c.Secrets, c.Permits, c.Connected = &SecretService{c}, &PermitService{c}, &ConnectionService{c}
	c.Sending, c.Suppressed, c.Signing, c.Domains = &SendingService{c}, &SuppressionService{c}, &SigningService{c}, &DomainService{c}
	c.Quarantine, c.People, c.Session, c.Notify = &QuarantineService{c}, &PeopleService{c}, &SessionService{c}, &NotifyService{c}
	c.Sandboxes = &SandboxService{c}
	c.Runs, c.Contracts = &RunService{c}, &ContractService{c}
	c.Verifications = &VerificationService{c}
}

// CheckURL parses the address of a server that is sent a key. Over http it must
// be this machine: on the way to another one, anybody could read the key.
func CheckURL(serverURL string) (*url.URL, error) {
	u, err := url.Parse(serverURL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, errors.New("URL: must be such as https://mail.example.com")
	}
	addr, err := netip.ParseAddr(u.Hostname())
	if u.Scheme == "http" && u.Hostname() != "localhost" && (err != nil || !addr.IsLoopback()) {
		return nil, errors.New("URL: must be https, since a key is sent to another machine")
	}
	u.Path, u.RawPath, u.RawQuery, u.Fragment = strings.TrimSuffix(u.Path, "/"), "", "", ""
	return u, nil
}

func newHTTP(dial func(context.Context, string, string) (net.Conn, error)) *http.Client {
	return &http.Client{
		Timeout:   time.Minute,
		Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, DialContext: dial, MaxIdleConnsPerHost: 8, IdleConnTimeout: time.Minute},
		// The key is for this server and no other.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// A request is one call of the API.
type request struct {
	method string
	path   []string   // segments, not escaped
	query  url.Values // nil: none
	in     any        // encoded as JSON; nil: no body
	once   string     // idempotency key; empty: none
	wait   time.Duration
}

// Call does one request whose route has no method of its own: it sends in as
// JSON unless that is nil, and decodes the answer into out unless that is nil.
// The path begins with a slash, and what varies in it must be escaped.
func (c *Client) Call(ctx context.Context, method, path string, in, out any) error {
	u, err := url.Parse(path)
	if err != nil || !strings.HasPrefix(path, "/") || u.Host != "" {
		return fmt.Errorf("path: %q is not the path of a route", path)
	}
	segments := strings.Split(strings.TrimPrefix(u.EscapedPath(), "/"), "/")
	for i, s := range segments {
		if segments[i], err = url.PathUnescape(s); err != nil {
			return fmt.Errorf("path: %w", err)
		}
	}
	return c.do(ctx, request{method: method, path: segments, query: u.Query(), in: in}, out)
}

// do does a request and decodes the answer into out, unless out is nil.
func (c *Client) do(ctx context.Context, r request, out any) error {
	resp, err := c.open(ctx, r)
	if err != nil {
		return err
	}
	return decode(resp, out)
}

// decode reads and closes an answer.
func decode(resp *http.Response, out any) error {
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return fmt.Errorf("read answer: %w", err)
	case len(b) > maxAnswer:
		return fmt.Errorf("read answer: longer than %d bytes", maxAnswer)
	case out == nil || len(b) == 0:
		return nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	return nil
}

// open does a request and returns a successful answer, whose body the caller
// closes. It retries what is safe to repeat.
func (c *Client) open(ctx context.Context, r request) (*http.Response, error) {
	var body []byte
	if r.in != nil {
		var err error
		if body, err = json.Marshal(r.in); err != nil {
			return nil, fmt.Errorf("encode request: %w", err)
		}
	}
	u, err := c.url(r.path, r.query)
	if err != nil {
		return nil, err
	}
	safe := r.method == http.MethodGet || r.once != ""
	for try := 0; ; try++ {
		resp, err := c.try(ctx, r, u, body)
		if !safe || try >= c.retries || !passing(resp, err) || ctx.Err() != nil {
			return answer(resp, err)
		}
		if err := pause(ctx, try, resp); err != nil {
			return nil, err
		}
	}
}

func (c *Client) try(ctx context.Context, r request, u string, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, r.method, u, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if r.in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if r.once != "" {
		req.Header.Set("Idempotency-Key", strconv.Quote(r.once))
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
		if strings.HasPrefix(c.key, "e2b_") {
			req.Header.Set("X-Api-Key", c.key) // as the routes on E2B's wire want it
		}
	}
	req.Header.Set("User-Agent", c.agent)
	h := c.http
	if r.wait > 0 && h.Timeout > 0 { // the server answers late on purpose
		long := *h
		long.Timeout += r.wait
		h = &long
	}
	return h.Do(req)
}

// passing reports whether a request failed in a way that may pass: on the way,
// or in a server or proxy that restarts. Limits are not among them: their
// Retry-After may be hours, and the caller knows better what to do meanwhile.
func passing(resp *http.Response, err error) bool {
	if err != nil {
		return !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
	}
	return resp.StatusCode == http.StatusBadGateway || resp.StatusCode == http.StatusServiceUnavailable || resp.StatusCode == http.StatusGatewayTimeout
}

// pause waits before a retry, and closes the answer that is given up. Half of
// each pause is random, so that clients which failed together do not come back
// together.
func pause(ctx context.Context, try int, resp *http.Response) error {
	d := min(firstPause<<min(try, 10), longPause)
	if resp != nil {
		if n, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && n > 0 {
			d = min(time.Duration(n)*time.Second, longPause)
		}
		resp.Body.Close()
	}
	if n, err := rand.Int(rand.Reader, big.NewInt(int64(d/2)+1)); err == nil {
		d = d/2 + time.Duration(n.Int64())
	}
	return sleep(ctx, d)
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// url returns the address of a path. Segments come from callers: one that is
// empty or a dot would name another route.
func (c *Client) url(path []string, query url.Values) (string, error) {
	var b strings.Builder
	b.WriteString(c.base.Scheme + "://" + c.base.Host + c.base.EscapedPath())
	for _, s := range path {
		if s == "" || s == "." || s == ".." {
			return "", fmt.Errorf("path: %q is not an id or a name", s)
		}
		b.WriteString("/" + url.PathEscape(s))
	}
	if len(query) > 0 {
		b.WriteString("?" + query.Encode())
	}
	return b.String(), nil
}

// The helpers of the services.

func get[T any](ctx context.Context, c *Client, query url.Values, path ...string) (out T, err error) {
	err = c.do(ctx, request{method: http.MethodGet, path: path, query: query}, &out)
	return out, err
}

func post[T any](ctx context.Context, c *Client, in any, path ...string) (out T, err error) {
	err = c.do(ctx, request{method: http.MethodPost, path: path, in: in}, &out)
	return out, err
}

func put[T any](ctx context.Context, c *Client, in any, path ...string) (out T, err error) {
	err = c.do(ctx, request{method: http.MethodPut, path: path, in: in}, &out)
	return out, err
}

func (c *Client) act(ctx context.Context, in any, path ...string) error {
	return c.do(ctx, request{method: http.MethodPost, path: path, in: in}, nil)
}

func (c *Client) remove(ctx context.Context, path ...string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: path}, nil)
}

// download returns the body of an answer that is a file.
func (c *Client) download(ctx context.Context, path ...string) (io.ReadCloser, error) {
	resp, err := c.open(ctx, request{method: http.MethodGet, path: path})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// upload sends a request whose body is r. It is not retried, because r can be read only once.
func (c *Client) upload(ctx context.Context, method string, query url.Values, r io.Reader, path ...string) (*http.Response, error) {
	u, err := c.url(path, query)
	if err != nil {
		return nil, err
	}
	if r == nil {
		r = http.NoBody
	}
	req, err := http.NewRequestWithContext(ctx, method, u, r)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	req.Header.Set("User-Agent", c.agent)
	return answer(c.http.Do(req))
}
