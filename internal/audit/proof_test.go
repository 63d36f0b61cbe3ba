package audit_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"postern/internal/audit"
	"postern/internal/store"
	"postern/internal/storetest"
)

func prove(t *testing.T, db *store.DB, seq int64) (p audit.Proof) {
	t.Helper()
	view(t, db, func(ctx context.Context, tx *store.Tx) (err error) {
		p, err = audit.ProveEntry(ctx, tx, "", seq)
		return err
	})
	return p
}

func marshal(t testing.TB, p audit.Proof) []byte {
	t.Helper()
	b, err := p.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestProof: a proof of each entry is checked with the public key alone, and
// none that was changed anywhere.
func TestProof(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s, v := signer(t, "example.com/audit")
		keys := note.VerifierList(v)
		appendN(t, db, 11)
		makePoint(t, keeper(t, db, s, audit.KeeperConfig{}))
		for seq := int64(1); seq <= 11; seq++ {
			p, err := audit.ParseProof(marshal(t, prove(t, db, seq)))
			if err != nil {
				t.Fatal(err)
			}
			if k, err := p.Check(keys); err != nil || k.Size != 11 || p.Entry.Seq != seq || p.Entry.Verb != audit.SetupCreate {
				t.Errorf("proof of %d: %+v, %+v, %v", seq, p.Entry, k, err)
			}
		}
		good := marshal(t, prove(t, db, 6))
		line := func(p audit.Proof) string {
			b, err := audit.MarshalLine(p.Entry, p.Entry.Hash()) // its hash in the chain fits, too
			if err != nil {
				t.Fatal(err)
			}
			return base64.StdEncoding.EncodeToString(b)
		}
		swap := func(change func(*audit.Proof)) []byte {
			p := prove(t, db, 6)
			was := marshal(t, p)
			change(&p)
			lines := strings.SplitN(string(was), "\n", 3)
			lines[1] = "extra " + line(p)
			return []byte(strings.Join(lines, "\n"))
		}
		other := prove(t, db, 7)
		eve, _ := signer(t, "example.com/audit")
		forged := prove(t, db, 6)
		forged.Entry.Actor = "person:eve"
		forged.Recorded = forged.Entry.Hash()
		forged.Checkpoint, forged.Hashes = lonely(t, eve, forged.Entry)
		for name, bad := range map[string][]byte{
			"the actor changed":          swap(func(p *audit.Proof) { p.Entry.Actor = "person:eve" }),
			"the detail changed":         swap(func(p *audit.Proof) { p.Entry.Detail = `{"k":"w"}` }),
			"the time changed":           swap(func(p *audit.Proof) { p.Entry.At = p.Entry.At.Add(1000) }),
			"another entry":              swap(func(p *audit.Proof) { p.Entry = other.Entry }),
			"another place":              bytes.Replace(good, []byte("\nindex 5\n"), []byte("\nindex 6\n"), 1),
			"place and number":           bytes.Replace(swap(func(p *audit.Proof) { p.Entry.Seq = 7 }), []byte("\nindex 5\n"), []byte("\nindex 6\n"), 1),
			"beyond the tree":            bytes.Replace(swap(func(p *audit.Proof) { p.Entry.Seq = 12 }), []byte("\nindex 5\n"), []byte("\nindex 11\n"), 1),
			"a hash less":                dropLine(good, 3),
			"a hash more":                []byte(strings.Replace(string(good), "\n\n", "\n"+base64.StdEncoding.EncodeToString(make([]byte, 32))+"\n\n", 1)),
			"a hash changed":             swapLines(good, 3, 4),
			"another root":               bytes.Replace(good, []byte("\n11\n"), []byte("\n10\n"), 1),
			"a checkpoint of eve's":      marshal(t, forged),
			"no entry":                   []byte(strings.Replace(string(good), "extra ", "extra !", 1)),
			"no header":                  good[1:],
			"no checkpoint":              good[:bytes.Index(good, []byte("\n\n"))],
			"nothing":                    nil,
			"a hash that is too short":   []byte(strings.Replace(string(good), "\n\n", "\nAAAA\n\n", 1)),
			"more hashes than any tree":  []byte(strings.Replace(string(good), "\n\n", strings.Repeat("\n"+base64.StdEncoding.EncodeToString(make([]byte, 32)), 64)+"\n\n", 1)),
			"a detail that is not shown": []byte(strings.Replace(string(good), "extra ", "extra "+base64.StdEncoding.EncodeToString([]byte(`{"x":"y"}`)), 1)),
		} {
			p, err := audit.ParseProof(bad)
			if err == nil {
				_, err = p.Check(keys)
			}
			if err == nil {
				t.Errorf("%s: it was taken:\n%s", name, bad)
			}
		}
		_, err := audit.ParseProof(good)
		if err != nil {
			t.Error(err)
		}
		appendN(t, db, 1)
		view(t, db, func(ctx context.Context, tx *store.Tx) error {
			if _, err := audit.ProveEntry(ctx, tx, "", 12); !errors.Is(err, audit.ErrNoCheckpoint) {
				t.Errorf("an entry that is too new: %v", err)
			}
			for _, seq := range []int64{0, -1, 13} {
				if _, err := audit.ProveEntry(ctx, tx, "", seq); !errors.Is(err, store.ErrNotFound) {
					t.Errorf("entry %d: %v", seq, err)
				}
			}
			if _, err := audit.ProveEntry(ctx, tx, "prj_2", 6); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("another project's: %v", err)
			}
			return nil
		})
	})
}

// lonely is a record of one entry, at any place, that somebody else signs.
func lonely(t *testing.T, s note.Signer, e audit.Entry) ([]byte, tlog.RecordProof) {
	t.Helper()
	var hashes tlog.RecordProof
	h := tlog.RecordHash(audit.Leaf(e))
	n := e.Seq - 1
	for size := e.Seq - 1; size > 0; size >>= 1 {
		var left tlog.Hash
		if n&1 == 1 {
			h = tlog.NodeHash(left, h)
		} else {
			h = tlog.NodeHash(h, left)
		}
		hashes = append(hashes, left)
		n >>= 1
	}
	signed, err := note.Sign(&note.Note{Text: audit.TreeHead{Origin: s.Name(), Size: 8, Root: h}.String()}, s)
	if err != nil {
		t.Fatal(err)
	}
	return signed, hashes
}

func dropLine(b []byte, n int) []byte {
	lines := bytes.Split(b, []byte("\n"))
	return bytes.Join(slices.Delete(lines, n, n+1), []byte("\n"))
}

func swapLines(b []byte, i, j int) []byte {
	lines := bytes.Split(bytes.Clone(b), []byte("\n"))
	lines[i], lines[j] = lines[j], lines[i]
	return bytes.Join(lines, []byte("\n"))
}

// export writes the whole record with the newest checkpoint in its place.
func export(t testing.TB, db *store.DB, q audit.Query) string {
	t.Helper()
	var newest audit.Signed
	view(t, db, func(ctx context.Context, tx *store.Tx) (err error) {
		if newest, err = audit.Latest(ctx, tx); errors.Is(err, audit.ErrNoCheckpoint) {
			err = nil
		}
		return err
	})
	var b strings.Builder
	_, err := audit.Export(t.Context(), db, q, func(e audit.Entry, hash audit.Digest) error {
		line, err := audit.MarshalLine(e, hash)
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s\n", line)
		if e.Seq == newest.Size {
			line, err = audit.MarshalCheckpoint(newest.Note)
			fmt.Fprintf(&b, "%s\n", line)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestExport: an export is the record again, also after a program has written
// its JSON anew; what was changed, left out or moved in it is found.
func TestExport(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s, v := signer(t, "example.com/audit")
		update(t, db, func(ctx context.Context, tx *store.Tx) error {
			for i := range 2100 { // more than a page
				err := audit.Append(ctx, tx, ann, audit.SetupCreate, "obj_1", audit.Fields{"k": "<a&b>\u2028 \"ü\"", "n": fmt.Sprint(i)})
				if err != nil {
					return err
				}
			}
			return nil
		})
		point := makePoint(t, keeper(t, db, s, audit.KeeperConfig{}))
		appendN(t, db, 2)
		whole := export(t, db, audit.Query{})
		r, err := audit.ExamineExport(strings.NewReader(whole), audit.Options{Keys: note.VerifierList(v)})
		if err != nil || r.Entries != 2102 || len(r.Kept) != 1 || r.Kept[0].Size != 2100 {
			t.Fatalf("ExamineExport = %+v, %v", r, err)
		}
		direct, err := examine(t, db, audit.Options{Kept: kept(t, v, point)})
		if err != nil || direct.Head != r.Head || direct.Root != r.Root {
			t.Errorf("the database has %v %v (%v), its export %v %v", direct.Head, direct.Root, err, r.Head, r.Root)
		}
		if r, err := audit.ExamineExport(strings.NewReader(whole), audit.Options{Kept: kept(t, v, point)}); err != nil || r.Unread != 1 || len(r.Kept) != 1 {
			t.Errorf("with a kept checkpoint and without keys: %+v, %v", r, err)
		}
		lines := strings.SplitAfter(strings.TrimSuffix(whole, "\n"), "\n")
		spaced := strings.ReplaceAll(whole, `","`, `" , "`)
		if _, err := audit.ExamineExport(strings.NewReader(spaced), audit.Options{}); err != nil {
			t.Errorf("written anew: %v", err)
		}
		for _, tt := range []struct {
			name  string
			lines []string
			want  int64
		}{
			{"changed", change(lines, 4, "person:ann", "person:eve"), 5},
			{"removed", slices.Delete(slices.Clone(lines), 4, 5), 5},
			{"the first removed", lines[1:], 1},
			{"twice", slices.Insert(slices.Clone(lines), 4, lines[3]), 5},
			{"moved", append(append(slices.Clone(lines[:4]), lines[5], lines[4]), lines[6:]...), 5},
			{"cut before its checkpoint", append(slices.Clone(lines[:2000]), lines[2100]), 2001},
			{"cut", lines[:2000], 2001},
		} {
			_, err := audit.ExamineExport(strings.NewReader(strings.Join(tt.lines, "")), audit.Options{Keys: note.VerifierList(v), Kept: kept(t, v, point)})
			var broken *audit.BrokenError
			if !errors.As(err, &broken) || broken.Seq != tt.want {
				t.Errorf("%s: %v, want broken at %d", tt.name, err, tt.want)
			}
		}
		part := export(t, db, audit.Query{After: 2050})
		if _, err := audit.ExamineExport(strings.NewReader(part), audit.Options{}); err == nil {
			t.Error("a part was taken for the whole")
		}
		if r, err := audit.ExamineExport(strings.NewReader(part), audit.Options{Partial: true}); err != nil || r.Entries != 52 || r.Gaps != 1 {
			t.Errorf("a part: %+v, %v", r, err)
		}
		if _, err := audit.ExamineExport(strings.NewReader(strings.Replace(part, "person:ann", "person:eve", 1)), audit.Options{Partial: true}); err == nil {
			t.Error("a changed part was taken")
		}
	})
}

func change(lines []string, i int, from, to string) []string {
	out := slices.Clone(lines)
	out[i] = strings.Replace(out[i], from, to, 1)
	return out
}

// TestExportLines: no line says more than what is hashed.
func TestExportLines(t *testing.T) {
	e := audit.Entry{Seq: 1, Verb: "a.b", Actor: "person:ann", Detail: `{}`}
	e.At = e.At.AddDate(2026, 0, 0)
	good, err := audit.MarshalLine(e, e.Hash())
	if err != nil {
		t.Fatal(err)
	}
	if got, hash, err := audit.ParseLine(good); err != nil || got != e || hash != e.Hash() {
		t.Errorf("ParseLine(%s) = %+v, %v", good, got, err)
	}
	odd := e
	odd.Detail = `{ "b": 1 }` // only by somebody who wrote into the database
	if b, err := audit.MarshalLine(odd, odd.Hash()); err != nil {
		t.Error(err)
	} else if got, hash, err := audit.ParseLine(b); err != nil || got != odd || hash != odd.Hash() {
		t.Errorf("ParseLine(%s) = %+v, %v", b, got, err)
	}
	for name, bad := range map[string]string{
		"another field":  strings.Replace(string(good), `{`, `{"approved":"yes",`, 1),
		"two objects":    string(good) + string(good),
		"no detail":      strings.Replace(string(good), `"detail":{},`, ``, 1),
		"null detail":    strings.Replace(string(good), `"detail":{}`, `"detail":null`, 1),
		"numbers":        strings.Replace(string(good), `"detail":{}`, `"detail":{"a":1}`, 1),
		"both details":   strings.Replace(string(good), `"detail":{}`, `"detail":{},"detail_text":"x"`, 1),
		"a short hash":   strings.Replace(string(good), `"prev":"00`, `"prev":"`, 1),
		"another time":   strings.Replace(string(good), `00.000000Z`, `00Z`, 1),
		"no JSON at all": "x",
	} {
		if _, _, err := audit.ParseLine([]byte(bad)); err == nil {
			t.Errorf("%s: %s was taken", name, bad)
		}
	}
	if err := audit.ReadExport(strings.NewReader(string(good)+"\n"+strings.Repeat("x", 2<<20)), func(audit.Line) error { return nil }); err == nil {
		t.Error("an endless line was taken")
	}
	n := 0
	if err := audit.ReadExport(strings.NewReader(string(good)+"\n\n"+string(good)), func(l audit.Line) error { n++; return nil }); err != nil || n != 1 {
		t.Errorf("a last line that is cut: %d lines, %v", n, err)
	}
}
