package guest

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// reserveShare and the bounds after it are how much of the sandbox's memory
	// is kept free: a sixteenth, between the bounds.
	reserveShare = 16
	minReserve   = 24 << 20
	maxReserve   = 128 << 20

	// fastest is how quickly we expect a sandbox to take memory, in bytes a
	// second. The watcher looks again before that could have used up what is
	// free.
	fastest = 2 << 30

	// longestLook is how long the watcher looks away at most. Each look wakes
	// an idle sandbox, which costs the host more than the look itself.
	longestLook = time.Second

	// hopelessLook is when it looks again if there was nobody to kill.
	hopelessLook = 250 * time.Millisecond
)

// A memoryWatch is how the guest sees and frees memory.
type memoryWatch struct {
	log   *slog.Logger
	total int64               // bytes that the sandbox may use; zero means that nobody watches
	used  func() int64        // bytes in use
	proc  string              // /proc
	spare map[int]struct{}    // processes that must live
	mark  func(session int)   // notes that a process of that session is killed for memory
	kill  func(pid int) error // ends a process at once
}

func (s *Server) newMemoryWatch() *memoryWatch {
	return &memoryWatch{
		log: s.log, total: s.conf.MemoryMB << 20, used: usedMemory, proc: "/proc",
		spare: guestPids(), mark: s.table.markOOM,
		kill: func(pid int) error { return unix.Kill(pid, unix.SIGKILL) },
	}
}

// run kills the largest process of users when the sandbox is about to
// run out of memory, until ctx is done. Otherwise the host would: it can only
// end the sandbox as a whole, the guest with it.
//
// The closer the end, the more often it looks.
func (m *memoryWatch) run(ctx context.Context) {
	if m.total <= 0 {
		return
	}
	for {
		free := m.total - m.used() - reserveOf(m.total)
		wait := time.Duration(float64(free) / fastest * float64(time.Second))
		if free < 0 {
			wait = 0
			if !m.free(ctx, -free) {
				wait = hopelessLook // but somebody may come
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(max(wait, 10*time.Millisecond), longestLook)):
		}
	}
}

// reserveOf is what is kept free of a total, in bytes.
func reserveOf(total int64) int64 {
	return min(max(total/reserveShare, minReserve), maxReserve, total/4)
}

// usedMemory returns the bytes that the sandbox uses. It asks by a system
// call: for /proc/meminfo gVisor looks at each page, which took a hundredth of a
// core when it was done four times a second.
func usedMemory() int64 {
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) != nil {
		return 0
	}
	return int64(si.Totalram-si.Freeram) * int64(si.Unit)
}

// smallest is the size below which killing a process helps nobody: then files
// in memory hold it, and only the disk's limit or their owner can help.
const smallest = 4 << 20

// free kills processes, the largest first, until they held want bytes,
// and waits a moment for them to be gone. It reports whether it killed any.
func (m *memoryWatch) free(ctx context.Context, want int64) bool {
	type victim struct {
		procStat
		rss int64
	}
	var list []victim
	for _, p := range readProcs(m.proc) {
		if _, ok := m.spare[p.pid]; ok {
			continue
		}
		if rss := m.resident(p.pid); rss >= smallest {
			list = append(list, victim{p, rss})
		}
	}
	slices.SortFunc(list, func(a, b victim) int { return cmp.Compare(b.rss, a.rss) })
	var killed []int
	var held int64 // by the killed
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
	// Looking again before they are gone, and before the kernel has counted what
	// they held as free, would kill others for their memory. Unless somebody
	// else takes more meanwhile.
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

// guestPids are the ones that must live: the guest and its init.
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

// markOOM notes why the process of that session will have failed.
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
