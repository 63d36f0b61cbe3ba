package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
)

var _ sandbox.Layerer = (*Runtime)(nil)

// layerTimeout bounds how long the kernel of a sandbox may take for its layer.
const layerTimeout = 5 * time.Minute

// layerArgs are the arguments of gVisor's call for the upper layer.
type layerArgs struct{ ContainerID string }

// WriteLayer implements [sandbox.Layerer]. The sentry may be compromised. So it gets the
// end of a pipe instead of a file: it cannot write more than the limit, nor change
// anything after this has returned.
func (r *Runtime) WriteLayer(ctx context.Context, id string, w io.Writer, most int64) error {
	if err := r.writeLayer(ctx, id, w, most); err != nil {
		return fmt.Errorf("read the layer of sandbox %s: %w", id, err)
	}
	return nil
}

func (r *Runtime) writeLayer(ctx context.Context, id string, w io.Writer, most int64) (err error) {
	if !idPattern.MatchString(id) {
		return sandbox.ErrNotFound
	}
	if pids, err := r.cgroups.pids(id); err != nil || len(pids) == 0 || r.saved(id) {
		return errors.Join(err, sandbox.ErrNotFound)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, layerTimeout, fmt.Errorf("no answer within %v", layerTimeout))
	defer cancel()
	if err := r.control(ctx, id, callPause); err != nil {
		return err
	}
	defer func() {
		if rerr := r.control(context.WithoutCancel(ctx), id, callResume); rerr != nil {
			err = errors.Join(err, rerr)
		}
	}()
	// Not os.Pipe, whose end for writing would not block, which the sentry does not
	// expect.
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return fmt.Errorf("make pipe: %w", err)
	}
	if err := unix.SetNonblock(p[0], true); err != nil {
		return errors.Join(fmt.Errorf("make pipe: %w", err), unix.Close(p[0]), unix.Close(p[1]))
	}
	out, in := os.NewFile(uintptr(p[0]), "layer"), os.NewFile(uintptr(p[1]), "layer")
	defer out.Close()
	asked := make(chan error, 1)
	go func() {
		_, err := r.call(ctx, id, callLayer, layerArgs{r.name(id)}, in)
		err = errors.Join(err, in.Close())
		// Everything is in the pipe by now. A sentry that keeps its end open must not
		// keep us.
		_ = out.SetReadDeadline(time.Now().Add(resumeTimeout))
		asked <- err
	}()
	n, err := io.Copy(w, io.LimitReader(out, most+1))
	if n > most {
		err = fmt.Errorf("%w: it has more than %d bytes", sandbox.ErrInvalid, most)
	}
	out.Close() // a sentry that still writes gets an error
	if cerr := <-asked; cerr != nil {
		r.unsure(ctx, id, cerr)
		err = errors.Join(err, cerr)
	}
	return err
}
