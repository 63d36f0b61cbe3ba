package main

import (
	"math"
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
	if k := (key{"X-2", "ns/op"}); err != nil || len(got) != 1 || len(got[k]) != 2 || median(got[k]) != 6 {
		t.Errorf("parse: %v, %v", got, err)
	}
}

// rounds makes the figures of several rounds of one benchmark.
func rounds(name, unit string, values ...float64) (out []figures) {
	for _, v := range values {
		out = append(out, figures{{name, unit}: {v}})
	}
	return out
}

// TestVerdicts: a figure is lost only if it is more than 5 % worse and its rounds differ by
// less than that, on both sides.
func TestVerdicts(t *testing.T) {
	for _, tt := range []struct {
		name, figure, unit string
		old, now           []float64
		want               verdict
		factor             float64
	}{
		{"10 % slower, in every round", "X", "ns/op", []float64{100, 101, 99}, []float64{110, 111, 109}, lost, 1.10},
		{"4 % slower", "X", "ns/op", []float64{100, 100, 100}, []float64{104, 104, 104}, same, 1.04},
		{"10 % slower, the rounds now 12 % apart", "X", "ns/op", []float64{100, 101, 99}, []float64{104, 110, 117}, noise, 1.10},
		{"10 % slower, the rounds then 12 % apart", "X", "ns/op", []float64{94, 100, 106}, []float64{110, 110, 110}, noise, 1.10},
		{"10 % faster, the rounds 12 % apart", "X", "ns/op", []float64{110, 110, 110}, []float64{94, 100, 106}, noise, 100.0 / 110},
		{"four times as slow, the rounds then further apart than that", "X", "ns/op", []float64{1, 4, 5}, []float64{16, 17, 30}, noise, 4.25},
		{"10 % faster", "X", "ns/op", []float64{110, 110, 110}, []float64{100, 100, 100}, gained, 100.0 / 110},
		{"fewer by the second", "X", "msg/s", []float64{110, 110, 110}, []float64{100, 100, 100}, lost, 1.10},
		{"more by the second", "X", "MB/s", []float64{100, 100, 100}, []float64{110, 110, 110}, gained, 100.0 / 110},
		{"one more allocation of ten", "X", "allocs/op", []float64{10, 10, 10}, []float64{11, 11, 11}, lost, 1.10},
		{"an allocation where there was none", "X", "allocs/op", []float64{0, 0, 0}, []float64{1, 1, 1}, lost, math.Inf(1)},
		{"no allocation where there was one", "X", "allocs/op", []float64{1, 1, 1}, []float64{0, 0, 0}, gained, 0},
		{"none, and none", "X", "allocs/op", []float64{0, 0, 0}, []float64{0, 0, 0}, same, 1},
		{"one bad round of eight", "X", "ns/op", []float64{100, 100, 100, 100, 100, 100, 100, 100}, []float64{110, 110, 110, 110, 110, 110, 110, 500}, lost, 1.10},
		{"two bad rounds of eight", "X", "ns/op", []float64{100, 100, 100, 100, 100, 100, 100, 100}, []float64{110, 110, 110, 110, 110, 110, 500, 500}, noise, 1.10},
		{"Postfix", "Inbound/postfix/links=1-2", "msg/s", []float64{200, 200, 200}, []float64{100, 100, 100}, peer, 2},
		{"Postern beside it", "Inbound/postern/links=1-2", "msg/s", []float64{200, 200, 200}, []float64{100, 100, 100}, lost, 2},
		{"gVisor's program", "Sandbox/peer-runsc-run-boot-to-the-end-of-echo", "ms", []float64{1, 1, 1}, []float64{2, 2, 2}, peer, 2},
		{"a floor is Postern's", "Sandbox/floor-true-by-the-protocol-without-SDK", "ms", []float64{1, 1, 1}, []float64{2, 2, 2}, lost, 2},
		{"node alone", "Files/read-text-64-MiB-node-alone", "MB/s", []float64{1, 1, 1}, []float64{2, 2, 2}, peer, 0.5},
		{"without the wall", "Inspect/http1/latency/direct-2", "ns/op", []float64{1, 1, 1}, []float64{2, 2, 2}, peer, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := compare("p", rounds(tt.figure, tt.unit, tt.old...), rounds(tt.figure, tt.unit, tt.now...))
			if len(got) != 1 || got[0].verdict != tt.want || math.Abs(got[0].factor-tt.factor) > 1e-9 {
				t.Errorf("got %+v, want verdict %d, factor %v", got, tt.want, tt.factor)
			}
		})
	}
}

// TestShow: losses are named first, with their factor and how far the rounds of each side
// differ, and they alone are the failure.
func TestShow(t *testing.T) {
	quiet := []float64{100, 101, 99}
	all := compare("egress", rounds("Slower-2", "ns/op", quiet...), rounds("Slower-2", "ns/op", 120, 121, 119))
	all = append(all, compare("egress", rounds("Loud-2", "ns/op", 80, 100, 130), rounds("Loud-2", "ns/op", 120, 121, 119))...)
	all = append(all, compare("egress", rounds("Old-2", "ns/op", quiet...), rounds("New-2", "ns/op", quiet...))...)
	all = append(all, compare("egress", rounds("Same-2", "ns/op", quiet...), rounds("Same-2", "ns/op", quiet...))...)
	var b strings.Builder
	if !show(&b, all) {
		t.Error("a loss is no failure")
	}
	want := `
Lost more than 5 %, and more than the rounds of one commit differ:
    1.20 ×  egress     Slower-2 ns/op: 100, now 120; rounds differ by 2 %, now 2 %

Noise: more than 5 % apart, but the rounds of one commit differ as much. Look again on a quiet machine, or with more ROUNDS or a longer BENCHTIME:
    1.20 ×  egress     Loud-2 ns/op: 100, now 120; rounds differ by 50 %, now 2 %

Only the other commit has:
            egress     Old-2 ns/op: 100

Only this one has:
            egress     New-2 ns/op: 100

1 lost, 1 noise, 0 gained, 1 the same
`
	if b.String() != want {
		t.Errorf("got:\n%s\nwant:\n%s", b.String(), want)
	}
	if b.Reset(); show(&b, all[1:]) {
		t.Errorf("noise is a failure:\n%s", b.String())
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
