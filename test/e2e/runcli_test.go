package e2e

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	rest "postern/client"
)

// TestRunCommand checks the command postern run with real sandboxes: its exit statuses, on
// which scripts rely, its input files and the files that it saves.
func TestRunCommand(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--memory", "512", "--pool-max", "0")
	_, person := s.api()
	dir := t.TempDir()
	write := func(name, text string) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	text := "version: 1\nname: sums\ncommands: {allow: [{run: \"python3 **\"}]}\nfiles: {write: [/work], inputs: [{path: \"/work/*\"}]}\nlimits: {time: 90s, memory: 512MiB}\nartifacts: [{path: /work/out.csv, type: csv}]\n"
	job, brief := write("job.yaml", text), write("brief.yaml", strings.Replace(text, "90s", "1s", 1))
	script, input := write("sum.py", "import sys\nrows = open('/work/in.csv').read().split()\nopen('/work/out.csv', 'w').write('sum\\n%d\\n' % sum(map(int, rows)))\nsys.exit(int(sys.argv[1]))\n"), write("in.csv", "40\n2\n")

	ctx, cancel := context.WithCancel(t.Context())
	decided := make(chan struct{})
	go func() { // a person who approves what waits
		defer close(decided)
		for ctx.Err() == nil {
			list, err := person.Actions.List(ctx, 50, rest.StatePending)
			for _, a := range list {
				if err == nil {
					_ = approveRun(ctx, person, a.ID) // the next round tries again
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	}()
	defer func() {
		cancel()
		<-decided
	}()
	out := filepath.Join(dir, "out")
	for _, c := range []struct {
		name string
		args []string
		want int
		says string
	}{
		{"its result is saved", []string{job, "--input", input, "--file", script, "--out", out, "--", "0"}, 0, "saved"},
		{"an existing file is kept", []string{job, "--input", input, "--file", script, "--out", out, "--", "0"}, 123, "--force"},
		{"the program's own status", []string{job, "--input", input, "--file", script, "--", "7"}, 7, "exit 7"},
		{"another program", []string{job, "--", "python3", "-c", "import os; os.execvp('env', ['env'])"}, 121, "violated"},
		{"an input that is missing", []string{job, "--input", filepath.Join(dir, "none.csv"), "--", "python3"}, 120, "no such file"},
		{"the first run", []string{"--first"}, 0, "0 not verified"},
		{"the first run again", []string{"--first"}, 0, "no person was asked"},
		{"a time-out", []string{brief, "--", "python3", "-c", "import time; time.sleep(60)"}, 124, "timed out"},
	} {
		got, text := s.runStatus(t, nil, c.args...)
		if got != c.want || !strings.Contains(text, c.says) {
			t.Errorf("%s: exit %d, want %d and %q:\n%s", c.name, got, c.want, c.says, text)
		}
	}
	if b, err := os.ReadFile(filepath.Join(out, "out.csv")); err != nil || string(b) != "sum\n42\n" {
		t.Errorf("saved %q, %v", b, err)
	}
	got, text := s.runStatus(t, func(p *os.Process, said func() string) {
		for range 300 {
			if strings.Contains(said(), "start python3") {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		_ = p.Signal(os.Interrupt)
	}, job, "--", "python3", "-c", "import time; time.sleep(80)")
	if got != 123 || !strings.Contains(text, "cancelled") {
		t.Errorf("Ctrl-C: exit %d, want 123:\n%s", got, text)
	}
}

// runStatus executes postern run and returns its exit status and output. If meanwhile is not
// nil, it is called while the command runs.
func (s *server) runStatus(t *testing.T, meanwhile func(p *os.Process, said func() string), args ...string) (int, string) {
	t.Helper()
	var b lockedBuffer
	cmd := exec.CommandContext(t.Context(), s.bin, append([]string{"run", "--data", s.data}, args...)...)
	cmd.Stdout, cmd.Stderr = &b, &b
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if meanwhile != nil {
		go meanwhile(cmd.Process, b.String)
	}
	err := cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), b.String()
}
