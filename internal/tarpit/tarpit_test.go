package tarpit

import (
	"fmt"
	"testing"
	"time"
)

func TestTarpit(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	p := New(time.Minute)
	p.now = func() time.Time { return now }
	wait := func(host, account string) time.Duration {
		d, leave, ok := p.Enter(host, account)
		if !ok {
			return -1
		}
		leave()
		return d
	}
	guess := func(host, account string, n int) {
		for range n {
			p.Guess(host, account)
		}
	}
	guess("192.0.2.66", "a", 2)
	if d := wait("192.0.2.66", "a"); d != 0 {
		t.Errorf("after two mistakes: %v", d)
	}
	guess("192.0.2.66", "a", 4)
	if d := wait("192.0.2.66", "a"); d != 8*time.Second {
		t.Errorf("after six: %v, want 8s", d)
	}
	guess("192.0.2.66", "a", 1000)
	if d := wait("192.0.2.66", "b"); d != slowestGuess {
		t.Errorf("after a thousand, at another account: %v", d)
	}
	p.Welcome("192.0.2.1", "A")
	if d := wait("192.0.2.1", "a"); d != 0 {
		t.Errorf("its owner, where they always are: %v", d)
	}
	if d := wait("192.0.2.2", "a"); d != slowAccountGuess {
		t.Errorf("its owner, somewhere else: %v, want %v and never refused", d, slowAccountGuess)
	}
	// Attempts at the same time do not wait side by side.
	var leaves []func()
	for range maxWaiting {
		_, leave, ok := p.Enter("192.0.2.66", "a")
		if !ok {
			t.Fatal("refused too early")
		}
		leaves = append(leaves, leave)
	}
	if d := wait("192.0.2.66", "a"); d != -1 {
		t.Errorf("one more at the same time: %v, want none", d)
	}
	for _, leave := range leaves {
		leave()
	}
	now = now.Add(1007 * time.Minute)
	if d := wait("192.0.2.66", "a"); d != 0 {
		t.Errorf("long after: %v", d)
	}
	for i := range 3 * maxRemembered {
		p.strike(hostKey(fmt.Sprint(i)))
		p.Welcome(fmt.Sprint(i), "a")
	}
	if len(p.strikes) > maxRemembered || len(p.good) > maxRemembered {
		t.Errorf("it remembers %d and %d, want at most %d", len(p.strikes), len(p.good), maxRemembered)
	}
}
