package sandbox

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/store"
)

const (
	logLine  = 8 << 10            // bytes of the longest line; a longer one is split
	logPart  = 512 << 10          // bytes of the largest file; each sandbox has two
	logBurst = 1 << 20            // bytes that a sandbox may write at once
	logRate  = 64 << 10           // and then per second
	logTotal = 256 << 20          // bytes of all logs of ended sandboxes
	logFor   = 7 * 24 * time.Hour // after its last line for which a log is kept
)

var logName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^(i[a-z0-9]{20})\.log(\.1)?$`) })

// A Logbook keeps the standard output and error of guests on disk: the newest part
// of each, also for some days after the sandbox has ended. It is safe for
// concurrent use.
//
// All of it is hostile, since root inside a sandbox can write anything. So a guest
// can neither fill the disk nor keep it busy, each line carries the host's time, and
// lines of the host come from events and never from these files.
type Logbook struct {
	log *slog.Logger
	db  *store.DB
	dir string

	mu   sync.Mutex // guards open
	open map[string]int
}

// NewLogbook returns the logbook in dir, and creates dir if it does not exist.
func NewLogbook(log *slog.Logger, db *store.DB, dir string) (*Logbook, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of logs: %w", err)
	}
	return &Logbook{log: log, db: db, dir: dir, open: map[string]int{}}, nil
}

func (l *Logbook) path(id string) string { return filepath.Join(l.dir, id+".log") }

// Writer returns where the runtime writes the output of the guest id. Writing never
// fails and never blocks for long, since a guest must not stop because of its log.
// Use one writer of a sandbox at a time, and close it.
func (l *Logbook) Writer(id string) io.WriteCloser {
	l.mu.Lock()
	l.open[id]++
	l.mu.Unlock()
	return &logWriter{book: l, id: id, tokens: logBurst, filled: time.Now()}
}

// A logWriter splits its input into lines and puts the time before each.
type logWriter struct {
	book *Logbook
	id   string

	mu      sync.Mutex // guards what follows
	line    []byte     // incomplete line
	file    *os.File   // nil before the first line and after an error
	size    int64      // of file
	tokens  float64    // bytes that may be written now
	filled  time.Time  // when tokens was last updated
	dropped int64      // bytes dropped since the last line that was written
	closed  bool
}

// Write implements [io.Writer].
func (w *logWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := len(p)
	for len(p) > 0 {
		end := bytes.IndexByte(p, '\n')
		take := end
		if end < 0 {
			take = len(p)
		}
		if room := logLine - len(w.line); take > room {
			take, end = room, -2 // too long: write what fits as a line
		}
		w.line = append(w.line, p[:take]...)
		p = p[take:]
		if end >= 0 {
			p = p[1:]
		}
		if end != -1 {
			w.flushLocked()
		}
	}
	return n, nil
}

// Close writes the incomplete line.
func (w *logWriter) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	w.closed = true
	w.flushLocked()
	w.book.mu.Lock()
	if w.book.open[w.id]--; w.book.open[w.id] <= 0 {
		delete(w.book.open, w.id)
	}
	w.book.mu.Unlock()
	if w.file != nil {
		return w.file.Close()
	}
	return nil
}

// flushLocked writes the line if the rate limit allows it, and otherwise counts it
// as dropped.
func (w *logWriter) flushLocked() {
	line := w.line
	w.line = w.line[:0]
	if len(bytes.TrimSpace(line)) == 0 {
		return
	}
	now := time.Now()
	w.tokens = min(logBurst, w.tokens+logRate*now.Sub(w.filled).Seconds())
	w.filled = now
	if w.tokens < float64(len(line)) {
		w.dropped += int64(len(line))
		return
	}
	w.tokens -= float64(len(line))
	var b []byte
	if w.dropped > 0 {
		b = fmt.Appendf(b, "%d %d bytes were written too fast to be kept\n", now.UnixMicro(), w.dropped)
		w.dropped = 0
	}
	b = append(fmt.Appendf(b, "%d ", now.UnixMicro()), line...)
	b = append(b, '\n')
	if err := w.appendLocked(b); err != nil {
		// The disk may be full now and have room later: the next line tries again.
		w.book.log.Debug("write a sandbox's log", "sandbox", w.id, "err", err)
	}
}

// appendLocked appends to the log and rotates it when it is full.
func (w *logWriter) appendLocked(b []byte) error {
	if w.file == nil {
		f, err := os.OpenFile(w.book.path(w.id), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		st, err := f.Stat()
		if err != nil {
			return errors.Join(err, f.Close())
		}
		w.file, w.size = f, st.Size()
	}
	if w.size+int64(len(b)) > logPart {
		err := errors.Join(w.file.Close(), os.Rename(w.book.path(w.id), w.book.path(w.id)+".1"))
		w.file, w.size = nil, 0
		if err != nil {
			return err
		}
		return w.appendLocked(b)
	}
	n, err := w.file.Write(b)
	w.size += int64(n)
	return err
}

// A LogQuery selects lines of a log.
type LogQuery struct {
	From     time.Time // lines at or after it, or with Backward at or before it; zero means no bound
	Limit    int       // maximum number of lines, 1 to 1000
	Backward bool      // newest first
	Level    Level     // minimum; empty means all
	Search   string    // text that the message must contain
}

// Read returns lines of the guest and the host about a sandbox of who's project,
// also of an ended one. Its error wraps [ErrNotFound] if the project never had such
// a sandbox.
func (l *Logbook) Read(ctx context.Context, who auth.Principal, id string, q LogQuery) ([]LogEntry, error) {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return nil, fmt.Errorf("%s may not read logs: %w", who, auth.ErrForbidden)
	}
	if !logName().MatchString(id + ".log") {
		return nil, fmt.Errorf("sandbox %q: %w", id, ErrNotFound)
	}
	if q.Limit < 1 || q.Limit > 1000 {
		return nil, fmt.Errorf("%w: limit: must be 1 to 1000", ErrInvalid)
	}
	var n int
	err := l.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from sandbox where id = $1 and project_id = $2`, []any{id, who.Project}, &n)
	})
	if err != nil {
		return nil, fmt.Errorf("find sandbox: %w", err)
	}
	if n == 0 {
		return nil, fmt.Errorf("sandbox %s: %w", id, ErrNotFound)
	}
	all, err := l.events(ctx, who, id)
	if err != nil {
		return nil, err
	}
	for _, p := range []string{l.path(id) + ".1", l.path(id)} {
		es, err := readLog(p)
		if err != nil {
			return nil, err
		}
		all = append(all, es...)
	}
	slices.SortStableFunc(all, func(a, b LogEntry) int { return a.At.Compare(b.At) })
	if q.Backward {
		slices.Reverse(all)
	}
	var out []LogEntry
	for _, e := range all {
		if !q.From.IsZero() && (q.Backward && e.At.After(q.From) || !q.Backward && e.At.Before(q.From)) ||
			!e.Level.atLeast(q.Level) || !strings.Contains(e.Message, q.Search) {
			continue
		}
		if out = append(out, e); len(out) == q.Limit {
			break
		}
	}
	return out, nil
}

// events returns the lines of the host: what happened to the sandbox, and why.
func (l *Logbook) events(ctx context.Context, who auth.Principal, id string) (out []LogEntry, err error) {
	// The newest thousand bound the work.
	for offset := 0; offset < 1000; offset += 100 {
		es, err := event.List(ctx, l.db, who, event.Query{Sandbox: id, Offset: offset, Limit: 100})
		if err != nil {
			return nil, err
		}
		for _, e := range es {
			what := strings.TrimPrefix(string(e.Type), "sandbox.lifecycle.")
			entry := LogEntry{At: e.At, Level: LevelInfo, Logger: HostLogger, Message: "sandbox " + what, Fields: map[string]string{"event": string(e.Type)}}
			if reason, ok := e.Data["reason"].(string); ok && reason != "" {
				entry.Message += ": " + clean(reason)
				entry.Fields["reason"] = clean(reason)
			}
			out = append(out, entry)
		}
		if len(es) < 100 {
			break
		}
	}
	return out, nil
}

// readLog returns the lines of one file. A missing file is empty.
func readLog(path string) ([]LogEntry, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read log: %w", err)
	}
	defer f.Close()
	var out []LogEntry
	s := bufio.NewScanner(io.LimitReader(f, 2*logPart))
	s.Buffer(nil, logLine+64)
	for s.Scan() {
		at, line, _ := bytes.Cut(s.Bytes(), []byte(" "))
		us, err := strconv.ParseInt(string(at), 10, 64)
		if err != nil {
			continue // an incomplete line, after a crash
		}
		e := ParseLogLine(line)
		e.At = store.FromTime(us)
		out = append(out, e)
	}
	return out, nil
}

// Run removes old logs until ctx is done.
func (l *Logbook) Run(ctx context.Context) error {
	t := time.NewTicker(time.Hour)
	defer t.Stop()
	for {
		if err := l.Prune(); err != nil {
			l.log.ErrorContext(ctx, "prune logs of sandboxes", "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// Prune removes the logs of ended sandboxes that are older than a week, and then
// the oldest until the rest fits in logTotal.
func (l *Logbook) Prune() error { return l.prune(time.Now().Add(-logFor), logTotal) }

func (l *Logbook) prune(before time.Time, total int64) error {
	files, err := os.ReadDir(l.dir)
	if err != nil {
		return fmt.Errorf("list logs: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	type old struct {
		path string
		at   time.Time
		size int64
	}
	var olds []old
	for _, f := range files {
		m := logName().FindStringSubmatch(f.Name())
		if m == nil || l.open[m[1]] > 0 {
			continue
		}
		st, err := f.Info()
		if err != nil {
			continue // removed since
		}
		olds = append(olds, old{filepath.Join(l.dir, f.Name()), st.ModTime(), st.Size()})
	}
	slices.SortFunc(olds, func(a, b old) int { return cmp.Or(b.at.Compare(a.at), strings.Compare(a.path, b.path)) })
	var sum int64
	var errs []error
	for _, o := range olds { // newest first
		if sum += o.size; sum > total || o.at.Before(before) {
			errs = append(errs, os.Remove(o.path))
		}
	}
	return errors.Join(errs...)
}
