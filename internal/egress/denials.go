package egress

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/inspect"
)

// maxDenials is how many refusals of one sandbox are kept in memory.
const maxDenials = 100

// A Denial is a refusal, for the program that was refused. Part of its text comes
// from the sandbox. It is printable ASCII of bounded length.
type Denial struct {
	Time   time.Time `json:"time"`
	Kind   string    `json:"kind"`             // "request", "misdirected", "placeholder", "cut", "connection", "dns" or a protocol
	Host   string    `json:"host"`             // name, or address and port if there is none
	Method string    `json:"method,omitempty"` // of a request
	Path   string    `json:"path,omitempty"`   // of a request, without the query
	Reason string    `json:"reason"`
	Rule   string    `json:"rule,omitempty"`   // ID of the deciding rule
	Action string    `json:"action,omitempty"` // ID of the action that a person decides on
}

// denials keeps the last refusals of one sandbox.
type denials struct {
	mu   sync.Mutex
	list []Denial // oldest first
}

func (d *denials) add(n Denial) {
	n.Time = time.Now().UTC()
	n.Host, n.Method, n.Path, n.Reason = printable(n.Host), printable(n.Method), printable(n.Path), printable(n.Reason)
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.list) == maxDenials {
		d.list = d.list[:copy(d.list, d.list[1:])]
	}
	d.list = append(d.list, n)
}

// Denials returns the last refusals of a sandbox, newest first; at most 100. They
// are in memory only: the record has them for good. A sandbox without a link has
// none.
func (w *Wall) Denials(id string) []Denial {
	a, err := w.find(id)
	if err != nil {
		return nil
	}
	a.denials.mu.Lock()
	defer a.denials.mu.Unlock()
	out := make([]Denial, 0, len(a.denials.list))
	for _, d := range slices.Backward(a.denials.list) {
		out = append(out, d)
	}
	return out
}

// denied keeps the refusal of a connection or a DNS question.
func (a *attached) denied(proto string, dst netip.AddrPort, name, reason string) {
	d := Denial{Kind: proto, Host: strings.TrimSuffix(name, "."), Reason: reason}
	if proto == "tcp" {
		d.Kind = "connection"
	}
	if name == "" && dst.IsValid() {
		d.Host = dst.String()
	}
	a.denials.add(d)
}

// reportRequest writes an event of package inspect to the record.
func (a *attached) reportRequest(ctx context.Context, e inspect.Event) {
	out := Event{Kind: Denied, Proto: e.Scheme, Dst: e.Dst, Name: e.Host, Reason: e.Reason, Rule: e.Rule, Action: e.Action, Method: e.Method}
	if e.Method != "" {
		out.URL = e.Scheme + "://" + e.Host + e.Path
	}
	switch e.Kind {
	case inspect.Made:
		out.Kind, out.Status, out.Bytes = Requested, e.Status, e.Bytes
		a.ledger.addLater(ctx, out, func() {})
		return
	case inspect.Masked:
		out.Kind = Masked
		a.ledger.addLater(ctx, out, func() {})
		return
	case inspect.Stayed:
		out.Kind, out.Status = Stayed, e.Status
		a.ledger.addLater(ctx, out, func() {})
		if e.Status >= 400 { // the program wonders why
			a.denials.add(Denial{Kind: string(e.Kind), Host: e.Host, Method: e.Method, Path: e.Path, Reason: e.Reason})
		}
		return
	case inspect.Misdirected:
		out.Kind = Misdirected
	case inspect.Cut:
		out.Kind = Cut
	case inspect.Denied:
	}
	d := Denial{Kind: string(e.Kind), Host: e.Host, Method: e.Method, Path: e.Path, Reason: e.Reason, Rule: e.Rule, Action: e.Action}
	if e.Kind == inspect.Denied {
		if d.Kind = "request"; e.Method == "" {
			d.Kind = "connection"
		}
	}
	a.denials.add(d)
	a.ledger.add(ctx, out)
}
