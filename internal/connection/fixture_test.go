package connection_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/store"
)

type fixture struct {
	t    *testing.T
	log  *slog.Logger
	db   *store.DB
	book *rulebook.Book
	gate *oversight.Gate

	void time.Time // approvals from before are void for servers that are started

	owner auth.Principal
}

func setup(t *testing.T, db *store.DB) *fixture {
	t.Helper()
	f := &fixture{t: t, log: slog.New(slog.NewTextHandler(t.Output(), nil)), db: db}
	f.book, f.gate = f.server(db)
	f.owner = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
		f.owner.Project, _, err = auth.NewProject(t.Context(), tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// server is a program on db.
func (f *fixture) server(db *store.DB) (*rulebook.Book, *oversight.Gate) {
	book := rulebook.New(f.log, db)
	gate := oversight.NewGate(f.log, db, book)
	gate.Void(f.void)
	gate.Handle(policy.KindChange, book)
	return book, gate
}

func (f *fixture) propose(c rulebook.Change) oversight.Action {
	f.t.Helper()
	a, err := f.book.Propose(f.t.Context(), f.gate, f.owner, c)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func (f *fixture) approve(a oversight.Action) {
	f.t.Helper()
	if err := f.gate.Decide(f.t.Context(), f.owner, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true}); err != nil {
		f.t.Fatal(err)
	}
}

// run executes what is due, and returns a as it is then.
func (f *fixture) run(a oversight.Action) oversight.Action {
	f.t.Helper()
	if _, err := f.gate.RunOne(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	a, err := f.gate.Action(f.t.Context(), f.owner, a.ID)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

// interrupted calls first before it executes.
type interrupted struct {
	oversight.Executor
	first func()
}

func (i interrupted) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	i.first()
	return i.Executor.Execute(ctx, a)
}
