package mailbox_test

import (
	"errors"
	"testing"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestReviseByPerson: what a reviewer edited leaves only by an approval of its
// own digest, and everybody sees what was changed, by whom.
func TestReviseByPerson(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, agent, _ := f.inbox(t, "analyst")
		f.hop.outcome = mail.Accepted
		p, err := f.post.Send(t.Context(), agent, "rest", mailbox.Outgoing{Draft: mail.Draft{
			To: []string{"bob@example.com"}, Subject: "Offer", Text: "a million", Attachments: []mail.Attachment{{Name: "a.txt", ContentType: "text/plain", Data: []byte("secret")}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		subject := "A better offer"
		edit := mail.Edit{Subject: &subject, Drop: []int{0}}
		viewer := f.person
		viewer.Role = auth.Viewer
		for _, who := range []auth.Principal{agent, viewer} {
			if _, err := f.post.ReviseByPerson(t.Context(), who, p.ID, p.Version, edit); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s edits: %v, want ErrForbidden", who, err)
			}
		}
		if _, err := f.post.ReviseByPerson(t.Context(), f.person, p.ID, p.Version+1, edit); !errors.Is(err, oversight.ErrStale) {
			t.Errorf("an edit of another version: %v, want ErrStale", err)
		}
		file, data, err := f.gate.File(t.Context(), f.person, p.ID, 0)
		if err != nil || string(data) != "secret" || file.Name != "a.txt" {
			t.Errorf("File = %+v %q, %v", file, data, err)
		}
		a, err := f.post.ReviseByPerson(t.Context(), f.person, p.ID, p.Version, edit)
		if err != nil {
			t.Fatal(err)
		}
		if a.State != oversight.Pending || a.Hex() == p.Hex() || a.Proposer != agent.String() || a.Author != f.person.String() {
			t.Errorf("edited = %+v", a)
		}
		if _, _, err := f.gate.File(t.Context(), f.person, p.ID, 0); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("the file that was taken out: %v, want ErrNotFound", err)
		}
		old := oversight.Decision{ID: a.ID, Version: p.Version, Digest: p.Hex(), Approve: true}
		for _, version := range []int64{p.Version, a.Version} {
			old.Version = version
			if err := f.gate.Decide(t.Context(), f.person, old); !errors.Is(err, oversight.ErrStale) {
				t.Errorf("the old digest at version %d: %v, want ErrStale", version, err)
			}
		}
		rs, err := f.gate.Revisions(t.Context(), f.person, a.ID)
		if err != nil || len(rs) != 2 || rs[0].Author != agent.String() || rs[1].Author != f.person.String() || !rs[1].Current {
			t.Fatalf("Revisions = %+v, %v", rs, err)
		}
		changes, err := mailbox.Difference(rs[0], rs[1])
		if err != nil || len(changes) != 2 || changes[0] != (mail.Change{Field: "Subject", Old: "Offer", New: subject}) || changes[1].Field != "file" {
			t.Errorf("Difference = %+v, %v", changes, err)
		}
		if _, err := f.gate.Revisions(t.Context(), agent, a.ID); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("an agent reads revisions: %v, want ErrForbidden", err)
		}
		if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true}); err != nil {
			t.Fatal(err)
		}
		if _, err := f.gate.RunOne(t.Context()); err != nil {
			t.Fatal(err)
		}
		if a, err = f.gate.Action(t.Context(), f.person, a.ID); err != nil || a.State != oversight.Done {
			t.Errorf("afterwards %s, %v: %s", a.State, err, a.Result)
		}
	})
}
