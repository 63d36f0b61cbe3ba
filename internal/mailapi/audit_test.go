package mailapi

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"postern/internal/api"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

func checkpointSigner(t *testing.T) func(context.Context) (note.Signer, error) {
	t.Helper()
	private, _, err := note.GenerateKey(rand.Reader, "agents.test/audit")
	if err != nil {
		t.Fatal(err)
	}
	s, err := note.NewSigner(private)
	if err != nil {
		t.Fatal(err)
	}
	return func(context.Context) (note.Signer, error) { return s, nil }
}

// entry returns the number of an entry of the first project that a checkpoint
// covers.
func (f *fixture) entry(t *testing.T) (seq int64) {
	t.Helper()
	if _, err := f.record.Make(t.Context()); err != nil {
		t.Fatal(err)
	}
	err := audit.View(t.Context(), f.db, func(tx *store.Tx) error {
		list, err := audit.List(t.Context(), tx, audit.Query{Project: f.person.Project, Limit: 1})
		if err == nil {
			seq = list[0].Seq
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

// TestAuditProofs: what the API gives out is proved with the hashes of a
// checkpoint, and nobody gets a proof of another project's entry.
func TestAuditProofs(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		if got := f.do(t, "person", "GET", "/v1/audit/checkpoint", ""); got.code != 409 || !strings.Contains(got.body, "no_checkpoint") {
			t.Errorf("before there is one: %d %s", got.code, got.body)
		}
		read := func(path string, to any) {
			t.Helper()
			got := f.do(t, "person", "GET", path, "")
			if got.code != 200 {
				t.Fatalf("%s: %d %s", path, got.code, got.body)
			}
			if err := json.Unmarshal([]byte(got.body), to); err != nil {
				t.Fatal(err)
			}
		}
		seq := f.entry(t)
		var first api.Checkpoint
		read("/v1/audit/checkpoint", &first)
		var p api.Proof
		read(fmt.Sprintf("/v1/audit/proof?seq=%d", seq), &p)
		proof, err := audit.ParseProof([]byte(p.Proof))
		if err != nil || p.Seq != seq || p.Checkpoint != first.Checkpoint {
			t.Fatalf("proof = %+v, %v", p, err)
		}
		_, vkey, err := note.GenerateKey(rand.Reader, "agents.test/audit")
		if err != nil {
			t.Fatal(err)
		}
		other, err := note.NewVerifier(vkey)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := proof.Check(note.VerifierList(other)); err == nil {
			t.Error("a key that did not sign it checks it")
		}
		for range 5 {
			err := db.Update(t.Context(), func(tx *store.Tx) error {
				return audit.Append(t.Context(), tx, auth.Principal{Kind: auth.System, ID: "test", Project: f.person.Project}, audit.SetupCreate, "x", nil)
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		if got := f.do(t, "person", "GET", fmt.Sprintf("/v1/audit/proof?seq=%d", first.Size+1), ""); got.code != 409 {
			t.Errorf("an entry that no checkpoint covers: %d %s", got.code, got.body)
		}
		if got := f.do(t, "person", "POST", "/v1/audit/checkpoint", ""); got.code != 200 {
			t.Fatalf("make one: %d %s", got.code, got.body)
		}
		var second api.Checkpoint
		read("/v1/audit/checkpoint", &second)
		var c api.Proof
		read(fmt.Sprintf("/v1/audit/proof?from=%d", first.Size), &c)
		var hashes tlog.TreeProof
		for _, h := range c.Hashes {
			hash, err := tlog.ParseHash(h)
			if err != nil {
				t.Fatal(err)
			}
			hashes = append(hashes, hash)
		}
		old, err1 := tlog.ParseHash(first.Root)
		root, err2 := tlog.ParseHash(second.Root)
		if err1 != nil || err2 != nil {
			t.Fatal(err1, err2)
		}
		if err := tlog.CheckTree(hashes, second.Size, root, first.Size, old); err != nil || second.Size != first.Size+5 {
			t.Errorf("from %d to %d: %v", first.Size, second.Size, err)
		}
		var page struct {
			Entries []api.AuditEntry
			Next    *int64
		}
		read("/v1/audit?actor=system:&verb=setup.&limit=3", &page)
		if len(page.Entries) != 3 || page.Next == nil || *page.Next != page.Entries[2].Seq {
			t.Fatalf("first page = %+v", page)
		}
		read(fmt.Sprintf("/v1/audit?actor=system:test&verb=setup.&limit=3&before=%d", *page.Next), &page)
		if len(page.Entries) != 2 || page.Next != nil {
			t.Errorf("last page = %+v", page)
		}
		read("/v1/audit?until=2020-01-01T00:00:00Z", &page)
		if len(page.Entries) != 0 {
			t.Errorf("before there was anything: %+v", page)
		}
		for _, bad := range []string{"", "?seq=0", "?seq=x", "?seq=1&from=1", "?to=2", "?from=0", "?from=3&to=2", "?from=1&to=100000000"} {
			if got := f.do(t, "person", "GET", "/v1/audit/proof"+bad, ""); got.code != 400 {
				t.Errorf("proof%s: %d %s", bad, got.code, got.body)
			}
		}
		for _, bad := range []string{"?since=yesterday", "?until=1", "?actor=%00", "?actor=%ff", "?before=-1"} {
			if got := f.do(t, "person", "GET", "/v1/audit"+bad, ""); got.code != 400 {
				t.Errorf("audit%s: %d %s", bad, got.code, got.body)
			}
		}
	})
}
