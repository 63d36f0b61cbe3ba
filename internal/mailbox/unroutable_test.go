package mailbox_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"postern/internal/delivery"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// island is a next hop without a way to a domain.
type island struct{ *nextHop }

var _ delivery.Guide = island{}

// Unroutable implements [mailbox.Guide].
func (island) Unroutable(_ context.Context, recipients []string) (domains []string, hint string) {
	for _, to := range recipients {
		if mail.Domain(to) == "far.example" {
			return []string{"far.example"}, "build a bridge"
		}
	}
	return nil, "build a bridge"
}

// TestShowWarnsOfUnroutableRecipients: an approver sees before the approval that the
// server has no route to a recipient.
func TestShowWarnsOfUnroutableRecipients(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, who, _ := f.inbox(t, "alice")
		post := mailbox.New(slog.New(slog.NewTextHandler(t.Output(), nil)), db, f.gate, mailbox.Config{Transport: island{f.hop}, Domain: "agents.test"})
		for _, tt := range []struct {
			to   []string
			want bool
		}{{[]string{"bob@near.example"}, false}, {[]string{"bob@near.example", "ann@far.example"}, true}} {
			p, err := post.Send(t.Context(), who, "rest", mailbox.Outgoing{Draft: mail.Draft{To: tt.to, Subject: strings.Join(tt.to, " "), Text: "x"}})
			if err != nil {
				t.Fatal(err)
			}
			a, err := f.gate.Action(t.Context(), f.person, p.ID)
			if err != nil {
				t.Fatal(err)
			}
			v, err := f.gate.Show(a)
			if err != nil {
				t.Fatal(err)
			}
			notes := strings.Join(v.Notes, "\n")
			if told := strings.Contains(notes, "no route to far.example") && strings.Contains(notes, "build a bridge") && len(v.Unroutable) == 1; told != tt.want {
				t.Errorf("to %v: notes %q, unroutable %v; want them: %v", tt.to, notes, v.Unroutable, tt.want)
			}
		}
	})
}
