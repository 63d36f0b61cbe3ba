package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// errNotFound means that the server knows no such thing.
var errNotFound = errors.New("not found")

// A local is the way to the running server over its local socket.
type local struct {
	conf Config
	http *http.Client
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
	req, err := http.NewRequestWithContext(ctx, method, "http://postern"+path, body)
	if err != nil {
		return err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := l.http.Do(req)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("no server is running on %s; start one with postern up, or name its directory with --data", l.conf.Data)
	}
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%s may be opened only by the server's user: try with sudo", l.conf.socket())
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	if resp.StatusCode == http.StatusNotFound {
		return errNotFound // each command knows better than the server what was asked for
	}
	if resp.StatusCode >= 300 {
		var e struct{ Message string }
		if json.Unmarshal(b, &e) == nil && e.Message != "" {
			return errors.New(e.Message)
		}
		return fmt.Errorf("the server answered %s", resp.Status)
	}
	if out == nil || len(b) == 0 {
		return nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	return nil
}

// onServer is a command's function that talks to the running server.
func onServer(c *Config, f func(ctx context.Context, l *local, args []string, out io.Writer) error) func(context.Context, []string, io.Writer) error {
	return func(ctx context.Context, args []string, out io.Writer) error {
		return f(ctx, newLocal(*c), args, out)
	}
}

// oneArg returns the only argument, which the usage line calls name.
func oneArg(args []string, name string) (string, error) {
	if len(args) != 1 {
		return "", fmt.Errorf("%w: want exactly one %s, got %d arguments", errUsage, name, len(args))
	}
	return args[0], nil
}

func noArgs(args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%w: unexpected argument %q", errUsage, args[0])
	}
	return nil
}

// group makes a command with verbs below it, such as "inbox create".
func group(name, args, short, long string, flags func(*flag.FlagSet), verbs map[string]func(context.Context, []string, io.Writer) error) *command {
	return &command{
		name: name, args: args, short: short, long: long, flags: flags,
		run: func(ctx context.Context, a []string, out io.Writer) error {
			if len(a) == 0 {
				return fmt.Errorf("%w: a verb is missing: %s", errUsage, args)
			}
			f, ok := verbs[a[0]]
			if !ok {
				return fmt.Errorf("%w: there is no %s %q: %s", errUsage, name, a[0], args)
			}
			return f(ctx, a[1:], out)
		},
	}
}

// table writes rows in columns.
func table(out io.Writer, rows [][]string) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	for _, r := range rows {
		fmt.Fprintln(w, strings.Join(r, "\t"))
	}
	return w.Flush()
}

// ago says how long before now t was.
func ago(t time.Time) string {
	switch d := time.Since(t); {
	case d < time.Minute:
		return fmt.Sprintf("%d s ago", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%d min ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h ago", int(d.Hours()))
	}
	return t.Local().Format("2006-01-02 15:04")
}
