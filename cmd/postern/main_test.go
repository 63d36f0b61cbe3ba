package main

import (
	"bytes"
	"flag"
	"slices"
	"strings"
	"testing"
)

// TestHelp: every command explains itself, and says what its flags take.
func TestHelp(t *testing.T) {
	for _, c := range commands() {
		t.Run(c.name, func(t *testing.T) {
			var out, errs bytes.Buffer
			if got := run(t.Context(), []string{"help", c.name}, &out, &errs); got != 0 || errs.Len() != 0 {
				t.Errorf("status %d, %s", got, &errs)
			}
			if !strings.HasPrefix(out.String(), "usage: postern "+c.name) || len(out.String()) < 80 {
				t.Errorf("got %q", &out)
			}
		})
	}
}

func TestUsageErrors(t *testing.T) {
	for _, line := range []string{"frob", "approve", "approve a b", "reject act_1", "resolve act_1 maybe", "audit", "audit list x", "inbox create", "inbox frob", "up x", "up --frob", "up --egress maybe", "up --memory 3", "up --dns example.com:53", "up --route x"} {
		t.Run(line, func(t *testing.T) {
			var out, errs bytes.Buffer
			if got := run(t.Context(), strings.Fields(line), &out, &errs); got != 2 || errs.Len() == 0 {
				t.Errorf("status %d, %q; want 2 and a sentence", got, &errs)
			}
		})
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv("POSTERN_MAIL_DOMAIN", "agents.example")
	t.Setenv("POSTERN_EGRESS_ALLOW", "a.example, b.example")
	t.Setenv("POSTERN_MAX_TIMEOUT", "1h")
	var c Config
	fs := flag.NewFlagSet("up", flag.ContinueOnError)
	c.flags(fs)
	if err := fromEnvironment(fs); err != nil {
		t.Fatal(err)
	}
	if c.MailDomain != "agents.example" || !slices.Equal(c.EgressAllow, []string{"a.example", "b.example"}) || c.MaxTimeout.Hours() != 1 {
		t.Errorf("got %+v", c)
	}
	// The command line wins, and its first use of a list begins a new one.
	rest, err := parseInterleaved(fs, []string{"x", "--egress-allow", "c.example", "y", "--egress-allow=d.example", "--", "--not-a-flag"})
	if err != nil || !slices.Equal(rest, []string{"x", "y", "--not-a-flag"}) || !slices.Equal(c.EgressAllow, []string{"c.example", "d.example"}) {
		t.Errorf("got %v, %v, %v", rest, c.EgressAllow, err)
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
