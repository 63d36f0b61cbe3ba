package egress

import (
	"net/netip"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"postern/internal/policy"
	"postern/internal/sandbox"
)

// TestMuteIfSilent: a sandbox that has sent nothing but answers to this program
// is muted, and sends nothing afterwards. One that has sent something is not muted.
func TestMuteIfSilent(t *testing.T) {
	w := newWorld(t, open)
	w.at(site+":7", echo)
	if w.wall.MuteIfSilent("i0") {
		t.Error("a sandbox that is not attached: got true")
	}
	answering := w.box("i1", policy.Egress{Internet: true})
	answering.listen(sandbox.GuestPort, echo)
	c, err := w.wall.Dial(t.Context(), "i1", sandbox.GuestPort)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := pinged(c); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if !w.wall.MuteIfSilent("i1") {
			t.Error("one that only answered: got false")
		}
	}
	if err := pinged(c); err != nil {
		t.Errorf("an answer of a muted sandbox: %v", err)
	}
	speaking := w.box("i2", policy.Egress{Internet: true})
	if err := pinged(speaking.mustDial(site + ":7")); err != nil {
		t.Fatal(err)
	}
	if w.wall.MuteIfSilent("i2") {
		t.Error("one that has spoken: got true")
	}
	if err := pinged(speaking.mustDial(site + ":7")); err != nil {
		t.Errorf("one that has spoken goes on: %v", err)
	}
	// Packets of a muted sandbox are dropped before they could be refused.
	late := w.bare("i3", "", policy.Egress{Internet: true})
	if !w.wall.MuteIfSilent("i3") {
		t.Error("one that has said nothing: got false")
	}
	dialed, _ := w.outside()
	public := netip.MustParseAddr(site)
	late.file.Write(syn(sandbox.LinkAddress, public, 5000, 7))
	late.file.Write(syn(sandbox.LinkAddress, public, sandbox.GuestPort, 7))
	late.file.Write(packet(sandbox.LinkAddress, public, 47, []byte("tunnel")))
	w.wait("the refusal", func(e Event) bool { return e.Kind == Denied && e.Proto == "ip/47" })
	if now, _ := w.outside(); len(now) != len(dialed) {
		t.Errorf("dialled %v for a muted sandbox", now[len(dialed):])
	}
}

func TestIsAnswer(t *testing.T) {
	segment := func(dst netip.Addr, port uint16, flags header.TCPFlags) []byte {
		b := make([]byte, header.TCPMinimumSize)
		header.TCP(b).Encode(&header.TCPFields{SrcPort: port, DstPort: 40000, DataOffset: header.TCPMinimumSize, Flags: flags})
		return packet(sandbox.LinkAddress, dst, 6, b)
	}
	other := netip.MustParseAddr(site)
	for _, c := range []struct {
		name string
		p    []byte
		want bool
	}{
		{"the guest takes a connection", segment(sandbox.LinkGateway, sandbox.GuestPort, header.TCPFlagSyn|header.TCPFlagAck), true},
		{"the guest says something", segment(sandbox.LinkGateway, sandbox.GuestPort, header.TCPFlagAck|header.TCPFlagPsh), true},
		{"the port is not open yet", segment(sandbox.LinkGateway, sandbox.GuestPort, header.TCPFlagRst|header.TCPFlagAck), true},
		{"a connection from the guest's port", segment(sandbox.LinkGateway, sandbox.GuestPort, header.TCPFlagSyn), false},
		{"another port", segment(sandbox.LinkGateway, 80, header.TCPFlagAck), false},
		{"another address", segment(other, sandbox.GuestPort, header.TCPFlagAck), false},
		{"a question", packet(sandbox.LinkAddress, sandbox.LinkGateway, 17, []byte{0xc3, 0x3f, 0, 53, 0, 8, 0, 0}), false},
	} {
		if got := isAnswer(c.p); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}
