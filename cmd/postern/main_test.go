package main

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestHelp: every command explains itself, and says what its flags take.
func TestHelp(t *testing.T) {
	for _, c := range commands() {
		t.Run(c.name(), func(t *testing.T) {
			var out, errs bytes.Buffer
			if got := run(t.Context(), []string{"help", c.name()}, &out, &errs); got != 0 || errs.Len() != 0 {
				t.Errorf("status %d, %s", got, &errs)
			}
			if !strings.HasPrefix(out.String(), "usage: postern "+c.name()) || len(out.String()) < 80 {
				t.Errorf("got %q", &out)
			}
		})
	}
}

func TestUsageErrors(t *testing.T) {
	for _, line := range []string{"frob", "approve", "approve a b", "reject act_1", "resolve act_1 maybe", "audit", "audit list x", "inbox create a b", "inbox frob", "inbox", "gateway", "gateway start x", "gateway start --frob", "inbox key", "inbox key frob", "inbox revoke a", "inbox update", "grant", "domain", "domain add", "domain frob x", "message frob", "send --to a@b.example --frob", "up x", "up --frob", "up --egress maybe", "up --memory 3", "up --dns example.com:53", "up --route x"} {
		t.Run(line, func(t *testing.T) {
			var out, errs bytes.Buffer
			if got := run(t.Context(), strings.Fields(line), &out, &errs); got != 2 || errs.Len() == 0 {
				t.Errorf("status %d, %q; want 2 and a sentence", got, &errs)
			}
		})
	}
}

// TestUpRefuses: a first start that cannot be is refused with a sentence, and
// makes no project, whose key would then never be shown.
func TestUpRefuses(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		flags []string
		want  string
	}{
		{"the web port is taken", []string{"--listen", taken.Addr().String()}, "--listen: "},
		{"the mail port is taken", []string{"--smtp", taken.Addr().String()}, "--smtp: "},
		{"parts cannot be built", []string{"--cache", file}, "cache"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			data := t.TempDir()
			var out, errs bytes.Buffer
			flags := append([]string{"up", "--data", data, "--listen", "127.0.0.1:0", "--smtp", "127.0.0.1:0"}, tt.flags...)
			if got := run(t.Context(), flags, &out, &errs); got != 1 || !strings.Contains(errs.String(), tt.want) {
				t.Errorf("status %d, %q; want 1 and %q", got, &errs, tt.want)
			}
			errs.Reset()
			if got := run(t.Context(), []string{"key", "create", "--data", data}, &out, &errs); got != 1 || !strings.Contains(errs.String(), "no project") {
				t.Errorf("afterwards: status %d, %q; want no project", got, &errs)
			}
		})
	}
}

// TestKeysComeFromTheEnvironment: a key on the command line would be seen by
// everybody on the machine, so that there is no flag for one, and none is taken
// as an argument; without one in the environment a sentence says how it is set.
func TestKeysComeFromTheEnvironment(t *testing.T) {
	for _, line := range []string{"message list", "inbox key list", "grant create", "send --to a@b.example", "inbox recover a@b.example", "inbox webhook list"} {
		t.Setenv(keyVariable, "")
		t.Setenv(recoveryVariable, "")
		var out, errs bytes.Buffer
		if got := run(t.Context(), append(strings.Fields(line), "--data", t.TempDir()), &out, &errs); got != 1 || !strings.Contains(errs.String(), "export POSTERN_") {
			t.Errorf("%s: status %d, %q", line, got, &errs)
		}
	}
	var check func(cmd *cobra.Command)
	check = func(cmd *cobra.Command) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if cmd.HasParent() && strings.Contains(cmd.CommandPath(), " audit ") && f.Name == "key" && strings.Contains(f.Usage, "public `key`") {
				return // of checkpoints: it is no secret
			}
			if slices.Contains([]string{"key", "inbox-key", "token"}, f.Name) {
				t.Errorf("%s has the flag --%s", cmd.CommandPath(), f.Name)
			}
		})
		for _, b := range cmd.Commands() {
			check(b)
		}
	}
	check(newRoot())
}

// TestURL: a key goes to another machine over https alone.
func TestURL(t *testing.T) {
	t.Setenv(keyVariable, "pib_X")
	for url, want := range map[string]bool{
		"http://127.0.0.1:3000": true, "http://localhost:3000": true, "http://[::1]:3000/": true, "https://api.example.com": true,
		"http://api.example.com": false, "http://192.0.2.1": false, "http://127.0.0.1.example.com": false, "http://localhost.example.com": false,
		"ftp://localhost": false, "localhost:3000": false, "://": false,
	} {
		t.Setenv(urlVariable, url)
		if _, err := new(keyed).client(keyVariable); (err == nil) != want {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func TestMoment(t *testing.T) {
	for v, want := range map[string]bool{"": true, "36h": true, "30d": true, "2027-01-31": true, "2027-01-31T12:00:00Z": true, "soon": false, "0d": false, "-1d": false, "30days": false, "1d1d": false} {
		got, err := moment("expires", v)
		if (err == nil) != want || want && (v == "") != (got == nil) {
			t.Errorf("%q: %v, %v", v, got, err)
		}
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv("POSTERN_MAIL_DOMAIN", "agents.example")
	t.Setenv("POSTERN_EGRESS_ALLOW", "a.example, b.example")
	t.Setenv("POSTERN_MAX_TIMEOUT", "1h")
	// The command line wins, and its first use of a list begins a new one.
	var c Config
	fs := pflag.NewFlagSet("up", pflag.ContinueOnError)
	c.flags(fs)
	if err := fs.Parse([]string{"x", "--egress-allow", "c.example", "y", "--egress-allow=d.example", "--", "--not-a-flag"}); err != nil {
		t.Fatal(err)
	}
	if err := fromEnvironment(fs); err != nil {
		t.Fatal(err)
	}
	if c.MailDomain != "agents.example" || !slices.Equal(c.EgressAllow, []string{"c.example", "d.example"}) || c.MaxTimeout.Hours() != 1 {
		t.Errorf("got %+v", c)
	}
	if got := fs.Args(); !slices.Equal(got, []string{"x", "y", "--not-a-flag"}) {
		t.Errorf("arguments %v", got)
	}
	t.Setenv("POSTERN_MAX_TIMEOUT", "soon")
	if err := fromEnvironment(fs); err == nil || !strings.Contains(err.Error(), "POSTERN_MAX_TIMEOUT") {
		t.Errorf("a bad value: %v", err)
	}
	t.Setenv("POSTERN_EGRES", "allow")
	if err := checkEnvironment(); err == nil || !strings.Contains(err.Error(), "POSTERN_EGRES") {
		t.Errorf("a mistyped name: %v", err)
	}
}

// TestOneDashIsAccepted: earlier versions took -name for --name. It works for
// flags alone: never in a value, after --, or in another program's arguments.
func TestOneDashIsAccepted(t *testing.T) {
	root := newRoot()
	for line, want := range map[string]string{
		"pending -data /x":                    "pending --data /x",
		"inbox -data /x list":                 "inbox --data /x list",
		"approve act_1 -reason=yes":           "approve act_1 --reason=yes",
		"reject act_1 --reason -data -data x": "reject act_1 --reason -data --data x",
		"message search -- -data":             "message search -- -data",
		"pending -frob":                       "pending -frob",
	} {
		if got := longForms(root, strings.Fields(line)); !slices.Equal(got, strings.Fields(want)) {
			t.Errorf("%s: got %q, want %q", line, got, want)
		}
	}
}

// TestSuggestions: a mistyped command or flag is answered with what is like it.
func TestSuggestions(t *testing.T) {
	for line, want := range map[string]string{
		"aprove act_1":                 "did you mean approve?",
		"inbox lst":                    "did you mean list?",
		"audit list --objct x":         "did you mean --object?",
		"up --mail-domian x":           "did you mean --mail-domain?",
		"help inbx":                    "did you mean inbox?",
		"inbox show":                   "postern inbox list shows those there are",
		"up --egress-alow a.example x": "did you mean --egress-allow?",
		"message":                      "a verb is missing",
		"completely-unrelated":         "postern help lists them",
	} {
		var out, errs bytes.Buffer
		if got := run(t.Context(), strings.Fields(line), &out, &errs); got != 2 || !strings.Contains(errs.String(), want) {
			t.Errorf("%s: status %d, %q; want 2 and %q", line, got, &errs, want)
		}
	}
}

// name returns the first word of a command's usage line.
func (c *command) name() string {
	name, _, _ := strings.Cut(c.use, " ")
	return name
}
