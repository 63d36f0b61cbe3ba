package mailbox_test

import (
	"errors"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestApproveAndAllow: an approval can let later mail to its recipient pass, and nothing
// else.
func TestApproveAndAllow(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.judgedBy(t, modes{})
		ctx := t.Context()
		_, agent := f.inMode(t, "analyst", policy.GatedSend)
		n := 0
		send := func(to string, bcc []string, files ...mail.Attachment) oversight.Action {
			t.Helper()
			n++
			p, err := f.post.Send(ctx, agent, "mcp", mailbox.Outgoing{Draft: mail.Draft{To: []string{to}, Bcc: bcc, Subject: "Report", Text: time.Duration(n).String(), Attachments: files}})
			if err != nil {
				t.Fatal(err)
			}
			a, err := f.gate.Action(ctx, f.person, p.ID)
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		approve := func(who auth.Principal, a oversight.Action, w oversight.Allowance) error {
			return f.gate.Decide(ctx, who, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true, Seen: a.Grave(), Allow: &w})
		}
		week := time.Now().Add(7 * 24 * time.Hour)
		a := send("bob@globex.example", nil)
		reviewer := f.person
		reviewer.Role, reviewer.ID = auth.Reviewer, "rita"
		for _, tt := range []struct {
			name string
			who  auth.Principal
			w    oversight.Allowance
			want error
		}{
			{"nobody", f.person, oversight.Allowance{Until: week}, oversight.ErrAllowance},
			{"both", f.person, oversight.Allowance{Address: "bob@globex.example", Domain: "globex.example", Until: week}, oversight.ErrAllowance},
			{"for ever", f.person, oversight.Allowance{Address: "bob@globex.example"}, oversight.ErrAllowance},
			{"for too long", f.person, oversight.Allowance{Address: "bob@globex.example", Until: time.Now().Add(91 * 24 * time.Hour)}, oversight.ErrAllowance},
			{"another recipient", f.person, oversight.Allowance{Address: "eve@evil.test", Until: week}, oversight.ErrAllowance},
			{"another domain", f.person, oversight.Allowance{Domain: "evil.test", Until: week}, oversight.ErrAllowance},
			{"a domain as an address", f.person, oversight.Allowance{Address: "*@globex.example", Until: week}, oversight.ErrAllowance},
			{"a reviewer", reviewer, oversight.Allowance{Address: "bob@globex.example", Until: week}, auth.ErrForbidden},
		} {
			if err := approve(tt.who, a, tt.w); !errors.Is(err, tt.want) {
				t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
			}
		}
		if now, err := f.gate.Action(ctx, f.person, a.ID); err != nil || now.State != oversight.Pending {
			t.Fatalf("after refused allowances it is %s, %v", now.State, err)
		}
		hidden := send("carl@globex.example", []string{"eve@evil.test"})
		if err := approve(f.person, hidden, oversight.Allowance{Address: "carl@globex.example", Until: week}); !errors.Is(err, oversight.ErrAllowance) {
			t.Errorf("with a hidden recipient: %v", err)
		}
		if err := approve(f.person, a, oversight.Allowance{Address: "bob@globex.example", Until: week}); err != nil {
			t.Fatal(err)
		}
		if b := send("bob@globex.example", nil); b.State != oversight.Approved {
			t.Errorf("the next mail is %s", b.State)
		}
		if b := send("bob@globex.example", nil, mail.Attachment{Name: "a.csv", Data: []byte("1")}); b.State != oversight.Pending {
			t.Errorf("a mail with a file is %s, though the entry is without files", b.State)
		}
		if b := send("dora@globex.example", nil); b.State != oversight.Pending {
			t.Errorf("a mail to somebody else is %s", b.State)
		}
	})
}
