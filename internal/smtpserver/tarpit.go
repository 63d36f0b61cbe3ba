package smtpserver

import (
	"context"
	"strings"
	"sync"
	"time"
)

// A tarpit slows those down who guess: at credentials, or at who has an inbox.
// It never refuses for good and never locks an account: whoever has the right
// key gets in from anywhere, at worst some seconds later. It keeps bounded
// memory and is safe for concurrent use.
type tarpit struct {
	forgive time.Duration // after which one strike is forgotten
	now     func() time.Time

	mu      sync.Mutex // guards what follows
	strikes map[string]*strikes
	good    map[string]bool // "account\x00host" that was right once
}

type strikes struct {
	n       float64
	at      time.Time // when n was right
	waiting int       // attempts that are being slowed down now
}

const (
	maxTarpit  = 10_000 // hosts and accounts that are remembered
	maxWaiting = 3      // attempts of one host that are slowed down at the same time; more are sent away
)

func newTarpit(forgive time.Duration) *tarpit {
	return &tarpit{forgive: forgive, now: time.Now, strikes: map[string]*strikes{}, good: map[string]bool{}}
}

// countLocked returns the strikes of k, less what time has forgiven.
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

// makeRoomLocked forgets who is forgiven anyway, and then anybody: a tenth at a
// time, since looking through all of them for each new one would be slow.
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

// delay returns by how much n strikes slow the next attempt down: not those who
// mistyped, twice as long each time after that, and never longer than most.
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

// The attempts that cost nothing, and the most that one costs.
const (
	freeGuesses        = 3
	slowestGuess       = 16 * time.Second
	freeAccountGuesses = 20 // by all hosts together
	slowAccountGuess   = 4 * time.Second
	freeNames          = 5
	slowestName        = 10 * time.Second
)

func hostKey(host string) string { return "host\x00" + host }

func accountKey(account string) string {
	account = strings.ToLower(account)
	return "account\x00" + account[:min(len(account), 300)]
}

// enter says how long an attempt of host at account has to wait before it is
// looked at, so that dropping the connection gains nothing. When ok is false it
// is not looked at at all; otherwise leave must be called at its end.
func (t *tarpit) enter(host, account string) (wait time.Duration, leave func(), ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := hostKey(host)
	n := t.countLocked(k)
	wait = delay(n, freeGuesses, slowestGuess)
	known := t.good[accountKey(account)+"\x00"+host]
	// The attack: guesses from everywhere at one account. Its owner, who has
	// been there before from the same place, does not notice.
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

// welcome remembers that host has had the right key of account.
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

// nameGuess counts a recipient that is not there and returns how long its
// answer waits.
func (t *tarpit) nameGuess(host string) time.Duration {
	t.strike(hostKey(host))
	t.mu.Lock()
	defer t.mu.Unlock()
	return delay(t.countLocked(hostKey(host)), freeNames+1, slowestName)
}

// pause makes a conversation wait. It holds up nobody but its own client; when
// a quarter of all conversations wait already, it ends this one instead. It
// returns false if the conversation is at its end.
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
