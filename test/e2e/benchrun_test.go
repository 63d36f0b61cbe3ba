package e2e

import (
	"testing"
	"time"
)

// benchContract allows only true(1).
const benchContract = `version: 1
name: bench
commands:
  allow:
    - run: "true"
files: {write: [/out]}
limits: {time: 30s, memory: 512MiB}
`

// BenchmarkRun compares a program in a plain sandbox, created and killed as the SDKs do, with
// the same program in a run, with its contract, record, report and signed statement. The
// meaningful figure is the ratio.
func BenchmarkRun(b *testing.B) {
	s := start(b, b.TempDir(), "--memory", "512")
	j, status := s.propose(benchContract, "bench", [][]string{{"true"}}, nil)
	if status >= 300 {
		b.Fatalf("propose: %d", status)
	}
	if j = s.ends(j.ID, "run.start"); j.Outcome != "succeeded" {
		b.Fatalf("%+v", j)
	}
	bare := func() {
		box := s.sandbox(nil)
		if r := box.run("true"); r.exit != 0 {
			b.Fatalf("%+v", r)
		}
		if status, _, body := s.project("DELETE", "/sandboxes/"+box.id, ""); status >= 300 {
			b.Fatalf("kill: %d %s", status, body)
		}
	}
	run := func() {
		j, status := s.propose(benchContract, "bench", [][]string{{"true"}}, nil)
		if status >= 300 {
			b.Fatalf("propose: %d", status)
		}
		for j.State != "ended" {
			if j = s.job(j.ID); j.State == "proposed" && j.Action != "" {
				s.approve(j.Action) // one decision covers at most 20 runs
			}
			time.Sleep(2 * time.Millisecond)
		}
		if j.Outcome != "succeeded" {
			b.Fatalf("%+v", j)
		}
	}
	bare()
	run()
	var took [2]time.Duration
	for b.Loop() {
		for i, f := range []func(){bare, run} {
			begin := time.Now()
			f()
			took[i] += time.Since(begin)
		}
	}
	b.ReportMetric(float64(took[0].Milliseconds())/float64(b.N), "bare-ms")
	b.ReportMetric(float64(took[1].Milliseconds())/float64(b.N), "run-ms")
	b.ReportMetric(float64(took[1])/float64(took[0]), "ratio")
}
