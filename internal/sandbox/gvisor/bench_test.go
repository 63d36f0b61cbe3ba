package gvisor

import (
	"context"
	"slices"
	"testing"
	"time"
)

// BenchmarkColdStart measures from Start to the first byte from the guest.
func BenchmarkColdStart(b *testing.B) {
	r := newRuntime(b, b.TempDir())
	var starts, answers, stops []time.Duration
	for b.Loop() {
		h, link := newLink(b)
		s := specWith(b, link)
		begin := time.Now()
		if err := r.Start(b.Context(), s); err != nil {
			b.Fatal(err)
		}
		starts = append(starts, time.Since(begin))
		h.ping(b, 10*time.Second)
		answers = append(answers, time.Since(begin))
		begin = time.Now()
		if err := r.Stop(context.Background(), s.ID); err != nil {
			b.Fatal(err)
		}
		stops = append(stops, time.Since(begin))
	}
	for _, m := range []struct {
		name string
		d    []time.Duration
	}{{"start", starts}, {"answer", answers}, {"stop", stops}} {
		slices.Sort(m.d)
		b.ReportMetric(float64(m.d[len(m.d)/2].Microseconds())/1000, m.name+"-p50-ms")
		b.ReportMetric(float64(m.d[len(m.d)*95/100].Microseconds())/1000, m.name+"-p95-ms")
	}
}
