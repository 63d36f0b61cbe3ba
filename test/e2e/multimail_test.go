package e2e

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

var multimailKey = regexp.MustCompile(`mm_live_[A-Z2-7]{26}`)

// TestMultiMail plays test/mail/multimail.test.mjs: each tool of MultiMail's MCP server
// once, with its effect or its refusal.
func TestMultiMail(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--webhook-private", "--cold", "--pool-max", "0")
	s.person("ann")
	cmd := exec.Command("node", "--test", "--test-force-exit", "--test-reporter=spec", "multimail.test.mjs")
	cmd.Dir = "../mail"
	cmd.Env = append(os.Environ(), "NO_COLOR=1", "HOME="+t.TempDir(),
		"POSTERN_URL=http://"+s.web, "POSTERN_SMTP="+s.smtp, "POSTERN_BINARY="+s.bin, "POSTERN_DATA="+s.data,
		"MULTIMAIL_KEY="+multimailKey.FindString(s.mustCLI("account", "create", "mine", "--multimail")))
	out, err := cmd.CombinedOutput()
	// Node repeats the failures at the end, where they are easy to find.
	summary, failures, _ := strings.Cut(string(out), "\n✖ failing tests:")
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, tail(summary, 40), tail(failures, 200))
	}
	t.Log(tail(strings.TrimSpace(summary), 40))
}
