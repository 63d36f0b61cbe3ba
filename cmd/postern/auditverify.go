package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/signing"
	"postern/internal/store"
)

// verify reads the whole record and says what is shown, and what is not.
func (a *auditing) verify(ctx context.Context, out *output) error {
	o := audit.Options{Partial: a.partial, Progress: progress(os.Stderr, "read")}
	if a.head != "" {
		var err error
		if o.Known, err = audit.ParseHead(a.head); err != nil {
			return fmt.Errorf("%w: --head: %w", errUsage, err)
		}
	}
	keys, err := a.readKeys(ctx)
	if err != nil {
		return err
	}
	if a.file != "" {
		database, err := isDatabase(a.file)
		if err != nil {
			return err
		}
		if !database {
			return a.verifyExport(out, o, keys)
		}
	}
	if a.partial {
		return fmt.Errorf("%w: --partial is for exports: a database has all entries", errUsage)
	}
	// The last signed checkpoint is read before the database, so it is never ahead of it.
	beside, err := a.beside()
	if err != nil {
		return err
	}
	ledger := oversight.NewLedger()
	o.Each = ledger.Entry
	return a.view(ctx, func(tx *store.Tx) error {
		given := len(keys) > 0
		if !given {
			if keys, err = signing.CheckpointKeys(ctx, tx, ""); err != nil {
				keys = nil // a copy from before there were any
			}
		}
		known, err := a.keep(&o, keys)
		if err != nil {
			return err
		}
		if beside != nil {
			// The attack: the database is replaced by an older copy.
			k, err := audit.Keep("of the server, "+filepath.Join(a.conf.Data, memory), beside, known)
			if err != nil {
				return err
			}
			o.Kept = append(o.Kept, k)
		}
		r, err := audit.Examine(ctx, tx, o)
		if err != nil {
			return err
		}
		rows, err := a.rows(ctx, tx, ledger)
		if err != nil {
			return err
		}
		signed := 0
		for _, s := range r.Stored {
			if _, _, err := audit.OpenCheckpoint(s.Note, known); err == nil {
				signed++
			}
		}
		report(out, r, o, found{given: given, signed: signed, database: true, rows: rows, keyed: tx.Keyed(), actions: ledger.Actions(), fits: fits(ledger)})
		if err := unfit(out, ledger); err != nil {
			return err
		}
		if signed < len(r.Stored) {
			return fmt.Errorf("%d of the %d checkpoints in the database are signed by no known key", len(r.Stored)-signed, len(r.Stored))
		}
		return nil
	})
}

// beside returns the checkpoint in the data directory, the last that the server
// signed. It returns nil if there is none or if a copy is examined.
func (a *auditing) beside() ([]byte, error) {
	if a.file != "" {
		return nil, nil
	}
	b, err := os.ReadFile(filepath.Join(a.conf.Data, memory))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

// rows compares the actions in the database with the record. It returns false if
// the database is from a version without seals.
func (a *auditing) rows(ctx context.Context, tx *store.Tx, l *oversight.Ledger) (bool, error) {
	columns, err := tx.Columns(ctx, "action")
	if err != nil || !slices.Contains(columns, "seal") {
		return false, err
	}
	if err := l.Rows(ctx, tx); err != nil || !tx.Keyed() {
		return true, err
	}
	for _, s := range append(sealedTables(), oversight.SealedSwitches()) {
		n, err := tx.Broken(ctx, s)
		if err != nil {
			return true, err
		}
		if n > 0 {
			l.Tell(fmt.Sprintf("%d rows of the table %s were not written by the server: their seals do not match", n, s.Table))
		}
	}
	return true, nil
}

func fits(l *oversight.Ledger) bool {
	list, _ := l.Found()
	return len(list) == 0
}

// unfit prints the actions that do not match the record, and returns an error if
// there are any.
func unfit(out *output, l *oversight.Ledger) error {
	list, more := l.Found()
	if len(list) == 0 {
		return nil
	}
	fmt.Fprintln(out, "does not fit:")
	for _, f := range list {
		fmt.Fprintf(out, "  - %s\n", mail.Printable(f.String(), 1000))
	}
	if more > 0 {
		fmt.Fprintf(out, "  - and %d more\n", more)
	}
	return fmt.Errorf("%d mismatches with the record: the database was changed from outside", len(list)+more)
}

func (a *auditing) verifyExport(out *output, o audit.Options, keys []audit.Key) error {
	known, err := a.keep(&o, keys)
	if err != nil {
		return err
	}
	if len(keys) > 0 {
		o.Keys = known
	}
	f, err := os.Open(a.file)
	if err != nil {
		return err
	}
	defer f.Close()
	ledger := oversight.NewLedger()
	if !a.partial { // a part of the record does not show what was approved
		o.Each = ledger.Entry
	}
	r, err := audit.ExamineExport(f, o)
	if err != nil {
		return err
	}
	report(out, r, o, found{given: len(keys) > 0, actions: ledger.Actions(), fits: fits(ledger)})
	return unfit(out, ledger)
}

// keep opens the checkpoints that were kept, with keys.
func (a *auditing) keep(o *audit.Options, keys []audit.Key) (note.Verifiers, error) {
	known, err := audit.Verifiers(keys)
	if err != nil {
		return nil, err
	}
	for _, path := range a.checkpoints {
		files, err := audit.ReadCheckpoints(path)
		if err != nil {
			return nil, fmt.Errorf("--checkpoint: %w", err)
		}
		for name, b := range files {
			k, err := audit.Keep(name, b, known)
			if err != nil {
				return nil, fmt.Errorf("--checkpoint: %w", err)
			}
			o.Kept = append(o.Kept, k)
		}
	}
	return known, nil
}

// What was found beside a report.
type found struct {
	given    bool // keys were given, and not taken from the database
	signed   int  // checkpoints in the database that are signed
	database bool
	rows     bool // the actions in the database were compared with the record
	keyed    bool // and their seals were checked
	actions  int  // actions that have entries
	fits     bool // all of them match the record
}

// report says what a verification has shown, and what it has not.
func report(out *output, r audit.Report, o audit.Options, f found) {
	partial := r.Gaps > 0
	if partial {
		fmt.Fprintf(out, "each line of this part is what was recorded: %d entries, the last is %d\n", r.Entries, r.Head.Seq)
	} else {
		fmt.Fprintf(out, "the audit chain holds: %d entries\nhead %s\n", r.Entries, r.Head)
		fmt.Fprintf(out, "tree %d:%s\n", r.Entries, base64.StdEncoding.EncodeToString(r.Root[:]))
		if b := r.Backlog; b.Pending > 0 {
			fmt.Fprintf(out, "pending %d entries, the oldest since %s\n", b.Pending, b.Oldest.Format(time.RFC3339))
			if b.Late() {
				fmt.Fprintf(out, "warning: a server that runs puts an entry into the chain in a tenth of a second; if one runs, see its log\n")
			}
		}
	}
	fmt.Fprintln(out, "shown:")
	say := func(format string, args ...any) { fmt.Fprintf(out, "  - "+format+"\n", args...) }
	if partial {
		say("each of the %d entries has the hash that was recorded, and goes on from the one before it, but for %d places where entries are missing", r.Entries, r.Gaps)
	} else {
		say("each of the %d entries has the hash that was recorded, and goes on from the one before it", r.Entries)
	}
	if f.database && r.Tree > 0 {
		say("the tree in the database is that of the entries 1 to %d", r.Tree)
	}
	if r.Sealed > 0 {
		say("each entry from %d on was written by a server with this server's key; the entries before it are unchanged since then", r.Sealed)
	}
	if f.actions > 0 && !partial && f.fits {
		say("each execution of the %d actions on the record has before it a person's approval of the same content, or a rule's", f.actions)
	}
	if f.rows && f.fits {
		say("the actions in the database are as their last entries left them")
	}
	if f.rows && f.keyed && f.fits {
		say("the rows of actions, approvals, recipients, switches, policies, modes, allow lists, people, sessions and passkeys are as a server with this server's key wrote them")
	}
	if len(r.Stored) > 0 {
		say("what is signed in the database is of this record: %d of %d checkpoints are by a known key", f.signed, len(r.Stored))
	}
	if o.Known.Seq > 0 && !partial {
		say("the noted head %s is in it: the entries 1 to %d are those of then", o.Known, o.Known.Seq)
	}
	most := o.Known.Seq
	if n := len(r.Kept); n > 0 {
		k := r.Kept[n-1]
		most = max(most, k.Size)
		say("the entries 1 to %d are exactly those that %s has signed: of what was kept, %d fit, the newest %s", k.Size, mail.Printable(fmt.Sprint(k.Signed), 300), n, k.Source)
	}
	fmt.Fprintln(out, "not shown:")
	switch {
	case partial:
		say("that no other entry was left out of this part")
		say("that the entries are in the record: a proof (postern audit prove) shows that")
	case most == 0:
		say("that the record was not written anew as a whole, by somebody who can write it: nothing that was kept elsewhere was given (--checkpoint)")
	case most < r.Head.Seq:
		say("that the entries %d to %d, which are newer than what was kept, were not written anew", most+1, r.Head.Seq)
	}
	if f.rows && !f.keyed {
		say("that the rows of actions and approvals are as the server wrote them: its key was not given (--server-key)")
	}
	if f.database && r.Tree < r.Entries {
		say("that the entries %d to %d are in the tree: the server puts them there when it starts", r.Tree+1, r.Entries)
	}
	if len(o.Kept) > 0 && !f.given {
		say("that the key of the checkpoints is the server's: it is from the database itself (--key)")
	}
	if n := r.Backlog.Pending; n > 0 {
		say("that no entry that was pending beside these %d was removed", n)
	}
	if r.Unread > 0 {
		say("what %d checkpoints in the export are worth: they are not signed by a key that was given (--key), or not of the place where they stand", r.Unread)
	}
	say("that all that happened was recorded, and that what was recorded is true")
}

// progress returns what says now and then on w how far something is. It says
// nothing in the first seconds: most records are short.
func progress(w io.Writer, what string) func(int64) {
	next := time.Now().Add(3 * time.Second)
	return func(done int64) {
		if now := time.Now(); now.After(next) {
			next = now.Add(3 * time.Second)
			fmt.Fprintf(w, "%s %d entries\n", what, done)
		}
	}
}

// formats are those of export, each with how it writes an entry.
func formats(version string) map[string]func(audit.Entry, audit.Digest) ([]byte, error) {
	return map[string]func(audit.Entry, audit.Digest) ([]byte, error){
		"jsonl":  audit.MarshalLine,
		"cef":    func(e audit.Entry, h audit.Digest) ([]byte, error) { return []byte(audit.CEF(e, h, version)), nil },
		"syslog": func(e audit.Entry, h audit.Digest) ([]byte, error) { return audit.Syslog(e, h, hostname(), 1<<20) },
	}
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}

// export writes the entries that are asked for.
func (a *auditing) export(ctx context.Context, out *output) (err error) {
	write, ok := formats(revision())[a.format]
	if !ok {
		return fmt.Errorf("%w: --format: %q: want jsonl, cef or syslog", errUsage, a.format)
	}
	q, err := a.query()
	if err != nil {
		return err
	}
	if a.resume && (a.out == "" || a.format != "jsonl" || a.after > 0) {
		return fmt.Errorf("%w: --resume: needs --out, and --format jsonl; otherwise give --after", errUsage)
	}
	db, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	if a.out != "" {
		f, after, err := openExport(a.out, a.resume)
		if err != nil {
			return err
		}
		defer func() {
			if serr := f.Sync(); err == nil {
				err = serr
			}
			if cerr := f.Close(); err == nil {
				err = cerr
			}
		}()
		q.After = max(q.After, after)
		out = newOutput(f, false, false)
	}
	var newest audit.Signed
	if whole := q.Project == "" && q.Verb == "" && q.Object == "" && q.Actor == "" && q.Since.IsZero() && q.Until.IsZero(); whole && a.format == "jsonl" {
		err := db.View(ctx, func(tx *store.Tx) error {
			newest, err = audit.Latest(ctx, tx)
			return err
		})
		if err != nil {
			newest = audit.Signed{} // there is none, or an old copy cannot have one
		}
	}
	w := bufio.NewWriterSize(out.bytes(), 64<<10)
	count, tell := int64(0), progress(os.Stderr, "exported")
	last, err := audit.Export(ctx, db, q, func(e audit.Entry, hash audit.Digest) error {
		line, err := write(e, hash)
		if err != nil {
			return err
		}
		if newest.Size == e.Seq {
			point, err := audit.MarshalCheckpoint(newest.Note)
			if err != nil {
				return err
			}
			line = slices.Concat(line, []byte("\n"), point)
		}
		count++
		tell(count)
		_, err = w.Write(append(line, '\n'))
		return err
	})
	if ferr := w.Flush(); err == nil {
		err = ferr
	}
	fmt.Fprintf(os.Stderr, "exported %d entries, up to %d; --after goes on from there\n", count, last)
	return err
}

// openExport opens the file of an export. To go on with one it cuts off a last
// line that is not whole and returns the number of the last entry.
func openExport(path string, resume bool) (_ *os.File, after int64, err error) {
	if !resume {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return nil, 0, fmt.Errorf("%w (--resume goes on with an export that is there)", err)
		}
		return f, 0, nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, 0, err
	}
	var end int64
	err = audit.ReadExport(f, func(l audit.Line) error {
		end = l.End
		if l.Checkpoint == nil {
			after = l.Entry.Seq
		}
		return nil
	})
	if err == nil {
		err = f.Truncate(end)
	}
	if err == nil {
		_, err = f.Seek(end, io.SeekStart)
	}
	if err != nil {
		f.Close()
		return nil, 0, fmt.Errorf("go on with export %s: %w", path, err)
	}
	return f, after, nil
}
