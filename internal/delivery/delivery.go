// Package delivery delivers approved mail. It decides when each recipient is
// tried, records what each server answered, and draws the consequences:
// retries, bounces, suppressed addresses and suspended senders.
//
// It does not approve or reject messages. It may delay a message, or not
// deliver it at all, because the address is suppressed, the sender is suspended
// or the destination is busy.
//
// An action is one message to one or more recipients. Each recipient is
// delivered to and recorded separately, as an [oversight.Part], whose rules
// define the moves:
//
//	queued ──▶ sending ──▶ delivered, bounced, uncertain
//	             │   ▲
//	             ▼   │
//	           deferred
//
// The intent (sending) is durable before the conversation with the next server
// starts, and its result before the next conversation. So after a crash, a
// recipient in state sending may or may not have the message: it becomes
// uncertain and is never retried without a person. While recipients are queued
// or deferred, the action goes back to the gate as approved, and settled
// recipients are not touched again. A person is asked about uncertain
// recipients once all others are settled.
package delivery

import (
	"context"
	"fmt"
	"slices"
	"time"

	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/oversight"
)

// A State is the state of the delivery to one recipient of an action.
type State = oversight.PartState

// The states of a [Delivery].
const (
	Queued     = oversight.PartQueued
	Sending    = oversight.PartSending
	Delivered  = oversight.PartDelivered
	Deferred   = oversight.PartDeferred
	Bounced    = oversight.PartBounced
	Suppressed = oversight.PartSuppressed
	Uncertain  = oversight.PartUncertain
	Cancelled  = oversight.PartCancelled
)

// A Delivery is the state of the delivery to one recipient of an action.
type Delivery struct {
	Recipient  string // address; empty once the message has been deleted
	State      State
	Code       int    // SMTP code of the last reply; 0 if there was none
	Status     string // RFC 3463 code of the last reply; may be empty
	Detail     string // for a person
	Remote     string // server that gave the reply; may be empty
	Attempts   int64
	First      time.Time // first attempt; zero if there was none
	Last       time.Time // last attempt
	Next       time.Time // next attempt; zero once it is settled
	Settled    time.Time // zero while it is open or uncertain
	Complained time.Time // when the recipient reported it as spam; zero if never

	n       int       // index among the recipients of the message
	outside bool      // it left this server; only such deliveries count for reputation
	asked   bool      // a person is being asked about the uncertain outcome
	told    time.Time // when the inbox got a bounce for it; zero if not
}

// open reports whether d can still make progress without a person.
func (d *Delivery) open() bool { return d.part().Open() }

// part returns d as the state machine of package oversight sees it.
func (d *Delivery) part() oversight.Part {
	return oversight.Part{State: d.State, Asked: d.asked, Attempts: d.Attempts}
}

// among returns the delivery with index n, or an error that wraps
// [oversight.ErrStale].
func among(ds []Delivery, n int) (Delivery, error) {
	if i := slices.IndexFunc(ds, func(d Delivery) bool { return d.n == n }); i >= 0 {
		return ds[i], nil
	}
	return Delivery{}, fmt.Errorf("delivery %d: %w", n, oversight.ErrStale)
}

// A HopKind is the kind of server that a message goes to next.
type HopKind string

// The kinds of hops.
const (
	HopLocal  HopKind = "local"  // this server
	HopRelay  HopKind = "relay"  // a server that the operator configured
	HopDirect HopKind = "direct" // the recipient's mail exchanger (MX)

	// HopProvider is the provider of a mailbox that exists there. All recipients of a
	// message go in one conversation, and nothing is signed: the provider does.
	HopProvider HopKind = "provider"
)

// A Hop is the next server for a recipient.
type Hop struct {
	Kind HopKind
	Name string // destination that limits apply to: a domain, or the host:port of a relay
}

// A Router is a [Transport] that knows the next hop of a recipient. With a
// transport that is not a Router, all hops are taken to be local.
type Router interface {
	Hop(ctx context.Context, recipient string) Hop
}

// A Guide is a [Transport] that knows which recipients it has no route to.
// Unroutable returns the domains of those recipients, each once, and a hint for
// the operator about how to configure a route.
type Guide interface {
	Unroutable(ctx context.Context, recipients []string) (domains []string, hint string)
}

// A Transport delivers messages to the next hop. Implementations are safe for
// concurrent use.
type Transport interface {
	// Deliver sends e, first its Prefix and then its Raw, to the next hop of
	// each recipient. It returns one result per recipient, in the order of
	// e.To. It returns an error only if nothing was sent to any recipient.
	Deliver(ctx context.Context, e mail.Envelope) ([]mail.Delivery, error)
}

// A Carrier sends the mail of inboxes that are mailboxes at other providers, through
// these. Implementations are safe for concurrent use.
type Carrier interface {
	// Carry is [Transport.Deliver] through the provider of b. Every error counts as
	// temporary.
	Carry(ctx context.Context, b directory.Inbox, e mail.Envelope) ([]mail.Delivery, error)
	// Check returns why e can never leave through the provider of b. It is asked before
	// e is proposed.
	Check(ctx context.Context, b directory.Inbox, e mail.Envelope) error
}

// Config bounds how mail is delivered.
type Config struct {
	// Instance identifies this process's data directory among those that share
	// the database. The destination slots that a previous process of the same
	// instance held are freed when it starts.
	Instance string

	Lifetime   time.Duration // from the first attempt until a recipient is given up; 0 means 4 days
	FirstRetry time.Duration // delay before the second attempt; each later delay is three times as long, up to 4 h; 0 means 5 s

	Connections int // concurrent connections to one destination; 0 means 4
	PerMinute   int // recipients per minute at one destination; 0 means 100
	RelayMax    int // concurrent connections to one relay or route; 0 means 20

	WarmUp bool // limit a domain that is new to direct sending to 50 recipients a day, then 500, then 5000

	// Reputation sets when an inbox or a domain is suspended.
	Reputation Reputation
}

// fill replaces zero values by the defaults.
func (c *Config) fill() {
	def := func(d *time.Duration, to time.Duration) {
		if *d <= 0 {
			*d = to
		}
	}
	number := func(n *int, to int) {
		if *n <= 0 {
			*n = to
		}
	}
	def(&c.Lifetime, 4*24*time.Hour)
	def(&c.FirstRetry, 5*time.Second)
	number(&c.Connections, 4)
	number(&c.PerMinute, 100)
	number(&c.RelayMax, 20)
	c.Reputation.fill()
}

// maxRetryAfter caps the exponential backoff.
const maxRetryAfter = 4 * time.Hour

// retryAfter returns the delay before the next attempt, after the given number
// of attempts: FirstRetry times 3^(attempts-1), at most [maxRetryAfter].
func (c *Config) retryAfter(attempts int64) time.Duration {
	d := c.FirstRetry
	// Bounded, so that a large count cannot overflow the duration.
	for range min(attempts-1, 20) {
		if d *= 3; d > maxRetryAfter {
			return maxRetryAfter
		}
	}
	return d
}
