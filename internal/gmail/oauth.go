package gmail

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/connector"
	"postern/internal/mail"
)

// The bounds of OAuth's answers.
const (
	maxToken     = 4096    // bytes of a token or code
	maxTokenBody = 1 << 16 // bytes of an answer
	maxLifetime  = 24 * time.Hour
)

// ErrPending means that the person has not answered yet. RFC 8628 section 3.5.
var ErrPending = errors.New("the person has not answered yet")

// CheckApp returns an error that says what is wrong with an OAuth client, or nil.
func CheckApp(a App) error {
	switch {
	case !clientID.MatchString(a.ID):
		return fmt.Errorf("client_id: must be 1 to 255 letters, digits and - . _ (Google's end in .apps.googleusercontent.com): got %.80q", a.ID)
	case len(a.Secret) > 512 || strings.ContainsFunc(string(a.Secret), func(r rune) bool { return r <= ' ' || r > '~' }):
		return errors.New("client_secret: must be at most 512 printable ASCII characters without spaces")
	}
	return nil
}

var clientID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,255}$`)

// Verifier returns a new secret of one sign-in, from which PKCE's challenge is made
// (RFC 7636 section 4.1).
func Verifier() auth.Secret { return auth.Secret(rand.Text() + rand.Text()) }

// SignInURL returns where the person gives their consent in a browser. Google sends
// them back to redirect with state and a code for [Service.Exchange].
func (s *Service) SignInURL(a App, redirect, state, hint string, verifier auth.Secret) string {
	sum := sha256.Sum256([]byte(verifier))
	q := url.Values{
		"client_id": {a.ID}, "redirect_uri": {redirect}, "response_type": {"code"}, "scope": {Scope}, "state": {state},
		"code_challenge": {base64.RawURLEncoding.EncodeToString(sum[:])}, "code_challenge_method": {"S256"},
		// Google gives a refresh token for these two alone.
		"access_type": {"offline"}, "prompt": {"consent"},
		// The attack: rights that another program of this client was once given.
		"include_granted_scopes": {"false"},
	}
	if hint != "" {
		q.Set("login_hint", hint)
	}
	return s.authURL + "?" + q.Encode()
}

// A token is Google's answer to a grant. RFC 6749 section 5.
type token struct {
	Access  string `json:"access_token"`
	Refresh string `json:"refresh_token"`
	Expires int64  `json:"expires_in"` // seconds
	Scope   string `json:"scope"`
	Type    string `json:"token_type"`
}

// Exchange trades the code of a redirect for a credential.
func (s *Service) Exchange(ctx context.Context, a App, redirect, code string, verifier auth.Secret) (Credential, error) {
	if code == "" || len(code) > maxToken {
		return Credential{}, fmt.Errorf("code: must be 1 to %d bytes: %w", maxToken, ErrRefused)
	}
	t, err := s.grant(ctx, a, url.Values{"grant_type": {"authorization_code"}, "code": {code}, "redirect_uri": {redirect}, "code_verifier": {string(verifier)}})
	if err != nil {
		return Credential{}, fmt.Errorf("exchange code: %w", err)
	}
	return t.credential(a)
}

// credential returns what t gives for good, if it is all that is needed. A person can
// untick what an application asks for.
func (t token) credential(a App) (Credential, error) {
	if t.Refresh == "" {
		return Credential{}, fmt.Errorf("%w: Google gave no refresh token; remove the application at https://myaccount.google.com/permissions and connect again", ErrRefused)
	}
	if scopes := strings.Fields(t.Scope); t.Scope != "" && !slices.Contains(scopes, Scope) {
		return Credential{}, fmt.Errorf("%w: the permission to read, compose and send mail was not given; connect again and tick it", ErrRefused)
	}
	return Credential{App: a, Refresh: auth.Secret(t.Refresh)}, nil
}

// A Device is a sign-in on another device. RFC 8628 section 3.2.
type Device struct {
	Code     auth.Secret   // for [Service.Poll]
	UserCode string        // the person types it
	URL      string        // there
	Interval time.Duration // between two polls
	Expires  time.Duration // from now
}

// StartDevice begins a sign-in on another device. Google allows it for few scopes and
// Gmail's is not among them; then the error says what to do instead.
func (s *Service) StartDevice(ctx context.Context, a App) (Device, error) {
	var d struct {
		Code     string `json:"device_code"`
		UserCode string `json:"user_code"`
		URI      string `json:"verification_uri"`
		URL      string `json:"verification_url"` // Google's name of it
		Interval int64  `json:"interval"`
		Expires  int64  `json:"expires_in"`
	}
	if err := s.form(ctx, s.deviceURL, url.Values{"client_id": {a.ID}, "scope": {Scope}}, &d); err != nil {
		return Device{}, fmt.Errorf("begin device sign-in: %w", err)
	}
	if d.URI == "" {
		d.URI = d.URL
	}
	u, err := url.Parse(d.URI)
	if err != nil || u.Host == "" || u.Scheme != "https" && s.cfg.Base == "" || len(d.URI) > 500 || d.Code == "" || len(d.Code) > maxToken || d.UserCode == "" || len(d.UserCode) > 64 {
		return Device{}, fmt.Errorf("begin device sign-in: %w: the answer has no usable code", ErrRefused)
	}
	return Device{
		Code: auth.Secret(d.Code), UserCode: mail.Printable(d.UserCode, 64), URL: mail.Printable(u.String(), 500),
		Interval: time.Duration(min(max(d.Interval, 1), 60)) * time.Second, Expires: time.Duration(min(max(d.Expires, 1), 3600)) * time.Second,
	}, nil
}

// Poll asks once whether the person has answered. The error wraps [ErrPending] if not.
func (s *Service) Poll(ctx context.Context, a App, code auth.Secret) (Credential, error) {
	t, err := s.grant(ctx, a, url.Values{"grant_type": {"urn:ietf:params:oauth:grant-type:device_code"}, "device_code": {string(code)}})
	if err != nil {
		return Credential{}, fmt.Errorf("finish device sign-in: %w", err)
	}
	return t.credential(a)
}

// Revoke ends a credential at Google. One that Google does not know is no error.
func (s *Service) Revoke(ctx context.Context, c Credential) error {
	err := s.form(ctx, s.revokeURL, url.Values{"token": {string(c.Refresh)}}, nil)
	if err != nil && !errors.Is(err, connector.ErrSignIn) {
		return fmt.Errorf("revoke at Google: %w", err)
	}
	return nil
}

// grant asks for a token.
func (s *Service) grant(ctx context.Context, a App, v url.Values) (token, error) {
	v.Set("client_id", a.ID)
	if a.Secret != "" {
		v.Set("client_secret", string(a.Secret))
	}
	var t token
	if err := s.form(ctx, s.tokenURL, v, &t); err != nil {
		return token{}, err
	}
	if t.Access == "" || len(t.Access) > maxToken || len(t.Refresh) > maxToken || !headerSafe(t.Access) || t.Type != "" && !strings.EqualFold(t.Type, "bearer") {
		return token{}, fmt.Errorf("%w: the answer has no usable token", ErrRefused)
	}
	t.Expires = min(max(t.Expires, 0), int64(maxLifetime/time.Second))
	return t, nil
}

// headerSafe reports whether t can stand in a header field.
func headerSafe(t string) bool {
	return !strings.ContainsFunc(t, func(r rune) bool { return r <= ' ' || r > '~' })
}

// form posts v and reads the answer into out, if it is not nil. Errors have nothing of
// v. The library for OAuth was tried: its device flow ignores the context, polls by
// itself, and its errors have the whole answer.
func (s *Service) form(ctx context.Context, to string, v url.Values, out any) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, to, strings.NewReader(v.Encode()))
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Accept", "application/json")
	res, err := s.http.Do(r)
	if err != nil {
		return s.network(err)
	}
	defer res.Body.Close()
	b, err := readAtMost(res.Body, maxTokenBody)
	if err != nil {
		return s.network(err)
	}
	if res.StatusCode/100 != 2 {
		return oauthError(res, b)
	}
	if out == nil {
		return nil
	}
	if json.Unmarshal(b, out) != nil {
		return fmt.Errorf("%w: the answer is not JSON", ErrRefused)
	}
	return nil
}

// readAtMost reads all of r, or fails if it is longer than most.
func readAtMost(r io.Reader, most int64) ([]byte, error) {
	var b bytes.Buffer
	n, err := io.Copy(&b, io.LimitReader(r, most+1))
	if err == nil && n > most {
		err = &tooLongError{most}
	}
	return b.Bytes(), err
}

// A tooLongError means that an answer exceeds its bound.
type tooLongError struct{ most int64 } // bytes

func (e *tooLongError) Error() string {
	return fmt.Sprintf("the answer is longer than %d bytes", e.most)
}

// network returns an error of the connection, without the URL, which may have an
// address in it.
func (s *Service) network(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	return later(0, "connect to Google: %s", mail.Printable(err.Error(), 300))
}

// oauthError returns Google's refusal in words that say what to do.
func oauthError(res *http.Response, b []byte) error {
	var e struct {
		Code string `json:"error"`
		Text string `json:"error_description"`
	}
	_ = json.Unmarshal(b, &e) // without a code, the status is said
	if res.StatusCode >= 500 || res.StatusCode == http.StatusTooManyRequests {
		return later(retryAfter(res.Header, "", 10*time.Second), "Google answers with status %d", res.StatusCode)
	}
	return OAuthError(e.Code, e.Text, res.StatusCode)
}

// meanings says what Google's codes mean for who connects a mailbox.
var meanings = map[string]string{
	"access_denied":              "the person declined, or the account may not use this application: an application that Google has not verified works only for the accounts listed as test users (Google Cloud console, Audience)",
	"invalid_client":             "Google does not know this client ID, or the client secret is wrong",
	"deleted_client":             "this OAuth client was deleted in Google Cloud's console",
	"disabled_client":            "this OAuth client is disabled in Google Cloud's console",
	"unauthorized_client":        "this kind of OAuth client may not sign in this way: create one of type Desktop app for the command line, or Web application for the console",
	"invalid_scope":              "Google does not allow Gmail's scope for this kind of sign-in (the device flow allows few scopes); sign in with a browser instead",
	"redirect_uri_mismatch":      "the redirect address is not registered for this OAuth client",
	"org_internal":               "this application is only for the accounts of one organization",
	"admin_policy_enforced":      "the administrator of the account's organization does not allow this application or Gmail's scope",
	"disallowed_useragent":       "Google does not allow sign-ins in this browser",
	"expired_token":              "nobody entered the code in time; begin again",
	"invalid_grant":              "the sign-in is used, expired or revoked: the person has removed the application or changed the password, it was unused for six months, or the application's publishing status is Testing, in which sign-ins end after seven days",
	"interaction_required":       "the person must sign in at Google again",
	"restricted_client":          "Google does not allow Gmail's scope for this application until it is verified",
	"account_selection_required": "the person must choose an account at Google",
}

// OAuthError returns the error for one of OAuth's codes, as an answer or a redirect has
// it. RFC 6749 sections 4.1.2.1 and 5.2, RFC 8628 section 3.5.
func OAuthError(code, text string, status int) error {
	switch code {
	case "authorization_pending", "slow_down":
		return fmt.Errorf("%w (%s)", ErrPending, code)
	case "invalid_grant", "invalid_token", "interaction_required":
		return fmt.Errorf("%w: %s", connector.ErrSignIn, meanings["invalid_grant"])
	}
	said := mail.Printable(strings.TrimSpace(code+" "+text), 300)
	if said == "" {
		said = fmt.Sprintf("status %d", status)
	}
	if m := meanings[code]; m != "" {
		return fmt.Errorf("%w: %s (Google says: %s)", ErrRefused, m, said)
	}
	return fmt.Errorf("%w: Google says: %s", ErrRefused, said)
}
