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

// inspect reports whether the stack may see a packet. Only complete TCP packets,
// and DNS packets over UDP, with the right source address and without IP options
// may pass. Everything else is refused here, so that no other code parses it.
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
		// The source address is forged, so there is nobody to refuse it to.
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

// inspectSyn decides on the first packet of a connection.
func (a *attached) inspectSyn(ctx context.Context, p []byte, to netip.AddrPort) bool {
	if odd(to.Addr()) {
		a.deny(ctx, p, to, fmt.Sprintf("%v is not an address that accepts connections", to.Addr()))
		return false
	}
	if !a.newConns.Allow() {
		a.ledger.count(ctx, Event{Kind: Denied, Proto: "tcp", Dst: to, Reason: fmt.Sprintf("more than %d new connections a second", a.w.cfg.Limits.NewConnections)})
		return false
	}
	return true
}

// odd reports whether a is an address for which a stack drops packets silently, or
// from which the sandbox's stack would drop a reset: broadcast, including the last
// address of the link's network, multicast, and addresses of the own host.
func odd(a netip.Addr) bool {
	b := a.As4()
	return b[0] == 0 || b[0] == 127 || b[0] >= 224 || sandbox.LinkNetwork.Contains(a) && a != sandbox.LinkGateway
}

// deny records a packet and then refuses it by ICMP, so that the program need not
// wait for a time-out. The ICMP packet comes from the gateway: the sandbox would
// drop one from an odd address.
func (a *attached) deny(ctx context.Context, p []byte, to netip.AddrPort, reason string) {
	refusal := unreachable(p)
	a.ledger.addLater(ctx, Event{Kind: Denied, Proto: protoName(header.IPv4(p).TransportProtocol()), Dst: to, Reason: reason}, func() {
		if refusal != nil {
			_ = a.link.write([][]byte{refusal}) // without room it is lost, like any packet
		}
	})
}

// malformed counts a packet that cannot be parsed.
func (a *attached) malformed(ctx context.Context, dst netip.Addr) {
	a.ledger.count(ctx, Event{Kind: Denied, Proto: "ip", Dst: netip.AddrPortFrom(dst, 0), Reason: "malformed packets"})
}

// notIPv4 drops packets that are not IPv4. A kernel sends IPv6 multicast on its own
// when a link comes up; those are not recorded, since no program tried anything.
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

// unreachable returns the ICMP packet that refuses p, which has a complete header.
// It returns nil if p must not be answered: RFC 1122 §3.2.2 forbids errors about
// ICMP errors, broadcasts and fragments other than the first. The reason for
// broadcasts is that many hosts could answer. On a link only one can, and a TCP
// connection waits for it, so TCP always gets an answer.
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
		m.SetCode(header.ICMPv4NetProhibited) // ENETUNREACH, as on a machine without a route
	default:
		m.SetCode(header.ICMPv4PortUnreachable)
	}
	m.SetChecksum(0)
	m.SetChecksum(^checksum.Checksum(m, 0))
	return out
}
