package mailbox_test

import (
	"errors"
	"fmt"
	"testing"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/quota"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestSignupsCountApart: an account that anybody made by signing up takes nothing of
// what the project may send, and a bounded place in its queue, also after its own
// credential has left the inbox.
func TestSignupsCountApart(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		own, agent, _ := f.inbox(t, "analyst")
		account := func(who auth.Principal, name string) (directory.Inbox, auth.Principal) {
			_, token, err := f.post.Keys.NewAccount(ctx, who, name)
			if err != nil {
				t.Fatal(err)
			}
			made, err := auth.CheckKey(ctx, db, token)
			if err != nil {
				t.Fatal(err)
			}
			b, key, err := f.post.CreateInbox(ctx, made, directory.NewInbox{Address: name}, token)
			if err != nil {
				t.Fatal(err)
			}
			holder, err := auth.CheckKey(ctx, db, key)
			if err != nil {
				t.Fatal(err)
			}
			return b, holder
		}
		system := auth.Principal{Kind: auth.System, ID: auth.Signup, Project: f.project.Project}
		first, one := account(system, "first")
		second, two := account(system, "second")
		managed, three := account(f.person, "managed")
		f.exec(t, `delete from inbox_key where inbox_id = $1 and credential_id in (select id from credential where account)`, first.ID)
		if err := f.post.Quotas.SetSending(ctx, f.person, "", quota.Sending{Limits: quota.Limits{PerDay: 3}}); err != nil {
			t.Fatal(err)
		}
		n := 0
		send := func(b directory.Inbox, who auth.Principal) error {
			n++
			_, err := f.post.Send(ctx, who, "rest", mailbox.Outgoing{Inbox: b.ID, Draft: mail.Draft{To: []string{"bob@example.com"}, Subject: fmt.Sprint(n), Text: fmt.Sprint(n)}})
			return err
		}
		for i, s := range []struct {
			b    directory.Inbox
			who  auth.Principal
			want error
		}{
			{first, one, nil},
			{second, two, nil},
			{first, one, nil},
			{second, two, quota.ErrLimit},
			{first, one, quota.ErrLimit},
			{own, agent, nil},
			{managed, three, nil},
			{own, agent, nil},
			{managed, three, quota.ErrLimit},
			{own, agent, quota.ErrLimit},
		} {
			if err := send(s.b, s.who); !errors.Is(err, s.want) {
				t.Errorf("send %d from %s: %v, want %v", i, s.b.Address, err, s.want)
			}
		}
		if err := f.post.Quotas.SetSending(ctx, f.person, "", quota.Sending{Limits: quota.Limits{PerDay: quota.Unlimited}}); err != nil {
			t.Fatal(err)
		}
		f.post.LetWait(4)
		for i, want := range []error{nil, oversight.ErrFull, oversight.ErrFull} {
			if err := send(second, two); !errors.Is(err, want) {
				t.Errorf("waiting %d: %v, want %v", i, err, want)
			}
		}
		if err := send(own, agent); err != nil {
			t.Errorf("the project's own is refused with the accounts': %v", err)
		}
	})
}
