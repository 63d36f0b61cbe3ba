package e2e

import (
	"bufio"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	rest "postern/client"
)

// TestRecordHasEveryWay: the record has what was done in a sandbox, whichever way a client
// chose: commands with and without a prepared shell, in the background and in a terminal,
// cells, input and files.
func TestRecordHasEveryWay(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir())
	op := shell{s: s}
	changePolicy(t, op, op, "version: 1\nrecord: [input]\nrules: []\n")
	cmd := exec.Command("node", "../conformance/record.mjs")
	cmd.Env = append(os.Environ(), "E2B_API_KEY="+s.key, "E2B_API_URL=http://"+s.web, "E2B_SANDBOX_URL=http://"+s.web)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("record.mjs: %v, %v", err, cmd.Wait())
	}
	id := strings.TrimSpace(line)
	read := func() (r rest.SandboxCommands) {
		t.Helper()
		if err := json.Unmarshal([]byte(op.must(t, []string{"sandbox", "commands", id, "--limit", "1000", "--json"})), &r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := read()
	if !r.Complete || r.Missed != 0 || r.Dropped != 0 {
		t.Errorf("the record is not complete: %+v", r)
	}
	// Each command with its text, its end and what its client got.
	for _, want := range []struct {
		text           string
		stdout, stderr int64
	}{
		{"echo first-builtin > /tmp/a", 0, 0},
		{"echo second-builtin; printf %01000d 0 >&2", 15, 1000},
		{"echo with-envs", 10, 0},
		{"echo as-root", 8, 0},
		{"cat > /tmp/typed", 0, 0},
		{"exec sleep 1000", 0, 0},
	} {
		var n int
		for _, c := range r.Commands {
			if len(c.Args) == 4 && c.Args[3] == want.text {
				n++
				if c.Ended.IsZero() || c.Verdict != "allowed" {
					t.Errorf("%q: %+v", want.text, c)
				}
			}
		}
		if n != 1 {
			t.Errorf("%q was started %d times by the record, want once", want.text, n)
		}
		n = 0
		for _, o := range r.Orders {
			if len(o.Args) == 4 && o.Args[3] == want.text {
				n++
				if o.Op != "run" || o.Via != "sdk" || o.PID == 0 || !o.Exact || o.Stdout != want.stdout || o.Stderr != want.stderr {
					t.Errorf("%q was ordered as %+v", want.text, o)
				}
			}
		}
		if n != 1 {
			t.Errorf("%q was ordered %d times by the record, want once", want.text, n)
		}
	}
	for _, c := range r.Commands {
		if line := strings.Join(c.Args, " "); strings.Contains(line, "sk_live_") || len(c.Args) == 4 && strings.Trim(c.Args[3], " ") == "" {
			t.Errorf("the record has %q: process %d of %d, %+v", strings.TrimSpace(line), c.PID, c.Parent, c.Time)
		}
	}
	digest := func(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s))) }
	for _, want := range []struct {
		what string
		is   func(o rest.SandboxOrder) bool
	}{
		{"the masked token", func(o rest.SandboxOrder) bool {
			return o.Op == "run" && !o.Exact && strings.Contains(strings.Join(o.Args, " "), "echo token")
		}},
		{"the terminal", func(o rest.SandboxOrder) bool { return o.Op == "terminal" && o.PID != 0 }},
		{"what was typed in the terminal", func(o rest.SandboxOrder) bool {
			return o.Op == "input" && o.Done && o.SHA256 == digest("echo in-a-terminal > /tmp/p\nexit\n")
		}},
		{"what was sent to cat", func(o rest.SandboxOrder) bool {
			return o.Op == "input" && o.Done && o.SHA256 == digest("typed text\n") && *o.Size == 11
		}},
		{"the signal", func(o rest.SandboxOrder) bool { return o.Op == "signal" && o.PID != 0 && o.Args[0] == "SIGKILL" }},
		{"the cell", func(o rest.SandboxOrder) bool {
			return o.Op == "code" && o.SHA256 == digest("answer = 6 * 7\nanswer") && *o.Size == 21 && o.Stdout > 0
		}},
		{"the cell of JavaScript", func(o rest.SandboxOrder) bool { return o.Op == "code" && o.Lang == "javascript" }},
		{"the cell of bash", func(o rest.SandboxOrder) bool { return o.Op == "code" && o.SHA256 == digest("echo bash-cell") }},
		{"the written file", func(o rest.SandboxOrder) bool {
			return o.Op == "write" && o.Path == "/home/user/one.txt" && o.Size != nil
		}},
		{"two written files", func(o rest.SandboxOrder) bool {
			return o.Op == "write" && strings.Contains(o.Path, "/home/user/two.txt") || o.Op == "write" && strings.Contains(o.Path, "/home/user/three.txt")
		}},
		{"the read file", func(o rest.SandboxOrder) bool {
			return o.Op == "read" && o.Path == "/home/user/one.txt" && o.Size != nil && *o.Size == 3
		}},
		{"the directory", func(o rest.SandboxOrder) bool { return o.Op == "mkdir" && o.Path == "/home/user/dir" }},
		{"the renamed file", func(o rest.SandboxOrder) bool {
			return o.Op == "move" && o.Path == "/home/user/one.txt" && o.To == "/home/user/dir/uno.txt"
		}},
		{"the removed file", func(o rest.SandboxOrder) bool { return o.Op == "remove" && o.Path == "/home/user/dir/uno.txt" }},
	} {
		found := false
		for _, o := range r.Orders {
			found = found || want.is(o)
		}
		if !found {
			t.Errorf("the record lacks %s", want.what)
		}
	}
	if t.Failed() {
		raw, _ := filepath.Glob(filepath.Join(s.data, "commands", id+".commands*"))
		for _, f := range raw {
			b, _ := os.ReadFile(f)
			t.Logf("%s:\n%s", f, strings.ReplaceAll(string(b), strings.Repeat(" ", 1023), "<blanks>"))
		}
		b, _ := json.MarshalIndent(r.Orders, "", " ")
		t.Logf("orders: %s\n%s", b, op.must(t, []string{"sandbox", "commands", id, "--limit", "1000"}))
	}
	// The guest's log, which others ship elsewhere, has no secret.
	if log := op.must(t, []string{"sandbox", "logs", id, "--limit", "1000", "--json"}); strings.Contains(log, "sk_live_") || !strings.Contains(log, "process started") {
		t.Errorf("the log has an unmasked command line, or none:\n%s", log)
	}
	_, _ = in.Write([]byte("\n"))
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	after := read()
	if after.Ordered != r.Ordered || !after.Complete {
		t.Errorf("after its end: %d orders, complete %v", after.Ordered, after.Complete)
	}
}
