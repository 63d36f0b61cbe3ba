package gvisor

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/sandbox"
)

var _ sandbox.Examiner = (*Runtime)(nil)

const (
	// examineFile, in the state directory, describes the latest sandbox that did
	// not answer. There is only one such file, since a very slow machine may have
	// many of these sandboxes.
	examineFile    = "unanswered.txt"
	examineTimeout = 3 * time.Second
	maxStacks      = 4 << 20 // bytes of the sentry's stack traces
)

// Examine implements [sandbox.Examiner]. It writes the state of each thread of the
// sandbox on the host, the stacks of its sentry if that still answers, and the end
// of its guest's output.
func (r *Runtime) Examine(ctx context.Context, id string) (summary, file string) {
	if !idPattern.MatchString(id) {
		return "no such sandbox", ""
	}
	ctx, cancel := context.WithTimeoutCause(ctx, examineTimeout, fmt.Errorf("no answer within %v", examineTimeout))
	defer cancel()
	var out bytes.Buffer
	fmt.Fprintf(&out, "sandbox %s at %s\n", id, time.Now().UTC().Format(time.RFC3339Nano))
	summary = r.examineThreads(&out, id)
	stacks, err := r.stacks(ctx, id)
	if err != nil {
		summary += "; its kernel does not say: " + err.Error()
		stacks = err.Error()
	} else {
		summary += "; its kernel answers"
	}
	fmt.Fprintf(&out, "\n=== stacks of its kernel\n%s\n", stacks)
	r.mu.Lock()
	i := r.all[id]
	r.mu.Unlock()
	if i != nil {
		fmt.Fprintf(&out, "\n=== output of its guest\n%s\n", i.logTail())
	}
	file = filepath.Join(r.conf.StateDir, examineFile)
	if err := os.WriteFile(file, out.Bytes(), 0o600); err != nil {
		return summary + "; " + err.Error(), ""
	}
	return summary, file
}

// examineThreads describes each thread of a sandbox on the host, and returns a
// count of the threads by program and state.
func (r *Runtime) examineThreads(out *bytes.Buffer, id string) (summary string) {
	pids, err := r.cgroups.pids(id)
	if err != nil {
		return err.Error()
	}
	counts := map[string]int{}
	for _, pid := range pids {
		proc := "/proc/" + strconv.Itoa(pid)
		cmd, _ := os.ReadFile(filepath.Join(proc, "cmdline")) // the thread may end in between
		name, _, _ := strings.Cut(string(cmd), "\x00")
		tasks, _ := filepath.Glob(filepath.Join(proc, "task", "*"))
		fmt.Fprintf(out, "\n=== process %d %.40q\n", pid, name)
		for _, t := range tasks {
			stat, _ := os.ReadFile(filepath.Join(t, "stat"))
			_, after, _ := strings.Cut(string(stat), ") ")
			state, _, _ := strings.Cut(after, " ")
			wchan, _ := os.ReadFile(filepath.Join(t, "wchan"))
			counts[fmt.Sprintf("%.40q %s in %s", name, state, wchan)]++
			fmt.Fprintf(out, "--- %s: %s in %s\n", t, state, wchan)
			for _, f := range []string{"syscall", "stack"} {
				b, err := os.ReadFile(filepath.Join(t, f))
				if err == nil {
					fmt.Fprintf(out, "%s\n", bytes.TrimSpace(b))
				}
			}
		}
	}
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%d of %s", counts[k], k))
	}
	return fmt.Sprintf("%d processes; threads: %s", len(pids), strings.Join(parts, ", "))
}

// stacks returns the stacks of a sentry's goroutines as the sentry reports them.
func (r *Runtime) stacks(ctx context.Context, id string) (string, error) {
	b, err := r.callFor(ctx, maxStacks, id, callStacks, struct{}{})
	if err != nil {
		return "", err
	}
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return "", fmt.Errorf("ask sentry: %w", err)
	}
	return s, nil
}
