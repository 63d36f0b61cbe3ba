package main

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/secret"
)

// TestPrintedLinksAreWhole has the server make links: they begin with its own address,
// whatever a caller calls it.
func TestPrintedLinksAreWhole(t *testing.T) {
	if _, err := guest(); err != nil {
		t.Fatal(err)
	}
	data, url := startServer(t)
	whole := regexp.MustCompile(`(?m)^\s*` + regexp.QuoteMeta(url) + `/console/setup\?token=\S+$`)
	for _, args := range [][]string{{"setup"}, {"person", "invite"}} {
		cmd := exec.CommandContext(t.Context(), "postern", append(args, "--data", data)...)
		out, err := cmd.CombinedOutput()
		if err != nil || !whole.Match(out) {
			t.Errorf("postern %s: %v\n%s\nwant a link below %s", strings.Join(args, " "), err, out, url)
		}
	}
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", filepath.Join(data, "postern.sock"))
	}}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://evil.example/v1/invitations", strings.NewReader(`{"role": "viewer"}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Forwarded-Host", "evil.example")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var v struct{ URL, Path string }
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil || v.URL != url+v.Path || v.Path == "" {
		t.Errorf("the link is %q, %v; want it below %s", v.URL, err, url)
	}
	if b, err := os.ReadFile(filepath.Join(data, pagesFile)); err != nil || strings.TrimSpace(string(b)) != url {
		t.Errorf("%s has %q, %v", pagesFile, b, err)
	}
}

// TestUsesAreKnownToAResolution shows a last use that may be older than the last one.
func TestUsesAreKnownToAResolution(t *testing.T) {
	at := func(d time.Duration) *time.Time { v := time.Now().Add(-d); return &v }
	for _, tt := range []struct {
		t          *time.Time
		resolution time.Duration
		want       string
	}{
		{nil, secret.UseResolution, "never"},
		{&time.Time{}, secret.UseResolution, "never"},
		{at(50 * time.Second), secret.UseResolution, "in the last minute"},
		{at(5 * time.Minute), secret.UseResolution, "5 min ago"},
		{at(5 * time.Minute), auth.UseResolution, "in the last 10 min"},
		{at(3 * time.Hour), auth.UseResolution, "3 h ago"},
	} {
		if got := usedAgo(tt.t, tt.resolution); got != tt.want {
			t.Errorf("%v with %v: %q, want %q", tt.t, tt.resolution, got, tt.want)
		}
	}
}

// TestAgentsAreCalledByTheirNames reads what an agent did: it is called by its address, and
// not by the ID of the key that it used.
func TestAgentsAreCalledByTheirNames(t *testing.T) {
	if _, err := guest(); err != nil {
		t.Fatal(err)
	}
	data, _ := startServer(t)
	command := func(env string, args ...string) string {
		cmd := exec.CommandContext(t.Context(), "postern", append(args, "--data", data)...)
		cmd.Env = append(os.Environ(), env)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("postern %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	note := filepath.Join(t.TempDir(), "note.txt")
	if err := os.WriteFile(note, []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	key := regexp.MustCompile(`pib_\S+`).FindString(command("", "inbox", "create", "analyst"))
	action := regexp.MustCompile(`act_[A-Z0-9]+`).FindString(command(keyVariable+"="+key, "send", "--to", "bob@example.com", "--subject", "hello", "--body", note))
	for _, args := range [][]string{{"audit", "list"}, {"show", action}} {
		out := command("", args...)
		if strings.Contains(out, "agent:crd_") || !regexp.MustCompile(`agent[: ]analyst@`).MatchString(out) {
			t.Errorf("postern %s:\n%s", strings.Join(args, " "), out)
		}
	}
	if out := command("", "audit", "list", "--json"); !strings.Contains(out, "agent:crd_") {
		t.Errorf("programs do not get the principal: %s", out)
	}
}
