package guest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"postern/internal/guest/filesystempb"
)

const (
	maxWatchers   = 64     // watchers at the same time that clients poll
	maxWatchedDir = 8192   // directories under a recursive watch
	maxKeptEvents = 65_536 // per watcher, not polled yet
	maxFound      = 1024   // reported for a directory with content that is moved in
)

// A watch reports changes in a directory, with the rights of the requesting user.
type watch struct {
	account   account
	dir       string
	recursive bool
	entries   bool
	notify    *fsnotify.Watcher
	listing   *listing
	dirs      int
}

// watchRequest is the common part of both watch requests.
type watchRequest interface {
	GetPath() string
	GetRecursive() bool
	GetIncludeEntry() bool
	GetAllowNetworkMounts() bool
}

// newWatch starts to watch path. The caller has taken the user's rights.
func (h *filesystem) newWatch(a account, path string, req watchRequest) (*watch, error) {
	// Linux would refuse to watch an unreadable directory, but gVisor does not
	// check.
	d, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO must not block us
	if err != nil {
		return nil, err
	}
	defer d.Close()
	if fi, err := d.Stat(); err != nil {
		return nil, err
	} else if !fi.IsDir() {
		return nil, invalid("%s is not a directory", path)
	}
	if !req.GetAllowNetworkMounts() && onNetwork(path) {
		return nil, invalid("%s is on a network file system, where events are unreliable: allow_network_mounts permits it", path)
	}
	// The kernel reports the watched path, and a walk does not enter symbolic
	// links.
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return nil, err
	}
	n, err := fsnotify.NewBufferedWatcher(256)
	if err != nil {
		return nil, err
	}
	w := &watch{account: a, dir: path, recursive: req.GetRecursive(), entries: req.GetIncludeEntry(), notify: n, listing: h.s.newListing()}
	if err := w.add(path, nil); err != nil {
		n.Close()
		return nil, err
	}
	return w, nil
}

// onNetwork reports whether path is on a file system that others may change without
// this kernel's knowledge.
func onNetwork(path string) bool {
	var st unix.Statfs_t
	if unix.Statfs(path, &st) != nil {
		return false
	}
	switch uint32(st.Type) {
	case unix.NFS_SUPER_MAGIC, unix.SMB_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.FUSE_SUPER_MAGIC:
		return true
	}
	return false
}

// add watches dir and, if the watch is recursive, the directories below it, and
// calls found for what is below, unless it is nil. The caller has taken the user's
// rights: the kernel must check that the user may read it.
func (w *watch) add(dir string, found func(path string)) error {
	if !w.recursive {
		return w.notify.Add(dir)
	}
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if found != nil && path != dir {
			found(path)
		}
		if err != nil || !d.IsDir() {
			if path == dir {
				return err
			}
			return nil // unreadable or removed: it cannot be watched
		}
		if w.dirs++; w.dirs > maxWatchedDir {
			return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("more than %d directories below %s", maxWatchedDir, w.dir))
		}
		if err := w.notify.Add(path); err != nil && path == dir {
			return err
		}
		return nil
	})
}

// next converts an event of the kernel to events for the client, usually one.
func (w *watch) next(ev fsnotify.Event) []*filesystempb.FilesystemEvent {
	w.listing.room = maxMetadata
	name, err := filepath.Rel(w.dir, ev.Name)
	if err != nil || name == ".." || strings.HasPrefix(name, "../") {
		return nil
	}
	var events []*filesystempb.FilesystemEvent
	for _, k := range []struct {
		op fsnotify.Op
		to filesystempb.EventType
	}{
		{fsnotify.Create, filesystempb.EventType_EVENT_TYPE_CREATE},
		{fsnotify.Write, filesystempb.EventType_EVENT_TYPE_WRITE},
		{fsnotify.Remove, filesystempb.EventType_EVENT_TYPE_REMOVE},
		{fsnotify.Rename, filesystempb.EventType_EVENT_TYPE_RENAME},
		{fsnotify.Chmod, filesystempb.EventType_EVENT_TYPE_CHMOD},
	} {
		if ev.Op.Has(k.op) {
			events = append(events, &filesystempb.FilesystemEvent{Name: utf8(name), Type: k.to})
		}
	}
	if !w.entries && (!w.recursive || !ev.Op.Has(fsnotify.Create)) {
		return events
	}
	_ = as(w.account, func() error { // it may have been removed
		if w.recursive && ev.Op.Has(fsnotify.Create) {
			if fi, err := os.Lstat(ev.Name); err == nil && fi.IsDir() {
				// Entries created before the watch was in place, as by mkdir -p,
				// must be reported. Entries created now may be reported twice,
				// which is better than never.
				_ = w.add(ev.Name, func(path string) {
					if rel, err := filepath.Rel(w.dir, path); err == nil && len(events) < maxFound {
						events = append(events, &filesystempb.FilesystemEvent{Name: utf8(rel), Type: filesystempb.EventType_EVENT_TYPE_CREATE})
					}
				})
			}
		}
		if w.entries {
			for _, x := range events {
				if e, err := w.listing.entry(filepath.Join(w.dir, x.GetName())); err == nil {
					x.Entry = e
				}
			}
		}
		return nil
	})
	return events
}

// run passes events to f until ctx is done or f fails.
func (w *watch) run(ctx context.Context, f func(*filesystempb.FilesystemEvent) error) error {
	for {
		select {
		case <-ctx.Done():
			return contextError(ctx)
		case err := <-w.notify.Errors:
			return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("watch %s: %w", w.dir, err))
		case ev, ok := <-w.notify.Events:
			if !ok {
				return connect.NewError(connect.CodeInternal, errors.New("the watch has ended"))
			}
			for _, e := range w.next(ev) {
				if err := f(e); err != nil {
					return err
				}
			}
		}
	}
}

// WatchDir implements [filesystempb.FilesystemHandler].
func (h *filesystem) WatchDir(ctx context.Context, req *connect.Request[filesystempb.WatchDirRequest], stream *connect.ServerStream[filesystempb.WatchDirResponse]) error {
	every, err := keepalive(req.Header())
	if err != nil {
		return err
	}
	var w *watch
	err = h.act(req.Header(), req.Msg.GetPath(), func(a account, path string) (err error) {
		w, err = h.newWatch(a, path, req.Msg)
		return err
	})
	if err != nil {
		return err
	}
	defer w.notify.Close()
	if err := stream.Send(&filesystempb.WatchDirResponse{Event: &filesystempb.WatchDirResponse_Start{Start: &filesystempb.WatchDirResponse_StartEvent{}}}); err != nil {
		return err
	}
	// Keepalives and events share the stream, so one goroutine sends both.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events := make(chan *filesystempb.FilesystemEvent)
	ended := make(chan error, 1)
	go func() {
		ended <- w.run(ctx, func(e *filesystempb.FilesystemEvent) error {
			select {
			case events <- e:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		m := &filesystempb.WatchDirResponse{}
		select {
		case err := <-ended:
			return err
		case e := <-events:
			m.Event = &filesystempb.WatchDirResponse_Filesystem{Filesystem: e}
			tick.Reset(every)
		case <-tick.C:
			m.Event = &filesystempb.WatchDirResponse_Keepalive{Keepalive: &filesystempb.WatchDirResponse_KeepAlive{}}
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
}

// watchers are the watches that clients poll.
type watchers struct {
	mu   sync.Mutex
	byID map[string]*polled
}

func (t *watchers) init() { t.byID = map[string]*polled{} }

// A polled watch keeps its events until the client fetches them.
type polled struct {
	stop func()

	mu     sync.Mutex
	events []*filesystempb.FilesystemEvent
	err    error // why there are no more events
}

// CreateWatcher implements [filesystempb.FilesystemHandler].
func (h *filesystem) CreateWatcher(_ context.Context, req *connect.Request[filesystempb.CreateWatcherRequest]) (*connect.Response[filesystempb.CreateWatcherResponse], error) {
	var w *watch
	err := h.act(req.Header(), req.Msg.GetPath(), func(a account, path string) (err error) {
		w, err = h.newWatch(a, path, req.Msg)
		return err
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background()) // it outlives the request
	p := &polled{stop: func() { cancel(); w.notify.Close() }}
	id := "watch_" + rand.Text()
	t := &h.s.watch
	t.mu.Lock()
	full := len(t.byID) >= maxWatchers
	if !full {
		t.byID[id] = p
	}
	t.mu.Unlock()
	if full {
		p.stop()
		return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("there are %d watchers already: remove one", maxWatchers))
	}
	go p.collect(ctx, w) //nolint:contextcheck // it outlives the request
	return connect.NewResponse(&filesystempb.CreateWatcherResponse{WatcherId: id}), nil
}

// collect stores the events of w until ctx is done or there are too many.
func (p *polled) collect(ctx context.Context, w *watch) {
	err := w.run(ctx, func(e *filesystempb.FilesystemEvent) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.events) >= maxKeptEvents {
			return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%d events were not fetched: create the watcher again", maxKeptEvents))
		}
		p.events = append(p.events, e)
		return nil
	})
	p.mu.Lock()
	p.err = err
	p.mu.Unlock()
	p.stop()
}

// find returns a watcher. Knowing its ID is enough: clients name the user only when
// they create it.
func (h *filesystem) find(id string) (*polled, error) {
	t := &h.s.watch
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byID[id]; p != nil {
		return p, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("watcher with id %s not found", id))
}

// GetWatcherEvents implements [filesystempb.FilesystemHandler].
func (h *filesystem) GetWatcherEvents(_ context.Context, req *connect.Request[filesystempb.GetWatcherEventsRequest]) (*connect.Response[filesystempb.GetWatcherEventsResponse], error) {
	p, err := h.find(req.Msg.GetWatcherId())
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.events) == 0 && p.err != nil {
		return nil, p.err
	}
	res := &filesystempb.GetWatcherEventsResponse{Events: p.events}
	p.events = nil
	return connect.NewResponse(res), nil
}

// RemoveWatcher implements [filesystempb.FilesystemHandler].
func (h *filesystem) RemoveWatcher(_ context.Context, req *connect.Request[filesystempb.RemoveWatcherRequest]) (*connect.Response[filesystempb.RemoveWatcherResponse], error) {
	p, err := h.find(req.Msg.GetWatcherId())
	if err != nil {
		return nil, err
	}
	h.s.watch.mu.Lock()
	delete(h.s.watch.byID, req.Msg.GetWatcherId())
	h.s.watch.mu.Unlock()
	p.stop()
	return connect.NewResponse(&filesystempb.RemoveWatcherResponse{}), nil
}
