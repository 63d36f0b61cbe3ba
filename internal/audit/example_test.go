package audit_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// open returns a new database with a key for seals, and what removes it.
func open(ctx context.Context) (*store.DB, func()) {
	dir, err := os.MkdirTemp("", "audit")
	if err != nil {
		panic(err)
	}
	db, err := store.Open(ctx, filepath.Join(dir, "postern.db"), "")
	if err == nil {
		err = db.UseKey(make([]byte, 32)) // a real server draws it once, and keeps it in a file
	}
	if err != nil {
		panic(err)
	}
	return db, func() { db.Close(); os.RemoveAll(dir) }
}

// A change and its entry are one transaction: neither is there without the other.
// Who changes an entry later, in the database, breaks the chain.
func ExampleAppend() {
	ctx := context.Background()
	db, remove := open(ctx)
	defer remove()
	ann := auth.Principal{Kind: auth.Person, ID: "ann", Project: "prj_1"}
	update := func(f func(tx *store.Tx) error) {
		if err := db.Update(ctx, f); err != nil {
			panic(err)
		}
	}

	update(func(tx *store.Tx) error {
		// … the change itself, and then:
		return audit.Append(ctx, tx, ann, audit.InboxCreate, "ibx_1", audit.Fields{"address": "bob@agents.example"})
	})
	update(func(tx *store.Tx) error {
		return audit.Append(ctx, tx, ann, audit.InboxMode, "ibx_1", audit.Fields{"from": "gated_send", "to": "autonomous"})
	})
	update(func(tx *store.Tx) error {
		entries, err := audit.List(ctx, tx, audit.Query{Object: "ibx_1", Verb: "inbox."})
		for _, e := range entries { // the newest first
			fmt.Println(e.Seq, e.Actor, e.Verb, e.Detail)
		}
		if err != nil {
			return err
		}
		report, err := audit.Examine(ctx, tx, audit.Options{})
		fmt.Println("verified to entry", report.Head.Seq)
		return err
	})

	update(func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update audit_entry set actor = 'person:eve' where seq = 1`)
		return err
	})
	update(func(tx *store.Tx) error {
		_, err := audit.Examine(ctx, tx, audit.Options{})
		fmt.Println(err)
		return nil
	})
	// Output:
	// 2 person:ann inbox.mode {"from":"gated_send","to":"autonomous"}
	// 1 person:ann inbox.create {"address":"bob@agents.example"}
	// verified to entry 2
	// audit chain broken at entry 1: its content is not what was recorded
}

// A proof shows one entry, and nothing of the others, to somebody who has only the
// server's public key.
func ExampleProof_Check() {
	ctx := context.Background()
	db, remove := open(ctx)
	defer remove()
	secret, public, err := note.GenerateKey(rand.Reader, "postern.example/audit")
	if err != nil {
		panic(err)
	}
	signer, err := note.NewSigner(secret)
	if err != nil {
		panic(err)
	}

	var file []byte // what the other party is given
	err = db.Update(ctx, func(tx *store.Tx) error {
		ann := auth.Principal{Kind: auth.Person, ID: "ann", Project: "prj_1"}
		for _, id := range []string{"act_1", "act_2", "act_3"} {
			if err := audit.Append(ctx, tx, ann, audit.ActionApprove, id, nil); err != nil {
				return err
			}
		}
		if _, err := audit.Checkpoint(ctx, tx, signer); err != nil {
			return err
		}
		p, err := audit.ProveEntry(ctx, tx, "prj_1", 2)
		if err != nil {
			return err
		}
		file, err = p.Marshal()
		return err
	})
	if err != nil {
		panic(err)
	}

	verifier, err := note.NewVerifier(public)
	if err != nil {
		panic(err)
	}
	p, err := audit.ParseProof(file)
	if err != nil {
		panic(err)
	}
	kept, err := p.Check(note.VerifierList(verifier))
	fmt.Println(p.Entry.Verb, p.Entry.Object, "is entry", p.Entry.Seq, "of", kept.Size, err)
	// Output:
	// action.approve act_2 is entry 2 of 3 <nil>
}
