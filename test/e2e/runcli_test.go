package e2e

import (
	"context"
	"errors"
	"fmt"
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
		{"several commands", []string{job, "--input", input, "--input", script, "--out", out, "--force", "--command", "python3 sum.py 0", "--command", "python3 -c 'print(6 * 7)'"}, 0, "print(6 * 7)"},
		{"the second of several fails", []string{job, "--command", "python3 -c pass", "--command", "python3 -c 'raise SystemExit(9)'", "--command", "python3 -c 'print(1)'"}, 9, "command 2 ended with exit code 9"},
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
	cmd.Stdout, cmd.Stderr, cmd.Env = &b, &b, append(os.Environ(), s.env...)
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

// TestRunWithAProjectKey: a key may not see the actions by which files leave, since the
// sandbox has proposed them. The exit status is the program's all the same.
func TestRunWithAProjectKey(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--memory", "512", "--pool-max", "0")
	_, person := s.api()
	dir := t.TempDir()
	text := "version: 1\nname: sums\ncommands: {allow: [{run: \"python3 **\"}]}\nfiles: {write: [/work]}\nlimits: {time: 90s, memory: 512MiB}\nartifacts: [{path: /work/a.csv, type: csv}, {path: /work/b.txt, type: text, review: policy}]\n"
	job := filepath.Join(dir, "job.yaml")
	if err := os.WriteFile(job, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	decided := make(chan struct{})
	go func() { // a person who approves runs, and no files
		defer close(decided)
		for ctx.Err() == nil {
			list, err := person.Actions.List(ctx, 50, rest.StatePending)
			for _, a := range list {
				if err == nil && a.Kind == "run.start" {
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
	const both = "open('/work/a.csv', 'w').write('a,b\\n1,2\\n'); open('/work/b.txt', 'w').write('text\\n'); raise SystemExit(%d)"
	for _, c := range []struct {
		name string
		args []string
		want int
	}{
		{"it succeeded", []string{job, "--", "python3", "-c", fmt.Sprintf(both, 0)}, 0},
		{"it failed", []string{job, "--", "python3", "-c", fmt.Sprintf(both, 7)}, 7},
		{"with --out", []string{job, "--out", filepath.Join(dir, "out"), "--wait-review", "30s", "--", "python3", "-c", fmt.Sprintf(both, 3)}, 3},
	} {
		s.env = []string{"POSTERN_PROJECT_KEY=" + s.key, "POSTERN_URL=http://" + s.web}
		got, out := s.runStatus(t, nil, c.args...)
		if got != c.want || !strings.Contains(out, "waiting") || !strings.Contains(out, "postern approve act_") {
			t.Errorf("%s: exit %d, want %d:\n%s", c.name, got, c.want, out)
		}
	}
}
