package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
)

// templates are the snapshots that new sandboxes start from, one for each
// template. At its first use a template has none: sandboxes boot, and one of
// these boots, in the background, is of a sandbox without owner that is saved as
// the template's snapshot. On disk it is named "t-KEY-SANDBOX", and a file beside it
// names the template, so that the next server finds it.
//
// A template with a start command is saved with that running and ready. While it is
// made its sandbox may connect where the steps of the project's builds may, and it has
// no secrets and no owner who could reach it.
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

// A templateNote is stored beside a template's snapshot.
type templateNote struct {
	Template string `json:"template"` // its ID
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
	// The former server may have made it.
	if from, err := t.find(base); err == nil && from.dir != "" {
		s.from = from
		f.pool.poke()
		return from
	}
	f.workers.Go(func() { t.make(f.background, s) })
	return source{}
}

// prepared returns the snapshot of a template by its key, or nil if it has not been
// made.
func (t *templates) prepared(key string) *templateSnapshot {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.all[key]; s != nil && s.from.dir != "" {
		c := *s
		return &c
	}
	return nil
}

// keyOf returns the key of a template whose snapshot has been made or is being made, or
// the empty string.
func (t *templates) keyOf(template string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, s := range t.all {
		if s.template == template {
			return key
		}
	}
	return ""
}

// prefix returns how the names of the snapshots of one template begin. The
// limits are part of it, since memory is restored with those it was saved with.
func (t *templates) prefix(base Base) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%v %d %d %d", base.Key, base.CPUs, base.MemoryMB, base.DiskMB, t.fleet.conf.Processes))
	return "t-" + hex.EncodeToString(sum[:8]) + "-"
}

// make finds or makes the snapshot of a template. It runs in the background;
// until it has ended sandboxes boot.
func (t *templates) make(ctx context.Context, s *templateSnapshot) {
	_ = t.makeNow(ctx, s, func(string) {}) // logged
}

// makeNow is make for a caller that waits for it.
func (t *templates) makeNow(ctx context.Context, s *templateSnapshot, output func(line string)) error {
	f := t.fleet
	from, err := t.find(s.base)
	if err == nil && from.dir == "" {
		begin := time.Now()
		if from, err = t.boot(ctx, s, output); err == nil {
			f.log.InfoContext(ctx, "made snapshot of template", "template", s.template, "took", time.Since(begin).Round(time.Millisecond))
		}
	}
	t.mu.Lock()
	if t.all[s.base.Key] != s && from.dir != "" { // forgotten while it was made
		err = errors.Join(ErrNoTemplate, f.discard(filepath.Base(from.dir)))
		from = source{}
	}
	if err != nil {
		s.failed = time.Now()
	}
	s.from = from
	t.mu.Unlock()
	if err != nil && ctx.Err() == nil {
		f.log.WarnContext(ctx, "make snapshot of template; its sandboxes boot", "template", s.template, "err", withoutLines(err))
	}
	f.pool.poke()
	return err
}

// find returns a snapshot that an earlier server made, or the zero source.
func (t *templates) find(base Base) (source, error) {
	prefix := t.prefix(base)
	found, err := filepath.Glob(t.fleet.dir(prefix) + "*")
	found = slices.DeleteFunc(found, func(p string) bool { return strings.HasSuffix(p, noteSuffix) })
	if err != nil || len(found) == 0 {
		return source{}, err
	}
	return source{dir: found[0], channel: strings.TrimPrefix(filepath.Base(found[0]), prefix), template: true}, nil
}

// boot boots a sandbox without owner, waits until its services are warm, and
// saves it.
func (t *templates) boot(ctx context.Context, n *templateSnapshot, output func(line string)) (_ source, err error) {
	f := t.fleet
	s := f.unowned(n.template, n.base)
	if n.base.Project != "" && n.base.StartCmd != "" {
		s.Project, s.Egress, s.bench = n.base.Project, f.conf.BenchEgress, true
		if err := f.recordBench(ctx, system(s), s, audit.BenchOpen, audit.Fields{"template": n.template, "why": "to run the start command and save the template"}); err != nil {
			return source{}, err
		}
		defer func() {
			reason := "the template was saved"
			if err != nil {
				reason = withoutLines(err).Error()
			}
			err = errors.Join(err, f.recordBench(context.WithoutCancel(ctx), system(s), s, audit.BenchClose, audit.Fields{"reason": reason}))
		}()
	}
	work, l, err := f.claim(ctx, s.ID)
	if err != nil {
		return source{}, err
	}
	defer f.release(l)
	stop := context.AfterFunc(ctx, l.cancel)
	defer stop()
	ctx = work
	defer func() { err = errors.Join(err, f.takeDown(context.WithoutCancel(ctx), l)) }()
	if err := f.bringUp(ctx, l, s, n.base, source{}, initBody{EnvVars: environment(n.base.Env), still: true}); err != nil {
		return source{}, err
	}
	if err := f.beginTemplate(ctx, s.ID, n.base); err != nil {
		return source{}, err
	}
	if err := t.await(ctx, l, s, n.base, output); err != nil {
		return source{}, err
	}
	if f.conf.Cold { // nobody would start from it
		return source{}, nil
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
	note, err := json.Marshal(templateNote{n.template})
	if err == nil {
		err = os.WriteFile(from.dir+noteSuffix, note, 0o600)
	}
	if err != nil {
		return source{}, fmt.Errorf("save template: %w", err)
	}
	if err := f.runtime.Save(ctx, s.ID, from.dir, SaveOptions{}); err != nil {
		return source{}, errors.Join(fmt.Errorf("save template: %w", err), f.discard(filepath.Base(from.dir)))
	}
	return from, nil
}

// noteSuffix ends the name of the file beside a template's snapshot.
const noteSuffix = ".json"

// await returns when the template in a sandbox is ready, or when the sandbox has ended.
func (t *templates) await(ctx context.Context, l *liveSandbox, s Info, base Base, output func(line string)) error {
	ctx, done := t.fleet.untilDeath(ctx, l)
	defer done()
	err := t.fleet.awaitTemplate(ctx, s.ID, base, output)
	if err != nil && ctx.Err() != nil {
		err = errors.Join(context.Cause(ctx), err)
	}
	return err
}

// MakeTemplateSnapshot boots a sandbox from a template, runs its start command, waits
// until it is ready and saves it, so that the template's next sandboxes start from
// there. Output gets the lines that the start command and the ready command print, which
// are hostile. If they fail the error is a [StartError]. If the snapshot exists already
// nothing happens.
func (f *Fleet) MakeTemplateSnapshot(ctx context.Context, template string, output func(line string)) error {
	base, err := f.base(ctx, template)
	if err != nil {
		return err
	}
	t := &f.templates
	t.mu.Lock()
	s := t.all[base.Key]
	if s != nil && s.failed.IsZero() {
		t.mu.Unlock()
		return nil // made, or being made by whoever started a sandbox first
	}
	s = &templateSnapshot{template: template, base: base}
	t.all[base.Key] = s
	t.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(f.background, func() { cancel(errors.New("the server is stopping")) }) //nolint:contextcheck // of the server, not of the call
	defer stop()
	if err := t.makeNow(ctx, s, output); err != nil {
		t.mu.Lock()
		delete(t.all, base.Key) // the next attempt begins anew
		t.mu.Unlock()
		return fmt.Errorf("make template %s: %w", template, err)
	}
	return nil
}

// ForgetTemplate removes the snapshot of a template that is gone, and the sandboxes that
// wait for it in the pool. Sandboxes that run are not touched.
func (f *Fleet) ForgetTemplate(ctx context.Context, template string) error {
	t := &f.templates
	t.mu.Lock()
	var dirs []string
	for key, s := range t.all {
		if s.template == template {
			if s.from.dir != "" {
				dirs = append(dirs, filepath.Base(s.from.dir))
			}
			delete(t.all, key)
		}
	}
	t.mu.Unlock()
	f.pool.poke()
	var err error
	for _, d := range dirs {
		err = errors.Join(err, f.discard(d))
	}
	if err != nil {
		return fmt.Errorf("forget template %s: %w", template, err)
	}
	return nil
}

// dropOutdated removes the snapshots of templates that are gone, and of former versions:
// with another guest, other files or other limits. Current are prepared in any case.
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
		if strings.HasSuffix(name, noteSuffix) {
			if _, err := os.Stat(strings.TrimSuffix(dir, noteSuffix)); err == nil {
				continue
			}
			name = strings.TrimSuffix(name, noteSuffix) // of a crash between the two
		} else if slices.ContainsFunc(keep, func(p string) bool { return strings.HasPrefix(name, p) }) || t.wanted(ctx, dir) {
			continue
		}
		if err := t.fleet.discard(name); err != nil {
			t.fleet.log.WarnContext(ctx, "remove an outdated template snapshot", "err", err)
		}
	}
}

// wanted reports whether the template of a snapshot exists and has not changed, and
// if so takes it over.
func (t *templates) wanted(ctx context.Context, dir string) bool {
	var note templateNote
	b, err := os.ReadFile(dir + noteSuffix)
	if err != nil || json.Unmarshal(b, &note) != nil || note.Template == "" {
		return false
	}
	base, err := t.fleet.base(ctx, note.Template)
	if errors.Is(err, ErrNoTemplate) {
		return false
	}
	if err != nil { // unknown: keep it
		return true
	}
	if !strings.HasPrefix(filepath.Base(dir), t.prefix(base)) {
		return false
	}
	t.source(note.Template, base)
	return true
}

// unowned returns a sandbox that belongs to no project, so no rule lets it
// connect anywhere. It has no row.
func (f *Fleet) unowned(template string, base Base) Info {
	return Info{
		ID: newID(), Template: template, State: Creating,
		CPUs: base.CPUs, MemoryMB: base.MemoryMB, DiskMB: base.DiskMB, Started: time.Now(),
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
