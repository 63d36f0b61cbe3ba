package e2bapi

import (
	"errors"
	"log/slog"
	"testing"

	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestLendTooLate: a sandbox that ended while its creator's request was under
// way keeps no key open, since its end will not come again to return it.
func TestLendTooLate(t *testing.T) {
	ctx, db := t.Context(), storetest.SQLite(t)
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	fleet, err := sandbox.New(log, db, &sandboxtest.Fake{}, nil, sandboxtest.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{log: log, db: db, fleet: fleet, mail: mailbox.New(log, db, oversight.NewGate(log, db, oversight.Fixed(nil)), mailbox.Config{Blobs: blobs, Domain: "agents.test"})}
	who := auth.Principal{Kind: auth.Project, ID: "crd_1"}
	err = db.Update(ctx, func(tx *store.Tx) (err error) {
		who.Project, _, err = auth.NewProject(ctx, tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	inbox, key, err := s.mail.CreateInbox(ctx, who, mailbox.NewInbox{Address: "analyst"}, "")
	if err != nil {
		t.Fatal(err)
	}
	gone := sandbox.Info{ID: testID, Project: who.Project, Inbox: inbox.ID}
	if err := s.lend(ctx, who, gone, key); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("lend = %v, want %v", err, sandbox.ErrNotFound)
	}
	if _, err := s.mail.Lent(t.Context(), gone.Principal()); !errors.Is(err, auth.ErrForbidden) {
		t.Errorf("the key is still lent: %v", err)
	}
}
