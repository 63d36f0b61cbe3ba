// Package egress is the wall: each sandbox's only link to the outside.
//
// A link is a socket pair. One end is the sandbox's network interface. The other
// ends here, in a TCP/IP stack inside this process that serves this sandbox alone.
// There is no route, no forwarding and no interface on the host that a mistake
// could open. A connection of a program arrives here with its original destination,
// before its handshake is answered:
//
//	sandbox ── socket pair ── filter ── stack ─┬─ refused and recorded
//	                                           ├─ dialled by us and spliced
//	                                           ├─ inspected: Config.Inspect
//	                                           ├─ DNS: our resolver
//	                                           ├─ SMTP: handed to Config.SMTP
//	                                           └─ 10.0.0.1:80, 443: Config.Inner
//
// Every sandbox has the address 10.0.0.2 and one neighbour, 10.0.0.1, which is
// its gateway and its resolver ([sandbox.LinkNetwork]). So the hosts of that
// network outside cannot be reached, whatever the policy says. There is no IPv6:
// a sandbox has no route for it, and its own kernel refuses the connection.
//
// The package trusts nothing that comes over a link: not the packets, which a
// hostile sandbox can build by hand, not the source address, and not the name in a
// TLS or HTTP request. If a connection is allowed by name only, every clear-text
// message on it that could be for another name is judged (gate.go). No connection
// carries mail past Config.SMTP (mailwatch.go).
//
// The requests to some hosts are inspected (requests.go, package inspect). Whether
// the connection may be made at all is decided first, as for any other.
//
// The package must not decide what is allowed: policy does. It must not store
// anything: Config.Record does.
package egress

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/inspect"
	"postern/internal/outgoing"
	"postern/internal/policy"
	"postern/internal/sandbox"
)

// Name is the host name of this program inside every sandbox. It resolves to
// [sandbox.LinkGateway].
const Name = "postern.internal"

// Config holds the settings of a [Wall].
type Config struct {
	// Ceiling is the maximum that any sandbox may connect to. Zero: nothing.
	Ceiling policy.Ceiling
	// Builds is the same for the sandboxes in which the steps of builds run.
	Builds policy.Ceiling
	// Resolver is the DNS server for allowed names. Zero: the system's.
	Resolver netip.AddrPort
	// Own holds further addresses of this machine, for example a public one in
	// front of a NAT. Addresses of interfaces are known. Sandboxes may connect to
	// none of them.
	Own []netip.Addr
	// OwnPorts are the TCP ports at which this machine serves everybody: those of the
	// server's own public URLs. At them its public addresses are like others. Its
	// private ones stay closed.
	OwnPorts []uint16
	// Dial connects to allowed destinations; network is "tcp". Nil: net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Record writes an event to the record. It is called before a refusal is
	// answered. If it fails the connection is refused all the same, and the event
	// is logged. It must be set.
	Record func(ctx context.Context, who auth.Principal, e Event) error
	// Inner returns the handler that the sandbox who finds at
	// http://postern.internal and https://postern.internal. It must limit request
	// bodies itself. Nil: connections are refused.
	Inner func(who auth.Principal) http.Handler
	// Leaf returns a server certificate for a host, by the authority of a sandbox, which
	// the programs in it trust; see [inspect.Authority.Leaf]. Nil: there is no TLS for
	// https://postern.internal nor for captured mail.
	Leaf func(sandbox, host string) (*tls.Certificate, error)
	// SMTP serves a captured mail connection of the sandbox who to dst until it
	// ends. It owns conn. If seen is empty, the sandbox waits for the greeting.
	// Otherwise the greeting has been sent and seen has been read from conn.
	//
	// StartTLS is for STARTTLS: its certificate is for the server that the program asked
	// for, by the authority of its sandbox. It is nil if there is no Leaf, and on port
	// 465, where conn has TLS already.
	//
	// Connections to mail ports are refused if the sandbox has no inbox, or if SMTP is
	// nil.
	SMTP func(ctx context.Context, who auth.Principal, dst netip.AddrPort, conn net.Conn, seen []byte, startTLS *tls.Config)

	// Permit decides on connections that the lists allow. Nil: the lists decide.
	Permit Permitter

	// ProxyKey opens the passwords of sandboxes' proxies. Nil: sandboxes with a proxy
	// connect to nothing.
	ProxyKey *ProxyKey

	// Grants opens public addresses by name beyond the lists. Nil: nothing does.
	Grants Granter
	// Bounds has the contracts that bind sandboxes: Grants opens nothing that they do not
	// have. Nil: Grants opens nothing to a sandbox that a contract binds.
	Bounds *contract.Bounds

	// Inspect handles the requests inside connections to the hosts that it wants. Nil:
	// no connection is looked into.
	Inspect *inspect.Inspector

	Limits Limits // per sandbox
}

// A Permitter decides on connections that the lists of a sandbox allow; it can only
// narrow them. Implementations are safe for concurrent use. They are asked for each
// connection, so they must be fast unless they wait for a person.
type Permitter interface {
	// Names reports whether decisions on who's connections depend on host names.
	// Then the wall looks for a name also on web connections that are allowed by
	// address.
	Names(ctx context.Context, who auth.Principal) bool
	// Lookup decides whether a name may be resolved outside.
	Lookup(ctx context.Context, who auth.Principal, name string) policy.Verdict
	// Permit decides whether a connection may be made. To holds the names that our
	// resolver gave for the address, if any. Permit may wait, within a bound of its
	// own, and returns soon when ctx is done.
	Permit(ctx context.Context, who auth.Principal, to policy.Connection) policy.Verdict
	// MayContinue decides whether a connection that Permit allowed may continue. It never
	// waits for a person.
	MayContinue(ctx context.Context, who auth.Principal, to policy.Connection) policy.Verdict
}

// A Granter opens names to a sandbox that its lists, or the ceiling, do not. It never
// opens an address that is not public. Implementations are safe for concurrent use
// and fast. When a decision changes, [Wall.Recheck] must be called.
type Granter interface {
	// Allows decides on a connection to host at port. Port 0 means any port: the name
	// is only looked up. An empty host asks whether there is a grant for any host. If
	// inspect is true, the connection may only carry requests that are inspected.
	Allows(ctx context.Context, who auth.Principal, host string, port uint16) (v policy.Verdict, inspect bool)
}

// A RequestGranter is a [Granter] that knows which requests its grants allow.
type RequestGranter interface {
	Granter
	// Find decides on a request to a host that only grants for requests open, by each
	// method that a server could read from it.
	Find(ctx context.Context, who auth.Principal, r *outgoing.Request) policy.Verdict
}

// Limits bound what one sandbox can make this process do. Zero means the default in
// each comment.
type Limits struct {
	Connections    int           // concurrent TCP connections; 1024
	NewConnections int           // TCP connections per second, with a burst of four times as many; 200. Beyond it the first packet is dropped, and the sandbox's kernel sends it again
	Questions      int           // DNS questions per second, with a burst of four times as many; 100. Others are dropped
	UDPFlows       int           // concurrent DNS sockets; 256
	Records        int           // distinct events recorded per window; 100. Others are counted
	Window         time.Duration // in which repeats are counted instead of recorded; one minute. It doubles, up to an hour, while Records is exceeded
	DialTimeout    time.Duration // to connect to the outside; 10 seconds
	FirstByte      time.Duration // for the first byte of a program, where the sandbox's list has the address of an inspected host; after it, the server speaks first; 300 milliseconds
	SniffTimeout   time.Duration // for the name, or the server's protocol, to appear on a new connection; 5 seconds
	Idle           time.Duration // after which a connection without traffic is cut; two hours
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
	}{{&l.Window, time.Minute}, {&l.DialTimeout, 10 * time.Second}, {&l.FirstByte, 300 * time.Millisecond}, {&l.SniffTimeout, 5 * time.Second}, {&l.Idle, 2 * time.Hour}} {
		if *d.n <= 0 {
			*d.n = d.v
		}
	}
}

// A Wall holds the links of all sandboxes on this machine.
type Wall struct {
	log      *slog.Logger
	cfg      Config
	resolver *net.Resolver

	mu       sync.Mutex
	attached map[string]*attached // by sandbox ID

	ownMu    sync.Mutex
	own      []netip.Addr // addresses of our interfaces
	ownUntil time.Time    // when own must be read again
}

var _ sandbox.Network = (*Wall)(nil)

// New returns a Wall without links. Nothing runs until one is attached.
func New(log *slog.Logger, cfg Config) (*Wall, error) {
	if cfg.Record == nil {
		return nil, errors.New("new wall: Record is not set")
	}
	if err := errors.Join(cfg.Ceiling.Validate(), cfg.Builds.Validate()); err != nil {
		return nil, fmt.Errorf("new wall: %w", err)
	}
	cfg.Limits.setDefaults()
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{}).DialContext
	}
	w := &Wall{log: log, cfg: cfg, attached: map[string]*attached{}, resolver: net.DefaultResolver}
	if cfg.Resolver.IsValid() {
		w.resolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, cfg.Resolver.String())
		}}
	}
	return w, nil
}

// Attach implements [sandbox.Network]. Its error wraps [policy.ErrInvalid] if e is
// malformed.
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

// Adopt implements [sandbox.Network]. It reads what the sandbox sent while nobody
// read the link. Connections of the previous stack are unknown to the new one,
// which resets them at their next packet.
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

// attach starts a stack on the host's end of a link. It takes ownership of host,
// also if it fails.
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

// rules returns the effective rules of the sandbox who.
func (w *Wall) rules(who auth.Principal, e policy.Egress) (*policy.Outbound, error) {
	if who.Kind != auth.Sandbox || who.ID == "" {
		return nil, fmt.Errorf("%s is not a sandbox", who)
	}
	ceiling := w.cfg.Ceiling
	if who.Bench {
		ceiling = w.cfg.Builds
	}
	rules, err := policy.NewOutbound(e, ceiling)
	if err != nil {
		return nil, err
	}
	return rules, nil
}

// Projects returns the projects whose sandboxes have a link, without duplicates.
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

// Recheck ends and records the connections and requests of a project's sandboxes
// that are no longer allowed. It is called when decisions of Config.Permit or of the
// parts of Config.Inspect change.
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

// Detach implements [sandbox.Network]. Events that were counted and not yet
// recorded are recorded.
func (w *Wall) Detach(id string) {
	w.mu.Lock()
	a := w.attached[id]
	delete(w.attached, id)
	w.mu.Unlock()
	if a != nil {
		a.close()
	}
}

// Update implements [sandbox.Network]. Connections that the rules no longer allow
// are cut and recorded. For a new owner all connections are reset, since they were
// allowed for, and may be read by, the previous one. Its error wraps
// [sandbox.ErrNotFound] or [policy.ErrInvalid].
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

// handOver gives a link to a new owner. It stops the previous owner's stack and
// starts a new one on the same link. So no names, events or connections pass from
// one to the other.
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
	// Stop the old stack first: two readers of one link would take each other's
	// packets.
	old.stop()
	go old.settle(context.WithoutCancel(ctx)) // may take seconds, but does not use the link
	delete(w.attached, who.ID)
	a, err := newAttached(context.WithoutCancel(ctx), w, who, rules, host)
	if err != nil {
		return fmt.Errorf("hand over the link of %s: %w", who.ID, err)
	}
	w.attached[who.ID] = a
	return nil
}

// Dial implements [sandbox.Network]. It reaches services that listen on the
// sandbox's address or on all addresses. A service that listens only on loopback
// counts as closed, since no packet from outside can reach it.
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

// closedOwn reports whether dst is an address of this machine and none of OwnPorts. Port
// 0 means any port: the address is only looked up.
func (w *Wall) closedOwn(dst netip.AddrPort) bool {
	if dst.Port() == 0 && len(w.cfg.OwnPorts) > 0 || dst.Port() != 0 && slices.Contains(w.cfg.OwnPorts, dst.Port()) {
		return false
	}
	return w.isOwn(dst.Addr())
}

// isOwn reports whether a is an address of this machine. The addresses are read
// again from time to time, since they change.
func (w *Wall) isOwn(a netip.Addr) bool {
	if slices.Contains(w.cfg.Own, a) {
		return true
	}
	w.ownMu.Lock()
	defer w.ownMu.Unlock()
	if now := time.Now(); now.After(w.ownUntil) {
		ifs, err := net.InterfaceAddrs()
		if err != nil {
			// If they are unknown, any address could be ours.
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

// pair creates a link. One message on it is one packet.
func pair() (host, inside *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	for _, fd := range fds {
		const size = 4 << 20
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, size) != nil {
			// Only a privileged process may exceed the system's limit. A smaller
			// buffer is slower but works.
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, size)
		}
	}
	// Go's poller only takes non-blocking descriptors. With it a waiting link needs
	// no thread.
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "link-host"), os.NewFile(uintptr(fds[1]), "link-sandbox"), nil
}
