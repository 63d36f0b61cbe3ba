package main

import (
	"bufio"
	"io"
	"slices"
	"strconv"
	"strings"
)

// A key names a figure: a benchmark and a unit.
type key struct{ name, unit string }

// figures are what one run of a part has measured. A benchmark that was repeated has
// several values.
type figures map[key][]float64

// parse reads the figures from an output with lines in the format of Go's benchmarks: a
// name that begins with Benchmark, the number of iterations, then pairs of a value and a
// unit. It passes over everything else.
func parse(in io.Reader) (figures, error) {
	out := figures{}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 4 || len(f)%2 != 0 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		if _, err := strconv.ParseUint(f[1], 10, 64); err != nil {
			continue
		}
		found := figures{}
		for i := 2; i < len(f); i += 2 {
			v, err := strconv.ParseFloat(f[i], 64)
			if err != nil {
				found = nil // a sentence that begins like a benchmark
				break
			}
			k := key{strings.TrimPrefix(f[0], "Benchmark"), f[i+1]}
			found[k] = append(found[k], v)
		}
		for k, v := range found {
			out[k] = append(out[k], v...)
		}
	}
	return out, lines.Err()
}

// median returns the middle of values, of which there is at least one.
func median(values []float64) float64 {
	v := slices.Sorted(slices.Values(values))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}
