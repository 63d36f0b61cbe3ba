package console

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/sink"
	"postern/internal/store"
)

// A keptState is the state of the record, as far as it is known without reading all of it.
type keptState struct {
	Size   int64        // of the record
	Newest audit.Signed // checkpoint
	Any    bool         // there is a checkpoint
	Failed string       // why no checkpoint can be made; empty if one can
	Wait   string       // what is wrong with entries that are not in the chain yet; empty if nothing is
	Sinks  []sink.Status
}

// Newer returns how many entries no checkpoint covers yet.
func (k keptState) Newer() int { return int(k.Size - k.Newest.Size) }

// auditHandlers shows and verifies the audit log.
type auditHandlers struct{ *Server }

func (s auditHandlers) routes() []route {
	return []route{
		{"GET", "/console/audit", views, s.audit},
		{"POST", "/console/audit/verify", views, s.verify},
		{"GET", "/console/audit/checkpoint", views, s.checkpoint},
		{"GET", "/console/audit/{id}", views, s.entry},
		{"GET", "/console/audit/{id}/proof", views, s.proof},
	}
}

// kept returns the state of the record without reading all of it.
func (s auditHandlers) kept(ctx context.Context, tx *store.Tx) (k keptState, err error) {
	if k.Size, err = audit.Size(ctx, tx); err != nil {
		return k, err
	}
	k.Newest, err = audit.Latest(ctx, tx)
	if k.Any = err == nil; err != nil && !errors.Is(err, audit.ErrNoCheckpoint) {
		// The log was modified. Show that to people instead of failing the page.
		k.Failed = err.Error()
	}
	if s.conf.Record != nil {
		if failed := s.conf.Record.State().Failed; failed != nil && !errors.Is(failed, audit.ErrNoCheckpoint) {
			k.Failed = failed.Error()
		}
	}
	b, err := audit.Waiting(ctx, tx)
	if err != nil {
		return k, err
	}
	switch {
	case b.Refused > 0:
		k.Wait = fmt.Sprintf("%d pending entries were not written by this server, or were repeated, and are not put into the record", b.Refused)
	case b.Late():
		k.Wait = fmt.Sprintf("%d entries are pending, the oldest since %s, and are not put into the record", b.Pending, b.Oldest.Format(time.DateTime))
	}
	k.Sinks, err = sink.List(ctx, tx)
	return k, err
}

// An entryPage is one entry of the record.
type entryPage struct {
	told

	Recorded audit.Digest
	Prior    audit.Digest // [audit.Entry.Prev], in a type that templates print as hexadecimal
	Covered  bool         // a checkpoint covers it, so there is a proof
	By       audit.Signed // the first checkpoint that covers it
	Changed  bool         // the entry differs from what was recorded
}

// entryOf returns the number of the entry that a path names.
func entryOf(r *http.Request) (int64, error) {
	n, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("entry %q: %w", r.PathValue("id"), store.ErrNotFound)
	}
	return n, nil
}

func (s auditHandlers) entry(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	seq, err := entryOf(r)
	if err != nil {
		return err
	}
	var v entryPage
	err = audit.View(r.Context(), s.db, func(tx *store.Tx) error { //nolint:contextcheck // r's context is what is passed
		var e audit.Entry
		if e, v.Recorded, err = audit.Read(r.Context(), tx, who.Project, seq); err != nil {
			return err
		}
		one, err := tell(r.Context(), tx, who.Project, []audit.Entry{e})
		if err != nil {
			return err
		}
		v.told = one[0]
		if v.By, err = audit.Covering(r.Context(), tx, seq); errors.Is(err, audit.ErrNoCheckpoint) {
			return nil
		}
		v.Covered = err == nil
		return err
	})
	if err != nil {
		return err
	}
	v.Prior, v.Changed = v.Prev, v.Hash() != v.Recorded
	return s.render(r.Context(), w, http.StatusOK, page{Name: "entry", Title: "Entry " + strconv.FormatInt(seq, 10), Who: who, Here: "audit", Body: v})
}

// proof answers with a file that proves to anybody that an entry is in the record.
func (s auditHandlers) proof(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	seq, err := entryOf(r)
	if err != nil {
		return err
	}
	var b []byte
	err = audit.View(r.Context(), s.db, func(tx *store.Tx) error { //nolint:contextcheck // r's context is what is passed
		p, err := audit.ProveEntry(r.Context(), tx, who.Project, seq)
		if errors.Is(err, audit.ErrNoCheckpoint) {
			return fmt.Errorf("proof of entry %d: %w", seq, store.ErrNotFound)
		}
		if err == nil {
			b, err = p.Marshal()
		}
		return err
	})
	if err != nil {
		return err
	}
	save(w, fmt.Sprintf("entry-%d.tlog-proof", seq), b)
	return nil
}

// checkpoint answers with the newest checkpoint, to be kept elsewhere.
func (s auditHandlers) checkpoint(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	var newest audit.Signed
	err := audit.View(r.Context(), s.db, func(tx *store.Tx) (err error) { //nolint:contextcheck // r's context is what is passed
		newest, err = audit.Latest(r.Context(), tx)
		return err
	})
	if errors.Is(err, audit.ErrNoCheckpoint) {
		return fmt.Errorf("checkpoint: %w", store.ErrNotFound)
	}
	if err != nil {
		return err
	}
	save(w, fmt.Sprintf("postern-%d%s", newest.Size, audit.Extension), newest.Note)
	return nil
}

// save answers with a text file that the browser saves, whatever its content is.
func save(w http.ResponseWriter, name string, b []byte) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Content-Disposition", `attachment; filename="`+name+`"`)
	_, _ = w.Write(b) // the browser may be gone
}

// A verification is the result of reading the whole record.
type verification struct {
	Head    string
	Root    string // of the tree, base64
	Count   int    // entries that are valid
	Known   string // the head that the record had to contain, or empty
	Pasted  bool   // a kept checkpoint was given
	Broken  string // what is not valid; empty if all is
	At      time.Time
	Covered int64 // entries up to this one match a kept checkpoint or the noted head
	Stored  int   // checkpoints in the database
	Signed  int   // number of those that a known key has signed
	Source  string
}

// Newer returns how many entries no kept checkpoint or noted head covers.
func (v verification) Newer() int { return v.Count - int(v.Covered) }

// verify reads the whole audit log. It is a POST although it changes nothing:
// it is expensive, and a link or a prefetch must not start it.
func (s auditHandlers) verify(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx := r.Context()
	v := verification{Known: strings.TrimSpace(r.PostForm.Get("known")), At: time.Now()}
	var o audit.Options
	if v.Known != "" {
		var err error
		if o.Known, err = audit.ParseHead(v.Known); err != nil {
			return fmt.Errorf("%w: the known head must look like 123:0a1b…, as shown by an earlier verification", errForm)
		}
	}
	keys, err := s.recordKeys(ctx)
	if err != nil {
		return err
	}
	// A browser sends line ends as CR LF.
	pasted := bytes.TrimLeft([]byte(strings.ReplaceAll(r.PostForm.Get("checkpoint"), "\r\n", "\n")), " \n\t")
	for i, b := range audit.SplitNotes(pasted) {
		if !bytes.HasSuffix(b, []byte("\n")) {
			b = append(b, '\n')
		}
		k, err := audit.Keep(fmt.Sprintf("that was pasted (no. %d)", i+1), b, keys)
		if err != nil {
			return fmt.Errorf("%w: checkpoint: it is not signed by this server", errForm)
		}
		o.Kept, v.Pasted = append(o.Kept, k), true
	}
	select {
	case s.verifying <- struct{}{}:
		defer func() { <-s.verifying }()
	case <-ctx.Done():
		return ctx.Err()
	}
	var report audit.Report
	err = audit.View(ctx, s.db, func(tx *store.Tx) (err error) {
		report, err = audit.Examine(ctx, tx, o)
		return err
	})
	if broken, ok := errors.AsType[*audit.BrokenError](err); ok {
		v.Broken = broken.Error()
	} else if errors.Is(err, audit.ErrTwoRecords) {
		v.Broken = err.Error()
	} else if err != nil {
		return err
	}
	v.Head, v.Count, v.Stored = report.Head.String(), int(report.Head.Seq), len(report.Stored)
	v.Root = base64.StdEncoding.EncodeToString(report.Root[:])
	for _, c := range report.Stored {
		if _, _, err := audit.OpenCheckpoint(c.Note, keys); err == nil {
			v.Signed++
		}
	}
	s.remember(v)
	v.Covered = o.Known.Seq
	if n := len(report.Kept); n > 0 {
		v.Covered = max(v.Covered, report.Kept[n-1].Size)
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "verify", Title: "Record verified", Who: who, Here: "audit", Body: v})
}

// recordKeys returns the public keys of checkpoints.
func (s auditHandlers) recordKeys(ctx context.Context) (note.Verifiers, error) {
	if s.conf.RecordKeys == nil {
		return audit.Verifiers(nil)
	}
	keys, err := s.conf.RecordKeys(ctx)
	if err != nil {
		return nil, err
	}
	return audit.Verifiers(keys)
}
