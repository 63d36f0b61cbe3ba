package mailbox_test

import (
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"

	"postern/internal/audit"
	"postern/internal/directory"
	"postern/internal/leak"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/scan"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestFlagsAreKindsOfFindings: a policy can call every content flag grave.
func TestFlagsAreKindsOfFindings(t *testing.T) {
	for _, f := range leak.Flags() {
		if policy.FindingMeans(string(f)) == "" {
			t.Errorf("%s is no kind of finding", f)
		}
	}
	for _, c := range scan.Categories() {
		if policy.FindingMeans(string(c)) == "" {
			t.Errorf("%s is no kind of finding", c)
		}
	}
}

// TestGraveFindingsNeedTheirTick: each grave finding of a mail must be ticked, whatever
// becomes of the policy or of the row meanwhile, and the record keeps what was ticked.
func TestGraveFindingsNeedTheirTick(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.judgedBy(t, modes{})
		ctx := t.Context()
		_, agent, _ := f.inbox(t, "analyst")
		propose := func(d mail.Draft) oversight.Action {
			t.Helper()
			p, err := f.post.Send(ctx, agent, "mcp", mailbox.Outgoing{Draft: d})
			if err != nil || p.State != oversight.Pending {
				t.Fatalf("Send = %+v, %v", p, err)
			}
			a, err := f.gate.Action(ctx, f.person, p.ID)
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		approve := func(a oversight.Action, seen ...string) error {
			return f.gate.Decide(ctx, f.person, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true, Seen: seen})
		}
		f.inbox(t, "boss")
		if _, _, err := f.post.CreateInbox(ctx, f.other, directory.NewInbox{Address: "eve"}, ""); err != nil {
			t.Fatal(err)
		}
		// The project comes to know a customer and an account.
		first := propose(mail.Draft{To: []string{"accounts@globex.example"}, Subject: "Invoice 1", Text: "Please pay to DE89 3704 0044 0532 0130 00"})
		if ids := first.Grave(); len(ids) != 0 {
			t.Fatalf("the first mail has grave findings %v", ids)
		}
		if err := approve(first); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)

		for _, tt := range []struct {
			name  string
			draft mail.Draft
			want  []string
		}{
			{"a digit for a letter", mail.Draft{To: []string{"accounts@g1obex.example"}, Subject: "a", Text: "a"}, []string{"lookalike:g1obex.example"}},
			{"a Cyrillic letter", mail.Draft{To: []string{"accounts@xn--glbex-8ve.example"}, Subject: "b", Text: "b"}, []string{"lookalike:xn--glbex-8ve.example"}},
			{"the known one", mail.Draft{To: []string{"other@globex.example"}, Subject: "c", Text: "c"}, nil},
			{"hidden outside", mail.Draft{To: []string{"bob@globex.example"}, Bcc: []string{"eve@evil.test"}, Subject: "d", Text: "d"}, []string{"hidden_recipient:eve@evil.test"}},
			{"hidden inside", mail.Draft{To: []string{"bob@globex.example"}, Bcc: []string{"boss@agents.test"}, Subject: "e", Text: "e"}, nil},
			{"hidden recipient at an unused address", mail.Draft{To: []string{"bob@globex.example"}, Bcc: []string{"free@agents.test"}, Subject: "e2", Text: "e"}, []string{"hidden_recipient:free@agents.test"}},
			{"hidden, an inbox of another project", mail.Draft{To: []string{"bob@globex.example"}, Bcc: []string{"Eve@agents.test"}, Subject: "e3", Text: "e"}, []string{"hidden_recipient:Eve@agents.test"}},
			{"another account", mail.Draft{To: []string{"bob@globex.example"}, Subject: "f", Text: "Pay to GB82 WEST 1234 5698 7654 32"}, []string{"second_account:GB…5432"}},
			{"two accounts", mail.Draft{
				To: []string{"bob@globex.example"}, Subject: "g", Text: "Pay to DE89 3704 0044 0532 0130 00. DE89 3704 0044 0532 0130 00",
				Attachments: []mail.Attachment{{Name: "invoice.txt", Data: []byte("IBAN GB82 WEST 1234 5698 7654 32")}},
			}, []string{"second_account:GB…5432"}},
			{"the known account", mail.Draft{To: []string{"bob@globex.example"}, Subject: "h", Text: "Pay to DE89 3704 0044 0532 0130 00"}, nil},
			{"a secret", mail.Draft{To: []string{"bob@globex.example"}, Subject: "i", Text: "key ghp_abcdefghijklmnopqrstuvwxyz0123456789"}, []string{"secret:github_token in text"}},
		} {
			a := propose(tt.draft)
			ids := a.Grave()
			if !slices.Equal(ids, tt.want) {
				t.Errorf("%s: grave findings %q, want %q", tt.name, ids, tt.want)
				continue
			}
			if len(ids) == 0 {
				continue
			}
			v, err := f.gate.Show(a)
			if err != nil || len(v.Findings) == 0 || v.Findings[0].Tick == "" {
				t.Errorf("%s: the view has findings %+v, %v", tt.name, v.Findings, err)
			}
			if err := approve(a); !errors.Is(err, oversight.ErrUnseen) || !strings.Contains(err.Error(), ids[0]) {
				t.Errorf("%s: an approval without its tick: %v, want ErrUnseen that names it", tt.name, err)
			}
			if err := approve(a, "lookalike:other.example"); !errors.Is(err, oversight.ErrUnseen) {
				t.Errorf("%s: an approval with another tick: %v", tt.name, err)
			}
			// The attack: the policy is changed after the action was judged.
			none, err := policy.Parse([]byte("grave: []\nrules: []\n"))
			if err != nil {
				t.Fatal(err)
			}
			f.judgedBy(t, documented{none})
			if err := approve(a); !errors.Is(err, oversight.ErrUnseen) {
				t.Errorf("%s: under another policy: %v", tt.name, err)
			}
			f.judgedBy(t, modes{})
			if err := approve(a, ids...); err != nil {
				t.Errorf("%s: ticked: %v", tt.name, err)
				continue
			}
			votes, err := f.gate.Votes(ctx, f.person, a.ID)
			if err != nil || len(votes) != 1 || !slices.Equal(votes[0].Seen, ids) {
				t.Errorf("%s: votes %+v, %v, want the ticks %q", tt.name, votes, err, ids)
			}
			var entries []audit.Entry
			err = audit.View(ctx, f.db, func(tx *store.Tx) error {
				entries, err = audit.List(ctx, tx, audit.Query{Object: a.ID, Verb: string(audit.ActionApprove)})
				return err
			})
			if err != nil || len(entries) != 1 || entries[0].Details()["seen"] != strings.Join(ids, "\n") {
				t.Errorf("%s: the record has %+v, %v", tt.name, entries, err)
			}
		}
	})
}

// TestManyFindingsHideNone: neither the ninth secret nor an account that ends as another one
// is left out of what a reviewer ticks.
func TestManyFindingsHideNone(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.judgedBy(t, modes{})
	ctx := t.Context()
	_, agent, _ := f.inbox(t, "analyst")
	findings := func(text string, files ...mail.Attachment) (all []oversight.Finding) {
		t.Helper()
		p, err := f.post.Send(ctx, agent, "mcp", mailbox.Outgoing{Draft: mail.Draft{To: []string{"bob@globex.example"}, Subject: "s", Text: text, Attachments: files}})
		if err != nil {
			t.Fatal(err)
		}
		a, err := f.gate.Action(ctx, f.person, p.ID)
		if err != nil {
			t.Fatal(err)
		}
		return a.Findings()
	}
	shows := func(what, word string, all []oversight.Finding) {
		t.Helper()
		ids := map[string]bool{}
		found := false
		for _, f := range all {
			if ids[f.ID] {
				t.Errorf("%s: two findings have the ID %q", what, f.ID)
			}
			ids[f.ID] = true
			found = found || f.Tick != "" && strings.Contains(f.Title+" "+f.Text, word)
		}
		if !found {
			t.Errorf("%s: no tick has %q: %+v", what, word, all)
		}
	}
	// Two accounts that end alike, beside the one that is named twice.
	alike := findings("DE89 3704 0044 0532 0130 00, DE89 3704 0044 0532 0130 00, " + iban("DE", "100000000000543210") + ", " + iban("DE", "200000000000543210"))
	shows("the first that ends alike", grouped(iban("DE", "100000000000543210")), alike)
	shows("the second that ends alike", grouped(iban("DE", "200000000000543210")), alike)
	var many strings.Builder
	many.WriteString("DE89 3704 0044 0532 0130 00, DE89 3704 0044 0532 0130 00")
	for i := range 12 {
		many.WriteString(", " + iban("DE", fmt.Sprintf("3000000000%08d", i)))
	}
	shows("the last of many accounts", grouped(iban("DE", "300000000000000011")), findings(many.String()))
	var files []mail.Attachment
	for i := range 12 {
		files = append(files, mail.Attachment{Name: fmt.Sprintf("key%d.txt", i), Data: fmt.Appendf(nil, "key ghp_%02dcdefghijklmnopqrstuvwxyz0123456789", i)})
	}
	shows("the last of many secrets", "key11.txt", findings("see the files", files...))
}

// iban returns a valid account number of a country (ISO 13616).
func iban(country, rest string) string {
	var digits strings.Builder
	for _, c := range rest + country + "00" {
		if c >= 'A' {
			fmt.Fprint(&digits, int(c-'A')+10)
		} else {
			digits.WriteRune(c)
		}
	}
	n, _ := new(big.Int).SetString(digits.String(), 10)
	return fmt.Sprintf("%s%02d%s", country, 98-new(big.Int).Mod(n, big.NewInt(97)).Int64(), rest)
}

// grouped writes a number in groups of four.
func grouped(s string) string {
	var parts []string
	for ; len(s) > 4; s = s[4:] {
		parts = append(parts, s[:4])
	}
	return strings.Join(append(parts, s), " ")
}

// TestChangedRowKeepsItsTicks: somebody who can write the database removes the findings
// of an action.
func TestChangedRowKeepsItsTicks(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.judgedBy(t, modes{})
		ctx := t.Context()
		_, agent, _ := f.inbox(t, "analyst")
		p, err := f.post.Send(ctx, agent, "mcp", mailbox.Outgoing{Draft: mail.Draft{To: []string{"bob@globex.example"}, Bcc: []string{"eve@evil.test"}, Subject: "d", Text: "d"}})
		if err != nil {
			t.Fatal(err)
		}
		err = db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update action set request = '{"kind":"email.send","to":["bob@globex.example","eve@evil.test"]}' where id = $1`, p.ID)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		err = f.gate.Decide(ctx, f.person, oversight.Decision{ID: p.ID, Version: p.Version, Digest: p.Hex(), Approve: true})
		if !errors.Is(err, oversight.ErrStale) {
			t.Fatalf("approval of a changed row: %v, want that it is asked again", err)
		}
		a, err := f.gate.Action(ctx, f.person, p.ID)
		if err != nil || a.State != oversight.Pending || !slices.Contains(a.Grave(), "hidden_recipient:eve@evil.test") {
			t.Fatalf("got %s with grave findings %q, %v", a.State, a.Grave(), err)
		}
		d := oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true}
		if err := f.gate.Decide(ctx, f.person, d); !errors.Is(err, oversight.ErrUnseen) {
			t.Errorf("without the tick: %v", err)
		}
		d.Seen = a.Grave()
		if err := f.gate.Decide(ctx, f.person, d); err != nil {
			t.Errorf("with the tick: %v", err)
		}
	})
}
