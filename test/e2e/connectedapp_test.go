package e2e

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
)

// TestConnectedApp: the official client of the Model Context Protocol connects itself by
// OAuth to the real binary, while a person answers in Chromium. With
// POSTERN_TEST_SCREENSHOTS the pictures of the pages are kept there.
func TestConnectedApp(t *testing.T) {
	if testing.Short() {
		t.Skip("a browser is for whole runs")
	}
	t.Parallel()
	s := start(t, t.TempDir(), "--pool-max", "0", "--pool-min", "0")
	address, key := s.inbox("desk")
	shots := os.Getenv("POSTERN_TEST_SCREENSHOTS")
	if shots == "" {
		shots = t.TempDir()
	}
	node := map[string]string{"amd64": "x64", "arm64": "arm64"}[runtime.GOARCH]
	cmd := exec.Command("node_modules/node-linux-"+node+"/bin/node", "oauth.mjs")
	cmd.Dir = "../mcp"
	cmd.Env = append(os.Environ(), "URL=http://"+s.web+"/mcp", "LINK="+s.link, "INBOX="+address, "INBOX_KEY="+key, "OUT="+shots)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "connected, sent, renewed and disconnected") {
		t.Fatalf("%v\n%s", err, tail(string(out), 60))
	}
	if pending := s.mustCLI("pending"); !strings.Contains(pending, "By OAuth") {
		t.Errorf("what the app proposed does not wait:\n%s", pending)
	}
	if list := s.mustCLI("app", "list"); strings.Contains(list, "A desktop program") {
		t.Errorf("the app is still listed:\n%s", list)
	}
}
