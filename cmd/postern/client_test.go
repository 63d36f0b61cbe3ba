package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestMissingArgument: a command without an argument names it and says where to find it.
func TestMissingArgument(t *testing.T) {
	for line, want := range map[string]string{
		"approve":        "ID is missing; postern pending shows what waits",
		"cancel":         "ID is missing; postern pending shows what waits",
		"sandbox":        "a verb is missing: create|list|show",
		"sandbox kill":   "kill: ID is missing; postern sandbox list shows those there are",
		"volume create":  "create: NAME is missing\n",
		"approve a b":    `want one ID, not also "b"`,
		"sandbox pausee": `there is no sandbox "pausee"`,
	} {
		var out, errs bytes.Buffer
		if got := run(t.Context(), append(strings.Fields(line), "--data", t.TempDir()), &out, &errs); got != 2 || !strings.Contains(errs.String(), want) || !strings.Contains(errs.String(), "postern help ") {
			t.Errorf("%s: status %d, %q; want 2 and %q", line, got, errs.String(), want)
		}
	}
}
