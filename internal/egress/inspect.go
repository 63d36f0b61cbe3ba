package egress

import (
	"context"
	"fmt"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"postern/internal/sandbox"
)

// inspect says whether a packet may go on to the stack. Only TCP and DNS from
// the one right address do, whole and without options: the rest is refused
// here, so that no other code reads it.
func (a *attached) inspect(ctx context.Context, p []byte) bool {
	if len(p) < header.IPv4MinimumSize || p[0]>>4 != 4 {
		a.notIPv4(ctx, p)
		return false
	}
	ip := header.IPv4(p)
	total := int(ip.TotalLength())
	dst := netip.AddrFrom4(ip.DestinationAddress().As4())
	proto := ip.TransportProtocol()
	if ip.HeaderLength() != header.IPv4MinimumSize || total < header.IPv4MinimumSize || total > len(p) {
		a.malformed(ctx, dst)
		return false
	}
	if src := netip.AddrFrom4(ip.SourceAddress().As4()); src != sandbox.LinkAddress {
		// It says who it is not; whom it aims at does not matter.
		a.ledger.addLater(ctx, Event{Kind: Denied, Proto: protoName(proto), Dst: netip.AddrPortFrom(dst, 0), Name: src.String(), Reason: fmt.Sprintf("a packet with the source address %v, which is not the sandbox's", src)}, func() {})
		return false
	}
	if ip.More() || ip.FragmentOffset() != 0 {
		a.deny(ctx, p[:total], netip.AddrPortFrom(dst, 0), "fragments are not forwarded")
		return false
	}
	body := p[header.IPv4MinimumSize:total]
	switch proto {
	case header.TCPProtocolNumber:
		if len(body) < header.TCPMinimumSize {
			a.malformed(ctx, dst)
			return false
		}
		t := header.TCP(body)
		if off := int(t.DataOffset()); off < header.TCPMinimumSize || off > len(body) {
			a.malformed(ctx, dst)
			return false
		}
		if t.Flags().Contains(header.TCPFlagSyn) && !t.Flags().Contains(header.TCPFlagAck) {
			return a.inspectSyn(ctx, p[:total], netip.AddrPortFrom(dst, t.DestinationPort()))
		}
		return true
	case header.UDPProtocolNumber:
		if len(body) < header.UDPMinimumSize {
			a.malformed(ctx, dst)
			return false
		}
		to := netip.AddrPortFrom(dst, header.UDP(body).DestinationPort())
		if to.Port() == 53 && !odd(dst) {
			return true
		}
		a.deny(ctx, p[:total], to, "only TCP, and DNS over UDP, leave a sandbox")
		return false
	case header.ICMPv4ProtocolNumber:
		a.deny(ctx, p[:total], netip.AddrPortFrom(dst, 0), "ICMP does not leave a sandbox")
		return false
	default:
		a.deny(ctx, p[:total], netip.AddrPortFrom(dst, 0), "only TCP, and DNS over UDP, leave a sandbox")
		return false
	}
}

func (a *attached) inspectSyn(ctx context.Context, p []byte, to netip.AddrPort) bool {
	if odd(to.Addr()) {
		a.deny(ctx, p, to, fmt.Sprintf("%v is no address that a connection can be made to", to.Addr()))
		return false
	}
	if !a.newConns.Allow() {
		a.ledger.count(ctx, Event{Kind: Denied, Proto: "tcp", Dst: to, Reason: fmt.Sprintf("more than %d new connections a second", a.w.cfg.Limits.NewConnections)})
		return false
	}
	return true
}

// odd reports whether a stack would silently drop packets to a, or the sandbox's
// own stack would drop a reset from there: broadcast addresses, including the last
// address of the link's network, multicast addresses and those of one's own host.
func odd(a netip.Addr) bool {
	b := a.As4()
	return b[0] == 0 || b[0] == 127 || b[0] >= 224 || sandbox.LinkNetwork.Contains(a) && a != sandbox.LinkGateway
}

// deny records a packet and then refuses it by ICMP, so that the program that
// sent it need not wait for a time-out. The answer comes from the gateway: from
// an odd address the sandbox would drop it.
func (a *attached) deny(ctx context.Context, p []byte, to netip.AddrPort, reason string) {
	refusal := unreachable(p)
	a.ledger.addLater(ctx, Event{Kind: Denied, Proto: protoName(header.IPv4(p).TransportProtocol()), Dst: to, Reason: reason}, func() {
		if refusal != nil {
			_ = a.link.write([][]byte{refusal}) // without room it is lost, as any packet
		}
	})
}

func (a *attached) malformed(ctx context.Context, dst netip.Addr) {
	a.ledger.count(ctx, Event{Kind: Denied, Proto: "ip", Dst: netip.AddrPortFrom(dst, 0), Reason: "malformed packets"})
}

// notIPv4 drops what is not IPv4. A kernel sends IPv6 multicast of its own
// accord when a link comes up; that is nobody's attempt.
func (a *attached) notIPv4(ctx context.Context, p []byte) {
	if len(p) < header.IPv6MinimumSize || p[0]>>4 != 6 {
		a.malformed(ctx, netip.Addr{})
		return
	}
	dst := netip.AddrFrom16([16]byte(p[24:40]))
	if dst.IsMulticast() {
		return
	}
	var port uint16
	if len(p) >= header.IPv6MinimumSize+4 && (p[6] == 6 || p[6] == 17) {
		port = uint16(p[42])<<8 | uint16(p[43])
	}
	a.ledger.addLater(ctx, Event{Kind: Denied, Proto: protoName(tcpip.TransportProtocolNumber(p[6])), Dst: netip.AddrPortFrom(dst, port), Reason: "IPv6 does not leave a sandbox"}, func() {})
}

func protoName(p tcpip.TransportProtocolNumber) string {
	switch p {
	case header.TCPProtocolNumber:
		return "tcp"
	case header.UDPProtocolNumber:
		return "udp"
	case header.ICMPv4ProtocolNumber, header.ICMPv6ProtocolNumber:
		return "icmp"
	default:
		return fmt.Sprintf("ip/%d", p)
	}
}

// unreachable returns the packet that refuses p, which has a whole header, or
// nil if p must not be answered: RFC 1122 §3.2.2 forbids errors about errors,
// about broadcasts and about fragments but the first. It forbids them for
// broadcasts since many could answer; here one does, and a connection that is
// asked for waits for the answer, so TCP always gets one.
func unreachable(p []byte) []byte {
	ip := header.IPv4(p)
	body := p[header.IPv4MinimumSize:]
	dst := netip.AddrFrom4(ip.DestinationAddress().As4())
	icmp := ip.TransportProtocol() == header.ICMPv4ProtocolNumber
	tcp := ip.TransportProtocol() == header.TCPProtocolNumber
	if ip.FragmentOffset() != 0 || odd(dst) && !tcp || icmp && (len(body) == 0 || header.ICMPv4Type(body[0]) != header.ICMPv4Echo) {
		return nil
	}
	quote := p[:min(len(p), header.IPv4MinimumSize+8)]
	out := make([]byte, header.IPv4MinimumSize+header.ICMPv4MinimumSize+len(quote))
	o := header.IPv4(out)
	o.Encode(&header.IPv4Fields{
		TotalLength: uint16(len(out)), TTL: 64, Protocol: uint8(header.ICMPv4ProtocolNumber),
		SrcAddr: tcpip.AddrFrom4(sandbox.LinkGateway.As4()), DstAddr: tcpip.AddrFrom4(sandbox.LinkAddress.As4()),
	})
	o.SetChecksum(^o.CalculateChecksum())
	m := header.ICMPv4(out[header.IPv4MinimumSize:])
	copy(m[header.ICMPv4MinimumSize:], quote)
	m.SetType(header.ICMPv4DstUnreachable)
	switch {
	case icmp:
		m.SetCode(header.ICMPv4HostProhibited)
	case tcp && odd(dst):
		m.SetCode(header.ICMPv4NetProhibited) // ENETUNREACH, as Linux says without a wall
	default:
		m.SetCode(header.ICMPv4PortUnreachable)
	}
	m.SetChecksum(0)
	m.SetChecksum(^checksum.Checksum(m, 0))
	return out
}
