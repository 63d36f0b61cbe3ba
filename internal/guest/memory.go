package guest

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// reserveShare and the two bounds say how much of the sandbox's memory is kept
	// free: a sixteenth, within the bounds.
	reserveShare = 16
	minReserve   = 24 << 20
	maxReserve   = 128 << 20

	// fastest is the assumed maximum rate, in bytes per second, at which a sandbox
	// allocates memory. The watcher checks again before the free memory could be
	// used up at that rate.
	fastest = 2 << 30

	// longestLook is the longest interval between two checks. Each check wakes an
	// idle sandbox, which costs the host more than the check itself.
	longestLook = time.Second

	// hopelessLook is the interval if there was no process to kill.
	hopelessLook = 250 * time.Millisecond
)

// A memoryWatch watches and frees the sandbox's memory.
type memoryWatch struct {
	log   *slog.Logger
	total int64               // bytes of the sandbox; zero means that it is not watched
	lower *atomic.Int64       // a contract's limit in bytes, used if it is below total; nil or zero means none
	used  func() int64        // bytes in use
	proc  string              // /proc
	spare map[int]struct{}    // processes that must not be killed
	mark  func(session int)   // notes that a process of the session is killed for memory
	kill  func(pid int) error // kills a process
}

func (s *Server) newMemoryWatch() *memoryWatch {
	return &memoryWatch{
		log: s.log, total: s.conf.MemoryMB << 20, lower: &s.bound.memory, used: usedMemory, proc: "/proc",
		spare: guestPids(),
		mark: func(session int) {
			s.bound.starved.Add(1)
			s.table.markOOM(session)
		},
		kill: func(pid int) error { return unix.Kill(pid, unix.SIGKILL) },
	}
}

// run kills the largest process of users when the sandbox is about to run out of
// memory, until ctx is done. Otherwise the host would end the whole sandbox,
// including the guest.
//
// It checks more often the less memory is free.
func (m *memoryWatch) run(ctx context.Context) {
	if m.total <= 0 {
		return
	}
	for {
		total := m.total
		if m.lower != nil && m.lower.Load() > 0 {
			total = min(total, m.lower.Load())
		}
		free := total - m.used() - reserveOf(total)
		wait := time.Duration(float64(free) / fastest * float64(time.Second))
		if free < 0 {
			wait = 0
			if !m.free(ctx, -free) {
				wait = hopelessLook // another process may appear
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(max(wait, 10*time.Millisecond), longestLook)):
		}
	}
}

// reserveOf returns how many bytes of total are kept free.
func reserveOf(total int64) int64 {
	return min(max(total/reserveShare, minReserve), maxReserve, total/4)
}

// usedMemory returns the bytes in use. It uses sysinfo(2): for /proc/meminfo gVisor
// looks at each page, which at four times a second took a hundredth of a core.
func usedMemory() int64 {
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) != nil {
		return 0
	}
	return int64(si.Totalram-si.Freeram) * int64(si.Unit)
}

// smallest is the size below which killing a process does not help: the memory is
// then held by files, which only the disk limit or their owner can remove.
const smallest = 4 << 20

// free kills processes, largest first, until they held want bytes together, and
// waits a moment for them to end. It reports whether it killed any.
func (m *memoryWatch) free(ctx context.Context, want int64) bool {
	type victim struct {
		procStat
		rss int64
	}
	var list []victim
	procs, _ := readProcs(m.proc) // what cannot be read is not killed
	for _, p := range procs {
		if _, ok := m.spare[p.pid]; ok {
			continue
		}
		if rss := m.resident(p.pid); rss >= smallest {
			list = append(list, victim{p, rss})
		}
	}
	slices.SortFunc(list, func(a, b victim) int { return cmp.Compare(b.rss, a.rss) })
	var killed []int
	var held int64 // of the killed processes
	for _, v := range list {
		if want <= 0 {
			break
		}
		m.mark(v.session)
		if m.kill(v.pid) == nil {
			m.log.WarnContext(ctx, "killed a process for memory", "pid", v.pid, "bytes", v.rss)
			want -= v.rss
			held += v.rss
			killed = append(killed, v.pid)
		}
	}
	// If the next check came before they have ended and their memory counts as
	// free, it would kill others for the same memory. But stop waiting if usage
	// rises.
	before := m.used()
	for range 50 {
		now := m.used()
		gone := !slices.ContainsFunc(killed, func(pid int) bool { return m.resident(pid) > 0 })
		if len(killed) == 0 || now > before+minReserve/2 || (gone && now < before-held/2) {
			break
		}
		select {
		case <-ctx.Done():
			return true
		case <-time.After(10 * time.Millisecond):
		}
	}
	return len(killed) > 0
}

// guestPids returns the processes that must not be killed: the guest and its init.
func guestPids() map[int]struct{} {
	return map[int]struct{}{1: {}, os.Getpid(): {}, os.Getppid(): {}}
}

func (m *memoryWatch) resident(pid int) int64 {
	b, err := os.ReadFile(m.proc + "/" + strconv.Itoa(pid) + "/statm")
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b))
	if len(f) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(f[1], 10, 64)
	return pages * int64(os.Getpagesize())
}

// markOOM marks the process of that session as killed for memory.
func (t *processTable) markOOM(session int) {
	t.mu.Lock()
	p := t.running[session]
	t.mu.Unlock()
	if p != nil {
		p.mu.Lock()
		p.oom = true
		p.mu.Unlock()
	}
}
