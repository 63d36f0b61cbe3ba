// Package inspect handles the HTTP requests inside connections of sandboxes: it
// terminates TLS, judges each request, puts secrets on it and forwards it.
//
// The wall (package egress) hands over a connection after it has permitted it, and
// only if [Link.Wants] its host. The connection has one host, which its TLS server
// name and the program's DNS question agree on. Every request must be for that
// host, and goes only to the address that the wall has permitted:
//
//	program ── TLS of the sandbox's authority ── checks ── rules ── secrets found
//	  ── judged ── held, if a person is asked ── values put in ── verified TLS ── server
//
// The answer goes back through a mask, which hides the values that were put in.
//
// Everything that a program sends is hostile, and so is what a server answers. A
// request that two programs could read differently is refused (package framing and
// request.go). If a part cannot decide, the request is refused.
//
// The package must not decide what is allowed, and must not store anything: its
// [Judge], [Secrets] and [Mail] do. The value of a secret is in memory only while
// its request is forwarded.
package inspect

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/mailservice"
	"postern/internal/outgoing"
	"postern/internal/policy"
)

// Config holds the parts of an [Inspector]. A nil part is absent.
type Config struct {
	// Leaf returns the certificate for a host that a sandbox trusts. Nil: TLS cannot
	// be terminated, and connections that should be are refused.
	Leaf func(sandbox, host string) (*tls.Certificate, error)
	// Roots are the authorities that servers' certificates are verified by. Nil: the
	// system's.
	Roots *x509.CertPool

	Judge   Judge   // nil: every request is allowed
	Secrets Secrets // nil: there are none
	Mail    Mail    // nil: no request is taken for mail

	Limits Limits
}

// A Judge decides on requests. Implementations are safe for concurrent use.
type Judge interface {
	// Concerns reports whether a rule about requests could be about host. If host is
	// empty, it reports whether there is a rule about requests at all. It is called for
	// each connection, so it must be fast. If it does not know, it returns true.
	Concerns(ctx context.Context, who auth.Principal, host string) bool
	// Judge decides without waiting. R may be not whole. If the effect is Ask, the
	// caller reads the whole body and calls Hold.
	Judge(ctx context.Context, who auth.Principal, r *outgoing.Request) policy.Verdict
	// Hold asks a person about exactly r, which is whole, and waits within a bound or
	// until ctx is done. Allow means that r may be made once, now.
	Hold(ctx context.Context, who auth.Principal, r *outgoing.Request, v policy.Verdict) policy.Verdict
	// MayContinue decides on a request that is being made. It is called again when
	// rules, switches or grants have changed. It does not wait. An effect other than
	// Allow ends the request.
	MayContinue(ctx context.Context, who auth.Principal, r *outgoing.Request) policy.Verdict
	// Made records what became of an allowed request.
	Made(ctx context.Context, who auth.Principal, r *outgoing.Request, result string)
}

// A Reader is a [Judge] that decides by the bodies of some requests.
type Reader interface {
	// Reads reports whether the whole body of r must be read before Judge is asked.
	Reads(ctx context.Context, who auth.Principal, r *outgoing.Request) bool
}

// A MethodJudge is a [Judge] that decides on some requests by their methods.
type MethodJudge interface {
	// ByMethod reports whether Judge may decide on r by its method. Then what its body says
	// about methods is read first.
	ByMethod(ctx context.Context, who auth.Principal, r *outgoing.Request) bool
}

// Secrets holds the secrets of sandboxes. Implementations are safe for concurrent
// use.
type Secrets interface {
	// Bound returns the secrets of who's sandbox: those that e attaches and those that
	// its rules name. They have no values.
	Bound(ctx context.Context, who auth.Principal, e *policy.Egress) ([]inject.Secret, error)
	// Open returns the value of a secret that Bound returned. The caller wipes it.
	Open(ctx context.Context, who auth.Principal, id string) (inject.Value, error)
}

// Guards are [Secrets] that know what else a host could have been told. Implementations
// are safe for concurrent use.
type Guards interface {
	// Guarded returns whose values answers to who's sandbox are searched for besides those
	// of Bound: of all secrets of its project, and former ones. It is called for each
	// connection, so it must be fast. The caller does not change the list.
	Guarded(ctx context.Context, who auth.Principal) ([]inject.Guarded, error)
	// OpenGuarded returns one of these values, to mask answers with: it may be in no
	// request. The caller wipes it. The error wraps inject.ErrGone if it is gone.
	OpenGuarded(ctx context.Context, who auth.Principal, g inject.Guarded) (inject.Value, error)
}

// Mail takes requests to mail services.
type Mail interface {
	// Propose makes an action of kind email.send of r, which is whole, and waits within a
	// bound or until ctx is done. Allow means that exactly r may be made, once.
	Propose(ctx context.Context, who auth.Principal, r *outgoing.Request) policy.Verdict
}

// Limits bound what the requests of one sandbox can make this process do. Zero
// means the default in each comment.
type Limits struct {
	Requests  int           // concurrent requests; 1024. More are answered 503
	Buffered  int64         // bytes of bodies in memory, of all its requests; 64 MiB. More are answered 503
	All       int64         // bytes of bodies in memory, of all sandboxes; 512 MiB. More are answered 503
	Handshake time.Duration // for a TLS handshake, on either side; 10 seconds
	Body      time.Duration // in which a body that has to be read whole must arrive; 2 minutes
	Idle      time.Duration // after which a connection without requests is closed; 2 minutes
}

func (l *Limits) setDefaults() {
	if l.Requests <= 0 {
		l.Requests = 1024
	}
	if l.Buffered <= 0 {
		l.Buffered = 64 << 20
	}
	if l.All <= 0 {
		l.All = 512 << 20
	}
	for _, d := range []struct {
		n *time.Duration
		v time.Duration
	}{{&l.Handshake, 10 * time.Second}, {&l.Body, 2 * time.Minute}, {&l.Idle, 2 * time.Minute}} {
		if *d.n <= 0 {
			*d.n = d.v
		}
	}
}

// An EventKind says what happened to a request.
type EventKind string

// The kinds of event.
const (
	Made        EventKind = "request"     // it was forwarded
	Denied      EventKind = "denied"      // it was refused
	Misdirected EventKind = "misdirected" // it was refused since it has a sentinel, as a credential, that does not belong there
	Stayed      EventKind = "placeholder" // it was forwarded with a sentinel as text, where no value goes
	Masked      EventKind = "masked"      // its answer had the value of a secret, which was masked
	Cut         EventKind = "cut"         // it was ended since it is no longer allowed
)

// An Event is what happened to one request. It has no values of secrets. Its text
// comes in part from the sandbox and from the server.
type Event struct {
	Kind   EventKind
	Dst    netip.AddrPort // address that the program connected to
	Method string         // empty if there was no request, only a connection
	Scheme string
	Host   string
	Path   string // without the query
	Status int    // of the answer, if Made or Stayed
	Bytes  int64  // of the answer's body, if Made
	Reason string // a sentence for a person
	Rule   string // ID of the deciding rule, if any
	Action string // ID of the action that a person decides on, if any
}

// An Inspector inspects the connections of all sandboxes.
type Inspector struct {
	log *slog.Logger
	cfg Config

	buffered atomic.Int64 // bytes of bodies in memory, of all sandboxes
}

// New returns an Inspector with the parts in cfg.
func New(log *slog.Logger, cfg Config) *Inspector {
	cfg.Limits.setDefaults()
	return &Inspector{log: log, cfg: cfg}
}

// Link returns the requests of one sandbox with the settings e. Report is called for
// each event, before a refusal is answered. It must be safe for concurrent use.
func (in *Inspector) Link(who auth.Principal, e *policy.Egress, report func(context.Context, Event)) *Link {
	l := &Link{
		in: in, log: in.log.With("sandbox", who.ID), who: who, report: report,
		slots: make(chan struct{}, in.cfg.Limits.Requests), running: map[*exchange]struct{}{},
	}
	l.egress.Store(e)
	l.tls = l.newTLS()
	return l
}

// A Link is the requests of one sandbox. It is safe for concurrent use.
type Link struct {
	in     *Inspector
	log    *slog.Logger
	who    auth.Principal
	report func(context.Context, Event)
	tls    *tls.Config
	egress atomic.Pointer[policy.Egress]

	slots    chan struct{} // semaphore of requests
	buffered atomic.Int64  // bytes of bodies in memory

	bound atomic.Pointer[boundSecrets]

	mu      sync.Mutex
	running map[*exchange]struct{} // requests that are judged and not over
}

// boundSecrets is a cached answer of Secrets.Bound.
type boundSecrets struct {
	of    *policy.Egress
	list  []inject.Secret
	until time.Time
}

// boundFor is how long the list of a sandbox's secrets is kept. A secret that was
// deleted cannot be opened any more, so only its sentinel is known for that long.
const boundFor = time.Second

// secrets returns the secrets of the sandbox with the settings e.
func (l *Link) secrets(ctx context.Context, e *policy.Egress) ([]inject.Secret, error) {
	if l.in.cfg.Secrets == nil || len(e.Rules) == 0 && len(e.Secrets) == 0 {
		return nil, nil
	}
	if b := l.bound.Load(); b != nil && b.of == e && time.Now().Before(b.until) {
		return b.list, nil
	}
	list, err := l.in.cfg.Secrets.Bound(ctx, l.who, e)
	if err != nil {
		return nil, err
	}
	l.bound.Store(&boundSecrets{e, list, time.Now().Add(boundFor)})
	return list, nil
}

// guarded returns whose values answers of host are searched for besides those of the
// sandbox's own secrets. If host is empty, it is any host.
func (l *Link) guarded(ctx context.Context, host string) (out []inject.Guarded, err error) {
	g, ok := l.in.cfg.Secrets.(Guards)
	if !ok {
		return nil, nil
	}
	all, err := g.Guarded(ctx, l.who)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	rules := l.egress.Load().RuleSecrets()
	for _, s := range all {
		if host == "" || s.At(host, rules[s.Name]) {
			out = append(out, s)
		}
	}
	return out, nil
}

// Any reports whether any host could be wanted. If not, connections need not be
// looked at.
func (l *Link) Any(ctx context.Context) bool {
	e, c := l.egress.Load(), &l.in.cfg
	if len(e.Rules) > 0 || len(e.Secrets) > 0 || len(e.Packages) > 0 || c.Mail != nil || c.Judge != nil && c.Judge.Concerns(ctx, l.who, "") {
		return true
	}
	guarded, err := l.guarded(ctx, "")
	return err != nil || len(guarded) > 0
}

// Wants reports whether connections to host, a normalised name, must be inspected.
// If that is not known, it returns true: then their requests are refused.
func (l *Link) Wants(ctx context.Context, host string) bool {
	e, c := l.egress.Load(), &l.in.cfg
	if _, ok := e.RuleFor(host); ok {
		return true
	}
	// Also without an inbox: then its requests that send mail are refused, as mail ports
	// are.
	if c.Mail != nil && mailservice.Known(host) {
		return true
	}
	if c.Judge != nil && c.Judge.Concerns(ctx, l.who, host) {
		return true
	}
	list, err := l.secrets(ctx, e)
	if err != nil || slices.ContainsFunc(list, func(s inject.Secret) bool { return s.Usable(host) }) {
		return true
	}
	guarded, err := l.guarded(ctx, host)
	return err != nil || len(guarded) > 0
}

// Update installs new settings, and ends the requests that they concern.
func (l *Link) Update(ctx context.Context, e *policy.Egress) {
	old := l.egress.Swap(e)
	l.bound.Store(nil)
	secrets := func(e *policy.Egress) []string { return slices.Sorted(slices.Values(e.Secrets)) }
	changed := !slices.Equal(secrets(old), secrets(e)) || !reflect.DeepEqual(old.Tokens, e.Tokens)
	l.each(ctx, func(x *exchange) policy.Verdict {
		was, _ := old.RuleFor(x.s.conn.Host)
		is, _ := e.RuleFor(x.s.conn.Host)
		if x.r.Uses != nil && changed || !reflect.DeepEqual(was, is) {
			return policy.Verdict{Effect: policy.Deny, Reason: "the network settings of the sandbox were changed"}
		}
		return x.mayContinue(ctx)
	})
}

// Recheck ends the requests under way that are no longer allowed.
func (l *Link) Recheck(ctx context.Context) {
	l.bound.Store(nil)
	l.each(ctx, func(x *exchange) policy.Verdict { return x.mayContinue(ctx) })
}

// each ends the requests under way that judge does not allow.
func (l *Link) each(ctx context.Context, judge func(*exchange) policy.Verdict) {
	l.mu.Lock()
	running := slices.Collect(maps.Keys(l.running))
	l.mu.Unlock()
	for _, x := range running {
		if v := judge(x); v.Effect != policy.Allow {
			x.cancel(errCut)
			x.tell(ctx, Cut, v)
		}
	}
}

// errCut is the cause of the end of a request that is no longer allowed.
var errCut = errors.New("the request is no longer allowed")
