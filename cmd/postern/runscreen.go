package main

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// longLine is how many characters of an event or a reason a terminal is shown.
const longLine = 240

// A runScreen shows how a run goes on: lines, and on a terminal below them one that says
// what is going on now, and for how long.
type runScreen struct {
	w        io.Writer
	terminal bool
	done     chan struct{}
	stopped  sync.WaitGroup

	mu    sync.Mutex // guards what follows, and writes to w
	now   string     // empty: nothing is shown
	since time.Time
	over  bool
}

// newRunScreen returns a screen on w. Its end must be called.
func newRunScreen(w io.Writer) *runScreen {
	p := &runScreen{w: w, terminal: isTerminal(w), done: make(chan struct{})}
	if p.terminal {
		p.stopped.Go(p.tick)
	}
	return p
}

func (p *runScreen) tick() {
	for {
		select {
		case <-p.done:
			return
		case <-time.After(time.Second):
			p.mu.Lock()
			p.drawLocked()
			p.mu.Unlock()
		}
	}
}

// drawLocked draws the last line anew.
func (p *runScreen) drawLocked() {
	if !p.terminal || p.now == "" || p.over {
		return
	}
	text := fmt.Sprintf("%s  %d s", p.now, int(time.Since(p.since).Seconds()))
	fmt.Fprintf(p.w, "\r\x1b[K%s", cut(text, columns(p.w)-1))
}

// clearLocked removes the last line.
func (p *runScreen) clearLocked() {
	if p.terminal && p.now != "" && !p.over {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}

// line prints a line. Its arguments must be printable.
func (p *runScreen) line(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clearLocked()
	fmt.Fprintf(p.w, format+"\n", args...)
	p.drawLocked()
}

// status says what is going on now; only a terminal shows it.
func (p *runScreen) status(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := fmt.Sprintf(format, args...)
	if now == p.now {
		return
	}
	p.clearLocked()
	p.now, p.since = now, time.Now()
	p.drawLocked()
}

// end removes the last line and stops. It may be called again.
func (p *runScreen) end() {
	p.mu.Lock()
	if !p.over {
		p.clearLocked()
		p.over = true
		close(p.done)
	}
	p.mu.Unlock()
	p.stopped.Wait()
}
