package gvisor

import (
	"net"
	"os"

	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"

	"postern/internal/sandbox"
)

// networkArgs tells the sentry that link is its only way out. Link is a socket
// whose other end is in our process, and carries IP packets without a link
// layer. No interface of the host can route them anywhere else.
func networkArgs(link *os.File, restore bool) *boot.CreateLinksAndRoutesArgs {
	network := net.IPNet{IP: sandbox.LinkNetwork.Addr().AsSlice(), Mask: net.CIDRMask(sandbox.LinkNetwork.Bits(), 32)}
	return &boot.CreateLinksAndRoutesArgs{
		FilePayload:   urpc.FilePayload{Files: []*os.File{link}},
		IsRestore:     restore,
		LoopbackLinks: []boot.LoopbackLink{boot.DefaultLoopbackLink},
		FDBasedLinks: []boot.FDBasedLink{{
			Name: "eth0", MTU: sandbox.LinkMTU, NumChannels: 1,
			Addresses: []boot.IPWithPrefix{{Address: sandbox.LinkAddress.AsSlice(), PrefixLen: sandbox.LinkNetwork.Bits()}},
			Routes:    []boot.Route{{Destination: network}},
			// Nothing can change a packet between the two ends, so neither side
			// needs to compute checksums.
			TXChecksumOffload: true, RXChecksumOffload: true,
		}},
		Defaultv4Gateway: boot.DefaultRoute{Name: "eth0", Route: boot.Route{
			Destination: net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, Gateway: sandbox.LinkGateway.AsSlice(),
		}},
	}
}
