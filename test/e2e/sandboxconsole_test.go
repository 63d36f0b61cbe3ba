package e2e

import (
	"os"
	"os/exec"
	"testing"
)

// TestBrowserSandbox works in a real sandbox with headless Chromium: its page, a file that is
// downloaded, a terminal whose programs try to make it type, a flood, and a command without
// JavaScript.
func TestBrowserSandbox(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--domain", "boxes.test", "--public-ports")
	b := s.sandbox(map[string]any{"metadata": map[string]string{"name": "reconcile november", "team": "finance"}})
	if r := b.run("printf 'one\\033[2Jtwo\\n' > note.txt; mkdir -p work/ledger; mkfifo pipe; ln -s /proc/1/environ env; truncate -s 1T sparse; touch $'a\\nb'; setsid python3 -m http.server 8000 >/dev/null 2>&1 & sleep 1; curl -sm 3 https://refused.example/ || true"); r.exit != 0 {
		t.Fatalf("%+v", r)
	}
	shots := os.Getenv("POSTERN_TEST_SCREENSHOTS")
	if shots == "" {
		shots = t.TempDir()
	}
	out, err := exec.Command("node", "../browser/sandbox.mjs", "http://"+s.web, s.link, b.id, shots).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
}
