// Package scrub overwrites what secrets leave behind in this process's memory
// once nobody uses them any more. The attack: a core dump, a copy of the swap, or
// of the machine's memory, of a server in which nobody reads anything.
//
// It reaches memory that is free: the caller must have let go of what it read.
package scrub

import (
	"context"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// delays are the times after the last use at which an idle server scrubs: soon,
// and again for what took longer to be released.
var delays = []time.Duration{3 * time.Second, 20 * time.Second, time.Minute}

// A Scrubber scrubs memory when a process that had secrets open becomes idle. The
// zero Scrubber is ready to use. It is safe for concurrent use.
type Scrubber struct {
	touched atomic.Int64 // when secrets were last open, in Unix nanoseconds
}

// Touch notes that secrets are open in this process. Call it when their use
// begins, and when it ends if it may have lasted.
func (s *Scrubber) Touch() { s.touched.Store(time.Now().UnixNano()) }

// Run scrubs memory some seconds after the last [Scrubber.Touch], until ctx ends.
//
// It collects garbage twice, since pools of buffers release theirs at the second
// time, overwrites unused stacks, and returns free memory to the system, which
// hands out zeroes. That alone leaves small objects beside others that live; they
// are overwritten as they are collected if the program runs with
// GODEBUG=clobberfree=1, which "postern up" sets. Go's runtime/secret would erase
// no more: neither buffers made outside of it nor what other goroutines made.
func (s *Scrubber) Run(ctx context.Context) error {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	var seen int64
	done := len(delays) // how many scrubs since the last touch; nothing was open yet
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		last := s.touched.Load()
		if last != seen {
			seen, done = last, 0
		}
		if done < len(delays) && time.Since(time.Unix(0, last)) >= delays[done] {
			scrub()
			done++
		}
	}
}

// scrub collects garbage, and overwrites what the collector does not: the stacks
// of goroutines that have ended or shrunk, which are kept for new goroutines as
// they are.
func scrub() {
	runtime.GC()
	runtime.GC()
	const goroutines = 128
	var wg sync.WaitGroup
	for _, depth := range []int{1, 3, 7, 15, 31, 63} { // KiB; stacks double from 2 KiB
		var full sync.WaitGroup
		full.Add(goroutines)
		for range goroutines {
			wg.Go(func() { overwriteStack(depth, &full) })
		}
		wg.Wait()
	}
	debug.FreeOSMemory()
}

// overwriteStack overwrites depth KiB of its goroutine's stack, and ends when all
// others have, so that each has a stack of its own.
//
//go:noinline
func overwriteStack(depth int, full *sync.WaitGroup) (sum byte) {
	var frame [1024]byte
	for i := range frame {
		frame[i] = byte(depth)
	}
	if depth > 1 {
		sum = overwriteStack(depth-1, full)
	} else {
		full.Done()
		full.Wait()
	}
	return sum + frame[int(sum)%len(frame)] // a use, so that the compiler keeps the writes
}

// Stack overwrites the kilobyte of its goroutine's stack that the last calls of its
// caller have used. The attack: a goroutine that begins later gets the stack of one
// that has ended, with what that one left on it, and may live as long as the server.
//
//go:noinline
func Stack() {
	var frame [1024]byte
	for i := range frame {
		frame[i] = 0xee
	}
	runtime.KeepAlive(&frame)
}
