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
	"postern/internal/sandbox"
)

const (
	answerTTL  = 30   // seconds
	maxReply   = 512  // bytes that every client accepts (RFC 1035 §4.2.1)
	maxAnswers = 14   // addresses in an answer, which then fits in maxReply with any name
	maxWhy     = 200  // bytes of EXTRA-TEXT in a refusal, which then fits in maxReply as well
	udpSize    = 1232 // EDNS buffer size that we announce, in bytes; the value of DNS flag day 2020
)

// Extended DNS errors (RFC 8914 §4). They tell a program why it got no address.
const (
	edeForged       = 4  // Forged Answer: the address is a stand-in
	edeBlocked      = 15 // Blocked: policy does not allow the name
	edeNotSupported = 21 // Not Supported: this type of question is answered for no name
)

// handleUDP takes a datagram to port 53 of any address and answers with our
// resolver. So programs with a DNS server of their own, such as "dig @8.8.8.8",
// work as far as policy allows, and nothing is sent to that server.
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

// A dnsRequest is a parsed DNS question.
type dnsRequest struct {
	header   dnsmessage.Header
	question dnsmessage.Question
	edns     bool // it has an OPT record; without one the answer must not have one either (RFC 6891 §7)
}

// An answer is the content of a reply to a dnsRequest.
type answer struct {
	code  dnsmessage.RCode
	addrs []netip.Addr
	ede   uint16 // extended error code of RFC 8914, if why is not empty
	why   string // a sentence for a person; empty if policy is not the cause
}

const badVersion dnsmessage.RCode = 16 // BADVERS, RFC 6891 §9

// question parses a DNS message. If problem has a reason, the message is answered
// with it. Drop means that the message must not be answered: it is an answer itself
// or malformed.
func question(b []byte) (r dnsRequest, problem answer, drop bool) {
	var p dnsmessage.Parser
	var err error
	if r.header, err = p.Start(b); err != nil || r.header.Response {
		return r, answer{why: "a DNS message that is not a question"}, true
	}
	bad := func(why string) (dnsRequest, answer, bool) {
		return r, answer{code: dnsmessage.RCodeFormatError, ede: edeNotSupported, why: why}, false
	}
	if r.header.OpCode != 0 {
		return r, answer{code: dnsmessage.RCodeNotImplemented, ede: edeNotSupported, why: fmt.Sprintf("a DNS message with operation code %d; only questions, 0, are answered", r.header.OpCode)}, false
	}
	switch qs, err := p.AllQuestions(); {
	case err != nil:
		return bad("a DNS message whose question cannot be read")
	case len(qs) != 1:
		return bad(fmt.Sprintf("a DNS message with %d questions; only one at a time is answered", len(qs)))
	default:
		r.question = qs[0]
	}
	if p.SkipAllAnswers() != nil || p.SkipAllAuthorities() != nil {
		return bad("a DNS question whose other records cannot be read")
	}
	for {
		h, err := p.AdditionalHeader()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			return r, answer{}, false
		}
		if err == nil {
			err = p.SkipAdditional()
		}
		switch {
		case err != nil:
			return bad("a DNS question whose other records cannot be read")
		case h.Type != dnsmessage.TypeOPT:
		case r.edns: // RFC 6891 §6.1.1
			return bad("a DNS question with two OPT records")
		default:
			r.edns = true
			if version := byte(h.TTL >> 16); version != 0 {
				return r, answer{code: badVersion, ede: edeNotSupported, why: fmt.Sprintf("a DNS question of EDNS version %d; only version 0 is answered", version)}, false
			}
		}
	}
}

// answer returns the reply to a message that was sent to dst, or nil for none.
func (a *attached) answer(ctx context.Context, b []byte, dst netip.AddrPort) []byte {
	if !a.questions.Allow() {
		a.ledger.count(ctx, Event{Kind: Denied, Proto: "dns", Dst: dst, Reason: fmt.Sprintf("more than %d DNS questions a second", a.w.cfg.Limits.Questions)})
		return nil
	}
	r, ans, drop := question(b)
	switch {
	case ans.why != "":
		// The attack: a message that this parser rejects but another server
		// understands would leave no trace in the record.
		a.refuse(ctx, "dns", dst, "", ans.why)
	case !drop:
		ans = a.answerTo(ctx, r.question, dst)
	}
	if drop {
		return nil
	}
	return reply(r, ans)
}

// answerTo decides on a question and resolves it if policy allows.
func (a *attached) answerTo(ctx context.Context, q dnsmessage.Question, dst netip.AddrPort) answer {
	asked := q.Name.String()
	refuse := func(code dnsmessage.RCode, ede uint16, reason string) answer {
		a.refuse(ctx, "dns", dst, asked, reason)
		return answer{code: code, ede: ede, why: reason}
	}
	name, err := policy.Name(asked)
	if err != nil {
		return refuse(dnsmessage.RCodeNameError, edeBlocked, err.Error())
	}
	if q.Class != dnsmessage.ClassINET {
		return refuse(dnsmessage.RCodeRefused, edeNotSupported, "the DNS class is not IN")
	}
	const svcb, https = 64, 65
	switch q.Type {
	case dnsmessage.TypeA, dnsmessage.TypeAAAA, svcb, https:
	default:
		// Types with free text could carry a tunnel in both directions.
		return refuse(dnsmessage.RCodeRefused, edeNotSupported, fmt.Sprintf("DNS questions of type %s are not answered, only those for addresses", q.Type))
	}
	if name == Name {
		if q.Type == dnsmessage.TypeA {
			return answer{addrs: []netip.Addr{sandbox.LinkGateway}}
		}
		return answer{}
	}
	v := a.mayResolve(ctx, name)
	var addrs []netip.Addr
	if v.Effect == policy.Allow {
		// Only IPv4 leaves a sandbox, so for other types of addresses and for
		// service parameters the answer is empty. It is not an error: a program
		// that asks for several types at once would give up on one.
		if q.Type != dnsmessage.TypeA {
			return answer{}
		}
		addrs, v, err = a.lookup(ctx, name, 0)
	}
	var notFound *net.DNSError
	switch {
	case errors.As(err, &notFound) && notFound.IsNotFound:
		return answer{code: dnsmessage.RCodeNameError}
	case err != nil:
		return answer{code: dnsmessage.RCodeServerFailure}
	case v.Effect == policy.Allow:
		return answer{addrs: addrs}
	case !a.standsIn():
		return refuse(dnsmessage.RCodeNameError, edeBlocked, v.Reason)
	}
	out := refuse(dnsmessage.RCodeSuccess, edeForged, v.Reason+"; only mail for it is accepted, and waits here")
	if q.Type == dnsmessage.TypeA {
		out.addrs = []netip.Addr{a.standIns.addr(name)}
	}
	return out
}

// mayResolve returns the verdict on resolving a name outside.
func (a *attached) mayResolve(ctx context.Context, name string) policy.Verdict {
	v := a.resolve(ctx, name)
	if v.Effect == policy.Allow && a.w.cfg.Permit != nil {
		v = a.w.cfg.Permit.Lookup(ctx, a.who, name)
	}
	return v
}

// lookup resolves a name that policy allows, and judges the addresses: the owner of
// a name can point it to any address (DNS rebinding). Without an error, either the
// verdict is not allow or there are addresses.
func (a *attached) lookup(ctx context.Context, name string, port uint16) ([]netip.Addr, policy.Verdict, error) {
	v := a.mayResolve(ctx, name)
	if v.Effect != policy.Allow {
		return nil, v, nil
	}
	found, ok := a.names.cached(name)
	if !ok {
		lctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		// With the final dot, so that this machine's search list is not used.
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
		if av, _ := a.connect(ctx, a.connection(netip.AddrPortFrom(addr, port), []string{name})); av.Effect == policy.Allow {
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
	a.names.learn(name, addrs, func(n string) bool { return a.wants(ctx, n) })
	return addrs, policy.Verdict{Effect: policy.Allow}, nil
}

// reply returns the DNS message that answers r, or nil.
func reply(r dnsRequest, ans answer) []byte {
	b := dnsmessage.NewBuilder(make([]byte, 0, maxReply), dnsmessage.Header{
		ID: r.header.ID, Response: true, OpCode: r.header.OpCode, RecursionDesired: r.header.RecursionDesired, RecursionAvailable: true,
		RCode: ans.code & 0xf, // the upper bits are in the OPT record
	})
	b.EnableCompression()
	q := r.question
	if q.Name.Length != 0 {
		if b.StartQuestions() != nil || b.Question(q) != nil {
			return nil
		}
	}
	if len(ans.addrs) > 0 {
		if b.StartAnswers() != nil {
			return nil
		}
		for _, addr := range ans.addrs {
			if b.AResource(dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: answerTTL}, dnsmessage.AResource{A: addr.As4()}) != nil {
				return nil
			}
		}
	}
	if r.edns {
		var h dnsmessage.ResourceHeader
		var opt dnsmessage.OPTResource
		if ans.why != "" {
			why := printable("refused by Postern's policy: " + ans.why)
			opt.Options = []dnsmessage.Option{{
				Code: 15, // Extended DNS Error: code and EXTRA-TEXT
				Data: append(binary.BigEndian.AppendUint16(nil, ans.ede), why[:min(len(why), maxWhy)]...),
			}}
		}
		if h.SetEDNS0(udpSize, ans.code, false) != nil || b.StartAdditionals() != nil || b.OPTResource(h, opt) != nil {
			return nil
		}
	}
	out, err := b.Finish()
	if err != nil {
		return nil
	}
	return out
}

// names remembers the answers that our resolver gave to one sandbox, within bounds.
type names struct {
	mu     sync.Mutex
	byAddr map[netip.Addr]*learned
	byName map[string]lookedUp
}

// A learned entry says that a name resolved to an address.
type learned struct {
	names []string
	until time.Time
}

// A lookedUp entry is a cached answer.
type lookedUp struct {
	addrs []netip.Addr
	until time.Time
}

const (
	maxNames      = 2048 // entries of each table
	namesOfOne    = 8    // names remembered for one address, newest first
	learnedFor    = time.Hour
	lookedUpValid = answerTTL * time.Second
)

func newNames() *names {
	return &names{byAddr: map[netip.Addr]*learned{}, byName: map[string]lookedUp{}}
}

// of returns the names that were resolved to addr. Entries are kept longer than
// their TTL, since programs use answers for longer, too.
func (n *names) of(addr netip.Addr) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if l := n.byAddr[addr]; l != nil && time.Now().Before(l.until) {
		return slices.Clone(l.names)
	}
	return nil
}

// ever returns the names that were resolved to addr, also long ago. What only closes
// something uses them: a program may wait until an answer is forgotten.
func (n *names) ever(addr netip.Addr) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if l := n.byAddr[addr]; l != nil {
		return slices.Clone(l.names)
	}
	return nil
}

// learn remembers that name was resolved to addrs. Names for which keep returns true
// are forgotten last: whoever owns a domain has as many names for an address as it
// takes to displace another one.
func (n *names) learn(name string, addrs []netip.Addr, keep func(name string) bool) {
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
			i := max(0, slices.IndexFunc(l.names, func(s string) bool { return !keep(s) }))
			l.names = slices.Delete(l.names, i, i+1)
		}
		l.until = time.Now().Add(learnedFor)
	}
}

// cached returns a recent answer for name.
func (n *names) cached(name string) ([]netip.Addr, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c, ok := n.byName[name]
	return slices.Clone(c.addrs), ok && time.Now().Before(c.until)
}

// cache keeps an answer for its TTL.
func (n *names) cache(name string, addrs []netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	makeRoom(n.byName, func(c lookedUp) time.Time { return c.until })
	n.byName[name] = lookedUp{slices.Clone(addrs[:min(len(addrs), 4*maxAnswers)]), time.Now().Add(lookedUpValid)}
}

// makeRoom makes room in a full map: it deletes expired entries, or any entry if
// none has expired.
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
