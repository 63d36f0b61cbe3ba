// Package tarpit slows down clients that guess credentials or addresses of inboxes.
// It decides how long a client waits; the caller waits.
package tarpit

import (
	"strings"
	"sync"
	"time"
)

// A Pit remembers who has guessed. It never locks an account: a client with the
// right key gets in from anywhere, at worst some seconds later. Its memory is
// bounded. It is safe for concurrent use.
type Pit struct {
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
	maxRemembered = 10_000 // hosts and accounts that are remembered
	maxWaiting    = 3      // attempts of one host that are delayed at the same time; more are refused
)

// New returns a pit in which the count of guesses falls by one in each forgive.
func New(forgive time.Duration) *Pit {
	return &Pit{forgive: forgive, now: time.Now, strikes: map[string]*strikes{}, good: map[string]bool{}}
}

// countLocked returns the strikes of k, less those that time has forgiven.
func (t *Pit) countLocked(k string) float64 {
	s := t.strikes[k]
	if s == nil {
		return 0
	}
	return max(0, s.n-float64(t.now().Sub(s.at))/float64(t.forgive))
}

// strike adds one to each of keys.
func (t *Pit) strike(keys ...string) {
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

// Guess counts a wrong credential of host for account.
func (t *Pit) Guess(host, account string) { t.strike(hostKey(host), accountKey(account)) }

// makeRoomLocked removes entries without strikes, and then any. It removes a tenth
// at a time, since going through all of them for each new entry would be slow.
func (t *Pit) makeRoomLocked() {
	if len(t.strikes) < maxRemembered {
		return
	}
	for k, s := range t.strikes {
		if s.waiting == 0 && t.countLocked(k) == 0 {
			delete(t.strikes, k)
		}
	}
	for k, s := range t.strikes {
		if len(t.strikes) < maxRemembered*9/10 {
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

// Enter returns how long an attempt of host at account has to wait before it is
// checked. The wait comes before the check, so that dropping the connection gains
// nothing. If ok is false the attempt is refused; otherwise leave must be called at
// its end.
func (t *Pit) Enter(host, account string) (wait time.Duration, leave func(), ok bool) {
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

// Welcome remembers that host has authenticated as account.
func (t *Pit) Welcome(host, account string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.good) >= maxRemembered {
		for k := range t.good {
			if len(t.good) < maxRemembered*9/10 {
				break
			}
			delete(t.good, k)
		}
	}
	t.good[accountKey(account)+"\x00"+host] = true
}

// NameGuess counts a recipient that does not exist and returns the delay of the
// reply.
func (t *Pit) NameGuess(host string) time.Duration {
	t.strike(hostKey(host))
	t.mu.Lock()
	defer t.mu.Unlock()
	return delay(t.countLocked(hostKey(host)), freeNames+1, slowestName)
}
