package mailbox_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/mailbox"
	"postern/internal/signing"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestSigningDomains: a request without a domain lists the keys of the caller's
// project and of no other. Only the operator sees those of the server's domain.
func TestSigningDomains(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ring, err := signing.New(db, signing.Config{Key: bytes.Repeat([]byte("k"), 32)})
		if err != nil {
			t.Fatal(err)
		}
		post := mailbox.New(slog.New(slog.NewTextHandler(t.Output(), nil)), db, f.gate, mailbox.Config{Domain: "agents.test", Signer: ring})
		stranger := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "bob", Project: f.other.Project}
		for name, project := range map[string]string{"agents.test": "", "mine.example": f.project.Project, "theirs.example": f.other.Project, "claimed.example": ""} {
			if err := ring.Prepare(t.Context(), name); err != nil {
				t.Fatal(err)
			}
			state, holder := "verified", project
			if name == "claimed.example" {
				state, holder = "pending", f.project.Project
			}
			if holder != "" {
				f.exec(t, `insert into mail_domain (id, project_id, name, token, state, version, checks, failures, created_at, verified_at, checked_at, next_at, missing_since, lost_at)
					values ($1, $2, $1, '', $3, 1, '[]', 0, 1, 1, 1, 0, 0, 0)`, name, holder, state)
			}
		}
		for _, tt := range []struct {
			who  auth.Principal
			want string
		}{{f.person, "agents.test mine.example"}, {stranger, "theirs.example"}} {
			got, err := post.Signing.Domains(t.Context(), tt.who)
			if err != nil || strings.Join(got, " ") != tt.want {
				t.Errorf("%s: got %v, %v, want %s", tt.who, got, err, tt.want)
			}
		}
		if _, err := post.Signing.Domains(t.Context(), f.project); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a key: %v", err)
		}
	})
}
