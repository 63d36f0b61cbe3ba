package oauth

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"

	"postern/internal/auth"
	"postern/internal/extract"
	"postern/internal/scan"
	"postern/internal/store"
)

// The limits of registrations.
const (
	maxClients    = 10_000
	maxRedirects  = 10
	maxURI        = 1000 // bytes
	maxClientName = 60   // characters

	unusedTime = 24 * time.Hour      // a client that no person has connected
	idleTime   = 90 * 24 * time.Hour // one without connections, since the last
)

// A Client is a program that registered itself. Nothing that it says of itself is
// proved, but for where its answers go.
type Client struct {
	ID        string // "cli_…"
	Name      string // as it calls itself: hostile text
	Redirects []string
}

var privateScheme = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^[a-z][a-z0-9+-]*(\.[a-z0-9+-]+)+$`)
})

// CheckRedirect returns an error unless answers may go to a URI: https to a host, http to
// this computer alone (RFC 8252, section 7.3), or a private scheme with the name of a
// domain in it (section 7.1). The attack: javascript:, data:, file: and the schemes of
// other programs, by which a page or a program would run what the redirect says.
func CheckRedirect(uri string) error {
	if len(uri) > maxURI || strings.ContainsFunc(uri, func(r rune) bool { return r <= ' ' || r >= 0x7f || strings.ContainsRune("\"'`<>\\^{}|;", r) }) {
		return fmt.Errorf("must be at most %d characters of ASCII, without spaces and quotes", maxURI)
	}
	u, err := url.Parse(uri)
	if err != nil || u.Scheme == "" || u.Fragment != "" || strings.Contains(uri, "#") || u.User != nil {
		return errors.New("must be an absolute URI without a fragment and without a user name")
	}
	switch {
	case u.Scheme == "https" && u.Hostname() != "" && u.Opaque == "":
		return nil
	case u.Scheme == "http" && loopback(u.Hostname()) && u.Opaque == "":
		return nil
	case u.Scheme == "http":
		return errors.New("http is only for this computer (127.0.0.1, [::1] or localhost): use https")
	case privateScheme().MatchString(u.Scheme):
		return nil
	}
	return fmt.Errorf("the scheme %s is not accepted: use https, http to 127.0.0.1, or a private scheme such as com.example.app", u.Scheme)
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// matches reports whether a client that registered the URI registered may be answered at
// asked: the same, character by character, but for the port of this computer (RFC 8252,
// section 7.3), which a program gets when it starts.
func matches(registered, asked string) bool {
	if registered == asked {
		return true
	}
	r, err1 := url.Parse(registered)
	a, err2 := url.Parse(asked)
	if err1 != nil || err2 != nil || r.Scheme != "http" || !loopback(r.Hostname()) || CheckRedirect(asked) != nil {
		return false
	}
	return withoutPort(registered, r) == withoutPort(asked, a)
}

// withoutPort returns a URI without its port, and else as it was written.
func withoutPort(uri string, u *url.URL) string {
	return strings.Replace(uri, "//"+u.Host, "//"+strings.TrimSuffix(u.Host, ":"+u.Port()), 1)
}

// returnsTo says in a few words where a redirect URI leads. It names what the browser
// opens and nothing that the program chose freely.
func returnsTo(uri string) string {
	u, err := url.Parse(uri)
	switch {
	case err != nil:
		return "an address that cannot be read" // unreachable: it was checked
	case u.Scheme == "https":
		return u.Host
	case u.Scheme == "http":
		return "this computer (" + u.Hostname() + ")"
	}
	return "the program on this computer that opens " + u.Scheme + ":"
}

// checkName returns the name of a client as it is shown.
func checkName(name, otherwise string) (string, error) {
	if name = strings.TrimSpace(name); name == "" {
		return otherwise, nil
	}
	if !utf8.ValidString(name) || utf8.RuneCountInString(name) > maxClientName || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return "", fmt.Errorf("client_name: must be at most %d printable characters", maxClientName)
	}
	if err := extract.CheckName(name); err != nil {
		return "", fmt.Errorf("client_name: %w", err)
	}
	// The attack: a program that calls itself as this server, and asks people for keys.
	letters := strings.Map(func(r rune) rune {
		if unicode.IsLetter(r) {
			return unicode.ToLower(r)
		}
		return -1
	}, norm.NFKC.String(name))
	if strings.Contains(letters, "postern") || strings.Contains(strings.ReplaceAll(scan.Plain(letters), " ", ""), "postern") {
		return "", errors.New("client_name: may not contain Postern, which is the name of the server")
	}
	return name, nil
}

// Register stores a program that registers itself from an address. It returns an error
// of type [*Error].
func (s *Server) Register(ctx context.Context, remote, name string, redirects []string) (Client, error) {
	if len(redirects) == 0 || len(redirects) > maxRedirects {
		return Client{}, refuse("invalid_redirect_uri", fmt.Sprintf("redirect_uris: must be 1 to %d", maxRedirects))
	}
	for i, uri := range redirects {
		if err := CheckRedirect(uri); err != nil {
			return Client{}, refuse("invalid_redirect_uri", fmt.Sprintf("redirect_uris[%d]: %v", i, err))
		}
	}
	name, err := checkName(name, "a program without a name")
	if err != nil {
		return Client{}, refuse("invalid_client_metadata", err.Error())
	}
	// The attack: registrations without number.
	err = auth.CountAttempt(ctx, s.db, auth.RegistrationsFrom(remote), auth.RegistrationsInAll())
	if errors.Is(err, auth.ErrTooMany) {
		return Client{}, errBusy
	}
	if err != nil {
		return Client{}, err
	}
	c := Client{ID: "cli_" + rand.Text(), Name: name, Redirects: redirects}
	err = s.db.Update(ctx, func(tx *store.Tx) error {
		if err := dropClients(ctx, tx); err != nil {
			return err
		}
		fresh, err := tx.Changed(ctx, `insert into oauth_client (id, name, redirect_uris, created_at, used_at)
			select $1, $2, $3, $4, 0 where (select count(*) from oauth_client) < $5`,
			c.ID, c.Name, strings.Join(c.Redirects, "\n"), store.Time(time.Now()), maxClients)
		if err == nil && !fresh {
			err = errBusy
		}
		return err
	})
	return c, err
}

// dropClients removes the clients that nobody uses.
func dropClients(ctx context.Context, tx *store.Tx) error {
	now := time.Now()
	_, err := tx.ExecContext(ctx, `delete from oauth_client where created_at < $1 and used_at < $2
		and not exists (select 1 from oauth_grant g where g.client_id = oauth_client.id)`,
		store.Time(now.Add(-unusedTime)), store.Time(now.Add(-idleTime)))
	if err != nil {
		return fmt.Errorf("remove unused clients: %w", err)
	}
	return nil
}

// client returns a registered client, or an error of type [*Error].
func (s *Server) client(ctx context.Context, id string) (c Client, err error) {
	var uris string
	err = s.db.Peek(ctx, `select id, name, redirect_uris from oauth_client where id = $1`, []any{printable(id)}, &c.ID, &c.Name, &uris)
	if errors.Is(err, store.ErrNotFound) {
		return Client{}, refuse("invalid_client", "client_id: no such program is registered here; its registration may have been deleted because nobody used it: connect the program again")
	}
	c.Redirects = strings.Split(uris, "\n")
	return c, err
}

// printable returns s, or nothing if a database would refuse it or it is too long.
func printable(s string) string {
	if len(s) > 200 || !utf8.ValidString(s) || strings.ContainsRune(s, 0) {
		return ""
	}
	return s
}
