package mailbox_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestNotes: tags and contacts are sealed to the newest key of the inbox, changed by
// who may change something, bounded, and removed with what they are about.
func TestNotes(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		b, who, key := f.inbox(t, "analyst")
		k, id := f.arrived(t, b, who, key, "From: Bob <bob@example.com>\r\nSubject: s\r\n\r\nt\r\n")
		if _, err := f.post.ChangeTags(ctx, who, k, id, map[string]string{"amount": secretWord}); err != nil {
			t.Fatal(err)
		}
		saved, err := f.post.SaveContact(ctx, who, k, mailbox.SavedContact{Name: secretWord, Address: "Farm@Example.com"})
		if err != nil || saved.Address != "farm@example.com" {
			t.Fatal(saved, err)
		}
		f.each(t, "inbox_note", func(row []byte) {
			if bytes.Contains(bytes.ToLower(row), []byte(strings.ToLower(secretWord))) {
				t.Error("a note is not sealed")
			}
		})

		// A key that was revoked opens nothing that was written after it, even with a
		// copy of the database; the others open all of it.
		p, reading, err := f.post.Keys.Add(ctx, who, k, keyring.NewKey{Scope: seal.Read})
		if err != nil {
			t.Fatal(err)
		}
		reader, old := f.show(t, reading, b.ID)
		if _, err := f.post.ChangeTags(ctx, reader, old, id, map[string]string{"a": "b"}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a reading key changed tags: %v", err)
		}
		if _, err := f.post.SaveContact(ctx, reader, old, mailbox.SavedContact{Name: "x", Address: "x@example.com"}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a reading key saved a contact: %v", err)
		}
		if err := f.post.DeleteContact(ctx, reader, old, saved.ID); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a reading key deleted a contact: %v", err)
		}
		if err := f.post.Keys.Revoke(ctx, who, "", p.Credential, false); err != nil {
			t.Fatal(err)
		}
		k = f.open(t, who, key)
		if _, err := f.post.ChangeTags(ctx, who, k, id, map[string]string{"due": "friday"}); err != nil {
			t.Fatal(err)
		}
		if _, err := f.post.Tags(ctx, reader, old, id); !errors.Is(err, seal.ErrSealed) {
			t.Errorf("the revoked key opens new tags: %v", err)
		}
		if tags, err := f.post.Tags(ctx, who, k, id); err != nil || len(tags) != 2 || tags["amount"] != secretWord {
			t.Errorf("tags = %v, %v", tags, err)
		}
		if list, err := f.post.SavedContacts(ctx, who, k); err != nil || len(list) != 1 || list[0].Name != secretWord || list[0].ID != saved.ID {
			t.Errorf("contacts = %+v, %v", list, err)
		}

		many := map[string]string{}
		for i := range 49 {
			many[fmt.Sprint(i)] = "x"
		}
		if _, err := f.post.ChangeTags(ctx, who, k, id, many); !errors.Is(err, directory.ErrInvalid) {
			t.Errorf("51 tags: %v", err)
		}
		for _, bad := range []mailbox.SavedContact{{Name: "x", Address: "no"}, {Name: "", Address: "a@example.com"}, {Name: "a\nb", Address: "a@example.com"}, {Name: "x", Address: "a@example.com", Tags: []string{""}}} {
			_, err := f.post.SaveContact(ctx, who, k, bad)
			var field *mail.FieldError
			if !errors.Is(err, directory.ErrInvalid) && !errors.As(err, &field) {
				t.Errorf("%+v: %v", bad, err)
			}
		}
		if _, err := f.post.Tags(ctx, who, k, "msg_AAAAAAAAAAAAAAAAAAAAAAAAAA"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("no message: %v", err)
		}

		now := time.Now().UTC()
		traffic, err := f.post.Traffic(ctx, who, k, now.Add(-time.Hour), now.Add(time.Hour))
		if err != nil || len(traffic) != 1 || traffic[0].Messages != 1 || traffic[0].Direction != message.In || traffic[0].Day.After(now) || now.Sub(traffic[0].Day) > 25*time.Hour {
			t.Errorf("traffic = %+v, %v", traffic, err)
		}

		if _, err := f.post.Label(ctx, who, k, []string{id}, []string{mailbox.LabelTrash}, nil); err != nil {
			t.Fatal(err)
		}
		f.exec(t, `update message set trashed_at = trashed_at - $1`, int64(31*24*3600*1e6))
		if n, err := f.post.EmptyTrash(ctx); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if n := f.count(t, `select count(*) from inbox_note where kind = 'tags'`); n != 0 {
			t.Errorf("%d tags outlive their message", n)
		}
	})
}
