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
	logLine  = 8 << 10            // most bytes of a line; the rest is another line
	logPart  = 512 << 10          // most bytes of a file; there are two of each sandbox
	logBurst = 1 << 20            // bytes that a sandbox may write at once
	logRate  = 64 << 10           // and then in each second
	logTotal = 256 << 20          // most bytes of all logs of sandboxes that ended
	logFor   = 7 * 24 * time.Hour // since its last line, for which a log is kept
)

var logName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^(i[a-z0-9]{20})\.log(\.1)?$`) })

// A Logbook keeps what guests say on their standard output and error, on disk:
// the newest of each sandbox, also for some days after its end. It is safe for
// concurrent use.
//
// All of it is hostile: whoever is root inside writes there. So a guest can
// neither fill the disk nor keep it busy, each line has the host's time, and
// what the host itself has to say is not here but among the events.
type Logbook struct {
	log *slog.Logger
	db  *store.DB
	dir string

	mu   sync.Mutex // guards open
	open map[string]int
}

// NewLogbook returns the logbook in dir, which it makes if need be.
func NewLogbook(log *slog.Logger, db *store.DB, dir string) (*Logbook, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of logs: %w", err)
	}
	return &Logbook{log: log, db: db, dir: dir, open: map[string]int{}}, nil
}

func (l *Logbook) path(id string) string { return filepath.Join(l.dir, id+".log") }

// Writer returns where the runtime writes what the guest of id says. Writing
// never fails and never waits for long: a guest must not come to a halt over
// its log. One writer of a sandbox is used at a time, and closed.
func (l *Logbook) Writer(id string) io.WriteCloser {
	l.mu.Lock()
	l.open[id]++
	l.mu.Unlock()
	return &logWriter{book: l, id: id, tokens: logBurst, filled: time.Now()}
}

// A logWriter cuts what comes into lines and puts the time before each.
type logWriter struct {
	book *Logbook
	id   string

	mu      sync.Mutex // guards what follows
	line    []byte     // begun and not ended
	file    *os.File   // nil until there is something to write, and after an error
	size    int64      // of file
	tokens  float64    // bytes that may be written now
	filled  time.Time  // when tokens was right
	dropped int64      // bytes since the last line that was written
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
			take, end = room, -2 // too long: what is here is a line
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

// Close writes what remains.
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
		// A full disk is no reason to stop listening; the next line tries again.
		w.book.log.Debug("write a sandbox's log", "sandbox", w.id, "err", err)
	}
}

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

// A LogQuery says which lines of a log are wanted.
type LogQuery struct {
	From     time.Time // lines at or after it, or, when Backward, at or before it; zero is no bound
	Limit    int       // at most so many, 1 to 1000
	Backward bool      // newest first
	Level    Level     // the least; empty means all
	Search   string    // only lines with this in their message
}

// Read returns lines of a sandbox of who's project, the guest's and the
// host's, also of one that ended. It returns [ErrNotFound] if the project never
// had such a sandbox.
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

// events are the host's lines: what happened to the sandbox, and why.
func (l *Logbook) events(ctx context.Context, who auth.Principal, id string) (out []LogEntry, err error) {
	// The newest thousand: enough for whoever reads, and bounded.
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
			continue // half a line, from a crash in its middle
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

// Prune removes the logs of sandboxes that ended which are older than a week,
// and the oldest of the others until they fit.
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
			continue // removed meanwhile
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
