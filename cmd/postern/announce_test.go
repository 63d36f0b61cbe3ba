package main

import (
	"bytes"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"postern/internal/auth"
)

func parsed(t *testing.T, args ...string) *Config {
	t.Helper()
	var c Config
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.flags(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return &c
}

// TestSecretsOfAFirstStart: what is shown once is not in an output that something
// keeps, such as a journal or a pipe to tee, but in files of this user's alone.
func TestSecretsOfAFirstStart(t *testing.T) {
	c := parsed(t, "--data", t.TempDir())
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	lis := &listeners{web: l, smtp: l}
	const key, token = "e2b_0123456789", "tok123"
	piped, pipe, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer piped.Close()
	if err := announce(pipe, *c, lis, firstStart{key: auth.Secret(key), setup: auth.Secret(token)}); err != nil {
		t.Fatal(err)
	}
	pipe.Close()
	var out bytes.Buffer
	if _, err := out.ReadFrom(piped); err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{key, token} {
		if strings.Contains(out.String(), secret) {
			t.Errorf("the output holds a secret: %s", out.String())
		}
	}
	for name, want := range map[string]string{keyFile: key + "\n", linkFile: "http://" + l.Addr().String() + "/console/setup?token=" + token + "\n"} {
		path := filepath.Join(c.Data, name)
		b, err := os.ReadFile(path)
		if err != nil || string(b) != want || !strings.Contains(out.String(), path) {
			t.Errorf("%s: %q, %v; want %q, and its path in %s", name, b, err, want, out.String())
		}
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, fi, err)
		}
	}
	// With an account there is no link any more; the key stays until it is taken.
	if err := announce(&out, *c, lis, firstStart{}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(c.Data, linkFile)); !os.IsNotExist(err) {
		t.Errorf("a link that is used up is left: %v", err)
	}
	if _, err := os.Stat(filepath.Join(c.Data, keyFile)); err != nil {
		t.Error(err)
	}
}

// TestListenOnAllAddresses: a server that listens everywhere names an address that
// others reach, under which the console answers too.
func TestListenOnAllAddresses(t *testing.T) {
	for _, listen := range []string{"0.0.0.0:3000", "[::]:3000"} {
		a := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(listen))
		if got := reachable(a, []string{"box.example"}); got != "box.example:3000" {
			t.Errorf("with a name: got %s", got)
		}
		got := reachable(a, nil)
		host, port, err := net.SplitHostPort(got)
		if err != nil || port != "3000" || host == "0.0.0.0" || host == "::" {
			t.Errorf("%s is named %s", listen, got)
		}
		if hosts := consoleHosts(*parsed(t), listen, ""); !slices.Contains(hosts, got) {
			t.Errorf("the console answers under %v, and not as %s", hosts, got)
		}
	}
	if got := reachable(net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:3000")), []string{"box.example"}); got != "127.0.0.1:3000" {
		t.Errorf("on loopback: %s", got)
	}
}

// TestWarnings: what an operator would find out too late is said at the start.
func TestWarnings(t *testing.T) {
	tests := []struct {
		name, listen, want string
		args               []string
	}{
		{"on loopback", "127.0.0.1:3000", "", nil},
		{"everywhere, in the clear", "0.0.0.0:3000", "--tls-cert", []string{"--listen", "0.0.0.0:3000"}},
		{"on one address, in the clear", "192.0.2.1:3000", "clear text", nil},
		{"behind a proxy that does TLS", "192.0.2.1:3000", "", []string{"--https"}},
		{"over TLS", "192.0.2.1:3000", "", []string{"--listen-tls", ":443", "--tls-cert", "x", "--tls-key", "y"}},
		{"notices to some", "127.0.0.1:3000", "--notify-from", []string{"--notify-from", "a@b.example", "--route", "c.example=127.0.0.1:25"}},
		{"notices to all", "127.0.0.1:3000", "", []string{"--notify-from", "a@b.example", "--relay", "127.0.0.1:25"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := strings.Join(parsed(t, tt.args...).warnings(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(tt.listen))), "\n")
			if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
				t.Errorf("got %q, want %q in it", got, tt.want)
			}
		})
	}
	for want, args := range map[string][]string{
		"only for agents.internal":       nil,
		"--route for c.example":          {"--route", "c.example=127.0.0.1:25"},
		"through relay.example:25":       {"--relay", "relay.example:25"},
		"to the servers that DNS names":  {"--deliver", "mx"},
		"--deliver=mx, --relay or --rou": nil,
	} {
		if got := parsed(t, args...).wayOut(); !strings.Contains(got, want) {
			t.Errorf("%v: got %q, want %q in it", args, got, want)
		}
	}
	c := parsed(t, "--notify-from", "a@b.example")
	if err := c.validate(); err == nil || !strings.Contains(err.Error(), "--notify-from: mail has no way out") || !strings.Contains(err.Error(), "--relay") {
		t.Errorf("notices without a way out: %v", err)
	}
}
