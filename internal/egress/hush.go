package egress

import (
	"net/netip"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"postern/internal/sandbox"
)

// A voice says whether anything has come out of a sandbox since it was
// attached, but answers to whom this program dials inside.
type voice struct{ state atomic.Int32 }

const (
	voiceUnheard = iota
	voiceHeard
	voiceHushed
)

// may says whether a packet that inspect let through may go on.
func (v *voice) may(p []byte) bool {
	if v.state.Load() == voiceHeard || isAnswer(p) {
		return true
	}
	return v.state.CompareAndSwap(voiceUnheard, voiceHeard) || v.state.Load() == voiceHeard
}

// hush reports whether nothing has come out. Then nothing will.
func (v *voice) hush() bool {
	return v.state.CompareAndSwap(voiceUnheard, voiceHushed) || v.state.Load() == voiceHushed
}

// isAnswer says whether a packet, which inspect let through, belongs to a
// connection to the guest that came from us. One that begins a connection does
// not, whatever its port.
func isAnswer(p []byte) bool {
	ip := header.IPv4(p)
	if ip.TransportProtocol() != header.TCPProtocolNumber || netip.AddrFrom4(ip.DestinationAddress().As4()) != Gateway {
		return false
	}
	t := header.TCP(p[header.IPv4MinimumSize:])
	begins := t.Flags().Contains(header.TCPFlagSyn) && !t.Flags().Contains(header.TCPFlagAck)
	return t.SourcePort() == sandbox.GuestPort && !begins
}

// Hush implements [sandbox.Network].
func (w *Wall) Hush(id string) bool {
	a, err := w.find(id)
	return err == nil && a.voice.hush()
}
