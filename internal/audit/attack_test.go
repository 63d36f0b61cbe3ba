package audit_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/store"
	"postern/internal/storetest"
)

// rebuild is the attacker who can write everything in the database and knows
// how it is made: entries, chain, tree and head are as if change's had always
// been there. He has no key: checkpoints he can only leave or remove.
func rebuild(t *testing.T, db *store.DB, change func([]audit.Entry) []audit.Entry) {
	t.Helper()
	update(t, db, func(ctx context.Context, tx *store.Tx) error {
		list, err := audit.List(ctx, tx, audit.Query{Limit: 1 << 20})
		if err != nil {
			return err
		}
		slices.Reverse(list)
		if _, err := tx.ExecContext(ctx, `delete from audit_entry`); err != nil {
			return err
		}
		var last audit.Digest
		list = change(list)
		for i, e := range list {
			e.Seq, e.Prev = int64(i+1), last
			last = e.Hash()
			_, err := tx.ExecContext(ctx, `insert into audit_entry (seq, at, project_id, actor, verb, object, detail, prev, hash) values ($1, $2, $3, $4, $5, $6, $7, $8, $9)`,
				e.Seq, store.Time(e.At), e.Project, e.Actor, e.Verb, e.Object, e.Detail, e.Prev[:], last[:])
			if err != nil {
				return err
			}
		}
		_, err = tx.ExecContext(ctx, `update audit_head set seq = $1, hash = $2`, len(list), last[:])
		return err
	})
	forgetTree(t, db)
	if err := audit.Fill(t.Context(), db, nil); err != nil {
		t.Fatal(err)
	}
}

func examine(t *testing.T, db *store.DB, o audit.Options) (r audit.Report, err error) {
	t.Helper()
	view(t, db, func(ctx context.Context, tx *store.Tx) error {
		r, err = audit.Examine(ctx, tx, o)
		return nil
	})
	return r, err
}

func keeper(t *testing.T, db *store.DB, s note.Signer, conf audit.KeeperConfig) *audit.Keeper {
	t.Helper()
	conf.Signer = func(context.Context) (note.Signer, error) { return s, nil }
	k, err := audit.NewKeeper(slog.New(slog.NewTextHandler(t.Output(), nil)), db, conf)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func makePoint(t *testing.T, k *audit.Keeper) []byte {
	t.Helper()
	s, err := k.Make(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s.Note
}

func kept(t *testing.T, v note.Verifier, signed ...[]byte) (out []audit.Kept) {
	t.Helper()
	for i, b := range signed {
		k, err := audit.Keep("kept"+string(rune('A'+i)), b, note.VerifierList(v))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, k)
	}
	return out
}

// TestAttacks: who writes into the database is found out. The lazy attacker
// changes rows; the complete one makes chain, tree and head anew and removes
// the checkpoints in the database, and only a kept checkpoint shows it.
func TestAttacks(t *testing.T) {
	lazy := []struct {
		name, attack string
		want         int64
	}{
		{"entry changed", `update audit_entry set actor = 'person:eve' where seq = 3`, 3},
		{"entry and its hash changed", `update audit_entry set detail = '{}', hash = prev where seq = 12`, 12},
		{"removed", `delete from audit_entry where seq = 3`, 3},
		{"inserted before the first", `insert into audit_entry (seq, at, project_id, actor, verb, object, detail, prev, hash)
			select 0, at, project_id, actor, verb, object, detail, prev, hash from audit_entry where seq = 1`, 1},
		{"inserted after the last", `insert into audit_entry (seq, at, project_id, actor, verb, object, detail, prev, hash)
			select 13, at, project_id, actor, verb, object, detail, hash, hash from audit_entry where seq = 12`, 13},
		{"reordered", `update audit_entry set seq = case seq when 4 then 104 when 5 then 4 end where seq in (4, 5)`, 4},
		{"tail cut", `delete from audit_entry where seq > 9`, 10},
		{"a hash of the tree changed", `update audit_node set hash = (select hash from audit_node where idx = 0) where idx = 4`, 4},
		{"an inner hash of the tree changed", `update audit_node set hash = (select hash from audit_node where idx = 0) where idx = 2`, 2},
		{"a hash of the tree removed", `delete from audit_node where idx = 8`, 6},
		{"a hash added to the tree", `insert into audit_node (idx, hash) select 1000, hash from audit_node where idx = 0`, 13},
		{"edge of the tree changed", `update audit_head set tree_edge = hash`, 13},
		{"tree said to be shorter", `update audit_head set tree_size = 11`, 12},
		{"checkpoint moved", `update audit_checkpoint set size = 9 where size = 10`, 1},
		{"checkpoint's root changed", `update audit_checkpoint set root = (select hash from audit_node where idx = 0) where size = 10`, 1},
	}
	for _, tt := range lazy {
		t.Run(tt.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				s, _ := signer(t, "example.com/audit")
				k := keeper(t, db, s, audit.KeeperConfig{})
				appendN(t, db, 10)
				makePoint(t, k)
				appendN(t, db, 2)
				if r, err := examine(t, db, audit.Options{}); err != nil || r.Tree != 12 || len(r.Stored) != 1 {
					t.Fatalf("before: %+v, %v", r, err)
				}
				update(t, db, func(ctx context.Context, tx *store.Tx) error { _, err := tx.ExecContext(ctx, tt.attack); return err })
				_, err := examine(t, db, audit.Options{})
				var broken *audit.BrokenError
				if !errors.As(err, &broken) || broken.Seq != tt.want {
					t.Errorf("Examine = %v, want broken at %d", err, tt.want)
				}
			})
		})
	}
	complete := []struct {
		name   string
		change func([]audit.Entry) []audit.Entry
		from   int64 // the span that the report names
		to     int64
	}{
		{"one changed", func(l []audit.Entry) []audit.Entry { l[6].Actor = "person:eve"; return l }, 6, 10},
		{"one of the first changed", func(l []audit.Entry) []audit.Entry { l[1].Detail = `{}`; return l }, 1, 5},
		{"one removed", func(l []audit.Entry) []audit.Entry { return slices.Delete(l, 6, 7) }, 6, 10},
		{"one inserted", func(l []audit.Entry) []audit.Entry { return slices.Insert(l, 6, l[2]) }, 6, 10},
		{"two reordered", func(l []audit.Entry) []audit.Entry { l[6].Object, l[7].Object = "obj_8", "obj_7"; return l }, 6, 10},
		{"tail cut", func(l []audit.Entry) []audit.Entry { return l[:8] }, 9, 0},
	}
	for _, tt := range complete {
		t.Run("complete, "+tt.name, func(t *testing.T) {
			db := storetest.SQLite(t)
			s, v := signer(t, "example.com/audit")
			k := keeper(t, db, s, audit.KeeperConfig{})
			appendN(t, db, 5)
			first := makePoint(t, k)
			appendN(t, db, 5)
			second := makePoint(t, k)
			appendN(t, db, 2)
			if _, err := examine(t, db, audit.Options{Kept: kept(t, v, first, second)}); err != nil {
				t.Fatalf("before: %v", err)
			}
			rebuild(t, db, tt.change)
			if _, err := examine(t, db, audit.Options{}); err == nil {
				t.Error("the checkpoints that he left did not show it")
			}
			update(t, db, func(ctx context.Context, tx *store.Tx) error {
				_, err := tx.ExecContext(ctx, `delete from audit_checkpoint`)
				return err
			})
			if r, err := examine(t, db, audit.Options{}); err != nil || len(r.Kept) != 0 {
				t.Errorf("without a kept checkpoint nothing can show it, and it says: %+v, %v", r, err)
			}
			_, err := examine(t, db, audit.Options{Kept: kept(t, v, second, first)})
			var broken *audit.BrokenError
			if !errors.As(err, &broken) || broken.Seq != tt.from || broken.To != tt.to {
				t.Errorf("with kept checkpoints: %v, want broken from %d to %d", err, tt.from, tt.to)
			}
		})
	}
}

// TestForgedCheckpoint: a checkpoint counts by its key alone.
func TestForgedCheckpoint(t *testing.T) {
	db := storetest.SQLite(t)
	s, v := signer(t, "example.com/audit")
	appendN(t, db, 3)
	good := makePoint(t, keeper(t, db, s, audit.KeeperConfig{}))
	eve, eveV := signer(t, "example.com/audit") // another key of the same name
	mallory, malloryV := signer(t, "example.org/audit")
	head, _, err := audit.OpenCheckpoint(good, note.VerifierList(v))
	if err != nil || head.Size != 3 || head.Origin != "example.com/audit" {
		t.Fatalf("OpenCheckpoint = %+v, %v", head, err)
	}
	sign := func(s note.Signer, text string) []byte {
		b, err := note.Sign(&note.Note{Text: text}, s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for name, forged := range map[string][]byte{
		"another key of the name":    sign(eve, head.String()),
		"a known key of another":     sign(mallory, head.String()),
		"another size":               bytes.Replace(good, []byte("\n3\n"), []byte("\n2\n"), 1),
		"an extension added":         bytes.Replace(good, []byte("\n\n"), []byte("\nmore\n\n"), 1),
		"no signature":               []byte(head.String()),
		"cut":                        good[:len(good)-2],
		"nothing":                    nil,
		"a signature over something": sign(s, "example.com/audit\nthree\nAAAA\n"),
		"leading zero":               sign(s, strings.Replace(head.String(), "\n3\n", "\n03\n", 1)),
		"negative":                   sign(s, strings.Replace(head.String(), "\n3\n", "\n-3\n", 1)),
		"very long":                  bytes.Repeat(good, 200),
	} {
		if _, _, err := audit.OpenCheckpoint(forged, note.VerifierList(v, malloryV)); err == nil {
			t.Errorf("%s: it was taken", name)
		}
	}
	if _, _, err := audit.OpenCheckpoint(sign(eve, head.String()), note.VerifierList(eveV)); err != nil {
		t.Errorf("by whoever trusts that key it is good: %v", err)
	}
	witnessed, err := note.Sign(&note.Note{Text: head.String()}, s, mallory) // as a witness does
	if err != nil {
		t.Fatal(err)
	}
	if _, sigs, err := audit.OpenCheckpoint(witnessed, note.VerifierList(v)); err != nil || len(sigs) != 1 {
		t.Errorf("with a witness: %v, %v", sigs, err)
	}
}

// TestFork: somebody who has the key signs two records of one size.
func TestFork(t *testing.T) {
	s, v := signer(t, "example.com/audit")
	one, two := storetest.SQLite(t), storetest.SQLite(t)
	appendN(t, one, 4)
	appendN(t, two, 4)
	a, b := makePoint(t, keeper(t, one, s, audit.KeeperConfig{})), makePoint(t, keeper(t, two, s, audit.KeeperConfig{}))
	_, err := examine(t, one, audit.Options{Kept: kept(t, v, a, b)})
	if !errors.Is(err, audit.ErrTwoRecords) || !strings.Contains(err.Error(), "keptA") || !strings.Contains(err.Error(), "keptB") {
		t.Errorf("Examine = %v, want ErrTwoRecords with both", err)
	}
	if _, err := examine(t, one, audit.Options{Kept: kept(t, v, a, a)}); err != nil {
		t.Errorf("the same twice: %v", err)
	}
}

// TestKeeperRefuses: a server signs nothing that does not go on from what it
// signed before, which it remembers outside of the database; not even if all in
// the database fits, and not after it has started anew.
func TestKeeperRefuses(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func([]audit.Entry) []audit.Entry
	}{
		{"rewritten", func(l []audit.Entry) []audit.Entry { l[2].Actor = "person:eve"; return l }},
		{"rolled back", func(l []audit.Entry) []audit.Entry { return l[:4] }},
		{"rolled back and grown again", func(l []audit.Entry) []audit.Entry { return append(l[:4:4], l[0], l[1], l[2]) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				dir := t.TempDir()
				for name, conf := range map[string]audit.KeeperConfig{
					"memory": {Memory: filepath.Join(dir, "memory")},
					"dir":    {Dir: filepath.Join(dir, "all")},
					"file":   {File: filepath.Join(dir, "newest")},
				} {
					s, v := signer(t, "example.com/audit")
					rebuild(t, db, func([]audit.Entry) []audit.Entry { return nil })
					update(t, db, func(ctx context.Context, tx *store.Tx) error {
						_, err := tx.ExecContext(ctx, `delete from audit_checkpoint`)
						return err
					})
					appendN(t, db, 5)
					k := keeper(t, db, s, conf)
					makePoint(t, k)
					rebuild(t, db, tt.change)
					update(t, db, func(ctx context.Context, tx *store.Tx) error {
						_, err := tx.ExecContext(ctx, `delete from audit_checkpoint`)
						return err
					})
					if _, err := k.Make(t.Context()); !errors.Is(err, audit.ErrFork) {
						t.Errorf("%s: Make = %v, want ErrFork", name, err)
					}
					if !errors.Is(k.State().Failed, audit.ErrFork) {
						t.Errorf("%s: State = %v", name, k.State())
					}
					if _, err := keeper(t, db, s, conf).Make(t.Context()); !errors.Is(err, audit.ErrFork) {
						t.Errorf("%s: Make by a server that has started anew = %v, want ErrFork", name, err)
					}
					if s, err := keeper(t, db, s, audit.KeeperConfig{}).Make(t.Context()); err != nil {
						t.Errorf("%s: one that remembers nothing signs it: %v, %v", name, s, err)
					}
					// What was kept shows to everybody that there are two.
					for _, file := range []string{conf.Memory, conf.File, conf.Dir} {
						if file == "" {
							continue
						}
						list, err := audit.ReadCheckpoints(file)
						if err != nil || len(list) != 1 {
							t.Fatalf("%s: %v, %v", name, list, err)
						}
						for _, b := range list {
							if _, err := examine(t, db, audit.Options{Kept: kept(t, v, b)}); err == nil {
								t.Errorf("%s: the kept checkpoint did not show it", name)
							}
						}
					}
				}
			})
		})
	}
}

// TestKeeperRun: checkpoints come by themselves, after so many entries or so
// long, a last one at the end, and two servers of one record agree.
func TestKeeperRun(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		dir := t.TempDir()
		s, v := signer(t, "example.com/audit")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 2)
		for _, name := range []string{"one", "two"} {
			k := keeper(t, db, s, audit.KeeperConfig{Every: 10, Interval: time.Hour, Poll: 10 * time.Millisecond, Dir: filepath.Join(dir, name), Memory: filepath.Join(dir, name+".last")})
			go func() { ended <- k.Run(ctx) }()
		}
		appendN(t, db, 3) // the first is made at once: never is long ago
		wait := func(size string) {
			t.Helper()
			for _, name := range []string{"one", "two"} {
				path := filepath.Join(dir, name, strings.Repeat("0", 20-len(size))+size+audit.Extension)
				for deadline := time.Now().Add(2 * time.Minute); ; {
					if _, err := os.Stat(path); err == nil {
						break
					}
					if time.Now().After(deadline) {
						t.Fatalf("there is no %s", path)
					}
					time.Sleep(10 * time.Millisecond)
				}
			}
		}
		var first int64
		for deadline := time.Now().Add(2 * time.Minute); first == 0; {
			view(t, db, func(ctx context.Context, tx *store.Tx) error {
				c, err := audit.Latest(ctx, tx)
				first = c.Size
				if errors.Is(err, audit.ErrNoCheckpoint) && time.Now().Before(deadline) {
					return nil
				}
				return err
			})
		}
		update(t, db, func(ctx context.Context, tx *store.Tx) error { // all at once: no checkpoint comes between
			for range 25 {
				if err := audit.Append(ctx, tx, ann, audit.SetupCreate, "obj", nil); err != nil {
					return err
				}
			}
			return nil
		})
		wait("28")
		appendN(t, db, 2) // too few
		cancel()
		for range 2 {
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		wait("30")
		list, err := audit.ReadCheckpoints(filepath.Join(dir, "one"))
		if err != nil {
			t.Fatal(err)
		}
		var all []audit.Kept
		for name, b := range list {
			k, err := audit.Keep(name, b, note.VerifierList(v))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, k)
		}
		if r, err := examine(t, db, audit.Options{Kept: all}); err != nil || len(r.Kept) != len(all) || len(r.Stored) < 3 {
			t.Errorf("Examine = %+v, %v", r, err)
		}
	})
}
