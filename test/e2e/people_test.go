package e2e

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestBrowserPeople signs people in, in headless Chromium: with an authenticator app
// and no JavaScript, and with passkeys on a virtual authenticator. Passkeys need a name, so the console is opened as localhost.
func TestBrowserPeople(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--cold", "--pool-max", "0")
	shots := os.Getenv("POSTERN_TEST_SCREENSHOTS")
	if shots == "" {
		shots = t.TempDir()
	}
	named := func(link string) string { return strings.Replace(link, "127.0.0.1:", "localhost:", 1) }
	out, err := exec.Command("node", "../browser/people.mjs", "http://"+named(s.web), named(s.link), shots).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
}
