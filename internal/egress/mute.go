package egress

import (
	"net/netip"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"postern/internal/sandbox"
)

// A voice records whether a sandbox has sent anything since it was attached,
// apart from answers on connections that this program dialled.
type voice struct{ state atomic.Int32 }

const (
	voiceUnheard = iota
	voiceHeard
	voiceMuted
)

// may reports whether a packet that inspect let through may go on.
func (v *voice) may(p []byte) bool {
	if v.state.Load() == voiceHeard || isAnswer(p) {
		return true
	}
	return v.state.CompareAndSwap(voiceUnheard, voiceHeard) || v.state.Load() == voiceHeard
}

// muteIfSilent reports whether the sandbox has sent nothing. If so, everything
// that it sends from now on is dropped.
func (v *voice) muteIfSilent() bool {
	return v.state.CompareAndSwap(voiceUnheard, voiceMuted) || v.state.Load() == voiceMuted
}

// isAnswer reports whether a packet that inspect let through belongs to a
// connection that we opened to the guest. A packet that opens a connection does
// not, whatever its port.
func isAnswer(p []byte) bool {
	ip := header.IPv4(p)
	if ip.TransportProtocol() != header.TCPProtocolNumber || netip.AddrFrom4(ip.DestinationAddress().As4()) != sandbox.LinkGateway {
		return false
	}
	t := header.TCP(p[header.IPv4MinimumSize:])
	begins := t.Flags().Contains(header.TCPFlagSyn) && !t.Flags().Contains(header.TCPFlagAck)
	return t.SourcePort() == sandbox.GuestPort && !begins
}

// MuteIfSilent implements [sandbox.Network].
func (w *Wall) MuteIfSilent(id string) bool {
	a, err := w.find(id)
	return err == nil && a.voice.muteIfSilent()
}
