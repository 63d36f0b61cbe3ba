package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
)

// saveTimeout bounds how long a save may take: 64 GiB on a slow disk. A sandbox
// that has not answered by then is ended, since its state is unknown.
const saveTimeout = 5 * time.Minute

// resumeTimeout bounds each short call to a sentry.
const resumeTimeout = 20 * time.Second

// Save implements [sandbox.Runtime]. Once the sentry has been asked to save, Save
// waits for the result even if ctx is done: a sentry cannot be asked to stop
// saving.
//
// The files are written to ".NAME.saving" beside dir, which is then renamed. A
// crash may leave that directory; the next Save to the same dir removes it.
func (r *Runtime) Save(ctx context.Context, id, dir string, o sandbox.SaveOptions) error {
	err := r.save(ctx, id, dir, o)
	if err != nil {
		return fmt.Errorf("save sandbox %s: %w", id, err)
	}
	return nil
}

func (r *Runtime) save(ctx context.Context, id, dir string, o sandbox.SaveOptions) (err error) {
	if !idPattern.MatchString(id) {
		return sandbox.ErrNotFound
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if !filepath.IsAbs(dir) || filepath.Base(dir) == "/" {
		return fmt.Errorf("%w: %q is not an absolute path of a directory", sandbox.ErrInvalid, dir)
	}
	if pids, err := r.cgroups.pids(id); err != nil || len(pids) == 0 || r.saved(id) {
		return errors.Join(err, sandbox.ErrNotFound)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		return errors.Join(err, fmt.Errorf("%s: %w", dir, fs.ErrExist))
	}
	mounts, images, err := readMounts(r.dir(id))
	if err != nil {
		return err
	}
	tmp := filepath.Join(filepath.Dir(dir), "."+filepath.Base(dir)+".saving")
	if err := os.RemoveAll(tmp); err != nil {
		return fmt.Errorf("remove what an earlier save left: %w", err)
	}
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	defer func() {
		if rmErr := os.RemoveAll(tmp); err != nil && rmErr != nil {
			err = errors.Join(err, fmt.Errorf("remove what was saved: %w", rmErr))
		}
	}()
	snap := snapshot{Format: snapshotFormat, GVisor: gvisorVersion, Kind: kindMemory, Mounts: mounts, Images: images}
	if o.FilesOnly {
		snap.Kind = kindFiles
	}
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), saveTimeout, fmt.Errorf("not saved within %v", saveTimeout))
	defer cancel()
	if o.Keep {
		cached := o.Brief && r.fitsCache(id)
		if err := r.write(ctx, id, tmp, snap, cached); err != nil {
			return err
		}
		if cached {
			r.willRepeat(tmp)
		}
		return publish(tmp, dir, !cached)
	}
	// Paused from here on: what it did after the save would be lost. gVisor could
	// end it itself, but it would do so even if saving fails.
	if err := r.control(ctx, id, callPause); err != nil {
		return err
	}
	err = r.write(ctx, id, tmp, snap, false)
	if err == nil {
		err = publish(tmp, dir, true)
	}
	if err != nil {
		return errors.Join(err, r.control(ctx, id, callResume))
	}
	if err := r.endSaved(ctx, id); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	return nil
}

// control makes a short call without argument.
func (r *Runtime) control(ctx context.Context, id, method string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, resumeTimeout, fmt.Errorf("no answer within %v", resumeTimeout))
	defer cancel()
	if _, err := r.call(ctx, id, method, nil); err != nil {
		r.unsure(ctx, id, err)
		return fmt.Errorf("%s: %w", method, err)
	}
	return nil
}

// unsure ends a sandbox in an unknown state: it neither carried out a call nor
// reported an error.
func (r *Runtime) unsure(ctx context.Context, id string, err error) {
	var said remoteError
	if errors.As(err, &said) || errors.Is(err, errNotAsked) {
		return // it continues
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if err := r.cgroups.kill(ctx, id); err != nil {
		r.log.ErrorContext(ctx, "end a sandbox that does not answer", "sandbox", id, "err", err)
	}
}

// saveArgs are the arguments of gVisor's call for saving memory and processes, as
// far as we need them.
type saveArgs struct {
	Metadata      map[string]string `json:"metadata"`
	HavePagesFile bool              `json:"have_pages_file"`
	Resume        bool
}

// uncompressed says to gVisor that a save is not compressed, which gains little and
// takes long.
func uncompressed() map[string]string { return map[string]string{"compression": "none"} }

// write fills tmp and syncs it to disk, unless it may stay in the page cache.
func (r *Runtime) write(ctx context.Context, id, tmp string, snap snapshot, cached bool) error {
	files, err := createSnapshotFiles(tmp, snap.Kind, cached)
	if err != nil {
		return err
	}
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	if snap.Kind == kindFiles {
		_, err = r.call(ctx, id, callSaveFiles, struct{}{}, files...)
	} else {
		// Resume is right even for a sandbox that is paused and will be ended:
		// without it gVisor ends the sandbox even if the save failed.
		_, err = r.call(ctx, id, callSave, saveArgs{Metadata: uncompressed(), HavePagesFile: true, Resume: true}, files...)
	}
	if err != nil {
		r.unsure(ctx, id, err)
		// gVisor may keep one of the files open for the life of the sandbox. At
		// least that one is empty.
		for _, f := range files {
			err = errors.Join(err, f.Truncate(0))
		}
		return err
	}
	b, err := json.Marshal(snap)
	if err != nil {
		return fmt.Errorf("describe snapshot: %w", err)
	}
	j, err := os.OpenFile(filepath.Join(tmp, snapshotFile), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("describe snapshot: %w", err)
	}
	files = append(files, j)
	if _, err := j.Write(b); err != nil {
		return fmt.Errorf("describe snapshot: %w", err)
	}
	if cached {
		return nil
	}
	var g errgroup.Group
	for _, f := range files {
		g.Go(f.Sync)
	}
	if err := errors.Join(g.Wait(), syncDir(tmp)); err != nil {
		return fmt.Errorf("make snapshot durable: %w", err)
	}
	return nil
}

// publish renames a complete snapshot to its name, and syncs that if it is durable.
func publish(tmp, dir string, durable bool) error {
	if err := unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, dir, unix.RENAME_NOREPLACE); err != nil {
		return fmt.Errorf("name snapshot: %w", &os.PathError{Op: "rename", Path: dir, Err: err})
	}
	if !durable {
		return nil
	}
	if err := syncDir(filepath.Dir(dir)); err != nil {
		return errors.Join(fmt.Errorf("name snapshot: %w", err), os.RemoveAll(dir))
	}
	return nil
}

// endSaved ends a sandbox whose state is on disk. It stands still and must not run
// again. The end of its processes takes a tenth of a second for each 256 MiB; Stop
// waits for it, so that nobody waits for a save who only wants its result.
func (r *Runtime) endSaved(ctx context.Context, id string) error {
	r.mu.Lock()
	i := r.all[id]
	r.mu.Unlock()
	if i != nil {
		i.will(reasonSaved)
		if err := r.cgroups.signal(id); err != nil {
			return fmt.Errorf("end what was saved: %w", err)
		}
		return nil
	}
	// Another process started it. Only its processes show that it has ended.
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if err := r.cgroups.kill(ctx, id); err != nil {
		return fmt.Errorf("end what was saved: %w", err)
	}
	return nil
}

// saved reports whether a sandbox has ended because it was saved, even if its
// processes have not all ended yet.
func (r *Runtime) saved(id string) bool {
	r.mu.Lock()
	i := r.all[id]
	r.mu.Unlock()
	if i == nil {
		return false
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.asked == reasonSaved
}
