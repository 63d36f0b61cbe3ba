package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"postern/internal/api"
)

// TestAgentFollowsTheDocument is an agent without prior knowledge. It has the sentence that
// a person pasted, curl and a shell. It reads the document that the sentence names, puts
// its code where the document says, runs the blocks of the section one after the other,
// and stops where the document says so. Nothing in here knows a path or a field.
func TestAgentFollowsTheDocument(t *testing.T) {
	if _, err := guest(); err != nil {
		t.Fatal(err)
	}
	data, _ := startServer(t)
	invite := func(args ...string) (c api.ConnectCode) {
		t.Helper()
		var out, errs bytes.Buffer
		if got := run(t.Context(), append([]string{"inbox", "invite", "--data", data, "--json"}, args...), &out, &errs); got != 0 {
			t.Fatalf("invite: %d, %s", got, &errs)
		}
		if err := json.Unmarshal(out.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	for _, tt := range []struct{ name, mode string }{{"newcomer", "gated_send"}, {"second", "gated_all"}} {
		said, err := follow(t, invite(tt.name, "--mode", tt.mode).Prompt)
		if err != nil {
			t.Fatalf("%v\n%s", err, said)
		}
		for _, want := range []string{tt.name + "@agents.internal", tt.mode, "act_", `"state":"pending"`} {
			if !strings.Contains(said, want) {
				t.Errorf("%s: the output lacks %s:\n%s", tt.name, want, said)
			}
		}
		if strings.Contains(said, "pib_") {
			t.Errorf("the key was printed:\n%s", said)
		}
	}
	var out, errs bytes.Buffer
	if run(t.Context(), []string{"pending", "--data", data}, &out, &errs); strings.Count(out.String(), "Test message") != 2 {
		t.Errorf("what waits: %s%s", &out, &errs)
	}

	// A code that was used: the document's own lines stop, and say why.
	prompt := invite("third").Prompt
	if said, err := follow(t, prompt); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	if said, err := follow(t, prompt); err == nil || !strings.Contains(said, "works once") {
		t.Errorf("a used code: %v\n%s", err, said)
	}
}

// follow does what prompt and the document say, in an empty home directory, and returns
// what it saw.
func follow(t *testing.T, prompt string) (said string, err error) {
	t.Helper()
	find := func(pattern, text string) string {
		t.Helper()
		m := regexp.MustCompile(pattern).FindStringSubmatch(text)
		if m == nil {
			t.Fatalf("nothing matches %s in %s", pattern, text)
		}
		return m[1]
	}
	url, section, code := find(`Read (\S+)`, prompt), find(`section "([^"]+)"`, prompt), find(`code is (\w+)`, prompt)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status, err)
	}
	_, text, _ := strings.Cut(string(b), "\n## "+section+"\n")
	text, _, _ = strings.Cut(text, "\n## ")
	placeholder := find(`Replace (\S+) with the code`, text)
	script := ""
	for _, m := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(text, -1) {
		script += strings.ReplaceAll(m[1], placeholder, code)
	}
	home := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "sh", "-c", script)
	cmd.Dir, cmd.Env = home, append(os.Environ(), "HOME="+home)
	out, err := cmd.CombinedOutput()
	return string(out), err
}
