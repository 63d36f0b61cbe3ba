package guest

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// A machine is a sandbox whose memory and processes are made up: the real
// thing would kill the test's neighbours.
type machine struct {
	t      *testing.T
	proc   string
	mb     map[int]int64 // resident mebibytes by pid
	other  int64         // mebibytes in use by no process
	looks  int
	killed []int
	marked []int
}

func newMachine(t *testing.T, mb map[int]int64) *machine {
	m := &machine{t: t, proc: t.TempDir(), mb: maps.Clone(mb)}
	for pid, n := range mb {
		dir := filepath.Join(m.proc, strconv.Itoa(pid))
		// The name is the process's choice.
		stat := fmt.Sprintf("%d (x) S 1 1) S 1 %d %d 0 -1 0 0 0 0 0 5 6 7 8 20", pid, pid, pid+1000)
		statm := fmt.Sprintf("999999 %d 0 0 0 0 0", n<<20/int64(os.Getpagesize()))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, text := range map[string]string{"stat": stat, "statm": statm} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	return m
}

func (m *machine) used() int64 {
	m.looks++
	sum := m.other
	for _, n := range m.mb {
		sum += n
	}
	return sum << 20
}

func (m *machine) kill(pid int) error {
	if _, ok := m.mb[pid]; !ok {
		return unix.ESRCH
	}
	m.killed = append(m.killed, pid)
	delete(m.mb, pid)
	return os.RemoveAll(filepath.Join(m.proc, strconv.Itoa(pid)))
}

func (m *machine) watch(total int64) *memoryWatch {
	return &memoryWatch{
		log: slog.New(slog.NewTextHandler(m.t.Output(), nil)), total: total << 20, used: m.used, proc: m.proc,
		spare: map[int]struct{}{1: {}, 2: {}}, mark: func(s int) { m.marked = append(m.marked, s) }, kill: m.kill,
	}
}

func TestMemoryWatch(t *testing.T) {
	for _, tt := range []struct {
		name  string
		mb    map[int]int64
		other int64
		total int64
		want  []int
		looks int // at most, in a minute
	}{
		{"plenty is free", map[int]int64{1: 10, 2: 10, 3: 500}, 0, 1024, nil, 60 * 6},
		{"the largest goes", map[int]int64{1: 10, 2: 10, 3: 300, 4: 620, 5: 50}, 0, 1024, []int{4}, 60 * 6},
		{"the guest is the largest and stays", map[int]int64{1: 400, 2: 400, 3: 180}, 0, 1024, []int{3}, 60 * 20},
		{"as many as it takes", map[int]int64{3: 110, 4: 120, 5: 130, 6: 140}, 600, 1024, []int{6}, 60*100 + 60},
		{"several at once", map[int]int64{3: 40, 4: 50, 5: 60}, 930, 1024, []int{5, 4, 3}, 10_000},
		{"files hold it: nobody is killed, and nobody spins", map[int]int64{1: 10, 2: 10, 3: 1}, 1000, 1024, nil, 60*4*3 + 10},
		{"a small sandbox", map[int]int64{1: 10, 2: 10, 3: 90}, 0, 128, []int{3}, 60*100 + 60},
		{"nobody watches", map[int]int64{3: 5000}, 0, 0, nil, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newMachine(t, tt.mb)
			m.other = tt.other
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				m.watch(tt.total).run(ctx)
			})
			if !slices.Equal(m.killed, tt.want) {
				t.Errorf("got %v killed, want %v", m.killed, tt.want)
			}
			for i, pid := range m.killed {
				if m.marked[i] != pid+1000 {
					t.Errorf("session of %d: got %d", pid, m.marked[i])
				}
			}
			if m.looks > tt.looks {
				t.Errorf("looked %d times in a minute, want at most %d", m.looks, tt.looks)
			}
		})
	}
}

// A process that takes memory as fast as we expect is caught before the end.
func TestMemoryWatchIsFastEnough(t *testing.T) {
	m := newMachine(t, map[int]int64{1: 10, 2: 10, 3: 16})
	const total = 1024
	var most int64
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		begin := time.Now()
		w := m.watch(total)
		w.used = func() int64 {
			if _, lives := m.mb[3]; lives {
				m.mb[3] = int64(time.Since(begin).Seconds() * fastest / (1 << 20))
				statm := fmt.Sprintf("1 %d 0", m.mb[3]<<20/int64(os.Getpagesize()))
				_ = os.WriteFile(filepath.Join(m.proc, "3", "statm"), []byte(statm), 0o644)
			}
			used := m.used()
			most = max(most, used)
			return used
		}
		w.run(ctx)
	})
	if len(m.killed) != 1 || most > total<<20 {
		t.Errorf("got %v killed and %d MiB at most, want 3 before %d", m.killed, most>>20, total)
	}
}

func TestUsedMemory(t *testing.T) {
	if got := usedMemory(); got <= 0 || got > procField("/proc/meminfo", "MemTotal")<<10 {
		t.Errorf("got %d bytes", got)
	}
}

func TestMetrics(t *testing.T) {
	g := newRig(t, func(c *Config) { c.MemoryMB = 1 << 20 }) // not reached: nobody is killed
	code, body, _ := g.do("GET", "/metrics", nil)
	var got map[string]float64
	if err := json.Unmarshal(body, &got); code != 200 || err != nil {
		t.Fatalf("got %d %s", code, body)
	}
	for name, check := range map[string]func(float64) bool{
		"ts":            func(v float64) bool { return time.Since(time.Unix(int64(v), 0)) < time.Minute },
		"cpu_count":     func(v float64) bool { return int(v) == runtime.NumCPU() },
		"cpu_used_pct":  func(v float64) bool { return v >= 0 && v <= 100 },
		"mem_total":     func(v float64) bool { return v == 1<<40 },
		"mem_used":      func(v float64) bool { return v > 0 },
		"mem_cache":     func(v float64) bool { return v >= 0 },
		"mem_total_mib": func(v float64) bool { return v == 1<<20 },
		"mem_used_mib":  func(v float64) bool { return v == float64(int64(got["mem_used"])>>20) },
		"disk_used":     func(v float64) bool { return v > 0 && v < got["disk_total"] },
		"disk_total":    func(v float64) bool { return v > 0 },
	} {
		if v, ok := got[name]; !ok || !check(v) {
			t.Errorf("%s: got %v, %v", name, v, ok)
		}
	}
}

// TestMemoryWatchEnforcesContract: the watch enforces a contract's limit that is below the
// sandbox's memory.
func TestMemoryWatchEnforcesContract(t *testing.T) {
	m := newMachine(t, map[int]int64{1: 10, 2: 10, 3: 90})
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		w := m.watch(1024)
		w.lower = &atomic.Int64{}
		w.lower.Store(128 << 20)
		w.run(ctx)
		if !slices.Equal(m.killed, []int{3}) {
			t.Errorf("killed %v, want the process of 90 MiB", m.killed)
		}
	})
}
