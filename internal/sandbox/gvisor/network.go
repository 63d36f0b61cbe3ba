package gvisor

import (
	"net"
	"os"

	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
)

// The addresses inside are the same in every sandbox, so that a snapshot fits
// everywhere. The other end of the link knows them too.
const linkMTU = 65520

var (
	gatewayIP = net.IPv4(10, 0, 0, 1).To4()
	sandboxIP = net.IPv4(10, 0, 0, 2).To4()
	linkMask  = net.CIDRMask(30, 32)
)

// networkArgs says to the sentry that link is its only way out: packets
// without a link layer on a socket whose other end is in our process. There is
// no interface on the host that could route them anywhere else.
func networkArgs(link *os.File, restore bool) *boot.CreateLinksAndRoutesArgs {
	return &boot.CreateLinksAndRoutesArgs{
		FilePayload:   urpc.FilePayload{Files: []*os.File{link}},
		IsRestore:     restore,
		LoopbackLinks: []boot.LoopbackLink{boot.DefaultLoopbackLink},
		FDBasedLinks: []boot.FDBasedLink{{
			Name: "eth0", MTU: linkMTU, NumChannels: 1,
			Addresses: []boot.IPWithPrefix{{Address: sandboxIP, PrefixLen: 30}},
			Routes:    []boot.Route{{Destination: net.IPNet{IP: gatewayIP.Mask(linkMask), Mask: linkMask}}},
			// Nothing can change a packet between the two ends.
			TXChecksumOffload: true, RXChecksumOffload: true,
		}},
		Defaultv4Gateway: boot.DefaultRoute{Name: "eth0", Route: boot.Route{
			Destination: net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, Gateway: gatewayIP,
		}},
	}
}
