package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestPolicyFiles: check and test need no server, and what help shows is true.
func TestPolicyFiles(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	postern := func(args ...string) (status int, out string) {
		var stdout, stderr bytes.Buffer
		status = run(t.Context(), args, &stdout, &stderr)
		return status, stdout.String() + stderr.String()
	}
	_, help := postern("policy", "--help")
	example := func(first string) string {
		lines := regexp.MustCompile(`(?m)^  ` + first + `(\n  .*)+`).FindString(help)
		if lines == "" {
			t.Fatalf("help shows no example that begins with %q:\n%s", first, help)
		}
		return strings.ReplaceAll(strings.TrimPrefix(lines, "  "), "\n  ", "\n") + "\n"
	}
	rules, tests := file("policy.yaml", example("version: 1")), file("tests.yaml", example("tests:"))
	bad := file("bad.yaml", "rules:\n  - id: a\n    then: allow\n    whom: [anna]\n")
	fails := file("fails.yaml", "tests:\n  - name: programs are welcome\n    request: {kind: email.send, files: [{name: A.EXE}]}\n    want: allow\n")
	for _, tt := range []struct {
		name string
		args []string
		code int
		want []string
	}{
		{"what help shows is in order", []string{"check", rules}, 0, []string{"programs", "night", "all", "is in order"}},
		{"an unknown field", []string{"check", bad}, 1, []string{"line 4", "rules[0].whom", "no such field"}},
		{"no file", []string{"check", filepath.Join(dir, "none")}, 1, []string{"none"}},
		{"what help shows passes", []string{"test", tests, "--policy", rules}, 0, []string{"ok    nobody sends programs: deny by programs", "1 of 1 tests pass"}},
		{"a test fails", []string{"test", fails, "--policy", rules}, 1, []string{"FAIL", "line 2: programs are welcome: the verdict is deny, want allow (we send no programs)", "1 of 1 tests fail"}},
		{"no server", []string{"test", tests, "--data", dir}, 1, []string{"no server is running", "--policy FILE"}},
		{"no verb", nil, 2, []string{"a verb is missing"}},
		{"another verb", []string{"allow"}, 2, []string{`no policy "allow"`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			code, out := postern(append([]string{"policy"}, tt.args...)...)
			if code != tt.code {
				t.Errorf("got status %d, want %d", code, tt.code)
			}
			for _, w := range tt.want {
				if !strings.Contains(out, w) {
					t.Errorf("got %q, want %q in it", out, w)
				}
			}
		})
	}
}
