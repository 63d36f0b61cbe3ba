package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"path/filepath"
	"time"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/signing"
	"postern/internal/sink"
)

// RecordTo is when the audit's checkpoints are made, and where they are kept
// outside of the database.
type RecordTo struct {
	Checkpoints        string        // directory in which each checkpoint becomes a file; empty means none
	CheckpointTo       string        // file that holds the newest; empty means none
	CheckpointEvery    int64         // new entries that make a checkpoint
	CheckpointInterval time.Duration // how long a new entry waits for one at most

	Sinks []string // URLs of the systems to which entries are sent as well, see package sink
}

func (c *RecordTo) flags(fs *flag.FlagSet) {
	fs.StringVar(&c.Checkpoints, "checkpoints", "", "`directory` in which each signed checkpoint of the audit becomes a file; best on another machine's disk, or one that only grows (default: they are in the database, and the last in the data directory)")
	fs.StringVar(&c.CheckpointTo, "checkpoint-to", "", "`file` that holds the newest checkpoint of the audit")
	fs.Int64Var(&c.CheckpointEvery, "checkpoint-every", 1000, "new `entries` of the audit that make a checkpoint")
	fs.DurationVar(&c.CheckpointInterval, "checkpoint-interval", 5*time.Minute, "how long a new entry of the audit waits for a checkpoint at most")
	fs.Var(&list{values: &c.Sinks}, "audit-sink", "`URL` of a system to which entries of the audit are sent as well, such as syslog+tls://log.example:6514 or otlp+https://collector.example:4318; may be repeated. See docs/audit.md")
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
		d.log.ErrorContext(ctx, "the audit does not hold", "err", err)
	} else if err != nil {
		return err
	}
	name := signing.CheckpointName(d.conf.MailDomain)
	d.record, err = audit.NewKeeper(d.log, d.db, audit.KeeperConfig{
		Signer: func(ctx context.Context) (note.Signer, error) { return d.ring.CheckpointSigner(ctx, name) },
		Every:  d.conf.CheckpointEvery, Interval: d.conf.CheckpointInterval,
		Memory: filepath.Join(d.conf.Data, memory), Dir: d.conf.Checkpoints, File: d.conf.CheckpointTo,
	})
	if err != nil {
		return err
	}
	d.sinks, err = sink.New(d.log, d.db, sink.Config{URLs: d.conf.Sinks, Host: hostname(), Version: revision(), Holder: rand.Text()})
	return err
}

// recordKeys are the public keys of the audit's checkpoints.
func (d *daemon) recordKeys(ctx context.Context) ([]audit.Key, error) {
	return d.ring.CheckpointKeys(ctx, signing.CheckpointName(d.conf.MailDomain))
}
