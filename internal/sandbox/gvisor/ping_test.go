package gvisor

import (
	"io"
	"net/http"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/fdbased"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"postern/internal/sandbox"
)

// TestPingOutlivesRefusals: a guest that starts to listen late, after many refused
// connections, is still pinged. Without the retries, one in several hundred sandboxes
// under load was given up as unresponsive.
func TestPingOutlivesRefusals(t *testing.T) {
	h, link := newLink(t)
	fd, err := unix.Dup(int(link.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	link.Close()
	ep, err := fdbased.New(&fdbased.Options{FDs: []int{fd}, MTU: sandbox.LinkMTU, TXChecksumOffload: true, RXChecksumOffload: true, ClosedFunc: func(tcpip.Error) {}})
	if err != nil {
		t.Fatal(err)
	}
	guest := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
	})
	if err := guest.CreateNIC(1, ep); err != nil {
		t.Fatal(err)
	}
	if err := guest.AddProtocolAddress(1, tcpip.ProtocolAddress{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: tcpip.AddrFrom4(sandbox.LinkAddress.As4()).WithPrefix()}, stack.AddressProperties{}); err != nil {
		t.Fatal(err)
	}
	guest.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: 1}})
	t.Cleanup(func() {
		guest.Destroy()
		unix.Close(fd)
	})
	go func() {
		for guest.Stats().TCP.ResetsSent.Value() < 100 {
			time.Sleep(time.Millisecond)
		}
		l, err := gonet.ListenTCP(guest, tcpip.FullAddress{NIC: 1, Port: 49983}, ipv4.ProtocolNumber)
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { l.Close() })
		srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "pong") })}
		_ = srv.Serve(l) // until the test is over
	}()
	h.ping(t)
}
