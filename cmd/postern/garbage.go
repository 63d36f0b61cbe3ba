package main

import (
	"os"
	"strings"
	"syscall"
)

// clobber makes Go's collector overwrite what it frees.
const clobber = "clobberfree=1"

// overwriteGarbage makes this process one that overwrites the memory that it
// frees, so that mail which was open is not left in it; see
// package scrub. Go reads the setting once, before main, so the
// program executes itself again, once, as the same process. What it starts gets
// an environment without the setting: gVisor need not pay for it.
func overwriteGarbage() {
	settings := os.Getenv("GODEBUG") // Go's own, not one of ours
	if others, ok := strings.CutSuffix(settings, clobber); ok {
		_ = os.Setenv("GODEBUG", strings.TrimSuffix(others, ",")) // fails for no such name
		return
	}
	if settings != "" {
		settings += ","
	}
	_ = os.Setenv("GODEBUG", settings+clobber)
	if self, err := os.Executable(); err == nil {
		// It returns only if it fails, as when the file was removed meanwhile.
		_ = syscall.Exec(self, os.Args, os.Environ()) //nolint:gosec // it is this program, as it was called
	}
	_ = os.Setenv("GODEBUG", strings.TrimSuffix(settings, ","))
}
