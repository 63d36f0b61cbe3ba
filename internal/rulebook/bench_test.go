package rulebook_test

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/store"
	"postern/internal/storetest"
)

// BenchmarkPermit is what an allowed connection pays for the last word, and
// BenchmarkJudge what a proposal pays for its verdict in its transaction.
func bench(b *testing.B) (*store.DB, *rulebook.Book, *rulebook.Connections, auth.Principal) {
	b.Helper()
	log := slog.New(slog.DiscardHandler)
	db := storetest.SQLite(b)
	book := rulebook.New(log, db)
	gate := oversight.NewGate(log, db, book)
	c := rulebook.NewConnections(log, db, book, gate, time.Second)
	gate.Handle(policy.KindChange, book)
	who := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err := db.Update(b.Context(), func(tx *store.Tx) (err error) {
		who.Project, _, err = auth.NewProject(b.Context(), tx, "one")
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	a, err := book.Propose(b.Context(), gate, who, rulebook.Change{Text: rulesOnConnections})
	if err == nil {
		err = gate.Decide(b.Context(), who, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true})
	}
	if err == nil {
		_, err = gate.RunOne(b.Context())
	}
	if err != nil {
		b.Fatal(err)
	}
	return db, book, c, auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: who.Project}
}

func BenchmarkPermit(b *testing.B) {
	_, _, c, box := bench(b)
	ctx, to := b.Context(), policy.Connection{Addr: netip.MustParseAddrPort("203.0.113.7:443"), Names: []string{"good.example"}}
	go func() { _ = c.Run(ctx) }()
	for b.Loop() {
		if v := c.Permit(ctx, box, to); v.Effect != policy.Allow {
			b.Fatal(v)
		}
	}
}

func BenchmarkJudge(b *testing.B) {
	db, book, _, box := bench(b)
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
