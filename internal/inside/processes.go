package inside

import (
	"context"
	"encoding/hex"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"

	"postern/internal/auth"
)

const (
	mostProcesses = 80 // processes that are returned
	asking        = 8  // concurrent requests to the guest
)

// A Process is a process in a sandbox, as /proc describes it. Its texts are hostile.
type Process struct {
	PID     int
	Parent  int     // PID
	Command string  // its arguments, or its name in brackets
	State   string  // a letter, such as R or S; see proc_pid_stat(5)
	CPU     float64 // seconds of CPU time
	Memory  int64   // resident bytes
}

// The units of /proc in gVisor and Linux: hundredths of a second, and pages.
const (
	ticks    = 100
	pageSize = 4096
)

// Processes returns a sandbox's processes, ordered by PID. If there are more than 80, it
// returns the first and the newest, and more is true. It reads /proc through the guest and
// starts no program.
func (d *Door) Processes(ctx context.Context, who auth.Principal, id string) (out []Process, more bool, err error) {
	list, more, err := d.List(ctx, who, id, "/proc")
	if err != nil {
		return nil, false, err
	}
	var pids []int
	for _, e := range list {
		if n, err := strconv.Atoi(e.Name); err == nil && n > 0 && e.Kind == Dir {
			pids = append(pids, n)
		}
	}
	slices.Sort(pids)
	if len(pids) > mostProcesses {
		// People look for the first process and the newest.
		pids, more = append(pids[:1:1], pids[len(pids)-mostProcesses+1:]...), true
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	found := make([]*Process, len(pids))
	var wg sync.WaitGroup
	turn := make(chan struct{}, asking)
	for i, pid := range pids {
		wg.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			dir := "/proc/" + strconv.Itoa(pid)
			stat, err := d.read(ctx, id, dir+"/stat", 4<<10)
			if err != nil {
				return // it has ended since
			}
			p, ok := parseStat(string(stat.Data))
			if !ok || p.PID != pid {
				return
			}
			if args, err := d.read(ctx, id, dir+"/cmdline", 4<<10); err == nil && len(args.Data) > 0 {
				p.Command = strings.TrimSpace(strings.ReplaceAll(string(args.Data), "\x00", " "))
			}
			found[i] = &p
		})
	}
	wg.Wait()
	for _, p := range found {
		if p != nil {
			out = append(out, *p)
		}
	}
	return out, more, nil
}

// parseStat parses /proc/PID/stat. The attack: a program name with brackets and numbers
// that looks like further columns. So the name ends at the last bracket.
func parseStat(line string) (p Process, ok bool) {
	start, end := strings.IndexByte(line, '('), strings.LastIndexByte(line, ')')
	if start < 0 || end < start {
		return p, false
	}
	var err error
	if p.PID, err = strconv.Atoi(strings.TrimSpace(line[:start])); err != nil || p.PID < 1 {
		return p, false
	}
	f := strings.Fields(line[end+1:])
	if len(f) < 22 {
		return p, false
	}
	number := func(i int) int64 { // fields are numbered from 3 on, see proc_pid_stat(5)
		n, err := strconv.ParseInt(f[i-3], 10, 64)
		if err != nil || n < 0 {
			return 0
		}
		return n
	}
	p.Command, p.State = "["+line[start+1:end]+"]", f[0]
	p.Parent = int(number(4))
	p.CPU = float64(number(14))/ticks + float64(number(15))/ticks
	if pages := number(24); pages < 1<<40 {
		p.Memory = pages * pageSize
	}
	return p, true
}

// A Port is a TCP port on which a program in a sandbox listens.
type Port struct {
	Number uint16
	Inside bool // only on loopback addresses; the server's port proxy reaches it all the same
}

// Ports returns the listening TCP ports of a sandbox in ascending order, at most 100.
func (d *Door) Ports(ctx context.Context, who auth.Principal, id string) (out []Port, err error) {
	if err := d.check(ctx, who, id); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	at := map[uint16]bool{} // whether all its addresses are loopback
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		c, err := d.read(ctx, id, table, 256<<10)
		if err != nil {
			continue // a kernel without IPv6
		}
		for _, p := range parseListening(string(c.Data)) {
			was, known := at[p.Number]
			at[p.Number] = p.Inside && (was || !known)
		}
	}
	for n, inside := range at {
		out = append(out, Port{n, inside})
	}
	slices.SortFunc(out, func(a, b Port) int { return int(a.Number) - int(b.Number) })
	return out[:min(len(out), 100)], nil
}

// parseListening parses /proc/net/tcp or tcp6, and returns the sockets that listen.
func parseListening(table string) (out []Port) {
	const listening = "0A"
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) < 4 || f[3] != listening {
			continue
		}
		addr, port, ok := strings.Cut(f[1], ":")
		n, err := strconv.ParseUint(port, 16, 16)
		if !ok || err != nil || n == 0 {
			continue
		}
		out = append(out, Port{uint16(n), loopback(addr)})
	}
	return out
}

// loopback reports whether an address is a loopback address. The kernel writes it as
// hexadecimal 32-bit words in little-endian order.
func loopback(s string) bool {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 4 && len(b) != 16 {
		return false
	}
	for i := 0; i+3 < len(b); i += 4 {
		slices.Reverse(b[i : i+4])
	}
	a, ok := netip.AddrFromSlice(b)
	return ok && a.Unmap().IsLoopback()
}
