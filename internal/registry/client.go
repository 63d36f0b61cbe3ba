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
	maxToken     = 64 << 10 // bytes of a token server's answer
	attempts     = 3
	stall        = time.Minute      // without a byte, after which a transfer ends
	maxPause     = 30 * time.Second // that a registry can ask for before the next attempt
)

// A session is one pull's conversation with its registry.
type session struct {
	p      *Puller
	ref    name.Reference
	at     endpoint
	repo   string
	mirror bool
	// trusted means that the operator has named the registry. Only then may its
	// redirects and token servers be at other hosts that he named. The attack: a
	// caller's own registry names an allowed one inside as its token server.
	trusted bool
	cred    credential

	mu   sync.Mutex
	auth string // the Authorization header field for at; empty means none
}

// session begins a conversation. It connects to nothing.
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

// where names the repository for a person.
func (s *session) where() string {
	if s.mirror {
		return s.ref.Context().Name() + " by the mirror " + s.at.address()
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
		return nil, fmt.Errorf("%w: http://%s: registries are asked by https (the operator can allow a host with --registry-allow=http://HOST:PORT)", ErrInvalid, e.address())
	}
	if ok {
		return s.p.allowed, nil
	}
	return s.p.public, nil
}

// An answer is what a registry answers with a status other than success.
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

// passing says whether another attempt may succeed.
func passing(err error) bool {
	if a, ok := errors.AsType[*answer](err); ok {
		return a.code == http.StatusTooManyRequests || a.code >= 500
	}
	return !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrFull) && !errors.Is(err, publicnet.ErrRefused)
}

// refuse makes the answer of a response that is no success, and closes it.
func (s *session) refuse(res *http.Response) error {
	defer res.Body.Close()
	a := &answer{host: res.Request.URL.Host, code: res.StatusCode, status: strconv.Itoa(res.StatusCode) + " " + http.StatusText(res.StatusCode)}
	b, _ := io.ReadAll(io.LimitReader(res.Body, 16<<10)) // best effort: it only explains
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
		a.hint = "check the image's name, or give credentials of this registry"
		if s.cred.set() {
			a.hint = "check the credentials, and that they may pull this image"
		}
	case a.code == http.StatusNotFound:
		a.hint = "check the image's name and tag"
	case a.code == http.StatusTooManyRequests:
		a.hint = "try later, give credentials of this registry, or let the operator set a mirror (--registry-mirror)"
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

// get asks the registry for a path. The response's status is 200. Its body ends with an
// error if no byte comes for a minute.
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
			return nil, fmt.Errorf("%w: %s redirects to what is no URL", ErrInvalid, u.Host)
		}
		u = next
	}
	return nil, fmt.Errorf("%w: %s redirects more than %d times", ErrInvalid, s.at.address(), maxRedirects)
}

// send sends one request. It carries the Authorization only to the registry itself. The
// attack: a registry redirects to a host of somebody else, who reads the token.
func (s *session) send(ctx context.Context, method string, u *url.URL, accept []string) (*http.Response, error) {
	e, err := endpointOf(u)
	if err != nil {
		return nil, fmt.Errorf("%w: the registry %s names another URL: %w", ErrInvalid, s.at.address(), err)
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

// unreachable is the error of a host that cannot be reached.
func (s *session) unreachable(e endpoint, err error) error {
	why := "the connection failed; try again later"
	var name *net.DNSError
	var cert *tls.CertificateVerificationError
	var errno syscall.Errno
	switch {
	case errors.Is(err, publicnet.ErrRefused):
		why = "its address is not a public one; the operator can allow the host with --registry-allow"
	case errors.As(err, &name):
		why = "its name is not found"
	case errors.As(err, &cert):
		why = "its certificate is not valid for it, or is by an authority that this server does not trust"
	case errors.Is(err, context.DeadlineExceeded):
		why = "it did not answer in time"
	case errors.As(err, &errno):
		why = errno.Error()
	case errors.Is(err, io.ErrUnexpectedEOF):
		why = "its answer ended early; bytes are missing"
	}
	return &unreachableError{e.address() + ": " + why, err}
}

// An unreachableError is the error of a host that cannot be reached. Its text does not
// quote the cause: that has addresses that names inside resolve to, and URLs with a
// CDN's signature.
type unreachableError struct {
	text  string
	cause error
}

func (u *unreachableError) Error() string   { return ErrUnreachable.Error() + ": " + u.text }
func (u *unreachableError) Unwrap() []error { return []error{ErrUnreachable, u.cause} }

// A body is a response's body that ends when nothing comes. The attack: a registry that
// sends one byte in a while holds a build for ever.
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

// authorize does what a registry's challenges ask for. It reports false if they want
// credentials and there are none.
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

// token asks a token server for a token, by the Distribution project's "Token
// Authentication Specification".
func (s *session) token(ctx context.Context, params map[string]string, user, password string) (string, error) {
	u, err := url.Parse(params["realm"])
	if err != nil || params["realm"] == "" {
		return "", fmt.Errorf("%w: the registry %s names no URL of a token server", ErrInvalid, s.at.address())
	}
	e, err := endpointOf(u)
	if err != nil {
		return "", fmt.Errorf("%w: the token server of %s: its URL %w", ErrInvalid, s.at.address(), err)
	}
	if s.cred.own && e.address() != s.at.address() {
		return "", fmt.Errorf("%w: %s names a token server at another host, to which credentials of a cloud are not sent", ErrInvalid, s.at.address())
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
		return "", fmt.Errorf("%w: the token server %s answers without a token", ErrInvalid, e.address())
	}
	return t.Token, nil
}
