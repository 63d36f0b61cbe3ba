package verification

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"postern/client"
	"postern/internal/api"
	"postern/internal/contract"
)

// limits returns the checks that exceed a limit, each in a sandbox of its own: where a limit
// is kept, it may end the run.
func (t *Trial) limits() []*Check {
	l := t.Probed.Limited()
	mb := func(s contract.Size) int64 { return max(int64(s)>>20, 1) }
	bound := func(id, tried, source string, most int64, args ...string) *Check {
		return &Check{
			ID: id, Tried: tried, Expected: "the limit stops it", limit: 2 * time.Minute, under: underProbed,
			Wants: []Want{refused("the bomb"), noWay("the sandbox after the kill")},
			try: func(ctx context.Context, s *session) ([]Attempt, error) {
				b, err := s.bound(ctx, t.Probed)
				if err != nil {
					return nil, err
				}
				late, cancel := context.WithTimeout(ctx, time.Minute)
				defer cancel()
				out, code, err := b.run(late, nil, append([]string{interpreter, "-I", "-c", source}, args...)...)
				return []Attempt{atMost(bombOutcome(out, code, err, late.Err() != nil), out, most), b.afterKill(ctx)}, nil
			},
		}
	}
	// The host's kernel bounds the sandbox together with its own kernel, for which the server
	// adds memory, and where it ends processes one by one (cgroup v1), those that end still
	// get what they ask for. Twice the limit and 256 MiB are beyond all of that.
	mostMB := 2*mb(l.Memory) + 256
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	out := []*Check{
		bound("contract.memory", "take more memory than the limit", growBomb, mostMB, number(mostMB+256)),
		bound("contract.processes", "start more processes than the limit", spawnBomb, int64(l.Processes), number(2*int64(l.Processes)+64)),
	}
	if len(t.Probed.Files.Write) > 0 {
		most := 2*mb(l.Disk) + 64 // it may be over the limit until the disk is measured
		out = append(out, bound("contract.disk", "write more than the limit", fillBomb, most, t.Probed.Files.Write[0], number(most), "15"))
	} else {
		out = append(out, untried("contract.disk", "write more than the limit", "the contract writes nowhere"))
	}
	return append(out, t.output(), t.time())
}

// atMost returns the attempt of a bomb that a limit stopped, or one that succeeded if that was
// beyond the contract's own limit: out has lines with what it had before each step.
func atMost(a Attempt, out string, most int64) Attempt {
	var n int64
	for line := range strings.Lines(out) {
		var at int64
		if _, err := fmt.Sscanf(line, "at %d", &at); err == nil {
			n = max(n, at)
		}
	}
	if n > most {
		return Attempt{a.What, Done, fmt.Sprintf("it had %d; the limit is %d", n, most)}
	}
	return a
}

const (
	// growBomb takes memory, 16 MiB at a time.
	growBomb = `
import sys
most, kept = int(sys.argv[1]), []
try:
    while len(kept) * 16 < most:
        kept.append(bytearray(b'x') * (1 << 24))
        print('at', len(kept) * 16, flush=True)
except MemoryError:
    print('stopped after', len(kept) * 16, 'MiB', flush=True); sys.exit()
print('no limit', flush=True)
`
	// spawnBomb starts processes, and ends them itself: it must live to say how many there were.
	spawnBomb = `
import os, signal, sys
most, pids, stopped = int(sys.argv[1]), [], False
try:
    while len(pids) < most:
        pid = os.fork()
        if pid == 0:
            os.close(1); os.close(2)
            signal.pause(); os._exit(0)
        pids.append(pid)
except OSError:
    stopped = True
print('at', len(pids), flush=True)
print(*(('stopped after', len(pids), 'processes') if stopped else ('no limit',)), flush=True)
for p in pids: os.kill(p, 9)
`
)

// fillBomb writes pages of noise until a limit stops it: a file without content may take no
// place. The disk is measured from time to time, so it then waits to be ended.
const fillBomb = `
import os, sys, time
n, noise = 0, os.urandom(1 << 20)
try:
    with open(sys.argv[1] + '/verify.bomb', 'wb', buffering=0) as f:
        while n < int(sys.argv[2]): n += f.write(noise) >> 20; os.fsync(f.fileno())
except OSError as e:
    print('stopped after', n, 'MiB', flush=True); sys.exit()
time.sleep(float(sys.argv[3]))
print('no limit', flush=True)
`

// flooding writes as many bytes as its argument says.
const flooding = `
import sys
n, line = int(sys.argv[1]), b'x' * 1023 + b'\n'
while n > 0: n -= sys.stdout.buffer.write(line)
`

// output returns the check of a run that prints too much. It is a run, and no sandbox, because
// only the output of a run is cut at the limit; that of a sandbox is counted.
func (t *Trial) output() *Check {
	return &Check{
		ID: "contract.output", Tried: "print more than the limit, in a run", Expected: "the run is ended as violated", limit: 2 * time.Minute, under: underProbed,
		Wants: []Want{control("the run"), refused("go on after the limit")},
		try: func(ctx context.Context, s *session) ([]Attempt, error) {
			for {
				r, err := s.API.Runs.Get(ctx, s.flood)
				if err != nil {
					return nil, err
				}
				if r.State == api.RunEnded || r.State == api.RunRefused {
					return floodedRun(r.State, r.Outcome, r.Reason), nil
				}
				select {
				case <-time.After(300 * time.Millisecond):
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}
		},
	}
}

// floodedRun returns the attempts of a run that printed more than its limit.
func floodedRun(state, outcome, reason string) []Attempt {
	begun, on := Attempt{"the run", Done, ""}, Attempt{"go on after the limit", Done, clean(outcome + ": " + reason)}
	if state != api.RunEnded {
		begun.Outcome, begun.Detail = Refused, clean(reason)
	}
	if outcome == api.RunViolated && strings.Contains(reason, "output") {
		on.Outcome = Refused
	}
	return []Attempt{begun, on}
}

// proposeFlood proposes the run of the check output. It starts once it was reviewed.
func (s *session) proposeFlood(ctx context.Context, t *Trial) (api.Run, error) {
	c := t.Probed
	yes, network, credentials := true, len(c.Network.Allow)+len(c.Packages)+len(c.Credentials) > 0, len(c.Credentials) > 0
	files := len(c.Files.Read)+len(c.Files.Write)+len(c.Files.Inputs) > 0
	return s.API.Runs.Propose(ctx, api.NewRun{
		ContractText: string(c.Canonical()), Task: "a trial of postern verify: to print more than limits.output",
		Commands: [][]string{{interpreter, "-I", "-c", flooding, strconv.FormatInt(int64(c.Limited().Output)+1<<20, 10)}},
		Answers: api.RunAnswers{
			Execution: &yes, Network: &network, Files: &files, Credentials: &credentials,
			Check: "this run itself: it only prints", Timeout: "it is ended", Cleanup: "the sandbox is destroyed", Export: "nothing: no file leaves",
		},
	})
}

func (t *Trial) time() *Check {
	const id, tried = "contract.time", "use the sandbox when its time is over"
	most := time.Duration(t.Given.Limited().Time)
	if most > longestTime {
		return untried(id, tried, fmt.Sprintf("the limit is %v, and no longer than %v is waited", most, longestTime))
	}
	return &Check{
		ID: id, Tried: tried, Expected: "the sandbox is gone", limit: longestTime + 2*time.Minute, under: underGiven,
		Wants: []Want{refused("the sandbox after its time")},
		try: func(ctx context.Context, s *session) ([]Attempt, error) {
			b, err := s.bound(ctx, t.Given)
			if err != nil {
				return nil, err
			}
			const grace = 30 * time.Second // for the server's own clean-up
			for end := time.Now().Add(most + grace); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(time.Second) {
				if _, err := s.API.Sandboxes.Get(ctx, b.id); errors.Is(err, client.ErrNotFound) {
					b.gone = true
					break
				}
			}
			return []Attempt{request(ctx, "the sandbox after its time", func(ctx context.Context) (int, error) { return b.guestStatus(ctx, b.access) })}, b.kill(ctx)
		},
	}
}
