package smtpserver

import (
	"context"
	"strings"
	"sync"
	"time"
)

// A tarpit slows down clients that guess credentials or addresses of inboxes. It
// never locks an account: a client with the right key gets in from anywhere, at
// worst some seconds later. Its memory is bounded. It is safe for concurrent use.
type tarpit struct {
	forgive time.Duration // time in which the count of strikes falls by one
	now     func() time.Time

	mu      sync.Mutex // guards what follows
	strikes map[string]*strikes
	good    map[string]bool // "account\x00host" that has authenticated before
}

type strikes struct {
	n       float64
	at      time.Time // when n was right
	waiting int       // attempts that are being delayed now
}

const (
	maxTarpit  = 10_000 // hosts and accounts that are remembered
	maxWaiting = 3      // attempts of one host that are delayed at the same time; more are refused
)

func newTarpit(forgive time.Duration) *tarpit {
	return &tarpit{forgive: forgive, now: time.Now, strikes: map[string]*strikes{}, good: map[string]bool{}}
}

// countLocked returns the strikes of k, less those that time has forgiven.
func (t *tarpit) countLocked(k string) float64 {
	s := t.strikes[k]
	if s == nil {
		return 0
	}
	return max(0, s.n-float64(t.now().Sub(s.at))/float64(t.forgive))
}

// strike adds one to each of keys.
func (t *tarpit) strike(keys ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range keys {
		n := t.countLocked(k) + 1
		s := t.strikes[k]
		if s == nil {
			t.makeRoomLocked()
			s = &strikes{}
			t.strikes[k] = s
		}
		s.n, s.at = n, t.now()
	}
}

// makeRoomLocked removes entries without strikes, and then any. It removes a tenth
// at a time, since going through all of them for each new entry would be slow.
func (t *tarpit) makeRoomLocked() {
	if len(t.strikes) < maxTarpit {
		return
	}
	for k, s := range t.strikes {
		if s.waiting == 0 && t.countLocked(k) == 0 {
			delete(t.strikes, k)
		}
	}
	for k, s := range t.strikes {
		if len(t.strikes) < maxTarpit*9/10 {
			return
		}
		if s.waiting == 0 {
			delete(t.strikes, k)
		}
	}
}

// delay returns the delay of the next attempt after n strikes: none below free,
// then from 1 s doubling with each strike, up to most.
func delay(n, free float64, most time.Duration) time.Duration {
	if n < free {
		return 0
	}
	d := time.Second
	for i := free; i+1 <= n && d < most; i++ {
		d *= 2
	}
	return min(d, most)
}

// The strikes that cost no delay, and the longest delays.
const (
	freeGuesses        = 3
	slowestGuess       = 16 * time.Second
	freeAccountGuesses = 20 // by all hosts together
	slowAccountGuess   = 4 * time.Second
	freeNames          = 5
	slowestName        = 10 * time.Second
)

func hostKey(host string) string { return "host\x00" + host }

// accountKey returns the key of an account's strikes. The name is hostile and is
// cut off.
func accountKey(account string) string {
	account = strings.ToLower(account)
	return "account\x00" + account[:min(len(account), 300)]
}

// enter returns how long an attempt of host at account has to wait before it is
// checked. The wait comes before the check, so that dropping the connection gains
// nothing. If ok is false the attempt is refused; otherwise leave must be called at
// its end.
func (t *tarpit) enter(host, account string) (wait time.Duration, leave func(), ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := hostKey(host)
	n := t.countLocked(k)
	wait = delay(n, freeGuesses, slowestGuess)
	known := t.good[accountKey(account)+"\x00"+host]
	// The attack: guesses from many hosts at one account. Its owner is not delayed on
	// a host that has authenticated before.
	if !known && t.countLocked(accountKey(account)) >= freeAccountGuesses {
		wait = max(wait, slowAccountGuess)
	}
	if n < freeGuesses {
		return wait, func() {}, true
	}
	s := t.strikes[k]
	if s.waiting >= maxWaiting && !known {
		return 0, nil, false
	}
	s.waiting++
	return wait, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		s.waiting--
	}, true
}

// welcome remembers that host has authenticated as account.
func (t *tarpit) welcome(host, account string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.good) >= maxTarpit {
		for k := range t.good {
			if len(t.good) < maxTarpit*9/10 {
				break
			}
			delete(t.good, k)
		}
	}
	t.good[accountKey(account)+"\x00"+host] = true
}

// nameGuess counts a recipient that does not exist and returns the delay of the
// reply.
func (t *tarpit) nameGuess(host string) time.Duration {
	t.strike(hostKey(host))
	t.mu.Lock()
	defer t.mu.Unlock()
	return delay(t.countLocked(hostKey(host)), freeNames+1, slowestName)
}

// pause delays a conversation. If a quarter of all conversations are being delayed
// it ends this one instead, so that they cannot use up the connections. It returns
// false if the conversation ends.
func (s *Server) pause(k *link, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	if s.pausing.Add(1) > int64(max(1, s.cfg.MaxConnections/4)) {
		s.pausing.Add(-1)
		k.doom()
		return false
	}
	defer s.pausing.Add(-1)
	return s.wait(k, d)
}

// wait waits for d, or until the server stops.
func (s *Server) wait(k *link, d time.Duration) bool {
	ctx, cancel := context.WithTimeout(k.ctx, d)
	defer cancel()
	select {
	case <-ctx.Done():
		return k.ctx.Err() == nil
	case <-k.closed:
	case <-s.stopping:
		k.doom()
	}
	return false
}
