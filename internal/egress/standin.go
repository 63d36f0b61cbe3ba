package egress

import (
	"net/netip"
	"sync"
)

// A program that sends mail first resolves its server's name. If that name is not
// allowed there would be no address, and the mail would never reach the gate. So a
// sandbox with an inbox gets a stand-in address for the name. Connections to its
// mail ports end at the gate like all others. Connections to its other ports are
// refused, and the record shows the name. No DNS query leaves this machine.
//
// Stand-ins are in 198.18.0.0/15, which is reserved for benchmarks (RFC 2544) and
// never public.
const maxStandIns = 4096 // per sandbox; then the oldest are reused

// standIns are the stand-ins of one sandbox.
type standIns struct {
	mu    sync.Mutex // guards the two below
	addrs map[string]netip.Addr
	names []string // name of the n-th address, as a ring
	next  int
}

func newStandIns() *standIns { return &standIns{addrs: map[string]netip.Addr{}} }

// standInAddr returns the n-th stand-in address.
func standInAddr(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{198, 18, byte(n >> 8), byte(n)})
}

// addr returns the stand-in address for name, and assigns one if necessary.
func (s *standIns) addr(name string) netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a, ok := s.addrs[name]; ok {
		return a
	}
	a := standInAddr(s.next)
	if len(s.names) < maxStandIns {
		s.names = append(s.names, name)
	} else {
		delete(s.addrs, s.names[s.next])
		s.names[s.next] = name
	}
	s.addrs[name] = a
	s.next = (s.next + 1) % maxStandIns
	return a
}

// of returns the name that addr is a stand-in for, or the empty string.
func (s *standIns) of(addr netip.Addr) string {
	b := addr.As4()
	n := int(b[2])<<8 | int(b[3])
	s.mu.Lock()
	defer s.mu.Unlock()
	if b[0] != 198 || b[1] != 18 || n >= len(s.names) {
		return ""
	}
	return s.names[n]
}

// standsIn reports whether the sandbox gets stand-ins.
func (a *attached) standsIn() bool { return a.w.cfg.SMTP != nil && a.who.Inbox != "" }

// NameOf returns the name that addr is a stand-in for in the sandbox id, or the
// empty string.
func (w *Wall) NameOf(id string, addr netip.Addr) string {
	a, err := w.find(id)
	if err != nil || !addr.Is4() {
		return ""
	}
	return a.standIns.of(addr)
}
