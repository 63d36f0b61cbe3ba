package rulebook_test

import (
	"log/slog"
	"testing"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/store"
	"postern/internal/storetest"
)

// bench returns a project with a policy of its own, and a sandbox in it.
func bench(b *testing.B) (*store.DB, *rulebook.Book, auth.Principal) {
	b.Helper()
	log := slog.New(slog.DiscardHandler)
	db := storetest.SQLite(b)
	book := rulebook.New(log, db)
	gate := oversight.NewGate(log, db, book)
	gate.Handle(policy.KindChange, book)
	who := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err := db.Update(b.Context(), func(tx *store.Tx) (err error) {
		who.Project, _, err = auth.NewProject(b.Context(), tx, "one")
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	a, err := book.Propose(b.Context(), gate, who, rulebook.Change{Text: "rules:\n  - {id: mails, kind: email.send, then: ask}\n"})
	if err == nil {
		err = gate.Decide(b.Context(), who, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true})
	}
	if err == nil {
		_, err = gate.RunOne(b.Context())
	}
	if err != nil {
		b.Fatal(err)
	}
	return db, book, auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: who.Project}
}

// BenchmarkJudge is what a proposal pays for its verdict in its transaction.
func BenchmarkJudge(b *testing.B) {
	db, book, box := bench(b)
	for b.Loop() {
		err := db.View(b.Context(), func(tx *store.Tx) error {
			_, err := book.Judge(b.Context(), tx, box.Project, toBob)
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
	}
}
