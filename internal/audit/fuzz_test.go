package audit_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/store"
	"postern/internal/storetest"
)

// sample is a record of some entries, with a checkpoint of another key each run.
func sample(f *testing.F) (proof, checkpoint, export []byte, keys note.Verifiers) {
	f.Helper()
	db := storetest.SQLite(f)
	private, public, err := note.GenerateKey(rand.Reader, "example.com/audit")
	if err != nil {
		f.Fatal(err)
	}
	s, err1 := note.NewSigner(private)
	v, err2 := note.NewVerifier(public)
	if err1 != nil || err2 != nil {
		f.Fatal(err1, err2)
	}
	err = db.Update(f.Context(), func(tx *store.Tx) error {
		for range 5 {
			if err := audit.Append(f.Context(), tx, ann, audit.SetupCreate, "x", audit.Fields{"k": "v"}); err != nil {
				return err
			}
		}
		checkpoint, err = audit.Checkpoint(f.Context(), tx, s)
		return err
	})
	if err != nil {
		f.Fatal(err)
	}
	view(f, db, func(ctx context.Context, tx *store.Tx) error {
		p, err := audit.ProveEntry(ctx, tx, "", 3)
		if err == nil {
			proof, err = p.Marshal()
		}
		return err
	})
	return proof, checkpoint, []byte(exportOf(f, db)), note.VerifierList(v)
}

func exportOf(f *testing.F, db *store.DB) string {
	f.Helper()
	return export(f, db, audit.Query{})
}

// FuzzProof: malformed proofs are refused, parsed proofs survive a round trip, and no
// proof holds except the one that was issued.
func FuzzProof(f *testing.F) {
	proof, _, _, keys := sample(f)
	f.Add(proof)
	f.Add([]byte("c2sp.org/tlog-proof@v1\nextra \nindex 0\n\nx\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := audit.ParseProof(b)
		if err != nil {
			return
		}
		out, err := p.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		q, err := audit.ParseProof(out)
		if err != nil || q.Entry != p.Entry || q.Recorded != p.Recorded || !bytes.Equal(q.Checkpoint, p.Checkpoint) {
			t.Errorf("%q became %q: %v", b, out, err)
		}
		if k, err := p.Check(keys); err == nil && (p.Entry.Seq != 3 || p.Entry.Actor != ann.String() || p.Entry.Detail != `{"k":"v"}` || k.Size != 5) {
			t.Errorf("a proof of an entry that is not in the record holds: %+v", p.Entry)
		}
	})
}

// FuzzCheckpoint: nothing but what was signed opens.
func FuzzCheckpoint(f *testing.F) {
	_, checkpoint, _, keys := sample(f)
	f.Add(checkpoint)
	f.Add([]byte("example.com/audit\n5\nAAAA\n\n— example.com/audit AAAA\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, n := range audit.SplitNotes(b) {
			_, _, _ = audit.OpenCheckpoint(n, keys)
		}
		if h, err := audit.ParseTreeHead(string(b)); err == nil && !bytes.HasPrefix(b, []byte(h.String())) {
			t.Errorf("%q was read as %q", b, h)
		}
		h, _, err := audit.OpenCheckpoint(b, keys)
		if err == nil && h.Size != 5 {
			t.Errorf("a checkpoint of %d entries opens: %q", h.Size, b)
		}
	})
}

// FuzzExport: a line that is read is written as one that says the same, and no
// other record than the one that was written ends in its head.
func FuzzExport(f *testing.F) {
	_, _, whole, keys := sample(f)
	f.Add(whole)
	f.Add([]byte(`{"seq":1,"at":"2026-11-21T15:04:05.000000Z","project":"","actor":"","verb":"","object":"","detail":{},"prev":"","hash":""}` + "\n"))
	f.Add([]byte(`{"checkpoint":"x"}` + "\n"))
	want, err := audit.ExamineExport(bytes.NewReader(whole), audit.Options{Keys: keys})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var entries []audit.Entry
		err := audit.ReadExport(bytes.NewReader(b), func(l audit.Line) error {
			if l.Checkpoint != nil {
				return nil
			}
			out, err := audit.MarshalLine(l.Entry, l.Hash)
			if err != nil {
				t.Fatal(err)
			}
			e, hash, err := audit.ParseLine(out)
			if err != nil || e.Hash() != l.Entry.Hash() || hash != l.Hash {
				t.Errorf("%+v became %s: %v", l.Entry, out, err)
			}
			entries = append(entries, l.Entry)
			return nil
		})
		if err != nil {
			return
		}
		r, err := audit.ExamineExport(bytes.NewReader(b), audit.Options{Keys: keys})
		if err == nil && r.Head == want.Head && (r.Root != want.Root || len(entries) != 5) {
			t.Errorf("another record with the same head: %+v", entries)
		}
		_, _ = audit.ExamineExport(bytes.NewReader(b), audit.Options{Partial: true})
	})
}

// FuzzKeys: no document of keys, however it is made, does harm.
func FuzzKeys(f *testing.F) {
	f.Add([]byte("example.com/audit+00000000+AAAA\n"))
	f.Add([]byte(`{"version":1,"keys":[{"vkey":"x","not_before":"2026-11-21T00:00:00Z","not_after":null}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		keys, err := audit.ParseKeys(b)
		if err != nil {
			return
		}
		doc, err := audit.KeysDocument(keys)
		if err != nil {
			return // a year beyond 9999
		}
		if again, err := audit.ParseKeys(doc); err != nil || len(again) != len(keys) {
			t.Errorf("%q became %q: %v", b, doc, err)
		}
	})
}
