package console

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// A place is a part of the data directory, with a description of what removes files from it.
type place struct {
	Name  string // shown to people
	Class string // of its bar
	files []string
	Goes  string // what is removed, and by what
	Link  string // where a person removes something; empty: nowhere in the console
	Do    string
}

// places lists all places. Pages list places of the same size in this order.
var places = []place{
	{"Running sandboxes", "b1", []string{"sandboxes"}, "Removed when the sandbox ends.", "/console/sandboxes", "Sandboxes"},
	{"Paused sandboxes and snapshots", "b2", []string{"snapshots"}, "A paused sandbox goes when somebody ends it, or after the time that --keep-paused sets. A snapshot goes when a program deletes it.", "#s-paused", "Paused sandboxes"},
	{"Templates and build cache", "b0", []string{"templates"}, "Images of templates go with their template. Layers that no template uses are removed by the builder.", "#s-builds", "Unused builds"},
	{"Volumes", "b0", []string{"volumes"}, "A volume stays until a program deletes it.", "", ""},
	{"Mail", "b0", []string{"blobs"}, "Sealed messages stay until their agent deletes them; the trash is emptied after 30 days, and the mail of a deleted inbox 7 days after it.", "/console/inboxes", "Inboxes"},
	{"Runs and artifacts", "b0", []string{"runs", "artifacts"}, "Inputs go with their run. Released files are kept for 30 days.", "/console/runs", "Runs"},
	{"Logs and commands", "b0", []string{"logs", "commands"}, "Kept for 7 days after the end of the sandbox.", "", ""},
	{"Record and database", "b0", []string{"postern.db", "postern.db-wal", "postern.db-shm"}, "The record is kept for ever: it cannot be shortened unseen. The content of settled actions goes after the time that --keep-actions sets.", "/console/audit", "Record"},
}

// A measured is the size of a place.
type measured struct {
	place

	Bytes int64 // on the disk: holes in sparse files do not count
	Files int
	parts map[string]int64 // bytes, by the first element of the path
}

// A diskState is the newest measurement of the disk. The zero value means that there is none.
type diskState struct {
	At      time.Time // of the measurement; zero: there was none
	Running bool      // one is under way
	Seen    int       // files that the measurement has looked at
	Total   int64     // bytes of the file system
	Free    int64
	Places  []measured // the largest first
	Other   int64      // of the file system, outside of the places
	Cut     bool       // not all files were looked at: there were too many, or it took too long
	Failed  string     // why it could not be measured
	Full    time.Duration
	Since   time.Duration // over which Full was estimated; 0: it was not
}

// Used returns how many bytes of the file system are used.
func (d diskState) Used() int64 { return d.Total - d.Free }

// Percent returns the used part of the file system, in percent.
func (d diskState) Percent() int {
	if d.Total == 0 {
		return 0
	}
	return int(d.Used() * 100 / d.Total)
}

// Bars returns the drawing of the disk, 400 by 12.
func (d diskState) Bars() (out []bar) {
	if d.Total == 0 {
		return nil
	}
	x := 0.0
	add := func(class string, n int64) {
		if w := 400 * float64(n) / float64(d.Total); w >= 1 {
			out = append(out, bar{class, px(x), "0", px(w - .8), "12"})
			x += w
		}
	}
	for _, class := range []string{"b1", "b2", "b0"} {
		var n int64
		for _, p := range d.Places {
			if p.Class == class {
				n += p.Bytes
			}
		}
		add(class, n)
	}
	add("other", d.Other)
	return out
}

// The limits of a measurement. The attack: somebody makes millions of files, so that
// measuring them keeps the disk busy.
const (
	diskEvery   = 10 * time.Minute
	diskTime    = 2 * time.Minute
	diskFiles   = 2_000_000
	diskSamples = 7 * 24 * 6 // one week
)

// A diskMeter measures the data directory in the background.
type diskMeter struct {
	dir  string
	wake chan struct{} // has capacity 1

	mu      sync.Mutex // guards what follows
	state   diskState
	samples []diskSample // oldest first
}

type diskSample struct {
	at   time.Time
	used int64
}

func newDiskMeter(dir string) *diskMeter { return &diskMeter{dir: dir, wake: make(chan struct{}, 1)} }

// Run measures the data directory every diskEvery, and when a person asks for it, until ctx
// is done. It returns nil at once if the console has no data directory.
func (s *Server) Run(ctx context.Context) error {
	if s.disk.dir == "" {
		return nil
	}
	t := time.NewTicker(diskEvery)
	defer t.Stop()
	for {
		s.disk.measure(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		case <-s.disk.wake:
		}
	}
}

// diskState returns the newest measurement of the disk.
func (s *Server) diskState() diskState {
	s.disk.mu.Lock()
	defer s.disk.mu.Unlock()
	d := s.disk.state
	d.Places = slices.Clone(d.Places)
	return d
}

var errTooMany = errors.New("more files than are looked at")

// measure looks at all files of the data directory once.
func (m *diskMeter) measure(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, diskTime)
	defer cancel()
	m.set(func(d *diskState) { d.Running, d.Seen = true, 0 })
	next, seen := diskState{At: time.Now()}, 0
	var st unix.Statfs_t
	err := unix.Statfs(m.dir, &st)
	if err == nil {
		next.Total, next.Free = int64(st.Blocks)*st.Bsize, int64(st.Bavail)*st.Bsize
		next.Other = next.Used()
		for _, p := range places {
			one := measured{place: p, parts: map[string]int64{}}
			for _, name := range p.files {
				if err = m.walk(ctx, name, &one, &seen); err != nil {
					break
				}
			}
			next.Places = append(next.Places, one)
			next.Other -= one.Bytes
			if err != nil {
				break
			}
		}
	}
	switch {
	case errors.Is(err, errTooMany), errors.Is(err, context.DeadlineExceeded):
		next.Cut = true
	case err != nil:
		next.Failed = err.Error()
	}
	next.Other = max(next.Other, 0)
	slices.SortStableFunc(next.Places, func(a, b measured) int { return int(min(max(b.Bytes-a.Bytes, -1), 1)) })
	m.set(func(d *diskState) {
		if next.Total > 0 {
			m.samples = append(m.samples, diskSample{next.At, next.Used()})
			m.samples = m.samples[max(0, len(m.samples)-diskSamples):]
			next.Full, next.Since = untilFull(m.samples, next.Free)
		}
		*d = next
	})
}

func (m *diskMeter) set(f func(*diskState)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f(&m.state)
}

// walk adds the files below a name to a measurement. It does not follow links: code in a
// sandbox can make one that leads anywhere. Files that vanish meanwhile do not count.
func (m *diskMeter) walk(ctx context.Context, name string, to *measured, seen *int) error {
	root := filepath.Join(m.dir, name)
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if *seen++; *seen > diskFiles {
			return errTooMany
		}
		if *seen%5000 == 0 {
			n := *seen
			m.set(func(d *diskState) { d.Seen = n })
			time.Sleep(10 * time.Millisecond) // sandboxes need the disk too
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return nil // unreachable on Linux
		}
		to.Bytes += st.Blocks * 512
		if !d.IsDir() {
			to.Files++
		}
		if rel, err := filepath.Rel(root, path); err == nil && rel != "." {
			first, _, _ := strings.Cut(rel, string(os.PathSeparator))
			to.parts[first] += st.Blocks * 512
		}
		return nil
	})
}

// leastSpan is how long the disk must have been watched before a page says when it will be full.
const leastSpan = time.Hour

// untilFull estimates the time until the disk is full, from its use over time. The time is
// zero if there is no estimate, or if the disk does not fill.
func untilFull(samples []diskSample, free int64) (full, since time.Duration) {
	if len(samples) < 2 {
		return 0, 0
	}
	first, last := samples[0], samples[len(samples)-1]
	since = last.at.Sub(first.at)
	if since < leastSpan {
		return 0, 0
	}
	grown := last.used - first.used
	if grown <= 0 {
		return 0, since
	}
	hours := float64(free) / float64(grown) * since.Hours()
	const most = 10 * 365 * 24 // hours; if it takes longer, the disk does not fill
	if hours > most {
		return 0, since
	}
	return time.Duration(hours * float64(time.Hour)), since
}

// seesMachine reports whether who may see the disk use of all projects together: the
// operator may, and an owner if there is only one project.
func (s *Server) seesMachine(ctx context.Context, who auth.Principal) (bool, error) {
	if !who.Manages() {
		return false, nil
	}
	if who.Operator {
		return true, nil
	}
	var n int
	err := s.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from (select id from project limit 2) as p`, nil, &n)
	})
	if err != nil {
		return false, fmt.Errorf("count projects: %w", err)
	}
	return n == 1, nil
}

// An ownSize is the size of what a project has stored of one kind, from the project's rows.
type ownSize struct {
	Name  string
	Count int
	Bytes int64 // as they were put in; 0 if the rows have no size
	Note  string
}

// A pausedRow is a paused sandbox with its size on the disk.
type pausedRow struct {
	sandbox.Info
	Bytes int64 // 0: not measured
}

// A diskPage is the disk's page.
type diskPage struct {
	Disk     diskState
	Machine  bool // Disk may be shown
	Own      []ownSize
	Paused   []pausedRow
	More     int // further paused sandboxes
	Keep     time.Duration
	Measures bool // this server measures
	Notice   string

	Builds      []build.Unused
	MoreBuilds  int   // further unused builds
	UnusedBytes int64 // of all unused builds
}

// diskHandlers serve the disk's page.
type diskHandlers struct{ *Server }

func (s diskHandlers) routes() []route {
	return []route{
		{"GET", "/console/disk", views, s.show},
		{"POST", "/console/disk/measure", manages, s.again},
		{"POST", "/console/disk/builds/{id}/delete", manages, s.deleteBuild},
	}
}

// maxPausedRows bounds the list of paused sandboxes.
const maxPausedRows = 100

func (s diskHandlers) show(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showDisk(w, r, who, http.StatusOK, "")
}

func (s diskHandlers) showDisk(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	ctx := r.Context()
	v := diskPage{Disk: s.diskState(), Keep: s.conf.KeepPaused, Measures: s.disk.dir != "", Notice: notice}
	err := s.unusedBuilds(ctx, who, &v)
	if err != nil {
		return err
	}
	if v.Machine, err = s.seesMachine(ctx, who); err != nil {
		return err
	}
	if v.Own, err = s.ownSizes(ctx, who.Project); err != nil {
		return err
	}
	alive, err := s.fleet.List(ctx, who, false)
	if err != nil {
		return err
	}
	saved, err := s.savedSizes(ctx, who.Project, v.Disk)
	if err != nil {
		return err
	}
	for _, i := range alive {
		if i.State == sandbox.Paused {
			v.Paused = append(v.Paused, pausedRow{i, saved[i.ID]})
		}
	}
	slices.SortStableFunc(v.Paused, func(a, b pausedRow) int { return int(min(max(b.Bytes-a.Bytes, -1), 1)) })
	v.More = max(0, len(v.Paused)-maxPausedRows)
	v.Paused = v.Paused[:len(v.Paused)-v.More]
	p := page{Name: "disk", Title: "Disk", Who: who, Here: "disk", Body: v}
	if v.Disk.Running {
		p.Refresh = 5
	}
	return s.render(r.Context(), w, status, p)
}

// again starts a measurement of the disk.
func (s diskHandlers) again(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if ok, err := s.seesMachine(r.Context(), who); err != nil {
		return err
	} else if !ok {
		return fmt.Errorf("measure the disk of all projects: %w", auth.ErrForbidden)
	}
	select {
	case s.disk.wake <- struct{}{}:
	default: // a measurement is already requested
	}
	http.Redirect(w, r, "/console/disk", http.StatusSeeOther)
	return nil
}

// savedSizes returns the sizes of the project's paused sandboxes, as far as they were measured.
func (s diskHandlers) savedSizes(ctx context.Context, project string, d diskState) (map[string]int64, error) {
	out := map[string]int64{}
	i := slices.IndexFunc(d.Places, func(m measured) bool { return slices.Contains(m.files, "snapshots") })
	if i < 0 {
		return out, nil
	}
	err := s.db.View(ctx, func(tx *store.Tx) error {
		rows, err := store.List(ctx, tx, func(row func(...any) error) (r [2]string, err error) { return r, row(&r[0], &r[1]) },
			`select id, saved from sandbox where project_id = $1 and saved <> '' and state = $2`, project, sandbox.Paused)
		for _, r := range rows {
			out[r[0]] = d.Places[i].parts[r[1]]
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list saved sandboxes: %w", err)
	}
	return out, nil
}

// ownSizes returns the sizes of what a project has stored, from the project's rows.
func (s diskHandlers) ownSizes(ctx context.Context, project string) (out []ownSize, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		for _, q := range []struct{ name, query, note string }{
			{"Messages", `select count(*), coalesce(sum(m.size), 0) from message m join inbox i on i.id = m.inbox_id where i.project_id = $1`, "before they were sealed"},
			{"Files of runs", `select count(*), coalesce(sum(size), 0) from run_artifact where project_id = $1`, ""},
			{"Volumes", `select count(*), coalesce(sum(size_mb), 0) * 1048576 from volume where project_id = $1`, "what they may hold"},
			{"Snapshots", `select count(*), 0 from snapshot where project_id = $1`, ""},
			{"Builds of templates", `select count(*), 0 from template_build where project_id = $1`, ""},
		} {
			one := ownSize{Name: q.name, Note: q.note}
			if err := tx.One(ctx, q.query, []any{project}, &one.Count, &one.Bytes); err != nil {
				return fmt.Errorf("sum up %s: %w", strings.ToLower(q.name), err)
			}
			out = append(out, one)
		}
		return nil
	})
	return out, err
}
