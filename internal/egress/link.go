package egress

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"postern/internal/sandbox"
)

// A link is the host's end of a socket pair, as a network interface of a stack. In
// contrast to gVisor's fdbased endpoint it passes each packet to filter before any
// other code parses it, needs no thread while it waits, and copes with messages of
// any size, also empty ones.
type link struct {
	file   *os.File
	raw    syscall.RawConn
	filter func(p []byte) bool // reports whether p may pass; p is only valid during the call

	mu         sync.RWMutex
	dispatcher stack.NetworkDispatcher
	mtu        uint32
	reading    bool
	done       chan struct{} // closed when the reader has ended
}

var _ stack.LinkEndpoint = (*link)(nil)

func newLink(f *os.File, filter func([]byte) bool) (*link, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("open link: %w", err)
	}
	return &link{file: f, raw: raw, filter: filter, mtu: sandbox.LinkMTU, done: make(chan struct{})}, nil
}

// adoptable returns a duplicate of the host's end of a link that another process,
// or this one, created earlier. The duplicate is ready to be read here.
func adoptable(host *os.File) (*os.File, error) {
	raw, err := host.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("open link: %w", err)
	}
	var typ int
	if cerr := raw.Control(func(fd uintptr) {
		if typ, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TYPE); err == nil {
			err = unix.SetNonblock(int(fd), true)
		}
	}); cerr != nil {
		err = cerr
	}
	if err != nil {
		return nil, fmt.Errorf("open link: %w", err)
	}
	if typ != unix.SOCK_SEQPACKET {
		return nil, errors.New("open link: not a socket that keeps packets apart")
	}
	return duplicate(raw)
}

// duplicate returns a second descriptor of the link's host end.
func (l *link) duplicate() (*os.File, error) { return duplicate(l.raw) }

func duplicate(raw syscall.RawConn) (*os.File, error) {
	var dup int
	var err error
	if cerr := raw.Control(func(fd uintptr) {
		dup, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	}); cerr != nil {
		return nil, fmt.Errorf("duplicate link: %w", cerr)
	}
	if err != nil {
		return nil, fmt.Errorf("duplicate link: %w", err)
	}
	return os.NewFile(uintptr(dup), "link-host"), nil
}

// halt stops the reader and returns when it has ended. Writing still works.
func (l *link) halt() {
	if l.file.SetReadDeadline(time.Unix(1, 0)) != nil {
		l.file.Close() // the reader ends in any case
	}
	l.awaitReader()
}

// stop closes the link and returns when no more packets come from it.
func (l *link) stop() {
	l.file.Close()
	l.awaitReader()
}

func (l *link) awaitReader() {
	l.mu.RLock()
	reading := l.reading
	l.mu.RUnlock()
	if reading {
		<-l.done
	}
}

// errGone means that the sandbox's end has been closed.
var errGone = errors.New("the sandbox's end of the link is closed")

// read passes packets to the stack until the link is closed.
func (l *link) read() {
	defer close(l.done)
	const size = 1 << 16  // larger than any IPv4 packet
	var view *buffer.View // nil while waiting: most links are idle, and memory limits how many a machine can have
	defer func() {
		if view != nil {
			view.Release()
		}
	}()
	var n int
	var err error
	receive := func(fd uintptr) bool {
		if view == nil {
			view = buffer.NewViewSize(size)
		}
		for {
			if n, err = unix.Read(int(fd), view.AsSlice()); !errors.Is(err, unix.EINTR) {
				break
			}
		}
		if errors.Is(err, unix.EAGAIN) {
			view.Release()
			view = nil
			return false
		}
		if n == 0 && err == nil {
			// An empty message looks like the end of the link when it is read. Only
			// the real end sets RDHUP.
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
			if _, perr := unix.Poll(p, 0); perr == nil && p[0].Revents&(unix.POLLHUP|unix.POLLRDHUP|unix.POLLERR) != 0 {
				err = errGone
			}
		}
		return true
	}
	for {
		if rerr := l.raw.Read(receive); rerr != nil || err != nil {
			return
		}
		p := view.AsSlice()[:n]
		if !l.filter(p) {
			continue
		}
		l.mu.RLock()
		d := l.dispatcher
		l.mu.RUnlock()
		if d == nil {
			continue
		}
		var payload buffer.Buffer
		if n < size/2 {
			// A queued packet must not hold more than twice its size. Otherwise a
			// sandbox could fill our memory with small packets.
			payload = buffer.MakeWithData(p)
		} else {
			view.CapLength(n)
			payload = buffer.MakeWithView(view)
			view = nil
		}
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: payload})
		pkt.NetworkProtocolNumber = header.IPv4ProtocolNumber
		pkt.RXChecksumValidated = true
		d.DeliverNetworkPacket(header.IPv4ProtocolNumber, pkt)
		pkt.DecRef()
	}
}

// WritePackets implements [stack.LinkWriter]. If the sandbox's buffer is full,
// packets are dropped, and TCP sends them again.
func (l *link) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	for i, pkt := range pkts.AsSlice() {
		if err := l.write(pkt.AsSlices()); err != nil {
			if errors.Is(err, unix.EAGAIN) {
				return i, &tcpip.ErrWouldBlock{}
			}
			return i, &tcpip.ErrClosedForSend{}
		}
	}
	return pkts.Len(), nil
}

func (l *link) write(bufs [][]byte) error {
	var err error
	if werr := l.raw.Write(func(fd uintptr) bool {
		for {
			if _, err = unix.Writev(int(fd), bufs); !errors.Is(err, unix.EINTR) {
				return true
			}
		}
	}); werr != nil {
		return werr
	}
	return err
}

// Attach implements [stack.NetworkLinkEndpoint].
func (l *link) Attach(d stack.NetworkDispatcher) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dispatcher = d
	if d != nil && !l.reading {
		l.reading = true
		go l.read()
	}
}

// IsAttached implements [stack.NetworkLinkEndpoint].
func (l *link) IsAttached() bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.dispatcher != nil
}

// MTU implements [stack.NetworkLinkEndpoint].
func (l *link) MTU() uint32 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.mtu
}

// SetMTU implements [stack.NetworkLinkEndpoint].
func (l *link) SetMTU(mtu uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mtu = mtu
}

// Capabilities implements [stack.NetworkLinkEndpoint]. Nothing can damage a packet
// on a link, so neither side computes checksums.
func (l *link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload | stack.CapabilityTXChecksumOffload
}

// MaxHeaderLength implements [stack.NetworkLinkEndpoint].
func (l *link) MaxHeaderLength() uint16 { return 0 }

// LinkAddress implements [stack.NetworkLinkEndpoint]: a link has none.
func (l *link) LinkAddress() tcpip.LinkAddress { return "" }

// SetLinkAddress implements [stack.NetworkLinkEndpoint].
func (l *link) SetLinkAddress(tcpip.LinkAddress) {}

// ARPHardwareType implements [stack.NetworkLinkEndpoint].
func (l *link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }

// AddHeader implements [stack.NetworkLinkEndpoint].
func (l *link) AddHeader(*stack.PacketBuffer) {}

// ParseHeader implements [stack.NetworkLinkEndpoint].
func (l *link) ParseHeader(*stack.PacketBuffer) bool { return true }

// Wait implements [stack.NetworkLinkEndpoint]. It returns at once: the stack calls
// it under a lock that an incoming packet may need. See stop.
func (l *link) Wait() {}

// Close implements [stack.NetworkLinkEndpoint].
func (l *link) Close() { l.file.Close() }

// SetOnCloseAction implements [stack.NetworkLinkEndpoint].
func (l *link) SetOnCloseAction(func()) {}
