package egress

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"postern/internal/policy"
)

const (
	answerTTL  = 30 // seconds
	maxAnswers = 16 // addresses in an answer: it then fits in 512 bytes with any name
)

// handleUDP takes a datagram to port 53, whatever its address: our resolver
// answers in its place.
func (a *attached) handleUDP(ctx context.Context, r *udp.ForwarderRequest) bool {
	id := r.ID()
	dst := netip.AddrPortFrom(netip.AddrFrom4(id.LocalAddress.As4()), id.LocalPort)
	select {
	case a.udpSlots <- struct{}{}:
	default:
		a.ledger.count(ctx, Event{Kind: Denied, Proto: "dns", Dst: dst, Reason: fmt.Sprintf("more than %d DNS sockets at once", cap(a.udpSlots))})
		return true
	}
	var wq waiter.Queue
	ep, e := r.CreateEndpoint(&wq)
	if e != nil || !a.enter() {
		if e == nil {
			ep.Close()
		}
		<-a.udpSlots
		return true
	}
	go func() {
		defer a.wg.Done()
		defer func() { <-a.udpSlots }()
		c := gonet.NewUDPConn(&wq, ep)
		defer c.Close()
		defer context.AfterFunc(ctx, func() { c.Close() })()
		buf := make([]byte, 2048)
		for {
			_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			if reply := a.answer(ctx, buf[:n], dst); reply != nil {
				_, _ = c.Write(reply)
			}
		}
	}()
	return true
}

// serveDNSStream answers questions over TCP (RFC 7766).
func (a *attached) serveDNSStream(ctx context.Context, c *insideConn, dst netip.AddrPort) {
	defer c.Close()
	defer context.AfterFunc(ctx, c.abort)()
	buf := make([]byte, 2+2048)
	for {
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.ReadFull(c, buf[:2]); err != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(buf))
		if n > len(buf)-2 {
			return
		}
		if _, err := io.ReadFull(c, buf[:n]); err != nil {
			return
		}
		reply := a.answer(ctx, buf[:n], dst)
		if reply == nil {
			return
		}
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)); err != nil {
			return
		}
	}
}

// question parses a DNS question. drop says that it deserves no answer at all:
// it is an answer itself, or cannot be read.
func question(b []byte) (h dnsmessage.Header, q dnsmessage.Question, code dnsmessage.RCode, drop bool) {
	var p dnsmessage.Parser
	h, err := p.Start(b)
	if err != nil || h.Response {
		return h, q, 0, true
	}
	if h.OpCode != 0 {
		return h, q, dnsmessage.RCodeNotImplemented, false
	}
	qs, err := p.AllQuestions()
	if err != nil || len(qs) != 1 {
		return h, q, dnsmessage.RCodeFormatError, false
	}
	return h, qs[0], dnsmessage.RCodeSuccess, false
}

// answer returns the reply to a question that was sent to dst, or nil.
func (a *attached) answer(ctx context.Context, b []byte, dst netip.AddrPort) []byte {
	h, q, code, drop := question(b)
	if drop {
		a.ledger.count(ctx, Event{Kind: Denied, Proto: "dns", Dst: dst, Reason: "malformed DNS messages"})
		return nil
	}
	if !a.questions.Allow() {
		a.ledger.count(ctx, Event{Kind: Denied, Proto: "dns", Dst: dst, Reason: fmt.Sprintf("more than %d DNS questions a second", a.w.cfg.Limits.Questions)})
		return nil
	}
	var addrs []netip.Addr
	if code == dnsmessage.RCodeSuccess {
		addrs, code = a.answerTo(ctx, q, dst)
	}
	return reply(h, q, code, addrs)
}

func (a *attached) answerTo(ctx context.Context, q dnsmessage.Question, dst netip.AddrPort) ([]netip.Addr, dnsmessage.RCode) {
	asked := q.Name.String()
	refuse := func(code dnsmessage.RCode, reason string) ([]netip.Addr, dnsmessage.RCode) {
		a.refuse(ctx, "dns", dst, asked, reason)
		return nil, code
	}
	name, err := policy.Name(asked)
	if err != nil {
		return refuse(dnsmessage.RCodeNameError, err.Error())
	}
	if q.Class != dnsmessage.ClassINET {
		return refuse(dnsmessage.RCodeRefused, "the DNS class is not IN")
	}
	const svcb, https = 64, 65
	switch q.Type {
	case dnsmessage.TypeA, dnsmessage.TypeAAAA, svcb, https:
	default:
		// Types with free text carry a tunnel both ways.
		return refuse(dnsmessage.RCodeRefused, fmt.Sprintf("DNS questions of type %s are not answered, only those for addresses", q.Type))
	}
	if name == Name {
		if q.Type == dnsmessage.TypeA {
			return []netip.Addr{Gateway}, dnsmessage.RCodeSuccess
		}
		return nil, dnsmessage.RCodeSuccess
	}
	if q.Type != dnsmessage.TypeA {
		if v := a.rules.Load().Resolve(name); v.Effect != policy.Allow && !a.standsIn() {
			return refuse(dnsmessage.RCodeNameError, v.Reason)
		}
		return nil, dnsmessage.RCodeSuccess
	}
	addrs, v, err := a.lookup(ctx, name, 0)
	var notFound *net.DNSError
	switch {
	case errors.As(err, &notFound) && notFound.IsNotFound:
		return nil, dnsmessage.RCodeNameError
	case err != nil:
		return nil, dnsmessage.RCodeServerFailure
	case v.Effect != policy.Allow && a.standsIn():
		a.refuse(ctx, "dns", dst, asked, v.Reason+"; only mail for it is taken, and waits here")
		return []netip.Addr{a.standIns.addr(name)}, dnsmessage.RCodeSuccess
	case v.Effect != policy.Allow:
		return refuse(dnsmessage.RCodeNameError, v.Reason)
	}
	return addrs, dnsmessage.RCodeSuccess
}

// lookup resolves a name that policy allows, and judges what it resolves to:
// whoever owns a name can make it mean any address (DNS rebinding). Without an
// error either the verdict is not allow or there are addresses.
func (a *attached) lookup(ctx context.Context, name string, port uint16) ([]netip.Addr, policy.Verdict, error) {
	rules := a.rules.Load()
	v := rules.Resolve(name)
	if v.Effect == policy.Allow && a.w.cfg.Permit != nil {
		v = a.w.cfg.Permit.Look(ctx, a.who, name)
	}
	if v.Effect != policy.Allow {
		return nil, v, nil
	}
	found, ok := a.names.cached(name)
	if !ok {
		lctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		// With its final dot: the search list of this machine is not for it.
		var err error
		if found, err = a.w.resolver.LookupNetIP(lctx, "ip4", name+"."); err != nil {
			a.log.DebugContext(ctx, "lookup", "name", name, "err", err)
			return nil, v, fmt.Errorf("look up %s: %w", name, err)
		}
		for i := range found {
			found[i] = found[i].Unmap()
		}
		a.names.cache(name, found)
	}
	var addrs []netip.Addr
	for _, addr := range found {
		if len(addrs) == maxAnswers {
			break
		}
		if av := rules.Connect(a.connection(netip.AddrPortFrom(addr, port), []string{name})); av.Effect == policy.Allow {
			addrs = append(addrs, addr)
		} else {
			v = av
		}
	}
	if len(addrs) == 0 {
		if v.Effect == policy.Allow {
			return nil, v, fmt.Errorf("look up %s: no IPv4 address", name)
		}
		v.Reason = name + ": " + v.Reason
		return nil, v, nil
	}
	a.names.learn(name, addrs)
	return addrs, policy.Verdict{Effect: policy.Allow}, nil
}

func reply(h dnsmessage.Header, q dnsmessage.Question, code dnsmessage.RCode, addrs []netip.Addr) []byte {
	b := dnsmessage.NewBuilder(make([]byte, 0, 512), dnsmessage.Header{
		ID: h.ID, Response: true, OpCode: h.OpCode, RecursionDesired: h.RecursionDesired, RecursionAvailable: true, RCode: code,
	})
	b.EnableCompression()
	if q.Name.Length != 0 {
		if b.StartQuestions() != nil || b.Question(q) != nil {
			return nil
		}
	}
	if len(addrs) > 0 {
		if b.StartAnswers() != nil {
			return nil
		}
		for _, addr := range addrs {
			if b.AResource(dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: answerTTL}, dnsmessage.AResource{A: addr.As4()}) != nil {
				return nil
			}
		}
	}
	out, err := b.Finish()
	if err != nil {
		return nil
	}
	return out
}

// names remembers what our resolver told one sandbox, within bounds.
type names struct {
	mu     sync.Mutex
	byAddr map[netip.Addr]*learned
	byName map[string]lookedUp
}

type learned struct {
	names []string
	until time.Time
}

type lookedUp struct {
	addrs []netip.Addr
	until time.Time
}

const (
	maxNames      = 2048 // of each table
	namesOfOne    = 8    // names remembered for one address, the newest
	learnedFor    = time.Hour
	lookedUpValid = answerTTL * time.Second
)

func newNames() *names {
	return &names{byAddr: map[netip.Addr]*learned{}, byName: map[string]lookedUp{}}
}

// of returns the names for which addr was given as an answer. Programs keep
// answers longer than they should, so these are kept longer than they last.
func (n *names) of(addr netip.Addr) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if l := n.byAddr[addr]; l != nil && time.Now().Before(l.until) {
		return slices.Clone(l.names)
	}
	return nil
}

func (n *names) learn(name string, addrs []netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, a := range addrs {
		l := n.byAddr[a]
		if l == nil {
			makeRoom(n.byAddr, func(l *learned) time.Time { return l.until })
			l = &learned{}
			n.byAddr[a] = l
		}
		l.names = append(slices.DeleteFunc(l.names, func(s string) bool { return s == name }), name)
		if len(l.names) > namesOfOne {
			l.names = l.names[1:]
		}
		l.until = time.Now().Add(learnedFor)
	}
}

func (n *names) cached(name string) ([]netip.Addr, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c, ok := n.byName[name]
	return slices.Clone(c.addrs), ok && time.Now().Before(c.until)
}

func (n *names) cache(name string, addrs []netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	makeRoom(n.byName, func(c lookedUp) time.Time { return c.until })
	n.byName[name] = lookedUp{slices.Clone(addrs[:min(len(addrs), 4*maxAnswers)]), time.Now().Add(lookedUpValid)}
}

// makeRoom forgets what is over, or else anything, if m is full.
func makeRoom[K comparable, V any](m map[K]V, until func(V) time.Time) {
	if len(m) < maxNames {
		return
	}
	now := time.Now()
	for k, v := range m {
		if now.After(until(v)) {
			delete(m, k)
		}
	}
	for k := range m {
		if len(m) < maxNames {
			return
		}
		delete(m, k)
	}
}
