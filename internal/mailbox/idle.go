package mailbox

import (
	"context"
	"runtime"
	"runtime/debug"
	"sync"
	"time"
)

// What was open stays in memory as garbage until it is written over. These are
// the times after the last mail was received, read or proposed at which a
// server that does nothing of the kind any more cleans up: soon, and again for
// what took longer to let go of.
var scrubAfter = []time.Duration{3 * time.Second, 20 * time.Second, time.Minute}

// touch notes that mail is open in this process.
func (m *PostOffice) touch() { m.touched.Store(time.Now().UnixNano()) }

// scrub collects what is garbage, and overwrites what the collector does not:
// the stacks of goroutines that have ended or shrunk, which wait for the next
// ones as they are.
func scrub() {
	runtime.GC()
	runtime.GC()
	const goroutines = 128
	var wg sync.WaitGroup
	for _, depth := range []int{1, 3, 7, 15, 31, 63} { // KiB; stacks double from 2 KiB
		var full sync.WaitGroup
		full.Add(goroutines)
		for range goroutines {
			wg.Go(func() { wash(depth, &full) })
		}
		wg.Wait()
	}
	debug.FreeOSMemory()
}

// wash overwrites depth KiB of its goroutine's stack, and ends when all others
// have, so that each has a stack of its own.
//
//go:noinline
func wash(depth int, full *sync.WaitGroup) (sum byte) {
	var frame [1024]byte
	for i := range frame {
		frame[i] = byte(depth)
	}
	if depth > 1 {
		sum = wash(depth-1, full)
	} else {
		full.Done()
		full.Wait()
	}
	return sum + frame[int(sum)%len(frame)] // it is used, so it is written
}

// RunScrub removes mail that was open from this process's memory when it is
// idle, until ctx ends. The attack: a core dump, a copy of the swap, or of the
// machine's memory, of a server in which nobody reads anything.
//
// It collects what is garbage twice, since pools of buffers let go at the second
// time, washes the stacks that nobody uses, and gives free memory back to the system, which hands out zeroes. That
// alone leaves small things beside others that live; they are overwritten as
// they are collected if the program runs with GODEBUG=clobberfree=1, as "postern
// up" sees to. Go's runtime/secret would erase no more: not what buffers hold
// that were made outside of it, nor what other goroutines made.
func (m *PostOffice) RunScrub(ctx context.Context) error {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	var seen int64
	done := len(scrubAfter)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		last := m.touched.Load()
		if last != seen {
			seen, done = last, 0
		}
		if done < len(scrubAfter) && time.Since(time.Unix(0, last)) >= scrubAfter[done] {
			scrub()
			done++
		}
	}
}
