package mailbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// filed returns the UIDs and IDs of a folder.
func (f *fixture) filed(t *testing.T, who auth.Principal, k *seal.Key, folder mailbox.Folder) (uids []uint32, ids []string, l mailbox.Filing) {
	t.Helper()
	l, err := f.post.Filing(t.Context(), who, k, folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range l.Messages {
		uids, ids = append(uids, d.UID), append(ids, d.ID)
		if d.UID >= l.Next {
			t.Errorf("%s: uid %d, and the next is %d", folder, d.UID, l.Next)
		}
	}
	return uids, ids, l
}

// TestFolderNumbers: the numbers of a folder only grow, in the order in which
// messages come into it; each message is in one folder.
func TestFolderNumbers(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, key := f.inbox(t, "analyst")
		k, err := f.post.Keys.Open(ctx, who, key, "")
		if err != nil {
			t.Fatal(err)
		}
		arrive := func() {
			t.Helper()
			if err := f.post.Receive(ctx, mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: incoming}, Remote: "192.0.2.1"}); err != nil {
				t.Fatal(err)
			}
		}
		label := func(id string, add, remove []string) {
			t.Helper()
			if _, err := f.post.Label(ctx, who, k, []string{id}, add, remove); err != nil {
				t.Fatal(err)
			}
		}
		want := func(folder mailbox.Folder, want ...uint32) []string {
			t.Helper()
			uids, ids, _ := f.filed(t, who, k, folder)
			if !slices.Equal(uids, want) {
				t.Errorf("%s has %v, want %v", folder, uids, want)
			}
			return ids
		}
		if _, _, l := f.filed(t, who, k, mailbox.FolderInbox); l.Next != 1 || int64(l.Validity) != b.Created.Unix() {
			t.Errorf("an empty folder is %+v", l)
		}
		for range 3 {
			arrive()
		}
		ids := want(mailbox.FolderInbox, 1, 2, 3)
		before, err := f.post.Changes(ctx, who, b.ID)
		if err != nil {
			t.Fatal(err)
		}
		label(ids[1], []string{mailbox.LabelArchived}, nil)
		if after, err := f.post.Changes(ctx, who, b.ID); err != nil || after <= before {
			t.Errorf("changes %d, then %d, %v", before, after, err)
		}
		want(mailbox.FolderInbox, 1, 3)
		want(mailbox.FolderArchive, 1)
		label(ids[1], nil, []string{mailbox.LabelArchived})
		arrive()
		if back := want(mailbox.FolderInbox, 1, 3, 4, 5); back[2] != ids[1] {
			t.Errorf("the message came back as another: %v, %v", back, ids)
		}
		want(mailbox.FolderArchive)
		// The largest number leaves: it is not given again.
		last := want(mailbox.FolderInbox, 1, 3, 4, 5)[3]
		label(last, []string{mailbox.LabelTrash}, nil)
		arrive()
		want(mailbox.FolderInbox, 1, 3, 4, 6)
		want(mailbox.FolderTrash, 1)
		label(last, []string{mailbox.LabelArchived}, nil) // the trash comes first
		want(mailbox.FolderArchive)
		want(mailbox.FolderTrash, 2)
		label(ids[0], []string{mailbox.LabelRead, "mine"}, nil)
		if _, _, l := f.filed(t, who, k, mailbox.FolderInbox); !slices.Equal(l.Messages[0].Labels, []string{"mine", "read"}) || l.Messages[0].UID != 1 {
			t.Errorf("with labels it is %+v", l.Messages[0])
		}

		// A draft is another message with each change.
		d, err := f.post.Drafts.Save(ctx, who, mailbox.Outgoing{Draft: mail.Draft{Subject: "s", Text: "one"}})
		if err != nil {
			t.Fatal(err)
		}
		want(mailbox.FolderDrafts, 1)
		if d, err = f.post.Drafts.Update(ctx, who, d.ID, d.Version, mailbox.Outgoing{Draft: mail.Draft{Subject: "s", Text: "two"}}); err != nil {
			t.Fatal(err)
		}
		want(mailbox.FolderDrafts, 2)
		before, _ = f.post.Changes(ctx, who, b.ID)
		if err := f.post.Drafts.Delete(ctx, who, b.ID, d.ID, 0); err != nil {
			t.Fatal(err)
		}
		want(mailbox.FolderDrafts)
		if after, _ := f.post.Changes(ctx, who, b.ID); after <= before {
			t.Error("a deleted draft is no change")
		}

		// Nobody else's folders.
		_, stranger, _ := f.inbox(t, "stranger")
		if _, err := f.post.Filing(ctx, stranger, k, mailbox.FolderInbox); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("another inbox's key: %v", err)
		}
		if _, err := f.post.Changes(ctx, stranger, b.ID); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("another inbox's key: %v", err)
		}
		if _, err := f.post.Filing(ctx, who, k, "quarantine"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("quarantine: %v", err)
		}
	})
}

// TestFolderNumbersOfTwo: programs that look at the same time, while mail comes
// and goes, see each number for one message alone.
func TestFolderNumbersOfTwo(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, key := f.inbox(t, "analyst")
		k, err := f.post.Keys.Open(ctx, who, key, "")
		if err != nil {
			t.Fatal(err)
		}
		const n = 12
		done, seen := make(chan error, 3), make(chan map[uint32]string, 2)
		for range 2 {
			go func() {
				got := map[uint32]string{}
				defer func() { seen <- got }()
				for len(got) < n {
					l, err := f.post.Filing(context.WithoutCancel(ctx), who, k, mailbox.FolderInbox)
					if err != nil {
						done <- err
						return
					}
					for _, d := range l.Messages {
						if was, ok := got[d.UID]; ok && was != d.ID {
							done <- fmt.Errorf("%d is %s and %s", d.UID, was, d.ID)
							return
						}
						got[d.UID] = d.ID
					}
				}
				done <- nil
			}()
		}
		go func() {
			for range n {
				if err := f.post.Receive(context.WithoutCancel(ctx), mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: incoming}, Remote: "192.0.2.1"}); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
		for range 3 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		one, two := <-seen, <-seen
		for uid, id := range one {
			if two[uid] != id {
				t.Errorf("%d is %s for one and %s for the other", uid, id, two[uid])
			}
		}
	})
}
