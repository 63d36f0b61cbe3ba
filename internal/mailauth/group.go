package mailauth

import (
	"fmt"
	"runtime/debug"
	"sync"
)

// A group runs functions at the same time. One that panics makes Wait panic:
// in the goroutine of the conversation that brought the message, which the SMTP
// server survives. In one of its own it would end the whole server, and whoever
// finds a way to do that with a message could do it again and again.
type group struct {
	wg sync.WaitGroup

	mu       sync.Mutex // guards panicked
	panicked string
}

// Go runs f.
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

// Wait waits for all of them.
func (g *group) Wait() {
	g.wg.Wait()
	if g.panicked != "" {
		panic(g.panicked)
	}
}
