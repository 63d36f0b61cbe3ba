package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// snapshots returns the names in the fleet's snapshot directory.
func (f *fixture) snapshots() (names []string) {
	f.t.Helper()
	es, err := os.ReadDir(f.conf.Dir)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, e := range es {
		if !strings.HasPrefix(e.Name(), "t-") || !strings.HasSuffix(e.Name(), ".json") { // names the template of a snapshot
			names = append(names, e.Name())
		}
	}
	return names
}

func (f *fixture) remember(id, v string) {
	f.t.Helper()
	if err := f.runtime.Inside(id).Remember(v); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) remembers(id, want string) {
	f.t.Helper()
	if got, err := f.runtime.Inside(id).Remembered(); err != nil || got != want {
		f.t.Errorf("%s remembers %q, %v; want %q", id, got, err, want)
	}
}

func (f *fixture) state(id string) sandbox.State {
	f.t.Helper()
	s, err := f.fleet.Get(f.t.Context(), f.who, id)
	if err != nil {
		f.t.Fatal(err)
	}
	return s.State
}

// TestLifetimeIsLimited: neither a new timeout nor a pause extends a sandbox's lifetime
// beyond Options.Most.
func TestLifetimeIsLimited(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	ctx := t.Context()
	s := f.create(sandbox.Request{Options: sandbox.Options{Timeout: time.Minute, Most: 2 * time.Minute}})
	last := s.Started.Add(2 * time.Minute)
	for _, extend := range []bool{true, false} {
		if i, err := f.fleet.SetTimeout(ctx, f.who, s.ID, time.Hour, extend); err != nil || i.Ends.After(last) {
			t.Errorf("extended to %s, %v; want at most %s", i.Ends, err, last)
		}
	}
	if i, _, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Hour}); err != nil || i.Ends.After(last) {
		t.Errorf("connected until %s, %v", i.Ends, err)
	}
	if err := f.fleet.Pause(ctx, f.who, s.ID, false); err != nil {
		t.Fatal(err)
	}
	if i, _, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Hour}); err != nil || i.Ends.After(last) {
		t.Errorf("resumed until %s, %v", i.Ends, err)
	}
	short := f.create(sandbox.Request{Options: sandbox.Options{Timeout: time.Minute, Most: time.Millisecond}})
	if err := f.fleet.Pause(ctx, f.who, short.ID, false); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Until(short.Started.Add(time.Millisecond)))
	if i, _, err := f.fleet.Connect(ctx, f.who, short.ID, sandbox.ConnectRequest{Timeout: time.Hour}); !errors.Is(err, sandbox.ErrBound) {
		t.Errorf("resumed past its time, until %s: %v", i.Ends, err)
	}
}

func TestPauseAndResumeKeepTheSandbox(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ctx := t.Context()
		s := f.create(sandbox.Request{EnvVars: map[string]string{"A": "b"}})
		// Twenty times, each with a change: nothing of a former pause comes back.
		for i := range 20 {
			v := fmt.Sprint("round ", i)
			f.remember(s.ID, v)
			if err := f.fleet.Pause(ctx, f.who, s.ID, false); err != nil {
				t.Fatal(err)
			}
			if err := f.fleet.Pause(ctx, f.who, s.ID, false); !errors.Is(err, sandbox.ErrPaused) {
				t.Errorf("a second pause: %v", err)
			}
			if left, _ := f.runtime.List(ctx); len(left) != 0 || f.link.links() != 0 || f.state(s.ID) != sandbox.Paused {
				t.Errorf("paused, it holds %v and is %s", left, f.state(s.ID))
			}
			if _, err := f.fleet.Dial(ctx, s.ID, sandbox.GuestPort); !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("dial while paused: %v", err)
			}
			if err := f.fleet.Wake(ctx, s.ID); !errors.Is(err, sandbox.ErrPaused) {
				t.Errorf("traffic woke it: %v", err)
			}
			if _, resumed, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil || !resumed {
				t.Fatalf("resumed %v, %v", resumed, err)
			}
			f.remembers(s.ID, v)
			if in := f.link.told(s.ID); !in.Restored || in.SandboxID != s.ID || in.channel != f.fleet.ChannelKey(s.ID).Reveal() || !in.kept {
				t.Errorf("the guest was told %+v", in)
			}
			if got := f.snapshots(); len(got) != 0 {
				t.Errorf("left on disk: %v", got)
			}
		}
		if _, resumed, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil || resumed {
			t.Errorf("connecting to a running one: resumed %v, %v", resumed, err)
		}
		if _, _, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute, Resume: true}); !errors.Is(err, sandbox.ErrRunning) {
			t.Errorf("resuming a running one: %v, want ErrRunning", err)
		}
		if err := f.fleet.Pause(ctx, f.stranger, s.ID, false); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("another project paused it: %v", err)
		}

		// A paused one can be killed, and its memory is gone from the disk.
		if err := errors.Join(f.fleet.Pause(ctx, f.who, s.ID, false), f.fleet.Kill(ctx, f.who, s.ID)); err != nil {
			t.Error(err)
		}
		if got := f.snapshots(); len(got) != 0 {
			t.Errorf("left on disk: %v", got)
		}
		if _, _, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("resumed after it was killed: %v", err)
		}
	})
}

// TestParallelPausesAllSucceed: each caller wanted the sandbox paused, and it is.
func TestParallelPausesAllSucceed(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	s := f.create(sandbox.Request{})
	f.process.saves = make(chan struct{})
	errs := make(chan error)
	for range 8 {
		go func() { errs <- f.fleet.Pause(t.Context(), f.who, s.ID, false) }()
	}
	// One saves, and the others have asked and wait for their turn.
	waiting := func() bool {
		buf := make([]byte, 1<<20)
		return strings.Count(string(buf[:runtime.Stack(buf, true)]), "sandbox.(*Fleet).claim(") == 7
	}
	for i := 0; !waiting(); i++ {
		if i == 30000 {
			t.Fatal("the others do not wait")
		}
		time.Sleep(time.Millisecond)
	}
	close(f.process.saves)
	for range 8 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if n := strings.Count(strings.Join(f.verbs(s.ID), " "), "sandbox.paused"); n != 1 {
		t.Errorf("it was paused %d times", n)
	}
	if err := f.fleet.Pause(t.Context(), f.who, s.ID, false); !errors.Is(err, sandbox.ErrPaused) {
		t.Errorf("a later pause: %v, want ErrPaused", err)
	}
}

// TestTrafficDoesNotBootWhatKeptItsFiles: a request from outside must not discard what
// ran, which its owner may not expect.
func TestTrafficDoesNotBootWhatKeptItsFiles(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	s := f.create(sandbox.Request{Options: sandbox.Options{AutoPause: true, AutoResume: true}})
	if err := f.fleet.Pause(t.Context(), f.who, s.ID, true); err != nil {
		t.Fatal(err)
	}
	if err := f.fleet.Wake(t.Context(), s.ID); !errors.Is(err, sandbox.ErrPaused) {
		t.Errorf("Wake = %v, want ErrPaused", err)
	}
	if got, ok := f.fleet.Traffic(s.ID); !ok || !got.Asleep {
		t.Errorf("Traffic = %+v, %v, want it asleep", got, ok)
	}
	if _, resumed, err := f.fleet.Connect(t.Context(), f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute, Resume: true}); err != nil || !resumed {
		t.Errorf("its owner resumed it: %v, %v", resumed, err)
	}
	if got, _ := f.fleet.Traffic(s.ID); got.Asleep {
		t.Error("it runs, and is asleep")
	}
}

// TestPauseAnswersBeforeTheTeardown: a pause is over once the sandbox is on disk and
// stands still. A resume or an end right after it waits until its processes have
// gone. A server that is killed in between loses nothing and leaves nothing.
func TestPauseAnswersBeforeTheTeardown(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	ctx := t.Context()
	back, ended, kept := f.create(sandbox.Request{}), f.create(sandbox.Request{}), f.create(sandbox.Request{})
	all := []string{back.ID, ended.ID, kept.ID}
	f.process.held = make(chan struct{})
	for _, id := range all {
		f.remember(id, id)
		if err := f.fleet.Pause(ctx, f.who, id, false); err != nil {
			t.Fatal(err)
		}
		if f.state(id) != sandbox.Paused {
			t.Errorf("after the answer it is %s", f.state(id))
		}
		if _, err := f.fleet.Dial(ctx, id, sandbox.GuestPort); err == nil {
			t.Error("a saved sandbox can be dialled until its processes have gone")
		}
	}
	done := make(chan error, 2)
	go func() {
		_, _, err := f.fleet.Connect(ctx, f.who, back.ID, sandbox.ConnectRequest{Timeout: time.Minute})
		done <- err
	}()
	go func() { done <- f.fleet.Kill(ctx, f.who, ended.ID) }()
	select {
	case err := <-done:
		t.Errorf("a resume or an end did not wait for the processes: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(f.process.held)
	if err := errors.Join(<-done, <-done); err != nil {
		t.Fatal(err)
	}
	f.remembers(back.ID, back.ID)
	if err := f.fleet.Pause(ctx, f.who, kept.ID, false); !errors.Is(err, sandbox.ErrPaused) { // waits for the teardown
		t.Errorf("a second pause: %v", err)
	}
	if left, _ := f.runtime.List(ctx); !slices.Equal(left, []string{back.ID}) {
		t.Errorf("left on the machine: %v", left)
	}

	f.process.held = make(chan struct{}) // and never closed
	if err := f.fleet.Pause(ctx, f.who, back.ID, false); err != nil {
		t.Fatal(err)
	}
	f.open()
	if err := f.fleet.Recover(ctx); err != nil {
		t.Fatal(err)
	}
	if left, _ := f.runtime.List(ctx); len(left) != 0 {
		t.Errorf("the next server left %v", left)
	}
	for _, id := range []string{back.ID, kept.ID} {
		if _, _, err := f.fleet.Connect(ctx, f.who, id, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil {
			t.Fatal(err)
		}
		f.remembers(id, id)
	}
}

// TestPauseFilesOnlyBoots: memory is lost, files stay, and the booted guest gets
// its environment again.
func TestPauseFilesOnlyBoots(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	for _, reboot := range []bool{false, true} {
		s := f.create(sandbox.Request{EnvVars: map[string]string{"A": "b"}})
		f.remember(s.ID, "something")
		if err := errors.Join(f.runtime.Inside(s.ID).Write("/a", "kept"), f.fleet.Pause(t.Context(), f.who, s.ID, !reboot)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := f.fleet.Connect(t.Context(), f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute, Reboot: reboot}); err != nil {
			t.Fatal(err)
		}
		f.remembers(s.ID, "")
		if got, err := f.runtime.Inside(s.ID).Read("/a"); err != nil || got != "kept" {
			t.Errorf("the file is %q, %v", got, err)
		}
		if in := f.link.told(s.ID); in.Restored || in.EnvVars["A"] != "b" || in.EnvVars["E2B_SANDBOX_ID"] != s.ID {
			t.Errorf("the guest was told %+v", in)
		}
		if got := f.snapshots(); len(got) != 0 {
			t.Errorf("left on disk: %v", got)
		}
	}
}

// TestFailedPauseLeavesSandboxRunning: with a full disk the sandbox keeps running,
// and a sandbox that cannot be resumed stays paused.
func TestFailedPauseLeavesSandboxRunning(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	ctx := t.Context()
	s := f.create(sandbox.Request{})
	f.remember(s.ID, "kept")
	f.runtime.FailSave(syscall.ENOSPC)
	if err := f.fleet.Pause(ctx, f.who, s.ID, false); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("Pause = %v", err)
	}
	if f.state(s.ID) != sandbox.Running || len(f.fleet.Live()) != 1 || len(f.snapshots()) != 0 {
		t.Errorf("afterwards it is %s, live %v, on disk %v", f.state(s.ID), f.fleet.Live(), f.snapshots())
	}
	f.runtime.FailSave(nil)
	if err := f.fleet.Pause(ctx, f.who, s.ID, false); err != nil {
		t.Fatal(err)
	}
	f.runtime.FailStart(errors.New("boom"))
	if _, _, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err == nil || !strings.Contains(err.Error(), "boom") {
		t.Errorf("Connect = %v", err)
	}
	if f.state(s.ID) != sandbox.Paused || f.link.links() != 0 {
		t.Errorf("afterwards it is %s, with %d links", f.state(s.ID), f.link.links())
	}
	f.runtime.FailStart(nil)
	if _, _, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil {
		t.Fatal(err)
	}
	f.remembers(s.ID, "kept")
}

// TestAutoPauseAtTheEndOfLife: the sandbox is paused at the end of its life, and
// concurrent requests resume it once.
func TestAutoPauseAtTheEndOfLife(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	ctx, cancel := context.WithCancel(t.Context())
	s := f.create(sandbox.Request{Options: sandbox.Options{Timeout: 10 * time.Millisecond, AutoPause: true, AutoResume: true}})
	stays := f.create(sandbox.Request{Options: sandbox.Options{Timeout: 10 * time.Millisecond, AutoPause: true}})
	f.remember(s.ID, "kept") // before anybody looks at the time
	done := make(chan error)
	go func() { done <- f.fleet.Run(ctx) }()
	f.waitFor("both are paused", func() bool { return f.state(s.ID) == sandbox.Paused && f.state(stays.ID) == sandbox.Paused })
	if _, ok := f.fleet.Traffic(s.ID); !ok {
		t.Error("who may reach a paused one is not known")
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := f.fleet.Wake(ctx, s.ID); err != nil {
				t.Errorf("Wake = %v", err)
			}
		})
	}
	wg.Wait()
	f.remembers(s.ID, "kept")
	if n := strings.Count(strings.Join(f.verbs(s.ID), " "), "sandbox.resumed"); n != 1 {
		t.Errorf("it was resumed %d times", n)
	}
	if got, err := f.fleet.Get(ctx, f.who, s.ID); err != nil || time.Until(got.Ends) < 4*time.Minute {
		t.Errorf("after traffic it ends at %v, %v", got.Ends, err)
	}
	if err := f.fleet.Wake(ctx, stays.ID); !errors.Is(err, sandbox.ErrPaused) {
		t.Errorf("the other was woken: %v", err)
	}
	if err := f.fleet.Wake(ctx, "iaaaaaaaaaaaaaaaaaaaa"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("one that never was: %v", err)
	}
	cancel()
	<-done
}

func (f *fixture) waitFor(what string, ok func() bool) {
	f.t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			f.t.Fatalf("%s: not within a minute", what)
		}
	}
}

// TestStopAndStartOfTheServerKeepSandboxes: a stop of the server freezes running
// sandboxes, and the next start resumes them, except those whose life has ended.
func TestStopAndStartOfTheServerKeepSandboxes(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- f.fleet.Run(ctx) }()
		back, late, paused := f.create(sandbox.Request{}), f.create(sandbox.Request{Options: sandbox.Options{Timeout: time.Second}}), f.create(sandbox.Request{})
		f.remember(back.ID, "kept")
		if err := f.fleet.Pause(ctx, f.who, paused.ID, false); err != nil {
			t.Fatal(err)
		}
		cancel()
		<-done
		if left, _ := f.runtime.List(t.Context()); len(left) != 0 {
			t.Errorf("left on the machine: %v", left)
		}
		time.Sleep(time.Until(late.Ends))

		f.open()
		if err := f.fleet.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		// Traffic need not wait until its turn comes.
		if err := f.fleet.Wake(t.Context(), back.ID); err != nil {
			t.Error(err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		defer cancel()
		go func() { done <- f.fleet.Run(ctx) }()
		f.waitFor("the late one is killed", func() bool { return slices.Contains(f.verbs(late.ID), "sandbox.killed") })
		f.remembers(back.ID, "kept")
		if f.state(back.ID) != sandbox.Running || f.state(paused.ID) != sandbox.Paused {
			t.Errorf("back is %s, paused is %s", f.state(back.ID), f.state(paused.ID))
		}
		cancel()
		<-done
	})
}

// A keeper in memory behaves like one in another process.
type keeper struct {
	mu   sync.Mutex
	kept map[string]bool
}

func (k *keeper) Put(_ context.Context, id string, _ *os.File) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.kept[id] = true
	return nil
}

func (k *keeper) Drop(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.kept, id)
}

func (k *keeper) All(context.Context) (map[string]*os.File, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := map[string]*os.File{}
	for id := range k.kept {
		f, err := os.Open(os.DevNull)
		if err != nil {
			return nil, err
		}
		all[id] = f
	}
	return all, nil
}

// TestRecoverTakesBackRunningSandboxes: the sandboxes of a killed server continue
// under the next one. Those that died in between are lost, unknown ones are
// removed, and each row is right.
func TestRecoverTakesBackRunningSandboxes(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		k := &keeper{kept: map[string]bool{}}
		f := setup(t, db, func(c *sandbox.Config) { c.Keeper = k })
		ctx := t.Context()
		alive, dead, unkept, paused := f.create(sandbox.Request{}), f.create(sandbox.Request{}), f.create(sandbox.Request{}), f.create(sandbox.Request{})
		f.remember(alive.ID, "kept")
		if err := f.fleet.Pause(ctx, f.who, paused.ID, false); err != nil {
			t.Fatal(err)
		}
		k.Drop(unkept.ID)
		f.open() // another program on the same database and machine
		f.runtime.Die(dead.ID, "killed")
		k.Put(ctx, "istray00000000000000", nil)
		if err := os.Mkdir(filepath.Join(f.conf.Dir, "p-stray"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := f.fleet.Recover(ctx); err != nil {
			t.Fatal(err)
		}
		f.remembers(alive.ID, "kept")
		if got := f.fleet.Live(); !slices.Equal(got, []string{alive.ID}) {
			t.Errorf("live: %v, want %s", got, alive.ID)
		}
		for _, id := range []string{dead.ID, unkept.ID} {
			if v := f.verbs(id); !slices.Contains(v, "sandbox.lost") {
				t.Errorf("audit of %s: %v", id, v)
			}
		}
		if left, _ := f.runtime.List(ctx); !slices.Equal(left, []string{alive.ID}) {
			t.Errorf("left on the machine: %v", left)
		}
		if all, _ := k.All(ctx); len(all) != 2 || all[alive.ID] == nil || all["exec-"+alive.ID] == nil { // its link and its gate
			t.Errorf("kept: %v", all)
		}
		if _, _, err := f.fleet.Connect(ctx, f.who, paused.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil {
			t.Error(err)
		}
		if got := f.snapshots(); len(got) != 0 {
			t.Errorf("on disk: %v", got)
		}
		// It is watched and can be paused and ended like any other.
		if err := errors.Join(f.fleet.Pause(ctx, f.who, alive.ID, false), f.fleet.Kill(ctx, f.who, alive.ID)); err != nil {
			t.Error(err)
		}
	})
}

// TestRecoverAsksGuestsConcurrently: stopped guests must not delay the next server
// by the sum of their time-outs. Here none answers before all have been asked.
func TestRecoverAsksGuestsConcurrently(t *testing.T) {
	k := &keeper{kept: map[string]bool{}}
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) { c.Keeper = k })
	const n = 6
	for range n {
		f.create(sandbox.Request{})
	}
	var asked sync.WaitGroup
	asked.Add(n)
	f.link.ask = func() {
		asked.Done()
		asked.Wait()
	}
	f.open()
	if err := f.fleet.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := f.fleet.Live(); len(got) != n {
		t.Errorf("of %d that answer together %d were asked at the same time", n, len(got))
	}
}

// TestRecoverEndsSandboxWithStoppedGuest: sandboxes whose guests do not answer are
// lost.
func TestRecoverEndsSandboxWithStoppedGuest(t *testing.T) {
	k := &keeper{kept: map[string]bool{}}
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) { c.Keeper = k })
	var all []string
	for range 3 {
		all = append(all, f.create(sandbox.Request{}).ID)
	}
	f.link.stopped, f.conf.StartTimeout = true, 100*time.Millisecond
	f.open()
	if err := f.fleet.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, id := range all {
		if v := f.verbs(id); !slices.Contains(v, "sandbox.lost") {
			t.Errorf("audit of %s: %v", id, v)
		}
	}
	if left, _ := f.runtime.List(t.Context()); len(left) != 0 || len(k.kept) != 0 {
		t.Errorf("left on the machine: %v; kept: %v", left, k.kept)
	}
}

func TestForkCopiesARunningSandbox(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *sandbox.Config) { c.MaxSandboxes = 4 })
		ctx := t.Context()
		s := f.create(sandbox.Request{Metadata: map[string]string{"k": "v"}, Inbox: "ibx_1"})
		f.remember(s.ID, "shared")
		// Five are asked for and three fit: the others fail alone.
		all, err := f.fleet.Fork(ctx, f.who, s.ID, time.Minute, 5)
		if err != nil || len(all) != 5 {
			t.Fatalf("%d forks, %v", len(all), err)
		}
		made := 0
		for _, c := range all {
			if c.Err != nil {
				if !errors.Is(c.Err, sandbox.ErrFull) {
					t.Error(c.Err)
				}
				continue
			}
			made++
			f.remembers(c.ID, "shared")
			in := f.link.told(c.ID)
			if in.channel != f.fleet.ChannelKey(s.ID).Reveal() || in.ChannelSHA256 == "" || !in.Restored || c.Metadata["k"] != "v" || c.Inbox != "ibx_1" || f.link.owner(c.ID) != c.Principal() {
				t.Errorf("fork %+v was told %+v", c.Info, in)
			}
			f.remember(c.ID, "its own")
		}
		f.remembers(s.ID, "shared")
		if got := f.snapshots(); made != 3 || len(got) != 0 {
			t.Errorf("%d were made; on disk %v", made, got)
		}
		for _, count := range []int{0, 101} {
			if _, err := f.fleet.Fork(ctx, f.who, s.ID, time.Minute, count); !errors.Is(err, sandbox.ErrInvalid) {
				t.Errorf("%d forks: %v", count, err)
			}
		}
		if _, err := f.fleet.Fork(ctx, f.stranger, s.ID, time.Minute, 1); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("another project's fork: %v", err)
		}
	})
}

func TestSnapshotsBelongToTheirProject(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ctx := t.Context()
		s := f.create(sandbox.Request{})
		if _, err := f.fleet.Snapshot(ctx, f.who, s.ID, ""); !errors.Is(err, sandbox.ErrSnapshotsOff) {
			t.Errorf("without the operator's leave: %v", err)
		}
		f.conf.Snapshots = true
		f.open()
		s = f.create(sandbox.Request{})
		f.remember(s.ID, "one")
		one, err := f.fleet.Snapshot(ctx, f.who, s.ID, "")
		if err != nil {
			t.Fatal(err)
		}
		f.remember(s.ID, "two")
		two, err := f.fleet.Snapshot(ctx, f.who, s.ID, "n:default")
		if err != nil {
			t.Fatal(err)
		}
		f.remembers(s.ID, "two") // it goes on
		for name, want := range map[string]string{one.ID: "one", one.ID + ":default": "one", "n": "two", "team/n:default": "two"} {
			n, err := f.fleet.FindSnapshot(ctx, f.who, name)
			if err != nil {
				t.Fatal(err)
			}
			c := f.create(sandbox.Request{Template: n.Template, Snapshot: n.ID, EnvVars: map[string]string{"A": "new"}})
			f.remembers(c.ID, want)
			if in := f.link.told(c.ID); in.EnvVars["A"] != "new" || !in.Restored {
				t.Errorf("the guest was told %+v", in)
			}
		}
		if _, err := f.fleet.FindSnapshot(ctx, f.stranger, one.ID); !errors.Is(err, sandbox.ErrNoSnapshot) {
			t.Errorf("another project found it: %v", err)
		}
		if _, err := f.fleet.Create(ctx, f.stranger, sandbox.Request{Snapshot: one.ID, Options: sandbox.Options{Timeout: time.Minute}}); !errors.Is(err, sandbox.ErrNoSnapshot) {
			t.Errorf("another project started from it: %v", err)
		}
		if err := f.fleet.DeleteSnapshot(ctx, f.stranger, one.ID); !errors.Is(err, sandbox.ErrNoSnapshot) {
			t.Errorf("another project deleted it: %v", err)
		}
		// The same name again replaces; a restart keeps.
		again, err := f.fleet.Snapshot(ctx, f.who, s.ID, "n:default")
		if err != nil {
			t.Fatal(err)
		}
		f.open()
		if err := f.fleet.Recover(ctx); err != nil {
			t.Fatal(err)
		}
		if all, err := f.fleet.Snapshots(ctx, f.who); err != nil || len(all) != 2 || all[0].ID != again.ID || all[0].ID == two.ID {
			t.Errorf("snapshots: %+v, %v", all, err)
		}
		if err := errors.Join(f.fleet.DeleteSnapshot(ctx, f.who, one.ID), f.fleet.DeleteSnapshot(ctx, f.who, again.ID)); err != nil {
			t.Error(err)
		}
		if got := f.snapshots(); len(got) != 0 {
			t.Errorf("on disk: %v", got)
		}
	})
}

// TestSnapshotReplacedAndDeleted: one program replaces a snapshot while another
// deletes it, and neither gets an error about database locks.
func TestSnapshotReplacedAndDeleted(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *sandbox.Config) { c.Snapshots = true })
		s := f.create(sandbox.Request{})
		for range 40 {
			n, err := f.fleet.Snapshot(t.Context(), f.who, s.ID, "n:default")
			if err != nil {
				t.Fatal(err)
			}
			var deleting sync.WaitGroup
			deleting.Go(func() {
				if err := f.fleet.DeleteSnapshot(t.Context(), f.who, n.ID); err != nil && !errors.Is(err, sandbox.ErrNoSnapshot) {
					t.Errorf("delete: %v", err)
				}
			})
			if _, err := f.fleet.Snapshot(t.Context(), f.who, s.ID, "n:default"); err != nil {
				t.Errorf("replace: %v", err)
			}
			deleting.Wait()
		}
	})
}

// TestSnapshotStaysWhileItsRowMayBeThere: after a commit whose result is unknown the
// files are kept; the next start removes them if there is no row.
func TestSnapshotStaysWhileItsRowMayBeThere(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *sandbox.Config) { c.Snapshots = true })
		s := f.create(sandbox.Request{})
		again := storetest.FailCommits(t, db, "snapshot")
		if _, err := f.fleet.Snapshot(t.Context(), f.who, s.ID, ""); !errors.Is(err, store.ErrCommit) {
			t.Fatalf("snapshot: %v, want an ErrCommit", err)
		}
		again()
		if got := f.snapshots(); len(got) != 1 {
			t.Errorf("on disk: %v, want the snapshot", got)
		}
		f.open()
		if err := f.fleet.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := f.snapshots(); len(got) != 0 {
			t.Errorf("after a start, on disk: %v", got)
		}
	})
}

// TestPoolFollowsDemandAndLimits: pooled sandboxes have no owner, are handed over
// completely, and never use more memory than the limit.
func TestPoolFollowsDemandAndLimits(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Prepare, c.Pool = false, []string{"base"}, sandbox.PoolConfig{Min: 2, Max: 4, MemoryMB: 3}
	})
	stop := f.run()
	waiting := func() int {
		n, memory := f.fleet.Pooled()
		if memory > 3<<20 {
			t.Errorf("%d wait with %d bytes", n, memory)
		}
		return n
	}
	asked := 0
	ask := func() sandbox.Info {
		asked++
		return f.create(sandbox.Request{Template: "base", EnvVars: map[string]string{"A": "b"}, Inbox: "ibx_1"})
	}
	// asking waits for what demand brings, which is forgotten after ten seconds.
	asking := func(what string, ok func() bool) {
		t.Helper()
		last := time.Now()
		f.waitFor(what, func() bool {
			if time.Since(last) > 8*time.Second {
				for range 4 {
					ask()
				}
				last = time.Now()
			}
			return ok()
		})
	}
	f.waitFor("two wait", func() bool { return waiting() == 2 })
	ready, _ := f.runtime.List(t.Context())
	for _, id := range ready {
		if who := f.link.owner(id); who.Project != "" || who.Inbox != "" {
			t.Errorf("%s, which waits, belongs to %+v", id, who)
		}
		if err := f.fleet.Kill(t.Context(), f.who, id); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("one that waits could be killed: %v", err)
		}
	}
	s := ask()
	if in := f.link.told(s.ID); !slices.Contains(ready, s.ID) || in.EnvVars["A"] != "b" || f.link.owner(s.ID) != s.Principal() {
		t.Errorf("%s was handed over as %+v to %+v", s.ID, in, f.link.owner(s.ID))
	}
	// More are asked for, more wait, as far as their memory goes.
	for range 4 {
		ask()
	}
	asking("three wait", func() bool { return waiting() == 3 })
	// One that died is not handed over.
	asking("the others are known", func() bool { ready, _ = f.runtime.List(t.Context()); return len(ready) == asked+3 })
	live := f.fleet.Live()
	for _, id := range ready {
		if !slices.Contains(live, id) {
			f.runtime.Die(id, "killed")
		}
	}
	asking("the dead are replaced", func() bool {
		now, _ := f.runtime.List(t.Context())
		return waiting() == 3 && !slices.ContainsFunc(now, func(id string) bool { return slices.Contains(ready, id) && !slices.Contains(live, id) })
	})
	ask()
	stop()
	if left, _ := f.runtime.List(t.Context()); len(left) != 0 || waiting() != 0 {
		t.Errorf("left: %v", left)
	}
	for _, n := range f.snapshots() {
		if !strings.HasPrefix(n, "t-") && !strings.HasPrefix(n, "p-") {
			t.Errorf("on disk: %s", n)
		}
	}
}

// TestBrokenTemplateSnapshotIsMadeAgain: a broken snapshot only costs time, and is
// replaced.
func TestBrokenTemplateSnapshotIsMadeAgain(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"removed": os.RemoveAll,
		"broken": func(dir string) error {
			files, err := os.ReadDir(dir)
			for _, file := range files {
				err = errors.Join(err, os.WriteFile(filepath.Join(dir, file.Name()), []byte("broken"), 0o600))
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) { c.Cold, c.Prepare, c.Inboxes = false, []string{"base"}, nil })
			stop := f.run()
			f.waitFor("the snapshot is there", func() bool { return len(f.snapshots()) == 1 })
			f.waitFor("it is used", func() bool {
				s := f.create(sandbox.Request{Template: "base"})
				restored := f.link.told(s.ID).Restored
				if err := f.fleet.Kill(t.Context(), f.who, s.ID); err != nil { // there may be no end of them
					t.Fatal(err)
				}
				return restored
			})
			dir := filepath.Join(f.conf.Dir, f.snapshots()[0])
			if err := damage(dir); err != nil {
				t.Fatal(err)
			}
			s := f.create(sandbox.Request{Template: "base"})
			if f.link.told(s.ID).Restored {
				t.Error("it was restored from nothing")
			}
			if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the broken snapshot is still there: %v", err)
			}
			stop()
		})
	}
}

// TestKillInterruptsAResume: an end does not wait for work in progress.
func TestKillInterruptsAResume(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) { c.StartTimeout = time.Hour })
	s := f.create(sandbox.Request{})
	if err := f.fleet.Pause(t.Context(), f.who, s.ID, false); err != nil {
		t.Fatal(err)
	}
	f.link.deaf = true // a resume waits for the guest, up to an hour
	resumed := make(chan error)
	go func() {
		_, _, err := f.fleet.Connect(t.Context(), f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute})
		resumed <- err
	}()
	f.waitFor("it is resuming", func() bool { return f.state(s.ID) == sandbox.Resuming })
	killed := make(chan error, 1)
	go func() { killed <- f.fleet.Kill(t.Context(), f.who, s.ID) }()
	select {
	case err := <-killed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the kill waits for the resume")
	}
	if err := <-resumed; err == nil {
		t.Error("it was resumed and killed")
	}
	if v := f.verbs(s.ID); v[len(v)-1] != "sandbox.killed" {
		t.Errorf("audit: %v", v)
	}
}
