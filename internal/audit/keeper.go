package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/store"
)

// KeeperConfig says when a [Keeper] makes checkpoints and where it keeps them.
type KeeperConfig struct {
	// Signer returns the current signing key. It is called for each checkpoint, since
	// keys are rotated. Required.
	Signer func(context.Context) (note.Signer, error)
	// Every is the number of new entries after which a checkpoint is made; zero means
	// 1000.
	Every int64
	// Interval is the longest time that a new entry waits for a checkpoint; zero means
	// 5 minutes.
	Interval time.Duration
	// Memory is a file outside the database in which this server keeps its last
	// checkpoint; empty means that it is lost when the server exits.
	Memory string
	// Dir is a directory that gets a file for each checkpoint. File is a file that
	// holds the newest one. Empty means none.
	Dir, File string
	// Poll is the interval at which the keeper looks for new entries; zero means 2
	// seconds.
	Poll time.Duration
}

// A Keeper makes the checkpoints of a record. It signs a tree only if it extends the
// last signed one, of which it keeps a copy outside the database. The attack: somebody
// who can write the database, but does not have the server's key, rewrites the record
// and lets the server sign the forgery.
//
// A Keeper is safe for concurrent use. Several servers may keep one record.
type Keeper struct {
	log  *slog.Logger
	db   *store.DB
	conf KeeperConfig

	mu     sync.Mutex // guards the fields below; held while a checkpoint is made
	last   TreeHead   // last tree head signed or read; zero if there is none
	at     time.Time  // when last was signed
	put    int64      // size of the newest checkpoint in Dir, File and Memory
	failed error      // why the last attempt failed; nil if it succeeded
}

// NewKeeper returns a keeper of the record in db. It reads the checkpoints that an
// earlier run has kept in files; missing files are not an error.
func NewKeeper(log *slog.Logger, db *store.DB, conf KeeperConfig) (*Keeper, error) {
	if conf.Signer == nil {
		return nil, errors.New("keep audit: no signer")
	}
	if conf.Every <= 0 {
		conf.Every = 1000
	}
	if conf.Interval <= 0 {
		conf.Interval = 5 * time.Minute
	}
	if conf.Poll <= 0 {
		conf.Poll = 2 * time.Second
	}
	k := &Keeper{log: log, db: db, conf: conf}
	if conf.Dir != "" {
		if err := os.MkdirAll(conf.Dir, 0o755); err != nil { //nolint:gosec // checkpoints are public: others copy them
			return nil, fmt.Errorf("keep checkpoints: %w", err)
		}
	}
	// The record must extend the largest checkpoint found in any of these files. The
	// attack: only one of them is replaced by an older one.
	for _, file := range append(k.newestIn(conf.Dir), conf.Memory, conf.File) {
		if file == "" {
			continue
		}
		h, err := readKept(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read kept checkpoint %s: %w", file, err)
		}
		if h.Size > k.last.Size {
			k.last = h
		}
	}
	return k, nil
}

// readKept returns the tree head of the checkpoint in a file.
func readKept(file string) (TreeHead, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return TreeHead{}, err
	}
	return claimed(b)
}

// Signed reports whether there is a signed tree head that the record must continue.
func (k *Keeper) Signed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.last.Size > 0
}

// Check returns an error that wraps [ErrFork] if the record does not continue
// the last signed one: the database was replaced by an older copy, or rewritten.
// Checkpoints outside are never ahead of the database, since they are written
// after the signed record is committed.
func (k *Keeper) Check(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.last.Size == 0 {
		return nil
	}
	err := k.db.View(ctx, func(tx *store.Tx) error { return extends(ctx, tx, k.last) })
	if errors.Is(err, ErrFork) {
		k.failed = err
	}
	return err
}

// Accept accepts the record although [Keeper.Check] found that it does not
// continue the signed one, and returns the last signed tree head. It renames the
// checkpoints that do not match: only they show what the record was.
func (k *Keeper) Accept(ctx context.Context) (was TreeHead, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var files []string
	if k.conf.Dir != "" {
		if files, err = filepath.Glob(filepath.Join(k.conf.Dir, "*"+Extension)); err != nil {
			return was, fmt.Errorf("put checkpoints aside: %w", err)
		}
	}
	for _, file := range append(files, k.conf.Memory, k.conf.File) {
		if file == "" {
			continue
		}
		h, err := readKept(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = k.db.View(ctx, func(tx *store.Tx) error { return extends(ctx, tx, h) })
		}
		if errors.Is(err, ErrFork) {
			err = aside(file)
		}
		if err != nil {
			return was, fmt.Errorf("put checkpoint aside: %s: %w", file, err)
		}
	}
	was = k.last
	k.last, k.put, k.failed = TreeHead{}, 0, nil
	return was, nil
}

// aside renames a file so that it is no longer read as a checkpoint.
func aside(file string) error {
	for n := 1; ; n++ {
		to := fmt.Sprintf("%s.replaced-%d", file, n)
		if err := os.Link(file, to); errors.Is(err, fs.ErrExist) {
			continue // name taken by an earlier one
		} else if err != nil {
			return err
		}
		return os.Remove(file)
	}
}

// Extension is the extension of checkpoint files.
const Extension = ".checkpoint"

// newestIn returns the file of the newest checkpoint in dir, or nil. Names are
// zero-padded sizes, so they sort by size.
func (k *Keeper) newestIn(dir string) []string {
	if dir == "" {
		return nil
	}
	names, err := filepath.Glob(filepath.Join(dir, "*"+Extension))
	if err != nil || len(names) == 0 {
		return nil
	}
	return names[len(names)-1:] // Glob sorts
}

// State describes the work of a [Keeper].
type State struct {
	Failed error // why the last checkpoint failed; nil if it succeeded
}

// State returns the outcome of the last attempt to make a checkpoint.
func (k *Keeper) State() State {
	k.mu.Lock()
	defer k.mu.Unlock()
	return State{Failed: k.failed}
}

// Make makes a checkpoint of the current record, unless the newest one already covers
// all entries, and returns the newest. It returns [ErrFork] if the record does not
// extend the last signed checkpoint, and [ErrNoCheckpoint] if there are no entries.
func (k *Keeper) Make(ctx context.Context) (s Signed, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer func() { k.failed = err }()
	signer, err := k.conf.Signer(ctx)
	if err != nil {
		return Signed{}, err
	}
	// Without the newest entries the checkpoint is true as well; the next one has them.
	if err := errors.Join(ignore(Settle(ctx, k.db), ErrPending), Fill(ctx, k.db, nil)); err != nil {
		return Signed{}, err
	}
	err = k.db.Update(ctx, func(tx *store.Tx) error {
		if k.last.Size > 0 {
			if err := extends(ctx, tx, k.last); err != nil {
				return err
			}
		}
		if _, err := Checkpoint(ctx, tx, signer); err != nil {
			return err
		}
		s, err = Latest(ctx, tx)
		return err
	})
	if err != nil {
		return Signed{}, err
	}
	k.last, k.at = s.TreeHead, s.At
	return s, k.keepLocked(s)
}

// ignore returns err, or nil if it wraps what.
func ignore(err, what error) error {
	if errors.Is(err, what) {
		return nil
	}
	return err
}

// keepLocked writes a checkpoint to Dir, File and Memory. A crash in between is
// harmless: put is zero after a restart, so all of them are written again.
func (k *Keeper) keepLocked(s Signed) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("keep checkpoint: %w", err)
		}
	}()
	if s.Size == k.put {
		return nil
	}
	if k.conf.Dir != "" {
		path := filepath.Join(k.conf.Dir, fmt.Sprintf("%020d%s", s.Size, Extension))
		switch old, err := readKept(path); {
		case err == nil && old.Root != s.Root:
			return fmt.Errorf("%s is another of %d entries: %w", path, s.Size, ErrFork)
		case err == nil:
		case errors.Is(err, fs.ErrNotExist):
			if err := store.WriteFile(path, s.Note, 0o644); err != nil {
				return err
			}
		default:
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	if k.conf.File != "" {
		if err := store.WriteFile(k.conf.File, s.Note, 0o644); err != nil {
			return err
		}
	}
	if k.conf.Memory != "" {
		if err := store.WriteFile(k.conf.Memory, s.Note, 0o600); err != nil {
			return err
		}
	}
	k.put = s.Size
	return nil
}

// due reports whether a checkpoint should be made now.
func (k *Keeper) due(ctx context.Context) (bool, error) {
	var size int64
	var newest Signed
	err := k.db.View(ctx, func(tx *store.Tx) (err error) {
		if err := tx.One(ctx, `select seq + (select count(*) from audit_pending where refused_at = 0) from audit_head where id = 1`, nil, &size); err != nil {
			return err
		}
		newest, err = Latest(ctx, tx)
		return err
	})
	if err != nil && !errors.Is(err, ErrNoCheckpoint) {
		return false, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed != nil {
		return true, nil // even without new entries: retry, so that the error is logged again
	}
	// A checkpoint that another server made is kept in this server's files too.
	if newest.Size > k.put {
		return true, nil
	}
	return size > newest.Size && (size-newest.Size >= k.conf.Every || time.Since(newest.At) >= k.conf.Interval), nil
}

// Run makes checkpoints until ctx is done, and one more at the end. It logs failures
// and retries with a delay that doubles up to the configured interval.
func (k *Keeper) Run(ctx context.Context) error {
	t := time.NewTicker(k.conf.Poll)
	defer t.Stop()
	wait, until := k.conf.Poll, time.Time{}
	for {
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			if _, err := k.Make(last); err != nil && !errors.Is(err, ErrNoCheckpoint) {
				k.log.WarnContext(last, "make last checkpoint", "err", err)
			}
			return ctx.Err()
		case <-t.C:
		}
		if time.Now().Before(until) {
			continue
		}
		due, err := k.due(ctx)
		if err == nil && due {
			_, err = k.Make(ctx)
		}
		switch {
		case err == nil:
			wait, until = k.conf.Poll, time.Time{}
		case errors.Is(err, ErrNoCheckpoint), ctx.Err() != nil:
		default:
			k.log.ErrorContext(ctx, "no checkpoint of the audit can be made", "err", err)
			wait = min(2*wait, k.conf.Interval)
			until = time.Now().Add(wait)
		}
	}
}

// ReadCheckpoints reads signed checkpoints from a file, which may hold several, or
// from the files of a directory. The keys of the map say where each was found.
func ReadCheckpoints(path string) (map[string][]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read checkpoint: %w", err)
	}
	files := []string{path}
	if info.IsDir() {
		if files, err = filepath.Glob(filepath.Join(path, "*"+Extension)); err != nil {
			return nil, fmt.Errorf("read checkpoints: %w", err)
		}
		if len(files) == 0 {
			return nil, fmt.Errorf("read checkpoints: %s has none: their names end in %s", path, Extension)
		}
	}
	out := map[string][]byte{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, fmt.Errorf("read checkpoint: %w", err)
		}
		for i, n := range SplitNotes(b) {
			name := f
			if i > 0 {
				name = fmt.Sprintf("%s (no. %d)", f, i+1)
			}
			out[name] = n
		}
	}
	return out, nil
}

// SplitNotes splits a file of concatenated signed notes. A note is a text, an empty
// line, and signature lines that begin with an em dash.
func SplitNotes(b []byte) (out [][]byte) {
	var cur []byte
	signed := false
	for line := range bytes.Lines(b) {
		sig := strings.HasPrefix(string(line), "— ")
		if signed && !sig {
			out, cur, signed = append(out, cur), nil, false
			if len(bytes.TrimSpace(line)) == 0 {
				continue
			}
		}
		cur = append(cur, line...)
		signed = signed || sig
	}
	if len(bytes.TrimSpace(cur)) > 0 {
		out = append(out, cur)
	}
	return out
}
