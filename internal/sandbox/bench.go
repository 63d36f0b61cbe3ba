package sandbox

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// A BenchRequest describes the bench to open.
type BenchRequest struct {
	Base     Base          // what the bench starts from; StartCmd and ReadyCmd do not run
	CPUs     float64       // cores; 0 means the server's default
	MemoryMB int64         // mebibytes; 0 means the server's default
	DiskMB   int64         // mebibytes that all steps together may write; 0 means the server's default
	Timeout  time.Duration // lifetime, greater than 0
}

// A Command is a program to run on a bench. There is no shell unless Args names one.
type Command struct {
	Args []string          // at least one; the first is a path, or a name to be found in PATH
	User string            // empty means root
	Dir  string            // absolute; empty means the user's home
	Env  map[string]string // in addition to the template's
}

// Unpack says where to put the files of an archive. The files have their names from the
// build context.
type Unpack struct {
	Source string       // path in the archive to copy, without glob patterns; empty or "." means everything
	Dest   string       // relative to Dir; a trailing slash means a directory
	User   string       // owner of all new files and directories; empty means root
	Mode   *fs.FileMode // permissions of the copied files; nil keeps those of the archive
	Dir    string       // absolute; empty means the user's home
}

// A Bench is a sandbox in which the steps of a build run. It belongs to the project,
// but is not one of its sandboxes: it is not listed, cannot be reached from outside
// and has its own limit. It has no inbox and no secrets. It ends when Close is called, at
// its timeout, or when the server stops.
//
// Its methods are not safe for concurrent use, except for Close.
type Bench struct {
	ID string

	fleet *Fleet
	live  *liveSandbox
	info  Info
	env   map[string]string
	ctx   context.Context //nolint:containedctx // of the bench's life, which no call has
	end   context.CancelCauseFunc
	guest *http.Client

	closing sync.Once
	closed  error // of Close; read after closing
}

// ErrNoShell means that the root file system has no shell.
var ErrNoShell = errors.New("the template has no shell; run a program by its path")

// errClosed is the cause of the end of a bench that was closed.
var errClosed = errors.New("the build's sandbox has been closed")

const (
	// benchHost is the host name of benches. It is the same for all, since steps may
	// write it into files.
	benchHost = "build"
	// largestStepFile is the largest file, in mebibytes, that a step can write.
	largestStepFile = 2048
	// layerOverhead is how many bytes a layer may have beyond the size of the disk, for
	// names and the headers of the archive.
	layerOverhead = 256 << 20
	// maxLine is the length in bytes at which a line of output is cut into several.
	maxLine = 16 << 10
)

// OpenBench boots a bench for who's project. Its error wraps [ErrFull] if there are too
// many.
func (f *Fleet) OpenBench(ctx context.Context, who auth.Principal, r BenchRequest) (*Bench, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return nil, err
	}
	if who.Kind != auth.System { // a build that goes on after a restart has nobody else
		if err := mayManage(who); err != nil {
			return nil, err
		}
	}
	if _, ok := f.runtime.(Layerer); !ok {
		return nil, errors.New("this runtime cannot build templates")
	}
	if r.Timeout <= 0 {
		return nil, fmt.Errorf("%w: the timeout of a build's sandbox must be greater than 0", ErrInvalid)
	}
	select {
	case f.benches <- struct{}{}:
	default:
		return nil, fmt.Errorf("%w: %d templates are being built and at most %d may be", ErrFull, cap(f.benches), cap(f.benches))
	}
	b, err := f.newBench(ctx, who, r)
	if err != nil {
		<-f.benches
		return nil, err
	}
	starting, cancel := b.during(ctx)
	defer cancel()
	if err := f.bringUp(starting, b.live, b.info, r.Base, source{}, initBody{bench: true}); err != nil {
		b.end(fmt.Errorf("start the build's sandbox: %w", err))
		b.closing.Do(b.takeDown)
		return nil, errors.Join(context.Cause(b.ctx), b.closed) //nolint:contextcheck // the bench's life says why
	}
	context.AfterFunc(b.ctx, f.untilDeathOf(b.live, b.end)) //nolint:contextcheck // it lives as long as the bench
	return b, nil
}

// newBench records a bench and claims it, without starting it.
func (f *Fleet) newBench(ctx context.Context, who auth.Principal, r BenchRequest) (*Bench, error) {
	now := time.Now()
	s := Info{
		ID: newID(), Project: who.Project, Template: "bench", State: Creating, Egress: f.conf.BenchEgress, Started: now, Ends: now.Add(r.Timeout), bench: true,
	}
	size := f.conf.sized(Base{CPUs: r.CPUs, MemoryMB: r.MemoryMB, DiskMB: r.DiskMB})
	s.CPUs, s.MemoryMB, s.DiskMB = size.CPUs, size.MemoryMB, size.DiskMB
	egress, err := json.Marshal(s.Egress.Redacted())
	if err != nil {
		return nil, err
	}
	err = f.recordBench(ctx, who, s, audit.BenchOpen, audit.Fields{
		"ends": s.Ends.UTC().Format(time.RFC3339), "egress": string(egress), "disk_mb": strconv.FormatInt(s.DiskMB, 10), "memory_mb": strconv.FormatInt(s.MemoryMB, 10),
	})
	if err != nil {
		return nil, err
	}
	b := &Bench{ID: s.ID, fleet: f, info: s, env: r.Base.Env}
	work, l, err := f.claim(ctx, s.ID)
	if err != nil {
		return nil, err
	}
	b.live = l
	b.ctx, b.end = context.WithCancelCause(work)
	f.mu.Lock()
	l.bench = b.end
	f.mu.Unlock()
	b.guest = f.guestClient(s.ID)
	timer := time.AfterFunc(r.Timeout, func() { b.end(fmt.Errorf("its time of %v was up", r.Timeout)) })
	stopping := context.AfterFunc(f.background, func() { b.end(errors.New("the server is stopping")) }) //nolint:contextcheck // it lives as long as the bench
	// Whoever has the bench may be slow: the server waits for this when it stops.
	f.workers.Go(func() {
		<-b.ctx.Done()
		timer.Stop()
		stopping()
		b.closing.Do(b.takeDown)
	})
	return b, nil
}

// recordBench appends an audit entry about a bench. A bench has no row: it is not resumed
// after a restart, and Recover removes sandboxes without a row.
func (f *Fleet) recordBench(ctx context.Context, who auth.Principal, s Info, verb audit.Verb, fields audit.Fields) error {
	who.Project = s.Project
	return f.db.Update(ctx, func(tx *store.Tx) error { return audit.Append(ctx, tx, who, verb, s.ID, fields) })
}

// Close ends the bench. Closing it twice is not an error.
func (b *Bench) Close() error {
	b.end(errClosed)
	b.closing.Do(b.takeDown)
	return b.closed
}

// takeDown removes everything that belongs to the bench. Its context has ended.
func (b *Bench) takeDown() {
	f, ctx := b.fleet, context.WithoutCancel(b.ctx)
	err := f.takeDown(ctx, b.live)
	f.release(b.live)
	<-f.benches
	if rerr := f.recordBench(ctx, system(b.info), b.info, audit.BenchClose, audit.Fields{"reason": context.Cause(b.ctx).Error()}); rerr != nil {
		err = errors.Join(err, rerr)
	}
	b.closed = err
	if err != nil {
		f.log.ErrorContext(ctx, "end the sandbox of a build", "sandbox", b.ID, "err", err)
	}
}

// during returns a context that ends with ctx or with the bench.
func (b *Bench) during(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(b.ctx, func() { cancel(context.Cause(b.ctx)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// A userError says that the root file system lacks a user, in E2B's words.
type userError string

func (e userError) Error() string { return "unauthenticated: " + string(e) }
func (userError) Unwrap() error   { return ErrInvalid }

// ask sends a request to the guest and returns its response, which is hostile. The caller
// closes the response's body.
func (b *Bench) ask(ctx context.Context, path string, query url.Values, body io.Reader) (*http.Response, error) {
	resp, err := b.fleet.stream(ctx, b.guest, b.ID, http.MethodPost, path, query, body)
	var said *guestError
	switch {
	case err == nil:
		return resp, nil
	case !errors.As(err, &said) || said.message == "":
		return nil, b.why(ctx, err)
	case said.status == http.StatusUnauthorized:
		return nil, userError(said.message)
	case said.status == http.StatusInsufficientStorage:
		return nil, fmt.Errorf("%w: the disk is full: the steps of a build may write %d MiB together", ErrInvalid, b.info.DiskMB)
	case said.message == ErrNoShell.Error():
		return nil, ErrNoShell
	case said.status == http.StatusBadRequest, said.status == http.StatusNotFound, said.status == http.StatusForbidden:
		return nil, fmt.Errorf("%w: %s", ErrInvalid, said.message)
	}
	return nil, err
}

// why returns the cause if ctx, from during, has ended. Otherwise it returns err.
func (b *Bench) why(ctx context.Context, err error) error {
	if b.ctx.Err() != nil {
		return fmt.Errorf("the build's sandbox has ended: %w", context.Cause(b.ctx)) //nolint:contextcheck // the bench's life says why
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// do sends a request and ignores the content of the response.
func (b *Bench) do(ctx context.Context, path string, query url.Values, body io.Reader) error {
	ctx, cancel := b.during(ctx)
	defer cancel()
	resp, err := b.ask(ctx, path, query, body)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// Unpack copies the files of a tar archive, plain or compressed with gzip, as COPY does:
// a file to the path Dest, or into it if that ends with a slash or is a directory; a
// directory's content into Dest. Its error wraps [ErrInvalid] if the archive is malformed,
// leads out of Dest or has nothing at Source.
func (b *Bench) Unpack(ctx context.Context, archive io.Reader, o Unpack) error {
	q := url.Values{"source": {o.Source}, "dest": {o.Dest}, "user": {o.User}, "dir": {o.Dir}}
	if o.Mode != nil {
		bits := uint32(o.Mode.Perm())
		for _, m := range []struct {
			mode fs.FileMode
			bit  uint32
		}{{fs.ModeSetuid, 0o4000}, {fs.ModeSetgid, 0o2000}, {fs.ModeSticky, 0o1000}} {
			if *o.Mode&m.mode != 0 {
				bits |= m.bit
			}
		}
		q.Set("mode", strconv.FormatUint(uint64(bits), 8))
	}
	if err := b.do(ctx, "/bench/unpack", q, archive); err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	return nil
}

// AddUser adds a user with a home and a shell, unless it exists. With sudo, the user may
// become root without a password.
func (b *Bench) AddUser(ctx context.Context, name string, sudo bool) error {
	if err := b.do(ctx, "/bench/user", url.Values{"name": {name}, "sudo": {strconv.FormatBool(sudo)}}, nil); err != nil {
		return fmt.Errorf("add user: %w", err)
	}
	return nil
}

// MakeDir creates a directory and missing parents. The directory may exist. User owns the
// new directories; empty means root.
func (b *Bench) MakeDir(ctx context.Context, path, user string) error {
	if err := b.do(ctx, "/bench/dir", url.Values{"path": {path}, "user": {user}}, nil); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	return nil
}

// Run runs a command and returns its exit code, or -1 if a signal ended it. Then it kills
// the processes that the command left running. Output gets each line without its newline,
// long lines in pieces; stream is "stdout" or "stderr". The output is hostile.
func (b *Bench) Run(ctx context.Context, c Command, output func(stream, line string)) (code int, err error) {
	ctx, cancel := b.during(ctx)
	defer cancel()
	env := map[string]string{}
	for _, e := range []map[string]string{b.fleet.conf.BenchEnv, b.env, c.Env} {
		maps.Copy(env, e)
	}
	body, err := json.Marshal(map[string]any{"args": c.Args, "user": c.User, "dir": c.Dir, "env": env})
	if err != nil {
		return 0, err
	}
	resp, err := b.ask(ctx, "/bench/run", nil, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	code, err = readFrames(resp.Body, output)
	if err != nil {
		return 0, b.why(ctx, err)
	}
	return code, nil
}

// readFrames reads the guest's response to a command until its end. It is hostile.
func readFrames(r io.Reader, output func(stream, line string)) (code int, err error) {
	out, errs := lines{stream: "stdout", to: output}, lines{stream: "stderr", to: output}
	last, err := eachFrame(r, func(kind byte, p []byte) error {
		switch kind {
		case frameStdout:
			out.write(p)
		case frameStderr:
			errs.write(p)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	out.end()
	errs.end()
	var e struct {
		Code int `json:"code"`
	}
	if err := json.Unmarshal(last, &e); err != nil {
		return 0, errMalformed
	}
	return e.Code, nil
}

// lines cuts a stream into lines.
type lines struct {
	stream string
	to     func(stream, line string)
	rest   []byte
}

func (l *lines) write(b []byte) {
	for len(b) > 0 {
		line, after, whole := bytes.Cut(b, []byte("\n"))
		for len(l.rest)+len(line) > maxLine {
			n := maxLine - len(l.rest)
			l.rest, line = append(l.rest, line[:n]...), line[n:]
			l.send()
		}
		l.rest, b = append(l.rest, line...), after
		if whole {
			l.send()
		}
	}
}

func (l *lines) send() {
	l.to(l.stream, strings.ToValidUTF8(strings.TrimSuffix(string(l.rest), "\r"), "\uFFFD"))
	l.rest = l.rest[:0]
}

func (l *lines) end() {
	if len(l.rest) > 0 {
		l.send()
	}
}

// ownFile reports whether the guest wrote a file of a layer for this sandbox only. Each
// sandbox gets its own version of the file.
func ownFile(name string) bool {
	switch name {
	case "etc/hosts", "etc/hostname", "etc/machine-id", "tmp/.X11-unix", "usr/local/sbin/postern-guest", "etc/hosts.new", "etc/hostname.new", "etc/machine-id.new":
		return true
	}
	return strings.HasPrefix(name, "run/postern/") || strings.HasPrefix(name, "run/e2b/") || strings.HasPrefix(name, "tmp/.X11-unix/")
}

// WriteLayer writes all changes on the bench so far as a tar archive. Names begin with
// "./". A directory precedes its entries, which are otherwise in no particular order. A
// removed file is a character device 0:0. A directory that hides the one below has the
// extended attribute trusted.overlay.opaque. Files that the guest wrote for this sandbox
// are left out. The archive is hostile.
//
// WriteLayer ends background processes first, and pauses the sandbox while it writes.
func (b *Bench) WriteLayer(ctx context.Context, w *os.File) error {
	ctx, cancel := b.during(ctx)
	defer cancel()
	if err := b.do(ctx, "/bench/tidy", nil, nil); err != nil {
		return fmt.Errorf("tidy up: %w", err)
	}
	r, in := io.Pipe()
	read := make(chan error, 1)
	most := b.info.DiskMB<<20 + layerOverhead
	go func() {
		err := b.fleet.runtime.(Layerer).WriteLayer(ctx, b.ID, in, most) //nolint:forcetypeassert // checked by OpenBench
		in.CloseWithError(err)
		read <- err
	}()
	err := filterLayer(w, r, most)
	r.CloseWithError(err)
	if rerr := <-read; rerr != nil {
		return b.why(ctx, rerr)
	}
	if err != nil {
		return fmt.Errorf("%w: the layer of the step: %w", ErrInvalid, err)
	}
	return nil
}

// filterLayer copies a layer without the guest's own files. The contents may have at most
// most bytes: the archive of a large sparse file can be small.
func filterLayer(w io.Writer, r io.Reader, most int64) error {
	tr, tw := tar.NewReader(r), tar.NewWriter(w)
	gone := map[string]bool{} // removed files
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		name, target := path.Clean("/" + h.Name)[1:], path.Clean("/" + h.Linkname)[1:]
		// All removed files are one device in the kernel, so it writes links to the first.
		if h.Typeflag == tar.TypeLink && gone[target] {
			h = &tar.Header{Name: h.Name, Typeflag: tar.TypeChar, ModTime: h.ModTime}
		}
		if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 {
			gone[name] = true
		}
		if ownFile(name) {
			continue
		}
		if h.Typeflag == tar.TypeLink && ownFile(target) {
			return fmt.Errorf("%.256q is a hard link to %.256q, which belongs to the sandbox and not to the template", h.Name, h.Linkname)
		}
		if most -= h.Size; most < 0 || h.Size < 0 {
			return errors.New("its files are larger than the disk")
		}
		h.Format = tar.FormatPAX
		if err := tw.WriteHeader(h); err != nil {
			return fmt.Errorf("%.256q: %w", h.Name, err)
		}
		if _, err := io.CopyN(tw, tr, h.Size); err != nil {
			return err
		}
	}
	// The rest of the pipe, so that its writer does not get an error.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return err
	}
	return tw.Close()
}
