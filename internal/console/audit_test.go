package console_test

import (
	"context"
	"crypto/rand"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/store"
)

// newRecord makes the keeper of the record, which makes no checkpoint by itself.
func (f *fixture) newRecord() {
	f.t.Helper()
	private, public, err := note.GenerateKey(rand.Reader, "agents.test/audit")
	if err != nil {
		f.t.Fatal(err)
	}
	signer, err := note.NewSigner(private)
	if err != nil {
		f.t.Fatal(err)
	}
	f.vkey = public
	f.record, err = audit.NewKeeper(slog.New(slog.NewTextHandler(f.t.Output(), nil)), f.db, audit.KeeperConfig{
		Signer: func(context.Context) (note.Signer, error) { return signer, nil },
	})
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) recordKeys(context.Context) ([]audit.Key, error) {
	return []audit.Key{{VKey: f.vkey}}, nil
}

// TestSavedCheckpointRevealsRewrite: the page says how far the last checkpoint goes, each entry
// has a page and a proof that can be checked elsewhere, and a kept checkpoint
// shows a record that was written anew as a whole.
func TestSavedCheckpointRevealsRewrite(t *testing.T) {
	f := setup(t)
	f.enter()
	a := f.propose(draft())
	contains(t, "before", f.get("/console/audit").body, "No checkpoint has been signed yet")
	if got := f.get("/console/audit/checkpoint"); got.status != http.StatusNotFound {
		t.Errorf("no checkpoint: %d, want 404", got.status)
	}
	contains(t, "uncovered", f.get("/console/audit/1").body, "No checkpoint covers this entry yet")
	if got := f.get("/console/audit/1/proof"); got.status != http.StatusNotFound {
		t.Errorf("no proof: %d, want 404", got.status)
	}
	made, err := f.record.Make(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	contains(t, "covered", f.get("/console/audit").body, "entries are covered by", strconv.FormatInt(made.Size, 10))
	kept := f.get("/console/audit/checkpoint")
	if kept.body != string(made.Note) || !strings.HasPrefix(kept.header.Get("Content-Disposition"), "attachment") {
		t.Errorf("checkpoint = %q, %v", kept.body, kept.header)
	}
	var seq int64
	if err := audit.View(t.Context(), f.db, func(tx *store.Tx) error {
		list, err := audit.List(t.Context(), tx, audit.Query{Object: a.ID})
		if err == nil {
			seq = list[0].Seq
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	path := "/console/audit/" + strconv.FormatInt(seq, 10)
	contains(t, "entry", f.get(path).body, "action.propose", a.ID, a.Hex(), "Download the proof")
	proof, err := audit.ParseProof([]byte(f.get(path + "/proof").body))
	if err != nil {
		t.Fatal(err)
	}
	verifier, err := note.NewVerifier(f.vkey)
	if err != nil {
		t.Fatal(err)
	}
	if k, err := proof.Check(note.VerifierList(verifier)); err != nil || proof.Entry.Object != a.ID || k.Size != made.Size {
		t.Errorf("proof of %s: %+v, %v", proof.Entry.Object, k, err)
	}
	for _, bad := range []string{"0", "-1", "x", "99999", "1e3"} {
		if got := f.get("/console/audit/" + bad); got.status != http.StatusNotFound {
			t.Errorf("entry %s: %d, want 404", bad, got.status)
		}
	}
	f.exec(`insert into project (id, name, created_at) values ('prj_other', 'other', 0)`)
	f.exec(`update audit_entry set project_id = 'prj_other' where seq = 1`)
	if a, b := f.get("/console/audit/1"), f.get("/console/audit/1/proof"); a.status != http.StatusNotFound || b.status != http.StatusNotFound {
		t.Errorf("another project's entry: %d, %d, want 404", a.status, b.status)
	}
	f.exec(`update audit_entry set project_id = $1 where seq = 1`, f.person.Project)

	f.propose(draft())
	contains(t, "newer", f.get("/console/audit").body, "newer than")
	contains(t, "by actor", f.get("/console/audit?actor=person:").body, "person.", "Clear filter")
	if body := f.get("/console/audit?until=2020-01-01T00:00").body; !strings.Contains(body, "No matching entries") {
		t.Error("an entry from before there was anything")
	}
	for _, q := range []string{"since=yesterday", "until=1", "actor=%00"} {
		if got := f.get("/console/audit?" + q); got.status != http.StatusBadRequest {
			t.Errorf("%s: %d, want 400", q, got.status)
		}
	}
	browser := strings.ReplaceAll(kept.body, "\n", "\r\n") // as a form sends it
	contains(t, "with it", f.submit("/console/audit/verify", url.Values{"checkpoint": {browser}}).body, "The record is intact", "unchanged since the checkpoint that you saved", "newer than your saved head or checkpoint")
	for name, forged := range map[string]string{"nonsense": "x", "another size": strings.Replace(browser, "\r\n"+strconv.FormatInt(made.Size, 10), "\r\n1", 1)} {
		if got := f.submit("/console/audit/verify", url.Values{"checkpoint": {forged}}); got.status != http.StatusBadRequest {
			t.Errorf("%s: %d, want 400", name, got.status)
		}
	}
	// Whoever can write all of the database cuts the record at its end.
	f.exec(`delete from audit_entry where seq > 2`)
	f.exec(`delete from audit_node`)
	f.exec(`delete from audit_checkpoint`)
	f.exec(`update audit_head set seq = 2, hash = (select hash from audit_entry where seq = 2), tree_size = 0, tree_edge = $1`, []byte{})
	if err := audit.Fill(t.Context(), f.db, nil); err != nil {
		t.Fatal(err)
	}
	contains(t, "cut", f.submit("/console/audit/verify", url.Values{}).body, "The record is intact")
	contains(t, "cut, with it", f.submit("/console/audit/verify", url.Values{"checkpoint": {browser}}).body, "The record was changed", "entry 3")
	if _, err := f.record.Make(t.Context()); err == nil {
		t.Error("the server signs a record that was cut")
	}
	contains(t, "cut, the page", f.get("/console/audit").body, "Checkpoints cannot be signed")
}
