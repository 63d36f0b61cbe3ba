package sandbox

import "net/netip"

// LinkMTU is the size in bytes of the largest IP packet on a link. Packets never
// leave this machine, so they are as large as IPv4 allows: each one costs a
// system call on both sides.
const LinkMTU = 65520

// The addresses on every link. They are the same in every sandbox, so that a
// snapshot can be restored as any other sandbox. A [Runtime] configures
// LinkAddress inside, and a [Network] answers at LinkGateway.
var (
	// LinkGateway is the host's address: gateway, DNS resolver and the inner server.
	LinkGateway = netip.AddrFrom4([4]byte{10, 0, 0, 1})
	// LinkAddress is the sandbox's own address.
	LinkAddress = netip.AddrFrom4([4]byte{10, 0, 0, 2})
	// LinkNetwork is the network of both. It has no other hosts.
	LinkNetwork = netip.PrefixFrom(LinkGateway, 30).Masked()
)
