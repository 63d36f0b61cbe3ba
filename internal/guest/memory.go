package guest

import (
	"cmp"
	"context"
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
)

// watchMemory kills the largest process of users when the sandbox is about to
// run out of memory, until ctx is done. Otherwise the host would: it can only
// end the sandbox as a whole, the guest with it.
//
// The closer the end, the more often it looks; with plenty free it looks four
// times a second, which costs nothing that can be measured.
func (s *Server) watchMemory(ctx context.Context) {
	if s.conf.MemoryMB <= 0 {
		return
	}
	total := s.conf.MemoryMB << 20
	reserve := min(max(total/reserveShare, minReserve), maxReserve, total/4)
	for {
		_, used := memory()
		free := total - used - reserve
		wait := time.Duration(float64(free) / fastest * float64(time.Second))
		if free < 0 {
			wait = 0
			if !s.freeMemory(ctx, -free) {
				wait = time.Second
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(max(wait, 10*time.Millisecond), 250*time.Millisecond)):
		}
	}
}

// memory returns what this machine has and uses, in bytes. gVisor makes the
// total up, but free is the total minus what is really used.
func memory() (total, used int64) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0
	}
	var free int64
	for line := range strings.Lines(string(b)) {
		name, rest, _ := strings.Cut(line, ":")
		f := strings.Fields(rest)
		if len(f) == 0 {
			continue
		}
		switch n, _ := strconv.ParseInt(f[0], 10, 64); name {
		case "MemTotal":
			total = n << 10
		case "MemAvailable":
			free = n << 10
		}
	}
	return total, total - free
}

// smallest is the size below which killing a process helps nobody: then files
// in memory hold it, and only the disk's limit or their owner can help.
const smallest = 4 << 20

// freeMemory kills processes, the largest first, until they held want bytes,
// and waits a moment for them to be gone. It reports whether it killed any.
func (s *Server) freeMemory(ctx context.Context, want int64) bool {
	type victim struct {
		procStat
		rss int64
	}
	var list []victim
	spare := guestPids()
	for _, p := range readProcs() {
		if _, ok := spare[p.pid]; ok {
			continue
		}
		if rss := residentBytes(p.pid); rss >= smallest {
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
		s.table.markOOM(v.session)
		if unix.Kill(v.pid, unix.SIGKILL) == nil {
			s.log.WarnContext(ctx, "killed a process for memory", "pid", v.pid, "bytes", v.rss)
			want -= v.rss
			held += v.rss
			killed = append(killed, v.pid)
		}
	}
	// Looking again before they are gone, and before the kernel has counted what
	// they held as free, would kill others for their memory. Unless somebody
	// else takes more meanwhile.
	_, before := memory()
	for range 50 {
		_, now := memory()
		gone := !slices.ContainsFunc(killed, func(pid int) bool { return residentBytes(pid) > 0 })
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

func residentBytes(pid int) int64 {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/statm")
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
