package build

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"postern/internal/registry"
	"postern/internal/store"
)

// The limits of log lines and of one write to the database.
const (
	maxLine      = 8 << 10 // bytes
	flushEvery   = 250 * time.Millisecond
	flushAt      = 200 // lines
	lastLines    = 20  // of a failed step, kept with the failure
	reservedTail = 20  // lines of the limit that are reserved for the end of a build
)

// A journal is the log of one running build. It buffers lines briefly and writes them
// together, because a step may print thousands of lines in a second.
type journal struct {
	db       *store.DB
	project  string
	build    string
	lines    int // limit
	bytes    int // limit
	replacer *strings.Replacer

	writing sync.Mutex // held while lines are written, to keep them in order

	mu      sync.Mutex
	pending []Entry
	n       int     // lines so far; guarded by mu
	size    int     // bytes so far; guarded by mu
	full    bool    // guarded by mu
	last    []Entry // newest lines of the current step; guarded by mu
	written int     // lines in the database; guarded by writing
}

// newJournal returns the journal of a build. It removes the secrets in c from all lines.
func newJournal(s *Service, b Build, c registry.Credentials) *journal {
	return &journal{db: s.db, project: b.project, build: b.ID, lines: s.conf.MaxLogLines, bytes: s.conf.MaxLogBytes, replacer: hide(c)}
}

// hide returns a replacer that removes the secrets in c. The attack: a registry or a proxy
// repeats a request's header or URL in its error, and the error is logged.
func hide(c registry.Credentials) *strings.Replacer {
	var pairs []string
	for _, secret := range []string{c.Password, c.AWSSecret, c.GCPKey} {
		for l := range strings.SplitSeq(secret, "\n") {
			if l = strings.TrimSpace(l); len(l) > 3 {
				pairs = append(pairs, l, "[credential]")
			}
		}
	}
	return strings.NewReplacer(pairs...)
}

// scrub removes credentials and control characters from text.
func (j *journal) scrub(text string, most int) string { return clean(j.replacer.Replace(text), most) }

// add appends a line. Lines beyond the limit are dropped, after one line that says so. A
// few lines are reserved for errors and for the last phase.
func (j *journal) add(lv, step, message string) {
	e := Entry{Time: time.Now().UTC().Truncate(time.Microsecond), Level: lv, Step: step, Message: j.scrub(message, maxLine)}
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.last) > 0 && j.last[0].Step != step {
		j.last = j.last[:0]
	}
	if len(j.last) >= lastLines {
		j.last = append(j.last[:0], j.last[1:]...)
	}
	j.last = append(j.last, e)
	if j.n >= j.lines-reservedTail || j.size+len(e.Message) > j.bytes {
		if !j.full {
			j.full = true
			j.pushLocked(Entry{Time: e.Time, Level: "warn", Step: step, Message: fmt.Sprintf("the log is full (%d lines, %d bytes): later lines are left out", j.lines, j.bytes)})
		}
		if lv != "error" && step != finalize || j.n >= j.lines {
			return
		}
	}
	j.pushLocked(e)
}

// pushLocked appends a line. The caller holds mu and has checked the limit.
func (j *journal) pushLocked(e Entry) {
	j.pending = append(j.pending, e)
	j.n++
	j.size += len(e.Message)
}

// tail returns the newest lines of a step.
func (j *journal) tail(step string) (out []Entry) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range j.last {
		if e.Step == step {
			out = append(out, e)
		}
	}
	return out
}

// flush writes the pending lines.
func (j *journal) flush(ctx context.Context) error {
	j.writing.Lock()
	defer j.writing.Unlock()
	j.mu.Lock()
	es := j.pending
	j.pending = nil
	j.mu.Unlock()
	if len(es) == 0 {
		return nil
	}
	err := j.db.UpdateIn(ctx, store.Thing(j.project, j.build), func(tx *store.Tx) error {
		for i := 0; i < len(es); i += flushAt {
			part := es[i:min(i+flushAt, len(es))]
			var q strings.Builder
			q.WriteString(`insert into template_log (build_id, n, at, level, step, message) values `)
			args := []any{j.build}
			for k, e := range part {
				if k > 0 {
					q.WriteString(", ")
				}
				lv, err := level(e.Level)
				if err != nil {
					return err
				}
				p := len(args)
				fmt.Fprintf(&q, "($1, $%d, $%d, $%d, $%d, $%d)", p+1, p+2, p+3, p+4, p+5)
				args = append(args, j.written+i+k, store.Time(e.Time), lv, e.Step, e.Message)
			}
			if _, err := tx.ExecContext(ctx, q.String(), args...); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, `update template_build set lines = $1 where id = $2`, j.written+len(es), j.build)
		return err
	})
	if err != nil {
		j.mu.Lock()
		j.pending = append(es, j.pending...)
		j.mu.Unlock()
		return fmt.Errorf("write log of build %s: %w", j.build, err)
	}
	j.written += len(es)
	return nil
}

// run writes pending lines from time to time until ctx ends.
func (j *journal) run(ctx context.Context) {
	t := time.NewTicker(flushEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			_ = j.flush(ctx) // on an error, lines stay pending until the next flush
		}
	}
}
