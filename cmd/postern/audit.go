package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/signing"
	"postern/internal/sink"
	"postern/internal/store"
)

// auditing is what the command audit was asked.
type auditing struct {
	conf Config
	file string // a SQLite database, or an export; empty means the server's database

	serverKey string // file of the server's key; empty means the one in the data directory, for the server's database

	head        string
	checkpoints []string
	keys        []string
	partial     bool

	verb, object, actor, project, since, until string

	limit  int
	after  int64
	format string
	out    string
	resume bool
}

const auditHelp = `
Every verdict, decision and effect is an entry. Each holds the hash of the one
before it, and all are the leaves of a Merkle tree (RFC 6962). Verify names the
first entry that does not fit, and then exits with status 1.

Whoever can write the whole database can write a whole new record, which fits
as well. Against that the server signs checkpoints: the size and the root of the
tree. Keep them, and the public key, where he cannot write:

  postern up --checkpoints /mnt/elsewhere/postern ...
  postern audit keys > postern-audit.key              # once, and by hand
  postern audit verify --checkpoint /mnt/elsewhere/postern --key postern-audit.key

It also says whether each execution has an approval before it, whether the rows
of actions and approvals are as the server wrote them (their seals need the
server's key), and whether the database is an older copy than the one that the
server signed last (audit.checkpoint in the data directory).

--checkpoint takes a file or a directory of them, --key a key, a file of keys or
an https URL (https://HOST/.well-known/postern-audit-keys.json).

To show a stranger that one thing was decided, give him a proof; he needs this
program, or any that reads c2sp.org/tlog-proof, and the public key:

  postern audit prove 812 --out 812.tlog-proof
  postern audit check 812.tlog-proof --key postern-audit.key

An export is JSON Lines, which verify reads as well (--file); --format cef and
syslog are for other programs alone. It goes to standard output, or with --out
to a file; --resume goes on where that ends. Filters (--verb, --object, --actor,
--project, --since, --until) hold for list and export. What leaves entries out
can be verified with --partial only: that each line is what was recorded, not
that none is missing.

All but checkpoint read the database without changing it, whether the server
runs or not; --file examines a copy. The format is in docs/reference/audit.md.`

func auditCommand() *command {
	a := &auditing{}
	verb := func(f func(context.Context, *output) error) runner {
		return func(ctx context.Context, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			return f(ctx, out)
		}
	}
	return &command{
		use: "audit", short: "show, verify, prove or export the record of what happened", long: auditHelp,
		flags: a.flags,
		below: []*command{
			{use: "list", at: byItself, short: "print the newest entries, the oldest of them first", lists: true, flags: a.listFlags, run: verb(a.list)},
			{use: "verify", at: byItself, short: "read the whole record and report what it shows", flags: a.verifyFlags, run: verb(a.verify)},
			{use: "checkpoint", short: "sign the record as it is and print the checkpoint", run: verb(a.checkpoint)},
			{use: "keys", at: byItself, short: "print the public keys of checkpoints", run: verb(a.printKeys)},
			{use: "prove SEQ", short: "write a proof that an entry is in the record", flags: func(fs *pflag.FlagSet) {
				a.projectFlag(fs)
				a.outFlag(fs)
			}, run: a.prove},
			{use: "check FILE", short: "check a proof with the public key alone", at: onFiles, flags: a.keyFlag, run: a.check},
			{use: "export", at: byItself, short: "write the entries with their hashes", flags: a.exportFlags, run: verb(a.export)},
			{use: "sinks", short: "show how far the systems are that receive entries", lists: true, run: verb(a.sinks)},
		},
	}
}

// flags declares what each verb takes: where the record is read from.
func (a *auditing) flags(fs *pflag.FlagSet) {
	a.conf.location(fs)
	fs.StringVar(&a.file, "file", "", "read this SQLite `file`, or for verify this export, instead of the server's database")
}

func (a *auditing) filterFlags(fs *pflag.FlagSet) {
	fs.StringVar(&a.verb, "verb", "", "only entries whose verb begins with `text`, such as egress. or action.approve")
	fs.StringVar(&a.object, "object", "", "only entries about the object with this `id`")
	fs.StringVar(&a.actor, "actor", "", "only entries of this `principal`, such as person:ann, or of a kind, such as person:")
	a.projectFlag(fs)
	fs.StringVar(&a.since, "since", "", "only entries from this `time` on: 2026-11-21, 2026-11-21T15:04:05Z, or 24h for that long ago")
	fs.StringVar(&a.until, "until", "", "only entries before this `time`")
}

func (a *auditing) projectFlag(fs *pflag.FlagSet) {
	fs.StringVar(&a.project, "project", "", "only entries of the project with this `id`")
}

func (a *auditing) listFlags(fs *pflag.FlagSet) {
	a.filterFlags(fs)
	fs.IntVar(&a.limit, "limit", 200, "at most so many `entries`")
}

func (a *auditing) verifyFlags(fs *pflag.FlagSet) {
	fs.StringVar(&a.serverKey, "server-key", "", "`file` of the server's key, with which the seals of entries, actions and approvals are checked (default: server.key in the data directory, unless --file is given)")
	fs.StringVar(&a.head, "head", "", "`SEQ:HASH` that an earlier verify printed and that the chain must contain")
	fs.Var(&list{values: &a.checkpoints}, "checkpoint", "`file` of a kept checkpoint, or a directory of them, that the record must continue; may be repeated")
	a.keyFlag(fs)
	fs.BoolVar(&a.partial, "partial", false, "the export leaves entries out; missing entries are then not noticed")
}

func (a *auditing) keyFlag(fs *pflag.FlagSet) {
	fs.Var(&list{values: &a.keys}, "key", "public `key` of checkpoints, or a file or https URL of keys; may be repeated (default for verify: the keys in the database)")
}

func (a *auditing) exportFlags(fs *pflag.FlagSet) {
	a.filterFlags(fs)
	fs.Int64Var(&a.after, "after", 0, "only entries after this `number`: where another export ended")
	fs.StringVar(&a.format, "format", "jsonl", "`jsonl`, cef or syslog (RFC 5424, a message a line)")
	a.outFlag(fs)
	fs.BoolVar(&a.resume, "resume", false, "--out has the beginning already; continue where it ends")
}

func (a *auditing) outFlag(fs *pflag.FlagSet) {
	fs.StringVar(&a.out, "out", "", "write to this `file` (default: standard output)")
}

// open opens the database that is meant, for reading.
func (a *auditing) open(ctx context.Context) (*store.DB, error) {
	if a.file == "" {
		if err := onThisMachine.reachable(); err != nil {
			return nil, err
		}
	}
	source := a.conf.source()
	if a.file != "" {
		// The working directory of whoever typed the path is what it is relative to.
		abs, err := filepath.Abs(a.file)
		if err != nil {
			return nil, err
		}
		source = abs
	}
	if a.file != "" || a.conf.Database == "" {
		// SQLite says no more than that it was unable to open the file.
		f, err := os.Open(source)
		if err != nil {
			return nil, fmt.Errorf("open database: %w", err)
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
	db, err := store.OpenReadOnly(ctx, source)
	if err != nil {
		return nil, err
	}
	if err := a.useKey(db); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	// What a command has just answered is to be in what this one shows.
	if a.file == "" && a.conf.Database != "" {
		if err := audit.Await(ctx, db); errors.Is(err, audit.ErrPending) {
			fmt.Fprintln(os.Stderr, "note: the newest entries are not shown: they are not in the chain yet, where a server that runs puts them (postern up)")
		} else if err != nil {
			return nil, errors.Join(err, db.Close())
		}
	}
	return db, nil
}

// useKey gives db the server's key, if there is one, so that seals are checked.
func (a *auditing) useKey(db *store.DB) error {
	path := a.serverKey
	if path == "" {
		if a.file != "" {
			return nil // a copy may be of another server
		}
		path = filepath.Join(a.conf.Data, "server.key")
	}
	key, err := readBounded(path, 1<<10)
	if a.serverKey == "" && errors.Is(err, fs.ErrNotExist) {
		return nil // seals are then not checked, and the output says so
	}
	if err != nil {
		return fmt.Errorf("--server-key: %w", err)
	}
	return db.UseKey(key)
}

// view opens the database and runs f in a transaction that sees one state.
func (a *auditing) view(ctx context.Context, f func(tx *store.Tx) error) error {
	db, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer db.Close()
	return db.View(ctx, f)
}

// query returns the filters.
func (a *auditing) query() (q audit.Query, err error) {
	q = audit.Query{Project: a.project, Verb: a.verb, Object: a.object, Actor: a.actor, After: a.after, Limit: a.limit}
	if q.Since, err = timeOf(a.since); err != nil {
		return q, fmt.Errorf("%w: --since: %w", errUsage, err)
	}
	if q.Until, err = timeOf(a.until); err != nil {
		return q, fmt.Errorf("%w: --until: %w", errUsage, err)
	}
	if a.limit < 1 || a.after < 0 {
		return q, fmt.Errorf("%w: --limit: want 1 or more, and --after 0 or more", errUsage)
	}
	return q, nil
}

// timeOf reads a time as people type it; empty is the zero one.
func timeOf(s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	for _, layout := range []string{time.RFC3339Nano, time.DateTime, time.DateOnly} {
		if t, err := time.ParseInLocation(layout, s, time.UTC); err == nil {
			return t, nil
		}
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return time.Now().Add(-d), nil
	}
	return time.Time{}, fmt.Errorf("%q: want a time such as 2026-11-21 or 2026-11-21T15:04:05Z (UTC), or 24h", s)
}

func (a *auditing) list(ctx context.Context, out *output) error {
	q, err := a.query()
	if err != nil {
		return err
	}
	return a.view(ctx, func(tx *store.Tx) error {
		entries, err := audit.List(ctx, tx, q)
		if err != nil {
			return err
		}
		facts := []entryFacts{}
		if !out.json { // programs get the principals themselves
			if err := nameActors(ctx, tx, entries); err != nil {
				return err
			}
		}
		for _, e := range slices.Backward(entries) {
			if !out.json {
				printEntry(out, e)
			}
			facts = append(facts, factsOf(e))
		}
		if out.json {
			return out.object(facts)
		}
		return nil
	})
}

// An entryFacts describes an entry of the record. The database is read here, not
// the API: the hash of an entry is that of the next one's predecessor.
type entryFacts struct {
	Seq     int64           `json:"seq"` // 1 for the first
	At      time.Time       `json:"at"`
	Project string          `json:"project"`
	Actor   string          `json:"actor"` // a principal: "person:ann"
	Verb    string          `json:"verb"`
	Object  string          `json:"object"` // id of what it is about
	Detail  json.RawMessage `json:"detail"`
}

// showEntry prints one entry in full.
func (a *auditing) showEntry(ctx context.Context, seq int64, out *output) error {
	return a.view(ctx, func(tx *store.Tx) error {
		entries, err := audit.List(ctx, tx, audit.Query{Before: seq + 1, Limit: 1})
		if err != nil {
			return err
		}
		if len(entries) == 0 || entries[0].Seq != seq {
			return fmt.Errorf("there is no entry %d", seq)
		}
		e := factsOf(entries[0])
		return out.facts(e, func() error {
			printEntry(out, entries[0])
			return nil
		})
	})
}

func factsOf(e audit.Entry) entryFacts {
	return entryFacts{Seq: e.Seq, At: e.At.UTC(), Project: e.Project, Actor: e.Actor, Verb: string(e.Verb), Object: e.Object, Detail: json.RawMessage(e.Detail)}
}

// nameActors replaces the IDs of credentials in the actors of entries by names for people: an
// agent is called by its inbox's address, a project's key by its name. The agent itself
// chooses the names of further keys, so those of agents do not count.
func nameActors(ctx context.Context, tx *store.Tx, entries []audit.Entry) error {
	var ids []string
	for _, e := range entries {
		if _, id, ok := strings.Cut(e.Actor, ":"); ok && strings.HasPrefix(id, "crd_") && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	keys, err := auth.KeyNames(ctx, tx, ids)
	if err != nil {
		return err
	}
	addresses := map[string]string{}
	for i, e := range entries {
		kind, id, _ := strings.Cut(e.Actor, ":")
		k, ok := keys[id]
		if !ok || string(k.Kind) != kind {
			continue
		}
		name := k.Name
		if k.Inbox != "" {
			if _, known := addresses[k.Inbox]; !known {
				address, _, err := directory.AddressAndMode(ctx, tx, k.Inbox)
				if err != nil && !errors.Is(err, store.ErrNotFound) {
					return err
				}
				addresses[k.Inbox] = address
			}
			name = addresses[k.Inbox]
		} else if k.Kind != auth.Project {
			name = ""
		}
		if name != "" {
			entries[i].Actor = kind + ":" + printable(name)
		}
	}
	return nil
}

func printEntry(out *output, e audit.Entry) {
	var f audit.Fields
	if err := json.Unmarshal([]byte(e.Detail), &f); err != nil {
		f = audit.Fields{"detail": e.Detail}
	}
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(f)) {
		parts = append(parts, fmt.Sprintf("%s=%q", k, f[k])) // %q: hostile text stays on its line
	}
	fmt.Fprintf(out, "%6d  %s  %-34s %-18s %-30q %s\n", e.Seq, e.At.UTC().Format(time.DateTime), e.Actor, e.Verb, e.Object, strings.Join(parts, " "))
}

// readKeys reads what --key says.
func (a *auditing) readKeys(ctx context.Context) (out []audit.Key, err error) {
	for _, k := range a.keys {
		var text []byte
		switch {
		case strings.HasPrefix(k, "https://"), strings.HasPrefix(k, "http://"):
			text, err = fetchKeys(ctx, k)
		case strings.Count(k, "+") >= 2:
			text = []byte(k)
		default:
			text, err = readBounded(k, audit.MaxKeys)
		}
		if err != nil {
			return nil, fmt.Errorf("--key: %w", err)
		}
		keys, err := audit.ParseKeys(text)
		if err != nil {
			return nil, fmt.Errorf("--key %s: %w", k, err)
		}
		out = append(out, keys...)
	}
	return out, nil
}

func (a *auditing) printKeys(ctx context.Context, out *output) error {
	return a.view(ctx, func(tx *store.Tx) error {
		keys, err := signing.CheckpointKeys(ctx, tx, "")
		if err != nil {
			return err
		}
		for _, k := range keys {
			if k.Until.IsZero() {
				fmt.Fprintf(out, "# signs since %s\n", k.From.Format(time.RFC3339))
			} else {
				fmt.Fprintf(out, "# signed from %s to %s\n", k.From.Format(time.RFC3339), k.Until.Format(time.RFC3339))
			}
			fmt.Fprintln(out, k.VKey)
		}
		return nil
	})
}

// A sinkFacts describes how far a system is that receives the entries.
type sinkFacts struct {
	ID      string    `json:"id"`
	Seq     int64     `json:"seq"`    // the last entry that has arrived
	Behind  int64     `json:"behind"` // entries that have not
	Arrived time.Time `json:"arrived_at,omitzero"`
	Error   string    `json:"error"` // why it does not continue; empty if it does
}

func (a *auditing) sinks(ctx context.Context, out *output) error {
	return a.view(ctx, func(tx *store.Tx) error {
		list, err := sink.List(ctx, tx)
		if err != nil {
			return err
		}
		facts := []sinkFacts{}
		rows := [][]string{{"SINK", "ARRIVED", "BEHIND", "LAST", "WHY NOT"}}
		for _, s := range list {
			last := "never"
			if !s.Arrived.IsZero() {
				last = ago(s.Arrived)
			}
			rows = append(rows, []string{printable(s.ID), strconv.FormatInt(s.Seq, 10), strconv.FormatInt(s.Behind, 10), last, cell(s.Error)})
			facts = append(facts, sinkFacts{ID: s.ID, Seq: s.Seq, Behind: s.Behind, Arrived: s.Arrived, Error: s.Error})
		}
		return out.rows(facts, rows)
	})
}

// A pointJSON is what the server tells of a checkpoint.
type pointJSON struct {
	Size       int64
	Checkpoint string
}

func (a *auditing) checkpoint(ctx context.Context, out *output) error {
	if a.file == "" {
		var p pointJSON
		l, err := operator(a.conf)
		if err != nil {
			return err
		}
		if err := l.call(ctx, "POST", "/v1/audit/checkpoint", nil, &p); err != nil {
			return err
		}
		_, err = fmt.Fprint(out, p.Checkpoint)
		return err
	}
	return a.view(ctx, func(tx *store.Tx) error {
		s, err := audit.Latest(ctx, tx)
		if err != nil {
			return err
		}
		_, err = out.bytes().Write(s.Note)
		return err
	})
}

func (a *auditing) prove(ctx context.Context, args []string, out *output) error {
	arg, err := oneArg(args, "SEQ")
	if err != nil {
		return err
	}
	seq, err := strconv.ParseInt(arg, 10, 64)
	if err != nil || seq < 1 {
		return fmt.Errorf("%w: %q is not the number of an entry", errUsage, arg)
	}
	p, err := a.proof(ctx, seq)
	if errors.Is(err, audit.ErrNoCheckpoint) && a.file == "" {
		// It is younger than the newest checkpoint: the server makes one.
		var l *local
		if l, err = operator(a.conf); err == nil {
			err = l.call(ctx, "POST", "/v1/audit/checkpoint", nil, nil)
		}
		if err != nil {
			return fmt.Errorf("entry %d is newer than each checkpoint, and none can be made now: %w", seq, err)
		}
		p, err = a.proof(ctx, seq)
	}
	if errors.Is(err, store.ErrNotFound) {
		return fmt.Errorf("there is no entry %d", seq)
	}
	if err != nil {
		return err
	}
	b, err := p.Marshal()
	if err != nil {
		return err
	}
	if a.out != "" {
		return os.WriteFile(a.out, b, 0o644) //nolint:gosec // a proof is for giving away
	}
	_, err = out.bytes().Write(b)
	return err
}

func (a *auditing) proof(ctx context.Context, seq int64) (p audit.Proof, err error) {
	err = a.view(ctx, func(tx *store.Tx) error {
		p, err = audit.ProveEntry(ctx, tx, a.project, seq)
		return err
	})
	return p, err
}

func (a *auditing) check(ctx context.Context, args []string, out *output) error {
	file, err := oneArg(args, "FILE")
	if err != nil {
		return err
	}
	if len(a.keys) == 0 {
		return fmt.Errorf("%w: --key is missing: a proof is worth what the key is, which the one who shows it must not choose", errUsage)
	}
	keys, err := a.readKeys(ctx)
	if err != nil {
		return err
	}
	known, err := audit.Verifiers(keys)
	if err != nil {
		return err
	}
	b, err := readBounded(file, 4<<20)
	if err != nil {
		return err
	}
	p, err := audit.ParseProof(b)
	if err != nil {
		return err
	}
	k, err := p.Check(known)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "The proof holds: entry %d is in the record of %s, as it is here.\n", p.Entry.Seq, mail.Printable(k.Origin, 300))
	printEntry(out, p.Entry)
	fmt.Fprintf(out, "  signed by  %s, over %d entries\n", mail.Printable(strings.Join(k.Signed, ", "), 1000), k.Size)
	fmt.Fprintf(out, "  root       %s\n", base64.StdEncoding.EncodeToString(k.Root[:]))
	return nil
}

// isDatabase says whether a file is one of SQLite, and not an export.
func isDatabase(file string) (bool, error) {
	f, err := os.Open(file)
	if err != nil {
		return false, err
	}
	defer f.Close()
	magic := []byte("SQLite format 3\x00")
	b := make([]byte, len(magic))
	if _, err := io.ReadFull(f, b); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return false, err
	}
	return bytes.Equal(b, magic), nil
}
