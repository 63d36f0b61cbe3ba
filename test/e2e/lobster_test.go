package e2e

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"postern/internal/mailauth/dnstest"
)

var accountToken = regexp.MustCompile(`pgr_[A-Z2-7]{26}`)

// TestLobsterMail plays test/mail/lobster.test.mjs: LobsterMail's unchanged client
// against this server, with only its base URL and token set.
func TestLobsterMail(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--signup", "--webhook-private", "--resolver", dnstest.Start(t).Addr, "--cold", "--pool-max", "0")
	cmd := exec.Command("node", "--test", "--test-force-exit", "--test-reporter=spec", "lobster.test.mjs")
	cmd.Dir = "../mail"
	cmd.Env = append(os.Environ(), "NO_COLOR=1", "HOME="+t.TempDir(), "LOBSTERMAIL_TOKEN=",
		"POSTERN_URL=http://"+s.web, "POSTERN_SMTP="+s.smtp, "POSTERN_BINARY="+s.bin, "POSTERN_DATA="+s.data, "PROJECT_KEY="+s.key,
		"POSTERN_TOKEN="+accountToken.FindString(s.mustCLI("account", "create", "mine")),
		"POSTERN_OTHER_TOKEN="+accountToken.FindString(s.mustCLI("account", "create", "other")))
	out, err := cmd.CombinedOutput()
	// Node repeats the failures at the end, where they are easy to find.
	summary, failures, _ := strings.Cut(string(out), "\n✖ failing tests:")
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, tail(summary, 40), tail(failures, 200))
	}
	t.Log(tail(strings.TrimSpace(summary), 40))
}
