package mailauth

import (
	"fmt"
	"runtime/debug"
	"sync"
)

// A group runs functions concurrently. If one panics, Wait panics in the goroutine of the
// SMTP session, which the server recovers from. A panic in a new goroutine would end the
// whole process. The attack: a message that triggers a panic is sent again and again.
type group struct {
	wg sync.WaitGroup

	mu       sync.Mutex // guards panicked
	panicked string
}

// Go runs f in a new goroutine.
func (g *group) Go(f func()) {
	g.wg.Go(func() {
		defer func() {
			if p := recover(); p != nil {
				g.mu.Lock()
				defer g.mu.Unlock()
				g.panicked = fmt.Sprintf("%v\n%s", p, debug.Stack())
			}
		}()
		f()
	})
}

// Wait waits until all functions have returned. It panics if one of them did.
func (g *group) Wait() {
	g.wg.Wait()
	if g.panicked != "" {
		panic(g.panicked)
	}
}
