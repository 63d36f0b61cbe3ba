package gmail

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/mail"
)

// The bounds of the API's answers, in bytes.
const (
	maxAnswer = 8 << 20
	maxRaw    = connector.MaxMessage/3*4 + maxAnswer // a message in base64, and what is about it
)

// Gmail counts requests in quota units: 15,000 a minute for each user.
const (
	unitsPerSecond = 240
	unitsBurst     = 500
)

// errUncertain means that a request may have had its effect: the answer was lost or
// says nothing.
var errUncertain = errors.New("the answer of Gmail was lost")

// A Mailbox is one mailbox at Gmail. It is safe for concurrent use.
type Mailbox struct {
	s     *Service
	cred  Credential
	units *rate.Limiter

	mu      sync.Mutex
	access  auth.Secret // the token of requests; empty if none is known
	expires time.Time
	labels  labelTable
}

// Mailbox returns the mailbox that c opens. It connects at the first call.
func (s *Service) Mailbox(c Credential) *Mailbox {
	return &Mailbox{s: s, cred: c, units: rate.NewLimiter(unitsPerSecond, unitsBurst)}
}

// bearer returns a token for requests, after not, which Gmail takes no more.
func (m *Mailbox) bearer(ctx context.Context, not auth.Secret) (auth.Secret, error) {
	m.mu.Lock()
	defer m.mu.Unlock() // one refresh for all requests that wait for it
	if m.access != "" && m.access != not && time.Now().Before(m.expires) {
		return m.access, nil
	}
	t, err := m.s.grant(ctx, m.cred.App, url.Values{"grant_type": {"refresh_token"}, "refresh_token": {string(m.cred.Refresh)}})
	if err != nil {
		return "", fmt.Errorf("renew sign-in: %w", err)
	}
	m.access = auth.Secret(t.Access)
	m.expires = time.Now().Add(time.Duration(t.Expires)*time.Second - 30*time.Second)
	return m.access, nil
}

// A request is one call of the API.
type request struct {
	method, path string // path below the mailbox, such as "messages/send"
	query        url.Values
	body         any    // sent as JSON; nil means none
	raw          []byte // sent instead of body, as contentType
	contentType  string
	upload       bool  // to the API's address for uploads
	units        int   // quota units
	most         int64 // bytes of the answer; 0 means maxAnswer
	// effect says that a request without an answer may have had an effect that a
	// repetition would double.
	effect bool
}

// call makes a request and reads its answer into out, if it is not nil. It renews the
// token once, and repeats what Gmail refuses for its rate, as long as MaxWait allows.
func (m *Mailbox) call(ctx context.Context, r request, out any) error {
	if r.body != nil {
		b, err := json.Marshal(r.body)
		if err != nil {
			return fmt.Errorf("encode request: %w", err)
		}
		r.raw, r.contentType = b, "application/json"
	}
	end := time.Now().Add(m.s.cfg.MaxWait)
	delay := m.s.cfg.Backoff
	var old auth.Secret
	for renewed := false; ; {
		access, err := m.bearer(ctx, old)
		if err != nil {
			return err
		}
		err = m.once(ctx, r, access, out)
		if errors.Is(err, errUnauthorized) {
			if renewed {
				return fmt.Errorf("%w: Gmail refuses the token that Google has just issued", connector.ErrSignIn)
			}
			renewed, old = true, access
			continue
		}
		var wait *connector.RetryError
		if !errors.As(err, &wait) {
			return err
		}
		// With jitter, so that many mailboxes do not come back together.
		pause := max(wait.After, delay/2+rand.N(delay/2+1)) //nolint:gosec // no secret
		if time.Now().Add(pause).After(end) {
			return err
		}
		delay *= 2
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// errUnauthorized means that Gmail does not take the token.
var errUnauthorized = errors.New("unauthorized")

// once makes a request a single time.
func (m *Mailbox) once(ctx context.Context, r request, access auth.Secret, out any) error {
	if err := m.units.WaitN(ctx, min(max(r.units, 1), unitsBurst)); err != nil {
		return fmt.Errorf("wait for quota: %w", err)
	}
	to := m.s.api + "/gmail/v1/users/me/" + r.path
	if r.upload {
		to = m.s.api + "/upload/gmail/v1/users/me/" + r.path
	}
	if len(r.query) > 0 {
		to += "?" + r.query.Encode()
	}
	limit := time.Minute
	if r.upload || r.most > maxAnswer { // 35 MB
		limit = 5 * time.Minute
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	connected := false
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { connected = true },
	}), r.method, to, bytes.NewReader(r.raw))
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	if len(r.raw) > 0 {
		req.Header.Set("Content-Type", r.contentType)
	} else {
		req.Body = http.NoBody
	}
	req.Header.Set("Authorization", "Bearer "+string(access))
	req.Header.Set("Accept", "application/json")
	res, err := m.s.http.Do(req)
	if err != nil {
		if r.effect && connected {
			// Not wrapped: who sees a RetryError sends it again.
			return fmt.Errorf("%w: %v", errUncertain, m.s.network(err)) //nolint:errorlint // above
		}
		return m.s.network(err)
	}
	defer res.Body.Close()
	most := r.most
	if most == 0 {
		most = maxAnswer
	}
	if res.StatusCode/100 != 2 {
		b, _ := readAtMost(res.Body, maxTokenBody) // what was read of it is enough for words
		err := answerError(res, b)
		var wait *connector.RetryError
		if r.effect && res.StatusCode >= 500 && errors.As(err, &wait) {
			return fmt.Errorf("%w: %v", errUncertain, wait.Err) //nolint:errorlint // as above
		}
		return err
	}
	b, err := readAtMost(res.Body, most)
	if err == nil && out != nil {
		err = json.Unmarshal(b, out)
	}
	if err == nil {
		return nil
	}
	if r.effect { // it was accepted; what is lost is its ID
		return fmt.Errorf("%w: %s", errUnreadable, mail.Printable(err.Error(), 200))
	}
	if _, ok := errors.AsType[*tooLongError](err); ok {
		return connector.ErrTooLarge
	}
	return later(0, "read the answer of Gmail: %s", mail.Printable(err.Error(), 200))
}

// errUnreadable means that Gmail has accepted a request, and that the answer cannot be
// read.
var errUnreadable = errors.New("the answer of Gmail is not readable")

// answerError returns the error in an answer of the API.
func answerError(res *http.Response, b []byte) error {
	var e struct {
		Error struct {
			Message string `json:"message"`
			Status  string `json:"status"`
			Errors  []struct {
				Reason string `json:"reason"`
			} `json:"errors"`
		} `json:"error"`
	}
	_ = json.Unmarshal(b, &e) // without it, the status decides
	reason := e.Error.Status
	if len(e.Error.Errors) > 0 {
		reason = e.Error.Errors[0].Reason
	}
	said := mail.Printable(e.Error.Message, 300)
	if said == "" {
		said = fmt.Sprintf("status %d", res.StatusCode)
	}
	switch {
	case res.StatusCode == http.StatusUnauthorized:
		return errUnauthorized
	case res.StatusCode == http.StatusNotFound || res.StatusCode == http.StatusGone:
		return fmt.Errorf("%w: Gmail says: %s", connector.ErrGone, said)
	case res.StatusCode == http.StatusTooManyRequests, res.StatusCode == http.StatusForbidden && limited[reason]:
		def := time.Duration(0)
		if reason == "dailyLimitExceeded" || reason == "quotaExceeded" {
			def = time.Hour
		}
		return later(retryAfter(res.Header, e.Error.Message, def), "Gmail's limit of requests is used up: %s", said)
	case res.StatusCode >= 500 || res.StatusCode == http.StatusRequestTimeout:
		return later(retryAfter(res.Header, e.Error.Message, 0), "Gmail is not available: %s", said)
	case res.StatusCode == http.StatusForbidden && (reason == "insufficientPermissions" || reason == "ACCESS_TOKEN_SCOPE_INSUFFICIENT"):
		return fmt.Errorf("%w: the permission to read, compose and send mail was not given; sign in again and tick it", connector.ErrSignIn)
	case res.StatusCode == http.StatusForbidden && (reason == "accessNotConfigured" || reason == "SERVICE_DISABLED"):
		return fmt.Errorf("%w: the Gmail API is not enabled in the Google Cloud project of the OAuth client: %s", ErrRefused, said)
	case res.StatusCode == http.StatusForbidden && reason == "domainPolicy":
		return fmt.Errorf("%w: the administrator of the account's organization does not allow this: %s", connector.ErrSignIn, said)
	case res.StatusCode/100 == 3:
		return fmt.Errorf("%w: it redirects, and redirects are not followed", ErrRefused)
	}
	return fmt.Errorf("%w: status %d: %s", ErrRefused, res.StatusCode, said)
}

// limited are the reasons of a refusal for the rate of requests.
var limited = map[string]bool{
	"rateLimitExceeded": true, "userRateLimitExceeded": true, "dailyLimitExceeded": true, "quotaExceeded": true, "RESOURCE_EXHAUSTED": true, "backendError": true,
}

// retryText is how Gmail writes in an error's text until when a user is limited.
var retryText = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`Retry after (\d{4}-\d\d-\d\dT[0-9:.]{8,18}Z)`)
})

// retryAfter returns how long an answer asks to wait: by its Retry-After field (RFC 9110
// section 10.2.3), by its text, or def. The attack: a wait of a hundred years.
func retryAfter(h http.Header, text string, def time.Duration) time.Duration {
	d := def
	if v := strings.TrimSpace(h.Get("Retry-After")); v != "" {
		if n, err := strconv.ParseInt(v, 10, 32); err == nil {
			d = time.Duration(n) * time.Second
		} else if at, err := http.ParseTime(v); err == nil {
			d = time.Until(at)
		}
	} else if f := retryText().FindStringSubmatch(text[:min(len(text), 1000)]); f != nil {
		if at, err := time.Parse(time.RFC3339Nano, f[1]); err == nil {
			d = time.Until(at)
		}
	}
	return min(max(d, 0), 24*time.Hour)
}
