package connection_test

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/connection"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/store"
	"postern/internal/storetest"
)

// bench returns an Admission by a policy about connections, and a sandbox.
func bench(b *testing.B) (*connection.Admission, auth.Principal) {
	b.Helper()
	log := slog.New(slog.DiscardHandler)
	db := storetest.SQLite(b)
	book := rulebook.New(log, db)
	gate := oversight.NewGate(log, db, book)
	c := connection.New(log, db, book, gate, time.Second)
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
	return c, auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: who.Project}
}

// BenchmarkPermit is what policy adds to an allowed connection.
func BenchmarkPermit(b *testing.B) {
	c, box := bench(b)
	ctx, to := b.Context(), policy.Connection{Addr: netip.MustParseAddrPort("203.0.113.7:443"), Names: []string{"good.example"}}
	go func() { _ = c.Run(ctx) }()
	for b.Loop() {
		if v := c.Permit(ctx, box, to); v.Effect != policy.Allow {
			b.Fatal(v)
		}
	}
}
