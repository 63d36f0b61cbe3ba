package store_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"postern/internal/store"
	"postern/internal/storetest"
)

// eachSource runs fn with the source of an empty database, on SQLite and on
// PostgreSQL, and with the driver's name.
func eachSource(t *testing.T, fn func(t *testing.T, driver, source string)) {
	t.Run("sqlite", func(t *testing.T) { fn(t, "sqlite", filepath.Join(t.TempDir(), "postern.db")) })
	t.Run("postgres", func(t *testing.T) {
		source := storetest.PostgresURL(t)
		if source == "" {
			t.Skipf("%s is not set", storetest.PostgresVar)
		}
		fn(t, "pgx", source)
	})
}

// last is the number of this program's last migration.
func last(t *testing.T) int {
	t.Helper()
	names, err := fs.Glob(store.Migrations(), "migrations/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// later returns the migrations of a program that is n versions ahead.
func later(t *testing.T, n int) fs.FS {
	t.Helper()
	files := fstest.MapFS{}
	names, err := fs.Glob(store.Migrations(), "migrations/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		text, err := fs.ReadFile(store.Migrations(), name)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = &fstest.MapFile{Data: text}
	}
	for i := range n {
		number := len(names) + 1 + i
		files[fmt.Sprintf("migrations/%04d_future.sql", number)] = &fstest.MapFile{Data: fmt.Appendf(nil, "create table future_%d (id text primary key)", number)}
	}
	return files
}

// oldDatabase makes a database as programs did that recorded migrations by
// their former names: those for which has returns true.
func oldDatabase(t *testing.T, driver, source string, has func(name string) bool) {
	t.Helper()
	db, err := sql.Open(driver, source)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	exec := func(query string, args ...any) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), query, args...); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	exec(`create table migration (name text primary key)`)
	names, err := fs.Glob(store.Migrations(), "migrations/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for i, former := range store.FormerNames {
		if !has(former) {
			continue
		}
		text, err := fs.ReadFile(store.Migrations(), names[i])
		if err != nil {
			t.Fatal(err)
		}
		for stmt := range strings.SplitSeq(string(text), ";\n") {
			// What was added to this file in its first hours, after it had run.
			if former == "0013_seal" && (strings.Contains(stmt, "telegram") || strings.Contains(stmt, "column parts")) {
				continue
			}
			exec(stmt)
		}
		exec(`insert into migration (name) values ($1)`, "migrations/"+former+".sql")
	}
}

// schema returns every column of every table but those of the history itself.
func schema(t *testing.T, db *store.DB, driver string) (out []string) {
	t.Helper()
	query := `select m.name || '.' || p.name from sqlite_master m join pragma_table_info(m.name) p where m.type = 'table' order by 1`
	if driver == "pgx" {
		query = `select table_name || '.' || column_name from information_schema.columns where table_schema = current_schema() order by 1`
	}
	err := db.View(t.Context(), func(tx *store.Tx) (err error) {
		out, err = tx.Strings(t.Context(), query)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestDatabasesOfTheFormerNumberingOpen opens databases of several earlier
// versions, some of which lack migrations that are numbered before their last.
func TestDatabasesOfTheFormerNumberingOpen(t *testing.T) {
	for name, has := range map[string]func(string) bool{
		"the last of them": func(string) bool { return true },
		"the first":        func(n string) bool { return n == "0001_init" },
		"before mail":      func(n string) bool { return n < "0006" },
		// Files were added side by side, not in the order of their names.
		"in between": func(n string) bool {
			return n < "0008" && !slices.Contains([]string{"0006_send", "0007_search"}, n) || n == "0008_mta_sts"
		},
		"before people": func(n string) bool { return n < "0013" && n != "0011_people" && n != "0011_notify" },
	} {
		t.Run(name, func(t *testing.T) {
			eachSource(t, func(t *testing.T, driver, source string) {
				oldDatabase(t, driver, source, has)
				db, err := store.Open(t.Context(), source, "")
				if err != nil {
					t.Fatal(err)
				}
				defer db.Close()
				fresh := filepath.Join(t.TempDir(), "fresh.db")
				if driver == "pgx" {
					fresh = storetest.PostgresURL(t)
				}
				want, err := store.Open(t.Context(), fresh, "")
				if err != nil {
					t.Fatal(err)
				}
				defer want.Close()
				if got, want := schema(t, db, driver), schema(t, want, driver); !slices.Equal(got, want) {
					t.Errorf("an old database has the columns\n%v\nand a new one\n%v", got, want)
				}
				err = db.View(t.Context(), func(tx *store.Tx) error {
					var n, newest int
					if err := tx.One(t.Context(), `select count(*), max(number) from schema_version`, nil, &n, &newest); err != nil {
						return err
					}
					if n != last(t) || newest != n {
						t.Errorf("%d versions up to %d, want %d without a gap", n, newest, last(t))
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestOldProgramRefusesNewDatabase upgrades a database and opens it with the
// program from before: it stops, says who wrote it and what to do, and changes
// nothing.
func TestOldProgramRefusesNewDatabase(t *testing.T) {
	eachSource(t, func(t *testing.T, driver, source string) {
		ctx := t.Context()
		old, err := store.Open(ctx, source, "postern v1.0.0")
		if err != nil {
			t.Fatal(err)
		}
		before := schema(t, old, driver)
		old.Close()
		newer, err := store.OpenFiles(ctx, source, "postern v1.2.3", later(t, 2))
		if err != nil {
			t.Fatal(err)
		}
		after := schema(t, newer, driver)
		newer.Close()
		if len(after) != len(before)+2 {
			t.Errorf("the upgrade made %d columns of %d, want 2 more", len(after), len(before))
		}
		for name, open := range map[string]func(context.Context, string) (*store.DB, error){
			"to write": func(ctx context.Context, source string) (*store.DB, error) { return store.Open(ctx, source, "") },
			"to read":  store.OpenReadOnly,
		} {
			db, err := open(ctx, source)
			if !errors.Is(err, store.ErrNewerSchema) {
				if err == nil {
					db.Close()
				}
				t.Fatalf("%s: %v, want ErrNewerSchema", name, err)
			}
			for _, want := range []string{fmt.Sprintf("version %d (%04[1]d_future)", last(t)+2), "postern v1.2.3", fmt.Sprintf("up to version %d", last(t)), "backup"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%s: the error lacks %q: %v", name, want, err)
				}
			}
		}
		again, err := store.OpenFiles(ctx, source, "postern v1.2.3", later(t, 2))
		if err != nil {
			t.Fatalf("with the newer program: %v", err)
		}
		defer again.Close()
		if got := schema(t, again, driver); !slices.Equal(got, after) {
			t.Errorf("the refusal changed the schema: %v", got)
		}
	})
}

// TestUnknownMigrationIsRefused opens a database of a version between two
// releases, whose migration has a name that no release knows.
func TestUnknownMigrationIsRefused(t *testing.T) {
	eachSource(t, func(t *testing.T, driver, source string) {
		oldDatabase(t, driver, source, func(string) bool { return true })
		raw, err := sql.Open(driver, source)
		if err != nil {
			t.Fatal(err)
		}
		_, err = raw.ExecContext(t.Context(), `insert into migration (name) values ('migrations/0014_experiment.sql')`)
		if err := errors.Join(err, raw.Close()); err != nil {
			t.Fatal(err)
		}
		if _, err := store.Open(t.Context(), source, ""); !errors.Is(err, store.ErrNewerSchema) || !strings.Contains(err.Error(), "0014_experiment.sql") {
			t.Errorf("Open = %v, want ErrNewerSchema with the migration's name", err)
		}
	})
}

// TestFailedMigrationLeavesNothing runs a migration whose second statement
// fails: neither its first nor its record stays, and the next attempt works.
func TestFailedMigrationLeavesNothing(t *testing.T) {
	eachSource(t, func(t *testing.T, driver, source string) {
		broken := later(t, 1).(fstest.MapFS) //nolint:forcetypeassert // later makes it
		name, table := fmt.Sprintf("%04d_future", last(t)+1), fmt.Sprintf("future_%d", last(t)+1)
		broken["migrations/"+name+".sql"] = &fstest.MapFile{Data: []byte("create table " + table + " (id text primary key);\ncreate tabel oops")}
		if _, err := store.OpenFiles(t.Context(), source, "", broken); err == nil || !strings.Contains(err.Error(), "migrate "+name) {
			t.Fatalf("a broken migration: %v", err)
		}
		db, err := store.Open(t.Context(), source, "") // the program from before still may
		if err != nil {
			t.Fatal(err)
		}
		if got := schema(t, db, driver); slices.Contains(got, table+".id") {
			t.Error("the table of the broken migration stays")
		}
		db.Close()
		if db, err = store.OpenFiles(t.Context(), source, "", later(t, 1)); err != nil {
			t.Fatalf("the mended migration: %v", err)
		}
		db.Close()
	})
}

// TestProgramsMigrateAtOnce starts programs on one empty database: each
// migration runs once.
func TestProgramsMigrateAtOnce(t *testing.T) {
	eachSource(t, func(t *testing.T, driver, source string) {
		n := 3
		if driver == "sqlite" {
			n = 1 // one process owns the file, see cmd
		}
		var wg sync.WaitGroup
		for range n {
			wg.Go(func() {
				db, err := store.Open(t.Context(), source, "")
				if err != nil {
					t.Error(err)
					return
				}
				db.Close()
			})
		}
		wg.Wait()
	})
}

// TestMigrationsAreNumberedOnce refuses to build a history with a gap or with a
// number twice.
func TestMigrationsAreNumberedOnce(t *testing.T) {
	for name, add := range map[string]string{
		"twice": fmt.Sprintf("migrations/%04d_other.sql", last(t)), "a gap": fmt.Sprintf("migrations/%04d_other.sql", last(t)+2), "no number": "migrations/other.sql",
	} {
		files := later(t, 0).(fstest.MapFS) //nolint:forcetypeassert // later makes it
		files[add] = &fstest.MapFile{Data: []byte("select 1")}
		if _, err := store.OpenFiles(t.Context(), filepath.Join(t.TempDir(), "x.db"), "", files); err == nil || !strings.Contains(err.Error(), "the next number is") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
