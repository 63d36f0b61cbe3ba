package template

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"
)

// progress condenses the output of a build to a line every few seconds. It needs no
// terminal.
type progress struct {
	out  io.Writer
	name string
	log  io.Writer // gets all of the output
	done chan struct{}

	mu       sync.Mutex
	began    time.Time
	what     string
	count    int    // of total
	total    int    // steps of what; 0 means unknown
	packages int    // packages of this run of apt
	last     string // newest package
	printed  string // last line printed
	toldAt   time.Time
	tail     []string // newest lines of output
	problems []string // newest lines that look like errors
}

func newProgress(out io.Writer, name string, log io.Writer) *progress {
	return &progress{out: out, name: name, log: log, began: time.Now(), done: make(chan struct{})}
}

// start prints a line every two seconds if something has changed, and otherwise
// every five, until stop is called. Stop may be called twice.
func (p *progress) start() (stop func()) {
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(2 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-p.done:
				return
			case <-tick.C:
				p.mu.Lock()
				p.printLocked()
				p.mu.Unlock()
			}
		}
	})
	return sync.OnceFunc(func() {
		close(p.done)
		wg.Wait()
	})
}

// phase sets the current step.
func (p *progress) phase(what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stepLocked(what, 0)
	p.printLocked()
}

// printLocked prints the current state.
func (p *progress) printLocked() {
	s := p.what
	if p.total > 0 {
		s += fmt.Sprintf(": %d %%", min(p.count, p.total)*100/p.total)
		if p.last != "" {
			s += " (" + p.last + ")"
		}
	}
	if s == p.printed && time.Since(p.toldAt) < 5*time.Second {
		return
	}
	p.printed, p.toldAt = s, time.Now()
	fmt.Fprintf(p.out, "template %s: %3d s: %s\n", p.name, int(time.Since(p.began).Seconds()), s)
}

// line parses a line of output of mmdebstrap, apt, dpkg or the finishing script.
func (p *progress) line(l string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintln(p.log, l)
	p.tail = appendLast(p.tail, l, 15)
	for _, prefix := range []string{"E: ", "Err:", "dpkg: error", "mount: "} {
		if strings.HasPrefix(l, prefix) {
			p.problems = appendLast(p.problems, l, 8)
		}
	}
	switch f := strings.Fields(l); {
	case strings.HasPrefix(l, "I: extracting archives"):
		p.stepLocked("unpacking the essential packages", 0)
	case strings.HasPrefix(l, "I: installing essential packages"):
		p.stepLocked("installing the essential packages", 2*p.packages)
	case strings.HasPrefix(l, "I: installing remaining packages"):
		p.stepLocked("looking at packages", 0)
	case len(f) > 4 && strings.Contains(l, " newly installed, "):
		// "0 upgraded, 193 newly installed, 0 to remove and 0 not upgraded."
		if n, err := strconv.Atoi(f[2]); err == nil {
			p.packages = n
			p.stepLocked("downloading packages", n)
		}
	case len(f) > 4 && strings.HasPrefix(l, "Get:"):
		// "Get:12 http://... bookworm/main amd64 libc6 amd64 2.36-9 [2758 kB]"
		p.count, p.last = p.count+1, f[4]
	case len(f) > 2 && (strings.HasPrefix(l, "Unpacking ") || strings.HasPrefix(l, "Setting up ")):
		if strings.HasPrefix(p.what, "downloading") {
			p.stepLocked("installing packages", 2*p.packages) // each is unpacked and configured
		}
		p.count++
		p.last = f[1]
		if f[0] == "Setting" {
			p.last = f[2]
		}
	}
}

// stepLocked starts a new count up to total.
func (p *progress) stepLocked(what string, total int) {
	p.what, p.total, p.count, p.last = what, total, 0, ""
}

// complaint returns the errors in the output, to be appended to an error text.
func (p *progress) complaint() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.problems
	if len(l) == 0 {
		l = p.tail
	}
	if len(l) == 0 {
		return ""
	}
	return "; its output ends with:\n\t" + strings.Join(l, "\n\t")
}

func appendLast(l []string, s string, most int) []string {
	if len(l) == most {
		l = l[1:]
	}
	return append(l, s)
}

// lastLine is a writer that keeps the last line, and hands everything on.
type lastLine struct {
	out io.Writer

	mu   sync.Mutex
	line string
}

// Write implements [io.Writer].
func (l *lastLine) Write(b []byte) (int, error) {
	l.mu.Lock()
	if s := strings.TrimSpace(string(b)); s != "" {
		l.line = s[strings.LastIndexByte(s, '\n')+1:]
	}
	l.mu.Unlock()
	return l.out.Write(b)
}

// String returns the last line.
func (l *lastLine) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.line == "" {
		return "begins"
	}
	return l.line
}
