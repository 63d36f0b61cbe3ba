package runsc

import (
	"net"
	"os"

	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"

	"postern/internal/sandbox/launch"
)

// networkArgs tells the sentry that link is its only way out. Link is a socket
// whose other end is in the server's process, and carries IP packets without a link
// layer. No interface of the host can route them anywhere else.
func networkArgs(as launch.Link, link *os.File, restore bool) *boot.CreateLinksAndRoutesArgs {
	network := net.IPNet{IP: as.Network.Addr().AsSlice(), Mask: net.CIDRMask(as.Network.Bits(), 32)}
	return &boot.CreateLinksAndRoutesArgs{
		FilePayload:   urpc.FilePayload{Files: []*os.File{link}},
		IsRestore:     restore,
		LoopbackLinks: []boot.LoopbackLink{boot.DefaultLoopbackLink},
		FDBasedLinks: []boot.FDBasedLink{{
			Name: "eth0", MTU: as.MTU, NumChannels: 1,
			Addresses: []boot.IPWithPrefix{{Address: as.Address.AsSlice(), PrefixLen: as.Network.Bits()}},
			Routes:    []boot.Route{{Destination: network}},
			// Nothing can change a packet between the two ends, so neither side
			// needs to compute checksums.
			TXChecksumOffload: true, RXChecksumOffload: true,
		}},
		Defaultv4Gateway: boot.DefaultRoute{Name: "eth0", Route: boot.Route{
			Destination: net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, Gateway: as.Gateway.AsSlice(),
		}},
	}
}
