package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func recorded(t *testing.T, name string) figures {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out, err := parse(f)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestParseRecorded reads what a test binary and a script of node have printed.
func TestParseRecorded(t *testing.T) {
	for _, tt := range []struct {
		file  string
		n     int // of figures
		wants map[key]float64
	}{
		{"go.txt", 26, map[key]float64{
			{"Account-2", "ns/op"}:             237215,
			{"Account-2", "allocs/op"}:         72,
			{"Run/true_of_/bin/sh-2", "ns/op"}: 2443462,
			{"Login/ls-2", "held-p50-ms"}:      26.24,
			{"File/write-2", "MB/s"}:           817.35,
		}},
		{"node.txt", 11, map[key]float64{
			{"Sandbox/commands-run-true", "ms"}:         79.4649,
			{"Sandbox/floor-a-process-inside-sh", "ms"}: 19.8308,
		}},
	} {
		got := recorded(t, tt.file)
		if len(got) != tt.n {
			t.Errorf("%s: %d figures, want %d: %v", tt.file, len(got), tt.n, got)
		}
		for k, want := range tt.wants {
			if v := got[k]; len(v) != 1 || v[0] != want {
				t.Errorf("%s: %v is %v, want %v", tt.file, k, v, want)
			}
		}
	}
}

// TestParsePassesOverText: what only begins like a benchmark is no figure, also if it ends
// like one, and a repeated benchmark has each of its values.
func TestParsePassesOverText(t *testing.T) {
	got, err := parse(strings.NewReader("BenchmarkX-2 10 5 ns/op\nBenchmarkX-2 10 7 ns/op\n" +
		"BenchmarkX-2\nBenchmark of 10 ns/op is\nBenchmarkY took 10 seconds\nBenchmarkZ-2 10 5 ns/op x B/op\nBenchmarkZ-2 -1 5 ns/op\n--- BENCH: BenchmarkX-2 10 5 ns/op\n"))
	if k := (key{"X-2", "ns/op"}); err != nil || len(got) != 1 || len(got[k]) != 2 || got[k][1] != 7 {
		t.Errorf("parse: %v, %v", got, err)
	}
}

// TestChoose: the order is that of the table, and a part that does not exist is named.
func TestChoose(t *testing.T) {
	if got, err := choose("create,egress"); err != nil || len(got) != 2 || got[0].name != "egress" {
		t.Errorf("choose: %v, %v", got, err)
	}
	if got, err := choose(""); err != nil || len(got) != len(parts) {
		t.Errorf("choose all: %d parts, %v", len(got), err)
	}
	for _, list := range []string{"egres", "egress,", "egress create"} {
		if _, err := choose(list); err == nil || !strings.Contains(err.Error(), "oversight, mailbox") {
			t.Errorf("choose(%q): %v", list, err)
		}
	}
}
