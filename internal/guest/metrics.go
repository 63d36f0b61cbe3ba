package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ticksPerSecond is the unit of times in /proc on all Linux ports of Go.
const ticksPerSecond = 100

// A procStat is a parsed /proc/PID/stat.
type procStat struct {
	pid, parent, session int
	ticks                int64 // CPU time, including children that were waited for
	dead                 bool  // a zombie without living threads
}

// readProcs reads all processes in proc, which is /proc except in tests. The error says that
// some could not be read; those are in the list with their number alone.
func readProcs(proc string) (list []procStat, err error) {
	dir, err := os.Open(proc)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	for _, name := range names {
		pid, notOne := strconv.Atoi(name)
		if notOne != nil {
			continue
		}
		b, readErr := os.ReadFile(filepath.Join(proc, name, "stat"))
		p, ok := parseStat(string(b))
		switch {
		case errors.Is(readErr, fs.ErrNotExist) || errors.Is(readErr, unix.ESRCH):
			continue // it has ended
		case readErr != nil || !ok:
			err = fmt.Errorf("read process %d: %w", pid, errors.Join(readErr, errors.New("its state is not known")))
			p = procStat{pid: pid}
		}
		list = append(list, p)
	}
	return list, err
}

// parseStat parses a line of /proc/PID/stat. The second field is the process's name
// in parentheses, which the process chooses. It may contain spaces and parentheses,
// so fields are counted from the last parenthesis.
func parseStat(line string) (procStat, bool) {
	open, shut := strings.IndexByte(line, '('), strings.LastIndexByte(line, ')')
	if open < 0 || shut < open {
		return procStat{}, false
	}
	f := strings.Fields(line[shut+1:])
	pid, err := strconv.Atoi(strings.TrimSpace(line[:open]))
	if err != nil || len(f) < 15 {
		return procStat{}, false
	}
	num := func(i int) int64 { n, _ := strconv.ParseInt(f[i], 10, 64); return n }
	// The attack: a process ends its first thread, and looks like a zombie while its other
	// threads run on.
	threads := len(f) > 17 && num(17) > 1
	return procStat{
		pid: pid, parent: int(num(1)), session: int(num(3)),
		ticks: num(11) + num(12) + num(13) + num(14),
		dead:  (f[0] == "Z" || f[0] == "X") && !threads,
	}, true
}

// A cpuMeter measures the CPU usage since the previous call.
type cpuMeter struct {
	mu    sync.Mutex
	at    time.Time
	ticks int64
	pct   float64
}

// percent returns the usage of all CPUs together, from 0 to 100.
func (m *cpuMeter) percent(now time.Time) float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	elapsed := now.Sub(m.at).Seconds()
	if elapsed < 0.2 { // too short to measure
		return m.pct
	}
	var ticks int64
	procs, _ := readProcs("/proc") // what cannot be read is not counted
	for _, p := range procs {
		ticks += p.ticks
	}
	if !m.at.IsZero() {
		used := float64(max(ticks-m.ticks, 0)) / ticksPerSecond
		m.pct = min(100*used/elapsed/float64(runtime.NumCPU()), 100)
	}
	m.at, m.ticks = now, ticks
	return m.pct
}

// metrics is the response to GET /metrics.
type metrics struct {
	TS          int64   `json:"ts"` // Unix seconds
	CPUCount    int     `json:"cpu_count"`
	CPUUsedPct  float64 `json:"cpu_used_pct"`
	MemTotal    int64   `json:"mem_total"` // bytes, as the next two
	MemUsed     int64   `json:"mem_used"`
	MemCache    int64   `json:"mem_cache"`
	MemTotalMiB int64   `json:"mem_total_mib"`
	MemUsedMiB  int64   `json:"mem_used_mib"`
	DiskUsed    int64   `json:"disk_used"` // bytes, as the next
	DiskTotal   int64   `json:"disk_total"`
}

func (s *Server) getMetrics(w http.ResponseWriter, _ *http.Request) error {
	now := time.Now()
	m := metrics{TS: now.Unix(), CPUCount: runtime.NumCPU(), CPUUsedPct: s.cpu.percent(now)}
	total, used := procField("/proc/meminfo", "MemTotal")<<10, usedMemory()
	if s.conf.MemoryMB > 0 {
		total = s.conf.MemoryMB << 20
	}
	m.MemTotal, m.MemUsed = total, min(used, total)
	m.MemCache = procField("/proc/meminfo", "Cached") << 10
	m.MemTotalMiB, m.MemUsedMiB = m.MemTotal>>20, m.MemUsed>>20
	var st unix.Statfs_t
	if unix.Statfs("/", &st) == nil {
		m.DiskTotal = int64(st.Blocks) * st.Bsize
		m.DiskUsed = m.DiskTotal - int64(st.Bfree)*st.Bsize
	}
	return writeJSON(w, m)
}
