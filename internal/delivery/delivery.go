// Package delivery is what becomes of mail on its way out, after the gate has
// approved it: which recipient is tried when, what each server answered, and what
// follows from that for the next message.
//
// It decides on no message. It delays one, or delivers it not at all, where the
// address is suppressed, the sender suspended, or the destination busy.
//
// An action is one message to several recipients. Each recipient is delivered and
// recorded separately: it is an [oversight.Part], whose rules say how it moves.
//
// The intent (sending) is durable before the next server is spoken to, and each
// result before the next conversation. The action goes back to the gate as
// approved for as long as some recipient is queued or deferred; settled
// recipients are not touched again. A recipient whose outcome is uncertain waits
// for a person, who is asked when all others are settled.
package delivery

import (
	"context"
	"fmt"
	"slices"
	"time"

	"postern/internal/mail"
	"postern/internal/oversight"
)

// A State is where one recipient of an action is.
type State = oversight.PartState

// The states of a
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

// A Delivery is what became of one recipient of an action.
type Delivery struct {
	Recipient  string // its address; empty where the message is kept no longer
	State      State
	Code       int    // SMTP code of the last reply; 0 where there was none
	Status     string // RFC 3463 code of it; may be empty
	Detail     string // for a person
	Remote     string // server that said so; may be empty
	Attempts   int64
	First      time.Time // when it was first tried; zero if it was not
	Last       time.Time // when it was last tried
	Next       time.Time // when it is tried next; zero once it is settled
	Settled    time.Time // zero while it is not
	Complained time.Time // when its reader complained; zero if he did not

	n       int
	outside bool
	asked   bool
	told    time.Time
}

// open says whether there is still something to do for d without a person.
func (d *Delivery) open() bool { return d.part().Open() }

// part returns what the rules of d look at.
func (d *Delivery) part() oversight.Part {
	return oversight.Part{State: d.State, Asked: d.asked, Attempts: d.Attempts}
}

// among returns the one of ds that has the place n.
func among(ds []Delivery, n int) (Delivery, error) {
	if i := slices.IndexFunc(ds, func(d Delivery) bool { return d.n == n }); i >= 0 {
		return ds[i], nil
	}
	return Delivery{}, fmt.Errorf("delivery %d: %w", n, oversight.ErrStale)
}

// A HopKind says whose server a message goes to next.
type HopKind string

// The kinds of hops.
const (
	HopLocal  HopKind = "local"  // this server
	HopRelay  HopKind = "relay"  // a server that the operator named
	HopDirect HopKind = "direct" // the recipient's, found by DNS
)

// A Hop is where a message for a recipient goes next.
type Hop struct {
	Kind HopKind
	Name string // of the destination that shares limits: a domain, or the host:port of a relay
}

// A Router is a [Transport] that tells where it takes a message. Without it
// all is taken to be local.
type Router interface {
	Hop(ctx context.Context, recipient string) Hop
}

// A Guide is a [Transport] that knows which recipients it cannot reach. Domains
// are the domains of those recipients, each once; hint tells the operator of the
// server what to do about it.
type Guide interface {
	Unroutable(ctx context.Context, recipients []string) (domains []string, hint string)
}

// A Transport takes messages to where they are addressed. Implementations are
// safe for concurrent use.
type Transport interface {
	// Deliver hands e, its Prefix and then its Raw, to the next hop of each
	// recipient, and returns what became of each in the order of e.To. It returns
	// an error only if certainly nothing was sent to anybody.
	Deliver(ctx context.Context, e mail.Envelope) ([]mail.Delivery, error)
}

// Config bounds how mail leaves.
type Config struct {
	// Instance is the name of this program's data directory among those that
	// share the database. What it held of destinations is free when it starts.
	Instance string

	Lifetime   time.Duration // after the first attempt, when a recipient is given up; 0 means 4 days
	FirstRetry time.Duration // before the second attempt, three times as long before each next, to 4 h; 0 means 5 s

	Connections int // conversations at the same time with one destination; 0 means 4
	PerMinute   int // messages a minute to one destination; 0 means 100
	RelayMax    int // conversations at the same time with one relay or route; 0 means 20

	WarmUp bool // a domain that begins to send directly may write to 50 recipients a day, then 500, then 5000

	// Reputation is what an inbox or a domain is suspended for.
	Reputation Reputation
}

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

const maxRetryAfter = 4 * time.Hour

// retryAfter returns how long to wait after so many attempts.
func (c *Config) retryAfter(attempts int64) time.Duration {
	d := c.FirstRetry
	for range min(attempts-1, 20) {
		if d *= 3; d > maxRetryAfter {
			return maxRetryAfter
		}
	}
	return d
}
