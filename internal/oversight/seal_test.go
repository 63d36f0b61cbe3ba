package oversight_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// This is whoever writes the database, as docs/background/threat-model.md has him: he reads
// and changes any row and has not the server's key.

// raw runs statements behind the server's back.
func (f *fixture) raw(statements ...string) {
	f.t.Helper()
	if err := audit.Settle(f.t.Context(), f.db); err != nil {
		f.t.Fatal(err)
	}
	err := f.db.Update(f.t.Context(), func(tx *store.Tx) error {
		for _, s := range statements {
			if _, err := tx.ExecContext(f.t.Context(), s); err != nil {
				return fmt.Errorf("%s: %w", s, err)
			}
		}
		return nil
	})
	if err != nil {
		f.t.Fatal(err)
	}
}

// named returns what verifying the whole record says of an action: nothing where
// all of it fits.
func (f *fixture) named(id string) (out []string) {
	f.t.Helper()
	l := oversight.NewLedger()
	err := audit.View(f.t.Context(), f.db, func(tx *store.Tx) error {
		if _, err := audit.Examine(f.t.Context(), tx, audit.Options{Each: l.Entry}); err != nil {
			out = append(out, err.Error())
			return nil
		}
		return l.Rows(f.t.Context(), tx)
	})
	if err != nil {
		f.t.Fatal(err)
	}
	list, _ := l.Found()
	for _, x := range list {
		if x.Action == id || id == "" {
			out = append(out, x.What)
		}
	}
	return out
}

// restart returns f as after a start of the server: a gate that remembers
// nothing, and that has looked at what is there.
func (f *fixture) restart(rules oversighttest.Rules) *fixture {
	g := setupAgain(f.t, f, rules)
	g.eff = f.eff
	g.gate.Handle("test.effect", g.eff)
	ctx := f.t.Context()
	if err := errors.Join(g.gate.Adopt(ctx, false), g.gate.Recover(ctx, true)); err != nil {
		f.t.Fatal(err)
	}
	if _, err := g.gate.Sweep(ctx); err != nil {
		f.t.Fatal(err)
	}
	return g
}

func (f *fixture) approve(a oversight.Action) {
	f.t.Helper()
	if err := f.gate.Decide(f.t.Context(), f.person, decision(a, true)); err != nil {
		f.t.Fatal(err)
	}
}

// columnsOf are the columns of a table, as the database itself lists them.
func (f *fixture) columnsOf(table string) (out []string) {
	f.t.Helper()
	err := f.db.View(f.t.Context(), func(tx *store.Tx) (err error) {
		out, err = tx.Columns(f.t.Context(), table)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return out
}

// another returns an expression for a value that a column of a row does not have.
func another(column string) []string {
	switch column {
	case "payload":
		return []string{`'evil'`}
	case "digest", "seal":
		return []string{`'0123456789abcdef0123456789abcdef'`, `''`}
	case "state":
		return []string{`'approved'`, `'pending'`, `'done'`, `'executing'`, `'scheduled'`, `'unknown'`, `'nonsense'`}
	case "request":
		return []string{`'{"Kind":"test.effect","To":["eve@example.net"]}'`, `'{'`}
	case "version", "created_at", "decided_at", "attempts", "not_before", "send_at", "ask_at", "undo", "settled_at", "dropped_at", "lease", "waits",
		"approvers", "step_up", "expires_at", "written_at", "at":
		return []string{column + ` + 1`, `0`, `9223372036854775807`, `-1`, `'text'`} // which SQLite keeps, and PostgreSQL refuses
	}
	return []string{`'changed'`, `''`}
}

// TestChangedRow changes each column of an action in each state, one at a time,
// of a server that runs and of one that starts after: what it would do leaves
// only if people or the rule really let it go, once, and where the change was to
// be of any use it is refused, asked again, or named.
func TestChangedRow(t *testing.T) {
	begin := map[string]func(f *fixture) oversight.Action{
		"pending": func(f *fixture) oversight.Action { return f.propose("x") },
		"scheduled": func(f *fixture) oversight.Action {
			p := f.proposal("x")
			p.AskAt = time.Now().Add(time.Hour)
			return f.proposeAs(p)
		},
		"approved": func(f *fixture) oversight.Action {
			p := f.proposal("x")
			p.NotBefore = time.Now().Add(time.Hour)
			a := f.proposeAs(p)
			f.approve(a)
			return f.state(a.ID)
		},
		"denied": func(f *fixture) oversight.Action {
			a := f.propose("x")
			d := decision(a, false)
			d.Reason = "no"
			if err := f.gate.Decide(f.t.Context(), f.person, d); err != nil {
				f.t.Fatal(err)
			}
			return f.state(a.ID)
		},
		"done": func(f *fixture) oversight.Action {
			a := f.propose("x")
			f.approve(a)
			f.drain()
			return f.state(a.ID)
		},
		"unknown": func(f *fixture) oversight.Action {
			a := f.propose("x")
			f.approve(a)
			f.eff.outcomes = []oversight.Outcome{{State: oversight.Unknown, Detail: "the line broke"}}
			f.drain()
			return f.state(a.ID)
		},
	}
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		n, tried, quiet := 0, 0, map[string]bool{}
		for state, start := range begin {
			for _, column := range f.columnsOf("action") {
				for _, value := range another(column) {
					both := []bool{false, true}
					if state != "approved" { // each is tried one way or the other
						n++
						both = both[n%2 : n%2+1]
					}
					for _, stopped := range both {
						f.eff.ran = nil
						a := start(f)
						ran := len(f.eff.ran)
						change := fmt.Sprintf(`update action set %s = %s where id = '%s'`, column, value, a.ID)
						err := db.Update(t.Context(), func(tx *store.Tx) error {
							_, err := tx.ExecContext(t.Context(), change)
							return err
						})
						if err != nil {
							continue // the database itself takes no such value there
						}
						tried++
						same := f.same(a)
						g := f
						named := f.named("")
						if stopped {
							g = f.restart(nil)
						}
						g.drain()
						if more := len(f.eff.ran) - ran; more != 0 {
							t.Errorf("%s, stopped %v: %s: it left %d times", state, stopped, change, more)
						}
						now := g.standing(a.ID)
						moved := now != oversight.State(state)
						if !same && len(named) == 0 {
							t.Errorf("%s, stopped %v: %s: nothing names it, it is %s", state, stopped, change, now)
						}
						if !same && !moved && len(g.named("")) == 0 && !g.noted(a.ID) {
							quiet[state+" "+column] = true
						}
						f.clear()
					}
				}
			}
		}
		if len(quiet) > 0 {
			t.Errorf("changed, and afterwards nobody sees it: %v", quiet)
		}
		t.Logf("%d changes", tried)
	})
}

// same reports whether the row of a is as the server wrote it all the same: a
// change to the value that was there.
func (f *fixture) same(a oversight.Action) (same bool) {
	f.t.Helper()
	err := f.db.View(f.t.Context(), func(tx *store.Tx) error {
		s := store.Sealed{Table: "action", Key: []string{"id"}, Omit: []string{"payload"}}
		rows, err := tx.Rows(f.t.Context(), s, false, `id = $1`, a.ID)
		if err != nil || len(rows) == 0 {
			return err
		}
		var payload []byte
		err = tx.One(f.t.Context(), `select payload from action where id = $1`, []any{a.ID}, &payload)
		same = rows[0].Holds && string(payload) == string(a.Payload)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return same
}

func (f *fixture) standing(id string) oversight.State {
	var s string
	err := f.db.View(f.t.Context(), func(tx *store.Tx) error {
		return tx.One(f.t.Context(), `select state from action where id = $1`, []any{id}, &s)
	})
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		f.t.Fatal(err)
	}
	return oversight.State(s)
}

// noted reports whether the record says that the action was found changed.
func (f *fixture) noted(id string) bool {
	return slices.Contains(f.verbs(id), "action.tampered")
}

// clear takes an action out of the way of the next, with what names it.
func (f *fixture) clear() {
	f.raw(`delete from approval`, `delete from revision`, `delete from action`, `delete from audit_entry`, `delete from audit_node`, `delete from audit_checkpoint`,
		`update audit_head set seq = 0, hash = '', tree_size = 0, tree_edge = ''`)
}

// TestChangedApproval changes each column of one of two approvals, takes one
// away, and puts in one that nobody gave.
func TestChangedApproval(t *testing.T) {
	two := oversighttest.Rules{}
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, two)
		f.gate = oversight.NewGate(f.log, db, &asks{Effect: policy.Ask, Approvers: 2})
		f.gate.Handle("test.effect", f.eff)
		ben := f.person
		ben.ID = "ben"
		type attack struct {
			name, query string
			extra       bool // it adds an approval, which would be the second
		}
		attacks := []attack{
			{"taken away", `delete from approval where action_id = '%s'`, false},
			{"put in", `insert into approval (action_id, version, person, at, reason) values ('%s', 1, 'person:ben', 1, '')`, true},
			{"copied", `insert into approval (action_id, version, person, at, reason, seal) select action_id, version, 'person:ben', at, reason, seal from approval where action_id = '%s'`, true},
		}
		for _, column := range f.columnsOf("approval") {
			for _, value := range another(column) {
				if column != "action_id" {
					attacks = append(attacks, attack{column, `update approval set ` + column + ` = ` + value + ` where action_id = '%s'`, false})
				}
			}
		}
		for _, x := range attacks {
			a := f.propose("x")
			f.approve(a)
			f.eff.ran = nil
			query := fmt.Sprintf(x.query, a.ID)
			if err := db.Update(t.Context(), func(tx *store.Tx) error {
				_, err := tx.ExecContext(t.Context(), query)
				return err
			}); err != nil {
				continue
			}
			f.drain()
			if len(f.eff.ran) > 0 {
				t.Errorf("%s: %s: it left with one approval", x.name, query)
			}
			whole := f.whole("approval", a.ID)
			if named := f.named(""); len(named) == 0 && !whole {
				t.Errorf("%s: %s: nothing names it", x.name, query)
			}
			err := f.gate.Decide(t.Context(), ben, decision(f.state(a.ID), true))
			f.drain()
			if bad := !whole && x.name != "version" && x.name != "taken away"; len(f.eff.ran) > 0 && bad {
				t.Errorf("%s: %s: it left with a forged approval and another, %v", x.name, query, err)
			}
			f.clear()
		}
	})
}

// whole reports whether the approvals of an action at its version are one, as the
// server wrote it.
func (f *fixture) whole(table, id string) (ok bool) {
	f.t.Helper()
	err := f.db.View(f.t.Context(), func(tx *store.Tx) error {
		rows, err := tx.Rows(f.t.Context(), store.Sealed{Table: table, Key: []string{"action_id", "version", "person"}}, false, `action_id = $1 and version = 1`, id)
		ok = err == nil && len(rows) == 1 && rows[0].Holds
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return ok
}

// TestForgedRows: rows put in, taken out, swapped and put back.
func TestForgedRows(t *testing.T) {
	const copied = `create table %s as select * from action where id = '%s'`
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		for _, stopped := range []bool{false, true} {
			again := func(f *fixture) *fixture {
				if stopped {
					return f.restart(nil)
				}
				return f
			}
			name := func(s string) string { return fmt.Sprintf("%s%v", s, stopped) }
			f := setupAgain(t, setupNamed(t, db, nil, name("a"), name("b")), nil)
			f.clear()
			f.eff.ran = nil

			// The example of the issue.
			a := f.propose("approved by hand")
			f.raw(fmt.Sprintf(`update action set state = 'approved', decider = 'person:ann', decided_at = created_at where id = '%s'`, a.ID))
			if named := f.named(a.ID); len(named) == 0 {
				t.Error("approved by hand: verify says nothing")
			}
			g := again(f)
			g.drain()
			if got := g.state(a.ID); len(f.eff.ran) > 0 || got.State != oversight.Pending || !strings.Contains(got.Note, "behind its back") || got.Approvals != 0 {
				t.Fatalf("approved by hand: %s, note %q, ran %v", got.State, got.Note, f.eff.ran)
			}
			if named := g.named(a.ID); len(named) > 0 {
				t.Errorf("asked again: verify says %q", named)
			}
			// A person who sees it with its note lets it go: it leaves, once.
			g.approve(g.state(a.ID))
			g.drain()
			if len(f.eff.ran) != 1 || g.state(a.ID).State != oversight.Done {
				t.Fatalf("approved by a person: %v", f.eff.ran)
			}

			// A row of before, put back so that it is sent twice.
			b := f.propose("once")
			f.raw(fmt.Sprintf(copied, name("pending"), b.ID))
			g = again(f)
			g.approve(b)
			f.raw(fmt.Sprintf(copied, name("ready"), b.ID))
			f.eff.ran = nil
			g.drain()
			if len(f.eff.ran) != 1 {
				t.Fatalf("ran %v", f.eff.ran)
			}
			for _, from := range []string{"ready", "pending"} {
				f.putBack(name(from), b.ID)
				if named := f.named(b.ID); len(named) == 0 {
					t.Errorf("put back %s: verify says nothing", from)
				}
				g = again(f)
				if from == "pending" {
					if err := g.gate.Decide(t.Context(), g.person, decision(b, true)); !errors.Is(err, oversight.ErrStale) {
						t.Errorf("a decision on a row that was put back: %v, want ErrStale", err)
					}
				}
				g.drain()
				if got := g.state(b.ID); len(f.eff.ran) != 1 || got.State != oversight.Done {
					t.Fatalf("put back %s: %s, ran %v", from, got.State, f.eff.ran)
				}
			}
			// And with the entries since taken out, which a server that runs remembers.
			if !stopped {
				f.putBack(name("ready"), b.ID)
				f.raw(fmt.Sprintf(`delete from audit_entry where object = '%s' and verb in ('action.execute', 'action.done', 'action.tampered')`, b.ID))
				g.drain()
				if len(f.eff.ran) != 1 {
					t.Fatalf("put back with its entries taken out: ran %v", f.eff.ran)
				}
				if named := f.named(b.ID); len(named) == 0 {
					t.Error("entries taken out: verify says nothing")
				}
			}
		}
	})
}

// TestInsertedRows: rows that were never the server's.
func TestInsertedRows(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		// A row that nobody proposed, a copy of one that was approved.
		a := f.propose("one")
		f.approve(a)
		f.raw(`create table other as select * from action`, `update other set id = 'act_forged'`, `insert into action select * from other`)
		if named := f.named("act_forged"); len(named) == 0 {
			t.Error("a row that nobody proposed: verify says nothing")
		}
		f.drain()
		if got := f.standing("act_forged"); len(f.eff.ran) != 1 || got != oversight.Denied {
			t.Fatalf("a row that nobody proposed: %s, ran %v", got, f.eff.ran)
		}
		// What was approved of one in the place of another.
		b, c := f.propose("b"), f.propose("c")
		f.approve(b)
		f.raw(`create table swap as select * from action`,
			fmt.Sprintf(`update swap set id = 'x' where id = '%s'`, b.ID), fmt.Sprintf(`update swap set id = '%s' where id = '%s'`, b.ID, c.ID),
			fmt.Sprintf(`update swap set id = '%s' where id = 'x'`, c.ID),
			`create table votes as select * from approval`, `delete from approval`,
			fmt.Sprintf(`delete from action where id in ('%s', '%s')`, b.ID, c.ID),
			fmt.Sprintf(`insert into action select * from swap where id in ('%s', '%s')`, b.ID, c.ID),
			`insert into approval select * from votes`)
		if nb, nc := f.named(b.ID), f.named(c.ID); len(nb) == 0 || len(nc) == 0 {
			t.Error("two that were swapped: verify says nothing")
		}
		f.drain()
		if len(f.eff.ran) != 1 || f.standing(c.ID) == oversight.Done {
			t.Fatalf("two that were swapped: ran %v", f.eff.ran)
		}
		// One that is gone.
		d := f.propose("d")
		f.raw(fmt.Sprintf(`delete from action where id = '%s'`, d.ID))
		if named := f.named(d.ID); !slices.ContainsFunc(named, func(s string) bool { return strings.Contains(s, "no row") }) {
			t.Errorf("a row that is gone: verify says %q", named)
		}
		// Before a row that cannot be read nothing stands still.
		e, after := f.propose("e"), f.propose("after")
		f.approve(e)
		f.approve(after)
		f.eff.ran = nil
		f.raw(fmt.Sprintf(`update action set request = '{', created_at = 1 where id = '%s'`, e.ID))
		f.drain()
		if got := f.standing(e.ID); !slices.Equal(f.eff.ran, []string{"after"}) || got == oversight.Approved {
			t.Fatalf("behind a row that cannot be read: %s, ran %v", got, f.eff.ran)
		}
	})
}

// putBack puts a row of before in the place of the one that is there.
func (f *fixture) putBack(table, id string) {
	f.raw(fmt.Sprintf(`create table if not exists kept as select * from approval where action_id = '%s'`, id), fmt.Sprintf(`delete from approval where action_id = '%s'`, id),
		fmt.Sprintf(`delete from action where id = '%s'`, id), `insert into action select * from `+table)
}

// TestForgedEntry writes into the record as well, with every hash as it should
// be: an entry which says that a person approved. He has not the key.
func TestForgedEntry(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		a := f.propose("x")
		if err := audit.Settle(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		// What a server with another key writes is what he can write at the most.
		other := storetest.WithOtherKey(t, db)
		err := other.Update(t.Context(), func(tx *store.Tx) error {
			if _, err := tx.ExecContext(t.Context(), `update action set state = 'approved', version = 2, decider = 'person:ann' where id = $1`, a.ID); err != nil {
				return err
			}
			s := store.Sealed{Table: "action", Key: []string{"id"}, Omit: []string{"payload"}}
			if err := tx.Seal(t.Context(), s, `id = $1`, a.ID); err != nil {
				return err
			}
			return audit.Append(t.Context(), tx, f.person, "action.approve", a.ID, audit.Fields{"version": "1", "digest": a.Hex(), "stands": "approved 2"})
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := audit.Settle(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		if named := f.named(""); len(named) == 0 || !strings.Contains(named[0], "not sealed") {
			t.Errorf("verify says %q", named)
		}
		f.drain()
		if len(f.eff.ran) > 0 || f.standing(a.ID) != oversight.Pending {
			t.Errorf("%s, ran %v", f.standing(a.ID), f.eff.ran)
		}
	})
}

// TestRowsFromBeforeSeals is a database from before rows were sealed: what waits waits
// on, what was approved is asked again, and what is settled is sealed.
func TestRowsFromBeforeSeals(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		waits, approved, done := f.propose("waits"), f.propose("approved"), f.propose("done")
		f.approve(done)
		f.drain()
		f.approve(approved)
		f.eff.ran = nil
		f.raw(`update action set seal = ''`, `update approval set seal = ''`, `update audit_entry set seal = ''`)
		g := f.restart(nil)
		g.drain()
		for _, a := range []oversight.Action{waits, approved} {
			if got := g.state(a.ID); got.State != oversight.Pending || got.Doubt != "" {
				t.Errorf("%s: %s, doubt %q", a.Payload, got.State, got.Doubt)
			}
		}
		if got := g.state(done.ID); got.State != oversight.Done || len(f.eff.ran) > 0 {
			t.Errorf("done: %s, ran %v", got.State, f.eff.ran)
		}
		g.approve(g.state(waits.ID))
		g.drain()
		if len(f.eff.ran) != 1 {
			t.Errorf("ran %v", f.eff.ran)
		}
		if named := g.named(done.ID); len(named) > 0 {
			t.Errorf("verify says %q of what was done before", named)
		}
		// It is done once: a seal that is taken off later is found.
		f.raw(fmt.Sprintf(`update action set seal = '' where id = '%s'`, done.ID))
		h := g.restart(nil)
		if named := h.named(done.ID); len(named) == 0 {
			t.Error("a seal that was taken off: verify says nothing")
		}
	})
}

// TestForgedSwitch turns a switch off in the database, and moves its end there.
func TestForgedSwitch(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		for _, change := range []string{
			`update kill_switch set off_at = 1`, `update kill_switch set until_at = 1`, `update kill_switch set target = 'other.effect'`, `update kill_switch set seal = ''`,
		} {
			f := setupNamed(t, db, oversighttest.Rules{{ID: "all", Kind: "*", Effect: policy.Allow}}, "one"+change, "two"+change)
			if _, err := f.gate.SwitchOn(t.Context(), f.person, oversight.Switch{Scope: oversight.ScopeCapability, Target: "test.effect", Reason: "enough"}); err != nil {
				t.Fatal(err)
			}
			f.raw(change)
			if a := f.propose("x"); a.State != oversight.Denied {
				t.Errorf("%s: proposed, it is %s", change, a.State)
			}
			list, err := f.gate.Switches(t.Context(), f.person)
			if err != nil || len(list) != 1 {
				t.Fatalf("%s: switches %+v, %v", change, list, err)
			}
			if err := f.gate.SwitchOff(t.Context(), f.person, list[0].ID); err != nil {
				t.Fatal(err)
			}
			if a := f.propose("x"); a.State != oversight.Approved {
				t.Errorf("%s: turned off by an owner, it is %s", change, a.State)
			}
			f.raw(`delete from kill_switch`)
			if named := f.named(""); len(named) == 0 {
				t.Error("a switch that is gone: verify says nothing")
			}
			f.clear()
		}
	})
}

// TestTriedAgain changes what two people have approved while nobody knows what
// became of it: one person who says that it is to be tried again does not let it
// go.
func TestTriedAgain(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, oversighttest.Rules{})
		f.gate = oversight.NewGate(f.log, db, &asks{Effect: policy.Ask, Approvers: 2})
		f.gate.Handle("test.effect", f.eff)
		ben := f.person
		ben.ID = "ben"
		ctx := t.Context()
		both := func(a oversight.Action) {
			t.Helper()
			for _, who := range []auth.Principal{f.person, ben} {
				if err := f.gate.Decide(ctx, who, decision(a, true)); err != nil {
					t.Fatalf("%s approves: %v", who, err)
				}
			}
		}
		again := func(a oversight.Action) error {
			return f.gate.Resolve(ctx, f.person, a.ID, a.Version, oversight.Approved, "it did not arrive")
		}
		f.eff.outcomes = []oversight.Outcome{{State: oversight.Unknown, Detail: "the line broke"}, {State: oversight.Unknown, Detail: "the line broke"}}

		a := f.propose("x")
		both(a)
		f.drain()
		// As it was approved it is tried again.
		if err := again(f.state(a.ID)); err != nil {
			t.Fatal(err)
		}
		f.drain()
		if a = f.state(a.ID); a.State != oversight.Unknown || len(f.eff.ran) != 2 {
			t.Fatalf("tried again: %s, ran %v", a.State, f.eff.ran)
		}
		sum := sha256.Sum256([]byte("evil"))
		if err := db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update action set payload = $1, digest = $2 where id = $3`, []byte("evil"), sum[:], a.ID)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if err := again(a); !errors.Is(err, oversight.ErrTampered) {
			t.Errorf("resolved, having been changed: %v, want ErrTampered", err)
		}
		a = f.state(a.ID)
		if a.State != oversight.Unknown {
			t.Fatalf("it is %s", a.State)
		}
		f.eff.ran = nil
		if err := again(a); err != nil {
			t.Fatal(err)
		}
		f.drain()
		if a = f.state(a.ID); a.State != oversight.Pending || a.Approvals != 0 || len(f.eff.ran) > 0 {
			t.Fatalf("resolved by one: %s with %d approvals, ran %v; want it to be asked about", a.State, a.Approvals, f.eff.ran)
		}
		// Two people who have seen it let it go.
		both(a)
		f.drain()
		if a = f.state(a.ID); a.State != oversight.Done || len(f.eff.ran) != 1 {
			t.Errorf("approved by two: %s, ran %v", a.State, f.eff.ran)
		}
		if named := f.named(a.ID); len(named) > 0 {
			t.Errorf("verify says %q", named)
		}
	})
}
