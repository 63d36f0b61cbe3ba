package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

const (
	endInterval = 5 * time.Second    // between checks for sandboxes that have ended
	lateTime    = 2 * time.Second    // after the end of a sandbox, in which its last events may arrive
	keepFor     = 7 * 24 * time.Hour // after the end of a sandbox, in which its record is kept
	keepTotal   = 256 << 20          // bytes of all records of ended sandboxes
)

// Run closes the records of sandboxes that have ended, enters their counts in the
// audit, and removes old records, until ctx is done.
func (a *Admission) Run(ctx context.Context) error {
	t := time.NewTicker(endInterval)
	defer t.Stop()
	var pruned time.Time
	for {
		if err := a.closeEnded(ctx); err != nil && ctx.Err() == nil {
			a.log.ErrorContext(ctx, "close records of commands", "err", err)
		}
		if time.Since(pruned) > time.Hour {
			pruned = time.Now()
			if err := a.prune(time.Now().Add(-keepFor), keepTotal); err != nil {
				a.log.ErrorContext(ctx, "prune records of commands", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// closeEnded closes the records of sandboxes that have ended, including those that
// ended while no server ran.
func (a *Admission) closeEnded(ctx context.Context) error {
	files, err := os.ReadDir(a.conf.Dir)
	if err != nil {
		return fmt.Errorf("list records: %w", err)
	}
	open, closed := map[string]bool{}, map[string]bool{}
	for _, f := range files {
		if m := filePattern().FindStringSubmatch(f.Name()); m != nil {
			open[m[1]] = true
			closed[m[1]] = closed[m[1]] || m[2] == partEnd
		}
	}
	var errs []error
	for id := range open {
		a.mu.Lock()
		l := a.ledgers[id]
		a.mu.Unlock()
		if closed[id] && l == nil {
			continue
		}
		errs = append(errs, a.closeOne(ctx, id, closed[id]))
	}
	return errors.Join(errs...)
}

// closeOne closes the record of a sandbox if it has ended. If recorded is set, its end
// is in the audit already.
func (a *Admission) closeOne(ctx context.Context, id string, recorded bool) error {
	var project string
	var ended int64
	err := a.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select project_id, ended_at from sandbox where id = $1`, []any{id}, &project, &ended)
	})
	switch {
	case errors.Is(err, store.ErrNotFound): // its row is gone: nobody can ask for it
	case err != nil:
		return fmt.Errorf("look for the end of sandbox %s: %w", id, err)
	case ended == 0 || time.Since(store.FromTime(ended)) < lateTime:
		return nil
	}
	a.mu.Lock()
	l := a.ledgers[id]
	delete(a.ledgers, id)
	delete(a.bindings, id)
	a.mu.Unlock()
	if l != nil {
		if err := l.close(); err != nil {
			return fmt.Errorf("close record of sandbox %s: %w", id, err)
		}
	}
	if recorded {
		return nil
	}
	if project != "" {
		r, err := readRecord(a.conf.Dir, id)
		if err != nil {
			return err
		}
		count := func(n uint64) string { return strconv.FormatUint(n, 10) }
		who := auth.Principal{Kind: auth.System, ID: "commands", Project: project}
		err = a.db.Update(ctx, func(tx *store.Tx) error {
			return audit.Append(ctx, tx, who, audit.SandboxCommands, id, audit.Fields{
				"started": count(r.Started), "refused": count(r.Refused), "held": count(r.Held), "missed": count(r.Missed), "ordered": count(r.Ordered),
				"lines": count(r.Lines), "sha256": r.SHA256, "contract": r.Contract, "complete": strconv.FormatBool(r.Complete),
			})
		})
		if err != nil {
			return fmt.Errorf("record commands of sandbox %s: %w", id, err)
		}
	}
	// Create this file after the audit entry: after a crash in between, the same counts
	// are entered a second time.
	f, err := os.OpenFile(partPath(a.conf.Dir, id, partEnd), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// prune removes the records of sandboxes that ended before a time, and then the oldest
// until the rest has at most total bytes.
func (a *Admission) prune(before time.Time, total int64) error {
	files, err := os.ReadDir(a.conf.Dir)
	if err != nil {
		return fmt.Errorf("list records: %w", err)
	}
	type old struct {
		id    string
		ended time.Time // zero while it lives
		size  int64
		names []string
	}
	olds := map[string]*old{}
	for _, f := range files {
		m := filePattern().FindStringSubmatch(f.Name())
		if m == nil {
			continue
		}
		st, err := f.Info()
		if err != nil {
			continue // removed since
		}
		o := olds[m[1]]
		if o == nil {
			o = &old{id: m[1]}
			olds[m[1]] = o
		}
		o.size += st.Size()
		if m[2] == partEnd {
			o.ended = st.ModTime()
			o.names = append(o.names, f.Name()) // removed last
		} else {
			o.names = slices.Insert(o.names, 0, f.Name())
		}
	}
	var list []*old
	for _, o := range olds {
		if !o.ended.IsZero() {
			list = append(list, o)
		}
	}
	slices.SortFunc(list, func(a, b *old) int { return cmp.Or(b.ended.Compare(a.ended), strings.Compare(a.id, b.id)) })
	var sum int64
	var errs []error
	for _, o := range list { // newest first
		if sum += o.size; sum <= total && !o.ended.Before(before) {
			continue
		}
		for _, name := range o.names {
			errs = append(errs, os.Remove(filepath.Join(a.conf.Dir, name)))
		}
	}
	return errors.Join(errs...)
}
