package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// A Kind says what happened at the wall.
type Kind string

// The kinds of event.
const (
	Denied    Kind = "denied"    // refused
	Connected Kind = "connected" // allowed; recorded before the connection is made, which may still fail
	Captured  Kind = "captured"  // a mail conversation, received here instead of by its server
	Cut       Kind = "cut"       // ended since it is no longer allowed, or since mail began on it after other bytes
	Repeated  Kind = "repeated"  // suppressed repeats, as a count
	Requested Kind = "request"   // an inspected HTTP request, forwarded and answered

	Misdirected Kind = "misdirected" // an inspected request, refused since it has the placeholder of a secret, as a credential, that does not belong there
	Stayed      Kind = "placeholder" // an inspected request, forwarded with the placeholder of a secret as text
	Masked      Kind = "masked"      // the answer to an inspected request had the value of a secret, which was masked
)

// An Event is one thing that happened at the wall of one sandbox. Part of its text
// comes from the sandbox. It is printable ASCII of bounded length.
type Event struct {
	Kind   Kind
	Proto  string         // "tcp", "udp", "dns", "icmp" or "ip/47"; "https" or "http" for requests
	Dst    netip.AddrPort // address that the sandbox connected to; port 0 if there is none
	Name   string         // host name that it asked for or sent; empty if unknown
	Dialed netip.AddrPort // address that we connect to, if Connected
	Reason string         // a sentence for a person
	Count  int            // number of attempts; 1 except for Repeated

	// Of requests only.
	Method string // empty if the connection was refused before there was a request
	URL    string // without the query
	Status int    // of the answer
	Bytes  int64  // of the answer's body
	Rule   string // ID of the deciding rule, if any
	Action string // ID of the action that a person decides on, if any
}

// allowed reports whether an event of this kind is of something that was allowed.
func (k Kind) allowed() bool { return k == Connected || k == Requested || k == Stayed }

// A ledger writes a sandbox's events to the record and limits their number. The
// attack: a program that tries in a loop fills the disk, or the memory of this
// process. In one window each distinct event is written once, and at most max
// events are written. Events of the kinds Connected, Requested and Stayed have limits
// of their own, so that allowed connections and requests cannot keep refused ones off
// the record. At the end of the window one Repeated event carries the counts.
type ledger struct {
	log   *slog.Logger
	write func(ctx context.Context, e Event) error
	max   int
	base  time.Duration // shortest window

	mu     sync.Mutex
	window time.Duration
	timer  *time.Timer // nil if no window is open
	seen   map[eventKey]*seenEvent
	made   map[Kind]int // how many of seen are of each kind with a limit of its own
	over   overflow
	closed bool
	wg     sync.WaitGroup // writes in progress
}

// An eventKey is what makes two events equal.
type eventKey struct {
	kind  Kind
	proto string
	dst   netip.AddrPort
	name  string
	what  string // method and URL of a request
}

type seenEvent struct {
	written chan struct{} // closed when the first event has been written, or could not be
	err     error         // why it could not be; read after written is closed
	repeats int
}

// overflow counts events that were not written individually.
type overflow struct {
	count      int
	first      Event
	low, high  netip.Addr
	lowP, maxP uint16
}

func newLedger(log *slog.Logger, max int, window time.Duration, write func(context.Context, Event) error) *ledger {
	return &ledger{log: log, write: write, max: max, base: window, window: window, seen: map[eventKey]*seenEvent{}, made: map[Kind]int{}}
}

// add writes e and returns when it has been written, also if another goroutine does
// that.
func (l *ledger) add(ctx context.Context, e Event) {
	s, first, ok := l.note(ctx, e)
	switch {
	case !ok:
	case first:
		l.put(ctx, s, e)
	default:
		select {
		case <-s.written:
		case <-ctx.Done():
		}
	}
}

// errUnrecorded means that an event is not on the record.
var errUnrecorded = errors.New("it could not be put on the record")

// acknowledge writes e and returns nil once it, or an equal event of this window, is
// durably on the record. An event beyond the limit of the window is counted. What must
// not happen unrecorded waits for it.
func (l *ledger) acknowledge(ctx context.Context, e Event) error {
	s, first, ok := l.note(ctx, e)
	if !ok {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.closed {
			return errUnrecorded
		}
		return nil
	}
	if first {
		go l.put(ctx, s, e)
	}
	ctx, cancel := context.WithTimeout(ctx, acknowledgeTime)
	defer cancel()
	select {
	case <-s.written:
		return s.err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", errUnrecorded, ctx.Err())
	}
}

// acknowledgeTime is how long a connection waits for the record.
const acknowledgeTime = 10 * time.Second

// addLater writes e in the background and then calls next. If an equal event was
// written in this window, it only calls next.
func (l *ledger) addLater(ctx context.Context, e Event, next func()) {
	s, first, ok := l.note(ctx, e)
	if !ok || !first {
		next()
		return
	}
	// At most max of these run at a time: each has an entry in seen.
	go func() {
		l.put(ctx, s, e)
		next()
	}()
}

// count counts e without writing it.
func (l *ledger) count(ctx context.Context, e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.openLocked(ctx)
		l.over.add(e)
	}
}

func (l *ledger) put(ctx context.Context, s *seenEvent, e Event) {
	defer l.wg.Done()
	defer close(s.written)
	if s.err = l.putNow(ctx, e); s.err == nil {
		return
	}
	// The next one like it is written again.
	l.mu.Lock()
	defer l.mu.Unlock()
	if k := keyOf(e); l.seen[k] == s {
		delete(l.seen, k)
		if e.Kind.allowed() {
			l.made[e.Kind]--
		}
	}
}

func (l *ledger) putNow(ctx context.Context, e Event) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second) // a disk may hang
	defer cancel()
	if e.Count == 0 {
		e.Count = 1
	}
	e.Name = printable(e.Name)
	e.Reason = printable(e.Reason)
	e.Method, e.URL = printable(e.Method), printable(e.URL)
	if err := l.write(ctx, e); err != nil {
		l.log.ErrorContext(ctx, "event at the wall not recorded", "kind", e.Kind, "proto", e.Proto, "dst", e.Dst, "name", e.Name, "err", err)
		return fmt.Errorf("%w: %w", errUnrecorded, err)
	}
	return nil
}

// keyOf returns what makes e equal to another event.
func keyOf(e Event) eventKey {
	k := eventKey{e.Kind, e.Proto, e.Dst, clip(e.Name), ""}
	if e.Method != "" {
		k.what = clip(e.Method + " " + e.URL)
	}
	if e.Kind == Stayed && e.Status >= 400 {
		k.what += " " // it says more than one whose request succeeded
	}
	return k
}

// note finds or adds e in the window. It returns ok false if the window is full.
func (l *ledger) note(ctx context.Context, e Event) (s *seenEvent, first, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, false, false
	}
	l.openLocked(ctx)
	k := keyOf(e)
	if s := l.seen[k]; s != nil {
		s.repeats++
		return s, false, true
	}
	n := len(l.seen) - l.made[Connected] - l.made[Requested] - l.made[Stayed]
	own := e.Kind.allowed()
	if own {
		n = l.made[e.Kind]
	}
	if n >= l.max {
		l.over.add(e)
		return nil, false, false
	}
	if own {
		l.made[e.Kind]++
	}
	s = &seenEvent{written: make(chan struct{})}
	l.seen[k] = s
	l.wg.Add(1)
	return s, true, true
}

func (l *ledger) openLocked(ctx context.Context) {
	if l.timer == nil {
		l.timer = time.AfterFunc(l.window, func() { l.end(ctx, false) })
	}
}

// end ends the window and, if last is set, the ledger.
func (l *ledger) end(ctx context.Context, last bool) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return
	}
	e, any := l.summaryLocked()
	if l.window = l.base; l.over.count > 0 {
		// Events keep coming: write fewer summaries the longer it lasts.
		l.window = min(l.window*2, max(time.Hour, l.base))
	}
	if l.timer != nil {
		l.timer.Stop()
	}
	l.timer, l.seen, l.made, l.over, l.closed = nil, map[eventKey]*seenEvent{}, map[Kind]int{}, overflow{}, last
	if any {
		l.wg.Add(1)
	}
	l.mu.Unlock()
	if any {
		_ = l.putNow(ctx, e) // it has logged it
		l.wg.Done()
	}
	if last {
		l.wg.Wait()
	}
}

// summaryLocked returns the event with the counts of the window.
func (l *ledger) summaryLocked() (Event, bool) {
	e := Event{Kind: Repeated}
	var most *eventKey
	for k, s := range l.seen {
		e.Count += s.repeats
		if s.repeats > 0 && (most == nil || s.repeats > l.seen[*most].repeats) {
			most = &k
		}
	}
	var parts []string
	if most != nil {
		e.Proto, e.Dst, e.Name = most.proto, most.dst, most.name
		text := fmt.Sprintf("%d like this one", l.seen[*most].repeats)
		if other := e.Count - l.seen[*most].repeats; other > 0 {
			text += fmt.Sprintf(", %d like others on record", other)
		}
		parts = append(parts, text)
	}
	if o := l.over; o.count > 0 {
		e.Count += o.count
		if most == nil {
			e.Proto, e.Dst, e.Name = o.first.Proto, o.first.Dst, o.first.Name
		}
		text := fmt.Sprintf("%d events over the limit of %d in %v, the first: %s", o.count, l.max, l.window, o.first.Reason)
		if o.low.IsValid() {
			text += fmt.Sprintf("; to addresses %v to %v, ports %d to %d", o.low, o.high, o.lowP, o.maxP)
		}
		parts = append(parts, text)
	}
	e.Reason = strings.Join(parts, "; ")
	return e, e.Count > 0
}

func (o *overflow) add(e Event) {
	if o.count++; o.count == 1 {
		e.Name = clip(e.Name)
		o.first = e
	}
	a, p := e.Dst.Addr(), e.Dst.Port()
	if !a.IsValid() {
		return
	}
	if !o.low.IsValid() {
		o.low, o.high, o.lowP, o.maxP = a, a, p, p
	}
	if a.Less(o.low) {
		o.low = a
	}
	if o.high.Less(a) {
		o.high = a
	}
	o.lowP, o.maxP = min(o.lowP, p), max(o.maxP, p)
}

// clip cuts s to the length of a host name.
func clip(s string) string { return s[:min(len(s), 255)] }

// printable replaces control characters and other bytes that could attack the
// terminal or page that shows the record.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s[:min(len(s), 600)])
}
