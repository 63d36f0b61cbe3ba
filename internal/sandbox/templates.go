package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// templates are the snapshots that new sandboxes start from, one for each
// template. At its first use a template has none: sandboxes boot, and one of
// these boots, in the background, is of a sandbox without owner that is saved as
// the template's snapshot. On disk it is named "t-KEY-SANDBOX", so that the next
// server finds it.
type templates struct {
	fleet *Fleet

	mu  sync.Mutex
	all map[string]*templateSnapshot // by key of the template
}

// A templateSnapshot is the snapshot of one version of a template.
type templateSnapshot struct {
	template string
	base     Base
	from     source    // zero until it has been made; guarded by templates.mu
	failed   time.Time // of the last failed attempt, or zero; guarded by templates.mu
}

// drop removes a snapshot that could not be restored, so that another one is
// made. Without that, find would return the same one again.
func (t *templates) drop(ctx context.Context, key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.all[key]
	if s == nil || s.from.dir == "" {
		return
	}
	if err := t.fleet.discard(filepath.Base(s.from.dir)); err != nil {
		t.fleet.log.WarnContext(ctx, "remove a template's broken snapshot", "template", s.template, "err", err)
	}
	s.from, s.failed = source{}, time.Now()
}

// retryAfter is the pause between two attempts to make a template's snapshot.
const retryAfter = time.Minute

// source returns the template's snapshot, or a boot while there is none.
func (t *templates) source(template string, base Base) source {
	f := t.fleet
	if f.conf.Cold {
		return source{}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.all[base.Key]; s != nil {
		if s.from.dir == "" && time.Since(s.failed) > retryAfter && !s.failed.IsZero() {
			s.failed = time.Time{}
			f.workers.Go(func() { t.make(f.background, s) })
		}
		return s.from
	}
	s := &templateSnapshot{template: template, base: base}
	t.all[base.Key] = s
	f.workers.Go(func() { t.make(f.background, s) })
	return source{}
}

// prepared returns the snapshot of a template, if it has been made.
func (t *templates) prepared(template string) *templateSnapshot {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.all {
		if s.template == template && s.from.dir != "" {
			c := *s
			return &c
		}
	}
	return nil
}

// prefix returns how the names of the snapshots of one template begin. The
// limits are part of it, since memory is restored with those it was saved with.
func (t *templates) prefix(base Base) string {
	c := t.fleet.conf
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%v %d %d %d", base.Key, c.CPUs, c.MemoryMB, c.DiskMB, c.Processes))
	return "t-" + hex.EncodeToString(sum[:8]) + "-"
}

// make finds or makes the snapshot of a template. It runs in the background;
// until it has ended sandboxes boot.
func (t *templates) make(ctx context.Context, s *templateSnapshot) {
	f := t.fleet
	from, err := t.find(s.base)
	if err == nil && from.dir == "" {
		begin := time.Now()
		if from, err = t.boot(ctx, s); err == nil {
			f.log.InfoContext(ctx, "made snapshot of template", "template", s.template, "took", time.Since(begin).Round(time.Millisecond))
		}
	}
	t.mu.Lock()
	if err != nil {
		s.failed = time.Now()
	}
	s.from = from
	t.mu.Unlock()
	if err != nil && ctx.Err() == nil {
		f.log.WarnContext(ctx, "make snapshot of template; its sandboxes boot", "template", s.template, "err", err)
	}
	f.pool.poke()
}

// find returns a snapshot that an earlier server made, or the zero source.
func (t *templates) find(base Base) (source, error) {
	prefix := t.prefix(base)
	found, err := filepath.Glob(t.fleet.dir(prefix) + "*")
	if err != nil || len(found) == 0 {
		return source{}, err
	}
	return source{dir: found[0], channel: strings.TrimPrefix(filepath.Base(found[0]), prefix), template: true}, nil
}

// boot boots a sandbox without owner, waits until its services are warm, and
// saves it.
func (t *templates) boot(ctx context.Context, n *templateSnapshot) (_ source, err error) {
	f := t.fleet
	s := f.unowned(n.template)
	work, l, err := f.claim(ctx, s.ID)
	if err != nil {
		return source{}, err
	}
	defer f.release(l)
	stop := context.AfterFunc(ctx, l.cancel)
	defer stop()
	ctx = work
	defer func() { err = errors.Join(err, f.takeDown(context.WithoutCancel(ctx), l)) }()
	if err := f.bringUp(ctx, l, s, n.base, source{}, initBody{EnvVars: environment(nil)}); err != nil {
		return source{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, f.conf.SaveTimeout)
	defer cancel()
	for _, p := range n.base.Probes {
		if err := f.probe(ctx, s.ID, p); err != nil {
			return source{}, err
		}
	}
	f.warmGuest(ctx, s.ID)
	from := source{dir: f.dir(t.prefix(n.base) + s.ID), channel: s.ID, template: true}
	if err := f.runtime.Save(ctx, s.ID, from.dir, SaveOptions{}); err != nil {
		return source{}, fmt.Errorf("save template: %w", err)
	}
	return from, nil
}

// dropOutdated removes the snapshots of former versions of the prepared
// templates: with another guest, other files or other limits.
func (t *templates) dropOutdated(ctx context.Context, current []Base) {
	var keep []string
	for _, base := range current {
		keep = append(keep, t.prefix(base))
	}
	found, err := filepath.Glob(t.fleet.dir("t-*"))
	if err != nil {
		return // only for a malformed pattern
	}
	for _, dir := range found {
		name := filepath.Base(dir)
		if slices.ContainsFunc(keep, func(p string) bool { return strings.HasPrefix(name, p) }) {
			continue
		}
		if err := t.fleet.discard(name); err != nil {
			t.fleet.log.WarnContext(ctx, "remove an outdated template snapshot", "err", err)
		}
	}
}

// unowned returns a sandbox that belongs to no project, so no rule lets it
// connect anywhere. It has no row.
func (f *Fleet) unowned(template string) Info {
	return Info{
		ID: newID(), Template: template, State: Creating,
		CPUs: f.conf.CPUs, MemoryMB: f.conf.MemoryMB, DiskMB: f.conf.DiskMB, Started: time.Now(),
	}
}

// probe returns when a service inside has answered 200, or an error when ctx is
// done.
func (f *Fleet) probe(ctx context.Context, id string, p Probe) error {
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return f.dialInside(ctx, id, p.Port)
		},
	}}
	var last error
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+p.Path, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
			err = fmt.Errorf("status %d", resp.StatusCode)
		}
		last = err
		select {
		case <-ctx.Done():
			return fmt.Errorf("service at port %d did not become ready: %w", p.Port, last)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
