package egress

import (
	"net/netip"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"postern/internal/sandbox"
)

// A voice records whether a sandbox has sent anything since it was attached, except
// replies on connections that this program dialled.
type voice struct{ state atomic.Int32 }

const (
	voiceUnheard = iota
	voiceHeard
	voiceMuted
)

// may reports whether a packet that inspect accepted may pass.
func (v *voice) may(p []byte) bool {
	if v.state.Load() == voiceHeard || isAnswer(p) {
		return true
	}
	return v.state.CompareAndSwap(voiceUnheard, voiceHeard) || v.state.Load() == voiceHeard
}

// muteIfSilent reports whether the sandbox has sent nothing. If so, it drops
// everything that the sandbox sends from now on.
func (v *voice) muteIfSilent() bool {
	return v.state.CompareAndSwap(voiceUnheard, voiceMuted) || v.state.Load() == voiceMuted
}

// isAnswer reports whether a packet that inspect accepted belongs to a connection
// that this program opened to the guest. A packet that opens a connection never
// does, whatever its port.
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
