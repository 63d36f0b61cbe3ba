package gvisor

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"postern/internal/sandbox"
)

// BenchmarkStart measures in one run, in turns, what a start, a save and a stop
// take, and prints the medians in milliseconds and as ratios to a cold start
// of the same root file system: from Start to the first byte from the guest.
// The guest is this package's own, which is up at once; so the ratios are the
// runtime's alone.
func BenchmarkStart(b *testing.B) {
	r := newRuntime(b, b.TempDir())
	small, big, files := benchSnapshots(b, r)
	m := measures{}
	for b.Loop() {
		m.cycle(b, r, "cold", "")
		m.cycle(b, r, "restore", small)
		m.cycle(b, r, "restore-256MiB", big)
		m.cycle(b, r, "files", files)
	}
	m.report(b, "cold")
}

// BenchmarkSave measures pause and resume of a sandbox with 256 MiB of memory
// that no compression makes smaller.
func BenchmarkSave(b *testing.B) {
	r := newRuntime(b, b.TempDir())
	_, big, _ := benchSnapshots(b, r)
	m := measures{}
	for b.Loop() {
		m.cycle(b, r, "cold", "")
		h, link := newLink(b)
		s := specWith(b, link)
		s.MemoryMB, s.From = 512, big
		if err := r.Start(b.Context(), s); err != nil {
			b.Fatal(err)
		}
		h.ping(b)
		for _, c := range []struct {
			name string
			o    sandbox.SaveOptions
		}{{"files-kept", sandbox.SaveOptions{FilesOnly: true, Keep: true}}, {"kept", sandbox.SaveOptions{Keep: true}}, {"pause", sandbox.SaveOptions{}}} {
			dir := filepath.Join(b.TempDir(), "snapshot")
			begin := time.Now()
			if err := r.Save(b.Context(), s.ID, dir, c.o); err != nil {
				b.Fatal(err)
			}
			m.add(c.name, begin)
			if c.name == "pause" {
				if err := r.Stop(b.Context(), s.ID); err != nil {
					b.Fatal(err)
				}
				m.cycle(b, r, "resume", dir)
			}
		}
	}
	m.report(b, "cold-answer")
}

// benchSnapshots are those of a sandbox that idles, of one with 256 MiB of
// random memory, and of the files of one.
func benchSnapshots(b *testing.B, r *Runtime) (small, big, files string) {
	b.Helper()
	s, h := start(b, r, func(s *sandbox.Spec) { s.MemoryMB = 512 })
	save := func(o sandbox.SaveOptions) string {
		dir := filepath.Join(b.TempDir(), "snapshot")
		if err := r.Save(b.Context(), s.ID, dir, o); err != nil {
			b.Fatal(err)
		}
		return dir
	}
	small = save(sandbox.SaveOptions{Keep: true})
	files = save(sandbox.SaveOptions{Keep: true, FilesOnly: true})
	if got, err := h.get(b.Context(), "/dirty?mib=256"); err != nil || got != "dirty" {
		b.Fatalf("dirty: %q, %v", got, err)
	}
	big = save(sandbox.SaveOptions{})
	if err := r.Stop(b.Context(), s.ID); err != nil {
		b.Fatal(err)
	}
	return small, big, files
}

// measures are times by name.
type measures map[string][]time.Duration

func (m measures) add(name string, begin time.Time) { m[name] = append(m[name], time.Since(begin)) }

func (m measures) cycle(b *testing.B, r *Runtime, name, from string) {
	b.Helper()
	h, link := newLink(b)
	s := specWith(b, link)
	s.MemoryMB, s.From = 512, from
	begin := time.Now()
	if err := r.Start(b.Context(), s); err != nil {
		b.Fatal(err)
	}
	m.add(name+"-start", begin)
	h.ping(b)
	m.add(name+"-answer", begin)
	begin = time.Now()
	if err := r.Stop(context.Background(), s.ID); err != nil {
		b.Fatal(err)
	}
	m.add(name+"-stop", begin)
}

// report prints medians, the 95th of 100, and ratios to the one that is named.
func (m measures) report(b *testing.B, base string) {
	b.Helper()
	at := func(name string, of100 int) float64 {
		d := slices.Sorted(slices.Values(m[name]))
		return float64(d[len(d)*of100/100].Microseconds()) / 1000
	}
	if len(m[base]) == 0 {
		base += "-answer"
	}
	out := "\n"
	for _, name := range slices.Sorted(maps.Keys(m)) {
		out += fmt.Sprintf("%-24s p50 %7.1f ms  p95 %7.1f ms  %5.2f × %s\n", name, at(name, 50), at(name, 95), at(name, 50)/at(base, 50), base)
	}
	_, _ = os.Stdout.WriteString(out) // a benchmark's own log is cut after ten lines
}

// BenchmarkRoot compares a root file system that is an image with one that a gofer
// serves, in turns: time and processor time of the sandbox's processes until its
// guest answers, and what its sentry and gofer hold.
func BenchmarkRoot(b *testing.B) {
	r := newRuntime(b, b.TempDir())
	image, err := rootImage()
	if err != nil {
		b.Fatal(err)
	}
	m, memory := measures{}, map[string]int64{}
	roots := []struct {
		name  string
		image sandbox.Image
		from  string
	}{{"image", image, ""}, {"directory", sandbox.Image{}, ""}}
	for i := range roots {
		s, _ := start(b, r, func(s *sandbox.Spec) { s.Image = roots[i].image })
		roots[i].from = filepath.Join(b.TempDir(), "snapshot")
		if err := r.Save(b.Context(), s.ID, roots[i].from, sandbox.SaveOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		for _, root := range roots {
			for _, from := range []string{"", root.from} {
				name := root.name + map[bool]string{true: "-cold", false: "-restore"}[from == ""]
				h, link := newLink(b)
				s := specWith(b, link)
				s.Image, s.From = root.image, from
				begin := time.Now()
				if err := r.Start(b.Context(), s); err != nil {
					b.Fatal(err)
				}
				h.ping(b)
				m.add(name+"-answer", begin)
				u, err := r.Usage(b.Context(), s.ID)
				if err != nil {
					b.Fatal(err)
				}
				m[name+"-cpu"] = append(m[name+"-cpu"], u.CPU)
				memory[name] += u.Memory
				begin = time.Now()
				if err := r.Stop(context.Background(), s.ID); err != nil {
					b.Fatal(err)
				}
				m.add(name+"-stop", begin)
			}
		}
	}
	m.report(b, "directory-cold")
	for _, name := range slices.Sorted(maps.Keys(memory)) {
		b.ReportMetric(float64(memory[name])/float64(len(m[name+"-cpu"]))/(1<<20), name+"-MiB")
	}
}
