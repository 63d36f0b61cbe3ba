package sandboxtest

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/sandbox"
)

// A Fake is a [sandbox.Runtime] in memory that runs nothing. The zero value is
// ready to use. Two fleets with one Fake are two processes of the program on one
// machine.
type Fake struct {
	mu       sync.Mutex
	all      map[string]*fakeSandbox
	fail     error
	failSave error
	usage    map[string]sandbox.Usage
	examined []string
	prepared []sandbox.Spec // of those that wait
	refused  string         // root file system for which none can be prepared
	claimed  int            // starts that used one
}

type fakeSandbox struct {
	spec   sandbox.Spec
	state  fakeState
	ended  chan struct{}
	reason string // final once ended is closed

	observed sandbox.Observed
}

// A fakeState is the content of a Fake's snapshot.
type fakeState struct {
	FilesOnly bool              `json:"filesOnly"`
	Mounts    []sandbox.Mount   `json:"mounts"` // without their sources
	Memory    string            `json:"memory"`
	Files     map[string]string `json:"files"`
}

var (
	_ sandbox.Runtime  = (*Fake)(nil)
	_ sandbox.Examiner = (*Fake)(nil)
	_ sandbox.Preparer = (*Fake)(nil)
	_ sandbox.Layerer  = (*Fake)(nil)
)

// fakeFile is the only file of a Fake's snapshot.
const fakeFile = "fake.json"

// FailStart makes every later Start fail with err; nil ends that.
func (f *Fake) FailStart(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = err
}

// FailSave makes every later Save fail with err; nil ends that.
func (f *Fake) FailSave(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failSave = err
}

// SetUsage sets the result of Usage for a sandbox.
func (f *Fake) SetUsage(id string, u sandbox.Usage) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.usage == nil {
		f.usage = map[string]sandbox.Usage{}
	}
	f.usage[id] = u
}

// Die ends a sandbox unasked. It stays in List until it is stopped.
func (f *Fake) Die(id, reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.all[id]; s != nil {
		s.endLocked(reason)
	}
}

// Spec returns what a sandbox was started with.
func (f *Fake) Spec(id string) (sandbox.Spec, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.all[id]
	if s == nil {
		return sandbox.Spec{}, false
	}
	return s.spec, true
}

func (s *fakeSandbox) endLocked(reason string) {
	select {
	case <-s.ended:
	default:
		s.reason = reason
		close(s.ended)
	}
}

func (s *fakeSandbox) hasEnded() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// Start implements [sandbox.Runtime].
func (f *Fake) Start(ctx context.Context, s sandbox.Spec) error {
	if s.Link != nil {
		defer s.Link.Close()
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("start sandbox: %w", err)
	}
	if _, err := os.Stat(s.Rootfs); err != nil {
		return fmt.Errorf("find root file system: %w", err)
	}
	state := fakeState{Files: map[string]string{}}
	if s.From != "" {
		b, err := os.ReadFile(filepath.Join(s.From, fakeFile))
		if err == nil {
			err = json.Unmarshal(b, &state)
		}
		if err != nil {
			return fmt.Errorf("open snapshot: %w", err)
		}
		if !state.FilesOnly && !slices.Equal(state.Mounts, withoutSources(s.Mounts)) {
			return fmt.Errorf("%w: other mounts than the snapshot's", sandbox.ErrInvalid)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail != nil {
		return f.fail
	}
	if f.all[s.ID] != nil {
		return fmt.Errorf("start sandbox %s: it is there already", s.ID)
	}
	if f.all == nil {
		f.all = map[string]*fakeSandbox{}
	}
	f.all[s.ID] = &fakeSandbox{spec: s, state: state, ended: make(chan struct{})}
	if i := slices.IndexFunc(f.prepared, func(p sandbox.Spec) bool { return fits(p, s) }); i >= 0 && s.From != "" && !state.FilesOnly && len(s.Mounts) == 0 && !s.Unhurried {
		f.prepared, f.claimed = slices.Delete(f.prepared, i, i+1), f.claimed+1
	}
	return nil
}

// Prepare implements [sandbox.Preparer].
func (f *Fake) Prepare(_ context.Context, specs []sandbox.Spec) (more bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	lacking := slices.Clone(specs)
	var keep []sandbox.Spec
	for _, p := range f.prepared {
		if i := slices.IndexFunc(lacking, func(s sandbox.Spec) bool { return fits(p, s) }); i >= 0 {
			keep, lacking = append(keep, p), slices.Delete(lacking, i, i+1)
		}
	}
	if f.prepared = keep; len(lacking) > 0 {
		if lacking[0].Rootfs == f.refused {
			return false, errors.New("no such template")
		}
		f.prepared = append(f.prepared, lacking[0])
	}
	return len(lacking) > 1, nil
}

// RefusePrepare fails to prepare sandboxes with a root file system, as if it had been
// removed.
func (f *Fake) RefusePrepare(rootfs string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refused = rootfs
	f.prepared = slices.DeleteFunc(f.prepared, func(p sandbox.Spec) bool { return p.Rootfs == rootfs })
}

// fits reports whether a start of s can use what was prepared for p.
func fits(p, s sandbox.Spec) bool {
	return p.Rootfs == s.Rootfs && p.Image == s.Image && p.CPUs == s.CPUs && p.MemoryMB == s.MemoryMB && p.DiskMB == s.DiskMB && p.Processes == s.Processes
}

// Prepared returns the sandboxes that wait, and how many starts have used one.
func (f *Fake) Prepared() (waiting []sandbox.Spec, claimed int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.prepared), f.claimed
}

func withoutSources(ms []sandbox.Mount) []sandbox.Mount {
	out := slices.Clone(ms)
	for i := range out {
		out[i].Source = ""
	}
	slices.SortFunc(out, func(a, b sandbox.Mount) int { return strings.Compare(a.Destination, b.Destination) })
	return out
}

// Stop implements [sandbox.Runtime].
func (f *Fake) Stop(_ context.Context, id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.all[id]; s != nil {
		s.endLocked("stopped")
		delete(f.all, id)
	}
	return nil
}

// Save implements [sandbox.Runtime].
func (f *Fake) Save(ctx context.Context, id, dir string, o sandbox.SaveOptions) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("save sandbox %s: %w", id, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.all[id]
	if s == nil || s.hasEnded() {
		return fmt.Errorf("save sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	if f.failSave != nil {
		return f.failSave
	}
	state := s.state // marshalled before the lock is given up
	state.FilesOnly, state.Mounts = o.FilesOnly, withoutSources(s.spec.Mounts)
	if o.FilesOnly {
		state.Memory = ""
	}
	b, err := json.Marshal(state)
	if err != nil {
		return fmt.Errorf("save sandbox %s: %w", id, err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("save sandbox %s: %w", id, err)
	}
	if err := os.WriteFile(filepath.Join(dir, fakeFile), b, 0o600); err != nil {
		return errors.Join(fmt.Errorf("save sandbox %s: %w", id, err), os.RemoveAll(dir))
	}
	if !o.Keep {
		s.endLocked("saved")
	}
	return nil
}

// WriteLayer implements [sandbox.Layerer]: with what the test wrote.
func (f *Fake) WriteLayer(_ context.Context, id string, w io.Writer, most int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.all[id]
	if s == nil || s.hasEnded() {
		return fmt.Errorf("read the layer of sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	out := tar.NewWriter(w)
	for _, name := range slices.Sorted(maps.Keys(s.state.Files)) {
		content := s.state.Files[name]
		if most -= int64(len(content)); most < 0 {
			return sandbox.ErrInvalid
		}
		if err := out.WriteHeader(&tar.Header{Name: "." + name, Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg}); err != nil {
			return fmt.Errorf("write layer: %w", err)
		}
		if _, err := io.WriteString(out, content); err != nil {
			return fmt.Errorf("write layer: %w", err)
		}
	}
	return out.Close()
}

// Usage implements [sandbox.Runtime]. It returns what SetUsage has set, or the
// usage of an idle sandbox.
func (f *Fake) Usage(_ context.Context, id string) (sandbox.Usage, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.all[id]
	if s == nil || s.hasEnded() {
		return sandbox.Usage{}, fmt.Errorf("measure sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	if u, ok := f.usage[id]; ok {
		return u, nil
	}
	u := sandbox.Usage{CPU: time.Millisecond, Memory: 1 << 20}
	for _, c := range s.state.Files {
		u.Disk += int64(len(c))
	}
	return u, nil
}

// Wait implements [sandbox.Runtime].
func (f *Fake) Wait(ctx context.Context, id string) (string, error) {
	f.mu.Lock()
	s := f.all[id]
	f.mu.Unlock()
	if s == nil {
		return "", fmt.Errorf("wait for sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	select {
	case <-s.ended:
		return s.reason, nil
	case <-ctx.Done():
		return "", fmt.Errorf("wait for sandbox %s: %w", id, ctx.Err())
	}
}

// List implements [sandbox.Runtime].
func (f *Fake) List(context.Context) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Sorted(maps.Keys(f.all)), nil
}

// Examine implements [sandbox.Examiner].
func (f *Fake) Examine(_ context.Context, id string) (summary, file string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.examined = append(f.examined, id)
	return "nothing", ""
}

// Examined returns the sandboxes that were examined.
func (f *Fake) Examined() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.examined)
}

// Inside returns the inside of a sandbox of a Fake.
func (f *Fake) Inside(id string) Inside { return fakeInside{f, id} }

type fakeInside struct {
	f  *Fake
	id string
}

func (i fakeInside) with(do func(s *fakeSandbox) error) error {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	s := i.f.all[i.id]
	if s == nil || s.hasEnded() {
		return sandbox.ErrNotFound
	}
	return do(s)
}

// mounted returns the mount that contains a path, and the path on the host.
func (s *fakeSandbox) mounted(path string) (sandbox.Mount, string, bool) {
	for _, m := range s.spec.Mounts {
		if rest, ok := strings.CutPrefix(path, m.Destination+"/"); ok {
			return m, filepath.Join(m.Source, rest), true
		}
	}
	return sandbox.Mount{}, "", false
}

func (i fakeInside) Remember(v string) error {
	return i.with(func(s *fakeSandbox) error { s.state.Memory = v; return nil })
}

func (i fakeInside) Remembered() (v string, err error) {
	err = i.with(func(s *fakeSandbox) error { v = s.state.Memory; return nil })
	return v, err
}

func (i fakeInside) Write(path, content string) error {
	return i.with(func(s *fakeSandbox) error {
		if m, host, ok := s.mounted(path); ok {
			if m.ReadOnly {
				return fs.ErrPermission
			}
			return os.WriteFile(host, []byte(content), 0o600)
		}
		s.state.Files[path] = content
		return nil
	})
}

func (i fakeInside) Read(path string) (v string, err error) {
	err = i.with(func(s *fakeSandbox) error {
		if _, host, ok := s.mounted(path); ok {
			b, err := os.ReadFile(host)
			v = string(b)
			return err
		}
		var ok bool
		if v, ok = s.state.Files[path]; !ok {
			return fs.ErrNotExist
		}
		return nil
	})
	return v, err
}

func (i fakeInside) Remove(path string) error {
	return i.with(func(s *fakeSandbox) error { delete(s.state.Files, path); return nil })
}

func (i fakeInside) Hostname() (v string, err error) {
	err = i.with(func(s *fakeSandbox) error { v = s.spec.Hostname; return nil })
	return v, err
}
