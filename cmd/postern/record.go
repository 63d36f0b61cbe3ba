package main

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/delivery"
	"postern/internal/directory"
	"postern/internal/lineage"
	"postern/internal/lookalike"
	"postern/internal/mailbox"
	"postern/internal/notify"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/permit"
	"postern/internal/rulebook"
	"postern/internal/secret"
	"postern/internal/signing"
	"postern/internal/sink"
	"postern/internal/store"
	"postern/internal/tracing"
)

// RecordTo is when the audit's checkpoints are made, and where they are kept
// outside of the database.
type RecordTo struct {
	Checkpoints        string        // directory in which each checkpoint becomes a file; empty means none
	CheckpointTo       string        // file that holds the newest; empty means none
	CheckpointEvery    int64         // new entries that make a checkpoint
	CheckpointInterval time.Duration // how long a new entry waits for one at most

	AcceptRollback bool // the database may be an older copy of what was signed

	Sinks  []string // URLs of the systems to which entries are sent as well, see package sink
	Traces string   // URL of the collector of spans, see package sink; empty means none
}

func (c *RecordTo) flags(fs *pflag.FlagSet) {
	pathVar(fs, &c.Checkpoints, "checkpoints", "", "`directory` in which each signed checkpoint of the audit becomes a file; best on another machine's disk, or one that only grows (default: they are in the database, and the last in the data directory)")
	pathVar(fs, &c.CheckpointTo, "checkpoint-to", "", "`file` that holds the newest checkpoint of the audit")
	fs.Int64Var(&c.CheckpointEvery, "checkpoint-every", 1000, "new `entries` of the audit that make a checkpoint")
	fs.DurationVar(&c.CheckpointInterval, "checkpoint-interval", 5*time.Minute, "how long a new entry of the audit waits for a checkpoint at most")
	fs.BoolVar(&c.AcceptRollback, "accept-rollback", false, "start although the database is older than the last signed checkpoint, or the audit was rewritten, or the files of messages and runs are lost, for instance after you restored a backup; everything that waits or was approved is put before people again")
	fs.Var(&list{values: &c.Sinks}, "audit-sink", "`URL` of a system to which entries of the audit are sent as well, such as syslog+tls://log.example:6514 or otlp+https://collector.example:4318; may be repeated. See docs/reference/audit.md")
	fs.StringVar(&c.Traces, "traces", "", "`URL` of an OpenTelemetry collector that gets the steps of creates, resumes, pauses and forks as spans, such as otlp+http://127.0.0.1:4318; settings as for --audit-sink. postern trace shows the newest ones without it")
}

func (c *RecordTo) validate(bad func(flag, format string, args ...any)) {
	if c.CheckpointEvery <= 0 || c.CheckpointInterval <= 0 {
		bad("checkpoint-every", "neither it nor --checkpoint-interval may be 0 or less")
	}
	for _, u := range c.Sinks {
		if err := sink.Check(u); err != nil {
			bad("audit-sink", "%v", err)
		}
	}
	if c.Traces != "" {
		if err := sink.CheckSpans(c.Traces); err != nil {
			bad("traces", "%v", err)
		}
	}
}

// newTraces returns the recorder of the steps of operations on sandboxes.
func (d *daemon) newTraces(ctx context.Context) (*tracing.Recorder, error) {
	if d.conf.Traces == "" {
		return tracing.New(revision(), nil), nil
	}
	to, err := sink.Spans(ctx, d.conf.Traces, d.resolver)
	if err != nil {
		return nil, err
	}
	return tracing.New(revision(), to), nil
}

// memory is the file in the data directory in which a server remembers which
// checkpoint it signed last.
const memory = "audit.checkpoint"

// buildRecord puts entries of a former version into the audit's tree, before
// new ones come, and makes its keeper.
func (d *daemon) buildRecord(ctx context.Context) (err error) {
	err = audit.Fill(ctx, d.db, func(done, all int64) {
		d.log.InfoContext(ctx, "put the audit's entries into its tree", "done", done, "all", all)
	})
	if _, broken := errors.AsType[*audit.BrokenError](err); broken {
		// The server starts all the same: the attack would otherwise be to stop
		// it. It signs nothing, and says so again and again.
		d.log.ErrorContext(ctx, "the audit does not verify", "err", err)
	} else if err != nil {
		return err
	}
	d.sequencer = audit.NewSequencer(d.log, d.db)
	name := signing.CheckpointName(d.conf.MailDomain)
	d.record, err = audit.NewKeeper(d.log, d.db, audit.KeeperConfig{
		Signer: func(ctx context.Context) (note.Signer, error) { return d.ring.CheckpointSigner(ctx, name) },
		Every:  d.conf.CheckpointEvery, Interval: d.conf.CheckpointInterval,
		Memory: filepath.Join(d.conf.Data, memory), Dir: d.conf.Checkpoints, File: d.conf.CheckpointTo,
	})
	if err != nil {
		return err
	}
	d.sinks, err = sink.New(d.log, d.db, sink.Config{URLs: d.conf.Sinks, Resolver: d.resolver, Host: hostname(), Version: revision(), Holder: rand.Text()})
	return err
}

// checkRecord compares the record with what this server signed last, and the database with
// the data directory, and puts actions that cannot be trusted before people. It is called
// before anything is executed. It returns an error if the record does not continue the
// signed one, unless the operator accepts that, and if the directories of blobs are those of
// another database.
func (d *daemon) checkRecord(ctx context.Context) error {
	err := d.gate.Adopt(ctx, d.conf.AcceptRollback, sealedTables()...)
	if errors.Is(err, audit.ErrOtherKey) {
		return fmt.Errorf(`%w: servers that share a database share the file server.key: copy it from the other's data directory.
  If it is lost, start once with --accept-rollback: what waits or was approved is put before people again`, err)
	}
	if err != nil {
		return err
	}
	// What a former process has left. Not before Adopt: a server with another key would
	// refuse it.
	if err := d.sequencer.Recover(ctx); err != nil && !errors.Is(err, audit.ErrPending) {
		return err
	}
	err = d.record.Check(ctx)
	forked := errors.Is(err, audit.ErrFork)
	switch {
	case errors.Is(err, audit.ErrFork) && !d.conf.AcceptRollback:
		// The attack: an older copy of the database, in which actions that have been
		// executed since are still approved.
		d.log.ErrorContext(ctx, "the database is not the one that this server wrote last: it is an older copy, or the audit was changed", "err", err)
		return fmt.Errorf(`the record in %s does not go on from the checkpoint that this server signed: %w
  If you put a backup in its place, start once with --accept-rollback: what waits, or was approved and may have been sent since, is put before people again.
  If you did not, somebody has changed the database: keep it as it is, with %s, and see docs/reference/audit.md`,
			store.Redact(d.conf.source()), err, filepath.Join(d.conf.Data, memory))
	case errors.Is(err, audit.ErrFork):
		if err := d.acceptRecord(ctx, err); err != nil {
			return err
		}
	case err != nil:
		return err
	}
	if err := d.matchBlobs(ctx); err != nil {
		return err
	}
	if err := d.checkLineage(ctx, forked); err != nil {
		return err
	}
	n, err := d.gate.Sweep(ctx)
	if n > 0 {
		d.log.WarnContext(ctx, "actions whose rows were changed are put before people again", "count", n)
	}
	return err
}

// sealedTables returns the tables with sealed rows, except those of the gate.
func sealedTables() []store.Sealed {
	return []store.Sealed{
		auth.SealedPeople(), auth.SealedChanges(), auth.SealedSessions(), auth.SealedSetups(), people.SealedPasskeys(), notify.SealedLinks(), notify.SealedCodes(), notify.SealedSlackLinks(), notify.SealedSlackCodes(),
		rulebook.SealedVersions(), directory.Sealed(), mailbox.SealedAllowed(), lookalike.Sealed(), mailbox.SealedConnectCodes(), delivery.Sealed(), secret.Sealed(), secret.SealedFormer(), permit.Sealed(),
	}
}

// acceptRecord accepts a record that does not continue the signed one.
func (d *daemon) acceptRecord(ctx context.Context, why error) error {
	was, err := d.record.Accept(ctx)
	if err != nil {
		return err
	}
	n, err := d.askAgain(ctx, audit.RecordRollback, "the database was replaced by an older copy: it may have been executed since", audit.Fields{
		"signed_entries": strconv.FormatInt(was.Size, 10), "signed_root": base64.StdEncoding.EncodeToString(was.Root[:]), "why": why.Error(),
	})
	if err == nil {
		d.log.WarnContext(ctx, "accepted a record that does not continue the signed one", "err", why, "asked_again", n)
	}
	return err
}

// checkLineage asks people again about everything that was approved if the database or the
// data directory is a copy. Asked says that they were just asked, for another reason.
func (d *daemon) checkLineage(ctx context.Context, asked bool) (err error) {
	used, err := d.gate.Used(ctx)
	if err != nil {
		return err
	}
	conf := lineage.Config{Data: d.conf.Data, Original: !used || d.record.Signed() && !asked}
	if d.conf.Database == "" {
		conf.File = d.conf.source()
	}
	if d.lineage, err = lineage.Look(ctx, d.db, conf); err != nil {
		return err
	}
	if why := d.lineage.Copy(); why != "" && !asked {
		// The attack, or the accident: what is approved in a copy was executed by the original
		// after the copy was taken, or will be.
		n, err := d.askAgain(ctx, audit.RecordCopy, "the database or the data directory is a copy ("+why+"): it may have been executed by the original", audit.Fields{"why": why})
		if err != nil {
			return err
		}
		d.log.WarnContext(ctx, "the database or the data directory is a copy: what was approved is put before people again", "why", why, "asked_again", n)
	}
	return d.db.View(ctx, func(tx *store.Tx) error {
		e, err := audit.Last(ctx, tx, audit.Database, []audit.Verb{audit.RecordCopy, audit.RecordRollback})
		switch {
		case errors.Is(err, store.ErrNotFound):
			return nil
		case err == nil:
			d.gate.Void(e.At)
		case errors.Is(err, audit.ErrUnsealed):
			d.gate.Void(time.Now()) // somebody changed the entry: assume the worst
		default:
			return err
		}
		return nil
	})
}

// askAgain has people asked again about every open action, ends all permits, and records
// that, with the verb and the fields. It returns how many actions these were. Afterwards no
// approval from before has an effect.
func (d *daemon) askAgain(ctx context.Context, verb audit.Verb, why string, f audit.Fields) (n int, err error) {
	who := auth.Principal{Kind: auth.System, ID: "record"}
	if n, err = d.gate.Distrust(ctx, why); err != nil {
		return 0, err
	}
	ended, err := d.permits.EndAll(ctx, who)
	if err != nil {
		return 0, err
	}
	f["asked_again"], f["permits_ended"] = strconv.Itoa(n), strconv.Itoa(ended)
	return n, d.db.Update(ctx, func(tx *store.Tx) error {
		return audit.Append(ctx, tx, who, verb, audit.Database, f)
	})
}

// matchBlobs checks that the directories with the files of messages and runs are those of
// the database.
func (d *daemon) matchBlobs(ctx context.Context) error {
	for _, name := range []string{"blobs", "artifacts", "runs"} {
		dir := filepath.Join(d.conf.Data, name)
		blobs, err := store.OpenBlobs(dir)
		if err == nil {
			err = lineage.Match(ctx, d.db, name, blobs, d.conf.AcceptRollback)
		}
		if errors.Is(err, lineage.ErrOtherBlobs) {
			return fmt.Errorf(`%s is not the directory of this database: %w
  Servers that share a database share the directories blobs, artifacts and runs: mount them, or make links to them.
  If you restored the database, put the copies of these directories beside it, each with its file store.id.
  If the files are lost, start once with --accept-rollback: messages and files of runs that were in them cannot be read any more`, dir, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readRecord reads the whole record once, before anything is executed: a changed
// or removed entry could be the one which says that a mail was sent. If the record
// does not verify, all waiting actions are put before people again, once for each
// finding.
func (d *daemon) readRecord(ctx context.Context) error {
	ledger := oversight.NewLedger()
	var broken string
	err := audit.View(ctx, d.db, func(tx *store.Tx) error {
		_, err := audit.Examine(ctx, tx, audit.Options{Each: ledger.Entry, Progress: func(done int64) {
			d.log.DebugContext(ctx, "read the audit", "entries", done)
		}})
		if b, ok := errors.AsType[*audit.BrokenError](err); ok {
			broken = b.Error()
			return nil
		}
		if err != nil {
			return err
		}
		return ledger.Rows(ctx, tx)
	})
	if err != nil {
		return fmt.Errorf("read the audit: %w", err)
	}
	found, more := ledger.Found()
	for _, f := range found {
		d.log.WarnContext(ctx, "an action does not fit the audit", "what", f.String())
	}
	if broken == "" {
		return nil
	}
	d.log.ErrorContext(ctx, "the audit does not verify", "err", broken, "more", more)
	said := false
	err = audit.View(ctx, d.db, func(tx *store.Tx) error {
		es, err := audit.List(ctx, tx, audit.Query{Verb: string(audit.RecordBroken), Limit: 1000})
		said = slices.ContainsFunc(es, func(e audit.Entry) bool { return e.Details()["why"] == broken })
		return err
	})
	if err != nil || said {
		return err
	}
	n, err := d.gate.Distrust(ctx, "the audit does not verify, so it is unknown what has been executed")
	if err != nil {
		return err
	}
	return d.db.Update(ctx, func(tx *store.Tx) error {
		return audit.Append(ctx, tx, auth.Principal{Kind: auth.System, ID: "record"}, audit.RecordBroken, "", audit.Fields{"why": broken, "asked_again": strconv.Itoa(n)})
	})
}

// recordKeys are the public keys of the audit's checkpoints.
func (d *daemon) recordKeys(ctx context.Context) ([]audit.Key, error) {
	return d.ring.CheckpointKeys(ctx, signing.CheckpointName(d.conf.MailDomain))
}

// keepMark shows other servers of a PostgreSQL database that this one runs. If a server took
// this one's place, while the connection was lost, that one has been told that it is a copy.
func (d *daemon) keepMark(ctx context.Context) error {
	for {
		err := d.mark.Run(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		d.log.WarnContext(ctx, "another server has the mark of this one", "err", err)
	}
}
