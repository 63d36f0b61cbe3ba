package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

// SampleEvery is how often a [Sampler] measures.
const SampleEvery = 5 * time.Second

// kept is the number of samples per sandbox and project: one hour.
const kept = int(time.Hour / SampleEvery)

// maxEnded bounds the number of ended sandboxes with samples.
const maxEnded = 500

// A Sample is how much of this machine a sandbox used at one time. It is measured
// from outside, so it wakes nothing inside, and nothing inside can forge it.
type Sample struct {
	At          time.Time
	CPUs        float64 // cores that it may use
	CPUPercent  float64 // of CPUs, used since the previous sample; 0 to 100
	MemoryUsed  int64   // bytes, including the sandbox's own kernel
	MemoryTotal int64   // bytes
	DiskUsed    int64   // bytes that it has written
	DiskTotal   int64   // bytes that it may write
}

// A TeamSample is how many sandboxes a project used at one time.
type TeamSample struct {
	At        time.Time
	Running   int     // sandboxes at the same time
	StartRate float64 // sandboxes started per second since the previous sample
}

// A Sampler measures the sandboxes of a fleet and keeps the samples of an hour in
// memory. They do not survive a restart of the server. It is safe for concurrent
// use.
type Sampler struct {
	fleet *Fleet

	mu    sync.Mutex // guards what follows
	boxes map[string]*series
	teams map[string][]TeamSample // by project, oldest first
	last  time.Time               // of the newest samples
}

// A series holds the samples of one sandbox.
type series struct {
	project string
	samples []Sample // oldest first
	cpu     time.Duration
	read    time.Time // when cpu was read
	ended   time.Time // zero while the sandbox lives
}

// NewSampler returns a sampler of f's sandboxes. Call [Sampler.Run] to measure.
func NewSampler(f *Fleet) *Sampler {
	return &Sampler{fleet: f, boxes: map[string]*series{}, teams: map[string][]TeamSample{}}
}

// Run measures until ctx is done.
func (m *Sampler) Run(ctx context.Context) error {
	t := time.NewTicker(SampleEvery)
	defer t.Stop()
	for {
		if err := m.Measure(ctx); err != nil && ctx.Err() == nil {
			m.fleet.log.ErrorContext(ctx, "measure sandboxes", "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// A subject is a sandbox to be measured.
type subject struct {
	id, project, state string
	cpus               int64 // thousandths of a core
	memory, disk       int64 // mebibytes
	started            int64
}

// Measure takes one sample of each running sandbox and of each project.
func (m *Sampler) Measure(ctx context.Context) error {
	subjects, err := m.subjects(ctx)
	if err != nil {
		return err
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	there := map[string]bool{}
	running, started := map[string]int{}, map[string]int{}
	m.mu.Lock()
	last := m.last
	m.mu.Unlock()
	for _, s := range subjects {
		there[s.id] = true
		if State(s.state) != Running {
			continue // a paused sandbox uses nothing
		}
		running[s.project]++
		if !last.IsZero() && store.FromTime(s.started).After(last) {
			started[s.project]++
		}
		u, err := m.fleet.runtime.Usage(ctx, s.id)
		if errors.Is(err, ErrNotFound) {
			continue // it has ended since
		}
		if err != nil {
			m.fleet.log.DebugContext(ctx, "measure sandbox", "sandbox", s.id, "err", err)
			continue
		}
		m.add(s, u, now)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgetLocked(there, now)
	if !last.IsZero() {
		for p := range running {
			m.teams[p] = bounded(m.teams[p], TeamSample{At: now, Running: running[p], StartRate: float64(started[p]) / now.Sub(last).Seconds()})
		}
		for p, old := range m.teams {
			if running[p] == 0 && old[len(old)-1].Running > 0 {
				m.teams[p] = bounded(old, TeamSample{At: now}) // record the drop to zero once
			}
		}
	}
	m.last = now
	return nil
}

// forgetLocked drops the samples of sandboxes that ended an hour ago, and of the
// oldest if there are more than maxEnded.
func (m *Sampler) forgetLocked(there map[string]bool, now time.Time) {
	var ended []string
	for id, b := range m.boxes {
		if there[id] {
			b.ended = time.Time{}
			continue
		}
		if b.ended.IsZero() {
			b.ended = now
		}
		ended = append(ended, id)
	}
	slices.SortFunc(ended, func(a, b string) int { return m.boxes[b].ended.Compare(m.boxes[a].ended) })
	for i, id := range ended {
		if i >= maxEnded || now.Sub(m.boxes[id].ended) > time.Hour {
			delete(m.boxes, id)
		}
	}
}

// bounded appends v and drops the oldest elements beyond kept.
func bounded[T any](s []T, v T) []T {
	if len(s) >= kept {
		s = append(s[:0], s[len(s)-kept+1:]...)
	}
	return append(s, v)
}

// subjects returns the living sandboxes of this server.
func (m *Sampler) subjects(ctx context.Context) (out []subject, err error) {
	err = m.fleet.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select id, project_id, state, cpus, memory_mb, disk_mb, started_at from sandbox
			where server_id = $1 and state in ('running', 'pausing', 'paused', 'resuming')`, m.fleet.conf.Server)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var s subject
			if err := rows.Scan(&s.id, &s.project, &s.state, &s.cpus, &s.memory, &s.disk, &s.started); err != nil {
				return err
			}
			out = append(out, s)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes to measure: %w", err)
	}
	return out, nil
}

// add appends a sample from what the runtime measured.
func (m *Sampler) add(s subject, u Usage, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.boxes[s.id]
	if b == nil {
		b = &series{project: s.project, read: store.FromTime(s.started)}
		m.boxes[s.id] = b
	}
	used := u.CPU - b.cpu
	if used < 0 {
		used = u.CPU // it was restored since, and the runtime counts from there
	}
	cpus := float64(s.cpus) / 1000
	percent := 0.0
	if d := now.Sub(b.read); d > 0 && cpus > 0 {
		percent = min(100, 100*used.Seconds()/d.Seconds()/cpus)
	}
	b.cpu, b.read = u.CPU, now
	// A limit is on what the sandbox has; the host counts what it needs to keep that, too.
	total, disk := s.memory<<20, s.disk<<20
	b.samples = bounded(b.samples, Sample{
		At: now, CPUs: cpus, CPUPercent: percent,
		MemoryUsed: min(u.Memory, total), MemoryTotal: total, DiskUsed: min(u.Disk, disk), DiskTotal: disk,
	})
}

// Samples returns the samples of a sandbox of who's project from start to end,
// oldest first; a zero time means no bound. Samples of an ended sandbox stay for an
// hour. Its error wraps [ErrNotFound] if the project never had such a sandbox.
func (m *Sampler) Samples(ctx context.Context, who auth.Principal, id string, start, end time.Time) ([]Sample, error) {
	if err := mayMeasure(who); err != nil {
		return nil, err
	}
	s, err := m.fleet.rows.row(ctx, id)
	if err != nil {
		return nil, err
	}
	if s.Project != who.Project {
		return nil, fmt.Errorf("sandbox %s: %w", id, ErrNotFound)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.boxes[id]
	if b == nil || b.project != who.Project {
		return nil, nil // not measured yet
	}
	var out []Sample
	for _, s := range b.samples {
		if within(s.At, start, end) {
			out = append(out, s)
		}
	}
	return out, nil
}

func within(t, start, end time.Time) bool {
	return !t.Before(start) && (end.IsZero() || !t.After(end))
}

// Newest returns the newest sample of each sandbox in ids that belongs to who's
// project. Sandboxes without samples are left out.
func (m *Sampler) Newest(who auth.Principal, ids []string) (map[string]Sample, error) {
	if err := mayMeasure(who); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[string]Sample{}
	for _, id := range ids {
		if b := m.boxes[id]; b != nil && b.project == who.Project && b.ended.IsZero() {
			out[id] = b.samples[len(b.samples)-1]
		}
	}
	return out, nil
}

func mayMeasure(who auth.Principal) error {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return fmt.Errorf("%s may not measure sandboxes: %w", who, auth.ErrForbidden)
	}
	return nil
}

// Team returns the samples of who's project from start to end, oldest first; a zero
// time means no bound.
func (m *Sampler) Team(who auth.Principal, start, end time.Time) ([]TeamSample, error) {
	if err := mayMeasure(who); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []TeamSample
	for _, s := range m.teams[who.Project] {
		if within(s.At, start, end) {
			out = append(out, s)
		}
	}
	return out, nil
}
