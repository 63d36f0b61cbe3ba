// Package gmail connects a mailbox at Gmail: it reads it, follows its changes,
// labels and trashes what is in it, and sends through it, by the Gmail API.
//
// It is for mailboxes that a person has connected with an OAuth client of their
// own. It never decides whether a message may leave: the caller of [Mailbox.Send] has
// asked the gate. It keeps no credential, and its errors and log lines contain none.
//
// Google's answers are hostile input, like everything from another server: they are
// bounded, redirects are not followed, and the code that shows names makes them
// printable.
package gmail

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/connector"
)

// Scope is what a mailbox is connected with: read, label, trash and send. It does
// not allow to delete a message for good, to change settings such as forwarding, or
// anything outside of mail. gmail.send alone could not read, and gmail.readonly could
// not archive.
const Scope = "https://www.googleapis.com/auth/gmail.modify"

// ErrRefused means that Google has refused a request for good: to repeat it would end
// the same. The other errors are those of package connector.
var ErrRefused = errors.New("refused by Google")

// later returns the error of a request that had no effect and may be tried again.
func later(after time.Duration, format string, args ...any) error {
	return &connector.RetryError{After: after, Err: fmt.Errorf(format, args...)} //nolint:err113 // the text is Google's
}

// Google's addresses.
const (
	googleAPI    = "https://gmail.googleapis.com"
	googleAuth   = "https://accounts.google.com/o/oauth2/v2/auth"
	googleToken  = "https://oauth2.googleapis.com/token" //nolint:gosec // an address
	googleDevice = "https://oauth2.googleapis.com/device/code"
	googleRevoke = "https://oauth2.googleapis.com/revoke"
)

// Config is the configuration of a [Service].
type Config struct {
	// Transport makes the requests; required. Its dialer decides which addresses may
	// be reached.
	Transport http.RoundTripper
	// Base replaces the addresses of Google's servers by paths of one server, as
	// [gmailtest] has them: a URL with scheme and host. Empty means Google.
	Base string
	// Backoff is the delay before the second attempt of a request that Gmail has
	// refused for its rate; each later one is twice as long. 0 means 1 second.
	Backoff time.Duration
	// MaxWait is how long one request is repeated before it is a [connector.RetryError]. 0
	// means 1 minute.
	MaxWait time.Duration
	// PollEvery is the time between two looks for changes. 0 means 20 seconds.
	PollEvery time.Duration
}

// A Service knows Google's servers. It is safe for concurrent use.
type Service struct {
	cfg  Config
	http *http.Client

	api, authURL, tokenURL, deviceURL, revokeURL string
}

// New returns a service; it connects to nothing.
func New(c Config) (*Service, error) {
	if c.Transport == nil {
		return nil, errors.New("configure gmail: Transport is missing")
	}
	def := func(d *time.Duration, to time.Duration) {
		if *d <= 0 {
			*d = to
		}
	}
	def(&c.Backoff, time.Second)
	def(&c.MaxWait, time.Minute)
	def(&c.PollEvery, 20*time.Second)
	s := &Service{cfg: c, api: googleAPI, authURL: googleAuth, tokenURL: googleToken, deviceURL: googleDevice, revokeURL: googleRevoke}
	if c.Base != "" {
		u, err := url.Parse(c.Base)
		if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
			return nil, fmt.Errorf("configure gmail: base %q is not a URL such as https://gmail.example.com", c.Base)
		}
		base := strings.TrimSuffix(c.Base, "/")
		s.api, s.authURL, s.tokenURL, s.deviceURL, s.revokeURL = base, base+"/o/oauth2/v2/auth", base+"/token", base+"/device/code", base+"/revoke"
	}
	s.http = &http.Client{
		Transport: c.Transport,
		// The attack: a redirect that takes the token, or a message, elsewhere.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return s, nil
}

// An App is the OAuth client of the person who connects mailboxes, as Google Cloud's
// console shows it.
type App struct {
	ID     string      // "….apps.googleusercontent.com"
	Secret auth.Secret // may be empty: a public client, with PKCE alone
}

// A Credential is what opens a mailbox. Who keeps it encrypts it.
type Credential struct {
	App     App
	Refresh auth.Secret // refresh token
}
