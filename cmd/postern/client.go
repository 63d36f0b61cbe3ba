package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"
)

// errNotFound means that the server knows no such thing.
var errNotFound = errors.New("not found")

// errSession means that a session is over, or was never one.
var errSession = errors.New("the session in " + sessionVariable + " is not valid, or has ended: sign in again (export " + sessionVariable + "=$(postern login NAME))")

// A local is the way to the running server over its local socket, as a person,
// or with a key as whoever that is, then also over the network.
type local struct {
	conf Config
	http *http.Client
	base string // of the server's address; empty means the local socket
	key  string // shown with each request; empty means none

	ended error // what is said where the key is not good; nil means what the server says
}

func newLocal(c Config) *local {
	return &local{conf: c, http: &http.Client{
		Timeout: time.Minute,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", c.socket())
		}},
	}}
}

// call sends in as JSON, if it is not nil, and reads the answer into out, if
// that is not nil.
func (l *local) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, l.address(path), body)
	if err != nil {
		return err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := l.do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	if resp.StatusCode == http.StatusUnauthorized && l.ended != nil {
		return l.ended
	}
	if err := failure(resp, b); err != nil {
		return err
	}
	if out == nil || len(b) == 0 {
		return nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	return nil
}

// address returns the URL of a path of the server.
func (l *local) address(path string) string { return cmp.Or(l.base, "http://postern") + path }

// do sends a request, with the key if there is one.
func (l *local) do(req *http.Request) (*http.Response, error) {
	if l.key != "" {
		req.Header.Set("Authorization", "Bearer "+l.key)
		if strings.HasPrefix(l.key, "e2b_") {
			req.Header.Set("X-Api-Key", l.key) // as E2B's own clients show it
		}
	}
	resp, err := l.http.Do(req)
	if l.base != "" {
		return resp, err
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, fmt.Errorf("no server is running on %s; start one with postern up, or name its directory with --data", l.conf.Data)
	}
	if errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("%s may be opened only by the server's user: try with sudo", l.conf.socket())
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
		l := newLocal(*c)
		var err error
		switch {
		case os.Getenv(sessionVariable) != "":
			if l, err = (&keyed{conf: *c}).client(sessionVariable); err != nil {
				return err
			}
			l.ended = errSession
		case os.Getenv(projectVariable) != "":
			if l, err = (&keyed{conf: *c}).client(projectVariable); err != nil {
				return err
			}
		}
		return f(ctx, l, args, out)
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
