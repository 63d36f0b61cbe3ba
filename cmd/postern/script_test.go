package main

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"postern": main})
}

// TestCommandLine runs the scripts in testdata/script, one of whose users is an
// attacker, against a server with the default settings but for sandboxes.
func TestCommandLine(t *testing.T) { runScripts(t, "testdata/script") }

// TestReviewDecidesOnWhatWasShown has a server to itself: it decides on all that
// waits there.
func TestReviewDecidesOnWhatWasShown(t *testing.T) { runScripts(t, "testdata/review") }

func runScripts(t *testing.T, dir string) {
	t.Helper()
	if _, err := guest(); err != nil {
		t.Fatal(err)
	}
	if b, ok := debug.ReadBuildInfo(); ok && slices.Contains(b.Settings, debug.BuildSetting{Key: "CGO_ENABLED", Value: "1"}) {
		t.Skip("a server must be linked statically: the race detector cannot run this test, CGO_ENABLED=0 can")
	}
	data, url := startServer(t)
	key := strings.TrimSpace(string(readFile(t, filepath.Join(data, keyFile))))
	var out, errs bytes.Buffer
	if got := run(t.Context(), []string{"project", "create", "other", "--data", data}, &out, &errs); got != 0 {
		t.Fatalf("project create: %d, %s", got, &errs)
	}
	lines := strings.Fields(out.String())
	other := lines[len(lines)-1]
	testscript.Run(t, testscript.Params{
		Dir: dir,
		Setup: func(e *testscript.Env) error {
			e.Setenv("POSTERN_DATA", data)
			e.Setenv("SERVER", url)
			e.Setenv("KEY", key)
			e.Setenv("OTHER_KEY", other)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"capture": capture},
	})
}

// capture sets a variable to the last output's first word that begins with a
// text: capture NAME PREFIX.
func capture(ts *testscript.TestScript, _ bool, args []string) {
	for word := range strings.FieldsFuncSeq(ts.ReadFile("stdout"), func(r rune) bool { return r == ' ' || r == '\n' || r == '"' || r == ',' }) {
		if strings.HasPrefix(word, args[1]) {
			ts.Setenv(args[0], word)
			return
		}
	}
	ts.Fatalf("no word of the output begins with %q", args[1])
}

// startServer runs a server until the end of the test.
func startServer(t *testing.T) (data, url string) {
	t.Helper()
	data = t.TempDir()
	return data, startServerIn(t, data)
}

// startServerIn starts a server on a data directory and returns its address.
func startServerIn(t *testing.T, data string) (url string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	return serve(t, exec.CommandContext(ctx, "postern", "gateway", "start", "--data", data, "--cache", t.TempDir(), "--sandboxes=off", "--listen", "127.0.0.1:0", "--smtp", "127.0.0.1:0"), cancel)
}

// serve starts a server, which cancel ends, and returns its address.
func serve(t *testing.T, cmd *exec.Cmd, cancel func()) (url string) {
	t.Helper()
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	cmd.Stderr = t.Output()
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was interrupted
	})
	in := bufio.NewScanner(stdout)
	for in.Scan() {
		if _, after, ok := strings.Cut(in.Text(), "API, proxy, MCP"); ok {
			url = strings.TrimSpace(after)
		}
		if strings.Contains(in.Text(), linkFile) {
			return url
		}
	}
	t.Fatalf("the server did not start: %v", in.Err())
	return ""
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
