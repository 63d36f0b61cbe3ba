package verification

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"postern/client"
	"postern/internal/secret"
)

// withSecret creates a secret with a random value, and a sandbox to which it is attached.
func (s *session) withSecret(ctx context.Context) (b *box, value string, err error) {
	value, name, err := s.newSecret(ctx)
	if err != nil {
		return nil, "", err
	}
	b, err = s.create(ctx, map[string]any{"metadata": map[string]string{secret.Metadata: name}})
	return b, value, err
}

// newSecret creates a secret with a random value.
func (s *session) newSecret(ctx context.Context) (value, name string, err error) {
	value = canary()
	name = s.marker + "-" + value[4:10]
	n := client.NewSecret{Name: name, Hosts: []string{"verify.example"}, Env: secretVariable}
	n.Value = value
	made, err := s.API.Secrets.Create(ctx, n)
	if err != nil {
		return "", "", fmt.Errorf("create a secret: %w", err)
	}
	s.undo = append(s.undo, func(ctx context.Context) error { return s.API.Secrets.Delete(ctx, made.ID) })
	return value, name, nil
}

const secretVariable = "POSTERN_VERIFY_SECRET" //nolint:gosec // the name of a variable

// secretJobs returns attempts to find a secret's value in the sandbox. The probe gets only
// the value's hash.
func secretJobs(value string, below ...string) []job {
	return []job{
		{What: "the placeholder", Kind: "environ", Variable: secretVariable, Hash: hash(value)},
		{What: "the value in the environment", Kind: "search", Where: "environ", Form: canaryForm, Hash: hash(value), Root: true},
		{What: "the value in memory", Kind: "search", Where: "memory", Form: canaryForm, Hash: hash(value), Root: true},
		{What: "the value in files", Kind: "search", Where: "files", Below: below, Form: canaryForm, Hash: hash(value), Root: true},
	}
}

func trySecret(ctx context.Context, s *session) ([]Attempt, error) {
	b, value, err := s.withSecret(ctx)
	if err != nil {
		return nil, err
	}
	made, err := b.attempts(ctx, secretJobs(value, "/home", "/root", "/tmp", "/etc", "/run", "/var", "/dev/shm")...)
	return made, errors.Join(err, b.kill(ctx))
}

// remembering keeps a word in its memory. The word is nowhere else, because the argument
// has its halves in reverse order.
const remembering = `
import os, sys, time
word = sys.argv[1][20:] + sys.argv[1][:20]
kept = (word + ' ') * 2000
if os.fork(): sys.exit()
os.setsid(); os.close(0); os.close(1); os.close(2)
while True: time.sleep(1); kept = kept[1:] + kept[:1]
`

func trySnapshot(ctx context.Context, s *session) ([]Attempt, error) {
	if s.Machine == nil {
		return nil, errElsewhere
	}
	b, value, err := s.withSecret(ctx)
	if err != nil {
		return nil, err
	}
	word := canary()[4:44]
	if _, code, err := b.run(ctx, nil, "python3", "-I", "-c", remembering, word); err != nil || code != 0 {
		return nil, errors.Join(err, fmt.Errorf("the remembering process exited with status %d", code))
	}
	if err := s.API.Sandboxes.Pause(ctx, b.id); err != nil {
		return nil, err
	}
	word = word[20:] + word[:20]
	found, err := s.Machine.filesWith(word, value, b.access)
	if err != nil {
		return nil, err
	}
	known := Attempt{"a word of the sandbox's memory", Absent, "no file contains it, so snapshots cannot be searched"}
	if files := found[word]; len(files) > 0 {
		known = Attempt{known.What, Done, ""}
	}
	return []Attempt{known, notFound("the value", found[value]), notFound("the sandbox's token", found[b.access])}, b.kill(ctx)
}

func tryLog(ctx context.Context, s *session) ([]Attempt, error) {
	if s.Machine == nil {
		return nil, errElsewhere
	}
	b, value, err := s.withSecret(ctx)
	if err != nil {
		return nil, err
	}
	// Use the value where it does not belong, since refused requests are the most likely to
	// be logged.
	if _, err := b.attempts(ctx, job{What: "x", Kind: "http", Targets: [][3]any{{gateway, 80, "GET /?" + value[:8] + " HTTP/1.1\r\nHost: verify.example\r\n\r\n"}}}); err != nil {
		return nil, err
	}
	if err := s.API.Call(ctx, http.MethodGet, "/v1/secrets/"+escape(value), nil, nil); err == nil {
		return nil, errors.New("the API finds a secret by its value")
	}
	found, err := s.Machine.filesWith(value)
	if err != nil {
		return nil, err
	}
	own := Attempt{"the log is this server's", Broken, "the verification was not announced to the server"}
	if s.ID != "" {
		own = s.Machine.inLog(own.What, s.ID)
	}
	return []Attempt{own, s.Machine.inLog("the value in the log", value), notFound("the value in the server's files", found[value])}, b.kill(ctx)
}

func tryGoneCalls(ctx context.Context, s *session) ([]Attempt, error) {
	b, err := s.create(ctx, nil)
	if err != nil {
		return nil, err
	}
	before := request(ctx, "the guest before the kill", func(ctx context.Context) (int, error) { return b.guestStatus(ctx, b.access) })
	if err := b.kill(ctx); err != nil {
		return nil, err
	}
	_, err = s.API.Sandboxes.Get(ctx, b.id)
	listed := Attempt{"the sandbox in the list", Absent, ""}
	for other, err := range s.API.Sandboxes.List(ctx) {
		if err != nil {
			return nil, err
		}
		if other.ID == b.id {
			listed = Attempt{listed.What, Done, other.State}
		}
	}
	return []Attempt{
		before,
		request(ctx, "the guest", func(ctx context.Context) (int, error) { return b.guestStatus(ctx, b.access) }),
		request(ctx, "the ports", func(ctx context.Context) (int, error) { return b.get(ctx, 8000, b.traffic) }),
		lookup("the sandbox in the API", err), listed,
	}, nil
}

func tryGoneMachine(ctx context.Context, s *session) ([]Attempt, error) {
	if s.Machine == nil {
		return nil, errElsewhere
	}
	b, err := s.create(ctx, nil)
	if err != nil {
		return nil, err
	}
	// A sandbox that has started a program has a record of it, which outlives it.
	if _, code, err := b.run(ctx, nil, "true"); err != nil || code != 0 {
		return nil, cmp.Or(err, fmt.Errorf("true exits with %d", code))
	}
	return tracesOfKill(ctx, s.Machine, b.id, b.kill, 20*time.Second)
}

// tracesOfKill looks for the traces of a sandbox before and after it is killed. Since the
// kernel removes processes, mounts and cgroups asynchronously, it looks until wait is over.
func tracesOfKill(ctx context.Context, m *Machine, id string, kill func(context.Context) error, wait time.Duration) ([]Attempt, error) {
	before := Attempt{"traces before the kill", Absent, "the sandbox is not found on this machine"}
	if found := m.traces(id); len(found) > 0 {
		before = Attempt{before.What, Done, fmt.Sprintf("%d found", len(found))}
	}
	if err := kill(ctx); err != nil {
		return nil, err
	}
	after := Attempt{"traces after the kill", Absent, ""}
	for end := time.Now().Add(wait); ; time.Sleep(200 * time.Millisecond) {
		left := m.traces(id)
		if len(left) == 0 {
			return []Attempt{before, after}, nil
		}
		if ended := ctx.Err() != nil; ended || time.Now().After(end) {
			return []Attempt{before, {after.What, Done, strings.Join(left[:min(3, len(left))], ", ")}}, nil //nolint:nilerr // what is left is the answer
		}
	}
}

func tryFailingBuild(ctx context.Context, s *session) ([]Attempt, error) {
	var t struct{ TemplateID, BuildID string }
	if err := s.API.Call(ctx, http.MethodPost, "/v3/templates", map[string]string{"name": s.marker}, &t); err != nil {
		return nil, err
	}
	at := "/templates/" + escape(t.TemplateID)
	s.undo = append(s.undo, func(ctx context.Context) error { return s.API.Call(ctx, http.MethodDelete, at, nil, nil) })
	steps := []map[string]any{{"type": "RUN", "args": []string{"true"}}, {"type": "RUN", "args": []string{"exit 3"}}, {"type": "RUN", "args": []string{"sleep 600"}}}
	if err := s.API.Call(ctx, http.MethodPost, "/v2"+at+"/builds/"+escape(t.BuildID), map[string]any{"fromTemplate": s.Template, "steps": steps}, nil); err != nil {
		return nil, err
	}
	var status struct {
		Status string
		Reason struct{ Message string }
	}
	for status.Status == "" || status.Status == "building" || status.Status == "waiting" {
		if err := s.API.Call(ctx, http.MethodGet, at+"/builds/"+escape(t.BuildID)+"/status", nil, &status); err != nil {
			return nil, err
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return []Attempt{{"the build", Silent, "it has not ended"}}, ctx.Err()
		}
	}
	build := Attempt{"the build", Done, "it ended with status " + clean(status.Status)}
	if status.Status == "error" {
		build = Attempt{build.What, Refused, ""}
	}
	reason := Attempt{"the reason", Absent, "it does not name the exit status: " + clean(status.Reason.Message)}
	if strings.Contains(status.Reason.Message, "3") {
		reason = Attempt{reason.What, Done, clean(status.Reason.Message)}
	}
	from := request(ctx, "a sandbox from the template", func(ctx context.Context) (int, error) {
		b, err := s.create(ctx, map[string]any{"templateID": s.marker})
		if err == nil {
			err = b.kill(ctx)
			return http.StatusCreated, err
		}
		return 0, err
	})
	return []Attempt{build, reason, from}, nil
}

const bombExpected = "a limit stops it; the server answers; the sandbox can be killed"

// bombWants are the outcomes that every bomb must have.
var bombWants = []Want{refused("the bomb"), control("the server answers meanwhile"), noWay("the sandbox after the kill")} //nolint:gochecknoglobals // read only, shared by rows of the table

// The bombs print at what point they were stopped, or "no limit".
const (
	forkBomb = `
import os, signal, sys, time
n = 0
try:
    while n < 20000:
        if os.fork() == 0:
            os.close(1); os.close(2)
            signal.pause(); os._exit(0)
        n += 1
except OSError as e:
    print('stopped after', n, 'processes', flush=True); os.killpg(0, 9)
print('no limit', flush=True); os.killpg(0, 9)
`
	memoryBomb = `
import sys
most, kept = int(sys.argv[1]) << 20, []
try:
    while len(kept) << 24 < most: kept.append(bytearray(b'x') * (1 << 24))
except MemoryError:
    print('stopped after', len(kept) * 16, 'MiB', flush=True); sys.exit()
print('no limit', flush=True)
`
	diskBomb = `
import os, sys
f = os.open('verify.bomb', os.O_CREAT | os.O_RDWR)
n, most = 0, int(sys.argv[2]) << 20
try:
    while n < most: os.posix_fallocate(f, n, 1 << 28); n += 1 << 28
except OSError as e:
    print('stopped after', n >> 20, 'MiB', flush=True); sys.exit()
print('no limit', flush=True)
`
)

// bomb runs a bomb in a sandbox of its own, checks that the server answers, and kills the
// sandbox.
func bomb(source string) func(context.Context, *session) ([]Attempt, error) {
	return func(ctx context.Context, s *session) ([]Attempt, error) {
		b, err := s.create(ctx, nil)
		if err != nil {
			return nil, err
		}
		end := make(chan Attempt, 1)
		go func() {
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			out, code, err := b.run(ctx, nil, "python3", "-I", "-c", source, strconv.FormatInt(2*b.memoryMB+1024, 10), strconv.FormatInt(2*b.diskMB+1024, 10))
			end <- bombOutcome(out, code, err, ctx.Err() != nil)
		}()
		answers := s.answers(ctx)
		a := <-end
		return []Attempt{a, answers, b.afterKill(ctx)}, nil
	}
}

// bombOutcome returns the attempt of a bomb, by what it printed and how it ended.
func bombOutcome(out string, code int, err error, late bool) Attempt {
	const what = "the bomb"
	switch {
	case strings.Contains(out, "no limit"):
		return Attempt{what, Done, "nothing stopped it"}
	case strings.Contains(out, "stopped after"):
		return Attempt{what, Refused, clean(strings.TrimSpace(out))}
	case late:
		return Attempt{what, Silent, "it went on for a minute"}
	case err != nil: // the guest or the sandbox ended too
		return Attempt{what, Refused, "it ended with its sandbox: " + clean(err.Error())}
	case code != 0:
		return Attempt{what, Refused, "it was killed"}
	}
	return Attempt{what, Broken, "it printed nothing"}
}

// answers asks the server three times for its sandboxes, each time for at most ten seconds.
func (s *session) answers(ctx context.Context) Attempt {
	const what = "the server answers meanwhile"
	var slowest time.Duration
	for range 3 {
		begin := time.Now()
		a := request(ctx, what, func(ctx context.Context) (int, error) {
			return http.StatusOK, s.API.Call(ctx, http.MethodGet, "/v2/sandboxes", nil, nil)
		})
		if a.Outcome != Done {
			return a
		}
		slowest = max(slowest, time.Since(begin))
		time.Sleep(300 * time.Millisecond)
	}
	return Attempt{what, Done, fmt.Sprintf("in %d ms at most", slowest.Milliseconds())}
}

// afterKill kills b and tries to use it.
func (b *box) afterKill(ctx context.Context) Attempt {
	const what = "the sandbox after the kill"
	if err := b.kill(ctx); err != nil {
		return Attempt{what, Done, "it could not be killed: " + clean(err.Error())}
	}
	return request(ctx, what, func(ctx context.Context) (int, error) { return b.guestStatus(ctx, b.access) })
}

func tryOutputFlood(ctx context.Context, s *session) ([]Attempt, error) {
	b, err := s.create(ctx, nil)
	if err != nil {
		return nil, err
	}
	// Unread output must block the writer, not pile up in the server. The flood counts in a
	// file what it could write. Random bytes cannot be compressed on the way.
	const flood = "import os, sys, time\nn, end = 0, time.time() + 8\nb = os.urandom(65536)\nos.set_blocking(1, False)\nwhile time.time() < end:\n try: n += os.write(1, b)\n except BlockingIOError: time.sleep(0.01)\n open('verify.new', 'w').write(str(n)); os.rename('verify.new', 'verify.flood')"
	ctx2, cancel := context.WithCancel(ctx)
	stuck := make(chan struct{})
	go func() {
		defer close(stuck)
		_, _, _ = b.run(ctx2, func([]byte) error { <-ctx2.Done(); return ctx2.Err() }, "python3", "-I", "-c", flood)
	}()
	answers := s.answers(ctx)
	select {
	case <-time.After(4 * time.Second):
	case <-ctx.Done():
	}
	out, _, err := b.run(ctx, nil, "python3", "-I", "-c", "print(open('verify.flood').read())")
	cancel()
	<-stuck
	if err != nil {
		return nil, err
	}
	return []Attempt{floodOutcome(out), answers, b.afterKill(ctx)}, nil
}

// maxFlood is how many bytes of output may be buffered for a client that reads nothing.
const maxFlood = 64 << 20

// floodOutcome returns the attempt of a flood, by how many bytes it could write.
func floodOutcome(out string) Attempt {
	const what = "the bomb"
	var n int64
	if _, err := fmt.Sscan(out, &n); err != nil || n <= 0 {
		return Attempt{what, Broken, "it wrote nothing"}
	}
	if n > maxFlood {
		return Attempt{what, Done, fmt.Sprintf("%d MiB were written unread", n>>20)}
	}
	return Attempt{what, Refused, fmt.Sprintf("blocked after %d KiB", n>>10)}
}
