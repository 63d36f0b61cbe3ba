package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"postern/client"
)

// errNotFound means that the server knows no such thing.
var errNotFound error = client.ErrNotFound

// errSession means that a session is over, or was never one.
var errSession = errors.New("the session in " + sessionVariable + " is not valid, or has ended: sign in again (export " + sessionVariable + "=$(postern login NAME))")

// A local is the way to the running server over its local socket, as a person,
// or with a key as whoever that is, then also over the network.
type local struct {
	api  *client.Client // uses the fields below
	conf Config
	http *http.Client
	base string // of the server's address; empty means the local socket
	key  string // shown with each request; empty means none

	ended error // what is said where the key is not good; nil means what the server says
}

// localBase is the address that requests over the local socket name. It is never
// dialled.
const localBase = "http://127.0.0.1"

func newLocal(c Config) *local {
	l := &local{conf: c, http: &http.Client{
		Timeout: time.Minute,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", c.socket())
		}},
	}}
	if err := l.connect(); err != nil { // unreachable: the address is ours
		panic(err)
	}
	return l
}

// connect makes the client of what l says now.
func (l *local) connect() (err error) {
	conf := client.Config{URL: cmp.Or(l.base, localBase), Key: l.key, HTTP: l.http, UserAgent: "postern"}
	if l.base == "" {
		conf.Retries = -1 // a server that does not run here is said at once
	}
	l.api, err = conf.New()
	return err
}

// call does a request that the client has no method for: those on E2B's wire,
// and those whose path the caller composes.
func (l *local) call(ctx context.Context, method, path string, in, out any) error {
	err := l.api.Call(ctx, method, path, in, out)
	if way := (*url.Error)(nil); errors.As(err, &way) && l.base == "" {
		return l.unreachable(err)
	}
	return err
}

// explain turns an error of the client into one for people: the server's text
// without control characters, or why the server cannot be reached.
func (l *local) explain(err error) error {
	var said *client.Error
	var way *url.Error
	switch {
	case errors.As(err, &said) && said.Status == http.StatusUnauthorized && l.ended != nil:
		return l.ended
	case errors.As(err, &said) && printable(err.Error()) != err.Error(): // a server's text may hold control characters
		return errors.New(printable(err.Error()))
	case errors.As(err, &way) && l.base == "":
		return l.unreachable(err)
	}
	return err
}

// unreachable says why the local socket does not answer, if that is known.
func (l *local) unreachable(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("no server is running on %s; start one with postern up, or name its directory with --data", l.conf.Data)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s may be opened only by the server's user: try with sudo", l.conf.socket())
	}
	return err
}

// address returns the URL of a path of the server.
func (l *local) address(path string) string { return cmp.Or(l.base, localBase) + path }

// do sends a request, with the key if there is one.
func (l *local) do(req *http.Request) (*http.Response, error) {
	if l.key != "" {
		req.Header.Set("Authorization", "Bearer "+l.key)
		if strings.HasPrefix(l.key, "e2b_") {
			req.Header.Set("X-Api-Key", l.key) // as E2B's own clients show it
		}
	}
	resp, err := l.http.Do(req)
	if err != nil && l.base == "" {
		return nil, l.unreachable(err)
	}
	return resp, err
}

// failure returns the error that an answer is, in the server's words.
func failure(resp *http.Response, body []byte) error {
	if resp.StatusCode == http.StatusNotFound {
		return errNotFound // each command knows better than the server what was asked for
	}
	if resp.StatusCode < 300 {
		return nil
	}
	var e struct{ Message string }
	if json.Unmarshal(body, &e) == nil && e.Message != "" {
		return errors.New(printable(e.Message))
	}
	return fmt.Errorf("the server answered %s", resp.Status)
}

// onServer is a command's function that talks to the running server: as the
// person whose session the environment has, as the project whose key it has,
// and as its operator otherwise.
func onServer(c *Config, f func(ctx context.Context, l *local, args []string, out *output) error) runner {
	return func(ctx context.Context, args []string, out *output) error {
		l, err := asCaller(*c)
		if err != nil {
			return err
		}
		return l.explain(f(ctx, l, args, out))
	}
}

// oneArg returns the only argument, which the usage line calls name.
func oneArg(args []string, name string) (string, error) {
	switch len(args) {
	case 0:
		return "", fmt.Errorf("%w: %s is missing", errUsage, name)
	case 1:
		return args[0], nil
	}
	return "", fmt.Errorf("%w: want one %s, not also %q; quote a value that has spaces", errUsage, name, args[1])
}

// oneAction returns the only argument, the ID of an action.
func oneAction(args []string) (string, error) {
	id, err := oneArg(args, "ID")
	if err != nil && len(args) == 0 {
		return "", fmt.Errorf("%w; postern pending shows what waits", err)
	}
	return id, err
}

func noArgs(args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%w: unexpected argument %q", errUsage, args[0])
	}
	return nil
}

// completing returns a completion of the first argument with what ask returns:
// names, each with a description after a tab. It is given up after a second: a
// person who presses Tab does not wait for a server.
func completing(c *Config, ask func(context.Context, *local) ([]string, error)) func(context.Context, []string) []string {
	return func(ctx context.Context, args []string) []string {
		if len(args) > 0 {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		var names []string
		_ = onServer(c, func(ctx context.Context, l *local, _ []string, _ *output) (err error) { // an error completes nothing
			names, err = ask(ctx, l)
			return err
		})(ctx, nil, newOutput(io.Discard, false, false))
		return names
	}
}
