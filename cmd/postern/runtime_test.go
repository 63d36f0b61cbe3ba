package main

import (
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestRuntimeWithoutPatchesIsRefused: a program of sandboxes that was built with plain "go
// build" has gVisor's own faults. Package patches tests what counts as built with them.
func TestRuntimeWithoutPatchesIsRefused(t *testing.T) {
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Fatal(err)
	}
	another, err := os.Open(goTool) // a Go program without gVisor
	if err != nil {
		t.Fatal(err)
	}
	defer another.Close()
	for _, tt := range []struct {
		name    string
		program io.ReaderAt
		want    string
	}{
		{"another program", another, "the runtime in this program was built without gvisor.dev/gvisor: use make build"},
		{"no program", strings.NewReader("#!/bin/sh\n"), "read how the runtime in this program was built"},
	} {
		if err := checkRuntime(tt.program); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %s", tt.name, err, tt.want)
		}
	}
}
