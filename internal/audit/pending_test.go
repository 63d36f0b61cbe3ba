package audit_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/store"
	"postern/internal/storetest"
)

// eachConcurrent runs fn on the databases on which entries are pending first.
func eachConcurrent(t *testing.T, fn func(t *testing.T, db *store.DB)) {
	t.Helper()
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		if !db.Concurrent() {
			t.Skip("entries are never pending there")
		}
		fn(t, db)
	})
}

// leave appends entries about things and leaves them pending.
func leave(t testing.TB, db *store.DB, objects ...string) {
	t.Helper()
	for _, o := range objects {
		update(t, db, func(ctx context.Context, tx *store.Tx) error {
			return audit.Append(ctx, tx, ann, audit.ActionApprove, o, audit.Fields{"k": o})
		})
	}
}

func execute(t testing.TB, db *store.DB, statements ...string) {
	t.Helper()
	update(t, db, func(ctx context.Context, tx *store.Tx) error {
		for _, s := range statements {
			if _, err := tx.ExecContext(ctx, s); err != nil {
				return fmt.Errorf("%s: %w", s, err)
			}
		}
		return nil
	})
}

// chained returns the objects of the chain's entries, the first first, without what is
// pending.
func chained(t testing.TB, db *store.DB) string {
	t.Helper()
	var list []audit.Entry
	err := db.View(t.Context(), func(tx *store.Tx) (err error) {
		list, err = audit.List(t.Context(), tx, audit.Query{Limit: 1 << 20})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range slices.Backward(list) {
		out = append(out, e.Object)
	}
	return strings.Join(out, " ")
}

// settle returns when the chain has all entries. On a busy machine, another server's
// step may take longer than [audit.Settle] waits for it.
func settle(t testing.TB, db *store.DB) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; {
		err := audit.Settle(t.Context(), db)
		if err == nil {
			return
		}
		if !errors.Is(err, audit.ErrPending) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

func backlog(t testing.TB, db *store.DB) (b audit.Backlog) {
	t.Helper()
	err := db.View(t.Context(), func(tx *store.Tx) (err error) {
		b, err = audit.Waiting(t.Context(), tx)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// examineAsItIs examines the record without sequencing what is pending, and returns the
// objects of all entries.
func examineAsItIs(t testing.TB, db *store.DB) (r audit.Report, objects string, err error) {
	t.Helper()
	var all []string
	verr := db.View(t.Context(), func(tx *store.Tx) error {
		r, err = audit.Examine(t.Context(), tx, audit.Options{Each: func(e audit.Entry) error {
			all = append(all, e.Object)
			return nil
		}})
		return nil
	})
	if verr != nil {
		t.Fatal(verr)
	}
	return r, strings.Join(all, " "), err
}

// TestPendingSurvivesACrash: what is committed is in the record once, wherever the
// process that appended it, or the one that sequenced, was killed.
func TestPendingSurvivesACrash(t *testing.T) {
	eachConcurrent(t, func(t *testing.T, db *store.DB) {
		leave(t, db, "a", "b", "c")
		if got := chained(t, db); got != "" {
			t.Fatalf("the chain has %q before anybody sequences", got)
		}
		// The appending process is gone; another one verifies, and loses nothing of it.
		db = storetest.Reopen(t, db)
		r, all, err := examineAsItIs(t, db)
		if err != nil || all != "a b c" || r.Head.Seq != 0 || r.Backlog.Pending != 3 || r.Backlog.Oldest.IsZero() || r.Backlog.Late() {
			t.Errorf("examined %q, head %v, backlog %+v, %v", all, r.Head, r.Backlog, err)
		}
		// The sequencing one is killed before its commit, and then at it.
		lost := errors.New("killed")
		err = db.Aside(t.Context(), func(tx *store.Tx) error {
			if n, err := audit.Sequence(t.Context(), tx, "audit chain"); err != nil || n != 3 {
				t.Errorf("sequenced %d, %v; want 3", n, err)
			}
			return lost
		})
		if !errors.Is(err, lost) {
			t.Fatal(err)
		}
		undo := storetest.FailCommits(t, db, "audit_entry")
		if err := audit.Settle(t.Context(), db); err == nil {
			t.Error("the commit did not fail")
		}
		undo()
		if got, b := chained(t, db), backlog(t, db); got != "" || b.Pending != 3 {
			t.Errorf("after two crashes the chain has %q and %d are pending, want 3", got, b.Pending)
		}
		// The database is restored from a dump, which has other IDs in the same order.
		execute(t, db, `create table dump as select * from audit_pending`, `delete from audit_pending`,
			`insert into audit_pending (tx, n, at, project_id, actor, verb, object, detail, seal) select tx, n, at, project_id, actor, verb, object, detail, seal from dump order by id`)
		settle(t, db)
		settle(t, db)
		if got, b := chained(t, db), backlog(t, db); got != "a b c" || b != (audit.Backlog{}) {
			t.Errorf("the chain has %q and %+v are pending", got, b)
		}
		// An entry that is rolled back leaves nothing.
		err = db.Update(t.Context(), func(tx *store.Tx) error {
			return errors.Join(audit.Append(t.Context(), tx, ann, audit.ActionApprove, "d", nil), lost)
		})
		if !errors.Is(err, lost) || backlog(t, db).Pending != 0 {
			t.Errorf("err = %v, backlog = %+v", err, backlog(t, db))
		}
		if r, all, err := examineAsItIs(t, db); err != nil || all != "a b c" || r.Head.Seq != 3 || r.Tree != 3 || r.Sealed != 1 {
			t.Errorf("examined %q, %+v, %v", all, r, err)
		}
	})
}

// TestTwoSequencers: of any number that sequence at a time, one moves each entry.
func TestTwoSequencers(t *testing.T) {
	eachConcurrent(t, func(t *testing.T, db *store.DB) {
		leave(t, db, "a", "b")
		// The lock is the first bar: the other one does nothing, and does not wait.
		err := db.Aside(t.Context(), func(tx *store.Tx) error {
			if n, err := audit.Sequence(t.Context(), tx, "audit chain"); err != nil || n != 2 {
				t.Errorf("sequenced %d, %v; want 2", n, err)
			}
			return db.Aside(t.Context(), func(other *store.Tx) error {
				if n, err := audit.Sequence(t.Context(), other, "audit chain"); err == nil || n != 0 {
					t.Errorf("a second one sequenced %d, %v; want an error, since the first one is running", n, err)
				}
				return nil
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		// If it should fail, the unique names are the second.
		leave(t, db, "c", "d")
		other := make(chan error, 1)
		err = db.Aside(t.Context(), func(tx *store.Tx) error {
			if n, err := audit.Sequence(t.Context(), tx, "a lock"); err != nil || n != 2 {
				t.Errorf("sequenced %d, %v; want 2", n, err)
			}
			go func() {
				other <- db.Aside(t.Context(), func(tx *store.Tx) error { // waits for the row of the head
					_, err := audit.Sequence(t.Context(), tx, "another lock")
					return err
				})
			}()
			return waitForLock(t, tx)
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := <-other; err == nil {
			t.Error("a second one, without the lock, moved what the first had moved")
		}
		if got := chained(t, db); got != "a b c d" {
			t.Errorf("the chain has %q", got)
		}
		if _, _, err := examineAsItIs(t, db); err != nil {
			t.Error(err)
		}
	})
}

// waitForLock returns once another transaction waits for a lock.
func waitForLock(t *testing.T, tx *store.Tx) error {
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		n := 0
		err := tx.One(t.Context(), `select count(*) from pg_locks where not granted and locktype = 'transactionid' and transactionid = pg_current_xact_id()::xid`, nil, &n)
		if err != nil || n > 0 {
			return err
		}
	}
	return errors.New("no transaction waits")
}

// TestOrderOfPending: while servers sequence, the entries of each transaction stay
// together, and those about one thing are in the order of the commits.
func TestOrderOfPending(t *testing.T) {
	eachConcurrent(t, func(t *testing.T, db *store.DB) {
		const things, writers, rounds = 3, 2, 15
		ctx, stop := context.WithCancel(t.Context())
		var sequencers sync.WaitGroup
		for range 2 {
			sequencers.Go(func() {
				for ctx.Err() == nil {
					if err := audit.Settle(ctx, storetest.Reopen(t, db)); err != nil && !errors.Is(err, audit.ErrPending) && ctx.Err() == nil {
						t.Error(err)
					}
				}
			})
		}
		var wg sync.WaitGroup
		count := make([]int, things) // guarded by the turn of each thing, and by nothing else
		for thing := range things {
			for range writers {
				wg.Go(func() {
					object := fmt.Sprint("thing_", thing)
					for range rounds {
						err := db.UpdateIn(t.Context(), store.Thing(ann.Project, object), func(tx *store.Tx) error {
							k := count[thing]
							for part := range 3 {
								f := audit.Fields{"k": strconv.Itoa(k), "part": strconv.Itoa(part)}
								if err := audit.Append(t.Context(), tx, ann, audit.ActionVote, object, f); err != nil {
									return err
								}
							}
							count[thing]++
							return nil
						})
						if err != nil {
							t.Error(err)
						}
					}
				})
			}
		}
		wg.Wait()
		stop()
		sequencers.Wait()
		settle(t, db)
		var list []audit.Entry
		view(t, db, func(ctx context.Context, tx *store.Tx) (err error) {
			list, err = audit.List(ctx, tx, audit.Query{Limit: 1 << 20})
			return err
		})
		slices.Reverse(list)
		if len(list) != things*writers*rounds*3 {
			t.Fatalf("%d entries, want %d", len(list), things*writers*rounds*3)
		}
		next := map[string]int{}
		for i := 0; i < len(list); i += 3 {
			for part, e := range list[i : i+3] {
				f := e.Details()
				if e.Object != list[i].Object || f["k"] != strconv.Itoa(next[e.Object]) || f["part"] != strconv.Itoa(part) {
					t.Fatalf("entry %d is part %s of no. %s of %s; want part %d of no. %d of %s", e.Seq, f["part"], f["k"], e.Object, part, next[e.Object], list[i].Object)
				}
			}
			next[list[i].Object]++
		}
		if _, _, err := examineAsItIs(t, db); err != nil {
			t.Error(err)
		}
	})
}

// TestForgedPending: the attacker writes the table of pending entries and has no key.
// No row that the server did not write, or that is in the chain already, gets there,
// and verifying says so. Others are not held up.
func TestForgedPending(t *testing.T) {
	const again = `insert into audit_pending (tx, n, at, project_id, actor, verb, object, detail, seal) select tx, n, at, project_id, actor, verb, object, detail, seal from stolen`
	tests := []struct {
		name   string
		before []string // while the entries "one" and "two" are pending; "old" is in the chain and table stolen has its row
		after  []string // when they are in the chain
		want   string   // of the chain
		broken string   // in the error of verifying
	}{
		{"changed", []string{`update audit_pending set actor = 'person:eve' where object = 'one'`}, nil, "old two", "did not write"},
		{"another time", []string{`update audit_pending set at = at + 1 where object = 'one'`}, nil, "old two", "did not write"},
		{"renamed", []string{`update audit_pending set n = n + 1 where object = 'one'`}, nil, "old two", "did not write"},
		{"inserted", []string{`insert into audit_pending (tx, n, at, project_id, actor, verb, object, detail, seal) select tx, n + 1, at, project_id, actor, verb, 'forged', detail, seal from audit_pending where object = 'one'`}, nil, "old one two", "did not write"},
		{"there twice", []string{`insert into audit_pending (tx, n, at, project_id, actor, verb, object, detail, seal) select tx, n, at, project_id, actor, verb, object, detail, seal from audit_pending where object = 'one'`}, nil, "old one two", "did before"},
		{"put back", []string{again}, nil, "old one two", "did before"},
		{"put back later", nil, []string{again}, "old one two", "did before"},
		{"put back where nothing forbids it", nil, []string{`drop index audit_entry_tx`, again}, "old one two", "did before"},
		{"put back after the chain forgot its name", nil, []string{`update audit_entry set tx = 0, n = 0 where object = 'old'`, again}, "old one two old", "entry 1: it is not sealed"},
		{"put back after the chain got it wrong", nil, []string{`update audit_entry set n = 7 where object = 'old'`, again}, "old one two old", "entry 1: it is not sealed"},
	}
	eachConcurrent(t, func(t *testing.T, db *store.DB) {
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				execute(t, db, `drop table if exists stolen`, `delete from audit_entry`, `delete from audit_node`, `delete from audit_pending`, `update audit_head set seq = 0, hash = '', tree_size = 0, tree_edge = ''`,
					`create unique index if not exists audit_entry_tx on audit_entry (tx, n) where tx <> 0`)
				leave(t, db, "old")
				execute(t, db, `create table stolen as select * from audit_pending`)
				settle(t, db)
				leave(t, db, "one", "two")
				execute(t, db, tt.before...)
				if tt.before != nil {
					if _, _, err := examineAsItIs(t, db); err == nil {
						t.Error("verifying finds nothing while it is pending")
					}
				}
				settle(t, db)
				execute(t, db, tt.after...)
				settle(t, db)
				if got := chained(t, db); got != tt.want {
					t.Errorf("the chain has %q, want %q", got, tt.want)
				}
				if _, _, err := examineAsItIs(t, db); err == nil || !strings.Contains(err.Error(), tt.broken) {
					t.Errorf("verify = %v, want %q", err, tt.broken)
				}
				leave(t, db, "later")
				settle(t, db)
				if got := chained(t, db); got != tt.want+" later" {
					t.Errorf("the chain has %q after that, want %q", got, tt.want+" later")
				}
			})
		}
	})
}

// TestLastSeesPending: the newest entry about a thing is the pending one, in its own
// transaction and in others; an old one that the attacker makes pending again is not.
func TestLastSeesPending(t *testing.T) {
	eachConcurrent(t, func(t *testing.T, db *store.DB) {
		verbs := []audit.Verb{audit.ActionApprove, audit.ActionReject}
		last := func() string {
			t.Helper()
			var e audit.Entry
			var n int
			err := db.View(t.Context(), func(tx *store.Tx) (err error) {
				if e, err = audit.Last(t.Context(), tx, "act_1", verbs); err == nil {
					n, err = audit.Count(t.Context(), tx, "act_1", e.Verb)
				}
				return err
			})
			if err != nil {
				return err.Error()
			}
			return fmt.Sprint(e.Verb, " ", n)
		}
		leave(t, db, "act_1", "act_2")
		if got := last(); got != "action.approve 1" {
			t.Errorf("last is %s", got)
		}
		execute(t, db, `create table stolen as select * from audit_pending where object = 'act_1'`)
		settle(t, db)
		if got := last(); got != "action.approve 1" {
			t.Errorf("in the chain, last is %s", got)
		}
		update(t, db, func(ctx context.Context, tx *store.Tx) error {
			if err := audit.Append(ctx, tx, ann, audit.ActionReject, "act_1", nil); err != nil {
				return err
			}
			e, err := audit.Last(ctx, tx, "act_1", verbs)
			if e.Verb != audit.ActionReject {
				t.Errorf("in the transaction, last is %s", e.Verb)
			}
			return err
		})
		execute(t, db, `insert into audit_pending (tx, n, at, project_id, actor, verb, object, detail, seal) select tx, n, at, project_id, actor, verb, object, detail, seal from stolen`)
		if got := last(); got != "action.reject 1" {
			t.Errorf("with an old one pending again, last is %s", got)
		}
		settle(t, db)
		if got := last(); got != "action.reject 1" {
			t.Errorf("with an old one refused, last is %s", got)
		}
		execute(t, db, `update audit_pending set refused_at = 0, tx = tx + 1`)
		if got := last(); !strings.Contains(got, audit.ErrUnsealed.Error()) {
			t.Errorf("with a forged one pending, last is %s", got)
		}
	})
}

// TestPendingWithAnotherKey: who has another key, or none, moves nothing and loses nothing.
func TestPendingWithAnotherKey(t *testing.T) {
	eachConcurrent(t, func(t *testing.T, db *store.DB) {
		leave(t, db, "a")
		other := storetest.WithOtherKey(t, db)
		leave(t, other, "eve")
		if err := audit.Await(t.Context(), db); !errors.Is(err, audit.ErrPending) {
			t.Errorf("await = %v, want %v", err, audit.ErrPending)
		}
		if got := chained(t, db); got != "" {
			t.Errorf("a reader that waited put %q into the chain", got)
		}
		settle(t, db)
		if got, b := chained(t, db), backlog(t, db); got != "a" || b.Refused != 1 {
			t.Errorf("the chain has %q, backlog %+v; want a, and one refused", got, b)
		}
		// What a program with another key refused is not lost when the server starts.
		leave(t, db, "b")
		settle(t, other)
		if b := backlog(t, db); b.Pending != 0 || b.Refused != 2 {
			t.Errorf("backlog %+v, want two refused", b)
		}
		if err := audit.NewSequencer(slog.New(slog.DiscardHandler), db).Recover(t.Context()); err != nil {
			t.Error(err)
		}
		if got, b := chained(t, db), backlog(t, db); got != "a b" || b.Refused != 1 {
			t.Errorf("the chain has %q, backlog %+v; want a b, and one refused", got, b)
		}
	})
}

// TestSequencer: one of several servers sequences, another takes over when it is gone,
// and the others raise the alarm if entries wait for long, and about forged ones.
func TestSequencer(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		var mu sync.Mutex
		var log bytes.Buffer
		logged := func() string {
			mu.Lock()
			defer mu.Unlock()
			return log.String()
		}
		until := func(what string, f func() bool) {
			t.Helper()
			for end := time.Now().Add(30 * time.Second); !f(); time.Sleep(10 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("waited 30 s for %s; the log: %s", what, logged())
				}
			}
		}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		done := make(chan error, 1)
		s := audit.NewSequencer(slog.New(slog.NewTextHandler(writer(func(b []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return log.Write(b)
		}), nil)), db)
		other, err := db.Hold(t.Context(), "audit sequencer", 0) // a server that is stuck
		if err != nil {
			t.Fatal(err)
		}
		leave(t, db, "a")
		if db.Concurrent() {
			leave(t, db, "b")
			execute(t, db, `update audit_pending set at = 1, object = 'eve' where object = 'b'`)
		}
		go func() { done <- s.Run(ctx) }()
		if db.Concurrent() {
			until("the alarm", func() bool { return strings.Contains(logged(), "2 wait, the oldest since 1970-01-01") })
		}
		if err := other.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		until("the chain", func() bool { return chained(t, db) == "a" })
		leave(t, db, "c")
		stop()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("run = %v", err)
		}
		if got := chained(t, db); got != "a c" {
			t.Errorf("the chain has %q, want %q", got, "a c")
		}
		if db.Concurrent() && !strings.Contains(logged(), "object=eve") {
			t.Errorf("the log does not name the forged row: %s", logged())
		}
	})
}

type writer func([]byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }
