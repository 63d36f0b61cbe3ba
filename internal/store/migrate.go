package store

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"
)

// A migration is a file NNNN_name.sql. Its number is its place in the history
// of the schema: the files are numbered 0001, 0002 and so on without a gap, and
// a database has the version of its last one. Migrations only go forward, and a
// file that was released is never changed.
//
//go:embed migrations/*.sql
var migrations embed.FS

// ErrNewerSchema means that the database was written by a newer version of this
// program. It must not be opened: this version does not know the rules that its
// rows obey.
var ErrNewerSchema = errors.New("the database is newer than this program")

// formerNames are the names under which the first migrations are recorded in
// table migration. Several shared a number then, and databases of that time,
// and copies that are only read, have these names for good.
var formerNames = []string{
	"0001_init", "0002_action_inbox", "0003_sandbox_lifecycle", "0004_event", "0004_webhook", "0005_volume", "0006_action",
	"0006_domain", "0006_inbox", "0006_mail_event", "0006_message", "0006_quarantine", "0006_send", "0006_signing", "0007_delivery",
	"0007_mail_webhook", "0007_search", "0007_sweep", "0008_mta_sts", "0009_waits", "0010_oversight", "0011_audit", "0011_gate",
	"0011_modes", "0011_notify", "0011_people", "0011_policy", "0012_audit_object", "0013_fleet", "0013_people", "0013_seal",
	"0013_webhook", "0014_person_change", "0014_revision",
}

// sealMigration is the number of the one migration that was changed after it
// had been applied somewhere: it adds more columns now than it first did.
const sealMigration = 31

// A migration is one step of the schema's history.
type migration struct {
	number   int
	name     string // such as "0035_name"
	recorded string // its primary key in table migration
	text     string
}

// readMigrations returns the steps in dir of files, in order.
func readMigrations(files fs.FS, dir string) (out []migration, err error) {
	names, err := fs.Glob(files, dir+"/*.sql") // sorted
	if err != nil {
		return nil, err
	}
	for i, file := range names {
		m := migration{number: i + 1, name: strings.TrimSuffix(path.Base(file), ".sql"), recorded: "migrations/" + path.Base(file)}
		if number, _, _ := strings.Cut(m.name, "_"); number != fmt.Sprintf("%04d", m.number) {
			return nil, fmt.Errorf("migration %s: the next number is %04d", m.name, m.number)
		}
		if i < len(formerNames) {
			m.recorded = "migrations/" + formerNames[i] + ".sql"
		}
		text, err := fs.ReadFile(files, file)
		if err != nil {
			return nil, err
		}
		m.text = string(text)
		out = append(out, m)
	}
	return out, nil
}

// migrate brings the schema to the version of the last of steps. program is the
// version of this program, which is recorded with each step; empty means that it
// is not known.
func (db *DB) migrate(ctx context.Context, program string, steps []migration) error {
	// When several programs start at once, PostgreSQL answers all but one that
	// the table exists, in spite of "if not exists". The second attempt finds it.
	for _, table := range []string{
		`create table if not exists migration (name text primary key)`,
		`create table if not exists schema_version (number bigint primary key, name text not null, program text not null, applied_at bigint not null)`,
	} {
		if _, err := db.write.ExecContext(ctx, table); err != nil {
			if _, again := db.write.ExecContext(ctx, table); again != nil {
				return fmt.Errorf("create migration table: %w", err)
			}
		}
	}
	var applied []string
	err := db.Update(ctx, func(tx *Tx) (err error) {
		if applied, err = tx.Strings(ctx, `select name from migration`); err != nil {
			return err
		}
		if err := checkVersion(ctx, tx, applied, steps); err != nil {
			return err
		}
		return db.adopt(ctx, tx, applied, steps)
	})
	if err != nil {
		return err
	}
	for _, m := range steps {
		// Databases of the time of the former names may lack a step before their last.
		if slices.Contains(applied, m.recorded) {
			continue
		}
		err := db.Update(ctx, func(tx *Tx) error {
			// On PostgreSQL a second program waits here until the first has committed.
			fresh, err := tx.Changed(ctx, `insert into migration (name) values ($1) on conflict do nothing`, m.recorded)
			if err != nil || !fresh {
				return err
			}
			for _, stmt := range m.statements() {
				if _, err := tx.ExecContext(ctx, stmt); err != nil {
					return err
				}
			}
			return m.record(ctx, tx, program, time.Now())
		})
		if err != nil {
			return fmt.Errorf("migrate %s: %w", m.name, err)
		}
	}
	return nil
}

// checkVersion returns [ErrNewerSchema], with what to do, if the database has a
// migration that steps does not.
func checkVersion(ctx context.Context, tx *Tx, applied []string, steps []migration) error {
	var number, at int64
	var name, program string
	err := tx.One(ctx, `select number, name, program, applied_at from schema_version order by number desc limit 1`, nil, &number, &name, &program, &at)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	if number > int64(len(steps)) {
		program = cmp.Or(program, "a newer version")
		return fmt.Errorf("%w: its schema has version %d (%s), written by %s on %s, and this program knows up to version %d; use that version or a later one, or restore a backup that was made before the upgrade",
			ErrNewerSchema, number, name, program, FromTime(at).Format(time.DateOnly), len(steps))
	}
	// Names that are in no list come from a version between two releases.
	for _, a := range applied {
		if !slices.ContainsFunc(steps, func(m migration) bool { return m.recorded == a }) {
			return fmt.Errorf("%w: it has the migration %s, which this program does not know; use a later version, or restore a backup that was made before the upgrade", ErrNewerSchema, path.Base(a))
		}
	}
	return nil
}

// adopt numbers the migrations of a database that has them by their names
// alone. Which program applied them, and when, is not known.
func (db *DB) adopt(ctx context.Context, tx *Tx, applied []string, steps []migration) error {
	for _, m := range steps {
		if !slices.Contains(applied, m.recorded) {
			continue
		}
		n := 0
		if err := tx.One(ctx, `select count(*) from schema_version where number = $1`, []any{m.number}, &n); err != nil {
			return err
		}
		if n > 0 {
			continue
		}
		if m.number == sealMigration {
			if err := db.addMissingColumns(ctx, tx, m); err != nil {
				return err
			}
		}
		if err := m.record(ctx, tx, "", time.Time{}); err != nil {
			return err
		}
	}
	return nil
}

var addColumn = regexp.MustCompile(`alter table (\w+) add column (\w+) `)

// addMissingColumns runs those statements of m whose column is not there.
func (db *DB) addMissingColumns(ctx context.Context, tx *Tx, m migration) error {
	query := `select count(*) from pragma_table_info($1) where name = $2`
	if db.postgres {
		query = `select count(*) from information_schema.columns where table_schema = current_schema() and table_name = $1 and column_name = $2`
	}
	for _, stmt := range m.statements() {
		names := addColumn.FindStringSubmatch(stmt)
		if names == nil {
			continue
		}
		n := 0
		if err := tx.One(ctx, query, []any{names[1], names[2]}, &n); err != nil {
			return err
		}
		if n > 0 {
			continue
		}
		if _, err := tx.ExecContext(ctx, stmt); err != nil {
			return fmt.Errorf("complete %s: %w", m.name, err)
		}
	}
	return nil
}

// statements returns the statements of m: PostgreSQL's extended protocol takes
// one at a time.
func (m migration) statements() (out []string) {
	for stmt := range strings.SplitSeq(m.text, ";\n") {
		if strings.TrimSpace(stmt) != "" {
			out = append(out, stmt)
		}
	}
	return out
}

// record writes down that m was applied.
func (m migration) record(ctx context.Context, tx *Tx, program string, at time.Time) error {
	_, err := tx.ExecContext(ctx, `insert into schema_version (number, name, program, applied_at) values ($1, $2, $3, $4) on conflict do nothing`,
		m.number, m.name, program, Time(at))
	return err
}

// checkReadOnly is checkVersion for a database that is only read, and so may be
// older than table schema_version.
func (db *DB) checkReadOnly(ctx context.Context, steps []migration) error {
	return db.View(ctx, func(tx *Tx) error {
		query := `select count(*) from sqlite_master where type = 'table' and name = $1`
		if db.postgres {
			query = `select count(*) from information_schema.tables where table_schema = current_schema() and table_name = $1`
		}
		n := 0
		if err := tx.One(ctx, query, []any{"schema_version"}, &n); err != nil || n == 0 {
			return err
		}
		applied, err := tx.Strings(ctx, `select name from migration`)
		if err != nil {
			return err
		}
		return checkVersion(ctx, tx, applied, steps)
	})
}
