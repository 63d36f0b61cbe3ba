package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// The variables that commands which open an inbox read. A key is never taken
// from the command line: everybody on the machine sees that in the list of
// processes, and shells keep it in their history.
const (
	keyVariable      = "POSTERN_INBOX_KEY"
	recoveryVariable = "POSTERN_RECOVERY_KEY"
	urlVariable      = "POSTERN_URL"
	projectVariable  = "POSTERN_PROJECT_KEY"
)

// clientVariables are no settings of the server, and no mistyped ones either.
var clientVariables = []string{keyVariable, recoveryVariable, urlVariable, mcpKeyVariable, projectVariable, sessionVariable}

// A keyed is the way of a command that shows a credential.
type keyed struct {
	conf  Config
	inbox string // an id or an address; empty means the credential's own
}

func (k *keyed) flags(fs *pflag.FlagSet) {
	k.conf.location(fs)
	fs.StringVar(&k.inbox, "inbox", "", "`id or address` of the inbox; needed only with a grant over several")
}

const keyedHelp = `
The key comes from the environment, never from the command line, where every
user of the machine could see it:

  export POSTERN_INBOX_KEY=pib_...          # or a grant, pgr_...
  export POSTERN_URL=https://api.example.com  # if the server is another machine

Without POSTERN_URL the server is asked over the local socket in --data.`

// client returns the way to the server with the credential in the variable.
func (k *keyed) client(variable string) (*local, error) {
	key := strings.TrimSpace(os.Getenv(variable))
	if key == "" {
		if variable == sessionVariable {
			return nil, fmt.Errorf("the environment has no %s: sign in first (export %s=$(postern login NAME))", variable, variable)
		}
		return nil, fmt.Errorf("the environment has no %s: a key of the inbox is needed (export %s=...)", variable, variable)
	}
	return k.remote(key)
}

// remote returns the way to the server, on another machine or this one, with a
// credential; none where that is empty.
func (k *keyed) remote(key string) (*local, error) {
	l := newLocal(k.conf)
	l.key = key
	base := os.Getenv(urlVariable)
	if base == "" {
		return l, l.connect()
	}
	if _, err := serverURL(urlVariable, base); err != nil {
		return nil, err
	}
	l.base = strings.TrimSuffix(base, "/")
	l.http = &http.Client{
		Timeout:       time.Minute,
		Transport:     &http.Transport{Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: 10 * time.Second}).DialContext},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // the key is for this server
	}
	return l, l.connect()
}

// serverURL reads the URL of a server that is shown a key.
func serverURL(variable, base string) (*url.URL, error) {
	u, err := url.Parse(base)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("%s is not a URL such as https://api.example.com", variable)
	}
	// The attack: whoever listens on the way has the key.
	if addr, err := netip.ParseAddr(u.Hostname()); u.Scheme == "http" && u.Hostname() != "localhost" && (err != nil || !addr.IsLoopback()) {
		return nil, fmt.Errorf("%s is http: a key is sent to another machine over https only", variable)
	}
	return u, nil
}

// withKey is a command's function that shows the inbox's key. It is given the
// path of the inbox, /v1/inboxes/ibx_….
func (k *keyed) withKey(f func(ctx context.Context, l *local, path string, args []string, out *output) error) runner {
	return func(ctx context.Context, args []string, out *output) error {
		l, err := k.client(keyVariable)
		if err != nil {
			return err
		}
		id, err := k.own(ctx, l)
		if err != nil {
			return l.explain(err)
		}
		return l.explain(f(ctx, l, "/v1/inboxes/"+pathSegment(id), args, out))
	}
}

// own returns the inbox that is meant.
func (k *keyed) own(ctx context.Context, l *local) (string, error) {
	if k.inbox != "" {
		return k.inbox, nil
	}
	list, err := collect(l.api.Inboxes.List(ctx, false))
	if err != nil {
		return "", err
	}
	if len(list) == 1 {
		return list[0].ID, nil
	}
	if len(list) == 0 {
		return "", errors.New("this key opens no inbox: it may have ended, or the inbox was deleted")
	}
	var names []string
	for _, b := range list {
		names = append(names, b.Address)
	}
	return "", fmt.Errorf("%w: this key opens several inboxes: name one with --inbox: %s", errUsage, strings.Join(names, ", "))
}

// moment reads a time of the command line: a date, a time, or how long from now.
func moment(flag, v string) (*time.Time, error) {
	if v == "" {
		return nil, nil //nolint:nilnil // there is none, which is no error
	}
	if d, err := time.ParseDuration(v); err == nil {
		t := time.Now().Add(d).UTC()
		return &t, nil
	}
	var days int
	if n, err := fmt.Sscanf(v+"!", "%dd!", &days); err == nil && n == 1 && days > 0 && days < 36500 {
		t := time.Now().AddDate(0, 0, days).UTC()
		return &t, nil
	}
	for _, layout := range []string{time.RFC3339, time.DateOnly} {
		if t, err := time.ParseInLocation(layout, v, time.Local); err == nil {
			t = t.UTC()
			return &t, nil
		}
	}
	return nil, fmt.Errorf("%w: --%s: %q is not a time: want 36h, 30d, 2027-01-31 or 2027-01-31T12:00:00Z", errUsage, flag, v)
}

// notFoundAs returns err, and for what the server does not know a sentence.
func notFoundAs(err error, format string, args ...any) error {
	if errors.Is(err, errNotFound) {
		return fmt.Errorf(format, args...)
	}
	return err
}

// collect returns all elements of a list of the client.
func collect[T any](list iter.Seq2[T, error]) ([]T, error) {
	out := []T{}
	for v, err := range list {
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

// first returns the first of texts that is not empty, printable.
func first(texts ...string) string { return printable(cmp.Or(texts...)) }

// either is a command's function that shows the inbox's key if there is one in
// the environment, and is [onServer] otherwise. Its path is the inbox's, or
// /v1 for all of the project.
func (k *keyed) either(f func(ctx context.Context, l *local, path string, args []string, out *output) error) runner {
	return func(ctx context.Context, args []string, out *output) error {
		if os.Getenv(keyVariable) != "" {
			return k.withKey(f)(ctx, args, out)
		}
		return onServer(&k.conf, func(ctx context.Context, l *local, args []string, out *output) error {
			return f(ctx, l, "/v1", args, out)
		})(ctx, args, out)
	}
}
