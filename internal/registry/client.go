package registry

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/name"

	"postern/internal/publicnet"
)

const (
	maxRedirects = 5
	maxToken     = 64 << 10 // bytes of a token server's response
	attempts     = 3
	stall        = time.Minute      // a transfer ends after this time without a byte
	maxPause     = 30 * time.Second // longest Retry-After that is respected
)

// A session is the conversation of one pull with its registry.
type session struct {
	p      *Puller
	ref    name.Reference
	at     endpoint
	repo   string
	mirror bool
	// trusted means that the operator has named the registry. Only then may its
	// redirects and token servers lead to other hosts that the operator has named. The
	// attack: a caller's own registry names an internal host as its token server.
	trusted bool
	cred    credential

	mu   sync.Mutex
	auth string // the Authorization header field for at; empty means none
}

// session returns a new session. It does not connect yet.
func (p *Puller) session(ref string, c Credentials) (*session, error) {
	r, err := parse(ref)
	if err != nil {
		return nil, err
	}
	host := r.Context().RegistryStr()
	s := &session{p: p, ref: r, repo: r.Context().RepositoryStr()}
	if s.at, err = parseEndpoint(host); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrInvalid, printable(ref), err)
	}
	if s.cred, err = newCredential(c, s.at); err != nil {
		return nil, fmt.Errorf("%w: credentials for %s: %w", ErrInvalid, host, err)
	}
	if m, ok := p.mirrors[host]; ok && !s.cred.set() {
		s.at, s.repo, s.mirror = m, m.prefix+s.repo, true
	}
	if scheme, ok := p.hosts[s.at.address()]; ok {
		s.trusted, s.at.scheme = true, scheme
	} else if scheme, ok := p.hosts[s.at.host+":80"]; ok && s.at.port == "443" && scheme == "http" && !strings.Contains(host, ":") {
		s.trusted, s.at.scheme, s.at.port = true, "http", "80"
	}
	return s, nil
}

// where describes the repository for messages.
func (s *session) where() string {
	if s.mirror {
		return s.ref.Context().Name() + " through the mirror " + s.at.address()
	}
	return s.ref.Context().Name()
}

// origin names the registry and the repository whose access rules protect a blob.
func (s *session) origin() string { return s.at.address() + "/" + s.repo }

// client returns the client that may connect to e.
func (s *session) client(e endpoint) (*http.Client, error) {
	scheme, ok := s.p.hosts[e.address()]
	ok = ok && s.trusted
	if e.scheme == "http" && (!ok || scheme != "http") {
		return nil, fmt.Errorf("%w: http://%s: registries must use https (the operator can allow a host without it: --registry-allow=http://HOST:PORT)", ErrInvalid, e.address())
	}
	if ok {
		return s.p.allowed, nil
	}
	return s.p.public, nil
}

// An answer is the error of a response whose status is not success.
type answer struct {
	host, status string
	code         int
	hint         string
	after        time.Duration // the registry's Retry-After
}

func (a *answer) Error() string {
	return fmt.Sprintf("the registry %s answered %s: %s", a.host, a.status, a.hint)
}

func (a *answer) Unwrap() error {
	switch a.code {
	case http.StatusUnauthorized, http.StatusForbidden:
		return ErrDenied
	case http.StatusNotFound:
		return ErrNotFound
	}
	return ErrUnreachable
}

// passing reports whether another attempt may succeed.
func passing(err error) bool {
	if a, ok := errors.AsType[*answer](err); ok {
		return a.code == http.StatusTooManyRequests || a.code >= 500
	}
	return !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrFull) && !errors.Is(err, publicnet.ErrRefused)
}

// refuse returns the error of a response whose status is not success, and closes it.
func (s *session) refuse(res *http.Response) error {
	defer res.Body.Close()
	a := &answer{host: res.Request.URL.Host, code: res.StatusCode, status: strconv.Itoa(res.StatusCode) + " " + http.StatusText(res.StatusCode)}
	b, _ := io.ReadAll(io.LimitReader(res.Body, 16<<10)) // best effort: it only adds detail
	var body struct {
		Errors []struct {
			Code string `json:"code"`
		} `json:"errors"`
	}
	if json.Unmarshal(b, &body) == nil && len(body.Errors) > 0 && body.Errors[0].Code != "" && len(body.Errors[0].Code) <= 40 {
		a.status += " " + printable(body.Errors[0].Code)
	}
	switch {
	case a.code == http.StatusUnauthorized || a.code == http.StatusForbidden:
		a.hint = "check the image's name, or give credentials for this registry"
		if s.cred.set() {
			a.hint = "check the credentials and their permission to pull this image"
		}
	case a.code == http.StatusNotFound:
		a.hint = "check the image's name and tag"
	case a.code == http.StatusTooManyRequests:
		a.hint = "try again later, give credentials for this registry, or ask the operator for a mirror (--registry-mirror)"
	case a.code >= 500:
		a.hint = "try again later"
	default:
		a.hint = "check that it is a registry of container images"
	}
	if n, err := strconv.Atoi(res.Header.Get("Retry-After")); err == nil && n > 0 {
		a.after = time.Duration(min(n, int(maxPause/time.Second))) * time.Second
	}
	return a
}

// again calls f until it succeeds, at most three times, with pauses.
func (s *session) again(ctx context.Context, f func() error) error {
	for i := 1; ; i++ {
		err := f()
		if err == nil || i == attempts || ctx.Err() != nil || !passing(err) {
			return err
		}
		pause := s.p.paused << (i - 1)
		if a, ok := errors.AsType[*answer](err); ok {
			pause = max(pause, a.after)
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

// get requests a path of the registry. The response's status is 200. Reading its body
// fails if no byte arrives for a minute.
func (s *session) get(ctx context.Context, method, path string, accept []string) (*http.Response, error) {
	for first := true; ; first = false {
		res, err := s.follow(ctx, method, s.at.url(path), accept)
		if err != nil {
			return nil, err
		}
		if res.StatusCode == http.StatusOK {
			return res, nil
		}
		err = s.refuse(res)
		if !first || res.StatusCode != http.StatusUnauthorized || res.Request.URL.Host != s.at.address() {
			return nil, err
		}
		ok, failed := s.authorize(ctx, res.Header.Values("WWW-Authenticate"))
		if failed != nil {
			return nil, failed
		}
		if !ok {
			return nil, err
		}
	}
}

// follow sends a request and follows redirects.
func (s *session) follow(ctx context.Context, method string, u *url.URL, accept []string) (*http.Response, error) {
	for range maxRedirects {
		res, err := s.send(ctx, method, u, accept)
		if err != nil {
			return nil, err
		}
		switch res.StatusCode {
		case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		default:
			return res, nil
		}
		res.Body.Close()
		next, err := u.Parse(res.Header.Get("Location"))
		if err != nil {
			return nil, fmt.Errorf("%w: %s redirects to a malformed URL", ErrInvalid, u.Host)
		}
		u = next
	}
	return nil, fmt.Errorf("%w: %s redirects more than %d times", ErrInvalid, s.at.address(), maxRedirects)
}

// send sends one request. Only requests to the registry itself have the Authorization
// header. The attack: a registry redirects to another host, which reads the token.
func (s *session) send(ctx context.Context, method string, u *url.URL, accept []string) (*http.Response, error) {
	e, err := endpointOf(u)
	if err != nil {
		return nil, fmt.Errorf("%w: the registry %s redirects: the URL %w", ErrInvalid, s.at.address(), err)
	}
	client, err := s.client(e)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	req, err := http.NewRequestWithContext(ctx, method, u.String(), http.NoBody)
	if err != nil {
		cancel(nil)
		return nil, fmt.Errorf("%w: request: %w", ErrInvalid, err)
	}
	req.Header.Set("User-Agent", "postern")
	for _, a := range accept {
		req.Header.Add("Accept", a)
	}
	if e.scheme == s.at.scheme && e.address() == s.at.address() {
		s.mu.Lock()
		if s.auth != "" {
			req.Header.Set("Authorization", s.auth)
		}
		s.mu.Unlock()
	}
	req.URL.Host = e.address()
	res, err := client.Do(req)
	if err != nil {
		cancel(nil)
		return nil, s.unreachable(e, err)
	}
	res.Body = newBody(res.Body, cancel)
	return res, nil
}

// unreachable returns the error of a host that cannot be reached.
func (s *session) unreachable(e endpoint, err error) error {
	why := "the connection failed; try again later"
	var name *net.DNSError
	var cert *tls.CertificateVerificationError
	var errno syscall.Errno
	switch {
	case errors.Is(err, publicnet.ErrRefused):
		why = "its address is not public; the operator can allow the host with --registry-allow"
	case errors.As(err, &name):
		why = "the host was not found"
	case errors.As(err, &cert):
		why = "its certificate is not valid for the host, or is not signed by an authority that this server trusts"
	case errors.Is(err, context.DeadlineExceeded):
		why = "it did not answer in time"
	case errors.As(err, &errno):
		why = errno.Error()
	case errors.Is(err, io.ErrUnexpectedEOF):
		why = "its response ended early"
	}
	return &unreachableError{e.address() + ": " + why, err}
}

// An unreachableError is the error of a host that cannot be reached. Its text does not
// quote the cause, which may contain internal addresses or the signed URL of a CDN.
type unreachableError struct {
	text  string
	cause error
}

func (u *unreachableError) Error() string   { return ErrUnreachable.Error() + ": " + u.text }
func (u *unreachableError) Unwrap() []error { return []error{ErrUnreachable, u.cause} }

// A body is a response's body whose transfer is canceled when it stalls. The attack: a
// registry that stops sending holds a build forever.
type body struct {
	io.ReadCloser

	timer  *time.Timer
	cancel context.CancelCauseFunc
}

func newBody(r io.ReadCloser, cancel context.CancelCauseFunc) *body {
	b := &body{ReadCloser: r, cancel: cancel}
	b.timer = time.AfterFunc(stall, func() { cancel(fmt.Errorf("no byte for %v", stall)) })
	return b
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.timer.Reset(stall)
	return n, err
}

func (b *body) Close() error {
	b.timer.Stop()
	err := b.ReadCloser.Close()
	b.cancel(nil)
	return err
}

// authorize answers a registry's challenges. It reports false if they require credentials
// and there are none.
func (s *session) authorize(ctx context.Context, fields []string) (bool, error) {
	cs := parseChallenges(fields)
	user, password, err := s.cred.basic(ctx, s)
	if err != nil {
		return false, err
	}
	for _, c := range cs {
		if c.scheme == "bearer" {
			token, err := s.token(ctx, c.params, user, password)
			if err != nil {
				return false, err
			}
			s.setAuth("Bearer " + token)
			return true, nil
		}
	}
	for _, c := range cs {
		if c.scheme == "basic" && (user != "" || password != "") {
			s.setAuth(basicAuth(user, password))
			return true, nil
		}
	}
	return false, nil
}

func (s *session) setAuth(v string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.auth = v
}

// token gets a token from a token server: "Token Authentication Specification" of the
// Distribution project.
func (s *session) token(ctx context.Context, params map[string]string, user, password string) (string, error) {
	u, err := url.Parse(params["realm"])
	if err != nil || params["realm"] == "" {
		return "", fmt.Errorf("%w: the registry %s does not name the URL of its token server", ErrInvalid, s.at.address())
	}
	e, err := endpointOf(u)
	if err != nil {
		return "", fmt.Errorf("%w: the token server of %s: the URL %w", ErrInvalid, s.at.address(), err)
	}
	if s.cred.own && e.address() != s.at.address() {
		return "", fmt.Errorf("%w: %s names a token server on another host; AWS and GCP credentials are not sent there", ErrInvalid, s.at.address())
	}
	client, err := s.client(e)
	if err != nil {
		return "", err
	}
	q := u.Query()
	if v := params["service"]; v != "" {
		q.Set("service", v)
	}
	q.Set("scope", "repository:"+s.repo+":pull")
	u.RawQuery, u.Fragment = q.Encode(), ""
	ctx, cancel := context.WithTimeout(ctx, stall)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
	if err != nil {
		return "", fmt.Errorf("%w: request: %w", ErrInvalid, err)
	}
	req.Header.Set("User-Agent", "postern")
	if user != "" || password != "" {
		req.Header.Set("Authorization", basicAuth(user, password))
	}
	res, err := client.Do(req)
	if err != nil {
		return "", s.unreachable(e, err)
	}
	if res.StatusCode != http.StatusOK {
		return "", s.refuse(res)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxToken))
	if err != nil {
		return "", s.unreachable(e, err)
	}
	var t struct {
		Token       string `json:"token"`
		AccessToken string `json:"access_token"`
	}
	err = json.Unmarshal(b, &t)
	if t.Token == "" {
		t.Token = t.AccessToken
	}
	// The error must not quote what the server sent: it may be a token.
	if err != nil || t.Token == "" || strings.ContainsFunc(t.Token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("%w: the token server %s returned no token", ErrInvalid, e.address())
	}
	return t.Token, nil
}
