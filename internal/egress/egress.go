// Package egress is the wall: each sandbox's only link to the outside.
//
// A link is a socket pair. One end becomes the sandbox's network interface;
// the other ends here, in a TCP/IP stack of its own inside this process. There
// is no route, no forwarding and no interface on the host that a mistake could
// open. Whatever a program in the sandbox connects to arrives with the address
// it aimed at, before its handshake is answered:
//
//	sandbox ── socket pair ── filter ── stack ─┬─ refused and recorded
//	                                           ├─ dialled by us and spliced
//	                                           ├─ DNS: our resolver
//	                                           ├─ SMTP: handed to Config.SMTP
//	                                           └─ 10.0.0.1:80: Config.Inner
//
// Every sandbox has the address 10.0.0.2 and one neighbour, 10.0.0.1, which is
// its gateway and its resolver ([sandbox.LinkNetwork]). So the hosts of that
// network outside cannot be reached, whatever the policy says. There is no IPv6:
// a sandbox has no route for it, and its own kernel refuses the connection.
//
// The package trusts nothing that comes over a link: not the packets, which a
// hostile sandbox may build by hand, not the source address, not the name in a
// TLS or HTTP request. Where a name alone opens the way every clear-text message
// that could name another is judged (gate), and no connection carries mail past
// Config.SMTP (mailWatch). It must not decide: policy does. It must not store:
// Config.Record does.
package egress

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/sandbox"
)

// Name is the host name of this program inside every sandbox. It resolves to
// [sandbox.LinkGateway].
const Name = "postern.internal"

// Config holds the settings of a [Wall].
type Config struct {
	// Ceiling is what any sandbox may connect to at most. Zero: nothing.
	Ceiling policy.Ceiling
	// Resolver is the DNS server that allowed names are looked up at. Zero:
	// the system's.
	Resolver netip.AddrPort
	// Own holds further addresses by which this machine can be reached, for
	// example a public one in front of a NAT; those of its interfaces are
	// known. Sandboxes reach none of them.
	Own []netip.Addr
	// Dial connects to allowed destinations, network is "tcp". Nil: net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Record writes an event to the record. It is called before a refusal is
	// answered. Events that it cannot record are refused all the same and
	// logged. It must be set.
	Record func(ctx context.Context, who auth.Principal, e Event) error
	// Inner returns what the sandbox who finds at http://postern.internal. It
	// limits bodies itself. Nil: connections are refused.
	Inner func(who auth.Principal) http.Handler
	// SMTP holds a captured mail conversation with the sandbox who, which
	// believes to talk to dst, until it is over; it owns conn. If seen is not
	// empty these bytes were read from conn and the greeting has been sent; if
	// it is empty the sandbox waits for the greeting. Port 465 arrives with
	// its TLS taken off, under a certificate that nobody signed: a program
	// that verifies certificates will not send. Mail ports of a sandbox
	// without an inbox are refused; nil: of every one.
	SMTP func(ctx context.Context, who auth.Principal, dst netip.AddrPort, conn net.Conn, seen []byte)

	// Permit has the last word on what the lists allow. Nil: the lists have it.
	Permit Permitter

	Limits Limits // for each sandbox
}

// A Permitter has the last word on what the lists of a sandbox allow: it can
// only take from it. Implementations are safe for concurrent use and, but where
// they wait for a person, as quick as memory: they are asked for each
// connection.
type Permitter interface {
	// Names reports whether the word on who's connections goes by the names of
	// hosts, so that a name is looked for on those to the web's ports, too,
	// which are allowed by address.
	Names(ctx context.Context, who auth.Principal) bool
	// Look says whether a name may be looked up outside.
	Look(ctx context.Context, who auth.Principal, name string) policy.Verdict
	// Permit says whether a connection may be made. To has the names that we
	// resolved it by, or none. It may wait, for as long as it bounds itself, and
	// returns soon when ctx is done.
	Permit(ctx context.Context, who auth.Principal, to policy.Connection) policy.Verdict
	// Still says whether a connection that Permit allowed may go on. It never
	// asks a person.
	Still(ctx context.Context, who auth.Principal, to policy.Connection) policy.Verdict
}

// Limits bounds what one sandbox can make this process do. Zero fields have
// the defaults named.
type Limits struct {
	Connections    int           // TCP connections at once; 1024
	NewConnections int           // TCP connections a second, with a burst of four times as many; 200. More wait: their first packet is dropped and sent again
	Questions      int           // DNS questions a second, with a burst of four times as many; 100. More are dropped
	UDPFlows       int           // DNS sockets at once; 256
	Records        int           // distinct events on record in one window; 100. More are counted
	Window         time.Duration // in which repeats are counted instead of recorded; one minute. Doubles, up to an hour, while Records is not enough
	DialTimeout    time.Duration // for a connection to be made outside; 10 seconds
	SniffTimeout   time.Duration // for a name, or the server's protocol, to be seen on a new connection; 5 seconds
	Idle           time.Duration // after which a connection without a byte is cut; two hours
}

func (l *Limits) setDefaults() {
	for _, d := range []struct {
		n *int
		v int
	}{{&l.Connections, 1024}, {&l.NewConnections, 200}, {&l.Questions, 100}, {&l.UDPFlows, 256}, {&l.Records, 100}} {
		if *d.n <= 0 {
			*d.n = d.v
		}
	}
	for _, d := range []struct {
		n *time.Duration
		v time.Duration
	}{{&l.Window, time.Minute}, {&l.DialTimeout, 10 * time.Second}, {&l.SniffTimeout, 5 * time.Second}, {&l.Idle, 2 * time.Hour}} {
		if *d.n <= 0 {
			*d.n = d.v
		}
	}
}

// A Wall holds the links of all sandboxes on this machine.
type Wall struct {
	log      *slog.Logger
	cfg      Config
	tls      *tls.Config
	resolver *net.Resolver

	mu       sync.Mutex
	attached map[string]*attached // by sandbox id

	ownMu    sync.Mutex
	own      []netip.Addr // addresses of our interfaces
	ownUntil time.Time    // when own is to be read again
}

var _ sandbox.Network = (*Wall)(nil)

// New returns a Wall without links. Nothing runs until one is attached.
func New(log *slog.Logger, cfg Config) (*Wall, error) {
	if cfg.Record == nil {
		return nil, errors.New("new wall: Record is not set")
	}
	if err := cfg.Ceiling.Validate(); err != nil {
		return nil, fmt.Errorf("new wall: %w", err)
	}
	cfg.Limits.setDefaults()
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{}).DialContext
	}
	cert, err := selfSigned()
	if err != nil {
		return nil, fmt.Errorf("new wall: make certificate: %w", err)
	}
	w := &Wall{
		log: log, cfg: cfg, attached: map[string]*attached{},
		tls:      &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12},
		resolver: net.DefaultResolver,
	}
	if cfg.Resolver.IsValid() {
		w.resolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, cfg.Resolver.String())
		}}
	}
	return w, nil
}

// TLS returns the configuration with which captured connections are ended, for
// STARTTLS in them. Its certificate is made anew in each process.
func (w *Wall) TLS() *tls.Config { return w.tls.Clone() }

// Attach implements [sandbox.Network]. Its error wraps [policy.ErrInvalid] if
// e cannot be taken.
func (w *Wall) Attach(ctx context.Context, who auth.Principal, e policy.Egress) (*os.File, error) {
	host, inside, err := pair()
	if err != nil {
		return nil, fmt.Errorf("attach link: %w", err)
	}
	if err := w.attach(ctx, who, e, host); err != nil {
		inside.Close()
		return nil, fmt.Errorf("attach link: %w", err)
	}
	return inside, nil
}

// Adopt implements [sandbox.Network]. What the sandbox sent while nobody read
// the link is read now; connections of the stack that read it before are
// unknown here and reset at their next packet.
func (w *Wall) Adopt(ctx context.Context, who auth.Principal, e policy.Egress, host *os.File) error {
	own, err := adoptable(host)
	if err != nil {
		return fmt.Errorf("adopt link: %w", err)
	}
	if err := w.attach(ctx, who, e, own); err != nil {
		return fmt.Errorf("adopt link: %w", err)
	}
	return nil
}

// attach puts a stack on the host's end of a link, which it takes over, also
// when it fails.
func (w *Wall) attach(ctx context.Context, who auth.Principal, e policy.Egress, host *os.File) error {
	rules, err := w.rules(who, e)
	if err != nil {
		host.Close()
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, ok := w.attached[who.ID]; ok {
		host.Close()
		return fmt.Errorf("sandbox %s has one already", who.ID)
	}
	a, err := newAttached(context.WithoutCancel(ctx), w, who, rules, host)
	if err != nil {
		return err
	}
	w.attached[who.ID] = a
	return nil
}

func (w *Wall) rules(who auth.Principal, e policy.Egress) (*policy.Outbound, error) {
	if who.Kind != auth.Sandbox || who.ID == "" {
		return nil, fmt.Errorf("%s is not a sandbox", who)
	}
	rules, err := policy.NewOutbound(e, w.cfg.Ceiling)
	if err != nil {
		return nil, err
	}
	return rules, nil
}

// Projects returns the projects whose sandboxes have a link, each once.
func (w *Wall) Projects() (out []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range w.attached {
		if !slices.Contains(out, a.who.Project) {
			out = append(out, a.who.Project)
		}
	}
	return out
}

// Recheck cuts, and records, the connections of a project's sandboxes that the
// last word says may not go on. Whoever has it calls this when it has changed.
func (w *Wall) Recheck(ctx context.Context, project string) {
	w.mu.Lock()
	var of []*attached
	for _, a := range w.attached {
		if a.who.Project == project {
			of = append(of, a)
		}
	}
	w.mu.Unlock()
	for _, a := range of {
		a.recheck(ctx)
	}
}

// Handle implements [sandbox.Network].
func (w *Wall) Handle(id string) (*os.File, error) {
	a, err := w.find(id)
	if err != nil {
		return nil, err
	}
	f, err := a.link.duplicate()
	if err != nil {
		return nil, fmt.Errorf("handle of the link of %s: %w", id, err)
	}
	return f, nil
}

// Detach implements [sandbox.Network]. What was counted and not yet recorded
// is recorded.
func (w *Wall) Detach(id string) {
	w.mu.Lock()
	a := w.attached[id]
	delete(w.attached, id)
	w.mu.Unlock()
	if a != nil {
		a.close()
	}
}

// Update implements [sandbox.Network]. Connections that the sandbox may no
// longer have are cut and recorded. If it has a new owner all are reset, since
// they were decided on, and may be read, in the name of the one before. Its
// error wraps [sandbox.ErrNotFound] or [policy.ErrInvalid].
func (w *Wall) Update(ctx context.Context, who auth.Principal, e policy.Egress) error {
	rules, err := w.rules(who, e)
	if err != nil {
		return fmt.Errorf("update egress of %s: %w", who.ID, err)
	}
	a, err := w.find(who.ID)
	if err != nil {
		return err
	}
	if a.who == who {
		a.update(ctx, rules)
		return nil
	}
	return w.handOver(ctx, who, rules)
}

// handOver gives a link to a new owner. The stack of the one before is stopped
// and a new one starts on the same end: nothing that either knows of names,
// events or connections can reach the other.
func (w *Wall) handOver(ctx context.Context, who auth.Principal, rules *policy.Outbound) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	old := w.attached[who.ID]
	if old == nil {
		return fmt.Errorf("link of %s: %w", who.ID, sandbox.ErrNotFound)
	}
	host, err := old.link.duplicate()
	if err != nil {
		return fmt.Errorf("hand over the link of %s: %w", who.ID, err)
	}
	// In this order: two readers of one link would steal each other's packets.
	old.stop()
	go old.settle(context.WithoutCancel(ctx)) // may wait for seconds; it has no link any more
	delete(w.attached, who.ID)
	a, err := newAttached(context.WithoutCancel(ctx), w, who, rules, host)
	if err != nil {
		return fmt.Errorf("hand over the link of %s: %w", who.ID, err)
	}
	w.attached[who.ID] = a
	return nil
}

// Dial implements [sandbox.Network]. It reaches services that listen on
// 10.0.0.2 or on all addresses; one that listens on the sandbox's loopback
// only is reported as closed, since no packet from outside can get there.
func (w *Wall) Dial(ctx context.Context, id string, port uint16) (net.Conn, error) {
	a, err := w.find(id)
	if err != nil {
		return nil, err
	}
	return a.dialIn(ctx, port)
}

func (w *Wall) find(id string) (*attached, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if a := w.attached[id]; a != nil {
		return a, nil
	}
	return nil, fmt.Errorf("link of %s: %w", id, sandbox.ErrNotFound)
}

// isOwn says whether a is an address of this machine. It is read again now and
// then: a machine gets new ones.
func (w *Wall) isOwn(a netip.Addr) bool {
	if slices.Contains(w.cfg.Own, a) {
		return true
	}
	w.ownMu.Lock()
	defer w.ownMu.Unlock()
	if now := time.Now(); now.After(w.ownUntil) {
		ifs, err := net.InterfaceAddrs()
		if err != nil {
			// Without knowing, every address could be ours.
			w.log.Error("cannot list the addresses of this machine", "err", err)
			return true
		}
		w.own, w.ownUntil = nil, now.Add(15*time.Second)
		for _, i := range ifs {
			if p, err := netip.ParsePrefix(i.String()); err == nil {
				w.own = append(w.own, p.Addr().Unmap().WithZone(""))
			}
		}
	}
	return slices.Contains(w.own, a)
}

// pair makes a link. One message on it is one packet.
func pair() (host, inside *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	for _, fd := range fds {
		const size = 4 << 20
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, size) != nil {
			// Without the right to go over the system's limit: slower, not wrong.
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, size)
		}
	}
	// Only a descriptor that does not block is left to Go's poller, which
	// needs no thread for a waiting link.
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "link-host"), os.NewFile(uintptr(fds[1]), "link-sandbox"), nil
}

// selfSigned makes the certificate for captured TLS. It lives in memory only.
func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: Name}, DNSNames: []string{Name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(10, 0, 0),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
